# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process, driven step by step and observed at five moments.

`Engine(mode)` builds a real LLMEngine with NWOR in that mode. With mode "off" every
function that NWOR has wrapped is put back, unwrapped, on the objects this engine uses:
an off engine runs vLLM's own code whatever else this process has loaded.

`Engine.run` plays requests at given steps, so that an off and a cow engine compose the
same batches, and returns tokens, logprobs and what each step did.

Observation is by attributes set on the one runner (never on its class) and by hooks on
the model module, so its place relative to NWOR's wrappers is certain:

    forward_begins      outside NWOR's begin
      forward_starts    inside it: the model is called, the log has been taken
      forward_ends      the model has returned
    committed           `_sample` has returned, NWOR's commit included
    step_done           `sample_tokens` has returned, the drafter included
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm.v1.sample.sampler as sampler
import wrapt
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine

from tests.helpers.environment import model_path, nwor_settings
from vllm import SamplingParams

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
MAX_STEPS = 2000


@dataclass(frozen=True)
class Request:
    """One greedy request.

    at: number of the step before which it arrives. abort_at: of the step before which
    it is aborted, if it still runs then. params: further SamplingParams arguments.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    at: int = 0
    abort_at: int | None = None
    params: dict[str, Any] = field(default_factory=dict)

    def sampling_params(self) -> SamplingParams:
        arguments = {"ignore_eos": True, "logprobs": 2} | self.params
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, **arguments)


@dataclass
class Step:
    """What one step of the runner did, from vLLM's own objects.

    scheduled: tokens of each request. drafted, accepted: of each request that had
    drafts; accepted comes from the lists of tokens that vLLM hands to its scheduler.
    preempted: requests. slots: [num_tokens] int64 for each layer, cloned before the
    forward. rejected: slots of the rejected drafts for each layer, int64.
    """

    scheduled: dict[str, int]
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    zeroed_blocks: tuple[int, ...] = ()
    copied_blocks: tuple[tuple[int, int], ...] = ()
    slots: dict[str, torch.Tensor] = field(default_factory=dict)
    rejected: dict[str, torch.Tensor] = field(default_factory=dict)


class Observer:
    """Called by an Engine at the moments that the module's docstring names."""

    def forward_begins(self, step: Step) -> None: ...

    def forward_starts(self, step: Step) -> None: ...

    def forward_ends(self, step: Step) -> None: ...

    def committed(self, step: Step) -> None: ...

    def step_done(self, step: Step) -> None: ...


