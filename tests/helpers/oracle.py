# SPDX-License-Identifier: Apache-2.0
"""Byte oracles for guarantees 1 to 3.

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
blocks it has reserved: on vanilla vLLM it must report "not restored". ShadowOracle also
looks into NWOR's seats.

HashRecorder takes 64-bit hashes of every layer and slot after each step. From an off
engine's hashes and steps `committed_hashes` works out what a transactional cache must
hold; a cow engine's hashes must equal that everywhere, but where recurrent state lies
over a part of what a rejected draft left.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tests.helpers.byte_map import allocation, cache_of, slot_bytes
from tests.helpers.runner_probe import Observer, RunnerProbe, Step
from vllm_nwor.ops import SAVED_COLUMNS

Hashes = dict[str, torch.Tensor]


class Memory:
    """The caches of layers, as one vector of bytes.

    index: for each layer [num_slots, bytes of a slot] int64, places in the vector.
    aliases: the first layer with a cache -> all that have that very cache.
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
        self.aliases: dict[str, list[str]] = {}
        first: dict[Any, str] = {}
        for name, layer in self.layers.items():
            key = layer.kv_cache.data_ptr(), layer.kv_cache.stride()
            self.aliases.setdefault(first.setdefault(key, name), []).append(name)
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

    def slots_in(self, name: str, mask: torch.Tensor) -> torch.Tensor:
        """[n] int64: the layer's slots with a byte in `mask`, [bytes] bool."""
        return mask[self.index[name]].any(1).nonzero().flatten()

    def differing(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, list[int]]:
        """Slots with bytes that differ, of the first layer with each cache; "" -> none
        if they are in no layer."""
        if torch.equal(one, other):
            return {}
        differs = one != other
        slots = {n: self.slots_in(n, differs) for n in self.aliases}
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


class ShadowOracle(SnapshotOracle):
    """Watches an engine in mode stage. Besides, "left in a table": a shadow block is in
    a block table between steps; "not present": a row of a shadow block that counts as
    present after a step is not that of the real block. num_present: rows that were
    compared, over all layers."""

    num_present = 0

    def step_done(self, step: Step) -> None:
        num_blocks = min(
            num_real // self.memory.block_size(name)
            for name, num_real in self.num_real.items()
        )
        for table in self.probe.runner.input_batch.block_table.block_tables:
            if int(table.block_table.gpu.max()) >= num_blocks:
                self._violation("left in a table", "", [])
        self._check_present()

    def _check_present(self) -> None:
        """The rows that the next step will not copy to a seat's shadow block, by what
        this step's commit has saved, are those of the real block."""
        runner = self.probe.runner
        shadow = runner.nwor_state.manager.shadow
        found = self.memory.read()
        for gid, group in shadow.groups.items():
            tokens = group.entry_tokens
            for seat, saved in enumerate(shadow.saved[gid].tolist()):
                staged_in, valid, real = saved[SAVED_COLUMNS - 3 : SAVED_COLUMNS]
                if staged_in != shadow.step or real == 0:
                    continue
                block = (valid - 1) // tokens
                entry = group.first_entry + seat * group.span + block % group.span
                rows = torch.arange(valid - block * tokens)
                layers = runner.kv_cache_config.kv_cache_groups[gid]
                for name in self.targets.keys() & layers.layer_names:
                    index = self.memory.index[name]
                    present, expected = (
                        index[entry * tokens + rows],
                        index[real * tokens + rows],
                    )
                    is_wrong = (found[present] != found[expected]).any(1)
                    self.num_present += len(rows)
                    self._add("not present", name, (entry * tokens + rows)[is_wrong])


class HashRecorder(Observer):
    """After each step, [num_blocks, N] int64 hashes of the slots of every cache, by the
    first layer that has it.

    `steps[i]` belongs to the i-th step of the run, `start` to the moment before it.
    """

    def __init__(self, probe: RunnerProbe) -> None:
        self.memory = Memory(probe.layers())
        self.drafters = tuple(probe.drafter_layers())
        self.start = self._hashes()
        self.steps: list[Hashes] = []

    def step_done(self, step: Step) -> None:
        self.steps.append(self._hashes())

    def _hashes(self) -> Hashes:
        found = self.memory.read()
        return {
            name: hash_rows(found[self.memory.index[name]]).view(
                -1, self.memory.block_size(name)
            )
            for name in self.memory.aliases
        }


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


def committed_hashes(
    recorder: HashRecorder, steps: list[Step]
) -> tuple[list[Hashes], list[Hashes], int]:
    """What a cache without rejected drafts holds after each step of an off run.

    A slot that a rejected draft wrote keeps what it held, zeros if its block was zeroed
    at the start of that step; block copies copy what the source ought to hold;
    everything else is as the off run left it, and so are bytes that changed although no
    slot of theirs was written: a block that now holds recurrent state. Where that may
    cover a part only of what a rejected draft left, nothing is known until the slot is
    written, zeroed or copied to.

    Returns the hashes, as HashRecorder.steps has them; bools of the same shapes, where
    they are not known; and how many known ones differ from the off run's.
    """
    before = recorder.start
    expected = {name: start.clone() for name, start in before.items()}
    dirty = {n: torch.zeros_like(h, dtype=torch.bool) for n, h in before.items()}
    unknown = {name: flags.clone() for name, flags in dirty.items()}
    result, unknown_after = [], []
    num_dirty = 0
    for step, found in zip(steps, recorder.steps, strict=True):
        # Those of the step before are in the result.
        expected = {name: hashes.clone() for name, hashes in expected.items()}
        for name, aliases in recorder.memory.aliases.items():
            is_dirty, is_unknown, restored = dirty[name], unknown[name], expected[name]
            is_written, is_rejected = (torch.zeros_like(is_dirty) for _ in range(2))
            for slots in (step.slots[n] for n in aliases if n in step.slots):
                is_written.view(-1)[slots[slots >= 0]] = True
            for alias in set(aliases) - set(recorder.drafters):
                is_rejected.view(-1)[step.rejected.get(alias, [])] = True
            is_overlaid = is_dirty & ~is_written & (found[name] != before[name])
            is_dirty &= ~is_overlaid
            is_unknown |= is_overlaid
            for block in step.zeroed_blocks:
                is_dirty[block] = is_unknown[block] = False
                restored[block] = 0  # the hash of zeros
            for source, to in step.copied_blocks:
                is_dirty[to] = is_dirty[source]
                is_unknown[to] = is_unknown[source]
                restored[to] = restored[source]
            is_dirty[is_written] = False
            is_dirty |= is_rejected
            is_unknown &= ~is_written | is_rejected
            expected[name] = torch.where(is_dirty, restored, found[name])
            num_dirty += int((expected[name] != found[name]).sum())
        result.append(expected)
        unknown_after.append({name: flags.clone() for name, flags in unknown.items()})
        before = found
    return result, unknown_after, num_dirty


def differences(
    expected: list[Hashes], found: list[Hashes]
) -> list[tuple[int, str, list[int]]]:
    """Where two runs' hashes differ: step, layer, slots."""
    result = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            slots = (one[name] != other[name]).flatten().nonzero().flatten()
            if len(slots):
                result.append((number, name, slots.tolist()))
    return result
