# SPDX-License-Identifier: Apache-2.0
"""From runs to the plain numbers that go to the JSON file and, from there, to tables.

Everything a report, a plot or the README shows of a run is computed here once, so that
they cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.ab import Kind, Pair, intervals
from benchmarks.intervals import Interval, percentile
from benchmarks.runs import NworDone, Run

HOST_BUDGET_US = 40.0
CPU_SHARE_BUDGET = 0.02


def sample(run: Run) -> dict[str, Any]:
    """The raw numbers of one run, without its tokens."""
    return {
        "seconds": run.seconds,
        "num_tokens": run.num_tokens,
        "num_steps": len(run.step_s),
        "step_s_median": statistics.median(run.step_s),
        "latency_s": run.latency_s,
        "drafts": asdict(run.drafts),
        "nwor": None if run.nwor is None else asdict(run.nwor),
    }


def pair_samples(pairs: Sequence[Pair], kind: Kind) -> list[dict[str, Any]]:
    """The raw numbers of all pairs of one kind, in the order they were run."""
    return [
        {
            "number": pair.number,
            "test_first": pair.test_first,
            "ratio": pair.ratio,
            "reference": sample(pair.reference),
            "test": sample(pair.test),
        }
        for pair in pairs
        if pair.kind is kind
    ]


def speed(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens a second (median of the runs) and latency (over all their requests)."""
    latencies = [latency for run in runs for latency in run.latency_s]
    return {
        "tokens_per_second": statistics.median(r.tokens_per_second for r in runs),
        "latency_s_median": statistics.median(latencies),
        "latency_s_p95": percentile(latencies, 95),
        "num_runs": len(runs),
    }


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """vLLM's own counts, summed over runs. per_position: the share of windows whose
    draft at that position was accepted."""
    windows = sum(run.drafts.windows for run in runs)
    positions = max(len(run.drafts.accepted_per_position) for run in runs)
    accepted = [0] * positions
    for run in runs:
        for position, count in enumerate(run.drafts.accepted_per_position):
            accepted[position] += count
    return {
        "windows": windows,
        "drafted": sum(run.drafts.drafted for run in runs),
        "accepted": sum(run.drafts.accepted for run in runs),
        "accepted_per_position": accepted,
        "per_position": [count / windows if windows else 0.0 for count in accepted],
    }


def nwor(runs: Sequence[Run]) -> dict[str, Any]:
    """What NWOR did in `runs` (all active), summed, with its host time.

    host.share_of_time: all time in begin and commit over all time in steps.
    host.share_of_step: median begin plus median commit over the median step.
    """
    done = [run.nwor for run in runs if run.nwor is not None]
    counts = {
        name: sum(getattr(one, name) for one in done)
        for name in NworDone.__dataclass_fields__
        if name not in ("begin_us", "commit_us")
    }
    begin = [us for one in done for us in one.begin_us]
    commit = [us for one in done for us in one.commit_us]
    steps = [1e6 * s for run in runs for s in run.step_s]
    host = None
    if begin and commit:
        medians = statistics.median(begin), statistics.median(commit)
        host = {
            "num_begins": len(begin),
            "begin_us_median": medians[0],
            "commit_us_median": medians[1],
            "begin_us_p95": percentile(begin, 95),
            "commit_us_p95": percentile(commit, 95),
            "step_us_median": statistics.median(steps),
            "share_of_step": sum(medians) / statistics.median(steps),
            "share_of_time": (sum(begin) + sum(commit)) / sum(steps),
        }
    drafted = sum(run.drafts.drafted for run in runs)
    return {
        "num_runs": len(runs),
        **counts,
        # Windows that the worker ran and the scheduler never counted.
        "staged_minus_drafted": counts.get("staged", 0) - drafted,
        "host": host,
    }


def comparison(pairs: Sequence[Pair], until: float | None) -> dict[str, Any]:
    """The summary of `ab.compare`. until: what --pairs-until-ci asked for."""
    tests = [pair.test for pair in pairs if pair.kind is Kind.NWOR]
    references = [pair.reference for pair in pairs if pair.kind is Kind.NWOR]
    found = intervals(pairs)
    ratio, control = found[Kind.NWOR], found[Kind.CONTROL]
    return {
        "ratio": {
            "num_pairs": len(tests),
            "nwor": _interval(ratio),
            "control": _interval(control),
            "overlap": ratio.overlaps(control),
            "until": until,
            "until_reached": None
            if until is None
            else max(ratio.reach, control.reach) <= until,
        },
        "off": speed(references),
        "test": speed(tests),
        "acceptance": acceptance(tests),
        "nwor": nwor(tests),
    }


def single(runs: Sequence[Run]) -> dict[str, Any]:
    """The summary of runs that are all alike."""
    active = all(run.nwor is not None for run in runs)
    return {
        "test": speed(runs),
        "acceptance": acceptance(runs),
        "nwor": nwor(runs) if active else None,
    }


def outputs(tokens: Sequence[Sequence[int]], keep: bool) -> dict[str, Any]:
    """Length and digest of the outputs; all of them too if `keep`."""
    text = json.dumps([list(ids) for ids in tokens])
    found: dict[str, Any] = {
        "num_tokens": [len(ids) for ids in tokens],
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    if keep:
        found["tokens"] = [list(ids) for ids in tokens]
    return found


def _interval(interval: Interval) -> dict[str, float]:
    return {
        "median": interval.median,
        "low": interval.low,
        "high": interval.high,
    }
