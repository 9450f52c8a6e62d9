# SPDX-License-Identifier: Apache-2.0
"""What KV connectors read and fill.

Of any connector, in the scheduler's process (`FollowedLoads`): which blocks it was
asked to load, and how much of that failed. vLLM asks how much there is, then takes all
of it, a part, or nothing, and says how much when the request has its blocks.

The adapter for vLLM's OffloadingConnector, in the workers: which blocks it is about to
read and fill, and where from (Observer.blocks_transferred).

A store is submitted one step after it was decided, when that step has been sampled: so
every slot of its blocks must be committed by then. Stores are reported when the step
begins: what vLLM flushes then belongs to a request of that step, and V2's runner
submits it after the tables are final. Loads are reported before they are submitted.

Where the connector holds a block is known by the numbers in its transfers: those of
chunks of blocks, on the host. What was stored last to a place is what a load must bring
from there, unless others fill it, too: then nothing is known (`_places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from msgspec import Struct

from ..base.errors import report_failure
from ..base.wrap import Wrapped, argument, install_all, is_installed
from ..step import Loads, Transfer
from .ledger import MATCHED_TOKENS, START_LOAD_KV, STATE_AFTER_ALLOC

NAME = "OffloadingConnector"
MULTI = "MultiConnector"
LOST = "audit: loads of the KV connector cannot be followed; they stay unverified"

Blocks = list[list[int]]  # by KV-cache group
# (the blocks of a transfer, the connector's chunks)
Transfers = Iterable[tuple[Any, Any]]
# Model runners of this process with observers that follow transfers.
_watched: WeakSet[Any] = WeakSet()


# --- any connector --------------------------------------------------------------------


class Load(Struct, gc=False):
    """Positions [start, end) of a request that a connector was asked to load. They are
    None if it is not known which blocks that fills."""

    request: Any
    start: int | None
    end: int


class FollowedLoads:
    """What a scheduler's connector was asked to load. is_lost: after a failure."""

    def __init__(self) -> None:
        self.is_lost = False
        self._block_sizes: Sequence[int] = ()
        # Of requests that may be loaded: what they have, and whether the load will be
        # complete in a later step.
        self._asked: dict[str, tuple[int, bool]] = {}
        # Of requests that were not seated since.
        self._loads: dict[str, Load] = {}
        self._blocks: list[Blocks] = []
        self._num_failed = 0

    def follow(self, connector: Any, block_sizes: Sequence[int]) -> None:
        """block_sizes: of each KV-cache group."""
        self._block_sizes = block_sizes
        for target, wrapper in (
            (MATCHED_TOKENS, self._matched_tokens),
            (STATE_AFTER_ALLOC, self._state_after_alloc),
        ):
            name = target.qualname.rpartition(".")[2]
            setattr(connector, name, partial(wrapper, getattr(connector, name)))

    def _matched_tokens(self, wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(*args, **kwargs)
        try:
            request = argument(MATCHED_TOKENS, "request", args, kwargs)
            local = argument(MATCHED_TOKENS, "num_computed_tokens", args, kwargs)
            self._asked[request.request_id] = local, bool(found[1])
        except Exception as error:
            self.lose(error)
        return found

    def _state_after_alloc(self, wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            about = "request", "blocks", "num_external_tokens"
            self._add(*(argument(STATE_AFTER_ALLOC, a, args, kwargs) for a in about))
        except Exception as error:
            self.lose(error)
        return wrapped(*args, **kwargs)

    def lose(self, error: Exception) -> None:
        """Call while `error` is handled."""
        self.is_lost = True
        report_failure(LOST, error)

    def _add(self, request: Any, blocks: Any, num_external: int) -> None:
        """A request has its blocks. For a load that takes steps vLLM says it again when
        that is complete: no more is loaded then."""
        if not num_external:
            return
        name = request.request_id
        local, takes_steps = self._asked.pop(name)
        if (failed := self._loads.get(name)) is not None:
            self._num_failed += failed.end - (failed.start or 0)  # it asks again
        load = self._loads[name] = Load(request, local, local + num_external)
        if len(self._block_sizes) == 1:
            (ids,), (size,) = blocks.get_block_ids(), self._block_sizes
            filled = ids[local // size : -(-load.end // size)]
            self._blocks.append([[*filter(None, filled)]])  # no null blocks
        elif takes_steps:
            # Its groups may have found different prefixes in the cache, with hashes.
            self._blocks.append(blocks.get_unhashed_block_ids_all_groups())
        else:
            load.start = None

    def num_local(self, name: str, num_computed: int, has_failed: bool) -> int | None:
        """A request is seated: how many of its tokens were found in the local cache;
        None: that is not known. The connector has loaded the others, or will in this
        step. has_failed: a load that took steps ended so."""
        self._asked.pop(name, None)
        load = self._loads.pop(name, None)
        if self.is_lost or (load is not None and load.start is None):
            return None
        if load is None or load.start is None:
            return num_computed
        if has_failed:
            self._num_failed += max(load.end - max(load.start, num_computed), 0)
        return min(load.start, num_computed)

    def ended(self, names: Iterable[str]) -> None:
        """Call with the requests that have ended, in each step."""
        for name in names:
            self._asked.pop(name, None)
            load = self._loads.pop(name, None)
            if load is not None and load.request.status.name == "FINISHED_ERROR":
                self._num_failed += load.end - (load.start or 0)

    def take(self) -> Loads | None:
        """What is new since the last call; None if that is not known."""
        found = Loads(tuple(self._blocks), self._num_failed)
        self._blocks, self._num_failed = [], 0
        return None if self.is_lost else found


def stores_of(transfer: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The connectors of vLLM's KVTransferConfig, those within a MultiConnector instead
    of that one: names, and the user's own configuration of each."""

    def of(name: str | None, more: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        more = more if isinstance(more, Mapping) else {}
        if name != MULTI:
            yield name or "", more
        for one in more.get("connectors", ()) if name == MULTI else ():
            yield from of(one.get("kv_connector"), one.get("kv_connector_extra_config"))

    return of(transfer.kv_connector, transfer.kv_connector_extra_config)


def has_own_store(transfer: Any) -> bool:
    """Whether its stores are empty at start, and nobody else fills them: host memory of
    vLLM's own OffloadingConnector. transfer: vLLM's KVTransferConfig."""
    is_vllms = not getattr(transfer, "kv_connector_module_path", None)
    return is_vllms and all(
        name == NAME and more.get("spec_name", "CPUOffloadingSpec") in OWN_SPECS
        for name, more in stores_of(transfer)
    )


OWN_SPECS = ("CPUOffloadingSpec",)
# Settings of connectors that bring other bytes than they have stored: of LMCache (as
# lmcache.NAME in vLLM's configuration, as LMCACHE_NAME in the environment, or in the
# file that LMCACHE_CONFIG_FILE names) those of CacheGen, KIVI and CacheBlend. None of
# these values does.
CHANGING = ("remote_serde", "enable_blending")
UNCHANGED = ("", "naive", "none", "0", "false")


def bytes_changed_by(transfer: Any, env: Mapping[str, str]) -> str:
    """The connector and the setting that make it change bytes on the way, by name;
    empty if none is known. transfer: vLLM's KVTransferConfig."""
    for name, more in stores_of(transfer):
        if "LMCache" not in name:
            continue
        of_file = _lmcache_file(env.get("LMCACHE_CONFIG_FILE"))
        for setting in CHANGING:
            said = env.get(f"LMCACHE_{setting.upper()}", of_file.get(setting))
            said = more.get(f"lmcache.{setting}", said)
            if said is not None and str(said).lower() not in UNCHANGED:
                return f"{name} ({setting}: {said})"
    return ""


def _lmcache_file(path: str | None) -> Mapping[str, Any]:
    """Its settings; none where LMCache, which needs them, cannot start either."""
    if not path:
        return {}
    import yaml  # type: ignore[import-untyped]  # of vLLM

    try:
        found = yaml.safe_load(Path(path).read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


# --- vLLM's OffloadingConnector -------------------------------------------------------


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
