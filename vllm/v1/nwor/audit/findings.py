# SPDX-License-Identifier: Apache-2.0
"""What is said of a finding, and how: its way from the device, the log line, the JSON
file, the exception.

Names of requests stay on the host: on the device a request is a *generation*, a number
that no other request of the runner has had. A request that is resumed after a
preemption is a new generation, and so is one that uses an old one's name again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .tables import AuditedGroup

logger = logging.getLogger("vllm.v1.nwor")

Slot = tuple[Sequence[torch.Tensor], torch.cuda.Event | None]

# In the order of FindingClass of csrc/nwor/audit.h.
MEANING = {
    "foreign_write": "a write was planned to a block that is not the request's",
    "wrong_prefix": "a block in a request's table does not hold the request's text",
    "changed": "bytes are no longer those that were committed",
    "missing_write": "a slot counts as committed, and was not written",
    "handed_on": "a slot that was not committed went to a KV connector, or what came "
    "back is not what was stored",
    "never_loaded": "a load was reported done and changed nothing",
}
CLASSES = tuple(MEANING)


# Steps whose findings may be on their way to the host: vLLM has two in flight.
NUM_SLOTS = 4
# Findings that are kept, in memory and in the file, and lines logged a step.
MAX_KEPT = 256
MAX_LINES = 16


class AuditError(RuntimeError):
    """Under VLLM_NWOR_AUDIT=raise: a step's tokens rest on a cache that is not as it
    should be, and do not leave the worker."""


@dataclass(frozen=True)
class Writer:
    """Who wrote last to a slot. request: None if nobody did, or it is forgotten."""

    request: str | None
    generation: int
    step: int


@dataclass(frozen=True)
class Finding:
    """One finding, as logged.

    kind: one of CLASSES. layer: the first one concerned, and num_layers how many;
    None and 0 where the identity of a slot is concerned, in all layers. owner: the
    request that the slot belongs to (foreign_write: whose block it is). step: of the
    worker, when it was found. expected, found: identities of a text up to the slot,
    checksums of a layer's bytes, slots (foreign_write), or a slot's states (handed_on
    without a layer: SlotState of csrc/nwor/audit.h).
    """

    kind: str
    group: int
    layer: str | None
    num_layers: int
    block: int
    slot: int
    position: int
    owner: str | None
    writer: Writer
    step: int
    expected: str
    found: str

    def line(self) -> str:
        """One line of JSON behind what the class means."""
        return f"{self.kind}: {MEANING[self.kind]}: {json.dumps(asdict(self))}"


def decode(
    row: Sequence[int], group: AuditedGroup, name_of: Callable[[int], str | None]
) -> Finding:
    """A row of `findings`, in the columns of Finding of csrc/nwor/audit.h."""
    step, number, owner, position, slot, layer, num_layers = row[:7]
    writer, writer_step, *values = row[7:]
    kind, shape = CLASSES[number], group.shape
    # Slots are numbers; the others are bits.
    text = str if kind == "foreign_write" else lambda n: f"{n & (2**64 - 1):#x}"
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
        *map(text, values),
    )


@dataclass
class Found:
    """What came to the host. num_steps: of how many steps. num_lost: findings that
    there was no room for. num_unverified: slots that could not be verified."""

    findings: list[Finding] = field(default_factory=list)
    num_steps: int = 0
    num_lost: int = 0
    num_unverified: int = 0


class Outbox:
    """Findings on their way to the host, which never waits for a step's end but where
    it reads that step's output.

    groups: whose findings. name_of: the request of a generation. num_sent: so often.
    """

    def __init__(
        self, groups: Sequence[AuditedGroup], name_of: Callable[[int], str | None]
    ) -> None:
        self._groups, self._name_of = groups, name_of
        table = groups[0].findings
        size, is_pinned = (NUM_SLOTS, len(groups), *table.shape), table.is_cuda
        tables = torch.zeros(size, dtype=table.dtype, pin_memory=is_pinned)
        # For each step on its way the groups' findings, cpu and pinned on CUDA, and
        # when they are there; None on the CPU.
        self._slots = itertools.cycle(
            (of_step.unbind(), torch.cuda.Event() if is_pinned else None)
            for of_step in tables
        )
        self._claimed: Slot | None = None
        self._on_their_way: deque[Slot] = deque()
        self.num_sent = 0
        # Of each group findings and unverified slots, as last read: they only rise.
        self._totals = [[0, 0] for _ in groups]
        self._found = Found()
        # An asynchronous output is read by a thread of its own.
        self._lock = threading.Lock()

    def claim(self) -> Sequence[torch.Tensor]:
        """Where an op of this step shall write each group's findings. Then `sent`; if
        that is not called, the next claim gives the same."""
        with self._lock:
            if len(self._on_their_way) == NUM_SLOTS:
                self._arrive(waits=True)
            self._claimed = self._claimed or next(self._slots)
        return self._claimed[0]

    def sent(self) -> None:
        """What writes to the place that was claimed last has been enqueued."""
        with self._lock:
            slot, self._claimed = self._claimed, None
            assert slot is not None
            if slot[1] is not None:
                slot[1].record()
            self._on_their_way.append(slot)
            self.num_sent += 1

    def _arrive(self, waits: bool) -> bool:
        """Reads the oldest slot that is on its way; whether it could."""
        tables, arrival = self._on_their_way[0]
        if arrival is not None and not arrival.query():
            if not waits:
                return False
            arrival.synchronize()
        self._on_their_way.popleft()
        found = self._found
        found.num_steps += 1
        groups = zip(self._groups, self._totals, tables, strict=True)
        for group, totals, table in groups:
            before, totals[:] = tuple(totals), table[0, :2].tolist()
            count = totals[0] - before[0]
            found.num_unverified += totals[1] - before[1]
            found.num_lost += max(count - MAX_KEPT, 0)
            if count:
                # Threads of a GPU come in any order.
                rows = sorted(table[1 : 1 + min(count, MAX_KEPT)].tolist())
                found.findings += [decode(row, group, self._name_of) for row in rows]
        return True

    def take(self, through: int) -> Found:
        """What has come since the last call. through: waits for what was sent by then,
        as num_sent counts, and never for a later step, which may not have begun."""
        with self._lock:
            while waiting := len(self._on_their_way):
                if not self._arrive(waits=self.num_sent - waiting < through):
                    break
            found, self._found = self._found, Found()
        return found


class Findings:
    """Keeps, logs and writes down what was found.

    last: the latest MAX_KEPT ones. counts: all, by class.
    """

    def __init__(self, path: str = "") -> None:
        """path: of the JSON file; empty for none."""
        self.last: deque[Finding] = deque(maxlen=MAX_KEPT)
        self.counts: Counter[str] = Counter()
        self._path = Path(path) if path else None

    def add(self, found: Sequence[Finding], num_lost: int = 0) -> None:
        """Takes in the findings of a step. num_lost: that did not fit the table."""
        self.last.extend(found)
        self.counts.update(finding.kind for finding in found)
        for finding in found[:MAX_LINES]:
            logger.error("NWOR audit: %s", finding.line())
        num_more = len(found) - MAX_LINES + num_lost
        if num_more > 0:
            logger.error("NWOR audit: %d more findings in this step", num_more)
        if self._path is not None and found:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        """The file holds all of the last findings, or what it held before."""
        findings = [asdict(finding) for finding in self.last]
        content = {"counts": self.counts, "findings": findings}
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            try:
                temporary.write_text(json.dumps(content, indent=1))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            logger.error("NWOR audit: %s could not be written: %s", path, error)
