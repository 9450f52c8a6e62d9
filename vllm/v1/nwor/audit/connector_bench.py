# SPDX-License-Identifier: Apache-2.0
"""An engine with a KV connector, or without one, for the conformance kit
(conformance.py): it plays cases and reports, for each, what it saw. That is not judged
here.

A connector is looked at through the methods of vLLM's KVConnectorBase_V1 alone, on the
scheduler's object and on the worker's: which tokens it loads for whom, and what it says
of loads that failed. Faults are planted there, too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .bench import Bench, prompt

# Engine steps of a part of a case.
MAX_STEPS = 600
FOLDER = "{folder}"


@dataclass(frozen=True)
class Request:
    """What a process is asked to do. connector: MODULE:CLASS, or the name of one that
    vLLM knows; None for an engine without. config: its kv_connector_extra_config.
    model: as Bench; adapters: folders of LoRA adapters. checks: a connector that must
    exist, though this engine has none."""

    cases: Sequence[str]
    connector: str | None
    config: dict[str, Any]
    model: str
    arguments: dict[str, Any]
    adapters: Sequence[str] = ()
    checks: str | None = None


@dataclass
class Report:
    """What was seen in a case.

    tokens, logprobs: of each request that finished. loads: tokens that each request
    loaded, where it did. wanted: a request -> whether it has to load, as the case says.
    broken: sentences on the connector's contract. skipped: why the case says nothing.
    findings: the audit's first ones. verified, unverified: loaded slots, as the audit
    counts them. unfreed: blocks. died: how the engine ended. seconds: took the case.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    wanted: dict[str, bool] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    skipped: str = ""
    num_findings: int = 0
    findings: list[str] = field(default_factory=list)
    verified: int = 0
    unverified: int = 0
    unfreed: int = 0
    died: str = ""
    seconds: float = 0.0


class WrongArgument(ValueError):
    """The user's, with what is allowed."""


