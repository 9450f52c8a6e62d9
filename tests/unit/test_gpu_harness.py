# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' own parts, as far as a CPU can judge them: that their tables cover
what they claim, that the byte oracle sees what it must on runners made up here (V1's
and V2's ways of calling), and that a verdict follows from what two processes wrote.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import environment
from benchmarks.arguments import parse
from benchmarks.models import Model
from benchmarks.settings import engine_arguments

from tests.gpu import (
    compare,
    engines,
    harness,
    rows,
    test_no_sync,
    test_offloading,
    watch,
    worker,
)
from tests.gpu.pool import Finished
from tests.unit import test_bench_vllm
from tools.gpu import bench, cells

# -- tables ----------------------------------------------------------------------------


def test_matrix_covers_every_pair_with_at_most_twelve_engines():
    assert len(engines.MATRIX) <= 12
    assert engines.uncovered_pairs() == set()
    assert all(spec.num_blocks <= 256 for spec in engines.MATRIX)
    assert all(
        engines.is_possible(*values)
        for spec in engines.MATRIX
        for values in itertools.product(*spec.factors)
    )


@pytest.mark.parametrize(
    "spec",
    [*engines.MATRIX, *engines.METHODS, *engines.NEWER_METHODS],
    ids=lambda spec: spec.name,
)
def test_rows_fit_their_engine(spec, tmp_path):
    speculative = spec.arguments(tmp_path)["speculative_config"]
    rates = speculative.get("synthetic_acceptance_rates")
    assert len(rates or ()) == (spec.num_drafts if spec.rejection == "synthetic" else 0)
    for row in rows.rows(spec):
        requests = [request for phase in row.phases for request in phase]
        assert len({request.name for request in requests}) == len(requests)
        for request in requests:
            length = len(request.prompt) + request.max_tokens
            assert length + spec.num_drafts < engines.MAX_MODEL_LEN
        if "preempted" in row.needs:
            needed = sum(len(r.prompt) + r.max_tokens for r in requests)
            assert needed > spec.num_slots
        if "cached" in row.needs:
            first, _, again = (phase[0].prompt for phase in row.phases)
            common = sum(a == b for a, b in zip(first[:200], again, strict=False))
            # An EAGLE drafter gives up the last block of a hit.
            assert common >= 3 * spec.block_size


LLAMA = Model("somewhere", "shape:llama-8b", True)


def test_cells_are_commands_that_bench_vllm_takes():
    budgeted = set()
    for cell in cells.CELLS:
        for batch in cell.batches:
            options = parse(cell.arguments(batch))
            assert options.nwor_mode == ("off" if options.audits else "stage")
            assert options.audits == ("audit" in cell.name)
            assert options.acceptance is not None
            engine = engine_arguments(options, "cuda", LLAMA, LLAMA)
            assert engine.get("block_size", 0) == cell.block_size
            mean = sum(options.acceptance) / len(options.acceptance)
            assert mean == pytest.approx(cell.acceptance / 100)
            if cell.name in cells.BUDGETED:
                budgeted.add((cell.runner, cell.num_drafts, cell.acceptance, batch))
    assert len(budgeted) == 5 * 3
    assert ("v2", 8, 50, 64) in budgeted


@pytest.fixture
def bench_cell(monkeypatch, tmp_path):
    """Runs a cell by bench.py, with an engine that only notes what it is asked for;
    the results, by batch size, and the engines."""
    started, off = [], []

    class Engine(test_bench_vllm.FakeEngine):
        def __init__(self, options, on):
            started.append((options.batch_size, options.max_num_seqs, on))
            super().__init__(options, on)

        def _encode(self, texts):
            return self.waves

    def run_true_off(argv):
        off.append(
            {
                "outputs": {"tokens": test_bench_vllm.TOKENS},
                "summary": {"speed": {"off": "speed"}},
                "engine": {"kv_blocks": 100 + len(off)},
                "samples": [],
            }
        )
        return off[-1]

    monkeypatch.setattr(bench, "Engine", Engine)
    monkeypatch.setattr(bench, "prepare_process", lambda options, on: None)
    monkeypatch.setattr(bench.device, "resolve", lambda options: "cuda")
    monkeypatch.setattr(bench.environment, "PACKAGES", ())
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(bench.report, "text", lambda result: "")
    monkeypatch.setattr(bench.bench_vllm, "run_true_off", run_true_off)
    monkeypatch.setenv("NWOR_COMMIT", "abc")
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", "1")

    def run(cell):
        assert bench.main([cell, "--results", str(tmp_path), "--seconds", "0"]) == 0
        paths = tmp_path.glob(f"bench_gpu_{cell}_b*.json")
        found = {int(path.stem.rpartition("_b")[2]): path for path in paths}
        return {batch: json.loads(path.read_text()) for batch, path in found.items()}

    return SimpleNamespace(run=run, started=started, off=off)


def test_results_of_another_vllm_have_it_in_their_names():
    for version, name in (
        ("0.26.0", "a"),
        ("0.33.0", "a_v0.33"),
        ("0.33.1", "a_v0.33"),
    ):
        assert environment.of_release("a", {"packages": {"vllm": version}}) == name


def test_a_cell_runs_each_batch_size_on_one_engine(bench_cell):
    """Each file says with which command of bench_vllm.py it can be had again."""
    results = bench_cell.run("v2-k4-a30")
    assert bench_cell.started == [(64, 64, "cuda")]
    assert set(results) == {1, 16, 64}
    for batch, found in results.items():
        assert (found["cell"], found["baseline"]) == ("v2-k4-a30", "unhooked")
        assert found["environment"]["commit"] == "abc"
        assert f"--batch-size {batch} --max-num-seqs 64" in found["command"]
        assert list(found["samples"]) == ["cow", "stage", "control"]
        lengths = {len(pairs["ratio"]) for pairs in found["samples"].values()}
        assert (lengths, "true_off" in found) == ({7}, False)
        assert found["environment"]["variables"]["VLLM_NWOR_EMIT_METRICS"] == "1"

    found = bench_cell.run("v1-ngram-no-metrics")[1]
    assert found["environment"]["variables"]["VLLM_NWOR_EMIT_METRICS"] == "0"
    assert found["command"].startswith("VLLM_NWOR_EMIT_METRICS=0 python bench_vllm.py ")


def test_an_engine_without_nwor_is_compared_once_it_finds_all_compiled(bench_cell):
    assert bench_cell.run("v2-default-seqs")[16]["true_off"]["kv_blocks"] == 101
    # One that had to compile has fewer blocks for that reason.
    results = bench_cell.run("v2-k4-a70")
    assert (len(bench_cell.off), results[1]["true_off"]["kv_blocks"]) == (3, None)
    assert "true_off" not in results[16]


# -- the byte oracle -------------------------------------------------------------------

NUM_BLOCKS, HEADS, BLOCK, WIDTH = 6, 2, 4, 8


class Layer(torch.nn.Module):
    """An attention layer with a cache of NHD or HND strides."""

    def __init__(self, hnd: bool) -> None:
        super().__init__()
        shape = (NUM_BLOCKS, HEADS, BLOCK, WIDTH)
        if hnd:
            self.kv_cache = torch.zeros(shape, dtype=torch.bfloat16)
        else:
            inner = (NUM_BLOCKS, BLOCK, HEADS, WIDTH)
            self.kv_cache = torch.zeros(inner, dtype=torch.bfloat16).transpose(1, 2)

    def write(self, slots: list[int], value: float) -> None:
        for slot in slots:
            self.kv_cache[slot // BLOCK, :, slot % BLOCK] = value


class Runner:
    """What Watch needs of either model runner; `restore` is the NWOR of this test.

    A step has one request with three drafts, at slots 5 to 8 (its target token first),
    of which one is accepted.
    """

    def __init__(self) -> None:
        self.layers = torch.nn.ModuleList([Layer(hnd=False), Layer(hnd=True)])
        self.drafter_layer = Layer(hnd=True)
        context = {f"target.{i}": layer for i, layer in enumerate(self.layers)}
        context["draft.0"] = self.drafter_layer
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=context)
        )
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(context))]
        )
        self.old: list[torch.Tensor] = []
        self.slots = torch.tensor([5, 6, 7, 8, -1])
        self.value = 1.0

    def get_model(self) -> torch.nn.Module:
        return self.layers

    def execute_model(self, scheduler_output: Any) -> None:
        self.forward()

    def log(self) -> None:
        self.old = [layer.kv_cache.clone() for layer in self.layers]

    def forward(self) -> None:
        self.value += 1
        for number, layer in enumerate(self.layers):
            layer.write([5, 6, 7, 8], self.value + number)

    def restore(self) -> None:
        for layer, old in zip(self.layers, self.old, strict=True):
            for slot in (7, 8):
                place = (slot // BLOCK, slice(None), slot % BLOCK)
                layer.kv_cache[place] = old[place]


class RunnerV2(Runner):
    """Calls as V2 does: slots, then the forward, then the sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.cudagraph_manager = SimpleNamespace(
            run_fullgraph=self.forward, run_pw_graph=None
        )
        self.batch = SimpleNamespace(
            num_draft_tokens=3,
            req_ids=["one"],
            logits_indices=torch.tensor([0, 1, 2, 3]),
            cu_num_logits=torch.tensor([0, 4]),
            cu_num_logits_np=torch.tensor([0, 3]),  # vLLM's guess
        )

    def execute_model(self, scheduler_output: Any) -> None:
        self.prepare_attn(self.batch)
        self.cudagraph_manager.run_fullgraph()

    def prepare_attn(self, input_batch: Any) -> Any:
        self.log()
        return (), self.slots[None]

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        self.restore()
        return None, torch.tensor([2]), torch.tensor([2])

    def step(self) -> None:
        self.execute_model(scheduled())
        self.sample(None, self.batch, None)
        self.drafter_layer.write([5, 6], 9.0)


class RunnerV1(Runner):
    """Calls as V1 does: the forward within a forward context, then the sampler."""

    def __init__(self) -> None:
        super().__init__()
        table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=self.slots))
        self.input_batch = SimpleNamespace(
            req_ids=["one"], vocab_size=100, block_table=[table]
        )
        self.metadata = SimpleNamespace(
            logits_indices=torch.tensor([0, 1, 2, 3]), num_draft_tokens=[3]
        )

    def execute_model(self, scheduler_output: Any) -> None:
        self._model_forward()

    def _model_forward(self) -> None:
        self.log()
        self.forward()

    def _sample(self, logits: Any, metadata: Any) -> Any:
        self.restore()
        return SimpleNamespace(sampled_token_ids=torch.tensor([[4, 5, -1, -1]]))

    def step(self) -> None:
        self.execute_model(scheduled())
        self._sample(None, self.metadata)
        self.drafter_layer.write([5, 6], 9.0)


def scheduled() -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens={"one": 4},
        preempted_req_ids=None,
        kv_cache_block_copies=None,
        new_block_ids_to_zero=None,
    )


@pytest.fixture(params=[RunnerV1, RunnerV2])
def runner(request, monkeypatch):
    runner = request.param()
    mapping = dict.fromkeys(
        runner.vllm_config.compilation_config.static_forward_context, runner.slots
    )
    mode = SimpleNamespace(name="FULL")
    context = SimpleNamespace(slot_mapping=mapping, cudagraph_runtime_mode=mode)
    module = ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return runner


def watched(runner: Any, num_steps: int = 2) -> dict[str, Any]:
    oracle = watch.Watch(runner)
    oracle.start(seed=1)
    for _ in range(num_steps):
        runner.step()
    return oracle.stop()


def test_oracle_is_silent_when_all_is_well(runner):
    seen = watched(runner)
    assert seen["violations"] == []
    assert seen["layers"] == 2  # the drafter's is not the target's
    # Two rejected slots, in two layers, in two steps; the forward changed them all.
    assert seen["num_rejected_slots"] == seen["num_dirty_slots"] == 2 * 2 * 2
    assert (seen["num_windows"], seen["num_drafts"], seen["num_accepted"]) == (2, 6, 2)
    assert seen["steps"] == [[1, 4, 3, 1, "FULL", 0]] * 2


def test_oracle_reports_vanilla(runner):
    runner.restore = lambda: None
    seen = watched(runner)
    assert seen["violations_by_kind"] == {"not restored": seen["num_dirty_slots"]}
    assert seen["violations"][0]["slots"] == [7, 8]


@pytest.mark.parametrize(
    ("when", "layer", "slot", "kind"),
    [
        *(("restore", "target.1", slot, "stray write") for slot in (5, 6, 20)),
        ("restore", "draft.0", 2, "stray write"),
        ("log", "target.0", 13, "unmapped write"),
    ],
)
def test_oracle_reports_a_write_that_nobody_ordered(runner, when, layer, slot, kind):
    plain = getattr(runner, when)
    context = runner.vllm_config.compilation_config.static_forward_context

    def too_much():
        plain()
        context[layer].write([slot], 0.25)

    setattr(runner, when, too_much)
    seen = watched(runner, num_steps=1)
    assert set(seen["violations_by_kind"]) == {kind}
    if layer != "draft.0":  # whose slots are not known
        (found,) = seen["violations"]
        assert (found["slots"], found["layer"]) == ([slot], layer)


def test_digests_leave_out_what_rejected_drafts_wrote_and_nothing_else(runner):
    vanilla = copy.deepcopy(runner)
    vanilla.restore = lambda: None
    restored = watched(runner)["digests"]
    assert watched(vanilla)["digests"] == restored
    other = type(runner)()
    other.value = 7.0  # what was accepted differs
    found = watched(other)["digests"]
    assert [d[0] for d in found] == [d[0] for d in restored]
    assert all(
        a[1] != b[1] and a[2] != b[2] for a, b in zip(found, restored, strict=True)
    )


def test_hash_sees_every_byte_of_a_slot():
    layer = Layer(hnd=False)
    storage = torch.empty(0, dtype=torch.uint8).set_(layer.kv_cache.untyped_storage())
    plain = watch.hash_slots(storage, layer)
    for byte in range(len(storage)):
        storage[byte] ^= 1 << (byte % 8)
        assert (watch.hash_slots(storage, layer) != plain).sum() == 1
        storage[byte] ^= 1 << (byte % 8)


def test_rays_workers_inherit_the_environment_but_for_nwor(monkeypatch):
    seen: dict[str, Any] = {}
    ray = ModuleType("ray")
    ray.init = lambda **more: seen.update(os.environ)  # type: ignore[attr-defined]
    ray.util = SimpleNamespace(  # type: ignore[attr-defined]
        get_node_ip_address=lambda: "192.0.2.7"
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    ours = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_SHADOW_BLOCKS": "64"}
    for name, value in (ours | {"VLLM_HOST_IP": "192.0.2.1"}).items():
        monkeypatch.setenv(name, value)
    harness.start_ray()
    assert seen["VLLM_HOST_IP"] == "192.0.2.7"
    assert not seen.keys() & ours.keys()
    assert ours.items() <= os.environ.items()
    for spec in engines.RAY:
        is_new = spec.environment()["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] == "1"
        assert is_new == (spec.executor == "ray")


# -- the drafter's weights -------------------------------------------------------------


class DraftModel(torch.nn.Module):
    """A drafter that keeps a copy of a weight, as DFlash's do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 4, bias=False)
        self.model = torch.nn.Linear(4, 4, bias=False)
        self.model._build_fused_kv_buffers = self.build
        self.build()
        self.first = self.model._fused_kv_weight

    def build(self) -> None:
        self.model._fused_kv_weight = self.model.weight.detach().clone()
        self.model._k_norm_weights = torch.ones(1)


@pytest.mark.parametrize("are_alike", [False, True])
def test_weights_are_random_and_the_drafters_alike_where_they_have_to_be(are_alike):
    target = torch.nn.Module()
    target.model = torch.nn.Linear(4, 4, bias=False)
    drafter = DraftModel()
    extension = worker.GpuTestExtension()
    extension.model_runner = SimpleNamespace(
        get_model=lambda: target, drafter=SimpleNamespace(model=drafter)
    )
    assert extension.test_randomize(20, are_alike) == 3
    same = torch.equal(target.model.weight, drafter.model.weight)
    assert same == are_alike
    assert torch.equal(drafter.fc.weight, torch.eye(4, 8)) == are_alike
    # What graphs were captured for is what has the new weights.
    assert drafter.model._fused_kv_weight is drafter.first
    assert torch.equal(drafter.first, drafter.model.weight)


def test_costs_of_adaptive_verification_are_the_same_in_every_process():
    curves: list[Any] = []
    estimator = SimpleNamespace(REFIT_INTERVAL=100)
    manager = SimpleNamespace(set_cost_curves=lambda *both: curves.extend(both))
    extension = worker.GpuTestExtension()
    extension.model_runner = SimpleNamespace(
        adaptive_verification=manager,
        speculator=SimpleNamespace(acceptance_estimator=estimator),
    )
    extension.test_fix_costs()
    draft, verify = curves
    assert len(verify) == engines.MAX_NUM_BATCHED_TOKENS
    assert verify[-1][1] > verify[0][1] > 0
    assert draft[0][0] == 1
    assert estimator.REFIT_INTERVAL > 10**9
    extension.model_runner = SimpleNamespace()  # nothing adapts here
    extension.test_fix_costs()


SPEC = engines.BY_NAME["eagle-flash-default-async"]

# -- requests and the clock ------------------------------------------------------------


def structured_request(name: str, grammar: Any) -> SimpleNamespace:
    """A request of vLLM's scheduler; grammar: what its StructuredOutputManager put
    there, None for a request without a grammar."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.request import StructuredOutputRequest

    if grammar is None:
        return SimpleNamespace(request_id=name, structured_output_request=None)
    structured = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    structured.grammar = grammar
    return SimpleNamespace(request_id=name, structured_output_request=structured)


def test_a_grammar_that_takes_too_long_is_named():
    waiting = structured_request("grammar/7", Future())
    with pytest.raises(RuntimeError, match=r"grammar/7 is not compiled after 0\.01 s"):
        harness.await_grammars([structured_request("free", None), waiting], 0.01)


def test_a_grammar_that_does_not_compile_is_named():
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("no such rule"))
    with pytest.raises(RuntimeError, match="grammar/8 does not compile") as raised:
        harness.await_grammars([structured_request("grammar/8", failed)])
    assert "no such rule" in str(raised.value.__cause__)


# -- verdicts --------------------------------------------------------------------------


def outcome(row: rows.Row, mode: str, name: str) -> dict[str, Any]:
    """What a process writes of a row when all is well."""
    names = [request.name for phase in row.phases for request in phase]
    drafts = {"draft_tokens": 8, "accepted_tokens": 5}
    counters = {f"spec_decode_num_{name}": num for name, num in drafts.items()}
    of_device = {}
    if mode == compare.ON:
        ours = {"windows": 3, "tokens_staged": 10, "committed_tokens": 5}
        ours |= {"rejected_tokens": 3, "dropped_drafts": 2, "breaches": 0}
        counters |= {f"nwor_{name}": num for name, num in ours.items()}
        of_device = {"windows": 3, "staged": 10, "committed": 6, "rejected": 4}
        of_device |= {"restored_bytes": 4 * 100, "invalid_slots": 0}
    found: dict[str, Any] = {
        "tokens": {name: [1, 2, 3] for name in names},
        "logprobs": {name: [[(1, -0.5)]] for name in names},
        "finish": dict.fromkeys(names, "length"),
        "cached": dict.fromkeys(names, 16),
        "batches": [[[name, 5] for name in names], [[name, 1] for name in names]],
        **{"num_steps": 9, "seconds": 1.0},
        **{"counters": counters, "device_counters": of_device},
    }
    if name == "watched":
        kinds = {"not restored": 7} if mode == compare.OFF else {}
        watch = {
            "steps": [[1, 9, 10, 6, "FULL", 1], [1, 700, 0, 0, "PIECEWISE", 0]],
            "digests": [[1, 2, 3], [4, 5, 6]],
            "violations": [{"kind": k} for k in kinds],
            "violations_by_kind": kinds,
        }
        counts = {"rejected_slots": 4 * 3, "dirty_slots": 7, "windows": 3}
        counts |= {"drafts": 10, "accepted": 6}
        watch |= {f"num_{name}": num for name, num in counts.items()}
        found["watch"] = [watch | {"layers": 3}]
    return found


def report(mode: str) -> dict[str, Any]:
    names = [f"layer {i}" for i in range(4)]
    protected = {"layers": names[:3], "log_bytes_per_draft": 100}
    facts = {
        "runner": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
        "async_scheduling": True,
        "layers": {name: {"target": name != "layer 3"} for name in names},
        "protected": protected if mode == compare.ON else None,
    }
    passes = {
        name: {row.name: outcome(row, mode, name) for row in rows.rows(SPEC)}
        for name in compare.PASSES
    }
    info = [mode] if mode == compare.ON else []
    return {"finished": True, "facts": facts, "info": info, **passes}


@pytest.fixture
def reports():
    return {mode: report(mode) for mode in (compare.OFF, compare.ON)}


def verdict(
    reports: dict[str, dict[str, Any]], spec: engines.EngineSpec = SPEC
) -> dict[str, Any]:
    runs = {mode: Finished(found, 0, 1.0, "") for mode, found in reports.items()}
    return compare.judge(spec, runs)


def failed(
    reports: dict[str, dict[str, Any]], spec: engines.EngineSpec = SPEC
) -> set[str]:
    found = verdict(reports, spec)["problems"]
    return {check for check, problems in found.items() if problems}


def test_verdict_of_a_healthy_engine(reports):
    found = verdict(reports)
    assert all(not problems for problems in found["problems"].values()), found
    assert found["unsettled"] == []
    assert found["rows"]["aborts"]["dropped"] == 2


def change(reports: Any, mode: str, name: str, row: str, *path: Any) -> None:
    """Sets a value; the last item of `path` is the value."""
    *keys, last, value = path
    target = reports[mode][name][row]
    for key in keys:
        target = target[key]
    target[last] = value


ON_WATCH = (compare.ON, "watched")
BATCH_8 = ("batch 8", "watch", 0, "violations_by_kind")
# What is changed, to its last item, and the check that must tell.
TROUBLE = {
    "a token": ((compare.ON, "plain", "batch 1", "tokens", "one/0", [1, 2]), "outputs"),
    "a logprob": (
        (*ON_WATCH, "batch 1", "logprobs", "one/0", [[(1, -0.5000001)]]),
        "outputs",
    ),
    "a batch": (
        (compare.ON, "plain", "batch 8", "batches", 1, [["eight/0", 1]]),
        "outputs",
    ),
    "a byte": ((*ON_WATCH, "aborts", "watch", 0, "digests", 1, [4, 9, 6]), "digests"),
    "vanilla strays": (
        (compare.OFF, "watched", *BATCH_8, {"not restored": 7, "stray write": 1}),
        "vanilla",
    ),
    "vanilla is clean": ((compare.OFF, "watched", *BATCH_8, {}), "vanilla"),
    "a violation": (
        (*ON_WATCH, "preemption", "watch", 0, "violations", [{"kind": "a"}]),
        "bytes",
    ),
    "committed": ((*ON_WATCH, "batch 8", "counters", "nwor_breaches", 1), "counters"),
    "dropped": (
        (compare.ON, "plain", "aborts", "counters", "nwor_dropped_drafts", 1),
        "counters",
    ),
    "restored": (
        (*ON_WATCH, "batch 8", "device_counters", "restored_bytes", 300),
        "counters",
    ),
    "no preemption": (
        (*ON_WATCH, "preemption", "watch", 0, "steps", [[1, 9, 10, 6, "FULL", 0]]),
        "rows",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_verdict_names_the_trouble(reports, trouble):
    path, check = TROUBLE[trouble]
    change(reports, *path)
    assert check in failed(reports)


@pytest.mark.parametrize("mode", [compare.OFF, compare.ON])
def test_verdict_on_what_the_gauge_says(reports, mode):
    reports[mode]["info"] = ["native"]
    assert failed(reports) == {"counters"}


def test_a_worker_that_trims_drafts_runs_fewer_than_vllm_counts(reports):
    trimming = replace(SPEC, adaptive=True)
    for num_drafts, wrong in ((9, set()), (8, set()), (7, {"counters"})):
        for mode in reports:
            path = ("counters", "spec_decode_num_draft_tokens", num_drafts)
            change(reports, mode, "plain", "batch 8", *path)
        assert failed(reports, trimming) == wrong
        assert failed(reports) == ({"counters"} if num_drafts != 8 else set())


def test_verdict_without_one_row(reports):
    del reports[compare.ON]["watched"]["aborts"]
    assert failed(reports) == {"started"}


def test_vanilla_that_differs_from_itself_settles_nothing(reports):
    change(reports, compare.OFF, "plain", "batch 1", "tokens", "one/0", [7])
    found = verdict(reports)
    assert not found["problems"]["outputs"]
    assert any("vanilla differs from itself" in text for text in found["unsettled"])


def test_vanilla_that_batches_otherwise_differs_from_itself(reports):
    """Alike outputs do not make alike caches: what a step writes depends on it."""
    change(reports, compare.OFF, "plain", "batch 1", "batches", 1, [])
    change(
        reports, *ON_WATCH, "batch 1", "watch", 0, "steps", 0, [1, 8, 0, 0, "FULL", 0]
    )
    found = verdict(reports)
    assert not found["problems"]["digests"]
    assert found["unsettled"][0] == (
        "batch 1: vanilla differs from itself: batches from number 1 on"
    )
    assert any("different steps from step 0" in text for text in found["unsettled"])


def test_a_row_that_vanilla_ends_with_an_error_is_compared_all_the_same(reports):
    row = "structured output"
    for mode, name in itertools.product(reports, compare.PASSES):
        change(reports, mode, name, row, "finish", "grammar/0", "error")
    found = verdict(reports)
    assert all(not problems for problems in found["problems"].values()), found
    assert (found["unsettled"], len(found["unmet"])) == ([], 1)
    change(reports, compare.ON, "plain", row, "tokens", "free/0", [7])
    assert failed(reports) == {"outputs"}


def test_other_blocks_are_compared_by_what_was_written(reports):
    where = (*ON_WATCH, "batch 1", "watch", 0, "digests")
    change(reports, *where, [[8, 9, 3], [8, 9, 6]])
    assert failed(reports) == set()
    change(reports, *where, [[8, 9, 3], [8, 9, 7]])
    assert failed(reports) == {"digests"}


def test_the_file_of_synchronising_calls_has_counts_and_what_was_added():
    def run(**kernels: int) -> Finished:
        profile = {
            "steps": 3,
            "windowed_steps": 2,
            "kernel": {"theirs": 9} | kernels,
            "gpu_memcpy": {"Memcpy DtoH (Device -> Pageable)": 4},
            "gpu_memset": {},
            "cuda_runtime": {"cudaStreamSynchronize": 5, "cudaLaunchKernel": 9},
            "cuda_driver": {},
            "cpu_op": {"aten::add": 1},
        }
        trace = 'File "a.py", line 1, in f\nRuntimeError: sync\nFile "b.py", line 2'
        found = {"profiles": [profile] * 2, "sync_check": {"one": trace, "two": None}}
        return Finished(found | {"finished": True, "compiled": ["k"]}, 0, 1.0, "")

    entry = test_no_sync.shortened({"off": run(), "cow": run(ours=2)})

    assert entry["added_work"] == {"ours": 2}
    assert entry["cow"]["sync_check"] == {
        "one": 'File "a.py", line 1, in f',
        "two": None,
    }
    assert entry["cow"]["profiles"][1] == {
        "steps": 3,
        "windowed_steps": 2,
        "synchronising": {"cudaStreamSynchronize": 5},
        "allocating": {},
        "pageable_copies": {"Memcpy DtoH (Device -> Pageable)": 4},
        "device_work": 9 + 2 + 4,
    }


# -- beside the OffloadingConnector ----------------------------------------------------


def offload_report(mode: str) -> dict[str, Any]:
    """What the job writes, of an engine that does all right."""
    ours = {"tokens_staged": 9, "committed_tokens": 4, "rejected_tokens": 5}
    ours |= {"windows": 3, "dropped_drafts": 0, "breaches": 0}
    drafts = {"spec_decode_num_draft_tokens": 9, "spec_decode_num_accepted_tokens": 4}
    on = {f"nwor_{name}": num for name, num in ours.items()}
    return {
        "finished": True,
        "facts": {"resolved": [mode]},
        "row": harness.Outcome({"a": [1]}, {}, {}, {"a": 192}, [[["a", 1]]]).plain(),
        "counters": drafts | (on if mode != compare.OFF else {}),
        "moved": {"GPU_to_CPU": 64, "CPU_to_GPU": 0},
    }


def judge_offloading(found: dict[str, dict[str, Any]]) -> None:
    runs = {"e": {mode: Finished(r, 0, 1.0, "") for mode, r in found.items()}}
    test_offloading.test_outputs_are_vanillas(runs, "e")
    test_offloading.test_the_connectors_metrics_are_beside_ours(runs, "e")
    test_offloading.test_counters(runs, "e")


def test_offloading_is_judged():
    found = {mode: offload_report(mode) for mode in (compare.OFF, compare.ON)}
    found[compare.OFF]["row"]["batches"] += [[], []]  # while it waited for a load
    judge_offloading(found)
    for path, value in (
        (("facts", "resolved"), ["off"]),
        (("row", "tokens"), {"a": [2]}),
        (("row", "batches"), [[["a", 2]]]),
        (("row", "cached"), {"a": 16}),
        (("moved", "GPU_to_CPU"), 0),
        (("counters", "nwor_breaches"), 1),
        (("counters", "nwor_fallbacks/no_seat"), 1),
        (("counters", "nwor_committed_tokens"), 3),
        (("counters", "nwor_dropped_drafts"), 1),
        (("counters", "spec_decode_num_draft_tokens"), 8),
        (("finished",), False),
    ):
        broken = copy.deepcopy(found)
        place = broken[compare.ON]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(AssertionError):
            judge_offloading(broken)


def test_the_offloaded_prompt_is_evicted_before_it_comes_back():
    from vllm.config import KVTransferConfig

    from vllm_nwor.hooks.engine_core import connectors_in_forward

    first, *others, again = [phase[0] for phase in rows.offloaded().phases]
    assert first.prompt[:192] == again.prompt[:192]
    for spec in engines.OFFLOADING:
        size = spec.block_size
        needed = [-(-(len(r.prompt) + r.max_tokens) // size) for r in (first, *others)]
        assert max(needed) < spec.num_blocks - 1 < sum(needed) - needed[0]
        transfer = KVTransferConfig(**spec.arguments(Path())["kv_transfer_config"])
        # It is not one that resolves to cow.
        assert not connectors_in_forward(SimpleNamespace(kv_transfer_config=transfer))
