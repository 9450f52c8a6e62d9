# SPDX-License-Identifier: Apache-2.0
"""The audit's identity of a request's text, and which part is in blocks of its own."""

import ast
import inspect
import math
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.helpers.logs import nwor_log
from vllm_nwor.audit import build
from vllm_nwor.audit.requests import MAX_FEATURES, features_of, hash_of, seed_of
from vllm_nwor.audit.states import Sizes
from vllm_nwor.base import errors
from vllm_nwor.config import NworConfig
from vllm_nwor.hooks import connectors
from vllm_nwor.hooks.scheduled import ScheduledStep
from vllm_nwor.hooks.scheduler import _schedule
from vllm_nwor.layout.caches import Loads as Known
from vllm_nwor.step import Loads


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
    known = {"a": (salt, None)}
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


# --- what a request has of its own, and what is loaded for it -------------------------

BLOCK = 16


class Connector:
    """Loads what it is told to."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return None, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass


def held(*groups):
    """vLLM's KVCacheBlocks, of numbers of blocks; from the second on without hash."""
    blocks = tuple(
        tuple(KVCacheBlock(number) for number in of_group) for of_group in groups
    )
    for of_group in blocks:
        of_group[0]._block_hash = b"hash"
        for block in of_group:
            block.is_null = not block.block_id
    return KVCacheBlocks(blocks)


class Scheduler:
    """Schedules one request, "a"; returns the audit's data for the workers."""

    def __init__(self, num_groups=1, connector=None):
        self.connector = connector or Connector()
        managers = [SimpleNamespace(block_size=BLOCK)] * num_groups
        coordinator = SimpleNamespace(single_type_managers=managers)
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator)
        self.request = SimpleNamespace(request_id="a", cache_salt="salt")
        self.requests = {"a": self.request}
        self.failed_recving_kv_req_ids = set()

    def schedule(self, *calls, num_computed=None, is_resumed=False, finished=()):
        """calls: the connector's, within the step. num_computed: None: it is not
        seated."""
        request = new(req_id="a", num_computed_tokens=num_computed)
        is_new = num_computed is not None and not is_resumed
        cached = SimpleNamespace(
            resumed_req_ids={"a"} if is_resumed else set(),
            req_ids=["other", "a"],
            num_computed_tokens=[7, num_computed],
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[request] if is_new else [],
            scheduled_cached_reqs=cached,
            finished_req_ids=set(finished),
        )

        def step():
            for call in calls:
                call()
            return output

        _schedule(step, self, (), {})
        seen = ScheduledStep(output)
        of_request = getattr(output, "nwor_audit", {}).get("a")
        return of_request, seen.loads()

    def asks(self, local):
        def call():
            self.connector.get_num_new_matched_tokens(self.request, local)

        return call

    def gets(self, num_external, *groups):
        def call():
            self.connector.update_state_after_alloc(
                self.request, held(*groups or [[7, 8, 9, 4]]), num_external
            )

        return call


NOTHING = Loads()


def loads(*blocks, failed=0):
    return Loads(blocks, failed)


def asynchronous():
    connector = Connector()
    connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (5, 1)
    return connector


def test_what_is_loaded_in_the_step():
    """Behind a block of the cache, two; the last one in part. vLLM asked twice."""
    scheduler = Scheduler()
    calls = scheduler.asks(0), scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK - 3)
    assert scheduler.schedule(*calls, num_computed=3 * BLOCK - 3) == (
        ("salt", BLOCK),
        loads([[8, 9]]),
    )
    assert scheduler.schedule() == (None, NOTHING)
    # A session's next turn: vLLM does not ask, and all is its own.
    about = scheduler.schedule(scheduler.gets(0), num_computed=90)
    assert about == (("salt", 90), NOTHING)


def test_null_blocks_are_not_loaded():
    """In front of a window."""
    scheduler = Scheduler()
    calls = scheduler.asks(0), scheduler.gets(3 * BLOCK, [0, 0, 9, 4])
    about = scheduler.schedule(*calls, num_computed=3 * BLOCK)
    assert about == (("salt", 0), loads([[9]]))


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_preempted_request_may_load(is_v2):
    """V2's runner gets a resumed request as a new one."""
    scheduler = Scheduler()
    how = {"num_computed": 40, "is_resumed": not is_v2}
    calls = scheduler.asks(BLOCK), scheduler.gets(24)
    assert scheduler.schedule(*calls, **how) == (("salt", BLOCK), loads([[8, 9]]))
    calls = scheduler.asks(32), scheduler.gets(0)
    assert scheduler.schedule(*calls, **how) == (("salt", 40), NOTHING)


