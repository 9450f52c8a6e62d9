# SPDX-License-Identifier: Apache-2.0
"""on_commit: reports in the scheduler's process what each step committed. kv_versions:
which weights computed a request's positions.

For code that publishes or accounts for KV-cache content. The numbers are the
scheduler's; nothing waits for a device or copies from one. Not reported are steps that
vLLM ignores: the request was aborted or preempted in flight, or failed to load its KV.
A prefix from the prefix cache or a KV connector was not computed here: a request's
first commit starts after it. `vllm:nwor_info` says whether a group is protected.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .base.wrap import is_hooked
from .config import (
    AUDIT,
    EMIT_METRICS,
    MODE,
    AuditMode,
    Mode,
    NworConfig,
    NworConfigError,
)
from .step import Weights

logger = logging.getLogger("vllm.v1.nwor")

SCHEDULER = "vllm.v1.core.sched.scheduler"


class KvVersionSpan(NamedTuple):
    """Positions of a request, prompt and output together, that one version of the
    weights computed.

    Attributes:
        version: the label of the weights (vLLM's weight version), "#" and the number of
            their epoch where they have none, None where it is not known, as for KV that
            a connector loaded. Neighbouring spans are of different weights, even if a
            user gave them the same label.
        start: first position.
        end: not included.
    """

    version: str | None
    start: int
    end: int


class Commit(NamedTuple):
    """What one step left of one request in the KV cache.

    Attributes:
        request_id: as the engine core and its KV connectors have it.
        start: first position that the step wrote and that holds a token of the request.
        end: one past the last of them; all positions before `end` hold its tokens.
            Drafts that were accepted after a stop stay in the cache, but are not tokens
            of the request.
        num_rejected: drafts of the step that were rejected.
        block_ids: for each KV-cache group the blocks of [start, end), in order, read
            before vLLM frees them. Empty for groups that are not slot based.
        weights: number and label of the weights that computed the step, if the KV audit
            is on; without it epoch 0.
        found: with the audit, on a request's first commit, and on the first after a
            preemption: the versions of [0, start), which was found and not computed.
    """

    request_id: str
    start: int
    end: int
    num_rejected: int
    block_ids: tuple[tuple[int, ...], ...]
    weights: Weights = Weights()
    found: tuple[KvVersionSpan, ...] = ()


Callback = Callable[[Sequence[Commit]], object]


@dataclass(eq=False)
class Registration:
    """A callback that is called until `remove`. num_errors: how often it raised."""

    callback: Callback
    num_errors: int = 0

    def remove(self) -> None:
        """A second call changes nothing."""
        registered[:] = [other for other in registered if other is not self]

    def call(self, commits: Sequence[Commit]) -> None:
        try:
            self.callback(commits)
        except Exception:
            self.num_errors += 1
            if self.num_errors == 1:
                text = "NWOR on_commit: %r raised (logged once, num_errors counts)"
                logger.exception(text, self.callback)


class Versions(Protocol):
    """Follows the requests of one scheduler."""

    def spans(self, request_id: str) -> tuple[KvVersionSpan, ...] | None: ...


# Of this process's schedulers.
sources: weakref.WeakSet[Versions] = weakref.WeakSet()
# Of this process, in the order of registration.
registered: list[Registration] = []


def on_commit(callback: Callback) -> Registration:
    """Has `callback` called once for each step of this process's schedulers that
    committed something, with a Commit for each request.

    It runs in the scheduler's thread, after vLLM has processed the step's output:
    offload slow work to a queue. With asynchronous scheduling the next step is in
    flight by then, and may write after `end`. An exception never ends a step, not even
    under VLLM_NWOR_STRICT: it is logged once and counted, and the callback stays.

    Raises:
        NworConfigError: the mode or the metrics are off in this process.
        RuntimeError: vLLM's scheduler was imported without NWOR's hook.
    """
    config = NworConfig.from_env()
    if config.mode is Mode.OFF:
        raise NworConfigError(f"on_commit: {MODE} is off; allowed are cow and stage")
    if not config.emit_metrics:
        raise NworConfigError(f"on_commit: {EMIT_METRICS} is 0; allowed is 1")
    if SCHEDULER in sys.modules and not is_hooked(SCHEDULER):
        raise RuntimeError(
            "on_commit: vLLM's scheduler was imported without NWOR's hook: the mode "
            "was set too late, or VLLM_PLUGINS leaves nwor out"
        )
    registered.append(registration := Registration(callback))
    return registration


def kv_versions(request_id: str) -> tuple[KvVersionSpan, ...]:
    """The versions of all positions that a request of this process's schedulers has
    computed or found so far, from position 0 on; empty while it is preempted.

    It can be asked from a request's first step until the step after its last one, in
    the scheduler's thread, as in a callback of on_commit. Reads nothing from a device.

    Raises:
        NworConfigError: the audit or the metrics are off in this process.
        KeyError: no such request was scheduled, or it has ended.
    """
    config = NworConfig.from_env()
    if config.audit is AuditMode.OFF:
        raise NworConfigError(f"kv_versions: {AUDIT} is off; allowed are log and raise")
    if not config.emit_metrics:
        raise NworConfigError(f"kv_versions: {EMIT_METRICS} is 0; allowed is 1")
    for source in tuple(sources):
        if (found := source.spans(request_id)) is not None:
            return found
    raise KeyError(f"kv_versions: no running request is named {request_id!r}")
