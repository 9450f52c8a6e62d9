# SPDX-License-Identifier: Apache-2.0
"""The way of the counters: worker -> scheduler -> front end -> Prometheus.

    worker     `attach` puts a payload on the step's own ModelRunnerOutput; the KV
               audit's counts come with it, once a second
    scheduler  update_from_output: payload and scheduler's counts meet (`NworStats`);
               the increments leave in a field that NWOR adds to SchedulerStats
    front end  PrometheusStatLogger.record bumps the counters that its __init__ created

Each may be another process; with several API servers a report goes to one of them. A
front end without NWOR, or with its metrics off, ignores the report: msgpack carries the
fields of a dataclass by name, and a decoder skips those that it does not know. With the
mode off and the audit on all of this is there, too, and shows the audit's counters.

`commits` is called here, too, if anybody registered.

A failure here costs numbers, never tokens: it is logged once, and counted as a breach
where there is a counter (VLLM_NWOR_STRICT=always raises instead).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import commits
from ..config import AuditMode, Mode, NworConfig
from ..metrics import Counted, NworPrometheus, NworStats, log_once
from ._wrap import HostMismatch, argument, install_all
from .engine_core import block_sizes
from .ledger import (
    CREATE_METRICS,
    MAKE_SPEC_DECODING_STATS,
    RECORD,
    UPDATE_FROM_OUTPUT,
)

STATS = "vllm.v1.metrics.stats"


def install(module: ModuleType) -> None:
    """Wraps what WRAPPERS has of `module`, unless VLLM_NWOR_EMIT_METRICS is 0; gives
    SchedulerStats its field. Raises HostMismatch if it is not as expected; nothing was
    wrapped then."""
    if NworConfig.from_env().emit_metrics:
        cls = getattr(import_module(STATS), "SchedulerStats", None)
        extend(cls, f"{STATS}.SchedulerStats", "nwor_report")
        install_all(module, WRAPPERS)


def extend(cls: Any, place: str, name: str) -> None:
    """Adds the field `name`, a dict or None, to the dataclass at `place`, whose own
    __init__ does not take it; decoders that were made before do not know it. Raises
    HostMismatch if it cannot have one more."""
    if not dataclasses.is_dataclass(cls) or "__slots__" in vars(cls):
        raise HostMismatch(f"{place} is not a dataclass without slots in this vLLM")
    kind, field = dict[str, Any] | None, dataclasses.field(default=None, init=False)
    (field,) = dataclasses.fields(
        dataclasses.make_dataclass("_", [(name, kind, field)])
    )
    if "__msgspec_cache__" in vars(cls):  # what decoders to come would go by
        delattr(cls, "__msgspec_cache__")
    cls.__dataclass_fields__[name] = field
    cls.__annotations__ = {**cls.__annotations__, name: kind}
    setattr(cls, name, None)


# --- worker ---------------------------------------------------------------------------


def attach(result: Any, take_payload: Callable[[], Any]) -> None:
    """Makes a step's output carry what `take_payload` gives; never raises.

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
    if payload is None and not stats.report and not commits.registered:
        return wrapped(*args, **kwargs)
    scheduled = args[0] if args else kwargs["scheduler_output"]
    counted: Any = None
    committed: Any = ()
    try:
        if commits.registered:
            # A block holds the tokens of all ranks of decode context parallelism.
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            slot_based = block_sizes(scheduler.kv_cache_config.kv_cache_groups)
            sizes = {gid: managers[gid].block_size for gid in slot_based}
            committed = commits.pending(scheduler, scheduled, output, sizes)
    except Exception as error:
        _failed("on_commit", error, stats)
    try:
        if payload is not None:
            num_ids = list(map(len, output.sampled_token_ids or ()))
            step = scheduled.scheduled_spec_decode_tokens, output, num_ids
            if scheduled.num_invalid_spec_tokens or not scheduler.log_stats:
                counted = Counted(scheduler.make_spec_decoding_stats)
                scheduler.make_spec_decoding_stats = counted
    except Exception as error:
        payload = None
        _failed("step", error, stats)
    try:
        engine_outputs = wrapped(*args, **kwargs)
    finally:
        if counted is not None:
            del scheduler.make_spec_decoding_stats
    try:
        # vLLM puts them on the first one; there are none while statistics are off.
        carrier: Any = next(iter(engine_outputs.values()), None)
        found = carrier and carrier.scheduler_stats
        if payload is not None:
            counted = (
                counted or getattr(found, "spec_decoding_stats", None) or Counted()
            )
            stats.add_step(payload, counted, step)
        # vLLM 0.26's LLMEngine throws away statistics that come without outputs; they
        # wait for the next ones, unless nothing is left that could make any.
        if (
            found is not None
            and stats.report
            and (carrier.outputs or not scheduler.has_unfinished_requests())
        ):
            found.nwor_report, stats.report = stats.report, {}
    except Exception as error:
        _failed("report", error, stats)
    try:
        if committed:
            commits.publish(committed, engine_outputs, sizes)
    except Exception as error:
        _failed("on_commit", error, stats)
    return engine_outputs


def _new_stats(scheduler: Any) -> NworStats:
    config = getattr(scheduler, "vllm_config", None)
    speculative = getattr(config, "speculative_config", None)
    trims = getattr(speculative, "method", None) == "ngram_gpu" or getattr(
        speculative, "enable_adaptive_verification", False
    )
    num_sampled = getattr(scheduler, "num_sampled_tokens_per_step", 1)
    stats = scheduler.nwor_stats = NworStats(num_sampled, trims)
    return stats


# --- front end ------------------------------------------------------------------------


def _create(wrapped: Any, stat_logger: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    created: list[Any] = []
    stat_logger.nwor_prometheus = created
    try:
        config, values = NworConfig.from_env(), stat_logger.per_engine_labelvalues
        classes = stat_logger._counter_cls, stat_logger._gauge_cls
        if config.emit_metrics and config.mode is not Mode.OFF:
            created.append(NworPrometheus(*classes, values))
        if config.emit_metrics and config.audit is not AuditMode.OFF:
            from ..audit.stats import AuditPrometheus

            created.append(AuditPrometheus(classes[0], values))
    except Exception as error:
        _failed("no vllm:nwor metrics", error)


def _record(wrapped: Any, stat_logger: Any, args: Any, kwargs: Any) -> Any:
    scheduler_stats = args[0] if args else kwargs["scheduler_stats"]
    report = getattr(scheduler_stats, "nwor_report", None)
    if report:
        try:
            engine = argument(RECORD, "engine_idx", args, kwargs) or 0
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


# MAKE_SPEC_DECODING_STATS is not wrapped: steps replace it on the scheduler.
WRAPPERS = {
    UPDATE_FROM_OUTPUT: _update_from_output,
    MAKE_SPEC_DECODING_STATS: None,
    RECORD: _record,
    CREATE_METRICS: _create,
}
