# SPDX-License-Identifier: Apache-2.0
"""Report, and the hooks around a step: each step has its own counts, block tables are
restored, also if steps fail, and observers are called in order."""

import pickle
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.test_draft_manager import BLOCKS, ROW_BYTES, SLOTS, TABLE, World, int32
from vllm_nwor import ops
from vllm_nwor.base.errors import NworError
from vllm_nwor.base.payload import NOTHING
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.hooks import runner as hooks
from vllm_nwor.hooks import runner_v1, runner_v2, states
from vllm_nwor.metrics import GroupInfo
from vllm_nwor.ops import COUNTER_COLUMNS
from vllm_nwor.step import NumRejected, Observer
from vllm_nwor.transaction import build
from vllm_nwor.transaction.counters import MAX_UNREAD, Report
from vllm_nwor.transaction.observer import Transaction
from vllm_nwor.transaction.states import State

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

    fallbacks = [payload.read()[1] for payload in payloads[2:]]
    assert fallbacks == [{"over_capacity": 3}, {"over_capacity": 1}, {}]
    assert report.take_payload() is None


def test_fallbacks_that_are_never_read_are_sent_a_limited_number_of_times():
    """As on tensor parallel ranks whose outputs are not read."""
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
            manager.commit(world.step, NumRejected(int32(num_rejected, 1)))
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

    def __init__(self, *is_staged, num_states=2, indices=(0, 1), emits=True, **world):
        self.world = World(*is_staged, num_states=num_states, **world)
        self.manager, step = self.world.manager, self.world.step
        self.transaction = Transaction(self.manager, [], emits)
        self.nwor_state = hooks.RunnerState([self.transaction])
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
            num_reqs=step.num_reqs,
            num_tokens=step.num_tokens,
            req_ids=step.request_ids,
            input_ids=None,
            positions=None,
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
        hooks.execute_model(lambda _: inner(), self, (scheduled,), {})

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
    if is_staged:  # before_forward is not called if all is staged
        runner.nwor_state.before_forward = (pytest.fail,)
    for _ in range(2):
        runner.execute(runner.prepare)
        assert runner.look() == (SHADOW if is_staged else REAL)
        assert runner.manager.state is (State.STAGED if is_staged else State.LOGGED)
        ((counts,), _) = runner.sample_tokens(runner.sample)
        assert runner.look() == REAL
        assert counts[:7] == (STAGED if is_staged else COUNTS[:7])
    runner.world.check(State.IDLE)
    runner = Runner(is_staged, emits=False)
    assert runner.step() is None
    assert runner.manager.counters[0, 1] == 3
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
    arguments = {"scheduler_output": object()}
    found = hooks.execute_model(lambda **_: "output", runner, (), arguments)
    assert found == "output"


class RunnerV1:
    """The attributes that V1's hooks of a step read."""

    def __init__(self, observers, drafts=(2, 1)):
        def gpu(array):
            return SimpleNamespace(gpu=array, np=numpy.arange(len(drafts) + 1))

        self.nwor_state = hooks.RunnerState(observers)
        table = SimpleNamespace(slot_mapping=gpu(None), block_table=gpu(None))
        self.input_batch = SimpleNamespace(
            block_table=SimpleNamespace(block_tables=[table]),
            num_reqs=len(drafts),
            req_ids=[str(row) for row in range(len(drafts))],
            vocab_size=9,
        )
        self.query_start_loc = self.input_ids = gpu(None)
        self.seq_lens = self.positions = None
        self.metadata = SimpleNamespace(
            num_draft_tokens=drafts, logits_indices=None, cu_num_sampled_tokens=None
        )


def forward_v1(wrapped, runner, args, kwargs):
    context = SimpleNamespace(attn_metadata={})
    with patch.object(runner_v1, "get_forward_context", lambda: context):
        return runner_v1._model_forward(wrapped, runner, args, kwargs)


def metadata_v2(wrapped, runner, args, kwargs):
    model_state = SimpleNamespace(nwor_state=runner.nwor_state)
    return states._prepare_attn(wrapped, model_state, args, kwargs)


def hooks_of_a_step(is_v2, num_drafts):
    """A runner without observers, and its hooks in vLLM's order, as functions without
    arguments."""
    args = SimpleNamespace(kv_connector_metadata=None)
    output = SimpleNamespace(req_ids=["a"])
    if is_v2:
        runner = Runner(False)
        runner.batch.num_draft_tokens = num_drafts
        prepared = tuple(runner.tables), runner.slots
        late = None, runner.batch, None
        found = None, None, int32(2, 1)
        inner = [
            (runner_v2._prepare_attn, lambda _: prepared, (runner.batch,)),
            (metadata_v2, dict, ()),
            (runner_v2._sample, lambda *_: found, late),
        ]
    else:
        runner = RunnerV1([], [num_drafts])
        sampled = SimpleNamespace(sampled_token_ids=None)
        drafts = runner.metadata if num_drafts else None
        inner = [
            (runner_v1._calc_spec_decode_metadata, lambda: drafts, ()),
            (forward_v1, lambda: None, ()),
            (runner_v1._sample, lambda *_: sampled, (None, drafts)),
        ][0 if num_drafts else 1 :]  # without drafts vLLM has no such metadata
    outer = [
        (hooks.execute_model, lambda _: None, (args,)),
        (hooks.sample_tokens, lambda: output, ()),
    ]
    order = [outer[0], *inner, outer[1]]
    return runner, [
        lambda hook=hook, wrapped=wrapped, args=args: hook(wrapped, runner, args, {})
        for hook, wrapped, args in order
    ]


