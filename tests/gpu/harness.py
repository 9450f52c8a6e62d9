# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process that runs rows, and its counters.

Two runs make the same batches; each batch is recorded, so that a difference shows.
Workers are reached by collective_rpc only, as tensor parallel engines require.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole

from tests.gpu.engines import EngineSpec
from tests.gpu.rows import Row, warm_up
from tests.helpers.player import POLL_S, Outputs, Player, Request, counters, risen

# Steps that may still be in flight when the last request has ended.
DRAIN_STEPS = 4
STORE_LIMIT_S = 30.0
RAY_BYTES = 1 << 28
SEED = 20


class Report:
    """The report of this process; each save writes all of it."""

    def __init__(self, path: Path, **first: Any) -> None:
        self.path = path
        self.found: dict[str, Any] = {"finished": False, "error": None, **first}
        self.save()

    def save(self, **more: Any) -> None:
        self.found.update(more)
        write_whole(self.path, json.dumps(self.found).encode())

    def save_rows(
        self, name: str, rows: Iterable[Row], run: Callable[[Row], Any]
    ) -> None:
        """Saves the result of `run` for each row under `name`."""
        results = self.found.setdefault(name, {})
        for row in rows:
            started = time.perf_counter()
            results[row.name] = run(row)
            seconds = time.perf_counter() - started
            print(f"{name}, {row.name}: {seconds:.1f} s", flush=True)
            self.save()


@dataclass
class Outcome(Outputs):
    """The outcome of a row. batches: for each step that vLLM scheduled, the tokens of
    each request in batch order; num_windowed: how many of them had drafts."""

    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    num_windowed: int = 0
    seconds: float = 0.0


def distance(one: Outcome, name: str, other: Outcome, other_name: str) -> float:
    """The largest difference of two requests' logprobs of their first token, which
    depend on prompt and weights alone: among common tokens; 100 if there is none."""
    first, second = (
        {token: value for token, value, _ in of.logprobs[its][0]}
        for of, its in ((one, name), (other, other_name))
    )
    both = [abs(first[token] - second[token]) for token in first.keys() & second.keys()]
    return max(both, default=100.0)


class Engine(Player):
    """A started engine for `spec`; the environment sets NWOR's mode."""

    params = {"temperature": 0.0, "seed": 1, "ignore_eos": True, "detokenize": False}

    def __init__(
        self,
        spec: EngineSpec,
        models: Path,
        report: Report,
        prepares: bool = True,
        **more: Any,
    ) -> None:
        """prepares: sets random weights and runs a warm-up. more: EngineArgs."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.spec = spec
        if spec.executor:
            start_ray()
        started = time.perf_counter()
        arguments = spec.arguments(models) | more
        self.loras: dict[int | None, Any] = {None: None}
        if spec.loras:
            from tests.helpers.lora import lora

            folder, numbers = report.path.with_suffix(""), range(1, spec.loras + 1)
            self.loras |= {n: lora(folder, n, arguments["model"]) for n in numbers}
            # No adapter on the logits: the V2 runner expects one row per request there.
            # One slot is empty: on a CPU a request without an adapter uses the last
            # one.
            arguments |= {"enable_lora": True, "max_loras": spec.loras + 1}
            arguments["lora_target_modules"] = ["qkv_proj"]
        if transfer := arguments.get("kv_transfer_config"):
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        start_s = time.perf_counter() - started
        print(f"{spec.name}: started in {start_s:.1f} s", flush=True)
        report.save(start_s=start_s, facts=self.rpc("test_facts")[0])
        self._outcome = Outcome()
        schedule = self.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            scheduled = output.num_scheduled_tokens.items()
            self._outcome.batches.append(list(scheduled))
            self._outcome.num_windowed += bool(output.scheduled_spec_decode_tokens)
            return output

        self.scheduler.schedule = noted
        if prepares:
            if not spec.real:
                self.rpc("test_randomize", SEED, spec.rejection != "synthetic")
            self.rpc("test_fix_costs")
            self.run(warm_up())

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of GpuTestExtension on all workers; results by rank."""
        found: list[Any] = self.llm.collective_rpc(method, args=arguments)
        return found

    def _add(self, request: Request) -> None:
        super()._add(replace(request, lora=self.loras[request.lora]))

    def stop(self) -> None:
        """Ends worker processes."""
        self.llm.engine_core.shutdown()
        if self.spec.executor:
            import ray

            ray.shutdown()

    def run(self, row: Row) -> Outcome:
        """Plays a row with an empty prefix cache and freshly seeded generators."""
        self.forget()
        return self.run_again(row)

    def run_again(self, row: Row) -> Outcome:
        """The same, keeping the prefix cache."""
        self.rpc("nwor_reseed", SEED)
        outcome = self._outcome = Outcome()
        started = time.perf_counter()
        for phase in row.phases:
            self.play(phase, outcome)
            for _ in range(DRAIN_STEPS):
                self.llm.step()
        outcome.seconds = time.perf_counter() - started
        self._outcome = Outcome()  # what comes between rows is discarded
        return outcome

    def run_row(self, row: Row) -> dict[str, Any]:
        """The outcome of `run` as plain data, with the increments of vLLM's and NWOR's
        counters, of the device's, and of the worker's fallbacks."""
        before, at_first = counters(self), self.report()
        found, report = vars(self.run(row)), self.report()
        return found | {
            "counters": risen(before, counters(self)),
            "device_counters": risen(at_first["counters"], report["counters"]),
            "fallbacks": risen(at_first["fallbacks"], report["fallbacks"]),
        }

    def forget(self, reset_connector: bool = False) -> None:
        """Empties the prefix cache while no request runs; waits for the stores of a KV
        connector, which hold blocks. reset_connector: its host memory, too."""
        assert not self.llm.has_unfinished_requests()
        until = time.monotonic() + (STORE_LIMIT_S if self.spec.connector else 0)
        while self.llm.reset_prefix_cache(reset_connector=reset_connector) is False:
            if time.monotonic() >= until:
                raise RuntimeError("the prefix cache cannot be reset: blocks are used")
            self.llm.step()
            time.sleep(POLL_S)

    def report(self) -> dict[str, Any]:
        """NworWorkerExtension.nwor_report of the first worker."""
        found: dict[str, Any] = self.rpc("nwor_report")[0]
        return found


def start_ray() -> None:
    """Starts a Ray for this process. Its workers inherit the environment without NWOR's
    variables, which vLLM must pass on."""
    import ray

    # vLLM looks the node up by an address that may differ from Ray's.
    os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    ours = {name: os.environ.pop(name) for name in list(os.environ) if "NWOR" in name}
    ray.init(include_dashboard=False, object_store_memory=RAY_BYTES)
    os.environ.update(ours)
