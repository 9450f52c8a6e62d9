# SPDX-License-Identifier: Apache-2.0
"""NWOR beside vLLM's OffloadingConnector: guarantees 3 and 7; the connector's own
metrics travel in the same field as ours.

NWOR_GPU_MODE=stage has the engines run with shadow pages. When a transfer is done is
left to the clock: bytes are watched on the CPU (tests/integration/test_connectors.py),
where it is not.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import results
from tests.gpu.compare import OFF, ON
from tests.gpu.engines import BY_NAME, OFFLOADING
from tests.gpu.pool import Finished, Pool
from tests.gpu.test_engine_matrix import selected

FILE = "gpu_offloading.json" if ON == "cow" else f"gpu_offloading_{ON}.json"
ENGINES = pytest.mark.parametrize("engine", [spec.name for spec in OFFLOADING])
Runs = dict[str, dict[str, Finished]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, pool: Pool) -> Runs:
    specs = [BY_NAME[name] for name in selected(request, "runs")]
    found = pool.map(
        lambda spec: {mode: pool.run("offload", spec, mode) for mode in (OFF, ON)},
        specs,
    )
    entries = {
        name: {
            mode: {
                "complete": run.is_complete,
                "trouble": "" if run.is_complete else run.trouble()[-2000:],
                "facts": results.facts(run.report),
                "counters": run.report.get("counters"),
                "moved": run.report.get("moved"),
            }
            for mode, run in chain.items()
        }
        for name, chain in found.items()
    }
    results.save(FILE, "gpu_offloading", "make gpu-test STEPS='build offload'", entries)
    return found


def reports(runs: Runs, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for run in runs[engine].values():
        assert run.is_complete, run.trouble()
    return runs[engine][OFF].report, runs[engine][ON].report


@ENGINES
def test_outputs_are_vanillas(runs: Runs, engine: str) -> None:
    off, on = reports(runs, engine)
    assert set(on["facts"]["resolved"]) == {ON}
    for what in ("tokens", "logprobs", "finish", "cached"):
        assert on["row"][what] == off["row"][what], what
    steps = [[batch for batch in r["row"]["batches"] if batch] for r in (off, on)]
    assert steps[0] == steps[1]
    # Beside an EAGLE head vLLM computes the last block of a match again.
    least = 176 if "eagle" in engine else 192
    assert max(on["row"]["cached"].values()) >= least, "nothing came back from the host"


@ENGINES
def test_the_connectors_metrics_are_beside_ours(runs: Runs, engine: str) -> None:
    """How many bytes depends on the clock: LLMEngine drops statistics of steps without
    outputs, in which a load of a request alone is done."""
    for report in reports(runs, engine):
        assert report["moved"]["GPU_to_CPU"] > 0


@ENGINES
def test_counters(runs: Runs, engine: str) -> None:
    off, on = reports(runs, engine)
    found = on["counters"]
    assert not any(n for name, n in found.items() if "fallbacks" in name)
    assert found["nwor_breaches"] == 0
    assert found["nwor_windows"] > 0 < found["nwor_rejected_tokens"]
    assert found["nwor_committed_tokens"] == found["spec_decode_num_accepted_tokens"]
    assert found["nwor_tokens_staged"] == (
        found["nwor_committed_tokens"]
        + found["nwor_rejected_tokens"]
        + found["nwor_dropped_drafts"]
    )
    for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
        assert found[name] == off["counters"][name]
