# SPDX-License-Identifier: Apache-2.0
"""The audit's tables of recurrent states, and its two ops a step on them.

csrc/nwor/audit/states.h has the structs that are their rows, and says what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..layout.states import StateCache, StateGroup, StateKind, StatesRefused
from ..layout.tables import ALIGNMENT, DeviceMemory
from .loads import mix64, word_at

# Bytes that the device reads at once: words of a sample lie together in as many.
SECTOR_BYTES = 32
# The field of a StateRecord, as int32, with `opaque`, and kLoadedState.
OPAQUE, LOADED = 5, 2


def word_offsets(state: StateCache) -> tuple[int, list[int]]:
    """Bytes of a word, and where the words of a sample are, in bytes: in a block or, of
    a convolution, in a column of it, of a ring, in a row. Raises StatesRefused."""
    tensor, number, is_ring = state.tensor, ops.SAMPLE_WORDS, bool(state.ratio)
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
        row = 0 if is_ring else (part * 37 + 11) % num_rows
        sector = (part * 5 + 1) % num_sectors
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
    axis = {StateKind.CONV: 1, StateKind.RING: 2}.get(state.kind)
    of_columns = (0, 0) if axis is None else (tensor.shape[axis], strides[axis])
    place = tensor.data_ptr(), strides[0], group, state.window, state.ratio
    # What a token adds may be too little for the bits of a narrow number.
    can_rest = state.can_rest or tensor.element_size() < 4
    of_sample = word_bytes, in_group, ops.SAMPLE_PARTS if can_rest else 1
    return *place, *of_columns, *of_sample, *offsets


def _samples_of_a_step(state: StateCache, max_columns: int) -> int:
    """The most that a step reads, before the forward and after it."""
    if state.kind is StateKind.CONV:
        return 2 * state.tensor.shape[1]
    if state.kind is StateKind.RING:
        num_open = state.ratio - 1
        return num_open + min(num_open, max_columns)
    return 1 + 2 * max_columns


class Sizes(NamedTuple):
    """Of the tables. num_columns: of the widest buffer of a convolution. num_records:
    blocks of the prefix cache that have states. max_in_group: states of a group.
    max_ratio: tokens that a ring's layer compresses to one entry."""

    num_states: int
    num_groups: int
    num_columns: int
    num_seats: int
    num_blocks: int
    num_drafts: int
    num_records: int
    max_in_group: int
    max_ratio: int = 0

    @property
    def num_kept(self) -> int:
        return max(1 + self.num_drafts, self.max_ratio)

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
            ((*of_seats, self.num_kept), torch.int64),
            ((*of_seats, self.num_scratch), torch.int64),
            ((self.num_groups, self.num_blocks), torch.int32),
            ((2,), torch.int64),
            ((self.num_records, ops.STATE_RECORD_COLUMNS), torch.int64),
            ((self.num_records, self.max_in_group), torch.int64),
            ((*of_seats, ops.VERDICT_COLUMNS), torch.int64),
            ((self.num_seats,), torch.int32),
        ]

    def num_bytes(self) -> int:
        """Memory that is enough for States."""
        shapes = self.shapes()
        sizes = [math.prod(size) * dtype.itemsize for size, dtype in shapes]
        return sum(sizes) + len(sizes) * ALIGNMENT


class Boundaries(NamedTuple):
    """The states of one kind in a group, which are found in the prefix cache together.

    group: row of metadata. layers: their names. columns: their numbers in the group.
    zeros: the digest of states that are zero. is_own: as Digests.is_own, at most.
    """

    group: int
    group_id: int
    kind: str
    layers: list[str]
    columns: list[int]
    zeros: bytes
    is_own: bool


def boundaries_of(groups: Sequence[StateGroup]) -> Iterator[Boundaries]:
    for number, group in enumerate(groups):
        for kind in (StateKind.CONV, StateKind.TEMPORAL):
            found = [(n, one) for n, one in enumerate(group.states) if one.kind is kind]
            if found and group.block_size:
                columns, states = zip(*found, strict=True)
                zeros = np.array([_zero_sum(one.window) for one in states], np.uint64)
                names = [one.name for one in states]
                about = number, group.group_id, str(kind), names, list(columns)
                yield Boundaries(*about, zeros.tobytes(), not group.has_checkpoints)


