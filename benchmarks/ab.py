# SPDX-License-Identifier: Apache-2.0
"""Ways to run the same requests ("arms"), which take turns at the steps of a run.

The first arm is the baseline, which takes part twice, the second time as a control. A
round has a run for each arm and one for the control. In each of them all arms take
turns, of a few steps, and each begins with another arm, so that in the end every arm
has made each step once: these steps are one run of that arm. A ratio is tokens a
second of a tested arm over those of the baseline and its control together; below 1 the
test is slower. The control's ratio is to the baseline, and shows what is noise. A
machine that slows down, for a tenth of a second or for minutes, does so to all alike.
Of each turn counts its median duration over all rounds, and these add up: what held up
one turn of one round is not a difference between arms.

The first step of a turn is not counted: it finds all hooks changed, whatever the arms
are, which costs an arm with more hooks more and which no server does; and in an
asynchronous engine the step before it, another arm's, is still on the device. Arms that
cannot change in the middle of a request (the KV audit's) have whole runs for turns.

Every run's outputs are compared with those of the first; a difference ends it all.

How well a ratio is known is said by the percentile bootstrap: the rounds are drawn
again with replacement many times, and the middle 90 % of the ratios is the interval. It
says nothing of another machine, or of this one on another day.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

CONFIDENCE_PERCENT = 90
NUM_RESAMPLES = 5000
# A turn's, at most, so that what slows a machine down for a second falls on all arms;
# and at least, because its first step is not counted.
TURN_S, TURN_STEPS, FEWEST_STEPS = 0.1, 16, 4


@dataclass(frozen=True)
class Interval:
    """A median, or a ratio of sums of some, with its bootstrap interval [low, high]."""

    median: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far the interval goes from its median, on its longer side."""
        return max(self.high - self.median, self.median - self.low)


