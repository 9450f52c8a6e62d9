# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1 to 3, byte by byte, on real engines (CPU_ATTN, bf16 and fp8 caches).

A case is three engines, in modes off, cow and stage, that play the same requests under
the oracle. The oracle takes the bytes of each slot and the rejected drafts from vLLM
alone (tests/helpers). It must report plain vLLM, and several wrong ways to restore.
More methods and models: test_reach.py. Not covered: block copies (vLLM 0.32 makes them
for mamba models only), attention on AMX and ARM, CUDA.
"""

import copy
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.helpers import seam
from tests.helpers.byte_map import owners
from tests.helpers.drafters import Plan, ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import (
    NUM_DRAFTS,
    Engine,
    Request,
    Result,
    assert_same,
    check_counts,
    counts,
    like_off,
    prompt,
    shared,
)
from tests.helpers.oracle import SnapshotOracle, Watch, hash_rows
from tests.helpers.player import counters
from tests.helpers.runner_probe import Step
from vllm_nwor import ops as native
from vllm_nwor.layout.probe import probe_layout
from vllm_nwor.plugin import used_package

# The KV audit compares all bytes.
EVERYTHING = {"AUDIT": "log", "AUDIT_MIB": "9" * 30, "STRICT": "always"}
HAS_AVX512 = torch.cpu._is_avx512_supported()
# So few blocks that requests are preempted and blocks are reused soon.
FEW_BLOCKS: dict[str, Any] = {
    "num_gpu_blocks_override": 16,
    "max_model_len": 416,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}
CACHES: dict[str, dict[str, Any]] = {
    "bf16": FEW_BLOCKS,
    "fp8": FEW_BLOCKS | {"kv_cache_dtype": "fp8"},
    # With heads of 48 CPU_ATTN packs as "vec16".
    "vec16": FEW_BLOCKS | {"load_format": "dummy", "hf_overrides": {"head_dim": 48}},
    # Two groups of layers that share memory, one with a sliding window.
    "sliding_window": FEW_BLOCKS
    | {"model": "tiny-gemma3", "num_gpu_blocks_override": 26},
}
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON: dict[str, Any] = {"structured_outputs": {"json": OBJECT}, "ignore_eos": False}
# On a CPU vLLM prefills an MLA model's prompt at once, with blocks of 16.
MLA: dict[str, Any] = {
    "model": "tiny-deepseek",
    "attention_backend": "CPU_MLA",
    "block_size": 16,
    "max_num_batched_tokens": 512,
}
SHARED = prompt(0, 70)
# Each kind of request; more than the engine runs at once.
REQUESTS = (
    Request("long", SHARED + prompt(1, 230), 40),  # chunked prefill
    Request("short", prompt(2, 3), 60),
    Request("middle", prompt(3, 50), 70, at=2),
    Request("aborted", prompt(4, 33), 100, at=3, abort_at=14),
    Request("in flight", prompt(7, 20), 100, at=4, abort_during=17),
    Request("prefix", SHARED + prompt(5, 40), 60, at=6),
    # Its prompt is cached, also in a group with a sliding window.
    Request("echo", SHARED + prompt(5, 40), 12, at=12),
    Request("late", prompt(6, 64), 50, at=20),
    # `settled` chooses the stop token.
    *(Request(f"stop {n}", prompt(20 + n, 12 + n), 90, at=20 + n) for n in range(3)),
    Request("json", prompt(8, 30), 60, at=24, params=JSON),
    Request("repetition", prompt(9, 10), 40, 24, params={"repetition_penalty": 1.3}),
    Request("presence", prompt(10, 17), 40, 24, params={"presence_penalty": 0.7}),
    *(Request(f"few {n}", prompt(30 + n, 5), 9 + n, at=60) for n in range(9)),
    Request("limit", prompt(11, 380), 100, at=90),
    # Runs alone, so that its blocks stay cached.
    Request("calm", prompt(12, 70), 60, at=300),
    # Arrives when a target token fills a block of "calm", whose text `settled` copies.
    Request("joining", prompt(14, 140), 20, at=330),
    Request("continued", prompt(13, 125), 30, at=400),
    Request("again", prompt(12, 70), 60, at=500),
)
FEW_REQUESTS = REQUESTS[1:3]
# How many tokens of the text of "calm" a prompt begins with.
TAKEN = {"joining": 128, "continued": 125}


@dataclass(frozen=True)
class Case:
    """Engine arguments, and what is expected of engines with scripted drafts.

    keeps_drafter: the method's own drafter runs, too, and its drafts are replaced.
    num_groups: protected KV-cache groups; num_native: those whose state vLLM keeps per
    draft. num_drafter_layers: cached layers of the drafter. stage: what a group
    resolves to in mode stage.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    keeps_drafter: bool = False
    plan: Plan = mixture
    num_groups: int = 1
    num_native: int = 0
    num_drafter_layers: int = 0
    stage: str = "stage"

    def engine(self, mode: str, settings: dict[str, str] | None = None) -> Engine:
        return like_off(
            mode,
            settings,
            num_groups=self.num_groups,
            can_stage=self.stage == "stage",
            **self.arguments,
        )


