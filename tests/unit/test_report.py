# SPDX-License-Identifier: Apache-2.0
"""Report, and the hooks around a step of the V2 runner: each step has its own counts,
and block tables are restored, also if steps fail."""

import pickle
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from tests.unit.test_draft_manager import BLOCKS, ROW_BYTES, SLOTS, TABLE, World, int32
from vllm_nwor import ops
from vllm_nwor.config import Mode, Strict
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.hooks import runner_v1, runner_v2
from vllm_nwor.metrics import GroupInfo
from vllm_nwor.ops import COUNTER_COLUMNS
from vllm_nwor.report import MAX_UNREAD, NOTHING, Report
from vllm_nwor.step import NumRejected
from vllm_nwor.transaction.draft_manager import NworError, State

INFOS = [GroupInfo(0, "stage", "cow", "because")]
ZEROS = (0,) * 9
# The counts of a World's step, with all drafts rejected: two windows, three drafts.
COUNTS = (2, 3, 0, 3, 0, 3 * ROW_BYTES, 0, 0, 0)


def reporting(*is_staged, **more):
    world = World(*is_staged, **{"strictness": Strict.NEVER} | more)
    return world, Report([], world.manager)


# --- the report -----------------------------------------------------------------------


@pytest.mark.parametrize("audit", [[], [{"steps": 9}]])
@pytest.mark.parametrize("travels", [False, True])
def test_group_rows_are_sent_until_they_are_read(travels, audit):
    """vLLM discards its warm-up's outputs. A refused engine has no manager."""
    report = Report(INFOS, None)
    for _ in range(3):
        payload = report.take_payload()
        for found in audit:
            payload = payload.with_audit(lambda found=found: found)

    sent = pickle.loads(pickle.dumps(payload)) if travels else payload.read()

    assert sent == (ZEROS, {}, INFOS, *audit)
    assert {type(sent), *map(type, sent[2])} == {tuple}  # no class of this package
    assert report.take_payload() is None


def test_group_rows_that_are_never_read_are_sent_a_limited_number_of_times():
    """As on tensor parallel ranks whose outputs are not read."""
    report = Report(INFOS, None)

    taken = [report.take_payload() for _ in range(MAX_UNREAD + 1)]

    assert all(payload.read()[2] in (INFOS, []) for payload in taken[:-1])
    assert taken[-1] is None


def test_optional_fields_are_sent_once_with_counts_or_alone():
    """Two groups: every launch counts all windows, and its own bytes."""
    world, report = reporting(False, False)
    world.run()
    payload = report.take_payload()
    counts = *COUNTS[:5], 2 * COUNTS[5], *COUNTS[6:]

    audit = {"steps": 9}
    assert payload.with_audit(audit.copy).read() == (counts, {}, [], audit)
    assert payload.read() == (counts,)  # a slot's payload is used for many steps
    assert NOTHING.with_audit(audit.copy).read() == (ZEROS, {}, [], audit)
    world.manager.capacity = 2
    for _ in range(2):
        world.open()
        assert report.take_payload().read() == (ZEROS, {"over_capacity": 1}, [])
    assert report.take_payload() is None


def test_fallbacks_on_an_unread_output_are_sent_again():
    """Two outputs are in flight: the second one, created before the first is read, does
    not repeat its fallbacks."""
    world, report = reporting(False)
    world.manager.capacity = 2
    payloads = []
    for _ in range(4):
        world.open()
        payloads.append(report.take_payload())
    payloads.append(report.take_payload())

    assert [payload.read()[1] for payload in payloads[2:]] == [
        {"over_capacity": 3},
        {"over_capacity": 1},
        {},
    ]
    assert report.take_payload() is None


def test_fallbacks_that_are_never_read_are_sent_a_limited_number_of_times():
    world, report = reporting(False)
    world.manager.fallbacks["over_capacity"] += 1
    taken = [report.take_payload() for _ in range(MAX_UNREAD + 1)]
    assert taken[-1] is None
    world.manager.fallbacks["over_capacity"] += 1
    assert report.take_payload().read() == (ZEROS, {"over_capacity": 2}, [])
    assert report.take_payload() is None


