# SPDX-License-Identifier: Apache-2.0
"""Report, and the hooks around a step of the V2 runner: each step's counts are its own,
and block tables are vLLM's own again, also where steps fail half-way."""

import contextlib
import pickle
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.engine import Fault, FaultyOps
from vllm_nwor import ops
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import DraftCommitManager, NworError, State
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.hooks import runner_v2
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.layer_tables import LayerCache
from vllm_nwor.metrics import GroupInfo
from vllm_nwor.ops import COUNTER_COLUMNS
from vllm_nwor.report import MAX_IN_FLIGHT, MAX_UNREAD, NOTHING, Report, counter_ring
from vllm_nwor.shadow_blocks import ShadowRegion, StagedGroup
from vllm_nwor.window import NumRejected, VerificationWindows

ROW_BYTES = 2 * 8
INFOS = [GroupInfo(0, "stage", "cow", "because")]
ONE_REJECTED = NumRejected(torch.tensor([1], dtype=torch.int32))


def manager_of(mode=Mode.COW, strictness=Strict.NEVER, max_in_flight=MAX_IN_FLIGHT):
    """Of one group with one layer."""
    cache = torch.zeros(6, 2, 16, 8, dtype=torch.uint8)
    layers = [LayerCache("layer", cache, row_layout(cache))]
    staged = {0: StagedGroup(ShadowRegion(2, 2, 2, 2, 16), 16)}
    return DraftCommitManager(
        NworConfig(mode=mode, strictness=strictness),
        [(0, layers)],
        capacity=8,
        ops=FaultyOps(),
        staged=staged if mode is Mode.STAGE else None,
        max_in_flight=max_in_flight,
    )


def reporting_manager(**arguments):
    manager = manager_of(**arguments)
    return manager, Report([], manager)


def step(manager, num_drafts):
    """One request's window, of which one draft is rejected."""
    manager.begin(
        VerificationWindows(
            num_drafts,
            1,
            torch.arange(num_drafts + 1),
            torch.tensor([num_drafts + 1], dtype=torch.int32),
            [torch.arange(num_drafts + 1)],
        )
    )
    if manager.is_open:
        manager.commit(ONE_REJECTED)


def counts(payload):
    """Staged and rejected drafts."""
    _, staged, _, rejected, *_ = payload.read()[0]
    return staged, rejected


# --- the report -----------------------------------------------------------------------


@pytest.mark.parametrize("audit", [[], [{"steps": 9}]])
@pytest.mark.parametrize("travels", [False, True])
def test_the_groups_are_told_again_until_somebody_reads_them(travels, audit):
    """vLLM throws its warm-up's outputs away. A refused engine has no manager."""
    report = Report(INFOS, None)
    for _ in range(3):
        payload = report.take_payload()
        for found in audit:
            payload = payload.with_audit(found)

    told = pickle.loads(pickle.dumps(payload)) if travels else payload.read()

    assert told == ((0,) * 8, {}, INFOS, *audit)
    assert {type(told), *map(type, told[2])} == {tuple}  # of no module of ours
    assert report.take_payload() is None


def test_outputs_that_nobody_reads_take_the_groups_along_for_a_while_only():
    """Those of a tensor parallel rank that does not answer: it has no other news."""
    report = Report(INFOS, None)

    taken = [report.take_payload() for _ in range(MAX_UNREAD + 1)]

    assert all(payload.read()[2] in (INFOS, []) for payload in taken[:-1])
    assert taken[-1] is None


def test_the_audits_counts_come_with_a_steps_own_or_alone():
    manager, report = reporting_manager()
    step(manager, 3)
    payload = report.take_payload()

    told = payload.with_audit({"steps": 9})

    assert told.read() == ((1, 3, 2, 1, ROW_BYTES, 0, 0, 0), {}, [], {"steps": 9})
    assert len(payload.read()) == 1  # a slot's payload serves many steps
    assert NOTHING.with_audit({"steps": 9}).read() == ((0,) * 8, {}, [], {"steps": 9})


