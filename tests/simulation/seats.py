# SPDX-License-Identifier: Apache-2.0
"""The rule for reusing a seat's shadow rows without copying them, and a model of it.

A seat keeps its shadow blocks from step to step. The next request in that seat may have
other rows in the real block, or other rows in a block with the same id. `Rule` decides
whether the shadow's rows are valid. `SeatEngine` replaces the engine and its manager,
without tensors and much faster. Every write is a new number, so that a reused row that
differs from the real one is noticed at once.

`test_simulation` shows that each part of the rule is needed, by leaving it out. Two
parts are redundant: `valid` equal to the first position, and `entry` 0 after a row that
was not staged. A partly filled entry has one owner: a later owner gets it by a step
without drafts, or by a copy and has drafts in its first step, and both separate the
seat's steps. And an entry whose last row was not written to the shadow is full, and not
staged again.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tests.simulation.cache import MAX_DRAFTS, MAX_REQUESTS, Violation
from tests.simulation.step import EMPTY, MAX_TOKENS, PADDED, Rows


class Rule:
    """The rule; tests override its methods.

    step: the runner's. saved: for each seat the step in which it was staged last; the
    end of the rows kept then, -1 before commit; the real entry of the last one, 0 if it
    was not staged.
    """

    def __init__(self) -> None:
        self.step = 0
        self.saved: Any = defaultdict(lambda: (0, -1, 0))

    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        """Begins a step of the runner."""
        self.step += self.rise(has_drafts, is_staged, begins)

    def rise(self, has_drafts: bool, is_staged: bool, begins: bool) -> int:
        """begins: a new or resumed request has drafts in this step, which counts twice,
        since its earlier rows had no step of their own."""
        return 1 + begins

    def counts(self, seat: Any, first_position: int, entry: int) -> bool:
        """Whether the shadow of `entry` has the rows before `first_position`."""
        return self.saved[seat] == (self.step - 1, first_position, entry)

    def stage(self, seat: Any) -> None:
        self.saved[seat] = self.step, -1, 0

    def commit(self, seat: Any, valid: int, entry: int) -> None:
        self.saved[seat] = self.step, valid, entry


class SeatCache:
    """The blocks of one group. real: the last write to each row."""

    def __init__(self, draw: random.Random) -> None:
        self.tokens = draw.choice((1, 2, 2, 3, 4))  # per entry
        self.block_size = self.tokens * draw.choice((1, 1, 2))
        self.num_blocks = 2 + draw.choice((1, 2, 3)) * MAX_TOKENS // self.block_size
        self.num_seats = draw.choice((2, MAX_REQUESTS, MAX_REQUESTS))
        self.real = [0] * (self.num_blocks * self.block_size)
        self.groups = [self]

    def blocks_index(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def copy(self, source: slice, to: slice) -> None:
        self.real[to] = self.real[source]


class SeatEngine:
    """The simulator's engine. shadows: the last write to each row of each seat."""

    is_dead = False

    def __init__(
        self,
        cache: SeatCache,
        totals: Counter[str],
        rule: type[Rule],
        has_indices: bool,
        **drawn: Any,
    ) -> None:
        self.cache, self.totals, self.has_indices = cache, totals, has_indices
        self.rule = rule()
        self.span = (1 - -(MAX_DRAFTS - 1) // cache.tokens) * cache.tokens
        self.num_seats = cache.num_seats
        self.seat_of: dict[int, int] = {}
        self.shadows = [[0] * self.span for _ in range(MAX_REQUESTS)]
        self.num_writes = 0

    def run(self, batch: list[Rows], begins: bool, fault: Any, **drawn: Any) -> bool:
        """A step of the runner; whether its output reaches the scheduler. Some faults
        happen after stage; with others the step logs, or stages nothing."""
        has_drafts = any(rows.num_drafts for rows in batch)
        is_staged = has_drafts and fault.name not in ("stage", "missed", "all logged")
        self.rule.start(has_drafts, is_staged, begins)
        found = dict(zip(batch, self._seats(batch, drawn["live"]), strict=True))
        # Other windows are logged, which this model leaves out.
        seats = {
            rows: seat
            for rows, seat in found.items()
            if is_staged and rows.is_window and 0 <= seat < self.num_seats
        }
        for rows, seat in seats.items():
            self._stage(rows, seat)
        for rows in batch:
            self._forward(rows, seats.get(rows))
        if fault.name in ("forward", "sampler", "commit", "log"):
            return False
        for rows, seat in seats.items():
            self._commit(rows, seat)
        if fault.name == "restore":  # the scheduler sees a part of the output
            for rows in batch:
                rows.num_accepted = min(rows.num_accepted, fault.call)
                rows.special = EMPTY if fault.moment == 0 else rows.special
        return True

    def _seats(self, batch: list[Rows], live: Mapping[str, int]) -> list[int]:
        """On V2 seats of unused state indices are assigned again."""
        if not self.has_indices:
            return [*range(len(batch))]
        indices = [rows.request.index for rows in batch]
        held = {i: seat for i, seat in self.seat_of.items() if i in live.values()}
        free = sorted({*range(self.num_seats)} - {*held.values()}, reverse=True)
        for index in indices:
            if index not in held and free:
                held[index] = free.pop()
        self.seat_of = held
        return [held.get(index, -1) for index in indices]

    def check_bytes(self, moment: str) -> None:
        """Rows are compared when they are reused."""

    def _slot(self, rows: Rows, position: int) -> int:
        block, offset = divmod(position, self.cache.block_size)
        return rows.request.blocks[0][block] * self.cache.block_size + offset

    def _entry(self, rows: Rows, position: int) -> int:
        return self._slot(rows, position) // self.cache.tokens

    def _start(self, rows: Rows) -> int:
        """The position at which the first staged entry begins."""
        return (rows.end - rows.num_drafts) // self.cache.tokens * self.cache.tokens

    def _stage(self, rows: Rows, seat: int) -> None:
        first, shadow = rows.request.num_computed, self.shadows[seat]
        prefix = range(self._start(rows), first)
        if prefix:
            counts = self.rule.counts(seat, first, self._entry(rows, first - 1))
            self.totals["prefixes/kept" if counts else "prefixes/copied"] += 1
            for position in prefix:
                real = self.cache.real[self._slot(rows, position)]
                if counts and shadow[position % self.span] != real:
                    raise Violation("stale shadow row", f"{rows}, row {position}")
                shadow[position % self.span] = real
        self.rule.stage(seat)

    def _forward(self, rows: Rows, seat: int | None) -> None:
        """Writes each row to the entry in the block table."""
        start, end = self._start(rows), rows.end - (rows.special == PADDED)
        for position in range(rows.request.num_computed, end):
            self.num_writes += 1
            if seat is not None and position >= start:
                self.shadows[seat][position % self.span] = self.num_writes
            else:
                self.cache.real[self._slot(rows, position)] = self.num_writes

    def _commit(self, rows: Rows, seat: int) -> None:
        start, valid = self._start(rows), rows.end - rows.num_rejected
        for position in range(max(start, rows.request.num_computed), valid):
            row = self.shadows[seat][position % self.span]
            self.cache.real[self._slot(rows, position)] = row
        entry = self._entry(rows, valid - 1)
        self.rule.commit(seat, valid, entry if valid > start else 0)
