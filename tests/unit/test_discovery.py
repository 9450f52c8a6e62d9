# SPDX-License-Identifier: Apache-2.0
"""What is refused at start-up, by name, and what memory the undo log gets.

Runners here are stand-ins with real KV-cache specs; tests/integration has real ones.
"""

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import NworError
from vllm_nwor.hooks import discovery
from vllm_nwor.launches import num_bytes
from vllm_nwor.report import Report

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
                use_eagle=lambda: False,
                uses_draft_model=lambda: False,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=NUM_SEQS, max_num_batched_tokens=512
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
        ),
    )


def build(found, storage=None, strict=False):
    strictness = Strict.STARTUP if strict else Strict.NEVER
    config = NworConfig(mode=Mode.COW, strictness=strictness)
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
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_a_group_is_refused_by_name_and_the_other_protected(refused, message):
    found = runner([(SPEC, {"a": layer()}), (SPEC, {"c": layer(), "b": refused})])

    manager, infos, _ = build(found)

    assert [info.resolved for info in infos] == ["cow", "off"]
    assert message in infos[1].reason
    assert [group.group_id for group in manager.groups] == [0]


def test_an_indexers_cache_is_refused():
    spec = MLAAttentionSpec(
        block_size=SLOTS, num_kv_heads=1, head_size=132, dtype=torch.uint8
    )
    found = runner([(SPEC, {"a": layer()}), (spec, {"b": DeepseekV32IndexerCache()})])

    _, infos, _ = build(found)

    assert infos[1].resolved == "off"
    assert "layer b is a DeepseekV32IndexerCache: no attention impl" in infos[1].reason


def test_strict_raises_with_the_refusal():
    found = runner([(SPEC, {"b": of_dtype("nvfp4")})])

    with pytest.raises(NworError, match="KV cache of type nvfp4"):
        build(found, strict=True)


def test_what_is_reserved_is_enough_for_all_drafts_of_a_step():
    found = runner([(SPEC, {"a": layer(), "b": layer()}), (SPEC, {"c": layer()})])
    config = NworConfig(mode=Mode.COW)

    storage = discovery.reserve(found, config)
    manager, _, _ = build(found, storage)

    assert manager.capacity == NUM_SEQS * NUM_DRAFTS
    assert storage.numel() == num_bytes(12, 3 * SLOT_BYTES, 3, 3)


def test_all_that_outlives_a_step_lies_in_what_was_reserved():
    """vLLM's sleep mode takes what is allocated later away."""
    found = runner([(SPEC, {"a": layer(), "b": layer()}), (SPEC, {"c": layer()})])
    storage = discovery.reserve(found, NworConfig(mode=Mode.COW))
    manager, _, _ = build(found, storage)

    begin, end = storage.data_ptr(), storage.data_ptr() + storage.numel()
    tensors = [manager.counters]
    for group in manager.groups:
        tensors += [group.undo_log, group.log_slots, group.log_windows]
        tensors += [part.table for part in group.tables]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(begin <= first and last <= end for first, last in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_a_storage_that_is_too_small_lowers_the_capacity():
    found = runner([(SPEC, {"a": layer()})])
    storage = torch.zeros(num_bytes(5, SLOT_BYTES, 1, 1) + 1, dtype=torch.uint8)

    manager, _, _ = build(found, storage)

    assert manager.capacity == 5


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


@pytest.mark.parametrize("error", [AttributeError("x"), OSError("x"), ValueError("x")])
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("probe_layout", "layer a: RowImpl cannot be probed: "),
        ("_target_layers", "its layers could not be examined: "),
        ("DraftCommitManager", "the undo log cannot be set up: "),
        ("Report", "the undo log cannot be set up: "),
        ("_config_refusal", "vLLM is not as expected: "),
    ],
)
def test_what_nobody_expected_is_a_refusal(place, text, error, monkeypatch):
    found = runner([(SPEC, {"a": layer()})])
    calls = []

    def fail(*arguments, **_):
        calls.append(arguments)
        if place == "Report" and arguments[1] is None:
            return Report(*arguments)
        raise error

    monkeypatch.setattr(discovery, place, fail)

    manager, infos, report = build(found)

    assert calls
    assert manager is None
    (info,) = infos
    assert info.resolved == "off"
    assert info.reason == f"{text}{type(error).__name__}: x"
    assert report.take_payload()["info"][0]["reason"] == info.reason
    with pytest.raises(NworError, match=f"{type(error).__name__}: x"):
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


def connector(name, *children, module_path=None):
    """A connector's configuration, as the command line has it."""
    found = {"kv_connector": name, "kv_role": "kv_both"}
    if module_path is not None:
        found["kv_connector_module_path"] = module_path
    if children:
        found["kv_connector_extra_config"] = {"connectors": list(children)}
    return found


BY_LAYER = connector("ExampleConnector")
OFFLOADING = connector("OffloadingConnector")


@pytest.mark.parametrize(
    ("configured", "exporting"),
    [
        (None, []),
        ({}, []),
        (OFFLOADING, []),
        (connector("MultiConnector", OFFLOADING, connector("NixlConnector")), []),
        (BY_LAYER, ["ExampleConnector"]),
        (connector("NobodyKnowsThisOne"), ["NobodyKnowsThisOne"]),
        (
            connector("MultiConnector", OFFLOADING, BY_LAYER),
            ["ExampleConnector"],
        ),
        (
            connector(
                "MultiConnector",
                connector("MultiConnector", connector("LMCacheConnectorV1"), BY_LAYER),
                BY_LAYER,
            ),
            ["LMCacheConnectorV1", "ExampleConnector"],
        ),
        # Somebody else's class of that name.
        (
            connector("OffloadingConnector", module_path="mine.connectors"),
            ["mine.connectors.OffloadingConnector"],
        ),
        (
            connector("MultiConnector", OFFLOADING, module_path="mine"),
            ["mine.MultiConnector"],
        ),
    ],
)
def test_a_connector_that_may_save_before_commit_is_told(
    configured, exporting, monkeypatch, caplog
):
    found = runner([(SPEC, {"a": layer()})])
    found.vllm_config.kv_transfer_config = (
        None if configured is None else KVTransferConfig(**configured)
    )
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    with caplog.at_level(logging.INFO, "vllm.v1.nwor"):
        manager, (info,), report = build(found)

    assert manager is not None
    assert info.resolved == "cow"
    expected = "1 layers, rows"
    if exporting:
        expected += (
            f"; {', '.join(exporting)} may export rejected drafts' bytes during the "
            "forward, before commit"
        )
    assert info.reason == expected
    assert report.take_payload()["info"][0]["reason"] == expected
    (line,) = [line.getMessage() for line in caplog.records]
    assert f"group 0: cow ({expected});" in line


@pytest.mark.parametrize("name", sorted(discovery.SAVES_AFTER_COMMIT))
def test_connectors_that_save_after_commit_do_nothing_inside_the_forward(name):
    """Does not show when they save; vLLM's `finalize_kv_connector` is behind commit."""
    found = KVConnectorFactory.get_connector_class_by_name(name)

    code = found.save_kv_layer.__code__
    assert (code.co_names, code.co_freevars) == ((), ()), "it refers to something"
