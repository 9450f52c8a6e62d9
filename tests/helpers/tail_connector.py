# SPDX-License-Identifier: Apache-2.0
"""TailConnector: publishes the partial last block of each finished request.

Prefix caching shares full blocks only; what a request computed behind the last full one
is lost when it ends. Here that block leaves whole, as KV transfers move blocks, with
the number of its rows that hold the request's tokens. In plain vLLM the rows behind
hold what rejected drafts left: the same text gives other bytes each time, and no block
like that can be known by its content. `on_commit` gives length and block. In mode off,
where it is refused, vLLM's own numbers stand in: for a control.

One KV-cache group, no loads; caches of the CPU, so that a copy is a clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

import vllm_nwor
from vllm_nwor import Commit
from vllm_nwor.config import NworConfigError


class Tail(NamedTuple):
    """block_id: the block. end: tokens of the request in the cache, as far as it."""

    block_id: int
    end: int


@dataclass
class Tails(KVConnectorMetadata):
    """What the worker publishes in a step, by request."""

    by_request: dict[str, Tail] = field(default_factory=dict)


class TailConnector(KVConnectorBase_V1):
    """published: request -> (tail, its block of each layer). In the worker's process,
    which in tests is the scheduler's, too."""

    published: dict[str, tuple[Tail, dict[str, torch.Tensor]]] = {}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._tails: dict[str, Tail] = {}
        self._finished: set[str] = set()
        self.registration = None
        if role is KVConnectorRole.SCHEDULER:
            try:
                self.registration = vllm_nwor.on_commit(self._note)
            except NworConfigError:
                self._block_size = vllm_config.cache_config.block_size

    def shutdown(self) -> None:
        if self.registration is not None:
            self.registration.remove()

    # -- scheduler -----------------------------------------------------------------

    def _note(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            (blocks,) = commit.block_ids
            self._tails[commit.request_id] = Tail(blocks[-1], commit.end)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks; the last commit is reported when this step is over."""
        if self.registration is None:
            end = min(request.num_computed_tokens, request.num_tokens)
            block = block_ids[(end - 1) // self._block_size]
            self._tails[request.request_id] = Tail(block, end)
        self._finished.add(request.request_id)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Tails:
        tails = {name: self._tails.pop(name) for name in self._finished}
        self._finished.clear()
        return Tails(tails)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    # -- worker --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Before the commit of its step; requests that have ended are not in that."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Tails)
        for name, tail in metadata.by_request.items():
            TailConnector.published[name] = (
                tail,
                {
                    layer: cache[tail.block_id].clone()
                    for layer, cache in self._kv_caches.items()
                },
            )
        return set(metadata.by_request), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
