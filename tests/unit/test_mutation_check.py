# SPDX-License-Identifier: Apache-2.0
"""tools/mutation_check.py: what it calls caught, and what it refuses.

That the copy is what its tests import shows in any run: else nothing would be caught.
"""

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


def test_caught_survived_and_error_with_real_tests(tmp_path):
    """A mutation that breaks the collection of the tests is not a catch; one that a
    test finds is, whatever it does to the tests behind that. Nothing is tried where one
    is not there exactly once, or where the tests fail without any."""
    (tmp_path / "double.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TESTS)
    crash = "(5 if x == 2 else __import__('os').abort())"
    others = [Mutation(new, *SQUARE[1:3], new) for new in ("2 * x", "x +", crash)]
    run = partial(mutation_check.run_tests, tests=["test_double.py"])
    found = list(try_all([SQUARE, *others], tmp_path, run))
    outcomes = ["caught", "survived", "error", "caught"]
    assert [one["outcome"] for one in found] == outcomes
    assert found[0]["tests"] == ["test_double.py::test_of_three"]
    assert found[3]["tests"] == ["test_double.py::test_of_two"]
    assert "it ended with status" in found[2]["error"]

    twice = Mutation("a", "double.py", "x", "")
    with pytest.raises(MutationError, match=r"a: 'x' is 3 times in double\.py; must"):
        list(try_all([SQUARE, twice], tmp_path, pytest.fail))
    with pytest.raises(MutationError, match="without any mutation: test_y"):
        list(try_all([SQUARE], tmp_path, lambda _: TestRun(("test_y",))))
    assert (tmp_path / "double.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("run", "status", "outcome"),
    [
        (TestRun(("test_a.py::test_b",)), 0, "caught"),
        (TestRun(), 1, "survived"),
        (TestRun(error="it does not compile"), 1, "error"),
    ],
)
def test_only_a_catch_is_a_success(run, status, outcome, monkeypatch, tmp_path):
    name, result, runs = MUTATIONS[0].name, tmp_path / "a.json", iter([TestRun(), run])
    command = ["mutation_check.py", "--only", name, "--json", str(result)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(mutation_check, "build_and_test", lambda *_, **__: next(runs))
    assert mutation_check.main() == status
    assert json.loads(result.read_text())["mutations"][0]["outcome"] == outcome


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
