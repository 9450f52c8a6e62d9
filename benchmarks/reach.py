# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reach.md: what was run on which vLLM, runner and backend, in which
mode, and how it ended. Every row comes from a line of results/engines.jsonl, which
tests/helpers/reach.py (CPU) or tests/gpu wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import records
from vllm_nwor.hooks.versions import VERSIONS

_KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text("utf-8"))
# What people ask for, tested or not; other names in results come after these.
NAMES: dict[str, list[str]] = _KNOWN["names"]
HEADS: dict[str, str] = _KNOWN["heads"]
MODES = ("cow", "stage")
# vLLM's executors with Ray, as the GPU tests call them.
RAY = {"ray": "Ray", "ray-compiled": "Ray, compiled graph"}
# Behind a backend: only lines of other kernels than those in the tree show it.
OLDER = "†"
UNTESTED, UNSETTLED = "untested", "exact bytes, outputs unsettled"
Entry = dict[str, str]


def entry(line: records.Line) -> Entry:
    """What a line says of a combination: kind, name, vllm, runner, backend, mode,
    verdict (exact, outputs, refused, UNSETTLED, incomplete or failed) and perhaps
    reason (NWOR's)."""
    found, key = line["found"], line["key"]
    older = "" if records.is_current(line) else OLDER
    if "engine" not in key:  # on a CPU
        return found | {"backend": found["backend"] + older}
    spec = found["engine"]
    ranks, executor = spec["tensor_parallel"], spec.get("executor")
    workers = f"tensor parallel {ranks}" if ranks > 1 else executor and RAY[executor]
    bad = [check for check, problems in found["problems"].items() if problems]
    verdict = UNSETTLED if found["unsettled"] else "exact"
    if bad:  # "incomplete" where nothing else is wrong
        verdict = "incomplete" if bad == ["started"] else "failed"
    return {
        "kind": "parallelism" if workers else "method",
        "name": workers or _method(spec),
        "vllm": key["vllm"],
        "runner": spec["runner"].upper(),
        "backend": spec["backend"] + older,
        "mode": key["mode"],
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


def table(kind: str, lines: Sequence[records.Line]) -> str:
    """A row for each name, version and runner that has results, and one for all the
    versions that a name has none of; then the reasons of what is refused."""
    found: dict[str, dict[tuple[str, str], list[Entry]]]
    found = {name: {} for name in NAMES[kind]}
    every = [entry(line) for line in lines]
    for one in sorted(every, key=lambda one: (one["name"], one["mode"])):
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
    head = [(HEADS[kind], "vLLM", "runner", *MODES), ["---"] * (3 + len(MODES))]
    made = "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])
    notes = "\n".join(f"{number}. {r}" for number, r in enumerate(reasons, start=1))
    return f"{made}\n\n{notes}" if notes else made


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
    for backends in by_verdict.values():
        for backend in list(backends):
            backends.pop(f"{backend}{OLDER}", None)
    texts = [
        f"{'**failed**' if verdict == 'failed' else verdict}: {', '.join(backends)}"
        for verdict, backends in sorted(by_verdict.items())
        if backends
    ]
    return "; ".join(texts) or UNTESTED
