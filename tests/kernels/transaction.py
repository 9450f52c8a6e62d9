# SPDX-License-Identifier: Apache-2.0
"""One verification step through the real ops, every byte of it checked.

Log, a forward that overwrites all draft slots, restore; or stage, a forward through the
shadow pages, commit. After each, whole allocations are compared with what the reference
says, guards and poison included.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.reference import (
    PAD,
    Batch,
    Layer,
    Layout,
    Log,
    Pages,
    Request,
    ShadowPages,
    StagedWindow,
    Tables,
    expected_counters,
    expected_log,
    make_table,
    random_bytes,
    seats_of,
)
from vllm_nwor import ops

VOCAB_SIZE = 1000
NUM_COUNTERS = len(ops.COUNTER_COLUMNS)


class AcceptanceForm(enum.Enum):
    """The ways in which a sampler says how many drafts it accepted."""

    SAMPLED = "sampled"  # valid tokens, then -1
    PLACEHOLDER = "placeholder"  # ids beyond the vocabulary are invalid too
    STRIDED = "strided"  # a view of a wider, transposed tensor
    NUM_REJECTED = "num_rejected"


def acceptance_arguments(
    drafts: Sequence[int],
    accepted_drafts: Sequence[int],
    form: AcceptanceForm,
    device: torch.device,
) -> tuple[Tensor | None, int, Tensor | None]:
    """(sampled_token_ids, vocab_size, num_rejected), from the number of drafts and of
    accepted ones of each request."""
    if form is AcceptanceForm.NUM_REJECTED:
        rejected = [k - a for k, a in zip(drafts, accepted_drafts, strict=True)]
        return None, 0, torch.tensor(rejected, dtype=torch.int32, device=device)
    width = max(drafts, default=0) + 1
    invalid = VOCAB_SIZE if form is AcceptanceForm.PLACEHOLDER else -1
    tokens = torch.full((len(drafts), width), invalid, dtype=torch.int32)
    for request, accepted in enumerate(accepted_drafts):
        # Token 0 and the vocabulary's last one are valid.
        tokens[request, : accepted + 1] = torch.tensor([0, VOCAB_SIZE - 1]).repeat(
            accepted + 1
        )[: accepted + 1]
    if form is AcceptanceForm.STRIDED:
        wide = torch.full((2 * width, len(drafts) + 1), 5, dtype=torch.int32)
        view = wide.t()[1:, ::2]
        view.copy_(tokens)
        wide = wide.to(device)
        return wide.t()[1:, ::2], VOCAB_SIZE, None
    return tokens.to(device), VOCAB_SIZE, None


def log(
    tables: Tables, log: Log, metadata: tuple[Tensor, Tensor, Tensor], num_drafts: int
) -> None:
    ops.log_cache_slots(
        tables.table,
        tables.runs,
        *metadata,
        log.undo_log,
        log.slots,
        log.windows,
        num_drafts,
    )


def restore(
    tables: Tables,
    log: Log,
    acceptance: tuple[Tensor | None, int, Tensor | None],
    counters: Tensor,
    num_drafts: int,
    counters_to: Tensor | None = None,
) -> None:
    ops.restore_rejected_drafts(
        tables.table,
        tables.runs,
        log.undo_log,
        log.slots,
        log.windows,
        *acceptance,
        counters,
        num_drafts,
        counters_to,
    )


def forward(tables: Tables, batch: Batch, seed: int) -> None:
    """Overwrites every draft slot of every layer, as the target's forward would."""
    slots = [slot for slot in batch.flat_slots if slot != PAD]
    for number, layer in enumerate(tables.layers):
        memory = layer.memory.cpu()
        index = layer.index(slots).flatten()
        memory[index] = random_bytes(index.numel(), seed + number)
        layer.memory.copy_(memory)


