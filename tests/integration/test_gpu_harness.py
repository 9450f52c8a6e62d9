# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' own parts on real engines: a CPU's with MLA, whose cache has rows as
on a GPU. Off, cow and stage run in processes of their own, watched by the byte oracle;
and a verdict has to name what is wrong in what they wrote. The V2 runner, which needs a
GPU, has a stand-in in tests/unit/test_gpu_harness.py.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from benchmarks import report

from tests.gpu import compare, test_poison, test_sleep
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import OFF, ON, Chain, Finished, Pool
from tests.gpu.rows import Row
from tests.helpers.player import Request

STAGE, CPU, FEW = "stage", BY_NAME["cpu-mla"], BY_NAME["cpu-mla-few-seats"]
V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
ROW, NAME = "batch 8", "eight/0"
# What vLLM compiles there counts the ranks of logprobs.
QUICK = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    pool = Pool(tmp_path_factory.mktemp("engines"))
    run = partial(pool.run, "matrix", **QUICK)
    specs, modes = (CPU, CPU, CPU, FEW), (OFF, ON, STAGE, STAGE)
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(run, specs, modes)
        return dict(zip((*modes[:3], FEW.name), found, strict=True))


@pytest.fixture
def changed(runs: Chain) -> Chain:
    """What was found with NWOR off and on, to be changed."""
    return {mode: copy.deepcopy(runs[mode]) for mode in (OFF, ON)}


def failing(runs: Chain, spec: EngineSpec = CPU) -> set[str]:
    """The checks that found something, and what could not be judged."""
    verdict = compare.judge(spec, runs)
    kinds = verdict["problems"] | {k: verdict[k] for k in ("unsettled", "unmet")}
    return {kind for kind, texts in kinds.items() if texts}


def line_of(found: dict[str, Any], **key: str) -> dict[str, Any]:
    key |= {"engine": CPU.name, "vllm": "0.32.0"}
    return {"key": key, "date": "today UTC", "commit": "abc", "found": found}


@pytest.mark.parametrize("mode", [ON, STAGE])
def test_verdict_of_a_healthy_engine(runs, mode, monkeypatch):
    monkeypatch.setattr(compare, "ON", mode)
    chain = {OFF: runs[OFF], mode: runs[mode]}
    verdict = compare.judge(CPU, chain)
    assert failing(chain) == set(), verdict
    assert verdict["rows"][ROW]["dirty_slots_restored"] > 0
    assert verdict["facts"]["resolved"] == [mode]
    assert not verdict["facts"].keys() & {"targets", "protected"}


def test_verdict_where_some_windows_lack_a_seat(runs, monkeypatch):
    monkeypatch.setattr(compare, "ON", STAGE)
    few, all_have = ({OFF: runs[OFF], STAGE: runs[name]} for name in (FEW.name, STAGE))
    assert failing(few, FEW) == set(), compare.judge(FEW, few)
    for runs_of_other, spec in ((few, CPU), (all_have, FEW)):
        assert failing(runs_of_other, spec) == {"bytes", "counters"}
    seen = few[STAGE].report["watched"][ROW]
    counts = seen["device_counters"]
    assert counts["shadow_windows"] == seen["watch"][0]["num_shadow_windows"]
    assert 0 < counts["shadow_windows"] < counts["windows"]
    assert counts["restored_bytes"] > 0 < counts["committed_bytes"]
    assert not any(seen["fallbacks"].values())


def change(found: Any, *path: Any) -> None:
    """Sets a value: the last of `path`, or what that makes of the old one."""
    *keys, last, value = path
    for key in keys:
        found = found[key]
    found[last] = value(found[last]) if callable(value) else value


def one_more(number: int) -> int:
    return number + 1


def others(positions: tuple[int, ...], digests: list[list[int]]) -> list[list[int]]:
    """Other digests at these positions of each step's three."""
    return [[n + (i in positions) for i, n in enumerate(step)] for step in digests]


