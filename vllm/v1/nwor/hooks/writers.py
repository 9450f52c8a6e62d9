# SPDX-License-Identifier: Apache-2.0
"""The writer of an attention backend: what puts one token's keys and values into a KV
cache. The probe (layout/probe.py) finds out with it which bytes are a slot's."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch

from ..layout.kv_layout import LayoutRefused
from ..layout.probe import Writer

# Attributes that an implementation derives from the first cache it sees.
CACHE_DERIVED = ("_k_scale_cache", "_v_scale_cache")


def writer_of(layer: Any, dtype: torch.dtype) -> Writer:
    """A writer like that of vLLM's attention layer `layer`, for keys and values of
    dtype `dtype`. It is a copy: some implementations keep the first cache they see."""
    twin = copy.copy(layer.impl)
    for name in CACHE_DERIVED:
        if hasattr(twin, name):
            setattr(twin, name, None)
    return partial(_write, twin, layer, dtype)


def _write(
    impl: Any, layer: Any, dtype: torch.dtype, scratch: torch.Tensor, slot: int
) -> None:
    """One token through the backend's writer; two signatures exist in vLLM. Raises
    LayoutRefused: the implementation has no separate writer."""
    writer, kind = getattr(impl, "do_kv_cache_update", None), type(impl).__name__
    if writer is None:
        raise LayoutRefused(
            f"{kind} has no do_kv_cache_update: it writes the cache inside its "
            "forward, where it cannot be probed"
        )

    def payload(value: float, *shape: int) -> torch.Tensor:
        return torch.full((1, *shape), value, dtype=dtype, device=scratch.device)

    slot_mapping = torch.tensor([slot], dtype=torch.int64, device=scratch.device)
    params = tuple(inspect.signature(writer).parameters)
    if params[:4] == ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping"):
        latent, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
        parts = payload(1.0, latent), payload(-2.0, 1, rope)
        writer(*parts, scratch, slot_mapping, impl.kv_cache_dtype, layer._k_scale)
    elif params == ("layer", "key", "value", "kv_cache", "slot_mapping"):
        heads, size = layer.num_kv_heads, layer.head_size
        size_v = getattr(layer, "head_size_v", size)
        parts = payload(1.0, heads, size), payload(-2.0, heads, size_v)
        writer(layer, *parts, scratch, slot_mapping)
    else:
        has = f"{kind}.do_kv_cache_update has parameters ({', '.join(params)})"
        raise LayoutRefused(f"{has}, which no probe knows")
