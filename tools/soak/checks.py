# SPDX-License-Identifier: Apache-2.0
"""What a soak must show: verdicts over what soak.py recorded.

Plain functions of plain data (the content of the results file), so that every check can
be seen to fail on a bad record. A check that could not be made says so; it never
passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

PASS, FAIL, NOT_JUDGED = "pass", "fail", "not judged"
# Growth of the resident memory of all server processes together, after the warm-up.
# An hour's run may then grow by 60 MiB: less than one worker's own fluctuation.
MAX_GROWTH_MIB_PER_MINUTE = 1.0
WARM_UP_SHARE = 0.25
MIN_WARM_UP_SECONDS = 60.0
MIN_JUDGED_SECONDS = 180.0
# Requests that the load must have made, each at least once.
KINDS = ("whole", "stream", "stop", "abort_mid_stream", "abort_before_first_token")
MIN_PROBES = 3

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One verdict. found, wanted: in words, for the reader of the results file."""

    name: str
    verdict: str
    found: str
    wanted: str


def judge(record: Record) -> list[Check]:
    """All checks over one record (the dict that soak.py writes, without "checks").

    With mode off, the control, those of NWOR are not judged."""
    checks = [check(record) for check in CHECKS]
    if record["arguments"]["mode"] != "off":
        return checks
    return [
        replace(check, verdict=NOT_JUDGED, found="NWOR was off")
        if make in OF_NWOR
        else check
        for make, check in zip(CHECKS, checks, strict=True)
    ]


def as_rows(checks: Sequence[Check]) -> list[dict[str, str]]:
    """Plain dicts for JSON."""
    return [asdict(check) for check in checks]


def passed(checks: Sequence[Check]) -> bool:
    """Whether none failed."""
    return all(check.verdict != FAIL for check in checks)


def _check(name: str, good: bool, found: str, wanted: str) -> Check:
    return Check(name, PASS if good else FAIL, found, wanted)


def check_load(record: Record) -> Check:
    """Each kind of request was made, and none failed."""
    load = record["load"]
    kinds = load["kinds"]
    missing = [kind for kind in KINDS if not kinds.get(kind)]
    if record["arguments"]["vocab_size"] is not None and "stop" in missing:
        missing.remove("stop")  # a server without a tokenizer knows no stop strings
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    found += f"; {load['num_failed']} failed"
    if missing:
        found += f"; none of {', '.join(missing)}"
    if load["failures"]:
        found += f": {load['failures'][0]}"
    return _check(
        "load",
        not missing and not load["num_failed"],
        found,
        "every kind of request, none failed",
    )


def check_alive(record: Record) -> Check:
    """The server's processes at the end are those of the start."""
    alive = record["alive"]
    return _check(
        "server alive",
        bool(alive["answers"]) and not alive["ended"],
        ("answers" if alive["answers"] else "does not answer")
        + (f"; ended: {', '.join(alive['ended'])}" if alive["ended"] else ""),
        "answers, and no process of it ended",
    )


def check_probe(record: Record) -> Check:
    """One text for each kind of probe, from start to end."""
    name, wanted = "probe", f"one output of each kind, from {MIN_PROBES} runs or more"
    probe = record["probe"]
    if probe["policy"] == "off":
        return Check(name, NOT_JUDGED, "--probe off", wanted)
    parts, good = [], bool(probe["kinds"])
    for kind, one in probe["kinds"].items():
        num_outputs, num_tokens = len(one["outputs"]), min(one["num_tokens"])
        good &= num_outputs == 1 and one["runs"] >= MIN_PROBES and num_tokens > 0
        parts.append(
            f"{kind}: {num_outputs} different in {one['runs']} runs of "
            f"{num_tokens} tokens"
        )
    return _check(name, good, "; ".join(parts) or "no probe ran", wanted)


def check_idle(record: Record) -> Check:
    """Nothing runs or waits, and no KV block is held."""
    idle = record["idle"]
    return _check(
        "KV blocks free",
        not any(idle.values()),
        f"{idle['running']:g} running, {idle['waiting']:g} waiting, "
        f"KV cache usage {idle['kv_cache_usage']:g}",
        "0 running, 0 waiting, KV cache usage 0 after the load",
    )


def _nwor(record: Record, name: str) -> float:
    return float(record["metrics"].get(f"vllm:nwor_{name}", 0))


def _vllm(record: Record, name: str) -> float:
    return float(record["metrics"].get(f"vllm:spec_decode_num_{name}", 0))


# What each mode copies to a request's own blocks.
_BYTES_OF = {"cow": "restored_bytes", "stage": "committed_bytes"}


def check_protected(record: Record) -> Check:
    """NWOR was on for every KV-cache group, and had something to do."""
    info = [row for row in record["info"] if row["value"] == 1]
    on = [row for row in info if row["resolved"] in _BYTES_OF]
    names = ["windows", "committed_tokens", "rejected_tokens"]
    names += sorted({_BYTES_OF[row["resolved"]] for row in on})
    counts = {name: _nwor(record, name) for name in names}
    found = f"{len(on)} of {len(info)} groups protected; "
    found += ", ".join(f"{value:.0f} {name}" for name, value in counts.items())
    return _check(
        "NWOR at work",
        bool(info) and len(on) == len(info) and all(counts.values()),
        found,
        "all groups protected; windows, committed, rejected and bytes above 0",
    )


