# SPDX-License-Identifier: Apache-2.0
"""The manager for a model runner: which of its KV-cache groups are protected, and how.

A group is protected whole or not at all, because half a token restored would be worse
than none; what is refused is refused by name (layers.py, staging.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as kv

from .. import ops
from ..config import Mode, NworConfig, OnReject
from ..draft_manager import DraftCommitManager, NworError
from ..layer_tables import LayerCache
from ..metrics import GroupInfo
from ..report import MAX_IN_FLIGHT
from ..shadow_blocks import StagedGroup, blocks_per_seat, seats_num_bytes
from ..shadow_blocks import num_bytes as num_shadow_bytes
from ..undo_log import num_bytes
from .engine_core import config_refusal, connectors_in_forward
from .layers import GroupRefused, draft_layer_names, error_text, sleeps, target_layers
from .runner import all_refused
from .staging import staged_group

logger = logging.getLogger("vllm.v1.nwor")

# How a KV-cache group is run that vLLM itself makes transactional.
NATIVE = "native"
KEPT_BY_VLLM = (
    "vLLM keeps a copy of this state for each draft, and goes on from that of the last "
    "accepted one"
)


Built = tuple[DraftCommitManager | None, list[GroupInfo]]


def build(runner: Any, config: NworConfig, storage: torch.Tensor | None) -> Built:
    """The manager for `runner`, whose KV cache has just been bound, and what became of
    each KV-cache group. No manager if nothing can or needs to be protected.

    storage: memory that `reserve` took for the undo log, or None to allocate it.

    Raises:
        NworError: under VLLM_NWOR_STRICT, if a group is refused. Nothing else: what
            is unexpected is a refusal, too.
    """
    try:
        manager, infos = _build(runner, config, storage)
    except Exception as error:
        reason = f"vLLM is not as expected: {error_text(error)}"
        manager, infos = None, all_refused(runner, config.mode, reason)
    _announce(runner, config, infos, manager)
    return manager, infos


def _build(runner: Any, config: NworConfig, storage: torch.Tensor | None) -> Built:
    vllm_config, groups = runner.vllm_config, runner.kv_cache_config.kv_cache_groups
    refusal = config_refusal(vllm_config)
    if refusal is None and storage is None and sleeps(runner):
        refusal = "no memory was reserved, and sleep mode would lose what is taken now"
    if refusal is None:
        try:
            ops.load(runner.device.type)
        except ops.NworOpsUnavailable as missing:
            refusal = str(missing)
    if refusal is not None:
        return None, all_refused(runner, config.mode, refusal)
    protected: dict[int, list[LayerCache]] = {}
    staged: dict[int, StagedGroup] = {}
    infos: list[GroupInfo] = []
    for gid, layers in enumerate(target_layers(runner)):
        if _has_state_of_each_draft(runner, groups[gid]):
            resolved, reason = NATIVE, KEPT_BY_VLLM
        elif isinstance(layers, str):
            resolved, reason = Mode.OFF.value, layers
        elif layers:
            protected[gid] = layers
            resolved, reason = Mode.COW.value, _protection_of(layers, vllm_config)
            if config.mode is Mode.STAGE:
                shadow = staged_group(runner, gid, groups[gid], layers)
                if isinstance(shadow, str):
                    reason = f"no shadow blocks: {shadow}; {reason}"
                else:
                    resolved, staged[gid] = Mode.STAGE.value, shadow
        else:  # all of them are the drafter's
            continue
        infos.append(GroupInfo(gid, config.mode.value, resolved, reason))
    if not protected:
        return None, infos
    capacity = _capacity(vllm_config, config)
    arguments = config, [*protected.items()], capacity, storage, None, staged
    try:
        # Releases that do not say how many steps are in flight have the same limit.
        in_flight = getattr(vllm_config, "max_concurrent_batches", MAX_IN_FLIGHT)
        is_v2 = hasattr(runner, "block_tables")  # on V1 seats are batch rows
        num_states = runner.max_num_reqs if is_v2 else 0
        return DraftCommitManager(*arguments, in_flight, num_states), infos
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = f"no memory for the undo log of {capacity} drafts: {error}"
    except Exception as error:
        reason = f"the undo log cannot be set up: {error_text(error)}"
    off = all_refused(runner, config.mode, reason)
    return None, [off[i.group] if i.group in protected else i for i in infos]


def reserved_bytes(runner: Any, config: NworConfig) -> int:
    """Of the undo log: a row of each target layer's slot for every draft that a step
    can hold, from the layers' KV-cache specs, and what belongs to it. Raises
    GroupRefused if there will be none."""
    if (refusal := config_refusal(runner.vllm_config)) is not None:
        raise GroupRefused(refusal)
    draft_names = draft_layer_names(runner)
    specs = [
        spec
        for name, spec in runner.get_kv_cache_spec().items()
        if isinstance(spec, kv.AttentionSpec) and name not in draft_names
    ]
    slot_bytes = [spec.page_size_bytes // spec.block_size for spec in specs]
    # How vLLM will group the layers is not known yet.
    sizes = sum(slot_bytes), len(slot_bytes), len(slot_bytes)
    size = num_bytes(_capacity(runner.vllm_config, config), *sizes)
    if config.on_reject is OnReject.POISON:
        size += num_bytes(1, *sizes)
    if config.mode is Mode.STAGE:
        num_seqs = runner.vllm_config.scheduler_config.max_num_seqs
        num_drafts = runner.vllm_config.speculative_config.num_speculative_tokens
        for spec in specs:
            # Kernel blocks, which entries of a table may stand for, have 16 tokens.
            entries_per_block = -(-spec.block_size // 16)
            span = blocks_per_seat(num_drafts, spec.block_size) * entries_per_block
            size += num_shadow_bytes(num_seqs, span)
        size += seats_num_bytes(num_seqs)
    return size


def reserve(
    runner: Any,
    config: NworConfig,
    num_bytes: Callable[[Any, NworConfig], int] = reserved_bytes,
) -> torch.Tensor | None:
    """[num_bytes] uint8 on the runner's device, before vLLM sizes the KV cache. None if
    none is needed, or there is not enough: what needs it tries once more when the
    caches are bound, and says so. Raises nothing."""
    try:
        size = num_bytes(runner, config)
        return torch.empty(size, dtype=torch.uint8, device=runner.device)
    except Exception as error:
        logger.debug("NWOR: no memory reserved: %s", error_text(error))
        return None


def _has_state_of_each_draft(runner: Any, group: Any) -> bool:
    """Whether the group has recurrent state, and a block for that behind each draft: a
    rejected one's is never read again."""
    spec = group.kv_cache_spec
    num_drafts = runner.vllm_config.speculative_config.num_speculative_tokens
    is_state = isinstance(spec, kv.MambaSpec)
    return is_state and spec.num_speculative_blocks >= num_drafts


