# SPDX-License-Identifier: Apache-2.0
"""The way of the counters: worker -> scheduler -> front end -> Prometheus.

    worker     `attach` puts a payload on the step's own ModelRunnerOutput; the KV
               audit's counts come with it, once a second
    scheduler  update_from_output: payload and scheduler's counts meet (`NworStats`);
               the increments leave in kv_connector_stats["nwor"] of the SchedulerStats,
               the only free-form field that reaches the front end in all versions
    front end  StatLoggerManager.record: takes them out again, before vLLM's own loggers
               (which know KV connectors only) see them, and bumps the counters that
               PrometheusStatLogger.__init__ created

Each may be another process; with several API servers a report goes to one of them. A
front end without NWOR would hand a report to vLLM's KV connector logging, which fails
on it. So an engine sends nothing before its front end has said that it takes reports: a
mark on the engine's ParallelConfig, which is neither a field of it nor hashed. With the
mode off and the audit on all of this is there, too, and shows the audit's counters.

    EngineHandshakeMetadata          every engine process asks the front end it belongs
                                     to how to run (those of a headless node the head's)
    EngineCoreProc._perform_handshake
                                     behind an external or hybrid load balancer, ranks
                                     above 0 report to a front end of their own, whose
                                     mark counts: rank 0's says how to run
    CoreEngineActorManager.__init__  Ray's data-parallel engines get a config instead
    PrometheusStatLogger.__init__    an engine in the front end's process shares its own

`commits` is told here, too, if anybody asked for it.

A failure here costs numbers, never tokens: it is logged once, and counted as a breach
where there is a counter (VLLM_NWOR_STRICT=always raises instead).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from .. import commits
from ..config import AuditMode, Mode, NworConfig, NworConfigError
from ..metrics import NOTHING_COUNTED, Counted, NworPrometheus, NworStats, log_once
from ._wrap import HookTarget, HostMismatch, Wrapper, argument, check, install_all
from .engine_core import block_sizes

SCHEDULER = "vllm.v1.core.sched.scheduler"
LOGGERS = "vllm.v1.metrics.loggers"
ENGINES = "vllm.v1.engine.utils"
ENGINE_CORE = "vllm.v1.engine.core"
REPORT_KEY = "nwor"
# A front end that takes reports marks its engines with what it shows of them.
MARK = "nwor_front_end"
COUNTS, AUDIT = 1, 2
NOT_SHOWN = {
    COUNTS: (
        "metrics are off",
        "the front end (LLM, AsyncLLM, vllm serve or the head of a headless node) does "
        "not take them. Set VLLM_NWOR_MODE in its environment before it loads vLLM's "
        "plugins, which it does once",
    ),
    AUDIT: (
        "audit: no metrics",
        "the front end does not take them. Set VLLM_NWOR_AUDIT in its environment, too",
    ),
}
NO_FIELD = "SchedulerStats has a field for extensions"

UPDATE = HookTarget(
    SCHEDULER,
    "Scheduler.update_from_output",
    ("self", "scheduler_output", "model_runner_output"),
    why="a step's output meets what the scheduler counts; the report leaves with it",
    delete_when="ModelRunnerOutput and SchedulerStats have fields for extensions",
)
COUNT = HookTarget(
    SCHEDULER,
    "Scheduler.make_spec_decoding_stats",
    ("self", "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens"),
    why="replaced in steps whose SpecDecodingStats lacks (grammar-invalid) drafts",
    delete_when="SpecDecodingStats counts grammar-invalid drafts, too",
)
RECORD = HookTarget(
    LOGGERS,
    "StatLoggerManager.record",
    ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    why="the only way of a SchedulerStats to the loggers: the report is taken out",
    delete_when=NO_FIELD,
)
CREATE = HookTarget(
    LOGGERS,
    "PrometheusStatLogger.__init__",
    ("self", "vllm_config", "engine_indexes"),
    why="it unregisters all vllm: metrics, so that ours must be created after it",
    delete_when="vLLM has a registry of metrics for plugins",
)
HANDSHAKE = HookTarget(
    ENGINES,
    "EngineHandshakeMetadata.__init__",
    ("self", "addresses", "parallel_config"),
    why="sets attributes of an engine process's ParallelConfig: this front end's mark",
    delete_when=NO_FIELD,
)
ACTORS = HookTarget(
    ENGINES,
    "CoreEngineActorManager.__init__",
    ("self", "vllm_config"),
    why="Ray's data-parallel engines do without that handshake: the mark goes before",
    delete_when=NO_FIELD,
)
OWN_HANDSHAKE = HookTarget(
    ENGINE_CORE,
    "EngineCoreProc._perform_handshake",
    (
        *("self", "ctx", "handshake_address", "identity", "local_client", "headless"),
        *("vllm_config", "parallel_config_to_update"),
    ),
    why="the second handshake, with a front end of the rank's own, drops what that "
    "says of the ParallelConfig: the mark is kept",
    delete_when=NO_FIELD,
)
LEDGER = (UPDATE, COUNT, RECORD, CREATE, HANDSHAKE, ACTORS, OWN_HANDSHAKE)


def install(module: ModuleType) -> None:
    """Wraps what LEDGER has of `module`; of the scheduler nothing while
    VLLM_NWOR_EMIT_METRICS is 0 (of the others all: reports are always taken out).
    Raises HostMismatch if it is not as expected; nothing was wrapped then."""
    if module.__name__ == SCHEDULER:
        if not NworConfig.from_env().emit_metrics:
            return
        check(COUNT, module)
    install_all(module, wrappers(module))


def wrappers(module: ModuleType) -> dict[HookTarget, Wrapper]:
    """What LEDGER has of `module`, but for COUNT."""
    return {t: w for t, w in _WRAPPERS.items() if t.module == module.__name__}


# --- worker ---------------------------------------------------------------------------


def attach(result: Any, take_payload: Callable[[], Any]) -> None:
    """Makes a step's output carry what `Report.take_payload` gives; never raises.

    result: what the runner's sample_tokens returned: a ModelRunnerOutput, whose
        attribute `nwor_stats` that becomes, or an asynchronous output that gives one
        out when the device has counted. None and outputs without requests, as vLLM's
        shared empty one, get nothing, and nothing is taken.
    """
    if result is None:
        return
    try:
        output = (
            getattr(result, "model_runner_output", None)
            or getattr(result, "_model_runner_output", None)
            or result
        )
        if output.req_ids and (payload := take_payload()) is not None:
            output.nwor_stats = payload
    except Exception:
        log_once("no statistics on a runner's output", type(result).__name__)


# --- scheduler ------------------------------------------------------------------------


def _update_from_output(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    # Every object that is touched here costs a step more than what is done with it:
    # after a forward it is in no cache of the processor.
    stats: NworStats = getattr(scheduler, "nwor_stats", None) or _new_stats(scheduler)
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    payload = getattr(output, "nwor_stats", None)
    if commits.registered:
        wrapped = partial(_telling, wrapped, scheduler, stats)
    if payload is None and not stats.report:
        return wrapped(*args, **kwargs)
    step: Any = None
    counted: Any = None
    carrier: Any = None
    try:
        if payload is not None:
            scheduled = args[0] if args else kwargs["scheduler_output"]
            if scheduled.num_invalid_spec_tokens or not scheduler.log_stats:
                counted = Counted(scheduler.make_spec_decoding_stats)
                scheduler.make_spec_decoding_stats = counted
            num_ids = list(map(len, output.sampled_token_ids or ()))
            step = scheduled.scheduled_spec_decode_tokens, output, num_ids
    except Exception as error:
        _failed("step", error, stats)
    try:
        engine_outputs = wrapped(*args, **kwargs)
    finally:
        if counted is not None:
            del scheduler.make_spec_decoding_stats
    try:
        for found in engine_outputs.values():
            if found.scheduler_stats is not None:
                carrier = found  # the only one; none while statistics are off
        if counted is None and step is not None:
            counted = carrier.scheduler_stats.spec_decoding_stats
    except Exception as error:
        # Windows of which vLLM says nothing are dropped ones, not lost.
        _failed("sums", error, stats)
    try:
        if step is not None:
            stats.add_step(payload, counted or NOTHING_COUNTED, step)
    except Exception as error:
        _failed("payload", error, stats)
    try:
        # vLLM 0.26's LLMEngine throws away statistics that come without outputs; they
        # wait for the next ones, unless nothing is left that could make any.
        if (
            carrier is not None
            and stats.report
            and (carrier.outputs or not scheduler.has_unfinished_requests())
        ):
            if stats.has_front_end:
                others = carrier.scheduler_stats.kv_connector_stats or {}
                carried = {**others, REPORT_KEY: stats.report}
                carrier.scheduler_stats.kv_connector_stats = carried
            stats.report = {}
    except Exception as error:
        _failed("report", error, stats)
    return engine_outputs


def _telling(
    wrapped: Any, scheduler: Any, stats: NworStats, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's update_from_output, and on_commit's callbacks."""
    found, sizes = [], {}
    try:
        step, output = (argument(UPDATE, p, args, kwargs) for p in UPDATE.params[1:])
        sizes = block_sizes(scheduler.kv_cache_config.kv_cache_groups)
        found = commits.pending(scheduler, step, output, sizes)
    except Exception as error:
        _failed("on_commit", error, stats)
    engine_outputs = wrapped(*args, **kwargs)
    commits.tell(found, sizes)
    return engine_outputs


