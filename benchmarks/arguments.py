# SPDX-License-Identifier: Apache-2.0
"""The command line of bench_vllm.py: its arguments, their defaults and their rules.

Everything that can be checked without vLLM is checked here, before anything is loaded
or written. An error names the argument, the value and what is allowed; exit status 2.
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
MODES = ("off", COMPARE)
AGAINST = ("nwor", "stage", "cow", "audit")
METHODS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
METHODS_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")
# Arguments of mode compare alone, and how many values follow each.
COMPARE_ONLY = {"--against": 1, "--pairs-until-ci": 1}
COMPARE_ONLY |= {"--true-off": 0, "--no-true-off": 0}
MIN_PAIRS, DEFAULT_RUNS = 7, 3


class BadArgument(Exception):
    """An argument's value cannot be used; the message is a whole sentence."""


class Options(argparse.Namespace):
    """The checked command line. `--help` describes each argument."""

    @property
    def nwor_mode(self) -> str:
        """The value of VLLM_NWOR_MODE for this command's engine."""
        mode = self.against if self.mode == COMPARE else self.mode
        return {"nwor": "stage", "audit": "off"}.get(mode, mode)

    @property
    def audits(self) -> bool:
        """Whether the KV audit is measured."""
        return bool(self.mode == COMPARE and self.against == "audit")