def _protection_of(layers: list[LayerCache], vllm_config: Any) -> str:
    """What is protected, and which KV connectors may read it inside the forward."""
    is_packed = any(layer.layout.runs is not None for layer in layers)
    text = f"{len(layers)} layers, {'packed slots' if is_packed else 'rows'}"
    exports = "may export rejected drafts' bytes during the forward, before commit"
    names = connectors_in_forward(vllm_config)
    return f"{text}; {names} {exports}" if names else text


def _capacity(vllm_config: Any, config: NworConfig) -> int:
    """Rows of the undo log: the drafts that one step can hold at most."""
    scheduler = vllm_config.scheduler_config
    num_drafts = vllm_config.speculative_config.num_speculative_tokens
    rows = min(scheduler.max_num_seqs * num_drafts, scheduler.max_num_batched_tokens)
    return min(rows, config.max_log_rows or rows)


def _announce(
    runner: Any,
    config: NworConfig,
    infos: list[GroupInfo],
    manager: DraftCommitManager | None,
) -> None:
    """One line at start-up; raises under STRICT if a group is refused."""
    groups = "; ".join(
        f"group {info.group}: {info.resolved} ({info.reason})" for info in infos
    )
    refused = [info for info in infos if info.resolved == Mode.OFF.value]
    if refused and config.strict:
        raise NworError(f"NWOR {config.mode.value} requested, refused: {groups}")
    size = ""
    if manager is not None:
        mib = manager.log_bytes / 2**20
        size = f"; undo log: {manager.capacity} drafts, {mib:.1f} MiB"
        if config.on_reject is OnReject.POISON:
            size += "; rejected slots are poisoned"
        if manager.shadow is not None:
            num_seats, mib = manager.shadow.num_seats, manager.shadow_bytes / 2**20
            size += f"; shadow blocks: {num_seats} seats, {mib:.1f} MiB"
    reserved = getattr(getattr(runner, "kv_cache_config", None), "nwor_shadow", "")
    staged = [info.group for info in infos if info.resolved == Mode.STAGE.value]
    if isinstance(reserved, dict) and (lost := reserved.keys() - staged):
        num_lost = sum(reserved[gid].num_blocks for gid in lost)
        size += f"; {num_lost} reserved KV blocks stay unused"
    log = logger.warning if refused else logger.info
    log("NWOR %s requested; %s%s", config.mode.value, groups, size)
