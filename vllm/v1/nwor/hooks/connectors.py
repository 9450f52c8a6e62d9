# SPDX-License-Identifier: Apache-2.0
"""The adapter for vLLM's OffloadingConnector: which blocks it is about to read and fill
(Observer.blocks_transferred).

A store is submitted one step after it was decided, when that step has been sampled: so
every slot of its blocks must be committed by then. Stores are reported when the step
begins: what vLLM flushes then belongs to a request of that step, and V2's runner
submits it after the tables are final. Loads are reported before they are submitted.

Where the connector holds a block is known by the numbers in its transfers: those of
chunks of blocks, on the host. What was stored last to a place is what a load must bring
from there, unless others fill it, too: then nothing is known (`_places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any
from weakref import WeakSet

from ..base.wrap import Wrapped, install_all, is_installed
from ..step import Transfer
from .ledger import START_LOAD_KV

NAME = "OffloadingConnector"

Blocks = list[list[int]]  # by KV-cache group
# (the blocks of a transfer, the connector's chunks)
Transfers = Iterable[tuple[Any, Any]]
# Model runners of this process with observers that follow transfers.
_watched: WeakSet[Any] = WeakSet()


def install(module: ModuleType) -> None:
    """Wraps the connector in `module`. Raises HostMismatch."""
    install_all(module, {START_LOAD_KV: _start_load_kv})


def is_hooked() -> bool:
    """Whether observers of this process see what the connector reads and fills."""
    return is_installed(START_LOAD_KV)


def watch(runner: Any) -> None:
    """Reports to the observers of `runner` what its connector reads and fills."""
    _watched.add(runner)


def _places(connector: Any, blocks: Any, chunks: Any) -> Blocks | None:
    """Where a transfer finds or puts each of its blocks, by KV-cache group. None if
    such a place may be filled from elsewhere: another tier of storage, another rank.

    Four blocks a chunk, blocks 3 to 5 of a text in chunks 7 and 2: places 31, 8 and 9.
    """
    spec = connector.connector_worker.spec
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    is_shared = getattr(spec, "replicated_layout", False) or getattr(
        getattr(spec, "config", None), "canonical_layout", False
    )
    is_own = "CPUOffloadingSpec" in kinds and "TieringOffloadingSpec" not in kinds
    if is_shared or not is_own:
        return None
    size = spec.blocks_per_chunk
    # Chunks follow each other; a group begins with a chunk of its own.
    places = [int(chunk) * size + n for chunk in chunks.block_ids for n in range(size)]
    found, begin = [], 0
    for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
        start = begin + (first % size if count else 0)
        found.append(places[start : start + count])
        begin = -(-(start + count) // size) * size
    return found


def _report(
    runner: Any,
    state: Any,
    connector_of: Callable[[], Any],
    transfers_of: Callable[[Any], Transfers],
    fills: bool,
) -> None:
    """Reports a connector's transfers. If they cannot be read, calls the observers'
    hooks_failed."""
    try:
        connector = connector_of()
        # A process may have several engines, each with its own configuration.
        if connector is None or runner.vllm_config is not connector._vllm_config:
            return
        found = [
            Transfer(*read(runner.kv_cache_config, connector, *transfer), fills)
            for transfer in transfers_of(connector)
        ]
    except Exception:
        for hooks_failed in state.hooks_failed:
            hooks_failed()
        return
    for transfer in found:
        for blocks_transferred in state.blocks_transferred:
            blocks_transferred(transfer)


def read(
    kv_cache_config: Any, connector: Any, blocks: Any, chunks: Any
) -> tuple[Blocks, Blocks | None]:
    """A transfer's blocks, and where the connector holds them; None if other code may
    write there. Raises ValueError if its groups are not those that vLLM offloads."""
    ends = [0, *accumulate(blocks.group_sizes)]
    ids = list(map(int, blocks.block_ids))
    found = [ids[a:b] for a, b in pairwise(ends)]
    places = _places(connector, blocks, chunks)
    # Since vLLM 0.32 only some groups are offloaded.
    groups = range(len(kv_cache_config.kv_cache_groups))
    offloaded = getattr(kv_cache_config, "prefix_cacheable_group_ids", groups)
    if len(found) != len(offloaded):
        raise ValueError(
            f"a transfer of the {NAME} is of {len(found)} KV-cache groups; expected "
            f"{len(offloaded)}: {list(offloaded)}"
        )

    def of_all(of_offloaded: Blocks) -> Blocks:
        known = dict(zip(offloaded, of_offloaded, strict=True))
        return [known.get(group_id, []) for group_id in groups]

    return of_all(found), None if places is None else of_all(places)


def report_stores(runner: Any, state: Any, scheduled: Any) -> None:
    """Reports the stores that a step submits. scheduled: vLLM's SchedulerOutput. state:
    the runner's RunnerState."""

    def connector() -> Any:
        # vLLM warms up without a connector, and a dummy run (V2) has it off.
        if scheduled.kv_connector_metadata is None:
            return None
        from vllm.distributed import kv_transfer

        if kv_transfer.has_kv_transfer_group():
            return kv_transfer.get_kv_transfer_group()
        return None

    def stores(connector: Any) -> Transfers:
        metadata = scheduled.kv_connector_metadata
        waiting = connector.connector_worker._unsubmitted_store_jobs
        yield from ((source, to) for _, source, to in waiting)
        for job in map(metadata.store_jobs.get, metadata.jobs_to_flush or ()):
            if job is not None:
                yield job.src_spec, job.dst_spec

    _report(runner, state, connector, stores, fills=False)


def _start_load_kv(wrapped: Wrapped, connector: Any, args: Any, kwargs: Any) -> Any:
    def loads(connector: Any) -> Transfers:
        jobs = connector._connector_metadata.load_jobs.values()
        return ((job.dst_spec, job.src_spec) for job in jobs)

    for runner in list(_watched):
        state = runner.__dict__.get("nwor_state")
        if state is not None and state.blocks_transferred:
            _report(runner, state, lambda: connector, loads, fills=True)
    return wrapped(*args, **kwargs)
