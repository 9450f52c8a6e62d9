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

# The builtins of prepared.h, which need no GPU as long as there is nothing to launch or
# a call is refused before.
BUILTINS = """
import ctypes, sys
from vllm_nwor import prepared

library = ctypes.CDLL(sys.argv[1])
library.nwor_prepared_new.restype = ctypes.c_void_p
launch, log_step, of_a_launch, restore_step = prepared.COLUMNS[:4]

def prepare(num_launches):
    constants = (ctypes.c_int64 * (launch * num_launches))()
    number = ctypes.c_int64(num_launches)
    return library.nwor_prepared_new(constants, number, ctypes.c_int64(0))

library.nwor_prepared_load.restype = ctypes.c_char_p
if not __import__("torch").cuda.is_available():
    # No driver, no GPU: said in words, at start-up.
    assert library.nwor_prepared_load(ctypes.c_int64(0)).startswith(b"start-up: ")
log = prepared._builtin(library, "nwor_prepared_log")
restore = prepared._builtin(library, "nwor_prepared_restore")
handle, three = prepare(0), prepare(3)
columns = [0] * restore_step

references = sys.getrefcount(True)
for _ in range(1000):
    assert restore(handle, *columns) is True
assert abs(sys.getrefcount(True) - references) < 100

def refused(call, *arguments):
    try:
        call(*arguments)
    except (TypeError, OverflowError, RuntimeError) as error:
        print(type(error).__name__, error)

refused(restore, handle, "x", *columns[1:])
refused(restore, handle, 1 << 70, *columns[1:])
refused(restore, "x", *columns)
right = log_step + 3 * of_a_launch
for call, number in ((log, right), (restore, restore_step)):
    refused(call)
    for wrong in (0, number - 1, number + 1, 300):
        refused(call, three, *[0] * wrong)

# Two groups; slot_mappings, block_table, query_start_loc, seq_lens, most_reqs of each.
pages = [[0] * prepared.COLUMNS[4] for _ in range(2)]
for group in (0, 1):
    for column, value in ((8, 10), (2, 20), (9, 30), (10, 40)):
        pages[group][column] = value if column > 8 else value + group
    pages[group][11] = 5 - group
values = [value for group in pages for value in group]
library.nwor_prepared_pages_new.restype = ctypes.c_void_p
staged = library.nwor_prepared_pages_new(
    (ctypes.c_int64 * len(values))(*values), ctypes.c_int64(2), ctypes.c_int64(0)
)
stage = prepared._builtin(library, "nwor_prepared_stage")
step = [0, 0, 0, 4, 1, 30, 40, 10, 20, 11, 21]
assert len(step) == prepared.COLUMNS[5] + 2 * prepared.COLUMNS[6]
for changed in (3, *range(5, len(step))):
    other = [*step]
    other[changed] += 1
    references = sys.getrefcount(False)
    for _ in range(1000):
        assert stage(staged, *other) is False, changed
    assert abs(sys.getrefcount(False) - references) < 100
if not __import__("torch").cuda.is_available():
    # As prepared: made, as far as that goes without a device.
    try:
        stage(staged, *step)
    except RuntimeError as error:
        assert str(error).startswith("stage: "), error
    else:
        raise AssertionError("not made")
"""
REFUSED = [
    "TypeError 'str' object cannot be interpreted as an integer",
    "OverflowError int too big to convert",
    "TypeError 'str' object cannot be interpreted as an integer",
    *(
        f"RuntimeError {name}: got {got} arguments, expected {wanted}"
        for name, expected in (("log_cache_slots", 13), ("restore_rejected_drafts", 10))
        for got, wanted in (
            (0, "at least 1"),
            *((got, expected) for got in (1, expected - 1, expected + 1, 301)),
        )
    ),
]


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
    assert found.stdout.splitlines() == REFUSED


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
