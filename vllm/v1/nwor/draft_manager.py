# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager: the transaction around one verification step.

What commit guarantees: after it, every byte at a rejected draft's slot, in every layer
of the manager's groups, is what it was right before the forward; accepted drafts are
what vLLM wrote; and of a request's blocks we write only those slots (undo log), or
those of the kept rows (shadow blocks). Copies are of bytes, blind to their type. There
are two ways to it, and each KV-cache group has one:

    undo log       begin saves the old bytes of the drafts' slots, commit restores those
                   of the rejected ones (undo_log.py)
    shadow blocks  stage, which is their begin, has the drafts verified in private
                   blocks, commit copies the kept rows to the request's own
                   (shadow_blocks.py)

A staged group has shadow blocks for so many requests (seats). The windows of those
that have none are logged in the same step. If stage fails, the whole step is logged.
Under VLLM_NWOR_ON_REJECT=poison the log has large numbers instead of old bytes.

States:

    IDLE    -stage->  STAGED   shadow blocks are in the tables of the staged groups,
                               for the windows that have a seat; begin then logs all
                               other drafts
            -begin->  LOGGED   old bytes of all draft slots are in the undo log
            -begin->  PLAIN    they are not, that is counted, the step is plain vLLM's
    LOGGED  -commit-> IDLE     rejected slots restored, accepted ones kept
            -commit-> FAILED   each rejected slot holds old or new bytes, all else is as
                               in plain vLLM
            -abort->  IDLE     the log is dropped, the cache stays as vLLM left it
    STAGED  -commit-> IDLE     kept rows are in the real blocks, the tables are vLLM's
                               own
            -commit-> FAILED   the tables are vLLM's own, kept rows are lost: it raises,
                               the step's tokens must not be used
            -abort->  IDLE     the tables are vLLM's own, nothing was copied: rows that
                               the step wrote to blocks with drafts go with it (such a
                               block is not full: of a partial one that vLLM caches for
                               hybrid models no hit gets as far as these rows)
    PLAIN   -end_unlogged, abort-> IDLE
    FAILED  -stage, begin-> as from IDLE

FAILED lasts until a step has drafts again. It does not repeat the commit: by then a
slot may be another request's. What a log takes for old is what it finds, also where
that is a rejected draft; under VLLM_NWOR_STRICT=always the step raises, and FAILED
stays.

A begin that finds a log drops it first. When one of our own operations fails, the
window turns into plain vLLM: no token is lost, the failure is counted in `fallbacks`
and logged once; `VLLM_NWOR_STRICT=always` raises `NworError` instead. A step whose
drafts reach the sampler in state IDLE or FAILED was missed: no begin saw it.

invariants.py has what holds in these states, and `check_state` checks it.

stage or begin, and commit, enqueue one launch each a KV-cache group on the current
stream (a group whose layers are packed in several ways: one for each packing). A step
in which windows lack a seat takes both: four launches a group. They allocate nothing on
the device, never wait for it and have no loop over layers.

Counts: the ops of a commit count on the device, and write what the counters have become
to a slot of a ring of host memory. Of a window either the shadow blocks' commit or the
log's adds to its table's row. A step whose commit failed, or of which windows were not
protected, goes without counts; the next commit first copies what its own are compared
with.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from . import ops as native_ops
from .config import NworConfig, OnReject
from .layer_tables import DeviceMemory, LayerCache
from .metrics import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    OVER_CAPACITY,
    STAGE_FAILED,
    STALE_LOG,
)
from .report import MAX_IN_FLIGHT, StepPayload, counter_ring
from .shadow_blocks import (
    BlockTableLost,
    ShadowBlocks,
    StagedGroup,
    seats_num_bytes,
)
from .undo_log import GroupLog, UndoLog, fitting_capacity
from .window import Acceptance, Undone, VerificationWindows

logger = logging.getLogger("vllm.v1.nwor")


class NworError(RuntimeError):
    """A failure of ours: raised under VLLM_NWOR_STRICT, and where going on would lose
    tokens."""


