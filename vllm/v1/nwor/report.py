# SPDX-License-Identifier: Apache-2.0
"""Report: what a runner tells the scheduler about its windows, step by step.

The commit kernels count on the device, and write what the counters have become to the
next slot of a ring of host memory, pinned on CUDA; vLLM's output copy waits for their
stream, so the slot can be read as soon as the step's output can, without waiting for
anything.

A step's counts are the difference between two neighbouring slots, so that steps whose
output nobody reads (vLLM's warm-up requests) are not counted in the next one.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .draft_manager import DraftCommitManager
from .metrics import BEGIN_MISSED, GroupInfo
from .ops import COUNTER_COLUMNS
from .window import Acceptance

# Steps that may have made their commit while the first of them was not read: vLLM's
# batch queue, which without pipeline parallelism has two places at most.
MAX_IN_FLIGHT = 2

# Outputs that take the infos along, at most: many more than a warm-up has. Nobody reads
# those of other ranks than the first.
MAX_UNREAD = 1000

_NUM_COUNTERS = len(COUNTER_COLUMNS)
# Every launch of a step sees all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = range(COUNTER_COLUMNS.index("restored_bytes"), _NUM_COUNTERS)
_INVALID_SLOTS = COUNTER_COLUMNS.index("invalid_slots")
_NO_COUNTS = (memoryview(bytes(8 * _NUM_COUNTERS)).cast("q"),) * 2


class StepPayload:
    """What a step tells the scheduler, to be read once the step's output is there: the
    fields of a metrics.StepRecord. Another process gets a plain tuple.

    slots: what the counters were and became, each [num_launches * 8] int64. The memory
        may be used again once the step's output was processed.
    news: nothing, or fallbacks by reason and the list of infos, which reading empties:
        vLLM throws the outputs of its warm-up away; and the audit's counts, if any.
    """

    __slots__ = ("news", "slots")

    def __init__(self, slots: Sequence[memoryview], *news: Any) -> None:
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
        fallbacks, infos, *audit = self.news
        counts = list(rose)
        counts[_INVALID_SLOTS] += fallbacks.get(BEGIN_MISSED, 0)
        told = [tuple(info) for info in infos]
        infos.clear()
        return tuple(counts), fallbacks, told, *audit

    def with_audit(self, counts: dict[str, int]) -> StepPayload:
        return StepPayload(self.slots, *(self.news or ({}, [])), counts)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.read(),)


NOTHING = StepPayload(_NO_COUNTS)


class Report:
    """Turns a manager's counters into one payload a step.

    step: what the step's commit counted, for the output to take along.
    """

    def __init__(
        self,
        infos: Sequence[GroupInfo],
        manager: DraftCommitManager | None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """max_in_flight: steps, from the oldest that was not read to the newest that
        made its commit."""
        self._infos = list(infos)
        self._num_unread = 0
        self._fallbacks: Counter[str] = Counter()
        self._told_fallbacks: dict[str, int] = {}
        self.step: StepPayload | None = None
        if manager is None:
            return
        self._manager = manager
        self._fallbacks = manager.fallbacks
        ring = torch.zeros(
            # One for each step, and one for what the oldest compares with.
            (max_in_flight + 1, *manager.counters.shape),
            dtype=torch.int64,
            pin_memory=manager.device.type != "cpu",
        )
        self._ring = [slot.unbind() for slot in ring]
        manager.remember(list(itertools.chain(*self._ring)))
        # The same memory for quick reading: a torch operator costs more.
        slots = [slot.view(-1).numpy().data for slot in ring]
        # By the slot behind a step's commit.
        self._steps = [StepPayload((slots[i - 1], slots[i])) for i in range(len(slots))]
        # The slot that the latest counters went to, and whether they did.
        self._slot = 0
        self._slot_is_current = True

    def commit(self, acceptance: Acceptance) -> None:
        """Commits the manager's windows, and notes where this step's counts will be.
        When they could not be copied the step goes without, and the next one first
        fetches what to compare with. Requires that the manager is open."""
        manager = self._manager
        if not self._slot_is_current:
            # Not to the slot of the last counts, which may not have been read.
            self._slot = (self._slot + 1) % len(self._ring)
            if not manager.publish(self._ring[self._slot]):
                manager.commit(acceptance)
                return
        following = (self._slot + 1) % len(self._ring)
        self._slot_is_current = False  # if it raises, too
        self._slot_is_current = manager.commit(acceptance, self._ring[following])
        if self._slot_is_current:
            self.step = self._steps[following]
            self._slot = following

    def take_payload(self) -> StepPayload | None:
        """What to tell the scheduler with this step's output; None for nothing. It is
        forgotten here, but for infos that nobody has read (MAX_UNREAD)."""
        step, self.step = self.step, None
        told = self._told_fallbacks
        if not self._infos and (not self._fallbacks or self._fallbacks == told):
            return step
        self._told_fallbacks = dict(self._fallbacks)
        fallbacks = dict(self._fallbacks - Counter(told))
        slots = _NO_COUNTS if step is None else step.slots
        payload = StepPayload(slots, fallbacks, self._infos)
        self._num_unread += 1
        if self._num_unread == MAX_UNREAD:
            self._infos = []
        return payload
