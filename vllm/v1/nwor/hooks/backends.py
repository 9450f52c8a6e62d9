# SPDX-License-Identifier: Apache-2.0
"""Attention backends and types of KV caches: all that NWOR knows of them by name.

Most new backends need no entry. At start-up the probe has the backend's own writer
write to a scratch cache, and finds out which bytes belong to a slot: a row for each
head, or another packing. On a CPU both are protected, on a GPU only rows; everything
else is refused with a message that says what was found. A backend needs an entry if

- its writer has other parameters than those in WRITERS: WRITERS;
- its implementation keeps something of the first cache that it sees: CACHE_DERIVED;
- its slots look like rows, but depend on other slots (a scale for a whole block) or
  share bytes with them: REFUSED_CACHE_DTYPES, REFUSED_IMPLS;
- its cache holds one byte for each number, and nothing else: FP8_CACHE_DTYPES;
- drafters use it on the V2 runner, in mode stage. They read the attention metadata of
  the target after commit, when real blocks are back in the block table. If its metadata
  builder keeps views of the block table, add it to VIEWING_BACKENDS, and run its row of
  tests/gpu/engines.yml with NWOR_GPU_MODE=stage. Without an entry such a group uses
  the undo log. A wrong entry, of a backend that copies the table, costs accepted
  drafts, and no error says so (results/cases.jsonl, case `copied_table`).

Nothing of vLLM is imported.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

# --- Probing --------------------------------------------------------------------------

# Attributes that an implementation derives from the first cache it sees.
CACHE_DERIVED = ("_k_scale_cache", "_v_scale_cache")

# Makes a tensor [1, *shape] of one value: fill(value, *shape).
Fill = Callable[..., Any]
# Writes one token through an implementation: (impl, layer, fill, kv_cache, slots).
Write = Callable[[Any, Any, Fill, Any, Any], None]


def _write_key_value(
    impl: Any, layer: Any, fill: Fill, kv_cache: Any, slots: Any
) -> None:
    heads, size = layer.num_kv_heads, layer.head_size
    key, value = fill(1.0, heads, size), getattr(layer, "head_size_v", size)
    impl.do_kv_cache_update(layer, key, fill(-2.0, heads, value), kv_cache, slots)


def _write_latent(impl: Any, layer: Any, fill: Fill, kv_cache: Any, slots: Any) -> None:
    latent, rope = fill(1.0, layer.kv_lora_rank), fill(-2.0, 1, layer.qk_rope_head_dim)
    more = impl.kv_cache_dtype, layer._k_scale
    impl.do_kv_cache_update(latent, rope, kv_cache, slots, *more)


KEY_VALUE = ("layer", "key", "value", "kv_cache", "slot_mapping")
LATENT = (
    "kv_c_normed",
    "k_pe",
    "kv_cache",
    "slot_mapping",
    "kv_cache_dtype",
    "k_scale",
)
# Parameters of `do_kv_cache_update` -> what calls it for one token. Others may follow
# them if they have defaults.
WRITERS: dict[tuple[str, ...], Write] = {
    KEY_VALUE: _write_key_value,
    LATENT: _write_latent,
}


def writer_of(impl: Any) -> Write | str:
    """What writes one token through an attention implementation, or why it cannot be
    probed."""
    kind = type(impl).__name__
    if (update := getattr(impl, "do_kv_cache_update", None)) is None:
        return (
            f"{kind} has no do_kv_cache_update: it writes the cache inside its "
            "forward, where it cannot be probed"
        )
    params = inspect.signature(update).parameters
    for known, write in WRITERS.items():
        others = list(params.values())[len(known) :]
        if tuple(params)[: len(known)] == known and all(
            other.default is not other.empty for other in others
        ):
            return write
    supported = " and ".join(f"({', '.join(known)})" for known in WRITERS)
    has = f"{kind}.do_kv_cache_update has parameters ({', '.join(params)})"
    return f"{has}; supported are {supported}"


def detached(impl: Any) -> Any:
    """A copy of an implementation that has seen no cache yet."""
    twin = copy.copy(impl)
    for name in CACHE_DERIVED:
        if hasattr(twin, name):
            setattr(twin, name, None)
    return twin


# --- Refused before anything is probed ------------------------------------------------

# KV-cache types whose slots look like rows and are none.
REFUSED_CACHE_DTYPES = {
    "nvfp4": "keeps the scales of a block apart from its data, swizzled by four slots",
    "nvfp4_4over6": "keeps the scales of a block apart from its data",
}
# The same, by the start of the implementation's class name.
REFUSED_IMPLS = {
    "Rocm": "packs the slots of a block element by element",
    "Aiter": "packs the slots of a block in tiles",
}

# --- Poison (VLLM_NWOR_ON_REJECT) -----------------------------------------------------

# KV-cache types of one byte for each number, with nothing else in a slot.
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")

# --- Drafters -------------------------------------------------------------------------

# The attribute of a V1 drafter and of a V2 speculator that names the attention layers
# of a drafter that has some.
DRAFT_LAYER_ATTRIBUTES = ("_draft_attn_layer_names", "draft_attn_layer_names")

# Backends whose metadata has views of block table and slots, so that a V2 drafter finds
# the real blocks when it reads them after commit. Other backends may copy.
VIEWING_BACKENDS = (
    "FLASH_ATTN",
    "TRITON_ATTN",
    "TRITON_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "CUTLASS_MLA",
)
