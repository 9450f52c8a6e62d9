# SPDX-License-Identifier: Apache-2.0
"""What NWOR relies on in vLLM, as hooks/facts.py says it, against sources.

The installed vLLM's source passes. Then every single fact is broken in a copy of it,
and has to be named. Wheels come from a folder, or from a server of these tests.
"""

from __future__ import annotations

import ast
import functools
import http.server
import importlib.util
import itertools
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    dotted,
    facts,
    files_of,
    ledger,
    mismatches,
)

pytestmark = pytest.mark.usefixtures("parsed_once")

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_vllm.py"
found = importlib.util.find_spec("vllm")
assert found is not None
assert found.origin is not None
SITE = Path(found.origin).parents[1]
read = functools.cache(files_of(SITE))
WHOLE = Tree(read)  # tests change it through monkeypatch
ALL = [fact for module in FACTS for fact in facts(module)]
TARGETS = [row for module in FACTS for row in ledger(module)]


def nodes_of(place: str) -> tuple[Any, ast.Module]:
    """The nodes of a place in WHOLE, and of its module."""
    module, _, qualname = place.partition(":")
    source, node = WHOLE.module(f"vllm.{module}").find(qualname)
    return node, source.code


def broken(row: Fact | HookTarget, tree: Tree = WHOLE) -> str:
    """What is said of a row that does not hold."""
    for source in tree._modules.values():
        source._walked.clear()  # it may have been changed since
    with pytest.raises(Mismatch) as error:
        if isinstance(row, HookTarget):
            check_target(row, tree)
        else:
            check_fact(row, tree)
    return str(error.value)


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
        name = re.split(r":|\(\)|=", word)[0]
        if kind == "has":
            words[word] = name.split("|")
        elif kind == "made":
            words[word] = [word.rpartition("=")[2].rpartition(".")[2]]
        elif word not in ("self", "..."):
            words[word] = [name.rpartition(".")[2]]
    tree = renaming(name for names in words.values() for name in names)
    for word, names in words.items():
        said = broken((place, kind, [word]), tree)
        assert place.partition(":")[0] in said
        assert all(name in said for name in names)


TYPED = [
    pytest.param((place, kind, [word]), id=f"{place}-{word}")
    for place, kind, what in ALL
    for word in what
    if ":" in word
]


@pytest.mark.parametrize("fact", TYPED)
def test_another_type_is_named(fact, monkeypatch):
    place, _, (word,) = fact
    name, _, declared = word.partition(":")
    for node in ast.walk(nodes_of(place)[1]):
        if isinstance(node, ast.AnnAssign) and dotted(node.target) == name:
            monkeypatch.setattr(node, "annotation", ast.Name("X"))
    assert broken(fact).endswith(f"{name} is declared X; expected {declared}")


PAIRS = [
    pytest.param((place, kind, [*pair]), id=f"{place}-{'-'.join(pair)}")
    for place, kind, what in ALL
    if kind == "does"
    for pair in itertools.pairwise(what)
]


@pytest.mark.parametrize("fact", PAIRS)
def test_two_calls_swapped_are_named(fact, monkeypatch):
    place, _, (one, other) = fact
    swapped = {one: other, other: one}
    for call in ast.walk(nodes_of(place)[0]):
        if isinstance(call, ast.Call) and f"{dotted(call.func)}()" in swapped:
            new = ast.parse(swapped[f"{dotted(call.func)}()"], mode="eval").body
            assert isinstance(new, ast.Call)
            for part in ast.walk(new):
                ast.copy_location(part, call.func)
            monkeypatch.setattr(call, "func", new.func)
    assert f" has {other} before {one}; expected it behind" in broken(fact)


@pytest.mark.parametrize("fact", [f for f in ALL if f[1] == "only"], ids=str)
def test_a_call_from_elsewhere_is_named(fact, monkeypatch):
    place, _, (call,) = fact
    module = nodes_of(place)[1]
    more = ast.parse(f"def _dummy_run(self):\n    {call}").body
    monkeypatch.setattr(module, "body", [*module.body, *more])
    assert f" has {call} outside vllm." in broken(fact)


TUPLES = [fact for fact in ALL if fact[1] == "returns" and len(fact[2]) > 1]


@pytest.mark.parametrize("fact", TUPLES, ids=str)
@pytest.mark.parametrize("change", ["longer", "shorter", "reordered", "declared"])
def test_a_tuple_of_another_shape_is_named(change, fact, monkeypatch):
    place, _, what = fact
    node = nodes_of(place)[0]
    if change == "declared":
        declared = ast.parse("tuple[int, int, int, int]", mode="eval").body
        monkeypatch.setattr(node, "returns", declared)
        assert broken(fact).endswith(f"expected {len(what)} parts")
        return
    for statement in ast.walk(node):
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            parts = statement.value.elts
            changed = {
                "longer": [*parts, ast.Constant(None)],
                "shorter": parts[:-1],
                "reordered": parts[::-1],
            }
            monkeypatch.setattr(statement.value, "elts", changed[change])
    assert broken(fact).endswith(f"expected {', '.join(what)}")


