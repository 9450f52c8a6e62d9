# SPDX-License-Identifier: Apache-2.0
"""Markdown of results, a function a view, for tools/results/render.py.

Each takes the content of a file in results/, or of several.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import models, report, summary
from benchmarks.ab import CONTROL
from benchmarks.tables import Table, number, spread

Result = dict[str, Any]


class BadBlock(Exception):
    """A block or a file cannot be used; the message is a whole sentence."""


def everything(result: Result) -> str:
    """Where, when and with what command it was measured; every table of the report;
    the check of the outputs and the comparison in words."""
    found = dict(line.split(None, 1) for line in report.environment_lines(result))
    about = (
        f"{found['date']}: {found['run']}. {found['machine']}; {found['versions']}; "
        f"commit {found['commit']}.\n\n{_code(found['command'])}"
    )
    tables = [report.speed_table(result)]
    if result["mode"] == "compare":
        tables.append(report.ratio_table(result))
    tables += [*report.nwor_tables(result), report.acceptance_table(result)]
    lines = [report.outputs_line(result), *report.verdict_lines(result)]
    words = "\n".join(f"- {line}" for line in lines)
    return "\n\n".join([about, *(table.markdown() for table in tables), words])


def short(result: Result) -> str:
    """Four of the lines that bench_vllm.py printed: of the check of the outputs, both
    ratios of a comparison, and its last one, of host time."""
    _, _, *ratios = report.ratio_table(result).text().splitlines()
    checks = [report.outputs_line(result), report.verdict_lines(result)[-1]]
    return "\n".join(["```", checks[0], *ratios[:2], checks[1], "```"])


_CELLS = (
    "model, device | method, drafts | runner | batch | prompt | accepted | log | "
    "mode | baseline | mode / baseline (90 %) | control (90 %) | budget | pairs | "
    "begin + commit | date, UTC | commit"
)


def cells(results: Sequence[Result]) -> str:
    """A line for each tested arm of a file: what was compared with which baseline, its
    ratio beside the control's, whether that is within the budget and the intervals as
    narrow as asked for, host time. First those that were compared with no hooks."""
    rows = []
    for result in sorted(results, key=lambda one: one.get("baseline") == summary.IDLE):
        rows += [_cell(result, name) for name in _tested(result)]
    return _markdown(_CELLS, rows)


def extremes(results: Sequence[Result]) -> str:
    """Of all the lines of `cells`, for each mode: the best, the median and the worst by
    their median ratio; of an even number of lines the worse of the middle two. Below,
    how many lines hold each budget."""
    by_mode: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
    host_us: dict[str, list[float]] = {}
    for result in results:
        for name in _tested(result):
            median = result["summary"]["ratio"][name]["median"]
            by_mode.setdefault(name, []).append((median, _cell(result, name)))
            host = result["summary"]["nwor"][name]["host"]
            spent = host["begin_us_median"] + host["commit_us_median"]
            host_us.setdefault(name, []).append(spent)
    columns = (0, 1, 2, 3, 5, 8, 9, 10, 11, 12, 13)
    head = _CELLS.split(" | ")
    rows = []
    for name, lines in by_mode.items():
        lines.sort(reverse=True)
        places = {f"best of {len(lines)}": 0, "median": len(lines) // 2, "worst": -1}
        for place, index in places.items():
            cell = lines[index][1]
            rows.append((f"{name}, {place}", *(cell[one] for one in columns)))
    table = _markdown(" | ".join(["line", *(head[one] for one in columns)]), rows)
    sentences = [_budgets(name, by_mode[name], us) for name, us in host_us.items()]
    return "\n".join([table, "", *sentences])


def _budgets(
    name: str, lines: Sequence[tuple[float, tuple[str, ...]]], host_us: Sequence[float]
) -> str:
    """How many lines of a mode hold the budgets of throughput and of host time."""
    verdicts = Counter(cell[11].strip("*").split(",")[0] for _, cell in lines)
    budget = summary.host_budget_us(name)
    over = sum(us > budget for us in host_us)
    return (
        f"- {name}: median of the ratios {statistics.median(m for m, _ in lines):.4f}; "
        f"budget of throughput met in {verdicts['met']} of {len(lines)} lines, not "
        f"resolved in {verdicts['not resolved']}, missed in {verdicts['missed']}; "
        f"begin + commit {min(host_us):.1f} to {max(host_us):.1f} us, over its budget "
        f"of {budget:.0f} us in {over}."
    )


def _tested(result: Result) -> list[str]:
    """The arms that a comparison tested. Raises BadBlock if it is none."""
    if result["mode"] != "compare":
        raise BadBlock(f"the view cells needs mode compare, not {result['mode']}")
    return summary.tested(result)


def _cell(result: Result, name: str) -> tuple[str, ...]:
    """The line of the tested arm `name`."""
    args, found = result["arguments"], result["summary"]
    ratio, control = found["ratio"][name], found["ratio"][CONTROL]
    host, drafts = found["nwor"][name]["host"], found["acceptance"]
    variables = result["environment"]["variables"]
    runner = {"0": "V1", "1": "V2"}.get(
        variables.get("VLLM_USE_V2_MODEL_RUNNER", ""), "default"
    )
    if variables.get("VLLM_NWOR_EMIT_METRICS") == "0":
        runner += ", no metrics"
    spent = host and f"{host['begin_us_median'] + host['commit_us_median']:.1f} us"
    return (
        f"{result['model']}, {_short_device(result['environment'])}",
        f"{args['method']}, {args['num_speculative_tokens']}",
        runner,
        str(args["batch_size"]),
        str(args["context"] or max(result["prompt_tokens"])),
        f"{drafts['accepted'] / max(drafts['drafted'], 1):.2f}",
        f"{result['engine']['log_bytes'] / 2**20:.0f} MiB",
        name,
        result["baseline"],
        *map(spread, (ratio, control)),
        summary.verdict(ratio, control).replace("missed", "**missed**"),
        number(found["num_pairs"]) + ("" if found["until_reached"] else ", too few"),
        spent or "none",
        *_measured(result),
    )


def host(results: Sequence[Result]) -> str:
    """What begin and commit cost the host, median of the steps, a line a kind; and what
    every hook does, where the file has that."""
    rows, hooks = [], []
    for result in results:
        cell = f"{result['cell']}, {_short_device(result['environment'])}"
        for kind, found in result["host"].items():
            parts = [found[part] for part in ("begin", "commit", "both")]
            spent = [f"{part['median_us']:.1f} us" for part in parts]
            rows.append((cell, kind, *spent, number(parts[-1]["steps"])))
        for name, found in result.get("hooks", {}).items():
            spent = [f"{found[of]:.1f} us" for of in ("median_us", "us_a_step")]
            hooks.append((cell, name, *spent))
    abouts = [
        f"{result['environment']['date']}: {result['environment']['gpu']}, "
        f"{result['environment']['cpu']}; batch {result['batch_size']}; "
        f"commit {_measured(result)[1]}.\n\n{_code(result['command'])}"
        for result in results
    ]
    tables = [_markdown("cell | launches | begin | commit | both | steps", rows)]
    if hooks:
        tables.append(_markdown("cell | hook | median | mean of a step", hooks))
    return "\n\n".join([*abouts, *tables])


def engines(result: Result) -> str:
    """What each engine is, and what was found there; a line an engine."""
    rows = []
    for name, entry in result["entries"].items():
        spec, found = entry["engine"], entry["rows"].values()
        ranks = spec["tensor_parallel"]
        bad = [check for check, problems in entry["problems"].items() if problems]
        unclear = {re.split("[:,]", what)[0] for what in entry["unsettled"]}
        rows.append(
            (
                name,
                f"{spec['runner'].upper()}, {spec['drafter']}"
                + (f", {ranks} ranks" if ranks > 1 else ""),
                f"{spec['backend']}, {spec['kv_cache'].replace('auto', 'bf16')}",
                spec["graphs"].replace("FULL_AND_PIECEWISE", "both").lower(),
                "yes" if spec["asynchronous"] else "no",
                number(sum(row["rejected_slots_checked"] for row in found)),
                number(sum(row["dirty_slots_restored"] for row in found)),
                ", ".join(bad) or "none",
                ", ".join(sorted(unclear)) or "none",
                *_measured(entry),
            )
        )
    head = (
        "engine | runner, drafter | backend, KV cache | graphs | async | rejected "
        "slots compared | dirty before commit | failed checks | rows in which vanilla "
        "differs from itself | date, UTC | commit"
    )
    return _markdown(head, rows, left=True)


def sleep(result: Result) -> str:
    """What NWOR did before a sleep and after each wake-up; a line a phase."""
    rows = []
    for name, entry in result["entries"].items():
        (mode,) = entry.keys() & {"cow", "stage"}
        for phase, found in entry[mode]["phases"].items():
            counts = [
                sum(row[count] for row in found["rows"].values())
                for count in ("windows", "staged", "committed", "rejected")
            ]
            counts.append(sum(tag is not None for tag in found["pools"].values()))
            rows.append((name, mode, phase, *map(number, counts), *_measured(entry)))
    head = (
        "engine | mode | after | windows | drafts | accepted | rejected | our tensors "
        "in the pool that sleep empties | date, UTC | commit"
    )
    return _markdown(head, rows, left=True)


def moved_bytes(results: Sequence[Result]) -> str:
    """Bytes that log and restore copied, a line a file: the drafts, and rejected ones,
    that the device counted, times the bytes of a slot as NWOR found them.

    Expected: the same with the bytes of a slot that follow from the shape.
    """
    rows = []
    for result in results:
        if not result["summary"]["nwor"]:
            raise BadBlock("the view bytes needs a file measured with NWOR on")
        for mode, done in result["summary"]["nwor"].items():
            rows.append(_bytes(result, mode, done))
    head = (
        "device | runner, method | batch | mode | accepted | drafts a step | logged or "
        "copied to shadow a step | restored or committed a step | logged - expected | "
        "restored - expected"
    )
    return _markdown(head, rows)


def _bytes(result: Result, mode: str, done: dict[str, Any]) -> tuple[str, ...]:
    """The line of what one arm did. Raises BadBlock."""
    name = result["model"].removeprefix(models.SHAPE)
    if name not in models.SHAPES:
        raise BadBlock(f"the view bytes needs a named shape, not {name}")
    if done["host"] is None:
        raise BadBlock("the view bytes needs a file measured with NWOR on")
    shape, args = models.SHAPES[name], result["arguments"]
    slot = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    slot *= shape["num_hidden_layers"]
    steps = done["host"]["num_begins"]
    copied, committed = (
        done.get(name, 0) for name in ("shadow_copied_bytes", "committed_bytes")
    )
    return (
        _short_device(result["environment"]),
        f"{args['runner']}, {args['method']}, k = {args['num_speculative_tokens']}",
        str(args["batch_size"]),
        mode,
        f"{done['committed'] / max(done['staged'], 1):.2f}",
        f"{done['staged'] / steps:.1f}",
        f"{(done['logged_bytes'] + copied) / steps / 2**20:.2f} MiB",
        f"{(done['restored_bytes'] + committed) / steps / 2**20:.2f} MiB",
        *(
            ("-", "-")
            if committed
            else (
                number(done["logged_bytes"] - done["staged"] * slot),
                number(done["restored_bytes"] - done["rejected"] * slot),
            )
        ),
    )


def blocks(results: Sequence[Result]) -> str:
    """Memory, a line an engine: the undo log and the KV blocks left; and how fast it
    was without hooks beside one that never loaded NWOR, if that ran.

    An engine that finds its model compiled starts in seconds, and gets more blocks.
    """
    rows: dict[tuple[object, ...], tuple[str, ...]] = {}
    for result in results:
        engine, args = result["engine"], result["arguments"]
        own = summary.own_process(result)
        others = speed = "not run"
        if own is not None:
            blocks = result["true_off"]["kv_blocks"]
            others = "not compared" if blocks is None else number(blocks)
            speed = spread(own)
        row = (
            _short_device(result["environment"]),
            f"{args['runner']}, k = {args['num_speculative_tokens']}",
            number(args["max_num_seqs"]),
            str(args["context"]),
            f"{engine['log_bytes'] / 2**20:.0f} MiB",
            f"{engine['start_s']:.0f} s",
            number(engine["kv_blocks"]),
        )
        # Once for all batch sizes of an engine; one of them may have more to tell.
        engine_key = (*row, engine["start_s"])
        if own is not None or engine_key not in rows:
            rows[engine_key] = (*row, others, result["baseline"], speed)
    head = (
        "device | runner | sequences | prompt | log | start-up | KV blocks | without "
        "NWOR | baseline | tokens/s, baseline / without NWOR (its fastest, slowest "
        "run)"
    )
    return _markdown(head, list(rows.values()))


def traffic(result: Result) -> str:
    """What the GPU counted for single launches, beside the arithmetic; a line each."""
    rows = []
    for row in result["rows"]:
        expected, counts = row["expected"], row["counts"]
        numbers = [
            *(expected["read"], counts["read"], expected["written"], counts["written"]),
            *(counts["memory_read"], counts["memory_written"]),
        ]
        about = (row["layout"], number(row["num_drafts"]), row["operation"])
        rows.append((*about, *map(number, numbers)))
    head = (
        "layout | drafts | operation | to read | read | to write | written | read "
        "from memory | written to memory"
    )
    found = result["environment"]
    about = f"{found['date']}: {found['gpu']}; commit {found['commit']}."
    return "\n\n".join([about, _code(result["command"]), _markdown(head, rows)])


def kernels(result: Result) -> str:
    """Bytes a second (read and written) of copy, log and restore; a line a size.

    The shares are medians of per-sample ratios to the copy, as bench_kernels.py prints.
    """
    rows = []
    for case in result["results"]:
        rates = case["gb_per_s"]
        ours = [
            f"{rates[name]:.1f} ({case[f'{name}_of_copy'][0]:.2f})"
            for name in ("log", "restore")
        ]
        sizes = (number(case["bytes"] / 1024), str(case["num_drafts"]))
        about = (case["layout"], *sizes, str(case["num_layers"]))
        rows.append((*about, f"{rates['copy']:.1f}", *ours))
    head = (
        "layout | KiB | drafts | layers | copy, GB/s | log, GB/s (of copy) | restore, "
        "GB/s (of copy)"
    )
    about = f"{result['environment']['date']}: {_device(result['environment'])}."
    return "\n\n".join([about, _code(result["command"]), _markdown(head, rows)])


# How older files have what checks.py says of a probe.
_PROBED = re.compile(r"(\d+) different in (\d+ runs of \d+ tokens)")


def soak(result: Result) -> str:
    """The verdicts of a soak, a line a check."""
    env, load = result["environment"], result["load"]
    versions = ", ".join(f"{name} {v}" for name, v in env["packages"].items())
    args = result["arguments"]
    about = (
        f"{env['date']}: {_device(env)}; {versions}; commit {env['commit']}. "
        f"{load['seconds'] / 60:.1f} minutes, {args['concurrency']} requests at a "
        f"time, {args['api_server_count']} API servers."
    )
    rows = [
        tuple(
            _PROBED.sub(r"\2, distinct outputs: \1", row[cell]).replace("|", "/")
            for cell in ("name", "verdict", "found")
        )
        for row in result["checks"]
    ]
    table = _markdown("check | verdict | found", rows, left=True)
    return "\n\n".join([about, _code(result["command"]), table])


def _markdown(head: str, rows: Sequence[tuple[str, ...]], left: bool = False) -> str:
    """A table. head: the columns' names, with " | " between them."""
    return Table("", tuple(head.split(" | ")), rows, left).markdown()


def _code(command: str) -> str:
    return f"```\n{command}\n```"


def _device(environment: dict[str, Any]) -> str:
    """The GPU, or the processor where there was none."""
    found = environment.get("gpu")
    return found or f"{environment['cpu']}, {environment['cores']} cores"


def _short_device(environment: dict[str, Any]) -> str:
    """A GPU's name up to its number: "H100" of "NVIDIA H100 80GB HBM3"."""
    name = _device(environment).removeprefix("NVIDIA ")
    found = re.match(r"[^\d]*\d\S*", name)
    return found.group() if found else name


def _measured(entry: dict[str, Any]) -> tuple[str, str]:
    """Date and commit of an entry."""
    environment = entry["environment"]
    return environment["date"].removesuffix(" UTC"), str(environment["commit"])[:8]
