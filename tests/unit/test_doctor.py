# SPDX-License-Identifier: Apache-2.0
"""python -m vllm_nwor.doctor: its output where NWOR works, and for each problem.

Without vLLM, or with a broken one: test_packaging.py.
"""

import ctypes
import time
from types import SimpleNamespace

import pytest
import torch

import vllm_nwor
from tests.helpers.environment import run_python
from tests.unit.test_check_vllm import SITE, files_read, laid_out, run
from vllm_nwor import doctor, ops
from vllm_nwor.hooks.facts import FACTS
from vllm_nwor.hooks.source import files_of

pytestmark = pytest.mark.usefixtures("parsed_once")


def problems(lines):
    """The texts of the lines that report a problem."""
    return [text for is_fine, _, text in lines if not is_fine]


def doctor_run(monkeypatch, **variables):
    """The doctor's exit status and output lines, with these variables set."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return run(doctor.main)


def test_no_problem(monkeypatch):
    """The mode shown is that of a vLLM process. CUDA is not initialized."""

    def start(*_):
        raise AssertionError("CUDA was initialized")

    for name in ("_lazy_init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, start)
    child = f"import os\nos.environ['VLLM_NWOR_MODE'] = 'cow'\n{doctor.CHILD}"
    monkeypatch.setattr(doctor, "CHILD", child)
    variables = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_STRICT": "1", "NWOR_CACHE": "x"}
    status, lines = doctor_run(monkeypatch, **variables)
    assert (status, lines.pop()) == (0, "problems: 0")
    assert [line for line in lines if line.startswith("!")] == []
    wanted = {
        "vllm-nwor": f"{vllm_nwor.__version__}, ",
        "vllm": "0.32.0, ",
        "torch": torch.__version__,
        "wrapt": "",
        "python": "",
        "library": f"loads for cpu; has {'code of' if ops.has_cuda() else 'no'} CUDA",
        "variable": "VLLM_NWOR_STRICT=1",
        "plugin": "vLLM loads it in each of its processes",
        "mode": "cow, in all processes of a vLLM that is started from here",
        "hooks": f"{', '.join(FACTS)}: vLLM has every function and attribute that they",
    }
    last = {line[2:].split()[0]: line[13:] for line in lines}
    assert list(last) == list(wanted)
    assert all(last[topic].startswith(text) for topic, text in wanted.items())
    assert sum(line.startswith("  hooks ") for line in lines) == 1


def test_each_problem_is_marked_once_and_changes_the_exit_status(monkeypatch):
    """vLLM does not start with a bad value; the doctor does, and starts no process."""

    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(doctor.subprocess, "run", start)
    misspelt = {"VLLM_NVOR_MODE": "cow", "VLLM_NWOR_": "", "VLLM_NWOR_STRIKT": "1"}
    values = {"MODE": "STAGE", "SHADOW_BLOCKS": "-3", "AUDIT": "yes", "DEBUG_SYNC": "1"}
    values["AUDIT_FILE"] = "/missing/a.json"
    bad_values = {f"VLLM_NWOR_{name}": value for name, value in values.items()}
    status, lines = doctor_run(monkeypatch, **bad_values, **misspelt)
    said = "is not allowed; allowed values:"
    blocks = "empty (5 % of the blocks) or a whole number of KV blocks, at least 0"
    why = "is not allowed (there is no folder '/missing'); allowed values: empty or a "
    why += "path in a folder that exists and that this process can write to"
    assert [line for line in lines if line.startswith("!")] == [
        f"! variable   VLLM_NWOR_MODE='STAGE' {said} off, stage, cow",
        f"! variable   VLLM_NWOR_SHADOW_BLOCKS='-3' {said} {blocks}",
        f"! variable   VLLM_NWOR_AUDIT='yes' {said} off, log, raise",
        f"! variable   VLLM_NWOR_AUDIT_FILE='/missing/a.json' {why}",
        "! variable   VLLM_NVOR_MODE: unknown variable; did you mean VLLM_NWOR_MODE?",
        "! variable   VLLM_NWOR_: unknown variable",
        "! variable   VLLM_NWOR_STRIKT: unknown variable; did you mean "
        "VLLM_NWOR_STRICT?",
    ]
    shown = [line for line in lines if line.startswith("  variable")]
    assert shown == ["  variable   VLLM_NWOR_DEBUG_SYNC=1"]
    not_tried = "not tried: with the values above vLLM does not start"
    assert f"  plugin     {not_tried}" in lines
    assert (status, lines[-1]) == (1, "problems: 7")
    assert 'Lines that begin with "!"' in lines[-2]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("13000 80 86 89 90 100 103 110 120", []),
        ("0", []),  # neither driver nor GPU
        ("13000 75 80", ["the GPU has compute capability 7.5, and "]),
        ("12090 90", ["the driver is one for CUDA 12.9, and the library has "]),
        ("no output", ["torch cannot list the GPUs: ValueError"]),
    ],
)
def test_gpus_that_the_library_has_no_code_for(found, said, monkeypatch):
    """By what a process says that may use CUDA; machine code of a lower minor version
    is enough, and newer GPUs compile PTX."""
    library = SimpleNamespace(cuda_build="13000 800,900,1000,1200 900")
    build = ops.CudaBuild.of(library)
    archs = "code of CUDA 13.0 for sm_80, sm_90, sm_100, sm_120, and PTX for GPUs from "
    fails = "raise ValueError" if found == "no output" else ""
    monkeypatch.setattr(doctor, "GPUS", f"print({found!r})\n{fails}")
    lines = list(doctor.gpus(build, 60))
    assert len(lines) == len(said)
    for text, start in zip(problems(lines), said, strict=True):
        assert text.startswith(start)
        assert fails or f"has {archs}9.0 on" in text


def test_the_process_that_lists_gpus(monkeypatch, capsys):
    if not torch.cuda.is_available():
        assert doctor.run_child(doctor.GPUS, 300) == (0, ["0"])

    def get_version(to):
        to._obj.value = 13000

    driver = SimpleNamespace(cuDriverGetVersion=get_version)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [(8, 9), (12, 1)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    exec(doctor.GPUS)
    assert capsys.readouterr().out == "13000 89 121\n"


def test_a_vllm_process_that_hangs_is_ended_with_its_children(monkeypatch):
    child = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)"
    monkeypatch.setattr(doctor, "CHILD", child)
    started = time.monotonic()
    assert list(doctor.processes(0.5)) == [
        (
            False,
            "plugin",
            "a process that imports vLLM and loads its plugins took 0.5 s and was "
            "ended; --timeout sets the limit",
        )
    ]
    assert time.monotonic() - started < 30


def test_vllm_plugins_that_leaves_nwor_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    done = run_python("-P", "-c", doctor.CHILD)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    for mode, audit, is_fine in (
        ("cow", "off", False),
        ("off", "log", False),
        ("off", "off", True),
    ):
        monkeypatch.setenv("VLLM_NWOR_MODE", mode)
        monkeypatch.setenv("VLLM_NWOR_AUDIT", audit)
        assert list(doctor.processes()) == [
            (is_fine, "plugin", "not loaded by vLLM: VLLM_PLUGINS='other'"),
            (is_fine, "mode", f"off in all processes, because of that ({mode} is set)"),
        ]


def test_a_plugin_that_cannot_be_imported(monkeypatch):
    """VLLM_PLUGINS names it, and is not given as the reason."""
    output = f"ImportError: no wrapt\n{doctor.NOT_LOADED}\n"
    done = SimpleNamespace(returncode=0, stdout=output)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setenv("VLLM_PLUGINS", "other,nwor")
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    said, _ = problems(doctor.processes())
    assert said == "not loaded by vLLM: ImportError: no wrapt"


def test_an_untested_vllm_and_a_library_without_cuda_code(tmp_path):
    (tmp_path / "_version.py").write_text("__version__ = version = '9.9.9+cu130'\n")
    (found,) = (one for one in doctor.versions(tmp_path) if one[1] == "vllm")
    assert found[0]
    assert found[2].startswith("9.9.9+cu130 (tried: 0.26.0, ")
    if not ops.has_cuda():
        (said,) = problems(doctor.library("cuda"))
        assert said.startswith(f"{ops.LIBRARY} has no CUDA code; build it again")


def test_hooks_that_do_not_match_are_named(tmp_path):
    """A vLLM without the V1 runner is no problem; without both runners it is."""
    vllm = laid_out(tmp_path, files_read(files_of(SITE))) / "vllm"
    v1, v2 = (tmp_path / doctor.RUNNERS[name] for name in ("runner_v1", "runner_v2"))
    text = v2.read_text()
    v2.write_text(text.replace("def prepare_attn(", "def prepare_attention("))
    name = "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn does not exist"
    assert problems(doctor.hooks(vllm)) == [f"runner_v2: {name}"]
    v2.write_text("def broken(:")
    (said,) = problems(doctor.hooks(vllm))
    assert said.startswith("vLLM's source cannot be compared: ")
    v2.write_text(text)
    v1.unlink()
    assert problems(doctor.hooks(vllm)) == []
    v2.unlink()
    found = problems(doctor.hooks(vllm))
    assert "runner_v1: vllm.v1.worker.gpu_model_runner does not exist" in found
    assert "runner_v2: vllm.v1.worker.gpu.model_runner does not exist" in found
