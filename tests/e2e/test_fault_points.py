# SPDX-License-Identifier: Apache-2.0
"""Guarantees 6 and 8, point by point: every call of every op, every kind of error, a
client that goes away in every phase of its request, memory that cannot be had, a worker
that dies between log and commit, a vLLM that has changed; and exactly what NWOR says.

No failure of NWOR's own may lose or change a token; each is counted, logged once and
visible in metrics; VLLM_NWOR_STRICT raises instead. The engines of this file are shared
by its tests. Not covered: faults inside a kernel (they kill the engine, as vLLM's own
do); CUDA; sleep and weight reload (tests/gpu).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import worker_faults
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import Engine, Request, Result, counters, prompt, risen
from tests.helpers.environment import (
    REPO,
    model_path,
    result_of,
    subprocess_env,
)
from tests.helpers.faults import failing, replaced_ops
from tests.helpers.logs import nwor_log
from tests.helpers.oracle import SnapshotOracle
from tests.helpers.server import Server, serve
from vllm_nwor.config import Strict
from vllm_nwor.draft_manager import NworError, State
from vllm_nwor.hooks import discovery
from vllm_nwor.ops import COUNTER_COLUMNS

pytestmark = pytest.mark.e2e


# Two KV-cache groups: an op can fail for one of them. Two requests run at a time, so
# that the third waits for the first to end.
ARGUMENTS: dict[str, Any] = {
    "model": "tiny-gemma3",
    "max_num_seqs": 2,
    "disable_log_stats": False,
}
NUM_GROUPS = 2
SURVIVORS = [
    Request("first", prompt(1, 30), 26),
    Request("second", prompt(2, 45), 40, at=1),
]
# Longer than what a step takes (256 tokens): its prefill comes in chunks.
VICTIM = Request("victim", prompt(3, 400), 24, at=2)
LATE = Request("late", prompt(4, 25), 12, at=30)
ALL = [*SURVIVORS, VICTIM, LATE]


@dataclass(frozen=True)
class Baseline:
    """The engine without NWOR, and what it did when nothing went wrong."""

    engine: Engine
    truth: dict[str, list[int]]
    result: Result


@pytest.fixture(scope="module")
def off() -> Baseline:
    engine = Engine("off", **ARGUMENTS)
    truth = truth_of(engine, ALL)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    return Baseline(engine, truth, engine.run(ALL))


@pytest.fixture(scope="module")
def cow(off: Baseline) -> Engine:
    """Made after the other one: get_metrics() shows the newest engine's counters."""
    engine = Engine("cow", **ARGUMENTS)
    assert len(engine.manager.counters) == NUM_GROUPS
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def forget_fallbacks(engine: Engine) -> None:
    """They are counted, logged and reported as from the start."""
    engine.manager.fallbacks.clear()
    engine.runner.nwor_state.report._told_fallbacks = {}


@pytest.fixture(autouse=True)
def all_is_back_to_normal(request: pytest.FixtureRequest) -> Any:
    """After each test of the shared engine nothing is left of its faults."""
    yield
    if "cow" in request.fixturenames:
        engine = request.getfixturevalue("cow")
        forget_fallbacks(engine)
        assert engine.manager.state is State.IDLE
        assert not engine.llm.has_unfinished_requests()


