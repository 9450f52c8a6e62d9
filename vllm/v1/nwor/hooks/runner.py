# SPDX-License-Identifier: Apache-2.0
"""Shared by the hooks of both model runners: a runner's observers, start-up, and the
start and the output of a step.

Device memory for observers is allocated where vLLM's memory accounting sees it: on CUDA
during `profile_run`, before the KV cache is sized; on the CPU, where an eager engine
never profiles, when the caches are bound.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ..base.errors import error_text
from ..base.wrap import HookTarget, HostMismatch, Wrapped, Wrapper, install_all
from ..config import Mode, NworConfig
from ..layout.caches import ExpectedCaches, RunnerCaches
from ..step import Observer, Step
from . import caches, connectors, outputs, states, weights
from .ledger import V1_COMMON
from .scheduled import ScheduledStep

logger = logging.getLogger("vllm.v1.nwor")


class Builder(Protocol):
    """Makes an observer of a model runner. (The modules transaction.build and
    audit.build are two.)"""

    NAME: str

    def is_wanted(self, config: NworConfig) -> bool: ...

    def reserved_bytes(self, expected: ExpectedCaches, config: NworConfig) -> int:
        """Device memory that it will need. Raises any exception if it needs none."""

    def build(
        self, caches: RunnerCaches, config: NworConfig, storage: torch.Tensor | None
    ) -> Observer | None:
        """Called when the KV caches are bound. storage: [reserved_bytes] uint8, or
        None."""

    def refused(
        self, num_groups: int, config: NworConfig, reason: str, is_logged: bool
    ) -> Observer | None:
        """Called where the runner is not as expected. is_logged: the log says so."""


# Of this process, from the outermost observer to the innermost (step.py).
_builders: list[Builder] = []

# Model runners of this process whose caches are bound.
bound_runners: WeakSet[Any] = WeakSet()

# Moments that are called from the outermost observer to the innermost, and from the
# innermost to the outermost.
INWARDS = ("step_started", "tables_final", "before_forward", "metadata_final")
OUTWARDS = (
    *("sampled", "drafts_missed", "payload", "output_ready", "step_failed"),
    *("blocks_transferred", "caches_lost", "hooks_failed", "shut_down"),
)


Calls = tuple[Callable[..., Any], ...]


class RunnerState:
    """What the hooks keep on a model runner, as its attribute `nwor_state`.

    observers: from the outermost to the innermost. Any thread may remove one.
    step: the step being made, None if no observer needs it.
    every_step: whether steps without drafts need a Step. Moments are tuples of calls.
    """

    step_started: Calls
    step_failed: Calls
    payload: Calls
    output_ready: Calls
    blocks_transferred: Calls
    caches_lost: Calls
    hooks_failed: Calls
    shut_down: Calls

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.step: Step | None = None
        self.every_step = False
        # Kept alive: kernels in flight may still write to their pinned memory.
        self.removed: list[Observer] = []
        self._set(observers)
        for observer in observers:
            observer.leave = partial(self.remove, observer)

    def _set(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)
        for moments, order in ((INWARDS, observers), (OUTWARDS, [*observers][::-1])):
            for moment in moments:
                calls = (getattr(observer, moment) for observer in order)
                setattr(self, moment, tuple(filter(None, calls)))
        self.every_step = any(observer.every_step for observer in observers)

    def refresh(self) -> None:
        """Call after a moment of an observer was replaced (benches, tests)."""
        self._set(self.observers)

    def remove(self, observer: Observer) -> None:
        if observer in self.observers:
            self.removed.append(observer)
            self._set([other for other in self.observers if other is not observer])

    def named(self, name: str) -> Any:
        """The observer of that name, or None."""
        found = (observer for observer in self.observers if observer.name == name)
        return next(found, None)


def state_of(runner: Any) -> RunnerState | None:
    """None before the caches are bound, and for a runner without hooks."""
    state: RunnerState | None = getattr(runner, "__dict__", {}).get("nwor_state")
    return state


def infos_of(runner: Any) -> list[tuple[Any, ...]]:
    """Rows of vllm:nwor_info, as plain data."""
    state = state_of(runner)
    observers = () if state is None else state.observers
    return [tuple(info) for observer in observers for info in observer.infos]


def install(
    module: ModuleType,
    wrappers: Mapping[HookTarget, Wrapper],
    builders: Sequence[Builder],
) -> None:
    """Wraps a model runner in `module`. If the runner is not as expected, but the
    function that returns a step's output is, its outputs still report to the front end
    that NWOR was refused.

    Raises:
        HostMismatch: the runner is not as expected; nothing of a step was wrapped.
    """
    _builders[:] = builders
    try:
        install_all(module, wrappers)
    except HostMismatch as mismatch:
        config = NworConfig.from_env()
        if config.mode is not Mode.OFF:
            # If that function differs, too, the refusal is only in the log.
            report_refusal = partial(_sample_tokens_refused, config, str(mismatch))
            (last,) = (
                row for row in wrappers if row.qualname.endswith("sample_tokens")
            )
            with contextlib.suppress(HostMismatch):
                install_all(module, {last: report_refusal})
        raise


def _sample_tokens_refused(
    config: NworConfig,
    reason: str,
    wrapped: Wrapped,
    runner: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """sample_tokens, on a runner without any other hook."""
    if state_of(runner) is None:
        runner.nwor_state = _refused(runner, config, reason, True)
    return sample_tokens(wrapped, runner, args, kwargs)


def _refused(
    runner: Any, config: NworConfig, reason: str, is_logged: bool = False
) -> RunnerState:
    """The state of a runner that was refused: its observers only report that. A runner
    without the expected attributes counts as one KV-cache group."""
    kv_cache_config = getattr(runner, "kv_cache_config", None)
    num_groups = len(getattr(kv_cache_config, "kv_cache_groups", [None]))
    refused = (
        builder.refused(num_groups, config, reason, is_logged)
        for builder in _builders
        if builder.is_wanted(config)
    )
    return RunnerState([observer for observer in refused if observer is not None])


def common(
    rows: Sequence[HookTarget], reuses_metadata: bool
) -> dict[HookTarget, Wrapper]:
    """Wrappers for the rows of the ledger that both runners have.

    reuses_metadata: as staging.mark_layers.
    """
    wrappers: list[Wrapper] = [
        partial(get_kv_cache_spec, reuses_metadata=reuses_metadata),
        *(initialize_kv_cache, profile_run, execute_model, sample_tokens),
    ]
    assert len(rows) == len(V1_COMMON)
    return dict(zip(rows, wrappers, strict=True))


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
    """Wrapper: reserves device memory for observers while vLLM measures how much memory
    the KV cache can have."""
    config = NworConfig.from_env()
    if runner.device.type != "cpu":
        # Frees the memory of an earlier run first.
        runner.nwor_storages = {}
        for builder in _builders:
            if builder.is_wanted(config):
                runner.nwor_storages[builder.NAME] = reserve(runner, config, builder)
    return wrapped(*args, **kwargs)


def reserve(runner: Any, config: NworConfig, builder: Builder) -> torch.Tensor | None:
    """[reserved_bytes] uint8 on the runner's device, before vLLM sizes the KV cache.
    None if none is needed, or there is not enough: the builder then allocates when the
    caches are bound, and reports a failure. Raises nothing."""
    try:
        size = builder.reserved_bytes(caches.expected(runner), config)
        return torch.empty(size, dtype=torch.uint8, device=runner.device)
    except Exception as error:
        text = "NWOR: no memory reserved for the %s: %s"
        logger.debug(text, builder.NAME, error_text(error))
        return None


def initialize_kv_cache(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: builds the observers once the real caches are bound. vLLM also calls
    this with a temporary cache while profiling, which is skipped."""
    runner.nwor_state = None
    result = wrapped(*args, **kwargs)
    if not kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
        runner.nwor_state = _observed(runner, NworConfig.from_env())
        bound_runners.add(runner)
    return result


