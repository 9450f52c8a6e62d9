# SPDX-License-Identifier: Apache-2.0
"""What documents show of results: a difference shows, and a bad number is not hidden
among good ones."""

import copy
import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
from benchmarks import reach, report

from tools.results import render

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
OPEN, END = "<!-- results: {} -->\n", "<!-- /results -->\n"


@functools.cache
def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def committed(name="bench_gpu_v2-k4-a70_b1"):
    return copy.deepcopy(read(name))


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


# --- blocks of documents


def test_a_block_is_rendered_checked_and_named(tmp_path, capsys):
    readme = tmp_path / "README.md"
    arguments = ["--readme", str(readme)]
    blocks = ("bench_cpu.json all", "bench_gpu_v1-k4*.json cells")
    text = "".join(f"text\n{OPEN.format(what)}{END}" for what in blocks)
    readme.write_text(text)
    assert render.main([*arguments, "--check"]) == 1
    assert readme.read_text() == text
    assert render.main(arguments) == 0
    text = readme.read_text()
    assert text.count("drafts protected  ") == 1
    readme.write_text(text.replace("drafts protected  ", "drafts protected  1"))
    capsys.readouterr()
    assert render.main([*arguments, "--check"]) == 1
    said = "README.md is not what results/ says: block 'bench_cpu.json all'; run: "
    assert capsys.readouterr().err == f"{said}python tools/results/render.py\n"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("bench_cpu.json engines", "bench_cpu.json is not a file of kind gpu_engines"),
        ("gone*.json cells", "no file in results/ matches gone*.json"),
    ],
)
def test_a_block_that_cannot_be_made_is_named_and_nothing_written(
    what, said, tmp_path, capsys
):
    readme = tmp_path / "README.md"
    readme.write_text(text := f"{OPEN.format(what)}{END}")
    assert render.main(["--readme", str(readme)]) == 2
    assert f"render: block '{what}': {said}" in capsys.readouterr().err
    assert readme.read_text() == text


def test_the_documents_show_what_the_files_say():
    """Below is what no committed result has."""
    assert render.main(["--check"]) == 0


# --- views


@pytest.mark.parametrize("lost", [0, 64])
def test_restored_bytes_are_held_against_the_models_shape(lost):
    """And what stage committed against the rows that are kept."""
    result = committed()
    result["summary"]["nwor"]["cow"]["restored_bytes"] -= lost
    staged = result["summary"]["nwor"]["stage"]
    kept = (staged["committed"] + staged["windows"]) * report.slot_bytes(result)
    staged["committed_bytes"] = kept // 2
    rows = map(cells, report.rendered("bytes", results=[result]).splitlines()[2:])
    found = {row[3]: row[8:] for row in rows}
    assert found == {"cow": ["0", f"{-lost}", "-"], "stage": ["-", "-", "0.50"]}


def test_pairs_are_pooled_of_runs_against_no_hooks():
    """And of one cell on one device: committed results have others."""
    runs = [committed() for _ in range(3)]
    for run, ratios in zip(runs, ([2.0], [3.0, 5.0], [9.0]), strict=True):
        run["samples"]["stage"]["ratio"] = ratios
    runs[2]["baseline"] = "hooks idle"
    (found,) = report.pooled(runs)
    assert found["summary"]["ratio"]["stage"]["median"] == 3


# --- engines on a GPU


def engine(name, **changes):
    """An entry of gpu_engines: one of the committed ones, changed."""
    known = next(iter(committed("gpu_engines")["entries"].values()))
    known["environment"]["packages"]["vllm"] = "0.26.0"
    known["engine"] |= {"runner": "v2", "drafter": "mtp", "backend": name}
    fine = {"seconds": {"stage": 1.0}, "problems": {}, "unsettled": []}
    return known | fine | changes


FAILED = {"problems": {"bytes": ["a slot"], "outputs": []}}
STOPPED = {"problems": {"started": ["why"]}}
UNSETTLED = {"unsettled": ["aborts: tokens", "aborts, plain: tokens"]}


@pytest.mark.parametrize(
    ("better", "worse", "line"),
    [
        ({}, FAILED, "exact: TRITON; **failed**: FLASH"),
        (STOPPED, FAILED, "exact: TRITON; **failed**: FLASH"),
        # One that was stopped proves nothing.
        ({}, STOPPED, "exact: TRITON; incomplete: FLASH"),
        # Where vLLM differs from itself, nothing of its outputs.
        ({}, UNSETTLED, "exact: TRITON; exact bytes, outputs unsettled: FLASH"),
    ],
)
def test_a_backend_is_as_good_as_its_worst_engine(better, worse, line):
    flash = [engine("FLASH", **better), engine("FLASH", **worse)]
    entries = [*flash, engine("TRITON"), engine("FLASH", **better)]
    result = {"kind": "gpu_engines", "entries": dict(enumerate(entries))}
    rows = map(cells, reach.tables("method", [result]).splitlines())
    wanted = ["mtp", "0.26.0", "V2", "untested", line]
    assert [row for row in rows if row[:2] == wanted[:2]] == [wanted]


