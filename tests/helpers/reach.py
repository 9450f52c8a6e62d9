# SPDX-License-Identifier: Apache-2.0
"""Records the outcome of a test on a CPU engine, or on a stand-in, as a line of
docs/reach.md; and what other cases found.

Lines go to engines.jsonl and cases.jsonl in the folder of NWOR_REACH_RESULTS; without
it nothing is written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm
from benchmarks import environment, records

from tests.helpers.environment import REPO

VLLM = vllm.__version__.split("+")[0]
FOLDER_VARIABLE = "NWOR_REACH_RESULTS"
ENGINES, CASES = "engines.jsonl", "cases.jsonl"
EXACT, OUTPUTS, REFUSED, FAILED = "exact", "outputs", "refused", "failed"


@contextmanager
def recorded(engine: Any, kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Records how the block ends for this engine; the block may add to the dict.

    kind: "method", "model", "parallelism" or "refusal". verdict: FAILED if the block
    raises; REFUSED if the engine protects nothing, or in mode stage has no shadow
    pages, with NWOR's reason; EXACT otherwise.
    """
    infos = engine.infos
    groups = itertools.chain(*engine.runner.attn_groups)
    names = {group.backend.get_name() for group in groups}
    # Backends of recurrent state are left out.
    backend = ", ".join(sorted(name for name in names if "CPU" in name))
    with noted(engine.mode, kind, name, backend) as entry:
        entry["resolved"] = [info.resolved for info in infos]
        for info in infos:
            if info.resolved not in (engine.mode, "native"):
                entry.setdefault("reason", info.reason.split("; ")[0])
        yield entry


@contextmanager
def noted(
    mode: str,
    kind: str,
    name: str,
    backend: str = "CPU_ATTN",
    shown: str = EXACT,
    runner: str = "V1",
) -> Iterator[dict[str, Any]]:
    """The same for an engine in another process, with all groups in `mode`.

    shown: the verdict if the block succeeds; OUTPUTS if it did not compare bytes.
    """
    entry: dict[str, Any] = {
        "vllm": VLLM,
        "runner": runner,
        "backend": backend,
        "kind": kind,
        "name": name,
        "mode": mode,
        "verdict": FAILED,
    }
    try:
        yield entry
        entry["verdict"] = REFUSED if "reason" in entry else shown
    finally:
        save(ENGINES, {"kind": kind, "name": name, "mode": mode}, entry)


def refused_stand_in(
    name: str, reason: str, modes: Sequence[str] = ("cow", "stage"), runner: str = "any"
) -> None:
    """Records that a stand-in was refused with this reason in these modes."""
    for mode in modes:
        with noted(mode, "refusal", name, "stand-in", runner=runner) as entry:
            entry["reason"] = reason


def save(
    file: str, key: dict[str, str], found: Any, command: str = "make reach", **more: str
) -> None:
    """Appends a line to a file of that folder. The key gets the release of vLLM. more:
    further members of the line."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        about = environment.describe("cpu", REPO)
        key = key | {"vllm": VLLM}
        line = {"key": key, **about, **more, "command": command, "found": found}
        records.append(Path(folder) / file, line)
