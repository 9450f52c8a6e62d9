# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager and ShadowBlocks beside what the simulation draws: memory, what
raises whatever the settings are, the invariants, what a seat takes.

tests/simulation plays windows, layouts and faults on the real manager: each move
between its states, each reason to fall back (guarantees 1, 2, 6, 7 and 9).
"""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from tests.simulation.engine import Fault, FaultyOps
from vllm_nwor import ops
from vllm_nwor.config import Mode, NworConfig, OnReject, Strict
from vllm_nwor.draft_manager import DraftCommitManager, NworError, State
from vllm_nwor.kv_layout import packed_layout, row_layout
from vllm_nwor.layer_tables import ALIGNMENT, DeviceMemory, LayerCache
from vllm_nwor.ops import SAVED_COLUMNS
from vllm_nwor.shadow_blocks import (
    ShadowBlocks,
    ShadowRegion,
    StagedGroup,
    blocks_per_seat,
)
from vllm_nwor.undo_log import num_bytes
from vllm_nwor.window import NumRejected, VerificationWindows

# Blocks of requests and, behind them, shadow blocks: two for each of two seats.
BLOCKS, SHADOW_BLOCKS, HEADS, SLOTS, DIM = 6, 4, 2, 4, 8
ROW_BYTES = 2 * HEADS * DIM  # of a token, in the two layers of a group
REGION = ShadowRegion(BLOCKS, 2, 2, BLOCKS, SLOTS)
TABLE = [[2, 1, 0], [4, 0, 0]]


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


class World:
    """A manager of groups with two layers each, heads outside slots and inside, and a
    step of two requests with two drafts and one. fails: an op, whose first call
    raises. has_packed: the second layer has a packing, and a launch, of its own."""

    def __init__(
        self,
        *is_staged,
        fails="none",
        strict=Strict.STARTUP,
        capacity=3,
        num_seats=2,
        storage=None,
        has_builtins=False,
        on_reject=OnReject.RESTORE,
        has_packed=False,
        debug_sync=False,
    ):
        shape = (BLOCKS + SHADOW_BLOCKS, HEADS, SLOTS, DIM)
        self.ops = FaultyOps()
        self.ops.arm(Fault(fails, 0, 0))
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
            NworConfig(
                mode=Mode.COW,
                strictness=strict,
                on_reject=on_reject,
                debug_sync=debug_sync,
            ),
            groups,
            capacity,
            storage,
            None if has_builtins else self.ops,
            {gid: StagedGroup(region, SLOTS) for gid, it in enumerate(is_staged) if it},
        )
        self.step = VerificationWindows(
            num_drafts=3,
            num_reqs=2,
            logits_indices=torch.arange(5, dtype=torch.int32),
            cu_num_logits=torch.tensor([3, 5], dtype=torch.int32),
            slot_mappings=[torch.tensor([5, 6, 7, 17, 18]) for _ in is_staged],
            block_tables=[torch.tensor(TABLE, dtype=torch.int32) for _ in is_staged],
            query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
            seq_lens=torch.tensor([8, 3], dtype=torch.int32),
        )

    def open(self):
        """Before the forward."""
        self.manager.stage(self.step)
        self.manager.begin(self.step)

    def commit(self):
        """All drafts were rejected."""
        rejected = NumRejected(torch.tensor([2, 1], dtype=torch.int32))
        self.manager.commit(rejected)


# --- what raises, and what is published -----------------------------------------------


@pytest.mark.parametrize("moment", [0, 2], ids=["before its work", "behind it"])
def test_a_stage_that_fails_is_told_and_touches_no_group_that_it_had_not_come_to(
    moment,
):
    """What an earlier step saved of them, or of the one that failed, need not fit this
    one."""
    world = World(True, True, strict=Strict.ALWAYS)
    world.open()
    world.commit()
    world.ops.arm(Fault("stage", 0, moment))
    mappings = [torch.tensor([5, 6, 17, 18]) for _ in range(2)]
    smaller = {
        "slot_mappings": mappings,
        "cu_num_logits": torch.tensor([2, 4], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 3], dtype=torch.int32),
    }

    with pytest.raises(NworError, match=r"^NWOR stage_failed: stage: planted"):
        world.manager.stage(structs.replace(world.step, **smaller))

    assert world.ops.calls == {"stage": 1, "unstage": 1}
    assert [table.tolist() for table in world.step.block_tables] == [TABLE, TABLE]
    assert [slots.tolist() for slots in mappings] == [[5, 6, 17, 18]] * 2


@pytest.mark.parametrize("strict", Strict)
@pytest.mark.parametrize("groups", [(True, True), (True,)])
def test_a_stage_that_fails_and_cannot_be_put_back_raises_always(groups, strict):
    """The undo log would save, and the forward write, what is no request's. It fails in
    the second launch: of another group, or of the same."""
    world = World(*groups, has_packed=len(groups) == 1, strict=strict)
    world.ops.arm(Fault("stage", 1, 0))
    world.ops.unstage = lambda *_: 1 // 0

    with pytest.raises(
        NworError, match=r"^NWOR stage_failed: a block table cannot be put back: "
    ):
        world.manager.stage(world.step)

    assert world.manager.fallbacks == {"stage_failed": 1}


@pytest.mark.parametrize("strict", Strict)
@pytest.mark.parametrize("call", range(3))
def test_a_table_that_cannot_be_put_back_raises_always_and_keeps_no_other(strict, call):
    world = World(True, True, True, strict=strict)
    world.open()
    world.ops.arm(Fault("unstage", call, 0))

    with pytest.raises(
        NworError, match=r"^NWOR step_failed: a block table cannot be put back: planted"
    ):
        world.manager.abort("step_failed")

    are_own = [table.tolist() == TABLE for table in world.step.block_tables]
    assert are_own == [gid != call for gid in range(3)]
    assert world.manager.fallbacks == {"step_failed": 1}
    assert world.manager.state is State.IDLE


@pytest.mark.parametrize(
    ("is_staged", "begins", "ends", "puts_back"),
    [(False, "log", "restore", {}), (True, "stage", "commit", {"unstage": 1})],
)
def test_after_a_failed_commit_strict_steps_go_no_further(
    is_staged, begins, ends, puts_back
):
    world = World(is_staged, strict=Strict.ALWAYS, fails=ends)
    world.open()
    with pytest.raises(NworError, match=r"^NWOR commit_failed: (restore|commit)_\w+: "):
        world.commit()

    for _ in range(2):
        world.manager.start_step()
        with pytest.raises(NworError, match="the commit before this step failed"):
            world.open()

    assert world.manager.state is State.FAILED
    assert world.ops.calls == {begins: 1, ends: 1} | puts_back
    assert world.manager.fallbacks == {"commit_failed": 1}


@pytest.mark.parametrize(
    ("capacity", "strict", "state", "more"),
    [
        (3, Strict.ALWAYS, State.LOGGED, {}),
        (2, Strict.NEVER, State.VANILLA, {"over_capacity": 1}),
    ],
)
def test_steps_without_seats_are_counted_and_never_raise(capacity, strict, state, more):
    world = World(False, True, num_seats=1, capacity=capacity, strict=strict)

    world.open()

    assert world.manager.state is state
    assert world.manager.fallbacks == {"no_seat": 1} | more


@pytest.mark.parametrize("kind", [(False,), (True,), (False, True)], ids=str)
def test_a_begin_that_finds_windows_drops_them(kind):
    """As if no step had started in between."""
    world = World(*kind)

    for _ in range(2):
        world.open()
        world.manager.check_state()
    assert world.manager.is_open
    world.commit()

    assert world.manager.fallbacks == {"stale_log": 1}
    assert world.manager.state is State.IDLE
    assert {str(table.tolist()) for table in world.step.block_tables} == {str(TABLE)}


@pytest.mark.parametrize("kind", [(False, False), (False, True)], ids=str)
def test_a_step_whose_restore_fails_goes_without_counts(kind):
    world = World(*kind, fails="restore")
    counts = []
    for _ in range(2):
        world.open()
        world.commit()
        counts.append(world.manager.counts)

    assert counts[0] is None
    (found,) = counts[1].read()
    assert found[:4] == (2, 3, 0, 3)  # of the second step alone


def test_guarantee_9_a_begin_that_is_missed_beside_staged_groups_is_counted():
    world = World(True, False)
    world.manager.stage(world.step)

    world.commit()

    assert world.manager.fallbacks == {"begin_missed": 1}
    assert world.manager.state is State.IDLE


def test_a_log_beside_staged_groups_goes_with_their_failed_commit():
    """Else the next step would restore it over another's bytes."""
    world = World(True, False, fails="commit")
    world.open()
    with pytest.raises(NworError, match=r"^NWOR commit_failed: commit_draft_layer: "):
        world.commit()
    world.manager.stage(world.step)
    world.manager.check_state()

    world.commit()

    assert "restore" not in world.ops.calls
    assert world.manager.fallbacks == {"commit_failed": 1, "begin_missed": 1}


