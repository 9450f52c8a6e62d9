# SPDX-License-Identifier: Apache-2.0
"""The audit of recurrent states of Mamba2 (a Granite hybrid) and of short convolutions
(LFM2) on real engines, on the V1 runner; what the audit says of states at start-up, and
the memory that it reserves for them.

vLLM's CPU code of these layers is wrong with speculation, whether there are drafts or
not. Its convolutions read the end of a buffer whose begin a prompt's inputs went to.
Its Mamba kernel takes the table of states, [requests, 1 + K], for one of [requests], so
the second request's state goes to the first one's second column. Engines therefore run
without speculation, but for the test of that.

Not covered: Mamba1 (vLLM's CPU code has weights of another shape and raises), linear
attention and Kimi's delta attention (they need Triton).
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from tests.helpers.drafters import no_drafts
from tests.helpers.engine import Engine
from tests.helpers.hybrid import AUDIT, found
from tests.helpers.logs import nwor_log
from tests.helpers.runner_probe import request_name
from tests.integration.test_states import REQUESTS, come_and_go, play
from vllm_nwor.audit import build
from vllm_nwor.config import NworConfig
from vllm_nwor.hooks import caches

# The states of a layer.
MODELS = {"tiny-granite-hybrid": ["conv", "temporal"], "tiny-lfm2": ["conv"]}


@functools.cache
def start(model: str, **arguments: Any) -> Engine:
    return Engine("off", AUDIT, model, **arguments)


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = start(request.param, speculative_config=None)
    engine.states = MODELS[request.param]
    return engine


def test_right_states_are_silent(engine: Engine) -> None:
    """Prompts of 1 to 300 tokens, chunks, repeating text, aborted requests."""
    for requests in (REQUESTS, come_and_go(random.Random(5), 24)):
        engine.run(requests)
        assert found(engine) == []


def test_states_that_cpu_code_misplaces_with_drafts_are_named(engine: Engine) -> None:
    """Nobody has a draft."""
    model = next(one for one in MODELS if MODELS[one] == engine.states)
    requests = REQUESTS[:3]
    right = engine.run(requests)
    assert found(engine) == []
    speculating = start(model)
    wrong = play(speculating, no_drafts, {one.name: () for one in requests}, requests)
    findings = found(speculating)
    assert {(one.kind, one.state) for one in findings} == {
        ("state_not_written", state) for state in engine.states
    }
    convolutions = [one for one in findings if one.state == "conv"]
    names = {one.name for one in requests}
    assert {request_name(one.owner) for one in convolutions} == names
    for name in names:
        (first, second), others = right.logprobs[name][:2], wrong.logprobs[name][:2]
        assert first == others[0]
        assert second != others[1]


def test_start_up_says_what_is_followed_and_what_it_costs(engine: Engine) -> None:
    found = caches.bound(engine.runner)
    with nwor_log() as log:
        audit = build.build(found, NworConfig.from_env(), None)
    (line,) = [text for text in log if "recurrent" in text]
    number, states = len(engine.states), audit.audit.states
    backend = {1: "SHORT_CONV_ATTN", 2: "MAMBA2_ATTN"}[number]
    for gid in range(3):
        assert f"group {gid}: {number} recurrent states ({backend}); " in line
    # Eight requests; of a convolution all columns twice, 32 words of 2 bytes; of
    # matrices 256 bytes, what is read and twice what is written.
    columns = audit.audit.states.caches[0].shape[1]
    of_layer = 2 * columns * 32 * 2 + (number - 1) * 3 * 256
    assert states.step_bytes == 8 * 3 * of_layer
    assert (
        f"; {3 * number} recurrent states: {states.num_bytes / 2**20:.2f} MiB, 2 "
        f"launches a step, {states.step_bytes / 2**20:.2f} MiB read in a step of 8 "
        "requests; "
    ) in line
    assert audit.findings._about["states"][:3] == [
        f"group {gid}: {number} recurrent states ({backend})" for gid in range(3)
    ]


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_keeps_these_states_itself(model: str, mode: str) -> None:
    """In the modes that undo drafts."""
    infos = Engine(mode, AUDIT, model).infos
    resolved = {one.group: one.resolved for one in infos}
    assert resolved == dict.fromkeys(range(3), "native") | {3: resolved[3]}
    assert resolved[3] in ("cow", "stage")


@pytest.mark.parametrize("model", MODELS)
def test_the_memory_reserved_for_a_hybrid_is_enough(model: str) -> None:
    """And the rest is small: what a table may have beyond the longest text."""
    runner, config = start(model).runner, NworConfig.from_env()
    size = build.reserved_bytes(caches.expected(runner), config)
    storage = torch.empty(size, dtype=torch.uint8)
    audit = build.build(caches.bound(runner), config, storage)
    assert audit.storage is storage
    assert audit.audit.num_bytes <= size < audit.audit.num_bytes + (1 << 16)
