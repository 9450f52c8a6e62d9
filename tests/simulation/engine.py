# SPDX-License-Identifier: Apache-2.0
"""The real manager around each step of a simulated runner, and what it has to do.

Checked in every step, over the whole allocation and its guard bytes:

    stage and begin change nothing of the cache but shadow blocks (and nothing beside
    the memory that the manager was given)
    1  rejected slots hold what they held when the step began
    2  every other byte is what vLLM wrote, and what vanilla vLLM would have, except
       where vanilla's last write was a rejected draft or a copy of one, or was lost
       with a step that failed
    3  through the tables a forward reads, at each committed position, what it would
       read in vanilla; the rows it writes are where the tables say; between stage and
       commit no byte of a real block at a row in a shadow block changes
    6  a planted fault turns exactly the launch that it hit into vanilla, is counted
       under its reason and logged once; under STRICT, and where kept rows are lost, it
       raises instead, which ends the engine
    7  each launch's counters, and the scheduler's identities through NworStats
    9  a begin that is left out is counted, and is a breach
    block tables and slots are vLLM's own; between stage and commit or abort each entry
    with a draft is its seat's shadow, and nothing else is replaced
    one launch for each table of layers; the manager's state and its invariants
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    Mask,
    Violation,
)
from tests.simulation.operations import FAULTS
from tests.simulation.step import MAX_TOKENS, Rows, Step, Table, slots_of
from vllm_nwor import ops
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import (
    DraftCommitManager,
    NworError,
    StagedGroup,
    State,
)
from vllm_nwor.metrics import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    COUNTERS,
    NO_SEAT,
    OVER_CAPACITY,
    STAGE_FAILED,
    STALE_LOG,
    STEP_FAILED,
    GroupInfo,
    NworStats,
)
from vllm_nwor.report import Report
from vllm_nwor.undo_log import num_bytes

LOG_GUARD = 0xA7

# Applied to each manager before its first step: tests plant bugs with it.
Breakage = Callable[[DraftCommitManager], None]


class Fault(NamedTuple):
    """name: one of FAULTS. call: of the op, modulo those there are. moment: 0: it
    raises before it did anything, 1: after half of its layers, 2: after all its work;
    what vLLM raises is seen by the hook before 2."""

    name: str
    call: int
    moment: int


class FaultyOps:
    """The functions of `vllm_nwor.ops`, of which one call can be made to raise: the
    manager's `ops` seam. calls: of each op, since `arm`."""

    NAMES: ClassVar = {
        "log_cache_slots": "log",
        "restore_rejected_drafts": "restore",
        "stage": "stage",
        "commit_draft_layer": "commit",
        "unstage": "unstage",
    }
    # By moment: nothing that an op may raise is special.
    ERRORS = (RuntimeError, MemoryError, OSError)

    def __init__(self) -> None:
        self.arm(Fault("none", 0, 0))

    def arm(self, fault: Fault) -> None:
        """A new step begins, with this fault or none."""
        self.fault = fault
        self.calls: Counter[str] = Counter()

    def num_done(self, num_layers: int) -> int:
        """Layers that the call that fails does."""
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


class Settings(NamedTuple):
    """strict: under VLLM_NWOR_STRICT=always. has_indices: V2's runner. capacity: of the
    undo log, in drafts."""

    strict: bool
    has_indices: bool
    capacity: int


def require_same(kind: str, found: Any, expected: Any) -> None:
    """Raises Violation."""
    is_array = isinstance(found, np.ndarray)
    if not (np.array_equal(found, expected) if is_array else found == expected):
        raise Violation(kind, f"found {found}; expected {expected}")


