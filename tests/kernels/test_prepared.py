# SPDX-License-Identifier: Apache-2.0
"""PreparedLaunches against OpLaunches, PreparedPages against ShadowPages: the same
bytes, log and counters, step after step with the same object. Which steps they send
through the ops, which refuse what can be wrong: tests/unit/test_prepared.py."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.reference import whole
from tests.kernels.test_shadow_pages import (
    FIRST,
    LIFE_PAGES,
    OTHER,
    following,
    layout_for,
)
from tests.kernels.transaction import ShadowStep
from vllm_nwor import ops, prepared
from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import GroupLog, Launch, LayerCache, OpLaunches
from vllm_nwor.shadow_pages import ShadowPages
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="prepared launches are CUDA only; no GPU here",
    ),
]

NUM_COUNTERS = len(ops.COUNTER_COLUMNS)
LAYERS, BLOCKS, HEADS, SLOTS, DIM = 3, 4, 2, 16, 64
CAPACITY = 8
DEVICE = torch.device("cuda", 0)


class World:
    """Two KV-cache groups with their logs, and the launches of one kind."""

    def __init__(self, kind):
        torch.manual_seed(1)
        shape = (2 * LAYERS, BLOCKS, HEADS, SLOTS, DIM)
        self.cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        layers = [
            LayerCache(f"layer.{number}", cache, row_layout(cache))
            for number, cache in enumerate(self.cache)
        ]
        self.counters = torch.zeros((2, NUM_COUNTERS), dtype=torch.int64, device=DEVICE)
        self.published = torch.full(
            (2, NUM_COUNTERS), -1, dtype=torch.int64, pin_memory=True
        )
        self.groups = [
            GroupLog(
                group_id,
                layers[group_id * LAYERS :][:LAYERS],
                CAPACITY,
                DeviceMemory(DEVICE, None),
            )
            for group_id in range(2)
        ]
        for group in self.groups:
            group.undo_log.fill_(0xA5)
        launches = [
            Launch(group, group.tables[0], counters)
            for group, counters in zip(self.groups, self.counters, strict=True)
        ]
        self.launches = (
            OpLaunches(launches)
            if kind is OpLaunches
            else prepared.PreparedLaunches(DEVICE, launches)
        )

    def step(self, windows, acceptance, counters_to):
        num_drafts = windows.num_drafts
        self.launches.log(windows)
        self.cache.add_(1)
        to = self.published if counters_to else None
        self.launches.restore(acceptance, num_drafts, to)

    def state(self):
        torch.cuda.synchronize()
        return [self.cache.clone(), self.counters.clone(), self.published.clone()] + [
            tensor.clone()
            for group in self.groups
            for tensor in (group.undo_log, group.log_slots, group.log_windows)
        ]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def windows(slots, counts, *, dtype=torch.int32, one_tensor=False, zero=False):
    """slots: of the rows, in group 0; group 1 has them 4 further on."""
    both = torch.tensor(
        [slots, [slot if slot < 0 else slot + 4 for slot in slots]], device=DEVICE
    )
    if one_tensor:
        # As a V2 runner has them: the left part of a wider buffer.
        wide = torch.full((2, len(slots) + 3), 7, device=DEVICE)
        wide[:, : len(slots)] = both
        both = wide[:, : len(slots)]
    return VerificationWindows(
        num_drafts=counts[-1] - len(counts),
        logits_indices=torch.arange(len(slots), dtype=dtype, device=DEVICE),
        cu_num_logits=int32([0] * zero + counts),
        slot_mappings=both if one_tensor else list(both),
        num_leading_zeros=int(zero),
    )


def steps():
    """(windows, acceptance, whether the counters are published)"""
    first = [3, 4, 5, 40, 41]
    transposed = int32([[7, 7], [-1, 7], [-1, -1]]).t()
    return [
        (windows(first, [3, 5]), SampledIds(int32([[7, -1, -1], [7, 7, -1]]), 100), 1),
        (
            windows([9, 10, -1], [3], dtype=torch.int64),
            SampledIds(int32([[7, 7, -1, -1]]), 100),
            0,
        ),
        (
            windows(first, [3, 5], one_tensor=True, zero=True),
            NumRejected(int32([1, 1])),
            1,
        ),
        (
            windows([20, 21, 22, 23], [2, 4]),
            SampledIds(int32([[7, 100], [7, 7]]), 100),
            1,
        ),
        (windows(first, [3, 5], zero=True), SampledIds(transposed, 100), 1),
    ]


def test_prepared_launches_do_what_the_ops_do():
    ops.load("cuda")
    plain, quick = World(OpLaunches), World(prepared.PreparedLaunches)

    for step in steps():
        plain.step(*step)
        quick.step(*step)

        for one, other in zip(plain.state(), quick.state(), strict=True):
            assert torch.equal(one, other)
    assert plain.counters[:, :4].tolist() == [[9, 13, 5, 8]] * 2
    assert torch.equal(quick.published, quick.counters.cpu())


@pytest.mark.parametrize("zero", [False, True])
def test_a_wider_batch_in_the_same_buffer(zero):
    """The slots of a V2 runner: the left part of a buffer, as wide as the batch."""
    worlds = [World(OpLaunches), World(prepared.PreparedLaunches)]
    buffer = torch.arange(2 * 40, device=DEVICE).view(2, 40) % 60
    for width in (3, 17, 6):
        for world in worlds:
            last = torch.tensor([0, width - 2, width - 1], device=DEVICE)
            step = VerificationWindows(
                2, last, int32([0] * zero + [3]), buffer[:, :width], int(zero)
            )
            world.step(step, NumRejected(int32([1])), True)

    for one, other in zip(*(world.state() for world in worlds), strict=True):
        assert torch.equal(one, other)
    assert worlds[1].counters[:, 1].tolist() == [6, 6]


def test_a_library_with_other_structs_is_refused(monkeypatch):
    monkeypatch.setattr(prepared, "COLUMNS", (8, 6, 2, 10))

    with pytest.raises(ops.NworOpsUnavailable, match="build it again"):
        prepared.PreparedLaunches(DEVICE, [])


class PagesWorld:
    """A group's tables and caches, and the shadow pages of one kind."""

    def __init__(self, kind, device=DEVICE):
        self.side = side = ShadowStep(
            LIFE_PAGES, [[layout_for(LIFE_PAGES)] * 3], device
        )
        pages = side.pages
        group = SimpleNamespace(
            group_id=0,
            tables=[SimpleNamespace(table=side.tables[0].rows, runs=None)],
            num_seats=pages.num_seats,
            entry_tokens=pages.entry_tokens,
            first_entry=pages.first_entry,
            num_real_entries=pages.num_real_entries,
            span=pages.span,
            saved=side.saved,
        )
        arguments = ([group], side.counters.unbind())
        self.pages = (
            kind(*arguments) if kind is ShadowPages else kind(device, *arguments)
        )
        self.num_op_calls = 0
        self.pages.ops = SimpleNamespace(
            stage=self.counted(ops.stage),
            commit_draft_layer=self.counted(ops.commit_draft_layer),
            unstage=ops.unstage,
        )
        self.move()

    def counted(self, op):
        def call(*arguments):
            self.num_op_calls += 1
            return op(*arguments)

        return call

    def move(self):
        """The buffers that outlive a step are elsewhere from now on."""
        self.buffers = torch.full((2, 64), 1 << 30, device=self.side.device).int()

    def step(self, requests, seats, number, fails=False):
        side, pages = self.side, self.pages
        pages.start_step()
        side.load(requests, seats)
        for buffer, values in zip(
            self.buffers, (side.query_start_loc, side.seq_lens), strict=True
        ):
            buffer[: len(values)] = values
        starts, lens = self.buffers
        windows = VerificationWindows(
            sum(side.num_drafts),
            torch.empty(0),
            side.cu_num_logits,
            [side.slot_mapping],
            block_tables=[side.block_table],
            query_start_loc=starts[: len(requests) + 1],
            seq_lens=lens[: len(requests)],
            seats=side.seats,
        )
        pages.stage(windows)
        if fails:
            pages.abort()
            return
        side.seed = 10 * number
        side.forward()
        rejected = [request.num_drafts - request.accepted for request in requests]
        rejected = torch.tensor(rejected, dtype=torch.int32, device=side.device)
        pages.commit(NumRejected(rejected), side.published)

    def state(self):
        side = self.side
        if side.device.type == "cuda":
            torch.cuda.synchronize()
        tensors = [layer.memory for layer in side.layers]
        tensors += [side.block_table, side.slot_mapping, side.saved]
        tensors += [side.counters, side.published]
        return [whole(tensor).cpu().clone() for tensor in tensors]


