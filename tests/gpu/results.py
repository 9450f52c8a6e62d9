# SPDX-License-Identifier: Apache-2.0
"""Results of the GPU tests as files: what was run, where, when, and what came of it.

A file holds one entry for each engine; an entry of an engine that was not run again
stays as it was (results are cumulative), each with its own environment. Files go to the
folder in NWOR_GPU_RESULTS; without it nothing is written.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.files import write_json

REPO = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "NWOR_GPU_RESULTS"


def save(name: str, kind: str, command: str, entries: dict[str, Any]) -> None:
    """Adds `entries` to the file `name`, beside what earlier runs left there or in the
    repository's results/."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not entries:
        return
    where = environment.describe("cuda", REPO)
    name = environment.of_release(name.removesuffix(".json"), where) + ".json"
    path = Path(folder) / name
    with open(__file__) as lock:
        # GPU steps beside each other, of one checkout, save to the same files.
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, Any] = {}
        for source in (REPO / "results" / name, path):
            if source.is_file():
                known |= json.loads(source.read_text(encoding="utf-8"))["entries"]
        for key, entry in entries.items():
            known[key] = {**entry, "environment": where, "command": command}
        write_json(path, {"kind": kind, "schema": 1, "entries": known})


def save_verdicts(step: str, *found: str) -> None:
    """What became of a step of tools/gpu_run.sh, given with its arguments: of each
    program in it (PROGRAM=STATUS) the exit status, and what pytest counted, by
    PROGRAM.log."""
    exit_status: dict[str, int] = {}
    tests: dict[str, dict[str, int]] = {}
    for program, status in (one.split("=") for one in found):
        log = Path(os.environ["NWOR_WORK"], f"{program}.log").read_text("utf-8")
        *_, counted = "", *re.findall(r"^\d+ [a-z]+.* in [\d.]+s", log, re.MULTILINE)
        counts = re.findall(r"(\d+) (passed|failed|skipped|error)", counted)
        exit_status[program] = int(status)
        tests[program] = dict.fromkeys(("passed", "failed", "skipped"), 0)
        tests[program] |= {what: int(count) for count, what in counts}
    name, entry = step.split()[0], {"exit_status": exit_status, "tests": tests}
    command = f"tools/gpu_run.sh {step}".rstrip()
    save(f"gpu_{name}.json", f"gpu_{name}", command, {"all": entry})


if __name__ == "__main__":
    save_verdicts(*sys.argv[1:])
