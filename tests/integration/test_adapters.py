# SPDX-License-Identifier: Apache-2.0
"""The KV audit on real engines whose LoRA adapters change: under their number, on disk
while vLLM had evicted them, in tensors, and with requests in flight.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from tests.helpers.engine import BLOCK_SIZE, Engine, Request, prompt, shared
from tests.helpers.environment import model_path
from tests.helpers.lora import lora
from tests.helpers.runner_probe import request_name
from tests.integration.test_audit import bare_names, other_keys
from tests.integration.test_byte_oracle import EVERYTHING
from tests.integration.test_weights import KINDS, NUM_CACHED, TEXT, run_until
from vllm_nwor.audit import observer
from vllm_nwor.audit.findings import Finding

MAX_LORAS = 3
ARGUMENTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 24,
    "enable_lora": True,
    "max_loras": MAX_LORAS,
    "max_cpu_loras": MAX_LORAS,
}
new_numbers, new_seeds = itertools.count(1), itertools.count(1)
FLIGHT = prompt(79, 80)
# Repeats itself, so that it has drafts.
REPEATING = prompt(5, 6) * 8


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
    """Adapters in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: Path, seed: int) -> None:
        """Puts random weights there, by that seed."""
        made = lora(self.folder / "made", seed, model_path("tiny-llama"))
        shutil.copytree(made.path, path, dirs_exist_ok=True)

    def new(self, seed: int | None = None, **about: Any) -> LoRARequest:
        """A LoRARequest of a new number, at a path of its own."""
        number = next(new_numbers)
        path = self.folder / f"{number}"
        self.write(path, next(new_seeds) if seed is None else seed)
        name = about.pop("name", f"acme{number}")
        return LoRARequest(name, number, str(path), **about)


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path)


def ask(
    engine: Engine,
    name: str,
    adapter: LoRARequest | None,
    cached: int = NUM_CACHED,
    text: Sequence[int] = TEXT,
) -> list[int]:
    return engine.ask(name, text, cached, adapter)


def ask_anew(engine: Engine, adapter: LoRARequest) -> list[int]:
    return engine.ask_anew(TEXT, adapter)


def check_found(engine: Engine, reader: str, writer: str, kind: str) -> list[Finding]:
    """The findings since the last call are of the two blocks that `reader` found."""
    findings = engine.take_findings()
    assert [
        (
            f.kind,
            f.position,
            request_name(f.owner or ""),
            request_name(f.writer.request or ""),
        )
        for f in findings
    ] == [(kind, BLOCK_SIZE * n, reader, writer) for n in (0, 1)]
    return findings


