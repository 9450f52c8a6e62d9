# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: `python -m tests.gpu.process JOB ENGINE OUT MODELS`.

JOB is a function of this module, computed.py or weights.py; NWOR's mode comes from
VLLM_NWOR_MODE. The report is written to OUT as JSON after each row, so that a process
that dies leaves its last state. Exit status 0: the job ended; the tests judge the
report.
"""

import faulthandler
import itertools
import json
import os
import shutil
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
from unittest import mock

from tests.gpu import computed, rows, weights
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.harness import SEED, Engine, Outcome, Report, distance
from tests.helpers.player import Request, moved_bytes, risen

POISON_SEED = 3
# The profiler's categories of device work and of the host's calls.
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
DRIVER_CALLS = ("cuda_runtime", "cuda_driver")
# Calls of the CUDA runtime and driver that make the host wait.
SYNCHRONIZING = {
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cuCtxSynchronize"),
    *("cuStreamSynchronize", "cuEventSynchronize"),
    *("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
}
# Calls of PyTorch's caching allocators, which also wait. Whether pinned memory is free
# depends on the device's progress: plain vLLM's number varies.
ALLOCATING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"}
CHECKED_ROWS = ("batch 1", "batch 8", "seeded sampling")
FLIP_BEFORE_STEP = 8
NAP_BEFORE_STEP = 12
# How unwritten slots are filled, and whether one written slot is filled, too.
PASSES = {
    "plain": None,
    "again": None,
    "poison": ("poison", False),
    "taken": ("poison", True),
    "nan": ("nan", False),
}
STATE_ROWS = ("batch 1", "batch 8", "batch 64", "seeded sampling", "aborts")
STATE_ROWS += ("chunked prefill", "structured output", "preemption")
FILLED_ROWS = ("batch 8", "seeded sampling", "prefix caching", "chunked prefill")


def matrix(spec: EngineSpec, models: Path, report: Report) -> None:
    """All rows twice: plain, then watched by the byte oracle."""
    engine = Engine(spec, models, report)
    report.save_rows("plain", rows.rows(spec), engine.run_row)
    report.save_rows("watched", rows.rows(spec), partial(run_watched, engine))
    metrics = (m for m in engine.llm.get_metrics() if m.name == "vllm:nwor_info")
    report.save(info=[m.labels["resolved"] for m in metrics if m.value == 1])
    if spec.tensor_parallel > 1 or spec.executor:
        engine.stop()


def run_watched(engine: Engine, row: rows.Row, by: str = "Watch") -> dict[str, Any]:
    """Engine.run_row under the oracle. by: Watch or Fault."""
    engine.forget()  # before the caches are poisoned
    engine.rpc("test_oracle", by, "start", POISON_SEED)
    found = engine.run_row(row)
    return found | {"watch": engine.rpc("test_oracle", by, "stop")}


def layouts(spec: EngineSpec, models: Path, report: Report) -> None:
    engine = Engine(spec, models, report, prepares=False)
    report.save(groups=engine.report()["groups"])
    report.save(layouts=engine.rpc("test_layouts")[0])


def one_row(spec: EngineSpec, models: Path, report: Report) -> None:
    """One row; with KV offloading one in which a prompt comes back from the host.
    NWOR_TEST_VIEWS: a backend to be treated as one that does not copy block tables."""
    if backend := os.environ.get("NWOR_TEST_VIEWS"):
        from vllm_nwor.hooks import staging

        staging.VIEWING_BACKENDS = (*staging.VIEWING_BACKENDS, backend)
    engine = Engine(spec, models, report)
    before = moved_bytes(engine)
    row = engine.run_row(rows.offloaded() if spec.connector else rows.batch_8(spec))
    report.save(row=row, counters=row["counters"], groups=engine.report()["groups"])
    report.save(moved=risen(before, moved_bytes(engine)))


def missed(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row's outputs and counters with all hooks and without that of begin; then the
    error of a strict engine."""
    engine = Engine(spec, models, report)
    report.save(whole=engine.run_row(rows.batch_8(spec)))
    engine.rpc("test_lose_begin", "0")
    report.save(without=engine.run_row(rows.batch_8(spec)))
    engine.rpc("test_lose_begin", "always")
    try:
        engine.run(rows.batch_8(spec))
    except Exception as error:
        report.save(raised=f"{type(error).__name__}: {error}")


