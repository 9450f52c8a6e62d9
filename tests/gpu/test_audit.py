# SPDX-License-Identifier: Apache-2.0
"""The KV audit of all bytes on real engines.

No finding on the engines of the matrix, on both ranks of a tensor parallel engine, and
on one that sleeps; a bit that is flipped between two steps is found at its place; and,
with the OffloadingConnector and NWOR off, the fault of vLLM issue 54193 is found. A
vLLM without that fault gets it patched in; one with it is patched for the control.
"""

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
HYBRIDS = engines_of("states", "states-parallel")
FAULTY, MENDED = "faulty", "mended"


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    keys = "clean", "flipped", "lost", "found", "audit", "taken", "named", "padded"
    keys += "shared", "differences", "is_faulty", "cached", "num_steps", "hits"
    keys += ("preempted",)
    return {
        spec.name if state == ON else f"{spec.name}-{state}": run.entry(
            *(key for key in keys if key in run.report)
        )
        for state, run in chain.items()
    }


def audited(job: str, num_jobs: int = Pool.num_jobs) -> Any:
    """A fixture: the reports of that job with NWOR and the audit on."""

    def chain(pool: Pool, spec: EngineSpec) -> Chain:
        return {ON: pool.run(job, spec, ON if spec.drafter else OFF, **AUDIT)}

    return engines_fixture("audit", chain, entries, COMMAND, num_jobs=num_jobs)


def faulty_and_mended(pool: Pool, spec: EngineSpec) -> Chain:
    return {
        state: pool.run("corrupting", spec, OFF, NWOR_TEST_FAULT=value, **AUDIT)
        for state, value in ((FAULTY, "1"), (MENDED, "0"))
    }


runs = audited("audit")
hybrids = audited("states")
sleeping = audited("sleep", num_jobs=1)  # as in test_sleep.py
corrupting = engines_fixture("audit", faulty_and_mended, entries, COMMAND)


def findings(looks):
    return [finding for look in looks for finding in look["findings"]]


def check_looks(looks):
    """The audit compared something, and its memory is in no pool that sleep empties."""
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


@engines_of("real")
def test_real_weights(on, engine):
    test_a_clean_engine_has_no_findings(on, engine)
    test_a_flipped_bit_is_found_where_it_is(on, engine)


@SLEEPERS
def test_an_engine_that_sleeps_has_no_findings(sleeping, engine):
    report = sleeping[engine][ON].whole()
    assert set(report) > set(PHASES)
    assert findings(report["audit"]) == []
    check_looks(report["audit"])


@HYBRIDS
def test_recurrent_states(hybrids, engine):
    """Silent while they are right; states that are lost are found in the next step."""
    report = hybrids[engine][ON].whole()
    assert report["num_steps"] >= BY_NAME[engine].steps
    for row, looks in report["clean"].items():
        assert findings(looks) == [], row
    for look, lost in zip(report["found"], report["lost"], strict=True):
        num_compared, num_unknown = look["states"]
        # All rows have more than 200 steps; three layers have states.
        assert num_compared > look["num_states"] * 200 >= 3 * 200
        assert num_unknown == 0
        assert look["is_reserved"]
        (found,) = look["findings"]
        assert found | lost == found
        assert found["owner"].startswith("eight/")
    if BY_NAME[engine].cached:
        assert any(report["hits"]["block ends"].values())
    assert report["preempted"] > 0
    dtype = BY_NAME[engine].state_dtype
    assert dtype == "auto" or f"temporal torch.{dtype}" in report["facts"]["states"]


@HYBRIDS
def test_prompts_that_are_taken_for_windows_are_named(hybrids, engine):
    """vLLM issue 53051: the V1 runner, with FULL graphs, replays a graph of windows if
    all requests of a step have 1 + k tokens, prompts among them."""
    report, spec = hybrids[engine][ON].whole(), BY_NAME[engine]
    is_faulty = spec.runner == "v1" and spec.graphs == "FULL"
    assert len(report["taken"]) > 8
    for named in report["named"]:
        assert named == (report["taken"] if is_faulty else [])
    wrong = {length for length, by in report["differences"].items() if by > 0.1}
    assert wrong == ({str(1 + spec.num_drafts)} if is_faulty else set())


@HYBRIDS
def test_padded_prompts_of_one_token_are_named(hybrids, engine):
    """A gated delta net of the V1 runner takes them for windows, and begins with what
    their blocks held before. Others run them as prompts, drafts and all: the first
    token is right, and the state has the drafts in it."""
    report, spec = hybrids[engine][ON].whole(), BY_NAME[engine]
    is_before = spec.runner == "v1" and spec.hybrid == "hybrid"
    kind = "no_state_yet" if is_before else "state_ahead"
    states = [of.split()[0] for of in report["facts"]["states"]]
    padded = report["padded"]
    assert bool(padded["prompts"]) == bool(spec.drafter)
    expected = [[name, kind, of] for name in padded["prompts"] for of in states]
    for named in padded["named"]:
        assert named == sorted(expected)
    assert {far > 10 for far in padded["differences"]} <= {is_before}


@HYBRIDS
def test_texts_in_the_prefix_cache_are_answered_as_computed_ones(hybrids, engine):
    """vLLM issue 53912, of MTP, is not in this vLLM."""
    if BY_NAME[engine].cached:
        shared = hybrids[engine][ON].whole()["shared"]
        (hit, salted), differences = shared["num_hit"], shared["differences"]
        assert (min(hit) > 0, max(salted)) == (True, 0)
        assert max(differences) < 0.1


@CELLS
def test_storing_a_chunk_with_an_unwritten_slot_is_found(corrupting, engine):
    report = corrupting[engine][FAULTY].whole()
    size = BY_NAME[engine].block_size
    stored = [f for f in findings(report["audit"]) if f["kind"] == "handed_on"]
    # The last token of a text of 64, and of 32.
    places = {(f["owner"].split("/")[0], f["position"] + 1) for f in stored}
    first, filler = ("first", 4 * size), ("filler", 2 * size)
    assert {f["slot"] % size for f in stored} == {size - 1}
    assert {first} <= places <= {first, filler}
    if BY_NAME[engine].runner == "v1":  # some slots have the request's rejected draft
        assert any(f["writer"]["request"] == f["owner"] for f in stored)
    # The loaded text's logprobs differ by more than the noise of the patched engine.
    noise = corrupting[engine][MENDED].whole()["differences"]
    assert max(report["differences"]) > 3 * max(noise), (report["differences"], noise)


@CELLS
def test_the_patched_connector_has_no_findings(corrupting, engine):
    report = corrupting[engine][MENDED].whole()
    assert findings(report["audit"]) == []
    # Chunks were loaded.
    assert sum(look["totals"]["returned"] for look in report["audit"]) > 0
