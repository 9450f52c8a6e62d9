# SPDX-License-Identifier: Apache-2.0
"""The KV audit's class `stale_weights` on real engines: a request takes over cached
blocks that other base-model weights computed.

Each test that changes weights first proves that the change counts: the request's answer
after reset_prefix_cache differs from the answer before. Hits on blocks of the old
weights are compared with that answer, too. All weights but the engine's own are random,
and no two tests use the same ones.

On the CPU vLLM moves linear layers' weights into oneDNN handles that cannot be read.
Engines of this file keep plain parameters instead, except in the last section. Not
covered: adapters, tensor parallelism, worker processes, CUDA.
"""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers import utils

from tests.helpers.engine import BLOCK_SIZE, Engine, Request, Result, prompt, shared
from tests.helpers.environment import model_path
from tests.helpers.logs import nwor_log
from tests.helpers.runner_probe import request_name
from tests.integration.test_byte_oracle import EVERYTHING
from vllm_nwor.audit import fingerprints
from vllm_nwor.hooks.weights import START, START_DRAFT
from vllm_nwor.metrics import WEIGHT_CHANGES, NworStats

Change = Callable[[Engine, int], Any]

TEXT = prompt(77, 80)
NUM_CACHED = 2 * BLOCK_SIZE
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 24}
NGRAM: dict[str, Any] = {}
NO_DRAFTS: dict[str, Any] = {"speculative_config": None}
KINDS = {
    "off": ("off", NGRAM),
    "off, no speculation": ("off", NO_DRAFTS),
    "cow": ("cow", NGRAM),
    "stage": ("stage", NGRAM),
}
DISPATCH = "dispatch_cpu_unquantized_gemm"
dispatch_to_handles = getattr(utils, DISPATCH)
new_seeds = itertools.count(1)


# --- weights --------------------------------------------------------------------------


