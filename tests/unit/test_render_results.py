# SPDX-License-Identifier: Apache-2.0
"""The views of GPU results: what a row is made of, and that a difference shows."""

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from benchmarks import picture, reach, views
from PIL import Image

from tests.gpu import results
from tools.results import render

ROOT = Path(__file__).resolve().parents[2]
SLOT = 2 * 2 * 8 * 128 * 32  # bytes of a token of shape:llama-8b, bf16


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("lost", [0, 64])
def test_bytes_are_held_against_the_shapes(lost):
    done = {"staged": 8, "committed": 6, "rejected": 2, "host": {"num_begins": 2}}
    done |= {"logged_bytes": 8 * SLOT, "restored_bytes": 2 * SLOT - lost}
    args = {"runner": "v2", "method": "eagle", "batch_size": 1}
    result = {
        "model": "shape:llama-8b",
        "arguments": args | {"num_speculative_tokens": 4},
        "environment": {"gpu": "NVIDIA GeForce RTX 4090"},
        "summary": {"nwor": {"cow": done}},
    }
    assert cells(views.rendered("bytes", results=[result]).splitlines()[-1]) == [
        *("GeForce RTX 4090", "v2, eagle, k = 4", "1", "cow", "0.75"),
        *("4.0", "0.50 MiB", "0.12 MiB", "0", "-64" if lost else "0"),
    ]
    with pytest.raises(views.BadBlock, match="needs a named shape, not smol"):
        views.rendered("bytes", results=[result | {"model": "smol"}])


def test_a_failed_check_and_an_unsettled_row_are_in_the_engines_line():
    path = ROOT / "results" / "gpu_engines.json"
    name, entry = next(iter(json.loads(path.read_text())["entries"].items()))
    entry["problems"] = {"bytes": ["a slot"], "outputs": []}
    entry["unsettled"] = ["aborts: tokens", "aborts, plain: tokens"]
    markdown = views.rendered("engines", result={"entries": {name: entry}})
    row = cells(markdown.splitlines()[-1])
    assert (row[0], row[7:9]) == (name, ["bytes", "aborts"])


def test_what_the_documents_show_is_what_the_views_make_of_the_files(capsys):
    """All of VIEWS, over the committed files: their rows, verdicts and order."""
    assert render.main(["--check"]) == 0
    shown = "".join(path.read_text() for path in render.READMES)
    views_shown = {what.split()[-1] for _, what, _ in render.BLOCK.findall(shown)}
    assert views_shown == set(render.VIEWS)


def test_a_file_of_another_kind_or_mode_is_refused():
    with pytest.raises(views.BadBlock, match="not a file of kind gpu_engines"):
        render.load(ROOT / "results" / "bench_cpu.json", kind="gpu_engines")
    with pytest.raises(views.BadBlock, match="needs mode compare, not cow"):
        views.rendered("cells", results=[{"mode": "cow"}])


def test_extremes_are_chosen_by_the_median_ratio():
    path = next((ROOT / "results").glob("bench_gpu_*.json"))
    result = json.loads(path.read_text())

    def of(batch, **medians):
        changed = copy.deepcopy(result)
        changed["arguments"]["batch_size"] = batch
        found = changed["summary"]
        control = found["ratio"]["control"]
        ratio = {name: control | {"median": one} for name, one in medians.items()}
        found["ratio"] = {**ratio, "control": control}
        host = {"begin_us_median": 20.0, "commit_us_median": 10.0 + batch}
        found["nwor"] = {name: {"host": host} for name in medians}
        return changed

    results = [
        *(of(1, cow=0.99, stage=0.7), of(2, cow=0.97)),
        *(of(3, cow=0.98), of(4, cow=0.96)),
    ]
    rows = views.rendered("extremes", results=results).splitlines()[2:]
    cow, stage = rows[-2:]
    assert cow.startswith("- cow: median of the ratios 0.9750; budget of through")
    assert cow.endswith(" 31.0 to 34.0 us, over its budget of 40 us in 0.")
    assert stage.endswith("31.0 to 31.0 us, over its budget of 30 us in 1.")
    del rows[-3:]
    found = list(map(cells, rows))

    assert [(row[0], row[4], row[7][:6]) for row in found] == [
        ("cow, best of 4", "1", "0.9900"),
        ("cow, median", "2", "0.9700"),
        ("cow, worst", "4", "0.9600"),
        *((f"stage, {one}", "1", "0.7000") for one in ("best of 1", "median", "worst")),
    ]


