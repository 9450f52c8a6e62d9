# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's scheduler: compare a step's counters with the scheduler's own, and
send the workers request data that only the scheduler has.

Counter data flow: worker -> scheduler -> front end -> Prometheus.

    worker     outputs.py attaches a payload to the step's own ModelRunnerOutput
    scheduler  update_from_output: the payload and the scheduler's counters are compared
               (metrics.NworStats); the increments leave in a field that NWOR adds to
               SchedulerStats; on_commit is called, and last outputs get versions
    front end  front_end.py adds them to Prometheus counters

Each may be another process; with several API servers a report goes to one of them. A
front end without NWOR, or with its metrics off, ignores the report: msgpack carries the
fields of a dataclass by name, and a decoder skips unknown ones.

The workers get this, only for the audit (`schedule`): a request's `cache_salt`, which
separates its blocks from those of the same text with another salt; how much of its
prefix comes from the local cache; and the blocks that a KV connector is to load. A
worker's output may say that weights were changed: that reaches the engine core's epochs
(`weights`) with metrics off, too.

A failure here loses counts, never tokens: it is logged once, and counted as a breach
(VLLM_NWOR_STRICT=always raises instead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import commits
from ..base.errors import log_once, report_failure
from ..base.wrap import Wrapped, argument, extend, install_all
from ..commits import Commit
from ..config import AuditMode, NworConfig
from ..metrics import VERSIONS, WEIGHT_CHANGES, Counted, NworStats
from ..step import Loads, Weights
from . import weights
from .connectors import FollowedLoads
from .engine_core import block_sizes
from .kv_versions import KvVersions
from .ledger import CONNECTOR_FINISHED, SCHEDULE, UPDATE_FROM_OUTPUT

STATS = "vllm.v1.metrics.stats"
NO_LOADS = Loads()
# In kv_transfer_params: audit.handover.KEY.
DIGESTS = "nwor"

# vLLM's Request, its number of tokens, and the Commit that the step will make.
Pending = tuple[Any, int, Commit]


def install(module: ModuleType) -> None:
    """Wraps the scheduler in `module`, and gives SchedulerStats its field. Raises
    HostMismatch if it is not as expected; nothing was wrapped then."""
    config = NworConfig.from_env()
    wrappers = {}
    is_audited = config.audit is not AuditMode.OFF
    if config.emit_metrics:
        add_report_field()
    if config.emit_metrics or is_audited:
        wrappers[UPDATE_FROM_OUTPUT] = _update_from_output
    if is_audited:
        wrappers[SCHEDULE] = _schedule
        wrappers[CONNECTOR_FINISHED] = _connector_finished
    install_all(module, wrappers)


def add_report_field() -> None:
    """Gives SchedulerStats its field, in the process that sends it and in the one that
    decodes it. Raises HostMismatch."""
    cls = getattr(import_module(STATS), "SchedulerStats", None)
    extend(cls, f"{STATS}.SchedulerStats", "nwor_report")


def _update_from_output(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    # Hot path: after a forward these objects are cold in the CPU's caches.
    stats: NworStats = getattr(scheduler, "nwor_stats", None) or _new_stats(scheduler)
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    if steps := getattr(output, "nwor_weights", None):
        weights.changed_unannounced(scheduler, steps)
    if given := getattr(output, "nwor_given", None):
        # One that was aborted meanwhile has no answer that they could leave with, also
        # where its connector still sends its blocks.
        known = scheduler.requests
        runs = [n for n in given if n in known and not known[n].is_finished()]
        live = {name: given[name] for name in runs}
        scheduler.nwor_given = getattr(scheduler, "nwor_given", {}) | live
    payload = getattr(output, "nwor_stats", None)
    versions: KvVersions | None = getattr(scheduler, "nwor_versions", None)
    is_idle = payload is None and not stats.report and not commits.registered
    if is_idle and versions is None:
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
            committed = pending(scheduler, scheduled, output, sizes)
    except Exception as error:
        _failed("on_commit", error, stats)
    try:
        if versions is not None:
            versions.processing(scheduled)
    except Exception as error:
        versions = None
        _versions_failed(scheduler, error)
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
        if versions is not None:
            versions.answer(engine_outputs)
            if ended := scheduler.finished_req_ids:
                stats.count(VERSIONS, versions.ended(ended))
    except Exception as error:
        _versions_failed(scheduler, error)
    try:
        # vLLM attaches statistics to the first output; none if they are off.
        carrier: Any = next(iter(engine_outputs.values()), None)
        found = carrier and carrier.scheduler_stats
        if payload is not None:
            counted = (
                counted or getattr(found, "spec_decoding_stats", None) or Counted()
            )
            stats.add_step(payload, counted, step)
        # vLLM 0.26's LLMEngine discards statistics that come without outputs. So they
        # wait for the next outputs, unless no request is left to produce any.
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
            publish(committed, engine_outputs, sizes)
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


def pending(
    scheduler: Any, scheduled: Any, output: Any, block_sizes: Mapping[int, int]
) -> list[Pending]:
    """The commits of a step, before vLLM processes its output: `publish` corrects them.

    scheduled, output: its SchedulerOutput and ModelRunnerOutput. block_sizes: tokens a
        block of each KV-cache group that is slot based.
    """
    found: list[Pending] = []
    of_step = getattr(scheduled, "nwor_weights", None) or Weights()
    versions: KvVersions | None = getattr(scheduler, "nwor_versions", None)
    ids, drafts = output.sampled_token_ids, scheduled.scheduled_spec_decode_tokens
    for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
        request = scheduler.requests.get(request_id)
        # Stale: scheduled before a preemption that is over (the second name is vLLM
        # 0.26's). While it is preempted, start is below 0: fewer tokens are computed
        # than are in flight.
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
        prefix = versions.found(request_id, start) if versions else ()
        commit = Commit(request_id, start, end, num_rejected, blocks, of_step, prefix)
        found.append((request, request.num_tokens, commit))
    return found


def publish(
    found: Sequence[Pending], engine_outputs: Any, block_sizes: Mapping[int, int]
) -> None:
    """Calls the callbacks, after vLLM has processed the output; does not raise their
    exceptions.

    engine_outputs: the result of update_from_output: EngineCoreOutputs by client.
    """
    # Of requests, and of turns of a streaming session, that ended in this step.
    ended = {
        output.request_id: output.new_token_ids
        for of_client in engine_outputs.values()
        for output in of_client.outputs
        if output.finish_reason is not None
    }
    committed = []
    for request, num_tokens, commit in found:
        end, first = commit.end, commit.start
        if new := ended.get(commit.request_id):
            # It may have stopped within the accepted drafts. The Request no longer has
            # that: vLLM 0.33 subtracts them from num_computed_tokens, and it may hold
            # a session's next turn already.
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
        committed.append(commit)
    if committed:
        for registration in tuple(commits.registered):
            registration.call(committed)


def _schedule(wrapped: Wrapped, scheduler: Any, args: Any, kwargs: Any) -> Any:
    loads: FollowedLoads | None = getattr(scheduler, "nwor_loads", None)
    if loads is None:
        loads = scheduler.nwor_loads = _loads_of(scheduler)
    # Their loads took steps, and failed.
    failed = set(getattr(scheduler, "failed_recving_kv_req_ids", ()))
    is_running = bool(getattr(scheduler, "running", ()))
    output = wrapped(*args, **kwargs)
    output.nwor_weights, changes = weights.of_step(scheduler, is_running, output)
    if changes and NworConfig.from_env().emit_metrics:
        stats = getattr(scheduler, "nwor_stats", None) or _new_stats(scheduler)
        stats.count(WEIGHT_CHANGES, Counter(changes))
    try:
        _inform_workers(scheduler, output, loads, failed)
    except Exception as error:
        # The workers treat the new requests of this step as unknown.
        output.nwor_audit = output.nwor_loads = None
        report_failure("audit: new requests of failed steps are unverified", error)
    try:
        if not hasattr(scheduler, "nwor_versions"):
            is_on = weights.are_followed(scheduler)
            is_on = is_on and NworConfig.from_env().emit_metrics
            scheduler.nwor_versions = KvVersions(scheduler) if is_on else None
        versions: KvVersions | None = scheduler.nwor_versions
        if versions is not None:
            stats = getattr(scheduler, "nwor_stats", None) or _new_stats(scheduler)
            found = versions.scheduled(output, output.nwor_weights)
            stats.count(VERSIONS, found)
    except Exception as error:
        _versions_failed(scheduler, error)
    return output


def _connector_finished(
    wrapped: Wrapped, scheduler: Any, args: Any, kwargs: Any
) -> Any:
    """Adds the digests of the request's blocks to its kv_transfer_params, if the
    connector returns some."""
    found = wrapped(*args, **kwargs)
    try:
        given = getattr(scheduler, "nwor_given", None)
        request = argument(CONNECTOR_FINISHED, "request", args, kwargs)
        sent = given.pop(request.request_id, None) if given else None
        if sent is not None:
            is_delayed, params = found
            if params is not None:
                return is_delayed, {**params, DIGESTS: sent}
            log_once(
                "audit: digests of a prefilled request",
                "its KV connector returned no kv_transfer_params; they need some to "
                "travel with",
            )
    except Exception as error:
        report_failure("audit: digests of prefilled requests are not sent", error)
    return found


def _versions_failed(scheduler: Any, error: Exception) -> None:
    """Call while `error` is handled."""
    scheduler.nwor_versions = None
    report_failure("audit: versions of KV are no longer followed", error)


def _loads_of(scheduler: Any) -> FollowedLoads:
    """Replaces two methods of its connector, if it has one."""
    connector = getattr(scheduler, "connector", None)
    found = FollowedLoads()
    try:
        if connector is not None:
            manager = scheduler.kv_cache_manager.coordinator
            sizes = [one.block_size for one in manager.single_type_managers]
            found.follow(connector, sizes)
    except Exception as error:
        found.lose(error)
    return found


def _inform_workers(
    scheduler: Any, output: Any, loads: FollowedLoads, failed: set[str]
) -> None:
    """Attaches the request data for the workers to the step's SchedulerOutput."""
    cached = output.scheduled_cached_reqs
    loads.ended(output.finished_req_ids)
    seated = [
        (new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs
    ]
    if resumed := cached.resumed_req_ids:
        rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        seated += [row for row in rows if row[0] in resumed]
    if seated:
        output.nwor_audit = {
            name: (
                getattr(scheduler.requests.get(name), "cache_salt", None),
                loads.num_local(name, num_computed, name in failed),
            )
            for name, num_computed in seated
        }
    found = loads.take()
    if found != NO_LOADS:
        output.nwor_loads = found and tuple(found)


def _failed(what: str, error: Exception, stats: NworStats) -> None:
    """Counts a breach of kind `what`, or raises `error` again under
    VLLM_NWOR_STRICT=always. Call while `error` is handled."""
    if NworConfig.from_env().strict_steps:
        raise error
    stats.breach(what, repr(error))
