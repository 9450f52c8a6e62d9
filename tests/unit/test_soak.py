# SPDX-License-Identifier: Apache-2.0
"""The soak's verdicts, its load and what it reads of a server; no vLLM.

Every check is seen to fail on a record that is bad in one place, and in that one only.
The load runs against a small server that answers as vLLM does and can misbehave.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.soak import checks as soak_checks
from tools.soak import load as soak_load
from tools.soak import server as soak_server
from tools.soak import soak

Record = dict[str, Any]
PROBE = {"runs": 100, "outputs": {"a": 100}, "num_tokens": [48], "first": {}}


def good_record() -> Record:
    seconds = [5.0 * i for i in range(121)]
    # It grows in the warm-up, and breathes afterwards.
    worker = [1000 + min(t, 120) + 3 * (i % 2) for i, t in enumerate(seconds)]
    return {
        "arguments": {
            "mode": "stage",
            "vocab_size": None,
            "api_server_count": 2,
            "env": ["VLLM_NWOR_AUDIT=log"],
        },
        "load": {
            "seconds": 600.0,
            "kinds": dict.fromkeys(soak_checks.KINDS, 10),
            "num_failed": 0,
            "failures": [],
        },
        "probe": {
            "policy": "loaded",
            "kinds": {"cached": copy.deepcopy(PROBE), "fresh": copy.deepcopy(PROBE)},
        },
        "alive": {"answers": True, "ended": []},
        "clients": {"VLLM::APIServer_0": 9, "VLLM::APIServer_1": 3},
        "memory": {
            "seconds": seconds,
            "rss_mib": {"main": [500.0] * 121, "VLLM::Worker": worker},
        },
        "log": {"errors": []},
        "metrics": {
            "vllm:nwor_windows": 102.0,
            "vllm:nwor_tokens_staged": 400.0,
            "vllm:nwor_committed_tokens": 250.0,
            "vllm:nwor_rejected_tokens": 142.0,
            "vllm:nwor_dropped_drafts": 8.0,
            "vllm:nwor_restored_bytes": 4096.0,
            "vllm:nwor_breaches": 0.0,
            "vllm:nwor_audit_steps": 10000.0,
            "vllm:nwor_audit_findings": 0.0,
            "vllm:nwor_audit_unverified": 0.0,
            "vllm:spec_decode_num_drafts": 100.0,
            "vllm:spec_decode_num_draft_tokens": 392.0,
            "vllm:spec_decode_num_accepted_tokens": 250.0,
        },
        "info": [{"requested": "stage", "resolved": "cow", "value": 1.0}],
        "idle": {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0},
    }


def verdicts(record: Record) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in soak_checks.judge(record)}


def test_a_good_record_passes_every_check() -> None:
    assert set(verdicts(good_record()).values()) == {"pass"}


def test_shadow_pages_have_bytes_of_their_own() -> None:
    record = good_record()
    record["info"][0]["resolved"] = "stage"
    record["metrics"]["vllm:nwor_committed_bytes"] = 4096.0
    del record["metrics"]["vllm:nwor_restored_bytes"]
    assert verdicts(record)["NWOR at work"] == "pass"


def put(*path: Any) -> Callable[[Record], None]:
    """Sets record[path[0]][path[1]]... = path[-1]."""

    def change(record: Record) -> None:
        for key in path[:-2]:
            record = record[key]
        record[path[-2]] = path[-1]

    return change


def leak(mib_per_minute: float) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        memory = record["memory"]
        values = memory["rss_mib"]["main"]
        for i, second in enumerate(memory["seconds"]):
            values[i] += mib_per_minute * second / 60

    return change


def few_steps_in_a_short_run(record: Record) -> None:
    record["metrics"]["vllm:nwor_audit_steps"] = 9999.0
    record["load"]["seconds"] = 599.0


# What is put out of order, and the checks that must tell.
BAD: list[tuple[Callable[[Record], None], set[str]]] = [
    (put("load", "num_failed", 1), {"load"}),
    (put("load", "kinds", "abort_before_first_token", 0), {"load"}),
    (put("load", "kinds", {"whole": 3}), {"load"}),
    (put("alive", "answers", False), {"server alive"}),
    (put("alive", "ended", ["VLLM::Worker"]), {"server alive"}),
    (put("probe", "kinds", "fresh", "outputs", {"a": 99, "b": 1}), {"probe"}),
    (put("probe", "kinds", "cached", "runs", 2), {"probe"}),
    (put("probe", "kinds", "cached", "num_tokens", [0]), {"probe"}),
    (put("probe", "kinds", {}), {"probe"}),
    (put("info", 0, "resolved", "off"), {"NWOR at work"}),
    (put("info", []), {"NWOR at work"}),
    (put("metrics", "vllm:nwor_restored_bytes", 0.0), {"NWOR at work"}),
    (put("info", 0, "resolved", "stage"), {"NWOR at work"}),
    (
        put("metrics", "vllm:nwor_dropped_drafts", 9.0),
        {"identity: parts", "identity: drafts"},
    ),
    (put("metrics", "vllm:nwor_rejected_tokens", 141.0), {"identity: parts"}),
    (put("metrics", "vllm:spec_decode_num_draft_tokens", 393.0), {"identity: drafts"}),
    (
        put("metrics", "vllm:spec_decode_num_accepted_tokens", 251.0),
        {"identity: accepted"},
    ),
    (put("metrics", "vllm:spec_decode_num_drafts", 103.0), {"identity: windows"}),
    (put("metrics", "vllm:spec_decode_num_drafts", 0.0), {"identity: windows"}),
    (put("metrics", "vllm:nwor_breaches", 1.0), {"breaches"}),
    (put("metrics", "vllm:nwor_audit_steps", 9999.0), {"KV audit"}),
    (put("metrics", "vllm:nwor_audit_steps", None), {"KV audit"}),
    (put("metrics", "vllm:nwor_audit_findings", 1.0), {"KV audit"}),
    (put("metrics", "vllm:nwor_audit_findings", None), {"KV audit"}),
    (put("metrics", "vllm:nwor_fallbacks", 1.0), {"fallbacks"}),
    (put("idle", "running", 1.0), {"KV blocks free"}),
    (put("idle", "waiting", 1.0), {"KV blocks free"}),
    (put("idle", "kv_cache_usage", 0.004), {"KV blocks free"}),
    (leak(1.2), {"memory flat"}),
    (put("log", "errors", ["ERROR x"]), {"log"}),
    (put("clients", {"VLLM::APIServer_0": 12}), {"API servers"}),
    (put("clients", {}), {"API servers"}),
]


@pytest.mark.parametrize(("change", "failing"), BAD, ids=range(len(BAD)))
def test_each_check_fails_on_its_own_fault(
    change: Callable[[Record], None], failing: set[str]
) -> None:
    record = good_record()
    change(record)
    found = verdicts(record)
    assert {name for name, verdict in found.items() if verdict != "pass"} == failing
    assert {found[name] for name in failing} == {"fail"}


def test_every_check_is_seen_to_fail() -> None:
    assert set.union(*(failing for _, failing in BAD)) == set(verdicts(good_record()))


def test_counters_that_are_not_there_do_not_pass() -> None:
    record = good_record()
    record["metrics"] = {}
    failing = {name for name, verdict in verdicts(record).items() if verdict == "fail"}
    assert failing >= {"NWOR at work", "identity: windows", "breaches"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (put("memory", None), "memory flat"),
        (put("load", "seconds", 60.0), "memory flat"),
        (put("probe", "policy", "off"), "probe"),
        (put("log", None), "log"),
        (few_steps_in_a_short_run, "KV audit"),
        (put("arguments", "api_server_count", 1), "API servers"),
    ],
)
def test_what_cannot_be_judged_never_passes(
    change: Callable[[Record], None], name: str
) -> None:
    record = good_record()
    change(record)
    if record["memory"] and record["load"]["seconds"] < 100:
        record["memory"]["seconds"] = [i / 2 for i in range(121)]
    assert verdicts(record)[name] == "not judged"


def test_a_control_without_nwor_is_judged_by_the_rest() -> None:
    record = good_record()
    record["arguments"] |= {"mode": "off", "env": []}
    record["metrics"], record["info"] = {}, []
    found = verdicts(record)
    left_out = {name for name, verdict in found.items() if verdict != "pass"}
    assert left_out == {"NWOR at work", "breaches", "fallbacks", "KV audit"} | {
        name for name in found if name.startswith("identity")
    }
    assert {found[name] for name in left_out} == {"not judged"}


def test_growth_is_a_slope_after_the_warm_up() -> None:
    assert soak_checks.warm_up_seconds(600) == 150
    assert soak_checks.warm_up_seconds(100) == 60
    record = good_record()
    leak(0.8)(record)
    assert verdicts(record)["memory flat"] == "pass"


# --- the load ---

SETTINGS = soak_load.Settings(
    model="m",
    max_model_len=512,
    concurrency=4,
    seed=0,
    vocab_size=None,
    probe="loaded",
    probe_seconds=0.1,
)


def test_the_load_is_mixed_reproducible_and_fits_the_model() -> None:
    plans = [soak_load.draw(random.Random(i), SETTINGS) for i in range(2000)]
    again = [soak_load.draw(random.Random(i), SETTINGS) for i in range(2000)]
    assert plans == again
    assert {plan.kind for plan in plans} == set(soak_checks.KINDS)
    words = [len(plan.prompt.split()) for plan in plans if isinstance(plan.prompt, str)]
    most = max(p.max_tokens + 3 * n for p, n in zip(plans, words, strict=True))
    assert most <= SETTINGS.max_model_len
    assert min(words) < 5
    assert max(words) > 60


def test_token_ids_replace_text_for_a_server_without_a_tokenizer() -> None:
    settings = soak_load.Settings(**(vars(SETTINGS) | {"vocab_size": 7}))
    for i in range(200):
        plan = soak_load.draw(random.Random(i), settings)
        assert plan.kind != "stop"
        assert isinstance(plan.prompt, list)
        assert set(plan.prompt) <= set(range(7))


def test_one_alone_waits_for_the_others_and_keeps_them_out() -> None:
    inside: list[str] = []

    async def work(gate: soak_load.Gate) -> None:
        for _ in range(20):
            async with gate.shared:
                assert "alone" not in inside
                inside.append("shared")
                await asyncio.sleep(0)
                inside.remove("shared")

    async def probe(gate: soak_load.Gate) -> None:
        for _ in range(5):
            async with gate.alone():
                assert inside == []
                inside.append("alone")
                await asyncio.sleep(0.001)
                inside.remove("alone")

    async def both() -> None:
        gate = soak_load.Gate(3)
        await asyncio.gather(*(work(gate) for _ in range(3)), probe(gate), probe(gate))

    asyncio.run(asyncio.wait_for(both(), 10))


class FakeServer(ThreadingHTTPServer):
    """Answers completions as vLLM does, CHUNKS of them when streamed.

    broken: "status" (every fifth request is a 500), "probe" (the answer changes),
    "stream" (streams end without a reason), or "".
    """

    daemon_threads = True
    broken = ""
    num_requests = num_probes = 0
    CHUNKS = 8

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        server = self.server
        server.num_requests += 1
        number = server.num_requests
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.broken == "status" and number % 5 == 0:
            return self.send(500, "application/json", '{"error": "broken"}')
        if body.get("stream"):
            return self.stream()
        server.num_probes += bool(body.get("return_token_ids"))
        changed = server.broken == "probe" and server.num_probes > 2
        choice = {
            "index": 0,
            "text": "b" if changed else "a",
            "finish_reason": "length",
            "token_ids": [2 if changed else 1],
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = self.answer(choice) | {"usage": usage}
        return self.send(200, "application/json", json.dumps(answer))

    @staticmethod
    def answer(choice: dict[str, Any]) -> dict[str, Any]:
        about = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
        return about | {"choices": [choice]}

    def stream(self) -> None:
        server = self.server
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(0.1)
        for number in range(server.CHUNKS):
            last = number == server.CHUNKS - 1 and server.broken != "stream"
            reason = "length" if last else None
            choice = {"index": 0, "text": "a", "finish_reason": reason}
            data = json.dumps(self.answer(choice))
            try:
                self.wfile.write(f"data: {data}\n\n".encode())
            except OSError:
                return  # the client hung up
            time.sleep(0.005)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run_load(fake: FakeServer, seconds: float = 1.5, **changes: Any) -> Any:
    settings = soak_load.Settings(**(vars(SETTINGS) | changes))
    return asyncio.run(soak_load.Load(f"{fake.url}/v1", settings).run(seconds))


def test_a_sound_server_gets_every_kind_and_fails_none(fake: FakeServer) -> None:
    outcome = run_load(fake, seconds=5)
    assert (outcome.num_failed, outcome.failures) == (0, [])
    assert set(outcome.kinds) == set(soak_checks.KINDS)
    assert set(outcome.probes) == {"cached", "fresh"}
    for probe in outcome.probes.values():
        assert probe["runs"] >= soak_checks.MIN_PROBES
        assert len(probe["outputs"]) == 1
        assert probe["num_tokens"] == [1]


def test_quiet_probes_are_computed_from_nothing(fake: FakeServer) -> None:
    assert set(run_load(fake, probe="quiet").probes) == {"fresh"}
    assert run_load(fake, probe="off").probes == {}


def test_a_probe_that_changes_is_seen(fake: FakeServer) -> None:
    fake.broken = "probe"
    probes = run_load(fake).probes
    assert [len(probe["outputs"]) for probe in probes.values()] == [2, 2]


@pytest.mark.parametrize("broken", ["status", "stream"])
def test_failed_requests_are_counted(fake: FakeServer, broken: str) -> None:
    fake.broken = broken
    outcome = run_load(fake)
    assert outcome.num_failed > 0
    assert 0 < len(outcome.failures) <= soak_load.FAILURES_KEPT


# --- the server ---


def test_errors_in_the_log_are_found_and_nothing_else() -> None:
    log = (
        "INFO started, no ERRORS so far\n"
        "(EngineCore pid=1) ERROR 11-21 boom\n"
        "WARNING: OSError is possible\n"
        "Traceback (most recent call last):\n"
    )
    found = soak_server.read_log(log)["errors"]
    assert found == [
        "(EngineCore pid=1) ERROR 11-21 boom",
        "Traceback (most recent call last):",
    ]


def test_memory_of_a_process_that_ended_is_missed() -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # it runs its own program by now, and has memory
    processes = soak_server.Processes(psutil.Process(), 1)
    (name,) = [n for n, p in processes._processes.items() if p.pid == child.pid]
    processes.sample()
    child.kill()
    child.communicate()
    processes.sample()
    assert processes.ended == [name]
    before, after = processes.rss_mib[name]
    assert (before > 1, after) == (True, 0)
    assert processes.clients == {}


def test_a_process_with_a_client_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        processes = soak_server.Processes(psutil.Process(), port)
        processes.sample()
        assert processes.clients == {}
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listening.accept()
            processes.sample()
            accepted.close()
    assert processes.clients == {"main": 1}


METRICS = """\
# TYPE vllm:nwor_windows_total counter
vllm:nwor_windows_total{engine="0"} 3.0
vllm:nwor_windows_total{engine="1"} 4.0
# TYPE vllm:nwor_windows_created gauge
vllm:nwor_windows_created{engine="0"} 1.7e9
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 7.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_running{engine="1"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:nwor_info gauge
vllm:nwor_info{engine="0",resolved="cow"} 1.0
"""


def test_metrics_are_summed_over_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    request = soak_server.httpx.Request("GET", "http://x")
    answer = soak_server.httpx.Response(200, text=METRICS, request=request)
    monkeypatch.setattr(soak_server.httpx, "get", lambda *_, **__: answer)
    found = soak_server.read_metrics("http://x")
    assert found["metrics"] == {
        "vllm:nwor_windows": 7,
        "vllm:spec_decode_num_drafts": 7,
    }
    assert found["idle"] == {"running": 1, "waiting": 0, "kv_cache_usage": 0.25}
    assert found["info"] == [{"engine": "0", "resolved": "cow", "value": 1}]


# --- the command ---


@pytest.mark.parametrize("num_failed", [0, 1])
def test_exit_status_and_file_say_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failed: int
) -> None:
    record = good_record()
    record["load"]["num_failed"] = num_failed
    del record["arguments"]
    monkeypatch.setattr(soak, "soak", lambda *_: record)
    path = tmp_path / "out.json"
    argv = ["--url", "http://127.0.0.1:1", "--json", str(path)]
    assert soak.main(argv) == num_failed
    written = json.loads(path.read_text())
    assert written["passed"] is (num_failed == 0)
    assert len(written["checks"]) == len(verdicts(good_record()))
    assert written["command"] == (
        "python tools/soak/soak.py --url http://127.0.0.1:1 --json out.json"
    )
    assert str(tmp_path) not in path.read_text()


def test_no_server_is_an_error_and_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    url = f"http://127.0.0.1:{soak_server.free_port()}"
    assert soak.main(["--url", url, "--json", str(path)]) == 1
    assert "no OpenAI-compatible server" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model", "m", "--url", "u"],
        ["--model", "m", "--minutes", "0"],
        ["--model", "m", "--pid", "1"],
        ["--model", "m", "--vocab-size", "1"],
        ["--model", "m", "--mode", "on"],
        ["--model", "m", "--env", "NAME"],
        ["--model", "m", "--env", "=1"],
        ["--model", "m", "--concurrency", "1.5"],
    ],
)
def test_bad_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        soak.parse(argv)
    assert raised.value.code == 2


def test_serve_arguments_are_passed_on() -> None:
    args = soak.parse(
        ["--model", "m", "--serve-args", "--a 'b c'", "--speculative-config", "{}"]
    )
    found = soak.serve_arguments(args)
    assert found[0] == "m"
    assert found[-2:] == ["--a", "b c"]
    assert "--speculative-config {}" in " ".join(found)
