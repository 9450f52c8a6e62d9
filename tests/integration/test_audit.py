# SPDX-License-Identifier: Apache-2.0
"""The KV audit on real engines: nothing in clean runs, and what is planted is found.

Clean runs are those of the byte oracle (chunked prefill, preemption, prefix hits,
aborts), at 100 % of the bytes, in every mode; in mode stage test_byte_oracle.py has
them, but for LoRAs. Faults are planted from outside: into the cache tensor, by the
packing rules of tests/helpers/byte_map.py, which know nothing of the audit's layouts.
The self-test (tests/e2e/test_audit_selftest.py) plants many more.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from tests.helpers.byte_map import allocation, slot_bytes
from tests.helpers.drafters import mixture_of_four
from tests.helpers.engine import BLOCK_SIZE, NUM_DRAFTS, Engine, Request
from tests.helpers.environment import model_path
from tests.helpers.runner_probe import Observer, Step, request_name
from tests.integration.test_byte_oracle import (
    CACHES,
    EVERYTHING,
    FEW_BLOCKS,
    REQUESTS,
    Case,
    case_of,
    check_clean,
    prompt,
    watch,
)
from tests.integration.test_poison import MLA
from vllm_nwor.audit.findings import AuditError, Finding
from vllm_nwor.audit.runner import start
from vllm_nwor.audit.startup import path_of
from vllm_nwor.config import NworConfig, NworConfigError

TAILS = {
    "kv_connector": "TailConnector",
    "kv_connector_module_path": "tests.helpers.tail_connector",
    "kv_role": "kv_both",
}


def found(engine: Engine) -> list[Finding]:
    return list(engine.audit.findings.last)


# --- clean runs -----------------------------------------------------------------------

LORAS = {"enable_lora": True, "max_loras": 2}
CASES = {
    "draft_model": Case(
        FEW_BLOCKS
        | {
            "speculative_config": {
                "method": "draft_model",
                "model": model_path("tiny-llama-draft"),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        },
        keeps_drafter=True,
        plan=mixture_of_four,
    ),
    # Prompts are prefilled whole, and their prefixes not cached, as in test_reach.py.
    "mla": Case(
        FEW_BLOCKS
        | MLA
        | {"num_gpu_blocks_override": 32, "max_num_batched_tokens": 512},
        plan=mixture_of_four,
    ),
    "loras": Case(FEW_BLOCKS | LORAS),
}
CLEAN = [
    *itertools.product(["off"], (*CACHES, "draft_model", "mla")),
    *itertools.product(["cow"], ("bf16", "sliding_window", "draft_model", "mla")),
    ("stage", "loras"),
]


@pytest.mark.parametrize(("mode", "cache"), CLEAN)
def test_a_clean_run_has_no_finding(mode: str, cache: str, tmp_path: Path) -> None:
    """A draft model's layers lie in the target's group and are written behind commit:
    they are not audited, and what they do to their own caches is no finding."""
    case = CASES.get(cache) or case_of(cache)
    loras = [lora(tmp_path, number) for number in (1, 2) if cache == "loras"]
    requests = [
        replace(request, lora=one)
        for request, one in zip(REQUESTS, itertools.cycle([None, *loras]), strict=False)
    ]
    run = watch(case.engine(mode, EVERYTHING), requests, case=case)

    assert (run.engine.manager is None) == (mode == "off")
    check_clean(run)
    assert run.result.num_preemptions > 0
    assert (sum(run.result.cached.values()) > 0) == (cache != "mla")
    assert any(map(any, run.own)) == case.keeps_drafter


def test_without_speculation_and_with_a_name_used_again() -> None:
    engine = Engine("off", EVERYTHING, speculative_config=None, **FEW_BLOCKS)
    first = engine.run(REQUESTS)
    engine.run([Request("short", prompt(2, 3), 60, abort_at=9)])
    engine.run([Request("short", prompt(12, 40), 30), REQUESTS[0]])

    assert first.num_preemptions > 0
    assert found(engine) == []
    assert engine.audit.audit.totals()["contents"] > 20_000


# --- planted faults -------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited() -> Engine:
    return Engine("off", EVERYTHING, enable_prefix_caching=True, **LORAS)


def lora(folder: Path, number: int) -> LoRARequest:
    """A random LoRA of tiny-llama's values, written to `folder`."""
    path = folder / f"lora{number}"
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
    settings["target_modules"] = ["v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(settings))
    draw = torch.Generator().manual_seed(number)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{part}.weight": (
            torch.randn(shape, generator=draw)
        )
        for layer in range(4)
        for part, shape in (("A", (8, 128)), ("B", (64, 8)))
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest(f"lora{number}", number, str(path))


def alike(mine: dict[str, Any], theirs: dict[str, Any]) -> list[Request]:
    """Three requests of one text, which share blocks if nothing else is different."""
    return [
        Request("mine", prompt(77, 80), 8, **mine),
        Request("again", prompt(77, 80), 8, at=12, **mine),
        Request("theirs", prompt(77, 80), 8, at=24, **theirs),
    ]


@contextmanager
def keys_of_texts_alone() -> Iterator[None]:
    """A prefix cache that forgets what else tells blocks apart."""
    with pytest.MonkeyPatch.context() as patch:
        name = "generate_block_hash_extra_keys"
        patch.setattr(kv_cache_utils, name, lambda *args: (None, args[-1]))
        yield