def _new_stats(scheduler: Any) -> NworStats:
    config = getattr(scheduler, "vllm_config", None)
    speculative = getattr(config, "speculative_config", None)
    trims = getattr(speculative, "method", None) == "ngram_gpu" or getattr(
        speculative, "enable_adaptive_verification", False
    )
    # A step runs: whoever started this engine has marked its config.
    mark = getattr(getattr(config, "parallel_config", None), MARK, 0)
    with contextlib.suppress(NworConfigError):  # the environment is another by now
        for part, told in NOT_SHOWN.items():
            if scheduler.log_stats and _told() & part & ~mark:
                log_once(*told, logging.WARNING)
    num_sampled = getattr(scheduler, "num_sampled_tokens_per_step", 1)
    stats = scheduler.nwor_stats = NworStats(num_sampled, trims, bool(mark))
    return stats


def _told() -> int:
    """COUNTS, AUDIT, both or neither, as the environment is now."""
    config = NworConfig.from_env()
    has_mode, has_audit = config.mode is not Mode.OFF, config.audit is not AuditMode.OFF
    return config.emit_metrics and COUNTS * has_mode + AUDIT * has_audit


# --- front end ------------------------------------------------------------------------


def _shown() -> int:
    """What this process takes out of vLLM's statistics and shows."""
    with contextlib.suppress(HostMismatch):  # its hook has said so
        if told := _told():
            check(RECORD, import_module(LOGGERS))
            return told
    return 0


