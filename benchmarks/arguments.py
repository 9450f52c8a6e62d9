# SPDX-License-Identifier: Apache-2.0
"""The command line of bench_vllm.py: its arguments, their defaults and their rules.

Everything that can be judged without vLLM is judged here, before anything is loaded or
written. A refusal is one sentence that names the argument, the value and what is
allowed; the process then ends with exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import values

PROGRAM = "bench_vllm.py"
COMPARE = "compare"
MODES = ("off", "nwor", "stage", "cow", COMPARE)
SIDES = ("nwor", "stage", "cow")
METHODS = (
    "ngram",
    "ngram_gpu",
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "suffix",
)
METHODS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
)
RUNNERS = ("auto", "v1", "v2")
ASYNC = ("auto", "on", "off")
MIN_PAIRS = 7
DEFAULT_RUNS = 3


class BadArgument(Exception):
    """An argument's value cannot be used; the message is a whole sentence."""


@dataclass(frozen=True)
class Options:
    """The command line, checked. `--help` says what each means."""

    mode: str
    against: str
    batch_size: int
    num_speculative_tokens: int
    method: str
    model: str | None
    draft_model: str | None
    prompts: Path | None
    max_tokens: int
    repeats: int
    acceptance: tuple[float, ...] | None
    temperature: float
    seed: int
    device: str
    json: Path | None
    plot: Path | None
    pairs_until_ci: float | None
    max_pairs: int
    load_format: str
    hf_overrides: dict[str, Any] | None
    max_model_len: int | None
    context: int | None
    enforce_eager: bool | None
    kv_cache_dtype: str
    gpu_memory_utilization: float | None
    max_num_seqs: int | None
    attention_backend: str | None
    async_scheduling: str
    runner: str
    tensor_parallel_size: int
    ignore_eos: bool
    true_off: bool
    keep_tokens: bool
    verbose: bool

    @property
    def nwor_mode(self) -> str:
        """The value of VLLM_NWOR_MODE for this command's engine."""
        mode = self.against if self.mode == COMPARE else self.mode
        return "stage" if mode == "nwor" else mode


class _Parser(argparse.ArgumentParser):
    """argparse without its usage text in front of an error."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser; `parse` adds the rules that concern several arguments."""
    p = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Speculative decoding with and without NWOR on real vLLM: the same "
        "requests, the outputs compared, then tokens a second, latency and what NWOR "
        "did. Without arguments: nwor against an unhooked engine, on SmolLM2 with "
        "built-in prompts.",
    )
    add = p.add_argument
    add(
        "--mode",
        type=values.one_of(MODES),
        default=COMPARE,
        help="off, nwor (the same as stage), stage, cow; or compare (default): "
        "--against against vLLM without our hooks, in one engine",
    )
    add(
        "--against",
        type=values.one_of(SIDES),
        default="nwor",
        help="what compare tests: nwor (default), stage or cow",
    )
    add("--batch-size", type=values.whole(1), default=4, help="requests at a time (4)")
    add(
        "--num-speculative-tokens",
        type=values.whole(1),
        default=4,
        help="drafts a step (4)",
    )
    add(
        "--method",
        type=values.one_of(METHODS),
        default="ngram",
        help=f"what makes the drafts: {', '.join(METHODS)} (ngram)",
    )
    add(
        "--model",
        help="target: a directory, a Hugging Face name, or shape:NAME for random "
        "weights (converted SmolLM2-135M-Instruct)",
    )
    add("--draft-model", help="the drafter's model, named as --model is")
    add(
        "--prompts",
        type=Path,
        help="prompts: .txt (paragraphs parted by empty lines), .json (a list of "
        'strings) or .jsonl (lines of {"prompt": ...}); built-in ones by default',
    )
    add(
        "--max-tokens",
        type=values.whole(1),
        default=64,
        help="most tokens of an answer (64)",
    )
    add(
        "--repeats",
        type=values.whole(1),
        help=f"counted pairs in compare (default and least: {MIN_PAIRS}), counted runs "
        f"in the other modes ({DEFAULT_RUNS})",
    )
    add(
        "--acceptance",
        type=values.rates,
        help="synthetic rejection sampling: the share of windows that accept each "
        "draft position, for example 0.8,0.6,0.4,0.2 (GPU only)",
    )
    add(
        "--temperature",
        type=values.number(0, 2, True),
        default=0.0,
        help="0 is greedy (0)",
    )
    add("--seed", type=values.whole(0), default=0, help="seed of every generator (0)")
    add(
        "--device", type=values.one_of(DEVICES), default="auto", help=", ".join(DEVICES)
    )
    add(
        "--json",
        type=values.file_to_write(".json"),
        help="write what was measured to this file",
    )
    add(
        "--plot",
        type=values.file_to_write(".png"),
        help="draw the pairs' ratios (compare)",
    )
    add(
        "--pairs-until-ci",
        type=values.number(0, 1, False),
        metavar="WIDTH",
        help="add pairs until both 90 %% intervals reach no farther than WIDTH from "
        "their medians, for example 0.005, or --max-pairs is reached",
    )
    add("--max-pairs", type=values.whole(MIN_PAIRS), default=60, help="see above (60)")
    add(
        "--load-format",
        type=values.one_of(LOAD_FORMATS),
        default="auto",
        help="auto, dummy",
    )
    add(
        "--hf-overrides",
        type=values.json_object,
        help="JSON object: changes of the config",
    )
    add(
        "--max-model-len",
        type=values.whole(1),
        help="vLLM's, longest request in tokens",
    )
    add(
        "--context",
        type=values.whole(1),
        help="make every prompt this many tokens long",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="no compilation, no CUDA graphs (yes on cpu, no on cuda)",
    )
    add(
        "--kv-cache-dtype",
        type=values.one_of(KV_CACHE_DTYPES),
        default="auto",
        help=", ".join(KV_CACHE_DTYPES),
    )
    add("--gpu-memory-utilization", type=values.number(0, 1, False), help="vLLM's")
    add(
        "--max-num-seqs",
        type=values.whole(1),
        help="vLLM's; sizes the log (batch size)",
    )
    add("--attention-backend", help="vLLM's, for example FLASH_ATTN or TRITON_ATTN")
    add(
        "--async-scheduling",
        type=values.one_of(ASYNC),
        default="auto",
        help="auto, on, off",
    )
    add(
        "--runner",
        type=values.one_of(RUNNERS),
        default="auto",
        help="vLLM's model runner on cuda: auto, v1, v2",
    )
    add("--tensor-parallel-size", type=values.whole(1), default=1, help="GPUs (1)")
    add("--ignore-eos", action="store_true", help="always make --max-tokens tokens")
    add(
        "--true-off",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare also with an engine that never loaded NWOR (yes)",
    )
    add("--keep-tokens", action="store_true", help="put all output tokens in the JSON")
    add("--verbose", action="store_true", help="show vLLM's log")
    return p


