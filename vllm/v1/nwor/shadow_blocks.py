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
from .window import Acceptance, VerificationWindows

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
    """All staged groups of a runner.

    num_seats: a step with more requests cannot be staged.
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
        # By launch, what never changes.
        rows = iter(counters)
        self._stages = []
        self._commits = []
        for group in self.groups:
            saved = group.saved
            constants = saved, *group.entries, group.entry_tokens
            last = len(group.tables) - 1
            for index, part in enumerate(group.tables):
                of_table = group.group_id, part.table, part.runs
                self._stages.append((*of_table, *constants, index == 0))
                counted = saved, next(rows), group.entry_tokens, index == last
                self._commits.append((*of_table, *counted))
        # Of the runner, with drafts or without, whoever protects them.
        self.step = 1
        # The step's, between stage and commit or abort.
        self._windows: VerificationWindows | None = None
        # Where stage failed: the group, and whether in its first launch.
        self._failed: tuple[int | None, bool] = (None, False)

    @property
    def is_open(self) -> bool:
        return self._windows is not None

    def start_step(self, keeps: bool = True) -> None:
        """Call when the runner starts a step, also one without drafts: only what was
        committed in the step before counts as present in a shadow block.

        keeps: False: in this step nothing counts.
        """
        self.step += 1 if keeps else 2
        if self.step > _MAX_STEP:
            self.step = 1

    def stage(self, windows: VerificationWindows) -> None:
        """Enqueues the copies and puts the shadow blocks in place. Call when block
        tables and slot mappings are final, before attention metadata is built. Requires
        that there are not more requests than num_seats.

        Raises:
            Exception: what is staged by then is left to abort.
        """
        self._windows = windows
        slot_mappings = windows.slot_mappings
        block_tables = windows.block_tables
        assert block_tables is not None
        try:
            for launch in self._stages:
                gid, table, runs, saved, first, real, span, tokens, patches = launch
                self.ops.stage(
                    table,
                    runs,
                    block_tables[gid],
                    slot_mappings[gid],
                    windows.query_start_loc,
                    windows.seq_lens,
                    windows.cu_num_logits,
                    windows.seats,
                    saved,
                    first,
                    real,
                    span,
                    tokens,
                    self.step,
                    patches,
                    windows.num_leading_zeros,
                )
        except Exception:
            self._failed = gid, patches
            raise

    def commit(
        self,
        acceptance: Acceptance,
        counters_to: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Enqueues the copies of what is kept, the counting, and the putting back.

        counters_to: for each table [8] int64, cpu, pinned if the caches are on a
            device: gets the counters too.

        Raises:
            Exception: after table and slots were put back; kept rows are lost, so that
                the step's tokens must not be used.
        """
        windows = self._windows
        assert windows is not None
        block_tables = windows.block_tables
        assert block_tables is not None
        try:
            for row, launch in enumerate(self._commits):
                group_id, table, runs, saved, counters, tokens, undoes = launch
                self.ops.commit_draft_layer(
                    table,
                    runs,
                    block_tables[group_id],
                    windows.slot_mappings[group_id],
                    windows.seats,
                    saved,
                    acceptance.sampled_token_ids,
                    acceptance.vocab_size,
                    acceptance.num_rejected,
                    counters,
                    windows.num_reqs,
                    tokens,
                    undoes,
                    None if counters_to is None else counters_to[row],
                )
        except Exception:
            self.abort()
            raise
        self._windows = None

    def abort(self) -> None:
        """Enqueues the putting back of table and slots; does nothing without a step.

        Raises:
            Exception: a table could not be put back, after all others were.
        """
        windows, self._windows = self._windows, None
        failed_group, is_untouched = self._failed
        self._failed = None, False
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
