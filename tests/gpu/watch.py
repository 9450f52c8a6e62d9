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

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.oracle import hash_rows

MAX_REPORTED = 20


@dataclass
class Step:
    """One step. drafted, accepted: of each request that had drafts.

    slots: for each layer, [num_tokens] int64, device, -1 for padding: as they are once
        the sampler has returned. verified: as the forward saw them.
    rejected: batch rows of rejected drafts.
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
    rejected: list[int] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)

    def record(
        self,
        names: Sequence[str],
        rows: list[int],
        num_drafts: Sequence[int],
        num_accepted: Sequence[int],
    ) -> None:
        """rows: those that get logits; of each request its target's, then its drafts'.
        The others: by request."""
        end = 0
        for name, drafts, accepted in zip(
            names, num_drafts, num_accepted, strict=False
        ):
            first, end = end + 1, end + 1 + drafts
            if drafts:
                self.drafted[name] = drafts
                self.accepted[name] = accepted
                self.rejected += rows[first + accepted : end]

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
        self.layers = target_layers(runner)
        if not self.layers:
            raise RuntimeError("no attention layer of the target model was found")
        self.storages = storages(runner)
        self.device = self.storages[0].device
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
        self.num_real = {name: slot_count(layer) for name, layer in self.layers.items()}
        for name in self.layers:
            if region := regions.get(self.group_of[name]):
                self.num_real[name] = region.num_real_blocks * region.block_size
        self.shadow = self._masks(
            lambda name: torch.arange(
                self.num_real[name], slot_count(self.layers[name]), device=self.device
            )
        )
        self._step: Step | None = None
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._reset(is_on=False)
        self._install()

    def _reset(self, is_on: bool) -> None:
        self.is_on = is_on
        self.steps: list[list[Any]] = []
        self.digests: list[tuple[int, int, int]] = []
        self.violations: list[dict[str, Any]] = []
        self.totals: Counter[str] = Counter()
        self.dirty, self.written = (
            {
                name: torch.zeros(size, dtype=torch.bool, device=self.device)
                for name, size in self.num_real.items()
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
        self._reset(is_on=True)

    def stop(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        self.is_on = False
        by_kind: Counter[str] = Counter()
        for violation in self.violations:
            by_kind[violation["kind"]] += violation["num_slots"]
        counted = ("rejected_slots", "dirty_slots", "windows", "drafts", "accepted")
        return {
            "steps": self.steps,
            "digests": self.digests,
            "violations": self.violations[:MAX_REPORTED],
            "violations_by_kind": dict(by_kind),
            **{f"num_{name}": self.totals[name] for name in counted},
            "layers": len(self.layers),
        }

    @property
    def step(self) -> Step:
        assert self._step is not None
        return self._step

    # -- moments -----------------------------------------------------------------------

    def _install(self) -> None:
        def begin(scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
            self._step = step_from(scheduler_output) if self.is_on else None

        self._wrap(self.runner, "execute_model", before=begin)
        if hasattr(self.runner, "prepare_attn"):
            self._install_v2()
        else:
            self._install_v1()

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] = lambda *args, **kwargs: None,
        after: Callable[..., None] = lambda result, *args, **kwargs: None,
    ) -> None:
        """Has `before` called with a method's arguments and `after` with its result and
        them, within a step that is watched; `execute_model` begins one."""
        original = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None or name == "execute_model":
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if self._step is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, observed)

    def _install_v1(self) -> None:
        from vllm.forward_context import get_forward_context

        runner = self.runner

        def forward_begins(*args: Any, **kwargs: Any) -> None:
            context: Any = get_forward_context()
            self.step.graph = context.cudagraph_runtime_mode.name
            self._note_verified(context.slot_mapping)
            self._before_forward()

        def forward_ended(output: Any, *args: Any, **kwargs: Any) -> None:
            self._after_forward()

        def sampled(output: Any, logits: Any, metadata: Any) -> None:
            """A request has one valid token more than it accepted drafts."""
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
                )
            tables = batch.block_table
            self._judge(
                {n: tables[g].slot_mapping.gpu for n, g in self.group_of.items()}
            )

        self._wrap(runner, "_model_forward", forward_begins, forward_ended)
        self._wrap(runner, "_sample", after=sampled)

    def _install_v2(self) -> None:
        runner = self.runner
        mappings: dict[str, torch.Tensor] = {}

        def attention_begins(*args: Any, **kwargs: Any) -> None:
            self._before_forward()

        def attention_prepared(result: Any, *args: Any, **kwargs: Any) -> None:
            mappings.update({n: result[1][g] for n, g in self.group_of.items()})
            self._note_verified(mappings)

        def forward_ended(*args: Any, **kwargs: Any) -> None:
            self._after_forward()

        def sampled(result: Any, hidden_states: Any, batch: Any, *args: Any) -> None:
            """A request's last rows fell, as many as vLLM says."""
            if batch.num_draft_tokens:
                bounds = batch.cu_num_logits  # the host's may be upper bounds
                drafts = (bounds[1:] - bounds[:-1] - 1).tolist()
                num_sampled, fallen = result[1].tolist(), result[2].tolist()
                accepted = [n - f for n, f in zip(drafts, fallen, strict=False)]
                rows = batch.logits_indices.tolist()
                self.step.record(batch.req_ids, rows, drafts, accepted)
                self.step.contradictions += [
                    f"{name}: {num} accepted, {one} sampled do not add up"
                    for name, one in zip(batch.req_ids, num_sampled, strict=False)
                    if (num := self.step.accepted.get(name, one - 1)) != one - 1
                ]
            self._judge(mappings)

        self._wrap(runner, "prepare_attn", attention_begins, attention_prepared)
        self._wrap(runner, "sample", forward_ended, sampled)
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is not None:
            for name, mode in (
                ("run_fullgraph", "FULL"),
                ("run_pw_graph", "PIECEWISE"),
            ):
                self._wrap(manager, name, functools.partial(self._note_graph, mode))

    def _note_graph(self, mode: str, *args: Any, **kwargs: Any) -> None:
        self.step.graph = mode

    def _note_verified(self, mappings: dict[str, torch.Tensor]) -> None:
        self.step.verified = {name: mappings[name].clone() for name in self.layers}

    # -- judging -----------------------------------------------------------------------

    def _before_forward(self) -> None:
        self._before = self._copy()

    def _after_forward(self) -> None:
        self._after = self._copy()

    def _copy(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages]

    def _masks(self, slots: Callable[[str], torch.Tensor]) -> list[torch.Tensor]:
        """For each storage [bytes] bool: those of the slots that `slots` names of each
        layer, [n] int64."""
        masks = [torch.zeros_like(s, dtype=torch.bool) for s in self.storages]
        for name, layer in self.layers.items():
            mark(masks[self.storage_of[name]], layer, slots(name))
        return masks

    def _judge(self, mappings: dict[str, torch.Tensor]) -> None:
        """Once the sampler has returned, and before the drafter computes its own slots
        into the same buffers: `mappings`."""
        step, number, real = self.step, len(self.steps), self.num_real
        assert len(self._before) == len(self._after) == len(self.storages)
        slots, verified = step.slots, step.verified
        fell = torch.tensor(step.rejected, dtype=torch.int64, device=self.device)
        for name, of_forward in verified.items():
            slots[name] = mappings[name][: len(of_forward)].clone()
            early = slots[name][fell[of_forward[fell] < real[name]]].tolist()
            if self.is_staged and early:
                self._add(number, "not staged", name, early)
        mapped = self._masks(slots.__getitem__)
        rejected = self._masks(lambda name: slots[name][fell])
        staged = self._masks(lambda name: slots[name][verified[name] >= real[name]])
        wrote = self._masks(lambda name: verified[name][fell])
        for index, now in enumerate(self.storages):
            before, after = self._before[index], self._after[index]
            commits = mapped[index] if self.is_staged else rejected[index]
            wrote[index] &= before != after
            outside = ~self.shadow[index]
            for kind, mask in (
                ("not restored", (now != before) & rejected[index]),
                ("stray write", (now != after) & ~commits & outside),
                ("unmapped write", (after != before) & ~mapped[index] & outside),
                ("early write", (after != before) & staged[index]),
            ):
                if bool(mask.any()):
                    self._report(number, kind, index, mask)
        for name, layer in self.layers.items():
            dirty = slots_with(wrote[self.storage_of[name]], layer)
            self.totals["dirty_slots"] += int(dirty.sum())
            self.totals["rejected_slots"] += len(step.rejected)
        for text in step.contradictions:
            self._add(number, "contradiction", text, [-1])
        self._track(step, fell)
        self.digests.append(self._digest(step))
        self.steps.append(step.summary())
        self.totals["windows"] += len(step.drafted)
        self.totals["drafts"] += sum(step.drafted.values())
        self.totals["accepted"] += sum(step.accepted.values())
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

    def _track(self, step: Step, fell: torch.Tensor) -> None:
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
            rejected = slots[fell]
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


