# SPDX-License-Identifier: Apache-2.0
"""Jobs of process.py that change an engine's weights while the KV audit runs.

A row is "route/content/when": the call that changes the weights; whether it writes the
bytes that are there or other ones; and when it does:

    idle    between two requests of one text
    flight  between two steps of the first of them; the second one has its whole text
    paused  the same, between pause and resume
    sleep   between them, after a sleep of level 2, which discards weights and caches

The second request takes over the first one's blocks. Its logprobs are compared with
those of the same text after reset_prefix_cache, which are right. Each row goes on with
the weights of the row before.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.harness import DRAIN_STEPS, SEED, Engine, Outcome, Report, distance
from tests.gpu.rows import prompt
from tests.helpers.player import Request, risen

Change = Callable[[Engine, int], Any]

TEXT = prompt("weights", 100)
CHANGE_BEFORE_STEP = 5
# Longer than it takes until a fingerprint is read.
NUM_STEPS = 80
IN_FLIGHT = ("flight", "paused")
OFF = "off"
NUM_LOGPROBS = 20
NUM_LOOKS, NUM_WARM = 12, 2
SHAPE = "shape:llama-8b"


def both(route: str, when: str = "idle") -> tuple[str, str]:
    return f"{route}/other/{when}", f"{route}/same/{when}"


ROWS = (
    *both("rpc"),
    *both("apply_model"),
    *both("reload_weights"),
    *both("update_weights"),
    "read/same/idle",
    "apply_model/other/flight",
    "rpc/other/paused",
    "unannounced/other/idle",
)
SLEEP_ROWS = both("reload_weights", "sleep")
RANK_ROWS = both("rank 1")
ADAPTER_ROWS = both("adapter")


# --- routes ---------------------------------------------------------------------------


def read(engine: Engine, _: int) -> None:
    engine.llm.apply_model(lambda model: model.lm_head.weight.float().sum().item())


def write(engine: Engine, seed: int, rank: int | None = None) -> None:
    """Into the parameters, as a worker extension does that calls no load_weights."""
    engine.rpc("test_randomize", seed, True, rank)


def unannounced(engine: Engine, seed: int) -> None:
    """Into the parameters in process, with no RPC; then steps of another text."""
    executor = engine.llm.engine_core.engine_core.model_executor
    executor.driver_worker.worker.test_randomize(seed, True)
    engine.play([Request("between", prompt("between", 20), NUM_STEPS)], Outcome())


def load(engine: Engine, seed: int) -> None:
    from tests.gpu.worker import checkpoint

    engine.llm.apply_model(lambda model: model.load_weights(checkpoint(model, seed)))


def reload(engine: Engine, seed: int) -> None:
    from tests.gpu.worker import checkpoint

    (tensors,) = engine.llm.apply_model(lambda model: checkpoint(model, seed))
    kwargs = {"weights_iterator": iter(tensors)}
    engine.llm.collective_rpc("reload_weights", kwargs=kwargs)


def update(engine: Engine, seed: int) -> None:
    engine.rpc("test_transfer")
    engine.rpc("start_weight_update")
    engine.rpc("update_weights", {"seed": seed})
    engine.rpc("finish_weight_update")


def load_adapter(engine: Engine, seed: int) -> None:
    """Another adapter's files in the place of the first one's, which is loaded again
    under its name, id and path."""
    from vllm.lora.request import LoRARequest

    from tests.helpers.lora import lora

    known = engine.loras[1]
    with tempfile.TemporaryDirectory() as folder:
        model = engine.llm.vllm_config.model_config.model
        other = lora(Path(folder), seed, model)
        shutil.copytree(other.lora_path, known.lora_path, dirs_exist_ok=True)
    anew = LoRARequest(known.lora_name, 1, known.lora_path, load_inplace=True)
    engine.llm.add_lora(anew)


ROUTES: dict[str, Change] = {
    "read": read,
    "rpc": write,
    "apply_model": load,
    "reload_weights": reload,
    "update_weights": update,
    "unannounced": unannounced,
    "rank 1": partial(write, rank=1),
    "adapter": load_adapter,
}


def rows_of(spec: EngineSpec, mode: str) -> tuple[str, ...]:
    """The rows of an engine; with NWOR off it does not sleep."""
    if spec.loras:
        return ADAPTER_ROWS
    if spec.tensor_parallel > 1:
        return RANK_ROWS
    return ROWS if mode == OFF else (*ROWS, *SLEEP_ROWS)


# --- jobs -----------------------------------------------------------------------------


def refits(spec: EngineSpec, models: Path, report: Report) -> None:
    """The rows of rows_of."""
    rows = rows_of(spec, report.found["mode"])
    engine = Engine(spec, models, report, enable_sleep_mode=SLEEP_ROWS[0] in rows)
    refit, found = Refit(engine), report.found.setdefault("rows", {})
    for row in rows:
        found[row] = refit.run(row)
        report.save()
    if spec.tensor_parallel > 1:
        engine.stop()


class Refit:
    """Runs rows on an engine whose target and drafter have the weights of `seed`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seed = engine, SEED
        self.core = engine.llm.engine_core.engine_core
        self.num_found = [0] * engine.spec.tensor_parallel

    def run(self, row: str) -> dict[str, Any]:
        """epochs: before and after. routes: increments of vllm:nwor_weight_changes.
        findings: for each rank. cached: tokens that the second request found.
        distance: of its logprobs from the right ones. changed: the same of a first
        request that ran before the change."""
        route, content, when = row.split("/")
        self.seed += content == "other"
        change = partial(ROUTES[route], self.engine, self.seed)
        self.engine.forget()
        epoch, changes = self.epoch(), self.changes()
        if when in IN_FLIGHT:
            act = partial(self.in_flight, change, when == "paused")
            with self.engine.before_step(CHANGE_BEFORE_STEP, act):
                first = self.ask(f"{row}/first", TEXT, 48)
            text = (*TEXT, *first.tokens[f"{row}/first"])
        else:
            first, text = self.ask(f"{row}/first", TEXT), TEXT
            self.asleep(change) if when == "sleep" else change()
        second = self.ask(f"{row}/second", text)
        self.engine.forget()
        right = self.ask(f"{row}/right", text)
        return {
            "epochs": [epoch, self.epoch()],
            "routes": {k: v for k, v in risen(changes, self.changes()).items() if v},
            "findings": self.findings(),
            "cached": second.cached[f"{row}/second"],
            "distance": distance(second, f"{row}/second", right, f"{row}/right"),
            "changed": None
            if when in IN_FLIGHT
            else distance(first, f"{row}/first", right, f"{row}/right"),
        }

    def ask(self, name: str, text: Sequence[int], max_tokens: int = 12) -> Outcome:
        """With no RPC, which would be a reason to look at the weights."""
        outcome = Outcome()
        lora = 1 if self.engine.spec.loras else None
        params = {"logprobs": NUM_LOGPROBS}
        request = Request(name, tuple(text), max_tokens, params=params, lora=lora)
        self.engine.play([request], outcome)
        for _ in range(DRAIN_STEPS):
            self.engine.llm.step()
        return outcome

    def in_flight(self, change: Callable[[], Any], is_paused: bool) -> None:
        assert self.engine.llm.get_num_unfinished_requests() == 1
        if is_paused:
            self.core.pause_scheduler("keep", clear_cache=False)
            self.engine.llm.step()
        change()
        self.core.resume_scheduler()

    def asleep(self, change: Callable[[], Any]) -> None:
        llm = self.engine.llm
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        write(self.engine, self.seed)  # the drafter's, too
        change()
        llm.wake_up(tags=["kv_cache"])

    def epoch(self) -> int:
        number: int = self.core.nwor_weights.current.epoch
        return number

    def changes(self) -> dict[str, int]:
        return {
            metric.labels["route"]: int(metric.value)
            for metric in self.engine.llm.get_metrics()
            if metric.name == "vllm:nwor_weight_changes"
        }

    def findings(self) -> list[list[dict[str, Any]]]:
        """For each rank, those since the last call."""
        found = [look["findings"] for look in self.engine.rpc("test_audit")]
        before, self.num_found = self.num_found, [len(of_rank) for of_rank in found]
        return [of_rank[n:] for of_rank, n in zip(found, before, strict=True)]


