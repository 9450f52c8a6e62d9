#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of code in each room of sizes.yml, next to the most it may have.

Exit status: 0 all rooms are within their size; 1 one is larger, or holds no file (a
folder has moved). Counts the files that git tracks and new ones that it does not ignore.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def num_lines(paths: list[str], suffixes: list[str]) -> int:
    """Lines of the files with these suffixes at these paths, as in sizes.yml."""
    specs = [f":(exclude){path[1:]}" if path[0] == "!" else path for path in paths]
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *specs]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    files = {ROOT / name for name in listed if Path(name).suffix in suffixes}
    # A file that was deleted, and not yet from git's index, has no lines.
    return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def main() -> int:
    sizes = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text("utf-8"))
    is_exceeded = False
    for name, room in sizes["rooms"].items():
        lines, most = num_lines(room["paths"], sizes["suffixes"]), room["most"]
        verdict = (
            "" if 0 < lines <= most else "  <-- too large" if lines else "  <-- empty"
        )
        is_exceeded |= bool(verdict)
        print(f"{name}: {lines} lines, at most {most}{verdict}")
    if is_exceeded:
        print(
            "sizes: make it smaller; or raise the number in tools/sizes.yml and say why",
            file=sys.stderr,
        )
    return int(is_exceeded)


if __name__ == "__main__":
    sys.exit(main())
