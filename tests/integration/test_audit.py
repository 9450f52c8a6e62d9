# SPDX-License-Identifier: Apache-2.0
"""The KV audit on real engines: nothing in clean runs, and what is planted is found.

Clean runs are those of the byte oracle (chunked prefill, preemption, prefix hits,
aborts), at 100 % of the bytes; in modes cow and stage test_byte_oracle.py has most of
them. One fault is planted from outside: into the cache tensor, by the packing rules of
tests/helpers/byte_map.py, which know nothing of the audit's layouts. The self-test
(tests/e2e/test_audit_selftest.py) plants many more, and what ends the audit is in
tests/kernels/test_audit.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.environment import model_path
from tests.helpers.lora import lora
from tests.helpers.runner_probe import request_name
from tests.helpers.worker_probe import OracleExtension
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
from tests.integration.test_reach import IDLE, METHODS, MODELS, Idle
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

CASES = {
    "draft_model": METHODS["draft_model"],
    # Prompts are prefilled whole, and their prefixes not cached.
    "mla": MODELS["DeepSeek V2, multi-head latent attention"],
    "no speculation": lambda: Case({"speculative_config": None}),
}
CLEAN = [
    *itertools.product(["off"], (*CACHES, "draft_model", "mla", "no speculation")),
    *itertools.product(["cow"], ("draft_model", "mla")),
]


@pytest.mark.parametrize(("mode", "name"), CLEAN)
def test_a_clean_run_has_no_finding(mode: str, name: str) -> None:
    """A draft model's layers lie in the target's group and are written behind commit:
    they are not audited, and what they do to their own caches is no finding."""
    if name in CASES:
        case = CASES[name]()
        blocks = {"num_gpu_blocks_override": 32 if name == "mla" else 16}
        case = replace(case, arguments=FEW_BLOCKS | case.arguments | blocks)
    else:
        case = case_of(name)
    speculates = case.arguments.get("speculative_config", {}) is not None
    engine = case.engine(mode, EVERYTHING)
    assert (engine.manager is None) == (mode == "off")
    if speculates:
        run = watch(engine, case=case)
        check_clean(run)
        assert any(map(any, run.own)) == case.keeps_drafter
        result = run.result
    else:
        result = engine.run(REQUESTS)
    assert result.num_preemptions > 0
    assert (sum(result.cached.values()) > 0) == (name != "mla")
    # A name is used again.
    engine.run([Request("short", prompt(2, 3), 60, abort_at=9)])
    engine.run([Request("short", prompt(12, 40), 30), REQUESTS[0]])
    assert found(engine) == []
    assert engine.audit.audit.totals()["contents"] > 20_000


def test_blocks_below_the_window_of_layers_of_several_sizes_are_given_back(
    tmp_path: Path,
) -> None:
    """Target and draft model have one window, and heads that differ: vLLM's workers
    have a spec for each of their group's layers."""
    window = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 64}
    config = json.loads(Path(model_path("tiny-llama-draft"), "config.json").read_text())
    draft = config | window | {"num_hidden_layers": 4, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(draft))
    speculative = {"method": "draft_model", "model": str(tmp_path)}
    engine = Engine(
        "off",
        EVERYTHING,
        load_format="dummy",
        hf_overrides=window,
        num_gpu_blocks_override=24,
        speculative_config=speculative | {"num_speculative_tokens": 4},
    )
    engine.run([Request(f"{n}", prompt(n, 150), 60, at=6 * n) for n in range(6)])
    assert found(engine) == []


# --- planted faults -------------------------------------------------------------------


def test_what_is_below_a_window_is_watched_where_vllm_keeps_it() -> None:
    """Without its hybrid manager windows lie in one group with full attention."""
    arguments = {"model": "tiny-gemma3", "disable_hybrid_kv_cache_manager": True}
    engine = Engine("off", EVERYTHING, **arguments)
    expected: list[Any] = []
    with engine.before_step(12, lambda: expected.append(flip(engine))):
        engine.run([Request("a", prompt(1, 200), 30)])
    assert [(f.kind, f.layer, f.slot) for f in found(engine)] == [expected[0][:3]]


@pytest.fixture(scope="module")
def audited() -> Engine:
    loras = {"enable_lora": True, "max_loras": 2}
    arguments = {"enable_prefix_caching": True, "disable_log_stats": False}
    return Engine("off", EVERYTHING, **arguments, **loras)


