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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .draft_manager import BEGIN_MISSED, DraftCommitManager
from .metrics import StepCounts, UntilRead
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
        told = UntilRead(asdict(info) for info in infos)
        self._infos: UntilRead | None = told or None
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
            slots = [slot.view(-1).numpy().data for slot in self._ring]
            # By the slot behind a step's commit.
            self._steps = [
                StepCounts(slots[i - 1], slots[i]) for i in range(len(slots))
            ]
            # The slot that the latest counters went to, and whether they did.
            self._slot = 0
            self._slot_is_current = True

    def commit(self, acceptance: Acceptance) -> None:
        """Commits the manager's windows, if they were logged, and notes where this
        step's counts will be. When they could not be copied the step goes without, and
        the next one first fetches what to compare with."""
        manager = self._manager
        assert manager is not None
        if not manager.is_open:
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
            self._step = self._steps[following]
            self._slot = following

    def drop_step(self) -> None:
        """Forgets the counts of a commit that no output took along."""
        self._step = None

    def take_payload(self) -> StepCounts | dict[str, Any] | None:
        """What to tell the scheduler with this step's output, for
        metrics.WorkerRecord.from_payload; None for nothing. It is forgotten here."""
        step, self._step = self._step, None
        manager = self._manager
        if self._infos is not None and self._infos.is_read:
            self._infos = None
        if self._infos is None and (manager is None or not manager.fallbacks):
            return step
        payload: dict[str, Any] = {}
        if manager is not None and (
            fallbacks := self._new_fallbacks(manager.fallbacks)
        ):
            payload["fallbacks"] = fallbacks
            if BEGIN_MISSED in fallbacks:
                payload["breaches"] = fallbacks[BEGIN_MISSED]
        if self._infos is not None:
            payload["info"] = self._infos
        if not payload:
            return step
        return payload if step is None else payload | {"counters": step}

    def _new_fallbacks(self, fallbacks: Mapping[str, int]) -> dict[str, int]:
        """By how much each rose since the last payload."""
        totals = dict(fallbacks)
        known, self._reported_fallbacks = self._reported_fallbacks, totals
        return {
            reason: count - known.get(reason, 0)
            for reason, count in totals.items()
            if count != known.get(reason, 0)
        }
