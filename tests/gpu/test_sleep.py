# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1, 2, 3 and 7 on an engine that sleeps, after each wake-up.

Sleep mode unmaps the memory of the KV cache and the weights, and maps other memory at
the same addresses later. Level 1 keeps the weights on the host; after level 2 they are
loaded again. NWOR must not allocate in that pool: its tables would come back as zeros.

Not covered: reload_weights (weights are written in place), quantized caches, several
ranks.
"""

from typing import Any

import pytest

from tests.gpu.compare import Found, Report, byte_problems, counter_problems, differing
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import ON, Chain, engines_fixture, engines_of
from tests.gpu.rows import PHASES, SLEEP_ROWS

ENGINES = engines_of("sleep")
# Of a row; "not compared" if plain vLLM's outputs change with the sleep.
CHECKS = ("vanilla", "bytes", "outputs", "counters")


def row_problems(
    spec: EngineSpec, off: Report, on: Report, phase: str, row: str
) -> Found:
    """Guarantees 1 and 2 by the byte oracle, which must report plain vLLM; 7 and 3."""
    vanilla, found = off[phase][row], on[phase][row]
    for check, text in byte_problems(vanilla, found):
        if check in CHECKS:
            yield check, f"{row}, {text}"
    for text in counter_problems(spec, on, found):
        yield "counters", f"{row}: {text}"
    if vanilla["tokens"] != off["awake"][row]["tokens"]:
        yield "not compared", row
    else:
        for text in differing(vanilla, found):
            yield "outputs", f"{row}: {text}"


def interrupted_problems(off: Report, on: Report) -> Found:
    """Of the row in which the engine slept: plain vLLM's tokens, all of them
    counted."""
    vanilla, found = (report["live"]["interrupted"] for report in (off, on))
    for text in differing(vanilla, found):
        yield "outputs", f"interrupted: {text}"
    if not vanilla["num_live"] == found["num_live"] > 0:
        yield "outputs", f"interrupted: {found['num_live']} requests ran"
    device, vllms = found["device_counters"], found["counters"]
    is_whole = device["staged"] == device["committed"] + device["rejected"] > 0
    fell_back = any(n for name, n in vllms.items() if "nwor_fallbacks" in name)
    breaches = vllms.get("nwor_breaches", 0)
    if not is_whole or device["invalid_slots"] or fell_back or breaches:
        yield "counters", f"interrupted: {device}, {vllms}"


def judge(spec: EngineSpec, off: Report, on: Report, phase: str) -> dict[str, Any]:
    """For the results file: where memory lies, counters, and the problems found."""
    vanilla, found = off.get(phase, {}), on[phase]
    rows = [row for row in SLEEP_ROWS if row in vanilla and row in found]
    seen = [one for row in rows for one in row_problems(spec, off, on, phase, row)]
    entry = {
        "pools": (found["memory"] or {}).get("pools"),
        "rows": {row: found[row]["device_counters"] for row in rows},
    }
    if "interrupted" in vanilla and "interrupted" in found:
        seen += interrupted_problems(off, on)
        counts = found["interrupted"]["device_counters"]
        entry["interrupted"] = counts | {"num_live": found["interrupted"]["num_live"]}
    problems = {name: [t for check, t in seen if check == name] for name in CHECKS}
    not_compared = [text for check, text in seen if check == "not compared"]
    return entry | {"problems": problems, "not_compared": not_compared}


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    off, on = (run.report for run in chain.values())
    found = {mode: run.entry() for mode, run in chain.items()}
    found[ON]["phases"] = {
        phase: judge(spec, off, on, phase)
        for phase in PHASES
        if "memory" in on.get(phase, {})
    }
    return {spec.name: found}


runs = engines_fixture(
    "sleep",
    lambda pool, spec: pool.off_on("sleep", spec),
    entries,
    "make gpu-test STEPS='build sleep'",
    by_mode=True,
    num_jobs=1,  # while one engine sleeps, others must not take its memory
)


@ENGINES
def test_none_of_nwors_memory_is_in_the_pool_that_sleep_unmaps(on, engine):
    memory = on["awake"]["memory"]
    # The caches are in that pool.
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
    found = judge(BY_NAME[engine], off, on, phase)
    assert list(found["rows"]) == list(SLEEP_ROWS)
    problems = found["problems"]
    assert not problems["vanilla"] + problems["bytes"] + problems["counters"]
    dirty = [on[phase][row]["watch"][0]["num_dirty_slots"] for row in SLEEP_ROWS]
    assert any(dirty), "the forward never changed a rejected slot"


@pytest.mark.parametrize("phase", PHASES)
@ENGINES
def test_outputs_are_plain_vllms(off, on, engine, phase):
    """Guarantee 3, and the same outputs as before the sleep."""
    found = judge(BY_NAME[engine], off, on, phase)
    assert found["problems"]["outputs"] == []
    if rows := found["not_compared"]:
        pytest.skip(f"{phase}, {rows}: plain vLLM's outputs change with the sleep")


@ENGINES
def test_requests_that_run_when_the_engine_sleeps(off, on, engine):
    assert list(interrupted_problems(off, on)) == []
