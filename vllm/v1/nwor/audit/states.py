# SPDX-License-Identifier: Apache-2.0
"""The audit's tables of recurrent states, and its two ops a step on them.

csrc/nwor/audit/states.h has the structs that are their rows, and says what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from .. import ops
from ..layout.states import StateCache, StateGroup, StateKind, StatesRefused
from ..layout.tables import ALIGNMENT, DeviceMemory

# Bytes that the device reads at once: words of a sample lie together in as many.
SECTOR_BYTES = 32


def word_offsets(state: StateCache) -> tuple[int, list[int]]:
    """Bytes of a word, and where the words of a sample are, in bytes: in a block or, of
    a convolution, in a column of it. Raises StatesRefused."""
    tensor, number = state.tensor, ops.SAMPLE_WORDS
    size, strides = tensor.element_size(), strides_of(tensor)
    refused = StatesRefused(
        f"the {state.kind} state of {state.name} has shape {tuple(tensor.shape)} and "
        f"strides {tensor.stride()}, of {tensor.dtype}"
    )
    if state.kind is StateKind.CONV:
        channels, together = tensor.shape[2], SECTOR_BYTES // size
        if size not in (2, 4, 8) or channels < number:
            raise refused
        num_sectors, of_column = number // together, channels // together
        starts = [
            (2 * i + 1) * of_column // (2 * num_sectors) * together
            for i in range(num_sectors)
        ]
        return size, [(s + i) * strides[2] for s in starts for i in range(together)]
    _, num_heads, num_rows, num_columns = tensor.shape
    num_sectors = num_columns * size // SECTOR_BYTES
    places = tensor.data_ptr(), *strides[:3]
    if strides[3] != size or not num_sectors or any(n % 8 for n in places):
        raise refused
    offsets: list[int] = []
    for part in range(ops.SAMPLE_PARTS):
        # Spread over heads, rows and columns.
        head = part * num_heads // ops.SAMPLE_PARTS
        row, sector = (part * 37 + 11) % num_rows, (part * 5 + 1) % num_sectors
        first = head * strides[1] + row * strides[2] + sector * SECTOR_BYTES
        offsets += range(first, first + SECTOR_BYTES, 8)
    return 8, offsets


def strides_of(tensor: torch.Tensor) -> list[int]:
    """In bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]


def row_of(state: StateCache, group: int, in_group: int) -> tuple[int, ...]:
    """State of states.h. group: row of its metadata. Raises StatesRefused."""
    tensor, strides = state.tensor, strides_of(state.tensor)
    word_bytes, offsets = word_offsets(state)
    is_conv = state.kind is StateKind.CONV
    of_buffer = (tensor.shape[1], strides[1]) if is_conv else (0, 0)
    place = tensor.data_ptr(), strides[0], group, state.window
    # What a token adds may be too little for the bits of a narrow number.
    can_rest = state.can_rest or tensor.element_size() < 4
    of_sample = word_bytes, in_group, ops.SAMPLE_PARTS if can_rest else 1
    return *place, *of_buffer, *of_sample, *offsets


