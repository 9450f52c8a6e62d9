# SPDX-License-Identifier: Apache-2.0
"""What one step launches: a log and a restore for each table of layers.

`OpLaunches` goes through the ops; `vllm.v1.nwor.prepared` has the same for CUDA at a
lower cost on the host. The manager knows no more than their two methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.v1.nwor import ops as native_ops
from vllm.v1.nwor.kv_layout import KVLayout
from vllm.v1.nwor.window import Acceptance, SampledIds, VerificationWindows


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache. `kv_cache` is kept alive by the manager's owner."""

    name: str
    kv_cache: torch.Tensor
    layout: KVLayout


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


@dataclass(frozen=True)
class Launch:
    """A table of layers, the log of their group, and what counts a launch's drafts.

    counters: [6] int64, device (ops.COUNTER_COLUMNS).
    """

    group: GroupLog
    part: CopyTable
    counters: torch.Tensor


class Launches(Protocol):
    """All launches of a step, on the current stream."""

    def log(self, windows: VerificationWindows) -> None:
        """Enqueues the copies of the old bytes at every draft slot.

        Raises:
            Exception: the caches are as they were; the log is of no use.
        """

    def restore(
        self, acceptance: Acceptance, num_drafts: int, counters_to: torch.Tensor | None
    ) -> None:
        """Enqueues the restoring of what `log` saved, and the counting.

        num_drafts: as in the windows that were logged.
        counters_to: [num_launches, 6] int64, cpu, pinned if the caches are on a
            device: gets the counters too.

        Raises:
            Exception: after all other launches were enqueued.
        """


class OpLaunches:
    """Launches through the ops: on the CPU, and wherever every argument of every call
    shall be checked.

    ops: the seam where tests inject faults; what has the functions of
        `vllm.v1.nwor.ops`.
    """

    def __init__(self, launches: Sequence[Launch], ops: Any = native_ops) -> None:
        self._launches = tuple(launches)
        self.ops = ops

    def log(self, windows: VerificationWindows) -> None:
        """As Launches.log."""
        cu_num_logits = windows.cu_num_logits
        if windows.num_leading_zeros:
            cu_num_logits = cu_num_logits[windows.num_leading_zeros :]
        for launch in self._launches:
            group = launch.group
            self.ops.log_cache_slots(
                launch.part.table,
                launch.part.runs,
                windows.slot_mappings[group.group_id],
                windows.logits_indices,
                cu_num_logits,
                group.undo_log,
                group.log_slots,
                group.log_windows,
                windows.num_drafts,
            )

    def restore(
        self, acceptance: Acceptance, num_drafts: int, counters_to: torch.Tensor | None
    ) -> None:
        """As Launches.restore."""
        accepted: tuple[torch.Tensor | None, int, torch.Tensor | None]
        if isinstance(acceptance, SampledIds):
            accepted = (acceptance.sampled_token_ids, acceptance.vocab_size, None)
        else:
            accepted = (None, 0, acceptance.num_rejected)
        failure: Exception | None = None
        for index, launch in enumerate(self._launches):
            group = launch.group
            try:
                self.ops.restore_rejected_drafts(
                    launch.part.table,
                    launch.part.runs,
                    group.undo_log,
                    group.log_slots,
                    group.log_windows,
                    *accepted,
                    launch.counters,
                    num_drafts,
                    None if counters_to is None else counters_to[index],
                )
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


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
