# SPDX-License-Identifier: Apache-2.0
"""What is shown of results: the text that bench_vllm.py prints, and the tables of
documents. templates/VIEW.md makes each from the lines of results/, by the functions
below, which are its filters. No template computes a number.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import numpy

from benchmarks import ab, reach, records, settings, summary
from benchmarks.ab import CONTROL, Interval
from benchmarks.records import Line

FOLDER = Path(__file__).with_name("templates")
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class BadBlock(Exception):
    """A table cannot be made; the message is a whole sentence."""


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


def loss(ratio: float) -> str:
    """A ratio as the percentage that is lost: 0.998 is 0.2."""
    return f"{round(100 - 100 * ratio, 1) + 0.0:.1f}"


# -- of any line -----------------------------------------------------------------------


def device(line: Line) -> str:
    """A GPU's name up to its number, "H100" of "NVIDIA H100 80GB HBM3", or the
    processor where there was none."""
    machine = line["machine"]
    name = (machine.get("gpu") or machine["cpu"]).removeprefix("NVIDIA ")
    found = re.match(r"[^\d]*\d\S*", name)
    return found.group() if found and "gpu" in machine else name


def commit(line: Line) -> str:
    """With marks: uncommitted changes; other kernels than are in the tree."""
    mark = "" if records.is_current(line) else reach.OLDER
    return f"{line['commit'][:8]}{'+' * line['commit'].endswith('+')}{mark}"


def measured(line: Line) -> str:
    """Date and commit, two cells."""
    return f"{line['date'].removesuffix(' UTC')} | {commit(line)}"


def failed_checks(found: Mapping[str, Any]) -> str:
    return ", ".join(filter(found["problems"].get, found["problems"])) or "none"


def unsettled_rows(found: Mapping[str, Any]) -> str:
    unclear = {re.split("[:,]", what)[0] for what in found["unsettled"]}
    return ", ".join(sorted(unclear)) or "none"


def by_engine(lines: Sequence[Line]) -> list[dict[str, Line]]:
    """Lines of engines of tests/gpu, those of one engine and vLLM together, by mode."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for line in lines:
        key = line["key"]
        if "engine" in key:
            found.setdefault((key["vllm"], key["engine"]), {})[key["mode"]] = line
    names = sorted(found, key=lambda key: key[1])
    return [found[key] for key in sorted(names, key=lambda k: k[0], reverse=True)]


# -- of comparisons --------------------------------------------------------------------


def comparing(lines: Sequence[Line], modes: str, has_gpu: bool = True) -> list[Line]:
    """The lines that compared these modes: "cow stage"."""
    return [
        line
        for line in lines
        if line["key"]["mode"] == modes and ("gpu" in line["machine"]) == has_gpu
    ]


def accepted(line: Line) -> str:
    found = line["summary"]["acceptance"]
    return f"{found['accepted'] / max(found['drafted'], 1):.2f}"


def verdict(line: Line, name: str) -> str:
    ratio = line["summary"]["ratio"]
    found = summary.verdict(ratio[name], ratio[CONTROL])
    return found.replace("missed", "**missed**")


def to_cow(line: Line) -> str:
    """The ratio of mode stage to mode cow, of the same rounds."""
    of = line["pairs"]
    found = [stage / cow for stage, cow in zip(of["stage"], of["cow"], strict=True)]
    return spread(asdict(ab.median_interval(found)))


def host_us(line: Line, name: str) -> float:
    """begin + commit."""
    host = line["summary"]["nwor"][name]["host"]
    return host["begin_us_median"] + host["commit_us_median"]


def real_model(line: Line) -> str:
    """A comma and its name, or nothing for random weights."""
    return "" if line["model"].startswith(settings.SHAPE) else f", {line['model']}"


def slot_bytes(line: Line) -> int:
    """Bytes of a slot in all layers, as they follow from the shape."""
    shape = settings.SHAPES[line["model"].removeprefix(settings.SHAPE)]
    of_layer = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return of_layer * shape["num_hidden_layers"]


def once(lines: Sequence[Line], *names: str) -> list[Line]:
    """The first of the lines with the same values of these members of their keys or
    arguments."""
    found: dict[tuple[object, ...], Line] = {}
    for line in lines:
        known = line["arguments"] | line["key"]
        found.setdefault(tuple(known[name] for name in names), line)
    return sorted(found.values(), key=lambda line: line["date"], reverse=True)


# -- what NWOR costs -------------------------------------------------------------------


