# SPDX-License-Identifier: Apache-2.0
"""Refusals at start-up, by name, and the memory of the undo log.

Runners are stand-ins with real KV-cache specs; tests/integration has real ones.
"""

import copy
import itertools
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, MambaSpec

from tests.helpers import reach
from tests.helpers.logs import nwor_log
from tests.unit.test_reservation import NUM_DRAFTS, NUM_SEQS, vllm_config
from vllm_nwor.base.errors import NworError
from vllm_nwor.config import Mode, NworConfig, OnReject, Strict
from vllm_nwor.hooks import engine_core, layers, staging
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.layout.kv_layout import row_layout
from vllm_nwor.layout.regions import ShadowRegion, StagedGroup, blocks_per_seat
from vllm_nwor.layout.tables import LayerCache
from vllm_nwor.transaction import build as transaction
from vllm_nwor.transaction.draft_manager import DraftCommitManager
from vllm_nwor.transaction.undo_log import num_bytes

BLOCKS, HEADS, SLOTS, DIM = 4, 2, 16, 32
SPEC = FullAttentionSpec(
    block_size=SLOTS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
)
SLOT_BYTES = 2 * HEADS * DIM * 4


class RowImpl:
    """Writes [key | value] of each head to its row, as most backends do."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        block, offset = divmod(int(slot_mapping[0]), SLOTS)
        kv_cache[block, :, offset] = torch.cat([key[0], value[0]], dim=-1)


class FailingImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        raise RuntimeError("head size 32 is not compiled")


class MoreImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping, scale=None):
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class ScaleImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping, scale):
        raise AssertionError("it is called without its scale")


def layer(kind=RowImpl, dtype="auto", backend="FLASH_ATTN"):
    """kind: a class of implementations, or the name of one that writes rows."""
    impl = (type(kind, (RowImpl,), {}) if isinstance(kind, str) else kind)()
    impl.kv_cache_dtype = dtype
    return SimpleNamespace(
        impl=impl,
        kv_cache=torch.zeros(BLOCKS, HEADS, SLOTS, 2 * DIM),
        num_kv_heads=HEADS,
        head_size=DIM,
        get_attn_backend=lambda: named(backend),
    )


def named(name):
    return SimpleNamespace(get_name=lambda: name)


def table(entry_tokens):
    """A V1 runner's block table."""
    return SimpleNamespace(
        block_size=entry_tokens,
        block_table=SimpleNamespace(gpu=torch.zeros(8, 9, dtype=torch.int32)),
    )


def runner(*groups, entry_tokens=SLOTS, **changes):
    """groups: (spec, {layer name: layer}) or the layers, for each KV-cache group.
    entry_tokens: tokens for each entry of a block table. changes: other attributes."""
    groups = [group if isinstance(group, tuple) else (SPEC, group) for group in groups]
    layers = {name: found for _, group in groups for name, found in group.items()}
    kv_cache_groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=list(group))
        for spec, group in groups
    ]
    specs = {name: spec for spec, group in groups for name in group}
    attributes = {
        "device": torch.device("cpu"),
        "kv_cache_config": SimpleNamespace(
            kv_cache_groups=kv_cache_groups, num_blocks=BLOCKS
        ),
        "input_batch": SimpleNamespace(
            block_table=[table(entry_tokens) for _ in groups]
        ),
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "get_kv_cache_spec": lambda: specs,
        "max_num_reqs": 8,
        "vllm_config": vllm_config(),
    }
    return SimpleNamespace(**attributes | changes)


@pytest.fixture(autouse=True)
def only_the_transaction(monkeypatch):
    monkeypatch.setattr(hooks, "_builders", [transaction])


def build(found, mode=Mode.COW, strictness=Strict.NEVER, **settings):
    """What the hooks and the builder make of a runner whose caches are bound."""
    config = NworConfig(mode=mode, strictness=strictness, **settings)
    observer = hooks._observed(found, config).named("transaction")
    return observer.manager, list(observer.infos), observer.report


