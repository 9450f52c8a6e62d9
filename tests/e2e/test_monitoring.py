# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts against a real server and a real Prometheus, and a short
soak, which is the load that they watch.

Not covered: Grafana itself; several API servers (tools/soak/soak.py starts two).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers import monitoring
from tests.helpers.environment import REPO
from tests.helpers.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALERTS = [
    REPO / "tools" / "monitoring" / name for name in ("alerts.yml", "audit_alerts.yml")
]
SOAK_MINUTES = 0.4
SCRAPE_SECONDS = 1
# Covers the whole load, so that every rate has something in it.
QUERIES = monitoring.queries(monitoring.dashboard(), "60s")


class Watched(NamedTuple):
    """A server under a soak, seen by a Prometheus that still runs.

    soak: what soak.py wrote. status: its exit status. output: what it printed.
    """

    server: Server
    prometheus: monitoring.Prometheus
    soak: dict[str, Any]
    status: int
    output: str


@pytest.fixture(scope="module")
def watched(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    target = f"127.0.0.1:{server.port}"
    with monitoring.scraping(target, folder, SCRAPE_SECONDS, ALERTS) as watching:
        time.sleep(2 * SCRAPE_SECONDS)  # a rate starts from a sample before the load
        status, output = _soak(server, folder / "soak.json")
        time.sleep(3 * SCRAPE_SECONDS)
        result = json.loads((folder / "soak.json").read_text())
        yield Watched(server, watching, result, status, output)


def _soak(server: Server, path: Path) -> tuple[int, str]:
    command = [sys.executable, str(REPO / "tools" / "soak" / "soak.py")]
    command += ["--url", f"http://127.0.0.1:{server.port}"]
    command += ["--pid", str(server.process.pid), "--log", str(server.log_path)]
    command += ["--minutes", str(SOAK_MINUTES), "--concurrency", "6"]
    command += ["--api-server-count", "1", "--probe-seconds", "2"]
    command += ["--sample-seconds", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert path.exists(), done.stderr
    return done.returncode, done.stdout


def test_a_short_soak_finds_nothing_wrong(watched: Watched) -> None:
    assert watched.status == 0, watched.output
    verdicts = {row["name"]: row["verdict"] for row in watched.soak["checks"]}
    not_passed = {name: v for name, v in verdicts.items() if v != "pass"}
    # Too short for the one, and there is one server only.
    assert not_passed == {"memory flat": "not judged", "API servers": "not judged"}
    assert watched.soak["metrics"]["vllm:nwor_audit_steps"] > 50
    assert len(watched.soak["memory"]["rss_mib"]) >= 3, "main, engine core, worker"


def test_every_metric_named_exists(watched: Watched) -> None:
    url = f"http://127.0.0.1:{watched.server.port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        exposed = set(re.findall(r"^# TYPE (\S+) ", answer.read().decode(), re.M))
    named = set()
    for path in (monitoring.DASHBOARD, *ALERTS):
        named |= set(re.findall(r"vllm:\w+", path.read_text()))
    assert len(named) > 15
    assert named - exposed == set()


# Of what the load did: panels and their legends.
ENGINE = "{{model_name}}, engine {{engine}}"
ABOVE_0 = {
    *(("Draft tokens by outcome", one) for one in ("staged", "committed", "rejected")),
    *(("Restored bytes", f"{ENGINE}, {one} shadow pages") for one in ("to", "from")),
    *(("Acceptance rate", "NWOR"), ("Windows", "NWOR"), ("Throughput", "answer")),
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
    if query.panel.startswith(("Fallbacks", "Findings", "Unverified")):
        assert set(values) == {0}
    if (query.panel, query.legend) in ABOVE_0:
        assert min(values) > 0
    for label in monitoring.LEGEND_LABEL.findall(query.legend):
        assert all(one["metric"].get(label) for one in found), found


def test_panels_of_what_the_load_did_are_there() -> None:
    assert {(query.panel, query.legend) for query in QUERIES} >= ABOVE_0


def test_prometheus_has_the_servers_own_counts(watched: Watched) -> None:
    watched.server.idle_metrics()
    time.sleep(2 * SCRAPE_SECONDS)
    found = watched.server.metrics()
    for name in ("vllm:nwor_windows", "vllm:nwor_tokens_staged"):
        (one,) = watched.prometheus.query(f"{name}_total")
        assert float(one["value"][1]) == found[name] > 0
    (row,) = watched.prometheus.query("vllm:nwor_info == 1")
    assert (row["metric"]["requested"], row["metric"]["resolved"]) == ("stage", "stage")


def test_no_alert_fires_on_a_healthy_server(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert len(rules) >= 6
    for rule in rules:
        found = (rule["health"], rule["state"], rule.get("lastError", ""))
        assert found == ("ok", "inactive", ""), rule["name"]
