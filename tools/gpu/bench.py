#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs cells of cells.yml: one engine for all batch sizes of a cell.

    python tools/gpu/bench.py v2-k4-a70 --results results --seconds 70

does what `python bench_vllm.py` does with each batch size's arguments, and appends the
line that it would append, to RESULTS/throughput.jsonl, without another start of the
engine, which takes longer than to measure. Pairs are added until their intervals are
narrow enough or `--seconds` are over; the line says which it was. Other arguments are
bench_vllm.py's, for all batch sizes.

A cell is a list of arguments of bench_vllm.py. vLLM fixes the synthetic acceptance of
an engine when it starts: two acceptances are two cells. Drafts come from an EAGLE head
with random weights, which proposes all k of them, unless a cell says otherwise.

Exit status: 0 done; 1 outputs differ or vLLM does not run; 2 a bad argument.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import ab, environment, records, report  # noqa: E402
from benchmarks.arguments import MIN_PAIRS, BadArgument, Options, parse  # noqa: E402
from benchmarks.engine import Engine, EngineFailed  # noqa: E402
from benchmarks.files import recorded  # noqa: E402
from benchmarks.settings import device_for, leave, prepare_process  # noqa: E402

import bench_vllm  # noqa: E402

_READ = yaml.safe_load(Path(__file__).with_name("cells.yml").read_bytes())
RATES = _READ["rates"]
Batches = Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class Cell:
    """One engine. name: in the keys of its results. acceptance: of RATES, per cent.
    model, context: bench_vllm.py's; "" and 0: its own. batches: batch sizes, in this
    order. true_off: how often an engine that never loaded NWOR is started before it, at
    its first batch size; the last is compared. Whoever compiles first gets fewer KV
    blocks: their number is compared only after a second start. block_size: in tokens;
    0: vLLM's. cached: --cached-prompts. connector: its kv_transfer_config. against:
    what is compared with an unhooked one."""

    name: str
    runner: str
    num_drafts: int
    acceptance: int
    method: str = "eagle"
    model: str = "shape:llama-8b"
    batches: Sequence[int] = (1, 16, 64)
    context: int = 256
    max_tokens: int = 256
    max_num_seqs: int = 64
    true_off: int = 0
    block_size: int = 0
    cached: bool = False
    connector: Mapping[str, Any] | None = None
    against: str = "stage"

    def arguments(self, batch_size: int) -> list[str]:
        """Arguments of bench_vllm.py for one batch size."""
        options = {
            "--model": self.model,
            "--against": self.against,
            "--runner": self.runner,
            "--num-speculative-tokens": self.num_drafts,
            "--acceptance": RATES[self.num_drafts][self.acceptance],
            "--batch-size": batch_size,
            "--max-num-seqs": self.max_num_seqs,
            "--context": self.context,
            "--max-tokens": self.max_tokens,
            "--block-size": self.block_size,
        }
        words = [_READ["common"], _READ["drafters"][self.method]]
        words += [f"{name} {value}" for name, value in options.items() if value]
        words.append("--true-off" if self.true_off else "--no-true-off")
        words += ["--cached-prompts"] * self.cached
        more = ["--kv-transfer-config", json.dumps(self.connector)]
        return " ".join(words).split() + more * bool(self.connector)


CELLS = tuple(Cell(name, **fields) for name, fields in _READ["cells"].items())
BY_NAME = {cell.name: cell for cell in CELLS}
BUDGETED = tuple(cell.name for cell in CELLS[:5])


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a program with this docstring; CELL is a name in BY_NAME."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("cell", choices=BY_NAME, metavar="CELL", help=", ".join(BY_NAME))
    return made


def most_pairs(engine: Engine, options: Options, seconds: float) -> int:
    """Pairs of each name that fit into `seconds`, from the second of two runs; at least
    the fewest that are allowed, at most --max-pairs."""
    engine.run(ab.UNHOOKED)
    started = time.perf_counter()
    engine.run(ab.UNHOOKED)
    num_runs = ab.runs_a_round(bench_vllm.arms_of(options))
    round_s = (time.perf_counter() - started) * num_runs
    return max(MIN_PAIRS, min(int(seconds / round_s), options.max_pairs))


def start(options: Options, most: int) -> tuple[Engine, dict[str, Any]]:
    """An engine for batches of up to `most`, and environment.describe."""
    on = device_for(options)
    prepare_process(options, on)
    engine = Engine(Options(**vars(options) | {"batch_size": most}), on)
    return engine, environment.describe(on, ROOT)


def run_cell(cell: Cell, results: Path, seconds: float, argvs: Batches) -> None:
    """Starts the cell's engine and measures these batch sizes, by their arguments."""
    first, *_ = options = {batch: parse(argv) for batch, argv in argvs.items()}
    true_off: dict[str, Any] | None = None
    for _ in range(cell.true_off):
        true_off = bench_vllm.run_true_off(argvs[first])
    if true_off is not None and cell.true_off == 1:
        true_off["engine"]["kv_blocks"] = None
    engine, about = start(options[first], max(cell.batches))
    bench_vllm.note(f"{cell.name}: started in {engine.start_s:.0f} s")
    for batch, asked in options.items():
        # The running engine serves the requests of these options.
        engine.options = asked
        engine.prompts = engine.encode()
        allowed = most_pairs(engine, asked, seconds)
        off = true_off if batch == first else None
        found = bench_vllm.compare(engine, asked, off, allowed)
        result = bench_vllm.base_result(asked, argvs[batch], engine, about)
        result["key"]["cell"] = cell.name
        result = recorded(result | {"warnings": environment.warnings("cuda"), **found})
        print(f"--- {cell.name}, batch {batch}")
        print(report.text(result), flush=True)
        records.append(results / "throughput.jsonl", result)


def run_of(cell: Cell, measure: Callable[[], None]) -> int:
    """Calls `measure`; the exit status."""
    try:
        measure()
    except (BadArgument, ab.OutputsDiffer, EngineFailed, records.BadRecord) as error:
        print(f"{Path(sys.argv[0]).name}: {cell.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--seconds", type=float, default=70.0, help="a batch size (70)")
    text = "batch sizes (all of the cell)"
    parser.add_argument("--batches", type=int, nargs="+", help=text, metavar="N")
    of, more = parser.parse_known_args(argv)
    cell = BY_NAME[of.cell]
    batches = of.batches or cell.batches
    if not set(batches) <= set(cell.batches):
        parser.error(f"--batches {batches}: allowed of {cell.name}: {cell.batches}")
    argvs = {batch: [*cell.arguments(batch), *more] for batch in batches}
    return run_of(cell, lambda: run_cell(cell, of.results, of.seconds, argvs))


if __name__ == "__main__":
    leave(main())
