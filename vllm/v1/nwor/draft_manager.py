# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager: the transaction around one verification step.

What commit guarantees: after it, every byte at a rejected draft's slot, in every layer
of the manager's groups, is what it was when begin logged it; no other byte of the
cache was touched by us; and accepted drafts are what vLLM wrote. Restoring is a copy of
bytes, blind to their type.

States (asserted by the methods that move them):

    IDLE   -begin->  LOGGED    old bytes of all draft slots are in the undo log
    LOGGED -commit-> IDLE      rejected slots restored, accepted ones kept
    LOGGED -abort->  IDLE      the log is dropped, the cache stays as vLLM left it

A begin that finds a log drops it first. When one of our own operations fails, the
window turns into vanilla vLLM: no token is lost, the failure is counted in `fallbacks`
and logged once; `VLLM_NWOR_STRICT=1` raises `NworError` instead.

begin and commit enqueue one launch a KV-cache group on the current stream (a group
whose layers are packed in several ways: one for each packing). They allocate nothing
on the device, never wait for it and have no loop over layers.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.v1.nwor import ops as native_ops
from vllm.v1.nwor.config import NworConfig
from vllm.v1.nwor.kv_layout import KVLayout
from vllm.v1.nwor.window import Acceptance, SampledIds, VerificationWindows

logger = logging.getLogger(__name__)

STALE_LOG = "stale_log"
OVER_CAPACITY = "over_capacity"
BEGIN_FAILED = "begin_failed"
COMMIT_FAILED = "commit_failed"


class NworError(RuntimeError):
    """A failure of ours, raised only under VLLM_NWOR_STRICT."""


class State(enum.Enum):
    IDLE = "idle"
    LOGGED = "logged"


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache. `kv_cache` is kept alive by the manager's owner."""

    name: str
    kv_cache: torch.Tensor
    layout: KVLayout


@dataclass
class HostTimes:
    """Host time of each begin and commit, in nanoseconds; for benches."""

    begin_ns: list[int] = field(default_factory=list)
    commit_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CopyTable:
    """Layers that one launch covers.

    table: [num_layers, 9] int64, device (ops.TABLE_COLUMNS).
    runs: [block_size, num_runs, 2] int32, device, or None for row caches.
    """

    table: torch.Tensor
    runs: torch.Tensor | None


class GroupLog:
    """The undo log of one KV-cache group, and the tables of the layers in it.

    undo_log: [capacity, bytes_per_draft] uint8, device.
    log_slots: [capacity] int64, device. log_windows: [capacity, 3] int32, device.
    """

    def __init__(
        self, group_id: int, layers: Sequence[LayerCache], undo_log: torch.Tensor
    ) -> None:
        self.group_id = group_id
        self.layers = tuple(layers)
        capacity, self.bytes_per_draft = undo_log.shape
        device = undo_log.device
        self.tables = _copy_tables(self.layers, device)
        self.undo_log = undo_log
        self.log_slots = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.log_windows = torch.zeros((capacity, 3), dtype=torch.int32, device=device)


