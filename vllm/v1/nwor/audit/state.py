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

Identities are recorded for all rows before anything is compared: a request may find in
the prefix cache what another one writes in this very step.

A request in the batch has a *seat*, where its text's identity is kept; a row of the
batch names its seat. A seat is given when a request comes into the batch, and its
text is then read from the host; from there on it is chained on the device.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..device_memory import DeviceMemory
from ..launches import CopyTable, LayerCache, copy_tables
from ..ops import audit_op
from .findings import COLUMNS, MAX_KEPT, Finding, decode

# Columns of int64 tables; csrc/nwor/audit.h has the structs.
RECORD_COLUMNS = 4
SEAT_COLUMNS = 8
PLAN_COLUMNS = 10
# SlotState of handed out blocks.
NEVER, AS_IT_IS = 0, -1
# Bytes of a hit that are compared when it is taken over, in budgets of a step.
HIT_BUDGETS = 4
# Names of requests that findings may still ask for.
MAX_NAMES = 1 << 16


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
    """

    num_reqs: int
    num_tokens: int
    tokens: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]


class Text(NamedTuple):
    """What is known of a request that comes into the batch.

    tokens: [num_computed] int32, cpu: what is in the cache already. seed: stands for
    what else its keys and values depend on (its LoRA). is_opaque: they depend on more
    than token ids (embeddings, images): its identity is not looked at.
    """

    tokens: torch.Tensor
    seed: int
    is_opaque: bool


@dataclass(frozen=True)
class Part:
    """Layers of a group that one launch covers. first_column: of their checksums."""

    copies: CopyTable
    names: tuple[str, ...]
    first_column: int


@dataclass
class _Request:
    """A request that the runner knows. seat: None while it is not in the batch."""

    generation: int
    seat: int | None = None


@dataclass
class _Counts:
    """Running totals of a group's header, as last read."""

    num_findings: int = 0
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


