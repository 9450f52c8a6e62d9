# SPDX-License-Identifier: Apache-2.0
"""The audit beside vLLM's OffloadingConnector, on the CPU with a spec of our own.

The mend of vLLM issue 54193 (tests/helpers/offloading_fault.py) is taken out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
    engine.llm.reset_prefix_cache()
    later = [
        Request(f"later{n}", (*r.prompt, *result.tokens[r.name], 7, 8), 8)
        for n, r in enumerate(FIRST)
    ]
    engine.run(later)
    assert HostSpec.last.num_loaded > 0
    return engine


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
    # What was loaded is not vouched for, and counted.
    unverified = engine.audit.audit.totals()["unverified"]
    assert unverified == HostSpec.last.num_loaded * BLOCK_SIZE > 0


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
    monkeypatch.setattr(HostWorker, "loads_write", False)
    engine = stored_and_loaded(num_gpu_blocks_override=20)

    kinds = {finding.kind for finding in find(engine)}
    assert kinds == {"never_loaded"}
