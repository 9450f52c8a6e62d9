# SPDX-License-Identifier: Apache-2.0
"""What a soak must show: verdicts over what soak.py recorded.

Plain functions of plain data (the content of the results file), so that every check can
be seen to fail on a bad record. A check that could not be made says so; it never
passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools.soak.load import MIN_PROBES, WEIGHTS

PASS, FAIL, NOT_JUDGED = "pass", "fail", "not judged"
# Growth of the resident memory of all server processes together, after the warm-up.
# An hour's run may then grow by 60 MiB: less than one worker's own fluctuation.
MAX_GROWTH_MIB_PER_MINUTE = 1.0
WARM_UP_SHARE = 0.25
MIN_WARM_UP_SECONDS = 60.0
MIN_JUDGED_SECONDS = 180.0
# What each mode copies to a request's own blocks.
BYTES_OF = {"cow": "restored_bytes", "stage": "committed_bytes"}

Record = Mapping[str, Any]


class Check(NamedTuple):
    """One verdict. good: None if it could not be judged. found, wanted: in words."""

    name: str
    good: bool | None
    found: str
    wanted: str


def judge(record: Record) -> list[dict[str, str]]:
    """All checks over one record (what soak.py writes, without "checks"): name,
    verdict, found, wanted. With mode off, the control, those of NWOR are not judged."""
    of_nwor = list(_of_nwor(record))
    if record["arguments"]["mode"] == "off":
        of_nwor = [c._replace(good=None, found="NWOR was off") for c in of_nwor]
    before, after = list(_of_the_load(record)), list(_of_the_server(record))
    of_nwor.append(_audit(record))
    verdicts = {True: PASS, False: FAIL, None: NOT_JUDGED}
    return [
        {"name": name, "verdict": verdicts[good], "found": found, "wanted": wanted}
        for name, good, found, wanted in (*before, *of_nwor, *after)
    ]


def _of_the_load(record: Record) -> Iterator[Check]:
    """Each kind of request was made, and none failed; the server's processes are those
    of the start; one text for each kind of probe, from start to end."""
    load = record["load"]
    missing = {kind for kind in WEIGHTS if not load["kinds"].get(kind)}
    if record["arguments"]["vocab_size"] is not None:
        missing -= {"stop"}  # a server without a tokenizer knows no stop strings
    missing -= {record["arguments"]["without"]}
    found = ", ".join(f"{n} {kind}" for kind, n in load["kinds"].items())
    found += f"; {load['num_failed']} failed"
    found += f"; none of {', '.join(sorted(missing))}" if missing else ""
    found += f": {load['failures'][0]}" if load["failures"] else ""
    good = not missing and not load["num_failed"]
    yield Check("load", good, found, "every kind of request asked for, none failed")

    answers, ended = record["alive"]["answers"], record["alive"]["ended"]
    found = "answers" if answers else "does not answer"
    found += f"; ended: {', '.join(ended)}" if ended else ""
    good, wanted = answers and not ended, "answers, and no process of it ended"
    yield Check("server alive", good, found, wanted)

    probes, parts = record["probe"]["kinds"], []
    good = bool(probes)
    for kind, one in probes.items():
        num_outputs, num_tokens = len(one["outputs"]), min(one["num_tokens"])
        good &= num_outputs == 1 and one["runs"] >= MIN_PROBES and num_tokens > 0
        runs = f"{kind}: {one['runs']} runs of {num_tokens} tokens"
        parts.append(f"{runs}, distinct outputs: {num_outputs}")
    wanted = f"one output of each kind, from {MIN_PROBES} runs or more"
    yield Check("probe", good, "; ".join(parts) or "no probe ran", wanted)


def _of_nwor(record: Record) -> Iterator[Check]:
    """NWOR was on for every KV-cache group, had something to do, and counted right."""
    metrics = record["metrics"]

    def ours(name: str) -> float:
        return float(metrics.get(f"vllm:nwor_{name}", 0))

    def vllms(name: str) -> float:
        return float(metrics.get(f"vllm:spec_decode_num_{name}", 0))

    info = [row for row in record["info"] if row["value"] == 1]
    on = [row for row in info if row["resolved"] in BYTES_OF]
    names = ["windows", "committed_tokens", "rejected_tokens"]
    names += sorted({BYTES_OF[row["resolved"]] for row in on})
    counts = ", ".join(f"{ours(name):.0f} {name}" for name in names)
    yield Check(
        "NWOR at work",
        bool(info) and len(on) == len(info) and all(map(ours, names)),
        f"{len(on)} of {len(info)} groups protected; {counts}",
        "all groups protected; windows, committed, rejected and bytes above 0",
    )
    staged, dropped = ours("tokens_staged"), ours("dropped_drafts")
    committed, rejected = ours("committed_tokens"), ours("rejected_tokens")
    # The load asks for no structured output, so that no draft is grammar-invalid.
    drafts, accepted = vllms("draft_tokens"), vllms("accepted_tokens")
    parts = committed + rejected + dropped
    for name, left, right, wanted in (
        ("parts", staged, parts, "staged == committed + rejected + dropped"),
        ("drafts", staged, drafts + dropped, "staged == vLLM's draft tokens + dropped"),
        ("accepted", committed, accepted, "committed == vLLM's accepted tokens"),
    ):
        found = f"{left:.0f} and {right:.0f}"
        yield Check(f"identity: {name}", left == right, found, wanted)
    # Windows that vLLM never counted may come on top of those that it did.
    windows, counted = ours("windows"), vllms("drafts")
    found = f"{windows:.0f} and {counted:.0f}"
    wanted = "windows >= vLLM's drafts > 0"
    yield Check("identity: windows", 0 < counted <= windows, found, wanted)
    for name in ("breaches", "fallbacks"):
        count = metrics.get(f"vllm:nwor_{name}")
        found = "no such counter" if count is None else f"{count:.0f}"
        yield Check(name, count == 0, found, "0")


def _audit(record: Record) -> Check:
    """The KV audit looked at as many steps as asked for, and found nothing."""
    metrics = record["metrics"]
    least = record["arguments"]["audited_steps"] or 1
    wanted = f"nothing in {least} steps or more"
    steps, findings, unverified = (
        metrics.get(f"vllm:nwor_audit_{name}")
        for name in ("steps", "findings", "unverified")
    )
    if steps is None and not record["arguments"]["audited_steps"]:
        return Check("KV audit", None, "it was off", wanted)
    found = f"{findings} findings, {unverified} slots not verified, in {steps} steps"
    good = findings == 0 and steps is not None and steps >= least
    return Check("KV audit", good, found, wanted)


def _of_the_server(record: Record) -> Iterator[Check]:
    """Nothing runs or waits, and no KV block is held; memory does not grow; no line of
    the log is an error, up to its shutdown; every API server had clients: connections
    are shared out among them."""
    idle = record["idle"]
    found = f"{idle['running']:g} running, {idle['waiting']:g} waiting, "
    found += f"KV cache usage {idle['kv_cache_usage']:g}"
    wanted = "0 running, 0 waiting, KV cache usage 0 after the load"
    yield Check("KV blocks free", not any(idle.values()), found, wanted)

    wanted = f"at most {MAX_GROWTH_MIB_PER_MINUTE:g} MiB a minute after the warm-up"
    yield Check("memory flat", *_growth(record), wanted)

    errors = record["log"]["errors"]
    found = f"{len(errors)} error lines" + (f": {errors[0]}" if errors else "")
    yield Check("log", not errors, found, "no error line")

    expected, clients = record["arguments"]["api_server_count"], record["clients"]
    found = ", ".join(f"{name}: {n} seen" for name, n in sorted(clients.items()))
    good = None if expected == 1 else len(clients) >= expected
    wanted = f"{expected} processes that had clients"
    yield Check("API servers", good, found or "no client was seen", wanted)


def _growth(record: Record) -> tuple[bool | None, str]:
    """The slope of the sum over all server processes, by least squares."""
    memory = record["memory"]
    start = max(MIN_WARM_UP_SECONDS, record["load"]["seconds"] * WARM_UP_SHARE)
    total = map(sum, zip(*memory["rss_mib"].values(), strict=True))
    samples = zip(memory["seconds"], total, strict=True)
    kept = [(second, mib) for second, mib in samples if second >= start]
    seconds = kept[-1][0] - kept[0][0] if len(kept) > 2 else 0
    if seconds < MIN_JUDGED_SECONDS:
        least = f"fewer than {MIN_JUDGED_SECONDS:g} s"
        return None, f"{least} after a warm-up of {start:g} s"
    slope = statistics.linear_regression(*zip(*kept, strict=True)).slope * 60
    found = f"{slope:+.2f} MiB a minute from {kept[0][1]:.0f} MiB over {seconds:.0f} s"
    return slope <= MAX_GROWTH_MIB_PER_MINUTE, found
