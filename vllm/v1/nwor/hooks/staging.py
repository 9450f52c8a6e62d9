# SPDX-License-Identifier: Apache-2.0
"""Which KV-cache groups can have shadow blocks: a worker's verdict before the cache is
sized (`mark_layers`), and after it is bound (`staged_group`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .. import ops
from ..base.errors import error_text
from ..layout.regions import StagedGroup
from ..layout.tables import LayerCache
from .backends import VIEWING_BACKENDS
from .engine_core import VERDICT, LayerVerdict, copies_refusal, stage_refusal
from .layers import draft_layer_names, entry_tokens, layer_refusal

logger = logging.getLogger("vllm.v1.nwor")


def mark_layers(runner: Any, specs: Mapping[str, Any], reuses_metadata: bool) -> None:
    """Sets a LayerVerdict on each layer's spec before the KV cache is sized, so that
    the engine core reserves no shadow blocks for a group that will be refused. After a
    failure there is no verdict; at worst, blocks are reserved and stay unused.

    reuses_metadata: whether drafters of this runner read the target's metadata again.
    """
    try:
        draft_names = draft_layer_names(runner)
        modules = runner.compilation_config.static_forward_context
        for name, spec in specs.items():
            refusal = layer_refusal(name, spec, modules[name]) or ""
            backend = modules[name].get_attn_backend().get_name()
            copies = reuses_metadata and backend not in VIEWING_BACKENDS
            copying = backend if copies else ""
            verdict = LayerVerdict(name in draft_names, refusal, copying)
            object.__setattr__(spec, VERDICT, verdict)  # specs are frozen
    except Exception as error:
        logger.debug("NWOR: layers are not marked: %s", error_text(error))


def staged_group(
    runner: Any, gid: int, group: Any, layers: list[LayerCache]
) -> StagedGroup | str:
    """What the group needs for shadow blocks, or why it has none."""
    if (refusal := stage_refusal(runner.vllm_config)) is not None:
        return refusal
    has_drafter = not draft_layer_names(runner).isdisjoint(group.layer_names)
    if has_drafter and hasattr(runner, "block_tables"):  # V2
        copying = set()
        for attention in runner.attn_groups[gid]:
            copying |= {attention.backend.get_name()} - {*VIEWING_BACKENDS}
            size = getattr(attention, "kernel_block_size", None)
            if size is not None:
                copying.add(f"a kernel block size of {size}")
        if copying:
            return copies_refusal(copying)
    nothing = "the engine core has reserved no blocks for them"
    reserved = getattr(runner.kv_cache_config, "nwor_shadow", nothing)
    if isinstance(reserved, str):
        return reserved
    if gid not in reserved:
        return "no blocks are reserved for this group"
    region = reserved[gid]
    end = (region.first_block + region.num_blocks) * region.block_size
    tokens = entry_tokens(runner, gid)
    for layer in layers:
        size = layer.layout.block_size
        has = f"layer {layer.name} has"
        if tokens % size or region.block_size % tokens:
            return (
                f"{has} blocks of {size} tokens, its block table {tokens}, the "
                f"scheduler {region.block_size}"
            )
        if end > (num_slots := layer.layout.num_blocks * size):
            return f"{has} {num_slots} slots, and shadow blocks end at {end}"
    staged = StagedGroup(region, tokens)
    if runner.device.type == "cuda" and staged.span > ops.MAX_SPAN:
        needed = f"{staged.span} entries of its block table, more than {ops.MAX_SPAN}"
        return f"a request needs {needed}"
    return staged
