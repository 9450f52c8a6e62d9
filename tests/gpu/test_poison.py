# SPDX-License-Identifier: Apache-2.0
"""What slots that no request has written may hold, on each attention backend: vanilla
vLLM with all of them filled before each forward, as if each were a rejected draft.

The poison of VLLM_NWOR_ON_REJECT must change no output; a NaN may, and what it does is
recorded (docs/audit.md, "Poison"). If one written slot a step is filled as well, it
must show: else nothing would be filled where attention reads.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.gpu.compare import differing
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import OFF, Finished, engines_fixture

# By backend and KV cache; of each backend one that replays FULL graphs, if there is.
NAMES = (
    "layout-flash",
    "sync-v1-ngram",
    "sync-v2-eagle-async",
    "layout-flash-fp8",
    "draft-flash-full-fp8-async",
    "layout-triton",
    "sync-v2-eagle",
    "ngram-triton-full-int8",
    "draft-triton-eager-fp8pth-async",
    "layout-triton-int4",
    "layout-flex",
    "layout-mla",
    "flashmla-bf16",
    "layout-mla-fp8",
    "mtp-mla-full-async",
)
UNCHANGED, DIFFER, NAN = "outputs unchanged", "outputs differ", "outputs NaN"
FAILED, UNSETTLED = "engine failed", "not told: differs from itself"
VERDICTS = (UNCHANGED, DIFFER, NAN, FAILED)
ENGINES = pytest.mark.parametrize("engine", NAMES)


def verdict(plain: dict[str, Any], filled: dict[str, Any] | None) -> str:
    """Of a row."""
    if filled is None:
        return FAILED
    logprobs = (
        value
        for positions in filled["logprobs"].values()
        for position in positions
        for _, value, _ in position
    )
    if any(map(math.isnan, logprobs)):
        return NAN
    return DIFFER if differing(plain, filled) else UNCHANGED


def judge(spec: EngineSpec, run: Finished) -> dict[str, Any]:
    """For each pass the worst verdict of the rows in which the engine does not differ
    from itself, and in how many of them; and what is needed to read it."""
    report = run.report
    rows = report.get("plain", {})
    found: dict[str, Any] = {}
    for name in ("again", "poison", "taken", "nan"):
        passed = report.get(name, {})
        verdicts = {row: verdict(plain, passed.get(row)) for row, plain in rows.items()}
        settled = [
            one
            for row, one in verdicts.items()
            if name == "again" or found["again"]["rows"][row] == UNCHANGED
        ]
        nothing = UNSETTLED if rows else FAILED
        worst = max(settled, key=VERDICTS.index, default=nothing)
        found[name] = {
            "verdict": worst,
            "num_rows": settled.count(worst),
            "of_rows": len(settled),
            "rows": verdicts,
            "filled": {
                row: outcome["filled"]
                for row, outcome in passed.items()
                if "filled" in outcome
            },
        }
    described = {
        "backend": spec.backend,
        "kv_cache": "bf16" if spec.kv_cache == "auto" else spec.kv_cache,
        "graphs": spec.graphs,
        "runner": spec.runner,
    }
    return described | run.entry() | found


runs = engines_fixture(
    "gpu_poison",
    lambda pool, spec: judge(spec, pool.run("poison", spec, OFF)),
    lambda spec, entry: {spec.name: entry},
    "make gpu-test STEPS='build poison'",
)


@ENGINES
def test_poison_changes_no_output(runs: dict[str, Any], engine: str) -> None:
    entry, spec = runs[engine], BY_NAME[engine]
    found = entry["poison"]
    if found["verdict"] == UNSETTLED:
        pytest.skip(f"{engine} differs from itself: {entry['again']['rows']}")
    assert found["verdict"] == UNCHANGED, (found["rows"], entry["trouble"])
    filled = found["filled"].values()
    assert all(one["num_filled"] > one["num_rejected"] for one in filled)
    assert any(one["num_rejected"] for one in filled)
    graphs = {mode for one in filled for mode in one["graphs"]}
    assert (spec.graphs == "FULL") == ("FULL" in graphs)


@ENGINES
def test_poison_in_a_written_slot_shows(runs: dict[str, Any], engine: str) -> None:
    entry = runs[engine]
    found = entry["taken"]
    if found["verdict"] == UNSETTLED:
        pytest.skip(f"{engine} differs from itself: {entry['again']['rows']}")
    assert found["rows"], entry["trouble"]
    assert set(found["rows"].values()) <= {DIFFER, NAN}, entry["trouble"]
