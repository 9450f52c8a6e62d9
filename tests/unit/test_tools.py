# SPDX-License-Identifier: Apache-2.0
"""The tools of tools/ that have no file of their own here: of set-up and models nothing
is half made, gpu_run.sh loses no failure, and what the mutation check calls caught.

Set-up is tested by its decisions, with the commands it would run counted; that the
commands work is shown by this suite running at all. That the mutation check's copy is
what its tests import shows in any run: else nothing would be caught.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tools import mutation_check
from tools.mutation_check import MUTATIONS, Mutation, MutationError, TestRun, try_all
from tools.setup import make_models, model_recipes, setup_env

ROOT = Path(__file__).resolve().parents[2]

# --- setup_env.py ---


@pytest.fixture
def num_commands(monkeypatch, tmp_path):
    """Runs set-up in a checkout in tmp_path, with the commands replaced: how many. It
    is interrupted at the one numbered `stop`."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    metadata = [tmp_path / name for name in ("pyproject.toml", "setup.py")]
    for name, value in list(vars(setup_env).items()):
        if isinstance(value, Path):
            moved = tmp_path / value.relative_to(ROOT)
            monkeypatch.setattr(setup_env, name, moved)
    for path in metadata:
        path.touch()
    monkeypatch.setattr(setup_env, "METADATA", metadata)
    monkeypatch.setattr(setup_env, "pip_index_url", lambda: "")

    def run_setup(stop: int | None = None) -> int:
        done: list[list[str | Path]] = []

        def run(command: list[str | Path], **extra_env: str) -> None:
            if len(done) == stop:
                raise KeyboardInterrupt
            if "venv" in command:
                setup_env.PYTHON.parent.mkdir(parents=True)
                setup_env.PYTHON.touch()
            if "-e" in command:
                site = setup_env.VENV / "lib" / "python3.11" / "site-packages"
                (site / "vllm_nwor-0.1.0.dist-info").mkdir(parents=True, exist_ok=True)
            done.append(command)

        monkeypatch.setattr(setup_env, "run", run)
        with contextlib.suppress(KeyboardInterrupt):
            setup_env.setup()
        return len(done)

    return run_setup


def test_setup_runs_once_and_follows_its_files(num_commands, tmp_path):
    """.venv, uv in it, the packages and ours; later all but .venv."""
    assert [num_commands(), num_commands()] == [4, 0]
    for name in ("setup.py", "requirements/cpu.txt"):
        (tmp_path / name).write_text("changed")
        assert [num_commands(), num_commands()] == [3, 0]
    (dist_info,) = tmp_path.glob(".venv/lib/*/site-packages/*.dist-info")
    dist_info.rmdir()
    assert num_commands() == 3


@pytest.mark.parametrize("stop", [0, 3])
def test_interrupted_setup_starts_over(num_commands, stop):
    assert num_commands(stop) == stop
    (setup_env.VENV / "half-written").touch()
    assert num_commands() == 4
    assert not (setup_env.VENV / "half-written").exists()


# --- make_models.py ---


def test_a_model_is_made_once_and_again_when_it_changed_and_never_by_halves(
    monkeypatch, tmp_path
):
    """Also if its maker is stopped half-way, or was killed."""
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path))
    models = tmp_path / "models"
    weights = models / "m" / "weights"

    def made(content: str, error: BaseException | None = None) -> int:
        def make(recipe, out, models) -> None:
            (out / "weights").write_text(content[:2])
            if error is not None:
                raise error
            (out / "weights").write_text(content)

        recipe = model_recipes.Recipe("m", "", make, spec={"content": content})
        monkeypatch.setitem(make_models.RECIPES, "m", recipe)
        status = make_models.main(["--only", "m"])
        assert {path.name for path in models.iterdir()} <= {".lock", "m"}
        return status

    (models / ".tmp-m-1").mkdir(parents=True)
    (models / ".tmp-m-1" / "weights").write_text("half")
    assert made("first", KeyboardInterrupt()) == 130
    assert not weights.exists()
    assert made("first") == 0
    before = weights.stat()
    assert made("first") == 0
    assert weights.stat() == before
    assert made("second", model_recipes.RecipeError("no")) == 1
    assert weights.read_text() == "first"
    for cut_short in (False, True):  # that is noticed, too
        if cut_short:
            weights.write_text("sec")
        assert made("second") == 0
        assert weights.read_text() == "second"


@pytest.mark.slow
def test_converted_model_speaks_english():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = make_models.model_path("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_dict": True}
    inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", **options)
    (tokens,) = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    said = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :])
    assert said == "The capital of France is Paris.<|im_end|>"


