# SPDX-License-Identifier: Apache-2.0
"""What NWOR relies on in vLLM, as hooks/facts.py says it, against sources.

The installed vLLM's source passes. What can be otherwise is tried on a source of a few
lines. Wheels come from a folder.
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
    Fact,
    Mismatch,
    Tree,
    check_fact,
    check_target,
    files_of,
)

pytestmark = pytest.mark.usefixtures("parsed_once")

SITE = Path(str(importlib.util.find_spec("vllm").origin)).parents[1]
read = functools.cache(files_of(SITE))


def said_of(fact: Fact, tree: Tree) -> str:
    """What is said of a fact that does not hold; of kind "hooked" is a LEDGER's row."""
    place, kind, what = fact
    module, _, name = place.partition(":")
    row = HookTarget(f"vllm.{module}", name, tuple(what), "test", "never")
    try:
        check_target(row, tree) if kind == "hooked" else check_fact(fact, tree)
    except Mismatch as mismatch:
        return str(mismatch)
    return ""


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
STEP = "m:Runner.step"
BATCH, FLAG = f"{STEP} takes self batch ...", f"{STEP} takes self batch flag"
RETURNS, HOOKED = f"{STEP} returns left right", f"{STEP} hooked self batch"
TABLE, BOTH = "m:Runner has table:Table", f"{STEP} does self.prepare() self.run()"
DATA = "class Data:\n    name: str\n    width: list[int]"
# Facts of SMALL; what is changed in it or in BASE, and what is said then.
OTHERWISE = [
    ("m:Runner has gone|extra", "self.ex", "ex", "has no attribute gone or extra"),
    ("m:Runner has size:int", ": int", ": str", ".size is str; expected int"),
    ("m:Runner has size:int", ": int", " = 1", "size is without a type; expected int"),
    ("m:helper takes", "helper()", "helper(more)", "helper has parameters (more)"),
    (TABLE, "= T", "= d(); self.table = T", "table is Table, d; expected Table"),
    (f"{STEP} does self.run()", ".run(batch)", ".run", "does not have self.run()"),
    (f"{STEP} does self.left", "self.left", "left", "does not have self.left"),
    (BOTH, "prepare()", "run(); self.prepare()", "self.run() before self.prepare(); e"),
    (f"{STEP} does self.run()!", ".idle", ".run", "outside vllm.m.Runner.step, too"),
    (RETURNS, "left, r", "right, r", "returns right, right; exp"),
    (RETURNS, ".left, right", "", "returns no tuple; expected l"),
    ("m:Runner.other returns Thing", "Thing", "Thong", "returns Thong; expected Thing"),
    (FLAG, "=False", ", more", "batch, flag, more); expected (self, batch, "),
    (BATCH, "flag=False", "flag", "expected (self, batch, ..."),
    (BATCH, "batch, ", "b, ", "has parameters (self, b, flag)"),
    (HOOKED, "batch, ", "", "has parameters (self, flag); expected it to begin with"),
    ("m:Data has name", DATA, "def Data(): ...", "Data is no class"),
    ("m:helper takes", "def helper()", "class helper", "helper is no function"),
    ("m:helper hooked", "def helper()", "class helper", "helper is no function"),
    # What may be otherwise.
    ("m:Runner has limit", "(Base)", "(Root)", ""),
    ("m:Data has width:list", "list[int]", "'list'", ""),
    (BATCH, "=False", "=False, *, more=1", ""),
]


@pytest.mark.parametrize(("text", "old", "new", "said"), OTHERWISE)
def test_what_is_otherwise_is_named(text, old, new, said):
    place, kind, *what = text.split()
    files = {"vllm/m.py": SMALL, "vllm/base.py": BASE}
    assert said_of((place, kind, what), Tree(files.get)) == ""
    changed = {name: code.replace(old, new) for name, code in files.items()}
    assert changed != files
    told = said_of((place, kind, what), Tree(changed.get))
    assert said in told
    assert bool(said) is bool(told)


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
