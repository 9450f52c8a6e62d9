# SPDX-License-Identifier: Apache-2.0
"""The byte oracle for guarantees 1 to 3.

SnapshotOracle watches one engine, on any device and of either runner: three whole
copies of every cache allocation a step,

    S0  before NWOR's log is taken, after vLLM's zeroing, block copies and loads
    S1  after the forward
    S2  after the sampler has returned, NWOR's commit included

and what must hold between them, outside of shadow blocks, which no request has:

    S2 == S0 at the slots of rejected drafts       else "not restored"; "torn" if it is
                                                   not S1 either
    S2 == S1 everywhere else                       else "stray write"
    S1 == S0 outside the slots of this step        else "unmapped write"

With shadow blocks (mode stage) drafts are verified elsewhere, and commit writes the
kept rows: S2 == S1 has to hold outside the slots of this step only, and

    S1 == S0 at the slots of rows verified in a shadow block    else "early write"
    each rejected draft was verified in a shadow block          else "not staged"

It works all that out from vLLM's own objects and asks NWOR for nothing but how many
blocks it has reserved: on vanilla vLLM it must report "not restored". What else a cache
holds is compared with a run without NWOR, by digests (tests/gpu/watch.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tests.helpers.byte_map import allocation, cache_of, slot_bytes
from tests.helpers.runner_probe import Observer, RunnerProbe, Step


class Memory:
    """The caches of layers, as one vector of bytes.

    index: for each layer [num_slots, bytes of a slot] int64, places in the vector.
    first: for each layer the first one that has the very same cache.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = layers
        parts = {name: allocation(layer) for name, layer in self.layers.items()}
        self._parts = {part.data_ptr(): part for part in parts.values()}
        lengths = [len(part) for part in self._parts.values()]
        starts = dict(zip(self._parts, accumulate([0, *lengths]), strict=False))
        self.index = {
            name: slot_bytes(layer) + starts[parts[name].data_ptr()]
            for name, layer in self.layers.items()
        }
        seen: dict[Any, str] = {}
        self.first = {
            name: seen.setdefault((cache.data_ptr(), cache.stride()), name)
            for name, cache in ((n, layer.kv_cache) for n, layer in layers.items())
        }
        self._no_bytes = torch.zeros_like(self.read(), dtype=torch.bool)

    def read(self) -> torch.Tensor:
        """A copy of all bytes, [bytes] uint8."""
        return torch.cat(list(self._parts.values()))

    def block_size(self, name: str) -> int:
        return int(cache_of(self.layers[name]).shape[2])

    def mask(self, slots: dict[str, torch.Tensor]) -> torch.Tensor:
        """[bytes] bool: those of these slots of each layer; -1 is none."""
        found = self._no_bytes.clone()
        for name, some in slots.items():
            found[self.index[name][some[some >= 0]]] = True
        return found

    def differing(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, list[int]]:
        """Slots with bytes that differ, of the first layer with each cache; "" -> none
        if they are in no layer."""
        if torch.equal(one, other):
            return {}
        differs = one != other
        names = [name for name, first in self.first.items() if name == first]
        slots = {n: differs[self.index[n]].any(1).nonzero().flatten() for n in names}
        found = {n: some.tolist() for n, some in slots.items() if len(some)}
        return found or {"": []}


@dataclass(frozen=True)
class Violation:
    """Bytes that are not what the guarantee says after a step. kind: see above, or
    "begin wrote" (the log's begin changed the cache). layer: "" if it lies in none."""

    step: int
    kind: str
    layer: str
    slots: tuple[int, ...]


