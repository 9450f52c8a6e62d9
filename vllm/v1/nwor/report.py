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
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .metrics import BEGIN_MISSED, GroupInfo
from .ops import COUNTER_COLUMNS

if TYPE_CHECKING:
    from .draft_manager import DraftCommitManager

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


class StepPayload:
    """What a step reports to the scheduler, to be read once the step's output is there:
    what NworStats.add_step takes. Another process gets a plain tuple.

    slots: what the counters were and became, each [num_launches * 9] int64. The memory
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
        rows = [tuple(info) for info in infos]
        infos.clear()
        return tuple(counts), fallbacks, rows, *audit

    def with_audit(self, counts: dict[str, int]) -> StepPayload:
        return StepPayload(self.slots, *(self.news or ({}, [])), counts)

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
        self._num_unread = 0
        self._manager = manager
        self._fallbacks = Counter() if manager is None else manager.fallbacks
        self._reported: dict[str, int] = {}  # of the fallbacks

    def take_payload(self) -> StepPayload | None:
        """What to report with this step's output; None for nothing. It is forgotten
        here, but for infos that nobody has read (MAX_UNREAD)."""
        counts = None
        if self._manager is not None:
            counts, self._manager.counts = self._manager.counts, None
        reported = self._reported
        if not self._infos and (not self._fallbacks or self._fallbacks == reported):
            return counts
        self._reported = dict(self._fallbacks)
        fallbacks = dict(self._fallbacks - Counter(reported))
        payload = StepPayload((counts or NOTHING).slots, fallbacks, self._infos)
        self._num_unread += 1
        if self._num_unread == MAX_UNREAD:
            self._infos = []
        return payload
