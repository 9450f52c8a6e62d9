# SPDX-License-Identifier: Apache-2.0
"""The ops as PyTorch sees them: schemas, fakes, torch.compile; and on CUDA streams,
graphs, launches and allocations."""

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
    row_bytes_of,
)
from tests.kernels.test_log_restore import nhd
from tests.kernels.test_shadow_pages import EXAMPLE, PAGES, layout_for
from tests.kernels.transaction import (
    NUM_COUNTERS,
    AcceptanceForm,
    ShadowSide,
    acceptance_arguments,
)
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
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
        log = (self.undo.undo_log, self.undo.slots, self.undo.windows)
        metadata = BATCH.metadata(device, torch.int32, 0)
        self.slot_mapping = metadata[0]
        self.log = (self.tables.table, None, *metadata, *log, 3)
        num_rejected = torch.tensor([1, 1], dtype=torch.int32, device=device)
        self.restore = (
            *(self.tables.table, None, *log),
            *(None, 0, num_rejected, self.counters, 3),
        )


def shadow_example(device):
    """The worked example, loaded, and the arguments of each op by its name."""
    ops.load(device.type)
    side = ShadowSide(PAGES, [[layout_for(PAGES)] * 2], device)
    side.load(EXAMPLE)
    acceptance = acceptance_arguments(
        side.num_drafts, side.accepted, AcceptanceForm.SAMPLED, device
    )
    place = (side.block_table, side.slot_mapping, side.seats, side.saved)
    return side, {
        "stage": side.stage_arguments(side.tables[0], True),
        # Without counters_to, of which opcheck and torch.compile make copies that are
        # not pinned.
        "commit_draft_layer": side.commit_arguments(0, acceptance, True)[:-1],
        "unstage": (*place, side.num_reqs, PAGES.entry_tokens),
    }


@pytest.mark.parametrize("name", ["log_cache_slots", "restore_rejected_drafts"])
def test_opcheck_of_the_tables(device, name):
    step = Step(device)
    ops.log_cache_slots(*step.log)
    arguments = step.log if name == "log_cache_slots" else step.restore
    torch.library.opcheck(getattr(namespace(), name).default, arguments)


@pytest.mark.parametrize("name", ["stage", "commit_draft_layer", "unstage"])
def test_opcheck_of_shadow_pages(device, name):
    _side, arguments = shadow_example(device)
    if name != "stage":
        ops.stage(*arguments["stage"])
    torch.library.opcheck(getattr(namespace(), name).default, arguments[name])


def test_compiled_without_a_graph_break(device):
    step = Step(device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def log_and_restore():
        ops.log_cache_slots(*step.log)
        ops.restore_rejected_drafts(*step.restore)
        return step.counters + 1

    before = [layer.memory.clone() for layer in step.layers]
    assert log_and_restore().tolist() == [3, 4, 2, 3, 2 * 2 * 256 + 1, 1, 1, 1]
    assert step.undo.slots[:3].tolist() == [3, 4, 20]
    for old, layer in zip(before, step.layers, strict=True):
        assert torch.equal(old, layer.memory)


def test_shadow_pages_compiled_without_a_graph_break(device):
    side, arguments = shadow_example(device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def stage_and_commit():
        ops.stage(*arguments["stage"])
        ops.commit_draft_layer(*arguments["commit_draft_layer"])
        return side.counters + 1

    before = [layer.memory.clone() for layer in side.layers]
    assert stage_and_commit()[0, :4].tolist() == [3, 7, 3, 5]
    assert side.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
    # No forward: committed rows are what the shadow entries held.
    changed = [
        (old != layer.memory).any().item()
        for old, layer in zip(before, side.layers, strict=True)
    ]
    assert changed == [True, True]


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

    @pytest.mark.parametrize("shadow", [False, True], ids=["log", "shadow"])
    def test_one_launch_each_and_nothing_allocated(self, shadow):
        device = torch.device("cuda")
        ops.load("cuda")
        if shadow:
            _side, arguments = shadow_example(device)
        else:
            step = Step(device)
            arguments = {
                "log_cache_slots": step.log,
                "restore_rejected_drafts": step.restore,
            }

        def run():
            for name, args in arguments.items():
                getattr(ops, name)(*args)
            torch.cuda.synchronize()

        run()  # loads the code
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        activities = [
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.CUDA,
        ]
        with torch.profiler.profile(activities=activities) as profile:
            run()
        on_device = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        assert len(on_device) == len(arguments), on_device
        assert all("nwor" in name for name in on_device), on_device
        calls = [event.key for event in profile.key_averages()]
        waits = [key for key in calls if "Synchronize" in key and "Device" not in key]
        assert not waits, calls
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations

    def test_shadow_pages_in_a_captured_graph(self):
        """A replay reads the tables that are there then, and leaves `saved` as the
        next one needs it."""
        side, arguments = shadow_example(torch.device("cuda"))
        ops.stage(*arguments["stage"])
        ops.commit_draft_layer(*arguments["commit_draft_layer"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.stage(*arguments["stage"])
            ops.commit_draft_layer(*arguments["commit_draft_layer"])
        for replays in (1, 2):
            graph.replay()
            assert side.counters[0, :4].tolist() == [
                *(2 + 2 * replays, 6 + 6 * replays),
                *(2 + 2 * replays, 4 + 4 * replays),
            ]
            assert side.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
        side.block_table[0, 2] = 0  # a null entry
        graph.replay()
        assert side.saved[:3, 0].tolist() == [-3, 0, 3]

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
        assert step.counters.tolist() == [2, 3, 1, 2, 2 * 2 * 256, 0, 0, 0]
