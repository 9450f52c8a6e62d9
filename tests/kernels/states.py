# SPDX-License-Identifier: Apache-2.0
"""A plain reference of the audit's ops on recurrent states, and a world for them.

`World` is a scheduler and a model in a few lines: requests with blocks of their own in
each group, layers with a convolution and a temporal state whose bytes follow from the
text. `Reference` says what docs/audit.md promises ("Recurrent states") in terms of the
sampled bytes themselves: it has no checksums, and no line of the C++. `World.step` runs
both, and returns the findings of both.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kernels.reference import GUARD_BYTES, POISON_BYTE
from vllm_nwor import ops
from vllm_nwor.audit.findings import Finding, Writer, decode
from vllm_nwor.audit.requests import NO_FEATURES, Identity, Requests
from vllm_nwor.audit.states import States, strides_of, word_offsets
from vllm_nwor.audit.tables import AuditedGroup, GroupShape
from vllm_nwor.layout.caches import Loads
from vllm_nwor.layout.states import StateCache, StateGroup, StateKind
from vllm_nwor.layout.tables import DeviceMemory

NUM_SEATS, MAX_TOKENS = 3, 64
CONV, TEMPORAL = StateKind.CONV, StateKind.TEMPORAL
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """num_drafts: K. window: columns that a convolution reads."""

    num_groups: int = 2
    num_layers: int = 2
    num_drafts: int = 3
    window: int = 3
    num_heads: int = 4
    conv: torch.dtype = torch.bfloat16
    temporal: torch.dtype = torch.float32
    is_dim_first: bool = False

    @property
    def max_columns(self) -> int:
        return 1 + self.num_drafts

    @property
    def num_blocks(self) -> int:
        return 1 + NUM_SEATS * self.num_groups * self.max_columns


class Work(NamedTuple):
    """Tokens of a request in a step; of the last `num_drafts` the first `accepted` are
    right. is_window: whether it keeps a state for each token."""

    tokens: Sequence[int]
    num_drafts: int = 0
    accepted: int = 0
    is_window: bool = False

    @property
    def num_kept(self) -> int:
        return len(self.tokens) - self.num_drafts + self.accepted


@dataclass
class Request:
    """text: what its states hold. tables: the blocks of each group. num_kept: of its
    last window; the next step reads column num_kept - 1."""

    name: str
    seat: int
    generation: int
    tables: list[list[int]]
    text: list[int] = field(default_factory=list)
    num_kept: int = 1


@dataclass
class Metadata:
    """Of one group, as states.h's StateMetadata; cpu, until it is uploaded."""

    is_window: torch.Tensor | None
    window_blocks: torch.Tensor
    num_accepted: torch.Tensor
    blocks: torch.Tensor
    has_state: torch.Tensor | None
    num_decodes: int

    def upload(self, device: torch.device) -> tuple[list[int], list[Any]]:
        """A row of `metadata`, and what keeps its addresses alive. Rows of blocks are
        strided, as columns of a wider table."""
        kept: list[Any] = []

        def address(tensor: torch.Tensor | None) -> int:
            kept.append(tensor if tensor is None else tensor.to(device))
            return 0 if tensor is None else kept[-1].data_ptr()

        wide = torch.nn.functional.pad(self.window_blocks, (0, 2), value=-7)
        others = torch.nn.functional.pad(self.blocks[:, None], (0, 2), value=-7)
        windows = address(self.is_window), address(wide), wide.stride(0)
        of_others = address(self.num_accepted), address(others), others.stride(0)
        return [*windows, *of_others, address(self.has_state), self.num_decodes], kept


def place(metadata: Metadata, row: int) -> tuple[bool, int]:
    """Whether a batch row is a window, and its number among the windows or others."""
    mask = metadata.is_window
    if mask is None:
        return False, row
    before = int(mask[:row].sum())
    return (True, before) if mask[row] else (False, row - before)


class Bytes:
    """Bytes that follow from a key, always the same."""

    def __init__(self, *key: Any) -> None:
        self._draw = np.random.default_rng(zlib.crc32(repr(key).encode()))

    def array(self, *sizes: int) -> np.ndarray:
        return self._draw.integers(1, 256, sizes, dtype=np.uint8)


