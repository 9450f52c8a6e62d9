# SPDX-License-Identifier: Apache-2.0
"""Takes shadow blocks away from the scheduler, before it knows how many there are.

The workers allocate all blocks; the scheduler gets fewer. What lies between is
described on the workers' configs (their attribute `nwor_shadow`), and that mark is the
handshake: a worker without it cannot know which blocks are free of requests, and uses
the undo log. The scheduler gets a lowered copy of vLLM's config once all workers have
the mark; after any fault it gets vLLM's own, and no worker keeps one.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ..base.wrap import argument, install_all
from ..config import Mode, NworConfig
from ..layout.regions import ShadowRegion, blocks_per_seat
from .ledger import GET_KV_CACHE_CONFIGS, SCHEDULER_KV_CACHE_CONFIG

logger = logging.getLogger("vllm.v1.nwor")

# Share of all blocks that shadow blocks may take without VLLM_NWOR_SHADOW_BLOCKS.
DEFAULT_SHARE = 0.05

# Refused speculative methods: their drafters do not say which cached layers they own.
REFUSED_METHODS = {
    "custom_class": "may have cached layers of its own and cannot say which",
    "extract_hidden_states": "keeps hidden states in a cache layer of its own",
}

# vLLM's KV connectors that read only committed rows of a running request. Their
# save_kv_layer and wait_for_layer_load, which run during the forward, do nothing. They
# save a step's rows after its commit. They load for waiting requests, and within a step
# (vLLM 0.33's OffloadingConnector, sync_load_budget_bytes) whole blocks, so that no
# draft's shadow block lacks a row that comes later. All connectors have those methods,
# so this list goes by name; a MultiConnector is allowed if its members are.
ALLOWED_CONNECTORS = frozenset(
    {
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)

# Group id -> its shadow blocks, or why there are none.
Reservation = dict[int, ShadowRegion] | str

# Attribute of a layer's KV-cache spec.
VERDICT = "nwor_verdict"


class LayerVerdict(NamedTuple):
    """What a worker knows about a layer before the KV cache is sized.

    is_drafters: whether the drafter owns it. refusal: why the group of this target
    layer will be refused; empty if no reason is known. copies: the backend, if a
    drafter in its group would read a copy of the block table; empty if not.
    """

    is_drafters: bool
    refusal: str = ""
    copies: str = ""


def group_refusal(verdicts: Sequence[LayerVerdict]) -> str | None:
    """Why a KV-cache group of these layers will have no shadow blocks, or None."""
    of_targets = [found.refusal for found in verdicts if not found.is_drafters]
    copying = {found.copies for found in verdicts} - {""}
    if any(found.is_drafters for found in verdicts) and copying:
        of_targets.append(copies_refusal(copying))
    return next(filter(None, of_targets), None)


def copies_refusal(copying: Iterable[str]) -> str:
    """copying: what may copy the block table, in a drafter's group."""
    return (
        f"the drafter has layers in this group, and {', '.join(sorted(copying))} may "
        "copy the block table into its metadata"
    )


def install(module: ModuleType) -> None:
    """Wraps the engine core in `module`. Raises HostMismatch."""
    install_all(module, WRAPPERS)


def config_refusal(vllm_config: Any) -> str | None:
    """Why this configuration cannot be protected at all, or None. Workers call this,
    too."""
    if vllm_config.speculative_config is None:
        return "no speculative decoding is configured"
    method = vllm_config.speculative_config.method
    if method in REFUSED_METHODS:
        return f"the speculative method is {method}, which {REFUSED_METHODS[method]}"
    return parallel_refusal(vllm_config)


def parallel_refusal(vllm_config: Any) -> str | None:
    """What kind of parallelism splits requests over ranks, or None."""
    for kind in ("pipeline", "prefill_context", "decode_context"):
        size = getattr(vllm_config.parallel_config, f"{kind}_parallel_size", 1)
        if size > 1:
            return f"{kind}_parallel_size is {size}; only 1 is supported"
    return None