def test_a_fallback_is_told_with_the_next_output():
    manager, report = reporting_manager()
    manager.capacity = 2

    for _ in range(2):
        step(manager, 3)
        payload = report.take_payload()
        assert payload.read() == ((0,) * 8, {"over_capacity": 1}, [])
    assert report.take_payload() is None


# What becomes of a step's counts: read as late as may be; never; dropped with the step;
# lost with a commit that raises or fails, or because those of the step before, which
# failed, cannot be copied.
FATES = ("read", "unread", "dropped", "raises", "fails", "not copied")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from(FATES)), max_size=40),
    st.integers(1, 12),
)
def test_each_step_has_its_own_counts_until_the_last_moment(steps, max_in_flight):
    """The oldest is read when as many as may be in flight have made their commit."""
    manager, report = reporting_manager(max_in_flight=max_in_flight)
    copy, config = manager._copy_counters, manager.config
    in_flight = deque()

    for num_drafts, fate in steps:
        fails = fate in ("raises", "fails")
        manager.ops.arm(Fault("restore" if fails else "none", 0, 2))
        manager._copy_counters = None if fate == "not copied" else copy
        raises = replace(config, strictness=Strict.ALWAYS)
        manager.config = raises if fate == "raises" else config
        with contextlib.suppress(NworError):
            step(manager, num_drafts)
            assert fate != "raises"
        if fate in ("dropped", "raises"):
            manager.start_step()
        in_flight.append((report.take_payload(), num_drafts, fate))
        if len(in_flight) == max_in_flight:
            taken, num_drafts, fate = in_flight.popleft()
            if fate == "read":
                assert counts(taken) == (num_drafts, 1)
            elif fate == "not copied":
                assert counts(taken) in ((num_drafts, 1), (0, 0))
            elif fate != "unread":
                assert taken is None or counts(taken) == (0, 0)


def test_counters_of_several_launches_are_told_once_and_their_bytes_summed():
    """Two groups: every launch sees all windows."""
    manager = manager_of()
    report = Report([], manager)
    before = torch.tensor([[1, 2, 1, 1, 10, 0, 5, 6], [1, 2, 1, 1, 30, 0, 7, 8]])
    risen = torch.tensor([[3, 9, 4, 5, 50, 1, 20, 3], [3, 9, 4, 5, 70, 2, 30, 4]])
    ring, payloads = counter_ring(before, max_in_flight=2)
    ops.publish(ring[0], before)
    ops.publish(ring[1], before + risen)
    manager.counts, manager.fallbacks["begin_missed"] = payloads[1], 2
    payload = report.take_payload()

    # Three slots were invalid, and two begins missed.
    assert payload.read() == ((3, 9, 4, 5, 120, 5, 50, 7), {"begin_missed": 2}, [])


def test_the_columns_are_the_ones_that_the_scheduler_unpacks():
    """In the order of NworStats.add_step, which cannot import the ops."""
    assert (
        *("windows", "staged", "committed", "rejected", "restored_bytes"),
        *("invalid_slots", "shadow_copied_bytes", "committed_bytes"),
    ) == COUNTER_COLUMNS


# --- the hooks of a step --------------------------------------------------------------

REAL, SHADOW = ([[1]], [16, 17, 18, 19]), ([[2]], [32, 33, 34, 35])


