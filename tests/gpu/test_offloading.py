# SPDX-License-Identifier: Apache-2.0
"""Guarantees 3 and 7 with vLLM's OffloadingConnector, whose metrics must stay.

NWOR_GPU_MODE=stage runs the engines with shadow blocks. Transfers take different times,
so bytes are compared on the CPU (tests/integration/test_connectors.py).
"""

from tests.gpu.compare import counter_problems, differing
from tests.gpu.engines import BY_NAME
from tests.gpu.pool import ON, engines_fixture, engines_of

ENGINES = engines_of("offloading")
runs = engines_fixture(
    "offloading",
    lambda pool, spec: pool.off_on("one_row", spec),
    lambda spec, chain: {
        spec.name: {mode: run.entry("counters", "moved") for mode, run in chain.items()}
    },
    "make gpu-test STEPS='build offload'",
    by_mode=True,
)


@ENGINES
def test_outputs_are_plain_vllms(off, on, engine):
    assert set(on["facts"]["resolved"]) == {ON}
    rows = [report["row"] for report in (off, on)]
    for row in rows:  # the number of empty steps varies
        row["batches"] = [batch for batch in row["batches"] if batch]
    assert differing(*rows) == []
    # With an EAGLE head vLLM computes the last block of a match again.
    least = 176 if "eagle" in engine else 192
    cached = max(on["row"]["cached"].values())
    assert cached >= least, "nothing came back from the host"


@ENGINES
def test_the_connectors_metrics_are_kept(off, on, engine):
    """The number of bytes varies: LLMEngine drops statistics of steps without
    outputs."""
    for report in (off, on):
        assert report["moved"]["GPU_to_CPU"] > 0


@ENGINES
def test_counters(off, on, engine):
    assert counter_problems(BY_NAME[engine], on, on["row"]) == []
    assert on["counters"]["nwor_rejected_tokens"] > 0
    for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
        assert on["counters"][name] == off["counters"][name]
