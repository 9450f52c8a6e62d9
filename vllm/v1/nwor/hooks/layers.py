# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model runner can be protected, and where their slots' bytes lie.

Reads the runner after vLLM has bound its KV cache. An unknown kind of layer is refused
by name. Drafters' layers are skipped, and so are layers that share another layer's
cache, because protecting that one covers them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1 import kv_cache_interface as kv

from ..base.errors import GroupRefused, error_text
from ..layout.kv_layout import KVLayout, LayoutRefused
from ..layout.probe import Writer, probe_layout
from ..layout.tables import NARROW_POISON, POISON, LayerCache
from .backends import (
    DRAFT_LAYER_ATTRIBUTES,
    FP8_CACHE_DTYPES,
    REFUSED_CACHE_DTYPES,
    REFUSED_IMPLS,
    detached,
    writer_of,
)


def target_layers(runner: Any) -> list[list[LayerCache] | str]:
    """For each KV-cache group the layers that are to be protected, each cache once, or
    why they are not understood. The caches have been bound. Raises nothing."""
    layouts: dict[Any, KVLayout] = {}
    found: list[list[LayerCache] | str] = []
    for group in runner.kv_cache_config.kv_cache_groups:
        try:
            found.append(_target_layers_of(runner, group, layouts))
        except GroupRefused as refused:
            found.append(str(refused))
        except Exception as error:
            found.append(f"its layers could not be examined: {error_text(error)}")
    return found


def sleeps(runner: Any) -> bool:
    """Whether vLLM binds the KV cache inside a pool that loses its content in sleep."""
    model_config = runner.vllm_config.model_config
    return runner.device.type != "cpu" and bool(
        getattr(model_config, "enable_sleep_mode", False)
        or getattr(model_config, "enable_cumem_allocator", False)
    )


def _target_layers_of(
    runner: Any, group: Any, layouts: dict[Any, KVLayout]
) -> list[LayerCache]:
    draft_names = draft_layer_names(runner)
    modules = runner.compilation_config.static_forward_context
    layers: list[LayerCache] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name in group.layer_names:
        if name in draft_names:
            continue
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        layer = modules[name]
        if (refusal := layer_refusal(name, spec, layer)) is not None:
            raise GroupRefused(refusal)
        kv_cache = layer.kv_cache
        if not isinstance(kv_cache, torch.Tensor):
            kind = type(kv_cache).__name__
            message = f"layer {name} has a {kind} for a KV cache; expected one tensor"
            raise GroupRefused(message)
        if (identity := (kv_cache.data_ptr(), kv_cache.stride())) in seen:
            continue
        seen.add(identity)
        try:
            layout = _layout_of(runner, layer, spec, layouts)
        except LayoutRefused as refused:
            raise GroupRefused(f"layer {name}: {refused}") from refused
        except Exception as error:
            what = f"{type(layer.impl).__name__} cannot be probed: {error_text(error)}"
            raise GroupRefused(f"layer {name}: {what}") from error
        poison = _poison(layer.impl, kv_cache)
        layers.append(LayerCache(name, kv_cache, layout, poison))
    return layers


def _poison(impl: Any, kv_cache: torch.Tensor) -> int:
    """The byte that is a large number in a cache, and finite."""
    is_fp8 = getattr(impl, "kv_cache_dtype", None) in FP8_CACHE_DTYPES
    return NARROW_POISON if is_fp8 or kv_cache.dtype is torch.float16 else POISON


