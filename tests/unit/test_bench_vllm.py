# SPDX-License-Identifier: Apache-2.0
"""bench_vllm.py, both programs of tools/gpu and bench_kernels.py: what the numbers are
made of, and that there is none where an output or a byte is wrong.

No engine runs here: a stand-in gives runs with known tokens and times.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benchmarks import ab, files, records, settings, summary
from benchmarks.ab import NworDone, Run
from benchmarks.arguments import parse, without_compare_only
from benchmarks.engine import Engine, EngineFailed
from benchmarks.worker_extension import NworWorkerExtension

import bench_kernels
import bench_vllm
from tools.gpu import bench as cells
from tools.gpu import host_profile
from vllm_nwor import ops
from vllm_nwor.base import wrap as _wrap
from vllm_nwor.hooks.runner import RunnerState
from vllm_nwor.transaction.observer import Transaction

TOKENS = [[11, 12, 13], [21, 22, 23, 24]]
COUNTS = {"windows": 5, "staged": 20, "committed": 12, "rejected": 8}
COUNTS |= {"invalid_slots": 0, "restored_bytes": 800, "logged_bytes": 2000}
COUNTS |= {"shadow_copied_bytes": 0, "committed_bytes": 0}


def make_run(active: bool, seconds: float = 1.0, tokens=TOKENS) -> Run:
    drafts = {"windows": 5, "drafted": 20, "accepted": 12}
    return Run(
        outputs=[list(ids) for ids in tokens],
        step_s=[seconds / 2, seconds / 2],
        num_steps=[1, 2],
        drafts=drafts | {"accepted_per_position": [5, 4, 2, 1]},
        nwor=NworDone(COUNTS, [10.0, 30.0], [5.0, 15.0]) if active else None,
    )


# Of the process that never loads NWOR.
TRUE_OFF = {
    "outputs": {"tokens": TOKENS},
    "engine": {"kv_blocks": 70},
    "tokens_per_second": [14 / 3, 7 / 3, 28 / 3],
    "summary": {"speed": {"off": summary.speed([make_run(False)])}},
}


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """What programs get for an engine, whose runs are make_run's, on the device cpu, in
    an empty directory; and for the process that never loads NWOR."""

    def run_off(command, **_) -> SimpleNamespace:
        asked = parse(command[2:])
        assert (asked.mode, asked.nwor_mode, asked.repeats) == ("off", "off", 7)
        asked.json.write_text(json.dumps(TRUE_OFF))
        return SimpleNamespace(returncode=0)

    group = {"group": 0, "requested": "stage", "resolved": "cow", "reason": "why"}
    found = {"kv_blocks": 64, "groups": [group], "fallbacks": {}}
    target, ids = settings.Model("somewhere", "fake-model", False), [[1, 2], [3, 4]]
    engine = Mock(spec=Engine, target=target, drafter=None, prompts=ids, start_s=0.1)
    engine.run.side_effect = lambda *arms, **_: make_run(arms[0].hooked)
    engine.report.return_value = found | {"log_bytes_per_draft": 9, "log_bytes": 99}
    engine.encode.return_value = ids
    processes = SimpleNamespace(run=run_off, DEVNULL=None)
    monkeypatch.setattr(bench_vllm, "subprocess", processes)
    monkeypatch.setattr(bench_vllm, "find_models", lambda options: None)
    for module in (bench_vllm, cells):
        monkeypatch.setattr(module, "device_for", lambda options: "cpu")
        monkeypatch.setattr(module, "prepare_process", lambda options, on: None)
        monkeypatch.setattr(module, "Engine", lambda options, on: engine)
    monkeypatch.chdir(tmp_path)
    return engine


# --- how sure a ratio is


def test_interval_of_thirteen_values_is_the_known_one():
    """The bootstrap median of 13 ordered values is at most the j-th with probability
    P(Binomial(13, j / 13) >= 7): 0.016 for j = 3 and 0.071 for j = 4, so that the 5th
    percentile is the fourth value (the 10th is not) and, by symmetry, the 95th the
    tenth."""
    found = ab.median_interval([13, 7, 3, 1, 5, 2, 6, 4, 12, 8, 11, 9, 10])
    assert (found.low, found.median, found.high, found.reach) == (4, 7, 10, 3)


def test_a_ratio_is_of_turns_as_they_mostly_were():
    """The test takes a tenth longer in its second turn of three, the last one short. In
    each round something held up another turn of either side; and in the first turn time
    goes from a step to its neighbour, more of it in the test."""
    num_turns, pairs = 3, []
    for number in range(9):
        runs = []
        for is_test in (False, False, True):
            step_s = [1.0] * (num_turns * ab.TURN_STEPS - 6)
            step_s[number % 5] -= 0.2 + 0.3 * is_test
            step_s[number % 5 + 1] += 0.2 + 0.3 * is_test
            step_s[ab.TURN_STEPS + 3] += 1.6 * is_test
            step_s[(number + is_test) % num_turns * ab.TURN_STEPS] += 50
            runs.append(replace(make_run(False), step_s=step_s))
        pairs.append(ab.Pair("nwor", (runs[0], runs[1]), runs[2]))
    found = ab.intervals(pairs)["nwor"]
    assert found.median == pytest.approx(42 / 43.6)
    assert found.low <= found.median <= found.high


@pytest.mark.parametrize(("noise", "num_pairs"), [(0.0, 7), (0.5, 12)])
def test_pairs_are_added_until_the_intervals_are_narrow(noise, num_pairs):
    draw = random.Random(1)

    def run(*arms: ab.Arm, turn_steps: int) -> Run:
        return make_run(arms[0].hooked, 1 + noise * draw.random())

    arms = [ab.UNHOOKED, ab.Arm("nwor", hooked=True)]
    pairs = ab.compare(run, arms, 7, 0.005, 12, lambda what: None)
    assert len(pairs) == 2 * num_pairs
    found = summary.comparison(pairs, "unhooked", 0.005, {})
    assert found["until_reached"] is (num_pairs == 7)


@pytest.mark.parametrize(
    ("median", "low", "control", "verdict"),
    [
        (0.998, 0.9950, (0.999, 1.001), "met"),
        (0.998, 0.9949, (0.999, 1.001), "missed"),
        # Also a median above 1: what counts is the low end.
        (1.002, 0.9949, (0.999, 1.001), "missed"),
        (0.998, 0.9949, (0.998, 1.001), "not resolved"),
        (0.998, 0.9950, (0.998, 1.001), "not resolved, low end holds"),
        # The control is away from 1: by as much the low end has to be better.
        (0.999, 0.9970, (0.996, 0.998), "met"),
        (0.999, 0.9969, (0.996, 0.998), "missed"),
        (0.997, 0.9959, (1.001, 1.002), "missed"),
    ],
)
def test_met_goes_by_the_low_end_never_by_the_control(median, low, control, verdict):
    noise = dict(zip(("low", "high"), control, strict=True))
    assert summary.verdict({"median": median, "low": low}, noise) == verdict


# --- bench_vllm.py


def written(words: str) -> dict[str, Any]:
    """The line that bench_vllm.py appends with these arguments."""
    assert bench_vllm.main([*words.split(), "--json", "results/a.jsonl"]) == 0
    (line,) = records.read("a", Path("results"))
    return line


@pytest.mark.parametrize(("unit", "size"), [(1.0, 4), (2**-17, 6), (2**-30, 16)])
def test_each_arm_makes_every_step_of_a_round_once(unit, size):
    """Step n takes as long as its arm says, times 2**n: no other steps have the sum of
    all of an arm's. A run of three turns, the last one short; the machine is twice as
    slow in every second round. Turns have fewer steps where a step takes long."""
    num_steps = 2 * size + 3
    cost, ran = {"unhooked": 8, "cow": 10, "stage": 16}, []

    def run(*arms: ab.Arm, turn_steps: int) -> Run:
        ran.append([arm.name for arm in arms])
        slow = unit * (1 + (len(ran) > 3 + 4))
        of_step = [arms[n // turn_steps % len(arms)] for n in range(num_steps)]
        step_s = [slow * cost[arm.name] * 2.0**n for n, arm in enumerate(of_step)]
        return replace(make_run(False), step_s=step_s, num_steps=[3, num_steps])

    arms = [ab.UNHOOKED, *(ab.Arm(name, hooked=True) for name in ("cow", "stage"))]
    pairs = ab.compare(run, arms, 2, None, 2, lambda what: None)
    for pair, slow in zip(pairs, [unit] * 3 + [2 * unit] * 3, strict=True):
        expected = cost.get(pair.name, 8)
        assert pair.test.seconds == slow * expected * (2**num_steps - 1)
        assert pair.test.latency_s == [slow * expected * 7, pair.test.seconds]
        assert pair.ratio == pytest.approx(8 / expected)
        # The first step of each turn finds the hooks changed.
        bits = [2**size - 2, 4**size - 2 ** (size + 1), 2**num_steps - 2 * 4**size]
        assert pair.test.turn_s == [slow * expected * of_turn for of_turn in bits]
    # After the warm-ups: the baseline is between any two, which change places.
    assert ran[3] == ["unhooked", "cow", "unhooked", "stage"]
    assert ran[7] == ["unhooked", "stage", "unhooked", "cow"]


def test_ratios_are_to_both_baselines_and_host_times_of_other_runs(engine, capsys):
    """7 tokens a run. The process that never loaded NWOR made 14/3 a second, the
    unhooked runs 7, and their controls 7/3."""
    # The warm-ups; rounds, in which runs of two steps are turns; those that are timed.
    seconds = iter([9.0, 9.0, *[1.0, 4.0, 3.0] * 7, *[1.0] * 4, 6.0])

    def run(*arms: ab.Arm, times: bool = False, turn_steps: int = 0) -> Run:
        return make_run(arms[0].hooked, next(seconds))

    engine.run.side_effect = run
    result = written("")
    assert result["pairs"] == {"nwor": [0.5] * 7, "control": [0.333333] * 7}
    names = ("cell", "batch", "runner", "drafter", "mode")
    key = [result["key"][name] for name in names]
    assert key == ["bench_vllm.py", 4, "V1", "ngram", "nwor"]
    assert result["summary"]["speed"]["unhooked"]["num_runs"] == 14
    assert result["summary"]["acceptance"]["per_position"] == [1.0, 0.8, 0.4, 0.2]
    did = result["summary"]["nwor"]["nwor"]
    assert (did["staged"], did["logged_bytes"]) == (5 * 20, 5 * 2000)
    # Of (10, 30) and (5, 15) us, in runs of two seconds on average.
    host = did["host"]
    assert (host["begin_us_median"], host["commit_us_median"]) == (20, 10)
    assert host["share_of_time"] == pytest.approx(30e-6)
    printed = capsys.readouterr().out
    last = "nwor costs 50.0 % of the throughput (50.0 to 50.0); noise of this machine"
    assert printed.splitlines()[-1] == f"  {last} 66.7 %"
    assert "read each ratio together with its control" in printed
    assert "outputs identical in all 28 runs" in printed
    assert "unhooked / off (own process)  1.0000  0.5000 to 2.0000" in printed
    assert "KV blocks that NWOR costs: 6" in printed


def test_the_process_without_nwor_gets_no_argument_of_compare_alone():
    argv = ["--against", "cow", "--pairs-until-ci=0.01", "--no-true-off"]
    argv += ["--batch-size", "2"]
    found = without_compare_only([*argv, "--against=stage"])
    assert found == ["--batch-size", "2"]
    assert parse(argv).against == "cow"


FINE = make_run(True)
CHANGED = make_run(True, tokens=[[11, 12, 13], [21, 22, 99, 24]])
SHORTER = make_run(True, tokens=[[11, 12, 13], [21, 22]])
DIFFER = "no speed is printed, outputs differ: request 1 differs at output token 2: "
# Arguments, runs, exit status and message.
NO_RESULT = [
    (
        *("--no-true-off", [*[FINE] * 6, CHANGED], 1),
        f"{DIFFER}unhooked gave token 23, nwor first of round 2 gave token 99",
    ),
    (
        *("--no-true-off", [FINE, SHORTER], 1),
        f"{DIFFER}unhooked gave token 23, the warm-up of nwor gave its end after 2",
    ),
    (
        *("", [CHANGED], 1),
        f"{DIFFER}an engine without NWOR gave token 23, the warm-up of unhooked gave",
    ),
    (
        *("--mode off", [FINE, CHANGED], 1),
        f"{DIFFER}an earlier run gave token 23, off, 1 gave token 99",
    ),
    ("--no-true-off", [EngineFailed("not active: why")], 1, "not active: why"),
    ("--repeats 6", [], 2, "argument --repeats: '6'"),
    (
        *("--mode off --against cow", [], 2),
        "argument --against: 'cow' cannot be used; it is for --mode compare, and the",
    ),
    ("--mode off --pairs-until-ci 0.1", [], 2, "argument --pairs-until-ci: '0.1' can"),
    ("--mode off --no-true-off", [], 2, "argument --true-off: 'False' cannot be used"),
    ("--cached-prompts --against audit", [], 2, "argument --cached-prompts: 'True'"),
    ("--json .", [], 2, "argument --json: '.' cannot be used; it is a folder; allowed"),
    ("--method eagle", [], 2, "argument --draft-model: 'None' cannot be used; needed"),
    (
        *("--kv-transfer-config [1]", [], 2),
        "argument --kv-transfer-config: '[1]' is not allowed; allowed: JSON objects",
    ),
]


@pytest.mark.parametrize(("words", "runs", "status", "said"), NO_RESULT)
def test_no_speed_if_outputs_differ(
    words, runs, status, said, engine, capsys, tmp_path
):
    engine.run.side_effect = runs
    assert bench_vllm.main(["--json", "a.json", *words.split()]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"bench_vllm.py: {said}")
    assert list(tmp_path.iterdir()) == []
    assert engine.run.call_count == len(runs)


# --- what is written


def test_a_result_has_rounded_floats_and_no_folder_of_the_machine():
    count = 8_931_508_224.0  # Prometheus' are floats
    content = {
        "command": "python a.py --json=/root/out/b.json /x/y results/c.json",
        "/tmp/key": ['File "/usr/lib/d.py", line 1', "a/b/c", "https://e/f/g"],
        "floats": [1.00144999987, {"samples": (1 / 3, 1e-5, count)}],
    }
    assert files.recorded(content) == {
        "command": "python a.py --json=b.json y results/c.json",
        "key": ['File "d.py", line 1', "a/b/c", "https://e/f/g"],
        "floats": [1.00145, {"samples": [0.333333, 1e-5, count]}],
    }


# --- the worker extension (more in tests/integration/test_stats_inprocess.py)


def test_host_times_have_one_begin_for_stage_and_begin(monkeypatch):
    """Steps that protect nothing have none. Of several tables' counters tokens are the
    first one's, others are summed. Nothing is switched in the middle of a step."""
    # Around stage and begin, twice, and commit; in the end around a stage that is all.
    ticks = itertools.accumulate([0, 100, 1, 10, *(0, 100, 1, 10, 1, 1000), 0, 70])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(_wrap, "rehook", lambda: None)
    manager = Mock(is_open=False, fallbacks={})
    counters = [[2, 6, 4, 2, 1, 100, 0, 7, 9], [2, 6, 4, 2, 1, 50, 1, 3, 1]]
    manager.counters, shadow = torch.tensor(counters), manager.shadow
    transaction = Transaction(manager, [])
    state = RunnerState([transaction])
    worker, config = NworWorkerExtension(), SimpleNamespace(num_blocks=64)
    worker.model_runner = SimpleNamespace(kv_cache_config=config, nwor_state=state)
    for _ in range(2):  # they do not time each other
        assert worker.nwor_set_hooked(True, times=True) is True
    step = SimpleNamespace(awaits_forward=True)
    for manager.is_open in (False, True):
        stage, begin, commit = state.tables_final + state.before_forward + state.sampled
        stage(step)
        begin(step)
    commit(step, "acceptance")
    step.awaits_forward = False
    stage(step)
    found = worker.nwor_report()
    assert (found["begin_ns"], found["commit_ns"]) == ([110, 70], [1000])
    assert found["counters"] == {
        **{"windows": 2, "staged": 6, "committed": 4, "rejected": 2},
        **{"shadow_windows": 1, "restored_bytes": 150, "invalid_slots": 1},
        **{"shadow_copied_bytes": 10, "committed_bytes": 10},
    }
    # Untimed, the manager's own methods are called.
    worker.nwor_set_hooked(True, stages=False)
    assert (state.tables_final, manager.shadow) == ((), None)
    assert state.before_forward + state.sampled == (manager.begin, manager.commit)
    worker.nwor_set_hooked(True)
    assert (state.tables_final, manager.shadow) == ((manager.stage,), shadow)
    worker.model_runner.execute_model_state = object()
    with pytest.raises(RuntimeError, match=r"in the middle of a step; .* in flight"):
        worker.nwor_set_hooked(False)


