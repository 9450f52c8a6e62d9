# SPDX-License-Identifier: Apache-2.0
"""Guarantees 6 and 8, point by point: every call of every op, every kind of error, a
client that goes away in every phase of its request, memory that cannot be had, a worker
that dies between log and commit, a vLLM that has changed; and exactly what NWOR says.

No failure of NWOR's own may lose or change a token; each is counted, logged once and
visible in metrics; VLLM_NWOR_STRICT raises instead. The engines of this file are shared
by its tests. Not covered: faults inside a kernel (they kill the engine, as vLLM's own
do); CUDA, sleep and weight reload (tests/gpu/test_faults.py and test_sleep.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from vllm.v1.worker import gpu_model_runner

from tests.helpers import seam, worker_probe
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import (
    Engine,
    Request,
    Result,
    assert_same,
    counts,
    prompt,
)
from tests.helpers.environment import REPO, nwor_settings
from tests.helpers.logs import nwor_log
from tests.helpers.oracle import SnapshotOracle
from tests.helpers.player import check_identities, counters, risen
from tests.helpers.server import ARGUMENTS as SERVE_ARGUMENTS
from tests.helpers.server import SPECULATION, Server, serve
from vllm_nwor import plugin
from vllm_nwor.config import Strict
from vllm_nwor.draft_manager import NworError, State
from vllm_nwor.hooks import _wrap
from vllm_nwor.hooks._wrap import HostMismatch
from vllm_nwor.report import Report

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
def cow_engine(off: Baseline) -> Engine:
    """Made after the other one: get_metrics() shows the newest engine's counters."""
    engine = Engine("cow", **ARGUMENTS)
    assert len(engine.manager.counters) == NUM_GROUPS
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def forget_fallbacks(engine: Engine) -> None:
    """They are counted, logged and reported as from the start."""
    engine.manager.fallbacks.clear()
    engine.runner.nwor_state.report = Report([], engine.manager)


@pytest.fixture
def cow(cow_engine: Engine) -> Iterator[Engine]:
    """After each test nothing is left of its faults."""
    yield cow_engine
    forget_fallbacks(cow_engine)
    assert cow_engine.manager.state is State.IDLE
    assert not cow_engine.llm.has_unfinished_requests()


# --- ops ------------------------------------------------------------------------------


@contextmanager
def failing_op(engine: Engine, name: str, *how: Any) -> Iterator[None]:
    """That op of the engine's fails as `seam.failing` says."""
    with seam.of(engine.manager) as ops:
        setattr(ops, name, seam.failing(getattr(ops, name), *how))
        yield


REASONS = {
    "log_cache_slots": "begin_failed",
    "restore_rejected_drafts": "commit_failed",
}
PLAIN = "; the step ran as plain vLLM (further ones are counted in vllm:nwor_fallbacks)"
# Which call fails (None: every one; "each": one after the other, a run each), whether
# after its work, and what it raises.
FAULTS: dict[str, tuple[int | str | None, bool, Exception]] = {
    "no memory": (4, False, MemoryError("injected: no memory")),
    "no device memory": (5, True, torch.OutOfMemoryError("injected: none left")),
    "always before": (None, False, RuntimeError("injected")),
    "always after": (None, True, RuntimeError("injected")),
    "each before": ("each", False, RuntimeError("injected")),
    "each after": ("each", True, RuntimeError("injected")),
}
NIGHTLY = [name for name, fault in FAULTS.items() if fault[0] == "each"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name
        for name in FAULTS
    ],
)
@pytest.mark.parametrize("op", REASONS)
def test_an_op_that_fails_loses_nothing(
    op: str, fault: str, off: Baseline, cow: Engine
) -> None:
    """Each failure is counted once. The cache: rejected slots hold old or new bytes,
    all else is as vanilla."""
    at, late, error = FAULTS[fault]
    # Of each op one for each table and step with drafts.
    num_calls = NUM_GROUPS * sum(1 for step in off.result.steps if step.drafted)
    assert num_calls > 15
    manager, reason = cow.manager, REASONS[op]
    for call in range(num_calls) if at == "each" else [at]:
        forget_fallbacks(cow)
        oracle, before = SnapshotOracle(cow.probe), counters(cow)
        with nwor_log() as lines, failing_op(cow, op, call, late, error):
            found = cow.run(ALL, [oracle])
        assert_same(found, off.result)
        assert lines == [f"WARNING NWOR {reason}: {op}: {error}{PLAIN}"]
        num_failed = num_calls // NUM_GROUPS if call is None else 1
        assert manager.fallbacks == {reason: num_failed}
        assert {violation.kind for violation in oracle.violations} <= {"not restored"}
        assert len({violation.step for violation in oracle.violations}) <= num_failed
        # They are in the metrics, and no breach of the counters' identities.
        rise = risen(before, counters(cow))
        assert rise[f"nwor_fallbacks/{reason}"] == num_failed
        assert rise["nwor_breaches"] == 0
        if call is None:
            assert late or oracle.violations != []
            continue
        # FAILED lasts until a step has drafts again.
        restores = op == "restore_rejected_drafts"
        is_last = restores and call >= num_calls - NUM_GROUPS
        assert manager.state is (State.FAILED if is_last else State.IDLE)
        if restores:
            # One group's restore failed; the other group's was done all the same.
            layers = {layer.name for layer in manager.groups[call % NUM_GROUPS].layers}
            assert {violation.layer for violation in oracle.violations} <= layers
    cow.run([LATE])


