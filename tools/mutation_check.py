#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in a copy of the tree, one at a time, and shows which test finds each.

    python tools/mutation_check.py                    # all of them
    python tools/mutation_check.py --only int32_overflow
    python tools/mutation_check.py --json results/mutation_check.json

A mutation (mutations.diff has them) replaces one piece of text, which must be there
exactly once. The copy holds what git would see of the checkout; its native library is
built there, too, again after each mutation (only what changed is compiled). The tests
have to pass in the copy before the first mutation. The checkout stays as it is.

Caught means: pytest names a test that failed. A test run that ends otherwise (a crash,
a mutation that does not compile) is an error, not a catch. Exit status: 0 all caught;
1 one survived, or an error.

Not covered: the CUDA kernels, which share window.h and table.h with the CPU code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json  # noqa: E402

# No engine among them: a minute or two in all.
TESTS = (
    "tests/unit/test_draft_manager.py",
    "tests/unit/test_shadow_pages.py",
    "tests/kernels/test_shadow_pages.py",
    "tests/kernels/test_log_restore.py",
    "tests/kernels/test_large_offsets.py",
    "tests/kernels/test_audit.py",
    "tests/simulation",
)
TESTS_SHOWN = 3
TIMEOUT_SECONDS = 900


class Mutation(NamedTuple):
    """One bug: `old`, once in `file` (relative to the tree), becomes `new`."""

    name: str
    file: str
    old: str
    new: str


def read(text: str) -> tuple[Mutation, ...]:
    """The mutations of a text like mutations.diff: `@@ file`, then of each mutation
    `# name`, the lines of `old` behind "-" and those of `new` behind "+"."""
    found: list[Mutation] = []
    file = ""
    for line in text.splitlines():
        mark, rest = line[0], line[1:]
        if mark == "@":
            file = line.removeprefix("@@ ")
        elif mark == "#":
            found.append(Mutation(rest.strip(), file, "", ""))
        else:
            field = {"-": "old", "+": "new"}[mark]
            before = getattr(found[-1], field)
            joined = f"{before}\n{rest}" if before else rest
            found[-1] = found[-1]._replace(**{field: joined})
    return tuple(found)


MUTATIONS = read(Path(__file__).with_name("mutations.diff").read_text("utf-8"))


class MutationError(RuntimeError):
    """A mutation cannot be applied or tried; the text says which and why."""


class TestRun(NamedTuple):
    """How a run of the tests ended. failed: names of the tests that failed. error: why
    it says nothing about the tests (a crash, a build that failed), or ""."""

    __test__ = False  # pytest, this is no test

    failed: tuple[str, ...] = ()
    error: str = ""


@contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The mutation is in `tree` while the block runs.

    Raises:
        MutationError: the file is not there, or `old` not exactly once in it.
    """
    path = tree / mutation.file
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (found := before.count(mutation.old)) != 1:
        raise MutationError(
            f"{mutation.name}: {mutation.old!r} is {found} times in {mutation.file}; "
            "must be there exactly once"
        )
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def try_all(
    mutations: Sequence[Mutation], tree: Path, run_tests: Callable[[Path], TestRun]
) -> Iterator[dict[str, Any]]:
    """Tries the mutations in `tree`, one after another. Gives what became of each:
    "caught" (by `tests`, the first ones to fail), "survived" or "error".

    Raises:
        MutationError: the tests do not pass without any; or as `applied` does, before
            any of them was tried.
    """
    for mutation in mutations:
        with applied(mutation, tree):
            pass
    clean = run_tests(tree)
    if clean.failed or clean.error:
        found = clean.error or ", ".join(clean.failed)
        raise MutationError(f"the tests do not pass without any mutation: {found}")
    for mutation in mutations:
        started = time.perf_counter()
        with applied(mutation, tree):
            run = run_tests(tree)
        yield {
            "name": mutation.name,
            "file": mutation.file,
            "outcome": "error" if run.error else "caught" if run.failed else "survived",
            "tests": list(run.failed),
            "error": run.error,
            "seconds": round(time.perf_counter() - started, 1),
            "old": mutation.old,
            "new": mutation.new,
        }


def copy_tree(to: Path) -> None:
    """Copies the checkout's files as they are, those that git ignores left out. In its
    folder `site` the package has its installed name: on PYTHONPATH it comes before the
    installed package, which in development is the checkout itself."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():  # not: deleted, but still in git's index
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (to / "site").mkdir()
    (to / "site" / "vllm_nwor").symlink_to(to / "vllm" / "v1" / "nwor")


def build_and_test(tree: Path) -> TestRun:
    """Builds the native library in `tree` and runs its TESTS."""
    built = subprocess.run(
        [sys.executable, "tools/native.py"],
        cwd=tree,
        env={**os.environ, "NWOR_CUDA": "OFF"},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        said = (built.stdout + built.stderr)[-600:]
        return TestRun(error=f"it does not compile: {said}")
    return run_pytest(tree, TESTS)


def run_pytest(tree: Path, tests: Sequence[str]) -> TestRun:
    """Runs pytest in `tree` until TESTS_SHOWN tests have failed. Tests that could not
    even start (a fixture that broke, say) are no catch."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *tests, "-rf"]
    command += [f"--maxfail={TESTS_SHOWN}", "-p", "no:cacheprovider"]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(tree / "site"), str(tree)])
    try:
        done = subprocess.run(
            [*command, "-m", "not nightly"],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TestRun(error=f"the tests ran for more than {TIMEOUT_SECONDS} s")
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return TestRun()
    if done.returncode == 1 and failed:
        return TestRun(tuple(failed))
    tail = (done.stdout + done.stderr)[-600:]
    return TestRun(error=f"pytest ended with status {done.returncode}: {tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", choices=names, help="this one alone")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in (None, m.name)]
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nwor-mutation-") as folder:
        copy_tree(Path(folder))
        try:
            for one in try_all(chosen, Path(folder), build_and_test):
                outcomes.append(one)
                what = one["error"] or ", ".join(one["tests"])
                print(f"{one['name']}: {one['outcome']} {what}", flush=True)
        except MutationError as error:
            print(f"mutation check: {error}", file=sys.stderr)
            return 1
    caught = sum(one["outcome"] == "caught" for one in outcomes)
    print(f"{caught} of {len(outcomes)} mutations caught")
    if args.json is not None:
        result = {
            "kind": "mutation_check",
            "schema": 1,
            "command": " ".join(["python tools/mutation_check.py", *sys.argv[1:]]),
            "environment": environment.describe("cpu", ROOT),
            "tests": list(TESTS),
            "mutations": outcomes,
        }
        write_json(args.json, result)
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