# --- tools/gpu/bench.py


def test_cells_are_commands_that_bench_vllm_takes():
    model = settings.Model("somewhere", "shape:llama-8b", True)
    for cell, batch in [(of, batch) for of in cells.CELLS for batch in of.batches]:
        options = parse([*cell.arguments(batch), "--kv-cache-memory-bytes", "96"])
        assert options.nwor_mode == ("off" if "audit" in cell.name else "stage")
        engine = settings.engine_arguments(options, "cuda", model, model)
        assert engine["kv_cache_memory_bytes"] == 96
        assert engine.get("block_size", 0) == cell.block_size
        assert engine.get("kv_transfer_config") == cell.connector
        assert engine["enable_prefix_caching"] is cell.cached
        mean = statistics.mean(options.acceptance or [0])
        assert mean == pytest.approx(cell.acceptance / 100)


@pytest.mark.parametrize(
    ("cell", "kv_blocks"),
    [
        # An engine that had to compile has fewer KV blocks for that reason.
        ("v2-k4-a70", {1: None, 16: 0, 64: 0}),
        ("v2-default-seqs", {16: 70}),
    ],
)
def test_a_cell_runs_each_batch_size_on_one_engine(cell, kv_blocks, engine, capsys):
    """Each line says with which command of bench_vllm.py it can be had again."""
    arguments = "--results", ".", "--seconds", "0", "--batches", *map(str, kv_blocks)
    assert cells.main([cell, *arguments, "--kv-cache-memory-bytes", "96"]) == 0
    compared = {}
    for line in records.read("throughput", Path()):
        batch = line["key"]["batch"]
        assert line["key"]["cell"] == cell
        assert line["command"].endswith(" --kv-cache-memory-bytes 96")
        assert f"--batch-size {batch} " in line["command"]
        assert list(line["pairs"]) == ["cow", "stage", "control"]
        compared[batch] = line.get("true_off", {"kv_blocks": 0})["kv_blocks"]
    assert compared == kv_blocks
    is_said = "KV blocks that NWOR costs" in capsys.readouterr().out
    assert is_said is (70 in kv_blocks.values())
    with pytest.raises(SystemExit):
        cells.main([cell, "--batches", "128"])
    assert "--batches [128]: allowed of" in capsys.readouterr().err


