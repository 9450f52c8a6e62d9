# SPDX-License-Identifier: Apache-2.0
"""A real server with worker processes in mode stage: log lines and counters; dashboard
and alerts under a real Prometheus during a short soak.

One engine behind two API servers, whose counters are summed, with the arguments of
README's example. Requests end at their length, at a stop string (found by the front
end, which aborts the request in the engine core), or when the client hangs up;
guarantee 7 must hold over all of them. Not covered: asynchronous scheduling, which the
CPU platform switches off.
"""

import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.samples import Sample

from tests.helpers import monitoring, reach
from tests.helpers.environment import REPO
from tests.helpers.player import check_identities
from tests.helpers.server import ARGUMENTS, Server, serve
from vllm_nwor.metrics import COUNTERS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_API_SERVERS = 2
# The fixture's server at /metrics before its first request.
FIRST_SCRAPE: list[Sample] = []
PROMPTS = (
    "List the months of the year, then list the months of the year again.",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "one two three four one two three four one two three",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(",
)


def documented(word: str) -> list[list[str]]:
    """The commands of README's code block with `word`, as a shell splits them."""
    text = (REPO / "README.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if word in block)
    lines = block.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


*_, EXAMPLE, COMPLETION, METRICS = documented("api_server")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """At its end the audit writes a last log line and its file: vLLM must not kill its
    processes at once."""
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
def used(server):
    """The metrics after concurrent requests of all kinds."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(server.complete, text, 40) for text in PROMPTS]
        jobs += [
            pool.submit(server.complete, text, 200, stop=[" the", "\n"])
            for text in PROMPTS
        ]
        # Drafts are dropped if the client hangs up while a step verifies them: by
        # chance, so it is repeated.
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


def test_engine_core_and_worker_log_one_line_each(server):
    """The blocks that the engine core reserved, and how the worker uses them."""
    titles = set(re.findall(r"\bApiServer_\d+\b", server.log()))
    assert len(titles) == NUM_API_SERVERS
    ours = [line for line in server.log().splitlines() if "NWOR" in line]
    lines = [line for line in ours if "NWOR audit: " not in line]
    # The audit's second one: on CPUs weights are in handles of oneDNN.
    assert (len(ours), len(lines)) == (4, 2), ours
    assert any("content of some weights cannot be read" in line for line in ours)
    reserved = "NWOR: 16 of 320 KV blocks reserved as shadow blocks, for 8 requests"
    assert lines[0].endswith(reserved)
    assert re.search(
        r"NWOR stage requested; group 0: stage \(30 layers, packed slots\); undo log: "
        r"32 drafts, \d+\.\d MiB; shadow blocks: 8 seats, 11\.2 MiB$",
        lines[1],
    )


def test_the_first_scrape_has_the_info_gauge_and_every_counter(server):
    (info,) = [s for s in FIRST_SCRAPE if s.name == "vllm:nwor_info"]
    assert info.value == 1
    labels = {"requested": "stage", "resolved": "stage", "group": "0", "engine": "0"}
    assert info.labels.items() >= labels.items()
    found = {s.name.removeprefix("vllm:nwor_"): s.value for s in FIRST_SCRAPE}
    assert [found[f"{name}_total"] for name in COUNTERS] == [0] * len(COUNTERS)


def test_the_requests_of_readme_succeed(server):
    completion, pattern = json.loads(COMPLETION[-1]), METRICS[-1]
    answer = httpx.post(f"{server.url}/v1/completions", json=completion)
    assert answer.raise_for_status().json()["choices"][0]["text"]
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    values: Counter[str] = Counter()
    for line in text.splitlines():
        if re.search(pattern, line):
            values[re.split("[{ ]", line)[0]] += float(line.split()[-1])
    assert values["vllm:nwor_windows_total"] > 0 == values["vllm:nwor_breaches_total"]


def test_the_answer_has_the_versions_of_its_kv(server):
    """If the request asks (docs/rl.md)."""
    answers = [
        server.complete(PROMPTS[0], 8, vllm_xargs={"nwor_kv_versions": asks})
        for asks in (True, False)
    ]
    usage = answers[0]["usage"]
    end = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert answers[0]["kv_transfer_params"] == {
        "nwor_kv_versions": [{"version": "#0", "start": 0, "end": end}]
    }
    assert answers[1].get("kv_transfer_params") is None


def test_the_metrics_have_the_labels_of_vllms(server, used):
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


def test_identities_hold(used):
    """Guarantee 7, over finished, stopped and abandoned requests."""
    check_identities(used)
    ours = {k.removeprefix("vllm:nwor_"): v for k, v in used.items()}
    assert ours["rejected_tokens"] > 0
    assert ours["dropped_drafts"] > 0, "no request ended in flight"
    # 30 layers of 3 heads, K and V of 64 elements of 2 bytes: for each accepted draft,
    # and for its window's target unless that is alone in its block. Dropped drafts may
    # have been accepted.
    slot_bytes = 30 * 3 * 2 * 64 * 2
    fewest = ours["committed_tokens"]
    most = fewest + ours["dropped_drafts"] + ours["windows"]
    assert fewest < ours["committed_bytes"] / slot_bytes <= most
    assert ours["committed_bytes"] % slot_bytes == 0
    assert ours["shadow_copied_bytes"] % slot_bytes == 0
    assert ours.get("restored_bytes", 0) == 0, "nothing was logged"


# --- under Prometheus -----------------------------------------------------------------

ALERTS = [
    REPO / "tools" / "monitoring" / name for name in ("alerts.yml", "audit_alerts.yml")
]
SOAK_MINUTES = 0.2
SCRAPE_SECONDS = 1
# The rate interval covers the whole load.
QUERIES = monitoring.queries(monitoring.dashboard(), "10m")


class Watched(NamedTuple):
    """A server after a soak, scraped by a Prometheus. result: the file of soak.py."""

    server: Server
    prometheus: monitoring.Prometheus
    soak: subprocess.CompletedProcess[str]
    result: dict[str, Any]


@pytest.fixture(scope="module")
def watched(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitoring")
    target = f"127.0.0.1:{server.port}"
    with monitoring.scraping(target, folder, SCRAPE_SECONDS, ALERTS) as watching:
        time.sleep(2 * SCRAPE_SECONDS)  # a rate needs a sample before the load
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


def test_a_short_soak_finds_nothing_wrong(watched):
    assert watched.soak.returncode == 0, watched.soak.stdout
    verdicts = {row["name"]: row["verdict"] for row in watched.result["checks"]}
    not_passed = {name: v for name, v in verdicts.items() if v != "pass"}
    assert not_passed == {"memory flat": "not judged"}, "the soak is too short for it"
    assert watched.result["metrics"]["vllm:nwor_audit_steps"] > 50
    assert len(watched.result["memory"]["rss_mib"]) >= 3, "processes are missing"


def test_dashboard_and_alerts_use_existing_metrics(watched):
    text = httpx.get(f"{watched.server.url}/metrics", timeout=30).text
    exposed = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    named = set()
    for path in (monitoring.DASHBOARD, *ALERTS):
        named |= set(re.findall(r"vllm:\w+", path.read_text()))
    assert len(named) > 15
    assert named - exposed == set()


# Panels and legends whose values the load must raise.
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
def test_every_panel_has_a_value(watched, query):
    """The panel of fallbacks shows 0."""
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


def test_no_alert_fires_on_a_healthy_server(watched):
    rules = watched.prometheus.rules()
    assert len(rules) >= 6
    for rule in rules:
        found = (rule["health"], rule["state"], rule.get("lastError", ""))
        assert found == ("ok", "inactive", ""), rule["name"]


# --- several engines ------------------------------------------------------------------


@pytest.mark.nightly
def test_data_parallel_2(tmp_path):
    """Each of two engines gives the texts that it gives with NWOR off, and its counters
    agree with vLLM's."""
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


def texts_of_each(server: Server) -> list[list[str]]:
    """Each engine's answers to the prompts, one after the other."""
    return [
        [
            server.complete(prompt, 40, rank=rank)["choices"][0]["text"]
            for prompt in PROMPTS
        ]
        for rank in (0, 1)
    ]


def check_engine(server: Server, engine: str, mode: str) -> None:
    """Guarantee 7 for one of several engines, without a dropped request."""
    of_engine = [s for s in server.samples() if s.labels.get("engine") == engine]
    found: Counter[str] = Counter()  # summed over other labels
    for sample in of_engine:
        found[sample.name.removesuffix("_total")] += sample.value
    check_identities(found)
    assert found["vllm:nwor_windows"] == found["vllm:spec_decode_num_drafts"]
    assert found["vllm:nwor_dropped_drafts"] == 0 < found["vllm:nwor_rejected_tokens"]
    (info,) = [s.labels for s in of_engine if s.name == "vllm:nwor_info"]
    assert info["resolved"] == mode
