# SPDX-License-Identifier: Apache-2.0
"""The audit's adapter for vLLM's OffloadingConnector: `handed_on`.

A store is submitted one step after it was decided, when that step has been resolved: so
every slot of its blocks must be committed by then. A block that is not is stored as it
is, and loaded into another request later. (`never_loaded` needs no hook: a load that
changes nothing shows when a request takes its blocks over.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

from ..hooks._wrap import HookTarget, install_all

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"

PREEMPTIONS = HookTarget(
    MODULE,
    "OffloadingConnectorWorker.handle_preemptions",
    ("self", "kv_connector_metadata"),
    why="audit: stores decided in the last step are submitted here, or below",
    delete_when="KV connectors tell which blocks they are about to read",
    layer=1,
)
TRANSFERS = HookTarget(
    MODULE,
    "OffloadingConnectorWorker.start_kv_transfers",
    ("self", "metadata"),
    why="audit: stores decided in the last step are submitted here",
    delete_when="KV connectors tell which blocks they are about to read",
    layer=1,
)
LEDGER = (PREEMPTIONS, TRANSFERS)

# Model runners of this process that are audited, with what looks at blocks of theirs.
_audited: list[tuple[weakref.ref[Any], Callable[[Any, Any], None]]] = []


def install(module: ModuleType) -> None:
    """Wraps the connector's worker in `module`. Raises HostMismatch."""
    install_all(module, {PREEMPTIONS: _stores, TRANSFERS: _stores})


def watch(runner: Any, hand_on: Callable[[Any, Any], None]) -> None:
    """Has `hand_on(runner, blocks by group)` called for what this runner's connector is
    about to read."""
    _audited[:] = [entry for entry in _audited if entry[0]() is not None]
    _audited.append((weakref.ref(runner), hand_on))


def _stores(wrapped: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    for reference, hand_on in _audited:
        runner = reference()
        if runner is not None and runner.vllm_config is worker.vllm_config:
            metadata = args[0] if args else next(iter(kwargs.values()))
            for spec in _specs(worker, metadata):
                ends = [0, *accumulate(spec.group_sizes)]
                ids = list(map(int, spec.block_ids))
                hand_on(runner, [ids[a:b] for a, b in pairwise(ends)])
    return wrapped(*args, **kwargs)


def _specs(worker: Any, metadata: Any) -> list[Any]:
    """What the call is going to store: jobs that wait, and those that are flushed."""
    flushed = getattr(metadata, "jobs_to_flush", None) or ()
    jobs = getattr(metadata, "store_jobs", {})
    return [source for _, source, _ in worker._unsubmitted_store_jobs] + [
        jobs[job].src_spec for job in flushed if job in jobs
    ]