# --- vLLM fails, a hook is gone -------------------------------------------------------


@contextmanager
def vllm_failing(engine: Engine, where: str, state: State) -> Iterator[None]:
    """vLLM raises there, in that state, which ends the block and the requests."""

    def fail(*args: Any) -> None:
        if engine.manager.state is state:
            raise RuntimeError("injected into vLLM")

    runner = engine.runner
    module = runner.get_model() if where == "forward" else runner.rejection_sampler
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        yield
    handle.remove()


# The state in which a strict engine stops, and the message behind the reason; one for
# each hook that raises.
STRICT = {
    "begin_failed": (State.PLAIN, "log_cache_slots: injected$"),
    "commit_failed": (State.FAILED, "restore_rejected_drafts: injected$"),
    "stale_log": (State.IDLE, r"windows with \d+ drafts were dropped"),
    "begin_missed": (State.IDLE, r"\d+ drafts were sampled that begin never saw"),
}


@pytest.mark.parametrize("reason", STRICT)
def test_strict_raises_where_the_default_falls_back(reason: str, cow: Engine) -> None:
    """VLLM_NWOR_STRICT=always. Afterwards a run is as ever."""
    state, message = STRICT[reason]
    manager, runner = cow.manager, cow.runner
    config = replace(manager.config, strictness=Strict.ALWAYS)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(manager, "config", config))
        for op in (op for op in REASONS if REASONS[op] == reason):
            stack.enter_context(failing_op(cow, op, None))
        if reason == "begin_missed":
            # The forward is vLLM's own; the other hooks are there.
            forward = partial(type(runner)._model_forward.__wrapped__, runner)
            stack.enter_context(mock.patch.object(runner, "_model_forward", forward))
        if reason == "stale_log":
            with vllm_failing(cow, "forward", State.LOGGED):
                cow.run(ALL)
            cow.llm.abort_request([request.name for request in ALL])
        with pytest.raises(NworError, match=f"^NWOR {reason}: {message}"):
            cow.run(ALL)
    assert manager.state is state
    assert manager.fallbacks == {reason: 1}
    cow.llm.abort_request([request.name for request in ALL])
    cow.run([LATE])


# --- clients --------------------------------------------------------------------------


# Where to abort VICTIM: before a step or while it runs, of the steps that it is
# scheduled in (its second one has its last chunk), or of those in which it has drafts.
PHASES: dict[str, tuple[str, str, int]] = {
    "waiting": ("abort_at", "waiting", 0),
    "in its first chunk": ("abort_during", "scheduled", 0),
    "between its chunks": ("abort_at", "scheduled", 1),
    "in its last chunk": ("abort_during", "scheduled", 1),
    "between prefill and decode": ("abort_at", "scheduled", 2),
    "with drafts proposed": ("abort_at", "drafted", 1),
    "with drafts in flight": ("abort_during", "drafted", 1),
    "before its last step": ("abort_at", "scheduled", -1),
    "in its last step": ("abort_during", "scheduled", -1),
}


