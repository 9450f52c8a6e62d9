# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of the cache: requests, a pool of blocks, prefix cache.

Written after what vLLM's block pool and scheduler do, as plainly as possible. A
request's text is what its target would say: token p of family f is always the same, so
that requests of a family share prefixes, generated ones too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np

from tests.simulation.memory import Bytes, Cache, Violation

Text = tuple[int, ...]


class Broken(AssertionError):
    """The simulation itself is wrong: not a violation of NWOR's."""


@dataclass
class Request:
    """text: all tokens known. num_computed: how many have keys and values in the cache.
    blocks: block ids for each group. family: which text it follows. index: of its state
    in V2's runner, -1 without one. has_sampled: a token, so that it may have drafts."""

    name: str
    text: list[int]
    family: int
    blocks: list[list[int]]
    num_computed: int = 0
    index: int = -1
    has_sampled: bool = False

    @property
    def num_remaining(self) -> int:
        return len(self.text) - self.num_computed

    def extend(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.text.append(token_of(self.family, len(self.text)))


def condense(rows: list[Any], scheduled: Sequence[Any]) -> list[Any]:
    """The batch of V1's runner: who stays keeps the row, new ones get the rows that
    others left, and the last ones move into the holes that remain."""
    kept = [row if row in scheduled else None for row in rows]
    for request in scheduled:
        if request not in kept:
            if None in kept:
                kept[kept.index(None)] = request
            else:
                kept.append(request)
    while None in kept:
        last = kept.pop()
        if last is not None:
            kept[kept.index(None)] = last
    return kept


def token_of(family: int, position: int) -> int:
    return 1000 * (family + 1) + position


@dataclass
class Pool:
    """Blocks of all groups, by reference counts. Block 0 is vLLM's null block.

    free: least recently used first; a free block keeps its content, and can be found
    again by its text, until it is given out. is_lifo: as in vLLM, one that cannot be
    found goes to the front. content: the bytes of each cached block when it was
    registered; they must not change after that.
    """

    cache: Cache
    is_lifo: bool
    free: deque[int] = field(init=False)
    references: list[int] = field(init=False)
    cached: dict[tuple[int, Text], int] = field(default_factory=dict)
    key_of: dict[int, tuple[int, Text]] = field(default_factory=dict)
    content: dict[int, Bytes] = field(default_factory=dict)
    num_evicted: int = 0

    def __post_init__(self) -> None:
        self.free = deque(range(1, self.cache.num_blocks))
        self.references = [0] * self.cache.num_blocks

    def take(self) -> int:
        """A free block, no longer cached. Requires one."""
        block = self.free.popleft()
        self.num_evicted += self.forget(block)
        self.references[block] = 1
        return block

    def forget(self, block: int) -> bool:
        """It cannot be found any more; whether it could."""
        if block not in self.key_of:
            return False
        del self.cached[self.key_of.pop(block)]
        del self.content[block]
        return True

    def share(self, block: int) -> None:
        if self.references[block] == 0:
            self.free.remove(block)
        self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """A request's blocks go back, of which the last ones are given out first."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] < 0:
                raise Broken(f"block {block} was released too often")
        freed = [block for block in reversed(blocks) if self.references[block] == 0]
        at_front = [b for b in freed if self.is_lifo and b not in self.key_of]
        self.free.extendleft(reversed(at_front))
        self.free.extend(block for block in freed if block not in at_front)

    def register(self, group: int, text: Text, block: int) -> None:
        """A full block of committed tokens can be found by its text from now on."""
        key = (group, text)
        if key in self.cached or block in self.key_of:
            return
        self.cached[key] = block
        self.key_of[block] = key
        index = self.cache.groups[group].block_index(block)
        self.content[block] = self.cache.memory.real[index]

    def find(self, group: int, text: Text) -> int | None:
        """The block with this text, whose bytes are still those it was cached with."""
        block = self.cached.get((group, text))
        if block is not None:
            index = self.cache.groups[group].block_index(block)
            if not np.array_equal(self.cache.memory.real[index], self.content[block]):
                raise Violation("cached block changed", f"block {block}")
        return block


class Blocks:
    """Gives blocks to requests, and takes them back.

    num_hits: chunks that came from the prefix cache. A chunk is the least number of
    tokens that fills whole blocks in every group.
    """

    def __init__(self, cache: Cache, is_lifo: bool) -> None:
        self.cache = cache
        self.pool = Pool(cache, is_lifo)
        self.sizes = [group.block_size for group in cache.groups]
        self.chunk_tokens = lcm(*self.sizes)
        self.num_hits = 0

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that are needed until `num_tokens` tokens have slots."""
        return sum(
            max(-(-num_tokens // size) - len(blocks), 0)
            for size, blocks in zip(self.sizes, request.blocks, strict=True)
        )

    def grow(self, request: Request, num_tokens: int, zero: bool) -> None:
        """Blocks for the first `num_tokens` tokens. Requires enough free ones.
        zero: new blocks are cleared, as vLLM does for some layers."""
        for group, (size, blocks) in enumerate(
            zip(self.sizes, request.blocks, strict=True)
        ):
            while len(blocks) * size < num_tokens:
                blocks.append(self.pool.take())
                if zero:
                    index = self.cache.groups[group].block_index(blocks[-1])
                    self.cache.memory.write(index, np.zeros(index.shape, np.uint8))

    def slots(self, request: Request, group: int, first: int, count: int) -> list[int]:
        """The slots of tokens first .. first + count - 1 in a group."""
        size, blocks = self.sizes[group], request.blocks[group]
        return [
            blocks[position // size] * size + position % size
            for position in range(first, first + count)
        ]

    def start(self, request: Request) -> None:
        """What the prefix cache knows of a request's text becomes its own; at least one
        token is left to compute."""
        while self._extend(request):
            request.num_computed += self.chunk_tokens

    def _extend(self, request: Request) -> bool:
        end = request.num_computed + self.chunk_tokens
        if end >= len(request.text):
            return False
        found = [
            [
                self.pool.find(group, tuple(request.text[: stop + size]))
                for stop in range(request.num_computed, end, size)
            ]
            for group, size in enumerate(self.sizes)
        ]
        hits = [[block for block in blocks if block is not None] for blocks in found]
        if hits != found:
            return False
        for blocks, shared in zip(request.blocks, hits, strict=True):
            for block in shared:
                self.pool.share(block)
            blocks.extend(shared)
        self.num_hits += 1
        return True

    def commit(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` more have keys and values; blocks they filled are cached."""
        before = request.num_computed
        request.num_computed += num_tokens
        for group, (size, blocks) in enumerate(
            zip(self.sizes, request.blocks, strict=True)
        ):
            for number in range(before // size, request.num_computed // size):
                text = tuple(request.text[: (number + 1) * size])
                self.pool.register(group, text, blocks[number])

    def take_back(self, request: Request) -> bool:
        """The last full chunk and all behind it have to be computed again, as after a
        load that failed; False if others have the blocks too."""
        start = (request.num_computed - 1) // self.chunk_tokens * self.chunk_tokens
        again = [
            block
            for size, blocks in zip(self.sizes, request.blocks, strict=True)
            for block in blocks[start // size :]
        ]
        if any(self.pool.references[block] > 1 for block in again):
            return False
        for block in again:
            self.pool.forget(block)
        request.num_computed = start
        return True

    def release(self, request: Request) -> None:
        for blocks in request.blocks:
            self.pool.release(blocks)
            blocks.clear()
        request.num_computed = 0

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares full blocks and gets copies of those partly filled, if any:
        vLLM's fine-grained prefix hits. Requires a free block for each group."""
        child.num_computed = parent.num_computed
        for group, size in enumerate(self.sizes):
            full, rest = divmod(parent.num_computed, size)
            for block in parent.blocks[group][:full]:
                self.pool.share(block)
                child.blocks[group].append(block)
            if rest:
                child.blocks[group].append(self.pool.take())
                blocks = self.cache.groups[group]
                self.cache.memory.copy(
                    blocks.block_index(parent.blocks[group][full]),
                    blocks.block_index(child.blocks[group][full]),
                )