@pytest.mark.parametrize("fact", [f for f in ALL if f[1] == "takes"], ids=str)
def test_a_further_parameter_is_named_unless_it_may_be_left_out(fact, monkeypatch):
    arguments = nodes_of(fact[0])[0].args
    monkeypatch.setattr(arguments, "args", [*arguments.args, ast.arg("more")])
    if fact[2][-1] == "...":
        assert "more" in broken(fact)
        defaults = [*arguments.defaults, ast.Constant(None)]
        monkeypatch.setattr(arguments, "defaults", defaults)
        check_fact(fact, WHOLE)
    else:
        monkeypatch.setattr(arguments, "defaults", [ast.Constant(None)])
        assert "more" in broken(fact)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, id=f"{row.name}-{name}")
        for row in TARGETS
        for name in row.params
        # A dataclass has no other first parameter.
        if (name, row.qualname) != ("self", "EngineHandshakeMetadata.__init__")
    ],
)
def test_a_removed_argument_is_named(row, name, monkeypatch):
    source = WHOLE.module(row.module)
    try:
        arguments = source.find(row.qualname)[1].args  # type: ignore[attr-defined]
        left = [argument for argument in arguments.args if argument.arg != name]
        monkeypatch.setattr(arguments, "args", left)
    except Mismatch:  # a dataclass: a field of it
        node: Any = source.find(row.qualname.removesuffix(".__init__"))[1]
        left = [s for s in node.body if dotted(getattr(s, "target", None)) != name]
        monkeypatch.setattr(node, "body", left)
    said = broken(row)
    assert said.startswith(f"{row.name} has parameters (")
    assert said.endswith(f"expected it to begin with ({', '.join(row.params)})")


@pytest.mark.parametrize("row", TARGETS, ids=lambda row: row.name)
def test_a_vanished_function_is_named(row):
    owner, _, name = row.qualname.rpartition(".")
    gone = owner if name == "__init__" else name
    assert gone in broken(row, renaming([gone]))


def test_a_vanished_module_is_named_once():
    path = "vllm/v1/worker/gpu/model_runner.py"
    tree = Tree(lambda name: None if name == path else read(name))
    assert mismatches("runner_v2", tree) == [
        "vllm.v1.worker.gpu.model_runner does not exist"
    ]


# --- tools/check_vllm.py ---


@pytest.fixture(scope="module")
def needed():
    """The files of vLLM that the check reads."""
    files: dict[str, str] = {}

    def noted(path: str) -> str | None:
        text = read(path)
        if text is not None:
            files[path] = text
        return text

    assert check_vllm.check("installed", noted)
    return files


def wheel(folder: Path, files: dict[str, str], version: str = "9.9.9") -> Path:
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
    f"{module}: vllm.v1.worker.gpu.input_batch.InputBatch has no attribute "
    "cu_num_logits"
    for module in ("runner_v2", "audit.runner_v2")
]


@pytest.fixture
def pip_finds(tmp_path, monkeypatch):
    """Has pip find wheels in one place only; the cache is empty."""
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return lambda place: monkeypatch.setenv("PIP_FIND_LINKS", str(place))


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with ranges or without."""

    ranges = True
    num_bytes = 0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.suffix != ".whl":
            super().do_GET()
            return
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, len(content) - 1
        if asked and self.ranges:
            if asked[1]:
                first, last = int(asked[1]), min(int(asked[2] or last), last)
            else:
                first = max(0, len(content) - int(asked[2]))
        part = content[first : last + 1]
        if not self.headers.get("User-Agent", "").startswith("pip/"):
            Server.num_bytes += len(part)  # pip reads the metadata out of it, whole
        self.send_response(206 if len(part) < len(content) else 200)
        if asked and self.ranges:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server's address for the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    handler = functools.partial(Server, directory=str(tmp_path / "wheels"))
    monkeypatch.setattr(Server, "num_bytes", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_vllm.py", *arguments])
    return check_vllm.main()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_wheel_is_read_from_a_server_and_kept(
    ranges, needed, pip_finds, served, tmp_path, monkeypatch, capsys
):
    """By ranges, where there are any, and then without the file that fills it."""
    noise = random.Random(0).randbytes(1 << 20).hex()
    path = wheel(tmp_path / "wheels", {"vllm/other.py": noise} | needed)
    monkeypatch.setattr(Server, "ranges", ranges)
    monkeypatch.setattr(check_vllm, "TAIL_BYTES", 1 << 14)
    pip_finds(served)
    assert main(monkeypatch, "9.9.9") == 0
    output = capsys.readouterr()
    assert "vllm 9.9.9: " in output.out
    assert ("vllm==9.9.9, whole: " in output.err) is not ranges
    assert (0 < Server.num_bytes < 1 << 20) is ranges
    path.unlink()
    pip_finds(tmp_path / "nowhere")
    assert main(monkeypatch, "9.9.9") == 0


def test_a_release_that_has_moved_on_fails_by_name(
    needed, pip_finds, tmp_path, monkeypatch, capsys
):
    wheel(tmp_path / "wheels", needed, "9.9.8")
    wheel(tmp_path / "wheels", doctored(needed))
    pip_finds(tmp_path / "wheels")
    assert main(monkeypatch, "9.9.8", "9.9.9") == 1
    good, *bad = capsys.readouterr().out.splitlines()
    assert good.startswith("vllm 9.9.8: ")
    assert good.endswith(" facts hold")
    assert bad == [f"vllm 9.9.9: {said}" for said in SAID]


def test_a_release_that_is_not_to_be_had_is_no_success(
    pip_finds, tmp_path, monkeypatch, capsys
):
    pip_finds(tmp_path)
    assert main(monkeypatch, "9.9.9") == 3
    assert "no source of vllm 9.9.9: ERROR" in capsys.readouterr().err


def test_a_tree_is_checked_as_it_lies_there(needed, tmp_path):
    for name, text in doctored(needed).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, TOOL, SITE, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[1:] == [f"{tmp_path}: {said}" for said in SAID]
