# SPDX-License-Identifier: Apache-2.0
"""tools/apply_to_vllm.py on the files that it touches and reads: of the installed vLLM,
and (nightly, make check-vllm) of the releases that we serve. A checkout is those, and
what builds it: a release's own files, or a build of ours that is laid out as vLLM's is.

What a vLLM does that was patched: tests/integration/test_apply_to_vllm.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_check_vllm import SITE, files_read, laid_out
from tests.unit.test_check_vllm import run as program
from tests.unit.test_packaging import contents
from tests.unit.test_packaging import run as command
from tools import apply_to_vllm as tool
from tools import check_vllm, native
from vllm_nwor.hooks.source import files_of

pytestmark = pytest.mark.usefixtures("parsed_once")
ROOT = Path(__file__).resolve().parents[2]
# What the tool changes of a checkout's build; what a build makes of that is tried on
# those of releases.
STUB = {
    "CMakeLists.txt": "project(stub\n  LANGUAGES CXX)\nset(DEVICE cpu)\n",
    "setup.py": "ext_modules = []\npackage_data = {\n    'vllm': [],\n}\nsetup()\n",
    "csrc/ops.h": "",
    "cmake/utils.cmake": "",
}
# What builds a checkout, and no wheel has; of csrc what is built for any device.
BUILD_FILES = ("CMakeLists.txt", "setup.py", "cmake/**/*", "requirements/*")
BUILD_FILES += ("csrc/*.cpp", "tools/build_rust.py")


@cache
def build_files(version: str) -> dict[str, str]:
    """Texts of the files of the sdist that build it, by path; kept in the cache folder.
    Raises NoSource.

    pip would build metadata of the sdist next, which fails where vLLM's build does not
    have all that it needs; by then it has unpacked it.
    """
    folder = check_vllm.Release(version).folder
    kept = folder / "build"
    if not kept.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            words = ["--no-clean", "--no-deps", "--no-build-isolation"]
            words += ["--no-binary", ":all:", "-d", f"{scratch}/none"]
            command = [*check_vllm.PIP, "download", *words, f"vllm=={version}"]
            env = {**os.environ, "TMPDIR": scratch}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            roots = [one.parent for one in Path(scratch).glob("pip-*/*/setup.py")]
            if not roots:
                raise check_vllm.NoSource(f"no sdist: {done.stderr.strip()}")
            found = {path for glob in BUILD_FILES for path in roots[0].glob(glob)}
            for path in filter(Path.is_file, found):
                target = Path(scratch, "build", path.relative_to(roots[0]))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            Path(scratch, "build").rename(kept)
    paths = filter(Path.is_file, kept.rglob("*"))
    return {str(p.relative_to(kept)): p.read_text("utf-8") for p in paths}


@cache
def files_of_vllm(version: str) -> dict[str, str]:
    """What is touched and read of a vLLM, by path."""
    installed = version == "installed"
    read = files_of(SITE) if installed else check_vllm.Release(version).read
    texts = {path: read(path) for path in ("vllm/_version.py", *tool.MODULES)}
    return files_read(read) | {path: text for path, text in texts.items() if text}


RELEASES = [
    pytest.param(version, marks=pytest.mark.nightly) for version in check_vllm.VERSIONS
]
of_each_release = pytest.mark.parametrize(
    "version", ["installed", *RELEASES], indirect=True
)


@pytest.fixture
def version(request):
    return getattr(request, "param", "installed")


@pytest.fixture
def site(version, tmp_path):
    """As site-packages lie."""
    return laid_out(tmp_path / "site", files_of_vllm(version))


@pytest.fixture
def checkout(version, tmp_path):
    built_by = STUB if version == "installed" else build_files(version)
    return laid_out(tmp_path / "checkout", files_of_vllm(version) | built_by)


def digests(folder: Path) -> dict[str, bytes]:
    """Of all but libraries, which a checkout's build makes."""
    found = contents(folder).items()
    return {path: digest for path, digest in found if not path.endswith(".so")}


def run(tree: Path, *options: str | Path) -> tuple[int, list[str]]:
    status, lines = program(tool.main, tree, *options)
    assert all(line.startswith(str(tree)) for line in lines)
    return status, [line.removeprefix(str(tree)).lstrip(": ") for line in lines]


