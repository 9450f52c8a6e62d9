# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of a model runner, described by the hooks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class StateKind(enum.StrEnum):
    """TEMPORAL: a matrix a head, one for each token of a verification window, each in a
    block of its own. CONV: the last inputs of a convolution, all in one block. RING:
    one row for each token that is not compressed yet, by its position, all in one
    block."""

    TEMPORAL = "temporal"
    CONV = "conv"
    RING = "ring"


class StatesRefused(Exception):
    """Recurrent states that cannot be followed; the message says why."""


@dataclass(frozen=True)
class StateCache:
    """One state of one layer. The owner of its table keeps `tensor` alive.

    name: of the layer. tensor, device: [num_blocks, num_heads, rows, columns], or of a
    convolution [num_blocks, num_columns, num_channels]. window: columns that a
    convolution reads, else 0. can_rest: a step may leave the bits of a head's state as
    they are, which then says nothing. ratio: tokens that a ring's layer compresses to
    one entry, else 0.
    """

    name: str
    kind: StateKind
    tensor: torch.Tensor
    window: int = 0
    can_rest: bool = False
    ratio: int = 0


@dataclass(frozen=True)
class StateGroup:
    """The states of one KV-cache group, all recurrent or all rings. refusal: why they
    are not understood, or empty. backend: vLLM's name of its layers' kind, not of
    rings. block_size: tokens a block, if states are found in the prefix cache; else 0.
    has_checkpoints: layers also write states from inside a chunk of a prompt. what:
    recurrent states, or rings."""

    group_id: int
    states: Sequence[StateCache]
    refusal: str = ""
    backend: str = ""
    block_size: int = 0
    has_checkpoints: bool = False
    what: str = "recurrent states"

    @property
    def is_ring(self) -> bool:
        return bool(self.states) and self.states[0].kind is StateKind.RING

    def about(self) -> str:
        """What is in it, for a line at start-up."""
        if not self.is_ring:
            return f"{len(self.states)} recurrent states ({self.backend})"
        sizes = {(one.tensor.shape[2], one.ratio) for one in self.states}
        of = ", ".join(f"{rows} rows for {ratio} tokens" for rows, ratio in sizes)
        return f"{len(self.states)} rings of {of}"


def ring_shortage(group: StateGroup, num_drafts: int) -> str:
    """Why rejected drafts overwrite rows of a ring that are read later, or empty.

    With 4 tokens an entry and 2 drafts, positions 0 and 1 wait for 2 and 3. A step
    writes 2, 3 and 4; if only 2 is kept, the next one reads 0, 1 and 2. So 4 must not
    have the row of 0: 5 rows are needed.
    """
    for ring in group.states if group.is_ring else ():
        rows, needed = ring.tensor.shape[2], ring.ratio + num_drafts - 1
        if rows < needed:
            return (
                f"layer {ring.name} has a ring of {rows} rows; for {ring.ratio} tokens "
                f"an entry and {num_drafts} drafts it needs {needed}: drafts that are "
                "rejected overwrite rows of accepted tokens that are read later"
            )
    return ""
