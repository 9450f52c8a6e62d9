# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: `python -m tests.gpu.process JOB ENGINE OUT MODELS`.

JOB is a key of JOBS; NWOR's mode comes from VLLM_NWOR_MODE. Everything
found is written to OUT as JSON, again after each row, so that a process that dies or is
stopped leaves what it had. The exit status is 0 if the job came to its end; whether
what it found is right, the tests judge.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole

from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.harness import SEED, Engine
from tests.gpu.rows import Row, offloaded, prompt, rows
from tests.helpers.player import Request, counters, moved_bytes, risen

POISON_SEED = 3
PROFILED_ROW = "batch 8"
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")
CATEGORIES += ("cpu_op",)
CHECKED_ROWS = ("batch 1", "batch 8", "seeded sampling")
FLIP_BEFORE_STEP = 8
NAP_BEFORE_STEP = 12
# What the engine is used in: awake, after sleeps of levels 1 and 2, and after one while
# requests ran.
PHASES = ("awake", "level 1", "live", "level 2")
# What slots that nobody has written hold, and whether one that is written does, too.
PASSES = {
    "plain": None,
    "again": None,
    "poison": ("poison", False),
    "taken": ("poison", True),
    "nan": ("nan", False),
}
FILLED_ROWS = ("batch 8", "seeded sampling", "prefix caching", "chunked prefill")
SLEEP_ROWS = ("batch 8", "seeded sampling", "prefix caching")


def by_name(spec: EngineSpec) -> dict[str, Row]:
    return {row.name: row for row in rows(spec)}


class Report:
    """What this process found; saved whole each time."""

    def __init__(self, path: Path, **first: Any) -> None:
        self.path = path
        self.found: dict[str, Any] = {"finished": False, "error": None, **first}
        self.save()

    def save(self, **more: Any) -> None:
        self.found.update(more)
        write_whole(self.path, json.dumps(self.found).encode())


def start(spec: EngineSpec, models: Path, report: Report, **more: Any) -> Engine:
    engine = Engine(spec, models, **more)
    print(f"{spec.name}: started in {engine.start_s:.1f} s", flush=True)
    report.save(start_s=engine.start_s)
    report.save(facts=engine.rpc("test_facts")[0])
    return engine


def matrix(spec: EngineSpec, models: Path, report: Report) -> None:
    """All rows twice: plain, then watched by the byte oracle."""
    engine = start(spec, models, report)
    engine.prepare()
    report.save(prepared=True)
    for name in ("plain", "watched"):
        results: dict[str, Any] = {}
        report.found[name] = results
        for row in rows(spec):
            results[row.name] = run_row(engine, row, watched=name == "watched")
            seconds = results[row.name]["seconds"]
            print(f"{spec.name}: {name}, {row.name}: {seconds:.1f} s", flush=True)
            report.save()
    report.save(info=engine.info())
    if spec.tensor_parallel > 1 or spec.executor:
        engine.stop()


def run_row(engine: Engine, row: Row, watched: bool) -> dict[str, Any]:
    """Outputs, increments of the counters and, if watched, what the oracle saw."""
    before, device_before = counters(engine), engine.device_counters()
    if watched:
        engine.forget()  # before the caches are poisoned
        engine.rpc("test_oracle", "Watch", "start", POISON_SEED)
    outcome = engine.run(row)
    found = outcome.plain()
    if watched:
        found["watch"] = engine.rpc("test_oracle", "Watch", "stop")
    found["counters"] = risen(before, counters(engine))
    found["device_counters"] = risen(device_before, engine.device_counters())
    return found


def layouts(spec: EngineSpec, models: Path, report: Report) -> None:
    engine = start(spec, models, report)
    report.save(groups=engine.rpc("nwor_report")[0]["groups"])
    report.save(layouts=engine.rpc("test_layouts")[0])


def outputs(spec: EngineSpec, models: Path, report: Report) -> None:
    """One row's tokens. NWOR_TEST_VIEWS: a backend that NWOR shall take for one that
    does not copy the block table."""
    if backend := os.environ.get("NWOR_TEST_VIEWS"):
        from vllm_nwor.hooks import staging

        staging.VIEWING_BACKENDS = (*staging.VIEWING_BACKENDS, backend)
    engine = start(spec, models, report)
    engine.prepare()
    found = run_row(engine, by_name(spec)["batch 8"], watched=False)
    groups = engine.rpc("nwor_report")[0]["groups"]
    report.save(tokens=found["tokens"], counters=found["counters"], groups=groups)


