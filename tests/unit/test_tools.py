# SPDX-License-Identifier: Apache-2.0
"""The tools of tools/ that have no file of their own here: of set-up and models nothing
is half made, gpu_run.sh loses no failure, and what the mutation check calls caught.

Set-up is tested by its decisions, with the commands it would run counted; that the
commands work is shown by this suite running at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tools import mutation_check
from tools.mutation_check import MUTATIONS, Mutation, MutationError
from tools.setup import make_models, model_recipes, setup_env

ROOT = Path(__file__).resolve().parents[2]

# --- setup_env.py ---


def test_setup_runs_once_follows_its_files_and_starts_over(monkeypatch, tmp_path):
    """.venv, uv in it, the packages and ours; later all but .venv."""
    done: list[list[str | Path]] = []
    for name in ("ROOT", "VENV", "PYTHON", "STAMP", "UNFINISHED"):
        moved = tmp_path / getattr(setup_env, name).relative_to(ROOT)
        monkeypatch.setattr(setup_env, name, moved)
    monkeypatch.setattr(setup_env, "pip_index_url", lambda: "")

    def num_commands(stop: int | None = None) -> int:
        def run(command: list[str | Path], **extra_env: str) -> None:
            if len(done) == stop:
                raise KeyboardInterrupt
            done.append(command)
            if "venv" in command:
                setup_env.PYTHON.parent.mkdir(parents=True)
                setup_env.PYTHON.touch()
            if "-e" in command:
                name = "lib/python3.11/site-packages/vllm_nwor-0.1.0.dist-info"
                (setup_env.VENV / name).mkdir(parents=True, exist_ok=True)

        done.clear()
        monkeypatch.setattr(setup_env, "run", run)
        with contextlib.suppress(KeyboardInterrupt):
            setup_env.setup()
        return len(done)

    assert [num_commands(), num_commands()] == [4, 0]
    monkeypatch.setattr(setup_env, "CPU", setup_env.UV)  # a file with another content
    assert [num_commands(), num_commands()] == [3, 0]
    (dist_info,) = tmp_path.glob(".venv/lib/*/site-packages/*.dist-info")
    dist_info.rmdir()
    (tmp_path / ".venv/half-written").touch()
    assert num_commands(stop=2) == 2
    assert num_commands() == 4
    assert not (tmp_path / ".venv/half-written").exists()


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
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    (tokens,) = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(tokens) == "The capital of France is Paris"


# --- gpu_run.sh ---


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def gpu_run(tmp_path):
    """Runs steps of a checkout of one Python file, with a shell script for Python: exit
    status and what was said."""
    for name in ("vllm/v1/nwor", "tools", "dist"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "vllm/v1/nwor/window.py").write_text("DRAFTS = 4\n")
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


@pytest.mark.parametrize(
    ("num_wheels", "text", "is_asked", "said"),
    [
        (
            1,
            "DRAFTS = 4\n",
            True,
            "--force-reinstall dist/vllm_nwor-0-py3-none-any.whl",
        ),
        (1, "DRAFTS = 5\n", False, "is not of this checkout (make wheel)"),
        (2, "DRAFTS = 4\n", False, "dist/ has 2 wheels; expected one"),
    ],
)
def test_a_gpu_host_gets_the_wheel_of_this_checkout_or_none(
    num_wheels, text, is_asked, said, gpu_run, tmp_path
):
    """pip does nothing here, and fails."""
    for number in range(num_wheels):
        wheel = tmp_path / f"dist/vllm_nwor-{number}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm_nwor/window.py", text)
            archive.writestr("vllm_nwor/_nwor_C.so", b"not looked at")
    asks_pip = '[ "$2" = pip ] && { echo "asked: $*"; exit 1; }'
    python = f'{asks_pip}\nexec {shlex.quote(sys.executable)} "$@"'
    status, told = gpu_run("build", python=python)
    assert (status, "asked" in told) == (1, is_asked)
    assert said in told


STEPS = (
    "build kernels engines faults sync layouts sleep audit poison offload parallel ray "
)
STEPS += "bench-kernels host-profile bench soak"
FAILING = """case "$*" in
*BUDGETED*) echo cell-1 cell-2 ;;
*find_model*) echo /target && echo /head ;;
*) exit 1 ;;
esac"""


def test_no_failure_of_a_step_is_lost_and_none_ends_the_others(gpu_run):
    status, said = gpu_run(*STEPS.split(), python=FAILING)
    assert (status, said.splitlines()[-1]) == (1, f"== failed: {STEPS}")
    status, said = gpu_run(*STEPS.split(), python='echo "$*"; echo b')
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
    planted, checked, python, status, gpu_run, tmp_path
):
    """It does not see the planted overrun, it finds something, or that is not kept."""
    sanitizer = f'[ -n "$NWOR_PLANTED" ] && exit {planted}\nexit {checked}'
    program(tmp_path / "compute-sanitizer", sanitizer)
    assert gpu_run("sanitizer", "memcheck", python=python)[0] == status


@pytest.mark.parametrize("failing", ["pytest", "tests.gpu.results"])
def test_kernels_that_fail_or_whose_verdict_is_not_kept_fail(failing, gpu_run):
    python = f'case "$*" in *{failing}*) exit 1 ;; esac'
    assert gpu_run("kernels", python=python)[0] == 1


# --- serve.sh ---

# In place of .venv's Python: a server that does not act on SIGTERM, as vLLM while it
# starts, and has a process of its own. Other programs do nothing.
STUBBORN = """case "$*" in *api_server*) ;; *) exit 0 ;; esac
trap '' TERM
sleep 60 &
echo "$$ $! mode $VLLM_NWOR_MODE" >>"$PIDS"
wait"""


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(") ")[2][0] != "Z"


def test_a_server_ends_with_make_while_it_starts(tmp_path):
    program(tmp_path / "python", STUBBORN)
    pids = tmp_path / "pids"
    env = os.environ | {"PIDS": str(pids), "GRACE_S": "1"}
    command = ["make", "serve", f"PY={tmp_path / 'python'}"]
    process = subprocess.Popen(command, cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server, child, *mode = pids.read_text().split()
        assert mode == ["mode", "stage"]
        assert is_alive(int(server))
    finally:
        process.terminate()
        process.wait(30)
    deadline = time.monotonic() + 10
    while is_alive(int(server)) or is_alive(int(child)):
        assert time.monotonic() < deadline, "a process of the server is left"
        time.sleep(0.05)


def test_a_server_that_ends_by_itself_leaves_its_status_and_no_process(tmp_path):
    command = ["tools/serve.sh", "sh", "-c", 'sleep 60 & echo $! >"$1"; exit 7', "sh"]
    done = subprocess.run([*command, str(tmp_path / "pid")], cwd=ROOT, timeout=30)
    assert done.returncode == 7
    assert not is_alive(int((tmp_path / "pid").read_text()))


# --- mutation_check.py ---

# A project whose native library is there already: on CUDA it is a kernel's text.
KERNEL, LIBRARY = "csrc/nwor/double.cu", "vllm/v1/nwor/_nwor_C.so"
PROJECT = {
    "tools/native.py": "",
    KERNEL: "2 + 2",
    LIBRARY: "",
    "test_kernel.py": f"""
