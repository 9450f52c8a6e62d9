# SPDX-License-Identifier: Apache-2.0
"""The soak's verdicts, its load and what it reads of a server; no vLLM.

Every check is seen to fail on a record that is bad in one place, and in that one only.
The load's requests are answered here, as by vLLM or not; a short soak of a real server
is in tests/e2e/test_serve.py.
"""

import asyncio
import copy
import itertools
import json
import os
import subprocess
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest

from tools.soak import checks, load, server, soak

NWOR, SPEC = "vllm:nwor_", "vllm:spec_decode_num_"
PROBE = {"runs": 100, "outputs": {"a": 100}, "num_tokens": [48], "first": {}}


def good_record():
    seconds = [5.0 * i for i in range(121)]
    # It grows in the warm-up, and breathes afterwards.
    worker = [1000 + min(t, 120) + 3 * (i % 2) for i, t in enumerate(seconds)]
    ours = {"windows": 102.0, "tokens_staged": 400.0, "committed_tokens": 250.0}
    ours |= {"rejected_tokens": 142.0, "dropped_drafts": 8.0, "restored_bytes": 4096.0}
    ours |= {"breaches": 0.0, "fallbacks": 0.0, "audit_steps": 1e4}
    ours |= {"audit_findings": 0.0, "audit_unverified": 0.0}
    vllms = {"drafts": 100.0, "draft_tokens": 392.0, "accepted_tokens": 250.0}
    metrics = {f"{NWOR}{name}": num for name, num in ours.items()}
    metrics |= {f"{SPEC}{name}": num for name, num in vllms.items()}
    kinds = {"kinds": dict.fromkeys(load.WEIGHTS, 10), "num_failed": 0, "failures": []}
    asked = {"mode": "stage", "vocab_size": None, "api_server_count": 2}
    rss_mib = {"main": [500.0] * 121, "VLLM::Worker": worker}
    return {
        "arguments": asked | {"without": None, "audited_steps": 10_000},
        "load": {"seconds": 600.0, **kinds},
        "probe": {"policy": "loaded", "kinds": {"cached": PROBE, "fresh": PROBE}},
        "alive": {"answers": True, "ended": []},
        "clients": {"VLLM::APIServer_0": 9, "VLLM::APIServer_1": 3},
        "memory": {"seconds": seconds, "rss_mib": rss_mib},
        "log": {"errors": []},
        "metrics": metrics,
        "info": [{"requested": "stage", "resolved": "cow", "value": 1.0}],
        "idle": {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0},
    }


def verdicts(changes=()):
    """Of that record, with `changes`: (path, value)."""
    record = copy.deepcopy(good_record())
    for path, value in changes:
        *folders, last = path.split("/")
        found = record
        for key in folders:
            found = found[int(key) if key.isdigit() else key]
        found[last] = value
    return {check["name"]: check["verdict"] for check in checks.judge(record)}


def grown(mib):
    """So many a minute, from the start."""
    return ("memory/rss_mib/main", [500 + mib * i / 12 for i in range(121)])


# The checks that must fail, and what is put out of order.
BAD = {
    "load": [("load/num_failed", 1), ("load/kinds/abort_before_first_token", 0)],
    "server alive": [("alive/answers", False), ("alive/ended", ["VLLM::Worker"])],
    "probe": [
        *(("probe/kinds/fresh/outputs", {"a": 99, "b": 1}), ("probe/kinds", {})),
        *(("probe/kinds/cached/runs", 2), ("probe/kinds/cached/num_tokens", [0])),
    ],
    "NWOR at work": [
        *(("info/0/resolved", "off"), ("info/0/resolved", "stage"), ("info", [])),
        (f"metrics/{NWOR}restored_bytes", 0.0),
    ],
    "identity: parts": [(f"metrics/{NWOR}rejected_tokens", 141.0)],
    "identity: drafts": [(f"metrics/{SPEC}draft_tokens", 393.0)],
    "identity: accepted": [(f"metrics/{SPEC}accepted_tokens", 251.0)],
    "identity: windows": [(f"metrics/{SPEC}drafts", num) for num in (103.0, 0.0)],
    "breaches": [(f"metrics/{NWOR}breaches", 1.0)],
    "fallbacks": [(f"metrics/{NWOR}fallbacks", 1.0)],
    "KV audit": [
        *((f"metrics/{NWOR}audit_steps", found) for found in (9999.0, None)),
        *((f"metrics/{NWOR}audit_findings", found) for found in (1.0, None)),
    ],
    "KV blocks free": [
        *(("idle/running", 1.0), ("idle/waiting", 1.0), ("idle/kv_cache_usage", 0.004)),
    ],
    "memory flat": [grown(1.2)],
    "log": [("log/errors", ["ERROR x"])],
    "API servers": [("clients", {"VLLM::APIServer_0": 12})],
    "NWOR at work, identity: windows, breaches, fallbacks, KV audit": [("metrics", {})],
}
STAGED = [("info/0/resolved", "stage"), (f"metrics/{NWOR}committed_bytes", 4096.0)]
OFF = [("arguments/mode", "off"), ("arguments/audited_steps", 0)]
OFF += [("metrics", {}), ("info", [])]
IDENTITIES = "identity: parts, identity: drafts, identity: accepted, identity: windows"
# What may be otherwise, and the checks that cannot be made then.
FINE = [
    ("", [grown(0.8)]),
    # A kind of request that was left out is not missed.
    ("", [("load/kinds/stream", 0), ("arguments/without", "stream")]),
    # Shadow blocks have bytes of their own.
    ("", [*STAGED, (f"metrics/{NWOR}restored_bytes", 0.0)]),
    ("memory flat", [("memory/seconds", [i / 2 for i in range(121)])]),
    ("API servers", [("arguments/api_server_count", 1)]),
    # A control without NWOR is judged by the rest.
    (f"NWOR at work, {IDENTITIES}, breaches, fallbacks, KV audit", OFF),
]


