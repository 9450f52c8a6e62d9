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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import numpy

from benchmarks import ab, reach, records, settings, summary
from benchmarks.ab import CONTROL, Interval
from benchmarks.records import Line

# Rated bandwidth of a GPU's memory, to be added for others; goals of `longer_by`.
BYTES_A_US = {"H100": 3.35e6, "H200": 4.8e6}
LAUNCHES_US, LOST_GOAL = 10, 0.002

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


def longer_by(line: Line) -> dict[str, list[float]]:
    """By mode, and for the control, by how many microseconds a step is longer, with the
    ends of the interval: low, median, high; then the goal (results/README.md)."""
    of = line["summary"]
    step_us = of["nwor"]["stage"]["host"]["step_us_median"]
    found = {
        name: [step_us / ratio[end] - step_us for end in ("high", "median", "low")]
        for name, ratio in of["ratio"].items()
    }
    for mode, done in of["nwor"].items():
        # Of mode stage, older lines lack what was logged for want of a seat.
        moved = of["nwor"]["cow"]["logged_bytes"] / of["nwor"]["cow"]["staged"]
        moved *= done["staged"] * (1 - done["shadow_windows"] / done["windows"])
        for copied in ("restored_bytes", "shadow_copied_bytes", "committed_bytes"):
            moved += done[copied]
        steps = done["host"]["num_begins"] * done["num_runs"] / done["host"]["num_runs"]
        us = 2 * moved / steps / BYTES_A_US[device(line)]  # read and written
        found[mode].append(min(us + LAUNCHES_US, step_us * LOST_GOAL))
    return found


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

    def medians(drawn: Any) -> list[Any]:
        return [numpy.median(numpy.concatenate([runs[i] for i in of])) for of in drawn]

    return ab.bootstrap(len(runs), medians) if len(runs) > 1 else None


def lost(runs: Sequence[Sequence[float]]) -> str:
    """The percentage that is lost, with the range of other runs if there are several"""
    middle = statistics.median(itertools.chain(*runs))
    if (found := run_interval(runs)) is None:
        return f"{loss(middle)} % (one run)"
    return f"{loss(middle)} % ({loss(found.high)} to {loss(found.low)})"


def ends(values: Iterable[int]) -> str:
    """ "1 to 64"; "16" of equal ones."""
    known = sorted(values)
    return " to ".join(map(str, sorted({known[0], known[-1]})))


def costs(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """A row for each vLLM, runner, model and drafter (key) and mode, of the lines with
    the kernels that are in the tree; of older lines where there are no others. runs,
    itself: ratios by engine start, of the mode and of the control."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in comparing(lines, "cow stage"):
        of = line["key"]
        key = of["vllm"], of["runner"], real_model(line), of["drafter"]
        groups.setdefault(key, []).append(line)
    for key, all_of in sorted(groups.items()):
        of = [line for line in all_of if records.is_current(line)] or all_of
        for mode in of[0]["key"]["mode"].split():
            yield {
                "key": key,
                "mode": mode,
                "of": of,
                "runs": records.ratios(of, mode),
                "itself": records.ratios(of, CONTROL),
            }


# -- templates -------------------------------------------------------------------------


TEMPLATES.filters |= {
    name: one
    for name, one in globals().copy().items()
    if inspect.isfunction(one) and one.__module__ == __name__
}
TEMPLATES.filters["own_process"] = summary.own_process
TEMPLATES.tests["current"] = records.is_current
TEMPLATES.globals.update(json=json, reach=reach, records=records, summary=summary)


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
