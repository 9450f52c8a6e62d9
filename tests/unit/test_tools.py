# SPDX-License-Identifier: Apache-2.0
"""The tools behind make: the environment and the models, of which nothing is half made.

Set-up is tested by its decisions, with the commands it would run counted; that the
commands work is shown by this suite running at all.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

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
