# SPDX-License-Identifier: Apache-2.0
"""Reads a model runner's limits and KV caches from vLLM, into layout.caches."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as kv

from ..base.errors import error_text
from ..base.payload import MAX_IN_FLIGHT
from ..layout.caches import (
    ExpectedCaches,
    ExpectedLayer,
    GroupCaches,
    Loads,
    RunnerCaches,
    RunnerLimits,
)
from ..layout.states import StateGroup, ring_shortage
from ..layout.tables import LayerCache
from . import adapters, connectors, states
from .engine_core import config_refusal, connectors_in_forward, parallel_refusal
from .layers import draft_layer_names, entry_tokens, sleeps, target_layers
from .staging import staged_group

KEPT_BY_VLLM = (
    "vLLM keeps a copy of this state for each draft, and goes on from that of the last "
    "accepted one"
)
KEPT_IN_RING = "vLLM's ring has room for a step's drafts next to the rows that it reads"


def limits(runner: Any) -> RunnerLimits:
    config = runner.vllm_config
    scheduler, speculative = config.scheduler_config, config.speculative_config
    num_rows = getattr(runner, "max_num_reqs", None) or scheduler.max_num_seqs
    step_refusal = parallel_refusal(config)
    if getattr(runner, "is_pooling_model", False):
        step_refusal = "a pooling model samples nothing, so its steps have no commit"
    transfer = getattr(config, "kv_transfer_config", None)
    return RunnerLimits(
        device=runner.device,
        draft_refusal=config_refusal(config) or "",
        step_refusal=step_refusal or "",
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=config.model_config.max_model_len,
        num_drafts=0 if speculative is None else speculative.num_speculative_tokens,
        num_rows=int(num_rows),
        num_states=int(num_rows) if is_v2(runner) else 0,
        # Releases without this attribute have the same limit.
        max_in_flight=getattr(config, "max_concurrent_batches", MAX_IN_FLIGHT),
        is_async=bool(getattr(scheduler, "async_scheduling", False)),
        sleeps=sleeps(runner),
        loads=loads_of(config),
        has_own_store=bool(transfer) and connectors.has_own_store(transfer),
        bytes_changed_by=connectors.bytes_changed_by(transfer, os.environ)
        if transfer
        else "",
        drafts_by_model=speculative is not None
        and bool(speculative.use_eagle() or speculative.uses_draft_model()),
    )


def is_v2(runner: Any) -> bool:
    return hasattr(runner, "block_tables")


def connector_of(vllm_config: Any) -> str:
    """Its name, empty for none."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return "" if transfer is None else str(transfer.kv_connector)


def loads_of(vllm_config: Any) -> Loads:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return Loads.NONE
    is_hooked = connectors.is_hooked() and transfer.kv_connector == connectors.NAME
    is_vllms = not getattr(transfer, "kv_connector_module_path", None)
    # If not, it stores partial blocks, and does not say how many slots are filled.
    is_whole = getattr(vllm_config.cache_config, "prefix_match_unit", None) is None
    return Loads.KNOWN if is_hooked and is_vllms and is_whole else Loads.UNKNOWN


def expected(runner: Any) -> ExpectedCaches:
    """Before vLLM sizes the KV cache. Raises GroupRefused, as draft_layer_names."""
    draft_names = draft_layer_names(runner)
    cache = runner.vllm_config.cache_config
    available = cache.kv_cache_memory_bytes
    if not available and runner.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(runner.device)
        taken = torch.cuda.memory_allocated(runner.device)
        available = int(total * cache.gpu_memory_utilization) - taken
    specs, num_blocks = runner.get_kv_cache_spec(), cache.num_gpu_blocks_override
    groups: list[dict[str, Any]] = [specs]
    if len({_kind(spec) for spec in specs.values()}) > 1:
        groups, num_blocks = _grouped(runner.vllm_config, specs, available or 0)
    layers = []
    for gid, group in enumerate(groups):
        for name, spec in group.items():
            kind, size, window = _kind(spec)
            is_target = isinstance(spec, kv.AttentionSpec) and name not in draft_names
            ratio = 0
            if is_target and states.is_ring(spec):
                is_target, ratio = False, states.ratio_of(runner, name)
            shapes, is_cached = (), False
            if isinstance(spec, kv.MambaSpec):
                shapes = tuple(spec.shapes)
                is_cached = states.MODES.get(spec.mamba_cache_mode, False)
            about = window, is_target, gid, shapes, is_cached, ratio
            layers.append(ExpectedLayer(kind, spec.page_size_bytes, size, *about))
    return ExpectedCaches(limits(runner), layers, available or None, num_blocks)


def _kind(spec: Any) -> tuple[str, int, int | None]:
    window = getattr(spec, "sliding_window", None)
    return type(spec).__name__, spec.block_size, window


