# SPDX-License-Identifier: Apache-2.0
"""Judges an engine's two processes, off and on: checks, each a list of problems.

    started   both came to their end
    rows      each row saw what it is about (preemptions, cache hits, graph mode, ...)
    vanilla   the oracle reports vanilla vLLM, at rejected drafts' slots and only there
    bytes     it reports nothing with NWOR on, and there was something to restore
    outputs   tokens, logprobs, ends and batches of all requests are the same off and on
    digests   so are the caches' bytes after every step, rejected drafts' slots aside
    counters  NWOR's counters agree with vLLM's, with the device, and with the oracle

An outputs or digests problem of a row in which vanilla differs from itself is no proof
of anything: it is kept under "unsettled", with what vanilla differs in. A row in which
vanilla itself ends a request with an error is compared all the same, but did not do
what it is about: it is kept under "unmet". Needs neither torch nor vLLM.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.pool import Finished
from tests.gpu.rows import Row, rows

# NWOR_GPU_MODE=stage: the same engines with shadow pages.
OFF, ON = "off", os.environ.get("NWOR_GPU_MODE", "cow")
PASSES = ("plain", "watched")
CHECKS = ("started", "rows", "vanilla", "bytes", "outputs", "digests", "counters")
OUTPUTS = ("tokens", "logprobs", "finish", "cached", "batches", "num_steps")
# [requests, tokens, drafts, accepted, graph mode, preempted requests]: watch.Step
_DRAFTS, _GRAPH, _PREEMPTED = 2, 4, 5


def judge(spec: EngineSpec, runs: dict[str, Finished]) -> dict[str, Any]:
    """The engine's verdict: problems by check, "unsettled", "unmet", what was seen."""
    off, on = runs[OFF].report, runs[ON].report
    problems: dict[str, list[str]] = {check: [] for check in CHECKS}
    unsettled: list[str] = []
    unmet: list[str] = []
    for mode, run in runs.items():
        if not run.is_complete:
            problems["started"].append(f"{mode}: {run.trouble()}")
    for row in rows(spec):
        for mode, report in ((OFF, off), (ON, on)):
            for name in PASSES:
                if row.name not in report.get(name, {}):
                    problems["started"].append(f"{mode}, {name}: no row {row.name!r}")
        _judge_row(spec, row, off, on, problems, unsettled, unmet)
    _judge_whole(spec, off, on, problems)
    return {
        "problems": problems,
        "unsettled": unsettled,
        "unmet": unmet,
        "seconds": {mode: run.seconds for mode, run in runs.items()},
        "start_s": {mode: run.report.get("start_s") for mode, run in runs.items()},
        "facts": on.get("facts") or off.get("facts"),
        "rows": {row.name: summary(on, row.name) for row in rows(spec)},
    }


def _judge_row(
    spec: EngineSpec,
    row: Row,
    off: dict[str, Any],
    on: dict[str, Any],
    problems: dict[str, list[str]],
    unsettled: list[str],
    unmet: list[str],
) -> None:
    def found(report: dict[str, Any], name: str) -> dict[str, Any] | None:
        result: dict[str, Any] | None = report.get(name, {}).get(row.name)
        return result

    off_watched, on_watched = found(off, "watched"), found(on, "watched")
    if off_watched:
        for rank, seen in enumerate(off_watched["watch"]):
            _judge_vanilla(f"{row.name}, rank {rank}", seen, problems["vanilla"])
    if on_watched:
        for rank, seen in enumerate(on_watched["watch"]):
            if seen["violations"]:
                problems["bytes"].append(
                    f"{row.name}, rank {rank}: {seen['violations_by_kind']}, first "
                    f"{seen['violations'][0]}"
                )
        ends = set((off_watched or on_watched)["finish"].values())
        if "error" in ends:
            unmet.append(f"{row.name}: vanilla ends a request with an error")
        else:
            _judge_needs(spec, row, on_watched, problems["rows"])
    off_plain = found(off, "plain")
    differs = differing(off_plain, off_watched) if off_plain and off_watched else []
    is_repeatable = not differs
    unsettled += [f"{row.name}: vanilla differs from itself: {t}" for t in differs]
    for name in PASSES:
        one, other = found(off, name), found(on, name)
        if one and other:
            texts = [f"{row.name}, {name}: {t}" for t in differing(one, other)]
            (problems["outputs"] if is_repeatable else unsettled).extend(texts)
    if off_watched and on_watched:
        for rank, (one, other) in enumerate(
            zip(off_watched["watch"], on_watched["watch"], strict=True)
        ):
            text = _digest_problem(one, other)
            if text:
                (problems["digests"] if is_repeatable else unsettled).append(
                    f"{row.name}, rank {rank}: {text}"
                )
    for name in PASSES:
        result = found(on, name)
        if result:
            problems["counters"] += [
                f"{row.name}, {name}: {t}"
                for t in _counter_problems(spec, on, row, result)
            ]


