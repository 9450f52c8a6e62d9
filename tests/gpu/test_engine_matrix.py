# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1, 2, 3 and 7 on real engines, for every pair of options that vLLM
combines.

Engines: engines.yml; their requests: rows.py; checks: compare.py; the byte oracle:
tests/helpers/oracle.py. Each engine runs with NWOR off and on, in processes of its own;
the oracle must report the off one. NWOR_GPU_MODE=stage runs them with shadow blocks.

Not covered: pipeline parallelism (refused), block copies (full attention makes none),
FLASHINFER (not installed on the test machines).
"""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import parse

from tests.gpu import results
from tests.gpu.compare import CHECKS, judge
from tests.gpu.engines import BY_NAME, GROUPS, EngineSpec
from tests.gpu.pool import OFF, ON, Pool, engines_fixture, engines_of

# An engine on V2, and the counter of steps without begin.
MISSING, MISSED = "eagle-flash-eager-fp8", "nwor_fallbacks/begin_missed"
ACCEPTED = "spec_decode_num_accepted_tokens"


def can_run(spec: EngineSpec) -> bool:
    """Whether the installed vLLM has the engine's method and executor."""
    is_newer = parse(version("vllm")) >= parse("0.33")
    if spec in GROUPS["newer"]:
        return is_newer
    if spec in GROUPS["ray"]:
        return find_spec("ray") is not None and (spec.executor == "ray" or not is_newer)
    return True


def verdict(pool: Pool, spec: EngineSpec) -> dict[str, Any] | None:
    return judge(spec, pool.off_on("matrix", spec)) if can_run(spec) else None


def entries(spec: EngineSpec, found: dict[str, Any] | None) -> dict[str, Any]:
    engine = vars(spec) | {"runner": spec.runner}
    return {spec.name: {"engine": engine} | found} if found else {}


verdicts, single_verdicts = (
    engines_fixture("engines", verdict, entries, by_mode=True, num_jobs=num_jobs)
    for num_jobs in (Pool.num_jobs, 1)
)


def assert_check(verdict: dict[str, Any] | None, check: str) -> None:
    if verdict is None:
        pytest.skip("this vLLM lacks the method or executor, or Ray is not installed")
    problems = verdict["problems"]
    if problems["started"] and check != "started":
        pytest.skip(f"a process did not finish: {problems['started'][0][:200]}")
    assert not problems[check], "\n".join(problems[check])
    left = {"outputs": "unsettled", "digests": "unsettled", "rows": "unmet"}
    if unclear := verdict.get(left.get(check)):
        pytest.skip("; ".join(unclear)[:500])


@pytest.mark.parametrize("check", CHECKS)
@engines_of("matrix", "methods", "newer")
def test_matrix(verdicts, engine, check):
    assert_check(verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@engines_of("real")
def test_real_weights(verdicts, engine, check):
    """Of SmolLM2, with real acceptance."""
    assert_check(verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@engines_of("parallel")
def test_two_ranks(single_verdicts, engine, check):
    """Each rank of a tensor parallel engine restores its own cache."""
    assert_check(single_verdicts[engine], check)


@pytest.mark.parametrize("check", CHECKS)
@engines_of("ray")
def test_ray(single_verdicts, engine, check):
    """The worker is a Ray actor; vLLM passes NWOR's variables on."""
    assert_check(single_verdicts[engine], check)


def test_why_a_group_whose_drafter_copies_the_block_table_is_not_staged(pool):
    """If it is staged by force, fewer drafts are right, without an error; refused, it
    uses the undo log and nothing changes."""
    spec, lenient = BY_NAME["copying-flex"], {"VLLM_NWOR_STRICT": "0"}
    views = {"NWOR_TEST_VIEWS": spec.backend}
    runs = {
        "off": pool.run("one_row", spec, "off"),
        "refused": pool.run("one_row", spec, "stage", **lenient),
        "forced": pool.run("one_row", spec, "stage", **lenient, **views),
    }
    tokens = {name: run.whole()["row"]["tokens"] for name, run in runs.items()}
    entries = {
        f"{spec.name}-{name}": run.entry("groups", "counters")
        | {"is_vanillas": tokens[name] == tokens["off"]}
        for name, run in runs.items()
    }
    results.save("cases", "make gpu-test", entries, case="copied_table")
    refused, forced = (runs[how].report["groups"][0] for how in ("refused", "forced"))
    assert (refused["resolved"], forced["resolved"]) == ("cow", "stage")
    assert "may copy the block table" in refused["reason"]
    assert tokens["refused"] == tokens["off"]
    accepted = {name: run.report["counters"][ACCEPTED] for name, run in runs.items()}
    assert accepted["refused"] == accepted["off"] > accepted["forced"], accepted


def test_a_missed_begin_on_v2(pool):
    """Without the hook of begin every step with drafts is a fallback and a breach, with
    plain vLLM's outputs; VLLM_NWOR_STRICT=always raises."""
    spec = BY_NAME[MISSING]
    off = pool.run("one_row", spec, OFF).whole()["row"]
    run = pool.run("missed", spec, ON)
    whole, without = run.whole()["whole"], run.report["without"]
    entry = {name: without[name] for name in ("num_windowed", "counters")}
    entries = {ON: run.entry("raised") | entry}
    results.save("cases", "make gpu-test", entries, case="missed_begin")
    assert whole["counters"].get(MISSED, 0) == whole["counters"]["nwor_breaches"] == 0
    assert without["num_windowed"] == whole["num_windowed"] > 0
    counters = without["counters"]
    assert counters[MISSED] == counters["nwor_breaches"] == without["num_windowed"]
    assert counters["nwor_windows"] == 0 < counters["spec_decode_num_drafts"]
    assert without["tokens"] == whole["tokens"] == off["tokens"]
    assert "NWOR begin_missed: " in run.report["raised"]
