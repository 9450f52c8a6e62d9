# SPDX-License-Identifier: Apache-2.0
"""Markdown of results, a function a view, for tools/results/render.py.

Each takes the content of a file in results/, or of several. A row of a table is a
dictionary: what stands in each column, by its head.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import models, report, summary
from benchmarks.ab import CONTROL
from benchmarks.tables import Table, number, spread

Result = dict[str, Any]
Row = dict[str, str]


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


def cells(results: Sequence[Result]) -> str:
    """A line for each tested arm of a file: what was compared with which baseline, its
    ratio beside the control's, whether that is within the budget and the intervals as
    narrow as asked for, host time. First those that were compared with no hooks."""
    ordered = sorted(results, key=lambda one: one.get("baseline") == summary.IDLE)
    return _table([_cell(one, name) for one in ordered for name in _tested(one)])


# What `extremes` leaves out of a line of `cells`.
_DETAILS = ("prompt", "log", "mode", "date, UTC", "commit")


def extremes(results: Sequence[Result]) -> str:
    """Of all the lines of `cells`, for each mode: the best, the median and the worst by
    their median ratio; of an even number of lines the worse of the middle two. Below,
    how many lines hold each budget."""
    modes = dict.fromkeys(name for result in results for name in _tested(result))
    rows, sentences = [], []
    for name in modes:
        found = [one for one in results if name in _tested(one)]
        found.sort(key=lambda one: _median(one, name), reverse=True)
        lines = [_cell(one, name) for one in found]
        places = {f"best of {len(lines)}": 0, "median": len(lines) // 2, "worst": -1}
        for place, index in places.items():
            kept = {k: v for k, v in lines[index].items() if k not in _DETAILS}
            rows.append({"line": f"{name}, {place}"} | kept)
        verdicts = Counter(one["budget"].strip("*").split(",")[0] for one in lines)
        host_us, budget = [_host_us(one, name) for one in found], _budget_us(name)
        sentences.append(
            f"- {name}: median of the ratios "
            f"{statistics.median(_median(one, name) for one in found):.4f}; "
            f"budget of throughput met in {verdicts['met']} of {len(lines)} lines, not "
            f"resolved in {verdicts['not resolved']}, missed in {verdicts['missed']}; "
            f"begin + commit {min(host_us):.1f} to {max(host_us):.1f} us, over its "
            f"budget of {budget:.0f} us in {sum(us > budget for us in host_us)}."
        )
    return "\n".join([_table(rows), "", *sentences])


_budget_us = summary.host_budget_us


def _median(result: Result, name: str) -> float:
    return result["summary"]["ratio"][name]["median"]


def _host_us(result: Result, name: str) -> float:
    host = result["summary"]["nwor"][name]["host"]
    return host["begin_us_median"] + host["commit_us_median"]


def _tested(result: Result) -> list[str]:
    """The arms that a comparison tested. Raises BadBlock if it is none."""
    if result["mode"] != "compare":
        raise BadBlock(f"the view cells needs mode compare, not {result['mode']}")
    return summary.tested(result)


def _cell(result: Result, name: str) -> Row:
    """The line of the tested arm `name`."""
    args, found = result["arguments"], result["summary"]
    ratio, control = found["ratio"][name], found["ratio"][CONTROL]
    drafts, variables = found["acceptance"], result["environment"]["variables"]
    v2 = variables.get("VLLM_USE_V2_MODEL_RUNNER")
    runner = {"0": "V1", "1": "V2"}.get(v2, "default")
    if variables.get("VLLM_NWOR_EMIT_METRICS") == "0":
        runner += ", no metrics"
    has_host = found["nwor"][name]["host"]
    return {
        "model, device": f"{result['model']}, {_short_device(result)}",
        "method, drafts": f"{args['method']}, {args['num_speculative_tokens']}",
        "runner": runner,
        "batch": str(args["batch_size"]),
        "prompt": str(args["context"] or max(result["prompt_tokens"])),
        "accepted": f"{drafts['accepted'] / max(drafts['drafted'], 1):.2f}",
        "log": f"{result['engine']['log_bytes'] / 2**20:.0f} MiB",
        "mode": name,
        "baseline": result["baseline"],
        "mode / baseline (90 %)": spread(ratio),
        "control (90 %)": spread(control),
        "budget": summary.verdict(ratio, control).replace("missed", "**missed**"),
        "pairs": number(found["num_pairs"])
        + ("" if found["until_reached"] else ", too few"),
        "begin + commit": f"{_host_us(result, name):.1f} us" if has_host else "none",
    } | _measured(result)


def host(results: Sequence[Result]) -> str:
    """What begin and commit cost the host, median of the steps, a line a kind; and what
    every hook does, where the file has that."""
    rows, hooks, abouts = [], [], []
    for result in results:
        cell = {"cell": f"{result['cell']}, {_short_device(result)}"}
        for kind, found in result["host"].items():
            spent = {name: f"{one['median_us']:.1f} us" for name, one in found.items()}
            steps = {"steps": number(found["both"]["steps"])}
            rows.append(cell | {"launches": kind} | spent | steps)
        for name, found in result.get("hooks", {}).items():
            spent = {"median": found["median_us"], "mean of a step": found["us_a_step"]}
            times = {of: f"{us:.1f} us" for of, us in spent.items()}
            hooks.append(cell | {"hook": name} | times)
        abouts.append(
            f"{result['environment']['date']}: {result['environment']['gpu']}, "
            f"{result['environment']['cpu']}; batch {result['batch_size']}; "
            f"commit {_measured(result)['commit']}.\n\n{_code(result['command'])}"
        )
    return "\n\n".join([*abouts, _table(rows), *([_table(hooks)] if hooks else [])])


def engines(result: Result) -> str:
    """What each engine is, and what was found there; a line an engine."""
    return _table(list(_engines(result)), left=True)


def _engines(result: Result) -> Iterator[Row]:
    for name, entry in result["entries"].items():
        spec, found = entry["engine"], entry["rows"].values()
        ranks = spec["tensor_parallel"]
        bad = [check for check, problems in entry["problems"].items() if problems]
        unclear = {re.split("[:,]", what)[0] for what in entry["unsettled"]}
        yield {
            "engine": name,
            "runner, drafter": f"{spec['runner'].upper()}, {spec['drafter']}"
            + (f", {ranks} ranks" if ranks > 1 else ""),
            "backend, KV cache": f"{spec['backend']}, "
            + spec["kv_cache"].replace("auto", "bf16"),
            "graphs": spec["graphs"].replace("FULL_AND_PIECEWISE", "both").lower(),
            "async": "yes" if spec["asynchronous"] else "no",
            "rejected slots compared": _sum(found, "rejected_slots_checked"),
            "dirty before commit": _sum(found, "dirty_slots_restored"),
            "failed checks": ", ".join(bad) or "none",
            "rows in which vanilla differs from itself": ", ".join(sorted(unclear))
            or "none",
        } | _measured(entry)


def _sum(rows: Any, name: str) -> str:
    return number(sum(row[name] for row in rows))


def sleep(result: Result) -> str:
    """What NWOR did before a sleep and after each wake-up; a line a phase."""
    rows = []
    for name, entry in result["entries"].items():
        (mode,) = entry.keys() & {"cow", "stage"}
        for phase, found in entry[mode]["phases"].items():
            done = found["rows"].values()
            in_pool = sum(tag is not None for tag in found["pools"].values())
            row = {
                "engine": name,
                "mode": mode,
                "after": phase,
                "windows": _sum(done, "windows"),
                "drafts": _sum(done, "staged"),
                "accepted": _sum(done, "committed"),
                "rejected": _sum(done, "rejected"),
                "our tensors in the pool that sleep empties": number(in_pool),
            }
            rows.append(row | _measured(entry))
    return _table(rows, left=True)


def moved_bytes(results: Sequence[Result]) -> str:
    """Bytes that log and restore copied, a line a file: the drafts, and rejected ones,
    that the device counted, times the bytes of a slot as NWOR found them.

    Expected: the same with the bytes of a slot that follow from the shape.
    """
    return _table(
        [
            _bytes(result, mode, done)
            for result in results
            for mode, done in result["summary"]["nwor"].items()
        ]
    )


def _bytes(result: Result, mode: str, done: dict[str, Any]) -> Row:
    """The line of what one arm did. Raises BadBlock."""
    name = result["model"].removeprefix(models.SHAPE)
    if name not in models.SHAPES:
        raise BadBlock(f"the view bytes needs a named shape, not {name}")
    shape, args = models.SHAPES[name], result["arguments"]
    slot = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    slot *= shape["num_hidden_layers"]
    steps, logged = done["host"]["num_begins"], done["logged_bytes"]
    restored, committed = done["restored_bytes"], done.get("committed_bytes", 0)
    copied = logged + done.get("shadow_copied_bytes", 0)
    expected = (logged - done["staged"] * slot, restored - done["rejected"] * slot)
    over = ("-", "-") if committed else tuple(map(number, expected))
    return {
        "device": _short_device(result),
        "runner, method": f"{args['runner']}, {args['method']}, "
        f"k = {args['num_speculative_tokens']}",
        "batch": str(args["batch_size"]),
        "mode": mode,
        "accepted": f"{done['committed'] / max(done['staged'], 1):.2f}",
        "drafts a step": f"{done['staged'] / steps:.1f}",
        "logged or copied to shadow a step": f"{copied / steps / 2**20:.2f} MiB",
        "restored or committed a step": f"{(restored + committed) / steps / 2**20:.2f}"
        " MiB",
        "logged - expected": over[0],
        "restored - expected": over[1],
    }


def blocks(results: Sequence[Result]) -> str:
    """Memory, a line an engine: the undo log and the KV blocks left; and how fast it
    was without hooks beside one that never loaded NWOR, if that ran.

    An engine that finds its model compiled starts in seconds, and gets more blocks.
    """
    rows: dict[tuple[object, ...], Row] = {}
    for result in results:
        engine, args = result["engine"], result["arguments"]
        own = summary.own_process(result)
        others = "not run"
        if own is not None:
            blocks = result["true_off"]["kv_blocks"]
            others = "not compared" if blocks is None else number(blocks)
        row = {
            "device": _short_device(result),
            "runner": f"{args['runner']}, k = {args['num_speculative_tokens']}",
            "sequences": number(args["max_num_seqs"]),
            "prompt": str(args["context"]),
            "log": f"{engine['log_bytes'] / 2**20:.0f} MiB",
            "start-up": f"{engine['start_s']:.0f} s",
            "KV blocks": number(engine["kv_blocks"]),
        }
        # Once for all batch sizes of an engine; one of them may have more to tell.
        engine_key = (*row.values(), engine["start_s"])
        if own is not None or engine_key not in rows:
            rows[engine_key] = row | {
                "without NWOR": others,
                "baseline": result["baseline"],
                "tokens/s, baseline / without NWOR (its fastest, slowest run)": (
                    "not run" if own is None else spread(own)
                ),
            }
    return _table(list(rows.values()))


def traffic(result: Result) -> str:
    """What the GPU counted for single launches, beside the arithmetic; a line each."""
    rows = []
    for row in result["rows"]:
        counts, drafts = row["counts"], number(row["num_drafts"])
        counted = {
            "to read": row["expected"]["read"],
            "read": counts["read"],
            "to write": row["expected"]["written"],
            "written": counts["written"],
            "read from memory": counts["memory_read"],
            "written to memory": counts["memory_written"],
        }
        about = {"layout": row["layout"], "drafts": drafts}
        about |= {"operation": row["operation"]}
        rows.append(about | {head: number(num) for head, num in counted.items()})
    found = result["environment"]
    about = f"{found['date']}: {found['gpu']}; commit {found['commit']}."
    return "\n\n".join([about, _code(result["command"]), _table(rows)])


def kernels(result: Result) -> str:
    """Bytes a second (read and written) of copy, log and restore; a line a size.

    The shares are medians of per-sample ratios to the copy, as bench_kernels.py prints.
    """
    rows = []
    for case in result["results"]:
        rates = case["gb_per_s"]
        row = {
            "layout": case["layout"],
            "KiB": number(case["bytes"] / 1024),
            "drafts": str(case["num_drafts"]),
            "layers": str(case["num_layers"]),
            "copy, GB/s": f"{rates['copy']:.1f}",
        }
        for name in ("log", "restore"):
            share = case[f"{name}_of_copy"][0]
            row[f"{name}, GB/s (of copy)"] = f"{rates[name]:.1f} ({share:.2f})"
        rows.append(row)
    about = f"{result['environment']['date']}: {_device(result)}."
    return "\n\n".join([about, _code(result["command"]), _table(rows)])


# How older files have what checks.py says of a probe.
_PROBED = re.compile(r"(\d+) different in (\d+ runs of \d+ tokens)")


def soak(result: Result) -> str:
    """The verdicts of a soak, a line a check."""
    env, load = result["environment"], result["load"]
    versions = ", ".join(f"{name} {v}" for name, v in env["packages"].items())
    args = result["arguments"]
    about = (
        f"{env['date']}: {_device(result)}; {versions}; commit {env['commit']}. "
        f"{load['seconds'] / 60:.1f} minutes, {args['concurrency']} requests at a "
        f"time, {args['api_server_count']} API servers."
    )
    rows = []
    for row in result["checks"]:
        found = _PROBED.sub(r"\2, distinct outputs: \1", row["found"])
        cells = {"check": row["name"], "verdict": row["verdict"], "found": found}
        rows.append({head: cell.replace("|", "/") for head, cell in cells.items()})
    return "\n\n".join([about, _code(result["command"]), _table(rows, left=True)])


def _table(rows: Sequence[Row], left: bool = False) -> str:
    """Rows with the same columns."""
    lines = [tuple(row.values()) for row in rows]
    return Table("", tuple(rows[0]), lines, left).markdown()


def _code(command: str) -> str:
    return f"```\n{command}\n```"


def _device(result: Result) -> str:
    """The GPU, or the processor where there was none."""
    env = result["environment"]
    return env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"


def _short_device(result: Result) -> str:
    """A GPU's name up to its number: "H100" of "NVIDIA H100 80GB HBM3"."""
    name = _device(result).removeprefix("NVIDIA ")
    found = re.match(r"[^\d]*\d\S*", name)
    return found.group() if found else name


def _measured(entry: dict[str, Any]) -> Row:
    """Date and commit of an entry."""
    env = entry["environment"]
    date = env["date"].removesuffix(" UTC")
    return {"date, UTC": date, "commit": str(env["commit"])[:8]}
