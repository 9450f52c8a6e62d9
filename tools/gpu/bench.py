#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs cells of cells.py: one engine for all batch sizes of a cell.

    python tools/gpu/bench.py v2-k4-a70 --results results --seconds 70

does what `python bench_vllm.py` does with each batch size's arguments, and writes what
it would write, to RESULTS/bench_gpu_CELL_bN.json, without starting the engine anew for
each: an 8B engine takes longer to start than to measure. Pairs are added until their
intervals are narrow enough or `--seconds` are over; the file says which it was. No
batch size has fewer than the fewest pairs that bench_vllm.py allows.

Exit status: 0 done; 1 outputs differ or vLLM does not run; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import ab, device, environment, prompts, report  # noqa: E402
from benchmarks.arguments import MIN_PAIRS, BadArgument, Options, parse  # noqa: E402
from benchmarks.engine import Engine, EngineFailed  # noqa: E402
from benchmarks.files import recorded, write_json  # noqa: E402
from benchmarks.process import leave  # noqa: E402
from benchmarks.settings import prepare_process  # noqa: E402

import bench_vllm  # noqa: E402
from tools.gpu import cells  # noqa: E402


def use(engine: Engine, options: Options) -> None:
    """Makes a running engine serve the requests of `options`."""
    engine.options = options
    engine.waves = engine._encode(prompts.read(options.prompts))


def most_pairs(engine: Engine, options: Options, seconds: float) -> int:
    """Pairs of each name that fit into `seconds`, from the second of two runs; at least
    the fewest that are allowed, at most --max-pairs."""
    engine.run(ab.UNHOOKED)
    started = time.perf_counter()
    engine.run(ab.UNHOOKED)
    round_s = (time.perf_counter() - started) * ab.runs_a_round(
        bench_vllm.arms_of(options)
    )
    return max(MIN_PAIRS, min(int(seconds / round_s), options.max_pairs))


def measure(
    engine: Engine,
    argv: Sequence[str],
    options: Options,
    seconds: float,
    env: dict[str, Any],
    true_off: dict[str, Any] | None,
) -> dict[str, Any]:
    """One batch size: what bench_vllm.bench returns."""
    use(engine, options)
    pairs_allowed = most_pairs(engine, options, seconds)
    found = bench_vllm.compare(engine, options, true_off, pairs_allowed)
    result = bench_vllm.base_result(options, argv, engine, env)
    result["warnings"] = environment.warnings("cuda")
    return result | found


def run_cell(cell: cells.Cell, results: Path, seconds: float) -> list[Path]:
    """Starts the cell's engine and measures each batch size; returns the files."""
    argvs = {batch: cell.arguments(batch) for batch in cell.batches}
    options = {batch: parse(argv) for batch, argv in argvs.items()}
    first = cell.batches[0]
    os.environ.update(cell.variables())
    on = device.resolve(options[first])
    true_off: dict[str, Any] | None = None
    for _ in range(cell.true_off):
        true_off = bench_vllm.run_true_off(argvs[first])
    if true_off is not None and cell.true_off == 1:
        true_off["engine"]["kv_blocks"] = None
    prepare_process(options[first], on)
    bench_vllm.note(f"{cell.name}: starting vLLM")
    largest = Options(**vars(options[first]) | {"batch_size": max(cell.batches)})
    engine = Engine(largest, on)
    bench_vllm.note(f"{cell.name}: started in {engine.start_s:.0f} s")
    env = environment.describe(on, ROOT)
    written = []
    for batch in cell.batches:
        result = measure(
            engine,
            argvs[batch],
            options[batch],
            seconds,
            env,
            true_off if batch == first else None,
        )
        settings = [f"{name}={value}" for name, value in cell.variables().items()]
        command = " ".join([*settings, result["command"]])
        result = recorded(result | {"cell": cell.name, "command": command})
        name = environment.of_release(f"bench_gpu_{cell.name}_b{batch}", env)
        path = results / f"{name}.json"
        write_json(path, result)
        written.append(path)
        print(f"--- {cell.name}, batch {batch}: {path.name}")
        print(report.text(result), flush=True)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cells.add_cell(parser)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument(
        "--seconds", type=float, default=70.0, help="for each batch size (70)"
    )
    arguments = parser.parse_args(argv)
    cell = cells.BY_NAME[arguments.cell]
    try:
        run_cell(cell, arguments.results, arguments.seconds)
    except BadArgument as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except (ab.OutputsDiffer, EngineFailed) as error:
        print(f"bench.py: {cell.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