def test_a_load_that_takes_steps_is_announced_at_once():
    """It is said once more, with 0, when it is complete; a whole prompt then lacks its
    last token, which is no failure."""
    scheduler = Scheduler(connector=asynchronous())
    assert scheduler.schedule(scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK)) == (
        None,
        loads([[8, 9]]),
    )
    assert scheduler.schedule() == (None, NOTHING)
    about = scheduler.schedule(scheduler.gets(0), num_computed=3 * BLOCK - 1)
    assert about == (("salt", BLOCK), NOTHING)


@pytest.mark.parametrize("num_computed", [BLOCK, 2 * BLOCK])
def test_a_load_that_failed_in_part(num_computed):
    scheduler = Scheduler(connector=asynchronous())
    scheduler.schedule(scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK))
    scheduler.failed_recving_kv_req_ids = {"a"}
    about, found = scheduler.schedule(scheduler.gets(0), num_computed=num_computed)
    assert about == ("salt", BLOCK)
    assert found == loads(failed=3 * BLOCK - num_computed)
    scheduler.failed_recving_kv_req_ids = set()
    assert scheduler.schedule() == (None, NOTHING)


def test_a_load_that_failed_and_is_asked_for_again():
    """Now some of it is in the cache."""
    scheduler = Scheduler(connector=asynchronous())
    scheduler.schedule(scheduler.asks(0), scheduler.gets(3 * BLOCK))
    scheduler.failed_recving_kv_req_ids = {"a"}
    calls = scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK)
    assert scheduler.schedule(*calls) == (None, loads([[8, 9]], failed=3 * BLOCK))
    scheduler.failed_recving_kv_req_ids = set()
    about = scheduler.schedule(num_computed=3 * BLOCK)
    assert about == (("salt", BLOCK), NOTHING)


@pytest.mark.parametrize("status", ["FINISHED_ERROR", "FINISHED_ABORTED"])
def test_a_request_that_ends_while_it_is_loaded(status):
    """With the policy `fail`, or because nobody waits for it."""
    scheduler = Scheduler(connector=asynchronous())
    scheduler.schedule(scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK))
    scheduler.requests = {}
    scheduler.request.status = SimpleNamespace(name=status)
    num_failed = 2 * BLOCK if status == "FINISHED_ERROR" else 0
    found = scheduler.schedule(finished=["a"])
    assert found == (None, loads(failed=num_failed))


def test_several_groups_may_have_found_different_prefixes():
    """What a load fills has no hash yet, and is no null block."""
    scheduler = Scheduler(2, asynchronous())
    groups = [7, 8, 9], [0, 0, 5]
    calls = scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK, *groups)
    assert scheduler.schedule(*calls) == (None, loads([[8, 9], [5]]))
    # Within a step all have their hashes by then.
    scheduler = Scheduler(2, None)
    calls = scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK, *groups)
    about = scheduler.schedule(*calls, num_computed=3 * BLOCK)
    assert about == (("salt", None), NOTHING)


def test_a_request_that_vllm_has_dropped_has_no_salt():
    scheduler = Scheduler()
    scheduler.requests = {}
    assert scheduler.schedule(num_computed=8) == ((None, 8), NOTHING)


def test_a_connector_that_is_not_as_expected(monkeypatch):
    """It loads; what it loads is not known, from then on."""
    monkeypatch.setattr(errors, "_logged", set())
    connector = Connector()
    connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: None
    scheduler = Scheduler(connector=connector)
    with nwor_log() as lines:
        for _ in range(2):
            calls = scheduler.asks(BLOCK), scheduler.gets(2 * BLOCK)
            about = scheduler.schedule(*calls, num_computed=3 * BLOCK)
            assert about == (("salt", None), None)
    (line,) = lines
    assert "loads of the KV connector cannot be followed; they stay unverified" in line


# --- stores ---------------------------------------------------------------------------


def transfer(name, module=None, **more):
    return SimpleNamespace(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_connector_extra_config=more,
    )


def multi(*names):
    return transfer("MultiConnector", connectors=[{"kv_connector": n} for n in names])


OWN = [transfer("OffloadingConnector"), multi("OffloadingConnector")]
SHARED = [
    transfer("OffloadingConnector", "mine"),
    transfer("OffloadingConnector", spec_name="TieringOffloadingSpec"),
    transfer("ExampleConnector"),
    multi("OffloadingConnector", "ExampleConnector"),
]


