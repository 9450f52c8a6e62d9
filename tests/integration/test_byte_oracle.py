# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1 to 3, byte by byte, on real engines (CPU_ATTN, bf16 and fp8 caches).

Where a slot's bytes lie, and which drafts were rejected, is worked out here from vLLM
alone (tests/helpers). Each oracle is shown to report vanilla vLLM and several ways to
restore wrongly. Not covered: block copies (vLLM 0.32 makes them for mamba models only),
attention on AMX and ARM (it needs such a machine), CUDA.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.helpers.byte_map import owners, probed_owners
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import BLOCK_SIZE, Engine, Request, Result
from tests.helpers.faults import replaced_ops
from tests.helpers.oracle import (
    HashRecorder,
    ShadowOracle,
    SnapshotOracle,
    Violation,
    committed_hashes,
    differences,
    hash_rows,
)
from tests.helpers.runner_probe import Step
from vllm_nwor.kv_probe import probe_layout

HAS_AVX512 = torch.cpu._is_avx512_supported()
# So few blocks that requests are preempted, and blocks are soon used again.
FEW_BLOCKS: dict[str, Any] = {
    "num_gpu_blocks_override": 16,
    "max_model_len": 416,
    "enable_prefix_caching": True,
}
CACHES = {
    "bf16": FEW_BLOCKS,
    "fp8": FEW_BLOCKS | {"kv_cache_dtype": "fp8"},
    # Heads of 48 make CPU_ATTN take its other packing, "vec16".
    "vec16": FEW_BLOCKS | {"load_format": "dummy", "hf_overrides": {"head_dim": 48}},
    # Two groups of layers that overlay the same bytes, one with a sliding window.
    "sliding_window": FEW_BLOCKS
    | {"model": "tiny-gemma3", "num_gpu_blocks_override": 26},
}


def prompt(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 40000) for _ in range(length))


SHARED = prompt(0, 70)
REQUESTS = (
    Request("long", SHARED + prompt(1, 230), 40),  # more than a step's tokens
    Request("short", prompt(2, 3), 60),
    Request("middle", prompt(3, 50), 70, at=2),
    Request("aborted", prompt(4, 33), 100, at=3, abort_at=14),
    Request("prefix", SHARED + prompt(5, 40), 60, at=6),
    # Finds its prompt cached, in windows of a sliding one, too.
    Request("echo", SHARED + prompt(5, 40), 12, at=12),
    Request("late", prompt(6, 64), 50, at=20),
    Request("again", SHARED + prompt(5, 40), 30, at=60),
)
FEW_REQUESTS = REQUESTS[1:3]


@dataclass
class Run:
    """One engine's run of REQUESTS under both oracles."""

    engine: Engine
    truth: dict[str, list[int]]
    oracle: SnapshotOracle
    hashes: HashRecorder
    result: Result


def watch(
    engine: Engine,
    requests: Sequence[Request],
    truth: dict[str, list[int]] | None = None,
    num_threads: int = 1,
) -> Run:
    """Runs `requests`, some drafts right and some wrong, under both oracles."""
    own_truth = truth_of(engine, requests)
    truth = truth or own_truth
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    engine.poison_caches()
    oracle, hashes = SnapshotOracle(engine.probe), HashRecorder(engine.probe)
    result = engine.run(requests, [oracle, hashes], num_threads)
    assert result.num_accepted > 0
    assert oracle.num_dirty > 100
    return Run(engine, truth, oracle, hashes, result)


