# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the shapes of real models, one axis at a time and some corners, against
indexing in PyTorch. Whole on a GPU; on the CPU the smaller ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from vllm_nwor import ops


@dataclass(frozen=True)
class Shape:
    element_bytes: int = 2
    block_size: int = 16
    head_size: int = 128
    num_heads: int = 8
    num_layers: int = 4
    num_drafts: int = 24
    accepted: str = "mixed"

    @property
    def cache_bytes(self) -> int:
        return self.num_layers * self.num_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        return self.num_heads * self.head_size * self.element_bytes

    @property
    def num_slots(self) -> int:
        num_blocks = -(-max(self.num_drafts, 1) * 5 // 4 // self.block_size) + 1
        return num_blocks * self.block_size

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
SHAPES = list(
    dict.fromkeys(
        [
            *(
                replace(Shape(), **{axis: value})
                for axis, values in AXES.items()
                for value in values
            ),
            # MLA with many layers; small heads and fp8; 8B at batch 64 with k = 4.
            Shape(head_size=576, num_heads=1, num_layers=61, num_drafts=256),
            Shape(1, 128, 64, 1, 80, 33, "none"),
            Shape(num_layers=32, num_drafts=256),
            Shape(4, 16, 576, 32, 2, 64, "none"),
            *(
                Shape(size, block, 64, 2, 3, drafts)
                for size, block, drafts in itertools.product(
                    [1, 2, 4], [16, 128], [7, 500]
                )
            ),
        ]
    )
)
CPU_SHAPES = [shape for shape in SHAPES if shape.cache_bytes < 2 << 20]


PARAMS = [pytest.param("cpu", shape, id=f"cpu-{shape}") for shape in CPU_SHAPES]
if torch.cuda.is_available():
    PARAMS += [
        pytest.param("cuda", shape, id=f"cuda-{shape}", marks=pytest.mark.gpu)
        for shape in SHAPES
    ]


@pytest.mark.parametrize(("device_type", "shape"), PARAMS)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_sweep(device_type, shape, order):
    ops.load(device_type)
    device = torch.device(device_type)
    generator = torch.Generator().manual_seed(shape.num_drafts)
    num_blocks = shape.num_slots // shape.block_size
    sizes = {
        "NHD": (shape.num_layers, num_blocks, shape.block_size, shape.num_heads),
        "HND": (shape.num_layers, num_blocks, shape.num_heads, shape.block_size),
    }
    row_bytes = shape.head_size * shape.element_bytes
    caches = torch.empty(*sizes[order], row_bytes, dtype=torch.uint8, device=device)
    caches.random_(256)
    # [layer, block, slot in block, head, byte]
    by_slot = caches if order == "NHD" else caches.transpose(2, 3)
    _, block_stride, slot_stride, head_stride, _ = by_slot.stride()
    table = torch.tensor(
        [
            [
                by_slot[layer].data_ptr(),
                *(block_stride, slot_stride, head_stride),
                *(shape.num_heads, row_bytes, shape.block_size, num_blocks),
                layer * shape.slot_bytes,
            ]
            for layer in range(shape.num_layers)
        ],
        device=device,
    )

    # Windows of 0 to 5 drafts, in slots drawn without repetition.
    drafts = []
    while sum(drafts) < shape.num_drafts:
        k = int(torch.randint(6, (), generator=generator))
        drafts.append(min(k, shape.num_drafts - sum(drafts)))
    drafts = drafts or [0, 0]
    counts = torch.tensor(drafts)
    slots = torch.randperm(shape.num_slots, generator=generator)[: shape.num_drafts]
    cumulative = (counts + 1).cumsum(0)
    request = torch.arange(len(drafts)).repeat_interleave(counts)
    position = torch.arange(shape.num_drafts) - (counts.cumsum(0) - counts)[request]
    rows = torch.arange(shape.num_drafts) + request + 1
    mapping = torch.full((int(cumulative[-1]),), -1)
    mapping[rows] = slots
    accepted = {
        "none": torch.zeros_like(counts),
        "all": counts,
        "mixed": (torch.rand(len(drafts), generator=generator) * (counts + 1)).long(),
    }[shape.accepted]
    is_rejected = position >= accepted[request]

    capacity = shape.num_drafts + 3
    log_bytes = shape.num_layers * shape.slot_bytes
    undo_log = torch.full((capacity, log_bytes), 0xA5, dtype=torch.uint8, device=device)
    log_slots = torch.full((capacity,), 77, device=device)
    windows = torch.full((capacity, 3), 77, dtype=torch.int32, device=device)
    log = (undo_log, log_slots, windows)
    metadata = (
        mapping.to(device),
        torch.arange(mapping.numel(), dtype=torch.int32, device=device),
        cumulative.int().to(device),
    )
    num_drafts = shape.num_drafts + 2

    block, offset = slots // shape.block_size, slots % shape.block_size
    old = by_slot[:, block, offset].clone()  # [layer, draft, head, byte]
    before = caches.clone()
    ops.log_cache_slots(table, None, *metadata, *log, num_drafts)
    saved = undo_log[: shape.num_drafts].view(
        shape.num_drafts, shape.num_layers, shape.slot_bytes
    )
    assert torch.equal(saved, old.flatten(2).transpose(0, 1))
    assert (undo_log[shape.num_drafts :] == 0xA5).all()
    assert torch.equal(caches, before)
    assert torch.equal(log_slots[: shape.num_drafts].cpu(), slots)
    assert log_slots[shape.num_drafts :].tolist() == [-1, -1, 77]
    wanted_windows = torch.stack([request, position, counts[request]], 1).int()
    assert torch.equal(windows[: shape.num_drafts].cpu(), wanted_windows)

    by_slot[:, block, offset] = 255 - old
    wanted = caches.clone()
    wanted_by_slot = wanted if order == "NHD" else wanted.transpose(2, 3)
    undone = is_rejected.nonzero().flatten()
    wanted_by_slot[:, block[undone], offset[undone]] = old[:, undone]
    counters = torch.zeros(len(ops.COUNTER_COLUMNS), dtype=torch.int64, device=device)
    num_rejected = (counts - accepted).int().to(device)
    ops.restore_rejected_drafts(
        table, None, *log, None, 0, num_rejected, counters, num_drafts
    )
    assert torch.equal(caches, wanted)
    total = int(is_rejected.sum())
    assert counters.tolist() == [
        *(int((counts > 0).sum()), shape.num_drafts, shape.num_drafts - total, total),
        *(total * log_bytes, 0, 0, 0),
    ]