def find_connector(name: str) -> tuple[dict[str, Any], type]:
    """KVTransferConfig's fields that name a connector, and its class."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    module, _, cls = name.rpartition(":")
    fields = {"kv_connector": cls, "kv_role": "kv_both"}
    fields |= {"kv_connector_module_path": module} if module else {}
    known = ", ".join(sorted(KVConnectorFactory._registry))
    allowed = (
        "must be MODULE:CLASS, a class of vLLM's KVConnectorBase_V1 in a module that "
        f"Python finds, or one of {known}"
    )
    try:
        found = KVConnectorFactory.get_connector_class(KVTransferConfig(**fields))
    except Exception as error:
        text = f"--connector is {name!r}: {type(error).__name__}: {error}; {allowed}"
        raise WrongArgument(text) from error
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise WrongArgument(f"--connector is {name!r}, which is {found!r}; {allowed}")
    return fields, found


class ConnectorBench(Bench):
    """`report` is that of the case which is played."""

    def __init__(self, request: Request, folder: str) -> None:
        """folder: what stands for FOLDER in the connector's config."""
        arguments = dict(request.arguments)
        self.folder, self.connector = Path(folder), None
        if request.connector:
            fields, self.connector = find_connector(request.connector)
            in_json = json.dumps(folder)[1:-1]
            config = json.dumps(request.config).replace(FOLDER, in_json)
            fields["kv_connector_extra_config"] = json.loads(config)
            fields["kv_load_failure_policy"] = "recompute"
            arguments["kv_transfer_config"] = fields
        super().__init__(request.model, **arguments)
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._num_free = self._pool.get_num_free_blocks()
        from vllm.lora.request import LoRARequest

        adapters = enumerate(request.adapters, 1)
        self.adapters = [LoRARequest(f"adapter{n}", n, path) for n, path in adapters]
        self.report = Report()
        # Requests of vLLM -> tokens in the local cache when it asked the connector.
        self.num_local: dict[str, int] = {}
        # Called with the request, and the blocks that it is about to load, when they
        # are allocated.
        self.on_load: Callable[[str, list[int]], None] | None = None
        # Called with the requests that may run on what they loaded; with None when the
        # loads that this step's forward needs are complete.
        self.loaded: Callable[[set[str] | None], None] | None = None
        self.is_held = False
        self._held: set[str] = set()
        self.num_failed = 0
        if self.connector is not None:
            self._watch()

    # -- what the connector does -----------------------------------------------------

    def _watch(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler, self.worker = self.scheduler.connector, get_kv_transfer_group()
        matched = scheduler.get_num_new_matched_tokens
        allocated = scheduler.update_state_after_alloc
        start, wait = self.worker.start_load_kv, self.worker.wait_for_layer_load
        errors = self.worker.get_block_ids_with_load_errors

        def get_num_new_matched_tokens(request: Any, num_local: int) -> Any:
            found, is_async = matched(request, num_local)
            self.num_local[request.request_id] = num_local
            most = request.num_tokens - num_local
            is_right = found is None or 0 <= found <= most
            if not is_right or (is_async and found == 0):
                self.report.broken.append(
                    f"get_num_new_matched_tokens returned {found, is_async} with "
                    f"{num_local} local tokens of {request.num_tokens}; must be None "
                    f"or 0 to {most}, and False with 0"
                )
            return found, is_async

        def update_state_after_alloc(request: Any, blocks: Any, count: int) -> Any:
            name = request.request_id
            if count > 0:
                self.report.loads[_short(name)] += count
                first = self.num_local[name] // self.block_size
                last = -(-(self.num_local[name] + count) // self.block_size)
                if self.on_load is not None:
                    self.on_load(name, list(blocks.get_block_ids()[0][first:last]))
            return allocated(request, blocks, count)

        def start_load_kv(*args: Any, **kwargs: Any) -> None:
            start(*args, **kwargs)
            if self.loaded is not None:
                for name in self.names:
                    wait(name)
                self.loaded(None)

        def wait_for_layer_load(layer_name: str) -> None:
            if self.loaded is None:
                wait(layer_name)

        def get_block_ids_with_load_errors() -> set[int]:
            found = set(errors() or ())
            self.num_failed += len(found)
            return found

        scheduler.get_num_new_matched_tokens = get_num_new_matched_tokens
        scheduler.update_state_after_alloc = update_state_after_alloc
        self.worker.start_load_kv = start_load_kv
        self.worker.wait_for_layer_load = wait_for_layer_load
        self.worker.get_block_ids_with_load_errors = get_block_ids_with_load_errors
        # Before vLLM 0.32 there is only the second one.
        for name in ("get_transfer_results", "get_finished"):
            if (known := getattr(self.worker, name, None)) is not None:
                setattr(self.worker, name, self._finishing(known))
                break

    def _finishing(self, known: Callable[..., Any]) -> Callable[..., Any]:
        def finished(finished_req_ids: set[str]) -> Any:
            found = known(finished_req_ids)
            is_tuple = isinstance(found, tuple)
            received = set((found[1] if is_tuple else found.finished_recving) or ())
            self.num_failed += len(getattr(found, "failed_recving", None) or ())
            received |= self._held
            self._held = received if self.is_held else set()
            received = received - self._held
            if self.loaded is not None and received:
                self.loaded(received)
            if is_tuple:
                return found[0], received
            found.finished_recving = received
            return found

        return finished

    def is_loading(self, name: str) -> bool:
        """Whether vLLM waits for a load of this request."""
        return self._status(name) == "WAITING_FOR_REMOTE_KVS"

    def _status(self, name: str) -> str:
        of = {_short(key): one for key, one in self.scheduler.requests.items()}
        return of[name].status.name if name in of else ""

    # -- what a case does ------------------------------------------------------------

    def text(self, number: int, length: int) -> list[int]:
        """Of this case: no two cases of a process share a text."""
        return prompt(1000 * self.case_number + number, length)

    def run(self) -> None:
        """Until all requests have finished."""
        for _ in range(MAX_STEPS):
            if not self.llm.has_unfinished_requests():
                return
            self.step()
            if not self.scheduler.running:
                time.sleep(0.005)  # for a load that needs its time
        raise RuntimeError(f"requests have not finished after {MAX_STEPS} steps")

    def begin(self, name: str) -> None:
        """Until a request that was added runs, or vLLM waits for its load: a connector
        may answer None for a while."""
        for _ in range(MAX_STEPS):
            self.step()
            if self._status(name) != "WAITING":
                return
            time.sleep(0.005)
        raise RuntimeError(f"{name} has not begun after {MAX_STEPS} steps")

    def ask(self, name: str, tokens: Sequence[int], count: int = 8, **how: Any) -> None:
        """Plays one request. how: as Bench.add."""
        self.add(name, tokens, count, **how)
        self.run()

    def evict(self) -> None:
        """The local prefix cache is reset, and other texts are written to its blocks;
        the connector's store stays."""
        self.num_evictions += 1
        self.settle()
        self.llm.reset_prefix_cache()
        length = self._num_free * self.block_size // 2
        for part in range(2):
            seed = 500 + 2 * self.num_evictions + part
            self.ask(f"evicts{seed}", self.text(seed, length), 4)

    def answer(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids)

    def must_load(self, name: str, beyond: int = 0) -> None:
        """beyond: and so that this position is loaded."""
        is_far = self.local(name) + self.report.loads.get(name, 0) > beyond
        self.report.wanted[name] = True
        if self.connector is not None and self.report.loads.get(name) and not is_far:
            self.skip(f"{name} loaded nothing at position {beyond}")

    def local(self, name: str) -> int:
        """Tokens in the local cache when a request asked the connector last."""
        return {_short(key): n for key, n in self.num_local.items()}.get(name, 0)

    def must_not_load(self, name: str) -> None:
        self.report.wanted[name] = False

    def skip(self, why: str) -> None:
        self.report.skipped = self.report.skipped or why

    def drop_files(self) -> int:
        """Removes what the connector has in FOLDER; returns the number of files."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        for path in files:
            path.unlink()
        return len(files)

    def rows(self, block: int) -> list[torch.Tensor]:
        """[bytes] uint8 each: what a block has in all layers, as views."""
        slots = range(block * self.block_size, (block + 1) * self.block_size)
        layers = range(len(self.layers))
        return [run for n in layers for slot in slots for run in self.runs(n, slot)]

    @contextlib.contextmanager
    def bent_loads(self, bend: Callable[[Any, Any], Any]) -> Iterator[list[str]]:
        """Calls bend(before, blocks) when loads are complete. before: what was in the
        blocks, [block][run]. Yields a list that gets the requests concerned."""
        waiting: dict[str, tuple[list[int], Any]] = {}
        bent: list[str] = []

        def on_load(name: str, blocks: list[int]) -> None:
            copies = [[run.clone() for run in self.rows(block)] for block in blocks]
            waiting[name] = blocks, copies

        def loaded(received: set[str] | None) -> None:
            for name, (blocks, before) in list(waiting.items()):
                is_async = self.is_loading(_short(name))
                if name in received if received is not None else not is_async:
                    del waiting[name]
                    bend(before, blocks)
                    bent.append(name)

        self.on_load, self.loaded = on_load, loaded
        try:
            yield bent
        finally:
            self.on_load = self.loaded = None

    def put(self, runs: Sequence[Sequence[torch.Tensor]], blocks: list[int]) -> None:
        for block, of_block in zip(blocks, runs, strict=True):
            for there, here in zip(self.rows(block), of_block, strict=True):
                there.copy_(here)

    # -- playing it ------------------------------------------------------------------

    def play(self, number: int, case: Callable[[ConnectorBench], None]) -> Report:
        """number: of the case, for its texts."""
        self.case_number, self.num_evictions = number, 0
        self.report = report = Report()
        self.outputs.clear()
        self.num_local.clear()
        self.preempted.clear()
        self.clear()
        before, findings = self._slots(), self.observer.findings.num_findings
        case(self)
        self.settle()
        report.unfreed = self._num_free - self._pool.get_num_free_blocks()
        for name, output in self.outputs.items():
            if output.finished and output.outputs[0].finish_reason != "abort":
                completion = output.outputs[0]
                report.tokens[name] = list(completion.token_ids)
                chosen = zip(completion.token_ids, completion.logprobs, strict=True)
                report.logprobs[name] = [of[token].logprob for token, of in chosen]
        pairs = zip(self._slots(), before, strict=True)
        report.verified, report.unverified = (now - then for now, then in pairs)
        report.num_findings = self.observer.findings.num_findings - findings
        report.findings = [one.line() for one in self.found][:4]
        return report

    def _slots(self) -> tuple[int, int]:
        """Loaded slots so far that the audit verified, and those that it could not."""
        found = self.observer.findings.totals()
        return found["verified"], found["unverified"]

    def settle(self) -> None:
        """Lets transfers end: a step without requests, then with short ones, until all
        blocks are free."""
        for number in range(50):
            self.llm.step()
            if self._pool.get_num_free_blocks() == self._num_free:
                return
            time.sleep(0.01)
            self.ask(f"settles{number}", self.text(900 + number, 5), 2)


def _short(name: str) -> str:
    """A request's name, which vLLM has lengthened."""
    return name.rpartition("-")[0]
