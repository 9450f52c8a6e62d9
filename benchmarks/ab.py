# SPDX-License-Identifier: Apache-2.0
"""Off against on in pairs, and off against off beside it as control.

Pairs go in the order ABBA: off first in one, last in the next, so that a machine that
slows down or warms up does so to both sides alike. After each pair comes a control pair
in the same order with NWOR idle in both runs: what its ratios show is noise. A ratio is
tokens a second of the test run over those of the reference run; below 1 the test is
slower.

Every run's outputs are compared with those of the first; a difference ends it all.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.intervals import Interval, median_interval
from benchmarks.runs import Run


class Kind(enum.Enum):
    """What a pair's test run is; the reference run is always off."""

    NWOR = "nwor"
    CONTROL = "control"


@dataclass(frozen=True)
class PlannedPair:
    """One pair to come. number counts the pairs of its kind from 0."""

    kind: Kind
    number: int
    test_first: bool

    @property
    def actives(self) -> tuple[bool, bool]:
        """Whether NWOR is active in the first run and in the second."""
        test = self.kind is Kind.NWOR
        return (test, False) if self.test_first else (False, test)


@dataclass(frozen=True)
class Pair:
    """A pair that was run."""

    kind: Kind
    number: int
    test_first: bool
    reference: Run
    test: Run

    @property
    def ratio(self) -> float:
        """Tokens a second of the test over those of the reference."""
        return self.test.tokens_per_second / self.reference.tokens_per_second


class OutputsDiffer(Exception):
    """Two runs of the same requests gave different tokens."""


def plan() -> Iterator[PlannedPair]:
    """Pairs without end: nwor 0, control 0, nwor 1, control 1, ..."""
    for number in itertools.count():
        test_first = number % 2 == 1
        yield PlannedPair(Kind.NWOR, number, test_first)
        yield PlannedPair(Kind.CONTROL, number, test_first)


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
    run: Callable[[bool], Run],
    repeats: int,
    until: float | None,
    max_pairs: int,
    progress: Callable[[str], None],
    expected: Sequence[Sequence[int]] | None = None,
) -> list[Pair]:
    """Runs `repeats` pairs of each kind, after a warm-up that is not counted.

    run: does one run with NWOR active or idle.
    until: if set, pairs are added until both intervals reach no farther than this from
        their medians, or there are `max_pairs` of each kind.
    progress: called before each run with what it is.
    expected: outputs of another engine, which the first run must equal too.

    Raises:
        OutputsDiffer: a run's outputs are not those of the first.
    """
    progress("warm-up")
    first = run(False)
    if expected is not None:
        check_outputs(expected, first.outputs, "an engine without NWOR", "off")
    progress("warm-up")
    warm = run(True)
    check_outputs(first.outputs, warm.outputs, "off", "the warm-up of nwor")
    pairs: list[Pair] = []
    for planned in plan():
        if planned.kind is Kind.NWOR and planned.number >= repeats:
            if until is None or planned.number >= max_pairs:
                return pairs
            if all(one.reach <= until for one in intervals(pairs).values()):
                return pairs
        runs = []
        for place, active in enumerate(planned.actives, 1):
            progress(f"{planned.kind.value} {planned.number + 1}")
            runs.append(run(active))
            check_outputs(
                first.outputs,
                runs[-1].outputs,
                "off",
                f"run {place} ({'nwor' if active else 'off'}) of "
                f"{planned.kind.value} pair {planned.number + 1}",
            )
        test, reference = runs if planned.test_first else reversed(runs)
        pairs.append(
            Pair(planned.kind, planned.number, planned.test_first, reference, test)
        )
    raise AssertionError("plan() has no end")


def intervals(pairs: Sequence[Pair]) -> dict[Kind, Interval]:
    """The median ratio and its interval, for each kind."""
    return {
        kind: median_interval([pair.ratio for pair in pairs if pair.kind is kind])
        for kind in Kind
    }
