# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1 to 3 and 7 on every speculative method, and every kind of cache, that
vLLM runs on a CPU; what came of it goes to the table in docs/reach.md.

A case is one of test_byte_oracle.py, with all of its checks. The method's own drafter
runs in each step and writes its own caches; then its drafts are replaced by some that
are right and some that are wrong, since a tiny random drafter is never right. What it
proposed itself must be the same with NWOR and without.

Not covered, because vLLM does not run them on a CPU: ngram_gpu (it pins memory, which
takes a GPU), dspark and adaptive verification (the V2 runner's), the rejection methods
block and fly (the V1 runner's sampler has neither).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.parallel_state import destroy_model_parallel

from tests.helpers import reach
from tests.helpers.drafters import mixture_of_four
from tests.helpers.engine import NUM_DRAFTS, Engine, Request, prompt
from tests.helpers.environment import model_path
from tests.helpers.tail_connector import TailConnector
from tests.integration.test_byte_oracle import (
    MLA,
    Case,
    check_off,
    check_on,
    watch,
)


def method(name: str, model: str | None = None, num_layers: int = 0, **more: Any):
    """The case of a method whose own drafter runs. model: its weights, if it has any.
    more: of its speculative_config; `target` is the target model."""
    arguments = {"model": more.pop("target")} if "target" in more else {}
    config = {"method": name, "num_speculative_tokens": NUM_DRAFTS} | more
    if model is not None:
        config["model"] = model_path(model)
    return Case(
        arguments | {"speculative_config": config},
        keeps_drafter=True,
        num_drafter_layers=num_layers,
    )


METHODS = {
    "ngram": lambda: Case(),
    "suffix": lambda: method("suffix"),
    "draft_model": lambda: method("draft_model", "tiny-llama-draft", 2),
    "draft_model, parallel drafting": lambda: method(
        "draft_model", "tiny-llama-draft", 2, parallel_drafting=True
    ),
    "eagle": lambda: method("eagle", "tiny-eagle", 2),
    "eagle, dynamic k": lambda: method(
        "eagle",
        "tiny-eagle",
        2,
        num_speculative_tokens_per_batch_size=[(1, 2, NUM_DRAFTS), (3, 8, 2)],
    ),
    "eagle3": lambda: method("eagle3", "tiny-eagle3", 1),
    "mtp": lambda: method("mtp", None, 1, target="tiny-mimo"),
    "dflash": lambda: method("dflash", "tiny-dflash", 2, target="tiny-qwen3"),
    "medusa": lambda: method("medusa", "tiny-medusa"),
}
SEES = "BLIP-2, an image in each prompt"
MODELS = {
    "Qwen3": lambda: Case({"model": "tiny-qwen3"}),
    "Gemma 3, sliding window beside full attention": lambda: Case(
        {"model": "tiny-gemma3"}, num_groups=2
    ),
    "Gemma 3n, layers that share a cache": lambda: Case(
        {"model": "tiny-gemma3n"}, num_groups=2
    ),
    "Mixtral": lambda: Case({"model": "tiny-mixtral"}),
    SEES: lambda: Case({"model": "tiny-blip2"}),
    # Its logits depend on the number of drafts.
    "DeepSeek V2, multi-head latent attention": lambda: Case(MLA, plan=mixture_of_four),
    # vLLM's CPU code for this state fails on windows of fewer drafts than k.
    "Qwen3-Next, gated delta nets beside attention": lambda: Case(
        {"model": "tiny-qwen3-next"}, plan=mixture_of_four, num_native=3, stage="cow"
    ),
}
# One row runs with every change; it has all that a method can have: layers of its own
# in the target's group, and drafts made before the host knows what was accepted.
EVERY_CHANGE = "eagle"


REQUESTS = (
    Request("long", prompt(1, 300), 24),  # in two chunks
    Request("short", prompt(2, 3), 40),
    Request("middle", prompt(3, 50), 40, at=2),
    Request("aborted", prompt(4, 33), 60, at=3, abort_at=10),
    Request("late", prompt(6, 64), 24, at=12),
)


class Idle(TailConnector):
    """A KV connector that does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super(TailConnector, self).__init__(vllm_config, role, kv_cache_config)
        self.registration, self._tails, self._finished = None, {}, set()

    def request_finished(self, *_: Any) -> tuple[bool, None]:
        return False, None


IDLE = {
    "kv_connector": "Idle",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}
# The undo log is used in mode stage, too, and all of its guarantees hold.
NO_SHADOW_BLOCKS = {
    "a KV connector of somebody else": lambda: Case(
        {"kv_transfer_config": IDLE}, stage="cow"
    ),
    "max_model_len auto": lambda: Case({"max_model_len": -1}, stage="cow"),
    # One of the longest requests needs 13 blocks and the null block.
    "no room for shadow blocks": lambda: Case(
        {"num_gpu_blocks_override": 15, "max_model_len": 416}, stage="cow"
    ),
}


TABLES = {"method": METHODS, "model": MODELS, "refusal": NO_SHADOW_BLOCKS}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind, name, id=name, marks=[pytest.mark.nightly] * (name != EVERY_CHANGE)
        )
        for kind, table in TABLES.items()
        for name in table
    ],
)
def test_all_guarantees_hold(kind: str, name: str) -> None:
    if name == "suffix" and not importlib.util.find_spec("arctic_inference"):
        pytest.skip("suffix decoding needs the package arctic-inference")
    case: Case = TABLES[kind][name]()
    # Groups of processes that only mixtures of experts have are made anew.
    destroy_model_parallel()
    off, cow, stage = (case.engine(mode) for mode in ("off", "cow", "stage"))
    requests: Sequence[Request] = REQUESTS
    if name == SEES:
        requests = [replace(r, image=(50 * n, 0, 0)) for n, r in enumerate(REQUESTS)]
    vanilla = watch(off, requests, case=case)
    check_off(vanilla, case)
    for engine in (cow, stage):
        with reach.recorded(engine, kind, name) as entry:
            run = watch(engine, requests, vanilla.truth, case)
            check_on(vanilla, run, case)
            entry |= {
                "drafts": run.result.num_drafted,
                "accepted": run.result.num_accepted,
            }
    if name == "eagle, dynamic k":
        assert {2, NUM_DRAFTS} <= {
            num for step in vanilla.result.steps for num in step.drafted.values()
        }
    if name == SEES:
        text = REQUESTS[0].prompt
        assert tuple(vanilla.truth["long"][8:][: len(text)]) == text
        assert watch(off, case=case).result.tokens != vanilla.result.tokens
    if "share" in name:
        layers = off.probe.target_layers().values()
        assert len({layer.kv_cache.data_ptr() for layer in layers}) < len(layers)
    if case.num_native:
        (info,) = (i for i in stage.runner.nwor_state.infos if i.group == 3)
        assert "vLLM zeroes this model's new blocks" in info.reason


class Repeats:
    """A drafter of the kind that vLLM loads by its path: the last token once more."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target: Any) -> None: ...

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [row[-1:] * self.num_drafts for row in sampled]


@pytest.mark.parametrize(
    "mode", [pytest.param("cow", marks=pytest.mark.nightly), "stage"]
)
@pytest.mark.parametrize("name", ["custom_class", "extract_hidden_states"])
def test_refused_methods(name: str, mode: str, tmp_path: Path) -> None:
    """Drafters that may have cached layers and do not say which: every group says why
    it is left alone, and the engine runs as without NWOR."""
    arguments: dict[str, Any] = {
        "speculative_config": {
            "method": name,
            "model": f"{__name__}.Repeats",
            "num_speculative_tokens": NUM_DRAFTS,
        }
    }
    if name == "extract_hidden_states":
        layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
        arguments = {
            "speculative_config": {
                "method": name,
                "num_speculative_tokens": 1,
                "draft_model_config": layers,
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
            },
        }
    engine = Engine(mode, **arguments)
    assert engine.manager is None
    with reach.recorded(engine, "method", name):
        infos = engine.runner.nwor_state.infos
        assert {info.resolved for info in infos} == {"off"}
        for info in infos:
            assert info.reason.startswith(f"the speculative method is {name}, which ")
        if name == "custom_class":
            # vLLM's connector for the other one pins memory when it runs.
            assert engine.run(REQUESTS).num_drafted > 100
