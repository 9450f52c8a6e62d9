# SPDX-License-Identifier: Apache-2.0
"""Builds the native library, `_nwor_C.so`, with CMake and Ninja.

setup.py uses it for wheels and editable installs. The Makefile runs it as a program to
bring the checkout's library up to date; a build with nothing to do takes a fraction of
a second. Each configuration has a build directory of its own, so that switching between
CPU and CUDA recompiles nothing. The result is renamed into place: a process that has
the old library loaded keeps it whole.

CMakeLists.txt chooses compilers and flags.

Environment: NWOR_CUDA (AUTO, ON, OFF; AUTO means: if nvcc is on PATH) and
NWOR_CUDA_ARCHS (a CMake list such as "90" or "80;90"; empty for the default).
"""

from __future__ import annotations

import argparse
import fcntl
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm" / "v1" / "nwor"
LIBRARY = "_nwor_C.so"
CUDA_CHOICES = ("AUTO", "ON", "OFF")


class NativeBuildError(RuntimeError):
    """The library cannot be built here; the message says what to change."""


def cuda_choice() -> str:
    """NWOR_CUDA resolved to "ON" or "OFF"."""
    choice = os.environ.get("NWOR_CUDA", "").upper() or "AUTO"
    if choice not in CUDA_CHOICES:
        allowed = f"use one of {', '.join(CUDA_CHOICES)}"
        raise NativeBuildError(f"NWOR_CUDA={choice!r} is not allowed: {allowed}")
    found = "ON" if shutil.which("nvcc") else "OFF"
    return found if choice == "AUTO" else choice


def torch_dir() -> Path:
    """The directory of the installed torch package (found, not imported)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NativeBuildError(
            f"torch is not installed for {sys.executable}; its headers are needed. "
            "Install torch first, then build with: pip install --no-build-isolation ."
        )
    return Path(spec.submodule_search_locations[0])


def find_tool(name: str) -> str:
    """A program of this Python environment, else of PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    if (found := shutil.which(name, path=path)) is None:
        raise NativeBuildError(f"{name} is missing; run: pip install {name}")
    return found


def build(output_dir: Path) -> bool:
    """Builds the library and puts it into output_dir.

    Returns whether the file there changed. Raises NativeBuildError when something
    is missing, subprocess.CalledProcessError when CMake or a compiler fails.
    """
    cuda = cuda_choice()
    archs = os.environ.get("NWOR_CUDA_ARCHS", "") if cuda == "ON" else ""
    name = "-".join(["native", cuda.lower(), *re.findall(r"\w+", archs)])
    build_dir = ROOT / "build" / name
    staged = build_dir / "out"
    command = [find_tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", f"-DNWOR_CUDA={cuda}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-DTORCH_DIR={torch_dir()}"]
    command += [f"-DNWOR_OUTPUT_DIR={staged}"]
    command += [f"-DNWOR_CUDA_ARCHS={archs}"] if archs else []
    build_dir.mkdir(parents=True, exist_ok=True)
    with open(build_dir / "lock", "w") as lock:
        # Ninja does not expect another one in its directory.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run_cmake(command, build_dir)
        check_runtime(staged / LIBRARY)
        return _install(staged / LIBRARY, output_dir)


def check_runtime(library: Path) -> None:
    """Raises NativeBuildError unless the library shares libstdc++ with PyTorch.

    Some compilers link it statically unless told otherwise. PyTorch then cannot catch
    what an op throws: a refused argument ends the process.
    """
    if b"libstdc++.so" not in library.read_bytes():
        raise NativeBuildError(
            f"{library} does not use the shared libstdc++.so, as PyTorch does; set CXX "
            "to a compiler that links it dynamically, for example CXX=/usr/bin/g++"
        )


def _run_cmake(command: list[str], build_dir: Path) -> None:
    """Configures, if that was not done with this command, and builds."""
    # Written only after CMake succeeded: an interrupted configure is done again.
    stamp = build_dir / "configured.txt"
    if not stamp.is_file() or stamp.read_text() != "\n".join(command):
        (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(command, check=True)
        stamp.write_text("\n".join(command))
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    build = [command[0], "--build", str(build_dir), "-j", jobs, "--", "--quiet"]
    subprocess.run(build, check=True)


def _install(library: Path, output_dir: Path) -> bool:
    """Copies the library if its bytes differ, by a rename; whether it did."""
    target = output_dir / LIBRARY
    if target.is_file() and filecmp.cmp(library, target, shallow=False):
        return False
    output_dir.mkdir(parents=True, exist_ok=True)
    temporary = output_dir / f".{LIBRARY}.{os.getpid()}"
    shutil.copyfile(library, temporary)
    temporary.chmod(0o755)
    temporary.replace(target)
    return True


CHECK = "import sys; from nwor import ops; ops.load(sys.argv[1])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", type=str.upper, choices=CUDA_CHOICES)
    text = "see in a fresh process that the package's library has all ops"
    parser.add_argument("--check", action="store_true", help=text)
    args = parser.parse_args()
    os.environ["NWOR_CUDA"] = args.cuda or os.environ.get("NWOR_CUDA", "")
    try:
        build(PACKAGE)
    except NativeBuildError as error:
        sys.exit(f"native build: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"native build: `{Path(error.cmd[0]).name}` failed")
    if args.check:
        device = "cuda" if cuda_choice() == "ON" else "cpu"
        command = [sys.executable, "-c", CHECK, device]
        env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        if status := subprocess.run(command, env=env).returncode:
            sys.exit(status)
        print(f"check: the library is up to date, with all ops for {device}")


if __name__ == "__main__":
    main()
