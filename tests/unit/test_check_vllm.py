# SPDX-License-Identifier: Apache-2.0
"""What NWOR relies on in vLLM, as hooks/facts.py says it, against sources.

The installed vLLM's source passes; with another name for a thing, that thing is named.
What else can be otherwise is tried on a source of a few lines. Wheels come from a
folder.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tools import check_vllm
from vllm_nwor.hooks._wrap import HookTarget
from vllm_nwor.hooks.source import (
    FACTS,
    KINDS,
    Fact,
    Mismatch,
    Tree,
    check_fact,
    check_target,
    facts,
    files_of,
    mismatches,
)

pytestmark = pytest.mark.usefixtures("parsed_once")

SITE = Path(str(importlib.util.find_spec("vllm").origin)).parents[1]
read = functools.cache(files_of(SITE))
WHOLE = Tree(read)
ALL = [fact for module in FACTS for fact in facts(module)]


def said_of(fact: Fact, tree: Tree) -> str | None:
    """What is said of a fact that does not hold; of kind "hooked" is a LEDGER's row."""
    place, kind, what = fact
    module, _, name = place.partition(":")
    try:
        if kind == "hooked":
            row = HookTarget(f"vllm.{module}", name, tuple(what), "test", "never")
            check_target(row, tree)
        else:
            check_fact(fact, tree)
    except Mismatch as mismatch:
        return str(mismatch)
    return None


def renaming(names: Iterable[str]) -> Tree:
    """The installed source, with other names for these."""
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})\b")

    def renamed(path: str) -> str | None:
        text = read(path)
        return None if text is None else pattern.sub(r"\1_gone", text)

    return Tree(renamed)


# --- the installed vLLM ---


@pytest.mark.parametrize("module", FACTS)
def test_all_holds_in_the_installed_vllm(module):
    assert mismatches(module, WHOLE) == []


def test_each_word_of_the_facts_is_read():
    for module, text in FACTS.items():
        rows = facts(module)
        assert {kind for _, kind, _ in rows} <= set(KINDS)
        assert all(what for *_, what in rows)
        num_places = sum(line[:1] not in ("", " ") for line in text.splitlines())
        num_read = sum(1 + len(what) for *_, what in rows)
        assert num_read + num_places == len(text.split())


# --- fact by fact ---


@pytest.mark.parametrize("fact", ALL, ids=str)
def test_each_thing_is_named_where_it_has_another_name(fact):
    place, kind, what = fact
    words = {}
    for word in what:
        name = re.split(r":|\(\)", word)[0]
        if kind == "has":
            words[word] = name.split("|")
        elif word not in ("self", "..."):
            words[word] = [name.rpartition(".")[2]]
    tree = renaming(name for names in words.values() for name in names)
    for word, names in words.items():
        said = said_of((place, kind, [word]), tree)
        assert said is not None
        assert place.partition(":")[0] in said
        assert all(name in said for name in names)


def test_each_type_is_named_where_it_is_another():
    words = [(p, w) for p, kind, what in ALL if kind == "has" for w in what if ":" in w]
    tree = renaming({re.findall(r"\w+", word)[-1] for _, word in words})
    assert [
        word for place, word in words if not said_of((place, "has", [word]), tree)
    ] == []


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
# Facts of SMALL; what is changed in it or in BASE, and what is said then.
OTHERWISE = [
    ("m:Runner has limit", "Runner", "Walker", "vllm.m.Runner does not exist"),
    ("m:Runner has gone|extra", "self.ex", "ex", "has no attribute gone or extra"),
    ("m:Runner has size:int", ": int", ": str", ".size is str; expected int"),
    ("m:Runner has size:int", ": int", " = 1", "size is without a type; expected int"),
    ("m:Data has width:list", "list", "tuple", "tuple[int]; expected list"),
    ("m has helper", "helper", "helped", "vllm.m has no attribute helper"),
    ("m:helper takes", "helper()", "helper(more)", "helper has parameters (more)"),
    (TABLE, "= T", "= d.T", "Runner.table is d.Table; expected Table"),
    (TABLE, "= T", "= d(); self.table = T", "table is Table, d; expected Table"),
    (TABLE, "Table(config)", "config", "is without a type; expected Table"),
    (f"{STEP} does self.run()", ".run(batch)", ".run", "does not have self.run()"),
    (BOTH, "prepare()", "run(); self.prepare()", "self.run() before self.prepare(); e"),
    (f"{STEP} does self.run()!", ".idle", ".run", "outside vllm.m.Runner.step, too"),
    (RETURNS, "left, r", "right, r", "returns right, right; exp"),
    (RETURNS, "left, r", "left, 1, r", "returns left, ?, right;"),
    (RETURNS, ".left, right", "", "returns no tuple; expected l"),
    ("m:Runner.other returns Thing", "Thing", "Thong", "returns Thong; expected Thing"),
    (
        FLAG,
        "=False",
        "=0, more=1",
        "(self, batch, flag, more); expected (self, batch, ",
    ),
    (BATCH, "flag=False", "flag", "expected (self, batch, ..."),
    (BATCH, "flag=False", "*, flag", "expected (self, batch, ..."),
    (BATCH, "batch, ", "b, ", "has parameters (self, b, flag)"),
    (HOOKED, "batch, ", "", "has parameters (self, flag); expected it to begin with"),
]
# What may be otherwise.
FINE = [
    ("m:Runner has limit", "(Base)", "(Root)"),
    ("m:Data has width:list", "list[int]", "'list'"),
    (BATCH, "=False", "=False, more=1"),
]


