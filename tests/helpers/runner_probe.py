# SPDX-License-Identifier: Apache-2.0
"""Watches one model runner, V1 or V2, at four moments of a step, in any process.

It sets attributes of the runner (never of its class) and a hook on the model, so that
its order relative to NWOR's wrappers is fixed:

                        V1                              V2
    forward_begins      before `_model_forward`         before `prepare_attn`
      forward_starts    the model is called, the log    (none: graphs replay it, as
                        has been taken                  on V1 where they do)
    forward_ends        after `_model_forward`          before `sample`
    committed           after `_sample`                 after `sample`

The drafts of a step, and which were rejected, are computed on the host from vLLM's own
metadata, and compared with what vLLM reports to its scheduler.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import ModelRunnerOutput

from tests.helpers.byte_map import allocation

# Larger than any seat.
NO_SEAT = 1 << 30


@dataclass
class Step:
    """One step of the runner, from vLLM's own objects.

    scheduled: tokens by request. drafted, accepted: by request with drafts. seats: of
    these requests, NO_SEAT without shadow blocks. preempted: requests. new_blocks:
    given to requests, over all groups. slots: [num_tokens] int64 by layer, as the
    forward saw them, -1 for padding. rejected_rows: batch rows of rejected drafts;
    rejected_seats: their requests' seats. graph: CUDA graph mode. contradictions: V2's
    own numbers that do not agree.
    """

    scheduled: dict[str, int]
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    seats: dict[str, int] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    new_blocks: tuple[int, ...] = ()
    zeroed_blocks: tuple[int, ...] = ()
    copied_blocks: tuple[tuple[int, int], ...] = ()
    slots: dict[str, torch.Tensor] = field(default_factory=dict)
    rejected_rows: list[int] = field(default_factory=list)
    rejected_seats: list[int] = field(default_factory=list)
    graph: str = "NONE"
    contradictions: list[str] = field(default_factory=list)

    @cached_property
    def rejected(self) -> dict[str, torch.Tensor]:
        """Slots of the rejected drafts for each layer, int64; after sampling."""
        return {name: slots[self.rejected_rows] for name, slots in self.slots.items()}

    def record(
        self,
        request_ids: Sequence[str],
        rows: list[int],
        num_drafts: Sequence[int],
        num_accepted: Sequence[int],
        seats: Sequence[int],
    ) -> None:
        """rows: batch rows with logits, each request's target and then its drafts.
        Other arguments: by request."""
        end = 0
        for request_id, drafts, accepted, seat in zip(
            request_ids, num_drafts, num_accepted, seats, strict=False
        ):
            first, end = end + 1, end + 1 + drafts
            if drafts:
                name = request_name(request_id)
                self.drafted[name] = drafts
                self.accepted[name] = accepted
                self.seats[name] = seat
                self.rejected_rows += rows[first + accepted : end]
                self.rejected_seats += [seat] * (drafts - accepted)


class Observer:
    """Its methods are called at the moments in the module's docstring."""

    def forward_begins(self, step: Step) -> None: ...

    def forward_starts(self, step: Step) -> None: ...

    def forward_ends(self, step: Step) -> None: ...

    def committed(self, step: Step) -> None: ...


def cache_layers(runner: Any) -> dict[str, Any]:
    """Every attention layer with a cache, of target and drafter, by name."""
    context = runner.vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in context.items()
        if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)
        and layer.kv_cache.numel()
    }


def target_layers(runner: Any) -> dict[str, Any]:
    """The cache layers that are modules of the target model."""
    modules = {id(module) for module in runner.get_model().modules()}
    layers = cache_layers(runner).items()
    return {name: layer for name, layer in layers if id(layer) in modules}


def observer_of(runner: Any, name: str) -> Any:
    """NWOR's observer of that name, "transaction" or "audit", or None."""
    state = getattr(runner, "nwor_state", None)
    return None if state is None else state.named(name)


def manager_of(runner: Any) -> Any:
    """NWOR's manager; None if nothing is protected."""
    return getattr(observer_of(runner, "transaction"), "manager", None)


def block_tables(runner: Any) -> list[torch.Tensor]:
    """The block table that attention reads, for each KV-cache group."""
    if hasattr(runner, "block_tables"):  # V2
        return list(runner.block_tables.input_block_tables)
    tables = runner.input_batch.block_table.block_tables
    return [table.block_table.gpu for table in tables]


