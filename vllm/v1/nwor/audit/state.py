# SPDX-License-Identifier: Apache-2.0
"""Audit: what the KV audit keeps of slots and requests, and what a step does with it.

A step, in this order; each line is one op for each KV-cache group:

    begin_step    blocks are handed out to requests, finished ones are forgotten
    plan          who is about to write what where, of all requests; foreign_write
    (vLLM's forward, rejection sampling, NWOR's commit)
    resolve       what is kept; wrong_prefix at each row and at the end of each block
      adopt       requests that are new in the batch: each slot that they found
      record      checksums of what was written; missing_write, changed (rejected)
      scan        checksums of older blocks, within the budget; changed
      publish     what was found goes to the host, which does not wait for it

Identities are recorded for all rows before anything is compared: a request may find in
the prefix cache what another one writes in this very step.

A request in the batch has a *seat*, where its text's identity is kept; a row of the
batch names its seat. A seat is given when a request comes into the batch, and its
text is then read from the host; from there on it is chained on the device.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..device_memory import ALIGNMENT, DeviceMemory
from ..launches import CopyTable, LayerCache, copy_tables
from ..ops import TABLE_COLUMNS, audit_op
from .findings import COLUMNS, MAX_KEPT, Finding, decode

# Columns of int64 tables; csrc/nwor/audit.h has the structs.
RECORD_COLUMNS = 4
SEAT_COLUMNS = 8
PLAN_COLUMNS = 10
# Who owns a block that goes to another KV-cache group.
NOBODY = 0
# Bytes of a hit that are compared when it is taken over, in budgets of a step.
HIT_BUDGETS = 4
# Names of requests that findings may still ask for.
MAX_NAMES = 1 << 16
# Steps whose findings may be on their way to the host: vLLM has two in flight.
NUM_SLOTS = 4


class Loads(enum.IntEnum):
    """Whether a KV connector fills blocks: not at all; where it says so (`fill`); or
    anywhere in what a request is said to have found."""

    NONE = 0
    TOLD = 1
    UNTOLD = 2


class Batch(NamedTuple):
    """One step's rows, from vLLM's own tensors.

    tokens: [>= num_tokens] int32. positions: the same, int64. query_start_loc:
    [>= num_reqs + 1] int32. slot_mappings, block_tables: by KV-cache group id, int64
    [>= num_tokens] and int32 [>= num_reqs, width]; real slots, no shadow blocks.
    row_seats: [num_reqs] int32 or int64, where the runner has a number below num_seats
    for each request of a row, which it keeps until it is finished or resumed; None: the
    audit has its own.
    """

    num_reqs: int
    num_tokens: int
    tokens: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]
    row_seats: torch.Tensor | None = None


class Text(NamedTuple):
    """What is known of a request that comes into the batch.

    tokens: [num_computed] int32: what is in the cache already. seed: stands for
    what else its keys and values depend on (its LoRA). is_opaque: they depend on more
    than token ids (embeddings, images): its identity is not looked at. seat: where the
    batch has row_seats, this row's.
    """

    tokens: torch.Tensor
    seed: int
    is_opaque: bool
    seat: int | None = None


@dataclass(frozen=True)
class Part:
    """Layers of a group that one launch covers. first_column: of their checksums."""

    copies: CopyTable
    names: tuple[str, ...]
    first_column: int


@dataclass
class _Request:
    """A request that the runner knows.

    num_found: tokens that were computed when it came. seat: None until it is in a
    batch, and while another has it. was_seated: its text is chained on the device.
    """

    generation: int
    num_found: int
    seat: int | None = None
    was_seated: bool = False


@dataclass
class _Counts:
    """Running totals of a group's header, as last read."""

    num_findings: int = 0
    num_unverified: int = 0


@dataclass
class _Found:
    """What came to the host and was not taken yet."""

    findings: list[Finding] = field(default_factory=list)
    num_lost: int = 0
    num_unverified: int = 0


