# SPDX-License-Identifier: Apache-2.0
"""What can happen in the simulation, as plain data drawn from a seed.

An operation is a kind and numbers that mean something in any state (a request is chosen
by its number modulo those that live), so that a list from which some were removed can
still be played. 0 is the plainest value of each number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

# Kind, then its numbers.
Operation = tuple[str, tuple[int, ...]]

ARRIVE = "arrive"  # family, tokens of its prompt - 1
ADVANCE = "advance"  # request, prefill tokens - 1, drafts, accepted, PLAIN/PADDED/EMPTY
RUN = "run"  # acceptance form, FAULT, which launch, moment, upper bound - drafts, pads
ABORT = "abort"  # request, 1: in flight (between log and commit)
PREEMPT = "preempt"  # request
FINISH = "finish"  # request
FORK = "fork"  # request, family, 1: another one of its length finishes before
TAKE_BACK = "take back"  # request

# Of a window: all as usual; its last rejected draft has slot -1; the sampler returns no
# valid token at all.
PLAIN, PADDED, EMPTY = range(3)

# Of a run: none; an op raises; vLLM's forward or sampler raises; begin not called; NWOR
# told to log all groups.
NO_FAULT, LOG_FAULT, RESTORE_FAULT, FORWARD_FAULT, SAMPLER_FAULT = range(5)
MISSED, STAGE_FAULT, COMMIT_FAULT, ALL_LOGGED = range(5, 9)
OP_FAULTS = (LOG_FAULT, RESTORE_FAULT, STAGE_FAULT, COMMIT_FAULT)
FAULT_NAMES = (
    *("none", "log op", "restore op", "forward", "sampler"),
    *("begin missed", "stage op", "commit op", "all logged"),
)

# More than a block of some groups.
MAX_DRAFTS = 6
MAX_REQUESTS = 6
_WEIGHTS = {
    ARRIVE: 5,
    ADVANCE: 60,
    RUN: 12,
    ABORT: 2,
    PREEMPT: 2,
    FINISH: 3,
    FORK: 5,
    TAKE_BACK: 2,
}

KINDS = tuple(_WEIGHTS)


def draw_operations(draw: random.Random) -> Iterator[Operation]:
    """Operations without end."""
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    while True:
        for kind in draw.choices(kinds, weights, k=64):
            yield kind, _numbers(kind, draw)
            if draw.random() < 0.05:
                yield from _round(draw)


def _round(draw: random.Random) -> Iterator[Operation]:
    """A step of all requests with the same numbers: those of one length stay so."""
    _, *numbers = _numbers(ADVANCE, draw)
    for request in range(MAX_REQUESTS):
        yield ADVANCE, (request, *numbers)
    yield RUN, _numbers(RUN, draw)


def _numbers(kind: str, draw: random.Random) -> tuple[int, ...]:
    request = draw.randrange(16)
    if kind == ARRIVE:
        return draw.randrange(3), draw.choice((4, 6, draw.randrange(24)))
    if kind == ADVANCE:
        num_drafts = draw.choice((0, 1, 2, 3, 4, 4, 4, MAX_DRAFTS))
        accepted = draw.randint(0, num_drafts)
        special = draw.choices((PLAIN, PADDED, EMPTY), (20, 2, 1))[0]
        return request, draw.randrange(24), num_drafts, accepted, special
    if kind == RUN:
        fault = NO_FAULT
        if draw.random() > 0.85:
            faults = (*OP_FAULTS, LOG_FAULT, STAGE_FAULT, FORWARD_FAULT, SAMPLER_FAULT)
            fault = draw.choice((*range(1, len(FAULT_NAMES)), *faults, MISSED))
        bound = draw.choice((0, 0, 0, 1, 3))
        return (
            draw.randrange(4),
            fault,
            draw.randrange(6),
            draw.randrange(3),
            bound,
            draw.choice((0, 0, 3)),
        )
    if kind == ABORT:
        return request, draw.choice((0, 1, 1))
    if kind == FORK:
        return request, draw.randrange(3), draw.randrange(2)
    return (request,)


def to_text(operations: list[Operation]) -> str:
    """One line of JSON that `from_text` reads back."""
    return json.dumps([[kind, *numbers] for kind, numbers in operations])


def from_text(text: str) -> list[Operation]:
    """Raises ValueError, naming the operation, if one is not of this module."""
    known = random.Random(0)
    operations: list[Operation] = []
    for kind, *numbers in json.loads(text):
        expected = len(_numbers(kind, known)) if kind in _WEIGHTS else None
        if len(numbers) != expected or not all(type(n) is int for n in numbers):
            raise ValueError(
                f"operation {[kind, *numbers]} is not allowed: expected one of "
                f"{', '.join(_WEIGHTS)} and its numbers"
            )
        operations.append((kind, tuple(numbers)))
    return operations