def test_prepared_pages_do_what_the_ops_do():
    ops.load("cuda")
    worlds = PagesWorld(ShadowPages), PagesWorld(prepared.PreparedPages)
    requests = [FIRST, OTHER]
    for number in range(9):
        # Both types of indices, and rows without seats; a step that fails.
        seats = [[0, 2], [2, 0], None][number // 3]
        if number == 7:
            worlds[1].move()
        for world in worlds:
            world.step(requests, seats, number, fails=number == 4)
        plain, quick = (world.state() for world in worlds)
        for one, other in zip(plain, quick, strict=True):
            assert torch.equal(one, other), f"step {number}"
        if number != 4:
            requests = [following(r, accepted=number % 3) for r in requests]
    # The ops saw the first step, and the first with other buffers.
    assert [world.num_op_calls for world in worlds] == [17, 4]
    counters = dict(
        zip(ops.COUNTER_COLUMNS, worlds[1].side.counters[0].tolist(), strict=True)
    )
    assert counters["windows"] == 16
    assert counters["invalid_slots"] == 0


@pytest.mark.parametrize("column", range(3, 9))
def test_a_step_of_stage_with_other_buffers_is_not_made(column):
    """num_reqs, query_start_loc, seq_lens, slot_mappings and block_table are compared
    with what was prepared; the runner's step is not."""
    ops.load("cuda")
    world = PagesWorld(prepared.PreparedPages)
    world.step([FIRST, OTHER], [0, 2], 0)
    stage, commit = world.pages._enqueue
    columns = []

    def recorded(*arguments):
        columns[:] = arguments
        return stage(*arguments)

    world.pages._enqueue = recorded, commit
    world.step([FIRST, OTHER], [0, 2], 1, fails=True)
    before = world.state()
    columns[1 + column] += 4 if column > 4 else 60 * (column == 3)

    assert stage(*columns) is (column == 4)

    if column != 4:
        for old, new in zip(before, world.state(), strict=True):
            assert torch.equal(old, new)