def connectors_in_forward(vllm_config: Any) -> str:
    """Names of the KV connectors that may act during the forward (of a MultiConnector,
    such members); empty if there are none."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    found = [] if transfer is None else _not_allowed(vars(transfer))
    return ", ".join(dict.fromkeys(found))


def _not_allowed(transfer: Mapping[str, Any]) -> list[str]:
    """transfer: fields of vLLM's KVTransferConfig; a MultiConnector's have a list of
    the same form."""
    name = transfer.get("kv_connector")
    module_path = transfer.get("kv_connector_module_path")
    if name and module_path:  # not vLLM's class, whatever its name
        return [f"{module_path}.{name}"]
    if name == "MultiConnector":
        members = (transfer.get("kv_connector_extra_config") or {}).get("connectors")
        return [found for member in members or () for found in _not_allowed(member)]
    return [] if name is None or name in ALLOWED_CONNECTORS else [name]


def stage_refusal(vllm_config: Any) -> str | None:
    """Why this configuration has no shadow blocks, or None. Workers call this, too."""
    if (refusal := config_refusal(vllm_config)) is not None:
        return refusal
    if connectors := connectors_in_forward(vllm_config):
        allowed = ", ".join(sorted(ALLOWED_CONNECTORS))
        return (
            f"the KV connector {connectors} may read or write blocks while their "
            f"drafts are in shadow blocks; allowed are vLLM's own {allowed}, and "
            "MultiConnector of these"
        )
    model = vllm_config.model_config
    # Of the model's configuration before vLLM 0.32.
    outputs = getattr(vllm_config, "aux_output_config", model)
    if getattr(outputs, "enable_return_routed_experts", False):
        return "enable_return_routed_experts keeps what it captures by slot"
    if getattr(model, "original_max_model_len", None) == -1:
        return "max_model_len is auto: vLLM sizes it to take all blocks"
    return None


# Of the engine that is being started in this process: its vllm_config, and each
# worker's specs by layer name.
_starting: list[tuple[Any, Sequence[Mapping[str, Any]]]] = []


def _get_kv_cache_configs(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    names = ("vllm_config", "kv_cache_specs")
    vllm_config, specs = (
        argument(GET_KV_CACHE_CONFIGS, name, args, kwargs) for name in names
    )
    _starting[:] = [(vllm_config, specs)]
    return wrapped(*args, **kwargs)


def _scheduler_config(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    scheduler_config = wrapped(*args, **kwargs)
    workers = argument(SCHEDULER_KV_CACHE_CONFIG, "kv_cache_configs", args, kwargs)
    vllm_config, specs = _starting.pop() if _starting else (None, ())
    config = NworConfig.from_env()
    if config.mode is not Mode.STAGE or vllm_config is None:
        return scheduler_config
    num_blocks = scheduler_config.num_blocks
    found: Reservation
    try:
        # After a refusal the scheduler has vLLM's own, untouched.
        lowered = copy.deepcopy(scheduler_config)
        layers = [layer for of_worker in specs for layer in of_worker.items()]
        marked = ((name, getattr(spec, VERDICT, None)) for name, spec in layers)
        verdicts = {name: verdict for name, verdict in marked if verdict is not None}
        found = plan(vllm_config, workers[0], config, verdicts)
        if not isinstance(found, str):
            _lower(lowered, sum(region.num_blocks for region in found.values()))
        for worker in workers:
            worker.nwor_shadow = found
    except Exception as error:
        found = f"the reservation failed: {type(error).__name__}: {error}"
        for worker in workers:
            with contextlib.suppress(Exception):  # without a mark it has none either
                worker.nwor_shadow = found
    if isinstance(found, str):
        logger.info("NWOR: no shadow blocks: %s", found)
        return scheduler_config
    text = "NWOR: %d of %d KV blocks reserved as shadow blocks, for %s"
    whom = _seated(vllm_config, workers[0], found)
    logger.info(text, num_blocks - lowered.num_blocks, num_blocks, whom)
    return lowered


def plan(
    vllm_config: Any,
    kv_cache_config: Any,
    config: NworConfig,
    verdicts: Mapping[str, LayerVerdict],
) -> Reservation:
    """The shadow blocks of each KV-cache group that can have some, or why there are
    none. Changes nothing. verdicts: by layer name, for layers that a worker marked.

    There is a seat for each sequence that a step can hold, if all fit in the budget;
    otherwise as many as fit. The remaining blocks must hold a request of max_model_len.
    """
    if (refusal := stage_refusal(vllm_config)) is not None:
        return refusal
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        what = "which it cannot do with shadow blocks"
        return f"vLLM zeroes this model's new blocks, {what}"
    groups = kv_cache_config.kv_cache_groups
    sizes, refusals = block_sizes(groups), []
    for gid in list(sizes):
        names = groups[gid].layer_names
        known = [verdicts[name] for name in names if name in verdicts]
        if len(known) == len(names) and all(verdict.is_drafters for verdict in known):
            del sizes[gid]  # a drafter's own layers are not protected
        elif (refusal := group_refusal(known)) is not None:
            refusals.append(refusal)
            del sizes[gid]
    if not sizes:
        return "; ".join(dict.fromkeys(refusals)) or "no KV-cache group is slot based"
    num_drafts = vllm_config.speculative_config.num_speculative_tokens
    num_blocks, budget = kv_cache_config.num_blocks, config.max_shadow_blocks
    if budget is None:
        budget = int(num_blocks * DEFAULT_SHARE)
    of_one_request = _blocks_of_one_request(vllm_config, groups)
    a_seat = {gid: blocks_per_seat(num_drafts, size) for gid, size in sizes.items()}
    of_all = sum(a_seat.values())
    available = min(budget, num_blocks - of_one_request)
    num_seats = min(vllm_config.scheduler_config.max_num_seqs, available // of_all)
    if num_seats < 1:
        hint = "VLLM_NWOR_SHADOW_BLOCKS raises the number"
        if available < budget:
            hint = "one of the longest length needs the others"
        return (
            f"{max(available, 0)} of {num_blocks} KV blocks may be shadow blocks, and "
            f"a request needs {of_all} ({hint})"
        )
    first = num_real = num_blocks - num_seats * of_all
    regions: dict[int, ShadowRegion] = {}
    for gid, size in sizes.items():
        regions[gid] = ShadowRegion(first, num_seats, a_seat[gid], num_real, size)
        first += regions[gid].num_blocks
    return regions


def _blocks_of_one_request(vllm_config: Any, groups: Sequence[Any]) -> int:
    """What one of max_model_len needs, and block 0, the scheduler's null block."""
    return 1 + sum(
        -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        for spec in (group.kv_cache_spec for group in groups)
    )


