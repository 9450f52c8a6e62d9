# SPDX-License-Identifier: Apache-2.0
"""Guarantees 6 and 8: what fails, on a real engine, and exactly what NWOR then says.

No failure of NWOR's own may lose or change a token; each is counted, logged once and
visible in metrics; VLLM_NWOR_STRICT raises instead. Not covered: faults inside a
kernel (they kill the engine, as vLLM's own do), CUDA.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.drafters import ScriptedDrafter, all_wrong, mixture, truth_of
from tests.helpers.engine import Engine, Request, Result
from tests.helpers.environment import (
    model_path,
    nwor_settings,
    result_of,
    subprocess_env,
)
from tests.helpers.faults import failing, replaced_ops
from tests.helpers.logs import nwor_log
from tests.helpers.oracle import SnapshotOracle
from vllm_nwor import plugin
from vllm_nwor.draft_manager import NworError, State

pytestmark = pytest.mark.e2e

# Two KV-cache groups: an op can fail for the first or for the second of them.
MODEL = "tiny-gemma3"
NUM_GROUPS = 2


def prompt(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 40000) for _ in range(length))


REQUESTS = [Request(f"r{i}", prompt(i, 20 + 10 * i), 24, at=i) for i in range(3)]
VANILLA = (
    "; the step ran as vanilla vLLM (further ones are counted in vllm:nwor_fallbacks)"
)


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    return truth_of(Engine("off", model=MODEL), REQUESTS)


@pytest.fixture(scope="module")
def vanilla(truth: dict[str, list[int]]) -> Result:
    """What vLLM does without NWOR."""
    engine = Engine("off", model=MODEL)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    return engine.run(REQUESTS)


def cow_engine(truth: dict[str, list[int]], **settings: str) -> Engine:
    engine = Engine("cow", settings, model=MODEL)
    assert len(engine.manager.groups) == NUM_GROUPS
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    return engine


def op_of(engine: Engine, name: str) -> Callable[..., None]:
    op: Callable[..., None] = getattr(engine.manager.launches.ops, name)
    return op


# test_fault_points.py has single calls, each of them.
POINTS: dict[str, Callable[[int], bool]] = {
    "every_third": lambda call: call % 3 == 2,
    "always": lambda call: True,
}
REASONS = {
    "log_cache_slots": "begin_failed",
    "restore_rejected_drafts": "commit_failed",
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("op", REASONS)
def test_failing_op_loses_nothing(
    op: str, point: str, late: bool, truth: dict[str, list[int]], vanilla: Result
) -> None:
    engine = cow_engine(truth)
    oracle = SnapshotOracle(engine.probe)
    broken = failing(op_of(engine, op), POINTS[point], late)
    with nwor_log() as lines, replaced_ops(engine, **{op: broken}):
        found = engine.run(REQUESTS, [oracle])
    assert found.tokens == vanilla.tokens
    assert found.logprobs == vanilla.logprobs
    assert found.schedule() == vanilla.schedule()
    reason = REASONS[op]
    assert set(engine.manager.fallbacks) == {reason}
    assert lines == [f"WARNING NWOR {reason}: {op}: injected{VANILLA}"]
    num_windows = sum(1 for step in found.steps if step.drafted)
    num_failed = engine.manager.fallbacks[reason]
    if point == "always":
        assert num_failed == num_windows
    else:
        assert 1 < num_failed <= num_windows
    # The cache: rejected slots hold old or new bytes, all else is as vanilla.
    assert {violation.kind for violation in oracle.violations} <= {"not restored"}
    assert len({violation.step for violation in oracle.violations}) <= num_failed
    if not late and point == "always":
        assert oracle.violations != []


@pytest.mark.parametrize("op", REASONS)
def test_strict_raises_where_an_op_fails(op: str, truth: dict[str, list[int]]) -> None:
    engine = cow_engine(truth, STRICT="always")
    broken = failing(op_of(engine, op), POINTS["always"])
    expected = f"NWOR {REASONS[op]}: {op}: injected"
    with (
        replaced_ops(engine, **{op: broken}),
        pytest.raises(NworError, match=f"^{re.escape(expected)}$"),
    ):
        engine.run(REQUESTS)
    after = {"begin_failed": State.VANILLA, "commit_failed": State.FAILED}
    assert engine.manager.state is after[REASONS[op]]


@pytest.mark.parametrize("op", REASONS)
def test_fallbacks_are_in_the_metrics(op: str, truth: dict[str, list[int]]) -> None:
    """And they are not mistaken for breaches of the counters' identities."""
    engine = Engine("cow", model=MODEL, disable_log_stats=False)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    broken = failing(op_of(engine, op), POINTS["every_third"])
    with nwor_log() as lines, replaced_ops(engine, **{op: broken}):
        engine.run(REQUESTS)
    counters = {}
    for metric in engine.llm.get_metrics():
        if metric.name == "vllm:nwor_fallbacks":
            counters[metric.labels["reason"]] = metric.value
        elif metric.name == "vllm:nwor_breaches":
            assert metric.value == 0
    assert counters == dict(engine.manager.fallbacks)
    assert counters[REASONS[op]] > 1
    assert len(lines) == 1


