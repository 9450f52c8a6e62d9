# SPDX-License-Identifier: Apache-2.0
"""Where the shadow blocks of a KV-cache group lie: in blocks, table entries and slots.

Shadow blocks exist in the workers' caches, behind all blocks that the scheduler knows.
The engine core reserves them (hooks/engine_core.py), transaction/shadow_blocks.py uses
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import ops
from .tables import ALIGNMENT


@dataclass(frozen=True)
class ShadowRegion:
    """The shadow blocks of one KV-cache group: blocks that exist in the workers' caches
    and that the scheduler does not know.

    first_block: id of the first one. num_seats: requests that can have some.
    blocks_per_seat: as many as a window's drafts can touch. num_real_blocks: ids below
    are the scheduler's. block_size: tokens a block, as the scheduler counts.
    """

    first_block: int
    num_seats: int
    blocks_per_seat: int
    num_real_blocks: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.num_seats * self.blocks_per_seat


def blocks_per_seat(num_drafts: int, block_size: int) -> int:
    """Blocks that `num_drafts` neighbouring positions can touch.

    Example: 4 drafts touch at most 2 blocks of 16 tokens; 18 drafts at most 3.
    """
    return 1 + -(-(num_drafts - 1) // block_size)


@dataclass(frozen=True)
class StagedGroup:
    """The shadow blocks of a staged KV-cache group.

    region: its shadow blocks. entry_tokens: positions for which an entry of the
    worker's block table stands: the block size, or a kernel's smaller one.

    Raises ValueError: entry_tokens does not divide the block size.
    """

    region: ShadowRegion
    entry_tokens: int

    def __post_init__(self) -> None:
        if self.region.block_size % self.entry_tokens != 0:
            raise ValueError(
                f"entry_tokens is {self.entry_tokens}; must divide the block size "
                f"{self.region.block_size}"
            )

    @property
    def _entries_per_block(self) -> int:
        return self.region.block_size // self.entry_tokens

    @property
    def first_entry(self) -> int:
        """Of the shadow blocks."""
        return self.region.first_block * self._entries_per_block

    @property
    def num_real_entries(self) -> int:
        """Entries below are the scheduler's."""
        return self.region.num_real_blocks * self._entries_per_block

    @property
    def span(self) -> int:
        """Entries of a seat."""
        return self.region.blocks_per_seat * self._entries_per_block

    @property
    def num_slots(self) -> int:
        return self.region.num_blocks * self.region.block_size

    @property
    def first_slot(self) -> int:
        """Of the shadow blocks."""
        return self.region.first_block * self.region.block_size

    @property
    def saved_shape(self) -> tuple[int, int]:
        """Shape of `saved` of ops.stage."""
        return self.region.num_seats, ops.SAVED_COLUMNS + 2 * self.span

    @property
    def num_bytes(self) -> int:
        """Device memory that the group needs in addition to its undo log."""
        return num_bytes(self.region.num_seats, self.span)


def num_bytes(num_seats: int, span: int) -> int:
    """Enough device memory for `saved` of ops.stage, for one group."""
    columns = ops.SAVED_COLUMNS + 2 * span
    return num_seats * columns * 4 + ALIGNMENT  # int32
