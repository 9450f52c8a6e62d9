# SPDX-License-Identifier: Apache-2.0
"""The KV audit on real engines whose LoRA adapters change: under their number, on disk
while vLLM had evicted them, and in tensors. With requests in flight, and back again:
tests/kernels/test_audit.py.

Each test that changes an adapter first proves that the change counts: the request's
answer after reset_prefix_cache differs from the one before, and from the one that rests
on the old blocks. On the CPU, with vLLM's V1 runner, which loads adapters behind the
audit's plan if it speculates, as V2 always does. Not covered: V2, tensor and expert
parallelism, CUDA.
"""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from tests.helpers.engine import BLOCK_SIZE, Engine, Request, prompt, shared
from tests.helpers.environment import model_path
from tests.helpers.lora import lora
from tests.helpers.runner_probe import request_name
from tests.integration.test_byte_oracle import EVERYTHING
from tests.integration.test_weights import KINDS, NUM_CACHED, TEXT, check_stale
from vllm_nwor.audit import observer

MAX_LORAS = 3
ARGUMENTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 24,
    "enable_lora": True,
    "max_loras": MAX_LORAS,
    "max_cpu_loras": MAX_LORAS,
}
new_numbers, new_seeds = itertools.count(1), itertools.count(1)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A shared engine without a cached prefix and findings."""
    mode, arguments = KINDS[getattr(request, "param", "off")]
    engine = shared(mode, settings=EVERYTHING, **ARGUMENTS, **arguments)
    assert engine.llm.reset_prefix_cache()
    engine.audit.findings.last.clear()
    yield engine
    engine.llm.abort_request(list(engine.scheduler.requests))
    while engine.llm.has_unfinished_requests():
        engine.llm.step()


class Adapters:
    """Adapters of an engine, in a folder; and ways in which the content under a number
    becomes that of a seed."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def new(self, seed: int | None = None, **about: Any) -> LoRARequest:
        """A LoRARequest of a new number, at a path of its own."""
        number = next(new_numbers)
        adapter = LoRARequest(
            f"acme{number}", number, str(self.folder / f"{number}"), **about
        )
        self.written(adapter, next(new_seeds) if seed is None else seed)
        return adapter

    def written(self, adapter: LoRARequest, seed: int) -> None:
        """On disk alone."""
        made = lora(self.folder / "made", seed, model_path("tiny-llama"))
        shutil.copytree(made.path, adapter.path, dirs_exist_ok=True)

    def in_place(self, adapter: LoRARequest, seed: int) -> None:
        """As vLLM's front end does with load_inplace."""
        self.written(adapter, seed)
        about = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
        assert self.engine.llm.add_lora(LoRARequest(*about, load_inplace=True))

    def removed(self, adapter: LoRARequest, seed: int) -> None:
        """Unloaded; the next request has it read."""
        self.written(adapter, seed)
        assert self.engine.llm.remove_lora(adapter.lora_int_id)

    def evicted(self, adapter: LoRARequest, seed: int) -> None:
        """Others take its place; the next request has it read again."""
        for number in range(MAX_LORAS):
            ask(self.engine, f"other{number}", self.new(), 0, prompt(90 + number, 8))
        assert adapter.lora_int_id not in self.engine.llm.list_loras()
        self.written(adapter, seed)

    def from_tensors(self, adapter: LoRARequest, seed: int) -> None:
        """As verl does: number, name and path stay, and the loader is replaced."""
        made = lora(self.folder / "made", seed, model_path("tiny-llama"))
        tensors = load_file(Path(made.lora_path, "adapter_model.safetensors"))

        def load(self: Any, request: Any) -> LoRAModel:
            helper = PEFTHelper.from_local_dir(made.lora_path, 512)
            number = request.lora_int_id
            dtype = self.lora_config.lora_dtype
            return LoRAModel.from_lora_tensors(number, tensors, helper, "cpu", dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WorkerLoRAManager, "_load_adapter", load)
            self.engine.llm.remove_lora(adapter.lora_int_id)
            assert self.engine.llm.add_lora(adapter)


@pytest.fixture
def adapters(engine: Engine, tmp_path: Path) -> Adapters:
    return Adapters(engine, tmp_path)


def ask(
    engine: Engine,
    name: str,
    adapter: LoRARequest | None,
    cached: int = NUM_CACHED,
    text: Sequence[int] = TEXT,
) -> list[int]:
    return engine.ask(name, text, cached, adapter)


