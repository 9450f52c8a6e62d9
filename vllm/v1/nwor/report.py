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

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from .draft_manager import BEGIN_MISSED, DraftCommitManager, State
from .ops import COUNTER_COLUMNS
from .window import Acceptance

# Steps that may have made their commit while the first of them was not read: vLLM's
# batch queue, which without pipeline parallelism has two places at most.
MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class GroupInfo:
    """How one KV-cache group is run: a row of the gauge vllm:nwor_info.

    group: KV-cache group id. requested, resolved: modes. reason: why they differ, or
    which layout the group has.
    """

    group: int
    requested: str
    resolved: str
    reason: str


class StepCounts(NamedTuple):
    """Where the counters before and after one step's commit can be read: indices of
    ring slots."""

    before: int
    after: int


class Report:
    """Turns a manager's counters into one payload a step."""

    def __init__(
        self,
        infos: Sequence[GroupInfo],
        manager: DraftCommitManager | None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """max_in_flight: steps, from the oldest that was not read to the newest that
        made its commit."""
        self._infos: list[dict[str, Any]] | None = [asdict(info) for info in infos]
        self._manager = manager
        self._reported_fallbacks: dict[str, int] = {}
        self._step: StepCounts | None = None
        if manager is not None:
            pinned = manager.device.type != "cpu"
            self._ring = torch.zeros(
                # One for each step, and one for what the oldest compares with.
                (max_in_flight + 1, *manager.counters.shape),
                dtype=torch.int64,
                pin_memory=pinned,
            ).unbind()
            # The same memory for quick reading: a torch operator costs more.
            self._slots = [slot.view(-1).numpy().data for slot in self._ring]
            # The slot that the latest counters went to, and whether they did.
            self._slot = 0
            self._slot_is_current = True

    def commit(self, acceptance: Acceptance) -> None:
        """Commits the manager's windows, if they were logged, and notes where this
        step's counts will be. When they could not be copied the step goes without, and
        the next one first fetches what to compare with."""
        manager = self._manager
        assert manager is not None
        if manager.state is not State.LOGGED:
            return
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
            self._step = StepCounts(self._slot, following)
            self._slot = following

    def take_step(self) -> StepCounts | None:
        """The counts of this step's commit, or None without one; forgets them."""
        step, self._step = self._step, None
        return step

    def payload(self, step: StepCounts | None) -> dict[str, Any] | None:
        """What to tell the scheduler with a step's output, or None for nothing: plain
        data, to be read by metrics.WorkerRecord.

        step: what `take_step()` gave in that step. Does not wait: to be called once
        the step's output is there.
        """
        payload: dict[str, Any] = {}
        if step is not None:
            before, after = self._slots[step.before], self._slots[step.after]
            rose = list(map(operator.sub, after.tolist(), before.tolist()))
            payload["counters"] = rose if len(rose) == _COLUMNS else _summed(rose)
        if self._manager is not None and self._manager.fallbacks:
            fallbacks = self._new_fallbacks(self._manager.fallbacks)
            if fallbacks:
                payload["fallbacks"] = fallbacks
            if BEGIN_MISSED in fallbacks:
                payload["breaches"] = fallbacks[BEGIN_MISSED]
        if self._infos is not None:
            payload["info"] = self._infos
            self._infos = None
        return payload or None

    def _new_fallbacks(self, fallbacks: Mapping[str, int]) -> dict[str, int]:
        """By how much each rose since the last payload."""
        totals = dict(fallbacks)
        known, self._reported_fallbacks = self._reported_fallbacks, totals
        return {
            reason: count - known.get(reason, 0)
            for reason, count in totals.items()
            if count != known.get(reason, 0)
        }


_COLUMNS = len(COUNTER_COLUMNS)
# Every launch of a step sees all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = [
    COUNTER_COLUMNS.index(name) for name in ("restored_bytes", "invalid_slots")
]


def _summed(rose: list[int]) -> list[int]:
    """A step's counts from those of its launches. rose: [num_launches * 6]."""
    counts = rose[:_COLUMNS]
    for column in _OF_ONE_LAUNCH:
        counts[column] = sum(rose[column::_COLUMNS])
    return counts