class AuditedGroup:
    """One KV-cache group's tables. Memory: 32 bytes a slot, and 4 a slot and layer."""

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
        num_slots = shape.num_blocks * shape.block_size
        self.records = memory.take((num_slots, RECORD_COLUMNS), torch.int64).zero_()
        self.seats = memory.take((num_seats, SEAT_COLUMNS), torch.int64).zero_()
        self.expected = memory.take((num_seats, shape.max_blocks), torch.int64).zero_()
        self.owners = memory.take((shape.num_blocks,), torch.int32).zero_()
        self.plan = memory.take((max_tokens, PLAN_COLUMNS), torch.int64).zero_()
        self.findings = memory.take((1 + MAX_KEPT, len(COLUMNS)), torch.int64).zero_()
        self.state = (
            self.records,
            self.seats,
            self.expected,
            self.owners,
            self.plan,
            self.findings,
            shape.block_size,
        )
        self.parts = _parts(layers, memory) if compares_bytes else ()
        self.contents = memory.take(
            (num_slots, sum(len(part.names) for part in self.parts)), torch.int32
        ).zero_()
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
        loads: Loads = Loads.NONE,
    ) -> None:
        """budget_bytes: of the caches, compared in a step; 0 compares none.
        block_sizes: tokens a block of each KV-cache group, audited or not."""
        self.groups = tuple(groups)
        self.loads = loads
        self._block_sizes = tuple(block_sizes)
        self.step = 0
        total = sum(group.block_bytes for group in groups) or 1
        # Each group has its share of the budget.
        self._scanned = [
            max(budget_bytes // total, 1) if budget_bytes else 0 for group in groups
        ]
        self._generations = itertools.count(1)
        self._names: dict[int, str] = {}
        self._requests: dict[str, _Request] = {}
        self._free_seats = list(range(num_seats))
        self._row_ids: list[str] = []
        self._row_seats = torch.zeros(num_seats, dtype=torch.int32)
        self._is_changed = True
        self._open: _Step | None = None
        self._news: Callable[[], None] | None = None
        self.snapshot()

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    def steps_of_a_pass(self, num_blocks: int) -> int:
        """Steps until `num_blocks` blocks were compared once."""
        return -(-num_blocks // max(self._scanned[0], 1))

    # -- requests ------------------------------------------------------------------

    def begin_step(
        self,
        finished: Sequence[str],
        new: Sequence[tuple[str, int, Sequence[Sequence[int]]]],
        grown: Sequence[tuple[str, Sequence[Sequence[int]]]],
        copied: Sequence[tuple[int, int]] = (),
    ) -> None:
        """What the scheduler says of requests and blocks, before the step's rows.

        new: (request, tokens computed, its blocks by group), also for one that is
            resumed. grown: (request, new blocks by group). copied: (block, to block).

        It is taken in by `plan`: until then a connector may read blocks for the
        requests that had them.
        """
        self._take_in()
        self.step += 1
        self._open = None
        self._news = partial(self._apply, finished, new, grown, copied)

    def _take_in(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news()

    def _apply(
        self,
        finished: Sequence[str],
        new: Sequence[tuple[str, int, Sequence[Sequence[int]]]],
        grown: Sequence[tuple[str, Sequence[Sequence[int]]]],
        copied: Sequence[tuple[int, int]],
    ) -> None:
        for name in finished:
            self._forget(name)
        for source, to in copied:
            for group in self.groups:
                group.copy_block(source, to)
        for name, num_computed, blocks in new:
            self._forget(name)
            generation = next(self._generations)
            self._requests[name] = _Request(generation)
            self._names[generation] = name
            self._names.pop(generation - MAX_NAMES, None)
            self._give(generation, blocks, num_computed)
        for name, blocks in grown:
            self._give(self._requests[name].generation, blocks, 0)

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
        self, generation: int, blocks: Sequence[Sequence[int]], num_computed: int
    ) -> None:
        """Blocks become a request's own, except those of what it found. A block that
        goes to one group holds nothing of another group any more."""
        for group_id, ids in enumerate(blocks):
            first = num_computed // self._block_sizes[group_id]
            own = [block for block in ids[first:] if block]
            for group in self.groups:
                if group_id == group.shape.group_id:
                    self._hand_out(group, own, generation, AS_IT_IS)
                else:
                    self._hand_out(group, own, 0, NEVER)

    def _hand_out(
        self, group: AuditedGroup, blocks: Sequence[int], generation: int, state: int
    ) -> None:
        if blocks:
            ids = torch.tensor(blocks, dtype=torch.int32)
            audit_op("hand_out")(
                group.records,
                group.owners,
                ids,
                group.shape.block_size,
                generation,
                state,
            )

    def snapshot(self) -> None:
        """Takes the checksums of all slots as they are, so that a first write that
        does not happen is noticed, too. Reads the whole cache."""
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
        step = _Step(batch)
        if self._is_changed or self._row_ids != row_ids:
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
            self._row_seats,
            batch.query_start_loc,
            batch.block_tables[group.shape.group_id],
            batch.num_reqs,
            group.shape.entry_tokens,
        )

    def _seat_rows(
        self, step: _Step, row_ids: Sequence[str], text_of: Callable[[int], Text]
    ) -> None:
        self._row_ids = list(row_ids)
        present = set(row_ids)
        for name, request in self._requests.items():
            if name not in present and request.seat is not None:
                self._stand_up(request)
        for row, name in enumerate(row_ids):
            request = self._requests[name]
            if request.seat is None:
                request.seat = self._free_seats.pop()
                self._sit_down(step, row, request, text_of(row))
            self._row_seats[row] = request.seat
        self._is_changed = False

    def _sit_down(self, step: _Step, row: int, request: _Request, text: Text) -> None:
        length = len(text.tokens)
        for group in self.groups:
            audit_op("seat")(
                *group.state,
                text.tokens,
                length,
                request.seat,
                request.generation,
                text.seed,
                text.is_opaque,
                self.loads,
                length,
            )
        if length:
            step.fresh.append((row, length, text.tokens))

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

    def take_findings(self) -> tuple[list[Finding], int, int]:
        """What was found since the last call, how many findings were lost because
        there were too many, and how many more slots could not be verified."""
        found: list[Finding] = []
        num_lost = num_unverified = 0
        for group in self.groups:
            total, unverified = group.findings[0, :2].tolist()
            first = max(group.counts.num_findings, total - MAX_KEPT)
            num_lost += first - group.counts.num_findings
            num_unverified += unverified - group.counts.num_unverified
            group.counts = _Counts(total, unverified)
            if first < total:
                names = [part.names for part in group.parts]
                for n in range(first, total):
                    row = group.findings[1 + n % MAX_KEPT].tolist()
                    found.append(
                        decode(
                            row,
                            group.shape.group_id,
                            names,
                            group.shape.block_size,
                            self._names.get,
                        )
                    )
        return found, num_lost, num_unverified

    def totals(self) -> Mapping[str, int]:
        """How much was compared so far: identities, and slots' bytes."""
        names = ("findings", "unverified", "identities", "contents")
        sums = [0] * len(names)
        for group in self.groups:
            for index, value in enumerate(group.findings[0, : len(names)].tolist()):
                sums[index] += value
        return dict(zip(names, sums, strict=True))