def check_way(adapters: Adapters, way: str, **about: Any) -> None:
    """about: of the adapter's LoRARequest."""
    engine, change = adapters.engine, getattr(adapters, way)
    seed = next(new_seeds)
    adapter = adapters.new(seed, **about)
    if way == "from_tensors":
        change(adapter, seed)
    before = ask(engine, "first", adapter, cached=0)
    change(adapter, seed)
    assert ask(engine, "same bytes", adapter) == before
    assert engine.take_findings() == []
    change(adapter, next(new_seeds))
    answer = ask(engine, "second", adapter)
    written, present = check_stale(engine, "second", ["first"] * 2)
    for one in (written, present):
        assert one["epoch"] == 0
        assert one["adapter"]["name"] == adapter.lora_name
        assert len(bytes.fromhex(one["adapter"]["content"])) == 8
    assert written["adapter"] != present["adapter"]
    right = engine.ask_anew(TEXT, adapter)
    assert before != right
    assert answer != right
    assert ask(engine, "third", adapter, cached=0) == right
    assert ask(engine, "fourth", adapter) == right
    assert engine.take_findings() == []


@pytest.mark.parametrize("way", ["in_place", "removed", "evicted", "from_tensors"])
def test_other_bytes_under_a_number_are_found(adapters: Adapters, way: str) -> None:
    """And the same bytes are not."""
    check_way(adapters, way)


def test_an_adapter_that_is_read_in_every_step(adapters: Adapters) -> None:
    """As vLLM up to 0.32 does with a request that has load_inplace."""
    check_way(adapters, "written", load_inplace=True)


def test_changes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of adapters that a request had. (The last engine's metrics are shown.)"""
    engine = Engine("off", EVERYTHING, **ARGUMENTS, disable_log_stats=False)
    adapters = Adapters(engine, tmp_path)
    monkeypatch.setattr(observer, "REPORT_SECONDS", 0)

    def count() -> int:
        ask(engine, "later", adapters.new(), cached=0, text=prompt(91, 8))
        (counter,) = [
            metric
            for metric in engine.llm.get_metrics()
            if metric.name == "vllm:nwor_weight_changes"
            and metric.labels["route"] == "lora"
        ]
        return counter.value

    before, adapter = count(), adapters.new()
    adapters.in_place(adapter, next(new_seeds))
    ask(engine, "first", adapter, cached=0)
    assert count() == before
    seed = next(new_seeds)
    adapters.in_place(adapter, seed)
    assert count() == before + 1
    adapters.in_place(adapter, seed)
    assert count() == before + 1


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_when_an_adapter_is_loaded(
    engine: Engine, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculation vLLM loads it behind the plan of its request's step, and without
    before it."""
    adapter, ops = adapters.new(), engine.audit.audit._ops
    ask(engine, "first", adapter, cached=0)
    adapters.evicted(adapter, next(new_seeds))
    reseed = Mock(side_effect=ops.audit_reseed)
    monkeypatch.setattr(ops, "audit_reseed", reseed)
    requests = [
        Request("second", TEXT, 40, lora=adapter),
        Request("third", TEXT, 8, at=6, lora=adapter),
    ]
    assert engine.run(requests).cached == dict.fromkeys(("second", "third"), NUM_CACHED)
    speculates = engine.llm.vllm_config.speculative_config is not None
    assert reseed.call_count == speculates
    readers = [
        (f.kind, f.position, request_name(f.owner or ""))
        for f in engine.take_findings()
    ]
    assert readers == [
        ("stale_weights", BLOCK_SIZE * n, reader)
        for reader in ("second", "third")
        for n in (0, 1)
    ]


# --- no false alarm -------------------------------------------------------------------


def many(adapters: Adapters, num_steps: int, seconds: float) -> int:
    """Runs random requests of four times as many adapters as vLLM keeps, some of them
    of equal content, in rounds; ends with `num_steps` steps or after `seconds`. Between
    rounds the adapters on disk stay. Returns the number of steps."""
    engine, draw = adapters.engine, random.Random(4)
    seeds = [next(new_seeds) for _ in range(3 * MAX_LORAS)]
    known = [adapters.new(seed) for seed in (*seeds, *seeds[:MAX_LORAS])]
    ends, num_done, round_ = time.monotonic() + seconds, 0, 0
    while num_done < num_steps and time.monotonic() < ends:
        round_ += 1
        requests = [
            Request(
                f"{round_}/{n}",
                prompt(draw.randrange(3), 40) + prompt(draw.randrange(20), 24),
                draw.randrange(1, 40),
                at=draw.randrange(20),
                lora=draw.choice(known),
            )
            for n in range(10)
        ]
        if round_ % 4 == 0:
            again = draw.choice(known)
            engine.llm.remove_lora(again.lora_int_id)
        num_done += len(engine.run(requests).steps)
        assert engine.take_findings() == []
    return num_done


def test_many_adapters_give_no_false_alarm(engine: Engine, adapters: Adapters) -> None:
    before = engine.audit.audit.totals()["identities"]
    assert many(adapters, 500, 600) >= 500
    assert engine.audit.audit.totals()["identities"] > before + 10_000


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["off", "stage"], indirect=True)
def test_ten_thousand_steps_give_no_false_alarm(adapters: Adapters) -> None:
    assert many(adapters, 10_000, 7200) >= 10_000