def _zero_sum(window: int) -> np.uint64:
    """As read_at of states_rules.h, of a state of zeros."""
    sums = word_at(np.uint64(0), np.arange(ops.SAMPLE_WORDS)) >> np.uint64(32)
    parts = sums.reshape(ops.SAMPLE_PARTS, -1).sum(axis=1) & np.uint64(0xFFFFFFFF)
    whole = word_at(parts, np.arange(len(parts))).sum()
    of_columns = mix64(whole + np.arange(1, window + 1, dtype=np.uint64))
    return of_columns.sum() if window else whole


class States:
    """The recurrent states and rings of all followed groups.

    layers: name of the layer, kind and KV-cache group, by the numbers that findings
    have. caches: the tensors. tables: StateTables of states.h, int64, cpu. totals: [2]
    int64, device: samples that were compared, and that were read without being known.
    last_tokens: [num_groups, num_blocks] int32, device: as in StateTables. records:
    [num_blocks, 4] int64, device: StateRecord, of no block if states are not in the
    prefix cache. step_bytes: of states, read in a step whose requests all have the most
    drafts. has_rings_alone: nothing is read from vLLM's metadata. boundaries: of the
    prefix cache. digests_shape: of AuditStatesWrittenArgs::digests_to.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        num_seats: int,
        num_blocks: int,
        num_drafts: int,
        memory: DeviceMemory,
    ) -> None:
        """groups: rings are last. Raises StatesRefused."""
        found = [
            (number, group, in_group, one)
            for number, group in enumerate(groups)
            for in_group, one in enumerate(group.states)
        ]
        self.group_ids = [group.group_id for group in groups]
        self.layers = [
            (one.name, str(one.kind), of.group_id) for _, of, _, one in found
        ]
        self.caches = [one.tensor for *_, one in found]
        windows = {one.window for *_, one in found if one.window} or {0}
        recurrent = [group for group in groups if not group.is_ring]
        sizes_of_blocks = {group.block_size for group in recurrent} or {0}
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
        assert all(group.is_ring for group in groups[len(recurrent) :])
        rows = torch.tensor([row_of(one, n, place) for n, _, place, one in found])
        max_in_group = max(len(group.states) for group in groups)
        max_columns = 1 + num_drafts
        num_records = num_blocks if any(sizes_of_blocks) else 0
        of_runner = num_seats, num_blocks, num_drafts, num_records, max_in_group
        max_ratio = max(one.ratio for *_, one in found)
        sizes = Sizes(num_states, len(groups), num_columns, *of_runner, max_ratio)
        self._tensors = [
            memory.take(size, dtype).zero_() for size, dtype in sizes.shapes()
        ]
        table, *_, self.last_tokens, self.totals = self._tensors[:-4]
        self.records, self._boundaries = self._tensors[-4:-2]
        table.copy_(rows)
        self.last_tokens.fill_(-1)
        numbers = num_states, len(groups), len(recurrent), max_columns, sizes.num_kept
        of_blocks = num_blocks, max_in_group, *sizes_of_blocks
        columns = *numbers, *windows, sizes.num_scratch, *of_blocks
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        no_tables = [0] * (3 * ops.MAX_STATE_GROUPS)
        self.tables = torch.tensor([*addresses, *columns, *no_tables])
        self._state_blocks = self.tables.numpy()[-len(no_tables) :]
        # Before the forward what is read, and before and after it what is written.
        word_bytes = rows[:, 7]
        num_samples = [_samples_of_a_step(one, max_columns) for *_, one in found]
        of_a_seat = int((word_bytes * torch.tensor(num_samples)).sum())
        self.step_bytes = num_seats * ops.SAMPLE_WORDS * of_a_seat
        self.has_rings_alone = not recurrent
        self.boundaries = list(boundaries_of(recurrent))
        of_digest = ops.DIGEST_COLUMNS + max_in_group
        self.digests_shape = 2, num_seats, len(recurrent), of_digest

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
        """What these blocks hold is not known: a KV connector fills them. What they
        held is kept, to check that the load changes it."""
        if len(self.records) and blocks:
            numbers, device = torch.tensor(blocks), self.records.device
            if device.type == "cuda":
                numbers = numbers.pin_memory().to(device, non_blocking=True)
            self.records.view(torch.int32)[:, OPAQUE].index_fill_(0, numbers, LOADED)

    def forget_all(self) -> None:
        self.records.zero_()
