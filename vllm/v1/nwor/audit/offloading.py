# SPDX-License-Identifier: Apache-2.0
"""The audit's adapter for vLLM's OffloadingConnector: `handed_on`, `never_loaded`.

A store is submitted one step after it was decided, when that step has been resolved: so
every slot of its blocks must be committed by then. A block that is not is stored as it
is, and loaded into another request later. The blocks that a load fills are told apart
from those that were found in the cache; that they change is seen when a request takes
them over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

from ..hooks._wrap import HookTarget, argument, install_all, is_installed

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"

PREEMPTIONS = HookTarget(
    MODULE,
    "OffloadingConnector.handle_preemptions",
    ("self", "kv_connector_metadata"),
    why="audit: stores decided in the last step are submitted here, or below",
    delete_when="KV connectors tell which blocks they are about to read",
    layer=1,
)
LOADS = HookTarget(
    MODULE,
    "OffloadingConnector.start_load_kv",
    ("self", "forward_context"),
    why="audit: stores decided in the last step are submitted here",
    delete_when="KV connectors tell which blocks they are about to read",
    layer=1,
)
LEDGER = (PREEMPTIONS, LOADS)

NAME = "OffloadingConnector"

# Called with a runner, blocks by KV-cache group, and whether they are filled.
Watcher = Callable[[Any, list[list[int]], bool], None]
# Model runners of this process that are audited.
_audited: list[tuple[weakref.ref[Any], Watcher]] = []


def install(module: ModuleType) -> None:
    """Wraps the connector in `module`. Raises HostMismatch."""
    install_all(module, {PREEMPTIONS: _stores, LOADS: _stores_and_loads})


def tells() -> bool:
    """Whether `watch` will be told in this process."""
    return is_installed(LOADS)


def watch(runner: Any, watcher: Watcher) -> None:
    """Has `watcher` called for what this runner's connector will read or fill."""
    _audited[:] = [entry for entry in _audited if entry[0]() not in (None, runner)]
    _audited.append((weakref.ref(runner), watcher))


def _tell(connector: Any, specs: list[Any], fills: bool) -> None:
    for reference, watcher in _audited:
        runner = reference()
        # A process may have several engines, each with its own configuration.
        if runner is None or runner.vllm_config is not connector._vllm_config:
            continue
        for spec in specs:
            ends = [0, *accumulate(spec.group_sizes)]
            ids = list(map(int, spec.block_ids))
            watcher(runner, [ids[a:b] for a, b in pairwise(ends)], fills)


def _waiting(connector: Any) -> list[Any]:
    worker = connector.connector_worker
    return [source for _, source, _ in worker._unsubmitted_store_jobs]


def _stores(wrapped: Callable[..., Any], connector: Any, args: Any, kwargs: Any) -> Any:
    metadata = argument(PREEMPTIONS, "kv_connector_metadata", args, kwargs)
    flushed = [
        metadata.store_jobs[job].src_spec
        for job in metadata.jobs_to_flush or ()
        if job in metadata.store_jobs
    ]
    _tell(connector, _waiting(connector) + flushed, fills=False)
    return wrapped(*args, **kwargs)


def _stores_and_loads(
    wrapped: Callable[..., Any], connector: Any, args: Any, kwargs: Any
) -> Any:
    _tell(connector, _waiting(connector), fills=False)
    loads = connector._connector_metadata.load_jobs
    _tell(connector, [job.dst_spec for job in loads.values()], fills=True)
    return wrapped(*args, **kwargs)
