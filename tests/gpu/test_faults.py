# SPDX-License-Identifier: Apache-2.0
"""Guarantees 3 and 6 when vLLM's forward, its sampler or one of NWOR's ops fails once,
on asynchronous engines of both runners in mode stage.

An exception in a step ends the engine, so tests/helpers/fault.py examines its state in
the worker at that moment. Engines that continue: tests/e2e/test_fault_points.py. Not
covered: faults inside a kernel, which end the process.
"""

from typing import Any

import pytest

from tests.gpu.compare import differing
from tests.gpu.engines import EngineSpec
from tests.gpu.pool import OFF, Chain, Pool, engines_fixture

STAGE = "stage"
ENGINES = pytest.mark.parametrize(
    "engine", ["sleep-v2-eagle-async", "eagle-flash-v1-async"]
)
# Faults that end the step: the counted reason, and the error.
ENDING = {
    "forward": ("step_failed", "injected into vLLM"),
    "sampler": ("step_failed", "injected into vLLM"),
    "commit": ("commit_failed", "NWOR commit_failed: commit_draft_layer: injected; "),
}
# Faults that do not: the counted reasons, and the oracle's reports for that step. If
# stage fails the step is logged; if that fails, too, it runs as plain vLLM.
KEPT = {
    "stage": (["stage_failed"], {"not staged"}),
    "log": (["stage_failed", "begin_failed"], {"not staged", "not restored"}),
    "restore": (["stage_failed", "commit_failed"], {"not staged", "not restored"}),
}
TOGETHER = " ".join(KEPT)


def chain(pool: Pool, spec: EngineSpec) -> Chain:
    """A process for each fault that ends the engine, one for the others."""
    lenient = {"VLLM_NWOR_STRICT": "0"}
    return {OFF: pool.run("one_row", spec, OFF)} | {
        what: pool.run("faults", spec, STAGE, NWOR_TEST_FAULT=what, **lenient)
        for what in (*ENDING, TOGETHER)
    }


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for whats, run in chain.items():
        seen = {what: run.report.get(what) or {} for what in whats.split()}
        kept = ("raised", "looks", "fallbacks")
        found[whats] = run.entry() | {
            what: {name: one.get(name) for name in kept}
            for what, one in seen.items()
            if what != OFF
        }
    return {spec.name: found}


runs = engines_fixture("faults", chain, entries, "make gpu-test STEPS='build faults'")


def check_put_back(look):
    """Block tables and slot mappings are vLLM's own; no byte of a block with drafts has
    changed, nor any outside the slots of the step."""
    assert look["entries"] == 0
    assert look["strays"] == {}


@pytest.mark.parametrize("what", ENDING)
@ENGINES
def test_a_failed_step_leaves_the_cache_unchanged(runs, engine, what):
    """When the exception leaves the runner. The engine may raise the error of the next
    step, which is in flight."""
    reason, error = ENDING[what]
    found = runs[engine][what].whole()[what]
    assert found["raised"] != ""
    look = found["looks"][0]
    assert look["error"].startswith(error)
    check_put_back(look)
    assert look["state"] == ("failed" if what == "commit" else "idle")
    assert look["drafts"] == look["staged"] > 4
    assert look["written"] > 0  # a draft that is proposed again writes the same bytes
    assert look["fallbacks"] == {reason: 1}


@pytest.mark.parametrize("what", KEPT)
@ENGINES
def test_an_op_that_fails_loses_nothing(runs, engine, what):
    """Outputs are plain vLLM's; the failure is counted and is no breach."""
    reasons, kinds = KEPT[what]
    found = runs[engine][TOGETHER].whole()[what]
    vanilla = runs[engine][OFF].whole()["row"]
    assert found["raised"] == ""
    assert differing(vanilla, found) == []
    (look,) = found["looks"]
    check_put_back(look)
    assert look["drafts"] > 4
    assert found["fallbacks"] == dict.fromkeys(reasons, 1)
    counters = found["counters"]
    counted = {name: n for name, n in counters.items() if n and "fallbacks" in name}
    assert counted == {f"nwor_fallbacks/{reason}": 1 for reason in reasons}
    assert counters["nwor_breaches"] == 0
    (watch,) = found["watch"]
    assert set(watch["violations_by_kind"]) <= kinds
    assert len({violation["step"] for violation in watch["violations"]}) <= 1
    assert (counters["nwor_restored_bytes"] > 0) == (what == "stage")