def _identity(
    name: str, left: str, right: str
) -> Callable[[Callable[[Record], tuple[float, float]]], Callable[[Record], Check]]:
    def make(sides: Callable[[Record], tuple[float, float]]) -> Any:
        def check(record: Record) -> Check:
            found_left, found_right = sides(record)
            return _check(
                name,
                found_left == found_right,
                f"{found_left:.0f} and {found_right:.0f}",
                f"{left} == {right}",
            )

        return check

    return make


@_identity("identity: parts", "staged", "committed + rejected + dropped")
def check_parts(record: Record) -> tuple[float, float]:
    parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
    return _nwor(record, "tokens_staged"), sum(_nwor(record, name) for name in parts)


# The load asks for no structured output, so that no draft is grammar-invalid.
@_identity("identity: drafts", "staged", "vLLM's draft tokens + dropped")
def check_drafts(record: Record) -> tuple[float, float]:
    drafted = _vllm(record, "draft_tokens")
    return _nwor(record, "tokens_staged"), drafted + _nwor(record, "dropped_drafts")


@_identity("identity: accepted", "committed", "vLLM's accepted tokens")
def check_accepted(record: Record) -> tuple[float, float]:
    return _nwor(record, "committed_tokens"), _vllm(record, "accepted_tokens")


def check_windows(record: Record) -> Check:
    """Windows that vLLM never counted may come on top of those that it did."""
    ours, counted = _nwor(record, "windows"), _vllm(record, "drafts")
    return _check(
        "identity: windows",
        0 < counted <= ours,
        f"{ours:.0f} and {counted:.0f}",
        "windows >= vLLM's drafts > 0",
    )


def check_breaches(record: Record) -> Check:
    known = "vllm:nwor_breaches" in record["metrics"]
    found = f"{_nwor(record, 'breaches'):.0f}" if known else "no such counter"
    return _check("breaches", known and found == "0", found, "0")


def check_fallbacks(record: Record) -> Check:
    """Steps that ran as vanilla; no series at all is none."""
    found = f"{_nwor(record, 'fallbacks'):.0f}"
    return _check("fallbacks", found == "0", found, "0")


def check_log(record: Record) -> Check:
    """No line of the server's log is an error, up to its shutdown."""
    name, wanted = "log", "no error line"
    if record["log"] is None:
        return Check(name, NOT_JUDGED, "the log was not given", wanted)
    errors = record["log"]["errors"]
    found = f"{len(errors)} error lines" + (f": {errors[0]}" if errors else "")
    return _check(name, not errors, found, wanted)


def check_api_servers(record: Record) -> Check:
    """Every API server had clients: connections are shared out among them."""
    name, wanted = "API servers", "each had clients"
    expected = record["arguments"]["api_server_count"]
    if record["memory"] is None or expected == 1:
        why = "the server's processes were not given" if expected != 1 else "one only"
        return Check(name, NOT_JUDGED, why, wanted)
    clients = record["clients"]
    found = ", ".join(f"{server}: {n} seen" for server, n in sorted(clients.items()))
    return _check(
        name,
        len(clients) >= expected and all(clients.values()),
        found or "no client was seen",
        f"{expected} processes that had clients",
    )


def growth(times: Sequence[float], mib: Sequence[float]) -> float:
    """MiB a minute, by least squares. times: [n] seconds, n >= 2; mib: [n]."""
    return statistics.linear_regression(times, mib).slope * 60


def warm_up_seconds(duration: float) -> float:
    """How much of a run of `duration` seconds is warm-up."""
    return max(MIN_WARM_UP_SECONDS, duration * WARM_UP_SHARE)


def check_memory(record: Record) -> Check:
    """The sum over all server processes does not grow after the warm-up."""
    name = "memory flat"
    wanted = f"at most {MAX_GROWTH_MIB_PER_MINUTE:g} MiB a minute after the warm-up"
    memory = record["memory"]
    if memory is None:
        return Check(name, NOT_JUDGED, "the server's processes were not given", wanted)
    times = memory["seconds"]
    start = warm_up_seconds(record["load"]["seconds"])
    total = [sum(values) for values in zip(*memory["rss_mib"].values(), strict=True)]
    kept = [(t, mib) for t, mib in zip(times, total, strict=True) if t >= start]
    if len(kept) < 3 or kept[-1][0] - kept[0][0] < MIN_JUDGED_SECONDS:
        return Check(
            name,
            NOT_JUDGED,
            f"fewer than {MIN_JUDGED_SECONDS:g} s after a warm-up of {start:g} s",
            wanted,
        )
    slope = growth(*zip(*kept, strict=True))
    return _check(
        name,
        slope <= MAX_GROWTH_MIB_PER_MINUTE,
        f"{slope:+.2f} MiB a minute from {kept[0][1]:.0f} MiB over "
        f"{kept[-1][0] - kept[0][0]:.0f} s",
        wanted,
    )


OF_NWOR = (
    check_protected,
    check_parts,
    check_drafts,
    check_accepted,
    check_windows,
    check_breaches,
    check_fallbacks,
)
CHECKS: tuple[Callable[[Record], Check], ...] = (
    check_load,
    check_alive,
    check_probe,
    *OF_NWOR,
    check_idle,
    check_memory,
    check_log,
    check_api_servers,
)
