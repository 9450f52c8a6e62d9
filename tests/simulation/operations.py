# SPDX-License-Identifier: Apache-2.0
"""What can happen in the simulation, as plain data drawn from a seed.

An operation is a kind and numbers that mean something in any state (a request is chosen
by its number modulo those that live), so that a list from which some were removed can
still be played, and a failing one be cut down. 0 is the plainest value of each number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.cache import MAX_DRAFTS, MAX_REQUESTS
from tests.simulation.step import EMPTY, FORMS, PADDED, PLAIN

# Kind, then its numbers; as JSON reads it.
Operation = list[Any]

# Of a run: none; an op raises; vLLM's forward or sampler raises; begin is not called;
# all groups are logged.
FAULTS = (
    *("none", "log", "restore", "stage", "commit"),
    *("forward", "sampler", "missed", "all logged"),
)
# So often, if any: an op's is drawn in vain where no group is logged, or staged.
_FAULT_WEIGHTS = (0, 3, 3, 3, 2, 2, 2, 2, 1)


def _request(draw: random.Random) -> int:
    return draw.randrange(16)


def _advance(draw: random.Random) -> tuple[int, ...]:
    num_drafts = draw.choice((0, 1, 2, 3, 4, 4, 4, MAX_DRAFTS))
    (special,) = draw.choices((PLAIN, PADDED, EMPTY), (20, 2, 1))
    accepted = draw.randint(0, num_drafts)
    return _request(draw), draw.randrange(24), num_drafts, accepted, special


def _run(draw: random.Random) -> tuple[int, ...]:
    fault = 0
    if draw.random() > 0.85:
        (fault,) = draw.choices(range(len(FAULTS)), _FAULT_WEIGHTS)
    sizes = draw.choice((0, 0, 0, 1, 3)), draw.choice((0, 0, 3))
    return (
        draw.randrange(len(FORMS)),
        fault,
        draw.randrange(6),
        draw.randrange(3),
        *sizes,
    )


# How often each kind happens, and how its numbers are drawn.
_KINDS: dict[str, tuple[int, Callable[[random.Random], tuple[int, ...]]]] = {
    # family, tokens of its prompt - 1
    "arrive": (5, lambda d: (d.randrange(3), d.choice((4, 6, d.randrange(24))))),
    # request, prefill tokens - 1, drafts, accepted, PLAIN/PADDED/EMPTY
    "advance": (60, _advance),
    # form of the output, FAULTS, which call, moment, upper bound - drafts, pads
    "run": (12, _run),
    # request, 1: in flight (between log and commit)
    "abort": (2, lambda d: (_request(d), d.choice((0, 1, 1)))),
    "preempt": (2, lambda d: (_request(d),)),
    "finish": (3, lambda d: (_request(d),)),
    # request, family, 1: another one of its length finishes before
    "fork": (5, lambda d: (_request(d), d.randrange(3), d.randrange(2))),
    "take back": (2, lambda d: (_request(d),)),
}
KINDS = tuple(_KINDS)


def draw_operations(draw: random.Random) -> Iterator[Operation]:
    """Operations without end."""
    weights = [weight for weight, _ in _KINDS.values()]
    while True:
        for kind in draw.choices(KINDS, weights, k=64):
            yield [kind, *_KINDS[kind][1](draw)]
            if draw.random() < 0.05:
                # All requests with the same numbers: those of one length stay so.
                _, *numbers = _advance(draw)
                for request in range(MAX_REQUESTS):
                    yield ["advance", request, *numbers]
                yield ["run", *_run(draw)]


def shrink(
    operations: list[Operation], fails: Callable[[list[Operation]], bool]
) -> list[Operation]:
    """The smallest list found for which `fails` still holds, as it does for
    `operations`: it does not without any one of them, or with any number smaller."""
    before: list[Operation] = []
    while before != operations:
        before = operations
        length = len(operations)
        while length := length // 2:  # halves of them, quarters, ... single ones
            start = 0
            while start < len(operations):
                fewer = operations[:start] + operations[start + length :]
                if fails(fewer):
                    operations = fewer
                else:
                    start += length
        for at, operation in enumerate(operations):
            for place in range(1, len(operation)):
                for smaller in range(operation[place]):
                    plainer = [*operation[:place], smaller, *operation[place + 1 :]]
                    changed = [*operations[:at], plainer, *operations[at + 1 :]]
                    if fails(changed):
                        operations, operation = changed, plainer
                        break
    return operations