def num_free_blocks(engine: Engine) -> int:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks())


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_goes_away(phase: str, off: Baseline, cow: Engine) -> None:
    """The others' tokens are those of an engine without NWOR that lost the same
    client; the window in flight is counted as dropped; no block stays behind."""
    how, of_steps, number = PHASES[phase]
    steps = {
        what: [n for n, step in enumerate(off.result.steps) if "victim" in names(step)]
        for what, names in (
            ("scheduled", attrgetter("scheduled")),
            ("drafted", attrgetter("drafted")),
        )
    }
    first, last_chunk, *_ = steps["scheduled"]
    steps["waiting"] = [first - 1]
    assert first > VICTIM.at + 1, "the victim does not wait"
    assert last_chunk < steps["drafted"][0], "the prefill is not in chunks"
    victim = replace(VICTIM, **{how: steps[of_steps][number]})
    requests = [*SURVIVORS, victim, LATE]
    expected = off.engine.run(requests)
    before, free = counters(cow), num_free_blocks(cow)
    oracle = SnapshotOracle(cow.probe)
    found = cow.run(requests, [oracle])
    assert_same(found, expected)
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
    dropped = ran[-1].drafted.get("victim", 0) if how == "abort_during" else 0
    rise = risen(before, counters(cow))
    assert rise["nwor_dropped_drafts"] == dropped
    assert (dropped > 0) == (phase in ("with drafts in flight", "in its last step"))
    assert rise["nwor_tokens_staged"] == found.num_drafted
    check_identities(rise)


# --- shadow blocks: the metrics are the newest engine's from here on ---------------


def resolved(engine: Engine) -> list[str]:
    return [info.resolved for info in engine.runner.nwor_state.infos]


def num_scheduler_blocks(engine: Engine) -> int:
    return int(engine.core.scheduler.kv_cache_config.num_blocks)


@pytest.fixture(scope="module")
def staged(off: Baseline) -> Engine:
    """For both requests of a step there are shadow blocks: two for each group."""
    engine = Engine("stage", {"SHADOW_BLOCKS": "8"}, **ARGUMENTS)
    assert resolved(engine) == ["stage"] * NUM_GROUPS
    assert num_scheduler_blocks(engine) == num_scheduler_blocks(off.engine) - 8
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def shadow_entries(engine: Engine) -> list[int]:
    """Shadow blocks in each block table, which are the host's own on this platform."""
    first = num_scheduler_blocks(engine)
    tables = engine.runner.input_batch.block_table.block_tables
    return [int((table.block_table.gpu >= first).sum()) for table in tables]


@pytest.fixture
def stage(off: Baseline, staged: Engine) -> Iterator[Engine]:
    """`staged`, which afterwards runs as ever."""
    yield staged
    staged.llm.abort_request([request.name for request in ALL])
    forget_fallbacks(staged)
    assert_same(staged.run(ALL), off.result)
    assert shadow_entries(staged) == [0, 0]
    assert staged.manager.fallbacks == {}
    assert staged.manager.state is State.IDLE


# What fails (an op's call, of the first group or of the second one, before or after it
# did its work, or vLLM itself), and what is counted. A step that cannot be staged is
# logged; from a commit that fails no token goes out whose keys and values may be
# missing.
STAGED = {
    ("stage", 0, True): "stage_failed",
    ("stage", NUM_GROUPS + 1, False): "stage_failed",
    ("commit_draft_layer", 0, True): "commit_failed",
    ("commit_draft_layer", NUM_GROUPS + 1, False): "commit_failed",
    ("forward",): "step_failed",
    ("sampler",): "step_failed",
}
LOGGED = {
    "stage_failed": (
        State.IDLE,
        "WARNING NWOR stage_failed: stage: injected; the step uses the undo log",
    ),
    "commit_failed": (
        State.FAILED,
        "NWOR commit_failed: commit_draft_layer: injected; accepted tokens of this "
        "step are not in the KV cache",
    ),
    "step_failed": (State.IDLE, "WARNING NWOR step_failed: windows with "),
}


