# SPDX-License-Identifier: Apache-2.0
"""Lets operations happen to a simulated vLLM, with the real manager around each step.

Checked in every step, over the whole allocation and its guard bytes:

    begin changes nothing of the cache (and nothing beside the log's memory)
    1  rejected slots hold what they held when the log was taken
    2  every other byte is what vLLM wrote, and what vanilla vLLM would have, except
       where vanilla's last write was a rejected draft or a copy of one
    6  a planted fault turns exactly the launch that it hit into vanilla, is counted
       under its reason and logged once; under STRICT it raises instead, which ends the
       engine: a new one starts on the same memory
    7  each launch's counters, and the scheduler's identities through NworStats
    9  a begin that is left out is counted, and is a breach
    the manager's state, and after each operation its invariants
    blocks found in the prefix cache are, byte for byte, those that were cached

One operation is one event on the cache: a request arrives, gets rows (a prefill chunk
or a verification window) in the next batch, is aborted, preempted, finished, forked or
offloaded, or the batch runs (begin, forward, sampling, commit, with all its windows).
An operation that found nothing to do (a request where there is none) is not counted,
and what follows by itself (blocks allocated, evicted, found, loaded) neither.
"""

from __future__ import annotations

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
from tests.simulation.blocks import Blocks, Broken, Request
from tests.simulation.faults import FaultyOps, Moment, Planted, TableRow
from tests.simulation.memory import GUARD_BYTES, Bytes, Index, Violation, draw_cache
from tests.simulation.operations import Operation
from tests.simulation.step import Rows, Step
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    OVER_CAPACITY,
    STALE_LOG,
    DraftCommitManager,
    NworError,
    State,
)
from vllm_nwor.launches import num_bytes
from vllm_nwor.metrics import COUNTERS, GroupInfo, NworStats
from vllm_nwor.report import Report

