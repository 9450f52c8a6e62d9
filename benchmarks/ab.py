# SPDX-License-Identifier: Apache-2.0
"""Ways to run the same requests ("arms") in pairs, and a control beside them.

The first arm is the baseline, and the reference of every pair; each other one is tested
against it. Pairs go in the order ABBA: the reference first in one, last in the next, so
that a machine that slows down or warms up does so to both sides alike. After a pair of
each tested arm comes a control pair, the baseline in both runs: what its ratios show is
noise. A ratio is tokens a second of the test run over those of the reference run; below
1 the test is slower.

Every run's outputs are compared with those of the first; a difference ends it all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.intervals import Interval, median_interval
from benchmarks.runs import Run


@dataclass(frozen=True)
class Arm:
    """One way to run the requests on an engine.

    name: in tables and files. hooked: whether NWOR's hooks are on vLLM; else it runs
    its own code only, as `hooks._wrap.unhook` says. stages: whether shadow pages are
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
class PlannedPair:
    """One pair to come. name: its test's, or CONTROL. number counts the pairs of its
    name from 0."""

    name: str
    number: int
    reference: Arm
    test: Arm

    @property
    def test_first(self) -> bool:
        return self.number % 2 == 1

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """What runs first, and second."""
        if self.test_first:
            return self.test, self.reference
        return self.reference, self.test


@dataclass(frozen=True)
class Pair:
    """A pair that was run."""

    planned: PlannedPair
    reference: Run
    test: Run

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def ratio(self) -> float:
        """Tokens a second of the test over those of the reference."""
        return self.test.tokens_per_second / self.reference.tokens_per_second


class OutputsDiffer(Exception):
    """Two runs of the same requests gave different tokens."""


def runs_a_round(arms: Sequence[Arm]) -> int:
    """Runs in a pair of each tested arm and one of control."""
    return 2 * len(arms)


def plan(arms: Sequence[Arm]) -> Iterator[PlannedPair]:
    """Pairs without end, a round after the other: each tested arm's, then control."""
    baseline, *tested = arms
    for number in itertools.count():
        for test in tested:
            yield PlannedPair(test.name, number, baseline, test)
        yield PlannedPair(CONTROL, number, baseline, baseline)


def check_outputs(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    expected_is: str,
    found_is: str,
) -> None:
    """Compares the token ids of all requests.

    Raises:
        OutputsDiffer: naming the first request and token that differ.
    """
    for request, (a, b) in enumerate(zip(expected, found, strict=True)):
        if list(a) == list(b):
            continue
        pairs = enumerate(zip(a, b, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
        raise OutputsDiffer(
            f"request {request} differs at output token {at}: {expected_is} gave "
            f"{_token(a, at)}, {found_is} gave {_token(b, at)}"
        )


def _token(ids: Sequence[int], at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else f"its end after {at} tokens"


def compare(
    run: Callable[[Arm], Run],
    arms: Sequence[Arm],
    repeats: int,
    until: float | None,
    max_pairs: int,
    progress: Callable[[str], None],
    expected: Sequence[Sequence[int]] | None = None,
) -> list[Pair]:
    """Runs `repeats` rounds of pairs, after a warm-up of each arm that is not counted.

    run: does one run in an arm.
    arms: the baseline, then those that are tested against it.
    until: if set, rounds are added until all intervals reach no farther than this from
        their medians, or there are `max_pairs`.
    progress: called before each run with what it is.
    expected: outputs of another engine, which the first run must equal too.

    Raises:
        OutputsDiffer: a run's outputs are not those of the first.
    """
    baseline = arms[0].name
    first: list[list[int]] = []
    for arm in arms:
        progress("warm-up")
        outputs = run(arm).outputs
        if not first:
            first = outputs
            if expected is not None:
                check_outputs(expected, first, "an engine without NWOR", baseline)
        check_outputs(first, outputs, baseline, f"the warm-up of {arm.name}")
    pairs: list[Pair] = []
    for planned in plan(arms):
        if planned.name == arms[1].name and planned.number >= repeats:
            if until is None or planned.number >= max_pairs:
                return pairs
            if all(one.reach <= until for one in intervals(pairs).values()):
                return pairs
        runs = []
        for place, arm in enumerate(planned.arms, 1):
            progress(f"{planned.name} {planned.number + 1}")
            runs.append(run(arm))
            check_outputs(
                first,
                runs[-1].outputs,
                baseline,
                f"run {place} ({arm.name}) of {planned.name} pair {planned.number + 1}",
            )
        test, reference = runs if planned.test_first else reversed(runs)
        pairs.append(Pair(planned, reference, test))
    raise AssertionError("plan() has no end")


def intervals(pairs: Sequence[Pair]) -> dict[str, Interval]:
    """The median ratio and its interval, by the pairs' names."""
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        ratios.setdefault(pair.name, []).append(pair.ratio)
    return {name: median_interval(found) for name, found in ratios.items()}
