# SPDX-License-Identifier: Apache-2.0
"""The ops as PyTorch sees them: schemas, fakes, torch.compile, the naive overloads; and
on CUDA streams, graphs, launches and allocations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.kernels.reference import (
    PAD,
    Batch,
    Layer,
    Log,
    make_table,
    random_bytes,
    row_bytes_of,
)
from tests.kernels.test_log_restore import nhd
from tests.kernels.test_stage_commit import StagedLayer
from vllm_nwor import ops

REPO = Path(__file__).resolve().parents[2]
BATCH = Batch(slots=((3, 4), (20,)), accepted=(1, 0))
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def namespace():
    return torch.ops._C_cache_ops


class Step:
    """Positional arguments of log and restore for two layers."""

    def __init__(self, device):
        self.layers = [Layer(nhd(), device, seed) for seed in range(2)]
        self.tables = make_table(self.layers, device)
        self.undo = Log.poisoned(4, row_bytes_of(self.tables), device)
        self.counters = torch.zeros(6, dtype=torch.int64, device=device)
        log = (self.undo.undo_log, self.undo.slots, self.undo.windows)
        metadata = BATCH.metadata(device, torch.int32, 0)
        self.slot_mapping = metadata[0]
        self.log = (self.tables.table, None, *metadata, *log, 3)
        num_rejected = torch.tensor([1, 1], dtype=torch.int32, device=device)
        self.restore = (
            *(self.tables.table, None, *log),
            *(None, 0, num_rejected, self.counters, 3),
        )


@pytest.mark.parametrize("name", ["log_cache_slots", "restore_rejected_drafts"])
def test_opcheck_of_the_tables(device, name):
    step = Step(device)
    ops.log_cache_slots(*step.log)
    arguments = step.log if name == "log_cache_slots" else step.restore
    torch.library.opcheck(getattr(namespace(), name).default, arguments)


def test_opcheck_of_the_single_forms(device):
    cache = random_bytes(3 * 2 * 16 * 8, 0).view(3, 2, 16, 8).to(device)
    slots = torch.tensor([5, PAD, 47], device=device)
    undo_log = torch.zeros(3, 16, dtype=torch.uint8, device=device)
    mask = torch.tensor([True, True, False], device=device)
    torch.library.opcheck(namespace().log_cache_slots.single, (cache, slots, undo_log))
    torch.library.opcheck(
        namespace().restore_rejected_drafts.single, (cache, slots, mask, undo_log)
    )


def test_opcheck_of_stage_and_commit(device):
    layer = StagedLayer(device, BATCH, "BNHD", 2, 8, torch.float32)
    log = (layer.log_slots, layer.log_windows)
    key, value = (t.contiguous() for t in (layer.key, layer.value))
    torch.library.opcheck(
        namespace().stage.default,
        (key, value, *layer.metadata, *layer.staging, *log, 3),
    )
    layer.stage()
    rejected = torch.tensor([1, 1], dtype=torch.int32, device=device)
    caches = [torch.zeros(3, 2, 16, 8, device=device) for _ in range(2)]
    torch.library.opcheck(
        namespace().commit_draft_layer.default,
        (*layer.staging, *log, None, 0, rejected, *caches, 3),
    )


def test_compiled_without_a_graph_break(device):
    step = Step(device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def log_and_restore():
        ops.log_cache_slots(*step.log)
        ops.restore_rejected_drafts(*step.restore)
        return step.counters + 1

    before = [layer.memory.clone() for layer in step.layers]
    assert log_and_restore().tolist() == [3, 4, 2, 3, 2 * 2 * 256 + 1, 1]
    assert step.undo.slots[:3].tolist() == [3, 4, 20]
    for old, layer in zip(before, step.layers, strict=True):
        assert torch.equal(old, layer.memory)


@pytest.mark.parametrize("shape", [(3, 2, 16, 8), (3, 16, 24)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_the_single_forms_are_the_same_copies(device, shape, dtype):
    """The oracle against indexing, and the table ops against the oracle."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = random_bytes(2 * torch.Size(shape).numel() * size, 1).view(dtype)
    wide = raw.view(*shape[:-1], 2 * shape[-1]).to(device)
    cache = wide[..., : shape[-1]]  # rows with a gap
    by_slot = cache.unsqueeze(1) if cache.dim() == 3 else cache
    num_blocks, heads, block_size, _ = by_slot.shape
    slots = torch.tensor([5, PAD, 47, 0], device=device)
    row_bytes = heads * shape[-1] * size
    undo_log = torch.full((5, row_bytes), 7, dtype=torch.uint8, device=device)
    wanted = undo_log.clone()
    for i in (0, 2, 3):
        slot = int(slots[i])
        rows = by_slot[slot // block_size, :, slot % block_size]
        wanted[i] = rows.contiguous().view(torch.uint8).flatten()
    ops.log_cache_slots_single(cache, slots, undo_log)
    assert torch.equal(undo_log, wanted)

    strides = [stride * size for stride in by_slot.stride()]
    row = [cache.data_ptr(), strides[0], strides[2], strides[1]]
    row += [heads, shape[-1] * size, block_size, num_blocks, 0]
    table = torch.tensor([row], device=device)
    mapping = torch.tensor([PAD, 5, PAD, 47, 0], device=device)
    indices = torch.arange(5, device=device)
    cumulative = torch.tensor([5], dtype=torch.int32, device=device)
    fast = torch.full_like(undo_log, 7)
    log_slots = torch.zeros(5, dtype=torch.int64, device=device)
    windows = torch.zeros(5, 3, dtype=torch.int32, device=device)
    ops.log_cache_slots(
        *(table, None, mapping, indices, cumulative, fast, log_slots, windows, 4)
    )
    assert torch.equal(fast, wanted)

    before = wide.clone()
    cache.zero_()
    wanted_cache = wide.clone()
    mask = torch.tensor([False, True, True, True], device=device)
    for slot in (47, 0):
        where = (slot // block_size, slot % block_size)
        if cache.dim() == 3:
            wanted_cache[where][: shape[-1]] = before[where][: shape[-1]]
        else:
            wanted_cache[where[0], :, where[1], : shape[-1]] = before[
                where[0], :, where[1], : shape[-1]
            ]
    ops.restore_rejected_drafts_single(cache, slots, mask, undo_log)
    assert torch.equal(wide.view(torch.uint8), wanted_cache.view(torch.uint8))


SINGLE_ERRORS = [
    ({"kv_cache": (48, 8)}, "kv_cache has 2 dimensions; must have 4"),
    ({"undo_log": (3, 15)}, r"undo_log has shape \[3, 15\]; dimension 1 must be 16"),
    ({"undo_log": (1, 16)}, "slots has 2 entries; must have at most 1, the rows of"),
]


@pytest.mark.parametrize(("change", "message"), SINGLE_ERRORS)
def test_the_single_forms_refuse(device, change, message):
    arguments = {"kv_cache": (3, 2, 16, 8), "undo_log": (3, 16), **change}
    cache, undo_log = (
        torch.zeros(arguments[name], dtype=torch.uint8, device=device)
        for name in ("kv_cache", "undo_log")
    )
    slots = torch.tensor([0, 1], device=device)
    with pytest.raises(RuntimeError, match=f"log_cache_slots.single: {message}"):
        ops.log_cache_slots_single(cache, slots, undo_log)
    if not change.get("kv_cache") and device.type == "cpu":
        slots[1] = 48
        full = torch.zeros(3, 16, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=r"slots\[1\] is 48; must be -1"):
            ops.log_cache_slots_single(cache, slots, full)


def test_columns_are_those_of_the_kernels():
    """The names in ops.py are those of the C++ sources, in their order."""
    source = (REPO / "csrc/nwor/table.h").read_text()
    row = source[source.index("struct LayerRow {") : source.index("num_slots() const")]
    assert tuple(re.findall(r"^  int64_t (\w+);", row, re.M)) == ops.TABLE_COLUMNS
    enum = source[source.index("enum Counter") : source.index("kNumCounters")]
    counters = re.findall(r"^  k(\w+),", enum, re.M)
    words = tuple(re.sub(r"\B(?=[A-Z])", "_", name).lower() for name in counters)
    assert words == ops.COUNTER_COLUMNS


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    """In a process of its own it would not be loaded yet; here that is feigned."""
    ops._load_library.cache_clear()
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "_nwor_C.so")
    monkeypatch.setattr(ops, "_NAMESPACE", "nwor_no_such_namespace")
    with pytest.raises(ops.NworOpsUnavailable, match="does not exist; build it"):
        ops.load()
    (tmp_path / "_nwor_C.so").write_bytes(b"no library")
    with pytest.raises(ops.NworOpsUnavailable, match="cannot be loaded"):
        ops.load()


def test_an_unknown_device_type_is_refused():
    with pytest.raises(ops.NworOpsUnavailable, match="is 'mps'; must be cpu or cuda"):
        ops.load("mps")


class TestOnCuda:
    pytestmark = ON_CUDA

    def test_one_launch_each_and_nothing_allocated(self):
        step = Step(torch.device("cuda"))
        ops.load("cuda")
        ops.log_cache_slots(*step.log)  # loads the code
        ops.restore_rejected_drafts(*step.restore)
        torch.cuda.synchronize()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        activities = [
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.CUDA,
        ]
        with torch.profiler.profile(activities=activities) as profile:
            ops.log_cache_slots(*step.log)
            ops.restore_rejected_drafts(*step.restore)
            torch.cuda.synchronize()
        on_device = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        assert len(on_device) == 2, on_device
        assert all("nwor" in name for name in on_device), on_device
        calls = [event.key for event in profile.key_averages()]
        waits = [key for key in calls if "Synchronize" in key and "Device" not in key]
        assert not waits, calls
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations

    def test_in_a_captured_graph(self):
        """Capturing refuses whatever waits; replaying reads what is there then."""
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        ops.log_cache_slots(*step.log)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.log_cache_slots(*step.log)
        memory = step.layers[0].memory
        index = step.layers[0].index([3])[0].cuda()
        memory[index] = 99
        graph.replay()
        assert (step.undo.undo_log[0, :256] == 99).all()
        step.slot_mapping.fill_(PAD)
        graph.replay()
        assert step.undo.slots[:3].tolist() == [PAD] * 3

    def test_on_the_current_stream(self):
        """Work that is queued on a side stream is seen; the default stream is not
        waited for."""
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            step.layers[0].memory.fill_(42)
            ops.log_cache_slots(*step.log)
            assert not stream.query()
        stream.synchronize()
        assert (step.undo.undo_log[:3, :256] == 42).all()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_on_a_device_that_is_not_current(self):
        ops.load("cuda")
        step = Step(torch.device("cuda:1"))
        with torch.cuda.device(0):
            ops.log_cache_slots(*step.log)
            ops.restore_rejected_drafts(*step.restore)
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        assert step.counters.tolist() == [2, 3, 1, 2, 2 * 2 * 256, 0]