STATE_SPEC = {"block_size": SLOTS, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
TOO_FEW = MambaSpec(**STATE_SPEC, num_speculative_blocks=NUM_DRAFTS - 1)
ENOUGH = replace(TOO_FEW, num_speculative_blocks=NUM_DRAFTS)
STATE = {"s": SimpleNamespace(kv_cache=[torch.zeros(BLOCKS, 4, 4)])}
CROSS = CrossAttentionSpec(SLOTS, num_kv_heads=1, head_size=8, dtype=torch.float32)
# vLLM's has a cache without an attention implementation.
NO_IMPL = {"kv_cache": torch.zeros(BLOCKS, SLOTS, 132, dtype=torch.uint8)}
INDEXER_CACHE = type("DeepseekV32IndexerCache", (), NO_IMPL)()
IN_TWO = layer()
IN_TWO.kv_cache = [IN_TWO.kv_cache, IN_TWO.kv_cache]
NVFP4, NVFP4_6 = "KV cache of type nvfp4", "KV cache of type nvfp4_4over6"
ROCM, AITER = "RocmAttentionImpl", "AiterFlashAttentionImpl"
NO_COPIES = "recurrent state without a copy for each draft"
INDEXER = "the indexer's cache of DeepSeek V3.2"
# The name in docs/reach.md, a layer or a group, and the reason.
REFUSED = [
    (NVFP4, layer(dtype="nvfp4"), f"has a {NVFP4}, which keeps the scales of a"),
    (NVFP4_6, layer(dtype="nvfp4_4over6"), f"has a {NVFP4_6}, which keeps the scales"),
    ("ROCm's native attention", layer(ROCM), f"has a {ROCM}, which packs the slots"),
    ("AITER attention of ROCm", layer(AITER), f"has a {AITER}, which packs the slots"),
    ("", layer(FailingImpl), "FailingImpl cannot be probed: RuntimeError: head size"),
    (
        "",
        layer(ScaleImpl),
        r"ScaleImpl.do_kv_cache_update has parameters \(layer, key, value, kv_cache, "
        r"slot_mapping, scale\); supported are \(layer, key, value, kv_cache, slot_",
    ),
    (INDEXER, INDEXER_CACHE, "is a DeepseekV32IndexerCache: no attention"),
    ("", IN_TWO, "has a list for a KV cache; expected one tensor"),
    (NO_COPIES, (TOO_FEW, STATE), "has a MambaSpec, which is not slot based"),
    ("cross attention", (CROSS, STATE), "has a CrossAttentionSpec, which drafts never"),
    (
        "compressed and ring-shaped caches",
        (replace(SPEC, tokens_per_state=2), STATE),
        "has a compressed or ring-shaped FullAttentionSpec",
    ),
]


@pytest.mark.parametrize("mode", [Mode.COW, Mode.STAGE])
@pytest.mark.parametrize(("name", "refused", "message"), REFUSED)
def test_a_refused_group_is_named_and_the_other_protected(name, refused, message, mode):
    if not isinstance(refused, tuple):
        refused = {"c": layer(), "b": refused}
    manager, infos, _ = build(runner({"a": layer()}, refused), mode=mode)

    assert [info.resolved for info in infos] == ["cow", "off"]
    assert re.match(f"layer [bs]:? {message}", infos[1].reason)
    assert [group.group_id for group in manager.groups] == [0]
    if name:
        reach.refused_stand_in(name, infos[1].reason, [mode.value])


def test_a_writer_may_have_more_parameters_with_defaults():
    _, (info,), _ = build(runner({"a": layer(MoreImpl)}))

    assert (info.resolved, info.reason) == ("cow", "1 layers, rows")


def test_state_that_vllm_keeps_a_copy_of_for_each_draft_is_native():
    """It needs no protection, which is no refusal, under STRICT neither."""
    state = (ENOUGH, STATE)

    manager, infos, _ = build(runner(state, {"a": layer()}), strictness=Strict.STARTUP)

    assert [info.resolved for info in infos] == ["native", "cow"]
    assert infos[0].reason == (
        "vLLM keeps a copy of this state for each draft, and goes on from that of the "
        "last accepted one"
    )
    assert [group.group_id for group in manager.groups] == [1]
    manager, infos, _ = build(runner(state), strictness=Strict.STARTUP)
    assert (manager, [info.resolved for info in infos]) == (None, ["native"])


@pytest.mark.parametrize("on_reject", OnReject)
def test_everything_that_outlives_a_step_is_in_the_reserved_memory(on_reject):
    """vLLM's sleep mode unmaps later allocations."""
    found = runner({"a": layer(), "b": layer()}, {"c": layer()})
    config = NworConfig(mode=Mode.COW, on_reject=on_reject)
    storage = hooks.reserve(found, config, transaction)
    found.nwor_storages = {"transaction": storage}
    manager = hooks._observed(found, config).named("transaction").manager

    assert manager.capacity == NUM_SEQS * NUM_DRAFTS
    rows = [manager.capacity, 1] if on_reject is OnReject.POISON else [manager.capacity]
    assert len(storage) == sum(num_bytes(n, 3 * SLOT_BYTES, 3, 3) for n in rows)
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.numel()
    tensors = [manager.counters]
    for group in manager.groups:
        tensors += [group.undo_log, group.log_slots, group.log_windows]
        tensors += [part.table for part in group.tables]
        if on_reject is OnReject.POISON:
            tensors += [group.source.table, *(p.kv_cache for p in group._poisoned)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(begin <= first and last <= end for first, last in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("name", "dtype", "poison", "value"),
    [
        ("auto", torch.bfloat16, 0x47, 50944),
        ("auto", torch.float16, 0x77, 30576),
        ("fp8", torch.float8_e4m3fn, 0x77, 240),
        ("fp8_e5m2", torch.float8_e5m2, 0x77, 28672),
        ("fp8_ds_mla", torch.float32, 0x47, 51015.277),  # its scales
        ("int8_per_token_head", torch.int8, 0x47, 71),
    ],
)
def test_poison_is_large_and_finite_in_each_cache_dtype(name, dtype, poison, value):
    cache = torch.empty(0, dtype=dtype if name == "auto" else torch.uint8)
    assert layers._poison(SimpleNamespace(kv_cache_dtype=name), cache) == poison
    numbers = torch.full((8,), poison, dtype=torch.uint8).view(dtype)
    assert torch.allclose(numbers.double(), torch.tensor(value).double(), rtol=1e-6)


def test_nothing_is_allocated_in_a_pool_that_sleeps():
    found = runner({"a": layer()}, device=torch.device("meta"))
    found.vllm_config.model_config.enable_sleep_mode = True

    manager, infos, _ = build(found)

    assert manager is None
    assert "no memory was reserved, and sleep mode" in infos[0].reason


NO_LOG = "the undo log cannot be set up: OSError: x"
NO_MEMORY = "no memory for the undo log of 32 drafts: x"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("hooks.layers.probe_layout", "layer a: RowImpl cannot be probed: OSError: x"),
        (
            "hooks.layers._target_layers_of",
            "its layers could not be examined: OSError: x",
        ),
        *(("layout.tables.DeviceMemory.take", text) for text in (NO_LOG, NO_MEMORY)),
        ("hooks.caches.config_refusal", "vLLM is not as expected: OSError: x"),
    ],
)
def test_an_unexpected_error_is_a_refusal(place, text, monkeypatch):
    """A group that is refused for its own reason keeps that reason."""
    found = runner({"a": layer()}, {"b": layer(dtype="nvfp4")})
    error = torch.OutOfMemoryError if text == NO_MEMORY else OSError

    def fail(*arguments, **_):
        raise error("x")

    monkeypatch.setattr(f"vllm_nwor.{place}", fail)

    manager, infos, report = build(found)

    assert manager is None
    assert [info.resolved for info in infos] == ["off", "off"]
    assert infos[0].reason == text
    assert ("nvfp4" in infos[1].reason) is not text.startswith(("its", "vLLM"))
    assert report.take_payload().read()[2] == infos
    with pytest.raises(NworError, match=re.escape(text)):
        build(found, strictness=Strict.STARTUP)


