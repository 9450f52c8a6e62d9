# SPDX-License-Identifier: Apache-2.0
"""Plays operations on a simulated vLLM with the real manager around each step.

Checks in every step: engine.py. An engine that raised is replaced by a new one on the
same memory.

An operation is a method of the Simulator: its name, and numbers that are valid in any
state (a request is chosen modulo the number of live ones), so that any sublist can be
played and a failing list shrunk. 0 is the simplest value of each number. Operations
without an effect are not counted.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.simulation.blocks import Blocks, Request, condense
from tests.simulation.cache import MAX_DRAFTS, MAX_REQUESTS, Cache
from tests.simulation.engine import FAULTS, Engine, Fault
from tests.simulation.step import EMPTY, FORMS, MAX_TOKENS, PADDED, PLAIN, Rows

LOGGER = logging.getLogger("vllm.v1.nwor")

# Kind, then its numbers; as JSON reads it.
Operation = list[Any]

# How often each of FAULTS is drawn.
_FAULT_WEIGHTS = (120, 4, 7, 3, 3, 2, 2, 2, 1)
_FAULT = [fault for fault, weight in enumerate(_FAULT_WEIGHTS) for _ in range(weight)]
_NUM_DRAFTS, _ACCEPTED = (0, 1, 2, 3, 4, 4, 4, MAX_DRAFTS), range(MAX_DRAFTS + 1)
_SPECIAL = [PLAIN] * 20 + [PADDED] * 2 + [EMPTY]
_REQUEST, _FORM = range(16), range(len(FORMS))
_BOUND, _PADS = (0, 0, 0, 1, 3), (0, 0, 3)

# How often each kind is drawn, and the values of each of its numbers.
_KINDS: dict[str, tuple[int, tuple[Sequence[int], ...]]] = {
    "arrive": (5, (range(3), [4, 6] * 24 + [*range(24)])),
    "advance": (60, (_REQUEST, range(24), _NUM_DRAFTS, _ACCEPTED, _SPECIAL)),
    "run": (12, (_FORM, _FAULT, range(6), range(3), _BOUND, _PADS)),
    "abort": (2, (_REQUEST, (0, 1, 1))),
    "preempt": (2, (_REQUEST,)),
    "finish": (3, (_REQUEST,)),
    "fork": (5, (_REQUEST, range(3), range(2))),
    "take back": (2, (_REQUEST,)),
}
KINDS = tuple(_KINDS)


def draw_operations(draw: random.Random) -> Iterator[Operation]:
    """An endless sequence of operations."""

    def operation(kind: str) -> Operation:
        return [kind, *map(draw.choice, _KINDS[kind][1])]

    weights = [weight for weight, _ in _KINDS.values()]
    while True:
        for kind in draw.choices(KINDS, weights, k=64):
            yield operation(kind)
            if draw.random() < 0.05:
                # The same for all requests, so that equal lengths stay equal.
                _, _, *numbers = operation("advance")
                for request in range(MAX_REQUESTS):
                    yield ["advance", request, *numbers]
                yield operation("run")


class Simulator:
    """One world, drawn from a seed: its cache, its engine, its requests.

    planted: called with each manager before its first step. totals: counts of events.
    """

    def __init__(self, seed: int, planted: Any = None) -> None:
        draw = random.Random(seed)
        self.settings: dict[str, Any] = {
            "strict": draw.random() < 0.1,
            "has_indices": draw.random() < 0.5,
            "capacity": draw.choice((6, 24, 24)),
        }
        self.cache = Cache(draw)
        self.is_lifo = draw.random() < 0.7
        self.payloads = np.random.default_rng(draw.randrange(1 << 32))
        self.planted = planted
        self.totals: Counter[str] = Counter()
        self.num_operations = self.num_arrived = 0
        self.requests: list[Request] = []
        self.batch: dict[str, Rows] = {}
        self._start_engine()

    def _start_engine(self) -> None:
        args = self.cache, self.totals, self.planted
        self.engine = Engine(*args, **self.settings)
        self.blocks = Blocks(self.cache, self.is_lifo, self.totals)
        self.rows: list[Request] = []
        self.indices = list(range(MAX_REQUESTS))

    def _end_engine(self) -> None:
        """Removes all requests and frees their blocks."""
        for request in list(self.requests):
            self._remove(request)
        assert len(self.blocks.free) == self.cache.num_blocks - 1, "blocks are lost"

    def play(self, operations: Iterable[Operation], limit: int | None = None) -> None:
        """Plays operations until `limit` of them took effect. Raises Violation, or an
        exception of the package, with the operations up to it in the attribute
        `played`.
        """
        played: list[Operation] = []

        def log(_: str, reason: str, *__: Any) -> None:
            """The first argument of a fallback's warning is its reason."""
            self.engine.log_lines[reason] += 1

        with patch.multiple(LOGGER, warning=log, disabled=True):
            try:
                for operation in operations:
                    if self.num_operations == limit:
                        break
                    played.append(operation)
                    took_effect = self._do(*operation)
                    self.totals[f"operations/{operation[0]}"] += took_effect
                    self.num_operations += took_effect
                self.engine.check_bytes("the end")
                self._end_engine()
            except Exception as error:
                error.played = played  # type: ignore[attr-defined]
                raise

    def _do(self, kind: str, *numbers: Any) -> bool:
        if kind not in ("arrive", "run"):
            if not self.requests:
                return False
            number, *more = numbers
            numbers = self.requests[number % len(self.requests)], *more
        return bool(getattr(self, kind.replace(" ", "_"))(*numbers))

    # -- operations: each returns whether it took effect ---------------------------

    def arrive(self, family: int, length: int) -> bool:
        """A request with length + 1 tokens of prompt."""
        if len(self.requests) == MAX_REQUESTS:
            return False
        self._new_request(family).extend(length + 1)
        return True

    def advance(
        self,
        request: Request,
        length: int,
        num_drafts: int,
        accepted: int,
        special: int,
    ) -> bool:
        """A request gets rows in the next batch: length + 1 prefill tokens, or a
        window. accepted: modulo num_drafts + 1. special: PLAIN, PADDED or EMPTY."""
        if request.name in self.batch:
            return False
        if not any(request.blocks):
            self.blocks.start(request)
        remaining = len(request.text) - request.num_computed
        num_rows = min(length + 1, remaining)
        is_last = num_rows == remaining
        if not is_last or (num_rows > 1 and not request.has_sampled):
            rows = Rows(request, num_rows, is_last=is_last)
        else:
            num_drafts = min(num_drafts, MAX_TOKENS - len(request.text))
            accepted = 0 if special == EMPTY else accepted % (num_drafts + 1)
            if special == PADDED and accepted == num_drafts:
                special = PLAIN
            rows = Rows(request, num_rows + num_drafts, num_drafts, accepted, special)
        end = rows.end - (rows.special == PADDED)
        while not self.blocks.grow(request, end):
            # The youngest other request that is not in the batch is preempted.
            idle = [r for r in self.requests if any(r.blocks) and r is not request]
            idle = [r for r in idle if r.name not in self.batch]
            if not idle:
                return False
            self._release(idle[-1])
            self.totals["forced_preemptions"] += 1
        self.batch[request.name] = rows
        return True

    def preempt(self, request: Request) -> bool:
        had_blocks = any(request.blocks)
        self._release(request)
        return had_blocks

    def abort(self, request: Request, in_flight: int) -> bool:
        """in_flight: between log and commit, if it is in the batch."""
        if not in_flight or request.name not in self.batch:
            self._remove(request)
            return True
        was_dropped = self.batch[request.name].dropped
        self.batch[request.name].dropped = True
        return not was_dropped

    def finish(self, request: Request) -> bool:
        if request.num_computed == 0:
            return False
        self._remove(request)
        return True

    def fork(self, parent: Request, family: int, replaces: int) -> bool:
        """A new request begins with the computed tokens of this one. replaces: another
        one of the same length finishes before."""
        is_idle = parent.num_computed > 0 and parent.name not in self.batch
        if not is_idle or len(self.blocks.free) < len(self.cache.groups):
            return False
        for other in self.requests if replaces else ():
            if other is not parent and other.num_computed == parent.num_computed:
                self._remove(other)
                break
        else:
            if len(self.requests) == MAX_REQUESTS:
                return False
        child = self._new_request(family)
        child.text = list(parent.text)
        self.blocks.fork(parent, child)
        return True

    def take_back(self, request: Request) -> bool:
        is_idle = request.num_computed > 0 and request.name not in self.batch
        return is_idle and self.blocks.take_back(request)

    def run(
        self, form: int, fault: int, call: int, moment: int, bound: int, pads: int
    ) -> bool:
        """Runs the batch: stage, begin, forward, sampling, commit. fault: index in
        FAULTS; other arguments: Engine.run and Fault."""
        if not self.batch:
            return False
        new = [rows for rows in self.batch.values() if rows.request.index < 0]
        for rows in new:
            rows.request.index = self.indices.pop()
        begins = any(rows.num_drafts for rows in new)
        batch = [rows.request for rows in self.batch.values()]
        has_indices = self.settings["has_indices"]
        self.rows = batch if has_indices else condense(self.rows, batch)
        in_order = [self.batch.pop(request.name) for request in self.rows]
        planted = Fault(FAULTS[fault], call, moment)
        live = {one.name: one.index for one in self.requests if one.index >= 0}
        drawn = {"pads": pads, "bound": bound, "form": form, "payloads": self.payloads}
        drawn["live"] = live
        if self.engine.run(in_order, begins, planted, **drawn):
            self._update(in_order)
        if self.engine.is_dead:
            self.totals["restarts"] += 1
            self._end_engine()
            self._start_engine()
        return True

    def _update(self, batch: list[Rows]) -> None:
        """The scheduler processes a step's output."""
        for rows in batch:
            request = rows.request
            if rows.dropped:
                self.totals["dropped_windows"] += rows.num_drafts > 0
                self._remove(request)
                continue
            if rows.is_last:
                request.extend(rows.num_valid_ids)
                request.has_sampled |= rows.num_valid_ids > 0
            if rows.special != EMPTY:
                self.blocks.commit(request, rows.num_rows - rows.num_rejected)
            if len(request.text) >= MAX_TOKENS:
                self._remove(request)

    # -- requests ------------------------------------------------------------------

    def _new_request(self, family: int) -> Request:
        self.num_arrived += 1
        blocks: list[list[int]] = [[] for _ in self.cache.groups]
        self.requests.append(Request(f"r{self.num_arrived}", family, blocks))
        return self.requests[-1]

    def _remove(self, request: Request) -> None:
        self._release(request)
        self.requests.remove(request)

    def _release(self, request: Request) -> None:
        self.batch.pop(request.name, None)
        self.blocks.release(request)
        request.has_sampled = False
        if request.index >= 0:
            self.indices.append(request.index)
            request.index = -1
