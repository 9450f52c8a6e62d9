# SPDX-License-Identifier: Apache-2.0
"""A plain reference of the ops, from the contract and not from the C++.

A `Layer` knows for every slot the offsets of its bytes in one allocation, as an index
tensor that the layout's definition gives byte by byte; logging is then `cache[index]`
and restoring its reverse. `Reference` says all ops in these terms, and `check` compares
what an op makes of all memory that it can reach, whole allocations with the guards at
their ends, with what the reference makes of a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_nwor import ops
from vllm_nwor.layout.kv_layout import runs_of

GUARD_BYTES = 64
POISON_BYTE = 0x5A
PAD = ops.PAD_SLOT
SAVED = ops.SAVED_COLUMNS


def random_bytes(num_bytes: int, seed: int) -> Tensor:
    """[num_bytes] uint8, cpu."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)


def launched(run: Callable[[], object]) -> list[str]:
    """Names of what it does on the GPU; it neither waits for that nor allocates."""
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = torch.profiler.ProfilerActivity
    both = [activities.CPU, activities.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        run()
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    keys = [event.key for event in profile.key_averages()]
    assert not [k for k in keys if "Synchronize" in k and "Device" not in k], keys
    on_device = torch.autograd.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == on_device]


def fields(found: Any, names: str = "kind") -> list[Any]:
    """These fields of each finding; writer: its request; wrote: that, and its step."""
    rows = []
    for one in found:
        wrote = one.writer.request, one.writer.step
        values = vars(one) | {"writer": wrote[0], "wrote": wrote}
        row = tuple(values[name] for name in names.split())
        rows.append(row if len(row) > 1 else row[0])
    return rows


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    padding: int = 0,
    misalignment: int = 0,
) -> Tensor:
    """Poison, in an allocation with more of it around. padding: between rows, and
    misalignment: of the first one, in elements."""
    rows, width = (1, *shape)[-2:]
    stride = width + padding
    guard = GUARD_BYTES // dtype.itemsize
    num_bytes = (2 * guard + misalignment + rows * stride) * dtype.itemsize
    memory = torch.full((num_bytes,), POISON_BYTE, dtype=torch.uint8, device=device)
    strides = (stride, 1)[-len(shape) :]
    return memory.view(dtype).as_strided(tuple(shape), strides, guard + misalignment)


@dataclass(frozen=True)
class Layout:
    """Where the bytes of each slot lie, counted from a layer's first byte.

    index: [num_slots, slot_bytes] int64, cpu: offsets in the order of the log.
    columns: block_stride .. num_blocks of a table row, without base and log_offset.
    runs: [block_size, num_runs, 2] int32, cpu, or None for rows.
    misalignment: of the layer's first byte.
    """

    index: Tensor
    columns: tuple[int, ...]
    runs: Tensor | None = None
    misalignment: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.index.shape[1]

    @property
    def num_slots(self) -> int:
        return self.index.shape[0]


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
    strides = (block_stride, slot_stride, head_stride)
    columns = (*strides, num_heads, run_bytes, block_size, num_blocks)
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
    runs = pad_sequence(list(map(runs_of, in_block)), batch_first=True)
    starts = torch.arange(num_blocks)[:, None, None] * block_stride
    index = (starts + torch.stack(in_block)).flatten(0, 1)
    # The columns that packed layouts do not use hold nonsense.
    columns = (block_stride, -7, -7, -7, -7, block_size, num_blocks)
    return Layout(index, columns, runs.int())


def columns(block_size: int, dims: int, element: int, tail: int) -> Tensor:
    """An owner: of each slot `dims` elements in columns, then a row of `tail` bytes, as
    CPU_ATTN's `vec` packs K and V. element, tail: in bytes."""
    slots = torch.arange(block_size)
    keys = slots.repeat_interleave(element).repeat(dims)
    return torch.cat([keys, slots.repeat_interleave(tail)])