def test_of_two():
    assert eval(open("{LIBRARY}").read()) == 4
""",
    "double.py": "def double(x):\n    return x + x\n",
    "test_double.py": """
from double import double

def test_of_two():
    assert double(2) == 4

def test_of_three():
    assert double(3) == 6
""",
}
CRASH = "(5 if x == 2 else __import__('os').abort())"


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """The mutation check of that project, with these in place of `x + x`: its exit
    status, and what came of each."""

    def copy_tree(to: Path) -> None:
        for name, text in PROJECT.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_text(text)

    def run(
        *news: str, old: str = "x + x", cuda: str = "", only: str = ""
    ) -> tuple[int, list[tuple[str, ...]]]:
        file = KERNEL if cuda else "double.py"
        found = tuple(Mutation(new, file, old, new) for new in news)
        monkeypatch.setattr(mutation_check, "MUTATIONS", found)
        result = tmp_path / "a.json"
        options = ["--json", str(result), *(["--cuda", cuda] if cuda else [])]
        options += ["--only", only] if only else []
        monkeypatch.setattr("sys.argv", ["mutation_check.py", *options])
        status = mutation_check.main()
        recorded = json.loads(result.read_text())
        outcomes = (recorded["cuda"] if cuda else recorded)["mutations"]
        return status, [(one["outcome"], *one["tests"]) for one in outcomes]

    monkeypatch.setattr(mutation_check, "TESTS", ("test_double.py",))
    monkeypatch.setattr(mutation_check, "CUDA_TESTS", ("test_kernel.py",))
    monkeypatch.setattr(mutation_check, "ROOT", tmp_path)
    monkeypatch.setattr(mutation_check.environment, "describe", lambda *_: {})
    monkeypatch.setattr(mutation_check, "copy_tree", copy_tree)
    return run


def test_only_a_test_that_fails_is_a_catch(checked, monkeypatch):
    """A mutation that breaks the collection of the tests is none; one that a test finds
    is, whatever it does to the tests behind that. Nothing is tried where one is not
    there exactly once, or where the tests fail without any."""
    two, three = (f"test_double.py::test_of_{name}" for name in ("two", "three"))
    assert checked("x * x", CRASH) == (0, [("caught", three), ("caught", two)])
    assert checked("2 * x") == (1, [("survived",)])
    assert checked("x +") == (1, [("error",)])
    with pytest.raises(MutationError, match=r"x \* x: 'x' is 3 times in double\.py"):
        checked("x * x", old="x")
    monkeypatch.setitem(PROJECT, "double.py", "def double(x):\n    return x + x + 1\n")
    with pytest.raises(MutationError, match=f"without any mutation: {two}"):
        checked("x * x")


def test_one_mutation_tried_anew_leaves_the_others_as_they_were(checked, monkeypatch):
    tests = PROJECT["test_double.py"]
    monkeypatch.setitem(PROJECT, "test_double.py", "def test_of_nothing(): pass\n")
    assert checked("x * x", "3 * x") == (1, [("survived",)] * 2)
    monkeypatch.setitem(PROJECT, "test_double.py", tests)
    caught = "caught", "test_double.py::test_of_two"
    found = checked("x * x", "3 * x", only="3 * x")
    assert found == (0, [("survived",), caught])


def test_kernels_are_tried_as_they_were_built(checked, monkeypatch):
    """Nothing is compiled then, and nothing tried that was not built."""
    builds = f"import shutil; shutil.copy('{KERNEL}', '{LIBRARY}')"
    for compiler, said in (("raise OSError", "not compile"), (builds, "0")):
        monkeypatch.setitem(PROJECT, "tools/native.py", compiler)
        with pytest.raises((SystemExit, MutationError), match=said):
            checked("2 * 2", "2 * 3", old="2 + 2", cuda="build")
    monkeypatch.setitem(PROJECT, "tools/native.py", "raise OSError")
    outcomes = [("survived",), ("caught", "test_kernel.py::test_of_two")]
    assert checked("2 * 2", "2 * 3", old="2 + 2", cuda="run") == (1, outcomes)
    with pytest.raises(FileNotFoundError):
        checked("2 - 2", old="2 + 2", cuda="run")


def test_the_mutations_fit_this_tree_and_were_caught():
    """Code that moved on takes its mutation along. docs/audit.md refers to both results
    of results/mutation_check.json."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 52
    assert all((ROOT / test).exists() for test in mutation_check.TESTS)
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
    recorded = json.loads((ROOT / "results/mutation_check.json").read_text())
    of_cpu = [mutation for mutation in MUTATIONS if not mutation.file.endswith(".cu")]
    of_selftest = [mutation for mutation in MUTATIONS if mutation.selftest]
    for run, ran in ((recorded, of_cpu), (recorded["selftest"], of_selftest)):
        caught = {one["name"] for one in run["mutations"] if one["outcome"] == "caught"}
        assert caught == {mutation.name for mutation in ran}
