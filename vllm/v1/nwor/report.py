# SPDX-License-Identifier: Apache-2.0
"""What a runner reports to the scheduler about its windows, step by step.

The commit ops count on the device, and write what the counters have become to the next
slot of a ring of host memory, pinned on CUDA; vLLM's output copy waits for their
stream, so the slot can be read as soon as the step's output can, without waiting for
anything.

A step's counts are the difference between two neighbouring slots, so that steps whose
output nobody reads (vLLM's warm-up requests) are not counted in the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .metrics import BEGIN_MISSED, GroupInfo
from .ops import COUNTER_COLUMNS

if TYPE_CHECKING:
    from .draft_manager import DraftCommitManager

# Steps that may have made their commit while the first of them was not read: vLLM's
# batch queue, which without pipeline parallelism has two places at most.
MAX_IN_FLIGHT = 2

# Outputs in a row that take the same news along and are not read, at most: many more
# than a warm-up has. Nobody reads those of other ranks than the first.
MAX_UNREAD = 1000

_NUM_COUNTERS = len(COUNTER_COLUMNS)
# Every launch of a step sees all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = range(COUNTER_COLUMNS.index("restored_bytes"), _NUM_COUNTERS)
_INVALID_SLOTS = COUNTER_COLUMNS.index("invalid_slots")


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


def counter_ring(
    counters: torch.Tensor, max_in_flight: int
) -> tuple[torch.Tensor, list[StepPayload]]:
    """Where the commits of steps write the counters, one after another: a slot for each
    step in flight, and one for what the oldest compares with.

    counters: [num_launches, 9] int64, zeros.

    Returns:
        [slots, num_launches, 9] int64, cpu, pinned if the counters are on a device; and
        by slot the payload of a step that wrote to it.
    """
    ring = torch.zeros(
        (max_in_flight + 1, *counters.shape),
        dtype=torch.int64,
        pin_memory=counters.device.type != "cpu",
    )
    # The same memory for quick reading: a torch operator costs more.
    slots = [slot.view(-1).numpy().data for slot in ring]
    return ring, [StepPayload((slots[i - 1], slots[i])) for i in range(len(slots))]


class Report:
    """One payload a step: the counts of the manager's commit, and what is new of
    fallbacks and KV-cache groups."""

    def __init__(
        self, infos: Sequence[GroupInfo], manager: DraftCommitManager | None
    ) -> None:
        self._infos = list(infos)
        self._manager = manager
        self._fallbacks: Mapping[str, int] = getattr(manager, "fallbacks", {})
        self._news = News()
        self._offered: dict[str, int] = {}  # of the fallbacks, last

    def take_payload(self) -> StepPayload | None:
        """What to report with this step's output; None for nothing. The step's counts
        are forgotten here; fallbacks and infos go along until somebody has read them
        (MAX_UNREAD)."""
        counts = None
        if self._manager is not None:
            counts, self._manager.counts = self._manager.counts, None
        fallbacks, news = self._fallbacks, self._news
        if not self._infos and (not fallbacks or fallbacks == news.read):
            return counts
        if fallbacks != self._offered:
            self._offered = dict(fallbacks)
        elif news.num_unread >= MAX_UNREAD:
            return counts
        take = news.offer(self._offered)
        slots = (counts or NOTHING).slots
        return StepPayload(slots, take, partial(_empty, self._infos))


def _empty(infos: list[GroupInfo]) -> list[tuple[Any, ...]]:
    """The infos, as plain tuples; they are read once."""
    rows = [tuple(info) for info in infos]
    infos.clear()
    return rows
