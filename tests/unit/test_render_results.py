# SPDX-License-Identifier: Apache-2.0
"""Results and the documents that show them: the newest line counts, bad news and old
kernels are visible, and a range is not narrower than it should be."""

import copy
import re
import subprocess
from pathlib import Path

import numpy
import pytest
from benchmarks import ab, files, reach, records, report

from tools.results import render

ROOT = Path(__file__).resolve().parents[2]
RECORD = {
    "key": {"cell": "a"},
    "date": "2026-11-26 10:00 UTC",
    "commit": "abc",
    "machine": {"cpu": "one", "gpu": "one"},
    "versions": {"vllm": "0.33.0"},
    "command": "make bench",
}
OLD = {"kernels": "before"}


def of_kind(kind, **key):
    """A committed line whose key has these members, as of the kernels in the tree."""
    lines = (line for line in records.read(kind) if key.items() <= line["key"].items())
    return copy.deepcopy(next(lines)) | {"kernels": records.KERNELS}


def cells(view, *lines, **content):
    """The rows of a view's table."""
    shown = report.rendered(view, lines, **content).splitlines()
    rows = [row for row in shown if row.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# --- lines


@pytest.mark.parametrize("name", records.MEMBERS)
@pytest.mark.parametrize("value", [None, "", 7])
def test_a_line_without_its_origin_is_refused_by_name(name, value, tmp_path):
    path = tmp_path / "a.jsonl"
    with pytest.raises(records.BadRecord, match=f"a.jsonl: {name} is {value!r}; must"):
        records.append(path, RECORD | {name: value})
    assert not path.exists()


def test_the_newest_line_of_these_kernels_counts():
    def line(kernels, day, number):
        known = {"date": f"2026-11-{day}", "number": number, "kernels": kernels}
        return RECORD | known

    ours, other = records.KERNELS, "before"
    lines = [line(ours, 24, 1), line(ours, 23, 2), line(other, 25, 3)]
    assert [one["number"] for one in records.newest(lines)] == [1]
    assert [one["number"] for one in records.newest(lines[2:])] == [3]
    of_cpu = [one | {"machine": {"cpu": "one"}} for one in lines]
    assert [one["number"] for one in records.newest(of_cpu)] == [3]
    more = [*lines, line(ours, 24, 4), RECORD | {"key": {"cell": "b"}, "number": 5}]
    assert [one["number"] for one in records.newest(more)] == [5, 4]


def test_committed_lines_are_complete_and_hold_no_folder(tmp_path):
    paths = sorted((ROOT / "results").iterdir())
    assert len(paths) <= 20
    for path in paths:
        if path.suffix == ".jsonl":
            for line in records.read(path.stem):
                records.append(tmp_path / path.name, line)
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        elif path.suffix != ".png":
            assert files.recorded(path.read_text()) == path.read_text()


# --- what NWOR costs


def test_a_range_over_runs_is_wider_than_over_their_pairs():
    """Each run has a bias of its own, which all of its pairs share."""
    draw = numpy.random.default_rng(1)
    runs = [draw.normal(bias, 0.001, 50) for bias in draw.normal(0.998, 0.004, 6)]
    by_run = report.run_interval(runs)
    by_pair = ab.median_interval(numpy.concatenate(runs))
    assert by_run.median == by_pair.median
    assert by_run.high - by_run.low > 3 * (by_pair.high - by_pair.low)
    assert report.run_interval(runs[:1]) is None


def measured(median=0.998, low=0.996, us=20.0, **changes):
    """A line of throughput, measured in a run of its own unless `changes` say so."""
    line = of_kind("throughput", cell="v2-k4-a70", vllm="0.26.0") | changes
    line["summary"]["ratio"] = {
        "cow": {"median": median, "low": low, "high": 1.0},
        "stage": {"median": 1.0, "low": 0.996, "high": 1.001},
        "control": {"median": 1.0, "low": 0.999, "high": 1.001},
    }
    host = {"begin_us_median": us, "commit_us_median": 1.0, "step_us_median": 990.0}
    line["summary"]["nwor"] = {"cow": {"host": host}, "stage": {"host": host}}
    return line


def test_costs_are_of_these_kernels_and_name_the_worst_configuration():
    """Both columns rest on the same ratio of each configuration."""
    worst = measured(0.9, low=0.85, us=31, date="2026-11-28")
    lines = [measured(), worst, measured(0.5, 0.4, **OLD)]
    cow, stage = cells("costs", *lines, argument="0.26.0")
    assert cow[0] == "0.26.0"
    assert cow[4] == "5.1 % (0.2 to 10.0)"
    assert cow[5].startswith("10.0 % (4 drafts, ")
    assert (cow[7], stage[7]) == ("1, 0, **1**", "2, 0, 0")
    assert cow[8:] == ["21 to 32 us", "2"]
    assert cells("costs", *lines, argument="0.26.0-V1") == []


def test_costs_of_older_kernels_are_marked_and_one_run_is_no_range():
    """Two batch sizes of one engine start are one run."""
    old = [measured(0.99, **OLD) for _ in range(2)]
    old[0]["key"]["batch"], old[1]["key"]["batch"] = 1, 64
    row, _ = cells("costs", *old, argument="")
    assert row[0] == f"0.26.0 {reach.OLDER}"
    assert row[4] == "1.0 % (one run)"
    assert cells("throughput", old[0])[0][-1].endswith(reach.OLDER)
    (new,) = cells("throughput", measured(0.99))
    assert not new[-1].endswith(reach.OLDER)


@pytest.mark.parametrize(
    ("step_us", "ratio", "shown"),
    [  # 24 MB a step, read and written at 4.8 TB/s, are 10 us
        (50_000, "1.0 0.9998 0.9997", "10 (0 to 15), 20: held"),
        (50_000, "1.0 0.9998 0.999", "10 (0 to 50), 20: held?"),
        (50_000, "0.9998 0.9995 0.999", "25 (10 to 50), 20: missed?"),
        (50_000, "0.9995 0.999 0.998", "50 (25 to 100), 20: missed"),
        (50_000, "1.01 1.005 1.002", "-249 (-495 to -100), 20: gained"),
        (50_000, "1.01 1.005 1.0005", "-249 (-495 to -25), 20: held"),  # as the control
        (5_000, "0.998 0.998 0.998", "10 (10 to 10), 10: missed"),  # 0.2 % is less
    ],
)
def test_what_a_step_is_longer_by_is_held_against_its_bytes(step_us, ratio, shown):
    """Half of the windows are logged in mode stage, too: 16 MB a step, 7 us."""
    line = measured()
    line["machine"]["gpu"], line["key"]["vllm"] = "NVIDIA H200", "0.33.0"
    for name, values in {"cow": ratio, "control": "1.001 1.0 0.999"}.items():
        ends = zip(("high", "median", "low"), map(float, values.split()), strict=True)
        line["summary"]["ratio"][name] = dict(ends)
    host = {"num_begins": 1, "num_runs": 1, "step_us_median": step_us}
    done = {"windows": 100, "staged": 200, "num_runs": 2, "host": host}
    done |= {"shadow_copied_bytes": 0, "committed_bytes": 0, "restored_bytes": 16e6}
    cow = done | {"logged_bytes": 32e6, "shadow_windows": 0}
    stage = done | {"logged_bytes": 0, "shadow_windows": 50}
    line["summary"]["nwor"] = {"cow": cow, "stage": stage}
    (row,) = cells("longer", line, argument="0.33.0")
    assert row[4] == shown
    assert row[5].endswith(f", {min(17, step_us / 500):.0f}: held?")
    assert row[6:] == [f"-{step_us / 1000:.0f} to {step_us / 1000:.0f}", "50 %"]


@pytest.mark.parametrize("lost", [0, 64])
def test_moved_bytes_are_held_against_the_models_shape(lost):
    """And what stage committed against the rows that are kept."""
    line = of_kind("throughput", cell="v2-k4-a70", vllm="0.26.0")
    line["summary"]["nwor"]["cow"]["restored_bytes"] -= lost
    staged = line["summary"]["nwor"]["stage"]
    kept = (staged["committed"] + staged["windows"]) * report.slot_bytes(line)
    staged["committed_bytes"] = kept // 2
    (row,) = cells("bytes", line)
    assert (row[5], row[7]) == (f"0, {-lost}", "0.50")


# --- bad news


def engine(backend, mode="stage", **changes):
    """A line of an engine on a GPU: a committed one, changed."""
    line = of_kind("engines", engine="ngram-flash-piecewise", vllm="0.26.0")
    line["key"] |= {"mode": mode, "engine": backend}
    line["found"]["engine"] |= {"runner": "v2", "drafter": "mtp", "backend": backend}
    line["found"] |= {"problems": {}, "unsettled": []} | changes
    return line


FAILED = {"problems": {"bytes": ["a slot"], "outputs": []}}
STOPPED = {"problems": {"started": ["why"]}}
UNSETTLED = {"unsettled": ["aborts: tokens", "aborts, plain: tokens"]}


@pytest.mark.parametrize(
    ("better", "worse", "shown"),
    [
        ({}, FAILED, "exact: TRITON; **failed**: FLASH"),
        (STOPPED, FAILED, "exact: TRITON; **failed**: FLASH"),
        # One that was stopped proves nothing.
        ({}, STOPPED, "exact: TRITON; incomplete: FLASH"),
        # Where vLLM differs from itself, nothing of its outputs.
        ({}, UNSETTLED, "exact: TRITON; exact bytes, outputs unsettled: FLASH"),
    ],
)
def test_a_backend_is_as_good_as_its_worst_engine(better, worse, shown):
    flash = [engine("FLASH", **better), engine("FLASH", **worse)]
    lines = [*flash, engine("TRITON"), engine("FLASH", **better)]
    rows = cells("reach", *lines, argument="method")
    wanted = ["mtp", "0.26.0", "V2", "untested", shown]
    assert [row for row in rows if row[:2] == wanted[:2]] == [wanted]
    older = cells("reach", engine("FLASH") | OLD, argument="method")
    assert f"exact: FLASH{reach.OLDER}" in [row[4] for row in older]


def test_bad_news_are_in_the_rows():
    (row,) = cells("engines", engine("FLASH", **FAILED | UNSETTLED))
    assert "**bytes**, unsettled: aborts" in row[7]
    copied = of_kind("cases", case="copied_table")
    copied["found"]["is_vanillas"] = False
    assert cells("cases", copied, argument="copied_table")[0][4] == "**no**"
    programs = of_kind("programs", step="kernels")
    programs["found"]["exit_status"] = {"kernels": 1}
    programs["found"]["tests"] = {"kernels": {"passed": 5, "failed": 2, "skipped": 0}}
    assert cells("programs", programs)[0][2] == "kernels: 1 (5, 2, 0)"
    soak = of_kind("soak", device="cpu", mode="stage")
    for check in soak["checks"]:
        if check["name"] in ("KV audit", "probe"):
            check["verdict"] = "fail"
    row = cells("soak", soak)[0]
    assert (row[6][:5], row[7][:18]) == ("fail:", "probe: **failed**,")


@pytest.mark.parametrize("strays", [{"layer 0": [17]}, {"": []}])
def test_a_fault_that_changed_real_blocks_is_in_its_row(strays):
    """Also bytes that are in no layer."""
    faults = of_kind("faults", engine="eagle-flash-v1-async")
    faults["found"]["sampler"]["sampler"]["looks"][0]["strays"] = strays
    rows = cells("faults", faults)
    assert [row[1] for row in rows if row[7] != "no"] == ["sampler"]


# --- documents


def test_documents_show_what_the_files_say(tmp_path, capsys):
    """A changed number and a view that does not exist are named."""
    assert render.main(["--check"]) == 0
    document = tmp_path / "a.md"
    document.write_text(text := f"<!-- results: costs -->\n{render.END}")
    options = ["--readme", str(document)]
    assert render.main([*options, "--check"]) == 1
    assert document.read_text() == text
    assert render.main(options) == render.main([*options, "--check"]) == 0
    document.write_text(document.read_text().replace(" us |", "1 us |", 1))
    assert render.main([*options, "--check"]) == 1
    assert "a.md differs from results/: costs; run: " in capsys.readouterr().err
    document.write_text(text.replace("costs", "gone"))
    assert render.main(options) == 2
    assert "there is no view 'gone'; views: audit, " in capsys.readouterr().err


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


def test_verdicts_on_an_older_vllm_are_a_line_that_says_what_differs():
    key = {"case": "conformance", "connector": "MultiConnector", "vllm": "0.32.0"}
    new = of_kind("cases", **key)
    old = copy.deepcopy(new)
    old["key"]["vllm"] = "0.29.0"
    *_, last = report.rendered("conformance", [old, new]).splitlines()
    assert last.startswith("- MultiConnector on vLLM 0.29.0 (20")
    assert last.endswith("): the same verdicts")
    old["found"]["sleep"] |= {"breaches": ["bytes"], "text": "lost"}
    *_, last = report.rendered("conformance", [old, new]).splitlines()
    assert last.endswith("): as above, but `sleep`: **breach**: bytes (lost)")
    assert [len(row) for row in cells("conformance", old, new)] == [2] * 19
