# SPDX-License-Identifier: Apache-2.0
"""Results of the GPU tests: a line for each engine, in the files of benchmarks/records.

Lines go to the folder in NWOR_GPU_RESULTS; without it nothing is written.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import environment, records

REPO = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "NWOR_GPU_RESULTS"


def save(
    kind: str, command: str, entries: dict[str, dict[str, Any]], **key: str
) -> None:
    """Appends a line for each of the `entries`, by the engine's name. key: further
    members of the lines' keys."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not entries:
        return
    about = environment.describe("cuda", REPO)
    for name, entry in entries.items():
        of_engine = {"engine": name, "vllm": records.vllm(about), **key}
        line = {"key": of_engine, **about, "command": command, "found": entry}
        records.append(Path(folder) / f"{kind}.jsonl", line)


def save_verdicts(step: str, *found: str) -> None:
    """Saves how a step of tools/gpu_run.sh, given with its arguments, ended: of each
    program in it (PROGRAM=STATUS) the exit status, and what pytest counted according
    to PROGRAM.log."""
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
