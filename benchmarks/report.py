# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py prints: from the result (the content of its JSON file) to tables.

The same text is what tools/results/render.py puts into results/README.md.
Order: environment, warnings, whether outputs were equal, then numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import summary
from benchmarks.ab import CONTROL
from benchmarks.summary import CPU_SHARE_BUDGET, host_budget_us
from benchmarks.tables import number, percent, size, spread, table

Result = dict[str, Any]
OWN_PROCESS = "off (own process)"
_BAR = 30


def environment_lines(result: Result) -> list[str]:
    """Machine, versions, date, command and what was run, a line each."""
    env = result["environment"]
    gpus = f"{env['gpus']} x {env['gpu']}, CUDA {env['cuda']}, " if "gpu" in env else ""
    versions = ", ".join(f"{k} {v}" for k, v in env["packages"].items())
    variables = ", ".join(f"{k}={v}" for k, v in env["variables"].items())
    lines = [
        f"date      {env['date']}",
        f"machine   {gpus}{env['cpu']}, {env['cores']} cores, {env['system']}",
        f"versions  Python {env['python']}, {versions}",
        f"commit    {env['commit'] or 'unknown'}",
        f"command   {result['command']}",
        f"set       {variables}",
        f"run       {_run(result)}",
    ]
    for info in result["engine"]["groups"]:
        asked, got = info["requested"], info["resolved"]
        mode = got if asked == got else f"{asked} resolved to {got}"
        lines.append(f"mode      group {info['group']}: {mode} ({info['reason']})")
    return lines


def _run(result: Result) -> str:
    """Model, method and requests in one line."""
    args, lengths = result["arguments"], result["prompt_tokens"]
    drafter = f" by {result['draft_model']}" if result["draft_model"] else ""
    context = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    rates = args["acceptance"]
    forced = f", acceptance forced to {rates}" if rates else ""
    return (
        f"{result['model']}, {args['method']}{drafter}, "
        f"{args['num_speculative_tokens']} drafts a step{forced}; {len(lengths)} "
        f"requests, {args['batch_size']} at a time, prompts of {context} tokens, "
        f"answers of at most {args['max_tokens']}"
    )


def outputs_line(result: Result) -> str:
    """What was compared before any speed was printed."""
    found = result["outputs"]
    total = sum(found["num_tokens"])
    line = (
        f"outputs identical in all {found['num_runs']} runs: "
        f"{len(found['num_tokens'])} requests, {number(total)} tokens"
    )
    if result.get("true_off"):
        line += "; and in an engine that never loaded NWOR"
    return line


def speed_table(result: Result) -> str:
    """Tokens a second and latency, of each side."""
    blocks = result["engine"]["kv_blocks"]
    sides = [(name, one, blocks) for name, one in result["summary"]["speed"].items()]
    if true_off := result.get("true_off"):
        sides.append((OWN_PROCESS, true_off["speed"], true_off["kv_blocks"]))
    rows = [
        (
            name,
            f"{side['tokens_per_second']:.1f}",
            f"{side['latency_s_median']:.3f} s",
            f"{side['latency_s_p95']:.3f} s",
            number(side["num_runs"]),
            "not compared" if blocks is None else number(blocks),
        )
        for name, side, blocks in sides
    ]
    head = ("", "tokens/s", "latency median", "latency p95", "runs", "KV blocks")
    return table("speed", head, rows)


def pair_of(result: Result, name: str) -> str:
    """What the ratio called `name` divides by what."""
    baseline = result["baseline"]
    return f"{baseline if name == CONTROL else name} / {baseline}"


def ratio_table(result: Result) -> str:
    """The median ratio of the pairs, the control's too (compare only); and, not from
    pairs, that to the engine that never loaded NWOR."""
    found = result["summary"]
    num_pairs = number(found["num_pairs"])
    rows = [
        (pair_of(result, name), *spread(one)[:-1].split(" (", 1), num_pairs)
        for name, one in found["ratio"].items()
    ]
    if own := summary.own_process(result):
        median, interval = spread(own)[:-1].split(" (", 1)
        name, runs = f"{result['baseline']} / {OWN_PROCESS}", number(own["num_runs"])
        interval += " (its fastest, slowest run)"
        rows.append((name, median, interval, f"none; {runs} runs"))
    return table("tokens/s, ratio", ("", "median", "90 % interval", "pairs"), rows)


def acceptance_table(result: Result) -> str:
    """How often the draft at each position was accepted, as a histogram; neighbours
    with the same count share a line."""
    found = result["summary"]["acceptance"]
    rows = []
    counts = zip(found["accepted_per_position"], found["per_position"], strict=True)
    first = 1
    for (count, share), group in itertools.groupby(counts):
        last = first + len(list(group)) - 1
        name = " to ".join(map(str, sorted({first, last})))
        rows.append((name, number(count), percent(share), "#" * round(share * _BAR)))
        first = last + 1
    title = (
        f"acceptance by position in the window ({number(found['windows'])} windows, "
        f"{number(found['drafted'])} drafts, {number(found['accepted'])} accepted)"
    )
    return table(title, ("position", "accepted", "of windows", ""), rows, left=True)


