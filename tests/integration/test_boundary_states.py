# SPDX-License-Identifier: Apache-2.0
"""The audit of recurrent states in the prefix cache (mamba_cache_mode align), on real
engines with and without speculation.

vLLM copies states between blocks: before a forward to the blocks in which a request
goes on, after sampling to the block whose end the accepted drafts passed. Under
speculation the copies are made by tests/helpers/aligned.py, because vLLM's kernels for
it do not run on a CPU; vLLM decides what is copied.

Not covered: the V2 runner and vLLM's own kernels (tests/gpu), hits inside a block. KV
connectors: test_stored_states.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker import mamba_utils

from tests.helpers.aligned import Copies
from tests.helpers.drafters import mixture
from tests.helpers.engine import NUM_DRAFTS, Engine, Request, Result, prompt
from tests.helpers.hybrid import (
    LAYERS,
    caches,
    found,
    host,  # noqa: F401
    mend_convolutions,
    play,
    start,
)
from tests.helpers.runner_probe import request_name
from vllm_nwor.step import Transfer

if not hasattr(mamba_utils.MambaSpecDecodeGPUContext, "run_fused_precopy"):
    pytest.skip("this vLLM copies by other functions", allow_module_level=True)

# Tokens of a block, which vLLM derives from the size of the states.
BLOCK = 288
TEXT = prompt(1, 700)
OTHER = prompt(2, 700)
ARGUMENTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": None,  # each block end that is computed
    "max_model_len": 1024,
    "max_num_batched_tokens": 300,
}


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    mend_convolutions(monkeypatch)
    return Copies(monkeypatch)


def engine_of(is_speculative: bool, **arguments: Any) -> Engine:
    speculation = {} if is_speculative else {"speculative_config": None}
    engine = start(**ARGUMENTS, **speculation, **arguments)
    assert engine.llm.reset_prefix_cache()
    return engine


@pytest.fixture(params=[False, True], ids=["plain", "speculative"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param)


@pytest.fixture
def speculative() -> Engine:
    return engine_of(True)


def run(
    engine: Engine, requests: Sequence[Request], plan: Any = mixture, texts: Any = None
) -> Result:
    """Plain engines draft nothing."""
    if engine.runner.speculative_config is None:
        return engine.run(requests)
    return play(engine, plan, texts or {}, list(requests))


def ask(engine: Engine, name: str, text: Sequence[int], num_cached: int) -> None:
    result = run(engine, [Request(name, tuple(text), 6)])
    assert result.cached == {name: num_cached}


# --- silence --------------------------------------------------------------------------


def test_hits_are_silent(engine: Engine) -> None:
    """At each block end, of texts that share their begin; all are compared."""
    ask(engine, "first", TEXT[:700], 0)
    ask(engine, "two blocks", (*TEXT[:600], 5), 2 * BLOCK)
    ask(engine, "one block", (*TEXT[:300], *OTHER[:300]), BLOCK)
    ask(engine, "both", (*TEXT[:300], *OTHER[:300], 6), 2 * BLOCK)
    ask(engine, "other", OTHER, 0)
    requests = [
        Request(f"r{n}", (*TEXT[: 290 + 40 * n], n), 20, at=n % 4) for n in range(8)
    ]
    result = run(engine, requests)
    assert {*result.cached.values()} == {BLOCK}
    assert found(engine) == []


def passing(
    num_right: int, length: int | None = None
) -> Callable[[str, int], tuple[int, int]]:
    """A plan: all drafts are wrong, but for `num_right` behind a text of `length`, by
    default those up to the end of the second block."""

    def plan(name: str, num_tokens: int) -> tuple[int, int]:
        is_it = num_tokens == (length or 2 * BLOCK - num_right)
        return NUM_DRAFTS, num_right if is_it else 0

    return plan


def long_text(engine: Engine) -> tuple[Request, dict[str, list[int]]]:
    """A request that passes a block's end, and its text; the prefix cache is empty."""
    request = Request("long", TEXT[:560], 40)
    text = {"long": [*request.prompt, *run(engine, [request]).tokens["long"]]}
    assert engine.llm.reset_prefix_cache()
    return request, text


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_boundaries_that_windows_pass_are_silent(
    speculative: Engine, copies: Copies, num_right: int
) -> None:
    """They are in the prefix cache, as those of prompts."""
    request, text = long_text(speculative)
    copies.after.clear()
    run(speculative, [request], passing(num_right), text)
    assert copies.after == [(0, 2, 1, num_right)]
    last_tokens = speculative.audit.audit.states.last_tokens
    for group in range(3):
        (block,) = cached_blocks(speculative, group, 2 * BLOCK)
        assert last_tokens[group, block.block_id] == text["long"][2 * BLOCK - 1]
    ask(speculative, "behind it", (*text["long"][:590], 9), 2 * BLOCK)
    assert found(speculative) == []


