# SPDX-License-Identifier: Apache-2.0
"""The conformance kit for KV connectors, without its engines: verdicts, engines'
processes that end in all ways, and connectors that are refused at once."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.environment import run_python
from vllm_nwor.audit import conformance
from vllm_nwor.audit.conformance import CASES, State, conclude, judge, play, results
from vllm_nwor.audit.connector_bench import Report, Request


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        ("nothing:Nothing", "there is no module 'nothing'"),
        ("no.thing:Nothing", "ModuleNotFoundError: No module named 'no'"),
        (":Nothing", "a part is empty"),
        ("json:", "a part is empty"),
    ],
)
def test_a_module_that_is_not_there_is_refused_at_once(connector, words) -> None:
    command = ("-m", "vllm_nwor.audit", "--connector", connector)
    done = run_python(*command, timeout=60, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2
    assert f"--connector is '{connector}': {words}; must be" in done.stderr
    imported = re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "argparse" in imported
    assert not {"torch", "vllm"} & set(imported)


# -- verdicts ------------------------------------------------------------------------

GOOD = Report(
    tokens={"again": [1, 2]},
    logprobs={"again": [-1.0, -2.0]},
    loads={"again": 64},
    wanted={"again": True},
    verified=64,
)
LOAD, PLANTED = CASES["store_load"], CASES["empty_load"]


@pytest.mark.parametrize(
    ("changes", "state", "name", "text"),
    [
        ({}, State.OK, "bytes", "ok: 64 of 64 slots"),
        ({"died": "E"}, State.BREACH, "survives", "E"),
        ({"tokens": {}}, State.BREACH, "outputs", "again has not finished"),
        ({"tokens": {"again": [1, 3]}}, State.BREACH, "outputs", "other tokens"),
        ({"logprobs": {"again": [-1, -2.002]}}, State.BREACH, "outputs", "by 0.002"),
        ({"logprobs": {"again": [-1, -2.0005]}}, State.OK, "outputs", ""),
        ({"loads": {}}, State.NOT_EXERCISED, "exercised", "again loaded nothing"),
        ({"loads": {}}, State.NOT_EXERCISED, "bytes", "not exercised: nothing was"),
        ({"skipped": "why"}, State.NOT_EXERCISED, "exercised", "why"),
        ({"broken": ["-1"]}, State.BREACH, "exercised", "-1"),
        ({"wanted": {"again": False}}, State.BREACH, "exercised", "must load none"),
        ({"num_findings": 1, "findings": ["f"]}, State.BREACH, "bytes", "1 findings"),
        ({"verified": 0, "unverified": 64}, State.OK, "bytes", "unverified: 0 of 64"),
        ({"verified": 1, "unverified": 63}, State.OK, "bytes", "unverified: 1 of 64"),
        ({"unfreed": 3}, State.BREACH, "blocks", "3 blocks are not free"),
    ],
)
def test_each_verdict_decides(changes, state, name, text) -> None:
    verdicts = judge(LOAD, replace(GOOD, **changes), GOOD)
    assert conclude(LOAD, verdicts) is state
    assert text in ": ".join(verdicts[name])
    breaches = [n for n, one in verdicts.items() if one.state is State.BREACH]
    assert breaches == ([name] if state is State.BREACH else [])


def test_a_planted_fault_that_does_not_show_is_not_exercised() -> None:
    assert conclude(PLANTED, judge(PLANTED, GOOD, GOOD)) is State.NOT_EXERCISED
    for shows in ({"num_findings": 1}, {"tokens": {"again": [1, 3]}}):
        verdicts = judge(PLANTED, replace(GOOD, **shows), GOOD)
        assert conclude(PLANTED, verdicts) is State.OK


def test_a_case_that_dies_without_a_connector_says_nothing_of_one() -> None:
    dead = Report(died="E")
    for found in (GOOD, dead):
        (result,) = results(["store_load"], {"store_load": found}, {"store_load": dead})
        assert result.state is State.NOT_EXERCISED
        assert {one.text for one in result.verdicts.values()} == {
            "without a connector: E"
        }


# -- processes -----------------------------------------------------------------------

ASKED = Request(["store_load", "evicted", "sleep"], "A", {}, "", {})


def played(
    monkeypatch: pytest.MonkeyPatch, *processes: list[dict[str, Any]]
) -> tuple[dict[str, Report], list[list[str]]]:
    """The reports of ASKED, and the cases that each process was asked for."""
    asked, scripts = [], iter(processes)

    def messages(request: Request, is_quiet: bool) -> list[dict[str, Any]]:
        asked.append(list(request.cases))
        return [*next(scripts), {"ended": "status -11"}]

    monkeypatch.setattr(conformance, "_messages", messages)
    return play(ASKED, lambda text: None, True), asked


def ends(name: str) -> list[dict[str, Any]]:
    return [{"begins": name}, {"case": name, "report": vars(Report())}]


def test_a_process_that_dies_takes_one_case_with_it(monkeypatch) -> None:
    reports, asked = played(
        monkeypatch, [*ends("store_load"), {"begins": "evicted"}], ends("sleep")
    )
    assert asked == [["store_load", "evicted", "sleep"], ["sleep"]]
    died = {name: report.died for name, report in reports.items()}
    assert died == {"store_load": "", "evicted": "status -11", "sleep": ""}


@pytest.mark.parametrize(
    ("process", "text"),
    [([{"unstarted": "ValueError: no"}], "ValueError: no"), ([], "status -11")],
)
def test_an_engine_that_does_not_start_is_tried_once(monkeypatch, process, text):
    reports, asked = played(monkeypatch, process)
    assert len(asked) == 1
    assert {name: report.died for name, report in reports.items()} == dict.fromkeys(
        ASKED.cases, f"the engine does not start: {text}"
    )


def messages(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Any:
    """The messages of a process that is `body`, a program of Python."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import faulthandler, json, os, signal, sys, threading, time\n"
        "def say(text): os.write(int(sys.argv[3]), text.encode())\n"
        f"{body}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return conformance._messages(ASKED, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('ValueError: no'); sys.exit(3)", "ended with status 3: ValueError: no"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        (
            "faulthandler.enable(all_threads=False)\n"
            "def loads(): faulthandler._sigsegv()\n"
            "loads()",
            'was killed by SIGSEGV: File "{program}", line 5 in loads',
        ),
        (
            "threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
            "faulthandler.dump_traceback_later(0.5, exit=True)\n"
            "def hangs(): time.sleep(20)\n"
            "hangs()",
            "was ended: no answer within 0:00:00.500000: "
            'File "{program}", line 6 in hangs',
        ),
    ],
    ids=["status", "killed", "segfault", "hangs"],
)
def test_how_a_process_ended_is_said(monkeypatch, tmp_path, body, words) -> None:
    (last,) = messages(monkeypatch, tmp_path, body)
    words = words.format(program=tmp_path / "python")
    assert last == {"ended": f"the engine's process {words}"}


def test_what_a_killed_process_has_started_and_half_written_ends_with_it(
    monkeypatch, tmp_path
) -> None:
    body = """
say(json.dumps({"folder": sys.argv[5]}) + "\\n")
if not os.fork():
    time.sleep(20)
    say(" 1}\\n")
    os._exit(0)
say('{"case":')
os.kill(os.getpid(), signal.SIGKILL)"""
    first, last = messages(monkeypatch, tmp_path, body)
    assert not Path(first["folder"]).exists()
    assert last["ended"].endswith("SIGKILL")


def test_an_interrupted_kit_leaves_no_process(monkeypatch, tmp_path) -> None:
    body = "say(json.dumps({'pid': os.getpid()}) + '\\n'); time.sleep(20)"
    running = messages(monkeypatch, tmp_path, body)
    pid = next(running)["pid"]
    started = time.monotonic()
    running.close()
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
