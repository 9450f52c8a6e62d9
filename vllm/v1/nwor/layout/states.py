# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of a model runner, described by the hooks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class StateKind(enum.StrEnum):
    """TEMPORAL: a matrix a head, one for each token of a verification window, each in a
    block of its own. CONV: the last inputs of a convolution, all in one block."""

    TEMPORAL = "temporal"
    CONV = "conv"


class StatesRefused(Exception):
    """Recurrent states that cannot be followed; the message says why."""


@dataclass(frozen=True)
class StateCache:
    """One state of one layer. The owner of its table keeps `tensor` alive.

    name: of the layer. tensor, device: [num_blocks, num_heads, rows, columns], or of a
    convolution [num_blocks, num_columns, num_channels]. window: columns that a
    convolution reads; 0 for a temporal state. can_rest: a step may leave the bits of a
    head's state as they are, which then says nothing.
    """

    name: str
    kind: StateKind
    tensor: torch.Tensor
    window: int = 0
    can_rest: bool = False


@dataclass(frozen=True)
class StateGroup:
    """The recurrent states of one KV-cache group. refusal: why they are not understood,
    or empty. backend: vLLM's name of its layers' kind. block_size: tokens a block, if
    states are found in the prefix cache; else 0."""

    group_id: int
    states: Sequence[StateCache]
    refusal: str = ""
    backend: str = ""
    block_size: int = 0
