# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager and ShadowBlocks: errors that are raised in every mode,
invariants, memory, seats.

tests/simulation covers the transitions between states and each reason to fall back,
with random windows, layouts and faults (guarantees 1, 2, 6, 7 and 9).
"""

import itertools
import weakref
from dataclasses import replace
from unittest.mock import MagicMock

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.states import RequestState

from tests.simulation.engine import Fault, FaultyOps
from vllm_nwor import ops
from vllm_nwor.base.errors import NworError
from vllm_nwor.config import Mode, NworConfig, OnReject, Strict
from vllm_nwor.layout.kv_layout import packed_layout, row_layout
from vllm_nwor.layout.regions import ShadowRegion, StagedGroup, blocks_per_seat
from vllm_nwor.layout.tables import DeviceMemory, LayerCache
from vllm_nwor.step import NumRejected, Step, Undone
from vllm_nwor.transaction.draft_manager import DraftCommitManager
from vllm_nwor.transaction.shadow_blocks import Seats, seats_num_bytes
from vllm_nwor.transaction.states import State
from vllm_nwor.transaction.undo_log import num_bytes

# Requests' blocks, then shadow blocks: two for each of two seats.
BLOCKS, SHADOW_BLOCKS, HEADS, SLOTS, DIM = 6, 4, 2, 4, 8
ROW_BYTES = 2 * HEADS * DIM  # of a token in the two layers of a group
REGION = ShadowRegion(BLOCKS, 2, 2, BLOCKS, SLOTS)
TABLE = [[2, 1, 0], [4, 0, 0]]
ALL_REJECTED = NumRejected(torch.tensor([2, 1], dtype=torch.int32))


def interrupt(*_):
    raise KeyboardInterrupt


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class World:
    """A manager of groups with two layers each (HND and NHD), and a step of two
    requests with two drafts and one. fails: an op whose first call raises. has_packed:
    the second layer is packed, with a launch of its own. settings: of the
    configuration."""

    def __init__(
        self,
        *is_staged,
        fails="none",
        capacity=3,
        num_seats=2,
        num_states=0,
        storage=None,
        has_builtins=False,
        has_packed=False,
        max_in_flight=2,
        **settings,
    ):
        ops.load()
        shape = (BLOCKS + SHADOW_BLOCKS, HEADS, SLOTS, DIM)
        self.ops = FaultyOps()
        self.fail(fails)
        region = replace(REGION, num_seats=num_seats)
        groups = []
        for gid in range(len(is_staged)):
            one = torch.zeros(shape, dtype=torch.uint8)
            other = one.transpose(1, 2).contiguous().transpose(1, 2)
            layers = [
                LayerCache(str(i), c, row_layout(c)) for i, c in enumerate((one, other))
            ]
            if has_packed:
                heads = torch.arange(HEADS) * SLOTS * DIM
                sizes = torch.full_like(heads, DIM)
                runs = [torch.stack([heads + o * DIM, sizes], 1) for o in range(SLOTS)]
                cache = torch.zeros(shape, dtype=torch.uint8)
                layers[1] = LayerCache("1", cache, packed_layout(runs, cache))
            groups.append((gid, layers))
        self.manager = DraftCommitManager(
            NworConfig(mode=Mode.COW, **{"strictness": Strict.STARTUP} | settings),
            groups,
            capacity,
            storage,
            None if has_builtins else self.ops,
            {gid: StagedGroup(region, SLOTS) for gid, it in enumerate(is_staged) if it},
            max_in_flight,
            num_states,
        )
        self.step = Step(
            num_drafts=3,
            logits_indices=torch.arange(5, dtype=torch.int32),
            cu_num_logits=int32(3, 5),
            slot_mappings=[torch.tensor([5, 6, 7, 17, 18]) for _ in is_staged],
            block_tables=[int32(*TABLE) for _ in is_staged],
            query_start_loc=int32(0, 3, 5),
            seq_lens=int32(8, 3),
            drafts_of_requests=[2, 1],
        )

    @property
    def tables(self):
        return [table.tolist() for table in self.step.block_tables]

    def fail(self, op, call=0, moment=0):
        self.ops.arm(Fault(op, call, moment))

    def open(self):
        """Before the forward."""
        self.manager.stage(self.step)
        self.manager.begin(self.step)

    def commit(self):
        self.manager.commit(self.step, ALL_REJECTED)

    def run(self):
        self.open()
        self.commit()

    def check(self, state, **fallbacks):
        assert self.manager.fallbacks == fallbacks
        assert self.manager.state is state


# --- the library's classes, in place of the ops that the simulation uses --------------


def test_staged_tensors_live_until_the_next_step_starts():
    """The library keeps their addresses until then."""
    world = World(True, has_builtins=True)
    step, world.step = world.step, None
    lives = [weakref.ref(one) for one in (*step.block_tables, *step.slot_mappings)]
    world.manager.stage(step)
    del step
    assert all(life() is not None for life in lives)
    world.manager.commit(world.manager.shadow.held, ALL_REJECTED)
    world.manager.start_step()
    assert all(life() is None for life in lives)


# --- which drafts a commit has undone -------------------------------------------------

# The answer for group 0, which is staged, group 1, which is logged, and group 2, which
# is not protected.
UNDONE = {
    "all is well": ({}, "none", ["windows", "all", "none"]),
    "a window without a seat": ({"num_seats": 1}, "none", ["all", "all", "none"]),
    "the log fails": ({}, "log", ["windows", "none", "none"]),
    "the rest is not logged": ({"num_seats": 1}, "log", ["windows", "none", "none"]),
    "the restore fails": ({}, "restore", ["windows", "none", "none"]),
    "the stage fails": ({}, "stage", ["all", "all", "none"]),
}


@pytest.mark.parametrize("what", UNDONE)
def test_undone_drafts_are_reported_by_group(what):
    settings, fails, expected = UNDONE[what]
    world = World(True, False, fails=fails, strictness=Strict.NEVER, **settings)
    world.run()
    found = [world.step.undone(gid) for gid in range(3)]
    assert [
        "windows" if of.staged is not None else "all" if of.is_undone else "none"
        for of in found
    ] == expected
    if found[0].staged is not None:
        assert found[0].is_undone
        assert found[0].staged is world.manager.shadow.saved[0]


def test_nothing_is_undone_if_rejected_slots_are_poisoned():
    world = World(False, on_reject=OnReject.POISON)
    world.run()
    assert world.manager.undone(0) == Undone()


# --- errors, and counters -------------------------------------------------------------


@pytest.mark.parametrize("strict", Strict)
@pytest.mark.parametrize("groups", [(True, True), (True,)])
def test_a_failed_stage_whose_tables_cannot_be_restored_raises(groups, strict):
    """The forward would write to shadow blocks. The second launch fails: of another
    group, or of the same one."""
    world = World(*groups, has_packed=len(groups) == 1, strictness=strict)
    world.fail("stage", 1)
    world.ops.unstage = lambda *_: 1 // 0

    with pytest.raises(
        NworError, match=r"^NWOR stage_failed: a block table cannot be put back: "
    ):
        world.open()

    world.check(State.IDLE, stage_failed=1)


@pytest.mark.parametrize("strict", Strict)
@pytest.mark.parametrize("call", range(3))
def test_a_table_that_cannot_be_restored_raises_and_the_others_are_restored(
    strict, call
):
    world = World(True, True, True, strictness=strict)
    world.open()
    world.fail("unstage", call)

    with pytest.raises(
        NworError, match=r"^NWOR step_failed: a block table cannot be put back: planted"
    ):
        world.manager.abort("step_failed")

    assert [table == TABLE for table in world.tables] == [i != call for i in range(3)]
    world.check(State.IDLE, step_failed=1)


@pytest.mark.parametrize(
    ("is_staged", "begins", "ends", "puts_back"),
    [(False, "log", "restore", {}), (True, "stage", "commit", {"unstage": 1})],
)
def test_after_a_failed_commit_a_strict_step_raises(is_staged, begins, ends, puts_back):
    world = World(is_staged, strictness=Strict.ALWAYS, fails=ends)
    with pytest.raises(NworError, match=r"^NWOR commit_failed: (restore|commit)_\w+: "):
        world.run()

    for _ in range(2):
        world.manager.start_step()
        with pytest.raises(NworError, match="the commit before this step failed"):
            world.open()

    world.check(State.FAILED, commit_failed=1)
    assert world.ops.calls == {begins: 1, ends: 1} | puts_back


@pytest.mark.parametrize("groups", [(True,), (False, True)])
def test_a_window_without_a_seat_is_logged_in_the_same_step(groups):
    """Each window is counted once, by its mode; none is a fallback."""
    world = World(*groups, num_seats=1, strictness=Strict.ALWAYS)
    world.open()
    world.manager.check_state()
    world.check(State.STAGED)
    num_changed = [
        sum(a != b for a, b in zip(table, TABLE, strict=True)) for table in world.tables
    ]
    assert num_changed == [int(it) for it in groups]
    world.commit()
    world.manager.check_state()
    world.check(State.IDLE)
    num_staged = groups.count(True)
    launches = {"stage": num_staged, "log": len(groups)}
    assert world.ops.calls == launches | {"commit": num_staged, "restore": len(groups)}
    windows, drafts, _, rejected, in_shadow = world.manager.counts.read()[0][:5]
    assert (windows, drafts, rejected, in_shadow) == (2, 3, 3, 1)


@pytest.mark.parametrize(("groups", "num_seats"), [((True, False), 2), ((True,), 1)])
def test_guarantee_9_a_missed_begin_in_a_staged_step_is_counted(groups, num_seats):
    """Of another group, or of a window without a seat."""
    world = World(*groups, num_seats=num_seats)
    world.manager.stage(world.step)
    world.manager.check_state()
    assert world.step.awaits_forward

    world.commit()

    assert "restore" not in world.ops.calls
    world.check(State.IDLE, begin_missed=1)
    assert (world.manager.counts is None) is (num_seats == 1)


@pytest.mark.parametrize("kind", [(False,), (True,), (False, True)], ids=str)
def test_begin_drops_windows_of_an_uncommitted_step(kind):
    world = World(*kind)
    for _ in range(2):
        world.open()
        world.manager.check_state()
    assert world.manager.is_open
    world.commit()

    world.check(State.IDLE, stale_log=1)
    assert world.tables == [TABLE] * len(kind)


@pytest.mark.parametrize("moment", ["stage", "commit_draft_layer", "publish"])
def test_abort_restores_the_tables_after_an_interrupt(moment, monkeypatch):
    """KeyboardInterrupt, which NWOR does not catch."""
    if moment == "publish":
        monkeypatch.setattr(ops, moment, interrupt)
        world = World(True, fails="commit")
        with pytest.raises(NworError):
            world.run()
    else:
        world = World(True)
        op = getattr(world.ops, moment)
        setattr(world.ops, moment, lambda *them: (op(*them), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        world.run()

    world.manager.abort("step_failed")

    assert world.tables == [TABLE]
    assert world.manager.state is State.IDLE


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_staged", [False, True])
def test_given_storage_bounds_the_capacity(is_staged):
    """It also has the seats' saved state."""
    needed = num_bytes(5, ROW_BYTES, num_groups=1, num_layers=2)
    if is_staged:
        needed += StagedGroup(REGION, SLOTS).num_bytes + seats_num_bytes(2)
    storage = torch.zeros(needed + ROW_BYTES, dtype=torch.uint8)

    manager = World(is_staged, capacity=16, storage=storage).manager

    assert (manager.capacity, manager.log_bytes) == (5, 5 * ROW_BYTES)
    saved = manager.shadow.saved.values() if is_staged else ()
    for tensor in (manager.groups[0].undo_log, *saved):
        assert 0 <= tensor.data_ptr() - storage.data_ptr() < storage.numel()


