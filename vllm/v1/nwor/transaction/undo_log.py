# SPDX-License-Identifier: Apache-2.0
"""UndoLog: drafts are written where vLLM writes them, and rejected ones undone.

    begin    old bytes at every draft's slot -> log
    (vLLM's forward and rejection sampling)
    commit   log -> slots of the rejected drafts; counted
    abort    the log is dropped: the cache stays as vLLM left it

A row of the log is one draft, its layers side by side. The log also keeps each draft's
slot, request and position, because V2's drafter overwrites vLLM's slot buffer before
the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout.kv_layout import KVLayout
from ..layout.tables import ALIGNMENT, CopyTable, DeviceMemory, LayerCache, copy_tables
from ..ops import COUNTER_COLUMNS, NO_SHADOW, TABLE_COLUMNS

_ITEM = 8  # bytes of an int64
_ENTRY_BYTES = 8 + 3 * 4  # of a draft in log_slots and log_windows


def bytes_per_draft(layers: Sequence[LayerCache]) -> int:
    """Bytes of a row of these layers' undo log."""
    return sum(layer.layout.slot_bytes for layer in layers)


def num_bytes(capacity: int, row_bytes: int, num_groups: int, num_layers: int) -> int:
    """Memory that is enough for all groups' logs and tables, and their counters.

    capacity: drafts. row_bytes: of a draft, over all groups. num_groups, num_layers:
        upper bounds.
    """
    tables = num_layers * _ITEM * (len(TABLE_COLUMNS) + len(COUNTER_COLUMNS))
    tensors = 3 * num_groups + num_layers + 1
    return (
        capacity * (row_bytes + num_groups * _ENTRY_BYTES)
        + tables
        + tensors * ALIGNMENT
    )


def fitting_capacity(
    capacity: int,
    groups: Sequence[tuple[int, Sequence[LayerCache]]],
    storage: torch.Tensor | None,
    shadow_bytes: int,
    poisons: bool,
) -> int:
    """How many drafts, at most `capacity`, the storage has room for. Raises ValueError
    if it has none."""
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


class GroupLog:
    """The undo log of one KV-cache group, and the tables of the layers in it.

    undo_log: [capacity, bytes_per_draft] uint8, device.
    log_slots: [capacity] int64, device. log_windows: [capacity, 3] int32, device.
    source: poison, which the log copies from in place of each of `tables`; or None.
    first_shadow_slot: as in ops.log_cache_slots.
    """

    def __init__(
        self,
        group_id: int,
        layers: Sequence[LayerCache],
        capacity: int,
        memory: DeviceMemory,
        poisons: bool = False,
        first_shadow_slot: int = NO_SHADOW,
    ) -> None:
        self.group_id = group_id
        self.first_shadow_slot = first_shadow_slot
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


def _poisoned(layer: LayerCache, memory: DeviceMemory) -> LayerCache:
    """The layer as if each of its slots held poison: all of them are the same bytes."""
    layout = layer.layout
    num_bytes = layout.slot_bytes
    slot = memory.take((num_bytes,), torch.uint8).fill_(layer.poison)
    size = layout.block_size, layout.num_blocks
    return LayerCache(layer.name, slot, KVLayout(*size, 0, 0, 0, 1, num_bytes))


class UndoLog:
    """The logs of some KV-cache groups: one launch for each table of layers, on the
    current stream, to begin, and one to commit, which the manager makes.

    begins: (KV-cache group id, ops.LoggedLayers.log) of each table: copies the old
        bytes at every draft slot. Where one fails there is no log.
    commits: ops.LoggedLayers.restore of each table: restores rejected slots, and
        counts. Where one fails, the remaining launches still run.
    num_drafts: logged, to be set after the last of begins, and to 0 before them and
        before commits, which consume the log; 0 without a log.
    """

    def __init__(
        self,
        groups: Sequence[GroupLog],
        counters: Sequence[torch.Tensor],
        ring: Sequence[torch.Tensor],
        ops: Any,
    ) -> None:
        """counters, ring: of each table of each group, in order, as ops.LoggedLayers
        takes them. ops: what has LoggedLayers."""
        self.num_drafts = 0
        self.begins: list[tuple[int, Any]] = []
        self.commits: list[Any] = []
        of_tables = zip(counters, ring, strict=True)
        for group in groups:
            log = group.undo_log, group.log_slots, group.log_windows
            for part in group.tables:
                source = group.source or part
                tables = source.table, source.runs, part.table, part.runs
                layers = ops.LoggedLayers(
                    *tables, *log, *next(of_tables), group.first_shadow_slot
                )
                self.begins.append((group.group_id, layers.log))
                self.commits.append(layers.restore)

    def abort(self) -> None:
        """Drops the log, if there is one."""
        self.num_drafts = 0
