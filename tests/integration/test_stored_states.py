# SPDX-License-Identifier: Apache-2.0
"""The audit of recurrent states that a KV connector stores and loads (mamba_cache_mode
align), on real engines: vLLM's OffloadingConnector, alone, and within a MultiConnector,
where the audit sees no transfers and goes by what the scheduler asks for.

Texts are stored by their first requests; the cache is reset, and they are loaded.
Faults are put into what a load brings.

Groups share the memory of their layers, as in larger models: a block is of one group.

Not covered: the V2 runner and GPUs, hits inside a block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import Engine, Request, prompt
from tests.helpers.host_offloading import CONNECTOR, HostSpec
from tests.helpers.hybrid import AUDIT, LAYERS, MODEL, caches, host  # noqa: F401
from tests.helpers.runner_probe import request_name
from tests.integration.test_boundary_states import (
    ARGUMENTS,
    BLOCK,
    LEFT_OUT,
    copies,  # noqa: F401  # a fixture of all tests here
    leave_out_copies,
    passing,
    run,
    run_with_few_blocks,
)
from vllm_nwor.audit.findings import Finding
from vllm_nwor.audit.states import boundaries_of
from vllm_nwor.hooks import states
from vllm_nwor.hooks.connectors import FollowedLoads
from vllm_nwor.layout.caches import Loads
from vllm_nwor.step import Transfer

# Of a load: three layers with two states each, and the slots of two blocks.
NUM_STATES, NUM_SLOTS = 6, 2 * BLOCK
LENGTH = NUM_SLOTS + 20

seeds = itertools.count(500)


# Called with the block of the cache and the group that a load has filled.
Change = Callable[["World", int, int], None]


class World:
    """An engine with a connector, and what is in its store."""

    def __init__(self, store: str, secret: str = "", **arguments: Any) -> None:
        connector = CONNECTOR
        if arguments.pop("is_among_several", False):
            connector = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [CONNECTOR]},
            }
        self.engine = Engine(
            "off",
            AUDIT | {"AUDIT_STORE": store, "AUDIT_SECRET": secret},
            MODEL,
            kv_transfer_config=connector,
            **ARGUMENTS,
            **arguments,
        )
        self.worker = HostSpec.last
        self.change: Change | None = None
        # Of the last load of states by group: the blocks, what was in them, and what
        # was loaded.
        self.blocks: dict[int, int] = {}
        self.before: dict[int, list[torch.Tensor]] = {}
        self.loaded: dict[int, list[torch.Tensor]] = {}
        self.stale: dict[int, list[torch.Tensor]] = {}
        self._groups: dict[int, int] = {}
        self._load, self._bring = self.worker.submit_load, self.worker.bring
        self.worker.submit_load = self._submit_load  # type: ignore[method-assign]
        self.worker.bring = self._bring_block  # type: ignore[method-assign]
        self.is_own = store == "own"
        self.verified = {"verified": NUM_STATES + NUM_SLOTS}

    def _submit_load(self, job_id: int, source: Any, to: Any) -> bool:
        """Groups have their blocks one after the other."""
        ids = iter(to.block_ids.tolist())
        self._groups = {
            next(ids): group
            for group, size in enumerate(to.group_sizes)
            for _ in range(size)
        }
        return self._load(job_id, source, to)

    def _bring_block(self, block: int, chunk: int) -> None:
        tensors, group = self.worker.tensors, self._groups[block]
        before = [tensor[block].clone() for tensor in tensors]
        self._bring(block, chunk)
        if group < len(LAYERS):
            self.blocks[group], self.before[group] = block, before
            self.loaded[group] = [tensor[block].clone() for tensor in tensors]
            if self.change is not None:
                self.change(self, block, group)

    def ask(
        self, *texts: Sequence[int], num_loaded: int | None = None, resets: bool = True
    ) -> dict[str, int]:
        """Asks for each text, with nothing in the cache of the engine. Returns the rise
        of the audit's counts."""
        before = self.engine.audited()
        if resets:
            self.engine.llm.reset_prefix_cache()
        num_before = self.worker.num_loaded
        requests = [Request(f"r{n}", tuple(text), 4) for n, text in enumerate(texts)]
        self.result = run(self.engine, requests)
        if num_loaded is not None:
            assert self.worker.num_loaded - num_before == num_loaded
        return self.engine.audited() - before

    def store(self, *texts: Sequence[int]) -> list[list[int]]:
        """Stores these texts, or a new one."""
        stored = [list(text) for text in texts or [prompt(next(seeds), LENGTH)]]
        assert self.ask(*stored, num_loaded=0) == {}
        return stored

    def found(self) -> list[Finding]:
        return self.engine.take_findings()


WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("own", {"speculative_config": None}),
    "shared": ("shared", {"speculative_config": None}),
    "several": ("own", {"speculative_config": None, "is_among_several": True}),
    "speculative": ("own", {}),
}
_worlds: dict[str, World] = {}


def world_of(name: str) -> World:
    if name not in _worlds:
        store, arguments = WORLDS[name]
        _worlds[name] = World(store, **arguments)
    return _worlds[name]


@pytest.fixture(scope="module", autouse=True)
def worlds_end() -> Iterator[None]:
    yield
    _worlds.clear()


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = world_of(request.param)
    yield world
    world.change = None
    world.found()


def only(*names: str) -> Any:
    return pytest.mark.parametrize("world", names, indirect=True)


# --- silence --------------------------------------------------------------------------


def test_what_was_stored_is_verified(world: World) -> None:
    (text,) = world.store()
    for _ in range(2):
        assert world.ask(text, num_loaded=5) == world.verified
    assert world.found() == []


def test_a_load_behind_a_local_hit_is_verified(world: World) -> None:
    (text,) = world.store()
    world.ask(text[: BLOCK + 5], num_loaded=4)
    rise = world.ask(text, num_loaded=4, resets=False)
    assert rise == {"verified": world.verified["verified"] - BLOCK}
    # What was loaded is found in the cache.
    assert world.ask([*text, 5], num_loaded=0, resets=False) == {}
    assert world.found() == []


@only("own")
def test_a_load_of_what_was_there_is_verified(world: World) -> None:
    """As where the block is the one that had it."""
    (text,) = world.store()
    world.ask(text, num_loaded=5)
    blocks = [[world.blocks[group]] for group in range(len(LAYERS))]
    world.engine.audit.audit.on_transfer(Transfer([*blocks, []], None, fills=True))
    assert world.ask(text, num_loaded=0, resets=False) == {"verified": NUM_STATES}
    assert world.found() == []


@only("own", "several")
def test_two_requests_load_at_once(world: World) -> None:
    texts = world.store(*(prompt(next(seeds), LENGTH) for _ in range(3)))
    both = world.ask(*texts, texts[0], num_loaded=15)
    assert both["verified"] >= 3 * world.verified["verified"]
    assert both.keys() == {"verified"}
    assert world.found() == []


@only("speculative")
@pytest.mark.parametrize("num_right", [0, 3])
def test_each_version_of_a_text_is_verified(world: World, num_right: int) -> None:
    """Drafts pass the end of the second block; then the text is a prompt."""
    request = Request("long", tuple(prompt(next(seeds), 560)), 40)
    tokens = run(world.engine, [request]).tokens["long"]
    text = {"long": [*request.prompt, *tokens]}
    for _ in range(2):
        assert world.engine.llm.reset_prefix_cache(reset_connector=True)
        run(world.engine, [request], passing(num_right), text)
        world.engine.llm.reset_prefix_cache()
        assert world.ask([*text["long"][:590], 9], num_loaded=5) == world.verified
        assert world.engine.llm.reset_prefix_cache(reset_connector=True)
        world.store(text["long"][:590])
        assert world.ask(text["long"][:590], num_loaded=5) == world.verified
    assert world.found() == []


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("own", 18), ("several", 18), ("speculative", 36)]
)
def test_eviction_preemption_and_aborts_are_silent(name: str, num_blocks: int) -> None:
    """With few blocks, all are used again and again, by other groups, too."""
    store, more = WORLDS[name]
    few = World(store, **more, num_gpu_blocks_override=num_blocks)
    result = run_with_few_blocks(few.engine)
    assert result.num_preemptions > 0
    assert few.worker.num_loaded > 0
    assert few.engine.audited()["verified"] > 0
    assert few.found() == []


@only("shared")
def test_a_store_of_an_earlier_life_gives_no_false_alarm(world: World) -> None:
    """Texts that end alike may have the same states. Nothing is known of the second."""
    texts = world.store((7,) * LENGTH, (*prompt(3, BLOCK), *(7,) * (LENGTH - BLOCK)))
    world.ask(texts[1], num_loaded=5)
    for digests in world.engine.audit.audit.outbox.judge.digests[1:]:
        assert not digests.is_own
        digests._texts.popitem()
        digests._computed.popitem()
    rise = world.ask(texts[1], num_loaded=5)
    assert rise == {"unverified": NUM_STATES, "verified": NUM_SLOTS}
    assert world.found() == []


# --- planted faults -------------------------------------------------------------------


def changed(world: World, block: int) -> None:
    caches(world.engine, 1)[1][block] += 1


def shifted(world: World, block: int) -> None:
    buffer = caches(world.engine, 1)[0][block]
    buffer.copy_(buffer.roll(1, dims=0))


