# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager: the transaction around one verification step.

What commit guarantees, unless it fails (states.py) or rejected slots are poisoned:
every byte at a rejected draft's slot, in every layer of the manager's groups, is what
it was right before the forward. Accepted drafts are what vLLM wrote. Of a request's
blocks we write only the slots of rejected drafts (undo log) or of the kept rows (shadow
blocks). Copies are of bytes, whatever their type is. All guarantees, by number:
NWOR_IMPLEMENTATION_SUMMARY.md. There are two ways, and each window of a KV-cache group
uses one:

    undo log       begin saves the old bytes of the drafts' slots, commit restores those
                   of the rejected ones (undo_log.py)
    shadow blocks  stage, which is their begin, has the drafts verified in private
                   blocks, commit copies the kept rows to the request's own
                   (shadow_blocks.py)

A staged group has shadow blocks for a number of requests (seats). The windows of the
other requests are logged in the same step. If stage fails, the whole step is logged.
Under VLLM_NWOR_ON_REJECT=poison the log has large numbers instead of old bytes.

states.py has the states, the moves between them and the invariants; `check_state`
checks these. FAILED lasts until the next step with drafts. That step does not repeat
the commit, because a slot may belong to another request by then. Its log takes the
bytes it finds as the old ones, even those of a rejected draft. Under
VLLM_NWOR_STRICT=always the step raises instead, and FAILED stays.

A begin that finds a log discards it first. When one of our own operations fails, the
step's windows run as plain vLLM: no token is lost, the failure is counted in
`fallbacks` and logged once; `VLLM_NWOR_STRICT=always` raises `NworError` instead.
Drafts that reach the sampler in state IDLE or FAILED were missed: no begin saw them.

stage or begin, and commit, enqueue one launch each for a KV-cache group, on the current
stream (if its layers have several packings: one for each packing). A step in which
windows lack a seat needs both ways: four launches for a group. The calls allocate
nothing on the device, never wait for it and have no loop over layers.

Counts: the ops of a commit count on the device, and write the new values of the
counters to a slot of a ring of host memory. Each window is counted once, by the commit
of the shadow blocks or by that of the log. Counters are unavailable for a step if its
commit failed or some of its windows were not protected. The next commit then first
copies the counters, as the base of its own increments.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from .. import ops as native_ops
from ..base.errors import NworError
from ..base.payload import MAX_IN_FLIGHT, StepPayload
from ..config import NworConfig, OnReject
from ..layout.regions import StagedGroup
from ..layout.tables import DeviceMemory, LayerCache
from ..metrics import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    OVER_CAPACITY,
    STAGE_FAILED,
    STALE_LOG,
)
from ..step import Acceptance, Scheduled, Step, Undone
from . import states
from .counters import counter_ring
from .shadow_blocks import BlockTableLost, ShadowBlocks, seats_num_bytes
from .states import State
from .undo_log import GroupLog, UndoLog, fitting_capacity

logger = logging.getLogger("vllm.v1.nwor")

# Local aliases (hot path).
_IDLE, _STAGED, _FAILED = State.IDLE, State.STAGED, State.FAILED