# --- tools/gpu/host_profile.py


def device_run(engine, arm):
    """Two steps: sampled, ours, the forward, which takes longer after ours."""
    ours = {
        "stage": ("commit_kernel", "stage_kernel"),
        "cow": ("restore_kernel", "log_kernel"),
        "audit": ("audit_kernel<x::RecordRows>", "audit_kernel<nwor::x::ScanSlots>"),
    }.get(arm.name, ())
    events = []
    for start in (0.0, 1000.0):
        names = "sampled", *(f"nwor::x::{one}()" for one in ours), "forward"
        for number, name in enumerate(names):
            us = 100.0 + len(ours) if name == "forward" else 4.0
            us += 8.0 * ("audit" in name)  # one waits for the other
            events.append(host_profile.Event(name, start + 10 * number, us))
    return events, 2


def test_host_profile_has_begin_and_commit_of_each_mode(engine, monkeypatch):
    """(10, 30) and (5, 15) us in each run."""
    monkeypatch.setattr(host_profile, "device_events", device_run)
    monkeypatch.setattr(host_profile.HookTimes, "watch", lambda times: None)
    words = ["v2-k4-a70", "--rounds", "1", "--json", "a.jsonl", "--batches", "2", "4"]
    assert host_profile.main(words) == 1  # its engine logs
    engine.report.return_value["groups"][0]["resolved"] = "stage"
    assert host_profile.main(words) == 0
    two, line = records.read("a", Path())
    assert [two["key"]["batch"], line["key"]["batch"]] == [2, 4]
    assert line["host"].keys() == {"stage", "cow"}
    for times in line["host"].values():
        medians = {part: one["median_us"] for part, one in times.items()}
        assert medians == {"begin": 20, "commit": 10}
    assert {*line["step_us"].values(), *line["median_step_us"].values()} == {500_000}
    unhooked, stage, cow = (line["device"][n] for n in ("unhooked", "stage", "cow"))
    assert (unhooked["theirs_us"], stage["theirs_us"]) == (104, 106)
    # (1,000 us from step to step and the last one's end, less what ran)
    assert (unhooked["idle_us"], stage["idle_us"]) == (451, 452)
    one = {"median_us": 4, "launches": 2}
    assert unhooked["ours"] == {}
    assert stage["ours"] == {"commit": one, "stage": one}
    assert cow["ours"] == {"restore": one, "log": one}
    wanted = [["sampled", -4, 4], ["commit", 6, 4], ["stage", 16, 4]]
    assert stage["around"] == [*wanted, ["forward", 26, 102]]
    picture = Path("step.png")
    assert host_profile.main([*words, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        host_profile.main([*words[:-2], "3", "--picture", str(picture)])
    # Of the audit's kernels, which are one function, each is named.
    words = ["audit-v2-hybrid", "--rounds", "1", "--json", "a.jsonl", "--batches", "1"]
    assert host_profile.main(words) == 0
    audited = records.read("a", Path())[-1]["device"]
    assert audited.keys() == {"unhooked", "audit"}
    assert audited["audit"]["ours"].keys() == {"RecordRows", "ScanSlots"}
    assert (audited["audit"]["alone_us"], audited["audit"]["theirs_us"]) == (20, 106)


def test_a_hooks_time_is_without_what_it_wraps(monkeypatch):
    ticks = itertools.accumulate([0, 3000, 100_000, 4000] * 2)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    for name, value in (("_hooked", _wrap._hooked), ("_hooks", [])):
        monkeypatch.setattr(_wrap, name, value)  # `watch` and a hook are taken back
    module = ModuleType("host")
    module.Runner = type("Runner", (), {"step": lambda self: 1})
    times = host_profile.HookTimes()
    times.watch()
    target = _wrap.HookTarget("host", "Runner.step", ("self",), "test", "never")
    _wrap.install_all(module, {target: lambda wrapped, *_: wrapped() + 1})
    assert module.Runner().step() == 2
    times.on = True
    assert module.Runner().step() == 2
    wanted = {"median_us": 7.0, "calls": 1, "us_a_step": 3.5}
    assert times.result(2) == {"Runner.step": wanted}


# --- bench_kernels.py


@pytest.mark.parametrize("restores", [True, False])
def test_no_rate_of_a_kernel_with_a_wrong_byte(restores, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "CPU_CACHE_BYTES", 1 << 14)
    if not restores:
        monkeypatch.setattr(ops, "restore_rejected_drafts", lambda *_: None)
    path = tmp_path / "kernels.json"
    words = ["--max-kib", "8", "--samples", "3", "--json", str(path)]
    assert bench_kernels.main(words) == (0 if restores else 1)
    printed = capsys.readouterr()
    assert path.exists() is ("GB/s" in printed.out) is restores
    said = "" if restores else "a rejected draft's bytes are not back (nhd,"
    assert said in printed.err


def test_rates_are_beside_the_copys():
    """2 MiB in 2 ms are 1.05 GB/s; the log takes twice as long in the median sample."""
    times = {"copy": [1e-3, 2e-3, 2e-3], "log": [4e-3] * 3, "restore": [2e-3] * 3}
    found = bench_kernels.statistics_of(times, num_bytes=1 << 20)
    rates = {"copy": 1.048576, "log": 0.524288, "restore": 1.048576}
    assert found["gb_per_s"] == pytest.approx(rates)
    assert found["log_of_copy"] == pytest.approx([0.5, 0.3, 0.5])
    assert found["restore_of_copy"] == pytest.approx([1.0, 0.6, 1.0])
