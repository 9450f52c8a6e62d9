# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py prints (templates/report.md): from the result, the content of its
JSON file. The same text is what tools/results/render.py puts into results/README.md.
Also the environment of all templates, with numbers as they stand in texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import summary

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def columns(text: str, left: bool = False) -> str:
    """Lines of cells with "|" between them, aligned and indented: the first column to
    the left, the others to the right unless `left` is set."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *("<" if left else ">") * (len(widths) - 1)]
    shown = "  ".join(f"{{:{s}{w}}}" for s, w in zip(sides, widths, strict=True))
    return "".join(f"  {shown.format(*row)}".rstrip() + "\n" for row in rows)


def number(value: float) -> str:
    """A count with thin groups: 1234567 is 1 234 567."""
    return f"{value:,.0f}".replace(",", " ")


def size(num_bytes: float) -> str:
    """Bytes with a decimal unit, up to GB: 1500000 is 1.5 MB."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"
    power = min((len(f"{abs(num_bytes):.0f}") - 1) // 3, 3)
    return f"{num_bytes / 1000**power:.1f} {'KMG'[power - 1]}B"


def percent(share: float, digits: int = 1) -> str:
    """0.1234 is 12.3 %."""
    return f"{share * 100:.{digits}f} %"


def spread(ratio: Mapping[str, float]) -> str:
    """A median with its low and high end."""
    return f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"


def alike(acceptance: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """How often the draft at each position was accepted, and of how many windows;
    neighbours with the same count share a line: "1 to 3"."""
    counts = acceptance["accepted_per_position"], acceptance["per_position"]
    first = 1
    for (count, share), group in itertools.groupby(zip(*counts, strict=True)):
        last = first + len(list(group)) - 1
        yield " to ".join(map(str, sorted({first, last}))), count, share
        first = last + 1


def speed(side: dict[str, float]) -> str:
    """Tokens a second and latency, four cells."""
    latencies = f"{side['latency_s_median']:.3f} s | {side['latency_s_p95']:.3f} s"
    return f"{side['tokens_per_second']:.1f} | {latencies} | {side['num_runs']:.0f}"


_OURS = (columns, number, size, percent, spread, alike, speed, summary.own_process)
TEMPLATES.filters |= {one.__name__: one for one in _OURS}
TEMPLATES.globals["summary"] = summary


def text(result: dict[str, Any]) -> str:
    """The whole report."""
    return TEMPLATES.get_template("report.md").render(result=result).rstrip("\n")
