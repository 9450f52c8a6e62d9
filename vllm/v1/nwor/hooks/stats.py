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
from collections.abc import Callable, Mapping
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


def attach(result: Any, payload_fn: Callable[[], Mapping[str, Any] | None]) -> None:
    """Makes a step's output carry a payload to the scheduler; never raises.

    result: what the runner's sample_tokens returned. A ModelRunnerOutput gets the
        payload now, as its attribute `nwor_stats`. An asynchronous output gets it in
        its get_output, perhaps in another thread: until then the device may still be
        counting. Nothing else (None, vLLM's shared empty output) gets one.
    payload_fn: returns the payload, plain data as of `Report.payload`, or None if there
        is nothing to tell. It is called at most once, when the output is final,
        and must not wait for the device.
    """
    if result is None:
        return
    try:
        if hasattr(result, "get_output"):
            # A subclass instead of an attribute that holds a bound method: no reference
            # cycle keeps the output's tensors alive when nobody asks for it.
            result.__dict__["nwor_payload_fn"] = payload_fn
            output_class: Any = type(result)
            result.__class__ = _reporting_class(output_class)
        else:
            _set_payload(result, payload_fn)
    except Exception:
        _log_once("attach", f"no statistics on a {type(result).__name__}")


@cache
def _reporting_class(output_class: type) -> type:
    """`output_class` whose get_output sets the payload that `attach` left there."""

    def get_output(self: Any) -> Any:
        output = output_class.get_output(self)  # type: ignore[attr-defined]
        payload_fn = self.__dict__.pop("nwor_payload_fn", None)
        if payload_fn is not None:
            _set_payload(output, payload_fn)
        return output

    namespace = {
        "__slots__": (),
        "__module__": output_class.__module__,
        "__doc__": output_class.__doc__,
        "get_output": get_output,
    }
    return type(output_class)(output_class.__name__, (output_class,), namespace)


def _set_payload(
    output: Any, payload_fn: Callable[[], Mapping[str, Any] | None]
) -> None:
    if output is None or output is _empty_output():
        return
    payload: Mapping[str, Any] | None
    try:
        payload = payload_fn()
    except Exception:
        _log_once("payload", "a step's counts could not be read")
        payload = {"breaches": 1}
    if payload:
        output.nwor_stats = payload


