#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on real vLLM with and without NWOR.

    python bench_vllm.py
    python bench_vllm.py --against cow --batch-size 1 --num-speculative-tokens 48
    python bench_vllm.py --help

runs the same requests in one engine, in which NWOR's hooks are taken off and put on
again every few steps: each step is made with them, without, and once more without as a
control, in runs next to each other (benchmarks/ab.py). It prints no speed unless all
outputs are equal token by token. An engine that never loaded NWOR (`--mode off`) runs
in a process of its own: its outputs must be the same, and its speed is shown.
What this does not do: judge a speed-up by speculation, or measure memory bandwidth
(bench_kernels.py does).

Exit status: 0 done; 1 outputs differ, or vLLM does not run; 2 a bad argument, nothing
was written; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ab, environment, records, report, summary
from benchmarks.arguments import (
    COMPARE,
    PROGRAM,
    BadArgument,
    Options,
    parse,
    without_compare_only,
)
from benchmarks.engine import Engine, EngineFailed
from benchmarks.files import recorded
from benchmarks.settings import device_for, find_models, leave, prepare_process

ROOT = Path(__file__).resolve().parent
# Runs of each arm that keep the host's times, behind those that are compared.
TIMED_RUNS = 5
# What a result has of NworWorkerExtension.nwor_report.
ENGINE = ("kv_blocks", "groups", "log_bytes_per_draft", "log_bytes", "fallbacks")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call the result before each run with the run's name."""
    from tqdm import tqdm

    calm = 0.1 if sys.stderr.isatty() else 15
    with tqdm(total=total, desc=what, unit="run", mininterval=calm) as bar:

        def begins(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield begins


def note(text: str) -> None:
    """A line on stderr."""
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def run_true_off(argv: Sequence[str]) -> dict[str, Any]:
    """The result of the same requests with mode off, in a process of its own, where
    NWOR is never loaded. Raises EngineFailed; the reason is on stderr."""
    note(what := "off in a process of its own")
    with tempfile.TemporaryDirectory(prefix="nwor-bench-") as directory:
        output = Path(directory) / "off.json"
        # Of an argument that is given twice the last one counts.
        command = [sys.executable, str(ROOT / PROGRAM), *without_compare_only(argv)]
        command += ["--mode", "off", "--repeats", "7", "--json", str(output)]
        # The file is read here and then deleted: no commit need be known.
        env = os.environ | {environment.COMMIT_VARIABLE: "none"}
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=env, check=False)
        if done.returncode:
            raise EngineFailed(f"{what} ended with status {done.returncode}")
        return json.loads(output.read_text(encoding="utf-8"))


def arms_of(options: Options) -> list[ab.Arm]:
    """The baseline, then what is tested against it. Against stage: the same engine with
    the undo log, too. Against audit: the KV audit with its default budget, then
    comparing everything."""
    if options.audits:
        tested = [ab.Arm("audit", True, audit_mib=32)]
        tested.append(ab.Arm("audit-100", True, audit_mib=1 << 20))
    else:
        tested = [ab.Arm(options.against, hooked=True)]
        if options.against == "stage":
            tested.insert(0, ab.Arm("cow", hooked=True, stages=False))
    return [ab.UNHOOKED, *tested]


