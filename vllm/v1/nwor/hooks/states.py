# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: where vLLM keeps them, and which ones the kernels of a step read
and write, as their own metadata says.

KINDS has the layers that are followed. With mamba_cache_mode "align" a block of the
prefix cache holds the states of a text that ends where it ends; the metadata names the
blocks to which vLLM has copied them by then.

Rings of the target are followed, too, whose layers say how many tokens they compress to
one entry. The block of a request's ring is the one entry of its block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1 import kv_cache_interface as kv

from ..base.errors import error_text
from ..base.wrap import Wrapped, install_all
from ..layout.states import StateCache, StateGroup, StateKind, StatesRefused
from .layers import draft_layer_names, entry_tokens
from .ledger import STATE_METADATA

# mamba_cache_mode of states that are followed, and whether the prefix cache has them.
MODES = {"none": False, "align": True}
# Of StateMetadata of csrc/nwor/audit/states.h.
NUM_COLUMNS = 11
# Of these, the ones that a block table has.
TABLE_COLUMNS = slice(5, 7)
# The module of a layer whose weight has the width of its convolution.
CONVOLUTIONS = ("conv1d", "conv", "q_conv1d")
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
    """One for each KV-cache group with recurrent state or rings, these last. The caches
    have been bound. Raises nothing."""
    recurrent, rings = [], []
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        of_rings = is_ring(group.kv_cache_spec)
        if of_rings or isinstance(group.kv_cache_spec, kv.MambaSpec):
            try:
                found = (_rings if of_rings else _group)(runner, gid, group)
            except Exception as error:
                reason = f"its states could not be examined: {error_text(error)}"
                found = StateGroup(gid, (), reason)
            if of_rings:
                rings.append(replace(found, what="rings"))
            else:
                recurrent.append(found)
    return [*recurrent, *rings]


def is_ring(spec: Any) -> bool:
    """spec: of a KV-cache group."""
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return type(spec).__name__ in RINGS


def _group(runner: Any, gid: int, group: Any) -> StateGroup:
    spec, config = group.kv_cache_spec, runner.vllm_config
    modules = runner.compilation_config.static_forward_context
    drafters = draft_layer_names(runner)
    layers = {name: modules[name] for name in group.layer_names if name not in drafters}
    if not layers:
        return StateGroup(gid, (), "all its layers are the drafter's")
    backends = {layer.get_attn_backend().get_name() for layer in layers.values()}
    backend = ", ".join(sorted(backends))
    if refusal := _refusal(spec, config, backend):
        return StateGroup(gid, (), refusal)
    states: list[StateCache] = []
    for name, layer in layers.items():
        try:
            states += _states_of(name, layer, KINDS[backend], spec)
        except StatesRefused as refused:
            return StateGroup(gid, (), str(refused))
    block_size = spec.block_size if MODES[spec.mamba_cache_mode] else 0
    has_checkpoints = getattr(spec, "num_prefill_checkpoint_blocks", 0) > 0
    return StateGroup(gid, states, "", backend, block_size, has_checkpoints)


def _refusal(spec: Any, config: Any, backend: str) -> str:
    """Why no layer of a group can be followed, or nothing."""
    cache = config.cache_config
    if getattr(cache, "use_kda_recoverssm", False):
        return (
            "RecoverSSM keeps a window's inputs and brings its one state up to date "
            "in the next step"
        )
    if getattr(cache, "use_replayssm", False):
        return "ReplaySSM keeps inputs, and writes its state only once in many tokens"
    if config.parallel_config.use_ubatching:
        return "microbatches (DBO) have metadata of their own for each part of a batch"
    if backend not in KINDS:
        return f"{backend} is not followed, only {', '.join(KINDS)} are"
    if spec.mamba_cache_mode not in MODES:
        mode = spec.mamba_cache_mode
        return f"mamba_cache_mode is {mode}: kernels write a state for each block"
    return ""