def faults(spec: EngineSpec, models: Path, report: Report) -> None:
    """A row for each fault that NWOR_TEST_FAULT names, which happens once in it; only
    the last one may end the engine."""
    engine = Engine(spec, models, report)
    for what in os.environ["NWOR_TEST_FAULT"].split():
        engine.rpc("test_oracle", "Fault", "plant", what)
        found: dict[str, Any] = {"raised": ""}
        try:
            found |= run_watched(engine, rows.batch_8(spec), "Fault")
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
        seen = engine.rpc("test_oracle", "Fault", "lift")[0]
        report.save(**{what: found | seen})


# -- sleep -----------------------------------------------------------------------------


def sleep(spec: EngineSpec, models: Path, report: Report) -> None:
    """The same rows before any sleep, after one of level 1 (weights kept on the host),
    after one in the middle of a row, and after one of level 2 (weights are loaded
    again). With the KV audit on there is no oracle, which fills caches before a row."""
    is_audited = "VLLM_NWOR_AUDIT" in os.environ
    engine = Engine(spec, models, report, enable_sleep_mode=True)
    run = engine.run_row if is_audited else partial(run_watched, engine)
    for phase in rows.PHASES:
        results = report.found[phase] = {}
        if phase == "live":
            results["interrupted"] = interrupt(engine, rows.batch_8(spec))
        elif phase != "awake":
            nap(engine, int(phase[-1]))
        results["memory"] = engine.rpc("test_memory")[0]
        report.save()  # a step on freed memory would end the process
        report.save_rows(phase, rows.rows_of(spec, *rows.SLEEP_ROWS), run)
    if is_audited:
        report.save(audit=engine.rpc("test_audit"))


def interrupt(engine: Engine, row: rows.Row) -> dict[str, Any]:
    """A row in which the engine sleeps and wakes up while requests run: vLLM preempts
    and recomputes them."""
    found: dict[str, Any] = {}

    def sleep_and_wake_up() -> None:
        found["num_live"] = engine.llm.get_num_unfinished_requests()
        engine.llm.sleep(level=1, mode="keep")
        engine.llm.wake_up()

    with engine.before_step(NAP_BEFORE_STEP, sleep_and_wake_up):
        return engine.run_row(row) | found


def nap(engine: Engine, level: int) -> None:
    """Sleeps and wakes up in the order of vLLM's documentation for each level."""
    engine.forget()
    engine.llm.sleep(level=level)
    assert engine.llm.is_sleeping()
    if level == 1:
        engine.llm.wake_up()
    else:
        engine.llm.wake_up(tags=["weights"])
        engine.rpc("test_randomize", SEED)  # restores the weights in place
        engine.llm.wake_up(tags=["kv_cache"])
    assert not engine.llm.is_sleeping()


# -- poison and audit ------------------------------------------------------------------


def poison(spec: EngineSpec, models: Path, report: Report) -> None:
    """Rows without filling, twice, and with unwritten slots filled as PASSES says. NaN
    comes last: it may end the engine."""
    engine = Engine(spec, models, report)
    for name, filling in PASSES.items():
        run = partial(run_filled, engine, filling)
        report.save_rows(name, rows.rows_of(spec, *FILLED_ROWS), run)


def run_filled(
    engine: Engine, filling: tuple[str, bool] | None, row: rows.Row
) -> dict[str, Any]:
    """Outputs and, unless `filling` is None, the number of filled slots."""
    if filling is None:
        return vars(engine.run(row))
    engine.forget()  # cached blocks must not be filled
    engine.rpc("test_oracle", "Filler", "fill", *filling)
    from tests.helpers.filler import unwritten_blocks

    forget = partial(engine.rpc, "test_oracle", "Filler", "forget")
    with unwritten_blocks(engine.scheduler, forget):
        found = vars(engine.run(row))
    return found | {"filled": engine.rpc("test_oracle", "Filler", "stop")[0]}


def audit(spec: EngineSpec, models: Path, report: Report) -> None:
    """The audit's findings in all rows, then in one with a bit flipped between two
    steps."""
    engine = Engine(spec, models, report)

    def run(row: rows.Row) -> list[Any]:
        engine.run(row)
        return engine.rpc("test_audit")

    report.save_rows("clean", rows.rows(spec), run)
    flipped: list[Any] = []
    with engine.before_step(
        FLIP_BEFORE_STEP, lambda: flipped.extend(engine.rpc("test_flip_bit"))
    ):
        found = run(rows.batch_8(spec))
    report.save(flipped=flipped, found=found)


