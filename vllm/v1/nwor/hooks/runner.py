# SPDX-License-Identifier: Apache-2.0
"""What the hooks of both model runners share: a runner's state, start-up, the output.

The undo log is allocated where vLLM's memory accounting sees it: on CUDA during
`profile_run`, before the KV cache is sized; on the CPU, where an eager engine never
profiles, when the caches are bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from ..config import AuditMode, Mode, NworConfig
from ..draft_manager import DraftCommitManager, NworError, State
from ..hooks import stats
from ..metrics import STEP_FAILED, GroupInfo
from ..report import Report
from ..shadow_blocks import Seats
from ..window import VerificationWindows
from ._wrap import HookTarget, HostMismatch, Wrapped, Wrapper, install_all


def common(
    rows: Sequence[HookTarget], *, reuses_metadata: bool
) -> dict[HookTarget, Wrapper]:
    """The wrappers that both runners have. rows: V1_COMMON or V2_COMMON.
    reuses_metadata: as staging.mark_layers."""
    wrappers = (
        partial(get_kv_cache_spec, reuses_metadata=reuses_metadata),
        initialize_kv_cache,
        profile_run,
        execute_model,
        sample_tokens,
    )
    return dict(zip(rows, wrappers, strict=True))


@dataclass(eq=False)
class RunnerState:
    """What NWOR keeps on a runner, as its attribute `nwor_state`.

    manager: None if nothing is protected. infos: what became of each KV-cache group.
    audit: the RunnerAudit, None if nothing is audited; the runner's attribute
        `nwor_audit`, too. Any thread that runs the audit may set it to None.
    emits: whether outputs carry counts (VLLM_NWOR_EMIT_METRICS); those of `report`.
    seats: of the manager's shadow blocks.
    windows: those of the step being prepared (V1), None outside of it.
    """

    manager: DraftCommitManager | None
    infos: list[GroupInfo]
    emits: bool = True
    windows: VerificationWindows | None = None
    audit: Any = None
    seats: Seats | None = field(init=False)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        shadow = None if self.manager is None else self.manager.shadow
        self.seats = None if shadow is None else shadow.seats
        self.report = Report(self.infos, self.manager)


def all_refused(runner: Any, mode: Mode, reason: str) -> list[GroupInfo]:
    """What became of the KV-cache groups of a runner of which none was looked at. One
    is told of where the runner does not have them as expected."""
    config = getattr(runner, "kv_cache_config", None)
    groups = range(len(getattr(config, "kv_cache_groups", [None])))
    return [GroupInfo(gid, mode.value, Mode.OFF.value, reason) for gid in groups]


def install(module: ModuleType, ledger: Mapping[HookTarget, Wrapper]) -> None:
    """Wraps a model runner in `module`. If it is not as expected, but what gives out a
    step's output is, its outputs still report to the front end that NWOR was refused.

    Raises:
        HostMismatch: the runner is not as expected; nothing of a step was wrapped.
    """
    try:
        install_all(module, ledger)
    except HostMismatch as mismatch:
        mode = NworConfig.from_env().mode
        if mode is not Mode.OFF:
            # Without that target only the log says so, as it does in any case.
            teller = partial(_sample_tokens_refused, mode, str(mismatch))
            (last,) = (row for row in ledger if row.qualname.endswith("sample_tokens"))
            with contextlib.suppress(HostMismatch):
                install_all(module, {last: teller})
        raise


def _sample_tokens_refused(
    mode: Mode, reason: str, wrapped: Wrapped, runner: Any, args: Any, kwargs: Any
) -> Any:
    """sample_tokens, on a runner without any other hook."""
    if "nwor_state" not in vars(runner):
        runner.nwor_state = RunnerState(None, all_refused(runner, mode, reason))
    return sample_tokens(wrapped, runner, args, kwargs)


def initialize_kv_cache(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: builds manager and audit once the real caches are bound. vLLM also calls
    this with a throw-away cache while profiling; that one is left alone."""
    runner.nwor_state = runner.nwor_audit = None
    result = wrapped(*args, **kwargs)
    config = NworConfig.from_env()
    if kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
        return result
    if config.mode is not Mode.OFF:
        from .discovery import build

        storage = runner.__dict__.get("nwor_log_storage")
        built = build(runner, config, storage)
        state = RunnerState(*built, config.emit_metrics)
        if state.manager is None:
            runner.nwor_log_storage = None
        runner.nwor_state = state
    if config.audit is not AuditMode.OFF:
        from ..audit.runner import start

        audit = start(runner, config)
        if audit is not None:
            unprotected = RunnerState(None, [], emits=False)
            runner.nwor_state = runner.nwor_state or unprotected
            runner.nwor_state.audit = runner.nwor_audit = audit
    return result


