# SPDX-License-Identifier: Apache-2.0
"""The ledger against the installed vLLM: every place that is wrapped still exists with
the parameters relied on.

Does not cover: what those functions do, which the integration tests do, and that each
row is installed, and no other wrapper: tests/e2e/test_off_is_vanilla.py.
"""

from importlib import import_module
from pathlib import Path

import pytest

from vllm_nwor.base.wrap import check
from vllm_nwor.hooks.source import HOOKED, ledger
from vllm_nwor.plugin import AUDIT_HOOKS, HOOKS

ROOT = Path(__file__).resolve().parents[2]
OURS = [row for name in HOOKED if "audit." not in name for row in ledger(name)]
OF_THE_AUDIT = [row for name in HOOKED if "audit." in name for row in ledger(name)]
ROWS = [*OURS, *OF_THE_AUDIT]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_wrapped_function_is_there_with_the_parameters_relied_on_and_says_why(row):
    check(row, import_module(row.module))
    assert row.why
    assert row.delete_when


def test_no_ledger_is_left_out_where_sources_are_compared():
    files = (ROOT / "vllm/v1/nwor").rglob("*.py")
    found = [file for file in files if "\nLEDGER = " in file.read_text()]
    names = {f"{file.parent.name}.{file.stem}" for file in found}
    assert {name.removeprefix("hooks.") for name in names} == set(HOOKED)


def test_the_page_for_vllms_maintainers_has_every_row():
    text = (ROOT / "docs" / "for_vllm.md").read_text()
    methods = [row.qualname.split(".") for row in ROWS]
    names = [owner[-2:] if owner[-1] == "__init__" else owner[-1:] for owner in methods]
    missing = [name for name in names if ".".join(name) + "`" not in text]
    assert missing == []


def test_the_plugin_hooks_the_modules_of_the_ledger_and_no_others():
    """A function has one row: install_all wraps a place once."""
    assert set(HOOKS) == {row.module for row in OURS}
    assert set(AUDIT_HOOKS) == {row.module for row in OF_THE_AUDIT}
    assert len({row.name for row in ROWS}) == len(ROWS)