def test_no_layer_or_no_memory_for_one_draft_is_an_error():
    for groups in ([], [(0, [])]):
        with pytest.raises(ValueError, match="groups is empty or has one without lay"):
            DraftCommitManager(NworConfig(mode=Mode.COW), groups, 16)
    with pytest.raises(ValueError, match="capacity is 0 drafts of 32 bytes"):
        World(False, storage=torch.zeros(8, dtype=torch.uint8))


# --- invariants -----------------------------------------------------------------------


def lies_in(tensor, other):
    """Makes one of a manager's tensors share another's memory."""
    tensor.set_(other.view(-1).view(tensor.dtype))


def table(manager):
    return manager.groups[0].tables[0].table


COW, STAGED, POISON = (False, {}), (True, {}), (False, {"on_reject": OnReject.POISON})


@pytest.mark.parametrize(
    ("number", "kind", "break_it"),
    [
        (1, COW, lambda m, group: m.undo_log.abort()),
        (1, COW, lambda m, group: setattr(m, "state", State.IDLE)),
        (1, STAGED, lambda m, group: setattr(m, "state", State.LOGGED)),
        (1, STAGED, lambda m, group: m.shadow.abort()),
        # In a state that no transition leads to.
        (2, None, lambda m, group: setattr(m, "state", State.FAILED)),
        (2, None, lambda m, group: setattr(m, "state", State.PLAIN)),
        (3, COW, lambda m, group: group.log_windows[2, 1].fill_(1)),
        (4, COW, lambda m, group: table(m)[1, 0].add_(1)),
        (4, COW, lambda m, group: table(m)[:2, -1].copy_(table(m)[:2, -1].flip(0))),
        (5, COW, lambda m, group: lies_in(group.log_slots, group.layers[0].kv_cache)),
        (5, COW, lambda m, group: lies_in(group.log_slots, m.counters[-1:, -1:])),
        (
            *(5, STAGED),
            lambda m, group: lies_in(
                m.shadow.saved[0], group.layers[1].kv_cache.transpose(1, 2)
            ),
        ),
        (5, STAGED, lambda m, group: lies_in(m.shadow.saved[0], table(m))),
        (5, POISON, lambda m, group: lies_in(group.log_slots, group.source.table)),
        (6, COW, lambda m, group: m.counters[0, 1].add_(1)),
    ],
)
def test_check_state_names_the_invariant_that_does_not_hold(number, kind, break_it):
    is_staged, settings = kind or COW
    world = World(is_staged, **settings)
    if kind is not None:
        world.open()
    world.manager.check_state()

    break_it(world.manager, world.manager.groups[0])

    with pytest.raises(AssertionError, match=f"^NWOR invariant {number} does not hold"):
        world.manager.check_state()