def case_of(cache: str) -> Case:
    if cache == "fp8" and not HAS_AVX512:
        pytest.skip("vLLM's fp8 KV cache on CPU needs AVX512 or AMX")
    return Case(CACHES[cache], num_groups=1 + (cache == "sliding_window"))


class Oracle(Watch):
    """Watch, and "changed later": a slot whose last write was a rejected draft has
    changed when the next step begins."""

    def __init__(self, engine: Engine) -> None:
        assert engine.probe is not None
        SnapshotOracle.__init__(self, engine.probe)
        self.start(0)
        self._last = self.memory.read()

    def forward_begins(self, step: Step) -> None:
        super().forward_begins(step)
        if not self.knows_all:
            return
        new = [*step.zeroed_blocks, *(to for _, to in step.copied_blocks)]
        for name, dirty in self.dirty.items():
            kept = dirty.clone()
            kept.view(-1, self.memory.block_size(name))[new] = False
            (slots,) = kept.nonzero(as_tuple=True)
            at = self.memory.index[name][slots]
            is_changed = (self._before[at] != self._last[at]).any(1)
            self._add("changed later", name, slots[is_changed])


@dataclass
class Run:
    """One engine's run under the oracle. own: the drafts of its own drafter."""

    engine: Engine
    truth: dict[str, list[int]]
    oracle: Oracle
    result: Result
    own: list[Any]
    num_proposed: dict[str, int]


def watch(
    engine: Engine,
    requests: Sequence[Request] = REQUESTS,
    truth: dict[str, list[int]] | None = None,
    case: Case | None = None,
    num_threads: int = 1,
    is_counted: bool = True,
) -> Run:
    """Plays `requests` twice: to learn the target's tokens, unless `truth` has them;
    then under the oracle, with right and wrong drafts. is_counted: checks NWOR's
    counters."""

    case = case or Case()

    def script(texts: dict[str, list[int]], plan: Plan) -> ScriptedDrafter:
        drafter = ScriptedDrafter(texts, plan)
        drafter.attach(engine.runner, case.keeps_drafter)
        return drafter

    script({}, case.plan)  # all wrong
    own_truth = truth_of(engine, requests, without_drafts=False)
    truth = truth or own_truth
    requests = [settled(request, truth) for request in requests]
    drafter = script(truth, case.plan)
    engine.poison_caches()
    oracle = Oracle(engine)
    before = counts(engine)
    result = engine.run(requests, [oracle], num_threads)
    if engine.manager is not None and is_counted:
        check_counts(engine, before, result)
    return Run(engine, truth, oracle, result, drafter.own, drafter.num_proposed)


