#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts tables from results/*.json into README.md, results/README.md and docs/reach.md;
--check says whether they are there.

A block of a README between two comments belongs to this script:

    <!-- results: bench_cpu.json all -->
    ...
    <!-- /results -->

The first names a file in results/, or several, and a view (VIEWS); one of several takes
all that match. No number is typed into a README by hand: all come from a command in
those files. Exit status: 0 done, or up to date; 1 --check found a difference; 2 a block
or file that cannot be used, nothing was written.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT))

from benchmarks import reach, report, summary  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402
from benchmarks.report import BadBlock, Result  # noqa: E402

# Of each view the kinds of its files, and whether it takes several. Those that are not
# in MAKERS are templates (benchmarks/templates).
VIEWS = yaml.safe_load((ROOT / "benchmarks" / "views.yml").read_text("utf-8"))
MAKERS: dict[str, Callable[[Any], str]] = {
    "all": report.everything,
    "short": report.short,
    "methods": functools.partial(reach.tables, "method"),
    "models": functools.partial(reach.tables, "model"),
    "parallelism": functools.partial(reach.tables, "parallelism"),
    "refusals": functools.partial(reach.tables, "refusal"),
}
SHOWN = ("README.md", "results/README.md", "docs/reach.md", "docs/audit.md")
READMES = tuple(ROOT / name for name in SHOWN)
END = "<!-- /results -->"
BLOCK = re.compile(
    rf"(?P<open><!-- results: (?P<what>[^\n]*?) -->\n)(?P<body>.*?){END}", re.DOTALL
)


def load(path: Path, kind: str) -> Result:
    """The result in `path`. Raises BadBlock unless it is of that kind, or one of those
    kinds."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadBlock(f"{path.name} cannot be read: {error}") from error
    if not isinstance(result, dict) or result.get("kind") not in kind.split():
        raise BadBlock(f"{path.name} is not a file of kind {kind}")
    if kind == "bench_vllm" and result.get("schema") != summary.SCHEMA:
        raise BadBlock(f"{path.name} is not of schema {summary.SCHEMA}")
    return result


def block(what: str) -> str:
    """Markdown of "FILE... VIEW". Raises BadBlock."""
    *files, view = what.split(" ")
    if not files or view not in VIEWS:
        raise BadBlock(f"expected FILE and a view; views: {', '.join(VIEWS)}")
    of_several = VIEWS[view]["several"]
    globs = (RESULTS.glob(file) if of_several else [RESULTS / file] for file in files)
    paths = sorted(path for found in globs for path in found)
    if not paths:
        raise BadBlock(f"no file in results/ matches {' '.join(files)}")
    found = [load(path, VIEWS[view]["kind"]) for path in paths]
    if view in MAKERS:
        return MAKERS[view](found if of_several else found[0])
    return report.rendered(view, results=found, result=found[0])


def run(readme: Path, check: bool) -> int:
    """Renders or checks; returns the exit status. Raises BadBlock."""
    old = readme.read_text(encoding="utf-8")
    if not old.count("<!-- results: ") == old.count(END) == len(BLOCK.findall(old)):
        why = f"has no '{END}' after it, or an end without its start"
        raise BadBlock(f"a '<!-- results: FILE VIEW -->' {why}")
    stale = []

    def rendered(match: re.Match[str]) -> str:
        name = f"block '{match['what']}'"
        try:
            body = block(match["what"]) + "\n"
        except BadBlock as error:
            raise BadBlock(f"{name}: {error}") from error
        stale.extend([name] if body != match["body"] else [])
        return f"{match['open']}{body}{END}"

    new = BLOCK.sub(rendered, old)
    shown = readme.relative_to(ROOT) if readme.is_relative_to(ROOT) else readme.name
    if stale and check:
        said = f"{shown} is not what results/ says: {', '.join(stale)}; run: "
        print(f"{said}python tools/results/render.py", file=sys.stderr)
        return 1
    if stale:
        write_whole(readme, new.encode())
    print(f"{shown} is up to date with results/; blocks rendered anew: {len(stale)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing, compare")
    add("--readme", type=Path, nargs="+", default=READMES, help="files to render")
    args = parser.parse_args(argv)
    try:
        return max(run(one, args.check) for one in args.readme)
    except (BadBlock, OSError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