class DraftCommitManager:
    """Begins, commits and aborts the verification windows of one model runner.

    groups: the protected KV-cache groups. capacity: drafts a step that fit the log.
    counters: [num_tables, 6] int64, device (ops.COUNTER_COLUMNS), a row for each
        launch of a commit, only ever added to, by the kernels. Every launch sees all
        windows, so that windows and tokens are read from row 0; bytes are summed.
    active: a switch for benches; while False, begin does nothing.
    fallbacks: windows that ran as vanilla vLLM, by reason.
    """

    def __init__(
        self,
        config: NworConfig,
        groups: Sequence[tuple[int, Sequence[LayerCache]]],
        capacity: int,
        storage: torch.Tensor | None = None,
        ops: Any = None,
    ) -> None:
        """groups: (KV-cache group id, its layers), at least one, each with layers.

        storage: [num_bytes] uint8, device: memory for the undo log; what does not fit
            lowers the capacity. None allocates it.
        ops: the seam where tests inject faults: what has the functions of
            `vllm.v1.nwor.ops`; by default that module, or on CUDA a PreparedOps.

        Raises:
            ValueError: nothing to protect, or no room for a single draft.
        """
        if not groups or not all(layers for _, layers in groups):
            raise ValueError("groups is empty or has one without layers to protect")
        widths = [
            sum(layer.layout.slot_bytes for layer in layers) for _, layers in groups
        ]
        self.device = groups[0][1][0].kv_cache.device
        if storage is None:
            storage = torch.empty(
                capacity * sum(widths), dtype=torch.uint8, device=self.device
            )
        capacity = min(capacity, storage.numel() // sum(widths))
        if capacity < 1:
            raise ValueError(
                f"capacity is {capacity} drafts of {sum(widths)} bytes; expected at "
                "least 1"
            )
        self.config = config
        self.capacity = capacity
        parts = storage[: capacity * sum(widths)].split(
            [capacity * width for width in widths]
        )
        self.groups = [
            GroupLog(gid, layers, part.view(capacity, width))
            for (gid, layers), part, width in zip(groups, parts, widths, strict=True)
        ]
        self._launches = [
            (group, part) for group in self.groups for part in group.tables
        ]
        self.counters = torch.zeros(
            (len(self._launches), len(native_ops.COUNTER_COLUMNS)),
            dtype=torch.int64,
            device=self.device,
        )
        self._counter_rows = self.counters.unbind()
        self.active = True
        self.state = State.IDLE
        self.fallbacks: Counter[str] = Counter()
        self.host_times: HostTimes | None = None
        default_ops = _ops_for(self.device)
        self._ops = default_ops if ops is None else ops
        self._publish = default_ops.publish
        self._num_drafts = 0

    @property
    def log_bytes_per_draft(self) -> int:
        """Bytes logged for one draft, over all groups."""
        return sum(group.bytes_per_draft for group in self.groups)

    @property
    def log_bytes(self) -> int:
        """Bytes of device memory that the undo logs take."""
        return self.capacity * self.log_bytes_per_draft

    def begin(self, windows: VerificationWindows) -> None:
        """Logs the old bytes at every draft slot. Call before the target's forward.

        Requires that the caches and slot mappings are as the forward will see them.

        Raises:
            NworError: under VLLM_NWOR_STRICT, if the windows cannot be logged.
        """
        if self.state is not State.IDLE:
            self.abort(STALE_LOG)
        if not self.active or windows.num_drafts == 0:
            return
        started = time.perf_counter_ns()
        if windows.num_drafts > self.capacity:
            self._fall_back(
                OVER_CAPACITY,
                f"{windows.num_drafts} drafts do not fit the undo log of "
                f"{self.capacity} rows",
            )
            return
        try:
            for group, part in self._launches:
                self._ops.log_cache_slots(
                    part.table,
                    part.runs,
                    windows.slot_mappings[group.group_id],
                    windows.logits_indices,
                    windows.cu_num_logits,
                    group.undo_log,
                    group.log_slots,
                    group.log_windows,
                    windows.num_drafts,
                )
            self._debug_sync()
        except Exception as error:
            self._fall_back(BEGIN_FAILED, f"log_cache_slots: {error}", error)
            return
        self._num_drafts = windows.num_drafts
        self.state = State.LOGGED
        if self.host_times is not None:
            self.host_times.begin_ns.append(time.perf_counter_ns() - started)

    def commit(
        self, acceptance: Acceptance, counters_to: torch.Tensor | None = None
    ) -> bool:
        """Restores the rejected drafts' slots and counts the windows. Call right after
        rejection sampling, on the stream of the forward, before the drafter runs.

        counters_to: as `publish` takes it, enqueued behind the restore.

        Returns whether counters_to gets the counters of this commit; False without it
        and without a log, when nothing is done.

        Raises:
            NworError: under VLLM_NWOR_STRICT, if restoring fails.
        """
        if self.state is not State.LOGGED:
            return False
        started = time.perf_counter_ns()
        self.state = State.IDLE
        if isinstance(acceptance, SampledIds):
            sampled, vocab_size = acceptance.sampled_token_ids, acceptance.vocab_size
            num_rejected = None
        else:
            sampled, vocab_size = None, 0
            num_rejected = acceptance.num_rejected
        failure: Exception | None = None
        for (group, part), counters in zip(
            self._launches, self._counter_rows, strict=True
        ):
            try:
                self._ops.restore_rejected_drafts(
                    part.table,
                    part.runs,
                    group.undo_log,
                    group.log_slots,
                    group.log_windows,
                    sampled,
                    vocab_size,
                    num_rejected,
                    counters,
                    self._num_drafts,
                )
            except Exception as error:
                failure = error
        published = False
        try:
            if counters_to is not None:
                self._publish(counters_to, self.counters)
                published = True
            self._debug_sync()
        except Exception as error:
            failure = error
        if failure is not None:
            self._fall_back(
                COMMIT_FAILED, f"restore_rejected_drafts: {failure}", failure
            )
        elif self.host_times is not None:
            self.host_times.commit_ns.append(time.perf_counter_ns() - started)
        return published

    def publish(self, to: torch.Tensor) -> bool:
        """Enqueues a copy of the counters to `to`: [num_launches, 6] int64, cpu, pinned
        if the counters are on a device. Returns whether that worked.

        Raises:
            NworError: under VLLM_NWOR_STRICT, if it did not.
        """
        try:
            self._publish(to, self.counters)
        except Exception as error:
            self._fall_back(COMMIT_FAILED, f"publish: {error}", error)
            return False
        return True

    def abort(self, reason: str) -> None:
        """Drops a log that was never committed; the cache stays as vLLM left it.

        Raises:
            NworError: under VLLM_NWOR_STRICT, if there was a log.
        """
        if self.state is State.IDLE:
            return
        self.state = State.IDLE
        self._fall_back(reason, f"a log of {self._num_drafts} drafts was dropped")

    def _debug_sync(self) -> None:
        if self.config.debug_sync and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _fall_back(
        self, reason: str, detail: str, cause: Exception | None = None
    ) -> None:
        self.fallbacks[reason] += 1
        if self.config.strict:
            raise NworError(f"NWOR {reason}: {detail}") from cause
        if self.fallbacks[reason] == 1:
            logger.warning(
                "NWOR %s: %s; the step ran as vanilla vLLM (further ones are counted "
                "in vllm:nwor_fallbacks)",
                reason,
                detail,
            )


def _ops_for(device: torch.device) -> Any:
    if device.type != "cuda":
        return native_ops
    from vllm.v1.nwor.prepared import PreparedOps

    return PreparedOps(device)


def _copy_tables(
    layers: Sequence[LayerCache], device: torch.device
) -> tuple[CopyTable, ...]:
    """The layers' table rows: all row caches in one table, and one more for each
    distinct packing. A layer's place in a row of the log follows the layers' order."""
    rows: list[list[int]] = []
    packings: list[tuple[torch.Tensor, list[list[int]]]] = []
    log_offset = 0
    for layer in layers:
        row = layer.layout.table_row(layer.kv_cache.data_ptr(), log_offset)
        log_offset += layer.layout.slot_bytes
        runs = layer.layout.runs
        if runs is None:
            rows.append(row)
            continue
        for known, known_rows in packings:
            if torch.equal(known, runs):
                known_rows.append(row)
                break
        else:
            packings.append((runs, [row]))
    tables = [
        CopyTable(
            torch.tensor(packed, dtype=torch.int64, device=device), runs.to(device)
        )
        for runs, packed in packings
    ]
    if rows:
        tables.insert(
            0, CopyTable(torch.tensor(rows, dtype=torch.int64, device=device), None)
        )
    return tuple(tables)