def test_a_failed_check_and_an_unsettled_row_are_in_the_engines_line():
    entries = {"a": engine("FLASH", **FAILED | UNSETTLED)}
    markdown = report.rendered("engines", result={"entries": entries})
    row = cells(markdown.splitlines()[-1])
    assert (row[0], row[7:9]) == ("a", ["bytes", "aborts"])


def test_a_programs_verdict_and_a_mutations_have_lines():
    sanitizer = committed("gpu_sanitizer")
    (entry,) = sanitizer["entries"].values()
    entry = entry | {"exit_status": {"kernels": 1}}
    entry["tests"] = {"kernels": {"passed": 5, "failed": 2, "skipped": 0}}
    new = {"kind": "gpu_kernels", "entries": {"all": entry}}
    mutation = {"name": "no_undo", "outcome": "survived"}
    planted = entry | {"kind": "mutation_check", "mutations": [mutation]}
    markdown = report.rendered("verdicts", results=[planted, new, sanitizer])
    rows = [cells(row)[:5] for row in markdown.splitlines()[2:]]
    assert rows[:2] == [
        ["kernels", "1", "5", "2", "0"],
        ["planted", "9", "0", "1", "0"],
    ]
    assert rows[-1] == ["mutation no_undo", "survived", "-", "-", "-"]


@pytest.mark.parametrize("strays", [{"layer 0": [17]}, {"": []}])
def test_a_fault_that_changed_real_blocks_is_in_its_line(strays):
    """Also bytes that are in no layer."""
    faults = committed("gpu_faults")
    faults["entries"]["eagle-flash-v1-async"]["sampler"]["sampler"]["looks"][0][
        "strays"
    ] = strays
    rows = map(cells, report.rendered("faults", result=faults).splitlines()[2:])
    changed = [row[:2] for row in rows if row[7] != "no"]
    assert changed == [["eagle-flash-v1-async", "sampler"]]


def test_tokens_that_are_not_vllms_are_in_the_engines_line():
    copied = committed("gpu_copied_table")
    copied["entries"]["copying-flex-forced"]["is_vanillas"] = False
    rows = map(cells, report.rendered("copied", result=copied).splitlines()[2:])
    assert [row[0] for row in rows if row[4] != "yes"] == ["copying-flex-forced"]


# --- documents


def test_the_tables_of_the_documents_have_every_result():
    """Read from the files, not by the code that renders them."""
    text = (ROOT / "docs" / "reach.md").read_text()
    for path in RESULTS.glob("cpu_engines*.json"):
        for entry in read(path.stem)["entries"].values():
            where = f"| {entry['name']} | {entry['vllm']} | {entry['runner']} |"
            (line,) = [one for one in text.splitlines() if one.startswith(where)]
            shown = dict(zip(("cow", "stage"), cells(line)[3:], strict=True))
            assert entry["verdict"] in shown[entry["mode"]]
            if "reason" in entry:
                number = re.search(r"\((\d+)\)", shown[entry["mode"]])[1]
                assert f"\n{number}. {entry['reason']}\n" in text


def test_the_picture_shows_no_trace():
    runs = read("picture")["runs"]
    vanilla, nwor = runs["vllm"], runs["nwor"]
    assert (vanilla["tokens"], vanilla["steps"]) == (nwor["tokens"], nwor["steps"])
    cleaned = str.maketrans({"x": "o", "d": "."})
    assert [row.translate(cleaned) for row in vanilla["slots"]] == nwor["slots"]
    assert {"x", "d"} <= set("".join(vanilla["slots"]))


def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def test_every_link_of_a_document_leads_somewhere():
    bad = []
    listed = ["git", "-C", str(ROOT), "ls-files", "*.md"]
    for name in subprocess.check_output(listed, text=True).split():
        path = ROOT / name
        for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", path.read_text()):
            target, _, anchor = link.partition("#")
            found = (path.parent / target).resolve() if target else path
            if not found.exists() or (anchor and anchor not in anchors(found)):
                bad.append((name, link))
    assert bad == []


def test_budgets_are_counted_by_the_low_end():
    """Within noise, beyond it, and the control's own distance taken off; 30 us of host
    time are within the budget. What is as fast as cow is not slower."""

    def measured(low, median, control, us, speed=1.0):
        samples = {"stage": {"test": [speed] * 3}, "cow": {"test": [1.0] * 3}}
        ratio = {"stage": {"low": low, "median": median}, "control": control}
        host = {"begin_us_median": us - 10, "commit_us_median": 10}
        found = {"ratio": ratio, "nwor": {"stage": {"host": host}}}
        return {"summary": found, "samples": samples}

    quiet, biased = {"low": 0.999, "high": 1.001}, {"low": 1.002, "high": 1.003}
    results = [
        measured(0.9951, 0.997, quiet, 30.0, speed=0.9),
        measured(0.9951, 1.0, quiet, 20.0),
        measured(0.9949, 1.0, quiet, 30.1),
        measured(0.9951, 0.997, biased, 25.0),
    ]
    assert report.budgets(results, "stage") == (
        "`stage`: low end at least 0.995 in 2 of 4 measurements (in 1 of these no "
        "difference was resolved from noise); begin + commit 20.0 to 30.1 us, over its "
        "budget of 30 us in 1; slower than `cow` in 1 of 4."
    )
