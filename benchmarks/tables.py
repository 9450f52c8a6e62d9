# SPDX-License-Identifier: Apache-2.0
"""Tables as plain text, and numbers as they stand in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False
) -> str:
    """Aligned columns under the title; a head of empty strings is left out. The first
    column is aligned to the left, the others to the right unless `left` is set."""
    lines = [*([head] if any(head) else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [title]
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(cell.ljust(width) if left else cell.rjust(width))
        shown.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(shown)


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