@pytest.mark.parametrize(
    ("names", "changes", "verdict"),
    [
        *((names, [one], "fail") for names, ones in BAD.items() for one in ones),
        *((names, changes, "not judged") for names, changes in FINE),
    ],
)
def test_each_check_fails_on_its_own_fault(names, changes, verdict):
    """And one that cannot be made never passes."""
    others = {name: one for name, one in verdicts(changes).items() if one != "pass"}
    assert others == dict.fromkeys(filter(None, names.split(", ")), verdict)


def test_every_check_is_seen_to_fail():
    assert verdicts().keys() <= BAD.keys()


# --- the load ---


class LoadWithoutServer(load.Load):
    """Requests are answered here, as by vLLM's completions. broken: "status" (every
    fifth request fails), "probe" (the answer changes), "stream" (streams end without a
    reason), or ""."""

    def __init__(self, broken):
        asked = {"concurrency": 4, "seed": 0, "vocab_size": None, "without": None}
        args = SimpleNamespace(**asked, probe="loaded", probe_seconds=0.1)
        super().__init__("http://127.0.0.1:1", "m", 512, args)
        self.broken, self.count, self.num_probes = broken, itertools.count(1), 0

    async def _complete(self, prompt, max_tokens, stream=False, **options):
        if next(self.count) % 5 == 0 and self.broken == "status":
            raise OSError("500")
        if stream:
            chunks = self.streamed()
            return MagicMock(close=chunks.aclose, __aiter__=lambda _: chunks)
        self.num_probes += "extra_body" in options
        is_other = self.broken == "probe" and self.num_probes > 2
        answer = {"text": "ab"[is_other], "token_ids": [1 + is_other]}
        choice = SimpleNamespace(model_dump=lambda include: answer)
        return SimpleNamespace(choices=[choice])

    async def streamed(self):
        for reason in [None] * 7 + ["length"] * (self.broken != "stream"):
            await asyncio.sleep(0.005)
            yield SimpleNamespace(choices=[SimpleNamespace(finish_reason=reason)])


@pytest.mark.parametrize("broken", ["", "status", "stream", "probe"])
def test_failed_requests_and_changed_probes_are_counted(broken):
    async def run():
        done = LoadWithoutServer(broken)
        await done.run(1.0)
        return done

    done = asyncio.run(run())
    assert (done.num_failed > 0) == (broken in ("status", "stream"))
    assert len(done.failures) == min(done.num_failed, load.FAILURES_KEPT)
    num_outputs = 1 + (broken == "probe")
    assert [len(one["outputs"]) for one in done.probes.values()] == [num_outputs] * 2


# --- the server ---


def test_errors_in_the_log_are_found_and_nothing_else():
    bad = ["(EngineCore pid=1) ERROR 11-21 boom", "Traceback (most recent call last):"]
    fine = ["INFO started, no ERRORS so far", "WARNING: OSError is possible"]
    log = "\n".join([fine[0], bad[0], fine[1], bad[1]])
    assert server.errors_in(log) == bad


def test_memory_of_a_process_that_ended_is_missed():
    child = subprocess.Popen(["sleep", "60"])
    processes = server.Processes(psutil.Process(), 1)
    (name,) = [n for n, p in processes._processes.items() if p.pid == child.pid]
    processes.sample()
    child.kill()
    child.wait()
    processes.sample()
    assert processes.ended == [name]
    before, after = processes.rss_mib[name]
    assert before > after == 0


METRICS = """\
# TYPE vllm:nwor_windows_total counter
vllm:nwor_windows_total{engine="0"} 3.0
vllm:nwor_windows_total{engine="1"} 4.0
# TYPE vllm:nwor_windows_created gauge
vllm:nwor_windows_created{engine="0"} 1.7e9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:nwor_info{engine="0",resolved="cow"} 1.0
"""


def test_metrics_are_summed_over_engines(monkeypatch):
    request = server.httpx.Request("GET", "http://x")
    answer = server.httpx.Response(200, text=METRICS, request=request)
    monkeypatch.setattr(server.httpx, "get", lambda *_, **__: answer)
    assert server.read_metrics("http://x") == {
        "metrics": {"vllm:nwor_windows": 7},
        "idle": {"running": 1, "waiting": 0, "kv_cache_usage": 0.25},
        "info": [{"engine": "0", "resolved": "cow", "value": 1}],
    }


# --- the command ---


@pytest.mark.parametrize("num_failed", [0, 1])
def test_exit_status_and_file_say_what_was_found(tmp_path, monkeypatch, num_failed):
    record = good_record()
    record["load"]["num_failed"] = num_failed
    del record["arguments"]
    monkeypatch.setattr(soak, "soak", lambda *_: record)
    path = tmp_path / "out.json"
    running = ["--pid", str(os.getpid()), "--log", "a.log"]
    argv = ["--url", "http://127.0.0.1:1", *running, "--json", str(path)]
    assert soak.main(argv) == num_failed
    written = json.loads(path.read_text())
    assert written["passed"] is (num_failed == 0)
    assert {one["name"] for one in written["checks"]} == verdicts().keys()
