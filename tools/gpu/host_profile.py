#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a step is longer by, inside a real engine: on the host and on the device.

    python tools/gpu/host_profile.py CELL --json results/host_time.jsonl [--picture F]

Serves the same requests on the engine of a cell of cells.yml: unhooked (vLLM's own
code), in mode `cow`, and in mode `stage`; or with the KV audit, where the cell is about
that. Measures begin and commit of each step; how long an engine's steps are (each the
median of its runs); with what the cell is about each of our hooks, without vLLM's own
part; and by torch's profiler the time of our kernels, of vLLM's and of nothing on the
device, and what surrounds ours in one step: `--picture` draws that from the file. A
server runs the last hook, PrometheusStatLogger.record, in another process.

Exit status: 0 done; 1 vLLM does not run; 2 a bad argument.
"""

from __future__ import annotations

import io
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import ab, records, report  # noqa: E402
from benchmarks.arguments import parse, whole  # noqa: E402
from benchmarks.engine import Engine, EngineFailed  # noqa: E402
from benchmarks.files import write_whole  # noqa: E402
from benchmarks.settings import leave  # noqa: E402

import bench_vllm  # noqa: E402
from tools.gpu import bench  # noqa: E402

# As the profiler names them, with their signature; the audit's kernels by their pass.
OUR_KERNEL = re.compile(r"nwor::.*?(\w+)_kernel\b(?:<[^>]*?(\w+)>)?")
# Of one step, around commit (the audit: what is its first there): microseconds before
# and after the kernel that precedes it.
BEFORE_US, AFTER_US = 20, 140
STEP_PARTS = "theirs_us", "alone_us", "idle_us"
PROFILED_ROUNDS = 2  # to read one run's events takes the profiler seconds


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


class Event(NamedTuple):
    """What the device did. start_us: since any moment."""

    name: str
    start_us: float
    us: float

    @property
    def ours(self) -> str | None:
        """Its short name, if it is a kernel of this library."""
        found = OUR_KERNEL.search(self.name)
        return found and (found[2] or found[1])


def device_events(engine: Engine, arm: ab.Arm) -> tuple[list[Event], int]:
    """Those of one run, and its steps."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steps = engine.run(arm).step_s
    events = [
        Event(one.name, one.time_range.start, one.device_time)
        for one in profiled.events()
        if one.device_type == DeviceType.CUDA
    ]
    return sorted(events, key=lambda event: event.start_us), len(steps)