def test_only_memory_of_this_process_is_known_to_be_its_own():
    assert [connectors.has_own_store(of) for of in OWN] == [True] * len(OWN)
    assert [connectors.has_own_store(of) for of in SHARED] == [False] * len(SHARED)


@pytest.mark.parametrize(
    ("of", "env", "expected"),
    [
        (transfer("LMCacheConnectorV1"), {}, ""),
        (transfer("LMCacheConnectorV1"), {"LMCACHE_REMOTE_SERDE": "naive"}, ""),
        (
            transfer("LMCacheConnectorV1", **{"lmcache.remote_serde": "cachegen"}),
            {"LMCACHE_REMOTE_SERDE": "naive"},
            "LMCacheConnectorV1 (remote_serde: cachegen)",
        ),
        (
            multi("ExampleConnector", "LMCacheMPConnector"),
            {"LMCACHE_ENABLE_BLENDING": "True"},
            "LMCacheMPConnector (enable_blending: True)",
        ),
        (transfer("ExampleConnector"), {"LMCACHE_ENABLE_BLENDING": "True"}, ""),
        (
            transfer("LMCacheConnectorV1"),
            {"LMCACHE_CONFIG_FILE": "remote_serde: cachegen\n"},
            "LMCacheConnectorV1 (remote_serde: cachegen)",
        ),
        (transfer("LMCacheConnectorV1"), {"LMCACHE_CONFIG_FILE": "chunk_size: 8"}, ""),
        (transfer("LMCacheConnectorV1"), {"LMCACHE_CONFIG_FILE": "- {"}, ""),
        (transfer("LMCacheConnectorV1"), {"LMCACHE_CONFIG_FILE": ""}, ""),
    ],
)
def test_connectors_that_change_bytes_are_named(of, env, expected, tmp_path):
    path = tmp_path / "lmcache.yaml"
    if (text := env.get("LMCACHE_CONFIG_FILE")) is not None:
        if text:  # else there is no such file
            path.write_text(text)
        env = {"LMCACHE_CONFIG_FILE": str(path)}
    assert connectors.bytes_changed_by(of, env) == expected


@pytest.mark.parametrize(
    ("store", "has_own_store", "changed_by", "is_own", "expected"),
    [
        ("auto", False, "", False, "which may differ from it"),
        ("auto", True, "", True, "compared with what this engine has computed"),
        ("own", False, "", True, "compared with what this engine has computed"),
        ("shared", True, "", False, "which may differ from it"),
        ("own", True, "X (y: z)", False, "bytes are changed by X (y: z)"),
    ],
)
def test_start_up_says_what_loads_are_compared_with(
    store, has_own_store, changed_by, is_own, expected
):
    limits = SimpleNamespace(loads=Known.UNKNOWN, bytes_changed_by=changed_by)
    limits.has_own_store = has_own_store
    config = NworConfig.from_env({"VLLM_NWOR_AUDIT_STORE": store})
    assert build._is_own(limits, config) == is_own
    (line,) = build._about_loads(limits, config)
    assert line.startswith("loads: ")
    assert line.endswith(expected)
    limits.loads = Known.NONE
    assert build._about_loads(limits, config) == []


@pytest.mark.parametrize("strict", ["0", "always"])
def test_a_failure_in_the_scheduler_hook_ends_no_step(strict, monkeypatch):
    """The requests of that step are unknown to the workers."""
    monkeypatch.setenv("VLLM_NWOR_STRICT", strict)
    monkeypatch.setattr(errors, "_logged", set())
    output = SimpleNamespace(scheduled_new_reqs=[object()], scheduled_cached_reqs=None)
    scheduler = SimpleNamespace(requests={}, connector=None)
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


def test_the_tables_of_recurrent_states_are_as_large_as_documented():
    """Each of them: of a hybrid with three groups of 32 states in the prefix cache."""
    sizes = Sizes(96, 3, 7, 256, 1000, 4, num_records=1000, max_in_group=32)
    of_seats, of_blocks = 256 * (228 + 96 * (56 + 5 * 40)), 1000 * (3 * 4 + 32 + 32 * 8)
    shapes = [math.prod(shape) * dtype.itemsize for shape, dtype in sizes.shapes()]
    assert sum(shapes) == of_seats + of_blocks + 96 * 336 + 16  # two totals
    docs = (Path(__file__).parents[2] / "docs/audit.md").read_text()
    assert f": {of_seats / 1e6:.1f} MB for 256 requests, 48 layers with both" in docs
