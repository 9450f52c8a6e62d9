#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts tables of results/ into README.md, results/README.md and DOCS; --check says
whether they are there.

The text between two comments belongs to this script:

    <!-- results: costs -->
    ...
    <!-- /results -->

The first names a view, a template in benchmarks/templates, and perhaps an argument of
it. No number is typed into a document by hand. Exit status: 0 done, or up to date; 1
--check found a difference; 2 a table that cannot be made, nothing was written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402

DOCS = tuple(
    f"docs/{name}.md" for name in ("reach", "audit", "rl", "operations", "connectors")
)
SHOWN = ("README.md", "results/README.md", *DOCS)
END = "<!-- /results -->"
BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<view>\S+) ?(?P<argument>\S*) -->\n)(?P<body>.*?)"
    + END,
    re.DOTALL,
)


def run(document: Path, check: bool) -> int:
    """Renders or checks; returns the exit status. Raises report.BadBlock."""
    old = document.read_text(encoding="utf-8")
    if not old.count("<!-- results:") == old.count(END) == len(BLOCK.findall(old)):
        raise report.BadBlock(
            f"{document.name}: a '<!-- results: VIEW -->' has no '{END}' after it, or "
            "an end has no start"
        )
    stale = []

    def rendered(match: re.Match[str]) -> str:
        body = report.rendered(match["view"], argument=match["argument"]) + "\n"
        stale.extend([match["view"]] if body != match["body"] else [])
        return f"{match['open']}{body}{END}"

    new = BLOCK.sub(rendered, old)
    if stale and check:
        said = f"{document.name} differs from results/: {', '.join(stale)}; run: "
        print(f"{said}python tools/results/render.py", file=sys.stderr)
        return 1
    if stale:
        write_whole(document, new.encode())
    print(f"{document.name} is up to date with results/; rendered: {len(stale)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    names = [ROOT / name for name in SHOWN]
    text = "documents to render"
    parser.add_argument("--readme", type=Path, nargs="+", default=names, help=text)
    args = parser.parse_args(argv)
    try:
        return max(run(one, args.check) for one in args.readme)
    except (report.BadBlock, OSError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