def parse(argv: Sequence[str] | None = None) -> Options:
    """The checked command line.

    Raises:
        BadArgument: an argument, or two together, cannot be used.
    """
    given = vars(build_parser().parse_args(sys.argv[1:] if argv is None else argv))
    compare = given["mode"] == COMPARE
    if given["repeats"] is None:
        given["repeats"] = MIN_PAIRS if compare else DEFAULT_RUNS
    options = Options(**given)
    _check_runs(options)
    _check_drafts(options)
    _check_inputs(options)
    return options


def _check_runs(options: Options) -> None:
    compare = options.mode == COMPARE
    if compare and options.repeats < MIN_PAIRS:
        raise BadArgument(
            f"argument --repeats: '{options.repeats}' is not allowed with --mode "
            f"compare; allowed values: whole numbers from {MIN_PAIRS} up"
        )
    if not compare:
        for name, value in (
            ("--plot", options.plot),
            ("--pairs-until-ci", options.pairs_until_ci),
        ):
            if value is not None:
                raise BadArgument(
                    f"argument {name}: '{value}' is not allowed with --mode "
                    f"{options.mode}; allowed with: --mode compare"
                )
    if options.max_pairs < options.repeats:
        raise BadArgument(
            f"argument --max-pairs: '{options.max_pairs}' is not allowed with "
            f"--repeats {options.repeats}; allowed values: whole numbers from "
            f"{options.repeats} up"
        )


def _check_drafts(options: Options) -> None:
    rates, k = options.acceptance, options.num_speculative_tokens
    if rates is not None and len(rates) != k:
        given = ",".join(f"{rate:g}" for rate in rates)
        raise BadArgument(
            f"argument --acceptance: '{given}' has {len(rates)} rates; allowed values: "
            f"{k} rates, one for each of --num-speculative-tokens {k}"
        )
    without = options.method in METHODS_WITHOUT_MODEL
    if without and options.draft_model is not None:
        raise BadArgument(
            f"argument --draft-model: '{options.draft_model}' is not allowed with "
            f"--method {options.method}; allowed with: --method "
            + ", ".join(m for m in METHODS if m not in METHODS_WITHOUT_MODEL)
        )
    default_drafter = options.method == "draft_model" and options.model is None
    if not without and options.draft_model is None and not default_drafter:
        raise BadArgument(
            f"argument --draft-model: none was given for --method {options.method}; "
            "allowed values: a directory, a Hugging Face name, or shape:NAME"
        )


def _check_inputs(options: Options) -> None:
    path = options.prompts
    if path is not None and path.suffix not in (".txt", ".json", ".jsonl"):
        raise BadArgument(
            f"argument --prompts: '{path}' is not allowed; allowed values: a file "
            "whose name ends in .txt, .json or .jsonl"
        )
    if path is not None and not path.is_file():
        raise BadArgument(
            f"argument --prompts: '{path}' is not a file; allowed values: an existing "
            "file whose name ends in .txt, .json or .jsonl"
        )
    if options.max_model_len is not None and options.context is not None:
        least = options.context + options.max_tokens
        if options.max_model_len < least:
            raise BadArgument(
                f"argument --max-model-len: '{options.max_model_len}' is not allowed "
                f"with --context {options.context} and --max-tokens "
                f"{options.max_tokens}; allowed values: whole numbers from {least} up"
            )