def get_kv_cache_spec(
    wrapped: Wrapped, runner: Any, args: Any, kwargs: Any, reuses_metadata: bool
) -> Any:
    """Wrapper: layers that cannot be staged are reported to the engine core, on their
    specs."""
    specs = wrapped(*args, **kwargs)
    if NworConfig.from_env().mode is Mode.STAGE:
        from .staging import mark_layers

        mark_layers(runner, specs, reuses_metadata)
    return specs


def profile_run(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: reserves the memory of undo log and audit while vLLM measures what is
    left for the KV cache."""
    config = NworConfig.from_env()
    if runner.device.type != "cpu":
        from .discovery import reserve

        # That of an earlier run goes first.
        runner.nwor_log_storage = runner.nwor_audit_storage = None
        if config.audit is not AuditMode.OFF:
            from ..audit.startup import reserved_bytes

            runner.nwor_audit_storage = reserve(runner, config, reserved_bytes)
        if config.mode is not Mode.OFF:
            runner.nwor_log_storage = reserve(runner, config)
    return wrapped(*args, **kwargs)


def execute_model(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: what a step left that failed half-way is dropped: its windows, a log
    that it did not commit, counts that no output took along. Where this step fails,
    block tables are put back at once: their rows may move before the next one. The
    audit hears what the scheduler says of requests and blocks."""
    state = runner.__dict__.get("nwor_state")
    if state is None:
        return wrapped(*args, **kwargs)
    scheduled = args[0] if args else kwargs["scheduler_output"]
    # Read once: vLLM's output thread may end the audit at any moment.
    if (audit := state.audit) is not None:
        audit.begin_step(runner, scheduled)
    manager = state.manager
    if manager is None:
        return wrapped(*args, **kwargs)
    state.windows = None
    manager.start_step(manager.shadow is None or not _have_drafts(scheduled))
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        _put_back(manager)
        raise


def _have_drafts(scheduler_output: Any) -> bool:
    """Whether a request that is new or comes back has drafts in this step: vLLM pads
    those that have one token left. The rows before may be a copy of another request's
    block, made for it in this very step, in a block and a seat that it got just now."""
    new = scheduler_output.scheduled_new_reqs
    resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
    if not (new or resumed):
        return False
    names = {*resumed, *(request.req_id for request in new)}
    return not names.isdisjoint(scheduler_output.scheduled_spec_decode_tokens)


def _put_back(manager: DraftCommitManager) -> None:
    """Staged windows do not outlive an exception in their step, which is the one to
    report."""
    if manager.state is State.STAGED:
        with contextlib.suppress(NworError):
            manager.abort(STEP_FAILED)


def sample_tokens(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: the step's output carries its counts; findings of the audit leave with
    it, or keep it from leaving."""
    state: RunnerState | None = runner.__dict__.get("nwor_state")
    try:
        output = wrapped(*args, **kwargs)
    except BaseException:
        if state is not None and state.manager is not None:
            _put_back(state.manager)
        raise
    if state is not None:
        if state.emits:
            stats.attach(output, state.report.take_payload)
        if (audit := state.audit) is not None:
            return audit.attach(runner, output)
    return output