@pytest.fixture(scope="module", params=CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runs(cache: str) -> tuple[Run, Run]:
    """An off and a cow engine with the same history, after the same arrivals."""
    if cache == "fp8" and not HAS_AVX512:
        pytest.skip("vLLM's fp8 KV cache on CPU needs AVX512 or AMX")
    off = watch(Engine("off", **CACHES[cache]), REQUESTS)
    cow = watch(Engine("cow", **CACHES[cache]), REQUESTS, off.truth)
    return off, cow


@dataclass
class StagedRun:
    """One engine's run of REQUESTS in mode stage. num_real: blocks that its scheduler
    has, as many as the off engine's."""

    engine: Engine
    oracle: ShadowOracle
    hashes: HashRecorder
    result: Result

    def real_hashes(self) -> list[dict[str, torch.Tensor]]:
        """Of the start and of each step, without the shadow blocks."""
        return [
            {name: hashes[: self.oracle.num_real] for name, hashes in step.items()}
            for step in (self.hashes.start, *self.hashes.steps)
        ]


def watch_staged(engine: Engine, truth: dict[str, list[int]]) -> StagedRun:
    truth_of(engine, REQUESTS)  # as `watch` does: blocks are free in the same order
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    engine.poison_caches()
    num_real = engine.core.scheduler.kv_cache_config.num_blocks
    oracle = ShadowOracle(engine.runner, engine.probe, num_real)
    hashes = HashRecorder(engine.probe)
    result = engine.run(REQUESTS, [oracle, hashes])
    return StagedRun(engine, oracle, hashes, result)


# Shadow blocks for all of DEFAULTS' 8 sequences, in up to two groups.
NUM_SHADOW_BLOCKS = {"sliding_window": 32}


@pytest.fixture(scope="module")
def staged(cache: str, runs: tuple[Run, Run]) -> tuple[Run, StagedRun]:
    """The off engine's run, and that of a stage engine whose scheduler has as many
    blocks."""
    num_shadow = NUM_SHADOW_BLOCKS.get(cache, 16)
    arguments = dict(CACHES[cache])
    arguments["num_gpu_blocks_override"] += num_shadow
    engine = Engine("stage", {"SHADOW_BLOCKS": str(num_shadow)}, **arguments)
    return runs[0], watch_staged(engine, runs[0].truth)


@pytest.fixture(scope="module")
def cow() -> Engine:
    return Engine("cow", **FEW_BLOCKS)


def test_byte_map_is_what_vllms_writer_does(runs: tuple[Run, Run]) -> None:
    """The formulas that the oracles rest on, against vLLM's own writer."""
    for layer in runs[0].engine.probe.layers().values():
        assert torch.equal(owners(layer), probed_owners(layer))


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        pytest.param("vec", torch.bfloat16, id="vec-bf16"),
        pytest.param("vec", torch.uint8, id="vec-fp8"),
        pytest.param("vec16", torch.bfloat16, id="vec16-bf16"),
        pytest.param("amx", torch.bfloat16, id="amx-bf16"),
        pytest.param("amx", torch.uint8, id="amx-fp8"),
    ],
)
def test_nwors_probing_finds_each_packing(
    isa: str, dtype: torch.dtype, cow: Engine
) -> None:
    """Also those that this machine's attention cannot run: vLLM's writers can."""
    if dtype is torch.uint8 and not HAS_AVX512:
        pytest.skip("vLLM's fp8 KV cache on CPU needs AVX512 or AMX")
    layer = copy.copy(next(iter(cow.probe.target_layers().values())))
    layer.isa = isa
    layer.kv_cache = torch.zeros(layer.kv_cache.shape, dtype=dtype)
    layer.impl = copy.copy(layer.impl)
    layer.impl.kv_cache_dtype = "fp8" if dtype is torch.uint8 else "auto"
    expected = owners(layer)
    assert torch.equal(expected, probed_owners(layer))
    runs = probe_layout(layer, layer.kv_cache, torch.bfloat16).runs
    assert runs is not None
    found = torch.full_like(expected, -1).view(-1)
    for offset, slot_runs in enumerate(runs.tolist()):
        for start, length in slot_runs:
            assert (found[start : start + length] == -1).all()
            found[start : start + length] = offset
    assert torch.equal(found.view_as(expected), expected)


def test_hash_sees_every_byte() -> None:
    rows = torch.randint(0, 256, (4, 256), dtype=torch.uint8)
    plain = hash_rows(rows)
    for byte in range(256):
        changed = rows.clone()
        changed[:, byte] ^= 1 << (byte % 8)
        assert (hash_rows(changed) != plain).all()
    assert torch.equal(hash_rows(rows.clone()), plain)


def test_rejected_slots_are_restored_and_nothing_else_changes(
    runs: tuple[Run, Run],
) -> None:
    """Guarantee 1 and the first half of 2: snapshots at each step of one engine."""
    cow = runs[1]
    assert cow.oracle.violations == []
    assert not cow.engine.manager.fallbacks


def test_oracle_fails_on_vanilla(runs: tuple[Run, Run]) -> None:
    """Required of the oracle: without NWOR it reports every slot that a rejected
    draft changed, in every layer, and nothing else."""
    off = runs[0]
    assert off.engine.manager is None
    assert {violation.kind for violation in off.oracle.violations} == {"not restored"}
    layers = {violation.layer for violation in off.oracle.violations}
    assert layers == set(off.engine.probe.target_layers())
    num_slots = sum(len(violation.slots) for violation in off.oracle.violations)
    assert num_slots == off.oracle.num_dirty


