# SPDX-License-Identifier: Apache-2.0
"""What an incident file says of each finding: the history of its block, what lies
between the last write and the finding, and what follows from that.

All of it follows from the scheduler's output of the recorded steps; what the bytes were
is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..metrics import FINDINGS, STALE
from .findings import Finding
from .incident import Incident, Report

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
    "handed_on": "a KV connector stores a block with a slot that was not "
    "committed: it will be loaded for another request; or, with a layer "
    "named, what came back is not what was stored: host memory or a file that"
    " changed, a layer that was left out, a write that came behind the load. With "
    "`state`: a recurrent state that came back",
    "never_loaded": "a load was reported done, and the block still holds the "
    "text of before, or holds it again: a late write may have put it back; or"
    " all of it is zero",
    "other_text": "a KV connector loaded the block of other tokens (`writer` "
    "computed it): a wrong key, a wrong offset, two requests mixed up. "
    "`expected` and `found` are sums over the tokens",
    "not_as_sent": "what came from the prefill instance is not what it computed: a "
    "transfer that was incomplete, late or of other blocks; blocks that were "
    "overwritten there before they were read, or here since. `position` is that of "
    "the first token of the block or, in the last one of a prompt, of the first wrong"
    " slot; with no layer named the blocks of this prompt that were loaded here do "
    "not say which layers. `expected` and `found` are sums",
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
        how = "found it in the cache" if self.is_found else "was given it"
        end = "still has it" if self.last is None else f"to step {self.last}"
        why = self.why and f" ({self.why})"
        where = f"in step {self.first}, as block {self.place} of its table"
        return f"{how} {where}; {end}{why}"


# Shown in front of a finding's token, and behind it.
NUM_TOKENS = 8
# In the place of a request.
NOBODY = "the block"
# Marks of what changes the bytes of a block.
WRITES = {"load", "copied", "weights"}


class Event(NamedTuple):
    """What happened to a block. mark: of the drawing, "" for none; it stands in the row
    of `request`."""

    step: int
    mark: str
    text: str
    request: str = NOBODY


class History:
    """Of one block. Blocks of all KV-cache groups have one numbering. spans: the oldest
    first. events: in order. first, last: steps in the file. tables: all."""

    def __init__(self, incident: Incident, block: int) -> None:
        self.block = block
        steps = incident.steps
        self.first = steps[0].step if steps else 0
        self.last = steps[-1].step if steps else 0
        ended = [table for record in steps for table in record.ended]
        self.tables = [*ended, *incident.tables]
        spans = (
            Span(
                table.request,
                group,
                index,
                since[index],
                table.until,
                since[index] == table.since and index * size < table.num_found,
                table.why,
            )
            for table in self.tables
            for group, (ids, since, size) in enumerate(
                zip(table.blocks, table.steps, incident.block_sizes, strict=True)
            )
            for index, number in enumerate(ids)
            if number == block
        )
        self.spans = sorted(spans, key=lambda span: (span.first, span.request))
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


def weights_text(about: Mapping[str, Any]) -> str:
    """about: of Finding.weights."""
    label, adapter = about["label"], about["adapter"]
    of_adapter = adapter and f", adapter {adapter['name']} ({adapter['content']})"
    return f"epoch {about['epoch']}{label and f' ({label})'}{of_adapter or ''}"


class Case(NamedTuple):
    """The first finding of a class in a block, and how many more there are. causes:
    only of the first one of its class."""

    finding: Finding
    num_more: int
    history: History
    causes: str

    def title(self) -> str:
        one = self.finding
        return f"{one.kind} in step {one.step}: {FINDINGS.get(one.kind, 'unknown')}"

    def lines(self) -> list[str]:
        found = [self._place(), *self._who(), *self._tokens()]
        found += [*self._spans(), *self._between()]
        found += [f"Conclusion: {text}." for text in (self._conclusion(),) if text]
        return found + ([f"Usual causes: {self.causes}."] if self.causes else [])

    def _place(self) -> str:
        one = self.finding
        what = f"slot {one.slot}" if one.slot is not None else f"column {one.column}"
        where = f"block {one.block} (KV-cache group {one.group}), {what}"
        layer = "no layer in particular"
        if one.layer:
            layer = f"layer {one.layer} ({one.num_layers} in all)"
        parts = [f"Where: {where}, position {one.position}", layer]
        parts.append(f"expected {one.expected}, found {one.found}")
        if self.num_more:
            parts.append(f"{self.num_more} more findings of this class in this block")
        return "; ".join(parts)

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
            written = weights_text(weights["written"])
            present = weights_text(weights["present"])
            found.append(f"Weights: it has {written}, and the request {present}.")
        return found

    def _tokens(self) -> list[str]:
        """Of the user's prompt, around the finding, if the file has it."""
        at, step, name = self.finding.position, self.finding.step, self.user
        tables = [t for t in self.history.tables if t.request == name]
        prompt = next((t.prompt for t in reversed(tables) if t.since <= step), [])
        first = max(at - NUM_TOKENS, 0)
        tokens = [str(token) for token in prompt[first : at + NUM_TOKENS + 1]]
        if 0 <= at < len(prompt):
            tokens[at - first] = f"[{prompt[at]}]"
        text = f"Tokens: the prompt of {name} has {len(prompt)}, from position {first}"
        return [f"{text} on: {' '.join(tokens) or 'none'}."] if prompt else []

    @property
    def user(self) -> str | None:
        """The request that reads the block, or was about to write to it."""
        one = self.finding
        return one.writer.request if one.kind == "foreign_write" else one.owner

    def _spans(self) -> list[str]:
        spans = self.history.spans
        found = [f"History: {span.request} {span.text()}." for span in spans]
        return found or ["History: no request had it in the steps of this file."]

    def between(self) -> list[Event]:
        """What happened from the last write to the finding."""
        writer = self.finding.writer
        return [
            event
            for event in self.history.events
            if writer.step <= event.step <= self.finding.step
            and (event.step, event.request) != (writer.step, writer.request)
        ]

    def _between(self) -> list[str]:
        events = [f"in step {event.step} {event.text}" for event in self.between()]
        text = "; ".join(events) or (
            "no other request, prefix hit, preemption, load, copy or change of weights"
        )
        first, about = self.history.first, ""
        if self.finding.writer.step < first:
            about = f" (loads, copies and weights are known from step {first} on)"
        return [f"Since the last write{about}: {text}."]

    def _conclusion(self) -> str:
        """What follows, or nothing."""
        one, holders = self.finding, self.history.holders(self.finding.step)
        if self.user and self.user not in holders:
            others = " and ".join(holders) or "nobody"
            return (
                f"by the scheduler's output {others} had this block in step {one.step},"
                f" and {self.user} did not: the block table or the slots of {self.user}"
                " are wrong"
            )
        writes = [event for event in self.between() if event.mark in WRITES]
        if one.kind == STALE:
            writes = [event for event in writes if event.mark == "weights"]
        if writes:
            return f"look first at step {writes[-1].step}: {writes[-1].text}"
        if one.kind in ("changed", "changed_state"):
            return (
                "no load, copy or zeroing of this block is recorded: nothing that the "
                "scheduler ordered has changed it"
            )
        return ""


def cases(incident: Incident, report: Report) -> list[Case]:
    found: dict[tuple[str, int, int], list[Finding]] = {}
    for finding in report.findings:
        key = finding.kind, finding.group, finding.block
        found.setdefault(key, []).append(finding)
    cases, causes = [], dict(CAUSES)
    for (kind, _, block), of in found.items():
        history = History(incident, block)
        cases.append(Case(of[0], len(of) - 1, history, causes.pop(kind, "")))
    return cases
