# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of the cache: requests, a pool of blocks, prefix cache.

A simple model of vLLM's block pool and scheduler. Token p of the text of family f is
always the same, so that requests of a family share prefixes, also generated ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from tests.simulation.cache import Cache

# Group and text of a full block.
Key = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class Request:
    """text: known tokens. num_computed: how many have keys and values in the cache.
    blocks: block ids by group. family: its text. index: state index in V2's runner, -1
    without one. has_sampled: a token was sampled, so that it may have drafts."""

    name: str
    family: int
    blocks: list[list[int]]
    text: list[int] = field(default_factory=list)
    num_computed: int = 0
    index: int = -1
    has_sampled: bool = False

    def extend(self, num_tokens: int) -> None:
        first = 1000 * (self.family + 1) + len(self.text)
        self.text += range(first, first + num_tokens)


def condense(rows: list[Any], scheduled: Sequence[Any]) -> list[Any]:
    """The batch of V1's runner: requests keep their rows, new ones get free rows, and
    the last ones move to the free rows that remain."""
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


class Blocks:
    """The block pool. Block 0 is vLLM's null block.

    free: least recently used first; a free block stays cached until it is given out.
        is_lifo: as in vLLM, an uncached one goes to the front.
    references: how many requests have a block.
    chunk_tokens: the least number of tokens that fills whole blocks in every group.
    totals: counts prefix hits and evictions.
    """

    def __init__(self, cache: Cache, is_lifo: bool, totals: Counter[str]) -> None:
        self.cache = cache
        self.is_lifo = is_lifo
        self.free = deque(range(1, cache.num_blocks))
        self.references = [0] * cache.num_blocks
        self.cached: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.sizes = [group.block_size for group in cache.groups]
        self.chunk_tokens = lcm(*self.sizes)
        self.totals = totals

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocates blocks for `num_tokens` tokens; False if too few are free."""
        missing = sum(
            max(-(-num_tokens // size) - len(blocks), 0)
            for size, blocks in self._by_group(request)
        )
        if missing > len(self.free):
            return False
        for size, blocks in self._by_group(request):
            while len(blocks) * size < num_tokens:
                blocks.append(self._take())
        return True

    def start(self, request: Request) -> None:
        """Gives a request its cached prefix; at least one token is left to compute."""
        while (end := request.num_computed + self.chunk_tokens) < len(request.text):
            found = [
                [
                    self.cached.get((group, tuple(request.text[: stop + size])))
                    for stop in range(request.num_computed, end, size)
                ]
                for group, size in enumerate(self.sizes)
            ]
            if any(None in blocks for blocks in found):
                return
            for blocks, shared in zip(request.blocks, found, strict=True):
                self._share(blocks, shared)
            request.num_computed = end
            self.totals["prefix_hits"] += 1

    def commit(self, request: Request, num_tokens: int) -> None:
        """`num_tokens` more are computed; full blocks become cached."""
        before = request.num_computed
        request.num_computed += num_tokens
        for gid, (size, blocks) in enumerate(self._by_group(request)):
            for number in range(before // size, request.num_computed // size):
                key = gid, tuple(request.text[: (number + 1) * size])
                block = blocks[number]
                if key not in self.cached and block not in self.key_of:
                    self.cached[key], self.key_of[block] = block, key

    def take_back(self, request: Request) -> bool:
        """The last full chunk and all behind it must be computed again, as after a
        failed load; False if their blocks are shared."""
        start = (request.num_computed - 1) // self.chunk_tokens * self.chunk_tokens
        again = [
            block
            for size, blocks in self._by_group(request)
            for block in blocks[start // size :]
        ]
        if any(self.references[block] > 1 for block in again):
            return False
        for block in again:
            self._forget(block)
        request.num_computed = start
        return True

    def release(self, request: Request) -> None:
        """Frees all blocks, the last ones first."""
        for blocks in request.blocks:
            for block in blocks:
                self.references[block] -= 1
                assert self.references[block] >= 0, f"block {block} is not in use"
            freed = [block for block in blocks[::-1] if self.references[block] == 0]
            at_front = [b for b in freed if self.is_lifo and b not in self.key_of]
            self.free.extendleft(reversed(at_front))
            self.free.extend(block for block in freed if block not in at_front)
            blocks.clear()
        request.num_computed = 0

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares full blocks and gets a copy of the partial one, as with
        vLLM's fine-grained prefix hits. Requires a free block for each group."""
        child.num_computed = parent.num_computed
        for group, donor, blocks in zip(
            self.cache.groups, parent.blocks, child.blocks, strict=True
        ):
            full, rest = divmod(parent.num_computed, group.block_size)
            self._share(blocks, donor[:full])
            if rest:
                blocks.append(self._take())
                self.cache.copy(
                    group.blocks_index(donor[full]), group.blocks_index(blocks[-1])
                )

    def _by_group(self, request: Request) -> Iterator[tuple[int, list[int]]]:
        """A group's block size, and the request's blocks there."""
        return zip(self.sizes, request.blocks, strict=True)

    def _take(self) -> int:
        """A free block, no longer cached. Requires one."""
        block = self.free.popleft()
        self.totals["evictions"] += self._forget(block)
        self.references[block] = 1
        return block

    def _share(self, own: list[int], blocks: list[Any]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1
        own += blocks

    def _forget(self, block: int) -> bool:
        """Removes a block from the prefix cache; whether it was there."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.cached[key]
        return key is not None