def _seated(
    vllm_config: Any, kv_cache_config: Any, regions: Mapping[int, ShadowRegion]
) -> str:
    """How many requests have shadow blocks; if not all, how more can have some."""
    num_seats = min(region.num_seats for region in regions.values())
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    if num_seats >= max_num_seqs:
        return f"{num_seats} requests"
    a_seat = sum(region.num_blocks // region.num_seats for region in regions.values())
    groups = kv_cache_config.kv_cache_groups
    num_free = kv_cache_config.num_blocks - _blocks_of_one_request(vllm_config, groups)
    most = min(max_num_seqs, num_free // a_seat)
    hint = f"VLLM_NWOR_SHADOW_BLOCKS={most * a_seat} is enough for "
    hint += "all" if most == max_num_seqs else f"{most}"
    if most == num_seats:
        hint = "a request of the longest length needs the other KV blocks"
    return (
        f"{num_seats} of max_num_seqs={max_num_seqs} requests; the others use the undo "
        f"log ({hint})"
    )


def block_sizes(groups: Sequence[Any]) -> dict[int, int]:
    """Tokens a block of each group that is slot based."""
    from vllm.v1 import kv_cache_interface as kv

    sizes = {}
    for gid, group in enumerate(groups):
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        others = kv.CrossAttentionSpec | kv.EncoderOnlyAttentionSpec
        if isinstance(spec, kv.AttentionSpec) and not isinstance(spec, others):
            sizes[gid] = group.kv_cache_spec.block_size
    return sizes


def _lower(scheduler_config: Any, num_shadow_blocks: int) -> None:
    """Takes blocks from a copy of the scheduler's configuration."""
    before = scheduler_config.num_blocks
    after = before - num_shadow_blocks
    tensors = scheduler_config.kv_cache_tensors
    sizes = [tensor.size // before * after for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        tensor.size = size
    scheduler_config.num_blocks = after


WRAPPERS = {
    GET_KV_CACHE_CONFIGS: _get_kv_cache_configs,
    SCHEDULER_KV_CACHE_CONFIG: _scheduler_config,
}
