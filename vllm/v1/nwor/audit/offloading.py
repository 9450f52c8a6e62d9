# SPDX-License-Identifier: Apache-2.0
"""The audit's adapter for vLLM's OffloadingConnector: `handed_on`, `never_loaded`.

A store is submitted one step after it was decided, when that step has been resolved: so
every slot of its blocks must be committed by then. A block that is not is stored as it
is, and loaded into another request later. It is looked at when the step begins: what
vLLM flushes then is a request's of that step, and V2's runner submits it behind plan.
That the blocks that a load fills change, and to what was stored, is seen when a request
takes them over.

Where the connector holds a block is known by the numbers that its transfers give: of
chunks of blocks, on the host. What was stored last to a place is what a load must bring
from there, unless others fill it, too: then nothing is known (`_places`).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any
from weakref import WeakSet

from ..hooks._wrap import Wrapped, install_all, is_installed
from ..hooks.ledger import START_LOAD_KV

NAME = "OffloadingConnector"

Blocks = list[list[int]]  # by KV-cache group
# Model runners of this process that are audited.
_audited: WeakSet[Any] = WeakSet()


def install(module: ModuleType) -> None:
    """Wraps the connector in `module`. Raises HostMismatch."""
    install_all(module, {START_LOAD_KV: _loads})


def is_hooked() -> bool:
    """Whether the audits of this process see what the connector reads and fills."""
    return is_installed(START_LOAD_KV)


def watch(runner: Any) -> None:
    """From here on the audit of `runner` sees what its connector reads and fills."""
    _audited.add(runner)


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


def _hand_on(
    runner: Any, connector: Any, transfers: list[tuple[Any, Any]], fills: bool
) -> None:
    """transfers: the blocks of each, and the connector's chunks."""
    # A process may have several engines, each with its own configuration.
    if runner.vllm_config is connector._vllm_config:
        for blocks, chunks in transfers:
            if (audit := runner.nwor_audit) is not None:
                audit.hand_on(runner, connector, blocks, chunks, fills)


def read(
    kv_cache_config: Any, connector: Any, blocks: Any, chunks: Any
) -> tuple[Blocks, Blocks | None]:
    """A transfer's blocks, and where the connector holds them; None: that does not say
    what they must hold. Raises ValueError: it is not of the groups that vLLM
    offloads."""
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


def begin_step(runner: Any, scheduled: Any) -> None:
    """The stores that a step submits. scheduled: vLLM's SchedulerOutput."""
    from vllm.distributed import kv_transfer

    metadata = scheduled.kv_connector_metadata
    # vLLM warms up without a connector, and a dummy run (V2) has its connector off.
    if metadata is not None and kv_transfer.has_kv_transfer_group():
        connector: Any = kv_transfer.get_kv_transfer_group()
        waiting = connector.connector_worker._unsubmitted_store_jobs
        jobs = [metadata.store_jobs.get(job) for job in metadata.jobs_to_flush or ()]
        stores = [(source, to) for _, source, to in waiting]
        stores += [(job.src_spec, job.dst_spec) for job in jobs if job is not None]
        _hand_on(runner, connector, stores, fills=False)


def load(runner: Any, connector: Any) -> None:
    """The loads that a connector is about to submit."""
    loads = connector._connector_metadata.load_jobs
    filled = [(job.dst_spec, job.src_spec) for job in loads.values()]
    _hand_on(runner, connector, filled, fills=True)


def _loads(wrapped: Wrapped, connector: Any, args: Any, kwargs: Any) -> Any:
    for runner in list(_audited):
        if (audit := runner.nwor_audit) is not None:
            audit.load(runner, connector)
    return wrapped(*args, **kwargs)