def states(spec: EngineSpec, models: Path, report: Report) -> None:
    """The audit's findings in rows of a hybrid model, again until it has looked at
    spec.steps; in one in which the states of a request and layer are lost between two
    steps, and in two whose prompts may be taken for windows. hits: tokens that the
    requests of the clean rows found in the prefix cache. preempted: how often some
    were. differences: of the logprobs of first tokens, to prompts of one token that
    were alone; shared: of texts in the prefix cache to the same with a salt."""
    engine, num_steps = Engine(spec, models, report), 0
    hits: dict[str, dict[str, int]] = {}

    def run(row: rows.Row) -> list[Any]:
        nonlocal num_steps
        hits.setdefault(row.name, engine.run(row).cached)
        looks: list[Any] = engine.rpc("test_audit")
        num_steps = min(look["counts"]["steps"] for look in looks)
        return looks

    clean = [row for row in rows.rows(spec) if row.name in STATE_ROWS]
    clean += [rows.few_tokens(), *([rows.block_ends()] if spec.cached else [])]
    report.save_rows("clean", clean, run)
    again = itertools.cycle(clean)
    while num_steps < spec.steps:
        report.found["clean"]["again"] = run(next(again))
    metrics = (m for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
    report.save(hits=hits, num_steps=num_steps, preempted=sum(m.value for m in metrics))
    lost: list[Any] = []
    with engine.before_step(
        FLIP_BEFORE_STEP, lambda: lost.extend(engine.rpc("test_lose_state"))
    ):
        found = run(rows.batch_8(spec))
    report.save(lost=lost, found=found)
    outcome = engine.run(rows.as_long_as_windows(spec))
    taken = sorted(rows.taken_for_windows(spec, outcome.batches))
    names = [sorted({name for name, *_ in of}) for of in named(engine, outcome)]
    report.save(taken=taken, named=names, differences=differences(outcome))
    outcome = engine.run(rows.padded_prompts())
    firsts = dict(reversed([*itertools.chain(*outcome.batches)]))
    padded = sorted(n for n, of in firsts.items() if n.startswith("padded/") and of > 1)
    wrong, alone = named(engine, outcome), engine.run(rows.padded_prompts(alone=True))
    far = [distance(outcome, name, alone, name) for name in padded]
    report.save(padded={"prompts": padded, "named": wrong, "differences": far})
    if spec.cached:
        hit, whole = (engine.run(rows.block_ends(has_salts)) for has_salts in (0, 1))
        shared = [name for name in hit.tokens if name.startswith("sharing/")]
        num_hit = [[of.cached[name] for name in shared] for of in (hit, whole)]
        far = [distance(hit, name, whole, name) for name in shared]
        report.save(shared={"num_hit": num_hit, "differences": far})
    if spec.tensor_parallel > 1:
        engine.stop()


def named(engine: Engine, outcome: Outcome) -> list[list[tuple[str, str, str]]]:
    """Requests of that row of which the audit found something, and what, by rank."""
    names, looks = outcome.tokens, engine.rpc("test_audit")
    return [
        sorted({(o, f["kind"], f["state"]) for f in of if (o := f["owner"]) in names})
        for of in (look["findings"] for look in looks)
    ]


def differences(outcome: Outcome) -> dict[str, float]:
    """Of the logprobs of the first token, alone and beside another, by the prompt's
    length."""
    return {
        name.split("/")[1]: distance(
            outcome, name, outcome, name.replace("alone", "beside")
        )
        for name in outcome.logprobs
        if name.startswith("alone/")
    }


def corrupting(spec: EngineSpec, models: Path, report: Report) -> None:
    """Stores texts of whole blocks, loads them for requests that continue these texts,
    and runs those again with a salt, so that all is computed. NWOR_TEST_FAULT: whether
    the slot of the final token is stored."""
    from tests.helpers.offloading_fault import final_slots

    are_stored = os.environ["NWOR_TEST_FAULT"] == "1"
    more = {"speculative_config": None} if spec.runner == "v2" else {}
    with final_slots(are_stored) as is_faulty:
        engine = Engine(spec, models, report, prepares=False, **more)
        engine.rpc("test_randomize", SEED)
        size = spec.block_size
        first = tuple(
            Request(f"first/{n}", rows.prompt(f"o {n}", 40 + n), 4 * size - 40 - n)
            for n in range(8)
        )
        # A store is submitted one step later.
        filler = (Request("filler/0", rows.prompt("filler", 20), 12),)
        tokens = engine.run(rows.Row("first", (first, filler))).tokens
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
        loaded = engine.run(rows.Row("later", (later, filler)))  # loaded from the host
        computed = engine.run_again(rows.Row("fresh", (fresh,)))

    found = [
        distance(loaded, request.name, computed, f"fresh/{request.name}")
        for request in later
    ]
    report.save(
        is_faulty=is_faulty,
        cached=[loaded.cached[request.name] for request in later],
        differences=found,
        audit=engine.rpc("test_audit"),
    )


def loaded_again(spec: EngineSpec, models: Path, report: Report) -> None:
    """Texts are computed, and loaded where no request was before; differences: of their
    first token's logprobs. cached: tokens that were loaded, with another salt, too."""
    engine = Engine(spec, models, report, prepares=False)
    engine.rpc("test_randomize", SEED)
    texts = tuple(
        Request(f"text/{n}", rows.prompt(f"o {n}", 40 + n), 4, params={"logprobs": 5})
        for n in range(8)
    )
    first = engine.run(rows.Row("computed", (texts,)))
    engine.forget()
    loaded = engine.run_again(rows.Row("loaded", (texts,)))
    report.save(audit=engine.rpc("test_audit"))
    salted = tuple(replace(text, salt="other") for text in texts)
    engine.forget()
    cached = loaded, engine.run_again(rows.Row("salted", (salted,)))
    report.save(
        cached=[[*one.cached.values()] for one in cached],
        differences=[distance(loaded, one.name, first, one.name) for one in texts],
    )


def loads(spec: EngineSpec, models: Path, report: Report) -> None:
    """Texts are stored, and loaded when others have had their blocks: as they were,
    with what was answered and a new end, and from the other one of two connectors.
    cached: tokens that were loaded, by row. Last, one is loaded of which the store has
    wrong bits. where: what must be found."""
    store, has_two = spec.store(models), spec.connector.endswith("both")
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    engine = Engine(spec, models, report)
    texts, others = rows.stored(spec)
    tokens = engine.run(rows.Row("stored", (texts, others))).tokens
    turns = tuple(
        replace(one, prompt=(*one.prompt, *tokens[one.name], *rows.prompt(one.name, 9)))
        for one in texts
    )
    cached: dict[str, dict[str, int]] = {}

    def run(row: rows.Row, reset_connector: bool = False) -> list[Any]:
        engine.forget(reset_connector)
        cached[row.name] = engine.run_again(row).cached
        return engine.rpc("test_audit")

    clean = [rows.Row("loaded", (texts, others)), rows.Row("turns", (turns,))]
    report.save_rows("clean", clean, run)
    if has_two:
        row = rows.Row("from the second", (texts, others))
        report.save_rows("clean", [row], partial(run, reset_connector=True))
    lengths = [len(one.prompt) for one in (*texts, *others)]
    size = engine.llm.vllm_config.cache_config.block_size
    report.save(cached=dict(cached), lengths=lengths, block_size=size)
    kept = set(store.iterdir())
    wrong = replace(texts[0], name="wrong/0", prompt=rows.prompt("wrong", lengths[0]))
    engine.run(rows.Row("wrong", ((wrong,),)))
    files = set(store.iterdir()) - kept
    filler = (Request("filler/0", rows.prompt("filler", 20), 12),)
    engine.run(rows.Row("filler", (filler,)))
    engine.forget(has_two)
    if files:
        layer = report.found["facts"]["targets"][1]
        where = [flip_in_file(*files, layer, spec.block_size)]
    else:
        where = engine.rpc("test_flip_stored")
    found = run(rows.Row("wrong", ((wrong,),)))
    report.save(where=where, found=found)


def failing(spec: EngineSpec, models: Path, report: Report) -> None:
    """Texts are loaded of which the connector lacks the third block, which it reports,
    and then whole."""
    from tests.helpers.folder_connector import FolderConnector as Connector

    store, load = spec.store(models), Connector.start_load_kv
    lost: dict[str, Path] = {}
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    engine = Engine(spec, models, report)
    texts, others = rows.stored(spec)
    row = rows.Row("loaded", (texts, others))
    first = engine.run(row)

    def lacking(connector: Any, *args: Any, **kwargs: Any) -> None:
        for name, blocks in connector._connector_metadata.loads.items():
            if name not in lost:
                lost[name] = blocks[2][1].rename(f"{blocks[2][1]}-lost")
        load(connector, *args, **kwargs)

    def run(row: rows.Row) -> dict[str, Any]:
        engine.forget()
        found = engine.run_again(row)
        (look,) = engine.rpc("test_audit")
        ends = sorted({str(reason) for reason in found.finish.values()})
        far = [distance(first, n, found, n) for n, of in found.logprobs.items() if of]
        return {"counts": look["counts"], "ends": ends, "differences": far}

    with mock.patch.object(Connector, "start_load_kv", lacking):
        report.save_rows("failed", [row], run)
    for path in lost.values():
        path.rename(f"{path}".removesuffix("-lost"))
    report.save_rows("whole", [row], run)
    report.save(lengths=[len(one.prompt) for one in (*texts, *others)])


def handover(role: str, spec: EngineSpec, models: Path, report: Report) -> None:
    """One of the two instances of tests/e2e/test_nixl.py."""
    from tests.e2e import test_nixl

    engine = Engine(spec, models, report)
    # A load takes seconds, and steps without rows microseconds.
    engine.llm.step = lambda step=engine.llm.step: time.sleep(0.005) or step()

    def run(request: Request) -> Outcome:
        return engine.run_again(rows.Row(request.name, ((request,),)))

    getattr(test_nixl, role)(engine.rpc, run, Path(os.environ["NWOR_TEST_FOLDER"]))
    if spec.tensor_parallel > 1:
        engine.stop()


prefill, decode = (partial(handover, role) for role in ("prefill", "decode"))


def flip_in_file(folder: Path, layer: str, size: int) -> dict[str, Any]:
    """Flips a bit of slot 100 of a text in an ExampleConnector's file of that layer.
    Returns what must be found: the block's first slot (of `size`), as no digest says
    which slot is wrong."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / f"{layer}.safetensors"
    saved = load_file(path)
    saved["kv_cache"][100].view(-1).view(torch.uint8)[9] ^= 1
    save_file(saved, path)
    return {"layer": layer, "position": 100 // size * size}


# -- synchronization -------------------------------------------------------------------


def sync(spec: EngineSpec, models: Path, report: Report) -> None:
    """Launches and synchronizing calls of a row, JIT compilations, and, last since an
    error breaks the engine, vLLM's own check for synchronization."""
    import vllm.utils.gpu_sync_debug as sync_debug
    import vllm.utils.jit_monitor as monitor

    # What vLLM's JIT monitor would raise for with --jit-monitor-mode=error.
    compiled: list[str] = []

    def note(*, backend: str, event: str, fn_name: str, detail: str | None = None):
        compiled.append(f"{backend} {event} {fn_name}")

    monitor._handle_jit_event = note
    if os.environ.get("NWOR_TEST_STATES") == "0":
        from vllm_nwor.hooks import states

        states.groups_of = lambda runner: []
    engine = Engine(spec, models, report, prepares=False)
    sync_debug._sync_check_enabled = False
    engine.rpc("test_randomize", SEED)
    checked_rows = rows.rows_of(spec, *CHECKED_ROWS)
    # Twice: the first run may initialize things.
    for row in checked_rows * 2:
        engine.run(row)
    report.save(compiled=compiled)  # later entries are saved, too
    report.save(profiles=[profile(engine, rows.batch_8(spec)) for _ in range(2)])
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


def profile(engine: Engine, row: rows.Row) -> dict[str, Any]:
    """The profiler's counts for a row: steps; by name, the host's synchronizing and
    allocating calls and operators, copies to pageable memory (which wait without such a
    call), and the device's work."""
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
        "synchronizing": count(*DRIVER_CALLS, of=SYNCHRONIZING.__contains__),
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
        (globals() | vars(computed) | vars(weights))[job](spec, Path(models), report)
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
    # Skips vLLM's threads and finalizers.
    os._exit(status)
