# SPDX-License-Identifier: Apache-2.0
"""The container images, without a container engine.

What the engine would do is taken from the Dockerfiles and done here where it can be:
the context as .dockerignore admits it, and the files that a stage copies, beside those
that a wheel is built of. `make lint` runs hadolint; what the base images hold is not
checked.
"""

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


@of_each_device
def test_the_stage_copies_all_that_a_wheel_is_built_of(path, tmp_path):
    """That is what an sdist holds (test_packaging.py builds the same wheel of it), but
    for what setuptools writes into one."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    admitted = exclude_paths(str(ROOT), [one for one in lines if one[0] != "#"])
    sources = {one for words in values(path, "COPY") for one in words.split()[:-1]}
    copied = {
        name
        for name in admitted
        if (ROOT / name).is_file() and sources & {name, *map(str, Path(name).parents)}
    }
    with tarfile.open(build(ROOT, tmp_path, "sdist")) as archive:
        held = {one.name.partition("/")[2] for one in archive if one.isfile()}
    written = re.compile(r"PKG-INFO|setup\.cfg|vllm_nwor\.egg-info/.*")
    needed = {name for name in held if not written.fullmatch(name)}
    assert {"setup.py", "csrc/nwor/table.h"} < needed
    assert needed - copied == set()
    assert not any(name.endswith(".so") for name in copied)


def test_images_are_of_a_vllm_that_was_tried_and_compile_as_the_sources_do():
    arguments = dict(
        re.findall(r'^ARG (\w+)="?([^"\n]+)', GPU.read_text(), re.MULTILINE)
    )
    assert arguments["VLLM_VERSION"].removeprefix("v") in TRIED_VLLM_VERSIONS
    cmake = (ROOT / "csrc" / "nwor" / "cuda.cmake").read_text()
    assert f'set(NWOR_CUDA_ARCHS "{arguments["NWOR_CUDA_ARCHS"]}"' in cmake
    # What is picked of the requirements is there.
    pinned = (ROOT / "requirements" / "cpu.txt").read_text()
    for path in (GPU, CPU):
        picked = re.findall(r"grep -E '\^\(([^)]*)\)=='", path.read_text())
        for name in "|".join(picked).split("|"):
            assert f"\n{name}==" in f"\n{pinned}", path.name


@of_each_device
def test_the_image_that_is_used_was_checked_and_is_no_roots(path):
    (run,) = values(path, "RUN", last_stage=True)
    check = f"vllm_nwor.doctor --device {'cuda' if path == GPU else 'cpu'}"
    assert f"&& VLLM_NWOR_MODE=stage python3 -m {check}" in run
    assert values(path, "USER", last_stage=True) == ["2000:0"]
    (labels,) = values(path, "LABEL", last_stage=True)
    assert f'image.version="{vllm_nwor.__version__}"' in labels


@of_each_device
def test_the_shell_is_of_the_image_for_this_machine(path, tmp_path):
    """With a command as it was given. A new volume gets the mode of the folder it is
    mounted over; without one in the image it would be root's alone."""
    device = "gpu" if path == GPU else "cpu"
    for name in ("bash", "dirname", "env", "id", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "nvidia-smi").symlink_to(f"/bin/{'true' if path == GPU else 'false'}")
    words = ["echo", "a b", "$HOME", "--dry-run"]
    command = [ROOT / "tools" / "docker_dev_shell.sh", "--dry-run", "--", *words]
    said = subprocess.check_output(command, env={"PATH": str(tmp_path)}, text=True)
    build, run = (shlex.split(line)[1:] for line in said.splitlines())
    assert str(path) in build
    assert ("--gpus" in run) is (path == GPU)
    assert run[-5:] == [f"vllm-nwor:dev-{device}", *words]
    (made,) = (value for value in values(path, "RUN") if "mkdir" in value)
    folders = {str(Path("/src", one)) for one in made.split("chmod 1777")[1].split()}
    assert folders == set(
        re.findall(r"volume,source=[^,]*,target=(\S+)", " ".join(run))
    )
