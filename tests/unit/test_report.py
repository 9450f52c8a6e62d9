# SPDX-License-Identifier: Apache-2.0
"""Report: each step's counts are its own, also beside steps that fail half-way."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import DraftCommitManager, NworError, StagedGroup, State
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.hooks import runner_v1, runner_v2
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import LayerCache
from vllm_nwor.ops import COUNTER_COLUMNS
from vllm_nwor.report import Report
from vllm_nwor.shadow_pages import ShadowRegion
from vllm_nwor.window import NumRejected, VerificationWindows


class LateFailure:
    """Launches that do their work; restore raises behind it while `fails`."""

    def __init__(self, launches):
        self.launches = launches
        self.fails = False

    def log(self, windows):
        self.launches.log(windows)

    def restore(self, *arguments):
        self.launches.restore(*arguments)
        if self.fails:
            raise RuntimeError("planted")


def reporting_manager(strict=False, **arguments):
    cache = torch.zeros(4, 2, 16, 8, dtype=torch.uint8)
    layer = LayerCache("layer", cache, row_layout(cache))
    strictness = Strict.ALWAYS if strict else Strict.NEVER
    config = NworConfig(mode=Mode.COW, strictness=strictness)
    manager = DraftCommitManager(config, [(0, [layer])], capacity=8)
    manager.launches = LateFailure(manager.launches)
    return manager, Report([], manager, **arguments)


def step(manager, report, num_drafts):
    """One request's window, of which one draft is rejected."""
    manager.begin(
        VerificationWindows(
            num_drafts,
            torch.arange(num_drafts + 1),
            torch.tensor([num_drafts + 1], dtype=torch.int32),
            [torch.arange(num_drafts + 1)],
        )
    )
    report.commit(NumRejected(torch.tensor([1], dtype=torch.int32)))


def counts(payload):
    """Staged and rejected drafts."""
    _, staged, _, rejected, *_ = payload.read()[0]
    return staged, rejected


@pytest.mark.parametrize("max_in_flight", [1, 2, 5, 12])
@pytest.mark.parametrize("uncounted", ["", "3", "34", "0124578"])
def test_each_step_has_its_own_counts_until_the_last_moment(max_in_flight, uncounted):
    """The oldest is read when as many as may be in flight have made their commit.
    uncounted: last digits of the steps whose counts could not be copied."""
    manager, report = reporting_manager(max_in_flight=max_in_flight)
    copy = manager._copy_counters
    in_flight = deque()

    def fail(*_arguments):
        raise RuntimeError("planted")

    for number in range(60):
        num_drafts = 1 + number % 7
        manager.launches.fails = fails = str(number % 10) in uncounted
        # A restore that fails behind its counting leaves them to be copied.
        manager._copy_counters = fail if fails else copy
        step(manager, report, num_drafts)
        in_flight.append((report.take_payload(), num_drafts))
        if len(in_flight) == max_in_flight:
            taken, num_drafts = in_flight.popleft()
            if taken is not None and any(taken.read()[0]):
                assert counts(taken) == (num_drafts, 1)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_step_that_nobody_reads_is_not_in_the_next(is_taken):
    manager, report = reporting_manager()
    step(manager, report, 5)
    if is_taken:
        report.take_payload()
    else:
        report.drop_step()

    step(manager, report, 2)

    assert counts(report.take_payload()) == (2, 1)


def test_a_commit_that_raises_is_not_in_the_next_step():
    manager, report = reporting_manager(strict=True)
    step(manager, report, 1)
    report.drop_step()
    manager.launches.fails = True
    with pytest.raises(NworError, match="planted"):
        step(manager, report, 5)
    manager.launches.fails = False
    manager.config = NworConfig(mode=Mode.COW)  # strict steps would go no further

    step(manager, report, 2)

    assert counts(report.take_payload()) == (2, 1)


def test_a_commit_that_fails_late_still_counts():
    """What it enqueued is done; the counters are copied behind it."""
    manager, report = reporting_manager()
    manager.launches.fails = True
    step(manager, report, 3)
    manager.launches.fails = False

    found, fallbacks, _ = report.take_payload().read()

    assert found[1] == 3
    assert fallbacks == {"commit_failed": 1}


def test_a_step_that_failed_behind_its_commit_is_dropped_by_the_next():
    manager, _ = reporting_manager()
    state = hooks.RunnerState(manager, [], Report([], manager))
    runner = SimpleNamespace(nwor_state=state)
    state.report.take_payload()
    step(manager, state.report, 5)

    # The drafter raised; a step without drafts follows.
    hooks.execute_model(lambda: None, runner, (), {})

    assert state.report.take_payload() is None