@pytest.mark.parametrize("fault", STAGED, ids=str)
def test_tables_are_put_back_whatever_fails(
    fault: Any, off: Baseline, stage: Engine
) -> None:
    reason, before = STAGED[fault], counts(stage)["restored_bytes"]
    state, expected = LOGGED[reason]
    fails: Any = failing_op
    ends: Any = nullcontext()
    if reason == "step_failed":
        fails, fault = vllm_failing, (*fault, State.STAGED)
    if reason == "commit_failed":
        ends = pytest.raises(NworError, match=f"^{re.escape(expected)}$")
    with nwor_log() as lines, fails(stage, *fault), ends:
        found = stage.run(ALL)
    if reason == "stage_failed":
        assert_same(found, off.result)
        windowed = [step for step in found.steps if step.drafted]
        step = windowed[fault[1] // NUM_GROUPS]
        rejects = sum(step.drafted.values()) > sum(step.accepted.values())
        assert (counts(stage)["restored_bytes"] > before) == rejects
    if reason != "commit_failed":
        (line,) = lines
        assert line.startswith(expected)
    assert shadow_entries(stage) == [0, 0]
    assert stage.manager.fallbacks == {reason: 1}
    assert stage.manager.state is state


def test_without_shadow_blocks_and_beyond_the_log(off: Baseline) -> None:
    """A budget of no shadow blocks reserves none: the groups are logged. Windows beyond
    VLLM_NWOR_MAX_LOG_ROWS are vanilla, and counted; those that fit are protected."""
    engine = Engine("stage", {"SHADOW_BLOCKS": "0", "MAX_LOG_ROWS": "4"}, **ARGUMENTS)
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    assert resolved(engine) == ["cow"] * NUM_GROUPS
    assert num_scheduler_blocks(engine) == num_scheduler_blocks(off.engine)
    oracle, before = SnapshotOracle(engine.probe), counters(engine)
    with nwor_log() as lines:
        found = engine.run(ALL, [oracle])
    assert_same(found, off.result)
    sizes = [sum(step.drafted.values()) for step in found.steps]
    too_big = [number for number, size in enumerate(sizes) if size > 4]
    assert engine.manager.fallbacks == {"over_capacity": len(too_big)}
    assert lines == [
        f"WARNING NWOR over_capacity: {sizes[too_big[0]]} drafts do not fit the undo "
        f"log of 4 rows{PLAIN}"
    ]
    assert len(too_big) < sum(1 for size in sizes if size), "no window fitted"
    assert {violation.step for violation in oracle.violations} <= set(too_big)
    assert oracle.violations != []
    rise = risen(before, counters(engine))
    assert rise["nwor_tokens_staged"] == sum(size for size in sizes if size <= 4)
    assert rise["nwor_fallbacks/over_capacity"] == len(too_big)
    assert 0 < rise["nwor_committed_tokens"] < rise["spec_decode_num_accepted_tokens"]
    assert rise["nwor_breaches"] == 0


# --- a vLLM that is not as expected ---------------------------------------------------


MISMATCH = (
    f"{gpu_model_runner.__name__}.GPUModelRunner._sample has parameters (self, hidden, "
    "spec_decode_metadata); expected it to begin with (self, logits, "
    "spec_decode_metadata)"
)
# vLLM's own ngram drafter has something to propose.
REPEATING = [Request("repeating", tuple(range(10, 40)) * 2, 20)]


@contextmanager
def renamed_parameter(strict: str = "0") -> Iterator[None]:
    """NWOR meets a vLLM with another name in a signature of the V1 runner. Raises
    HostMismatch if strict."""
    with nwor_settings({"MODE": "cow"}):
        plugin.register()
    runner = gpu_model_runner.GPUModelRunner
    hooks = [hook for hook in _wrap._hooks if hook.module is gpu_model_runner]
    with ExitStack() as afterwards:
        afterwards.callback(_wrap.rehook)
        patch = afterwards.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_wrap, "_hooks", hooks)
        _wrap.unhook()
        original = runner._sample

        def _sample(self: Any, hidden: Any, spec_decode_metadata: Any) -> Any:
            return original(self, hidden, spec_decode_metadata)

        patch.setattr(runner, "_sample", _sample)
        patch.setattr(_wrap, "_hooks", [])
        afterwards.callback(_wrap.unhook)
        with nwor_settings({"MODE": "cow", "STRICT": strict}):
            plugin._guarded(plugin.HOOKS[gpu_model_runner.__name__])(gpu_model_runner)
        yield