class RunnerProbe:
    """The caches and the steps of one runner.

    observers: without any, no step is watched. steps: finished ones, until the caller
    clears the list. live_slots: the runner's own slots for each layer, after sampling.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.observers: list[Observer] = []
        self.steps: list[Step] = []
        self.live_slots: dict[str, torch.Tensor] = {}
        self.group_of = {
            name: number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        self._step: Step | None = None
        self._wrap(runner, "execute_model", before=self._begin)
        if hasattr(runner, "prepare_attn"):
            self._observe_v2()
        else:
            self._observe_v1()

    # -- caches --------------------------------------------------------------------

    def layers(self) -> dict[str, Any]:
        return cache_layers(self.runner)

    def target_layers(self) -> dict[str, Any]:
        return target_layers(self.runner)

    def poison(self, seed: int = 0) -> None:
        """Fills the caches with finite random values, different for each slot, and
        resets the KV audit; while no request runs. A block's bytes do not depend on the
        number of blocks."""
        if (audit := observer_of(self.runner, "audit")) is not None:
            audit.audit.forget_cache()
        for layer in self.layers().values():
            allocation(layer).fill_(seed)
        for number, layer in enumerate(self.layers().values()):
            blocks = layer.kv_cache.view(torch.uint8)
            place = torch.arange(blocks.numel(), device=blocks.device)
            mixed = (place + number * 7919 + seed) * 0x9E3779B1
            # 0x00..0x3F in every byte: finite as bf16, fp8 and float32 scales.
            blocks.copy_(((mixed >> 15) & 0x3F).view(blocks.shape))

    # -- steps ---------------------------------------------------------------------

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] = lambda *args, **kwargs: None,
        after: Callable[..., None] = lambda result, *args, **kwargs: None,
    ) -> None:
        """Calls `before` with a method's arguments and `after` with its result and
        them, in a watched step; `execute_model` begins one."""
        original = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None or name == "execute_model":
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if self._step is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, observed)

    def _notify(self, moment: str, *_: Any, **__: Any) -> None:
        if self._step is not None:
            for observer in self.observers:
                getattr(observer, moment)(self._step)

    def _begin(self, scheduler_output: Any, *_: Any, **__: Any) -> None:
        self._step = _step_from(scheduler_output) if self.observers else None

    @property
    def step(self) -> Step:
        assert self._step is not None
        return self._step

    def _note_slots(self, mapping: dict[str, torch.Tensor]) -> None:
        self.step.slots = {
            name: mapping[name].clone() for name in self.layers() if name in mapping
        }

    def v1_forward_begins(self, *_: Any, **__: Any) -> None:
        context: Any = get_forward_context()
        self.step.graph = context.cudagraph_runtime_mode.name
        self._note_slots(context.slot_mapping)
        self._notify("forward_begins")

    def _observe_v1(self) -> None:
        runner = self.runner

        def sampled(output: Any, logits: Any, metadata: Any) -> None:
            """A request has one valid token more than accepted drafts."""
            batch = runner.input_batch
            if metadata is not None:
                num_valid = [
                    sum(0 <= token < batch.vocab_size for token in tokens)
                    for tokens in output.sampled_token_ids.tolist()
                ]
                self.step.record(
                    batch.req_ids,
                    metadata.logits_indices.tolist(),
                    metadata.num_draft_tokens,
                    [max(num - 1, 0) for num in num_valid],
                    range(len(num_valid)),
                )
            self.live_slots = {
                name: batch.block_table[group].slot_mapping.gpu
                for name, group in self.group_of.items()
            }
            self._notify("committed")

        def done(output: Any, *args: Any, **kwargs: Any) -> None:
            step, self._step = self.step, None
            if step.scheduled:
                _check_acceptance(step, output)
                self.steps.append(step)

        forward_ends = functools.partial(self._notify, "forward_ends")
        self._wrap(runner, "_model_forward", self.v1_forward_begins, forward_ends)
        self._wrap(runner, "_sample", after=sampled)
        self._wrap(runner, "sample_tokens", after=done)
        if runner.device.type == "cpu":
            forward_starts = functools.partial(self._notify, "forward_starts")
            runner.get_model().register_forward_pre_hook(forward_starts)

    def _seats_of_v2(self, indices: list[int]) -> list[int]:
        """The seats of requests by state index. A request may lack one only if others
        have all of them."""
        shadow = getattr(manager_of(self.runner), "shadow", None)
        if shadow is None or shadow.seats is None:
            return indices
        of_state, live = shadow.seats.of_state, self.runner.req_states.req_id_to_index
        has = [seat for seat in of_state[list(live.values())].tolist() if seat >= 0]
        found = of_state[indices].tolist()
        if len(has) != len(set(has)) or (
            min(found) < 0 and len(has) < shadow.num_seats
        ):
            text = f"of {shadow.num_seats} seats these requests have {has}"
            self.step.contradictions.append(f"{text}, those of the step {found}")
        return [seat if seat >= 0 else NO_SEAT for seat in found]

    def _observe_v2(self) -> None:
        runner = self.runner

        def prepared(result: Any, *args: Any, **kwargs: Any) -> None:
            self.live_slots = {n: result[1][g] for n, g in self.group_of.items()}
            self._note_slots(self.live_slots)

        def sampled(result: Any, hidden_states: Any, batch: Any, *args: Any) -> None:
            """vLLM gives the number of rejected rows, the last of each request."""
            step = self.step
            if batch.num_draft_tokens:
                bounds = batch.cu_num_logits  # the host's copy may have upper bounds
                drafts = (bounds[1:] - bounds[:-1] - 1).tolist()
                num_sampled, fallen = result[1].tolist(), result[2].tolist()
                accepted = [n - f for n, f in zip(drafts, fallen, strict=False)]
                seats = self._seats_of_v2(batch.idx_mapping.tolist())
                step.record(
                    batch.req_ids,
                    batch.logits_indices.tolist(),
                    drafts,
                    accepted,
                    seats,
                )
                step.contradictions += [
                    f"{name}: {num} accepted, {one} sampled do not add up"
                    for name, one in zip(batch.req_ids, num_sampled, strict=False)
                    if (num := step.accepted.get(request_name(name), one - 1))
                    != one - 1
                ]
            self._notify("committed")
            self._step = None

        def note_graph(mode: str, *args: Any, **kwargs: Any) -> None:
            self.step.graph = mode

        forward_begins = functools.partial(self._notify, "forward_begins")
        forward_ends = functools.partial(self._notify, "forward_ends")
        self._wrap(runner, "prepare_attn", forward_begins, prepared)
        self._wrap(runner, "sample", forward_ends, sampled)
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is not None:
            for name, mode in (
                ("run_fullgraph", "FULL"),
                ("run_pw_graph", "PIECEWISE"),
            ):
                self._wrap(manager, name, functools.partial(note_graph, mode))


def request_name(request_id: str) -> str:
    """The test's name of a request, without vLLM's random suffix."""
    return request_id.rpartition("-")[0] or request_id


def unwrap_instance(target: Any) -> None:
    """Binds vLLM's own functions on `target` in place of its class's hooked ones."""
    for owner in type(target).__mro__:
        for name, attribute in vars(owner).items():
            if name not in vars(target) and _is_hook(attribute):
                method = types.MethodType(attribute.__wrapped__, target)
                setattr(target, name, method)


def _is_hook(attribute: Any) -> bool:
    """Works for any copy of the package, without importing it."""
    code = getattr(attribute, "__code__", None)
    return code is not None and code.co_filename.endswith("nwor/base/wrap.py")


def _step_from(scheduler_output: Any) -> Step:
    def named(what: str) -> Any:
        return getattr(scheduler_output, what, None) or ()

    scheduled = scheduler_output.num_scheduled_tokens
    given = [request.block_ids for request in named("scheduled_new_reqs")]
    given += getattr(named("scheduled_cached_reqs"), "new_block_ids", ())
    return Step(
        scheduled={request_name(key): count for key, count in scheduled.items()},
        preempted=tuple(sorted(map(request_name, named("preempted_req_ids")))),
        new_blocks=tuple(
            block for groups in given for ids in groups or () for block in ids
        ),
        zeroed_blocks=tuple(named("new_block_ids_to_zero")),
        copied_blocks=tuple(
            (int(source), int(to)) for source, to in named("kv_cache_block_copies")
        ),
    )


def _check_acceptance(step: Step, output: Any) -> None:
    """The computed acceptance is what vLLM reports to its scheduler, if the host knows
    it by now."""
    if not isinstance(output, ModelRunnerOutput):
        return
    for request_id, tokens in zip(
        output.req_ids, output.sampled_token_ids, strict=True
    ):
        name = request_name(request_id)
        if name in step.accepted:
            assert step.accepted[name] == len(tokens) - 1, (name, step, tokens)
