# SPDX-License-Identifier: Apache-2.0
"""An offloading spec for CPU engines: chunks stay in this process, and a transfer is
done when it is submitted. vLLM's CPUOffloadingSpec refuses a CPU platform; its manager
is used.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 1 << 26,
        "offload_prompt_only": False,
    },
}


class HostWorker(OffloadingWorker):
    """Tests replace `bring`, which loads one block. layer_refs_per_group, and
    src_tensors as pages by chunk: as vLLM's handler of loads."""

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self.tensors = [entry.tensor for entry in caches.tensors]
        self.chunks: dict[int, list[torch.Tensor]] = {}
        self.layer_refs_per_group = caches.group_data_refs
        self._done: list[TransferResult] = []
        self.num_loaded = 0

    @property
    def src_tensors(self) -> list[dict[int, torch.Tensor]]:
        numbers = range(len(self.tensors))
        return [{at: of[n] for at, of in self.chunks.items()} for n in numbers]

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        for block, chunk in self._pairs(src_spec, dst_spec):
            self.chunks[chunk] = [tensor[block].clone() for tensor in self.tensors]
        return self._finish(job_id, len(src_spec.block_ids))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        for block, chunk in self._pairs(dst_spec, src_spec):
            self.num_loaded += 1
            self.bring(block, chunk)
        return self._finish(job_id, len(dst_spec.block_ids))

    def bring(self, block: int, chunk: int) -> None:
        for tensor, saved in zip(self.tensors, self.chunks[chunk], strict=True):
            tensor[block] = saved

    @staticmethod
    def _pairs(blocks: Any, chunks: Any) -> list[tuple[int, int]]:
        return list(
            zip(blocks.block_ids.tolist(), chunks.block_ids.tolist(), strict=True)
        )

    def _finish(self, job_id: int, num_blocks: int) -> bool:
        size = num_blocks * sum(tensor[0].nbytes for tensor in self.tensors)
        self._done.append(TransferResult(job_id, True, size, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...


class HostSpec(CPUOffloadingSpec):
    """last: the newest worker."""

    last: HostWorker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        HostSpec.last = HostWorker(kv_caches)
        return HostSpec.last