def check_stale(
    engine: Engine, reader: str, writer: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that wrote, and the present ones."""
    findings = check_found(engine, reader, writer, "stale_weights")
    weights = findings[0].weights
    assert weights is not None
    assert all(finding.weights == weights for finding in findings)
    return weights["written"], weights["present"]


# --- ways in which the content changes under a number ---------------------------------

Way = Callable[[Engine, Adapters, LoRARequest, int], None]


def in_place(
    engine: Engine, adapters: Adapters, adapter: LoRARequest, seed: int
) -> None:
    """As vLLM's front end does with load_inplace."""
    adapters.write(Path(adapter.lora_path), seed)
    about = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
    assert engine.llm.add_lora(LoRARequest(*about, load_inplace=True))


def removed(
    engine: Engine, adapters: Adapters, adapter: LoRARequest, seed: int
) -> None:
    """Unloaded; the next request has it read."""
    adapters.write(Path(adapter.lora_path), seed)
    assert engine.llm.remove_lora(adapter.lora_int_id)


def evicted(
    engine: Engine, adapters: Adapters, adapter: LoRARequest, seed: int
) -> None:
    """Others take its place; the next request has it read again."""
    for number in range(MAX_LORAS):
        ask(engine, f"other{number}", adapters.new(), 0, prompt(90 + number, 8))
    assert adapter.lora_int_id not in engine.llm.list_loras()
    adapters.write(Path(adapter.lora_path), seed)


def from_tensors(
    engine: Engine, adapters: Adapters, adapter: LoRARequest, seed: int
) -> None:
    """As verl does: number, name and path stay, and the loader is replaced."""
    made = lora(adapters.folder / "made", seed, model_path("tiny-llama"))
    tensors = load_file(Path(made.lora_path, "adapter_model.safetensors"))

    def load(self: Any, request: Any) -> LoRAModel:
        helper = PEFTHelper.from_local_dir(made.lora_path, 512)
        number = request.lora_int_id
        dtype = self.lora_config.lora_dtype
        return LoRAModel.from_lora_tensors(number, tensors, helper, "cpu", dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerLoRAManager, "_load_adapter", load)
        engine.llm.remove_lora(adapter.lora_int_id)
        assert engine.llm.add_lora(adapter)


WAYS: dict[str, Way] = {
    of.__name__: of for of in (in_place, removed, evicted, from_tensors)
}


def check_way(engine: Engine, adapters: Adapters, way: Way) -> None:
    seed, adapter = next(new_seeds), adapters.new()
    if way is from_tensors:
        from_tensors(engine, adapters, adapter, seed)
    else:
        adapters.write(Path(adapter.lora_path), seed)
    before = ask(engine, "first", adapter, cached=0)
    way(engine, adapters, adapter, seed)
    assert ask(engine, "same bytes", adapter) == before
    assert engine.take_findings() == []
    way(engine, adapters, adapter, next(new_seeds))
    answer = ask(engine, "second", adapter)
    written, present = check_stale(engine, "second", "first")
    for one in (written, present):
        assert one["epoch"] == 0
        assert one["adapter"]["name"] == adapter.lora_name
        assert len(bytes.fromhex(one["adapter"]["content"])) == 8
    assert written["adapter"] != present["adapter"]
    right = ask_anew(engine, adapter)
    assert before != right
    assert answer != right
    assert ask(engine, "third", adapter, cached=0) == right
    assert ask(engine, "fourth", adapter) == right
    assert engine.take_findings() == []


@pytest.mark.parametrize("way", WAYS)
def test_other_bytes_under_a_number_are_found(
    engine: Engine, adapters: Adapters, way: str
) -> None:
    """And the same bytes are not."""
    check_way(engine, adapters, WAYS[way])


@pytest.mark.parametrize("engine", [*KINDS][1:], indirect=True)
def test_in_every_mode(engine: Engine, adapters: Adapters) -> None:
    check_way(engine, adapters, in_place)


def test_an_adapter_that_is_read_in_every_step(
    engine: Engine, adapters: Adapters
) -> None:
    """As vLLM up to 0.32 does with a request that has load_inplace."""
    adapter = adapters.new(load_inplace=True)
    before = ask(engine, "first", adapter, cached=0)
    assert ask(engine, "same bytes", adapter) == before
    assert engine.take_findings() == []
    adapters.write(Path(adapter.lora_path), next(new_seeds))
    answer = ask(engine, "second", adapter)
    check_stale(engine, "second", "first")
    right = ask_anew(engine, adapter)
    assert before != right
    assert answer != right
    assert engine.take_findings() == []


def test_changes_are_counted(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of adapters that a request had. (The last engine's metrics are shown.)"""
    engine = Engine("off", EVERYTHING, **ARGUMENTS, disable_log_stats=False)
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
    in_place(engine, adapters, adapter, next(new_seeds))
    ask(engine, "first", adapter, cached=0)
    assert count() == before
    seed = next(new_seeds)
    in_place(engine, adapters, adapter, seed)
    assert count() == before + 1
    in_place(engine, adapters, adapter, seed)
    assert count() == before + 1


# --- numbers, names and paths ---------------------------------------------------------


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("keys", ["by name", "by name and path"])
def test_two_numbers_of_one_name(
    engine: Engine, adapters: Adapters, keys: str, is_same: bool
) -> None:
    """vLLM before 0.31 has the name alone in its keys. The second adapter is loaded in
    the step in which its request finds the first one's blocks."""
    seed = next(new_seeds)
    one = adapters.new(seed, name="acme")
    two = adapters.new(seed if is_same else next(new_seeds), name="acme")
    is_bare = keys == "by name"
    with other_keys(bare_names if is_bare else lambda keys: keys):
        first = ask(engine, "first", one, cached=0)
        second = ask(engine, "second", two, cached=NUM_CACHED * is_bare)
    if is_bare and not is_same:
        findings = check_found(engine, "second", "first", "wrong_prefix")
        assert findings[0].weights is None
    assert engine.take_findings() == []
    assert (ask_anew(engine, one) == first, ask_anew(engine, two) == first) == (
        True,
        is_same,
    )
    assert (second == first) >= is_same


@pytest.mark.parametrize("kind", KINDS)
def test_when_an_adapter_is_loaded(
    kind: str, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculation vLLM loads it behind the plan of its request's step, and without
    before it."""
    mode, arguments = KINDS[kind]
    engine = shared(mode, settings=EVERYTHING, **ARGUMENTS, **arguments)
    engine.audit.findings.last.clear()
    adapter, ops = adapters.new(), engine.audit.audit._ops
    ask(engine, "first", adapter, cached=0)
    evicted(engine, adapters, adapter, next(new_seeds))
    reseed = Mock(side_effect=ops.audit_reseed)
    monkeypatch.setattr(ops, "audit_reseed", reseed)
    requests = [
        Request("second", TEXT, 40, lora=adapter),
        Request("third", TEXT, 8, at=6, lora=adapter),
    ]
    assert engine.run(requests).cached == dict.fromkeys(("second", "third"), NUM_CACHED)
    assert reseed.call_count == ("no speculation" not in kind)
    readers = [
        (f.kind, f.position, request_name(f.owner or ""))
        for f in engine.take_findings()
    ]
    assert readers == [
        ("stale_weights", BLOCK_SIZE * n, reader)
        for reader in ("second", "third")
        for n in (0, 1)
    ]


def test_the_same_adapter_loaded_behind_the_plan(
    engine: Engine, adapters: Adapters
) -> None:
    """No false finding, in a hit or in what is computed, drafts included."""
    seed = next(new_seeds)
    adapter = adapters.new(seed)
    first = ask(engine, "first", adapter, cached=0)
    evicted(engine, adapters, adapter, seed)
    requests = [
        Request("drafter", REPEATING, 60, lora=adapters.new()),
        Request("again", TEXT, 12, at=8, lora=adapter),
        Request("other", REPEATING, 60, at=12, lora=adapters.new()),
    ]
    result = engine.run(requests)
    assert result.tokens["again"] == first
    assert result.cached["again"] == NUM_CACHED
    assert engine.take_findings() == []


def test_the_model_changes_under_an_adapter(engine: Engine, adapters: Adapters) -> None:
    adapter = adapters.new()
    before = ask(engine, "first", adapter, cached=0)
    name, parameter = next(iter(engine.runner.get_model().named_parameters()))
    assert "embed_tokens" in name
    own = parameter.data.clone()

    def put(value: torch.Tensor) -> None:
        engine.llm.collective_rpc(lambda worker: parameter.data.copy_(value).shape)

    put(own.flip(0))
    answer = ask(engine, "second", adapter)
    written, present = check_stale(engine, "second", "first")
    assert written["adapter"] == present["adapter"]
    assert written["epoch"] < present["epoch"]
    right = ask_anew(engine, adapter)
    put(own)
    assert before != right
    assert answer != right
    assert ask_anew(engine, adapter) == before


# --- there and back -------------------------------------------------------------------


def test_a_content_that_comes_back(engine: Engine, adapters: Adapters) -> None:
    """Its blocks are right again, and those of the one in between are not."""
    seeds = [next(new_seeds) for _ in range(2)]
    adapter, text = adapters.new(seeds[0]), prompt(78, 80)
    own = ask(engine, "own", adapter, cached=0)
    in_place(engine, adapters, adapter, seeds[1])
    others = ask(engine, "other", adapter, 0, text)
    assert ask(engine, "wrong", adapter) != own
    written, present = check_stale(engine, "wrong", "own")
    in_place(engine, adapters, adapter, seeds[0])
    assert ask(engine, "own again", adapter) == own
    assert engine.take_findings() == []
    assert ask(engine, "wrong again", adapter, text=text) != others
    assert check_stale(engine, "wrong again", "other") == (present, written)


def test_a_request_in_flight_across_a_change(
    engine: Engine, adapters: Adapters
) -> None:
    """It is no finding itself. Its first content is another one when it comes back, as
    the request's blocks hold both."""
    seed = next(new_seeds)
    adapter = adapters.new(seed)
    flight = [Request("flight", FLIGHT, 60, lora=adapter)]
    unchanged = engine.run(flight).tokens["flight"]
    assert engine.llm.reset_prefix_cache()

    def is_there() -> bool:
        (request,) = engine.scheduler.requests.values()
        return bool(request.num_computed_tokens > len(FLIGHT) + 4)

    def change() -> None:
        in_place(engine, adapters, adapter, next(new_seeds))

    answer = run_until(engine, flight, is_there, change).tokens["flight"]
    assert answer != unchanged
    assert answer[:4] == unchanged[:4]
    assert engine.take_findings() == []
    in_place(engine, adapters, adapter, seed)
    text = (*FLIGHT, *answer[:30])
    wrong = ask(engine, "later", adapter, BLOCK_SIZE * 3, text)
    findings = engine.take_findings()
    assert [(f.kind, f.position) for f in findings] == [
        ("stale_weights", BLOCK_SIZE * n) for n in range(3)
    ]
    assert engine.llm.reset_prefix_cache()
    assert ask(engine, "right", adapter, 0, text) != wrong
    assert ask(engine, "right again", adapter, BLOCK_SIZE * 3, text) != wrong
    assert engine.take_findings() == []


# --- no false alarm -------------------------------------------------------------------


def many(engine: Engine, adapters: Adapters, num_steps: int, seconds: float) -> int:
    """Runs random requests of four times as many adapters as vLLM keeps, some of them
    of equal content, in rounds; ends with `num_steps` steps or after `seconds`. Between
    rounds the adapters on disk stay. Returns the number of steps."""
    draw = random.Random(4)
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
    assert many(engine, adapters, 10_000, 20) > 100
    assert engine.audit.audit.totals()["identities"] > before + 10_000


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["off", "stage"], indirect=True)
def test_ten_thousand_steps_give_no_false_alarm(
    engine: Engine, adapters: Adapters
) -> None:
    assert many(engine, adapters, 10_000, 7200) >= 10_000
