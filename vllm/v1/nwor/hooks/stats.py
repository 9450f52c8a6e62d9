# SPDX-License-Identifier: Apache-2.0
"""The way of the counters: worker -> scheduler -> front end -> Prometheus.

    worker     `attach` puts a payload on the step's own ModelRunnerOutput
    scheduler  update_from_output: payload and scheduler's counts meet (`NworStats`);
               vLLM's SpecDecodingStats of the step has those counts
               make_spec_decoding_stats: called once for each window vLLM counts, for
               the steps in which SpecDecodingStats does not say it
               the increments leave in kv_connector_stats["nwor"] of the SchedulerStats,
               the only free-form field that reaches the front end in all versions
    front end  StatLoggerManager.record: takes them out again, before vLLM's own loggers
               (which know KV connectors only) see them, and bumps the counters
               PrometheusStatLogger.__init__: creates the counters

Each of these may be another process; with several API servers a report goes to one of
them. An engine's reports carry its index.

A front end without NWOR would hand a report to vLLM's KV connector logging, which fails
on it. So an engine sends nothing before its front end has said that it takes reports: a
mark on the engine's ParallelConfig, which is neither a field of it nor hashed.

    EngineHandshakeMetadata          every engine process asks the front end it belongs
                                     to how to run (those of a headless node the head's)
    CoreEngineActorManager.__init__  Ray's data-parallel engines get a config instead
    PrometheusStatLogger.__init__    an engine in the front end's process shares its own

A failure here costs numbers, never tokens: it is logged once, and counted as a breach
where there is a counter (VLLM_NWOR_STRICT=always raises instead). Nothing here decides
what the worker does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ..config import Mode, NworConfig
from ..metrics import (
    DraftCount,
    NworPrometheus,
    NworStats,
    PayloadError,
    ScheduledWindows,
    WorkerRecord,
    agreed_counts,
)
from ._wrap import (
    HookTarget,
    HostMismatch,
    argument,
    check,
    install_all,
)

logger = logging.getLogger("vllm.v1.nwor")

SCHEDULER = "vllm.v1.core.sched.scheduler"
LOGGERS = "vllm.v1.metrics.loggers"
ENGINES = "vllm.v1.engine.utils"
REPORT_KEY = "nwor"
MARK = "nwor_front_end"

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
    (
        "self",
        "spec_decoding_stats",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_invalid_spec_tokens",
        "request_id",
    ),
    why="called once for each window that vLLM counts; replaced on one scheduler while "
    "it processes a step with grammar-invalid drafts, or without statistics",
    delete_when="SpecDecodingStats counts grammar-invalid drafts, too",
)
RECORD = HookTarget(
    LOGGERS,
    "StatLoggerManager.record",
    ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    why="the only way of a SchedulerStats to the loggers: the report is taken out",
    delete_when="SchedulerStats has a field for extensions",
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
    delete_when="SchedulerStats has a field for extensions",
)
ACTORS = HookTarget(
    ENGINES,
    "CoreEngineActorManager.__init__",
    ("self", "vllm_config"),
    why="Ray's data-parallel engines do without that handshake: the mark goes before",
    delete_when="SchedulerStats has a field for extensions",
)
LEDGER = (UPDATE, COUNT, RECORD, CREATE, HANDSHAKE, ACTORS)


def install_scheduler(module: ModuleType) -> None:
    """Wraps the scheduler in `module`, unless VLLM_NWOR_EMIT_METRICS is 0.

    Raises:
        HostMismatch: if it is not as expected; nothing was wrapped.
    """
    if NworConfig.from_env().emit_metrics:
        check(COUNT, module)
        install_all(module, {UPDATE: _update_from_output})


def install_loggers(module: ModuleType) -> None:
    """Wraps the loggers in `module`. Reports are always taken out; whether counters
    are created is seen when vLLM creates its own.

    Raises:
        HostMismatch: if they are not as expected; nothing was wrapped.
    """
    install_all(module, {RECORD: _record, CREATE: _create_prometheus})


def install_engines(module: ModuleType) -> None:
    """Makes a front end tell the engines it starts, with what is in `module`, that it
    takes their reports.

    Raises:
        HostMismatch: if that is not as expected; nothing was wrapped.
    """
    install_all(module, {HANDSHAKE: _handshake, ACTORS: _start_actors})


# --- worker ---------------------------------------------------------------------------


def attach(result: Any, take_payload: Callable[[], Any]) -> None:
    """Makes a step's output carry a payload to the scheduler; never raises.

    result: what the runner's sample_tokens returned: a ModelRunnerOutput, which gets
        the payload as its attribute `nwor_stats`, or an asynchronous output that has
        one and gives it out, to be read or pickled, when the device has counted. None
        and outputs without requests, as vLLM's shared empty one, get nothing.
    take_payload: `Report.take_payload`; called at most once.
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
        _log_once("attach", f"no statistics on a {type(result).__name__}")


