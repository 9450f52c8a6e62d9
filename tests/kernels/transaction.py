# SPDX-License-Identifier: Apache-2.0
"""Verification steps through the real ops, every byte of them checked.

Log, a forward that overwrites all draft slots, restore; or stage, a forward through the
shadow blocks, commit. Each call is compared with the reference's, whole allocations,
guards and poison included.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.reference import (
    PAD,
    Layer,
    Layout,
    StagedWindow,
    check,
    guarded,
    seats_of,
)
from vllm_nwor import ops

VOCAB_SIZE = 1000
NUM_COUNTERS = len(ops.COUNTER_COLUMNS)
LOG, RESTORE = "log_cache_slots", "restore_rejected_drafts"
STAGE, COMMIT, UNSTAGE = "stage", "commit_draft_layer", "unstage"
# The library's classes and what they are made of; the method that makes an op's launch,
# and its arguments. ring and slot: in place of counters_to.
CLASSES = {
    "LoggedLayers": "table runs table runs undo_log log_slots log_windows counters "
    "ring first_shadow_slot",
    "StagedLayers": "table runs saved counters ring first_entry num_real_entries span "
    "entry_tokens seat_of_state patches undoes",
}
OF_STAGE = (
    "block_table slot_mapping query_start_loc seq_lens cu_num_logits state_indices "
    "step rest_is_logged"
)
OF_LOG = "slot_mapping logits_indices cu_num_logits num_drafts num_leading_zeros"
ACCEPTED = "sampled_token_ids vocab_size num_rejected"
METHODS = {
    LOG: ("LoggedLayers", "log", OF_LOG),
    RESTORE: ("LoggedLayers", "restore", f"{ACCEPTED} num_drafts slot"),
    STAGE: ("StagedLayers", "stage", f"{OF_STAGE} num_leading_zeros"),
    COMMIT: ("StagedLayers", "commit", f"{ACCEPTED} slot"),
    UNSTAGE: ("StagedLayers", "unstage", ""),
}
# The two ways to keep rejected bytes out of the cache: undo log, shadow blocks.
FAMILIES = (LOG, RESTORE), (STAGE, COMMIT)
# The seat of each state index; one has none, and some seats are outside `saved`.
SEAT_OF_STATE = (3, -1, 0, 2, 8, 1, 4, 5)
# What the counters are before the first step: they are added to.
FIRST_COUNTS = torch.arange(10, 10 + NUM_COUNTERS)
Arguments = dict[str, Any]


class AcceptanceForm(enum.Enum):
    """The ways in which a sampler says how many drafts it accepted."""

    SAMPLED = "sampled"  # valid tokens, then -1
    PLACEHOLDER = "placeholder"  # ids beyond the vocabulary are invalid too
    STRIDED = "strided"  # a view of a wider, transposed tensor
    BEHIND = "behind"  # valid ones not in front, more columns than a warp has lanes
    NUM_REJECTED = "num_rejected"

    def arguments(
        self, drafts: Sequence[int], accepted: Sequence[int], device: torch.device
    ) -> Arguments:
        """From the number of drafts and of accepted ones of each request. The latter
        may be outside its window."""
        if self is AcceptanceForm.NUM_REJECTED:
            rejected = [k - a for k, a in zip(drafts, accepted, strict=True)]
            num_rejected = torch.tensor(rejected, dtype=torch.int32, device=device)
            return acceptance(num_rejected=num_rejected)
        width = max((0, *drafts, *accepted)) + 1
        invalid = VOCAB_SIZE if self is AcceptanceForm.PLACEHOLDER else -1
        columns = torch.arange(width)
        valid = columns % 2 * (VOCAB_SIZE - 1)  # the first token and the last
        num_valid = torch.tensor(accepted, dtype=torch.int32)[:, None] + 1
        tokens = torch.where(columns < num_valid, valid, invalid).int()
        if self is AcceptanceForm.BEHIND:
            tokens = torch.nn.functional.pad(tokens.flip(1), (70, 0), value=-1)
        if self is AcceptanceForm.STRIDED:
            wide = torch.full((2 * width, len(drafts) + 1), 5, dtype=torch.int32)
            wide[::2, 1:] = tokens.t()
            return acceptance(wide.to(device).t()[1:, ::2])
        return acceptance(tokens.to(device))


def named(arguments: Arguments, names: str) -> list[Any]:
    """By position."""
    return [arguments[name] for name in names.split()]


def acceptance(
    sampled_token_ids: Tensor | None = None, num_rejected: Tensor | None = None
) -> Arguments:
    return {
        "sampled_token_ids": sampled_token_ids,
        "vocab_size": VOCAB_SIZE if num_rejected is None else 0,
        "num_rejected": num_rejected,
    }


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
    def first_shadow_slot(self) -> int:
        return self.first_entry * self.entry_tokens if self.num_seats else ops.NO_SHADOW

    @property
    def num_slots(self) -> int:
        return (self.first_entry + self.num_seats * self.span) * self.entry_tokens


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

    def slots(self, entry_tokens: int) -> list[int]:
        """Of the rows by the entries; PAD where there is no entry."""
        slots = []
        for position in range(self.seq_len - self.num_rows, self.seq_len):
            block, offset = divmod(position, entry_tokens)
            has_entry = 0 <= block < len(self.entries)
            entry = self.entries[block] if has_entry else 0
            slots.append(entry * entry_tokens + offset if has_entry else PAD)
        for row, slot in self.wrong_slots:
            slots[row] = slot
        return slots


def drafts_in(*slots: Sequence[int], accepted: Sequence[int]) -> list[Request]:
    """Requests whose drafts have these slots, PAD allowed, whatever their entries. The
    slots of their other rows, one to three of each, nobody may touch: they are out of
    every range."""
    requests = []
    for number, (of_drafts, count) in enumerate(zip(slots, accepted, strict=True)):
        of_rows = [1 << 40] * (1 + number % 3) + [*of_drafts]
        sizes = len(of_rows), len(of_rows), len(of_drafts)
        requests.append(Request((), *sizes, count, tuple(enumerate(of_rows))))
    return requests


NO_PAGES = Pages(1, 1, 1, 1, num_seats=0, width=0)


class Step:
    """Steps of requests with drafts through the ops, for one KV-cache group on one
    device. What it means for a forward that they are right, tests/simulation shows.

    layouts: of the layers of each table of the group; the tables share an undo log.
    pages: without them there is nothing to stage.
    capacity: of the log, in drafts. gap, slack, padding, misalignment: bytes between
    its layers, at the end of a row, between its rows, and before them.
    """

    def __init__(
        self,
        device: torch.device,
        layouts: Sequence[Sequence[Layout]],
        pages: Pages = NO_PAGES,
        *,
        seed: int = 0,
        capacity: int = 0,
        gap: int = 0,
        slack: int = 0,
        padding: int = 0,
        misalignment: int = 0,
    ) -> None:
        self.pages, self.device, self.seed = pages, device, seed
        self.layers: list[Layer] = []
        self.tables, self.runs = [], []  # as the ops take them
        offset = end = 0  # in a row of the log
        for of_table in layouts:
            rows = []
            for layout in of_table:
                self.layers.append(Layer(layout, device, seed + len(self.layers)))
                rows.append([self.layers[-1].base, *layout.columns, offset])
                end = offset + layout.slot_bytes
                offset = end + gap
            self.tables.append(torch.tensor(rows, device=device))
            runs = of_table[0].runs
            self.runs.append(None if runs is None else runs.to(device))
        size = (capacity, end + slack)
        self.undo_log = guarded(size, torch.uint8, device, padding, misalignment)
        self.log_slots = guarded((capacity,), torch.int64, device)
        self.log_windows = guarded((capacity, 3), torch.int32, device)
        size = (pages.num_seats, ops.SAVED_COLUMNS + 2 * pages.span)
        self.saved = guarded(size, torch.int32, device).zero_()
        self.step = 1 + seed
        self.rest_is_logged = False
        table = torch.tensor(SEAT_OF_STATE, dtype=torch.int32, device=device)
        self.tables_of_seats = [table, table, None, None]  # taken in turn
        size = (len(layouts), NUM_COUNTERS)
        self.counters = guarded(size, torch.int64, device)
        self.counters[:] = FIRST_COUNTS.to(device)
        size = (len(layouts) + 2, NUM_COUNTERS)  # a guard on each side
        published = torch.full(size, -3, pin_memory=device.type == "cuda")
        self.published = published[1:-1]

    def counted(self) -> list[list[int]]:
        """By each table's launches."""
        return (self.counters.cpu() - FIRST_COUNTS).tolist()

    def load(
        self,
        requests: Sequence[Request],
        seats: Sequence[int] | None = None,
        extra_drafts: int = 0,
        index_dtype: torch.dtype = torch.int32,
    ) -> None:
        """The metadata of a batch; behind it the arrays hold what nobody may use.

        seats: of each request; None: its number. extra_drafts: how far the host's bound
        of the number of drafts is off.
        """
        device, self.num_reqs = self.device, len(requests)

        def int32(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.state_indices = self.seat_of_state = None
        if seats is not None:
            dtype = torch.int64 if self.step % 2 else torch.int32
            indices = list(seats)
            self.seat_of_state = self.tables_of_seats[self.step % 4]
            if self.seat_of_state is not None:  # else a request's index is its seat
                # What is no seat has an index beyond the last one, every other time.
                known = dict(zip(SEAT_OF_STATE, itertools.count(), strict=False))
                known[-1] = known[-1] if self.step % 8 < 4 else len(known) + 1
                indices = [known[seat] for seat in seats]
            self.state_indices = torch.tensor(indices, dtype=dtype, device=device)
        self.drafts = [request.num_drafts for request in requests]
        self.num_drafts = sum(self.drafts) + extra_drafts
        self.accepted = [request.accepted for request in requests]
        size = (self.num_reqs + 1, self.pages.width)
        self.block_table = guarded(size, torch.int32, device, padding=3)
        for row, request in enumerate(requests):
            self.block_table[row] = torch.tensor(request.entries)
        slots = [s for r in requests for s in r.slots(self.pages.entry_tokens)]
        self.num_tokens = len(slots)
        self.slot_mapping = guarded((len(slots) + 1,), torch.int64, device)
        self.slot_mapping[:-1] = torch.tensor(slots, dtype=torch.int64)

        sizes = (request.num_rows for request in requests)
        starts = [*itertools.accumulate(sizes, initial=0)]
        ends = zip(starts[1:], self.drafts, strict=True)
        indices = [row for end, k in ends for row in range(end - 1 - k, end)]
        self.logits_indices = torch.tensor(indices, dtype=index_dtype, device=device)
        self.query_start_loc = int32([*starts, -1, 1 << 30])
        self.seq_lens = int32([*(r.seq_len for r in requests), -1, 1 << 30])
        self.num_leading_zeros = (self.step - 1) % 3
        logits = itertools.accumulate(1 + k for k in self.drafts)
        self.cu_num_logits = int32([0] * self.num_leading_zeros + list(logits))

    def arguments(self, op: str, table: int = 0, **more: Any) -> Arguments:
        """As the op's parameters are named. The first call of stage patches, the last
        one of commit_draft_layer undoes."""
        rows = self.tables[table]
        if op not in (LOG, RESTORE):
            # The column that these ops do not use holds nonsense.
            rows = rows.clone()
            rows[:, ops.TABLE_COLUMNS.index("log_offset")] = -7
        of_table = {
            "table": rows,
            "runs": self.runs[table],
            "counters": self.counters[table],
            "counters_to": self.published[table],
            "patches": table == 0,
            "undoes": table == len(self.tables) - 1,
            "first_shadow_slot": self.pages.first_shadow_slot,
        }
        if self.step % 2 == 0:
            of_table["slot_mapping"] = self.slot_mapping[None]
        known = vars(self) | vars(self.pages) | of_table | more
        parameters = [known.name for known in getattr(ops, op)._schema.arguments]
        return {name: known[name] for name in parameters}

    def check(self, op: str, table: int = 0, **more: Any) -> None:
        check(op, self.layers, self.arguments(op, table, **more))

    def check_tables(
        self, op: str, form: AcceptanceForm = AcceptanceForm.SAMPLED
    ) -> None:
        accepted = form.arguments(self.drafts, self.accepted, self.device)
        for table in range(len(self.tables)):
            self.check(op, table, **accepted)

    def stage(
        self, requests: Sequence[Request], seats: Sequence[int] | None = None
    ) -> None:
        """The next step's launches of stage."""
        self.step += 1
        self.load(requests, seats)
        self.check_tables(STAGE)

    def forward(self) -> None:
        """Writes the rows of all tokens, wherever their slots are by now; those that
        have none are left out."""
        slots = self.slot_mapping[: self.num_tokens].tolist()
        num_slots = self.layers[0].layout.num_slots
        self.write([slot for slot in slots if 0 <= slot < num_slots])

    def write(self, slots: Sequence[int]) -> None:
        self.seed += 1000
        for number, layer in enumerate(self.layers):
            layer.write(slots, self.seed + number)

    def windows(self) -> dict[int, StagedWindow]:
        """The staged windows of the batch, by request."""
        rows = self.saved.cpu()
        return {
            request: StagedWindow(rows[seat], self.pages.entry_tokens)
            for request, seat in seats_of(self, self.num_reqs)
            if rows[seat, 0] > 0
        }

    def meddle(self, seed: int) -> None:
        """Somebody overwrites some of the patched entries and slots, some with values
        of our own: what stage has not put there stays."""
        draw = random.Random(seed)
        tokens = self.pages.entry_tokens
        for request, window in self.windows().items():
            values = (*window.real, *window.shadow, 0, self.pages.num_real_entries)
            for number in range(len(window.real)):
                if draw.random() < 0.5:
                    place = (request, window.first_logical + number)
                    self.block_table[place] = draw.choice(values)
            for row, position in zip(window.rows, window.written, strict=True):
                if draw.random() < 0.5:
                    offset = draw.choice((position, position + 1)) % tokens
                    self.slot_mapping[row] = draw.choice(values) * tokens + offset


def check_step(
    family: tuple[str, str],
    device: torch.device,
    layouts: Sequence[Sequence[Layout]],
    requests: Sequence[Request],
    pages: Pages = NO_PAGES,
    *,
    form: AcceptanceForm = AcceptanceForm.SAMPLED,
    extra_drafts: int = 0,
) -> Step:
    """One step through the ops of a family, with a log that has a row to spare: after
    each op every byte is what the reference has."""
    before, after = family
    capacity = sum(r.num_drafts for r in requests) + extra_drafts + 1
    step = Step(device, layouts, pages, capacity=capacity)
    step.load(requests, None, extra_drafts)
    step.check_tables(before)
    step.forward()
    step.check_tables(after, form)
    return step