# What happens to a step's counts: read as late as possible; never read; not attached;
# dropped with the step; lost with a commit that raises or fails, or because those of
# the previous step, which failed, cannot be copied.
FATES = ("read", "unread", "untaken", "dropped", "raises", "fails", "not copied")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(FATES)), max_size=40),
    st.integers(1, 12),
)
@example([(1, "read"), (1, "untaken"), (1, "fails"), (2, "read")], 1)
def test_each_step_has_its_own_counts_until_the_last_moment(steps, max_in_flight):
    """The oldest is read when max_in_flight steps have committed."""
    with patch.object(ops, "publish", wraps=ops.publish) as publish:
        world, report = reporting(False, max_in_flight=max_in_flight)
    manager = world.manager
    config, in_flight = manager.config, deque()

    for num_rejected, fate in steps:
        world.fail("restore" if fate in ("raises", "fails") else "none", moment=2)
        publish.side_effect = OSError if fate == "not copied" else None
        raises = replace(config, strictness=Strict.ALWAYS)
        manager.config = raises if fate == "raises" else config
        with suppress(NworError):
            world.open()
            manager.commit(NumRejected(int32(num_rejected, 1)))
            assert fate != "raises"
        if fate in ("dropped", "raises"):
            manager.start_step()
        taken = None if fate == "untaken" else report.take_payload()
        in_flight.append((taken, num_rejected, fate))
        if len(in_flight) == max_in_flight:
            taken, num_rejected, fate = in_flight.popleft()
            found = taken and taken.read()[0][:4]
            own = 2, 3, 2 - num_rejected, num_rejected + 1
            if fate == "read":
                assert found == own
            elif fate == "not copied":
                assert found in (own, ZEROS[:4])
            elif fate != "unread":
                assert found in (None, ZEROS[:4])


# --- the hooks of a step --------------------------------------------------------------

REAL = TABLE, [5, 6, 7, 17, 18]
# Drafts are in entry 1 of one request and in entry 0 of the other.
SHADOW = [[2, BLOCKS + 1, 0], [BLOCKS + 2, 0, 0]], [29, 30, 31, 33, 34]


class Runner:
    """A stand-in for V2's runner, with a World's manager and step; its sampler rejects
    all drafts. CPU engines run V1."""

    def __init__(self, *is_staged, num_states=2, indices=(0, 1), **world):
        self.world = World(*is_staged, num_states=num_states, **world)
        self.manager, step = self.world.manager, self.world.step
        self.nwor_state = hooks.RunnerState(self.manager, [])
        self.req_states = SimpleNamespace(req_id_to_index=dict(enumerate(indices)))
        self.tables, self.slots = step.block_tables, torch.stack(step.slot_mappings)
        self.batch = SimpleNamespace(
            num_draft_tokens=step.num_drafts,
            logits_indices=step.logits_indices,
            cu_num_logits=int32(0, *step.cu_num_logits),
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=numpy.array(indices),
        )

    def look(self, gid=0):
        return self.tables[gid].tolist(), self.slots[gid].tolist()

    def execute(self, inner, drafts=(), new=(), resumed=()):
        """Calls the hook of execute_model, which runs `inner`. drafts, new, resumed:
        requests of its SchedulerOutput."""
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens={name: [1] for name in drafts},
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        )
        arguments = {"scheduler_output": scheduled}
        hooks.execute_model(lambda **_: inner(), self, (), arguments)

    def prepare(self):
        prepared = tuple(self.tables), self.slots
        hook = runner_v2._prepare_attn
        assert hook(lambda _: prepared, self, (self.batch,), {}) is prepared

    def sample(self):
        found = None, None, int32(2, 1)
        arguments = None, self.batch, None
        assert runner_v2._sample(lambda *_: found, self, arguments, {}) is found

    def sample_tokens(self, inner):
        """The output's counts, if any, and the output."""
        output = SimpleNamespace(req_ids=["a"])
        found = hooks.sample_tokens(lambda: inner() or output, self, (), {})
        payload = getattr(output, "nwor_stats", None)
        return payload and payload.read(), found

    def step(self, inner=None):
        self.execute(inner or self.prepare)
        return self.sample_tokens(self.sample)[0]


