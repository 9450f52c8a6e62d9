# SPDX-License-Identifier: Apache-2.0
"""Judges an engine's processes with NWOR off and on. Each check is a list of problems:

    started   both processes ended; otherwise nothing else is judged
    rows      each row had what it needs (preemptions, cache hits, graph mode, ...)
    vanilla   the oracle reports plain vLLM, at rejected drafts' slots and only there
    bytes     it reports nothing with NWOR on, and there was something to restore
    outputs   tokens, logprobs, finish reasons, batches and acceptance are the same
    digests   so are the caches' bytes after every step, except rejected drafts' slots
    counters  NWOR's counters agree with vLLM's, the device's and the oracle's

"unsettled": differences in outputs or digests in a row in which plain vLLM differs from
itself, which prove nothing. "unmet": rows in which plain vLLM ends a request with an
error, so that they lack what they need. Imports neither torch nor vLLM.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.pool import OFF, ON, Chain
from tests.gpu.rows import Row, hits_at_once, rows
from tests.helpers.player import JUDGED, identities

PASSES = ("plain", "watched")
CHECKS = ("started", "rows", "vanilla", "bytes", "outputs", "digests", "counters")
OUTPUTS = ("tokens", "logprobs", "finish", "cached", "batches")
ACCEPTANCE = [f"spec_decode_num_{of}_tokens" for of in ("draft", "accepted")]
Report = dict[str, Any]
# A check, or "unsettled" or "unmet", and the problem.
Found = Iterator[tuple[str, str]]


def judge(spec: EngineSpec, runs: Chain) -> dict[str, Any]:
    """The engine's verdict: problems by check, "unsettled", "unmet", facts and rows."""
    off, on = (run.report for run in runs.values())
    problems: dict[str, list[str]]
    problems = {check: [] for check in (*CHECKS, "unsettled", "unmet")}
    for mode, run in runs.items():
        if run.trouble:
            problems["started"].append(f"{mode}: {run.trouble}")
    is_whole = not problems["started"]
    if is_whole:
        of_rows = (row_problems(spec, row, off, on) for row in rows(spec))
        for check, text in itertools.chain(*of_rows, _judge_whole(spec, off, on)):
            problems[check].append(text)
    return {
        "unsettled": problems.pop("unsettled"),
        "unmet": problems.pop("unmet"),
        "problems": problems,
        "seconds": {mode: run.seconds for mode, run in runs.items()},
        "start_s": {mode: run.report.get("start_s") for mode, run in runs.items()},
        "facts": runs[ON if on.get("facts") else OFF].entry()["facts"],
        "rows": {
            row.name: summary(on["watched"][row.name]) if is_whole else None
            for row in rows(spec)
        },
    }


def row_problems(spec: EngineSpec, row: Row, off: Report, on: Report) -> Found:
    vanilla = {name: off[name][row.name] for name in PASSES}
    found = {name: on[name][row.name] for name in PASSES}
    if "error" in vanilla["watched"]["finish"].values():
        yield "unmet", f"{row.name}: vanilla ends a request with an error"
    else:
        for text in needs_problems(spec, row, found["watched"]):
            yield "rows", f"{row.name}: {text}"
    differs = differing(vanilla["plain"], vanilla["watched"])
    for text in differs:
        yield "unsettled", f"{row.name}: vanilla differs from itself: {text}"
    for name in PASSES:
        one, other = (
            {of: run[name]["counters"][of] for of in ACCEPTANCE}
            for run in (vanilla, found)
        )
        texts = differing(vanilla[name], found[name])
        if one != other:
            texts.append(f"{other}, vanilla's {one}")
        for text in texts:
            check = "unsettled" if differs else "outputs"
            yield check, f"{row.name}, {name}: {text}"
        has_grammars = "structured" in row.needs
        for text in counter_problems(spec, on, found[name], has_grammars):
            yield "counters", f"{row.name}, {name}: {text}"
    for check, text in byte_problems(vanilla["watched"], found["watched"]):
        if check == "digests" and differs:
            check = "unsettled"
        yield check, f"{row.name}, {text}"


