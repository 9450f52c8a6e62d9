# SPDX-License-Identifier: Apache-2.0
"""Wheel and sdist: their files, their metadata, and that installing them leaves vLLM
unchanged. The container images: that they copy every file a wheel is built from.

The wheel is installed into temporary environments together with a stand-in for vLLM, a
wheel or editable.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import wrapt
from docker.utils import exclude_paths

import vllm_nwor
from tools import dist

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm" / "v1" / "nwor"


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """The command's output; the test fails if the command does."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> hash of each file, b"" for a folder; git's own left out."""
    return {
        str(path.relative_to(folder)): b""
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).digest()
        for path in folder.rglob("*")
        if ".git" not in path.parts
    }


def build(project: Path, out: Path, what: str) -> Path:
    """Builds a project's "sdist", "wheel" or "editable", as pip and build do."""
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    out.mkdir(parents=True, exist_ok=True)
    # setuptools would add the files that an earlier build listed.
    for listed in project.glob("*.egg-info/SOURCES.txt"):
        listed.unlink()
    run(sys.executable, "-c", code, cwd=project, NWOR_CUDA="OFF")
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """The folder with the sdist's files, in which tests may build."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder, filter="data")
    (project,) = folder.iterdir()
    return project


# --- what is built ---


def test_wheel_and_sdist_contain_exactly_the_package(wheel, unpacked, tmp_path):
    """The wheel that is built from the sdist is the same, byte for byte."""
    expected = {
        f"vllm_nwor/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    expected.add("vllm_nwor/_nwor_C.so")
    again = build(unpacked, tmp_path, "wheel")
    assert again.name == wheel.name
    held = [
        {name: archive.read(name) for name in archive.namelist()}
        for archive in map(zipfile.ZipFile, (wheel, again))
    ]
    assert held[0] == held[1]
    others = held[0].keys() - expected
    assert expected < held[0].keys()
    assert [one for one in others if not re.match(r"vllm_nwor-[^/]*info/", one)] == []


def test_the_wheel_runs_where_the_wheels_of_vllm_do(wheel, tmp_path):
    """And with any Python from 3.11 on. auditwheel knows which libstdc++ goes with
    which glibc. All other libraries come with torch."""
    auditwheel = (sys.executable, "-m", "auditwheel", "show", "--json")
    found = json.loads(run(*auditwheel, wheel))
    run(sys.executable, "-m", "abi3audit", "--strict", wheel)
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_2_28_{platform.machine()}.whl")
    (verdict,) = re.findall(r"manylinux_2_(\d+)_", found["sym_tag"])
    assert int(verdict) <= 28
    assert not found["unsupported_isa"]
    assert set(found["external_libs"]) == {"libtorch.so", "libtorch_cpu.so"}
    # auditwheel sees versions of symbols. One of libstdc++ has none if torch's own
    # libraries, with which ours is linked, happen to have it.
    library = Path(zipfile.ZipFile(wheel).extract("vllm_nwor/_nwor_C.so", tmp_path))
    symbols = run("readelf", "--wide", "--dyn-syms", library)
    unversioned = re.findall(r"GLOBAL DEFAULT  UND (\w+)$", symbols, re.MULTILINE)
    known = re.compile("_?Py|aoti_torch_|torch_")
    assert len(unversioned) > 9
    assert [name for name in unversioned if not known.match(name)] == []


def test_functions_that_moved_in_glibc_2_34_are_linked_as_before(tmp_path):
    """Those that the CUDA runtime uses: without it, the wheel above has none."""
    names = ("pthread_create", "sem_post", "dlopen", "dlmopen", "shm_open")
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text(
        "".join(f"void {name}(void);\n" for name in names)
        + f"void *used[] = {{{', '.join(names)}}};\n"
    )
    script = ROOT / "cmake" / "nwor" / "older_glibc.py"
    older = run(sys.executable, script, "g++", tmp_path / "older").split()
    options = ("-shared", "-fPIC", "-fno-builtin", "-w", "-o", library)
    run("gcc", *options, source, *older)
    symbols = run("readelf", "--wide", "--dyn-syms", library)
    found = dict(re.findall(r" UND (\w+)@GLIBC_2\.(\d+)", symbols))
    assert {*names} <= {*found}
    assert all(int(found[name]) < 28 for name in names)


def test_the_metadata_is_valid_and_requires_no_build_of_vllm(wheel, sdist):
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    lines = archive.read(name).decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-")]
    assert needs == [
        "Requires-Python: >=3.11",
        "Requires-Dist: msgspec>=0.18",
        "Requires-Dist: torch>=2.11",
        "Requires-Dist: wrapt>=1.16",
    ]


# --- what is published (tools/dist.py) ---


def test_a_wheel_that_is_not_what_it_says_is_not_published(
    wheel, tmp_path, monkeypatch
):
    """One for CPUs, renamed, with a function of Python that is not in its limited API:
    every check names what is wrong."""
    other = wheel.name.replace("_2_28_", "_2_5_")
    with (
        zipfile.ZipFile(wheel) as archive,
        zipfile.ZipFile(tmp_path / other, "w") as changed,
    ):
        for name in archive.namelist():
            content = archive.read(name).replace(
                b"\0PyTuple_Size\0", b"\0_PyTuple_Siz\0"
            )
            changed.writestr(name, content)
    monkeypatch.setattr(dist, "MOST_BYTES", 9)
    monkeypatch.setattr(dist, "EXTERNAL", {"libtorch.so"})
    with pytest.raises(dist.DistError) as error:
        dist.check_wheel(tmp_path / other, tmp_path)
    name, said = str(error.value).split(": ", 1)
    assert name == other
    platform, needs, code, size, abi3 = said.split("; ", 4)
    assert re.fullmatch(
        r"auditwheel finds manylinux_2_\d+_(\w+), its tag is manylinux_2_5_\1", platform
    )
    assert needs == "it needs libtorch_cpu.so, which torch has not"
    assert abi3.startswith("it uses more than Python's limited API: ")
    assert "_PyTuple_Siz" in abi3
    assert code.startswith("it must have code for sm_80, sm_86, sm_89, sm_90, sm_100, ")
    assert re.fullmatch(r"it has \d+ bytes, more than 9", size)


LINK_MAP = """Archive member included to satisfy reference by file (symbol)

