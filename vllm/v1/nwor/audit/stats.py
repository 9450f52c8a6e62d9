# SPDX-License-Identifier: Apache-2.0
"""The way of the audit's numbers: worker -> scheduler -> front end -> Prometheus.

As NWOR's counters travel (hooks/stats.py says how and why), with a key, a mark and
wrappers of its own, so that it works with `VLLM_NWOR_MODE` off. Only steps that have
something to tell touch any of it. A failure here costs numbers, never tokens.

And back: what the scheduler alone knows of a request goes to the workers with the step
that it is new in. Its `cache_salt`, which is to keep its blocks from others of the same
text; and how much of what it found comes from the cache, and not from a KV connector.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from ..config import AuditMode, NworConfig
from ..hooks import stats as nwor
from ..hooks._wrap import (
    HookTarget,
    HostMismatch,
    Wrapper,
    argument,
    check,
    install_all,
)
from .findings import CLASSES

logger = logging.getLogger("vllm.v1.nwor")

# Beside findings; the names are those of a payload, behind vllm:nwor_audit_.
COUNTERS = {
    "steps": "Steps that the KV audit has looked at; told once a second.",
    "unverified": "Slots that a request took over and that cannot be audited.",
}
KEY = "nwor_audit"
MARK = "nwor_audit_front_end"


def _ours(target: HookTarget) -> HookTarget:
    return replace(target, why=f"audit: {target.why}", layer=1)


SCHEDULE = HookTarget(
    nwor.SCHEDULER,
    "Scheduler.schedule",
    ("self",),
    why="audit: a request's cache_salt and what it found in the cache are known here",
    delete_when="NewRequestData has both",
    layer=1,
)
UPDATE = _ours(nwor.UPDATE)
RECORD = _ours(nwor.RECORD)
CREATE = _ours(nwor.CREATE)
HANDSHAKE = _ours(nwor.HANDSHAKE)
ACTORS = _ours(nwor.ACTORS)
LEDGER = (SCHEDULE, UPDATE, RECORD, CREATE, HANDSHAKE, ACTORS)


def install_scheduler(module: ModuleType) -> None:
    """Wraps the scheduler in `module`; its numbers' way not if VLLM_NWOR_EMIT_METRICS
    is 0. Raises HostMismatch, as the functions below."""
    wrappers: dict[HookTarget, Wrapper] = {SCHEDULE: _schedule}
    if NworConfig.from_env().emit_metrics:
        wrappers[UPDATE] = _update_from_output
    install_all(module, wrappers)


def install_loggers(module: ModuleType) -> None:
    """Wraps the loggers in `module`."""
    install_all(module, {RECORD: _record, CREATE: _create_prometheus})


def install_engines(module: ModuleType) -> None:
    """Makes a front end tell its engines that it takes these numbers."""
    install_all(module, {HANDSHAKE: _handshake, ACTORS: _start_actors})


def _schedule(
    wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any
) -> Any:
    output = wrapped(*args, **kwargs)
    if output.scheduled_new_reqs:
        output.nwor_audit = {
            new.req_id: _known_of(scheduler.requests.get(new.req_id))
            for new in output.scheduled_new_reqs
        }
    return output


def _known_of(request: Any) -> tuple[str | None, int | None]:
    """Its cache_salt, and tokens of it that are from the local cache; None: not known,
    as for one that was preempted, or with a vLLM that does not have it."""
    found = getattr(request, "prefill_stats", None)
    if getattr(request, "num_preemptions", 0):
        found = None
    num_local = getattr(found, "num_local_cached_tokens", None)
    return getattr(request, "cache_salt", None), num_local


def _update_from_output(
    wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any
) -> Any:
    output = argument(UPDATE, "model_runner_output", args, kwargs)
    payload = getattr(output, KEY, None)
    pending = vars(scheduler).get("nwor_audit_pending")
    if payload is not None:
        pending = dict(Counter(pending) + Counter(payload))
        scheduler.nwor_audit_pending = pending
    outputs = wrapped(*args, **kwargs)
    if pending is not None:
        for carrier in outputs.values():
            # vLLM 0.26 throws statistics away that come without outputs.
            if carrier.scheduler_stats is not None and carrier.outputs:
                scheduler.nwor_audit_pending = None
                _send(scheduler, carrier.scheduler_stats, pending)
                break
    return outputs


def _send(scheduler: Any, found: Any, pending: Any) -> None:
    parallel = getattr(scheduler.vllm_config, "parallel_config", None)
    if not getattr(parallel, MARK, False):
        _log_no_front_end()
        return
    others = found.kv_connector_stats
    found.kv_connector_stats = {**(others or {}), KEY: pending}


@cache
def _log_no_front_end() -> None:
    logger.warning(
        "NWOR audit: no metrics: the front end does not take them. Set VLLM_NWOR_AUDIT "
        "in its environment, too"
    )


def _takes_numbers() -> bool:
    config = NworConfig.from_env()
    if config.audit is AuditMode.OFF or not config.emit_metrics:
        return False
    import vllm.v1.metrics.loggers as loggers

    try:
        check(RECORD, loggers)
    except HostMismatch:  # its hook has said so
        return False
    return True


def _handshake(
    wrapped: Callable[..., Any], metadata: Any, args: Any, kwargs: Any
) -> None:
    wrapped(*args, **kwargs)
    if _takes_numbers():
        metadata.parallel_config = {**metadata.parallel_config, MARK: 1}


def _start_actors(
    wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any
) -> None:
    config = argument(ACTORS, "vllm_config", args, kwargs)
    setattr(config.parallel_config, MARK, _takes_numbers())
    wrapped(*args, **kwargs)


class AuditPrometheus:
    """The audit's counters of one stat logger. Every class is there from the start,
    with 0, so that an alert on its rise sees the first finding."""

    def __init__(
        self, counter_cls: Callable[..., Any], label_values: Mapping[int, Any]
    ) -> None:
        labels = ["model_name", "engine"]
        self._label_values = label_values
        self._findings = counter_cls(
            name="vllm:nwor_audit_findings",
            documentation="What the KV audit found, by class.",
            labelnames=[*labels, "class"],
        )
        self._counters = {
            name: counter_cls(
                name=f"vllm:nwor_audit_{name}", documentation=text, labelnames=labels
            )
            for name, text in COUNTERS.items()
        }
        for values in label_values.values():
            for counter in self._counters.values():
                counter.labels(*values).inc(0)
            for kind in CLASSES:
                self._findings.labels(*values, kind).inc(0)

    def add(self, payload: Mapping[str, int], engine: int) -> None:
        """payload: steps, unverified slots, and findings by class; what is 0 may be
        missing."""
        values = self._label_values[engine]
        for name, count in payload.items():
            if name in CLASSES:
                self._findings.labels(*values, name).inc(count)
            else:
                self._counters[name].labels(*values).inc(count)


def _create_prometheus(
    wrapped: Callable[..., Any], stat_logger: Any, args: Any, kwargs: Any
) -> None:
    wrapped(*args, **kwargs)
    if _takes_numbers():
        stat_logger.nwor_audit_prometheus = AuditPrometheus(
            stat_logger._counter_cls, stat_logger.per_engine_labelvalues
        )
        config = argument(CREATE, "vllm_config", args, kwargs)
        setattr(config.parallel_config, MARK, True)


def _record(wrapped: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    found = argument(RECORD, "scheduler_stats", args, kwargs)
    carried = getattr(found, "kv_connector_stats", None)
    if carried and KEY in carried:
        payload = carried.pop(KEY)
        if not carried:
            found.kv_connector_stats = None
        engine = argument(RECORD, "engine_idx", args, kwargs) or 0
        for stat_logger in manager.stat_loggers:
            prometheus = getattr(stat_logger, "nwor_audit_prometheus", None)
            if prometheus is not None:
                prometheus.add(payload, engine)
    return wrapped(*args, **kwargs)
