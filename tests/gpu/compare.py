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
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.pool import OFF, ON, Chain
from tests.gpu.rows import Row, rows

PASSES = ("plain", "watched")
CHECKS = ("started", "rows", "vanilla", "bytes", "outputs", "digests", "counters")
OUTPUTS = ("tokens", "logprobs", "finish", "cached", "batches", "num_steps")
# [requests, tokens, drafts, accepted, graph mode, preempted requests]: watch.summary
_DRAFTS, _GRAPH, _PREEMPTED = 2, 4, 5
# A check, or "unsettled" or "unmet", and what there is to say.
Found = Iterator[tuple[str, str]]


def judge(spec: EngineSpec, runs: Chain) -> dict[str, Any]:
    """The engine's verdict: problems by check, "unsettled", "unmet", what was seen."""
    reports = {mode: run.report for mode, run in runs.items()}
    problems: dict[str, list[str]]
    problems = {check: [] for check in (*CHECKS, "unsettled", "unmet")}
    for check, text in itertools.chain(
        _judge_ends(spec, runs),
        *(_judge_row(spec, row, reports) for row in rows(spec)),
        _judge_whole(spec, reports),
    ):
        problems[check].append(text)
    known = runs[ON if reports[ON].get("facts") else OFF]
    return {
        "unsettled": problems.pop("unsettled"),
        "unmet": problems.pop("unmet"),
        "problems": problems,
        "seconds": {mode: run.seconds for mode, run in runs.items()},
        "start_s": {mode: report.get("start_s") for mode, report in reports.items()},
        "facts": known.entry()["facts"],
        "rows": {row.name: summary(reports[ON], row.name) for row in rows(spec)},
    }


def _judge_ends(spec: EngineSpec, runs: Chain) -> Found:
    for mode, run in runs.items():
        if not run.is_complete:
            yield "started", f"{mode}: {run.trouble()}"
        for row, name in itertools.product(rows(spec), PASSES):
            if row.name not in run.report.get(name, {}):
                yield "started", f"{mode}, {name}: no row {row.name!r}"


def _judge_row(spec: EngineSpec, row: Row, reports: dict[str, dict[str, Any]]) -> Found:
    off, on = (
        {name: reports[mode].get(name, {}).get(row.name) for name in PASSES}
        for mode in (OFF, ON)
    )
    vanilla, protected = (
        run["watched"]["watch"] if run["watched"] else [] for run in (off, on)
    )
    for check, of_ranks, judge_bytes in (
        ("vanilla", vanilla, _vanilla_problems),
        ("bytes", protected, byte_problems),
    ):
        for rank, seen in enumerate(of_ranks):
            for text in judge_bytes(seen):
                yield check, f"{row.name}, rank {rank}: {text}"
    if on["watched"]:
        if "error" in (off["watched"] or on["watched"])["finish"].values():
            yield "unmet", f"{row.name}: vanilla ends a request with an error"
        else:
            for text in needs_problems(spec, row, on["watched"]):
                yield "rows", f"{row.name}: {text}"
    differs = differing(off["plain"], off["watched"]) if all(off.values()) else []
    for text in differs:
        yield "unsettled", f"{row.name}: vanilla differs from itself: {text}"
    for name in PASSES:
        if off[name] and on[name]:
            for text in differing(off[name], on[name]):
                check = "unsettled" if differs else "outputs"
                yield check, f"{row.name}, {name}: {text}"
        if on[name]:
            has_grammars = "structured" in row.needs
            for text in counter_problems(spec, reports[ON], on[name], has_grammars):
                yield "counters", f"{row.name}, {name}: {text}"
    if vanilla and protected:
        for rank, pair in enumerate(zip(vanilla, protected, strict=True)):
            if text := _digest_problem(*pair):
                check = "unsettled" if differs else "digests"
                yield check, f"{row.name}, rank {rank}: {text}"


def _vanilla_problems(seen: dict[str, Any]) -> Iterator[str]:
    kinds = dict(seen["violations_by_kind"])
    not_restored = kinds.pop("not restored", 0)
    if kinds:
        yield f"{kinds}, first {seen['violations'][:3]}"
    if not_restored != seen["num_dirty_slots"]:
        yield f"{not_restored} slots reported, {seen['num_dirty_slots']} dirty"


def byte_problems(seen: dict[str, Any]) -> Iterator[str]:
    """What the oracle saw of an engine with NWOR on."""
    if seen["violations"]:
        yield f"{seen['violations_by_kind']}, first {seen['violations'][0]}"


def needs_problems(spec: EngineSpec, row: Row, result: dict[str, Any]) -> Iterator[str]:
    """What has to be seen in this row for it to have meant anything."""
    steps = result["watch"][0]["steps"]
    # A prompt is split if no step takes all long ones that arrived together.
    longest = sum(len(r.prompt) for r in row.phases[0] if len(r.prompt) > 300)
    ends = {end for name, end in result["finish"].items() if "grammar" in name}
    seen = {
        "preempted": any(step[_PREEMPTED] for step in steps),
        "cached": any(result["cached"].values()),
        "chunked": 0 < max(step[1] for step in steps) < longest,
        "structured": ends and ends <= {"stop", "length"},
        # Synchronous engines have nothing in flight when a request is aborted.
        "dropped": not spec.asynchronous
        or result["counters"].get("nwor_dropped_drafts", 0) > 0,
    }
    for need in sorted(row.needs):
        if not seen[need]:
            yield f"nothing was {need}"
    if not any(step[_DRAFTS] for step in steps):
        yield "no drafts"


