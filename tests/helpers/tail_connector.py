# SPDX-License-Identifier: Apache-2.0
"""TailConnector: exports the partial last block of each finished request.

Prefix caching shares full blocks only. This connector exports the last, partial block
as a whole, with its number of valid rows, which `on_commit` gives. In plain vLLM the
rows behind them have rejected drafts, so that equal texts give different bytes. In mode
off, where on_commit is refused, it uses vLLM's own numbers, for comparison.

One KV-cache group, no store and no loads, CPU caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import vllm_nwor
from tests.helpers.folder_connector import FolderConnector, Transfers
from vllm_nwor import Commit
from vllm_nwor.config import NworConfigError


class Tail(NamedTuple):
    """The last block of a request, and the number of its tokens in the cache."""

    block_id: int
    end: int


@dataclass
class Tails(Transfers):
    """The tails that the worker exports in a step, by request."""

    by_request: dict[str, Tail] = field(default_factory=dict)


class TailConnector(FolderConnector):
    """published: request -> (tail, its block of each layer), in the worker's
    process."""

    published: dict[str, tuple[Tail, dict[str, torch.Tensor]]] = {}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._tails: dict[str, Tail] = {}
        self._finished: set[str] = set()
        self.registration = None
        if role is KVConnectorRole.SCHEDULER:
            with suppress(NworConfigError):
                self.registration = vllm_nwor.on_commit(self._note)

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
        """Keeps the blocks; the last commit is reported after this step."""
        if self.registration is None:
            end = min(request.num_computed_tokens, request.num_tokens)
            block = block_ids[(end - 1) // self._size]
            self._tails[request.request_id] = Tail(block, end)
        self._finished.add(request.request_id)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Tails:
        tails = {name: self._tails.pop(name) for name in self._finished}
        self._finished.clear()
        return Tails(by_request=tails)

    # -- worker --------------------------------------------------------------------

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Runs before the step's commit, in which finished requests have no part."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Tails)
        for name, tail in metadata.by_request.items():
            TailConnector.published[name] = (
                tail,
                {
                    layer: cache[tail.block_id].clone()
                    for layer, cache in self._caches.items()
                },
            )
        return set(metadata.by_request), None