STAGED = (*COUNTS[:4], 2, 0, 0)


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_step_is_committed_and_its_output_carries_the_counts(is_staged):
    """Stage patches the tables before attention metadata is built."""
    runner = Runner(is_staged)
    if is_staged:
        runner.manager.begin = None  # not called if all is staged
    for _ in range(2):
        runner.execute(runner.prepare)
        assert runner.look() == (SHADOW if is_staged else REAL)
        assert runner.manager.state is (State.STAGED if is_staged else State.LOGGED)
        ((counts,), _) = runner.sample_tokens(runner.sample)
        assert runner.look() == REAL
        assert counts[:7] == (STAGED if is_staged else COUNTS[:7])
    runner.nwor_state.emits = False
    assert runner.step() is None
    assert runner.manager.counters[0, 1] == 9
    runner.world.check(State.IDLE)


@pytest.mark.parametrize("is_staged", list(product([True, False], repeat=2)))
def test_two_groups_have_tables_and_slots_of_their_own(is_staged):
    """V2's slots are rows of one tensor. Only the target rows of each group stay
    written."""
    runner = Runner(*is_staged)
    other = [[3, 5, 0], [1, 0, 0]], [21, 22, 23, 5, 6]
    runner.tables[1][:], runner.slots[1] = map(torch.tensor, other)
    groups = {group.group_id: group.layers for group in runner.manager.groups}

    runner.execute(runner.prepare)
    patched = [runner.look(gid) for gid in range(2)]
    for gid, layers in groups.items():
        for slot in runner.slots[gid].tolist():
            for layer in layers:
                layer.kv_cache[slot // SLOTS, :, slot % SLOTS] = 1 + gid
    runner.sample_tokens(runner.sample)

    (row, *rows), shadow_slots = SHADOW
    shadows = SHADOW, ([[3, *row[1:]], *rows], shadow_slots)
    for gid, real in enumerate((REAL, other)):
        assert patched[gid] == (shadows[gid] if is_staged[gid] else real)
        assert runner.look(gid) == real
        for layer in groups[gid]:
            written = layer.kv_cache[:BLOCKS].any(-1).any(1).flatten().nonzero()
            assert written.flatten().tolist() == sorted(real[1][row] for row in (0, 3))
            assert layer.kv_cache[:BLOCKS].max() == 1 + gid


def test_the_undo_log_does_not_read_the_scheduler_output():
    """New and resumed requests matter for shadow blocks only."""
    runner = Runner(False)
    assert hooks.execute_model(lambda _: "output", runner, (object(),), {}) == "output"


class Looking:
    """An audit that records block tables and slots when a hook calls it."""

    def __init__(self):
        self.seen = []

    def __getattr__(self, called):
        def look(runner, *arguments):
            self.seen.append((called, runner.look(), runner.manager.state))
            return called, *arguments

        return look

    def resolve(self, runner, output, about, was_open):
        self.seen.append(("resolve", runner.look(), runner.manager.state, was_open))


@pytest.mark.parametrize("num_drafts", [3, 0])
def test_the_audit_plans_before_stage_and_resolves_after_commit(
    num_drafts,
):
    runner = Runner(True)
    runner.batch.num_draft_tokens = num_drafts
    runner.nwor_state.audit = audit = Looking()

    runner.execute(runner.prepare)
    payload, (attached, _) = runner.sample_tokens(runner.sample)

    idle = REAL, State.IDLE
    resolved = "resolve", *idle, num_drafts > 0
    others = [(called, *idle) for called in ("begin_step", "plan", "attach")]
    assert audit.seen == [*others[:2], resolved, others[2]]
    assert attached == "attach"
    assert (payload is not None) is (num_drafts > 0)


class Vanishing:
    """A runner's state whose audit is gone at the second read, as after a failure on
    the thread that reads outputs."""

    def __init__(self, state):
        self.state, self.calls = state, 0

    def __getattr__(self, name):
        return getattr(self.state, name)

    @property
    def audit(self):
        self.calls += 1
        return Mock() if self.calls % 2 else None


def hooks_of_a_step(is_v2):
    """Each as a function of a runner."""
    batch = SimpleNamespace(num_draft_tokens=0)
    late = None, batch, None
    step = [
        lambda runner: hooks.execute_model(Mock(), runner, (Mock(),), {}),
        lambda runner: hooks.sample_tokens(Mock(), runner, (), {}),
    ]
    if is_v2:
        prepare, sample = runner_v2._prepare_attn, runner_v2._sample
        two = Mock(return_value=(None, None))
        step.append(lambda runner: prepare(two, runner, (batch,), {}))
        step.append(lambda runner: sample(Mock(), runner, late, {}))
    else:
        step += [
            lambda runner: runner_v1._calc_spec_decode_metadata(Mock(), runner, (), {}),
            lambda runner: runner_v1._model_forward(Mock(), runner, (), {}),
            lambda runner: runner_v1._sample(Mock(), runner, (None, None), {}),
        ]
    return step


@pytest.mark.parametrize("is_v2", [False, True])
def test_an_audit_that_another_thread_ends_during_a_hook_fails_no_step(is_v2):
    state = hooks.RunnerState(None, [], emits=False)
    for hook in hooks_of_a_step(is_v2):
        hook(SimpleNamespace(nwor_state=(vanishing := Vanishing(state))))
        assert vanishing.calls == 1


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_dummy_run_of_v2_is_no_step(is_staged):
    """It calls execute_model only, between steps, and changes nothing."""
    dummy = SchedulerOutput.make_empty()
    dummy.num_scheduled_tokens = {"_dummy_req_0": 1}
    runners = [Runner(is_staged), Runner(is_staged)]
    for runner in runners:
        first = runner.step()
        if runner is runners[1]:
            for _ in range(3):
                arguments = (dummy,), {"dummy_run": True}
                hooks.execute_model(lambda *_, **__: None, runner, *arguments)
                assert runner.look() == REAL
        second = runner.step()
        assert second[0][:4] == first[0][:4] == COUNTS[:4]
        runner.world.check(State.IDLE)
    (plain, with_dummies) = (
        [layer.kv_cache for group in runner.manager.groups for layer in group.layers]
        for runner in runners
    )
    assert all(map(torch.equal, plain, with_dummies))


STAGES, LOGS = {"stage": 1, "commit": 1}, {"log": 1, "restore": 1}


@pytest.mark.parametrize(
    ("num_states", "indices", "others", "entries", "num_logged"),
    [
        (2, (0, 1), (), (BLOCKS + 1, BLOCKS + 2), 0),
        (2, (1, 0), (), (BLOCKS + 3, BLOCKS), 0),
        # There are two seats.
        (5, (0, 4), (), (BLOCKS + 1, BLOCKS + 2), 0),
        (5, (3, 1), (2,), (BLOCKS + 3, 4), 1),
        (5, (2, 1), (0, 2), (BLOCKS + 3, 4), 1),
        (5, (4, 3), (0, 1), (1, 4), 3),
    ],
)
def test_v2_requests_without_a_seat_are_logged_in_the_same_step(
    num_states, indices, others, entries, num_logged
):
    """others: state indices of requests of earlier steps."""
    runner = Runner(True, num_states=num_states, indices=indices)
    if others:
        live = {f"other {index}": index for index in others}
        assert not runner.nwor_state.seats.lack(numpy.array(others), live)
        runner.req_states.req_id_to_index |= live
    runner.execute(runner.prepare)
    assert (runner.tables[0][0, 1], runner.tables[0][1, 0]) == entries

    ((counts,), _) = runner.sample_tokens(runner.sample)

    in_shadow = sum(entry >= BLOCKS for entry in entries)
    assert counts[:6] == (*COUNTS[:4], in_shadow, num_logged * ROW_BYTES)
    assert runner.look() == REAL
    assert runner.world.ops.calls == STAGES | (LOGS if num_logged else {})
    runner.world.check(State.IDLE)


@pytest.mark.parametrize(
    ("num_seats", "drafts", "lacks"),
    [
        (2, [2, 1], False),
        (1, [2, 1], True),
        (1, [2, 0], False),
        (1, [0, 1], True),
        (2, [0, 1, 0], False),
        (2, [0, 0, 1], True),
    ],
)
def test_v1_seats_the_first_rows_of_the_batch(num_seats, drafts, lacks):
    """Rows without drafts need no seat."""
    seen, gpu = [], SimpleNamespace(gpu=None)
    manager = SimpleNamespace(shadow=SimpleNamespace(num_seats=num_seats))
    manager.stage = seen.append
    table = SimpleNamespace(slot_mapping=gpu, block_table=gpu)
    runner = SimpleNamespace(
        nwor_state=SimpleNamespace(manager=manager, audit=None),
        input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])),
        query_start_loc=gpu,
        seq_lens=None,
    )
    metadata = SimpleNamespace(
        num_draft_tokens=drafts, logits_indices=None, cu_num_sampled_tokens=None
    )

    runner_v1._calc_spec_decode_metadata(lambda: metadata, runner, (), {})

    assert [(it.num_drafts, it.lacks_seats) for it in seen] == [(sum(drafts), lacks)]
    assert runner.nwor_state.windows is seen[0]  # to be logged


