# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reach.md: what was run on which vLLM, runner and backend, in which
mode, and what came of it. No line comes from anything but an entry of a result.

Reads results of two kinds: cpu_engines (tests/helpers/reach.py, an entry for each mode)
and gpu_engines (tests/gpu, an entry for each engine, in the mode of its file).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from vllm_nwor.hooks.versions import VERSIONS

_KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text("utf-8"))
# What people ask for, tested or not; other names in results come after these.
NAMES: dict[str, list[str]] = _KNOWN["names"]
HEADS: dict[str, str] = _KNOWN["heads"]
MODES = ("cow", "stage")
# vLLM's executors with Ray, as the GPU tests call them.
RAY = {"ray": "Ray", "ray-compiled": "Ray, compiled graph"}
UNTESTED, UNSETTLED = "untested", "exact bytes, outputs unsettled"
Entry = dict[str, str]


def entries(result: dict[str, Any]) -> Iterator[Entry]:
    """What a result says of each combination: kind, name, vllm, runner, backend, mode,
    verdict (exact, outputs, refused, UNSETTLED, incomplete or failed) and perhaps
    reason (NWOR's)."""
    for entry in result["entries"].values():
        if result["kind"] == "cpu_engines":
            yield entry
            continue
        spec = entry["engine"]
        ranks, executor = spec["tensor_parallel"], spec.get("executor")
        workers = (
            f"tensor parallel {ranks}" if ranks > 1 else executor and RAY[executor]
        )
        (mode,) = set(entry["seconds"]) - {"off"}
        bad = [check for check, problems in entry["problems"].items() if problems]
        verdict = UNSETTLED if entry["unsettled"] else "exact"
        if bad:  # "incomplete" where nothing else is wrong
            verdict = "incomplete" if bad == ["started"] else "failed"
        yield {
            "kind": "parallelism" if workers else "method",
            "name": workers or _method(spec),
            "vllm": entry["environment"]["packages"]["vllm"],
            "runner": spec["runner"].upper(),
            "backend": spec["backend"],
            "mode": mode,
            "verdict": verdict,
        }


def _method(spec: dict[str, Any]) -> str:
    """spec: fields of an EngineSpec (tests/gpu/engines.py); old results have fewer."""
    rejection = spec.get("rejection", "synthetic")
    if rejection != "synthetic":
        return f"{rejection} rejection"
    name = str(spec["drafter"])
    if spec.get("adaptive"):
        name += ", adaptive verification"
    return f"{name}, dynamic k" if spec.get("dynamic") else name


def tables(kind: str, results: Sequence[dict[str, Any]]) -> str:
    """A line for each name, version and runner that has results, and one for all the
    versions that a name has none of; then the reasons of what is refused."""
    found: dict[str, dict[tuple[str, str], list[Entry]]]
    found = {name: {} for name in NAMES[kind]}
    for one in (one for result in results for one in entries(result)):
        if one["kind"] == kind:
            here = found.setdefault(one["name"], {})
            here.setdefault((one["vllm"], one["runner"]), []).append(one)
    reasons: list[str] = []
    rows = []
    for name, here in found.items():
        for where in sorted(here):
            verdicts = (_verdicts(here[where], mode, reasons) for mode in MODES)
            rows.append((name, *where, *verdicts))
        tried = {version for version, _ in here}
        if left := [v for v in VERSIONS if v not in tried]:
            rows.append((name, ", ".join(left), "", UNTESTED, UNTESTED))
    lines = [(HEADS[kind], "vLLM", "runner", *MODES), ["---"] * (3 + len(MODES)), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"{number}. {r}" for number, r in enumerate(reasons, start=1))
    return f"{table}\n\n{notes}" if notes else table


def _verdicts(found: Sequence[Entry], mode: str, reasons: list[str]) -> str:
    """Of one mode: the backends by verdict; adds to `reasons` what is new."""
    by_verdict: dict[str, dict[str, None]] = {}
    for one in sorted(found, key=lambda one: one["backend"]):
        if one["mode"] != mode:
            continue
        verdict, reason = one["verdict"], one.get("reason")
        if reason:
            if reason not in reasons:
                reasons.append(reason)
            verdict += f" ({reasons.index(reason) + 1})"
        by_verdict.setdefault(verdict, {})[one["backend"]] = None
    # On one of several engines.
    for worse, better in itertools.combinations(
        ("failed", "incomplete", UNSETTLED, "exact"), 2
    ):
        for backend in by_verdict.get(worse, ()):
            by_verdict.get(better, {}).pop(backend, None)
    texts = [
        f"{'**failed**' if verdict == 'failed' else verdict}: {', '.join(backends)}"
        for verdict, backends in sorted(by_verdict.items())
        if backends
    ]
    return "; ".join(texts) or UNTESTED
