# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM in recurrent states: the audit names them in the steps in which they
happen, which each test finds by itself, and nothing else; with the fault mended it is
silent. vLLM is as it is, or a test says which other fault of it is mended.

Each vLLM runs all of these tests. The first two faults are mended in 0.32; `make
test-older` finds them in 0.29. Outcomes go to cases.jsonl in the folder of
NWOR_REACH_RESULTS.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.drafters import all_wrong, mixture_of_four
from tests.helpers.engine import NUM_DRAFTS, Engine, Request, prompt
from tests.helpers.hybrid import (
    BEFORE_0_32,
    LAYERS,
    caches,
    found,
    host,  # noqa: F401
    mend_convolutions,
    mend_first_tokens,
    mend_rows_without_drafts,
    of_few_words,
    play,
    start,
)
from tests.helpers.reach import CASES, save
from tests.helpers.runner_probe import request_name
from vllm_nwor.audit.findings import Finding

OLD_STATE = "a step without drafts behind accepted ones (#39273)"
FIRST_TOKEN = "a prompt of one token (#51562)"
PADDED = "a prompt of one token, padded with drafts"
SHIFT = "a window with fewer drafts than the longest"
BOTH = "conv", "temporal"
# A step of the audit, and a request.
Moment = tuple[int, str]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return start()


def record(fault: str, how: str, counted: int, named: int, fixed: str) -> None:
    """counted: moments in which the fault can be. named: moments with findings. fixed:
    the first release without the fault."""
    found = {"counted": counted, "named": named, "fixed": fixed}
    save(CASES, {"case": "state_faults", "fault": fault, "how": how}, found)


def moments(findings: list[Finding]) -> set[Moment]:
    return {(one.step, request_name(one.owner or "")) for one in findings}


class Run:
    """One of these requests, and what there is to be found in it."""

    def __init__(
        self, engine: Engine, plan: Any, truth: Any, requests: list[Request]
    ) -> None:
        """As `play`."""
        first = engine.audit.audit.step + 1
        self.result = play(engine, plan, truth, requests)
        self.steps = list(enumerate(self.result.steps, start=first))
        self.findings = found(engine)

    def without_drafts_after_accepted(self) -> dict[Moment, int]:
        """vLLM issue 39273: the requests that have no drafts in a step and had some
        accepted in the one before, and how many."""
        found: dict[Moment, int] = {}
        accepted: dict[str, int] = {}
        for number, step in self.steps:
            for name in step.scheduled:
                if accepted.get(name) and not step.drafted.get(name):
                    found[number, name] = accepted[name]
            accepted |= dict.fromkeys(step.scheduled, 0) | step.accepted
        return found

    def num_stale(self) -> int:
        """In how many moments the states of both kinds that are read are of the last
        token that was computed alone, in all layers; that is all that is found."""
        counted = self.without_drafts_after_accepted()
        for state in BOTH:
            of_kind = [one for one in self.findings if one.state == state]
            assert len(of_kind) == len(counted)
            assert moments(of_kind) == counted.keys()
        for one in self.findings:
            assert (one.kind, one.column) == ("stale_state", 0)
            assert (one.layer, one.num_layers) == (LAYERS[0], len(LAYERS))
            num_lost = counted[one.step, request_name(one.owner or "")]
            assert int(one.expected) - int(one.found) == num_lost
        return len(moments(self.findings))


# --- vLLM issue 39273 -----------------------------------------------------------------

FOUR = [Request("short", prompt(3, 3), 40)] + [
    Request(f"r{length}", prompt(length, length), 40) for length in (5, 33, 65)
]
GAP = 22


def two_right(name: str, num_tokens: int) -> tuple[int, int]:
    return NUM_DRAFTS, 2


def short_once_none(name: str, num_tokens: int) -> tuple[int, int]:
    return (0, 0) if (name, num_tokens) == ("short", GAP) else (NUM_DRAFTS, 2)


