# SPDX-License-Identifier: Apache-2.0
"""Two byte oracles for guarantees 1 and 2.

SnapshotOracle watches one engine: whole copies of every cache allocation before the
log is taken, before the forward, after it, and after commit. It knows nothing of NWOR:
on vanilla vLLM it must report violations.

HashRecorder takes 64-bit hashes of every layer and slot after each step. From an off
engine's hashes and steps `committed_hashes` works out what a transactional cache must
hold; a cow engine's hashes must equal that everywhere, without exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.byte_map import block_bytes, cache_of, owners
from tests.helpers.runner_probe import Observer, RunnerProbe, Step


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

    num_rejected: rejected slots that were checked, all layers together. num_dirty: how
    many of those the forward had changed, so that restoring them meant something (a
    draft proposed again after its rejection may find its own bytes there).
    """

    def __init__(self, probe: RunnerProbe, poison: int | None = None) -> None:
        """poison: what rejected slots must hold in each byte instead of what they
        held."""
        self.poison = poison
        self.layers = probe.target_layers()
        assert self.layers
        self.storages = probe.storages()
        self.owners = {name: owners(layer) for name, layer in self.layers.items()}
        self.violations: list[Violation] = []
        self.num_steps = 0
        self.num_rejected = 0
        self.num_dirty = 0
        self._outside: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []

    def _copy(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages]

    def forward_begins(self, step: Step) -> None:
        self._outside = self._copy()

    def forward_starts(self, step: Step) -> None:
        self._before = self._copy()
        for outside, before in zip(self._outside, self._before, strict=True):
            if not torch.equal(outside, before):
                self._report("begin wrote", outside, before)

    def forward_ends(self, step: Step) -> None:
        self._after = self._copy()

    def committed(self, step: Step) -> None:
        expected = [storage.clone() for storage in self._after]
        for name in self.layers:
            rejected = step.rejected.get(name)
            if rejected is None or not len(rejected):
                continue
            assert (rejected >= 0).all()
            self.num_rejected += len(rejected)
            index, mask = self._mask(name, rejected)
            dirty = self._differing(name, self._before[index], self._after[index])
            self.num_dirty += len(set(dirty) & set(rejected.tolist()))
            old = self._view(name, self._before[index])[mask]
            if self.poison is not None:
                old.fill_(self.poison)
            self._view(name, expected[index])[mask] = old
        for storage, wanted in zip(self.storages, expected, strict=True):
            if not torch.equal(storage, wanted):
                self._sort_out(storage, wanted, step)
        self.num_steps += 1

    def _sort_out(
        self, storage: torch.Tensor, wanted: torch.Tensor, step: Step
    ) -> None:
        """Reports differences at rejected slots apart from those elsewhere."""
        left = wanted.clone()
        for name in self.layers:
            rejected = step.rejected.get(name)
            if rejected is None or not len(rejected):
                continue
            index, mask = self._mask(name, rejected)
            if self.storages[index] is not storage:
                continue
            found = self._view(name, storage)[mask]
            if not torch.equal(found, self._view(name, wanted)[mask]):
                slots = self._differing(name, storage, wanted)
                bad = tuple(sorted(set(slots) & set(rejected.tolist())))
                self._violations("not restored", name, bad)
                vanilla = self._view(name, self._after[index])[mask]
                if not (
                    (found == vanilla) | (found == self._view(name, wanted)[mask])
                ).all():
                    self._violations("torn", name, bad)
            self._view(name, left)[mask] = found
        if not torch.equal(storage, left):
            self._report("stray write", left, storage)

    def _report(self, kind: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
        named = False
        for name in self.layers:
            slots = self._differing(name, found, wanted)
            if slots:
                self._violations(kind, name, slots)
                named = True
        if not named:
            self._violations(kind, "", ())

    def _violations(self, kind: str, layer: str, slots: tuple[int, ...]) -> None:
        self.violations.append(Violation(self.num_steps, kind, layer, slots))

    def _differing(
        self, name: str, found: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[int, ...]:
        block_size = cache_of(self.layers[name]).shape[2]
        differs = self._view(name, found) != self._view(name, wanted)
        block, head, byte = differs.nonzero().unbind(1)
        slots = block * block_size + self.owners[name][head, byte]
        return tuple(slots.unique().tolist())

    def _view(self, name: str, storage: torch.Tensor) -> torch.Tensor:
        return block_bytes(cache_of(self.layers[name]), storage)

    def _mask(self, name: str, slots: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The layer's storage, and which of its bytes belong to `slots`, as
        [num_blocks, num_heads, page bytes] bool."""
        cache = cache_of(self.layers[name])
        num_blocks, _, block_size, _ = cache.shape
        wanted = torch.zeros(num_blocks, block_size, dtype=torch.bool)
        wanted.view(-1)[slots] = True
        pointer = cache.untyped_storage().data_ptr()
        pointers = [s.untyped_storage().data_ptr() for s in self.storages]
        return pointers.index(pointer), wanted[:, self.owners[name]]


class ShadowOracle(Observer):
    """Watches an engine in mode stage: what must never happen is in `violations`, as
    (step, what).

    num_real: blocks that the scheduler can hand out. num_staged: drafts that were
    verified in a shadow block and rejected.
    """

    def __init__(self, runner: Any, probe: RunnerProbe, num_real: int) -> None:
        self.runner = runner
        self.layers = probe.target_layers()
        # Groups overlay each other's bytes: one writes where another is not mapped.
        self._aliases = _aliases(self.layers)
        self.storages = {
            storage.untyped_storage().data_ptr(): storage
            for storage in probe.storages()
        }
        self.num_real = num_real
        self.violations: list[tuple[int, str]] = []
        self.num_staged = 0
        self._number = 0
        self._before: dict[str, torch.Tensor] = {}

    def _real(self, name: str) -> torch.Tensor:
        cache = cache_of(self.layers[name])
        storage = self.storages[cache.untyped_storage().data_ptr()]
        return block_bytes(cache, storage)[: self.num_real]

    def forward_begins(self, step: Step) -> None:
        self._before = {name: self._real(name).clone() for name in self.layers}

    def committed(self, step: Step) -> None:
        """Before the drafter runs. What the forward wrote to a real block was no
        draft; what commit wrote there is compared elsewhere, with an off engine."""
        for name, layer in self.layers.items():
            rejected = step.rejected.get(name)
            if rejected is not None and len(rejected):
                first_shadow = self.num_real * cache_of(layer).shape[2]
                self.num_staged += int((rejected >= first_shadow).sum())
                if bool((rejected < first_shadow).any()):
                    self._violation(f"a draft of {name} was sent to a real block")

    def forward_ends(self, step: Step) -> None:
        for name, layer in self.layers.items():
            block_size = cache_of(layer).shape[2]
            changed = self._real(name) != self._before[name]
            block, head, byte = changed.nonzero().unbind(1)
            slots = set(
                (block * block_size + owners(layer)[head, byte]).unique().tolist()
            )
            mapped = {
                slot
                for alias in self._aliases[name]
                for slot in step.slots[alias].tolist()
            }
            if not slots <= mapped:
                self._violation(f"the forward wrote real slots of {name} unasked")

    def step_done(self, step: Step) -> None:
        for table in self.runner.input_batch.block_table.block_tables:
            if int(table.block_table.gpu.max()) >= self.num_real:
                self._violation("a shadow block is in a table between steps")
        self._number += 1

    def _violation(self, what: str) -> None:
        self.violations.append((self._number, what))


class HashRecorder(Observer):
    """After each step, [num_blocks, N] int64 hashes of every layer's slots.

    `steps[i]` belongs to the i-th step of the run, `start` to the moment before it.
    """

    def __init__(self, probe: RunnerProbe) -> None:
        self.layers = probe.layers()
        self.drafters = tuple(probe.drafter_layers())
        self._order: dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            self._order[name] = owners(layer).flatten().argsort(stable=True)
        self.start = self._hashes()
        self.steps: list[dict[str, torch.Tensor]] = []

    def step_done(self, step: Step) -> None:
        self.steps.append(self._hashes())

    def _hashes(self) -> dict[str, torch.Tensor]:
        return {
            name: self._hash(name, cache_of(layer))
            for name, layer in self.layers.items()
        }

    def _hash(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        num_blocks, _, block_size, _ = cache.shape
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        pages = block_bytes(cache, storage).reshape(num_blocks, -1)
        by_slot = pages[:, self._order[name]].view(num_blocks, block_size, -1)
        return hash_rows(by_slot)


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


@dataclass(frozen=True)
class Difference:
    """Slots of a layer whose bytes are not what was expected after a step."""

    step: int
    layer: str
    slots: tuple[int, ...]


def committed_hashes(
    recorder: HashRecorder, steps: list[Step]
) -> tuple[list[dict[str, torch.Tensor]], int]:
    """What a cache without rejected drafts holds after each step of an off run.

    A slot that a rejected draft wrote keeps what it held, zeros if its block was zeroed
    at the start of that step; block copies copy what the source ought to hold;
    everything else is as the off run left it, and so are bytes that changed although no
    slot of theirs was written: a block that now holds recurrent state. Layers that
    alias the same bytes share one record. Returns the hashes, as HashRecorder.steps has
    them, and how many (slot, layer) in them differ from the off run's.
    """
    expected = {name: start.clone() for name, start in recorder.start.items()}
    dirty = {
        name: torch.zeros_like(h, dtype=torch.bool) for name, h in expected.items()
    }
    aliases = _aliases(recorder.layers)
    result = []
    num_dirty = 0
    before = recorder.start
    for step, found in zip(steps, recorder.steps, strict=True):
        # Those of the step before are in the result.
        expected = {name: hashes.clone() for name, hashes in expected.items()}
        for name in recorder.layers:
            dirty[name] &= found[name] == before[name]
        for block in step.zeroed_blocks:
            for name in recorder.layers:
                dirty[name][block] = False
                expected[name][block] = 0  # the hash of zeros
        for source, to in step.copied_blocks:
            for name in recorder.layers:
                dirty[name][to] = dirty[name][source]
                expected[name][to] = expected[name][source]
        for name in recorder.layers:
            slots = step.slots.get(name)
            if slots is None:
                continue
            rejected = step.rejected.get(name, slots[:0])
            if name in recorder.drafters:
                rejected = slots[:0]
            for alias in aliases[name]:
                dirty[alias].view(-1)[slots[slots >= 0]] = False
                dirty[alias].view(-1)[rejected] = True
        for name, hashes in found.items():
            expected[name] = torch.where(dirty[name], expected[name], hashes)
            num_dirty += int((expected[name] != hashes).sum())
        result.append(dict(expected))
        before = found
    return result, num_dirty


def _aliases(layers: dict[str, Any]) -> dict[str, list[str]]:
    by_address: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, layer in layers.items():
        key = (layer.kv_cache.data_ptr(), tuple(layer.kv_cache.stride()))
        by_address.setdefault(key, []).append(name)
    return {name: group for group in by_address.values() for name in group}


def differences(
    expected: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]
) -> list[Difference]:
    """Where two runs' hashes differ, step by step, layer by layer."""
    assert len(expected) == len(found)
    result = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            slots = (one[name] != other[name]).flatten().nonzero().flatten()
            if len(slots):
                result.append(Difference(number, name, tuple(slots.tolist())))
    return result
