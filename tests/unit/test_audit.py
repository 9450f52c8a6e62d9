# SPDX-License-Identifier: Apache-2.0
"""The audit's identity of a request's text, and which part is in blocks of its own."""

import ast
import inspect
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils

from tests.helpers.logs import nwor_log
from vllm_nwor.audit.requests import MAX_FEATURES, features_of, hash_of, seed_of
from vllm_nwor.base import errors
from vllm_nwor.hooks.scheduled import ScheduledStep
from vllm_nwor.hooks.scheduler import _schedule


def new(lora=None, images=(), prompt_embeds=None, **others):
    """A NewRequestData. images: identifier, offset and length of each."""
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(*place))
        for name, *place in images
    ]
    about = {"lora_request": lora, "mm_features": features}
    return SimpleNamespace(**about, prompt_embeds=prompt_embeds, **others)


def seen(request, salt=None):
    """A request that is new in a step, as observers see it."""
    request.req_id, request.block_ids, request.num_computed_tokens = "a", [[1]], 0
    known = {"a": (salt, None, False)}
    output = SimpleNamespace(scheduled_new_reqs=[request], nwor_audit=known)
    (found,) = ScheduledStep(output).new_requests()
    return found


def seed(lora=None, salt=None):
    found = seen(new(lora), salt)
    return seed_of(found.adapter, found.cache_salt)


def adapter(name="acme", path="/a", number=1):
    return LoRARequest(name, number, path)


# --- identity -------------------------------------------------------------------------

# Adapter and salt: none of these may share blocks.
APART = {
    "nothing": (None, None),
    "an adapter": (adapter(), None),
    "of another name": (adapter(name="other"), None),
    "at another path": (adapter(path="/b"), None),
    "whose name and path are the same": (adapter("acme", "acme"), None),
    "whose name and path are swapped": (adapter("/a", "acme"), None),
    "a salt": (None, "salt"),
    "a salt that is an adapter's name": (None, "acme"),
    "a salt that is its path": (None, "/a"),
    "a salt that is both, one behind the other": (None, "acme/a"),
    "both": (adapter(), "salt"),
    "both, the same word": (adapter(), "acme"),
    "a salt that looks like what is hashed": (None, "', 'acme"),
    "a salt that is a word for nothing": (None, "None"),
}


def test_seeds_of_requests_that_must_not_share_blocks_differ():
    seeds = {name: seed(*about) for name, about in APART.items()}
    pairs = combinations(seeds, 2)
    assert [pair for pair in pairs if len({seeds[name] for name in pair}) < 2] == []
    assert seeds["nothing"] == 0
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds.values())


@pytest.mark.parametrize("salt", ["", None])
def test_the_same_adapter_again_has_the_same_seed(salt):
    """The number is of a registration; an empty salt means none, as in vLLM."""
    assert seed(adapter(number=7), salt) == seed(adapter())
    assert seed(None, salt) == 0


def test_features_are_vllms_hashes_with_their_positions():
    found = features_of(seen(new(images=[("red", 2, 4), ("blue", 9, 1)])))
    expected = [[2, 6, hash_of("red")], [9, 10, hash_of("blue")]]
    assert (found.tolist(), found.dtype) == (expected, torch.int64)
    assert features_of(seen(new())).shape == (0, 3)


IMAGE = ("red", 2, 4)


@pytest.mark.parametrize(
    "about",
    [
        {"prompt_embeds": torch.zeros(3, 2)},
        {"prompt_embeds": torch.zeros(3, 2), "images": [IMAGE]},
        {"images": [IMAGE, (None, 7, 1)]},
        {"images": [IMAGE, ("", 7, 1)]},
        {"images": [IMAGE] * (MAX_FEATURES + 1)},
    ],
)
def test_a_feature_without_a_hash_makes_the_text_unknown(about):
    assert features_of(seen(new(**about))) is None
    assert len(features_of(seen(new(images=[IMAGE] * MAX_FEATURES)))) == MAX_FEATURES


def test_vllms_block_keys_have_no_other_parts():
    """The list above `hash_of` is complete while this holds."""
    make = inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
    nodes = list(ast.walk(ast.parse(make)))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {call.id for call in calls if isinstance(call, ast.Name)}
    parts = {"mm", "lora", "prompt_embeds"}
    assert called - {"tuple"} == {f"_gen_{part}_extra_hash_keys" for part in parts}
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    assert read == {"cache_salt"}
    keys = kv_cache_utils._gen_lora_extra_hash_keys(new(adapter()))
    assert keys == [("lora", "acme", "/a")]


# --- what a request has of its own ----------------------------------------------------


class Scheduler:
    """Schedules one request; returns the audit's data for the workers."""

    finished_recving_kv_req_ids = ()

    def __init__(self):
        found = SimpleNamespace(num_local_cached_tokens=32)
        self.request = SimpleNamespace(
            cache_salt="salt", prefill_stats=found, num_preemptions=0
        )
        self.requests = {"a": self.request}

    def schedule(self, num_computed=64, is_resumed=False):
        self.request.num_computed_tokens = num_computed
        request = new(req_id="a", num_computed_tokens=num_computed)
        output = SimpleNamespace(
            scheduled_new_reqs=[] if is_resumed else [request],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids={"a"} if is_resumed else set()
            ),
        )
        found = _schedule(lambda: output, self, (), {})
        # vLLM removes them with the first token.
        self.request.prefill_stats = None
        return None if is_resumed else found.nwor_audit["a"]

    def preempt(self):
        self.request.num_preemptions += 1


def test_a_sessions_next_turn_has_its_text_in_its_own_blocks():
    scheduler = Scheduler()
    assert scheduler.schedule() == ("salt", 32, False)
    assert scheduler.schedule(90) == ("salt", 90, False)
    assert scheduler.schedule(120) == ("salt", 120, False)


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_preempted_session_may_have_loaded_blocks(is_v2):
    """V2's runner gets a resumed request as a new one. In the next turn it has its own
    blocks again."""
    scheduler = Scheduler()
    scheduler.schedule()
    scheduler.preempt()
    expected = ("salt", None, False) if is_v2 else None
    assert scheduler.schedule(90, is_resumed=not is_v2) == expected
    assert scheduler.schedule(120) == ("salt", 120, False)
    scheduler.preempt()
    assert scheduler.schedule(60) == ("salt", None, False)


def test_a_request_that_vllm_has_dropped_is_unknown():
    scheduler = Scheduler()
    scheduler.requests = {}
    assert scheduler.schedule() == (None, None, False)


@pytest.mark.parametrize("strict", ["0", "always"])
def test_a_failure_in_the_scheduler_hook_ends_no_step(strict, monkeypatch):
    """The requests of that step are unknown to the workers."""
    monkeypatch.setenv("VLLM_NWOR_STRICT", strict)
    monkeypatch.setattr(errors, "_logged", set())
    output = SimpleNamespace(scheduled_new_reqs=[object()], scheduled_cached_reqs=None)
    scheduler = SimpleNamespace(requests={})
    if strict == "always":
        with pytest.raises(AttributeError):
            _schedule(lambda: output, scheduler, (), {})
        return
    with nwor_log() as lines:
        for _ in range(2):
            assert _schedule(lambda: output, scheduler, (), {}) is output
    assert output.nwor_audit is None
    (line,) = lines
    assert line.startswith(
        "ERROR NWOR audit: new requests of failed steps are unverified: "
    )