@pytest.mark.parametrize("emits", [True, False])
def test_an_output_carries_counts_unless_nobody_wants_them(emits):
    manager, report = reporting_manager()
    state = hooks.RunnerState(manager, [], report, emits)
    runner = SimpleNamespace(nwor_state=state)
    output = SimpleNamespace(req_ids=["a"])

    def sample_tokens():
        step(manager, report, 3)
        return output

    assert hooks.sample_tokens(sample_tokens, runner, (), {}) is output

    assert manager.counters[0, 1] == 3
    assert hasattr(output, "nwor_stats") == emits
    if emits:
        assert counts(output.nwor_stats) == (3, 1)


WINDOW = VerificationWindows(
    3, torch.arange(4), torch.tensor([4], dtype=torch.int32), [torch.arange(4)]
)


class RunnerV1:
    """What the V1 hooks of a step need: one request with three drafts, or none."""

    def __init__(self, state, num_drafts):
        self.nwor_state = state
        self.input_batch = SimpleNamespace(vocab_size=100)
        self.num_drafts = num_drafts

    def step(self, begins):
        hooks.execute_model(lambda: None, self, (), {})
        self.nwor_state.windows = WINDOW if self.num_drafts else None
        if begins:
            runner_v1._model_forward(lambda: None, self, (), {})
        metadata = SimpleNamespace(num_draft_tokens=[self.num_drafts])
        ids = torch.tensor([[1, 2, -1, -1]], dtype=torch.int32)
        runner_v1._sample(
            lambda *args: SimpleNamespace(sampled_token_ids=ids),
            self,
            (None, metadata if self.num_drafts else None),
            {},
        )


class RunnerV2(RunnerV1):
    def step(self, begins):
        batch = SimpleNamespace(
            num_draft_tokens=self.num_drafts,
            query_start_loc=None,
            seq_lens=None,
            logits_indices=WINDOW.logits_indices,
            cu_num_logits=torch.tensor([0, 4], dtype=torch.int32),
        )
        hooks.execute_model(lambda: None, self, (), {})
        if begins:
            slots = (None, WINDOW.slot_mappings)
            runner_v2._prepare_attn(lambda batch: slots, self, (batch,), {})
        rejected = torch.tensor([2], dtype=torch.int32)
        runner_v2._sample(
            lambda *args: (None, None, rejected), self, (None, batch, None), {}
        )


@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
class TestMissedBegin:
    """Guarantee 9, at the hooks of a runner."""

    def runner(self, kind, num_drafts=3, strict=False):
        manager, report = reporting_manager(strict)
        return kind(hooks.RunnerState(manager, [], report), num_drafts)

    @pytest.mark.parametrize("begins", [True, False])
    def test_it_is_counted_and_told_as_a_breach(self, kind, begins):
        runner = self.runner(kind)
        state = runner.nwor_state
        state.report.take_payload()

        for _ in range(2):
            runner.step(begins)

        found, *news = state.report.take_payload().read()
        missed = {} if begins else {"begin_missed": 2}
        assert state.manager.fallbacks == missed
        assert news == ([] if begins else [missed, []])
        assert found[COUNTER_COLUMNS.index("invalid_slots")] == (0 if begins else 2)
        assert found[1] == (3 if begins else 0)
        assert state.manager.state is State.IDLE

    def test_it_raises_where_steps_are_strict(self, kind):
        with pytest.raises(NworError, match=r"^NWOR begin_missed: 3 drafts were"):
            self.runner(kind, strict=True).step(begins=False)

    def test_a_step_without_drafts_has_no_begin_to_miss(self, kind):
        runner = self.runner(kind, num_drafts=0)

        for begins in (True, False):
            runner.step(begins)

        assert not runner.nwor_state.manager.fallbacks

    def test_what_was_left_to_vanilla_is_not_missed(self, kind):
        """Too many drafts, and an op that fails."""
        runner = self.runner(kind)
        manager = runner.nwor_state.manager
        manager.capacity = 2
        runner.step(begins=True)
        manager.capacity = 8
        manager.launches.log = None
        runner.step(begins=True)

        assert manager.fallbacks == {"over_capacity": 1, "begin_failed": 1}
        assert manager.state is State.IDLE


class Stopped(BaseException):
    """As KeyboardInterrupt: no Exception."""


REAL, SHADOW = [[1]], [[2]]


def scheduled(drafts=(), new=(), resumed=()):
    """As vLLM's SchedulerOutput, with requests that have drafts, are new, come back."""
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: [1] for name in drafts},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


