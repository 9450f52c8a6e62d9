# SPDX-License-Identifier: Apache-2.0
"""The cells of `make gpu-bench` (cells.yml): one engine each, at several batch sizes.

A cell is a list of arguments of bench_vllm.py, and for one cell a variable, so that any
of its results can be had again by that program alone. vLLM fixes the synthetic
acceptance of an engine when it starts: two acceptances are two cells. Drafts come from
an EAGLE head with random weights, which proposes all k of them in every step, on both
model runners, unless a cell says otherwise.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_READ = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
RATES = _READ["rates"]


@dataclass(frozen=True)
class Cell:
    """One engine. name: of its results' files. batches: batch sizes, run in this order.
    true_off: how often an engine that never loaded NWOR is started before it, at its
    first batch size; the last is compared. Whoever compiles first gets fewer KV blocks:
    only after a second start is their number compared too.
    metrics: whether NWOR counts for Prometheus (VLLM_NWOR_EMIT_METRICS). block_size:
    tokens a KV block; 0 for vLLM's choice. against: what is compared with an unhooked
    engine."""

    name: str
    runner: str
    num_drafts: int
    acceptance: int
    method: str = "eagle"
    batches: Sequence[int] = (1, 16, 64)
    context: int = 256
    max_tokens: int = 128
    max_num_seqs: int = 64
    true_off: int = 0
    metrics: bool = True
    block_size: int = 0
    against: str = "stage"

    def variables(self) -> dict[str, str]:
        """What the environment must have, beside what bench_vllm.py sets."""
        return {} if self.metrics else {"VLLM_NWOR_EMIT_METRICS": "0"}

    def arguments(self, batch_size: int) -> list[str]:
        """Arguments of bench_vllm.py for one batch size."""
        options = {
            "--against": self.against,
            "--runner": self.runner,
            "--num-speculative-tokens": self.num_drafts,
            "--acceptance": RATES[self.num_drafts][self.acceptance],
            "--batch-size": batch_size,
            "--max-num-seqs": self.max_num_seqs,
            "--context": self.context,
            "--max-tokens": self.max_tokens,
        }
        options |= {"--block-size": self.block_size} if self.block_size else {}
        words = [_READ["common"], _READ["drafters"][self.method]]
        words += [f"{name} {value}" for name, value in options.items()]
        words.append("--true-off" if self.true_off else "--no-true-off")
        return " ".join(words).split()


CELLS = tuple(Cell(name, **fields) for name, fields in _READ["cells"].items())
BY_NAME = {cell.name: cell for cell in CELLS}
BUDGETED = tuple(cell.name for cell in CELLS[:5])


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a program with this docstring, whose argument CELL is a name in BY_NAME."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    text = ", ".join(BY_NAME)
    made.add_argument("cell", choices=BY_NAME, metavar="CELL", help=text)
    return made
