# SPDX-License-Identifier: Apache-2.0
"""A plain reference of the audit's ops on recurrent states: what docs/audit.md promises
("Recurrent states"), in terms of the sampled bytes themselves. It has no checksums, and
no line of the C++.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.kernels.states_batch import (
    CONV,
    NARROW,
    TEMPORAL,
    Batch,
    Request,
    Shape,
    Work,
    place,
)
from vllm_nwor import ops
from vllm_nwor.audit.findings import Finding, Writer
from vllm_nwor.audit.states import strides_of, word_offsets
from vllm_nwor.layout.states import StateCache, StateKind


class Verdict(NamedTuple):
    """About one state of one request. found: tokens in the state that is there."""

    kind: str
    writer: tuple[int, int] = (0, 0)  # generation, step
    found: int | None = None


# kUnknownToken of states.h.
UNKNOWN = -2


@dataclass
class Seat:
    """What a request has written. length: tokens in the state that it reads next.
    lengths: those in each of its last columns. contents: by state, of each column; of a
    convolution what is read from there on. wanted: of each state. buffered: the tokens
    of the convolutions' buffers, None where that is not known."""

    generation: int
    length: int
    step: int
    lengths: list[int]
    contents: dict[int, list[Any]]
    wanted: dict[int, Any]
    buffered: list[int | None]
    num_kept: int
    last_token: int


