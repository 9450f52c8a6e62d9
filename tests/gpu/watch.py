# SPDX-License-Identifier: Apache-2.0
"""The byte oracle for a model runner on a GPU, V1 or V2.

Three whole copies of every cache allocation a step, on the device:

    S0  before NWOR's log is taken, after vLLM's zeroing, block copies and loads
    S1  after the forward
    S2  after the sampler has returned, NWOR's commit included

and what must hold between them, in every target layer (guarantees 1 and 2), outside of
shadow blocks, which no request has:

    S2 == S0 at the slots of rejected drafts       else "not restored"
    S2 == S1 everywhere else                       else "stray write"
    S1 == S0 outside the slots of this step        else "unmapped write"

With shadow pages (mode stage) drafts are verified elsewhere, and commit writes the kept
rows: S2 == S1 has to hold outside the slots of this step only, and (guarantee 3)

    S1 == S0 at the slots of rows verified in a shadow block    else "early write"
    each rejected draft was verified in a shadow block          else "not staged"

Besides, for each step three 64-bit digests: where the step's slots lie; the bytes of
all slots except those whose last write was a rejected draft; and the same of the slots
written so far, wherever they lie. A run with NWOR off and one with it on must have the
same ones (the second only if requests got the same blocks).

Which slots were rejected is worked out from vLLM's own objects, and where a slot's
bytes lie from the strides of the tensor that vLLM bound; NWOR is not asked. Attributes
are set on one runner only, never on its class, so that their place relative to NWOR's
wrappers is certain. On vanilla vLLM the oracle must report "not restored".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

MAX_REPORTED = 20


@dataclass
class Step:
    """One step. drafted, accepted: of each request that had drafts.

    slots: for each layer, [num_tokens] int64, device, -1 for padding: as they are once
        the sampler has returned. verified: as the forward saw them.
    rejected: batch rows of rejected drafts, [n] int64, device.
    contradictions: where vLLM's own numbers do not agree.
    """

    scheduled: dict[str, int]
    preempted: tuple[str, ...]
    copied_blocks: tuple[tuple[int, int], ...]
    zeroed_blocks: tuple[int, ...]
    graph: str = "NONE"
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    slots: dict[str, torch.Tensor] = field(default_factory=dict)
    verified: dict[str, torch.Tensor] = field(default_factory=dict)
    rejected: torch.Tensor | None = None
    contradictions: list[str] = field(default_factory=list)

    def summary(self) -> list[Any]:
        """[requests, tokens, drafts, accepted, graph mode, preempted requests]"""
        return [
            len(self.scheduled),
            sum(self.scheduled.values()),
            sum(self.drafted.values()),
            sum(self.accepted.values()),
            self.graph,
            len(self.preempted),
        ]


class Watch:
    """Watches one runner from `start` to `stop`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.is_v2 = hasattr(runner, "prepare_attn")
        self.layers = target_layers(runner)
        if not self.layers:
            raise RuntimeError("no attention layer of the target model was found")
        self.storages = storages(runner)
        pointers = [storage.data_ptr() for storage in self.storages]
        self.storage_of = {
            name: pointers.index(layer.kv_cache.untyped_storage().data_ptr())
            for name, layer in self.layers.items()
        }
        self.group_of = {
            name: gid
            for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        # Shadow blocks lie behind those that requests can have.
        reserved = getattr(runner.kv_cache_config, "nwor_shadow", None)
        regions = reserved if isinstance(reserved, dict) else {}
        self.is_staged = bool(regions)
        self.num_real = {
            name: regions[self.group_of[name]].num_real_blocks
            * regions[self.group_of[name]].block_size
            if self.group_of[name] in regions
            else slot_count(layer)
            for name, layer in self.layers.items()
        }
        self.is_on = False
        self._step: Step | None = None
        self._graph = "NONE"
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._reset()
        self._install()

    def _reset(self) -> None:
        self.steps: list[list[Any]] = []
        self.digests: list[tuple[int, int, int]] = []
        self.violations: list[dict[str, Any]] = []
        self.num_rejected = self.num_dirty = 0
        self.num_windows = self.num_drafts = self.num_accepted = 0
        device = self.storages[0].device
        sizes = self.num_real
        self.dirty, self.written = (
            {
                name: torch.zeros(size, dtype=torch.bool, device=device)
                for name, size in sizes.items()
            }
            for _ in range(2)
        )

    def start(self, seed: int) -> None:
        """Fills the caches with finite random bytes, so that a slot never written is
        like no other, and begins to watch. Only while nothing runs."""
        for storage in self.storages:
            storage.fill_(seed)
        for number, layer in enumerate(cache_layers(self.runner).values()):
            # A block's bytes do not depend on how many blocks there are.
            blocks = layer.kv_cache.view(torch.uint8)
            place = torch.arange(blocks.numel(), device=blocks.device)
            mixed = (place + number * 7919 + seed) * 0x9E3779B1
            # 0x00..0x3F in every byte: finite as bf16, fp8 and float32 scales.
            blocks.copy_(((mixed >> 15) & 0x3F).view(blocks.shape))
        self._reset()
        self.is_on = True

    def stop(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        self.is_on = False
        return {
            "steps": self.steps,
            "digests": self.digests,
            "violations": self.violations[:MAX_REPORTED],
            "violations_by_kind": self._by_kind(),
            "num_rejected_slots": self.num_rejected,
            "num_dirty_slots": self.num_dirty,
            "num_windows": self.num_windows,
            "num_drafts": self.num_drafts,
            "num_accepted": self.num_accepted,
            "layers": len(self.layers),
        }

    def _by_kind(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for violation in self.violations:
            kind = violation["kind"]
            found[kind] = found.get(kind, 0) + violation["num_slots"]
        return found

    # -- moments -----------------------------------------------------------------------

    def _install(self) -> None:
        runner = self.runner
        execute_model = runner.execute_model

        def observed_execute_model(scheduler_output: Any, *args: Any, **kwargs: Any):
            self._step = step_from(scheduler_output) if self.is_on else None
            self._graph = "NONE"
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = observed_execute_model
        if self.is_v2:
            self._install_v2()
        else:
            self._install_v1()

    def _install_v1(self) -> None:
        from vllm.forward_context import get_forward_context

        runner = self.runner
        model_forward, sample = runner._model_forward, runner._sample

        def observed_model_forward(*args: Any, **kwargs: Any):
            step = self._step
            if step is None:
                return model_forward(*args, **kwargs)
            context: Any = get_forward_context()
            step.graph = context.cudagraph_runtime_mode.name
            step.verified = {
                name: context.slot_mapping[name].clone() for name in self.layers
            }
            self._before = self._copy()
            output = model_forward(*args, **kwargs)
            self._after = self._copy()
            return output

        def observed_sample(logits: Any, metadata: Any):
            output = sample(logits, metadata)
            if self._step is not None:
                tables = runner.input_batch.block_table
                self._note_slots(
                    {
                        name: tables[group].slot_mapping.gpu
                        for name, group in self.group_of.items()
                    }
                )
                record_v1(self._step, runner, metadata, output.sampled_token_ids)
                self._judge(self._step)
            return output

        runner._model_forward = observed_model_forward
        runner._sample = observed_sample

    def _install_v2(self) -> None:
        runner = self.runner
        prepare_attn, sample = runner.prepare_attn, runner.sample

        def observed_prepare_attn(input_batch: Any):
            if self._step is None:
                return prepare_attn(input_batch)
            self._before = self._copy()
            result = prepare_attn(input_batch)
            _, slot_mappings = result
            mappings = {
                name: slot_mappings[self.group_of[name]] for name in self.layers
            }
            self._mappings = mappings
            self._step.verified = {
                name: mapping.clone() for name, mapping in mappings.items()
            }
            return result

        def observed_sample(hidden_states: Any, input_batch: Any, grammar_output: Any):
            if self._step is None:
                return sample(hidden_states, input_batch, grammar_output)
            self._after = self._copy()
            result = sample(hidden_states, input_batch, grammar_output)
            self._step.graph = self._graph
            self._note_slots(self._mappings)
            record_v2(self._step, input_batch, *result[1:])
            self._judge(self._step)
            return result

        runner.prepare_attn = observed_prepare_attn
        runner.sample = observed_sample
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is not None:
            self._note_graph(manager, "run_fullgraph", "FULL")
            self._note_graph(manager, "run_pw_graph", "PIECEWISE")

    def _note_slots(self, mappings: dict[str, torch.Tensor]) -> None:
        """The step's slots, after the sampler and before the drafter computes its own
        into the same buffers."""
        step = self._step
        assert step is not None
        step.slots = {
            name: mappings[name][: len(verified)].clone()
            for name, verified in step.verified.items()
        }

    def _note_graph(self, manager: Any, method: str, mode: str) -> None:
        original = getattr(manager, method)

        def noted(*args: Any, **kwargs: Any):
            self._graph = mode
            return original(*args, **kwargs)

        setattr(manager, method, noted)

    # -- judging -----------------------------------------------------------------------

    def _copy(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages]

    def _judge(self, step: Step) -> None:
        assert len(self._before) == len(self._after) == len(self.storages)
        number = len(self.steps)
        rejected_masks = [torch.zeros_like(s, dtype=torch.bool) for s in self.storages]
        mapped_masks = [torch.zeros_like(s, dtype=torch.bool) for s in self.storages]
        staged_masks = [torch.zeros_like(s, dtype=torch.bool) for s in self.storages]
        real_masks = [torch.ones_like(s, dtype=torch.bool) for s in self.storages]
        for name, layer in self.layers.items():
            index = self.storage_of[name]
            slots = step.slots[name]
            mark(mapped_masks[index], layer, slots[slots >= 0])
            if self.is_staged:
                num_real = self.num_real[name]
                shadow = torch.arange(num_real, slot_count(layer), device=slots.device)
                mark(real_masks[index], layer, shadow, False)
                verified = step.verified[name]
                mark(staged_masks[index], layer, slots[verified >= num_real])
                if step.rejected is not None:
                    early = step.rejected[verified[step.rejected] < num_real]
                    if len(early):
                        self._add(number, "not staged", name, slots[early].tolist())
            if step.rejected is not None:
                rejected = slots[step.rejected]
                mark(rejected_masks[index], layer, rejected[rejected >= 0])
        trouble = []
        for index, now in enumerate(self.storages):
            before, after = self._before[index], self._after[index]
            rejected_mask, mapped_mask = rejected_masks[index], mapped_masks[index]
            real, staged = real_masks[index], staged_masks[index]
            commits = mapped_mask if self.is_staged else rejected_mask
            trouble.append(
                (
                    index,
                    ("not restored", (now != before) & rejected_mask),
                    ("stray write", (now != after) & ~commits & real),
                    ("unmapped write", (after != before) & ~mapped_mask & real),
                    ("early write", (after != before) & staged),
                )
            )
        if step.rejected is not None and len(step.rejected):
            for name, layer in self.layers.items():
                index = self.storage_of[name]
                changed = self._before[index] != self._after[index]
                wrote = torch.zeros_like(changed)
                mark(wrote, layer, step.verified[name][step.rejected])
                self.num_dirty += int(slots_with(changed & wrote, layer).sum())
                self.num_rejected += len(step.rejected)
        for index, *kinds in trouble:
            for kind, mask in kinds:
                if bool(mask.any()):
                    self._report(number, kind, index, mask)
        for text in step.contradictions:
            self._add(number, "contradiction", text, [-1])
        self._track(step)
        self.digests.append(self._digest(step))
        self.steps.append(step.summary())
        self.num_windows += len(step.drafted)
        self.num_drafts += sum(step.drafted.values())
        self.num_accepted += sum(step.accepted.values())
        self._step = None

    def _report(self, number: int, kind: str, index: int, mask: torch.Tensor) -> None:
        named = False
        for name, layer in self.layers.items():
            if self.storage_of[name] != index:
                continue
            slots = slots_with(mask, layer).nonzero().flatten().tolist()
            if slots:
                named = True
                self._add(number, kind, name, slots)
        if not named:  # bytes of no target layer: a drafter's, or padding
            self._add(number, kind, f"storage {index}", [-1] * int(mask.sum()))

    def _add(self, number: int, kind: str, layer: str, slots: list[int]) -> None:
        self.violations.append(
            {
                "step": number,
                "kind": kind,
                "layer": layer,
                "slots": slots[:8],
                "num_slots": len(slots),
            }
        )

    def _track(self, step: Step) -> None:
        """Which slots hold what a rejected draft wrote last, were NWOR not there."""
        for name, layer in self.layers.items():
            dirty = self.dirty[name].view(-1, block_size_of(layer))
            for block in step.zeroed_blocks:
                dirty[block] = False
            for source, to in step.copied_blocks:
                dirty[to] = dirty[source]
            slots = step.slots[name]
            self.dirty[name][slots[slots >= 0]] = False
            self.written[name][slots[slots >= 0]] = True
            if step.rejected is not None:
                rejected = slots[step.rejected]
                self.dirty[name][rejected[rejected >= 0]] = True

    def _digest(self, step: Step) -> tuple[int, int, int]:
        places = strict = anywhere = 0
        for number, (name, layer) in enumerate(self.layers.items()):
            weight = 2 * number + 1
            slots = step.slots[name]
            places += weight * int((slots * odd_numbers(slots)).sum())
            hashes = hash_slots(self.storages[self.storage_of[name]], layer)
            hashes = hashes[: self.num_real[name]]
            hashes = hashes.masked_fill(self.dirty[name], 0)
            strict += weight * int((hashes * odd_numbers(hashes)).sum())
            hashes = hashes.masked_fill(~self.written[name], 0)
            anywhere += weight * int(hashes.sum())
        return places % 2**64, strict % 2**64, anywhere % 2**64


# -- what vLLM says --------------------------------------------------------------------


def step_from(scheduler_output: Any) -> Step:
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    return Step(
        scheduled=dict(scheduler_output.num_scheduled_tokens),
        preempted=tuple(sorted(scheduler_output.preempted_req_ids or ())),
        copied_blocks=tuple((int(source), int(to)) for source, to in copies),
        zeroed_blocks=tuple(
            getattr(scheduler_output, "new_block_ids_to_zero", None) or ()
        ),
    )


def record_v1(step: Step, runner: Any, metadata: Any, sampled: torch.Tensor) -> None:
    """Request r's drafts are the rows after its first one among the rows that get
    logits; it has one valid token more than it accepted drafts.

    sampled: [num_requests, 1 + most drafts] int32, device, -1 where there is none.
    """
    if metadata is None:
        return
    rows = metadata.logits_indices.tolist()
    tokens = sampled.tolist()
    vocabulary = runner.input_batch.vocab_size
    rejected: list[int] = []
    start = 0
    for index, num_drafts in enumerate(metadata.num_draft_tokens):
        draft_rows = rows[start + 1 : start + 1 + num_drafts]
        start += 1 + num_drafts
        if not num_drafts:
            continue
        valid = [token for token in tokens[index] if 0 <= token < vocabulary]
        num_accepted = max(len(valid) - 1, 0)
        name = runner.input_batch.req_ids[index]
        step.drafted[name] = num_drafts
        step.accepted[name] = num_accepted
        rejected += draft_rows[num_accepted:]
    step.rejected = torch.tensor(rejected, dtype=torch.int64, device=sampled.device)


def record_v2(
    step: Step, batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor
) -> None:
    """The same on the V2 runner: a request's last `num_rejected` rows fell.

    num_sampled, num_rejected: [num_requests] int32, device.
    """
    if batch.num_draft_tokens == 0:
        return
    rows = batch.logits_indices.tolist()
    bounds = batch.cu_num_logits.tolist()  # the host's may be upper bounds
    sampled, fallen = num_sampled.tolist(), num_rejected.tolist()
    rejected: list[int] = []
    for index, name in enumerate(batch.req_ids):
        draft_rows = rows[bounds[index] + 1 : bounds[index + 1]]
        if not draft_rows:
            continue
        num_accepted = len(draft_rows) - fallen[index]
        if num_accepted != sampled[index] - 1:
            step.contradictions.append(
                f"{name}: {len(draft_rows)} drafts, {sampled[index]} sampled, "
                f"{fallen[index]} rejected do not add up"
            )
        step.drafted[name] = len(draft_rows)
        step.accepted[name] = num_accepted
        rejected += draft_rows[num_accepted:]
    step.rejected = torch.tensor(
        rejected, dtype=torch.int64, device=num_rejected.device
    )


# -- where bytes lie -------------------------------------------------------------------


def cache_layers(runner: Any) -> dict[str, Any]:
    """Every attention layer that owns a cache, target's and drafter's, by name."""
    context = runner.vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in context.items()
        if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)
        and layer.kv_cache.numel()
    }


def target_layers(runner: Any) -> dict[str, Any]:
    """Those that are modules of the target model."""
    modules = {id(module) for module in runner.get_model().modules()}
    return {
        name: layer
        for name, layer in cache_layers(runner).items()
        if id(layer) in modules
    }


def storages(runner: Any) -> list[torch.Tensor]:
    """The caches' whole allocations as [bytes] uint8, each once, in layer order."""
    found: dict[int, torch.Tensor] = {}
    for layer in cache_layers(runner).values():
        storage = layer.kv_cache.untyped_storage()
        if storage.data_ptr() not in found:
            whole = torch.empty(0, dtype=torch.uint8, device=layer.kv_cache.device)
            found[storage.data_ptr()] = whole.set_(storage)
    return list(found.values())


def block_size_of(layer: Any) -> int:
    return int(layer.kv_cache.shape[-2])


def slot_count(layer: Any) -> int:
    return int(layer.kv_cache.shape[0]) * block_size_of(layer)


def layer_view(buffer: torch.Tensor, layer: Any) -> torch.Tensor:
    """The layer's part of `buffer`, an element for each byte of its storage, as
    [num_blocks, num_heads, block_size, bytes of a head's slot]."""
    cache = layer.kv_cache
    item = cache.element_size()
    assert cache.dim() in (3, 4), cache.shape
    assert cache.stride(-1) == 1, cache.stride()
    shape = [*cache.shape[:-1], cache.shape[-1] * item]
    strides = [*(stride * item for stride in cache.stride()[:-1]), 1]
    view = buffer.as_strided(shape, strides, cache.storage_offset() * item)
    return view if cache.dim() == 4 else view.unsqueeze(1)


def mark(
    mask: torch.Tensor, layer: Any, slots: torch.Tensor, value: bool = True
) -> None:
    """Sets `mask`, [storage bytes] bool, at the bytes of `slots`, [n] int64."""
    size = block_size_of(layer)
    layer_view(mask, layer)[slots // size, :, slots % size] = value


def slots_with(mask: torch.Tensor, layer: Any) -> torch.Tensor:
    """[num_slots] bool: the layer's slots with a True byte in `mask`."""
    return layer_view(mask, layer).any(-1).any(1).flatten()


def odd_numbers(like: torch.Tensor) -> torch.Tensor:
    """1, 3, 5, ... as long as `like`, [n] int64."""
    return torch.arange(len(like), device=like.device) * 2 + 1


def hash_slots(storage: torch.Tensor, layer: Any) -> torch.Tensor:
    """[num_slots] int64: a hash of each slot's bytes, heads in order: odd random
    multipliers modulo 2^64, after each word's high half was mixed into its low one."""
    by_slot = layer_view(storage, layer).permute(0, 2, 1, 3)
    rows = by_slot.reshape(slot_count(layer), -1).contiguous()
    spare = -rows.shape[1] % 8
    if spare:
        rows = torch.nn.functional.pad(rows, (0, spare))
    words = rows.view(torch.int64)
    generator = torch.Generator().manual_seed(words.shape[-1])
    bounds = torch.iinfo(torch.int64)
    multipliers = torch.randint(
        bounds.min, bounds.max, (2, words.shape[-1]), generator=generator
    ).to(words.device)
    mixed = (words ^ ((words >> 32) & 0xFFFFFFFF)) * (multipliers[0] | 1)
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return (mixed * (multipliers[1] | 1)).sum(-1)