# --- scheduler ------------------------------------------------------------------------


def _new_stats(scheduler: Any) -> NworStats:
    config = getattr(scheduler, "vllm_config", None)
    speculative = getattr(config, "speculative_config", None)
    trims = getattr(speculative, "method", None) == "ngram_gpu" or getattr(
        speculative, "enable_adaptive_verification", False
    )
    draft_count = DraftCount.UPPER_BOUND if trims else DraftCount.EXACT
    # A step runs: whoever started this engine has marked its config.
    mark = getattr(getattr(config, "parallel_config", None), MARK, False)
    stats = scheduler.nwor_stats = NworStats(draft_count, _log_breach, bool(mark))
    return stats


def _update_from_output(
    wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any
) -> Any:
    # Every object that is touched here costs a step more than what is done with it:
    # after a forward it is in no cache of the processor.
    stats: NworStats | None = getattr(scheduler, "nwor_stats", None)
    if stats is None:
        stats = _new_stats(scheduler)
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    payload = getattr(output, "nwor_stats", None)
    if payload is None and not stats.pending:
        return wrapped(*args, **kwargs)
    step = counted = None
    carrier: Any = None
    try:
        if payload is not None:
            scheduled = args[0] if args else kwargs["scheduler_output"]
            drafts = scheduled.scheduled_spec_decode_tokens
            # vLLM cuts the ids of requests that stop.
            num_ids = list(map(len, output.sampled_token_ids or ()))
            if scheduled.num_invalid_spec_tokens or not scheduler.log_stats:
                step = _windows(scheduler, drafts, output, num_ids)
    except Exception as error:
        _failed(stats, error)
        payload = None
    if step is None:
        engine_outputs = wrapped(*args, **kwargs)
    else:
        scheduler.make_spec_decoding_stats = _counting(scheduler, step)
        try:
            engine_outputs = wrapped(*args, **kwargs)
        finally:
            del scheduler.make_spec_decoding_stats
    try:
        for engine_output in engine_outputs.values():
            if engine_output.scheduler_stats is not None:
                carrier = engine_output  # the only one; none while statistics are off
        if payload is not None and step is None:
            # Without grammar-invalid drafts the sums of what vLLM counted.
            counted = carrier.scheduler_stats.spec_decoding_stats
    except Exception as error:
        # Windows of which vLLM says nothing are dropped ones, not lost.
        _failed(stats, error)
    try:
        counts = None
        if counted is not None:
            counts = agreed_counts(payload, len(drafts), counted)
        if counts is not None:
            found = carrier.scheduler_stats
            if (
                stats.has_front_end
                and carrier.outputs
                and not stats.pending
                and not found.kv_connector_stats
            ):
                found.kv_connector_stats = {REPORT_KEY: {"counts": counts}}
                return engine_outputs
            stats.add_counts(counts)
        elif payload is not None:
            if step is None:
                step = _windows(scheduler, drafts, output, num_ids)
            if counted is not None:
                step.count(counted.num_draft_tokens, counted.num_accepted_tokens)
            stats.add_step(WorkerRecord.from_payload(payload), step)
    except Exception as error:
        _failed(stats, error)
    try:
        if stats.pending and carrier is not None:
            _send_report(scheduler, stats, carrier)
    except Exception as error:
        _failed(stats, error)
    return engine_outputs


def _windows(
    scheduler: Any, drafts: Any, output: Any, num_ids: Sequence[int]
) -> ScheduledWindows:
    return ScheduledWindows(
        drafts, output.req_id_to_index, num_ids, scheduler.num_sampled_tokens_per_step
    )