def nwor_table(engine: dict[str, Any], name: str, done: dict[str, Any]) -> str:
    """Windows, drafts, bytes and host time of the arm `name`."""

    def median(part: str) -> str:
        return f"{host[f'{part}_us_median']:.1f} us ({host[f'{part}_us_p95']:.1f})"

    rows = [
        ("windows", number(done["windows"])),
        ("drafts logged", number(done["staged"])),
        ("committed", number(done["committed"])),
        ("rejected", number(done["rejected"])),
        ("never counted by the scheduler", number(done["staged_minus_drafted"])),
        ("bytes logged", size(done["logged_bytes"])),
        ("bytes restored", size(done["restored_bytes"])),
        ("bytes copied to shadow pages", size(done.get("shadow_copied_bytes", 0))),
        ("bytes committed from them", size(done.get("committed_bytes", 0))),
        ("log bytes a draft", size(engine["log_bytes_per_draft"])),
        ("log in memory", size(engine["log_bytes"])),
    ]
    if host := done["host"]:
        rows += [
            ("begin, median (p95)", median("begin")),
            ("commit, median (p95)", median("commit")),
            ("step, median", f"{host['step_us_median'] / 1000:.2f} ms"),
            ("(begin + commit) / step", percent(host["share_of_step"], 2)),
            ("(begin + commit) / all steps", percent(host["share_of_time"], 2)),
        ]
    for reason, count in (engine["fallbacks"] or {"none": 0}).items():
        rows.append(("fallbacks: " + reason, number(count)))
    title = f"what {name} did in {number(done['num_runs'])} counted runs"
    return table(title, ("", ""), rows)


def verdict_lines(result: Result) -> list[str]:
    """The comparison in words, against the project's budgets."""
    lines = []
    on_cpu = result["environment"]["device"] == "cpu"
    found = result["summary"]
    for name in summary.tested(result) if "ratio" in found else ():
        ratio, control = found["ratio"][name], found["ratio"][CONTROL]
        apart = ratio["low"] > control["high"] or control["low"] > ratio["high"]
        word = "does NOT overlap" if apart else "overlaps"
        pair = pair_of(result, name)
        lines.append(
            f"the interval of {pair} {word} that of {pair_of(result, CONTROL)}"
        )
        if not on_cpu:
            budget = f"{pair} at least {summary.RATIO_BUDGET} at the low end"
            lines.append(f"{budget}: {summary.verdict(ratio, control)}")
    if found.get("until") is not None:
        reached = "reached" if found["until_reached"] else "NOT reached"
        pairs = f"{reached} with {found['num_pairs']} pairs"
        lines.append(f"--pairs-until-ci {found['until']:g} {pairs}")
    if result.get("true_off") and result["true_off"]["kv_blocks"] is not None:
        lost = result["true_off"]["kv_blocks"] - result["engine"]["kv_blocks"]
        lines.append(f"KV blocks that NWOR costs: {number(lost)}")
    for name, done in found["nwor"].items():
        if done["host"] is not None:
            lines.append(_host_line(name, done["host"], on_cpu))
    return lines


def _host_line(name: str, host: dict[str, float], on_cpu: bool) -> str:
    """begin and commit against their budget."""
    if on_cpu:
        spent, budget = host["share_of_step"], CPU_SHARE_BUDGET
        shown = f"(begin + commit) / step of {name}: {percent(spent, 2)}"
        limit = percent(budget)
    else:
        spent = host["begin_us_median"] + host["commit_us_median"]
        budget = host_budget_us(name)
        shown = f"begin + commit of {name}: {spent:.1f} us of host time"
        limit = f"{budget:.0f} us"
    word = "within" if spent <= budget else "MISSES"
    return f"{shown} {word} the budget of {limit}"


def text(result: Result) -> str:
    """The whole report."""
    parts = {
        "environment": environment_lines(result),
        "warnings": result["warnings"],
        "check": [outputs_line(result)],
    }
    tables = [acceptance_table(result), speed_table(result)]
    if result["mode"] == "compare":
        tables.append(ratio_table(result))
    for name, done in result["summary"]["nwor"].items():
        tables.append(nwor_table(result["engine"], name, done))
    return "\n\n".join(
        [*_lists(parts), *tables, *_lists({"in words": verdict_lines(result)})]
    )


def _lists(parts: dict[str, list[str]]) -> Iterator[str]:
    """Each head with its lines below; none without lines."""
    for head, lines in parts.items():
        if lines:
            yield "\n  ".join([head, *lines])
