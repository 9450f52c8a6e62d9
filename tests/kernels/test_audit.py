# SPDX-License-Identifier: Apache-2.0
"""The audit's state and ops on a small cache of its own: no vLLM, every byte known.

`World` is a scheduler and a model in a few lines: requests with texts and blocks, three
layers whose bytes for a token follow from the token, its position and the layer. A test
runs steps, spoils one thing, and wants exactly one finding, or none.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.helpers.environment import REPO
from tests.kernels.conftest import DEVICES
from vllm_nwor import ops
from vllm_nwor.audit import runner as audit_runner
from vllm_nwor.audit import runner_v2, startup
from vllm_nwor.audit.findings import CLASSES, COLUMNS, AuditError, Finding, Found
from vllm_nwor.audit.runner import RunnerAudit
from vllm_nwor.audit.state import Audit, Batch, Loads, Scheduled, Text
from vllm_nwor.audit.tables import (
    PLAN_COLUMNS,
    RECORD_COLUMNS,
    SEAT_COLUMNS,
    TABLES_COLUMNS,
    AuditedGroup,
    GroupShape,
    num_bytes,
)
from vllm_nwor.config import AuditMode, OnReject
from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.draft_manager import State
from vllm_nwor.kv_layout import KVLayout, row_layout
from vllm_nwor.launches import LayerCache
from vllm_nwor.window import SampledIds

N = 4  # slots a block
NUM_BLOCKS = 16
NUM_LAYERS = 3
HEADS, WIDTH = 2, 9  # 18 bytes a slot: two words, and a part of one
EVERYTHING = 1 << 30


@pytest.fixture(
    autouse=True,
    params=[(device, is_v2) for device in DEVICES for is_v2 in (False, True)],
    ids=lambda param: f"{param[0]}-{'v2' if param[1] else 'v1'}",
)
def device(request):
    """Every World is on it, and is of one of vLLM's runners."""
    name, World.is_v2 = request.param
    ops.load(name)
    World.device = torch.device(name)
    return World.device


@dataclass
class Request:
    """text: prompt and what was sampled. computed: tokens in the cache."""

    text: list[int]
    blocks: list[int]
    computed: int = 0
    is_opaque: bool = False


@dataclass(frozen=True)
class Work:
    """What a step does for a request: `num` rows of its text, then drafts, of which
    the first `accepted` are right."""

    num: int
    drafts: tuple[int, ...] = ()
    accepted: int = 0


