# SPDX-License-Identifier: Apache-2.0
"""log_cache_slots and restore_rejected_drafts against the reference, byte for byte
(guarantees 1 and 2, as far as the kernels can give them)."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.reference import (
    PAD,
    Batch,
    Layer,
    Log,
    make_table,
    packed_layout,
    row_bytes_of,
    row_layout,
)
from tests.kernels.strategies import batches, packed_layouts, row_layouts
from tests.kernels.transaction import (
    NUM_COUNTERS,
    AcceptanceForm,
    check_transaction,
    forward,
    log,
    restore,
)
from vllm_nwor import builtin_ops
from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.kv_layout import KVLayout
from vllm_nwor.launches import GroupLog, Launch, Launches, LayerCache
from vllm_nwor.window import NumRejected, VerificationWindows

ANY_EXAMPLE = settings(
    max_examples=150,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
FORMS = st.sampled_from(list(AcceptanceForm))
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


def nhd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    slot = num_heads * run_bytes
    return row_layout(
        num_blocks, block_size, num_heads, run_bytes, block_size * slot, run_bytes, slot
    )


def hnd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    head = block_size * run_bytes
    return row_layout(
        num_blocks, block_size, num_heads, run_bytes, num_heads * head, head, run_bytes
    )


def mla(num_blocks=3, block_size=16, run_bytes=1152):
    return nhd(num_blocks, block_size, 1, run_bytes)


def column_major(num_blocks=3, block_size=16, dims=8):
    """K in columns of two-byte elements, then V in rows: CPU_ATTN's `vec`."""
    slots = torch.arange(block_size)
    keys = slots.repeat_interleave(2).repeat(dims)
    return packed_layout(
        num_blocks, torch.cat([keys, slots.repeat_interleave(2 * dims)])
    )


def one_step(device, layouts, batch, *, misalignment=0, **kwargs):
    layers = [
        Layer(layout, device, seed, misalignment) for seed, layout in enumerate(layouts)
    ]
    tables = make_table(layers, device)
    capacity = len(batch.flat_slots) + kwargs.get("extra_drafts", 0) + 1
    undo = Log.poisoned(capacity, row_bytes_of(tables), device)
    check_transaction(tables, undo, batch, **kwargs)


# The worked example of DESIGN and ops.py, with a padded slot: k = [2, 0, 1].
EXAMPLE = Batch(slots=((20, 21), (), (PAD,)), accepted=(1, 0, 0))


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", AcceptanceForm)
@pytest.mark.parametrize("layout", [nhd, hnd, mla])
def test_rejected_slots_get_their_bytes_back(device, layout, form):
    batch = Batch(slots=((0, 1, 2, 3), (47, PAD, 45), (), (17,)), accepted=(2, 0, 0, 1))
    one_step(device, [layout()] * 3, batch, form=form)


@pytest.mark.parametrize("run_bytes", [1, 2, 3, 4, 8, 16, 24, 33, 130, 272])
@pytest.mark.parametrize(
    "misalignment", [pytest.param(0, marks=pytest.mark.sanitizer), 1, 8]
)
def test_every_access_width(device, run_bytes, misalignment):
    layouts = [nhd(run_bytes=run_bytes), hnd(run_bytes=run_bytes)]
    one_step(device, layouts, EXAMPLE, misalignment=misalignment)


@pytest.mark.sanitizer
@pytest.mark.parametrize("extra_drafts", [0, 1, 40])
def test_num_drafts_may_be_an_upper_bound(device, extra_drafts):
    one_step(device, [nhd()] * 2, EXAMPLE, extra_drafts=extra_drafts)


@pytest.mark.sanitizer
def test_no_drafts_touch_nothing(device):
    nothing = Batch(slots=((), ()), accepted=(0, 0))
    one_step(device, [nhd()], nothing)
    one_step(device, [nhd()], nothing, extra_drafts=3)
    one_step(device, [nhd()], Batch(slots=(), accepted=()), extra_drafts=2)


def test_duplicated_slots_of_shared_blocks(device):
    # Two requests of one prefix draft into the same slots; one of them accepts.
    batch = Batch(slots=((5, 6), (5, 6)), accepted=(2, 0))
    one_step(device, [nhd(), hnd()], batch)


def interleaved(num_blocks=3, block_size=16):
    """Runs of 1, 2, 4, 8, 16 and 5 bytes in turn, then one that touches its end."""
    slots = torch.arange(block_size)
    units = [slots.repeat_interleave(unit) for unit in (4, 1, 16, 2, 8, 5)]
    return packed_layout(num_blocks, torch.cat([*units, slots.flip(0)]))


