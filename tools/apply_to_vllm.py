#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Grafts NWOR into a vLLM of your own, for those who keep a fork.

    python tools/apply_to_vllm.py TREE [--check | --revert | --series FOLDER]

TREE is what has `vllm/` in it: a checkout, or site-packages. It gets vllm/v1/nwor, a
line above each function that a LEDGER names (the decorator of graft.py), and our
variables in envs.py; a checkout also csrc/nwor and what builds it, in CMakeLists.txt,
setup.py and requirements/common.txt, and anything else the library built here. Each
line in a file of vLLM's ends with MARK.

Without an option the files are changed where they lie, and read again. --series leaves
TREE as it is and writes patches for `git am`, one concern each, with what it is for
and when it can go. --check says what TREE lacks of all this or has otherwise, --revert
takes out our lines and files and nothing else. A second run changes nothing.

Nothing is changed if a function is missing, has other parameters or an unknown
decorator, or if anything else that NWOR relies on does not hold; each is named.
Run it with a Python that has torch, wrapt and a vLLM, such as that vLLM's own.

Exit status: 0 done, 1 TREE is not as expected, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import ast
import filecmp
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "vllm" / "v1" / "nwor"
if "vllm_nwor" not in sys.modules:
    # This checkout's, whichever is installed: it is what is copied.
    spec = importlib.util.spec_from_file_location("vllm_nwor", PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["vllm_nwor"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)

from benchmarks.files import write_whole  # noqa: E402

from vllm_nwor.config import ENV_NAMES  # noqa: E402
from vllm_nwor.hooks._wrap import HookTarget  # noqa: E402
from vllm_nwor.hooks.source import (  # noqa: E402
    DECORATOR,
    FACTS,
    HOOKED,
    Mismatch,
    Tree,
    check_decorated,
    dotted,
    files_of,
    ledger,
    mismatches,
    place_of,
)
from vllm_nwor.plugin import AUDIT_HOOKS, HOOKS  # noqa: E402

MARK = "  # nwor"
LIBRARY = "vllm/v1/nwor/_nwor_C.so"
# vLLM's own on functions of a LEDGER: all of them hand the parameters through.
KNOWN_DECORATORS = (
    *("contextmanager", "dataclass", "step_eplb_after", "torch.inference_mode"),
)
UPSTREAM = "https://github.com/vllm-project/vllm/blob"
ADD, BUILD = "nwor: add the package vllm/v1/nwor", "nwor: build csrc/nwor"
DECLARE, IMPORT = "nwor: declare its variables", "nwor: name the decorator"
FOLDERS = {"vllm/v1/nwor": ADD, "csrc/nwor": BUILD}

Marked = Counter[tuple[int, str]]  # our lines, with the number of others above each


class Refused(Exception):
    """TREE is not as expected; its argument: a sentence for each thing."""


class Line(NamedTuple):
    """One for a file of vLLM's, above its line `above` (from 0), in a commit."""

    path: str
    above: int
    text: str
    subject: str


class Place(NamedTuple):
    """A function that LEDGERs name."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module.replace('.', '/')}.py"

    @property
    def subject(self) -> str:
        return f"nwor: hook {self.name} of {self.module}"


def places() -> dict[Place, list[HookTarget]]:
    """All of them, with their rows."""
    # A file may wrap in another one's module, too.
    rows = dict.fromkeys(row for name in HOOKED for row in ledger(name))
    found: dict[Place, list[HookTarget]] = {}
    for module in dict.fromkeys((*HOOKS, *AUDIT_HOOKS)):
        for row in rows:
            if row.module == module:
                found.setdefault(Place(module, row.qualname), []).append(row)
    return found


def split_marked(text: str) -> tuple[str, Marked]:
    """A text without our lines, and these."""
    others: list[str] = []
    marked: Marked = Counter()
    for line in text.split("\n"):
        if line.endswith(MARK):
            marked[len(others), line.strip()] += 1
        else:
            others.append(line)
    return "\n".join(others), marked


def files_in(root: Path, folder: str) -> Iterator[str]:
    """What is not made by running or building it."""
    for path in sorted((root / folder).rglob("*")):
        if path.is_file() and path.suffix not in (".pyc", ".so"):
            yield str(path.relative_to(root))


class Graft:
    """A tree, and what it is to hold. Raises Refused if it is none of vLLM's.

    facts: what else NWOR relies on is compared, too: of these modules of ours.
    """

    def __init__(self, root: Path, facts: Iterable[str] = FACTS) -> None:
        self.root, self.facts = root, facts
        if not (root / "vllm" / "__init__.py").is_file():
            raise Refused([f"there is no {root}/vllm/__init__.py"])
        self.places = places()
        self.modules = list(dict.fromkeys(place.path for place in self.places))
        wanted = [*self.modules, "vllm/envs.py", "CMakeLists.txt", "setup.py"]
        if (root / "setup.py").is_file():
            wanted.append("requirements/common.txt")
        self.texts: dict[str, str] = {}  # of vLLM's files, without our lines
        self.marked: dict[str, Marked] = {}
        for path in (path for path in wanted if (root / path).is_file()):
            text = (root / path).read_bytes().decode()
            self.texts[path], self.marked[path] = split_marked(text)
        self.builds = "CMakeLists.txt" in self.texts
        self.copies = {
            path: subject
            for folder, subject in FOLDERS.items()
            for path in files_in(ROOT, folder)
            if subject == ADD or self.builds
        }

    # --- what is to be there ---

    @cached_property
    def lines(self) -> list[Line]:
        """All that go into vLLM's files. Raises Refused."""
        read = files_of(self.root)
        tree = Tree(lambda path: self.texts.get(path) or read(path))
        told = [
            sentence for module in self.facts for sentence in mismatches(module, tree)
        ]
        for path, text in self.texts.items():
            for number, line in enumerate(text.split("\n"), 1):
                if "nwor" in line.lower():
                    told.append(f"{path}:{number} has to do with NWOR: {line.strip()}")
        if not self.builds and not (ROOT / LIBRARY).is_file():
            told.append(f"{LIBRARY} is not there to be copied; `make setup` builds it")
        found: list[Line] = []
        decorators = (self._decorator(*place, tree) for place in self.places.items())
        for lines in (self._wiring(), *decorators):
            try:
                found += lines
            except Mismatch as mismatch:
                told.append(str(mismatch))
        if told:
            raise Refused(list(dict.fromkeys(told)))
        return found

    def _decorator(
        self, place: Place, rows: list[HookTarget], tree: Tree
    ) -> Iterator[Line]:
        for row in rows:
            node = place_of(row, tree)
        call = f'{DECORATOR}("{place.name}")'
        if node is None:
            above = self._below(place.path)
            text = f"{place.name} = {call}({place.name})"
        else:
            decorators = getattr(node, "decorator_list", [])
            for decorator in decorators:
                name = dotted(getattr(decorator, "func", decorator))
                if name not in KNOWN_DECORATORS:
                    raise Mismatch(
                        f"{place.module}.{place.name} is decorated with "
                        f"@{ast.unparse(decorator)}, which NWOR does not know"
                    )
            above = min(part.lineno for part in (node, *decorators)) - 1
            text = f"{' ' * node.col_offset}@{call}"
        yield Line(place.path, above, f"{text}{MARK}", place.subject)

    def _below(self, path: str, name: str | None = None) -> int:
        """The line below an assignment to `name`, or below the imports that a file
        begins with. Raises Mismatch."""
        last = 0
        for statement in ast.parse(self.texts[path]).body:
            if name is None and isinstance(statement, ast.FunctionDef | ast.ClassDef):
                break
            if name is None and isinstance(statement, ast.Import | ast.ImportFrom):
                last = statement.end_lineno or 0
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = getattr(statement, "targets", None) or [statement.target]
                if name is not None and name in map(dotted, targets):
                    return statement.end_lineno or 0
        if name is not None:
            raise Mismatch(f"{path} does not assign to {name}")
        return last

    def _wiring(self) -> Iterator[Line]:
        for path in filter(self.texts.get, self.modules):
            above = self._below(path)
            text = f"from vllm.v1.nwor.graft import hook_for{MARK}"
            yield Line(path, above, text, IMPORT)
            yield Line(path, above, f"{DECORATOR} = hook_for(__name__){MARK}", IMPORT)
        above = self._below(path := "vllm/envs.py", "environment_variables")
        for name in ENV_NAMES:
            text = f'environment_variables["{name}"] = lambda: None{MARK}'
            yield Line(path, above, text, DECLARE)
        if text := self.texts.get(path := "CMakeLists.txt", ""):
            found = re.search(r"^project\([^)]*\)", text, re.MULTILINE)
            if found is None:
                raise Mismatch(f"{path} has no project()")
            above = text.count("\n", 0, found.end()) + 1
            # Behind all else: vLLM's own file returns early where there is no GPU.
            text = f"cmake_language(DEFER CALL include csrc/nwor/nwor.cmake){MARK}"
            yield Line(path, above, text, BUILD)
        if path in self.texts and (path := "setup.py") in self.texts:
            self._below(path, "ext_modules")
            above = self._below(path, "package_data")
            extension = 'CMakeExtension(name="vllm.v1.nwor._nwor_C", optional=True)'
            text = f"if ext_modules: ext_modules.append({extension}){MARK}"
            yield Line(path, above, text, BUILD)
            text = f'package_data["vllm"].append("v1/nwor/_nwor_C.so"){MARK}'
            yield Line(path, above, text, BUILD)
        if text := self.texts.get(path := "requirements/common.txt", ""):
            above = text.count("\n") + (not text.endswith("\n"))
            yield Line(path, above, f"wrapt >= 1.16{MARK}", BUILD)

    def grafted(self, path: str, subjects: Collection[str] | None = None) -> str:
        """A file of vLLM's with our lines, or with those of some commits."""
        result = self.texts[path].split("\n")
        wanted = [line for line in self.lines if line.path == path]
        # From the last on, so that those above stay where they are.
        for line in sorted(wanted, key=lambda line: line.above)[::-1]:
            if not subjects or line.subject in subjects:
                result.insert(line.above, line.text)
        return "\n".join(result)

    # --- what is there ---

    def drift(self) -> list[str]:
        """What is not as it is to be. Raises Refused if that cannot be said."""
        told = []
        for path in self.texts:
            marked, wanted = self.marked[path], split_marked(self.grafted(path))[1]
            for verb, lines in ("lacks", wanted - marked), ("has", marked - wanted):
                told += [f"{path} {verb}, below line {n}: {x}" for n, x in lines]
        there = [*self.copies, *([] if self.builds else [LIBRARY])]
        told += [f"{p} is missing" for p in there if not (self.root / p).is_file()]
        return told + self.foreign()

    def foreign(self) -> list[str]:
        """Files in our folders that are not this version's."""
        found = [path for folder in FOLDERS for path in files_in(self.root, folder)]
        if not self.builds and (self.root / LIBRARY).is_file():
            found.append(LIBRARY)
        same = filecmp.cmpfiles(ROOT, self.root, found, shallow=False)[0]
        return [f"{path} is not this version's" for path in found if path not in same]

    # --- what to do ---

    def apply(self) -> None:
        """Raises Refused before anything was changed, or if what was written is not
        read again as it should."""
        for path in self.texts:
            write_whole(self.root / path, self.grafted(path).encode())
        for path in self.copies:
            write_whole(self.root / path, (ROOT / path).read_bytes())
        if (ROOT / LIBRARY).is_file() and not (self.root / LIBRARY).exists():
            write_whole(self.root / LIBRARY, (ROOT / LIBRARY).read_bytes())
        told = Graft(self.root, facts=()).drift()
        tree = Tree(files_of(self.root))
        for row in (row for rows in self.places.values() for row in rows):
            try:
                check_decorated(row, tree)
            except Mismatch as mismatch:
                told.append(str(mismatch))
        if told:
            raise Refused(told)

    def revert(self) -> None:
        """Raises Refused, before anything was changed, if a file is not ours."""
        if told := self.foreign():
            raise Refused([*told, "nothing was changed: the version it came with can"])
        for path in filter(self.marked.get, self.texts):
            write_whole(self.root / path, self.texts[path].encode())
        for folder in FOLDERS:
            shutil.rmtree(self.root / folder, ignore_errors=True)

    def commits(self) -> dict[str, str]:
        """Subject -> body, in order."""
        gone = ["no function is decorated any more"]
        package = self._body(["what the decorators put on"], gone, "vllm/plugins/")
        found = {ADD: package}
        if self.builds:
            found[BUILD] = self._body(["NWOR's ops"], gone, "CMakeLists.txt")
        why, until = "vLLM warns of others", "vLLM lets others declare variables"
        found[DECLARE] = self._body([why], [until], "vllm/envs.py")
        found[IMPORT] = self._body(["for the lines to come"], gone, "vllm/plugins/")
        lines = {line.subject: line for line in self.lines}
        for place, rows in self.places.items():
            why, until = [row.why for row in rows], [row.delete_when for row in rows]
            at = f"#L{lines[place.subject].above + 1}"
            found[place.subject] = self._body(why, until, place.path, at)
        return found

    def _body(self, why: list[str], until: list[str], path: str, at: str = "") -> str:
        text = files_of(self.root)("vllm/_version.py") or ""
        found = re.search(r"^__version__.*?['\"](\d+\.\d+\.\d+)['\"+]", text, re.M)
        link = f"v{found[1]}/{path}{at}" if found else f"main/{path}"
        told = [textwrap.fill(f"Why: {reason}.", 72) for reason in dict.fromkeys(why)]
        ends = [f"Drop-when: {condition}" for condition in dict.fromkeys(until)]
        return "\n".join([*told, "", f"Upstream: {UPSTREAM}/{link}", *ends])

    def series(self, folder: Path) -> int:
        """Writes the patches; how many. Raises Refused."""
        if list(folder.glob("*.patch")):
            raise Refused([f"{folder} has patches already"])
        commits = self.commits()
        with tempfile.TemporaryDirectory() as scratch:
            git(scratch, "init", "-q")
            done: list[str] = []
            for subject, body in {"vLLM": "", **commits}.items():
                done.append(subject)
                for path in self.texts:
                    copy = Path(scratch, path)
                    write_whole(copy, self.grafted(path, done).encode())
                    copy.chmod((self.root / path).stat().st_mode & 0o777)
                for path in (path for path, of in self.copies.items() if of == subject):
                    write_whole(Path(scratch, path), (ROOT / path).read_bytes())
                git(scratch, "add", "-A", "-f")
                git(scratch, "commit", "-q", "-m", subject, "-m", body)
            options = ["--zero-commit", "--no-signature", f"-{len(commits)}"]
            git(scratch, "format-patch", "-q", *options, "-o", str(folder.resolve()))
        return len(commits)


def git(repository: str, *arguments: str) -> None:
    """With the user's name, if git knows it, and no hooks of theirs."""
    settings = ["core.hooksPath=/dev/null", "commit.gpgsign=false"]
    settings.append("core.autocrlf=false")
    of_user = subprocess.run(["git", "config", "user.email"], capture_output=True)
    if not of_user.stdout.strip():
        settings += ["user.name=vllm-nwor", "user.email=vllm-nwor@localhost"]
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *options, *arguments], cwd=repository, check=True)


def run(graft: Graft, args: argparse.Namespace) -> str:
    """What was done, in a line. Raises Refused."""
    if args.revert:
        graft.revert()
        return "has nothing of it"
    if args.series:
        return f"needs the {graft.series(args.series)} patches in {args.series}"
    if not (told := graft.drift()):
        return "has all of it"
    folders = [graft.root / folder for folder in FOLDERS]
    if any(graft.marked.values()) or any(folder.exists() for folder in folders):
        raise Refused(told)
    if args.check:
        raise Refused(["there is nothing of NWOR"])
    graft.apply()
    if graft.builds:
        return "has all of it; its library is built with vLLM's, or copied already"
    return "has all of it, and the library: it has no CMakeLists.txt to build csrc/nwor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, metavar="TREE")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say what is otherwise")
    what.add_argument("--revert", action="store_true", help="take all of it out")
    what.add_argument("--series", type=Path, metavar="FOLDER", help="write patches")
    args = parser.parse_args()
    try:
        print(f"{args.tree} {run(Graft(args.tree), args)}")
    except Refused as refused:
        print("\n".join(f"{args.tree}: {line}" for line in refused.args[0]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
