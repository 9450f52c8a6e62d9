# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1 to 3 and 7 for every speculative method and kind of cache that vLLM runs
on a CPU. docs/reach.md shows the outcome.

Each case has the checks of test_byte_oracle.py. The method's own drafter runs in each
step and writes its own caches; its drafts must be the same with NWOR and without. They
are then replaced by right and wrong ones, since a tiny random drafter is never right.

Not covered, because vLLM does not run them on a CPU: ngram_gpu, dspark, adaptive
verification, the rejection methods block and fly.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.parallel_state import destroy_model_parallel

from tests.helpers import reach
from tests.helpers.drafters import mixture_of_four
from tests.helpers.engine import NUM_DRAFTS, Engine, Request, prompt
from tests.helpers.environment import model_path
from tests.helpers.tail_connector import TailConnector
from tests.integration.test_byte_oracle import MLA, Case, check_off, check_on, watch


def method(name: str, model: str | None = None, num_layers: int = 0, **more: Any):
    """The case of a method whose own drafter runs. model: the drafter's. more: of its
    speculative_config; `target`: the target model."""
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
# The one row that is not nightly: its drafter has layers in the target's group, and
# proposes before the host knows what was accepted.
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
# Mode stage falls back to the undo log, with all of its guarantees.
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
def test_all_guarantees_hold(kind, name):
    if name == "suffix" and not importlib.util.find_spec("arctic_inference"):
        pytest.skip("suffix decoding needs the package arctic-inference")
    case: Case = TABLES[kind][name]()
    # Mixtures of experts need other process groups.
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
        (info,) = (i for i in stage.infos if i.group == 3)
        assert "vLLM zeroes this model's new blocks" in info.reason


class Repeats:
    """A custom_class drafter: repeats the last token."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target: Any) -> None: ...

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [row[-1:] * self.num_drafts for row in sampled]


@pytest.mark.parametrize(
    "mode", [pytest.param("cow", marks=pytest.mark.nightly), "stage"]
)
@pytest.mark.parametrize("name", ["custom_class", "extract_hidden_states"])
def test_refused_methods(name, mode, tmp_path):
    """Drafters that may have cached layers without naming them: each group is refused
    with a reason, and the engine runs as plain vLLM."""
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
        infos = engine.infos
        assert {info.resolved for info in infos} == {"off"}
        for info in infos:
            assert info.reason.startswith(f"the speculative method is {name}, which ")
        if name == "custom_class":
            # The other one's connector needs pinned memory to run.
            assert engine.run(REQUESTS).num_drafted > 100