class DraftCommitManager:
    """Begins, commits and aborts the verification windows of one model runner.

    groups: the protected KV-cache groups, staged ones first. capacity: drafts a step
        that fit the log. undo_log: of all groups. shadow: the shadow blocks of the
        staged groups, or None. ops: the namespace that both call into.
    counters: [num_tables, 9] int64, device (ops.COUNTER_COLUMNS), a row for each table
        of layers. The kernels only add to them. Each row counts all windows, so windows
        and tokens are read from row 0; bytes and invalid slots are summed over rows.
    counts: of the last commit, until they are taken (counters.py) or the next step
        starts; None if there are none.
    fallbacks: steps that did not run in their group's mode, by reason.
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

        storage: [num_bytes] uint8, device: memory for the undo log, its tables and
            counters (undo_log.num_bytes); if it is too small, the capacity is lower.
            None allocates it.
        ops: an object with the functions of `ops`, where tests inject faults; None for
            the builtins.
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
        # The log of the groups without shadow blocks; None if all groups have some.
        self._unstaged_log: UndoLog | None = None
        # In a staged step: the log of the remaining windows, and whether it failed.
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
        # The ring's slot of the last commit's counters, and whether they were written.
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

    def start_step(self, scheduled: Scheduled | None = None) -> None:
        """Call when the runner starts a step, with or without drafts. Discards windows
        and counts that the previous step left.

        scheduled: None: no request that is new or resumed has drafts.

        Raises: as abort.
        """
        self.counts = None
        if self.state is not _IDLE:
            self.abort(STALE_LOG)
        if self.shadow is not None:
            # The rows before such drafts may be a copy of another request's block that
            # this step makes, in a block and a seat that are new for the request.
            keeps = scheduled is None or not scheduled.has_drafts_of_new()
            self.shadow.start_step(keeps)

    def stage(self, step: Step) -> None:
        """Replaces the blocks that hold drafts by shadow blocks, for the windows that
        have a seat. Call when block tables and slot mappings are final, before
        attention metadata is built. Then call begin, which logs the other windows,
        unless stage set step.awaits_forward to False: then there are no others. If
        stage fails, begin logs the whole step.

        Raises:
            NworError: if it fails and a block table cannot be put back; under
                VLLM_NWOR_STRICT=always, if it fails, or the commit before failed.
        """
        num_drafts = step.num_drafts
        if self.state is not _IDLE:
            self._leave_last_step(num_drafts)
        shadow = self.shadow
        if shadow is None or num_drafts == 0:
            return
        if shadow.seats is not None:
            lacks_seats = shadow.seats.lack(
                step.host_state_indices, step.state_of_request
            )
        else:
            drafts = step.drafts_of_requests
            lacks_seats = drafts is not None and any(drafts[shadow.num_seats :])
        log = self.undo_log if lacks_seats else self._unstaged_log
        if log is not None and num_drafts > self.capacity:
            return
        self._rest_log, self._has_rest_failed = log, False
        self.state = _STAGED  # whatever is raised, tables may have to be put back
        shadow.num_drafts = num_drafts
        shadow.held = step
        try:
            for gid, stage in shadow.begins:
                stage(
                    step.block_tables[gid],
                    step.slot_mappings[gid],
                    step.query_start_loc,
                    step.seq_lens,
                    step.cu_num_logits,
                    step.state_indices,
                    shadow.step,
                    lacks_seats,
                    step.num_leading_zeros,
                )
        except Exception as error:
            self._go_unstaged(shadow, error)
            return
        if self._debug_sync:
            self.check_state()
        step.awaits_forward = log is not None

    def _leave_last_step(self, num_drafts: int) -> None:
        """Discards the previous step's windows. num_drafts: of the new step. Called in
        any state but IDLE."""
        self.abort(STALE_LOG)
        if self.state is _FAILED and num_drafts > 0 and self.config.strict_steps:
            raise NworError(
                f"NWOR {COMMIT_FAILED}: the commit before this step failed; the KV "
                "cache is not as it should be"
            )

    def _go_unstaged(self, shadow: ShadowBlocks, error: Exception) -> None:
        """A launch of stage failed: puts the tables back; begin will log the step."""
        self.state = _IDLE
        try:
            shadow.abort()
        except BlockTableLost as failure:
            self._lose_table(STAGE_FAILED, failure)
        outcome = "the step uses the undo log"
        self._fall_back(STAGE_FAILED, f"stage: {error}", error, outcome)

    def begin(self, step: Step) -> None:
        """Logs the old bytes at every draft slot that is not in a shadow block. Call
        before the target's forward.

        Requires that the caches and slot mappings are as the forward will see them.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if the windows cannot be logged,
                or the commit before failed.
        """
        num_drafts = step.num_drafts
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
                        step.slot_mappings[gid],
                        step.logits_indices,
                        step.cu_num_logits,
                        num_drafts,
                        step.num_leading_zeros,
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

    def commit(self, step: Step, acceptance: Acceptance | None) -> None:
        """Keeps the accepted drafts, undoes the rejected ones and counts the windows
        (`counts`). Call right after rejection sampling, on the stream of the forward,
        before the drafter runs. A step that was left to plain vLLM ends here, too; one
        with drafts that begin never saw is counted as begin_missed.

        step: of stage and begin. acceptance: None if it has no drafts.

        Raises:
            NworError: if copying from shadow blocks fails; under
                VLLM_NWOR_STRICT=always, if restoring fails, or begin was missed.
        """
        if acceptance is None or not self.state.is_open:
            self._end_unprotected(step.num_drafts)
            return
        step.undone = self.undone
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
        """What the last commit undid in this KV-cache group: Step.undone."""
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
        """Enqueues a copy of the counters to the slot, if no op of the last commit did.
        Returns whether that worked.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if it did not.
        """
        try:
            self._copy_counters(self._ring[self._slot], self.counters)
        except Exception as error:
            outcome = "counters are unavailable for this step"
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
        """commit, if the other windows of a staged step were not logged. Returns the
        slot, or -1 if counters are unavailable for this step: they lack windows, or
        cannot be copied."""
        if not self._has_rest_failed:
            self.miss_begin("the drafts without shadow blocks")
        is_whole = self._rest_log is self._unstaged_log
        return slot if is_whole and slot >= 0 and self._publish() else -1

    def _end_unprotected(self, num_drafts: int) -> None:
        """commit, where the manager is not open."""
        if self.state is State.PLAIN:
            self.state = _IDLE
        elif num_drafts > 0:
            self.miss_begin(f"{num_drafts} drafts")

    def miss_begin(self, what: str) -> None:
        """Counts begin_missed: `what` reached the sampler, and begin never saw it.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always.
        """
        self._fall_back(BEGIN_MISSED, f"{what} were sampled that begin never saw")

    def abort(self, reason: str) -> None:
        """Discards windows that were never committed: puts the tables back; the cache
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
        """Checks the numbered invariants of states.py. Waits for the device.

        Raises:
            AssertionError: naming the invariant that does not hold, and what was found.
        """
        states.check(self)

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
