# SPDX-License-Identifier: Apache-2.0
"""What a runner reports to the scheduler about its windows, step by step.

The commit ops count on the device, and write what the counters have become to the next
slot of a ring of host memory, pinned on CUDA. vLLM's output copy waits for their
stream, so the slot can be read as soon as the step's output can, without waiting for
anything.

A step's counts are the difference between two neighbouring slots, so that steps whose
output nobody reads (vLLM's warm-up requests) are not counted in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..base.payload import NOTHING, News, StepPayload
from ..metrics import GroupInfo

# Outputs in a row that take the same news along and are not read, at most: many more
# than a warm-up has. Nobody reads those of other ranks than the first.
MAX_UNREAD = 1000


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


class Counts(Protocol):
    """A DraftCommitManager's."""

    counts: StepPayload | None
    fallbacks: Counter[str]


class Report:
    """One payload a step: the counts of the manager's commit, and what is new of
    fallbacks and KV-cache groups."""

    def __init__(self, infos: Sequence[GroupInfo], manager: Counts | None) -> None:
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
