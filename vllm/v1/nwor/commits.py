# SPDX-License-Identifier: Apache-2.0
"""on_commit: reports in the scheduler's process what each step committed.

For code that publishes or accounts for KV-cache content. The numbers are the
scheduler's; nothing waits for a device or copies from one. Not reported are steps that
vLLM ignores: the request was aborted or preempted in flight, or failed to load its KV.
A prefix from the prefix cache or a KV connector was not computed here: a request's
first commit starts after it. `vllm:nwor_info` says whether a group is protected.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .base.wrap import is_hooked
from .config import EMIT_METRICS, MODE, Mode, NworConfig, NworConfigError
from .step import Weights

logger = logging.getLogger("vllm.v1.nwor")

SCHEDULER = "vllm.v1.core.sched.scheduler"


class Commit(NamedTuple):
    """What one step left of one request in the KV cache.

    request_id: as the engine core and its KV connectors have it.
    start, end: positions that the step wrote and that hold the request's tokens, `end`
        not included; all positions before them do, too. Drafts that were accepted after
        a stop stay in the cache, but are not tokens of the request.
    num_rejected: drafts of the step that were rejected.
    block_ids: for each KV-cache group the blocks of [start, end), in order, read before
        vLLM frees them. Empty for groups that are not slot based.
    weights: number and label of the weights that computed the step, if the KV audit is
        on; without it epoch 0.
    """

    request_id: str
    start: int
    end: int
    num_rejected: int
    block_ids: tuple[tuple[int, ...], ...]
    weights: Weights = Weights()


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
