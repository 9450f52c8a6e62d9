#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the host's time for begin and commit goes, inside a real engine.

    python tools/gpu/host_profile.py CELL --json results/host_time.jsonl

Serves the same requests on the engine of a cell of cells.yml, each time with other
functions in place of a step's launches:

    unhooked   nothing: vLLM's own code
    stage      what NWOR does in mode stage
    unstaged   the same with functions that do nothing: Python's share
    builtins   what it does in mode cow
    unlaunched builtins, with functions that do nothing: Python's share
    add        torch's `x.add_(1)` at the same two places, for scale

Also: the duration of an engine's step with each (the mean of steps, each the median of
its runs, which make the same batches); our kernels' time by torch's profiler; and with
`stage` each of our hooks, without vLLM's own part. A server runs the last of the hooks
(PrometheusStatLogger.record) in another process. In a tight loop each of these is
several times faster: between two steps its code leaves the CPU's caches.

Exit status: 0 done; 1 vLLM does not run; 2 a bad argument.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy  # noqa: E402
from benchmarks import ab, environment, records, report  # noqa: E402
from benchmarks.arguments import parse, whole  # noqa: E402
from benchmarks.engine import Engine, EngineFailed  # noqa: E402
from benchmarks.settings import device_for, leave, prepare_process  # noqa: E402

from tools.gpu import bench  # noqa: E402

STAGE = "stage"
StandIn = Callable[..., object] | None
BATCH = 16
# As the profiler names them, with their signature.
OUR_KERNEL = re.compile(r"nwor::.*?(\w+)_kernel\b")