# --- gpu_run.sh ---


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one Python file, and the script."""
    folder = tmp_path / "checkout"
    for name in ("vllm/v1/nwor", "tools", "dist"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm/v1/nwor/window.py").write_text("DRAFTS = 4\n")
    shutil.copy(ROOT / "tools" / "gpu_run.sh", folder / "tools")
    return folder


def gpu_run(checkout: Path, *steps: str, python: str) -> tuple[int, str]:
    """Runs steps with a shell script for Python: exit status and what was said."""
    program(checkout / "python", f"#!/bin/sh\n{python}\n")
    env = {"PYTHON": str(checkout / "python"), "TMPDIR": str(checkout)}
    env["PATH"] = f"{checkout}:{os.environ['PATH']}"
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    command = [checkout / "tools/gpu_run.sh", *steps]
    done = subprocess.run(command, env=env, stderr=subprocess.STDOUT, **options)
    return done.returncode, done.stdout


def test_a_gpu_host_gets_the_wheel_of_this_checkout_or_none(checkout):
    """pip does nothing here, and fails."""
    asks_pip = '[ "$2" = pip ] && { echo "asked: $*"; exit 1; }'
    python = f'{asks_pip}\nexec {shlex.quote(sys.executable)} "$@"'
    source = checkout / "vllm/v1/nwor/window.py"
    for number in (1, 2):
        wheel = checkout / f"dist/vllm_nwor-{number}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(source, "vllm_nwor/window.py")
            archive.writestr("vllm_nwor/_nwor_C.so", b"not looked at")
    status, said = gpu_run(checkout, "build", python=python)
    assert (status, "asked" in said) == (1, False)
    assert "dist/ has 2 wheels; expected one" in said
    wheel.unlink()
    status, said = gpu_run(checkout, "build", python=python)
    assert status == 1
    assert "--force-reinstall dist/vllm_nwor-1-py3-none-any.whl" in said
    source.write_text("DRAFTS = 5\n")
    status, said = gpu_run(checkout, "build", python=python)
    assert (status, "asked" in said) == (1, False)
    assert "window.py differ" in said
    assert "is not of this checkout (make wheel)" in said


STEPS = "build kernels engines sync layouts sleep audit poison offload parallel ray "
STEPS += "bench-kernels host-profile bench soak"
FAILING = """case "$*" in
*BUDGETED*) echo cell-1 cell-2 ;;
*find_model*) echo /target && echo /head ;;
*) exit 1 ;;
esac"""


def test_no_failure_of_a_step_is_lost_and_none_ends_the_others(checkout):
    status, said = gpu_run(checkout, *STEPS.split(), python=FAILING)
    assert (status, said.splitlines()[-1]) == (1, f"== failed: {STEPS}")
    status, said = gpu_run(checkout, *STEPS.split(), python='echo "$*"; echo b')
    assert (status, said.splitlines()[-1]) == (0, "== failed: none")
    # Together they run each test that needs a GPU.
    names = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert [name for name in names if f" tests/gpu/{name} " not in said] == []
    parts = ("-k test_matrix", "-k test_why or ", "-k test_two_ranks", "-k test_ray")
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("planted", "checked", "python", "status"),
    [(9, 0, "", 0), (0, 0, "", 1), (9, 1, "", 1), (9, 0, "exit 1", 1)],
)
def test_a_sanitizer_step_that_proves_nothing_fails(
    planted, checked, python, status, checkout
):
    """It does not see the planted overrun, it finds something, or that is not kept."""
    sanitizer = f'#!/bin/sh\n[ -n "$NWOR_PLANTED" ] && exit {planted}\nexit {checked}\n'
    program(checkout / "compute-sanitizer", sanitizer)
    assert gpu_run(checkout, "sanitizer", "memcheck", python=python)[0] == status


# --- mutation_check.py ---

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
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 52
    assert all((ROOT / test).exists() for test in mutation_check.TESTS)
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old


def test_what_is_recorded_is_of_these_mutations_by_tests_and_by_the_self_test():
    """docs/audit.md refers to both."""
    path = ROOT / "results/mutation_check.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))
    of_selftest = [mutation for mutation in MUTATIONS if mutation.selftest]
    for run, ran in ((recorded, MUTATIONS), (recorded["selftest"], of_selftest)):
        caught = {one["name"] for one in run["mutations"] if one["outcome"] == "caught"}
        assert caught == {mutation.name for mutation in ran}