def _states_of(name: str, layer: Any, kind: Kind, spec: Any) -> list[StateCache]:
    """Raises StatesRefused."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    caches, number = layer.kv_cache, len(kind.states)
    if len(caches) != number:
        raise StatesRefused(f"layer {name} has {len(caches)} states; expected {number}")
    states = []
    for cache, of in zip(caches, kind.states, strict=True):
        if of is StateKind.TEMPORAL:
            if cache.dim() == 3:  # Mamba1 has no heads
                cache = cache.unsqueeze(2)
            states.append(StateCache(name, of, cache, can_rest=kind.can_rest))
            continue
        if is_conv_state_dim_first():
            cache = cache.transpose(1, 2)
        found = [getattr(layer, convolution, None) for convolution in CONVOLUTIONS]
        width = next(one.weight.shape[-1] for one in found if one is not None)
        num_columns = width - 1 + spec.num_speculative_blocks
        if cache.shape[1] != num_columns:
            raise StatesRefused(
                f"the convolution of layer {name} keeps {cache.shape[1]} inputs; "
                f"expected {num_columns}, width - 1 and one for each draft"
            )
        states.append(StateCache(name, of, cache, width - 1))
    return states


def _rings(runner: Any, gid: int, group: Any) -> StateGroup:
    drafters = draft_layer_names(runner)
    rings: list[StateCache] = []
    for name in group.layer_names:
        if name in drafters:
            continue
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        layer = runner.compilation_config.static_forward_context[name]
        if not (ratio := ratio_of(runner, name)):
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


def ratio_of(runner: Any, name: str) -> int:
    """Tokens that a layer with a ring compresses to one entry; 0: it does not say."""
    layer = runner.compilation_config.static_forward_context[name]
    for name in RATIOS:
        if ratio := getattr(layer, name, 0):
            return int(ratio)
    # As ring_shortage has it.
    config = runner.vllm_config.speculative_config
    num_drafts = 0 if config is None else config.num_speculative_tokens
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
        self._groups = [
            (of.states[0].name, KINDS.get(of.backend), of.group_id) for of in groups
        ]
        self._rows = np.zeros((len(groups), NUM_COLUMNS), dtype=np.int64)
        self._tensor = torch.from_numpy(self._rows)

    def read(
        self, of_layers: Any, block_tables: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """StateMetadata of csrc/nwor/audit/states.h for each group, [num_groups, 11]
        int64, cpu, valid until the next call, and what keeps its addresses alive.

        of_layers: vLLM's metadata by layer. block_tables: as Step.

        Raises:
            StatesRefused: it is of another kind.
        """
        if not isinstance(of_layers, dict):
            kind = type(of_layers).__name__
            raise StatesRefused(f"attention metadata is a {kind}, expected a dict")
        found, only_decodes = [], _replays_decodes()
        for row, (name, of, group_id) in enumerate(self._groups):
            if of is None:  # a ring
                self._rows[row, TABLE_COLUMNS] = _strided(block_tables[group_id])
                continue
            metadata = of_layers[name]
            if (kind := type(metadata).__name__) != of.metadata:
                text = f"a layer's metadata is a {kind}, expected {of.metadata}"
                raise StatesRefused(text)
            self._rows[row] = *of.read(metadata), only_decodes
            found.append(metadata)
        return self._tensor, (found, block_tables)


def _replays_decodes() -> bool:
    """Whether the step replays a CUDA graph for decodes of one length. vLLM's V1 runner
    chooses it by the numbers of tokens alone (vLLM issue 53051). On V2 there is no
    context yet."""
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    graph, is_full = context.batch_descriptor, CUDAGraphMode.FULL
    return (
        context.cudagraph_runtime_mode == is_full
        and graph is not None
        and graph.uniform
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strided(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


def _by_mask(of: Any) -> tuple[int, ...]:
    """Rows are windows by a mask."""
    of_windows = (0, 0, 0, 0, 0)
    if of.spec_sequence_masks is not None:
        table = _strided(of.spec_state_indices_tensor)
        mask, accepted = of.spec_sequence_masks, of.num_accepted_tokens
        of_windows = mask.data_ptr(), 0, *table, accepted.data_ptr()
    others = _strided(of.non_spec_state_indices_tensor)
    return *of_windows, *others, _address(of.has_initial_state), of.num_decodes, 0


def _split(
    of: Any,
    decodes: torch.Tensor | None,
    prefills: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
    has_state: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """The first rows are decodes: windows, of one token without speculation."""
    windows = of.num_decodes, *_strided(decodes), _address(num_accepted)
    return 0, *windows, *_strided(prefills), _address(has_state), 0, _address(seq_lens)


def _mamba(of: Any) -> tuple[int, ...]:
    tables = of.state_indices_tensor_d, of.state_indices_tensor_p
    return _split(of, *tables, of.num_accepted_tokens, of.has_initial_states_p)


def _linear(of: Any) -> tuple[int, ...]:
    """The kernels clear the state of a prefill whose text is not longer than its
    query."""
    table = of.state_indices_tensor
    return _split(of, table, table[of.num_decodes :], None, seq_lens=of.seq_lens)


def _bailing(of: Any) -> tuple[int, ...]:
    """As _linear."""
    tables = of.state_indices_tensor_d, of.state_indices_tensor_p
    return _split(of, *tables, of.num_accepted_tokens, seq_lens=of.seq_lens)


@dataclass(frozen=True)
class Kind:
    """Layers with recurrent state of one kind.

    metadata: its class. states: of a layer, in vLLM's order. read: the columns of
    StateMetadata of csrc/nwor/audit/states.h. can_rest: as StateCache.
    """

    metadata: str
    states: tuple[StateKind, ...]
    read: Callable[[Any], tuple[int, ...]]
    can_rest: bool = True


_CONV, _TEMPORAL = StateKind.CONV, StateKind.TEMPORAL
_BOTH = _CONV, _TEMPORAL
# By the name of vLLM's backend. Kimi's delta attention has GDN_ATTN, too.
KINDS = {
    "GDN_ATTN": Kind("GDNAttentionMetadata", _BOTH, _by_mask, can_rest=False),
    "MAMBA1_ATTN": Kind("Mamba1AttentionMetadata", _BOTH, _mamba),
    "MAMBA2_ATTN": Kind("Mamba2AttentionMetadata", _BOTH, _mamba),
    "SHORT_CONV_ATTN": Kind("ShortConvAttentionMetadata", (_CONV,), _mamba),
    "LINEAR_ATTN": Kind("LinearAttentionMetadata", (_TEMPORAL,), _linear),
    "BAILING_LINEAR_ATTN": Kind(
        "BailingLinearAttentionMetadata", (_TEMPORAL,), _bailing
    ),
}
