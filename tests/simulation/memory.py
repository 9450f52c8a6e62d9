# SPDX-License-Identifier: Apache-2.0
"""One allocation that holds the caches of all layers, and the plain models of it.

The models are copies of the whole allocation, guard bytes included. Which bytes belong
to a slot says the reference of the kernel tests, not the package under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels import reference
from tests.simulation.operations import MAX_DRAFTS, MAX_REQUESTS
from vllm_nwor.draft_manager import LayerCache
from vllm_nwor.kv_layout import packed_layout, row_layout, runs_of
from vllm_nwor.shadow_pages import ShadowRegion

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GUARD_BYTES = 64
ALIGNMENT = 16
ROW_KINDS = ("nhd", "hnd", "mla")
PACKED_KINDS = ("columns", "pairs")


class Violation(AssertionError):
    """A guarantee did not hold. kind: which check found it, in a few words."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass(frozen=True)
class Layer:
    """One layer's cache in the allocation.

    index: [num_slots, slot_bytes] int64: where the bytes of each slot lie.
    cache: what the manager gets. protected: whether it does (a drafter's is not).
    """

    name: str
    kind: str
    index: Index
    cache: LayerCache
    protected: bool

    @property
    def slot_bytes(self) -> int:
        return self.index.shape[1]


@dataclass(frozen=True)
class Group:
    """One KV-cache group: layers that share a block size and a block table.

    entry_tokens: positions for which an entry of the worker's block table stands.
    index: [num_slots, bytes of all layers] int64, the layers' indices side by side.
    layer_of: [bytes of all layers] int64: which layer a column of `index` belongs to.
    is_protected: [bytes of all layers] bool: whether that layer is.
    """

    block_size: int
    entry_tokens: int
    layers: tuple[Layer, ...]
    index: Index = field(init=False)
    layer_of: Index = field(init=False)
    is_protected: Mask = field(init=False)

    def __post_init__(self) -> None:
        index = np.concatenate([layer.index for layer in self.layers], axis=1)
        sizes = [layer.slot_bytes for layer in self.layers]
        is_protected = np.repeat([layer.protected for layer in self.layers], sizes)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "layer_of", np.repeat(np.arange(len(sizes)), sizes))
        object.__setattr__(self, "is_protected", is_protected)

    def entries(self, blocks: list[int]) -> Index:
        """The entries of the worker's table that stand for a request's blocks."""
        per_block = self.block_size // self.entry_tokens
        first = np.array(blocks, dtype=np.int64)[:, None] * per_block
        return (first + np.arange(per_block)).ravel()

    def block_index(self, block: int) -> Index:
        """[block_size, bytes of all layers]: where a block's bytes lie."""
        start = block * self.block_size
        return self.index[start : start + self.block_size]


class Memory:
    """The allocation as it is, and as the two models say it should be.

    real: the bytes that the manager and its ops work on.
    expected: what a transactional cache holds.
    vanilla: what vLLM without NWOR would hold after the same events.
    dirty: [bytes] bool: True where the last write of vanilla was a rejected draft, or
        a copy of one; elsewhere `real` must equal `vanilla`.
    """

    def __init__(self, num_bytes: int, draw: np.random.Generator) -> None:
        self.real: Bytes = draw.integers(0, 256, num_bytes, dtype=np.uint8)
        self.expected = self.real.copy()
        self.vanilla = self.real.copy()
        self.dirty = np.zeros(num_bytes, dtype=bool)

    def write(self, at: Index, payload: Bytes) -> None:
        """A write that vLLM makes and NWOR never undoes."""
        self.real[at] = payload
        self.expected[at] = payload
        self.vanilla[at] = payload
        self.dirty[at] = False

    def write_step(self, at: Index, payload: Bytes, keep_mask: Mask) -> None:
        """A step's forward, in the models: `keep_mask` is False where NWOR puts the
        old bytes back. The real bytes are written by the step itself."""
        self.vanilla[at] = payload
        self.dirty[at] = ~keep_mask
        self.expected[at[keep_mask]] = payload[keep_mask]

    def copy(self, source: Index, to: Index) -> None:
        """A copy within the cache: vLLM's block copies."""
        for array in (self.real, self.expected, self.vanilla, self.dirty):
            array[to] = array[source]


@dataclass(frozen=True)
class Cache:
    """What a world is made of: the allocation and the groups in it.

    num_blocks: the scheduler's. regions: shadow blocks of the groups that are staged,
    by group; they lie behind the scheduler's.
    """

    memory: Memory
    groups: tuple[Group, ...]
    num_blocks: int
    regions: dict[int, ShadowRegion]


