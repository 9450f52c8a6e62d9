# SPDX-License-Identifier: Apache-2.0
"""Guarantees 4 and 5 on real engines: no synchronization, two launches per step. The
same of the audit of recurrent states, against an audit without it.

The torch profiler counts over one row of requests, with NWOR off and on; each process
profiles twice, so that plain vLLM is first compared with itself. Also:
VLLM_GPU_SYNC_CHECK=error, if plain vLLM passes it, and JIT compilation after start-up.
"""

import re
from collections import Counter
from typing import Any

import pytest

from tests.gpu.engines import EngineSpec
from tests.gpu.pool import OFF, ON, Chain, Pool, engines_fixture, engines_of

OURS = "nwor"
ENGINES = engines_of("sync")
HYBRIDS = engines_of("sync-states")


def shortened(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    """For the results file: without the names of vLLM's kernels and operators."""
    found: dict[str, Any] = {"added_work": None}
    if not any(run.trouble for run in chain.values()):
        profiles = (run.report["profiles"][-1] for run in chain.values())
        found["added_work"] = difference(*(seen["device_work"] for seen in profiles))
    for mode, run in chain.items():
        checked = run.report.get("sync_check", {})
        found[mode] = run.entry("compiled") | {
            "sync_check": {row: t and waiting_line(t) for row, t in checked.items()},
            "profiles": [
                {name: seen[name] for name in seen if name != "cpu_op"}
                | {"device_work": sum(seen["device_work"].values())}
                for seen in run.report.get("profiles", [])
            ],
        }
    return {spec.name: found}


runs = engines_fixture(
    "sync",
    lambda pool, spec: pool.off_on("sync", spec, VLLM_GPU_SYNC_CHECK="error"),
    shortened,
    by_mode=True,
)


def audited(pool: Pool, spec: EngineSpec) -> Chain:
    """Mode off with the audit, without and with recurrent states."""
    how = {"VLLM_NWOR_AUDIT": "log", "VLLM_GPU_SYNC_CHECK": "error"}
    return {
        mode: pool.run("sync", spec, OFF, NWOR_TEST_STATES=value, **how)
        for mode, value in ((OFF, "0"), (ON, "1"))
    }


hybrids = engines_fixture("sync", audited, shortened, by_mode=True)


def waiting_line(trace: str) -> str:
    """The frame of the synchronizing call."""
    frames = re.findall(r'File ".*', trace.partition("RuntimeError")[0])
    return frames[-1] if frames else trace[-300:]


def difference(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """`other` minus `one`, by name, without zeros."""
    names = sorted(one.keys() | other.keys())
    rose = {name: other.get(name, 0) - one.get(name, 0) for name in names}
    return {name: number for name, number in rose.items() if number}


@pytest.fixture
def same_steps(off, on):
    return compared(off, on)


def compared(off, on):
    """The second profile of each process; skips if plain vLLM differs from itself."""
    first, vanilla = off["profiles"]
    _, ours = on["profiles"]
    differs = difference(first["device_work"], vanilla["device_work"])
    if first["steps"] != vanilla["steps"] or differs:
        pytest.skip(f"plain vLLM differs between two equal runs: {differs}")
    assert vanilla["windowed_steps"] > 0
    assert ours["steps"] == vanilla["steps"]
    assert ours["windowed_steps"] == vanilla["windowed_steps"]
    return vanilla, ours


@ENGINES
def test_no_synchronizing_call_is_added(same_steps, engine):
    off, on = same_steps
    assert on["synchronizing"] == off["synchronizing"]
    # A copy to pageable memory waits without such a call.
    assert on["pageable_copies"] == off["pageable_copies"]


@ENGINES
def test_nothing_is_allocated(off, on, same_steps, engine):
    assert allocations(on) == allocations(off)


def allocations(report):
    """The minimum of two profiles, without chance misses of an allocator."""
    one, other = (Counter(seen["allocating"]) for seen in report["profiles"])
    return one & other


@ENGINES
def test_two_launches_a_step_and_nothing_else(same_steps, engine):
    """One launch to log and one to restore, for the one group; the second also copies
    the counters to the host."""
    off, on = same_steps
    added = difference(off["device_work"], on["device_work"])
    steps = on["windowed_steps"]
    assert all(OURS in name for name in added), added
    assert sorted(added.values()) == [steps, steps], added


@ENGINES
def test_the_host_runs_no_torch_operator_of_ours(same_steps, engine):
    off, on = same_steps
    no_operator_is_added(off, on)


def no_operator_is_added(off, on):
    added = difference(off["cpu_op"], on["cpu_op"])
    ours = ("_C_cache_ops::", "pin_memory", "resize")
    assert not any(part in name for name in added for part in ours), added
    waiting = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}
    assert not (waiting | {"aten::index", "aten::copy_"}) & added.keys(), added


@ENGINES
def test_sync_check_passes_if_plain_vllm_passes(off, on, engine):
    for row, text in off["sync_check"].items():
        if text:
            pytest.skip(f"plain vLLM does not pass it in row {row!r}: {text[-300:]}")
    assert on["sync_check"] == off["sync_check"]


@ENGINES
def test_no_jit_compilation_is_added(off, on, engine):
    assert set(on["compiled"]) <= set(off["compiled"])


@HYBRIDS
def test_states_add_two_launches_a_step_and_nothing_else(hybrids, engine):
    without, audited = (hybrids[engine][mode].whole() for mode in (OFF, ON))
    off, on = compared(without, audited)
    assert on["synchronizing"] == off["synchronizing"]
    assert on["pageable_copies"] == off["pageable_copies"]
    assert allocations(audited) <= allocations(without)
    no_operator_is_added(off, on)
    added = difference(off["device_work"], on["device_work"])
    of_ops = {
        part: number
        for name, number in added.items()
        for part in ("ReadStates", "WrittenStates")
        if part in name
    }
    assert len(added) == 2, added
    assert of_ops == dict.fromkeys(("ReadStates", "WrittenStates"), on["steps"])