def bootstrap(size: int, of: Callable[[Any], Any]) -> Interval:
    """The percentile bootstrap interval of a number that `of` makes from a sample of
    this size: [n, size] indices into it to [n] numbers. The same sample always gives
    the same one."""
    drawn = numpy.random.default_rng(0).integers(size, size=(NUM_RESAMPLES, size))
    tail = (100 - CONFIDENCE_PERCENT) / 2
    ends = numpy.percentile(of(drawn), (tail, 100 - tail))
    (whole,) = of(numpy.arange(size)[None])
    return Interval(float(whole), *map(float, ends))


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values`, one or more."""
    sample = numpy.asarray(values, float)
    return bootstrap(len(sample), lambda drawn: numpy.median(sample[drawn], axis=1))


@dataclass(frozen=True)
class NworDone:
    """What NWOR did in a run.

    counts: increments of its counters by name, and logged_bytes: drafts without shadow
    blocks times the log's bytes a draft.
    begin_us, commit_us: host times, one a step that had drafts, [num_windowed_steps].
    """

    counts: dict[str, int]
    begin_us: list[float]
    commit_us: list[float]


@dataclass(frozen=True)
class Run:
    """One run of all requests.

    outputs: token ids of each request, in request order. step_s: duration of each
    engine step. num_steps: of each request, until it finished. drafts: vLLM's own
    counters: windows, drafted, accepted, accepted_per_position. turn_steps: of a turn;
    None if it was not put together from turns.
    """

    outputs: list[list[int]]
    step_s: list[float]
    num_steps: list[int]
    drafts: dict[str, Any]
    nwor: NworDone | None
    turn_steps: int | None = None

    @property
    def turn_s(self) -> list[float]:
        """Duration of each turn, in part as the module says."""
        size = self.turn_steps or TURN_STEPS
        ends = range(size, len(self.step_s) + size, size)
        num_counted = size - (self.turn_steps is not None)
        return [sum(self.step_s[end - num_counted : end]) for end in ends]

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return sum(self.step_s)

    @property
    def latency_s(self) -> list[float]:
        """Of each request, from the first step until it finished."""
        return [sum(self.step_s[:end]) for end in self.num_steps]

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
    its own code only, as `base.wrap.unhook` says. stages: whether shadow blocks are
    used where the engine has them; else all is logged. audit_mib: what the KV audit
    compares in a step (VLLM_NWOR_AUDIT_MIB), where it is what is measured; such an arm
    has whole runs.
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
    """What is tested in a round, and its references, the baseline and its control; of
    the control itself, the baseline. name: the tested arm's, or CONTROL."""

    name: str
    references: tuple[Run, ...]
    test: Run

    @property
    def ratio(self) -> float:
        """Tokens a second of the test over those of the references together."""
        seconds = sum(run.seconds for run in self.references)
        num_tokens = sum(run.num_tokens for run in self.references)
        return self.test.tokens_per_second / (num_tokens / seconds)


class OutputsDiffer(Exception):
    """Two runs of the same requests gave different tokens."""


def runs_a_round(arms: Sequence[Arm]) -> int:
    """One of each arm, and one of the control."""
    return len(arms) + 1


def turns(arms: Sequence[Arm], number: int) -> list[tuple[str, Arm]]:
    """The order of a round, by name: the control is between the tested arms, which
    change places in every second round."""
    baseline, *tested = ((arm.name, arm) for arm in arms)
    if number % 2 == 0:
        tested.reverse()
    middle = -(-len(tested) // 2)
    return [baseline, *tested[:middle], (CONTROL, arms[0]), *tested[middle:]]


def put_together(runs: Sequence[Run], place: int, size: int) -> Run:
    """The run of the arm at this place of the order, in turns of `size` steps: run n
    began with the arm at place n."""
    longest = max(len(run.step_s) for run in runs)
    step_s: list[float] = []
    for turn, first in enumerate(range(0, longest, size)):
        of_arm = runs[(place - turn) % len(runs)]
        step_s += of_arm.step_s[first : first + size]
    return replace(runs[0], step_s=step_s, nwor=None, turn_steps=size)


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
    run: Callable[..., Run],
    arms: Sequence[Arm],
    repeats: int,
    until: float | None,
    max_pairs: int,
    progress: Callable[[str], None],
    expected: Sequence[Sequence[int]] | None = None,
) -> list[Pair]:
    """Runs `repeats` rounds, after a warm-up of each arm that is not counted.

    run: does one run, in which the arms that it is given take turns, of `turn_steps`.
    arms: the baseline, then those that are tested against it.
    until: if set, rounds are added until all intervals reach no farther than this from
        their medians, or there are `max_pairs`.
    progress: called before each run with what it is.
    expected: outputs of another engine, which all runs must equal.

    Raises:
        OutputsDiffer: a run's outputs are not those, or those of the first.
    """
    known = {} if expected is None else {"an engine without NWOR": expected}
    take_turns = all(arm.audit_mib is None for arm in arms)

    def one(name: str, *taking_turns: Arm, size: int = TURN_STEPS) -> Run:
        progress(name)
        done = run(*taking_turns, turn_steps=size)
        if not known:
            known[arms[0].name] = done.outputs
        for of, outputs in known.items():
            check_outputs(outputs, done.outputs, of, name)
        return done

    for arm in arms:
        step_s = one(f"the warm-up of {arm.name}", arm).step_s
    size = int(numpy.clip(TURN_S / numpy.median(step_s), FEWEST_STEPS, TURN_STEPS))
    pairs: list[Pair] = []
    for number in itertools.count(1):
        if number > repeats:
            if until is None or number > max_pairs:
                break
            if all(found.reach <= until for found in intervals(pairs).values()):
                break
        order = turns(arms, number)
        runs = []
        for first, (name, arm) in enumerate(order):
            all_arms = [arm for _, arm in order[first:] + order[:first]]
            what = f"{name}{' first' * take_turns} of round {number}"
            runs.append(one(what, *(all_arms if take_turns else [arm]), size=size))
        if take_turns:
            runs = [put_together(runs, place, size) for place in range(len(order))]
        of = {name: done for (name, _), done in zip(order, runs, strict=True)}
        baseline, control = of[arms[0].name], of[CONTROL]
        both = baseline, control
        pairs += [Pair(arm.name, both, of[arm.name]) for arm in arms[1:]]
        pairs.append(Pair(CONTROL, (baseline,), control))
    return pairs


def intervals(pairs: Sequence[Pair]) -> dict[str, Interval]:
    """The ratio over all rounds and its interval, by the pairs' names."""
    by_name: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_name.setdefault(pair.name, []).append(pair)
    return {name: _interval(found) for name, found in by_name.items()}


def _interval(pairs: Sequence[Pair]) -> Interval:
    tests = _turns([[pair.test] for pair in pairs])
    references = _turns([pair.references for pair in pairs])

    def ratio(drawn: Any) -> Any:
        took, should = (
            numpy.nanmedian(of[drawn], axis=(1, 2)) for of in (tests, references)
        )
        return numpy.nansum(should, axis=1) / numpy.nansum(took, axis=1)

    return bootstrap(len(pairs), ratio)


def _turns(runs: Sequence[Sequence[Run]]) -> Any:
    """[rounds, runs, turns] of seconds, NaN where a run has fewer turns than others."""
    found = [[run.turn_s for run in of_round] for of_round in runs]
    most = max(len(turn_s) for of_round in found for turn_s in of_round)
    padded = [[t + [numpy.nan] * (most - len(t)) for t in ones] for ones in found]
    return numpy.array(padded)