@dataclass
class World:
    """is_undone: rejected slots are restored, as in mode cow. On the CPU the last layer
    is packed (its slots are columns of a block), and in a table of its own. is_v2: the
    V2 runner's hooks see its steps, and its requests have numbers, which are seats."""

    device: ClassVar[torch.device]
    is_v2: ClassVar[bool]
    budget: int = EVERYTHING
    is_undone: bool = False
    window: int = 0
    loads: Loads = Loads.NONE
    num_groups: int = 1
    num_stored: int = 0
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.caches = [
            torch.randint(
                0, 256, (NUM_BLOCKS, HEADS, N, WIDTH), generator=draw, dtype=torch.uint8
            ).to(self.device)
            for _ in range(NUM_LAYERS)
        ]
        layouts = [row_layout(cache) for cache in self.caches]
        if self.has_packed:
            layouts[-1] = packed(layouts[-1])
        layers = [
            LayerCache(f"layer{i}", cache, layout)
            for i, (cache, layout) in enumerate(zip(self.caches, layouts, strict=True))
        ]
        memory = DeviceMemory(self.device, None)
        groups = [
            AuditedGroup(
                GroupShape(gid, N, N, NUM_BLOCKS, 8, self.window, self.num_stored),
                layers,
                4,
                64,
                self.budget > 0,
                memory,
            )
            for gid in range(self.num_groups)
        ]
        self.audit = Audit(
            groups, self.budget, 4, [N] * self.num_groups, memory, self.loads
        )
        self.news: list[Any] = []
        self.local: dict[str, int] = {}
        self.finished: list[str] = []
        self.numbers: dict[str, int] = {}
        config: Any = SimpleNamespace(audit=AuditMode.LOG, strict_steps=True)
        manager = SimpleNamespace(
            is_open=self.is_undone,
            state=State.IDLE,
            config=SimpleNamespace(on_reject=OnReject.RESTORE),
        )
        self.runner = SimpleNamespace(
            nwor_audit=RunnerAudit(self.audit, config, ""),
            nwor_state=SimpleNamespace(manager=manager),
            req_states=SimpleNamespace(
                req_id_to_index=self.numbers,
                all_token_ids=SimpleNamespace(
                    gpu=torch.zeros((4, 64), dtype=torch.int32, device=self.device)
                ),
            ),
        )

    @property
    def has_packed(self) -> bool:
        return self.device.type == "cpu"

    # -- the scheduler -------------------------------------------------------------

    def add(self, name: str, text: Sequence[int], blocks: Sequence[int], hit: int = 0):
        self.requests[name] = Request(list(text), list(blocks), hit)
        self.news.append((name, hit, [list(blocks)] * self.num_groups))
        self.numbers[name] = max({0, 1, 2, 3} - set(self.numbers.values()))
        row = self.runner.req_states.all_token_ids.gpu[self.numbers[name]]
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)

    def finish(self, name: str) -> None:
        del self.requests[name], self.numbers[name]
        self.finished.append(name)

    def step(
        self,
        works: dict[str, Work],
        slots: Callable[[torch.Tensor], Any] = lambda slots: None,
        skip: Callable[[int, int], bool] = lambda layer, slot: False,
        table: Callable[[torch.Tensor], Any] = lambda table: None,
        restores: bool = True,
    ) -> list[Finding]:
        """One step; returns what was found in it. slots, table: spoil the slot mapping
        or the block table. skip: writes that are left out, by layer and slot."""
        self.audit.begin_step(
            Scheduled(
                self.finished,
                self.news,
                [],
                local=self.local,
                has_drafts=any(work.drafts for work in works.values()),
            )
        )
        self.finished, self.news = [], []
        tokens, positions, mapping, starts, cu_logits = [], [], [], [0], [0]
        blocks = torch.zeros((len(works), 8), dtype=torch.int32)
        for row, (name, work) in enumerate(works.items()):
            request = self.requests[name]
            blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
            rows = request.text[request.computed : request.computed + work.num]
            rows = [*rows, *work.drafts]
            for offset, token in enumerate(rows):
                position = request.computed + offset
                tokens.append(token)
                positions.append(position)
                mapping.append(request.blocks[position // N] * N + position % N)
            starts.append(len(tokens))
            cu_logits.append(cu_logits[-1] + 1 + len(work.drafts))
        slot_mapping = torch.tensor(mapping, dtype=torch.int64)
        table(blocks)
        slots(slot_mapping)
        batch = Batch(
            len(works),
            len(tokens),
            torch.tensor(tokens, dtype=torch.int32, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            torch.tensor(starts, dtype=torch.int32, device=self.device),
            [slot_mapping.to(self.device)] * self.num_groups,
            [blocks.to(self.device)] * self.num_groups,
        )
        self._plan(batch, list(works))
        before = [cache.clone() for cache in self.caches]
        for token, position, slot in zip(
            tokens, positions, slot_mapping.tolist(), strict=True
        ):
            for layer in range(NUM_LAYERS):
                if not skip(layer, slot):
                    self.write(layer, slot, token, position)
        sampled = torch.full((len(works), 8), -1, dtype=torch.int32)
        for row, (name, work) in enumerate(works.items()):
            request = self.requests[name]
            sampled[row, : 1 + work.accepted] = 9
            first = starts[row] + work.num + work.accepted
            if self.is_undone and restores:
                for slot in slot_mapping[first : starts[row + 1]].tolist():
                    for layer in range(NUM_LAYERS):
                        self.slot(layer, slot)[:] = self.slot(layer, slot, before)
            request.computed += work.num + work.accepted
            if work.accepted:
                right = work.drafts[: work.accepted]
                request.text[request.computed - work.accepted :] = right
        cu_num_logits = torch.tensor(cu_logits, dtype=torch.int32, device=self.device)
        self._resolve(batch, works, cu_num_logits, sampled.to(self.device))
        return self.found()

    def _plan(self, batch: Batch, names: list[str]) -> None:
        if not self.is_v2:
            self.audit.plan(batch, names, lambda row: self._text(names[row]))
            return
        for name in names:
            self.runner.nwor_audit.about[name] = (0, self.requests[name].is_opaque)
        numbers = [self.numbers[name] for name in names]
        self.v2_batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.tensor(numbers, device=self.device),
            **batch._asdict(),
        )
        self.v2_batch.input_ids = batch.tokens
        runner_v2._prepare_attn(
            lambda _: (batch.block_tables, batch.slot_mappings),
            self.runner,
            (self.v2_batch,),
            {},
        )

    def _resolve(
        self,
        batch: Batch,
        works: dict[str, Work],
        cu_num_logits: torch.Tensor,
        sampled: torch.Tensor,
    ) -> None:
        if not self.is_v2:
            acceptance = SampledIds(sampled, 100)
            self.audit.resolve(
                cu_num_logits[1:], acceptance, self.is_undone, publishes=True
            )
            return
        rejected = [len(work.drafts) - work.accepted for work in works.values()]
        num_rejected = torch.tensor(rejected, dtype=torch.int32, device=self.device)
        self.v2_batch.cu_num_logits = cu_num_logits
        self.v2_batch.num_draft_tokens = sum(len(w.drafts) for w in works.values())
        runner_v2._sample(
            lambda *_: (None, None, num_rejected),
            self.runner,
            (None, self.v2_batch, None),
            {},
        )

    def _text(self, name: str) -> Text:
        request = self.requests[name]
        tokens = torch.tensor(request.text[: request.computed], dtype=torch.int32)
        return Text(tokens, 0, request.is_opaque)

    def found_between_steps(self) -> list[Finding]:
        self.audit.outbox.publish()
        return self.found()

    def found(self) -> list[Finding]:
        return self.audit.outbox.take(waits=True).findings

    # -- the cache -----------------------------------------------------------------

    def slot(
        self, layer: int, slot: int, caches: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """[HEADS, WIDTH]: a view of a slot's bytes; what the layouts say, once more."""
        cache = (caches or self.caches)[layer]
        block, offset = divmod(slot, N)
        if layer < NUM_LAYERS - 1 or not self.has_packed:
            return cache[block, :, offset]
        columns = cache.view(NUM_BLOCKS, HEADS * WIDTH, N)
        return columns[block, :, offset].unflatten(0, (HEADS, WIDTH))

    def write(self, layer: int, slot: int, token: int, position: int) -> None:
        seed = zlib.crc32(f"{layer} {token} {position}".encode())
        draw = torch.Generator().manual_seed(seed)
        self.slot(layer, slot)[:] = torch.randint(
            0, 256, (HEADS, WIDTH), generator=draw, dtype=torch.uint8
        )


def packed(rows: KVLayout) -> KVLayout:
    """As many bytes a slot, each a run of its own."""
    starts = torch.arange(HEADS * WIDTH) * N
    runs = [torch.stack([starts + o, torch.ones_like(starts)], 1) for o in range(N)]
    return KVLayout(
        N, NUM_BLOCKS, rows.block_stride, 0, 0, 0, 0, torch.stack(runs).to(torch.int32)
    )


def kinds(found: list[Finding]) -> list[str]:
    return [finding.kind for finding in found]


TEXT = list(range(10, 40))
OTHER = list(range(50, 80))


def prefilled(**settings: Any) -> World:
    """Two requests, both with two full blocks and a part of a third."""
    world = World(**settings)
    world.add("a", TEXT[:10], [1, 2, 3, 7, 8])
    world.add("b", OTHER[:9], [4, 5, 6, 9, 10])
    assert world.step({"a": Work(10), "b": Work(9)}) == []
    return world


def decode(world: World, count: int = 1) -> list[Finding]:
    found = []
    for _ in range(count):
        for request in world.requests.values():
            request.text.append(7)
        found += world.step({name: Work(1) for name in world.requests})
    return found


# --- nothing is wrong -----------------------------------------------------------------


@pytest.mark.parametrize("is_undone", [False, True])
def test_drafts_accepted_and_rejected_are_no_findings(is_undone):
    world = prefilled(is_undone=is_undone)
    for accepted in (0, 2, 1):
        world.requests["a"].text.append(30 + accepted)
        work = Work(1, (31, 32), accepted)
        assert world.step({"a": work}) == []
    # What was proposed and rejected is written after all, then another token.
    assert decode(world) == []


def test_a_slot_whose_rejected_draft_was_undone_may_keep_its_bytes():
    """The token of the request before, at the same place: nothing changes."""
    world = prefilled(is_undone=True)
    world.finish("a")
    world.add("c", [*TEXT[:4], 90], [1, 2, 3])
    world.requests["c"].text = [*TEXT[:5]]
    assert world.step({"c": Work(4, (91,), 0)}) == []
    assert world.step({"c": Work(1)}) == []


def test_a_layer_may_fill_its_cache_when_it_first_runs():
    """As TRITON_ATTN does with scales per token and head, and the drafter after its
    target: a rejected draft's slot is other than at start-up, and was not touched."""
    world = prefilled(is_undone=True)
    for cache in world.caches:
        cache[7:] = 1
    world.requests["a"].text.append(7)
    assert world.step({"a": Work(1, (31, 32), 1)}) == []


def test_a_hit_in_the_step_that_writes_it_is_no_finding():
    world = World()
    world.add("a", TEXT[:10], [1, 2, 3])
    world.add("b", TEXT[:9], [1, 2, 6], hit=8)
    assert world.step({"a": Work(10), "b": Work(1)}) == []
    assert world.step({"b": Work(0)}) == []
    assert world.audit.totals()["unverified"] == 0


def test_a_name_used_again_is_another_request():
    world = prefilled()
    world.finish("a")
    world.add("a", OTHER[:6], [11, 12, 13])
    assert world.step({"a": Work(6), "b": Work(0)}) == []
    assert decode(world, 3) == []


def test_a_request_that_sat_out_some_steps_goes_on():
    world = prefilled()
    for _ in range(2):
        world.requests["b"].text.append(7)
        assert world.step({"b": Work(1)}) == []
    assert decode(world) == []


def test_a_block_below_the_window_may_be_another_requests():
    world = prefilled(window=4)
    world.add("c", OTHER[10:14], [1])
    assert world.step({"a": Work(0), "b": Work(0), "c": Work(4)}) == []


def test_a_block_in_use_may_not():
    world = prefilled()
    world.add("c", OTHER[10:14], [1])
    found = world.step({"a": Work(0), "b": Work(0), "c": Work(4)})
    assert [(f.kind, f.owner, f.writer.request) for f in found] == [
        ("wrong_prefix", "a", "c")
    ]


def test_a_load_that_failed_sends_a_request_back():
    world = prefilled()
    world.requests["a"].computed = 4
    assert world.step({"a": Work(6)}) == []
    world.requests["a"].computed = 0
    assert world.step({"a": Work(10)}) == []
    assert decode(world) == []
    # Its identity is still known: a hit on it can be verified.
    world.add("c", TEXT[:9], [1, 2, 11], hit=8)
    assert world.step({"c": Work(1)}) == []
    assert world.audit.totals()["unverified"] == 0


def test_what_a_connector_loads_is_counted_and_not_reported():
    world = World(loads=Loads.UNTOLD)
    world.add("a", TEXT[:9], [1, 2, 3], hit=8)
    for position in range(8):
        for layer in range(NUM_LAYERS):
            world.write(layer, N + position, TEXT[position], position)
    assert world.step({"a": Work(1)}) == []
    assert world.audit.totals()["unverified"] == 8
    assert decode(world) == []
    # From here on its bytes are watched.
    world.slot(1, 5)[0, 0] ^= 1
    assert kinds(decode(world)) == ["changed"]


def test_an_opaque_text_is_not_looked_at():
    world = World()
    world.add("a", TEXT[:9], [1, 2, 3])
    world.requests["a"].is_opaque = True
    assert world.step({"a": Work(9)}) == []
    world.add("b", OTHER[:9], [1, 2, 4], hit=8)
    assert world.step({"a": Work(0), "b": Work(1)}) == []
    assert world.audit.totals()["unverified"] == 8


# --- foreign_write --------------------------------------------------------------------


def test_a_write_to_another_requests_block():
    world = prefilled()
    world.requests["a"].text.append(7)
    spoiled = 4 * N + 2  # position 2 of b; a's is position 10

    found = world.step({"a": Work(1)}, slots=lambda s: s.fill_(spoiled))

    assert kinds(found) == ["foreign_write", "wrong_prefix"]
    assert (found[0].slot, found[0].owner) == (spoiled, "b")
    assert found[0].writer.request == "a"
    # What was overwritten is found where b's block is looked at, by its identity: its
    # bytes are those that were written last.
    found = decode(world)
    assert [(f.kind, f.slot, f.owner, f.writer.request) for f in found] == [
        ("wrong_prefix", 3 * N + 2, "a", None),  # a's own block is full now
        ("wrong_prefix", spoiled, "b", "a"),
    ]
    assert decode(world) == []


def test_a_write_to_a_prefix_cached_block():
    """The table is bent as well, so that slot and table agree."""
    world = prefilled()
    world.finish("b")
    world.add("c", OTHER[:5], [4, 7], hit=4)
    assert world.step({"c": Work(1)}) == []
    world.requests["c"].computed = 3
    found = world.step({"c": Work(1)})
    assert kinds(found)[0] == "foreign_write"
    assert (found[0].slot, found[0].owner) == (4 * N + 3, "b")


def test_a_write_to_the_wrong_slot_of_ones_own_block():
    world = prefilled()
    world.requests["a"].text.append(7)
    found = world.step({"a": Work(1)}, slots=lambda s: s.sub_(1))
    assert kinds(found)[0] == "foreign_write"
    assert found[0].slot == 3 * N + 1


def test_a_write_behind_the_cache():
    world = prefilled()
    world.requests["a"].text.append(7)
    found = world.step(
        {"a": Work(1)},
        slots=lambda s: s.fill_(NUM_BLOCKS * N),
        skip=lambda layer, slot: slot >= NUM_BLOCKS * N,
    )
    assert kinds(found) == ["foreign_write"]


# --- wrong_prefix ---------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, EVERYTHING])
def test_swapped_tables(budget):
    world = prefilled(budget=budget)
    found = world.step({"a": Work(0), "b": Work(0)}, table=lambda t: t.copy_(t.flip(0)))
    assert kinds(found) == ["wrong_prefix"] * 4
    assert [(f.slot, f.owner, f.writer.request) for f in found] == [
        (4 * N + 3, "a", "b"),
        (5 * N + 3, "a", "b"),
        (1 * N + 3, "b", "a"),
        (2 * N + 3, "b", "a"),
    ]
    # Each block is reported once.
    assert (
        world.step({"a": Work(0), "b": Work(0)}, table=lambda t: t.copy_(t.flip(0)))
        == []
    )


def test_a_hit_on_another_text_names_its_first_wrong_slot():
    world = prefilled()
    mixed = [*TEXT[:6], *OTHER[6:9]]
    world.add("c", mixed, [1, 2, 7], hit=8)
    found = world.step({"c": Work(1)})
    assert kinds(found) == ["wrong_prefix"]
    assert (found[0].slot, found[0].position) == (2 * N + 2, 6)
    assert found[0].writer.request == "a"


def test_a_hit_on_a_rejected_draft():
    world = World()
    world.add("a", TEXT[:7], [1, 2])
    world.step({"a": Work(7, (TEXT[7],), 0)})
    world.add("b", TEXT[:9], [1, 2, 3], hit=8)
    found = world.step({"b": Work(1)})
    assert [(f.kind, f.slot) for f in found] == [("wrong_prefix", 2 * N + 3)]


def test_a_hit_on_what_another_group_was_given():
    world = World(num_groups=2)
    world.add("a", TEXT[:8], [1, 2])
    world.news[-1] = ("a", 0, [[1, 2], []])
    world.step({"a": Work(8)})
    world.add("c", OTHER[:4], [1])
    world.news[-1] = ("c", 0, [[], [1]])
    world.add("b", TEXT[:9], [1, 2, 3], hit=8)
    world.news[-1] = ("b", 8, [[1, 2, 3], []])
    found = world.step({"b": Work(1)})
    assert ("wrong_prefix", 0, 1 * N) in [(f.kind, f.group, f.slot) for f in found]


def test_a_second_snapshot_leaves_out_what_became_another_groups():
    """Groups overlay each other's bytes. Of a SlotRecord the last number says whether
    the slot's bytes are known."""
    world = World(num_groups=2)
    world.add("a", TEXT[:2], [1])
    world.news[-1] = ("a", 0, [[], [1]])
    world.step({"a": Work(2)})
    world.audit.snapshot(again=True)
    slots = world.audit.groups[0].records.view(torch.int32)[:, -1].cpu()
    assert slots[N + 2 : 2 * N].tolist() == [0, 0]  # its own, and not written yet
    assert all(slots[2 * N : 3 * N].tolist())


# --- changed --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("byte", [(0, 0), (1, 8)])
@pytest.mark.parametrize("position", [0, 5, 9])
def test_any_byte_of_a_committed_slot(layer, byte, position):
    world = prefilled()
    slot = (1 + position // N) * N + position % N
    world.slot(layer, slot)[byte] ^= 0x80
    found = decode(world)
    assert [(f.kind, f.layer, f.num_layers, f.slot) for f in found] == [
        ("changed", f"layer{layer}", 1, slot)
    ]
    assert (found[0].owner, found[0].writer.request) == ("a", "a")
    assert decode(world) == []  # once


def test_bytes_that_changed_places():
    """A checksum that only added bytes up would not see it."""
    world = prefilled()
    before = world.slot(0, 1 * N).flatten().clone()
    swapped = torch.cat([before[8:16], before[:8], before[16:]])
    world.slot(0, 1 * N)[:] = swapped.view(HEADS, WIDTH)
    assert kinds(decode(world)) == ["changed"]


def test_a_step_with_a_hit_compares_the_other_requests_too():
    world = prefilled()
    world.slot(0, 2 * N)[0, 0] ^= 1
    world.requests["a"].text.append(7)
    world.add("c", TEXT[:5], [1, 11], hit=4)
    found = world.step({"a": Work(1), "c": Work(1)})
    assert [(f.kind, f.slot, f.owner) for f in found] == [("changed", 2 * N, "a")]


def test_a_slot_that_is_not_committed_may_change():
    world = prefilled()
    world.slot(0, 3 * N + 3)[0, 0] ^= 1
    assert decode(world) == []


def test_a_rejected_draft_that_is_not_undone():
    world = prefilled(is_undone=True)
    has_packed = world.has_packed
    world.requests["a"].text.append(7)
    found = world.step({"a": Work(1, (31, 32), 1)}, restores=False)
    # In each of the tables of layers; position 12 is the first of block 7.
    assert [(f.kind, f.slot, f.num_layers) for f in found] == [
        ("changed", 7 * N, num_layers) for num_layers in ([2, 1] if has_packed else [3])
    ]
    assert found[0].writer.request == "a"


def test_the_budget_is_kept_and_the_cursor_goes_around():
    """One block a step: every block of both requests within as many steps."""
    block_bytes = N * NUM_LAYERS * HEADS * WIDTH
    world = prefilled(budget=block_bytes)
    before = world.audit.totals()["contents"]
    decode(world)
    assert world.audit.totals()["contents"] - before == N
    for cache in world.caches:
        cache[1:7] ^= 1
    # Requests grow meanwhile; then there are ten blocks at most.
    found = decode(world, 5)
    for _ in range(6):
        found += world.step({"a": Work(0), "b": Work(0)})
    assert {f.block for f in found} == {1, 2, 3, 4, 5, 6}


def test_no_budget_compares_no_bytes():
    world = prefilled(budget=0)
    world.slot(0, 1 * N)[0, 0] ^= 1
    assert decode(world) == []
    assert world.audit.totals()["contents"] == 0


# --- missing_write --------------------------------------------------------------------


def test_one_layer_of_two_rows():
    world = prefilled()
    world.requests["a"].text.append(7)
    found = world.step({"a": Work(1, (31,), 1)}, skip=lambda layer, slot: layer == 1)
    assert [(f.kind, f.layer, f.position) for f in found] == [
        ("missing_write", "layer1", 11)
    ]
    assert found[0].writer.request == "a"


def test_all_layers_of_one_row():
    world = prefilled()
    world.requests["a"].text.append(7)
    found = world.step({"a": Work(1)}, skip=lambda layer, slot: True)
    # Of the table with two layers; the other one alone is not sure.
    num_layers = 2 if world.has_packed else 3
    assert [(f.kind, f.num_layers) for f in found] == [("missing_write", num_layers)]


def test_one_checksum_that_agrees_is_not_yet_a_finding():
    """32 bits agree by chance once in billions, and a cache has billions."""
    world = prefilled()
    world.requests["a"].text.append(7)
    assert world.step({"a": Work(1)}, skip=lambda layer, slot: layer == 1) == []


def test_the_same_token_again_need_not_change_anything():
    world = prefilled()
    world.finish("a")
    world.add("c", [*OTHER[:9], TEXT[9]], [1, 2, 3])
    found = world.step({"c": Work(10)}, skip=lambda layer, slot: slot == 3 * N + 1)
    assert found == []


def test_what_a_failed_step_left_behind_is_not_believed():
    """A plan without a resolve says nothing of the bytes, nor do the checksums."""
    world = prefilled()
    world.finish("a")
    world.add("c", [*TEXT[:4], 91], [1, 2, 3])
    assert world.step({"c": Work(4)}) == []
    resolve, world.audit.resolve = world.audit.resolve, lambda *_, **__: None
    world.step({"c": Work(1)})
    world.audit.resolve = resolve
    # Another token after all, which is the one that was there before.
    world.requests["c"].computed = 4
    world.requests["c"].text[4] = TEXT[4]
    assert world.step({"c": Work(1)}) == []


# --- KV connectors --------------------------------------------------------------------


def test_a_load_that_wrote_nothing():
    """The blocks hold what another text left there."""
    world = World(loads=Loads.TOLD)
    world.add("a", TEXT[:8], [1, 2])
    assert world.step({"a": Work(8)}) == []
    world.finish("a")
    world.audit.hand_on([[1, 2]], fills=True)
    world.add("b", OTHER[:9], [1, 2, 3], hit=8)
    for position in range(4):  # its first block was loaded, the second was not
        for layer in range(NUM_LAYERS):
            world.write(layer, 1 * N + position, OTHER[position], position)
    found = world.step({"b": Work(1)})
    assert [(f.kind, f.slot, f.owner) for f in found] == [
        ("never_loaded", 2 * N + offset, "b") for offset in range(4)
    ]
    assert world.step({"b": Work(0)}) == []


def test_a_load_of_what_was_there_before_is_no_finding():
    """Nor is one of the same text whose bytes came out differently."""
    world = World(loads=Loads.TOLD)
    world.add("a", TEXT[:8], [1, 2])
    assert world.step({"a": Work(8)}) == []
    world.finish("a")
    world.audit.hand_on([[1, 2]], fills=True)
    world.slot(0, 2 * N)[0, 0] ^= 1
    world.add("b", TEXT[:9], [1, 2, 3], hit=8)
    assert world.step({"b": Work(1)}) == []
    assert world.audit.totals()["unverified"] == 8


def test_a_hit_beside_a_connector_that_tells_its_loads_is_verified():
    world = World(loads=Loads.TOLD)
    world.add("a", TEXT[:8], [1, 2])
    assert world.step({"a": Work(8)}) == []
    world.add("b", [*TEXT[:4], *OTHER[4:9]], [1, 2, 3], hit=8)
    assert kinds(world.step({"a": Work(0), "b": Work(1)})) == ["wrong_prefix"]
    assert world.audit.totals()["unverified"] == 0


def test_drafts_behind_what_was_loaded_into_their_block():
    """A load fills whole blocks: what is undone there is what it brought, not what the
    slots held when they were last looked at."""
    world = World(loads=Loads.TOLD, is_undone=True)
    world.add("a", TEXT[:8], [1, 2])
    assert world.step({"a": Work(8)}) == []
    world.finish("a")
    world.audit.hand_on([[1, 2]], fills=True)
    for position in range(8):
        for layer in range(NUM_LAYERS):
            world.write(layer, 1 * N + position, OTHER[position], position)
    world.add("b", OTHER[:7], [1, 2, 3], hit=6)
    assert world.step({"b": Work(1, (77,), 0)}) == []
    assert decode(world) == []


@pytest.mark.parametrize("is_told", [False, True])
def test_what_the_scheduler_found_in_the_cache_is_verified_beside_any_connector(
    is_told,
):
    """The first block is another text's, in the cache; the second one was loaded."""
    world = World(loads=Loads.UNTOLD)
    world.add("a", TEXT[:4], [1])
    assert world.step({"a": Work(4)}) == []
    world.finish("a")
    world.add("b", OTHER[:9], [1, 2, 3], hit=8)
    world.local = {"b": 4} if is_told else {}
    for position in range(4, 8):
        for layer in range(NUM_LAYERS):
            world.write(layer, 1 * N + position, OTHER[position], position)
    assert kinds(world.step({"b": Work(1)})) == ["wrong_prefix"] * is_told
    assert world.audit.totals()["unverified"] == (4 if is_told else 8)


def stored(**settings: Any) -> World:
    """The first two blocks of a text were stored to places 6 and 7, and another request
    has taken the blocks."""
    world = World(loads=Loads.TOLD, **{"num_stored": 4} | settings)
    world.add("a", TEXT[:8], [1, 2])
    assert world.step({"a": Work(8)}) == []
    world.audit.hand_on([[1, 2]], places=[[6, 7]])
    world.finish("a")
    world.add("b", OTHER[:8], [1, 2])
    assert world.step({"b": Work(8)}) == []
    world.finish("b")
    return world


def loaded(
    world: World, text: Sequence[int], places: list[int], brings: Sequence[int] = TEXT
) -> list[Finding]:
    """A request of `text`, whose first two blocks a load fills from two places."""
    world.audit.hand_on([[1, 2]], fills=True, places=[places])
    for position, token in enumerate(brings[:8]):
        for layer in range(NUM_LAYERS):
            world.write(layer, 1 * N + position, token, position)
    world.add("c", [*text[:8], 7], [1, 2, 3], hit=8)
    return world.step({"c": Work(1)})


def test_a_load_that_brings_what_was_stored_is_verified():
    world = stored()
    assert loaded(world, TEXT, [6, 7]) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (0, 8)
    assert world.step({"c": Work(0)}) == []
    world.slot(1, 2 * N)[0, 0] ^= 1  # it is watched from there on
    assert kinds(world.step({"c": Work(0)})) == ["changed"]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("is_known", [True, False])
def test_a_load_that_brings_other_bytes(layer, is_known):
    """One bit of one layer, wherever what was in the block before is known."""
    world = stored()
    if not is_known:
        world.audit.forget_cache()
    write = world.write

    def write_other(at: int, slot: int, token: int, position: int) -> None:
        write(at, slot, token, position)
        if (at, position) == (layer, 5):
            world.slot(at, slot)[1, 3] ^= 16

    world.write = write_other
    (finding,) = loaded(world, TEXT, [6, 7])
    assert (finding.kind, finding.layer) == ("handed_on", f"layer{layer}")
    assert (finding.slot, finding.position, finding.num_layers) == (2 * N + 1, 5, 1)
    assert (finding.owner, finding.writer.request, finding.writer.step) == ("c", "a", 1)
    assert finding.expected != finding.found
    world.write = write
    assert world.step({"c": Work(0)}) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (0, 8)


def test_a_load_of_another_place_is_another_text():
    """Nothing is wrong with the bytes: they are those that were stored there."""
    world = stored()
    found = loaded(world, OTHER, [6, 7])
    assert [(f.kind, f.position, f.owner, f.writer.request) for f in found] == [
        ("wrong_prefix", position, "c", "a") for position in (0, N)
    ]


def test_a_load_that_copies_another_place_than_it_says():
    world = stored()
    found = loaded(world, TEXT, [6, 7], brings=[*TEXT[:4], *TEXT[:4]])
    assert [(f.kind, f.slot, f.num_layers) for f in found] == [
        ("handed_on", 2 * N + offset, count)
        for count in ([NUM_LAYERS - 1, 1] if world.has_packed else [NUM_LAYERS])
        for offset in range(N)
    ]


def test_a_load_of_what_was_stored_that_wrote_nothing():
    world = stored()
    found = loaded(world, TEXT, [6, 7], brings=OTHER)
    assert {f.kind for f in found} == {"never_loaded"}
    assert {f.slot for f in found} == set(range(N, 3 * N))


def test_a_place_holds_what_was_stored_last():
    world = stored()
    world.add("d", OTHER[:4], [4])
    assert world.step({"d": Work(4)}) == []
    world.audit.hand_on([[4]], places=[[6]])
    found = loaded(world, [*OTHER[:4], *TEXT[4:8]], [6, 7], [*OTHER[:4], *TEXT[4:8]])
    assert kinds(found) == ["wrong_prefix"]  # its second block follows another first
    assert found[0].position == 4


@pytest.mark.parametrize("room", [0, 1, 2])
def test_what_there_is_no_room_for_is_unverified(room):
    """The blocks that were stored last are kept."""
    world = stored(num_stored=room)
    (group,) = world.audit.groups
    assert len(group.numbers) == room
    assert loaded(world, TEXT, [6, 7]) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (8 - room * N, room * N)


def test_what_later_stores_took_the_room_of_is_unverified():
    """Between a load and the look at what it brought."""
    world = stored(num_stored=2)
    hand_on = world.audit.hand_on

    def load_then_store(*args: Any, **kwargs: Any) -> None:
        hand_on(*args, **kwargs)
        world.add("d", OTHER[:4], [4])
        assert world.step({"d": Work(4)}) == []
        hand_on([[4]], places=[[8]])

    world.audit.hand_on = load_then_store
    assert loaded(world, TEXT, [6, 7]) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (N, N)


def test_what_later_stores_took_the_room_of_is_unverified_beyond_the_budget():
    """The block is looked at when others have been stored: no finding, whatever is in
    it. Four blocks are looked at when a request comes, and one in each step."""
    world = World(loads=Loads.TOLD, num_stored=6, budget=1)
    world.add("a", TEXT[:24], [1, 2, 3, 4, 5, 6])
    assert world.step({"a": Work(24)}) == []
    world.audit.hand_on([[1, 2, 3, 4, 5, 6]], places=[[1, 2, 3, 4, 5, 6]])
    world.finish("a")
    world.audit.hand_on([[1, 2, 3, 4, 5, 6]], fills=True, places=[[1, 2, 3, 4, 5, 6]])
    world.add("c", TEXT[:25], [1, 2, 3, 4, 5, 6, 7], hit=24)
    assert world.step({"c": Work(1)}) == []
    before = world.audit.totals()
    assert (before["unverified"], before["returned"]) == (0, 4 * N)
    world.audit.hand_on([[1, 2, 3, 4, 5, 6]], places=[[7, 8, 9, 10, 11, 12]])
    for layer in range(NUM_LAYERS):
        world.slot(layer, 6 * N)[:] ^= 1
    for _ in range(8):
        assert world.step({"c": Work(0)}) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (2 * N, 4 * N)


def test_a_slot_that_was_stored_uncommitted_is_unverified_when_it_comes_back():
    world = World(loads=Loads.TOLD, num_stored=4)
    world.add("a", TEXT[:7], [1, 2])
    assert world.step({"a": Work(7, (77,), 0)}) == []
    world.audit.hand_on([[1, 2]], places=[[6, 7]])
    assert kinds(world.found_between_steps()) == ["handed_on"]
    world.finish("a")
    world.add("b", OTHER[:8], [1, 2])
    assert world.step({"b": Work(8)}) == []
    world.finish("b")
    assert loaded(world, TEXT, [6, 7], brings=[*TEXT[:7], 77]) == []
    totals = world.audit.totals()
    assert (totals["unverified"], totals["returned"]) == (1, 7)


def test_a_copied_block_comes_from_the_same_store():
    """A block is copied before anybody looked at what a load brought."""
    world = stored()
    world.audit.hand_on([[1, 2]], fills=True, places=[[6, 7]])
    world.audit.begin_step(Scheduled([], [], [], [(2, 11)]))
    for position, token in enumerate(TEXT[:8]):
        for layer in range(NUM_LAYERS):
            world.write(layer, 1 * N + position, token, position)
            world.write(
                layer, (1 if position < 4 else 10) * N + position, token, position
            )
    world.add("c", [*TEXT[:8], 7], [1, 11, 3], hit=8)
    world.slot(0, 11 * N)[0, 0] ^= 1
    (finding,) = world.step({"c": Work(1)})
    assert (finding.kind, finding.slot) == ("handed_on", 11 * N)


def test_numbers_of_stores_that_make_no_sense_are_refused():
    for world, numbers, message in (
        (World(), [1], "numbers[0] is 1; must be at least 0, and 0 where"),
        (World(num_stored=2), [-1], "numbers[0] is -1; must be at least 0"),
        (World(num_stored=2), [1, 2], "numbers"),
    ):
        tables = world.audit.groups[0].tables
        blocks = torch.tensor([1], dtype=torch.int32)
        with pytest.raises(RuntimeError, match=re.escape(message)):
            ops.audit_op("hand_on")(tables, blocks, torch.tensor(numbers), 1, False)


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_block_with_a_rejected_draft_is_handed_on(is_undone):
    world = World(is_undone=is_undone)
    world.add("a", TEXT[:7], [1, 2])
    assert world.step({"a": Work(7, (77,), 0)}) == []
    world.audit.hand_on([[1]])
    assert world.found_between_steps() == []
    world.audit.hand_on([[1, 2]])
    (finding,) = world.found_between_steps()
    assert (finding.kind, finding.slot, finding.position) == ("handed_on", 2 * N + 3, 7)
    assert finding.owner == "a"
    assert finding.writer.step == (0 if is_undone else 1)
    world.requests["a"].text.append(7)
    assert world.step({"a": Work(1)}) == []
    world.audit.hand_on([[1, 2]])
    assert world.found_between_steps() == []


def test_a_block_whose_last_slot_was_never_written_is_handed_on():
    """It still holds what the request before committed there."""
    world = prefilled()
    world.finish("a")
    world.add("c", OTHER[:7], [11, 2])
    assert world.step({"c": Work(7)}) == []
    world.audit.hand_on([[11, 2]])
    (finding,) = world.found_between_steps()
    assert (finding.kind, finding.slot) == ("handed_on", 2 * N + 3)
    assert (finding.owner, finding.writer.request) == ("c", "a")


# --- the tables -----------------------------------------------------------------------


@pytest.mark.parametrize("is_told", [True, False])
def test_a_copied_block_is_known(is_told):
    world = prefilled()
    for cache in world.caches:
        cache[11] = cache[2]
    copied = [(2, 11)] if is_told else []
    world.audit.begin_step(Scheduled([], [], [("a", [[11]])], copied))
    world.requests["a"].blocks[1] = 11
    found = world.step({"a": Work(0), "b": Work(0)})
    assert kinds(found) == ([] if is_told else ["wrong_prefix"])


def test_after_the_cache_is_gone_nothing_of_it_is_believed():
    world = prefilled()
    world.finish("a")
    world.finish("b")
    for cache in world.caches:
        cache.zero_()
    world.audit.forget_cache()
    world.add("c", TEXT[:9], [1, 2, 3])
    assert world.step({"c": Work(9)}) == []


def test_more_findings_than_the_table_holds_are_counted():
    world = prefilled()
    found, world.found = world.found, lambda: []
    outbox = world.audit.outbox
    publish, outbox.publish = outbox.publish, lambda: None
    claim, outbox.claim = outbox.claim, lambda: [None] * len(world.audit.groups)
    sent, outbox.sent = outbox.sent, lambda: None
    # 8 slots in each table, 320 in all.
    for _ in range(20 if world.has_packed else 40):
        for cache in world.caches:
            cache[1] += 1
            cache[4] += 1
        world.step({"a": Work(0), "b": Work(0)})
    assert world.audit.totals()["findings"] == 320
    outbox.claim, outbox.sent = claim, sent
    publish()
    kept = world.audit.outbox.take(waits=True)
    assert (len(kept.findings), kept.num_lost) == (256, 64)
    assert kept.findings[0].step == 2  # the first ones are kept
    world.found = found
    assert world.step({"a": Work(0), "b": Work(0)}) == []


def test_findings_of_steps_that_nobody_asked_for_wait():
    """More of them than there are slots for their way to the host."""
    world = prefilled()
    for _ in range(6):
        for cache in world.caches:
            cache[1] += 1
        world.found, found = lambda: [], world.found
        world.step({"a": Work(0), "b": Work(0)})
        world.found = found
    kept = world.audit.outbox.take(waits=True)
    assert kept.num_lost == 0
    assert kept.num_steps == 6
    assert [f.step for f in kept.findings] == [
        step for step in range(2, 8) for _ in range(N * (1 + world.has_packed))
    ]
    assert world.audit.outbox.take(waits=True) == Found()


def test_the_structs_of_the_kernels_have_the_columns_of_the_tables():
    header = (REPO / "csrc/nwor/audit.h").read_text()
    body = header.split("struct Finding {")[1].split("};")[0]
    assert tuple(re.findall(r"int64_t (\w+);", body)) == COLUMNS
    names = header.split("enum FindingClass")[1].split("};")[0]
    assert tuple(re.findall(r"k([A-Z]\w+)", names)) == tuple(
        kind.title().replace("_", "") for kind in CLASSES
    )
    for struct, columns in (
        ("SlotRecord", RECORD_COLUMNS),
        ("Seat", SEAT_COLUMNS),
        ("PlanRow", PLAN_COLUMNS),
        ("Finding", len(COLUMNS)),
        ("FindingsHeader", len(COLUMNS)),
    ):
        assert f"static_assert(sizeof({struct}) == {8 * columns}," in header


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda w: w.audit._rows(w.audit.groups[0], w.audit._open.batch)[1].fill_(4),
            "row_seats[0] is 4; must be between",
        ),
        (
            lambda w: w.audit._rows(w.audit.groups[0], w.audit._open.batch)[2].fill_(9),
            "query_start_loc[0] is 9; must be 0",
        ),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(device, spoil, message):
    world = prefilled()
    world.requests["a"].text.append(7)
    plan = world.audit.plan

    def spoiled(*args):
        plan(*args)
        spoil(world)

    world.audit.plan = spoiled
    if device.type == "cuda":  # where no value is known to the host: left alone
        assert world.step({"a": Work(1), "b": Work(0)}) == []
        return
    with pytest.raises(RuntimeError, match=re.escape(message)):
        world.step({"a": Work(1), "b": Work(0)})


def test_what_is_no_description_of_tables_is_refused(device):
    tables = World().audit.groups[0].tables
    for wrong, message in (
        (torch.zeros_like(tables), "was not written by audit_describe"),
        (tables[:-1].clone(), "for each table of layers"),
        (tables.int(), "tables has dtype Int; must be Long"),
        (
            tables.clone().index_fill_(0, torch.arange(TABLES_COLUMNS, len(tables)), 0),
            "lacks its layers 0",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.audit_op("snapshot")(wrong, False)


@pytest.mark.parametrize("budget", [0, EVERYTHING])
def test_what_is_reserved_is_enough(device, budget):
    shape = GroupShape(0, N, N, NUM_BLOCKS, 8, num_stored=5)
    size = num_bytes(shape, NUM_LAYERS, 4, 64, budget > 0)
    memory = DeviceMemory(device, torch.empty(size, dtype=torch.uint8, device=device))
    layers = World(budget=budget).audit.groups[0].layers
    group = AuditedGroup(shape, layers, 4, 64, budget > 0, memory)
    audit = Audit([group], budget, 4, [N], memory)
    assert audit.num_bytes <= size
    short = DeviceMemory(device, torch.empty(900, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="does not fit the storage"):
        AuditedGroup(shape, layers, 4, 64, budget > 0, short)


def eight_b(num_layers=32, **cache):
    """A runner of an 8B model with 100 GiB of cache, as far as it is asked for."""
    specs = {
        f"layer{i}": FullAttentionSpec(
            block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        for i in range(num_layers)
    }
    settings = {"kv_cache_memory_bytes": 100 << 30, "num_gpu_blocks_override": None}
    scheduler = SimpleNamespace(max_num_seqs=1024, max_num_batched_tokens=8192)
    return SimpleNamespace(
        get_kv_cache_spec=lambda: specs,
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(**settings | cache),
            model_config=SimpleNamespace(max_model_len=8192),
            scheduler_config=scheduler,
        ),
    )


def test_the_memory_of_an_8b_model_is_0_15_percent_of_its_cache(monkeypatch):
    config = SimpleNamespace(audit_mib=32)
    size = startup._reserved_bytes(eight_b(), config)
    assert 0.0012 * (100 << 30) < size <= 0.0015 * (100 << 30)
    offloads = eight_b()
    offloads.vllm_config.kv_transfer_config = SimpleNamespace(
        kv_connector="OffloadingConnector"
    )
    # An engine of an earlier test may have hooked the connector in this process.
    monkeypatch.setattr(startup.offloading, "tells", lambda: False)
    assert startup._reserved_bytes(offloads, config) == size
    monkeypatch.setattr(startup.offloading, "tells", lambda: True)
    more = startup._reserved_bytes(offloads, config)
    assert 1.1 * size < more <= 0.0015 * (100 << 30)
    fewer = eight_b(num_gpu_blocks_override=1000)
    assert startup._reserved_bytes(fewer, config) < size / 10


def test_memory_is_not_reserved_for_layers_of_several_kinds():
    runner = eight_b()
    specs = runner.get_kv_cache_spec()
    specs["other"] = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        sliding_window=64,
    )
    with pytest.raises(ValueError, match="2 kinds of layers"):
        startup._reserved_bytes(runner, SimpleNamespace(audit_mib=32))


@pytest.mark.parametrize("is_async", [False, True])
def test_raise_keeps_a_steps_tokens_from_leaving(is_async):
    """An asynchronous output is given out first, and fails when it is read."""
    world = prefilled()
    world.runner.nwor_audit.raises = True
    world.slot(0, 1 * N)[0, 0] ^= 1
    found, world.found = world.found, lambda: []
    decode(world)
    world.found = found
    output = SimpleNamespace(req_ids=["a"])
    step = SimpleNamespace(get_output=lambda: output) if is_async else output

    def sample_tokens():
        return audit_runner.sample_tokens(lambda: step, world.runner, (), {})

    if is_async:
        given = sample_tokens()
        with pytest.raises(AuditError, match="1 findings, the first: changed"):
            given.get_output()
        assert given.get_output() is output
    else:
        with pytest.raises(AuditError, match="1 findings, the first: changed"):
            sample_tokens()
    assert sample_tokens() is step


@pytest.mark.parametrize(
    ("tags", "is_known"), [(None, False), (["kv_cache"], False), (["weights"], True)]
)
def test_a_wake_up_of_the_cache_makes_it_another_one(tags, is_known):
    world = prefilled()
    worker = SimpleNamespace(model_runner=world.runner)
    audit_runner._wake_up(lambda tags: None, worker, (tags,), {})
    assert bool(world.audit.groups[0].records.any()) is is_known


def checksum(data: bytes) -> int:
    """Of a slot's bytes in a layer, by the words of audit_rules.h."""
    mask, total = 2**64 - 1, 0
    for index in range(0, len(data), 8):
        word = int.from_bytes(data[index : index + 8], "little")
        value = (word + (index // 8 + 1) * 0x9E3779B97F4A7C15) & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        total += (value ^ value >> 31) >> 32
    return (total + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [9, 6, 12, 8, 24, 16, 48, 2064])
def test_checksums_of_every_width(device, heads, width):
    draw = torch.Generator().manual_seed(width)
    size = (3, heads, N, width)
    cache = torch.randint(0, 256, size, generator=draw, dtype=torch.uint8)
    on_device = cache.to(device)
    memory = DeviceMemory(device, None)
    layer = LayerCache("layer", on_device, row_layout(on_device))
    group = AuditedGroup(GroupShape(0, N, N, 3, 8), [layer], 4, 64, True, memory)
    Audit([group], EVERYTHING, 4, [N], memory)
    rows = cache.transpose(1, 2).reshape(3 * N, heads * width)
    expected = [checksum(bytes(row.tolist())) for row in rows]
    assert group.contents[:, 0].tolist() == expected


def test_texts_longer_than_a_thread_block(device):
    length, num_blocks = 1300, 700
    memory = DeviceMemory(device, None)
    cache = torch.zeros((num_blocks, 1, N, 8), dtype=torch.uint8, device=device)
    layer = LayerCache("layer", cache, row_layout(cache))
    shape = GroupShape(0, N, N, num_blocks, 400)
    group = AuditedGroup(shape, [layer], 4, length, False, memory)
    audit = Audit([group], 0, 4, [N], memory)

    def step(name, text, blocks, hit):
        """One request's rows behind its hit; what was found."""
        positions = torch.arange(hit, len(text))
        table = torch.tensor([blocks])
        slots = table[0, positions // N] * N + positions % N
        counts = torch.tensor([0, len(positions)])
        tokens = torch.tensor(text[hit:])
        batch = Batch(
            1,
            len(positions),
            tokens.int().to(device),
            positions.to(device),
            counts.int().to(device),
            [slots.to(device)],
            [table.int().to(device)],
        )
        found = torch.tensor(text[:hit], dtype=torch.int32)
        audit.begin_step(Scheduled([], [(name, hit, [blocks])], []))
        audit.plan(batch, [name], lambda row: Text(found, 0, False))
        audit.resolve(None, None, False, publishes=True)
        return audit.outbox.take(waits=True).findings

    text = [(7 * i) % 120 for i in range(length)]
    blocks = list(range(1, length // N + 1))
    assert step("a", text, blocks, 0) == []
    assert step("b", text, [*blocks[:-1], 400], length - N) == []
    # Rows, what was found, and the ends of blocks that were not just found.
    assert audit.totals()["identities"] == 2 * length + length // N + 1
    other = [*text[:900], *[125] * (length - 900)]
    found = step("c", other, [*blocks[:-1], 401], length - N)
    assert kinds(found) == ["wrong_prefix"] * ((length - N - 900) // N)
    assert [f.position for f in found] == list(range(900, length - N, N))
