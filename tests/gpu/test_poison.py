# SPDX-License-Identifier: Apache-2.0
"""Which bytes unwritten slots may hold, on each attention backend: plain vLLM with all
of them filled before each forward, as if each were a rejected draft.

The poison of VLLM_NWOR_ON_REJECT must change no output; the effect of a NaN is recorded
(docs/audit.md, "Poison"). Filling one written slot per step must change outputs.
"""

import json
from typing import Any

import pytest

from tests.gpu.compare import differing
from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import OFF, Finished, engines_fixture, engines_of

UNCHANGED, DIFFER, NAN = "outputs unchanged", "outputs differ", "outputs NaN"
FAILED, UNSETTLED = "engine failed", "not decided: plain vLLM is not deterministic here"
VERDICTS = (UNCHANGED, DIFFER, NAN, FAILED)
ENGINES = engines_of("poisoned")


def verdict(plain: dict[str, Any], filled: dict[str, Any] | None) -> str:
    """The verdict on a row."""
    if filled is None:
        return FAILED
    if "NaN" in json.dumps(filled["logprobs"]):
        return NAN
    return DIFFER if differing(plain, filled) else UNCHANGED


def judge(spec: EngineSpec, run: Finished) -> dict[str, Any]:
    """For each pass the worst verdict over the rows in which plain vLLM does not vary,
    in how many rows, and the engine's facts."""
    found = {name: getattr(spec, name) for name in ("backend", "graphs", "runner")}
    found |= {"kv_cache": spec.kv_cache.replace("auto", "bf16")} | run.entry()
    rows = run.report.get("plain", {})
    for name in ("again", "poison", "taken", "nan"):
        passed = run.report.get(name, {})
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
                r: one["filled"] for r, one in passed.items() if "filled" in one
            },
        }
    return found


runs = engines_fixture(
    "poison",
    lambda pool, spec: judge(spec, pool.run("poison", spec, OFF)),
    lambda spec, entry: {spec.name: entry},
    "make gpu-test STEPS='build poison'",
)


def settled(entry, name):
    """That pass; skips if plain vLLM varies."""
    if entry[name]["verdict"] == UNSETTLED:
        pytest.skip(f"plain vLLM varies: {entry['again']['rows']}")
    return entry[name]


@ENGINES
def test_poison_changes_no_output(runs, engine):
    entry, spec = runs[engine], BY_NAME[engine]
    found = settled(entry, "poison")
    assert found["verdict"] == UNCHANGED, (found["rows"], entry["trouble"])
    filled = found["filled"].values()
    assert all(one["num_filled"] > one["num_rejected"] for one in filled)
    assert any(one["num_rejected"] for one in filled)
    graphs = {mode for one in filled for mode in one["graphs"]}
    assert (spec.graphs == "FULL") == ("FULL" in graphs)


@ENGINES
def test_poison_in_a_written_slot_changes_outputs(runs, engine):
    entry = runs[engine]
    found = settled(entry, "taken")
    assert found["rows"], entry["trouble"]
    assert set(found["rows"].values()) <= {DIFFER, NAN}, entry["trouble"]
