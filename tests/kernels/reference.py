# SPDX-License-Identifier: Apache-2.0
"""A plain reference of log and restore, from the contract and not from the C++.

A `Layer` knows for every slot the offsets of its bytes in one allocation, as an index
tensor that the layout's definition gives byte by byte; logging is then `cache[index]`
and restoring its reverse. Allocations have guard bytes at both ends, and tests compare
them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD_BYTES = 64
GUARD = 0xCD
POISON = 0xA5
POISON_SLOT = 0x5A5A5A5A
POISON_WINDOW = 0x5A5A

PAD = -1


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    """[num_bytes] uint8, cpu."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)


@dataclass(frozen=True)
class Layout:
    """Where the bytes of each slot lie, counted from a layer's first byte.

    index: [num_slots, slot_bytes] int64, cpu: offsets in the order of the log.
    columns: block_stride .. num_blocks of a table row, without base and log_offset.
    runs: [block_size, num_runs, 2] int32, cpu, or None for rows.
    """

    index: Tensor
    columns: tuple[int, ...]
    runs: Tensor | None = None

    @property
    def slot_bytes(self) -> int:
        return self.index.shape[1]

    @property
    def num_slots(self) -> int:
        return self.index.shape[0]

    @property
    def extent(self) -> int:
        """Bytes from the layer's first to its last."""
        return int(self.index.max()) + 1


def row_layout(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    run_bytes: int,
    block_stride: int,
    head_stride: int,
    slot_stride: int,
) -> Layout:
    """Slot s, head h at (s // N) * block_stride + h * head_stride + (s % N) *
    slot_stride, run_bytes long. Strides in bytes."""
    slots = torch.arange(num_blocks * block_size)
    start = slots // block_size * block_stride + slots % block_size * slot_stride
    within = torch.arange(num_heads)[:, None] * head_stride + torch.arange(run_bytes)
    columns = (
        block_stride,
        slot_stride,
        head_stride,
        num_heads,
        run_bytes,
        block_size,
        num_blocks,
    )
    return Layout(start[:, None] + within.flatten(), columns)


def packed_layout(num_blocks: int, owner: Tensor) -> Layout:
    """A packing given by owner, [block_bytes] int64, cpu: the slot (offset in the
    block) that owns each byte. Every slot owns as many bytes."""
    block_bytes = owner.numel()
    block_size = int(owner.max()) + 1
    in_block = [torch.nonzero(owner == slot).flatten() for slot in range(block_size)]
    run_lists = [runs_of(offsets.tolist()) for offsets in in_block]
    num_runs = max(map(len, run_lists))
    padded = [runs + [(0, 0)] * (num_runs - len(runs)) for runs in run_lists]
    starts = torch.arange(num_blocks)[:, None, None] * block_bytes
    index = (starts + torch.stack(in_block)).flatten(0, 1)
    # The columns that packed layouts do not use hold nonsense.
    columns = (block_bytes, -7, -7, -7, -7, block_size, num_blocks)
    return Layout(index, columns, torch.tensor(padded, dtype=torch.int32))


