# SPDX-License-Identifier: Apache-2.0
"""Tables as plain text for a terminal and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """title, column heads, and rows of as many cells. The first column is aligned to
    the left, the others to the right unless `left` is set."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: bool = False

    def text(self) -> str:
        """Aligned columns under the title; a head of empty strings is left out."""
        lines = [self.head] if any(self.head) else []
        lines += list(self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        shown = [self.title] if self.title else []
        for line in lines:
            cells = [
                cell.ljust(width) if self.left or column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            shown.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(shown)

    def markdown(self) -> str:
        """A GitHub table under the title in bold."""
        rule = ["---" if self.left or i == 0 else "---:" for i in range(len(self.head))]
        lines = [self.head, tuple(rule), *self.rows]
        body = ["| " + " | ".join(cell for cell in line) + " |" for line in lines]
        return "\n".join([f"**{self.title}**", "", *body] if self.title else body)


def number(value: float) -> str:
    """A count with thin groups: 1234567 is 1 234 567."""
    return f"{value:,.0f}".replace(",", " ")


def size(num_bytes: float) -> str:
    """Bytes with a decimal unit: 1500000 is 1.5 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 1000 or unit == "GB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def percent(share: float, digits: int = 1) -> str:
    """0.1234 is 12.3 %."""
    return f"{share * 100:.{digits}f} %"


def spread(ratio: Mapping[str, float]) -> str:
    """A median with its low and high end."""
    return f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"