def weights_cost(spec: EngineSpec, models: Path, report: Report) -> None:
    """Milliseconds of a look at the weights of an 8B shape: after an RPC (a sample) and
    after a call of load_weights (all bytes), neither of which changes anything."""
    import torch
    from benchmarks.settings import TARGET, find_model

    model = find_model("--model", SHAPE, TARGET).location
    more = {"model": model, "skip_tokenizer_init": True, "speculative_config": None}
    engine = Engine(spec, models, report, prepares=False, **more)
    epochs = engine.llm.engine_core.engine_core.nwor_weights

    def looks(act: Callable[[], Any]) -> list[float]:
        found: list[float] = []
        for _ in range(NUM_WARM + NUM_LOOKS):
            act()
            torch.accelerator.synchronize()
            started = time.perf_counter()
            epochs.of_step(is_running=False, has_tokens=True)
            found.append((time.perf_counter() - started) * 1e3)
        return found[NUM_WARM:]

    (num_bytes,) = engine.llm.apply_model(
        lambda model: sum(one.nbytes for one in model.parameters())
    )
    report.save(
        num_bytes=num_bytes,
        sample_ms=looks(partial(engine.rpc, "check_health")),
        digest_ms=looks(
            partial(engine.llm.apply_model, lambda model: model.load_weights(iter(())))
        ),
        epoch=epochs.current.epoch,
    )
