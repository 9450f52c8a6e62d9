# SPDX-License-Identifier: Apache-2.0
"""The real manager around each step of a simulated runner, and the checks.

Checked in every step over the whole allocation and its guard bytes, by guarantee:

    1  rejected slots hold their bytes from before the step
    2  every other byte is plain vLLM's, except where its last write was a rejected
       draft or a copy of one, or was lost with a failed step
    3  through the block tables a forward reads plain vLLM's bytes at each committed
       position; between stage and commit no real slot of a row in a shadow block
       changes
    6  an injected fault affects only the launch that it hit, is counted by its reason
       and logged once; in strict mode, and if kept rows are lost, it raises instead
    7  each launch's counters, and the scheduler's identities through NworStats
    9  a begin that is left out is counted, and is a breach

Also: stage and begin change nothing but shadow blocks and the manager's memory; block
tables and slots are vLLM's own, except that between stage and commit each entry with a
draft is its seat's shadow; one launch per layer table; the manager's state and
invariants.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from tests.helpers import seam
from tests.simulation.cache import (
    GUARD_BYTES,
    MAX_REQUESTS,
    Bytes,
    Cache,
    Index,
    Violation,
)
from tests.simulation.step import MAX_TOKENS, Rows, Step, Table, slots_of
from vllm_nwor import metrics, ops
from vllm_nwor import step as nwor
from vllm_nwor.base.errors import NworError
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.layout.regions import StagedGroup
from vllm_nwor.transaction.counters import Report
from vllm_nwor.transaction.draft_manager import DraftCommitManager
from vllm_nwor.transaction.shadow_blocks import seats_num_bytes
from vllm_nwor.transaction.states import State
from vllm_nwor.transaction.undo_log import num_bytes

LOG_GUARD = 0xA7
# Faults of a step: none; an op raises; vLLM's forward or sampler raises; begin is not
# called; all groups are logged.
FAULTS = (
    *("none", "log", "restore", "stage", "commit"),
    *("forward", "sampler", "missed", "all logged"),
)


class Fault(NamedTuple):
    """name: one of FAULTS. call: of the op, modulo their number. moment: an op raises
    before its work (0), after half of its layers (1) or after all of them (2); a hook
    sees vLLM's exception unless it is 2."""

    name: str
    call: int
    moment: int


