# SPDX-License-Identifier: Apache-2.0
"""One allocation that holds the caches of all layers, and the plain model of it.

The model is a copy of the whole allocation with its guard bytes. The bytes of a slot
come from the kernel tests' reference, not from the package under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels import reference
from vllm_nwor.layout.kv_layout import packed_layout, row_layout, runs_of
from vllm_nwor.layout.regions import ShadowRegion, blocks_per_seat
from vllm_nwor.layout.tables import LayerCache

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# More drafts than a block of some groups has tokens.
MAX_DRAFTS = 6
MAX_REQUESTS = 6
GUARD_BYTES = 64
ALIGNMENT = 16
MOST_BYTES = 1 << 19


class Violation(AssertionError):
    """A violated guarantee. kind: the check that found it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass
class Group:
    """One KV-cache group: layers that share a block size and a block table.

    entry_tokens: positions per entry of the worker's block table.
    region: its shadow blocks, behind the scheduler's, if it is staged.
    layers: by name the places of each slot's bytes, [num_slots, slot_bytes] int64.
    protected: the layers that the manager gets, without the drafter's.
    index: [num_slots, bytes of all layers] int64, the layers' indices side by side.
    layer_of: [bytes of all layers]: the layer's name of each column.
    is_protected: [bytes of all layers] bool: whether that layer is protected.
    """

    block_size: int
    entry_tokens: int
    region: ShadowRegion | None
    layers: dict[str, Index]
    protected: dict[str, LayerCache]

    def __post_init__(self) -> None:
        self.index = np.concatenate(list(self.layers.values()), axis=1)
        sizes = [index.shape[1] for index in self.layers.values()]
        self.layer_of = np.repeat(list(self.layers), sizes)
        self.is_protected = np.isin(self.layer_of, list(self.protected))

    def entries(self, blocks: list[int]) -> Index:
        """The entries of the worker's table for a request's blocks."""
        per_block = self.block_size // self.entry_tokens
        first = np.array(blocks, dtype=np.int64)[:, None] * per_block
        return (first + np.arange(per_block)).ravel()

    def blocks_index(self, first: int, num_blocks: int = 1) -> Index:
        """[num_blocks * block_size, bytes of all layers]: places of these blocks'
        bytes."""
        return self.index[first * self.block_size :][: num_blocks * self.block_size]