# --- the tables of docs/reach.md


def cpu_entry(name, mode, verdict, kind="method", **more):
    where = {"vllm": "0.32.0", "runner": "V1", "backend": "CPU_ATTN"}
    entry = {"kind": kind, "name": name, "mode": mode, "verdict": verdict}
    return where | entry | more


def cpu_result(*entries):
    return {"kind": "cpu_engines", "entries": dict(enumerate(entries))}


def gpu_result(mode, *specs):
    """specs: (name, runner, drafter, backend, ranks, problems)."""
    names = ("runner", "drafter", "backend", "tensor_parallel")
    return {
        "kind": "gpu_engines",
        "entries": {
            name: {
                "engine": dict(zip(names, spec, strict=True)),
                "problems": {
                    "started": [one for one in problems if one == "stopped"],
                    "bytes": [one for one in problems if one != "stopped"],
                    "outputs": [],
                },
                "seconds": {"off": 1.0, mode: 1.0},
                "environment": {"packages": {"vllm": "0.26.0"}},
            }
            for name, *spec, problems in specs
        },
    }


def tables(results, kind="method"):
    return reach.tables(kind, results)


def rows_of(markdown, name):
    """The lines of a name in a table of methods, and what stands below the table."""
    table, _, notes = markdown.partition("\n\n")
    rows = map(cells, table.split("\n"))
    return [row[1:] for row in rows if row[0] == name], notes


def test_what_no_result_names_is_untested():
    result = cpu_result(cpu_entry("eagle", "cow", "exact"))
    (row,), notes = rows_of(tables([result]), "dspark")
    assert row == [", ".join(reach.VERSIONS), "", "untested", "untested"]
    assert notes == ""
    rows, _ = rows_of(tables([result]), "eagle")
    assert rows == [
        ["0.32.0", "V1", "exact: CPU_ATTN", "untested"],
        ["0.26.0, 0.29.0, 0.33.0", "", "untested", "untested"],
    ]


def test_a_refusal_is_told_with_its_sentence_and_a_failure_as_such():
    result = cpu_result(
        cpu_entry("custom_class", "cow", "refused", reason="it may"),
        cpu_entry("custom_class", "stage", "refused", reason="it may"),
        cpu_entry("mtp", "cow", "exact"),
        cpu_entry("mtp", "stage", "failed"),
        cpu_entry("a hybrid", "stage", "refused", kind="model", reason="zeroes"),
    )
    markdown = tables([result])
    (row, _), notes = rows_of(markdown, "custom_class")
    assert row[2:] == ["refused (1): CPU_ATTN", "refused (1): CPU_ATTN"]
    assert notes == "1. it may"
    (row, _), _ = rows_of(markdown, "mtp")
    assert row[2:] == ["exact: CPU_ATTN", "**failed**: CPU_ATTN"]
    assert "a hybrid" not in markdown
    (row, _), notes = rows_of(tables([result], "model"), "a hybrid")
    assert (row[2:], notes) == (["untested", "refused (1): CPU_ATTN"], "1. zeroes")


