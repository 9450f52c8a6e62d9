#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts NWOR into a checkout or an installation of vLLM, for those who keep a fork.

    python tools/apply_to_vllm.py TREE [--check | --revert | --series FOLDER]

TREE is the folder that contains `vllm/`: a checkout, or site-packages. It gets
vllm/v1/nwor, a call of plugin.hook_module at the end of each module that the ledger
names, and NWOR's variables in envs.py. A checkout also gets csrc/nwor and cmake/nwor,
and the lines of CMakeLists.txt and setup.py that build them. Any other TREE gets the
library that was built here. Each line that is added to a file of vLLM ends with MARK.

Without an option the files are changed in place and checked. --series leaves TREE as it
is and writes patches for `git am`, one for each concern, with the reason and the
condition under which it can be dropped. --check reports all differences from a tree
that has NWOR. --revert removes NWOR's lines and files and nothing else. A second run
changes nothing.

Nothing is changed if a signature, or anything else that NWOR relies on, has changed, or
if a place for NWOR's lines is missing; each problem is named. Run it with a Python that
has torch and a vLLM, such as that vLLM's own.

Exit status: 0 done, 1 TREE is not as expected, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
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
from vllm_nwor.hooks.facts import FACTS, mismatches  # noqa: E402
from vllm_nwor.hooks.ledger import rows_of  # noqa: E402
from vllm_nwor.hooks.source import Tree, files_of  # noqa: E402
from vllm_nwor.plugin import AUDIT_HOOKS, HOOKS  # noqa: E402

MARK = "  # nwor"
LIBRARY = "vllm/v1/nwor/_nwor_C.so"
UPSTREAM = "https://github.com/vllm-project/vllm/blob"
ADD, BUILD = "nwor: add the package vllm/v1/nwor", "nwor: build csrc/nwor"
DECLARE = "nwor: declare its variables"
FOLDERS = {"vllm/v1/nwor": ADD, "csrc/nwor": BUILD, "cmake/nwor": BUILD}
# A file of vLLM's that is hooked -> its module.
MODULES = {f"{name.replace('.', '/')}.py": name for name in (*HOOKS, *AUDIT_HOOKS)}
ENVS, CMAKE, SETUP = "vllm/envs.py", "CMakeLists.txt", "setup.py"

Marked = Counter[tuple[int, str]]  # our lines, with the number of others above each


class Refused(Exception):
    """TREE is not as expected; its argument: a sentence for each thing."""


class Place(NamedTuple):
    """Where our lines go in a file: behind the first match of a pattern, which ends
    where a line begins."""

    name: str
    pattern: str


END = Place("newline at its end", r"(?<=\n)\Z")
# Not at the end: vLLM's own file returns early where there is no GPU.
PROJECT = Place("project()", r"^project\([^)]*\)\n")
BUILT = Place(
    "ext_modules, package_data and setup()",
    r"^ext_modules\b[\s\S]*^package_data\b[\s\S]*^(?=setup\()",
)


class Line(NamedTuple):
    """One for a file of vLLM's, in a commit."""

    path: str
    place: Place
    text: str
    subject: str


def our_lines() -> Iterator[Line]:
    """All that go into vLLM's files."""
    for path, module in MODULES.items():
        for text in (
            "from vllm.v1.nwor.plugin import hook_module",
            "hook_module(__name__)",
        ):
            yield Line(path, END, text + MARK, hooking(module))
    for name in ENV_NAMES:
        text = f'environment_variables["{name}"] = lambda: None{MARK}'
        yield Line(ENVS, END, text, DECLARE)
    text = f"cmake_language(DEFER CALL include cmake/nwor/nwor.cmake){MARK}"
    yield Line(CMAKE, PROJECT, text, BUILD)
    extension = 'CMakeExtension(name="vllm.v1.nwor._nwor_C", optional=True)'
    for text in (
        f"if ext_modules: ext_modules.append({extension})",
        'package_data["vllm"].append("v1/nwor/_nwor_C.so")',
    ):
        yield Line(SETUP, BUILT, text + MARK, BUILD)


