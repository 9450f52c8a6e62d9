# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nwor.audit explain FILE [--html OUT]`: an incident file in words, and
the history of the blocks that its findings name.

It needs neither vLLM nor a GPU. What it says follows from the scheduler's output of the
recorded steps; it does not know what the bytes were.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..metrics import FINDINGS
from .findings import Finding, write_whole
from .incident import Incident, Report, read

# Where to look, by class; docs/audit.md has the same words.
CAUSES = {
    "foreign_write": "a stale slot mapping or block table; blocks handed out twice; a "
    "write to a prefix that others share",
    "wrong_prefix": "two requests' tables mixed up; a hash collision or a wrong key in "
    'a prefix cache; a prefix that was cached before it was complete; with "its '
    'content was lost in a sleep" in `found`: a prefix cache that was kept when a '
    "sleep dropped the KV cache (vLLM's own `sleep` resets it; a framework that drives "
    "the allocator itself must, too)",
    "changed": "a copy or a load to the wrong block, or one that came late; a kernel "
    "that writes out of bounds; in modes cow and stage also a rejected draft that was "
    "not undone",
    "missing_write": "a layer or kernel that skipped a slot; a write that went "
    "elsewhere; rows of NaN in the place of rows of NaN",
    "handed_on": "a KV connector stores a block with a slot that was not committed: it "
    "will be loaded for another request; or, with a layer named, what came back is not "
    "what was stored: host memory that changed, a copy of another block, a write that "
    "came behind the load (OffloadingConnector only)",
    "never_loaded": "a load was reported done, and the block still holds the text of "
    "before, or holds it again: a late write may have put it back",
    "stale_state": "a recurrent state of the request's own, but of another position: "
    "the number of accepted drafts that the kernels use is wrong",
    "foreign_state": "block tables of two requests are mixed up; `writer` is the other "
    "one. In the first step of a request: the prefix cache has the state of another "
    "text",
    "changed_state": "a recurrent state was overwritten, or a copy of its block was "
    "left out",
    "state_not_written": "a kernel left a request or a layer out; vLLM's V1 runner "
    "replayed a CUDA graph of decodes for a step with prompts (#53051); or vLLM did "
    "not copy the state of a block's end that the accepted drafts passed, and the "
    "prefix cache has that block",
    "no_state_yet": (
        NO_STATE := "a request is taken for one that has a state at its begin, so it "
        "gets that of the block's last owner; or for one that has none in the middle "
        "of its text, or whose prefix is in the null block"
    ),
    "state_lost": NO_STATE,
    "state_ahead": "the one state that a request keeps has drafts in it that were "
    "rejected",
    "ring_overwritten": "drafts that were rejected overwrote a row that a layer still "
    "needed: its ring is too small; or a write from elsewhere",
    "stale_weights": "weights were changed and the prefix cache was kept: a refit in "
    "reinforcement learning, a reload, an adapter that was replaced under its name",
}


