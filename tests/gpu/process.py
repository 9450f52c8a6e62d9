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
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.harness import Engine, rise
from tests.gpu.rows import Request, Row, offloaded, prompt, rows

POISON_SEED = 3
PROFILED_ROW = "batch 8"
CHECKED_ROWS = ("batch 1", "batch 8", "seeded sampling")
FLIP_BEFORE_STEP = 8
NAP_BEFORE_STEP = 12
# Of a device's clock, half a second: a load is through by then.
DELAY_CYCLES = 1_000_000_000
SLEEP_ROWS = ("batch 8", "seeded sampling", "prefix caching")


def trace() -> str:
    """The exception being handled, with each file as seen from where Python imports it
    (vllm/v1/outputs.py): results are committed."""
    text = traceback.format_exc()
    folders = {str(Path(entry).resolve()) for entry in sys.path} | set(sys.path)
    for folder in sorted(folders - {"", "/"}, key=len, reverse=True):
        text = text.replace(f'"{folder}/', '"')
    return text


class Report:
    """What this process found; saved whole each time."""

    def __init__(self, path: Path, **first: Any) -> None:
        self.path = path
        self.found: dict[str, Any] = {"finished": False, "error": None, **first}
        self.save()

    def save(self, **more: Any) -> None:
        self.found.update(more)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.found))
        temporary.replace(self.path)


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
    before, device_before = engine.counters(), engine.device_counters()
    if watched:
        engine.forget()  # before the caches are poisoned
        engine.rpc("test_watch", POISON_SEED)
    outcome = engine.run(row)
    found = outcome.plain()
    if watched:
        found["watch"] = engine.rpc("test_unwatch")
    found["counters"] = rise(before, engine.counters())
    found["device_counters"] = rise(device_before, engine.device_counters())
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
    (row,) = (row for row in rows(spec) if row.name == "batch 8")
    before = engine.counters()
    found = run_row(engine, row, watched=False)
    report.save(counters=rise(before, engine.counters()))
    groups = engine.rpc("nwor_report")[0]["groups"]
    report.save(tokens=found["tokens"], groups=groups)