class Sizes(NamedTuple):
    """Of the tables. num_columns: of the widest buffer of a convolution. num_records:
    blocks of the prefix cache that have states. max_in_group: states of a group."""

    num_states: int
    num_groups: int
    num_columns: int
    num_seats: int
    num_blocks: int
    num_drafts: int
    num_records: int
    max_in_group: int

    @property
    def num_scratch(self) -> int:
        of_samples = ops.SAMPLE_PARTS // 2 * (1 + self.num_drafts)
        return max(of_samples, self.num_columns)

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The tensors, in the order of StateTables."""
        of_seats = self.num_seats, self.num_states
        return [
            ((self.num_states, ops.STATE_COLUMNS), torch.int64),
            ((self.num_seats, ops.STATE_SEAT_COLUMNS), torch.int64),
            (of_seats, torch.int64),
            ((*of_seats, 1 + self.num_drafts), torch.int64),
            ((*of_seats, self.num_scratch), torch.int64),
            ((self.num_groups, self.num_blocks), torch.int32),
            ((2,), torch.int64),
            ((self.num_records, ops.STATE_RECORD_COLUMNS), torch.int64),
            ((self.num_records, self.max_in_group), torch.int64),
        ]

    def num_bytes(self) -> int:
        """Memory that is enough for States."""
        shapes = self.shapes()
        sizes = [math.prod(size) * dtype.itemsize for size, dtype in shapes]
        return sum(sizes) + len(sizes) * ALIGNMENT


class States:
    """The recurrent states of all followed groups.

    layers: name of the layer, kind and KV-cache group, by the numbers that findings
    have. caches: the tensors. tables: StateTables of states.h, int64, cpu. totals: [2]
    int64, device: samples that were compared, and that were read without being known.
    last_tokens:
    [num_groups, num_blocks] int32, device: as in StateTables. records:
    [num_blocks, 3] int64, device: StateRecord, of no block if states are not in the
    prefix cache. step_bytes: of states, read in a step whose requests all have the most
    drafts.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        num_seats: int,
        num_blocks: int,
        num_drafts: int,
        memory: DeviceMemory,
    ) -> None:
        """Raises StatesRefused."""
        found = [
            (n, group, one) for n, group in enumerate(groups) for one in group.states
        ]
        self.group_ids = [group.group_id for group in groups]
        self.layers = [(one.name, str(one.kind), of.group_id) for _, of, one in found]
        self.caches = [one.tensor for *_, one in found]
        windows = {one.window for *_, one in found if one.window} or {0}
        sizes_of_blocks = {group.block_size for group in groups}
        num_columns = max(
            (one.tensor.shape[1] for *_, one in found if one.kind is StateKind.CONV),
            default=0,
        )
        num_states = len(found)
        for what, is_fine in (
            (f"{num_states} states", num_states <= ops.MAX_STATES),
            (f"{len(groups)} groups", len(groups) <= ops.MAX_STATE_GROUPS),
            (f"a buffer of {num_columns} columns", num_columns <= ops.MAX_BUFFER),
            (f"convolutions that read {sorted(windows)} columns", len(windows) == 1),
            (f"blocks of {sorted(sizes_of_blocks)} tokens", len(sizes_of_blocks) == 1),
        ):
            if not is_fine:
                raise StatesRefused(f"there are {what}")
        rows = torch.tensor(
            [
                row_of(one, number, in_group)
                for number, group in enumerate(groups)
                for in_group, one in enumerate(group.states)
            ]
        )
        max_in_group = max(len(group.states) for group in groups)
        max_columns = 1 + num_drafts
        num_records = num_blocks if any(sizes_of_blocks) else 0
        of_runner = num_seats, num_blocks, num_drafts, num_records, max_in_group
        sizes = Sizes(num_states, len(groups), num_columns, *of_runner)
        self._tensors = [
            memory.take(size, dtype).zero_() for size, dtype in sizes.shapes()
        ]
        table, *_, self.last_tokens, self.totals = self._tensors[:-2]
        self.records, self._boundaries = self._tensors[-2:]
        table.copy_(rows)
        self.last_tokens.fill_(-1)
        columns = num_states, len(groups), max_columns, *windows, sizes.num_scratch
        columns = *columns, num_blocks, max_in_group, *sizes_of_blocks
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        of_blocks = [0] * (3 * ops.MAX_STATE_GROUPS)
        self.tables = torch.tensor([*addresses, *columns, *of_blocks])
        self._state_blocks = self.tables.numpy()[-len(of_blocks) :]
        # Before the forward what is read, and before and after it what is written.
        word_bytes = rows[:, 6]
        num_samples = [
            2 * one.tensor.shape[1] if one.window else 1 + 2 * max_columns
            for *_, one in found
        ]
        of_a_seat = int((word_bytes * torch.tensor(num_samples)).sum())
        self.step_bytes = num_seats * ops.SAMPLE_WORDS * of_a_seat

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    # -- states in the prefix cache ------------------------------------------------

    def set_block_tables(self, tables: Sequence[torch.Tensor]) -> None:
        """tables: of the step, as Step.block_tables; for its two ops."""
        if len(self.records):
            columns = [
                (table.data_ptr(), table.stride(0), table.shape[1])
                for table in map(tables.__getitem__, self.group_ids)
            ]
            self._state_blocks[: 3 * len(columns)] = list(chain(*columns))

    def copy_block(self, source: int, to: int) -> None:
        """vLLM copies a block, so its states are those of the other one."""
        if len(self.records):
            self.records[to] = self.records[source]
            self._boundaries[to] = self._boundaries[source]

    def forget(self, blocks: Sequence[int]) -> None:
        """What these blocks hold is not known: a KV connector fills them."""
        if len(self.records) and blocks:
            numbers = torch.tensor(blocks)
            if self.records.is_cuda:
                numbers = numbers.pin_memory().to(
                    self.records.device, non_blocking=True
                )
            self.records.index_fill_(0, numbers, 0)

    def forget_all(self) -> None:
        self.records.zero_()
