#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several runs of tools/gpu_run.sh beside each other, on a host with several GPUs.

    python tools/gpu_lanes.py '0: engines sync' '1: soak 5' '2: bench' '0,1: parallel'

An argument is a lane: its GPUs, then steps of gpu_run.sh with their arguments. Lanes
run at the same time, each with its share of the processors and compile caches of its
own. One whose GPUs an earlier lane has waits for that lane, and takes over its
processors. Each lane's output goes to LOGS/laneN.log; in the end all result files are
in RESULTS, entries of one file from several lanes merged.

Lanes share the host's memory and clock: figures of one lane are compared with its own
control, not with another lane's.

Exit status: 0 all steps passed; 1 some did not, or were stopped at the limit; 2 a bad
argument.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.gpu import results  # noqa: E402

RUN = ROOT / "tools" / "gpu_run.sh"


@dataclass(frozen=True)
class Lane:
    """number: from 1. gpus: indices of its GPUs. steps: arguments of gpu_run.sh.
    after: numbers of the lanes it waits for. cores: processors it runs on."""

    number: int
    gpus: tuple[int, ...]
    steps: tuple[str, ...]
    after: tuple[int, ...]
    cores: tuple[int, ...]


def parse_lane(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """GPUs and steps of "0,1: parallel". Raises ValueError."""
    names, _, steps = text.partition(":")
    try:
        gpus = tuple(int(name) for name in names.split(","))
    except ValueError:
        gpus = ()
    if not gpus or min(gpus) < 0 or not steps.split():
        raise ValueError(
            f"lane {text!r}; expected GPUS: STEP..., as in '0,1: parallel'"
        )
    return gpus, tuple(steps.split())


def plan(texts: Sequence[str], cores: Sequence[int]) -> list[Lane]:
    """The lanes, with their share of the processors. Raises ValueError."""
    parsed = [parse_lane(text) for text in texts]
    after = [
        tuple(
            earlier + 1
            for earlier in range(number)
            if set(parsed[earlier][0]) & set(parsed[number][0])
        )
        for number in range(len(parsed))
    ]
    first = [number for number, waits in enumerate(after) if not waits]
    share = len(cores) // len(first)
    if share == 0:
        raise ValueError(
            f"{len(first)} lanes at a time; allowed: {len(cores)}, a core each"
        )
    lanes: list[Lane] = []
    for number, (gpus, steps) in enumerate(parsed):
        if after[number]:
            taken = {core for lane in after[number] for core in lanes[lane - 1].cores}
            own = tuple(sorted(taken))
        else:
            start = first.index(number) * share
            own = tuple(cores[start : start + share])
        lanes.append(Lane(number + 1, gpus, steps, after[number], own))
    return lanes


class Runner:
    """Runs lanes below `work`; each has a folder of its own there."""

    def __init__(self, lanes: Sequence[Lane], work: Path, logs: Path) -> None:
        self._work, self._logs = work, logs
        self._done = {lane.number: threading.Event() for lane in lanes}
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()
        self.status: dict[int, int] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), daemon=True)
            for lane in lanes
        ]

    def results_of(self, number: int) -> Path:
        return self._work / f"lane{number}" / "results"

    def run(self, seconds: float | None) -> bool:
        """Whether all lanes came to their end in time."""
        for thread in self._threads:
            thread.start()
        timer = threading.Timer(seconds, self._stop) if seconds else None
        if timer:
            timer.start()
        for thread in self._threads:
            thread.join()
        if timer:
            timer.cancel()
        return not self._stopped.is_set()

    def _stop(self) -> None:
        self._stopped.set()
        for process in list(self._running.values()):
            # Steps are process groups of their own.
            try:
                family = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            for one in family:
                one.kill()
            process.kill()

    def _run(self, lane: Lane) -> None:
        for number in lane.after:
            self._done[number].wait()
        try:
            if not self._stopped.is_set():
                self.status[lane.number] = self._run_steps(lane)
        finally:
            self._done[lane.number].set()

    def _run_steps(self, lane: Lane) -> int:
        folder = self._work / f"lane{lane.number}"
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, lane.gpus)),
            "NWOR_RESULTS": str(self.results_of(lane.number)),
        }
        for name in (
            "TMPDIR",
            "VLLM_CACHE_ROOT",
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
        ):
            place = folder / name.lower()
            place.mkdir(parents=True, exist_ok=True)
            variables[name] = str(place)
        env = {k: v for k, v in os.environ.items() if k != "OUT"} | variables
        log = self._logs / f"lane{lane.number}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [str(RUN), *lane.steps],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.sched_setaffinity(process.pid, lane.cores)
            self._running[lane.number] = process
            return process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lanes", nargs="+", metavar="GPUS: STEP...")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder (.)")
    parser.add_argument("--seconds", type=float, help="stop all lanes after that long")
    arguments = parser.parse_args(argv)
    try:
        lanes = plan(arguments.lanes, sorted(os.sched_getaffinity(0)))
    except ValueError as error:
        parser.error(str(error))
    arguments.logs.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="nwor-lanes-"))
    runner = Runner(lanes, work, arguments.logs)
    in_time = runner.run(arguments.seconds)
    folders = [runner.results_of(lane.number) for lane in lanes]
    written = results.merge([f for f in folders if f.is_dir()], arguments.results)
    for lane in lanes:
        status = runner.status.get(lane.number, "not run")
        print(f"lane {lane.number}, {' '.join(lane.steps)}: exit status {status}")
    if not in_time:
        print(f"stopped after {arguments.seconds:g} s")
    print(f"results in {arguments.results}: {' '.join(written)}")
    passed = [runner.status.get(lane.number) == 0 for lane in lanes]
    return 0 if in_time and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
