#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in a copy of the tree, one at a time, and reports which test finds each.

    python tools/mutation_check.py                    # all of them
    python tools/mutation_check.py --only int32_overflow
    python tools/mutation_check.py --json results/mutation_check.json [--selftest]

A mutation (mutations.yml) replaces one piece of text, which must occur exactly once.
The copy has the checkout's files that git tracks or would add; its native library is
rebuilt after each mutation. The tests must pass in the copy before the first mutation.

Caught means: pytest names a test that failed. A test run that ends otherwise (a crash,
a mutation that does not compile) is an error, not a catch. Exit status: 0 all caught;
1 one survived, or an error. --selftest: the audit's self-tests must name a fault that
they missed because that check was removed. The file has three parts: what the tests
caught, and in it "selftest" and "cuda".

--cuda: mutations of the CUDA kernels of shadow blocks. `build` makes a library for
each, `run` tests those on a GPU (tools/gpu/README.md). Not covered: all other CUDA
kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json, write_whole  # noqa: E402

# Tests without an engine, but for the last: some minutes in all.
TESTS = (
    "tests/unit/test_draft_manager.py",
    "tests/unit/test_audit.py",
    "tests/unit/test_loads.py",
    "tests/unit/test_conformance.py",
    "tests/unit/test_handover.py",
    "tests/unit/test_incident.py",
    "tests/unit/test_adapters.py",
    "tests/unit/test_weights.py",
    "tests/unit/test_kv_versions.py",
    "tests/kernels",
    "tests/simulation",
    "tests/unit/test_report.py",
    "tests/integration/test_states.py",  # with engines, these three; last
    "tests/integration/test_boundary_states.py",
    "tests/integration/test_stored_states.py",
)
SELFTEST = tuple(f"-m vllm_nwor.audit --selftest{which}" for which in ("", " --states"))
CUDA_TESTS = ("tests/kernels", "-k")
CUDA_TESTS += ("cuda and (seat or stage or number_kept or awaited) and not large",)
TIMEOUT_SECONDS = 900


