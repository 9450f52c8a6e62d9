# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: where vLLM keeps them, and which ones the kernels of a step read
and write, as their own metadata says.

Followed are gated delta nets (GDNAttentionMetadata) whose states are not found in the
prefix cache (mamba_cache_mode none), and rings of the target whose layers say how many
tokens they compress to one entry. The block of a request's ring is the one entry of its
block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as kv

from ..base.errors import error_text
from ..base.wrap import Wrapped, install_all
from ..layout.states import StateCache, StateGroup, StateKind, StatesRefused
from .layers import draft_layer_names, entry_tokens
from .ledger import STATE_METADATA

# Of vLLM's metadata for layers with recurrent state, the followed kind.
FOLLOWED = "GDNAttentionMetadata"
# Of StateMetadata of csrc/nwor/audit/states.h.
NUM_COLUMNS = 8
# Specs of rings: none in 0.26, KpoolTailSpec in 0.30 and 0.31 only.
RINGS = ("CircularBufferSpec", "KpoolTailSpec")
# Attributes of layers with a ring: how many tokens they compress to one entry.
RATIOS = ("compress_ratio", "_index_kpool")


def install(module: ModuleType) -> None:
    """Wraps the V2 runner's part for hybrid models in `module`. Raises HostMismatch."""
    install_all(module, {STATE_METADATA: _prepare_attn})


def watch(runner: Any, state: Any) -> None:
    """Call when the observers of a runner are built. state: its RunnerState."""
    model_state = getattr(runner, "model_state", None)
    if model_state is not None and state.metadata_final:
        model_state.nwor_state = state


def _prepare_attn(wrapped: Wrapped, model_state: Any, args: Any, kwargs: Any) -> Any:
    """Graph capture, dummy runs and drafters call it, too: then there is no Step."""
    metadata = wrapped(*args, **kwargs)
    state = model_state.__dict__.get("nwor_state")
    if state is not None and state.step is not None:
        for metadata_final in state.metadata_final:
            metadata_final(state.step, metadata)
    return metadata


def groups_of(runner: Any) -> list[StateGroup]:
    """One for each KV-cache group with recurrent state or rings. The caches have been
    bound. Raises nothing."""
    found = []
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        is_ring = type(spec).__name__ in RINGS
        if is_ring or isinstance(spec, kv.MambaSpec):
            try:
                describe = _rings if is_ring else _group
                found.append(describe(runner, gid, group))
            except Exception as error:
                reason = f"its states could not be examined: {error_text(error)}"
                found.append(StateGroup(gid, (), reason))
    return found


def _group(runner: Any, gid: int, group: Any) -> StateGroup:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    spec = group.kv_cache_spec
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if kind != "GDN_ATTN":
        return StateGroup(gid, (), f"{kind} is not followed, only GDN_ATTN is")
    if spec.mamba_cache_mode != "none":
        mode = spec.mamba_cache_mode
        return StateGroup(gid, (), f"mamba_cache_mode is {mode}, only none is followed")
    modules = runner.compilation_config.static_forward_context
    states: list[StateCache] = []
    for name in group.layer_names:
        caches = modules[name].kv_cache
        if len(caches) != 2:
            reason = f"layer {name} has {len(caches)} states; expected 2"
            return StateGroup(gid, (), reason)
        conv, temporal = caches
        if is_conv_state_dim_first():
            conv = conv.transpose(1, 2)
        window = conv.shape[1] - spec.num_speculative_blocks
        states.append(StateCache(name, StateKind.CONV, conv, window))
        states.append(StateCache(name, StateKind.TEMPORAL, temporal))
    return StateGroup(gid, states)


