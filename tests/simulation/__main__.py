# SPDX-License-Identifier: Apache-2.0
"""Runs the simulation, or replays a failing list of operations.

    python -m tests.simulation --operations 20000
    python -m tests.simulation --seed 7 --operations 1000
    python -m tests.simulation --seed 7 --replay '[["arrive", 0, 3], ...]'

Each seed, from --seed on, is a world of its own with up to 1000 operations. The first
violation is shrunk to a short list and printed with the command that replays it; the
exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks import environment, records

from tests.simulation.simulator import Operation, Simulator, draw_operations

REPO = Path(__file__).resolve().parents[2]
OPERATIONS_PER_SEED = 1000


class Failure(AssertionError):
    """A seed's failure, shrunk. operations: the short list."""

    def __init__(
        self, error: Exception, seed: int, operations: list[Operation]
    ) -> None:
        super().__init__(
            f"{error}\nseed {seed} fails with {len(operations)} operations; replay:\n"
            f"  python -m tests.simulation --seed {seed} --replay "
            f"'{json.dumps(operations)}'"
        )
        self.seed, self.operations = seed, operations


def run(seed: int, num_left: int, totals: Counter[str], planted: Any = None) -> None:
    """Plays `num_left` operations, OPERATIONS_PER_SEED per seed, from `seed` on.
    totals: counts of events, added to. planted: as in Simulator. Raises Failure with
    the first violation, shrunk.
    """
    while num_left > 0:
        limit = min(OPERATIONS_PER_SEED, num_left)
        simulator = Simulator(seed, planted)
        try:
            simulator.play(draw_operations(random.Random(seed)), limit)
        except Exception as error:
            raise _cut_down(error, seed, planted) from error
        finally:
            totals.update(simulator.totals)
        num_left -= limit
        seed += 1


def _cut_down(error: Any, seed: int, planted: Any) -> Failure:
    """Shrinks to a failure of the same kind."""
    latest = error

    def fails(operations: list[Operation]) -> bool:
        nonlocal latest
        try:
            Simulator(seed, planted).play(operations)
        except Exception as found:
            kinds = {(type(e), getattr(e, "kind", "")) for e in (found, error)}
            latest = found if len(kinds) == 1 else latest
            return len(kinds) == 1
        return False

    return Failure(latest, seed, shrink(error.played, fails))


def shrink(
    operations: list[Operation], fails: Callable[[list[Operation]], bool]
) -> list[Operation]:
    """A list for which `fails` still holds, but not if any operation is removed or any
    number lowered."""

    before: list[Operation] = []
    while before != operations:
        before = operations
        length = len(operations)
        while length := length // 2:  # halves of them, quarters, ... single ones
            start = 0
            while start < len(operations):
                if fails(fewer := operations[:start] + operations[start + length :]):
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--replay", help="operations as JSON, for --seed's world")
    parser.add_argument("--json", type=Path, help="file to append what was found to")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help copies this small
    if args.replay is not None:
        Simulator(args.seed).play(json.loads(args.replay))
        print("no violation")
        return 0
    started = time.perf_counter()
    violations: list[str] = []
    totals: Counter[str] = Counter()
    try:
        run(args.seed, args.operations, totals)
    except Failure as failure:
        violations.append(str(failure))
        print(failure)
    seconds = time.perf_counter() - started
    num_operations = sum(n for name, n in totals.items() if name.startswith("operati"))
    if args.json is not None:
        found = {
            "key": {"program": "simulation"},
            **environment.describe("cpu", REPO),
            "command": " ".join(["python -m tests.simulation", *sys.argv[1:]]),
            "first_seed": args.seed,
            "num_operations": num_operations,
            "seconds": round(seconds, 1),
            "violations": violations,
            "totals": totals,
        }
        records.append(args.json, found)
    print(
        f"{num_operations} operations from seed {args.seed} on, "
        f"{totals['commits']} commits of {totals['windows']} windows, "
        f"in {seconds:.0f} s: {len(violations)} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