def check_refused(engine: Engine, lines: list[str], reason: str) -> str:
    """By name: one line in the log, which is returned, and a row of the gauge, which is
    there also when NWOR was asked for and refused."""
    assert engine.manager is None
    (line,) = lines
    assert reason in line
    info, *_ = (m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info")
    assert (info.labels["requested"], info.labels["resolved"]) == ("cow", "off")
    assert reason in info.labels["reason"]
    return line


def test_another_vllm_runs_as_vanilla(
    off: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(off.engine.runner, "propose_draft_token_ids")
        vanilla = off.engine.run(REPEATING)
    with nwor_log() as lines, renamed_parameter():
        engine = Engine("cow", **ARGUMENTS)
        found = engine.run(REPEATING)
    assert_same(found, vanilla)
    assert vanilla.num_drafted > 0
    line = check_refused(engine, lines, MISMATCH)
    assert line == f"ERROR NWOR is off for {gpu_model_runner.__name__}: {MISMATCH}"
    message = f"^{re.escape(MISMATCH)}$"
    with pytest.raises(HostMismatch, match=message), renamed_parameter("1"):
        pass


def test_nothing_is_protected_without_speculation() -> None:
    reason = "no speculative decoding is configured"
    arguments = ARGUMENTS | {"speculative_config": None}
    with nwor_log() as lines:
        engine = Engine("cow", **arguments)
        engine.run(REPEATING)
    line = check_refused(engine, lines, reason)
    groups = "; ".join(f"group {n}: off ({reason})" for n in range(NUM_GROUPS))
    assert line == f"WARNING NWOR cow requested; {groups}"
    expected = f"NWOR cow requested, refused: {groups}"
    with pytest.raises(NworError, match=f"^{re.escape(expected)}$"):
        Engine("cow", {"STRICT": "1"}, **arguments)


# --- processes ------------------------------------------------------------------------


SERVED = "one two three four one two three four one two three"


def served(server: Server) -> str:
    return str(server.complete(SERVED, 32)["choices"][0]["text"])


@pytest.fixture(scope="module")
def vanilla_text() -> str:
    """What an engine without NWOR answers to SERVED."""
    engine = Engine("off", model="smollm2-135m", speculative_config=SPECULATION)
    tokens = engine.llm.get_tokenizer().encode(SERVED)
    request = Request("served", tuple(tokens), 32, params={"ignore_eos": False})
    return engine.run([request]).text["served"]


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["forward", "sampler"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_dies_between_log_and_commit(
    how: str,
    where: str,
    vanilla_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client gets an error and no token that is wrong; the server ends, as vLLM's
    does; one that is started again serves what vLLM without NWOR does."""
    # As this suite's servers, plus a way into the workers, which vLLM has for tests.
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    arguments = ["smollm2-135m", *SERVE_ARGUMENTS]
    extended = [*arguments, "--worker-extension-cls", worker_probe.NAME]
    with serve(tmp_path, "cow", *extended) as server:
        assert served(server) == vanilla_text
        assert server.metrics()["vllm:nwor_windows"] > 0
        call = {"method": "plant", "args": [how, where]}
        url = f"{server.url}/collective_rpc"
        httpx.post(url, json=call, timeout=60).raise_for_status()
        with pytest.raises(httpx.HTTPError):
            served(server)
        deadline = time.monotonic() + 120
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        assert server.process.poll() is not None, "the server goes on without a worker"
        assert worker_probe.PLANTED in server.log()
    with serve(tmp_path, "cow", *arguments) as server:
        assert served(server) == vanilla_text
        found = server.idle_metrics()
        assert found["vllm:nwor_breaches"] == 0
        assert found["vllm:nwor_fallbacks"] == 0
