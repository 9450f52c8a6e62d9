# SPDX-License-Identifier: Apache-2.0
"""NWOR beside vLLM's OffloadingConnector: guarantees 3 and 7; the connector's own
metrics travel in the same field as ours.

NWOR_GPU_MODE=stage has the engines run with shadow blocks. When a transfer is done is
left to the clock: bytes are watched on the CPU (tests/integration/test_connectors.py),
where it is not.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.compare import counter_problems
from tests.gpu.engines import BY_NAME
from tests.gpu.pool import OFF, ON, Runs, engines_fixture, engines_of

ENGINES = engines_of("offloading")
runs = engines_fixture(
    "gpu_offloading",
    lambda pool, spec: pool.off_on("offload", spec),
    lambda spec, chain: {
        spec.name: {mode: run.entry("counters", "moved") for mode, run in chain.items()}
    },
    "make gpu-test STEPS='build offload'",
    by_mode=True,
)


def reports(runs: Runs, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return runs[engine][OFF].whole(), runs[engine][ON].whole()


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
    assert counter_problems(BY_NAME[engine], on, on["row"]) == []
    assert on["counters"]["nwor_rejected_tokens"] > 0
    for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
        assert on["counters"][name] == off["counters"][name]