@cache
def _empty_output() -> Any:
    """vLLM's shared output of a step without requests."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return EMPTY_MODEL_RUNNER_OUTPUT


# --- scheduler ------------------------------------------------------------------------


def _new_stats(scheduler: Any) -> NworStats:
    stats = NworStats(_draft_count(scheduler), _log_breach)
    scheduler.nwor_stats = stats
    return stats


def _draft_count(scheduler: Any) -> DraftCount:
    config = getattr(scheduler, "vllm_config", None)
    speculative = getattr(config, "speculative_config", None)
    trims = getattr(speculative, "method", None) == "ngram_gpu" or getattr(
        speculative, "enable_adaptive_verification", False
    )
    return DraftCount.UPPER_BOUND if trims else DraftCount.EXACT


def _update_from_output(
    wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any
) -> Any:
    stats: NworStats | None = scheduler.__dict__.get("nwor_stats")
    if stats is None:
        stats = _new_stats(scheduler)
    output = argument(UPDATE, "model_runner_output", args, kwargs)
    payload: Any = getattr(output, "nwor_stats", None)
    step = None
    vllm_tells = True
    if payload is not None:
        try:
            scheduler_output = argument(UPDATE, "scheduler_output", args, kwargs)
            step = ScheduledWindows(
                scheduler_output.scheduled_spec_decode_tokens,
                output.req_id_to_index,
                output.sampled_token_ids,
                scheduler.num_sampled_tokens_per_step,
            )
            has_invalid = scheduler_output.num_invalid_spec_tokens
            vllm_tells = scheduler.log_stats and not has_invalid
        except Exception as error:
            _failed(stats, error)
    if step is None or vllm_tells:
        engine_outputs = wrapped(*args, **kwargs)
    else:
        scheduler.make_spec_decoding_stats = _counting(scheduler, step)
        try:
            engine_outputs = wrapped(*args, **kwargs)
        finally:
            del scheduler.make_spec_decoding_stats
    try:
        if step is not None:
            _add_step(stats, payload, step, engine_outputs if vllm_tells else None)
    except Exception as error:
        _failed(stats, error)
    try:
        if stats.pending:
            _send_report(scheduler, stats, engine_outputs)
    except Exception as error:
        _failed(stats, error)
    return engine_outputs


def _carrier(engine_outputs: Mapping[int, Any]) -> Any:
    """The one output that carries a SchedulerStats; None while statistics are off."""
    for engine_output in engine_outputs.values():
        if engine_output.scheduler_stats is not None:
            return engine_output
    return None


def _add_step(
    stats: NworStats,
    payload: Any,
    step: ScheduledWindows,
    engine_outputs: Mapping[int, Any] | None,
) -> None:
    """Adds what the worker sent to what vLLM counted.

    engine_outputs: where vLLM's SpecDecodingStats is, if that says what it counted:
        without grammar-invalid drafts its sums are those of what
        `make_spec_decoding_stats` was called with. None if `step` knows it already.
    """
    try:
        if engine_outputs is not None:
            counted = _carrier(engine_outputs).scheduler_stats.spec_decoding_stats
            if counted is not None:
                if stats.add_if_all_agrees(payload, step, counted):
                    return
                step.count(counted.num_draft_tokens, counted.num_accepted_tokens)
    except Exception:
        # Windows of which vLLM says nothing are dropped ones, not lost.
        stats.add_step(WorkerRecord.from_payload(payload), step)
        raise
    stats.add_step(WorkerRecord.from_payload(payload), step)


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


def _send_report(
    scheduler: Any, stats: NworStats, engine_outputs: Mapping[int, Any]
) -> None:
    """Puts what is pending on the output that carries a SchedulerStats. There is none
    while statistics are off: the counts wait."""
    carrier = _carrier(engine_outputs)
    if carrier is None:
        return
    # vLLM 0.26's LLMEngine throws away statistics that come without outputs; they wait
    # for the next ones, unless there is nothing left that could make any.
    if not carrier.outputs and scheduler.has_unfinished_requests():
        return
    report = {REPORT_KEY: stats.take_report()}
    if not getattr(scheduler.vllm_config.parallel_config, MARK, False):
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

# Engine index -> rows of vllm:nwor_info that came last. An engine sends them once, but
# loggers are created anew while it runs (elastic expert parallelism).
_info: dict[int, Any] = {}


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
    scheduler_stats = argument(RECORD, "scheduler_stats", args, kwargs)
    carried = getattr(scheduler_stats, "kv_connector_stats", None)
    if carried and REPORT_KEY in carried:
        report = _pop_report(scheduler_stats)
        try:
            _bump(manager, report, argument(RECORD, "engine_idx", args, kwargs) or 0)
        except Exception:
            if NworConfig.from_env().strict_steps:
                raise
            _log_once("record", f"a report was lost: {report}")
    return wrapped(*args, **kwargs)


def _pop_report(scheduler_stats: Any) -> dict[str, Any]:
    """Takes our report out of a SchedulerStats, which then is as vLLM made it."""
    others = dict(scheduler_stats.kv_connector_stats)
    report: dict[str, Any] = others.pop(REPORT_KEY)
    scheduler_stats.kv_connector_stats = others or None
    return report


def _bump(manager: Any, report: dict[str, Any], engine: int) -> None:
    if "info" in report:
        _info[engine] = report["info"]
    for stat_logger in manager.stat_loggers:
        prometheus = getattr(stat_logger, "nwor_prometheus", None)
        if prometheus is None:
            continue
        prometheus.add(report, engine)
        if engine in _info and ("info" in report or not prometheus.has_info(engine)):
            prometheus.set_info(_info[engine], engine)


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
