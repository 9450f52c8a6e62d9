# SPDX-License-Identifier: Apache-2.0
"""The distribution adds `vllm/v1/nwor` to an installed vLLM and touches nothing else.

Installs the wheel beside a copy of vLLM's Python files in a throw-away environment. It
does not start vLLM there; the checkout's own environment stands for that.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm" / "v1" / "nwor"
ENTRY_POINT = "vllm_nwor.plugin:register"
SOURCES = {".py", ".cpp", ".cu", ".cuh", ".h", ".sh"}


def run(*command: str | Path, **env: str) -> str:
    """Runs a command in the repository root; its output, or a failed test."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def digests(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of each file; "" for each folder."""
    return {
        str(path.relative_to(folder)): ""
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "-w", out)
    run(*pip, *options, ROOT, NWOR_CUDA="OFF")
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    expected.add("vllm/v1/nwor/_nwor_C.so")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert wheel.name.startswith("vllm_nwor-")
    assert "-py3-none-linux_" in wheel.name


def test_wheel_needs_neither_vllm_nor_torch(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    lines = archive.read(name).decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist:")]
    assert needs == ["Requires-Dist: wrapt>=1.16"]


def test_install_and_uninstall_leave_vllm_as_it_was(
    wheel: Path, tmp_path: Path
) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    ignored = shutil.ignore_patterns("*.so", "*.so.*", "__pycache__")
    shutil.copytree(Path(found.origin).parent, site / "vllm", ignore=ignored)
    before = digests(site)
    assert len(before) > 1000

    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    pip += ("--disable-pip-version-check",)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    installed = digests(site)
    assert {name: installed.get(name) for name in before} == before
    (record,) = site.glob("vllm_nwor-*.dist-info/RECORD")
    ours = ("vllm/v1/nwor/", "vllm_nwor-")
    recorded = [row[0] for row in csv.reader(record.read_text().splitlines())]
    assert [name for name in recorded if not name.startswith(ours)] == []
    added = {name for name, digest in installed.items() if digest} - set(before)
    assert added == set(recorded)

    run(*pip, "uninstall", "-y", "vllm-nwor")
    assert digests(site) == before


def test_importing_the_package_imports_no_torch() -> None:
    # Stand-ins for vLLM's packages, whose own imports do bring torch.
    code = """
import importlib, sys, types
for name, path in (("vllm", "vllm"), ("vllm.v1", "vllm/v1")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
print(importlib.import_module("vllm_nwor").__file__)
print("torch" in sys.modules)
"""
    file, torch_imported = run(sys.executable, "-c", code).split()
    assert Path(file).resolve() == PACKAGE / "__init__.py"
    assert torch_imported == "False"


def test_repository_root_does_not_shadow_vllm() -> None:
    code = f"""
import importlib.metadata as metadata
import vllm, vllm_nwor
(entry,) = metadata.entry_points(group="vllm.general_plugins", name="nwor")
assert entry.value == "{ENTRY_POINT}", entry
assert callable(entry.load())
print(vllm.__file__)
print(vllm_nwor.__version__)
"""
    file, version = run(sys.executable, "-c", code).split()[-2:]
    assert "site-packages" in Path(file).parts
    assert version == importlib.metadata.version("vllm-nwor")


def test_every_source_file_names_its_licence() -> None:
    listed = run("git", "ls-files", "-z").split("\0")
    paths = [ROOT / name for name in listed if Path(name).suffix in SOURCES]
    lacking = [
        str(path.relative_to(ROOT))
        for path in paths
        # There is nothing to license in an empty file.
        if path.is_file()
        and path.stat().st_size
        and "SPDX-License-Identifier: Apache-2.0"
        not in "".join(path.read_text().splitlines()[:2])
    ]
    assert paths
    assert lacking == []