def _counting(scheduler: Any, step: ScheduledWindows) -> Callable[..., Any]:
    """make_spec_decoding_stats of this scheduler, counting in `step` too.

    A plain function on this one scheduler, for as long as it is needed: vLLM calls it
    for every window, and it costs a small part of what a wrapper on the class does.
    """
    make_spec_decoding_stats = scheduler.make_spec_decoding_stats

    def counted(
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        step.num_counted_drafts += num_draft_tokens
        step.num_counted_accepted += num_accepted_tokens
        return make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    return counted


def _send_report(scheduler: Any, stats: NworStats, carrier: Any) -> None:
    """Puts what is pending on the output that carries a SchedulerStats."""
    # vLLM 0.26's LLMEngine throws away statistics that come without outputs; they wait
    # for the next ones, unless there is nothing left that could make any.
    if not carrier.outputs and scheduler.has_unfinished_requests():
        return
    report = {REPORT_KEY: stats.take_report()}
    if not stats.has_front_end:
        _log_no_front_end()
        return
    others = carrier.scheduler_stats.kv_connector_stats
    carrier.scheduler_stats.kv_connector_stats = (
        {**others, **report} if others else report
    )


@cache
def _log_no_front_end() -> None:
    logger.warning(
        "NWOR metrics are off: the front end (LLM, AsyncLLM, vllm serve or the head of "
        "a headless node) does not take them. Set VLLM_NWOR_MODE in its environment "
        "before it loads vLLM's plugins, which it does once"
    )


def _failed(stats: NworStats, error: Exception) -> None:
    """To be called while `error` is handled: it is a breach, or raised again under
    VLLM_NWOR_STRICT=always."""
    if NworConfig.from_env().strict_steps:
        raise error
    kind = "payload" if isinstance(error, PayloadError) else "internal"
    stats.breach(kind, repr(error))


def _log_breach(kind: str, found: str) -> None:
    _log_once(f"breach_{kind}", f"breach of the {kind} identity: {found}")


# --- front end ------------------------------------------------------------------------


def _takes_reports() -> bool:
    """Whether this process takes reports out of vLLM's statistics and shows them, as
    its environment is now."""
    config = NworConfig.from_env()
    if config.mode is Mode.OFF or not config.emit_metrics:
        return False
    import vllm.v1.metrics.loggers as loggers

    try:
        check(RECORD, loggers)
    except HostMismatch:  # their hook has said so
        return False
    return True


def _handshake(
    wrapped: Callable[..., Any], metadata: Any, args: Any, kwargs: Any
) -> None:
    wrapped(*args, **kwargs)
    if _takes_reports():
        # 1: the message has room for numbers, not for True.
        metadata.parallel_config = {**metadata.parallel_config, MARK: 1}


def _start_actors(
    wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any
) -> None:
    config = argument(ACTORS, "vllm_config", args, kwargs)
    setattr(config.parallel_config, MARK, _takes_reports())
    wrapped(*args, **kwargs)


def _create_prometheus(
    wrapped: Callable[..., Any], stat_logger: Any, args: Any, kwargs: Any
) -> None:
    wrapped(*args, **kwargs)
    if not _takes_reports():
        return
    try:
        stat_logger.nwor_prometheus = NworPrometheus(
            stat_logger._counter_cls,
            stat_logger._gauge_cls,
            stat_logger.per_engine_labelvalues,
        )
        config = argument(CREATE, "vllm_config", args, kwargs)
        setattr(config.parallel_config, MARK, True)
    except Exception:
        if NworConfig.from_env().strict_steps:
            raise
        _log_once("create", "no vllm:nwor metrics")


def _record(wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    scheduler_stats = args[0] if args else kwargs.get("scheduler_stats")
    carried = getattr(scheduler_stats, "kv_connector_stats", None)
    if carried and REPORT_KEY in carried:
        # The dict is the scheduler's hook's own, or came from another process.
        report = carried.pop(REPORT_KEY)
        if not carried:
            scheduler_stats.kv_connector_stats = None
        try:
            engine = argument(RECORD, "engine_idx", args, kwargs) or 0
            for stat_logger in manager.stat_loggers:
                prometheus = getattr(stat_logger, "nwor_prometheus", None)
                if prometheus is not None:
                    prometheus.add(report, engine)
        except Exception:
            if NworConfig.from_env().strict_steps:
                raise
            _log_once("record", f"a report was lost: {report}")
    return wrapped(*args, **kwargs)


# --------------------------------------------------------------------------------------

_logged: set[str] = set()


def _log_once(key: str, message: str) -> None:
    """Logs the first message of this kind in this process, with the exception that is
    being handled, if any."""
    if key in _logged:
        return
    _logged.add(key)
    handling = sys.exc_info()[0] is not None
    logger.error("NWOR statistics: %s (logged once)", message, exc_info=handling)