def test_a_row_without_drafts_goes_on_from_an_old_state(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has no drafts for one step. With the wrong state its next token is
    wrong, and those of others are not."""
    prompts = {one.name: one.prompt for one in FOUR}
    right = Run(engine, all_wrong, prompts, FOUR)
    truth = {name: [*prompts[name], *right.result.tokens[name]] for name in prompts}
    for plan in (two_right, mixture_of_four):
        control = Run(engine, plan, truth, FOUR)
        assert control.result.num_accepted > 50
        assert right.findings == control.findings == []
        assert control.result.tokens == right.result.tokens
        assert control.result.logprobs == right.result.logprobs

    mend_convolutions(monkeypatch)
    num_named = 0
    if BEFORE_0_32:
        # With vLLM's convolutions, and then without their own fault.
        monkeypatch.undo()
        for mend in (lambda patch: None, mend_convolutions):
            mend(monkeypatch)
            wrong = Run(engine, short_once_none, truth, FOUR)
            num_named = wrong.num_stale()
            assert list(wrong.without_drafts_after_accepted().values()) == [2]
            for name, tokens in right.result.tokens.items():
                first = GAP - len(prompts[name]) if name == "short" else len(tokens)
                assert wrong.result.tokens[name][:first] == tokens[:first]
            wrong_token = wrong.result.tokens["short"][GAP - 3]
            assert wrong_token != right.result.tokens["short"][GAP - 3]
        mend_rows_without_drafts(monkeypatch)
    mended = Run(engine, short_once_none, truth, FOUR)
    assert len(mended.without_drafts_after_accepted()) == 1
    assert mended.findings == []
    assert mended.result.tokens == right.result.tokens
    record(OLD_STATE, "one request, one step", 1, num_named, "0.32")


def test_rows_without_drafts_of_ngram_go_on_from_old_states(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own drafter, on texts of few words, which repeat."""
    requests = of_few_words()
    mend_convolutions(monkeypatch)
    run = Run(engine, None, {}, requests)
    counted = run.without_drafts_after_accepted()
    assert len(counted) > 9
    num_named = len(moments(run.findings))
    if BEFORE_0_32:
        assert run.num_stale() == num_named
        mend_rows_without_drafts(monkeypatch)
        run = Run(engine, None, {}, requests)
        assert len(run.without_drafts_after_accepted()) > 9
    assert run.findings == []
    record(OLD_STATE, "ngram", len(counted), num_named, "0.32")


# --- vLLM issue 51562 -----------------------------------------------------------------


NOT_YET = [("no_state_yet", state, len(LAYERS)) for state in BOTH]


def test_a_prompt_of_one_token_goes_on_from_the_state_of_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without speculation. vLLM takes it for a decode, which has a state: that of the
    last owner of its block."""
    # As many blocks as the two others have.
    engine = start(speculative_config=None, num_gpu_blocks_override=9)
    one = [Request("one", (77,), 4)]
    others = [Request(f"other{n}", prompt(n, 40), 8) for n in range(2)]

    def first_logprobs() -> tuple[list[Any], list[Finding]]:
        """Of blocks of zeros, and of blocks that others had; and all findings."""
        for number in range(len(LAYERS)):
            for cache in caches(engine, number):
                cache.zero_()
        runs = [Run(engine, None, {}, which) for which in (one, others, one)]
        assert runs[1].findings == []
        for run in (runs[0], runs[2]):
            assert {f.step for f in run.findings} <= {run.steps[0][0]}
        logprobs = [run.result.logprobs["one"][0] for run in (runs[0], runs[2])]
        return logprobs, runs[0].findings + runs[2].findings

    (right, wrong), findings = first_logprobs()
    named = NOT_YET * 2 if BEFORE_0_32 else []
    assert [(f.kind, f.state, f.num_layers) for f in findings] == named
    assert (wrong != right) is BEFORE_0_32
    mend_first_tokens(monkeypatch)
    (right, again), mended = first_logprobs()
    assert mended == []
    assert again == right
    record(FIRST_TOKEN, "no speculation", 2, len(moments(findings)), "0.32")


# --- not mended in 0.32 ---------------------------------------------------------------


def test_a_short_window_leaves_its_convolution_shifted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs are in the wrong columns, in all layers. (If drafts were accepted
    before, it raises. The first window of a text, and one behind a short one, get what
    the audit does not know.)"""

    def every_other_short(name: str, num_tokens: int) -> tuple[int, int]:
        half, is_short = divmod(num_tokens, 2)
        return (1 + half % 3 if is_short else NUM_DRAFTS), 0

    prompts = {one.name: one.prompt for one in FOUR}
    wrong = Run(engine, every_other_short, prompts, FOUR)
    counted, num_fed = set(), dict.fromkeys(prompts, 0)
    for number, step in wrong.steps:
        for name, num_drafts in step.drafted.items():
            text, at = wrong.result.tokens[name], num_fed[name]
            num_fed[name] += 1
            # From the same token again nothing follows.
            if num_drafts < NUM_DRAFTS and text[at] not in text[max(at - 4, 0) : at]:
                counted.add((number, name))
    assert len(counted) > 70
    assert moments(wrong.findings) == counted
    assert {(f.kind, f.state, f.num_layers) for f in wrong.findings} == {
        ("state_not_written", "conv", len(LAYERS))
    }
    mend_convolutions(monkeypatch)
    mend_rows_without_drafts(monkeypatch)
    mended = Run(engine, every_other_short, prompts, FOUR)
    assert mended.findings == []
    assert mended.result.tokens != wrong.result.tokens
    num_named = len(moments(wrong.findings))
    record(SHIFT, "every other window short", len(counted), num_named, "0.33")


def test_a_padded_prompt_of_one_token_goes_on_from_the_state_of_another_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads it with drafts if it comes while others have some, and so takes it for
    a request that has a state."""
    mend_first_tokens(monkeypatch)
    answers, named = {}, set()
    for at in (0, 6, 7, 8):
        requests = [Request("one", (77,), 4, at=at)]
        requests += [Request("other", prompt(5, 40), 30)] * (at > 0)
        run = Run(engine, all_wrong, {"one": (77,), "other": ()}, requests)
        kinds = [(f.kind, f.state, f.num_layers) for f in run.findings]
        assert kinds == (NOT_YET if at else [])
        first = next(number for number, step in run.steps if "one" in step.scheduled)
        assert moments(run.findings) <= {(first, "one")}
        named |= moments(run.findings)
        answers[at] = run.result.logprobs["one"][0]
    right = dict(entry[:2] for entry in answers.pop(0))
    wrong = [dict(entry[:2] for entry in one) for one in answers.values()]
    assert any(right.keys() != one.keys() for one in wrong)
    record(PADDED, "one other request", len(wrong), len(named), "none")