/cuda/lib/libcudart_static.a(cudart_static.o)
                              a.o (cudaMalloc)
/usr/lib/libc_nonshared.a(atexit.oS)
                              a.o (atexit)
"""


def test_what_is_linked_in_is_listed_in_the_wheel_with_its_licenses(wheel, tmp_path):
    licenses = tmp_path / "nvidia_cuda_runtime-13.0.96.dist-info" / "licenses"
    licenses.mkdir(parents=True)
    (licenses / "License.txt").write_text("NVIDIA's terms\n")
    with pytest.raises(dist.DistError, match=r"has code of libz, linked .* libgcc"):
        dist.linked_in(LINK_MAP + "/usr/lib/libz.a(b.o)\n", "c++", tmp_path)
    linked = dist.linked_in(LINK_MAP, "c++", tmp_path)
    (tmp_path / "built").mkdir()
    before = zipfile.ZipFile(wheel)
    copy = Path(shutil.copy(wheel, tmp_path / "built"))
    finished = dist.finish(copy, linked, tmp_path)
    run(sys.executable, "-m", "twine", "check", "--strict", finished)
    # Compares each file with the hash in RECORD.
    run(sys.executable, "-m", "wheel", "unpack", finished, "-d", tmp_path / "unpacked2")
    archive = zipfile.ZipFile(finished)
    added = set(archive.namelist()) - set(before.namelist())
    info = f"vllm_nwor-{vllm_nwor.__version__}.dist-info"
    files = {"LICENSE.pytorch", "LICENSE.nvidia-cuda"}
    bill = f"{info}/sboms/vllm_nwor.cdx.json"
    assert added == {bill, *(f"{info}/licenses/{name}" for name in files)}
    assert archive.read(f"{info}/licenses/LICENSE.nvidia-cuda") == b"NVIDIA's terms\n"
    assert b"Redistribution" in archive.read(f"{info}/licenses/LICENSE.pytorch")
    lines = archive.read(f"{info}/METADATA").decode().splitlines()
    expression = "Apache-2.0 AND BSD-3-Clause AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
    assert f"License-Expression: {expression}" in lines
    assert {f"License-File: {name}" for name in files} < set(lines)
    found = json.loads(archive.read(bill))
    assert found["metadata"]["component"]["version"] == vllm_nwor.__version__
    versions = {one["name"]: one["version"] for one in found["components"]}
    assert versions.pop("NVIDIA CUDA runtime (static)") == "13.0.96"
    torch = importlib.metadata.version("torch").partition("+")[0]
    assert versions.pop("PyTorch (headers)") == torch
    assert [*versions] == ["glibc"]  # and no libgcc


def test_the_manifest_names_what_was_built_and_left_out(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda tools, release 12.9, V12.9.86\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        dist.DistError, match=r"of release 13\.\d, .* release 12.9, V12"
    ):
        dist.cuda_runtime("x86_64", tmp_path)
    monkeypatch.setattr(dist, "MACHINES", ("none64",))
    work, out = tmp_path / "work", tmp_path / "dist"
    work.mkdir()
    out.mkdir()
    (out / "vllm_nwor-0.0-old.whl").touch()
    manifest = dist.make_dist(out, work)
    assert manifest["left_out"] == {"none64": "none64-linux-gnu-g++ is not installed"}
    (file,) = manifest["files"]
    (path,) = out.iterdir()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert file == {
        "file": f"vllm_nwor-{vllm_nwor.__version__}.tar.gz",
        "sha256": digest,
        "bytes": path.stat().st_size,
    }
    assert path.name == file["file"]
    assert manifest["built_with"]["nvcc"] == "12.9.86"
    with pytest.raises(dist.DistError, match=r"has no section \[9.9\], the version"):
        dist.check_version(path.with_name("vllm_nwor-9.9.tar.gz"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(dist.DistError, match="nvcc is not installed"):
        dist.cuda_runtime("x86_64", tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_what_is_published_is_complete(tmp_path):
    """With a wheel for each processor for which there is a compiler."""
    work, out = tmp_path / "work", tmp_path / "dist"
    work.mkdir()
    manifest = dist.make_dist(out, work)
    wheels = {}
    for file in manifest["files"]:
        content = (out / file["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        if "platform" in file:
            wheels[file["platform"].removeprefix("manylinux_2_28_")] = file
    assert {*wheels, *manifest["left_out"]} == {*dist.MACHINES}
    assert platform.machine() in wheels
    for machine, file in wheels.items():
        archive = zipfile.ZipFile(out / file["file"])
        (bill,) = (one for one in archive.namelist() if one.endswith(".cdx.json"))
        names = {one["name"] for one in json.loads(archive.read(bill))["components"]}
        assert ("libgcc" in names) is (machine == "aarch64")
        assert "NVIDIA CUDA runtime (static)" in names
        archive.extract("vllm_nwor/_nwor_C.so", tmp_path / machine)
        header = run("readelf", "-h", tmp_path / machine / "vllm_nwor" / "_nwor_C.so")
        processor = {"x86_64": "X86-64", "aarch64": "AArch64"}[machine]
        assert re.search(rf"Machine: .*{processor}$", header, re.MULTILINE)


# --- installed next to vLLM ---

VLLM = {
    "vllm/__init__.py": '__version__ = "0.32.0"\n',
    "vllm/envs.py": "environment_variables = {}\n",
    "vllm/v1/__init__.py": "",
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "0.32.0"
[tool.setuptools]
packages = ["vllm", "vllm.v1"]
""",
}
MODES = (None, "", "off", "stage", "cow")
# Loads the plugin as vLLM does.
USE = """
import vllm
found = vllm.__file__
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins")
entry.load()()
import vllm, vllm.envs, vllm.v1.nwor.config, vllm_nwor.config
assert vllm.v1.nwor.config is vllm_nwor.config
assert "VLLM_NWOR_MODE" in vllm.envs.environment_variables
assert vllm.__file__ == found
print(found)
"""