def test_what_an_engine_of_a_gpu_is_about_has_a_line_of_its_own():
    result = gpu_result(
        "cow",
        ("one", "v2", "dspark", "FLASH_ATTN", 1, []),
        ("two", "v2", "dspark", "FLASH_ATTN", 1, []),
        ("three", "v1", "draft_model", "FLASH_ATTN", 1, []),
        ("four", "v2", "eagle", "FLASH_ATTN", 1, ["a slot"]),
        ("five", "v2", "eagle", "FLASH_ATTN", 1, []),
    )
    engines = {name: entry["engine"] for name, entry in result["entries"].items()}
    engines["two"]["adaptive"] = engines["four"]["dynamic"] = True
    engines["three"]["rejection"] = "fly"
    engines["five"]["executor"] = "ray"
    found = {one["name"]: one["verdict"] for one in reach.entries(result)}
    assert found == {
        "dspark": "exact",
        "dspark, adaptive verification": "exact",
        "fly rejection": "exact",
        "eagle, dynamic k": "failed",
        "Ray": "exact",
    }
    assert found.keys() <= {name for names in reach.NAMES.values() for name in names}


def test_one_engine_of_several_that_fails_takes_its_backend_along():
    """One that was stopped proves nothing of its backend."""
    result = gpu_result(
        "stage",
        ("one", "v2", "eagle", "FLASH_ATTN", 1, []),
        ("other", "v2", "eagle", "FLASH_ATTN", 1, ["a slot"]),
        ("third", "v2", "eagle", "TRITON_ATTN", 1, []),
        ("two ranks", "v2", "eagle", "FLASH_ATTN", 2, []),
        ("fourth", "v2", "mtp", "FLASH_ATTN", 1, []),
        ("fifth", "v2", "mtp", "FLASH_ATTN", 1, ["stopped"]),
        ("sixth", "v2", "mtp", "TRITON_ATTN", 1, ["stopped", "a slot"]),
    )
    for kind, name, wanted in (
        ("method", "eagle", "exact: TRITON_ATTN; **failed**: FLASH_ATTN"),
        ("method", "mtp", "**failed**: TRITON_ATTN; incomplete: FLASH_ATTN"),
        ("parallelism", "tensor parallel 2", "exact: FLASH_ATTN"),
    ):
        (row, *_), _ = rows_of(tables([result], kind), name)
        assert row == ["0.26.0", "V2", "untested", wanted]


def test_the_tables_of_the_documents_have_every_result():
    """Read from the files, not by the code that renders them."""
    text = (ROOT / "docs" / "reach.md").read_text()
    for path in (ROOT / "results").glob("cpu_engines*.json"):
        for entry in json.loads(path.read_text())["entries"].values():
            where = f"| {entry['name']} | {entry['vllm']} | {entry['runner']} |"
            (line,) = [one for one in text.splitlines() if one.startswith(where)]
            assert entry["verdict"] in line
            assert entry.get("reason", "") in text


# --- entries of engines


def test_entries_that_are_saved_at_once_are_all_there(tmp_path, monkeypatch):
    monkeypatch.setenv(results.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(results.environment, "describe", lambda *_: {"packages": {}})

    def save(number):
        results.save("a.json", "k", "c", {f"engine {number}": {"n": number}})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(save, range(40)))

    found = json.loads((tmp_path / "a.json").read_text())["entries"]
    assert {entry["n"] for entry in found.values()} == set(range(40))


# --- documents


def test_the_picture_is_drawn_from_its_file_and_shows_no_trace(tmp_path):
    result = json.loads((ROOT / "results" / "picture.json").read_text())
    picture.draw(result, tmp_path / "drawn.png")
    paths = (tmp_path / "drawn.png", ROOT / "docs" / "picture.png")
    drawn, shown = (np.asarray(Image.open(path)) for path in paths)
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


@pytest.mark.parametrize(
    "document",
    [
        path.relative_to(ROOT).as_posix()
        for folder in (".", "docs", "results", "tools/*")
        for path in sorted(ROOT.glob(f"{folder}/*.md"))
    ],
)
def test_every_link_of_a_document_leads_somewhere(document):
    path = ROOT / document
    bad = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        target, _, anchor = link.partition("#")
        if target.startswith("https://"):
            continue
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            bad.append(link)
    assert bad == []
