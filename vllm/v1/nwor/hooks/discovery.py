# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model runner can be protected, and how: the manager for a runner.

Reads the runner after vLLM has bound its KV cache. What is not understood is refused by
name, a KV-cache group at a time: a group is protected whole or not at all, because half
a token restored would be worse than none. Drafters' layers are left alone; layers that
share another layer's cache are covered by it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from .. import ops
from ..config import Mode, NworConfig, OnReject
from ..device_memory import ALIGNMENT
from ..draft_manager import DraftCommitManager, LayerCache, NworError, StagedGroup
from ..kv_layout import KVLayout, LayoutRefused
from ..kv_probe import probe_layout
from ..launches import NARROW_POISON, POISON, num_bytes
from ..metrics import GroupInfo
from ..report import MAX_IN_FLIGHT, Report
from ..shadow_pages import blocks_per_seat
from ..shadow_pages import num_bytes as num_shadow_bytes
from .engine_core import (
    VERDICT,
    LayerVerdict,
    config_refusal,
    connectors_in_forward,
    group_refusal,
    stage_refusal,
)

logger = logging.getLogger("vllm.v1.nwor")

# Drafters that have attention layers of their own say which in this attribute
# (a V1 drafter, a V2 speculator); the others have none.
DRAFT_LAYER_ATTRIBUTES = ("_draft_attn_layer_names", "draft_attn_layer_names")


# Caches whose bytes of one slot do not lie together, although their shapes look so:
# refused before anything is written to find out. By KV-cache type, then by the start of
# the implementation's class name.
REFUSED_CACHE_DTYPES = {
    "nvfp4": "keeps the scales of a block apart from its data, swizzled by four slots",
    "nvfp4_4over6": "keeps the scales of a block apart from its data",
}
REFUSED_IMPLS = {
    "Rocm": "packs the slots of a block element by element",
    "Aiter": "packs the slots of a block in tiles",
}


# How a KV-cache group is run that vLLM itself makes transactional.
NATIVE = "native"


class GroupRefused(ValueError):
    """A KV-cache group that NWOR leaves to vanilla vLLM; the text says why."""


Built = tuple[DraftCommitManager | None, list[GroupInfo], Report]


def build(runner: Any, config: NworConfig, storage: torch.Tensor | None) -> Built:
    """The manager for `runner`, whose KV cache has just been bound, what became of each
    KV-cache group, and the report. No manager if nothing can or needs to be protected.

    storage: memory that `reserve` took for the undo log, or None to allocate it.

    Raises:
        NworError: under VLLM_NWOR_STRICT, if a group is refused. Nothing else: what
            nobody expected is a refusal too.
    """
    try:
        return _build(runner, config, storage)
    except NworError:
        raise
    except Exception as error:
        reason = f"vLLM is not as expected: {_told(error)}"
        infos = [
            GroupInfo(gid, config.mode.value, Mode.OFF.value, reason)
            for gid in range(len(runner.kv_cache_config.kv_cache_groups))
        ]
        _announce(config, infos, None)
        return None, infos, Report(infos, None)


