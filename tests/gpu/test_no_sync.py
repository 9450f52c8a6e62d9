# SPDX-License-Identifier: Apache-2.0
"""Guarantees 4 and 5 on real engines: nothing waits, and two launches a step.

Counted by the torch profiler over one row of requests, in a process with NWOR off and
in one with it on; each profiles twice, so that vanilla is first compared with itself.
Also here: VLLM_GPU_SYNC_CHECK=error, wherever vanilla passes it, and what is compiled
after start-up.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.gpu.engines import EngineSpec
from tests.gpu.pool import OFF, ON, Chain, Finished, Runs, engines_fixture, engines_of

# Calls of the CUDA runtime and driver that make the host wait.
SYNCHRONISING = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cuCtxSynchronize"),
    *("cuStreamSynchronize", "cuEventSynchronize"),
    *("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
)
# Those of PyTorch's caching allocators, which also wait. Whether one finds a free block
# of pinned memory depends on how far the device is: vanilla's number varies.
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost")
OURS = "nwor"
ENGINES = engines_of("sync")


def shortened(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    """For the results file: what the tests compare, without the names of vLLM's own
    kernels and of the host's operators, which are many."""
    found: dict[str, Any] = {"added_work": None}
    for mode, run in chain.items():
        checked, profiles = (run.report.get(n, {}) for n in ("sync_check", "profiles"))
        found[mode] = run.entry("compiled", "compiled_again") | {
            "sync_check": {
                row: text and waiting_line(text) for row, text in checked.items()
            },
            "profiles": [
                {
                    "steps": profile["steps"],
                    "windowed_steps": profile["windowed_steps"],
                    "synchronising": calls_of(profile, SYNCHRONISING),
                    "allocating": calls_of(profile, ALLOCATING),
                    "pageable_copies": pageable_copies(profile),
                    "device_work": device_work(profile).total(),
                }
                for profile in profiles
            ],
        }
    if all(len(run.report.get("profiles", ())) == 2 for run in chain.values()):
        work = (device_work(run.report["profiles"][1]) for run in chain.values())
        found["added_work"] = difference(*work)
    return {spec.name: found}


runs = engines_fixture(
    "gpu_sync",
    lambda pool, spec: pool.off_on("sync", spec, VLLM_GPU_SYNC_CHECK="error"),
    shortened,
    by_mode=True,
)


def waiting_line(trace: str) -> str:
    """The frame in which a synchronising call was made."""
    frames = re.findall(r'File ".*', trace.partition("RuntimeError")[0])
    return frames[-1] if frames else trace[-300:]


def calls_of(profile: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    calls = Counter(profile["cuda_runtime"]) + Counter(profile["cuda_driver"])
    return {name: calls[name] for name in names if calls[name]}


def pageable_copies(profile: dict[str, Any]) -> dict[str, int]:
    return {n: c for n, c in profile["gpu_memcpy"].items() if "Pageable" in n}


def device_work(profile: dict[str, Any]) -> Counter[str]:
    """Everything that the device did: kernels, copies, fills, by name."""
    parts = (Counter(profile[what]) for what in ("kernel", "gpu_memcpy", "gpu_memset"))
    return sum(parts, Counter())


def difference(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """What `other` has more (or, negative, less) than `one`, by name."""
    names = sorted(one.keys() | other.keys())
    rose = {name: other.get(name, 0) - one.get(name, 0) for name in names}
    return {name: number for name, number in rose.items() if number}


def profiles(run: Finished) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.report.get("profiles", [])
    if len(found) != 2:
        pytest.fail(f"no profiles: {run.trouble()}")
    return found


def same_steps(runs: Runs, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second profile of each process; skips where vanilla differs from itself."""
    first, off = profiles(runs[engine][OFF])
    on = profiles(runs[engine][ON])[1]
    differs = difference(device_work(first), device_work(off))
    if first["steps"] != off["steps"] or differs:
        pytest.skip(f"vanilla differs between two runs of the same requests: {differs}")
    assert off["windowed_steps"] > 0
    assert on["steps"] == off["steps"]
    assert on["windowed_steps"] == off["windowed_steps"]
    return off, on


@ENGINES
def test_both_come_to_their_end(runs: Runs, engine: str) -> None:
    for mode, run in runs[engine].items():
        assert run.is_complete, f"{mode}: {run.trouble()}"


@ENGINES
def test_no_synchronising_call_is_added(runs: Runs, engine: str) -> None:
    off, on = same_steps(runs, engine)
    assert calls_of(on, SYNCHRONISING) == calls_of(off, SYNCHRONISING)
    # A copy to pageable memory waits without such a call.
    assert pageable_copies(on) == pageable_copies(off)


@ENGINES
def test_nothing_is_allocated(runs: Runs, engine: str) -> None:
    """The fewest of two profiles: what an allocator happens to lack is not in it."""
    same_steps(runs, engine)
    fewest = {
        mode: {
            name: min(calls_of(p, ALLOCATING).get(name, 0) for p in profiles(run))
            for name in ALLOCATING
        }
        for mode, run in runs[engine].items()
    }
    assert fewest[ON] == fewest[OFF]


@ENGINES
def test_two_launches_a_step_and_nothing_else(runs: Runs, engine: str) -> None:
    """One launch to log, one to restore, for the one group; the counters' way to the
    host is in the second."""
    off, on = same_steps(runs, engine)
    added = difference(device_work(off), device_work(on))
    steps = on["windowed_steps"]
    assert all(OURS in name for name in added), added
    assert sorted(added.values()) == [steps, steps], added


@ENGINES
def test_the_host_runs_no_other_operator(runs: Runs, engine: str) -> None:
    """On the host: what reads the counters afterwards works on CPU tensors of six
    numbers. Our own ops ran in the first step, long before."""
    off, on = same_steps(runs, engine)
    added = difference(off["cpu_op"], on["cpu_op"])
    ours = ("_C_cache_ops::", "pin_memory", "resize")
    assert not any(part in name for name in added for part in ours), added
    waiting = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}
    assert not (waiting | {"aten::index", "aten::copy_"}) & added.keys(), added


@ENGINES
def test_sync_check_passes_where_vanilla_does(runs: Runs, engine: str) -> None:
    off = runs[engine][OFF].report.get("sync_check", {})
    on = runs[engine][ON].report.get("sync_check", {})
    assert off, runs[engine][OFF].trouble()
    for row, text in off.items():
        if text:
            pytest.skip(f"vanilla does not pass it in row {row!r}: {text[-300:]}")
    assert on.keys() == off.keys(), runs[engine][ON].trouble()
    assert not any(on.values()), on


@ENGINES
def test_nothing_is_compiled_that_vanilla_does_not(runs: Runs, engine: str) -> None:
    """After start-up; in its mode "error" vLLM's monitor would raise for each."""
    off, on = (runs[engine][mode] for mode in (OFF, ON))
    assert "compiled" in off.report, off.trouble()
    assert "compiled" in on.report, on.trouble()
    assert set(on.report["compiled"]) <= set(off.report["compiled"])