def check_transaction(
    tables: Tables,
    undo: Log,
    batch: Batch,
    *,
    form: AcceptanceForm = AcceptanceForm.SAMPLED,
    index_dtype: torch.dtype = torch.int32,
    extra_drafts: int = 0,
    seed: int = 0,
) -> None:
    """Runs a step and compares everything with the reference.

    extra_drafts: how far the host's bound of the number of drafts is off.
    """
    device = tables.table.device
    num_drafts = len(batch.flat_slots) + extra_drafts
    before = [layer.memory.cpu().clone() for layer in tables.layers]

    metadata = batch.metadata(device, index_dtype, seed)
    wanted_log = expected_log(tables, undo, batch, num_drafts)
    log(tables, undo, metadata, num_drafts)
    assert_same_log(undo, wanted_log)
    for number, (layer, old) in enumerate(zip(tables.layers, before, strict=True)):
        assert torch.equal(layer.memory.cpu(), old), f"log changed layer {number}"

    forward(tables, batch, seed + 1000)
    wanted = [layer.memory.cpu().clone() for layer in tables.layers]
    for slot, rejected in zip(batch.flat_slots, batch.rejected, strict=True):
        if rejected and slot != PAD:
            for layer, memory, old in zip(tables.layers, wanted, before, strict=True):
                index = layer.index([slot])[0]
                memory[index] = old[index]

    first_counts = torch.arange(10, 10 + NUM_COUNTERS)
    counters = first_counts.to(device, copy=True)
    # A guard on each side of what the host reads.
    published = torch.full((NUM_COUNTERS + 2,), -3, pin_memory=device.type == "cuda")
    num_drafts_of = [len(window) for window in batch.slots]
    restore(
        tables,
        undo,
        acceptance_arguments(num_drafts_of, batch.accepted, form, device),
        counters,
        num_drafts,
        published[1:-1],
    )
    for number, (layer, memory) in enumerate(zip(tables.layers, wanted, strict=True)):
        assert torch.equal(layer.memory.cpu(), memory), f"layer {number} after restore"
    assert_same_log(undo, wanted_log)
    added = (counters.cpu() - first_counts).tolist()
    assert added == expected_counters(tables, batch)
    untouched = [-3] * NUM_COUNTERS
    wanted_published = counters.tolist() if num_drafts else untouched
    assert published.tolist() == [-3, *wanted_published, -3]