def test_out_of_memory_while_reserving_reserves_nothing(monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError

    found = runner({"a": layer()})
    monkeypatch.setattr(torch, "empty", no_memory)

    assert hooks.reserve(found, NworConfig(mode=Mode.COW), transaction) is None


def test_the_counter_ring_has_a_slot_for_each_step_in_flight():
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    found = runner({"a": layer()})

    for said, expected in ((None, 2), (1, 1), (5, 5)):
        if said is not None:
            found.vllm_config.max_concurrent_batches = said
        manager, *_ = build(found)
        assert len(manager._ring) == len(manager._payloads) == expected + 1


# The last two of BLOCKS blocks are shadow blocks of one request.
REGION = ShadowRegion(2, 1, 2, num_real_blocks=2, block_size=SLOTS)
RESERVED = {0: REGION}


def staged_runner(*groups, reserved=RESERVED, entry_tokens=SLOTS):
    """A V1 runner in mode stage. reserved: the engine core's shadow regions."""
    groups = groups or ({"a": layer()},)
    found = runner(*groups, entry_tokens=entry_tokens)
    if reserved is not None:
        found.kv_cache_config.nwor_shadow = reserved
    return found


def staged_runner_v2(*backends, drafter=(), kernel_block_size=None, **tables):
    """A V2 runner. drafter: names of its drafter's layers."""
    found = staged_runner({"a": layer(), **dict.fromkeys(drafter, layer())})
    del found.input_batch
    tables = tables or {"block_sizes": [SLOTS]}
    input_block_tables = [torch.zeros(8, 9, dtype=torch.int32)]
    found.block_tables = SimpleNamespace(
        input_block_tables=input_block_tables, **tables
    )
    found.speculator = SimpleNamespace(draft_attn_layer_names=set(drafter))
    attention = {"kernel_block_size": kernel_block_size}
    found.attn_groups = [
        [SimpleNamespace(backend=named(name), **attention) for name in backends]
    ]
    return found


# The scheduler's blocks are two of the layer's.
DOUBLE = {0: ShadowRegion(1, 1, 1, 1, 2 * SLOTS)}
# A V2 table may be in kernel blocks.
KERNEL_BLOCKS = {"kernel_block_sizes": [SLOTS], "block_sizes": [2 * SLOTS]}


@pytest.mark.parametrize(
    ("found", "entry_tokens"),
    [
        (staged_runner(), SLOTS),
        (staged_runner(reserved=DOUBLE, entry_tokens=2 * SLOTS), 2 * SLOTS),
        (staged_runner_v2("FLASHINFER", **KERNEL_BLOCKS), SLOTS),
        (staged_runner_v2("FLASHINFER", block_sizes=[SLOTS]), SLOTS),
        (staged_runner_v2("FLASH_ATTN", "TRITON_ATTN", drafter=["d"]), SLOTS),
    ],
)
def test_a_group_with_shadow_blocks_is_staged(found, entry_tokens):
    manager, (info,), _ = build(found, mode=Mode.STAGE)

    assert (info.requested, info.resolved) == ("stage", "stage")
    assert info.reason == "1 layers, rows"
    group = manager.shadow.groups[0]
    assert group.entry_tokens == entry_tokens
    assert group.first_entry == found.kv_cache_config.nwor_shadow[0].first_block
    manager, (info,), _ = build(found)
    assert (manager.shadow, info.resolved) == (None, "cow")


SIZES = "layer a has blocks of 16 tokens, its block table {}, the scheduler 16"
COPIES = (
    "the drafter has layers in this group, and {} may copy the block table into its "
    "metadata"
)
NOTHING = "the engine core has reserved no blocks for them"
NOT_HERE = "no blocks are reserved for this group"
TOO_FAR = "layer a has 64 slots, and shadow blocks end at 80"
BEYOND = {0: ShadowRegion(3, 1, 2, 3, SLOTS)}
SEVERAL = "FLASH_ATTN", "FLEX_ATTENTION", "NEW"
V2 = partial(staged_runner_v2, drafter=["d"])


@pytest.mark.parametrize(
    ("found", "reason", "copier"),
    [
        (staged_runner(reserved=None), NOTHING, ""),
        (staged_runner(reserved="no room"), "no room", ""),
        (staged_runner(reserved={1: REGION}), NOT_HERE, ""),
        (staged_runner(entry_tokens=8), SIZES.format(8), ""),
        (staged_runner(entry_tokens=32), SIZES.format(32), ""),
        (staged_runner(reserved=BEYOND), TOO_FAR, ""),
        (V2("FLASHINFER"), COPIES, "FLASHINFER"),
        (V2(*SEVERAL), COPIES, "FLEX_ATTENTION, NEW"),
        (V2("FLASH_ATTN", kernel_block_size=8), COPIES, "a kernel block size of 8"),
    ],
)
def test_a_group_that_cannot_be_staged_is_logged_with_a_reason(found, reason, copier):
    manager, (info,), _ = build(found, mode=Mode.STAGE)

    reason = reason.format(copier)
    assert manager.shadow is None
    assert (info.requested, info.resolved) == ("stage", "cow")
    assert info.reason == f"no shadow blocks: {reason}; 1 layers, rows"
    if copier and "NEW" not in copier:
        name = f"a drafter's layers in the group of {copier}"
        reach.refused_stand_in(name, reason, ["stage"], "V2")


@pytest.mark.parametrize("reuses_metadata", [False, True])
def test_layers_to_be_refused_are_marked_before_the_cache_is_sized(reuses_metadata):
    """A layer that cannot be examined is not marked."""
    bad = layer(dtype="nvfp4", backend="FLEX")
    found = runner({"good": layer(), "bad": bad, "draft": layer()})
    found.drafter = SimpleNamespace(_draft_attn_layer_names={"draft"})
    specs = {name: copy.copy(SPEC) for name in ("good", "bad", "draft")}

    staging.mark_layers(found, specs, reuses_metadata)
    strange = copy.copy(SPEC)
    staging.mark_layers(runner({"strange": object()}), {"strange": strange}, True)

    assert {name: spec.nwor_verdict for name, spec in specs.items()} == {
        "good": (False, "", ""),
        "bad": (False, ANY, "FLEX" if reuses_metadata else ""),
        "draft": (True, "", ""),
    }
    assert specs["bad"].nwor_verdict.refusal.startswith("layer bad has a KV cache of")
    assert specs["good"] == SPEC
    assert not hasattr(strange, "nwor_verdict")


def test_more_entries_than_a_kernel_holds_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(staging.ops, "MAX_SPAN", 1)
    found = staged_runner()
    manager, (info,), _ = build(found, mode=Mode.STAGE)
    assert info.resolved == "stage"

    group = found.kv_cache_config.kv_cache_groups[0]
    found.device = torch.device("cuda")
    refusal = staging.staged_group(found, 0, group, manager.groups[0].layers)
    assert refusal == "a request needs 2 entries of its block table, more than 1"


def test_one_group_is_staged_and_another_logged():
    found = staged_runner({"a": layer()}, {"b": layer()}, reserved={1: REGION})

    with nwor_log() as lines:
        manager, infos, _ = build(found, mode=Mode.STAGE)

    assert [info.resolved for info in infos] == ["cow", "stage"]
    assert list(manager.shadow.groups) == [1]
    assert [group.group_id for group in manager.groups] == [1, 0]
    (line,) = lines
    start = "INFO NWOR stage requested; group 0: cow (no shadow blocks: "
    assert line.startswith(start)
    assert "; group 1: stage (1 layers, rows);" in line
    assert line.endswith("; shadow blocks: 1 seats, 0.0 MiB")
    layout = manager.groups[0].layers[0].layout
    assert manager.shadow_bytes == REGION.num_blocks * 16 * layout.slot_bytes > 0


@pytest.mark.parametrize(("is_staged", "num_lost"), [(True, 4), (False, 6)])
def test_unused_reserved_blocks_of_a_refused_group_are_logged(is_staged, num_lost):
    """Also if nothing is protected."""
    reserved = {0: REGION, 1: replace(REGION, num_seats=2)}
    first = layer(dtype="auto" if is_staged else "nvfp4")
    found = staged_runner({"a": first}, {"b": layer(dtype="nvfp4")}, reserved=reserved)

    with nwor_log() as lines:
        manager, infos, _ = build(found, mode=Mode.STAGE)

    assert [info.resolved for info in infos] == ["stage" if is_staged else "off", "off"]
    assert (manager is not None) == is_staged
    assert lines[0].endswith(f"; {num_lost} reserved KV blocks stay unused")


@pytest.mark.parametrize("num_seqs", [1, 4, 64])
@pytest.mark.parametrize("num_drafts", [1, 3, 20])
@pytest.mark.parametrize("block_size", [8, 16, 64, 528])
def test_reserved_memory_is_enough_for_shadow_blocks(num_seqs, num_drafts, block_size):
    """One group, a seat for each sequence, kernel blocks of 16 tokens."""
    per_seat = blocks_per_seat(num_drafts, block_size)
    entry_tokens = min(block_size, 16)
    cache = layer()
    region = ShadowRegion(2, num_seqs, per_seat, 2, block_size)
    found = staged_runner((replace(SPEC, block_size=block_size), {"a": cache}))
    found.vllm_config.speculative_config.num_speculative_tokens = num_drafts
    found.vllm_config.scheduler_config.max_num_seqs = num_seqs
    found.vllm_config.scheduler_config.max_num_batched_tokens = 4096
    storage = hooks.reserve(found, NworConfig(mode=Mode.STAGE), transaction)
    staged = StagedGroup(region, entry_tokens)

    manager = DraftCommitManager(
        NworConfig(mode=Mode.STAGE),
        [(0, [LayerCache("a", cache.kv_cache, row_layout(cache.kv_cache))])],
        num_seqs * num_drafts,
        storage,
        staged={0: staged},
    )

    assert manager.capacity == num_seqs * num_drafts


def connector(name, *children, **arguments):
    """A connector's configuration, as on the command line."""
    found = {"kv_connector": name, "kv_role": "kv_both", **arguments}
    if children:
        found["kv_connector_extra_config"] = {"connectors": list(children)}
    return found


several = partial(connector, "MultiConnector")
BY_LAYER = connector("ExampleConnector")
OFFLOADING = connector("OffloadingConnector")
MINE = "mine.connectors"
OF_MINE = connector("OffloadingConnector", kv_connector_module_path=MINE)
NESTED = several(several(connector("LMCacheConnectorV1"), BY_LAYER), BY_LAYER)


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        ({}, ""),
        (OFFLOADING, ""),
        (several(OFFLOADING, connector("NixlConnector")), ""),
        (connector("NobodyKnowsThisOne"), "NobodyKnowsThisOne"),
        (several(OFFLOADING, BY_LAYER), "ExampleConnector"),
        (NESTED, "LMCacheConnectorV1, ExampleConnector"),
        (OF_MINE, f"{MINE}.OffloadingConnector"),
        (several(OFFLOADING, kv_connector_module_path=MINE), f"{MINE}.MultiConnector"),
    ],
)
def test_connectors_that_may_read_or_write_inside_the_forward(configured, names):
    found = SimpleNamespace(kv_transfer_config=KVTransferConfig(**configured))

    assert engine_core.connectors_in_forward(found) == names


def test_a_connector_that_may_save_before_commit_is_named_and_never_staged():
    exports = (
        "1 layers, rows; ExampleConnector may export rejected drafts' bytes during the "
        "forward, before commit"
    )
    found = staged_runner()
    found.vllm_config.kv_transfer_config = KVTransferConfig(**BY_LAYER)

    _, (info,), _ = build(found)
    assert (info.resolved, info.reason) == ("cow", exports)

    manager, (info,), _ = build(found, mode=Mode.STAGE)
    assert (manager.shadow, info.resolved) == (None, "cow")
    start = "no shadow blocks: the KV connector ExampleConnector "
    assert info.reason.startswith(start)
    assert info.reason.endswith(exports)


@pytest.mark.parametrize("name", sorted(engine_core.ALLOWED_CONNECTORS))
def test_connectors_that_save_after_commit_do_nothing_inside_the_forward(name):
    """They save in vLLM's `finalize_kv_connector`, after commit."""
    found = KVConnectorFactory.get_connector_class_by_name(name)

    for method in (found.save_kv_layer, found.wait_for_layer_load):
        code = method.__code__
        assert (code.co_names, code.co_freevars) == ((), ()), "it refers to something"
