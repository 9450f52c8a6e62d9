#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of code in each part of sizes.yml, next to the most it may have.

Exit status: 0 all parts are within their size; 1 one is larger, or has no file (its
folder has moved). Counts tracked files, and new ones that git does not ignore.
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
    wrong = []
    for name, part in sizes["parts"].items():
        lines = num_lines(part["paths"], sizes["suffixes"])
        print(f"{name}: {lines} lines, at most {part['most']}")
        if not 0 < lines <= part["most"]:
            wrong.append(f"sizes: {name}: {lines} lines; must be 1 to {part['most']}")
    if wrong:
        wrong.append("sizes: the limits are in tools/sizes.yml")
        print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