def run_interval(runs: Sequence[Sequence[float]]) -> Interval | None:
    """The median of all samples and the interval of the bootstrap that draws whole
    runs: samples of one run are not independent, so that an interval over samples would
    be too narrow. None of a single run, which says nothing of another."""
    if len(runs) < 2:
        return None
    from scipy import stats

    def median(drawn: Any) -> float:
        return float(numpy.median(numpy.concatenate([runs[int(i)] for i in drawn])))

    numbers = numpy.arange(len(runs))
    found = stats.bootstrap(
        (numbers,),
        median,
        vectorized=False,
        n_resamples=ab.NUM_RESAMPLES,
        confidence_level=ab.CONFIDENCE_PERCENT / 100,
        method="percentile",
        rng=0,
    ).confidence_interval
    return Interval(median(numbers), float(found.low), float(found.high))


def lost(runs: Sequence[Sequence[float]]) -> str:
    """The percentage that is lost, with the range of other runs if there are several"""
    middle = statistics.median(itertools.chain(*runs))
    if (found := run_interval(runs)) is None:
        return f"{loss(middle)} % (one run)"
    return f"{loss(middle)} % ({loss(found.high)} to {loss(found.low)})"


def _ends(values: Sequence[int]) -> str:
    """ "1 to 64"; "16" of equal ones. values: sorted."""
    return " to ".join(map(str, sorted({values[0], values[-1]})))


def costs(lines: Sequence[Line]) -> Iterator[dict[str, str]]:
    """A row for each vLLM, runner, model, drafter and mode, of the lines with the
    kernels that are in the tree; of older lines where there are no others."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in comparing(lines, "cow stage"):
        of = line["key"]
        key = of["vllm"], of["runner"], real_model(line), of["drafter"]
        groups.setdefault(key, []).append(line)
    for key, all_of in sorted(groups.items()):
        of = [line for line in all_of if records.is_current(line)] or all_of
        batches = sorted({line["key"]["batch"] for line in of})
        for mode in of[0]["key"]["mode"].split():
            worst = min(of, key=lambda one: one["summary"]["ratio"][mode]["median"])
            verdicts = [verdict(line, mode) for line in of]
            missed, unclear = map(verdicts.count, ("**missed**", "not resolved"))
            spent = sorted(round(host_us(line, mode)) for line in of)
            runs = records.ratios(of, mode)
            mark = "" if records.is_current(of[0]) else f" {reach.OLDER}"
            where, of_worst = worst["key"], worst["summary"]["ratio"]
            yield {
                "name": f"{key[0]}-{key[1]}",
                "vllm": key[0] + mark,
                "runner": f"{key[1]}, {key[3]}{key[2]}",
                "batch": _ends(batches),
                "mode": mode,
                "lost": lost(runs),
                "control": lost(records.ratios(of, CONTROL)),
                "worst": f"{loss(of_worst[mode]['median'])} % ({where['drafts']} "
                f"drafts, {accepted(worst)} accepted, batch {where['batch']}, "
                f"{device(worst)}; vLLM itself {loss(of_worst[CONTROL]['median'])} %)",
                "budget": f"{len(of) - unclear - missed}, {unclear}, "
                f"{f'**{missed}**' if missed else 0}",
                "host": f"{_ends(spent)} us",
                "runs": f"{len(runs)}",
            }


# -- templates -------------------------------------------------------------------------


def _mutations() -> dict[str, Any]:
    path = records.RESULTS / "mutation_check.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


TEMPLATES.filters |= {
    name: one
    for name, one in globals().copy().items()
    if inspect.isfunction(one) and one.__module__ == __name__
}
TEMPLATES.filters["own_process"] = summary.own_process
TEMPLATES.tests["current"] = records.is_current
TEMPLATES.globals |= {"summary": summary, "reach": reach, "mutations": _mutations}


def rendered(view: str, lines: Sequence[Line] | None = None, **content: Any) -> str:
    """templates/VIEW.md, of these lines, or of the newest of each key in the file that
    its first line names: "{# KIND: ...". Raises BadBlock."""
    path = FOLDER / f"{view}.md"
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.md")))
        raise BadBlock(f"there is no view {view!r}; views: {known}")
    kind = path.read_text(encoding="utf-8").removeprefix("{# ").partition(":")[0]
    try:
        if lines is None:
            lines = records.newest(records.read(kind))
        return TEMPLATES.get_template(path.name).render(lines=lines, **content).strip()
    except (jinja2.UndefinedError, KeyError, OSError, ValueError) as error:
        raise BadBlock(f"{kind}.jsonl cannot be shown as {view}: {error}") from error


def text(line: Line) -> str:
    """What bench_vllm.py prints."""
    return rendered("report", [line])


def short(lines: Sequence[Line]) -> str:
    """Four lines of what bench_vllm.py printed about the newest comparison on a CPU:
    the check of the outputs, both ratios and the conclusion."""
    printed = text(comparing(lines, "nwor", has_gpu=False)[0]).splitlines()
    check, ratios = printed.index("check") + 1, printed.index("tokens/s, ratio") + 2
    return "\n".join(
        [printed[check].strip(), *printed[ratios : ratios + 2], printed[-1].strip()]
    )


TEMPLATES.filters["short"] = short