@dataclass(frozen=True)
class GroupShape:
    """What a group is like.

    block_size: tokens a block, as the scheduler counts; entry_tokens: those that an
    entry of the worker's block table stands for. window: positions behind a request's
    end that are still its own; 0 for all. max_blocks: of a request.
    """

    group_id: int
    block_size: int
    entry_tokens: int
    num_blocks: int
    max_blocks: int
    window: int = 0


def _shapes(
    shape: GroupShape, num_layers: int, num_seats: int, max_tokens: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of a group's tables, by their names in AuditedGroup."""
    num_slots = shape.num_blocks * shape.block_size
    return {
        "records": ((num_slots, RECORD_COLUMNS), torch.int64),
        "seats": ((num_seats, SEAT_COLUMNS), torch.int64),
        "expected": ((num_seats, shape.max_blocks), torch.int64),
        "owners": ((shape.num_blocks,), torch.int32),
        "plan": ((max_tokens, PLAN_COLUMNS), torch.int64),
        "findings": ((1 + MAX_KEPT, len(COLUMNS)), torch.int64),
        "contents": ((num_slots, num_layers), torch.int32),
    }


def num_bytes(
    shape: GroupShape,
    num_layers: int,
    num_seats: int,
    max_tokens: int,
    compares_bytes: bool,
) -> int:
    """Memory that is enough for an AuditedGroup, and the seats of a batch's rows."""
    of_layers = num_layers if compares_bytes else 0
    tensors = _shapes(shape, of_layers, num_seats, max_tokens).values()
    tables = num_layers * len(TABLE_COLUMNS) * torch.int64.itemsize
    sizes = [math.prod(sizes) * dtype.itemsize for sizes, dtype in tensors]
    # A table of layers for each packing at most, and what alignment takes.
    room = (len(sizes) + num_layers + 1) * ALIGNMENT
    return sum(sizes) + tables + num_seats * torch.int32.itemsize + room


class AuditedGroup:
    """One KV-cache group's tables. Memory: 32 bytes a slot, and 4 a slot and layer."""

    records: torch.Tensor
    seats: torch.Tensor
    expected: torch.Tensor
    owners: torch.Tensor
    plan: torch.Tensor
    findings: torch.Tensor
    contents: torch.Tensor

    def __init__(
        self,
        shape: GroupShape,
        layers: Sequence[LayerCache],
        num_seats: int,
        max_tokens: int,
        compares_bytes: bool,
        memory: DeviceMemory,
    ) -> None:
        self.shape = shape
        self.layers = tuple(layers)
        self.parts = _parts(layers, memory) if compares_bytes else ()
        num_columns = sum(len(part.names) for part in self.parts)
        for name, (sizes, dtype) in _shapes(
            shape, num_columns, num_seats, max_tokens
        ).items():
            setattr(self, name, memory.take(sizes, dtype).zero_())
        self.state = (
            self.records,
            self.seats,
            self.expected,
            self.owners,
            self.plan,
            self.findings,
            shape.block_size,
        )
        self.block_bytes = shape.block_size * sum(
            layer.layout.slot_bytes for layer in layers
        )
        self.counts = _Counts()

    @property
    def num_bytes(self) -> int:
        tensors = (*self.state[:-1], self.contents)
        return sum(t.numel() * t.element_size() for t in tensors)

    def copy_block(self, source: int, to: int) -> None:
        """vLLM copies a block, so its slots hold what the other's did."""
        size = self.shape.block_size
        for table in (self.records, self.contents):
            rows = table[source * size : (source + 1) * size]
            table[to * size : (to + 1) * size] = rows

    def bytes_of(self, index: int) -> tuple[Any, ...]:
        """A part as the ops take it."""
        part = self.parts[index]
        return (
            part.copies.table,
            part.copies.runs,
            self.contents,
            part.first_column,
            index,
        )


def _parts(layers: Sequence[LayerCache], memory: DeviceMemory) -> tuple[Part, ...]:
    """The layers by their packing, so that each has a table of its own."""
    kinds: list[list[LayerCache]] = []
    for layer in layers:
        for kind in kinds:
            ours, theirs = layer.layout.runs, kind[0].layout.runs
            if (ours is None) == (theirs is None) and (
                ours is None or theirs is None or torch.equal(ours, theirs)
            ):
                kind.append(layer)
                break
        else:
            kinds.append([layer])
    parts = []
    column = 0
    for kind in kinds:
        (copies,) = copy_tables(kind, memory)
        parts.append(Part(copies, tuple(layer.name for layer in kind), column))
        column += len(kind)
    return tuple(parts)


@dataclass
class _Step:
    """What resolve needs of a plan. fresh: (row, length, tokens) of the requests that
    came into the batch."""

    batch: Batch
    fresh: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)


