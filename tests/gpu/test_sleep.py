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
from tests.gpu.engines import BY_NAME
from tests.gpu.pool import OFF, ON, Finished, Runs, engines_fixture, engines_of
from tests.gpu.process import PHASES, SLEEP_ROWS

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


runs = engines_fixture(
    "gpu_sleep",
    lambda pool, spec: pool.off_on("sleep", spec),
    lambda spec, chain: {
        spec.name: {
            mode: run.entry() | {"phases": phases(run)} for mode, run in chain.items()
        }
    },
    "make gpu-test STEPS='build sleep'",
    jobs=1,  # while one engine sleeps, others must not take its memory
)


def found(run: Finished, *names: str) -> dict[str, Any]:
    """What its report has there: a phase, or a phase's row."""
    value = run.report
    for name in names:
        if name not in value:
            pytest.fail(f"no {' of '.join(reversed(names))}: {run.trouble()}")
        value = value[name]
    return value


@ENGINES
def test_vanilla_sleeps(runs: Runs, engine: str) -> None:
    """Without NWOR this engine comes to its end: what follows is about NWOR."""
    assert runs[engine][OFF].is_complete, runs[engine][OFF].trouble()


@ENGINES
def test_nothing_of_ours_is_in_the_pool_that_is_emptied(
    runs: Runs, engine: str
) -> None:
    memory = found(runs[engine][ON], "awake")["memory"]
    # Such addresses are recognised: the caches themselves are in it.
    assert set(memory["cache_pools"]) == {"kv_cache"}
    assert set(memory["pools"].values()) == {None}, memory["pools"]


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_tables_hold_the_addresses_of_the_caches(
    runs: Runs, engine: str, phase: str
) -> None:
    run = runs[engine][ON]
    memory = found(run, phase)["memory"]
    for tables, addresses in zip(memory["tables"], memory["addresses"], strict=True):
        assert sorted(row[0] for table in tables for row in table) == addresses
    assert memory["tables"] == found(run, "awake")["memory"]["tables"]


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_bytes_and_counters(runs: Runs, engine: str, phase: str) -> None:
    """Guarantees 1 and 2, by the byte oracle, which vanilla fails; and 7: counters that
    were lost in a sleep would rise by nonsense."""
    run, dirty = runs[engine][ON], 0
    for row in SLEEP_ROWS:
        on = found(run, phase, row)
        (seen,) = on["watch"]
        assert list(byte_problems(seen)) == [], row
        dirty += seen["num_dirty_slots"]
        assert counter_problems(BY_NAME[engine], run.report, on) == [], row
        (vanilla,) = found(runs[engine][OFF], phase, row)["watch"]
        assert set(vanilla["violations_by_kind"]) <= {"not restored"}
    assert dirty > 0, "the forward never changed a rejected slot"


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_outputs_are_vanillas(runs: Runs, engine: str, phase: str) -> None:
    """Guarantee 3; and what was asked before the sleep gets the same answer after."""
    for row in SLEEP_ROWS:
        off, on = (found(runs[engine][mode], phase, row) for mode in (OFF, ON))
        awake = found(runs[engine][OFF], "awake", row)
        if off["tokens"] != awake["tokens"]:
            pytest.skip(f"{phase}, {row}: vanilla answers otherwise after this sleep")
        assert differing(off, on) == [], row


@ENGINES
def test_requests_that_run_while_it_sleeps(runs: Runs, engine: str) -> None:
    """Nothing is lost: the same tokens as vanilla, and all of them counted."""
    off, on = (found(runs[engine][mode], "live", "interrupted") for mode in (OFF, ON))
    assert off["num_live"] == on["num_live"] > 0
    assert differing(off, on) == []
    device, vllms = on["device_counters"], on["counters"]
    assert device["staged"] == device["committed"] + device["rejected"] > 0
    assert device["invalid_slots"] == 0
    assert vllms.get("nwor_breaches", 0) == 0
    assert not any(n for name, n in vllms.items() if "nwor_fallbacks" in name)