class HookTimes:
    """Times the hooks on methods that are installed after `watch`, without vLLM's own
    functions in them."""

    def __init__(self) -> None:
        self.on = False
        self.ns: dict[str, list[int]] = {}

    def watch(self) -> None:
        """Call before vLLM is imported, which installs the hooks."""
        from vllm_nwor.hooks import _wrap

        make = _wrap._hooked

        def make_timed(target: Any, function: Any, wrapper: Any) -> Any:
            if target.params[0] != "self":
                return make(target, function, wrapper)
            return self._timed(target, function, partial(make, target, wrapper=wrapper))

        _wrap._hooked = make_timed

    def _timed(self, target: Any, function: Any, make: Callable[..., Any]) -> Any:
        clock, inside = time.perf_counter_ns, 0

        @wraps(function)
        def vllms(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                inside = clock() - started

        hook = make(function=vllms)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            inside, started = 0, clock()
            try:
                return hook(*args, **kwargs)
            finally:
                taken = clock() - started - inside
                if self.on:
                    self.ns.setdefault(target.qualname, []).append(taken)

        return timed

    def result(self, num_steps: int) -> dict[str, Any]:
        """Microseconds of each hook: median of its calls, and sum over a step."""
        return {
            name: {
                "median_us": round(statistics.median(ns) / 1e3, 2),
                "calls": len(ns),
                "us_a_step": round(sum(ns) / 1e3 / num_steps, 2),
            }
            for name, ns in self.ns.items()
        }


def replaceable(manager: Any) -> Callable[[StandIn], None]:
    """A function that puts another one in the place of all launches of a manager, for
    shadow blocks and for the undo log; None restores them."""
    ways = [(w, w.begins, w.commits) for w in (manager.shadow, manager.undo_log)]

    def replace(stand_in: StandIn) -> None:
        for way, begins, commits in ways:
            way.begins = [(group, stand_in or launch) for group, launch in begins]
            way.commits = [stand_in or launch for launch in commits]

    return replace


def kinds_of_launches(device: Any) -> dict[str, tuple[ab.Arm, StandIn]]:
    """By name, the arm that is run and what replaces its launches."""
    import torch

    number = torch.zeros(1, device=device)
    staged = ab.Arm(STAGE, hooked=True)
    logged = ab.Arm("cow", hooked=True, stages=False)
    return {
        ab.UNHOOKED.name: (ab.UNHOOKED, None),
        STAGE: (staged, None),
        "unstaged": (staged, lambda *_: None),
        "builtins": (logged, None),
        "unlaunched": (logged, lambda *_: None),
        "add": (logged, lambda *_: number.add_(1)),
    }


def kernel_times(engine: Engine, arm: ab.Arm) -> dict[str, dict[str, float]]:
    """Of each kernel of this library that a run launches: median microseconds on the
    device, and launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.run(arm)
    found: dict[str, list[float]] = {}
    for event in profiled.events():
        name = OUR_KERNEL.search(event.name)
        if name is not None:
            found.setdefault(name[1], []).append(event.device_time)
    return {
        name: {"median_us": round(statistics.median(times), 2), "launches": len(times)}
        for name, times in found.items()
    }


def spread(microseconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile, in microseconds, of one number a step."""
    return {
        "median_us": round(statistics.median(microseconds), 2),
        "p95_us": round(numpy.percentile(microseconds, 95), 2),
        "steps": len(microseconds),
    }


def profile(cell: bench.Cell, rounds: int) -> dict[str, Any]:
    """Runs all kinds `rounds` times; the result's line."""
    options = parse(cell.arguments(BATCH))
    on = device_for(options)
    prepare_process(options, on)
    hooks = HookTimes()
    hooks.watch()
    engine = Engine(options, on)
    manager = engine.rpc(lambda worker: worker.model_runner.nwor_state.manager)
    if manager.shadow is None:
        raise EngineFailed(f"mode stage did not start: {engine.why_not()}")
    replace, kinds = replaceable(manager), kinds_of_launches(manager.device)
    (staged, _), (logged, _) = kinds[STAGE], kinds["builtins"]
    # Microseconds of begin and of commit, one a step; seconds of the steps of each run.
    times: dict[str, list[list[float]]] = {kind: [[], []] for kind in kinds}
    step_s: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    engine.run(staged)
    for number in range(rounds):
        for kind in list(kinds)[:: 1 if number % 2 == 0 else -1]:
            arm, stand_in = kinds[kind]
            replace(stand_in)
            step_s[kind].append(engine.run(arm).step_s)
            if arm.hooked and (timed := engine.run(arm, times=True).nwor):
                times[kind][0] += timed.begin_us
                times[kind][1] += timed.commit_us
            print(f"{kind:10} of round {number + 1} done", flush=True)
    replace(None)
    hooks.on = True
    num_steps = sum(len(engine.run(staged).step_s) for _ in range(rounds))
    hooks.on = False
    about = environment.describe(on, ROOT)
    key = {"cell": cell.name, "batch": BATCH, "gpu": about["machine"].get("gpu")}
    return {
        "key": key | {"vllm": records.vllm(about)},
        **about,
        "command": f"python tools/gpu/host_profile.py {cell.name} --rounds {rounds}",
        "hooks": hooks.result(num_steps),
        "kernels_us": {
            "stage": kernel_times(engine, staged),
            "builtins": kernel_times(engine, logged),
        },
        "step_us": {
            kind: 1e6 * statistics.mean(map(statistics.median, zip(*of, strict=True)))
            for kind, of in step_s.items()
        },
        "host": {
            kind: {
                "begin": spread(begin),
                "commit": spread(commit),
                "both": spread(list(map(sum, zip(begin, commit, strict=True)))),
            }
            for kind, (begin, commit) in times.items()
            if begin
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser_of(__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to append to")
    parser.add_argument("--rounds", type=whole(1), default=4, help="of all kinds (4)")
    arguments = parser.parse_args(argv)
    cell = bench.BY_NAME[arguments.cell]

    def measure() -> None:
        result = profile(cell, arguments.rounds)
        print(report.rendered("host", [result]), flush=True)
        records.append(arguments.json, result)

    return bench.run_of(cell, measure)


if __name__ == "__main__":
    leave(main())