class Reference:
    """By the bytes of samples, which are tuples of their parts."""

    def __init__(
        self,
        shape: Shape,
        states: Sequence[tuple[int, StateCache]],
        name_of: Callable[[int], str | None],
    ) -> None:
        """states: with their groups. name_of: a request's, by generation."""
        self.shape, self.states, self.name_of = shape, states, name_of
        self.totals = [0, 0]
        self.seats: dict[int, Seat] = {}
        self.last_tokens: dict[tuple[int, int], int] = {}
        # By request and group: the column that its step reads.
        self.columns: dict[tuple[int, int], int] = {}
        # By request, state and column: from before the forward.
        self.before: dict[tuple[int, int, int], Any] = {}
        self.words = [word_offsets(state) for _, state in states]

    def _look(self, batch: Batch, pages: Sequence[torch.Tensor]) -> None:
        self.step, self.pages = batch.step, [page.cpu().numpy() for page in pages]

    def sample(self, number: int, block: int, column: int = 0) -> tuple[bytes, ...]:
        _, state = self.states[number]
        strides = strides_of(state.tensor)
        size, offsets = self.words[number]
        first = state.tensor.storage_offset() * state.tensor.element_size()
        first += block * strides[0]
        first += column * strides[1] if state.kind is CONV else 0
        memory = self.pages[number]
        words = [memory[first + at : first + at + size].tobytes() for at in offsets]
        num = len(words) // ops.SAMPLE_PARTS
        return tuple(b"".join(words[i : i + num]) for i in range(0, len(words), num))

    def window(self, number: int, block: int, column: int) -> list[Any]:
        _, state = self.states[number]
        columns = range(column, column + state.window)
        return [self.sample(number, block, c) for c in columns]

    def _blocks(self, batch: Batch, row: int, g: int) -> tuple[bool, int, list[int]]:
        """Whether a row is a window, its number, and its blocks by column; -1: none."""
        of = batch.metadata[g]
        is_window, index = place(of, row)
        table = of.window_blocks if is_window else of.blocks[:, None]
        named = table[index].tolist()
        end = self.shape.num_blocks
        return is_window, index, [b if 0 < b < end else -1 for b in named]

    def _rows(self, batch: Batch) -> list[tuple[int, Request, Work]]:
        both = zip(batch.requests, batch.works.values(), strict=True)
        return [(row, *pair) for row, pair in enumerate(both) if pair[1].tokens]

    def read(self, batch: Batch, pages: Sequence[torch.Tensor]) -> list[Finding]:
        """Before the forward. pages: of each state, all of the allocation."""
        self._look(batch, pages)
        found: list[Finding] = []
        for row, request, work in self._rows(batch):
            verdicts: dict[int, tuple[Verdict, int, int]] = {}
            for number, (g, state) in enumerate(self.states):
                is_window, index, blocks = self._blocks(batch, row, g)
                of = batch.metadata[g]
                column, reads = 0, True
                if is_window:
                    n = int(of.num_accepted[index])
                    reads = 1 <= n <= self.shape.max_columns
                    column = n - 1 if reads else 0
                elif of.has_state is not None and index >= of.num_decodes:
                    reads = bool(of.has_state[index])
                count = min(len(work.tokens), len(blocks))
                self._keep(row, number, state, blocks, count)
                block = blocks[column if state.kind is TEMPORAL else 0]
                verdict = self._judge(request, number, state, reads, block, column)
                if verdict is not None:
                    verdicts[number] = verdict, max(block, 0), column
                self.columns[row, g] = column
                if reads and blocks[column] > 0:  # vLLM may have copied it there
                    own = self._own(request)
                    token = own.last_token if own else UNKNOWN
                    self.last_tokens[g, blocks[column]] = token
            start = len(request.text)
            found += self._report(request, verdicts, start, start)
            if verdicts and request.seat in self.seats:
                self.seats[request.seat].buffered.clear()
        return found

    def _keep(
        self, row: int, number: int, state: StateCache, blocks: list[int], count: int
    ) -> None:
        if state.kind is TEMPORAL:
            for c, block in enumerate(blocks[:count]):
                self.before[row, number, c] = block > 0 and self.sample(number, block)
        else:
            for c in range(state.tensor.shape[1]):
                known = blocks[0] > 0 and self.sample(number, blocks[0], c)
                self.before[row, number, c] = known

    def _judge(
        self,
        request: Request,
        number: int,
        state: StateCache,
        reads: bool,
        block: int,
        column: int,
    ) -> Verdict | None:
        if not request.text:
            return Verdict("no_state_yet") if reads else None
        if not reads or block < 0:
            return Verdict("state_lost")
        own = self._own(request)
        self.totals[0 if own else 1] += 1
        if own is None:
            return None
        if state.kind is TEMPORAL:
            content: Any = self.sample(number, block)
        else:
            content = self.window(number, block, column)
        if content == own.wanted[number]:
            return None
        others = [self.seats[n] for n in sorted(self.seats) if self.seats[n] is not own]
        for seat in (own, *others):
            of_columns = seat.contents[number][: len(seat.lengths)]
            if content in of_columns:
                kind = "stale_state" if seat is own else "foreign_state"
                length = seat.lengths[of_columns.index(content)]
                return Verdict(kind, (seat.generation, seat.step), length)
        return Verdict("changed_state")

    def _own(self, request: Request) -> Seat | None:
        """What the request has written, if that is what it goes on from."""
        seat = self.seats.get(request.seat)
        if seat is None or seat.generation != request.generation:
            return None
        return seat if seat.length == len(request.text) else None

    def written(self, batch: Batch, pages: Sequence[torch.Tensor]) -> list[Finding]:
        """After it; batch, pages: as read."""
        self._look(batch, pages)
        found: list[Finding] = []
        for row, request, work in self._rows(batch):
            start, q = len(request.text), len(work.tokens)
            own, num_kept = self._own(request), work.num_kept
            verdicts: dict[int, tuple[Verdict, int, int]] = {}
            contents: dict[int, list[Any]] = {}
            step = self.step
            is_window = False
            for number, (g, state) in enumerate(self.states):
                is_window, index, blocks = self._blocks(batch, row, g)
                of = batch.metadata[g]
                is_run = is_window or not of.only_decodes or index < of.num_decodes
                count = min(q, len(blocks))
                last = min(num_kept, len(blocks)) - 1 if is_window else 0
                token = work.tokens[last if is_window else q - 1]
                before = self.seats.get(request.seat)
                contents[number] = self._contents(number, state, blocks, count, before)
                if state.kind is TEMPORAL:
                    same = self._is_same(row, number, g, blocks[last], last, token)
                else:
                    read = self.columns[row, g]
                    same = self._is_same_column(
                        row, number, blocks[0], own, last, token, read
                    )
                column, block = last, blocks[last if state.kind is TEMPORAL else 0]
                writer = request.generation, step
                if same or not is_run:
                    verdict = Verdict("state_not_written", writer)
                elif not is_window and num_kept < q:
                    verdict = Verdict("state_ahead", writer, start + q)
                else:
                    continue
                verdicts[number] = verdict, max(block, 0), column
            end = start + num_kept
            found += self._report(request, verdicts, end - 1, end)
            self._remember(batch, row, request, work, own, contents, is_window)
        return found

    def _contents(
        self,
        number: int,
        state: StateCache,
        blocks: list[int],
        count: int,
        before: Seat | None,
    ) -> list[Any]:
        """What the columns hold now. The others keep what they had."""
        none: list[Any] = [None] * self.shape.max_columns
        found = list(before.contents[number] if before else none)
        for c in range(count):
            if state.kind is CONV and blocks[0] > 0:
                found[c] = self.window(number, blocks[0], c)
            elif state.kind is TEMPORAL and blocks[c] > 0:
                found[c] = self.sample(number, blocks[c])
        return found

    def _is_same(
        self, row: int, number: int, g: int, block: int, column: int, token: int
    ) -> bool:
        """Whether a temporal state was not written: a head's part is as before and not
        zero, and its token is another one than the block's last, or the first. In few
        bits that says nothing of a single part."""
        known = self.last_tokens.get((g, block))
        before = self.before[row, number, column]
        if block < 0 or (known is not None and (known < 0 or known == token)):
            return False
        both = zip(before, self.sample(number, block), strict=True)
        equal = [one == other and any(one) for one, other in both]
        return (all if self.shape.temporal in NARROW else any)(equal)

    def _is_same_column(
        self,
        row: int,
        number: int,
        block: int,
        own: Seat | None,
        column: int,
        token: int,
        read: int,
    ) -> bool:
        """Whether the newest column is one that the buffer had, of other tokens. A copy
        of the buffer begins with what is read."""
        if own is None or block < 0 or token in own.buffered:
            return False
        newest = self.window(number, block, column)[-1]
        shift = own.num_kept - 1 - read
        return any(
            known is not None
            and known >= 0
            and self.before.get((row, number, at - shift)) == newest
            for at, known in enumerate(own.buffered)
        )

    def _remember(
        self,
        batch: Batch,
        row: int,
        request: Request,
        work: Work,
        own: Seat | None,
        contents: dict[int, list[Any]],
        is_window: bool,
    ) -> None:
        start, q, num_kept = len(request.text), len(work.tokens), work.num_kept
        for g in range(self.shape.num_groups):
            is_window, _, blocks = self._blocks(batch, row, g)
            for c, block in enumerate(blocks[:q]):
                token = work.tokens[c if is_window else q - 1]
                if block > 0:
                    self.last_tokens[g, block] = token
        width = self.shape.window
        inputs: list[int | None] = [None] * width
        if own is not None:
            first = own.num_kept - 1
            read = own.buffered[first : first + width]
            inputs = [*read, *[None] * (width - len(read))]
        inputs += work.tokens
        columns = range(min(q, self.shape.max_columns))
        last = min(num_kept, self.shape.max_columns) - 1 if is_window else 0
        wanted = {}
        for number, of in contents.items():
            wanted[number] = of[last]
        lengths = [start + 1 + c for c in columns] if is_window else [start + q]
        self.seats[request.seat] = Seat(
            request.generation,
            start + num_kept,
            self.step,
            lengths,
            contents,
            wanted,
            inputs[1:] if is_window else inputs[-width:],
            num_kept if is_window else 1,
            work.tokens[num_kept - 1 if is_window else -1],
        )

    def _report(
        self,
        request: Request,
        verdicts: dict[int, tuple[Verdict, int, int]],
        position: int,
        expected: int,
    ) -> list[Finding]:
        """One for each class and kind of state, of the first state concerned."""
        found: dict[tuple[str, StateKind], list[int]] = {}
        for number, (verdict, *_) in verdicts.items():
            kind = self.states[number][1].kind
            found.setdefault((verdict.kind, kind), []).append(number)
        return [
            self._finding(request, *verdicts[numbers[0]], numbers, position, expected)
            for numbers in found.values()
        ]

    def _finding(
        self,
        request: Request,
        verdict: Verdict,
        block: int,
        column: int,
        numbers: list[int],
        position: int,
        expected: int,
    ) -> Finding:
        g, state = self.states[numbers[0]]
        generation, step = verdict.writer
        writer = self.name_of(generation)
        return Finding(
            verdict.kind,
            10 + g,
            state.name,
            len(numbers),
            block,
            None,
            position,
            request.name,
            Writer(writer, generation, step),
            self.step,
            str(expected),
            "unknown" if verdict.found is None else str(verdict.found),
            state=str(state.kind),
            column=column,
        )