class Span(NamedTuple):
    """Steps in which a request had a block. last: None if it still has it. place: in
    the table. is_found: it was in the cache, or loaded, when the request came."""

    request: str
    group: int
    place: int
    first: int
    last: int | None
    is_found: bool
    why: str

    def covers(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def text(self) -> str:
        how = "found it" if self.is_found else "was given it"
        end = "still has it" if self.last is None else f"to step {self.last}"
        why = self.why and f" ({self.why})"
        return f"{how} in step {self.first} as its block {self.place}, {end}{why}"


class Event(NamedTuple):
    """What happened to a block. mark: of the drawing, "" for none; it stands in the row
    of `request`."""

    step: int
    mark: str
    text: str
    request: str = ""


class History:
    """Of one block. Blocks of all KV-cache groups have one numbering. spans: the oldest
    first. events: in order. first, last: steps in the file."""

    def __init__(self, incident: Incident, block: int) -> None:
        self.block = block
        steps = incident.steps
        self.first = steps[0].step if steps else 0
        self.last = steps[-1].step if steps else 0
        ended = [table for record in steps for table in record.ended]
        self.spans = sorted(
            Span(
                table.request,
                group,
                index,
                since[index],
                table.until,
                since[index] == table.since and index * size < table.num_found,
                table.why,
            )
            for table in [*ended, *incident.tables]
            for group, (ids, since, size) in enumerate(
                zip(table.blocks, table.steps, incident.block_sizes, strict=True)
            )
            for index, number in enumerate(ids)
            if number == block
        )
        self.spans.sort(key=lambda span: span.first)
        found = [*self._of_spans(), *self._of_steps(incident)]
        self.events = sorted(found, key=lambda event: event.step)

    def _of_spans(self) -> Iterator[Event]:
        for span in self.spans:
            name, mark, text = span.request, "", "was given this block"
            if span.is_found:
                mark, text = "found", "found this block in the cache, or it was loaded"
            yield Event(span.first, mark, f"{name} {text}", name)
            if span.last is not None:
                yield Event(span.last, "", f"{name} gave it back: {span.why}", name)

    def _of_steps(self, incident: Incident) -> Iterator[Event]:
        for record in incident.steps:
            step = record.step
            for transfer in record.transfers:
                if any(self.block in ids for ids in transfer.blocks):
                    what = "filled" if transfer.fills else "read"
                    kind = "load" if transfer.fills else "store"
                    yield Event(step, kind, f"a KV connector {what} it")
            if self.block in record.zeroed:
                yield Event(step, "copied", "vLLM zeroed it")
            for source, to in record.copied:
                if to == self.block:
                    yield Event(step, "copied", f"vLLM copied block {source} to it")
            if record.is_cache_lost:
                text = "the content of the cache was dropped, as in a sleep"
                yield Event(step, "weights", text)
        for one, two in pairwise(incident.steps):
            if one.epoch != two.epoch:
                label = two.label and f" ({two.label})"
                text = f"weights changed: epoch {one.epoch} to {two.epoch}{label}"
                yield Event(two.step, "weights", text)

    def holders(self, step: int) -> list[str]:
        return list(dict.fromkeys(s.request for s in self.spans if s.covers(step)))


class Case(NamedTuple):
    """The first finding of a class in a block, and how many more there are."""

    finding: Finding
    num_more: int
    history: History

    def title(self) -> str:
        one = self.finding
        return f"{one.kind} in step {one.step}: {FINDINGS.get(one.kind, 'unknown')}"

    def lines(self) -> list[str]:
        return [
            self._place(),
            *self._who(),
            *self._table(),
            *self._between(),
            f"Usual causes: {CAUSES.get(self.finding.kind, 'see docs/audit.md')}.",
        ]

    def _place(self) -> str:
        one = self.finding
        what = f"slot {one.slot}" if one.slot is not None else f"column {one.column}"
        where = f"block {one.block} (KV-cache group {one.group}), {what}"
        layer = f"layer {one.layer}, {one.num_layers} in all" if one.layer else ""
        more = f"{self.num_more} more findings of this class in this block"
        return "; ".join(
            part
            for part in (
                f"Where: {where}, position {one.position}",
                layer or "no layer in particular",
                f"expected {one.expected}, found {one.found}",
                more if self.num_more else "",
            )
            if part
        )

    def _who(self) -> list[str]:
        one, writer = self.finding, self.finding.writer
        owner = one.owner or "nobody"
        if one.kind == "foreign_write":
            text = f"{writer.request} was about to write to it, and {owner} owns it"
        elif writer.request is None:
            text = f"{owner} reads it; nobody that is known wrote it"
        else:
            when = f"step {writer.step}"
            if writer.step < self.history.first:
                when += f", before those in this file (from {self.history.first})"
            who = "itself" if writer.request == owner else writer.request
            text = f"{owner} reads it, and {who} wrote it last, in {when}"
        found = [f"Who: {text}."]
        if weights := one.weights:
            of = {key: f"epoch {about['epoch']}" for key, about in weights.items()}
            found.append(f"Weights: it was computed by {of['written']}, not of now.")
        return found

    def _table(self) -> list[str]:
        """Whether the request that uses the block has it by the scheduler's output."""
        one, history = self.finding, self.history
        user = one.writer.request if one.kind == "foreign_write" else one.owner
        found = [f"History: {span.request} {span.text()}." for span in history.spans]
        if not found:
            found = ["History: no request had it in the steps of this file."]
        holders = history.holders(one.step)
        if user and user not in holders and history.last:
            others = " and ".join(holders) or "nobody"
            found.append(
                f"Conclusion: by the scheduler's output {others} had this block in "
                f"step {one.step}, and {user} did not. The block table or the slots of "
                f"{user} are wrong."
            )
        return found

    def between(self) -> list[Event]:
        """Events since the last write, up to the finding."""
        one = self.finding
        first = one.writer.step or self.history.first
        return [e for e in self.history.events if first <= e.step <= one.step]

    def _between(self) -> list[str]:
        one, since = self.finding, "the last write"
        if not one.writer.step or one.writer.step < self.history.first:
            since = f"step {self.history.first}"
        events = self.between()
        if not events:
            return [
                f"Since {since}: nothing that the scheduler ordered concerns this "
                "block: no other request, prefix hit, preemption, load, copy or change "
                "of weights."
            ]
        return [f"Since {since}, step {e.step}: {e.text}." for e in events]


def cases(incident: Incident, report: Report) -> list[Case]:
    found: dict[tuple[str, int, int], list[Finding]] = {}
    for finding in report.findings:
        key = finding.kind, finding.group, finding.block
        found.setdefault(key, []).append(finding)
    return [
        Case(of[0], len(of) - 1, History(incident, of[0].block))
        for of in found.values()
    ]


def head(path: Path, incident: Incident, report: Report) -> list[str]:
    engine, steps = incident.engine, incident.steps
    span = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"
    connector = engine.connector or "none"
    return [
        f"{path}: {report.num_findings} findings; written {incident.written} "
        f"({incident.why})",
        f"vLLM {report.vllm}, vllm-nwor {report.nwor}, torch {report.torch}; mode "
        f"{engine.mode}, audit {report.audit}; model {engine.model}; KV connector "
        f"{connector}",
        f"It has {span}; the audit has looked at {report.steps} in all.",
    ]


# -- the drawing -----------------------------------------------------------------------

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


def drawing(case: Case) -> str:
    """An SVG: steps to the right, a row for each request that had the block."""
    one, history = case.finding, case.history
    names = list(dict.fromkeys(span.request for span in history.spans))
    user = one.writer.request if one.kind == "foreign_write" else one.owner
    for name in (one.writer.request, user):
        if name and name not in names:
            names.append(name)
    names.append("")  # of no request
    first, last = history.first, max(history.last, one.step)
    unit = WIDTH / (last - first + 1)

    def x(step: float) -> float:
        return LEFT + (min(max(step, first), last + 1) - first) * unit

    parts = []
    for row, name in enumerate(names):
        y = TOP + row * ROW
        label = name if len(name) <= 26 else f"{name[:25]}…"
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{escape(label)}'
            f"<title>{escape(name)}</title></text>"
        )
    for span in history.spans:
        row, end = names.index(span.request), last if span.last is None else span.last
        if end < first:
            continue
        parts.append(
            f'<rect x="{x(span.first):.1f}" y="{TOP + row * ROW + 3}" '
            f'width="{x(end + 1) - x(span.first):.1f}" height="{ROW - 6}" rx="3" '
            f'fill="{COLORS[row % len(COLORS)]}"><title>'
            f"{escape(f'{span.request} {span.text()}')}</title></rect>"
        )
    marks = list(history.events)
    if one.writer.step and one.kind != "foreign_write":
        writer = one.writer.request or ""
        marks.append(Event(one.writer.step, "write", f"{writer} wrote it", writer))
    marks.append(Event(one.step, "finding", case.title(), user or ""))
    for step, mark, text, name in marks:
        if mark and first <= step <= last:
            sign, color, _ = MARKS[mark]
            parts.append(
                f'<text x="{x(step) + unit / 2:.1f}" '
                f'y="{TOP + names.index(name) * ROW + 20}" text-anchor="middle" '
                f'fill="{color}" class="mark">{sign}<title>step {step}: '
                f"{escape(text)}</title></text>"
            )
    for step in range(first, last + 1, max((last - first + 1) // 12, 1)):
        parts.append(
            f'<text x="{x(step) + unit / 2:.1f}" y="16" text-anchor="middle" '
            f'class="tick">{step}</text>'
        )
    height = TOP + ROW * len(names)
    return (
        f'<svg viewBox="0 0 {LEFT + WIDTH + 10} {height}" role="img">'
        f"{''.join(parts)}</svg>"
    )


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; }
h2 { font-size: 1.1em; margin: 2em 0 .5em; }
svg { width: 100%; font-size: 13px; background: #fafafa; border: 1px solid #ddd; }
.mark { font-size: 17px; } .tick { font-size: 11px; fill: #555; }
li { overflow-wrap: anywhere; }
"""


def page(lines: Sequence[str], found: Sequence[Case]) -> str:
    """The words and the drawings, on a page that loads nothing."""
    legend = " &nbsp; ".join(
        f'<span style="color: {color}">{sign}</span> {text}'
        for sign, color, text in MARKS.values()
    )
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    for case in found:
        texts = "".join(f"<li>{escape(line)}</li>" for line in case.lines())
        parts += [f"<h2>{escape(case.title())}</h2>", drawing(case)]
        parts += [f"<p>{legend}</p>", f"<ul>{texts}</ul>"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>KV audit: incident</title><style>{STYLE}</style>{''.join(parts)}"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 if a file cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_nwor.audit explain", description="Explain an incident."
    )
    text = "what VLLM_NWOR_AUDIT_INCIDENT has named"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = "also draw the history of each block, on a page without scripts"
    parser.add_argument("--html", type=Path, metavar="OUT", help=text)
    args = parser.parse_args(arguments)
    try:
        incident, report = read(args.file)
    except ValueError as error:
        print(error)
        return 1
    lines, found = head(args.file, incident, report), cases(incident, report)
    print("\n".join(lines))
    for number, case in enumerate(found, 1):
        print(f"\n{number}. {case.title()}")
        print("\n".join(f"   {line}" for line in case.lines()))
    if args.html:
        try:
            write_whole(args.html, page(lines, found).encode())
        except OSError as error:
            print(f"{args.html} cannot be written: {error.strerror}")
            return 1
        print(f"\nDrawn: {args.html}")
    return 0