def draw_cache(draw: random.Random) -> Cache:
    """A cache of 1 to 3 groups of 1 to 3 layers with layouts drawn from `draw`.

    Groups have their own layers, or (as vLLM's hybrid caches) share the allocations,
    each with its own view of the blocks that the common pool gave it. No group is
    staged, or all, or the first one only.
    """
    num_real_blocks = draw.choice((16, 32, 48))
    num_groups = draw.choice((1, 1, 2, 2, 3))
    num_layers = draw.randint(1, 3)
    shared = num_groups > 1 and draw.random() < 0.4
    shared_bytes = draw.choice((64, 128, 192))
    sizes = [draw.choice((2, 4, 8)) for _ in range(num_groups)]
    num_staged = draw.choice((0, 1, num_groups, num_groups))
    num_seats = draw.choice((2, MAX_REQUESTS, MAX_REQUESTS))
    regions: dict[int, ShadowRegion] = {}
    num_blocks = num_real_blocks
    for group, size in enumerate(sizes[:num_staged]):
        per_seat = 1 - -(MAX_DRAFTS - 1) // size
        regions[group] = ShadowRegion(
            num_blocks, num_seats, per_seat, num_real_blocks, size
        )
        num_blocks += num_seats * per_seat
    plans: list[_Plan] = []
    end = GUARD_BYTES
    for group, size in enumerate(sizes):
        # A kernel's blocks may be smaller than the scheduler's, and so the entries.
        per_block = draw.choice((1, 1, 2))
        kernel_size, num_kernel_blocks = size // per_block, num_blocks * per_block
        slot_bytes = shared_bytes // size if shared else draw.choice((8, 16, 24))
        page_bytes = kernel_size * slot_bytes
        side_by_side = draw.random() < 0.3
        gap = ALIGNMENT * draw.choice((0, 0, 1, 3))
        if shared:
            side_by_side, gap = False, 0
        stride = page_bytes * (num_layers if side_by_side else 1) + gap
        first = GUARD_BYTES if shared else end
        for layer in range(num_layers):
            if side_by_side:
                start = first + layer * page_bytes
            else:
                start = first + layer * (num_kernel_blocks * stride + GUARD_BYTES)
            end = max(end, start + num_kernel_blocks * stride + GUARD_BYTES)
            plans.append(
                _Plan(
                    *(group, layer, kernel_size, num_kernel_blocks),
                    *(page_bytes, stride, start),
                )
            )
    memory = Memory(end, np.random.default_rng(draw.randrange(1 << 32)))
    raw = torch.from_numpy(memory.real)
    kinds = draw.choice((ROW_KINDS, PACKED_KINDS, ROW_KINDS + PACKED_KINDS))
    has_drafter = draw.random() < 0.3
    groups = []
    for group, size in enumerate(sizes):
        own = [plan for plan in plans if plan.group == group]
        layers = [
            _make_layer(
                plan,
                draw.choice(kinds),
                raw,
                draw,
                # The last layer may be the drafter's, or its whole group: vanilla.
                protected=not (has_drafter and plan is plans[-1] and len(plans) > 1),
            )
            for plan in own
        ]
        entry_tokens = draw.choice((own[0].block_size, size))
        groups.append(Group(size, entry_tokens, tuple(layers)))
        if not any(layer.protected for layer in layers):
            regions.pop(group, None)
    return Cache(memory, tuple(groups), num_real_blocks, regions)


@dataclass(frozen=True)
class _Plan:
    """Where a layer shall lie, in bytes. block_size, num_blocks: its kernel's."""

    group: int
    layer: int
    block_size: int
    num_blocks: int
    page_bytes: int
    block_stride: int
    start: int


def _make_layer(
    plan: _Plan, kind: str, raw: torch.Tensor, draw: random.Random, protected: bool
) -> Layer:
    num_blocks, block_size = plan.num_blocks, plan.block_size
    slot_bytes = plan.page_bytes // block_size
    dtype = draw.choice((torch.uint8, torch.bfloat16, torch.float32))
    shape: tuple[int, ...] = (num_blocks, block_size, slot_bytes)
    strides: tuple[int, ...] = (plan.block_stride, slot_bytes, 1)
    if kind in PACKED_KINDS:
        owner = _owner(kind, block_size, slot_bytes)
        plain = reference.packed_layout(num_blocks, owner, plan.block_stride)
    else:
        heads = 1 if kind == "mla" else draw.choice((1, 2))
        size = slot_bytes // heads
        by_slot = slot_bytes if kind == "nhd" else size
        by_head = size if kind == "nhd" else block_size * size
        sizes = (num_blocks, block_size, heads, size)
        plain = reference.row_layout(*sizes, plan.block_stride, by_head, by_slot)
        if kind != "mla":
            shape = (num_blocks, heads, block_size, size)
            strides = (plan.block_stride, by_head, by_slot, 1)
    tensor = _view(raw, plan.start, shape, strides, dtype)
    if kind in PACKED_KINDS:
        layout = packed_layout([runs_of(s) for s in plain.index[:block_size]], tensor)
    else:
        layout = row_layout(tensor)
    name = f"group {plan.group} layer {plan.layer} ({kind})"
    index = plan.start + plain.index.numpy()
    return Layer(name, kind, index, LayerCache(name, tensor, layout), protected)


def _view(
    raw: torch.Tensor,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The cache as vLLM would bind it: `shape` and `strides` in bytes, the last
    dimension of elements of `dtype`."""
    item = dtype.itemsize
    return raw.view(dtype).as_strided(
        (*shape[:-1], shape[-1] // item),
        (*(stride // item for stride in strides[:-1]), 1),
        start // item,
    )


def _owner(kind: str, block_size: int, slot_bytes: int) -> torch.Tensor:
    """[block bytes]: the slot that owns each byte. `columns`: half of a slot's bytes in
    columns of two-byte elements, then rows (CPU_ATTN's vec); `pairs`: pairs of
    two-byte elements of all slots in turn (its amx, in small)."""
    slots = torch.arange(block_size)
    if kind == "columns":
        keys = slots.repeat_interleave(2).repeat(slot_bytes // 4)
        return torch.cat([keys, slots.repeat_interleave(slot_bytes // 2)])
    return slots.repeat_interleave(4).repeat(slot_bytes // 4)
