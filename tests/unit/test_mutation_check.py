# SPDX-License-Identifier: Apache-2.0
"""tools/mutation_check.py: what it calls caught, and what it refuses."""

import json
from functools import partial

import pytest

from tools import mutation_check
from tools.mutation_check import MUTATIONS, Mutation, MutationError, TestRun, try_all

SOURCE = "def double(x):\n    return x + x\n"
TESTS = """
from double import double

def test_of_two():
    assert double(2) == 4

def test_of_three():
    assert double(3) == 6
"""
SQUARE = Mutation("square", "double.py", "x + x", "x * x")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "double.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TESTS)
    return tmp_path


def test_the_copy_is_what_its_tests_import(tmp_path):
    """Not the installed package: a mutation of the copy would never be seen."""
    mutation_check.copy_tree(tmp_path)
    (tmp_path / "test_place.py").write_text(
        "import vllm_nwor.window\n"
        "def test_place():\n"
        f"    assert vllm_nwor.window.__file__.startswith({str(tmp_path)!r})\n"
    )
    assert mutation_check.run_tests(tmp_path, ["test_place.py"]) == TestRun()


def test_what_is_not_there_exactly_once_is_found_before_any_test_runs(tree):
    said = r"a: 'x' is 3 times in double\.py; must"
    with pytest.raises(MutationError, match=said):
        list(try_all([SQUARE, Mutation("a", "double.py", "x", "")], tree, pytest.fail))
    assert (tree / "double.py").read_text() == SOURCE


def test_the_tests_have_to_pass_without_mutations(tree):
    said = r"without any mutation: test_x\.py::test_y"
    with pytest.raises(MutationError, match=said):
        list(try_all([SQUARE], tree, lambda _: TestRun(("test_x.py::test_y",))))


def test_caught_survived_and_error_with_real_tests(tree):
    """A mutation that breaks the collection of the tests is not a catch; one that a
    test finds is, whatever it does to the tests behind that."""
    crash = "(5 if x == 2 else __import__('os').abort())"
    changed = ("2 * x", "x +", crash)
    others = [Mutation(new, *SQUARE[1:3], new) for new in changed]
    run = partial(mutation_check.run_tests, tests=["test_double.py"])
    found = list(try_all([SQUARE, *others], tree, run))
    outcomes = ["caught", "survived", "error", "caught"]
    assert [one["outcome"] for one in found] == outcomes
    assert found[0]["tests"] == ["test_double.py::test_of_three"]
    assert found[3]["tests"] == ["test_double.py::test_of_two"]
    assert "it ended with status" in found[2]["error"]
    assert (tree / "double.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("run", "status", "said"),
    [
        (TestRun(("test_a.py::test_b",)), 0, "caught test_a.py::test_b"),
        (TestRun(), 1, "survived"),
        (TestRun(error="it does not compile"), 1, "error it does not compile"),
    ],
)
def test_exit_status(run, status, said, monkeypatch, capsys, tmp_path):
    """Only a mutation that a named test caught is a success; the file says the same."""
    name, result, runs = MUTATIONS[0].name, tmp_path / "a.json", iter([TestRun(), run])
    command = ["mutation_check.py", "--only", name, "--json", str(result)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(
        mutation_check, "build_and_test", lambda tree, tests: next(runs)
    )
    assert mutation_check.main() == status
    assert f"{name}: {said}" in capsys.readouterr().out
    assert f'"outcome": "{said.split()[0]}"' in result.read_text()


def test_the_selftest_names_the_faults_that_it_missed(monkeypatch, tree):
    said = "ok   clean run: 0 findings\nFAIL a: A byte.\n     expected b\nok   c: D\n"
    ran = []
    monkeypatch.setattr(
        mutation_check, "run_python", lambda *args: ran.append(args) or (1, said)
    )
    assert mutation_check.run_tests(tree, mutation_check.SELFTEST) == TestRun(("a",))
    assert ran == [(tree, "-m", "vllm_nwor.audit", "--selftest")]


def test_the_mutations_fit_this_tree():
    """Code that moved on takes its mutation along."""
    root = mutation_check.ROOT
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 52
    assert all((root / test).exists() for test in mutation_check.TESTS)
    for mutation in MUTATIONS:
        text = (root / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old


def test_what_is_recorded_is_of_these_mutations_by_tests_and_by_the_self_test():
    """docs/audit.md refers to both."""
    path = mutation_check.ROOT / "results/mutation_check.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))
    of_selftest = [mutation for mutation in MUTATIONS if mutation.selftest]
    for run, ran in ((recorded, MUTATIONS), (recorded["selftest"], of_selftest)):
        caught = {one["name"] for one in run["mutations"] if one["outcome"] == "caught"}
        assert caught == {mutation.name for mutation in ran}
