# SPDX-License-Identifier: Apache-2.0
"""on_commit: reports in the scheduler's process what each step committed.

For what publishes or accounts for KV-cache content. The numbers are the scheduler's;
nothing waits for a device, or is copied from one. Steps that vLLM ignores are not
reported: of requests aborted or preempted in flight, or whose KV failed to load. What a
prefix cache or a KV connector brought was never computed here: a request's first commit
starts behind it. Whether a KV-cache group is protected is in `vllm:nwor_info`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import EMIT_METRICS, MODE, Mode, NworConfig, NworConfigError

logger = logging.getLogger("vllm.v1.nwor")


class Commit(NamedTuple):
    """What one step left of one request in the KV cache.

    request_id: as the engine core and its KV connectors have it.
    start, end: positions that the step wrote and that hold the request's tokens, `end`
        not included; so do all before. Drafts that were accepted behind a stop are kept
        in the cache, but are no tokens of the request.
    num_rejected: drafts of the step that were rejected.
    block_ids: for each KV-cache group the blocks of [start, end), in order, read before
        vLLM frees them. Empty for groups that are not slot based.
    """

    request_id: str
    start: int
    end: int
    num_rejected: int
    block_ids: tuple[tuple[int, ...], ...]


Callback = Callable[[Sequence[Commit]], object]
# vLLM's Request, how many tokens it has, and what it will have committed.
Pending = tuple[Any, int, Commit]


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


# Of this process, in the order in which they came.
registered: list[Registration] = []


def on_commit(callback: Callback) -> Registration:
    """Has `callback` called once for each step of this process's schedulers that
    committed something, with a Commit for each request.

    It runs in the scheduler's thread, when vLLM has taken the step in: what takes long
    belongs in a queue. With asynchronous scheduling the next step is on its way by
    then, and may write behind `end`. An exception ends no step, whatever
    VLLM_NWOR_STRICT says: it is logged once and counted, and the callback stays.

    Raises:
        NworConfigError: steps are not counted in this process's environment.
        RuntimeError: vLLM's scheduler is here without NWOR's hook.
    """
    config = NworConfig.from_env()
    if config.mode is Mode.OFF:
        raise NworConfigError(f"on_commit: {MODE} is off; allowed are cow and stage")
    if not config.emit_metrics:
        raise NworConfigError(f"on_commit: {EMIT_METRICS} is 0; allowed is 1")
    if "vllm.v1.core.sched.scheduler" in sys.modules:
        from .hooks._wrap import is_installed
        from .hooks.ledger import UPDATE_FROM_OUTPUT

        if not is_installed(UPDATE_FROM_OUTPUT):
            raise RuntimeError(
                "on_commit: vLLM's scheduler was imported without NWOR's hook: the "
                "mode was set too late, or VLLM_PLUGINS leaves nwor out"
            )
    registered.append(registration := Registration(callback))
    return registration


def pending(
    scheduler: Any, scheduled: Any, output: Any, block_sizes: Mapping[int, int]
) -> list[Pending]:
    """What a step commits, as far as is known before vLLM takes it in.

    scheduled, output: its SchedulerOutput and ModelRunnerOutput. block_sizes: tokens a
        block of each KV-cache group that is slot based.
    """
    found: list[Pending] = []
    ids, drafts = output.sampled_token_ids, scheduled.scheduled_spec_decode_tokens
    for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
        request = scheduler.requests.get(request_id)
        # Scheduled before a preemption that it has behind it (vLLM 0.26's name is the
        # second); if it has not, less is computed than in flight, and start below 0.
        if (
            request is None
            or request.is_finished()
            or getattr(request, "num_stale_output_tokens", 0)
            or getattr(request, "async_tokens_to_discard", 0)
        ):
            continue
        start = request.num_computed_tokens - request.num_in_flight_tokens
        num_ids = len(ids[output.req_id_to_index[request_id]]) if ids else 0
        num_drafts = len(drafts.get(request_id, ()))
        if start < 0 or (num_drafts and not num_ids):
            continue
        num_rejected = num_drafts and num_drafts + 1 - num_ids
        end = start + num_scheduled - num_rejected
        groups = scheduler.kv_cache_manager.get_blocks(request_id).blocks
        blocks = tuple(
            tuple(block.block_id for block in group[start // size : -(-end // size)])
            if (size := block_sizes.get(gid))
            else ()
            for gid, group in enumerate(groups)
        )
        commit = Commit(request_id, start, end, num_rejected, blocks)
        found.append((request, request.num_tokens, commit))
    return found


def publish(
    found: Sequence[Pending], engine_outputs: Any, block_sizes: Mapping[int, int]
) -> None:
    """Calls the callbacks, once vLLM took the step in; raises nothing of theirs.

    engine_outputs: what update_from_output returned: EngineCoreOutputs by client.
    """
    # Of requests, and of turns of a streaming session, that ended in this step.
    ended = {
        output.request_id: output.new_token_ids
        for of_client in engine_outputs.values()
        for output in of_client.outputs
        if output.finish_reason is not None
    }
    commits = []
    for request, num_tokens, commit in found:
        end, first = commit.end, commit.start
        if new := ended.get(commit.request_id):
            # It may have stopped within the accepted drafts. A Request says that no
            # more: vLLM 0.33 takes them off num_computed_tokens, and a session's next
            # turn may be in it already.
            end = min(end, num_tokens + len(new))
            if not request.is_finished():  # the turn's last token may be discarded
                end = min(end, request.num_computed_tokens)
        elif request.num_computed_tokens < end:
            continue  # it has to be computed again
        if end < commit.end:
            blocks = tuple(
                ids and ids[: -(-end // block_sizes[gid]) - first // block_sizes[gid]]
                for gid, ids in enumerate(commit.block_ids)
            )
            commit = commit._replace(end=end, block_ids=blocks)
        commits.append(commit)
    if commits:
        for registration in tuple(registered):
            registration.call(commits)
