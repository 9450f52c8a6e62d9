# SPDX-License-Identifier: Apache-2.0
"""The audit's tables of recurrent states, and its two ops a step on them.

csrc/nwor/audit/states.h has the structs that are their rows, and says what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..layout.states import StateCache, StateGroup, StateKind, StatesRefused
from ..layout.tables import DeviceMemory

# Bytes that the device reads at once: words of a sample lie together in as many.
SECTOR_BYTES = 32


def word_offsets(state: StateCache) -> tuple[int, list[int]]:
    """Bytes of a word, and where the words of a sample are, in bytes: in a block or, of
    a convolution, in a column of it, of a ring, in a row. Raises StatesRefused."""
    tensor, number, is_ring = state.tensor, ops.SAMPLE_WORDS, bool(state.ratio)
    size, strides = tensor.element_size(), strides_of(tensor)
    refused = StatesRefused(
        f"the {state.kind} state of {state.name} has shape {tuple(tensor.shape)} and "
        f"strides {tensor.stride()}, of {tensor.dtype}"
    )
    if state.kind is StateKind.CONV:
        channels, together = tensor.shape[2], SECTOR_BYTES // size
        if size not in (2, 4, 8) or channels < number:
            raise refused
        num_sectors = number // together
        starts = [
            (2 * i + 1) * channels // (2 * num_sectors) // together * together
            for i in range(num_sectors)
        ]
        return size, [(s + i) * strides[2] for s in starts for i in range(together)]
    _, num_heads, num_rows, num_columns = tensor.shape
    num_sectors = num_columns * size // SECTOR_BYTES
    if strides[3] != size or not num_sectors or any(n % 8 for n in strides[:3]):
        raise refused
    offsets: list[int] = []
    for part in range(ops.SAMPLE_PARTS):
        # Spread over heads, rows and columns.
        head = part * num_heads // ops.SAMPLE_PARTS
        row, sector = (part * 37 + 11) % num_rows, (part * 5 + 1) % num_sectors
        if is_ring:
            row = 0
        first = head * strides[1] + row * strides[2] + sector * SECTOR_BYTES
        offsets += range(first, first + SECTOR_BYTES, 8)
    return 8, offsets


def strides_of(tensor: torch.Tensor) -> list[int]:
    """In bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]


def row_of(state: StateCache, group: int) -> tuple[int, ...]:
    """State of states.h. group: row of its metadata. Raises StatesRefused."""
    tensor, strides = state.tensor, strides_of(state.tensor)
    word_bytes, offsets = word_offsets(state)
    axis = {StateKind.CONV: 1, StateKind.RING: 2}.get(state.kind)
    of_columns = (0, 0) if axis is None else (tensor.shape[axis], strides[axis])
    place = tensor.data_ptr(), strides[0], group, state.window, state.ratio
    return *place, *of_columns, word_bytes, *offsets


class States:
    """The recurrent states and rings of all followed groups.

    layers: name of the layer, kind and KV-cache group, by the numbers that findings
    have. tables: StateTables of states.h, int64, cpu. totals: [2] int64, device:
    samples that were compared, and that were read without being known.
    has_rings_alone: nothing is read from vLLM's metadata.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        num_seats: int,
        num_blocks: int,
        num_drafts: int,
        memory: DeviceMemory,
    ) -> None:
        """Raises StatesRefused."""
        found = [
            (n, group, one) for n, group in enumerate(groups) for one in group.states
        ]
        self.layers = [(one.name, str(one.kind), of.group_id) for _, of, one in found]
        self._kept = [one.tensor for *_, one in found]
        windows = {one.window for *_, one in found if one.window} or {0}
        num_columns = max(
            (one.tensor.shape[1] for *_, one in found if one.kind is StateKind.CONV),
            default=0,
        )
        num_states = len(found)
        for what, is_fine in (
            (f"{num_states} states", num_states <= ops.MAX_STATES),
            (f"{len(groups)} groups", len(groups) <= ops.MAX_STATE_GROUPS),
            (f"a buffer of {num_columns} columns", num_columns <= ops.MAX_BUFFER),
            (f"convolutions that read {sorted(windows)} columns", len(windows) == 1),
        ):
            if not is_fine:
                raise StatesRefused(f"there are {what}")
        rows = torch.tensor([row_of(one, n) for n, _, one in found])
        max_columns = 1 + num_drafts
        num_kept = max(max_columns, *(one.ratio for *_, one in found))
        num_scratch = max(ops.SAMPLE_PARTS // 2 * max_columns, num_columns)

        def take(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return memory.take(sizes, dtype).zero_()

        of_seats = num_seats, num_states
        self.totals = take(torch.int64, 2)
        self._tensors = (
            take(torch.int64, *rows.shape).copy_(rows),
            take(torch.int64, num_seats, ops.STATE_SEAT_COLUMNS),
            take(torch.int64, *of_seats),
            take(torch.int64, *of_seats, num_kept),
            take(torch.int64, *of_seats, num_scratch),
            take(torch.int32, len(groups), num_blocks).fill_(-1),
            self.totals,
        )
        sizes = num_states, len(groups), max_columns, num_kept, *windows
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.tables = torch.tensor([*addresses, *sizes, num_scratch, num_blocks])
        self.has_rings_alone = all(one.ratio for *_, one in found)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)
