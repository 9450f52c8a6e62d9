# SPDX-License-Identifier: Apache-2.0
"""Guarantees 6 and 8 under injected faults: ops that raise, requests that are aborted
in each phase, workers that die, a vLLM with another signature.

No failure of NWOR may lose or change a token. Each is counted, logged once and shown in
the metrics; VLLM_NWOR_STRICT raises instead. Not covered: faults inside a kernel, which
end the process; CUDA and sleep mode (tests/gpu/test_faults.py, test_sleep.py).
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from vllm.v1.worker import gpu_model_runner

from tests.helpers import seam, worker_probe
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import Engine, Request, Result, assert_same, counts, prompt
from tests.helpers.environment import REPO, nwor_settings
from tests.helpers.logs import nwor_log
from tests.helpers.oracle import SnapshotOracle
from tests.helpers.player import check_identities, counters, risen
from tests.helpers.runner_probe import observer_of
from tests.helpers.server import ARGUMENTS as SERVE_ARGUMENTS
from tests.helpers.server import SPECULATION, Server, serve
from vllm_nwor import plugin
from vllm_nwor.base import wrap as _wrap
from vllm_nwor.base.wrap import HostMismatch
from vllm_nwor.config import Strict
from vllm_nwor.transaction.counters import Report
from vllm_nwor.transaction.draft_manager import NworError, State

pytestmark = pytest.mark.e2e


# Two KV-cache groups, so that an op can fail for one of them. Two requests run at a
# time; the third waits.
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
# Longer than a step's token budget of 256: chunked prefill.
VICTIM = Request("victim", prompt(3, 400), 24, at=2)
LATE = Request("late", prompt(4, 25), 12, at=30)
ALL = [*SURVIVORS, VICTIM, LATE]


@dataclass(frozen=True)
class Baseline:
    """The engine without NWOR, and its run without faults."""

    engine: Engine
    truth: dict[str, list[int]]
    result: Result


@pytest.fixture(scope="module")
def off():
    engine = Engine("off", **ARGUMENTS)
    truth = truth_of(engine, ALL)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    return Baseline(engine, truth, engine.run(ALL))


@pytest.fixture(scope="module")
def cow_engine(off):
    """Created after `off`: get_metrics() shows the newest engine's counters."""
    engine = Engine("cow", **ARGUMENTS)
    assert len(engine.manager.counters) == NUM_GROUPS
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def forget_fallbacks(engine: Engine) -> None:
    """Resets counting, logging and reporting of fallbacks."""
    engine.manager.fallbacks.clear()
    transaction = observer_of(engine.runner, "transaction")
    transaction.payload = Report([], engine.manager).take_payload
    engine.runner.nwor_state.refresh()


@pytest.fixture
def cow(cow_engine):
    """The engine; after each test it has no request and no fault."""
    yield cow_engine
    forget_fallbacks(cow_engine)
    assert cow_engine.manager.state is State.IDLE
    assert not cow_engine.llm.has_unfinished_requests()


# --- ops ------------------------------------------------------------------------------


@contextmanager
def failing_op(engine: Engine, name: str, *how: Any) -> Iterator[None]:
    """Makes that op fail; how: the arguments of `seam.failing`."""
    with seam.of(engine.manager) as ops:
        setattr(ops, name, seam.failing(getattr(ops, name), *how))
        yield


REASONS = {
    "log_cache_slots": "begin_failed",
    "restore_rejected_drafts": "commit_failed",
}
PLAIN = "; the step ran as plain vLLM (further ones are counted in vllm:nwor_fallbacks)"
# Which call fails (None: all; "each": one per run, in turn), whether it fails after its
# work, and the exception.
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
def test_an_op_that_fails_loses_nothing(op, fault, off, cow):
    """Each failure is counted once. Rejected slots hold their old or new bytes, all
    other bytes are those of plain vLLM."""
    at, late, error = FAULTS[fault]
    # One call per layer table and step with drafts.
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
        # Shown in the metrics, and no breach.
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
            # The other group was still restored.
            layers = {layer.name for layer in manager.groups[call % NUM_GROUPS].layers}
            assert {violation.layer for violation in oracle.violations} <= layers
    cow.run([LATE])


# --- strict mode ----------------------------------------------------------------------


@contextmanager
def vllm_failing(engine: Engine, where: str, state: State) -> Iterator[None]:
    """vLLM raises there when the manager is in that state; expects the exception."""

    def fail(*args: Any) -> None:
        if engine.manager.state is state:
            raise RuntimeError("injected into vLLM")

    runner = engine.runner
    module = runner.get_model() if where == "forward" else runner.rejection_sampler
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^injected into vLLM$"):
        yield
    handle.remove()


# For each hook that raises: the state in which a strict engine stops, and the message.
STRICT = {
    "begin_failed": (State.PLAIN, "log_cache_slots: injected$"),
    "commit_failed": (State.FAILED, "restore_rejected_drafts: injected$"),
    "stale_log": (State.IDLE, r"windows with \d+ drafts were dropped"),
    "begin_missed": (State.IDLE, r"\d+ drafts were sampled that begin never saw"),
}


