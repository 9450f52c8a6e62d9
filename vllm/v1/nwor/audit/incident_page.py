# SPDX-License-Identifier: Apache-2.0
"""An explained incident as an HTML page that loads nothing: the words of its cases
(cases.py), and for each a drawing of the block's history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from .incident_cases import NOBODY, Case, Event, Span

# Sign, color, meaning.
MARKS = {
    "write": ("●", "#1b6e3c", "last write before the finding"),
    "found": ("▼", "#1f5fbf", "found in the cache"),
    "load": ("◆", "#8a3fbf", "filled by a KV connector"),
    "store": ("◇", "#8a3fbf", "read by a KV connector"),
    "copied": ("■", "#7a5c00", "copied to, or zeroed"),
    "weights": ("▲", "#b35900", "weights changed, or the cache was dropped"),
    "finding": ("✖", "#c00020", "finding"),
}
COLORS = ("#8ecae6", "#ffd166", "#a7d8a0", "#e5b3fe", "#f4a6a0", "#c9c9c9")
LEFT, WIDTH, ROW, TOP = 190, 760, 30, 26
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; }
h2 { font-size: 1.1em; margin: 2em 0 .5em; }
svg { width: 100%; font-size: 13px; background: #fafafa; border: 1px solid #ddd; }
.mark { font-size: 15px; } .tick { font-size: 11px; fill: #555; }
li { overflow-wrap: anywhere; }
"""


def _text(x: float, y: int, text: str, about: str, title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text x="{x:.1f}" y="{y}" {about}>{escape(text)}{tip}</text>'


def _marks(case: Case) -> list[Event]:
    one, writer = case.finding, case.finding.writer
    found = [event for event in case.history.events if event.mark]
    if writer.step and one.kind != "foreign_write":
        name = writer.request or NOBODY
        found.append(Event(writer.step, "write", f"{name} wrote it", name))
    return [*found, Event(one.step, "finding", case.title(), case.user or NOBODY)]


def drawing(case: Case, colors: dict[str, str]) -> str:
    """An SVG: steps to the right, a row for each request that had the block. colors: of
    requests; mutated."""
    first, last = case.history.first, max(case.history.last, case.finding.step)
    unit, middle = WIDTH / (last - first + 1), 'text-anchor="middle"'

    def x(step: int) -> float:
        return LEFT + (max(step, first) - first) * unit

    def end(span: Span) -> int:
        return last if span.last is None else span.last

    spans = [span for span in case.history.spans if end(span) >= first]
    marks = [event for event in _marks(case) if first <= event.step <= last]
    names = [*(span.request for span in spans), *(event.request for event in marks)]
    rows = {name: TOP + n * ROW for n, name in enumerate(dict.fromkeys(names))}
    parts = []
    for step in range(first, last + 1, (last - first) // 12 + 1):
        parts.append(_text(x(step) + unit / 2, 16, str(step), f'class="tick" {middle}'))
    for name, y in rows.items():
        label = name if len(name) <= 26 else f"{name[:25]}…"
        parts.append(_text(LEFT - 8, y + 19, label, 'text-anchor="end"', name))
    for span in spans:
        color = colors.setdefault(span.request, COLORS[len(colors) % len(COLORS)])
        y, width = rows[span.request], x(end(span) + 1) - x(span.first)
        parts.append(
            f'<rect x="{x(span.first):.1f}" y="{y + 3}" width="{width:.1f}" '
            f'height="{ROW - 6}" rx="3" fill="{color}"><title>'
            f"{escape(f'{span.request} {span.text()}')}</title></rect>"
        )
        if span.first < first:
            text = f"◂ {span.first}"
            parts.append(_text(LEFT + 3, y + 19, text, 'class="tick"'))
    num_drawn = Counter[tuple[str, int]]()
    for step, mark, text, name in marks:
        sign, color, _ = MARKS[mark]
        about = f'class="mark" fill="{color}" {middle}'
        # Those of one place stand one above the other.
        num_drawn[name, step] += 1
        y = rows[name] + 33 - 12 * num_drawn[name, step]
        parts.append(_text(x(step) + unit / 2, y, sign, about, f"step {step}: {text}"))
    height = TOP + ROW * len(rows) + 4
    return (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 10} {height}" role="img">'
        f"{''.join(parts)}</svg>"
    )


def page(lines: Sequence[str], cases: Sequence[Case]) -> str:
    legend = " &nbsp; ".join(
        f'<span style="color: {color}">{sign}</span>&nbsp;{text}'
        for sign, color, text in MARKS.values()
    )
    parts = [*(f"<p>{escape(line)}</p>" for line in lines), f"<p>{legend}</p>"]
    colors: dict[str, str] = {}
    for number, case in enumerate(cases, 1):
        texts = "".join(f"<li>{escape(line)}</li>" for line in case.lines())
        parts.append(f"<h2>{number}. {escape(case.title())}</h2>")
        parts.append(f"{drawing(case, colors)}<ul>{texts}</ul>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>KV audit: an incident</title><style>{STYLE}</style>{''.join(parts)}"
    )