def hooking(module: str) -> str:
    return f"nwor: hook {module}"


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
    """A tree, and what it is to hold. Raises Refused if it is none of vLLM's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "vllm" / "__init__.py").is_file():
            raise Refused([f"there is no {root}/vllm/__init__.py"])
        self.builds = (root / CMAKE).is_file()
        self.texts: dict[str, str] = {}  # of vLLM's files, without our lines
        self.marked: dict[str, Marked] = {}
        for path in (*MODULES, ENVS, *((CMAKE, SETUP) if self.builds else ())):
            if (root / path).is_file():
                text = (root / path).read_bytes().decode()
                self.texts[path], self.marked[path] = split_marked(text)
        self.lines = [line for line in our_lines() if line.path in self.texts]
        self.copies = {
            path: subject
            for folder, subject in FOLDERS.items()
            for path in files_in(ROOT, folder)
            if subject == ADD or self.builds
        }

    @cached_property
    def refusals(self) -> list[str]:
        """Why this vLLM cannot carry NWOR."""
        read = files_of(self.root)
        tree = Tree(lambda path: self.texts.get(path) or read(path))
        problems = [
            sentence for module in FACTS for sentence in mismatches(module, tree)
        ]
        for path, text in self.texts.items():
            for number, line in enumerate(text.split("\n"), 1):
                if "nwor" in line.lower():
                    problems.append(
                        f"{path}:{number} has to do with NWOR: {line.strip()}"
                    )
        for path, place, *_ in self.lines:
            if not re.search(place.pattern, self.texts[path], re.MULTILINE):
                problems.append(f"{path} has no {place.name}")
        if not self.builds and not (ROOT / LIBRARY).is_file():
            problems.append(
                f"{LIBRARY} is not there to be copied; `make setup` builds it"
            )
        return list(dict.fromkeys(problems))

    def grafted(self, path: str, subjects: Collection[str] | None = None) -> str:
        """A file of vLLM's with our lines, or with those of some commits."""
        text = self.texts[path]
        wanted = [line for line in self.lines if line.path == path]
        added = [x.text for x in wanted if subjects is None or x.subject in subjects]
        found = re.search(wanted[0].place.pattern, text, re.MULTILINE)
        assert found is not None
        ours = "".join(f"{line}\n" for line in added)
        return text[: found.end()] + ours + text[found.end() :]

    def drift(self) -> list[str]:
        """What is not as it is to be, of a tree without refusals."""
        problems = []
        for path in self.texts:
            marked, wanted = self.marked[path], split_marked(self.grafted(path))[1]
            for verb, lines in ("lacks", wanted - marked), ("has", marked - wanted):
                problems += [f"{path} {verb}, below line {n}: {x}" for n, x in lines]
        there = [*self.copies, *([] if self.builds else [LIBRARY])]
        problems += [f"{p} is missing" for p in there if not (self.root / p).is_file()]
        return problems + self.foreign()

    def foreign(self) -> list[str]:
        """Files in our folders that are not this version's."""
        found = [path for folder in FOLDERS for path in files_in(self.root, folder)]
        if not self.builds and (self.root / LIBRARY).is_file():
            found.append(LIBRARY)
        same = filecmp.cmpfiles(ROOT, self.root, found, shallow=False)[0]
        return [f"{path} is not this version's" for path in found if path not in same]

    def apply(self) -> None:
        """Raises Refused if what was written is not read again as it should."""
        for path in self.texts:
            write_whole(self.root / path, self.grafted(path).encode())
        for path in self.copies:
            write_whole(self.root / path, (ROOT / path).read_bytes())
        if (ROOT / LIBRARY).is_file() and not (self.root / LIBRARY).exists():
            write_whole(self.root / LIBRARY, (ROOT / LIBRARY).read_bytes())
        if problems := Graft(self.root).drift():
            raise Refused(problems)

    def revert(self) -> None:
        """Raises Refused, before anything was changed, if a file is not ours."""
        if problems := self.foreign():
            raise Refused(
                [*problems, "nothing was changed: the version it came with can"]
            )
        for path in filter(self.marked.get, self.texts):
            write_whole(self.root / path, self.texts[path].encode())
        for folder in FOLDERS:
            shutil.rmtree(self.root / folder, ignore_errors=True)

    def commits(self) -> dict[str, str]:
        """Subject -> body, in order."""
        gone = ["no module is hooked any more"]
        found = {ADD: self._body(["what hooks vLLM"], gone, "vllm/plugins/")}
        if self.builds:
            found[BUILD] = self._body(["NWOR's ops"], gone, CMAKE)
        why, until = "vLLM warns of others", "vLLM lets others declare variables"
        found[DECLARE] = self._body([why], [until], ENVS)
        for path, module in MODULES.items():
            rows = rows_of(module)
            whys = [f"{row.qualname}: {row.why}" for row in rows]
            untils = [f"{row.qualname}: {row.delete_when}" for row in rows]
            found[hooking(module)] = self._body(whys, untils, path)
        return found

    def _body(self, why: list[str], until: list[str], path: str) -> str:
        text = files_of(self.root)("vllm/_version.py") or ""
        found = re.search(r"^__version__.*?['\"](\d+\.\d+\.\d+)['\"+]", text, re.M)
        link = f"v{found[1]}/{path}" if found else f"main/{path}"
        reasons = [textwrap.fill(f"Why: {reason}.", 72) for reason in why]
        ends = [f"Drop-when: {condition}" for condition in until]
        return "\n".join([*reasons, "", f"Upstream: {UPSTREAM}/{link}", *ends])

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
    if graft.refusals:
        raise Refused(graft.refusals)
    if args.series:
        return f"needs the {graft.series(args.series)} patches in {args.series}"
    if not (problems := graft.drift()):
        return "has all of it"
    folders = [graft.root / folder for folder in FOLDERS]
    if any(graft.marked.values()) or any(folder.exists() for folder in folders):
        raise Refused(problems)
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
