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
    a convolution, in a column of it. Raises StatesRefused."""
    tensor, number = state.tensor, ops.SAMPLE_WORDS
    size, strides = tensor.element_size(), strides_of(tensor)
    refused = StatesRefused(
        f"the {state.kind} state of {state.name} has shape {tuple(tensor.shape)} and "
        f"strides {tensor.stride()}, of {tensor.dtype}"
    )
    if state.kind is StateKind.CONV:
        channels, together = tensor.shape[2], SECTOR_BYTES // size
        if size not in (2, 4, 8) or channels < number:
            raise refused
        num_sectors, of_column = number // together, channels // together
        starts = [
            (2 * i + 1) * of_column // (2 * num_sectors) * together
            for i in range(num_sectors)
        ]
        return size, [(s + i) * strides[2] for s in starts for i in range(together)]
    _, num_heads, num_rows, num_columns = tensor.shape
    num_sectors = num_columns * size // SECTOR_BYTES
    places = tensor.data_ptr(), *strides[:3]
    if strides[3] != size or not num_sectors or any(n % 8 for n in places):
        raise refused
    offsets: list[int] = []
    for part in range(ops.SAMPLE_PARTS):
        # Spread over heads, rows and columns.
        head = part * num_heads // ops.SAMPLE_PARTS
        row, sector = (part * 37 + 11) % num_rows, (part * 5 + 1) % num_sectors
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
    is_conv = state.kind is StateKind.CONV
    of_buffer = (tensor.shape[1], strides[1]) if is_conv else (0, 0)
    place = tensor.data_ptr(), strides[0], group, state.window
    # In few bits a single part often stays as it is.
    is_wide = tensor.element_size() >= 4
    return *place, *of_buffer, word_bytes, 1 if is_wide else ops.SAMPLE_PARTS, *offsets


class States:
    """The recurrent states of all followed groups.

    layers: name of the layer, kind and KV-cache group, by the numbers that findings
    have; caches: the tensors. tables: StateTables of states.h, int64, cpu. totals: [2]
    int64, device: samples that were compared, and that were read without being known.
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
        self.caches = [one.tensor for *_, one in found]
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
        num_scratch = max(ops.SAMPLE_PARTS // 2 * max_columns, num_columns)

        def take(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return memory.take(sizes, dtype).zero_()

        of_seats = num_seats, num_states
        self.totals = take(torch.int64, 2)
        self._tensors = (
            take(torch.int64, *rows.shape).copy_(rows),
            take(torch.int64, num_seats, ops.STATE_SEAT_COLUMNS),
            take(torch.int64, *of_seats),
            take(torch.int64, *of_seats, max_columns),
            take(torch.int64, *of_seats, num_scratch),
            take(torch.int32, len(groups), num_blocks).fill_(-1),
            self.totals,
        )
        sizes = num_states, len(groups), max_columns, *windows, num_scratch, num_blocks
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.tables = torch.tensor([*addresses, *sizes])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)
