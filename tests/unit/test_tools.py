# SPDX-License-Identifier: Apache-2.0
"""The tools behind make: what the system lacks, the environment, the models.

Set-up is tested by its decisions, with the commands it would run recorded; that the
commands work is shown by this suite running at all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.setup import make_models, model_recipes, setup_env

ROOT = Path(__file__).resolve().parents[2]
CHECK_SYSTEM = ROOT / "tools" / "setup" / "check_system.sh"

# --- check_system.sh ---

# What makes a Python lack something, run before check_system's own script.
LACKING = {
    "libnuma1": "import ctypes; ctypes.CDLL = lambda name: open('/nonexistent')",
    "python3-dev": "import sysconfig; sysconfig.get_path = lambda name: '/nonexistent'",
    "python3-venv": "import importlib.util as u; u.find_spec = lambda name: None",
    "python3": "sys.version_info = (3, 10, 13)",
}


@pytest.mark.parametrize("package", ["make", "g++", *LACKING, "no-python", ""])
def test_missing_thing_is_one_line_with_its_command(tmp_path, package):
    """With a PATH that holds only what is put there."""
    for name in {"id", "cut", "make", "g++"} - {package}:
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    if package != "no-python":
        lacks = LACKING.get(package, "pass")
        script = f"import sys; {lacks}\nexec(sys.stdin.read())"
        python = tmp_path / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}"\n')
        python.chmod(0o755)
    env = {"PATH": str(tmp_path), "LD_LIBRARY_PATH": ""}
    done = subprocess.run(
        ["/bin/sh", str(CHECK_SYSTEM)], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (bool(package), "")
    if package:
        missing, hint = done.stderr.splitlines()
        wanted = package.replace("no-python", "python3")
        assert missing.startswith("missing: ")
        assert missing.endswith(f"apt-get install -y {wanted}")
        assert "make deps" in hint


# --- setup_env.py ---


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout's files in tmp_path, which setup_env takes for its own."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for name, value in list(vars(setup_env).items()):
        if isinstance(value, Path):
            moved = tmp_path / value.relative_to(ROOT)
            monkeypatch.setattr(setup_env, name, moved)
    metadata = (tmp_path / "pyproject.toml", tmp_path / "setup.py")
    monkeypatch.setattr(setup_env, "METADATA", metadata)
    return tmp_path


# What a command is about, by a word of it.
STEPS = {"venv": "venv", "--override": "packages", "-e": "editable", "-r": "uv"}


@pytest.fixture
def record(monkeypatch, checkout):
    """Runs set-up with the commands replaced; fails at the one with `fail_at`."""
    monkeypatch.setattr(setup_env, "pip_index_url", lambda: "")

    def run_setup(fail_at: str = "") -> list[str]:
        done: list[str] = []

        def run(command: list[str | Path], **extra_env: str) -> None:
            step = next(STEPS[word] for word in STEPS if word in command)
            if step == fail_at:
                raise KeyboardInterrupt
            if step == "venv":
                setup_env.PYTHON.parent.mkdir(parents=True)
                setup_env.PYTHON.touch()
            if step == "editable":
                site = setup_env.VENV / "lib" / "python3.11" / "site-packages"
                (site / "vllm_nwor-0.1.0.dist-info").mkdir(parents=True, exist_ok=True)
            done.append(step)

        monkeypatch.setattr(setup_env, "run", run)
        try:
            setup_env.setup()
        except KeyboardInterrupt:
            done.append("interrupted")
        return done

    return run_setup


def test_setup_runs_once_and_follows_its_files(record, checkout):
    assert record() == ["venv", "uv", "packages", "editable"]
    assert record() == []
    for name in ("setup.py", "requirements/cpu.txt"):
        (checkout / name).write_text("changed")
        assert record() == ["uv", "packages", "editable"]
    (dist_info,) = checkout.glob(".venv/lib/*/site-packages/*.dist-info")
    dist_info.rmdir()
    assert "editable" in record()


@pytest.mark.parametrize("number", [0, 3])
def test_interrupted_setup_starts_over(record, number):
    steps = ["venv", "uv", "packages", "editable"]
    assert record(steps[number]) == [*steps[:number], "interrupted"]
    (setup_env.VENV / "half-written").touch()
    assert record() == steps
    assert not (setup_env.VENV / "half-written").exists()


# --- make_models.py ---


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder; its models' folder is returned."""
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def tiny_recipe(monkeypatch):
    """Registers a model "m" of one file; `error` is raised half-way through."""

    def register(content: str, error: BaseException | None = None) -> None:
        def make(recipe, out, models) -> None:
            (out / "weights").write_text(content[:2])
            if error is not None:
                raise error
            (out / "weights").write_text(content)

        recipe = model_recipes.Recipe("m", "", make, spec={"content": content})
        monkeypatch.setitem(make_models.RECIPES, "m", recipe)

    return register


def test_model_is_made_once_and_again_when_its_recipe_changes(cache, tiny_recipe):
    weights = cache / "m" / "weights"
    tiny_recipe("first")
    # What a killed build left is cleared away.
    (cache / ".tmp-m-1").mkdir(parents=True)
    (cache / ".tmp-m-1" / "weights").write_text("half")
    assert make_models.main(["--only", "m"]) == 0
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "m"]
    made = weights.stat()
    assert make_models.main(["--only", "m"]) == 0
    assert weights.stat() == made
    tiny_recipe("second")
    for cut_short in (False, True):  # that is noticed, too
        if cut_short:
            weights.write_text("sec")
        assert make_models.main(["--only", "m"]) == 0
        assert weights.read_text() == "second"


def test_interrupted_model_leaves_nothing_half_written(cache, tiny_recipe):
    tiny_recipe("first", KeyboardInterrupt())
    assert make_models.main(["--only", "m"]) == 130
    assert sorted(path.name for path in cache.iterdir()) == [".lock"]
    tiny_recipe("first")
    make_models.main(["--only", "m"])
    tiny_recipe("second", model_recipes.RecipeError("no"))
    assert make_models.main(["--only", "m"]) == 1
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "m"]
    assert (cache / "m" / "weights").read_text() == "first"


def test_draft_keeps_the_other_layers_in_order():
    from safetensors.torch import load_file

    target, draft = map(make_models.model_path, ("smollm2-135m", "smollm2-draft-26"))
    config = json.loads((draft / "config.json").read_text())
    assert config["num_hidden_layers"] == 26
    whole, part = (load_file(path / "model.safetensors") for path in (target, draft))
    # Layers 5, 7, 12 and 27 are left out.
    for new, old in ((4, 4), (5, 6), (6, 8), (10, 13), (23, 26), (25, 29)):
        for name in ("mlp.up_proj.weight", "self_attn.q_proj.weight"):
            ours = part[f"model.layers.{new}.{name}"]
            assert ours.equal(whole[f"model.layers.{old}.{name}"])


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