@dataclass
class Cache:
    """A layer's pages in an allocation of their own: convolution, temporal state and a
    gap. conv, temporal: views of it."""

    pages: torch.Tensor
    conv: torch.Tensor
    temporal: torch.Tensor

    @classmethod
    def allocate(cls, shape: Shape, device: torch.device) -> Cache:
        channels = 48
        num_columns = shape.window + shape.num_drafts
        heads, rows, columns = shape.num_heads, 5, 32
        of_conv = num_columns * channels * shape.conv.itemsize
        of_temporal = heads * rows * columns * shape.temporal.itemsize
        page = of_conv + of_temporal + 64
        size = 2 * GUARD_BYTES + shape.num_blocks * page
        pages = torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device)

        def view(dtype, first, sizes, strides):
            of_bytes = pages.view(dtype)
            first = (GUARD_BYTES + first) // dtype.itemsize
            return of_bytes.as_strided(
                (shape.num_blocks, *sizes), (page // dtype.itemsize, *strides), first
            )

        sizes, strides = (num_columns, channels), (channels, 1)
        if shape.is_dim_first:
            strides = (1, num_columns)
        conv = view(shape.conv, 0, sizes, strides)
        sizes, strides = (heads, rows, columns), (rows * columns, columns, 1)
        return cls(pages, conv, view(shape.temporal, of_conv, sizes, strides))


def put(tensor: torch.Tensor, data: np.ndarray) -> None:
    """data: bytes of the elements, in the last dimension."""
    values = torch.from_numpy(data.copy()).view(tensor.dtype).view(tensor.shape)
    tensor.copy_(values)


class World:
    """free: blocks that no request has. Block 0 is the null block."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        self.device, self.shape = device, shape
        self.lib = ops.load_builtins(device)
        self.caches: list[list[Cache]] = [
            [Cache.allocate(shape, device) for _ in range(shape.num_layers)]
            for _ in range(shape.num_groups)
        ]
        memory = DeviceMemory(device, None)
        groups = [
            StateGroup(10 + g, [one for n in self._layers(g) for one in n])
            for g in range(shape.num_groups)
        ]
        self.flat = [(g, one) for g, of in enumerate(groups) for one in of.states]
        about = NUM_SEATS, shape.num_blocks, shape.num_drafts, memory
        self.states = States(groups, *about)
        of_group = GroupShape(0, 4, 4, 16, MAX_TOKENS)
        about = NUM_SEATS, MAX_TOKENS, False, memory
        self.group = AuditedGroup(of_group, [], *about)
        self.requests = Requests(NUM_SEATS)
        self.running: dict[str, Request] = {}
        self.free = list(range(1, shape.num_blocks))
        self.step_number = 0
        self.reference = Reference(self)
        self._temporal: dict[Any, np.ndarray] = {}

    def _layers(self, g: int) -> list[list[StateCache]]:
        window = self.shape.window
        return [
            [
                StateCache(f"g{g}.{n}", CONV, cache.conv, window),
                StateCache(f"g{g}.{n}", TEMPORAL, cache.temporal),
            ]
            for n, cache in enumerate(self.caches[g])
        ]

    # -- the scheduler -------------------------------------------------------------

    def add(self, name: str) -> Request:
        """In a free seat, with the blocks that were free first."""
        seats = {one.seat for one in self.running.values()}
        seat = min(set(range(NUM_SEATS)) - seats)
        tables = []
        for _ in range(self.shape.num_groups):
            tables.append(self.free[: self.shape.max_columns])
            del self.free[: self.shape.max_columns]
        request = Request(name, seat, 0, tables)
        self.running[name] = request
        self.reseat(name)
        return request

    def remove(self, name: str) -> None:
        self.free += [b for table in self.running.pop(name).tables for b in table]

    def reseat(self, name: str) -> None:
        """Another generation, as after a preemption."""
        request = self.running[name]
        about = 0, Loads.NONE, Identity(), NO_FEATURES
        request.generation = self.requests.add(name, *about).generation
        empty = torch.empty(0, dtype=torch.int32, device=self.device)
        where = self.group.tables, empty, request.seat, request.generation
        self.lib.audit_seat(*where, 0, False, 0, NO_FEATURES)

    def metadata_of(self, works: dict[str, Work], num_padded: int) -> list[Metadata]:
        names = list(works)
        windows = [name for name in names if works[name].is_window]
        others = [name for name in names if not works[name].is_window]
        has = [bool(self.running[name].text) for name in others]
        num_decodes = next((i for i, x in enumerate(has) if not x), len(has))
        flags = [works[name].is_window for name in names] + [False] * num_padded
        found = []
        for g in range(self.shape.num_groups):
            tables = [self.running[name].tables[g] for name in windows]
            nulls = [[0] * self.shape.max_columns] * num_padded
            firsts = [self.running[name].tables[g][0] for name in others]
            kept = [self.running[name].num_kept for name in windows]
            sizes = -1, self.shape.max_columns
            found.append(
                Metadata(
                    torch.tensor(flags, dtype=torch.bool) if windows else None,
                    _int32([*tables, *nulls]).view(sizes),
                    _int32([*kept, *[0] * num_padded]),
                    _int32([*firsts, *[0] * num_padded]),
                    # Of the decodes it is not read.
                    None
                    if all(has)
                    else torch.tensor([False] * num_decodes + has[num_decodes:]),
                    num_decodes,
                )
            )
        return found

    # -- the model -----------------------------------------------------------------

    def temporal(self, layer: str, text: tuple[int, ...]) -> np.ndarray:
        """Of a text. After the same token three times it stays as it is; in few bits
        each row of a head does in every fifth step."""
        if len(text) >= 4 and len(set(text[-4:])) == 1:
            return self.temporal(layer, text[:-1])
        found = self._temporal.get((layer, text))
        if found is None:
            _, heads, rows, columns = self.caches[0][0].temporal.shape
            size = columns * self.shape.temporal.itemsize
            found = Bytes(layer, text).array(heads, rows, size)
            if self.shape.temporal in NARROW and len(text) > 1:
                before = self.temporal(layer, text[:-1])
                same = Bytes("same", layer, text).array(heads, rows) % 5 == 0
                found = np.where(same[..., None], before, found)
            self._temporal[layer, text] = found
        return found

    def column(self, layer: str, token: int) -> np.ndarray:
        """Of a convolution's buffer: as of a first layer, which reads embeddings."""
        channels = self.caches[0][0].conv.shape[2]
        size = channels * self.shape.conv.itemsize
        if token < 0:
            return np.zeros(size, dtype=np.uint8)
        return Bytes(layer, "conv", token).array(size)

    def forward(
        self,
        works: dict[str, Work],
        metadata: Sequence[Metadata],
        skip: Callable[[str, str, StateKind], bool],
    ) -> None:
        """Writes what each request's text makes of its states, where metadata says."""
        for row, (name, work) in enumerate(works.items()):
            if not work.tokens:
                continue
            text = self.running[name].text
            for g, state in self.flat:
                if skip(name, state.name, state.kind):
                    continue
                is_window, index = place(metadata[g], row)
                count = min(len(work.tokens), self.shape.max_columns)
                if is_window:
                    to = metadata[g].window_blocks[index].tolist()[:count]
                else:
                    to = [int(metadata[g].blocks[index])]
                if state.kind is TEMPORAL:
                    for c, block in enumerate(to):
                        tokens = work.tokens[: c + 1] if is_window else work.tokens
                        whole = self.temporal(state.name, (*text, *tokens))
                        if 0 < block < self.shape.num_blocks:
                            put(state.tensor[block], whole)
                    continue
                inputs = [*[-1] * state.window, *text][-state.window :]
                inputs += work.tokens
                inputs = inputs[1:] if is_window else inputs[-state.window :]
                inputs = inputs[: state.tensor.shape[1]]
                if 0 < to[0] < self.shape.num_blocks:
                    columns = [self.column(state.name, token) for token in inputs]
                    put(state.tensor[to[0], : len(inputs)], np.stack(columns))

    # -- a step --------------------------------------------------------------------

    def step(
        self,
        works: dict[str, Work],
        spoil: Callable[[list[Metadata]], Any] = lambda metadata: None,
        skip: Callable[[str, str, StateKind], bool] = lambda *_: False,
        after: Callable[[], Any] = lambda: None,
        rejects: bool = False,
        num_padded: int = 0,
    ) -> list[Finding]:
        """What the ops found, which is what the reference finds. spoil: changes the
        metadata or caches before the forward. skip: requests, layers and states that it
        does not write. after: changes caches behind it. rejects: the acceptance is a
        number of rejected drafts, as on V2."""
        self.step_number += 1
        metadata = self.metadata_of(works, num_padded)
        spoil(metadata)
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for name, work in works.items():
            first = len(self.running[name].text)
            tokens += work.tokens
            positions += range(first, first + len(work.tokens))
            starts.append(len(tokens))
        batch = Batch(works, [self.running[n] for n in works], metadata, starts)
        rows, kept_alive = self._arguments(batch, tokens, num_padded)
        slots = torch.full((len(tokens),), -1, device=self.device)
        of_tokens = _int32(tokens).to(self.device)
        places = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.lib.audit_plan(*rows, of_tokens, places, slots)
        found = [m.upload(self.device) for m in metadata]
        table = torch.tensor([row for row, _ in found])
        expected = self.reference.read(batch)
        with self._unchanged():
            self.lib.audit_states_read(*rows, self.states.tables, table)
        self.forward(works, metadata, skip)
        after()
        expected += self.reference.written(batch)
        about = self.states.tables, table, *self._acceptance(batch, rejects)
        with self._unchanged():
            self.lib.audit_states_written(*rows, *about)
        del kept_alive, found
        for name, work in works.items():
            request = self.running[name]
            request.text += work.tokens[: work.num_kept]
            if work.tokens:
                request.num_kept = work.num_kept if work.is_window else 1
        findings = self._findings()
        assert findings == sorted(expected, key=str)
        assert self.states.totals.tolist() == self.reference.totals
        return findings

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The caches, with their guards."""
        pages = [cache.pages for of in self.caches for cache in of]
        before = [page.clone() for page in pages]
        yield
        assert all(map(torch.equal, before, pages))

    def _arguments(self, batch: Batch, tokens: Sequence[int], num_padded: int) -> Any:
        seats = _int32([one.seat for one in batch.requests]).to(self.device)
        starts = [*batch.starts, *[batch.starts[-1]] * num_padded]
        table = torch.zeros((len(seats), 16), dtype=torch.int32, device=self.device)
        query = _int32(starts).to(self.device)
        sizes = len(seats), len(tokens), self.step_number
        return (self.group.tables, seats, query, table, *sizes), (seats, query, table)

    def _acceptance(self, batch: Batch, rejects: bool) -> tuple[Any, ...]:
        works = list(batch.works.values())
        if not any(work.num_drafts for work in works):
            return None, None, 0, None
        logits = np.cumsum([1 + work.num_drafts for work in works]).tolist()
        cumulative = _int32(logits).to(self.device)
        if rejects:
            numbers = [work.num_drafts - work.accepted for work in works]
            return cumulative, None, 0, _int32(numbers).to(self.device)
        width = 1 + self.shape.num_drafts
        ids = [[9] * (1 + w.accepted) + [-1] * (width - 1 - w.accepted) for w in works]
        return cumulative, _int32(ids).to(self.device), 100, None

    def _findings(self) -> list[Finding]:
        """Of this step; the header is cleared."""
        table = self.group.findings.tolist()
        number = table[0][0]
        self.group.findings.zero_()
        layers = self.states.layers
        rows = table[1 : 1 + number]
        found = [decode(row, self.group, self.requests, layers) for row in rows]
        return sorted(found, key=str)


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch(NamedTuple):
    """starts: a request's first row in the batch, and the end."""

    works: dict[str, Work]
    requests: list[Request]
    metadata: list[Metadata]
    starts: list[int]


class Verdict(NamedTuple):
    """About one state of one request. found: tokens in the state that is there."""

    kind: str
    writer: tuple[int, int] = (0, 0)  # generation, step
    found: int | None = None


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


class Reference:
    """By the bytes of samples, which are tuples of their parts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.totals = [0, 0]
        self.seats: dict[int, Seat] = {}
        self.last_tokens: dict[tuple[int, int], int] = {}
        # By request, state and column: from before the forward.
        self.before: dict[tuple[int, int, int], Any] = {}
        self.words = [word_offsets(state) for _, state in world.flat]

    def sample(self, number: int, block: int, column: int = 0) -> tuple[bytes, ...]:
        _, state = self.world.flat[number]
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
        _, state = self.world.flat[number]
        columns = range(column, column + state.window)
        return [self.sample(number, block, c) for c in columns]

    def _look(self) -> None:
        """At the caches as they are now."""
        caches = [c for of in self.world.caches for c in of]
        pages = [cache.pages.cpu().numpy() for cache in caches]
        self.pages = [page for page in pages for _ in (CONV, TEMPORAL)]

    def _blocks(self, batch: Batch, row: int, g: int) -> tuple[bool, int, list[int]]:
        """Whether a row is a window, its number, and its blocks by column; -1: none."""
        of = batch.metadata[g]
        is_window, index = place(of, row)
        table = of.window_blocks if is_window else of.blocks[:, None]
        named = table[index].tolist()
        end = self.world.shape.num_blocks
        return is_window, index, [b if 0 < b < end else -1 for b in named]

    def _rows(self, batch: Batch) -> list[tuple[int, Request, Work]]:
        both = zip(batch.requests, batch.works.values(), strict=True)
        return [(row, *pair) for row, pair in enumerate(both) if pair[1].tokens]

    def read(self, batch: Batch) -> list[Finding]:
        self._look()
        found: list[Finding] = []
        for row, request, work in self._rows(batch):
            verdicts: dict[int, tuple[Verdict, int, int]] = {}
            for number, (g, state) in enumerate(self.world.flat):
                is_window, index, blocks = self._blocks(batch, row, g)
                of = batch.metadata[g]
                column, reads = 0, True
                if is_window:
                    n = int(of.num_accepted[index])
                    reads = 1 <= n <= self.world.shape.max_columns
                    column = n - 1 if reads else 0
                elif of.has_state is not None and index >= of.num_decodes:
                    reads = bool(of.has_state[index])
                count = min(len(work.tokens), len(blocks))
                self._keep(row, number, state, blocks, count)
                block = blocks[column if state.kind is TEMPORAL else 0]
                verdict = self._judge(request, number, state, reads, block, column)
                if verdict is not None:
                    verdicts[number] = verdict, max(block, 0), column
            start = len(request.text)
            found += self._report(request, verdicts, start, start)
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

    def written(self, batch: Batch) -> list[Finding]:
        self._look()
        found: list[Finding] = []
        for row, request, work in self._rows(batch):
            start, q = len(request.text), len(work.tokens)
            own, num_kept = self._own(request), work.num_kept
            verdicts: dict[int, tuple[Verdict, int, int]] = {}
            contents: dict[int, list[Any]] = {}
            step = self.world.step_number
            is_window = False
            for number, (g, state) in enumerate(self.world.flat):
                is_window, _, blocks = self._blocks(batch, row, g)
                count = min(q, len(blocks))
                last = min(num_kept, len(blocks)) - 1 if is_window else 0
                token = work.tokens[last if is_window else q - 1]
                before = self.seats.get(request.seat)
                contents[number] = self._contents(number, state, blocks, count, before)
                if state.kind is TEMPORAL:
                    same = self._is_same(row, number, g, blocks[last], last, token)
                else:
                    same = self._is_same_column(
                        row, number, blocks[0], own, last, token
                    )
                column, block = last, blocks[last if state.kind is TEMPORAL else 0]
                writer = request.generation, step
                if same:
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
        none: list[Any] = [None] * self.world.shape.max_columns
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
        """Whether a temporal state was not written: a head's part is as before, and its
        token is another one. In few bits that says nothing of a single part."""
        known = self.last_tokens.get((g, block), -1)
        before = self.before[row, number, column]
        if block < 0 or known < 0 or known == token:
            return False
        both = zip(before, self.sample(number, block), strict=True)
        equal = [one == other for one, other in both]
        return (all if self.world.shape.temporal in NARROW else any)(equal)

    def _is_same_column(
        self,
        row: int,
        number: int,
        block: int,
        own: Seat | None,
        column: int,
        token: int,
    ) -> bool:
        """Whether the newest column is one that the buffer had, of other tokens."""
        if own is None or block < 0 or token in own.buffered:
            return False
        newest = self.window(number, block, column)[-1]
        return any(
            known is not None and known >= 0 and self.before[row, number, c] == newest
            for c, known in enumerate(own.buffered)
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
        for g in range(self.world.shape.num_groups):
            is_window, _, blocks = self._blocks(batch, row, g)
            for c, block in enumerate(blocks[:q]):
                token = work.tokens[c if is_window else q - 1]
                if block > 0:
                    self.last_tokens[g, block] = token
        width = self.world.shape.window
        inputs: list[int | None] = [None] * width
        if own is not None:
            first = own.num_kept - 1
            read = own.buffered[first : first + width]
            inputs = [*read, *[None] * (width - len(read))]
        inputs += work.tokens
        columns = range(min(q, self.world.shape.max_columns))
        last = min(num_kept, self.world.shape.max_columns) - 1 if is_window else 0
        wanted = {}
        for number, of in contents.items():
            wanted[number] = of[last]
        lengths = [start + 1 + c for c in columns] if is_window else [start + q]
        self.seats[request.seat] = Seat(
            request.generation,
            start + num_kept,
            self.world.step_number,
            lengths,
            contents,
            wanted,
            inputs[1:] if is_window else inputs[-width:],
            num_kept if is_window else 1,
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
            kind = self.world.flat[number][1].kind
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
        g, state = self.world.flat[numbers[0]]
        generation, step = verdict.writer
        writer = self.world.requests.name_of(generation)
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
            self.world.step_number,
            str(expected),
            "unknown" if verdict.found is None else str(verdict.found),
            state=str(state.kind),
            column=column,
        )


def any_shape(draw: random.Random) -> Shape:
    return Shape(
        draw.randint(1, 3),
        draw.randint(1, 2),
        draw.randint(1, 5),
        draw.randint(2, 4),
        draw.randint(1, 12),
        draw.choice((torch.bfloat16, torch.float32)),
        draw.choice((torch.bfloat16, torch.float32)),
        draw.random() < 0.5,
    )
