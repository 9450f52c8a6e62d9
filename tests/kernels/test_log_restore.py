# SPDX-License-Identifier: Apache-2.0
"""log_cache_slots and restore_rejected_drafts against the reference, byte for byte
(guarantees 1 and 2, as far as the kernels can give them)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.reference import PAD, Layer, packed_layout, row_layout
from tests.kernels.strategies import (
    ANY_EXAMPLE,
    FORMS,
    SMALL,
    batches,
    packed_layouts,
    row_layouts,
)
from tests.kernels.transaction import NUM_COUNTERS, AcceptanceForm, Batch, CowStep
from vllm_nwor import builtin_ops
from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.kv_layout import KVLayout
from vllm_nwor.launches import GroupLog, Launch, Launches, LayerCache
from vllm_nwor.window import NumRejected, VerificationWindows

CPU = torch.device("cpu")


def nhd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    slot = num_heads * run_bytes
    sizes = (num_blocks, block_size, num_heads, run_bytes)
    return row_layout(*sizes, block_size * slot, run_bytes, slot)


def hnd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    head = block_size * run_bytes
    sizes = (num_blocks, block_size, num_heads, run_bytes)
    return row_layout(*sizes, num_heads * head, head, run_bytes)


def mla(num_blocks=3, block_size=16, run_bytes=1152):
    return nhd(num_blocks, block_size, 1, run_bytes)


def padded(num_blocks=3, block_size=16, run_bytes=24):
    """MLA's, with bytes behind each slot and each block that are nobody's."""
    slot = run_bytes + 16
    sizes = (num_blocks, block_size, 1, run_bytes)
    return row_layout(*sizes, block_size * slot + 8, 0, slot)


def column_major(num_blocks=3, block_size=16, dims=8):
    """K in columns of two-byte elements, then V in rows: CPU_ATTN's `vec`."""
    slots = torch.arange(block_size)
    keys = slots.repeat_interleave(2).repeat(dims)
    values = slots.repeat_interleave(2 * dims)
    return packed_layout(num_blocks, torch.cat([keys, values]))


def interleaved(num_blocks=3, block_size=16):
    """Runs of 1, 2, 4, 8, 16 and 5 bytes in turn, then one that touches its end."""
    slots = torch.arange(block_size)
    units = [slots.repeat_interleave(unit) for unit in (4, 1, 16, 2, 8, 5)]
    return packed_layout(num_blocks, torch.cat([*units, slots.flip(0)]))


# The worked example of DESIGN and ops.py, with a padded slot: k = [2, 0, 1].
EXAMPLE = Batch(slots=((20, 21), (), (PAD,)), accepted=(1, 0, 0))
# Neighbours, also across blocks; padding; all, some and none accepted.
MIXED = Batch(((0, 1, 2, 3), (31, 32), (47, PAD, 45), (), (17,)), (2, 1, 0, 0, 1))
# Two requests of one prefix draft into the same slots; one of them accepts.
SHARED = Batch(slots=((5, 6), (5, 6)), accepted=(2, 0))
NOTHING = Batch(slots=((), ()), accepted=(0, 0))


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", AcceptanceForm)
@pytest.mark.parametrize("layout", [nhd, hnd, mla, padded])
def test_rejected_slots_get_their_bytes_back(device, layout, form):
    CowStep(device, [[layout()] * 3], MIXED, form=form).run()


@pytest.mark.parametrize("layout", [column_major, interleaved])
def test_packed_slots_get_their_bytes_back(layout):
    CowStep(CPU, [[layout()] * 3], MIXED).run()


@pytest.mark.parametrize("run_bytes", [1, 2, 3, 4, 8, 16, 24, 33, 130, 272])
@pytest.mark.parametrize(
    "misalignment", [pytest.param(0, marks=pytest.mark.sanitizer), 1, 8]
)
def test_every_access_width(device, run_bytes, misalignment):
    layouts = [
        replace(layout(run_bytes=run_bytes), misalignment=misalignment)
        for layout in (nhd, hnd)
    ]
    CowStep(device, [layouts], EXAMPLE).run()


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("batch", "extra_drafts"),
    [
        *((EXAMPLE, 0), (EXAMPLE, 1), (EXAMPLE, 40), (SHARED, 0)),
        *((NOTHING, 0), (NOTHING, 3), (Batch((), ()), 2)),
    ],
)
def test_num_drafts_is_an_upper_bound(device, batch, extra_drafts):
    """Of two tables of a KV-cache group, each with its part of every row of the log."""
    layouts = [[nhd()] * 2, [hnd()]]
    CowStep(device, layouts, batch, extra_drafts=extra_drafts).run()


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
    slots, rows, cu_num_logits, _ = batch.metadata(device).values()

    num_reqs = cu_num_logits.numel()
    launches.log(
        VerificationWindows(num_drafts, num_reqs, rows, cu_num_logits, [slots])
    )
    for number, layer in enumerate(layers):
        layer.write([0, 1, 2, 3, 47, 45, 17], 1000 + number)
    wanted = [layer.memory.clone() for layer in layers]
    num_rejected = torch.tensor([2, 3, 0, 0], dtype=torch.int32, device=device)
    launches.restore(NumRejected(num_rejected), num_drafts, None)

    for number, (layer, expected) in enumerate(zip(layers, wanted, strict=True)):
        expected[layer.index([2, 3, 47, 45])] = 0x40 + number
        assert torch.equal(layer.memory, expected), f"layer {number}"


