# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in this process, driven step by step.

`Engine(mode)` builds an LLMEngine with NWOR in that mode. In mode "off" its objects get
vLLM's own functions back, unwrapped, even if this process has hooked their classes.

`Engine.run` plays requests (player.py) and returns tokens, logprobs and steps
(runner_probe.py). With tensor parallelism the runners are in worker processes: `probe`
is None, and worker_probe.py takes its place.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import vllm.v1.sample.sampler as sampler
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine

from tests.helpers.byte_map import cache_of
from tests.helpers.environment import model_path, nwor_settings
from tests.helpers.player import Outputs, Player, Request
from tests.helpers.runner_probe import (
    Observer,
    RunnerProbe,
    Step,
    manager_of,
    observer_of,
    request_name,
    unwrap_instance,
)

NUM_DRAFTS = 4
BLOCK_SIZE = 32
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
}


@dataclass
class Result(Outputs):
    """Outputs and steps of a run."""

    steps: list[Step] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(sum(step.drafted.values()) for step in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(sum(step.accepted.values()) for step in self.steps)

    @property
    def num_preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)

    def schedule(self) -> list[tuple[dict[str, int], dict[str, int], dict[str, int]]]:
        """The composition of all batches."""
        return [(step.scheduled, step.drafted, step.accepted) for step in self.steps]


def assert_same(found: Result, expected: Result) -> None:
    """Asserts equal outputs and equal batches."""
    for part in ("tokens", "logprobs", "text", "finish", "cached"):
        assert getattr(found, part) == getattr(expected, part), part
    assert found.schedule() == expected.schedule()


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Sets the number of OpenMP threads of this process and its children.

    On a busy machine threads that spin on each other make a step 50 times as long.
    vLLM's worker disables torch.set_num_threads, hence torch._C's.
    """
    before = torch.get_num_threads()
    torch._C.set_num_threads(num_threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", str(num_threads))
            yield
    finally:
        torch._C.set_num_threads(before)


# The first engine stays: its end would destroy vLLM's process groups.
_kept: list[Engine] = []
_shared: dict[str, Engine] = {}
_num_new = 0
MOST_SHARED = MOST_NEW = 6


def free_memory() -> None:
    """Collects unused engines, which are part of reference cycles."""
    global _num_new
    _num_new = 0
    gc.unfreeze()  # vLLM freezes all objects when an engine has started
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_engines() -> None:
    """Ends all engines but the first, shared ones included."""
    _shared.clear()
    if _num_new:
        free_memory()


class Engine(Player, Observer):
    """A real engine with NWOR in `mode`; settings: other VLLM_NWOR_* values; model: a
    name of tools/setup/make_models.py; arguments: EngineArgs that replace DEFAULTS."""

    params = {"ignore_eos": True, "logprobs": 2, "temperature": 0}

    def __init__(
        self,
        mode: str = "off",
        settings: dict[str, str] | None = None,
        model: str = "tiny-llama",
        **arguments: Any,
    ) -> None:
        global _num_new
        if _num_new == MOST_NEW:
            free_memory()
        _num_new += 1
        self.mode = mode
        options = DEFAULTS | {"model": model_path(model)} | arguments
        is_audited = (settings or {}).get("AUDIT", "off") != "off"
        with nwor_settings({"MODE": mode} | (settings or {})), threads(1):
            if mode != "off" or is_audited:
                from vllm_nwor.plugin import register

                register()
            make_vllm_reusable()
            try:
                self.llm = LLMEngine.from_engine_args(EngineArgs(**options))
            finally:
                self._connector = kv_transfer_state._KV_CONNECTOR_AGENT
                kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.core = self.llm.engine_core.engine_core
        self.runner: Any = None
        self.probe: RunnerProbe | None = None
        if options.get("tensor_parallel_size", 1) == 1:
            worker = self.core.model_executor.driver_worker.worker
            self.runner = worker.model_runner
            if mode == "off" and not is_audited:
                unwrap_instance(self.runner)
                unwrap_instance(self.core.scheduler)
            self.probe = RunnerProbe(self.runner)
            finalizer = getattr(self.llm.engine_core, "_finalizer", None)
            if _kept and finalizer is not None:  # 0.29 has none
                # At exit vLLM would collect garbage twice per engine, 0.8 s each. For
                # the first one it does: otherwise triton reports leaks.
                finalizer.detach()
        _kept[:] = _kept or [self]

    @property
    def audit(self) -> Any:
        """The audit of this runner, or None."""
        return observer_of(self.runner, "audit")

    def audited(self) -> Counter[str]:
        """The audit's counts so far, but for steps."""
        counts = Counter(self.audit.findings.totals())
        del counts["steps"]
        return counts

    @property
    def infos(self) -> Any:
        """What became of each KV-cache group: rows of vllm:nwor_info."""
        return observer_of(self.runner, "transaction").infos

    @property
    def manager(self) -> Any:
        """NWOR's manager on this runner, or None if nothing is protected."""
        return manager_of(self.runner)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Makes this engine's KV connector the process's only one in the block."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def poison_caches(self) -> None:
        """Forgets cached prefixes and fills the caches with random values."""
        assert not self.llm.has_unfinished_requests()
        assert self.probe is not None
        config = self.llm.vllm_config.kv_transfer_config
        if config is not None and config.kv_connector == "OffloadingConnector":
            self.run([Request("filler", (5,), 1)])  # stores are submitted a step later
        self.llm.reset_prefix_cache()
        self.probe.poison()

    def run(
        self,
        requests: Sequence[Request],
        observers: Sequence[Observer] = (),
        num_threads: int = 1,
    ) -> Result:
        """Plays the requests until all are finished or aborted."""
        assert not self.llm.has_unfinished_requests()
        result = Result()
        if self.probe is None:
            self.play(requests, result)
            return result
        self.probe.steps = result.steps
        self.probe.observers = [self, *observers]
        try:
            with threads(num_threads), self.connected():
                self.play(requests, result)
        finally:
            self.probe.observers = []
        return result

    def take_findings(self) -> list[Any]:
        """The audit's, since the last call."""
        last = self.audit.findings.last
        findings = list(last)
        last.clear()
        return findings

    def ask(
        self, name: str, text: Sequence[int], cached: int, lora: Any = None
    ) -> list[int]:
        """The answer to `text`, of which `cached` tokens are found."""
        result = self.run([Request(name, tuple(text), 12, lora=lora)])
        assert result.cached == {name: cached}
        return result.tokens[name]

    def ask_anew(self, text: Sequence[int], lora: Any = None) -> list[int]:
        """The right answer; leaves no cached prefix."""
        assert self.llm.reset_prefix_cache()
        answer = self.ask("anew", text, 0, lora)
        assert self.llm.reset_prefix_cache()
        return answer

    def committed(self, step: Step) -> None:
        """Aborts the requests of this step with `abort_during`."""
        running = self.runner.input_batch.req_ids
        if aborted := [r for r in running if request_name(r) in self.abort_now]:
            self.core.aborts_queue.put(aborted)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(100, 2000) for _ in range(length))


