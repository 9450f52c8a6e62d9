# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's Prometheus logger: NWOR's metrics are created and updated with
vLLM's own. A failure here is logged once (VLLM_NWOR_STRICT=always raises instead)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..base.errors import report_failure
from ..base.wrap import argument, install_all
from ..config import AuditMode, Mode, NworConfig
from ..metrics import AuditPrometheus, NworPrometheus
from .ledger import CREATE_METRICS, RECORD
from .scheduler import add_report_field


def install(module: ModuleType) -> None:
    """Wraps the loggers in `module`, unless VLLM_NWOR_EMIT_METRICS is 0, and gives
    SchedulerStats its field. Raises HostMismatch if it is not as expected."""
    if NworConfig.from_env().emit_metrics:
        add_report_field()
        install_all(module, WRAPPERS)


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
            created.append(AuditPrometheus(classes[0], values))
    except Exception as error:
        report_failure("no vllm:nwor metrics", error)


def _record(wrapped: Any, stat_logger: Any, args: Any, kwargs: Any) -> Any:
    scheduler_stats = args[0] if args else kwargs["scheduler_stats"]
    report = getattr(scheduler_stats, "nwor_report", None)
    if report:
        try:
            engine = argument(RECORD, "engine_idx", args, kwargs) or 0
            for prometheus in getattr(stat_logger, "nwor_prometheus", ()):
                prometheus.add(report, engine)
        except Exception as error:
            report_failure("a report was lost", error)
    return wrapped(*args, **kwargs)


WRAPPERS = {RECORD: _record, CREATE_METRICS: _create}
