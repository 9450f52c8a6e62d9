# SPDX-License-Identifier: Apache-2.0
"""What is refused at start-up, by name, and what memory the undo log gets.

Runners here are stand-ins with real KV-cache specs; tests/integration has real ones.
"""

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tests.helpers.logs import nwor_log
from vllm_nwor.config import Mode, NworConfig, OnReject, Strict
from vllm_nwor.draft_manager import (
    DraftCommitManager,
    LayerCache,
    NworError,
    StagedGroup,
)
from vllm_nwor.hooks import discovery, engine_core, staging
from vllm_nwor.hooks import layers as protected_layers
from vllm_nwor.hooks.layers import GroupRefused
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import num_bytes
from vllm_nwor.report import Report
from vllm_nwor.shadow_pages import ShadowRegion, blocks_per_seat

BLOCKS, HEADS, SLOTS, DIM = 4, 2, 16, 32
SPEC = FullAttentionSpec(
    block_size=SLOTS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
)
SLOT_BYTES = 2 * HEADS * DIM * 4
NUM_SEQS, NUM_DRAFTS = 4, 3


class RowImpl:
    """Writes [key | value] of each head to its row, as most backends do."""

    kv_cache_dtype = "auto"

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        block, offset = divmod(int(slot_mapping[0]), SLOTS)
        kv_cache[block, :, offset] = torch.cat([key[0], value[0]], dim=-1)


class RocmAttentionImpl(RowImpl):
    pass


class AiterFlashAttentionImpl(RowImpl):
    pass


class FailingImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        raise RuntimeError("head size 32 is not compiled")


def layer(impl=None):
    return SimpleNamespace(
        impl=impl or RowImpl(),
        kv_cache=torch.zeros(BLOCKS, HEADS, SLOTS, 2 * DIM),
        num_kv_heads=HEADS,
        head_size=DIM,
    )


class DeepseekV32IndexerCache:
    """As vLLM's: a cache without an attention implementation."""

    kv_cache = torch.zeros(BLOCKS, SLOTS, 132, dtype=torch.uint8)


def runner(groups):
    """groups: (spec, {layer name: layer}) of each KV-cache group."""
    layers = {name: found for _, group in groups for name, found in group.items()}
    return SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=spec, layer_names=list(group))
                for spec, group in groups
            ]
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        get_kv_cache_spec=lambda: {
            name: spec for spec, group in groups for name in group
        },
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=NUM_DRAFTS,
                method="ngram",
                use_eagle=lambda: False,
                uses_draft_model=lambda: False,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=NUM_SEQS, max_num_batched_tokens=512
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
        ),
    )


def build(found, storage=None, strict=False, mode=Mode.COW):
    strictness = Strict.STARTUP if strict else Strict.NEVER
    config = NworConfig(mode=mode, strictness=strictness)
    return discovery.build(found, config, storage)


def of_dtype(kv_cache_dtype):
    impl = RowImpl()
    impl.kv_cache_dtype = kv_cache_dtype
    return layer(impl)


