# SPDX-License-Identifier: Apache-2.0
"""Outbox: what the device found in a step, on its way to the host."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

import torch

from .. import ops
from ..step import NewRequest
from .findings import Found, decode
from .fingerprints import Fingerprints
from .handover import Handovers
from .judge import OF_LOADS, Filled, Judge
from .requests import Handover, Requests
from .states import States
from .tables import MAX_KEPT, AuditedGroup, digest_rows

# For each group where findings go, and where digests go, if the group takes any.
Places = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
# These, where digests of recurrent states go, if any do, and when all are there: None
# on the CPU.
Slot = tuple[Places, torch.Tensor | None, torch.cuda.Event | None]

# Steps with findings in flight to the host, at most: vLLM has two steps in flight.
NUM_SLOTS = 4


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
        self.judge = Judge(groups, requests, self._boundaries, store_is_own, handovers)
        self._handovers = handovers
        # What has arrived and was not judged yet.
        self._filled: list[Filled] = []
        self._claimed: Slot | None = None
        self._on_their_way: deque[Slot] = deque()
        self.num_sent = 0
        # Of the writes to a slot, if not the current one: until `join`.
        self.stream: torch.cuda.Stream | None = None
        self._unjoined: torch.cuda.Event | None = None
        # Of each group findings, unverified and returned slots, as last read: they only
        # rise.
        self._totals = [[0, 0, 0] for _ in groups]
        self._found = Found()
        # Blocks whose load failed: perhaps they hold what they held before.
        self._failed: set[int] = set()
        self._lock = threading.Lock()

    def claim(self) -> Slot:
        """Where this step's ops shall write. Without `sent` the next gives the same."""
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
                slot[2].record(self.stream)
                self._unjoined = slot[2] if self.stream else None
            self._on_their_way.append(slot)
            self.num_sent += 1

    def join(self) -> None:
        """The current stream waits for what was sent last. Call before something may
        write to the caches, or to the tables: at a step's end, before a transfer."""
        event, self._unjoined = self._unjoined, None
        if event is not None:
            event.wait()
        elif self._claimed is not None and self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)  # a step failed

    def add_failed(self, num_slots: int) -> None:
        """Of loads whose request was never seated, or begins without them."""
        with self._lock:
            self._found.num_failed += num_slots

    def take_failed(self, blocks: Iterable[int]) -> set[int]:
        """Those of `blocks` whose load failed since the last call that had them."""
        with self._lock:
            found = self._failed.intersection(blocks)
            self._failed -= found
        return found

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
            before, totals[:] = tuple(totals), (*header[:2], header[4])
            count = totals[0] - before[0]
            found.num_unverified += totals[1] - before[1]
            found.num_verified += totals[2] - before[2]
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
        self, through: int, until: int | None = None, failed: Collection[int] = ()
    ) -> Found:
        """What has come since the last call. through: waits for what was sent by then,
        as num_sent counts, and never for a later step, which may not have begun. until:
        leaves what was sent later where it is; None: takes all that is there. failed:
        blocks whose load was reported as failed in these steps."""
        with self._lock:
            num_awaited = through - self.num_sent + len(self._on_their_way)
            arrivals = [slot[2] for slot in self._on_their_way if slot[2]]
        for arrival in arrivals[: max(num_awaited, 0)]:
            arrival.synchronize()  # without the lock, which the next step needs
        with self._lock:
            while waiting := len(self._on_their_way):
                num_taken = self.num_sent - waiting
                if until is not None and num_taken >= until:
                    break
                if not self._arrive(waits=False):
                    break
            found, self._found = self._found, Found()
            filled, self._filled = self._filled, []
            lost = set(failed)
            for of_group in filled:
                self.judge.take_in(of_group, lost, found)
            self._failed |= lost
            if (of := self._handovers) is not None:
                found.handovers, of.results = Counter(of.results), Counter()
                ready, of.ready = of.ready, {}
                named = ((self._requests.name_of(key), ready[key]) for key in ready)
                found.given = {name: sent for name, sent in named if name}
        found.findings = [
            finding
            for finding in found.findings
            if finding.kind not in OF_LOADS or finding.block not in lost
        ]
        return found


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
