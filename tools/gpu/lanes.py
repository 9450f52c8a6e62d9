#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several runs of tools/gpu_run.sh beside each other, on a host with several GPUs.

    python tools/gpu/lanes.py '0: engines sync' '1: soak 5' '2: bench' '0,1: parallel'

An argument is a lane: its GPUs, then steps of gpu_run.sh with their arguments. Lanes
run at the same time, each with compile caches of its own and on the processors of its
GPUs, among which all processors are shared out. One whose GPUs an earlier lane has
waits for that lane. Each lane's output goes to LOGS/laneN.log; in the end, also when
stopped by a signal or the limit, all result files are in RESULTS, entries of one file
from several lanes merged.

Lanes share the host's memory and clock: figures of one lane are compared with its own
control, not with another lane's.

Exit status: 0 all steps passed; 1 some did not, or were stopped; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.gpu import results  # noqa: E402

RUN = ROOT / "tools" / "gpu_run.sh"
POLL_SECONDS = 0.2


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
    all_gpus = sorted({gpu for gpus, _ in parsed for gpu in gpus})
    share = len(cores) // len(all_gpus)
    if share == 0:
        raise ValueError(
            f"{len(all_gpus)} GPUs for {len(cores)} processors; expected at least one "
            "processor for each"
        )
    lanes: list[Lane] = []
    for gpus, steps in parsed:
        after = tuple(lane.number for lane in lanes if set(lane.gpus) & set(gpus))
        starts = [share * all_gpus.index(gpu) for gpu in sorted(gpus)]
        own = tuple(core for start in starts for core in cores[start : start + share])
        lanes.append(Lane(len(lanes) + 1, gpus, steps, after, own))
    return lanes


class Runner:
    """Runs lanes below `work`; each has a folder of its own there."""

    def __init__(self, lanes: Sequence[Lane], work: Path, logs: Path) -> None:
        self._waiting = list(lanes)
        self._work, self._logs = work, logs
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.status: dict[int, int] = {}

    def results_of(self, number: int) -> Path:
        return self._work / f"lane{number}" / "results"

    def run(self, seconds: float | None) -> str | None:
        """Runs all lanes; returns why they were stopped, if they were."""
        limit = time.monotonic() + (seconds or math.inf)
        try:
            while self._waiting or self._running:
                if time.monotonic() > limit:
                    return f"stopped after {seconds:g} s"
                self._step()
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            return "stopped by a signal"
        finally:
            for process in self._running.values():
                kill_family(process)
        return None

    def _step(self) -> None:
        for number, process in list(self._running.items()):
            if process.poll() is not None:
                self.status[number] = process.returncode
                del self._running[number]
        for lane in list(self._waiting):
            if all(number in self.status for number in lane.after):
                self._waiting.remove(lane)
                self._running[lane.number] = self._start(lane)

    def _start(self, lane: Lane) -> subprocess.Popen[bytes]:
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
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, lane.cores)
        return process


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started, sessions of their own too. All are
    halted before any is killed: what is halted starts nothing, and loses no child."""
    halted: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        new = [parent]
        while new:
            for one in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.suspend()
            halted += new
            new = [p for p in parent.children(recursive=True) if p not in halted]
    for one in reversed(halted):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def interrupt(number: int, frame: object) -> None:
    """A signal handler: SIGTERM as Ctrl-C."""
    raise KeyboardInterrupt


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
    signal.signal(signal.SIGTERM, interrupt)
    stopped = runner.run(arguments.seconds)
    folders = [runner.results_of(lane.number) for lane in lanes]
    written = results.merge([f for f in folders if f.is_dir()], arguments.results)
    for lane in lanes:
        status = runner.status.get(lane.number, "not run")
        print(f"lane {lane.number}, {' '.join(lane.steps)}: exit status {status}")
    if stopped:
        print(stopped)
    print(f"results in {arguments.results}: {' '.join(written)}")
    passed = [runner.status.get(lane.number) == 0 for lane in lanes]
    return 0 if not stopped and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
