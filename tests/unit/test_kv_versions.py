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
from tests.integration.test_commits import (
    BLOCK,
    SHARED,
    STOP,
    Worker,
    add,
    make_scheduler,
)
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
        self.in_flight.append((step, output))
        return step

    def process(self) -> list[Any]:
        """Outputs of the oldest step in flight."""
        step, output = self.in_flight.popleft()
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
        for commit in step:
            name = commit.request_id
            truth = self.truth(name, commit.end)
            assert epochs(kv_versions(name)) == truth, commit
            assert commit.found == () or epochs(commit.found) == truth[: commit.start]
            self.is_mixed[name] = len(set(truth)) > 1


def epochs(spans: Any) -> list[int]:
    """Of each position; checks that the spans are adjacent and differ."""
    found: list[int] = []
    for number, (version, start, end) in enumerate(spans):
        assert start == len(found) < end
        assert number == 0 or version != spans[number - 1].version
        found += [int(version.removeprefix("#"))] * (end - start)
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
                seen["preempted"] += run.is_mixed.pop(name, None) is not None
                assert kv_versions(name) == () if name in first else True
                first.discard(name)
        if draw.random() < 0.05 and scheduler.running:
            name = draw.choice(scheduler.running).request_id
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
    while scheduler.has_unfinished_requests():
        run.step()
    run.schedule()
    assert seen["found"] > 0 < seen["aborted"]
    assert run.counts["stale_tokens"] == run.num_stale
    assert run.counts["mixed_requests"] == sum(run.is_mixed.values()) > 0
    assert not scheduler.nwor_versions._requests
    marks = scheduler.nwor_versions._mixed
    assert len(marks) <= len(scheduler.nwor_versions._epochs)
