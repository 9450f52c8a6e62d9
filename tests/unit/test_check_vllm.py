# SPDX-License-Identifier: Apache-2.0
"""Facts about vLLM (hooks/facts.py, hooks/source.py), and tools/check_vllm.py.

The installed vLLM's source passes. Mismatches are planted in a source of a few lines.
Wheels come from a folder.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

from tools import check_vllm
from vllm_nwor.base.wrap import HookTarget
from vllm_nwor.hooks.source import (
    Does,
    DoesAlone,
    Has,
    HasOneOf,
    Returns,
    Takes,
    Tree,
    files_of,
    mismatch,
)

pytestmark = pytest.mark.usefixtures("parsed_once")

SITE = Path(str(importlib.util.find_spec("vllm").origin)).parents[1]
read = functools.cache(files_of(SITE))


SMALL = """
from dataclasses import dataclass
from vllm.base import Root as Base, helper

@dataclass
class Data:
    name: str
    width: list[int]

class Runner(Base):
    limit = 4
    def __init__(self, config):
        self.table = Table(config)
        if config:
            self.extra = 1
    def step(self, batch, flag=False):
        self.prepare()
        self.run(batch)
        return self.left, right
    def other(self):
        self.idle()
        return Thing(1)
"""
BASE = "class Root:\n    size: int\ndef helper(): ..."
RUNNER, STEP = "vllm.m:Runner", "vllm.m:Runner.step"
SIZE, TABLE = Has(RUNNER, size="int"), Has(RUNNER, table="Table")
RUN, BOTH = Does(STEP, "self.run()"), Does(STEP, "self.prepare()", "self.run()")
RETURNS, HELPER = Returns(STEP, "left", "right"), Takes("vllm.m:helper")
THING = Returns(f"{RUNNER}.other", "Thing")
BATCH, ALONE = Takes(STEP, "self", "batch"), DoesAlone(STEP, "self.run()")
WRAPPED = HookTarget("vllm.m", "Runner.step", ("self", "batch"), "test", "never")
FUNCTION = HookTarget("vllm.m", "helper", (), "test", "never")
DATA = "class Data:\n    name: str\n    width: list[int]"
# A fact; what is changed in SMALL and in BASE, and what is said then.
MISMATCHES = [
    (Has("vllm.m", "helper"), "helper", "help", "vllm.m has no attribute helper"),
    (Has("vllm.m:Data"), "Data", "Date", "vllm.m.Data does not exist"),
    (Has("vllm.base:Root"), "Root", "Roof", "vllm.base.Root does not exist"),
    (Has(RUNNER, "extra"), "self.ex", "ex", "vllm.m.Runner has no attribute extra"),
    (SIZE, "size: int", "pass", "vllm.m.Runner has no attribute size"),
    (SIZE, ": int", ": str", "vllm.m.Runner.size is str; expected int"),
    (SIZE, ": int", " = 1", "vllm.m.Runner.size is without a type; expected int"),
    (TABLE, "= T", "= d(); self.table = T", "Runner.table is Table, d; expected Table"),
    (HasOneOf(RUNNER, "gone", "extra"), "self.ex", "ex", "attribute gone or extra"),
    (RUN, ".run(batch)", ".run", "vllm.m.Runner.step does not have self.run()"),
    (Does(STEP, "self.left"), "self.left", "left", "does not have self.left"),
    (BOTH, "prepare()", "run(); self.prepare()", "self.run() before self.prepare(); e"),
    (ALONE, ".idle", ".run", "vllm.m has self.run() outside vllm.m.Runner.step, too"),
    (ALONE, ".run(batch)", ".run", "vllm.m.Runner.step does not have self.run()"),
    (RETURNS, "left, r", "right, r", "returns right, right; expected left, right"),
    (RETURNS, ".left, right", "", "returns no tuple; expected left, right"),
    (THING, "Thing", "Thong", "returns Thong; expected Thing"),
    (HELPER, "helper()", "helper(more)", "vllm.m.helper has parameters (more)"),
    (HELPER, "def helper()", "class helper", "vllm.m.helper is not a function"),
    (BATCH, "flag=False", "flag", "(self, batch, flag); expected (self, batch)"),
    (BATCH, "batch, ", "b, ", "has parameters (self, b, flag)"),
    (WRAPPED, "batch, ", "", "has parameters (self, flag); expected it to begin with"),
    (WRAPPED, "def step", "def stop", "vllm.m.Runner.step does not exist"),
    (FUNCTION, "def helper()", "class helper", "vllm.m.helper is not a function"),
    (Has("vllm.m:Data", "name"), DATA, "def Data(): ...", "vllm.m.Data is not a class"),
]
# Differences that do not matter.
HOLD = [
    (Has(RUNNER, "limit"), "(Base)", "(Root)"),
    (Has("vllm.m:Data", width="list"), "list[int]", "'list'"),
    (Has("vllm.m:Data", width="list"), "list[int]", "list[str] | None"),
    (HasOneOf(RUNNER, "extra", "limit"), "self.ex", "ex"),
    (BATCH, "=False", "=False, *, more=1"),
    (WRAPPED, "flag=False", "flag"),
]


@pytest.mark.parametrize(
    ("fact", "old", "new", "message"), [*MISMATCHES, *((*one, None) for one in HOLD)]
)
def test_a_mismatch_is_named(fact, old, new, message):
    files = {"vllm/m.py": SMALL, "vllm/base.py": BASE}
    assert mismatch(fact, Tree(files.get)) is None
    changed = {name: code.replace(old, new) for name, code in files.items()}
    assert changed != files
    found = mismatch(fact, Tree(changed.get))
    assert found is None if message is None else message in (found or "")


def test_a_module_that_does_not_exist_is_named():
    assert mismatch(Has("vllm.n:A"), Tree({}.get)) == "vllm.n does not exist"


# --- tools/check_vllm.py ---


def files_read(read: Callable[[str], str | None]) -> dict[str, str]:
    """The files of a vLLM that the check reads, by path. All holds there."""
    files: dict[str, str] = {}

    def noted(path: str) -> str | None:
        text = read(path)
        return text if text is None else files.setdefault(path, text)

    assert check_vllm.check("vLLM", noted)
    return files


def laid_out(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def wheel(folder: Path, files: dict[str, str], version: str) -> Path:
    """A wheel of vLLM with these files."""
    folder.mkdir(exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    info = {"METADATA": metadata, "RECORD": "", "WHEEL": "Wheel-Version: 1.0\n"}
    info = {f"vllm-{version}.dist-info/{name}": text for name, text in info.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (files | info).items():
            archive.writestr(name, text)
    return path


def run(main: Callable[[], int], *words: str | Path) -> tuple[int, list[str]]:
    """A program's exit status and lines."""
    argv = mock.patch.object(sys, "argv", ["", *map(str, words)])
    with argv, redirect_stdout(StringIO()) as said, redirect_stderr(said):
        return main(), said.getvalue().splitlines()


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The only folder in which pip finds wheels; the cache is empty."""
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def test_a_release_that_has_moved_on_fails_by_name(wheels, tmp_path):
    """`cu_num_logits` of the V2 runner's batch has another name. What was read of a
    wheel is kept, and read without it; a tree is read as it lies there; a release that
    is not to be had is no success."""
    files, path = files_read(read), "vllm/v1/worker/gpu/input_batch.py"
    moved = files | {path: files[path].replace("cu_num_logits", "cu_logits")}
    tree = laid_out(tmp_path / "tree", moved)
    found = [wheel(wheels, files, "9.9.8"), wheel(wheels, moved, "9.9.9")]
    said = "runner_v2: vllm.v1.worker.gpu.input_batch.InputBatch has no attribute "
    for name in ("vllm 9.9.9", "vllm 9.9.9", tree):
        status, (good, *bad) = run(
            check_vllm.main, "9.9.8", str(name).removeprefix("vllm ")
        )
        assert (status, bad) == (1, [f"{name}: {said}cu_num_logits"])
        assert re.fullmatch(r"vllm 9\.9\.8: \d+ signatures and \d+ facts hold", good)
        for one in found:
            one.unlink(missing_ok=True)
    assert run(check_vllm.main, "9.9.8") == (0, [good])
    status, (said,) = run(check_vllm.main, "9.9.7")
    assert status == 3
    assert said.startswith("check: no source of vllm 9.9.7: ERROR")
