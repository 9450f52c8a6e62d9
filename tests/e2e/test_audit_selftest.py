# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit --selftest`, as an operator runs it."""

import re
import resource
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.environment import run_python
from vllm_nwor.audit.faults import FAULTS, Expected
from vllm_nwor.audit.findings import CLASSES, OF_STATES, Finding, Writer
from vllm_nwor.audit.state_faults import STATE_FAULTS, StateExpected

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SELFTEST = ("-m", "vllm_nwor.audit", "--selftest")


@pytest.mark.parametrize(
    ("options", "faults", "of_faults", "num_steps"),
    [
        ((), FAULTS, set(CLASSES) - set(OF_STATES), 450),
        # No model with rings runs on a CPU.
        (("--states",), STATE_FAULTS, set(OF_STATES) - {"ring_overwritten"}, 150),
    ],
    ids=["slots", "states"],
)
def test_the_selftest_finds_every_planted_fault(options, faults, of_faults, num_steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # vLLM logs a traceback if it cannot write its cache.
    done = run_python(*SELFTEST, *options, VLLM_CACHE_ROOT="/dev/null/cache")

    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    passed = re.findall(r"^ok   (\w+)", done.stdout, re.MULTILINE)
    assert passed == ["clean", *(fault.__name__ for fault in faults)]
    kinds = set(re.findall(r"^     (\w+): ", done.stdout, re.MULTILINE))
    assert kinds == of_faults
    end = r"^(\d+) steps; passed: (\d+) of (\d+) planted faults found$"
    ((steps, *counts),) = re.findall(end, done.stdout, re.MULTILINE)
    assert int(steps) > num_steps
    assert list(map(int, counts)) == [len(faults)] * 2
    assert "ERROR" not in done.stdout  # findings in full, internal errors
    # It says what it did not try.
    assert ("recurrent states: not tried" in done.stdout) == (not options)
    assert "Traceback" not in done.stdout + done.stderr
    # CPU time, so that a busy machine does not fail the test.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    num_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert num_seconds < 120


def test_the_refit_example_shows_what_a_kept_cache_does_and_how_it_is_mended():
    done = run_python("-m", "benchmarks.refit")
    assert done.returncode == 0, done.stderr
    line = r"^update \d: (\d+) of 320 .*, (\d+) of them stale.* error ([\d.]+)$"
    found = re.findall(line, done.stdout, re.MULTILINE)
    assert [numbers[:2] for numbers in found] == [("256", "256")] * 3 + [("0", "0")] * 3
    errors = [float(error) for *_, error in found]
    assert min(errors[:3]) > 1 > 10 * max(errors[3:])
    assert re.search(r"^weight changes that were seen: 6$", done.stdout, re.MULTILINE)


def test_a_selftest_that_cannot_run_says_why_in_one_line(tmp_path):
    """Here transformers imports a torchvision that does not match torch."""
    (tmp_path / "torchvision").mkdir()
    code = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(code)
    (tmp_path / "torchvision-1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 1\n"
    (tmp_path / "torchvision-1.dist-info" / "METADATA").write_text(metadata)
    done = run_python(*SELFTEST, PYTHONPATH=str(tmp_path))
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (1, False)
    first, second = done.stdout.splitlines()
    assert first.startswith(
        "FAIL the self-test ended with RuntimeError: operator torch"
    )
    assert "VLLM_LOGGING_LEVEL=DEBUG" in second


def test_a_finding_must_match_the_planted_fault_in_every_field():
    writer = Writer("one-1", 1, 1)
    finding = Finding("changed", 0, "layer", 1, 0, 5, 0, None, writer, 2, "0x0", "0x1")
    unknown = replace(writer, request=None)

    def matches(expected: Expected, **changes: Any) -> bool:
        return expected.matches(replace(finding, **changes), [5], ["other", "layer"])

    expected = Expected("changed", 1, "one")
    assert matches(expected)
    assert not matches(expected, kind="missing_write")
    assert not matches(expected, slot=6)
    assert not matches(expected, layer="other")
    assert not matches(expected, layer=None)
    assert not matches(expected, writer=replace(writer, request="two-1"))
    assert not matches(expected, writer=unknown)
    nothing = Expected("changed", None, None)
    assert matches(nothing, layer=None, writer=unknown)
    assert not matches(nothing, layer=None)
    assert not matches(nothing, writer=unknown)


def test_a_finding_of_a_state_must_match_in_every_field():
    writer = Writer("one-1", 1, 1)
    finding = Finding(
        *("stale_state", 0, "layer", 2, 7, None, 0, "one-1", writer, 2, "5", "4"),
        state="conv",
        column=1,
    )

    def matches(**changes: Any) -> bool:
        changed = replace(finding, **changes)
        return expected.matches(changed, [7], ["other", "layer"])

    expected = StateExpected("stale_state", ["conv"], 1, 2, "one", "one")
    assert matches()
    assert not matches(kind="changed_state")
    assert not matches(state="temporal")
    assert not matches(block=8)
    assert not matches(layer="other")
    assert not matches(num_layers=1)
    assert not matches(owner="two-1")
    assert not matches(writer=replace(writer, request="two-1"))
    assert not matches(writer=replace(writer, request=None))