def byte_problems(off: Report, on: Report) -> Found:
    """The oracle's reports for a row, on each rank."""
    for rank, pair in enumerate(zip(off["watch"], on["watch"], strict=True)):
        vanilla, protected = pair
        kinds = dict(vanilla["violations_by_kind"])
        not_restored = kinds.pop("not restored", 0)
        num_dirty = vanilla["num_dirty_slots"]
        if kinds or not_restored != num_dirty:
            text = f"{not_restored} not restored, {num_dirty} dirty, {kinds}"
            yield "vanilla", f"rank {rank}: {text}, {vanilla['violations'][:3]}"
        if first := protected["violations"][:1]:
            yield "bytes", f"rank {rank}: {protected['violations_by_kind']}, {first}"
        if text := _digest_problem(*pair):
            yield "digests", f"rank {rank}: {text}"


def needs_problems(spec: EngineSpec, row: Row, result: Report) -> Iterator[str]:
    """What the row needs and lacks."""
    steps = result["watch"][0]["steps"]
    # Prompts are split if no step takes all long ones that arrived together.
    longest = sum(len(r.prompt) for r in row.phases[0] if len(r.prompt) > 300)
    texts = result["tokens"].values()
    ends = {end for name, end in result["finish"].items() if "grammar" in name}
    seen = {
        "preempted": any(step["preempted"] for step in steps),
        "cached": any(result["cached"].values()),
        "chunked": 0 < max(step["tokens"] for step in steps) < longest,
        "structured": ends and ends <= {"stop", "length"},
        "different": len(set(map(str, texts))) == len(texts),
        "hit at once": "hit at once" in row.needs
        and hits_at_once(spec, result["batches"]),
        # Synchronous engines have nothing in flight when a request is aborted.
        "dropped": not spec.asynchronous
        or result["counters"].get("nwor_dropped_drafts", 0) > 0,
    }
    for need in sorted(row.needs):
        if not seen[need]:
            yield f"nothing was {need}"
    if not any(step["drafts"] for step in steps):
        yield "no drafts"


