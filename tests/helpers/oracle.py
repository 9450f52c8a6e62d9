# SPDX-License-Identifier: Apache-2.0
"""The byte oracle for guarantees 1 to 3.

SnapshotOracle copies every cache allocation of one engine, on any device and of either
runner, three times a step:

    S0  before NWOR's log is taken, after vLLM's zeroing, block copies and loads
    S1  after the forward
    S2  after the sampler has returned, NWOR's commit included

Outside shadow blocks it requires:

    S2 == S0 at the slots of rejected drafts       else "not restored"; "torn" if it is
                                                   not S1 either
    S2 == S1 everywhere else                       else "stray write"
    S1 == S0 outside the slots of this step        else "unmapped write"

With shadow blocks (mode stage) commit writes the kept rows: S2 == S1 is required
outside the slots of this step only, and

    S1 == S0 at the slots of rows verified in a shadow block    else "early write"
    each rejected draft was verified in a shadow block          else "not staged"

All of this comes from vLLM's own objects, except the number of reserved blocks. On
plain vLLM it must report "not restored".

Watch also requires, after commit (the last one from NWOR's saved seats):

    the scheduler gives no request a shadow block               else "handed out"
    no block table has one                                      else "left in a table"
    rows of a shadow block that the next step reuses are those
    of the real block                                           else "not present"

All other bytes are compared with a run without NWOR, by three 64-bit digests of each
step: the step's slots; the bytes of all slots except those whose last write was a
rejected draft; and the same over the slots written so far, wherever they lie (the
second one is equal only if requests got the same blocks).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tests.helpers.byte_map import allocation, cache_of, slot_bytes
from tests.helpers.runner_probe import (
    Observer,
    RunnerProbe,
    Step,
    block_tables,
    manager_of,
)

MAX_REPORTED = 20


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
        """Slots with different bytes, for the first layer with each cache; {"": []} if
        the bytes are in no layer."""
        if torch.equal(one, other):
            return {}
        differs = one != other
        names = [name for name, first in self.first.items() if name == first]
        slots = {n: differs[self.index[n]].any(1).nonzero().flatten() for n in names}
        found = {n: some.tolist() for n, some in slots.items() if len(some)}
        return found or {"": []}


@dataclass(frozen=True)
class Violation:
    """Bytes that violate a guarantee after a step. kind: see above, or "begin wrote"
    (the log's begin changed the cache). layer: "" if they are in none."""

    step: int
    kind: str
    layer: str
    slots: tuple[int, ...]


class SnapshotOracle(Observer):
    """Collects `violations`.

    poison: the byte that rejected slots must hold, instead of their old bytes.
    num_rejected: checked slots, summed over layers. num_dirty: how many of them the
    forward had changed (a draft that is proposed again writes the same bytes).
    num_staged: rejected drafts verified in a shadow block; num_logged: in a real one.
    """

    def __init__(self, probe: RunnerProbe, poison: int | None = None) -> None:
        self.probe, self.poison = probe, poison
        self.memory = Memory(probe.layers())
        self._before = self._after = self._last = self.memory.read()
        self.targets = probe.target_layers()
        assert self.targets, "no attention layer of the target model was found"
        # Shadow blocks follow the scheduler's.
        reserved = getattr(probe.runner.kv_cache_config, "nwor_shadow", None)
        regions = reserved if isinstance(reserved, dict) else {}
        self.num_seats = min((one.num_seats for one in regions.values()), default=0)
        num_blocks = [one.num_real_blocks for one in regions.values()]
        self.num_blocks = min(num_blocks, default=0)  # 0: there are no shadow blocks
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
        # Recurrent state may share the memory, and is written anywhere.
        self.knows_all = probe.group_of.keys() <= self.memory.layers.keys()
        self.reset()

    def reset(self) -> None:
        """Clears violations and counts."""
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
        """The step's slots of each target layer, after commit and before the drafter
        reuses the buffers; -1 is none."""
        return {
            name: self.probe.live_slots[name][: len(step.slots[name])]
            for name in step.slots
            if name in self.targets
        }

    def committed(self, step: Step) -> None:
        before, after = self._before, self._after
        found = self._last = self.memory.read()
        has_seat = torch.tensor(step.rejected_seats, device=before.device)
        has_seat = has_seat < self.num_seats
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
            is_logged = is_real[rows]
            self.num_logged += int(is_logged.sum())
            self.num_staged += int((~is_logged).sum())
            self._add("not staged", name, rejected[is_logged & has_seat])
            self._add("staged", name, rejected[~is_logged & ~has_seat])
            # Slots of rows in shadow blocks are written by commit only.
            in_shadow = of_layer[~is_real]
            is_early = (before[index[in_shadow]] != after[index[in_shadow]]).any(1)
            self._add("early write", name, in_shadow[is_early])
            spared[index[in_shadow]] = True
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


def summary(step: Step) -> dict[str, Any]:
    """A step's counts, and its CUDA graph mode."""
    return {
        "requests": len(step.scheduled),
        "tokens": sum(step.scheduled.values()),
        "windows": len(step.drafted),
        "drafts": sum(step.drafted.values()),
        "accepted": sum(step.accepted.values()),
        "preempted": len(step.preempted),
        "graph": step.graph,
    }


class Watch(SnapshotOracle):
    """Watches a model runner, V1 or V2, in any process, from `start` to `stop`.

    num_present: compared rows of shadow blocks, summed over layers. num_shadow_windows:
    windows of requests with a seat.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(RunnerProbe(runner))

    def start(self, seed: int) -> None:
        """Fills the caches and starts watching, while no request runs."""
        self.probe.poison(seed)
        with torch.inference_mode():
            for table in block_tables(self.probe.runner):
                table.zero_()  # V2's warm-up leaves entries
        self.reset()
        self.num_present = self.num_shadow_windows = 0
        self.probe.observers, self.probe.steps = [self], []
        self.steps: list[dict[str, Any]] = []
        self.digests: list[tuple[int, int, int]] = []
        self.dirty, self.written = self._no_slots(), self._no_slots()

    def _no_slots(self) -> dict[str, torch.Tensor]:
        """An all-False mask of slots for each target layer; layers with one cache share
        it."""
        of_cache: dict[str, torch.Tensor] = {}
        first, device = self.memory.first, self._before.device
        for name in self.targets:
            none = torch.zeros(len(self.memory.index[name]), device=device).bool()
            of_cache.setdefault(first[name], none)
        return {name: of_cache[first[name]] for name in self.targets}

    def stop(self) -> dict[str, Any]:
        """The results, as plain data."""
        self.probe.observers = []
        by_kind: Counter[str] = Counter()
        for violation in self.violations:
            by_kind[violation.kind] += max(len(violation.slots), 1)
        first = self.violations[:MAX_REPORTED]
        totals = {
            f"num_{what}": sum(step[what] for step in self.steps)
            for what in ("windows", "drafts", "accepted")
        }
        return totals | {
            "steps": self.steps,
            "digests": self.digests,
            "violations": [vars(one) | {"slots": one.slots[:8]} for one in first],
            "violations_by_kind": dict(by_kind),
            "num_rejected_slots": self.num_rejected,
            "num_dirty_slots": self.num_dirty,
            "num_staged_slots": self.num_staged,
            "num_logged_slots": self.num_logged,
            "num_present_rows": self.num_present,
            "num_shadow_windows": self.num_shadow_windows,
            "layers": len(self.targets),
        }

    def committed(self, step: Step) -> None:
        for text in step.contradictions:
            self._violation("contradiction", text, [-1])
        super().committed(step)
        seats = step.seats.values()
        self.num_shadow_windows += sum(seat < self.num_seats for seat in seats)
        if self.num_blocks:
            self._check_seats(step)
        slots = self.final_slots(step)
        self._track(step, slots)
        self.digests.append(self._digest(slots))
        self.steps.append(summary(step))

    def _check_seats(self, step: Step) -> None:
        """Checks that no request has a shadow block, and that reusable rows are
        right."""
        strays = [block for block in step.new_blocks if block >= self.num_blocks]
        if strays:
            self._violation("handed out", "", strays)
        shadow = getattr(manager_of(self.probe.runner), "shadow", None)
        tables, found = block_tables(self.probe.runner), self._last
        for gid, group in shadow.groups.items() if shadow else ():
            entries = tables[gid].unique()
            left = entries[entries >= group.num_real_entries]
            self._add("left in a table", "", left)
            tokens, rows = group.entry_tokens, []
            for seat, saved in enumerate(shadow.saved[gid].tolist()):
                staged_in, valid, real = saved[: -2 * group.span][-3:]
                if staged_in != shadow.step or real == 0:
                    continue
                block = (valid - 1) // tokens
                entry = group.first_entry + seat * group.span + block % group.span
                offsets = range(valid - block * tokens)
                rows += [(entry * tokens + o, real * tokens + o) for o in offsets]
            present, expected = torch.tensor(rows, dtype=torch.int64).view(-1, 2).T
            for name in self.targets:
                if self.probe.group_of.get(name) != gid:
                    continue
                index = self.memory.index[name]
                is_wrong = found[index[present]] != found[index[expected]]
                self.num_present += len(rows)
                self._add("not present", name, present[is_wrong.any(1).cpu()])

    def _track(self, step: Step, slots: dict[str, torch.Tensor]) -> None:
        """Tracks the slots whose last write, in plain vLLM, is a rejected draft."""
        for name in self.targets:
            dirty = self.dirty[name].view(-1, self.memory.block_size(name))
            for block in step.zeroed_blocks:
                dirty[block] = False
            for source, to in step.copied_blocks:
                dirty[to] = dirty[source]
        for name in self.targets:
            mapped = slots[name]
            self.dirty[name][mapped[mapped >= 0]] = False
            self.written[name][mapped[mapped >= 0]] = True
            rejected = mapped[step.rejected_rows]
            self.dirty[name][rejected[rejected >= 0]] = True

    def _digest(self, slots: dict[str, torch.Tensor]) -> tuple[int, int, int]:
        places = strict = anywhere = 0
        for number, name in enumerate(self.targets):
            weight = 2 * number + 1
            places += weight * int((slots[name] * odd_numbers(slots[name])).sum())
            real = slice(self.num_real[name])
            hashes = hash_rows(self._last[self.memory.index[name][real]])
            hashes = hashes.masked_fill(self.dirty[name][real], 0)
            strict += weight * int((hashes * odd_numbers(hashes)).sum())
            hashes = hashes.masked_fill(~self.written[name][real], 0)
            anywhere += weight * int(hashes.sum())
        return places % 2**64, strict % 2**64, anywhere % 2**64


def odd_numbers(like: torch.Tensor) -> torch.Tensor:
    """1, 3, 5, ... as long as `like`, [n] int64."""
    return torch.arange(len(like), device=like.device) * 2 + 1


def hash_rows(rows: torch.Tensor) -> torch.Tensor:
    """64-bit hashes of the last dimension: odd random multipliers modulo 2^64, after
    mixing each word's high half into its low half.

    rows: [..., bytes] uint8. Returns [...] int64.
    """
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8))
    words = padded.contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(words.shape[-1])
    bounds = torch.iinfo(torch.int64)
    multipliers = torch.randint(
        bounds.min, bounds.max, (2, words.shape[-1]), generator=generator
    ).to(words.device)
    mixed = (words ^ ((words >> 32) & 0xFFFFFFFF)) * (multipliers[0] | 1)
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return (mixed * (multipliers[1] | 1)).sum(-1)