def settled(request: Request, truth: dict[str, list[int]]) -> Request:
    """The request, with what depends on its own or another one's output."""
    if request.name.startswith("stop"):
        token = truth[request.name][len(request.prompt) + 17]
        return replace(request, params={"stop_token_ids": [token]})
    if request.name in TAKEN:
        text = truth["calm"][: TAKEN[request.name]]
        return replace(request, prompt=(*text, *request.prompt[len(text) :]))
    return request


def check_off(off: Run, case: Case) -> None:
    """Without NWOR the oracle reports every slot that a rejected draft changed, in
    every layer, and nothing else."""
    assert off.engine.manager is None
    assert 0 < off.result.num_accepted < off.result.num_drafted
    assert {violation.kind for violation in off.oracle.violations} == {"not restored"}
    targets = set(off.engine.probe.target_layers())
    assert {violation.layer for violation in off.oracle.violations} == targets
    num_slots = sum(len(violation.slots) for violation in off.oracle.violations)
    assert num_slots == off.oracle.num_dirty
    num_drafter_layers = len(off.engine.probe.layers()) - len(targets)
    assert num_drafter_layers == case.num_drafter_layers
    caches = import_module(f"{used_package()}.hooks.caches")
    drafts_by_model = caches.limits(off.engine.runner).drafts_by_model
    assert drafts_by_model is (num_drafter_layers > 0)
    assert any(map(any, off.own)) == case.keeps_drafter


def check_on(off: Run, on: Run, case: Case) -> None:
    """No rejected draft is left, in mode stage no draft wrote to a request's block, the
    drafter's input and every output are those of off. After every step the cache equals
    off's at every slot of the scheduler's blocks, except those whose last write was a
    rejected draft: they hold their bytes from before that draft."""
    expected = case.stage if on.engine.mode == "stage" else on.engine.mode
    resolved = [info.resolved for info in on.engine.infos]
    assert sorted(resolved) == sorted(
        [expected] * case.num_groups + ["native"] * case.num_native
    )
    assert on.oracle.num_dirty > 50, "plain vLLM would pass, too"
    if on.oracle.num_blocks:
        assert on.oracle.num_staged > 50
        assert on.oracle.num_present > 1000
    check_exact(off, on)


def check_exact(off: Run, on: Run) -> None:
    """The part of check_on that does not depend on the run's length."""
    assert on.oracle.violations == []
    assert on.own == off.own
    assert_same(on.result, off.result)
    num_blocks = off.engine.runner.kv_cache_config.num_blocks
    assert on.engine.core.scheduler.kv_cache_config.num_blocks == num_blocks
    assert on.oracle.digests == off.oracle.digests


def check_clean(run: Run) -> None:
    """The audit compared nearly all committed slots in all steps, without a finding."""
    engine = run.engine
    assert 0 < run.result.num_accepted < run.result.num_drafted
    assert list(engine.audit.findings.last) == []
    totals = engine.audit.audit.totals()
    assert totals["unverified"] == 0
    assert totals["contents"] > 20_000
    assert totals["identities"] > 4000
    audited = {x.name for group in engine.audit.audit.groups for x in group.layers}
    assert audited == set(engine.probe.target_layers())


@pytest.fixture(scope="module", params=CACHES)
def off(request):
    """vLLM's own run of a case."""
    case = case_of(request.param)
    return watch(case.engine("off"), case=case), case


@pytest.fixture(scope="module")
def cow():
    return shared("cow", **FEW_BLOCKS)


@pytest.fixture(scope="module")
def few_seats():
    """In mode stage, with seats for three requests."""
    settings = {"SHADOW_BLOCKS": "6", "STRICT": "always"}
    return Case(FEW_BLOCKS | {"disable_log_stats": False}).engine("stage", settings)


