#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the host's time for begin and commit goes, inside a real engine.

    python tools/gpu/host_profile.py CELL --json results/host_time.jsonl

Serves the same requests on the engine of a cell of cells.yml: unhooked (vLLM's own
code), in mode `stage`, and in mode `cow`. Measures begin and commit of each step; the
duration of an engine's step (the mean of steps, each the median of its runs, which make
the same batches); our kernels' time by torch's profiler; and with `stage` each of our
hooks, without vLLM's own part. A server runs the last of the hooks
(PrometheusStatLogger.record) in another process. In a tight loop all of it is several
times faster: between two steps its code leaves the CPU's caches.

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

# The baseline has no begin and no commit.
ARMS = (
    ab.UNHOOKED,
    ab.Arm("stage", hooked=True),
    ab.Arm("cow", hooked=True, stages=False),
)
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
        """Call before vLLM is imported: it is then that hooks are installed."""
        from vllm_nwor.base import wrap as _wrap

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
    """Runs all ARMS `rounds` times; the result's line."""
    options = parse(cell.arguments(BATCH))
    on = device_for(options)
    prepare_process(options, on)
    hooks = HookTimes()
    hooks.watch()
    engine = Engine(options, on)
    if engine.rpc(lambda worker: worker.model_runner.nwor_state.manager).shadow is None:
        raise EngineFailed(f"mode stage did not start: {engine.why_not()}")
    _, staged, logged = ARMS
    # Microseconds of begin and of commit, one a step; seconds of the steps of each run.
    times: dict[str, list[list[float]]] = {arm.name: [[], []] for arm in ARMS}
    step_s: dict[str, list[list[float]]] = {arm.name: [] for arm in ARMS}
    engine.run(staged)
    for number in range(rounds):
        for arm in ARMS[:: 1 if number % 2 == 0 else -1]:
            step_s[arm.name].append(engine.run(arm).step_s)
            if arm.hooked and (timed := engine.run(arm, times=True).nwor):
                times[arm.name][0] += timed.begin_us
                times[arm.name][1] += timed.commit_us
            print(f"{arm.name:10} of round {number + 1} done", flush=True)
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
            "cow": kernel_times(engine, logged),
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
    parser.add_argument("--rounds", type=whole(1), default=4, help="of all arms (4)")
    arguments = parser.parse_args(argv)
    cell = bench.BY_NAME[arguments.cell]

    def measure() -> None:
        result = profile(cell, arguments.rounds)
        print(report.rendered("host", [result]), flush=True)
        records.append(arguments.json, result)

    return bench.run_of(cell, measure)


if __name__ == "__main__":
    leave(main())