def flip(engine: Engine) -> tuple[str, str, int, str]:
    """Changes a bit of a committed slot, by the packing rules of byte_map.py; returns
    what has to be found."""
    place = OracleExtension.test_flip_bit(SimpleNamespace(model_runner=engine.runner))
    owner = request_name(engine.runner.input_batch.req_ids[0])
    return "changed", place["layer"], place["slot"], owner


def test_one_bit_in_the_cache_is_found_where_it_is_and_counted(audited: Engine) -> None:
    def metrics() -> dict[tuple[str, str | None], int]:
        return {
            (metric.name, metric.labels.get("class")): metric.value
            for metric in audited.llm.get_metrics()
            if metric.name.startswith("vllm:nwor")
        }

    before = metrics()
    assert set(before.values()) == {0}
    assert ("vllm:nwor_audit_findings", "changed") in before
    assert ("vllm:nwor_audit_unverified", None) in before
    expected: list[Any] = []
    with audited.before_step(12, lambda: expected.append(flip(audited))):
        audited.run([Request("a", prompt(1, 80), 30), Request("b", prompt(2, 50), 40)])

    assert expected == [
        (f.kind, f.layer, f.slot, request_name(f.writer.request or ""))
        for f in found(audited)
    ]
    rise = {key: value for key, value in metrics().items() if value}
    # Steps are reported in lots, and at once where something was found.
    assert 12 <= rise.pop(("vllm:nwor_audit_steps", None)) < 40
    assert rise == {("vllm:nwor_audit_findings", "changed"): 1}


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
        adapters = (lora(tmp_path, n, model_path("tiny-llama")) for n in (1, 2))
        requests = alike(*({"lora": adapter} for adapter in adapters))
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


class FailingLoads(Idle):
    """Brings two blocks of each prompt within the step, and fails."""

    failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num: int) -> tuple[int, bool]:
        return max(2 * BLOCK_SIZE - num, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num: int) -> None:
        FailingLoads.failed = set(blocks.get_block_ids()[0][:2]) if num else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, FailingLoads.failed = FailingLoads.failed, set()
        return failed


def test_a_load_that_fails_within_its_step_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM computes its blocks in the next one; until then they hold another text."""
    transfers = IDLE | {"kv_connector": "FailingLoads"}
    transfers |= {"kv_connector_module_path": __name__}
    policy = {"kv_load_failure_policy": "recompute"}
    blocks = {"num_gpu_blocks_override": 17, "enable_prefix_caching": True}
    engine = Engine("off", EVERYTHING, kv_transfer_config=transfers | policy, **blocks)
    requests = [Request(f"{n}", prompt(n, 100), 9, at=20 * n) for n in range(6)]
    result = engine.run(requests)
    assert set(result.cached.values()) == {2 * BLOCK_SIZE}
    assert found(engine) == []
    name = "get_num_new_matched_tokens"
    monkeypatch.setattr(FailingLoads, name, lambda *_: (0, False))
    engine.llm.reset_prefix_cache()
    assert engine.run(requests).tokens == result.tokens


def test_raise_keeps_the_tokens_and_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    settings = EVERYTHING | {"AUDIT": "raise", "AUDIT_FILE": str(path)}
    engine = Engine("cow", settings)
    expected: list[Any] = []
    with (
        engine.before_step(12, lambda: expected.append(flip(engine))),
        pytest.raises(AuditError, match="1 findings, the first: changed: "),
    ):
        engine.run([Request("a", prompt(3, 80), 60)])

    written = json.loads(path.read_text())
    assert written["counts"] == {"changed": 1}
    (finding,) = written["findings"]
    ((*where, _),) = expected
    assert [finding["kind"], finding["layer"], finding["slot"]] == where
    assert [p.name for p in tmp_path.iterdir()] == ["findings.json"]


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    parallel = SimpleNamespace(world_size=2, rank=1)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    there, missing = tmp_path / "a.json", tmp_path / "missing" / "a.json"
    assert path_of(runner, NworConfig(audit_file=str(there))) == f"{there}.1"

    for path in (missing, tmp_path):
        said = rf"^VLLM_NWOR_AUDIT_FILE='{path}' is not allowed \(.*; allowed values: e"
        with pytest.raises(NworConfigError, match=said):
            start(runner, NworConfig(audit_file=str(path)))
