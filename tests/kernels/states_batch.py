# SPDX-License-Identifier: Apache-2.0
"""Shapes of recurrent states, and a step's batch: what a world (states_world.py) and
the reference (states_reference.py) share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_nwor.layout.states import StateKind

NUM_SEATS, MAX_TOKENS = 3, 64
CONV, TEMPORAL = StateKind.CONV, StateKind.TEMPORAL
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """num_drafts: K. window: columns that a convolution reads."""

    num_groups: int = 2
    num_layers: int = 2
    num_drafts: int = 3
    window: int = 3
    num_heads: int = 4
    conv: torch.dtype = torch.bfloat16
    temporal: torch.dtype = torch.float32
    is_dim_first: bool = False

    @property
    def max_columns(self) -> int:
        return 1 + self.num_drafts

    @property
    def num_blocks(self) -> int:
        return 1 + NUM_SEATS * self.num_groups * self.max_columns


class Work(NamedTuple):
    """Tokens of a request in a step; of the last `num_drafts` the first `accepted` are
    right. is_window: whether it keeps a state for each token."""

    tokens: Sequence[int]
    num_drafts: int = 0
    accepted: int = 0
    is_window: bool = False

    @property
    def num_kept(self) -> int:
        return len(self.tokens) - self.num_drafts + self.accepted


@dataclass
class Request:
    """text: what its states hold. tables: the blocks of each group. num_kept: of its
    last window; the next step reads column num_kept - 1."""

    name: str
    seat: int
    generation: int
    tables: list[list[int]]
    text: list[int] = field(default_factory=list)
    num_kept: int = 1


@dataclass
class Metadata:
    """Of one group, as states.h's StateMetadata; cpu, until it is uploaded."""

    is_window: torch.Tensor | None
    window_blocks: torch.Tensor
    num_accepted: torch.Tensor
    blocks: torch.Tensor
    has_state: torch.Tensor | None
    num_decodes: int
    only_decodes: bool = False

    def upload(self, device: torch.device) -> tuple[list[int], list[Any]]:
        """A row of `metadata`, and what keeps its addresses alive. Rows of blocks are
        strided, as columns of a wider table."""
        kept: list[Any] = []

        def address(tensor: torch.Tensor | None) -> int:
            kept.append(tensor if tensor is None else tensor.to(device))
            return 0 if tensor is None else kept[-1].data_ptr()

        wide = torch.nn.functional.pad(self.window_blocks, (0, 2), value=-7)
        others = torch.nn.functional.pad(self.blocks[:, None], (0, 2), value=-7)
        windows = address(self.is_window), 0, address(wide), wide.stride(0)
        of_others = address(self.num_accepted), address(others), others.stride(0)
        have = address(self.has_state), self.num_decodes, 0, self.only_decodes
        return [*windows, *of_others, *have], kept


def place(metadata: Metadata, row: int) -> tuple[bool, int]:
    """Whether a batch row is a window, and its number among the windows or others."""
    mask = metadata.is_window
    if mask is None:
        return False, row
    before = int(mask[:row].sum())
    return (True, before) if mask[row] else (False, row - before)


class Batch(NamedTuple):
    """starts: a request's first row in the batch, and the end."""

    step: int
    works: dict[str, Work]
    requests: list[Request]
    metadata: list[Metadata]
    starts: list[int]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def any_shape(draw: random.Random) -> Shape:
    return Shape(
        draw.randint(1, 3),
        draw.randint(1, 2),
        draw.randint(1, 5),
        draw.randint(2, 4),
        draw.randint(1, 12),
        draw.choice((torch.bfloat16, torch.float32)),
        draw.choice((torch.bfloat16, torch.float32)),
        draw.random() < 0.5,
    )
