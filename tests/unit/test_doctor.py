# SPDX-License-Identifier: Apache-2.0
"""python -m vllm_nwor.doctor: what it says where all is in order, and where it is not.

An environment without vLLM, or with a broken one, is in test_packaging.py.
"""

import os
import subprocess
import sys

import pytest
import torch

import vllm_nwor
from tests.unit.test_check_vllm import SITE, files_read, laid_out
from vllm_nwor import doctor, ops
from vllm_nwor.hooks.source import FACTS, files_of

pytestmark = pytest.mark.usefixtures("parsed_once")


@pytest.fixture
def told(monkeypatch, capsys):
    """Runs the doctor with these variables; gives its exit status and its lines."""
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"VLLM_NWOR_{name}", value)
        return doctor.main(), capsys.readouterr().out.splitlines()

    return run


def test_where_all_is_in_order(told, monkeypatch):
    """The mode is the one that a process of vLLM has."""
    child = f"import os\nos.environ['VLLM_NWOR_MODE'] = 'cow'\n{doctor.CHILD}"
    monkeypatch.setattr(doctor, "CHILD", child)
    status, lines = told(MODE="stage", STRICT="1")
    assert status == 0
    assert [line for line in lines if line.startswith("!")] == []
    topics = [line[2:].split()[0] for line in lines[:-1]]
    assert topics == [
        *("vllm-nwor", "vllm", "torch", "wrapt", "python", "library"),
        *("variable", "variable", "plugin", "mode"),
        *["hooks"] * len(FACTS),
    ]
    text = "\n".join(lines)
    assert f"  vllm-nwor  {vllm_nwor.__version__}, " in text
    assert "  vllm       0.32.0, " in text
    assert f"  torch      {torch.__version__}\n" in text
    assert str(ops.LIBRARY) in text
    assert "  variable   VLLM_NWOR_STRICT=1\n" in text
    assert "  variable   VLLM_NWOR_MODE=stage\n" in text
    assert "  mode       cow in front end, engine core and workers" in text
    assert "  hooks      runner_v2: all that is relied on is there\n" in text
    assert lines[-1] == "problems: 0"


def test_what_would_not_work_is_marked_and_changes_the_status(told):
    """vLLM's processes do not start with a bad value, and the doctor does."""
    status, lines = told(MODE="on", STRIKT="1")
    said = "VLLM_NWOR_MODE='on' is not allowed; allowed values: off, stage, cow"
    assert [line for line in lines if line.startswith("!")] == [
        f"! variable   {said}",
        "! variable   VLLM_NWOR_STRIKT is none of NWOR's; VLLM_NWOR_STRICT was meant?",
        "! plugin     a process of vLLM does not start: vllm_nwor.config."
        f"NworConfigError: {said}",
    ]
    assert (status, lines[-1]) == (1, "problems: 3")


def test_a_plugin_that_vllm_leaves_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    command = [sys.executable, "-P", "-c", doctor.CHILD]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    for mode, is_fine in (("cow", False), ("off", True)):
        monkeypatch.setenv("VLLM_NWOR_MODE", mode)
        assert list(doctor.processes()) == [
            (is_fine, "plugin", "not loaded by vLLM: VLLM_PLUGINS='other'"),
            (is_fine, "mode", f"off everywhere ({mode} is set)"),
        ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("VLLM_NWOR_MOD", "; VLLM_NWOR_MODE was meant?"),
        ("VLLM_NVOR_MODE", "; VLLM_NWOR_MODE was meant?"),
        ("VLLM_NWOR_SHADOWBLOCKS", "; VLLM_NWOR_SHADOW_BLOCKS was meant?"),
        ("VLLM_NWOR_", ""),
    ],
)
def test_misspelt_variables(name, hint, monkeypatch):
    """Those of others are nobody's business."""
    for one in ("NWOR_CACHE", "NWOR_CUDA", "VLLM_PLUGINS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(one, "x")
    assert list(doctor.variables()) == []
    monkeypatch.setenv(name, "stage")
    problems = [text for is_fine, _, text in doctor.variables() if not is_fine]
    assert problems == [f"{name} is none of NWOR's{hint}"]


def test_versions_of_a_vllm_nobody_tried(tmp_path):
    def said_of_vllm():
        return [found for found in doctor.versions(tmp_path) if found[1] == "vllm"]

    (tmp_path / "_version.py").write_text("__version__ = version = '9.9.9+cu130'\n")
    ((is_fine, _, text),) = said_of_vllm()
    assert is_fine
    assert text.startswith("9.9.9+cu130 (tried: 0.26.0, ")
    (tmp_path / "_version.py").unlink()
    ((_, _, text),) = said_of_vllm()
    assert text.startswith("unknown ")


# --- library ---


def test_library_without_code_for_the_device(monkeypatch):
    if not ops.has_cuda():
        ((is_fine, _, text),) = doctor.library("cuda")
        assert not is_fine
        assert text.startswith(f"{ops.LIBRARY} has no CUDA code; build it again")


def test_library_tells_the_cuda_it_was_built_with(monkeypatch):
    """As csrc/nwor/cow_cuda.cu does."""
    build = "12090 800,900"
    monkeypatch.setattr(ops.load(), "cuda_build", build, raising=False)
    told = f"for cpu; CUDA 12.9, 800,900, {ops.LIBRARY}"
    assert list(doctor.library("cpu")) == [(True, "library", told)]


def test_cuda_is_not_started(monkeypatch):
    def start(*_):
        raise AssertionError("CUDA was started")

    for name in ("_lazy_init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, start)
    assert all(is_fine for is_fine, *_ in doctor.library(None))
    assert all(is_fine for is_fine, *_ in doctor.hooks(SITE / "vllm"))


# --- hooks ---


@pytest.fixture
def other_vllm(tmp_path):
    """A folder with the files of vLLM that are read."""
    return laid_out(tmp_path, files_read(files_of(SITE))) / "vllm"


def test_hooks_that_do_not_match_are_named(other_vllm):
    path = other_vllm / "v1" / "worker" / "gpu" / "model_runner.py"
    text = path.read_text()
    path.write_text(text.replace("def prepare_attn(", "def prepare_attention("))
    problems = [text for is_fine, _, text in doctor.hooks(other_vllm) if not is_fine]
    name = "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn does not exist"
    assert problems == [f"runner_v2: {name}"]
    path.write_text("def broken(:")
    *_, (is_fine, _, told) = doctor.hooks(other_vllm)
    assert not is_fine
    assert told.startswith("vLLM's source cannot be compared: ")


def test_one_runner_is_enough_and_none_is_not(other_vllm):
    """A vLLM may drop its V1 runner."""
    os.remove(other_vllm.parent / doctor.RUNNERS["runner_v1"])
    lines = list(doctor.hooks(other_vllm))
    assert all(is_fine for is_fine, *_ in lines)
    told = f"runner_v1: there is no {doctor.RUNNERS['runner_v1']}"
    assert (True, "hooks", told) in lines
    os.remove(other_vllm.parent / doctor.RUNNERS["runner_v2"])
    problems = {text for is_fine, _, text in doctor.hooks(other_vllm) if not is_fine}
    assert "runner_v1: vllm.v1.worker.gpu_model_runner does not exist" in problems
    assert "runner_v2: vllm.v1.worker.gpu.model_runner does not exist" in problems