class Layer:
    """One layer's cache in an allocation of its own, filled at random.

    memory: [guard + misalignment + bytes of the layout + guard] uint8, device.
    """

    def __init__(self, layout: Layout, device: torch.device, seed: int) -> None:
        self.layout = layout
        self.start = GUARD_BYTES + layout.misalignment
        num_bytes = self.start + int(layout.index.max()) + 1 + GUARD_BYTES
        self.memory = random_bytes(num_bytes, seed).to(device)

    @property
    def base(self) -> int:
        return self.memory.data_ptr() + self.start

    def index(self, slots: Sequence[int]) -> Tensor:
        """[num_slots, slot_bytes] int64, on the memory's device: offsets in it."""
        return (self.start + self.layout.index[list(slots)]).to(self.memory.device)

    def write(self, slots: Sequence[int], seed: int) -> None:
        """Random bytes in these slots."""
        index = self.index(slots)
        data = random_bytes(index.numel(), seed).view(index.shape)
        self.memory[index] = data.to(self.memory.device)


def seats_of(args: Any, num_reqs: int) -> list[tuple[int, int]]:
    """(request, its seat) of those that have one."""
    seats: Sequence[int] = range(num_reqs)
    if args.state_indices is not None:
        seats = args.state_indices.tolist()
        if args.seat_of_state is not None:
            known = dict(enumerate(args.seat_of_state.tolist()))
            seats = [known.get(index, -1) for index in seats]
    return [(r, seat) for r, seat in enumerate(seats) if 0 <= seat < len(args.saved)]


class StagedWindow:
    """A row of `saved` that is a staged window. Positions count in its request."""

    def __init__(self, row: Tensor, entry_tokens: int) -> None:
        span = (len(row) - SAVED) // 2
        values = row.tolist()
        self.num_drafts, self.first_row, self.first_position, self.seq_len = values[:4]
        # Logical entry of the first draft.
        self.first_logical, num_entries, self.num_copied = values[4:7]
        self.real = values[SAVED:][:num_entries]
        self.shadow = values[SAVED + span :][:num_entries]
        self.entry_tokens = entry_tokens
        self.start = self.first_logical * entry_tokens
        # Positions whose rows this step writes to shadow entries, and those rows.
        self.written = range(max(self.start, self.first_position), self.seq_len)
        self.rows = [self.first_row + p - self.first_position for p in self.written]

    def slots(self, entries: Sequence[int], positions: range) -> list[int]:
        """entries: real or shadow."""
        places = [divmod(p - self.start, self.entry_tokens) for p in positions]
        return [entries[i] * self.entry_tokens + offset for i, offset in places]


def num_accepted(args: Any, request: int, num_drafts: int) -> int:
    if args.num_rejected is not None:
        accepted = num_drafts - int(args.num_rejected[request])
    else:
        tokens = args.sampled_token_ids[request].tolist()
        accepted = sum(token != -1 and token < args.vocab_size for token in tokens) - 1
    return min(max(accepted, 0), num_drafts)


