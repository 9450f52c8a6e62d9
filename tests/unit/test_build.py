# SPDX-License-Identifier: Apache-2.0
"""The native library builds, for the CPU and for CUDA, and loads where it should.

Compiling the CUDA sources here, where there may be no GPU, catches what breaks them
before a machine with one sees them. What the ops do is tested in tests/kernels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import native

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(hasattr(torch.ops._C_cache_ops, "log_cache_slots"))
"""

# The builtins of a library with CUDA code, where there may be no GPU.
BUILTINS = """
import pathlib, sys, torch
from vllm_nwor import builtin_ops, ops

ops.LIBRARY = pathlib.Path(sys.argv[1])
publish = builtin_ops.load(torch.device("cpu")).audit_publish
try:
    publish(torch.zeros(3), torch.zeros(3))
except RuntimeError as error:
    print(error)
if not torch.cuda.is_available():
    try:
        builtin_ops.load(torch.device("cuda", 0))
    except ops.NworOpsUnavailable as error:
        assert f"{ops.LIBRARY}: start-up: " in str(error), error
    else:
        raise AssertionError("kernels were loaded without a driver")
"""
REFUSED = "audit_publish: tables has dtype Float; must be Long"


def undefined_symbols(library: Path) -> list[str]:
    command = ["nm", "--dynamic", "--undefined-only", "--format=just-symbols"]
    result = subprocess.run(
        [*command, str(library)], check=True, capture_output=True, text=True
    )
    return result.stdout.split()


def loads(library: Path) -> bool:
    """Whether a fresh process gets the ops from this file."""
    command = [sys.executable, "-c", LOAD, str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() == "True"


def check(library: Path) -> None:
    """What holds for every build: no Python in it, no path of this machine, loads."""
    symbols = undefined_symbols(library)
    assert symbols
    assert [name for name in symbols if name.startswith(("Py", "_Py"))] == []
    assert str(ROOT).encode() not in library.read_bytes()
    assert loads(library)


def test_cpu_library(monkeypatch, tmp_path):
    monkeypatch.setenv("NWOR_CUDA", "OFF")
    assert native.build(tmp_path)
    check(tmp_path / native.LIBRARY)
    # Nothing changed, so nothing is written.
    assert not native.build(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_cuda_library(monkeypatch, tmp_path):
    monkeypatch.setenv("NWOR_CUDA", "ON")
    monkeypatch.setenv("NWOR_CUDA_ARCHS", "90")
    monkeypatch.setenv("MAX_JOBS", "2")
    native.build(tmp_path)
    library = tmp_path / native.LIBRARY
    assert b".nv_fatbin" in library.read_bytes()
    # It must load where torch is a CPU build, too: one file serves both.
    check(library)
    command = [sys.executable, "-c", BUILTINS, str(library)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == REFUSED


def test_cuda_choice_follows_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("NWOR_CUDA", "maybe")
    with pytest.raises(native.NativeBuildError, match=r"'MAYBE'.* AUTO, ON, OFF"):
        native.cuda_choice()
    monkeypatch.delenv("NWOR_CUDA")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.cuda_choice() == "OFF"
    (tmp_path / "nvcc").touch(mode=0o755)
    assert native.cuda_choice() == "ON"


def test_missing_torch_is_said_in_words(monkeypatch):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(native.NativeBuildError, match="--no-build-isolation"):
        native.torch_dir()


def test_library_is_replaced_whole(tmp_path):
    new, place = tmp_path / "new.so", tmp_path / "place"
    new.write_bytes(b"new")
    place.mkdir()
    old = place / native.LIBRARY
    old.write_bytes(b"old")
    with open(old, "rb") as loaded:
        assert native._install(new, place)
        # Who has the old file open keeps it: another file is there now.
        assert loaded.read() == b"old"
    assert old.read_bytes() == b"new"
    assert [path.name for path in place.iterdir()] == [native.LIBRARY]


def test_a_library_with_a_libstdcxx_of_its_own_is_refused(tmp_path):
    library = tmp_path / native.LIBRARY
    library.write_bytes(b"\x7fELF libm.so.6 libc.so.6")

    with pytest.raises(native.NativeBuildError, match="not use the shared libstdc"):
        native.check_runtime(library)
