#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes per second of log and restore, against the device's own copy of as many bytes.

    python bench_kernels.py --device cuda
    python bench_kernels.py --device cpu --max-size 4M --json bench-out/kernels.json

Rates count bytes read and bytes written. Caches are cold (benchmarks/kernel_cases.py
says how), warm-up is not counted, the operations take turns within a sample, and the
spread is that of the samples (10th to 90th percentile). It prints the environment
first, then a check of every byte, then numbers. What it does not do: measure an engine
(bench_vllm.py does).

Exit status: 0 done; 1 an op copied wrongly, or the library is not there; 2 a bad
argument, nothing was written.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from benchmarks import environment
from benchmarks.arguments import file_to_write, rule, whole
from benchmarks.files import write_json

PROGRAM = "bench_kernels.py"
ROOT = Path(__file__).resolve().parent
MIN_SIZE, SIZE_STEP = 4 << 10, 4
DEFAULT_MAX_SIZE = {"cpu": 16 << 20, "cuda": 512 << 20}
DEFAULT_SAMPLES = {"cpu": 15, "cuda": 40}
OURS = ("log", "restore")
WARM_UP_SAMPLES = 3
# What stands for the last cache where the system does not say: larger than most.
CPU_CACHE_BYTES = 64 << 20


def num_bytes_of(text: str) -> int:
    """Bytes of "4K", "512M", "1000". Raises ValueError."""
    digits = text.rstrip("KMG")
    return int(digits) << 10 * ["", "K", "M", "G"].index(text[len(digits) :])


text = f"{MIN_SIZE} or more, with K, M or G behind it or without"
size = rule(num_bytes_of, lambda value: value >= MIN_SIZE, text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The checked command line; ends the process with 2 if it is bad."""
    text = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=PROGRAM, description=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    text = "of what a launch copies; default 512M, on the CPU 16M"
    parser.add_argument("--max-size", type=size, metavar="SIZE", help=text)
    parser.add_argument("--samples", type=whole(3), help="default 40, on the CPU 15")
    text = "where to write, whole or not at all"
    parser.add_argument("--json", type=file_to_write(".json"), help=text)
    options = parser.parse_args(arguments)
    options.max_size = options.max_size or DEFAULT_MAX_SIZE[options.device]
    options.samples = options.samples or DEFAULT_SAMPLES[options.device]
    return options


def sizes(largest: int) -> list[int]:
    """From MIN_SIZE in steps to the largest, which is always the last."""
    steps = (MIN_SIZE * SIZE_STEP**power for power in range(99))
    return sorted({*(step for step in steps if step < largest), largest})


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """The environment, with what matters for kernels."""
    import torch

    found = environment.describe(options.device, ROOT)
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["multiprocessors"] = properties.multi_processor_count
        found["cache_bytes"] = properties.L2_cache_size
    else:
        found["threads"] = torch.get_num_threads()
        found["cache_bytes"] = CPU_CACHE_BYTES
    return found


def measure(options: argparse.Namespace, cache_bytes: int) -> dict[str, Any]:
    """Checks every case, then measures it; prints a line for each. Raises CheckFailed
    if an op copied wrongly."""
    import torch
    from benchmarks import kernel_cases

    device = torch.device(options.device)
    # Twice the cache; read, so that no write-back is left to the next sample.
    flush = torch.ones(cache_bytes // 2, dtype=torch.int32, device=device)

    def make(layout: str, num_bytes: int) -> kernel_cases.Case:
        case = kernel_cases.Case(layout, num_bytes, device, cache_bytes)
        case.check()
        return case

    for layout in kernel_cases.LAYOUTS:
        make(layout, 1 << 20)
    print("check: every byte of a log and a restore is right, in each layout")
    found: dict[str, Any] = {"check": "passed", "results": []}
    for layout in kernel_cases.LAYOUTS:
        for num_bytes in sizes(options.max_size):
            case = make(layout, num_bytes)
            timers = {name: case.timer(name, flush) for name in kernel_cases.OPERATIONS}
            samples = timed(timers, options.samples)
            names = ("num_drafts", "num_layers", "num_sets")
            about = {"layout": layout, "bytes": case.num_bytes}
            about |= {name: getattr(case, name) for name in names}
            result = about | statistics_of(samples, case.num_bytes)
            found["results"].append(result)
            print(line(result), flush=True)
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


def line(result: dict[str, Any]) -> str:
    """A result in words: medians, and ratios to the copy with their spread."""
    rates = result["gb_per_s"]
    text = (
        f"{result['layout']:6} {result['bytes'] / 1024:8.0f} KiB, "
        f"{result['num_drafts']:4} drafts, {result['num_layers']:2} layers: "
        f"copy {rates['copy']:6.1f} GB/s"
    )
    for name in OURS:
        of_copy = "{:.2f} [{:.2f}, {:.2f}]".format(*result[f"{name}_of_copy"])
        text += f"; {name} {rates[name]:6.1f} GB/s, {of_copy}"
    return f"{text} of copy"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)

    import torch
    from benchmarks.kernel_cases import CheckFailed

    from vllm_nwor import ops

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{PROGRAM}: --device is cuda; torch sees no GPU here", file=sys.stderr)
        return 2
    try:
        ops.load(options.device)
        found: dict[str, Any] = {
            "kind": "bench_kernels",
            "command": shlex.join(["python", PROGRAM, *arguments]),
            "environment": describe(options),
            "warnings": environment.warnings(options.device),
        }
        for name, value in found["environment"].items():
            print(f"{name}: {value}")
        for warning in found["warnings"]:
            print(f"warning: {warning}")
        found |= measure(options, found["environment"]["cache_bytes"])
    except (ops.NworOpsUnavailable, CheckFailed) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
