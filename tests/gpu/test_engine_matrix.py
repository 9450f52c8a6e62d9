# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1, 2, 3 and 7 on real engines, on every pair of what vLLM allows together.

The engines are rows of MATRIX in engines.py, what they are made to do is in rows.py,
what is checked in compare.py, how bytes are watched in watch.py. Each engine runs twice
in processes of its own, with NWOR off and on; the off one must fail the oracle.

NWOR_GPU_MODE=stage has them run with shadow pages. Not covered: pipeline parallelism
(refused), block copies (full attention makes none), and FLASHINFER, which the test
machines lack.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import parse

from tests.gpu import results
from tests.gpu.compare import CHECKS, OFF, ON, judge
from tests.gpu.engines import (
    BY_NAME,
    COPYING,
    MATRIX,
    METHODS,
    NEWER,
    NEWER_METHODS,
    PARALLEL,
    RAY,
    EngineSpec,
)
from tests.gpu.pool import Finished, Pool

Verdict = dict[str, Any]
FILE = "gpu_engines.json" if ON == "cow" else f"gpu_engines_{ON}.json"


def is_newer() -> bool:
    return parse(version("vllm")) >= parse("0.33")


def run_chain(pool: Pool, spec: EngineSpec) -> dict[str, Finished]:
    return {mode: pool.run("matrix", spec, mode) for mode in (OFF, ON)}


def judge_all(pool: Pool, names: list[str]) -> dict[str, Verdict]:
    specs = [BY_NAME[name] for name in names]
    finished = pool.map(lambda spec: run_chain(pool, spec), specs)
    verdicts = {spec.name: judge(spec, finished[spec.name]) for spec in specs}
    entries = {
        spec.name: {"engine": vars(spec) | {"runner": spec.runner}}
        | verdicts[spec.name]
        | {"facts": results.facts(verdicts[spec.name])}
        for spec in specs
    }
    results.save(FILE, "gpu_engines", "make gpu-test", entries)
    return verdicts


def selected(request: pytest.FixtureRequest, fixture: str) -> list[str]:
    """Names of the engines that the selected tests of this session ask for."""
    names = {
        str(item.callspec.params["engine"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and fixture in item.fixturenames
        and hasattr(item, "callspec")
    }
    return sorted(names, key=list(BY_NAME).index)


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest, pool: Pool) -> dict[str, Verdict]:
    return judge_all(pool, selected(request, "verdicts"))


@pytest.fixture(scope="session")
def newer_verdicts(request: pytest.FixtureRequest, pool: Pool) -> dict[str, Verdict]:
    if not is_newer():
        pytest.skip("this vLLM has no such method, or on V1 only")
    return judge_all(pool, selected(request, "newer_verdicts"))


@pytest.fixture(scope="session")
def parallel_verdicts(request: pytest.FixtureRequest, pool: Pool) -> dict[str, Verdict]:
    pool.jobs = 1
    return judge_all(pool, selected(request, "parallel_verdicts"))


@pytest.fixture(scope="session")
def ray_verdicts(request: pytest.FixtureRequest, pool: Pool) -> dict[str, Verdict]:
    pytest.importorskip("ray")
    pool.jobs = 1
    names = selected(request, "ray_verdicts")
    if is_newer():
        names = [name for name in names if BY_NAME[name].executor == "ray"]
    return judge_all(pool, names)


def assert_check(verdict: Verdict, check: str) -> None:
    problems = verdict["problems"]
    if problems["started"] and not problems[check]:
        # What was not run proves nothing; what did run is judged all the same.
        pytest.skip(f"not all of it ran: {problems['started'][0][:200]}")
    assert not problems[check], "\n".join(problems[check])
    if check in ("outputs", "digests") and verdict["unsettled"]:
        pytest.skip("; ".join(verdict["unsettled"])[:500])
    if check == "rows" and verdict["unmet"]:
        pytest.skip("; ".join(verdict["unmet"])[:500])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", [spec.name for spec in (*MATRIX, *METHODS)])
def test_matrix(verdicts: dict[str, Verdict], engine: str, check: str) -> None:
    assert_check(verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", [spec.name for spec in (*NEWER, *NEWER_METHODS)])
def test_matrix_of_newer_vllm(
    newer_verdicts: dict[str, Verdict], engine: str, check: str
) -> None:
    assert_check(newer_verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", [spec.name for spec in PARALLEL])
def test_two_ranks(
    parallel_verdicts: dict[str, Verdict], engine: str, check: str
) -> None:
    """Each rank of a tensor parallel engine restores its own cache, without a word to
    the others."""
    assert_check(parallel_verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", [spec.name for spec in RAY])
def test_ray(ray_verdicts: dict[str, Verdict], engine: str, check: str) -> None:
    """NWOR is at work in a Ray actor, to which vLLM brings its variables."""
    if engine not in ray_verdicts:
        pytest.skip("this vLLM has no such executor")
    assert_check(ray_verdicts[engine], check)


def test_why_a_drafter_behind_a_copied_table_is_not_staged(pool: Pool) -> None:
    """Forced, its drafts are others than vanilla's, and no error says so; refused, the
    group is logged and nothing changes."""
    lenient = {"VLLM_NWOR_STRICT": "0"}
    off = pool.run("outputs", COPYING, "off")
    refused = pool.run("outputs", COPYING, "stage", **lenient)
    forced = pool.run(
        "outputs", COPYING, "stage", NWOR_TEST_VIEWS=COPYING.backend, **lenient
    )

    runs = {"off": off, "refused": refused, "forced": forced}
    for run in runs.values():
        assert run.is_complete, run.trouble()
    entries = {
        f"{COPYING.name}-{name}": {
            "groups": run.report["groups"],
            "counters": run.report["counters"],
            "is_vanillas": run.report["tokens"] == off.report["tokens"],
            "facts": results.facts(run.report),
        }
        for name, run in runs.items()
    }
    results.save("gpu_copied_table.json", "gpu_copied_table", "make gpu-test", entries)
    resolved = [run.report["groups"][0]["resolved"] for run in (refused, forced)]
    assert resolved == ["cow", "stage"]
    assert "may copy the block table" in refused.report["groups"][0]["reason"]
    assert refused.report["tokens"] == off.report["tokens"]
    assert forced.report["tokens"] != off.report["tokens"]