@pytest.mark.parametrize("num_requests", [31, 32, 33, 64, 1025])
def test_the_request_of_a_draft_is_found_in_large_batches(device, num_requests):
    drafts = [request % 4 for request in range(num_requests)]
    slots = tuple(tuple(range(16 * r, 16 * r + k)) for r, k in enumerate(drafts))
    layout = nhd(num_blocks=num_requests, num_heads=1, run_bytes=16)
    batch = Batch(slots, tuple(k // 2 for k in drafts))
    CowStep(device, [[layout]], batch).run()


# Along one axis at a time from the first value of each, and some corners: MLA with many
# layers; small heads and fp8; 8B at batch 64 with k = 4.
AXES = {
    "element_bytes": [2, 1, 4],
    "block_size": [16, 32, 64, 128],
    "head_size": [128, 64, 80, 96, 192, 256, 512, 576],
    "num_heads": [8, 1, 2, 3, 4, 16, 32],
    "num_layers": [4, 1, 2, 31, 32, 61, 80],
    "num_drafts": [24, 0, 1, 4, 31, 129, 256, 1024, 4096],
    "accepted": ["mixed", "none", "all"],
}
FIRST = [values[0] for values in AXES.values()]
SHAPES = [
    *(
        (*FIRST[:i], x, *FIRST[i + 1 :])
        for i, xs in enumerate(AXES.values())
        for x in xs
    ),
    (2, 16, 576, 1, 61, 256, "mixed"),
    (1, 128, 64, 1, 80, 33, "none"),
    (2, 16, 128, 8, 32, 256, "mixed"),
    (4, 16, 576, 32, 2, 64, "none"),
    *(
        (size, block, 64, 2, 3, drafts, "mixed")
        for size in (1, 2, 4)
        for block in (16, 128)
        for drafts in (7, 500)
    ),
]


@pytest.mark.parametrize(
    "shape", dict.fromkeys(SHAPES), ids=lambda shape: "-".join(map(str, shape))
)
@pytest.mark.parametrize("layout", [nhd, hnd])
def test_shapes_of_real_models(device, shape, layout):
    """Whole on a GPU; on the CPU the smaller ones."""
    size, block_size, head_size, num_heads, num_layers, num_drafts, accepted = shape
    num_blocks = -(-max(num_drafts, 1) * 5 // 4 // block_size) + 1
    num_slots, run_bytes = num_blocks * block_size, head_size * size
    cache_bytes = num_layers * num_slots * num_heads * run_bytes
    if device.type == "cpu" and cache_bytes >= 2 << 20:
        num_layers = num_heads = 1
    draw = random.Random(num_drafts)
    slots = draw.sample(range(num_slots), num_drafts)
    windows = []
    while slots or len(windows) < 2:
        length = min(draw.randrange(6), len(slots))
        windows.append(tuple(slots.pop() for _ in range(length)))
    shares = {"none": 0, "all": 1}
    counts = [round(shares.get(accepted, draw.random()) * len(w)) for w in windows]
    layouts = [layout(num_blocks, block_size, num_heads, run_bytes)] * num_layers
    batch = Batch(tuple(windows), tuple(counts))
    CowStep(device, [layouts], batch, extra_drafts=2).run()


@ANY_EXAMPLE
@given(data=st.data())
def test_any_rows(device, data):
    sizes = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.integers(1, 4))
    layers = st.lists(row_layouts(*sizes), min_size=1, max_size=4)
    _any_step(device, data, data.draw(st.lists(layers, min_size=1, max_size=2)))


@ANY_EXAMPLE
@given(data=st.data())
def test_any_packing(data):
    sizes = data.draw(st.sampled_from([1, 4, 32])), data.draw(st.integers(1, 4))
    layouts = [[data.draw(packed_layouts(*sizes))] * data.draw(st.integers(1, 3))]
    if data.draw(st.booleans()):
        layouts.append([data.draw(row_layouts(*sizes))])
    _any_step(CPU, data, layouts)


def _any_step(device, data, layouts):
    CowStep(
        *(device, layouts, data.draw(batches(layouts[0][0].num_slots))),
        form=data.draw(FORMS),
        index_dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
        extra_drafts=data.draw(st.integers(0, 3)),
        spare_rows=data.draw(st.integers(0, 2)),
        seed=data.draw(st.integers(0, 1000)),
        gap=data.draw(SMALL),
        slack=data.draw(SMALL),
        padding=data.draw(SMALL),
        misalignment=data.draw(SMALL),
    ).run()
