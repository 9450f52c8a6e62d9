# SPDX-License-Identifier: Apache-2.0
"""Which slot owns which byte of a CPU_ATTN or MLA cache, from the layout's formulas.

Written from vLLM's packing rules, not from NWOR's probing, which finds the same by
experiment with vLLM's own writer; a test holds the two against each other.

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

A cache of multi-head latent attention has no heads, [num_blocks, N, C]: a row for each
token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def cache_of(layer: Any) -> torch.Tensor:
    """The layer's cache as [num_blocks, num_heads, N, width]; MLA's has one head."""
    cache: torch.Tensor = layer.kv_cache
    return cache.unsqueeze(1) if cache.dim() == 3 else cache


def owners(layer: Any) -> torch.Tensor:
    """The offset in its block, 0..N-1, of the slot that owns each byte of a block.

    Returns [num_heads, page bytes of a head] int64. Raises NotImplementedError for an
    instruction set whose packing is not known here.
    """
    _, num_heads, block_size, width = cache_of(layer).shape
    itemsize = layer.kv_cache.element_size()
    if layer.kv_cache.dim() == 3:
        return torch.arange(block_size).repeat_interleave(width * itemsize)[None]
    head_size = width // 2
    token = np.arange(block_size)[:, None]
    dim = np.arange(head_size)[None, :]
    # Up to 0.26 the implementation has it.
    isa = getattr(layer, "isa", None) or layer.impl.isa
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
    return torch.from_numpy(page.repeat(itemsize)).expand(num_heads, -1).contiguous()


def allocation(layer: Any) -> torch.Tensor:
    """The whole allocation that the layer's cache lies in, [bytes] uint8."""
    storage = layer.kv_cache.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=layer.kv_cache.device)
    return whole.set_(storage)


def slot_bytes(layer: Any) -> torch.Tensor:
    """Where in its allocation the bytes of each slot of the layer lie, ascending.

    Returns [num_slots, bytes of a slot] int64. The cache may have any strides as long
    as a head's page is contiguous.
    """
    cache = cache_of(layer)
    num_blocks, num_heads, block_size, width = cache.shape
    assert cache.stride()[2:] == (width, 1), "a head's page is not contiguous"
    itemsize = cache.element_size()
    blocks = torch.arange(num_blocks)[:, None, None] * cache.stride(0)
    heads = torch.arange(num_heads)[:, None] * cache.stride(1)
    page = torch.arange(block_size * width * itemsize)
    pages = (cache.storage_offset() + blocks + heads) * itemsize + page
    by_slot = owners(layer).flatten().argsort(stable=True)
    found = pages.reshape(num_blocks, -1)[:, by_slot]
    return found.view(num_blocks * block_size, -1)
