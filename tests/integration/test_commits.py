# SPDX-License-Identifier: Apache-2.0
"""on_commit on vLLM's own schedulers, with a simulated worker.

The worker knows how many rows of each request are in the cache, and in which blocks;
the code under test does not see it. So asynchronous scheduling and the V2 runner's way
to resume are tested without a GPU. A KV connector that uses on_commit on real engines:
test_connectors.py.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import vllm_nwor
from tests.helpers.engine import DEFAULTS, NUM_DRAFTS
from tests.helpers.environment import model_path, nwor_settings
from vllm_nwor import Commit, commits, plugin
from vllm_nwor.base import wrap as _wrap
from vllm_nwor.config import NworConfigError
from vllm_nwor.hooks import scheduler as hooks
from vllm_nwor.hooks.ledger import SCHEDULER

BLOCK = 16
NUM_BLOCKS = 24
SHARED = tuple(range(1000, 1000 + 3 * BLOCK))
STOP = 7  # a token that ends a request
Expected = dict[str, Commit]


@pytest.fixture(autouse=True)
def mode():
    with nwor_settings({"MODE": "stage", "STRICT": "always"}):
        plugin.register()
        yield
    assert commits.registered == []


@contextmanager
def reported() -> Iterator[list[list[Commit]]]:
    """The lists that a callback gets, one per call."""
    found: list[list[Commit]] = []
    registration = vllm_nwor.on_commit(lambda step: found.append(list(step)))
    yield found
    registration.remove()
    assert registration.num_errors == 0


def make_scheduler(kind: type[Scheduler], is_v2: bool, num_ranks: int = 1) -> Scheduler:
    """A full-attention and a sliding-window group, few blocks, prefix caching.
    num_ranks: of decode context parallelism; with several both groups have full
    attention."""
    arguments = DEFAULTS | {
        "model": model_path("tiny-llama"),
        "block_size": BLOCK,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
    }
    config = EngineArgs(**arguments).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.parallel_config.decode_context_parallel_size = num_ranks
    size: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(block_size=BLOCK, **size),
        SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK, **size),
    ]
    if num_ranks > 1:
        specs[1] = specs[0]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    scheduler = kind(
        config,
        KVCacheConfig(NUM_BLOCKS, [], groups),
        StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    scheduler.use_v2_model_runner = is_v2
    return scheduler


@dataclass
class Row:
    """A request's state in the worker. num_rows: rows of its tokens in the cache.
    tables: block ids by group. num_tokens: tokens that are known."""

    num_rows: int
    tables: tuple[list[int], ...]
    num_tokens: int


@dataclass
class Worker:
    """Runs scheduled steps and returns what each must commit. block_size: tokens of a
    block over all ranks."""

    draw: random.Random
    block_size: int = BLOCK
    rows: dict[str, Row] = field(default_factory=dict)
    num_rejected: int = 0

    def run(
        self, scheduler: Scheduler, step: Any
    ) -> tuple[ModelRunnerOutput, Expected]:
        cached = step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self._place(scheduler, new.req_id, new.num_computed_tokens, new.block_ids)
        for name, num, ids in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.new_block_ids,
            strict=True,
        ):
            if name in cached.resumed_req_ids:
                self._place(scheduler, name, num, ids)
            elif ids:
                for table, more in zip(self.rows[name].tables, ids, strict=True):
                    table += more
        expected, sampled = {}, []
        for name, num_scheduled in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_decode_tokens.get(name, ())
            expected[name], ids = self._window(name, num_scheduled, len(drafts))
            sampled.append(ids)
        index = {name: i for i, name in enumerate(step.num_scheduled_tokens)}
        output = ModelRunnerOutput(
            req_ids=list(index), req_id_to_index=index, sampled_token_ids=sampled
        )
        return output, expected

    def _place(self, scheduler: Any, name: str, num_rows: int, ids: Any) -> None:
        tables = tuple(list(table) for table in ids)
        self.rows[name] = Row(num_rows, tables, scheduler.requests[name].num_tokens)

    def _window(self, name: str, num: int, num_drafts: int) -> tuple[Commit, list[int]]:
        row = self.rows[name]
        start, num_kept = row.num_rows, num
        ids: list[int] = []
        if start + num - num_drafts >= row.num_tokens:
            num_accepted = self.draw.randint(0, num_drafts)
            num_kept -= num_drafts - num_accepted
            ids = [self.draw.randint(STOP, 90) for _ in range(num_accepted + 1)]
            row.num_tokens += len(ids)
        row.num_rows += num_kept
        self.num_rejected += num - num_kept
        return self.commit(name, start, row.num_rows, num - num_kept), ids

    def commit(self, name: str, start: int, end: int, num_rejected: int) -> Commit:
        blocks = tuple(
            tuple(table[position // self.block_size] for position in range(start, end))
            for table in self.rows[name].tables
        )
        unique = tuple(tuple(dict.fromkeys(ids)) for ids in blocks)
        return Commit(name, start, end, num_rejected, unique)


def add(scheduler: Scheduler, draw: random.Random, name: str) -> int:
    """Adds a request, in a third of the cases with a shared prefix; returns the length
    of its prompt."""
    length = draw.choice([3, BLOCK, 40, 70])
    prompt = [draw.randint(100, 900) for _ in range(length)]
    if draw.random() < 0.3:
        prompt = [*SHARED, *prompt]
    submit(scheduler, name, prompt, draw.choice([1, 9, 40, 70]))
    return len(prompt)


def submit(
    scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int, **more: Any
) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP], temperature=0)
    params.update_from_generation_config({}, eos_token_id=None)
    hasher = get_request_block_hasher(BLOCK, sha256)
    about = {"block_hasher": hasher} | more
    scheduler.add_request(Request(name, prompt, params, None, **about))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "is_v2"),
    [(Scheduler, False), (AsyncScheduler, False), (AsyncScheduler, True)],
)
def test_each_commit_is_what_the_worker_did(kind, is_v2, seed):
    init_none_hash(sha256)
    draw = random.Random(seed)
    scheduler, worker = make_scheduler(kind, is_v2), Worker(draw)
    depth = 2 if kind is AsyncScheduler else 1
    in_flight: deque[tuple[Any, ModelRunnerOutput, Expected]] = deque()
    num_tokens: dict[str, int] = {}  # prompt and tokens that the front end got
    seen = dict.fromkeys(("preempted", "aborted", "cut", "cached", "chunk"), 0)

    def void(name: str, what: str) -> None:
        for *_, expected in in_flight:
            seen[what] += expected.pop(name, None) is not None

    with reported() as found:
        for number in range(400):
            if number < 300 and draw.random() < 0.25:
                name = f"r{number}"
                num_tokens[name] = add(scheduler, draw, name)
            step = scheduler.schedule()
            for name in step.preempted_req_ids or ():
                void(name, "preempted")
            output, expected = worker.run(scheduler, step)
            seen["cached"] += any(
                new.num_computed_tokens > 0 for new in step.scheduled_new_reqs
            )
            in_flight.append((step, output, expected))
            if draw.random() < 0.05 and scheduler.running:
                name = draw.choice(scheduler.running).request_id
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                void(name, "aborted")
            if len(in_flight) < depth:
                continue
            step, output, expected = in_flight.popleft()
            found.clear()
            for outputs in scheduler.update_from_output(step, output).values():
                for one in outputs.outputs:
                    num_tokens[one.request_id] += len(one.new_token_ids)
                    if one.finish_reason is not None:
                        void(one.request_id, "aborted")
            for name, commit in expected.items():
                row = output.req_id_to_index[name]
                seen["chunk"] += not output.sampled_token_ids[row]
                if commit.end > num_tokens[name]:
                    seen["cut"] += 1
                    expected[name] = worker.commit(
                        name, commit.start, num_tokens[name], commit.num_rejected
                    )
            assert found == ([list(expected.values())] if expected else []), number
            if kind is Scheduler:
                drafts = [[1] * draw.randint(0, NUM_DRAFTS) for _ in output.req_ids]
                scheduler.update_draft_token_ids(DraftTokenIds(output.req_ids, drafts))
    assert worker.num_rejected > 100
    assert min(seen[what] for what in ("cut", "cached", "chunk")) > 0
    assert depth == 1 or min(seen.values()) > 0


class Alone:
    """A scheduler with one request, which verifies drafts in each step.

    draw: decides how many drafts are accepted. more: arguments of Request."""

    def __init__(
        self,
        num_ranks: int = 1,
        kind: type[Scheduler] = Scheduler,
        draw: Any = None,
        max_tokens: int = 99,
        **more: Any,
    ) -> None:
        init_none_hash(sha256)
        self.scheduler = make_scheduler(kind, False, num_ranks)
        self.worker = Worker(draw or random.Random(0), BLOCK * num_ranks)
        submit(self.scheduler, "a", [*SHARED], max_tokens, **more)
        self.step()

    def step(self, change: Callable[[Any, Any], None] = lambda *_: None) -> Commit:
        """Runs one step; change: modifies request and runner output before the
        scheduler processes them. Returns the commit without that change."""
        step = self.scheduler.schedule()
        output, expected = self.worker.run(self.scheduler, step)
        change(self.scheduler.requests["a"], output)
        self.scheduler.update_from_output(step, output)
        self.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1] * NUM_DRAFTS]))
        return expected["a"]


@pytest.fixture
def alone():
    yield Alone()
    commits.registered.clear()


def will_be_computed_again(request: Any, output: ModelRunnerOutput) -> None:
    """As after a failed KV load: fewer tokens are computed once the step is
    processed."""
    request.append_output_token_ids = lambda ids: vars(request).update(
        num_computed_tokens=BLOCK
    )


def test_an_output_that_vllm_ignores_is_not_reported(alone):
    changes = (
        lambda request, output: vars(request).update(num_stale_output_tokens=5),
        lambda request, output: vars(request).update(async_tokens_to_discard=5),  # 0.26
        lambda request, output: vars(request).update(num_computed_tokens=0),
        lambda request, output: output.sampled_token_ids[0].clear(),
        # Its blocks wait for a KV connector.
        lambda request, output: vars(request).update(is_finished=lambda: True),
    )
    for change in (*changes, will_be_computed_again):
        alone = Alone()
        with reported() as found:
            expected = alone.step()
            assert found == [[expected]]
            assert alone.step(change).num_rejected < NUM_DRAFTS
        assert found == [[expected]], change


def test_blocks_that_ranks_share_hold_the_tokens_of_all():
    """Decode context parallelism: drafts are not protected, commits are reported."""
    alone = Alone(num_ranks=2)
    with reported() as found:
        expected = [[alone.step()] for _ in range(9)]
    assert found == expected


ALL_RIGHT = Mock(randint=lambda low, high: high)


@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_a_turn_that_ends_within_accepted_drafts(kind, is_queued):
    """A request with 49 tokens, 48 computed, may have two of five accepted ones. The
    session's next turn continues with the last one, or computes its position again
    (vLLM 0.32 with asynchronous scheduling)."""
    alone = Alone(kind=kind, draw=ALL_RIGHT, max_tokens=3, resumable=True)
    if is_queued:
        submit(alone.scheduler, "a", [5] * 40, 9, resumable=True)
    with reported() as found:
        expected = alone.step()
        assert (expected.start, expected.end) == (48, 53)
        end = min(51, alone.scheduler.requests["a"].num_computed_tokens)
        assert end >= 50
        assert found == [[alone.worker.commit("a", 48, end, 0)]]


def test_a_stop_that_lowers_the_number_of_computed_tokens(monkeypatch):
    """vLLM 0.33 does so for every request."""
    alone = Alone(draw=ALL_RIGHT, max_tokens=3)
    name = "_update_request_with_output"
    update = getattr(alone.scheduler, name)

    def as_033(request: Any, ids: list[int], *args: Any, **kwargs: Any) -> Any:
        before = len(ids)
        kept, stopped = update(request, ids, *args, **kwargs)
        request.num_computed_tokens -= before - len(kept)
        return kept, stopped

    monkeypatch.setattr(alone.scheduler, name, as_033)
    with reported() as found:
        alone.step()
        assert found == [[alone.worker.commit("a", 48, 51, 0)]]


class NoTensors(TorchDispatchMode, ContextDecorator):
    """Raises if a torch operator runs, so that nothing is copied from a device."""

    def __torch_dispatch__(self, op: Any, *_: Any) -> Any:
        raise AssertionError(op)


def test_on_commit_runs_no_torch_operator(alone, monkeypatch):
    monkeypatch.setattr(hooks, "pending", NoTensors()(hooks.pending))
    monkeypatch.setattr(hooks, "publish", NoTensors()(hooks.publish))
    with reported() as found:
        expected = alone.step()
    assert found == [[expected]]


def test_a_group_that_is_not_slot_based_has_no_blocks(alone, monkeypatch):
    monkeypatch.setattr(hooks, "block_sizes", lambda groups: {0: BLOCK})
    with reported() as found:
        expected = alone.step()
    blocks, _ = expected.block_ids
    assert found == [[expected._replace(block_ids=(blocks, ()))]]


def test_a_callback_that_raises_is_logged_once_counted_and_kept(alone, monkeypatch):
    monkeypatch.setattr(commits, "logger", logger := Mock())
    steps: list[Any] = []

    def failing(step: Any) -> None:
        steps.append(step)
        raise KeyError("mine")

    registration = vllm_nwor.on_commit(failing)
    after = vllm_nwor.on_commit(steps.append)
    for _ in range(3):
        alone.step()

    assert (registration.num_errors, after.num_errors, len(steps)) == (3, 0, 6)
    logger.exception.assert_called_once_with(ANY, failing)
    registration.remove()
    registration.remove()
    alone.step()
    assert (registration.num_errors, len(steps)) == (3, 7)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"MODE": "off"}, "VLLM_NWOR_MODE is off; allowed are cow and stage"),
        ({"EMIT_METRICS": "0"}, "VLLM_NWOR_EMIT_METRICS is 0; allowed is 1"),
    ],
)
def test_on_commit_is_refused_if_steps_are_not_counted(settings, sentence):
    with (
        nwor_settings({"MODE": "stage"} | settings),
        pytest.raises(NworConfigError, match=sentence),
    ):
        vllm_nwor.on_commit(pytest.fail)


def test_on_commit_is_refused_if_the_scheduler_was_not_hooked(monkeypatch):
    """For example because VLLM_PLUGINS leaves nwor out."""
    monkeypatch.setattr(_wrap, "_hooks", [])
    monkeypatch.setitem(sys.modules, SCHEDULER, ModuleType(SCHEDULER))

    with pytest.raises(RuntimeError, match="imported without NWOR's hook"):
        vllm_nwor.on_commit(print)
    monkeypatch.delitem(sys.modules, SCHEDULER)
    vllm_nwor.on_commit(print).remove()  # hooked when it is imported