@pytest.mark.parametrize("kind", ["salt", "lora", "salt, beside a connector"])
def test_a_block_of_the_same_text_that_is_not_to_be_shared_is_found(
    kind: str, audited: Engine, tmp_path: Path
) -> None:
    """Also beside a KV connector that nothing is known of: the scheduler knows how much
    of a prefix was found in the cache, and not loaded."""
    engine = audited
    if kind == "salt, beside a connector":
        arguments = {"enable_prefix_caching": True, "kv_transfer_config": TAILS}
        engine = Engine("off", EVERYTHING, **arguments)
    requests = alike({"salt": "a"}, {"salt": "b"})
    if kind == "lora":
        requests = alike({"lora": lora(tmp_path, 1)}, {"lora": lora(tmp_path, 2)})
    engine.poison_caches()
    engine.audit.findings.last.clear()
    result = engine.run(requests)
    assert result.cached == {"mine": 0, "again": 64, "theirs": 0}
    if kind == "lora":
        assert result.tokens["mine"] == result.tokens["again"]
        assert result.tokens["mine"] != result.tokens["theirs"]
    assert found(engine) == []
    engine.llm.reset_prefix_cache()
    with keys_of_texts_alone():
        result = engine.run(requests)

    assert result.cached == {"mine": 0, "again": 64, "theirs": 64}
    wrong = found(engine)
    assert [(f.kind, f.position) for f in wrong] == [
        ("wrong_prefix", 0),
        ("wrong_prefix", BLOCK_SIZE),
    ]
    assert {request_name(f.writer.request or "") for f in wrong} == {"mine"}
    assert {request_name(f.owner or "") for f in wrong} == {"theirs"}
    assert engine.audit.audit.totals()["unverified"] == 0


class Scribbler(Observer):
    """Behind step number `at` one byte of one committed slot changes."""

    def __init__(self, engine: Engine, at: int, seed: int) -> None:
        self.engine, self.at = engine, at
        self.draw = random.Random(seed)
        self.expected: tuple[str, str, int, str] | None = None

    def step_done(self, step: Step) -> None:
        self.at -= 1
        if self.at != 0:
            return
        batch = self.engine.runner.input_batch
        row = self.draw.randrange(batch.num_reqs)
        # The last sampled token is not in the cache yet.
        position = self.draw.randrange(int(batch.num_tokens_no_spec[row]) - 1)
        block = int(batch.block_table[0].block_table.np[row, position // BLOCK_SIZE])
        name, layer = self.draw.choice(list(self.engine.probe.target_layers().items()))
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        allocation(layer)[self.draw.choice(slot_bytes(layer)[slot].tolist())] ^= 1
        self.expected = ("changed", name, slot, request_name(batch.req_ids[row]))


@pytest.mark.parametrize("seed", range(6))
def test_one_bit_in_the_cache_is_found_where_it_is(audited: Engine, seed: int) -> None:
    audited.poison_caches()
    audited.audit.findings.last.clear()
    scribbler = Scribbler(audited, 12, seed)

    audited.run(
        [Request("a", prompt(seed, 80), 30), Request("b", prompt(-seed, 50), 40)],
        [scribbler],
    )

    assert [
        (f.kind, f.layer, f.slot, request_name(f.writer.request or ""))
        for f in found(audited)
    ] == [scribbler.expected]


def test_raise_keeps_the_tokens_and_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    settings = EVERYTHING | {"AUDIT": "raise", "AUDIT_FILE": str(path)}
    engine = Engine("cow", settings)
    scribbler = Scribbler(engine, 12, 3)
    with pytest.raises(AuditError, match="1 findings, the first: changed: "):
        engine.run([Request("a", prompt(3, 80), 60)], [scribbler])

    assert scribbler.at == 0  # the next step's output did not come out
    written = json.loads(path.read_text())
    assert written["counts"] == {"changed": 1}
    (finding,) = written["findings"]
    assert scribbler.expected is not None
    assert (finding["kind"], finding["layer"], finding["slot"]) == (
        scribbler.expected[:3]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["findings.json"]


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    parallel = SimpleNamespace(world_size=2, rank=1)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    there, missing = tmp_path / "a.json", tmp_path / "missing" / "a.json"
    assert path_of(runner, NworConfig(audit_file=str(there))) == f"{there}.1"

    said = f"^VLLM_NWOR_AUDIT_FILE='{missing}' is not allowed; allowed values: empty or"
    with pytest.raises(NworConfigError, match=said):
        start(runner, NworConfig(audit_file=str(missing)))


def test_the_counters_come_out_of_get_metrics() -> None:
    engine = Engine("off", EVERYTHING, disable_log_stats=False)

    def metrics() -> dict[tuple[str, str | None], int]:
        return {
            (metric.name, metric.labels.get("class")): metric.value
            for metric in engine.llm.get_metrics()
            if metric.name.startswith("vllm:nwor")
        }

    before = metrics()
    assert set(before.values()) == {0}
    assert ("vllm:nwor_audit_findings", "changed") in before
    assert ("vllm:nwor_audit_unverified", None) in before
    engine.run([Request("a", prompt(1, 80), 40)], [Scribbler(engine, 12, 1)])

    rise = {key: value for key, value in metrics().items() if value}
    # Steps are reported in lots, and at once where something was found.
    assert 12 <= rise.pop(("vllm:nwor_audit_steps", None)) < 40
    assert rise == {("vllm:nwor_audit_findings", "changed"): 1}


def test_a_failure_of_the_audit_ends_the_audit_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {name: value for name, value in EVERYTHING.items() if name != "STRICT"}
    engine = Engine("off", settings)

    def failing(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.audit.audit, "resolve", failing)
    result = engine.run([Request("a", prompt(1, 40), 20)])

    assert len(result.tokens["a"]) == 20
    assert engine.audit is None
