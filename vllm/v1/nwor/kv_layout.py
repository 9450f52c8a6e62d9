# SPDX-License-Identifier: Apache-2.0
"""KVLayout: where one slot's bytes lie in one layer's KV cache. All in bytes.

Row caches (every CUDA backend we support): for slot s and head h, with N slots a
block, `run_bytes` bytes start at

    base + (s // N) * block_stride + h * head_stride + (s % N) * slot_stride

N and the strides come from the tensor that vLLM bound to the layer. Example: N = 16,
8 heads, K and V of 128 bf16 each, stored as [block, slot, head, 2 * 128]: the heads of
a slot touch, so that a slot is one run of 8 * 512 bytes, slot_stride = 4096 and
block_stride = 65536; slot 35 starts at base + 2 * 65536 + 3 * 4096.

Packed caches (CPU_ATTN, whose K is column-major inside a block and whose packing
depends on the instruction set): for each offset in the block a list of runs.

Neither is believed because a backend's name or a shape suggests it: `kv_probe` writes
through the backend's own writer and looks which bytes change. This file holds only the
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class LayoutRefused(ValueError):
    """A cache whose slots are neither rows nor a packing that can be copied."""


@dataclass(frozen=True, eq=False)
class KVLayout:
    """One slot's bytes in one layer.

    block_size: slots per block. num_blocks: blocks in the bound cache.
    block_stride, slot_stride, head_stride: bytes from one to the next.
    num_heads: runs of `run_bytes` bytes that make up a slot of a row cache.
    runs: [block_size, num_runs, 2] int32, cpu: (offset in the block, length) of each
        run of a packed slot, by its offset in the block; None for row caches.
    """

    block_size: int
    num_blocks: int
    block_stride: int
    slot_stride: int
    head_stride: int
    num_heads: int
    run_bytes: int
    runs: torch.Tensor | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in this layer."""
        if self.runs is None:
            return self.num_heads * self.run_bytes
        return int(self.runs[0, :, 1].sum())

    def table_row(self, base: int, log_offset: int) -> list[int]:
        """This layer's row in the table that the ops take (ops.TABLE_COLUMNS).

        base: address of the layer's first byte.
        log_offset: where the layer's bytes begin in a row of the undo log.
        """
        return [
            base,
            self.block_stride,
            self.slot_stride,
            self.head_stride,
            self.num_heads,
            self.run_bytes,
            self.block_size,
            self.num_blocks,
            log_offset,
        ]

    def byte_mask(self, slot: int, block_bytes: int) -> torch.Tensor:
        """[block_bytes] bool, cpu: True at the bytes of `slot` within its block."""
        mask = torch.zeros(block_bytes, dtype=torch.bool)
        offset = slot % self.block_size
        if self.runs is not None:
            spans = self.runs[offset].tolist()
        else:
            first = offset * self.slot_stride
            spans = [
                (first + head * self.head_stride, self.run_bytes)
                for head in range(self.num_heads)
            ]
        for start, length in spans:
            mask[start : start + length] = True
        return mask


def row_layout(kv_cache: torch.Tensor) -> KVLayout:
    """The row formula for a bound cache: [B, H, N, C], or [B, N, C] as MLA has it.

    Any strides; runs that touch are merged into one. This is a hypothesis until a
    probe has confirmed it.

    Raises:
        LayoutRefused: another number of dimensions, or a last one with gaps.
    """
    if kv_cache.dim() not in (3, 4):
        raise LayoutRefused(
            f"a KV cache of shape {tuple(kv_cache.shape)} is not supported; "
            "expected [blocks, heads, slots, bytes] or [blocks, slots, bytes]"
        )
    if kv_cache.stride(-1) != 1:
        raise LayoutRefused(
            f"a KV cache whose last stride is {kv_cache.stride(-1)} is not supported; "
            "expected 1"
        )
    item = kv_cache.element_size()
    num_heads = kv_cache.shape[1] if kv_cache.dim() == 4 else 1
    head_stride = kv_cache.stride(1) * item if kv_cache.dim() == 4 else 0
    run_bytes = kv_cache.shape[-1] * item
    if num_heads > 1 and head_stride == run_bytes:
        num_heads, run_bytes, head_stride = 1, num_heads * run_bytes, 0
    return KVLayout(
        block_size=kv_cache.shape[-2],
        num_blocks=kv_cache.shape[0],
        block_stride=kv_cache.stride(0) * item,
        slot_stride=kv_cache.stride(-2) * item,
        head_stride=head_stride,
        num_heads=num_heads,
        run_bytes=run_bytes,
    )


def packed_layout(slot_masks: torch.Tensor, kv_cache: torch.Tensor) -> KVLayout:
    """The run lists of a packed cache, from what a probe saw.

    slot_masks: [block_size, block_bytes] bool, cpu: True at the bytes of each slot.
    kv_cache: the bound cache, [B, ...], dense inside a block.

    Raises:
        LayoutRefused: slots that share bytes or differ in shape, or a block with gaps.
    """
    block_size, block_bytes = slot_masks.shape
    item = kv_cache.element_size()
    if not kv_cache[0].is_contiguous() or kv_cache[0].numel() * item != block_bytes:
        raise LayoutRefused(
            f"a packed KV cache with strides {kv_cache.stride()} is not supported; "
            "expected blocks that are contiguous"
        )
    if bool((slot_masks.sum(0) > 1).any()):
        raise LayoutRefused("two slots of a packed KV cache share a byte")
    runs = [_runs_of(mask) for mask in slot_masks]
    shapes = {(len(run), int(run[:, 1].sum())) for run in runs}
    if len(shapes) != 1:
        raise LayoutRefused(
            f"slots of a packed KV cache differ: (runs, bytes) {sorted(shapes)}"
        )
    return KVLayout(
        block_size=block_size,
        num_blocks=kv_cache.shape[0],
        block_stride=kv_cache.stride(0) * item,
        slot_stride=0,
        head_stride=0,
        num_heads=0,
        run_bytes=0,
        runs=torch.stack(runs),
    )


def _runs_of(mask: torch.Tensor) -> torch.Tensor:
    """[num_runs, 2] int32: (start, length) of each stretch of True in a 1-d mask."""
    edges = torch.diff(mask.to(torch.int8), prepend=mask.new_zeros(1).to(torch.int8))
    starts = torch.nonzero(edges == 1).flatten()
    ends = torch.nonzero(edges == -1).flatten()
    if len(ends) < len(starts):
        ends = torch.cat([ends, ends.new_tensor([mask.numel()])])
    return torch.stack([starts, ends - starts], dim=1).to(torch.int32)