class Mutation(NamedTuple):
    """One bug: `old`, which occurs once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    selftest: bool = False  # removes a check of the audit


_READ = yaml.safe_load(Path(__file__).with_name("mutations.yml").read_text("utf-8"))
_OF_SELFTEST = _READ.pop("selftest")
MUTATIONS = tuple(
    Mutation(name, file, **change, selftest=name in _OF_SELFTEST)
    for file, changes in _READ.items()
    for name, change in changes.items()
)


class MutationError(RuntimeError):
    """A mutation cannot be applied or tested; the message says which and why."""


class TestRun(NamedTuple):
    """The end of a test run. failed: names of tests. error: a crash or a failed build,
    or ""."""

    __test__ = False  # not a test class for pytest

    failed: tuple[str, ...] = ()
    error: str = ""


@contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """Applies the mutation to `tree` in the block. Raises MutationError if `old` does
    not occur exactly once in the file."""
    path = tree / mutation.file
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (found := before.count(mutation.old)) != 1:
        raise MutationError(
            f"{mutation.name}: {mutation.old!r} occurs {found} times in "
            f"{mutation.file}; must be exactly once"
        )
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def try_all(
    mutations: Sequence[Mutation],
    tree: Path,
    run_tests: Callable[..., TestRun],
    earlier: Mapping[str, Sequence[str]],
) -> Iterator[dict[str, Any]]:
    """Tests the mutations in `tree`, one after another. Yields the outcome of each:
    "caught" (by `tests`, the first to fail), "survived" or "error". earlier: the tests
    that caught a mutation before are the first to run. Raises MutationError if one
    does not apply, or the tests do not pass without any.
    """
    clean = run_tests(tree)
    if found := clean.error or ", ".join(clean.failed):
        raise MutationError(f"the tests do not pass without any mutation: {found}")
    for mutation in mutations:
        started = time.perf_counter()
        with applied(mutation, tree):
            run = run_tests(tree, first=earlier.get(mutation.name, ()))
        yield mutation._asdict() | {
            "outcome": "error" if run.error else "caught" if run.failed else "survived",
            "tests": list(run.failed),
            "error": run.error,
            "seconds": round(time.perf_counter() - started, 1),
        }


def copy_tree(to: Path) -> None:
    """Copies the checkout's files without ignored ones. The copy's folder `site` has
    the package by its installed name: on PYTHONPATH it precedes the installed
    package."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    if not (ROOT / ".git").exists():  # a copy of a checkout
        command = ["find", "-type", "f", "-printf", r"%P\0"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # it may be deleted, but still in git's index
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    (to / "site").mkdir()
    (to / "site" / "vllm_nwor").symlink_to(to / "vllm" / "v1" / "nwor")


def run_python(tree: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Exit status and output of this Python in `tree`; 124: timeout."""
    path = f"{tree / 'site'}:{tree}:{os.environ.get('PYTHONPATH', '')}"
    env |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    command = ["timeout", str(TIMEOUT_SECONDS), sys.executable, *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=tree, env={**os.environ, **env}, **output)
    return done.returncode, done.stdout


def build_and_test(
    tree: Path, tests: Sequence[str], cuda: str | None, first: Sequence[str] = ()
) -> TestRun:
    """Builds the native library in `tree` and runs TESTS or SELFTEST, `first` before
    them. cuda: "build" keeps the library, by a hash of its sources; "run" uses it."""
    library = tree / "vllm/v1/nwor/_nwor_C.so"
    code = b"".join(path.read_bytes() for path in sorted(tree.glob("csrc/nwor/**/*.*")))
    kept = ROOT / "build/cuda-mutations" / f"{hashlib.sha256(code).hexdigest()}.so"
    if cuda != "run":
        env = {"NWOR_CUDA": "ON" if cuda else "OFF"}
        status, said = run_python(tree, "tools/native.py", **env)
        if status:
            return TestRun(error=f"it does not compile: {said[-600:]}")
    if cuda:
        source, to = (library, kept) if cuda == "build" else (kept, library)
        write_whole(to, source.read_bytes())
    if cuda == "build":
        return TestRun()
    if first and tests != SELFTEST and (run := run_tests(tree, first)).failed:
        return run
    return run_tests(tree, tests)


def run_tests(tree: Path, tests: Sequence[str]) -> TestRun:
    """Runs SELFTEST or pytest in `tree` until one fails, since the bug may crash the
    next one. A test whose fixture fails is no catch."""
    options = ("-m", "pytest", "-qx", "--tb=no", "-rf", "-p", "no:cacheprovider")
    for ran in map(str.split, tests) if tests == SELFTEST else [(*options, *tests)]:
        status, said = run_python(tree, *ran)
        failed = re.findall(r"^FAIL(?:ED)? (.+?)(?: - .*|: .*)?$", said, re.MULTILINE)
        if status == 1 and failed:
            return TestRun(tuple(failed))
        if status:
            return TestRun(error=f"it ended with status {status}: {said[-600:]}")
    return TestRun()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [one.name for one in MUTATIONS]
    parser.add_argument("--only", choices=names, metavar="NAME")
    parser.add_argument("--selftest", action="store_true", help="not the tests")
    parser.add_argument("--cuda", choices=("build", "run"), help="of CUDA kernels")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    tests = SELFTEST if args.selftest else CUDA_TESTS if args.cuda else TESTS
    chosen = [one for one in MUTATIONS if args.only in (None, one.name)]
    chosen = [one for one in chosen if one.selftest >= args.selftest]
    chosen = [one for one in chosen if one.file.endswith(".cu") == bool(args.cuda)]
    run = partial(build_and_test, tests=tests, cuda=args.cuda)
    part = "selftest" if args.selftest else "cuda" if args.cuda else None
    known = json.loads(to.read_text()) if (to := args.json) and to.exists() else {}
    before = known.get(part, {}) if part else known
    earlier = {one["name"]: one["tests"] for one in before.get("mutations", ())}
    with tempfile.TemporaryDirectory(prefix="nwor-mutation-") as folder:
        copy_tree(Path(folder))
        device = "cuda" if args.cuda == "run" else "cpu"
        of_the_copy = environment.describe(device, ROOT)  # the checkout may change
        found = try_all(chosen, Path(folder), run, earlier)
        if args.cuda == "build":
            sys.exit("".join(one["error"] for one in found) or 0)
        command = " ".join(["python tools/mutation_check.py", *sys.argv[1:]])
        is_one = args.only is not None and bool(before)  # the others stay as they were
        about = {**of_the_copy, "command": command, "tests": tests}
        result = before if is_one else about
        by_name = {one["name"]: one for one in result.get("mutations", ())}
        for one in found:
            what = one["error"] or ", ".join(one["tests"])
            print(f"{one['name']}: {one['outcome']} {what}", flush=True)
            by_name[one["name"]] = one | (of_the_copy if is_one else {})
            result["mutations"] = list(by_name.values())
            if to is not None:
                write_json(to, known | ({part: result} if part else result))
    caught = sum(by_name[one.name]["outcome"] == "caught" for one in chosen)
    print(f"{caught} of {len(chosen)} mutations caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutationError as error:
        sys.exit(f"mutation check: {error}")