def _build(runner: Any, config: NworConfig, storage: torch.Tensor | None) -> Built:
    groups = runner.kv_cache_config.kv_cache_groups
    requested = config.mode.value
    refusal = config_refusal(runner.vllm_config)
    if refusal is None and storage is None and sleeps(runner):
        refusal = "no memory was reserved, and sleep mode would lose what is taken now"
    if refusal is None:
        try:
            ops.load(runner.device.type)
        except ops.NworOpsUnavailable as missing:
            refusal = str(missing)
    protected: list[tuple[int, list[LayerCache]]] = []
    staged: dict[int, StagedGroup] = {}
    infos: list[GroupInfo] = []
    exports = _exports_before_commit(runner.vllm_config)
    layouts = _LayoutCache(runner)
    for gid, group in enumerate(groups):
        try:
            if refusal is not None:
                raise GroupRefused(refusal)
            if _has_state_of_each_draft(runner, group):
                reason = (
                    "vLLM keeps a copy of this state for each draft, and goes on from "
                    "that of the last accepted one"
                )
                infos.append(GroupInfo(gid, requested, NATIVE, reason))
                continue
            layers = _target_layers(runner, group, layouts)
        except (GroupRefused, LayoutRefused) as refused:
            infos.append(GroupInfo(gid, requested, Mode.OFF.value, str(refused)))
            continue
        except Exception as error:
            reason = f"its layers could not be examined: {_told(error)}"
            infos.append(GroupInfo(gid, requested, Mode.OFF.value, reason))
            continue
        if layers:
            protected.append((gid, layers))
            resolved, reason = Mode.COW, _shape(layers) + exports
            if config.mode is Mode.STAGE:
                try:
                    staged[gid] = _staged_group(runner, gid, group, layers)
                    resolved = Mode.STAGE
                except GroupRefused as refused:
                    reason = f"{refused}; {reason}"
            infos.append(GroupInfo(gid, requested, resolved.value, reason))
    if protected:
        capacity = _capacity(runner.vllm_config, config)
        try:
            manager = DraftCommitManager(
                config, protected, capacity, storage, staged=staged
            )
            report = Report(infos, manager, _max_in_flight(runner.vllm_config))
        except (torch.OutOfMemoryError, MemoryError) as error:
            infos = _all_off(
                infos, f"no memory for the undo log of {capacity} drafts: {error}"
            )
        except Exception as error:
            infos = _all_off(infos, f"the undo log cannot be set up: {_told(error)}")
        else:
            _announce(config, infos, manager)
            return manager, infos, report
    _announce(config, infos, None)
    return None, infos, Report(infos, None)


def _told(error: Exception) -> str:
    """An exception that nobody expected, in words; its traceback goes to the log."""
    logger.debug("NWOR: at start-up", exc_info=True)
    return f"{type(error).__name__}: {error}"


def _all_off(infos: list[GroupInfo], reason: str) -> list[GroupInfo]:
    """The same groups with none of them protected by us; earlier refusals keep
    theirs."""
    return [
        info
        if info.resolved in (Mode.OFF.value, NATIVE)
        else info._replace(resolved=Mode.OFF.value, reason=reason)
        for info in infos
    ]


def reserve(runner: Any, config: NworConfig) -> torch.Tensor | None:
    """Memory for the undo log, before vLLM sizes the KV cache; None if none is needed,
    or there is not enough (`build` tries once more, and tells). Raises nothing.

    Returns [num_bytes] uint8 on the runner's device: a row of each target layer's
    slot for every draft that a step can hold, from the layers' KV-cache specs, and what
    belongs to it.
    """
    try:
        if config_refusal(runner.vllm_config) is not None:
            return None
        size = _reserved_bytes(runner, config)
        return torch.empty(size, dtype=torch.uint8, device=runner.device)
    except Exception as error:
        logger.debug("NWOR: no memory reserved for the undo log: %s", _told(error))
        return None