def _handshake(wrapped: Any, metadata: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    metadata.parallel_config = {**metadata.parallel_config, MARK: _shown()}


def _start_actors(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> None:
    config = argument(ACTORS, "vllm_config", args, kwargs)
    setattr(config.parallel_config, MARK, _shown())
    wrapped(*args, **kwargs)


@contextlib.contextmanager
def _perform_handshake(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    config = argument(OWN_HANDSHAKE, "vllm_config", args, kwargs).parallel_config
    said = SimpleNamespace()
    is_own = argument(OWN_HANDSHAKE, OWN_HANDSHAKE.params[-1], args, kwargs) is None
    if is_own:
        args, kwargs = args[:6], kwargs | {OWN_HANDSHAKE.params[-1]: said}
    with wrapped(*args, **kwargs) as addresses:
        if is_own:
            setattr(config, MARK, getattr(said, MARK, 0))
        yield addresses


def _create_prometheus(wrapped: Any, stat_logger: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    shown = _shown()
    if not shown:
        return
    try:
        classes = stat_logger._counter_cls, stat_logger._gauge_cls
        label_values = stat_logger.per_engine_labelvalues
        created: list[Any] = []
        if shown & COUNTS:
            created.append(NworPrometheus(*classes, label_values))
        if shown & AUDIT:
            from ..audit.stats import AuditPrometheus

            created.append(AuditPrometheus(classes[0], label_values))
        stat_logger.nwor_prometheus = created
        config = argument(CREATE, "vllm_config", args, kwargs)
        setattr(config.parallel_config, MARK, shown)
    except Exception as error:
        _failed("no vllm:nwor metrics", error)


def _record(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> Any:
    scheduler_stats = args[0] if args else kwargs.get("scheduler_stats")
    carried = getattr(scheduler_stats, "kv_connector_stats", None)
    if carried and REPORT_KEY in carried:
        # The dict is the scheduler's hook's own, or came from another process.
        report = carried.pop(REPORT_KEY)
        scheduler_stats.kv_connector_stats = carried or None
        try:
            engine = (args[3] if len(args) > 3 else kwargs.get("engine_idx")) or 0
            for stat_logger in manager.stat_loggers:
                for prometheus in getattr(stat_logger, "nwor_prometheus", ()):
                    prometheus.add(report, engine)
        except Exception as error:
            _failed("a report was lost", error)
    return wrapped(*args, **kwargs)


def _failed(what: str, error: Exception, stats: NworStats | None = None) -> None:
    """To be called while `error` is handled, which is raised again under
    VLLM_NWOR_STRICT=always: it is a breach of that kind, or is logged."""
    if NworConfig.from_env().strict_steps:
        raise error
    if stats is not None:
        stats.breach(what, repr(error))
    else:
        log_once(what, repr(error))


_WRAPPERS: dict[HookTarget, Wrapper] = {
    UPDATE: _update_from_output,
    RECORD: _record,
    CREATE: _create_prometheus,
    HANDSHAKE: _handshake,
    ACTORS: _start_actors,
    OWN_HANDSHAKE: _perform_handshake,
}