class State(enum.Enum):
    """Where the manager is between begin and commit; the module has the moves.

    is_open: there are windows to commit.
    """

    IDLE = "idle"
    STAGED = "staged"
    LOGGED = "logged"
    PLAIN = "plain"
    FAILED = "failed"

    def __init__(self, name: str) -> None:
        self.is_open = name in ("staged", "logged")


# A name of the module is one look-up less in each step.
_IDLE, _STAGED, _FAILED = State.IDLE, State.STAGED, State.FAILED


class DraftCommitManager:
    """Begins, commits and aborts the verification windows of one model runner.

    groups: the protected KV-cache groups, staged ones first. capacity: drafts a step
        that fit the log. undo_log: of all groups. shadow: the shadow blocks of the
        staged groups, or None. ops: the namespace that both call into.
    counters: [num_tables, 9] int64, device (ops.COUNTER_COLUMNS), a row for each table
        of layers, only ever added to, by the kernels. Each row counts all windows, so
        that windows and tokens are read from row 0; bytes and invalid slots are summed.
    counts: of the last commit, until somebody takes them (report.py) or the next step
        starts; None if there are none.
    fallbacks: steps that did not run as they should, by reason.
    """

    def __init__(
        self,
        config: NworConfig,
        groups: Sequence[tuple[int, Sequence[LayerCache]]],
        capacity: int,
        storage: torch.Tensor | None = None,
        ops: Any = None,
        staged: Mapping[int, StagedGroup] | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        num_states: int = 0,
    ) -> None:
        """groups: (KV-cache group id, its layers), at least one, each with layers.

        storage: [num_bytes] uint8, device: memory for the undo log and all that
            belongs to it (undo_log.num_bytes); what does not fit lowers the capacity.
            None allocates it.
        ops: the seam where tests inject faults: what has the functions of `ops`; None
            for the builtins.
        staged: for the KV-cache groups that have shadow blocks.
        max_in_flight: steps, from the oldest whose counts were not read to the newest
            that made its commit.
        num_states: requests that the runner has room for, where windows come with
            state_indices; else 0.

        Raises:
            ValueError: nothing to protect, or no room for a single draft.
            NworOpsUnavailable: as ops.load_builtins.
        """
        if not groups or not all(layers for _, layers in groups):
            raise ValueError("groups is empty or has one without layers to protect")
        self.config = config
        self.device = groups[0][1][0].kv_cache.device
        staged = staged or {}
        groups = sorted(groups, key=lambda group: group[0] not in staged)
        shadow_bytes = sum(group.num_bytes for group in staged.values())
        shadow_bytes += seats_num_bytes(num_states) if staged else 0
        poisons = config.on_reject is OnReject.POISON
        self.capacity = fitting_capacity(
            capacity, groups, storage, shadow_bytes, poisons
        )
        self.ops = native_ops.load_builtins(self.device) if ops is None else ops
        self._debug_sync = config.debug_sync
        if config.debug_sync and self.device.type != "cpu":
            self.ops = native_ops.synchronizing(self.ops, self.device)
        memory = DeviceMemory(self.device, storage)
        self.groups = [
            GroupLog(
                *(group_id, layers, self.capacity, memory, poisons),
                staged[group_id].first_slot
                if group_id in staged
                else native_ops.NO_SHADOW,
            )
            for group_id, layers in groups
        ]
        num_tables = sum(len(group.tables) for group in self.groups)
        columns = len(native_ops.COUNTER_COLUMNS)
        self.counters = memory.take((num_tables, columns), torch.int64).zero_()
        counters = self.counters.unbind()
        self._ring, self._payloads = counter_ring(self.counters, max_in_flight)
        ring = self._ring.unbind(1)
        self.undo_log = UndoLog(self.groups, counters, ring, self.ops)
        self.shadow: ShadowBlocks | None = None
        # Of the groups that have no shadow blocks; None if all have some.
        self._unstaged_log: UndoLog | None = None
        # In a staged step: what logs the rest of it, and whether that failed.
        self._rest_log: UndoLog | None = None
        self._has_rest_failed = False
        # What the last commit did.
        self._was_staged = self._was_restored = False
        of_staged = [group for group in self.groups if group.group_id in staged]
        others = self.groups[len(of_staged) :]
        num_staged = sum(len(group.tables) for group in of_staged)
        if of_staged:
            self.shadow = ShadowBlocks(
                [(g.group_id, staged[g.group_id], g.tables) for g in of_staged],
                counters[:num_staged],
                ring[:num_staged],
                self.ops,
                memory,
                num_states,
                max_in_flight,
            )
            if others:
                self._unstaged_log = UndoLog(
                    others, counters[num_staged:], ring[num_staged:], self.ops
                )
        # Where in the ring the last commit's counters went, and whether they did.
        self._slot = 0
        self._is_counted = True
        self.counts: StepPayload | None = None
        self.state = State.IDLE
        self.fallbacks: Counter[str] = Counter()
        self._copy_counters = native_ops.publish

    @property
    def log_bytes_per_draft(self) -> int:
        """Bytes logged for one draft, over all groups."""
        return sum(group.bytes_per_draft for group in self.groups)

    @property
    def log_bytes(self) -> int:
        """Bytes of device memory that the undo logs take."""
        return self.capacity * self.log_bytes_per_draft

    @property
    def shadow_bytes(self) -> int:
        """Bytes of the caches that the shadow blocks take."""
        staged = {} if self.shadow is None else self.shadow.groups
        return sum(
            staged[group.group_id].num_slots * group.bytes_per_draft
            for group in self.groups
            if group.group_id in staged
        )

    @property
    def is_open(self) -> bool:
        """Whether there are windows to commit."""
        return self.state.is_open

    @property
    def num_drafts(self) -> int:
        """Of the open windows, at most; 0 if there are none."""
        if self.state is _STAGED and self.shadow is not None:
            return self.shadow.num_drafts
        return self.undo_log.num_drafts

    def start_step(self, keeps: bool = True) -> None:
        """Call when the runner starts a step, also one without drafts: windows and
        counts that the step before left behind are dropped.

        keeps: as ShadowBlocks.start_step.

        Raises: as abort.
        """
        self.counts = None
        if self.state is not _IDLE:
            self.abort(STALE_LOG)
        if self.shadow is not None:
            self.shadow.start_step(keeps)

    def stage(self, windows: VerificationWindows) -> bool:
        """Puts shadow blocks in the place of the blocks that hold drafts, for the
        windows that have a seat. Call when block tables and slot mappings are final,
        before attention metadata is built; then begin, which logs the rest. If this
        fails, begin logs the whole step.

        Returns whether everything is staged, so that begin need not be called.

        Raises:
            NworError: if it fails and a block table cannot be put back; under
                VLLM_NWOR_STRICT=always, if it fails, or the commit before failed.
        """
        if self.state is not _IDLE:
            self._leave_last_step(windows.num_drafts)
        shadow = self.shadow
        if shadow is None or windows.num_drafts == 0:
            return False
        log = self.undo_log if windows.lacks_seats else self._unstaged_log
        if log is not None and windows.num_drafts > self.capacity:
            return False
        self._rest_log, self._has_rest_failed = log, False
        self.state = _STAGED  # whatever is raised, tables may have to be put back
        shadow.num_drafts = windows.num_drafts
        shadow.held = windows
        block_tables: Any = windows.block_tables
        try:
            for gid, stage in shadow.begins:
                stage(
                    block_tables[gid],
                    windows.slot_mappings[gid],
                    windows.query_start_loc,
                    windows.seq_lens,
                    windows.cu_num_logits,
                    windows.state_indices,
                    shadow.step,
                    windows.lacks_seats,
                    windows.num_leading_zeros,
                )
        except Exception as error:
            self._go_unstaged(shadow, error)
            return False
        if self._debug_sync:
            self.check_state()
        return log is None

    def _leave_last_step(self, num_drafts: int) -> None:
        """What an earlier step left is dropped by one with so many drafts. Called in
        any state but IDLE."""
        self.abort(STALE_LOG)
        if self.state is _FAILED and num_drafts > 0 and self.config.strict_steps:
            raise NworError(
                f"NWOR {COMMIT_FAILED}: the commit before this step failed; the KV "
                "cache is not as it should be"
            )

    def _go_unstaged(self, shadow: ShadowBlocks, error: Exception) -> None:
        """A launch of stage failed: the tables are put back, the step is logged."""
        self.state = _IDLE
        try:
            shadow.abort()
        except BlockTableLost as failure:
            self._lose_table(STAGE_FAILED, failure)
        outcome = "the step uses the undo log"
        self._fall_back(STAGE_FAILED, f"stage: {error}", error, outcome)

    def begin(self, windows: VerificationWindows) -> None:
        """Logs the old bytes at every draft slot that is not in a shadow block. Call
        before the target's forward.

        Requires that the caches and slot mappings are as the forward will see them.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if the windows cannot be logged,
                or the commit before failed.
        """
        num_drafts = windows.num_drafts
        log: UndoLog | None = self.undo_log
        if self.state is _STAGED:
            log = self._rest_log
        else:
            if self.state is not _IDLE:
                self._leave_last_step(num_drafts)
            if num_drafts == 0:
                return
            if num_drafts > self.capacity:
                self.state = State.PLAIN
                self._fall_back(
                    OVER_CAPACITY,
                    f"{num_drafts} drafts do not fit the undo log of {self.capacity} "
                    "rows",
                )
                return
        if log is not None:
            try:
                log.num_drafts = 0
                for gid, log_slots in log.begins:
                    log_slots(
                        windows.slot_mappings[gid],
                        windows.logits_indices,
                        windows.cu_num_logits,
                        num_drafts,
                        windows.num_leading_zeros,
                    )
                log.num_drafts = num_drafts
            except Exception as error:
                outcome = "the step ran as plain vLLM"
                if self.state is _STAGED:
                    self._has_rest_failed = True
                    outcome = "the drafts without shadow blocks ran as plain vLLM"
                else:
                    self.state = State.PLAIN
                self._fall_back(
                    BEGIN_FAILED, f"log_cache_slots: {error}", error, outcome
                )
                return
        if self.state is not _STAGED:
            self.state = State.LOGGED
        if self._debug_sync:
            self.check_state()

    def commit(self, acceptance: Acceptance) -> None:
        """Keeps the accepted drafts, undoes the rejected ones and counts the windows
        (`counts`). Call right after rejection sampling, on the stream of the forward,
        before the drafter runs. Requires that the manager is open.

        Raises:
            NworError: if copying from shadow blocks fails; under
                VLLM_NWOR_STRICT=always, if restoring fails.
        """
        self.counts = None
        slot = -1
        if self._is_counted or self._publish():
            slot = self._slot + 1
            if slot == len(self._payloads):
                slot = 0
            self._slot = slot
        self._is_counted = False
        log: UndoLog | None = self.undo_log
        self._was_restored = False
        self._was_staged = self.state is _STAGED
        if self._was_staged:
            shadow, log = self.shadow, self._rest_log
            assert shadow is not None
            try:
                for commit in shadow.commits:
                    commit(
                        acceptance.sampled_token_ids,
                        acceptance.vocab_size,
                        acceptance.num_rejected,
                        slot,
                    )
            except Exception as error:
                self._fail_staged(shadow, error)
            shadow.num_drafts = 0
        self.state = _IDLE
        if log is not None:
            num_drafts, log.num_drafts = log.num_drafts, 0
            if num_drafts == 0:  # in a staged step
                slot = self._go_without_log(slot)
            else:
                failure: Exception | None = None
                for restore in log.commits:
                    try:
                        restore(
                            acceptance.sampled_token_ids,
                            acceptance.vocab_size,
                            acceptance.num_rejected,
                            num_drafts,
                            slot,
                        )
                    except Exception as error:
                        failure = error
                self._was_restored = failure is None
                if failure is not None:
                    slot, self.state = -1, _FAILED
                    what = f"restore_rejected_drafts: {failure}"
                    self._fall_back(COMMIT_FAILED, what, failure)
        if slot >= 0:
            self._is_counted = True
            self.counts = self._payloads[slot]
        if self._debug_sync:
            self.check_state()

    def undone(self, group_id: int) -> Undone:
        """What the last commit undid in this KV-cache group. To be asked between that
        commit and the next step's start."""
        is_protected = any(group.group_id == group_id for group in self.groups)
        if not is_protected or self.config.on_reject is not OnReject.RESTORE:
            return Undone()
        shadow = self.shadow
        if not self._was_staged or shadow is None or group_id not in shadow.groups:
            return Undone(self._was_restored)
        if self._was_restored and self._rest_log is self.undo_log:
            return Undone(True)
        indices = None if shadow.held is None else shadow.held.state_indices
        return Undone(True, shadow.saved[group_id], indices, shadow.seat_of_state)

    def _publish(self) -> bool:
        """Enqueues a copy of the counters to the slot, where no op of the last commit
        did. Returns whether that worked.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if it did not.
        """
        try:
            self._copy_counters(self._ring[self._slot], self.counters)
        except Exception as error:
            outcome = "the step goes without counts"
            self._fall_back(COMMIT_FAILED, f"publish: {error}", error, outcome)
            return False
        return True

    def _fail_staged(self, shadow: ShadowBlocks, error: Exception) -> NoReturn:
        """The commit from shadow blocks failed: the tables are put back."""
        self.state = _FAILED
        if self._rest_log is not None:
            self._rest_log.abort()
        try:
            shadow.abort()
        except BlockTableLost as failure:
            error = failure
        self.fallbacks[COMMIT_FAILED] += 1
        raise NworError(
            f"NWOR {COMMIT_FAILED}: commit_draft_layer: {error}; accepted tokens of "
            "this step are not in the KV cache"
        ) from error

    def _go_without_log(self, slot: int) -> int:
        """commit, where the rest of a staged step was not logged. Returns the slot, or
        -1 if the step goes without counts: its counters lack windows, or cannot be
        copied."""
        if not self._has_rest_failed:
            self._miss_begin("the drafts without shadow blocks")
        is_whole = self._rest_log is self._unstaged_log
        return slot if is_whole and slot >= 0 and self._publish() else -1

    def end_unlogged(self, num_drafts: int) -> None:
        """In place of commit, where the manager is not open: a step that was left to
        plain vLLM ends, or one without drafts, or one that begin never saw.

        num_drafts: of the step. If there are any, and begin was not called, that is a
        fallback, begin_missed.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if begin was missed.
        """
        if self.state is State.PLAIN:
            self.state = _IDLE
        elif num_drafts > 0:
            self._miss_begin(f"{num_drafts} drafts")

    def _miss_begin(self, what: str) -> None:
        self._fall_back(BEGIN_MISSED, f"{what} were sampled that begin never saw")

    def abort(self, reason: str) -> None:
        """Drops windows that were never committed: the tables are put back, the cache
        stays as vLLM left it.

        Raises:
            NworError: if a table cannot be put back; under VLLM_NWOR_STRICT=always, if
                there were windows.
        """
        if self.state is State.PLAIN:
            self.state = _IDLE
        if not self.is_open:
            return
        num_drafts = self.num_drafts
        self.state = _IDLE
        self.undo_log.abort()
        if self._unstaged_log is not None:
            self._unstaged_log.abort()
        if self.shadow is not None:
            try:
                self.shadow.abort()
            except BlockTableLost as error:
                self._lose_table(reason, error)
        self._fall_back(reason, f"windows with {num_drafts} drafts were dropped")

    def check_state(self) -> None:
        """Checks the numbered invariants of invariants.py. Waits for the device.

        Raises:
            AssertionError: naming the invariant that does not hold, and what was found.
        """
        from . import invariants

        invariants.check(self)

    def _lose_table(self, reason: str, error: BlockTableLost) -> NoReturn:
        self.fallbacks[reason] += 1
        raise NworError(f"NWOR {reason}: {error}") from error

    def _fall_back(
        self,
        reason: str,
        detail: str,
        cause: Exception | None = None,
        outcome: str = "the step ran as plain vLLM",
    ) -> None:
        self.fallbacks[reason] += 1
        if self.config.strict_steps:
            raise NworError(f"NWOR {reason}: {detail}") from cause
        if self.fallbacks[reason] == 1:
            self._log(reason, f"{detail}; {outcome}")

    def _log(self, reason: str, text: str) -> None:
        """Of the first fallback for this reason."""
        logger.warning(
            "NWOR %s: %s (further ones are counted in vllm:nwor_fallbacks)",
            reason,
            text,
        )
