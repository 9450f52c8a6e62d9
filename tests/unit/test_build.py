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

from tools import native

ROOT = Path(__file__).resolve().parents[2]
REBUILD = "rebuild_nwor_extension.sh"
# Imports the module of a folder in place of the package's.
LOAD = """
import pathlib, sys, torch, vllm_nwor
from vllm_nwor import ops

ops.LIBRARY = pathlib.Path(sys.argv[1])
vllm_nwor.__path__ = [str(ops.LIBRARY.parent)]
library = ops.load()
assert library.__file__ == str(ops.LIBRARY)
for snapshot in (library.audit_snapshot, ops.audit_snapshot):
    try:
        snapshot(torch.zeros(3), False)
    except RuntimeError as error:
        print(error)
"""
REFUSED = "audit_snapshot: tables has dtype Float; must be Long"
# What it uses of Python: all of it is in the stable ABI of 3.11.
PYTHON = {
    *("PyCapsule_GetPointer", "PyErr_Occurred", "PyErr_SetString", "PyExc_ImportError"),
    *("PyExc_RuntimeError", "PyImport_ImportModule", "PyLong_AsLongLong"),
    *("PyModule_AddIntConstant", "PyModule_AddObject", "PyModule_AddStringConstant"),
    *("PyModule_Create2", "PyObject_Free", "PyObject_GetAttrString"),
    *("PyTuple_GetItem", "PyTuple_Size", "PyType_FromSpec", "PyType_GenericAlloc"),
    *("_Py_Dealloc", "_Py_NoneStruct"),
}

# The builtins of a library with CUDA code, where there may be no GPU.
LOAD_CUDA = f"""{LOAD}
print(library.cuda_build)
if not torch.cuda.is_available():
    try:
        ops.load_builtins(torch.device("cuda", 0))
    except ops.NworOpsUnavailable as error:
        assert f"{{ops.LIBRARY}}: start-up: " in str(error), error
    else:
        raise AssertionError("kernels were loaded without a driver")
"""


def check(library: Path, checkout: Path, code: str = LOAD) -> list[str]:
    """What holds for every build: nothing of one Python alone, no path of this machine,
    loads, and refuses in words. What else the code prints."""
    command = ["nm", "--dynamic", "--undefined-only", "--format=just-symbols", library]
    symbols = subprocess.check_output(command, text=True).split()
    assert {name for name in symbols if name.startswith(("Py", "_Py"))} <= PYTHON
    assert str(checkout).encode() not in library.read_bytes()
    command = [sys.executable, "-c", code, library]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert lines[:2] == [REFUSED] * 2
    return lines[2:]


def rebuild(checkout: Path, status: int = 0) -> str:
    """What the script of a checkout says, with this exit status."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    env = {"PATH": path, "PYTHON": sys.executable, "HOME": str(checkout)}
    command = [checkout / "tools" / REBUILD, "--cuda", "off"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    is_fine = "check: the library is up to date, with all ops for cpu" in done.stdout
    assert is_fine is (status == 0)
    return done.stderr


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
    for name in ("csrc", "vllm/v1/nwor"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "tools").mkdir()
    for name in ("CMakeLists.txt", f"tools/{REBUILD}", "tools/native.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    sources, package = tmp_path / "csrc" / "nwor", tmp_path / "vllm" / "v1" / "nwor"
    library = package / native.LIBRARY
    before = sorted(path.name for path in package.iterdir())
    rebuild(tmp_path)
    check(library, tmp_path)
    first = library.stat().st_mtime_ns, library.read_bytes()
    rebuild(tmp_path)
    assert (library.stat().st_mtime_ns, library.read_bytes()) == first

    objects = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    # An exported symbol: what is linked is another library.
    change = 'extern "C" __attribute__((visibility("default"))) int nwor_changed = 7;'
    with library.open("rb") as opened, edited(sources / "cow_cpu.cpp", "", change):
        rebuild(tmp_path)
        assert library.read_bytes() != opened.read() == first[1]
    changed = [path for path, at in objects.items() if path.stat().st_mtime_ns != at]
    assert [path.name for path in changed] == ["cow_cpu.cpp.o"]
    left = {path.name for path in package.iterdir()} - {"__pycache__"}
    assert left == {*before, native.LIBRARY}

    with edited(sources / "cow_cpu.cpp", "", "this is no C++\n"):
        assert "native build: `cmake` failed" in rebuild(tmp_path, status=1)
    # All compiles, and is of no use.
    define = 'ops.def("audit_snapshot('
    with edited(sources / "torch_bindings.cpp", define, f"if (false) {define}"):
        assert "audit_snapshot" in rebuild(tmp_path, status=1)


def test_nothing_is_returned_by_a_macro_that_is_only_right_for_newer_pythons():
    """With the headers of 3.12.1 or 3.13.0 Py_RETURN_NONE takes no reference, also in
    the limited API of 3.11, whose interpreter then runs out of them."""
    for source in (ROOT / "csrc/nwor").glob("*.cpp"):
        used = re.search(r"^\s*Py_RETURN_", source.read_text(), re.MULTILINE)
        assert not used, source


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
    version, archs = check(library, ROOT, LOAD_CUDA)[0].split()
    assert int(version) >= 12000
    assert archs == "900"


def test_cuda_choice_follows_nvcc_and_what_cannot_be_built_is_said(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("NWOR_CUDA", "maybe")
    with pytest.raises(native.NativeBuildError, match=r"'MAYBE'.* AUTO, ON, OFF"):
        native.cuda_choice()
    monkeypatch.delenv("NWOR_CUDA")
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
        native.torch_dir()