def test_failing_copy_of_the_counters(
    truth: dict[str, list[int]], vanilla: Result
) -> None:
    """A commit fails late, and its counters cannot be copied out either: one fallback
    like any other. That step is missing from the totals, and no other: the ring that
    they are written to has been used once over by then."""
    engine = Engine("cow", model=MODEL, disable_log_stats=False)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    manager = engine.manager
    name = "restore_rejected_drafts"
    restore = op_of(engine, name)
    manager._copy_counters = failing(manager._copy_counters, 0)
    with replaced_ops(engine, **{name: failing(restore, 9, True)}):
        found = engine.run(REQUESTS)
    sizes = [sum(step.drafted.values()) for step in found.steps]
    lost = [size for size in sizes if size][9]
    assert found.tokens == vanilla.tokens
    assert manager.fallbacks == {"commit_failed": 1}
    metrics = {
        metric.name.removeprefix("vllm:nwor_"): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name.startswith("vllm:nwor_") and hasattr(metric, "value")
    }
    assert metrics["fallbacks"] == 1
    assert metrics["breaches"] == 0
    assert metrics["tokens_staged"] == found.num_drafted - lost


def test_log_too_small(truth: dict[str, list[int]], vanilla: Result) -> None:
    """Windows beyond VLLM_NWOR_MAX_LOG_ROWS run as vanilla, and are counted; those
    that fit are protected."""
    engine = cow_engine(truth, MAX_LOG_ROWS="4")
    assert engine.manager.capacity == 4
    oracle = SnapshotOracle(engine.probe)
    with nwor_log() as lines:
        found = engine.run(REQUESTS, [oracle])
    assert found.tokens == vanilla.tokens
    assert found.logprobs == vanilla.logprobs
    sizes = [sum(step.drafted.values()) for step in found.steps]
    too_big = [number for number, size in enumerate(sizes) if size > 4]
    assert engine.manager.fallbacks == {"over_capacity": len(too_big)}
    first = sizes[too_big[0]]
    assert lines == [
        f"WARNING NWOR over_capacity: {first} drafts do not fit the undo log of 4 rows"
        + VANILLA
    ]
    assert len(too_big) < sum(1 for size in sizes if size), "no window fitted"
    assert {violation.step for violation in oracle.violations} <= set(too_big)
    assert oracle.violations != []


def test_log_too_small_raises_under_strict(truth: dict[str, list[int]]) -> None:
    engine = cow_engine(truth, MAX_LOG_ROWS="1", STRICT="always")
    with pytest.raises(NworError, match=r"^NWOR over_capacity: \d+ drafts"):
        engine.run(REQUESTS)


