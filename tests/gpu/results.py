# SPDX-License-Identifier: Apache-2.0
"""Saves results of the GPU tests, with environment and command.

A file has one entry for each engine, with its own environment; entries of engines that
were not run again are kept. NWOR_GPU_RESULTS names the folder; without it nothing is
written.
"""

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import environment, records

REPO = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "NWOR_GPU_RESULTS"


def save(name: str, kind: str, command: str, entries: dict[str, Any]) -> None:
    """Adds `entries` to those in the file `name`, there and in the repository's
    results/."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not entries:
        return
    where = environment.describe("cuda", REPO)
    name = environment.of_release(name.removesuffix(".json"), where) + ".json"
    path = Path(folder) / name
    with open(__file__) as lock:
        # Concurrent GPU steps of one checkout save to the same files.
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, Any] = {}
        for source in (REPO / "results" / name, path):
            if source.is_file():
                known |= json.loads(source.read_text(encoding="utf-8"))["entries"]
        for key, entry in entries.items():
            known[key] = {**entry, "environment": where, "command": command}
        write_json(path, {"kind": kind, "schema": 1, "entries": known})


def save_verdicts(step: str, *found: str) -> None:
    """Saves how a step of tools/gpu_run.sh ended, given with its arguments: of each
    program (PROGRAM=STATUS) the exit status, and pytest's counts from PROGRAM.log."""
    exit_status: dict[str, int] = {}
    tests: dict[str, dict[str, int]] = {}
    for program, status in (one.split("=") for one in found):
        log = Path(os.environ["NWOR_WORK"], f"{program}.log").read_text("utf-8")
        *_, counted = "", *re.findall(r"^\d+ [a-z]+.* in [\d.]+s", log, re.MULTILINE)
        counts = re.findall(r"(\d+) (passed|failed|skipped|error)", counted)
        exit_status[program] = int(status)
        tests[program] = dict.fromkeys(("passed", "failed", "skipped"), 0)
        tests[program] |= {what: int(count) for count, what in counts}
    entry = {"exit_status": exit_status, "tests": tests}
    command = f"tools/gpu_run.sh {step}".rstrip()
    save("programs", command, {"none": entry}, step=step.split()[0])


if __name__ == "__main__":
    save_verdicts(*sys.argv[1:])
