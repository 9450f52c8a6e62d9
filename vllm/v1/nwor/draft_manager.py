# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager: the transaction around one verification step.

What commit guarantees: after it, every byte at a rejected draft's slot, in every layer
of the manager's groups, is what it was right before the forward; accepted drafts are
what vLLM wrote; and of a request's blocks we write only those slots (undo log), or
those of the kept rows (shadow blocks). Copies are of bytes, blind to their type. There
are two ways to it, and each KV-cache group has one:

    undo log       begin saves the old bytes of the drafts' slots, commit restores those
                   of the rejected ones (launches.py)
    shadow blocks  stage has the drafts verified in private blocks, commit copies the
                   kept rows to the request's own (shadow_blocks.py)

A step whose windows cannot all be staged uses the undo log for all groups. Under
VLLM_NWOR_ON_REJECT=poison the log has large numbers instead of old bytes.

States:

    IDLE    -stage->  STAGED   shadow blocks are in the tables of the staged groups;
                               begin then logs the drafts of the others
            -begin->  LOGGED   old bytes of all draft slots are in the undo log
            -begin->  VANILLA  they are not, that is counted, the step runs as vanilla
    LOGGED  -commit-> IDLE     rejected slots restored, accepted ones kept
            -commit-> FAILED   each rejected slot holds old or new bytes, all else is as
                               in vanilla vLLM
            -abort->  IDLE     the log is dropped, the cache stays as vLLM left it
    STAGED  -commit-> IDLE     kept rows are in the real blocks, the tables are vLLM's
                               own
            -commit-> FAILED   the tables are vLLM's own, kept rows are lost: it raises,
                               the step's tokens must not be used
            -abort->  IDLE     the tables are vLLM's own, nothing was copied: rows that
                               the step wrote to blocks with drafts go with it (such a
                               block is not full: of a partial one that vLLM caches for
                               hybrid models no hit gets as far as these rows)
    VANILLA -end_unlogged, abort-> IDLE
    FAILED  -stage, begin-> as from IDLE

FAILED lasts until a step has drafts again. It does not repeat the commit: by then a
slot may be another request's. What a log takes for old is what it finds, also where
that is a rejected draft; under VLLM_NWOR_STRICT=always the step raises, and FAILED
stays.

A begin that finds a log drops it first. When one of our own operations fails, the
window turns into vanilla vLLM: no token is lost, the failure is counted in `fallbacks`
and logged once; `VLLM_NWOR_STRICT=always` raises `NworError` instead. A step whose
drafts reach the sampler in state IDLE or FAILED was missed: no begin saw it.

invariants.py has what holds in these states, and `check_state` checks it.

stage or begin, and commit, enqueue one launch each a KV-cache group on the current
stream (a group whose layers are packed in several ways: one for each packing). They
allocate nothing on the device, never wait for it and have no loop over layers.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from . import ops as native_ops
from .config import NworConfig, OnReject
from .device_memory import ALIGNMENT, DeviceMemory
from .launches import (
    GroupLog,
    Launch,
    Launches,
    LayerCache,
    bytes_per_draft,
    num_bytes,
)
from .metrics import (
    BEGIN_FAILED,
    BEGIN_MISSED,
    COMMIT_FAILED,
    NO_SEAT,
    OVER_CAPACITY,
    STAGE_FAILED,
    STALE_LOG,
)
from .shadow_blocks import ShadowBlocks, ShadowGroup, ShadowRegion
from .shadow_blocks import num_bytes as num_shadow_bytes
from .window import Acceptance, VerificationWindows

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
    VANILLA = "vanilla"
    FAILED = "failed"

    def __init__(self, name: str) -> None:
        self.is_open = name in ("staged", "logged")


# For stage and commit: a name of the module is one look-up less.
_IDLE, _STAGED, _FAILED = State.IDLE, State.STAGED, State.FAILED


