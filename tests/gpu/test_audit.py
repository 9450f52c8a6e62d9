# SPDX-License-Identifier: Apache-2.0
"""The KV audit at 100 % on real engines: silent where nothing is wrong, on every engine
of the matrix, on both ranks of a tensor parallel one, and on one that sleeps and wakes
up; one bit flipped between two steps is found where it is; and beside the
OffloadingConnector vLLM issue 54193, which vLLM 0.26 has.

NWOR's mode is that of the matrix (NWOR_GPU_MODE). Beside the connector it is off: the
audit alone. A vLLM that has the mend of 54193 gets the fault planted, one that has not
is mended in memory for the control.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import OFF, ON, Chain, Pool, engines_fixture, engines_of
from tests.gpu.rows import PHASES

COMMAND = "make gpu-test STEPS='build audit'"
AUDIT = {
    "VLLM_NWOR_AUDIT": "log",
    "VLLM_NWOR_AUDIT_MIB": "4096",
    "VLLM_NWOR_STRICT": "always",
}
ENGINES = engines_of("matrix", "parallel")
SLEEPERS, CELLS = engines_of("sleep"), engines_of("corrupting")
FAULTY, MENDED = "faulty", "mended"


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    keys = ("clean", "flipped", "found", "audit", "differences", "is_faulty", "cached")
    return {
        spec.name if state == ON else f"{spec.name}-{state}": run.entry(
            *(key for key in keys if key in run.report)
        )
        for state, run in chain.items()
    }


def audited(job: str, num_jobs: int = Pool.num_jobs) -> Any:
    """A fixture: what that job found with NWOR on, and the audit."""

    def chain(pool: Pool, spec: EngineSpec) -> Chain:
        return {ON: pool.run(job, spec, ON, **AUDIT)}

    return engines_fixture("audit", chain, entries, COMMAND, num_jobs=num_jobs)


def faulty_and_mended(pool: Pool, spec: EngineSpec) -> Chain:
    return {
        state: pool.run("corrupting", spec, OFF, NWOR_TEST_FAULT=value, **AUDIT)
        for state, value in ((FAULTY, "1"), (MENDED, "0"))
    }


runs = audited("audit")
sleeping = audited("sleep", num_jobs=1)  # as in test_sleep.py
corrupting = engines_fixture("audit", faulty_and_mended, entries, COMMAND)


def findings(looks):
    return [finding for look in looks for finding in look["findings"]]


def check_looks(looks):
    """It has looked, and lies in no pool that sleep empties."""
    for look in looks:
        assert set(look["pools"]) == {None}
        assert look["totals"]["identities"] > 10_000
        assert look["totals"]["contents"] > 10_000


@ENGINES
def test_a_clean_engine_has_no_findings(on, engine):
    for row, looks in on["clean"].items():
        assert findings(looks) == [], row
    check_looks(looks)
    for look in looks:
        assert look["is_reserved"]
        assert look["totals"]["unverified"] == 0


@ENGINES
def test_a_flipped_bit_is_found_where_it_is(on, engine):
    for where, look in zip(on["flipped"], on["found"], strict=True):
        (found,) = look["findings"]
        assert (found["kind"], found["slot"]) == ("changed", where["slot"])
        assert (found["layer"], found["num_layers"]) == (where["layer"], 1)
        assert found["position"] == 1
        assert found["owner"].startswith("eight/")


@SLEEPERS
def test_an_engine_that_sleeps_has_no_findings(sleeping, engine):
    report = sleeping[engine][ON].whole()
    assert set(report) > set(PHASES)
    assert findings(report["audit"]) == []
    check_looks(report["audit"])


@CELLS
def test_a_chunk_with_an_unwritten_slot_is_named_when_it_is_stored(corrupting, engine):
    report = corrupting[engine][FAULTY].whole()
    size = BY_NAME[engine].block_size
    stored = [f for f in findings(report["audit"]) if f["kind"] == "handed_on"]
    # The last token of a text of 64, and of 32.
    places = {(f["owner"].split("/")[0], f["position"] + 1) for f in stored}
    first, filler = ("first", 4 * size), ("filler", 2 * size)
    assert {f["slot"] % size for f in stored} == {size - 1}
    assert {first} <= places <= {first, filler}
    if BY_NAME[engine].runner == "v1":  # some hold the request's own rejected draft
        assert any(f["writer"]["request"] == f["owner"] for f in stored)
    # It is what the loaded text's logprobs show, against the mended engine's noise.
    noise = corrupting[engine][MENDED].whole()["differences"]
    assert max(report["differences"]) > 3 * max(noise), (report["differences"], noise)


@CELLS
def test_the_mended_connector_has_no_findings(corrupting, engine):
    report = corrupting[engine][MENDED].whole()
    assert findings(report["audit"]) == []
    # Chunks were loaded all the same, as they were stored.
    assert sum(look["totals"]["returned"] for look in report["audit"]) > 0