def test_cache_is_a_function_of_committed_tokens(runs: tuple[Run, Run]) -> None:
    """The second half of guarantee 2, and more: cow's cache equals off's at every
    slot, and where off's last write was a rejected draft it equals what off held
    before; no slot is excepted."""
    off, cow = runs
    assert off.result.schedule() == cow.result.schedule()
    assert off.result.num_preemptions > 0
    assert max(off.result.cached.values()) >= BLOCK_SIZE
    expected, num_dirty = committed_hashes(off.hashes, off.result.steps)
    assert num_dirty > 100
    assert differences([off.hashes.start], [cow.hashes.start]) == []
    assert differences(expected, cow.hashes.steps) == []
    assert differences(expected, off.hashes.steps) != [], "it cannot tell vanilla"


def test_staged_drafts_touch_no_block_of_a_request(
    staged: tuple[Run, StagedRun],
) -> None:
    """Guarantee 3's second half, and where shadow blocks may be seen."""
    off, stage = staged
    infos = stage.engine.runner.nwor_state.infos
    assert {info.resolved for info in infos} == {"stage"}
    assert not stage.engine.manager.fallbacks
    assert stage.oracle.num_real == off.engine.runner.kv_cache_config.num_blocks
    assert stage.oracle.violations == []
    assert stage.oracle.num_staged > 100


def test_staged_outputs_and_cache_are_those_of_off(
    staged: tuple[Run, StagedRun],
) -> None:
    """Tokens, logprobs, acceptance, and every byte of every real block after every
    step: guarantees 1 to 3."""
    off, stage = staged
    assert stage.result.tokens == off.result.tokens
    assert stage.result.logprobs == off.result.logprobs
    assert stage.result.schedule() == off.result.schedule()
    expected, _ = committed_hashes(off.hashes, off.result.steps)
    assert differences([off.hashes.start, *expected], stage.real_hashes()) == []


def test_two_threads(cow: Engine) -> None:
    """NWOR's loops share the work between threads; the runs above use one."""
    assert watch(cow, FEW_REQUESTS, num_threads=2).oracle.violations == []


SABOTAGE = {
    "no_restore": "not restored",
    "one_layer_skipped": "not restored",
    "slot_shifted": "stray write",
    "one_draft_too_many": "stray write",
    "one_draft_too_few": "not restored",
    "log_not_taken": "torn",
}


@pytest.mark.parametrize("fault", SABOTAGE)
def test_oracle_reports_sabotage(cow: Engine, fault: str) -> None:
    """The oracle sees each wrong way to restore, so its silence means something."""
    ops = cow.manager.launches.ops

    def restore(table, runs, undo_log, log_slots, log_windows, sampled, *rest):
        if fault == "no_restore":
            return
        if fault == "one_layer_skipped":
            table = table[1:]
        if fault == "slot_shifted":
            log_slots = torch.where(log_slots >= 0, log_slots ^ 1, log_slots)
        if fault == "one_draft_too_many":
            sampled = sampled.clone()
            sampled.scatter_(1, (sampled >= 0).sum(1, keepdim=True).long() - 1, -1)
        if fault == "one_draft_too_few":
            sampled = torch.nn.functional.pad(sampled, (1, 0), value=7)
        ops.restore_rejected_drafts(
            table, runs, undo_log, log_slots, log_windows, sampled, *rest
        )

    def log(table, runs, slot_mapping, logits, cu, undo_log, *rest):
        scratch = undo_log.clone() if fault == "log_not_taken" else undo_log
        ops.log_cache_slots(table, runs, slot_mapping, logits, cu, scratch, *rest)

    with replaced_ops(cow, restore_rejected_drafts=restore, log_cache_slots=log):
        sick = watch(cow, FEW_REQUESTS)
    assert SABOTAGE[fault] in {violation.kind for violation in sick.oracle.violations}
    healthy = watch(cow, FEW_REQUESTS, sick.truth)
    assert healthy.oracle.violations == []


def test_violation_names_the_slot(cow: Engine) -> None:
    """One byte changed in one slot during commit is reported as that slot."""
    name, layer = list(cow.probe.target_layers().items())[2]
    page = layer.kv_cache[5, 1].view(torch.uint8).view(-1)
    byte = int((owners(layer)[1] == 7).nonzero()[3])

    class Meddler(SnapshotOracle):
        def committed(self, step: Step) -> None:
            page[byte] ^= 0x10
            super().committed(step)

    oracle = Meddler(cow.probe)
    cow.run([Request("one", prompt(9, 10), 1)], [oracle])
    slot = 5 * BLOCK_SIZE + 7
    assert oracle.violations == [Violation(0, "stray write", name, (slot,))]