@pytest.mark.parametrize("where", ["forward", "sampler"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_aborted_step(where: str, strict: bool, truth: dict[str, list[int]]) -> None:
    """vLLM fails between begin and commit. The next step finds a log that nobody
    committed, drops it (it never reaches the cache) and counts it."""
    settings = {"STRICT": "always" if strict else "1"}
    engine = cow_engine(truth, **settings)
    runner, manager = engine.runner, engine.manager
    ScriptedDrafter(truth, all_wrong).attach(runner)

    def fail(*args: Any) -> None:
        if manager.state is State.LOGGED:
            raise RuntimeError("injected into vLLM")

    module = runner.get_model() if where == "forward" else runner.rejection_sampler
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        engine.run(REQUESTS)
    handle.remove()
    assert manager.state is State.LOGGED
    logged = manager._num_drafts
    engine.llm.abort_request([request.name for request in REQUESTS])
    after_abort = [Request("next", prompt(9, 20), 12)]
    if strict:
        with pytest.raises(NworError, match=r"^NWOR stale_log: windows with"):
            engine.run(after_abort)
        return
    oracle = SnapshotOracle(engine.probe)
    with nwor_log() as lines:
        engine.run(after_abort, [oracle])
    assert manager.fallbacks == {"stale_log": 1}
    assert lines == [
        f"WARNING NWOR stale_log: windows with {logged} drafts were dropped{VANILLA}"
    ]
    assert manager.state is State.IDLE
    assert oracle.violations == []


def test_register_twice() -> None:
    """Nothing is wrapped twice, whatever calls register() again."""
    first = Engine("cow")
    runner_class = type(first.runner)
    wrapped = runner_class._sample
    with nwor_settings({"MODE": "cow"}):
        plugin.register()
        plugin._registered = False  # as in a process that lost the module
        plugin.register()
    assert runner_class._sample.__wrapped__ is wrapped.__wrapped__
    assert not hasattr(runner_class._sample.__wrapped__, "__wrapped__")


def test_bad_mode_starts_nothing() -> None:
    """vLLM's own server ends with the sentence before it loads anything."""
    sentence = "VLLM_NWOR_MODE='bogus' is not allowed; allowed values: off, stage, cow"
    command = "vllm.entrypoints.openai.api_server"
    done = subprocess.run(
        [sys.executable, "-m", command, "--model", model_path("tiny-llama")],
        env=subprocess_env(VLLM_NWOR_MODE="bogus"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith(f"NworConfigError: {sentence}")
    assert "Starting to load model" not in done.stdout + done.stderr


RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"


MISMATCH = (
    f"{RUNNER_MODULE}.GPUModelRunner._sample has parameters (self, hidden, "
    "spec_decode_metadata); expected it to begin with (self, logits, "
    "spec_decode_metadata)"
)


CHANGED_VLLM = """
import json
from tests.helpers import environment
environment.prepare()
from vllm.v1.worker import gpu_model_runner
original = gpu_model_runner.GPUModelRunner._sample
def _sample(self, hidden, spec_decode_metadata):
    return original(self, hidden, spec_decode_metadata)
gpu_model_runner.GPUModelRunner._sample = _sample
from tests.helpers.engine import Engine, Request
from tests.helpers.logs import nwor_log
with nwor_log() as lines:
    engine = Engine("cow", disable_log_stats=False)
result = engine.run([Request("one", tuple(range(10, 40)) * 2, 20)])
print("RESULT " + json.dumps({
    "tokens": result.tokens["one"],
    "drafted": result.num_drafted,
    "state": repr(engine.runner.__dict__.get("nwor_state")),
    "log": lines,
    "info": [
        metric.labels
        for metric in engine.llm.get_metrics()
        if metric.name == "vllm:nwor_info"
    ],
}))
"""


@pytest.fixture(scope="module")
def changed_vllm() -> dict[str, Any]:
    """An engine in mode cow, in a process whose vLLM renamed a parameter."""
    return result_of(CHANGED_VLLM)


def test_engine_on_a_changed_vllm_runs_as_vanilla(changed_vllm: dict[str, Any]) -> None:
    """The tokens are vanilla's, nothing of the runner is hooked, one line says why."""
    requests = [Request("one", tuple(range(10, 40)) * 2, 20)]
    vanilla = Engine("off").run(requests)
    assert changed_vllm["tokens"] == vanilla.tokens["one"]
    assert changed_vllm["drafted"] == vanilla.num_drafted > 0
    assert changed_vllm["state"] == "None"
    assert changed_vllm["log"] == [f"ERROR NWOR is off for {RUNNER_MODULE}: {MISMATCH}"]


def test_changed_vllm_is_in_the_metrics(changed_vllm: dict[str, Any]) -> None:
    """vllm:nwor_info is there also when NWOR was asked for and refused."""
    (info,) = changed_vllm["info"]
    assert info["requested"] == "cow"
    assert info["resolved"] == "off"
    assert MISMATCH in info["reason"]


def test_engine_without_speculation_is_refused_by_name() -> None:
    """A configuration that NWOR does not protect: one line, a row of the gauge, and
    vanilla outputs; an error under STRICT."""
    reason = "no speculative decoding is configured"
    requests = [Request("one", prompt(1, 30), 10)]
    vanilla = Engine("off", speculative_config=None).run(requests)
    with nwor_log() as lines:
        engine = Engine("cow", speculative_config=None, disable_log_stats=False)
        found = engine.run(requests)
    assert found.tokens == vanilla.tokens
    assert found.logprobs == vanilla.logprobs
    assert engine.manager is None
    assert lines == [f"WARNING NWOR cow requested; group 0: off ({reason})"]
    (info,) = [m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info"]
    assert info.value == 1
    assert info.labels["requested"] == "cow"
    assert info.labels["resolved"] == "off"
    assert info.labels["reason"] == reason
    expected = f"NWOR cow requested, refused: group 0: off ({reason})"
    with pytest.raises(NworError, match=f"^{re.escape(expected)}$"):
        Engine("cow", {"STRICT": "1"}, speculative_config=None)
