#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes per second of log and restore, against the device's own copy of as many bytes.

    python bench_kernels.py --device cuda
    python bench_kernels.py --device cpu --max-kib 4096 --json bench-out/kernels.jsonl

Rates count bytes read and bytes written. Warm-up is not counted, the operations take
turns within a sample, and the spread is that of the samples (10th to 90th percentile).
A check of every byte comes first. bench_vllm.py measures an engine.

Caches are cold: calls rotate over several sets of drafts whose bytes are disjoint, in
blocks drawn at random, so that no call finds its bytes in a cache; a read of a large
buffer before each sample drives out what the last one left.

Exit status: 0 done; 1 an op copied wrongly, or the library is not there; 2 a bad
argument, nothing was written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from benchmarks import environment, records, report
from benchmarks.arguments import whole
from torch import Tensor

from vllm_nwor import ops

PROGRAM = "bench_kernels.py"
ROOT = Path(__file__).resolve().parent
MIN_KIB, SIZE_STEP = 4, 4
DEFAULT_MAX_KIB = {"cpu": 16 << 10, "cuda": 512 << 10}
DEFAULT_SAMPLES = {"cpu": 15, "cuda": 40}
OURS = ("log", "restore")
OPERATIONS = ("copy", *OURS)
WARM_UP_SAMPLES = 3
# What stands for the last cache where the system does not say: larger than most.
CPU_CACHE_BYTES = 64 << 20
# Heads of a slot that lie apart: 8 of K and V of 128 bfloat16 each, as in an 8B model.
LAYOUTS = {"nhd": 1, "hnd": 8}
DRAFTS_PER_WINDOW = 4
BLOCK_SIZE, SLOT_BYTES = 16, 4096
MAX_LAYERS = 32
COUNTS = ("drafts", "layers", "sets")
MIN_SETS, MAX_SETS = 2, 32
POISON = 0xA5


class CheckFailed(Exception):
    """An op copied wrongly: no number is worth printing. The message says where."""


def random_bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8).random_(256)