class _Parser(argparse.ArgumentParser):
    """argparse without its usage text in front of an error."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def rule(
    convert: Callable[[str], Any], holds: Callable[[Any], bool], allowed: str
) -> Callable[[str], Any]:
    """A `type=` for argparse: the converted text, if `holds` is true of it."""

    def check(text: str) -> Any:
        try:
            value = convert(text)
            if holds(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {allowed}")

    return check


def whole(low: int) -> Callable[[str], int]:
    """A whole number, `low` or more."""
    return rule(int, lambda value: value >= low, f"whole numbers from {low} up")


def positive(high: float) -> Callable[[str], float]:
    """A number above 0, up to `high`."""
    return rule(float, lambda value: 0 < value <= high, f"numbers above 0 up to {high}")


rates = rule(
    lambda text: tuple(map(float, text.split(","))),
    lambda found: all(a >= b for a, b in itertools.pairwise((1.0, *found, 0.0))),
    "a number from 0 to 1 for each draft position, with commas, none above its left",
)

json_object = rule(json.loads, lambda value: isinstance(value, dict), "JSON objects")


def build_parser() -> argparse.ArgumentParser:
    """The parser; `parse` adds the rules that concern several arguments."""
    text = "Speculative decoding with and without NWOR on real vLLM. Without arguments:"
    text += " nwor against an unhooked engine, SmolLM2, built-in prompts."
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, description=text)

    def add(name: str, help: str, type: Any = str, default: Any = None) -> None:
        parser.add_argument(f"--{name}", type=type, default=default, help=help)

    def choose(name: str, choices: Sequence[str], default: Any, help: str) -> None:
        options = {"choices": choices, "default": default, "metavar": "NAME"}
        text = f"{help}: {', '.join(choices)} ({default or 'nwor'})"
        parser.add_argument(f"--{name}", help=text, **options)

    choose("mode", MODES, COMPARE, "off never loads NWOR")
    choose("against", AGAINST, None, "what compare tests; nwor is stage")
    add("batch-size", "requests at a time (4)", whole(1), 4)
    add("num-speculative-tokens", "drafts a step (4)", whole(1), 4)
    methods = METHODS_WITHOUT_MODEL + METHODS_WITH_MODEL
    choose("method", methods, "ngram", "what makes the drafts")
    text = "target: a directory, a Hugging Face name, or shape:NAME for random weights"
    add("model", f"{text} (converted SmolLM2-135M-Instruct)")
    add("draft-model", "the drafter's model, named as --model is")
    add("max-tokens", "most tokens of an answer (64)", whole(1), 64)
    text = f"counted pairs in compare (default and least: {MIN_PAIRS}), counted runs in"
    add("repeats", f"{text} the other modes ({DEFAULT_RUNS})", whole(1))
    text = "synthetic rejection sampling: the share of windows that accept each draft"
    add("acceptance", f"{text} position, as in 0.8,0.6,0.4,0.2 (GPU only)", rates)
    add("json", "append what was measured to this file, as a line", Path)
    text = "in compare, add pairs until all 90 %% intervals reach no farther than this"
    text += " from their medians, for example 0.005, or --max-pairs is reached"
    add("pairs-until-ci", text, positive(1))
    add("max-pairs", "see above (60)", whole(MIN_PAIRS), 60)
    add("context", "make every prompt this many tokens long", whole(1))
    add("max-num-seqs", "vLLM's; sizes the log (batch size)", whole(1))
    add("block-size", "tokens a KV block (vLLM's choice)", whole(1))
    add("kv-transfer-config", "vLLM's: a KV connector, in JSON", json_object)
    text = "vLLM's: the KV cache's size, for engines that share a GPU (what is free)"
    add("kv-cache-memory-bytes", text, whole(1))
    choose("runner", ("auto", "v1", "v2"), "auto", "vLLM's model runner on cuda")
    text = "always make --max-tokens tokens"
    parser.add_argument("--ignore-eos", action="store_true", help=text)
    text = "keep prompts in the prefix cache, where runs that count must find them"
    parser.add_argument("--cached-prompts", action="store_true", help=text)
    text = "compare also with an engine that never loaded NWOR (yes)"
    both = argparse.BooleanOptionalAction
    parser.add_argument("--true-off", help=text, action=both)
    return parser


def without_compare_only(argv: Sequence[str]) -> list[str]:
    """`argv` for another mode than compare."""
    left, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in COMPARE_ONLY:
            left.append(word)
        elif COMPARE_ONLY[name] and not equals:
            next(words, None)
    return left


def parse(argv: Sequence[str] | None = None) -> Options:
    """The checked command line. Raises BadArgument: an argument, or two together,
    cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(argv, namespace=Options())
    compares = options.mode == COMPARE
    if options.repeats is None:
        options.repeats = MIN_PAIRS if compares else DEFAULT_RUNS
    k, method, least = options.num_speculative_tokens, options.method, options.repeats
    of_compare = f"it is for --mode {COMPARE}, and the mode is {options.mode}"
    for name in ("against", "pairs_until_ci", "true_off"):
        is_given = getattr(options, name) is not None
        refuse(options, **{name: is_given and not compares and of_compare})
    own = options.cached_prompts and (options.audits or options.kv_transfer_config)
    refuse(options, cached_prompts=own and "allowed without audit and KV connector")
    needs_drafter = method in METHODS_WITH_MODEL
    has_default = method == "draft_model" and options.model is None
    drafter, rates, file = options.draft_model, options.acceptance, options.json
    options.against = options.against or "nwor"
    options.true_off = options.true_off is not False
    refuse(
        options,
        json=file is not None and file.is_dir() and "it is a folder; allowed: a file",
        repeats=compares and least < MIN_PAIRS and f"allowed: from {MIN_PAIRS} up",
        max_pairs=options.max_pairs < least and f"allowed: from --repeats {least} up",
        acceptance=rates is not None
        and len(rates) != k
        and f"allowed: one rate for each of --num-speculative-tokens {k}",
        draft_model=(
            f"needed for --method {method}"
            if drafter is None and needs_drafter and not has_default
            else drafter is not None
            and not needs_drafter
            and f"goes with --method {', '.join(METHODS_WITH_MODEL)}"
        ),
    )
    return options


def refuse(options: Options, **why: str | bool) -> None:
    """Raises BadArgument for the first argument that has a text: what is wrong with it,
    and what is allowed."""
    for name, text in why.items():
        if text:
            flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
            raise BadArgument(f"argument {flag}: '{value}' cannot be used; {text}")
