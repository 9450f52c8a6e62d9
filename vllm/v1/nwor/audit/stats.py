# SPDX-License-Identifier: Apache-2.0
"""The audit in the scheduler and in the front end.

Its counts travel with NWOR's own (hooks/stats.py), also where `VLLM_NWOR_MODE` is off.

And back: what the scheduler alone knows of a request goes to the workers with the step
that it is new in. Its `cache_salt`, which is to keep its blocks from others of the same
text; how much of what it found comes from the cache, and not from a KV connector; and
whether that has reported its load done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..config import NworConfig
from ..hooks._wrap import Wrapped, install_all
from ..hooks.ledger import SCHEDULE
from ..metrics import create, log_once
from .findings import CLASSES

# Beside findings; the names are those of a payload, behind vllm:nwor_audit_.
COUNTERS = {
    "steps": "Steps that the KV audit has looked at; reported once a second.",
    "unverified": "Slots that a request took over and that cannot be audited.",
}


def install(module: ModuleType) -> None:
    """Wraps the scheduler in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, {SCHEDULE: _schedule})


def _schedule(wrapped: Wrapped, scheduler: Any, args: Any, kwargs: Any) -> Any:
    loaded = set(getattr(scheduler, "finished_recving_kv_req_ids", ()))
    output = wrapped(*args, **kwargs)
    try:
        _inform_workers(scheduler, output, loaded)
    except Exception as error:
        if NworConfig.from_env().strict_steps:
            raise
        # The workers take the requests that are new in this step for unknown ones.
        output.nwor_audit = None
        log_once("audit: requests are not verified from here on", repr(error))
    return output


def _inform_workers(scheduler: Any, output: Any, loaded: set[str]) -> None:
    """What workers need to know of this step's requests goes with its output."""
    if output.scheduled_new_reqs:
        output.nwor_audit = {
            new.req_id: (
                *_known_of(scheduler.requests.get(new.req_id), new),
                new.req_id in loaded,
            )
            for new in output.scheduled_new_reqs
        }
    for name in output.scheduled_cached_reqs.resumed_req_ids:
        _has_blocks(scheduler.requests.get(name))


def _known_of(request: Any, new: Any) -> tuple[str | None, int | None]:
    """Its cache_salt, and tokens of it that are from the local cache; None: not known,
    as for one that comes back from a preemption, or with a vLLM that does not have it.
    new: vLLM's NewRequestData."""
    num_local = None
    if _has_blocks(request):
        # A session's next turn: vLLM looks nothing up for it.
        num_local = new.num_computed_tokens
    elif not getattr(request, "num_preemptions", 0):
        found = getattr(request, "prefill_stats", None)
        num_local = getattr(found, "num_local_cached_tokens", None)
    return getattr(request, "cache_salt", None), num_local


def _has_blocks(request: Any) -> bool:
    """Whether a request that is scheduled has the blocks that it was scheduled with
    before: vLLM frees them when it preempts it, and counts that. Then it has those of
    this step."""
    if request is None:
        return False
    num_preemptions = getattr(request, "num_preemptions", None)
    before = getattr(request, "nwor_num_preemptions", None)
    request.nwor_num_preemptions = num_preemptions
    return num_preemptions is not None and before == num_preemptions


class AuditPrometheus:
    """The audit's counters of one stat logger, as metrics.NworPrometheus. Every class
    is there from the start, with 0, so that an alert on its rise sees the first
    finding."""

    def __init__(
        self, counter_cls: Callable[..., Any], label_values: Mapping[int, Any]
    ) -> None:
        text = "What the KV audit found, by class."
        findings = create(counter_cls, "audit_findings", text, "class")
        others = {
            name: create(counter_cls, f"audit_{name}", text)
            for name, text in COUNTERS.items()
        }
        # Engine index -> counters by the names of a payload.
        self._counters = {
            engine: {name: found.labels(*values) for name, found in others.items()}
            | {kind: findings.labels(*values, kind) for kind in CLASSES}
            for engine, values in label_values.items()
        }

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        for name, count in report.get("audit", {}).items():
            self._counters[engine][name].inc(count)