class Stopped(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


@pytest.mark.parametrize(
    ("is_staged", "what", "fallbacks"),
    [
        (False, "no drafts", {}),
        (False, "no drafts, no begin", {}),
        (False, "no begin", {"begin_missed": 1}),  # guarantee 9
        (False, "too many drafts", {"over_capacity": 1}),
        (False, "an op fails", {"begin_failed": 1}),
        # As after an exception that no hook saw.
        (True, "nothing is sampled", {"stale_log": 1}),
        (True, "forward raises", {"step_failed": 1}),
        (True, "forward raises, and the tables stay", {"step_failed": 1}),
        (True, "sampler raises", {"step_failed": 1}),
        # After commit only the counts are dropped.
        (True, "drafter raises", {}),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("vLLM's own"), Stopped()])
def test_a_step_that_fails(is_staged, what, fallbacks, error):
    """Tables are restored at once: in the next step they may be another request's.
    vLLM's own error is raised in every case. Only a missed begin is a breach."""
    runner = Runner(is_staged)
    if "no drafts" in what:
        runner.batch.num_draft_tokens = 0
    if "too many" in what:
        runner.manager.capacity = 2
    if "op fails" in what:
        runner.world.fail("log")

    def forward():
        if "no begin" not in what:
            runner.prepare()
        assert runner.look() == (SHADOW if is_staged else REAL)
        if "tables stay" in what:
            runner.world.fail("unstage")
        if what.startswith("forward"):
            raise error

    def sampler():
        if what.startswith("sampler"):
            raise error
        runner.sample()
        if what.startswith("drafter"):
            raise error

    counted, looks = None, []
    with pytest.raises(type(error)) if "raises" in what else nullcontext() as raised:
        runner.execute(forward)
        if what != "nothing is sampled":
            counted, _ = runner.sample_tokens(sampler)

    if raised:
        assert raised.value is error
    if "tables stay" in what:
        runner.world.check(State.IDLE, **fallbacks)
        return
    if what != "nothing is sampled":
        assert runner.look() == REAL
    runner.execute(lambda: looks.append(runner.look()))
    assert looks == [REAL]
    counted = counted or runner.sample_tokens(lambda: None)[0]
    runner.world.check(State.IDLE, **fallbacks)
    counts = [0] * 9
    counts[COUNTER_COLUMNS.index("invalid_slots")] = fallbacks.get("begin_missed", 0)
    assert counted == ((tuple(counts), fallbacks, []) if fallbacks else None)


@pytest.mark.parametrize(
    ("keeps", "who"),
    [
        (True, {}),
        (True, {"drafts": ["a", "b"], "new": ["c"], "resumed": ["d"]}),
        (False, {"drafts": ["a", "c"], "new": ["b", "c"]}),
        (False, {"drafts": ["a", "d"], "resumed": ["d"]}),
    ],
)
def test_a_step_in_which_a_request_begins_with_drafts_invalidates_seats(keeps, who):
    """Its rows may be in a new copy of another request's block."""
    runner = Runner(True)
    before = runner.manager.shadow.step

    runner.execute(lambda: None, **who)

    assert runner.manager.shadow.step == before + (1 if keeps else 2)


def test_a_runner_without_groups_reports_its_refusal():
    output = SimpleNamespace(req_ids=["a"])
    arguments = Mode.COW, "why", lambda: output, SimpleNamespace(), (), {}
    assert hooks._sample_tokens_refused(*arguments) is output
    assert output.nwor_stats.read() == (ZEROS, {}, [(0, "cow", "off", "why")])
