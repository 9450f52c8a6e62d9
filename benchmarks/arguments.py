# SPDX-License-Identifier: Apache-2.0
"""The command line of bench_vllm.py: its arguments, their defaults and their rules.

Everything that can be judged without vLLM is judged here, before anything is loaded or
written. A refusal is one sentence that names the argument, the value and what is
allowed; the process then ends with exit status 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "bench_vllm.py"
COMPARE = "compare"
MODES = ("off", "nwor", "stage", "cow", COMPARE)
METHODS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
METHODS_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")
METHODS = (*METHODS_WITHOUT_MODEL, *METHODS_WITH_MODEL)
MIN_PAIRS = 7
DEFAULT_RUNS = 3


class BadArgument(Exception):
    """An argument's value cannot be used; the message is a whole sentence."""


class Options(argparse.Namespace):
    """The command line, checked. `--help` says what each argument means."""

    @property
    def nwor_mode(self) -> str:
        """The value of VLLM_NWOR_MODE for this command's engine."""
        mode = self.against if self.mode == COMPARE else self.mode
        return {"nwor": "stage", "audit": "off"}.get(mode, mode)

    @property
    def audits(self) -> bool:
        """Whether the KV audit is what is measured."""
        return bool(self.mode == COMPARE and self.against == "audit")