def _judge_whole(spec: EngineSpec, off: Report, on: Report) -> Found:
    """Checks over all rows together."""
    vanilla, seen = (
        [row["watch"][0] for row in report["watched"].values()] for report in (off, on)
    )
    for check, of_rows in (("vanilla", vanilla), ("bytes", seen)):
        if not any(row["num_dirty_slots"] for row in of_rows):
            yield check, "the forward never changed a rejected slot"
    if not any(row["num_accepted"] for row in seen):
        yield "rows", "no draft was ever accepted"
    if ON == "stage":
        staged, logged, present = (
            sum(row[f"num_{what}"] for row in seen)
            for what in ("staged_slots", "logged_slots", "present_rows")
        )
        if not staged or not present or (spec.seats > 0) != (logged > 0):
            text = f"{staged} rejected drafts were staged and {logged} logged"
            yield "bytes", f"{text}; {present} rows of shadow blocks were compared"
    graphs = {step["graph"] for row in seen for step in row["steps"]}
    wanted = spec.factors[2] - {"EAGER"}
    if not wanted <= graphs or not (wanted or graphs == {"NONE"}):
        yield "rows", f"steps ran in {graphs}, expected {wanted or 'no graph'}"
    for mode, report in ((OFF, off), (ON, on)):
        expected = [] if mode == OFF else [ON]
        if sorted(set(report["info"])) != expected:
            yield "counters", f"nwor_info has {report['info']}; expected {expected}"
        facts = report["facts"]
        is_v2 = facts["runner"].startswith("vllm.v1.worker.gpu.model_runner")
        if is_v2 != (spec.runner == "v2"):
            yield "rows", f"{mode}: the runner is {facts['runner']}"
        if facts["async_scheduling"] != spec.asynchronous:
            yield "rows", f"{mode}: async_scheduling is {facts['async_scheduling']}"
        if spec.flash and facts["flash_attn"] != [spec.flash]:
            yield "rows", f"{mode}: FlashAttention is {facts['flash_attn']}"
    if facts["resolved"] != [ON] * spec.num_groups:
        yield "bytes", f"groups resolve to {facts['resolved']}"
    layers = facts["protected"] and facts["protected"]["layers"]
    if layers is None or set(layers) != set(facts["targets"]):
        text = f"protected layers are {layers}, the target's are {facts['targets']}"
        yield "bytes", text


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two outcomes of a row differ."""
    found = {what: places(one[what], other[what]) for what in OUTPUTS}
    return [f"{n} in {len(at)} places, first {at[0]}" for n, at in found.items() if at]


def places(one: Any, other: Any) -> list[Any]:
    """The keys or indices at which two dicts or lists differ."""
    if isinstance(one, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    names = sorted(one.keys() | other.keys())
    return [n for n in names if one.get(n, ...) != other.get(n, ...)]


def _digest_problem(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if steps := places(one["steps"], other["steps"]):
        return f"different steps from step {steps[0]} on"
    is_moved = False
    for i, (a, b) in enumerate(zip(one["digests"], other["digests"], strict=True)):
        # If requests got other blocks, only written slots can be compared.
        is_moved |= a[0] != b[0]
        if a[2] != b[2] or (a[1] != b[1] and not is_moved):
            return f"caches differ from step {i} on"
    return None


def counter_problems(
    spec: EngineSpec, report: Report, result: Report, has_grammars: bool = False
) -> list[str]:
    """The identities of guarantee 7 that do not hold in a row's result, with the
    oracle's counts if it was watched. report: of its process."""
    v = Counter({f"device_{k}": n for k, n in result["device_counters"].items()})
    v.update(result["counters"])
    modes = {"stage": v["device_shadow_windows"]}
    modes["cow"] = v["device_windows"] - modes["stage"]
    judged = v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
    drafted = v["spec_decode_num_draft_tokens"]
    claims = identities(v)
    # vLLM does not count drafts that a grammar forbids, and counts drafts that the
    # worker trims.
    claims[JUDGED] |= (has_grammars and judged > drafted) or (
        spec.trims_drafts and judged < drafted
    )
    claims["no invalid slot"] = v["device_invalid_slots"] == 0
    # LLMEngine 0.26 drops the statistics of a last step without outputs.
    is_all = v["nwor_tokens_staged"] == v["device_staged"]
    claims["metrics <= device"] = v["nwor_tokens_staged"] <= v["device_staged"]
    for mode, num in modes.items():
        of_metrics = v[f"nwor_windows/{mode}"]
        is_same = of_metrics == num if is_all else of_metrics <= num
        claims[f"windows of mode {mode} as on the device"] = is_same
    claims["no fallback on the worker"] = not any(result["fallbacks"].values())
    if ON != "stage" or not spec.seats:
        claims["all windows are of one mode"] = modes[ON] == v["device_windows"]
    for seen in result.get("watch", ())[:1]:
        pairs = [(of, of) for of in ("windows", "shadow_windows")]
        pairs += [("staged", "drafts"), ("committed", "accepted")]
        for ours, theirs in pairs:
            is_same = v[f"device_{ours}"] == seen[f"num_{theirs}"]
            claims[f"device {ours} == oracle's"] = is_same
        protected = report["facts"]["protected"] or {
            "log_bytes_per_draft": 0,
            "num_seats": 0,
        }
        num_logged = seen["num_logged_slots"] // seen["layers"]
        expected = num_logged * protected["log_bytes_per_draft"]
        claims["restored bytes == rejected slots"] = (
            v["device_restored_bytes"] == expected
        )
        if ON == "stage":
            claims["staged"] = v["device_committed_bytes"] > 0
        if ON == "stage" and spec.seats:
            claims[f"{spec.seats} seats"] = protected["num_seats"] == spec.seats
    failed = [claim for claim, holds in claims.items() if not holds]
    return [f"not {'; not '.join(failed)}: {dict(v)}"] if failed else []


def summary(result: Report) -> Report:
    """A row's numbers for the results file."""
    seen = result["watch"][0]
    steps, sums = seen["steps"], ("windows", "drafts", "accepted", "preempted")
    return {what: sum(step[what] for step in steps) for what in sums} | {
        "requests": len(result["tokens"]),
        "tokens": sum(map(len, result["tokens"].values())),
        "steps": len(steps),
        "graphs": Counter(step["graph"] for step in steps),
        "dropped": result["counters"].get("nwor_dropped_drafts", 0),
        "cached_tokens": max(result["cached"].values(), default=0),
        "rejected_slots_checked": seen["num_rejected_slots"],
        "dirty_slots_restored": seen["num_dirty_slots"],
        "shadow_rows_compared": seen["num_present_rows"],
        "shadow_windows": seen["num_shadow_windows"],
        "seconds": round(result["seconds"], 2),
    }
