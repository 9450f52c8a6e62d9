# SPDX-License-Identifier: Apache-2.0
"""Hooks of the audit on vLLM's V1 model runner (the CPU runner inherits from it).

    execute_model      what the scheduler says of requests and blocks
      _calc_spec_decode_metadata   plan: tables and slots are final, and shadow pages
                       are not in them yet (they are put there behind this call)
      _model_forward   plan, where the call before is not made: without speculation
    sample_tokens
      _sample          resolve: behind commit, so that kept rows are in real blocks
                       what was found is logged, counted, or raised

These wrappers lie over NWOR's own in the same places (`layer`). A failure of the audit
ends the audit, with one line, and never the engine (VLLM_NWOR_STRICT=always raises).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import ops
from ..config import AuditMode, NworConfig
from ..device_memory import DeviceMemory
from ..draft_manager import NworError, State
from ..hooks._wrap import HookTarget, argument, install_all
from ..hooks.discovery import target_layers
from ..hooks.engine_core import parallel_refusal
from . import offloading
from .findings import AuditError, Findings
from .state import Audit, AuditedGroup, Batch, GroupShape, Loads, Text

logger = logging.getLogger("vllm.v1.nwor")

MODULE = "vllm.v1.worker.gpu_model_runner"

INITIALIZE = HookTarget(
    MODULE,
    "GPUModelRunner.initialize_kv_cache",
    ("self", "kv_cache_config", "is_profiling"),
    why="audit: the caches are bound here",
    delete_when="vLLM offers a callback once KV caches are bound",
    layer=1,
)
EXECUTE = HookTarget(
    MODULE,
    "GPUModelRunner.execute_model",
    ("self", "scheduler_output"),
    why="audit: which blocks were handed out to which requests",
    delete_when="vLLM tells plugins of blocks that it hands out",
    layer=1,
)
METADATA = HookTarget(
    MODULE,
    "GPUModelRunner._calc_spec_decode_metadata",
    ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
    why="audit: slots are final, and no shadow page is in them yet",
    delete_when="vLLM has a pre-forward callback for real steps",
    layer=1,
)
FORWARD = HookTarget(
    MODULE,
    "GPUModelRunner._model_forward",
    ("self",),
    why="audit: slots are final; without speculation the last place before the forward",
    delete_when="vLLM has a pre-forward callback for real steps",
    layer=1,
)
SAMPLE = HookTarget(
    MODULE,
    "GPUModelRunner._sample",
    ("self", "logits", "spec_decode_metadata"),
    why="audit: what is kept is known, and the drafter has not run",
    delete_when="vLLM has a callback after rejection sampling",
    layer=1,
)
OUTPUT = HookTarget(
    MODULE,
    "GPUModelRunner.sample_tokens",
    ("self", "grammar_output"),
    why="audit: findings leave with the step's output, or keep it from leaving",
    delete_when="ModelRunnerOutput has a field for extensions",
    layer=1,
)
V2_INITIALIZE = HookTarget(
    "vllm.v1.worker.gpu.model_runner",
    "GPUModelRunner.initialize_kv_cache",
    ("self", "kv_cache_config"),
    why="audit: says that this runner is not audited",
    delete_when="the audit has hooks on the V2 runner",
    layer=1,
)
LEDGER = (INITIALIZE, EXECUTE, METADATA, FORWARD, SAMPLE, OUTPUT, V2_INITIALIZE)


class RunnerAudit:
    """What the audit keeps on a runner, as its attribute `nwor_audit`."""

    def __init__(self, audit: Audit, config: NworConfig, path: str) -> None:
        self.audit = audit
        self.findings = Findings(path)
        self.raises = config.audit is AuditMode.RAISE
        self.strict = config.strict_steps


def install(module: ModuleType) -> None:
    """Wraps the V1 runner in `module`. Raises HostMismatch if it is not as expected."""
    install_all(
        module,
        {
            INITIALIZE: _initialize_kv_cache,
            EXECUTE: _execute_model,
            METADATA: _calc_spec_decode_metadata,
            FORWARD: _model_forward,
            SAMPLE: _sample,
            OUTPUT: _sample_tokens,
        },
    )


def install_v2(module: ModuleType) -> None:
    """The V2 runner is not audited; it says so. Raises HostMismatch."""
    install_all(module, {V2_INITIALIZE: _refuse_v2})


def _refuse_v2(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    config = NworConfig.from_env()
    if config.audit is not AuditMode.OFF:
        _refuse("the V2 model runner is not audited yet", config)
    return wrapped(*args, **kwargs)


def _refuse(reason: str, config: NworConfig) -> None:
    if config.strict:
        raise NworError(f"NWOR audit requested, refused: {reason}")
    logger.warning("NWOR audit: off: %s", reason)


def audit_of(runner: Any) -> RunnerAudit | None:
    """What `initialize_kv_cache` left on a runner; None if nothing is audited."""
    found: RunnerAudit | None = runner.__dict__.get("nwor_audit")
    return found


# --- start-up -------------------------------------------------------------------------


def _initialize_kv_cache(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    runner.nwor_audit = None
    result = wrapped(*args, **kwargs)
    config = NworConfig.from_env()
    is_profiling = argument(INITIALIZE, "is_profiling", args, kwargs)
    if config.audit is AuditMode.OFF or is_profiling:
        return result
    try:
        found = _build(runner, config)
    except Exception as error:
        logger.debug("NWOR audit: at start-up", exc_info=True)
        found = f"vLLM is not as expected: {type(error).__name__}: {error}"
    if isinstance(found, str):
        _refuse(found, config)
    else:
        runner.nwor_audit = found
        offloading.watch(runner, _hand_on)
    return result


def _hand_on(runner: Any, blocks: Any, fills: bool) -> None:
    _guarded(runner, lambda state: state.audit.hand_on(blocks, fills))


def _loads_of(vllm_config: Any) -> Loads:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return Loads.NONE
    is_told = offloading.tells() and transfer.kv_connector == offloading.NAME
    is_vllms = not getattr(transfer, "kv_connector_module_path", None)
    return Loads.TOLD if is_told and is_vllms else Loads.UNTOLD


def _refusal(runner: Any) -> str | None:
    """Why nothing of this runner can be audited, or None."""
    if runner.device.type != "cpu":
        return f"it runs on the CPU only, and this is {runner.device.type}"
    if getattr(runner, "is_pooling_model", False):
        return "a pooling model samples nothing, which is where a step is resolved"
    return parallel_refusal(runner.vllm_config)


def _build(runner: Any, config: NworConfig) -> RunnerAudit | str:
    """The audit of `runner`, whose caches were bound, or why there is none."""
    refusal = _refusal(runner)
    if refusal is not None:
        return refusal
    ops.load(runner.device.type)
    scheduler = runner.vllm_config.scheduler_config
    memory = DeviceMemory(runner.device, None)
    num_seats = scheduler.max_num_seqs
    groups = []
    told = []
    kv_config = runner.kv_cache_config
    for gid, layers in enumerate(target_layers(runner)):
        if isinstance(layers, str) or not layers:
            told.append(f"group {gid}: off ({layers or 'it has no target layers'})")
            continue
        shape = _shape_of(runner, gid)
        num_slots = shape.num_blocks * shape.block_size
        if any(
            layer.layout.num_blocks * layer.layout.block_size != num_slots
            for layer in layers
        ):
            told.append(f"group {gid}: off (its layers do not have {num_slots} slots)")
            continue
        groups.append(
            AuditedGroup(
                shape,
                layers,
                num_seats,
                scheduler.max_num_batched_tokens,
                config.audit_mib > 0,
                memory,
            )
        )
        told.append(f"group {gid}: {len(layers)} layers")
    if not groups:
        return "; ".join(told)
    audit = Audit(
        groups,
        config.audit_mib << 20,
        num_seats,
        [group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups],
        _loads_of(runner.vllm_config),
    )
    logger.info(
        "NWOR audit: %s; %s; %.1f MiB; bytes: %s",
        config.audit.value,
        "; ".join(told),
        audit.num_bytes / 2**20,
        f"{config.audit_mib} MiB a step, all of a full cache in "
        f"{audit.steps_of_a_pass(kv_config.num_blocks)} steps"
        if config.audit_mib
        else "not compared",
    )
    return RunnerAudit(audit, config, _path_of(runner, config))


def _path_of(runner: Any, config: NworConfig) -> str:
    """Each rank has a file of its own."""
    parallel = runner.vllm_config.parallel_config
    if config.audit_file and parallel.world_size > 1:
        return f"{config.audit_file}.{parallel.rank}"
    return config.audit_file


def _shape_of(runner: Any, gid: int) -> GroupShape:
    spec = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec
    table = runner.input_batch.block_table[gid]
    window = getattr(spec, "sliding_window", None) or 0
    if getattr(spec, "attention_chunk_size", None):
        window = 1  # what is behind the last block may be gone
    width = table.block_table.gpu.shape[1]
    return GroupShape(
        gid,
        spec.block_size,
        table.block_size,
        runner.kv_cache_config.num_blocks,
        -(-width * table.block_size // spec.block_size),
        window,
    )


# --- a step ---------------------------------------------------------------------------


def _guarded(runner: Any, run: Callable[[RunnerAudit], None]) -> None:
    """Runs a part of a step, if there is an audit; what fails ends it."""
    state = audit_of(runner)
    if state is None:
        return
    try:
        run(state)
    except AuditError:
        raise
    except Exception:
        if state.strict:
            raise
        runner.nwor_audit = None
        logger.exception("NWOR audit: off from here on, because it failed")


def _execute_model(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    scheduled = argument(EXECUTE, "scheduler_output", args, kwargs)
    _guarded(runner, lambda state: _begin_step(state.audit, scheduled))
    return wrapped(*args, **kwargs)


def _begin_step(audit: Audit, scheduled: Any) -> None:
    cached = scheduled.scheduled_cached_reqs
    new = [
        (request.req_id, request.num_computed_tokens, request.block_ids)
        for request in scheduled.scheduled_new_reqs
    ]
    grown = []
    for name, num_computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if name in cached.resumed_req_ids:
            new.append((name, num_computed, blocks))
        elif blocks is not None:
            grown.append((name, blocks))
    audit.begin_step(
        scheduled.finished_req_ids,
        new,
        grown,
        [tuple(pair) for pair in getattr(scheduled, "kv_cache_block_copies", ()) or ()],
    )


def _plan(runner: Any, audit: Audit) -> None:
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    query_start_loc = runner.query_start_loc
    tables = batch.block_table.block_tables
    audit.plan(
        Batch(
            num_reqs,
            int(query_start_loc.np[num_reqs]),
            runner.input_ids.gpu,
            runner.positions,
            query_start_loc.gpu,
            [table.slot_mapping.gpu for table in tables],
            [table.block_table.gpu for table in tables],
        ),
        batch.req_ids,
        lambda row: _text_of(runner, row),
    )


def _text_of(runner: Any, row: int) -> Text:
    batch = runner.input_batch
    request = runner.requests[batch.req_ids[row]]
    length = int(batch.num_computed_tokens_cpu[row])
    lora = getattr(request, "lora_request", None)
    return Text(
        torch.from_numpy(batch.token_ids_cpu[row, :length].copy()),
        # As vLLM's prefix cache tells LoRAs apart.
        zlib.crc32(lora.lora_name.encode()) + 1 if lora is not None else 0,
        bool(request.mm_features) or request.prompt_embeds is not None,
    )


def _calc_spec_decode_metadata(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    _guarded(runner, lambda state: _plan(runner, state.audit))
    return wrapped(*args, **kwargs)


def _model_forward(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    def plan_if_needed(state: RunnerAudit) -> None:
        if not state.audit.is_open:
            _plan(runner, state.audit)

    _guarded(runner, plan_if_needed)
    return wrapped(*args, **kwargs)


def _sample(wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any) -> Any:
    manager = getattr(runner.__dict__.get("nwor_state"), "manager", None)
    was_protected = manager is not None and manager.is_open
    output = wrapped(*args, **kwargs)

    def resolve(state: RunnerAudit) -> None:
        if not state.audit.is_open:
            return
        metadata = argument(SAMPLE, "spec_decode_metadata", args, kwargs)
        state.audit.resolve(
            None if metadata is None else metadata.cu_num_sampled_tokens,
            None if metadata is None else output.sampled_token_ids,
            runner.input_batch.vocab_size,
            None,
            manager is not None and was_protected and manager.state is State.IDLE,
        )

    _guarded(runner, resolve)
    return output


def _sample_tokens(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    output = wrapped(*args, **kwargs)
    _guarded(runner, lambda state: tell(state, output))
    return output


def tell(state: RunnerAudit, output: Any) -> None:
    """Logs what a step found, and has its output carry the numbers.

    Raises:
        AuditError: under VLLM_NWOR_AUDIT=raise, if something was found.
    """
    found, num_lost, num_unverified = state.audit.take_findings()
    if not found and not num_unverified:
        return
    state.findings.add(found, num_lost)
    if found and state.raises:
        raise AuditError(f"{len(found)} findings, the first: {found[0].line()}")
    if output is not None and getattr(output, "req_ids", None):
        counts: dict[str, int] = {}
        for finding in found:
            counts[finding.kind] = counts.get(finding.kind, 0) + 1
        output.nwor_audit = {"findings": counts, "unverified": num_unverified}
