# SPDX-License-Identifier: Apache-2.0
"""NWOR on an engine that sleeps: guarantees 1, 2, 3 and 7 after each wake-up.

Sleep mode takes the memory under the KV cache and the weights away and gives other
memory at the same addresses back. Level 1 keeps the weights on the host; level 2 keeps
nothing, and they are loaded anew. What NWOR allocates while vLLM binds the KV cache is
in the same pool unless care is taken: a table of addresses would come back as zeros.

Not covered: weights read from files by reload_weights (they are written in place, as
reinforcement learning does), quantised caches, several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.compare import byte_problems, counter_problems, differing
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import Chain, Finished, engines_fixture, engines_of
from tests.gpu.rows import PHASES, SLEEP_ROWS

ENGINES = engines_of("sleep")


def phases(run: Finished) -> dict[str, Any]:
    """For the results file: where memory lay, what was restored."""
    return {
        phase: {
            "pools": (seen["memory"] or {}).get("pools"),
            "rows": {
                row: seen[row]["device_counters"] for row in SLEEP_ROWS if row in seen
            },
        }
        for phase, seen in run.report.items()
        if phase in PHASES and "memory" in seen
    }


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    found = {mode: run.entry() | {"phases": phases(run)} for mode, run in chain.items()}
    return {spec.name: found}


runs = engines_fixture(
    "gpu_sleep",
    lambda pool, spec: pool.off_on("sleep", spec),
    entries,
    "make gpu-test STEPS='build sleep'",
    num_jobs=1,  # while one engine sleeps, others must not take its memory
)


@ENGINES
def test_nothing_of_ours_is_in_the_pool_that_is_emptied(on, engine):
    memory = on["awake"]["memory"]
    # Such addresses are recognised: the caches themselves are in it.
    assert set(memory["cache_pools"]) == {"kv_cache"}
    assert set(memory["pools"].values()) == {None}, memory["pools"]


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_tables_hold_the_addresses_of_the_caches(on, engine, phase):
    memory = on[phase]["memory"]
    for tables, addresses in zip(memory["tables"], memory["addresses"], strict=True):
        assert sorted(row[0] for table in tables for row in table) == addresses
    assert memory["tables"] == on["awake"]["memory"]["tables"]


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_bytes_and_counters(off, on, engine, phase):
    """Guarantees 1 and 2, by the byte oracle, which vanilla fails; and 7: counters that
    were lost in a sleep would rise by nonsense."""
    for row in SLEEP_ROWS:
        found = dict(byte_problems(off[phase][row], on[phase][row]))
        assert not found.keys() & {"vanilla", "bytes"}, (row, found)
        assert counter_problems(BY_NAME[engine], on, on[phase][row]) == [], row
    dirty = [on[phase][row]["watch"][0]["num_dirty_slots"] for row in SLEEP_ROWS]
    assert any(dirty), "the forward never changed a rejected slot"


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_outputs_are_vanillas(off, on, engine, phase):
    """Guarantee 3; and what was asked before the sleep gets the same answer after."""
    for row in SLEEP_ROWS:
        if off[phase][row]["tokens"] != off["awake"][row]["tokens"]:
            pytest.skip(f"{phase}, {row}: vanilla answers otherwise after this sleep")
        assert differing(off[phase][row], on[phase][row]) == [], row


@ENGINES
def test_requests_that_run_while_it_sleeps(off, on, engine):
    """Nothing is lost: the same tokens as vanilla, and all of them counted."""
    vanilla, found = (report["live"]["interrupted"] for report in (off, on))
    assert vanilla["num_live"] == found["num_live"] > 0
    assert differing(vanilla, found) == []
    device, vllms = found["device_counters"], found["counters"]
    assert device["staged"] == device["committed"] + device["rejected"] > 0
    assert device["invalid_slots"] == 0
    assert vllms.get("nwor_breaches", 0) == 0
    assert not any(n for name, n in vllms.items() if "nwor_fallbacks" in name)
