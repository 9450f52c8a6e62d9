# SPDX-License-Identifier: Apache-2.0
"""Versions of KV on vLLM's own schedulers, with a simulated worker that notes which
weights wrote each row of each block.

The code under test does not see these notes: what it says of any request must be what
they say of the rows of its blocks. On real engines: tests/integration/test_weights.py.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

import vllm_nwor
from tests.helpers.engine import NUM_DRAFTS
from tests.helpers.environment import nwor_settings
from tests.helpers.runner_probe import unwrap_instance
from tests.integration.test_commits import BLOCK, SHARED, Worker, add, make_scheduler
from vllm_nwor import Commit, KvVersionSpan, commits, kv_versions
from vllm_nwor.commits import Registration
from vllm_nwor.config import NworConfigError
from vllm_nwor.hooks import kv_versions as under_test
from vllm_nwor.hooks import scheduler as hooks
from vllm_nwor.metrics import NworStats
from vllm_nwor.step import Weights

KINDS = [(Scheduler, False), (AsyncScheduler, False), (AsyncScheduler, True)]


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    with nwor_settings({"MODE": "stage", "AUDIT": "log", "STRICT": "always"}):
        yield
    commits.registered.clear()
    commits.sources.clear()


class Run:
    """A scheduler with NWOR's hooks, a worker, and steps in flight.

    weights: of the next step. written: by (block, row), the epoch that wrote it last.
    commits: of the last processed step. counts: increments of the counters.
    """

    def __init__(
        self, kind: type[Scheduler] = Scheduler, is_v2: bool = False, draw: Any = None
    ) -> None:
        init_none_hash(sha256)
        self.draw = draw or random.Random(0)
        self.scheduler = make_scheduler(kind, is_v2)
        unwrap_instance(self.scheduler)
        self.worker = Worker(self.draw)
        self.depth = 1 + (kind is AsyncScheduler)
        self.in_flight: deque[Any] = deque()
        self.weights = Weights()
        self.written: dict[tuple[int, int], int] = {}
        self.commits: list[Commit] = []
        self.counts: Counter[str] = Counter()
        # Expected: requests by whether they are mixed; stale tokens.
        self.is_mixed: dict[str, bool] = {}
        self.num_stale = 0

    def schedule(self) -> Any:
        of_step = self.weights, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks.weights, "of_step", lambda *_: of_step)
            patch.setattr(hooks.weights, "are_followed", lambda _: True)
            patch.setattr(NworStats, "count", self._count)
            step = hooks._schedule(self.scheduler.schedule, self.scheduler, (), {})
        output, expected = self.worker.run(self.scheduler, step)
        for name, num in step.num_scheduled_tokens.items():
            for position in range(expected[name].start, expected[name].start + num):
                self.written[self._row(name, position)] = self.weights.epoch
        # Found blocks may be computed in this step.
        for new in step.scheduled_new_reqs:
            if not self.scheduler.requests[new.req_id].num_preemptions:
                found = self.truth(new.req_id, new.num_computed_tokens)
                self.num_stale += sum(one != self.weights.epoch for one in found)
        resumed = step.scheduled_cached_reqs.resumed_req_ids
        for name in (*resumed, *(new.req_id for new in step.scheduled_new_reqs)):
            found = self.truth(name, expected[name].start)
            self.is_mixed[name] = len(set(found)) > 1
        self.in_flight.append((step, output, self.weights))
        return step

    def process(self) -> list[Any]:
        """Outputs of the oldest step in flight."""
        step, output, self.computed_by = self.in_flight.popleft()
        registration = Registration(self._committed)
        self.commits = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commits, "registered", [registration])
            patch.setattr(NworStats, "count", self._count)
            update = self.scheduler.update_from_output
            found = hooks._update_from_output(
                update, self.scheduler, (step, output), {}
            )
        assert registration.num_errors == 0
        return [one for of_client in found.values() for one in of_client.outputs]

    def step(self) -> list[Any]:
        self.schedule()
        if len(self.in_flight) < self.depth:
            return []
        names = self.in_flight[0][1].req_ids
        outputs = self.process()
        if self.depth == 1:
            drafts = [[1] * self.draw.randint(0, NUM_DRAFTS) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return outputs

    def truth(self, name: str, end: int) -> list[int]:
        """The epochs that wrote positions [0, end)."""
        return [self.written[self._row(name, position)] for position in range(end)]

    def _row(self, name: str, position: int) -> tuple[int, int]:
        table = self.worker.rows[name].tables[0]
        return table[position // BLOCK], position % BLOCK

    def _count(self, field: str, counts: dict[str, int]) -> None:
        self.counts.update(counts)

    def _committed(self, step: Any) -> None:
        self.commits = list(step)
        for commit in step if self.scheduler.nwor_versions else ():
            name = commit.request_id
            truth = self.truth(name, commit.end)
            assert commit.weights == self.computed_by
            assert epochs(kv_versions(name)) == truth, commit
            assert commit.found == () or epochs(commit.found) == truth[: commit.start]
            self.is_mixed[name] = len(set(truth)) > 1


def epochs(spans: Any) -> list[int]:
    """Of each position; checks that the spans are adjacent and differ."""
    found: list[int] = []
    for number, (version, start, end) in enumerate(spans):
        assert start == len(found) < end
        assert number == 0 or version != spans[number - 1].version
        found += [int(version.strip("#step-"))] * (end - start)
    return found


@pytest.mark.parametrize(("kind", "is_v2"), KINDS)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 1 << 32))
def test_each_position_has_the_version_that_wrote_it(kind, is_v2, seed):
    """Prompts in chunks, shared prefixes, drafts, stops within accepted ones, aborts
    and preemptions in flight; old weights come back."""
    draw = random.Random(seed)
    run = Run(kind, is_v2, draw)
    scheduler = run.scheduler
    seen: Counter[str] = Counter()
    first: set[str] = set()
    requests: dict[str, Request] = {}
    for number in range(300):
        if number < 250 and draw.random() < 0.25:
            add(scheduler, draw, f"r{number}")
        if draw.random() < 0.15:
            run.weights = Weights(draw.randint(0, 4))
        run.step()
        for commit in run.commits:
            name = commit.request_id
            seen["found"] += len(commit.found) > 0
            seen["mixed prefix"] += len(commit.found) > 1
            # Once for each computation from the start on.
            assert commit.found == () or name not in first
            assert commit.found != () or name in first or commit.start == 0
            first.add(name)
        for name, request in scheduler.requests.items():
            if request.num_computed_tokens == 0:
                seen["preempted"] += name in run.is_mixed
                assert kv_versions(name) == () if name in first else True
                first.discard(name)
            requests[name] = request
        if draw.random() < 0.05 and scheduler.running:
            name = draw.choice(scheduler.running).request_id
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
    while scheduler.has_unfinished_requests():
        run.step()
    run.schedule()
    assert seen["found"] > 0 < seen["aborted"]
    assert run.counts["stale_tokens"] == run.num_stale
    # Of those that ended while they were preempted a step in flight may have been lost.
    unsure = {name for name, one in requests.items() if one.num_computed_tokens == 0}
    is_mixed = {name for name, one in run.is_mixed.items() if one}
    num_sure = len(is_mixed - unsure)
    num_mixed = run.counts["mixed_requests"]
    assert 0 < num_sure <= num_mixed <= num_sure + len(unsure)
    assert not scheduler.nwor_versions._requests
    marks = scheduler.nwor_versions._mixed
    assert len(marks) <= len(scheduler.nwor_versions._epochs)


# --- single requests ------------------------------------------------------------------


def ask(
    run: Run, name: str, tokens: Any = SHARED, num: int = 4, asks: Any = None
) -> Any:
    """Runs a request to its end; returns its last output."""
    submit(run, name, tokens, num, asks)
    while True:
        for one in run.step():
            if one.request_id == name and one.finish_reason is not None:
                return one


def submit(run: Run, name: str, tokens: Any, num: int, asks: Any = None) -> None:
    more = {} if asks is None else {"nwor_kv_versions": asks}
    params = SamplingParams(
        max_tokens=num, ignore_eos=True, temperature=0, extra_args=more
    )
    params.update_from_generation_config({}, eos_token_id=None)
    hasher = get_request_block_hasher(BLOCK, sha256)
    run.scheduler.add_request(
        Request(name, [*tokens], params, None, block_hasher=hasher)
    )


@pytest.mark.parametrize("asks", [True, 1])
def test_the_last_output_has_the_versions_if_the_request_asks(asks):
    """Over HTTP true is 1. Labels name epochs, also of KV that is older than they."""
    run = Run()
    assert ask(run, "first", asks=asks).kv_transfer_params == {
        "nwor_kv_versions": [{"version": "#0", "start": 0, "end": 51}]
    }
    run.weights = Weights(1, label="step-1")
    for silent in (None, False, 0):
        assert ask(run, f"{silent}", asks=silent).kv_transfer_params is None
    assert ask(run, "second", (*SHARED, 5), asks=asks).kv_transfer_params == {
        "nwor_kv_versions": [
            {"version": "#0", "start": 0, "end": 48},
            {"version": "step-1", "start": 48, "end": 52},
        ]
    }


@pytest.mark.parametrize("asks", ["yes", 2, [True]])
def test_a_request_that_asks_wrongly_is_told_so(asks):
    (text,) = ask(Run(), "wrong", asks=asks).kv_transfer_params.values()
    assert text == f"nwor_kv_versions must be true or false, and is {asks!r}"


def test_what_a_connector_put_into_the_output_stays(caplog):
    run = Run()
    for name in "ab":
        submit(run, name, SHARED, 9, True)
    run.step()
    outputs = [
        SimpleNamespace(request_id=name, finish_reason=1, kv_transfer_params=params)
        for name, params in (("a", {"theirs": 1}), ("b", {}))
    ]
    run.scheduler.nwor_versions.answer({0: SimpleNamespace(outputs=outputs)})
    assert [one.kv_transfer_params for one in outputs] == [{"theirs": 1}, {}]
    assert len([one for one in caplog.records if "connector" in one.message]) == 1


def test_what_a_connector_loads_is_of_no_known_version():
    """Nor is it for others that find these blocks."""
    run = Run()
    ask(run, "local", SHARED[:BLOCK], 1)
    run.scheduler.connector = True
    run.scheduler.requests["loads"] = SimpleNamespace(
        num_preemptions=0,
        sampling_params=None,
        num_computed_tokens=60,
        num_in_flight_tokens=0,
        num_tokens=60,
    )
    ids = [1, 12, 13, 14]  # one found, one and a half loaded
    new = SimpleNamespace(req_id="loads", block_ids=[ids], num_computed_tokens=40)
    output = SimpleNamespace(
        finished_req_ids=("local",),
        num_scheduled_tokens={"loads": 20},
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
        scheduled_new_reqs=[new],
        nwor_audit={"loads": (None, BLOCK)},
    )
    versions: Any = run.scheduler.nwor_versions
    counts = versions.scheduled(output, Weights(3))
    assert counts == {"stale_tokens": BLOCK, "mixed_requests": 0}
    assert kv_versions("loads") == (
        KvVersionSpan("#0", 0, 16),
        KvVersionSpan(None, 16, 40),
        KvVersionSpan("#3", 40, 60),
    )
    runs = under_test.part(versions._runs_of(ids, 4), 0, 4 * BLOCK)
    assert runs == [(0, 0), (BLOCK, under_test.UNKNOWN), (40, 3)]


def test_a_mixed_block_that_is_copied_is_mixed():
    """vLLM copies a block of which a request found only the first rows."""
    run = Run()
    run.step()
    versions: Any = run.scheduler.nwor_versions
    versions._mark(3, [(0, 1), (5, 2)])
    versions.scheduled(
        SimpleNamespace(
            finished_req_ids=(),
            kv_cache_block_copies=[(3, 4)],
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
            scheduled_new_reqs=[],
        ),
        Weights(),
    )
    assert versions._runs_of([4], 1) == [(0, 1), (5, 2)]


def test_kv_versions_says_why_it_knows_nothing():
    run = Run()
    submit(run, "a", SHARED, 9)
    with pytest.raises(KeyError, match="no running request is named 'a'"):
        kv_versions("a")
    run.step()
    assert vllm_nwor.kv_versions("a") == (KvVersionSpan("#0", 0, 48),)
    for name, value, words in (
        ("AUDIT", "off", "VLLM_NWOR_AUDIT is off; allowed are log and raise"),
        ("EMIT_METRICS", "0", "VLLM_NWOR_EMIT_METRICS is 0; allowed is 1"),
    ):
        on = {"MODE": "stage", "AUDIT": "log"}
        with (
            nwor_settings(on | {name: value}),
            pytest.raises(NworConfigError, match=words),
        ):
            kv_versions("a")


@pytest.mark.parametrize("moment", ["scheduled", "processing", "answer"])
def test_a_failure_ends_versions_and_no_step(moment, monkeypatch):
    run = Run()
    monkeypatch.setenv("VLLM_NWOR_STRICT", "0")
    fail: Callable[..., Any] = lambda *_: 1 / 0  # noqa: E731
    monkeypatch.setattr(under_test.KvVersions, moment, fail)
    assert ask(run, "a", asks=True).kv_transfer_params is None
    assert run.scheduler.nwor_versions is None
