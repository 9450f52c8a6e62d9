# SPDX-License-Identifier: Apache-2.0
"""The native library builds, for the CPU and for CUDA, and loads where it should; the
quick rebuild, of a copy of the sources.

Compiling the CUDA sources here, where there may be no GPU, catches what breaks them
before a machine with one sees them. What the ops do is tested in tests/kernels.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools import native

ROOT = Path(__file__).resolve().parents[2]
REBUILD = "rebuild_nwor_extension.sh"
# Imports the module of a folder in place of the package's, where there may be no GPU.
LOAD = """
import pathlib, sys, torch, vllm_nwor
from vllm_nwor import ops

ops.LIBRARY = pathlib.Path(sys.argv[1])
vllm_nwor.__path__ = [str(ops.LIBRARY.parent)]
print(ops.load().__file__, ops.load().cuda_build)
try:
    ops.load_builtins(torch.device("cuda", 0))
except ops.NworOpsUnavailable as error:
    print(error)
"""
# A loop on threads that, like PyTorch's, no exception may leave.
THROWS = r"""
#include <atomic>
#include <new>
#include <string>
#include <thread>
#include <vector>
#include "common/parallel.h"

extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      ParallelFunc body, void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; i += grain) {
    threads.emplace_back([=]() noexcept { body(i, i + grain, context); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  return 0;
}

int main() {
  for (const int64_t grain : {2, 100}) {
    std::atomic<int> num_pieces{0};
    try {
      nwor::parallel_for(8, grain, [&](int64_t, int64_t) {
        ++num_pieces;
        throw std::bad_alloc();
      });
      return 1;
    } catch (const std::bad_alloc&) {
    }
    if (num_pieces != (grain == 2 ? 4 : 1)) {
      return 2;
    }
  }
  std::atomic<int64_t> sum{0};
  nwor::parallel_for(8, 2, [&](int64_t begin, int64_t end) { sum += begin + end; });
  return sum == 0 + 2 + 2 + 4 + 4 + 6 + 6 + 8 ? 0 : 3;
}
"""
# What it uses of Python: all of it is in the stable ABI of 3.11.
PYTHON = {
    *("PyCapsule_GetPointer", "PyErr_Occurred", "PyErr_SetString", "PyExc_ImportError"),
    *("PyExc_RuntimeError", "PyImport_ImportModule", "PyLong_AsLongLong"),
    *("PyModule_AddIntConstant", "PyModule_AddObject", "PyModule_AddStringConstant"),
    *("PyModule_Create2", "PyObject_Free", "PyObject_GetAttrString"),
    *("PyTuple_GetItem", "PyTuple_Size", "PyType_FromSpec", "PyType_GenericAlloc"),
    *("_Py_Dealloc", "_Py_NoneStruct"),
    *("PyDict_New", "PyDict_SetItemString", "PyLong_FromLongLong"),
}


def check(library: Path, checkout: Path) -> None:
    """What holds for every build: nothing of one Python alone, no path of this
    machine."""
    command = ["nm", "--dynamic", "--undefined-only", "--format=just-symbols", library]
    symbols = subprocess.check_output(command, text=True).split()
    assert {name for name in symbols if name.startswith(("Py", "_Py"))} <= PYTHON
    assert str(checkout).encode() not in library.read_bytes()


@contextlib.contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    yield
    path.write_text(text)


def test_rebuild_compiles_only_what_changed_and_says_why_it_is_of_no_use(tmp_path):
    """Of a copy of what it needs. Who has the old library open keeps it whole."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("cmake", "csrc", "vllm/v1/nwor"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "tools").mkdir()
    for name in ("CMakeLists.txt", f"tools/{REBUILD}", "tools/native.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    library = tmp_path / "vllm/v1/nwor" / native.LIBRARY
    source = tmp_path / "csrc/nwor/transaction/cow_cpu.cpp"
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    env = {"PATH": path, "PYTHON": sys.executable, "HOME": str(tmp_path)}

    def rebuild() -> tuple[int, str]:
        command = [tmp_path / "tools" / REBUILD, "--cuda", "off"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        is_fine = "check: the library is up to date, with all ops" in done.stdout
        assert is_fine is (done.returncode == 0), done.stderr
        return done.returncode, done.stderr

    def state() -> tuple[int, bytes]:
        return library.stat().st_mtime_ns, library.read_bytes()

    assert rebuild()[0] == 0
    check(library, tmp_path)
    first = state()
    assert rebuild()[0] == 0
    assert state() == first

    objects = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    # An exported symbol: what is linked is another library.
    change = 'extern "C" __attribute__((visibility("default"))) int nwor_changed = 7;'
    with library.open("rb") as opened, edited(source, "", change):
        assert rebuild()[0] == 0
        assert library.read_bytes() != opened.read() == first[1]
    changed = [path for path, at in objects.items() if path.stat().st_mtime_ns != at]
    assert [path.name for path in changed] == ["cow_cpu.cpp.o"]

    with edited(source, "", "this is no C++\n"):
        status, said = rebuild()
    assert (status, "native build: `cmake` failed" in said) == (1, True)
    # All compiles, and is of no use.
    define = 'ops.def(\n      "unstage('
    bindings = tmp_path / "csrc/nwor/bindings/torch_bindings.cpp"
    with edited(bindings, define, f"if (false) {define}"):
        status, said = rebuild()
    assert (status, "unstage" in said) == (1, True)


def test_what_a_parallel_loop_throws_comes_back_to_its_caller(tmp_path):
    """It would end the process: the loop is PyTorch's, behind a C interface."""
    source, program = tmp_path / "throws.cpp", tmp_path / "throws"
    source.write_text(THROWS)
    folders = ROOT / "csrc/nwor", Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++17", "-pthread", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0


def test_nothing_is_returned_by_a_macro_that_is_only_right_for_newer_pythons():
    """With the headers of 3.12.1 or 3.13.0 Py_RETURN_NONE takes no reference, also in
    the limited API of 3.11, whose interpreter then runs out of them."""
    for source in (ROOT / "csrc/nwor/bindings").glob("*"):
        used = re.search(r"^\s*Py_RETURN_", source.read_text(), re.MULTILINE)
        assert not used, source


# What each folder of csrc/nwor may include.
MAY_INCLUDE = {
    "common": {"common"},
    "transaction": {"common", "transaction"},
    "audit": {"common", "audit"},
    "bindings": {"common", "transaction", "audit", "bindings"},
}


def test_transaction_and_audit_do_not_include_each_other():
    sources = ROOT / "csrc/nwor"
    assert {path.name for path in sources.iterdir()} == MAY_INCLUDE.keys()
    for folder, allowed in MAY_INCLUDE.items():
        for source in (sources / folder).iterdir():
            used = re.findall(r'^#include "(\w+)/', source.read_text(), re.MULTILINE)
            assert set(used) <= allowed, source


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_cuda_library(monkeypatch, tmp_path):
    monkeypatch.setenv("NWOR_CUDA", "ON")
    monkeypatch.setenv("NWOR_CUDA_ARCHS", "90")
    monkeypatch.setenv("MAX_JOBS", "2")
    native.build(tmp_path)
    library = tmp_path / native.LIBRARY
    assert b".nv_fatbin" in library.read_bytes()
    check(library, ROOT)
    # It must load where torch is a CPU build, too: one file serves both.
    command = [sys.executable, "-c", LOAD, library]
    loaded, *said = subprocess.check_output(command, text=True).splitlines()
    assert re.fullmatch(rf"{library} 1[2-9]\d{{3}} 900", loaded)
    assert torch.cuda.is_available() or f"{library}: start-up: " in said[0]


def test_what_cannot_be_built_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("NWOR_CUDA", "maybe")
    with pytest.raises(native.NativeBuildError, match=r"'MAYBE'.* AUTO, ON, OFF"):
        native.build(tmp_path)
    monkeypatch.setenv("NWOR_CUDA", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.cuda_choice() == "OFF"
    (tmp_path / "nvcc").touch(mode=0o755)
    assert native.cuda_choice() == "ON"
    # A libstdc++ of its own.
    library = tmp_path / native.LIBRARY
    library.write_bytes(b"\x7fELF libm.so.6 libc.so.6")
    with pytest.raises(native.NativeBuildError, match="not use the shared libstdc"):
        native.check_runtime(library)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(native.NativeBuildError, match="--no-build-isolation"):
        native.build(tmp_path)