def runs_of(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted offsets as (offset, length) of maximal runs."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((offset, 1))
    return runs


class Layer:
    """One layer's cache in an allocation of its own, filled at random.

    memory: [guard + misalignment + extent + guard] uint8, device.
    """

    def __init__(
        self, layout: Layout, device: torch.device, seed: int, misalignment: int = 0
    ) -> None:
        self.layout = layout
        self.start = GUARD_BYTES + misalignment
        memory = random_bytes(self.start + layout.extent + GUARD_BYTES, seed)
        memory[: self.start] = GUARD
        memory[-GUARD_BYTES:] = GUARD
        self.memory = memory.to(device)

    def index(self, slots: Sequence[int]) -> Tensor:
        """[num_slots, slot_bytes] int64, cpu: offsets in memory."""
        return self.start + self.layout.index[list(slots)]

    def row(self, log_offset: int) -> list[int]:
        base = self.memory.data_ptr() + self.start
        return [base, *self.layout.columns, log_offset]


@dataclass(frozen=True)
class Batch:
    """Windows of one step: each request has its draft slots (PAD allowed) and the
    number of accepted drafts."""

    slots: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]

    @property
    def flat_slots(self) -> list[int]:
        return [slot for window in self.slots for slot in window]

    @property
    def windows(self) -> list[tuple[int, int, int]]:
        """(request, position, drafts of the window) of every draft."""
        return [
            (request, position, len(window))
            for request, window in enumerate(self.slots)
            for position in range(len(window))
        ]

    @property
    def rejected(self) -> list[bool]:
        return [
            position >= self.accepted[request] for request, position, _ in self.windows
        ]

    def metadata(
        self, device: torch.device, index_dtype: torch.dtype, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(slot_mapping, logits_indices, cu_num_logits) as vLLM would give them, with
        tokens that have no logits in between, and target tokens whose slots nobody may
        touch (they are out of every range)."""
        generator = torch.Generator().manual_seed(seed)
        mapping: list[int] = []
        indices: list[int] = []
        cumulative: list[int] = []
        out_of_range = 1 << 40
        for window in self.slots:
            prefill = int(torch.randint(3, (), generator=generator))
            mapping += [out_of_range] * (prefill + 1)
            indices.append(len(mapping) - 1)
            for slot in window:
                indices.append(len(mapping))
                mapping.append(slot)
            cumulative.append(len(indices))
        mapping += [PAD] * int(torch.randint(1, 4, (), generator=generator))
        return (
            torch.tensor(mapping, dtype=torch.int64, device=device),
            torch.tensor(indices, dtype=index_dtype, device=device),
            torch.tensor(cumulative, dtype=torch.int32, device=device),
        )


@dataclass
class Log:
    """An undo log in a poisoned allocation, rows apart by row_stride bytes."""

    memory: Tensor
    undo_log: Tensor
    slots: Tensor
    windows: Tensor

    @staticmethod
    def poisoned(
        capacity: int,
        row_bytes: int,
        device: torch.device,
        padding: int = 0,
        misalignment: int = 0,
    ) -> Log:
        stride = row_bytes + padding
        memory = torch.full(
            (2 * GUARD_BYTES + misalignment + capacity * stride,),
            POISON,
            dtype=torch.uint8,
            device=device,
        )
        undo_log = memory.as_strided(
            (capacity, row_bytes), (stride, 1), GUARD_BYTES + misalignment
        )
        return Log(
            memory,
            undo_log,
            torch.full((capacity,), POISON_SLOT, dtype=torch.int64, device=device),
            torch.full((capacity, 3), POISON_WINDOW, dtype=torch.int32, device=device),
        )

    def snapshot(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of all three, cpu."""
        return (
            self.memory.cpu().clone(),
            self.slots.cpu().clone(),
            self.windows.cpu().clone(),
        )


@dataclass
class Tables:
    """Layers of one launch: the ops' table and runs, and each layer's log offset."""

    layers: list[Layer]
    log_offsets: list[int]
    table: Tensor
    runs: Tensor | None

    @property
    def slot_bytes(self) -> int:
        return sum(layer.layout.slot_bytes for layer in self.layers)


def make_table(
    layers: list[Layer], device: torch.device, gap: int = 0, first_offset: int = 0
) -> Tables:
    """Layers one after another in a row of the log, `gap` bytes between them."""
    offsets = []
    offset = first_offset
    for layer in layers:
        offsets.append(offset)
        offset += layer.layout.slot_bytes + gap
    rows = [layer.row(at) for layer, at in zip(layers, offsets, strict=True)]
    runs = layers[0].layout.runs
    return Tables(
        layers,
        offsets,
        torch.tensor(rows, dtype=torch.int64, device=device),
        None if runs is None else runs.to(device),
    )


def row_bytes_of(tables: Tables) -> int:
    """Bytes that a row of the log needs."""
    return max(
        offset + layer.layout.slot_bytes
        for layer, offset in zip(tables.layers, tables.log_offsets, strict=True)
    )


def expected_log(
    tables: Tables, log: Log, batch: Batch, num_drafts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What log_cache_slots makes of a log: (memory, slots, windows), cpu."""
    memory, slots, windows = log.snapshot()
    row_start = log.undo_log.storage_offset()
    row_stride = log.undo_log.stride(0)
    for draft, slot in enumerate(batch.flat_slots):
        if slot == PAD:
            continue
        for layer, offset in zip(tables.layers, tables.log_offsets, strict=True):
            at = row_start + draft * row_stride + offset
            saved = layer.memory.cpu()[layer.index([slot])[0]]
            memory[at : at + saved.numel()] = saved
    true_drafts = len(batch.flat_slots)
    slots[:true_drafts] = torch.tensor(batch.flat_slots, dtype=torch.int64)
    windows[:true_drafts] = torch.tensor(batch.windows, dtype=torch.int32).view(-1, 3)
    slots[true_drafts:num_drafts] = PAD
    windows[true_drafts:num_drafts] = torch.tensor([-1, -1, 0], dtype=torch.int32)
    return memory, slots, windows


def expected_counters(tables: Tables, batch: Batch) -> list[int]:
    """What restore_rejected_drafts adds, in the order of COUNTER_COLUMNS."""
    rejected = batch.rejected
    restored = sum(
        tables.slot_bytes
        for slot, is_rejected in zip(batch.flat_slots, rejected, strict=True)
        if is_rejected and slot != PAD
    )
    return [
        sum(len(window) > 0 for window in batch.slots),
        len(rejected),
        len(rejected) - sum(rejected),
        sum(rejected),
        restored,
        0,
    ]