def assert_same_log(undo: Log, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    memory, slots, windows = undo.snapshot()
    assert torch.equal(slots, wanted[1]), "log_slots"
    assert torch.equal(windows, wanted[2]), "log_windows"
    assert torch.equal(memory, wanted[0]), "undo_log, its padding or its guards"


def shadow_ops(layers: Sequence[Layer]) -> Any:
    """What is tested. With `return ShadowPages(layers)` the tests test themselves."""
    return ops


PADDING = 3  # ints beside and behind each array that an op gets
POISON_ENTRY = 0x5A5A5A5A


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """(allocation, zeros of `shape` in it), poison around; rows `padding` apart."""
    width = shape[-1] + padding
    rows = 1 if len(shape) == 1 else shape[0]
    memory = torch.full(
        (2 * PADDING + rows * width,), POISON_ENTRY, dtype=dtype, device=device
    )
    strides = (1,) if len(shape) == 1 else (width, 1)
    view = memory.as_strided(tuple(shape), strides, PADDING)
    view.zero_()
    return memory, view


class ShadowSide:
    """All that the ops of shadow pages read and write, on one device.

    layouts: of the layers of each table of the group.
    """

    def __init__(
        self,
        pages: Pages,
        layouts: Sequence[Sequence[Layout]],
        device: torch.device,
        *,
        seed: int = 0,
        misalignment: int = 0,
    ) -> None:
        self.pages = pages
        self.device = device
        self.tables = []
        for number, of_table in enumerate(layouts):
            first = seed + 100 * number
            layers = [
                Layer(layout, device, first + layer, misalignment)
                for layer, layout in enumerate(of_table)
            ]
            # The column that these ops do not use holds nonsense.
            table = make_table(layers, device)
            table.table[:, ops.TABLE_COLUMNS.index("log_offset")] = -7
            self.tables.append(table)
        int32 = torch.int32
        shape = (pages.num_seats + 1, pages.width)
        self.table_memory, self.block_table = guarded(shape, int32, device, PADDING)
        shape = (pages.num_seats * pages.width * pages.entry_tokens + 1,)
        self.slot_memory, self.slot_mapping = guarded(shape, torch.int64, device)
        shape = (pages.num_seats, ops.SAVED_COLUMNS + 2 * pages.span)
        self.saved_memory, self.saved = guarded(shape, int32, device)
        self.step = 1
        shape = (len(layouts), NUM_COUNTERS)
        self.counters = torch.zeros(shape, dtype=torch.int64, device=device)
        self.published = torch.full(shape, -3, pin_memory=device.type == "cuda")

    @property
    def layers(self) -> list[Layer]:
        return [layer for table in self.tables for layer in table.layers]

    def load(
        self, requests: Sequence[Request], seats: Sequence[int] | None = None
    ) -> None:
        """The metadata of a batch; behind it the arrays hold what nobody may use.

        seats: of each request; None: its number.
        """
        self.num_reqs = len(requests)
        self.seats = None
        if seats is not None:
            dtype = torch.int64 if self.step % 2 else torch.int32
            self.seats = torch.tensor(seats, dtype=dtype, device=self.device)
        self.num_drafts = [request.num_drafts for request in requests]
        self.accepted = [request.accepted for request in requests]
        entry_tokens = self.pages.entry_tokens
        self.block_table.fill_(POISON_ENTRY)
        self.slot_mapping.fill_(POISON_ENTRY)
        starts, logits = [0], []
        for number, request in enumerate(requests):
            self.block_table[number] = torch.tensor(request.entries)
            slots = torch.tensor(request.slots(entry_tokens), dtype=torch.int64)
            starts.append(starts[-1] + request.num_rows)
            self.slot_mapping[starts[-2] : starts[-1]] = slots
            logits.append((logits or [0])[-1] + 1 + request.num_drafts)

        def int32(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        lengths = [request.seq_len for request in requests]
        self.query_start_loc = int32([*starts, -1, 1 << 30])
        self.seq_lens = int32([*lengths, -1, 1 << 30])
        self.cu_num_logits = int32(logits)

    def stage(self) -> None:
        """All tables; the first call patches."""
        for number, table in enumerate(self.tables):
            self.ops.stage(*self.stage_arguments(table, patches=number == 0))

    def commit(self, form: AcceptanceForm = AcceptanceForm.SAMPLED) -> None:
        """All tables; the last call undoes."""
        for number in range(len(self.tables)):
            self.commit_table(number, form)

    def commit_table(self, number: int, form: AcceptanceForm) -> None:
        acceptance = acceptance_arguments(
            self.num_drafts, self.accepted, form, self.device
        )
        undoes = number == len(self.tables) - 1
        arguments = self.commit_arguments(number, acceptance, undoes)
        self.ops.commit_draft_layer(*arguments)

    def unstage(self) -> None:
        self.ops.unstage(
            self.block_table,
            self.slot_mapping,
            self.seats,
            self.saved,
            self.num_reqs,
            self.pages.entry_tokens,
        )

    @property
    def ops(self) -> Any:
        return shadow_ops(self.layers)

    def stage_arguments(self, table: Tables, patches: bool) -> tuple[Any, ...]:
        pages = self.pages
        return (
            *(table.table, table.runs, self.block_table, self.slot_mapping),
            *(self.query_start_loc, self.seq_lens, self.cu_num_logits, self.seats),
            *(self.saved, pages.first_entry, pages.num_real_entries, pages.span),
            *(pages.entry_tokens, self.step, patches),
        )

    def commit_arguments(
        self,
        number: int,
        acceptance: tuple[Tensor | None, int, Tensor | None],
        undoes: bool,
    ) -> tuple[Any, ...]:
        table = self.tables[number]
        return (
            *(table.table, table.runs, self.block_table, self.slot_mapping),
            *(self.seats, self.saved),
            *acceptance,
            *(self.counters[number], self.num_reqs, self.pages.entry_tokens, undoes),
            self.published[number],
        )

    def windows(self) -> dict[int, StagedWindow]:
        """The staged windows of the batch, by request."""
        rows = self.saved.tolist()
        return {
            request: StagedWindow.of(rows[seat], self.pages.entry_tokens)
            for request, seat in enumerate(seats_of(self.seats, self.num_reqs))
            if rows[seat][0] > 0
        }

    def saved_fields(self) -> list[list[int]]:
        """What `saved` means: without entries beyond num_blocks and, in rows of the
        batch that are no staged windows, without all but the first and the internal
        field."""
        span = self.pages.span
        fields = []
        for row in self.saved.tolist():
            if row[0] <= 0:
                fields.append([row[0], row[7]])
            else:
                num = row[5]
                first = ops.SAVED_COLUMNS
                entries = row[first : first + num], row[first + span :][:num]
                fields.append([*row[:first], *entries[0], *entries[1]])
        return fields


class Reference(ShadowSide):
    """The same on the cpu, where the reference does the work."""

    @property
    def ops(self) -> ShadowPages:
        return ShadowPages(self.layers)


class ShadowStep:
    """Steps of one group: after each call everything that the op can reach equals what
    the reference made of the same, whole allocations. What it means for a forward that
    this is right, tests/simulation shows with the same ops."""

    def __init__(
        self,
        device: torch.device,
        pages: Pages,
        layouts: Sequence[Sequence[Layout]],
        *,
        seed: int = 0,
        misalignment: int = 0,
    ) -> None:
        options = {"seed": seed, "misalignment": misalignment}
        self.pages = pages
        self.seed = seed
        self.side = ShadowSide(pages, layouts, device, **options)
        self.reference = Reference(pages, layouts, torch.device("cpu"), **options)
        self.sides = (self.side, self.reference)

    def stage(
        self, requests: Sequence[Request], seats: Sequence[int] | None = None
    ) -> None:
        self.requests = requests
        for side in self.sides:
            side.step += 1
            side.load(requests, seats)
            side.stage()
        for name in ("query_start_loc", "seq_lens", "cu_num_logits"):
            value = getattr(self.side, name).cpu()
            assert torch.equal(value, getattr(self.reference, name)), name
        self.compare("stage")

    def forward(self) -> None:
        """Writes the rows of all tokens with a sound slot of a real entry."""
        tokens = self.pages.entry_tokens
        real = range(tokens, self.pages.num_real_entries * tokens)
        is_written = [
            slot == sound and slot in real
            for request in self.requests
            for slot, sound in zip(
                request.slots(tokens), request.sound_slots(tokens), strict=True
            )
        ]
        slots = self.reference.slot_mapping.tolist()
        self.write(list(itertools.compress(slots, is_written)))

    def write(self, slots: Sequence[int]) -> None:
        """Random rows, the same ones on both sides."""
        self.seed += 1000
        for number, layer in enumerate(self.reference.layers):
            index = layer.index(slots)
            data = random_bytes(index.numel(), self.seed + number).view(index.shape)
            for side in self.sides:
                memory = side.layers[number].memory
                memory[index.to(memory.device)] = data.to(memory.device)

    def meddle(self, seed: int) -> None:
        """Somebody overwrites some of the patched entries and slots, some with values
        of our own: what stage has not put there stays."""
        draw = random.Random(seed)
        for request, window in self.reference.windows().items():
            values = (*window.real, *window.shadow, 0, self.pages.num_real_entries)
            for number in range(len(window.real)):
                if draw.random() < 0.5:
                    entry = draw.choice(values)
                    for side in self.sides:
                        side.block_table[request, window.first_logical + number] = entry
            for position in window.written:
                if draw.random() < 0.5:
                    offset = draw.choice((position, position + 1))
                    tokens = self.pages.entry_tokens
                    slot = draw.choice(values) * tokens + offset % tokens
                    for side in self.sides:
                        side.slot_mapping[window.row_of(position)] = slot

    def commit(self, form: AcceptanceForm = AcceptanceForm.SAMPLED) -> None:
        for number in range(len(self.side.tables)):
            for side in self.sides:
                side.commit_table(number, form)
            self.compare(f"commit of table {number}")

    def unstage(self) -> None:
        for side in self.sides:
            side.unstage()
        self.compare("unstage")

    def compare(self, after: str) -> None:
        """Everything with the reference, whole allocations."""
        side, reference = self.side, self.reference
        assert side.saved_fields() == reference.saved_fields(), f"saved after {after}"
        for memory in (side.saved_memory, reference.saved_memory):
            guards = torch.cat([memory[:PADDING], memory[-PADDING:]])
            assert (guards == POISON_ENTRY).all(), f"around saved after {after}"
        for name in ("table_memory", "slot_memory", "counters"):
            got, wanted = getattr(side, name).cpu(), getattr(reference, name)
            assert torch.equal(got, wanted), f"{name} after {after}"
        if side.device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(side.published, reference.published), f"{after}: published"
        for number, (layer, wanted) in enumerate(
            zip(side.layers, reference.layers, strict=True)
        ):
            same = torch.equal(layer.memory.cpu(), wanted.memory)
            assert same, f"layer {number} after {after}"
