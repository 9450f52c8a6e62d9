#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times tools/rebuild_nwor_extension.sh after a change of each kernel.

    python tools/results/time_rebuild.py --json FILE

In a copy of the checked-out commit, so that this checkout's library stays. Without CUDA
code and, if nvcc is on PATH, with code for ARCHS: a build from nothing, one with
nothing changed, and one for each source that holds kernels (*_cpu.cpp, or *.cu with
CUDA) after a line was added to it; the library must be another one afterwards, or the
time would mean nothing. Times are of the whole script, its check of the ops included.
Exit status: 0 done, 1 a build failed, or one after a change took longer than 30 s.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json  # noqa: E402

LIMIT_S = 30.0
ARCHS = "90"
NOTHING = "built from nothing"
# An exported symbol with a name of its own: what is linked is another library.
CHANGE = """
extern "C" {{
__attribute__((visibility("default"))) int nwor_changed_{n} = {n};
}}
"""


def kernels(folder: Path, cuda: str) -> list[Path]:
    """The sources that hold kernels, by name. cuda: "on" or "off"."""
    pattern = "*.cu" if cuda == "on" else "*_cpu.cpp"
    return sorted((folder / "csrc" / "nwor").glob(pattern))


def output(*command: str | Path) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def measure(folder: Path, cuda: str) -> Iterator[dict[str, Any]]:
    """One configuration, in a copy of the commit: an entry for each build, in order."""
    archive = output("git", "-C", ROOT, "archive", "HEAD")
    subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive)
    command = [folder / "tools/rebuild_nwor_extension.sh", "--cuda", cuda]
    command += ["--archs", ARCHS] if cuda == "on" else []
    library, before = folder / "vllm/v1/nwor/_nwor_C.so", b""
    steps = [NOTHING, "nothing changed", *kernels(folder, cuda)]
    for number, what in enumerate(steps):
        if isinstance(what, Path):
            before = library.read_bytes()
            with what.open("a") as file:
                file.write(CHANGE.format(n=number))
            what = str(what.relative_to(folder))
        started = time.perf_counter()
        subprocess.run(command, check=True, env=os.environ | {"PYTHON": sys.executable})
        seconds = round(time.perf_counter() - started, 2)
        if library.read_bytes() == before:
            raise RuntimeError(f"{what} changed, and the library did not")
        print(f"CUDA {cuda}: {what}: {seconds:.1f} s", flush=True)
        yield {"cuda": cuda, "what": what, "seconds": seconds}


def version(compiler: str) -> str:
    """The line of --version that has a version in it."""
    lines = output(compiler, "--version").decode().splitlines()
    found = [line for line in lines if re.search(r"\d", line)]
    return next((line for line in found if "release" in line), found[0]).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    args = parser.parse_args()
    choices = {"off": "c++"} | ({"on": "nvcc"} if shutil.which("nvcc") else {})
    neighbours, warnings = environment.Neighbours(), environment.warnings("cuda")
    compilers = {name: version(name) for name in choices.values()}
    builds = []
    for cuda in choices:
        with tempfile.TemporaryDirectory(prefix="nwor-rebuild-") as folder:
            builds += measure(Path(folder), cuda)
    result = {
        "kind": "rebuild",
        "schema": 1,
        "command": f"python tools/results/time_rebuild.py --json {args.json}",
        "environment": environment.describe("cpu", ROOT) | {"compilers": compilers},
        "archs": ARCHS if "on" in choices else None,
        "limit_s": LIMIT_S,
        "builds": builds,
        "warnings": warnings + neighbours.warnings(),
    }
    write_json(args.json, result)
    slow = [b for b in builds if b["what"] != NOTHING and b["seconds"] > LIMIT_S]
    for build in slow:
        print(f"too slow: {build}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
