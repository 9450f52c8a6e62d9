# SPDX-License-Identifier: Apache-2.0
"""Byte oracles for guarantees 1 to 3.

SnapshotOracle watches one engine: whole copies of every cache allocation before the
log is taken, before the forward, after it, and after commit. It knows nothing of NWOR:
on vanilla vLLM it must report violations. ShadowOracle watches one in mode stage.

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

    def read(self) -> torch.Tensor:
        """A copy of all bytes, [bytes] uint8."""
        return torch.cat(list(self._parts.values()))

    def block_size(self, name: str) -> int:
        return int(cache_of(self.layers[name]).shape[2])

    def mask(self, slots: dict[str, torch.Tensor]) -> torch.Tensor:
        """[bytes] bool: those of these slots of each layer; -1 is none."""
        found = torch.zeros_like(self.read(), dtype=torch.bool)
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
    """Bytes that are not what the guarantee says after a step.

    kind: "begin wrote" (the log's begin changed the cache), "not restored" (a rejected
    draft's slot is not as it was), "torn" (it even holds bytes that are neither those
    from before the forward nor those from after it), "stray write" (another byte
    changed between the end of the forward and the end of commit). layer: "" if it lies
    in none.
    """

    step: int
    kind: str
    layer: str
    slots: tuple[int, ...]


class SnapshotOracle(Observer):
    """Collects violations of guarantees 1 and 2 in `violations`.

    poison: what rejected slots must hold in each byte instead of what they held.
    num_rejected: rejected slots that were checked, all layers together. num_dirty: how
    many of those the forward had changed, so that restoring them meant something (a
    draft proposed again after its rejection may find its own bytes there).
    """

    def __init__(self, probe: RunnerProbe, poison: int | None = None) -> None:
        self.poison = poison
        self.memory = Memory(probe.layers())
        self.targets = probe.target_layers().keys()
        self.violations: list[Violation] = []
        self.num_steps = self.num_rejected = self.num_dirty = 0

    def forward_begins(self, step: Step) -> None:
        self._outside = self.memory.read()

    def forward_starts(self, step: Step) -> None:
        self._before = self.memory.read()
        self._report("begin wrote", self._outside, self._before)

    def forward_ends(self, step: Step) -> None:
        self._after = self.memory.read()

    def committed(self, step: Step) -> None:
        found, wanted = self.memory.read(), self._after.clone()
        rejected = {n: s for n, s in step.rejected.items() if n in self.targets}
        places = {name: self.memory.index[name][s] for name, s in rejected.items()}
        for name, at in places.items():
            assert (rejected[name] >= 0).all()
            self.num_rejected += len(at)
            self.num_dirty += int((self._before[at] != self._after[at]).any(1).sum())
            wanted[at] = self._before[at]
            if self.poison is not None:
                wanted[at] = self.poison
        for name, at in places.items():
            is_wrong = found[at] != wanted[at]
            slots = rejected[name][is_wrong.any(1)].tolist()
            if slots:
                self._violation("not restored", name, slots)
            if (is_wrong & (found[at] != self._after[at])).any():
                self._violation("torn", name, slots)
        for at in places.values():
            wanted[at] = found[at]
        self._report("stray write", wanted, found)
        self.num_steps += 1

    def _report(self, kind: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
        for name, slots in self.memory.differing(wanted, found).items():
            self._violation(kind, name, slots)

    def _violation(self, kind: str, layer: str, slots: list[int]) -> None:
        self.violations.append(
            Violation(self.num_steps, kind, layer, tuple(sorted(slots)))
        )


class ShadowOracle(Observer):
    """Watches an engine in mode stage: what must never happen is in `violations`, as
    (step, what).

    num_real: blocks that the scheduler can hand out. num_staged: drafts that were
    verified in a shadow block and rejected, num_logged: in a real one, as in a step
    with more requests than seats. num_present: rows of shadow blocks that counted as
    present after a step and were compared; all three over all layers.
    """

    def __init__(self, runner: Any, probe: RunnerProbe, num_real: int) -> None:
        self.runner = runner
        self.shadow = runner.nwor_state.manager.shadow
        self.memory = Memory(probe.layers())
        self.targets = probe.target_layers().keys()
        self.num_real = num_real
        self.violations: list[tuple[int, str]] = []
        self.num_staged = self.num_logged = self.num_present = 0
        self._number = 0

    def forward_begins(self, step: Step) -> None:
        self._before = self.memory.read()

    def committed(self, step: Step) -> None:
        """Before the drafter runs. What the forward wrote to a real block was no
        draft, unless there are not seats enough; what commit wrote there is compared
        elsewhere, with an off engine."""
        has_seats = len(step.scheduled) <= self.shadow.num_seats
        for name, rejected in step.rejected.items():
            if name in self.targets:
                is_real = rejected < self.num_real * self.memory.block_size(name)
                self.num_staged += int((~is_real).sum())
                self.num_logged += int(is_real.sum())
                if has_seats and is_real.any():
                    self._violation(f"a draft of {name} was sent to a real block")

    def forward_ends(self, step: Step) -> None:
        changed = self.memory.differing(self._before, self.memory.read())
        for name, slots in changed.items():
            # Groups overlay each other's bytes: one writes where another is not mapped.
            names = self.memory.aliases.get(name, ())
            mapped = {s for alias in names for s in step.slots[alias].tolist()}
            num_slots = self.num_real * self.memory.block_size(name) if name else 0
            if not name or {s for s in slots if s < num_slots} - mapped:
                self._violation(f"the forward wrote real slots of {name!r} unasked")

    def step_done(self, step: Step) -> None:
        for table in self.runner.input_batch.block_table.block_tables:
            if int(table.block_table.gpu.max()) >= self.num_real:
                self._violation("a shadow block is in a table between steps")
        self._check_present()
        self._number += 1

    def _check_present(self) -> None:
        """The rows that the next step will not copy to a seat's shadow block, by what
        this step's commit has saved, are those of the real block."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        found = self.memory.read()
        for group in self.shadow.groups:
            tokens = group.entry_tokens
            for seat, saved in enumerate(group.saved.tolist()):
                staged_in, valid, real = saved[SAVED_COLUMNS - 3 : SAVED_COLUMNS]
                if staged_in != self.shadow.step or real == 0:
                    continue
                block = (valid - 1) // tokens
                entry = group.first_entry + seat * group.span + block % group.span
                rows = torch.arange(valid - block * tokens)
                for name in self.targets & groups[group.group_id].layer_names:
                    index = self.memory.index[name]
                    one, other = (
                        found[index[e * tokens + rows]] for e in (entry, real)
                    )
                    self.num_present += len(rows)
                    if not torch.equal(one, other):
                        self._violation(f"a present row of {name} is not the real one")

    def _violation(self, what: str) -> None:
        self.violations.append((self._number, what))


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
            is_dirty, is_unknown, wanted = dirty[name], unknown[name], expected[name]
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
                wanted[block] = 0  # the hash of zeros
            for source, to in step.copied_blocks:
                is_dirty[to] = is_dirty[source]
                is_unknown[to] = is_unknown[source]
                wanted[to] = wanted[source]
            is_dirty[is_written] = False
            is_dirty |= is_rejected
            is_unknown &= ~is_written | is_rejected
            expected[name] = torch.where(is_dirty, wanted, found[name])
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