@pytest.mark.parametrize("reason", STRICT)
def test_strict_raises_instead_of_falling_back(reason, cow):
    """VLLM_NWOR_STRICT=always. A later run without faults succeeds."""
    state, message = STRICT[reason]
    manager, runner = cow.manager, cow.runner
    config = replace(manager.config, strictness=Strict.ALWAYS)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(manager, "config", config))
        for op in (op for op in REASONS if REASONS[op] == reason):
            stack.enter_context(failing_op(cow, op, None))
        if reason == "begin_missed":
            # Only the hook around the forward is missing.
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


# --- aborted requests -----------------------------------------------------------------


# When VICTIM is aborted: before or during which of the steps that schedule it (the
# second one has its last chunk), or of those in which it has drafts.
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
def test_aborting_a_request_in_any_phase(phase, off, cow):
    """The other requests' tokens are those of the engine without NWOR; a window in
    flight is counted as dropped; all blocks are freed."""
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
    # The abort came in the intended phase.
    ran = [step for step in found.steps if "victim" in step.scheduled]
    assert (phase == "waiting") == (ran == [])
    assert len(found.tokens.get("victim", [])) < VICTIM.max_tokens
    # Guarantee 7, with the window that vLLM does not count.
    dropped = ran[-1].drafted.get("victim", 0) if how == "abort_during" else 0
    rise = risen(before, counters(cow))
    assert rise["nwor_dropped_drafts"] == dropped
    assert (dropped > 0) == (phase in ("with drafts in flight", "in its last step"))
    assert rise["nwor_tokens_staged"] == found.num_drafted
    check_identities(rise)


# --- shadow blocks: get_metrics() shows the newest engine's counters ----------------


def resolved(engine: Engine) -> list[str]:
    return [info.resolved for info in engine.infos]


def num_scheduler_blocks(engine: Engine) -> int:
    return int(engine.core.scheduler.kv_cache_config.num_blocks)


@pytest.fixture(scope="module")
def staged(off):
    """Two shadow blocks per group for each of the two requests of a step."""
    engine = Engine("stage", {"SHADOW_BLOCKS": "8"}, **ARGUMENTS)
    assert resolved(engine) == ["stage"] * NUM_GROUPS
    assert num_scheduler_blocks(engine) == num_scheduler_blocks(off.engine) - 8
    ScriptedDrafter(off.truth, mixture).attach(engine.runner)
    return engine


def shadow_entries(engine: Engine) -> list[int]:
    """The number of shadow blocks in each block table."""
    first = num_scheduler_blocks(engine)
    tables = engine.runner.input_batch.block_table.block_tables
    return [int((table.block_table.gpu >= first).sum()) for table in tables]


@pytest.fixture
def stage(off, staged):
    """`staged`; after each test it runs without faults."""
    yield staged
    staged.llm.abort_request([request.name for request in ALL])
    forget_fallbacks(staged)
    assert_same(staged.run(ALL), off.result)
    assert shadow_entries(staged) == [0, 0]
    assert staged.manager.fallbacks == {}
    assert staged.manager.state is State.IDLE


# What fails (a call of an op, of the first group or the second, before or after its
# work; or vLLM itself), and the reason that is counted. A step that cannot be staged is
# logged. A failed commit raises, since keys and values of accepted tokens may be
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
def test_block_tables_are_restored_whatever_fails(fault, off, stage):
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


def test_no_shadow_blocks_and_a_log_that_is_too_small(off):
    """VLLM_NWOR_SHADOW_BLOCKS=0: the groups are logged. A step with more drafts than
    VLLM_NWOR_MAX_LOG_ROWS runs as plain vLLM and is counted; others are protected."""
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


# --- refusals -------------------------------------------------------------------------


MISMATCH = (
    f"{gpu_model_runner.__name__}.GPUModelRunner._sample has parameters (self, hidden, "
    "spec_decode_metadata); expected it to begin with (self, logits, "
    "spec_decode_metadata)"
)
# vLLM's ngram drafter has something to propose.
REPEATING = [Request("repeating", tuple(range(10, 40)) * 2, 20)]


@contextmanager
def renamed_parameter(strict: str = "0") -> Iterator[None]:
    """The V1 runner has a parameter with another name. Raises HostMismatch if
    strict."""
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
    """One line in the log, which is returned, and a row of the gauge name the
    reason."""
    assert engine.manager is None
    (line,) = lines
    assert reason in line
    info, *_ = (m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info")
    assert (info.labels["requested"], info.labels["resolved"]) == ("cow", "off")
    assert reason in info.labels["reason"]
    return line


def test_a_vllm_with_another_signature_runs_as_plain_vllm(off, monkeypatch):
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


def test_without_speculation_nothing_is_protected():
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


# --- a worker that dies ---------------------------------------------------------------


SERVED = "one two three four one two three four one two three"


def served(server: Server) -> str:
    return str(server.complete(SERVED, 32)["choices"][0]["text"])


@pytest.fixture(scope="module")
def vanilla_text():
    """The answer of an engine without NWOR to SERVED."""
    engine = Engine("off", model="smollm2-135m", speculative_config=SPECULATION)
    tokens = engine.llm.get_tokenizer().encode(SERVED)
    request = Request("served", tuple(tokens), 32, params={"ignore_eos": False})
    return engine.run([request]).text["served"]


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["forward", "sampler"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_dies_before_commit(how, where, vanilla_text, tmp_path, monkeypatch):
    """The client gets an error and no wrong token; the server ends; a new server gives
    the answer of vLLM without NWOR."""
    # vLLM's development mode gives access to the workers.
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