class Filler(Watch):
    """Instead of watching, fills before each forward all slots of the target's layers
    that no request has written, those of rejected drafts among them: `written` has the
    others. Of blocks that lost what they held it is told (`forget`). NWOR is off."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        caches = cache_layers(runner).values()
        if len({layer.kv_cache.data_ptr() for layer in caches}) < len(caches):
            raise RuntimeError("layers share a cache: who has written it is not known")

    def fill(self, contents: str, takes_one: bool) -> None:
        """Begins to. contents: "poison", as NWOR would leave it, or "nan". takes_one:
        each step's first slot is filled as well, although it is written."""
        self._reset(is_on=True)
        self.takes_one = takes_one
        self.patterns = {
            name: pattern_of(layer, contents) for name, layer in self.layers.items()
        }

    def forget(self, blocks: list[int]) -> None:
        """Nobody has written `blocks`."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        for name, written in self.written.items():
            size = groups[self.group_of[name]].kv_cache_spec.block_size
            written.view(-1, size)[blocks] = False

    def _before_forward(self) -> None:
        for name, layer in self.layers.items():
            slots = layer_view(self.storages[self.storage_of[name]], layer)
            is_free = ~self.written[name].view(len(slots), 1, -1, 1)
            slots.copy_(torch.where(is_free, self.patterns[name], slots))
            self.totals["filled"] += int(is_free.sum())

    def _after_forward(self) -> None:
        pass

    def _judge(self, mappings: dict[str, torch.Tensor]) -> None:
        step = self.step
        fell = torch.tensor(step.rejected, dtype=torch.int64, device=self.device)
        for name, slots in step.verified.items():
            rejected = slots[fell]
            self.written[name][slots[slots >= 0]] = True
            self.written[name][rejected[rejected >= 0]] = False
            if self.takes_one:
                self.written[name][slots[0]] = False
        self.steps.append(step.summary())
        self.totals["rejected_slots"] += len(step.rejected) * len(self.layers)
        self._step = None

    def stop(self) -> dict[str, Any]:
        """Slots that were filled, and those of rejected drafts, summed over layers and
        steps; steps by graph mode."""
        self.is_on = False
        return {
            "num_filled": self.totals["filled"],
            "num_rejected": self.totals["rejected_slots"],
            "graphs": dict(Counter(step[4] for step in self.steps)),
        }


def pattern_of(layer: Any, contents: str) -> torch.Tensor:
    """[bytes of a head's slot] uint8, device. See `Filler.fill`."""
    from vllm_nwor.hooks.layers import _poison

    cache = layer.kv_cache
    # As bf16, as fp8 and as the fp32 scales beside integers; these have no NaN.
    pattern = (0xFF, 0x7F)
    if contents == "poison":
        pattern = (_poison(layer.impl, cache),) * 2
    num_pairs = cache.shape[-1] * cache.element_size() // 2
    return torch.tensor(pattern, dtype=torch.uint8, device=cache.device).repeat(
        num_pairs
    )


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


def mark(mask: torch.Tensor, layer: Any, slots: torch.Tensor) -> None:
    """Sets `mask`, [storage bytes] bool, at the bytes of `slots`, [n] int64, -1 for
    none."""
    slots, size = slots[slots >= 0], block_size_of(layer)
    layer_view(mask, layer)[slots // size, :, slots % size] = True


def slots_with(mask: torch.Tensor, layer: Any) -> torch.Tensor:
    """[num_slots] bool: the layer's slots with a True byte in `mask`."""
    return layer_view(mask, layer).any(-1).any(1).flatten()


def odd_numbers(like: torch.Tensor) -> torch.Tensor:
    """1, 3, 5, ... as long as `like`, [n] int64."""
    return torch.arange(len(like), device=like.device) * 2 + 1


def hash_slots(storage: torch.Tensor, layer: Any) -> torch.Tensor:
    """[num_slots] int64: a hash of each slot's bytes, heads in order."""
    by_slot = layer_view(storage, layer).permute(0, 2, 1, 3)
    rows = by_slot.reshape(slot_count(layer), -1)
    return hash_rows(
        torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).contiguous()
    )