def scheduled(drafts=(), new=(), resumed=()):
    """As vLLM's SchedulerOutput, with requests that have drafts, are new, come back."""
    return SimpleNamespace(
        scheduled_spec_decode_tokens={name: [1] for name in drafts},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


class Runner:
    """What V2's hooks of a step need, with one request at positions 0 to 3 of block 1:
    three drafts, of which one is accepted, or none. V1 is what all engines here run."""

    def __init__(self, mode=Mode.COW, num_drafts=3, max_num_reqs=2):
        manager = manager_of(mode)
        self.nwor_state = hooks.RunnerState(manager, [], max_num_reqs=max_num_reqs)
        self.table = torch.tensor([[1]], dtype=torch.int32)
        self.slots = torch.arange(16, 20)
        starts = torch.tensor([0, 4], dtype=torch.int32)
        self.batch = SimpleNamespace(
            num_draft_tokens=num_drafts,
            num_reqs=1,
            logits_indices=torch.arange(4),
            cu_num_logits=starts,
            query_start_loc=starts,
            seq_lens=torch.tensor([4], dtype=torch.int32),
            idx_mapping=torch.tensor([0]),
        )

    @property
    def manager(self):
        return self.nwor_state.manager

    def tables(self):
        return self.table.tolist(), self.slots.tolist()

    def execute(self, inner, **who):
        """vLLM's execute_model as the hook has it: `inner` is what it does."""
        arguments = {"scheduler_output": scheduled(**who)}
        hooks.execute_model(lambda **_: inner(), self, (), arguments)

    def step(self, begins=True):
        self.execute(self.prepare if begins else lambda: None)
        self.sample()

    def prepare(self):
        prepared = (self.table,), self.slots[None]
        hook = runner_v2._prepare_attn
        assert hook(lambda _: prepared, self, (self.batch,), {}) is prepared

    def sample(self):
        found = None, None, torch.tensor([2], dtype=torch.int32)
        arguments = None, self.batch, None
        assert runner_v2._sample(lambda *_: found, self, arguments, {}) is found


def test_a_staged_step_is_patched_before_metadata_is_built_and_committed():
    runner = Runner(Mode.STAGE)
    runner.manager.begin = None  # all is staged: it need not be called

    runner.execute(runner.prepare)
    assert runner.tables() == SHADOW
    assert runner.manager.state is State.STAGED
    runner.sample()

    assert runner.tables() == REAL
    assert counts(runner.nwor_state.report.take_payload()) == (3, 2)


class Looking:
    """An audit that sees what block tables and slots are when a hook calls it."""

    def __init__(self):
        self.seen = []

    def _look(self, called, runner, more):
        self.seen.append((called, runner.tables(), *more))

    def begin_step(self, runner, scheduled):
        self._look("begin_step", runner, ())

    def plan(self, runner, *of_v2):
        self._look("plan", runner, ())

    def resolve(self, runner, output, about, was_open):
        self._look("resolve", runner, (was_open, runner.manager.state))

    def attach(self, runner, output):
        return self.seen.append(output) or output


@pytest.mark.parametrize("num_drafts", [3, 0])
def test_the_audit_plans_before_shadow_blocks_are_there_and_resolves_behind_commit(
    num_drafts,
):
    runner = Runner(Mode.STAGE, num_drafts)
    runner.nwor_state.audit = audit = Looking()
    output = SimpleNamespace(req_ids=["a"])

    runner.execute(runner.prepare)
    assert hooks.sample_tokens(lambda: runner.sample() or output, runner, (), {})

    resolved = "resolve", REAL, num_drafts > 0, State.IDLE
    assert audit.seen == [("begin_step", REAL), ("plan", REAL), resolved, output]
    assert hasattr(output, "nwor_stats") is (num_drafts > 0)


@pytest.mark.parametrize(("max_num_reqs", "block"), [(2, 4), (3, 2)])
def test_v2s_seats_are_the_request_states_if_there_are_as_many(max_num_reqs, block):
    """Else those of the batch's rows."""
    runner = Runner(Mode.STAGE, max_num_reqs=max_num_reqs)
    runner.batch.idx_mapping = torch.tensor([1])

    runner.prepare()

    assert runner.tables()[0] == [[block]]


@pytest.mark.parametrize("begins", [True, False])
def test_guarantee_9_a_missed_begin_is_counted_and_told_as_a_breach(begins):
    runner = Runner()

    for _ in range(2):
        runner.step(begins)

    found, *news = runner.nwor_state.report.take_payload().read()
    missed = {} if begins else {"begin_missed": 2}
    assert runner.manager.fallbacks == missed
    assert news == ([] if begins else [missed, []])
    assert found[COUNTER_COLUMNS.index("invalid_slots")] == (0 if begins else 2)
    assert found[1] == (3 if begins else 0)
    assert runner.manager.state is State.IDLE


def test_what_was_left_to_vanilla_is_not_missed():
    """No drafts, too many of them, and an op that fails."""
    runner = Runner(num_drafts=0)
    for begins in (True, False):
        runner.step(begins)
    assert not runner.manager.fallbacks

    runner = Runner()
    runner.manager.capacity = 2
    runner.step()
    runner.manager.capacity = 8
    runner.manager.undo_log._begins = [(0, None)]
    runner.step()

    assert runner.manager.fallbacks == {"over_capacity": 1, "begin_failed": 1}
    assert runner.manager.state is State.IDLE


@pytest.mark.parametrize("emits", [True, False])
def test_an_output_carries_counts_unless_nobody_wants_them(emits):
    runner = Runner()
    runner.nwor_state.emits = emits
    output = SimpleNamespace(req_ids=["a"])
    runner.execute(runner.prepare)

    assert hooks.sample_tokens(lambda: runner.sample() or output, runner, (), {})

    assert runner.manager.counters[0, 1] == 3
    assert hasattr(output, "nwor_stats") == emits
    if emits:
        assert counts(output.nwor_stats) == (3, 2)


class Stopped(BaseException):
    """As KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError("vLLM's own"), Stopped()])
@pytest.mark.parametrize(
    ("where", "fallbacks"),
    [
        ("forward", {"step_failed": 1}),
        ("forward, and the tables stay", {"step_failed": 1}),
        ("sampler", {"step_failed": 1}),
        ("drafter", {}),  # behind commit: there are only counts to drop
    ],
)
def test_where_vllm_fails_tables_are_put_back_at_once(where, fallbacks, error):
    """Before the next step they may be another request's. It is vLLM's own error that
    is raised, whatever becomes of them."""
    runner = Runner(Mode.STAGE)

    def fail():
        if where == "drafter":
            runner.sample()
        else:
            assert runner.tables() == SHADOW
        if where.endswith("the tables stay"):
            runner.manager.shadow._undos = [None]
        raise error

    def forward():
        runner.prepare()
        if where.startswith("forward"):
            fail()

    with pytest.raises(type(error)) as raised:
        runner.execute(forward)
        hooks.sample_tokens(fail, runner, (), {})

    assert raised.value is error
    assert runner.manager.fallbacks == fallbacks
    if where.endswith("the tables stay"):
        return
    assert runner.tables() == REAL
    assert runner.manager.state is State.IDLE
    runner.execute(lambda: None)
    payload = runner.nwor_state.report.take_payload()
    assert not any(payload.read()[0]) if fallbacks else payload is None


def test_a_step_that_was_left_staged_is_put_back_by_the_next():
    """As after an exception that no hook of ours saw."""
    runner = Runner(Mode.STAGE)
    runner.execute(runner.prepare)
    seen = []

    runner.execute(lambda: seen.append(runner.tables()))

    assert seen == [REAL]
    assert runner.manager.fallbacks == {"stale_log": 1}


@pytest.mark.parametrize(
    ("who", "keeps"),
    [
        ({}, True),
        ({"drafts": ["a", "b"], "new": ["c"], "resumed": ["d"]}, True),
        ({"new": ["c"]}, True),
        ({"drafts": ["a", "c"], "new": ["b", "c"]}, False),
        ({"drafts": ["a", "d"], "resumed": ["d"]}, False),
    ],
)
def test_every_step_counts_for_the_seats_unless_a_request_begins_with_drafts(
    who, keeps
):
    """Its rows may be a copy of another's block, which it got just now."""
    runner = Runner(Mode.STAGE)
    before = runner.manager.shadow.step

    runner.execute(lambda: None, **who)

    assert runner.manager.shadow.step == before + (1 if keeps else 2)
