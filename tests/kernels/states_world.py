# SPDX-License-Identifier: Apache-2.0
"""A scheduler and a model with recurrent states: requests with blocks of their own in
each group, layers with a convolution and a temporal state whose bytes follow from the
text. `World.step` runs the audit's ops and the reference.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.kernels.reference import GUARD_BYTES, POISON_BYTE
from tests.kernels.states_batch import (
    CONV,
    MAX_TOKENS,
    NARROW,
    NUM_SEATS,
    TEMPORAL,
    Batch,
    Metadata,
    Request,
    Shape,
    Work,
    int32,
    place,
)
from tests.kernels.states_reference import Reference
from tests.kernels.transaction import AcceptanceForm
from vllm_nwor import ops
from vllm_nwor.audit.findings import Finding, decode
from vllm_nwor.audit.requests import NO_FEATURES, Identity, Requests
from vllm_nwor.audit.states import States
from vllm_nwor.audit.tables import AuditedGroup, GroupShape
from vllm_nwor.layout.caches import Loads
from vllm_nwor.layout.states import StateCache, StateGroup, StateKind
from vllm_nwor.layout.tables import DeviceMemory


def of_key(sizes: Sequence[int], *key: Any) -> np.ndarray:
    """Bytes that follow from a key, always the same; none is 0."""
    draw = np.random.default_rng(zlib.crc32(repr(key).encode()))
    return draw.integers(1, 256, sizes, dtype=np.uint8)


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
        self.digests_to: torch.Tensor | None = None
        self.running: dict[str, Request] = {}
        self.free = list(range(1, shape.num_blocks))
        self.step_number = 0
        self.reference = Reference(shape, self.flat, self.requests.name_of)
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
        self.lib.audit_seat(*where, 0, False, 0, 0, NO_FEATURES)

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
                    int32([*tables, *nulls]).view(sizes),
                    int32([*kept, *[0] * num_padded]),
                    int32([*firsts, *[0] * num_padded]),
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
            found = of_key((heads, rows, size), layer, text)
            if self.shape.temporal in NARROW and len(text) > 1:
                before = self.temporal(layer, text[:-1])
                same = of_key((heads, rows), "same", layer, text) % 5 == 0
                same &= not same.all()  # a token leaves some rows as they are
                found = np.where(same[..., None], before, found)
            self._temporal[layer, text] = found
        return found

    def column(self, layer: str, token: int) -> np.ndarray:
        """Of a convolution's buffer: as of a first layer, which reads embeddings."""
        channels = self.caches[0][0].conv.shape[2]
        size = channels * self.shape.conv.itemsize
        if token < 0:
            return np.zeros(size, dtype=np.uint8)
        return of_key((size,), layer, "conv", token)

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
        batch = Batch(
            self.step_number, works, [self.running[n] for n in works], metadata, starts
        )
        rows, kept_alive = self._arguments(batch, tokens, num_padded)
        slots = torch.full((len(tokens),), -1, device=self.device)
        of_tokens = int32(tokens).to(self.device)
        places = torch.tensor(positions, dtype=torch.int64, device=self.device)
        self.lib.audit_plan(*rows, of_tokens, places, slots)
        found = [m.upload(self.device) for m in metadata]
        table = torch.tensor([row for row, _ in found])
        expected = self.reference.read(batch, self._pages())
        with self._unchanged():
            self.lib.audit_states_read(*rows, self.states.tables, table)
        self.forward(works, metadata, skip)
        after()
        expected += self.reference.written(batch, self._pages())
        about = self.states.tables, table, *self._acceptance(batch, rejects)
        with self._unchanged():
            self.lib.audit_states_written(*rows, *about, self.digests_to)
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

    def _pages(self) -> list[torch.Tensor]:
        """Of each state."""
        caches = [cache for of in self.caches for cache in of]
        return [cache.pages for cache in caches for _ in (CONV, TEMPORAL)]

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The caches, with their guards."""
        pages = self._pages()[::2]
        before = [page.clone() for page in pages]
        yield
        assert all(map(torch.equal, before, pages))

    def _arguments(self, batch: Batch, tokens: Sequence[int], num_padded: int) -> Any:
        seats = int32([one.seat for one in batch.requests]).to(self.device)
        starts = [*batch.starts, *[batch.starts[-1]] * num_padded]
        table = torch.zeros((len(seats), 16), dtype=torch.int32, device=self.device)
        query = int32(starts).to(self.device)
        sizes = len(seats), len(tokens), self.step_number
        return (self.group.tables, seats, query, table, *sizes), (seats, query, table)

    def _acceptance(self, batch: Batch, rejects: bool) -> tuple[Any, ...]:
        works = batch.works.values()
        drafts, accepted = [w.num_drafts for w in works], [w.accepted for w in works]
        if not any(drafts):
            return None, None, 0, None
        logits = np.cumsum([1 + number for number in drafts]).tolist()
        cumulative = int32(logits).to(self.device)
        form = AcceptanceForm.NUM_REJECTED if rejects else AcceptanceForm.SAMPLED
        return cumulative, *form.arguments(drafts, accepted, self.device).values()

    def _findings(self) -> list[Finding]:
        """Of this step; the header is cleared."""
        table = self.group.findings.tolist()
        number = table[0][0]
        self.group.findings.zero_()
        layers = self.states.layers
        rows = table[1 : 1 + number]
        found = [decode(row, self.group, self.requests, layers) for row in rows]
        return sorted(found, key=str)
