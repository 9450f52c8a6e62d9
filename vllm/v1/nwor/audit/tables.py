# SPDX-License-Identifier: Apache-2.0
"""The KV audit's tables of a KV-cache group, which its ops read and write.

csrc/nwor/audit/audit.h has the structs that are their rows, in these columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..layout.tables import ALIGNMENT, DeviceMemory, LayerCache, copy_tables
from ..ops import TABLE_COLUMNS
from .requests import FEATURE_COLUMNS, MAX_FEATURES

# Events of blocks: BlockEvent of audit.h.
GIVEN, FILLED, STORED = range(3)
ops.shared("BLOCK_EVENTS", ("GIVEN", "FILLED", "STORED"))

# Findings of a step, and of those in memory and in the file: kept ones.
MAX_KEPT = 256


@dataclass(frozen=True)
class GroupShape:
    """Sizes of a group.

    block_size: tokens a block, as the scheduler counts; entry_tokens: those that an
    entry of the worker's block table stands for. window: how many of a request's last
    positions it still owns; 0 for all. max_blocks: of a request. num_stored: blocks
    stored by a KV connector for which the audit keeps a copy of its records.
    num_digests: blocks of a step whose digests are taken, of filled ones as many as
    requests can fill, and as many loaded ones; 0: none are.
    """

    group_id: int
    block_size: int
    entry_tokens: int
    num_blocks: int
    max_blocks: int
    window: int = 0
    num_stored: int = 0
    num_digests: int = 0


def digest_rows(shape: GroupShape) -> int:
    """Of `digests`, the header's included."""
    return 1 + 2 * shape.num_digests if shape.num_digests else 0


def _shapes(
    shape: GroupShape, num_layers: int, num_seats: int, max_tokens: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of a group's tensors, by their names in AuditedGroup, in AuditGroup's order."""
    num_blocks = shape.num_blocks + shape.num_stored
    num_rows = num_blocks * shape.block_size
    num_digests = digest_rows(shape)
    return {
        "records": ((num_rows, ops.RECORD_COLUMNS), torch.int64),
        "seats": ((num_seats, ops.SEAT_COLUMNS), torch.int64),
        "features": ((num_seats * MAX_FEATURES, FEATURE_COLUMNS), torch.int64),
        "expected": ((num_seats, shape.max_blocks), torch.int64),
        "owners": ((shape.num_blocks,), torch.int32),
        "plan": ((max_tokens, ops.PLAN_COLUMNS), torch.int64),
        "findings": ((1 + MAX_KEPT, ops.FINDING_COLUMNS), torch.int64),
        "stores": ((num_blocks,), torch.int64),
        "digests": ((num_digests, ops.DIGEST_COLUMNS), torch.int64),
        "contents": ((num_rows, num_layers), torch.int32),
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
    """One KV-cache group's tables. Memory: 32 bytes a slot, and 4 a slot and layer.

    tables: what all ops take: the addresses and sizes of the others, on the host.
    parts: the layers by their packing, none if bytes are not compared. names: of the
    layers, by their columns in `contents`. numbers: of the stores, by the place of a KV
    connector that holds them. lost_at: the last step before the cache's content was
    lost; 0: it was not.
    """

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
        self.numbers: dict[int, int] = {}
        self.lost_at = 0
        self._stores = itertools.count(1)
        self.layers = tuple(layers)
        self.parts = copy_tables(layers, memory) if compares_bytes else ()
        self.names = [name for part in self.parts for name in part.names]
        shapes = _shapes(shape, len(self.names), num_seats, max_tokens)
        self.tensors = {
            name: memory.take(sizes, dtype).zero_()
            for name, (sizes, dtype) in shapes.items()
        }
        self.records, self.contents = self.tensors["records"], self.tensors["contents"]
        self.findings = self.tensors["findings"]
        self.tables = self._tables(num_seats, max_tokens)
        slot_bytes = sum(layer.layout.slot_bytes for layer in layers)
        self.block_bytes = shape.block_size * slot_bytes

    def _tables(self, num_seats: int, max_tokens: int) -> torch.Tensor:
        """An AuditGroup, and an AuditPart for each table of layers; int64, cpu."""
        shape, index = self.shape, self.records.device.index
        columns = [
            -1 if self.records.device.type == "cpu" else index,
            *(tensor.data_ptr() for tensor in self.tensors.values()),
            *(len(self.names), num_seats, shape.max_blocks, max_tokens),
            *(MAX_KEPT, shape.num_blocks, shape.num_stored),
            *(shape.num_digests, shape.block_size),
            *(shape.entry_tokens, shape.window, len(self.parts)),
            *(0, 0),  # set_words
            *(0, 0, 0),  # set_beside
        ]
        self._words = slice(len(columns) - 5, len(columns) - 3)
        self._beside = slice(len(columns) - 3, len(columns))
        for part in self.parts:
            runs = part.runs
            of_runs = (0, 0, 0) if runs is None else (runs.data_ptr(), *runs.shape[:2])
            columns += [part.table.data_ptr(), len(part.names), *of_runs]
        return torch.tensor(columns, dtype=torch.int64)

    def set_words(self, words: torch.Tensor | None) -> None:
        """What the next ops take a fingerprint of: addresses, [n] int64 on the device;
        None: of nothing."""
        columns = (0, 0) if words is None else (words.data_ptr(), len(words))
        self.tables[self._words] = torch.tensor(columns)

    def set_beside(self, stream: int, forked: int, is_all: bool) -> None:
        """Where passes of resolve run that nothing of the step waits for; is_all: all,
        and those of states written. forked: has been recorded."""
        self.tables[self._beside] = torch.tensor((stream, forked, is_all))

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def copy_block(self, source: int, to: int) -> None:
        """vLLM copies a block, so its slots hold what the other's did."""
        size, stores = self.shape.block_size, self.tensors["stores"]
        for table in (self.records, self.contents):
            rows = table[source * size : (source + 1) * size]
            table[to * size : (to + 1) * size] = rows
        stores[to] = stores[source]

    def store(self, places: Sequence[int]) -> list[int]:
        """The numbers of stores to `places`; 0 for stores without a kept copy, because
        there is no room for it."""
        for place in places:
            self.numbers.pop(place, None)
        num_left_out = max(len(places) - self.shape.num_stored, 0)
        numbers = [next(self._stores) for _ in places[num_left_out:]]
        self.numbers.update(zip(places[num_left_out:], numbers, strict=True))
        return [0] * num_left_out + numbers

    def stored(self, places: Sequence[int]) -> list[int]:
        """The numbers of the last stores to `places`; 0 if not known."""
        return [self.numbers.get(place, 0) for place in places]

    def _of_slots(self) -> torch.Tensor:
        """The records of the cache's slots."""
        return self.records[: self.shape.num_blocks * self.shape.block_size]

    def forget_cache(self) -> None:
        """Forgets the content of the cache's slots, but not the owners of blocks, nor
        the copies of stored blocks."""
        self._of_slots().zero_()

    def lose_cache(self, step: int) -> None:
        """The same, but not who wrote it last. step: the last one."""
        self.lost_at = step
        self._of_slots()[:, ::3].zero_()  # hash; state and content