def layer_refusal(name: str, spec: Any, layer: Any) -> str | None:
    """Why a layer's cache is refused without probing: it has not one slot for each
    token, or its packing is not supported. None: probing decides."""
    kind, impl = type(spec).__name__, getattr(layer, "impl", None)
    impl_kind, of_kind = type(impl).__name__, type(layer).__name__
    dtype = str(getattr(impl, "kv_cache_dtype", ""))
    packs = [why for start, why in REFUSED_IMPLS.items() if impl_kind.startswith(start)]
    if not isinstance(spec, kv.AttentionSpec):
        refusal = f"has a {kind}, which is not slot based"
    elif isinstance(spec, kv.CrossAttentionSpec | kv.EncoderOnlyAttentionSpec):
        refusal = f"has a {kind}, which drafts never write"
    elif (
        getattr(spec, "tokens_per_state", 1) != 1
        or getattr(spec, "storage_block_size", spec.block_size) != spec.block_size
        or not getattr(spec, "uses_slot_mapping", True)
    ):
        refusal = f"has a compressed or ring-shaped {kind}"
    elif impl is None:
        what = "no attention implementation writes its cache, so nothing can be probed"
        refusal = f"is a {of_kind}: {what}"
    elif dtype in REFUSED_CACHE_DTYPES:
        refusal = f"has a KV cache of type {dtype}, which {REFUSED_CACHE_DTYPES[dtype]}"
    elif packs:
        refusal = f"has a {impl_kind}, which {packs[0]}"
    else:
        return None
    return f"layer {name} {refusal}"


def entry_tokens(runner: Any, gid: int) -> int:
    """Tokens for which an entry of the group's block table stands, on either runner."""
    tables = getattr(runner, "block_tables", None)
    if tables is None:  # V1
        return int(runner.input_batch.block_table[gid].block_size)
    sizes = getattr(tables, "kernel_block_sizes", None) or tables.block_sizes
    return int(sizes[gid])


def draft_layer_names(runner: Any) -> frozenset[str]:
    """Names of the attention layers that belong to the runner's drafter.

    Raises:
        GroupRefused: a drafter that runs a model, but does not say which layers.
    """
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    for attribute in DRAFT_LAYER_ATTRIBUTES:
        names = getattr(drafter, attribute, None)
        if names is not None:
            return frozenset(names)
    method = runner.vllm_config.speculative_config
    if method is not None and (method.use_eagle() or method.uses_draft_model()):
        kind = type(drafter).__name__
        raise GroupRefused(f"{kind} does not say which attention layers are its own")
    return frozenset()


def _layout_of(
    runner: Any, layer: Any, spec: Any, layouts: dict[Any, KVLayout]
) -> KVLayout:
    """layouts: known ones, by the properties that determine them: each kind is probed
    once. Raises LayoutRefused."""
    impl, kv_cache = layer.impl, layer.kv_cache
    key = (
        type(impl),
        getattr(impl, "kv_cache_dtype", None),
        getattr(layer, "isa", None),
        type(spec),
        kv_cache.dtype,
        tuple(kv_cache.shape),
        kv_cache.stride(),
    )
    if key not in layouts:
        dtype = runner.vllm_config.model_config.dtype
        layouts[key] = probe_layout(kv_cache, _writer(layer, dtype))
    kind, device = type(impl).__name__, kv_cache.device.type
    if layouts[key].runs is not None and device != "cpu":
        message = f"{kind} packs its slots; only rows are supported on {device}"
        raise LayoutRefused(message)
    return layouts[key]


def _writer(layer: Any, dtype: torch.dtype) -> Writer:
    """A function that writes one token's keys and values, of dtype `dtype`, as the
    attention implementation of `layer` does. It uses a copy of that, because some
    implementations keep the first cache they see. Raises LayoutRefused if there is no
    such function."""
    impl = detached(layer.impl)
    write = writer_of(impl)
    if isinstance(write, str):
        raise LayoutRefused(write)

    def write_token(kv_cache: torch.Tensor, slot: int) -> None:
        device = kv_cache.device

        def fill(value: float, *shape: int) -> torch.Tensor:
            return torch.full((1, *shape), value, dtype=dtype, device=device)

        slots = torch.tensor([slot], dtype=torch.int64, device=device)
        write(impl, layer, fill, kv_cache, slots)

    return write_token