def like_off(
    mode: str,
    settings: dict[str, str] | None = None,
    *,
    num_groups: int = 1,
    can_stage: bool = True,
    **arguments: Any,
) -> Engine:
    """An engine whose scheduler has as many blocks as an off engine's. Mode stage adds
    the shadow blocks of `settings`, by default two for each sequence of DEFAULTS in
    each of `num_groups` KV-cache groups. can_stage: False if NWOR will reserve none."""
    settings = dict(settings or {})
    if mode == "stage":
        num_shadow = 2 * DEFAULTS["max_num_seqs"] * num_groups
        num_shadow = int(settings.setdefault("SHADOW_BLOCKS", str(num_shadow)))
        if can_stage:
            name = "num_gpu_blocks_override"
            arguments = arguments | {name: (DEFAULTS | arguments)[name] + num_shadow}
    return Engine(mode, settings, **arguments)


def shared(mode: str, **arguments: Any) -> Engine:
    """A cached `like_off`; at most MOST_SHARED, within a file."""
    key = repr((mode, sorted(arguments.items())))
    if key not in _shared:
        if len(_shared) == MOST_SHARED:
            forget_engines()
        _shared[key] = like_off(mode, **arguments)
    return _shared[key]


def counts(engine: Engine) -> dict[str, int]:
    """The device counters by name, summed over layer tables; {} for an off engine."""
    if engine.manager is None:
        return {}
    from vllm_nwor.ops import COUNTER_COLUMNS

    totals = engine.manager.counters.sum(0).tolist()
    return dict(zip(COUNTER_COLUMNS, totals, strict=True))


def bytes_of_slots(engine: Engine) -> dict[str, int]:
    """Bytes of a slot, for each target layer with a cache of its own in its group."""
    assert engine.probe is not None
    targets = engine.probe.target_layers()
    found = {}
    for group in engine.runner.kv_cache_config.kv_cache_groups:
        caches = {n: cache_of(targets[n]) for n in group.layer_names if n in targets}
        first = {cache.data_ptr(): name for name, cache in reversed(caches.items())}
        found |= {n: caches[n][0].nbytes // caches[n].shape[2] for n in first.values()}
    return found


def check_counts(engine: Engine, before: dict[str, int], result: Result) -> None:
    """NWOR protected every window of the run, and its counters are exact."""
    shadow = engine.manager.shadow
    staged = {} if shadow is None else shadow.groups
    num_seats = 0 if shadow is None else shadow.num_seats
    num_windows = sum(len(step.drafted) for step in result.steps)
    num_rejected = result.num_drafted - result.num_accepted
    slot_bytes = bytes_of_slots(engine)
    seats = [seat for step in result.steps for seat in step.rejected_seats]
    num_logged = sum(seat >= num_seats for seat in seats)
    group_of = engine.probe.group_of
    restored = sum(
        size * (num_logged if group_of[name] in staged else len(seats))
        for name, size in slot_bytes.items()
    )
    groups = len(engine.manager.groups)
    after = counts(engine)
    found = {name: after[name] - before[name] for name in after}
    copied = [found.pop(name) for name in ("shadow_copied_bytes", "committed_bytes")]
    num_staged = sum(
        seat < num_seats for step in result.steps for seat in step.seats.values()
    )
    assert num_staged > 0 or copied == [0, 0]
    # A window at the start of a block copies no prefix.
    assert num_staged < 20 or all(copied)
    assert found == {
        "windows": num_windows * groups,
        "staged": result.num_drafted * groups,
        "committed": result.num_accepted * groups,
        "rejected": num_rejected * groups,
        "shadow_windows": num_staged * len(staged),
        "restored_bytes": restored,
        "invalid_slots": 0,
    }
    assert not engine.manager.fallbacks


@functools.cache
def make_vllm_reusable() -> None:
    """Lets this process build several engines, without compiling for the first."""
    # vLLM 0.32 cannot repeat this registration for a second engine.
    if hasattr(CpuPlatform, "register_triton_kernel_overrides"):
        CpuPlatform.register_triton_kernel_overrides()
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    # Takes 18 s to compile; it only counts the ranks of logprobs.
    counter = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = counter._torchdynamo_orig_callable
