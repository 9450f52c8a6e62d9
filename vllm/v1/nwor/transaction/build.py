# SPDX-License-Identifier: Apache-2.0
"""Builds the transaction of a model runner: decides which KV-cache groups are
protected, and how. A group is protected whole or not at all, because a partly restored
token would be worse than an unrestored one. A refusal names the layer and the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from .. import ops
from ..base.errors import GroupRefused, NworError, error_text
from ..config import Mode, NworConfig, OnReject
from ..layout.caches import ExpectedCaches, RunnerCaches, RunnerLimits
from ..layout.regions import StagedGroup, blocks_per_seat
from ..layout.regions import num_bytes as num_shadow_bytes
from ..layout.tables import LayerCache
from ..metrics import GroupInfo
from .draft_manager import DraftCommitManager
from .observer import Transaction
from .shadow_blocks import seats_num_bytes
from .undo_log import num_bytes

logger = logging.getLogger("vllm.v1.nwor")

NAME = "transaction"
# The mode of a KV-cache group that vLLM itself makes transactional.
NATIVE = "native"

Built = tuple[DraftCommitManager | None, list[GroupInfo]]


def is_wanted(config: NworConfig) -> bool:
    return config.mode is not Mode.OFF


def build(
    caches: RunnerCaches, config: NworConfig, storage: torch.Tensor | None
) -> Transaction:
    """The transaction of a runner, right after its KV caches were bound.

    storage: memory that was reserved for the undo log (reserved_bytes), or None to
    allocate it.

    Raises:
        NworError: under VLLM_NWOR_STRICT, if a group is refused. Nothing else:
            unexpected errors are refusals, too.
    """
    try:
        manager, infos = _build(caches, config, storage)
    except Exception as error:
        reason = f"vLLM is not as expected: {error_text(error)}"
        manager, infos = None, _all_refused(len(caches.groups), config, reason)
    _announce(config, infos, manager, caches.reserved_blocks)
    used = None if manager is None else storage
    return Transaction(manager, infos, config.emit_metrics, used)


def refused(
    num_groups: int, config: NworConfig, reason: str, is_logged: bool
) -> Transaction:
    """The transaction of a runner with so many KV-cache groups that cannot have one.
    is_logged: the log says so already. If not, raises NworError under
    VLLM_NWOR_STRICT."""
    infos = _all_refused(num_groups, config, reason)
    if not is_logged:
        _announce(config, infos, None, {})
    return Transaction(None, infos, config.emit_metrics)


def _all_refused(num_groups: int, config: NworConfig, reason: str) -> list[GroupInfo]:
    off = config.mode.value, Mode.OFF.value, reason
    return [GroupInfo(gid, *off) for gid in range(num_groups)]


def _build(
    caches: RunnerCaches, config: NworConfig, storage: torch.Tensor | None
) -> Built:
    limits, groups = caches.limits, caches.groups
    refusal = limits.draft_refusal
    if not refusal and storage is None and limits.sleeps:
        refusal = "no memory was reserved, and sleep mode would lose what is taken now"
    if not refusal:
        try:
            ops.load(limits.device.type)
        except ops.NworOpsUnavailable as missing:
            refusal = str(missing)
    if refusal:
        return None, _all_refused(len(groups), config, refusal)
    protected: dict[int, Sequence[LayerCache]] = {}
    staged: dict[int, StagedGroup] = {}
    infos: list[GroupInfo] = []
    for group in groups:
        gid, layers = group.group_id, group.layers
        if group.kept_by_vllm:
            resolved, reason = NATIVE, group.kept_by_vllm
        elif group.refusal:
            resolved, reason = Mode.OFF.value, group.refusal
        elif layers:
            protected[gid] = layers
            resolved, reason = Mode.COW.value, _protection_of(layers, caches.exports)
            if config.mode is Mode.STAGE:
                if isinstance(group.staged, str):
                    reason = f"no shadow blocks: {group.staged}; {reason}"
                else:
                    resolved, staged[gid] = Mode.STAGE.value, group.staged
        else:  # all of them are the drafter's
            continue
        infos.append(GroupInfo(gid, config.mode.value, resolved, reason))
    if not protected:
        return None, infos
    capacity = _capacity(limits, config)
    of_steps = limits.max_in_flight, limits.num_states
    log = config, [*protected.items()], capacity, storage, None, staged
    try:
        return DraftCommitManager(*log, *of_steps), infos
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = f"no memory for the undo log of {capacity} drafts: {error}"
    except Exception as error:
        reason = f"the undo log cannot be set up: {error_text(error)}"
    off = _all_refused(len(groups), config, reason)
    return None, [off[i.group] if i.group in protected else i for i in infos]


def reserved_bytes(expected: ExpectedCaches, config: NworConfig) -> int:
    """Memory for the undo log, its tables and counters: a row holds one draft's slot in
    each target layer, and there is a row for each draft that a step can have. Raises
    GroupRefused if there will be no transaction."""
    limits = expected.limits
    if limits.draft_refusal:
        raise GroupRefused(limits.draft_refusal)
    layers = [layer for layer in expected.layers if layer.is_target]
    slot_bytes = sum(layer.page_bytes // layer.block_size for layer in layers)
    # How vLLM will group the layers is not known yet.
    sizes = slot_bytes, len(layers), len(layers)
    size = num_bytes(_capacity(limits, config), *sizes)
    if config.on_reject is OnReject.POISON:
        size += num_bytes(1, *sizes)
    if config.mode is Mode.STAGE:
        num_seqs = limits.max_num_seqs
        for layer in layers:
            # Kernel blocks, which entries of a table may stand for, have 16 tokens.
            entries_per_block = -(-layer.block_size // 16)
            span = blocks_per_seat(limits.num_drafts, layer.block_size)
            size += num_shadow_bytes(num_seqs, span * entries_per_block)
        size += seats_num_bytes(num_seqs)
    return size


def _protection_of(layers: Sequence[LayerCache], exports: str) -> str:
    """What is protected, and which KV connectors may read it during the forward."""
    is_packed = any(layer.layout.runs is not None for layer in layers)
    text = f"{len(layers)} layers, {'packed slots' if is_packed else 'rows'}"
    what = "may export rejected drafts' bytes during the forward, before commit"
    return f"{text}; {exports} {what}" if exports else text


def _capacity(limits: RunnerLimits, config: NworConfig) -> int:
    """Rows of the undo log: the drafts that one step can hold at most."""
    rows = limits.max_num_seqs * limits.num_drafts
    rows = min(rows, limits.max_num_batched_tokens)
    return min(rows, config.max_log_rows or rows)


def _announce(
    config: NworConfig,
    infos: Sequence[GroupInfo],
    manager: DraftCommitManager | None,
    reserved_blocks: dict[int, int],
) -> None:
    """One line at start-up; raises under STRICT if a group is refused."""
    groups = "; ".join(
        f"group {info.group}: {info.resolved} ({info.reason})" for info in infos
    )
    refusals = [info for info in infos if info.resolved == Mode.OFF.value]
    if refusals and config.strict:
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
    staged = [info.group for info in infos if info.resolved == Mode.STAGE.value]
    num_lost = sum(reserved_blocks[gid] for gid in reserved_blocks.keys() - staged)
    if num_lost:
        size += f"; {num_lost} reserved KV blocks stay unused"
    log = logger.warning if refusals else logger.info
    log("NWOR %s requested; %s%s", config.mode.value, groups, size)
