# SPDX-License-Identifier: Apache-2.0
"""The audit with vLLM's OffloadingConnector, on the CPU
(tests/helpers/host_offloading.py).

Some tests put vLLM issue 54193 back (tests/helpers/offloading_fault.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.model_executor.layers import utils

from tests.helpers.byte_map import owners
from tests.helpers.drafters import ScriptedDrafter, all_wrong
from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.host_offloading import CONNECTOR, HostSpec, HostWorker
from tests.helpers.offloading_fault import final_slots
from tests.integration.test_audit import found
from tests.integration.test_byte_oracle import EVERYTHING, prompt
from tests.integration.test_weights import (
    DISPATCH,
    TEXT,
    dispatch_to_parameters,
    write_by_rpc,
)
from vllm_nwor.hooks import connectors

# Prompt and answer fill two blocks; the last slot belongs to the final token.
FIRST = [
    Request(f"first{n}", prompt(n, 40 + n), 2 * BLOCK_SIZE - 40 - n) for n in range(4)
]
FILLER = [Request("filler", prompt(50, 10), 12)]


def stored(**arguments: Any) -> tuple[Engine, list[Request]]:
    """An engine that has stored the texts of FIRST, and requests that load them."""
    arguments |= {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": True}
    engine = Engine("off", EVERYTHING, **arguments)
    if engine.llm.vllm_config.speculative_config is not None:
        ScriptedDrafter({}, all_wrong).attach(engine.runner)
    result = engine.run(FIRST)
    engine.run(FILLER)
    return engine, [
        Request(f"later{n}", (*r.prompt, *result.tokens[r.name], 7, 8), 8)
        for n, r in enumerate(FIRST)
    ]


def load(engine: Engine, later: list[Request]) -> int:
    """Runs the requests; returns how many slots the engine has loaded so far."""
    before = HostSpec.last.num_loaded
    engine.llm.reset_prefix_cache()
    engine.run(later)
    assert HostSpec.last.num_loaded > before
    return HostSpec.last.num_loaded * BLOCK_SIZE


def totals_of(engine: Engine) -> tuple[dict[str, int], int]:
    """The audit's, and the loaded slots that it has verified."""
    return engine.audit.audit.totals(), engine.audit.findings.num_verified


@contextmanager
def untold() -> Iterator[None]:
    """The audit's adapter for the connector is off: it knows only, from the scheduler,
    how much of a request's prefix was not in the cache."""
    nothing: Any = {"is_hooked": lambda: False, "watch": lambda runner: None}
    with mock.patch.multiple(connectors, **nothing):
        yield


@pytest.fixture(params=["adapter", "none"])
def adapter(request: pytest.FixtureRequest) -> Iterator[str]:
    with untold() if request.param == "none" else nullcontext():
        yield request.param


@pytest.mark.parametrize("changes", [{}, {"speculative_config": None}])
def test_stores_and_loads_are_silent(adapter: str, changes: dict[str, Any]) -> None:
    engine, later = stored(**changes)
    num_loaded = load(engine, later)
    assert engine.audit.audit.loads.name == {"adapter": "KNOWN"}.get(adapter, "UNKNOWN")
    assert found(engine) == []
    # Loaded bytes are compared with the stored ones, or with those of their text.
    totals, num_verified = totals_of(engine)
    known = (totals["returned"], num_verified)
    assert known == (num_loaded if adapter == "adapter" else 0, num_loaded)
    assert totals["unverified"] == 0


@pytest.mark.parametrize("speculates", [True, False])
def test_storing_a_chunk_with_an_uncommitted_slot_is_found(speculates: bool) -> None:
    """The slot has the request's rejected draft; without speculation it was never
    written."""
    changes = {} if speculates else {"speculative_config": None}
    with final_slots(are_stored=True):
        engine, later = stored(**changes)
        load(engine, later)

    wrong = [finding for finding in found(engine) if finding.kind == "handed_on"]
    assert {finding.slot % BLOCK_SIZE for finding in wrong} == {BLOCK_SIZE - 1}
    assert {finding.position for finding in wrong} == {2 * BLOCK_SIZE - 1}
    names = {(finding.owner or "").rpartition("-")[0] for finding in wrong}
    assert names == {request.name for request in FIRST}
    writers = {(finding.writer.request or "").rpartition("-")[0] for finding in wrong}
    assert writers == (names if speculates else {""})


