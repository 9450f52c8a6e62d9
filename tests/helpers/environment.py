# SPDX-License-Identifier: Apache-2.0
"""The environment variables of all test engines, and the paths of models.

Imports neither torch nor vLLM: the variables must be set before those are imported.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tools.setup import make_models

REPO = Path(__file__).resolve().parents[2]

# In process: 1 to 4 s for an engine instead of 20 to 25 s with worker processes.
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    # On a busy machine bound threads that spin make a step 50 times as long.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",  # else it sets OpenMP's number
}
PREFIX = "VLLM_NWOR_"


def prepare() -> None:
    """Sets VARIABLES in this process and clears NWOR's own; called by conftest."""
    gc.set_threshold(20_000)  # saves a tenth of the engines' time
    os.environ.update(VARIABLES)
    _take_settings()


def _take_settings() -> dict[str, str]:
    """Removes and returns NWOR's variables."""
    names = [name for name in os.environ if name.startswith(PREFIX)]
    return {name: os.environ.pop(name) for name in names}


def subprocess_env(**changes: str | None) -> dict[str, str]:
    """This process's environment without NWOR's variables, with `changes` (None removes
    a variable)."""
    # vLLM sets the second one for workers of engines in this process.
    left_out = (PREFIX, "VLLM_DIST_IDENT")
    env = {k: value for k, value in os.environ.items() if not k.startswith(left_out)}
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_python(
    *arguments: str, cwd: Path = REPO, timeout: float = 300, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end, with its output as text. changes: as of
    subprocess_env."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=subprocess_env(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@contextmanager
def nwor_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets NWOR's variables to exactly `settings` (MODE="cow": VLLM_NWOR_MODE) in the
    block."""
    before = _take_settings()
    os.environ.update({PREFIX + name: value for name, value in settings.items()})
    try:
        yield
    finally:
        _take_settings()
        os.environ.update(before)


def model_path(name: str) -> str:
    """The folder of a model of tools/setup/make_models.py. FileNotFoundError: it was
    not made; the message names the command."""
    path = make_models.model_path(name)
    if not (path / "config.json").exists():
        raise FileNotFoundError(
            f"no model {name!r} in {path}; run: python tools/setup/make_models.py"
        )
    return str(path)
