# SPDX-License-Identifier: Apache-2.0
"""Blocks of documents and their views: what a row is made of; a difference shows."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from benchmarks import picture, reach, report
from PIL import Image

from tools.results import render

ROOT = Path(__file__).resolve().parents[2]
SLOT = 2 * 2 * 8 * 128 * 32  # bytes of a token of shape:llama-8b, bf16


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


# --- blocks of documents


def test_a_block_is_rendered_checked_and_named(tmp_path, capsys):
    readme = tmp_path / "README.md"
    arguments = ["--readme", str(readme)]
    blocks = "".join(
        f"text\n<!-- results: {what} -->\n<!-- /results -->\n"
        for what in ("bench_cpu.json all", "bench_gpu_v1-k4*.json cells")
    )
    readme.write_text(blocks)
    assert render.main([*arguments, "--check"]) == 1
    assert readme.read_text() == blocks
    assert render.main(arguments) == 0
    text = readme.read_text()
    assert text.count("drafts logged  ") == 1
    readme.write_text(text.replace("drafts logged  ", "drafts logged  1"))
    capsys.readouterr()
    assert render.main([*arguments, "--check"]) == 1
    said = "README.md is not what results/ says: block 'bench_cpu.json all'; run: "
    assert capsys.readouterr().err == f"{said}python tools/results/render.py\n"


OPEN, END = "<!-- results: {} -->\n", "<!-- /results -->"
UNUSABLE = {
    OPEN.format("bench_cpu.json all"): f"has no '{END}' after it",
    OPEN.format("a.json all") + END: "block 'a.json all': a.json cannot be read",
    OPEN.format("bench_cpu.json engines") + END: "not a file of kind gpu_engines",
}


@pytest.mark.parametrize("block", UNUSABLE)
def test_unusable_block_is_named(block, capsys, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(block)
    assert render.main(["--readme", str(readme)]) == 2
    assert UNUSABLE[block] in capsys.readouterr().err
    assert readme.read_text() == block


def test_what_the_documents_show_is_what_the_views_make_of_the_files():
    """All of VIEWS, over the committed files: their rows, figures, verdicts and order,
    of hundreds of results. Below is what no committed result has."""
    assert render.main(["--check"]) == 0
    shown = "".join(path.read_text() for path in render.READMES)
    views_shown = {what.split()[-1] for _, what, _ in render.BLOCK.findall(shown)}
    assert views_shown == set(render.VIEWS)


# --- views


@pytest.mark.parametrize("lost", [0, 64])
def test_bytes_are_held_against_the_shapes(lost):
    host = {"num_begins": 6, "num_runs": 3}  # of one run two
    done = {"staged": 8, "committed": 6, "rejected": 2, "num_runs": 1, "host": host}
    done |= {"logged_bytes": 8 * SLOT, "restored_bytes": 2 * SLOT - lost}
    args = {"runner": "v2", "method": "eagle", "batch_size": 1}
    result = {
        "model": "shape:llama-8b",
        "arguments": args | {"num_speculative_tokens": 4},
        "environment": {"gpu": "NVIDIA GeForce RTX 4090"},
        "summary": {"nwor": {"cow": done}},
    }
    assert cells(report.rendered("bytes", results=[result]).splitlines()[-1]) == [
        *("GeForce RTX 4090", "v2, eagle, k = 4", "1", "cow", "0.75"),
        *("4.0", "0.50 MiB", "0.12 MiB", "0", "-64" if lost else "0"),
    ]


def run_of_cell(date, ratios, cell="v2-k4-a70", gpu="NVIDIA H200", **others):
    host = {"begin_us_median": ratios[0] * 10, "commit_us_median": 1}
    samples = {"stage": {"ratio": ratios, "test": [8.0] * len(ratios)}}
    samples["control"] = {"ratio": [1.0] * len(ratios), "test": []}
    return {
        **{"mode": "compare", "baseline": "unhooked", "cell": cell, "samples": samples},
        **{"model": "m", "arguments": {"batch_size": 1}},
        "environment": {"date": date, "gpu": gpu, "packages": {}, "variables": {}},
        "summary": {"ratio": {"stage": {}}, "nwor": {"stage": {"host": host}}},
        **others,
    }


def test_pairs_are_pooled_of_runs_of_one_cell_and_device_against_no_hooks():
    first, second = (
        run_of_cell("2026-01-01", [2.0]),
        run_of_cell("2026-01-02", [3.0, 5]),
    )
    others = [
        run_of_cell("2026-01-03", [9.0], cell="v2-k8-a50"),
        run_of_cell("2026-01-03", [9.0], gpu="NVIDIA H100"),
        run_of_cell("2026-01-03", [9.0], arguments={"batch_size": 16}),
        run_of_cell("2026-01-03", [9.0], baseline="hooks idle"),
    ]
    (found,) = report.pooled([others[0], second, *others[1:], first])
    assert found["summary"]["ratio"]["stage"]["median"] == 3
    assert found["environment"] == second["environment"]
    assert report.host_range(found, "stage") == "26.0 us (21.0 to 31.0)"
    assert len(report.together([found, others[0]])["runs"]) == 3


def test_no_step_has_more_drafts_than_its_batch_may_have():
    for path in (ROOT / "results").glob("bench_gpu_v*.json"):
        result = json.loads(path.read_text())
        args = result["arguments"]
        drafts = args["batch_size"] * args["num_speculative_tokens"]
        rows = report.rendered("bytes", results=[result]).splitlines()[2:]
        assert rows
        assert all(0 < float(cells(row)[5]) <= drafts for row in rows), path


def test_a_failed_check_and_an_unsettled_row_are_in_the_engines_line():
    path = ROOT / "results" / "gpu_engines.json"
    name, entry = next(iter(json.loads(path.read_text())["entries"].items()))
    entry["problems"] = {"bytes": ["a slot"], "outputs": []}
    entry["unsettled"] = ["aborts: tokens", "aborts, plain: tokens"]
    markdown = report.rendered("engines", result={"entries": {name: entry}})
    row = cells(markdown.splitlines()[-1])
    assert (row[0], row[7:9]) == (name, ["bytes", "aborts"])


# --- the tables of docs/reach.md


def gpu_entry(drafter, backend, bad=""):
    """Of mode stage. bad: checks that found something, or "unsettled"."""
    is_unsettled = bad == "unsettled"
    checks = () if is_unsettled else bad.split()
    engine = {"runner": "v2", "drafter": drafter, "backend": backend}
    return {
        "engine": engine | {"tensor_parallel": 1},
        "problems": {"outputs": [], **{check: ["what"] for check in checks}},
        "unsettled": ["batch 1: vanilla differs from itself"] * is_unsettled,
        "seconds": {"off": 1.0, "stage": 1.0},
        "environment": {"packages": {"vllm": "0.26.0"}},
    }


FLASH, TRITON = "FLASH_ATTN", "TRITON_ATTN"
ENGINES = [
    *[("eagle", FLASH), ("eagle", FLASH, "bytes"), ("eagle", TRITON)],
    *[("mtp", FLASH), ("mtp", FLASH, "started")],
    *[("mtp", TRITON, "started"), ("mtp", TRITON, "started bytes")],
    *[("medusa", FLASH), ("medusa", FLASH, "unsettled")],
    *[("medusa", TRITON, "bytes"), ("medusa", TRITON, "unsettled")],
]
# One engine of several that fails takes its backend along; one that was stopped proves
# nothing of it, and where vLLM differs from itself nothing of its outputs.
LINES = {
    "eagle": "exact: TRITON_ATTN; **failed**: FLASH_ATTN",
    "mtp": "**failed**: TRITON_ATTN; incomplete: FLASH_ATTN",
    "medusa": "exact bytes, outputs unsettled: FLASH_ATTN; **failed**: TRITON_ATTN",
}


def test_a_method_on_a_gpu_is_as_good_as_its_worst_engine():
    """What names and kinds there are is in the documents."""
    entries = dict(enumerate(gpu_entry(*one) for one in ENGINES))
    result = {"kind": "gpu_engines", "entries": entries}
    table = [cells(row) for row in reach.tables("method", [result]).split("\n")]
    rows = [row for row in table if row[0] in LINES and row[1] == "0.26.0"]
    assert {name: rest for name, *_, rest in rows} == LINES
    assert {(*row[2:4],) for row in rows} == {("V2", "untested")}


def test_the_tables_of_the_documents_have_every_result():
    """Read from the files, not by the code that renders them."""
    text = (ROOT / "docs" / "reach.md").read_text()
    for path in (ROOT / "results").glob("cpu_engines*.json"):
        for entry in json.loads(path.read_text())["entries"].values():
            where = f"| {entry['name']} | {entry['vllm']} | {entry['runner']} |"
            (line,) = [one for one in text.splitlines() if one.startswith(where)]
            assert entry["verdict"] in line
            assert f"- **{entry['verdict']}**: " in text
            if reason := entry.get("reason"):
                noted = rf"^(\d+)\. {re.escape(reason)}$"
                numbers = re.findall(noted, text, re.MULTILINE)
                assert any(f"{entry['verdict']} ({one})" in line for one in numbers)


# --- documents


def test_the_picture_is_drawn_from_its_file_and_shows_no_trace():
    result = json.loads((ROOT / "results" / "picture.json").read_text())
    pictures = (io.BytesIO(picture.drawn(result)), ROOT / "docs" / "picture.png")
    drawn, shown = (np.asarray(Image.open(one)) for one in pictures)
    assert np.array_equal(drawn, shown)
    vanilla, nwor = result["runs"]["vllm"], result["runs"]["nwor"]
    assert (vanilla["tokens"], vanilla["steps"]) == (nwor["tokens"], nwor["steps"])
    cleaned = str.maketrans({"x": "o", "d": "."})
    assert [row.translate(cleaned) for row in vanilla["slots"]] == nwor["slots"]
    assert {"x", "d"} <= set("".join(vanilla["slots"]))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def test_every_link_of_a_document_leads_somewhere():
    bad = []
    for folder in (".", "docs", "results", "tools/*"):
        for path in ROOT.glob(f"{folder}/*.md"):
            for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
                target, _, anchor = link.partition("#")
                if target.startswith("https://"):
                    continue
                found = (path.parent / target).resolve() if target else path
                if not found.exists() or (anchor and anchor not in anchors(found)):
                    bad.append((path.name, link))
    assert bad == []