def test_a_load_that_writes_nothing_is_found(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostWorker, "bring", lambda worker, block, chunk: None)
    engine, later = stored(num_gpu_blocks_override=20)
    load(engine, later)
    assert {finding.kind for finding in found(engine)} == {"never_loaded"}


def flipped_byte(worker: HostWorker, block: int, chunk: int) -> None:
    """A byte changed on the host."""
    saved = worker.chunks[chunk]
    whole = saved[1].clone()
    saved[1].view(-1)[100] ^= 1
    bring(worker, block, chunk)
    saved[1].copy_(whole)


def another_chunk(worker: HostWorker, block: int, chunk: int) -> None:
    bring(worker, block, next(other for other in worker.chunks if other != chunk))


def late_write(worker: HostWorker, block: int, chunk: int) -> None:
    """The previous step writes to one layer of the block after the load, as if the load
    did not wait."""
    stale = worker.tensors[2][block].clone()
    bring(worker, block, chunk)
    worker.tensors[2][block] = stale


bring = HostWorker.bring
# The number of wrong layers, the first of them, and the number of wrong slots.
FAULTS = {
    flipped_byte: (1, 1, 1),
    another_chunk: (4, 0, BLOCK_SIZE),
    late_write: (1, 2, BLOCK_SIZE),
}


