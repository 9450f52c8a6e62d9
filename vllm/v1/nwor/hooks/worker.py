# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's worker and its allocator of sleep mode: when the caches lose their
content, and when the worker ends."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..base.wrap import Wrapped, argument, install_all
from .layers import sleeps
from .ledger import ALLOCATOR_WAKE_UP, SHUTDOWN, WAKE_UP
from .runner import bound_runners, state_of

# vLLM's tag of the memory of the KV caches.
KV_CACHE = "kv_cache"


def install(module: ModuleType) -> None:
    """Wraps the worker or the allocator in `module`. Raises HostMismatch if it is not
    as expected."""
    install_all(module, WRAPPERS)


def _wake_up(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tags = argument(WAKE_UP, "tags", args, kwargs)
    if tags is None or KV_CACHE in tags:
        _call(getattr(worker, "model_runner", None), "caches_lost")
    return result


def _allocator_wake_up(wrapped: Wrapped, allocator: Any, args: Any, kwargs: Any) -> Any:
    """The process has one allocator. What a sleep did not copy to the host is lost."""
    sleepers = list(filter(sleeps, list(bound_runners)))
    dropped = []
    try:
        found = [of for of in allocator.pointer_to_data.values() if of.tag == KV_CACHE]
        dropped = [of for of in found if of.is_asleep and of.cpu_backup_tensor is None]
    except Exception:
        for runner in sleepers:
            _call(runner, "hooks_failed")
    result = wrapped(*args, **kwargs)
    if not all(of.is_asleep for of in dropped):
        for runner in sleepers:
            _call(runner, "caches_lost")
    return result


def _call(runner: Any, moment: str) -> None:
    state = state_of(runner)
    for call in () if state is None else getattr(state, moment):
        call()


def _shutdown(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    _call(getattr(worker, "model_runner", None), "shut_down")
    return wrapped(*args, **kwargs)


WRAPPERS = {
    WAKE_UP: _wake_up,
    ALLOCATOR_WAKE_UP: _allocator_wake_up,
    SHUTDOWN: _shutdown,
}
