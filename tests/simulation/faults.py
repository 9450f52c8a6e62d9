# SPDX-License-Identifier: Apache-2.0
"""The op module with faults planted in it: the manager's `ops` seam."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_nwor import ops

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

    def log_cache_slots(self, *args: Any, **kwargs: Any) -> None:
        self._run("log", ops.log_cache_slots, args, kwargs)

    def restore_rejected_drafts(self, *args: Any, **kwargs: Any) -> None:
        self._run("restore", ops.restore_rejected_drafts, args, kwargs)

    def stage(self, *args: Any, **kwargs: Any) -> None:
        self._run("stage", ops.stage, args, kwargs)

    def commit_draft_layer(self, *args: Any, **kwargs: Any) -> None:
        self._run("commit", ops.commit_draft_layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)

    def _run(
        self,
        kind: str,
        op: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        table = args[0]
        layers = [(table.data_ptr(), row) for row in range(table.shape[0])]
        call = len(self.calls[kind])
        self.calls[kind].append(layers)
        planted = self.planted
        if planted is None or (planted.op, planted.call) != (kind, call):
            op(*args, **kwargs)
            self.done[kind].append(layers)
            return
        done = {Moment.BEFORE: 0, Moment.HALF: len(layers) // 2}.get(
            planted.moment, len(layers)
        )
        if done:
            op(table[:done], *args[1:], **kwargs)
        self.done[kind].append(layers[:done])
        raise ERRORS[planted.moment](f"planted in {kind} call {call}")