def _rings(runner: Any, gid: int, group: Any) -> StateGroup:
    drafters = draft_layer_names(runner)
    config = runner.vllm_config.speculative_config
    num_drafts = 0 if config is None else config.num_speculative_tokens
    rings: list[StateCache] = []
    for name in group.layer_names:
        if name in drafters:
            continue
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        layer = runner.compilation_config.static_forward_context[name]
        if not (ratio := _ratio_of(layer, num_drafts)):
            kind = type(layer).__name__
            reason = "does not say how many tokens it compresses to one entry"
            return StateGroup(gid, (), f"layer {name} has a ring; {kind} {reason}")
        if entry_tokens(runner, gid) != spec.block_size:
            reason = f"layer {name} has a ring, and its block is split in the table"
            return StateGroup(gid, (), reason)
        # A layer may have another number of rows than the spec.
        rows = getattr(layer, "capacity", spec.block_size)
        view = _rows_of(layer.kv_cache, rows)
        rings.append(StateCache(name, StateKind.RING, view, ratio=ratio))
    reason = "" if rings else "all its rings are the drafter's"
    return StateGroup(gid, rings, reason)


def _ratio_of(layer: Any, num_drafts: int) -> int:
    """Tokens that a layer with a ring compresses to one entry; 0: it does not say."""
    for name in RATIOS:
        if ratio := getattr(layer, name, 0):
            return int(ratio)
    # As ring_shortage has it.
    required = getattr(layer, "required_rows", None)
    return 0 if required is None else int(required) + 1 - num_drafts


def _rows_of(cache: torch.Tensor, rows: int) -> torch.Tensor:
    """[num_blocks, num_heads, rows, width], a view of a bound ring. Raises RuntimeError
    if there is none."""
    if cache.ndim == 3 and cache.shape[1] == rows:  # DeepSeek V4.1
        return cache.unsqueeze(1)
    if cache.ndim == 4 and cache.shape[2] == rows:  # GLM-5: keys, gates
        return cache
    if cache.ndim == 4 and cache.shape[1] == rows:  # QSA
        return cache.transpose(1, 2)
    return cache.view(cache.shape[0], 1, rows, -1)  # Step 5


class StateMetadata:
    """Reads the metadata of the audited groups."""

    def __init__(self, groups: Sequence[StateGroup]) -> None:
        self._groups = [(of.is_ring, of.states[0].name, of.group_id) for of in groups]
        self._rows = np.zeros((len(groups), NUM_COLUMNS), dtype=np.int64)
        self._tensor = torch.from_numpy(self._rows)

    def read(
        self, of_layers: Any, block_tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """StateMetadata of csrc/nwor/audit/states.h for each group, [num_groups, 8]
        int64, cpu, valid until the next call, and what keeps its addresses alive.

        of_layers: vLLM's metadata by layer. block_tables: as Step.

        Raises:
            StatesRefused: it is of another kind.
        """
        if not isinstance(of_layers, dict):
            kind = type(of_layers).__name__
            raise StatesRefused(f"attention metadata is a {kind}, expected a dict")
        found = []
        for row, (is_ring, name, group_id) in enumerate(self._groups):
            if is_ring:
                table = block_tables[group_id]
                self._rows[row, 4:6] = table.data_ptr(), table.stride(0)
            else:
                found.append(of_layers[name])
                self._rows[row] = _columns(found[-1])
        return self._tensor, (found, block_tables)


def _columns(metadata: Any) -> tuple[int, ...]:
    if type(metadata).__name__ != FOLLOWED:
        kind = type(metadata).__name__
        raise StatesRefused(f"a layer's metadata is a {kind}, expected {FOLLOWED}")
    windows = metadata.spec_sequence_masks
    blocks = metadata.non_spec_state_indices_tensor
    has_state = metadata.has_initial_state
    of_windows: tuple[int, ...] = (0, 0, 0, 0)
    if windows is not None:
        table = metadata.spec_state_indices_tensor
        accepted = metadata.num_accepted_tokens
        of_windows = windows.data_ptr(), table.data_ptr(), table.stride(0)
        of_windows = *of_windows, accepted.data_ptr()
    of_others = (0, 0) if blocks is None else (blocks.data_ptr(), blocks.stride(0))
    return (
        *of_windows,
        *of_others,
        0 if has_state is None else has_state.data_ptr(),
        metadata.num_decodes,
    )