def _judge_vanilla(where: str, seen: dict[str, Any], problems: list[str]) -> None:
    kinds = dict(seen["violations_by_kind"])
    not_restored = kinds.pop("not restored", 0)
    if kinds:
        problems.append(f"{where}: {kinds}, first {seen['violations'][:3]}")
    if not_restored != seen["num_dirty_slots"]:
        problems.append(
            f"{where}: {not_restored} slots reported, {seen['num_dirty_slots']} dirty"
        )


def _judge_needs(
    spec: EngineSpec, row: Row, result: dict[str, Any], problems: list[str]
) -> None:
    """What has to be seen in this row for it to have meant anything."""
    steps = result["watch"][0]["steps"]
    seen = {
        "preempted": sum(step[_PREEMPTED] for step in steps) > 0,
        "cached": max(result["cached"].values(), default=0) > 0,
        "chunked": _is_chunked(row, steps),
        "structured": _has_grammars(result),
        # Synchronous engines have nothing in flight when a request is aborted.
        "dropped": not spec.asynchronous
        or result["counters"].get("nwor_dropped_drafts", 0) > 0,
    }
    for need in sorted(row.needs):
        if not seen[need]:
            problems.append(f"{row.name}: nothing was {need}")
    if not sum(step[_DRAFTS] for step in steps):
        problems.append(f"{row.name}: no drafts")


def _is_chunked(row: Row, steps: list[list[Any]]) -> bool:
    """A prompt was split: no step took all long prompts that arrived together."""
    longest = sum(len(r.prompt) for r in row.phases[0] if len(r.prompt) > 300)
    return 0 < max(step[1] for step in steps) < longest


def _has_grammars(result: dict[str, Any]) -> bool:
    ends = [end for name, end in result["finish"].items() if "grammar" in name]
    return bool(ends) and set(ends) <= {"stop", "length"}


