# SPDX-License-Identifier: Apache-2.0
"""The ledger against the installed vLLM: every place that is wrapped still exists with
the parameters relied on.

Does not cover: what those functions do. The integration tests do.
"""

from importlib import import_module
from pathlib import Path

import pytest

from vllm_nwor.hooks import engine_core, runner, runner_v1, runner_v2, stats
from vllm_nwor.hooks._wrap import check
from vllm_nwor.hooks.source import HOOKED, ledger
from vllm_nwor.plugin import HOOKS

ROWS = [*runner_v1.LEDGER, *runner_v2.LEDGER, *stats.LEDGER, *engine_core.LEDGER]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_wrapped_function_is_there_with_the_parameters_relied_on(row):
    check(row, import_module(row.module))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_why_and_until_when(row):
    assert row.why
    assert row.delete_when


def test_no_row_is_left_out_where_sources_are_compared():
    assert {id(row) for name in HOOKED for row in ledger(name)} == set(map(id, ROWS))


def test_the_page_for_vllms_maintainers_has_every_row():
    page = Path(__file__).resolve().parents[2] / "docs" / "for_vllm.md"
    text = page.read_text()
    methods = [row.qualname.split(".") for row in ROWS]
    names = [owner[-2:] if owner[-1] == "__init__" else owner[-1:] for owner in methods]
    missing = [name for name in names if ".".join(name) + "`" not in text]
    assert missing == []


def test_the_plugin_hooks_the_modules_of_the_ledger_and_no_others():
    assert set(HOOKS) == {row.module for row in ROWS}


@pytest.mark.parametrize(
    ("hooks", "module"), [(runner_v1, runner_v1.MODULE), (runner_v2, runner_v2.MODULE)]
)
def test_every_row_of_a_runner_is_installed(hooks, module, monkeypatch):
    installed = []
    monkeypatch.setattr(
        runner,
        "install_all",
        lambda host, wrappers: installed.extend(wrappers),
    )

    hooks.install(import_module(module))

    assert tuple(installed) == hooks.LEDGER
