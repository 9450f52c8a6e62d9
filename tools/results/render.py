#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts tables and plots from results/*.json into README.md and results/README.md;
--check tells if they are there.

A block of a README between two comments belongs to this script:

    <!-- results: bench_cpu.json speed -->
    ...
    <!-- /results -->

The first names a file in results/ and a view; of views marked * the name may hold *.

    of bench_vllm.py          machine, speed, ratio, acceptance, nwor, words, plot, all;
                              cells*, a line a file; blocks*, a line an engine; of a
                              named shape bytes*
    of bench_kernels.py       kernels
    of tools/soak/soak.py     soak
    of tools/gpu              host*, traffic
    of tests/gpu              engines, sleep

A plot is drawn beside its file, results/bench_cpu.png, and drawn again when the samples
it shows are no longer the file's.

No number is typed into a README by hand: all come from a command in those files. Exit
status: 0 done, or up to date; 1 --check found a difference; 2 a block or file that
cannot be used, nothing was written.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import plot, summary, views  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402
from benchmarks.views import VIEWS, BadBlock, Result  # noqa: E402

BENCH, PLOT = "bench_vllm", "plot"
View = Callable[[Result], str]
# Views of a file, and of all files that match, by name, with the files' kind.
OF_ONE: dict[str, tuple[str, View]] = {
    "engines": ("gpu_engines", views.engines),
    "sleep": ("gpu_sleep", views.sleep),
    "traffic": ("gpu_traffic", views.traffic),
    "kernels": ("bench_kernels", views.kernels),
    "soak": ("soak", views.soak),
}
OF_SEVERAL: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {
    "cells": (BENCH, views.cells),
    "blocks": (BENCH, views.blocks),
    "bytes": (BENCH, views.moved_bytes),
    "host": ("host_profile", views.host),
}

READMES = (ROOT / "README.md", ROOT / "results" / "README.md")
COMMAND = "python tools/results/render.py"
OPEN = re.compile(r"<!-- results: (?P<what>.*?) -->")
BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<what>[^\n]*?) -->\n)(?P<body>.*?)"
    r"(?P<close><!-- /results -->)",
    re.DOTALL,
)


def load(path: Path, kind: str) -> Result:
    """The result in `path`. Raises BadBlock unless it is a file of that kind."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadBlock(f"{path.name} cannot be read: {error}") from error
    if not isinstance(result, dict) or result.get("kind") != kind:
        raise BadBlock(f"{path.name} is not a file of kind {kind}")
    if kind == BENCH and result.get("schema") != summary.SCHEMA:
        raise BadBlock(f"{path.name} is not of schema {summary.SCHEMA}")
    return result


class Renderer:
    """Renders blocks; `stale_plots` collects those that are to be drawn.

    results: folder of the JSON files. link: how the README names that folder.
    """

    def __init__(self, results: Path, link: str) -> None:
        self.results = results
        self.link = link
        self.stale_plots: dict[Path, Result] = {}

    def readme(self, text: str) -> str:
        """`text` with every block rendered.

        Raises:
            BadBlock: naming the block and why it cannot be rendered.
        """
        num_open = len(OPEN.findall(text))
        if num_open != len(BLOCK.findall(text)) or num_open != text.count(
            "<!-- /results -->"
        ):
            raise BadBlock(
                "a '<!-- results: FILE VIEW -->' has no '<!-- /results -->' after it, "
                "or the other way round"
            )
        return BLOCK.sub(self._block, text)

    def _block(self, match: re.Match[str]) -> str:
        what = match["what"]
        try:
            body = self.view(*self._parse(what))
        except BadBlock as error:
            raise BadBlock(f"block '{what}': {error}") from error
        return f"{match['open']}{body}\n{match['close']}"

    def _parse(self, what: str) -> tuple[str, str]:
        known = [*VIEWS, *OF_ONE, *OF_SEVERAL, PLOT]
        parts = what.split()
        if len(parts) != 2 or parts[1] not in known:
            raise BadBlock(f"expected FILE and a view; views: {', '.join(known)}")
        return parts[0], parts[1]

    def view(self, file: str, view: str) -> str:
        """Markdown of one view. Raises BadBlock."""
        if view in OF_SEVERAL:
            kind, render = OF_SEVERAL[view]
            paths = sorted(self.results.glob(file))
            if not paths:
                raise BadBlock(f"no file in results/ matches {file}")
            return render([load(path, kind) for path in paths])
        kind, render_one = OF_ONE.get(view, (BENCH, VIEWS.get(view, self._plot)))
        return render_one(load(self.results / file, kind) | {"file": file})

    def _plot(self, result: Result) -> str:
        if result["mode"] != "compare":
            raise BadBlock(f"a plot needs mode compare, not {result['mode']}")
        image = (self.results / result.pop("file")).with_suffix(".png")
        if not image.is_file() or plot.digest_of(image) != plot.samples_digest(result):
            self.stale_plots[image] = result
        tested = ", ".join(summary.tested(result))
        name = f"{tested} against {result['baseline']}, each pair's ratio"
        return f"![{name}]({self.link}/{image.name})"


def run(readme: Path, results: Path, check: bool) -> int:
    """Renders or checks; returns the exit status. Raises BadBlock."""
    old = readme.read_text(encoding="utf-8")
    renderer = Renderer(results, results.name)
    new = renderer.readme(old)
    stale = [path.name for path in renderer.stale_plots]
    if check:
        blocks = zip(BLOCK.finditer(old), BLOCK.finditer(new), strict=True)
        stale += [f"block '{a['what']}'" for a, b in blocks if a["body"] != b["body"]]
        if stale:
            print(
                f"{shown(readme)} is not what results/ says: {', '.join(stale)}; run: "
                f"{COMMAND}",
                file=sys.stderr,
            )
            return 1
        print(f"{shown(readme)} is up to date with results/")
        return 0
    for path, result in renderer.stale_plots.items():
        write_whole(path, functools.partial(plot.draw, result))
    if new != old:
        write_whole(readme, lambda temporary: _write(temporary, new))
    print(f"{shown(readme)}: {len(OPEN.findall(new))} blocks, {len(stale)} plots drawn")
    return 0


def shown(readme: Path) -> str:
    """Its path from the repository on, if it is in there."""
    inside = readme.is_relative_to(ROOT)
    return str(readme.relative_to(ROOT)) if inside else readme.name


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument(
        "--readme", type=Path, nargs="+", default=READMES, help="files to render"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    args = parser.parse_args(argv)
    try:
        return max(run(one, args.results, args.check) for one in args.readme)
    except (BadBlock, OSError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