class SnapshotOracle(Observer):
    """Collects `violations`.

    poison: what rejected slots must hold in each byte instead of what they held.
    num_rejected: rejected slots that were checked, all layers together. num_dirty: how
    many of those drafts had changed bytes where they were verified, so that restoring
    them meant something (a draft proposed again after its rejection may find its own
    bytes there). num_staged: rejected drafts verified in a shadow block, num_logged: in
    a real one, as in a step with more requests than seats.
    """

    def __init__(self, probe: RunnerProbe, poison: int | None = None) -> None:
        self.probe, self.poison = probe, poison
        self.memory = Memory(probe.layers())
        self._before = self._after = self.memory.read()
        self.targets = probe.target_layers()
        assert self.targets, "no attention layer of the target model was found"
        # Shadow blocks lie behind those that requests can have.
        reserved = getattr(probe.runner.kv_cache_config, "nwor_shadow", None)
        regions = reserved if isinstance(reserved, dict) else {}
        self.num_seats = min((one.num_seats for one in regions.values()), default=0)
        self.num_real = {name: len(self.memory.index[name]) for name in self.targets}
        for name in self.targets:
            if region := regions.get(probe.group_of.get(name)):
                self.num_real[name] = region.num_real_blocks * region.block_size
        self.shadow = self.memory.mask(
            {
                name: torch.arange(num_real, len(self.memory.index[name]))
                for name, num_real in self.num_real.items()
            }
        )
        # Recurrent state may lie over the same bytes, and is written anywhere.
        self.knows_all = probe.group_of.keys() <= self.memory.layers.keys()
        self.reset()

    def reset(self) -> None:
        """Forgets what was seen."""
        self.violations: list[Violation] = []
        self.num_steps = self.num_rejected = self.num_dirty = 0
        self.num_staged = self.num_logged = 0

    def forward_begins(self, step: Step) -> None:
        self._before = self.memory.read()

    def forward_starts(self, step: Step) -> None:
        self._report("begin wrote", self._before, self.memory.read())

    def forward_ends(self, step: Step) -> None:
        self._after = self.memory.read()

    def final_slots(self, step: Step) -> dict[str, torch.Tensor]:
        """Of each target layer those of the step, once commit is over, and until the
        drafter computes its own into the same buffers; -1 is none."""
        return {
            name: self.probe.live_slots[name][: len(step.slots[name])]
            for name in step.slots
            if name in self.targets
        }

    def committed(self, step: Step) -> None:
        before, after, found = self._before, self._after, self.memory.read()
        is_staged = len(step.scheduled) <= self.num_seats
        slots, rows = self.final_slots(step), step.rejected_rows
        spared, mapped = self.shadow.clone(), self.memory.mask(slots)
        for name, of_layer in slots.items():
            index, verified = self.memory.index[name], step.slots[name]
            is_real, rejected = verified < self.num_real[name], of_layer[rows]
            assert (rejected >= 0).all()
            at, wrote = index[rejected], index[verified[rows]]
            self.num_rejected += len(rejected)
            self.num_dirty += int((before[wrote] != after[wrote]).any(1).sum())
            spared[at] = True
            expected = before[at] if self.poison is None else self.poison
            is_wrong = found[at] != expected
            self._add("not restored", name, rejected[is_wrong.any(1)])
            is_torn = is_wrong & (found[at] != after[at])
            self._add("torn", name, rejected[is_torn.any(1)])
            logged = rejected[is_real[rows]]
            self.num_logged += len(logged)
            self.num_staged += len(rejected) - len(logged)
            if is_staged:
                self._add("not staged", name, logged)
                early = of_layer[~is_real]
                is_early = (before[index[early]] != after[index[early]]).any(1)
                self._add("early write", name, early[is_early])
        if is_staged:
            spared |= mapped
        self._report("stray write", after.where(~spared, found), found)
        if self.knows_all:
            unasked = before.where(~(mapped | self.shadow), after)
            self._report("unmapped write", unasked, after)
        self.num_steps += 1

    def _report(self, kind: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        for name, slots in self.memory.differing(expected, found).items():
            self._violation(kind, name, slots)

    def _add(self, kind: str, layer: str, slots: torch.Tensor) -> None:
        if len(slots):
            self._violation(kind, layer, slots.tolist())

    def _violation(self, kind: str, layer: str, slots: list[int]) -> None:
        self.violations.append(
            Violation(self.num_steps, kind, layer, tuple(sorted(slots)))
        )


def hash_rows(rows: torch.Tensor) -> torch.Tensor:
    """64-bit hashes of the last dimension: odd random multipliers, modulo 2^64, after
    each word's high half was mixed into its low one.

    rows: [..., a multiple of 8] uint8, contiguous. Returns [...] int64.
    """
    words = rows.view(torch.int64)
    generator = torch.Generator().manual_seed(words.shape[-1])
    bounds = torch.iinfo(torch.int64)
    multipliers = torch.randint(
        bounds.min, bounds.max, (2, words.shape[-1]), generator=generator
    ).to(words.device)
    mixed = (words ^ ((words >> 32) & 0xFFFFFFFF)) * (multipliers[0] | 1)
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return (mixed * (multipliers[1] | 1)).sum(-1)
