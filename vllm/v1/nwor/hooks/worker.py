# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's worker: when its caches lose their content, and when it ends."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..base.wrap import Wrapped, argument, install_all
from .ledger import SHUTDOWN, WAKE_UP
from .runner import state_of


def install(module: ModuleType) -> None:
    """Wraps the worker in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, WRAPPERS)


def _wake_up(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tags = argument(WAKE_UP, "tags", args, kwargs)
    state = state_of(getattr(worker, "model_runner", None))
    if state is not None and (tags is None or "kv_cache" in tags):
        for caches_lost in state.caches_lost:
            caches_lost()
    return result


def _shutdown(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    state = state_of(getattr(worker, "model_runner", None))
    if state is not None:
        for shut_down in state.shut_down:
            shut_down()
    return wrapped(*args, **kwargs)


WRAPPERS = {WAKE_UP: _wake_up, SHUTDOWN: _shutdown}