def missed(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row's outputs and counters with all hooks, and without that of begin; then what
    the engine raises when it shall not go on like that."""
    engine = start(spec, models, report)
    engine.prepare()
    row = by_name(spec)["batch 8"]
    report.save(whole=run_row(engine, row, watched=False))
    engine.rpc("test_lose_begin", "0")
    report.save(without=run_row(engine, row, watched=False))
    engine.rpc("test_lose_begin", "always")
    try:
        engine.run(row)
    except Exception as error:
        report.save(raised=f"{type(error).__name__}: {error}")


def offload(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row in which a prompt comes back from the host."""
    engine = start(spec, models, report)
    engine.prepare()
    before = moved_bytes(engine)
    found = run_row(engine, offloaded(), watched=False)
    moved = risen(before, moved_bytes(engine))
    report.save(row=found, counters=found["counters"], moved=moved)


# -- sleep -----------------------------------------------------------------------------


def sleep(spec: EngineSpec, models: Path, report: Report) -> None:
    """The same rows awake, after a sleep of level 1 (weights kept on the host), after
    one in the middle of a row, and after one of level 2 (nothing kept, so that the
    weights are loaded anew). With the KV audit on it watches instead of the oracle,
    which fills caches before a row."""
    is_audited = "VLLM_NWOR_AUDIT" in os.environ
    engine = start(spec, models, report, enable_sleep_mode=True)
    engine.prepare()
    for phase in PHASES:
        results: dict[str, Any] = {}
        report.found[phase] = results
        if phase == "live":
            results["interrupted"] = interrupted(engine, by_name(spec)["batch 8"])
        elif phase != "awake":
            nap(engine, int(phase[-1]))
        results["memory"] = engine.rpc("test_memory")[0]
        report.save()  # a step on memory that is gone ends the process
        for name in SLEEP_ROWS:
            results[name] = run_row(engine, by_name(spec)[name], not is_audited)
            report.save()
    if is_audited:
        report.save(audit=engine.rpc("test_audit"))


def interrupted(engine: Engine, row: Row) -> dict[str, Any]:
    """A row in whose middle the engine sleeps and wakes up: vLLM preempts what runs,
    and computes it again."""
    found: dict[str, Any] = {}

    def sleep_and_wake_up() -> None:
        found["num_live"] = engine.llm.get_num_unfinished_requests()
        engine.llm.sleep(level=1, mode="keep")
        engine.llm.wake_up()

    with engine.before_step(NAP_BEFORE_STEP, sleep_and_wake_up):
        return run_row(engine, row, watched=False) | found


def nap(engine: Engine, level: int) -> None:
    """Sleeps and wakes up, in the order vLLM's documentation gives for each level."""
    engine.forget()
    engine.llm.sleep(level=level)
    assert engine.llm.is_sleeping()
    if level == 1:
        engine.llm.wake_up()
    else:
        engine.llm.wake_up(tags=["weights"])
        engine.rpc("test_randomize", SEED)  # the weights come back, in place
        engine.llm.wake_up(tags=["kv_cache"])
    assert not engine.llm.is_sleeping()


# -- poison ----------------------------------------------------------------------------


def poison(spec: EngineSpec, models: Path, report: Report) -> None:
    """Rows as they are, twice, and with what PASSES has in all slots that nobody has
    written. NaN is last: it may end the engine."""
    engine = start(spec, models, report)
    engine.prepare()
    known = by_name(spec)
    for name, filling in PASSES.items():
        results: dict[str, Any] = {}
        report.found[name] = results
        for row in (known[row] for row in FILLED_ROWS if row in known):
            results[row.name] = run_filled(engine, row, filling)
            report.save()


def run_filled(
    engine: Engine, row: Row, filling: tuple[str, bool] | None
) -> dict[str, Any]:
    """Outputs and, unless `filling` is None, how much was filled."""
    if filling is None:
        return engine.run(row).plain()
    engine.forget()  # what is cached may not be filled
    engine.rpc("test_oracle", "Filler", "fill", *filling)
    from tests.gpu.watch import unwritten_blocks

    forget = partial(engine.rpc, "test_oracle", "Filler", "forget")
    with unwritten_blocks(engine.scheduler, forget):
        found = engine.run(row).plain()
    return found | {"filled": engine.rpc("test_oracle", "Filler", "stop")[0]}


# -- audit -----------------------------------------------------------------------------


def audit(spec: EngineSpec, models: Path, report: Report) -> None:
    """All rows, then one with a bit flipped between two steps: what the audit found in
    the former, and in the latter."""
    engine = start(spec, models, report)
    engine.prepare()
    clean: dict[str, Any] = {}
    report.found["clean"] = clean
    for row in rows(spec):
        engine.run(row)
        clean[row.name] = engine.rpc("test_audit")
        report.save()
    flipped: list[Any] = []
    with engine.before_step(
        FLIP_BEFORE_STEP, lambda: flipped.extend(engine.rpc("test_flip_bit"))
    ):
        engine.run(by_name(spec)["batch 8"])
    report.save(flipped=flipped, found=engine.rpc("test_audit"))


def corrupting(spec: EngineSpec, models: Path, report: Report) -> None:
    """Texts of whole blocks are stored when their requests end, then loaded by requests
    that go on from there; those are asked again with a salt, so that nothing is found
    and all is computed. NWOR_TEST_FAULT: whether the final token's slot is stored."""
    from tests.helpers.offloading_fault import final_slots

    are_stored = os.environ["NWOR_TEST_FAULT"] == "1"
    more = {"speculative_config": None} if spec.runner == "v2" else {}
    with final_slots(are_stored) as is_faulty:
        engine = start(spec, models, report, **more)
        engine.rpc("test_randomize", SEED)
        size = spec.block_size
        first = tuple(
            Request(f"first/{n}", prompt(f"o {n}", 40 + n), 4 * size - 40 - n)
            for n in range(8)
        )
        # A store is submitted in the step after it was decided.
        filler = (Request("filler/0", prompt("filler", 20), 12),)
        tokens = engine.run(Row("first", (first, filler))).tokens
        later = tuple(
            Request(
                f"later/{n}",
                (*request.prompt, *tokens[request.name], 11, 12),
                4,
                at=4 * n,
                params={"logprobs": 5},
            )
            for n, request in enumerate(first)
        )
        fresh = tuple(
            replace(
                request,
                name=f"fresh/{request.name}",
                salt="fresh",
            )
            for request in later
        )
        loaded = engine.run(Row("later", (later, filler)))  # all from the host
        computed = engine.run_again(Row("fresh", (fresh,)))
    # Of each request's first token, which the loaded text alone decides.
    differences = [
        largest_difference(
            loaded.logprobs[one.name][0], computed.logprobs[f"fresh/{one.name}"][0]
        )
        for one in later
    ]
    report.save(
        is_faulty=is_faulty,
        cached=[loaded.cached[request.name] for request in later],
        differences=differences,
        audit=engine.rpc("test_audit"),
    )


def largest_difference(
    one: list[tuple[int, float, Any]], other: list[tuple[int, float, Any]]
) -> float:
    """Of the logprobs of a position, over the tokens that both have."""
    known = {token: value for token, value, _ in other}
    both = [abs(value - known[token]) for token, value, _ in one if token in known]
    return max(both) if both else float("inf")


# -- synchronisation -------------------------------------------------------------------


def sync(spec: EngineSpec, models: Path, report: Report) -> None:
    """Launches and synchronising calls of a row, JIT compilations, and last, because an
    error leaves the engine broken, vLLM's own check for synchronisation."""
    import vllm.utils.gpu_sync_debug as sync_debug

    compiled = record_jit()
    engine = start(spec, models, report)
    sync_debug._sync_check_enabled = False
    engine.rpc("test_randomize", SEED)
    checked_rows = [by_name(spec)[name] for name in CHECKED_ROWS]
    for row in checked_rows:
        engine.run(row)
    report.save(compiled=compiled)
    # Those rows again: the first time may prepare what later steps only use.
    num_first = len(compiled)
    for row in checked_rows:
        engine.run(row)
    report.save(compiled_again=compiled[num_first:])
    profiled = by_name(spec)[PROFILED_ROW]
    report.save(profiles=[profile(engine, profiled) for _ in range(2)])
    sync_debug._sync_check_enabled = True
    checked: dict[str, str | None] = {}
    for row in checked_rows:
        try:
            engine.run(row)
            checked[row.name] = None
        except RuntimeError:
            checked[row.name] = traceback.format_exc()[-3000:]
            break
        finally:
            report.save(sync_check=checked)


def record_jit() -> list[str]:
    """The names of kernels that vLLM's JIT monitor would complain about, as they come:
    with --jit-monitor-mode=error each would have raised."""
    import vllm.utils.jit_monitor as monitor

    compiled: list[str] = []

    def note(*, backend: str, event: str, fn_name: str, detail: str | None = None):
        compiled.append(f"{backend} {event} {fn_name}")

    monitor._handle_jit_event = note
    return compiled


def profile(engine: Engine, row: Row) -> dict[str, Any]:
    """What the profiler saw of a row: events by name, by category."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        outcome = engine.run(row)
        torch.accelerator.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    names: dict[str, Counter[str]] = {category: Counter() for category in CATEGORIES}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in names:
            names[event["cat"]][event["name"]] += 1
    return {
        "steps": sum(map(bool, outcome.batches)),
        "windowed_steps": outcome.num_windowed,
        **names,
    }


_JOBS = (matrix, sync, layouts, missed, sleep, outputs, audit, corrupting, offload)
JOBS = {job.__name__: job for job in (*_JOBS, poison)}


def main(job: str, name: str, out: str, models: str) -> int:
    faulthandler.enable()
    spec = BY_NAME[name]
    mode = os.environ.get("VLLM_NWOR_MODE", "off")
    if mode == "stage":
        os.environ["VLLM_NWOR_SHADOW_BLOCKS"] = str(spec.num_shadow_blocks)
    report = Report(Path(out), engine=name, mode=mode, job=job)
    started = time.perf_counter()
    try:
        JOBS[job](spec, Path(models), report)
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        report.save(error=text[-6000:])
        return 1
    finally:
        report.save(seconds=time.perf_counter() - started)
    report.save(finished=True)
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's threads and finalisers have nothing left to do that is worth waiting for.
    os._exit(status)