@pytest.fixture
def state():
    cache = torch.zeros(6, 2, 16, 8, dtype=torch.uint8)
    layer = LayerCache("layer", cache, row_layout(cache))
    manager = DraftCommitManager(
        NworConfig(mode=Mode.STAGE),
        [(0, [layer])],
        capacity=8,
        staged={0: StagedGroup(ShadowRegion(2, 2, 2, 2, 16), 16)},
    )
    return hooks.RunnerState(manager, [], Report([], manager))


@pytest.fixture(name="step")
def staged_step():
    """One request with three drafts, at positions 1 to 3 of block 1."""
    return VerificationWindows(
        num_drafts=3,
        logits_indices=torch.arange(4),
        cu_num_logits=torch.tensor([4], dtype=torch.int32),
        slot_mappings=[torch.arange(16, 20)],
        block_tables=[torch.tensor(REAL, dtype=torch.int32)],
        query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
    )


class TestFailedStep:
    """Where vLLM fails between stage and commit, tables are put back at once: before
    the next step they may be another request's."""

    def stage(self, state, step):
        state.manager.stage(step)
        state.manager.begin(step)
        assert step.block_tables[0].tolist() == SHADOW

    @pytest.mark.parametrize("error", [RuntimeError("vLLM's own"), Stopped()])
    def test_in_the_forward(self, state, step, error):
        runner = SimpleNamespace(nwor_state=state)

        def execute_model(_):
            self.stage(state, step)
            raise error

        with pytest.raises(type(error)) as raised:
            hooks.execute_model(execute_model, runner, (scheduled(),), {})

        assert raised.value is error
        self.check_put_back(state, step)

    @pytest.mark.parametrize("error", [RuntimeError("vLLM's own"), Stopped()])
    def test_in_the_sampler(self, state, step, error):
        runner = SimpleNamespace(nwor_state=state)
        hooks.execute_model(
            lambda _: self.stage(state, step), runner, (scheduled(),), {}
        )
        assert step.block_tables[0].tolist() == SHADOW

        def sample_tokens():
            raise error

        with pytest.raises(type(error)) as raised:
            hooks.sample_tokens(sample_tokens, runner, (), {})

        assert raised.value is error
        self.check_put_back(state, step)

    def check_put_back(self, state, step):
        assert step.block_tables[0].tolist() == REAL
        assert step.slot_mappings[0].tolist() == [16, 17, 18, 19]
        assert state.manager.state is State.IDLE
        assert state.manager.fallbacks == {"step_failed": 1}

    def test_a_table_that_cannot_be_put_back_does_not_hide_the_steps_own_error(
        self, state, step
    ):
        runner = SimpleNamespace(nwor_state=state)

        def execute_model(_):
            self.stage(state, step)
            state.manager.shadow.ops = None
            raise RuntimeError("vLLM's own")

        with pytest.raises(RuntimeError, match=r"^vLLM's own$"):
            hooks.execute_model(execute_model, runner, (scheduled(),), {})

        assert state.manager.fallbacks == {"step_failed": 1}

    def test_behind_commit_there_is_nothing_to_put_back(self, state, step):
        runner = SimpleNamespace(nwor_state=state)
        self.stage(state, step)

        def sample_tokens():
            state.report.commit(NumRejected(torch.tensor([1], dtype=torch.int32)))
            raise RuntimeError("the drafter's")

        with pytest.raises(RuntimeError, match=r"^the drafter's$"):
            hooks.sample_tokens(sample_tokens, runner, (), {})

        assert step.block_tables[0].tolist() == REAL
        assert not state.manager.fallbacks

    def test_a_step_that_was_left_staged_is_put_back_by_the_next(self, state, step):
        """As after an exception that no hook of ours saw."""
        runner = SimpleNamespace(nwor_state=state)
        self.stage(state, step)
        seen = []

        hooks.execute_model(
            lambda _: seen.append(step.block_tables[0].tolist()),
            runner,
            (scheduled(),),
            {},
        )

        assert seen == [REAL]
        assert state.manager.fallbacks == {"stale_log": 1}

    def test_every_step_of_the_runner_counts_for_the_seats(self, state):
        runner = SimpleNamespace(nwor_state=state)
        before = state.manager.shadow.step
        for _ in range(2):
            hooks.execute_model(lambda _: None, runner, (scheduled(),), {})
        assert state.manager.shadow.step == before + 2

    @pytest.mark.parametrize(
        ("who", "keeps"),
        [
            ({"drafts": ["a", "b"], "new": ["c"], "resumed": ["d"]}, True),
            ({"new": ["c"]}, True),
            ({"drafts": ["a", "c"], "new": ["b", "c"]}, False),
            ({"drafts": ["a", "d"], "resumed": ["d"]}, False),
        ],
    )
    def test_nothing_counts_where_a_request_begins_with_drafts(self, state, who, keeps):
        """Its rows may be a copy of another's block, which it got just now."""
        runner = SimpleNamespace(nwor_state=state)
        before = state.manager.shadow.step
        arguments = {"scheduler_output": scheduled(**who)}
        hooks.execute_model(lambda **_: None, runner, (), arguments)
        assert state.manager.shadow.step == before + (1 if keeps else 2)