def _judge_whole(spec: EngineSpec, reports: dict[str, dict[str, Any]]) -> Found:
    """What holds for all rows together."""
    on = reports[ON]
    watched = {
        mode: [row["watch"][0] for row in report.get("watched", {}).values()]
        for mode, report in reports.items()
    }
    for mode, check in ((OFF, "vanilla"), (ON, "bytes")):
        if watched[mode] and not any(seen["num_dirty_slots"] for seen in watched[mode]):
            yield check, "the forward never changed a rejected slot"
    if watched[ON]:
        if not any(seen["num_accepted"] for seen in watched[ON]):
            yield "rows", "no draft was ever accepted"
        graphs = Counter(step[_GRAPH] for seen in watched[ON] for step in seen["steps"])
        wanted = spec.factors[2] - {"EAGER"}
        if not wanted <= graphs.keys() or not (wanted or set(graphs) == {"NONE"}):
            yield "rows", f"steps ran in {graphs}, expected {wanted or 'no graph'}"
    for mode, report in reports.items():
        wanted_info = {ON} if mode == ON else set()
        if (info := set(report.get("info", wanted_info))) != wanted_info:
            yield "counters", f"nwor_info has {info}; expected {wanted_info}"
        if not (facts := report.get("facts")):
            continue
        is_v2 = facts["runner"].startswith("vllm.v1.worker.gpu.model_runner")
        if is_v2 != (spec.runner == "v2"):
            yield "rows", f"{mode}: the runner is {facts['runner']}"
        if facts["async_scheduling"] != spec.asynchronous:
            yield "rows", f"{mode}: async_scheduling is {facts['async_scheduling']}"
    if facts := on.get("facts"):
        if set(facts.get("resolved") or (ON,)) != {ON}:
            yield "bytes", f"groups resolve to {sorted(set(facts['resolved']))}"
        layers = facts["protected"] and facts["protected"]["layers"]
        if layers is None or set(layers) != set(facts["targets"]):
            yield (
                "bytes",
                f"protected layers are {layers}, the target's are {facts['targets']}",
            )


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two outcomes of a row are not identical."""
    found = {what: places(one[what], other[what]) for what in OUTPUTS}
    return [f"{n} in {len(at)} places, first {at[0]}" for n, at in found.items() if at]


def places(one: Any, other: Any) -> list[Any]:
    """The names or indices under which two dicts, or two lists, have not the same."""
    parts = [one, other]
    if not isinstance(one, dict):
        whole = isinstance(one, list)
        parts = [dict(enumerate(part if whole else [part])) for part in parts]
    names = sorted(parts[0].keys() | parts[1].keys())
    return [n for n in names if parts[0].get(n, ...) != parts[1].get(n, ...)]


def _digest_problem(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if steps := places(one["steps"], other["steps"]):
        return f"different steps from step {steps[0]} on"
    is_moved = False
    for i, (a, b) in enumerate(zip(one["digests"], other["digests"], strict=True)):
        # Where requests got other blocks, only what was written can be compared.
        is_moved |= a[0] != b[0]
        if a[2] != b[2] or (a[1] != b[1] and not is_moved):
            return f"caches differ from step {i} on"
    return None


def counter_problems(
    spec: EngineSpec,
    report: dict[str, Any],
    result: dict[str, Any],
    has_grammars: bool = False,
) -> list[str]:
    """The identities of guarantee 7 that do not hold in a row's result, the oracle's
    counts among them if it was watched. report: of its process."""
    v = Counter({f"device_{k}": n for k, n in result["device_counters"].items()})
    v.update(result["counters"])
    judged = v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
    drafted = v["spec_decode_num_draft_tokens"]
    claims = {
        "staged == committed + rejected + dropped": v["nwor_tokens_staged"]
        == judged + v["nwor_dropped_drafts"],
        "committed == vLLM's accepted": v["nwor_committed_tokens"]
        == v["spec_decode_num_accepted_tokens"],
        # vLLM does not count drafts that a grammar forbids, nor does the worker run
        # all that vLLM counts.
        "committed + rejected == vLLM's drafted": judged == drafted
        or (has_grammars and judged > drafted)
        or (spec.trims_drafts and judged < drafted),
        "something was staged": v["nwor_tokens_staged"] > 0,
        "no breach": v["nwor_breaches"] == 0,
        "no invalid slot": v["device_invalid_slots"] == 0,
        "no fallback": not any(n for name, n in v.items() if "fallbacks" in name),
        # LLMEngine 0.26 drops the statistics of a last step without outputs.
        "metrics <= device": v["nwor_tokens_staged"] <= v["device_staged"],
    }
    for seen in result.get("watch", ())[:1]:
        protected = report["facts"]["protected"] or {"log_bytes_per_draft": 0}
        num_rejected = seen["num_rejected_slots"] // seen["layers"]
        claims |= {
            f"device {ours} == oracle's": v[f"device_{ours}"] == seen[f"num_{theirs}"]
            for ours, theirs in (
                ("windows", "windows"),
                ("staged", "drafts"),
                ("committed", "accepted"),
            )
        }
        if ON == "stage":
            claims["staged, not logged"] = (
                v["device_restored_bytes"] == 0 < v["device_committed_bytes"]
            )
        else:
            claims["restored bytes == rejected slots"] = (
                v["device_restored_bytes"]
                == num_rejected * protected["log_bytes_per_draft"]
            )
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
