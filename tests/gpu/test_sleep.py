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

from tests.gpu import results
from tests.gpu.compare import OFF, ON, differing
from tests.gpu.engines import BY_NAME, SLEEP
from tests.gpu.pool import Finished, Pool
from tests.gpu.process import SLEEP_ROWS
from tests.gpu.test_engine_matrix import selected

FILE = "gpu_sleep.json"
PHASES = ("awake", "level 1", "live", "level 2")
ENGINES = pytest.mark.parametrize("engine", [spec.name for spec in SLEEP])
Runs = dict[str, dict[str, Finished]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, pool: Pool) -> Runs:
    pool.jobs = 1  # while one engine sleeps, others must not take its memory
    specs = [BY_NAME[name] for name in selected(request, "runs")]
    found = pool.map(
        lambda spec: {mode: pool.run("sleep", spec, mode) for mode in (OFF, ON)}, specs
    )
    entries = {
        name: {mode: shortened(run) for mode, run in chain.items()}
        for name, chain in found.items()
    }
    results.save(FILE, "gpu_sleep", "make gpu-test STEPS='build sleep'", entries)
    return found


def shortened(run: Finished) -> dict[str, Any]:
    """For the results file: how far it came, where memory lay, what was restored."""
    report = run.report
    return {
        "complete": run.is_complete,
        "trouble": "" if run.is_complete else run.trouble()[-2000:],
        "seconds": run.seconds,
        "facts": results.facts(report),
        "phases": {
            phase: {
                "pools": (report[phase]["memory"] or {}).get("pools"),
                "rows": {
                    row: report[phase][row]["device_counters"]
                    for row in SLEEP_ROWS
                    if row in report[phase]
                },
            }
            for phase in PHASES
            if phase in report
        },
    }


def phase_of(run: Finished, phase: str) -> dict[str, Any]:
    found: dict[str, Any] | None = run.report.get(phase)
    if found is None:
        pytest.fail(f"no phase {phase!r}: {run.trouble()}")
    return found


def row_of(run: Finished, phase: str, row: str) -> dict[str, Any]:
    found: dict[str, Any] | None = phase_of(run, phase).get(row)
    if found is None:
        pytest.fail(f"{phase}: no row {row!r}: {run.trouble()}")
    return found


@ENGINES
def test_vanilla_sleeps(runs: Runs, engine: str) -> None:
    """Without NWOR this engine comes to its end: what follows is about NWOR."""
    assert runs[engine][OFF].is_complete, runs[engine][OFF].trouble()


@ENGINES
def test_nothing_of_ours_is_in_the_pool_that_is_emptied(
    runs: Runs, engine: str
) -> None:
    memory = phase_of(runs[engine][ON], "awake")["memory"]
    # What is told of addresses is true: the caches themselves are in it.
    assert set(memory["cache_pools"]) == {"kv_cache"}
    pools = memory["pools"]
    assert pools
    assert {name: tag for name, tag in pools.items() if tag is not None} == {}


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_tables_hold_the_addresses_of_the_caches(
    runs: Runs, engine: str, phase: str
) -> None:
    run = runs[engine][ON]
    memory = phase_of(run, phase)["memory"]
    for tables, addresses in zip(memory["tables"], memory["addresses"], strict=True):
        assert sorted(row[0] for table in tables for row in table) == addresses
    assert memory["tables"] == phase_of(run, "awake")["memory"]["tables"]


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_bytes(runs: Runs, engine: str, phase: str) -> None:
    """Guarantees 1 and 2, by the byte oracle, which vanilla fails."""
    dirty = 0
    for row in SLEEP_ROWS:
        on = row_of(runs[engine][ON], phase, row)
        (seen,) = on["watch"]
        assert seen["violations"] == [], (row, seen["violations_by_kind"])
        dirty += seen["num_dirty_slots"]
        (vanilla,) = row_of(runs[engine][OFF], phase, row)["watch"]
        assert set(vanilla["violations_by_kind"]) <= {"not restored"}
    assert dirty > 0, "the forward never changed a rejected slot"


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_outputs_are_vanillas(runs: Runs, engine: str, phase: str) -> None:
    """Guarantee 3; and what was asked before the sleep gets the same answer after."""
    for row in SLEEP_ROWS:
        off, on = (row_of(runs[engine][mode], phase, row) for mode in (OFF, ON))
        awake = row_of(runs[engine][OFF], "awake", row)
        if off["tokens"] != awake["tokens"]:
            pytest.skip(f"{phase}, {row}: vanilla answers otherwise after this sleep")
        assert differing(off, on) == [], row


@ENGINES
def test_requests_that_run_while_it_sleeps(runs: Runs, engine: str) -> None:
    """Nothing is lost: the same tokens as vanilla, and all of them counted."""
    off, on = (row_of(runs[engine][mode], "live", "interrupted") for mode in (OFF, ON))
    assert off["num_live"] == on["num_live"] > 0
    assert differing(off, on) == []
    device, told = on["device_counters"], on["counters"]
    assert device["staged"] == device["committed"] + device["rejected"] > 0
    assert device["invalid_slots"] == 0
    assert told.get("nwor_breaches", 0) == 0
    assert not any(n for name, n in told.items() if "nwor_fallbacks" in name)


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_counters(runs: Runs, engine: str, phase: str) -> None:
    """Guarantee 7; counters that were lost in a sleep would rise by nonsense."""
    for row in SLEEP_ROWS:
        on = row_of(runs[engine][ON], phase, row)
        (seen,) = on["watch"]
        device, told = on["device_counters"], on["counters"]
        assert device["windows"] == seen["num_windows"]
        assert device["staged"] == seen["num_drafts"] > 0
        assert device["committed"] == seen["num_accepted"]
        assert device["invalid_slots"] == 0
        assert told.get("nwor_breaches", 0) == 0
        assert not any(n for name, n in told.items() if "nwor_fallbacks" in name)
