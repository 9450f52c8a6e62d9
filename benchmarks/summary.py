# SPDX-License-Identifier: Apache-2.0
"""From runs to the plain numbers of a result's line, which all reports and tables show.

Everything is computed here once, so that they cannot disagree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy

from benchmarks.ab import CONTROL, Pair, Run, intervals

# The low end of a ratio's interval is at least this.
RATIO_BUDGET = 0.995
# Of begin + commit in a step on a GPU.
HOST_BUDGET_US = 30.0
CPU_SHARE_BUDGET = 0.02


def pair_ratios(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """The ratios of all pairs, by their name, in the order of rounds."""
    found: dict[str, list[float]] = {}
    for pair in pairs:
        found.setdefault(pair.name, []).append(pair.ratio)
    return found


def speed(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over runs, of latency over all their requests."""
    latencies = [latency for run in runs for latency in run.latency_s]
    return {
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "latency_s_median": statistics.median(latencies),
        "latency_s_p95": float(numpy.percentile(latencies, 95)),
        "num_runs": len(runs),
    }


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """vLLM's own counts, summed over runs. per_position: the share of windows whose
    draft at that position was accepted."""
    names = ("windows", "drafted", "accepted")
    found = {name: sum(run.drafts[name] for run in runs) for name in names}
    counts = (run.drafts["accepted_per_position"] for run in runs)
    accepted = list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
    windows = found["windows"] or math.inf
    shares = [count / windows for count in accepted]
    return found | {"accepted_per_position": accepted, "per_position": shares}


def nwor(runs: Sequence[Run]) -> dict[str, Any]:
    """What NWOR did in `runs`, all active and timed, summed, with its host time.

    host.share_of_time: all time in begin and commit over all time in steps; on a CPU
    most of it is the copies of few steps, which a median does not show.
    """
    counts = Counter[str]()
    done = [run.nwor for run in runs if run.nwor is not None]
    for one in done:
        counts.update(one.counts)
    begin = [us for one in done for us in one.begin_us]
    commit = [us for one in done for us in one.commit_us]
    steps = [1e6 * s for run in runs for s in run.step_s]
    host = None
    if begin and commit:
        host = {
            "num_runs": len(done),
            "num_begins": len(begin),
            "begin_us_median": statistics.median(begin),
            "commit_us_median": statistics.median(commit),
            "begin_us_p95": numpy.percentile(begin, 95),
            "commit_us_p95": numpy.percentile(commit, 95),
            "step_us_median": statistics.median(steps),
            "share_of_time": (sum(begin) + sum(commit)) / sum(steps),
        }
    drafted = sum(run.drafts["drafted"] for run in runs)
    return {
        "num_runs": len(runs),
        **counts,
        # Windows that the worker ran and the scheduler never counted.
        "staged_minus_drafted": counts["staged"] - drafted,
        "host": host,
    }


def comparison(
    pairs: Sequence[Pair],
    baseline: str,
    until: float | None,
    timed: Mapping[str, Sequence[Run]],
) -> dict[str, Any]:
    """The summary of `ab.compare`. until: what --pairs-until-ci asked for. timed: of
    the tested arms the runs that kept host times.

    ratio: of each tested arm, and of CONTROL. speed: of the baseline, with its control,
    and of each tested arm. nwor: of each tested arm.
    """
    found = intervals(pairs)
    tests: dict[str, list[Run]] = {}
    for pair in pairs:
        tests.setdefault(pair.name, []).append(pair.test)
    num_pairs = len(tests.pop(CONTROL))
    first = next(iter(tests))
    both = (pair.references for pair in pairs if pair.name == first)
    references = {baseline: list(itertools.chain(*both))}
    reach = max(one.reach for one in found.values())
    return {
        "num_pairs": num_pairs,
        "until": until,
        "until_reached": None if until is None else reach <= until,
        "ratio": {name: asdict(one) for name, one in found.items()},
        **of_runs(tests, timed),
        "speed": {name: speed(runs) for name, runs in (references | tests).items()},
    }


def of_runs(
    tests: Mapping[str, Sequence[Run]], timed: Mapping[str, Sequence[Run]]
) -> dict[str, Any]:
    """What is said of runs in each arm; acceptance: of the first. timed: by arm the
    runs that kept host times, which say what NWOR did."""
    return {
        "speed": {name: speed(runs) for name, runs in tests.items()},
        "acceptance": acceptance(next(iter(tests.values()))),
        "nwor": {name: nwor(runs) for name, runs in timed.items() if runs},
    }


def conclusion(name: str, ratio: dict[str, float], control: dict[str, float]) -> str:
    """What a comparison says in one sentence: the share of throughput that an arm costs
    (less than nothing: it is faster), and how far the control's interval, of the same
    code on both sides, reaches from 1."""
    cost, low, high = (1 - ratio[key] for key in ("median", "high", "low"))
    noise = max(abs(control["low"] - 1), abs(control["high"] - 1))
    text = f"{name} costs {cost * 100:.1f} % of the throughput ({low * 100:.1f} to "
    text += f"{high * 100:.1f}); noise of this machine {noise * 100:.1f} %"
    within = control["low"] <= ratio["median"] <= control["high"]
    return f"{text}: no difference was resolved from it" if within else text


def verdict(ratio: dict[str, float], control: dict[str, float]) -> str:
    """Whether a ratio is within RATIO_BUDGET, which goes by the low end of its
    interval, lowered by as much as the control's interval is away from 1: a run that is
    biased has to be better by its bias. What noise alone may give, a median inside the
    control's interval, is never "met": a difference was not resolved, wherever the low
    end is."""
    bias = max(control["low"] - 1, 1 - control["high"], 0)
    holds = ratio["low"] - bias >= RATIO_BUDGET
    if control["low"] <= ratio["median"] <= control["high"]:
        return "not resolved, low end holds" if holds else "not resolved"
    return "met" if holds else "missed"


def outputs(tokens: Sequence[Sequence[int]], num_runs: int) -> dict[str, Any]:
    """Size and digest of the outputs, which all runs had."""
    text = json.dumps([list(ids) for ids in tokens])
    return {
        "num_requests": len(tokens),
        "num_tokens": sum(map(len, tokens)),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "num_runs": num_runs,
    }


def own_process(result: dict[str, Any]) -> dict[str, float] | None:
    """Tokens a second of the baseline over those of the engine that never loaded NWOR:
    the median of all runs over the median there, over the fastest run there (low) and
    over the slowest (high). None if no such engine ran. Not a pair's ratio: what one
    process is faster than another for other reasons is in it."""
    if not result.get("true_off"):
        return None
    speed = result["summary"]["speed"][result["baseline"]]["tokens_per_second"]
    own = result["true_off"]["tokens_per_second"]
    return {
        "median": speed / statistics.median(own),
        "low": speed / max(own),
        "high": speed / min(own),
        "num_runs": len(own),
    }
