# SPDX-License-Identifier: Apache-2.0
"""Blocks of documents and their views: what a row is made of; a difference shows."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from benchmarks import reach, report

from tools.results import render

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


# --- blocks of documents

OPEN, END = "<!-- results: {} -->\n", "<!-- /results -->\n"


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
    assert text.count("drafts logged  ") == 1
    readme.write_text(text.replace("drafts logged  ", "drafts logged  1"))
    capsys.readouterr()
    assert render.main([*arguments, "--check"]) == 1
    said = "README.md is not what results/ says: block 'bench_cpu.json all'; run: "
    assert capsys.readouterr().err == f"{said}python tools/results/render.py\n"
    block = f"{OPEN.format('bench_cpu.json engines')}{END}"
    readme.write_text(block)
    assert render.main(arguments) == 2
    assert "not a file of kind gpu_engines" in capsys.readouterr().err
    assert readme.read_text() == block


def test_what_the_documents_show_is_what_the_views_make_of_the_files():
    """All of VIEWS, over the committed files: their rows, figures, verdicts and order,
    of hundreds of results. Below is what no committed result has."""
    assert render.main(["--check"]) == 0
    shown = "".join(path.read_text() for path in render.READMES)
    views_shown = {what.split()[-1] for _, what, _ in render.BLOCK.findall(shown)}
    assert views_shown == set(render.VIEWS)


# --- views


def committed(name="bench_gpu_v2-k4-a70_b1"):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("lost", [0, 64])
def test_bytes_are_held_against_the_shape_and_drafts_against_the_batch(lost):
    for path in RESULTS.glob("bench_gpu_v*.json"):
        result = committed(path.stem)
        args, of_modes = result["arguments"], result["summary"]["nwor"]
        drafts = args["batch_size"] * args["num_speculative_tokens"]
        if "cow" in of_modes:
            of_modes["cow"]["restored_bytes"] -= lost
        rows = report.rendered("bytes", results=[result]).splitlines()[2:]
        assert len(rows) == len(of_modes)
        for row in map(cells, rows):
            assert 0 < float(row[5]) <= drafts, path
            assert row[8:] == (["0", f"{-lost}"] if row[3] == "cow" else ["-", "-"])


def run_of_cell(date, ratios, *change):
    """change: where another value is, and it."""
    run = committed()
    run["environment"]["date"] = date
    run["summary"]["nwor"]["stage"]["host"]["begin_us_median"] = ratios[0] * 10
    run["summary"]["nwor"]["stage"]["host"]["commit_us_median"] = 1
    run["samples"]["stage"] = {"ratio": ratios, "test": [8.0], "reference": [4.0]}
    *folders, key, value = change or ("mode", "compare")
    found = run
    for name in folders:
        found = found[name]
    found[key] = value
    return run


def test_pairs_are_pooled_of_runs_of_one_cell_and_device_against_no_hooks():
    first, second = (
        run_of_cell("2026-01-01", [2.0]),
        run_of_cell("2026-01-02", [3.0, 5]),
    )
    others = [
        run_of_cell("2026-01-03", [9.0], *change)
        for change in (
            ("cell", "v2-k8-a50"),
            ("environment", "gpu", "NVIDIA H100"),
            ("arguments", "batch_size", 16),
            ("baseline", "hooks idle"),
        )
    ]
    (found,) = report.pooled([others[0], second, *others[1:], first])
    assert found["summary"]["ratio"]["stage"]["median"] == 3
    assert found["environment"] == second["environment"]
    assert report.host_range(found, "stage") == "26.0 us (21.0 to 31.0)"
    assert len(report.together([found, others[0]])["runs"]) == 3


def test_a_failed_check_and_an_unsettled_row_are_in_the_engines_line():
    name, entry = next(iter(committed("gpu_engines")["entries"].items()))
    entry["problems"] = {"bytes": ["a slot"], "outputs": []}
    entry["unsettled"] = ["aborts: tokens", "aborts, plain: tokens"]
    markdown = report.rendered("engines", result={"entries": {name: entry}})
    row = cells(markdown.splitlines()[-1])
    assert (row[0], row[7:9]) == (name, ["bytes", "aborts"])


# --- the tables of docs/reach.md


@pytest.mark.parametrize(
    ("found", "line"),
    [
        # One engine of several that fails takes its backend along; one that was
        # stopped proves nothing of it, and where vLLM differs from itself nothing of
        # its outputs.
        ("FLASH, FLASH bytes, TRITON", "exact: TRITON; **failed**: FLASH"),
        (
            "FLASH, FLASH started, TRITON started, TRITON started bytes",
            "**failed**: TRITON; incomplete: FLASH",
        ),
        (
            "FLASH, FLASH unsettled, TRITON bytes, TRITON unsettled",
            "exact bytes, outputs unsettled: FLASH; **failed**: TRITON",
        ),
    ],
)
def test_a_method_on_a_gpu_is_as_good_as_its_worst_engine(found, line):
    """Each engine's backend, and the checks that found something."""
    known = next(iter(committed("gpu_engines")["entries"].values()))
    known["environment"]["packages"]["vllm"] = "0.26.0"
    entries = {}
    for engine in found.split(", "):
        backend, *bad = engine.split()
        spec = {"runner": "v2", "drafter": "mtp", "backend": backend}
        entries[len(entries)] = known | {
            "engine": spec | {"tensor_parallel": 1},
            "problems": {"outputs": [], **{one: ["what"] for one in bad}},
            "seconds": {"off": 1.0, "stage": 1.0},
            "unsettled": [],
        }
        if bad == ["unsettled"]:
            entries[len(entries) - 1] |= {"problems": {}, "unsettled": ["batch 1"]}
    result = {"kind": "gpu_engines", "entries": entries}
    rows = map(cells, reach.tables("method", [result]).splitlines())
    wanted = ["mtp", "0.26.0", "V2", "untested", line]
    assert [row for row in rows if row[:2] == wanted[:2]] == [wanted]


def test_the_tables_of_the_documents_have_every_result():
    """Read from the files, not by the code that renders them."""
    text = (ROOT / "docs" / "reach.md").read_text()
    for path in RESULTS.glob("cpu_engines*.json"):
        for entry in committed(path.stem)["entries"].values():
            where = f"| {entry['name']} | {entry['vllm']} | {entry['runner']} |"
            (line,) = [one for one in text.splitlines() if one.startswith(where)]
            assert entry["verdict"] in line
            assert f"- **{entry['verdict']}**: " in text
            if reason := entry.get("reason"):
                noted = rf"^(\d+)\. {re.escape(reason)}$"
                numbers = re.findall(noted, text, re.MULTILINE)
                assert any(f"{entry['verdict']} ({one})" in line for one in numbers)


# --- documents


def test_the_picture_shows_no_trace():
    runs = committed("picture")["runs"]
    vanilla, nwor = runs["vllm"], runs["nwor"]
    assert (vanilla["tokens"], vanilla["steps"]) == (nwor["tokens"], nwor["steps"])
    cleaned = str.maketrans({"x": "o", "d": "."})
    assert [row.translate(cleaned) for row in vanilla["slots"]] == nwor["slots"]
    assert {"x", "d"} <= set("".join(vanilla["slots"]))


def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def test_every_link_of_a_document_leads_somewhere_and_the_readme_is_short():
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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
