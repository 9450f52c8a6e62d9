# SPDX-License-Identifier: Apache-2.0
"""SlowFolder: vLLM's ExampleConnector, with loads that take steps: what is asked for in
a step arrives in the next one. Tests replace `arrive`, and what `failed` returns.

Not supported: preempted requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)


@dataclass
class Loads(ExampleConnectorMetadata):
    """names: of the requests that are to be loaded, the last ones of `requests`."""

    names: list[str] = field(default_factory=list)


class SlowFolder(ExampleConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: dict[str, tuple[list[int], list[int]]] = {}
        self._waiting: dict[str, tuple[ReqMeta, Any]] = {}

    # -- the scheduler ---------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        number, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return number, bool(number)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            self._asked[request.request_id] = request.prompt_token_ids, ids

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        stores = super().build_connector_meta(scheduler_output)
        meta, self._asked, asked = Loads(stores.requests), {}, self._asked
        for name, about in asked.items():
            meta.add_request(*about, self._block_size, False, [])
            meta.names.append(name)
        return meta

    # -- the worker ------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        layers = forward_context.no_compile_layers
        of_loads = metadata.requests[len(metadata.requests) - len(metadata.names) :]
        for name, request in zip(metadata.names, of_loads, strict=True):
            self._waiting[name] = request, layers

    def arrive(self, request: ReqMeta, layers: Any) -> None:
        """Loads what a request asked for."""
        metadata, context = ExampleConnectorMetadata([request]), SimpleNamespace()
        context.no_compile_layers, context.attn_metadata = layers, dict.fromkeys(layers)
        before = self._get_connector_metadata()
        self.bind_connector_metadata(metadata)
        try:
            super().start_load_kv(context)
        finally:
            self.bind_connector_metadata(before)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        metadata: Any = self._get_connector_metadata()
        arrived = self._waiting.keys() - set(metadata.names)
        for name in arrived:
            self.arrive(*self._waiting.pop(name))
        return None, set(arrived)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.failed()

    def failed(self) -> set[int]:
        """Blocks whose load has failed since the last call."""
        return set()
