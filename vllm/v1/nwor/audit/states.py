# SPDX-License-Identifier: Apache-2.0
"""The audit's tables of recurrent states, and its two ops a step on them.

csrc/nwor/audit/states.h has the structs that are their rows, and says what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..layout.states import StateCache, StateGroup, StateKind
from ..layout.tables import DeviceMemory

# Bytes that the device reads at once: words of a sample lie together in as many.
SECTOR_BYTES = 32


class StatesRefused(Exception):
    """A layer's states cannot be sampled; the message says why."""


def word_offsets(state: StateCache) -> tuple[int, list[int]]:
    """Bytes a word, and where in a block (of a convolution: in a column of it) the
    words of a sample are, in bytes. Raises StatesRefused."""
    tensor = state.tensor
    size, strides = (
        tensor.element_size(),
        [n * tensor.element_size() for n in tensor.stride()],
    )
    number = ops.SAMPLE_WORDS
    if state.kind is StateKind.CONV:
        channels = tensor.shape[2]
        together = SECTOR_BYTES // size
        num_sectors = number // together
        if size not in (2, 4, 8) or channels < number:
            raise StatesRefused(
                f"a convolution has {channels} channels of {size} bytes"
            )
        starts = [
            (2 * i + 1) * channels // (2 * num_sectors) // together * together
            for i in range(num_sectors)
        ]
        found = [(start + i) * strides[2] for start in starts for i in range(together)]
        return size, found
    _, heads, rows, columns = tensor.shape
    row_bytes = columns * size
    if (
        strides[3] != size
        or row_bytes < SECTOR_BYTES
        or any(n % 8 for n in strides[:3])
    ):
        raise StatesRefused(
            f"a temporal state has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    places = []
    num_parts, of_part = ops.SAMPLE_PARTS, number // ops.SAMPLE_PARTS
    for part in range(num_parts):
        head = part * heads // num_parts
        row = (part * 37 + 11) % rows
        sector = (part * 5 + 1) % (row_bytes // SECTOR_BYTES)
        first = head * strides[1] + row * strides[2] + sector * SECTOR_BYTES
        places += [first + 8 * word for word in range(of_part)]
    return 8, places


class States:
    """The recurrent states of all followed groups.

    layers: name of the layer, kind, and KV-cache group, by the numbers that findings
    have. tables: StateTables of states.h, int64, cpu.
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
            (number, group.group_id, state)
            for number, group in enumerate(groups)
            for state in group.states
        ]
        self.layers = [(state.name, state.kind, gid) for _, gid, state in found]
        self._kept = [state.tensor for *_, state in found]
        windows = {state.window for *_, state in found if state.window} or {0}
        if len(windows) > 1:
            raise StatesRefused(
                f"convolutions read {sorted(windows)} columns; expected one number"
            )
        rows = []
        num_columns = 0
        for number, _, state in found:
            tensor = state.tensor
            size, offsets = word_offsets(state)
            strides = [n * tensor.element_size() for n in tensor.stride()]
            is_conv = state.kind is StateKind.CONV
            of_buffer = (tensor.shape[1], strides[1]) if is_conv else (0, 0)
            num_columns = max(num_columns, of_buffer[0])
            rows.append(
                (
                    tensor.data_ptr(),
                    strides[0],
                    number,
                    state.window,
                    *of_buffer,
                    size,
                    *offsets,
                )
            )
        num_states = len(rows)
        if num_states > ops.MAX_STATES or num_columns > ops.MAX_BUFFER:
            raise StatesRefused(
                f"{num_states} states, {num_columns} columns of a buffer"
            )
        max_columns = 1 + num_drafts
        num_scratch = max(4 * max_columns, num_columns)
        shapes = (
            ((num_states, ops.STATE_COLUMNS), torch.int64),
            ((num_seats, ops.STATE_SEAT_COLUMNS), torch.int64),
            ((num_seats, num_states), torch.int64),
            ((num_seats, num_states, max_columns), torch.int64),
            ((num_seats, num_states, num_scratch), torch.int64),
            ((len(groups), num_blocks), torch.int32),
            ((2,), torch.int64),
        )
        self.tensors = [memory.take(*shape).zero_() for shape in shapes]
        self.tensors[0].copy_(torch.tensor(rows, dtype=torch.int64))
        self.tensors[5].fill_(-1)
        sizes = (
            num_states,
            len(groups),
            max_columns,
            max(windows),
            num_scratch,
            num_blocks,
        )
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.tables = torch.tensor([*addresses, *sizes], dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def totals(self) -> tuple[int, int]:
        """Samples compared, and those that were read and not known. Waits for the
        device."""
        compared, unknown = self.tensors[6].tolist()
        return compared, unknown
