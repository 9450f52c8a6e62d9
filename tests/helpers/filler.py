# SPDX-License-Identifier: Apache-2.0
"""Fills the slots that no request has written before each forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.helpers.byte_map import allocation, slot_bytes
from tests.helpers.runner_probe import Observer, RunnerProbe, Step


class Filler(Observer):
    """From `fill` to `stop`: fills the unwritten slots of the target's layers before
    each forward, with those of rejected drafts. written: all other slots. `forget`
    marks blocks that a request newly gets (`unwritten_blocks`). NWOR is off."""

    def __init__(self, runner: Any) -> None:
        self.probe = RunnerProbe(runner)
        self.targets = self.probe.target_layers()

    def fill(self, contents: str, takes_one: bool) -> None:
        """contents: "poison" (NWOR's) or "nan". takes_one: each step's first slot is
        filled, too, although it is written."""
        self.probe.observers, self.probe.steps = [self], []
        self.takes_one = takes_one
        self.num_filled = self.num_rejected = 0
        self.graphs: Counter[str] = Counter()
        self.written: dict[str, torch.Tensor] = {}
        self.patterns: dict[str, torch.Tensor] = {}
        # Groups may share memory; a block is one group's at a time.
        by_cache: dict[int, torch.Tensor] = {}
        for name, layer in self.targets.items():
            cache = layer.kv_cache
            none = cache.new_zeros(len(slot_bytes(layer)), dtype=torch.bool)
            self.written[name] = by_cache.setdefault(cache.data_ptr(), none)
            self.patterns[name] = pattern_of(layer, contents)

    def forget(self, blocks: list[int]) -> None:
        """Marks `blocks` as unwritten."""
        groups = self.probe.runner.kv_cache_config.kv_cache_groups
        for name, written in self.written.items():
            size = groups[self.probe.group_of[name]].kv_cache_spec.block_size
            written.view(-1, size)[blocks] = False

    def forward_begins(self, step: Step) -> None:
        for name, layer in self.targets.items():
            free = slot_bytes(layer)[~self.written[name]]
            allocation(layer)[free] = self.patterns[name].repeat(free.shape[1] // 2)
            self.num_filled += len(free)

    def committed(self, step: Step) -> None:
        for name in self.targets:
            slots, rejected = step.slots[name], step.rejected[name]
            self.written[name][slots[slots >= 0]] = True
            self.written[name][rejected[rejected >= 0]] = False
            if self.takes_one:
                self.written[name][slots[0]] = False
            self.num_rejected += len(rejected)
        self.graphs[step.graph] += 1

    def stop(self) -> dict[str, Any]:
        """Filled slots and rejected drafts' slots, summed over layers and steps; steps
        by graph mode."""
        self.probe.observers = []
        return {
            "num_filled": self.num_filled,
            "num_rejected": self.num_rejected,
            "graphs": dict(self.graphs),
        }


@contextmanager
def unwritten_blocks(
    scheduler: Any, forget: Callable[[list[int]], Any]
) -> Iterator[None]:
    """Calls `forget` with the blocks that a step is given, before it runs."""
    pool = scheduler.kv_cache_manager.block_pool
    get_new_blocks = pool.get_new_blocks

    def giving(*args: Any, **kwargs: Any) -> Any:
        blocks = get_new_blocks(*args, **kwargs)
        forget([block.block_id for block in blocks])
        return blocks

    with mock.patch.object(pool, "get_new_blocks", giving):
        yield


def pattern_of(layer: Any, contents: str) -> torch.Tensor:
    """[2] uint8, device: the bytes to fill with. See `Filler.fill`."""
    from vllm_nwor.hooks.layers import _poison

    # A NaN as bf16, fp8 and fp32 (scales of integers, which have none themselves).
    pattern = (0xFF, 0x7F)
    if contents == "poison":
        pattern = (_poison(layer.impl, layer.kv_cache),) * 2
    return torch.tensor(pattern, dtype=torch.uint8, device=layer.kv_cache.device)
