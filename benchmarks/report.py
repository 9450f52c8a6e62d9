# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py prints: from the result (the content of its JSON file) to tables.

The same tables, as Markdown, are what tools/results/render.py puts into the README.
Order: environment, warnings, whether outputs were equal, then numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks import summary as summaries
from benchmarks.ab import CONTROL
from benchmarks.intervals import Interval
from benchmarks.summary import CPU_SHARE_BUDGET, HOST_BUDGET_US
from benchmarks.tables import Table, number, percent, size

Result = dict[str, Any]
OWN_PROCESS = "off (own process)"
_BAR = 30


def environment_lines(result: Result) -> list[str]:
    """Machine, versions, date, command and what was run, a line each."""
    env = result["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in env["packages"].items())
    if "gpu" in env:
        machine = f"{env['gpus']} x {env['gpu']}, CUDA {env['cuda']}, "
    else:
        machine = ""
    machine += f"{env['cpu']}, {env['cores']} cores, {env['system']}"
    variables = ", ".join(f"{k}={v}" for k, v in env["variables"].items())
    lines = [
        f"date      {env['date']}",
        f"machine   {machine}",
        f"versions  Python {env['python']}, {versions}",
        f"commit    {env['commit'] or 'unknown'}",
        f"command   {result['command']}",
        f"set       {variables}",
        f"run       {describe_run(result)}",
    ]
    for info in result["engine"]["groups"]:
        asked, got = info["requested"], info["resolved"]
        mode = got if asked == got else f"{asked} resolved to {got}"
        lines.append(f"mode      group {info['group']}: {mode} ({info['reason']})")
    return lines


def describe_run(result: Result) -> str:
    """Model, method and requests in one line."""
    drafter = f" by {result['draft_model']}" if result["draft_model"] else ""
    prompts = result["prompt_tokens"]
    args = result["arguments"]
    context = (
        f"{min(prompts)}" if min(prompts) == max(prompts) else
        f"{min(prompts)} to {max(prompts)}"
    )  # fmt: skip
    forced = ""
    if args["acceptance"]:
        forced = f", acceptance forced to {args['acceptance']}"
    return (
        f"{result['model']}, {args['method']}{drafter}, "
        f"{args['num_speculative_tokens']} drafts a step{forced}; {len(prompts)} "
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


def speed_table(result: Result) -> Table:
    """Tokens a second and latency, of each side."""
    blocks = result["engine"]["kv_blocks"]
    rows = [(name, one, blocks) for name, one in result["summary"]["speed"].items()]
    if result.get("true_off"):
        true_off = result["true_off"]
        rows.append((OWN_PROCESS, true_off["speed"], true_off["kv_blocks"]))
    return Table(
        "speed",
        ("", "tokens/s", "latency median", "latency p95", "runs", "KV blocks"),
        [
            (
                name,
                f"{side['tokens_per_second']:.1f}",
                f"{side['latency_s_median']:.3f} s",
                f"{side['latency_s_p95']:.3f} s",
                number(side["num_runs"]),
                "not compared" if blocks is None else number(blocks),
            )
            for name, side, blocks in rows
        ],
    )


def pair_of(result: Result, name: str) -> str:
    """What the ratio called `name` divides by what."""
    baseline = result["baseline"]
    return f"{baseline if name == CONTROL else name} / {baseline}"


def ratio_table(result: Result) -> Table:
    """The median ratio of the pairs, the control's too (compare only); and, not from
    pairs, that to the engine that never loaded NWOR."""
    summary = result["summary"]
    rows = [
        (
            pair_of(result, name),
            f"{one['median']:.4f}",
            f"{one['low']:.4f} to {one['high']:.4f}",
            number(summary["num_pairs"]),
        )
        for name, one in summary["ratio"].items()
    ]
    own = summaries.own_process(result)
    if own is not None:
        rows.append(
            (
                f"{result['baseline']} / {OWN_PROCESS}",
                f"{own['median']:.4f}",
                f"{own['low']:.4f} to {own['high']:.4f} (its fastest, slowest run)",
                f"none; {number(own['num_runs'])} runs",
            )
        )
    return Table("tokens/s, ratio", ("", "median", "90 % interval", "pairs"), rows)


def acceptance_table(result: Result) -> Table:
    """How often the draft at each position was accepted, as a histogram; neighbours
    with the same count share a line."""
    found = result["summary"]["acceptance"]
    rows = []
    counts = zip(found["accepted_per_position"], found["per_position"], strict=True)
    for (count, share), group in itertools.groupby(
        enumerate(counts, 1), key=lambda item: item[1]
    ):
        places = [position for position, _ in group]
        first, last = places[0], places[-1]
        name = str(first) if first == last else f"{first} to {last}"
        bar = "#" * round(share * _BAR)
        rows.append((name, number(count), percent(share), bar))
    title = (
        f"acceptance by position in the window ({number(found['windows'])} windows, "
        f"{number(found['drafted'])} drafts, {number(found['accepted'])} accepted)"
    )
    return Table(title, ("position", "accepted", "of windows", ""), rows, left=True)


def nwor_tables(result: Result) -> list[Table]:
    """Windows, drafts, bytes and host time, a table for each arm with NWOR."""
    return [
        _nwor_table(result, name, done)
        for name, done in result["summary"]["nwor"].items()
    ]


def _nwor_table(result: Result, name: str, done: dict[str, Any]) -> Table:
    engine = result["engine"]
    rows = [
        ("windows", number(done["windows"])),
        ("drafts logged", number(done["staged"])),
        ("committed", number(done["committed"])),
        ("rejected", number(done["rejected"])),
        (
            "never counted by the scheduler",
            number(done["staged_minus_drafted"]),
        ),
        ("bytes logged", size(done["logged_bytes"])),
        ("bytes restored", size(done["restored_bytes"])),
        ("bytes copied to shadow pages", size(done.get("shadow_copied_bytes", 0))),
        ("bytes committed from them", size(done.get("committed_bytes", 0))),
        ("log bytes a draft", size(engine["log_bytes_per_draft"])),
        ("log in memory", size(engine["log_bytes"])),
    ]
    host = done["host"]
    if host is not None:
        rows += [
            (
                "begin, median (p95)",
                f"{host['begin_us_median']:.1f} us ({host['begin_us_p95']:.1f})",
            ),
            (
                "commit, median (p95)",
                f"{host['commit_us_median']:.1f} us ({host['commit_us_p95']:.1f})",
            ),
            ("step, median", f"{host['step_us_median'] / 1000:.2f} ms"),
            ("(begin + commit) / step", percent(host["share_of_step"], 2)),
            ("(begin + commit) / all steps", percent(host["share_of_time"], 2)),
        ]
    fallbacks = engine["fallbacks"] or {"none": 0}
    for reason, count in fallbacks.items():
        rows.append(("fallbacks: " + reason, number(count)))
    title = f"what {name} did in {number(done['num_runs'])} counted runs"
    return Table(title, ("", ""), rows)


def verdict_lines(result: Result) -> list[str]:
    """The comparison in words, against the project's budgets."""
    lines = []
    on_cpu = result["environment"]["device"] == "cpu"
    summary = result["summary"]
    if "ratio" in summary:
        ratio = summary["ratio"]
        control = Interval(**ratio[CONTROL])
        for name in summaries.tested(result):
            overlaps = control.overlaps(Interval(**ratio[name]))
            word = "overlaps" if overlaps else "does NOT overlap"
            lines.append(
                f"the interval of {pair_of(result, name)} {word} that of "
                f"{pair_of(result, CONTROL)}"
            )
            if not on_cpu:
                lines.append(
                    f"{pair_of(result, name)} at least {summaries.RATIO_BUDGET} at the "
                    f"low end: {summaries.verdict(ratio[name], ratio[CONTROL])}"
                )
        if summary["until"] is not None:
            reached = "reached" if summary["until_reached"] else "NOT reached"
            lines.append(
                f"--pairs-until-ci {summary['until']:g} {reached} with "
                f"{summary['num_pairs']} pairs"
            )
    if result.get("true_off") and result["true_off"]["kv_blocks"] is not None:
        lost = result["true_off"]["kv_blocks"] - result["engine"]["kv_blocks"]
        lines.append(f"KV blocks that NWOR costs: {number(lost)}")
    for name, done in summary["nwor"].items():
        if done["host"] is not None:
            lines.append(_host_line(name, done["host"], on_cpu))
    return lines


def _host_line(name: str, host: dict[str, float], on_cpu: bool) -> str:
    """begin and commit against their budget."""
    if on_cpu:
        share = host["share_of_step"]
        word = "within" if share <= CPU_SHARE_BUDGET else "MISSES"
        return (
            f"(begin + commit) / step of {name}: {percent(share, 2)} {word} the budget "
            f"of {percent(CPU_SHARE_BUDGET)}"
        )
    spent = host["begin_us_median"] + host["commit_us_median"]
    word = "within" if spent <= HOST_BUDGET_US else "MISSES"
    return (
        f"begin + commit of {name}: {spent:.1f} us of host time {word} the budget of "
        f"{HOST_BUDGET_US:.0f} us"
    )


def text(result: Result) -> str:
    """The whole report for a terminal."""
    parts = ["environment\n" + _indented(environment_lines(result))]
    if result["warnings"]:
        parts.append("warnings\n" + _indented(result["warnings"]))
    parts.append("check\n" + _indented([outputs_line(result)]))
    tables = [acceptance_table(result), speed_table(result)]
    if result["mode"] == "compare":
        tables.append(ratio_table(result))
    parts += [table.text() for table in [*tables, *nwor_tables(result)]]
    verdicts = verdict_lines(result)
    if verdicts:
        parts.append("in words\n" + _indented(verdicts))
    return "\n\n".join(parts)


def _indented(lines: list[str]) -> str:
    return "\n".join("  " + line for line in lines)