def test_a_load_of_other_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, later = stored()
    layers = engine.audit.audit.groups[0].layers
    for fault, (num_layers, first_layer, num_slots) in FAULTS.items():
        bent: list[int] = []

        def once(worker: HostWorker, block: int, chunk: int, fault=fault, bent=bent):
            (bring if bent else fault)(worker, block, chunk)
            bent.append(block)

        monkeypatch.setattr(HostWorker, "bring", once)
        load(engine, later)

        wrong = found(engine)
        assert [f.kind for f in wrong] == ["handed_on"] * num_slots, fault
        assert {f.block for f in wrong} == {bent[0]}
        assert {f.num_layers for f in wrong} == {num_layers}
        assert {f.slot // BLOCK_SIZE for f in wrong} == {bent[0]}
        assert len({f.slot for f in wrong}) == num_slots
        owner, writer = wrong[0].owner or "", wrong[0].writer.request or ""
        assert (owner[:5], writer[:5], writer[5:6]) == ("later", "first", owner[5:6])
        (layer,) = {f.layer for f in wrong}
        assert layer == layers[first_layer].name
        if fault is flipped_byte:
            of_bytes = owners(engine.probe.target_layers()[layer]).flatten()
            assert wrong[0].slot % BLOCK_SIZE == of_bytes[100]
        engine.audit.findings.last.clear()

    monkeypatch.setattr(HostWorker, "bring", bring)
    load(engine, later)
    assert found(engine) == []
    assert engine.audit.audit.totals()["unverified"] == 0


@pytest.mark.parametrize("case", ["kept", "reset", "same weights"])
def test_stored_blocks_of_other_weights_are_found(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset of the engine's cache alone leaves them in host memory."""
    monkeypatch.setattr(utils, DISPATCH, dispatch_to_parameters)
    arguments = {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": True}
    engine = Engine("off", EVERYTHING, speculative_config=None, **arguments)

    def ask(name: str) -> tuple[list[int], int]:
        before = HostSpec.last.num_loaded
        tokens = engine.run([Request(name, TEXT, 12)]).tokens[name]
        engine.run(FILLER)
        return tokens, HostSpec.last.num_loaded - before

    def reset(resets_connector: bool) -> None:
        with engine.connected():
            assert engine.llm.reset_prefix_cache(reset_connector=resets_connector)

    first, _ = ask("first")
    write_by_rpc(engine, 0 if case == "same weights" else 101)
    reset(resets_connector=case == "reset")
    answer, num_loaded = ask("second")
    assert num_loaded == (0 if case == "reset" else 2)
    kinds = [(finding.kind, finding.position) for finding in found(engine)]
    stale = [("stale_weights", 0), ("stale_weights", BLOCK_SIZE)]
    assert kinds == (stale if case == "kept" else [])
    totals = engine.audit.audit.totals()
    assert totals["returned"] == num_loaded * BLOCK_SIZE
    assert totals["unverified"] == 0
    reset(resets_connector=True)
    right, num_loaded = ask("third")
    assert num_loaded == 0
    assert (right == first) == (case == "same weights")
    assert (right == answer) == (case != "kept")


def test_preempted_requests_are_loaded_as_they_were_stored(adapter: str) -> None:
    """Their blocks are reused in between."""
    engine, _ = stored(num_gpu_blocks_override=18, speculative_config=None)
    before = HostSpec.last.num_loaded
    engine.run([Request(f"many{n}", prompt(60 + n, 50), 90) for n in range(8)])
    num_loaded = (HostSpec.last.num_loaded - before) * BLOCK_SIZE
    assert num_loaded > 0
    assert found(engine) == []
    totals, num_verified = totals_of(engine)
    assert totals["unverified"] == 0
    known = (num_verified, totals["returned"] > 0)
    assert known == (num_loaded, adapter == "adapter")


def test_a_store_has_the_bytes_from_before_the_step() -> None:
    """V2's runner flushes stores after the audit's plan, when the blocks are another
    request's."""
    engine, _ = stored(num_gpu_blocks_override=18, speculative_config=None)
    flush, waiting = engine._connector.handle_preemptions, []

    def flush_all(*_: Any) -> None:
        while waiting:
            flush(waiting.pop())

    def wait(metadata: Any) -> None:
        flush_all()
        waiting.append(metadata)

    engine._connector.handle_preemptions = wait
    engine.runner.model.register_forward_pre_hook(flush_all)
    engine.run([Request(f"many{n}", prompt(60 + n, 50), 90) for n in range(8)])
    assert found(engine) == []
    assert engine.audit.audit.totals()["returned"] > 0


def test_partly_stored_blocks_are_no_findings() -> None:
    """With Mamba layers vLLM stores up to the end of a prompt."""
    destroy_model_parallel()  # it needs other process groups
    arguments = {"model": "tiny-qwen3-next", "speculative_config": None}
    arguments |= {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": True}
    engine = Engine("off", EVERYTHING, prefix_match_unit=16, **arguments)
    engine.run([*FIRST, *FILLER])
    engine.llm.reset_prefix_cache()
    result = engine.run([Request("later", (*FIRST[0].prompt, 7, 8), 8)])
    assert result.cached["later"] == 32
    assert found(engine) == []


def test_only_the_last_stored_blocks_are_verified_by_slot() -> None:
    """With 20 blocks in the cache the last three; the others by their text."""
    engine, later = stored(num_gpu_blocks_override=20)
    num_loaded = load(engine, later)
    assert found(engine) == []
    assert engine.audit.audit.groups[0].shape.num_stored == 3
    totals, num_verified = totals_of(engine)
    assert num_verified == num_loaded
    assert 0 < totals["returned"] <= 3 * BLOCK_SIZE
    assert totals["unverified"] == 0


# --- vLLM's transfers -----------------------------------------------------------------


class CPUOffloadingSpec(SimpleNamespace):
    """Recognized by its name."""


class TieringOffloadingSpec(CPUOffloadingSpec):
    pass


@pytest.mark.parametrize(
    ("spec", "is_known"),
    [
        (CPUOffloadingSpec(), True),
        (TieringOffloadingSpec(), False),
        (SimpleNamespace(), False),
        (CPUOffloadingSpec(replicated_layout=True), False),
        (CPUOffloadingSpec(config=SimpleNamespace(canonical_layout=True)), False),
    ],
)
def test_blocks_are_mapped_to_places_in_chunks(spec: Any, is_known: bool) -> None:
    """Three groups; the second one has no block in this transfer."""
    spec.blocks_per_chunk = 4
    connector = SimpleNamespace(connector_worker=SimpleNamespace(spec=spec))
    blocks = SimpleNamespace(
        block_ids=[11, 12, 13, 14], group_sizes=(3, 0, 1), block_indices=(3, 0, 4)
    )
    chunks = SimpleNamespace(block_ids=[7, 2, 9])
    config: Any = SimpleNamespace(kv_cache_groups=[None] * 3)
    read = partial(connectors.read, config, connector)
    places = [[31, 8, 9], [], [36]] if is_known else None
    assert read(blocks, chunks) == ([[11, 12, 13], [], [14]], places)
    # From vLLM 0.32 on transfers may leave groups out.
    blocks.group_sizes, blocks.block_indices = (3, 1), (3, 4)
    with pytest.raises(ValueError, match="of 2 KV-cache groups; expected 3"):
        read(blocks, chunks)
    config.prefix_cacheable_group_ids = (0, 2)
    assert read(blocks, chunks) == ([[11, 12, 13], [], [14]], places)