def _observed(runner: Any, config: NworConfig) -> RunnerState:
    """Raises whatever a builder raises (NworError under VLLM_NWOR_STRICT)."""
    storages = runner.__dict__.setdefault("nwor_storages", {})
    try:
        found = caches.bound(runner)
    except Exception as error:
        storages.clear()
        reason = f"vLLM is not as expected: {error_text(error)}"
        return _refused(runner, config, reason)
    observers = []
    for builder in _builders:
        if builder.is_wanted(config):
            observer = builder.build(found, config, storages.get(builder.NAME))
            # Frees memory that the observer does not use.
            storages[builder.NAME] = getattr(observer, "storage", None)
            if observer is not None:
                observers.append(observer)
    state = RunnerState(observers)
    for observer in observers:
        if observer.weights_watched and (words := weights.watch(runner)) is not None:
            observer.weights_watched(words)
    if state.blocks_transferred:
        connectors.watch(runner)
    states.watch(runner, state)
    return state


def execute_model(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: a step starts."""
    state: RunnerState | None = runner.__dict__.get("nwor_state")
    if state is None:
        return wrapped(*args, **kwargs)
    state.step = None
    for observer in state.removed:
        if observer.settle:
            observer.settle()
    scheduled = args[0] if args else kwargs["scheduler_output"]
    if calls := state.step_started:
        of_step = ScheduledStep(scheduled)
        for step_started in calls:
            step_started(of_step)
    if state.blocks_transferred:
        connectors.report_stores(runner, state, scheduled)
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        for step_failed in state.step_failed:
            step_failed()
        raise


def sample_tokens(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper: the step's output carries its counts. Findings of the audit leave with
    it, or keep it from leaving."""
    state: RunnerState | None = runner.__dict__.get("nwor_state")
    if state is None:
        return wrapped(*args, **kwargs)
    try:
        output = wrapped(*args, **kwargs)
    except BaseException:
        for step_failed in state.step_failed:
            step_failed()
        raise
    if calls := state.payload:
        outputs.attach(output, calls)
    if calls := state.output_ready:
        outputs.watch(output, calls, state.hooks_failed)
    return output
