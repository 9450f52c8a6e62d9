# SPDX-License-Identifier: Apache-2.0
"""Probing: which bytes does a backend's own writer change for one slot?

The backend's writer (hooks/backends.py) writes one token into one slot of a 2-block
scratch cache of the layer's dtype, inner shape and stride order, once on a background
of 0x00 bytes and once on 0xFF. A byte of the token differs from at least one of them,
so the bytes that changed in either run are exactly the slot's. The result is compared
with the row formula; where it differs it becomes a run list.

Runs at start-up only: it allocates and waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .kv_layout import KVLayout, LayoutRefused, packed_layout, row_layout, runs_of

BACKGROUNDS = (0x00, 0xFF)
_WORD = 8  # bytes of an int64


# Writes one token to a slot of a cache.
Writer = Callable[[torch.Tensor, int], None]


def probe_layout(kv_cache: torch.Tensor, writer: Writer) -> KVLayout:
    """The proven layout of `kv_cache`.

    kv_cache: [B, H, N, C] or [B, N, C], any dtype and strides; not touched.
    writer: of the backend that writes keys and values into this cache.

    Raises:
        LayoutRefused: its slots are neither rows nor a packing that can be copied.
    """
    rows = row_layout(kv_cache)
    scratch, raw = _scratch(kv_cache)
    write = partial(writer, scratch)
    # The first write may also initialize the cache: TRITON_ATTN fills all scales of a
    # per-token-head cache with ones. Later writes change only a slot's bytes.
    write(0)
    block_size = rows.block_size
    block_bytes = scratch[0].numel() * scratch.element_size()
    probed = [*range(block_size), 2 * block_size - 1]
    *runs, last = _changed_runs(write, raw, probed)
    if any(bool((run.sum(dim=1) > block_bytes).any()) for run in runs):
        raise LayoutRefused("a slot of block 0 has bytes in block 1")
    if not torch.equal(last, runs[-1] + last.new_tensor([block_bytes, 0])):
        raise LayoutRefused("slots do not repeat from one block to the next")
    if not all(map(len, runs)):
        raise LayoutRefused("the writer left a slot untouched")
    of_rows = map(row_layout(scratch).row_runs, range(block_size))
    are_rows = all(map(torch.equal, runs, of_rows))
    return rows if are_rows else packed_layout(runs, kv_cache)


def _scratch(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense 2-block cache with the stride order of `kv_cache`, block outermost, and
    its bytes ([2 * block_bytes, up to a whole word] uint8). Where the real cache has
    another dimension outermost, the row formula still holds with the real strides."""
    bound_strides = kv_cache.stride()
    inner = sorted(range(1, kv_cache.dim()), key=lambda dim: -bound_strides[dim])
    shape, strides, step = (2, *kv_cache.shape[1:]), [0] * kv_cache.dim(), 1
    for dim in reversed([0, *inner]):
        strides[dim] = step
        step *= shape[dim]
    num_words = -(-step * kv_cache.element_size() // _WORD)
    raw = torch.empty(num_words * _WORD, dtype=torch.uint8, device=kv_cache.device)
    return raw.view(kv_cache.dtype).as_strided(shape, strides), raw


def _changed_runs(
    write: Callable[[int], None], raw: torch.Tensor, slots: Sequence[int]
) -> list[torch.Tensor]:
    """For each of `slots` the bytes that writing one token to it changes:
    [num_runs, 2] int64, cpu: (offset in `raw`, length)."""
    changed: list[list[torch.Tensor]] = [[] for _ in slots]
    for background in BACKGROUNDS:
        raw.fill_(background)
        for slot, offsets in zip(slots, changed, strict=True):
            write(slot)
            found = _differing(raw, background)
            raw[found] = background
            offsets.append(found.cpu())
    return [runs_of(torch.cat(offsets).unique()) for offsets in changed]


def _differing(raw: torch.Tensor, background: int) -> torch.Tensor:
    """[num_bytes] int64, device of `raw`: where a byte is not the background. Compares
    words first, which is faster: this runs once for each slot."""
    plain = int.from_bytes([background] * _WORD, "little", signed=True)
    first = (raw.view(torch.int64) != plain).nonzero() * _WORD
    offsets = (first + torch.arange(_WORD, device=raw.device)).flatten()
    return offsets[raw[offsets] != background]
