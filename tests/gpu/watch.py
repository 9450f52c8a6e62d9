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

Which slots were rejected is worked out from vLLM's own objects (RunnerProbe), and where
a slot's bytes lie from the strides of the tensor that vLLM bound; NWOR is not asked. On
vanilla vLLM the oracle must report "not restored".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.helpers.byte_map import allocation, slot_bytes
from tests.helpers.oracle import Memory, hash_rows
from tests.helpers.runner_probe import (
    Observer,
    RunnerProbe,
    Step,
    cache_layers,
    target_layers,
)

MAX_REPORTED = 20


def summary(step: Step) -> list[Any]:
    """[requests, tokens, drafts, accepted, graph mode, preempted requests]"""
    return [
        len(step.scheduled),
        sum(step.scheduled.values()),
        sum(step.drafted.values()),
        sum(step.accepted.values()),
        step.graph,
        len(step.preempted),
    ]


class Watch(Observer):
    """Watches one runner from `start` to `stop`."""

    def __init__(self, runner: Any) -> None:
        self.probe = RunnerProbe(runner)
        self.layers = target_layers(runner)
        if not self.layers:
            raise RuntimeError("no attention layer of the target model was found")
        self.memory = Memory(cache_layers(runner))
        self._before = self._after = self.memory.read()
        self.device = self._before.device
        # Shadow blocks lie behind those that requests can have.
        reserved = getattr(runner.kv_cache_config, "nwor_shadow", None)
        regions = reserved if isinstance(reserved, dict) else {}
        self.is_staged = bool(regions)
        self.num_real = {name: len(self.memory.index[name]) for name in self.layers}
        for name in self.layers:
            if region := regions.get(self.probe.group_of[name]):
                self.num_real[name] = region.num_real_blocks * region.block_size
        self.outside = ~self._mask(
            lambda name: torch.arange(
                self.num_real[name], len(self.memory.index[name]), device=self.device
            )
        )

    def _reset(self) -> None:
        self.probe.observers = [self]
        self.probe.steps = []
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
        """Poisons the caches and begins to watch. Only while nothing runs."""
        self.probe.poison(seed)
        self._reset()

    def stop(self) -> dict[str, Any]:
        """What was seen, as plain data."""
        self.probe.observers = []
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

    # -- moments -----------------------------------------------------------------------

    def forward_begins(self, step: Step) -> None:
        self._before = self.memory.read()

    def forward_ends(self, step: Step) -> None:
        self._after = self.memory.read()

    def _mask(self, slots: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """[bytes] bool: those of the slots that `slots` names of each layer."""
        return self.memory.mask({name: slots(name) for name in self.layers})

    def committed(self, step: Step) -> None:
        """Before the drafter computes its own slots into the runner's buffers."""
        number, real = len(self.steps), self.num_real
        verified = {name: step.slots[name] for name in self.layers}
        slots = {n: self.probe.live_slots[n][: len(s)] for n, s in verified.items()}
        fell = torch.tensor(step.rejected_rows, dtype=torch.int64, device=self.device)
        for name, of_forward in verified.items():
            early = slots[name][fell[of_forward[fell] < real[name]]].tolist()
            if self.is_staged and early:
                self._add(number, "not staged", name, early)
        mapped = self._mask(slots.__getitem__)
        rejected = self._mask(lambda name: slots[name][fell])
        staged = self._mask(lambda name: slots[name][verified[name] >= real[name]])
        commits = mapped if self.is_staged else rejected
        before, after, now = self._before, self._after, self.memory.read()
        for kind, mask in (
            ("not restored", (now != before) & rejected),
            ("stray write", (now != after) & ~commits & self.outside),
            ("unmapped write", (after != before) & ~mapped & self.outside),
            ("early write", (after != before) & staged),
        ):
            if bool(mask.any()):
                self._report(number, kind, mask)
        wrote = self._mask(lambda name: verified[name][fell]) & (before != after)
        for name in self.layers:
            self.totals["dirty_slots"] += len(self.memory.slots_in(name, wrote))
            self.totals["rejected_slots"] += len(step.rejected_rows)
        for text in step.contradictions:
            self._add(number, "contradiction", text, [-1])
        self._track(step, slots, fell)
        self.digests.append(self._digest(slots))
        self.steps.append(summary(step))
        self.totals["windows"] += len(step.drafted)
        self.totals["drafts"] += sum(step.drafted.values())
        self.totals["accepted"] += sum(step.accepted.values())

    def _report(self, number: int, kind: str, mask: torch.Tensor) -> None:
        for name in self.layers:
            if slots := self.memory.slots_in(name, mask).tolist():
                self._add(number, kind, name, slots)
            mask[self.memory.index[name]] = False
        if num_others := int(mask.sum()):  # a drafter's bytes, or padding
            self._add(number, kind, "", [-1] * num_others)

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

    def _track(
        self, step: Step, slots: dict[str, torch.Tensor], fell: torch.Tensor
    ) -> None:
        """Which slots hold what a rejected draft wrote last, were NWOR not there."""
        for name in self.layers:
            dirty = self.dirty[name].view(-1, self.memory.block_size(name))
            for block in step.zeroed_blocks:
                dirty[block] = False
            for source, to in step.copied_blocks:
                dirty[to] = dirty[source]
            mapped = slots[name]
            self.dirty[name][mapped[mapped >= 0]] = False
            self.written[name][mapped[mapped >= 0]] = True
            rejected = mapped[fell]
            self.dirty[name][rejected[rejected >= 0]] = True

    def _digest(self, slots: dict[str, torch.Tensor]) -> tuple[int, int, int]:
        places = strict = anywhere = 0
        found = self.memory.read()
        for number, name in enumerate(self.layers):
            weight = 2 * number + 1
            places += weight * int((slots[name] * odd_numbers(slots[name])).sum())
            hashes = hash_slots(found[self.memory.index[name][: self.num_real[name]]])
            hashes = hashes.masked_fill(self.dirty[name], 0)
            strict += weight * int((hashes * odd_numbers(hashes)).sum())
            hashes = hashes.masked_fill(~self.written[name], 0)
            anywhere += weight * int(hashes.sum())
        return places % 2**64, strict % 2**64, anywhere % 2**64


class Filler(Watch):
    """Instead of watching, fills before each forward all slots of the target's layers
    that no request has written, those of rejected drafts among them: `written` has the
    others. Of blocks that lost what they held it is told (`forget`, `unwritten_told`).
    NWOR is off."""

    def fill(self, contents: str, takes_one: bool) -> None:
        """Begins to. contents: "poison", as NWOR would leave it, or "nan". takes_one:
        each step's first slot is filled as well, although it is written."""
        self._reset()
        self.takes_one = takes_one
        # Groups may overlay each other's caches; a block is one group's at a time.
        by_cache: dict[int, torch.Tensor] = {}
        for name, layer in self.layers.items():
            cache = layer.kv_cache.data_ptr()
            self.written[name] = by_cache.setdefault(cache, self.written[name])
        self.patterns = {
            name: pattern_of(layer, contents) for name, layer in self.layers.items()
        }

    def forget(self, blocks: list[int]) -> None:
        """Nobody has written `blocks`."""
        groups = self.probe.runner.kv_cache_config.kv_cache_groups
        for name, written in self.written.items():
            size = groups[self.probe.group_of[name]].kv_cache_spec.block_size
            written.view(-1, size)[blocks] = False

    def forward_begins(self, step: Step) -> None:
        for name, layer in self.layers.items():
            free = slot_bytes(layer)[~self.written[name]]
            allocation(layer)[free] = self.patterns[name].repeat(free.shape[1] // 2)
            self.totals["filled"] += len(free)

    def forward_ends(self, step: Step) -> None: ...

    def committed(self, step: Step) -> None:
        for name in self.layers:
            slots, rejected = step.slots[name], step.rejected[name]
            self.written[name][slots[slots >= 0]] = True
            self.written[name][rejected[rejected >= 0]] = False
            if self.takes_one:
                self.written[name][slots[0]] = False
        self.steps.append(summary(step))
        self.totals["rejected_slots"] += len(step.rejected_rows) * len(self.layers)

    def stop(self) -> dict[str, Any]:
        """Slots that were filled, and those of rejected drafts, summed over layers and
        steps; steps by graph mode."""
        self.probe.observers = []
        return {
            "num_filled": self.totals["filled"],
            "num_rejected": self.totals["rejected_slots"],
            "graphs": dict(Counter(step[4] for step in self.steps)),
        }


@contextmanager
def unwritten_told(
    scheduler: Any, forget: Callable[[list[int]], Any]
) -> Iterator[None]:
    """Before a step runs, `forget` is told of the blocks that nobody has written any
    more: those given out for it, and those that are neither in use nor cached."""
    pool = scheduler.kv_cache_manager.block_pool
    schedule, get_new_blocks = scheduler.schedule, pool.get_new_blocks
    given: set[int] = set()

    def giving(*args: Any, **kwargs: Any) -> Any:
        blocks = get_new_blocks(*args, **kwargs)
        given.update(block.block_id for block in blocks)
        return blocks

    def telling(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        unwritten = given.union(
            block.block_id
            for block in pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None
        )
        forget(sorted(unwritten))
        given.clear()
        return output

    with (
        mock.patch.object(scheduler, "schedule", telling),
        mock.patch.object(pool, "get_new_blocks", giving),
    ):
        yield


def pattern_of(layer: Any, contents: str) -> torch.Tensor:
    """[2] uint8, device: what bytes are filled with. See `Filler.fill`."""
    from vllm_nwor.hooks.layers import _poison

    # As bf16, as fp8 and as the fp32 scales beside integers; these have no NaN.
    pattern = (0xFF, 0x7F)
    if contents == "poison":
        pattern = (_poison(layer.impl, layer.kv_cache),) * 2
    return torch.tensor(pattern, dtype=torch.uint8, device=layer.kv_cache.device)


def odd_numbers(like: torch.Tensor) -> torch.Tensor:
    """1, 3, 5, ... as long as `like`, [n] int64."""
    return torch.arange(len(like), device=like.device) * 2 + 1


def hash_slots(rows: torch.Tensor) -> torch.Tensor:
    """[n] int64: a hash of each of these slots' bytes, [n, bytes of a slot]."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    return hash_rows(padded.contiguous())
