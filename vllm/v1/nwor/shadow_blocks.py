# SPDX-License-Identifier: Apache-2.0
"""ShadowBlocks: drafts are verified in private blocks, and never touch a request's own.

For one step the blocks of a window that hold drafts are replaced by shadow blocks, in
the block table and in the slot mapping, so that vLLM's own kernels write and read
there; then the kept rows are copied to the real blocks and the table is put back. Any
backend that reads through the block table gives the same bits, under any CUDA graph,
because only the content of buffers changes that outlive the step.

    stage    committed rows of those blocks -> shadow; table and slots name the shadow
    (vLLM's forward and rejection sampling)
    commit   kept rows -> real blocks; table and slots put back; counted
    abort    table and slots put back, nothing copied: the step failed

Stage and commit are called on the manager, abort here.

Invariants:

1. Between steps table and slots are vLLM's own, and no row of a block but the committed
   ones of this step was changed by us.
2. Shadow blocks are in tables only between stage and commit or abort; the scheduler
   never hands one out.
3. An entry is put back only where it still holds what stage wrote.

A request's shadow blocks, its seat, stay the same while it keeps its place in the
runner: its batch row (V1), or its index in the request states (V2). Committed rows that
the shadow has from the step before are not copied again. What a shadow has counts only
if the seat was committed in the runner's step before this one, up to the first row that
this step writes, to the block that is in the table now (csrc/nwor/shadow.h says why
that is enough); so nobody has to tell when a request goes, moves or is preempted. The
exception is a step that verifies drafts of a request which did not run in the step
before: in that one nothing counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import ops as native_ops
from .device_memory import DeviceMemory
from .launches import CopyTable
from .window import VerificationWindows

# int32, on the device.
_MAX_STEP = 2**31 - 1


@dataclass(frozen=True)
class ShadowRegion:
    """The shadow blocks of one KV-cache group: blocks that exist in the workers' caches
    and that the scheduler does not know.

    first_block: id of the first one. num_seats: requests that can have some.
    blocks_per_seat: as many as a window's drafts can touch. num_real_blocks: ids below
    are the scheduler's. block_size: tokens a block, as the scheduler counts.
    """

    first_block: int
    num_seats: int
    blocks_per_seat: int
    num_real_blocks: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.num_seats * self.blocks_per_seat


def blocks_per_seat(num_drafts: int, block_size: int) -> int:
    """Blocks that `num_drafts` neighbouring positions can touch.

    Example: 4 drafts touch at most 2 blocks of 16 tokens; 18 drafts at most 3.
    """
    return 1 + -(-(num_drafts - 1) // block_size)


class ShadowGroup:
    """One KV-cache group: its layers' tables, where its shadow blocks are, and what
    stage keeps of the windows.

    entry_tokens: positions for which an entry of the worker's block table stands: the
        block size, or a kernel's smaller one. All counts in entries from here on.
    saved: [num_seats, SAVED_COLUMNS + 2 * span] int32, device (ops.stage).
    """

    def __init__(
        self,
        group_id: int,
        tables: Sequence[CopyTable],
        region: ShadowRegion,
        entry_tokens: int,
        memory: DeviceMemory,
    ) -> None:
        """Raises ValueError: entry_tokens does not divide the block size."""
        if region.block_size % entry_tokens != 0:
            raise ValueError(
                f"entry_tokens is {entry_tokens}; must divide the block size "
                f"{region.block_size}"
            )
        entries_per_block = region.block_size // entry_tokens
        self.group_id = group_id
        self.tables = tuple(tables)
        self.num_seats = region.num_seats
        self.entry_tokens = entry_tokens
        self.first_entry = region.first_block * entries_per_block
        self.num_real_entries = region.num_real_blocks * entries_per_block
        self.span = region.blocks_per_seat * entries_per_block
        self.num_slots = region.num_blocks * region.block_size
        self.entries = self.first_entry, self.num_real_entries, self.span
        self.saved = memory.take(
            (region.num_seats, native_ops.SAVED_COLUMNS + 2 * self.span), torch.int32
        ).zero_()


def num_bytes(num_seats: int, span: int) -> int:
    """Memory of what a group keeps of its windows."""
    return num_seats * (native_ops.SAVED_COLUMNS + 2 * span) * torch.int32.itemsize


class ShadowBlocks:
    """All staged groups of a runner. The manager makes the launches of stage and commit
    itself: what a call costs between two steps of a model is a good part of theirs.

    num_seats: a step with more requests cannot be staged.
    stages, commits: a launch each, in order: of the arguments of ops.stage and
        ops.commit_draft_layer those that no step changes, behind the KV-cache group id
        (and, of commits, the row of the counters).
    step: of the runner, with drafts or without, whoever protects them.
    windows: the step's, from before its first launch until its tables are put back.
    """

    def __init__(
        self,
        groups: Sequence[ShadowGroup],
        counters: Sequence[torch.Tensor],
        ops: Any,
    ) -> None:
        """counters: [8] int64, device (ops.COUNTER_COLUMNS), one for each table of each
        group, in order. ops: as in Launches."""
        self.groups = tuple(groups)
        self.num_seats = min(group.num_seats for group in groups)
        self.ops = ops
        self.stages: list[Any] = []
        self.commits: list[Any] = []
        for group in self.groups:
            saved = group.saved
            constants = saved, *group.entries, group.entry_tokens
            last = len(group.tables) - 1
            for index, part in enumerate(group.tables):
                of_table = group.group_id, part.table, part.runs
                self.stages.append((*of_table, *constants, index == 0))
                row = len(self.commits)
                counted = saved, counters[row], group.entry_tokens, index == last
                self.commits.append((row, *of_table, *counted))
        self.step = 1
        self.windows: VerificationWindows | None = None

    def start_step(self, keeps: bool = True) -> None:
        """Call when the runner starts a step, also one without drafts: only what was
        committed in the step before counts as present in a shadow block.

        keeps: False: in this step nothing counts.
        """
        self.step += 1 if keeps else 2
        if self.step > _MAX_STEP:
            self.step = 1

    def abort(
        self, failed_group: int | None = None, is_untouched: bool = False
    ) -> None:
        """Enqueues the putting back of table and slots; does nothing without a step.

        failed_group: where stage failed; is_untouched: in the group's first launch.

        Raises:
            Exception: a table could not be put back, after all others were.
        """
        windows, self.windows = self.windows, None
        if windows is None:
            return
        assert windows.block_tables is not None
        failure: Exception | None = None
        for group in self.groups:
            try:
                self.ops.unstage(
                    windows.block_tables[group.group_id],
                    windows.slot_mappings[group.group_id],
                    windows.seats,
                    group.saved,
                    windows.num_reqs,
                    group.entry_tokens,
                )
            except Exception as error:
                # What an earlier step saved of a group need not fit this one.
                if group.group_id != failed_group or not is_untouched:
                    failure = error
            if group.group_id == failed_group:
                break
        if failure is not None:
            raise failure
