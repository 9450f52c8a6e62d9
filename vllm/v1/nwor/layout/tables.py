# SPDX-License-Identifier: Apache-2.0
"""The tables of layers that the ops take, and the device memory for all data that
outlives a step.

On CUDA that memory is one tensor, allocated while vLLM measures how much memory the KV
cache can have. Memory that is allocated later, while vLLM binds the KV cache, comes
from a pool that loses its content when the engine sleeps: our tables of addresses would
be lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kv_layout import KVLayout

# As the CUDA allocator aligns; each tensor may take as much for its alignment.
ALIGNMENT = 256

# VLLM_NWOR_ON_REJECT=poison writes this to each byte of a rejected slot. The numbers
# are large but finite, also times a scale of the same bytes: 5e4 as bf16 or fp32, 71 as
# int8. For slots of fp16 or fp8 alone, NARROW_POISON is larger: 3e4 as fp16, 240 as fp8
# e4m3, 29e3 as e5m2.
POISON, NARROW_POISON = 0x47, 0x77


class DeviceMemory:
    """Hands out tensors of `storage`, one after another; without it, allocates them.

    storage: [num_bytes] uint8 on `device`, or None.
    """

    def __init__(self, device: torch.device, storage: torch.Tensor | None) -> None:
        self.device = device
        self._storage = storage
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with undefined content.

        Raises:
            ValueError: the rest of the storage is too small for it.
        """
        if self._storage is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        num_bytes = math.prod(shape) * dtype.itemsize
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        if first + num_bytes > self._storage.numel():
            raise ValueError(
                f"a tensor of {num_bytes} bytes does not fit the storage of "
                f"{self._storage.numel()} bytes: {self._used} are used"
            )
        self._used = first + num_bytes
        return self._storage[first : self._used].view(dtype).view(shape)


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache. The owner of its table keeps `kv_cache` alive.

    poison: the byte for its rejected slots, if they are poisoned.
    """

    name: str
    kv_cache: torch.Tensor
    layout: KVLayout
    poison: int = POISON


@dataclass(frozen=True)
class CopyTable:
    """Layers that one launch covers.

    table: [num_layers, 9] int64, device (ops.TABLE_COLUMNS).
    runs: [block_size, num_runs, 2] int32, device, or None for row caches.
    names: of the layers.
    """

    table: torch.Tensor
    runs: torch.Tensor | None
    names: tuple[str, ...]


def copy_tables(
    layers: Sequence[LayerCache], memory: DeviceMemory
) -> tuple[CopyTable, ...]:
    """The layers' table rows: all row caches in one table, the first, and one for each
    distinct packing. A layer's place in a row of the log follows the layers' order."""
    kinds: dict[Any, list[tuple[LayerCache, int]]] = {}
    log_offset = 0
    for layer in layers:
        runs = layer.layout.runs
        packing = () if runs is None else (*runs.shape, runs.numpy().tobytes())
        kinds.setdefault(packing, []).append((layer, log_offset))
        log_offset += layer.layout.slot_bytes
    tables = []
    for _, places in sorted(kinds.items(), key=lambda kind: kind[0] != ()):
        rows = [one.layout.table_row(one.kv_cache.data_ptr(), at) for one, at in places]
        host = torch.tensor(rows, dtype=torch.int64)
        table = memory.take(tuple(host.shape), torch.int64).copy_(host)
        runs = places[0][0].layout.runs
        on_device = None if runs is None else runs.to(memory.device)
        names = tuple(layer.name for layer, _ in places)
        tables.append(CopyTable(table, on_device, names))
    return tuple(tables)
