#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several runs of tools/gpu_run.sh beside each other, on a host with several GPUs.

    python tools/gpu/lanes.py '0: engines sync' '1: soak 5' '2,3: parallel'

An argument is a lane: its GPUs, then steps of gpu_run.sh with their arguments. Each
lane has an equal share of the processors; its output goes to LOGS/laneN.log. Figures
of a lane are compared with its own control, not with another lane's.

Exit status: 0 all steps passed; 1 some did not, or were stopped; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tools" / "gpu_run.sh"
LANE = re.compile(r"(?P<gpus>\d+(,\d+)*): *(?P<steps>\S.*)")


def start(lane: re.Match[str], cores: str, results: Path, log: Path) -> psutil.Popen:
    """Starts a lane on these processors, "0,2"."""
    env = {k: v for k, v in os.environ.items() if k != "OUT"}
    env |= {"CUDA_VISIBLE_DEVICES": lane["gpus"], "NWOR_RESULTS": str(results)}
    command = ["taskset", "-c", cores, RUN, *lane["steps"].split()]
    null, both = subprocess.DEVNULL, subprocess.STDOUT
    with log.open("wb") as sink:
        options = {"cwd": ROOT, "env": env, "stdin": null, "stderr": both}
        return psutil.Popen(command, stdout=sink, **options)


def kill_family(process: psutil.Popen) -> None:
    """Ends a process with all that it started, sessions of their own too. Each is
    halted before its children are looked for: what is halted starts nothing."""
    family: list[psutil.Process] = [process]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.suspend()
            family += one.children()
    for one in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lanes", nargs="+", metavar="GPUS: STEP...")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder (.)")
    parser.add_argument("--seconds", type=float, help="stop all lanes after that long")
    arguments = parser.parse_args(argv)
    lanes = []
    for text in arguments.lanes:
        if (lane := LANE.fullmatch(text)) is None:
            parser.error(f"lane {text!r}; expected GPUS: STEP..., as in '0,1: engines'")
        lanes.append(lane)
    gpus = [gpu for lane in lanes for gpu in lane["gpus"].split(",")]
    if len(set(gpus)) != len(gpus):
        parser.error(f"GPUs {gpus}; expected each in one lane")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(lanes):
        most = f"expected at most {len(cores)}, a processor each"
        parser.error(f"{len(lanes)} lanes; {most}")
    for folder in (arguments.results, arguments.logs):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    limit = time.monotonic() + (arguments.seconds or float("inf"))
    running: list[psutil.Popen] = []
    stopped = ""
    try:
        for number, lane in enumerate(lanes):
            log = arguments.logs / f"lane{number + 1}.log"
            own = ",".join(map(str, cores[number :: len(lanes)]))
            running.append(start(lane, own, arguments.results.resolve(), log))
        while any(process.poll() is None for process in running):
            if time.monotonic() > limit:
                stopped = f"stopped after {arguments.seconds:g} s"
                break
            time.sleep(0.2)
    except KeyboardInterrupt:
        stopped = "stopped by a signal"
    finally:
        for process in running:
            kill_family(process)
    for lane, process in zip(lanes, running, strict=False):
        print(f"{lane.string}: exit status {process.returncode}")
    if stopped:
        print(stopped)
    return int(bool(stopped) or any(process.returncode for process in running))


if __name__ == "__main__":
    sys.exit(main())