def test_vanilla_leaves_rejected_drafts(off):
    run, case = off
    check_off(run, case)
    result, steps = run.result, run.result.steps
    assert result.num_preemptions > 0
    # Cached blocks of a running request, of a finished one, and ones that an answer
    # filled with drafts; of a sliding window some are freed.
    assert result.cached["echo"] == 96
    assert result.cached["again"] == 64
    assert result.cached["continued"] == 96
    assert result.cached["joining"] == (128 if case.num_groups == 1 else 64)
    # The last block is found in the step that writes it: in the other's prefill, and as
    # the target row of its window.
    start, step = at_arrival(result, "echo", "prefix")
    assert start < result.cached["echo"] <= start + step.scheduled["prefix"]
    start, step = at_arrival(result, "joining", "calm")
    assert (start + 1, step.drafted["calm"]) == (128, NUM_DRAFTS)
    assert result.tokens["again"] == result.tokens["calm"]
    assert max(len(step.scheduled) for step in steps) == 8
    # Chunked prefill next to requests that verify drafts.
    assert any(step.drafted and max(step.scheduled.values()) > 40 for step in steps)
    outcomes = {
        (num_drafts, step.accepted[name])
        for step in steps
        for name, num_drafts in step.drafted.items()
    }
    assert outcomes >= {(k, n) for k in range(1, NUM_DRAFTS + 1) for n in range(k + 1)}
    # Requests end within accepted drafts, at their length and at a stop token, if the
    # model writes more than one token.
    stops = [f"stop {n}" for n in range(3)]
    assert {result.finish[name] for name in stops} == {"stop"}
    if len(set(run.truth["stop 0"][12:])) > 1:
        assert max(num_beyond(result, name) for name in stops) > 0
    assert max(num_beyond(result, f"few {n}") for n in range(9)) > 0
    assert len(result.tokens["limit"]) == case.arguments["max_model_len"] - 380
    # vLLM's scheduler drops drafts that the grammar forbids.
    assert set(json.loads(result.text["json"])) == {"name", "age"}
    num_run = sum(step.drafted.get("json", 0) for step in steps)
    assert 0 < num_run < run.num_proposed["json"] - NUM_DRAFTS


def at_arrival(result: Result, name: str, other: str) -> tuple[int, Step]:
    """The step that first schedules a request, and how many rows the other one, which
    was not preempted before, has then."""
    steps = result.steps
    number = next(n for n, step in enumerate(steps) if name in step.scheduled)
    start = result.cached[other]
    for step in steps[:number]:
        start += step.scheduled.get(other, 0)
        start -= step.drafted.get(other, 0) - step.accepted.get(other, 0)
    return start, steps[number]


def num_beyond(result: Result, name: str) -> int:
    """Tokens sampled for a request beyond its last one; it was prefilled in one step
    and never preempted."""
    steps = [step for step in result.steps if name in step.scheduled]
    num_accepted = sum(step.accepted.get(name, 0) for step in steps)
    return len(steps) + num_accepted - len(result.tokens[name])


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_bytes_and_outputs_are_exact(mode, off):
    """With the audit on, which finds nothing."""
    run, case = off
    on = watch(case.engine(mode, EVERYTHING), REQUESTS, run.truth, case)
    check_on(run, on, case)
    check_clean(on)


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        *itertools.product(["vec", "amx"], [torch.bfloat16, torch.uint8]),
        ("vec16", torch.bfloat16),
    ],
    ids=str,
)
def test_probing_and_the_byte_map_agree(isa, dtype, cow):
    """The oracle's formulas against vLLM's own writer, also for packings that attention
    cannot run on this machine."""
    if dtype is torch.uint8 and not HAS_AVX512:
        pytest.skip("vLLM's fp8 KV cache on CPU needs AVX512 or AMX")
    # Not at the top: in a fork's tree (test_apply_to_vllm.py) it is another copy.
    from vllm_nwor.hooks.layers import _writer

    layer = copy.copy(next(iter(cow.probe.target_layers().values())))
    layer.isa = isa
    layer.kv_cache = torch.zeros(layer.kv_cache.shape, dtype=dtype)
    layer.impl = copy.copy(layer.impl)
    layer.impl.kv_cache_dtype = "fp8" if dtype is torch.uint8 else "auto"
    runs = probe_layout(layer.kv_cache, _writer(layer, torch.bfloat16)).runs
    assert runs is not None
    found = torch.full(owners(layer).shape, -1)
    for offset, slot_runs in enumerate(runs.tolist()):
        for start, length in slot_runs:
            assert (found.view(-1)[start : start + length] == -1).all()
            found.view(-1)[start : start + length] = offset
    assert torch.equal(found, owners(layer))