def offload(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row in which a prompt comes back from the host."""
    engine = start(spec, models, report)
    engine.prepare()
    before, moved_before = engine.counters(), engine.moved_bytes()
    report.save(row=engine.run(offloaded()).plain())
    report.save(counters=rise(before, engine.counters()))
    report.save(moved=rise(moved_before, engine.moved_bytes()))


# -- sleep -----------------------------------------------------------------------------


def sleep(spec: EngineSpec, models: Path, report: Report) -> None:
    """The same rows awake, after a sleep of level 1 (weights kept on the host), after
    one in the middle of a row, and after one of level 2 (nothing kept, so that the
    weights are loaded anew)."""
    engine = start(spec, models, report, enable_sleep_mode=True)
    engine.prepare()
    by_name = {row.name: row for row in rows(spec)}
    for phase in ("awake", "level 1", "live", "level 2"):
        results: dict[str, Any] = {}
        report.found[phase] = results
        if phase == "live":
            results["interrupted"] = interrupted(engine, by_name["batch 8"])
        elif phase != "awake":
            nap(engine, int(phase[-1]))
        results["memory"] = engine.rpc("test_memory")[0]
        report.save()  # a step on memory that is gone ends the process
        for name in SLEEP_ROWS:
            results[name] = run_row(engine, by_name[name], watched=True)
            report.save()


def interrupted(engine: Engine, row: Row) -> dict[str, Any]:
    """A row in whose middle the engine sleeps and wakes up: vLLM preempts what runs,
    and computes it again."""
    step = engine.llm.step
    num_steps = num_live = 0

    def step_or_sleep() -> Any:
        nonlocal num_steps, num_live
        num_steps += 1
        if num_steps == NAP_BEFORE_STEP:
            num_live = engine.llm.get_num_unfinished_requests()
            engine.llm.sleep(level=1, mode="keep")
            engine.llm.wake_up()
        return step()

    engine.llm.step = step_or_sleep  # type: ignore[method-assign]
    try:
        return run_row(engine, row, watched=False) | {"num_live": num_live}
    finally:
        engine.llm.step = step  # type: ignore[method-assign]


def nap(engine: Engine, level: int) -> None:
    """Sleeps and wakes up, in the order vLLM's documentation gives for each level."""
    from tests.gpu.harness import SEED

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
    step = engine.llm.step
    flipped: list[Any] = []
    num_steps = 0

    def step_and_flip() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == FLIP_BEFORE_STEP:
            flipped.extend(engine.rpc("test_flip_bit"))
        return step()

    engine.llm.step = step_and_flip  # type: ignore[method-assign]
    by_name = {row.name: row for row in rows(spec)}
    engine.run(by_name["batch 8"])
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
        engine.rpc("test_randomize", 20)
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
        loaded = engine.run(Row("later", (later, filler)))  # all from the host
        fresh = tuple(
            replace(
                request,
                name=f"fresh/{n}",
                params={**request.params, "cache_salt": "fresh"},
            )
            for n, request in enumerate(later)
        )
        computed = engine.play(Row("fresh", (fresh,)))
    report.save(
        is_faulty=is_faulty,
        cached=[loaded.cached[f"later/{n}"] for n in range(len(first))],
        # Of the first token, which the loaded text alone decides.
        differences=[
            largest_difference(
                loaded.logprobs[f"later/{n}"][0], computed.logprobs[f"fresh/{n}"][0]
            )
            for n in range(len(first))
        ],
        audit=engine.rpc("test_audit"),
    )


def racing(spec: EngineSpec, models: Path, report: Report) -> None:
    """A request is aborted while its prompt is being computed, and its blocks go to one
    whose text a load brings. NWOR_TEST_RACE: "stock": as vLLM is; "late": its scheduler
    frees blocks that the step in flight writes; "waiting": the same, and loads wait for
    the compute stream."""
    from tests.helpers.offloading_fault import final_slots, loads_wait

    race = os.environ["NWOR_TEST_RACE"]
    with final_slots(are_stored=False), loads_wait(race == "waiting") as has_waited:
        engine = start(spec, models, report, speculative_config=None)
        engine.rpc("test_randomize", 20)
        assert engine.scheduler.defer_block_free
        engine.scheduler.defer_block_free = race == "stock"
        # Whole blocks are loaded; no text here ends with one.
        text = prompt("racing", 30 * spec.block_size)
        filler = (Request("filler/0", prompt("filler", 20), 7),)
        engine.run(Row("stored", ((Request("first/0", text, 4),), filler)))
        engine.rpc("test_delay_second_layer", DELAY_CYCLES, 300)
        engine.forget()
        nothing = {"kv_transfer_params": {"max_offload_tokens": 0}}
        params = {"logprobs": 5}
        later = Request("later/0", (*text, 11, 12), 4, at=1, params=params)
        # Nothing of it is stored: vLLM waits for stores before it fills their blocks.
        cut = Request(
            "cut/0",
            prompt("cut", 500),
            4,
            abort_at=1,
            params={"extra_args": nothing},
        )
        loaded = engine.run(Row("racing", ((cut, later), filler)))
        salted = {**params, "cache_salt": "fresh"}
        fresh = replace(later, name="fresh/0", at=0, params=salted)
        computed = engine.play(Row("fresh", ((fresh,),)))
    report.save(
        has_waited=has_waited,
        planted=""
        if race == "stock"
        else "blocks freed while a step writes them"
        + (", loads that wait" if race == "waiting" else ""),
        cached=[loaded.cached["later/0"]],
        differences=[
            largest_difference(
                loaded.logprobs["later/0"][0], computed.logprobs["fresh/0"][0]
            )
        ],
        audit=engine.rpc("test_audit"),
    )


def largest_difference(
    one: list[tuple[int, float]], other: list[tuple[int, float]]
) -> float:
    """Of the logprobs of a position, over the tokens that both have."""
    known = dict(other)
    both = [abs(value - known[token]) for token, value in one if token in known]
    return max(both) if both else float("inf")


# -- synchronisation -------------------------------------------------------------------


def sync(spec: EngineSpec, models: Path, report: Report) -> None:
    """Launches and synchronising calls of a row, JIT compilations, and last, because an
    error leaves the engine broken, vLLM's own check for synchronisation."""
    import vllm.utils.gpu_sync_debug as sync_debug

    is_strict = os.environ.get("NWOR_TEST_JIT") == "error"
    more = {"jit_monitor_mode": "error"} if is_strict else {}
    compiled = [] if is_strict else record_jit()
    engine = start(spec, models, report, **more)
    sync_debug._sync_check_enabled = False
    by_name = {row.name: row for row in rows(spec)}
    engine.rpc("test_randomize", 20)
    for name in CHECKED_ROWS:
        engine.run(by_name[name])
    report.save(jit_mode="error" if is_strict else "recorded", compiled=compiled)
    # Those rows again: the first time may prepare what later steps only use.
    num_first = len(compiled)
    for name in CHECKED_ROWS:
        engine.run(by_name[name])
    report.save(compiled_again=compiled[num_first:])
    report.save(profiles=[profile(engine, by_name[PROFILED_ROW]) for _ in range(2)])
    sync_debug._sync_check_enabled = True
    checked: dict[str, str | None] = {}
    for name in CHECKED_ROWS:
        try:
            engine.run(by_name[name])
            checked[name] = None
        except RuntimeError:
            checked[name] = trace()[-3000:]
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

    steps = count_steps(engine)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        engine.run(row)
        torch.accelerator.synchronize()
    path = Path(os.environ["NWOR_TEST_TRACE"])
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    names: dict[str, Counter[str]] = {}
    for event in events:
        category = event.get("cat")
        if event.get("ph") == "X" and category in CATEGORIES:
            names.setdefault(category, Counter())[event["name"]] += 1
    return {
        "steps": steps["all"],
        "windowed_steps": steps["windowed"],
        **{c: dict(names.get(c, {})) for c in CATEGORIES},
    }


CATEGORIES = (
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "cpu_op",
)


def count_steps(engine: Engine) -> Counter[str]:
    """Counts steps of the runner from now on, and those with drafts."""
    client: Any = engine.llm.engine_core
    core = client.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    counts: Counter[str] = Counter()
    original = runner.__dict__.get("_nwor_test_execute") or runner.execute_model

    def counted(scheduler_output: Any, *args: Any, **kwargs: Any):
        counts["all"] += scheduler_output.total_num_scheduled_tokens > 0
        counts["windowed"] += bool(scheduler_output.scheduled_spec_decode_tokens)
        return original(scheduler_output, *args, **kwargs)

    runner._nwor_test_execute = original
    runner.execute_model = counted
    return counts


JOBS = {
    "matrix": matrix,
    "sync": sync,
    "layouts": layouts,
    "sleep": sleep,
    "outputs": outputs,
    "audit": audit,
    "corrupting": corrupting,
    "racing": racing,
    "offload": offload,
}


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
        text = trace()
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
