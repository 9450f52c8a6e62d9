# SPDX-License-Identifier: Apache-2.0
"""Ways to run the same requests ("arms"), each between two runs of a baseline.

The first arm is the baseline. A round is a run of it, one of each arm that is tested
and one more of the baseline as a control, in turned order in every second round, and a
run of the baseline again. A ratio is tokens a second of the run in the middle over
those of the two around it, together; below 1 the test is slower. A machine that slows
down or warms up does so to both sides alike. What the control's ratios show is noise.

Every run's outputs are compared with those of the first; a difference ends it all.

How well a median ratio is known is said by the percentile bootstrap: the sample is
drawn again with replacement many times, and the middle 90 % of the medians is the
interval. It says nothing of another machine, or of this one on another day.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

CONFIDENCE_PERCENT = 90
NUM_RESAMPLES = 5000


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap interval [low, high]."""

    median: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the interval goes from its median, on its longer side."""
        return max(self.high - self.median, self.median - self.low)


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values`, one or more, and its percentile bootstrap interval. The
    same values always give the same one."""
    sizes = (NUM_RESAMPLES, len(values))
    drawn = numpy.random.default_rng(0).choice(numpy.asarray(values, float), sizes)
    tail = (100 - CONFIDENCE_PERCENT) / 2
    ends = numpy.percentile(numpy.median(drawn, axis=1), (tail, 100 - tail))
    return Interval(statistics.median(values), *map(float, ends))


@dataclass(frozen=True)
class NworDone:
    """What NWOR did in a run.

    counts: increments of its counters by name, and logged_bytes: staged drafts times
    the log's bytes a draft, 0 where shadow blocks were used.
    begin_us, commit_us: host times, one a step that had drafts, [num_windowed_steps].
    """

    counts: dict[str, int]
    begin_us: list[float]
    commit_us: list[float]


@dataclass(frozen=True)
class Run:
    """One run of all requests.

    outputs: token ids of each request, in request order. seconds: sum over the waves,
    from a wave's first step to its last. latency_s: of each request, from its wave's
    first step until it finished. step_s: duration of each engine step. drafts: what
    vLLM's own counters say: windows, drafted, accepted, accepted_per_position.
    """

    outputs: list[list[int]]
    seconds: float
    latency_s: list[float]
    step_s: list[float]
    drafts: dict[str, Any]
    nwor: NworDone | None

    @property
    def num_tokens(self) -> int:
        """Output tokens, counted from the outputs."""
        return sum(len(output) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Arm:
    """One way to run the requests on an engine.

    name: in tables and files. hooked: whether NWOR's hooks are on vLLM; else it runs
    its own code only, as `hooks._wrap.unhook` says. stages: whether shadow blocks are
    used where the engine has them; else all is logged. audit_mib: what the KV audit
    compares in a step (VLLM_NWOR_AUDIT_MIB), where it is what is measured.
    """

    name: str
    hooked: bool
    stages: bool = True
    audit_mib: int | None = None


UNHOOKED = Arm("unhooked", hooked=False)
# The name of the pairs whose test is the baseline too; no arm has it.
CONTROL = "control"


@dataclass(frozen=True)
class Pair:
    """A run of what is tested, and its reference: the baseline's runs before and after
    it in the round. name: the tested arm's, or CONTROL."""

    name: str
    references: tuple[Run, Run]
    test: Run

    @property
    def reference_rate(self) -> float:
        """Tokens a second of the reference."""
        seconds = sum(run.seconds for run in self.references)
        return sum(run.num_tokens for run in self.references) / seconds

    @property
    def ratio(self) -> float:
        """Tokens a second of the test over those of the reference."""
        return self.test.tokens_per_second / self.reference_rate


class OutputsDiffer(Exception):
    """Two runs of the same requests gave different tokens."""


def runs_a_round(arms: Sequence[Arm]) -> int:
    """Two of the baseline, one of each tested arm, one of control."""
    return 2 + len(arms)


def check_outputs(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    expected_is: str,
    found_is: str,
) -> None:
    """Compares the token ids of all requests. Raises OutputsDiffer, naming the first
    request and token that differ."""
    for request, pair in enumerate(zip(expected, found, strict=True)):
        for at, (a, b) in enumerate(itertools.zip_longest(*pair)):
            if a != b:
                ends = {None: f"its end after {at} tokens"}
                raise OutputsDiffer(
                    "no speed is printed, outputs differ: request "
                    f"{request} differs at output token {at}: {expected_is} gave "
                    f"{ends.get(a, f'token {a}')}, {found_is} gave "
                    f"{ends.get(b, f'token {b}')}"
                )


def compare(
    run: Callable[[Arm], Run],
    arms: Sequence[Arm],
    repeats: int,
    until: float | None,
    max_pairs: int,
    progress: Callable[[str], None],
    expected: Sequence[Sequence[int]] | None = None,
) -> list[Pair]:
    """Runs `repeats` rounds, after a warm-up of each arm that is not counted.

    run: does one run in an arm.
    arms: the baseline, then those that are tested against it.
    until: if set, rounds are added until all intervals reach no farther than this from
        their medians, or there are `max_pairs`.
    progress: called before each run with what it is.
    expected: outputs of another engine, which all runs must equal.

    Raises:
        OutputsDiffer: a run's outputs are not those, or those of the first.
    """
    baseline, *tested = arms
    known = {} if expected is None else {"an engine without NWOR": expected}

    def one(arm: Arm, name: str) -> Run:
        progress(name)
        done = run(arm)
        if not known:
            known[baseline.name] = done.outputs
        for of, outputs in known.items():
            check_outputs(outputs, done.outputs, of, name)
        return done

    for arm in arms:
        one(arm, f"the warm-up of {arm.name}")
    pairs: list[Pair] = []
    for number in itertools.count(1):
        if number > repeats:
            if until is None or number > max_pairs:
                break
            if all(found.reach <= until for found in intervals(pairs).values()):
                break
        middle = [*((arm.name, arm) for arm in tested), (CONTROL, baseline)]
        if number % 2 == 0:
            middle.reverse()
        order = [("baseline", baseline), *middle, ("baseline", baseline)]
        runs = [one(arm, f"{name} of round {number}") for name, arm in order]
        for (name, _), test in zip(middle, runs[1:-1], strict=True):
            pairs.append(Pair(name, (runs[0], runs[-1]), test))
    return pairs


def intervals(pairs: Sequence[Pair]) -> dict[str, Interval]:
    """The median ratio and its interval, by the pairs' names."""
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        ratios.setdefault(pair.name, []).append(pair.ratio)
    return {name: median_interval(found) for name, found in ratios.items()}
