# SPDX-License-Identifier: Apache-2.0
"""The seats' rule: when a seat's shadow rows need not be copied anew; and a model of it
alone.

A seat keeps its shadow blocks from step to step. Whoever is in it next, a request that
moved into the row or one that got the state index, may have other rows in the real
block, or a block of the same id with other rows. `Rule` says when the shadow counts.
`SeatEngine` takes the place of the engine, and of the manager in it: without tensors,
and much faster. Every write is a new number, never a function of the token, so that a
row that counts and is not the real one shows at once.

What of the rule is needed, `test_simulation` shows by leaving it out. Two parts are
redundant, no interleaving distinguishes the rule from one without them: `valid` equal
to the first position, and `entry` 0 after a row that was not staged. For an entry that
is partly filled has one owner: whoever gets it later does so by a step without drafts,
or by a copy and has drafts in its first step, and both set the seat's step apart. And
an entry whose last row was written beside the shadow is full, and not staged again.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tests.simulation.cache import MAX_DRAFTS, MAX_REQUESTS, Violation
from tests.simulation.step import EMPTY, MAX_TOKENS, PADDED, Rows


class Rule:
    """The rule, and so the places for mutations.

    step: the runner's. saved: of a seat the step in which it was staged last; behind
    the last row that was kept then, -1 before commit; the real entry of that row, 0 if
    the row was not staged.
    """

    def __init__(self) -> None:
        self.step = 0
        self.saved: Any = defaultdict(lambda: (0, -1, 0))

    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        """A step of the runner begins."""
        self.step += self.rise(has_drafts, is_staged, begins)

    def rise(self, has_drafts: bool, is_staged: bool, begins: bool) -> int:
        """begins: a request that is new or comes back has drafts in this step, so that
        its rows had no step of their own: it counts twice."""
        return 1 + begins

    def counts(self, seat: Any, first_position: int, entry: int) -> bool:
        """Whether the rows before `first_position` are in the shadow of `entry`."""
        return self.saved[seat] == (self.step - 1, first_position, entry)

    def stage(self, seat: Any) -> None:
        self.saved[seat] = self.step, -1, 0

    def commit(self, seat: Any, valid: int, entry: int) -> None:
        self.saved[seat] = self.step, valid, entry


class SeatCache:
    """The blocks of one group. real: what was last written to each row."""

    def __init__(self, draw: random.Random) -> None:
        self.tokens = draw.choice((1, 2, 2, 3, 4))  # of an entry
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
    """What the simulator has for an engine. shadows: of each seat what was written to
    each of its rows."""

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
        """A step of the runner; whether its output reaches the scheduler. Of the faults
        some fail after stage, and some are steps that log, or stage nothing."""
        has_drafts = any(rows.num_drafts for rows in batch)
        is_staged = has_drafts and fault.name not in ("stage", "missed", "all logged")
        self.rule.start(has_drafts, is_staged, begins)
        found = dict(zip(batch, self._seats(batch, drawn["live"]), strict=True))
        # Others are logged, which adds nothing here.
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
        if fault.name == "restore":  # the scheduler never sees all of the output
            for rows in batch:
                rows.num_accepted = min(rows.num_accepted, fault.call)
                rows.special = EMPTY if fault.moment == 0 else rows.special
        return True

    def _seats(self, batch: list[Rows], live: Mapping[str, int]) -> list[int]:
        """On V2 those of indices that no request has any more are given out anew."""
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
        """Each row was compared when it counted."""

    def _slot(self, rows: Rows, position: int) -> int:
        block, offset = divmod(position, self.cache.block_size)
        return rows.request.blocks[0][block] * self.cache.block_size + offset

    def _entry(self, rows: Rows, position: int) -> int:
        return self._slot(rows, position) // self.cache.tokens

    def _start(self, rows: Rows) -> int:
        """Of the first entry that is staged."""
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
        """Writes each row, to where the table says."""
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
