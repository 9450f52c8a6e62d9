# SPDX-License-Identifier: Apache-2.0
"""Runs the simulation, or plays one failing list of operations again.

    python -m tests.simulation --operations 20000 --seat-steps 200000
    python -m tests.simulation --seed 7 --operations 1000
    python -m tests.simulation --seed 7 --replay '[["arrive", 0, 3], ...]'

Seeds follow each other from --seed on, each a world of its own with up to 1000
operations. The first violation is cut down to a short list and printed with the command
that plays it; the exit status is 1. Then the same for the model of the seats' rule.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks import environment
from benchmarks.files import write_json

from tests.simulation import seats
from tests.simulation.memory import Violation
from tests.simulation.operations import Operation, draw_operations, from_text, to_text
from tests.simulation.shrink import shrink
from tests.simulation.simulator import Breakage, Simulator, Totals

REPO = Path(__file__).resolve().parents[2]
OPERATIONS_PER_SEED = 1000


class Failure(AssertionError):
    """A seed's failure, cut down. operations: the short list."""

    def __init__(self, seed: int, error: Exception, operations: list[Operation]):
        super().__init__(
            f"{error}\nseed {seed} fails with {len(operations)} operations; replay:\n"
            f"  python -m tests.simulation --seed {seed} --replay "
            f"'{to_text(operations)}'"
        )
        self.operations = operations


def run(
    seed: int, num_operations: int, totals: Totals, breakage: Breakage | None = None
) -> None:
    """Plays `num_operations` operations, OPERATIONS_PER_SEED a seed, from `seed` on.

    totals: what happened is added to it.

    Raises:
        Failure: the first one found, already cut down.
    """
    while num_operations > 0:
        limit = min(OPERATIONS_PER_SEED, num_operations)
        totals.add(run_seed(seed, limit, breakage))
        num_operations -= limit
        seed += 1


def run_seed(seed: int, limit: int, breakage: Breakage | None = None) -> Totals:
    """One world. Raises Failure."""
    simulator = Simulator(seed, breakage)
    try:
        simulator.play(draw_operations(random.Random(seed)), limit)
    except Exception as error:
        raise _cut_down(seed, error, breakage) from error
    return simulator.totals


def _cut_down(seed: int, error: Exception, breakage: Breakage | None) -> Failure:
    """A failure counts as the same if its kind is."""
    latest = error

    def fails(operations: list[Operation]) -> bool:
        nonlocal latest
        try:
            Simulator(seed, breakage).play(operations)
        except Exception as found:
            if _kind(found) == _kind(error):
                latest = found
                return True
        return False

    operations: list[Operation] = error.played  # type: ignore[attr-defined]
    if not fails(operations):
        return Failure(seed, RuntimeError(f"fails only now and then: {error}"), [])
    operations = shrink(operations, fails)
    fails(operations)
    return Failure(seed, latest, operations)


def _kind(error: Exception) -> tuple[type, str]:
    return type(error), getattr(error, "kind", "")


def record(
    totals: Totals, args: argparse.Namespace, seconds: float, violations: list[str]
) -> Any:
    """What a result file holds."""
    num_seeds = -(-totals.num_operations // OPERATIONS_PER_SEED)
    return {
        "kind": "simulation",
        "schema": 1,
        "command": " ".join(["python -m tests.simulation", *sys.argv[1:]]),
        "environment": environment.describe("cpu", REPO),
        "seeds": {"first": args.seed, "count": num_seeds},
        "num_seat_steps": args.seat_steps,
        "num_operations": totals.num_operations,
        "seconds": round(seconds, 1),
        "violations": violations,
        "totals": {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(totals).items()
        },
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
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    torch.set_num_threads(1)  # copies this small gain nothing from more
    if args.replay is not None:
        Simulator(args.seed).play(from_text(args.replay))
        print("no violation")
        return 0
    started = time.perf_counter()
    violations: list[str] = []
    totals = Totals()
    try:
        run(args.seed, args.operations, totals)
        seats.run(args.seed, args.seat_steps)
    except (Failure, Violation) as failure:
        violations.append(str(failure))
    seconds = time.perf_counter() - started
    if args.json is not None:
        write_json(args.json, record(totals, args, seconds, violations))
    for violation in violations:
        print(violation)
    print(
        f"{totals.num_operations} operations from seed {args.seed} on, "
        f"{totals.commits} commits of {totals.windows} windows, "
        f"{args.seat_steps} steps of seats, in {seconds:.0f} s: "
        f"{len(violations)} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
