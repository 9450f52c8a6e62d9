# SPDX-License-Identifier: Apache-2.0
"""The byte oracle of tests/helpers for a model runner in any process, V1 or V2, with
what it saw as plain data; and a filler of slots that nobody has written.

Besides, for each step three 64-bit digests: where the step's slots lie; the bytes of
all slots except those whose last write was a rejected draft; and the same of the slots
written so far, wherever they lie. A run with NWOR off and one with it on must have the
same ones (the second only if requests got the same blocks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from benchmarks.worker_extension import NworWorkerExtension

from tests.helpers.byte_map import allocation, slot_bytes
from tests.helpers.oracle import SnapshotOracle, hash_rows
from tests.helpers.runner_probe import RunnerProbe, Step, cache_layers

MAX_REPORTED = 20


def summary(step: Step) -> dict[str, Any]:
    """How many there were of each, and the mode of CUDA graph."""
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
    """Watches one runner from `start` to `stop`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(RunnerProbe(runner))

    def _reset(self) -> None:
        self.reset()
        self.probe.observers = [self]
        self.probe.steps = []
        self.steps: list[dict[str, Any]] = []
        self.digests: list[tuple[int, int, int]] = []
        self.num_filled = 0
        self.dirty, self.written = (
            {
                name: torch.zeros(size, dtype=torch.bool, device=self._before.device)
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
            "layers": len(self.targets),
        }

    def committed(self, step: Step) -> None:
        for text in step.contradictions:
            self._violation("contradiction", text, [-1])
        super().committed(step)
        slots = self.final_slots(step)
        self._track(step, slots)
        self.digests.append(self._digest(slots))
        self.steps.append(summary(step))

    def _track(self, step: Step, slots: dict[str, torch.Tensor]) -> None:
        """Which slots hold what a rejected draft wrote last, were NWOR not there."""
        for name in self.targets:
            dirty = self.dirty[name].view(-1, self.memory.block_size(name))
            for block in step.zeroed_blocks:
                dirty[block] = False
            for source, to in step.copied_blocks:
                dirty[to] = dirty[source]
            mapped = slots[name]
            self.dirty[name][mapped[mapped >= 0]] = False
            self.written[name][mapped[mapped >= 0]] = True
            rejected = mapped[step.rejected_rows]
            self.dirty[name][rejected[rejected >= 0]] = True

    def _digest(self, slots: dict[str, torch.Tensor]) -> tuple[int, int, int]:
        places = strict = anywhere = 0
        found = self.memory.read()
        for number, name in enumerate(self.targets):
            weight = 2 * number + 1
            places += weight * int((slots[name] * odd_numbers(slots[name])).sum())
            hashes = hash_slots(found[self.memory.index[name][: self.num_real[name]]])
            hashes = hashes.masked_fill(self.dirty[name], 0)
            strict += weight * int((hashes * odd_numbers(hashes)).sum())
            hashes = hashes.masked_fill(~self.written[name], 0)
            anywhere += weight * int(hashes.sum())
        return places % 2**64, strict % 2**64, anywhere % 2**64


class OracleExtension(NworWorkerExtension):
    """Mixed into vLLM's worker class: has these in any worker, by collective_rpc."""

    def test_oracle(self, kind: str, method: str, *arguments: Any) -> Any:
        """Calls a method of this worker's Watch or Filler, which is made when it is
        first asked for."""
        known = self.__dict__.setdefault("_test_oracles", {})
        if kind not in known:
            known[kind] = {"Watch": Watch, "Filler": Filler}[kind](self.model_runner)
        return getattr(known[kind], method)(*arguments)

    def test_flip_bit(self, rank: int | None = None) -> dict[str, Any] | None:
        """Flips one bit of the second slot of the batch's first request, in the first
        key of the second layer that the KV audit has; where it was. rank: of the only
        worker that does."""
        runner = self.model_runner
        if rank not in (None, runner.vllm_config.parallel_config.rank):
            return None
        if hasattr(runner, "block_tables"):
            table = runner.block_tables.input_block_tables[0]
        else:
            table = runner.input_batch.block_table[0].block_table.gpu
        (group,) = runner.nwor_audit.audit.groups
        slot = int(table[0, 0]) * group.shape.entry_tokens + 1
        name = group.layers[1].name
        layer = cache_layers(runner)[name]
        allocation(layer)[slot_bytes(layer)[slot, 0]] ^= 0x40
        return {"slot": slot, "layer": name}


class Filler(Watch):
    """Instead of watching, fills before each forward all slots of the target's layers
    that no request has written, those of rejected drafts among them: `written` has the
    others. Blocks that lost what they held are named by `forget` (`unwritten_blocks`).
    NWOR is off."""

    def fill(self, contents: str, takes_one: bool) -> None:
        """Begins to. contents: "poison", as NWOR would leave it, or "nan". takes_one:
        each step's first slot is filled as well, although it is written."""
        self._reset()
        self.takes_one = takes_one
        # Groups may overlay each other's caches; a block is one group's at a time.
        by_cache: dict[int, torch.Tensor] = {}
        for name, layer in self.targets.items():
            cache = layer.kv_cache.data_ptr()
            self.written[name] = by_cache.setdefault(cache, self.written[name])
        self.patterns = {
            name: pattern_of(layer, contents) for name, layer in self.targets.items()
        }

    def forget(self, blocks: list[int]) -> None:
        """Nobody has written `blocks`."""
        groups = self.probe.runner.kv_cache_config.kv_cache_groups
        for name, written in self.written.items():
            size = groups[self.probe.group_of[name]].kv_cache_spec.block_size
            written.view(-1, size)[blocks] = False

    def forward_begins(self, step: Step) -> None:
        for name, layer in self.targets.items():
            free = slot_bytes(layer)[~self.written[name]]
            allocation(layer)[free] = self.patterns[name].repeat(free.shape[1] // 2)
            self.num_filled += len(free)

    def forward_ends(self, step: Step) -> None: ...

    def committed(self, step: Step) -> None:
        for name in self.targets:
            slots, rejected = step.slots[name], step.rejected[name]
            self.written[name][slots[slots >= 0]] = True
            self.written[name][rejected[rejected >= 0]] = False
            if self.takes_one:
                self.written[name][slots[0]] = False
            self.num_rejected += len(rejected)
        self.steps.append(summary(step))

    def stop(self) -> dict[str, Any]:
        """Slots that were filled, and those of rejected drafts, summed over layers and
        steps; steps by graph mode."""
        self.probe.observers = []
        return {
            "num_filled": self.num_filled,
            "num_rejected": self.num_rejected,
            "graphs": dict(Counter(step["graph"] for step in self.steps)),
        }


@contextmanager
def unwritten_blocks(
    scheduler: Any, forget: Callable[[list[int]], Any]
) -> Iterator[None]:
    """`forget` is called with the blocks that a step is given, before it runs: nobody
    has written them any more."""
    pool = scheduler.kv_cache_manager.block_pool
    get_new_blocks = pool.get_new_blocks

    def giving(*args: Any, **kwargs: Any) -> Any:
        blocks = get_new_blocks(*args, **kwargs)
        forget([block.block_id for block in blocks])
        return blocks

    with mock.patch.object(pool, "get_new_blocks", giving):
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
