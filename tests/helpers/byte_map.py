# SPDX-License-Identifier: Apache-2.0
"""Which slot owns which byte of a cache: for CPU_ATTN by its packing formulas, for
caches with rows by the strides of the tensor that vLLM bound.

Independent of NWOR's probing, which writes through vLLM's own writer; a test compares
the two.

A block of a layer is, for each head, a page of two regions, K then V, of N * D
elements each (N slots a block, D the head size). Element d of the token at offset o:

    vec, vec16   K: d * N + o              (a column for each token)
                 V: o * D + d              (a row for each token)
    amx          K: pairs of dims:   ((o // 16) * (8 * D) + (d // 2) * 16 + o % 16) * 2
                                     + d % 2
                 V: pairs of tokens: (d // 16) * (16 * N) + (o // 2) * 32
                                     + (d % 16) * 2 + o % 2

Example: vec, N = 32, D = 64, bf16: K's element d = 3 of o = 5 is element 101 of the
page, bytes 202 and 203; V's is element 2048 + 323.

A cache of multi-head latent attention has no heads, [num_blocks, N, C].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch


def cache_of(layer: Any) -> torch.Tensor:
    """The layer's cache as [num_blocks, num_heads, N, width]; MLA's has one head."""
    cache: torch.Tensor = layer.kv_cache
    return cache.unsqueeze(1) if cache.dim() == 3 else cache


def packing(layer: Any) -> str | None:
    """The instruction set for which CPU_ATTN packs this cache; None if it has rows."""
    # Up to vLLM 0.26 it is an attribute of the implementation.
    return getattr(layer, "isa", None) or getattr(layer.impl, "isa", None)


def owners(layer: Any) -> torch.Tensor:
    """The offset in its block, 0..N-1, of the slot that owns each byte of a block.

    Returns [num_heads, page bytes of a head] int64. Raises NotImplementedError for an
    unknown instruction set.
    """
    _, num_heads, block_size, width = cache_of(layer).shape
    head_size = width // 2
    token = np.arange(block_size)[:, None]
    dim = np.arange(head_size)[None, :]
    isa = packing(layer)
    if isa in ("vec", "vec16"):
        key = dim * block_size + token
        value = token * head_size + dim
    elif isa == "amx":
        pair = (token // 16) * (8 * head_size) + (dim // 2) * 16 + token % 16
        key = pair * 2 + dim % 2
        value = (
            (dim // 16) * (16 * block_size)
            + (token // 2) * 32
            + (dim % 16) * 2
            + token % 2
        )
    else:
        raise NotImplementedError(f"no packing rule for isa {isa!r}")
    region = block_size * head_size
    page = np.full(2 * region, -1)
    page[key] = token
    page[region + value] = token
    assert (page >= 0).all(), "the formula leaves bytes without an owner"
    return (
        torch.from_numpy(page.repeat(layer.kv_cache.element_size()))
        .expand(num_heads, -1)
        .contiguous()
    )


def allocation(layer: Any) -> torch.Tensor:
    """The whole allocation that the layer's cache lies in, [bytes] uint8."""
    storage = layer.kv_cache.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=layer.kv_cache.device)
    return whole.set_(storage)


def slot_bytes(layer: Any) -> torch.Tensor:
    """[num_slots, bytes of a slot] int64, on the cache's device: the place in the
    layer's allocation of each byte of a slot. Rows, or a packed head's page, must be
    contiguous.
    """
    cache = cache_of(layer)
    num_blocks, num_heads, block_size, width = cache.shape
    arange = partial(torch.arange, device=cache.device)
    blocks = cache.storage_offset() + arange(num_blocks) * cache.stride(0)
    heads = arange(num_heads)[:, None] * cache.stride(1)
    itemsize = cache.element_size()
    if packing(layer) is None:
        assert cache.stride(3) == 1, cache.stride()
        slots = blocks[:, None] + arange(block_size) * cache.stride(2)
        found = (slots[..., None, None] + heads) * itemsize + arange(width * itemsize)
    else:
        assert cache.stride()[2:] == (width, 1), "a head's page is not contiguous"
        pages = (blocks[:, None, None] + heads) * itemsize
        pages = pages + arange(block_size * width * itemsize)
        by_slot = owners(layer).flatten().argsort(stable=True)
        found = pages.reshape(num_blocks, -1)[:, by_slot]
    return found.reshape(num_blocks * block_size, -1)
