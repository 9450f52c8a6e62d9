# SPDX-License-Identifier: Apache-2.0
"""The audit of a model runner, and its memory, when an engine starts."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from .. import __version__, ops
from ..base.errors import GroupRefused, NworError, error_text
from ..config import (
    AUDIT_FILE,
    AUDIT_INCIDENT,
    AuditMode,
    NworConfig,
    NworConfigError,
    Store,
    audit_file_problem,
    secret_in,
)
from ..layout.caches import (
    ExpectedCaches,
    ExpectedLayer,
    GroupCaches,
    Loads,
    RunnerCaches,
    RunnerLimits,
)
from ..layout.states import StatesRefused, ring_shortage
from ..layout.tables import DeviceMemory, LayerCache
from .handover import Handovers
from .incident import Engine, Recorder
from .observer import NAME, RunnerAudit
from .state import BESIDE_FROM, Audit
from .states import Sizes as StateSizes
from .states import States
from .tables import AuditedGroup, GroupShape, num_bytes

__all__ = ["NAME", "build", "is_wanted", "refused", "reserved_bytes"]

logger = logging.getLogger("vllm.v1.nwor")

# Of the blocks of a cache, those that a KV connector stored last and that are compared
# when they come back: one in so many.
STORED_SHARE = 6


def is_wanted(config: NworConfig) -> bool:
    return config.audit is not AuditMode.OFF


def reserved_bytes(expected: ExpectedCaches, config: NworConfig) -> int:
    """Memory for the audit of the largest possible cache: one that takes all free
    memory. Raises GroupRefused if nothing is audited."""
    limits, layers = expected.limits, expected.layers
    if refusal := _refusal(limits):
        raise GroupRefused(refusal)
    num_blocks = expected.num_blocks
    if num_blocks is None:
        of_a_block = sum(layer.page_bytes for layer in layers)
        num_blocks = (expected.available_bytes or 0) // of_a_block
    num_stored = _num_stored(limits, config, num_blocks)
    groups: dict[int, list[ExpectedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    total = 0
    for group in groups.values():
        if any(layer.is_target for layer in group):
            size = group[0].block_size
            # With room for what a table has beyond the longest text.
            max_blocks = -(-limits.max_model_len // size) + 64
            about = num_stored, _num_digests(limits, config, size)
            shape = GroupShape(0, size, size, num_blocks, max_blocks, 0, *about)
            total += num_bytes(shape, len(group), *_sizes(limits, config))
    shapes = [shape for layer in layers for shape in layer.states]
    max_ratio = max((layer.ratio for layer in layers), default=0)
    if shapes or max_ratio:
        in_groups = [
            sum(len(one.states) + bool(one.ratio) for one in of)
            for of in groups.values()
        ]
        # A convolution has more channels than columns.
        num_columns = max((min(s) for s in shapes if len(s) == 2), default=0)
        of_states = sum(in_groups), sum(map(bool, in_groups)), num_columns
        of_runner = limits.num_rows, num_blocks, limits.num_drafts
        num_records = num_blocks if any(one.is_cached for one in layers) else 0
        of_cache = num_records, max(in_groups), max_ratio
        total += StateSizes(*of_states, *of_runner, *of_cache).num_bytes()
    return total


def build(
    caches: RunnerCaches, config: NworConfig, storage: torch.Tensor | None
) -> RunnerAudit | None:
    """The audit of a runner, right after its caches were bound; None if it is refused.

    Raises:
        NworError: it is refused, under VLLM_NWOR_STRICT.
        NworConfigError: a file of it cannot be written, or read.
    """
    path = _path_of(caches, AUDIT_FILE, config.audit_file)
    incident = _path_of(caches, AUDIT_INCIDENT, config.audit_incident)
    secret = secret_in(config.audit_secret)
    try:
        found = _build(caches, config, storage, secret)
    except Exception as error:
        found = f"vLLM is not as expected: {error_text(error)}"
    if isinstance(found, str):
        refused(len(caches.groups), config, found, is_logged=False)
        return None
    audit, used, of_states = found
    about = _about(audit, caches, of_states)
    observer = RunnerAudit(audit, config, caches, path, about, used)
    if incident:
        of_engine = Engine(config.mode.value, caches.model, caches.connector)
        sizes = [group.block_size for group in caches.groups]
        about_file = observer.findings.content, config.audit_incident_tokens
        audit.recorder = Recorder(incident, of_engine, sizes, *about_file)
    return observer


def refused(num_groups: int, config: NworConfig, reason: str, is_logged: bool) -> None:
    """Logs it, unless that is_logged; raises NworError under VLLM_NWOR_STRICT."""
    if not is_logged:
        if config.strict:
            raise NworError(f"NWOR audit requested, refused: {reason}")
        logger.warning("NWOR audit: off: %s", reason)


def _sizes(limits: RunnerLimits, config: NworConfig) -> tuple[int, int, bool]:
    """As AuditedGroup: num_seats, max_tokens, compares_bytes."""
    return limits.num_rows, limits.max_num_batched_tokens, config.audit_mib > 0


def _num_stored(limits: RunnerLimits, config: NworConfig, num_blocks: int) -> int:
    is_known = limits.loads is Loads.KNOWN
    return num_blocks // STORED_SHARE if is_known and config.audit_mib else 0


def _num_digests(limits: RunnerLimits, config: NworConfig, block_size: int) -> int:
    """Blocks that the requests of a step can fill, at most; 0 if nothing is loaded."""
    if limits.loads is Loads.NONE or not config.audit_mib:
        return 0
    return limits.max_num_batched_tokens // block_size + limits.num_rows


def _is_own(limits: RunnerLimits, config: NworConfig) -> bool:
    """As Digests.is_own."""
    is_said = config.audit_store is Store.OWN
    is_default = config.audit_store is Store.AUTO and limits.has_own_store
    return (is_said or is_default) and not limits.bytes_changed_by


def _about_loads(limits: RunnerLimits, config: NworConfig) -> list[str]:
    """How loads are verified, for start-up."""
    if limits.loads is Loads.NONE or not config.audit_mib:
        return []
    if limits.bytes_changed_by:
        how = (
            "not compared with what this engine has computed, because their bytes are "
            f"changed by {limits.bytes_changed_by}"
        )
    elif _is_own(limits, config):
        how = "compared with what this engine has computed"
    else:
        how = "compared with what this engine has computed, which may differ from it"
    if config.audit_secret:
        how += ", and with the digests of prefill instances"
        how += no and f": {no}" if (no := _no_handovers(limits, config)) else ""
    return [f"loads: {how}"]


def _no_handovers(limits: RunnerLimits, config: NworConfig) -> str:
    """Why no digests travel between instances, or nothing."""
    if limits.loads is Loads.NONE or not config.audit_mib:
        return "no load is compared"
    return limits.bytes_changed_by and "bytes are changed on the way"


def _refusal(limits: RunnerLimits) -> str:
    """Why nothing of a runner can be audited, or nothing."""
    if limits.device.type not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, and this is {limits.device.type}"
    if limits.device.type == "cuda" and limits.num_rows > ops.MAX_REQS:
        return f"max_num_seqs is {limits.num_rows}; must be at most {ops.MAX_REQS}"
    return limits.step_refusal


def _build(
    caches: RunnerCaches,
    config: NworConfig,
    storage: torch.Tensor | None,
    secret: bytes,
) -> tuple[Audit, torch.Tensor | None, list[str]] | str:
    """The audit, the storage that it uses, and what it says of recurrent states; or why
    there is no audit. Raises any exception if vLLM is not as expected."""
    limits = caches.limits
    if refusal := _refusal(limits):
        return refusal
    ops.load(limits.device.type)
    if storage is None and limits.sleeps:
        return "no memory was reserved, and sleep mode would lose what is taken now"
    audited: list[tuple[GroupShape, list[LayerCache]]] = []
    of_groups = []
    has_states = {group.group_id for group in caches.states}
    for group in caches.groups:
        gid, layers = group.group_id, list(group.layers)
        if gid in has_states:
            continue
        reason = group.refusal or "it has no target layers"
        if layers:
            shape = _shape_of(group, caches, config)
            num_slots = shape.num_blocks * shape.block_size
            layouts = [layer.layout for layer in layers]
            if {of.num_blocks * of.block_size for of in layouts} == {num_slots}:
                audited.append((shape, layers))
                of_groups.append(f"group {gid}: {len(layers)} layers")
                continue
            reason = f"its layers do not have {num_slots} slots"
        of_groups.append(f"group {gid}: off ({reason})")
    if not audited:
        of_states = _of_states(caches, None, "no group with slots is audited")
        return "; ".join([*of_groups, *of_states])
    followed = [group for group in caches.states if group.states]
    for of in followed:
        if shortage := ring_shortage(of, limits.num_drafts):
            logger.warning("NWOR audit: group %d: %s", of.group_id, shortage)
    sizes = _sizes(limits, config)
    block_sizes = [group.block_size for group in caches.groups]
    budget = min(config.audit_mib, 1 << 30) << 20  # a number of blocks is int64

    reason = ""

    def audit_in(memory: DeviceMemory) -> Audit:
        nonlocal reason
        groups = [AuditedGroup(of, layers, *sizes, memory) for of, layers in audited]
        about = budget, sizes[0], block_sizes, memory, limits.loads
        states = None
        if followed:
            of_runner = sizes[0], caches.num_blocks, limits.num_drafts, memory
            try:
                states = States(followed, *of_runner)
            except StatesRefused as refused:
                reason = str(refused)
        handovers = None
        # Only the outputs of the first rank reach the scheduler.
        if secret and caches.rank == 0 and not _no_handovers(limits, config):
            handovers = Handovers(groups, secret, caches.world_size)
        more = caches.adapters, states, _is_own(limits, config), handovers
        audit = Audit(groups, *about, limits.is_async, *more)
        if limits.drafts_by_model and limits.device.type == "cuda":
            audit.beside_from = BESIDE_FROM
        return audit

    try:
        audit = audit_in(DeviceMemory(limits.device, storage))
    except ValueError:  # what was reserved is too small
        if limits.sleeps:
            raise
        storage = None
        audit = audit_in(DeviceMemory(limits.device, None))
    of_states = _of_states(caches, audit.states, reason)
    is_late = storage is None and limits.device.type != "cpu"
    num_steps = audit.steps_of_a_pass(caches.num_blocks)
    logger.info(
        "NWOR audit: %s; %s; %.1f MiB%s; bytes: %s",
        config.audit.value,
        "; ".join([*of_groups, *of_states, *_about_loads(limits, config)]),
        audit.num_bytes / 2**20,
        ", in addition to what vLLM has counted" if is_late else "",
        f"{config.audit_mib} MiB a step, all of a full cache in {num_steps} steps"
        if config.audit_mib
        else "not compared",
    )
    return audit, storage, of_states


def _of_states(caches: RunnerCaches, states: States | None, reason: str) -> list[str]:
    """What is followed of each group with recurrent state or rings, and what it costs.
    reason: why nothing is, without states."""
    found, numbers = [], Counter[str]()
    for group in caches.states:
        about = f"{group.what} off ({group.refusal or reason})"
        if states is not None and group.states:
            about = group.about()
            numbers[group.what] += len(group.states)
        found.append(f"group {group.group_id}: {about}")
    if states is not None:
        taken, read = states.num_bytes / 2**20, states.step_bytes / 2**20
        all_of_them = " and ".join(f"{n} {what}" for what, n in numbers.items())
        found.append(
            f"{all_of_them}: {taken:.2f} MiB, 2 launches a step, {read:.2f} MiB read "
            f"in a step of {caches.limits.num_rows} requests"
        )
    return found


def _about(audit: Audit, caches: RunnerCaches, of_states: list[str]) -> dict[str, Any]:
    """Versions and audited groups, for the file."""
    versions = {"nwor": __version__, "vllm": caches.vllm_version}
    groups = {str(of.shape.group_id): f"{len(of.layers)} layers" for of in audit.groups}
    about = {**versions, "torch": str(torch.__version__), "groups": groups}
    return about | ({"states": of_states} if of_states else {})


def _path_of(caches: RunnerCaches, name: str, path: str) -> str:
    """Of a variable's JSON file, one for each rank; empty for none. Raises
    NworConfigError if this process cannot write there."""
    if problem := audit_file_problem(name, path):
        raise NworConfigError(problem)
    if path and caches.world_size > 1:
        return f"{path}.{caches.rank}"
    return path


def _shape_of(
    group: GroupCaches, caches: RunnerCaches, config: NworConfig
) -> GroupShape:
    size, tokens, num_blocks = group.block_size, group.entry_tokens, caches.num_blocks
    max_blocks = -(-group.num_entries * tokens // size)
    num_stored = _num_stored(caches.limits, config, num_blocks)
    num_digests = _num_digests(caches.limits, config, size)
    about = max_blocks, group.window, num_stored, num_digests
    return GroupShape(group.group_id, size, tokens, num_blocks, *about)
