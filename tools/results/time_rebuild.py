#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times tools/rebuild_nwor_extension.sh after a change of each kernel.

    python tools/results/time_rebuild.py [--cuda on|off|both] [--archs LIST] [--json F]

In a copy of the checked-out commit, so that this checkout's library stays. For each
configuration: a build from nothing, one with nothing changed, and one for each source
that holds kernels (*_cpu.cpp, or *.cu with CUDA) after a line was added to it; the
library must be another one afterwards, or the time would mean nothing. Times are of
the whole script, its check of the ops included. Exit status: 0 done, 1 a build failed,
or one after a change took longer than 30 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json  # noqa: E402

SCRIPT = "tools/rebuild_nwor_extension.sh"
LIBRARY = "vllm/v1/nwor/_nwor_C.so"
LIMIT_S = 30.0
NOTHING, UNCHANGED = "built from nothing", "nothing changed"
# An exported symbol with a name of its own: what is linked is another library.
CHANGE = """
extern "C" {{
__attribute__((visibility("default"))) int nwor_changed_{n} = {n};
}}
"""


def copy_commit(folder: Path) -> None:
    """Puts the files of the checked-out commit into `folder`."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True
    )
    command = ["tar", "-x", "-C", str(folder)]
    subprocess.run(command, check=True, input=archive.stdout)


def kernels(folder: Path, cuda: str) -> list[Path]:
    """The sources that hold kernels, by name. cuda: "on" or "off"."""
    pattern = "*.cu" if cuda == "on" else "*_cpu.cpp"
    return sorted((folder / "csrc" / "nwor").glob(pattern))


def rebuild(folder: Path, cuda: str, archs: str) -> float:
    """Runs the script in `folder`; its seconds. CalledProcessError if it fails."""
    command = [str(folder / SCRIPT), "--cuda", cuda]
    if cuda == "on":
        command += ["--archs", archs]
    started = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable})
    return time.perf_counter() - started


def measure(folder: Path, cuda: str, archs: str) -> list[dict[str, Any]]:
    """One configuration: an entry for each build, in order."""

    def entry(what: str) -> dict[str, Any]:
        seconds = round(rebuild(folder, cuda, archs), 2)
        print(f"CUDA {cuda}: {what}: {seconds:.1f} s", flush=True)
        return {"cuda": cuda, "what": what, "seconds": seconds}

    found = [entry(NOTHING), entry(UNCHANGED)]
    library = folder / LIBRARY
    for number, source in enumerate(kernels(folder, cuda), start=1):
        before = library.read_bytes()
        with source.open("a") as file:
            file.write(CHANGE.format(n=number))
        found.append(entry(str(source.relative_to(folder))))
        if library.read_bytes() == before:
            raise RuntimeError(f"{source.name} changed, and the library did not")
    return found


def version(*command: str) -> str:
    """The line of a compiler's --version that has a version in it."""
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if any(map(str.isdigit, line))]
    return next((line for line in lines if "release" in line), lines[0]).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", choices=("on", "off", "both"), default="both")
    parser.add_argument("--archs", default="90", help="compute capabilities")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there")
    args = parser.parse_args()
    choices = ("off", "on") if args.cuda == "both" else (args.cuda,)
    neighbours = environment.Neighbours()
    compilers = {"c++": version("c++", "--version")}
    if "on" in choices:
        compilers["nvcc"] = version("nvcc", "--version")
    result: dict[str, Any] = {
        "kind": "rebuild",
        "schema": 1,
        "command": " ".join(["python", "tools/results/time_rebuild.py", *sys.argv[1:]]),
        "environment": environment.describe("cpu", ROOT) | {"compilers": compilers},
        "archs": args.archs if "on" in choices else None,
        "limit_s": LIMIT_S,
    }
    warnings = environment.warnings("cuda")
    builds: list[dict[str, Any]] = []
    for cuda in choices:
        with tempfile.TemporaryDirectory(prefix="nwor-rebuild-") as folder:
            copy_commit(Path(folder))
            builds += measure(Path(folder), cuda, args.archs)
    result |= {"builds": builds, "warnings": warnings + neighbours.warnings()}
    if args.json:
        write_json(args.json, result)
    slow = [b for b in builds if b["what"] != NOTHING and b["seconds"] > LIMIT_S]
    for build in slow:
        print(f"too slow: {build}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
