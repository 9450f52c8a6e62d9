# SPDX-License-Identifier: Apache-2.0
"""Cuts a failing run down: fewer operations, then plainer numbers in them.

What counts as the same failure is the caller's choice. The result is minimal in this
sense: without any one of its operations, or with any one number made 0, it no longer
fails that way.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.operations import Operation

Fails = Callable[[list[Operation]], bool]


def shrink(operations: list[Operation], fails: Fails) -> list[Operation]:
    """The smallest list found for which `fails` still holds. Requires that it holds
    for `operations`."""
    while True:
        smaller = _plainer(_fewer(operations, fails), fails)
        if smaller == operations:
            return operations
        operations = smaller


def _fewer(operations: list[Operation], fails: Fails) -> list[Operation]:
    """Leaves out runs of operations: half of them, a quarter, ... single ones."""
    length = len(operations) // 2
    while length:
        start = 0
        while start < len(operations):
            candidate = operations[:start] + operations[start + length :]
            if fails(candidate):
                operations = candidate
            else:
                start += length
        length //= 2
    return operations


def _plainer(operations: list[Operation], fails: Fails) -> list[Operation]:
    """Makes each number the smallest that still fails."""
    for at, (_, numbers) in enumerate(operations):
        for place, number in enumerate(numbers):
            for smaller in range(number):
                candidate = _with_number(operations, at, place, smaller)
                if fails(candidate):
                    operations = candidate
                    break
    return operations


def _with_number(
    operations: list[Operation], at: int, place: int, number: int
) -> list[Operation]:
    kind, numbers = operations[at]
    changed = (*numbers[:place], number, *numbers[place + 1 :])
    return [*operations[:at], (kind, changed), *operations[at + 1 :]]
