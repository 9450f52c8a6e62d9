# SPDX-License-Identifier: Apache-2.0
"""Shadow blocks are taken from the scheduler's blocks only; the workers' configurations
name them, or the reason for none. vLLM's configurations are real."""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.config.aux_output import AuxOutputConfig
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

from tests.helpers import reach
from tests.helpers.logs import nwor_log
from vllm_nwor.config import Mode, NworConfig
from vllm_nwor.hooks import engine_core
from vllm_nwor.hooks.engine_core import VERDICT, LayerVerdict
from vllm_nwor.layout.regions import ShadowRegion

NUM_DRAFTS, NUM_SEQS, MAX_MODEL_LEN = 4, 8, 256
NUM_BLOCKS, BLOCK = 1000, 16
HEADS = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = kv.FullAttentionSpec(block_size=BLOCK, **HEADS)
SLIDING = kv.SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **HEADS)
LARGE = kv.FullAttentionSpec(block_size=64, **HEADS)
CROSS = kv.CrossAttentionSpec(block_size=BLOCK, **HEADS)
MAMBA = kv.MambaSpec(
    block_size=MAX_MODEL_LEN, shapes=((4, 4),), dtypes=(torch.float32,)
)
PAGE_BYTES = FULL.page_size_bytes


def vllm_config(**changes):
    """The parts that NWOR reads; changes: part__name, or a whole part."""
    space = SimpleNamespace
    kinds = "pipeline", "decode_context", "prefill_context"
    found = space(
        speculative_config=space(
            num_speculative_tokens=NUM_DRAFTS,
            method="ngram",
            use_eagle=lambda: False,
            uses_draft_model=lambda: False,
        ),
        parallel_config=space(
            **{f"{kind}_parallel_size": 1 for kind in kinds}, rank=0, world_size=1
        ),
        kv_transfer_config=None,
        model_config=space(
            model="a-model",
            dtype=torch.float32,
            max_model_len=MAX_MODEL_LEN,
            original_max_model_len=None,
        ),
        scheduler_config=space(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=512,
            max_num_encoder_input_tokens=MAX_MODEL_LEN,
        ),
        cache_config=space(
            mamba_cache_mode="none",
            kv_cache_memory_bytes=None,
            num_gpu_blocks_override=None,
        ),
        max_in_flight_tokens=64,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(found, part) if field else found, field or part, value)
    return found


def plan(config, kv_cache_config, allowed=None, verdicts=()):
    """allowed: the most shadow blocks."""
    nwor = NworConfig(mode=Mode.STAGE, max_shadow_blocks=allowed)
    return engine_core.plan(config, kv_cache_config, nwor, dict(verdicts))


def kv_cache_config(*specs, num_blocks=NUM_BLOCKS):
    groups = [
        kv.KVCacheGroupSpec([f"layer {number}"], spec)
        for number, spec in enumerate(specs or (FULL,))
    ]
    tensors = [
        kv.KVCacheTensor(
            size=num_blocks * PAGE_BYTES * share,
            layers=[f"layer {number}"],
            layer_stride=0,
            block_stride=PAGE_BYTES,
        )
        for number, share in enumerate((1, 3))
    ]
    return kv.KVCacheConfig(num_blocks, tensors, groups)


# A request of 256 tokens, without the null block. A window of 64 keeps 63 + 64 tokens
# in flight, in 8 blocks and the one in which they begin.
BLOCKS_OF_ONE_REQUEST = {FULL: 16, SLIDING: 9, LARGE: 4, CROSS: 16}