def around(events: Sequence[Event], anchor: str) -> list[Event]:
    """What runs around a middle one of the events of that name; times since its end."""
    ends = [event.start_us + event.us for event in events if event.name == anchor]
    zero = ends[len(ends) // 2]
    return [
        event._replace(start_us=round(event.start_us - zero, 2), us=round(event.us, 2))
        for event in events
        if -BEFORE_US < event.start_us - zero < AFTER_US
    ]


def busy_us(events: Sequence[Event]) -> float:
    """How long any of them was on the device."""
    end = total = 0.0
    for event in events:
        stop = event.start_us + event.us
        total += max(0.0, stop - max(end, event.start_us))
        end = max(end, stop)
    return total


def device_times(engine: Engine, arms: Sequence[ab.Arm]) -> dict[str, Any]:
    """Of each arm: `ours`, of each of our kernels the median microseconds and launches
    of a run, the wait of a kernel that is launched early included; of a mean step
    `theirs_us`, busy_us of vLLM's, `alone_us`, that only ours were on the device, and
    `idle_us`, that nothing was; `around`."""
    runs: dict[str, list[tuple[list[Event], int]]] = {}
    for _ in range(PROFILED_ROUNDS):
        for arm in arms:
            runs.setdefault(arm.name, []).append(device_events(engine, arm))
    # What precedes commit is in each arm's steps.
    staged = runs[arms[-1].name][-1][0]
    anchor = statistics.mode(
        one.name
        for one, next_ in itertools.pairwise(staged)
        if next_.ours and not one.ours and next_.ours != "stage"
    )
    found = {}
    for name, of in runs.items():
        ours: dict[str, list[float]] = {}
        parts = []
        for events, num_steps in of:
            busy, theirs = busy_us(events), busy_us([e for e in events if not e.ours])
            all_us = max(e.start_us + e.us for e in events) - events[0].start_us
            us = theirs, busy - theirs, all_us - busy
            parts.append([one / num_steps for one in us])
            for event in events:
                if event.ours:
                    ours.setdefault(event.ours, []).append(event.us)
        of_step = dict(zip(STEP_PARTS, zip(*parts, strict=True), strict=True))
        found[name] = {
            "ours": {
                kernel: {
                    "median_us": round(statistics.median(times), 2),
                    "launches": len(times) // PROFILED_ROUNDS,
                }
                for kernel, times in ours.items()
            },
            **{part: round(statistics.median(us), 1) for part, us in of_step.items()},
            "around": [
                (e.ours or re.sub(r"^void |<.*|\(.*", "", e.name)[:48], *e[1:])
                for e in around(of[-1][0], anchor)
            ],
        }
    return found


def profile(
    cell: bench.Cell, rounds: int, batches: Sequence[int], write: Callable[[Any], None]
) -> None:
    """Runs all arms `rounds` times with each batch size; writes a line for each."""
    options = {batch: parse(cell.arguments(batch)) for batch in batches}
    first, *_ = options.values()
    hooks = HookTimes()
    hooks.watch()
    engine, about = bench.start(first, max(batches))
    # The baseline, and what the cell is about last.
    arms = bench_vllm.arms_of(first)[: 2 if first.audits else None]
    resolved = {group["resolved"] for group in engine.report()["groups"]}
    if not first.audits and "stage" not in resolved:
        raise EngineFailed(f"mode stage did not start: {engine.why_not()}")
    for batch, asked in options.items():
        engine.options = asked
        engine.prompts = engine.encode()
        key = {"cell": cell.name, "batch": batch, "gpu": about["machine"].get("gpu")}
        command = f"python tools/gpu/host_profile.py {cell.name} --rounds {rounds}"
        write(
            {
                "key": key | {"vllm": records.vllm(about)},
                **about,
                "command": f"{command} --batches {batch}",
                **host_times(engine, arms, hooks, rounds),
                "device": device_times(engine, arms),
            }
        )


def host_times(
    engine: Engine, arms: Sequence[ab.Arm], hooks: HookTimes, rounds: int
) -> dict[str, Any]:
    """The host's part of a result's line, with the duration of steps. The baseline has
    no begin and no commit; neither has the audit alone."""
    # Microseconds of begin and of commit, one a step; seconds of the steps of each run.
    times: dict[str, list[list[float]]] = {arm.name: [[], []] for arm in arms}
    step_s: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    engine.run(arms[-1])
    for number in range(rounds):
        for arm in arms[:: 1 if number % 2 == 0 else -1]:
            step_s[arm.name].append(engine.run(arm).step_s)
            if arm.hooked and (timed := engine.run(arm, times=True).nwor):
                times[arm.name][0] += timed.begin_us
                times[arm.name][1] += timed.commit_us
    hooks.ns.clear()
    hooks.on = True
    num_steps = sum(len(engine.run(arms[-1]).step_s) for _ in range(rounds))
    hooks.on = False
    step_us = {
        kind: [1e6 * statistics.median(runs) for runs in zip(*of, strict=True)]
        for kind, of in step_s.items()
    }
    return {
        "hooks": hooks.result(num_steps),
        "step_us": {kind: statistics.mean(of) for kind, of in step_us.items()},
        "median_step_us": {kind: statistics.median(of) for kind, of in step_us.items()},
        "host": {
            kind: {
                part: {"median_us": round(statistics.median(of), 2)}
                for part, of in zip(("begin", "commit"), of_kind, strict=True)
            }
            for kind, of_kind in times.items()
            if of_kind[0]
        },
    }


def drawn(line: Mapping[str, Any]) -> bytes:
    """What runs on the device around our kernels, in each arm: a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    rows = line["device"]
    for row, of in enumerate(rows.values()):
        for event, start, us in of["around"]:
            is_ours = event in of["ours"]
            axes.barh(row, us, 0.6, start, color="#d55e00" if is_ours else "#9db7d1")
            if is_ours:
                axes.text(start, row - 0.36, f"{event} {us:.1f}", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(-BEFORE_US, AFTER_US)
    key = line["key"]
    title = f"{key['cell']}, {key['batch']} requests, {key['gpu']}, vLLM {key['vllm']}"
    axes.set_title(f"Kernels in one step: {title}", fontsize=9, loc="left")
    axes.set_xlabel("microseconds since the kernel before")
    figure.savefig(picture := io.BytesIO(), format="png", dpi=110)
    return picture.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser_of(__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to append to")
    parser.add_argument("--rounds", type=whole(1), default=4, help="of all arms (4)")
    text = "batch sizes (16)"
    parser.add_argument("--batches", type=whole(1), nargs="+", default=[16], help=text)
    text = "draw this batch size's line of the file instead"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=text)
    asked = parser.parse_args(argv)
    cell = bench.BY_NAME[asked.cell]
    if asked.picture:
        lines = records.read(asked.json.stem, asked.json.parent)
        wanted = {"cell": cell.name, "batch": asked.batches[0]}
        of = [line for line in lines if line["key"] | wanted == line["key"]]
        if not of:
            parser.error(f"--picture: {asked.json} has no line of {wanted}")
        write_whole(asked.picture, drawn(of[-1]))
        return 0

    def write(result: dict[str, Any]) -> None:
        print(report.rendered("host", [result]), flush=True)
        records.append(asked.json, result)

    return bench.run_of(cell, lambda: profile(cell, asked.rounds, asked.batches, write))


if __name__ == "__main__":
    leave(main())
