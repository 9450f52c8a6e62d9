# SPDX-License-Identifier: Apache-2.0
"""Versions of KV: which weights computed each position of a request, found prefix
included. Host only, in the scheduler's process, while the audit and the metrics are on.

A request has *runs*: (first position, epoch), each until the next one. A block has one
epoch, or the runs of its rows. Blocks are marked where they change, so a step costs
what it allocates, and a change of the weights what runs then:

    schedule   new blocks get the step's epoch; a request that starts or resumes reads
               its found blocks; at a change every running request gets a run, and the
               block that spans the change its runs
    output     only at a change: with asynchronous scheduling drafts in flight count as
               accepted when a step is scheduled, so the change may have been earlier

A block that vLLM caches while its step is in flight has known tokens only, whose
positions are exact when the step is scheduled. So requests that are aborted or
preempted in flight leave right marks.

One KV-cache group is followed, with full attention if there is one: sliding windows
drop blocks, and what is found behind a window is not known. Neither is what a KV
connector loads.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from .. import commits
from ..base.errors import log_once
from ..commits import KvVersionSpan
from ..metrics import MIXED_REQUESTS, STALE_TOKENS
from ..step import Weights
from .engine_core import block_sizes

# In place of an epoch.
UNKNOWN, MIXED = -2, -1
# A client's extra argument, and the key of the answer in kv_transfer_params.
ARGUMENT = "nwor_kv_versions"

# (First position, epoch), ascending. Of two at one position the later one holds.
Runs = Sequence[tuple[int, int]]


class Followed(Struct, gc=False):
    """A request that was scheduled.

    runs: of its positions; the last may begin after what was computed. num_found: how
        many positions its present computation found. num_preemptions: that it had when
        it began. asks: whether its answer has versions, or why not.
    """

    request: Any
    runs: list[tuple[int, int]]
    num_found: int
    num_preemptions: int
    asks: bool | str
    is_counted: bool = False

    def num_computed(self) -> int:
        """Positions that were found or whose step was processed, none while it is
        preempted."""
        request = self.request
        # Outputs of steps before a preemption are in flight, and no part of these.
        num_stale = getattr(request, "num_stale_output_tokens", 0)
        return request.num_computed_tokens - request.num_in_flight_tokens + num_stale


def part(runs: Runs, start: int, end: int) -> Runs:
    """The runs of [start, end), merged."""
    found: dict[int, int] = {}
    for position, epoch in runs:
        if position < end:
            found[max(position, start)] = epoch
    merged: list[tuple[int, int]] = []
    for run in found.items():
        if not merged or merged[-1][1] != run[1]:
            merged.append(run)
    return merged


class KvVersions:
    """Of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = weakref.proxy(scheduler)
        config, manager = scheduler.kv_cache_config, scheduler.kv_cache_manager
        self._group = group_of(config.kv_cache_groups)
        managers = manager.coordinator.single_type_managers
        self._size: int = managers[self._group].block_size
        # The content of block 0, vLLM's null block, is never known.
        self._epochs = array("i", [UNKNOWN]) + array("i", [0]) * config.num_blocks
        self._mixed: dict[int, Runs] = {}  # by offset in the block
        self._requests: dict[str, Followed] = {}
        self._asking: set[str] = set()
        self._weights, self._labels = Weights(), dict[int, str]()
        # Changes whose step is in flight, and the requests that run across.
        self._changes: deque[tuple[Any, int, list[Followed]]] = deque()
        commits.sources.add(self)

    # -- reading -----------------------------------------------------------------------

    def spans(self, request_id: str) -> tuple[KvVersionSpan, ...] | None:
        """As commits.kv_versions; None if it is not known."""
        if (of := self._requests.get(request_id)) is None:
            return None
        return self._spans(of, min(of.num_computed(), of.request.num_tokens))

    def found(self, request_id: str, start: int) -> tuple[KvVersionSpan, ...]:
        """What it found, if its computation begins at `start`."""
        of = self._requests.get(request_id)
        return self._spans(of, start) if of and of.num_found == start else ()

    def _spans(self, of: Followed, end: int) -> tuple[KvVersionSpan, ...]:
        return tuple(
            KvVersionSpan(
                None if epoch == UNKNOWN else self._labels.get(epoch) or f"#{epoch}",
                start,
                after,
            )
            for (start, epoch), (after, _) in pairwise(
                (*part(of.runs, 0, end), (end, UNKNOWN))
            )
        )

    # -- a step is scheduled -----------------------------------------------------------

    def scheduled(self, output: Any, weights: Weights) -> dict[str, int]:
        """Follows a step. Returns increments of the counters.

        output: vLLM's SchedulerOutput. weights: what computes it.
        """
        counts = self.ended(output.finished_req_ids)
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
            self._asking.discard(name)
        cached, gid = output.scheduled_cached_reqs, self._group
        if weights != self._weights:
            if weights.label:
                self._labels[weights.epoch] = weights.label
            if weights.epoch != self._weights.epoch:
                self._begin_change(output, weights.epoch)
            self._weights = weights
        for source, copy in getattr(output, "kv_cache_block_copies", None) or ():
            self._mark(copy, self._runs_of([source], 1))
        started = [
            (new.req_id, new.block_ids[gid], new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
        for row, ids in enumerate(cached.new_block_ids):
            if ids is None:
                continue
            name = cached.req_ids[row]
            if name in cached.resumed_req_ids:
                started.append((name, ids[gid], cached.num_computed_tokens[row]))
            else:
                self._fill(ids[gid], weights.epoch)
        # All blocks that this step computes are marked before any found one is read:
        # they may be the same.
        known = getattr(output, "nwor_audit", None) or {}
        starts = [self._start(*one, known) for one in started]
        for of, ids, num_local in starts:
            counts[STALE_TOKENS] += self._read_found(of, ids, num_local)
        return counts

    def _start(
        self, name: str, ids: Sequence[int], num_computed: int, known: Mapping[str, Any]
    ) -> tuple[Followed, Sequence[int], int]:
        """Marks the blocks that a request gets, behind those found in the local cache.
        Returns it, its blocks, and how many positions those hold."""
        request, before = self._scheduler.requests[name], self._requests.get(name)
        num_local = num_computed
        if before is not None and before.num_preemptions == request.num_preemptions:
            of = before  # a session's next turn: it has its blocks
        else:
            if getattr(self._scheduler, "connector", None) is not None:
                num_local = known.get(name, (None, None))[1] or 0
            num_preemptions, asks = request.num_preemptions, asks_of(request)
            of = Followed(request, [], num_computed, num_preemptions, asks)
            self._requests[name] = of
            if asks:
                self._asking.add(name)
        begin = of.runs if of is before else []
        runs = [*part(begin, 0, num_local), (num_local, UNKNOWN)]
        of.runs = [*runs, (num_computed, self._weights.epoch)]
        first = -(-num_local // self._size)
        num_loaded = max(-(-num_computed // self._size), first)
        for number in range(first, num_loaded):
            self._mark_row(of, ids, number)
        self._fill(ids[num_loaded:], self._weights.epoch)
        return of, ids, num_local

    def _read_found(self, of: Followed, ids: Sequence[int], num_local: int) -> int:
        """Completes the runs of a request that starts; returns its stale tokens."""
        size, epoch = self._size, self._weights.epoch
        found = part(of.runs, 0, num_local)
        num_stale = 0
        if not found and num_local:
            found = self._runs_of(ids, -(-num_local // size))
            of.runs = [*part(found, 0, num_local), *of.runs]
            if not of.num_preemptions:
                ends = [start for start, _ in of.runs[1:]]
                num_stale = sum(
                    end - start
                    for (start, by), end in zip(of.runs, ends, strict=False)
                    if by not in (epoch, UNKNOWN)
                )
        if num_local % size:
            self._mark_row(of, ids, num_local // size)
        return num_stale

    def _begin_change(self, output: Any, epoch: int) -> None:
        """Other weights compute this step."""
        across = []
        for name, of in self._requests.items():
            num_scheduled = output.num_scheduled_tokens.get(name, 0)
            position = of.request.num_computed_tokens - num_scheduled
            if position <= 0 or of.request.is_finished():
                continue
            while of.runs[-1][0] >= position:
                of.runs.pop()
            of.runs.append((position, epoch))
            self._mark_from(of, position)
            across.append(of)
        self._changes.append((output, epoch, across))

    # -- its output is processed -------------------------------------------------------

    def processing(self, output: Any) -> None:
        """Call before vLLM processes the output of a step, with its SchedulerOutput."""
        if not self._changes or self._changes[0][0] is not output:
            return
        _, epoch, across = self._changes.popleft()
        for of in across:
            position = of.num_computed()
            if self._requests.get(of.request.request_id) is not of or position <= 0:
                continue  # ended, preempted or resumed in between
            for number, (start, by) in enumerate(of.runs):
                if start > position and by == epoch:
                    of.runs[number] = position, epoch
                    self._mark_from(of, position)
                    break

    def ended(self, names: Iterable[str]) -> dict[str, int]:
        """Counts requests that have ended, once. Returns increments."""
        counts = {MIXED_REQUESTS: 0, STALE_TOKENS: 0}
        for name in names:
            of = self._requests.get(name)
            if of is None or of.is_counted:
                continue
            of.is_counted = True
            # One that ended while it was preempted had its answer from all of them.
            num_tokens = of.request.num_tokens
            end = min(of.num_computed() or num_tokens, num_tokens)
            epochs = {epoch for _, epoch in part(of.runs, 0, end)} - {UNKNOWN}
            counts[MIXED_REQUESTS] += len(epochs) > 1
        return counts

    def answer(self, engine_outputs: Mapping[int, Any]) -> None:
        """Adds versions to the last outputs of the requests that ask for them."""
        if not self._asking:
            return
        for of_client in engine_outputs.values():
            for one in of_client.outputs:
                if one.finish_reason is None or one.request_id not in self._asking:
                    continue
                if one.kv_transfer_params is not None:
                    log_once(ARGUMENT, "the KV connector has its own data in the field")
                    continue
                of = self._requests[one.request_id]
                # No token was computed from the last one.
                spans = self._spans(of, of.request.num_tokens - 1)
                found = [span._asdict() for span in spans]
                one.kv_transfer_params = {
                    ARGUMENT: of.asks if isinstance(of.asks, str) else found
                }

    # -- blocks ------------------------------------------------------------------------

    def _runs_of(self, ids: Sequence[int], num_blocks: int) -> Runs:
        """Of the rows of the first blocks of these."""
        runs: list[tuple[int, int]] = []
        last = None
        for number, block in enumerate(ids[:num_blocks]):
            epoch = self._epochs[block]
            if epoch == MIXED:
                first = number * self._size
                runs += ((first + row, by) for row, by in self._mixed[block])
            elif epoch != last:
                runs.append((number * self._size, epoch))
            last = epoch
        return runs

    def _fill(self, ids: Sequence[int], epoch: int) -> None:
        for block in ids:
            if self._epochs[block] != epoch:
                self._mark(block, [(0, epoch)])

    def _mark_from(self, of: Followed, position: int) -> None:
        """Marks the blocks of a request from the one of that position on."""
        manager = self._scheduler.kv_cache_manager
        blocks = manager.get_blocks(of.request.request_id).blocks[self._group]
        ids = [block.block_id for block in blocks]
        for number in range(position // self._size, len(ids)):
            self._mark_row(of, ids, number)

    def _mark_row(self, of: Followed, ids: Sequence[int], number: int) -> None:
        """Marks a request's block of that number."""
        start = number * self._size
        runs = part(of.runs, start, start + self._size)
        self._mark(ids[number], [(at - start, epoch) for at, epoch in runs])

    def _mark(self, block: int, runs: Runs) -> None:
        if not block:
            return
        self._mixed.pop(block, None)
        self._epochs[block] = runs[0][1]
        if len(runs) > 1:
            self._epochs[block], self._mixed[block] = MIXED, runs


def group_of(groups: Sequence[Any]) -> int:
    """The KV-cache group that is followed. Raises StopIteration if none is slot
    based."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    def is_full(gid: int) -> bool:
        spec = groups[gid].kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        return isinstance(spec, FullAttentionSpec)

    slot_based = block_sizes(groups)
    return next((gid for gid in slot_based if is_full(gid)), next(iter(slot_based)))


def asks_of(request: Any) -> bool | str:
    """Whether a request asks for its versions, or what is wrong with how it asks."""
    more = getattr(request.sampling_params, "extra_args", None) or {}
    asks = more.get(ARGUMENT, False)
    if asks in (True, False):  # over HTTP 1 and 0
        return bool(asks)
    return f"{ARGUMENT} must be true or false, and is {asks!r}"
