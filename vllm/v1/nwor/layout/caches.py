# SPDX-License-Identifier: Apache-2.0
"""A description of a model runner, made by the hooks: its limits, and its KV caches
once they are bound. Observers are built from it and do not read vLLM's objects."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..step import LoadedAdapters
from .regions import StagedGroup
from .states import StateGroup
from .tables import LayerCache


class Loads(enum.IntEnum):
    """Whether a KV connector fills blocks.

    NONE: it does not. KNOWN: the hooks see which ones, and where they come from
    (`Observer.blocks_transferred`); of a request: the scheduler says which ones.
    UNKNOWN: the scheduler has to say which ones; if it cannot, any block of a request's
    cached prefix may be loaded.
    """

    NONE = 0
    KNOWN = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class RunnerLimits:
    """Limits of a runner, known before its KV caches are sized.

    draft_refusal: why drafts cannot be protected; step_refusal: why its steps cannot be
    followed at all. Empty if they can.
    max_num_seqs, max_num_batched_tokens, max_model_len: vLLM's. num_drafts: vLLM's
    num_speculative_tokens, 0 without speculation. num_rows: requests in a batch, at
    most.
    num_states: requests that the runner has states for, where a Step has state_indices;
    else 0. max_in_flight: steps with unread outputs, at most.
    is_async: asynchronous scheduling: the host does not know a running request's text.
    sleeps: memory that is allocated when caches are bound loses its content in sleep.
    loads: of the KV connector. has_own_store: nobody else fills its store, which is
    empty at start. bytes_changed_by: what makes it bring other bytes than it stored.
    drafts_by_model: the drafter runs a model on the device, after sampling.
    """

    device: torch.device
    draft_refusal: str
    step_refusal: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int
    num_rows: int
    num_states: int
    max_in_flight: int
    is_async: bool
    sleeps: bool
    loads: Loads
    has_own_store: bool = False
    bytes_changed_by: str = ""
    drafts_by_model: bool = False


@dataclass(frozen=True)
class ExpectedLayer:
    """A layer with a KV cache, before that is sized.

    kind: of its cache. page_bytes: of a block. window: of sliding-window attention.
    is_target: it has keys and values of the target model. group: its KV-cache group.
    states: shapes of its recurrent states. is_cached: they are found in the prefix
    cache. ratio: tokens that a layer with a ring compresses to one entry, if it is
    followed; else 0.
    """

    kind: str
    page_bytes: int
    block_size: int
    window: int | None
    is_target: bool
    group: int = 0
    states: tuple[tuple[int, ...], ...] = ()
    is_cached: bool = False
    ratio: int = 0


@dataclass(frozen=True)
class ExpectedCaches:
    """The KV caches that a runner will have.

    available_bytes: for all of them, None if that is not known yet. num_blocks: if that
    was chosen, or layers are of several kinds.
    """

    limits: RunnerLimits
    layers: Sequence[ExpectedLayer]
    available_bytes: int | None
    num_blocks: int | None


@dataclass(frozen=True)
class GroupCaches:
    """One KV-cache group with bound caches.

    layers: the target's, each cache once; none if all layers are the drafter's.
    refusal: why they are not supported. kept_by_vllm: why vLLM itself keeps the state
    that rejected drafts would overwrite. staged: its shadow blocks, or why it has none.
    block_size: tokens a block, as the scheduler counts. entry_tokens: tokens for which
    an entry of the block table stands. num_entries: width of the block table. Both are
    0 without layers.
    window: how many of a request's last positions it still owns; 0: all.
    """

    group_id: int
    layers: Sequence[LayerCache]
    refusal: str
    kept_by_vllm: str
    staged: StagedGroup | str
    block_size: int
    entry_tokens: int
    num_entries: int
    window: int


@dataclass(frozen=True)
class RunnerCaches:
    """The bound KV caches of a runner.

    num_blocks: as the worker has them, shadow blocks included. exports: names of the KV
    connectors that may read the cache inside the forward; empty for none.
    reserved_blocks: KV blocks reserved as shadow blocks, by group id.
    text_of: (index, number) -> [number] int32: the first tokens of a request. index:
    that of Step.state_of_request or, without it, the batch row; then the number is that
    of the tokens computed before this step, whatever is asked for.
    model: its name or folder. connector: the KV connector's name, empty for none.
    rank, world_size: of this worker. vllm_version: as vLLM says it. adapters: those
    that the worker loads; None without LoRA.
    states: recurrent ones, and rings. read_states: reads a step's metadata, of the
    groups that are followed (hooks.states.StateMetadata.read).
    """

    limits: RunnerLimits
    groups: Sequence[GroupCaches]
    num_blocks: int
    exports: str
    reserved_blocks: dict[int, int]
    text_of: Callable[[int, int], torch.Tensor]
    rank: int
    world_size: int
    vllm_version: str
    model: str = ""
    connector: str = ""
    adapters: LoadedAdapters | None = None
    states: Sequence[StateGroup] = ()
    read_states: (
        Callable[[Any, Sequence[torch.Tensor]], tuple[torch.Tensor, Any]] | None
    ) = None
