# SPDX-License-Identifier: Apache-2.0
"""Runs the simulation, or plays one failing list of operations again.

    python -m tests.simulation --operations 20000 --seat-steps 200000
    python -m tests.simulation --seed 7 --operations 1000
    python -m tests.simulation --seed 7 --replay '[["arrive", 0, 3], ...]'

Seeds follow each other from --seed on, each a world of its own with up to 1000
operations. The first violation is cut down to a short list and printed with the command
that plays it; the exit status is 1. Then the same with the model of the seats' rule for
an engine (--replay plays there if --of-seats is given, too).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks import environment
from benchmarks.files import write_json

from tests.simulation.operations import Operation, draw_operations, shrink
from tests.simulation.simulator import Simulator

REPO = Path(__file__).resolve().parents[2]
OPERATIONS_PER_SEED = 1000


class Failure(AssertionError):
    """A seed's failure, cut down. operations: the short list."""

    def __init__(
        self, error: Exception, seed: int, operations: list[Operation], of_seats: bool
    ) -> None:
        super().__init__(
            f"{error}\nseed {seed} fails with {len(operations)} operations; replay:\n"
            f"  python -m tests.simulation --seed {seed} --replay "
            f"'{json.dumps(operations)}'{' --of-seats' * of_seats}"
        )
        self.seed, self.operations = seed, operations


def run(
    seed: int,
    num_left: int,
    totals: Counter[Any],
    breakage: Any = None,
    of_seats: bool = False,
) -> None:
    """Plays `num_left` operations (with of_seats as many steps, if not a few more),
    OPERATIONS_PER_SEED a seed, from `seed` on.

    totals: what happened is added to it.

    Raises:
        Failure: the first one found, already cut down.
    """
    while num_left > 0:
        simulator = Simulator(seed, breakage, of_seats)
        limit = OPERATIONS_PER_SEED if of_seats else min(OPERATIONS_PER_SEED, num_left)
        try:
            simulator.play(draw_operations(random.Random(seed)), limit)
        except Exception as error:
            raise _cut_down(error, seed, breakage, of_seats) from error
        totals += simulator.totals
        num_left -= simulator.totals["operations", "run"] if of_seats else limit
        seed += 1


def _cut_down(error: Exception, seed: int, breakage: Any, of_seats: bool) -> Failure:
    """A failure counts as the same if its kind is."""
    kinds = {(type(error), getattr(error, "kind", ""))}
    latest = error

    def fails(operations: list[Operation]) -> bool:
        nonlocal latest
        try:
            Simulator(seed, breakage, of_seats).play(operations)
        except Exception as found:
            if (type(found), getattr(found, "kind", "")) in kinds:
                latest = found
                return True
        return False

    operations = shrink(error.played, fails)  # type: ignore[attr-defined]
    return Failure(latest, seed, operations, of_seats)


def record(
    totals: Counter[Any],
    args: argparse.Namespace,
    seconds: float,
    violations: list[str],
) -> Any:
    """What a result file holds."""
    nested: dict[str, Any] = {}
    for name, number in totals.items():
        if isinstance(name, str):
            nested[name] = number
        else:
            nested.setdefault(name[0], {})[name[1]] = number
    num_operations = sum(nested.get("operations", {}).values())
    return {
        "kind": "simulation",
        "schema": 1,
        "command": " ".join(["python -m tests.simulation", *sys.argv[1:]]),
        "environment": environment.describe("cpu", REPO),
        "seeds": {
            "first": args.seed,
            "count": -(-num_operations // OPERATIONS_PER_SEED),
        },
        "num_seat_steps": args.seat_steps,
        "num_operations": num_operations,
        "seconds": round(seconds, 1),
        "violations": violations,
        "totals": nested,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seat-steps", type=int, default=0, help="of seats.py")
    parser.add_argument("--replay", help="operations as JSON, for --seed's world")
    parser.add_argument("--of-seats", action="store_true", help="--replay there")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    torch.set_num_threads(1)  # copies this small gain nothing from more
    if args.replay is not None:
        Simulator(args.seed, None, args.of_seats).play(json.loads(args.replay))
        print("no violation")
        return 0
    started = time.perf_counter()
    violations: list[str] = []
    totals: Counter[Any] = Counter()
    try:
        run(args.seed, args.operations, totals)
        run(args.seed, args.seat_steps, Counter(), of_seats=True)
    except Failure as failure:
        violations.append(str(failure))
    found = record(totals, args, time.perf_counter() - started, violations)
    if args.json is not None:
        write_json(args.json, found)
    for violation in violations:
        print(violation)
    print(
        f"{found['num_operations']} operations from seed {args.seed} on, "
        f"{totals['commits']} commits of {totals['windows']} windows, "
        f"{args.seat_steps} steps of seats, in {found['seconds']:.0f} s: "
        f"{len(violations)} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
