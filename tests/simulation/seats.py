# SPDX-License-Identifier: Apache-2.0
"""A model of the seats' rule alone: when a seat's shadow rows need not be copied anew.

A seat keeps its shadow blocks from step to step. Whoever is in it next, a request that
moved into the row or one that got the state index, may have other rows in the real
block, or a block of the same id with other rows. `Rule` says when the shadow counts.
`World` is vLLM's side in plain Python, without tensors and much faster than the
simulator: every write is a new number, never a function of the token, so that a row
that counts and is not the real one shows at once.

What the world has, and how it is meant: blocks that are reused at once (LIFO as vLLM
does with those that are not cached, or FIFO); requests of few different lengths; V1's
rows, of which the last fills a hole, or V2's indices, the one freed last given out
first; requests that are skipped, aborted, preempted and computed again; full blocks
shared by their text; a partly filled block copied for a request that finds its prompt's
tail in it (vLLM's fine-grained prefix hits), which may verify drafts in its first step;
computed tokens taken back to a block's start (an invalid load) or to any row of the
last step (its output was lost); chunks of prompts, also in front of drafts; steps
without drafts, steps that use the undo log, steps that fail after stage.

What of the rule is needed, `test_simulation` shows by leaving it out. Two parts are
belt and braces, no interleaving tells them from the rule without them: `valid` equal to
the first position, and `entry` 0 after a row that was not staged. Rows before the first
position are asked for where it lies inside the first staged entry. A commit into this
entry in the step before was its only owner's: an entry partly filled is nobody's else,
and who gets it later has rows in it after a step of its own, or by a copy and then has
drafts in its first step: both set the seat's step apart. So it was this request's,
whose rows before `valid` are in the shadow, and whose first position is not behind
`valid`. And an entry whose last row was written beside the shadow is full of known
tokens: it is not staged again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.simulation.blocks import condense
from tests.simulation.cache import Violation

STEPS_PER_SEED = 50


@dataclass
class Seat:
    """What its last commit left. step: when it was staged. valid: behind the last row
    that was kept, -1 before commit. entry: the real entry of that row, 0 if the row was
    not staged. shadow: what was written to each of its rows."""

    shadow: list[int]
    step: int = -1
    valid: int = -1
    entry: int = 0


class Rule:
    """The rule, and so the places for mutations. `Seat` has what it remembers."""

    def __init__(self) -> None:
        self.step = 0

    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        """A step of the runner begins. begins: a request that is new or comes back has
        drafts in it, so that its rows had no step of their own: it counts twice."""
        self.step += 1 + begins

    def counts(self, seat: Seat, first_position: int, entry: int) -> bool:
        """Whether the rows before `first_position` are in the shadow of `entry`."""
        found = seat.step, seat.valid, seat.entry
        return found == (self.step - 1, first_position, entry)

    def stage(self, seat: Seat) -> None:
        seat.step, seat.valid = self.step, -1

    def commit(self, seat: Seat, valid: int, entry: int) -> None:
        seat.valid, seat.entry = valid, entry


@dataclass(eq=False)
class Request:
    """length: tokens known. blocks: its block ids. index: V2's, -1 without one. is_new:
    no step yet since it got its first block. end: of its rows in this step, which begin
    at num_computed; the last num_drafts are drafts."""

    length: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    index: int = -1
    is_new: bool = True
    has_sampled: bool = False
    end: int = 0
    num_drafts: int = 0

    @property
    def first_draft(self) -> int:
        return self.end - self.num_drafts


class World:
    """Requests, blocks and seats of one KV-cache group, drawn from a seed."""

    def __init__(self, seed: int, rule: Rule) -> None:
        self.seed, self.rule = seed, rule
        draw = self.draw = random.Random(seed)
        self.tokens = draw.choice((1, 2, 2, 3, 4))  # of an entry
        self.block_size = self.tokens * draw.choice((1, 1, 2))
        self.max_drafts = draw.choice((1, 2, self.tokens, 2 * self.tokens + 1))
        self.max_length = 3 * self.block_size
        self.num_rows = draw.randint(1, 4)
        self.has_indices = draw.random() < 0.5
        self.is_lifo = draw.random() < 0.7
        self.skips = draw.choice((0.1, 0.1, 0.5))
        self.fails = draw.choice((0.05, 0.3))
        num_blocks = 1 + draw.randint(4, 10)
        self.free = deque(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.real = [0] * (num_blocks * self.block_size)
        span = (1 - -(self.max_drafts - 1) // self.tokens) * self.tokens
        self.seats = [Seat([0] * span) for _ in range(self.num_rows)]
        self.indices = list(range(self.num_rows))
        self.rows: list[Request] = []
        self.requests: list[Request] = []
        self.num_writes = 0
        self.happened: Counter[str] = Counter()

    def _slot(self, request: Request, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return request.blocks[block] * self.block_size + offset

    def _take(self) -> int:
        block = self.free.popleft()
        self.references[block] = 1
        return block

    def _release(self, request: Request) -> None:
        """Blocks and index are another's from now on."""
        # The last ones are given out first.
        for block in request.blocks if self.is_lifo else reversed(request.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                (self.free.appendleft if self.is_lifo else self.free.append)(block)
        request.blocks, request.num_computed, request.is_new = [], 0, True
        if request.index >= 0:
            self.indices.append(request.index)
            request.index = -1

    def _start(self, request: Request) -> None:
        """What a request finds of its text, in shared blocks and in a copy of one."""
        donors = [other for other in self.requests if other.num_computed > 0]
        if not donors or self.draw.random() < 0.4:
            return
        donor, size = self.draw.choice(donors), self.block_size
        most = min(donor.num_computed, request.length - 1)
        full, tail = divmod(most, size)
        for block in donor.blocks[:full]:
            self.references[block] += 1
            request.blocks.append(block)
        request.num_computed = full * size
        if tail and self.free and self.draw.random() < 0.5:
            source, to = donor.blocks[full] * size, self._take()
            self.real[to * size : (to + 1) * size] = self.real[source : source + size]
            request.blocks.append(to)
            request.num_computed += tail
            self.happened["copy"] += 1

    def step(self) -> None:
        """What the scheduler does between two steps, and one step of the runner."""
        draw = self.draw
        for request in list(self.requests):
            what = draw.random()
            if what < 0.12 or request.length >= self.max_length:
                self._release(request)
                self.requests.remove(request)
            elif what < 0.15:
                self._release(request)
                self.happened["preempted"] += 1
            elif what < 0.18 and request.num_computed:
                request.num_computed -= request.num_computed % self.block_size
                self.happened["taken back"] += 1
        while len(self.requests) < self.num_rows and draw.random() < 0.7:
            self.requests.append(Request(draw.randint(1, self.max_length - 1)))
        batch, begins = self._schedule()
        self.rows = condense(self.rows, batch)
        has_drafts = any(request.num_drafts for request in batch)
        is_staged = has_drafts and draw.random() < 0.9
        self.rule.start(has_drafts, is_staged, begins)
        seats = {
            request: self.seats[request.index if self.has_indices else row]
            for row, request in enumerate(self.rows)
            if is_staged and request.num_drafts
        }
        for request, seat in seats.items():
            self._stage(request, seat)
        for request in batch:
            self._forward(request, seats.get(request))
        if draw.random() < self.fails:
            self.happened["failed"] += 1
            return
        for request in batch:
            self._commit(request, seats.get(request))
        self.happened["staged" if seats else "not staged"] += 1

    def _schedule(self) -> tuple[list[Request], bool]:
        draw, batch, begins = self.draw, list[Request](), False
        for request in self.requests:
            if draw.random() < self.skips:
                continue
            if not request.blocks:
                self._start(request)
            remaining = request.length - request.num_computed
            num_rows = remaining
            if remaining > 1 and draw.random() < 0.3:
                num_rows = draw.randint(1, remaining - 1)
            request.num_drafts = 0
            if num_rows == remaining and (remaining == 1 or request.has_sampled):
                most = self.max_drafts
                request.num_drafts = draw.choice((0, most, most, 1))
            request.end = request.num_computed + num_rows + request.num_drafts
            missing = -(-request.end // self.block_size) - len(request.blocks)
            for victim in self.requests:
                idle = victim is not request and victim not in batch
                if missing > len(self.free) and idle and victim.blocks:
                    self._release(victim)
                    self.happened["preempted"] += 1
            if missing > len(self.free):
                continue
            request.blocks += [self._take() for _ in range(missing)]
            if self.has_indices and request.index < 0:
                request.index = self.indices.pop()
            batch.append(request)
            begins |= request.is_new and request.num_drafts > 0
            request.is_new = False
        return batch, begins

    def _start_of_shadow(self, request: Request) -> int:
        return request.first_draft // self.tokens * self.tokens

    def _stage(self, request: Request, seat: Seat) -> None:
        first, span = request.num_computed, len(seat.shadow)
        prefix = range(self._start_of_shadow(request), first)
        if prefix:
            entry = self._slot(request, first - 1) // self.tokens
            counts = self.rule.counts(seat, first, entry)
            self.happened["kept" if counts else "copied"] += 1
            for position in prefix:
                real = self.real[self._slot(request, position)]
                if counts and seat.shadow[position % span] != real:
                    raise Violation(
                        "stale shadow row",
                        f"{request}, row {position}; replay:\n  python -m "
                        f"tests.simulation --seed {self.seed} --operations 0 "
                        f"--seat-steps {STEPS_PER_SEED}",
                    )
                seat.shadow[position % span] = real
        self.rule.stage(seat)

    def _forward(self, request: Request, seat: Seat | None) -> None:
        """Writes each row, to where the table says."""
        start = self._start_of_shadow(request)
        for position in range(request.num_computed, request.end):
            self.num_writes += 1
            if seat and position >= start:
                seat.shadow[position % len(seat.shadow)] = self.num_writes
            else:
                self.real[self._slot(request, position)] = self.num_writes

    def _commit(self, request: Request, seat: Seat | None) -> None:
        first, first_draft = request.num_computed, request.first_draft
        accepted = self.draw.choice((0, request.num_drafts))
        valid = min(first_draft + accepted, self.max_length)
        if seat:
            start = self._start_of_shadow(request)
            for position in range(max(start, first), valid):
                row = seat.shadow[position % len(seat.shadow)]
                self.real[self._slot(request, position)] = row
            entry = self._slot(request, valid - 1) // self.tokens
            self.rule.commit(seat, valid, entry if valid > start else 0)
        if self.draw.random() < 0.05:  # the scheduler never saw the step's output
            request.num_computed = self.draw.randint(first, valid)
            request.length = max(request.length, request.num_computed + 1)
            return
        request.num_computed = valid
        if first_draft >= request.length:
            request.length, request.has_sampled = valid + 1, True


def run(first_seed: int, num_steps: int, rule: type[Rule] = Rule) -> Counter[str]:
    """Plays steps, STEPS_PER_SEED a seed; returns what happened. Raises Violation."""
    happened: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + -(-num_steps // STEPS_PER_SEED)):
        world = World(seed, rule())
        for _ in range(STEPS_PER_SEED):
            world.step()
        happened += world.happened
    return happened