def test_debug_sync_checks_the_invariants_after_each_op():
    world = World(False, debug_sync=True)
    world.manager.counters[0, 1] += 1

    for move in (world.open, world.commit):
        with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
            move()


# --- seats ----------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", range(1, 18))
def test_a_seat_has_as_many_blocks_as_drafts_can_touch(block_size):
    for num_drafts in range(1, 40):
        touched = max(
            len({(first + i) // block_size for i in range(num_drafts)})
            for first in range(block_size)
        )
        assert blocks_per_seat(num_drafts, block_size) == touched


@settings(max_examples=60)
@given(
    num_seats=st.integers(1, 5),
    moves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 63)), max_size=60),
)
# One request has the only seat; another needs it before and after the first one ends.
@example(num_seats=1, moves=[(0, 0), (0, 1), (9, 2), (4, 0), (9, 1)])
# Between two such steps one request comes and another one, with a seat, ends.
@example(
    num_seats=4, moves=[*[(0, 0)] * 5, (0, 16), (0, 0), (0, 0), (0, 23), (0, 0), (0, 8)]
)
def test_free_seats_are_assigned_and_kept(num_seats, moves):
    """With vLLM's own request states, which assign the most recently freed index
    first."""
    num_states = 6
    states = MagicMock(free_indices=list(range(num_states)), req_id_to_index={})
    live = states.req_id_to_index
    memory = DeviceMemory(torch.device("cpu"), None)
    seats, held, names = Seats(num_seats, num_states, 2, memory), {}, itertools.count()
    for kind, number in moves:
        if kind < 4 and len(live) < num_states:
            RequestState.add_request(states, f"r{next(names)}", 1, [1], 0, 9)
        elif kind < 6 and live:
            name = list(live)[number % len(live)]
            RequestState.remove_request(states, name)
            held.pop(name, None)
        in_step = [name for i, name in enumerate(live) if number >> i & 1]
        if not in_step:
            continue
        indices = numpy.array([live[name] for name in in_step])
        lacks = seats.lack(indices, live)
        of = {name: int(seats.of_state[index]) for name, index in live.items()}
        assert lacks == any(of[name] < 0 for name in in_step)
        has = [seat for seat in of.values() if seat >= 0]
        assert len(has) == len(set(has)) <= num_seats > max(has, default=-1)
        assert not lacks or len(has) == num_seats
        assert all(of[name] == seat for name, seat in held.items())
        held = {name: seat for name, seat in of.items() if seat >= 0}
        assert seats.on_device.tolist() == seats.of_state.tolist()


@pytest.mark.parametrize("entry_tokens", [3, 8])
def test_entries_that_do_not_divide_a_block_are_refused(entry_tokens):
    sentence = f"entry_tokens is {entry_tokens}; must divide the block size 4"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        StagedGroup(REGION, entry_tokens)


def test_step_numbers_wrap_around():
    """A new seat has no saved step."""
    shadow = World(True).manager.shadow
    assert not shadow.saved[0].any()
    shadow.step = 2**31 - 2
    for expected in (2**31 - 1, 1, 2):
        shadow.start_step()
        assert shadow.step == expected
