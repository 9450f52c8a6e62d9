# SPDX-License-Identifier: Apache-2.0
"""The audit of recurrent states on real engines: a hybrid model of three gated delta
nets and one attention layer, on the V1 runner.

vLLM is mended here (helpers/hybrid.py) where states would be wrong without a fault of
these tests; test_state_bugs.py runs it as it is. Planted faults of each class, on such
an engine: tests/e2e/test_audit_selftest.py.

Not covered: the V2 runner and CUDA (tests/gpu), states in the prefix cache, other
recurrent layers (test_state_kinds.py).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

from tests.helpers import hybrid
from tests.helpers.drafters import all_wrong, mixture, mixture_of_four, no_drafts
from tests.helpers.engine import Engine, Request, Result, prompt
from tests.helpers.hybrid import (
    BEFORE_0_32,
    LAYERS,
    found,
    host,  # noqa: F401
    mend_convolutions,
    mend_rows_without_drafts,
    of_few_words,
    start,
)
from tests.helpers.runner_probe import request_name

REQUESTS = [
    Request(f"r{number}", prompt(number, length), 24)
    # vLLM before 0.32 gives a prompt of one token the state of another request.
    for number, length in enumerate((2 if BEFORE_0_32 else 1, 2, 5, 33, 64, 65, 7, 40))
]


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_convolutions(monkeypatch)
    mend_rows_without_drafts(monkeypatch)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return start()


@pytest.fixture(scope="module")
def truth(engine: Engine) -> dict[str, list[int]]:
    """The texts of REQUESTS, by the engine itself: with windows all of one length its
    convolutions are right."""
    result = play(engine, all_wrong, {one.name: one.prompt for one in REQUESTS})
    engine.audit.findings.last.clear()
    engine.audit.audit.states.totals.zero_()
    return {one.name: [*one.prompt, *result.tokens[one.name]] for one in REQUESTS}


def play(engine: Engine, plan: Any, truth: Any, requests: Any = REQUESTS) -> Result:
    return hybrid.play(engine, plan, truth, requests)


# --- silence --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [no_drafts, all_wrong, mixture_of_four, mixture])
def test_right_states_are_silent(
    engine: Engine, truth: dict[str, list[int]], mended: None, plan: Any
) -> None:
    """Prompts of 1 to 65 tokens, windows of 0 to 4 drafts, any number right."""
    result = play(engine, plan, truth)
    assert found(engine) == []
    for one in REQUESTS:
        assert [*one.prompt, *result.tokens[one.name]] == truth[one.name]


def come_and_go(draw: random.Random, number: int) -> list[Request]:
    """So many requests, one a step; aborted ones leave their blocks to others, and the
    same token again and again may give the same state."""
    return [
        Request(
            f"q{n}",
            (7,) * length if n % 3 == 0 else prompt(draw.randrange(9999), length),
            20,
            at=n,
            abort_at=n + 6 if n % 4 == 1 else None,
            abort_during=n + 5 if n % 4 == 3 else None,
        )
        for n, length in enumerate(draw.choices((2, 3, 30, 90, 300), k=number))
    ]


def test_reused_blocks_chunks_and_repeating_text_are_silent(
    engine: Engine, truth: dict[str, list[int]], mended: None
) -> None:
    requests = come_and_go(random.Random(4), 24)
    texts = {one.name: [*one.prompt, *[7] * 40] for one in requests}
    play(engine, mixture, texts, requests)
    assert found(engine) == []


@pytest.mark.nightly
def test_ten_thousand_steps_are_silent(
    engine: Engine, truth: dict[str, list[int]], mended: None
) -> None:
    draw, first = random.Random(5), engine.audit.audit.step
    while engine.audit.audit.step - first < 10_000:
        requests = come_and_go(draw, 100)
        texts = {one.name: [*one.prompt, *[7] * 40] for one in requests}
        play(
            engine, draw.choice((mixture, mixture_of_four, all_wrong)), texts, requests
        )
        assert found(engine) == []


def test_preempted_requests_are_silent(mended: None) -> None:
    few = start(num_gpu_blocks_override=34)
    requests = [Request(f"p{n}", prompt(200 + n, 270), 40) for n in range(4)]
    result = play(few, no_drafts, {one.name: one.prompt for one in requests}, requests)
    assert result.num_preemptions > 0
    assert found(few) == []


def test_without_speculation() -> None:
    plain = start(speculative_config=None)
    plain.run(REQUESTS)
    assert found(plain) == []


# --- planted faults -------------------------------------------------------------------


def replace_forward(
    engine: Engine, patch: pytest.MonkeyPatch, act: Callable[[int, Any], Any]
) -> None:
    """Calls act(number, forward) in place of each forward, the first being 1."""
    forward, numbers = engine.runner._model_forward, itertools.count(1)

    def replacing(*args: Any, **kwargs: Any) -> Any:
        return act(next(numbers), functools.partial(forward, *args, **kwargs))

    patch.setattr(engine.runner, "_model_forward", replacing)


def test_after_a_wrong_read_a_buffer_is_unknown(
    engine: Engine, mended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a text of few words the inputs behind a wrong column are those of a later
    token, too: that is no state which was not written."""

    def act(number: int, forward: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        for name in LAYERS:
            if metadata[name].num_accepted_tokens is not None:
                metadata[name].num_accepted_tokens.fill_(1)
        return forward()

    replace_forward(engine, monkeypatch, act)
    play(engine, None, {}, of_few_words())
    findings = found(engine)
    assert {one.kind for one in findings} == {"stale_state"}
    assert len(findings) > 20


def test_prompts_in_a_graph_of_decodes_are_named(
    engine: Engine, mended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM issue 53051: what a replayed graph would do to prompts. (Here it is not
    replayed.)"""

    def act(at: int, forward: Any) -> Any:
        if at == 1:
            context = get_forward_context()
            context.cudagraph_runtime_mode = CUDAGraphMode.FULL
            context.batch_descriptor = BatchDescriptor(num_tokens=8, uniform=True)
        return forward()

    replace_forward(engine, monkeypatch, act)
    result = play(engine, no_drafts, {one.name: one.prompt for one in REQUESTS})
    named = {(one.kind, one.state, request_name(one.owner)) for one in found(engine)}
    prompts = set(map(request_name, result.steps[0].scheduled))
    kinds = ("conv", "temporal")
    assert named == {("state_not_written", k, o) for k in kinds for o in prompts}
