# SPDX-License-Identifier: Apache-2.0
"""Runs engines in processes of their own, several beside each other, and collects what
they wrote.

Each engine is a chain: off, then on, in this order, so that the second finds what the
first compiled. A process that outlives its limit is stopped; one that dies leaves its
report as far as it got, and the end of its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import models
from tests.gpu.engines import EngineSpec

REPO = Path(__file__).resolve().parents[2]
JOBS_VARIABLE = "NWOR_GPU_JOBS"
LIMIT_VARIABLE = "NWOR_GPU_ENGINE_LIMIT_S"
DEFAULT_JOBS = 6
DEFAULT_LIMIT_S = 240
LOG_TAIL = 5000

# What every engine's process has; NWOR's own variables are taken away first.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # Names decide nothing: sets and dicts of them are in the same order in every run.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Several engines compile beside each other.
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "OMP_NUM_THREADS": "2",
}


@dataclass(frozen=True)
class Finished:
    """One process. report: what it wrote ({} if nothing). status: exit status, None if
    it was stopped. log: the end of its output."""

    report: dict[str, Any]
    status: int | None
    seconds: float
    log: str

    @property
    def is_complete(self) -> bool:
        return self.status == 0 and bool(self.report.get("finished"))

    def trouble(self) -> str:
        """Why it is not complete, for people."""
        if self.status is None:
            what = f"stopped after {self.seconds:.0f} s"
        else:
            what = f"exit status {self.status}"
        error = self.report.get("error") or self.log
        return f"{what}\n{error}"


class Pool:
    """Starts processes below `folder`, which also gets models and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = int(os.environ.get(JOBS_VARIABLE) or DEFAULT_JOBS)
        self.limit_s = float(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT_S)
        folder.mkdir(parents=True, exist_ok=True)
        self.models = folder / "models"
        models.make(self.models)

    def map(
        self,
        chain: Callable[[EngineSpec], dict[str, Finished]],
        specs: Sequence[EngineSpec],
    ) -> dict[str, dict[str, Finished]]:
        """Runs `chain` for each engine, `jobs` of them at a time; by engine name."""
        with ThreadPoolExecutor(max_workers=self.jobs) as threads:
            futures = {spec.name: threads.submit(chain, spec) for spec in specs}
            return {name: future.result() for name, future in futures.items()}

    def run(self, job: str, spec: EngineSpec, mode: str, **more: str) -> Finished:
        """One process, to its end. more: environment variables."""
        label = f"{job}-{spec.name}-{mode}"
        out, log = self.folder / f"{label}.json", self.folder / f"{label}.log"
        out.unlink(missing_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_NWOR_")}
        env |= ENVIRONMENT | spec.environment()
        env["NWOR_TEST_TRACE"] = str(self.folder / f"{label}.trace.json")
        env["VLLM_NWOR_MODE"] = mode
        if mode != "off":
            env["VLLM_NWOR_STRICT"] = "always"
        env |= more
        command = [sys.executable, "-m", "tests.gpu.process", job, spec.name]
        command += [str(out), str(self.models)]
        started = time.perf_counter()
        with log.open("w") as sink:
            process = subprocess.Popen(
                command,
                cwd=REPO,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None
            try:
                status = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
        seconds = time.perf_counter() - started
        print(f"{label}: status {status}, {seconds:.0f} s", flush=True)
        report = json.loads(out.read_text()) if out.exists() else {}
        tail = log.read_text(errors="replace")[-LOG_TAIL:]
        return Finished(report, status, seconds, tail)
