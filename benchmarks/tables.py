# SPDX-License-Identifier: Apache-2.0
"""The templates of texts about results, and numbers as they stand there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jinja2

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


_OURS = (columns, number, size, percent, spread)
TEMPLATES.filters |= {one.__name__: one for one in _OURS}
