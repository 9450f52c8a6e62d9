# SPDX-License-Identifier: Apache-2.0
"""What the audit's hooks of both model runners share.

A failure of the audit ends the audit, with one line, and never the engine
(VLLM_NWOR_STRICT=always raises).
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ..config import AuditMode, NworConfig, OnReject
from ..draft_manager import NworError, State
from ..hooks._wrap import HookTarget, Wrapped, Wrapper, argument, install_all
from ..report import NOTHING
from ..window import Acceptance
from . import offloading, startup
from .findings import AuditError, Findings
from .state import Audit, Scheduled

logger = logging.getLogger("vllm.v1.nwor")

WAKE_UP = HookTarget(
    "vllm.v1.worker.gpu_worker",
    "Worker.wake_up",
    ("self", "tags"),
    why="audit: the caches' content is another one",
    delete_when="vLLM tells plugins that a KV cache lost its content",
    layer=1,
)
LEDGER = (WAKE_UP,)

# At most so long the steps in which nothing was found are told together.
TELLING_SECONDS = 1.0


class RunnerAudit:
    """What the audit keeps on a runner, as its attribute `nwor_audit`."""

    def __init__(self, audit: Audit, config: NworConfig, path: str) -> None:
        """path: as Findings."""
        self.audit = audit
        self.findings = Findings(path)
        self.raises = config.audit is AuditMode.RAISE
        self.strict = config.strict_steps
        # What no output has taken along yet, and when one took something.
        self.untold: Counter[str] = Counter()
        self.told_at = 0.0
        # Of requests: what seeds their texts' identity, and whether those are opaque.
        self.about: dict[str, tuple[int, bool]] = {}

    def restart(self, budget_bytes: int) -> None:
        """As Audit.restart."""
        self.audit.restart(budget_bytes)
        self.about.clear()


def install(module: ModuleType) -> None:
    """Wraps the worker in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, {WAKE_UP: _wake_up})


def over(target: HookTarget, why: str, **others: Any) -> HookTarget:
    """The audit's row for what a hook of NWOR's wraps; its wrapper lies over that."""
    return replace(target, why=f"audit: {why}", **{"layer": 1} | others)


def wrappers(rows: ModuleType, sample: Wrapper) -> dict[HookTarget, Wrapper]:
    """What the audit wraps on either runner, by NWOR's rows of that one."""
    handed_out = "which blocks were handed out to which requests"
    hears = "vLLM tells plugins of blocks that it hands out"
    taken = "its memory is taken while vLLM measures what is left"
    kept = "what is kept is known, and the drafter has not run"
    leaves = "findings leave with the step's output, or keep it from leaving"
    return {
        over(rows.INITIALIZE, "the caches are bound here"): initialize_kv_cache,
        over(rows.PROFILE, taken): profile_run,
        over(rows.EXECUTE, handed_out, delete_when=hears): execute_model,
        over(rows.SAMPLE, kept): sample,
        over(rows.OUTPUT, leaves): sample_tokens,
    }


def audit_of(runner: Any) -> RunnerAudit | None:
    """What `initialize_kv_cache` left on a runner; None if nothing is audited."""
    found: RunnerAudit | None = runner.__dict__.get("nwor_audit")
    return found


def guarded(runner: Any, run: Callable[[RunnerAudit], None]) -> None:
    """Runs a part of a step, if there is an audit; what fails ends it."""
    state = audit_of(runner)
    if state is None:
        return
    try:
        run(state)
    except AuditError:
        raise
    except Exception:
        if state.strict:
            raise
        runner.nwor_audit = None
        logger.exception("NWOR audit: off from here on, because it failed")


