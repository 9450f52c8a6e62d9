# SPDX-License-Identifier: Apache-2.0
"""What one step launches: a log and a restore for each table of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .device_memory import ALIGNMENT, DeviceMemory
from .kv_layout import KVLayout
from .ops import COUNTER_COLUMNS, TABLE_COLUMNS
from .window import Acceptance, VerificationWindows

# What VLLM_NWOR_ON_REJECT=poison has in each byte of a rejected slot. Read as numbers
# these are large but finite, also times a scale of the same bytes: 5e4 as bf16 or fp32;
# as int8 71. Where all of a slot is fp16 or fp8 the other one is larger: 3e4 as fp16,
# 240 as fp8 e4m3, 29e3 as e5m2.
POISON, NARROW_POISON = 0x47, 0x77

_ITEM = 8  # bytes of an int64
_ENTRY_BYTES = 8 + 3 * 4  # of a draft in log_slots and log_windows


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache. `kv_cache` is kept alive by the manager's owner.

    poison: the byte for its rejected slots, if they are poisoned.
    """

    name: str
    kv_cache: torch.Tensor
    layout: KVLayout
    poison: int = POISON


@dataclass(frozen=True)
class CopyTable:
    """Layers that one launch covers.

    table: [num_layers, 9] int64, device (ops.TABLE_COLUMNS).
    runs: [block_size, num_runs, 2] int32, device, or None for row caches.
    names: of the layers.
    """

    table: torch.Tensor
    runs: torch.Tensor | None
    names: tuple[str, ...]


def bytes_per_draft(layers: Sequence[LayerCache]) -> int:
    """Bytes of a row of these layers' undo log."""
    return sum(layer.layout.slot_bytes for layer in layers)


def num_bytes(capacity: int, row_bytes: int, num_groups: int, num_layers: int) -> int:
    """Memory that is enough for all groups' logs and tables, and their counters.

    capacity: drafts. row_bytes: of a draft, over all groups. num_groups, num_layers: at
        least those that there will be.
    """
    tables = num_layers * _ITEM * (len(TABLE_COLUMNS) + len(COUNTER_COLUMNS))
    tensors = 3 * num_groups + num_layers + 1
    return (
        capacity * (row_bytes + num_groups * _ENTRY_BYTES)
        + tables
        + tensors * ALIGNMENT
    )


class GroupLog:
    """The undo log of one KV-cache group, and the tables of the layers in it.

    undo_log: [capacity, bytes_per_draft] uint8, device.
    log_slots: [capacity] int64, device. log_windows: [capacity, 3] int32, device.
    source: what a log copies from in place of each of `tables`: poison; or None.
    """

    def __init__(
        self,
        group_id: int,
        layers: Sequence[LayerCache],
        capacity: int,
        memory: DeviceMemory,
        poisons: bool = False,
    ) -> None:
        self.group_id = group_id
        self.layers = tuple(layers)
        self.bytes_per_draft = bytes_per_draft(layers)
        self.undo_log = memory.take((capacity, self.bytes_per_draft), torch.uint8)
        self.log_slots = memory.take((capacity,), torch.int64).fill_(-1)
        self.log_windows = memory.take((capacity, 3), torch.int32).zero_()
        self.tables = copy_tables(self.layers, memory)
        self.source: CopyTable | None = None
        if poisons:
            self._poisoned = [_poisoned(layer, memory) for layer in layers]
            (self.source,) = copy_tables(self._poisoned, memory)


@dataclass(frozen=True)
class Launch:
    """A table of layers, the log of their group, and what counts a launch's drafts.

    counters: [8] int64, device (ops.COUNTER_COLUMNS).
    """

    group: GroupLog
    part: CopyTable
    counters: torch.Tensor


class Launches:
    """All copies of a step to and from the undo logs, on the current stream."""

    def __init__(self, launches: Sequence[Launch], ops: Any) -> None:
        """ops: what has the functions of the module `ops`: its builtins, or the seam
        where tests inject faults."""
        self.ops = ops
        # By launch, what never changes.
        self._logs = []
        self._restores = []
        for row, launch in enumerate(launches):
            group, part = launch.group, launch.part
            source = group.source or part
            log = group.undo_log, group.log_slots, group.log_windows
            self._logs.append((group.group_id, source.table, source.runs, *log))
            self._restores.append((row, part.table, part.runs, *log, launch.counters))

    def log(self, windows: VerificationWindows) -> None:
        """Enqueues the copies of the old bytes at every draft slot.

        Raises:
            Exception: the caches are as they were; the log is of no use.
        """
        slot_mappings = windows.slot_mappings
        for group_id, table, runs, undo_log, slots, of_windows in self._logs:
            self.ops.log_cache_slots(
                table,
                runs,
                slot_mappings[group_id],
                windows.logits_indices,
                windows.cu_num_logits,
                undo_log,
                slots,
                of_windows,
                windows.num_drafts,
                windows.num_leading_zeros,
            )

    def restore(
        self,
        acceptance: Acceptance,
        num_drafts: int,
        counters_to: Sequence[torch.Tensor] | None,
    ) -> None:
        """Enqueues the restoring of what `log` saved, and the counting.

        num_drafts: as in the windows that were logged.
        counters_to: for each launch [8] int64, cpu, pinned if the caches are on a
            device: gets the counters too.

        Raises:
            Exception: after all other launches were enqueued.
        """
        failure: Exception | None = None
        for launch in self._restores:
            row, table, runs, undo_log, slots, of_windows, counters = launch
            try:
                self.ops.restore_rejected_drafts(
                    table,
                    runs,
                    undo_log,
                    slots,
                    of_windows,
                    acceptance.sampled_token_ids,
                    acceptance.vocab_size,
                    acceptance.num_rejected,
                    counters,
                    num_drafts,
                    None if counters_to is None else counters_to[row],
                )
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


def _poisoned(layer: LayerCache, memory: DeviceMemory) -> LayerCache:
    """The layer as if each of its slots held poison: all of them are the same bytes."""
    layout = layer.layout
    num_bytes = layout.slot_bytes
    slot = memory.take((num_bytes,), torch.uint8).fill_(layer.poison)
    size = layout.block_size, layout.num_blocks
    return LayerCache(layer.name, slot, KVLayout(*size, 0, 0, 0, 1, num_bytes))


def copy_tables(
    layers: Sequence[LayerCache], memory: DeviceMemory
) -> tuple[CopyTable, ...]:
    """The layers' table rows: all row caches in one table, the first, and one for each
    distinct packing. A layer's place in a row of the log follows the layers' order."""
    kinds: list[tuple[torch.Tensor | None, list[list[int]], list[str]]] = []
    log_offset = 0
    for layer in layers:
        runs = layer.layout.runs
        for kind in kinds:
            known = kind[0]
            if runs is known or (
                runs is not None and known is not None and torch.equal(runs, known)
            ):
                break
        else:
            kind = (runs, [], [])
            kinds.append(kind)
        kind[1].append(layer.layout.table_row(layer.kv_cache.data_ptr(), log_offset))
        kind[2].append(layer.name)
        log_offset += layer.layout.slot_bytes
    kinds.sort(key=lambda kind: kind[0] is not None)
    return tuple(
        CopyTable(
            _table(rows, memory),
            None if runs is None else runs.to(memory.device),
            tuple(names),
        )
        for runs, rows, names in kinds
    )


def _table(rows: list[list[int]], memory: DeviceMemory) -> torch.Tensor:
    """[num_layers, 9] int64, device."""
    host = torch.tensor(rows, dtype=torch.int64)
    return memory.take(tuple(host.shape), torch.int64).copy_(host)
