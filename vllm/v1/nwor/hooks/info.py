# SPDX-License-Identifier: Apache-2.0
"""The rows of vllm:nwor_info reach the front end when an engine has started, before
its first request.

    engine core  once the KV caches are bound: one call to the workers for what became
                 of each KV-cache group; the message that the engine is ready carries it
    front end    keeps it until its metrics are created, which is later

A front end without NWOR ignores the field. Afterwards a step's report carries the rows
too (`scheduler`), which also covers what this file cannot: a runner whose hooks were
refused. A failure here is logged, and the rows come with the first step.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import metrics
from ..base.errors import report_failure
from ..base.wrap import HostMismatch, argument, extend, install_all
from ..config import AuditMode, Mode, NworConfig
from . import engine_core, weights
from .ledger import ENGINE_CORE, INITIALIZE_KV_CACHES, READY_RESPONSE
from .runner import infos_of

logger = logging.getLogger("vllm.v1.nwor")

ENGINE = "vllm.v1.engine"
FIELD = "nwor_info"
NO_INFO = "no vllm:nwor_info before the first request"


def install(module: ModuleType) -> None:
    """Wraps the engine core, with what reserves shadow blocks, or its client, in
    `module`. Raises HostMismatch, for this file's functions only under
    VLLM_NWOR_STRICT: the rest of NWOR does not need them."""
    config = NworConfig.from_env()
    if module.__name__ == ENGINE_CORE:
        engine_core.install(module)
    try:
        if module.__name__ == ENGINE_CORE:
            _extend_response(import_module(ENGINE).EngineCoreReadyResponse)
        install_all(module, WRAPPERS)
    except (AttributeError, HostMismatch) as error:
        if config.strict:
            raise
        if config.mode is Mode.OFF or not config.emit_metrics:
            return
        text = "NWOR: vllm:nwor_info has no samples before the first request: %s"
        logger.warning(text, error)


def _extend_response(cls: Any) -> None:
    """Has each response carry what this process knows of its engines."""
    if FIELD in getattr(cls, "__dataclass_fields__", ()):
        return
    extend(cls, f"{ENGINE}.EngineCoreReadyResponse", FIELD)
    initialize = cls.__init__

    @functools.wraps(initialize)
    def with_info(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.nwor_info = metrics.known_info()

    cls.__init__ = with_info


def rows_of(worker: Any) -> list[tuple[Any, ...]]:
    """Runs in a worker: its rows of vllm:nwor_info, as plain data."""
    return infos_of(worker.model_runner)


def _initialize_kv_caches(wrapped: Any, core: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    try:
        config = NworConfig.from_env()
        if config.audit is not AuditMode.OFF:
            weights.watch_core(core)
        rows: list[tuple[Any, ...]] = []
        if config.mode is not Mode.OFF and config.emit_metrics:
            # All ranks have the same groups.
            rows, *_ = core.model_executor.collective_rpc(rows_of)
        # An engine core in the front end's process has no index, because it is the only
        # one. Its rows replace those of an earlier engine.
        metrics.keep_info(getattr(core, "engine_index", 0), rows)
    except Exception as error:
        report_failure(NO_INFO, error)
    return result


def _apply_ready_response(wrapped: Any, client: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    try:
        import msgspec

        if payload := argument(READY_RESPONSE, "payload", args, kwargs):
            found = msgspec.msgpack.decode(payload).get(FIELD) or {}
            for engine, rows in found.items():
                metrics.keep_info(int(engine), rows)
    except Exception as error:
        report_failure(NO_INFO, error)
    return result


WRAPPERS = {
    INITIALIZE_KV_CACHES: _initialize_kv_caches,
    READY_RESPONSE: _apply_ready_response,
}
