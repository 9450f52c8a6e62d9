# SPDX-License-Identifier: Apache-2.0
"""All that NWOR touches in vLLM: one row each, with the reason and with the condition
under which the row can be deleted.

A `HookTarget` is a function of vLLM that is wrapped, or replaced on an object; the hook
files have the wrappers, by these rows. A `Change` is anything else: an attribute on one
of vLLM's objects, a field, an entry in a table. What NWOR only reads is in `facts`.
The table in docs/for_vllm.md is written from here (tools/check_vllm.py --table).

Data only: nothing of vLLM is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.wrap import HookTarget

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
WORKER = "vllm.v1.worker.gpu_worker"
ENGINE_CORE = "vllm.v1.engine.core"
CORE_CLIENT = "vllm.v1.engine.core_client"
SCHEDULER = "vllm.v1.core.sched.scheduler"
LOGGERS = "vllm.v1.metrics.loggers"
ALLOCATOR = "vllm.device_allocator.cumem"
LORA = "vllm.lora.model_manager"
STATES = "vllm.v1.worker.gpu.model_states.mamba_hybrid"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"


@dataclass(frozen=True)
class Change:
    """What is changed without wrapping a function.

    place: a class or table of vLLM's, or of Python's. what: an attribute of it, or a
        few words. for_audit: only while the KV audit is on.
    """

    place: str
    what: str
    why: str
    delete_when: str
    for_audit: bool = False


# Conditions under which rows can be deleted.
CACHES_BOUND = (
    "vLLM calls plugins on the worker once KV caches are bound, with the KV-cache "
    "config and the bound tensors"
)
MEMORY_ANNOUNCED = (
    "plugins can announce device memory that they need, while vLLM profiles memory"
)
BEFORE_FORWARD = (
    "vLLM calls plugins before the forward of a real step: after zeroing, block copies "
    "and loads, before attention metadata is built, with spec_decode_metadata, slot "
    "mappings and block tables"
)
AFTER_SAMPLING = (
    "vLLM calls plugins after rejection sampling, before the drafter and the "
    "connectors' saves, with the accepted tokens on the device"
)
STEP_STARTS = (
    "vLLM calls plugins on the runner when a step starts, with the scheduler's output, "
    "and when a step was abandoned"
)
UNWRAPPED = "no method of the runner is wrapped"
BLOCKS_RESERVED = (
    "plugins can reserve KV blocks: the scheduler gets fewer, the workers' tensors "
    "keep them"
)
FIELDS = (
    "ModelRunnerOutput and SchedulerStats have a field for extensions, which reaches "
    "the front end"
)
STEP_PROCESSED = (
    f"{FIELDS}, and vLLM calls plugins in the scheduler after it processed a step's "
    "output: with the committed positions, rejected drafts and blocks of each request, "
    "before the blocks of finished requests are freed"
)
READY_FIELD = (
    "EngineCoreReadyResponse has a field for extensions, which reaches the front end"
)
INVALID_COUNTED = "SpecDecodingStats counts grammar-invalid drafts, too"
METRICS = (
    "vLLM has a registry of Prometheus metrics for plugins, and passes these each "
    "SchedulerStats"
)
TRANSFERS = "KV connectors announce which blocks they are about to read and fill"
LOADS_ANNOUNCED = (
    "SchedulerOutput has the blocks that a KV connector is to load, and NewRequestData "
    "how many of a request's tokens were found in the local cache"
)
REQUEST_DATA = "NewRequestData has a request's cache_salt"
OUTPUT_READ = "vLLM calls plugins when an asynchronous output is read"
CONTENT_LOST = "vLLM notifies plugins that a KV cache lost its content"
WEIGHTS_CHANGED = (
    "vLLM notifies plugins that weights were changed, by whomever, with their version"
)
WORKER_ENDS = "vLLM notifies plugins that a worker ends"
REPORTS = "vLLM asks plugins in a worker for a report, on a signal of its user's"
VARIABLES = "plugins can declare environment variables"
IN_VLLM = "this package is a part of vLLM"


def _runner(module: str, *more: str) -> tuple[HookTarget, ...]:
    """The rows that both model runners have. more: parameters of initialize_kv_cache
    behind kv_cache_config."""

    def row(
        name: str, params: tuple[str, ...], why: str, delete_when: str
    ) -> HookTarget:
        name, params = f"GPUModelRunner.{name}", ("self", *params)
        return HookTarget(module, name, params, why, delete_when)

    return (
        row(
            "get_kv_cache_spec",
            (),
            "no shadow blocks are reserved for layers that will be refused",
            BLOCKS_RESERVED,
        ),
        row(
            "initialize_kv_cache",
            ("kv_cache_config", *more),
            "the caches are bound: their layouts are probed, the tables filled",
            CACHES_BOUND,
        ),
        row(
            "profile_run",
            (),
            "memory is reserved while vLLM measures what is left for the KV cache",
            MEMORY_ANNOUNCED,
        ),
        row(
            "execute_model",
            ("scheduler_output",),
            "a step starts: what a failed step left is discarded, observers get the "
            "scheduler's output; if it fails, block tables are put back",
            STEP_STARTS,
        ),
        row(
            "sample_tokens",
            ("grammar_output",),
            "the step's output carries the counters to the scheduler",
            FIELDS,
        ),
    )


V1_COMMON = _runner(V1_RUNNER, "is_profiling")
V1_SPEC_DECODE_METADATA = HookTarget(
    V1_RUNNER,
    "GPUModelRunner._calc_spec_decode_metadata",
    ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
    "it says which rows are drafts; shadow blocks have to be in the block tables "
    "before attention metadata is built from these",
    BEFORE_FORWARD,
)
V1_MODEL_FORWARD = HookTarget(
    V1_RUNNER,
    "GPUModelRunner._model_forward",
    ("self",),
    "begin: after zeroing, block copies and loads within the step, before the first "
    "write",
    BEFORE_FORWARD,
)
V1_SAMPLE = HookTarget(
    V1_RUNNER,
    "GPUModelRunner._sample",
    ("self", "logits", "spec_decode_metadata"),
    "commit: the accepted drafts are known, and the drafter has not run",
    AFTER_SAMPLING,
)

V2_COMMON = _runner(V2_RUNNER, "is_profiling?")  # vLLM 0.26 does not have it
V2_PREPARE_ATTN = HookTarget(
    V2_RUNNER,
    "GPUModelRunner.prepare_attn",
    ("self", "input_batch"),
    "stage and begin: tables and slots are final, and the forward has not started",
    BEFORE_FORWARD,
)
V2_SAMPLE = HookTarget(
    V2_RUNNER,
    "GPUModelRunner.sample",
    ("self", "hidden_states", "input_batch", "grammar_output"),
    "commit: num_rejected is known, and the output has not been copied",
    AFTER_SAMPLING,
)

GET_KV_CACHE_CONFIGS = HookTarget(
    ENGINE_CORE,
    "get_kv_cache_configs",
    ("vllm_config", "kv_cache_specs", "available_memory"),
    "vllm_config and the workers' layers are kept for the next call",
    BLOCKS_RESERVED,
)
SCHEDULER_KV_CACHE_CONFIG = HookTarget(
    ENGINE_CORE,
    "generate_scheduler_kv_cache_config",
    ("kv_cache_configs",),
    "mode stage: the scheduler gets a copy of its config with fewer blocks",
    BLOCKS_RESERVED,
)
INITIALIZE_KV_CACHES = HookTarget(
    ENGINE_CORE,
    "EngineCore._initialize_kv_caches",
    ("self", "vllm_config"),
    "the workers' KV caches are bound: they report the mode of each group",
    READY_FIELD,
)
READY_RESPONSE = HookTarget(
    CORE_CLIENT,
    "MPClient._apply_ready_response",
    ("self", "payload"),
    "that report is kept until the metrics are created",
    READY_FIELD,
)

UPDATE_FROM_OUTPUT = HookTarget(
    SCHEDULER,
    "Scheduler.update_from_output",
    ("self", "scheduler_output", "model_runner_output"),
    "a step's counters are compared with vLLM's, and leave with its SchedulerStats; "
    "on_commit is called",
    STEP_PROCESSED,
)
CONNECTOR_FINISHED = HookTarget(
    SCHEDULER,
    "Scheduler._connector_finished",
    ("self", "request"),
    "digests of its blocks leave with a request's kv_transfer_params",
    FIELDS,
    for_audit=True,
)
MAKE_SPEC_DECODING_STATS = HookTarget(
    SCHEDULER,
    "Scheduler.make_spec_decoding_stats",
    ("self", "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens"),
    "replaced on the scheduler in steps whose SpecDecodingStats lacks drafts",
    INVALID_COUNTED,
    on_object=True,
)
RECORD = HookTarget(
    LOGGERS,
    "PrometheusStatLogger.record",
    ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    "the report on each SchedulerStats is added to our metrics",
    METRICS,
)
CREATE_METRICS = HookTarget(
    LOGGERS,
    "PrometheusStatLogger.__init__",
    ("self", "vllm_config", "engine_indexes"),
    "it unregisters all vllm: metrics, so that ours are created after it",
    METRICS,
)

COLLECTIVE_RPC = HookTarget(
    ENGINE_CORE,
    "EngineCore.collective_rpc",
    ("self", "method"),
    "every RPC of the user comes through it: the weights may have changed",
    WEIGHTS_CHANGED,
    for_audit=True,
)
CORE_WAKE_UP = HookTarget(
    ENGINE_CORE,
    "EngineCore.wake_up",
    ("self", "tags"),
    "weights after a sleep are any bytes until they are loaded again",
    WEIGHTS_CHANGED,
    for_audit=True,
)
LOAD_WEIGHTS = HookTarget(
    "vllm.model_executor.models.llama",
    "LlamaForCausalLM.load_weights",
    ("self", "weights"),
    "replaced on the target model, of any class: frameworks call it in the worker's "
    "process, by no RPC or by one of their own",
    WEIGHTS_CHANGED,
    for_audit=True,
    on_object=True,
)
ADD_ADAPTER = HookTarget(
    LORA,
    "LoRAModelManager._add_adapter",
    ("self", "lora"),
    "every LoRA adapter comes through it, wherever it was read from, with its tensors "
    "not packed yet: a digest of its content is taken",
    WEIGHTS_CHANGED,
    for_audit=True,
)
SCHEDULE = HookTarget(
    SCHEDULER,
    "Scheduler.schedule",
    ("self",),
    "a request's cache_salt and what it found in the cache are known",
    REQUEST_DATA,
    for_audit=True,
)
STATE_METADATA = HookTarget(
    STATES,
    "MambaHybridModelState.prepare_attn",
    ("self", "input_batch"),
    "recurrent states: the kernels' metadata is built, and blocks are copied",
    BEFORE_FORWARD,
    for_audit=True,
)
GET_OUTPUT = HookTarget(
    "vllm.v1.outputs",
    "AsyncModelRunnerOutput.get_output",
    ("self",),
    "replaced on a step's output: findings are reported when vLLM reads it",
    OUTPUT_READ,
    for_audit=True,
    on_object=True,
)
WAKE_UP = HookTarget(
    WORKER,
    "Worker.wake_up",
    ("self", "tags"),
    "the content of the KV caches is lost",
    CONTENT_LOST,
    for_audit=True,
)
ALLOCATOR_WAKE_UP = HookTarget(
    ALLOCATOR,
    "CuMemAllocator.wake_up",
    ("self", "tags"),
    "the content of the KV caches is lost, also where a framework calls it",
    CONTENT_LOST,
    for_audit=True,
)
SHUTDOWN = HookTarget(
    WORKER,
    "Worker.shutdown",
    ("self",),
    "the last log line, and the last state of the audit's file",
    WORKER_ENDS,
    for_audit=True,
)
MATCHED_TOKENS = HookTarget(
    CONNECTOR,
    "KVConnectorBase_V1.get_num_new_matched_tokens",
    ("self", "request", "num_computed_tokens"),
    "replaced on the scheduler's connector, of any class: what was found in the local "
    "cache, in front of what is loaded",
    LOADS_ANNOUNCED,
    for_audit=True,
    on_object=True,
)
STATE_AFTER_ALLOC = HookTarget(
    CONNECTOR,
    "KVConnectorBase_V1.update_state_after_alloc",
    ("self", "request", "blocks", "num_external_tokens"),
    "the same: the blocks that a load will fill",
    LOADS_ANNOUNCED,
    for_audit=True,
    on_object=True,
)
START_LOAD_KV = HookTarget(
    OFFLOADING,
    "OffloadingConnector.start_load_kv",
    ("self", "forward_context"),
    "the loads of this step are submitted here",
    TRANSFERS,
    for_audit=True,
)

# All of the above.
_OTHERS = [row for row in [*globals().values()] if isinstance(row, HookTarget)]
METHODS = (*V1_COMMON, *V2_COMMON, *_OTHERS)


def _attributes(runner: str) -> tuple[Change, ...]:
    """What both model runners get."""
    return (
        Change(runner, "nwor_state", "its observers, the step being made", UNWRAPPED),
        Change(runner, "nwor_storages", "reserved device memory", MEMORY_ANNOUNCED),
    )


CHANGES = (
    *_attributes(f"{V1_RUNNER}.GPUModelRunner"),
    *_attributes(f"{V2_RUNNER}.GPUModelRunner"),
    Change(
        "vllm.v1.worker.block_table.BlockTable",
        "contents on the device",
        "mode stage, V1: from before the attention metadata is built until commit, "
        "block tables and slot mappings of a step name shadow blocks",
        BEFORE_FORWARD,
    ),
    Change(
        "vllm.v1.worker.gpu.block_table.BlockTables",
        "contents on the device",
        "the same on V2",
        BEFORE_FORWARD,
    ),
    Change(
        "vllm.v1.kv_cache_interface.KVCacheSpec",
        "nwor_verdict",
        "which layers will have no shadow blocks; specs are frozen: object.__setattr__",
        BLOCKS_RESERVED,
    ),
    Change(
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        "nwor_shadow",
        "a worker's shadow blocks",
        BLOCKS_RESERVED,
    ),
    Change(
        "vllm.v1.engine.EngineCoreReadyResponse",
        "nwor_info",
        "a field for the mode of each group; `__init__` is replaced to fill it",
        READY_FIELD,
    ),
    Change("vllm.v1.outputs.ModelRunnerOutput", "nwor_stats", "counters", FIELDS),
    Change(f"{SCHEDULER}.Scheduler", "nwor_stats", "sums of counters", FIELDS),
    Change(
        "vllm.v1.metrics.stats.SchedulerStats",
        "nwor_report",
        "a field for the counters; a front end without NWOR ignores it",
        FIELDS,
    ),
    Change(f"{LOGGERS}.PrometheusStatLogger", "nwor_prometheus", "metrics", METRICS),
    Change(
        "vllm.v1.core.sched.output.SchedulerOutput",
        "nwor_audit",
        "what only the scheduler knows about its new requests",
        REQUEST_DATA,
        True,
    ),
    Change(
        "vllm.v1.core.sched.output.SchedulerOutput",
        "nwor_loads",
        "which blocks a KV connector was asked to load",
        LOADS_ANNOUNCED,
        True,
    ),
    Change(
        "vllm.v1.core.sched.output.SchedulerOutput",
        "nwor_weights",
        "which weights the step's keys and values are of",
        WEIGHTS_CHANGED,
        True,
    ),
    *(
        Change(place, "nwor_weights", why, WEIGHTS_CHANGED, True)
        for place, why in (
            ("vllm.v1.outputs.ModelRunnerOutput", "steps of an unannounced change"),
            (f"{ENGINE_CORE}.EngineCore", "the epochs of the weights"),
            (f"{V1_RUNNER}.GPUModelRunner", "digests of the weights"),
            (f"{V2_RUNNER}.GPUModelRunner", "the same on V2"),
        )
    ),
    Change(
        f"{STATES}.MambaHybridModelState",
        "nwor_state",
        "recurrent states: the observers of its runner",
        BEFORE_FORWARD,
        True,
    ),
    Change(
        f"{LORA}.LoRAModelManager",
        "nwor_adapters",
        "digests of the adapters that it has loaded",
        WEIGHTS_CHANGED,
        True,
    ),
    Change(
        f"{SCHEDULER}.Scheduler",
        "nwor_versions",
        "which weights computed each block, and each position of its requests",
        WEIGHTS_CHANGED,
        True,
    ),
    Change(
        "vllm.outputs.RequestOutput",
        "nwor_kv_versions in its kv_transfer_params",
        "the versions of a request that asks for them, if no KV connector uses these",
        WEIGHTS_CHANGED,
        True,
    ),
    Change(
        f"{SCHEDULER}.Scheduler",
        "nwor_loads",
        "what its KV connector was asked to load; two methods of that one are replaced",
        LOADS_ANNOUNCED,
        True,
    ),
    Change(
        "vllm.v1.outputs.ModelRunnerOutput",
        "nwor_given",
        "digests of the blocks of requests that are decoded elsewhere",
        FIELDS,
        True,
    ),
    Change(f"{SCHEDULER}.Scheduler", "nwor_given", "the same", FIELDS, True),
    Change(
        "vllm.envs.environment_variables",
        "entries for `VLLM_NWOR_*`",
        "vLLM warns about variables that it does not know",
        VARIABLES,
    ),
    Change(
        "torch.ops._C_cache_ops",
        "our ops and `nwor_library`",
        "vLLM's namespace for ops on KV caches; `nwor_library` names their library",
        IN_VLLM,
    ),
    Change(
        "sys.meta_path",
        "two finders",
        "the import alias `vllm.v1.nwor`; hooks on the import of modules (wrapt)",
        IN_VLLM,
    ),
    Change(
        "sys.excepthook",
        "replaced if a value of `VLLM_NWOR_*` is not allowed",
        "the process ends with that sentence instead of a traceback",
        VARIABLES,
    ),
    Change(
        "signal.SIGUSR2",
        "a handler, which calls the previous one, with `VLLM_NWOR_AUDIT_INCIDENT`",
        "the incident file is written",
        REPORTS,
        True,
    ),
)
LEDGER = (*METHODS, *CHANGES)


def rows_of(module: str) -> tuple[HookTarget, ...]:
    """The methods of a module of vLLM's that are wrapped."""
    return tuple(row for row in METHODS if row.module == module)
