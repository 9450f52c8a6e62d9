# SPDX-License-Identifier: Apache-2.0
"""Report: what a runner tells the scheduler about its windows, step by step.

The commit kernels count on the device. On CUDA each commit is followed by a copy of the
counters to a slot of a ring of pinned memory, on the same stream; vLLM's output copy
waits for that stream, so the slot can be read as soon as the step's output can, without
waiting for anything. On the CPU the counters are read where they are.

The payload is a plain dict of increments since the last one (it travels pickled on
vLLM's ModelRunnerOutput; `hooks.stats` attaches it and takes it from there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.v1.nwor.draft_manager import DraftCommitManager
from vllm.v1.nwor.ops import COUNTER_COLUMNS

WINDOWS, STAGED, COMMITTED, REJECTED, RESTORED_BYTES, INVALID_SLOTS = range(
    len(COUNTER_COLUMNS)
)


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
    """Turns a manager's counters into one payload a step.

    depth: steps that can be in flight between a commit and the reading of its output.
    """

    def __init__(
        self,
        infos: Sequence[GroupInfo],
        manager: DraftCommitManager | None,
        depth: int = 4,
    ) -> None:
        self._infos: list[dict[str, Any]] | None = [asdict(info) for info in infos]
        self._manager = manager
        self._totals = [0] * len(COUNTER_COLUMNS)
        self._fallbacks: dict[str, int] = {}
        self._slot = 0
        self._ring: torch.Tensor | None = None
        if manager is not None and manager.device.type != "cpu":
            self._ring = torch.zeros(
                (depth, *manager.counters.shape), dtype=torch.int64, pin_memory=True
            )

    def publish(self) -> None:
        """Enqueues the copy of the counters; call after a commit, on its stream."""
        if self._ring is None or self._manager is None:
            return
        self._slot = (self._slot + 1) % len(self._ring)
        self._ring[self._slot].copy_(self._manager.counters, non_blocking=True)

    def source(self) -> torch.Tensor | None:
        """The counters of the latest commit, [num_tables, 6] int64 on the host: to be
        read once that step's output is there."""
        if self._manager is None:
            return None
        return self._manager.counters if self._ring is None else self._ring[self._slot]

    def payload(self, source: torch.Tensor | None) -> dict[str, Any] | None:
        """The increments up to `source`, or None if there is nothing to tell.

        source: what `source()` returned in the step that is reported. Does not wait.
        """
        payload: dict[str, Any] = {}
        if source is not None and self._manager is not None:
            rows = source.tolist()
            totals = list(rows[0])
            totals[RESTORED_BYTES] = sum(row[RESTORED_BYTES] for row in rows)
            steps = [new - old for new, old in zip(totals, self._totals, strict=True)]
            self._totals = totals
            fallbacks = {
                reason: count - self._fallbacks.get(reason, 0)
                for reason, count in self._manager.fallbacks.items()
                if count != self._fallbacks.get(reason, 0)
            }
            self._fallbacks = dict(self._manager.fallbacks)
            if any(steps) or fallbacks:
                payload = {
                    "windows": steps[WINDOWS],
                    "tokens_staged": steps[STAGED],
                    "tokens_accepted": steps[COMMITTED],
                    "tokens_rejected": steps[REJECTED],
                    "restored_bytes": steps[RESTORED_BYTES],
                    "breaches": steps[INVALID_SLOTS],
                    "fallbacks": fallbacks,
                }
        if self._infos is not None:
            payload["info"] = self._infos
            self._infos = None
        return payload or None