class Environment:
    """A virtual environment that has wrapt alone."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python3*/site-packages")
        (self.site / "wrapt").symlink_to(Path(wrapt.__file__).parent)

    def uv(self, *command: str | Path) -> None:
        python = ("--no-cache", "--offline", "--python", self.python)
        run(sys.executable, "-m", "uv", "pip", *command, *python)

    def install(self, wheel: Path) -> None:
        self.uv("install", "--no-deps", "--no-index", wheel)

    def run(
        self,
        *arguments: str,
        mode: str | None = None,
        user: Sequence[str] = (),
        **more: str,
    ) -> tuple[int, list[str]]:
        """Exit status and output lines of Python in a folder without vllm/. user: a
        command that starts another without rights. more: variables."""
        env = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
        env |= more if mode is None else {**more, "VLLM_NWOR_MODE": mode}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*user, self.python, "-B", *arguments]
        done = subprocess.run(command, cwd=self.site.parent, env=env, **output)
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


@pytest.fixture(scope="module")
def vllm_wheels(tmp_path_factory):
    """Stand-ins for vLLM: a wheel, and an editable one with setuptools' finder."""
    project, out = (tmp_path_factory.mktemp(name) for name in ("project", "vllm"))
    for name, text in VLLM.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    found = {kind: build(project, out / kind, kind) for kind in ("wheel", "editable")}
    names = zipfile.ZipFile(found["editable"]).namelist()
    assert any(name.endswith("_finder.py") for name in names)
    return found


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("ours", ["wheel", "editable"])
def test_installing_leaves_vllm_unchanged_in_every_mode(
    ours, kind, wheel, unpacked, vllm_wheels, environment, tmp_path
):
    """No file of this package is in vLLM's folder; none is left after uninstalling."""
    package, site = wheel, environment.site
    if ours == "editable":
        package = build(unpacked, tmp_path / "ours", "editable")
    environment.install(vllm_wheels[kind])
    before = contents(site)
    found = environment.run("-c", "import vllm; print(vllm.__file__)")
    environment.install(package)
    for mode in MODES:
        assert environment.run("-c", USE, mode=mode) == found
    after = contents(site)
    assert before.items() < after.items()
    added = after.keys() - before.keys()
    assert [name for name in added if re.match(r"vllm\b", name)] == []
    environment.uv("uninstall", "vllm-nwor")
    assert contents(site) == before


