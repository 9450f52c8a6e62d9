# SPDX-License-Identifier: Apache-2.0
"""DeviceMemory: the tensors that outlive a step, out of one piece of memory.

On CUDA that piece is allocated while vLLM measures what is left for the KV cache. What
is allocated later, while vLLM binds the KV cache, comes from a pool whose content vLLM
gives up when the engine sleeps: our tables of addresses would be lost.
"""

from __future__ import annotations

import math

import torch

# As the CUDA allocator aligns; each tensor may take as much for its alignment.
ALIGNMENT = 256


class DeviceMemory:
    """Hands out tensors of `storage`, one after another; without it, allocates them.

    storage: [num_bytes] uint8 on `device`, or None. taken: what was handed out.
    """

    def __init__(self, device: torch.device, storage: torch.Tensor | None) -> None:
        self.device = device
        self._storage = storage
        self._used = 0
        self.taken: list[torch.Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with undefined content.

        Raises:
            ValueError: what is left of the storage is too small for it.
        """
        if self._storage is None:
            self.taken.append(torch.empty(shape, dtype=dtype, device=self.device))
            return self.taken[-1]
        num_bytes = math.prod(shape) * dtype.itemsize
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        if first + num_bytes > self._storage.numel():
            raise ValueError(
                f"a tensor of {num_bytes} bytes does not fit the storage of "
                f"{self._storage.numel()} bytes, of which {self._used} are used"
            )
        self._used = first + num_bytes
        self.taken.append(self._storage[first : self._used].view(dtype).view(shape))
        return self.taken[-1]