REFUSED = [
    (of_dtype("nvfp4"), "layer b has a KV cache of type nvfp4, which keeps the scales"),
    (of_dtype("nvfp4_4over6"), "layer b has a KV cache of type nvfp4_4over6, which"),
    (layer(RocmAttentionImpl()), "layer b has a RocmAttentionImpl, which packs"),
    (
        layer(AiterFlashAttentionImpl()),
        "layer b has a AiterFlashAttentionImpl, which packs the slots of a block in",
    ),
    (
        layer(FailingImpl()),
        "layer b: FailingImpl cannot be probed: RuntimeError: head size 32 is not",
    ),
    (
        DeepseekV32IndexerCache(),
        "layer b is a DeepseekV32IndexerCache: no attention implementation writes its",
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_a_group_is_refused_by_name_and_the_other_protected(refused, message):
    found = runner([(SPEC, {"a": layer()}), (SPEC, {"c": layer(), "b": refused})])

    manager, infos, _ = build(found)

    assert [info.resolved for info in infos] == ["cow", "off"]
    assert message in infos[1].reason
    assert [group.group_id for group in manager.groups] == [0]


def state_spec(num_speculative_blocks):
    return MambaSpec(
        block_size=SLOTS,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        num_speculative_blocks=num_speculative_blocks,
    )


def test_state_that_vllm_keeps_a_copy_of_for_each_draft_is_native():
    """It needs no protection, which is no refusal, under STRICT neither."""
    state = SimpleNamespace(kv_cache=[torch.zeros(BLOCKS, 4, 4)])
    groups = [(state_spec(NUM_DRAFTS), {"s": state}), (SPEC, {"a": layer()})]

    manager, infos, _ = build(runner(groups), strict=True)

    assert [info.resolved for info in infos] == ["native", "cow"]
    assert infos[0].reason == (
        "vLLM keeps a copy of this state for each draft, and goes on from that of the "
        "last accepted one"
    )
    assert [group.group_id for group in manager.groups] == [1]
    manager, infos, _ = build(runner(groups[:1]), strict=True)
    assert (manager, [info.resolved for info in infos]) == (None, ["native"])


def test_state_without_copies_for_drafts_is_refused():
    state = SimpleNamespace(kv_cache=[torch.zeros(BLOCKS, 4, 4)])

    _, (info,), _ = build(runner([(state_spec(NUM_DRAFTS - 1), {"s": state})]))

    assert info.resolved == "off"
    assert info.reason == "layer s has a MambaSpec, which is not slot based"


def test_what_is_reserved_is_enough_for_all_drafts_of_a_step():
    found = runner([(SPEC, {"a": layer(), "b": layer()}), (SPEC, {"c": layer()})])
    config = NworConfig(mode=Mode.COW)

    storage = discovery.reserve(found, config)
    manager, _, _ = build(found, storage)

    assert manager.capacity == NUM_SEQS * NUM_DRAFTS
    assert storage.numel() == num_bytes(12, 3 * SLOT_BYTES, 3, 3)


@pytest.mark.parametrize("on_reject", OnReject)
def test_all_that_outlives_a_step_lies_in_what_was_reserved(on_reject):
    """vLLM's sleep mode takes what is allocated later away."""
    found = runner([(SPEC, {"a": layer(), "b": layer()}), (SPEC, {"c": layer()})])
    config = NworConfig(mode=Mode.COW, on_reject=on_reject)
    storage = discovery.reserve(found, config)
    manager, _, _ = discovery.build(found, config, storage)

    assert manager.capacity == NUM_SEQS * NUM_DRAFTS
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
def test_poison_is_large_and_finite_as_what_a_cache_holds(name, dtype, poison, value):
    cache = torch.empty(0, dtype=dtype if name == "auto" else torch.uint8)
    assert (
        protected_layers._poison(SimpleNamespace(kv_cache_dtype=name), cache) == poison
    )
    numbers = torch.full((8,), poison, dtype=torch.uint8).view(dtype)
    assert torch.allclose(numbers.double(), torch.tensor(value).double(), rtol=1e-6)


def test_no_memory_leaves_vllm_alone(monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("none left")

    found = runner([(SPEC, {"a": layer()}), (SPEC, {"b": of_dtype("nvfp4")})])
    monkeypatch.setattr("vllm_nwor.device_memory.DeviceMemory.take", no_memory)

    manager, infos, _ = build(found)

    assert manager is None
    assert infos[0].reason == "no memory for the undo log of 12 drafts: none left"
    assert "nvfp4" in infos[1].reason
    with pytest.raises(NworError, match="no memory for the undo log"):
        build(found, strict=True)


def test_nothing_is_taken_from_a_pool_that_sleeps():
    found = runner([(SPEC, {"a": layer()})])
    found.device = torch.device("meta")
    found.vllm_config.model_config.enable_sleep_mode = True

    manager, infos, _ = build(found, storage=None)

    assert manager is None
    assert "no memory was reserved, and sleep mode" in infos[0].reason


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("probe_layout", "layer a: RowImpl cannot be probed: "),
        ("target_layers_of", "its layers could not be examined: "),
        ("DraftCommitManager", "the undo log cannot be set up: "),
        ("Report", "the undo log cannot be set up: "),
        ("config_refusal", "vLLM is not as expected: "),
    ],
)
def test_what_nobody_expected_is_a_refusal(place, text, monkeypatch):
    found = runner([(SPEC, {"a": layer()})])

    def fail(*arguments, **_):
        if place == "Report" and arguments[1] is None:
            return Report(*arguments)
        raise OSError("x")

    where = protected_layers if place == "probe_layout" else discovery
    monkeypatch.setattr(where, place, fail)

    manager, (info,), report = build(found)

    assert manager is None
    assert info.resolved == "off"
    assert info.reason == f"{text}OSError: x"
    assert report.take_payload().read()[2] == [info]
    with pytest.raises(NworError, match="OSError: x"):
        build(found, strict=True)


def test_no_memory_while_reserving_is_told_when_the_log_is_built(monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("none left")

    found = runner([(SPEC, {"a": layer()})])
    monkeypatch.setattr(torch, "empty", no_memory)

    assert discovery.reserve(found, NworConfig(mode=Mode.COW)) is None


def test_the_counts_ring_holds_the_steps_that_vllm_has_in_flight():
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    found = runner([(SPEC, {"a": layer()})])

    for said, expected in ((None, 2), (1, 1), (5, 5)):
        if said is not None:
            found.vllm_config.max_concurrent_batches = said
        _, _, report = build(found)
        assert len(report._ring) == expected + 1


# Of BLOCKS blocks the last two are shadow blocks, for one request.
REGION = ShadowRegion(2, 1, 2, num_real_blocks=2, block_size=SLOTS)


def staged_runner(groups=None, reserved=None, entry_tokens=SLOTS):
    """A V1 runner as the engine core leaves it in mode stage. reserved: the mark."""
    groups = groups or [(SPEC, {"a": layer()})]
    found = runner(groups)
    found.kv_cache_config.nwor_shadow = {0: REGION} if reserved is None else reserved
    table = SimpleNamespace(block_size=entry_tokens)
    found.input_batch = SimpleNamespace(block_table=[table] * len(groups))
    return found


def staged_runner_v2(*backends, drafter=(), **tables):
    """A V2 runner. drafter: names of its drafter's layers."""
    found = staged_runner([(SPEC, {"a": layer(), **dict.fromkeys(drafter, layer())})])
    del found.input_batch
    found.block_tables = SimpleNamespace(**(tables or {"block_sizes": [SLOTS]}))
    found.speculator = SimpleNamespace(draft_attn_layer_names=set(drafter))
    found.attn_groups = [
        [
            SimpleNamespace(backend=SimpleNamespace(get_name=lambda name=name: name))
            for name in backends
        ]
    ]
    return found


def stage(found, storage=None):
    """The manager in mode stage, and what became of the first group."""
    manager, infos, _ = build(found, storage, mode=Mode.STAGE)
    return manager, infos[0]


@pytest.mark.parametrize("entry_tokens", [SLOTS, 2 * SLOTS])
def test_a_group_with_shadow_blocks_is_staged(entry_tokens):
    """Also where the scheduler's blocks are two of the layer's."""
    region = ShadowRegion(1, 1, 1, 1, 2 * SLOTS)
    reserved = {0: REGION} if entry_tokens == SLOTS else {0: region}
    found = staged_runner(reserved=reserved, entry_tokens=entry_tokens)

    manager, info = stage(found)

    assert (info.requested, info.resolved) == ("stage", "stage")
    assert info.reason == "1 layers, rows"
    (group,) = manager.shadow.groups
    assert group.entry_tokens == entry_tokens
    assert group.first_entry == reserved[0].first_block
    assert group.tables == manager.groups[0].tables


@pytest.mark.parametrize(
    "tables",
    [
        {"kernel_block_sizes": [SLOTS], "block_sizes": [2 * SLOTS]},
        {"block_sizes": [SLOTS]},
        {"kernel_block_sizes": None, "block_sizes": [SLOTS]},
    ],
)
def test_a_v2_table_has_kernel_blocks_where_it_says_so(tables):
    manager, info = stage(staged_runner_v2("FLASHINFER", **tables))

    assert info.resolved == "stage"
    assert manager.shadow.groups[0].entry_tokens == SLOTS


BLOCK_SIZES = "layer a has blocks of 16 tokens, its block table {}, the scheduler 16"


@pytest.mark.parametrize(
    ("reserved", "entry_tokens", "reason"),
    [
        (None, SLOTS, "the engine core has reserved no blocks for them"),
        ("no room", SLOTS, "no room"),
        ({1: REGION}, SLOTS, "no blocks are reserved for this group"),
        ({0: REGION}, 8, BLOCK_SIZES.format(8)),
        ({0: REGION}, 32, BLOCK_SIZES.format(32)),
        (
            {0: ShadowRegion(3, 1, 2, 3, SLOTS)},
            SLOTS,
            "layer a has 64 slots, and shadow blocks end at 80",
        ),
    ],
)
def test_a_group_that_cannot_be_staged_is_logged_and_says_why(
    reserved, entry_tokens, reason
):
    found = staged_runner(reserved=reserved, entry_tokens=entry_tokens)
    if reserved is None:
        del found.kv_cache_config.nwor_shadow

    manager, info = stage(found)

    assert manager.shadow is None
    assert (info.requested, info.resolved) == ("stage", "cow")
    assert info.reason == f"no shadow pages: {reason}; 1 layers, rows"


@pytest.mark.parametrize(
    ("backends", "drafter", "copying"),
    [
        (["FLASHINFER"], ["d"], "FLASHINFER"),
        (["FLASH_ATTN", "FLEX_ATTENTION", "A_NEW_ONE"], ["d"], "A_NEW_ONE, FLEX_ATTEN"),
        (["FLASHINFER"], [], None),
        (["FLASH_ATTN", "TRITON_ATTN"], ["d"], None),
    ],
)
def test_a_v2_drafter_may_not_read_a_copy_of_the_patched_table(
    backends, drafter, copying
):
    _, info = stage(staged_runner_v2(*backends, drafter=drafter))

    assert info.resolved == ("stage" if copying is None else "cow")
    if copying is not None:
        assert info.reason.startswith(
            f"no shadow pages: the drafter has layers in this group, and {copying}"
        )
        assert "may copy the block table into its metadata; 1 layers" in info.reason


def backend_of(name):
    return lambda: SimpleNamespace(get_name=lambda: name)


@pytest.mark.parametrize("reuses_metadata", [False, True])
def test_layers_that_will_be_refused_are_marked_before_the_cache_is_sized(
    reuses_metadata,
):
    layers = {"good": layer(), "bad": of_dtype("nvfp4"), "draft": layer()}
    for name, found in layers.items():
        found.get_attn_backend = backend_of("FLEX" if name == "bad" else "FLASH_ATTN")
    found = runner([(SPEC, layers)])
    found.drafter = SimpleNamespace(_draft_attn_layer_names={"draft"})
    specs = {name: copy.copy(SPEC) for name in layers}

    staging.mark_layers(found, specs, reuses_metadata)

    assert {name: spec.nwor_verdict for name, spec in specs.items()} == {
        "good": (False, "", ""),
        "bad": (False, ANY, "FLEX" if reuses_metadata else ""),
        "draft": (True, "", ""),
    }
    assert specs["bad"].nwor_verdict.refusal.startswith("layer bad has a KV cache of")
    assert specs["good"] == SPEC


def test_layers_that_cannot_be_looked_at_are_not_marked():
    found = runner([(SPEC, {"strange": object()})])
    specs = {"strange": copy.copy(SPEC)}

    staging.mark_layers(found, specs, True)

    assert not hasattr(specs["strange"], "nwor_verdict")


def test_a_v2_drafter_may_not_read_a_table_mapped_to_kernel_blocks():
    found = staged_runner_v2("FLASH_ATTN", drafter=["d"])
    found.attn_groups[0][0].kernel_block_size = 8

    _, info = stage(found)

    assert info.resolved == "cow"
    assert "a kernel block size of 8 may copy the block table" in info.reason


def test_more_entries_than_a_kernel_holds_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(staging, "MAX_SPAN", 1)
    found = staged_runner()
    manager, info = stage(found)
    assert (manager.shadow is not None, info.resolved) == (True, "stage")

    group = found.kv_cache_config.kv_cache_groups[0]
    found.device = torch.device("cuda")
    with pytest.raises(GroupRefused, match="needs 2 entries of its block"):
        staging.staged_group(found, 0, group, manager.groups[0].layers)


def test_one_group_is_staged_and_another_logged():
    groups = [(SPEC, {"a": layer()}), (SPEC, {"b": layer()})]
    found = staged_runner(groups, reserved={1: REGION})

    with nwor_log() as lines:
        manager, infos, _ = build(found, mode=Mode.STAGE)

    assert [info.resolved for info in infos] == ["cow", "stage"]
    assert [group.group_id for group in manager.shadow.groups] == [1]
    assert [group.group_id for group in manager.groups] == [1, 0]
    (line,) = lines
    assert line.startswith("INFO NWOR stage requested; group 0: cow (no shadow pages: ")
    assert "; group 1: stage (1 layers, rows);" in line
    assert line.endswith("; shadow pages: 1 seats")


def test_mode_cow_stages_nothing_that_is_reserved():
    manager, (info,), _ = build(staged_runner())

    assert (manager.shadow, info.resolved) == (None, "cow")


@pytest.mark.parametrize("num_seqs", [1, 4, 64])
@pytest.mark.parametrize("num_drafts", [1, 3, 20])
@pytest.mark.parametrize("block_size", [8, 16, 64, 528])
def test_what_is_reserved_is_enough_for_shadow_pages_too(
    num_seqs, num_drafts, block_size
):
    """With one group, as many seats as sequences, and kernel blocks of 16 tokens."""
    per_seat = blocks_per_seat(num_drafts, block_size)
    entry_tokens = min(block_size, 16)
    cache = layer()
    region = ShadowRegion(2, num_seqs, per_seat, 2, block_size)
    found = staged_runner([(replace(SPEC, block_size=block_size), {"a": cache})])
    found.vllm_config.speculative_config.num_speculative_tokens = num_drafts
    found.vllm_config.scheduler_config.max_num_seqs = num_seqs
    found.vllm_config.scheduler_config.max_num_batched_tokens = 4096
    storage = discovery.reserve(found, NworConfig(mode=Mode.STAGE))
    staged = StagedGroup(region, entry_tokens)

    manager = DraftCommitManager(
        NworConfig(mode=Mode.STAGE),
        [(0, [LayerCache("a", cache.kv_cache, row_layout(cache.kv_cache))])],
        num_seqs * num_drafts,
        storage,
        staged={0: staged},
    )

    assert manager.capacity == num_seqs * num_drafts


def connector(name, *children, module_path=None):
    """A connector's configuration, as the command line has it."""
    found = {"kv_connector": name, "kv_role": "kv_both"}
    if module_path is not None:
        found["kv_connector_module_path"] = module_path
    if children:
        found["kv_connector_extra_config"] = {"connectors": list(children)}
    return found


def several(*children, **arguments):
    return connector("MultiConnector", *children, **arguments)


BY_LAYER = connector("ExampleConnector")
LMCACHE = connector("LMCacheConnectorV1")
OFFLOADING = connector("OffloadingConnector")
OF_SOMEBODY_ELSE = connector("OffloadingConnector", module_path="mine.connectors")


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        ({}, ""),
        (OFFLOADING, ""),
        (several(OFFLOADING, connector("NixlConnector")), ""),
        (connector("NobodyKnowsThisOne"), "NobodyKnowsThisOne"),
        (several(OFFLOADING, BY_LAYER), "ExampleConnector"),
        (
            several(several(LMCACHE, BY_LAYER), BY_LAYER),
            "LMCacheConnectorV1, ExampleConnector",
        ),
        (OF_SOMEBODY_ELSE, "mine.connectors.OffloadingConnector"),
        (several(OFFLOADING, module_path="mine"), "mine.MultiConnector"),
    ],
)
def test_connectors_that_may_read_or_write_inside_the_forward(configured, names):
    found = SimpleNamespace(kv_transfer_config=KVTransferConfig(**configured))

    assert engine_core.connectors_in_forward(found) == names


def test_a_connector_that_may_save_before_commit_is_told_and_never_staged():
    exports = (
        "1 layers, rows; ExampleConnector may export rejected drafts' bytes during the "
        "forward, before commit"
    )
    found = staged_runner()
    found.vllm_config.kv_transfer_config = KVTransferConfig(**BY_LAYER)

    _, (info,), _ = build(found)
    assert (info.resolved, info.reason) == ("cow", exports)

    manager, info = stage(found)
    assert (manager.shadow, info.resolved) == (None, "cow")
    assert info.reason.startswith("no shadow pages: the KV connector ExampleConnector ")
    assert info.reason.endswith(exports)


@pytest.mark.parametrize("name", sorted(engine_core.ALLOWED_CONNECTORS))
def test_connectors_that_save_after_commit_do_nothing_inside_the_forward(name):
    """Does not show when they save; vLLM's `finalize_kv_connector` is behind commit."""
    found = KVConnectorFactory.get_connector_class_by_name(name)

    for method in (found.save_kv_layer, found.wait_for_layer_load):
        code = method.__code__
        assert (code.co_names, code.co_freevars) == ((), ()), "it refers to something"