class _Parser(argparse.ArgumentParser):
    """argparse without its usage text in front of an error."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


# -- values ----------------------------------------------------------------------------


def _rule(convert: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """A `type=`: what `convert` makes of the text; refused if it raises ValueError."""

    def check(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed values: {allowed}"
            ) from None

    return check


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def whole(low: int) -> Callable[[str], int]:
    """A whole number, `low` or more."""

    def convert(text: str) -> int:
        _require(text.isascii() and text.isdigit() and int(text) >= low)
        return int(text)

    return _rule(convert, f"whole numbers from {low} up")


def number(low: float, high: float, low_allowed: bool) -> Callable[[str], float]:
    """A number up to `high`, above `low` or, if `low_allowed`, from it."""

    def convert(text: str) -> float:
        value = float(text)
        _require(low < value <= high or (low_allowed and value == low))
        return value

    start = "from" if low_allowed else "above"
    return _rule(convert, f"numbers {start} {low:g} up to {high:g}")


def _rates(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    _require(all(a >= b for a, b in itertools.pairwise((1.0, *found, 0.0))))
    return found


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)  # JSONDecodeError is a ValueError
    _require(isinstance(value, dict))
    return value


def file_to_write(suffix: str) -> Callable[[str], Path]:
    """The path of a file with this suffix, which need not exist."""

    def convert(text: str) -> Path:
        _require(Path(text).suffix == suffix and not Path(text).is_dir())
        return Path(text)

    return _rule(convert, f"a file name that ends in {suffix}")


rates = _rule(
    _rates,
    "one number from 0 to 1 for each draft position, separated by commas, none above "
    "the one before it",
)
json_object = _rule(_json_object, "a JSON object such as '{\"block_size\": 32}'")


# -- arguments -------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The parser; `parse` adds the rules that concern several arguments."""
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Speculative decoding with and without NWOR on real vLLM: the same "
        "requests, the outputs compared, then tokens a second, latency and what NWOR "
        "did. Without arguments: nwor against an unhooked engine, on SmolLM2 with "
        "built-in prompts.",
    )

    def add(name: str, help: str, type: Any = str, default: Any = None) -> None:
        parser.add_argument(f"--{name}", type=type, default=default, help=help)

    def choose(name: str, choices: Sequence[str], default: str, help: str) -> None:
        text = f"{help}: {', '.join(choices)} ({default})"
        parser.add_argument(
            f"--{name}", choices=choices, default=default, help=text, metavar="NAME"
        )

    def switch(name: str, help: str) -> None:
        parser.add_argument(f"--{name}", help=help, action="store_true")

    choose("mode", MODES, COMPARE, "nwor is stage; compare is --against with no hooks")
    against = ("nwor", "stage", "cow", "audit")
    choose("against", against, "nwor", "what compare tests; audit: alone, twice")
    add("batch-size", "requests at a time (4)", whole(1), 4)
    add("num-speculative-tokens", "drafts a step (4)", whole(1), 4)
    choose("method", METHODS, "ngram", "what makes the drafts")
    text = "target: a directory, a Hugging Face name, or shape:NAME for random weights"
    add("model", f"{text} (converted SmolLM2-135M-Instruct)")
    add("draft-model", "the drafter's model, named as --model is")
    text = "a JSON file, a list of strings; built-in ones by default"
    add("prompts", text, Path)
    add("max-tokens", "most tokens of an answer (64)", whole(1), 64)
    text = f"counted pairs in compare (default and least: {MIN_PAIRS}), counted runs in"
    add("repeats", f"{text} the other modes ({DEFAULT_RUNS})", whole(1))
    text = "synthetic rejection sampling: the share of windows that accept each draft"
    add("acceptance", f"{text} position, as in 0.8,0.6,0.4,0.2 (GPU only)", rates)
    add("temperature", "0 is greedy (0)", number(0, 2, True), 0.0)
    add("seed", "seed of every generator (0)", whole(0), 0)
    choose("device", ("auto", "cpu", "cuda"), "auto", "what vLLM must be built for")
    add("json", "write what was measured to this file", file_to_write(".json"))
    add("plot", "draw the pairs' ratios (compare)", file_to_write(".png"))
    text = "add pairs until all 90 %% intervals reach no farther than this from their"
    text += " medians, for example 0.005, or --max-pairs is reached"
    add("pairs-until-ci", text, number(0, 1, False))
    add("max-pairs", "see above (60)", whole(MIN_PAIRS), 60)
    add("context", "make every prompt this many tokens long", whole(1))
    add("max-num-seqs", "vLLM's; sizes the log (batch size)", whole(1))
    choose("runner", ("auto", "v1", "v2"), "auto", "vLLM's model runner on cuda")
    text = 'more of vLLM\'s EngineArgs, as in \'{"kv_cache_dtype": "fp8"}\''
    add("engine-args", text, json_object, {})
    switch("ignore-eos", "always make --max-tokens tokens")
    parser.add_argument(
        "--true-off",
        help="compare also with an engine that never loaded NWOR (yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    switch("keep-tokens", "put all output tokens in the JSON")
    return parser


def parse(argv: Sequence[str] | None = None) -> Options:
    """The checked command line.

    Raises:
        BadArgument: an argument, or two together, cannot be used.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(argv, namespace=Options())
    if options.repeats is None:
        options.repeats = MIN_PAIRS if options.mode == COMPARE else DEFAULT_RUNS
    for check in (_check_runs, _check_drafts, _check_inputs):
        check(options)
    return options


def _check_runs(options: Options) -> None:
    compare = options.mode == COMPARE
    if compare and options.repeats < MIN_PAIRS:
        raise BadArgument(
            f"argument --repeats: '{options.repeats}' is not allowed with --mode "
            f"compare; allowed values: whole numbers from {MIN_PAIRS} up"
        )
    for name in () if compare else ("plot", "pairs_until_ci"):
        if (value := getattr(options, name)) is not None:
            raise BadArgument(
                f"argument --{name.replace('_', '-')}: '{value}' is not allowed with "
                f"--mode {options.mode}; allowed with: --mode compare"
            )
    if options.max_pairs < options.repeats:
        raise BadArgument(
            f"argument --max-pairs: '{options.max_pairs}' is not allowed with "
            f"--repeats {options.repeats}; allowed values: whole numbers from "
            f"{options.repeats} up"
        )


def _check_drafts(options: Options) -> None:
    k = options.num_speculative_tokens
    if options.acceptance is not None and len(options.acceptance) != k:
        given = ",".join(f"{rate:g}" for rate in options.acceptance)
        raise BadArgument(
            f"argument --acceptance: '{given}' has {len(options.acceptance)} rates; "
            f"allowed values: {k} rates, one for each of --num-speculative-tokens {k}"
        )
    without = options.method in METHODS_WITHOUT_MODEL
    if without and options.draft_model is not None:
        raise BadArgument(
            f"argument --draft-model: '{options.draft_model}' is not allowed with "
            f"--method {options.method}; allowed with: --method "
            + ", ".join(METHODS_WITH_MODEL)
        )
    default_drafter = options.method == "draft_model" and options.model is None
    if not without and options.draft_model is None and not default_drafter:
        raise BadArgument(
            f"argument --draft-model: none was given for --method {options.method}; "
            "allowed values: a directory, a Hugging Face name, or shape:NAME"
        )


def _check_inputs(options: Options) -> None:
    path = options.prompts
    if path is not None and not (path.suffix == ".json" and path.is_file()):
        raise BadArgument(
            f"argument --prompts: '{path}' is not allowed; allowed values: an existing "
            "file whose name ends in .json"
        )
