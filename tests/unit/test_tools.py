# SPDX-License-Identifier: Apache-2.0
"""Tools whose failures would go unnoticed: gpu_run.sh must report each failing step,
`make serve` leave no process, each mutation fit its code, a wrong image be named."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tools import image, mutation_check
from tools.setup import make_models
from vllm_nwor.audit.state_faults import STATE_FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_dequantized_model_predicts_english():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = make_models.model_path("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    (tokens,) = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(tokens) == "The capital of France is Paris"


# --- gpu_run.sh ---


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def gpu_run(tmp_path):
    """Runs steps of gpu_run.sh with a shell script in place of Python; returns exit
    status and output."""
    for name in ("vllm/v1/nwor", "tools"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "gpu_run.sh", tmp_path / "tools")

    def run(*steps: str, python: str) -> tuple[int, str]:
        program(tmp_path / "python", python)
        env = {"PYTHON": str(tmp_path / "python"), "TMPDIR": str(tmp_path)}
        env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        command = [tmp_path / "tools/gpu_run.sh", *steps]
        done = subprocess.run(command, env=env, stderr=subprocess.STDOUT, **options)
        return done.returncode, done.stdout

    return run


STEPS = "build kernels engines faults sync layouts sleep audit poison weights offload "
STEPS += "parallel ray bench-kernels host-profile bench soak"
FAILING = """case "$*" in
*BUDGETED*) echo cell-1 cell-2 ;;
*find_model*) echo /target && echo /head ;;
*) exit 1 ;;
esac"""


def test_each_failing_step_is_reported_and_the_others_still_run(gpu_run):
    status, output = gpu_run(*STEPS.split(), python=FAILING)
    assert (status, output.splitlines()[-1]) == (1, f"== failed: {STEPS}")
    status, output = gpu_run(*STEPS.split(), python='echo "$*"; echo b')
    assert (status, output.splitlines()[-1]) == (0, "== failed: none")
    # All steps together run each test file that needs a GPU.
    names = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert [name for name in names if f" tests/gpu/{name} " not in output] == []
    parts = ("-k test_matrix", "-k test_why or ", "-k test_two_ranks", "-k test_ray")
    assert [part for part in parts if part not in output] == []


@pytest.mark.parametrize(
    ("planted", "checked", "python", "status"),
    [(9, 0, "", 0), (0, 0, "", 1), (9, 1, "", 1), (9, 0, "exit 1", 1)],
)
def test_a_sanitizer_step_that_proves_nothing_fails(
    planted, checked, python, status, gpu_run, tmp_path
):
    """It misses the planted overrun, reports an error, or its result is not saved."""
    sanitizer = f'[ -n "$NWOR_PLANTED" ] && exit {planted}\nexit {checked}'
    program(tmp_path / "compute-sanitizer", sanitizer)
    assert gpu_run("sanitizer", "memcheck", python=python)[0] == status


def test_serve_returns_the_servers_exit_status_and_ends_its_children(tmp_path):
    command = ["tools/serve.sh", "sh", "-c", 'sleep 60 & echo $! >"$1"; exit 7', "sh"]
    done = subprocess.run([*command, str(tmp_path / "pid")], cwd=ROOT, timeout=30)
    assert done.returncode == 7
    deadline = time.monotonic() + 20  # a killed process ends a little later
    state = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while state.exists() and state.read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- mutations.yml ---


def test_each_mutation_fits_the_code_it_mutates():
    mutations = mutation_check.MUTATIONS
    assert len({mutation.name for mutation in mutations}) == len(mutations) >= 52
    assert all((ROOT / test).exists() for test in mutation_check.TESTS)
    for mutation in mutations:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old


def test_each_planted_fault_of_states_is_missed_without_some_check():
    found = json.loads((ROOT / "results/mutation_check.json").read_text())["selftest"]
    of_selftest = {one.name for one in mutation_check.MUTATIONS if one.selftest}
    assert {one["name"] for one in found["mutations"]} == of_selftest
    missed = {name for one in found["mutations"] for name in one["tests"]}
    assert {fault.__name__ for fault in STATE_FAULTS} <= missed


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": "0"},
        {"resolved": ["cow"]},
        {"counters": {"committed_tokens": 0}},
        {"counters": {"fallbacks": 1}},
        {"counters": {"breaches": 1}},
    ],
)
def test_an_image_that_is_not_as_documented_fails(wrong):
    counters = {"committed_tokens": 25.0, "fallbacks": 0.0, "breaches": 0.0}

    def outcome(**changes):
        counts = counters | changes.pop("counters", {})
        named = {f"vllm:nwor_{name}": count for name, count in counts.items()}
        return image.outcome(
            {"user": "2000", "resolved": ["stage"], "counters": named, **changes}
        )

    assert outcome() == (True, "served")
    is_right, said = outcome(**wrong)
    assert not is_right
    assert said != "served"
    assert image.outcome({"user": "2000"}) == (True, "built")
