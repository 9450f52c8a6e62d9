# SPDX-License-Identifier: Apache-2.0
"""What is said of a finding: the log line, the JSON file, the exception.

Names of requests stay on the host: on the device a request is a *generation*, a number
that no other request of the runner has had. A request that is resumed after a
preemption is a new generation, and so is one that uses an old one's name again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.v1.nwor")

# In the order of FindingClass of csrc/nwor/audit.h.
CLASSES = (
    "foreign_write",
    "wrong_prefix",
    "changed",
    "missing_write",
    "handed_on",
    "never_loaded",
)
MEANING = {
    "foreign_write": "a write was planned to a block that is not the request's",
    "wrong_prefix": "a block in a request's table does not hold the request's text",
    "changed": "bytes are no longer those that were committed",
    "missing_write": "a slot counts as committed, and was not written",
    "handed_on": "a block with a slot that was not committed went to a KV connector",
    "never_loaded": "a load was reported done and changed nothing",
}
# Columns of a row of `findings` (Finding of csrc/nwor/audit.h), int64 [.., 12].
COLUMNS = (
    "kind",
    "layer",
    "num_layers",
    "slot",
    "position",
    "owner",
    "writer",
    "writer_step",
    "step",
    "expected",
    "found",
    "table",
)
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
    checksums of a layer's bytes, or slots (foreign_write).
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
    row: Sequence[int],
    group: int,
    layers: Sequence[Sequence[str]],
    block_size: int,
    name_of: Callable[[int], str | None],
) -> Finding:
    """A row of COLUMNS in words.

    layers: names of the layers in each of the group's tables.
    """
    value = dict(zip(COLUMNS, row, strict=True))
    in_layer = value["layer"] >= 0
    kind = CLASSES[value["kind"]]
    # Slots are numbers; the others are bits.
    told = str if kind == "foreign_write" else lambda n: f"{n & (2**64 - 1):#x}"
    return Finding(
        kind,
        group,
        layers[value["table"]][value["layer"]] if in_layer else None,
        value["num_layers"],
        value["slot"] // block_size,
        value["slot"],
        value["position"],
        name_of(value["owner"]),
        Writer(name_of(value["writer"]), value["writer"], value["writer_step"]),
        value["step"],
        told(value["expected"]),
        told(value["found"]),
    )


class Findings:
    """Keeps, logs and writes down what was found.

    last: the latest MAX_KEPT ones. counts: all, by class.
    """

    def __init__(self, path: str = "") -> None:
        """path: of the JSON file; empty for none."""
        self.last: deque[Finding] = deque(maxlen=MAX_KEPT)
        self.counts: dict[str, int] = {}
        self._path = Path(path) if path else None

    def add(self, found: Sequence[Finding], num_lost: int = 0) -> None:
        """Takes in the findings of a step. num_lost: that did not fit the table."""
        for finding in found:
            self.last.append(finding)
            self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        for finding in found[:MAX_LINES]:
            logger.error("NWOR audit: %s", finding.line())
        num_more = len(found) - MAX_LINES + num_lost
        if num_more > 0:
            logger.error("NWOR audit: %d more findings in this step", num_more)
        if self._path is not None and found:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        """The file holds all of the last findings, or what it held before."""
        content: dict[str, Any] = {
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.last],
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content, indent=1))
            temporary.replace(path)
        except OSError as error:
            logger.error("NWOR audit: %s could not be written: %s", path, error)
