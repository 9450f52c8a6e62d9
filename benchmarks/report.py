# SPDX-License-Identifier: Apache-2.0
"""What is shown of results: the text that bench_vllm.py prints, and Markdown for
tools/results/render.py, a template a view (views.yml).

templates/VIEW.md gets `result`, the content of a file in results/, or `results`, of
several, and nothing else; the functions below are its filters. report.md is what
bench_vllm.py prints; two views are of that text: `everything` and `short`.
"""

from __future__ import annotations

import inspect
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import environment, settings, summary
from benchmarks.ab import CONTROL, Interval, median_interval

Result = dict[str, Any]
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class BadBlock(Exception):
    """A block or a file cannot be used; the message is a whole sentence."""


# -- numbers and columns --------------------------------------------------------------


def columns(text: str, left: bool = False) -> str:
    """Lines of cells with "|" between them, aligned and indented: the first column to
    the left, the others to the right unless `left` is set."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *("<" if left else ">") * (len(widths) - 1)]
    shown = "  ".join(f"{{:{s}{w}}}" for s, w in zip(sides, widths, strict=True))
    return "".join(f"  {shown.format(*row)}".rstrip() + "\n" for row in rows)


def number(value: float) -> str:
    """A count with thin groups: 1234567 is 1 234 567."""
    return f"{value:,.0f}".replace(",", " ")


def percent(share: float, digits: int = 1) -> str:
    """0.1234 is 12.3 %."""
    return f"{share * 100:.{digits}f} %"


def spread(ratio: Mapping[str, float]) -> str:
    """A median with its low and high end."""
    return f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"


def alike(acceptance: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """How often the draft at each position was accepted, and of how many windows;
    neighbours with the same count share a line: "1 to 3"."""
    counts = acceptance["accepted_per_position"], acceptance["per_position"]
    first = 1
    for (count, share), group in itertools.groupby(zip(*counts, strict=True)):
        last = first + len(list(group)) - 1
        yield " to ".join(map(str, sorted({first, last}))), count, share
        first = last + 1


def speed(side: dict[str, float]) -> str:
    """Tokens a second and latency, four cells."""
    latencies = f"{side['latency_s_median']:.3f} s | {side['latency_s_p95']:.3f} s"
    return f"{side['tokens_per_second']:.1f} | {latencies} | {side['num_runs']:.0f}"


# -- of any result ---------------------------------------------------------------------


def device(result: Result) -> str:
    """The GPU, or the processor where there was none."""
    env = result["environment"]
    return env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"


def short_device(result: Result) -> str:
    """A GPU's name up to its number: "H100" of "NVIDIA H100 80GB HBM3"."""
    name = device(result).removeprefix("NVIDIA ")
    found = re.match(r"[^\d]*\d\S*", name)
    return found.group() if found else name


def measured(entry: Result) -> str:
    """Date and commit of an entry, two cells."""
    env = entry["environment"]
    return f"{env['date'].removesuffix(' UTC')} | {str(env['commit'])[:8]}"


def cell(text: str) -> str:
    """A text without what ends a cell. Older files say otherwise what checks.py says of
    a probe now."""
    probed = r"(\d+) different in (\d+ runs of \d+ tokens)"
    return re.sub(probed, r"\2, distinct outputs: \1", text).replace("|", "/")


# -- of an engine on a GPU -------------------------------------------------------------


def failed_checks(entry: Result) -> str:
    return ", ".join(filter(entry["problems"].get, entry["problems"])) or "none"


def unsettled_rows(entry: Result) -> str:
    unclear = {re.split("[:,]", what)[0] for what in entry["unsettled"]}
    return ", ".join(sorted(unclear)) or "none"


# -- of a comparison -------------------------------------------------------------------


def tested(result: Result) -> list[str]:
    """The arms that a comparison tested. Raises BadBlock if it is none."""
    if result["mode"] != "compare":
        raise BadBlock(f"the view cells needs mode compare, not {result['mode']}")
    return summary.tested(result)


def runner(result: Result) -> str:
    env = result["environment"]
    v2 = env["variables"].get("VLLM_USE_V2_MODEL_RUNNER")
    name = {"0": "V1", "1": "V2"}.get(v2, "default")
    release = env["packages"].get("vllm", environment.GPU_RELEASE)
    if not release.startswith(environment.GPU_RELEASE):
        name += f", vLLM {release}"
    if block_size := result["arguments"].get("block_size"):
        name += f", blocks of {block_size}"
    has_metrics = env["variables"].get("VLLM_NWOR_EMIT_METRICS") != "0"
    return name if has_metrics else f"{name}, no metrics"


def log_size(result: Result) -> str:
    return f"{result['engine']['log_bytes'] / 2**20:.0f} MiB"


def verdict(result: Result, name: str) -> str:
    ratio = result["summary"]["ratio"]
    found = summary.verdict(ratio[name], ratio[CONTROL])
    return found.replace("missed", "**missed**")


def to_cow(result: Result, name: str) -> str:
    """The ratio of what was tested as `name` to mode cow, of the same rounds."""
    ratio = _to_cow(result, name)
    return spread(asdict(ratio)) if ratio else "-"