def _reserved_bytes(runner: Any, config: NworConfig) -> int:
    draft_names = _draft_layer_names(runner)
    specs = [
        spec
        for name, spec in runner.get_kv_cache_spec().items()
        if isinstance(spec, AttentionSpec) and name not in draft_names
    ]
    slot_bytes = [spec.page_size_bytes // spec.block_size for spec in specs]
    # How vLLM will group the layers is not known yet.
    num_layers = num_groups = len(slot_bytes)
    capacity = _capacity(runner.vllm_config, config)
    size = num_bytes(capacity, sum(slot_bytes), num_groups, num_layers)
    if config.on_reject is OnReject.POISON:
        size += num_bytes(1, sum(slot_bytes), num_groups, num_layers)
    if config.mode is Mode.STAGE:
        num_seqs = runner.vllm_config.scheduler_config.max_num_seqs
        num_drafts = runner.vllm_config.speculative_config.num_speculative_tokens
        for block_size in (spec.block_size for spec in specs):
            # Kernel blocks, which entries of a table may stand for, have 16 tokens.
            entries_per_block = -(-block_size // 16)
            span = blocks_per_seat(num_drafts, block_size) * entries_per_block
            size += num_shadow_bytes(num_seqs, span) + ALIGNMENT
    return size


def target_layers(runner: Any) -> list[list[LayerCache] | str]:
    """For each KV-cache group its target layers, or why they are not understood. The
    caches have been bound. Raises nothing."""
    layouts = _LayoutCache(runner)
    found: list[list[LayerCache] | str] = []
    for group in runner.kv_cache_config.kv_cache_groups:
        try:
            found.append(_target_layers(runner, group, layouts))
        except (GroupRefused, LayoutRefused) as refused:
            found.append(str(refused))
        except Exception as error:
            found.append(f"its layers could not be examined: {_told(error)}")
    return found


def sleeps(runner: Any) -> bool:
    """Whether vLLM binds the KV cache inside a pool that loses its content in sleep."""
    model_config = runner.vllm_config.model_config
    return runner.device.type != "cpu" and bool(
        getattr(model_config, "enable_sleep_mode", False)
        or getattr(model_config, "enable_cumem_allocator", False)
    )


def _target_layers(runner: Any, group: Any, layouts: _LayoutCache) -> list[LayerCache]:
    """The layers of a KV-cache group that are to be protected, each cache once."""
    draft_names = _draft_layer_names(runner)
    modules = runner.compilation_config.static_forward_context
    layers: list[LayerCache] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name in group.layer_names:
        if name in draft_names:
            continue
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        _check_spec(name, spec)
        kv_cache = modules[name].kv_cache
        if not isinstance(kv_cache, torch.Tensor):
            raise GroupRefused(
                f"layer {name} has a {type(kv_cache).__name__} for a KV cache; "
                "expected one tensor"
            )
        identity = (kv_cache.data_ptr(), kv_cache.stride())
        if identity in seen:
            continue
        seen.add(identity)
        _check_layer(name, modules[name])
        layout = layouts.get(name, modules[name], kv_cache, spec)
        layers.append(
            LayerCache(name, kv_cache, layout, _poison(modules[name].impl, kv_cache))
        )
    return layers


# KV-cache types of one byte for each number, and nothing else in a slot.
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")


def _poison(impl: Any, kv_cache: torch.Tensor) -> int:
    """The byte that is a large number in a cache, and finite."""
    is_narrow = (
        kv_cache.dtype is torch.float16
        or getattr(impl, "kv_cache_dtype", None) in FP8_CACHE_DTYPES
    )
    return NARROW_POISON if is_narrow else POISON


def _has_state_of_each_draft(runner: Any, group: Any) -> bool:
    """Whether the group has recurrent state, and a block for that behind each draft: a
    rejected one's is never read again."""
    spec = group.kv_cache_spec
    num_drafts = runner.vllm_config.speculative_config.num_speculative_tokens
    return isinstance(spec, MambaSpec) and spec.num_speculative_blocks >= num_drafts


def _check_spec(name: str, spec: Any) -> None:
    """Refuses specs whose cache is not one slot for each token."""
    kind = type(spec).__name__
    if not isinstance(spec, AttentionSpec):
        raise GroupRefused(f"layer {name} has a {kind}, which is not slot based")
    if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec):
        raise GroupRefused(f"layer {name} has a {kind}, which drafts never write")
    compressed = (
        getattr(spec, "tokens_per_state", 1) != 1
        or getattr(spec, "storage_block_size", spec.block_size) != spec.block_size
        or not getattr(spec, "uses_slot_mapping", True)
    )
    if compressed:
        raise GroupRefused(f"layer {name} has a compressed or ring-shaped {kind}")


def _check_layer(name: str, layer: Any) -> None:
    """Refuses layers whose cache is known to be neither rows nor a known packing."""
    impl = getattr(layer, "impl", None)
    if impl is None:
        raise GroupRefused(
            f"layer {name} is a {type(layer).__name__}: no attention implementation "
            "writes its cache, so nothing can be probed"
        )
    cache_dtype = str(getattr(impl, "kv_cache_dtype", ""))
    if cache_dtype in REFUSED_CACHE_DTYPES:
        raise GroupRefused(
            f"layer {name} has a KV cache of type {cache_dtype}, which "
            f"{REFUSED_CACHE_DTYPES[cache_dtype]}"
        )
    kind = type(impl).__name__
    for start, reason in REFUSED_IMPLS.items():
        if kind.startswith(start):
            raise GroupRefused(f"layer {name} has a {kind}, which {reason}")


def _draft_layer_names(runner: Any) -> frozenset[str]:
    """Names of the attention layers that belong to the runner's drafter.

    Raises:
        GroupRefused: a drafter that runs a model, but does not say which layers.
    """
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    for attribute in DRAFT_LAYER_ATTRIBUTES:
        names = getattr(drafter, attribute, None)
        if names is not None:
            return frozenset(names)
    speculative = runner.vllm_config.speculative_config
    if speculative is not None and (
        speculative.use_eagle() or speculative.uses_draft_model()
    ):
        raise GroupRefused(
            f"{type(drafter).__name__} does not say which attention layers are its own"
        )
    return frozenset()


class _LayoutCache:
    """Layouts by what determines them, so that each kind is probed once."""

    def __init__(self, runner: Any) -> None:
        self._dtype = runner.vllm_config.model_config.dtype
        self._known: dict[Any, KVLayout] = {}

    def get(self, name: str, layer: Any, kv_cache: torch.Tensor, spec: Any) -> KVLayout:
        key = (
            type(layer.impl),
            getattr(layer.impl, "kv_cache_dtype", None),
            getattr(layer, "isa", None),
            type(spec),
            kv_cache.dtype,
            tuple(kv_cache.shape),
            kv_cache.stride(),
        )
        if key not in self._known:
            try:
                self._known[key] = probe_layout(layer, kv_cache, self._dtype)
            except LayoutRefused as refused:
                raise LayoutRefused(f"layer {name}: {refused}") from refused
            except Exception as error:
                raise LayoutRefused(
                    f"layer {name}: {type(layer.impl).__name__} cannot be probed: "
                    f"{_told(error)}"
                ) from error
        layout = self._known[key]
        if layout.runs is not None and kv_cache.device.type != "cpu":
            raise LayoutRefused(
                f"layer {name}: {type(layer.impl).__name__} packs its slots; only rows "
                f"are supported on {kv_cache.device.type}"
            )
        return layout


def _shape(layers: list[LayerCache]) -> str:
    packed = any(layer.layout.runs is not None for layer in layers)
    return f"{len(layers)} layers, {'packed slots' if packed else 'rows'}"


# Entries of a block table that a window can have in shadow: kMaxSpan of shadow_cuda.cu.
MAX_SPAN = 64

# Backends whose metadata holds block table and slots as they are, so that a V2 drafter,
# which reads them again later in the step, finds them put back. The others copy.
VIEWING_BACKENDS = (
    "FLASH_ATTN",
    "TRITON_ATTN",
    "TRITON_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "CUTLASS_MLA",
)


def mark_layers(runner: Any, specs: Mapping[str, Any], reuses_metadata: bool) -> None:
    """Leaves on each layer's spec what is known of it before the KV cache is sized: the
    engine core reserves no shadow blocks for a group that will be refused. What fails
    leaves no mark: blocks are lost then, no more.

    reuses_metadata: whether drafters of this runner read the target's metadata again.
    """
    try:
        draft_names = _draft_layer_names(runner)
        modules = runner.compilation_config.static_forward_context
        for name, spec in specs.items():
            verdict = LayerVerdict(name in draft_names)
            try:
                _check_spec(name, spec)
                _check_layer(name, modules[name])
            except GroupRefused as refused:
                verdict = verdict._replace(refusal=str(refused))
            backend = modules[name].get_attn_backend().get_name()
            if reuses_metadata and backend not in VIEWING_BACKENDS:
                verdict = verdict._replace(copies=backend)
            object.__setattr__(spec, VERDICT, verdict)  # specs are frozen
    except Exception as error:
        logger.debug("NWOR: layers are not marked: %s", _told(error))


def _verdicts_of_bound(runner: Any, gid: int, group: Any) -> list[LayerVerdict]:
    """Of a group of the V2 runner whose caches are bound: who copies its block table,
    and whether the drafter has layers in it."""
    has_drafter = not _draft_layer_names(runner).isdisjoint(group.layer_names)
    found = [LayerVerdict(has_drafter)]
    for attention in runner.attn_groups[gid]:
        backend = attention.backend.get_name()
        if backend not in VIEWING_BACKENDS:
            found.append(LayerVerdict(False, copies=backend))
        kernel_block_size = getattr(attention, "kernel_block_size", None)
        if kernel_block_size is not None:
            copies = f"a kernel block size of {kernel_block_size}"
            found.append(LayerVerdict(False, copies=copies))
    return found


def _staged_group(
    runner: Any, gid: int, group: Any, layers: list[LayerCache]
) -> StagedGroup:
    """What the group needs for shadow pages. Raises GroupRefused: why it has none."""
    refusal = stage_refusal(runner.vllm_config)
    if refusal is not None:
        raise GroupRefused(f"no shadow pages: {refusal}")
    if hasattr(runner, "block_tables"):  # V2
        tables = runner.block_tables
        sizes = getattr(tables, "kernel_block_sizes", None) or tables.block_sizes
        entry_tokens = sizes[gid]
        refusal = group_refusal(_verdicts_of_bound(runner, gid, group))
        if refusal is not None:
            raise GroupRefused(f"no shadow pages: {refusal}")
    else:
        entry_tokens = runner.input_batch.block_table[gid].block_size
    reserved = getattr(runner.kv_cache_config, "nwor_shadow", None)
    if reserved is None:
        raise GroupRefused(
            "no shadow pages: the engine core has reserved no blocks for them"
        )
    if isinstance(reserved, str):
        raise GroupRefused(f"no shadow pages: {reserved}")
    if gid not in reserved:
        raise GroupRefused("no shadow pages: no blocks are reserved for this group")
    region = reserved[gid]
    for layer in layers:
        block_size, num_blocks = layer.layout.block_size, layer.layout.num_blocks
        if entry_tokens % block_size or region.block_size % entry_tokens:
            raise GroupRefused(
                f"no shadow pages: layer {layer.name} has blocks of {block_size} "
                f"tokens, its block table {entry_tokens}, the scheduler "
                f"{region.block_size}"
            )
        end = (region.first_block + region.num_blocks) * region.block_size
        if end > num_blocks * block_size:
            raise GroupRefused(
                f"no shadow pages: layer {layer.name} has {num_blocks * block_size} "
                f"slots, and shadow blocks end at {end}"
            )
    staged = StagedGroup(region, entry_tokens)
    if runner.device.type == "cuda" and staged.span > MAX_SPAN:
        raise GroupRefused(
            f"no shadow pages: a request needs {staged.span} entries of its block "
            f"table, more than {MAX_SPAN}"
        )
    return staged


def _exports_before_commit(vllm_config: Any) -> str:
    """What to say of KV connectors that may read the cache inside the forward; empty
    where there is none."""
    names = connectors_in_forward(vllm_config)
    return names and (
        f"; {names} may export rejected drafts' bytes during the forward, before commit"
    )


def _max_in_flight(vllm_config: Any) -> int:
    """Steps that vLLM runs before it reads the first one's output: the size of the
    engine's batch queue. Releases that do not say it here have the same limit."""
    return getattr(vllm_config, "max_concurrent_batches", MAX_IN_FLIGHT)


def _capacity(vllm_config: Any, config: NworConfig) -> int:
    """Rows of the undo log: the drafts that one step can hold at most."""
    scheduler = vllm_config.scheduler_config
    rows = min(
        scheduler.max_num_seqs * vllm_config.speculative_config.num_speculative_tokens,
        scheduler.max_num_batched_tokens,
    )
    return min(rows, config.max_log_rows or rows)


def _announce(
    config: NworConfig, infos: list[GroupInfo], manager: DraftCommitManager | None
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
        size = (
            f"; undo log: {manager.capacity} drafts, "
            f"{manager.log_bytes / 2**20:.1f} MiB"
        )
        if config.on_reject is OnReject.POISON:
            size += "; rejected slots are poisoned"
        if manager.shadow is not None:
            size += f"; shadow pages: {manager.shadow.num_seats} seats"
    log = logger.warning if refused else logger.info
    log("NWOR %s requested; %s%s", config.mode.value, groups, size)