def test_what_a_block_held_before_is_silent(
    speculative: Engine, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies a buffer from the first column that is read on: behind it are inputs
    of another request, perhaps of the very token that comes next."""
    inputs: list[torch.Tensor] = []
    forward = speculative.runner._model_forward

    def act(*args: Any, **kwargs: Any) -> Any:
        is_copied = (0, 1, 2, 3) in copies.before
        copies.before.clear()
        if not is_copied:
            return forward(*args, **kwargs)
        metadata = get_forward_context().attn_metadata[LAYERS[0]]
        block = int(metadata.spec_state_indices_tensor[0, 0])
        buffer = caches(speculative, 0)[0][block]
        if inputs:
            buffer[4:] = inputs[0]
        result = forward(*args, **kwargs)
        inputs.append(buffer[2].clone())
        return result

    request = Request("long", TEXT[:560], 40)
    text = {"long": [*request.prompt, *run(speculative, [request]).tokens["long"]]}
    monkeypatch.setattr(speculative.runner, "_model_forward", act)
    for _ in range(2):
        assert speculative.llm.reset_prefix_cache()
        run(speculative, [request], passing(3, 2 * BLOCK - 4), text)
    assert torch.equal(*inputs)
    assert found(speculative) == []


def num_resumed_by_hit(requests: Sequence[Request], result: Result) -> int:
    """Preempted requests of which fewer tokens were computed again than they had."""
    computed: Counter[str] = Counter()
    preempted = set()
    for step in result.steps:
        for name in map(request_name, step.preempted):
            preempted.add(name)
            computed[name] = 0
        for name, count in step.scheduled.items():
            num_rejected = step.drafted.get(name, 0) - step.accepted.get(name, 0)
            computed[request_name(name)] += count - num_rejected
    lengths = {one.name: len(one.prompt) + one.max_tokens - 1 for one in requests}
    return sum(computed[name] < lengths[name] for name in preempted & {*lengths})


def run_with_few_blocks(few: Engine) -> Result:
    """Requests of two texts, of which some are aborted and some resumed by a hit."""
    requests = [
        Request(
            f"q{n}",
            (*(TEXT, (7,) * 700)[n // 2 % 2][: 300 + 150 * (n % 3)], *[n] * (n % 2)),
            30,
            at=3 * n,
            abort_at=3 * n + 9 if n % 8 == 3 else None,
            abort_during=3 * n + 8 if n % 8 == 6 else None,
        )
        for n in range(24)
    ]
    texts = {one.name: [*one.prompt, *[7] * 40] for one in requests}
    result = run(few, requests, mixture, texts)
    whole = [one for one in requests if one.abort_at == one.abort_during is None]
    assert num_resumed_by_hit(whole, result) > 0
    return result


@pytest.mark.parametrize(
    ("is_speculative", "arguments"),
    [
        (False, {"num_gpu_blocks_override": 18}),
        (False, {"num_gpu_blocks_override": 18, "async_scheduling": True}),
        (True, {"num_gpu_blocks_override": 36}),
    ],
)
def test_eviction_preemption_and_aborts_are_silent(
    is_speculative: bool, arguments: dict[str, Any]
) -> None:
    """With few blocks, all are used again and again, by other groups, too. The text of
    a request that is resumed with asynchronous scheduling is not known."""
    few = engine_of(is_speculative, **arguments)
    assert {*run_with_few_blocks(few).cached.values()} >= {0, BLOCK}
    assert found(few) == []


def test_repeating_text_is_silent(engine: Engine, copies: Copies) -> None:
    """The same token again and again may give the same bits, also where a block held
    another text before."""
    for round_ in range(3):
        requests = [
            Request(f"c{round_}{n}", (7 + n % 2,) * (280 + 3 * n), 40, at=n)
            for n in range(8)
        ]
        texts = {one.name: one.prompt[:1] * 700 for one in requests}
        run(engine, requests, mixture, texts)
        run(engine, [Request(f"o{n}", prompt(90 + n, 300), 20) for n in range(8)])
    assert found(engine) == []


# --- planted faults -------------------------------------------------------------------


def cached_blocks(engine: Engine, group: int, length: int) -> list[Any]:
    """vLLM's blocks of that group in the prefix cache, for texts of `length`."""
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return [
        block
        for block in pool.blocks
        if block.block_hash is not None
        and int.from_bytes(block.block_hash[-4:], "big") == group
        and block.block_hash_num_tokens == length
    ]


def changed(engine: Engine, block: Any, patch: pytest.MonkeyPatch) -> None:
    caches(engine, 1)[1][block.block_id] += 1


def zeroed(engine: Engine, block: Any, patch: pytest.MonkeyPatch) -> None:
    for state in caches(engine, 1):
        state[block.block_id] = 0


def shifted(engine: Engine, block: Any, patch: pytest.MonkeyPatch) -> None:
    buffer = caches(engine, 1)[0][block.block_id]
    buffer.copy_(buffer.roll(1, dims=0))


def anothers(engine: Engine, block: Any, patch: pytest.MonkeyPatch) -> None:
    """The prefix cache has the block of another text."""
    (other,) = (one for one in cached_blocks(engine, 1, BLOCK) if one is not block)
    patch.setattr(block, "block_id", other.block_id)


def null(engine: Engine, block: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "block_id", 0)


Fault = Callable[[Engine, Any, pytest.MonkeyPatch], None]
BOTH = {"conv", "temporal"}
FAULTS: dict[Fault, tuple[str, set[str]]] = {
    changed: ("changed_state", {"temporal"}),
    zeroed: ("changed_state", BOTH),
    shifted: ("changed_state", {"conv"}),
    anothers: ("foreign_state", BOTH),
    null: ("state_lost", BOTH),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_boundary_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """In the hit's first step: the block, the text's end there, and who wrote it."""
    ask(engine, "first", TEXT[:300], 0)
    (block,) = cached_blocks(engine, 1, BLOCK)
    ask(engine, "other", OTHER[:300], 0)
    assert found(engine) == []
    before = engine.audit.audit.step
    with monkeypatch.context() as patch:
        fault(engine, block, patch)
        number = block.block_id
        ask(engine, "hit", (*TEXT[:300], 4), BLOCK)
    findings = found(engine)
    kind, states = FAULTS[fault]
    assert {one.kind for one in findings} == {kind}
    assert {one.state for one in findings} == states
    assert len(findings) == len(states)
    writer = {anothers: "other", null: None}.get(fault, "first")
    for one in findings:
        assert (one.layer, one.num_layers) == (LAYERS[1], 1)
        assert (one.step, one.block) == (before + 1, number)
        assert (one.position, one.expected) == (BLOCK - 1, str(BLOCK))
        assert request_name(one.owner) == "hit"
        name = one.writer.request
        assert (name and request_name(name)) == writer
    assert engine.llm.reset_prefix_cache()


def leave_out_copies(patch: pytest.MonkeyPatch) -> None:
    """Of states to the blocks of running requests."""
    context = mamba_utils.MambaSpecDecodeGPUContext
    patch.setattr(context, "run_fused_precopy", lambda *_, **__: None)
    patch.setattr(mamba_utils, "do_mamba_copy_block", lambda buffers: None)


LEFT_OUT = {("changed_state", "conv", 3), ("changed_state", "temporal", 3)}


def test_a_copy_to_the_running_block_that_is_left_out_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary itself is right: the block is the one that was read."""
    ask(engine, "first", TEXT[:300], 0)
    blocks = [cached_blocks(engine, group, BLOCK)[0].block_id for group in range(3)]
    leave_out_copies(monkeypatch)
    ask(engine, "hit", (*TEXT[:300], 4), BLOCK)
    findings = [one for one in found(engine) if one.position == BLOCK]
    assert {(one.kind, one.state, one.num_layers) for one in findings} == LEFT_OUT
    assert not {one.block for one in findings} & {*blocks}
    assert engine.llm.reset_prefix_cache()


@pytest.mark.parametrize("num_right", [0, 3])
def test_a_boundary_that_is_not_written_is_named(
    speculative: Engine, copies: Copies, num_right: int
) -> None:
    """By the request that passed it, one step later, and by one that finds it."""
    request, text = long_text(speculative)
    copies.allows = lambda row, source, to, num_more: to != 1
    run(speculative, [request], passing(num_right), text)
    findings = found(speculative)
    assert {(one.kind, one.state, one.num_layers) for one in findings} == {
        ("state_not_written", "conv", 3),
        ("state_not_written", "temporal", 3),
    }
    assert {one.position for one in findings} == {2 * BLOCK - 1}
    assert {one.step - one.writer.step for one in findings} == {1}
    block = findings[0].block
    assert block == cached_blocks(speculative, 0, 2 * BLOCK)[0].block_id
    ask(speculative, "hit", (*text["long"][:590], 9), 2 * BLOCK)
    findings = found(speculative)
    assert {(one.kind, one.block) for one in findings} == {("changed_state", block)}
    assert speculative.llm.reset_prefix_cache()


# --- what is not known ----------------------------------------------------------------


def load(engine: Engine, blocks: list[list[int]]) -> None:
    engine.audit.audit.on_transfer(Transfer(blocks, None, fills=True))


def forget(engine: Engine, blocks: list[list[int]]) -> None:
    engine.audit.audit.states.forget_all()


@pytest.mark.parametrize(("lose", "num_unknown"), [(load, 2), (forget, 6)])
def test_states_that_are_not_known_are_counted(
    engine: Engine, lose: Callable[..., None], num_unknown: int
) -> None:
    """Those that a KV connector loads into a block of one layer's; all. Once they were
    read, they count as the text's."""
    ask(engine, "first", TEXT[:300], 0)
    blocks = [[one.block_id for one in cached_blocks(engine, 0, BLOCK)], [], [], []]
    lose(engine, blocks)
    caches(engine, 0)[1][blocks[0][0]] += 1
    totals = engine.audit.audit.states.totals.zero_()
    ask(engine, "hit", (*TEXT[:300], 4), BLOCK)
    assert totals[1] == num_unknown
    assert engine.take_findings() == []
    totals.zero_()
    ask(engine, "again", (*TEXT[:300], 5), BLOCK)
    assert found(engine) == []
    caches(engine, 0)[1][blocks[0][0]] += 1
    ask(engine, "at last", (*TEXT[:300], 6), BLOCK)
    assert [one.kind for one in found(engine)] == ["changed_state"]
    assert engine.llm.reset_prefix_cache()


def test_a_copied_block_is_known(speculative: Engine) -> None:
    """As vLLM copies the last block of a hit that ends inside it."""
    states = speculative.audit.audit.states
    ask(speculative, "first", TEXT[:300], 0)
    (block,) = cached_blocks(speculative, 0, BLOCK)
    to = 60
    states.copy_block(block.block_id, to)
    assert torch.equal(states.records[to], states.records[block.block_id])
    assert states.records[to].any()


def test_a_state_from_inside_a_chunk_is_not_known(speculative: Engine) -> None:
    """Other layers than these may write one, to the block before the last: as if blocks
    were smaller, the second one of a text of three."""
    states = speculative.audit.audit.states
    (place,) = (states.tables == BLOCK).nonzero()
    generations = states.records.view(torch.int32)[:, 2].fill_(7)
    states.tables[place] = 100
    try:
        run(speculative, [Request("first", TEXT[:250], 1)])
    finally:
        states.tables[place] = BLOCK
    tables = speculative.runner.input_batch.block_table.block_tables
    inner = {int(of_group.block_table.gpu[0, 1]) for of_group in tables[:3]}
    assert {*(generations == 0).nonzero().flatten().tolist()} == inner
    states.forget_all()
