# SPDX-License-Identifier: Apache-2.0
"""The op module with faults planted in it: the manager's `ops` seam."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_nwor import ops

KINDS = {
    "log_cache_slots": "log",
    "restore_rejected_drafts": "restore",
    "stage": "stage",
    "commit_draft_layer": "commit",
}
# A layer as a launch knows it: the address of its table, and its row in there.
TableRow = tuple[int, int]


class Moment(enum.Enum):
    """When a call raises: before it did anything, after half of its layers, or after
    all of its work."""

    BEFORE = 0
    HALF = 1
    AFTER = 2


# Nothing that an op may raise is special.
ERRORS: dict[Moment, type[Exception]] = {
    Moment.BEFORE: RuntimeError,
    Moment.HALF: MemoryError,
    Moment.AFTER: OSError,
}


@dataclass(frozen=True)
class Planted:
    """A fault: `op` ("log", "restore", "stage" or "commit") raises at its call-th call,
    from 0."""

    op: str
    call: int
    moment: Moment


class FaultyOps:
    """The functions of `vllm_nwor.ops`, of which one call can be made to raise.

    planted: the fault of this step, or None.
    calls: the table rows of each call since `arm`, for each op.
    done: as calls, without the rows that a failing call left out.
    """

    def __init__(self) -> None:
        self.arm(None)

    def arm(self, planted: Planted | None) -> None:
        """A new step begins, with this fault or none."""
        self.calls: defaultdict[str, list[list[TableRow]]] = defaultdict(list)
        self.done: defaultdict[str, list[list[TableRow]]] = defaultdict(list)
        self.planted = planted

    def __getattr__(self, name: str) -> Any:
        op = getattr(ops, name)
        return partial(self._run, KINDS[name], op) if name in KINDS else op

    def _run(
        self, kind: str, op: Callable[..., None], table: torch.Tensor, *args: Any
    ) -> None:
        layers = [(table.data_ptr(), row) for row in range(table.shape[0])]
        call = len(self.calls[kind])
        self.calls[kind].append(layers)
        planted = self.planted
        if planted is None or (planted.op, planted.call) != (kind, call):
            op(table, *args)
            self.done[kind].append(layers)
            return
        done = {Moment.BEFORE: 0, Moment.HALF: len(layers) // 2}.get(
            planted.moment, len(layers)
        )
        if done:
            op(table[:done], *args)
        self.done[kind].append(layers[:done])
        raise ERRORS[planted.moment](f"planted in {kind} call {call}")
