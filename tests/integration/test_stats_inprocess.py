# SPDX-License-Identifier: Apache-2.0
"""Guarantee 7: the counters of a real engine against vLLM's own and the runner's steps.

The steps come from vLLM's metadata, vLLM's counts from `vllm:spec_decode_*`, NWOR's
from `get_metrics()`. Asynchronous outputs: tests/unit/test_metrics.py.
"""

import gc
import json
import os
import sys
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.ab import TURN_STEPS, UNHOOKED, Arm
from benchmarks.arguments import parse
from benchmarks.engine import Engine as BenchEngine
from benchmarks.engine import EngineFailed
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
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
from tests.helpers.environment import model_path, nwor_settings, run_python
from tests.helpers.player import check_identities, counters, risen
from vllm_nwor.metrics import COUNTERS
from vllm_nwor.plugin import register

# Some end within a window: vLLM counts accepted drafts, then truncates the tokens. One
# is aborted in flight: the worker has run the window, the scheduler does not count it.
REQUESTS = [
    Request("one", tuple(range(100, 130)), 40),
    Request("two", tuple(range(300, 320)), 25, at=2),
    Request("three", tuple(range(500, 540)), 30, at=5),
    Request("gone", tuple(range(700, 720)), 60, abort_during=9),
]


def test_counters_match_vllms_and_end_with_the_engine():
    """In mode off, or with the metrics off, there are none."""
    found = []
    modes = [(mode, "1") for mode in ("cow", "off", "stage", "off")]
    for mode, emits in (*modes, ("cow", "0")):
        engine = Engine(mode, {"EMIT_METRICS": emits}, disable_log_stats=False)
        before = counters(engine)
        metrics = (m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info")
        shown = [m.labels["resolved"] for m in metrics if m.value == 1]
        assert shown == [mode] * (mode != "off" and emits == "1"), "before it runs"
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
    """NWOR's counters against the steps and vLLM's counters."""
    accepted = rise["spec_decode_num_accepted_tokens"]
    drafted = rise["spec_decode_num_draft_tokens"]
    assert 0 < result.num_accepted < result.num_drafted
    num_rejected = result.num_drafted - result.num_accepted
    assert result.num_drafted - drafted == result.steps[9].drafted["gone"] > 0
    assert (rise["nwor_windows/stage"], rise["nwor_windows/cow"] > 0) == (0, True)
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
    """Qualified names of the functions of NWOR that run in a bench engine's steps."""

    FOLDER = vllm_nwor.__path__[0]

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


def test_cached_prompts_are_found_in_each_run_that_counts():
    argv = ["--against", "cow", "--model", "shape:tiny", "--batch-size", "2"]
    argv += ["--block-size", "32", "--context", "70", "--max-tokens", "8"]
    with nwor_settings({"MODE": "cow"}), threads(1):
        register()
        make_vllm_reusable()
        bench = BenchEngine(parse([*argv, "--cached-prompts"]), "cpu")
        hits, outputs = [0], []
        for arm in (UNHOOKED, Arm("cow", hooked=True)):
            outputs.append(bench.run(arm).outputs)
            hits.append(bench._counters()["vllm:prefix_cache_hits"])
        bench.prompts = [prompt[:32] for prompt in bench.prompts]  # less than a block
        with pytest.raises(EngineFailed, match="--cached-prompts: 0% of the tokens"):
            bench.run(arm)
        gc.unfreeze()
        bench.close()
    assert [b - a for a, b in pairwise(hits)] == [2 * 64, 2 * 64]
    assert outputs[0] == outputs[1]


def test_an_unhooked_engine_runs_only_vllms_code():
    argv = ["--against", "cow", "--model", "shape:tiny", "--batch-size", "2"]
    options = parse([*argv, "--context", "32", "--max-tokens", "64"])
    hooked = Arm("cow", hooked=True)
    with nwor_settings({"MODE": "cow"}), threads(1):
        register()
        make_vllm_reusable()
        bench = BenchEngine(options, "cpu")
        shown = SimpleNamespace(llm=bench._engine)
        add = bench._engine.add_request
        salts = []

        def adding(name: str, prompt: Any, parameters: Any) -> None:
            salts.append(prompt["cache_salt"])
            add(name, prompt, parameters)

        bench._engine.add_request = adding
        # Imports of modules pass `plugin._Alias`, which is not a hook.
        bench.run(UNHOOKED)
        frames = OurFrames(bench)
        outputs, rises, ours, done = [], [], [], []
        for arm, times in ((UNHOOKED, 0), (hooked, 0), (UNHOOKED, 0), (hooked, 1)):
            before = counters(shown)
            frames.names = set()
            run = bench.run(arm, times=bool(times))
            outputs.append(run.outputs)
            done.append(run.nwor)
            rises.append(risen(before, counters(shown)))
            ours.append(frames.names)
        before = counters(shown)
        mixed = bench.run(UNHOOKED, hooked)
        rise = risen(before, counters(shown))
        gc.unfreeze()
        bench.close()

    # No run finds blocks of another.
    assert len(salts) == 2 * len(set(salts)) == 2 * 6
    # Hooks were put on in the middle of requests.
    assert outputs == [mixed.outputs] * 4
    assert len(mixed.step_s) > TURN_STEPS
    assert 0 < rise["nwor_tokens_staged"] < rise["spec_decode_num_draft_tokens"]
    assert rise["nwor_breaches"] == 0
    for unhooked in (0, 2):
        assert ours[unhooked] == set()
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


def play(*modes: str) -> None:
    """Runs an LLM in each mode, in this order; prints the tokens and metrics of each as
    a line of JSON."""
    arguments: dict[str, Any] = DEFAULTS | {
        "model": model_path("tiny-llama"),
        "disable_log_stats": False,
        # The worker runs in the engine core's process.
        "distributed_executor_backend": (
            "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        ),
    }
    prompt = TokensPrompt(prompt_token_ids=[7, 8, 9] * 8)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    make_vllm_reusable()
    for mode in modes:
        os.environ["VLLM_NWOR_MODE"] = mode
        # An engine in this process starts sooner.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(mode != "off"))
        llm = LLM(**arguments)
        outputs = [llm.generate([prompt], params)[0].outputs[0] for _ in range(2)]
        del llm
        gc.collect()  # vLLM reads its variables again once the engine is gone
        os.environ.pop("VLLM_DIST_IDENT", None)  # of the first engine
        metrics = {m.name: getattr(m, "value", 0) for m in get_metrics_snapshot()}
        print(json.dumps([[list(output.token_ids) for output in outputs], metrics]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes", [("off", "stage"), pytest.param(("cow",), marks=pytest.mark.nightly)]
)
def test_a_front_end_whose_process_loaded_the_plugin_in_mode_off(modes):
    """It ignores the reports of an engine in another process; plugins are loaded once
    per process. AsyncLLM: tests/e2e/test_serve.py."""
    code = f"import {__name__} as of; of.play(*{modes!r})"
    done = run_python("-c", code, OMP_NUM_THREADS="1", VLLM_NWOR_MODE=modes[0])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = said.splitlines()
    played = [json.loads(line) for line in lines if line.startswith("[[")]
    assert len(played) == len(modes)
    for tokens, metrics in played:
        assert tokens == played[0][0]
        assert [len(one) for one in tokens] == [24, 24]
        assert metrics["vllm:spec_decode_num_drafts"] > 0
        if "off" in modes:
            assert not [name for name in metrics if "nwor" in name]
        else:
            check_identities(metrics)
            assert metrics["vllm:nwor_info"] == 1
    line = f"NWOR {modes[-1]} requested; group 0: {modes[-1]}"
    assert said.count(line) == 1, said