def dispatch_to_parameters(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's function: the layer computes with its parameter."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.fixture(scope="module", autouse=True)
def plain_parameters() -> Iterator[None]:
    """For whole tests, since reload_weights dispatches again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, DISPATCH, dispatch_to_parameters)
        yield


@functools.cache
def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Tensors by their names in the checkpoint; seed 0: the model's own."""
    tensors = load_file(Path(model_path("tiny-llama"), "model.safetensors"))
    draw = torch.Generator().manual_seed(seed)
    return {
        name: one
        if seed == 0 or one.ndim == 1
        else (torch.randn(one.shape, generator=draw) * one.float().std()).to(one.dtype)
        for name, one in tensors.items()
    }


def write(model: torch.nn.Module, seed: int) -> None:
    """Writes that checkpoint into the parameters as RDMA would, with neither vLLM's
    functions nor torch's version counters."""
    stacks = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
    tensors = checkpoint(seed)
    for name, param in model.named_parameters():
        kind = name.split(".")[-2]
        parts = [name.replace(kind, f"{part}_proj") for part in stacks.get(kind, ())]
        value = torch.cat([tensors[part] for part in parts or [name]])
        param.data.copy_(value)


def model_of(engine: Engine) -> torch.nn.Module:
    return engine.runner.get_model()


def reload_from_disk(engine: Engine, seed: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        save_file(checkpoint(seed), Path(path, "model.safetensors"))
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def reload_from_tensors(engine: Engine, seed: int) -> None:
    kwargs = {"weights_iterator": iter(checkpoint(seed).items())}
    engine.llm.collective_rpc("reload_weights", kwargs=kwargs)


def write_by_rpc(engine: Engine, seed: int) -> None:
    """A worker extension's own method."""
    engine.llm.collective_rpc(lambda worker: write(worker.get_model(), seed))


def load_by_apply_model(engine: Engine, seed: int) -> None:
    """A callable that gives the tensors one by one."""

    def load(model: Any) -> None:
        for item in checkpoint(seed).items():
            model.load_weights([item])

    engine.llm.apply_model(load)


def load_in_process(engine: Engine, seed: int) -> None:
    """As trl does, with no RPC."""
    model: Any = model_of(engine)
    model.load_weights(checkpoint(seed).items())


class Transfer:
    """A weight transfer engine that calls `act` with the content of each update."""

    supports_draft_weight_update = True

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def update_weights(self, content: dict[str, Any]) -> None:
        self.act(**content)

    def start_weight_update(self, *target: Any) -> None: ...

    set_weight_update_target = start_weight_update
    finish_weight_update = reset_weight_update_target = shutdown = start_weight_update


@contextmanager
def updating(
    engine: Engine, act: Callable[..., Any], start: str = START
) -> Iterator[Callable[..., Any]]:
    """vLLM's calls of an update; yields the function for one part of it."""
    worker = engine.core.model_executor.driver_worker.worker

    def send(**content: Any) -> None:
        engine.llm.collective_rpc("update_weights", args=(content,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "weight_transfer_engine", Transfer(act))
        engine.llm.collective_rpc(start)
        yield send
        engine.llm.collective_rpc("finish_weight_update")


def transfer(engine: Engine, seed: int) -> None:
    with updating(engine, functools.partial(write, model_of(engine))) as send:
        send(seed=seed)


# Ways to change weights, and what each is counted as.
ROUTES: dict[str, tuple[Change, str]] = {
    "reload_weights, a path": (reload_from_disk, "reload_weights"),
    "reload_weights, tensors": (reload_from_tensors, "reload_weights"),
    "any RPC": (write_by_rpc, "rpc"),
    "apply_model": (load_by_apply_model, "load_weights"),
    "load_weights in process": (load_in_process, "load_weights"),
    "update_weights": (transfer, "update_weights"),
}


# --- requests and findings ------------------------------------------------------------


def start(kind: str = "off", **settings: str) -> Engine:
    """An engine with that kind's arguments; a shared one without further settings."""
    mode, arguments = KINDS[kind]
    if settings:
        return Engine(mode, EVERYTHING | settings, **CACHED, **arguments)
    return shared(mode, settings=EVERYTHING, **CACHED, **arguments)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A shared engine that has its own weights, no cached prefix and no findings."""
    engine = start(getattr(request, "param", "off"))
    write_by_rpc(engine, 0)
    assert engine.llm.reset_prefix_cache()
    engine.audit.findings.last.clear()
    yield engine
    engine.llm.abort_request(list(engine.scheduler.requests))
    engine.core.resume_scheduler()
    while engine.llm.has_unfinished_requests():
        engine.llm.step()


of_each_kind = pytest.mark.parametrize("engine", KINDS, indirect=True)


def ask(
    engine: Engine, name: str, text: Sequence[int] = TEXT, cached: int = NUM_CACHED
) -> list[int]:
    return engine.ask(name, text, cached)


def check_stale(
    engine: Engine, reader: str, writers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The findings since the last call are those of `reader`, one for each of its first
    blocks, by these writers. Returns the weights that wrote, and the present ones."""
    findings: list[Any] = engine.take_findings()
    assert [
        (f.kind, f.position, request_name(f.owner), request_name(f.writer.request))
        for f in findings
    ] == [
        ("stale_weights", BLOCK_SIZE * n, reader, writer)
        for n, writer in enumerate(writers)
    ]
    weights = findings[0].weights
    assert all(finding.weights == weights for finding in findings)
    return weights["written"], weights["present"]


def epochs(engine: Engine, reader: str, writers: Sequence[str]) -> tuple[int, int]:
    """As check_stale: the epochs."""
    written, present = check_stale(engine, reader, writers)
    return written["epoch"], present["epoch"]


def next_epoch(engine: Engine) -> int:
    """The epoch of new weights. The engine has its own again afterwards."""
    engine.ask_anew(TEXT)
    ask(engine, "probe", cached=0)
    write_by_rpc(engine, next(new_seeds))
    ask(engine, "probing")
    write_by_rpc(engine, 0)
    assert engine.llm.reset_prefix_cache()
    return epochs(engine, "probing", ["probe"] * 2)[1]


# --- idle engines ---------------------------------------------------------------------


def check_change(engine: Engine, change: Change) -> tuple[int, int]:
    """After a change cached blocks give a wrong answer, and are found. After a reset
    there is no finding. Returns the epochs, and leaves no cached prefix."""
    before = engine.ask_anew(TEXT)
    assert ask(engine, "first", cached=0) == before
    change(engine, next(new_seeds))
    answer = ask(engine, "second")
    by_epochs = epochs(engine, "second", ["first"] * 2)
    right = engine.ask_anew(TEXT)
    assert before != right
    assert answer != right
    assert ask(engine, "third", cached=0) == right
    assert ask(engine, "fourth") == right
    assert engine.take_findings() == []
    assert engine.llm.reset_prefix_cache()
    return by_epochs


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_is_a_new_epoch_only_with_new_bytes(
    engine: Engine, route: str, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a route of many calls. No change is taken for an unannounced one."""
    change, counted = ROUTES[route]
    monkeypatch.setattr(fingerprints, "EVERY", 1)
    before = next_epoch(engine)
    answer = ask(engine, "first", cached=0)
    changes.clear()
    change(engine, 0)
    assert ask(engine, "second") == answer
    assert engine.take_findings() == []
    written, present = check_change(engine, change)
    assert written <= before < present == before + 1
    assert changes == [counted]


def write_in_process(engine: Engine, seed: int) -> None:
    write(model_of(engine), seed)


def move_in_process(engine: Engine, seed: int) -> None:
    """Other memory in place of each parameter's; the old one is freed."""
    model = model_of(engine)
    for param in model.parameters():
        param.data = param.data.clone()
    write(model, seed)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The routes of changes that are counted."""
    routes: list[str] = []
    counted = NworStats.count

    def count(stats: NworStats, field: str, counts: Counter[str]) -> None:
        if field == WEIGHT_CHANGES:
            routes.extend(counts.elements())
        counted(stats, field, counts)

    monkeypatch.setattr(NworStats, "count", count)
    return routes


def run_steps(engine: Engine, num: int) -> None:
    """At least so many, of a request whose text fills no block."""
    first = engine.audit.audit.step
    while engine.audit.audit.step < first + num:
        engine.run([Request("other", prompt(79, 10), 20)])


@of_each_kind
@pytest.mark.parametrize("change", [write_in_process, move_in_process])
def test_writes_that_nothing_announces_are_found_some_steps_later(
    engine: Engine, change: Change, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hits on blocks of before, from then on."""
    monkeypatch.setattr(fingerprints, "EVERY", every := 16)
    before = ask(engine, "first", cached=0)
    first = engine.audit.audit.step
    change(engine, next(new_seeds))
    changes.clear()
    with nwor_log() as lines:
        run_steps(engine, every + 1)
        wrong = ask(engine, "second")
    assert changes == ["unannounced"]
    epochs(engine, "second", ["first"] * 2)
    (line,) = [line for line in lines if "unannounced change" in line]
    begin, end = map(int, re.findall(r"steps? (\d+) and (\d+)", line)[0])
    assert begin <= first < end <= first + every
    right = engine.ask_anew(TEXT)
    assert before != right
    assert wrong != right
    assert engine.take_findings() == []


def test_weights_that_nobody_writes_are_looked_at_by_nobody(
    engine: Engine, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint in each step is a look in none."""
    monkeypatch.setattr(fingerprints, "EVERY", 1)
    ask(engine, "first", cached=0)
    weights, changes[:] = engine.runner.nwor_weights, []
    num_looks, first = weights.num_looks, engine.audit.audit.step
    run_steps(engine, 100)
    assert engine.audit.audit.fingerprints.seen >= first + 100
    assert (weights.num_looks, changes) == (num_looks, [])


# --- sleep ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_other", [False, True])
def test_weights_that_wake_up_count_by_what_they_hold(
    engine: Engine, is_other: bool, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM on the CPU keeps all memory in sleep: garbage stands for what a sleep of
    level 2 leaves, and the prefix cache is kept against vLLM's will."""
    before = ask(engine, "first", cached=0)
    changes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "reset_prefix_cache", lambda *args, **kw: True)
        engine.llm.sleep(level=2)
    write(model_of(engine), next(new_seeds))
    engine.llm.wake_up()
    write(model_of(engine), next(new_seeds) if is_other else 0)
    answer = ask(engine, "second")
    assert changes == ["wake_up"] * is_other
    if is_other:
        epochs(engine, "second", ["first"] * 2)
        assert answer != engine.ask_anew(TEXT)
    else:
        assert answer == before
        assert engine.take_findings() == []


# --- labels ---------------------------------------------------------------------------


def test_findings_have_vllms_labels(engine: Engine) -> None:
    """A label without new weights is no epoch."""
    before = next_epoch(engine)
    engine.llm.set_weight_version("version 1")
    answer = ask(engine, "first", cached=0)
    engine.llm.set_weight_version("version 2")
    assert ask(engine, "same weights") == answer
    assert engine.take_findings() == []
    write_by_rpc(engine, next(new_seeds))
    engine.llm.set_weight_version("version 3")
    assert ask(engine, "second") != answer
    written, present = check_stale(engine, "second", ["first"] * 2)
    assert written["label"] in ("version 1", "version 2")
    now = {"epoch": before + 1, "label": "version 3", "adapter": None}
    assert present == now


# --- requests in flight ---------------------------------------------------------------


def fly(engine: Engine, act: Callable[[], Any]) -> tuple[Result, list[int]]:
    """Runs "flight", with `act` between two steps in its third block. Returns its
    answer, too, which the change affects."""
    requests = [Request("flight", TEXT, 60)]
    unchanged = engine.run(requests).tokens["flight"]
    assert engine.llm.reset_prefix_cache()
    step, position = engine.llm.step, 0

    def acting() -> Any:
        nonlocal position
        if position <= len(TEXT):
            (flight,) = engine.scheduler.requests.values()
            position = flight.num_computed_tokens
            if position > len(TEXT):
                act()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm, "step", acting)
        result = engine.run(requests)
    assert engine.take_findings() == []
    answer, num = result.tokens["flight"], position - len(TEXT)
    assert 0 < num < BLOCK_SIZE - len(TEXT) % BLOCK_SIZE
    assert (answer[:num], answer != unchanged) == (unchanged[:num], True)
    return result, answer


@of_each_kind
@pytest.mark.parametrize("when", ["between steps", "paused", "reset in vain"])
def test_requests_in_flight_are_not_found_but_their_blocks_are(
    engine: Engine, when: str, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the block that spans the change, and one behind it. vLLM resets nothing
    while requests run. The change is not taken for an unannounced one."""
    monkeypatch.setattr(fingerprints, "EVERY", 1)

    def change() -> None:
        if when == "paused":
            engine.core.pause_scheduler("keep", clear_cache=False)
            assert engine.llm.step() == []
        write_by_rpc(engine, next(new_seeds))
        if when == "reset in vain":
            assert not engine.llm.reset_prefix_cache()
        engine.core.resume_scheduler()

    _, answer = fly(engine, change)
    wrong = ask(engine, "later")
    assert changes[-1:] == ["rpc"]
    by_epochs = epochs(engine, "later", ["flight"] * 2)
    ask(engine, "behind", (*TEXT, *answer), cached=4 * BLOCK_SIZE)
    assert epochs(engine, "behind", ["flight"] * 4) == by_epochs
    assert by_epochs[0] < by_epochs[1]
    assert engine.ask_anew(TEXT) != wrong
    assert engine.take_findings() == []


@of_each_kind
def test_a_requests_versions_are_those_that_computed_its_positions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one in flight across a change, of a later one that takes over its blocks, and
    of a fresh one after a reset. They reach the request's output."""
    add = engine.llm.add_request
    asks = {"nwor_kv_versions": True}

    def asking(name: str, text: Any, params: Any, **more: Any) -> Any:
        params.extra_args = asks
        return add(name, text, params, **more)

    step, answers = engine.llm.step, {}

    def stepping() -> Any:
        outputs = step()
        for one in outputs:
            if one.finished:
                answers[one.request_id] = one.kv_transfer_params["nwor_kv_versions"]
        return outputs

    # No label, which would name both epochs.
    monkeypatch.setattr(engine.core, "_weight_version", "default", raising=False)
    monkeypatch.setattr(engine.llm, "add_request", asking)
    monkeypatch.setattr(engine.llm, "step", stepping)

    def runs(name: str) -> list[tuple[str, int, int]]:
        return [(one["version"], one["start"], one["end"]) for one in answers[name]]

    _, answer = fly(engine, lambda: write_by_rpc(engine, next(new_seeds)))
    (old, begin, change), (new, after, end) = runs("flight")
    assert (begin, end) == (0, len(TEXT) + len(answer) - 1)
    assert len(TEXT) < change == after < 3 * BLOCK_SIZE
    assert old != new
    ask(engine, "later")
    assert runs("later") == [(old, 0, NUM_CACHED), (new, NUM_CACHED, len(TEXT) + 11)]
    text = (*TEXT, *answer)
    ask(engine, "behind", text, cached=4 * BLOCK_SIZE)
    assert runs("behind") == [(old, 0, change), (new, change, len(text) + 11)]
    engine.take_findings()
    engine.ask_anew(TEXT)
    assert runs("anew") == [(new, 0, len(TEXT) + 11)]


def test_weights_that_come_back_after_a_request_across_are_new(engine: Engine) -> None:
    """The price of the rule that such a request keeps its epoch: blocks that the first
    weights wrote alone are found, too."""
    before = next_epoch(engine)
    own = engine.ask_anew(TEXT)
    fly(engine, lambda: write_by_rpc(engine, next(new_seeds)))
    write_by_rpc(engine, 0)
    assert ask(engine, "later") == own
    written, present = epochs(engine, "later", ["flight"] * 2)
    assert written < before + 1
    assert present == before + 2


@pytest.mark.parametrize("is_paused", [False, True], ids=["reset", "pause"])
def test_requests_computed_anew_after_a_reset_are_of_the_new_weights(
    engine: Engine, is_paused: bool
) -> None:
    """reset_running_requests, or clear_cache of a pause, preempts all requests."""

    def change() -> None:
        if is_paused:
            engine.core.pause_scheduler("keep", clear_cache=True)
        write_by_rpc(engine, next(new_seeds))
        if is_paused:
            engine.core.resume_scheduler()
        else:
            assert engine.llm.reset_prefix_cache(reset_running_requests=True)

    result, answer = fly(engine, change)
    computed = [step.scheduled.get("flight", 0) for step in result.steps]
    assert max(computed[1:]) > len(TEXT)
    text = (*TEXT, *answer)
    later = ask(engine, "later", text, cached=4 * BLOCK_SIZE)
    assert engine.take_findings() == []
    assert engine.ask_anew(text) == later


# --- reactions ------------------------------------------------------------------------


def test_accepted_hits_are_only_counted() -> None:
    engine = start("cow", AUDIT="raise", AUDIT_STALE="count")
    with nwor_log() as lines:
        before = ask(engine, "first", cached=0)
        write_by_rpc(engine, next(new_seeds))
        wrong = ask(engine, "second")
    assert [line for line in lines if line.startswith("ERROR")] == []
    assert engine.take_findings() == []
    assert engine.audit.findings.counts["stale_weights"] == 2
    right = engine.ask_anew(TEXT)
    assert before != right
    assert wrong != right
    assert engine.audit.findings.counts["stale_weights"] == 2


# --- not the target's parameters ------------------------------------------------------


def test_an_update_of_the_drafter_is_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes which drafts are accepted, and no answer. Also where the target's
    weights cannot be read."""
    monkeypatch.setattr(utils, DISPATCH, dispatch_to_handles)
    drafter = {
        "method": "draft_model",
        "model": model_path("tiny-llama-draft"),
        "num_speculative_tokens": 2,
    }
    engine = Engine("stage", EVERYTHING, speculative_config=drafter, **CACHED)
    worker = engine.core.model_executor.driver_worker.worker
    answer = ask(engine, "first", cached=0)

    def randomize() -> None:
        for parameter in worker.get_draft_model().parameters():
            parameter.data.normal_()

    with updating(engine, randomize, START_DRAFT) as send:
        send()
    result = engine.run([Request("second", TEXT, 12)])
    assert result.cached == {"second": NUM_CACHED}
    assert result.tokens["second"] == answer
    assert engine.take_findings() == []
    reload_from_disk(engine, next(new_seeds))
    ask(engine, "third")
    assert epochs(engine, "third", ["first"] * 2) == (0, 1)


# --- weights that cannot be read ------------------------------------------------------


def test_each_announced_change_counts_where_weights_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM is on the CPU. A reload of the same bytes gives false findings."""
    monkeypatch.setattr(utils, DISPATCH, dispatch_to_handles)
    with nwor_log() as lines:
        engine = start("off", AUDIT="log")
    assert any(re.search("weights.*read|read.*weights", line) for line in lines)
    model: Any = model_of(engine)
    layers = model.model.layers
    assert {layer.mlp.down_proj.weight.numel() for layer in layers} == {0}

    def swap() -> None:
        """Exchanges handles of two layers."""
        one, other = (layers[n].self_attn.qkv_proj for n in (0, 1))
        one.cpu_linear, other.cpu_linear = other.cpu_linear, one.cpu_linear

    def load_embeddings(engine: Engine, seed: int) -> None:
        name = "model.embed_tokens.weight"
        model.load_weights([(name, checkpoint(seed)[name])])

    def transfer_swapped(engine: Engine, seed: int) -> None:
        with updating(engine, swap) as send:
            send()

    changes = reload_from_disk, reload_from_tensors, load_embeddings, transfer_swapped
    last = 0
    for change in changes:
        written, present = check_change(engine, change)
        assert written == last < present
        last = present

    reload_from_disk(engine, 0)
    answer = ask(engine, "first", cached=0)
    engine.llm.collective_rpc("check_health")
    assert ask(engine, "second") == answer
    assert engine.take_findings() == []
    reload_from_disk(engine, 0)
    assert ask(engine, "third") == answer
    written, present = epochs(engine, "third", ["first"] * 2)
    assert last < written < present
