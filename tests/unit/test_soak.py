# SPDX-License-Identifier: Apache-2.0
"""The soak's verdicts, and what its load and its look at processes count.

The committed record passes; each check fails on a record that is bad in one place, and
in that one only. tests/e2e/test_serve.py has a short soak of a real server.
"""

import asyncio
import copy
import itertools
import json
import os
import subprocess
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from benchmarks import records

from tools.soak import checks, load, server, soak

(RECORD,) = (
    line
    for line in records.newest(records.read("soak"))
    if line["key"]["device"] == "cpu" and line["key"]["audited"]
)
CHECKS = {check["name"] for check in RECORD["checks"]}
NWOR, SPEC = "metrics/vllm:nwor_", "metrics/vllm:spec_decode_num_"
SECONDS = RECORD["memory"]["seconds"]


def verdicts(changes):
    """Of that record, with `changes`: (path, value)."""
    record = copy.deepcopy(RECORD)
    for path, value in changes:
        *folders, last = path.split("/")
        found = record
        for key in folders:
            found = found[int(key) if key.isdigit() else key]
        found[last] = value
    return {check["name"]: check["verdict"] for check in checks.judge(record)}


def more(path, by=1.0):
    """A counter that is another by so much."""
    kind, name = path.split("/")
    return path, RECORD[kind][name] + by


def grown(mib):
    """So many a minute, from the start."""
    return "memory/rss_mib", {"main": [500 + mib * second / 60 for second in SECONDS]}


# The checks that must fail, and what is put out of order.
BAD = {
    "load": [("load/num_failed", 1), ("load/kinds/abort_before_first_token", 0)],
    "server alive": [("alive/answers", False), ("alive/ended", ["VLLM::Worker"])],
    "probe": [
        *(("probe/kinds/fresh/outputs", {"a": 99, "b": 1}), ("probe/kinds", {})),
        *(("probe/kinds/cached/runs", 2), ("probe/kinds/cached/num_tokens", [0])),
    ],
    "NWOR at work": [
        *(("info/0/resolved", "off"), ("info/0/resolved", "cow"), ("info", [])),
        (f"{NWOR}committed_bytes", 0.0),
    ],
    "identity: parts": [more(f"{NWOR}rejected_tokens")],
    "identity: drafts": [more(f"{SPEC}draft_tokens")],
    "identity: accepted": [more(f"{SPEC}accepted_tokens")],
    "identity: windows": [more(f"{SPEC}drafts", 1e6), (f"{SPEC}drafts", 0.0)],
    "breaches": [more(f"{NWOR}breaches")],
    "fallbacks": [more(f"{NWOR}fallbacks"), (f"{NWOR}fallbacks", None)],
    "KV audit": [
        *((f"{NWOR}audit_steps", 9999.0), (f"{NWOR}audit_steps", None)),
        *(more(f"{NWOR}audit_findings"), (f"{NWOR}audit_findings", None)),
    ],
    "KV blocks free": [
        *(("idle/running", 1.0), ("idle/waiting", 1.0), ("idle/kv_cache_usage", 0.004))
    ],
    "memory flat": [grown(1.2)],
    "log": [("log/errors", ["ERROR x"])],
    "API servers": [("clients", {"VLLM::APIServer_0": 12})],
}
OF_NWOR = {name for name in BAD if name.startswith("identity")}
OF_NWOR |= {"NWOR at work", "breaches", "fallbacks", "KV audit"}
# What may be otherwise, and the checks that cannot be made then: they never pass.
FINE = [
    (set(), [grown(0.8)]),
    (set(), [("load/kinds/stream", 0), ("arguments/without", "stream")]),
    ({"memory flat"}, [("memory/seconds", [second / 9 for second in SECONDS])]),
    ({"API servers"}, [("arguments/api_server_count", 1)]),
    # A control without NWOR is judged by the rest.
    (
        OF_NWOR,
        [
            *(("arguments/mode", "off"), ("arguments/audited_steps", 0)),
            *(("metrics", {}), ("info", [])),
        ],
    ),
]


@pytest.mark.parametrize(
    ("names", "changes", "verdict"),
    [
        *(({name}, [one], "fail") for name, ones in BAD.items() for one in ones),
        *((names, changes, "not judged") for names, changes in FINE),
    ],
)
def test_each_check_fails_on_its_own_fault(names, changes, verdict):
    others = {name: one for name, one in verdicts(changes).items() if one != "pass"}
    assert others == dict.fromkeys(names, verdict)


@pytest.mark.parametrize("num_failed", [0, 1])
def test_exit_status_and_file_say_what_was_found(tmp_path, monkeypatch, num_failed):
    record = {key: one for key, one in RECORD.items() if key != "arguments"}
    record["load"] = RECORD["load"] | {"num_failed": num_failed}
    monkeypatch.setattr(soak, "soak", lambda *_: record)
    path = tmp_path / "out.jsonl"
    argv = ["--url", "http://127.0.0.1:1", "--pid", str(os.getpid()), "--log", "a.log"]
    assert soak.main([*argv, "--json", str(path)]) == num_failed
    written = json.loads(path.read_text())
    assert written["passed"] is (num_failed == 0)
    assert {one["name"] for one in written["checks"]} == BAD.keys() == CHECKS


async def chunks(reasons):
    for reason in reasons:
        await asyncio.sleep(0.005)
        yield SimpleNamespace(choices=[SimpleNamespace(finish_reason=reason)])


@pytest.mark.parametrize("broken", ["", "status", "stream", "probe"])
def test_failed_requests_and_changed_probes_are_counted(broken, monkeypatch):
    """Every fifth request fails; streams end without a reason; answers change."""
    asked = {"concurrency": 4, "seed": 0, "vocab_size": None, "without": None}
    asked |= {"probe": "loaded", "probe_seconds": 0.1}
    done = load.Load("http://127.0.0.1:1", "m", 512, SimpleNamespace(**asked))
    numbers = itertools.count(1)

    async def complete(prompt, max_tokens, stream=False, **options):
        number = next(numbers)
        if broken == "status" and number % 5 == 0:
            raise OSError("500")
        if stream:
            stream = chunks([None] * 7 + ["length"] * (broken != "stream"))
            return Mock(close=AsyncMock(), __aiter__=lambda _: stream)
        await asyncio.sleep(0.005)
        answer = {"text": "a", "token_ids": [number * (broken == "probe")]}
        return Mock(choices=[Mock(model_dump=lambda include: answer)])

    monkeypatch.setattr(done, "_complete", complete)
    asyncio.run(done.run(0.4))
    assert (done.num_failed > 0) == bool(done.failures) == (broken[:2] == "st")
    for probe in done.probes.values():
        assert (len(probe["outputs"]) > 1) == (broken == "probe")


def test_a_process_that_ended_is_missed():
    pipe = subprocess.PIPE
    child = subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, bufsize=0)
    child.stdin.write(b"\n")
    child.stdout.read(1)  # it runs: one that was only just started has no memory yet
    processes = server.Processes(psutil.Process(), 1)
    (name,) = [n for n, p in processes._processes.items() if p.pid == child.pid]
    processes.sample()
    child.kill()
    child.communicate()
    processes.sample()
    assert processes.ended == [name]
    before, after = processes.rss_mib[name]
    assert before > after == 0


def test_errors_in_the_log_are_found_and_nothing_else():
    bad = ["(EngineCore pid=1) ERROR 11-21 boom", "Traceback (most recent call last):"]
    fine = ["INFO started, no ERRORS so far", "WARNING: OSError is possible"]
    assert server.errors_in("\n".join([fine[0], bad[0], fine[1], bad[1]])) == bad
