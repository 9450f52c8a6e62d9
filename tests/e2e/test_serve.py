# SPDX-License-Identifier: Apache-2.0
"""A real server with worker processes, mode stage: what it says and what it counts;
the dashboard and the alerts against it and a real Prometheus, under a short soak.

One engine behind two API servers, whose counters are summed, with the arguments of
README's example. Its requests end in every
way: at their length, at a stop string (found by the front end, which then aborts the
request in the engine core), by a client that hangs up. Guarantee 7 must hold over all
of them. Not covered: asynchronous scheduling (the CPU platform switches it off);
Grafana itself.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.samples import Sample

from tests.helpers import monitoring, reach
from tests.helpers.environment import REPO, model_path, subprocess_env
from tests.helpers.player import check_identities
from tests.helpers.server import ARGUMENTS, Server, serve
from tools.soak.server import SERVE, free_port, running
from vllm_nwor.metrics import COUNTERS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_API_SERVERS = 2
# What the server of the fixture shows before its first request.
FIRST_SCRAPE: list[Sample] = []
PROMPTS = (
    "List the months of the year, then list the months of the year again.",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "one two three four one two three four one two three",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(",
)


def documented(word: str) -> list[list[str]]:
    """The commands of README's example that has `word`, as a shell splits them."""
    text = (REPO / "README.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if word in block)
    lines = block.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


*INSTALL, EXAMPLE, COMPLETION, METRICS = documented("api_server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It ends with the audit's last line, and the last state of its file, if vLLM does
    not kill its processes at once."""
    folder = tmp_path_factory.mktemp("server")
    shown = EXAMPLE[EXAMPLE.index("--served-model-name") :]
    arguments = (*ARGUMENTS, *shown, "--api-server-count", str(NUM_API_SERVERS))
    arguments += ("--shutdown-timeout", "20")
    file = folder / "audit.json"
    audit = {"VLLM_NWOR_AUDIT": "log", "VLLM_NWOR_AUDIT_FILE": str(file)}
    with serve(folder, "stage", "smollm2-135m", *arguments, **audit) as running:
        FIRST_SCRAPE[:] = running.samples()
        assert json.loads(file.read_text())["steps"] == 0
        yield running
    found = re.findall(
        r"NWOR audit: ([\d,]+) steps, (\d+) findings$", running.log(), re.M
    )
    content = json.loads(file.read_text())
    assert found[-1] == (f"{content['steps']:,}", "0")
    assert content["num_findings"] == 0


@pytest.fixture(scope="module")
def used(server: Server) -> dict[str, float]:
    """The metrics after requests of all kinds, several at a time."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(server.complete, text, 40) for text in PROMPTS]
        jobs += [
            pool.submit(server.complete, text, 200, stop=[" the", "\n"])
            for text in PROMPTS
        ]
        # Drafts are dropped where the hang-up arrives while a step verifies some: by
        # chance, so again until it did, or the test of the identities fails.
        for _ in range(20):
            jobs += [
                pool.submit(server.abandon, text, 400, after)
                for after, text in enumerate(PROMPTS * 2, start=2)
            ]
            results = [job.result() for job in jobs]
            if server.metrics()["vllm:nwor_dropped_drafts"] > 0:
                break
    finish = [r["choices"][0]["finish_reason"] for r in results if isinstance(r, dict)]
    assert "length" in finish
    assert "stop" in finish
    assert all(r > 1 for r in results if isinstance(r, int))
    return server.idle_metrics()


def test_two_lines_say_what_stage_takes(server: Server) -> None:
    """The engine core of the blocks that it reserved, the worker of what it does with
    them: the mark has travelled from one process to the other."""
    titles = set(re.findall(r"\bApiServer_\d+\b", server.log()))
    assert len(titles) == NUM_API_SERVERS
    ours = [line for line in server.log().splitlines() if "NWOR" in line]
    lines = [line for line in ours if "NWOR audit: " not in line]
    assert (len(ours), len(lines)) == (3, 2), ours
    reserved = "NWOR: 16 of 320 KV blocks reserved as shadow blocks, for 8 requests"
    assert lines[0].endswith(reserved)
    assert re.search(
        r"NWOR stage requested; group 0: stage \(30 layers, packed slots\); undo log: "
        r"32 drafts, \d+\.\d MiB; shadow blocks: 8 seats, 11\.2 MiB$",
        lines[1],
    )


def test_the_first_scrape_says_what_runs(server: Server) -> None:
    """Before the first request; and every series of counters, with 0."""
    (info,) = [s for s in FIRST_SCRAPE if s.name == "vllm:nwor_info"]
    assert info.value == 1
    labels = {"requested": "stage", "resolved": "stage", "group": "0", "engine": "0"}
    assert info.labels.items() >= labels.items()
    found = {s.name.removeprefix("vllm:nwor_"): s.value for s in FIRST_SCRAPE}
    assert [found[f"{name}_total"] for name in COUNTERS] == [0] * len(COUNTERS)


def test_the_documented_requests_give_what_is_documented(server: Server) -> None:
    """The other words of the commands: the program is the one that `make serve` runs;
    what is installed is pinned."""
    mode, space, *program = EXAMPLE[: EXAMPLE.index("--model")]
    assert (mode, space) == ("VLLM_NWOR_MODE=stage", "VLLM_CPU_KVCACHE_SPACE=1")
    assert program == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert " ".join(program[1:]) in (REPO / "Makefile").read_text()
    of_gpu = documented("vllm serve")[-1]
    assert of_gpu[:3] == [mode, "vllm", "serve"]
    assert of_gpu[of_gpu.index("--speculative-config") :] == EXAMPLE[-2:]
    files = [word for words in INSTALL for word in words if "requirements/" in word]
    assert len(files) == 3
    assert all((REPO / name).is_file() for name in files)
    pins = (REPO / "requirements" / "cpu.txt").read_text().splitlines()
    assert {word for words in INSTALL for word in words if "==" in word} < set(pins)

    curl, quiet, place, *_, body = COMPLETION
    assert (curl, quiet, place) == ("curl", "-s", "localhost:8000/v1/completions")
    answer = httpx.post(f"{server.url}/v1/completions", json=json.loads(body))
    assert answer.raise_for_status().json()["choices"][0]["text"]
    *_, pattern = METRICS
    assert METRICS[:3] == ["curl", "-s", "localhost:8000/metrics"]
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if re.search(pattern, line)]
    shown = {re.split("[{ ]", line)[0].removeprefix("vllm:nwor_") for line in lines}
    named = {f"{name}_total" for name in ("windows", "committed_tokens", "fallbacks")}
    assert shown == named | {"breaches_total", "info"}
    assert all('resolved="stage"' in line for line in lines if "nwor_info" in line)
    values: Counter[str] = Counter()
    for line in lines:
        values[line.partition("{")[0]] += float(line.split()[-1])
    assert values["vllm:nwor_windows_total"] > 0 == values["vllm:nwor_breaches_total"]


def test_metrics_are_exposed(server: Server, used: dict[str, float]) -> None:
    names = ("windows", "tokens_staged", "rejected_tokens")
    for name in (*names, "shadow_copied_bytes", "committed_bytes"):
        assert used[f"vllm:nwor_{name}"] > 0
    samples = server.samples()
    (info,) = [s for s in samples if s.name == "vllm:nwor_info"]
    assert info.value == 1
    drafted, windows = (
        [s.labels for s in samples if s.name == f"vllm:{name}_total"]
        for name in ("spec_decode_num_drafts", "nwor_windows")
    )
    modes = [labels.pop("mode") for labels in windows]
    assert modes == ["stage", "cow"]
    assert windows == drafted * 2, "counters of an engine carry the labels of vLLM's"
    labels = {"requested": "stage", "resolved": "stage", "group": "0", "engine": "0"}
    assert info.labels.items() >= (labels | drafted[0]).items()


def test_identities_hold(used: dict[str, float]) -> None:
    """Guarantee 7, over finished, stopped and abandoned requests."""
    check_identities(used)
    ours = {k.removeprefix("vllm:nwor_"): v for k, v in used.items()}
    assert ours["rejected_tokens"] > 0
    assert ours["dropped_drafts"] > 0, "no request ended in flight"
    # 30 layers of 3 heads, K and V of 64 elements of 2 bytes, for each accepted draft,
    # and for its window's target, unless that is alone in its block; the drafts that
    # were dropped may have been rejected or accepted.
    slot_bytes = 30 * 3 * 2 * 64 * 2
    fewest = ours["committed_tokens"]
    most = fewest + ours["dropped_drafts"] + ours["windows"]
    assert fewest < ours["committed_bytes"] / slot_bytes <= most
    assert ours["committed_bytes"] % slot_bytes == 0
    assert ours["shadow_copied_bytes"] % slot_bytes == 0
    assert ours.get("restored_bytes", 0) == 0, "nothing was logged"


def test_still_serves_the_same_text(server: Server, used: dict[str, float]) -> None:
    """After all that a prompt gets the text that it gets alone, twice over."""
    first, second = (
        server.complete(PROMPTS[2], 24)["choices"][0]["text"] for _ in range(2)
    )
    assert first == second
    assert len(first) > 20


# --- watched by Prometheus ------------------------------------------------------------

ALERTS = [
    REPO / "tools" / "monitoring" / name for name in ("alerts.yml", "audit_alerts.yml")
]
SOAK_MINUTES = 0.2
SCRAPE_SECONDS = 1
# Covers the whole load, so that every rate has something in it, whenever it is asked.
QUERIES = monitoring.queries(monitoring.dashboard(), "10m")


class Watched(NamedTuple):
    """A server after a soak, seen by a Prometheus that still runs. result: what soak.py
    wrote."""

    server: Server
    prometheus: monitoring.Prometheus
    soak: subprocess.CompletedProcess[str]
    result: dict[str, Any]


@pytest.fixture(scope="module")
def watched(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    target = f"127.0.0.1:{server.port}"
    with monitoring.scraping(target, folder, SCRAPE_SECONDS, ALERTS) as watching:
        time.sleep(2 * SCRAPE_SECONDS)  # a rate starts from a sample before the load
        path = folder / "soak.json"
        command = [sys.executable, str(REPO / "tools" / "soak" / "soak.py")]
        command += ["--url", server.url, "--pid", str(server.process.pid)]
        command += ["--log", str(server.log_path), "--json", str(path)]
        command += ["--minutes", str(SOAK_MINUTES), "--concurrency", "6"]
        command += ["--api-server-count", str(NUM_API_SERVERS)]
        command += ["--probe-seconds", "2", "--sample-seconds", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert path.exists(), done.stderr
        time.sleep(3 * SCRAPE_SECONDS)
        yield Watched(server, watching, done, json.loads(path.read_text()))


def test_a_short_soak_finds_nothing_wrong(watched: Watched) -> None:
    assert watched.soak.returncode == 0, watched.soak.stdout
    verdicts = {row["name"]: row["verdict"] for row in watched.result["checks"]}
    not_passed = {name: v for name, v in verdicts.items() if v != "pass"}
    assert not_passed == {"memory flat": "not judged"}, "it is too short for that"
    assert watched.result["metrics"]["vllm:nwor_audit_steps"] > 50
    assert len(watched.result["memory"]["rss_mib"]) >= 3, "of several processes"


def test_every_metric_named_exists(watched: Watched) -> None:
    text = httpx.get(f"{watched.server.url}/metrics", timeout=30).text
    exposed = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    named = set()
    for path in (monitoring.DASHBOARD, *ALERTS):
        named |= set(re.findall(r"vllm:\w+", path.read_text()))
    assert len(named) > 15
    assert named - exposed == set()


# Of what the load did: panels and their legends.
ENGINE = "{{model_name}}, engine {{engine}}"
ABOVE_0 = {
    *(("Draft tokens by outcome", one) for one in ("staged", "committed", "rejected")),
    *(("Restored bytes", f"{ENGINE}, {one} shadow blocks") for one in ("to", "from")),
    *(
        ("Acceptance rate", "NWOR"),
        ("Windows", "NWOR, stage"),
        ("Throughput", "answer"),
    ),
    *(("vLLM's draft tokens", "drafted"), ("Audited steps", ENGINE)),
}


@pytest.mark.parametrize(
    "query", QUERIES, ids=[f"{query.panel}: {query.legend}" for query in QUERIES]
)
def test_every_panel_shows_something(watched: Watched, query: monitoring.Query) -> None:
    """Also the panel of fallbacks, of which there are none: it shows 0."""
    found = watched.prometheus.query(query.expression)
    assert found, query.expression
    values = [float(one["value"][1]) for one in found]
    assert all(math.isfinite(value) and value >= 0 for value in values), values
    assert {(query.panel, query.legend) for query in QUERIES} >= ABOVE_0
    if query.panel.startswith(("Fallbacks", "Findings", "Unverified")):
        assert set(values) == {0}
    if (query.panel, query.legend) in ABOVE_0:
        assert min(values) > 0
    for label in monitoring.LEGEND_LABEL.findall(query.legend):
        assert all(one["metric"].get(label) for one in found), found


def test_prometheus_has_the_servers_own_counts(watched: Watched) -> None:
    found = watched.server.idle_metrics()
    expected = {
        name: [found[name]] for name in ("vllm:nwor_windows", "vllm:nwor_tokens_staged")
    }
    assert min(expected.values()) > [0]
    deadline, seen = time.monotonic() + 60, {}  # until it has scraped again
    while seen != expected:
        assert time.monotonic() < deadline, (seen, expected)
        time.sleep(SCRAPE_SECONDS)
        for name in expected:
            series = watched.prometheus.query(f"sum({name}_total)")
            seen[name] = [float(one["value"][1]) for one in series]
    (row,) = watched.prometheus.query("vllm:nwor_info == 1")
    assert (row["metric"]["requested"], row["metric"]["resolved"]) == ("stage", "stage")


def test_no_alert_fires_on_a_healthy_server(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert len(rules) >= 6
    for rule in rules:
        found = (rule["health"], rule["state"], rule.get("lastError", ""))
        assert found == ("ok", "inactive", ""), rule["name"]


# --- several engines ------------------------------------------------------------------


@pytest.mark.nightly
def test_data_parallel_2(tmp_path: Path) -> None:
    """Two engines behind one server: each gives the texts that it gives with NWOR off,
    and the counters of each agree with vLLM's own."""
    arguments = (*ARGUMENTS, "--data-parallel-size", "2")
    with serve(tmp_path, "off", "smollm2-135m", *arguments) as server:
        vanilla = texts_of_each(server)
    for mode in ("cow", "stage"):
        noted = reach.noted(mode, "parallelism", "data parallel 2", shown=reach.OUTPUTS)
        with serve(tmp_path, mode, "smollm2-135m", *arguments) as server, noted:
            assert texts_of_each(server) == vanilla
            server.idle_metrics()
            for engine in ("0", "1"):
                check_engine(server, engine, mode)


@pytest.mark.nightly
def test_data_parallel_2_whose_head_has_no_nwor(tmp_path: Path) -> None:
    """The engine of a headless node runs with it; the head, an AsyncLLM, ignores its
    reports."""
    arguments = [*ARGUMENTS, "--data-parallel-size", "2"]
    arguments += ["--data-parallel-size-local", "1"]
    arguments += ["--data-parallel-address", "127.0.0.1"]
    arguments += ["--data-parallel-rpc-port", str(free_port())]
    node = [*SERVE, model_path("smollm2-135m"), *arguments]
    node += ["--headless", "--data-parallel-start-rank", "1"]
    env = subprocess_env(
        VLLM_NWOR_MODE="stage",
        VLLM_ENABLE_V1_MULTIPROCESSING=None,
        OMP_NUM_THREADS="1",
    )
    log = tmp_path / "headless.log"
    # Of several API servers none has the logger that fails.
    head = (*arguments, "--api-server-count", "1")
    with (
        running(node, lambda: True, log, 1, env),
        serve(tmp_path, "off", "smollm2-135m", *head) as server,
    ):
        vanilla, found = texts_of_each(server)
        again = texts_of_each(server)
        names = {sample.name for sample in server.samples()}
    assert vanilla == found
    assert again == [vanilla, found]
    assert "vllm:spec_decode_num_drafts_total" in names
    assert not [name for name in names if "nwor" in name]
    assert "NWOR" not in server.log()
    line = "NWOR stage requested; group 0: stage"
    assert log.read_text(errors="replace").count(line) == 1


def texts_of_each(server: Server) -> list[list[str]]:
    """What each engine makes of the prompts, one after the other."""
    return [
        [
            server.complete(prompt, 40, rank=rank)["choices"][0]["text"]
            for prompt in PROMPTS
        ]
        for rank in (0, 1)
    ]


def check_engine(server: Server, engine: str, mode: str) -> None:
    """Guarantee 7 for one engine of several, none of whose requests was dropped."""
    of_engine = [s for s in server.samples() if s.labels.get("engine") == engine]
    found: Counter[str] = Counter()  # summed over other labels
    for sample in of_engine:
        found[sample.name.removesuffix("_total")] += sample.value
    check_identities(found)
    assert found["vllm:nwor_windows"] == found["vllm:spec_decode_num_drafts"]
    assert found["vllm:nwor_dropped_drafts"] == 0 < found["vllm:nwor_rejected_tokens"]
    (info,) = [s.labels for s in of_engine if s.name == "vllm:nwor_info"]
    assert info["resolved"] == mode