@pytest.fixture
def strict(cow: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine as under VLLM_NWOR_STRICT=always. Afterwards a run is as ever."""
    config = replace(cow.manager.config, strictness=Strict.ALWAYS)
    with monkeypatch.context() as patched:
        patched.setattr(cow.manager, "config", config)
        yield
    cow.llm.abort_request([*(request.name for request in ALL), "next"])
    cow.run([LATE])


def assert_same(found: Result, wanted: Result) -> None:
    assert found.tokens == wanted.tokens
    assert found.logprobs == wanted.logprobs
    assert found.schedule() == wanted.schedule()


# --- ops ------------------------------------------------------------------------------

REASONS = {
    "log_cache_slots": "begin_failed",
    "restore_rejected_drafts": "commit_failed",
}


VANILLA = (
    "; the step ran as vanilla vLLM (further ones are counted in vllm:nwor_fallbacks)"
)
At = Callable[[int], bool] | int


def num_launches(engine: Engine, wanted: Result) -> int:
    """Of each op in a run: one for each table and step with drafts."""
    num_windowed = sum(1 for step in wanted.steps if step.drafted)
    return num_windowed * len(engine.manager.counters)


def run_with_fault(
    engine: Engine, op: str, at: At, late: bool, error: Exception, wanted: Result
) -> SnapshotOracle:
    """One run in which calls fail: nothing is lost, and each is counted once. The
    cache: rejected slots hold old or new bytes, all else is as vanilla."""
    forget_fallbacks(engine)
    inner = getattr(engine.manager.launches.ops, op)
    broken = failing(inner, at, late, error)
    oracle, before = SnapshotOracle(engine.probe), counters(engine)
    with replaced_ops(engine, **{op: broken}):
        found = engine.run(ALL, [oracle])
    assert_same(found, wanted)
    assert set(engine.manager.fallbacks) == {REASONS[op]}
    num_failed = engine.manager.fallbacks[REASONS[op]]
    assert {violation.kind for violation in oracle.violations} <= {"not restored"}
    assert len({violation.step for violation in oracle.violations}) <= num_failed
    # They are in the metrics, and no breach of the counters' identities.
    rise = risen(engine, before)
    assert rise[f"nwor_fallbacks/{REASONS[op]}"] == num_failed
    assert rise["nwor_breaches"] == 0
    if isinstance(at, int):
        assert num_failed == 1
        # FAILED lasts until a step has drafts again.
        num_calls = num_launches(engine, wanted)
        is_last = op == "restore_rejected_drafts" and at >= num_calls - NUM_GROUPS
        assert engine.manager.state is (State.FAILED if is_last else State.IDLE)
        if op == "restore_rejected_drafts":
            # One group's restore failed; the other group's was done all the same.
            failed = engine.manager.groups[at % NUM_GROUPS]
            layers = {layer.name for layer in failed.layers}
            assert {violation.layer for violation in oracle.violations} <= layers
    return oracle


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("injected: no memory"),
        torch.OutOfMemoryError("injected: no memory on the device"),
        OSError("injected: the driver is gone"),
        ValueError("injected: refused"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("op", REASONS)
def test_whatever_an_op_raises_loses_nothing(
    op: str, error: Exception, off: Baseline, cow: Engine
) -> None:
    with nwor_log() as lines:
        run_with_fault(cow, op, 4, False, error, off.result)
    assert lines == [f"WARNING NWOR {REASONS[op]}: {op}: {error}{VANILLA}"]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("always", [False, True], ids=["every_third", "always"])
@pytest.mark.parametrize("op", REASONS)
def test_an_op_may_fail_again_and_again(
    op: str, always: bool, late: bool, off: Baseline, cow: Engine
) -> None:
    def fails(call: int) -> bool:
        return always or call % 3 == 2

    num_windows = sum(1 for step in off.result.steps if step.drafted)
    error = RuntimeError("injected")
    oracle = run_with_fault(cow, op, fails, late, error, off.result)
    num_failed = cow.manager.fallbacks[REASONS[op]]
    assert num_failed == num_windows if always else 1 < num_failed <= num_windows
    if always and not late:
        assert oracle.violations != []
    cow.run([LATE])


@pytest.mark.parametrize("op", REASONS)
def test_strict_raises_where_an_op_fails(op: str, cow: Engine, strict: None) -> None:
    broken = failing(getattr(cow.manager.launches.ops, op), lambda call: True)
    expected = f"NWOR {REASONS[op]}: {op}: injected"
    with (
        replaced_ops(cow, **{op: broken}),
        pytest.raises(NworError, match=f"^{re.escape(expected)}$"),
    ):
        cow.run(ALL)
    after = {"begin_failed": State.VANILLA, "commit_failed": State.FAILED}
    assert cow.manager.state is after[REASONS[op]]


def test_strict_raises_beyond_the_log(
    cow: Engine, strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cow.manager, "capacity", 4)
    with pytest.raises(NworError, match=r"^NWOR over_capacity: \d+ drafts"):
        cow.run(ALL)


def test_a_copy_of_the_counters_that_fails(
    off: Baseline, cow: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit fails late, and its counters cannot be copied out either: one fallback
    like any other. That step is missing from the totals, and no other: the ring that
    they are written to has been used once over by then."""
    manager, name, before = cow.manager, "restore_rejected_drafts", counters(cow)
    copy = failing(manager._copy_counters, 0)
    monkeypatch.setattr(manager, "_copy_counters", copy)
    restore = failing(getattr(manager.launches.ops, name), 9, True)
    with replaced_ops(cow, **{name: restore}):
        found = cow.run(ALL)
    sizes = [sum(step.drafted.values()) for step in found.steps if step.drafted]
    assert_same(found, off.result)
    assert manager.fallbacks == {"commit_failed": 1}
    rise = risen(cow, before)
    assert rise["nwor_fallbacks/commit_failed"] == 1
    assert rise["nwor_breaches"] == 0
    lost = sizes[9 // NUM_GROUPS]
    assert rise["nwor_tokens_staged"] == found.num_drafted - lost


def vllm_fails(engine: Engine, where: str, state: State) -> Any:
    """vLLM raises there from now on, in that state. Returns what to remove."""

    def fail(*args: Any) -> None:
        if engine.manager.state is state:
            raise RuntimeError("injected into vLLM")

    runner = engine.runner
    module = runner.get_model() if where == "forward" else runner.rejection_sampler
    return module.register_forward_pre_hook(fail)


@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_vllm_fails_between_begin_and_commit(where: str, cow: Engine) -> None:
    """The next step finds a log that nobody committed, drops it (it never reaches the
    cache) and counts it."""
    manager = cow.manager
    handle = vllm_fails(cow, where, State.LOGGED)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        cow.run(ALL)
    handle.remove()
    assert manager.state is State.LOGGED
    logged = manager._num_drafts
    cow.llm.abort_request([request.name for request in ALL])
    oracle = SnapshotOracle(cow.probe)
    with nwor_log() as lines:
        cow.run([Request("next", prompt(9, 20), 12)], [oracle])
    assert manager.fallbacks == {"stale_log": 1}
    assert lines == [
        f"WARNING NWOR stale_log: windows with {logged} drafts were dropped{VANILLA}"
    ]
    assert oracle.violations == []


def test_a_stale_log_raises_under_strict(cow: Engine, strict: None) -> None:
    handle = vllm_fails(cow, "forward", State.LOGGED)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        cow.run(ALL)
    handle.remove()
    cow.llm.abort_request([request.name for request in ALL])
    with pytest.raises(NworError, match=r"^NWOR stale_log: windows with"):
        cow.run([Request("next", prompt(9, 20), 12)])


@pytest.mark.nightly
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("op", REASONS)
def test_an_op_may_fail_at_every_call(
    op: str, late: bool, off: Baseline, cow: Engine
) -> None:
    num_calls = num_launches(cow, off.result)
    assert num_calls > 15
    for call in range(num_calls):
        error = RuntimeError(f"injected at call {call}")
        run_with_fault(cow, op, call, late, error, off.result)
    cow.run(ALL)


# --- a hook that is gone --------------------------------------------------------------


@pytest.fixture
def without_begin(
    cow: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """The running engine's forward is vLLM's own; the other hooks are there."""
    runner = cow.runner
    hooked = type(runner)._model_forward
    forward = hooked.__wrapped__

    def vanilla(*args: Any, **kwargs: Any) -> Any:
        cow.probe._tell("forward_begins")
        return forward(runner, *args, **kwargs)

    assert forward is not hooked
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_model_forward", vanilla)
        yield patched


def test_a_missed_begin_is_counted_and_a_breach(
    off: Baseline, cow: Engine, without_begin: pytest.MonkeyPatch
) -> None:
    """Guarantee 9. The windows that _calc_spec_decode_metadata announced go nowhere:
    the tokens are vanilla's, and it is not silent."""
    before = counters(cow)
    with nwor_log() as lines:
        found = cow.run(ALL)
    assert_same(found, off.result)
    sizes = [sum(step.drafted.values()) for step in found.steps if step.drafted]
    assert cow.manager.fallbacks == {"begin_missed": len(sizes)}
    rise = risen(cow, before)
    assert rise["nwor_breaches"] == len(sizes)
    assert rise["nwor_fallbacks/begin_missed"] == len(sizes)
    assert rise["nwor_tokens_staged"] == 0
    assert lines[0] == (
        f"WARNING NWOR begin_missed: {sizes[0]} drafts were sampled that begin never "
        f"saw{VANILLA}"
    )
    assert len([line for line in lines if "begin_missed" in line]) == 1
    forget_fallbacks(cow)
    without_begin.undo()
    assert_same(cow.run(ALL), off.result)
    assert cow.manager.fallbacks == {}


def test_a_missed_begin_raises_under_strict(
    cow: Engine, strict: None, without_begin: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NworError, match=r"^NWOR begin_missed: \d+ drafts were sampled"):
        cow.run(ALL)
    assert cow.manager.fallbacks == {"begin_missed": 1}


# --- clients --------------------------------------------------------------------------


# Where to abort VICTIM: before a step (abort_at) or while it runs (abort_during), of
# the steps that it is scheduled in, and of those in which it has drafts.
PHASES: dict[str, Callable[[list[int], list[int]], dict[str, int]]] = {
    "waiting": lambda steps, drafting: {"abort_at": steps[0] - 1},
    "in its first chunk": lambda steps, drafting: {"abort_during": steps[0]},
    "between its chunks": lambda steps, drafting: {"abort_at": steps[1]},
    "in its last chunk": lambda steps, drafting: {"abort_during": steps[1]},
    "between prefill and decode": lambda steps, drafting: {"abort_at": steps[2]},
    "with drafts proposed": lambda steps, drafting: {"abort_at": drafting[1]},
    "with drafts in flight": lambda steps, drafting: {"abort_during": drafting[1]},
    "before its last step": lambda steps, drafting: {"abort_at": steps[-1]},
    "in its last step": lambda steps, drafting: {"abort_during": steps[-1]},
}


def point(phase: str, result: Result) -> dict[str, int]:
    """A phase in the steps of a run in which nobody went away."""
    steps = [i for i, step in enumerate(result.steps) if "victim" in step.scheduled]
    drafting = [i for i in steps if "victim" in result.steps[i].drafted]
    assert steps[0] > VICTIM.at + 1, "the victim does not wait"
    assert steps[1] < drafting[0], "the prefill is not in chunks"
    return PHASES[phase](steps, drafting)


def num_free_blocks(engine: Engine) -> int:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks())


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_goes_away(phase: str, off: Baseline, cow: Engine) -> None:
    """The others' tokens are those of an engine without NWOR that lost the same
    client; the window in flight is counted as dropped; no block stays behind."""
    abort = point(phase, off.result)
    requests = [*SURVIVORS, replace(VICTIM, **abort), LATE]
    wanted = off.engine.run(requests)
    before, free = counters(cow), num_free_blocks(cow)
    oracle = SnapshotOracle(cow.probe)
    found = cow.run(requests, [oracle])
    assert_same(found, wanted)
    for request in (*SURVIVORS, LATE):
        assert found.tokens[request.name] == off.result.tokens[request.name]
        assert len(found.tokens[request.name]) == request.max_tokens
    assert oracle.violations == []
    assert cow.manager.fallbacks == {}
    assert num_free_blocks(cow) == free == num_free_blocks(off.engine)
    # It was the phase that the name says.
    ran = [step for step in found.steps if "victim" in step.scheduled]
    assert (phase == "waiting") == (ran == [])
    assert len(found.tokens.get("victim", [])) < VICTIM.max_tokens
    # Guarantee 7, also for the window that nobody counted.
    in_flight = "abort_during" in abort
    dropped = ran[-1].drafted.get("victim", 0) if in_flight and ran else 0
    rise = risen(cow, before)
    assert rise["nwor_dropped_drafts"] == dropped
    assert (dropped > 0) == (phase in ("with drafts in flight", "in its last step"))
    assert rise["nwor_tokens_staged"] == found.num_drafted
    assert found.num_drafted == rise["spec_decode_num_draft_tokens"] + dropped
    assert rise["nwor_committed_tokens"] == rise["spec_decode_num_accepted_tokens"]
    assert rise["nwor_breaches"] == 0


# --- engines of their own: the metrics are the newest one's from here on ------------


def test_windows_beyond_the_log_are_vanilla(off: Baseline) -> None:
    """Beyond VLLM_NWOR_MAX_LOG_ROWS, and counted; those that fit are protected."""
    engine = Engine("cow", {"MAX_LOG_ROWS": "4"}, **ARGUMENTS)
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    oracle, before = SnapshotOracle(engine.probe), counters(engine)
    with nwor_log() as lines:
        found = engine.run(ALL, [oracle])
    assert_same(found, off.result)
    sizes = [sum(step.drafted.values()) for step in found.steps]
    too_big = [number for number, size in enumerate(sizes) if size > 4]
    assert engine.manager.fallbacks == {"over_capacity": len(too_big)}
    assert lines == [
        f"WARNING NWOR over_capacity: {sizes[too_big[0]]} drafts do not fit the undo "
        f"log of 4 rows{VANILLA}"
    ]
    assert len(too_big) < sum(1 for size in sizes if size), "no window fitted"
    assert {violation.step for violation in oracle.violations} <= set(too_big)
    assert oracle.violations != []
    rise = risen(engine, before)
    assert rise["nwor_tokens_staged"] == sum(size for size in sizes if size <= 4)
    assert rise["nwor_fallbacks/over_capacity"] == len(too_big)
    assert 0 < rise["nwor_committed_tokens"] < rise["spec_decode_num_accepted_tokens"]
    assert rise["nwor_breaches"] == 0


# --- shadow pages ---------------------------------------------------------------------


def stage_engine(num_shadow_blocks: int) -> Engine:
    """One that can stage num_shadow_blocks / 4 requests: two blocks for each group."""
    name = "SHADOW_BLOCKS"
    try:
        return Engine("stage", {name: str(num_shadow_blocks)}, **ARGUMENTS)
    finally:
        os.environ.pop(f"VLLM_NWOR_{name}", None)


def resolved(engine: Engine) -> list[str]:
    return [info.resolved for info in engine.runner.nwor_state.infos]


def num_scheduler_blocks(engine: Engine) -> int:
    return int(engine.core.scheduler.kv_cache_config.num_blocks)


@pytest.fixture(scope="module")
def staged(off: Baseline) -> Engine:
    """For all requests of a step there are shadow blocks."""
    engine = stage_engine(8)
    assert resolved(engine) == ["stage"] * NUM_GROUPS
    assert num_scheduler_blocks(engine) == num_scheduler_blocks(off.engine) - 8
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def num_shadow_entries(engine: Engine) -> int:
    """Shadow blocks in the block tables, which are the host's own on this platform."""
    first = num_scheduler_blocks(engine)
    tables = engine.runner.input_batch.block_table.block_tables
    return sum(int((table.block_table.gpu >= first).sum()) for table in tables)


@pytest.fixture
def staged_ops(
    off: Baseline, staged: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.SimpleNamespace]:
    """The ops of `staged`, to be replaced. Afterwards its next run is as ever."""
    shadow = staged.manager.shadow
    ops = types.SimpleNamespace(
        stage=shadow.ops.stage,
        commit_draft_layer=shadow.ops.commit_draft_layer,
        unstage=shadow.ops.unstage,
    )
    with monkeypatch.context() as patched:
        patched.setattr(shadow, "ops", ops)
        yield ops
    staged.llm.abort_request([request.name for request in ALL])
    forget_fallbacks(staged)
    assert_same(staged.run(ALL), off.result)
    assert num_shadow_entries(staged) == 0
    assert staged.manager.fallbacks == {}
    assert staged.manager.state is State.IDLE


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [0, NUM_GROUPS + 1])
def test_a_step_that_cannot_be_staged_is_logged(
    call: int,
    late: bool,
    off: Baseline,
    staged: Engine,
    staged_ops: types.SimpleNamespace,
) -> None:
    error = RuntimeError("injected")
    staged_ops.stage = failing(staged_ops.stage, call, late, error)
    logged_before = staged.manager.counters[:, 4].tolist()
    with nwor_log() as lines:
        found = staged.run(ALL)
    assert_same(found, off.result)
    assert staged.manager.fallbacks == {"stage_failed": 1}
    (line,) = lines
    assert line.startswith(
        "WARNING NWOR stage_failed: stage: injected; the step uses the undo log"
    )
    (step,) = [step for step in found.steps if step.drafted][call // NUM_GROUPS :][:1]
    rejects = sum(step.drafted.values()) > sum(step.accepted.values())
    logged = staged.manager.counters[:, 4].tolist()
    assert (logged != logged_before) == rejects


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [0, NUM_GROUPS + 1])
def test_a_commit_from_shadow_pages_that_fails_ends_the_step(
    call: int, late: bool, staged: Engine, staged_ops: types.SimpleNamespace
) -> None:
    """No token goes out whose keys and values may be missing."""
    error = RuntimeError("injected")
    name = "commit_draft_layer"
    setattr(staged_ops, name, failing(getattr(staged_ops, name), call, late, error))
    expected = (
        f"NWOR commit_failed: {name}: injected; accepted tokens of this step are not "
        "in the KV cache"
    )
    with pytest.raises(NworError, match=f"^{re.escape(expected)}$"):
        staged.run(ALL)
    assert num_shadow_entries(staged) == 0
    assert staged.manager.fallbacks == {"commit_failed": 1}
    assert staged.manager.state is State.FAILED


@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_tables_are_put_back_as_soon_as_vllm_fails(
    where: str, staged: Engine, staged_ops: types.SimpleNamespace
) -> None:
    handle = vllm_fails(staged, where, State.STAGED)
    with (
        nwor_log() as lines,
        pytest.raises(RuntimeError, match=r"^injected into vLLM$"),
    ):
        staged.run(ALL)
    handle.remove()
    assert num_shadow_entries(staged) == 0
    assert staged.manager.state is State.IDLE
    assert staged.manager.fallbacks == {"step_failed": 1}
    (line,) = lines
    assert re.match(r"WARNING NWOR step_failed: windows with \d drafts were dr", line)


def test_a_table_that_cannot_be_put_back_does_not_hide_vllms_failure(
    staged: Engine, staged_ops: types.SimpleNamespace
) -> None:
    """One group's; the other's is put back all the same."""
    error = RuntimeError("injected")
    staged_ops.unstage = failing(staged_ops.unstage, 0, False, error)
    handle = vllm_fails(staged, "forward", State.STAGED)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        staged.run(ALL)
    handle.remove()
    tables = staged.runner.input_batch.block_table.block_tables
    first = num_scheduler_blocks(staged)
    is_patched = [bool((table.block_table.gpu >= first).any()) for table in tables]
    assert is_patched == [True, False]
    assert staged.manager.fallbacks == {"step_failed": 1}
    tables[0].block_table.gpu[tables[0].block_table.gpu >= first] = 0


def test_steps_with_more_requests_than_seats_are_logged(off: Baseline) -> None:
    engine = stage_engine(4)
    assert resolved(engine) == ["stage"] * NUM_GROUPS
    assert engine.manager.shadow.num_seats == 1
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    found = engine.run(ALL)
    assert_same(found, off.result)
    drafting = [step for step in found.steps if step.drafted]
    crowded = [step for step in drafting if len(step.scheduled) > 1]
    assert 0 < len(crowded) < len(drafting)
    assert engine.manager.fallbacks == {"no_seat": len(crowded)}
    columns = dict(
        zip(COUNTER_COLUMNS, engine.manager.counters[0].tolist(), strict=True)
    )
    assert columns["staged"] == found.num_drafted
    assert columns["committed"] == found.num_accepted
    assert columns["restored_bytes"] > 0
    assert columns["committed_bytes"] > 0


def test_a_worker_that_was_told_of_no_shadow_blocks_uses_the_log(
    off: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose engine core has no NWOR, or another vLLM."""
    build = discovery._build

    def build_without_mark(runner: Any, *args: Any) -> Any:
        del runner.kv_cache_config.nwor_shadow
        return build(runner, *args)

    monkeypatch.setattr(discovery, "_build", build_without_mark)
    engine = stage_engine(8)
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    assert resolved(engine) == ["cow"] * NUM_GROUPS
    for info in engine.runner.nwor_state.infos:
        assert info.reason.startswith(
            "no shadow pages: the engine core has reserved no blocks for them; "
        )
    assert engine.manager.shadow is None
    assert_same(engine.run(ALL), off.result)
    assert engine.manager.fallbacks == {}


def test_a_budget_of_no_blocks_reserves_none(off: Baseline) -> None:
    with nwor_log() as lines:
        engine = stage_engine(0)
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    assert resolved(engine) == ["cow"] * NUM_GROUPS
    assert num_scheduler_blocks(engine) == num_scheduler_blocks(off.engine)
    sentence = (
        "0 of 64 KV blocks may be shadow blocks, and a request needs 4 "
        "(VLLM_NWOR_SHADOW_BLOCKS raises the number)"
    )
    assert lines[0] == f"INFO NWOR: no shadow blocks: {sentence}"
    assert f"group 0: cow (no shadow pages: {sentence}; " in lines[1]
    assert_same(engine.run(ALL), off.result)


# --- start-up -------------------------------------------------------------------------


def test_no_memory_for_the_undo_log(
    monkeypatch: pytest.MonkeyPatch, off: Baseline
) -> None:
    """The engine starts all the same, unprotected, and says so."""
    empty = torch.empty

    def no_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if sys._getframe(1).f_globals["__name__"] == "vllm_nwor.device_memory":
            raise torch.OutOfMemoryError("injected: no memory for the log")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_memory)
    with nwor_log() as lines:
        engine = Engine("cow", **ARGUMENTS)
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    assert_same(engine.run(ALL), off.result)
    assert engine.manager is None
    (line,) = lines
    assert "no memory for the log" in line


# --- a vLLM that is not as expected ---------------------------------------------------


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


# --- processes ------------------------------------------------------------------------


SERVED_MODEL = "smollm2-135m"
SERVED_PROMPT = "one two three four one two three four one two three"
SERVED_TOKENS = 32
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}


def served(server: Server) -> str:
    answer = server.complete(SERVED_PROMPT, SERVED_TOKENS)
    return str(answer["choices"][0]["text"])


def plant_in_workers(server: Server, where: str) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/collective_rpc",
        json.dumps({"method": "plant", "args": [where]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60):
        pass


@pytest.fixture(scope="module")
def vanilla_text() -> str:
    """What an engine without NWOR answers to SERVED_PROMPT."""
    engine = Engine("off", model=SERVED_MODEL, speculative_config=SPECULATION)
    tokens = engine.llm.get_tokenizer().encode(SERVED_PROMPT)
    params = {"ignore_eos": False}
    request = Request("served", tuple(tokens), SERVED_TOKENS, params=params)
    return engine.run([request]).text["served"]


@pytest.mark.nightly
@pytest.mark.parametrize("where", worker_faults.POINTS)
def test_a_worker_dies_between_log_and_commit(
    where: str, vanilla_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets an error and no token that is wrong; the server ends, as vLLM's
    does; one that is started again serves what vLLM without NWOR does."""
    # As this suite's servers, plus a way into the workers, which vLLM has for tests.
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    arguments = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    arguments += ["--num-gpu-blocks-override", "64", "--block-size", "32"]
    arguments += ["--speculative-config", json.dumps(SPECULATION)]
    extended = [*arguments, "--worker-extension-cls", worker_faults.NAME]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with serve(first, "cow", SERVED_MODEL, *extended) as server:
        assert served(server) == vanilla_text
        assert server.metrics()["vllm:nwor_windows"] > 0
        plant_in_workers(server, where)
        with pytest.raises((urllib.error.HTTPError, urllib.error.URLError, OSError)):
            served(server)
        deadline = time.monotonic() + 120
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        assert server.process.poll() is not None, "the server goes on without a worker"
        assert worker_faults.MARK in server.log()
    with serve(second, "cow", SERVED_MODEL, *arguments) as server:
        assert served(server) == vanilla_text
        found = server.idle_metrics()
        assert found["vllm:nwor_breaches"] == 0
        assert "vllm:nwor_fallbacks" not in found