def _judge_whole(
    spec: EngineSpec,
    off: dict[str, Any],
    on: dict[str, Any],
    problems: dict[str, list[str]],
) -> None:
    """What holds for all rows together."""
    watched = [row["watch"][0] for row in on.get("watched", {}).values()]
    if watched:
        if not sum(seen["num_dirty_slots"] for seen in watched):
            problems["bytes"].append("the forward never changed a rejected slot")
        if not sum(seen["num_accepted"] for seen in watched):
            problems["rows"].append("no draft was ever accepted")
        graphs = Counter(step[_GRAPH] for seen in watched for step in seen["steps"])
        for wanted in spec.factors[2]:
            if wanted != "EAGER" and not graphs[wanted]:
                problems["rows"].append(f"no step ran in a {wanted} graph: {graphs}")
        if "EAGER" in spec.factors[2] and set(graphs) != {"NONE"}:
            problems["rows"].append(f"an eager engine used graphs: {graphs}")
    for mode, report in ((OFF, off), (ON, on)):
        facts = report.get("facts")
        if not facts:
            continue
        is_v2 = facts["runner"].startswith("vllm.v1.worker.gpu.model_runner")
        if is_v2 != (spec.runner == "v2"):
            problems["rows"].append(f"{mode}: the runner is {facts['runner']}")
        if facts["async_scheduling"] != spec.asynchronous:
            problems["rows"].append(
                f"{mode}: async_scheduling is {facts['async_scheduling']}"
            )
    for report, wanted in ((off, set()), (on, {ON})):
        if (info := set(report.get("info", wanted))) != wanted:
            problems["counters"].append(f"nwor_info has {info}; expected {wanted}")
    resolved = set((on.get("facts") or {}).get("resolved") or (ON,))
    if resolved != {ON}:
        problems["bytes"].append(f"groups resolve to {sorted(resolved)}")
    protected = (on.get("facts") or {}).get("protected")
    if on.get("facts"):
        targets = {n for n, layer in on["facts"]["layers"].items() if layer["target"]}
        if protected is None or set(protected["layers"]) != targets:
            problems["bytes"].append(
                f"protected layers are {protected and protected['layers']}, the "
                f"target's are {sorted(targets)}"
            )


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two outcomes of a row are not identical."""
    texts = []
    for what in OUTPUTS:
        a, b = one[what], other[what]
        if a == b:
            continue
        if isinstance(a, list):
            texts.append(f"{what} from number {first_other(a, b)} on")
            continue
        if not isinstance(a, dict):
            texts.append(f"{what} {a} against {b}")
            continue
        names = [
            name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
        ]
        texts.append(f"{what} of {len(names)} requests, first {names[0]}")
    return texts


def first_other(one: list[Any], other: list[Any]) -> int:
    """Index of the first item that is not in both; their length if all are."""
    pairs = enumerate(itertools.zip_longest(one, other, fillvalue=None))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def _digest_problem(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if one["steps"] != other["steps"]:
        first = first_other(one["steps"], other["steps"])
        return f"different steps from step {first} on"
    pairs = list(zip(one["digests"], other["digests"], strict=True))
    # Where requests got other blocks, only what was written can be compared.
    moved = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), len(pairs))
    for i, (a, b) in enumerate(pairs):
        if a[2] != b[2] or (i < moved and a[1] != b[1]):
            return f"caches differ from step {i} on"
    return None


def _counter_problems(
    spec: EngineSpec, on: dict[str, Any], row: Row, result: dict[str, Any]
) -> list[str]:
    """The identities of guarantee 7 that do not hold in this row."""
    found = {f"device_{k}": v for k, v in result["device_counters"].items()}
    found |= result["counters"]
    fallbacks = {k: v for k, v in found.items() if "fallbacks" in k and v}
    is_structured = "structured" in row.needs
    v = Counter(found)
    claims = {
        "staged == committed + rejected + dropped": v["nwor_tokens_staged"]
        == v["nwor_committed_tokens"]
        + v["nwor_rejected_tokens"]
        + v["nwor_dropped_drafts"],
        "committed == vLLM's accepted": v["nwor_committed_tokens"]
        == v["spec_decode_num_accepted_tokens"],
        # vLLM does not count drafts that a grammar forbids.
        "committed + rejected == vLLM's drafted": (
            v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
            == v["spec_decode_num_draft_tokens"]
        )
        or (
            is_structured
            and v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
            > v["spec_decode_num_draft_tokens"]
        )
        # Nor does the worker run all that vLLM counts.
        or (
            spec.trims_drafts
            and v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
            < v["spec_decode_num_draft_tokens"]
        ),
        "something was staged": v["nwor_tokens_staged"] > 0,
        "no breach": v["nwor_breaches"] == 0,
        "no invalid slot": v["device_invalid_slots"] == 0,
        "no fallback": not fallbacks,
        # LLMEngine 0.26 drops the statistics of a last step without outputs.
        "metrics <= device": v["nwor_tokens_staged"] <= v["device_staged"],
    }
    if "watch" in result:
        seen = result["watch"][0]
        protected = on["facts"]["protected"] or {"log_bytes_per_draft": 0}
        num_rejected = seen["num_rejected_slots"] // seen["layers"]
        claims |= {
            "device windows == oracle's": v["device_windows"] == seen["num_windows"],
            "device staged == oracle's": v["device_staged"] == seen["num_drafts"],
            "device committed == oracle's": v["device_committed"]
            == seen["num_accepted"],
            "restored bytes == rejected slots": v["device_restored_bytes"]
            == num_rejected * protected["log_bytes_per_draft"]
            or ON == "stage",
            "staged, not logged": (
                v["device_restored_bytes"] == 0 and v["device_committed_bytes"] > 0
            )
            or ON != "stage",
        }
    failed = [claim for claim, holds in claims.items() if not holds]
    return [f"not {'; not '.join(failed)}: {dict(v)}"] if failed else []


def summary(report: dict[str, Any], row: str) -> dict[str, Any] | None:
    """What a row did, for the results file."""
    result = report.get("watched", {}).get(row)
    if result is None:
        return None
    seen = result["watch"][0]
    return {
        "requests": len(result["tokens"]),
        "tokens": sum(map(len, result["tokens"].values())),
        "steps": len(seen["steps"]),
        "graphs": dict(Counter(step[_GRAPH] for step in seen["steps"])),
        "windows": seen["num_windows"],
        "drafts": seen["num_drafts"],
        "accepted": seen["num_accepted"],
        "dropped": result["counters"].get("nwor_dropped_drafts", 0),
        "preempted": sum(step[_PREEMPTED] for step in seen["steps"]),
        "cached_tokens": max(result["cached"].values(), default=0),
        "rejected_slots_checked": seen["num_rejected_slots"],
        "dirty_slots_restored": seen["num_dirty_slots"],
        "seconds": round(result["seconds"], 2),
    }
