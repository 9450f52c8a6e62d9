# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process, made to run rows; and what its counters say.

The engine core is in process, so requests arrive and are aborted between engine steps
that are numbered. vLLM compiles grammars beside the steps; here no step begins before
they are done. Nothing is then left to the clock: two runs make the same batches, and
each batch is recorded, so that it can be told if they did not. Workers are reached by
collective_rpc only, so that tensor parallel engines run the same way.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.rows import Request, Row, warm_up

# Steps that may still be in flight when the last request has ended.
DRAIN_STEPS = 4
MAX_STEPS = 3000
GRAMMAR_LIMIT_S = 60.0
STORE_LIMIT_S = 30.0
POLL_S = 0.001
RAY_BYTES = 1 << 28
SEED = 20


@dataclass
class Outcome:
    """Outputs of a row, by request.

    logprobs: for each token {token: logprob}, in the order vLLM gave them. cached:
    prompt tokens found in the prefix cache. batches: for each time that vLLM scheduled,
    {request: tokens}, in the batch's order. num_steps: of the engine; num_windowed:
    batches with drafts.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[list[tuple[int, float]]]] = field(default_factory=dict)
    finish: dict[str, str | None] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    num_steps: int = 0
    num_windowed: int = 0
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


class Engine:
    """An engine for `spec`, started; its NWOR mode comes from the environment."""

    def __init__(self, spec: EngineSpec, models: Path, **more: Any) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        if spec.executor:
            start_ray()
        started = time.perf_counter()
        arguments = spec.arguments(models) | more
        if transfer := arguments.get("kv_transfer_config"):
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.start_s = time.perf_counter() - started
        client: Any = self.llm.engine_core
        self.scheduler = client.engine_core.scheduler
        self._outcome = Outcome()
        schedule = self.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            scheduled = output.num_scheduled_tokens.items()
            self._outcome.batches.append(list(scheduled))
            self._outcome.num_windowed += bool(output.scheduled_spec_decode_tokens)
            return output

        self.scheduler.schedule = noted

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """A method of GpuTestExtension on all workers; their results by rank."""
        found: list[Any] = self.llm.collective_rpc(method, args=arguments)
        return found

    def prepare(self) -> None:
        """Random weights, and everything used once. Call before any row."""
        self.rpc("test_randomize", SEED, self.spec.rejection != "synthetic")
        self.rpc("test_fix_costs")
        self.run(warm_up())

    def stop(self) -> None:
        """Ends workers that are in processes of their own."""
        self.llm.engine_core.shutdown()
        if self.spec.executor:
            import ray

            ray.shutdown()

    def run(self, row: Row) -> Outcome:
        """Plays a row on an empty prefix cache; generators start from the same seed
        each time."""
        self.forget()
        return self.play(row)

    def play(self, row: Row) -> Outcome:
        """The same on what the prefix cache has."""
        self.rpc("nwor_reseed", SEED)
        outcome = self._outcome = Outcome()
        started = time.perf_counter()
        for phase in row.phases:
            self._play(phase, outcome)
            for _ in range(DRAIN_STEPS):
                self.llm.step()
        outcome.seconds = time.perf_counter() - started
        self._outcome = Outcome()  # what comes between rows is none's
        return outcome

    def forget(self) -> None:
        """Empties the prefix cache. Only while nothing runs. What a KV connector still
        stores holds blocks, and is waited for."""
        assert not self.llm.has_unfinished_requests()
        until = time.monotonic() + (STORE_LIMIT_S if self.spec.offloads else 0)
        while self.llm.reset_prefix_cache() is False:
            if time.monotonic() >= until:
                raise RuntimeError(
                    "the prefix cache cannot be reset: blocks are in use"
                )
            self.llm.step()
            time.sleep(POLL_S)

    def _play(self, phase: Sequence[Request], outcome: Outcome) -> None:
        waiting = sorted(phase, key=lambda request: request.at)
        aborts = [request for request in phase if request.abort_at is not None]
        number = 0
        while waiting or self.llm.has_unfinished_requests():
            while waiting and waiting[0].at <= number:
                self._add(waiting.pop(0))
            await_grammars(self.scheduler.requests.values())
            due = [request.name for request in aborts if request.abort_at == number]
            if due:
                self.llm.abort_request(due)
            for output in self.llm.step():
                record(outcome, output)
            number += 1
            if number > MAX_STEPS:
                raise RuntimeError(f"unfinished requests after {MAX_STEPS} steps")
        outcome.num_steps += number

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = dict(request.params)
        salt = {k: params.pop(k) for k in ("cache_salt",) if k in params}
        grammar = {k: params.pop(k) for k in ("regex", "json") if k in params}
        arguments: dict[str, Any] = {
            "temperature": 0.0,
            "seed": 1,
            "max_tokens": request.max_tokens,
            "ignore_eos": not grammar,
            "detokenize": False,
        }
        if grammar:
            arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
        self.llm.add_request(
            request.name,
            {"prompt_token_ids": list(request.prompt), **salt},
            SamplingParams(**(arguments | params)),
        )

    def counters(self) -> dict[str, int]:
        """vLLM's spec_decode and NWOR's counters so far, labels but reason dropped."""
        found: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            value = getattr(metric, "value", None)
            is_ours = name.startswith(("spec_decode_num_", "nwor_"))
            if is_ours and value is not None and not name.endswith("_info"):
                reason = metric.labels.get("reason")
                found[name if reason is None else f"{name}/{reason}"] += int(value)
        return found

    def moved_bytes(self) -> dict[str, int]:
        """What the OffloadingConnector has moved so far, by direction: its own metric,
        whose increments travel as ours do."""
        return {
            metric.labels["transfer_type"]: int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:kv_offload_total_bytes"
        }

    def info(self) -> list[str]:
        """The modes that vllm:nwor_info says groups run in."""
        return [
            metric.labels["resolved"]
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:nwor_info" and getattr(metric, "value", 0) == 1
        ]

    def device_counters(self) -> dict[str, int]:
        """NWOR's counters on the first worker's device; empty if it is off."""
        counters: dict[str, int] = self.rpc("nwor_report")[0]["counters"]
        return counters


def start_ray() -> None:
    """A Ray of this process alone. Its workers inherit what is in the environment, but
    nothing of NWOR's: that is for vLLM to bring."""
    import ray

    # vLLM asks for the node by the address it finds, which need not be Ray's.
    os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    ours = {name: os.environ.pop(name) for name in list(os.environ) if "NWOR" in name}
    ray.init(include_dashboard=False, object_store_memory=RAY_BYTES)
    os.environ.update(ours)


def await_grammars(requests: Iterable[Any], limit_s: float = GRAMMAR_LIMIT_S) -> None:
    """Waits until the grammars of all `requests` of a scheduler are compiled. Raises
    RuntimeError if one cannot be compiled, or is not after `limit_s` seconds."""
    until = time.monotonic() + limit_s
    for request in requests:
        structured = request.structured_output_request
        if structured is None:
            continue
        while not structured.is_grammar_ready:
            if time.monotonic() > until:
                raise RuntimeError(
                    f"the grammar of {request.request_id} is not compiled after "
                    f"{limit_s:g} s"
                )
            time.sleep(POLL_S)
        if isinstance(structured.grammar, Exception):
            raise RuntimeError(
                f"the grammar of {request.request_id} does not compile"
            ) from structured.grammar


def record(outcome: Outcome, output: Any) -> None:
    completion = output.outputs[0]
    name = output.request_id
    outcome.tokens[name] = list(completion.token_ids)
    outcome.finish[name] = completion.finish_reason
    outcome.cached[name] = output.num_cached_tokens or 0
    outcome.logprobs[name] = [
        [(int(token), float(entry.logprob)) for token, entry in position.items()]
        for position in completion.logprobs or ()
    ]


def rise(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Increments, those that are 0 included."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
