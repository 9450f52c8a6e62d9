# SPDX-License-Identifier: Apache-2.0
"""What a step's output carries to the scheduler, and how counts cross threads.

The runner's thread makes the steps; an asynchronous output may be read by another
thread, in the same process or, pickled, in another one. Counts cross in two ways, and
no others:

    a ring of host memory   the commit ops write to it, the reader of the output reads
                            its own slot (StepPayload)
    News                    totals that the runner's thread offers, and that the reader
                            takes; each attribute has one thread that writes it

Findings of the audit cross in its `Outbox` and `Findings`, which have locks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..ops import COUNTER_COLUMNS

# Steps that may have made their commit while the first of them was not read: vLLM's
# batch queue, which without pipeline parallelism has two places at most.
MAX_IN_FLIGHT = 2

_NUM_COUNTERS = len(COUNTER_COLUMNS)
# Every launch of a step sees all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = range(COUNTER_COLUMNS.index("restored_bytes"), _NUM_COUNTERS)
_INVALID_SLOTS = COUNTER_COLUMNS.index("invalid_slots")
# The reason of fallbacks that count as invalid slots, too.
BEGIN_MISSED = "begin_missed"


class News:
    """Counts that only rise. A step's output offers their totals, and whoever reads an
    output gets by how much they rose since the one that was read before: what an output
    that nobody reads took along comes with the next one. One thread offers, and another
    one may read: each attribute has one thread that writes it.

    num_offered: the offers made so far. num_read: the number of the one read last.
    read: its totals.
    """

    def __init__(self) -> None:
        self.num_offered = self.num_read = 0
        self.read: Mapping[str, int] = {}

    @property
    def num_unread(self) -> int:
        """Offers in a row that nobody has read."""
        return self.num_offered - self.num_read

    def offer(self, totals: Mapping[str, int]) -> Callable[[], dict[str, int]]:
        """What gives the rise when the output is read. totals: not changed later."""
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
    """What a step reports to the scheduler, to be read once the step's output is there:
    what NworStats.add_step takes. Another process gets a plain tuple.

    slots: what the counters were and became, each [num_launches * 9] int64. The memory
        may be used again once the step's output was processed.
    news: nothing, or what gives, when it is called, new fallbacks by reason and the
        infos; and the audit's counts, if any.
    """

    __slots__ = ("news", "slots")

    def __init__(self, slots: Sequence[memoryview], *news: Callable[[], Any]) -> None:
        self.slots = slots
        self.news = news

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

    def with_audit(self, counts: Callable[[], dict[str, int]]) -> StepPayload:
        """counts: as News.offer returns it."""
        return StepPayload(self.slots, *(self.news or (dict, list)), counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.read(),)


NOTHING = StepPayload((memoryview(bytes(8 * _NUM_COUNTERS)).cast("q"),) * 2)
