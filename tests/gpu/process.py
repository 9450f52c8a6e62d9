# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: `python -m tests.gpu.process JOB ENGINE OUT MODELS`.

JOB is a function of this module; NWOR's mode comes from VLLM_NWOR_MODE. Everything
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.harness import SEED, Engine, Outcome, Report
from tests.gpu.rows import (
    PHASES,
    SLEEP_ROWS,
    Row,
    batch_8,
    offloaded,
    prompt,
    rows,
    rows_of,
)
from tests.helpers.player import Request, moved_bytes, risen

POISON_SEED = 3
# Of the profiler: what the device did, and what the host called.
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
DRIVER_CALLS = ("cuda_runtime", "cuda_driver")
# Calls of the CUDA runtime and driver that make the host wait.
SYNCHRONISING = {
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cuCtxSynchronize"),
    *("cuStreamSynchronize", "cuEventSynchronize"),
    *("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
}
# Those of PyTorch's caching allocators, which also wait. Whether one finds a free block
# of pinned memory depends on how far the device is: vanilla's number varies.
ALLOCATING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"}
CHECKED_ROWS = ("batch 1", "batch 8", "seeded sampling")
NUM_CLOCKED = 40
FLIP_BEFORE_STEP = 8
NAP_BEFORE_STEP = 12
# What slots that nobody has written hold, and whether one that is written does, too.
PASSES = {
    "plain": None,
    "again": None,
    "poison": ("poison", False),
    "taken": ("poison", True),
    "nan": ("nan", False),
}
FILLED_ROWS = ("batch 8", "seeded sampling", "prefix caching", "chunked prefill")


def matrix(spec: EngineSpec, models: Path, report: Report) -> None:
    """All rows twice: plain, then watched by the byte oracle."""
    engine = Engine(spec, models, report)
    report.save_rows("plain", rows(spec), engine.run_row)
    report.save_rows("watched", rows(spec), partial(run_watched, engine))
    metrics = (m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info")
    report.save(info=[m.labels["resolved"] for m in metrics if m.value == 1])
    if spec.tensor_parallel > 1 or spec.executor:
        engine.stop()


def run_watched(engine: Engine, row: Row, by: str = "Watch") -> dict[str, Any]:
    """Engine.run_row, and what the oracle saw. by: Watch or Fault."""
    engine.forget()  # before the caches are poisoned
    engine.rpc("test_oracle", by, "start", POISON_SEED)
    found = engine.run_row(row)
    return found | {"watch": engine.rpc("test_oracle", by, "stop")}


def layouts(spec: EngineSpec, models: Path, report: Report) -> None:
    engine = Engine(spec, models, report, prepares=False)
    report.save(groups=engine.report()["groups"])
    report.save(layouts=engine.rpc("test_layouts")[0])


def one_row(spec: EngineSpec, models: Path, report: Report) -> None:
    """One row: where blocks are kept on the host, one in which a prompt comes back from
    there. NWOR_TEST_VIEWS: a backend that NWOR shall take for one that does not copy
    the block table."""
    if backend := os.environ.get("NWOR_TEST_VIEWS"):
        from vllm_nwor.hooks import staging

        staging.VIEWING_BACKENDS = (*staging.VIEWING_BACKENDS, backend)
    engine = Engine(spec, models, report)
    before = moved_bytes(engine)
    row = engine.run_row(offloaded() if spec.offloads else batch_8(spec))
    report.save(row=row, counters=row["counters"], groups=engine.report()["groups"])
    report.save(moved=risen(before, moved_bytes(engine)))


def clocked(spec: EngineSpec, models: Path, report: Report) -> None:
    """Prompts through vLLM's LLM, with the engine core in a process of its own: which
    requests share a batch is left to the clock."""
    from vllm import LLM, SamplingParams

    llm = LLM(**spec.arguments(models))
    llm.collective_rpc("test_randomize", args=(SEED, False))
    sampling = SamplingParams(max_tokens=64, logprobs=2, **Engine.params)
    prompts = [
        {"prompt_token_ids": list(prompt(f"clocked {number}", 20 + number))}
        for number in range(NUM_CLOCKED)
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling)]
    report.save(
        tokens=[list(output.token_ids) for output in outputs],
        logprobs=[
            [[(int(t), one.logprob) for t, one in at.items()] for at in output.logprobs]
            for output in outputs
        ],
        facts=llm.collective_rpc("test_facts")[0],
    )
    llm.llm_engine.engine_core.shutdown()


def missed(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row's outputs and counters with all hooks, and without that of begin; then what
    the engine raises when it shall not go on like that."""
    engine = Engine(spec, models, report)
    report.save(whole=engine.run_row(batch_8(spec)))
    engine.rpc("test_lose_begin", "0")
    report.save(without=engine.run_row(batch_8(spec)))
    engine.rpc("test_lose_begin", "always")
    try:
        engine.run(batch_8(spec))
    except Exception as error:
        report.save(raised=f"{type(error).__name__}: {error}")


def faults(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row for each of what NWOR_TEST_FAULT names, which fails in it, once: only the
    last one may end the engine."""
    engine = Engine(spec, models, report)
    for what in os.environ["NWOR_TEST_FAULT"].split():
        engine.rpc("test_oracle", "Fault", "plant", what)
        found: dict[str, Any] = {"raised": ""}
        try:
            found |= run_watched(engine, batch_8(spec), "Fault")
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
        seen = engine.rpc("test_oracle", "Fault", "lift")[0]
        report.save(**{what: found | seen})


# -- sleep -----------------------------------------------------------------------------


def sleep(spec: EngineSpec, models: Path, report: Report) -> None:
    """The same rows awake, after a sleep of level 1 (weights kept on the host), after
    one in the middle of a row, and after one of level 2 (nothing kept, so that the
    weights are loaded anew). With the KV audit on it watches instead of the oracle,
    which fills caches before a row."""
    is_audited = "VLLM_NWOR_AUDIT" in os.environ
    engine = Engine(spec, models, report, enable_sleep_mode=True)
    run = engine.run_row if is_audited else partial(run_watched, engine)
    for phase in PHASES:
        results = report.found[phase] = {}
        if phase == "live":
            results["interrupted"] = interrupt(engine, batch_8(spec))
        elif phase != "awake":
            nap(engine, int(phase[-1]))
        results["memory"] = engine.rpc("test_memory")[0]
        report.save()  # a step on memory that is gone ends the process
        report.save_rows(phase, rows_of(spec, *SLEEP_ROWS), run)
    if is_audited:
        report.save(audit=engine.rpc("test_audit"))


def interrupt(engine: Engine, row: Row) -> dict[str, Any]:
    """A row in whose middle the engine sleeps and wakes up: vLLM preempts what runs,
    and computes it again."""
    found: dict[str, Any] = {}

    def sleep_and_wake_up() -> None:
        found["num_live"] = engine.llm.get_num_unfinished_requests()
        engine.llm.sleep(level=1, mode="keep")
        engine.llm.wake_up()

    with engine.before_step(NAP_BEFORE_STEP, sleep_and_wake_up):
        return engine.run_row(row) | found


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


# -- poison and audit ------------------------------------------------------------------


def poison(spec: EngineSpec, models: Path, report: Report) -> None:
    """Rows as they are, twice, and with what PASSES has in all slots that nobody has
    written. NaN is last: it may end the engine."""
    engine = Engine(spec, models, report)
    for name, filling in PASSES.items():
        run = partial(run_filled, engine, filling)
        report.save_rows(name, rows_of(spec, *FILLED_ROWS), run)


def run_filled(
    engine: Engine, filling: tuple[str, bool] | None, row: Row
) -> dict[str, Any]:
    """Outputs and, unless `filling` is None, how much was filled."""
    if filling is None:
        return vars(engine.run(row))
    engine.forget()  # what is cached may not be filled
    engine.rpc("test_oracle", "Filler", "fill", *filling)
    from tests.helpers.filler import unwritten_blocks

    forget = partial(engine.rpc, "test_oracle", "Filler", "forget")
    with unwritten_blocks(engine.scheduler, forget):
        found = vars(engine.run(row))
    return found | {"filled": engine.rpc("test_oracle", "Filler", "stop")[0]}


def audit(spec: EngineSpec, models: Path, report: Report) -> None:
    """All rows, then one with a bit flipped between two steps: what the audit found in
    the former, and in the latter."""
    engine = Engine(spec, models, report)

    def run(row: Row) -> list[Any]:
        engine.run(row)
        return engine.rpc("test_audit")

    report.save_rows("clean", rows(spec), run)
    flipped: list[Any] = []
    with engine.before_step(
        FLIP_BEFORE_STEP, lambda: flipped.extend(engine.rpc("test_flip_bit"))
    ):
        found = run(batch_8(spec))
    report.save(flipped=flipped, found=found)


def corrupting(spec: EngineSpec, models: Path, report: Report) -> None:
    """Texts of whole blocks are stored when their requests end, then loaded by requests
    that go on from there; those are asked again with a salt, so that nothing is found
    and all is computed. NWOR_TEST_FAULT: whether the final token's slot is stored."""
    from tests.helpers.offloading_fault import final_slots

    are_stored = os.environ["NWOR_TEST_FAULT"] == "1"
    more = {"speculative_config": None} if spec.runner == "v2" else {}
    with final_slots(are_stored) as is_faulty:
        engine = Engine(spec, models, report, prepares=False, **more)
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
        fresh = tuple(replace(r, name=f"fresh/{r.name}", salt="fresh") for r in later)
        loaded = engine.run(Row("later", (later, filler)))  # all from the host
        computed = engine.run_again(Row("fresh", (fresh,)))

    def first_logprobs(outcome: Outcome, name: str) -> dict[int, float]:
        """Of its first token, which the text before it alone decides."""
        return {token: value for token, value, _ in outcome.logprobs[name][0]}

    differences = []
    for request in later:  # the largest among the tokens that both have
        one = first_logprobs(loaded, request.name)
        other = first_logprobs(computed, f"fresh/{request.name}")
        both = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
        differences.append(max(both, default=float("inf")))
    report.save(
        is_faulty=is_faulty,
        cached=[loaded.cached[request.name] for request in later],
        differences=differences,
        audit=engine.rpc("test_audit"),
    )


# -- synchronisation -------------------------------------------------------------------


def sync(spec: EngineSpec, models: Path, report: Report) -> None:
    """Launches and synchronising calls of a row, JIT compilations, and last, because an
    error leaves the engine broken, vLLM's own check for synchronisation."""
    import vllm.utils.gpu_sync_debug as sync_debug
    import vllm.utils.jit_monitor as monitor

    # Kernels that vLLM's JIT monitor would complain about, as they come: with
    # --jit-monitor-mode=error each would have raised.
    compiled: list[str] = []

    def note(*, backend: str, event: str, fn_name: str, detail: str | None = None):
        compiled.append(f"{backend} {event} {fn_name}")

    monitor._handle_jit_event = note
    engine = Engine(spec, models, report, prepares=False)
    sync_debug._sync_check_enabled = False
    engine.rpc("test_randomize", SEED)
    checked_rows = rows_of(spec, *CHECKED_ROWS)
    # Twice: the first time may prepare what later steps only use.
    for row in checked_rows * 2:
        engine.run(row)
    report.save(compiled=compiled)  # and what comes later
    report.save(profiles=[profile(engine, batch_8(spec)) for _ in range(2)])
    sync_debug._sync_check_enabled = True
    checked: dict[str, str | None] = {}
    for row in checked_rows:
        try:
            engine.run(row)
            checked[row.name] = None
        except RuntimeError:
            checked[row.name] = traceback.format_exc()[-3000:]
            break
    report.save(sync_check=checked)


def profile(engine: Engine, row: Row) -> dict[str, Any]:
    """What the profiler saw of a row: how many steps there were, and by name how often
    the host called what waits or allocates, and ran an operator; copies to pageable
    memory, which wait without such a call; all that the device did."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        outcome = engine.run(row)
        torch.accelerator.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    seen = Counter(
        (event.get("cat"), event["name"]) for event in events if event.get("ph") == "X"
    )

    def count(*categories: str, of: Callable[[str], Any] = bool) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (category, name), number in seen.items():
            if category in categories and of(name):
                found[name] += number
        return found

    return {
        "steps": sum(map(bool, outcome.batches)),
        "windowed_steps": outcome.num_windowed,
        "synchronising": count(*DRIVER_CALLS, of=SYNCHRONISING.__contains__),
        "allocating": count(*DRIVER_CALLS, of=ALLOCATING.__contains__),
        "pageable_copies": count("gpu_memcpy", of=lambda name: "Pageable" in name),
        "device_work": count(*DEVICE_WORK),
        "cpu_op": count("cpu_op"),
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
        globals()[job](spec, Path(models), report)
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
