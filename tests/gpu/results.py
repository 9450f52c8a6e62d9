# SPDX-License-Identifier: Apache-2.0
"""Results of the GPU tests as files: what was run, where, when, and what came of it.

A file holds one entry for each engine; an entry of an engine that was not run again
stays as it was (results are cumulative), each with its own environment. Files go to the
folder in NWOR_GPU_RESULTS; without it nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
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
    path = Path(folder) / name
    known: dict[str, Any] = {}
    for source in (REPO / "results" / name, path):
        if source.is_file():
            known |= json.loads(source.read_text(encoding="utf-8"))["entries"]
    where = environment.describe("cuda", REPO)
    for key, entry in entries.items():
        known[key] = {**entry, "environment": where, "command": command}
    write_json(path, {"kind": kind, "schema": 1, "entries": known})


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """What an engine turned out to be, of its process's report: without what each layer
    is, which gpu_layouts.json has."""
    found = {**(report.get("facts") or {})}
    for name in ("layers", "groups", "capture_sizes", "protected"):
        found.pop(name, None)
    return found


def merge(folders: Sequence[Path], to: Path) -> list[str]:
    """Puts result files of `folders` into `to`, and returns their names. Of files that
    have entries, each entry is the newest; of others a later folder's replaces."""
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for path in (path for folder in folders for path in sorted(folder.iterdir())):
        if path.name.startswith(".") or not path.is_file():
            continue  # what a process that was killed was writing
        target = to / path.name
        written.append(path.name)
        if path.suffix != ".json":
            shutil.copyfile(path, target)
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        if "entries" in found and target.is_file():
            known = json.loads(target.read_text(encoding="utf-8"))["entries"]
            for key, entry in found["entries"].items():
                if key not in known or _date(entry) >= _date(known[key]):
                    known[key] = entry
            found["entries"] = known
        write_json(target, found)
    return sorted(set(written))


def _date(entry: dict[str, Any]) -> str:
    return str(entry["environment"]["date"])
