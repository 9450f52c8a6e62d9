#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on real vLLM with and without NWOR.

    python bench_vllm.py                               without NWOR against nwor
    python bench_vllm.py --mode nwor --batch-size 1 --num-speculative-tokens 48
    python bench_vllm.py --help

`--mode compare` (the default) runs the same requests in one engine, in which NWOR's
hooks are taken off and put on again every few steps: each step is made with them,
without, and once more without as a control, in runs next to each other
(benchmarks/ab.py). It prints no speed unless all outputs are equal token by token. An
engine that never loaded NWOR runs in a process of its own, to compare an unhooked one
with, as far as the difference between processes allows.
What this does not do: judge a speed-up by speculation, or measure memory bandwidth
(bench_kernels.py does).

Exit status: 0 done; 1 outputs differ, or vLLM does not run; 2 a bad argument, nothing
was written; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ab, environment, prompts, records, report, summary
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
TRUE_OFF_RUNS = 7
# Runs of each arm that keep the host's times, behind those that are compared.
TIMED_RUNS = 5
# What a result has of NworWorkerExtension.nwor_report.
ENGINE = ("kv_blocks", "groups", "log_bytes_per_draft", "log_bytes", "fallbacks")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, a line now and then if that is no terminal; what it gives is
    called before each run with the run's name."""
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


def true_off_arguments(argv: Sequence[str], output: Path) -> list[str]:
    """`argv` for a process that runs the same requests with mode off: of an argument
    that is given twice the last one counts."""
    runs = str(TRUE_OFF_RUNS)
    kept = without_compare_only(argv)
    return [*kept, "--mode", "off", "--repeats", runs, "--json", str(output)]


def run_true_off(argv: Sequence[str]) -> dict[str, Any]:
    """The result of mode off in a process of its own, where NWOR is never loaded.

    Raises:
        EngineFailed: that process failed; its own words are on stderr.
    """
    note(what := "off in a process of its own")
    with tempfile.TemporaryDirectory(prefix="nwor-bench-") as directory:
        output = Path(directory) / "off.json"
        command = [sys.executable, str(ROOT / PROGRAM)]
        command += true_off_arguments(argv, output)
        # The file is read here and then deleted: no commit need be known.
        env = os.environ | {environment.COMMIT_VARIABLE: "none"}
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=env, check=False)
        if done.returncode:
            raise EngineFailed(f"{what} ended with status {done.returncode}")
        return json.loads(output.read_text(encoding="utf-8"))


def arms_of(options: Options) -> list[ab.Arm]:
    """What --mode compare runs: the baseline, then what is tested against it. Against
    stage: the same engine with the undo log, too. Against audit: the KV audit with its
    default budget, then comparing everything."""
    if options.audits:
        budgets = {"audit": 32, "audit-100": 1 << 20}
        return [
            ab.UNHOOKED,
            *(ab.Arm(name, True, audit_mib=mib) for name, mib in budgets.items()),
        ]
    tested = [ab.Arm(options.against, hooked=True)]
    if options.against == "stage":
        tested.insert(0, ab.Arm("cow", hooked=True, stages=False))
    return [ab.UNHOOKED, *tested]


def runs_of(
    engine: Engine,
    arm: ab.Arm,
    number: int,
    begins: Callable[[str], None],
    expected: Sequence[Sequence[int]],
    times: bool = True,
) -> list[ab.Run]:
    """Runs, which keep host times. Raises OutputsDiffer: outputs are not `expected`."""
    runs = []
    for run in range(1, number + 1):
        name = f"{arm.name}{', timed' * times}, {run}"
        begins(name)
        runs.append(engine.run(arm, times=times))
        ab.check_outputs(expected, runs[-1].outputs, "an earlier run", name)
    return runs


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
    with progress("compare", num_runs + ab.runs_a_round(arms) * repeats) as begins:
        limits = (repeats, until, max_pairs)
        pairs = ab.compare(engine.run, arms, *limits, begins, expected)
        first, timed = pairs[0].test.outputs, {}
        for arm in are_timed:
            timed[arm.name] = runs_of(engine, arm, TIMED_RUNS, begins, first)
    num_runs += ab.runs_a_round(arms) * (len(pairs) // len(arms))
    found = {
        "baseline": arms[0].name,
        "turn_steps": None if options.audits else ab.TURN_STEPS,
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


def run_one_mode(engine: Engine, options: Options) -> dict[str, Any]:
    """`--repeats` runs in a mode other than compare, after a warm-up that is not
    counted, then some that keep host times: what the result says of them.

    Raises:
        OutputsDiffer: a run's outputs are not those of the warm-up.
    """
    mode, arm = options.mode, ab.Arm(options.mode, hooked=options.nwor_mode != "off")
    num_timed = TIMED_RUNS * arm.hooked
    num_runs = 1 + options.repeats + num_timed
    with progress(mode, num_runs) as begins:
        begins("warm-up")
        first = engine.run(arm).outputs
        runs = runs_of(engine, arm, options.repeats, begins, first, times=False)
        timed = runs_of(engine, arm, num_timed, begins, first)
    return {
        "outputs": summary.outputs(first, num_runs) | {"tokens": first},
        "tokens_per_second": [run.tokens_per_second for run in runs],
        "summary": summary.of_runs({mode: runs}, {mode: timed}),
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
    left_out = ("json", "prompts", "model", "draft_model")
    lengths = [len(ids) for wave in engine.waves for ids in wave]
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
    advice = "read each ratio together with its control"
    if not comparing:
        advice = "--mode compare runs both sides in turns, with a control"
    warnings = environment.warnings(on, advice)
    true_off = run_true_off(argv) if comparing and options.true_off else None
    prepare_process(options, on)
    note("starting vLLM")
    engine = Engine(options, on)
    about = environment.describe(on, ROOT)
    if comparing:
        found = compare(engine, options, true_off, options.max_pairs)
    else:
        found = run_one_mode(engine, options)
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
        prompts.read(options.prompts)
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