def initialize_kv_cache(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: builds the audit once the real caches are bound. vLLM also calls this
    with a throw-away cache while profiling."""
    runner.nwor_audit = None
    result = wrapped(*args, **kwargs)
    config = NworConfig.from_env()
    is_profiling = kwargs.get("is_profiling", args[1] if len(args) > 1 else False)
    if config.audit is AuditMode.OFF or is_profiling:
        return result
    audit = startup.build(runner, config)
    if isinstance(audit, Audit):
        path = startup.path_of(runner, config)
        runner.nwor_audit = RunnerAudit(audit, config, path)
        offloading.watch(runner, hand_on)
        return result
    runner.nwor_audit_storage = None
    if config.strict:
        raise NworError(f"NWOR audit requested, refused: {audit}")
    logger.warning("NWOR audit: off: %s", audit)
    return result


def profile_run(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: takes the audit's memory while vLLM measures what is left."""
    config = NworConfig.from_env()
    if config.audit is not AuditMode.OFF and runner.device.type != "cpu":
        runner.nwor_audit_storage = None  # that of an earlier run goes first
        runner.nwor_audit_storage = startup.reserve(runner, config)
    return wrapped(*args, **kwargs)


def execute_model(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: what the scheduler says of requests and blocks."""
    scheduled = args[0] if args else kwargs["scheduler_output"]
    guarded(runner, lambda state: _begin_step(state, scheduled))
    return wrapped(*args, **kwargs)


def _begin_step(state: RunnerAudit, scheduled: Any) -> None:
    finished = scheduled.finished_req_ids
    for name in finished:
        state.about.pop(name, None)
    known = getattr(scheduled, "nwor_audit", {})
    new, grown, local = [], [], {}
    for request in scheduled.scheduled_new_reqs:
        name = request.req_id
        new.append((name, request.num_computed_tokens, request.block_ids))
        salt, num_local = known.get(name, (None, None))
        state.about[name] = _about(request, salt)
        if num_local is not None:
            local[name] = num_local
    cached = scheduled.scheduled_cached_reqs
    for name, num_computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if name in cached.resumed_req_ids:
            new.append((name, num_computed, blocks))
        elif blocks is not None:
            grown.append((name, blocks))
    copied = getattr(scheduled, "kv_cache_block_copies", None) or ()
    zeroed = getattr(scheduled, "new_block_ids_to_zero", None) or ()
    has_drafts = bool(scheduled.scheduled_spec_decode_tokens)
    state.audit.begin_step(
        Scheduled(finished, new, grown, copied, zeroed, local, has_drafts)
    )


def _about(request: Any, salt: str | None) -> tuple[int, bool]:
    lora = getattr(request, "lora_request", None)
    # As vLLM's prefix cache tells texts of the same tokens apart.
    other = (lora.lora_name if lora is not None else None, salt or None)
    return (
        zlib.crc32(repr(other).encode()) + 1 if any(other) else 0,
        bool(request.mm_features) or request.prompt_embeds is not None,
    )


# What a runner's sampler was given and returned -> cu_num_logits and acceptance.
Kept = Callable[[Any, Any, Any, Any], tuple[torch.Tensor | None, Acceptance | None]]


def sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any, kept: Kept) -> Any:
    """Wrapper: the end of a step, behind NWOR's commit."""
    manager: Any = getattr(runner.__dict__.get("nwor_state"), "manager", None)
    was_open = manager is not None and manager.is_open
    result = wrapped(*args, **kwargs)

    def resolve(state: RunnerAudit) -> None:
        if state.audit.is_open:
            is_undone = (
                was_open
                and manager.state is State.IDLE
                and manager.config.on_reject is OnReject.RESTORE
            )
            found = kept(runner, result, args, kwargs)
            state.audit.resolve(*found, is_undone)

    guarded(runner, resolve)
    return result


def sample_tokens(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: findings leave with the step's output, or keep it from leaving. An
    asynchronous output has them when vLLM reads it."""
    output = wrapped(*args, **kwargs)
    if audit_of(runner) is None:
        return output

    def told(found: Any) -> Any:
        guarded(runner, lambda state: _tell(state, found))
        return found

    get_output = getattr(output, "get_output", None)
    if get_output is None:
        return told(output)
    output.get_output = lambda: told(get_output())
    return output


def _tell(state: RunnerAudit, output: Any) -> None:
    """Logs what a step found, and has its output carry the numbers.

    Raises:
        AuditError: under VLLM_NWOR_AUDIT=raise, if something was found.
    """
    found = state.audit.outbox.take(waits=True)
    state.untold["steps"] += found.num_steps
    state.untold["unverified"] += found.num_unverified
    if found.findings:
        state.untold.update(finding.kind for finding in found.findings)
        state.findings.add(found.findings, found.num_lost)
        if state.raises:
            first = found.findings[0].line()
            raise AuditError(f"{len(found.findings)} findings, the first: {first}")
    now = time.monotonic()
    is_due = found.findings or now >= state.told_at + TELLING_SECONDS
    if is_due and getattr(output, "req_ids", None):
        payload = getattr(output, "nwor_stats", NOTHING)
        output.nwor_stats = payload.with_audit(dict(state.untold))
        state.untold = Counter()
        state.told_at = now


def hand_on(runner: Any, read: Callable[[], Any], fills: bool) -> None:
    """A Watcher (offloading.py): a KV connector is about to read or fill blocks."""

    def tell_audit(state: RunnerAudit) -> None:
        blocks, places = read()
        state.audit.hand_on(blocks, fills, places)

    guarded(runner, tell_audit)


def _wake_up(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tags = argument(WAKE_UP, "tags", args, kwargs)
    runner = getattr(worker, "model_runner", None)
    if runner is not None and (tags is None or "kv_cache" in tags):
        guarded(runner, lambda state: state.audit.forget_cache())
    return result
