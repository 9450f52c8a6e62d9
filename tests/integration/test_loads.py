# SPDX-License-Identifier: Apache-2.0
"""The audit of what KV connectors load, on the CPU: vLLM's ExampleConnector, whose
store is a folder, with a file for each text and layer; FolderConnector
(tests/helpers) for loads that take steps, with a file for each block.

The first requests of a test store their texts; the cache is reset, and the same texts
are loaded. Faults are put into the files, or into the connector.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)

from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.folder_connector import FolderConnector
from tests.integration.test_byte_oracle import EVERYTHING, prompt

NUM_BLOCKS = 3
LENGTH = NUM_BLOCKS * BLOCK_SIZE + 5

SLOW = {
    "kv_connector": FolderConnector.__name__,
    "kv_connector_module_path": FolderConnector.__module__,
}

seeds = itertools.count(1000)


def folder(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **dict.fromkeys(("shared_storage_path", "folder"), str(path)),
            "loads": "async",
        },
    } | more


class World:
    """An engine with a connector, and what its store has."""

    def __init__(self, path: Path, store: str = "own", **more: Any) -> None:
        self.path = path
        self.engine = Engine(
            "off",
            EVERYTHING | {"AUDIT_STORE": store},
            kv_transfer_config=folder(path, **more),
            enable_prefix_caching=True,
            speculative_config=None,
            max_num_batched_tokens=512,
        )
        self.tokens: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def ask(self, *texts: int) -> dict[str, int]:
        """Asks for each text, with nothing in the cache of the engine. Returns the rise
        of the audit's counts."""
        before = self.engine.audited()
        self.engine.llm.reset_prefix_cache()
        asked = {f"text{n}": n for n in texts}
        result = self.engine.run(
            [Request(name, prompt(n, LENGTH), 4) for name, n in asked.items()]
        )
        with self.engine.connected():
            self.engine.llm.step()  # FolderConnector gives its blocks back
        self.tokens = {n: result.tokens[name] for name, n in asked.items()}
        self.finish = {n: result.finish[name] for name, n in asked.items()}
        return self.engine.audited() - before

    def store(self, number: int) -> list[int]:
        """Stores so many new texts."""
        texts = [next(seeds) for _ in range(number)]
        assert self.ask(*texts) == {}
        self._answers |= self.tokens
        return texts

    def is_right(self) -> bool:
        """Whether the last answers are those with which the texts were stored."""
        return all(self._answers[text] == got for text, got in self.tokens.items())

    def folders(self) -> list[Path]:
        return sorted(self.path.iterdir(), key=lambda path: path.stat().st_ctime_ns)

    @property
    def layers(self) -> list[str]:
        return self.engine.audit.audit.groups[0].names

    def found(self) -> list[Any]:
        return self.engine.take_findings()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Nobody else fills the store."""
    return World(tmp_path_factory.mktemp("store"))


def cleaned(of: World) -> Iterator[World]:
    for path in of.folders():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield of
    of.engine.take_findings()


@pytest.fixture
def world(own: World) -> Iterator[World]:
    yield from cleaned(own)


SLOTS = NUM_BLOCKS * BLOCK_SIZE


def test_what_was_stored_is_verified(world: World) -> None:
    texts = world.store(2)
    for _ in range(2):
        assert world.ask(*texts) == {"verified": 2 * SLOTS}
        assert world.is_right()
    assert world.found() == []


# --- wrong content --------------------------------------------------------------------


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Changes what a file of the store holds: [tokens, heads, bytes of a head]."""
    tensor = load_file(path)["kv_cache"]
    change(tensor)
    save_file({"kv_cache": tensor}, path)


def files(folder: Path) -> list[Path]:
    """One for each layer, in their order."""
    return sorted(folder.iterdir())


