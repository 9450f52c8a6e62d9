#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in a copy of the tree, one at a time, and shows which test finds each.

    python tools/mutation_check.py                    # all of them
    python tools/mutation_check.py --only int32_overflow
    python tools/mutation_check.py --json results/mutation_check.json

A mutation replaces one piece of text, which must be there exactly once. The copy holds
what git would see of the checkout; its native library is built there, too, again after
each mutation (only what changed is compiled). The tests have to pass in the copy before
the first mutation. The checkout itself is never changed.

Caught means: pytest names a test that failed. A test run that ends otherwise (a crash,
a mutation that does not compile) is an error, not a catch. Exit status: 0 all caught;
1 one survived, or an error.

Not covered: the CUDA kernels, which share window.h and table.h with the CPU code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
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


COW = "csrc/nwor/cow_cpu.cpp"
COPY = "csrc/nwor/copy_cpu.h"
TABLE = "csrc/nwor/table.h"
WINDOWS = "csrc/nwor/windows_cpu.h"
MANAGER = "vllm/v1/nwor/draft_manager.py"
LAUNCHES = "vllm/v1/nwor/launches.py"
SHADOW = "csrc/nwor/shadow_cpu.cpp"
PAGES = "vllm/v1/nwor/shadow_pages.py"
AUDIT = "csrc/nwor/audit_rules.h"
AUDIT_CPU = "csrc/nwor/audit_cpu.cpp"
AUDIT_STATE = "vllm/v1/nwor/audit/state.py"
PAGES_H = "csrc/nwor/shadow.h"
MUTATIONS = (
    Mutation(
        "wrong_stride",
        TABLE,
        "slot % block_size * slot_stride",
        "slot % block_size * head_stride",
    ),
    Mutation(
        "dropped_head",
        COPY,
        "for (int64_t head = 0; head < layer.num_heads; ++head)",
        "for (int64_t head = layer.num_heads > 1; head < layer.num_heads; ++head)",
    ),
    Mutation(
        "off_by_one_slot",
        WINDOWS,
        "visit(draft, place, batch.slot_mapping[token]);",
        "visit(draft, place, batch.slot_mapping[token > 0 ? token - 1 : 0]);",
    ),
    Mutation(
        "accepted_restored",
        WINDOWS,
        "return window[1] < num_accepted(",
        "return window[1] + 1 < num_accepted(",
    ),
    Mutation(
        "rejected_kept",
        WINDOWS,
        "return window[1] < num_accepted(",
        "return window[1] <= num_accepted(",
    ),
    Mutation(
        "stale_log",
        MANAGER,
        "        self.state = State.IDLE\n        if self.shadow is not None:",
        "        if self.shadow is not None:",
    ),
    Mutation(
        "wrong_layer_order",
        COW,
        "const LayerRow& layer = table.rows[item % table.num_layers];",
        "LayerRow layer = table.rows[item % table.num_layers];\n"
        "      if (kDirection == Direction::kToCache) {\n"
        "        layer.log_offset = table.rows[table.num_layers - 1 -\n"
        "                                      item % table.num_layers].log_offset;\n"
        "      }",
    ),
    Mutation(
        "slot_minus_one_as_0",
        COW,
        "return is_rejected(draft) ? log.slots[draft] : kPadSlot;",
        "return is_rejected(draft) ? std::max<int64_t>(log.slots[draft], 0)"
        " : kPadSlot;",
    ),
    Mutation(
        "int32_overflow",
        TABLE,
        "return slot / block_size * block_stride;",
        "return static_cast<int32_t>(slot / block_size * block_stride);",
    ),
    Mutation(
        "skipped_group",
        LAUNCHES,
        "for index, launch in enumerate(self._launches):",
        "for index, launch in enumerate(self._launches[:1]):",
    ),
    Mutation(
        "no_prefix_copy",
        PAGES_H,
        "return has_all ? 0 : window.num_before(args.entry_tokens);",
        "return has_all || true ? 0 : window.num_before(args.entry_tokens);",
    ),
    Mutation(
        "any_step_before_counts",
        PAGES_H,
        "saved[kSavedStep] == args.step - 1 &&",
        "saved[kSavedStep] != args.step &&",
    ),
    Mutation(
        "another_entry_counts",
        PAGES_H,
        "saved[kSavedValidEntry] == entry;",
        "saved[kSavedValidEntry] >= 0;",
    ),
    Mutation(
        "rows_beyond_valid_count",
        PAGES_H,
        "saved[kSavedValid] == window.first_position &&",
        "saved[kSavedValid] <= window.first_position &&",
    ),
    Mutation(
        "one_row_more_is_valid",
        PAGES_H,
        "saved[kSavedValid] = static_cast<int32_t>(valid);",
        "saved[kSavedValid] = static_cast<int32_t>(valid + 1);",
    ),
    Mutation(
        "entry_without_shadow_is_valid",
        PAGES_H,
        "                                ? 0\n",
        "                                ? saved[kSavedEntries]\n",
    ),
    Mutation(
        "failed_step_stays_valid",
        SHADOW,
        "  saved[kSavedValid] = -1;\n  saved[kSavedValidEntry] = 0;\n",
        "",
    ),
    Mutation(
        "steps_are_not_counted",
        PAGES,
        "self.step += 1 if keeps else 2",
        "self.step += 0 if keeps else 2",
    ),
    Mutation(
        "new_drafts_count",
        PAGES,
        "self.step += 1 if keeps else 2",
        "self.step += 1",
    ),
    Mutation(
        "no_undo",
        SHADOW,
        "args.undoes && r < args.num_reqs",
        "args.undoes && r < 0",
    ),
    Mutation(
        "undo_without_comparing",
        SHADOW,
        "if (place == shadow) {",
        "if (place == shadow || place != real) {",
    ),
    Mutation(
        "target_left_out",
        SHADOW,
        "const int64_t first = window.first_staged(args.entry_tokens);",
        "const int64_t first = window.first_draft();",
    ),
    Mutation(
        "rows_before_target_left_out",
        SHADOW,
        "const int64_t first = window.first_staged(args.entry_tokens);",
        "const int64_t first = std::max(window.first_staged(args.entry_tokens),\n"
        "                                   window.first_draft() - 1);",
    ),
    Mutation(
        "rejected_committed",
        SHADOW,
        "const int64_t last = window.first_draft() + accepted;",
        "const int64_t last = std::min<int64_t>(window.first_draft() + accepted + 1,\n"
        "                                           window.seq_len);",
    ),
    Mutation(
        "accepted_not_committed",
        SHADOW,
        "const int64_t last = window.first_draft() + accepted;",
        "const int64_t last = window.first_draft() + accepted - (accepted > 0);",
    ),
    Mutation(
        "no_seat_check",
        MANAGER,
        "if num_reqs > shadow.num_seats:",
        "if num_reqs > shadow.num_seats + num_reqs:",
    ),
    Mutation(
        "group_not_put_back",
        PAGES,
        "for group in self.groups[: self._num_patched]:",
        "for group in self.groups[: self._num_patched - 1]:",
    ),
    # The audit: each check left out, then what keeps it from false alarms.
    Mutation(
        "audit_no_owner",
        AUDIT,
        "(group.owners[slot / group.block_size] == seat.generation ||",
        "(group.owners[slot / group.block_size] >= 0 ||",
    ),
    Mutation(
        "audit_no_table",
        AUDIT,
        "return slot == batch.slot(r, position) && slot < group.num_slots &&",
        "return slot < group.num_slots &&",
    ),
    Mutation(
        "audit_no_row_identity",
        AUDIT,
        "if (!holds(group.records[slot], row.hash)) {",
        "if (false) {",
    ),
    Mutation(
        "audit_no_block_ends",
        AUDIT,
        "if (!holds(group.records[slot], hash)) {",
        "if (false) {",
    ),
    Mutation(
        "audit_no_slots_of_blocks",
        AUDIT_CPU,
        "if (!holds(group.records[slot], hash)) {",
        "if (false) {",
    ),
    Mutation(
        "audit_no_hits",
        AUDIT,
        "} else if (!holds(record, hash) && !is_reported) {",
        "} else if (false) {",
    ),
    Mutation(
        "audit_rejected_counts",
        AUDIT,
        "row.state = is_kept ? kSlotCommitted : kSlotRejected;",
        "row.state = kSlotCommitted;",
    ),
    Mutation(
        "audit_no_bytes",
        AUDIT,
        "} else if (content != kContentNone && !is_same) {",
        "} else if (false) {",
    ),
    Mutation(
        "audit_first_layer_only",
        AUDIT,
        "const bool is_same = compared.num_same == compared.num_layers;",
        "const bool is_same = compared.first_same == 0;",
    ),
    Mutation(
        "audit_not_undone",
        AUDIT,
        "if (args.is_undone && compared.num_same < compared.num_layers) {",
        "if (false) {",
    ),
    Mutation(
        "audit_no_missing_write",
        AUDIT,
        "bool is_sure = compared.num_same > 1;",
        "bool is_sure = false;",
    ),
    Mutation(
        "audit_not_handed_on",
        AUDIT,
        "if (records[o].state == kSlotCommitted && is_next) {",
        "if (is_next) {",
    ),
    Mutation(
        "audit_another_text_handed_on",
        AUDIT,
        "if (records[o].state == kSlotCommitted && is_next) {",
        "if (records[o].state == kSlotCommitted) {",
    ),
    Mutation(
        "audit_never_loaded_unseen",
        AUDIT,
        "if (is_same && compared.num_layers > 1) {",
        "if (false) {",
    ),
    Mutation(
        "audit_one_checksum_is_sure",
        AUDIT,
        "bool is_sure = compared.num_same > 1;",
        "bool is_sure = true;",
    ),
    Mutation(
        "audit_same_token_is_other",
        AUDIT,
        "if (seat.opaque || row.old.token == row.token || compared.num_same == 0) {",
        "if (seat.opaque || compared.num_same == 0) {",
    ),
    Mutation(
        "audit_undone_forgotten",
        AUDIT,
        "record = row.old;",
        "record.state = kSlotRejected;",
    ),
    Mutation(
        "audit_no_going_back",
        AUDIT,
        "const bool is_back = start < seat.length &&",
        "const bool is_back = false && start < seat.length &&",
    ),
    Mutation(
        "audit_no_window",
        AUDIT,
        "return window > 0 ? ",
        "return window < 0 ? ",
    ),
    Mutation(
        "audit_loads_reported",
        AUDIT,
        "record.state == kSlotLoaded ||\n        seat.loads == kUntoldLoads) {",
        "record.state == kSlotLoaded) {",
    ),
    Mutation(
        "audit_cursor_stands",
        AUDIT,
        "args.header->cursor = args.header->next_cursor;",
        "args.header->cursor = 0;",
    ),
    Mutation(
        "audit_other_group_kept",
        AUDIT_STATE,
        "of_group.update(dict.fromkeys(own, generation if is_its else NOBODY))",
        "of_group.update(dict.fromkeys(own, generation) if is_its else {})",
    ),
    Mutation(
        "audit_hits_are_own",
        AUDIT_STATE,
        "first = num_computed // self._block_sizes[group_id]",
        "first = 0",
    ),
    Mutation(
        "audit_copies_unknown",
        AUDIT_STATE,
        "table[to * size : (to + 1) * size] = rows",
        "pass",
    ),
    Mutation(
        "audit_lost_not_counted",
        AUDIT_STATE,
        "self._found.num_lost += max(count - MAX_KEPT, 0)",
        "pass",
    ),
)


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
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *tests]
        command += [f"--maxfail={TESTS_SHOWN}", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1"]  # the one that has file names
        command += ["-p", "no:cacheprovider", "-m", "not nightly"]
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(tree / "site"), str(tree)])
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TestRun(error=f"the tests ran for more than {TIMEOUT_SECONDS} s")
        cases = ElementTree.parse(report).iter("testcase") if report.is_file() else ()
        failed = tuple(
            f"{case.attrib['file']}::{case.attrib['name']}"
            for case in cases
            if case.find("failure") is not None
        )
    if done.returncode == 0:
        return TestRun()
    if done.returncode == 1 and failed:
        return TestRun(failed)
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
