# SPDX-License-Identifier: Apache-2.0
"""The ops as PyTorch sees them: schemas, fakes, torch.compile; and on CUDA streams,
graphs, launches and allocations."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.kernels.reference import PAD, launched, whole
from tests.kernels.test_transaction import EXAMPLE
from tests.kernels.test_validation import ON_CUDA, Calls
from tests.kernels.transaction import COMMIT, LOG, RESTORE, STAGE, UNSTAGE
from vllm_nwor import ops


def calls_on(device):
    """Nothing is staged yet. Without counters_to, of which opcheck and torch.compile
    make copies that are not pinned."""
    calls = Calls(device)
    calls.call(UNSTAGE)
    for op in (RESTORE, COMMIT):
        calls.arguments[op]["counters_to"] = None
    return calls


@pytest.mark.parametrize("name", [LOG, RESTORE, STAGE, COMMIT, UNSTAGE])
def test_opcheck(device, name):
    calls = calls_on(device)
    if name in (COMMIT, UNSTAGE):
        calls.call(STAGE)
    op = getattr(torch.ops._C_cache_ops, name).default
    arguments = calls.arguments[name]
    torch.library.opcheck(op, tuple(arguments.values()))


@pytest.mark.parametrize("name", ["MAX_FEATURES", "LOADS", "NO_CONSTANT_OF_IT"])
def test_a_constant_that_is_not_the_librarys_is_refused(monkeypatch, name):
    """Also if the module that declares it is imported when the library is loaded."""
    ops.load()
    monkeypatch.setattr(ops, "_shared", {})
    with pytest.raises(ops.NworOpsUnavailable, match=f"its constant {name} is .* -1,"):
        ops.shared(name, -1)


def test_a_name_that_is_not_declared_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'MAX_FEATURE'"):
        _ = ops.MAX_FEATURE


# One process: what was not loaded can be loaded later, and nothing twice.
REFUSALS = """
import ctypes, importlib, pathlib, shutil, sys, torch, vllm_nwor
from vllm_nwor import ops

def refused():
    importlib.invalidate_caches()
    try:
        ops.load()
    except ops.NworOpsUnavailable as error:
        print(error)
    else:
        raise AssertionError("it was loaded")

there, folder = ops.LIBRARY, pathlib.Path(sys.argv[1])
ops.LIBRARY = folder / there.name
vllm_nwor.__path__ = [str(folder)]
refused()
ops.LIBRARY.write_bytes(b"no library")
refused()

shutil.copy(there, ops.LIBRARY)
exchange = torch.Tensor.__dlpack_c_exchange_api__
del torch.Tensor.__dlpack_c_exchange_api__
refused()
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
name = ctypes.create_string_buffer(b"dlpack_exchange_api")
for version, function in (1, 0), (2, 1):
    other = (ctypes.c_uint64 * 7)(version, 0, 0, 0, 0, function, 0)
    capsule = new(ctypes.addressof(other), ctypes.addressof(name), None)
    torch.Tensor.__dlpack_c_exchange_api__ = capsule
    refused()

torch.Tensor.__dlpack_c_exchange_api__ = exchange
ops.VERSION += 1
refused()
ops.VERSION -= 1
shared = dict(ops._shared)
ops.shared("COUNTER_COLUMNS", reversed(ops.COUNTER_COLUMNS))
refused()
ops._shared.update(shared)
assert ops.SAVED_COLUMNS == 11  # loads it
ops.load()
assert ops.load().__file__ == str(ops.LIBRARY)