@settings(deadline=None)
@given(
    specs=st.lists(
        st.sampled_from(list(BLOCKS_OF_ONE_REQUEST)), min_size=1, max_size=5
    ).filter(lambda specs: set(specs) != {CROSS}),
    max_num_seqs=st.integers(1, 64),
    num_blocks=st.integers(1, 300) | st.just(NUM_BLOCKS),
    allowed=st.none() | st.integers(0, 64) | st.just(10**6),
)
@example([FULL], 256, NUM_BLOCKS, None)
def test_as_many_seats_as_fit_follow_the_schedulers_blocks(
    specs, max_num_seqs, num_blocks, allowed
):
    """One for each sequence, within the budget (5 % of the blocks), if one request of
    max_model_len still fits. Groups may share memory: a block id is of one group."""
    config = vllm_config(scheduler_config__max_num_seqs=max_num_seqs)
    of_vllm = kv_cache_config(*specs, num_blocks=num_blocks)

    found = plan(config, of_vllm, allowed)

    staged = [gid for gid, spec in enumerate(specs) if spec is not CROSS]
    of_one_request = 1 + sum(map(BLOCKS_OF_ONE_REQUEST.__getitem__, specs))
    budget = num_blocks // 20 if allowed is None else allowed
    most = max(min(budget, num_blocks - of_one_request), 0)
    a_seat = 2 * len(staged)
    num_seats = min(most // a_seat, max_num_seqs)
    if num_seats == 0:
        hint = "VLLM_NWOR_SHADOW_BLOCKS raises the number"
        if num_blocks - of_one_request < budget:
            hint = "one of the longest length needs the others"
        assert found == (
            f"{most} of {num_blocks} KV blocks may be shadow blocks, and a request "
            f"needs {a_seat} ({hint})"
        )
        return
    num_real = num_blocks - num_seats * a_seat
    firsts = range(num_real, num_blocks, 2 * num_seats)
    assert found == {
        gid: ShadowRegion(first, num_seats, 2, num_real, specs[gid].block_size)
        for gid, first in zip(staged, firsts, strict=True)
    }


def test_a_group_of_uniform_type_specs_is_staged():
    mixed = kv.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": FULL})

    assert list(plan(vllm_config(), kv_cache_config(mixed))) == [0]


OTHER_CONNECTOR = (
    "a KV connector of vLLM's that is not known to leave the forward alone",
    {"kv_transfer_config": SimpleNamespace(kv_connector="LMCacheConnectorV1")},
    "the KV connector LMCacheConnectorV1 may read or write blocks while their drafts "
    "are in shadow blocks; allowed are vLLM's own MooncakeConnector, "
    "MooncakeStoreConnector, NixlConnector, NixlPullConnector, NixlPushConnector, "
    "OffloadingConnector, SimpleCPUOffloadConnector, and MultiConnector of these",
)
BY_SLOT = "enable_return_routed_experts keeps what it captures by slot"
AUX_OUTPUTS = {"aux_output_config": AuxOutputConfig(enable_return_routed_experts=True)}
ALL_BLOCKS = "max_model_len is auto: vLLM sizes it to take all blocks"
# The workers zero blocks of the scheduler's.
ZEROED = "vLLM zeroes this model's new blocks, which it cannot do with shadow blocks"
# The name in docs/reach.md, if there is one, and the reason.
REFUSED = [
    ("", {"speculative_config": None}, "no speculative decoding is configured"),
    *(
        (
            f"{name} parallel 2",
            {f"parallel_config__{name.replace('-', '_')}_parallel_size": 2},
            f"{name.replace('-', '_')}_parallel_size is 2; only 1 is supported",
        )
        for name in ("pipeline", "decode-context", "prefill-context")
    ),
    OTHER_CONNECTOR,
    ("", {"model_config__enable_return_routed_experts": True}, BY_SLOT),
    ("routed experts are returned", AUX_OUTPUTS, BY_SLOT),
    ("", {"model_config__original_max_model_len": -1}, ALL_BLOCKS),
    ("", {"spec": MAMBA}, ZEROED),
    ("", {"spec": CROSS}, "no KV-cache group is slot based"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_shadow_blocks_are_refused_with_a_reason(name, changes, sentence):
    config = vllm_config(**changes)
    spec = getattr(config, "spec", FULL)
    assert plan(config, kv_cache_config(spec), 100) == sentence
    if name:
        is_off = engine_core.config_refusal(config) == sentence
        assert is_off is name.endswith("parallel 2")
        modes = ("cow", "stage") if is_off else ("stage",)
        reach.refused_stand_in(name, sentence, modes)


TARGETS, DRAFTERS = LayerVerdict(False), LayerVerdict(True)
PACKED, ODD = LayerVerdict(False, "packed"), LayerVerdict(False, "odd")
FLEX = LayerVerdict(False, copies="FLEX")
COPIES = (
    "the drafter has layers in this group, and FLEX may copy the block table into its "
    "metadata"
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # Verdicts on the layers of two groups; the staged groups, or the reason for
        # none.
        ([TARGETS], [TARGETS], [0, 1]),
        ([PACKED], [TARGETS], [1]),
        ([PACKED], [ODD], "packed; odd"),
        ([TARGETS, ODD], [ODD], "odd"),
        # A drafter's layers are not protected; a layer without a verdict may be the
        # target's.
        ([LayerVerdict(True, "packed")], [TARGETS], [1]),
        ([LayerVerdict(True, "packed"), TARGETS], [ODD], [0]),
        ([DRAFTERS], [ODD], "odd"),
        ([DRAFTERS, None], [ODD], [0]),
        ([DRAFTERS, TARGETS], [ODD], [0]),
        # A copied table affects drafters in the same group only.
        ([FLEX], [DRAFTERS], [0]),
        ([LayerVerdict(True, copies="FLEX")], [TARGETS], [1]),
        ([FLEX, DRAFTERS], [DRAFTERS], COPIES),
    ],
)
def test_groups_that_a_worker_will_refuse_get_no_blocks(first, second, expected):
    config, verdicts = kv_cache_config(FULL, SLIDING), {}
    for group, found in zip(config.kv_cache_groups, (first, second), strict=True):
        group.layer_names = [f"{group.layer_names[0]}.{n}" for n in range(len(found))]
        verdicts |= dict(zip(group.layer_names, found, strict=True))
    known = {name: verdict for name, verdict in verdicts.items() if verdict}

    found = plan(vllm_config(), config, 100, known)

    assert (found if isinstance(found, str) else list(found)) == expected
    if len(expected) == 1:
        assert found[expected[0]].num_real_blocks == NUM_BLOCKS - 2 * NUM_SEQS


def start(workers, found_config=None, specs=(), is_start=True):
    """Calls vLLM's functions through the hooks; returns the scheduler's config."""

    def get_kv_cache_configs(*arguments):
        return workers

    arguments = (found_config or vllm_config(), specs, [])
    hook = engine_core._get_kv_cache_configs
    if is_start:
        assert hook(get_kv_cache_configs, None, arguments, {}) is workers
    vllms = generate_scheduler_kv_cache_config
    return engine_core._scheduler_config(vllms, None, (workers,), {})


@pytest.fixture(autouse=True)
def stage(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    yield
    assert not engine_core._starting


def workers_of():
    return [kv_cache_config(FULL, SLIDING) for _ in range(2)]


def test_the_scheduler_has_fewer_blocks_and_the_workers_keep_theirs(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_SHADOW_BLOCKS", "20")
    workers = workers_of()
    before = copy.deepcopy(workers)

    with nwor_log() as lines:
        scheduler = start(workers)

    assert scheduler.num_blocks == 980
    sizes = [tensor.size for tensor in scheduler.kv_cache_tensors]
    assert sizes == [980 * PAGE_BYTES, 980 * PAGE_BYTES * 3]
    assert workers == before
    assert not hasattr(scheduler, "nwor_shadow")
    assert lines == [
        "INFO NWOR: 20 of 1000 KV blocks reserved as shadow blocks, for 5 of "
        "max_num_seqs=8 requests; the others use the undo log "
        "(VLLM_NWOR_SHADOW_BLOCKS=32 is enough for all)"
    ]
    expected = {
        0: ShadowRegion(980, 5, 2, 980, BLOCK),
        1: ShadowRegion(990, 5, 2, 980, BLOCK),
    }
    # vLLM pickles the configurations for workers in other processes.
    sent = copy.deepcopy(workers), pickle.loads(pickle.dumps(workers))
    for received in (workers, *sent):
        assert [worker.nwor_shadow for worker in received] == [expected] * 2
        assert isinstance(received[0].nwor_shadow[0], ShadowRegion)


@pytest.mark.parametrize(
    ("specs", "num_blocks", "allowed", "ends"),
    [
        # One request of 256 tokens needs 16 blocks, 9 in a sliding window, and block 0.
        ([FULL], NUM_BLOCKS, 16, "for 8 requests"),
        ([FULL], NUM_BLOCKS, 15, "(VLLM_NWOR_SHADOW_BLOCKS=16 is enough for all)"),
        ([FULL, SLIDING], NUM_BLOCKS, 31, "_SHADOW_BLOCKS=32 is enough for all)"),
        ([FULL], 17 + 11, 4, "(VLLM_NWOR_SHADOW_BLOCKS=10 is enough for 5)"),
        ([FULL, SLIDING], 26 + 11, 4, "(VLLM_NWOR_SHADOW_BLOCKS=8 is enough for 2)"),
        ([FULL], 17 + 5, 99, "(a request of the longest length needs the other KV bl"),
    ],
)
def test_the_log_line_says_how_many_requests_have_shadow_blocks(
    specs, num_blocks, allowed, ends, monkeypatch
):
    """Its suggested number is enough, and one block less is not."""
    config = kv_cache_config(*specs, num_blocks=num_blocks)
    monkeypatch.setenv("VLLM_NWOR_SHADOW_BLOCKS", str(allowed))
    with nwor_log() as lines:
        start([config])
    (line,) = lines
    num_seats = config.nwor_shadow[0].num_seats
    assert ends in line
    rest = " of max_num_seqs=8 requests; the others use the undo log (" * (
        num_seats < 8
    )
    assert f" KV blocks reserved as shadow blocks, for {num_seats}{rest}" in line
    if hint := re.search(r"BLOCKS=(\d+) is enough for (\w+)", line):
        enough, wanted = int(hint[1]), NUM_SEQS if hint[2] == "all" else int(hint[2])
        for allowed, num_seats in ((enough, wanted), (enough - 1, wanted - 1)):
            assert plan(vllm_config(), config, allowed)[0].num_seats == num_seats


def refused(workers, sentence, **found):
    """Starts and is refused with that reason; the scheduler keeps all blocks, and the
    tensors their sizes."""
    with nwor_log() as lines:
        scheduler = start(workers, **found)

    assert scheduler == generate_scheduler_kv_cache_config(workers)
    assert [worker.nwor_shadow for worker in workers] == [sentence] * 2
    assert lines == [f"INFO NWOR: no shadow blocks: {sentence}"]


def test_verdicts_travel_on_the_workers_specs():
    specs = {name: copy.copy(FULL) for name in ("layer 0", "layer 1")}
    for spec in specs.values():
        object.__setattr__(spec, VERDICT, LayerVerdict(False, "packed"))

    refused(workers_of(), "packed", specs=[{}, pickle.loads(pickle.dumps(specs))])


@pytest.mark.parametrize("place", ["plan", "_lower"])
@pytest.mark.parametrize("late", [False, True])
def test_a_fault_inside_leaves_the_scheduler_all_blocks(place, late, monkeypatch):
    function = getattr(engine_core, place)

    def fail(*arguments):
        if late:
            function(*arguments)
        raise KeyError("planted")

    monkeypatch.setattr(engine_core, place, fail)
    refused(workers_of(), "the reservation failed: KeyError: 'planted'")


class Marked(kv.KVCacheConfig):
    """A worker's configuration that refuses shadow regions."""

    def __setattr__(self, name, value):
        if name == "nwor_shadow" and not isinstance(value, str):
            raise AttributeError("planted")
        super().__setattr__(name, value)


def test_a_worker_config_without_room_for_regions_leaves_all_blocks():
    """And the other worker's regions are removed."""
    workers = workers_of()
    workers[1] = Marked(**vars(workers[1]))
    refused(workers, "the reservation failed: AttributeError: planted")


@pytest.mark.parametrize("name", ["off", "cow", "stage"])
def test_other_modes_and_calls_outside_start_up_change_nothing(monkeypatch, name):
    monkeypatch.setenv("VLLM_NWOR_MODE", name)
    workers = workers_of()

    with nwor_log() as lines:
        scheduler = start(workers, is_start=name != "stage")

    assert scheduler == generate_scheduler_kv_cache_config(workers)
    assert not any(hasattr(worker, "nwor_shadow") for worker in workers)
    assert lines == []