@pytest.mark.parametrize("layout", [column_major, interleaved])
def test_packed_slots_get_their_bytes_back(layout):
    # Neighbouring slots, which are copied run by run; one window crosses blocks.
    batch = Batch(slots=((3, 4, 5, 6), (31, 32), (PAD, 4)), accepted=(1, 1, 0))
    one_step(torch.device("cpu"), [layout()] * 3, batch)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "layouts",
    [[nhd, hnd], [mla] * 2, [column_major, nhd, interleaved]],
    ids=["rows", "mla", "packed"],
)
def test_rejected_slots_are_poisoned(device, layouts):
    """What the manager launches under VLLM_NWOR_ON_REJECT=poison, each layer with a
    byte of its own."""
    if column_major in layouts and device.type != "cpu":
        pytest.skip("packed layouts are for the CPU")
    batch = Batch(slots=((0, 1, 2, 3), (47, PAD, 45), (), (17,)), accepted=(2, 0, 0, 1))
    num_drafts = len(batch.flat_slots)
    layers = [Layer(layout(), device, i) for i, layout in enumerate(layouts)]
    caches = []
    for number, layer in enumerate(layers):
        *strides, block_size, num_blocks = layer.layout.columns
        layout = KVLayout(block_size, num_blocks, *strides, layer.layout.runs)
        cache = layer.memory[layer.start :]
        caches.append(LayerCache(f"{number}", cache, layout, 0x40 + number))
    memory = DeviceMemory(device, None)
    group = GroupLog(0, caches, num_drafts, memory, poisons=True)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    launches = Launches(
        [Launch(group, part, counters) for part in group.tables],
        builtin_ops.load(device),
    )
    slots, rows, cu_num_logits = batch.metadata(device, torch.int32, 0)
    tables = make_table(layers, device)

    launches.log(VerificationWindows(num_drafts, rows, cu_num_logits, [slots]))
    forward(tables, batch, 1000)
    wanted = [layer.memory.cpu().clone() for layer in layers]
    num_rejected = torch.tensor([2, 3, 0, 0], dtype=torch.int32, device=device)
    launches.restore(NumRejected(num_rejected), num_drafts, None)

    for number, (layer, expected) in enumerate(zip(layers, wanted, strict=True)):
        expected[layer.index([2, 3, 47, 45])] = 0x40 + number
        assert torch.equal(layer.memory.cpu(), expected), f"layer {number}"


