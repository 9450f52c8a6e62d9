# SPDX-License-Identifier: Apache-2.0
"""Lets operations happen to a simulated vLLM, with the real manager around each step.

Checked in every step, over the whole allocation and its guard bytes:

    stage and begin change nothing of the cache but shadow blocks (and nothing beside
    the memory that the manager was given)
    1  rejected slots hold what they held when the step began
    2  every other byte is what vLLM wrote, and what vanilla vLLM would have, except
       where vanilla's last write was a rejected draft or a copy of one, or was lost
       with a step that failed
    3  through the tables a forward reads, at each committed position, what it would
       read in vanilla; the rows it writes are where the tables say; between stage and
       commit no byte of a real block at a row in a shadow block changes; a block full
       of known tokens is written in place, where another request may find it
    6  a planted fault turns exactly the launch that it hit into vanilla, is counted
       under its reason and logged once; under STRICT, and where kept rows are lost, it
       raises instead, which ends the engine: a new one starts on the same memory
    7  each launch's counters, and the scheduler's identities through NworStats
    9  a begin that is left out is counted, and is a breach
    block tables and slots are vLLM's own, but between stage and commit or abort
    the manager's state and its invariants
    blocks found in the prefix cache are, byte for byte, those that were cached

One operation is one event on the cache: a request arrives, gets rows (a prefill chunk
or a verification window) in the next batch, is aborted, preempted, finished, forked or
taken back to an earlier token, or the batch runs (stage, begin, forward, sampling,
commit, with all its windows). An operation that found nothing to do (a request where
there is none) is not counted, and what follows by itself (blocks allocated, evicted,
found) neither.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.simulation import operations as ops
from tests.simulation.blocks import Blocks, Broken, Request, condense
from tests.simulation.faults import FaultyOps, Moment, Planted, TableRow
from tests.simulation.memory import GUARD_BYTES, Bytes, Index, Violation, draw_cache
from tests.simulation.operations import MAX_REQUESTS, Operation
from tests.simulation.seats import Rule, Seat
from tests.simulation.step import Rows, Step
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    NO_SEAT,
    OVER_CAPACITY,
    STAGE_FAILED,
    STALE_LOG,
    STEP_FAILED,
    DraftCommitManager,
    NworError,
    StagedGroup,
    State,
)
from vllm_nwor.launches import num_bytes
from vllm_nwor.metrics import COUNTERS, GroupInfo, NworStats
from vllm_nwor.report import Report

MAX_TOKENS = 64
LOG_GUARD = 0xA7
LOGGER = logging.getLogger("vllm.v1.nwor")


@dataclass
class Totals:
    """What happened, over all operations that were played."""

    operations: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    windows: int = 0
    drafts: int = 0
    rejected: int = 0
    dropped_windows: int = 0
    staged_steps: int = 0
    steps_beside: int = 0
    prefixes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    prefix_hits: int = 0
    evictions: int = 0
    forced_preemptions: int = 0
    restarts: int = 0

    @property
    def num_operations(self) -> int:
        return self.operations.total()

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


# Applied to each manager before its first step: tests plant bugs with it.
Breakage = Callable[[DraftCommitManager], None]


class Simulator:
    """One world, drawn from a seed: its cache, its manager, its requests."""

    def __init__(self, seed: int, breakage: Breakage | None = None) -> None:
        draw = random.Random(seed)
        self.cache = draw_cache(draw)
        self.memory = self.cache.memory
        self.regions = self.cache.regions
        self.strict = draw.random() < 0.1
        # Whether a step's entry drops a stale log, as the hooks do, or begin finds it.
        self.aborts_at_entry = bool(self.regions) or draw.random() < 0.5
        self.is_lifo = draw.random() < 0.7
        self.has_indices = draw.random() < 0.5
        self.zeroes_blocks = draw.random() < 0.3
        self.capacity = draw.choice((6, 24, 24))
        self.breakage = breakage
        self.seam = FaultyOps()
        self.handler = Counting()
        self.payloads = np.random.default_rng(draw.randrange(1 << 32))
        self.requests: list[Request] = []
        self.batch: dict[str, Rows] = {}
        self.totals = Totals()
        self.num_arrived = 0
        self._start_engine()
        self.play_operation = {
            ops.ARRIVE: self._arrive,
            ops.ADVANCE: self._advance,
            ops.RUN: self._run,
            ops.ABORT: self._abort,
            ops.PREEMPT: self._preempt,
            ops.FINISH: self._finish,
            ops.FORK: self._fork,
            ops.TAKE_BACK: self._take_back,
        }

    def _start_engine(self) -> None:
        """A new manager, and everything that counts with it, on the cache as it is."""
        self.blocks = Blocks(self.cache, self.is_lifo)
        self.manager = self._make_manager()
        self.rows: list[Request] = []
        self.indices = list(range(MAX_REQUESTS))
        self.tables = [
            torch.zeros(MAX_REQUESTS, MAX_TOKENS // group.entry_tokens).int()
            for group in self.cache.groups
        ]
        self.slots = torch.zeros(len(self.tables), 0).long()
        self._note_own()
        self.rule = Rule()
        self.seats = {
            gid: [Seat() for _ in range(region.num_seats)]
            for gid, region in self.regions.items()
        }
        self.names = self._layer_names()
        if self.breakage is not None:
            self.breakage(self.manager)
        self.report = Report([GroupInfo(0, "cow", "cow", "simulated")], self.manager)
        self.stats = NworStats()
        self.stats.breach = partial(self._breach, self.stats.breach)
        self.state = State.IDLE
        # What the manager and the metrics should have counted since the start.
        self.counters = self.manager.counters.numpy().copy()
        self.fallbacks: Counter[str] = Counter()
        self.fallbacks_told: Counter[str] = Counter()
        self.handler.reasons.clear()

    def _end_engine(self) -> None:
        """All requests are gone, so are their blocks."""
        for request in list(self.requests):
            self._remove(request)
        pool = self.blocks.pool
        if len(pool.free) != self.cache.num_blocks - 1 or any(pool.references):
            raise Broken(f"blocks are lost: {pool.references}")
        self.totals.fallbacks.update(self.fallbacks)
        self.totals.prefix_hits += self.blocks.num_hits
        self.totals.evictions += pool.num_evicted

    def _make_manager(self) -> DraftCommitManager:
        self.protected = {
            layer.name: layer
            for group in self.cache.groups
            for layer in group.layers
            if layer.protected
        }
        groups = [
            (gid, [layer.cache for layer in group.layers if layer.protected])
            for gid, group in enumerate(self.cache.groups)
            if any(layer.protected for layer in group.layers)
        ]
        self.row_bytes = sum(layer.slot_bytes for layer in self.protected.values())
        staged = {
            gid: StagedGroup(region, self.cache.groups[gid].entry_tokens)
            for gid, region in self.regions.items()
        }
        size = num_bytes(
            self.capacity, self.row_bytes, len(groups), len(self.protected)
        ) + sum(group.num_bytes for group in staged.values())
        self.log_memory = torch.full(
            (size + 2 * GUARD_BYTES,), LOG_GUARD, dtype=torch.uint8
        )
        manager = DraftCommitManager(
            NworConfig(
                mode=Mode.STAGE if staged else Mode.COW,
                strictness=Strict.ALWAYS if self.strict else Strict.STARTUP,
            ),
            groups,
            self.capacity,
            self.log_memory[GUARD_BYTES : GUARD_BYTES + size],
            self.seam,
            staged,
        )
        self.log_guard = self._outside(manager)
        self.group_of_launch = [
            log.group_id for log in manager.groups for _ in log.tables
        ]
        self.is_shadow = np.zeros(self.memory.real.size, dtype=bool)
        for gid, region in self.regions.items():
            group = self.cache.groups[gid]
            for block in range(
                region.first_block, region.first_block + region.num_blocks
            ):
                self.is_shadow[group.block_index(block)[:, group.is_protected]] = True
        return manager

    def _outside(self, manager: DraftCommitManager) -> torch.Tensor:
        """[log_memory.numel()] bool: the bytes that belong to none of its tensors."""
        outside = torch.ones(self.log_memory.numel(), dtype=torch.bool)
        tensors = [manager.counters]
        for log in manager.groups:
            tensors += [log.undo_log, log.log_slots, log.log_windows]
            tensors += [part.table for part in log.tables]
        if manager.shadow is not None:
            tensors += [group.saved for group in manager.shadow.groups]
        for tensor in tensors:
            first = tensor.data_ptr() - self.log_memory.data_ptr()
            outside[first : first + tensor.nbytes] = False
        return outside

    def _layer_names(self) -> dict[TableRow, str]:
        """Which layer each row of the manager's tables stands for."""
        found: dict[TableRow, str] = {}
        for log in self.manager.groups:
            name_at = {
                layer.cache.kv_cache.data_ptr(): layer.name
                for layer in self.cache.groups[log.group_id].layers
            }
            for part in log.tables:
                for row, base in enumerate(part.table[:, 0].tolist()):
                    found[part.table.data_ptr(), row] = name_at[base]
        return found

    def play(
        self, operations: Iterable[Operation], limit: int | None = None
    ) -> list[Operation]:
        """Plays operations until `limit` of them took effect; returns all.

        Raises:
            Violation, or whatever the package raises: with the operations that were
            played, the failing one last, in the attribute `played`.
        """
        played: list[Operation] = []
        LOGGER.addHandler(self.handler)
        propagate, LOGGER.propagate = LOGGER.propagate, False
        try:
            for kind, numbers in operations:
                if self.totals.num_operations == limit:
                    break
                played.append((kind, numbers))
                is_played = self.play_operation[kind](*numbers)
                if is_played and kind == ops.RUN:
                    self._check_invariants()
                self.totals.operations[kind] += is_played
            self._check_bytes("the end")
            self._end_engine()
        except Exception as error:
            error.played = played  # type: ignore[attr-defined]
            raise
        finally:
            LOGGER.removeHandler(self.handler)
            LOGGER.propagate = propagate
        return played

    # -- requests ------------------------------------------------------------------

    def _request(self, number: int) -> Request | None:
        return self.requests[number % len(self.requests)] if self.requests else None

    def _arrive(self, family: int, length: int) -> bool:
        if len(self.requests) >= MAX_REQUESTS:
            return False
        request = self._new_request(family)
        request.extend(length + 1)
        self.requests.append(request)
        return True

    def _new_request(self, family: int) -> Request:
        self.num_arrived += 1
        empty: list[list[int]] = [[] for _ in self.cache.groups]
        return Request(f"r{self.num_arrived}", [], family, empty)

    def _advance(
        self, number: int, length: int, num_drafts: int, accepted: int, special: int
    ) -> bool:
        request = self._request(number)
        if request is None or request.name in self.batch:
            return False
        if not any(request.blocks):
            self.blocks.start(request)
        num_rows = min(length + 1, request.num_remaining)
        is_last = num_rows == request.num_remaining
        if not is_last or (num_rows > 1 and not request.has_sampled):
            rows = Rows(request, num_rows, is_last=is_last)
        else:
            num_drafts = min(num_drafts, MAX_TOKENS - len(request.text))
            accepted = min(accepted, num_drafts)
            if special == ops.EMPTY:
                accepted = 0
            if special == ops.PADDED and accepted == num_drafts:
                special = ops.PLAIN
            rows = Rows(request, num_rows + num_drafts, num_drafts, accepted, special)
        end = request.num_computed + rows.num_written
        while self.blocks.missing(request, end) > len(self.blocks.pool.free):
            if not self._make_room(request):
                return False
        self.blocks.grow(request, end, self.zeroes_blocks)
        self.batch[request.name] = rows
        return True

    def _make_room(self, request: Request) -> bool:
        """Preempts the youngest other request that is not in the batch."""
        for victim in reversed(self.requests):
            idle = victim is not request and victim.name not in self.batch
            if idle and any(victim.blocks):
                self._release(victim)
                self.totals.forced_preemptions += 1
                return True
        return False

    def _preempt(self, number: int) -> bool:
        request = self._request(number)
        if request is None or not any(request.blocks):
            return False
        self.batch.pop(request.name, None)
        self._release(request)
        return True

    def _abort(self, number: int, in_flight: int) -> bool:
        request = self._request(number)
        if request is None:
            return False
        if in_flight and request.name in self.batch:
            if self.batch[request.name].dropped:
                return False
            self.batch[request.name].dropped = True
        else:
            self._remove(request)
        return True

    def _finish(self, number: int) -> bool:
        request = self._request(number)
        if request is None or request.num_computed == 0:
            return False
        self._remove(request)
        return True

    def _remove(self, request: Request) -> None:
        self.batch.pop(request.name, None)
        self._release(request)
        self.requests.remove(request)

    def _release(self, request: Request) -> None:
        self.blocks.release(request)
        request.has_sampled = False
        if request.index >= 0:
            self.indices.append(request.index)
            request.index = -1

    def _fork(self, number: int, family: int, replaces: int) -> bool:
        parent = self._request(number)
        if (
            parent is None
            or parent.num_computed == 0
            or parent.name in self.batch
            or len(self.blocks.pool.free) < len(self.cache.groups)
        ):
            return False
        for other in self.requests if replaces else ():
            if other is not parent and other.num_computed == parent.num_computed:
                self._remove(other)
                break
        else:
            if len(self.requests) >= MAX_REQUESTS:
                return False
        child = self._new_request(family)
        child.text = list(parent.text)
        self.blocks.fork(parent, child)
        self.requests.append(child)
        return True

    def _take_back(self, number: int) -> bool:
        request = self._request(number)
        if request is None or request.name in self.batch or request.num_computed == 0:
            return False
        return self.blocks.take_back(request)

    # -- a step --------------------------------------------------------------------

    def _run(
        self, form: int, fault: int, launch: int, moment: int, bound: int, pads: int
    ) -> bool:
        if not self.batch:
            return False
        begins = False
        for rows in self.batch.values():
            if rows.request.index < 0:
                rows.request.index = self.indices.pop()
                begins |= rows.num_drafts > 0
        batch = [rows.request for rows in self.batch.values()]
        self.rows = batch if self.has_indices else condense(self.rows, batch)
        step = Step(
            [self.batch[request.name] for request in self.rows],
            self.cache.groups,
            self.blocks,
            pads,
            begins,
        )
        self.batch = {}
        self.stages = fault != ops.ALL_LOGGED
        payload = np.frombuffer(self.payloads.bytes(step.index.size), np.uint8)
        is_missed = fault == ops.MISSED
        raised = self._begin(step, bound, fault, launch, Moment(moment))
        if raised:
            pass
        elif fault in (ops.FORWARD_FAULT, ops.SAMPLER_FAULT):
            written = payload.size
            if fault == ops.FORWARD_FAULT:
                written = launch * payload.size // 6
            self._fail(step, payload, written, is_seen=moment < 2)
        else:
            raised = self._commit(step, form, payload, is_missed)
            if not raised:
                self._update(step)
        if raised:  # out of the model runner: the engine is dead, and started again
            self.totals.restarts += 1
            self._end_engine()
            self._start_engine()
        return True

    def _fill_tables(self, step: Step) -> None:
        """vLLM's own entries and slots, for the requests of the batch."""
        for gid, (group, table) in enumerate(
            zip(self.cache.groups, self.tables, strict=True)
        ):
            for row, request in zip(table, self.rows, strict=False):
                entries = torch.from_numpy(group.entries(request.blocks[gid]))
                row[: len(entries)] = entries
                row[len(entries) :] = 0
        self.slots = torch.from_numpy(step.slot_mappings.copy())
        self._note_own()

    def _note_own(self) -> None:
        self.own = [table.clone() for table in (*self.tables, self.slots)]

    def _begin(
        self, step: Step, bound: int, fault: int, launch: int, moment: Moment
    ) -> bool:
        """Everything up to the forward; whether NWOR raised (STRICT)."""
        num_drafts = step.num_drafts and step.num_drafts + bound
        is_missed = fault == ops.MISSED
        reasons = [STALE_LOG] if self.state in (State.LOGGED, State.STAGED) else []
        if self.state is not State.FAILED:
            self.state = State.IDLE
        is_dead = bool(reasons) and self.strict
        self.rule.start(True, True, step.begins)
        planted: Planted | None = None
        if num_drafts and not is_missed and not is_dead:
            found, planted = self._plan(step, num_drafts, fault, launch, moment)
            reasons += found
        if fault != ops.NO_FAULT and (planted or fault not in ops.OP_FAULTS):
            self.totals.faults[ops.FAULT_NAMES[fault]] += 1
        self.seam.arm(planted)
        raised = False
        try:
            # What the hook does when a step of the runner starts.
            if self.aborts_at_entry:
                self.manager.start_step(keeps=not step.begins)
            self._check_tables()
            self._fill_tables(step)
            if is_missed:
                self.manager.abort(STALE_LOG)
            elif num_drafts or not self.aborts_at_entry:
                windows = step.windows(
                    num_drafts,
                    self.slots,
                    self.tables,
                    self.has_indices,
                    self._seats_are_indices,
                )
                if self.regions and self.stages:
                    self.manager.stage(windows)
                self.manager.begin(windows)
        except NworError:
            raised = True
            self._put_back()
        self._check_fallbacks(reasons, raised)
        self._check_state()
        if step.staged:
            self._check_calls("stage", step.staged)
            self._check_pages(step)
        else:
            self._check_tables()
        if step.logged:
            self._check_calls("log", step.logged)
        self._check_bytes("begin changed the cache")
        wrong = (self.log_memory != LOG_GUARD) & self.log_guard
        if bool(wrong.any()):
            places = wrong.nonzero().flatten().tolist()
            raise Violation("begin wrote beside the log", f"bytes {places}")
        return raised

    @property
    def _seats_are_indices(self) -> bool:
        """V2 with a seat for each of its indices; else the seats are the batch rows."""
        seats = [region.num_seats for region in self.regions.values()]
        return self.has_indices and min(seats, default=0) >= MAX_REQUESTS

    def _plan(
        self, step: Step, num_drafts: int, fault: int, launch: int, moment: Moment
    ) -> tuple[list[str], Planted | None]:
        """How a step with drafts has to run: sets its groups and the state; returns
        why it runs otherwise than it should, and the fault to plant."""

        def plant(op: str, groups: set[int]) -> Planted | None:
            calls = sum(gid in groups for gid in self.group_of_launch)
            return Planted(op, launch % calls, moment) if calls else None

        everything = set(self.group_of_launch)
        fits = num_drafts <= self.manager.capacity
        staged = set(self.regions) if self.stages else set()
        beside = everything - staged
        reasons: list[str] = []
        planted: Planted | None = None
        if staged and len(step.rows) > min(r.num_seats for r in self.regions.values()):
            reasons, staged = [NO_SEAT], set()
        elif staged and beside and not fits:
            staged = set()
        elif staged and fault == ops.STAGE_FAULT:
            planted = plant("stage", staged)
            reasons, staged = [STAGE_FAILED], set()
            if self.strict:
                return reasons, planted
        logged = beside if staged else everything
        self.state = State.STAGED if staged else State.LOGGED
        if not staged and not fits:
            reasons.append(OVER_CAPACITY)
        elif logged and fault == ops.LOG_FAULT:
            planted = plant("log", logged)
            reasons.append(BEGIN_FAILED)
        elif logged and fault == ops.RESTORE_FAULT:
            planted = plant("restore", logged)
        elif staged and fault == ops.COMMIT_FAULT:
            planted = plant("commit", staged)
        if {OVER_CAPACITY, BEGIN_FAILED} & set(reasons):
            logged = set()
            if not staged:
                self.state = State.VANILLA
            elif self.strict:  # the hook puts the tables back
                reasons.append(STEP_FAILED)
                self.state, staged = State.IDLE, set()
        step.staged, step.logged = staged, logged
        return reasons, planted

    def _put_back(self) -> None:
        """What the hook does where an exception leaves the runner."""
        if self.manager.state is State.STAGED:
            with contextlib.suppress(NworError):
                self.manager.abort(STEP_FAILED)

    def _fail(self, step: Step, payload: Bytes, written: int, is_seen: bool) -> None:
        """The forward or the sampler raises; is_seen: while a hook is around it."""
        at = step.index_by(self.slots.numpy())[:written]
        self.memory.real[at] = payload[:written]
        self.memory.write_step(
            step.index[:written], payload[:written], ~step.staged_mask()[:written]
        )
        if is_seen and self.state is State.STAGED:
            self._put_back()
            self.state = State.IDLE
            self._check_fallbacks([STEP_FAILED], None)
            self._check_tables()
        self._check_state()
        self._check_bytes("a failed step")

    def _commit(self, step: Step, form: int, payload: Bytes, is_missed: bool) -> bool:
        """The forward, sampling and commit; whether NWOR raised."""
        self.memory.real[step.index_by(self.slots.numpy())] = payload
        if step.staged:
            self._check_real_blocks(step, payload)
        fault = self.seam.planted
        fails = fault is not None and fault.op in ("restore", "commit")
        is_lost = fails and bool(step.staged) and fault.op == "commit"
        reasons = [COMMIT_FAILED] if fails else []
        if is_missed and step.num_drafts:
            reasons = [BEGIN_MISSED]
        self.num_breaches = reasons.count(BEGIN_MISSED) + sum(
            step.pages[gid].num_invalid
            for gid in self.group_of_launch
            if gid in step.staged
        )
        if fails:
            self.state = State.FAILED
        elif self.state is not State.FAILED:
            self.state = State.IDLE
        raised = False
        try:
            if self.manager.is_open:
                self.report.commit(step.acceptance(form))
            else:
                self.manager.end_unlogged(step.num_drafts)
        except NworError:
            raised = True
        done = [
            self.names[key]
            for op in ("commit", "restore")
            for call in self.seam.done[op]
            for key in call
        ]
        keep_mask = step.keep_mask(set(self.protected) - set(done))
        self.memory.write_step(step.index, payload, keep_mask)
        self._check_fallbacks(reasons, raised, is_lost)
        self._check_state()
        self._check_tables()
        is_protected = bool(step.staged or step.logged)
        if not is_lost:
            self._check_calls("commit", step.staged)
            self._check_calls("restore", step.logged)
        if is_protected:
            self.totals.commits += 1
            self.totals.staged_steps += bool(step.staged)
            self.totals.steps_beside += bool(step.staged and step.logged)
            self.totals.windows += step.num_windows
            self.totals.drafts += step.num_drafts
            self.totals.rejected += step.num_drafts - step.num_accepted
        self._check_bytes("commit", step.index[~keep_mask])
        self._check_counters(step)
        if not raised:
            self._check_report(step, fails)
        return raised

    def _update(self, step: Step) -> None:
        """The scheduler takes in a step's output."""
        for rows in step.rows:
            request = rows.request
            if rows.dropped:
                self.totals.dropped_windows += rows.num_drafts > 0
                self._remove(request)
                continue
            if rows.is_last:
                request.extend(rows.num_valid_ids)
                request.has_sampled |= rows.num_valid_ids > 0
            if rows.special != ops.EMPTY:
                self.blocks.commit(request, rows.num_rows - rows.num_rejected)
            if len(request.text) >= MAX_TOKENS:
                self._remove(request)

    # -- checks --------------------------------------------------------------------

    def _check_fallbacks(
        self, reasons: list[str], raised: bool | None, is_lost: bool = False
    ) -> None:
        """raised: None where the hook hides it. is_lost: it raises in any case."""
        self.fallbacks.update(reasons)
        if self.manager.fallbacks != self.fallbacks:
            raise Violation(
                "fallbacks",
                f"counted {dict(self.manager.fallbacks)}; happened "
                f"{dict(self.fallbacks)}",
            )
        raises = is_lost or (self.strict and bool(set(reasons) - {NO_SEAT}))
        if raised is not None and raised != raises:
            raise Violation("strict", f"raised: {raised}, after {reasons}")
        if is_lost:
            return  # the exception tells
        logged = {
            reason: 1
            for reason in self.fallbacks
            if not self.strict or reason == NO_SEAT
        }
        if self.handler.reasons != logged:
            raise Violation(
                "log lines", f"found {self.handler.reasons}; expected {logged}"
            )

    def _check_state(self) -> None:
        if self.manager.state is not self.state:
            raise Violation("state", f"{self.manager.state} is not {self.state}")

    def _check_invariants(self) -> None:
        try:
            self.manager.check_state()
        except AssertionError as error:
            raise Violation("state", str(error)) from error

    def _check_calls(self, op: str, groups: set[int]) -> None:
        """One launch for each row of these groups' counters, and each of their layers
        that are protected in one."""
        calls = self.seam.calls[op]
        names = [[self.names[key] for key in call] for call in calls]
        covered = sorted(name for call in names for name in call)
        layers = sorted(
            layer.name
            for gid in groups
            for layer in self.cache.groups[gid].layers
            if layer.protected
        )
        num_launches = sum(gid in groups for gid in self.group_of_launch)
        if len(calls) != num_launches or covered != layers:
            raise Violation("launches", f"{op} ran for {names}")

    def _check_tables(self) -> None:
        """They are as vLLM filled them."""
        for found, own in zip((*self.tables, self.slots), self.own, strict=True):
            if not torch.equal(found, own):
                raise Violation("tables", f"found {found}; expected {own}")

    def _check_pages(self, step: Step) -> None:
        """What stage put in the tables, and what is read through them."""
        slots = self.slots.numpy()
        starts = np.cumsum([0] + [rows.num_rows for rows in step.rows])
        for gid, group in enumerate(self.cache.groups):
            tokens, own = group.entry_tokens, self.own[gid].numpy()
            table = self.tables[gid].numpy()
            is_staged = table != own
            if gid in step.staged:
                region = self.regions[gid]
                per_block = group.block_size // tokens
                first = region.first_block * per_block
                found = table[is_staged]
                is_shadow = (found >= first) & (
                    found < first + region.num_blocks * per_block
                )
                if not is_shadow.all() or len(set(found.tolist())) != len(found):
                    raise Violation("pages", f"group {gid}: {table}, of {own}")
                self._count_copies(step, gid)
            wanted = np.zeros_like(is_staged)
            for rows, entry in step.pages[gid].windows if gid in step.staged else ():
                end = rows.request.num_computed + rows.num_rows
                row = step.rows.index(rows)
                wanted[row, entry : -(-end // tokens)] = True
            if not np.array_equal(is_staged, wanted):
                raise Violation("pages", f"group {gid}: {table}, of {own}")
            for row, rows in enumerate(step.rows):
                first, count = rows.request.num_computed, rows.num_written
                position = np.arange(first + count)
                entry, offset = position // tokens, position % tokens
                by_table = table[row][entry] * tokens + offset
                by_own = own[row][entry] * tokens + offset
                mapped = slots[gid][starts[row] : starts[row] + count]
                if not np.array_equal(by_table[first:], mapped):
                    raise Violation("pages", f"group {gid}: slots {mapped}")
                # The last block of known tokens is full up to here.
                known = len(rows.request.text) // group.block_size * group.block_size
                if not np.array_equal(by_table[:known], by_own[:known]):
                    raise Violation("pages", f"group {gid}: a full block is staged")
                read = self.memory.real[group.index[by_table[:first]]]
                vanilla = self.memory.vanilla[group.index[by_own[:first]]]
                wrong = ((read != vanilla) & group.is_protected).any(axis=1)
                if wrong.any():
                    raise Violation(
                        "guarantee 3 (a forward reads other bytes)",
                        f"group {gid}, row {row}: positions "
                        f"{np.flatnonzero(wrong).tolist()} of {first}",
                    )

    def _seat(self, row: int, rows: Rows) -> int:
        return rows.request.index if self._seats_are_indices else row

    def _count_copies(self, step: Step, gid: int) -> None:
        """Which committed rows stage had to copy, by the rule."""
        tokens, copied = self.cache.groups[gid].entry_tokens, 0
        for rows, entry in step.pages[gid].windows:
            row, first = step.rows.index(rows), rows.request.num_computed
            seat = self.seats[gid][self._seat(row, rows)]
            real = int(self.own[gid][row, (first - 1) // tokens]) if first else 0
            counts = self.rule.counts(seat, first, real)
            self.rule.stage(seat)
            if first > entry * tokens:
                self.totals.prefixes["kept" if counts else "copied"] += 1
                copied += 0 if counts else first - entry * tokens
        step.num_copied[gid] = copied

    def _note_seats(self, step: Step) -> None:
        """After a commit."""
        for gid in step.staged:
            tokens = self.cache.groups[gid].entry_tokens
            for rows, entry in step.pages[gid].windows:
                row = step.rows.index(rows)
                valid = rows.request.num_computed + rows.num_rows - rows.num_rejected
                real = int(self.own[gid][row, (valid - 1) // tokens])
                seat = self.seats[gid][self._seat(row, rows)]
                self.rule.commit(seat, valid, real, valid > entry * tokens)

    def _check_real_blocks(self, step: Step, payload: Bytes) -> None:
        """Between forward and commit: what is in shadow blocks left real ones alone."""
        in_place = ~step.staged_mask()
        expected = self.memory.expected.copy()
        expected[step.index[in_place]] = payload[in_place]
        wrong = (self.memory.real != expected) & ~self.is_shadow
        if wrong.any():
            raise Violation(
                "guarantee 3 (a real block changed before commit)", self._where(wrong)
            )

    def _check_bytes(self, moment: str, rejected: Index | None = None) -> None:
        """rejected: where the bytes of restored slots lie."""
        memory = self.memory
        wrong = (memory.real != memory.expected) & ~self.is_shadow
        if wrong.any():
            kind = f"guarantee 2 ({moment})"
            if rejected is not None and wrong[rejected].any():
                kind = "guarantee 1 (a rejected slot is not as it was)"
            raise Violation(kind, self._where(wrong))
        wrong = (memory.real != memory.vanilla) & ~memory.dirty & ~self.is_shadow
        if wrong.any():
            raise Violation("guarantee 2 (not as vanilla vLLM)", self._where(wrong))

    def _where(self, wrong: npt.NDArray[np.bool_]) -> str:
        """Layers and slots of the bytes that are wrong."""
        found = {}
        for group in self.cache.groups:
            for layer in group.layers:
                slots = np.flatnonzero(wrong[layer.index].any(axis=1)).tolist()
                if slots:
                    found[layer.name] = slots
        return f"{int(wrong.sum())} bytes, slots {found}"

    def _check_counters(self, step: Step) -> None:
        """Exactly what each launch that did its work has to add."""
        drafts, accepted = step.num_drafts, step.num_accepted
        windows = [step.num_windows, drafts, accepted, drafts - accepted]
        commits, restores = self.seam.done["commit"], self.seam.done["restore"]
        of_logged = [
            launch
            for launch, gid in enumerate(self.group_of_launch)
            if gid in step.logged
        ]
        done = [*enumerate(commits), *zip(of_logged, restores, strict=False)]
        step.copied_bytes = step.committed_bytes = 0
        for launch, keys in done:
            names = [self.names[key] for key in keys]
            if not names:
                continue
            slot_bytes = sum(self.protected[name].slot_bytes for name in names)
            gid = self.group_of_launch[launch]
            if gid in step.logged:
                self.counters[launch] += [
                    *windows,
                    step.num_restorable * slot_bytes,
                    *(0, 0, 0),
                ]
                continue
            pages = step.pages[gid]
            copied = step.num_copied[gid] * slot_bytes
            committed = step.num_committed(gid) * slot_bytes
            self.counters[launch] += [
                *(*windows, 0, pages.num_invalid, copied, committed)
            ]
            step.copied_bytes += copied
            step.committed_bytes += committed
        found = self.manager.counters.tolist()
        if found != self.counters.tolist():
            raise Violation(
                "counters", f"found {found}; expected {self.counters.tolist()}"
            )
        self._note_seats(step)

    def _check_report(self, step: Step, failed: bool) -> None:
        """What would be in the metrics, from worker and scheduler together."""
        payload = self.report.take_payload()
        counted, scheduled = step.counted_and_scheduled()
        if payload is not None:
            self.stats.add_step(payload, counted, scheduled)
        found = {"fallbacks": {}, "counts": [0] * len(COUNTERS)} | self.stats.report
        self.stats.report = {}
        found |= zip(COUNTERS, found["counts"], strict=True)
        parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
        if sum(found[part] for part in parts) != found["tokens_staged"]:
            raise Violation("guarantee 7 (sum)", f"{found}")
        self.fallbacks_told.update(found["fallbacks"])
        if self.fallbacks_told != self.fallbacks:
            raise Violation(
                "fallbacks in the metrics", f"{self.fallbacks_told} of {self.fallbacks}"
            )
        if failed:
            return  # whether a failed commit's counts arrive is left open
        is_counted = bool(step.staged or step.logged)
        logged_bytes = sum(
            layer.slot_bytes
            for gid in step.logged
            for layer in self.cache.groups[gid].layers
            if layer.protected
        )
        wanted = {
            "windows": step.num_windows * is_counted,
            "tokens_staged": step.num_drafts * is_counted,
            "committed_tokens": counted.num_accepted_tokens * is_counted,
            "dropped_drafts": step.num_dropped_drafts * is_counted,
            "restored_bytes": step.num_restorable * logged_bytes,
            "shadow_copied_bytes": step.copied_bytes,
            "committed_bytes": step.committed_bytes,
            "breaches": self.num_breaches,
        }
        if {name: found[name] for name in wanted} != wanted:
            raise Violation("guarantee 7", f"reported {found}; expected {wanted}")

    def _breach(self, count: Any, kind: str, found: str, num: int) -> None:
        if (kind, num) != ("worker", self.num_breaches):
            raise Violation("guarantee 7 (breach)", f"{kind}: {found}")
        count(kind, found, num)


class Counting(logging.Handler):
    """Counts warnings by the fallback's reason: "NWOR <reason>: ..."."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:  # a breach is an error
            self.reasons[record.getMessage().split()[1].rstrip(":")] += 1
