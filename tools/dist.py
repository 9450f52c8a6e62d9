#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds what is published, into dist/, and checks it: the sdist, a wheel for each
processor with machine code for GPU_ARCHS, and manifest.json about them.

Wheels are built from the unpacked sdist. The wheel for the processor that is not this
machine's is cross-compiled, if Debian's g++-aarch64-linux-gnu (or -x86-64-) is there;
if not, the manifest says that it was left out. CUDA's static runtime comes from the
wheels that requirements/cuda-runtime.txt names.

The wheels get a bill of materials (CycloneDX, PEP 770) with what the linker took from
static libraries, and the licenses of that. Nothing is uploaded.

Exit status: 1 if something is missing, or a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import environment, records  # noqa: E402

CUDA_RUNTIME = ROOT / "requirements" / "cuda-runtime.txt"
# sm_103 runs the code for 100, sm_121 that for 120; others compile the PTX.
GPU_ARCHS = ("80", "86", "89", "90", "100", "120")
# Processors, with the folder of CUDA's headers on such a machine.
MACHINES = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}
MOST_BYTES = 6_000_000
# vLLM needs torch, so these are there.
EXTERNAL = {"libtorch.so", "libtorch_cpu.so"}


class DistError(RuntimeError):
    """Something is missing, or a check failed; the message says what."""


class Linked(NamedTuple):
    """A component that is in the library, as the bill of materials lists it."""

    name: str
    version: str
    license: str
    purl: PackageURL | None = None


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """The command's standard output. DistError with all of its output if it fails."""
    output = {"capture_output": True, "text": True}
    try:
        done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, **output)
    except FileNotFoundError:
        raise DistError(f"{command[0]} is not installed") from None
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()
        raise DistError(f"`{' '.join(map(str, command))}` failed:\n{said}")
    return done.stdout


def python(module: str, *arguments: str | Path) -> str:
    return run(sys.executable, "-m", module, *arguments)


# --- building -------------------------------------------------------------------------


def build(project: Path, what: str, out: Path, **env: str) -> Path:
    """Builds a project's "sdist" or "wheel" into the empty folder `out`."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    # setuptools would add the files that an earlier build listed.
    for listed in project.glob("*.egg-info/SOURCES.txt"):
        listed.unlink()
    run(sys.executable, "-c", code, cwd=project, **env)
    (built,) = out.iterdir()
    return built


def compiler_of(machine: str) -> str | None:
    """The C++ compiler for that processor; None if there is none."""
    is_here = machine == platform.machine()
    return shutil.which("c++" if is_here else f"{machine}-linux-gnu-g++")


def cuda_runtime(machine: str, work: Path) -> Path:
    """The unpacked wheel of NVIDIA's CUDA runtime for that processor."""
    (pinned,) = re.findall(
        r"^nvidia-cuda-runtime==(\d+\.\d+)", CUDA_RUNTIME.read_text(), re.M
    )
    if f"release {pinned}," not in (said := run("nvcc", "--version")):
        raise DistError(
            f"nvcc must be of release {pinned}, as {CUDA_RUNTIME.name}; `nvcc "
            f"--version` says: {said.strip()}"
        )
    options = ("--no-deps", "--only-binary", ":all:", "-r", CUDA_RUNTIME)
    tag = f"manylinux2014_{machine}"
    python("pip", "download", "-q", *options, "--platform", tag, "-d", work)
    (wheel,) = work.glob("*.whl")
    shutil.unpack_archive(wheel, work, "zip")
    return work


def linker_stubs(compiler: str, folder: Path) -> Path:
    """A torch package to build with: the headers are those of every processor, and of
    its libraries the linker needs the names alone. The real ones may have functions of
    a newer libstdc++ than the tag allows, which would hide that ours uses them."""
    torch = Path(str(metadata.distribution("torch").locate_file("torch")))
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "include").symlink_to(torch / "include")
    for name in EXTERNAL:
        options = (
            "-shared",
            "-nostdlib",
            f"-Wl,-soname,{name}",
            "-x",
            "c",
            "/dev/null",
        )
        run(compiler, *options, "-o", folder / "torch" / "lib" / name)
    return folder


