#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Prometheus of our own: finds or fetches it, runs it, asks it.

    python tools/monitoring/prometheus.py      # fetch it if it is not there; say where

What is on PATH is used. Otherwise Debian's or Ubuntu's package is downloaded and
unpacked into the cache folder of tools/setup/make_models.py: no root, and none of the
package's scripts run, so no service is installed or started. Exit status: 0 it is
there, 1 it could not be had. `make deps` and .ci/run call it, no test does: as root it
may update apt's lists.

A server started here listens on loopback, scrapes one target and keeps its data in a
folder that the caller gives. Until then, the system's Python will do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.setup.make_models import cache_dir

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")
COMMAND = "make deps"
START_SECONDS = 30


class PrometheusError(RuntimeError):
    """Prometheus is not there, cannot be had, or refuses what it was asked."""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`.

    Raises PrometheusError, with the command that fetches it, if it is not there.
    """
    found = shutil.which(name) or shutil.which(name, path=str(_unpacked() / "usr/bin"))
    if found is None:
        raise PrometheusError(
            f"{name} is neither on PATH nor in the cache; run: {COMMAND}"
        )
    return found


def _unpacked() -> Path:
    return cache_dir() / "prometheus"


def fetch() -> None:
    """Downloads and unpacks the package of the system's own archive, once.

    Raises PrometheusError saying what the system's tools said.
    """
    with contextlib.suppress(PrometheusError):
        for name in PROGRAMS:
            program(name)
        return
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise PrometheusError(
                f"{tool} is not here: install Prometheus (prometheus and promtool on "
                "PATH) with this system's package manager"
            )
    target = _unpacked()
    target.parent.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "-q", PACKAGE]
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        try:
            _run(download, temporary)
        except PrometheusError:
            # A fresh machine has no lists yet, and only root can make them.
            if os.geteuid() != 0:
                raise
            _run(["apt-get", "update", "-q"], temporary)
            _run(download, temporary)
        (package,) = Path(temporary).glob("*.deb")
        unpacked = Path(temporary) / "unpacked"
        _run(["dpkg", "-x", str(package), str(unpacked)], temporary)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def _run(command: Sequence[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise PrometheusError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


class Prometheus:
    """A running Prometheus server; `api` is the base of its HTTP API."""

    def __init__(self, port: int) -> None:
        self.api = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of `expression` now: {"metric": labels, "value": [s, v]}.

        Raises PrometheusError if it is not PromQL.
        """
        return self._get("query", query=expression)["result"]

    def query_range(
        self, expression: str, start: float, end: float, step: int
    ) -> list[dict[str, Any]]:
        """Its series from start to end (seconds since 1970), a value each `step`
        seconds: {"metric": labels, "values": [[s, v], ...]}."""
        times = {"start": start, "end": end, "step": step}
        return self._get("query_range", query=expression, **times)["result"]

    def rules(self) -> list[dict[str, Any]]:
        """The loaded rules: name, health, state, lastError, evaluationTime."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, what: str, **values: Any) -> dict[str, Any]:
        import httpx

        answer = httpx.get(f"{self.api}/api/v1/{what}", params=values, timeout=30)
        if answer.is_error:
            raise PrometheusError(f"{values}: {answer.text}")
        return answer.json()["data"]

    def is_ready(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.api}/-/ready", timeout=5).is_success
        except httpx.HTTPError:
            return False


@contextlib.contextmanager
def scraping(
    target: str, folder: Path, interval_seconds: int, rules: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` ("host:port") and evaluates `rules` while the
    block runs. `folder` gets its configuration, data and log.

    Raises PrometheusError if it is not there, ServerError if it does not start.
    """
    from tools.soak.server import free_port, running

    interval = f"{interval_seconds}s"
    job = {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
    content = {  # YAML is a superset of JSON
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "scrape_configs": [job],
        "rule_files": [str(path) for path in rules],
    }
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(content), encoding="utf-8")
    port = free_port()
    command = [program("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    server = Prometheus(port)
    with running(command, server.is_ready, folder / "prometheus.log", START_SECONDS):
        yield server


def main() -> int:
    try:
        fetch()
        print(f"prometheus: {program('prometheus')}, {program('promtool')}")
    except PrometheusError as error:
        print(f"prometheus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