REGISTER = "-c", "import vllm_nwor.plugin; vllm_nwor.plugin.register()"
DOCTOR = "-m", "vllm_nwor.doctor"
ABSENT = (
    "RuntimeError: vllm-nwor: vLLM is not installed; install the build of vLLM for "
)
ABSENT += "your hardware, then vllm-nwor next to it"
NO_VLLM = "! vllm       not installed, or only an empty folder of that name"
NO_TORCH = ["! torch      not installed", "! library    No module named 'torch'"]
BROKEN = "ModuleNotFoundError: No module named 'none_such'"


def test_an_absent_or_broken_vllm_is_named(wheel, environment):
    """By the doctor, and by the plugin if a mode is set."""
    environment.install(wheel)
    for mode in MODES:
        status, lines = environment.run(*REGISTER, mode=mode)
        is_on = mode in ("stage", "cow")
        assert (status, lines[-1:]) == ((1, [ABSENT]) if is_on else (0, []))
    status, lines = environment.run(*DOCTOR)
    assert status == 1
    assert {*NO_TORCH, NO_VLLM} < set(lines)

    package = environment.site / "vllm"
    package.mkdir()
    assert environment.run(*DOCTOR) == (status, lines)
    (package / "__init__.py").write_text("import none_such\n")
    status, lines = environment.run(*DOCTOR, mode="stage")
    assert status == 1
    assert f"! plugin     a process of vLLM does not start: {BROKEN}" in lines
    # vLLM is there, although it cannot be imported.
    assert NO_VLLM not in lines
    for mode in ("off", "stage"):
        assert environment.run(*REGISTER, mode=mode)[1][-1] == BROKEN


# --- the container images ---


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_copies_each_file_that_a_wheel_is_built_from(name, sdist):
    """Those of the sdist, except for what setuptools generates; .dockerignore must not
    leave any out."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    admitted = exclude_paths(str(ROOT), [one for one in lines if one[0] != "#"])
    text = (ROOT / "docker" / name).read_text()
    copies = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    sources = set(" ".join(copies).split())
    copied = {one for one in admitted if sources & {one, *map(str, Path(one).parents)}}
    with tarfile.open(sdist) as archive:
        held = {one.name.partition("/")[2] for one in archive if one.isfile()}
    written = re.compile(r"PKG-INFO|setup\.cfg|vllm_nwor\.egg-info/.*")
    needed = {one for one in held if not written.fullmatch(one)}
    assert {"setup.py", "csrc/nwor/common/table.h"} < needed
    assert needed - copied == set()
    assert not any(one.endswith(".so") for one in copied)
