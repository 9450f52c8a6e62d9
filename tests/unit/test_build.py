# SPDX-License-Identifier: Apache-2.0
"""The native library builds for the CPU and for CUDA, and loads; what the folders of
csrc/nwor include of each other.

The CUDA sources are compiled where there may be no GPU, so that errors are found before
a machine with a GPU builds them. tests/kernels tests the ops.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import native

ROOT = Path(__file__).resolve().parents[2]
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
#include <exception>
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
  std::atomic<int> num_pieces{0};
  try {
    nwor::parallel_for(8, 2, [&](int64_t, int64_t) {
      ++num_pieces;
      throw std::bad_alloc();
    });
    return 1;
  } catch (const std::exception& error) {
    if (num_pieces != 4 || error.what() != std::string("std::bad_alloc")) {
      return 2;
    }
  }
  std::atomic<int64_t> sum{0};
  nwor::parallel_for(8, 2, [&](int64_t begin, int64_t end) { sum += begin + end; });
  return sum == 0 + 2 + 2 + 4 + 4 + 6 + 6 + 8 ? 0 : 3;
}
"""


def test_an_exception_in_a_parallel_loop_reaches_the_caller(tmp_path):
    """An exception that crosses the C interface of the loop would end the process."""
    source, program = tmp_path / "throws.cpp", tmp_path / "throws"
    source.write_text(THROWS)
    folders = ROOT / "csrc/nwor", Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++17", "-pthread", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0


def test_py_return_macros_are_not_used():
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
    assert str(ROOT).encode() not in library.read_bytes()
    # It must load where torch is a CPU build, too: one file serves both.
    command = [sys.executable, "-c", LOAD, library]
    loaded, *said = subprocess.check_output(command, text=True).splitlines()
    assert re.fullmatch(rf"{library} 1[2-9]\d{{3}} 900 900", loaded)
    assert torch.cuda.is_available() or "from 9.0 on: start-up: " in said[0]


@pytest.mark.parametrize("archs", ["75", "90;8", "90a"])
def test_gpus_that_the_kernels_do_not_run_on_are_refused(archs, tmp_path):
    definitions = ["-DNWOR_CUDA=ON", f"-DNWOR_CUDA_ARCHS={archs}"]
    definitions.append(f"-DTORCH_DIR={native.torch_dir()}")
    command = [native.find_tool("cmake"), "-S", ROOT, "-B", tmp_path, *definitions]
    done = subprocess.run(command, capture_output=True, text=True)
    said = f"NWOR_CUDA_ARCHS has '{archs.split(';')[-1]}'; must be compute capabilities"
    assert (done.returncode, said in done.stderr) == (1, True)


def test_build_errors_name_the_problem(monkeypatch, tmp_path):
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
