# SPDX-License-Identifier: Apache-2.0
"""The audit beside vLLM's OffloadingConnector, on the CPU with a spec of our own.

The mend of vLLM issue 54193 (tests/helpers/offloading_fault.py) is taken out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.byte_map import owners
from tests.helpers.drafters import ScriptedDrafter, all_wrong
from tests.helpers.engine import BLOCK_SIZE, Engine, Request, end_connector
from tests.helpers.host_offloading import HostSpec, HostWorker
from tests.helpers.offloading_fault import final_slots
from tests.integration.test_byte_oracle import prompt
from vllm_nwor.audit import offloading
from vllm_nwor.audit.findings import Finding

CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "tests.helpers.host_offloading",
        "cpu_bytes_to_use": 1 << 26,
        "offload_prompt_only": False,
    },
}
# Prompt and answer fill two blocks; the last slot is the final token's.
FIRST = [
    Request(f"first{n}", prompt(n, 40 + n), 2 * BLOCK_SIZE - 40 - n) for n in range(4)
]
FILLER = [Request("filler", prompt(50, 10), 12)]


def find(engine: Engine) -> list[Finding]:
    return list(engine.audit.findings.last)


@pytest.fixture(autouse=True)
def no_connector_stays() -> Iterator[None]:
    yield
    end_connector()


def stored_and_loaded(mode: str = "off", **arguments: Any) -> Engine:
    """Stores the texts of FIRST, then runs requests that load them."""
    engine, later = stored(mode, **arguments)
    load(engine, later)
    return engine


def load(engine: Engine, later: list[Request]) -> None:
    before = HostSpec.last.num_loaded
    engine.llm.reset_prefix_cache()
    engine.run(later)
    assert HostSpec.last.num_loaded > before


def stored(mode: str = "off", **arguments: Any) -> tuple[Engine, list[Request]]:
    """An engine whose host has the texts of FIRST, and requests that load them."""
    end_connector()
    settings = {"AUDIT": "log", "AUDIT_MIB": "4096", "STRICT": "always"}
    engine = Engine(
        mode,
        settings,
        kv_transfer_config=CONNECTOR,
        enable_prefix_caching=True,
        **arguments,
    )
    if engine.llm.vllm_config.speculative_config is not None:
        ScriptedDrafter({}, all_wrong).attach(engine.runner)
    result = engine.run(FIRST)
    engine.run(FILLER)
    return engine, [
        Request(f"later{n}", (*r.prompt, *result.tokens[r.name], 7, 8), 8)
        for n, r in enumerate(FIRST)
    ]


@pytest.fixture(params=["adapter", "none"])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """none: it is a connector of which the audit is told nothing but what the scheduler
    says: how much of what a request found was not in the cache."""
    if request.param == "none":
        monkeypatch.setattr(offloading, "tells", lambda: False)
        monkeypatch.setattr(offloading, "watch", lambda runner, watcher: None)
    return str(request.param)


@pytest.mark.parametrize("speculates", [True, False])
def test_stores_and_loads_of_a_mended_vllm_are_no_findings(
    adapter: str, speculates: bool
) -> None:
    engine = stored_and_loaded(**({} if speculates else {"speculative_config": None}))
    assert engine.audit.audit.loads.name == {"adapter": "TOLD"}.get(adapter, "UNTOLD")
    assert find(engine) == []
    # What came back is what was stored; where that is not known, it is counted.
    totals = engine.audit.audit.totals()
    num_loaded = HostSpec.last.num_loaded * BLOCK_SIZE
    known = (totals["returned"], totals["unverified"])
    assert known == ((num_loaded, 0) if adapter == "adapter" else (0, num_loaded))


def test_a_chunk_with_a_rejected_draft_is_named_when_it_is_stored() -> None:
    with final_slots(are_stored=True):
        engine = stored_and_loaded()

    found = [finding for finding in find(engine) if finding.kind == "handed_on"]
    assert {finding.slot % BLOCK_SIZE for finding in found} == {BLOCK_SIZE - 1}
    assert {finding.position for finding in found} == {2 * BLOCK_SIZE - 1}
    names = {(finding.owner or "").rpartition("-")[0] for finding in found}
    assert names == {request.name for request in FIRST}
    writers = {(finding.writer.request or "").rpartition("-")[0] for finding in found}
    assert writers == names  # the request's own draft, which was rejected


def test_without_speculation_it_was_never_written() -> None:
    with final_slots(are_stored=True):
        engine = stored_and_loaded(speculative_config=None)

    found = [finding for finding in find(engine) if finding.kind == "handed_on"]
    assert {finding.position for finding in found} == {2 * BLOCK_SIZE - 1}
    assert {finding.writer.request for finding in found} == {None}


def test_a_load_that_writes_nothing_is_named(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostWorker, "bring", lambda worker, block, chunk: None)
    engine = stored_and_loaded(num_gpu_blocks_override=20)

    kinds = {finding.kind for finding in find(engine)}
    assert kinds == {"never_loaded"}


def flipped_byte(worker: HostWorker, block: int, chunk: int) -> None:
    """On the host, since it was stored."""
    saved = worker.chunks[chunk]
    whole = saved[1].clone()
    saved[1].view(-1)[100] ^= 1
    bring(worker, block, chunk)
    saved[1].copy_(whole)


def another_chunk(worker: HostWorker, block: int, chunk: int) -> None:
    bring(worker, block, next(other for other in worker.chunks if other != chunk))


def late_write(worker: HostWorker, block: int, chunk: int) -> None:
    """The step before has written to one layer of the block when the load was through,
    as where a load does not wait for it."""
    stale = worker.tensors[2][block].clone()
    bring(worker, block, chunk)
    worker.tensors[2][block] = stale


bring = HostWorker.bring
FAULTS = {flipped_byte: (1, 1), another_chunk: (4, BLOCK_SIZE), late_write: (1, 32)}


def test_a_load_that_brings_other_bytes_than_were_stored_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, later = stored()
    layers = engine.runner.nwor_audit.audit.groups[0].layers
    for fault, (num_layers, num_slots) in FAULTS.items():
        bent: list[int] = []

        def once(worker: HostWorker, block: int, chunk: int, fault=fault, bent=bent):
            (bring if bent else fault)(worker, block, chunk)
            bent.append(block)

        monkeypatch.setattr(HostWorker, "bring", once)
        load(engine, later)

        found = find(engine)
        assert [f.kind for f in found] == ["handed_on"] * num_slots, fault
        assert {f.block for f in found} == {bent[0]}
        assert {f.num_layers for f in found} == {num_layers}
        assert {f.slot for f in found} <= set(slots_of(bent[0]))
        assert len({f.slot for f in found}) == num_slots
        owner, writer = found[0].owner or "", found[0].writer.request or ""
        assert (owner[:5], writer[:5], writer[5:6]) == ("later", "first", owner[5:6])
        (layer,) = {f.layer for f in found}
        assert layer == layers[{1: 1, 4: 0}[num_layers] + (fault is late_write)].name
        if fault is flipped_byte:
            of_layer = engine.probe.target_layers()[layer]
            assert found[0].slot % BLOCK_SIZE == owners(of_layer).flatten()[100]
        engine.audit.findings.last.clear()

    monkeypatch.setattr(HostWorker, "bring", bring)
    load(engine, later)
    assert find(engine) == []
    assert engine.audit.audit.totals()["unverified"] == 0


def slots_of(block: int) -> range:
    return range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)


def test_preempted_requests_come_back_as_they_were_stored() -> None:
    """Their blocks went to others meanwhile, again and again."""
    engine, _ = stored(num_gpu_blocks_override=18, speculative_config=None)
    before = HostSpec.last.num_loaded
    many = [Request(f"many{n}", prompt(60 + n, 50), 90) for n in range(8)]
    engine.run(many)
    assert HostSpec.last.num_loaded > before
    assert find(engine) == []
    assert engine.audit.audit.totals()["returned"] > 0


class CPUOffloadingSpec(SimpleNamespace):
    """As vLLM's, by its name."""


