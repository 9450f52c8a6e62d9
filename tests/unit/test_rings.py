# SPDX-License-Identifier: Apache-2.0
"""Rings at start-up: described, called too small, refused by name.

Runners are the stand-ins of test_discovery. The layers of two models are vLLM's own;
those of GLM-5 need torchvision, and those of Step 5 are in 0.33.0 only.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.models.deepseek_v41 import compressor
from vllm.models.qwen4_exp.common.qsa_cache import QSAKeyStateCache
from vllm.v1.kv_cache_interface import CircularBufferSpec, UniformTypeKVCacheSpecs

from tests.helpers.logs import nwor_log
from tests.unit.test_discovery import (
    BLOCKS,
    SLOTS,
    build,
    layer,
    only_the_transaction,  # noqa: F401
    runner,
    table,
)
from tests.unit.test_reservation import MAX_MODEL_LEN, NUM_DRAFTS
from vllm_nwor.audit import build as audit
from vllm_nwor.config import AuditMode, NworConfig, Strict
from vllm_nwor.hooks import caches, states
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.layout.states import StateKind, ring_shortage

WIDTH = 64
SPEC = CircularBufferSpec(
    block_size=8, num_kv_heads=2, head_size=WIDTH, head_size_v=0, dtype=torch.bfloat16
)


def vllm_with(num_drafts):
    return SimpleNamespace(
        num_speculative_tokens=num_drafts,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def qsa():
    """Of Qwen 4: its spec and the layer, bound."""
    config = vllm_with(NUM_DRAFTS)
    found = QSAKeyStateCache(
        head_size=WIDTH,
        dtype=torch.bfloat16,
        cache_config=SimpleNamespace(block_size=64),
        prefix="ring",
        vllm_config=config,
        compress_ratio=4,
    )
    spec = found.get_kv_cache_spec(config)
    found.bind_kv_cache(bound(1, spec.block_size))
    return spec, found


def bound(heads, rows):
    return torch.zeros(BLOCKS, heads, rows, WIDTH, dtype=torch.bfloat16)


def kpool(rows):
    """Of GLM-5: keys and gates."""
    found = SimpleNamespace(kv_cache=bound(2, rows), _index_kpool=4)
    return replace(SPEC, block_size=rows), found


def step5():
    """Its blocks are as large as the others, whatever the spec's block size, and have
    neighbours."""
    pages = torch.zeros(BLOCKS, 3, 1, SLOTS, 2 * WIDTH, dtype=torch.bfloat16)
    found = SimpleNamespace(
        kv_cache=pages[:, 1], capacity=4 * SLOTS, required_rows=7 + NUM_DRAFTS
    )
    return replace(SPEC, block_size=SLOTS), found


def with_ring(spec, ring, *more, **changes):
    """A runner with attention in group 0 and the ring in group 1."""
    found = runner({"a": layer()}, (spec, {"ring": ring}), *more, **changes)
    tables = found.input_batch.block_table
    tables[1] = table(spec.block_size)
    return found


def described(found):
    (group,) = states.groups_of(found)
    return group


@pytest.mark.parametrize(
    ("make", "ratio", "shape", "row_stride"),
    [
        (qsa, 4, (BLOCKS, 1, 8, WIDTH), WIDTH),
        (lambda: kpool(8), 4, (BLOCKS, 2, 8, WIDTH), WIDTH),
        (step5, 8, (BLOCKS, 1, 4 * SLOTS, WIDTH // 2), WIDTH // 2),
    ],
    ids=["qsa", "kpool", "step5"],
)
def test_rings_are_described(make, ratio, shape, row_stride):
    spec, ring = make()
    group = described(with_ring(spec, ring))

    (found,) = group.states
    assert (group.group_id, group.is_ring, group.refusal) == (1, True, "")
    assert (found.name, found.kind, found.ratio) == ("ring", StateKind.RING, ratio)
    assert found.tensor.shape == shape
    assert found.tensor.stride(2) == row_stride
    assert found.tensor.stride(0) == ring.kv_cache.stride(0)
    assert found.tensor.data_ptr() == ring.kv_cache.data_ptr()
    assert ring_shortage(group, NUM_DRAFTS) == ""


def test_a_ring_with_room_for_drafts_is_native():
    """vLLM itself keeps the rows; under STRICT it is no refusal."""
    _, infos, _ = build(with_ring(*qsa()), strictness=Strict.STARTUP)

    assert [info.resolved for info in infos] == ["cow", "native"]
    assert infos[1].reason == caches.KEPT_IN_RING


def test_a_ring_is_one_block_of_any_length():
    """So it is a request's own, however much of its text was found in the cache."""
    groups = caches.bound(with_ring(*qsa())).groups
    assert [group.block_size for group in groups] == [SLOTS, MAX_MODEL_LEN]