class DraftSet(NamedTuple):
    """One rotation. slots: of its drafts. log: their bytes, as logged. calls: of
    OPERATIONS on it; restore: every draft is rejected."""

    slots: Tensor
    log: Tensor
    calls: dict[str, Callable[[], object]]


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
        with device:  # tensors are made there
            self.cache = random_bytes(*shape)
            self.counters = torch.zeros(len(ops.COUNTER_COLUMNS), dtype=torch.int64)
        strides = (BLOCK_SIZE * SLOT_BYTES, run_bytes, BLOCK_SIZE * run_bytes)
        columns = (*strides, num_heads, run_bytes, BLOCK_SIZE, num_blocks)
        rows = [
            [layer.data_ptr(), *columns, number * SLOT_BYTES]
            for number, layer in enumerate(self.cache)
        ]
        self.table = torch.tensor(rows, device=device)
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
        with device:
            log = (
                torch.full((drafts, row_bytes), POISON, dtype=torch.uint8),
                torch.zeros(drafts, dtype=torch.int64),
                torch.zeros(drafts, 3, dtype=torch.int32),
            )
            rows = torch.arange(mapping.numel(), dtype=torch.int32)
            copied = random_bytes(self.num_bytes)
        metadata = (mapping.to(device), rows, cumulative.int().to(device))
        rejected = (None, 0, num_rejected.int().to(device), self.counters)
        of_log = (self.table, None, *metadata, *log, drafts, ops.NO_SHADOW)
        of_restore = (self.table, None, *log, *rejected, drafts)
        calls = {
            "copy": partial(torch.zeros_like(copied).copy_, copied),
            "log": partial(ops.log_cache_slots, *of_log),
            "restore": partial(ops.restore_rejected_drafts, *of_restore),
        }
        return DraftSet(slots, log[0], calls)

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
            of.calls["log"]()
            if not torch.equal(of.log, old.flatten(1)):
                raise CheckFailed(f"log_cache_slots saved other bytes ({where})")
            wanted = self.cache.clone() if number == 0 else None
            self.cache[index] = 255 - old
            of.calls["restore"]()
            if not torch.equal(self.cache[index], old):
                raise CheckFailed(f"a rejected draft's bytes are not back ({where})")
            if wanted is not None and not torch.equal(self.cache, wanted):
                raise CheckFailed(f"a byte of another slot changed ({where})")
            del old, wanted

    def timer(self, operation: str, flush: Tensor) -> Callable[[], float]:
        """A function that returns the seconds of one call, the mean over one rotation.
        flush: [n] int32, device: read before."""

        def rotation() -> None:
            for of in self.sets:
                of.calls[operation]()

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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The checked command line; ends the process with 2 if it is bad."""
    text = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=PROGRAM, description=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    text = "most KiB that a launch copies; default 524288, on the CPU 16384"
    parser.add_argument("--max-kib", type=whole(MIN_KIB), help=text)
    parser.add_argument("--samples", type=whole(3), help="default 40, on the CPU 15")
    text = "file to which a line with what was measured is appended"
    parser.add_argument("--json", type=Path, help=text)
    options = parser.parse_args(arguments)
    options.max_kib = options.max_kib or DEFAULT_MAX_KIB[options.device]
    options.samples = options.samples or DEFAULT_SAMPLES[options.device]
    return options


def sizes(largest: int) -> list[int]:
    """From MIN_KIB in steps to the largest, which is always the last."""
    steps = (MIN_KIB * SIZE_STEP**power for power in range(99))
    return sorted({*(step for step in steps if step < largest), largest})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Checks every case, then measures it. Raises CheckFailed if an op copied
    wrongly."""
    device, cache_bytes = torch.device(options.device), CPU_CACHE_BYTES
    if options.device == "cuda":
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    # Twice the cache; read, so that no write-back is left to the next sample.
    flush = torch.ones(cache_bytes // 2, dtype=torch.int32, device=device)
    found: dict[str, Any] = {"check": "passed", "results": []}
    for layout, kib in itertools.product(LAYOUTS, sizes(options.max_kib)):
        case = Case(layout, kib << 10, device, cache_bytes)
        case.check()
        timers = {name: case.timer(name, flush) for name in OPERATIONS}
        samples = timed(timers, options.samples)
        about = {"layout": layout, "bytes": case.num_bytes}
        about |= {f"num_{of}": vars(case)[f"num_{of}"] for of in COUNTS}
        found["results"].append(about | statistics_of(samples, case.num_bytes))
        print(f"{layout}, {case.num_bytes} bytes: checked, measured", flush=True)
        del case, timers
    return found


def timed(timers: dict[str, Any], num_samples: int) -> dict[str, list[float]]:
    """Seconds of each sample; each operation comes first equally often."""
    names = list(timers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_SAMPLES + num_samples):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(timers[name]())
    return {name: found[WARM_UP_SAMPLES:] for name, found in samples.items()}


def statistics_of(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """GB/s (read and written) of the median sample, and, as NAME_of_copy, each sample's
    ratio to the copy: the median, the 10th and the 90th percentile."""
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    rates = {name: 2 * num_bytes / median / 1e9 for name, median in medians.items()}
    found: dict[str, Any] = {"gb_per_s": rates}
    for name in OURS:
        ratios = numpy.divide(seconds["copy"], seconds[name])
        found[f"{name}_of_copy"] = numpy.quantile(ratios, (0.5, 0.1, 0.9)).tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{PROGRAM}: --device is cuda; torch sees no GPU here", file=sys.stderr)
        return 2
    try:
        ops.load(options.device)
        found = environment.describe(options.device, ROOT)
        found["command"] = shlex.join(["python", PROGRAM, *arguments])
        found["warnings"] = environment.warnings(options.device)
        print(json.dumps(found, indent=1))
        machine = found["machine"]
        found["key"] = {"device": machine.get("gpu", machine["cpu"])}
        found |= measure(options)
    except (ops.NworOpsUnavailable, CheckFailed) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(report.rendered("kernels", [found]))
    if options.json:
        records.append(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
