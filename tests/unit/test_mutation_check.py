# SPDX-License-Identifier: Apache-2.0
"""tools/mutation_check.py: what it calls caught, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools import mutation_check
from tools.mutation_check import (
    MUTATIONS,
    ROOT,
    Mutation,
    MutationError,
    TestRun,
    applied,
    run_pytest,
    try_all,
)

MODULE = "double.py"
SOURCE = "def double(x):\n    return x + x\n"
TESTS = """
from double import double

def test_of_two():
    assert double(2) == 4

def test_of_three():
    assert double(3) == 6
"""
SQUARE = Mutation("square", MODULE, "x + x", "x * x")
HARMLESS = Mutation("harmless", MODULE, "x + x", "2 * x")
BROKEN = Mutation("broken", MODULE, "x + x", "x +")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / MODULE).write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TESTS)
    return tmp_path


def test_mutations_are_read_line_by_line() -> None:
    text = "@@ a.py\n# one\n- x\n-\n@@ b.py\n# two\n-y\n+z \n"
    assert mutation_check.read(text) == (
        Mutation("one", "a.py", " x\n", ""),
        Mutation("two", "b.py", "y", "z "),
    )


def real_pytest(tree: Path) -> TestRun:
    return run_pytest(tree, ["test_double.py"])


def scripted(*runs: TestRun) -> Callable[[Path], TestRun]:
    """A stand-in for the tests that ends in these ways, one after another."""
    left = iter(runs)
    return lambda tree: next(left)


def test_the_copy_is_what_its_tests_import(tmp_path: Path) -> None:
    """Not the installed package: a mutation of the copy would never be seen."""
    mutation_check.copy_tree(tmp_path)
    (tmp_path / "test_place.py").write_text(
        "import vllm_nwor.window\n"
        "def test_place():\n"
        f"    assert vllm_nwor.window.__file__.startswith({str(tmp_path)!r})\n"
    )
    assert run_pytest(tmp_path, ["test_place.py"]) == TestRun()


@pytest.mark.parametrize(
    ("old", "file", "num_found"),
    [("x - x", MODULE, 0), ("x", MODULE, 3), ("x", "other.py", 0)],
)
def test_text_that_is_not_there_exactly_once_is_an_error(
    old: str, file: str, num_found: int, tree: Path
) -> None:
    said = f"a: {old!r} is {num_found} times in {file}; must"
    with (
        pytest.raises(MutationError, match=said),
        applied(Mutation("a", file, old, ""), tree),
    ):
        pass
    assert (tree / MODULE).read_text() == SOURCE


def test_a_wrong_mutation_is_found_before_any_test_runs(tree: Path) -> None:
    wrong = Mutation("wrong", MODULE, "nowhere", "")
    with pytest.raises(MutationError, match="wrong: 'nowhere' is 0 times"):
        list(try_all([SQUARE, wrong], tree, scripted()))


def test_the_tests_have_to_pass_without_mutations(tree: Path) -> None:
    broken = scripted(TestRun(("test_x.py::test_y",)))
    with pytest.raises(
        MutationError, match=r"without any mutation: test_x\.py::test_y"
    ):
        list(try_all([SQUARE], tree, broken))


def test_caught_survived_and_error_with_real_tests(tree: Path) -> None:
    """A mutation that breaks the collection of the tests is not a catch."""
    found = list(try_all([SQUARE, HARMLESS, BROKEN], tree, real_pytest))
    wanted = {"square": "caught", "harmless": "survived", "broken": "error"}
    assert {one["name"]: one["outcome"] for one in found} == wanted
    assert found[0]["tests"] == ["test_double.py::test_of_three"]
    assert "pytest ended with status" in found[2]["error"]
    assert (tree / MODULE).read_text() == SOURCE


@pytest.mark.parametrize(
    ("run", "status", "said"),
    [
        (TestRun(("test_a.py::test_b",)), 0, "caught test_a.py::test_b"),
        (TestRun(), 1, "survived"),
        (TestRun(error="it does not compile"), 1, "error it does not compile"),
    ],
)
def test_exit_status(
    run: TestRun,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Only a mutation that a named test caught is a success; the file says the same."""
    name = MUTATIONS[0].name
    result = tmp_path / "found.json"
    command = ["mutation_check.py", "--only", name, "--json", str(result)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(mutation_check, "build_and_test", scripted(TestRun(), run))
    assert mutation_check.main() == status
    assert f"{name}: {said}" in capsys.readouterr().out
    assert f'"outcome": "{said.split()[0]}"' in result.read_text()


def test_the_mutations_fit_this_tree() -> None:
    """Code that moved on takes its mutation along."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 52
    assert all((ROOT / test).exists() for test in mutation_check.TESTS)
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
