# SPDX-License-Identifier: Apache-2.0
"""Watches one model runner, in this process or in a worker, at five moments of a step.

Observation is by attributes set on the one runner (never on its class) and by hooks on
the model module, so its place relative to NWOR's wrappers is certain:

    forward_begins      outside NWOR's begin
      forward_starts    inside it: the model is called, the log has been taken
      forward_ends      the model has returned
    committed           `_sample` has returned, NWOR's commit included
    step_done           `sample_tokens` has returned, the drafter included

Which drafts a step had and which were rejected is worked out here on the host, from
vLLM's own metadata, and checked against what vLLM tells its scheduler.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
import wrapt
from vllm.forward_context import get_forward_context

from tests.helpers.byte_map import allocation, slot_bytes


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
    """Called at the moments that the module's docstring names."""

    def forward_begins(self, step: Step) -> None: ...

    def forward_starts(self, step: Step) -> None: ...

    def forward_ends(self, step: Step) -> None: ...

    def committed(self, step: Step) -> None: ...

    def step_done(self, step: Step) -> None: ...


class RunnerProbe:
    """The caches and the steps of one runner.

    observers: told of each step's moments. steps: those that ran to their end since
    the caller last emptied it.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.observers: list[Observer] = []
        self.steps: list[Step] = []
        self._step: Step | None = None
        self._observe()

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
        targets = self.target_layers()
        return {
            name: layer for name, layer in self.layers().items() if name not in targets
        }

    def poison(self) -> None:
        """Fills the caches with finite random values, so that the bytes of a slot
        that was never written are like no other's. Only while nothing runs. A slot's
        values do not depend on how many there are."""
        for seed, layer in enumerate(self.layers().values()):
            index = slot_bytes(layer)
            generator = torch.Generator().manual_seed(seed)
            # 0x00..0x3F in every byte: finite in bfloat16 and in both kinds of fp8.
            values = torch.randint(0, 0x40, index.shape, generator=generator)
            allocation(layer)[index] = values.to(torch.uint8)

    # -- steps ---------------------------------------------------------------------

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
            batch = runner.input_batch
            _record_acceptance(
                self._step,
                batch.req_ids,
                metadata,
                output.sampled_token_ids,
                batch.vocab_size,
            )
            self._tell("committed")
            return output

        def observed_sample_tokens(*args: Any, **kwargs: Any):
            output = sample_tokens(*args, **kwargs)
            step, self._step = self._step, None
            if step is not None and step.scheduled:
                _check_acceptance(step, output)
                self.steps.append(step)
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
        assert self._step is not None
        for observer in self.observers:
            getattr(observer, moment)(self._step)


def request_name(request_id: str) -> str:
    """The name a test gave: vLLM appends "-" and random characters to it."""
    return request_id.rpartition("-")[0] or request_id


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
    scheduled = scheduler_output.num_scheduled_tokens
    preempted = scheduler_output.preempted_req_ids or ()
    return Step(
        scheduled={request_name(key): count for key, count in scheduled.items()},
        preempted=tuple(sorted(map(request_name, preempted))),
        zeroed_blocks=tuple(scheduler_output.new_block_ids_to_zero or ()),
        copied_blocks=tuple((int(source), int(to)) for source, to in copies),
    )


def _record_acceptance(
    step: Step, request_ids: list[str], metadata: Any, sampled: torch.Tensor, vocab: int
) -> None:
    """Drafted, accepted and rejected slots of a step.

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