@pytest.mark.parametrize("num_requests", [31, 32, 33, 64, 1025])
def test_the_request_of_a_draft_is_found_in_large_batches(device, num_requests):
    layout = nhd(num_blocks=num_requests, num_heads=1, run_bytes=16)
    drafts = [request % 4 for request in range(num_requests)]
    slots = tuple(
        tuple(range(16 * request, 16 * request + k)) for request, k in enumerate(drafts)
    )
    batch = Batch(slots, tuple(k // 2 for k in drafts))
    one_step(device, [layout], batch)


def test_many_columns_of_sampled_tokens(device):
    # More columns than a warp has lanes, the valid ones not in front: they count.
    tables = make_table([Layer(nhd(), device, 3)], device)
    undo = Log.poisoned(2, row_bytes_of(tables), device)
    batch = Batch(slots=((8, 9),), accepted=(1,))
    log(tables, undo, batch.metadata(device, torch.int64, 0), 2)
    tokens = torch.full((1, 70), -1, dtype=torch.int32, device=device)
    tokens[0, 33] = tokens[0, 69] = 4
    tables.layers[0].memory.zero_()
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    restore(tables, undo, (tokens, 10, None), counters, 2)
    assert counters.tolist() == [1, 2, 1, 1, 256, 0, 0, 0]


def test_two_tables_share_a_log(device):
    # One KV-cache group, two layouts: two calls, each with its part of every row.
    first = make_table([Layer(nhd(), device, 1)], device)
    second = make_table([Layer(hnd(), device, 2)], device, first_offset=256)
    undo = Log.poisoned(4, row_bytes_of(second), device)
    metadata = EXAMPLE.metadata(device, torch.int32, 0)
    before = [t.layers[0].memory.clone() for t in (first, second)]
    for tables in (first, second):
        log(tables, undo, metadata, 3)
    for tables in (first, second):
        tables.layers[0].memory.zero_()
    all_rejected = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    counters = torch.zeros(2, NUM_COUNTERS, dtype=torch.int64, device=device)
    for tables, row in zip((first, second), counters.unbind(), strict=True):
        restore(tables, undo, (None, 0, all_rejected), row, 3)
    for tables, old in zip((first, second), before, strict=True):
        layer = tables.layers[0]
        wanted = torch.zeros_like(layer.memory)
        index = layer.index([20, 21]).flatten().to(device)
        wanted[index] = old[index]
        assert torch.equal(layer.memory, wanted)
    assert counters.tolist() == [[2, 3, 0, 3, 512, 0, 0, 0]] * 2


@dataclass(frozen=True)
class Shape:
    """Of a real model's cache and a step on it."""

    element_bytes: int = 2
    block_size: int = 16
    head_size: int = 128
    num_heads: int = 8
    num_layers: int = 4
    num_drafts: int = 24
    accepted: str = "mixed"

    @property
    def run_bytes(self) -> int:
        return self.head_size * self.element_bytes

    @property
    def num_blocks(self) -> int:
        return -(-max(self.num_drafts, 1) * 5 // 4 // self.block_size) + 1

    @property
    def cache_bytes(self) -> int:
        num_slots = self.num_blocks * self.block_size
        return self.num_layers * num_slots * self.num_heads * self.run_bytes

    def batch(self) -> Batch:
        """Windows of 0 to 5 drafts, in slots drawn without repetition."""
        draw = random.Random(self.num_drafts)
        slots = draw.sample(range(self.num_blocks * self.block_size), self.num_drafts)
        windows: list[tuple[int, ...]] = []
        while slots or len(windows) < 2:
            size = min(draw.randrange(6), len(slots))
            windows.append(tuple(slots.pop() for _ in range(size)))
        shares = {"none": 0, "all": 1}
        share = [shares.get(self.accepted, draw.random()) for _ in windows]
        accepted = [round(s * len(w)) for s, w in zip(share, windows, strict=True)]
        return Batch(tuple(windows), tuple(accepted))

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


AXES = {
    "element_bytes": [1, 2, 4],
    "block_size": [16, 32, 64, 128],
    "head_size": [64, 80, 96, 128, 192, 256, 512, 576],
    "num_heads": [1, 2, 3, 4, 8, 16, 32],
    "num_layers": [1, 2, 31, 32, 61, 80],
    "num_drafts": [0, 1, 4, 31, 129, 256, 1024, 4096],
    "accepted": ["none", "all", "mixed"],
}
# Along one axis at a time, and some corners.
SHAPES = [
    *(replace(Shape(), **{axis: value}) for axis in AXES for value in AXES[axis]),
    # MLA with many layers; small heads and fp8; 8B at batch 64 with k = 4.
    Shape(head_size=576, num_heads=1, num_layers=61, num_drafts=256),
    Shape(1, 128, 64, 1, 80, 33, "none"),
    Shape(num_layers=32, num_drafts=256),
    Shape(4, 16, 576, 32, 2, 64, "none"),
    *(
        Shape(size, block, 64, 2, 3, drafts)
        for size, block, drafts in itertools.product([1, 2, 4], [16, 128], [7, 500])
    ),
]


@pytest.mark.parametrize("shape", dict.fromkeys(SHAPES), ids=str)
@pytest.mark.parametrize("layout", [nhd, hnd])
def test_shapes_of_real_models(device, shape, layout):
    """Whole on a GPU; on the CPU the smaller ones."""
    if device.type == "cpu" and shape.cache_bytes >= 2 << 20:
        shape = replace(shape, num_layers=1, num_heads=1)
    sizes = (shape.num_blocks, shape.block_size, shape.num_heads, shape.run_bytes)
    layouts = [layout(*sizes)] * shape.num_layers
    one_step(device, layouts, shape.batch(), extra_drafts=2)


@ANY_EXAMPLE
@given(data=st.data())
def test_any_rows(device, data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    num_blocks = data.draw(st.integers(1, 4))
    layouts = data.draw(
        st.lists(row_layouts(block_size, num_blocks), min_size=1, max_size=4)
    )
    _any_step(device, data, layouts)


@ANY_EXAMPLE
@given(data=st.data())
def test_any_packing(data):
    block_size = data.draw(st.sampled_from([1, 4, 32]))
    layout = data.draw(packed_layouts(block_size, data.draw(st.integers(1, 4))))
    _any_step(torch.device("cpu"), data, [layout] * data.draw(st.integers(1, 3)))


def _any_step(device, data, layouts):
    seed = data.draw(st.integers(0, 1000))
    small = st.one_of(st.just(0), st.integers(0, 20))
    layers = [
        Layer(layout, device, seed + number, misalignment=data.draw(small))
        for number, layout in enumerate(layouts)
    ]
    tables = make_table(layers, device, data.draw(small), data.draw(small))
    batch = data.draw(batches(layouts[0].num_slots))
    extra_drafts = data.draw(st.integers(0, 3))
    undo = Log.poisoned(
        len(batch.flat_slots) + extra_drafts + data.draw(st.integers(0, 2)),
        row_bytes_of(tables) + data.draw(small),
        device,
        padding=data.draw(small),
        misalignment=data.draw(small),
    )
    check_transaction(
        tables,
        undo,
        batch,
        form=data.draw(FORMS),
        index_dtype=data.draw(INDEX_DTYPES),
        extra_drafts=extra_drafts,
        seed=seed,
    )