class KpoolTailSpec(CircularBufferSpec):
    """As vLLM 0.30 calls it; its ring has as many rows as a group."""


def test_a_ring_that_is_too_small_is_called_so():
    """By any name of its spec."""
    small, ring = kpool(4)
    spec = KpoolTailSpec(**vars(small))
    _, infos, _ = build(with_ring(spec, ring))

    assert infos[1].resolved == "off"
    assert infos[1].reason == (
        "layer ring has a ring of 4 rows; for 4 tokens an entry and "
        f"{NUM_DRAFTS} drafts it needs {NUM_DRAFTS + 3}: drafts that are rejected "
        "overwrite rows of accepted tokens that are read later"
    )


def test_layers_that_do_not_say_their_ratio_are_named(monkeypatch):
    """DeepSeek V4.1: the layer's owner has it."""
    config = vllm_with(NUM_DRAFTS)
    monkeypatch.setattr(compressor, "get_current_vllm_config", lambda: config)
    ring = compressor.CompressorStateCache(WIDTH, torch.float32, "ring")
    spec = ring.get_kv_cache_spec(config)
    ring.bind_kv_cache(torch.zeros(BLOCKS, 1, spec.block_size, WIDTH))
    group = described(with_ring(spec, ring))

    assert (group.states, group.is_ring) == ((), False)
    assert group.refusal == (
        "layer ring has a ring; CompressorStateCache does not say how many tokens it "
        "compresses to one entry"
    )
    ring.compress_ratio = 2
    assert described(with_ring(spec, ring)).states[0].tensor.shape == (
        BLOCKS,
        1,
        spec.block_size,
        WIDTH,
    )


def test_rings_of_one_group_may_have_specs_of_their_own():
    spec, ring = kpool(8)
    both = UniformTypeKVCacheSpecs(
        block_size=8, kv_cache_specs={"ring": spec, "other": spec}
    )
    found = runner((both, {"ring": ring, "other": kpool(8)[1]}), entry_tokens=8)

    assert described(found).about() == "2 rings of 8 rows for 4 tokens"


def test_rings_of_the_drafter_are_left_out():
    """It writes them between a step's end and the next one."""
    found = with_ring(*qsa())
    found.drafter = SimpleNamespace(_draft_attn_layer_names={"ring"})

    assert described(found).refusal == "all its rings are the drafter's"
    spec = states.kv.MambaSpec(block_size=8, shapes=((1,),), dtypes=(torch.float32,))
    found.kv_cache_config.kv_cache_groups[1].kv_cache_spec = spec
    assert described(found).refusal == "all its layers are the drafter's"


def test_rings_that_cannot_be_found_are_refused():
    spec, ring = kpool(8)
    found = with_ring(spec, ring)
    found.input_batch.block_table[1] = table(4)
    assert described(found).refusal == (
        "layer ring has a ring, and its block is split in the table"
    )
    ring.kv_cache = torch.zeros(BLOCKS, 3, 5)
    reason = described(with_ring(spec, ring)).refusal
    assert reason.startswith("its states could not be examined: RuntimeError")


@pytest.mark.parametrize("rows", [8, 4])
def test_the_audit_says_what_it_follows(monkeypatch, rows):
    monkeypatch.setattr(hooks, "_builders", [audit])
    monkeypatch.setattr(hooks.weights, "watch", lambda runner: None)
    found = with_ring(*kpool(rows), max_model_len=64)
    config = NworConfig(audit=AuditMode.LOG)
    with nwor_log() as lines:
        observer = hooks._observed(found, config).named("audit")

    assert observer.audit.states.layers == [("ring", "ring", 1)]
    # Nothing is read from vLLM's metadata.
    assert observer.metadata_final is None
    log = "\n".join(lines)
    assert f"group 0: 1 layers; group 1: 1 rings of {rows} rows for 4 tokens;" in log
    assert ("NWOR audit: group 1: layer ring has a ring of 4 rows;" in log) == (
        rows < 8
    )
