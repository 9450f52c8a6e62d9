# SPDX-License-Identifier: Apache-2.0
"""The audit of a model runner, and its memory, when an engine starts.

Memory is taken where vLLM's accounting sees it: on CUDA in front of `profile_run`, for
as many blocks as there can be, before the KV cache is sized; on the CPU, where an eager
engine never profiles, when the caches are bound.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import vllm
from vllm.v1 import kv_cache_interface as kv

from .. import __version__, ops
from ..config import NworConfig, NworConfigError, audit_file_problem
from ..hooks.engine_core import parallel_refusal
from ..hooks.layers import entry_tokens, sleeps, target_layers
from ..layer_tables import DeviceMemory, LayerCache
from . import offloading
from .requests import Loads
from .state import Audit
from .tables import AuditedGroup, GroupShape, num_bytes

logger = logging.getLogger("vllm.v1.nwor")

# Of the blocks of a cache, those that a KV connector stored last and that are compared
# when they come back: one in so many.
STORED_SHARE = 6


def reserved_bytes(runner: Any, config: NworConfig) -> int:
    """For the cache that there would be if all that is free now went to it. Raises
    ValueError if nothing is audited, or where layers differ in more than their size:
    what blocks there will be then is vLLM's to say."""
    if (refusal := _refusal(runner)) is not None:
        raise ValueError(refusal)
    vllm_config = runner.vllm_config
    cache = vllm_config.cache_config
    specs = list(runner.get_kv_cache_spec().values())
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    sizes = [spec.block_size for spec in specs]
    kinds = set(zip(map(type, specs), sizes, windows, strict=True))
    if len(kinds) != 1:
        raise ValueError(f"{len(kinds)} kinds of layers")
    size = sizes[0]
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None:
        left = cache.kv_cache_memory_bytes
        if not left:
            _, total = torch.cuda.mem_get_info(runner.device)
            taken = torch.cuda.memory_allocated(runner.device)
            left = int(total * cache.gpu_memory_utilization) - taken
        num_blocks = left // sum(spec.page_size_bytes for spec in specs)
    # With room for what a table has beyond the longest text.
    max_blocks = -(-vllm_config.model_config.max_model_len // size) + 64
    num_stored = _num_stored(runner, config, num_blocks)
    shape = GroupShape(0, size, size, num_blocks, max_blocks, 0, num_stored)
    return num_bytes(shape, len(specs), *_sizes(runner, config))


def _num_seats(runner: Any) -> int:
    seats = runner.vllm_config.scheduler_config.max_num_seqs
    return int(getattr(runner, "max_num_reqs", None) or seats)


def _sizes(runner: Any, config: NworConfig) -> tuple[int, int, bool]:
    """As AuditedGroup: num_seats, max_tokens, compares_bytes."""
    max_tokens = runner.vllm_config.scheduler_config.max_num_batched_tokens
    return _num_seats(runner), max_tokens, config.audit_mib > 0


def _num_stored(runner: Any, config: NworConfig, num_blocks: int) -> int:
    is_known = _loads_of(runner.vllm_config) is Loads.KNOWN
    return num_blocks // STORED_SHARE if is_known and config.audit_mib else 0


def _loads_of(vllm_config: Any) -> Loads:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return Loads.NONE
    is_hooked = offloading.is_hooked() and transfer.kv_connector == offloading.NAME
    is_vllms = not getattr(transfer, "kv_connector_module_path", None)
    # Otherwise it stores blocks that are not full, and does not say how far they are.
    is_whole = getattr(vllm_config.cache_config, "prefix_match_unit", None) is None
    return Loads.KNOWN if is_hooked and is_vllms and is_whole else Loads.UNKNOWN


def _refusal(runner: Any) -> str | None:
    """Why nothing of this runner can be audited, or None."""
    if runner.device.type not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, and this is {runner.device.type}"
    if runner.device.type == "cuda" and _num_seats(runner) > ops.MAX_REQS:
        return f"max_num_seqs is {_num_seats(runner)}; must be at most {ops.MAX_REQS}"
    if getattr(runner, "is_pooling_model", False):
        return "a pooling model samples nothing, which is where a step is resolved"
    return parallel_refusal(runner.vllm_config)


def build(runner: Any, config: NworConfig) -> Audit | str:
    """The audit of `runner`, whose caches were bound, or why there is none. Raises
    whatever comes of a vLLM that is not as expected."""
    if (refusal := _refusal(runner)) is not None:
        return refusal
    ops.load(runner.device.type)
    storage = runner.__dict__.get("nwor_audit_storage")
    if storage is None and sleeps(runner):
        return "no memory was reserved, and sleep mode would lose what is taken now"
    audited: list[tuple[GroupShape, list[LayerCache]]] = []
    of_groups = []
    for gid, layers in enumerate(target_layers(runner)):
        reason: Any = layers or "it has no target layers"
        if layers and not isinstance(layers, str):
            shape = _shape_of(runner, config, gid)
            num_slots = shape.num_blocks * shape.block_size
            layouts = [layer.layout for layer in layers]
            if {of.num_blocks * of.block_size for of in layouts} == {num_slots}:
                audited.append((shape, layers))
                of_groups.append(f"group {gid}: {len(layers)} layers")
                continue
            reason = f"its layers do not have {num_slots} slots"
        of_groups.append(f"group {gid}: off ({reason})")
    if not audited:
        return "; ".join(of_groups)
    scheduler = runner.vllm_config.scheduler_config
    sizes = _sizes(runner, config)
    kv_groups = runner.kv_cache_config.kv_cache_groups
    block_sizes = [group.kv_cache_spec.block_size for group in kv_groups]
    budget = min(config.audit_mib, 1 << 30) << 20  # a number of blocks is int64

    def audit_in(memory: DeviceMemory) -> Audit:
        groups = [AuditedGroup(of, layers, *sizes, memory) for of, layers in audited]
        about = budget, sizes[0], block_sizes, memory, _loads_of(runner.vllm_config)
        is_async = bool(getattr(scheduler, "async_scheduling", False))
        return Audit(groups, *about, is_async)

    try:
        audit = audit_in(DeviceMemory(runner.device, storage))
    except ValueError:  # what was reserved is too small
        if sleeps(runner):
            raise
        storage = runner.nwor_audit_storage = None
        audit = audit_in(DeviceMemory(runner.device, None))
    is_late = storage is None and runner.device.type != "cpu"
    num_steps = audit.steps_of_a_pass(runner.kv_cache_config.num_blocks)
    logger.info(
        "NWOR audit: %s; %s; %.1f MiB%s; bytes: %s",
        config.audit.value,
        "; ".join(of_groups),
        audit.num_bytes / 2**20,
        ", beyond what vLLM has counted" if is_late else "",
        f"{config.audit_mib} MiB a step, all of a full cache in {num_steps} steps"
        if config.audit_mib
        else "not compared",
    )
    return audit


def about(audit: Audit) -> dict[str, Any]:
    """What the file says of versions and of the groups that are audited."""
    versions = {"nwor": __version__, "vllm": vllm.__version__}
    groups = {str(of.shape.group_id): f"{len(of.layers)} layers" for of in audit.groups}
    return {**versions, "torch": torch.__version__, "groups": groups}


def path_of(runner: Any, config: NworConfig) -> str:
    """Of the JSON file, which each rank has for itself; empty for none. Raises
    NworConfigError if this process cannot write there."""
    if problem := audit_file_problem(config.audit_file):
        raise NworConfigError(problem)
    parallel = runner.vllm_config.parallel_config
    if config.audit_file and parallel.world_size > 1:
        return f"{config.audit_file}.{parallel.rank}"
    return config.audit_file


def _shape_of(runner: Any, config: NworConfig, gid: int) -> GroupShape:
    kv_config = runner.kv_cache_config
    spec = kv_config.kv_cache_groups[gid].kv_cache_spec
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):  # as vLLM's scheduler has it
        spec = next(iter(spec.kv_cache_specs.values()))
    if hasattr(runner, "block_tables"):  # V2
        table = runner.block_tables.input_block_tables[gid]
    else:
        table = runner.input_batch.block_table[gid].block_table.gpu
    size, num_blocks = spec.block_size, kv_config.num_blocks
    tokens = entry_tokens(runner, gid)
    window = 0
    if not isinstance(spec, kv.FullAttentionSpec):  # of that all blocks are kept
        window = getattr(spec, "sliding_window", None) or 0
        if getattr(spec, "attention_chunk_size", None):
            window = 1  # what is behind the last block may be gone
    max_blocks = -(-table.shape[1] * tokens // size)
    num_stored = _num_stored(runner, config, num_blocks)
    return GroupShape(gid, size, tokens, num_blocks, max_blocks, window, num_stored)
