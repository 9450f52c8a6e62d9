# SPDX-License-Identifier: Apache-2.0
"""Runs engines in processes of their own, several at a time, and collects their
reports.

Each engine runs off, then on, so that the second finds what the first compiled. A
process that exceeds its time limit is stopped with all its children; one that dies
leaves the last state of its report, and the end of its log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.gpu import models, results
from tests.gpu.engines import BY_NAME, ENVIRONMENT, GROUPS, EngineSpec
from tests.helpers.environment import REPO, subprocess_env

T = TypeVar("T")

LOG_TAIL = 5000
# NWOR_GPU_MODE=stage: the same engines with shadow blocks.
OFF, ON = "off", os.environ.get("NWOR_GPU_MODE", "cow")


@dataclass(frozen=True)
class Finished:
    """A finished process. report: {} if it wrote none. status: exit status, None if it
    was stopped. log: the end of its output."""

    report: dict[str, Any]
    status: int | None
    seconds: float
    log: str

    @property
    def trouble(self) -> str:
        """Why it did not end by itself, as text; "" if it did."""
        if self.status == 0 and self.report.get("finished"):
            return ""
        what = f"exit status {self.status}"
        if self.status is None:
            what = f"stopped after {self.seconds:.0f} s"
        return f"{what}\n{self.report.get('error') or self.log}"

    def whole(self) -> dict[str, Any]:
        """The report; fails if it is not complete."""
        assert not self.trouble, self.trouble
        return self.report

    def entry(self, *keys: str) -> dict[str, Any]:
        """For the results file: how it ended, and these keys of the report, None where
        it has none. Of its facts not the layers, which layouts.jsonl has."""
        facts = self.report.get("facts") or {}
        aside = ("targets", "protected")
        return {
            "complete": not self.trouble,
            "trouble": self.trouble[-2000:],
            "seconds": self.seconds,
            "facts": {name: facts[name] for name in facts if name not in aside},
            **{key: self.report.get(key) for key in keys},
        }


Chain = dict[str, Finished]
Runs = dict[str, Chain]


class Pool:
    """Starts processes below `folder`, which also gets models and logs."""

    num_jobs = 6
    limit_s = 240.0
    # vLLM's wheel has FlashAttention 2 as PTX, which the driver compiles (5 minutes);
    # kernels of recurrent layers are compiled by Triton; real models have many layers.
    compiling_limit_s = 480.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models.make(folder / "models")

    def off_on(self, job: str, spec: EngineSpec, **more: str) -> Chain:
        return {mode: self.run(job, spec, mode, **more) for mode in (OFF, ON)}

    def run(self, job: str, spec: EngineSpec, mode: str, **more: str) -> Finished:
        """Runs one process to its end. more: environment variables."""
        label = f"{job}-{spec.name}-{mode}"
        out, log = self.folder / f"{label}.json", self.folder / f"{label}.log"
        out.unlink(missing_ok=True)
        env = ENVIRONMENT | spec.environment() | {"VLLM_NWOR_MODE": mode}
        if mode != OFF:
            env["VLLM_NWOR_STRICT"] = "always"
        command = [sys.executable, "-m", "tests.gpu.process", job, spec.name]
        command += [str(out), str(self.folder / "models")]
        started = time.perf_counter()
        with (
            log.open("w") as sink,
            subprocess.Popen(
                command,
                cwd=REPO,
                env=subprocess_env(**env | more),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                compiles = spec.flash == 2 or spec.hybrid or spec.real
                limit = self.compiling_limit_s if compiles else self.limit_s
                status = process.wait(limit)
            with contextlib.suppress(ProcessLookupError):  # no process is left
                os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - started
        print(f"{label}: status {status}, {seconds:.0f} s", flush=True)
        report = json.loads(out.read_text()) if out.exists() else {}
        tail = log.read_text(errors="replace")[-LOG_TAIL:]
        return Finished(report, status, seconds, tail)


def engines_of(*groups: str) -> pytest.MarkDecorator:
    """A test for each engine of these groups of engines.yml; it is skipped if there are
    too few GPUs for its ranks."""
    skip = partial(pytest.mark.skipif, reason="needs more GPUs")
    specs = (spec for group in groups for spec in GROUPS[group])
    engines = [pytest.param(spec.name, marks=skip(not fits(spec))) for spec in specs]
    return pytest.mark.parametrize("engine", engines)


def fits(spec: EngineSpec) -> bool:
    return (n := spec.tensor_parallel) == 1 or n <= torch.cuda.device_count()


def engines_fixture(
    kind: str,
    chain: Callable[[Pool, EngineSpec], T],
    entries: Callable[[EngineSpec, T], dict[str, Any]],
    command: str = "make gpu-test",
    by_mode: bool = False,
    num_jobs: int = Pool.num_jobs,
    **key: str,
) -> Any:
    """A fixture: what `chain` gives for each engine that the selected tests name, by
    engine, `num_jobs` of them at a time. An engine's `entries` are saved as soon as it
    has ended.

    by_mode: the key of its lines has the mode. key: further members of it.
    """
    key |= {"mode": ON} if by_mode else {}

    @pytest.fixture(scope="module")
    def runs(request: pytest.FixtureRequest, pool: Pool) -> dict[str, T]:
        def saved(spec: EngineSpec) -> T:
            found = chain(pool, spec)
            results.save(kind, command, entries(spec, found), **key)
            return found

        names = {
            str(item.callspec.params["engine"])
            for item in request.session.items
            if isinstance(item, pytest.Function)
            and item.path == request.path
            and request.fixturename in item.fixturenames
        }
        specs = {n: spec for n, spec in BY_NAME.items() if n in names and fits(spec)}
        with ThreadPoolExecutor(num_jobs) as threads:
            found = threads.map(saved, specs.values())
            return dict(zip(specs, found, strict=True))

    return runs