class Engine:
    """A manager with what counts for it, on the cache as it is.

    totals: what happens is added to it.
    launches: for each row of the manager's counters the group and the layers' names.
    tables, slots: the worker's, that stage patches; own: copies as vLLM filled them.
    state, counters, fallbacks: what the manager's should be. reported: what of
        the fallbacks came to the metrics. log_lines: warnings about them, by reason.
    seats: the step, the valid rows and their last entry that a commit left for a group
        and seat.
    """

    def __init__(
        self,
        cache: Cache,
        settings: Settings,
        totals: Counter[Any],
        breakage: Breakage | None,
    ) -> None:
        self.cache, self.groups, self.settings = cache, cache.groups, settings
        self.totals = totals
        self.log_lines: Counter[str] = Counter()
        self.seam = FaultyOps()
        self.regions = {
            gid: group.region for gid, group in enumerate(self.groups) if group.region
        }
        self.manager = self._make_manager()
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
        names = sorted(name for _, names in self.launches for name in names)
        require_same("layers", names, sorted(self.slot_bytes))
        self.tables = [
            np.zeros((MAX_REQUESTS, MAX_TOKENS // group.entry_tokens), np.int32)
            for group in self.groups
        ]
        self.slots = np.zeros((len(self.tables), 0), np.int64)
        self._note_own()
        seats = [region.num_seats for region in self.regions.values()]
        self.num_seats = min(seats, default=0)
        # V2 with a seat for each of its indices; else the seats are the batch rows.
        self.seats_are_indices = settings.has_indices and self.num_seats >= MAX_REQUESTS
        self.seats: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.num_steps = 0
        self.is_dead = False
        if breakage is not None:
            breakage(self.manager)
        self.report = Report([GroupInfo(0, "cow", "cow", "simulated")], self.manager)
        self.stats = NworStats()
        self.state = State.IDLE
        self.counters = self.manager.counters.numpy().copy()
        self.fallbacks: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()

    def _make_manager(self) -> DraftCommitManager:
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
        size = num_bytes(self.settings.capacity, sum(layers), len(groups), len(layers))
        size += sum(group.num_bytes for group in staged.values())
        self.memory = torch.full((size + 2 * GUARD_BYTES,), LOG_GUARD).byte()
        config = NworConfig(
            mode=Mode.STAGE if staged else Mode.COW,
            strictness=Strict.ALWAYS if self.settings.strict else Strict.STARTUP,
        )
        return DraftCommitManager(
            config,
            groups,
            self.settings.capacity,
            self.memory[GUARD_BYTES : GUARD_BYTES + size],
            self.seam,
            staged,
        )

    def _note_own(self) -> None:
        self.own = [table.copy() for table in self.tables]
        self.own_slots = self.slots.copy()

    # -- a step --------------------------------------------------------------------

    def run(
        self,
        batch: list[Rows],
        pads: int,
        begins: bool,
        payloads: np.random.Generator,
        form: int,
        fault: Fault,
        bound: int,
    ) -> bool:
        """The runner's step. pads, begins: as in Step. payloads: gives what the forward
        writes. form: of the sampler's output. bound: the host knows of so many drafts
        more.

        Returns whether the output reaches the scheduler; if NWOR raised, `is_dead`.
        """
        step = Step(batch, self.groups, pads, begins)
        payload = np.frombuffer(payloads.bytes(step.index.size), np.uint8)
        is_missed = fault.name == "missed"
        num_drafts = step.num_drafts and step.num_drafts + bound
        self.is_dead = self._begin(step, num_drafts, fault)
        if self.is_dead:
            return False
        if fault.name in ("forward", "sampler"):
            written = payload.size
            if fault.name == "forward":
                written = fault.call * payload.size // 6
            self._fail(step, payload, written, is_seen=fault.moment < 2)
        else:
            self.is_dead = self._commit(step, form, payload, is_missed)
        try:
            self.manager.check_state()
        except AssertionError as error:
            raise Violation("state", str(error)) from error
        return fault.name not in ("forward", "sampler") and not self.is_dead

    def _begin(self, step: Step, num_drafts: int, fault: Fault) -> bool:
        """Everything up to the forward; whether NWOR raised (STRICT)."""
        is_missed, stages = fault.name == "missed", fault.name != "all logged"
        reasons = [STALE_LOG] * (self.state in (State.LOGGED, State.STAGED))
        if self.state is not State.FAILED:
            self.state = State.IDLE
        self.num_steps += 1 + step.begins
        self.seam.arm(fault._replace(name="none"))
        if num_drafts and not is_missed and not (reasons and self.settings.strict):
            reasons += self._plan(step, num_drafts, fault, stages)
        if fault.name not in ("none", *self.seam.NAMES.values()):
            self.totals["faults", fault.name] += 1

        def enter() -> None:
            # What the hook does when a step of the runner starts.
            self.manager.start_step(keeps=not step.begins)
            self._check_tables(self.own, self.own_slots)
            for table, own in zip(self.tables, step.tables, strict=True):
                table[: len(own)] = own
            self.slots = step.own_slots.copy()
            self._note_own()
            if is_missed:
                self.manager.abort(STALE_LOG)
            elif num_drafts:
                windows = step.windows(
                    num_drafts,
                    torch.from_numpy(self.slots),
                    [torch.from_numpy(table) for table in self.tables],
                    self.settings.has_indices,
                    self.seats_are_indices,
                )
                if self.regions and stages:
                    self.manager.stage(windows)
                self.manager.begin(windows)

        raised = self._attempt(enter, reasons)
        if step.staged:
            self._check_calls("stage", step.staged)
        if step.logged:
            self._check_calls("log", step.logged)
        tables = self._staged_tables(step)
        self._check_tables(
            tables, step.slots(tables) if step.staged else self.own_slots
        )
        self._check_reads(step)
        self.check_bytes("begin changed the cache")
        for guard in (self.memory[:GUARD_BYTES], self.memory[-GUARD_BYTES:]):
            require_same("memory beside the log", set(guard.tolist()), {LOG_GUARD})
        return raised

    def _plan(
        self, step: Step, num_drafts: int, fault: Fault, stages: bool
    ) -> list[str]:
        """How a step with drafts has to run: sets its groups and the state, and arms
        the fault; returns why it runs otherwise than it should."""
        everything = {gid for gid, _ in self.launches}
        staged = set(self.regions) if stages else set()
        fits = num_drafts <= self.manager.capacity
        reasons: list[str] = []
        if staged and len(step.rows) > self.num_seats:
            reasons, staged = [NO_SEAT], set()
        elif staged != everything and not fits:
            staged = set()
        elif staged and fault.name == "stage":
            self._arm(fault, staged)
            reasons, staged = [STAGE_FAILED], set()
            if self.settings.strict:
                return reasons
        logged = everything - staged
        if not staged and not fits:
            reasons.append(OVER_CAPACITY)
            logged = set()
        elif logged and fault.name == "log":
            self._arm(fault, logged)
            reasons.append(BEGIN_FAILED)
            logged = set()
            if staged and self.settings.strict:  # the hook puts the tables back
                reasons.append(STEP_FAILED)
                self.state = State.IDLE
                return reasons
        elif logged and fault.name == "restore":
            self._arm(fault, logged)
        elif staged and fault.name == "commit":
            self._arm(fault, staged)
        self.state = State.LOGGED if logged else State.VANILLA
        if staged:
            self.state = State.STAGED
        step.staged, step.logged = staged, logged
        return reasons

    def _arm(self, fault: Fault, groups: set[int]) -> None:
        self.seam.arm(fault._replace(call=fault.call % self._num_launches(groups)))
        self.totals["faults", fault.name] += 1

    def _num_launches(self, groups: set[int]) -> int:
        return sum(gid in groups for gid, _ in self.launches)

    def _put_back(self) -> None:
        """What the hook does where an exception leaves the runner."""
        if self.manager.state is State.STAGED:
            with contextlib.suppress(NworError):
                self.manager.abort(STEP_FAILED)

    def _fail(self, step: Step, payload: Bytes, written: int, is_seen: bool) -> None:
        """The forward or the sampler raises; is_seen: while a hook is around it."""
        cache, at = self.cache, step.index[:written]
        cache.real[step.index_by(self.slots)[:written]] = payload[:written]
        cache.write_step(at, payload[:written], ~step.staged_mask()[:written])
        if is_seen and self.state is State.STAGED:
            self.state = State.IDLE
            self._attempt(self._put_back, [STEP_FAILED], raises=False)
            self._check_tables(self.own, self.own_slots)
        require_same("state", self.manager.state, self.state)
        self.check_bytes("a failed step")

    def _commit(self, step: Step, form: int, payload: Bytes, is_missed: bool) -> bool:
        """The forward, sampling and commit; whether NWOR raised."""
        self.cache.real[step.index_by(self.slots)] = payload
        if step.staged:
            self._check_real_blocks(step, payload)
        fails = self.seam.fault.name in ("restore", "commit")
        is_lost = self.seam.fault.name == "commit"
        is_missed = is_missed and step.num_drafts > 0
        reasons = [COMMIT_FAILED] * fails + [BEGIN_MISSED] * is_missed
        if fails:
            self.state = State.FAILED
        elif self.state is not State.FAILED:
            self.state = State.IDLE
        failed = list(self._failed_layers(step))
        keep_mask = step.keep_mask(failed)
        self.cache.write_step(step.index, payload, keep_mask)

        def end() -> None:
            if self.manager.is_open:
                self.manager.commit(step.acceptance(form))
            else:
                self.manager.end_unlogged(step.num_drafts)

        raised = self._attempt(end, reasons, raises=True if is_lost else None)
        self._check_tables(self.own, self.own_slots)
        if not is_lost:
            self._check_calls("commit", step.staged)
            self._check_calls("restore", step.logged)
        if step.staged or step.logged:
            self.totals["commits"] += 1
            self.totals["staged_steps"] += bool(step.staged)
            self.totals["steps_beside"] += bool(step.staged and step.logged)
            self.totals["windows"] += step.num_windows
            self.totals["drafts"] += step.num_drafts
            self.totals["rejected"] += step.num_rejected
        self.check_bytes("commit", step.index[~keep_mask])
        rose = self._expected_counts(step, failed)
        self.counters += rose
        require_same("counters", self.manager.counters.numpy(), self.counters)
        self._note_seats(step)
        if not raised:
            self._check_report(step, None if fails else rose.sum(axis=0), is_missed)
        return raised

    def _failed_layers(self, step: Step) -> Iterator[str]:
        """The layers for which this commit will do nothing: a restore that fails keeps
        no other from it, a staged commit ends at once."""
        fault = self.seam.fault
        if fault.name not in ("restore", "commit"):
            return
        groups = step.logged if fault.name == "restore" else step.staged
        own = [names for gid, names in self.launches if gid in groups]
        yield from own[fault.call][self.seam.num_done(len(own[fault.call])) :]
        if fault.name == "commit":
            for names in own[fault.call + 1 :]:
                yield from names
            for gid in step.logged:
                yield from self.groups[gid].protected

    def _windows(self, step: Step, gid: int) -> Iterator[tuple[int, Rows, int, int]]:
        """Of those in shadow blocks: batch row, rows, first entry, seat."""
        for row, (rows, entry) in enumerate(
            zip(step.rows, step.first_entries(gid).tolist(), strict=True)
        ):
            if rows.is_window:
                seat = rows.request.index if self.seats_are_indices else row
                yield row, rows, entry, seat

    def _staged_tables(self, step: Step) -> list[Table]:
        """What stage puts in the tables, and, as step.num_copied, how many committed
        rows it has to copy: those of a block with drafts, unless the seat has them from
        the step before."""
        tables = [table.copy() for table in self.own]
        for gid in step.staged:
            group, region = self.groups[gid], self.regions[gid]
            tokens = group.entry_tokens
            per_block = group.block_size // tokens
            span = region.blocks_per_seat * per_block
            step.num_copied[gid] = 0
            for row, rows, entry, seat in self._windows(step, gid):
                entries = np.arange(entry, -(-rows.end // tokens))
                first_shadow = region.first_block * per_block + seat * span
                tables[gid][row, entries] = first_shadow + entries % span
                first = rows.request.num_computed
                last = int(self.own[gid][row, (first - 1) // tokens])
                valid = self.num_steps - 1, first, last
                is_kept = self.seats.pop((gid, seat), None) == valid
                if first > entry * tokens:
                    self.totals["prefixes", "kept" if is_kept else "copied"] += 1
                    step.num_copied[gid] += (not is_kept) * (first - entry * tokens)
        return tables

    def _note_seats(self, step: Step) -> None:
        """After a commit."""
        for gid in step.staged:
            tokens = self.groups[gid].entry_tokens
            for row, rows, entry, seat in self._windows(step, gid):
                valid = rows.end - rows.num_rejected
                if valid > entry * tokens:
                    last = int(self.own[gid][row, (valid - 1) // tokens])
                    self.seats[gid, seat] = self.num_steps, valid, last

    # -- checks --------------------------------------------------------------------

    def _attempt(
        self, call: Callable[[], None], reasons: list[str], raises: bool | None = None
    ) -> bool:
        """Calls what must count these fallbacks, log the first of each, and leave the
        expected state. raises: None: under STRICT; True: tokens are lost, the exception
        is the only sign. Returns whether there was one."""
        raised = False
        try:
            call()
        except NworError:
            raised = True
            self._put_back()
        self.fallbacks.update(reasons)
        self.totals.update(("fallbacks", reason) for reason in reasons)
        require_same("fallbacks", self.manager.fallbacks, self.fallbacks)
        strict = self.settings.strict
        if raises is None:
            raises = strict and bool(set(reasons) - {NO_SEAT})
        require_same("strict", raised, raises)
        logged = {
            reason for reason in self.fallbacks if reason == NO_SEAT or not strict
        }
        if not (raised and COMMIT_FAILED in reasons):
            require_same("log lines", self.log_lines, Counter(logged))
        require_same("state", self.manager.state, self.state)
        return raised

    def _check_calls(self, op: str, groups: set[int]) -> None:
        """As many as there are tables of layers in these groups."""
        expected = self._num_launches(groups)
        require_same(f"launches ({op})", self.seam.calls[op], expected)

    def _check_tables(self, tables: Sequence[Table], slots: Index) -> None:
        for found, expected in zip(self.tables, tables, strict=True):
            require_same("tables", found, expected)
        require_same("slots", self.slots, slots)

    def _check_reads(self, step: Step) -> None:
        """What a forward reads through the tables of staged groups."""
        sizes = [rows.request.num_computed for rows in step.rows]
        row = np.repeat(np.arange(len(sizes)), sizes)
        position = np.concatenate([np.arange(size) for size in sizes])
        for gid in step.staged:
            group, tokens = self.groups[gid], self.groups[gid].entry_tokens
            by_table = slots_of(self.tables[gid], row, position, tokens)
            by_own = slots_of(self.own[gid], row, position, tokens)
            read = self.cache.real[group.index[by_table]]
            vanilla = self.cache.vanilla[group.index[by_own]]
            wrong = ((read != vanilla) & group.is_protected).any(axis=1)
            if wrong.any():
                raise Violation(
                    "guarantee 3 (a forward reads other bytes)",
                    f"group {gid}, rows {row[wrong]}, positions {position[wrong]}",
                )

    def _check_real_blocks(self, step: Step, payload: Bytes) -> None:
        """Between forward and commit: what is in shadow blocks left real ones alone."""
        in_place = ~step.staged_mask()
        expected = self.cache.expected.copy()
        expected[step.index[in_place]] = payload[in_place]
        self._require_none(
            "guarantee 3 (a real block changed before commit)",
            self.cache.real != expected,
        )

    def check_bytes(self, moment: str, rejected: Index | None = None) -> None:
        """rejected: where the bytes of restored slots lie."""
        cache = self.cache
        wrong = cache.real != cache.expected
        kind = f"guarantee 2 ({moment})"
        if rejected is not None and (wrong & ~cache.is_shadow)[rejected].any():
            kind = "guarantee 1 (a rejected slot is not as it was)"
        self._require_none(kind, wrong)
        wrong = (cache.real != cache.vanilla) & ~cache.dirty
        self._require_none("guarantee 2 (not as vanilla vLLM)", wrong)

    def _require_none(self, kind: str, wrong: Mask) -> None:
        """Beside shadow blocks, which may hold anything."""
        wrong = wrong & ~self.cache.is_shadow
        if wrong.any():
            raise Violation(kind, self.cache.where(wrong))

    def _expected_counts(self, step: Step, failed: list[str]) -> Index:
        """Exactly what each launch that does its work has to add."""
        rose = np.zeros_like(self.counters)
        accepted = step.num_drafts - step.num_rejected
        windows = [step.num_windows, step.num_drafts, accepted, step.num_rejected]
        for launch, (gid, names) in enumerate(self.launches):
            done = [self.slot_bytes[name] for name in names if name not in failed]
            if done and gid in step.logged:
                rose[launch] = [*windows, step.num_restorable * sum(done), 0, 0, 0]
            elif done and gid in step.staged:
                rows = np.array([step.num_copied[gid], step.num_committed(gid)])
                rose[launch] = [*windows, 0, step.num_invalid, *rows * sum(done)]
        return rose

    def _check_report(self, step: Step, rose: Index | None, is_missed: bool) -> None:
        """What would be in the metrics, from worker and scheduler together. rose: sums
        over the launches, None after a failed commit, which goes without counts."""
        payload = self.report.take_payload()
        counted, scheduled = step.counted_and_scheduled()
        if payload is not None:
            self.stats.add_step(payload, counted, scheduled)
        report, self.stats.report = self.stats.report, {}
        self.reported.update(report.get("fallbacks", {}))
        require_same("fallbacks in the metrics", self.reported, self.fallbacks)
        counts = report.get("counts", [0] * len(COUNTERS))
        found = dict(zip(COUNTERS, counts, strict=True))
        parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
        total = sum(found[part] for part in parts)
        require_same("guarantee 7 (sum)", total, found["tokens_staged"])
        if rose is None:
            require_same("counts of a failed commit", counts, [0] * len(COUNTERS))
            return
        dropped = sum(rows.num_drafts for rows in step.rows if rows.dropped)
        is_counted = bool(step.staged or step.logged)
        accepted = counted.num_accepted_tokens
        tokens = [step.num_windows, step.num_drafts, accepted]
        tokens += [step.num_drafts - accepted - dropped, dropped]
        of_bytes = [rose[4], *rose[6:8], rose[5] + is_missed]
        expected = [number * is_counted for number in tokens] + of_bytes
        require_same("guarantee 7", counts, expected)


assert set(FaultyOps.NAMES.values()) - {"unstage"} < set(FAULTS)
