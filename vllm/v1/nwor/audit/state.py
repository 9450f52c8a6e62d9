# SPDX-License-Identifier: Apache-2.0
"""Audit: the operations of a step on the KV audit's tables.

A step, in this order; each line is one op for each KV-cache group:

    begin_step    assigns new blocks to requests, forgets finished requests
    plan          records the planned writes of all requests; foreign_write
    (vLLM loads adapters; its forward, rejection sampling, NWOR's commit)
    reseed        of each new request whose adapter came with another content
    resolve       records the kept rows; wrong_prefix at each row and at the end of each
                  block; checksums of written rows: missing_write, changed (rejected);
                  each slot of the cached prefix of requests that are new in the batch;
                  checksums of older blocks, within the budget: changed; in some steps
                  a fingerprint of the weights; copies findings to the host, which does
                  not wait for them

Identities are recorded for all rows before anything is compared: a request may hit a
prefix that another one writes in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .. import ops
from ..layout.caches import Loads
from ..layout.tables import DeviceMemory
from ..step import Acceptance, LoadedAdapters, NewRequest, Scheduled, Step, Transfer
from ..step import Loads as StepLoads
from .fingerprints import Fingerprints
from .handover import Handovers
from .incident import Recorder
from .outbox import Outbox
from .requests import NO_FEATURES, Handover, Identity, Request, Requests, features_of
from .states import States
from .tables import FILLED, GIVEN, STORED, AuditedGroup

# The owner of a block that goes to another KV-cache group.
NOBODY = 0
# Bytes of a hit that are compared when it is taken over, in budgets of a step.
HIT_BUDGETS = 4
# Steps with requests before there is a second stream. Where vLLM's warm-up had used it
# before the CUDA graphs were captured, vLLM's launches in the main stream began later.
BESIDE_FROM = 64

# As RunnerCaches.text_of.
TextOf = Callable[[int, int], torch.Tensor]
# For each audited group, the new owners (generations) of blocks.
Owners = list[dict[int, int]]


class Audit:
    """All audited groups of a runner.

    step: of this runner, from 1. recorder: of an incident file, or None. beside_from:
    resolve runs in a second stream after it ran so many times; 0: it never does.
    """

    def __init__(
        self,
        groups: Sequence[AuditedGroup],
        budget_bytes: int,
        num_seats: int,
        block_sizes: Sequence[int],
        memory: DeviceMemory,
        loads: Loads = Loads.NONE,
        is_async: bool = False,
        adapters: LoadedAdapters | None = None,
        states: States | None = None,
        store_is_own: bool = False,
        handovers: Handovers | None = None,
    ) -> None:
        """budget_bytes: of the caches, compared in a step; 0 compares none.
        block_sizes: tokens a block of each KV-cache group, audited or not. is_async:
        the host does not know a running request's text. adapters: of the worker.
        store_is_own: as Digests.is_own."""
        self.groups = tuple(groups)
        self.loads = loads
        # A load is under way of which the scheduler could not say what it fills.
        self._has_lost_loads = False
        self.device = memory.device
        self._ops = ops.load_builtins(self.device)
        self.requests = Requests(num_seats, adapters)
        self.states = states
        # Of the open step: its metadata, and what keeps the addresses there alive.
        self._states_read: tuple[torch.Tensor, Any] | None = None
        self.beside_from = 0
        self._lent: object = None  # of vLLM's: the second stream may still read it
        self.fingerprints = Fingerprints(self.groups[0].records.device)
        about = self.groups, self.requests, self.fingerprints, states
        self.outbox = Outbox(*about, store_is_own, handovers)
        self.step = 0
        self._is_async = is_async
        self._block_sizes = tuple(block_sizes)
        self._num_scanned = self._blocks_of(budget_bytes)
        self._row_ids: list[str] = []
        self._row_seats = memory.take((num_seats,), torch.int32).zero_()
        self._open: Step | None = None
        # Requests that entered the batch with a cached prefix in this step: their rows,
        # and the tokens of the prefix.
        self._fresh: dict[str, tuple[int, torch.Tensor]] = {}
        self._scheduled: Scheduled | None = None
        self.recorder: Recorder | None = None
        self._had_drafts = self._has_drafts = False
        self.snapshot()

    @property
    def num_bytes(self) -> int:
        of_states = self.states.num_bytes if self.states else 0
        return of_states + sum(group.num_bytes for group in self.groups)

    def steps_of_a_pass(self, num_blocks: int) -> int:
        """Steps until `num_blocks` blocks were compared once."""
        return -(-num_blocks // max(self._num_scanned, 1))

    def _blocks_of(self, budget_bytes: int) -> int:
        """Blocks of each group that are compared in a step."""
        total = sum(group.block_bytes for group in self.groups) or 1
        return max(budget_bytes // total, 1) if budget_bytes else 0

    def _run_beside(self, is_all: bool) -> None:
        """From now on resolve runs in a stream of its own, beside what the step does
        next, until Outbox.join; unless is_all, only what reads caches. On CUDA."""
        beside, forked = torch.cuda.Stream(self.device), torch.cuda.Event()
        forked.record()
        self.outbox.stream, self._forked = beside, forked
        for group in self.groups:
            group.set_beside(beside.cuda_stream, forked.cuda_event, is_all)

    def restart(self, budget_bytes: int) -> None:
        """Restarts after steps that the audit did not see. No request may be running.
        budget_bytes: the new budget; 0 only if it was 0 from the start."""
        self.requests.forget(*self.requests)
        self.forget_cache()
        for group in self.groups:
            group.numbers.clear()
        for digests in self.outbox.judge.digests:
            digests.is_own = False
        self._num_scanned = self._blocks_of(budget_bytes)

    # -- the scheduler's output ----------------------------------------------------

    def begin_step(self, scheduled: Scheduled) -> None:
        """Call before the step's rows. `plan` applies `scheduled`, or on_transfer does
        before a connector fills blocks: until then a connector may read blocks for
        their previous requests."""
        self._take_in()
        self.step += 1
        # If the last step failed, what these requests found was not compared.
        self.requests.release_seats(*self._fresh)
        self._fresh = {}
        self._open = self._lent = None
        self._scheduled = scheduled
        if self.recorder:
            self.recorder.begin_step(self.step, scheduled)

    def _take_in(self) -> None:
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        self._has_drafts = scheduled.has_drafts()
        finished, preempted = scheduled.finished(), scheduled.preempted()
        for request in map(self.requests.get, (*finished, *preempted)):
            if request is not None and request.handover:
                self.outbox.end_handover(request.generation)
        self.requests.forget(*finished)
        self.requests.preempt(*preempted)
        zeroed, copied = scheduled.zeroed_blocks(), scheduled.copied_blocks()
        for group in self.groups:
            self._blocks(group, GIVEN, dict.fromkeys(zeroed, NOBODY).items())
            for copy in copied:
                group.copy_block(*copy)
        if self.states:
            for copy in copied:
                self.states.copy_block(*copy)
        if self.loads is Loads.UNKNOWN:
            self._begin_loads(scheduled.loads())
        owners: Owners = [{} for _ in self.groups]
        weights = scheduled.weights()
        self.requests.name_weights(weights)
        for new in scheduled.new_requests():
            identity = Identity(new.adapter, new.cache_salt, weights)
            about = new.num_computed, new.is_known, identity, features_of(new)
            request = self._add(owners, new.request_id, new.block_ids, *about)
            self._hand_over(request, new)
        for running in scheduled.running_requests(with_blocks=True):
            name, blocks, num_computed, is_resumed, is_known = running
            request = self.requests[name]
            if is_resumed:
                assert blocks is not None
                # It is computed again: by the weights and the adapter of now.
                identity = request.identity._replace(weights=weights)
                about = num_computed, is_known, identity, request.features
                resumed = self._add(owners, name, blocks, *about)
                if request.given is not None:
                    self._hand_over(resumed, request.given)
            elif blocks is not None:
                self._give(owners, request, blocks, 0)
        for group, of_group in zip(self.groups, owners, strict=True):
            self._blocks(group, GIVEN, of_group.items())

    def _add(
        self,
        owners: Owners,
        name: str,
        blocks: Sequence[Sequence[int]],
        num_computed: int,
        is_known: bool,
        *about: Any,
    ) -> Request:
        """Adds a new or resumed request. is_known: as in NewRequest. about: a Request's
        fields, from identity on."""
        loads = self.loads
        if loads is Loads.UNKNOWN and is_known and not self._has_lost_loads:
            loads = Loads.KNOWN
        request = self.requests.add(name, num_computed, loads, *about)
        self._give(owners, request, blocks, num_computed)
        return request

    def _hand_over(self, request: Request, new: NewRequest) -> None:
        request.handover = self.outbox.begin_handover(request.generation, new)
        if request.handover is Handover.GIVES:
            request.given = new

    def _begin_loads(self, loads: StepLoads | None) -> None:
        """Blocks that are loaded from now on hold something else, be it that a request
        finds them, or that it ends first. A load in this step may still fail."""
        if loads is None:
            self._has_lost_loads = True
            return
        for blocks in loads.blocks:
            self.on_transfer(Transfer(blocks, None, fills=True))
        if loads.num_failed:
            self.outbox.add_failed(loads.num_failed)

    def _give(
        self,
        owners: Owners,
        request: Request,
        blocks: Sequence[Sequence[int]],
        num_computed: int,
    ) -> None:
        """Blocks become a request's own, except those of what it found. A block that
        goes to one group holds nothing of another group any more. owners: mutated."""
        generation = request.generation
        for group_id, ids in enumerate(blocks):
            size = self._block_sizes[group_id]
            own = [block for block in ids[num_computed // size :] if block]
            is_of_states = self.states and group_id in self.states.group_ids
            others = -generation if is_of_states else NOBODY
            for group, of_group in zip(self.groups, owners, strict=True):
                is_its = group_id == group.shape.group_id
                of_group.update(dict.fromkeys(own, generation if is_its else others))
                if is_its and self._has_lost_loads:
                    # A load for a request that ended first may have filled them.
                    empty = filter(None, ids[-(-num_computed // size) :])
                    self._blocks(group, GIVEN, dict.fromkeys(empty, NOBODY).items())

    def _blocks(
        self, group: AuditedGroup, event: int, values: Collection[tuple[int, int]]
    ) -> None:
        """event, and the value of each block: as BlockEvent of audit.h."""
        if values:
            ids, of_ids = zip(*values, strict=True)
            blocks = torch.tensor(ids, dtype=torch.int32)
            numbers = torch.tensor(of_ids, dtype=torch.int64)
            self._ops.audit_blocks(group.tables, event, blocks, numbers, self.step)

    # -- the cache -----------------------------------------------------------------

    def snapshot(self, again: bool = False) -> None:
        """Takes the checksums of all slots that no step has written, so that a first
        write that does not happen, or a first draft that is not undone, is noticed,
        too. again: only of those that have the checksums of the snapshot before. Reads
        the whole cache."""
        for group in self.groups:
            self._ops.audit_snapshot(group.tables, again)

    def forget_cache(self) -> None:
        """Forgets what the cache holds, as if no step had written to it."""
        for group in self.groups:
            group.forget_cache()
        if self.states:
            self.states.forget_all()

    def lose_cache(self) -> None:
        """Call when the cache's content is gone, as after a wake-up: what its slots
        hold is then nobody's text."""
        for group in self.groups:
            group.lose_cache(self.step)
        if self.recorder:
            self.recorder.cache_lost()

    def on_transfer(self, transfer: Transfer) -> None:
        """A KV connector is about to read blocks (handed_on), or to fill them. The
        content of a load is later compared with the last store to the same place. The
        old content of filled blocks is kept, to check that the load changes it, unless
        another group wrote it, or a load that failed."""
        blocks, places, fills = transfer
        lost = self.outbox.take_failed(chain(*blocks)) if fills else ()
        self.outbox.join()
        if self.recorder:
            self.recorder.transfer(transfer)
        if fills:
            # vLLM has zeroed and copied blocks, perhaps these, before the load.
            self._take_in()
            if self.states:
                self.states.forget(list(chain(*blocks)))
        for group in self.groups:
            group_id = group.shape.group_id
            numbers = [0] * len(blocks[group_id])
            if places is not None:
                numbers_of = group.stored if fills else group.store
                numbers = numbers_of(places[group_id])
            of_blocks = list(zip(blocks[group_id], numbers, strict=True))
            if fills:
                others = chain(lost, *blocks[:group_id], *blocks[group_id + 1 :])
                self._blocks(group, GIVEN, dict.fromkeys(others, NOBODY).items())
            self._blocks(group, FILLED if fills else STORED, of_blocks)

    # -- a step --------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a plan waits for its resolve."""
        return self._open is not None

    def plan(self, step: Step, text_of: TextOf) -> None:
        """Call when block tables and slots are final and name real blocks.

        text_of: called for rows of requests that were not in the last batch.
        """
        self._take_in()
        if self._has_drafts and not self._had_drafts:
            # Target and drafter ran by now. A layer may fill its cache when it first
            # runs (TRITON_ATTN, scales per token and head).
            self._had_drafts = True
            if not self._has_lost_loads:  # then a load may have filled blocks
                self.snapshot(again=True)
        self._identify(0)
        # Requests change their rows, and keep their index in the runner's states.
        is_moved = step.state_indices is None and self._row_ids != step.request_ids
        if self.requests.is_changed or is_moved:
            self._seat_rows(step, text_of)
        if self.recorder:
            seats = ((name, self.requests[name].seat) for name in step.request_ids)
            self.recorder.rows(seats)
        for group in self.groups:
            self._ops.audit_plan(
                *self._rows(group, step),
                step.token_ids,
                step.positions,
                step.slot_mappings[group.shape.group_id],
            )
        self._open = step
        self._states_read = None

    def read_states(self, step: Step, metadata: torch.Tensor, kept: Any) -> None:
        """Call between plan and the forward, when the kernels' metadata is final.
        metadata, kept: as RunnerCaches.read_states."""
        assert self.states is not None
        self._identify(step.num_tokens)
        self.states.set_block_tables(step.block_tables)
        rows = self._rows(self.groups[0], step)
        self._ops.audit_states_read(*rows, self.states.tables, metadata)
        self._states_read = metadata, kept

    def _identify(self, num_tokens: int) -> None:
        """Before something is compared: the identity of new requests is that of their
        adapter's content. num_tokens: of the plan."""
        if not self.requests.awaits_adapters:
            return
        for request, delta in self.requests.identify():
            for group in self.groups if request.seat is not None else ():
                self._ops.audit_reseed(group.tables, request.seat, delta, num_tokens)

    def _rows(self, group: AuditedGroup, step: Step) -> tuple[Any, ...]:
        return (
            group.tables,
            self._row_seats if step.state_indices is None else step.state_indices,
            step.query_start_loc,
            step.block_tables[group.shape.group_id],
            step.num_reqs,
            step.num_tokens,
            self.step,
        )

    def _seat_rows(self, step: Step, text_of: TextOf) -> None:
        """A request's seat is its index in the runner's states, if it has one."""
        seats, row_ids = [], step.request_ids
        for row, name in enumerate(row_ids):
            request = self.requests[name]
            if request.seat is None:
                if step.state_of_request is None:
                    tokens = text_of(row, request.num_found)
                    request.seat = self.requests.free_seat(row_ids)
                else:
                    request.seat = step.state_of_request[name]
                    tokens = text_of(request.seat, request.num_found)
                if len(tokens := self._assign_seat(request, tokens)):
                    self._fresh[name] = row, tokens
            seats.append(request.seat)
        if step.state_indices is not None:
            self.requests.is_changed = any(
                request.seat is None for request in self.requests.values()
            )
            return
        self._row_ids = list(row_ids)
        self.requests.is_changed = False
        on_host = torch.tensor(seats, dtype=torch.int32)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()
        self._row_seats[: len(seats)].copy_(on_host, non_blocking=True)

    def _assign_seat(self, request: Request, tokens: torch.Tensor) -> torch.Tensor:
        """Writes the seat's record. Returns the tokens, on the audit's device."""
        if tokens.device.type != self.device.type:
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        # Of a running request only the device has the text.
        is_opaque = request.was_seated and self._is_async
        request.was_seated = True
        features = request.features
        if features is None:
            is_opaque, features = True, NO_FEATURES
        seed = request.identity.seed
        of_others = request.loads, request.handover
        about = request.generation, seed, is_opaque, *of_others, features
        for group in self.groups:
            self._ops.audit_seat(group.tables, tokens, request.seat, *about)
        return tokens

    def resolve(self, step: Step, acceptance: Acceptance | None) -> None:
        """Call after sampling and commit, before anything else writes to the caches.
        Findings are sent to the host at the end.

        step: of plan. acceptance: None without drafts.
        """
        self._open = None
        self._identify(step.num_tokens)
        self.requests.settle()
        if 0 < self.beside_from <= self.outbox.num_sent and not self.outbox.stream:
            # The V1 runner writes to what its states' metadata refers to.
            self._run_beside(step.state_indices is not None)
        fresh, self._fresh = self._fresh, {}
        self._lent = step, acceptance, self._states_read, fresh
        cu_num_logits: torch.Tensor | None = None
        kept: tuple[Any, ...] = (None, 0, None)
        if acceptance is not None:
            assert step.cu_num_logits is not None
            cu_num_logits = step.cu_num_logits[step.num_leading_zeros :]
            kept = acceptance.sampled_token_ids, acceptance.vocab_size
            kept = *kept, acceptance.num_rejected
        places, to_states, _ = self.outbox.claim()
        if self._states_read is not None:
            assert self.states is not None
            rows = self._rows(self.groups[0], step)
            about = self.states.tables, self._states_read[0], cu_num_logits, *kept
            self._ops.audit_states_written(*rows, *about, to_states)
            self._states_read = None
        # Loaded prefixes first: other requests may share them in the same step.
        names = sorted(fresh, key=lambda name: -self.requests[name].loads)
        texts = map(fresh.__getitem__, names)
        of_hits = [(row, text.data_ptr(), len(text)) for row, text in texts]
        hits = torch.tensor(of_hits) if of_hits else None
        budgets = self._num_scanned, HIT_BUDGETS * self._num_scanned
        if (words := self.fingerprints.due(self.step)) is not None:
            self.groups[0].set_words(words)
        for group, to_group in zip(self.groups, places, strict=True):
            rows = self._rows(group, step)
            of_drafts = step.undone(group.shape.group_id)
            how = cu_num_logits, *kept, *of_drafts, hits, *budgets
            self._ops.audit_resolve(*rows, *how, *to_group)
        if words is not None:
            self.groups[0].set_words(None)
        self.outbox.sent()

    def totals(self) -> Mapping[str, int]:
        """How much was compared so far: identities, and slots' bytes; returned: slots
        that came back from a KV connector, with what was stored."""
        names = ("findings", "unverified", "identities", "contents", "returned")
        headers = torch.stack([group.findings[0] for group in self.groups])
        found = dict(zip(names, headers.sum(dim=0).tolist(), strict=False))
        found["unverified"] -= self.outbox.judge.num_settled
        return found
