# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server with its own processes, on loopback."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.helpers.environment import model_path, subprocess_env
from tools.soak.server import SERVE, free_port, model_of, read_metrics, serving, settle

START_SECONDS = 300
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
ARGUMENTS = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
# 5 % of them are shadow blocks for all sequences.
ARGUMENTS += ["--num-gpu-blocks-override", "320", "--block-size", "32"]
ARGUMENTS += ["--speculative-config", json.dumps(SPECULATION)]


class Server:
    """A running server; its output goes to `log_path`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def complete(
        self, prompt: str, max_tokens: int, rank: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """A greedy completion. rank: of the data parallel engine."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
        url = f"{self.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=120)
        return answer.raise_for_status().json()

    def abandon(self, prompt: str, max_tokens: int, after: int) -> int:
        """Starts a streamed completion, closes the connection after so many chunks, and
        returns how many were read."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            chunks = (x for x in answer.iter_lines() if x.startswith("data: {"))
            return len(list(itertools.islice(chunks, after)))

    def metrics(self) -> dict[str, float]:
        """Counters of NWOR and speculative decoding, `_total` dropped, summed over
        labels."""
        return read_metrics(self.url)["metrics"]

    def samples(self) -> list[Sample]:
        """The samples of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def idle_metrics(self) -> dict[str, float]:
        """The counters when no request runs and two scrapes agree."""
        found = settle(self.url, model_of(self.url)[0], "one two", 60)
        assert not any(found["idle"].values()), found
        return found["metrics"]


@contextlib.contextmanager
def serve(
    folder: Path, mode: str, model: str, *arguments: str, **variables: str
) -> Iterator[Server]:
    """A server of `model` with NWOR in `mode`, stopped at the end of the block."""
    port = free_port()
    command = [*SERVE, model_path(model), *arguments]
    env = subprocess_env(
        VLLM_NWOR_MODE=mode,
        VLLM_ENABLE_V1_MULTIPROCESSING=None,
        OMP_NUM_THREADS="1",
        **variables,
    )
    log = folder / f"server-{mode}.log"
    with serving(command, port, env, log, START_SECONDS) as process:
        yield Server(process, port, log)