def _grouped(
    vllm_config: Any, specs: dict[str, Any], available: int
) -> tuple[list[dict[str, Any]], int]:
    """The groups that vLLM makes of the layers, and how many blocks they will have.
    Raises any exception if vLLM is not as expected."""
    is_new = find_spec("vllm.v1.core.kv_cache_planning") is not None  # 0.33
    name = "kv_cache_planning" if is_new else "kv_cache_utils"
    planning = import_module(f"vllm.v1.core.{name}")
    groups = planning.get_kv_cache_groups(vllm_config, dict(specs))
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, available)
    found = []
    for group in groups:
        spec = group.kv_cache_spec
        of_one = dict.fromkeys(group.layer_names, spec)
        found.append(getattr(spec, "kv_cache_specs", of_one))
    return found, config.num_blocks


def bound(runner: Any) -> RunnerCaches:
    """Once the KV caches are bound."""
    config, parallel = runner.kv_cache_config, runner.vllm_config.parallel_config
    reserved = getattr(config, "nwor_shadow", {})
    of_states = states.groups_of(runner)
    rings = {group.group_id: group for group in of_states if group.is_ring}
    groups = [
        _group(runner, gid, group, layers, rings.get(gid))
        for gid, (group, layers) in enumerate(
            zip(config.kv_cache_groups, target_layers(runner), strict=True)
        )
    ]
    return RunnerCaches(
        limits=limits(runner),
        groups=groups,
        num_blocks=config.num_blocks,
        exports=connectors_in_forward(runner.vllm_config),
        reserved_blocks={gid: region.num_blocks for gid, region in reserved.items()}
        if isinstance(reserved, dict)
        else {},
        text_of=partial(_text_of_v2 if is_v2(runner) else _text_of_v1, runner),
        rank=parallel.rank,
        world_size=parallel.world_size,
        vllm_version=vllm.__version__,
        model=str(runner.vllm_config.model_config.model),
        connector=connector_of(runner.vllm_config),
        states=of_states,
        read_states=states.StateMetadata(
            [group for group in of_states if group.states]
        ).read,
        adapters=adapters.watch(runner),
    )


def _group(
    runner: Any,
    gid: int,
    group: Any,
    layers: list[LayerCache] | str,
    ring: StateGroup | None,
) -> GroupCaches:
    spec = group.kv_cache_spec
    refusal, layers = (layers, []) if isinstance(layers, str) else ("", layers)
    kept_by_vllm = KEPT_BY_VLLM if _has_state_of_each_draft(runner, group) else ""
    if ring is not None:
        shortage = ring_shortage(ring, limits(runner).num_drafts)
        refusal, kept_by_vllm = shortage or refusal, "" if shortage else KEPT_IN_RING
    try:
        staged = staged_group(runner, gid, group, layers)
    except Exception as error:
        staged = f"vLLM is not as expected: {error_text(error)}"
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):  # as vLLM's scheduler has it
        spec = next(iter(spec.kv_cache_specs.values()))
    window = 0
    if not isinstance(spec, kv.FullAttentionSpec):  # full attention keeps all blocks
        window = getattr(spec, "sliding_window", None) or 0
        if getattr(spec, "attention_chunk_size", None):
            window = 1  # only the last block is sure to be kept
    size = spec.block_size
    if states.is_ring(spec):  # a request has one block
        size = runner.vllm_config.model_config.max_model_len
    tokens = num_entries = 0
    if layers:  # a group without any may have no block table
        if is_v2(runner):
            table = runner.block_tables.input_block_tables[gid]
        else:
            table = runner.input_batch.block_table[gid].block_table.gpu
        tokens, num_entries = entry_tokens(runner, gid), table.shape[1]
    return GroupCaches(
        group_id=gid,
        layers=layers,
        refusal=refusal,
        kept_by_vllm=kept_by_vllm,
        staged=staged,
        block_size=size,
        entry_tokens=tokens,
        num_entries=num_entries,
        window=window,
    )


def _has_state_of_each_draft(runner: Any, group: Any) -> bool:
    """Whether the group has recurrent state, with a block of its own for each draft:
    the block of a rejected draft is never read again."""
    spec, speculative = group.kv_cache_spec, runner.vllm_config.speculative_config
    if speculative is None or not isinstance(spec, kv.MambaSpec):
        return False
    return bool(spec.num_speculative_blocks >= speculative.num_speculative_tokens)


def _text_of_v1(runner: Any, row: int, _: int) -> torch.Tensor:
    batch = runner.input_batch
    length = int(batch.num_computed_tokens_cpu[row])
    return torch.from_numpy(batch.token_ids_cpu[row, :length].copy())


def _text_of_v2(runner: Any, state: int, length: int) -> torch.Tensor:
    """vLLM's own copy of a request's tokens: host memory that the device sees."""
    tokens: torch.Tensor = runner.req_states.all_token_ids.gpu[state, :length]
    return tokens
