# SPDX-License-Identifier: Apache-2.0
"""The queries of tools/monitoring/dashboard.json, and a Prometheus with one target, on
loopback, to run them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import httpx

from tests.helpers.environment import REPO
from tools.setup.make_models import cache_dir
from tools.soak.server import answers, free_port, running

DASHBOARD = REPO / "tools" / "monitoring" / "dashboard.json"
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
START_SECONDS = 30


class Query(NamedTuple):
    """One query of a panel. legend: Grafana's format, with {{label}} in it."""

    panel: str
    expression: str
    legend: str


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    content: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return content


def queries(content: dict[str, Any], rate_interval: str) -> list[Query]:
    """Every query of every panel of a dashboard, for all models and engines.

    rate_interval: the value of $__rate_interval, at least four scrapes ("1m").
    Raises KeyError for an unknown variable.
    """
    filled = {"__rate_interval": rate_interval, "model_name": ".*", "engine": ".*"}
    return [
        Query(
            panel["title"],
            Template(one["expr"]).substitute(filled),
            one["legendFormat"],
        )
        for panel in content["panels"]
        for one in panel.get("targets", ())
    ]


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. FileNotFoundError: neither on PATH nor
    fetched; the message names the command."""
    fetched = cache_dir() / "prometheus" / "usr" / "bin"
    found = shutil.which(name) or shutil.which(name, path=str(fetched))
    if found is None:
        raise FileNotFoundError(f"{name} is not there; run: make deps")
    return found


class Prometheus:
    """A running Prometheus server; `api` is the base of its HTTP API."""

    def __init__(self, port: int) -> None:
        self.api = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of `expression`: {"metric": labels, "value": [s, v]} each.
        Raises httpx.HTTPStatusError if it is not PromQL."""
        return self._get("query", query=expression)["result"]

    def rules(self) -> list[dict[str, Any]]:
        """The loaded rules: name, health, state, lastError, evaluationTime."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, what: str, **values: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.api}/api/v1/{what}", params=values, timeout=30)
        return answer.raise_for_status().json()["data"]


@contextlib.contextmanager
def scraping(
    target: str, folder: Path, interval_seconds: int, rules: Sequence[Path]
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` ("host:port") and evaluates `rules` while the
    block runs. `folder` gets its configuration, data and log."""
    interval = f"{interval_seconds}s"
    job = {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
    content = {  # YAML is a superset of JSON
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "scrape_configs": [job],
        "rule_files": [str(path) for path in rules],
    }
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(json.dumps(content), encoding="utf-8")
    command = [program("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    server = Prometheus(port)
    is_up = functools.partial(answers, f"{server.api}/-/ready")
    with running(command, is_up, folder / "prometheus.log", START_SECONDS):
        yield server
