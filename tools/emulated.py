#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' CPU tests with the wheel for aarch64 that `make dist` built, on an
emulated processor: QEMU's user mode, Debian's Python for it, PyTorch from PyPI (5 GB
in build/aarch64, kept). Not for timing, and not for engines: vLLM has no part in it.

    .venv/bin/python tools/emulated.py

Needs qemu-aarch64-static (Debian's qemu-user-static) and apt-get; no root. Further
arguments go to pytest. Exit status: pytest's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setup import setup_env

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "aarch64"
SYSTEM, SITE = WORK / "system", WORK / "site"
DEBS = ("python3.11", "libstdc++6", "libgomp1", "libffi8", "libssl3")
PACKAGES = ("torch==2.13.0", "numpy", "msgspec", "wrapt", "pytest", "hypothesis")
# Those that import no vLLM.
TESTS = ("test_transaction", "test_builtin_ops", "test_validation", "test_states")
CPU = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


def make_system() -> None:
    """Unpacks Debian's packages for aarch64, with package lists of their own."""
    state = WORK / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures::=arm64"]
    options += [f"Dir::State={state}", f"Dir::State::status={state / 'status'}"]
    options += [f"Dir::Cache={state / 'cache'}", "APT::Sandbox::User="]
    apt = ["apt-get", "-q", *(word for one in options for word in ("-o", one))]
    subprocess.run([*apt, "update"], check=True)
    what = ["install", "-y", "--download-only", "--no-install-recommends", *DEBS]
    subprocess.run([*apt, *what], check=True)
    for deb in (state / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, SYSTEM], check=True)
    # What PyTorch reads about the processor, as of a Neoverse N1.
    files = {"proc/cpuinfo": CPU}
    for number in range(os.cpu_count() or 1):
        folder = f"sys/devices/system/cpu/cpu{number}/regs/identification"
        files[f"{folder}/midr_el1"] = "0x00000000410fd0c0\n"
    for name, text in files.items():
        (SYSTEM / name).parent.mkdir(parents=True, exist_ok=True)
        (SYSTEM / name).write_text(text)


def main() -> int:
    if (qemu := shutil.which("qemu-aarch64-static")) is None:
        sys.exit("emulated: no qemu-aarch64-static: apt-get install qemu-user-static")
    wheels = list((ROOT / "dist").glob("vllm_nwor-*_aarch64.whl"))
    if len(wheels) != 1:
        sys.exit("emulated: dist/ has no wheel for aarch64; run: make dist")
    make_system()
    python = sys.executable
    uv = [python, "-m", "uv", "pip", "install", "-q", "--python", python]
    uv += ["--python-platform", "aarch64-manylinux_2_28", "--python-version", "3.11"]
    uv += ["--target", str(SITE), "--only-binary", ":all:"]
    env = {**os.environ, **setup_env.uv_environment()}
    subprocess.run([*uv, *PACKAGES], check=True, env=env)
    subprocess.run([*uv, "--no-deps", "--reinstall", *wheels], check=True, env=env)
    run = [qemu, "-cpu", "neoverse-n1", "-L", SYSTEM, SYSTEM / "usr/bin/python3.11"]
    tests = [ROOT / "tests" / "kernels" / f"{name}.py" for name in TESTS]
    env = {**os.environ, "PYTHONPATH": f"{SITE}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*run, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