class Reference:
    """The ops on the cpu, with the arguments of ops.py as attributes of one object;
    nothing is checked.

    layers: those behind the tables that will come, by their addresses; copies.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = {layer.base: copy.copy(layer) for layer in layers}
        for layer in self.layers.values():
            layer.memory = layer.memory.cpu().clone()

    def log_cache_slots(self, args: Any) -> None:
        num_drafts = args.num_drafts
        args.log_slots[:num_drafts] = PAD
        args.log_windows[:num_drafts] = torch.tensor([-1, -1, 0], dtype=torch.int32)
        draft = first = 0
        slot_mapping = args.slot_mapping.view(-1)
        cumulative = args.cu_num_logits[args.num_leading_zeros :].tolist()
        for request, end in enumerate(cumulative):
            for position, row in enumerate(range(first + 1, end)):
                slot = slot_mapping[args.logits_indices[row]]
                window = [request, position, end - first - 1]
                if slot < args.first_shadow_slot:
                    args.log_slots[draft] = slot
                    args.log_windows[draft] = torch.tensor(window, dtype=torch.int32)
                draft += 1
            first = end
        slots = enumerate(args.log_slots[:num_drafts].tolist())
        self._copy_log(args, {draft: slot for draft, slot in slots if slot != PAD})

    def restore_rejected_drafts(self, args: Any) -> None:
        rejected = {}
        windows = args.log_windows[: args.num_drafts].tolist()
        for draft, (request, position, of_window) in enumerate(windows):
            if request < 0:
                continue
            accepted = num_accepted(args, request, of_window)
            args.counters[0] += position == 0
            args.counters[1] += 1
            args.counters[2 if position < accepted else 3] += 1
            if position >= accepted and args.log_slots[draft] != PAD:
                rejected[draft] = int(args.log_slots[draft])
        row_bytes = self._copy_log(args, rejected, is_restored=True)
        args.counters[5] += row_bytes * len(rejected)
        if args.counters_to is not None and args.num_drafts > 0:
            args.counters_to.copy_(args.counters)

    def _copy_log(
        self, args: Any, slots: Mapping[int, int], is_restored: bool = False
    ) -> int:
        """Between layers and log: slots by draft. Returns a row's bytes."""
        row_bytes = 0
        for base, *_, offset in args.table.tolist():
            layer = self.layers[base]
            index = layer.index(list(slots.values()))
            logged = args.undo_log[:, offset : offset + layer.layout.slot_bytes]
            if is_restored:
                layer.memory[index] = logged[list(slots)]
            else:
                logged[list(slots)] = layer.memory[index]
            row_bytes += layer.layout.slot_bytes
        return row_bytes

    def stage(self, args: Any) -> None:
        tokens, span = args.entry_tokens, args.span
        slot_mapping = args.slot_mapping.view(-1)
        cumulative = [0, *args.cu_num_logits[args.num_leading_zeros :].tolist()]
        for request, seat in seats_of(args, len(cumulative) - 1):
            row = args.saved[seat]
            if args.patches:
                num_drafts = cumulative[request + 1] - cumulative[request] - 1
                row[0] = 0 if args.rest_is_logged else -num_drafts
                if num_drafts == 0:
                    continue
                first_row, end_row = args.query_start_loc[request:][:2].tolist()
                seq_len = int(args.seq_lens[request])
                first_position = seq_len - (end_row - first_row)
                first_logical = (seq_len - num_drafts) // tokens
                logicals = range(first_logical, (seq_len - 1) // tokens + 1)
                if (
                    end_row - first_row < 1 + num_drafts
                    or first_position < 0
                    or len(logicals) > span
                    or logicals[-1] >= args.block_table.shape[1]
                ):
                    continue
                entries = args.block_table[request, logicals[0] : logicals[-1] + 1]
                staged = row.clone()
                staged[:5] = torch.tensor(
                    [num_drafts, first_row, first_position, seq_len, first_logical]
                )
                staged[5] = len(logicals)
                staged[8:SAVED] = torch.tensor([args.step, -1, 0])
                staged[SAVED:][: len(logicals)] = entries
                shadow = [args.first_entry + seat * span + b % span for b in logicals]
                staged[SAVED + span :][: len(logicals)] = torch.tensor(shadow)
                window = StagedWindow(staged, tokens)
                slots = window.slots(window.real, window.written)
                if (
                    not all(0 < entry < args.num_real_entries for entry in window.real)
                    or slot_mapping[window.rows].tolist() != slots
                ):
                    continue
                last_valid = [args.step - 1, first_position, window.real[0]]
                has_all = row[8:SAVED].tolist() == last_valid
                staged[6] = 0 if has_all else max(0, first_position - window.start)
                row.copy_(staged)
                entries.copy_(torch.tensor(shadow))
                slots = window.slots(window.shadow, window.written)
                slot_mapping[window.rows] = torch.tensor(slots)
            if row[0] > 0:
                window = StagedWindow(row, tokens)
                first = window.first_position - window.num_copied
                lacks = range(first, window.first_position)
                self._copy(args, window, window.real, window.shadow, lacks)

    def commit_draft_layer(self, args: Any) -> None:
        for request, seat in seats_of(args, args.num_reqs):
            num_drafts = int(args.saved[seat, 0])
            if num_drafts == 0:
                continue
            accepted = num_accepted(args, request, abs(num_drafts))
            rejected = abs(num_drafts) - accepted
            args.counters[:4] += torch.tensor([1, abs(num_drafts), accepted, rejected])
            if num_drafts < 0:
                args.counters[6] += -num_drafts
                continue
            args.counters[4] += 1
            window = StagedWindow(args.saved[seat], args.entry_tokens)
            valid = window.seq_len - rejected
            kept = range(window.written.start, valid)
            row_bytes = self._copy(args, window, window.shadow, window.real, kept)
            args.counters[7] += window.num_copied * row_bytes
            args.counters[8] += len(kept) * row_bytes
            if args.undoes:
                number = (valid - 1) // args.entry_tokens - window.first_logical
                args.saved[seat, 9] = valid
                args.saved[seat, 10] = window.real[number] if number >= 0 else 0
        if args.undoes:
            self.unstage(args)
        if args.counters_to is not None and args.num_reqs > 0:
            args.counters_to.copy_(args.counters)

    def unstage(self, args: Any) -> None:
        for request, seat in seats_of(args, args.num_reqs):
            if args.saved[seat, 0] <= 0:
                continue
            window = StagedWindow(args.saved[seat], args.entry_tokens)
            entries = args.block_table[request, window.first_logical :]
            old = window.slots(window.real, window.written)
            new = window.slots(window.shadow, window.written)
            for places, at, real, shadow in (
                (entries, range(len(window.real)), window.real, window.shadow),
                (args.slot_mapping.view(-1), window.rows, old, new),
            ):
                for place, was, ours in zip(at, real, shadow, strict=True):
                    if places[place] == ours:
                        places[place] = was

    def _copy(
        self,
        args: Any,
        window: StagedWindow,
        source: Sequence[int],
        target: Sequence[int],
        positions: range,
    ) -> int:
        """Copies all layers' rows from entries to entries; returns a row's bytes."""
        layers = [self.layers[row[0]] for row in args.table.tolist()]
        for layer in layers:
            from_index = layer.index(window.slots(source, positions))
            to_index = layer.index(window.slots(target, positions))
            layer.memory[to_index] = layer.memory[from_index]
        return sum(layer.layout.slot_bytes for layer in layers)


def whole(tensor: Tensor) -> Tensor:
    """[num_bytes] uint8: all of a tensor's allocation."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def check(
    op: str,
    layers: Sequence[Layer],
    arguments: Mapping[str, Any],
    call: Callable[..., object] | None = None,
) -> None:
    """Calls an op, or what is given in its place. Then the allocations of all its
    arguments and layers hold what the reference makes of copies."""
    storages: dict[int, tuple[Tensor, Tensor, list[str]]] = {}

    def copied(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        memory = whole(value)
        key = memory.data_ptr()
        _, storage, names = storages.setdefault(key, (memory, memory.cpu().clone(), []))
        names.append(name)
        place = (value.storage_offset(), value.shape, value.stride())
        return storage.new_empty(0, dtype=value.dtype).set_(
            storage.untyped_storage(), *place
        )

    copies = {name: copied(name, value) for name, value in arguments.items()}
    reference = Reference(layers)
    (call or getattr(ops, op))(**arguments)
    getattr(reference, op)(SimpleNamespace(**copies))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # before the host reads what was published
    for memory, expected, names in storages.values():
        assert torch.equal(memory.cpu(), expected), f"{op}: {names}"
    for number, layer in enumerate(layers):
        expected = reference.layers[layer.base].memory
        assert torch.equal(layer.memory.cpu(), expected), f"{op}: layer {number}"