ops._load_library.cache_clear()
ops.LIBRARY = there
refused()
"""
NO_EXCHANGE = (
    r".*no DLPack exchange API of version 1, which 2\.11 has\); build it again .*"
)
REFUSED = [
    "{0} does not exist; build it: pip install .*",
    "{0} cannot be loaded .*; build it again with the installed torch .*",
    *[NO_EXCHANGE] * 3,
    "{0}: it is of another version of vllm-nwor: build it again",
    "{0}: its constant COUNTER_COLUMNS is .*'windows': 0, .*; must be .*'windows': 8.*",
    "{1} is not where the registered ops came from: another copy of vllm-nwor is .*",
]


def test_an_unusable_library_is_refused_with_the_reason(tmp_path):
    """Missing, none, beside a PyTorch that it cannot read tensors of, of another
    version; and a second copy, which would end the process."""
    command = [sys.executable, "-c", REFUSALS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = re.escape(str(tmp_path / ops.LIBRARY.name)), re.escape(str(ops.LIBRARY))
    lines = done.stdout.splitlines()
    for pattern, line in zip(REFUSED, lines, strict=True):
        assert re.fullmatch(pattern.format(*places), line), line


def test_a_gpu_without_code_is_refused(monkeypatch):
    """A GPU for which there is code fails for another reason, which is reported."""
    library = SimpleNamespace(cuda_build="13000 860,900 900")
    library.load_kernels = Mock(side_effect=RuntimeError("no kernel image"))
    monkeypatch.setattr(ops, "load", lambda device_type: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    has = "has code of CUDA 13.0 for sm_86, sm_90, and PTX for GPUs from 9.0 on"
    for capability, said in (
        ((8, 0), f"the GPU has compute capability 8.0, and {ops.LIBRARY} {has}; "),
        ((7, 5), f"the GPU has compute capability 7.5, and {ops.LIBRARY} {has}; "),
        ((8, 9), f"{ops.LIBRARY}, which {has}: no kernel image"),
        ((12, 1), f"{ops.LIBRARY}, which {has}: no kernel image"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _, c=capability: c
        )
        with pytest.raises(ops.NworOpsUnavailable, match=f"^{re.escape(said)}"):
            ops.load_builtins(torch.device("cuda", 0))


def test_an_unknown_device_type_is_refused():
    with pytest.raises(ops.NworOpsUnavailable, match="is 'mps'; must be cpu or cuda"):
        ops.load("mps")


# Lets the next kernel begin at once, and writes a millisecond later.
WRITE_LATE = r"""
extern "C" __global__ void write_late(char* to, const char* from, int size) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}"""


class TestOnCuda:
    pytestmark = ON_CUDA

    @pytest.mark.parametrize("name", [LOG, RESTORE, STAGE, COMMIT, UNSTAGE])
    def test_a_kernel_that_writes_late_is_awaited(self, name):
        """Each launch may begin before the work in front of it has ended."""
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("no kernel begins early on this GPU")
        write_late = torch.cuda._compile_kernel(WRITE_LATE, "write_late")
        calls, found = calls_on(torch.device("cuda")), []
        if name in (COMMIT, UNSTAGE):
            calls.call(STAGE)
        layers = calls.layers if name == LOG else calls.side.layers
        others = {RESTORE: calls.undo_log, UNSTAGE: calls.side.saved}
        others[STAGE] = calls.arguments[STAGE]["block_table"]
        read = whole(others.get(name, layers[0].memory))
        before, right = calls.snapshot(), read.clone()
        for is_late in (False, True):
            for memory, old in zip(calls.memory(), before, strict=True):
                memory.copy_(old)
            if is_late:
                read.zero_()
                write_late(block=(1024, 1, 1), args=[read, right, len(read)])
            calls.call(name)
            found.append(calls.snapshot())
        assert all(map(torch.equal, *found))

    @pytest.mark.parametrize("names", [(LOG, RESTORE), (STAGE, COMMIT, UNSTAGE)])
    def test_one_launch_each_and_nothing_allocated(self, names):
        calls = calls_on(torch.device("cuda"))

        def run():
            for name in names:
                calls.call(name)

        run()  # loads the code
        on_device = launched(run)
        assert len(on_device) == len(names), on_device
        assert all("nwor" in name for name in on_device), on_device

    def test_in_a_captured_graph(self):
        """Capturing refuses anything that waits. A replay reads the tables and slots of
        that time, and leaves `saved` as the next one needs it."""
        calls = calls_on(torch.device("cuda"))
        side = calls.side
        names = LOG, STAGE, COMMIT
        for name in names:
            calls.call(name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for name in names:
                calls.call(name)
        layer = calls.layers[0]
        layer.memory[layer.index([3])[0].cuda()] = 99
        for runs in (2, 3):
            graph.replay()
            wanted = [2 * runs, 6 * runs, runs, 5 * runs]
            assert side.counters[0, :4].tolist() == wanted
            assert side.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
            assert (calls.undo_log[0, :256] == 99).all()
        side.block_table[0, 2] = 0  # a null entry
        calls.arguments[LOG]["slot_mapping"].fill_(PAD)
        graph.replay()
        assert side.saved[:3, 0].tolist() == [-3, 0, 3]
        assert calls.log_slots[:3].tolist() == [PAD] * 3

    def test_on_the_current_stream(self):
        """Work that is queued on a side stream is seen; the default stream is not
        waited for."""
        calls = calls_on(torch.device("cuda"))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            calls.layers[0].memory.fill_(42)
            calls.call(LOG)
            assert not stream.query()
        stream.synchronize()
        assert (calls.undo_log[:3, :256] == 42).all()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
    def test_on_a_device_that_is_not_current(self):
        calls = calls_on(torch.device("cuda:1"))
        with torch.cuda.device(0):
            calls.call(LOG)
            calls.call(RESTORE)
            assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        counters = calls.arguments[RESTORE]["counters"]
        assert counters.tolist() == [2, 3, 1, 2, 0, 2 * 2 * 256, 0, 0, 0]
