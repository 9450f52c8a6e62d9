# SPDX-License-Identifier: Apache-2.0
"""Rings of layers that compress several tokens to one entry, on the audit's World.

No model of vLLM that has one runs on a CPU. A simulated layer stands for its kernels:
it pools a group when its last token comes, from the step's own rows and, of earlier
tokens, from the ring; then it writes the rows of all tokens, drafts included. It keeps
the position that each row really has, and so knows when it has pooled a wrong one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from tests.kernels.audit_world import N, Work, World, each_runner  # noqa: F401
from vllm_nwor.audit.findings import Finding
from vllm_nwor.layout.states import StateCache, StateGroup, StateKind, ring_shortage

LAYERS = ("ring0", "ring1")
WIDTH = 16
# Of a text.
LENGTH = 60
# The position of a row that was never written.
NO_POSITION = -1


@dataclass
class Rings(World):
    """The ring of a request has the number of its first block. held: block and row ->
    position of the row. pools: request -> (position, the row's) of the wrong rows that
    were pooled in the step."""

    ratio: int = 4
    capacity: int = 8
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    pools: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self):
        self.num_blocks = 1 + 2 * LENGTH // N
        self.values = torch.Generator().manual_seed(3)
        size = self.num_blocks, 2, self.capacity, WIDTH
        rings = [torch.rand(size, generator=self.values) for _ in LAYERS]
        self.rings = [ring.to(self.device) for ring in rings]
        caches = [
            StateCache(name, StateKind.RING, ring, ratio=self.ratio)
            for name, ring in zip(LAYERS, self.rings, strict=True)
        ]
        self.state_groups = [StateGroup(self.num_groups, caches)]
        super().__post_init__()

    def _prepare_v1(self, batch):
        super()._prepare_v1(self.with_rings(batch))
        self.forward(batch)

    def _prepare_v2(self, batch):
        super()._prepare_v2(self.with_rings(batch))
        self.forward(batch)

    def ring_of(self, name):
        return self.requests[name].blocks[0]

    def with_rings(self, batch):
        batch.block_tables = [*batch.block_tables, self.table_of(batch.req_ids)]
        batch.slot_mappings = [*batch.slot_mappings, batch.slot_mappings[0]]
        return batch

    def table_of(self, names):
        return self._int32([[self.ring_of(name)] for name in names])

    def forward(self, batch):
        self.pools = {}
        for name, work in zip(batch.req_ids, batch.works, strict=True):
            start, block = self.requests[name].computed, self.ring_of(name)
            end = start + work.num + len(work.drafts)
            first = start - start % self.ratio
            if end >= first + self.ratio:
                held = {
                    p: self.held.get((block, p % self.capacity), NO_POSITION)
                    for p in range(first, start)
                }
                self.pools[name] = [(p, of) for p, of in held.items() if p != of]
            for position in range(start, end):
                self.held[block, position % self.capacity] = position
                for ring in self.rings:
                    row = torch.rand((2, WIDTH), generator=self.values)
                    ring[block, :, position % self.capacity] = row

    def totals(self):
        """Samples compared, and not known."""
        return self.audit.states.totals.tolist()


def of_rings(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.kind == "ring_overwritten"]


def play(world: Rings, draw: random.Random, num_drafts: int) -> tuple[int, int]:
    """Two requests, windows of any length, of which any number is right. Findings name
    exactly the wrong rows that a step has pooled, the first of each request. Returns in
    how many windows there were some, and in how many not."""
    wrong = right = 0
    for name, block in (("a", 1), ("b", 1 + LENGTH // N)):
        blocks = range(block, block + LENGTH // N)
        world.add(name, [7] * draw.randint(1, 6), blocks)
        world.step(**{name: len(world.requests[name].text)})
    for _ in range(LENGTH):
        works = {}
        for name, request in world.requests.items():
            if request.computed + num_drafts < LENGTH:
                drafts = (7,) * draw.choice((draw.randint(0, num_drafts), num_drafts))
                num_right = draw.choice((0, 0, draw.randint(0, len(drafts))))
                works[name] = Work(1, drafts, num_right)
        found = {one.owner: one for one in of_rings(world.step(**works))}
        expected = {name: rows[0] for name, rows in world.pools.items() if rows}
        assert found.keys() == expected.keys()
        for name, (position, held) in expected.items():
            one = found[name]
            assert (one.layer, one.num_layers, one.state) == ("ring0", 2, "ring")
            assert (one.position, one.expected) == (position, str(position))
            assert (one.block, one.column) == (
                world.ring_of(name),
                position % world.capacity,
            )
            assert one.writer.request == name
            if num_drafts < world.capacity:
                assert one.found == str(held)
        wrong += len(expected)
        right += len(world.pools) - len(expected)
    return wrong, right


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_steps_that_pool_a_wrong_row_are_named(ratio: int, num_drafts: int) -> None:
    """Those and no others, with rings of all sizes; and there are some exactly with
    those sizes that the start-up check calls too small."""
    for capacity in range(ratio, ratio + num_drafts + 1):
        num_wrong = num_right = 0
        for seed in range(3):
            world = Rings(ratio=ratio, capacity=capacity)
            wrong, right = play(world, random.Random(seed), num_drafts)
            num_wrong, num_right = num_wrong + wrong, num_right + right
            assert world.totals()[0] > 0 == world.totals()[1]
        is_short = bool(ring_shortage(world.state_groups[0], num_drafts))
        assert is_short == (capacity < ratio + num_drafts - 1)
        assert num_right > 0
        assert (num_wrong > 0) == is_short


@pytest.mark.sanitizer
def test_a_row_of_one_layer_that_is_written_to_is_named() -> None:
    world = Rings()
    world.runs("a", [7] * 6, (1, 2))
    world.rings[1][1, 1, 5, 3] += 1
    (one,) = world.step(a=2)
    assert (one.kind, one.layer, one.num_layers) == ("ring_overwritten", "ring1", 1)
    assert (one.position, one.column, one.found) == (5, 5, "unknown")
    assert one.writer.request is None


def test_a_row_is_compared_when_it_is_read() -> None:
    """Only the group's last token reads the others."""
    world = Rings()
    world.runs("a", [7] * 5, (1, 2, 3))
    world.rings[0][1, 0, 4] += 1
    assert world.step(a=1) == world.step(a=1) == []
    assert world.totals() == [0, 0]
    (one,) = world.step(a=1)
    assert one.position == 4
    assert world.step(a=4) == []


@pytest.mark.sanitizer
def test_rows_that_are_not_the_requests_are_not_compared() -> None:
    """A block that another request has left is not zeroed; what comes with a hit was
    not written to it. And block 0 is nobody's."""
    world = Rings()
    world.runs("a", [7] * 7, (1, 2))
    world.finish("a")
    assert of_rings(world.runs("b", [7] * 3, (1, 2)) + world.step(b=1)) == []
    assert world.totals() == [2, 0]
    world.finish("b")
    # Of the open group, 8 to 11, two tokens were found.
    world.add("c", [7] * 11, (1, 2, 3, 4), hit=10)
    world.rings[0][1] += 1
    assert of_rings(world.step(c=1) + world.step(c=1)) == []
    assert world.totals() == [2, 2]
    assert of_rings(world.step(c=3) + world.step(c=1)) == []
    assert world.totals() == [4, 2]


def test_the_null_block_is_nobodys() -> None:
    world = Rings()
    world.table_of = lambda names: world._int32([[0] for _ in names])
    world.runs("a", [7] * 6, (1, 2))
    for ring in world.rings:
        ring[0] += 1
    assert world.step(a=2) == []
    assert world.totals() == [0, 0]
