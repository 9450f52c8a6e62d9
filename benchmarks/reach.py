# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reach.md: what was run on which vLLM, runner and backend, in which
mode, and what came of it. No line comes from anything but an entry of a result.

Reads results of two kinds: cpu_engines (tests/helpers/reach.py, an entry for each mode)
and gpu_engines (tests/gpu, an entry for each engine, in the mode of its file).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import Table

VERSIONS = ("0.26.0", "0.29.0", "0.32.0", "0.33.0")
MODES = ("cow", "stage")
# What people ask for, tested or not; other names in results come after these.
NAMES = {
    "method": (
        "ngram",
        "ngram_gpu",
        "suffix",
        "draft_model",
        "draft_model, parallel drafting",
        "eagle",
        "eagle, dynamic k",
        "eagle3",
        "mtp",
        "dflash",
        "dspark",
        "dspark, adaptive verification",
        "medusa",
        "block rejection",
        "fly rejection",
        "extract_hidden_states",
        "custom_class",
    ),
    "model": (),
    "parallelism": ("tensor parallel 2", "data parallel 2"),
}
UNTESTED = "untested"


@dataclass(frozen=True)
class Cell:
    """One tested combination. verdict: exact, refused, incomplete or failed; reason:
    NWOR's."""

    kind: str
    name: str
    version: str
    runner: str
    backend: str
    mode: str
    verdict: str
    reason: str = ""


def methods(results: Sequence[dict[str, Any]]) -> str:
    return _tables(results, "method", "method")


def models(results: Sequence[dict[str, Any]]) -> str:
    return _tables(results, "model", "model, with scripted drafts")


def parallelism(results: Sequence[dict[str, Any]]) -> str:
    return _tables(results, "parallelism", "engines")


def cells(result: dict[str, Any]) -> Iterator[Cell]:
    """Every combination that a result is about."""
    for entry in result["entries"].values():
        if result["kind"] == "cpu_engines":
            where = (entry["vllm"], entry["runner"], entry["backend"], entry["mode"])
            reason = entry.get("reason", "")
            yield Cell(entry["kind"], entry["name"], *where, entry["verdict"], reason)
            continue
        spec = entry["engine"]
        ranks = spec["tensor_parallel"]
        name = ("method", spec["drafter"])
        if ranks > 1:
            name = ("parallelism", f"tensor parallel {ranks}")
        version = entry["environment"]["packages"]["vllm"]
        (mode,) = set(entry["seconds"]) - {"off"}
        bad = {check for check, problems in entry["problems"].items() if problems}
        verdict = "failed" if bad - {"started"} else "incomplete" if bad else "exact"
        where = (version, spec["runner"].upper(), spec["backend"], mode)
        yield Cell(*name, *where, verdict)


def _tables(results: Sequence[dict[str, Any]], kind: str, head: str) -> str:
    """A line for each name, version and runner that has results, and one for all the
    versions that a name has none of; then the reasons of what is refused."""
    found = [c for result in results for c in cells(result) if c.kind == kind]
    reasons: list[str] = []
    rows = []
    for name in dict.fromkeys([*NAMES[kind], *(cell.name for cell in found)]):
        of_name = [cell for cell in found if cell.name == name]
        tested = sorted({(cell.version, cell.runner) for cell in of_name})
        for version, runner in tested:
            here = [c for c in of_name if (c.version, c.runner) == (version, runner)]
            rows.append(
                (
                    name,
                    version,
                    runner,
                    *(_verdicts(here, mode, reasons) for mode in MODES),
                )
            )
        left = [v for v in VERSIONS if v not in {version for version, _ in tested}]
        if left:
            rows.append((name, ", ".join(left), "", UNTESTED, UNTESTED))
    table = Table("", (head, "vLLM", "runner", *MODES), rows, left=True).markdown()
    notes = "\n".join(f"{number}. {r}" for number, r in enumerate(reasons, start=1))
    return f"{table}\n\n{notes}" if notes else table


def _verdicts(found: Sequence[Cell], mode: str, reasons: list[str]) -> str:
    """Of one mode: the backends by verdict; adds to `reasons` what is new."""
    by_verdict: dict[str, dict[str, None]] = {}
    for cell in sorted(found, key=lambda cell: cell.backend):
        if cell.mode != mode:
            continue
        verdict = cell.verdict
        if cell.reason:
            if cell.reason not in reasons:
                reasons.append(cell.reason)
            verdict += f" ({reasons.index(cell.reason) + 1})"
        by_verdict.setdefault(verdict, {})[cell.backend] = None
    for backend in [
        *by_verdict.get("failed", ()),
        *by_verdict.get("incomplete", ()),
    ]:  # on one of several engines
        by_verdict.get("exact", {}).pop(backend, None)
    texts = [
        f"{'**failed**' if verdict == 'failed' else verdict}: {', '.join(backends)}"
        for verdict, backends in sorted(by_verdict.items())
        if backends
    ]
    return "; ".join(texts) or UNTESTED