def git(folder: Path, *arguments: str | Path) -> str:
    settings = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost")
    return command("git", *settings, *arguments, cwd=folder)


@of_each_release
def test_site_packages_get_it_once_and_are_restored(site):
    before = digests(site)
    assert run(site, "--check") == (1, ["there is nothing of NWOR"])
    assert digests(site) == before

    status, (said,) = run(site)
    assert (status, "no CMakeLists.txt" in said) == (0, True)
    patched = digests(site)
    changed = {path for path in before if patched[path] != before[path]}
    assert changed == {*tool.MODULES, "vllm/envs.py"}
    assert all(one.startswith("vllm/v1/nwor") for one in patched.keys() - before)
    library = site / tool.LIBRARY
    assert library.read_bytes() == (ROOT / tool.LIBRARY).read_bytes()

    for options in (("--check",), ()):
        assert run(site, *options) == (0, ["has all of it"])
        assert digests(site) == patched
    library.unlink()
    assert run(site, "--check") == (1, [f"{tool.LIBRARY} is missing"])
    assert run(site, "--revert")[0] == 0
    assert digests(site) == before


@of_each_release
def test_the_series_makes_the_same_tree(checkout, tmp_path):
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "theirs")
    clone, folder = tmp_path / "clone", tmp_path / "patches"
    git(tmp_path, "clone", "-q", checkout, clone)
    before = digests(checkout)
    status, (said,) = run(checkout, "--series", folder)
    assert (status, digests(checkout)) == (0, before)
    patches = sorted(folder.glob("*.patch"))
    assert f"needs the {len(patches)} patches" in said
    assert run(checkout, "--series", folder)[0] == 1  # they are there already

    git(clone, "am", "-q", *patches)
    assert git(clone, "status", "--porcelain") == ""
    assert run(checkout)[0] == 0
    assert digests(checkout) == digests(clone)
    assert run(clone) == (0, ["has all of it"])  # its build makes the library
    for path, module in tool.MODULES.items():
        # The call alone is what can be dropped; the commit says when.
        command = ("log", "-1", "--numstat", "--format=%b", f"--grep={module}$")
        *body, changed = git(clone, *command).splitlines()
        assert changed == f"2\t0\t{path}"
        ends = (f"{one.qualname}: {one.delete_when}" for one in tool.rows_of(module))
        assert {f"Drop-when: {end}" for end in ends} < set(body)
    assert run(clone, "--revert")[0] == 0
    assert digests(clone) == before


# --- what is not as it should be ---


RUNNER, OURS = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/nwor"
# The last of our lines in such a file.
CALL, DEFERRED = (
    [f"{line.text}\n" for line in tool.our_lines() if line.path == path][-1]
    for path in (RUNNER, tool.CMAKE)
)
TOO_SOON = DEFERRED.replace("DEFER CALL", "EVAL CODE")
# What is changed in a file of a patched tree, and what is said of it.
DRIFT = {
    "lost": (RUNNER, CALL, "", f"lacks {CALL[:-1]}"),
    "twice": (RUNNER, CALL, CALL * 2, f"has {CALL[:-1]}"),
    "not at the end": (RUNNER, CALL, f"{CALL}theirs = 1\n", "lacks from vllm"),
    "built too soon": (tool.CMAKE, DEFERRED, TOO_SOON, "has cmake_language(EVAL CODE"),
    "a file was edited": (f"{OURS}/step.py", "", "\n", "is not this version's"),
    "a file is another's": (f"{OURS}/older.py", "", "\n", "is not this version's"),
}
HEAD = "    def _model_forward("
FORWARD = "vllm.v1.worker.gpu_model_runner.GPUModelRunner._model_forward"
PACKED = "has no ext_modules, package_data and setup()"
# The same of a vLLM that cannot carry it.
REFUSED = {
    "moved on": (RUNNER, HEAD, "    def _forward(", f"{FORWARD} does not exist"),
    "by hand": (RUNNER, HEAD, f"    # NWOR\n{HEAD}", f"{RUNNER}:"),
    "no end of line": (RUNNER, "", "# theirs", "has no newline at its end"),
    "no project": (tool.CMAKE, "project(", "# project(", "has no project()"),
    "no package_data": (tool.SETUP, "package_data", "_", PACKED),
}