class FaultyOps:
    """The functions of `vllm_nwor.ops`, one call of which can be made to raise. calls:
    of each op since `arm`."""

    NAMES: ClassVar = {
        "log_cache_slots": "log",
        "restore_rejected_drafts": "restore",
        "stage": "stage",
        "commit_draft_layer": "commit",
        "unstage": "unstage",
    }
    # By moment: any exception of an op is handled.
    ERRORS = (RuntimeError, MemoryError, OSError)

    def __init__(self) -> None:
        ops.load()
        self.arm(Fault("none", 0, 0))

    def arm(self, fault: Fault) -> None:
        """Begins a step with this fault."""
        self.fault = fault
        self.calls: Counter[str] = Counter()

    def num_done(self, num_layers: int) -> int:
        """How many layers the failing call processes."""
        return (0, num_layers // 2, num_layers)[self.fault.moment]

    def __getattr__(self, name: str) -> Any:
        op = getattr(ops, name)
        return partial(self._run, self.NAMES[name], op) if name in self.NAMES else op

    def LoggedLayers(self, *made_of: Any) -> seam.LoggedLayers:
        return seam.LoggedLayers(self, *made_of)

    def StagedLayers(self, *made_of: Any) -> seam.StagedLayers:
        return seam.StagedLayers(self, *made_of)

    def _run(
        self, name: str, op: Callable[..., None], table: torch.Tensor, *args: Any
    ) -> None:
        fails = self.fault[:2] == (name, self.calls[name])
        self.calls[name] += 1
        done = self.num_done(len(table)) if fails else len(table)
        if done:
            op(table[:done], *args)
        if fails:
            raise self.ERRORS[self.fault.moment](f"planted: {self.fault}")


def require_same(kind: str, found: Any, expected: Any) -> None:
    """Raises Violation."""
    is_array = isinstance(found, np.ndarray)
    if not (np.array_equal(found, expected) if is_array else found == expected):
        raise Violation(kind, f"found {found}; expected {expected}")


class Engine:
    """A manager and its expected state.

    planted: called with the manager before its first step. strict:
        VLLM_NWOR_STRICT=always. has_indices: V2's runner. capacity: of the undo log, in
        drafts.
    totals: counts events.
    launches: for each row of the manager's counters the group and the layers' names.
    tables, slots: the worker's, which stage patches; own: copies of vLLM's values.
    state, counters, fallbacks: the manager's expected ones. reported: fallbacks in the
        metrics. log_lines: warnings about fallbacks, by reason.
    """

    def __init__(
        self,
        cache: Cache,
        totals: Counter[str],
        planted: Callable[[DraftCommitManager], None] | None,
        strict: bool,
        has_indices: bool,
        capacity: int,
    ) -> None:
        self.cache, self.groups, self.totals = cache, cache.groups, totals
        self.strict, self.has_indices = strict, has_indices
        self.seam = FaultyOps()
        self.regions = {g: group.region for g, group in enumerate(self.groups)}
        self.regions = {g: region for g, region in self.regions.items() if region}
        self.manager = self._make_manager(capacity)
        self.launches = [
            (log.group_id, part.names)
            for log in self.manager.groups
            for part in log.tables
        ]
        self.slot_bytes = {
            name: group.layers[name].shape[1]
            for group in self.groups
            for name in group.protected
        }
        self.tables = [
            np.zeros((MAX_REQUESTS, MAX_TOKENS // group.entry_tokens), np.int32)
            for group in self.groups
        ]
        self.slots = np.zeros((len(self.tables), 0), np.int64)
        self._note_own()
        self.num_seats = min((r.num_seats for r in self.regions.values()), default=0)
        # The runner's step; for each group and seat what shadow.h's rule for reusing
        # rows goes by: the step in which it was staged last, the end of the rows kept
        # then (-1 before commit), and the real entry of the last one (0: not staged).
        self.step = 0
        self.saved: Any = defaultdict(lambda: (0, -1, 0))
        self.is_dead = False
        if planted is not None:
            planted(self.manager)
        infos = [metrics.GroupInfo(0, "cow", "cow", "simulated")]
        self.report = Report(infos, self.manager)
        # Of the step being made; indices of all requests in the runner's states.
        self.windows: nwor.Step | None = None
        self.live: Mapping[str, int] = {}
        self.stats = metrics.NworStats()
        self.state = State.IDLE
        self.counters = self.manager.counters.numpy().copy()
        self.fallbacks: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        self.log_lines: Counter[str] = Counter()

    def _make_manager(self, capacity: int) -> DraftCommitManager:
        groups = [
            (gid, list(group.protected.values()))
            for gid, group in enumerate(self.groups)
            if group.protected
        ]
        layers = [layer.layout.slot_bytes for _, group in groups for layer in group]
        staged = {
            gid: StagedGroup(region, self.groups[gid].entry_tokens)
            for gid, region in self.regions.items()
        }
        size = num_bytes(capacity, sum(layers), len(groups), len(layers))
        size += sum(group.num_bytes for group in staged.values())
        size += seats_num_bytes(MAX_REQUESTS)
        self.memory = torch.full((size + 2 * GUARD_BYTES,), LOG_GUARD).byte()
        config = NworConfig(
            mode=Mode.STAGE if staged else Mode.COW,
            strictness=Strict.ALWAYS if self.strict else Strict.STARTUP,
        )
        storage = self.memory[GUARD_BYTES : GUARD_BYTES + size]
        return DraftCommitManager(
            *(config, groups, capacity, storage, self.seam, staged),
            num_states=MAX_REQUESTS if self.has_indices else 0,
        )

    def _note_own(self) -> None:
        self.own = [table.copy() for table in self.tables]
        self.own_slots = self.slots.copy()

    # -- a step --------------------------------------------------------------------

    def run(
        self,
        batch: list[Rows],
        begins: bool,
        fault: Fault,
        pads: int,
        bound: int,
        form: int,
        payloads: np.random.Generator,
        live: Mapping[str, int],
    ) -> bool:
        """One step. begins, pads, bound: as in Step. form: of the sampler's output.
        payloads: the bytes of the forward. live: all requests' state indices. Returns
        whether the output reaches the scheduler; sets `is_dead` if NWOR raised.
        """
        seats = self._seats(batch, live)
        step = Step(batch, self.groups, pads, begins, bound, seats)
        payload = np.frombuffer(payloads.bytes(step.index.size), np.uint8)
        self.is_dead = self._begin(step, fault)
        if self.is_dead:
            return False
        ends = fault.name not in ("forward", "sampler")
        if ends:
            self.is_dead = self._commit(step, form, payload, fault.name == "missed")
        else:
            self._fail(step, payload, fault)
        try:
            self.manager.check_state()
        except AssertionError as error:
            raise Violation("state", str(error)) from error
        return ends and not self.is_dead

    def _begin(self, step: Step, fault: Fault) -> bool:
        """Everything before the forward; whether NWOR raised."""
        is_missed = fault.name == "missed"
        reasons = [metrics.STALE_LOG] * self.state.is_open
        if self.state is not State.FAILED:
            self.state = State.IDLE
        # Earlier rows of a request that begins with drafts had no step of their own.
        self.step += 1 + step.begins
        self.seam.arm(fault._replace(name="none"))
        if step.num_known and not is_missed and not (reasons and self.strict):
            reasons += self._plan(step, fault)
        if fault.name not in ("none", *self.seam.NAMES.values()):
            self.totals[f"faults/{fault.name}"] += 1

        def enter() -> None:
            # As the hook at the start of a step.
            scheduled: Any = SimpleNamespace(has_drafts_of_new=lambda: step.begins)
            self.manager.start_step(scheduled)
            self.windows = None
            self._check_tables(self.own, self.own_slots)
            for table, own in zip(self.tables, step.tables, strict=True):
                table[: len(own)] = own
            self.slots = step.own_slots.copy()
            self._note_own()
            if is_missed:
                self.manager.abort(metrics.STALE_LOG)
            elif step.num_known:
                how = self.has_indices, self.live
                self.windows = windows = step.windows(self.slots, self.tables, *how)
                if self.regions and fault.name != "all logged":
                    self.manager.stage(windows)
                if windows.awaits_forward:
                    self.manager.begin(windows)

        raised = self._attempt(enter, reasons)
        self._check_calls("stage", step.staged)
        self._check_calls("log", step.logged)
        tables = self._staged_tables(step)
        slots = step.slots(tables) if step.staged else self.own_slots
        self._check_tables(tables, slots)
        self._check_reads(step)
        self.check_bytes("guarantee 2 (begin changed the cache)")
        for guard in (self.memory[:GUARD_BYTES], self.memory[-GUARD_BYTES:]):
            require_same("memory around the log", set(guard.tolist()), {LOG_GUARD})
        return raised

    def _plan(self, step: Step, fault: Fault) -> list[str]:
        """Sets the expected groups and state of a step with drafts, and arms the fault;
        returns the expected fallbacks."""
        everything, staged = {gid for gid, _ in self.launches}, set(self.regions)
        if fault.name == "all logged":
            staged = set()
        fits = step.num_known <= self.manager.capacity
        reasons: list[str] = []
        lacks_seats = self._lacks_seats(step)
        if staged and not fits and (lacks_seats or staged != everything):
            staged = set()
        elif self._arm(fault, "stage", staged):
            reasons, staged = [metrics.STAGE_FAILED], set()
            if self.strict:
                return reasons
        logged = everything if lacks_seats else everything - staged
        if not staged and not fits:
            reasons.append(metrics.OVER_CAPACITY)
            logged = set()
        elif self._arm(fault, "log", logged):
            reasons.append(metrics.BEGIN_FAILED)
            logged = set()
            if staged and self.strict:  # the hook restores the tables
                reasons.append(metrics.STEP_FAILED)
                self.state = State.IDLE
                return reasons
        self._arm(fault, "restore", logged)
        self._arm(fault, "commit", staged)
        self.state = State.LOGGED if logged else State.PLAIN
        if staged:
            self.state = State.STAGED
        step.staged, step.logged = staged, logged
        return reasons

    def _arm(self, fault: Fault, op: str, groups: set[int]) -> bool:
        """Arms `fault` if it is this op's, which is launched for these groups."""
        if fault.name != op or not groups:
            return False
        self.seam.arm(fault._replace(call=fault.call % self._num_launches(groups)))
        self.totals[f"faults/{fault.name}"] += 1
        return True

    def _num_launches(self, groups: set[int]) -> int:
        return sum(gid in groups for gid, _ in self.launches)

    def _put_back(self) -> None:
        """As the hook when an exception leaves the runner."""
        if self.manager.state is State.STAGED:
            with contextlib.suppress(NworError):
                self.manager.abort(metrics.STEP_FAILED)

    def _fail(self, step: Step, payload: Bytes, fault: Fault) -> None:
        """The forward or the sampler raises; a hook sees it unless the moment is 2."""
        written = payload.size
        if fault.name == "forward":
            written = fault.call * payload.size // 6
        at, payload = step.index[:written], payload[:written]
        self.cache.real[step.index_by(self.slots)[:written]] = payload
        self.cache.write_step(at, payload, ~step.staged_mask()[:written])
        if fault.moment < 2 and self.state is State.STAGED:
            self.state = State.IDLE
            self._attempt(self._put_back, [metrics.STEP_FAILED], raises=False)
            self._check_tables(self.own, self.own_slots)
        require_same("state", self.manager.state, self.state)
        self.check_bytes("guarantee 2 (a failed step)")

    def _commit(self, step: Step, form: int, payload: Bytes, is_missed: bool) -> bool:
        """The forward, sampling and commit; whether NWOR raised."""
        index, expected = step.index, self.cache.expected
        before = expected[index]
        self.cache.real[step.index_by(self.slots)] = payload
        self.cache.write_step(index, payload, ~step.staged_mask())
        self.check_bytes("guarantee 3 (a real block changed before commit)")
        fails = self.seam.fault.name in ("restore", "commit")
        is_lost = self.seam.fault.name == "commit"
        is_missed = is_missed and step.num_drafts > 0
        reasons = [metrics.COMMIT_FAILED] * fails + [metrics.BEGIN_MISSED] * is_missed
        if fails:
            self.state = State.FAILED
        elif self.state is not State.FAILED:
            self.state = State.IDLE
        failed = self._failed_layers(step)
        keep_mask = step.keep_mask(*failed)
        expected[index] = before
        self.cache.write_step(index, payload, keep_mask)

        def end() -> None:
            if self.windows is not None:
                self.manager.commit(self.windows, step.acceptance(form))
            elif step.num_drafts:
                self.manager.miss_begin(f"{step.num_drafts} drafts")

        raised = self._attempt(end, reasons, raises=True if is_lost else None)
        self._check_tables(self.own, self.own_slots)
        if not is_lost:
            self._check_calls("commit", step.staged)
            self._check_calls("restore", step.logged)
        if step.staged or step.logged:
            self.totals["commits"] += 1
            self.totals["staged_steps"] += bool(step.staged)
            self.totals["steps_of_both"] += bool(step.staged and step.logged)
            self.totals["groups_of_both"] += bool(step.staged & step.logged)
            self.totals["windows"] += step.num_windows
            self.totals["drafts"] += step.num_drafts
            self.totals["rejected"] += step.num_rejected
        self.check_bytes("guarantee 2 (commit)", index[~keep_mask])
        rose = self._expected_counts(step, *failed)
        self.counters += rose
        require_same("counters", self.manager.counters.numpy(), self.counters)
        for gid in step.staged:
            for row, rows, entry, seat in step.windows_of(gid):
                tokens = self.groups[gid].entry_tokens
                valid = rows.end - rows.num_rejected
                last = int(self.own[gid][row, (valid - 1) // tokens])
                is_staged = valid > entry * tokens
                self.saved[gid, seat] = self.step, valid, last * is_staged
        if not raised:
            is_whole = not fails and not self._is_partly_plain(step)
            of_row = rose[0, :5].tolist() + rose[:, 5:].sum(axis=0).tolist()
            self._check_report(step, of_row if is_whole else None, is_missed)
        return raised

    def _is_partly_plain(self, step: Step) -> bool:
        """Whether windows without a seat are not logged."""
        return bool(step.staged) and self._lacks_seats(step) and not step.logged

    def _failed_layers(self, step: Step) -> tuple[list[str], list[str]]:
        """The layers that this commit does not copy from shadow blocks, and those that
        it does not restore: after a failed restore the others still run, after a failed
        staged commit they do not."""
        fault = self.seam.fault
        if fault.name not in ("restore", "commit"):
            return [], []
        groups = step.logged if fault.name == "restore" else step.staged
        own = [names for gid, names in self.launches if gid in groups]
        done, *after = own[fault.call :]
        failed = [*done[self.seam.num_done(len(done)) :]]
        if fault.name == "restore":
            return [], failed
        logged = [name for gid in step.logged for name in self.groups[gid].protected]
        return [*failed, *(name for names in after for name in names)], logged

    def _seats(
        self, batch: Sequence[Rows], live: Mapping[str, int]
    ) -> list[int | None]:
        """The seat of each row: on V1 its place in the batch, on V2 by its state index,
        assigned in steps with drafts."""
        self.live = live
        shadow, seats = self.manager.shadow, [*range(len(batch))]
        if self.has_indices:
            seats = [rows.request.index for rows in batch]
        if shadow is not None and shadow.seats is not None:
            # Of a copy: the last step's tables may still have to be put back.
            assigned = copy.deepcopy(shadow.seats)
            if any(rows.num_drafts for rows in batch):
                assigned.lack(np.array(seats), live)
            seats = assigned.of_state[seats].tolist()
        return [seat if 0 <= seat < self.num_seats else None for seat in seats]

    def _lacks_seats(self, step: Step) -> bool:
        """As in the hooks; V2's ignores whether a request has drafts."""
        return bool(self.regions) and any(
            seat is None and (rows.num_drafts > 0 or self.has_indices)
            for rows, seat in zip(step.rows, step.seats, strict=True)
        )

    def _staged_tables(self, step: Step) -> list[Table]:
        """The block tables after stage. Sets step.num_copied: the committed rows in
        blocks with drafts that the seat does not have from the previous step."""
        tables = [table.copy() for table in self.own]
        for gid in step.staged:
            group, region = self.groups[gid], self.regions[gid]
            tokens = group.entry_tokens
            per_block = group.block_size // tokens
            span = region.blocks_per_seat * per_block
            step.num_copied[gid] = 0
            for row, rows, entry, seat in step.windows_of(gid):
                entries = np.arange(entry, -(-rows.end // tokens))
                first_shadow = region.first_block * per_block + seat * span
                tables[gid][row, entries] = first_shadow + entries % span
                first = rows.request.num_computed
                last = int(self.own[gid][row, (first - 1) // tokens])
                counts = self.saved[gid, seat] == (self.step - 1, first, last)
                self.saved[gid, seat] = self.step, -1, 0
                if first > entry * tokens:
                    self.totals["prefixes/kept" if counts else "prefixes/copied"] += 1
                    step.num_copied[gid] += (not counts) * (first - entry * tokens)
        return tables

    # -- checks --------------------------------------------------------------------

    def _attempt(
        self, call: Callable[[], None], reasons: list[str], raises: bool | None = None
    ) -> bool:
        """Runs `call`, which must count these fallbacks, log the first of each, and
        leave the expected state. raises: None: in strict mode; True: always, since
        tokens are lost. Returns whether it raised."""
        raised = False
        try:
            call()
        except NworError:
            raised = True
            self._put_back()
        self.fallbacks.update(reasons)
        self.totals.update(f"fallbacks/{reason}" for reason in reasons)
        require_same("fallbacks", self.manager.fallbacks, self.fallbacks)
        if raises is None:
            raises = self.strict and bool(reasons)
        require_same("strict", raised, raises)
        logged = () if self.strict else self.fallbacks.keys()
        if not (raised and metrics.COMMIT_FAILED in reasons):
            require_same("log lines", self.log_lines, Counter(logged))
        require_same("state", self.manager.state, self.state)
        return raised

    def _check_calls(self, op: str, groups: set[int]) -> None:
        """One call per layer table of these groups."""
        if groups:  # or else the op may have been tried
            expected = self._num_launches(groups)
            require_same(f"launches ({op})", self.seam.calls[op], expected)

    def _check_tables(self, tables: Sequence[Table], slots: Index) -> None:
        for found, expected in zip(self.tables, tables, strict=True):
            require_same("tables", found, expected)
        require_same("slots", self.slots, slots)

    def _check_reads(self, step: Step) -> None:
        """Compares the bytes that a forward reads through staged groups' tables."""
        sizes = [rows.request.num_computed for rows in step.rows]
        row = np.repeat(np.arange(len(sizes)), sizes)
        position = np.concatenate([np.arange(size) for size in sizes])
        for gid in step.staged:
            group, tokens = self.groups[gid], self.groups[gid].entry_tokens
            by_table = slots_of(self.tables[gid], row, position, tokens)
            at = group.index[slots_of(self.own[gid], row, position, tokens)]
            differs = self.cache.real[group.index[by_table]] != self.cache.expected[at]
            wrong = ((differs | self.cache.dirty[at]) & group.is_protected).any(axis=1)
            if wrong.any():
                raise Violation(
                    "guarantee 3 (a forward reads other bytes)",
                    f"group {gid}, rows {row[wrong]}, positions {position[wrong]}",
                )

    def check_bytes(self, kind: str, rejected: Index | None = None) -> None:
        """Compares all bytes outside shadow blocks. rejected: places of restored
        slots."""
        wrong = (self.cache.real != self.cache.expected) & ~self.cache.is_shadow
        if rejected is not None and wrong[rejected].any():
            kind = "guarantee 1 (a rejected slot is not as it was)"
        if wrong.any():
            raise Violation(kind, self.cache.where(wrong))

    def _expected_counts(
        self, step: Step, not_committed: list[str], not_restored: list[str]
    ) -> Index:
        """The exact increments of each launch's counters."""
        rose = np.zeros_like(self.counters)
        for launch, (gid, names) in enumerate(self.launches):
            is_staged = step.can_stage & (gid in step.staged)
            num_shadow = int((is_staged & (step.drafts > 0)).sum())
            bytes_of = self.slot_bytes
            done = sum(bytes_of[name] for name in names if name not in not_committed)
            if done and gid in step.staged:
                # Windows that are not staged are the log's, if there is one.
                is_alone = not self._lacks_seats(step)
                counts, _ = step.counts(is_staged | is_alone)
                rows = step.num_copied[gid] * done, step.num_kept[gid] * done
                invalid = step.num_invalid * is_alone
                rose[launch] += np.array([*counts, num_shadow, 0, invalid, *rows])
            done = sum(bytes_of[name] for name in names if name not in not_restored)
            if done and gid in step.logged:
                counts, num_slots = step.counts(~is_staged)
                rose[launch] += np.array([*counts, 0, num_slots * done, 0, 0, 0])
        return rose

    def _check_report(
        self, step: Step, rose: list[int] | None, is_missed: bool
    ) -> None:
        """Compares the step's report of worker and scheduler. rose: increments of the
        counters, None if they are unavailable for this step."""
        payload = self.report.take_payload()
        counted, scheduled = step.counted_and_scheduled()
        if payload is not None:
            self.stats.add_step(payload, counted, scheduled)
        report, self.stats.report = self.stats.report, {}
        self.reported.update(report.get("fallbacks", {}))
        require_same("fallbacks in the metrics", self.reported, self.fallbacks)
        expected = nothing = [0] * len(metrics.SERIES)
        if rose is not None:
            dropped = sum(rows.num_drafts for rows in step.rows if rows.dropped)
            is_counted = bool(step.staged or step.logged)
            accepted = counted.num_accepted_tokens
            tokens = [rose[4], step.num_windows - rose[4], step.num_drafts, accepted]
            tokens += [step.num_drafts - accepted - dropped, dropped]
            of_bytes = [rose[5], *rose[7:9], rose[6] + is_missed]
            expected = [number * is_counted for number in tokens] + of_bytes
        require_same("guarantee 7", report.get("counts", nothing), expected)


assert set(FaultyOps.NAMES.values()) - {"unstage"} < set(FAULTS)
