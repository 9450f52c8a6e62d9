# SPDX-License-Identifier: Apache-2.0
"""How findings are reported: the log line, the JSON file, the exception.

Names of requests stay on the host: on the device a request is a *generation*, a number
that no other request of the runner has had. A request that is resumed after a
preemption is a new generation, and so is one that uses an old one's name again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config import StaleMode
from ..metrics import FINDINGS, HANDOVER, ON_HOST, STALE
from ..ops import shared
from .requests import Identity, Requests
from .tables import MAX_KEPT, AuditedGroup

logger = logging.getLogger("vllm.v1.nwor")

CLASSES = tuple(FINDINGS)
OF_STATES = CLASSES[CLASSES.index("stale_state") : -len(ON_HOST)]
shared("FINDING_CLASSES", CLASSES[: -len(ON_HOST)])

# Lines logged a step.
MAX_LINES = 16
# Found in place of a text.
LOST = "nothing: its content was lost in a sleep"
# Of an adapter's digest, in a finding.
CONTENT_DIGITS = 16
# How often the counts are logged, and the file is written, while there are steps.
LINE_SECONDS = 60.0


class AuditError(RuntimeError):
    """Under VLLM_NWOR_AUDIT=raise: a step's tokens rest on a cache that is not as it
    should be, and do not leave the worker."""


@dataclass(frozen=True)
class Writer:
    """Who wrote last to a slot. request: None if nobody did, or it is forgotten. step:
    0 also of other_text, which says who computed what a load brought."""

    request: str | None
    generation: int
    step: int


@dataclass(frozen=True)
class Finding:
    """One finding, as logged.

    kind: one of CLASSES. layer: the first one concerned, and num_layers how many;
    None and 0 where the identity of a slot is concerned, in all layers. owner: the
    request that the slot belongs to (foreign_write: the owner of the block). step: of
    the worker, when it was found. expected, found: identities of a text up to the slot,
    checksums of a layer's bytes, slots (foreign_write), or a slot's states (handed_on
    without a layer: SlotState of csrc/nwor/audit/audit.h). found is LOST where a sleep
    dropped what the writer had written. weights: only of
    stale_weights: number ("epoch") and label of those that wrote the block ("written")
    and of those that the request is computed with ("present"), each with the LoRA
    adapter: its name and its content, a digest, or None.

    state, column: only of recurrent states: temporal or conv, and the column that was
    read or written, in `block`, which has no slots. expected, found: how many tokens
    are in the state. Of a ring: its row; positions of the tokens that have it. Of
    handed_on and other_text: of samples, and of last tokens.
    """

    kind: str
    group: int
    layer: str | None
    num_layers: int
    block: int
    slot: int | None
    position: int
    owner: str | None
    writer: Writer
    step: int
    expected: str
    found: str
    weights: dict[str, dict[str, Any]] | None = None
    state: str | None = None
    column: int | None = None

    def line(self) -> str:
        """One line of JSON behind what the class means."""
        return f"{self.kind}: {FINDINGS[self.kind]}: {json.dumps(asdict(self))}"


def decode(
    row: Sequence[int],
    group: AuditedGroup,
    requests: Requests,
    states: Sequence[tuple[str, str, int]] = (),
) -> Finding:
    """A row of `findings`, in the columns of Finding of csrc/nwor/audit/audit.h.
    states: as States.layers."""
    step, number, owner, position, slot, layer, num_layers = row[:7]
    writer, writer_step, *values = row[7:]
    kind, shape = CLASSES[number], group.shape
    if kind in OF_STATES:
        return _of_state(kind, row, requests, states[layer])
    if layer >= len(group.names):
        return _of_state(kind, row, requests, states[layer - len(group.names)])
    # Slots are numbers; the others are bits.
    text = str if kind == "foreign_write" else lambda n: f"{n & (2**64 - 1):#x}"
    expected, found = values
    weights = None
    if kind == "wrong_prefix":
        weights = _other_weights(requests, owner, writer, expected, found)
        kind = STALE if weights else kind
    is_lost = kind == "wrong_prefix" and not found and 0 < writer_step <= group.lost_at
    name_of = requests.name_of
    return Finding(
        kind,
        shape.group_id,
        group.names[layer] if layer >= 0 else None,
        num_layers,
        slot // shape.block_size,
        slot,
        position,
        name_of(owner),
        Writer(name_of(writer), writer, writer_step),
        step,
        text(expected),
        LOST if is_lost and step > group.lost_at else text(found),
        weights,
    )


def _of_state(
    kind: str, row: Sequence[int], requests: Requests, layer: tuple[str, str, int]
) -> Finding:
    step, _, owner, position, place, _, num_layers, writer, writer_step = row[:9]
    name, state, group_id = layer
    expected, found = row[9:]
    return Finding(
        kind,
        group_id,
        name,
        num_layers,
        place & ((1 << 40) - 1),
        None,
        position,
        requests.name_of(owner),
        Writer(requests.name_of(writer), writer, writer_step),
        step,
        str(expected),
        str(found) if found >= 0 else "unknown",
        state=str(state),
        column=place >> 40,
    )


def _other_weights(
    requests: Requests, owner: int, writer: int, expected: int, found: int
) -> dict[str, dict[str, Any]] | None:
    """Finding.weights, if nothing but the weights differs. An identity is a sum that
    begins with the seed: two of the same text differ by their seeds."""
    reader, author = requests.identity_of(owner), requests.identity_of(writer)
    if reader is None or author is None or reader.seed == author.seed:
        return None
    if (found - expected - author.seed + reader.seed) % (1 << 64):
        return None
    if not author.is_same_text(reader):
        return None

    def about(identity: Identity) -> dict[str, Any]:
        epoch, adapter = identity.weights.epoch, identity.adapter
        return {
            "epoch": epoch,
            "label": requests.label_of(epoch),
            "adapter": adapter
            and {"name": adapter.name, "content": adapter.digest[:CONTENT_DIGITS]},
        }

    return {"written": about(author), "present": about(reader)}


@dataclass
class Found:
    """What came to the host. num_steps: of how many steps. num_lost: findings that
    there was no room for.

    Slots that a request took over: num_unverified: that could not be verified;
    num_verified: that a load filled, with the right bytes; num_failed: whose load was
    reported as failed.

    handovers: results of requests that decode here (handover.Result). given: what goes
    out with the kv_transfer_params of requests, by name.
    """

    findings: list[Finding] = field(default_factory=list)
    num_steps: int = 0
    num_lost: int = 0
    num_unverified: int = 0
    num_verified: int = 0
    num_failed: int = 0
    handovers: Counter[str] = field(default_factory=Counter)
    given: dict[str, str] = field(default_factory=dict)


class Findings:
    """Keeps and logs findings, writes them to the file, and reports clean audits, too.

    last: the latest MAX_KEPT ones. counts: all, by class. num_steps, num_unverified,
    num_verified, num_failed, num_lost: sums of Found's. Two threads may bring
    something. The runner's does so only where no other one reads, or where it reads
    itself: it waits for no write.
    """

    def __init__(
        self,
        path: str = "",
        about: Mapping[str, Any] | None = None,
        stale: StaleMode = StaleMode.FIND,
    ) -> None:
        """path: of the JSON file; empty for none. about: what it says first. stale:
        under COUNT, stale_weights is in `counts` alone."""
        self.last: deque[Finding] = deque(maxlen=MAX_KEPT)
        self.counts: Counter[str] = Counter()
        self.num_steps = self.num_unverified = self.num_lost = 0
        self.num_verified = self.num_failed = 0
        self.handovers: Counter[str] = Counter()
        self._only_counted = {STALE} if stale is StaleMode.COUNT else frozenset[str]()
        self._path = Path(path) if path else None
        self._about = about or {}
        self._lock = threading.Lock()
        self._next_line = time.monotonic() + LINE_SECONDS
        self._write()

    def take_in(self, found: Found) -> Sequence[Finding]:
        """Counts and logs what came from the device; about once a minute it says so.
        Returns what is not only counted."""
        with self._lock:
            self.num_steps += found.num_steps
            self.num_unverified += found.num_unverified
            self.num_verified += found.num_verified
            self.num_failed += found.num_failed
            self.num_lost += found.num_lost
            self.handovers += found.handovers
            self.counts.update(finding.kind for finding in found.findings)
            kept = [one for one in found.findings if one.kind not in self._only_counted]
            if kept:
                self._add(kept, found.num_lost)
            now = time.monotonic()
            is_due = now >= self._next_line
            if is_due:
                self._next_line = now + LINE_SECONDS
                self._summarize()
            if is_due or found.findings:
                self._write()
            return kept

    def _add(self, found: Sequence[Finding], num_lost: int) -> None:
        self.last.extend(found)
        for finding in found[:MAX_LINES]:
            logger.error("NWOR audit: %s", finding.line())
        num_more = len(found) - MAX_LINES + num_lost
        if num_more > 0:
            logger.error("NWOR audit: %d more findings in this step", num_more)

    def totals(self) -> dict[str, int]:
        """What the counters vllm:nwor_audit_* are to show, by name or class."""
        with self._lock:
            handovers = {f"{HANDOVER}{name}": n for name, n in self.handovers.items()}
            counts = {**self._of_slots(), **self.counts, **handovers}
            return {"steps": self.num_steps, **counts}

    def _of_slots(self) -> dict[str, int]:
        numbers = self.num_unverified, self.num_verified, self.num_failed
        return dict(zip(("unverified", "verified", "failed"), numbers, strict=True))

    def conclude(self) -> None:
        """The last line, and the last state of the file."""
        with self._lock:
            self._summarize()
            self._write()

    @property
    def num_findings(self) -> int:
        return self.counts.total() + self.num_lost

    def _summarize(self) -> None:
        text = "NWOR audit: %s steps, %s findings%s"
        more = [f", {n:,} slots {what}" for what, n in self._of_slots().items() if n]
        counts = f"{self.num_steps:,}", f"{self.num_findings:,}"
        logger.info(text, *counts, "".join(more))

    def _write(self) -> None:
        """The file holds all of the last findings, or what it held before."""
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps(self._content(), indent=1).encode())
        except OSError as error:
            logger.error("NWOR audit: %s could not be written: %s", self._path, error)

    def _content(self) -> dict[str, Any]:
        return {
            **self._about,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "steps": self.num_steps,
            **self._of_slots(),
            "handovers": self.handovers,
            "num_findings": self.num_findings,
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.last],
        }

    def content(self) -> dict[str, Any]:
        """What the file holds, as of now."""
        with self._lock:
            return self._content()


def write_whole(path: Path, content: bytes) -> None:
    """The file holds all of `content`, or what it held before. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