@pytest.mark.parametrize(
    ("text", "old", "new", "said"), [*OTHERWISE, *((*one, "") for one in FINE)]
)
def test_what_is_otherwise_is_named(text, old, new, said):
    place, kind, *what = text.split()
    files = {"vllm/m.py": SMALL, "vllm/base.py": BASE}
    assert said_of((place, kind, what), Tree(files.get)) is None
    changed = {name: code.replace(old, new) for name, code in files.items()}
    assert changed != files
    told = said_of((place, kind, what), Tree(changed.get)) or ""
    assert said in told
    assert bool(said) is bool(told)


def test_a_vanished_module_is_named_once():
    path = "vllm/v1/worker/gpu/model_runner.py"
    tree = Tree(lambda name: None if name == path else read(name))
    assert mismatches("runner_v2", tree) == [
        "vllm.v1.worker.gpu.model_runner does not exist"
    ]


# --- tools/check_vllm.py ---


def files_read(read: Callable[[str], str | None]) -> dict[str, str]:
    """The files of a vLLM that the check reads, by path."""
    files: dict[str, str] = {}

    def noted(path: str) -> str | None:
        text = read(path)
        if text is not None:
            files[path] = text
        return text

    assert check_vllm.check("vLLM", noted)
    return files


def laid_out(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def needed():
    return files_read(read)


def wheel(folder: Path, files: dict[str, str], version: str) -> Path:
    """A wheel of vLLM with these files."""
    folder.mkdir(exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    info = {"METADATA": metadata, "RECORD": "", "WHEEL": "Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        for name, text in info.items():
            archive.writestr(f"vllm-{version}.dist-info/{name}", text)
    return path


def doctored(files: dict[str, str]) -> dict[str, str]:
    """`cu_num_logits` of the V2 runner's batch has another name."""
    path = "vllm/v1/worker/gpu/input_batch.py"
    return files | {path: files[path].replace("cu_num_logits", "cu_logits")}


SAID = [
    "runner_v2: vllm.v1.worker.gpu.input_batch.InputBatch has no attribute "
    "cu_num_logits"
]


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Runs the tool; pip finds wheels in one folder only, and the cache is empty."""
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["check_vllm.py", *arguments])
        return check_vllm.main()

    return run


def test_a_release_that_has_moved_on_fails_by_name(needed, main, tmp_path, capsys):
    """What was read of a wheel is kept, and read without it."""
    folder = tmp_path / "wheels"
    paths = [wheel(folder, needed, "9.9.8"), wheel(folder, doctored(needed), "9.9.9")]
    for _ in range(2):
        assert main("9.9.8", "9.9.9") == 1
        good, *bad = capsys.readouterr().out.splitlines()
        assert good.startswith("vllm 9.9.8: ")
        assert good.endswith(" facts hold")
        assert bad == [f"vllm 9.9.9: {said}" for said in SAID]
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_release_that_is_not_to_be_had_is_no_success(main, capsys):
    assert main("9.9.9") == 3
    assert "no source of vllm 9.9.9: ERROR" in capsys.readouterr().err


def test_a_tree_is_checked_as_it_lies_there(needed, main, tmp_path, capsys):
    tree = laid_out(tmp_path / "tree", doctored(needed))
    assert main(str(tree)) == 1
    assert capsys.readouterr().out.splitlines() == [f"{tree}: {said}" for said in SAID]