MAX_REQUESTS = 6
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
    faults: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    prefix_hits: int = 0
    loads: int = 0
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
        self.blocks = Blocks(self.cache)
        self.strict = draw.random() < 0.1
        # Whether a step's entry drops a stale log, as the hooks do, or begin finds it.
        self.aborts_at_entry = draw.random() < 0.5
        self.zeroes_blocks = draw.random() < 0.3
        self.mappings_as_tensor = draw.random() < 0.5
        self.capacity = draw.choice((4, 8, 24))
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
            ops.OFFLOAD: self._offload,
        }

    def _start_engine(self) -> None:
        """A new manager, and everything that counts with it, on the cache as it is."""
        self.blocks = Blocks(self.cache)
        self.manager = self._make_manager()
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
        self.totals.loads += self.blocks.num_loads
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
        size = num_bytes(
            self.capacity, self.row_bytes, len(groups), len(self.protected)
        )
        self.log_memory = torch.full(
            (size + 2 * GUARD_BYTES,), LOG_GUARD, dtype=torch.uint8
        )
        manager = DraftCommitManager(
            NworConfig(
                mode=Mode.COW,
                strictness=Strict.ALWAYS if self.strict else Strict.STARTUP,
            ),
            groups,
            self.capacity,
            self.log_memory[GUARD_BYTES : GUARD_BYTES + size],
            self.seam,
        )
        self.log_guard = self._outside(manager)
        return manager

    def _outside(self, manager: DraftCommitManager) -> torch.Tensor:
        """[log_memory.numel()] bool: the bytes that belong to none of its tensors."""
        outside = torch.ones(self.log_memory.numel(), dtype=torch.bool)
        tensors = [manager.counters]
        for log in manager.groups:
            tensors += [log.undo_log, log.log_slots, log.log_windows]
            tensors += [part.table for part in log.tables]
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
        """Plays operations until `limit` of them took effect; returns those that did.

        Raises:
            Violation, or whatever the package raises: with the operations that were
            played, the failing one last, in the attribute `played`.
        """
        played: list[Operation] = []
        LOGGER.addHandler(self.handler)
        propagate, LOGGER.propagate = LOGGER.propagate, False
        try:
            for kind, numbers in operations:
                if limit is not None and len(played) >= limit:
                    break
                played.append((kind, numbers))
                is_played = self.play_operation[kind](*numbers)
                self._check_invariants()
                if is_played:
                    self.totals.operations[kind] += 1
                else:
                    played.pop()
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
        if request.num_remaining > 1:
            num_rows = min(length + 1, request.num_remaining)
            rows = Rows(request, num_rows, is_last=num_rows == request.num_remaining)
        else:
            num_drafts = min(num_drafts, MAX_TOKENS - len(request.text))
            accepted = min(accepted, num_drafts)
            if special == ops.EMPTY:
                accepted = 0
            if special == ops.PADDED and accepted == num_drafts:
                special = ops.PLAIN
            rows = Rows(request, 1 + num_drafts, num_drafts, accepted, special)
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
                self.blocks.release(victim)
                self.totals.forced_preemptions += 1
                return True
        return False

    def _preempt(self, number: int) -> bool:
        request = self._request(number)
        if request is None or not any(request.blocks):
            return False
        self.batch.pop(request.name, None)
        self.blocks.release(request)
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
        self.blocks.release(request)
        self.requests.remove(request)

    def _fork(self, number: int, family: int) -> bool:
        parent = self._request(number)
        if (
            parent is None
            or parent.num_computed == 0
            or parent.name in self.batch
            or len(self.requests) >= MAX_REQUESTS
            or len(self.blocks.pool.free) < len(self.cache.groups)
        ):
            return False
        child = self._new_request(family)
        child.text = list(parent.text)
        self.blocks.fork(parent, child)
        self.requests.append(child)
        return True

    def _offload(self, number: int, chunk: int) -> bool:
        request = self._request(number)
        return request is not None and self.blocks.offload(request, chunk)

    # -- a step --------------------------------------------------------------------

    def _run(
        self, form: int, fault: int, launch: int, moment: int, bound: int, pads: int
    ) -> bool:
        if not self.batch:
            return False
        step = Step(list(self.batch.values()), self.cache.groups, self.blocks, pads)
        self.batch = {}
        planted: Planted | None = None
        if fault != ops.NO_FAULT:
            self.totals.faults[ops.FAULT_NAMES[fault]] += 1
        if fault in (ops.LOG_FAULT, ops.RESTORE_FAULT):
            op = "log" if fault == ops.LOG_FAULT else "restore"
            planted = Planted(op, launch % len(self.counters), Moment(moment))
        self.seam.arm(planted)
        self.manager.active = fault != ops.INACTIVE
        payload = np.frombuffer(self.payloads.bytes(step.index.size), np.uint8)
        is_missed = fault == ops.MISSED
        raised = self._begin(step, bound, planted, is_missed)
        if raised:
            pass
        elif fault == ops.FORWARD_FAULT:
            written = launch * payload.size // 6
            self.memory.write(step.index[:written], payload[:written])
        elif fault == ops.SAMPLER_FAULT:
            self.memory.write(step.index, payload)
        else:
            raised = self._commit(step, form, payload, planted, is_missed)
            if not raised:
                self._update(step)
        if raised:  # out of the model runner: the engine is dead, and started again
            self.totals.restarts += 1
            self._end_engine()
            self._start_engine()
        return True

    def _begin(
        self, step: Step, bound: int, planted: Planted | None, is_missed: bool
    ) -> bool:
        """Everything up to the forward; whether NWOR raised (STRICT)."""
        num_drafts = step.num_drafts and step.num_drafts + bound
        reasons = [STALE_LOG] if self.state is State.LOGGED else []
        if self.state is not State.FAILED:
            self.state = State.IDLE
        if not (is_missed or (reasons and self.strict)):
            reason = self._reason_not_to_log(num_drafts, planted)
            reasons += [reason] if reason else []
            step.is_logged = num_drafts > 0 and self.manager.active and not reason
            if step.is_logged or reason:
                self.state = State.LOGGED if step.is_logged else State.VANILLA
        raised = False
        try:
            if self.aborts_at_entry or is_missed:
                self.manager.abort(STALE_LOG)
            if not is_missed and (num_drafts or not self.aborts_at_entry):
                self.manager.begin(step.windows(num_drafts, self.mappings_as_tensor))
        except NworError:
            raised = True
        self._check_fallbacks(reasons, raised)
        self._check_state()
        if step.is_logged:
            self._check_calls("log")
        self._check_bytes("begin changed the cache")
        wrong = (self.log_memory != LOG_GUARD) & self.log_guard
        if bool(wrong.any()):
            places = wrong.nonzero().flatten().tolist()
            raise Violation("begin wrote beside the log", f"bytes {places}")
        return raised

    def _reason_not_to_log(
        self, num_drafts: int, planted: Planted | None
    ) -> str | None:
        """Why this step's windows have to run as vanilla vLLM, or None."""
        if num_drafts == 0 or not self.manager.active:
            return None
        if num_drafts > self.manager.capacity:
            return OVER_CAPACITY
        return BEGIN_FAILED if planted is not None and planted.op == "log" else None

    def _commit(
        self,
        step: Step,
        form: int,
        payload: Bytes,
        planted: Planted | None,
        is_missed: bool,
    ) -> bool:
        """The forward, sampling and commit; whether NWOR raised (STRICT)."""
        self.memory.real[step.index] = payload
        fails = step.is_logged and planted is not None and planted.op == "restore"
        reasons = [COMMIT_FAILED] if fails else []
        if is_missed and step.num_drafts:
            reasons = [BEGIN_MISSED]
        self.num_breaches = reasons.count(BEGIN_MISSED)
        if fails:
            self.state = State.FAILED
        elif self.state is not State.FAILED:
            self.state = State.IDLE
        raised = False
        try:
            if self.manager.state is State.LOGGED:
                self.report.commit(step.acceptance(form))
            else:
                self.manager.end_unlogged(step.num_drafts)
        except NworError:
            raised = True
        restored = set()
        if step.is_logged:
            restored = set(self.protected) - {
                self.names[key] for key in self.seam.failed
            }
        keep_mask = step.keep_mask(restored)
        self.memory.write_step(step.index, payload, keep_mask)
        self._check_fallbacks(reasons, raised)
        self._check_state()
        if step.is_logged:
            self._check_calls("restore")
            self.totals.commits += 1
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
            if rows.special != ops.EMPTY:
                self.blocks.commit(request, rows.num_rows - rows.num_rejected)
            if len(request.text) >= MAX_TOKENS:
                self._remove(request)

    # -- checks --------------------------------------------------------------------

    def _check_fallbacks(self, reasons: list[str], raised: bool) -> None:
        self.fallbacks.update(reasons)
        if self.manager.fallbacks != self.fallbacks:
            raise Violation(
                "fallbacks",
                f"counted {dict(self.manager.fallbacks)}; happened "
                f"{dict(self.fallbacks)}",
            )
        if raised != (self.strict and bool(reasons)):
            raise Violation("strict", f"raised: {raised}, after {reasons}")
        logged = {reason: 1 for reason in self.fallbacks if not self.strict}
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

    def _check_calls(self, op: str) -> None:
        """One launch for each row of counters, and each protected layer in one."""
        calls = self.seam.calls[op]
        names = [[self.names[key] for key in call] for call in calls]
        covered = sorted(name for call in names for name in call)
        if len(calls) != len(self.counters) or covered != sorted(self.protected):
            raise Violation("launches", f"{op} ran for {names}")

    def _check_bytes(self, moment: str, rejected: Index | None = None) -> None:
        """rejected: where the bytes of restored slots lie."""
        memory = self.memory
        wrong = memory.real != memory.expected
        if wrong.any():
            kind = f"guarantee 2 ({moment})"
            if rejected is not None and wrong[rejected].any():
                kind = "guarantee 1 (a rejected slot is not as it was)"
            raise Violation(kind, self._where(wrong))
        wrong = (memory.real != memory.vanilla) & ~memory.dirty
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
        restored_slots = step.num_restorable
        for launch, keys in enumerate(self.seam.calls["restore"]):
            names = [self.names[key] for key in keys if key not in self.seam.failed]
            if step.is_logged and names:
                slot_bytes = sum(self.protected[name].slot_bytes for name in names)
                rejected = step.num_drafts - step.num_accepted
                self.counters[launch] += [
                    step.num_windows,
                    step.num_drafts,
                    step.num_accepted,
                    rejected,
                    restored_slots * slot_bytes,
                    *(0, 0, 0),
                ]
        found = self.manager.counters.tolist()
        if found != self.counters.tolist():
            raise Violation(
                "counters", f"found {found}; expected {self.counters.tolist()}"
            )

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
                "fallbacks in the metrics",
                f"{self.fallbacks_told} of {self.fallbacks}",
            )
        if failed:
            return  # whether a failed commit's counts arrive is left open
        is_counted = step.is_logged
        wanted = {
            "windows": step.num_windows * is_counted,
            "tokens_staged": step.num_drafts * is_counted,
            "committed_tokens": counted.num_accepted_tokens * is_counted,
            "dropped_drafts": step.num_dropped_drafts * is_counted,
            "restored_bytes": step.num_restorable * self.row_bytes * is_counted,
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