@dataclass(frozen=True)
class StagedGroup:
    """What makes a KV-cache group a staged one.

    region: its shadow blocks. entry_tokens: positions for which an entry of the
    worker's block table stands.
    """

    region: ShadowRegion
    entry_tokens: int

    @property
    def span(self) -> int:
        """Entries of the block table that belong to a seat."""
        return self.region.blocks_per_seat * self.region.block_size // self.entry_tokens

    @property
    def num_bytes(self) -> int:
        """Device memory that the group takes beside its undo log."""
        return num_shadow_bytes(self.region.num_seats, self.span) + ALIGNMENT


class DraftCommitManager:
    """Begins, commits and aborts the verification windows of one model runner.

    groups: the protected KV-cache groups, staged ones first. capacity: drafts a step
        that fit the log. shadow: the shadow blocks of the staged groups, or None.
    counters: [num_tables, 8] int64, device (ops.COUNTER_COLUMNS), a row for each
        launch of a commit, only ever added to, by the kernels. Every launch sees all
        windows, so that windows and tokens are read from row 0; bytes and invalid
        slots are summed.
    launches: how a step's copies to and from the undo log are enqueued.
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
    ) -> None:
        """groups: (KV-cache group id, its layers), at least one, each with layers.

        storage: [num_bytes] uint8, device: memory for the undo log and all that
            belongs to it (launches.num_bytes); what does not fit lowers the capacity.
            None allocates it.
        ops: the seam where tests inject faults: what has the functions of `ops`; None
            for the builtins.
        staged: for the KV-cache groups that have shadow blocks.

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
        shadow_bytes = sum(entry.num_bytes for entry in staged.values())
        poisons = config.on_reject is OnReject.POISON
        self.capacity = _fitting_capacity(
            capacity, groups, storage, shadow_bytes, poisons
        )
        memory = DeviceMemory(self.device, storage)
        self.groups = [
            GroupLog(group_id, layers, self.capacity, memory, poisons)
            for group_id, layers in groups
        ]
        parts_of_groups = [
            (group, part) for group in self.groups for part in group.tables
        ]
        columns = len(native_ops.COUNTER_COLUMNS)
        self.counters = memory.take((len(parts_of_groups), columns), torch.int64)
        rows = self.counters.zero_().unbind()
        launches = [
            Launch(group, part, counters)
            for (group, part), counters in zip(parts_of_groups, rows, strict=True)
        ]
        self.shadow: ShadowBlocks | None = None
        # Of the groups that are logged beside staged ones; their rows of the counters.
        self._beside: Launches | None = None
        self._is_logged_beside = False
        self._num_staged_rows = sum(
            len(group.tables) for group in self.groups if group.group_id in staged
        )
        shadow_groups = [
            ShadowGroup(
                group.group_id,
                group.tables,
                staged[group.group_id].region,
                staged[group.group_id].entry_tokens,
                memory,
            )
            for group in self.groups
            if group.group_id in staged
        ]
        self._has_builtins = ops is None
        if ops is None:
            ops = native_ops.load_builtins(self.device)
        self.remember((*memory.taken, *rows))
        self.launches = Launches(launches, ops)
        if shadow_groups:
            staged_rows = rows[: self._num_staged_rows]
            self.shadow = ShadowBlocks(shadow_groups, staged_rows, ops)
            if launches[self._num_staged_rows :]:
                self._beside = Launches(launches[self._num_staged_rows :], ops)
        self.state = State.IDLE
        self.fallbacks: Counter[str] = Counter()
        self._copy_counters = native_ops.publish
        self._num_drafts = 0
        self._debug_sync = config.debug_sync
        # A step that stage takes needs neither begin nor the log's part of commit.
        self._stages_all = self._beside is None and not config.debug_sync

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
        staged = () if self.shadow is None else self.shadow.groups
        slots = {one.group_id: one.num_slots for one in staged}
        return sum(
            slots.get(group.group_id, 0) * group.bytes_per_draft
            for group in self.groups
        )

    @property
    def is_open(self) -> bool:
        """Whether there are windows to commit."""
        return self.state.is_open

    def remember(self, tensors: Sequence[torch.Tensor]) -> None:
        """As ops.remember: what is handed to the ops again and again."""
        if self._has_builtins:
            native_ops.remember(self, tensors)

    def start_step(self, keeps: bool = True) -> None:
        """Call when the runner starts a step, also one without drafts: windows that
        the step before left behind are dropped.

        keeps: as ShadowBlocks.start_step.

        Raises: as abort.
        """
        if self.state is not _IDLE:
            self.abort(STALE_LOG)
        if self.shadow is not None:
            self.shadow.start_step(keeps)

    def stage(self, windows: VerificationWindows) -> bool:
        """Puts shadow blocks in the place of the blocks that hold drafts. Call when
        block tables and slot mappings are final, before attention metadata is built;
        then begin. Where a window has no seat, or this fails, begin logs the step.

        Returns whether all groups are staged, so that begin need not be called.

        Raises:
            NworError: if it fails and a block table cannot be put back; under
                VLLM_NWOR_STRICT=always, if it fails, or the commit before failed.
        """
        if self.state is not _IDLE:
            self._leave_last_step(windows.num_drafts)
        shadow = self.shadow
        if shadow is None or windows.num_drafts == 0:
            return False
        if windows.num_reqs > shadow.num_seats:
            self._count_no_seat(windows.num_reqs, shadow.num_seats)
            return False
        if self._beside is not None and windows.num_drafts > self.capacity:
            return False
        shadow.windows = windows
        block_tables: Any = windows.block_tables
        try:
            for launch in shadow.stages:
                gid, table, runs, saved, first, real, span, tokens, patches = launch
                shadow.ops.stage(
                    table,
                    runs,
                    block_tables[gid],
                    windows.slot_mappings[gid],
                    windows.query_start_loc,
                    windows.seq_lens,
                    windows.cu_num_logits,
                    windows.seats,
                    saved,
                    first,
                    real,
                    span,
                    tokens,
                    shadow.step,
                    patches,
                    windows.num_leading_zeros,
                )
            if self._debug_sync:
                gid, patches = None, False
                self._wait()
        except Exception as error:
            self._put_back(STAGE_FAILED, gid, patches)
            self._fall_back(
                STAGE_FAILED, f"stage: {error}", error, "the step uses the undo log"
            )
            return False
        self._num_drafts = windows.num_drafts
        self.state = _STAGED
        return self._stages_all

    def _leave_last_step(self, num_drafts: int) -> None:
        """What an earlier step left is dropped by one with so many drafts. Called in
        any state but IDLE."""
        self.abort(STALE_LOG)
        if self.state is _FAILED and num_drafts > 0 and self.config.strict_steps:
            raise NworError(
                f"NWOR {COMMIT_FAILED}: the commit before this step failed; the KV "
                "cache is not as it should be"
            )

    def _count_no_seat(self, num_reqs: int, num_seats: int) -> None:
        self.fallbacks[NO_SEAT] += 1
        if self.fallbacks[NO_SEAT] == 1:
            logger.warning(
                "NWOR %s: a step of %d requests, shadow blocks for %d; it uses the "
                "undo log (further ones are counted in vllm:nwor_fallbacks)",
                NO_SEAT,
                num_reqs,
                num_seats,
            )

    def begin(self, windows: VerificationWindows) -> None:
        """Logs the old bytes at every draft slot, of the groups that are not staged in
        this step. Call before the target's forward.

        Requires that the caches and slot mappings are as the forward will see them.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if the windows cannot be logged,
                or the commit before failed.
        """
        if self.state is State.STAGED:
            self._begin_beside(windows)
            return
        num_drafts = windows.num_drafts
        if self.state is not _IDLE:
            self._leave_last_step(num_drafts)
        if num_drafts == 0:
            return
        self.state = State.VANILLA
        if num_drafts > self.capacity:
            self._fall_back(
                OVER_CAPACITY,
                f"{num_drafts} drafts do not fit the undo log of {self.capacity} rows",
            )
            return
        try:
            self.launches.log(windows)
            if self.config.debug_sync:
                self._wait()
        except Exception as error:
            self._fall_back(BEGIN_FAILED, f"log_cache_slots: {error}", error)
            return
        self._num_drafts = num_drafts
        self.state = State.LOGGED
        if self.config.debug_sync:
            self.check_state()

    def _begin_beside(self, windows: VerificationWindows) -> None:
        """begin, for groups that are logged in a step in which others are staged."""
        self._is_logged_beside = False
        if self._beside is not None:
            try:
                self._beside.log(windows)
                self._is_logged_beside = True
            except Exception as error:
                self._fall_back(BEGIN_FAILED, f"log_cache_slots: {error}", error)
        if self.config.debug_sync:
            self._wait()
            self.check_state()

    def commit(
        self, acceptance: Acceptance, counters_to: Sequence[torch.Tensor] | None = None
    ) -> bool:
        """Keeps the accepted drafts, undoes the rejected ones and counts the windows.
        Call right after rejection sampling, on the stream of the forward, before the
        drafter runs.

        counters_to: as `publish` takes it, written behind the restore.

        Returns whether counters_to gets the counters of this commit; False without it
        and without a log, when nothing is done.

        Raises:
            NworError: if copying from shadow blocks fails; under
                VLLM_NWOR_STRICT=always, if restoring fails.
        """
        if self.state is _STAGED:
            self.state = _FAILED
            self._num_drafts = 0
            shadow: Any = self.shadow
            windows = shadow.windows
            try:
                for launch in shadow.commits:
                    row, gid, table, runs, saved, counters, tokens, undoes = launch
                    shadow.ops.commit_draft_layer(
                        table,
                        runs,
                        windows.block_tables[gid],
                        windows.slot_mappings[gid],
                        windows.seats,
                        saved,
                        acceptance.sampled_token_ids,
                        acceptance.vocab_size,
                        acceptance.num_rejected,
                        counters,
                        windows.num_reqs,
                        tokens,
                        undoes,
                        None if counters_to is None else counters_to[row],
                    )
                shadow.windows = None
                if self._debug_sync:
                    self._wait()
            except Exception as error:
                self._fail_staged(error)
            self.state = _IDLE
            if self._stages_all:
                return counters_to is not None
            return self._commit_beside(windows.num_drafts, acceptance, counters_to)
        if self.state is not State.LOGGED:
            return False
        self.state = State.FAILED
        num_drafts, self._num_drafts = self._num_drafts, 0
        try:
            self.launches.restore(acceptance, num_drafts, counters_to)
            if self.config.debug_sync:
                self._wait()
        except Exception as error:
            published = False
            if counters_to is not None:
                # What failed did not write its row.
                with contextlib.suppress(Exception):
                    self._copy_counters(counters_to, self.counters)
                    published = True
            self._fall_back(COMMIT_FAILED, f"restore_rejected_drafts: {error}", error)
            return published
        self.state = State.IDLE
        if self.config.debug_sync:
            self.check_state()
        return counters_to is not None

    def _fail_staged(self, error: Exception) -> NoReturn:
        """The commit from shadow blocks failed: the tables are put back."""
        assert self.shadow is not None
        try:
            self.shadow.abort()
        except Exception as failure:
            error = failure
        self.fallbacks[COMMIT_FAILED] += 1
        raise NworError(
            f"NWOR {COMMIT_FAILED}: commit_draft_layer: {error}; accepted tokens of "
            "this step are not in the KV cache"
        ) from error

    def _commit_beside(
        self,
        num_drafts: int,
        acceptance: Acceptance,
        counters_to: Sequence[torch.Tensor] | None,
    ) -> bool:
        """commit, for groups that were logged in a step in which others are staged."""
        is_told = counters_to is not None
        if self._beside is not None:
            is_logged, self._is_logged_beside = self._is_logged_beside, False
            to = None if counters_to is None else counters_to[self._num_staged_rows :]
            try:
                if is_logged:
                    self._beside.restore(acceptance, num_drafts, to)
            except Exception as error:
                self.state = State.FAILED
                self._fall_back(
                    COMMIT_FAILED, f"restore_rejected_drafts: {error}", error
                )
                is_logged = False
            if counters_to is not None and not is_logged:
                is_told = self.publish(counters_to)
        if self._debug_sync:
            self.check_state()
        return is_told

    def end_unlogged(self, num_drafts: int) -> None:
        """In place of commit, where there is no log: a step that was left to vanilla
        vLLM ends, or one without drafts, or one that begin never saw.

        num_drafts: as begin would have been told. If there are any, and begin was told
        nothing, that is a fallback, begin_missed.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if begin was missed.
        """
        if self.state is State.VANILLA:
            self.state = State.IDLE
        elif num_drafts > 0 and not self.is_open:
            self._fall_back(
                BEGIN_MISSED, f"{num_drafts} drafts were sampled that begin never saw"
            )

    def publish(self, to: Sequence[torch.Tensor]) -> bool:
        """Enqueues a copy of the counters to `to`: [8] int64 for each launch of commit,
        cpu, pinned if the counters are on a device. Returns whether that worked.

        Raises:
            NworError: under VLLM_NWOR_STRICT=always, if it did not.
        """
        try:
            self._copy_counters(to, self.counters)
        except Exception as error:
            self._fall_back(COMMIT_FAILED, f"publish: {error}", error)
            return False
        return True

    def abort(self, reason: str) -> None:
        """Drops windows that were never committed: the tables are put back, the cache
        stays as vLLM left it.

        Raises:
            NworError: if a table cannot be put back; under VLLM_NWOR_STRICT=always, if
                there were windows.
        """
        if self.state is State.VANILLA:
            self.state = State.IDLE
        if not self.is_open:
            return
        num_drafts, self._num_drafts = self._num_drafts, 0
        self.state = State.IDLE
        self._put_back(reason)
        self._fall_back(reason, f"windows with {num_drafts} drafts were dropped")

    def _put_back(self, reason: str, *failed: Any) -> None:
        """Raises NworError if a table of a staged group cannot be put back.

        failed: as ShadowBlocks.abort.
        """
        if self.shadow is None:
            return
        try:
            self.shadow.abort(*failed)
        except Exception as error:
            self.fallbacks[reason] += 1
            raise NworError(
                f"NWOR {reason}: a block table cannot be put back: {error}"
            ) from error

    def check_state(self) -> None:
        """Checks the numbered invariants of invariants.py. Waits for the device.

        Raises:
            AssertionError: naming the invariant that does not hold, and what was found.
        """
        from . import invariants

        invariants.check(self)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _fall_back(
        self,
        reason: str,
        detail: str,
        cause: Exception | None = None,
        outcome: str = "the step ran as vanilla vLLM",
    ) -> None:
        self.fallbacks[reason] += 1
        if self.config.strict_steps:
            raise NworError(f"NWOR {reason}: {detail}") from cause
        if self.fallbacks[reason] == 1:
            logger.warning(
                "NWOR %s: %s; %s (further ones are counted in vllm:nwor_fallbacks)",
                reason,
                detail,
                outcome,
            )


def _fitting_capacity(
    capacity: int,
    groups: Sequence[tuple[int, Sequence[LayerCache]]],
    storage: torch.Tensor | None,
    shadow_bytes: int,
    poisons: bool,
) -> int:
    """Drafts, at most `capacity`, whose log fits the storage. Raises ValueError."""
    row_bytes = sum(bytes_per_draft(layers) for _, layers in groups)
    num_layers = sum(len(layers) for _, layers in groups)
    if storage is not None:
        empty = num_bytes(0, row_bytes, len(groups), num_layers)
        of_draft = num_bytes(1, row_bytes, len(groups), num_layers) - empty
        left = storage.numel() - empty - shadow_bytes
        if poisons:
            left -= empty + of_draft
        capacity = min(capacity, max(0, left) // of_draft)
    if capacity < 1:
        raise ValueError(
            f"capacity is {capacity} drafts of {row_bytes} bytes; expected at least 1"
        )
    return capacity
