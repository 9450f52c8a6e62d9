# SPDX-License-Identifier: Apache-2.0
"""The cells of `make gpu-bench`: one engine each, run at several batch sizes.

A cell is a list of arguments of bench_vllm.py, and for one cell a variable, so that any
of its results can be had again by that program alone. vLLM fixes the synthetic
acceptance of an engine when it starts: two acceptances are two cells. Drafts come from
an EAGLE head with random weights, which proposes all k of them in every step, on both
model runners. `v1-ngram` has a drafter that costs nothing, on an engine that is not
asynchronous: all of the host's time is in a step's way there.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

BATCHES = (1, 16, 64)
MAX_NUM_SEQS = 64
# vLLM's own default on an H100, which sizes the undo log.
DEFAULT_NUM_SEQS = 1024

# Share of windows that accept each draft position; their mean is the acceptance.
RATES = {
    (4, "0"): "0,0,0,0",
    (4, "30"): "0.6,0.3,0.2,0.1",
    (4, "70"): "0.9,0.78,0.62,0.5",
    (4, "100"): "1,1,1,1",
    (8, "50"): "0.9,0.78,0.64,0.5,0.4,0.32,0.26,0.2",
}
_COMMON = (
    *("--mode", "compare", "--device", "cuda"),
    *("--model", "shape:llama-8b", "--ignore-eos"),
    *("--repeats", "11", "--pairs-until-ci", "0.002", "--max-pairs", "200"),
)
_EAGLE = ("--method", "eagle", "--draft-model", "shape:llama-8b-eagle")


@dataclass(frozen=True)
class Cell:
    """One engine. name: of its results' files. batches: batch sizes, run in this order.
    true_off: how often an engine that never loaded NWOR is started before it, at its
    first batch size; the last is compared. Whoever compiles first gets fewer KV blocks:
    only after a second start is their number compared too.
    metrics: whether NWOR counts for Prometheus (VLLM_NWOR_EMIT_METRICS). against: what
    is compared with an unhooked engine."""

    name: str
    runner: str
    num_drafts: int
    acceptance: str
    drafter: tuple[str, ...] = _EAGLE
    batches: tuple[int, ...] = BATCHES
    context: int = 256
    max_tokens: int = 128
    max_num_seqs: int = MAX_NUM_SEQS
    true_off: int = 0
    metrics: bool = True
    against: str = "stage"

    def variables(self) -> dict[str, str]:
        """What the environment must have, beside what bench_vllm.py sets."""
        return {} if self.metrics else {"VLLM_NWOR_EMIT_METRICS": "0"}

    def arguments(self, batch_size: int) -> list[str]:
        """Arguments of bench_vllm.py for one batch size."""
        return [
            *_COMMON,
            *self.drafter,
            *("--against", self.against),
            *("--runner", self.runner),
            *("--num-speculative-tokens", str(self.num_drafts)),
            *("--acceptance", RATES[self.num_drafts, self.acceptance]),
            *("--batch-size", str(batch_size)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--context", str(self.context)),
            *("--max-tokens", str(self.max_tokens)),
            "--true-off" if self.true_off else "--no-true-off",
        ]


_NGRAM = ("--method", "ngram")

# The five that the budgets in the design are held against, then those that show what
# does not change them.
CELLS = (
    # Once a session: is an engine without hooks as fast as one that never had any?
    Cell("v2-k4-a70", "v2", 4, "70", true_off=1),
    Cell("v2-k4-a30", "v2", 4, "30"),
    Cell("v2-k8-a50", "v2", 8, "50"),
    Cell("v1-k4-a70", "v1", 4, "70"),
    Cell("v1-k4-a30", "v1", 4, "30"),
    Cell("v1-ngram-k4-a70", "v1", 4, "70", drafter=_NGRAM),
    Cell("v1-ngram-no-metrics", "v1", 4, "70", drafter=_NGRAM, metrics=False),
    Cell(
        "v2-default-seqs",
        *("v2", 4, "70"),
        batches=(16,),
        max_num_seqs=DEFAULT_NUM_SEQS,
        true_off=2,
    ),
    Cell("v2-context-8192", "v2", 4, "70", batches=(16,), context=8192),
    Cell("v2-k4-a0", "v2", 4, "0", batches=(16,)),
    Cell("v2-k4-a100", "v2", 4, "100", batches=(16,)),
    # The KV audit alone.
    *(
        Cell(f"v2-audit-context-{n}", "v2", 4, "70", context=n, against="audit")
        for n in (256, 2048, 8192)
    ),
)
BY_NAME = {cell.name: cell for cell in CELLS}
BUDGETED = tuple(cell.name for cell in CELLS[:5])


def add_cell(parser: argparse.ArgumentParser) -> None:
    """The argument CELL: a name in BY_NAME."""
    parser.add_argument(
        "cell", choices=sorted(BY_NAME), metavar="CELL", help=", ".join(BY_NAME)
    )