class Audit:
    """All audited groups of a runner.

    step: of this runner, from 1.
    """

    def __init__(
        self,
        groups: Sequence[AuditedGroup],
        budget_bytes: int,
        num_seats: int,
        block_sizes: Sequence[int],
        memory: DeviceMemory,
        loads: Loads = Loads.NONE,
        is_async: bool = False,
    ) -> None:
        """budget_bytes: of the caches, compared in a step; 0 compares none.
        block_sizes: tokens a block of each KV-cache group, audited or not. is_async:
        the host does not know a running request's text."""
        self.groups = tuple(groups)
        self.loads = loads
        self.device = memory.device
        self._is_async = is_async
        self._block_sizes = tuple(block_sizes)
        self.step = 0
        self._scanned = self._blocks_of(budget_bytes)
        self._generations = itertools.count(1)
        self._names: dict[int, str] = {}
        self._requests: dict[str, _Request] = {}
        self._free_seats = list(range(num_seats))
        self._row_ids: list[str] = []
        self._row_seats = memory.take((num_seats,), torch.int32).zero_()
        self._is_changed = True
        self._open: _Step | None = None
        self._news: Callable[[], None] | None = None
        is_cuda = self.device.type == "cuda"
        shape = (len(groups), 1 + MAX_KEPT, len(COLUMNS))
        self._slots = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(NUM_SLOTS)
        ]
        self._arrivals = [torch.cuda.Event() for _ in self._slots] if is_cuda else []
        self._next_slot = 0
        self._on_their_way: deque[int] = deque()
        self._found = _Found()
        # An asynchronous output is read by a thread of its own.
        self._lock = threading.Lock()
        self._has_drafts = self._had_drafts = False
        self.snapshot()

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    def steps_of_a_pass(self, num_blocks: int) -> int:
        """Steps until `num_blocks` blocks were compared once."""
        return -(-num_blocks // max(self._scanned[0], 1))

    def _blocks_of(self, budget_bytes: int) -> list[int]:
        """Blocks that are compared in a step: each group has its share."""
        total = sum(group.block_bytes for group in self.groups) or 1
        blocks = max(budget_bytes // total, 1) if budget_bytes else 0
        return [blocks for _ in self.groups]

    def restart(self, budget_bytes: int) -> None:
        """Begins anew, after steps that it did not see. No request may be running.
        budget_bytes: from here on; 0 only if it was so from the start."""
        for name in list(self._requests):
            self._forget(name)
        self.forget_cache()
        self._scanned = self._blocks_of(budget_bytes)

    # -- requests ------------------------------------------------------------------

    def begin_step(
        self,
        finished: Sequence[str],
        new: Sequence[tuple[str, int, Sequence[Sequence[int]]]],
        grown: Sequence[tuple[str, Sequence[Sequence[int]]]],
        copied: Sequence[tuple[int, int]] = (),
        zeroed: Sequence[int] = (),
        has_drafts: bool = False,
    ) -> None:
        """What the scheduler says of requests and blocks, before the step's rows.

        new: (request, tokens computed, its blocks by group), also for one that is
            resumed. grown: (request, new blocks by group). copied: (block, to block).
            zeroed: blocks that vLLM fills with zeros. has_drafts: whether a request
            has draft tokens in this step.

        It is taken in by `plan`: until then a connector may read blocks for the
        requests that had them.
        """
        self._take_in()
        self.step += 1
        self._open = None
        self._news = partial(self._apply, finished, new, grown, copied, zeroed)
        self._has_drafts = has_drafts

    def _take_in(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news()

    def _apply(
        self,
        finished: Collection[str],
        new: Sequence[tuple[str, int, Sequence[Sequence[int]]]],
        grown: Sequence[tuple[str, Sequence[Sequence[int]]]],
        copied: Sequence[tuple[int, int]],
        zeroed: Sequence[int],
    ) -> None:
        for name in finished:
            self._forget(name)
        for group in self.groups:
            self._hand_out(group, dict.fromkeys(zeroed, NOBODY))
        for source, to in copied:
            for group in self.groups:
                group.copy_block(source, to)
        owners: list[dict[int, int]] = [{} for _ in self.groups]
        for name, num_computed, blocks in new:
            self._forget(name)
            generation = next(self._generations)
            self._requests[name] = _Request(generation, num_computed)
            self._names[generation] = name
            self._names.pop(generation - MAX_NAMES, None)
            self._is_changed = True
            self._give(owners, generation, blocks, num_computed)
        for name, blocks in grown:
            self._give(owners, self._requests[name].generation, blocks, 0)
        for group, of_group in zip(self.groups, owners, strict=True):
            self._hand_out(group, of_group)

    def num_found(self, name: str) -> int:
        """Tokens of a request that were computed when it came."""
        return self._requests[name].num_found

    def _forget(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            self._stand_up(request)

    def _stand_up(self, request: _Request) -> None:
        self._is_changed = True
        if request.seat is not None:
            self._free_seats.append(request.seat)
            request.seat = None

    def _give(
        self,
        owners: Sequence[dict[int, int]],
        generation: int,
        blocks: Sequence[Sequence[int]],
        num_computed: int,
    ) -> None:
        """Blocks become a request's own, except those of what it found. A block that
        goes to one group holds nothing of another group any more. owners: of blocks, by
        audited group; mutated."""
        for group_id, ids in enumerate(blocks):
            first = num_computed // self._block_sizes[group_id]
            own = [block for block in ids[first:] if block]
            for group, of_group in zip(self.groups, owners, strict=True):
                is_its = group_id == group.shape.group_id
                of_group.update(dict.fromkeys(own, generation if is_its else NOBODY))

    def _hand_out(self, group: AuditedGroup, owners: Mapping[int, int]) -> None:
        if owners:
            audit_op("hand_out")(
                group.records,
                group.owners,
                torch.tensor(list(owners), dtype=torch.int32),
                torch.tensor(list(owners.values()), dtype=torch.int32),
                group.shape.block_size,
            )

    def snapshot(self) -> None:
        """Takes the checksums of all slots that no step has written, so that a first
        write that does not happen, or a first draft that is not undone, is noticed,
        too. Reads the whole cache."""
        for group in self.groups:
            for index in range(len(group.parts)):
                audit_op("snapshot")(*group.state, *group.bytes_of(index))

    def forget_cache(self) -> None:
        """The cache's content is gone, as after a wake-up: what its slots hold now is
        not known, and may even be what they held."""
        for group in self.groups:
            group.records.zero_()
            group.owners.zero_()
            group.expected.zero_()

    # -- a step --------------------------------------------------------------------

    def plan(
        self, batch: Batch, row_ids: Sequence[str], text_of: Callable[[int], Text]
    ) -> None:
        """Call when block tables and slots are final and name real blocks.

        row_ids: the request of each row of the batch. text_of: asked for rows whose
            request was not in the last batch.
        """
        self._take_in()
        if self._has_drafts and not self._had_drafts:
            # Target and drafter ran by now. A layer may fill its cache when it first
            # runs (TRITON_ATTN, scales per token and head).
            self._had_drafts = True
            self.snapshot()
        step = _Step(batch)
        if batch.row_seats is not None:
            # Requests change their rows, and keep the runner's numbers.
            if self._is_changed:
                self._seat_new(step, row_ids, text_of)
        elif self._is_changed or self._row_ids != row_ids:
            self._seat_rows(step, row_ids, text_of)
        for group in self.groups:
            audit_op("plan")(
                *group.state,
                *self._rows(group, batch),
                batch.tokens,
                batch.positions,
                batch.slot_mappings[group.shape.group_id],
                batch.num_tokens,
                self.step,
            )
        self._open = step

    def _rows(self, group: AuditedGroup, batch: Batch) -> tuple[Any, ...]:
        return (
            self._row_seats if batch.row_seats is None else batch.row_seats,
            batch.query_start_loc,
            batch.block_tables[group.shape.group_id],
            batch.num_reqs,
            group.shape.entry_tokens,
        )

    def _seat_rows(
        self, step: _Step, row_ids: Sequence[str], text_of: Callable[[int], Text]
    ) -> None:
        self._row_ids = list(row_ids)
        seats = []
        for row, name in enumerate(row_ids):
            request = self._requests[name]
            if request.seat is None:
                if not self._free_seats:
                    self._free_seat(set(row_ids))
                request.seat = self._free_seats.pop()
                self._sit_down(step, row, request, text_of(row), request.seat)
            seats.append(request.seat)
        on_host = torch.tensor(seats, dtype=torch.int32)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()
        self._row_seats[: len(seats)].copy_(on_host, non_blocking=True)
        self._is_changed = False

    def _free_seat(self, present: set[str]) -> None:
        """Of a request that is not in the batch, preempted perhaps."""
        for name, request in self._requests.items():
            if name not in present and request.seat is not None:
                self._stand_up(request)
                return

    def _seat_new(
        self, step: _Step, row_ids: Sequence[str], text_of: Callable[[int], Text]
    ) -> None:
        """The same where the runner has the seats."""
        for row, name in enumerate(row_ids):
            request = self._requests[name]
            if not request.was_seated:
                text = text_of(row)
                assert text.seat is not None
                self._sit_down(step, row, request, text, text.seat)
        self._is_changed = any(
            not request.was_seated for request in self._requests.values()
        )

    def _sit_down(
        self, step: _Step, row: int, request: _Request, text: Text, seat: int
    ) -> None:
        tokens = text.tokens
        length = len(tokens)
        if tokens.device.type != self.device.type:
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        # Of a running request only the device has the text.
        is_opaque = text.is_opaque or (request.was_seated and self._is_async)
        request.was_seated = True
        for group in self.groups:
            audit_op("seat")(
                *group.state,
                tokens,
                length,
                seat,
                request.generation,
                text.seed,
                is_opaque,
                self.loads,
                length,
            )
        if length:
            step.fresh.append((row, length, tokens))

    @property
    def is_open(self) -> bool:
        """Whether a plan waits for its resolve."""
        return self._open is not None

    def resolve(
        self,
        cu_num_logits: torch.Tensor | None,
        sampled_token_ids: torch.Tensor | None,
        vocab_size: int,
        num_rejected: torch.Tensor | None,
        is_undone: bool,
    ) -> None:
        """Call after sampling and commit, before anything else writes to the caches.

        cu_num_logits: [num_reqs] int32, as in VerificationWindows; None without drafts.
        sampled_token_ids, vocab_size, num_rejected: as ops.restore_rejected_drafts.
        is_undone: whether rejected slots hold what they held before the step.
        """
        step, self._open = self._open, None
        assert step is not None
        for group, num_blocks in zip(self.groups, self._scanned, strict=True):
            rows = self._rows(group, step.batch)
            window = group.shape.window
            audit_op("resolve")(
                *group.state,
                *rows,
                cu_num_logits,
                sampled_token_ids,
                vocab_size,
                num_rejected,
                window,
                self.step,
                is_undone,
            )
            for row, length, tokens in step.fresh:
                audit_op("adopt")(
                    *group.state, *rows, tokens, length, row, window, self.step
                )
            last = len(group.parts) - 1
            for index in range(len(group.parts)):
                part = group.bytes_of(index)
                audit_op("record")(
                    *group.state,
                    *part,
                    step.batch.num_tokens,
                    self.step,
                    is_undone,
                    index == last,
                )
            scans = [(row, HIT_BUDGETS * num_blocks) for row, _, _ in step.fresh]
            for row, count in [*scans, (-1, num_blocks)]:
                for index in range(len(group.parts)):
                    audit_op("scan")(
                        *group.state,
                        *rows,
                        *group.bytes_of(index),
                        row,
                        count,
                        window,
                        self.step,
                        index == last,
                    )

    def hand_on(self, blocks: Sequence[Sequence[int]], fills: bool = False) -> None:
        """A KV connector is about to read these blocks, by KV-cache group: handed_on.
        fills: or to fill them; what they held is kept, to see that it changes."""
        for group in self.groups:
            ids = torch.tensor(blocks[group.shape.group_id], dtype=torch.int32)
            audit_op("hand_on")(*group.state, ids, self.step, fills)

    # -- findings ------------------------------------------------------------------

    def publish(self) -> None:
        """Sends what was found to the host. Call at the end of a step."""
        with self._lock:
            if len(self._on_their_way) == len(self._slots):
                self._arrive(waits=True)
            slot = self._next_slot
            self._next_slot = (slot + 1) % len(self._slots)
            for group, to in zip(self.groups, self._slots[slot], strict=True):
                audit_op("publish")(group.findings, to)
            if self._arrivals:
                self._arrivals[slot].record()
            self._on_their_way.append(slot)

    def _arrive(self, waits: bool) -> bool:
        """Reads the oldest slot that is on its way; whether it could."""
        slot = self._on_their_way[0]
        if self._arrivals and not self._arrivals[slot].query():
            if not waits:
                return False
            self._arrivals[slot].synchronize()
        self._on_their_way.popleft()
        for group, table in zip(self.groups, self._slots[slot], strict=True):
            self._read(group, table)
        return True

    def _read(self, group: AuditedGroup, table: torch.Tensor) -> None:
        """table: [1 + MAX_KEPT, columns of a finding] int64, cpu."""
        total, unverified = table[0, :2].tolist()
        count = total - group.counts.num_findings
        self._found.num_unverified += unverified - group.counts.num_unverified
        self._found.num_lost += max(count - MAX_KEPT, 0)
        group.counts = _Counts(total, unverified)
        if not count:
            return
        names = [part.names for part in group.parts]
        rows = table[1 : 1 + min(count, MAX_KEPT)].tolist()
        for row in sorted(rows, key=_order):
            self._found.findings.append(
                decode(
                    row,
                    group.shape.group_id,
                    names,
                    group.shape.block_size,
                    self._names.get,
                )
            )

    def take_findings(self, waits: bool = False) -> tuple[list[Finding], int, int]:
        """What has come to the host since the last call, how many findings were lost
        because there were too many, and how many more slots could not be verified.
        waits: for what was published last, too."""
        with self._lock:
            while self._on_their_way and self._arrive(waits):
                pass
            found, self._found = self._found, _Found()
        return found.findings, found.num_lost, found.num_unverified

    def totals(self) -> Mapping[str, int]:
        """How much was compared so far: identities, and slots' bytes."""
        names = ("findings", "unverified", "identities", "contents")
        sums = [0] * len(names)
        for group in self.groups:
            for index, value in enumerate(group.findings[0, : len(names)].tolist()):
                sums[index] += value
        return dict(zip(names, sums, strict=True))


def _order(row: Sequence[int]) -> tuple[int, ...]:
    """Of the findings of a step: threads of a GPU come in any order."""
    value = dict(zip(COLUMNS, row, strict=True))
    keys = ("step", "kind", "table", "owner", "position")
    return tuple(value[key] for key in keys)
