# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: where vLLM keeps them, and which ones the kernels of a step read
and write, as their own metadata says.

Followed are gated delta nets (GDNAttentionMetadata). With mamba_cache_mode "align" a
block of the prefix cache holds the states of a text that ends where it ends; the
metadata names the blocks to which vLLM has copied them by then.
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
from .ledger import STATE_METADATA

# Of vLLM's metadata for layers with recurrent state, the followed kind.
FOLLOWED = "GDNAttentionMetadata"
# mamba_cache_mode of states that are followed, and whether the prefix cache has them.
MODES = {"none": False, "align": True}
# Of StateMetadata of csrc/nwor/audit/states.h.
NUM_COLUMNS = 8


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
    """One for each KV-cache group with recurrent state. The caches have been bound.
    Raises nothing."""
    found = []
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, kv.MambaSpec):
            try:
                found.append(_group(runner, gid, group))
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
    if spec.mamba_cache_mode not in MODES:
        reason = f"mamba_cache_mode is {spec.mamba_cache_mode}, in which kernels write"
        return StateGroup(gid, (), f"{reason} a state for each block; not followed")
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
    block_size = spec.block_size if MODES[spec.mamba_cache_mode] else 0
    return StateGroup(gid, states, block_size=block_size)


class StateMetadata:
    """Reads the metadata of the audited groups. layers: one layer of each group."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = tuple(layers)
        self._rows = np.zeros((len(layers), NUM_COLUMNS), dtype=np.int64)
        self._tensor = torch.from_numpy(self._rows)

    def read(self, of_layers: Any) -> tuple[torch.Tensor, Any]:
        """StateMetadata of csrc/nwor/audit/states.h for each group, [num_groups, 8]
        int64, cpu, valid until the next call, and what keeps its addresses alive.

        of_layers: vLLM's metadata by layer.

        Raises:
            StatesRefused: it is of another kind.
        """
        if not isinstance(of_layers, dict):
            kind = type(of_layers).__name__
            raise StatesRefused(f"attention metadata is a {kind}, expected a dict")
        found = [of_layers[name] for name in self._layers]
        for row, one in enumerate(found):
            self._rows[row] = _columns(one)
        return self._tensor, found


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
