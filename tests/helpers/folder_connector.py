# SPDX-License-Identifier: Apache-2.0
"""A KV connector that conforms, and copies of it with one fault each, for the
conformance kit's tests.

FolderConnector keeps each full block of a text in a file of `folder`, for one KV-cache
group. A block of an answer is stored a step after its last token ran, so that no
rejected draft is in it. With `"loads": "async"` a load runs, and is reported, in the
step after it was asked for. Tests replace `arrive`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Blocks = list[tuple[int, Path]]


@dataclass
class Transfers(KVConnectorMetadata):
    """loads: by request. ended: requests whose blocks are free after the stores."""

    stores: Blocks = field(default_factory=list)
    loads: dict[str, Blocks] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)


class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        option = self._kv_transfer_config.get_from_extra_config
        self._folder = Path(option("folder", "none"))
        self._is_async = option("loads", "sync") == "async"
        self._requests: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._loading: set[str] = set()
        self._next = Transfers()
        # Of the worker.
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()
        self._waiting: dict[str, Blocks] = {}

    # -- scheduler -----------------------------------------------------------------

    def identity(self, request: Any) -> tuple[Any, ...]:
        """What decides over a text's keys and values, and who may have them."""
        adapter = request.lora_request and request.lora_request.lora_path
        return request.cache_salt, adapter

    def num_stored(self, request: Any) -> int:
        """Tokens of a finished request with keys and values: the last one never ran."""
        return min(request.num_computed_tokens, request.num_tokens - 1)

    def paths(self, request: Any, end: int) -> Iterator[Path]:
        """Of each full block up to `end`."""
        digest = hashlib.sha256(repr(self.identity(request)).encode())
        tokens = list(request.all_token_ids)
        for start in range(0, end // self._size * self._size, self._size):
            digest.update(repr(tokens[start : start + self._size]).encode())
            yield self._folder / f"{digest.hexdigest()}.pt"

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._requests[request.request_id] = request
        self._local[request.request_id] = num_computed_tokens
        num_found = 0
        for path in self.paths(request, request.num_tokens - 1):
            if not path.exists():
                break
            num_found += self._size
        found = self.answer(request, num_found, num_computed_tokens)
        return found, self._is_async and found > 0

    def answer(self, request: Any, num_found: int, num_local: int) -> int:
        return max(num_found - num_local, 0)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            name, (ids,) = request.request_id, blocks.get_block_ids()
            first = self._local[name] // self._size
            end = self._local[name] + num_external_tokens
            paths = list(self.paths(request, end))
            self._next.loads[name] = self.pairs(ids[first:], paths[first:])
            self._loading.update([name] * self._is_async)

    def pairs(self, ids: list[int], paths: list[Path]) -> Blocks:
        """Block 0 is in front of a sliding window."""
        return [pair for pair in zip(ids, paths, strict=False) if pair[0]]

    def update_connector_output(self, connector_output: Any) -> None:
        self._loading -= connector_output.finished_recving or set()

    def _store(self, request: Any, ids: list[int], end: int) -> None:
        pairs = self.pairs(ids, list(self.paths(request, end)))
        self._next.stores += [pair for pair in pairs if not pair[1].exists()]

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if name not in self._next.loads:  # or else it counts as computed already
                request, (ids,) = (
                    self._requests[name],
                    self._kv_cache_manager.get_blocks(name).get_block_ids(),
                )
                ran = request.num_computed_tokens
                # Those of a prompt are there after this step, and are no drafts.
                end = max(ran, min(ran + count, request.num_prompt_tokens))
                self._store(request, ids, end)
        transfers, self._next = self._next, Transfers()
        return transfers

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._requests.pop(name, None)
        if name in self._loading or not block_ids:
            return False, None
        self._store(request, block_ids, self.num_stored(request))
        self._next.ended.add(name)
        return True, None

    # -- worker --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, blocks in self._connector_metadata.loads.items():
            if self._is_async:
                self._waiting[name] = blocks
            else:
                self.arrive(blocks)

    def arrive(self, blocks: Blocks) -> None:
        for block, path in blocks:
            self.load(block, path)

    def load(self, block: int, path: Path) -> None:
        if not path.exists():
            self.missing(block)
            return
        for name, saved in torch.load(path).items():
            self._caches[name][block] = saved

    def missing(self, block: int) -> None:
        self._failed.add(block)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for block, path in self._connector_metadata.stores:
            saved = {name: of[block].clone() for name, of in self._caches.items()}
            torch.save(saved, path)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        received = self._waiting.keys() - self._connector_metadata.loads
        for name in received:
            self.arrive(self._waiting.pop(name))
        return self._connector_metadata.ended, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class Pair(FolderConnector):
    """For two engines, one that prefills and one that decodes: all blocks of a prompt,
    its last one included, go to files of the request's own. As with NixlConnector,
    asynchronous loads go up to the last token, and a request is loaded once."""

    def paths(self, request: Any, end: int) -> Iterator[Path]:
        params = request.kv_transfer_params or {}
        name = params.get("remote_request_id", request.request_id)
        for number in range(-(-end // self._size)):
            yield self._folder / f"{name}-{number}.pt"

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._local[request.request_id] = num_computed_tokens
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        num_tokens = request.num_prompt_tokens - (not self._is_async)
        return self.answer(request, num_tokens, num_computed_tokens), self._is_async

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if params := request.kv_transfer_params:
            params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers, self._next = self._next, Transfers()
        return transfers

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        is_delayed, _ = super().request_finished(request, block_ids)
        about = {"remote_request_id": request.request_id}
        return is_delayed, {"do_remote_prefill": True, **about}


# -- faults; tests/e2e/test_conformance.py has the case of each --------------------


class OfAnyTenant(FolderConnector):
    """A text is found whatever its cache_salt is."""

    def identity(self, request: Any) -> tuple[Any, ...]:
        return super().identity(request)[1:]


class OfAnyAdapter(FolderConnector):
    """A text is found whatever its LoRA adapter is."""

    def identity(self, request: Any) -> tuple[Any, ...]:
        return super().identity(request)[:1]


class ShorterThanLocal(FolderConnector):
    """Where the local cache has as much, the answer is a negative number."""

    def answer(self, request: Any, num_found: int, num_local: int) -> int:
        if request.num_preemptions or not 0 < num_found <= num_local:
            return super().answer(request, num_found, num_local)
        return num_found - num_local - self._size


class WithTheLastToken(FolderConnector):
    """The last token of an answer, which never ran, is stored, too."""

    def num_stored(self, request: Any) -> int:
        return request.num_tokens


class Silent(FolderConnector):
    """A load that fails is not reported as failed."""

    def missing(self, block: int) -> None: ...


class LosesTheAborted(FolderConnector):
    """The load of a request that was aborted meanwhile is not reported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        ended, received = super().get_finished(finished_req_ids)
        return ended, received - finished_req_ids


class LacksAResumedBlock(FolderConnector):
    """After a preemption the last block of a request is not loaded."""

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.num_preemptions and num_external_tokens > 0:
            loads = self._next.loads[request.request_id]
            self._next.loads[request.request_id] = loads[:-1]


class LoadsAFileOnce(FolderConnector):
    """What another request is loading is not loaded a second time."""

    _wanted: dict[str, set[Path]] = {}

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        under_way = {path for name in self._loading for path in self._wanted[name]}
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            loads, name = self._next.loads, request.request_id
            self._wanted[name] = {path for _, path in loads[name]}
            loads[name] = [pair for pair in loads[name] if pair[1] not in under_way]


class LosesNumberZero(FolderConnector):
    """The first block of a store has the number 0, which is taken for none."""

    _numbers: dict[Path, int] = {}

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for _, path in self._connector_metadata.stores:
            self._numbers.setdefault(path, len(self._numbers))

    def load(self, block: int, path: Path) -> None:
        if self._numbers.get(path):
            super().load(block, path)


class FromTheStart(FolderConnector):
    """A new request's load begins with its first block, not behind the local ones."""

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if not request.num_preemptions:
            self._local[request.request_id] = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class RoundsUp(FolderConnector):
    """A prompt's last block that is half full is stored, and loaded as a full one."""

    def paths(self, request: Any, end: int) -> Iterator[Path]:
        yield from super().paths(request, end)
        length, half = min(end, request.num_prompt_tokens), self._size // 2
        if end // self._size == length // self._size and length % self._size >= half:
            tokens = request.all_token_ids[: length // half * half]
            about = repr((*self.identity(request), *tokens)).encode()
            yield self._folder / f"{hashlib.sha256(about).hexdigest()}.pt"

    def answer(self, request: Any, num_found: int, num_local: int) -> int:
        num_found = min(num_found, request.num_tokens - 1)
        return super().answer(request, num_found, num_local)


class OfTheFirstStep(FolderConnector):
    """A prompt's second step stores the blocks of the first one under its own keys."""

    def _store(self, request: Any, ids: list[int], end: int) -> None:
        if 0 < (ran := request.num_computed_tokens) < request.num_prompt_tokens:
            ids = ids[: ran // self._size] + ids
        super()._store(request, ids, end)


class Packed(FolderConnector):
    """Null blocks are left out before blocks and keys are paired."""

    def pairs(self, ids: list[int], paths: list[Path]) -> Blocks:
        return super().pairs([block for block in ids if block], paths)


class ZeroesItsStore(FolderConnector):
    """reset_cache zeroes the store, and its texts are still found."""

    def reset_cache(self) -> bool:
        for path in self._folder.glob("*.pt"):
            zeros = {name: of.zero_() for name, of in torch.load(path).items()}
            torch.save(zeros, path)
        return True