def zeroed(world: World, block: int) -> None:
    world.worker.tensors[0][block] = 0


def left_out(world: World, block: int) -> None:
    """Those of one layer."""
    world.worker.tensors[0][block] = world.before[1][0]


def stale(world: World, block: int) -> None:
    """It comes from what was loaded before this."""
    world.worker.tensors[0][block] = world.stale[1][0]


BOTH = {"conv", "temporal"}
# Of a store of this engine's own, and of any.
FAULTS: dict[Callable[[World, int], None], tuple[str, set[str], str | None]] = {
    changed: ("handed_on", {"temporal"}, None),
    shifted: ("handed_on", {"conv"}, None),
    zeroed: ("never_loaded", BOTH, "never_loaded"),
    left_out: ("never_loaded", BOTH, "never_loaded"),
    stale: ("other_text", BOTH, "other_text"),
}


@pytest.mark.parametrize("length", [LENGTH, BLOCK + 20])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_load_is_named(
    world: World, fault: Callable[[World, int], None], length: int
) -> None:
    """In the first step of the request that reads it. length: of what was loaded
    before: another text, or this one's first block."""
    (text,) = world.store()
    if length == LENGTH:
        (other,) = world.store()
        world.ask(other)
    else:
        world.ask(text[:length])
    world.stale = dict(world.loaded)
    assert world.found() == []

    def change(world: World, block: int, group: int) -> None:
        if group == 1:
            fault(world, block)

    world.change = change
    rise = world.ask(text, num_loaded=5)
    findings = world.found()
    of_own, states, of_shared = FAULTS[fault]
    kind = of_own if world.is_own else of_shared
    kinds = {kind}
    if fault is left_out and world is world_of("speculative"):
        kinds.add("handed_on")  # windows leave states of which there is no record
    num_right = world.verified["verified"] - len(states)
    if kind is None:
        assert findings == []
        assert rise == {"unverified": len(states), "verified": num_right}
        return
    of_kinds = Counter(one.kind for one in findings)
    assert of_kinds.keys() <= kinds
    assert sorted(str(one.state) for one in findings) == sorted(states)
    where = (None, 0) if kind == "other_text" else (LAYERS[1], 1)
    for one in findings:
        assert (one.group, one.layer, one.num_layers) == (1, *where)
        assert (one.block, one.slot, one.column) == (world.blocks[1], None, 0)
        assert one.position == NUM_SLOTS - 1
        assert one.owner is not None
        assert request_name(one.owner) == "r0"
        assert kind != "other_text" or one.writer.request is not None
    assert rise == {**of_kinds, "verified": num_right}


def test_a_copy_of_what_was_loaded_that_is_left_out_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = world.store()
    leave_out_copies(monkeypatch)
    world.ask(text, num_loaded=5)
    findings = [one for one in world.found() if one.position == NUM_SLOTS]
    assert {(one.kind, one.state, one.num_layers) for one in findings} == LEFT_OUT
    assert not {one.block for one in findings} & {*world.blocks.values()}


# --- what is not known ----------------------------------------------------------------


def test_layers_that_write_inside_a_chunk_have_more_versions() -> None:
    """So another one than those that were recorded is no fault."""
    runner = world_of("own").engine.runner
    group = runner.kv_cache_config.kv_cache_groups[0]
    for number in (0, 1):
        spec = replace(group.kv_cache_spec, num_prefill_checkpoint_blocks=number)
        of = SimpleNamespace(kv_cache_spec=spec, layer_names=group.layer_names)
        found = states._group(runner, 0, of)
        assert {one.is_own for one in boundaries_of([found])} == {number == 0}


@only("own")
def test_a_request_that_does_not_know_what_was_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a load that vLLM completes in the step of the request, with several
    groups."""
    (text,) = world.store()
    monkeypatch.setattr(FollowedLoads, "num_local", lambda *_: None)
    audit = world.engine.audit.audit
    monkeypatch.setattr(audit, "loads", Loads.UNKNOWN)
    world.change = lambda world, block, group: changed(world, block)
    rise = world.ask(text, num_loaded=5)
    assert rise["unverified"] >= NUM_STATES
    assert world.found() == []


def test_digests_for_another_instance_are_of_attention_layers(tmp_path: Path) -> None:
    """Of such a request recurrent states are compared as those of others."""
    (tmp_path / "secret").write_text("s" * 32)
    world = World("own", str(tmp_path / "secret"), speculative_config=None)
    text = tuple(prompt(next(seeds), LENGTH))
    gives = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
    for expected in ({}, world.verified):
        before = world.engine.audited()
        world.engine.llm.reset_prefix_cache()
        run(world.engine, [Request("gives", text, 1, params=gives)])
        assert world.engine.audited() - before == expected
    assert world.found() == []
