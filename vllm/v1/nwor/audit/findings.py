# SPDX-License-Identifier: Apache-2.0
"""How findings are reported: the copy from the device, the log line, the JSON file, the
exception.

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
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import ops
from ..config import StaleMode
from ..metrics import FINDINGS, HANDOVER, ON_HOST, STALE
from ..ops import shared
from ..step import NewRequest
from .fingerprints import Fingerprints
from .handover import Handovers
from .loads import CUT, LOADED, Digests, Heads, Wrong, zeros_of
from .requests import Handover, Identity, Requests
from .states import States
from .tables import MAX_KEPT, AuditedGroup, digest_rows

logger = logging.getLogger("vllm.v1.nwor")

# For each group where findings go, and where digests go, if the group takes any.
Places = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
# These, where digests of recurrent states go, if any do, and when all are there: None
# on the CPU.
Slot = tuple[Places, torch.Tensor | None, torch.cuda.Event | None]

CLASSES = tuple(FINDINGS)
OF_STATES = CLASSES[CLASSES.index("stale_state") : -len(ON_HOST)]
shared("FINDING_CLASSES", CLASSES[: -len(ON_HOST)])


# Steps with findings in flight to the host, at most: vLLM has two steps in flight.
NUM_SLOTS = 4
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


class Filled(NamedTuple):
    """The digests of a step, of a group by its place: of the blocks that requests have
    filled, and others. Rows as BlockDigest of audit.h."""

    place: int
    step: int
    computed: torch.Tensor
    others: torch.Tensor


class Judged(NamedTuple):
    """What is loaded as a whole: a block of a group's layers, or its recurrent states
    of a kind, `state`. layers: by their columns in a digest."""

    group_id: int
    block_size: int
    layers: Sequence[str]
    state: str | None = None


# Findings about a load; none if it was reported as failed.
OF_LOADS = ("handed_on", "never_loaded", "other_text", "not_as_sent")


class Outbox:
    """Findings in flight to the host. The host waits for a step's end only where it
    reads that step's output.

    groups: the audited ones. num_sent: calls of `sent` so far.
    """

    def __init__(
        self,
        groups: Sequence[AuditedGroup],
        requests: Requests,
        fingerprints: Fingerprints,
        states: States | None = None,
        store_is_own: bool = False,
        handovers: Handovers | None = None,
    ) -> None:
        """store_is_own: as Digests.is_own. handovers: None if there is no secret."""
        self._groups, self._requests = groups, requests
        self._fingerprints = fingerprints
        self._states = states.layers if states else []
        follows = states is not None and groups[0].shape.num_digests > 0
        self._boundaries = states.boundaries if states and follows else []
        table = groups[0].findings
        size, is_pinned = (NUM_SLOTS, len(groups), *table.shape), table.is_cuda
        tables = torch.zeros(size, dtype=table.dtype, pin_memory=is_pinned)
        # For each step on its way, cpu and pinned on CUDA.
        self._slots = itertools.cycle(
            (
                [*zip(of_step, map(_digests_to, groups), strict=True)],
                torch.zeros(
                    states.digests_shape, dtype=torch.int64, pin_memory=is_pinned
                )
                if states and self._boundaries
                else None,
                torch.cuda.Event() if is_pinned else None,
            )
            for of_step in tables
        )
        # By place: of the groups, then of recurrent states.
        self.digests = [Digests(zeros_of(of), store_is_own) for of in groups]
        self._judged = [
            Judged(of.shape.group_id, of.shape.block_size, of.names) for of in groups
        ]
        for states_of in self._boundaries:
            is_own = store_is_own and states_of.is_own
            self.digests.append(Digests(states_of.zeros, is_own))
            about = states_of.group_id, 1, states_of.layers, states_of.kind
            self._judged.append(Judged(*about))
        self._handovers = handovers
        # What has arrived and was not judged yet.
        self._filled: list[Filled] = []
        # Blocks that a load has filled in part, and the request's generation: what it
        # adds is no computation of the whole block.
        self._partly: list[dict[int, int]] = [{} for _ in self._judged]
        # Slots that the device counts as unverified, and that are not.
        self.num_settled = 0
        self._claimed: Slot | None = None
        self._on_their_way: deque[Slot] = deque()
        self.num_sent = 0
        # Of each group findings and unverified slots, as last read: they only rise.
        self._totals = [[0, 0] for _ in groups]
        self._found = Found()
        # An asynchronous output is read by a thread of its own.
        self._lock = threading.Lock()

    def claim(self) -> Slot:
        """Where the ops of this step shall write. Then `sent`; if that is
        not called, the next claim gives the same."""
        with self._lock:
            if len(self._on_their_way) == NUM_SLOTS:
                self._arrive(waits=True)
            self._claimed = self._claimed or next(self._slots)
        return self._claimed

    def sent(self) -> None:
        """Call after the writes to the last claimed place have been enqueued."""
        with self._lock:
            slot, self._claimed = self._claimed, None
            assert slot is not None
            if slot[2] is not None:
                slot[2].record()
            self._on_their_way.append(slot)
            self.num_sent += 1

    def add_failed(self, num_slots: int) -> None:
        """Of loads whose request was never seated, or begins without them."""
        with self._lock:
            self._found.num_failed += num_slots

    def begin_handover(self, generation: int, new: NewRequest) -> Handover:
        """A request that is new, or resumed."""
        if self._handovers is None:
            return Handover.NONE
        with self._lock:
            return self._handovers.begin(generation, new)

    def end_handover(self, generation: int) -> None:
        with self._lock:
            assert self._handovers is not None
            self._handovers.end(generation)

    def _arrive(self, waits: bool) -> bool:
        """Reads the oldest slot in flight. Returns whether it could."""
        tables, of_states, arrival = self._on_their_way[0]
        if arrival is not None and not arrival.query():
            if not waits:
                return False
            arrival.synchronize()
        self._on_their_way.popleft()
        headers = [table[0].tolist() for table, _ in tables]
        *_, fingerprint, step = headers[0]
        if step > self._fingerprints.seen:
            self._fingerprints.arrived(fingerprint, step)
        found = self._found
        found.num_steps += 1
        groups = zip(self._groups, self._totals, tables, headers, strict=True)
        for group, totals, (table, _), header in groups:
            before, totals[:] = tuple(totals), header[:2]
            count = totals[0] - before[0]
            found.num_unverified += totals[1] - before[1]
            found.num_lost += max(count - MAX_KEPT, 0)
            if count:
                # Threads of a GPU come in any order.
                rows = sorted(table[1 : 1 + min(count, MAX_KEPT)].tolist())
                about = group, self._requests, self._states
                found.findings += [decode(row, *about) for row in rows]
        for place, (_, digests) in enumerate(tables):
            if digests is not None:
                most = len(digests) // 2
                num_computed, num_others, of_step = digests[0, :3].tolist()
                computed = digests[1 : 1 + min(num_computed, most)].clone()
                others = digests[1 + most :][:num_others].clone()
                self._filled.append(Filled(place, of_step, computed, others))
        if of_states is not None:
            self._states_arrive(of_states, of_step)
        return True

    def _states_arrive(self, rows: torch.Tensor, step: int) -> None:
        """rows: as digests_to of AuditStatesWrittenArgs, those of other steps, too."""
        head = ops.DIGEST_COLUMNS
        is_new = rows[..., head - 1] == step
        if not is_new.any():
            return
        for place, of in enumerate(self._boundaries, len(self._groups)):
            columns = [*range(head), *(head + column for column in of.columns)]
            found = [
                rows[n, is_new[n, :, of.group], of.group][:, columns] for n in (0, 1)
            ]
            found[1][:, 4] = len(of.columns)  # it counts states
            self._filled.append(Filled(place, step, *found))

    def take(
        self,
        through: int,
        until: int | None = None,
        failed: Collection[int] = (),
    ) -> Found:
        """What has come since the last call. through: waits for what was sent by then,
        as num_sent counts, and never for a later step, which may not have begun. until:
        leaves what was sent later where it is; None: takes all that is there. failed:
        blocks whose load was reported as failed in these steps."""
        with self._lock:
            while waiting := len(self._on_their_way):
                num_taken = self.num_sent - waiting
                if until is not None and num_taken >= until:
                    break
                if not self._arrive(waits=num_taken < through):
                    break
            found, self._found = self._found, Found()
            filled, self._filled = self._filled, []
            for of_group in filled:
                self._judge(of_group, failed, found)
            if self._handovers is not None:
                of = self._handovers
                found.handovers, of.results = Counter(of.results), Counter()
                ready, of.ready = of.ready, {}
                named = ((self._requests.name_of(key), ready[key]) for key in ready)
                found.given = {name: sent for name, sent in named if name}
        if failed:
            found.findings = [
                finding
                for finding in found.findings
                if not (finding.kind in OF_LOADS and finding.block in failed)
            ]
        return found

    def _judge(self, of: Filled, failed: Collection[int], found: Found) -> None:
        """Judges the loads of a step, and keeps what was computed. A load that failed
        is computed anew from its first failed block on, and what a step with one has
        computed may rest on it."""
        judged, digests = self._judged[of.place], self.digests[of.place]
        num_layers = len(judged.layers)
        others = list(_rows(of.others, num_layers))
        loaded = [one for one in others if one[0][_KIND] == LOADED]
        before = found.num_unverified
        num_verified = num_failed = 0
        # The first position that failed, by generation.
        begins: dict[int, int] = {}
        for (_, block, position, generation, *_), _ in loaded:
            if block in failed:
                known = begins.get(generation, position)
                begins[generation] = min(known, position)
        reported = {
            finding.block
            for finding in found.findings
            if (finding.group, finding.state) == (judged.group_id, judged.state)
            if finding.step == of.step and finding.kind in OF_LOADS
        }
        partly = self._partly[of.place]
        handed = self._handed(of, begins)
        for head, digest in loaded:
            text, block, position, generation, num_slots, _, tokens, is_known = head
            verdict: Wrong | bool = False
            if position >= begins.get(generation, position + 1):
                num_failed += num_slots
            elif block in reported:
                pass
            elif num_slots < judged.block_size:
                partly[block] = generation
                verdict = handed.get((generation, block), False)
                if verdict is False:
                    continue
            elif is_known:
                verdict = digests.judge(text, tokens, digest, generation)
                if verdict is False:
                    verdict = handed.get((generation, block), False)
                if verdict is False:
                    continue
            else:
                continue
            found.num_unverified -= num_slots
            if verdict is True:
                num_verified += num_slots
            elif isinstance(verdict, Wrong):
                found.findings.append(self._finding(judged, head, verdict, of.step))
        for head, digest in _rows(of.computed, num_layers):
            text, block, _, generation, *_, tokens, is_known = head
            is_its_own = is_known and partly.pop(block, None) != generation
            kept = digest if is_its_own and not begins else CUT
            digests.commit(text, tokens, kept, generation)
        found.num_verified += num_verified
        found.num_failed += num_failed
        self.num_settled += before - found.num_unverified

    def _handed(
        self, of: Filled, begins: Mapping[int, int]
    ) -> dict[tuple[int, int], Wrong | bool]:
        """As Handovers.arrived. begins: the first position that failed, by generation:
        what lies behind is left out."""
        if self._handovers is None or of.place >= len(self._groups):
            return {}
        rows = torch.cat([of.computed, of.others]).numpy()
        heads = Heads(*rows[:, : ops.DIGEST_COLUMNS].T)
        sums = rows[:, ops.DIGEST_COLUMNS :].view(np.uint64)
        is_there = np.ones(len(rows), bool)
        for generation, begin in begins.items():
            is_there &= (heads.generation != generation) | (heads.position < begin)
        return self._handovers.arrived(of.place, heads.of(is_there), sums[is_there])

    def _finding(
        self, of: Judged, head: Sequence[int], wrong: Wrong, step: int
    ) -> Finding:
        _, block, position, generation, *_ = head
        name_of = self._requests.name_of
        return Finding(
            wrong.kind,
            of.group_id,
            of.layers[wrong.layer] if wrong.layer >= 0 else None,
            wrong.num_layers,
            block,
            None if of.state else block * of.block_size + wrong.offset,
            position + wrong.offset,
            name_of(generation),
            Writer(name_of(wrong.author), wrong.author, 0),
            step,
            f"{wrong.expected & (2**64 - 1):#x}",
            f"{wrong.found & (2**64 - 1):#x}",
            state=of.state,
            column=0 if of.state else None,
        )


def _digests_to(group: AuditedGroup) -> torch.Tensor | None:
    """Where digests of a step go: as `digests`, each with those of the layers, or of
    the slots of a block."""
    num_rows = digest_rows(group.shape)
    if not num_rows:
        return None
    of_group = group.tensors["digests"]
    num_sums = max(len(group.names), group.shape.block_size)
    size = num_rows, of_group.shape[1] + num_sums
    return torch.zeros(size, dtype=of_group.dtype, pin_memory=of_group.is_cuda)


_KIND = Heads._fields.index("kind")


def _rows(rows: torch.Tensor, num_layers: int) -> Iterator[tuple[list[int], bytes]]:
    """The columns of BlockDigest, and the digest."""
    heads = rows[:, : ops.DIGEST_COLUMNS].tolist()
    data = rows[:, ops.DIGEST_COLUMNS :][:, :num_layers].contiguous().numpy().tobytes()
    size = len(data) // max(len(heads), 1)
    for number, head in enumerate(heads):
        yield head, data[number * size : (number + 1) * size]


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
        path = self._path
        if path is None:
            return
        try:
            write_whole(path, json.dumps(self._content(), indent=1).encode())
        except OSError as error:
            logger.error("NWOR audit: %s could not be written: %s", path, error)

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
