# SPDX-License-Identifier: Apache-2.0
"""ShadowBlocks: drafts are verified in private blocks, and never touch a request's own.

For one step the blocks of a window that hold drafts are replaced by shadow blocks, in
the block table and in the slot mapping, so that vLLM's own kernels write and read
there; then the kept rows are copied to the real blocks and the table is put back. Any
backend that reads through the block table gives the same bits, under any CUDA graph,
because only the content of buffers changes that outlive the step.

    stage    committed rows of those blocks -> shadow; table and slots name the shadow
    (vLLM's forward and rejection sampling)
    commit   kept rows -> real blocks; table and slots put back; counted
    abort    table and slots put back, nothing copied: the step failed

Invariants:

1. Between steps table and slots are vLLM's own, and no row of a block but the committed
   ones of this step was changed by us.
2. Shadow blocks are in tables only between stage and commit or abort; the scheduler
   never hands one out.
3. An entry is put back only where it still holds what stage wrote.

A request's shadow blocks, its seat, stay the same while it keeps its place in the
runner: its batch row (V1), or its index in the request states (V2). If there are fewer
seats than requests, the undo log protects those without one (draft_manager.py); on V2
`Seats` assigns free seats.

Committed rows that a shadow block has from the previous step are not copied again. They
are reused only if that step committed the seat, up to the first row that this step
writes, to the block that is in the table now (csrc/nwor/transaction/shadow.h says why
that is enough). So no notice is needed when a request ends, moves or is preempted. One
exception: in a step that verifies drafts of a request which did not run in the previous
step, no rows are reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from ..layout.regions import StagedGroup
from ..layout.tables import ALIGNMENT, CopyTable, DeviceMemory
from ..step import Step

# int32, on the device.
_MAX_STEP = 2**31 - 1


class Seats:
    """Which requests have shadow blocks if there are fewer seats than requests: the
    seat of each index in the runner's request states, -1 for none. (An index cannot be
    the seat: vLLM reuses the index first that became free last.)

    A request keeps its seat as long as it keeps its index. Seats of indices that no
    request has any more go to requests that need one.

    of_state: [num_states] int32, on the host; on_device: the same, as ops.stage takes
    it.
    """

    def __init__(
        self, num_seats: int, num_states: int, max_in_flight: int, memory: DeviceMemory
    ) -> None:
        """max_in_flight: as in DraftCommitManager."""
        self.of_state = numpy.full(num_states, -1, numpy.int32)
        self.on_device = memory.take((num_states,), torch.int32).fill_(-1)
        self._free = list(reversed(range(num_seats)))
        # Sources of copies to the device: one for each step that may not have run yet.
        size = max_in_flight + 2, num_states
        is_cuda = self.on_device.device.type == "cuda"
        self._copies = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        self._number = 0
        # Of the last step in which requests lacked seats: the number of all requests,
        # the one that came last, and the indices without a seat.
        self._seen: tuple[int, tuple[str, int], bytes] | None = None

    def lack(self, indices: Any, live: dict[str, int] | None) -> bool:
        """Assigns free seats. Returns whether a request still has none.

        indices, live: host_state_indices and state_of_request of a Step.
        """
        assert live is not None
        of_state = self.of_state
        lacking = indices[of_state[indices] < 0]
        if len(lacking) == 0:
            return False
        # In the order in which they came.
        num_live, last = len(live), next(reversed(live.items()))
        if (num_live, last, lacking.tobytes()) == self._seen:  # nobody came or went
            return True
        is_gone = of_state >= 0
        is_gone[list(live.values())] = False
        self._free += of_state[is_gone].tolist()
        of_state[is_gone] = -1
        seated = lacking[: len(self._free)]
        if len(seated):
            of_state[seated] = [self._free.pop() for _ in seated]
            self._number = (self._number + 1) % len(self._copies)
            copy = self._copies[self._number]
            copy.copy_(torch.from_numpy(of_state))
            self.on_device.copy_(copy, non_blocking=True)
        rest = lacking[len(seated) :]
        self._seen = num_live, last, rest.tobytes()
        return len(rest) > 0


class BlockTableLost(RuntimeError):
    """A block table or slot mapping still names shadow blocks, and cannot be put back:
    later steps would write to them."""


def seats_num_bytes(num_states: int) -> int:
    """Enough device memory for Seats."""
    return num_states * torch.int32.itemsize + ALIGNMENT


class ShadowBlocks:
    """All staged groups of a runner: one launch for each table of layers, on the
    current stream, to begin, and one to commit. The manager makes these launches
    itself: each Python frame costs a step about 1 us.

    begins: (KV-cache group id, ops.StagedLayers.stage) of each table: copies to shadow
        blocks, and patches tables and slots, of the windows that have a seat. Where one
        fails, abort has to put back what others did.
    commits: ops.StagedLayers.commit of each table: copies kept rows, counts, and puts
        tables and slots back. Where one fails, kept rows are lost; abort as above.
    num_drafts: of the open step, at most, to be set before its first launch, and to 0
        after its last; 0 without one.
    held: the step whose tensors the launches read or write. It is freed when the next
        step starts, outside the hot path.
    num_seats: requests beyond so many have none; the undo log protects them.
    groups: by KV-cache group id.
    seats: on V2 who has one, where there are fewer than requests; else None.
    seat_of_state: as in ops.stage.
    step: number of the runner's step; steps without drafts count, too.
    saved: `saved` of ops.stage, by group: int32, device.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, StagedGroup, Sequence[CopyTable]]],
        counters: Sequence[torch.Tensor],
        ring: Sequence[torch.Tensor],
        ops: Any,
        memory: DeviceMemory,
        num_states: int,
        max_in_flight: int,
    ) -> None:
        """groups: (KV-cache group id, its shadow blocks, its layers).
        counters, ring: of each table of each group, in order, as ops.StagedLayers takes
        them. ops: what has StagedLayers. num_states, max_in_flight: as in
        DraftCommitManager."""
        self.num_seats = min(group.region.num_seats for _, group, _ in groups)
        self.groups = {gid: group for gid, group, _ in groups}
        self.seats: Seats | None = None
        if self.num_seats < num_states:
            self.seats = Seats(self.num_seats, num_states, max_in_flight, memory)
        self.seat_of_state = None if self.seats is None else self.seats.on_device
        self.saved: dict[int, torch.Tensor] = {}
        self.step = 1
        self.num_drafts = 0
        self.held: Step | None = None
        self.begins: list[tuple[int, Any]] = []
        self.commits: list[Any] = []
        # Of each group's first table, which put the shadow blocks into its block table.
        self._undos: list[Any] = []
        of_tables = zip(counters, ring, strict=True)
        for gid, group, tables in groups:
            saved = memory.take(group.saved_shape, torch.int32).zero_()
            self.saved[gid] = saved
            entries = group.first_entry, group.num_real_entries, group.span
            for index, part in enumerate(tables):
                layers = ops.StagedLayers(
                    part.table,
                    part.runs,
                    saved,
                    *next(of_tables),
                    *entries,
                    group.entry_tokens,
                    self.seat_of_state,
                    index == 0,  # patches
                    index == len(tables) - 1,  # undoes
                )
                self.begins.append((gid, layers.stage))
                self.commits.append(layers.commit)
                if index == 0:
                    self._undos.append(layers.unstage)

    def start_step(self, keeps: bool = True) -> None:
        """Call when the runner starts a step, also one without drafts: a shadow block's
        rows are reused only in the step after their commit.

        keeps: False: this step reuses none.
        """
        self.held = None
        self.step += 1 if keeps else 2
        if self.step > _MAX_STEP:
            self.step = 1

    def abort(self) -> None:
        """Enqueues launches that put tables and slots back, if a step is open.

        Raises:
            BlockTableLost: a table could not be put back; all others were.
        """
        if self.num_drafts == 0:
            return
        failure: Exception | None = None
        for unstage in self._undos:
            try:
                unstage()
            except Exception as error:
                failure = error
        self.num_drafts = 0
        if failure is not None:
            raise BlockTableLost(f"a block table cannot be put back: {failure}")