def swap(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def places(findings: list[Any]) -> list[tuple[str, str | None, int, int]]:
    found = [(f.owner, f.layer, f.num_layers, f.position) for f in findings]
    return [(name.rpartition("-")[0], *where) for name, *where in found]


def positions(*blocks: int) -> list[int]:
    return [block * BLOCK_SIZE for block in blocks or range(NUM_BLOCKS)]


def test_one_bit_in_one_file(world: World) -> None:
    (text,) = world.store(1)
    (stored,) = world.folders()
    path = files(stored)[2]

    def flip(tensor: Any) -> None:
        tensor[92].view(-1).view(torch.int16)[5] ^= 1

    edit(path, flip)
    assert world.ask(text) == {"verified": SLOTS - BLOCK_SIZE, "handed_on": 1}
    (finding,) = world.found()
    assert places([finding]) == [(f"text{text}", path.stem, 1, 2 * BLOCK_SIZE)]
    assert finding.expected != finding.found
    assert finding.slot == finding.block * BLOCK_SIZE


def test_files_of_two_texts_are_swapped(world: World) -> None:
    texts = world.store(2)
    swap(*world.folders())
    assert world.ask(*texts) == {"other_text": 2 * NUM_BLOCKS}
    findings = world.found()
    owners = [finding.owner.rpartition("-")[0] for finding in findings]
    assert owners == [f"text{text}" for text in texts for _ in range(NUM_BLOCKS)]
    writers = [f.writer.request.rpartition("-")[0] for f in findings]
    assert writers == owners[::-1]
    assert {finding.layer for finding in findings} == {None}
    assert [f.position for f in findings] == 2 * positions()


def test_one_layers_files_are_swapped(world: World) -> None:
    texts = world.store(2)
    (one, other) = (files(folder)[1] for folder in world.folders())
    swap(one, other)
    assert world.ask(*texts) == {"handed_on": 2 * NUM_BLOCKS}
    expected = [(f"text{t}", one.stem, 1, p) for t in texts for p in positions()]
    assert places(world.found()) == expected


# --- faults of the connector ----------------------------------------------------------

Load = Callable[..., None]
start_load_kv: Load = ExampleConnector.start_load_kv


def loads_of(connector: Any) -> list[Any]:
    metadata = connector._get_connector_metadata()
    return [request for request in metadata.requests if not request.is_store]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Load], None]:
    """Replaces what the connector does to load, where it has something to."""

    def put(fault: Load) -> None:
        def start(connector: Any, context: Any, **more: Any) -> None:
            if loads_of(connector):
                fault(connector, context, **more)

        monkeypatch.setattr(ExampleConnector, "start_load_kv", start)

    return put


def nothing(connector: Any, context: Any, **_: Any) -> None:
    pass