class TieringOffloadingSpec(CPUOffloadingSpec):
    pass


def test_blocks_have_places_in_chunks() -> None:
    """Of three groups; the second has nothing in this transfer."""
    spec: Any = CPUOffloadingSpec(blocks_per_chunk=4)
    connector = SimpleNamespace(connector_worker=SimpleNamespace(spec=spec))
    blocks = SimpleNamespace(
        block_ids=[11, 12, 13, 14], group_sizes=(3, 0, 1), block_indices=(3, 0, 4)
    )
    chunks = SimpleNamespace(block_ids=[7, 2, 9])
    config = SimpleNamespace(kv_cache_groups=[None] * 3)
    read = partial(offloading._read, config)
    assert read(connector, blocks, chunks) == (
        [[11, 12, 13], [], [14]],
        [[31, 8, 9], [], [36]],
    )
    for other in (
        TieringOffloadingSpec(blocks_per_chunk=4),
        SimpleNamespace(blocks_per_chunk=4),
        CPUOffloadingSpec(blocks_per_chunk=4, replicated_layout=True),
        CPUOffloadingSpec(
            blocks_per_chunk=4, config=SimpleNamespace(canonical_layout=True)
        ),
    ):
        connector.connector_worker.spec = other
        assert read(connector, blocks, chunks)[1] is None


def test_groups_that_vllm_does_not_offload_are_left_out() -> None:
    """vLLM 0.32 and later; before, a transfer is of all groups."""
    spec = SimpleNamespace(blocks_per_chunk=1)
    connector = SimpleNamespace(connector_worker=SimpleNamespace(spec=spec))
    blocks = SimpleNamespace(
        block_ids=[5, 6, 7], group_sizes=[1, 2], block_indices=[0, 0]
    )
    chunks = SimpleNamespace(block_ids=[0, 1, 2])
    config = SimpleNamespace(kv_cache_groups=[None] * 3)

    with pytest.raises(ValueError, match="of 2 KV-cache groups; expected 3"):
        offloading._read(config, connector, blocks, chunks)
    config.prefix_cacheable_group_ids = (0, 2)

    assert offloading._read(config, connector, blocks, chunks) == (
        [[5], [], [6, 7]],
        None,
    )


def test_of_many_stored_blocks_the_last_are_known() -> None:
    """Of 20 blocks of a cache, three of those that were stored."""
    engine = stored_and_loaded(num_gpu_blocks_override=20)
    assert find(engine) == []
    assert engine.audit.audit.groups[0].shape.num_stored == 3
    totals = engine.audit.audit.totals()
    num_loaded = HostSpec.last.num_loaded * BLOCK_SIZE
    assert totals["returned"] + totals["unverified"] == num_loaded
    assert 0 < totals["returned"] <= 3 * BLOCK_SIZE
