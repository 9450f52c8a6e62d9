# SPDX-License-Identifier: Apache-2.0
"""The counters of a real engine, in process, against vLLM's own and the runner's steps.

Guarantee 7. What the windows really did is taken from vLLM's metadata by the helpers'
observers, what vLLM counted from its `vllm:spec_decode_*` counters; ours come out of
`get_metrics()`, after the whole way from the commit op. The CPU runner reports within
its step: asynchronous outputs are covered by tests/unit/test_metrics.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from inspect import getattr_static
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.ab import UNHOOKED, Arm
from benchmarks.arguments import parse
from benchmarks.engine import Engine as BenchEngine
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

import vllm_nwor
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import (
    DEFAULTS,
    Engine,
    Request,
    Result,
    make_vllm_reusable,
    threads,
)
from tests.helpers.environment import REPO, model_path, nwor_settings, subprocess_env
from tests.helpers.player import check_identities, counters, risen
from vllm_nwor.hooks import _wrap, runner_v1, stats
from vllm_nwor.metrics import COUNTERS
from vllm_nwor.plugin import register

LEDGER = (*runner_v1.LEDGER, *stats.LEDGER)

# Some end within a window: vLLM counts what was accepted, then cuts the tokens beyond.
# One is aborted in flight: the worker is done, the scheduler never counts the window.
REQUESTS = [
    Request("one", tuple(range(100, 130)), 40),
    Request("two", tuple(range(300, 320)), 25, at=2),
    Request("three", tuple(range(500, 540)), 30, at=5),
    Request("gone", tuple(range(700, 720)), 60, abort_during=9),
]


def test_counters_are_vllms_own_and_leave_no_series_to_the_next_engine():
    """Without the mode, or with the metrics off, there are none."""
    found = []
    modes = [(mode, "1") for mode in ("cow", "off", "stage", "off")]
    for mode, emits in (*modes, ("cow", "0")):
        engine = Engine(mode, {"EMIT_METRICS": emits}, disable_log_stats=False)
        before = counters(engine)
        if not found:
            assert {before[f"nwor_{name}"] for name in COUNTERS} == {0}
            ScriptedDrafter(truth_of(engine, REQUESTS), mixture).attach(engine.runner)
            before = counters(engine)
        result = engine.run(REQUESTS)
        if not found:
            check_metrics(engine, result, risen(before, counters(engine)))
        found.append({metric.name for metric in engine.llm.get_metrics()})

    logged, after, staged, again, unwanted = found
    assert {f"vllm:nwor_{name}" for name in COUNTERS} < logged == staged
    assert {name for name in logged if "nwor" not in name} == after == again == unwanted


def check_metrics(engine: Engine, result: Result, rise: dict[str, int]) -> None:
    """Our counters against the steps, and against what vLLM counted of them."""
    accepted = rise["spec_decode_num_accepted_tokens"]
    drafted = rise["spec_decode_num_draft_tokens"]
    assert 0 < result.num_accepted < result.num_drafted
    num_rejected = result.num_drafted - result.num_accepted
    assert result.num_drafted - drafted == result.steps[9].drafted["gone"] > 0
    assert {name: rise[f"nwor_{name}"] for name in COUNTERS} == {
        "windows": sum(len(step.drafted) for step in result.steps),
        "tokens_staged": result.num_drafted,
        "committed_tokens": accepted,
        "rejected_tokens": drafted - accepted,
        "dropped_drafts": result.num_drafted - drafted,
        "restored_bytes": num_rejected * engine.manager.log_bytes_per_draft,
        "shadow_copied_bytes": 0,
        "committed_bytes": 0,
        "breaches": 0,
    }


class OurFrames:
    """The functions of NWOR that run in a bench engine's steps, by qualified name."""

    FOLDER = str(Path(vllm_nwor.__path__[0]).resolve())

    def __init__(self, bench: BenchEngine) -> None:
        self.names: set[str] = set()
        self._step = bench._engine.step
        bench._engine.step = self._watched

    def _watched(self) -> Any:
        sys.setprofile(self._see)
        try:
            return self._step()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.FOLDER):
            self.names.add(frame.f_code.co_qualname)