@dataclass
class Result:
    """Outputs of a run, by request, and its steps.

    logprobs: for each token the {token: (logprob, rank)} that vLLM returned.
    cached: prompt tokens found in the prefix cache.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[dict[int, tuple[float, int | None]]]] = field(
        default_factory=dict
    )
    finish: dict[str, str | None] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
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
        """How batches were composed; equal for runs that did the same work."""
        return [(step.scheduled, step.drafted, step.accepted) for step in self.steps]


_all_engines: list[Engine] = []  # kept: an LLMEngine that dies takes caches with it


class Engine:
    """A real engine with NWOR in `mode`; `settings` are further VLLM_NWOR_* values.

    arguments: EngineArgs that replace DEFAULTS; `model` is a name of
    tools/make_models.py.
    """

    def __init__(
        self,
        mode: str = "off",
        settings: dict[str, str] | None = None,
        model: str = "tiny-llama",
        **arguments: Any,
    ) -> None:
        self.mode = mode
        if mode != "off":
            with nwor_settings({"MODE": mode} | (settings or {})):
                self.llm = self._build(model, arguments, register=True)
        else:
            with nwor_settings(settings or {}):
                self.llm = self._build(model, arguments, register=False)
        self.core = self.llm.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.observers: list[Observer] = []
        self._step: Step | None = None
        self._steps: list[Step] = []
        if mode == "off":
            for target in (self.runner, self.core.scheduler):
                unwrap_instance(target)
        self._observe()
        _all_engines.append(self)

    @staticmethod
    def _build(model: str, arguments: dict[str, Any], register: bool) -> LLMEngine:
        if register:
            from vllm.v1.nwor.plugin import register as nwor_register

            nwor_register()
        options = DEFAULTS | {"model": model_path(model)} | arguments
        _make_vllm_reusable()
        return LLMEngine.from_engine_args(EngineArgs(**options))

    # -- what NWOR reports ---------------------------------------------------------

    @property
    def manager(self) -> Any:
        """NWOR's manager on this runner, or None if nothing is protected."""
        state = self.runner.__dict__.get("nwor_state")
        return None if state is None else state.manager

    # -- caches --------------------------------------------------------------------

    def layers(self) -> dict[str, Any]:
        """Every attention layer that owns a cache, target's and drafter's, by name."""
        context = self.runner.vllm_config.compilation_config.static_forward_context
        return {
            name: layer
            for name, layer in context.items()
            if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)
        }

    def target_layers(self) -> dict[str, Any]:
        """Those that are modules of the target model."""
        modules = {id(module) for module in self.runner.get_model().modules()}
        return {
            name: layer for name, layer in self.layers().items() if id(layer) in modules
        }

    def drafter_layers(self) -> dict[str, Any]:
        return {
            name: layer
            for name, layer in self.layers().items()
            if name not in self.target_layers()
        }

    def storages(self) -> list[torch.Tensor]:
        """The caches' whole allocations as [bytes] uint8, each once."""
        found: dict[int, torch.Tensor] = {}
        for layer in self.layers().values():
            storage = layer.kv_cache.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return list(found.values())

    def poison_caches(self, seed: int = 0) -> None:
        """Fills the caches with finite random values, so that the bytes of a slot
        that was never written are like no other's. Only while nothing runs."""
        assert not self.llm.has_unfinished_requests()
        self.llm.reset_prefix_cache()
        generator = torch.Generator().manual_seed(seed)
        for storage in self.storages():
            # 0x00..0x3F in every byte: finite in bfloat16 and in both kinds of fp8.
            storage.random_(0, 0x40, generator=generator)

    # -- running -------------------------------------------------------------------

    def run(
        self, requests: Sequence[Request], observers: Sequence[Observer] = ()
    ) -> Result:
        """Plays the requests until all are finished or aborted."""
        assert not self.llm.has_unfinished_requests()
        self._steps = []
        self.observers = list(observers)
        result = Result()
        waiting = sorted(requests, key=lambda request: request.at)
        aborts = [request for request in requests if request.abort_at is not None]
        number = 0
        try:
            while waiting or self.llm.has_unfinished_requests():
                while waiting and waiting[0].at <= number:
                    self._add(waiting.pop(0))
                due = [request.name for request in aborts if request.abort_at == number]
                if due:
                    self.llm.abort_request(due)
                for output in self.llm.step():
                    _record(result, output)
                number += 1
                assert number < MAX_STEPS, "the engine does not finish its requests"
        finally:
            self.observers = []
        result.steps = self._steps
        return result

    def _add(self, request: Request) -> None:
        prompt = {"prompt_token_ids": list(request.prompt)}
        self.llm.add_request(request.name, prompt, request.sampling_params())

    # -- observing -----------------------------------------------------------------

    def _observe(self) -> None:
        runner = self.runner
        execute_model = runner.execute_model
        model_forward = runner._model_forward
        sample = runner._sample
        sample_tokens = runner.sample_tokens

        def observed_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any):
            self._step = _step_from(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        def observed_model_forward(*args: Any, **kwargs: Any):
            assert self._step is not None
            self._tell("forward_begins")
            return model_forward(*args, **kwargs)

        def before_model(module: Any, args: Any) -> None:
            if self._step is None:
                return  # a dummy run
            mapping = get_forward_context().slot_mapping
            assert isinstance(mapping, dict)
            self._step.slots = {
                name: mapping[name].clone() for name in self.layers() if name in mapping
            }
            self._tell("forward_starts")

        def after_model(module: Any, args: Any, output: Any) -> None:
            if self._step is not None:
                self._tell("forward_ends")

        def observed_sample(logits: Any, metadata: Any):
            output = sample(logits, metadata)
            assert self._step is not None
            _record_acceptance(
                self._step,
                runner.input_batch.req_ids,
                metadata,
                output.sampled_token_ids,
                runner.input_batch.vocab_size,
            )
            self._tell("committed")
            return output

        def observed_sample_tokens(*args: Any, **kwargs: Any):
            output = sample_tokens(*args, **kwargs)
            step, self._step = self._step, None
            if step is not None and step.scheduled:
                _check_acceptance(step, output)
                self._steps.append(step)
                for observer in self.observers:
                    observer.step_done(step)
            return output

        runner.execute_model = observed_execute_model
        runner._model_forward = observed_model_forward
        runner._sample = observed_sample
        runner.sample_tokens = observed_sample_tokens
        runner.get_model().register_forward_pre_hook(before_model)
        runner.get_model().register_forward_hook(after_model)

    def _tell(self, moment: str) -> None:
        for observer in self.observers:
            getattr(observer, moment)(self._step)


@functools.cache
def _make_vllm_reusable() -> None:
    """Lets this process build several engines, and the first one quickly."""
    # A process-wide registration that vLLM 0.32 cannot repeat for a second engine: it
    # fails on modules that were imported in between.
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    # Takes 18 s to compile; it only counts ranks, for off and cow alike.
    counter = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = counter._torchdynamo_orig_callable


def unwrap_instance(target: Any) -> None:
    """Binds vLLM's own functions on `target` wherever its class has a wrapped one."""
    for owner in type(target).__mro__:
        for name, attribute in vars(owner).items():
            if name in vars(target) or not isinstance(attribute, wrapt.FunctionWrapper):
                continue
            function: Any = attribute
            while isinstance(function, wrapt.FunctionWrapper):
                function = function.__wrapped__
            setattr(target, name, types.MethodType(function, target))


def _step_from(scheduler_output: Any) -> Step:
    copies = scheduler_output.kv_cache_block_copies or ()
    return Step(
        scheduled={
            request_name(k): n for k, n in scheduler_output.num_scheduled_tokens.items()
        },
        preempted=tuple(
            map(request_name, sorted(scheduler_output.preempted_req_ids or ()))
        ),
        zeroed_blocks=tuple(scheduler_output.new_block_ids_to_zero or ()),
        copied_blocks=tuple((int(source), int(to)) for source, to in copies),
    )


def request_name(request_id: str) -> str:
    """The name a test gave: vLLM appends "-" and random characters to it."""
    return request_id.rpartition("-")[0] or request_id


def _record_acceptance(
    step: Step, request_ids: list[str], metadata: Any, sampled: torch.Tensor, vocab: int
) -> None:
    """Drafted, accepted and rejected slots of a step, worked out on the host.

    Request r's drafts are the rows after its first one among the rows that get logits;
    the sampler returns for it one valid token more than it accepted drafts.
    sampled: [num_requests, 1 + most drafts] int32, -1 where there is none.
    """
    if metadata is None:
        return
    rows = metadata.logits_indices.tolist()
    rejected_rows: list[int] = []
    start = 0
    for index, num_drafts in enumerate(metadata.num_draft_tokens):
        valid = [token for token in sampled[index].tolist() if 0 <= token < vocab]
        draft_rows = rows[start + 1 : start + 1 + num_drafts]
        start += 1 + num_drafts
        if num_drafts:
            num_accepted = max(len(valid) - 1, 0)
            name = request_name(request_ids[index])
            step.drafted[name] = num_drafts
            step.accepted[name] = num_accepted
            rejected_rows += draft_rows[num_accepted:]
    step.rejected = {name: slots[rejected_rows] for name, slots in step.slots.items()}


def _check_acceptance(step: Step, output: Any) -> None:
    """The acceptance counted above is what vLLM itself tells its scheduler."""
    for request_id, tokens in zip(
        output.req_ids, output.sampled_token_ids, strict=True
    ):
        name = request_name(request_id)
        if name in step.accepted:
            assert step.accepted[name] == len(tokens) - 1, (name, step, tokens)


def _record(result: Result, output: Any) -> None:
    completion = output.outputs[0]
    name = output.request_id
    result.tokens[name] = list(completion.token_ids)
    result.text[name] = completion.text
    result.finish[name] = completion.finish_reason
    result.cached[name] = output.num_cached_tokens or 0
    result.logprobs[name] = [
        {token: (entry.logprob, entry.rank) for token, entry in position.items()}
        for position in completion.logprobs or ()
    ]