class Cache:
    """The real allocation, and the expected one.

    real: the bytes that the manager and its ops work on.
    expected: the bytes of a transactional cache.
    dirty: [bytes] bool: True where plain vLLM would have bytes of a rejected draft, or
        a copy of them; elsewhere it would have those of `expected`.
    is_shadow: [bytes] bool: protected layers' shadow blocks.
    num_blocks: the scheduler's.
    """

    def __init__(self, draw: random.Random) -> None:
        """1 to 3 groups of 1 to 3 layers, drawn from `draw`. Groups have their own
        memory, or share it as in vLLM's hybrid caches. No group is staged, or all, or
        the first one only."""
        self.num_blocks = num_blocks = draw.choice((16, 32, 48))
        num_groups, num_layers = draw.choice((1, 1, 2, 2, 3)), draw.randint(1, 3)
        shares_memory = num_groups > 1 and draw.random() < 0.4
        shared_bytes = draw.choice((64, 128, 192))
        sizes = [draw.choice((2, 4, 8)) for _ in range(num_groups)]
        num_staged = draw.choice((0, 1, 1, num_groups, num_groups))
        num_seats = draw.choice((2, MAX_REQUESTS, MAX_REQUESTS))
        num_packed = draw.choice((0, 1, num_layers))  # of each group's layers
        # The last layer may be the drafter's, which is not protected.
        has_drafter = num_groups * num_layers > 1 and draw.random() < 0.3
        regions: list[ShadowRegion | None] = [None] * num_groups
        for gid, size in enumerate(sizes[:num_staged]):
            region = ShadowRegion(
                num_blocks,
                num_seats,
                blocks_per_seat(MAX_DRAFTS, size),
                self.num_blocks,
                size,
            )
            num_blocks += region.num_blocks
            regions[gid] = region
        random_bytes = np.random.default_rng(draw.randrange(1 << 32))
        memory = random_bytes.integers(0, 256, MOST_BYTES, dtype=np.uint8)
        self._memory = torch.from_numpy(memory)
        self.groups: list[Group] = []
        end = GUARD_BYTES
        for gid, size in enumerate(sizes):
            per_block = draw.choice((1, 1, 2))  # the kernel's blocks may be smaller
            slot_bytes = draw.choice((8, 16, 24))
            side_by_side = draw.random() < 0.3
            gap = ALIGNMENT * draw.choice((0, 0, 1, 3))
            first = end
            if shares_memory:
                slot_bytes, side_by_side, gap = shared_bytes // size, False, 0
                first = GUARD_BYTES
            page_bytes = size // per_block * slot_bytes
            stride = page_bytes * (num_layers if side_by_side else 1) + gap
            extent = num_blocks * per_block * stride + GUARD_BYTES
            form = num_blocks * per_block, size // per_block, slot_bytes, stride
            layers, protected = {}, {}
            for number in range(num_layers):
                start = first + number * (page_bytes if side_by_side else extent)
                name = f"group {gid} layer {number}"
                layer = self._layer(name, number < num_packed, *form, start)
                layers[name], protected[name] = layer
            end = max(end, start + extent)
            if has_drafter and gid == num_groups - 1:
                del protected[name]
            entry_tokens = draw.choice((size // per_block, size))
            staged = regions[gid] if protected else None
            self.groups.append(Group(size, entry_tokens, staged, layers, protected))
        assert end <= MOST_BYTES
        self.real: Bytes = memory[:end]
        self.expected = self.real.copy()
        self.dirty = np.zeros(end, dtype=bool)
        self.is_shadow = np.zeros(end, dtype=bool)
        for group in self.groups:
            if group.region:
                blocks = group.region.first_block, group.region.num_blocks
                index = group.blocks_index(*blocks)[:, group.is_protected]
                self.is_shadow[index] = True

    def _layer(
        self,
        name: str,
        is_packed: bool,
        num_blocks: int,
        block_size: int,
        slot_bytes: int,
        block_stride: int,
        start: int,
    ) -> tuple[Index, LayerCache]:
        """A layer's index, and its cache for the manager: rows, or columns and a row of
        each slot, as CPU_ATTN packs (`vec`). Blocks are the kernel's."""
        tensor = self._memory.as_strided(
            (num_blocks, block_size, slot_bytes), (block_stride, slot_bytes, 1), start
        )
        if is_packed:
            sizes = slot_bytes // 4, 2, slot_bytes // 2
            owner = reference.columns(block_size, *sizes)
            plain = reference.packed_layout(num_blocks, owner, block_stride)
            runs = [runs_of(offsets) for offsets in plain.index[:block_size]]
            layout = packed_layout(runs, tensor)
        else:
            shape = num_blocks, block_size, 1, slot_bytes
            plain = reference.row_layout(*shape, block_stride, 0, slot_bytes)
            layout = row_layout(tensor)
        return start + plain.index.numpy(), LayerCache(name, tensor, layout)

    def write_step(self, at: Index, payload: Bytes, keep_mask: Mask) -> None:
        """A step's forward in the model: `keep_mask` is False where NWOR restores the
        old bytes."""
        self.dirty[at] = ~keep_mask
        self.expected[at[keep_mask]] = payload[keep_mask]

    def copy(self, source: Index, to: Index) -> None:
        """A copy within the cache: vLLM's block copies."""
        for array in (self.real, self.expected, self.dirty):
            array[to] = array[source]

    def where(self, wrong: Mask) -> str:
        """Layers and slots of the bytes that are wrong."""
        found = {
            name: np.flatnonzero(wrong[index].any(axis=1)).tolist()
            for group in self.groups
            for name, index in group.layers.items()
        }
        slots = {name: slots for name, slots in found.items() if slots}
        return f"{int(wrong.sum())} bytes, slots {slots}"
