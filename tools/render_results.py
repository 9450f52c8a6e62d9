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
    of tools/soak.py          soak
    of tools/host_profile.py  host*
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import plot, summary, views  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402
from benchmarks.views import VIEWS, BadBlock, Result  # noqa: E402

READMES = (ROOT / "README.md", ROOT / "results" / "README.md")
COMMAND = "python tools/render_results.py"
OPEN = re.compile(r"<!-- results: (?P<what>.*?) -->")
BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<what>[^\n]*?) -->\n)(?P<body>.*?)"
    r"(?P<close><!-- /results -->)",
    re.DOTALL,
)


PLOT, CELLS, KERNELS, SOAK, HOST = "plot", "cells", "kernels", "soak", "host"
ENGINES, BYTES, SLEEP, BLOCKS = "engines", "bytes", "sleep", "blocks"
TRAFFIC = "traffic"


def load(path: Path, made_by: str = "bench_vllm.py", kind: str | None = None) -> Result:
    """The result in `path`. Raises BadBlock unless `made_by` wrote it; with `kind`,
    unless it is a file of that kind."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadBlock(f"{path.name} cannot be read: {error}") from error
    if kind is not None:
        if not isinstance(result, dict) or result.get("kind") != kind:
            raise BadBlock(f"{path.name} is not a file of kind {kind}")
        return result
    command = result.get("command", "") if isinstance(result, dict) else ""
    if made_by not in command.split():
        raise BadBlock(f"{path.name} is not a result of {made_by}")
    if made_by == "bench_vllm.py" and result.get("schema") != summary.SCHEMA:
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
        parts = what.split()
        known = [*VIEWS, PLOT, CELLS, KERNELS, SOAK, HOST]
        known += [ENGINES, BYTES, SLEEP, BLOCKS, TRAFFIC]
        if len(parts) != 2 or parts[1] not in known:
            raise BadBlock(f"expected FILE and a view; views: {', '.join(known)}")
        return parts[0], parts[1]

    def view(self, file: str, view: str) -> str:
        """Markdown of one view. Raises BadBlock."""
        if view == ENGINES:
            return views.engines(load(self.results / file, kind="gpu_engines"))
        if view == SLEEP:
            return views.sleep(load(self.results / file, kind="gpu_sleep"))
        if view == TRAFFIC:
            return views.traffic(load(self.results / file, kind="gpu_traffic"))
        if view in (CELLS, HOST, BYTES, BLOCKS):
            paths = sorted(self.results.glob(file))
            if not paths:
                raise BadBlock(f"no file in results/ matches {file}")
            if view == CELLS:
                return views.cells([load(path) for path in paths])
            if view == BLOCKS:
                return views.blocks([load(path) for path in paths])
            if view == BYTES:
                return views.moved_bytes([load(path) for path in paths])
            return views.host([load(path, "tools/host_profile.py") for path in paths])
        if view == KERNELS:
            return views.kernels(load(self.results / file, "bench_kernels.py"))
        if view == SOAK:
            return views.soak(load(self.results / file, "tools/soak.py"))
        result = load(self.results / file)
        if view != PLOT:
            return VIEWS[view](result)
        if result["mode"] != "compare":
            raise BadBlock(f"a plot needs mode compare, not {result['mode']}")
        image = (self.results / file).with_suffix(".png")
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
        print(f"render_results: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
