# SPDX-License-Identifier: Apache-2.0
"""A plain reference of the ops, from the contract and not from the C++.

A `Layer` knows for every slot the offsets of its bytes in one allocation, as an index
tensor that the layout's definition gives byte by byte; logging is then `cache[index]`
and restoring its reverse. Allocations have guard bytes at both ends, and tests compare
them whole. `ShadowPages` does the same for stage, commit_draft_layer and unstage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def packed_layout(
    num_blocks: int, owner: Tensor, block_stride: int | None = None
) -> Layout:
    """A packing given by owner, [block_bytes] int64, cpu: the slot (offset in the
    block) that owns each byte. Every slot owns as many bytes. Without block_stride
    there is nothing between blocks."""
    block_stride = block_stride or owner.numel()
    block_size = int(owner.max()) + 1
    in_block = [torch.nonzero(owner == slot).flatten() for slot in range(block_size)]
    run_lists = [runs_of(offsets.tolist()) for offsets in in_block]
    num_runs = max(map(len, run_lists))
    padded = [runs + [(0, 0)] * (num_runs - len(runs)) for runs in run_lists]
    starts = torch.arange(num_blocks)[:, None, None] * block_stride
    index = (starts + torch.stack(in_block)).flatten(0, 1)
    # The columns that packed layouts do not use hold nonsense.
    columns = (block_stride, -7, -7, -7, -7, block_size, num_blocks)
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
    for layer, offset in zip(tables.layers, tables.log_offsets, strict=True):
        cache = layer.memory.cpu()
        for draft, slot in enumerate(batch.flat_slots):
            if slot != PAD:
                saved = cache[layer.index([slot])[0]]
                at = row_start + draft * row_stride + offset
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
        *(0, 0, 0),
    ]


@dataclass(frozen=True)
class Pages:
    """How a group's block table stands for slots, and where its shadow entries lie.

    The cache ends with the last shadow entry of the last seat.
    """

    entry_tokens: int
    num_real_entries: int
    first_entry: int
    span: int
    num_seats: int
    width: int

    @property
    def num_entries(self) -> int:
        return self.first_entry + self.num_seats * self.span

    @property
    def num_slots(self) -> int:
        return self.num_entries * self.entry_tokens


@dataclass(frozen=True)
class Request:
    """One request's rows of a step: the last of its seq_len positions, of which the
    last num_drafts are drafts.

    entries: its row of the block table.
    wrong_slots: (row, slot) that do not agree with the entries.
    """

    entries: tuple[int, ...]
    seq_len: int
    num_rows: int
    num_drafts: int
    accepted: int = 0
    wrong_slots: tuple[tuple[int, int], ...] = ()

    @property
    def first_position(self) -> int:
        return self.seq_len - self.num_rows

    def sound_slots(self, entry_tokens: int) -> list[int]:
        """The slots of the rows by the entries; PAD where there is no entry."""
        positions = range(self.first_position, self.seq_len)
        last = len(self.entries) * entry_tokens - 1
        return [
            slot_at(self.entries, position, entry_tokens)
            if 0 <= position <= last
            else PAD
            for position in positions
        ]

    def slots(self, entry_tokens: int) -> list[int]:
        wrong = dict(self.wrong_slots)
        sound = self.sound_slots(entry_tokens)
        return [wrong.get(row, slot) for row, slot in enumerate(sound)]


def slot_at(entries: Sequence[int], position: int, entry_tokens: int) -> int:
    entry = entries[position // entry_tokens]
    return entry * entry_tokens + position % entry_tokens


def seats_of(seats: Tensor | None, num_reqs: int) -> list[int]:
    return list(range(num_reqs)) if seats is None else seats.tolist()


NUM_SAVED_FIELDS = 11


@dataclass(frozen=True)
class StagedWindow:
    """A row of `saved` that is a staged window. Positions count in its request."""

    num_drafts: int
    first_row: int
    first_position: int
    seq_len: int
    first_logical: int  # logical entry of the first draft
    real: tuple[int, ...]
    shadow: tuple[int, ...]
    entry_tokens: int
    num_copied: int = 0

    @staticmethod
    def of(row: Sequence[int], entry_tokens: int) -> StagedWindow:
        span = (len(row) - NUM_SAVED_FIELDS) // 2
        num_drafts, first_row, first_position, seq_len, first_logical, num = row[:6]
        entries = row[NUM_SAVED_FIELDS:]
        return StagedWindow(
            *(num_drafts, first_row, first_position, seq_len, first_logical),
            *(tuple(entries[:num]), tuple(entries[span : span + num]), entry_tokens),
            row[6],
        )

    def to_row(self, span: int, step: int) -> list[int]:
        none = [0] * (span - len(self.real))
        return [
            *(self.num_drafts, self.first_row, self.first_position, self.seq_len),
            *(self.first_logical, len(self.real), self.num_copied, 0, step, -1, 0),
            *(*self.real, *none, *self.shadow, *none),
        ]

    @property
    def start(self) -> int:
        """The first position of the first staged entry."""
        return self.first_logical * self.entry_tokens

    @property
    def prefix(self) -> range:
        """Positions that hold committed rows in a staged entry."""
        return range(self.start, max(self.start, self.first_position))

    @property
    def copied(self) -> range:
        return range(self.prefix.stop - self.num_copied, self.prefix.stop)

    @property
    def written(self) -> range:
        """Positions whose rows this step writes to shadow entries."""
        return range(max(self.start, self.first_position), self.seq_len)

    def kept(self, accepted: int) -> range:
        return range(self.written.start, self.seq_len - self.num_drafts + accepted)

    def row_of(self, position: int) -> int:
        """Of slot_mapping."""
        return self.first_row + position - self.first_position

    def slots(self, entries: Sequence[int], positions: range) -> list[int]:
        """entries: real or shadow."""
        return [slot_at(entries, p - self.start, self.entry_tokens) for p in positions]


def num_accepted(
    sampled_token_ids: Tensor | None,
    vocab_size: int,
    num_rejected: Tensor | None,
    request: int,
    num_drafts: int,
) -> int:
    if num_rejected is not None:
        accepted = num_drafts - int(num_rejected[request])
    else:
        tokens = sampled_token_ids[request].tolist()
        accepted = sum(token != -1 and token < vocab_size for token in tokens) - 1
    return min(max(accepted, 0), num_drafts)


class ShadowPages:
    """stage, commit_draft_layer and unstage, with the arguments of ops.py, on the cpu;
    nothing is checked.

    layers: those behind the tables that will come, known by their addresses.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = {layer.row(0)[0]: layer for layer in layers}

    def stage(
        self,
        table: Tensor,
        runs: Tensor | None,
        block_table: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        cu_num_logits: Tensor,
        seats: Tensor | None,
        saved: Tensor,
        first_entry: int,
        num_real_entries: int,
        span: int,
        entry_tokens: int,
        step: int,
        patches: bool,
    ) -> None:
        cumulative = [0, *cu_num_logits.tolist()]
        for request, seat in enumerate(seats_of(seats, cu_num_logits.numel())):
            if patches:
                num_drafts = cumulative[request + 1] - cumulative[request] - 1
                first_row, end_row = query_start_loc[request : request + 2].tolist()
                seq_len = int(seq_lens[request])
                first_position = seq_len - (end_row - first_row)
                first_logical = (seq_len - num_drafts) // entry_tokens
                logicals = range(first_logical, (seq_len - 1) // entry_tokens + 1)
                entries = block_table[request].tolist()
                if num_drafts == 0:
                    saved[seat, 0] = 0
                    continue
                saved[seat, 0] = -num_drafts
                if (
                    end_row - first_row < 1 + num_drafts
                    or first_position < 0
                    or len(logicals) > span
                    or logicals[-1] >= len(entries)
                ):
                    continue
                window = StagedWindow(
                    *(num_drafts, first_row, first_position, seq_len, first_logical),
                    tuple(entries[b] for b in logicals),
                    tuple(first_entry + seat * span + b % span for b in logicals),
                    entry_tokens,
                )
                if not all(0 < entry < num_real_entries for entry in window.real):
                    continue
                rows = [window.row_of(position) for position in window.written]
                wanted = window.slots(window.real, window.written)
                if slot_mapping[rows].tolist() != wanted:
                    continue
                committed_in, valid, entry = saved[seat, 8:11].tolist()
                has_all = (
                    committed_in == step - 1
                    and valid == first_position
                    and entry == window.real[0]
                )
                num_copied = 0 if has_all else len(window.prefix)
                window = replace(window, num_copied=num_copied)
                saved[seat] = torch.tensor(window.to_row(span, step))
                for logical, entry in zip(logicals, window.shadow, strict=True):
                    block_table[request, logical] = entry
                slots = window.slots(window.shadow, window.written)
                slot_mapping[rows] = torch.tensor(slots)
            if saved[seat, 0] > 0:
                window = StagedWindow.of(saved[seat].tolist(), entry_tokens)
                self._copy(table, window, window.real, window.shadow, window.copied)

    def commit_draft_layer(
        self,
        table: Tensor,
        runs: Tensor | None,
        block_table: Tensor,
        slot_mapping: Tensor,
        seats: Tensor | None,
        saved: Tensor,
        sampled_token_ids: Tensor | None,
        vocab_size: int,
        num_rejected: Tensor | None,
        counters: Tensor,
        num_reqs: int,
        entry_tokens: int,
        undoes: bool,
        counters_to: Tensor | None = None,
    ) -> None:
        acceptance = (sampled_token_ids, vocab_size, num_rejected)
        for request, seat in enumerate(seats_of(seats, num_reqs)):
            num_drafts = int(saved[seat, 0])
            if num_drafts == 0:
                continue
            accepted = num_accepted(*acceptance, request, abs(num_drafts))
            counters[0] += 1
            counters[1] += abs(num_drafts)
            counters[2] += accepted
            counters[3] += abs(num_drafts) - accepted
            if num_drafts < 0:
                counters[5] += -num_drafts
                continue
            window = StagedWindow.of(saved[seat].tolist(), entry_tokens)
            kept = window.kept(accepted)
            row_bytes = self._copy(table, window, window.shadow, window.real, kept)
            counters[6] += window.num_copied * row_bytes
            counters[7] += len(kept) * row_bytes
            if undoes:
                valid = window.seq_len - num_drafts + accepted
                number = (valid - 1) // entry_tokens - window.first_logical
                saved[seat, 9] = valid
                saved[seat, 10] = window.real[number] if number >= 0 else 0
        if undoes:
            self.unstage(
                block_table, slot_mapping, seats, saved, num_reqs, entry_tokens
            )
        if counters_to is not None and num_reqs > 0:
            counters_to.copy_(counters)

    def unstage(
        self,
        block_table: Tensor,
        slot_mapping: Tensor,
        seats: Tensor | None,
        saved: Tensor,
        num_reqs: int,
        entry_tokens: int,
    ) -> None:
        for request, seat in enumerate(seats_of(seats, num_reqs)):
            if saved[seat, 0] <= 0:
                continue
            window = StagedWindow.of(saved[seat].tolist(), entry_tokens)
            for number, (real, shadow) in enumerate(
                zip(window.real, window.shadow, strict=True)
            ):
                logical = window.first_logical + number
                if block_table[request, logical] == shadow:
                    block_table[request, logical] = real
            old = window.slots(window.real, window.written)
            new = window.slots(window.shadow, window.written)
            for position, real, shadow in zip(window.written, old, new, strict=True):
                row = window.row_of(position)
                if slot_mapping[row] == shadow:
                    slot_mapping[row] = real

    def _copy(
        self,
        table: Tensor,
        window: StagedWindow,
        source: Sequence[int],
        target: Sequence[int],
        positions: range,
    ) -> int:
        """Copies all layers' rows from entries to entries; returns a row's bytes."""
        layers = [self._layers[row[0]] for row in table.tolist()]
        for layer in layers:
            from_index = layer.index(window.slots(source, positions))
            to_index = layer.index(window.slots(target, positions))
            layer.memory[to_index] = layer.memory[from_index]
        return sum(layer.layout.slot_bytes for layer in layers)