def test_the_hash_depends_on_every_byte():
    rows = torch.randint(0, 256, (4, 256), dtype=torch.uint8)
    plain = hash_rows(rows)
    for byte in range(256):
        changed = rows.clone()
        changed[:, byte] ^= 1 << (byte % 8)
        assert (hash_rows(changed) != plain).all()
    assert torch.equal(hash_rows(rows.clone()), plain)


@pytest.mark.parametrize("off", ["bf16"], indirect=True)
def test_more_requests_than_seats(off, few_seats):
    """Windows without a seat are logged, others of the same step are staged;
    `check_counts` distinguishes them."""
    run, case = off
    on = watch(few_seats, REQUESTS, run.truth, case)
    check_on(run, on, case)
    assert min(on.oracle.num_logged, on.oracle.num_staged) > 50
    seats = [set(step.seats.values()) for step in on.result.steps]
    num_seats = few_seats.manager.shadow.num_seats
    both = [min(of) < num_seats <= max(of) for of in seats if of]
    assert sum(both) > 20
    found = counters(few_seats)
    assert found["nwor_breaches"] == 0
    windows, *_, num_staged = few_seats.manager.counters[0, :5].tolist()
    assert found["nwor_windows/stage"] == num_staged > 0
    assert found["nwor_windows/cow"] == windows - num_staged > 0


def without_a_layer(op: Any, table: torch.Tensor, *rest: Any) -> None:
    op(table[1:], *rest)


def at_the_next_slot(op: Any, *arguments: Any) -> None:
    *before, slots = arguments[:4]
    op(*before, torch.where(slots >= 0, slots ^ 1, slots), *arguments[4:])


def of_one_draft_more(op: Any, *arguments: Any) -> None:
    sampled = arguments[5].clone()
    sampled.scatter_(1, (sampled >= 0).sum(1, keepdim=True).long() - 1, -1)
    op(*arguments[:5], sampled, *arguments[6:])


def to_another_log(op: Any, *arguments: Any) -> None:
    op(*arguments[:5], arguments[5].clone(), *arguments[6:])


def valid_too_high(op: Any, *arguments: Any) -> None:
    op(*arguments)
    arguments[5][:, native.SAVED_COLUMNS - 2] += 1


# A mode, an op, how it is broken, and a kind of violation that must be reported.
SABOTAGE = [
    ("cow", "restore_rejected_drafts", without_a_layer, "not restored"),
    ("cow", "restore_rejected_drafts", at_the_next_slot, "stray write"),
    ("cow", "restore_rejected_drafts", of_one_draft_more, "stray write"),
    ("cow", "log_cache_slots", to_another_log, "torn"),
    ("few_seats", "stage", without_a_layer, "not present"),
    ("few_seats", "commit_draft_layer", valid_too_high, "not present"),
]


@pytest.mark.parametrize(("mode", "op", "how", "kind"), SABOTAGE)
def test_the_oracle_reports_broken_ops(mode, op, how, kind, request):
    engine = request.getfixturevalue(mode)
    with seam.of(engine.manager) as ops:
        setattr(ops, op, functools.partial(how, getattr(ops, op)))
        sick = watch(engine, FEW_REQUESTS, is_counted=False)
    kinds = {violation.kind for violation in sick.oracle.violations}
    assert kind in kinds
    assert mode == "cow" or kinds == {kind}


def test_two_threads(cow):
    """The ops' parallel loops; all other runs use one thread."""
    short = [replace(request, max_tokens=20) for request in FEW_REQUESTS]
    run = watch(cow, short, num_threads=2)
    assert run.oracle.violations == []
    assert run.oracle.num_dirty > 0