@pytest.mark.parametrize("name", [*DRIFT, *REFUSED])
def test_differences_are_named_and_not_overwritten(name, checkout, tmp_path):
    path, old, new, said = (DRIFT | REFUSED)[name]
    patches = tmp_path / "patches"
    if name in DRIFT:
        tool.Graft(checkout).apply()
    file = checkout / path
    text = file.read_text() if file.exists() else ""
    assert old in text
    file.write_text(text.replace(old, new, 1) if old else text + new)
    before = digests(checkout)
    series = [("--series", patches)] if name in REFUSED else []
    for options in (("--check",), (), *series):
        status, lines = run(checkout, *options)
        assert status == 1
        lines = [re.sub(r", below line \d+:", "", line) for line in lines]
        assert any(one.startswith((said, f"{path} {said}")) for one in lines), lines
    assert digests(checkout) == before
    assert not patches.exists()


def test_revert_leaves_the_files_of_others(checkout):
    tool.Graft(checkout).apply()
    theirs = checkout / OURS / "theirs.py"
    theirs.write_text("")
    before = digests(checkout)
    status, lines = run(checkout, "--revert")
    assert (status, lines[0]) == (1, f"{OURS}/theirs.py is not this version's")
    assert digests(checkout) == before
    theirs.unlink()
    with (checkout / RUNNER).open("a") as file:
        file.write("# theirs\n")
    assert run(checkout, "--revert")[0] == 0
    text = (checkout / RUNNER).read_text()
    assert text.endswith("# theirs\n")
    assert "nwor" not in text


def test_a_folder_without_vllm_is_refused(tmp_path):
    said = f"there is no {tmp_path}/vllm/__init__.py"
    assert run(tmp_path) == (1, [said])


# --- a checkout's build ---


# Runs vLLM's setup.py, without the packages that build its Rust parts and find its
# version, and then its build_ext for our extension alone, into the folder named.
BUILD = """
import os, runpy, sys
from unittest import mock
import setuptools
sys.modules["setuptools_rust"] = rust = mock.Mock(build_rust=object)
sys.modules["setuptools_rust.build"] = rust
sys.modules["setuptools_scm"] = mock.Mock(get_version=lambda **_: "0")
with mock.patch.object(setuptools, "setup") as setup:
    runpy.run_path("setup.py")
told = setup.call_args.kwargs
extensions = {one.name: one for one in told["ext_modules"]}
assert len(extensions) > 1, extensions
assert "v1/nwor/_nwor_C.so" in told["package_data"]["vllm"]
distribution = setuptools.Distribution({
    "name": "vllm",
    "cmdclass": told["cmdclass"],
    "ext_modules": [extensions["vllm.v1.nwor._nwor_C"]],
})
command = distribution.get_command_obj("build_ext")
command.build_lib, command.build_temp = sys.argv[1], sys.argv[1] + "/temp"
distribution.run_command("build_ext")
"""


@pytest.mark.parametrize("version", RELEASES, indirect=True)
def test_a_releases_own_build_builds_the_library(checkout, tmp_path):
    """As vLLM's setup.py does it; for a device of which its CMakeLists.txt returns
    before it has downloaded anything (the last word on a command line counts)."""
    tool.Graft(checkout).apply()
    (checkout / tool.LIBRARY).unlink()
    tools = str(Path(native.find_tool("cmake")).parent)
    command(
        *(sys.executable, "-c", BUILD, tmp_path / "built"),
        cwd=checkout,
        PATH=os.pathsep.join([tools, os.environ["PATH"]]),
        VLLM_TARGET_DEVICE="cpu",
        CMAKE_ARGS="-DVLLM_TARGET_DEVICE=xpu",
        CMAKE_BUILD_TYPE="Debug",
    )
    for library in (checkout / tool.LIBRARY, tmp_path / "built" / tool.LIBRARY):
        native.check_runtime(library)
        code = "import torch, _nwor_C; print(_nwor_C.__file__)"
        found = command(sys.executable, "-c", code, cwd=library.parent)
        assert found == f"{library}\n"
    assert not tool.Graft(checkout).drift()
