# SPDX-License-Identifier: Apache-2.0
"""The counts that a step's output carries to the scheduler, and how they cross threads.

The runner's thread executes the steps; another thread may read an asynchronous output,
in the same process or, pickled, in another one. Counts cross in these two ways only:

    a ring of host memory   the commit ops write to it, the reader of an output reads
                            the slot of that output (StepPayload)
    News                    totals that the runner's thread offers, and that the reader
                            takes; only one thread writes each attribute

Findings of the audit cross in its `Outbox` and `Findings`, which have locks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..ops import COUNTER_COLUMNS

# Steps that can have committed before the output of the first of them is read: the size
# of vLLM's batch queue, at most two without pipeline parallelism.
MAX_IN_FLIGHT = 2

_NUM_COUNTERS = len(COUNTER_COLUMNS)
# Each launch of a step counts all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = range(COUNTER_COLUMNS.index("restored_bytes"), _NUM_COUNTERS)
_INVALID_SLOTS = COUNTER_COLUMNS.index("invalid_slots")
# Fallbacks for this reason are also counted as invalid slots.
BEGIN_MISSED = "begin_missed"


class News:
    """Counts that only increase. Each step's output offers the totals; the reader of an
    output gets the increments since the output that was read before it. So the
    increments of an output that is never read come with the next one. One thread
    offers, and another one may read: only one thread writes each attribute.

    num_offered: offers made so far. num_read: number of the offer that was read last.
    read: its totals.
    """

    def __init__(self) -> None:
        self.num_offered = self.num_read = 0
        self.read: Mapping[str, int] = {}

    @property
    def num_unread(self) -> int:
        """Offers since the one that was read last."""
        return self.num_offered - self.num_read

    def offer(self, totals: Mapping[str, int]) -> Callable[[], dict[str, int]]:
        """Returns a function that gives the increments when the output is read.
        totals: must not change later."""
        self.num_offered += 1
        return partial(self._rise, self.num_offered, totals)

    def _rise(self, number: int, totals: Mapping[str, int]) -> dict[str, int]:
        before = self.read
        rise = {
            name: total - before.get(name, 0)
            for name, total in totals.items()
            if total > before.get(name, 0)
        }
        self.read = {**before, **{name: totals[name] for name in rise}}
        self.num_read = number
        return rise


class StepPayload:
    """A step's report to the scheduler, for NworStats.add_step. Read it after the
    step's output is complete. Another process gets a plain tuple.

    slots: the counters before and after the step, each [num_launches * 9] int64. The
        memory is reused after the step's output was processed.
    news: empty, or functions that return the new fallbacks by reason, the infos and, if
        the audit is on, its counts.
    weights_changed: between which of the worker's steps they were, unannounced; the
        hooks send it apart, because the counts may not be read.
    given: what goes out with requests' kv_transfer_params, by name; sent apart, too.
    """

    __slots__ = ("given", "news", "slots", "weights_changed")

    def __init__(self, slots: Sequence[memoryview], *news: Callable[[], Any]) -> None:
        self.slots = slots
        self.news = news
        self.weights_changed: tuple[int, int] | None = None
        self.given: Mapping[str, str] = {}

    def read(self) -> tuple[Any, ...]:
        before, after = self.slots
        rose = tuple(map(operator.sub, after.tolist(), before.tolist()))
        if len(rose) != _NUM_COUNTERS:
            sums = (sum(rose[column::_NUM_COUNTERS]) for column in _OF_ONE_LAUNCH)
            rose = (*rose[: _OF_ONE_LAUNCH.start], *sums)
        if not self.news:
            return (rose,)
        fallbacks, *others = (take() for take in self.news)
        counts = list(rose)
        counts[_INVALID_SLOTS] += fallbacks.get(BEGIN_MISSED, 0)
        return tuple(counts), fallbacks, *others

    def with_audit(
        self,
        counts: Callable[[], dict[str, int]],
        weights_changed: tuple[int, int] | None = None,
        given: Mapping[str, str] | None = None,
    ) -> StepPayload:
        """counts: as News.offer returns it."""
        found = StepPayload(self.slots, *(self.news or (dict, list)), counts)
        found.weights_changed, found.given = weights_changed, given or {}
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.read(),)


NOTHING = StepPayload((memoryview(bytes(8 * _NUM_COUNTERS)).cast("q"),) * 2)
