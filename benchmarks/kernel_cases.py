# SPDX-License-Identifier: Apache-2.0
"""The buffers, the check and the timed calls of bench_kernels.py.

A `Case` is one layout at one size. Its calls rotate over several sets of drafts whose
bytes are disjoint, in blocks drawn at random, so that no call finds its bytes in a
cache; a read of a large buffer before each sample drives out what the last one left.
Beside log and restore each set has a plain copy of as many bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_nwor import ops

OPERATIONS = ("copy", "log", "restore")
# Heads of a slot that lie apart: 8 of K and V of 128 bfloat16 each, as in an 8B model.
LAYOUTS = {"nhd": 1, "hnd": 8}
DRAFTS_PER_WINDOW = 4
BLOCK_SIZE, SLOT_BYTES = 16, 4096
MAX_LAYERS = 32
MIN_SETS, MAX_SETS = 2, 32
POISON = 0xA5


class CheckFailed(Exception):
    """An op copied wrongly: no number is worth printing. The message says where."""


def random_bytes(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=device).random_(256)


@dataclass(frozen=True)
class DraftSet:
    """The arguments of one rotation: drafts, their log, and the buffers of the copy."""

    slots: Tensor
    log: tuple[Tensor, Tensor, Tensor]
    metadata: tuple[Tensor, Tensor, Tensor]
    num_rejected: Tensor
    copy_from: Tensor
    copy_to: Tensor


class Case:
    """num_layers x num_drafts slots of a layout, in several sets, on a device: rows, as
    all CUDA backends have them."""

    def __init__(
        self, layout: str, num_bytes: int, device: torch.device, cache_bytes: int
    ) -> None:
        """layout: one of LAYOUTS. num_bytes: to be saved by one log; the nearest whole
        number of drafts is taken. cache_bytes: size of the device's last cache."""
        torch.manual_seed(0)
        self.layout, self.device = layout, device
        self.num_layers = max(1, min(MAX_LAYERS, num_bytes // SLOT_BYTES))
        of_draft = self.num_layers * SLOT_BYTES
        self.num_drafts = max(1, round(num_bytes / of_draft))
        self.num_bytes = self.num_drafts * of_draft
        num_sets = -(-cache_bytes // self.num_bytes)
        self.num_sets = max(MIN_SETS, min(MAX_SETS, num_sets))
        windows = -(-self.num_drafts // DRAFTS_PER_WINDOW)
        num_blocks = windows * self.num_sets
        num_heads = LAYOUTS[layout]
        run_bytes = SLOT_BYTES // num_heads
        shape = (self.num_layers, num_blocks, num_heads, BLOCK_SIZE, run_bytes)
        # [layer, block, head, slot of the block, byte]
        self.cache = random_bytes(*shape, device=device)
        strides = (BLOCK_SIZE * SLOT_BYTES, run_bytes, BLOCK_SIZE * run_bytes)
        columns = (*strides, num_heads, run_bytes, BLOCK_SIZE, num_blocks)
        rows = [
            [layer.data_ptr(), *columns, number * SLOT_BYTES]
            for number, layer in enumerate(self.cache)
        ]
        self.table = torch.tensor(rows, device=device)
        num_counters = len(ops.COUNTER_COLUMNS)
        self.counters = torch.zeros(num_counters, dtype=torch.int64, device=device)
        blocks = torch.randperm(num_blocks).view(self.num_sets, windows)
        self.sets = [self._make_set(of_set) for of_set in blocks]

    def _make_set(self, blocks: Tensor) -> DraftSet:
        drafts, device = self.num_drafts, self.device
        windows = blocks.numel()
        # A window's slots follow one another from a random place in its block.
        first = torch.randint(BLOCK_SIZE - DRAFTS_PER_WINDOW, (windows,))
        slots = (blocks * BLOCK_SIZE + first)[:, None]
        slots = (slots + torch.arange(DRAFTS_PER_WINDOW)).flatten()[:drafts]
        request = torch.arange(drafts) // DRAFTS_PER_WINDOW
        mapping = torch.full((drafts + windows,), -1)
        mapping[torch.arange(drafts) + request + 1] = slots
        num_rejected = torch.bincount(request)
        cumulative = (num_rejected + 1).cumsum(0)
        row_bytes = self.num_layers * SLOT_BYTES
        log = torch.full((drafts, row_bytes), POISON, dtype=torch.uint8, device=device)
        return DraftSet(
            slots,
            (
                log,
                torch.zeros(drafts, dtype=torch.int64, device=device),
                torch.zeros(drafts, 3, dtype=torch.int32, device=device),
            ),
            (
                mapping.to(device),
                torch.arange(mapping.numel(), dtype=torch.int32, device=device),
                cumulative.int().to(device),
            ),
            num_rejected.int().to(device),
            random_bytes(self.num_bytes, device=device),
            torch.zeros(self.num_bytes, dtype=torch.uint8, device=device),
        )

    def call(self, operation: str, number: int) -> None:
        """One of OPERATIONS on set `number`; restore: every draft is rejected."""
        of = self.sets[number]
        if operation == "copy":
            of.copy_to.copy_(of.copy_from)
        elif operation == "log":
            log = (*of.metadata, *of.log, self.num_drafts)
            ops.log_cache_slots(self.table, None, *log)
        else:
            ops.restore_rejected_drafts(
                *(self.table, None, *of.log, None, 0, of.num_rejected),
                *(self.counters, self.num_drafts),
            )

    def check(self) -> None:
        """Logs, overwrites and restores every set, against indexing in PyTorch; leaves
        all logs filled.

        Raises:
            CheckFailed: a byte differs.
        """
        for number, of in enumerate(self.sets):
            slots = of.slots.to(self.device)
            index = (slice(None), slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE)
            # [draft, layer, head, byte]
            old = self.cache[index]
            where = f"{self.layout}, {self.num_bytes} bytes, set {number}"
            self.call("log", number)
            if not torch.equal(of.log[0], old.flatten(1)):
                raise CheckFailed(f"log_cache_slots saved other bytes ({where})")
            wanted = self.cache.clone() if number == 0 else None
            self.cache[index] = 255 - old
            self.call("restore", number)
            if not torch.equal(self.cache[index], old):
                raise CheckFailed(f"a rejected draft's bytes are not back ({where})")
            if wanted is not None and not torch.equal(self.cache, wanted):
                raise CheckFailed(f"a byte of another slot changed ({where})")
            del old, wanted

    def timer(self, operation: str, flush: Tensor) -> Callable[[], float]:
        """A function that returns the seconds of one call, the mean over one rotation.
        flush: [n] int32, device: read before."""

        def rotation() -> None:
            for number in range(self.num_sets):
                self.call(operation, number)

        def on_cpu() -> float:
            flush.sum()
            start = time.perf_counter()
            rotation()
            return (time.perf_counter() - start) / self.num_sets

        if self.device.type == "cpu":
            return on_cpu
        # Replays a graph of the rotation: no time of the host is in it.
        rotation()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rotation()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def on_cuda() -> float:
            flush.sum()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / self.num_sets

        return on_cuda