def test_an_unhooked_engine_runs_vllms_code_only_and_a_rehooked_one_counts_on():
    argv = ["--against", "cow", "--model", "shape:tiny", "--batch-size", "2"]
    options = parse([*argv, "--context", "32", "--max-tokens", "64"])
    hooked = Arm("cow", hooked=True)
    with nwor_settings({"MODE": "cow"}), threads(1):
        register()
        make_vllm_reusable()
        bench = BenchEngine(options, "cpu")
        hooks = [hook for hook in _wrap._hooks if hook.target in LEDGER]
        shown = SimpleNamespace(llm=bench._engine)
        bench.run(
            UNHOOKED
        )  # imports modules, past `plugin._Alias`, which is not a hook
        frames = OurFrames(bench)
        outputs, rises, ours, installed, done = [], [], [], [], []
        for arm, times in ((UNHOOKED, 0), (hooked, 0), (UNHOOKED, 0), (hooked, 1)):
            before = counters(shown)
            frames.names = set()
            run = bench.run(arm, times=bool(times))
            outputs.append(run.outputs)
            done.append(run.nwor)
            rises.append(risen(before, counters(shown)))
            ours.append(frames.names)
            installed.append([getattr_static(h.owner, h.name) for h in hooks])
        gc.unfreeze()
        bench.close()

    assert outputs == outputs[:1] * 4
    # That one is checked, and replaced on a scheduler for some steps.
    assert {hook.target for hook in hooks} == {*LEDGER} - {stats.COUNT}
    for unhooked in (0, 2):
        assert ours[unhooked] == set()
        assert {type(found) for found in installed[unhooked]} == {FunctionType}
        assert all(
            found is hook.wrapper.__wrapped__
            and found.__module__ == hook.owner.__module__
            for found, hook in zip(installed[unhooked], hooks, strict=True)
        )
        rise = rises[unhooked]
        assert rise["spec_decode_num_draft_tokens"] > 0
        assert {num for name, num in rise.items() if name.startswith("nwor_")} == {0}
    assert done[0] is done[2] is None
    assert done[1].begin_us == done[1].commit_us == []
    assert min(done[3].begin_us + done[3].commit_us) > 0
    assert 0 < len(done[3].begin_us) == len(done[3].commit_us)
    for names, rise, found in zip(ours[1::2], rises[1::2], done[1::2], strict=True):
        assert found.counts["staged"] == rise["nwor_tokens_staged"]
        assert found.counts["logged_bytes"] > 0
        assert {"_model_forward", "_sample", "_update_from_output", "_record"} <= names
        assert rise["nwor_dropped_drafts"] == 0
        check_identities(rise)


UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
PROMPT = TokensPrompt(prompt_token_ids=[7, 8, 9] * 8)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def by_llm(arguments: dict[str, Any]) -> list[RequestOutput]:
    llm = LLM(**arguments)
    return [llm.generate([PROMPT], PARAMS)[0] for _ in range(2)]


async def by_async_llm(arguments: dict[str, Any]) -> list[RequestOutput]:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    outputs = [
        [output async for output in llm.generate(PROMPT, PARAMS, str(number))][-1]
        for number in range(2)
    ]
    llm.shutdown()
    return outputs


def across_processes() -> dict[str, Any]:
    arguments = {"model": model_path("tiny-llama"), "disable_log_stats": False}
    # No process for the worker beside the engine core.
    arguments["distributed_executor_backend"] = UNIPROC
    return DEFAULTS | arguments


@pytest.mark.nightly
def test_llm_get_metrics_shows_them_across_processes(monkeypatch):
    """As a server does in tests/e2e/test_serve.py, by vLLM's other front end."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)  # of engines here
    with nwor_settings({"MODE": "cow"}), threads(1):
        register()
        by_llm(across_processes())
    metrics = get_metrics_snapshot()
    found = {m.name: m.value for m in metrics if hasattr(m, "value")}
    check_identities(found)
    assert found["vllm:nwor_info"] == 1


def switch_the_mode_on(second: str) -> None:
    """An LLM with the mode off, then `second` with stage in the environment; prints the
    tokens and the names of the metrics of each, in a line of JSON."""
    for mode, front_end in (("off", "LLM"), ("stage", second)):
        os.environ["VLLM_NWOR_MODE"] = mode
        # The first one's engine is in this process, which starts sooner.
        is_apart = str(int(mode != "off"))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = is_apart
        if front_end == "LLM":
            outputs = by_llm(across_processes())
        else:
            outputs = asyncio.run(by_async_llm(across_processes()))
        os.environ.pop("VLLM_DIST_IDENT", None)  # of the first engine
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([tokens, [metric.name for metric in get_metrics_snapshot()]]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "front_end", ["LLM", pytest.param("AsyncLLM", marks=pytest.mark.nightly)]
)
def test_a_front_end_without_nwor_ignores_reports(front_end):
    """Plugins are loaded once a process: front ends in one that had the mode off then
    know nothing of reports, whatever is asked for later; engines in processes of their
    own run with it, and send them."""
    code = f"import {__name__} as of; of.switch_the_mode_on({front_end!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=subprocess_env(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    played = [json.loads(line) for line in lines if line.startswith("[[")]
    (vanilla, _), _ = played
    assert [len(tokens) for tokens in vanilla] == [24, 24]
    for tokens, names in played:
        assert tokens == vanilla
        assert "vllm:spec_decode_num_drafts" in names
        assert not [name for name in names if "nwor" in name]
    line = "NWOR stage requested; group 0: stage"
    assert done.stdout.count(line) == 1, done.stdout