def _to_cow(result: Result, name: str) -> Interval | None:
    samples = result["samples"]
    if name == "cow" or "cow" not in samples:
        return None
    rates = samples[name]["test"], samples["cow"]["test"]
    return median_interval([one / cow for one, cow in zip(*rates, strict=True)])


def host_us(result: Result, name: str) -> float:
    """begin + commit."""
    host = result["summary"]["nwor"][name]["host"]
    return host["begin_us_median"] + host["commit_us_median"]


def slot_bytes(result: Result) -> int:
    """Bytes of a slot in all layers, as they follow from the shape. Raises BadBlock."""
    name = result["model"].removeprefix(settings.SHAPE)
    if name not in settings.SHAPES:
        raise BadBlock(f"the view bytes needs a named shape, not {name}")
    shape = settings.SHAPES[name]
    of_layer = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return of_layer * shape["num_hidden_layers"]


# -- of several comparisons ------------------------------------------------------------


def by_mode(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results in which an arm was tested, by its name; the best ratio first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        for name in tested(result):
            found.setdefault(name, []).append(result)
    return {
        name: sorted(ones, key=lambda one: -one["summary"]["ratio"][name]["median"])
        for name, ones in found.items()
    }


def budgets(results: Sequence[Result], name: str) -> str:
    """How many of them hold the budgets of throughput and of host time. Raises BadBlock
    if there are none."""
    if not results:
        raise BadBlock(f"no measurement of {name} to count")
    verdicts = [verdict(one, name) for one in results]
    num_met, num_noise = verdicts.count("met"), sum("holds" in one for one in verdicts)
    spent = [host_us(one, name) for one in results]
    budget = summary.HOST_BUDGET_US
    to_cow = [ratio for one in results if (ratio := _to_cow(one, name))]
    slower = sum(ratio.high < 1 for ratio in to_cow)
    beside = f"; slower than `cow` in {slower} of {len(to_cow)}" if to_cow else ""
    return (
        f"`{name}`: low end at least {summary.RATIO_BUDGET} in {num_met + num_noise} "
        f"of {len(results)} measurements (in {num_noise} of these no difference was "
        f"resolved from noise); begin + commit {min(spent):.1f} to {max(spent):.1f} "
        f"us, over its budget of {budget:.0f} us in {sum(us > budget for us in spent)}"
        f"{beside}."
    )


def pooled(results: Sequence[Result]) -> list[Result]:
    """As `together`, of each cell that ran more than once on such a device and release
    with hooks off as its baseline."""
    cells: dict[tuple[object, ...], list[Result]] = {}
    for one in results:
        if one["baseline"] == "unhooked":
            key = one["cell"], one["arguments"]["batch_size"], runner(one)
            cells.setdefault((*key, short_device(one)), []).append(one)
    return [together(runs) for runs in cells.values() if len(runs) > 1]


def together(results: Sequence[Result]) -> Result:
    """The first of the results, with the pairs of all, whose ratios are each of one
    run. runs: all of them."""
    first, *_ = results
    samples = {
        name: {
            key: [sample for one in results for sample in one["samples"][name][key]]
            for key in lists
        }
        for name, lists in first["samples"].items()
    }
    ratio = {name: asdict(median_interval(of["ratio"])) for name, of in samples.items()}
    return first | {
        "runs": [run for one in results for run in one.get("runs", [one])],
        "samples": samples,
        "summary": first["summary"] | {"ratio": ratio},
    }


def host_range(result: Result, name: str) -> str:
    """begin + commit of the runs that were put together, their median and range."""
    spent = [host_us(run, name) for run in result["runs"]]
    middle = statistics.median(spent)
    return f"{middle:.1f} us ({min(spent):.1f} to {max(spent):.1f})"


def once_an_engine(results: Sequence[Result]) -> list[Result]:
    """One for all batch sizes of an engine: that which has more in it."""
    rows: dict[tuple[object, ...], Result] = {}
    for result in results:
        args, start_s = result["arguments"], result["engine"]["start_s"]
        engine = (short_device(result), args["runner"], args["context"], start_s)
        if "true_off" in result or engine not in rows:
            rows[engine] = result
    return list(rows.values())


TEMPLATES.filters |= {
    name: one
    for name, one in globals().copy().items()
    if inspect.isfunction(one) and one.__module__ == __name__
}
TEMPLATES.filters["own_process"] = summary.own_process
TEMPLATES.globals["summary"] = summary


def rendered(view: str, **content: Any) -> str:
    """templates/VIEW.md with `result` or `results`. Raises BadBlock."""
    try:
        return TEMPLATES.get_template(f"{view}.md").render(content).rstrip("\n")
    except jinja2.UndefinedError as error:
        raise BadBlock(f"a file lacks what the view {view} shows: {error}") from error


def text(result: Result) -> str:
    """What bench_vllm.py prints."""
    return rendered("report", result=result)


def everything(result: Result) -> str:
    """What bench_vllm.py printed."""
    return f"```\n{text(result)}\n```"


def short(result: Result) -> str:
    """Four of the lines that bench_vllm.py printed: of the check of the outputs, both
    ratios of a comparison, and its last one, the conclusion."""
    lines = text(result).splitlines()
    check, ratios = lines.index("check") + 1, lines.index("tokens/s, ratio") + 2
    shown = [lines[check].strip(), *lines[ratios : ratios + 2], lines[-1].strip()]
    return "\n".join(["```", *shown, "```"])