def v1_runner(state, step):
    """A V1 runner that has prepared that step."""
    tables = [
        SimpleNamespace(
            slot_mapping=SimpleNamespace(gpu=slots),
            block_table=SimpleNamespace(gpu=table),
        )
        for slots, table in zip(step.slot_mappings, step.block_tables, strict=True)
    ]
    return SimpleNamespace(
        nwor_state=state,
        input_batch=SimpleNamespace(
            vocab_size=100, block_table=SimpleNamespace(block_tables=tables)
        ),
        query_start_loc=SimpleNamespace(gpu=step.query_start_loc),
        seq_lens=step.seq_lens,
    )


class TestStagedHooks:
    """A step of each runner: staged before attention metadata is built, committed
    behind the sampler."""

    def test_v1(self, state, step):
        runner = v1_runner(state, step)
        metadata = SimpleNamespace(
            num_draft_tokens=[3],
            logits_indices=step.logits_indices,
            cu_num_sampled_tokens=step.cu_num_logits,
        )

        runner_v1._calc_spec_decode_metadata(lambda *_: metadata, runner, (), {})
        assert step.block_tables[0].tolist() == SHADOW
        # All is staged: begin, which would find nothing to do, is not called.
        assert state.windows is None
        runner_v1._model_forward(lambda: None, runner, (), {})
        assert state.manager.state is State.STAGED
        ids = torch.tensor([[1, 2, -1, -1]], dtype=torch.int32)
        output = SimpleNamespace(sampled_token_ids=ids)
        runner_v1._sample(lambda *_: output, runner, (None, metadata), {})

        assert step.block_tables[0].tolist() == REAL
        assert counts(state.report.take_payload()) == (3, 2)

    @pytest.mark.parametrize(("max_num_reqs", "shadow"), [(2, [[4]]), (3, SHADOW)])
    def test_v2(self, state, step, max_num_reqs, shadow):
        """Seats are the request states' if there are as many, else the batch rows'."""
        runner = SimpleNamespace(nwor_state=state, max_num_reqs=max_num_reqs)
        batch = SimpleNamespace(
            num_draft_tokens=3,
            logits_indices=step.logits_indices,
            cu_num_logits=torch.tensor([0, 4], dtype=torch.int32),
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            idx_mapping=torch.tensor([1]),
        )
        prepared = (step.block_tables, step.slot_mappings)

        runner_v2._prepare_attn(lambda *_: prepared, runner, (batch,), {})
        assert step.block_tables[0].tolist() == shadow
        assert state.manager.state is State.STAGED
        rejected = torch.tensor([2], dtype=torch.int32)
        sampled = (None, None, rejected)
        runner_v2._sample(lambda *_: sampled, runner, (None, batch, None), {})

        assert step.block_tables[0].tolist() == REAL
        assert counts(state.report.take_payload()) == (3, 2)


def test_counters_of_several_launches_are_told_once_and_their_bytes_summed():
    """Two groups: every launch sees all windows."""
    manager, _ = reporting_manager()
    manager.counters = torch.zeros(2, 8, dtype=torch.int64)
    report = Report([], manager)
    report.take_payload()
    manager.commit = lambda acceptance, to: to.copy_(told) is not None
    before = torch.tensor([[1, 2, 1, 1, 10, 0, 5, 6], [1, 2, 1, 1, 30, 0, 7, 8]])
    risen = torch.tensor([[3, 9, 4, 5, 50, 1, 20, 3], [3, 9, 4, 5, 70, 2, 30, 4]])
    for told in (before, before + risen):
        manager.state = State.LOGGED
        report.commit(NumRejected(torch.tensor([0])))
        if told is not before:
            manager.fallbacks["begin_missed"] = 2
        payload = report.take_payload()

    # Three slots were invalid, and two begins missed.
    assert payload.read() == ((3, 9, 4, 5, 120, 5, 50, 7), {"begin_missed": 2}, [])


def test_the_columns_are_the_ones_that_the_scheduler_unpacks():
    """In the order of NworStats.add_step, which cannot import the ops."""
    assert (
        *("windows", "staged", "committed", "rejected", "restored_bytes"),
        *("invalid_slots", "shadow_copied_bytes", "committed_bytes"),
    ) == COUNTER_COLUMNS