def named(name, calls, every_step=True):
    """An observer that adds its name and each moment to `calls`."""

    def note(moment, *given):
        calls.append((name, moment))
        if moment == "sampled":
            step, acceptance = given
            assert (acceptance is None) is (step.num_drafts == 0)

    moments = {*hooks.INWARDS, *hooks.OUTWARDS} - {"blocks_transferred"}
    notes = {moment: partial(note, moment) for moment in moments}
    return Observer(name, every_step, **notes)


OF_A_STEP = (
    *("step_started", "tables_final", "before_forward", "metadata_final"),
    *("sampled", "payload", "output_ready"),
)


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("num_drafts", [3, 0])
def test_observers_are_called_inwards_to_the_forward_then_outwards(is_v2, num_drafts):
    """Without `every_step`, a step without drafts has only its start and its output."""
    runner, step = hooks_of_a_step(is_v2, num_drafts)
    for every_step in (True, False):
        calls = []
        names = "outer", "middle", "inner"
        observers = [named(name, calls, every_step) for name in names]
        runner.nwor_state = hooks.RunnerState(observers)

        for hook in step:
            hook()

        is_built = every_step or num_drafts
        always = {"step_started", "payload", "output_ready"}
        built = () if is_built else {*OF_A_STEP} - always
        assert calls == [
            (name, moment)
            for moment in OF_A_STEP
            if moment not in built
            for name in (names if moment in hooks.INWARDS else names[::-1])
        ]
        assert runner.nwor_state.step is None


@pytest.mark.parametrize("is_v2", [False, True])
def test_drafts_without_a_step_and_failed_steps_are_reported_outwards(is_v2):
    runner, (*_, sample, _) = hooks_of_a_step(is_v2, 3)
    names, calls = ("outer", "inner"), []
    runner.nwor_state = hooks.RunnerState([named(name, calls) for name in names])

    sample()
    assert calls == [("inner", "drafts_missed"), ("outer", "drafts_missed")]
    for hook in (hooks.execute_model, hooks.sample_tokens):
        calls.clear()
        with pytest.raises(ZeroDivisionError):
            hook(lambda *_: 1 // 0, runner, (object(),), {})
        assert calls[-2:] == [("inner", "step_failed"), ("outer", "step_failed")]


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("moment", OF_A_STEP)
def test_an_observer_that_ends_in_a_hook_fails_no_step_and_ends_no_other(is_v2, moment):
    """The thread that reads outputs may end the audit at any moment."""
    runner, step = hooks_of_a_step(is_v2, 3)
    calls = []
    audit, other = named("audit", calls), named("other", calls)
    audit.settle = Mock()

    def end(*_):
        for _ in range(2):
            audit.leave()

    setattr(audit, moment, end)
    runner.nwor_state = state = hooks.RunnerState([audit, other])

    for hook in step:
        hook()

    assert [name for who, name in calls if who == "other"] == [*OF_A_STEP]
    end = OF_A_STEP.index(moment)
    assert [name for who, name in calls if who == "audit"] == [*OF_A_STEP[:end]]
    assert (state.observers, state.removed) == ((other,), [audit])
    for _ in range(2):  # a step in flight may have gone on with its calls
        step[0]()
    assert audit.settle.call_count == 2


class Vanishing:
    """A runner's state whose observers are gone at the second read."""

    step = held = None
    every_step = True

    def __init__(self):
        self.calls = 0

    def __getattr__(self, moment):
        if moment == "blocks_transferred":
            return ()
        self.calls += 1
        return (Mock(),) if self.calls % 2 else ()


@pytest.mark.parametrize("is_v2", [False, True])
def test_observers_that_another_thread_ends_during_a_hook_fail_no_step(is_v2):
    runner, step = hooks_of_a_step(is_v2, 3)
    for hook in step:
        before = runner.nwor_state
        runner.nwor_state = vanishing = Vanishing()
        # Of the Step that an earlier hook has made.
        vanishing.step, vanishing.removed = getattr(before, "step", None), []
        hook()
        assert vanishing.calls >= 1


STAGES, LOGS = {"stage": 1, "commit": 1}, {"log": 1, "restore": 1}


@pytest.mark.parametrize(
    ("num_states", "indices", "others", "entries", "num_logged"),
    [
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
        assert not runner.manager.shadow.seats.lack(numpy.array(others), live)
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
    manager = World(True, num_seats=num_seats, num_states=0).manager
    runner = RunnerV1([Transaction(manager, [])], drafts)

    with patch.object(manager.shadow, "begins", []):
        runner_v1._calc_spec_decode_metadata(lambda: runner.metadata, runner, (), {})

    step = runner.nwor_state.step
    assert (step.num_drafts, step.drafts_of_requests) == (sum(drafts), drafts)
    assert step.awaits_forward is lacks  # to be logged
    assert manager.state is State.STAGED


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


def test_a_runner_without_groups_reports_its_refusal(monkeypatch):
    monkeypatch.setattr(hooks, "_builders", [build])
    output = SimpleNamespace(req_ids=["a"])
    config = NworConfig(mode=Mode.COW)
    arguments = config, "why", lambda: output, SimpleNamespace(), (), {}
    assert hooks._sample_tokens_refused(*arguments) is output
    assert output.nwor_stats.read() == (ZEROS, {}, [(0, "cow", "off", "why")])
