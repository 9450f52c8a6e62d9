# SPDX-License-Identifier: Apache-2.0
"""KVLayout: where one slot's bytes lie in one layer's KV cache. All in bytes.

Row caches (every CUDA backend we support): for slot s and head h, with N slots a
block, `run_bytes` bytes start at

    base + (s // N) * block_stride + h * head_stride + (s % N) * slot_stride

N and the strides come from the tensor that vLLM bound to the layer; its block size may
be a kernel's, smaller than the scheduler's. Example: N = 16, 8 heads, K and V of 128
bf16 each, stored as [block, slot, head, 2 * 128]: the heads of a slot touch, so that a
slot is one run of 8 * 512 bytes, slot_stride = 4096 and block_stride = 65536; slot 35
starts at base + 2 * 65536 + 3 * 4096. K and V of a head are neighbours in the last
dimension (C = 2 * head size), and so are scales that a row holds; the older [2, block,
slot, head, size] is refused.

Packed caches: for each offset in the block a list of runs. Example: CPU_ATTN, where K
is column-major inside a block and the packing depends on the instruction set.

Both are verified by probing, never assumed from a backend's name or a shape: `probe`
writes through the backend's own writer and compares bytes. This file has only the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops import TABLE_COLUMNS


class LayoutRefused(ValueError):
    """A cache with slots that are neither rows nor a supported packing."""


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
    slot_stride: int = 0
    head_stride: int = 0
    num_heads: int = 0
    run_bytes: int = 0
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
        columns = [getattr(self, name) for name in TABLE_COLUMNS[1:-1]]
        return [base, *columns, log_offset]

    def row_runs(self, slot: int) -> torch.Tensor:
        """[num_heads, 2] int64, cpu: (offset in the block, length) of each run of
        `slot` in a row cache."""
        first = slot % self.block_size * self.slot_stride
        starts = first + self.head_stride * torch.arange(self.num_heads)
        return torch.stack([starts, torch.full_like(starts, self.run_bytes)], dim=1)


def row_layout(kv_cache: torch.Tensor) -> KVLayout:
    """The row formula for a bound cache: [B, H, N, C], or [B, N, C] as MLA has it.

    Any strides; runs that touch are merged into one. This is a hypothesis until a
    probe has confirmed it.

    Raises:
        LayoutRefused: another number of dimensions, or a last one with gaps.
    """
    shape, last = tuple(kv_cache.shape), kv_cache.stride(-1)
    if len(shape) not in (3, 4):
        raise LayoutRefused(
            f"a KV cache of shape {shape} is not supported; expected [blocks, heads, "
            "slots, bytes] or [blocks, slots, bytes]"
        )
    if last != 1:
        message = f"a KV cache whose last stride is {last} is not supported; expected 1"
        raise LayoutRefused(message)
    item = kv_cache.element_size()
    num_heads, head_stride, run_bytes = 1, 0, shape[-1] * item
    if len(shape) == 4:
        num_heads, head_stride = shape[1], kv_cache.stride(1) * item
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


def packed_layout(
    slot_runs: Sequence[torch.Tensor], kv_cache: torch.Tensor
) -> KVLayout:
    """The run lists of a packed cache, from what a probe saw.

    slot_runs: for each slot of a block [num_runs, 2] int64, cpu: (offset in the block,
        length) of its bytes, as runs_of gives them.
    kv_cache: the bound cache, [B, ...], dense inside a block.

    Raises:
        LayoutRefused: slots that share bytes or differ in shape, or a block with gaps.
    """
    if not kv_cache[0].is_contiguous():
        raise LayoutRefused(
            f"a packed KV cache with strides {kv_cache.stride()} is not supported; "
            "expected blocks that are contiguous"
        )
    starts, lengths = torch.cat(list(slot_runs)).unbind(1)
    starts, order = starts.sort()
    if bool((starts[1:] < (starts + lengths[order])[:-1]).any()):
        raise LayoutRefused("two slots of a packed KV cache share a byte")
    shapes = {(len(runs), int(runs[:, 1].sum())) for runs in slot_runs}
    if len(shapes) != 1:
        raise LayoutRefused(
            f"slots of a packed KV cache differ: (runs, bytes) {sorted(shapes)}"
        )
    return KVLayout(
        block_size=len(slot_runs),
        num_blocks=kv_cache.shape[0],
        block_stride=kv_cache.stride(0) * kv_cache.element_size(),
        runs=torch.stack(list(slot_runs)).to(torch.int32),
    )


def runs_of(offsets: torch.Tensor) -> torch.Tensor:
    """[num_runs, 2] int64: (start, length) of each stretch of consecutive offsets.

    offsets: [num_bytes] int64, ascending. Example: 3, 4, 5, 9 -> (3, 3), (9, 1).
    """
    begins = torch.ones_like(offsets, dtype=torch.bool)
    begins[1:] = offsets[1:] != offsets[:-1] + 1
    first = begins.nonzero().flatten()
    lengths = torch.diff(first, append=first.new_tensor([len(offsets)]))
    return torch.stack([offsets[first], lengths], dim=1)