def build_wheel(project: Path, machine: str, compiler: str, work: Path) -> Path:
    """The wheel for that processor, with its bill of materials."""
    work.mkdir()
    (work / "cuda").mkdir()
    runtime = cuda_runtime(machine, work / "cuda")
    link_map = work / "link.map"
    env = {
        "NWOR_CUDA": "ON",
        "NWOR_CUDA_ARCHS": ";".join(GPU_ARCHS),
        "CUDAFLAGS": f"-L{next(runtime.glob('nvidia/cu*/lib'))}",
        "LDFLAGS": f"-Wl,-Map={link_map}",
        "PYTHONPATH": str(linker_stubs(compiler, work / "stubs")),
    }
    if machine != platform.machine():
        # CUDA's headers are the same for all processors: take this machine's.
        env["CUDAFLAGS"] += f" --target-directory {MACHINES[platform.machine()]}"
        env |= {"CXX": compiler, "CUDAHOSTCXX": compiler}
        env["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    wheel = build(project, "wheel", work / "wheel", **env)
    return finish(wheel, linked_in(link_map.read_text(), compiler, runtime), runtime)


# --- what is linked in, and its licenses ----------------------------------------------


def linked_in(link_map: str, compiler: str, runtime: Path) -> list[Linked]:
    """What the library contains of others' code: inline functions of torch's headers,
    and what the linker took from static libraries, as its map says."""
    (cuda,) = runtime.glob("nvidia_cuda_runtime-*.dist-info")
    cuda_version = cuda.name.split("-")[1].removesuffix(".dist")
    macros = run(
        compiler, "-E", "-dM", "-include", "features.h", "-x", "c", "/dev/null"
    )
    of = dict(
        re.findall(r"^#define (__GLIBC\w*|__VERSION__) \"?(\S+?)\"?$", macros, re.M)
    )
    gcc, glibc = of["__VERSION__"], f"{of['__GLIBC__']}.{of['__GLIBC_MINOR__']}"
    known = {
        "libcudart_static": Linked(
            "NVIDIA CUDA runtime (static)",
            cuda_version,
            "LicenseRef-NVIDIA-CUDA-Toolkit-EULA",
            PackageURL("pypi", None, "nvidia-cuda-runtime", cuda_version),
        ),
        # Atomic operations, on aarch64.
        "libgcc": Linked("libgcc", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1"),
        # `atexit`, which is in no shared library.
        "libc_nonshared": Linked(
            "glibc", glibc, "LGPL-2.1-or-later WITH GCC-exception-2.0"
        ),
    }
    archives = set(re.findall(r"^\S*/([\w+-]+)\.a\(", link_map, re.M))
    if unknown := archives - known.keys():
        raise DistError(
            f"the library has code of {', '.join(sorted(unknown))}, linked statically; "
            f"tools/dist.py knows licenses of {', '.join(known)} only"
        )
    torch = Version(metadata.version("torch")).public
    headers = Linked("PyTorch (headers)", torch, "BSD-3-Clause")
    headers = headers._replace(purl=PackageURL("pypi", None, "torch", torch))
    return [headers, *(known[name] for name in sorted(archives))]


def bill_of_materials(name: str, version: str, linked: Iterable[Linked]) -> str:
    """CycloneDX 1.6, JSON."""
    licenses = LicenseFactory()
    bom = Bom()
    bom.metadata.component = root = Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        licenses=[licenses.make_from_string("Apache-2.0")],
        purl=PackageURL("pypi", None, name, version),
        bom_ref=name,
    )
    components = [
        Component(
            name=one.name,
            version=one.version,
            type=ComponentType.LIBRARY,
            licenses=[licenses.make_from_string(one.license)],
            purl=one.purl,
            bom_ref=one.name,
        )
        for one in linked
    ]
    bom.components.update(components)
    bom.register_dependency(root, components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise DistError(f"the bill of materials is not valid: {error}")
    return text


def finish(wheel: Path, linked: list[Linked], runtime: Path) -> Path:
    """Adds the bill of materials and the licenses of what is linked in."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    folder = wheel.parent.parent / "unpacked"
    python("wheel", "unpack", wheel, "-d", folder)
    (info,) = folder.glob("*/*.dist-info")
    (info / "sboms").mkdir()
    bill = bill_of_materials(name, str(version), linked)
    (info / "sboms" / "vllm_nwor.cdx.json").write_text(bill)
    torch = metadata.distribution("torch").read_text("licenses/LICENSE")
    (cuda,) = runtime.glob("*.dist-info/licenses/*")
    texts = {"LICENSE.pytorch": torch, "LICENSE.nvidia-cuda": cuda.read_text()}
    for file, text in texts.items():
        (info / "licenses" / file).write_text(text)
    # With an exception that lifts their terms from what is linked with them.
    terms = {one.license for one in linked if " WITH " not in one.license}
    fields = {
        "License-Expression: Apache-2.0": "".join(
            f" AND {one}" for one in sorted(terms)
        ),
        "License-File: LICENSE": "".join(f"\nLicense-File: {one}" for one in texts),
    }
    text = (info / "METADATA").read_text()
    for field, more in fields.items():
        text, num = re.subn(f"^{field}$", field + more, text, flags=re.M)
        assert num == 1, field
    (info / "METADATA").write_text(text)
    wheel.unlink()
    python("wheel", "pack", info.parent, "-d", wheel.parent)
    return wheel


# --- checks ---------------------------------------------------------------------------


def gpu_code(library: Path) -> dict[str, list[str]]:
    """Architectures that the library has machine code and PTX for, by cuobjdump."""
    cuobjdump = metadata.distribution("nvidia-cuda-cuobjdump")
    (program,) = (one for one in cuobjdump.files or () if one.name == "cuobjdump")
    found = {}
    for kind, option in (("machine_code", "--list-elf"), ("ptx", "--list-ptx")):
        # It fails where there is none.
        command = [str(program.locate()), option, str(library)]
        said = subprocess.run(command, capture_output=True, text=True).stdout
        archs = set(re.findall(r"\.(sm_\d+)\w*\.(?:cubin|ptx)$", said, re.M))
        found[kind] = sorted(archs, key=lambda arch: int(arch[3:]))
    return found


def newest_symbols(versioned: dict[str, list[str]]) -> dict[str, str]:
    """Newest version of each family of symbols: {"GLIBC": "2.17", ...}."""
    found: dict[str, list[str]] = {}
    for symbols in versioned.values():
        for family, number in (symbol.rsplit("_", 1) for symbol in symbols):
            found.setdefault(family, []).append(number)
    return {family: max(of, key=Version) for family, of in sorted(found.items())}


def check_wheel(wheel: Path, work: Path) -> dict[str, Any]:
    """What the manifest says of a wheel. DistError if it does not keep what its tag
    promises, or has not the code for all GPUs."""
    (tag,) = parse_wheel_filename(wheel.name)[3]
    seen = json.loads(python("auditwheel", "show", "--json", wheel))
    (promised,) = re.findall(r"manylinux_2_(\d+)_", tag.platform)
    (needed,) = re.findall(r"manylinux_2_(\d+)_", seen["sym_tag"]) or ["more"]
    problems = []
    if not needed.isdigit() or int(needed) > int(promised) or seen["unsupported_isa"]:
        problems.append(
            f"auditwheel finds {seen['sym_tag']}, its tag is {tag.platform}"
        )
    if others := seen["external_libs"].keys() - EXTERNAL:
        problems.append(f"it needs {', '.join(sorted(others))}, which torch has not")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("vllm_nwor/_nwor_C.so", work))
    code = gpu_code(library)
    wanted = [f"sm_{arch}" for arch in GPU_ARCHS]
    if code["machine_code"] != wanted or not code["ptx"]:
        problems.append(f"it must have code for {', '.join(wanted)} and PTX: {code}")
    if wheel.stat().st_size > MOST_BYTES:
        problems.append(f"it has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    try:
        python("abi3audit", "--strict", "--verbose", wheel)
    except DistError as error:
        problems.append(f"it uses more than Python's limited API: {error}")
    if problems:
        raise DistError(f"{wheel.name}: {'; '.join(problems)}")
    return {
        "platform": tag.platform,
        "auditwheel": seen["sym_tag"],
        **code,
        "newest_symbols": newest_symbols(seen["versioned_symbols"]),
    }


def check_version(sdist: Path) -> str:
    """The version, of which the changes have to be listed."""
    version = sdist.name.removeprefix("vllm_nwor-").removesuffix(".tar.gz")
    if f"\n## [{version}]" not in (ROOT / "docs" / "CHANGELOG.md").read_text():
        raise DistError(f"docs/CHANGELOG.md has no section [{version}], the version")
    return version


def make_dist(out: Path, work: Path) -> dict[str, Any]:
    """Builds and checks everything; returns the manifest."""
    sdist = build(ROOT, "sdist", work / "sdist")
    version = check_version(sdist)
    shutil.unpack_archive(sdist, work / "project", filter="data")
    (project,) = (work / "project").iterdir()
    built: list[tuple[Path, dict[str, Any]]] = [(sdist, {})]
    left_out = {}
    for machine in MACHINES:
        if (compiler := compiler_of(machine)) is None:
            left_out[machine] = f"{machine}-linux-gnu-g++ is not installed"
            print(f"dist: no wheel for {machine}: {left_out[machine]}", flush=True)
            continue
        print(f"dist: the wheel for {machine}, with {compiler}", flush=True)
        wheel = build_wheel(project, machine, compiler, work / machine)
        built.append((wheel, check_wheel(wheel, work / machine)))
    python("twine", "check", "--strict", *(path for path, _ in built))
    out.mkdir(exist_ok=True)
    for old in out.glob("vllm_nwor-*"):
        old.unlink()
    files = []
    for path, facts in built:
        shutil.copy(path, out)
        content = path.read_bytes()
        about = {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
        files.append({"file": path.name, **about, **facts})
    nvcc = re.findall(r"release [\d.]+, V([\d.]+)", run("nvcc", "--version"))
    cxx = run("c++", "-dumpfullversion", "-dumpversion").strip()
    return {
        "version": version,
        "commit": run("git", "describe", "--always", "--abbrev=40", "--dirty").strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "built_with": {
            "nvcc": nvcc[0],
            "c++": cxx,
            **{
                name: metadata.version(name)
                for name in ("torch", "setuptools", "cmake")
            },
        },
        "files": files,
        "left_out": left_out,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = "file to append a line to: the manifest, without checksums"
    parser.add_argument("--json", type=Path, help=text)
    to = parser.parse_args().json
    out = ROOT / "dist"
    try:
        with TemporaryDirectory() as work:
            manifest = make_dist(out, Path(work))
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for file in manifest["files"]:
        print(f"dist/{file['file']}: {file['bytes']} bytes")
    print("dist/manifest.json: what they are")
    if to:
        about = environment.describe("cpu", ROOT)
        key = {"case": "dist", "vllm": records.vllm(about)}
        found = {k: manifest[k] for k in ("version", "built_with", "left_out")}
        found["files"] = [
            {k: v for k, v in file.items() if k != "sha256"}
            for file in manifest["files"]
        ]
        records.append(
            to, {"key": key, **about, "command": "make dist", "found": found}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