def test_a_load_writes_nothing(world: World, loads: Callable[[Load], None]) -> None:
    (text,) = world.store(1)
    world.store(6)  # its blocks are others' by now
    loads(nothing)
    rise = world.ask(text)
    assert rise.keys() == {"never_loaded"}
    findings = world.found()
    assert {f.position // BLOCK_SIZE for f in findings} == set(range(NUM_BLOCKS))
    assert {(f.layer, f.num_layers) for f in findings} == {(world.layers[0], 4)}


def test_slots_go_to_a_wrong_block(world: World, loads: Callable[[Load], None]) -> None:
    (text,) = world.store(1)

    def misplace(connector: Any, context: Any, **_: Any) -> None:
        for request in loads_of(connector):
            slots = request.slot_mapping.view(-1, BLOCK_SIZE)
            slots[:2] = slots[:2].flip(0).clone()
        start_load_kv(connector, context)

    loads(misplace)
    assert world.ask(text) == {"other_text": 2, "verified": BLOCK_SIZE}
    assert [finding.position for finding in world.found()] == positions(0, 1)


def test_a_load_lands_a_step_late(world: World, loads: Callable[[Load], None]) -> None:
    """It was reported as complete."""
    (text,) = world.store(1)
    world.store(6)  # its blocks are others' by now
    late: list[tuple[Any, ...]] = []
    forwards = itertools.count()

    def hold(connector: Any, context: Any, **_: Any) -> None:
        late.append((connector, context, connector._get_connector_metadata()))

    def land(*_: Any) -> None:
        if late and next(forwards) == 1:
            connector, context, metadata = late[0]
            with mock.patch.object(connector, "_connector_metadata", metadata):
                start_load_kv(connector, context)

    loads(hold)
    hook = world.engine.runner.model.register_forward_pre_hook(land)
    try:
        rise = world.ask(text)
    finally:
        hook.remove()
    assert rise["never_loaded"] + rise.pop("unverified", 0) == SLOTS
    assert rise.keys() == {"never_loaded", "changed"}
    findings = world.found()
    for kind in rise:
        blocks = {f.position // BLOCK_SIZE for f in findings if f.kind == kind}
        assert blocks == set(range(NUM_BLOCKS))


# --- loads that fail ------------------------------------------------------------------


def remove(folder: Path) -> None:
    """The file of the third layer."""
    files(folder)[2].unlink()


def swallowed(connector: Any, context: Any, **more: Any) -> None:
    with suppress(FileNotFoundError):
        start_load_kv(connector, context, **more)


def reported(connector: Any, context: Any, **more: Any) -> None:
    try:
        start_load_kv(connector, context, **more)
    except FileNotFoundError:
        for request in loads_of(connector):
            blocks = (request.slot_mapping[::BLOCK_SIZE] // BLOCK_SIZE).tolist()
            connector.nwor_failed = set(blocks[connector.nwor_first :])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The connector reports a load that fails, from that block of a text on."""

    def take(connector: Any) -> set[int]:
        failed, connector.nwor_failed = connector.nwor_failed, set()
        return failed

    def put(first: int = 0) -> None:
        of: dict[str, Any] = {"nwor_failed": set(), "nwor_first": first}
        of["get_block_ids_with_load_errors"] = take
        for name, value in of.items():
            monkeypatch.setattr(ExampleConnector, name, value, raising=False)

    return put


def test_a_file_is_missing_unsaid(world: World, loads: Callable[[Load], None]) -> None:
    (text,) = world.store(1)
    (stored,) = world.folders()
    remove(stored)
    loads(swallowed)
    assert world.ask(text) == {"handed_on": NUM_BLOCKS}
    expected = [(f"text{text}", world.layers[2], 2, p) for p in positions()]
    assert places(world.found()) == expected


@pytest.mark.parametrize("first", range(NUM_BLOCKS))
def test_a_file_is_missing_and_the_text_is_computed(
    world: World,
    loads: Callable[[Load], None],
    reports: Callable[[int], None],
    first: int,
) -> None:
    """The connector says which blocks have failed. Those in front of them count as
    loaded."""
    (text,) = world.store(1)
    (stored,) = world.folders()
    remove(stored)
    loads(reported)
    reports(first)
    rise = world.ask(text)
    failed = SLOTS - first * BLOCK_SIZE
    expected = {"failed": failed, "handed_on": first}
    assert rise == {name: n for name, n in expected.items() if n}
    assert [finding.position for finding in world.found()] == positions()[:first]
    assert first or world.is_right()
    # What a failed step has computed is not remembered as the text's.
    loads(start_load_kv)
    shutil.rmtree(stored)
    assert world.ask(text) == {}
    assert world.ask(text) == {"verified": SLOTS}


@pytest.mark.parametrize("last", [None, 2])
def test_a_load_that_writes_nothing_and_says_so(
    world: World,
    loads: Callable[[Load], None],
    reports: Callable[[int], None],
    last: int | None,
) -> None:
    """The first block has come. The connector names the others, or the second alone."""
    (text,) = world.store(1)
    world.store(6)  # its blocks are others' by now
    reports(1)

    def begin(connector: Any, context: Any, **_: Any) -> None:
        (request,) = loads_of(connector)
        layers = [layer.kv_cache for layer in context.no_compile_layers.values()]
        blocks = (request.slot_mapping[::BLOCK_SIZE] // BLOCK_SIZE).tolist()
        before = [cache[blocks[1:]].clone() for cache in layers]
        start_load_kv(connector, context)
        for cache, old in zip(layers, before, strict=True):
            cache[blocks[1:]] = old
        connector.nwor_failed = set(blocks[1:last])

    loads(begin)
    assert world.ask(text) == {"verified": BLOCK_SIZE, "failed": SLOTS - BLOCK_SIZE}
    assert world.found() == []
    assert world.is_right()


# --- which texts are known ------------------------------------------------------------


def test_beyond_the_budget_loads_stay_unverified(world: World) -> None:
    (text,) = world.store(1)
    audit = world.engine.audit.audit
    before, audit._num_scanned = audit._num_scanned, 0
    try:
        assert world.ask(text) == {"unverified": SLOTS}
    finally:
        audit._num_scanned = before
    assert world.found() == []


def test_a_block_of_the_cache_in_front_of_a_load(world: World) -> None:
    """Only what is behind it is loaded: ExampleConnector fills it, too, with the same
    bytes."""
    (text,) = world.store(1)
    world.engine.llm.reset_prefix_cache()
    short = Request("short", prompt(text, BLOCK_SIZE + 3), 2)
    world.engine.run([short])
    before = world.engine.audited()["verified"]
    world.engine.run([Request("long", prompt(text, LENGTH), 4)])
    assert world.engine.audited()["verified"] - before == SLOTS - BLOCK_SIZE
    assert world.found() == []


# --- loads that take steps ------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_engine(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("slow"), **SLOW)


@pytest.fixture
def slow(slow_engine: World) -> Iterator[World]:
    yield from cleaned(slow_engine)


@pytest.mark.parametrize("case", ["nothing", "swapped"])
def test_a_load_that_takes_steps_and_is_wrong(
    slow: World, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = slow.store(2)
    if case == "swapped":
        blocks = slow.folders()
        list(map(swap, blocks[:NUM_BLOCKS], blocks[NUM_BLOCKS:]))
    else:
        monkeypatch.setattr(FolderConnector, "arrive", lambda *_: None)
    rise = slow.ask(*texts)
    assert rise.keys() == {"other_text" if case == "swapped" else "never_loaded"}
    blocks = {(f.owner, f.position // BLOCK_SIZE) for f in slow.found()}
    assert len(blocks) == 2 * NUM_BLOCKS


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """The next load brings wrong bytes from that block of a text on, and the connector
    names these blocks; None: of all blocks, and it names the request."""
    arrive, results = FolderConnector.arrive, FolderConnector.get_transfer_results

    def put(first: int | None) -> None:
        def fail(connector: Any, blocks: Any) -> None:
            monkeypatch.setattr(FolderConnector, "arrive", arrive)
            arrive(connector, blocks)
            for block, _ in blocks[first:]:
                connector.missing(block)
                for cache in connector._caches.values():
                    cache[block] = 3

        def name(connector: Any, ended: set[str]) -> Any:
            found = results(connector, ended)
            if connector.get_block_ids_with_load_errors():
                found.failed_recving = found.finished_recving
            return found

        monkeypatch.setattr(FolderConnector, "arrive", fail)
        by = name if first is None else results
        monkeypatch.setattr(FolderConnector, "get_transfer_results", by)

    return put


@pytest.mark.parametrize("first", [*range(NUM_BLOCKS), None])
def test_a_load_that_takes_steps_and_fails(
    slow: World,
    fails: Callable[[int | None], None],
    first: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing has come vLLM asks again; the connector has nothing then (0), or
    all of it (None)."""
    (text,) = slow.store(1)
    fails(first)
    if first == 0:
        answers = iter([SLOTS])
        monkeypatch.setattr(FolderConnector, "answer", lambda *_: next(answers, 0))
    num_loaded = NUM_BLOCKS if first is None else first
    failed, verified = SLOTS - (first or 0) * BLOCK_SIZE, num_loaded * BLOCK_SIZE
    expected = {"failed": failed, "verified": verified}
    assert slow.ask(text) == {name: n for name, n in expected.items() if n}
    assert slow.found() == []
    assert slow.is_right()


def test_blocks_of_a_load_whose_request_ended(
    slow: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted while its load is under way; other requests get its blocks."""
    (text,) = slow.store(1)
    slow.engine.llm.reset_prefix_cache()
    aborted = Request("aborted", prompt(text, LENGTH), 4, abort_at=1)
    before = slow.engine.audited()
    arrived: list[Any] = []
    arrive = FolderConnector.arrive

    def note(connector: Any, *about: Any) -> None:
        arrived.append(about)
        arrive(connector, *about)

    monkeypatch.setattr(FolderConnector, "arrive", note)
    slow.engine.run([aborted, Request("beside", prompt(1, 40), 8)])
    assert len(arrived) == 1
    slow.engine.run([Request(f"many{n}", prompt(n, 100), 60) for n in range(12)])
    assert slow.found() == []
    assert slow.engine.audited()["unverified"] == before["unverified"]


# --- other engines --------------------------------------------------------------------


def test_a_store_of_an_earlier_life_gives_no_false_alarm(tmp_path: Path) -> None:
    """It has bytes that other threads computed, and some that nobody here computes."""
    earlier = World(tmp_path, "shared")
    texts = earlier.store(4)
    perturbed = earlier.folders()[0]
    for path in files(perturbed):
        edit(path, lambda tensor: tensor.view(torch.bfloat16).mul_(1.01))
    hidden = tmp_path.with_name("hidden")
    tmp_path.rename(hidden)
    tmp_path.mkdir()
    now = World(tmp_path, "auto")
    assert now.ask(*texts) == {}
    shutil.rmtree(tmp_path)
    hidden.rename(tmp_path)
    rise = now.ask(*texts)
    assert rise.pop("unverified") >= SLOTS
    assert rise.pop("verified") >= 2 * SLOTS
    assert rise == {}
    assert now.found() == []


def test_a_request_fails_with_its_load(
    tmp_path: Path, loads: Callable[[Load], None], reports: Callable[[int], None]
) -> None:
    world = World(tmp_path, kv_load_failure_policy="fail")
    (text,) = world.store(1)
    (stored,) = world.folders()
    remove(stored)
    loads(reported)
    reports(1)
    rise = world.ask(text)
    assert world.finish[text] == "error"
    assert rise == {"failed": SLOTS - BLOCK_SIZE, "handed_on": 1}
    assert world.found()[0].position == 0


def test_a_request_fails_with_a_load_that_takes_steps(
    tmp_path: Path, fails: Callable[[int | None], None]
) -> None:
    """The workers hear of it in the next step. Its blocks are fine for others."""
    world = World(tmp_path, **SLOW, kv_load_failure_policy="fail")
    for first in (1, None):
        (text,) = world.store(1)
        fails(first)
        assert world.ask(text) == {}
        assert world.finish[text] == "error"
        assert world.ask(text) == {"failed": SLOTS, "verified": SLOTS}
        assert world.is_right()
    assert world.found() == []


def test_a_file_that_is_cut_ends_the_engine_without_a_finding(tmp_path: Path) -> None:
    """ExampleConnector raises."""
    world = World(tmp_path)
    (text,) = world.store(1)
    (stored,) = world.folders()
    path = files(stored)[1]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SafetensorError):
        world.ask(text)
    assert world.found() == []