def compare(
    engine: Engine, options: Options, true_off: Mapping[str, Any] | None, max_pairs: int
) -> dict[str, Any]:
    """Runs the pairs of --mode compare: what the result says of them.

    true_off: the result of mode off in a process of its own, if there is one.

    Raises:
        OutputsDiffer: a run's outputs are not those of the others.
    """
    arms, repeats = arms_of(options), min(options.repeats, max_pairs)
    until = options.pairs_until_ci
    expected = None if true_off is None else true_off["outputs"]["tokens"]
    are_timed = [] if options.audits else arms[1:]
    num_runs = len(arms) + TIMED_RUNS * len(are_timed)
    limits = (repeats, until, max_pairs)
    with progress("compare", num_runs + ab.runs_a_round(arms) * repeats) as begins:
        pairs = ab.compare(engine.run, arms, *limits, begins, expected)
        first, timed = pairs[0].test.outputs, {arm.name: [] for arm in are_timed}
        for arm, number in itertools.product(are_timed, range(1, TIMED_RUNS + 1)):
            begins(name := f"{arm.name}, timed, {number}")
            timed[arm.name].append(done := engine.run(arm, times=True))
            ab.check_outputs(first, done.outputs, "an earlier run", name)
    num_runs += ab.runs_a_round(arms) * (len(pairs) // len(arms))
    found = {
        "baseline": arms[0].name,
        "turn_steps": pairs[0].test.turn_steps,
        "outputs": summary.outputs(first, num_runs),
        "pairs": summary.pair_ratios(pairs),
        "summary": summary.comparison(pairs, arms[0].name, until, timed),
    }
    if true_off is not None:
        found["true_off"] = {
            "speed": true_off["summary"]["speed"]["off"],
            "kv_blocks": true_off["engine"]["kv_blocks"],
            "tokens_per_second": true_off["tokens_per_second"],
        }
    return found


def run_off(engine: Engine, repeats: int) -> dict[str, Any]:
    """So many runs without NWOR, after a warm-up that is not counted. Raises
    OutputsDiffer: a run's outputs are not those of the warm-up."""
    off = ab.Arm("off", hooked=False)
    with progress("off", 1 + repeats) as begins:
        begins("warm-up")
        first, runs = engine.run(off).outputs, []
        for number in range(1, repeats + 1):
            begins(name := f"off, {number}")
            runs.append(engine.run(off))
            ab.check_outputs(first, runs[-1].outputs, "an earlier run", name)
    return {
        "outputs": summary.outputs(first, 1 + repeats) | {"tokens": first},
        "tokens_per_second": [run.tokens_per_second for run in runs],
        "summary": summary.of_runs({"off": runs}, {}),
    }


def key_of(
    options: Options, argv: Sequence[str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The key of a result's line. Its cell is the command, where tools/gpu/bench.py
    gives it no name."""
    kept = [word for word in argv if word not in ("--json", str(options.json))]
    gpu = about["machine"].get("gpu")  # None: a CPU, where vLLM has V1 only
    asked = about["variables"].get("VLLM_USE_V2_MODEL_RUNNER", None if gpu else "0")
    modes = [arm.name for arm in arms_of(options)[1:]]
    return {
        "cell": shlex.join([PROGRAM, *kept]),
        "batch": options.batch_size,
        "gpu": gpu,
        "vllm": records.vllm(about),
        "runner": {"0": "V1", "1": "V2"}.get(asked, "default"),
        "drafter": options.method,
        "drafts": options.num_speculative_tokens,
        "mode": " ".join(modes) if options.mode == COMPARE else options.mode,
    }


def base_result(
    options: Options, argv: Sequence[str], engine: Engine, about: dict[str, Any]
) -> dict[str, Any]:
    """What all modes' results have in common, without what was measured."""
    found = engine.report()
    left_out = ("json", "model", "draft_model")
    lengths = list(map(len, engine.prompts))
    return {
        "key": key_of(options, argv, about),
        **about,
        "command": shlex.join(["python", PROGRAM, *argv]),
        "mode": options.mode,
        "arguments": {k: v for k, v in vars(options).items() if k not in left_out},
        "model": engine.target.label,
        "draft_model": engine.drafter.label if engine.drafter else None,
        "prompt_tokens": sorted({min(lengths), max(lengths)}),
        "engine": {name: found[name] for name in ENGINE} | {"start_s": engine.start_s},
    }


def bench(options: Options, argv: Sequence[str], on: str) -> Any:
    """Runs what the options ask for and returns the result as its line holds it."""
    comparing = options.mode == COMPARE
    advice = "read each ratio together with its control" if comparing else ""
    warnings = environment.warnings(on, advice)
    true_off = run_true_off(argv) if comparing and options.true_off else None
    prepare_process(options, on)
    note("starting vLLM")
    engine = Engine(options, on)
    about = environment.describe(on, ROOT)
    if comparing:
        found = compare(engine, options, true_off, options.max_pairs)
    else:
        found = run_off(engine, options.repeats)
    result = base_result(options, argv, engine, about)
    engine.close()
    return recorded(result | {"warnings": warnings} | found)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(argv)
        on = device_for(options)
        find_models(options)
        result = bench(options, argv, on)
    except BadArgument as error:
        note(str(error))
        return 2
    except (ab.OutputsDiffer, EngineFailed) as error:
        note(str(error))
        return 1
    except KeyboardInterrupt:
        note("interrupted, nothing was written")
        return 130
    print(report.text(result))
    try:
        if options.json is not None:
            records.append(options.json, result)
    except (OSError, records.BadRecord) as error:
        note(f"the result was not written: {error}")
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