PLAIN, WATCHED, SEEN = ("plain", ROW), ("watched", ROW), ("watched", ROW, "watch", 0)
STEP, DIGESTS = (*SEEN, "steps", 0), (ON, *SEEN, "digests")
DEVICE = (ON, *WATCHED, "device_counters")
ERRORS = [
    (mode, name, ROW, "finish", NAME, "error")
    for mode in (OFF, ON)
    for name in compare.PASSES
]
# What is changed, each to its last item, and the checks that must fail.
TROUBLE: dict[str, tuple[list[tuple[Any, ...]], set[str]]] = {
    "token": ([(ON, *PLAIN, "tokens", NAME, 0, one_more)], {"outputs"}),
    "logprob": ([(ON, *WATCHED, "logprobs", NAME, 0, [[1, 0.5, 1]])], {"outputs"}),
    "batch": ([(ON, *PLAIN, "batches", 1, [[NAME, 1]])], {"outputs"}),
    "byte": ([(*DIGESTS, partial(others, (1, 2)))], {"digests"}),
    "other blocks": ([(*DIGESTS, partial(others, (0, 1)))], set()),
    "other blocks, byte": ([(*DIGESTS, partial(others, (0, 1, 2)))], {"digests"}),
    "other steps": ([(ON, *STEP, "tokens", one_more)], {"digests"}),
    "vanilla strays": ([(OFF, *SEEN, "violations_by_kind", "stray", 1)], {"vanilla"}),
    "vanilla is clean": ([(OFF, *SEEN, "violations_by_kind", {})], {"vanilla"}),
    "violation": ([(ON, *SEEN, "violations", [{"kind": "a"}])], {"bytes"}),
    "nothing dirty": ([(ON, *SEEN, "num_dirty_slots", 0)], {"bytes"}),
    "nothing accepted": ([(ON, *SEEN, "num_accepted", 0)], {"rows", "counters"}),
    "unprotected": ([(ON, "facts", "protected", "layers", [])], {"bytes"}),
    "resolved": ([(ON, "facts", "resolved", ["native"])], {"bytes"}),
    "breach": ([(ON, *WATCHED, "counters", "nwor_breaches", 1)], {"counters"}),
    "fallback": ([(ON, *PLAIN, "counters", "nwor_fallbacks/a", 1)], {"counters"}),
    "dropped": ([(ON, *PLAIN, "counters", "nwor_dropped_drafts", 1)], {"counters"}),
    "accepted": (
        [(ON, *PLAIN, "counters", "spec_decode_num_accepted_tokens", one_more)],
        {"counters", "outputs"},
    ),
    "restored": ([(*DEVICE, "restored_bytes", one_more)], {"counters"}),
    "windows": ([(*DEVICE, "windows", one_more)], {"counters"}),
    "mode": ([(*DEVICE, "shadow_windows", one_more)], {"counters"}),
    "mode in metrics": (
        [(ON, *PLAIN, "counters", "nwor_windows/cow", lambda num: num - 1)],
        {"counters"},
    ),
    "worker's fallback": ([(ON, *WATCHED, "fallbacks", {"a": 1})], {"counters"}),
    "gauge": ([(ON, "info", ["native"])], {"counters"}),
    "runner": ([(OFF, "facts", "runner", V2)], {"rows"}),
    "order": ([(ON, "facts", "async_scheduling", True)], {"rows"}),
    "graph": ([(mode, *STEP, "graph", "FULL") for mode in (OFF, ON)], {"rows"}),
    "vanilla varies": ([(OFF, *PLAIN, "tokens", NAME, 0, one_more)], {"unsettled"}),
    # Alike outputs do not make alike caches: what a step writes depends on the batch.
    "vanilla batches otherwise": (
        [(OFF, *PLAIN, "batches", 1, []), (ON, *STEP, "tokens", one_more)],
        {"unsettled"},
    ),
    "not finished": ([(ON, "finished", False), (ON, "watched", {})], {"started"}),
    "vanilla's error": (ERRORS, {"unmet"}),
    "vanilla's error, token": (
        [*ERRORS, (ON, *PLAIN, "tokens", "eight/1", 0, one_more)],
        {"unmet", "outputs"},
    ),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_verdict_names_the_trouble(changed, trouble):
    changes, wanted = TROUBLE[trouble]
    for mode, *path in changes:
        change(changed[mode].report, *path)
    assert failing(changed) == wanted


SLEPT = {
    "nothing": ((ON, "live", ROW, "num_steps", 0), "none"),
    "byte": ((ON, "live", ROW, "watch", 0, "violations", [{"kind": "a"}]), "bytes"),
    "token": ((ON, "live", ROW, "tokens", NAME, 0, one_more), "outputs"),
    "vanilla's token": (
        (OFF, "live", ROW, "tokens", NAME, 0, one_more),
        "none, outputs of 1 rows not compared",
    ),
    "counter": ((ON, "live", ROW, "counters", "nwor_breaches", 1), "counters"),
    "interrupted token": ((ON, "live", "interrupted", "tokens", {}), "outputs"),
    "nobody ran": ((ON, "live", "interrupted", "num_live", 0), "outputs"),
    "interrupted counter": (
        (ON, "live", "interrupted", "device_counters", "staged", one_more),
        "counters",
    ),
}


@pytest.mark.parametrize("trouble", SLEPT)
def test_what_is_saved_of_an_engine_that_slept(changed, trouble):
    (mode, *path), shown = SLEPT[trouble]
    for run in changed.values():
        phase = {"memory": {"pools": {}}, ROW: run.report["watched"][ROW]}
        interrupted = run.report["plain"][ROW] | {"num_live": 8}
        live = copy.deepcopy(phase | {"interrupted": interrupted})
        run.report.update(awake=phase, live=live)
    change(changed[mode].report, *path)
    (entry,) = test_sleep.entries(CPU, changed).values()
    row = report.rendered("sleep", [line_of(entry, mode=ON)]).splitlines()[-1]
    assert row.split(" | ")[5] == f"awake: none; live: {shown}"
    num_live = entry[ON]["phases"]["live"]["interrupted"]["num_live"]
    assert num_live == 8 * (trouble != "nobody ran")


def test_a_worker_that_trims_drafts_runs_fewer_than_vllm_counts(changed):
    trimming = replace(CPU, adaptive=True)
    for by, wrong in ((1, set()), (-2, {"counters"})):
        for run in changed.values():
            drafts = run.report["plain"][ROW]["counters"]
            drafts["spec_decode_num_draft_tokens"] += by
        assert failing(changed, trimming) == wrong
        assert failing(changed) == {"counters"}


@pytest.mark.parametrize(
    ("need", "path", "missing", "there"),
    [
        ("preempted", ("watch", 0, "steps", 0, "preempted"), 0, 1),
        ("chunked", ("watch", 0, "steps", 0, "tokens"), 400, 10),
        ("cached", ("cached",), {}, {NAME: 16}),
        ("structured", ("finish", "grammar/0"), "error", "stop"),
        ("dropped", ("counters", "nwor_dropped_drafts"), 0, 1),
        ("different", ("tokens",), {"0_a": [1], "1_a": [1]}, {"0_a": [1], "1_a": [2]}),
    ],
)
def test_a_row_must_do_what_it_is_about(changed, need, path, missing, there):
    long = Request("long", (0,) * 400, 1)
    row = Row(ROW, ((long,),), frozenset({need}))
    result = changed[ON].report["watched"][ROW]
    for value, wanted in ((missing, [f"nothing was {need}"]), (there, [])):
        change(result, *path, value)
        spec = replace(CPU, asynchronous=True)
        assert list(compare.needs_problems(spec, row, result)) == wanted


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    pool = Pool(tmp_path_factory.mktemp("filled"))
    return pool.run("poison", CPU, OFF, **QUICK)


def verdicts_of(run: Finished) -> dict[str, str]:
    entry = test_poison.judge(CPU, run)
    return {name: entry[name]["verdict"] for name in ("poison", "taken", "nan")}


def test_what_slots_that_nobody_has_written_may_hold(filled):
    """CPU_MLA minds no NaN, as tests/integration/test_poison.py has it."""
    filled.whole()
    runs = {CPU.name: test_poison.judge(CPU, filled)}
    test_poison.test_poison_changes_no_output(runs, CPU.name)
    test_poison.test_poison_in_a_written_slot_shows(runs, CPU.name)
    assert runs[CPU.name]["nan"]["verdict"] == test_poison.UNCHANGED
    shown = report.rendered("poisoned", [line_of(runs[CPU.name])]).splitlines()[-1]
    assert [cell.strip() for cell in shown.split("|")[1:-1]] == [
        *("cpu-mla", "CPU_MLA, bf16", "EAGER", "V1", "1 of 1"),
        *("outputs unchanged", "outputs unchanged", "outputs differ", "today", "abc"),
    ]


@pytest.mark.parametrize(
    ("path", "name", "wanted"),
    [
        (("poison", ROW, "tokens", NAME, 0, one_more), "poison", "DIFFER"),
        (("nan", ROW, "logprobs", NAME, 0, [[1, float("nan"), 1]]), "nan", "NAN"),
        (("again", ROW, "tokens", NAME, 0, one_more), "poison", "UNSETTLED"),
        (("nan", {}), "nan", "FAILED"),
        (("plain", {}), "poison", "FAILED"),
    ],
)
def test_what_filled_slots_changed_is_in_the_verdict(filled, path, name, wanted):
    run = copy.deepcopy(filled)
    change(run.report, *path)
    assert verdicts_of(run)[name] == getattr(test_poison, wanted)