@pytest.mark.parametrize("moment", ["stage", "commit", "publish"])
def test_an_interrupt_leaves_tables_that_abort_puts_back(moment):
    """As KeyboardInterrupt, which no part of ours catches."""
    world = World(True, strict=Strict.NEVER)

    def interrupt(*_):
        raise KeyboardInterrupt

    if moment == "publish":
        world.ops.arm(Fault("commit", 0, 0))
        world.open()
        with pytest.raises(NworError):
            world.commit()
        world.manager._copy_counters = interrupt
    else:
        op = {"stage": "stage", "commit": "commit_draft_layer"}[moment]
        original = getattr(world.ops, op)

        def interrupted(*arguments):
            original(*arguments)
            raise KeyboardInterrupt

        setattr(world.ops, op, interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.open()
        world.commit()

    world.manager.abort("step_failed")

    assert world.step.block_tables[0].tolist() == TABLE
    assert world.manager.state is State.IDLE


def test_counts_of_an_earlier_step_are_not_a_failed_ones():
    world = World(False)
    world.open()
    world.commit()
    assert world.manager.counts is not None
    world.ops.arm(Fault("restore", 0, 0))
    world.open()
    world.commit()
    assert world.manager.counts is None


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_staged", [False, True])
def test_given_storage_bounds_the_capacity(is_staged):
    """Shadow blocks keep their own things in it, too."""
    needed = num_bytes(5, ROW_BYTES, num_groups=1, num_layers=2)
    if is_staged:
        needed += StagedGroup(REGION, SLOTS).num_bytes
    storage = torch.zeros(needed + ROW_BYTES, dtype=torch.uint8)

    manager = World(is_staged, capacity=16, storage=storage).manager

    assert manager.capacity == 5
    assert manager.log_bytes == 5 * ROW_BYTES
    ours = [manager.groups[0].undo_log]
    if is_staged:
        ours.append(manager.shadow.saved[0])
    for tensor in ours:
        assert 0 <= tensor.data_ptr() - storage.data_ptr() < storage.numel()


@pytest.mark.parametrize("groups", [[], [(0, [])]])
def test_nothing_to_protect_is_an_error(groups):
    with pytest.raises(ValueError, match="groups is empty or has one without layers"):
        DraftCommitManager(NworConfig(mode=Mode.COW), groups, 16)


def test_no_room_for_one_draft_is_an_error():
    with pytest.raises(ValueError, match="capacity is 0 drafts of 32 bytes"):
        World(False, storage=torch.zeros(8, dtype=torch.uint8))


# --- invariants -----------------------------------------------------------------------


def log_slots_in(tensor):
    """Breaks a manager so that its log's slots lie in `tensor(manager)`."""
    return lambda m: setattr(m.groups[0], "log_slots", tensor(m).view(torch.int64))


def saved_in(tensor):
    """The same with what its shadow blocks save."""

    def break_it(manager):
        saved = manager.shadow.saved
        there = tensor(manager).view(-1).view(torch.int32)
        saved[0] = there[: saved[0].numel()].view(saved[0].shape)

    return break_it


def in_state(state):
    """The same without windows, in a state that nothing has led to."""

    def break_it(manager):
        manager.undo_log.abort()
        manager.state = state

    return break_it


def exchange_places(manager):
    table = manager.groups[0].tables[0].table
    table[:2, -1] = table[:2, -1].flip(0)


@pytest.mark.parametrize(
    ("number", "is_staged", "break_it"),
    [
        (1, False, lambda m: m.undo_log.abort()),
        (1, False, lambda m: setattr(m, "state", State.IDLE)),
        (1, True, lambda m: setattr(m, "state", State.LOGGED)),
        (1, True, lambda m: m.shadow.abort()),
        (2, False, in_state(State.FAILED)),
        (2, False, in_state(State.VANILLA)),
        (3, False, lambda m: m.groups[0].log_windows[2, 1].fill_(1)),
        (4, False, lambda m: m.groups[0].tables[0].table[1, 0].add_(1)),
        (4, False, exchange_places),
        (5, False, log_slots_in(lambda m: m.groups[0].layers[0].kv_cache.view(-1))),
        (5, False, log_slots_in(lambda m: m.counters.view(-1)[-1:])),
        (5, True, saved_in(lambda m: m.groups[0].layers[1].kv_cache.transpose(1, 2))),
        (5, True, saved_in(lambda m: m.groups[0].tables[0].table)),
        (6, False, lambda m: m.counters[0, 1].add_(1)),
    ],
)
def test_check_state_names_the_invariant_that_does_not_hold(
    number, is_staged, break_it
):
    world = World(is_staged)
    world.open()
    world.manager.check_state()

    break_it(world.manager)

    with pytest.raises(AssertionError, match=f"^NWOR invariant {number} does not hold"):
        world.manager.check_state()


def test_what_a_log_copies_poison_from_is_the_managers_too():
    manager = World(False, on_reject=OnReject.POISON).manager
    manager.check_state()

    log_slots_in(lambda m: m.groups[0].source.table.view(-1)[:3])(manager)

    with pytest.raises(AssertionError, match=r"^NWOR invariant 5 does not hold"):
        manager.check_state()


def test_debug_sync_checks_the_invariants_after_each_op():
    world = World(False, debug_sync=True)
    world.manager.counters[0, 1] += 1

    for move in (world.open, world.commit):
        with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
            move()


# --- what a seat takes ----------------------------------------------------------------


@pytest.mark.parametrize("block_size", range(1, 18))
def test_a_seat_has_a_block_for_each_that_drafts_can_touch(block_size):
    for num_drafts in range(1, 40):
        touched = max(
            len({(first + i) // block_size for i in range(num_drafts)})
            for first in range(block_size)
        )
        assert blocks_per_seat(num_drafts, block_size) == touched


def staged_group(entry_tokens):
    region = ShadowRegion(44, 3, 2, num_real_blocks=40, block_size=16)
    return StagedGroup(region, entry_tokens)


def shadow_blocks(group):
    memory = DeviceMemory(torch.device("cpu"), None)
    return ShadowBlocks([(0, group, [])], [], [], None, memory)


@pytest.mark.parametrize(("entry_tokens", "per_block"), [(16, 1), (8, 2), (1, 16)])
def test_a_group_counts_in_entries_of_the_workers_table(entry_tokens, per_block):
    group = staged_group(entry_tokens)

    assert group.first_entry == 44 * per_block
    assert group.num_real_entries == 40 * per_block
    assert group.span == 2 * per_block
    saved = shadow_blocks(group).saved[0]
    assert saved.shape == (3, SAVED_COLUMNS + 2 * group.span)
    assert saved.dtype == torch.int32
    assert not saved.any()
    assert saved.nbytes + ALIGNMENT == group.num_bytes


@pytest.mark.parametrize("entry_tokens", [3, 32])
def test_entries_that_do_not_divide_a_block_are_refused(entry_tokens):
    sentence = f"entry_tokens is {entry_tokens}; must divide the block size 16"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        staged_group(entry_tokens)


def test_the_last_number_of_a_step_is_followed_by_the_first():
    shadow = shadow_blocks(staged_group(16))
    shadow.step = 2**31 - 2
    for expected in (2**31 - 1, 1, 2):
        shadow.start_step()
        assert shadow.step == expected
