# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager on small caches with the real CPU ops: the transaction, its
states, and what becomes of a window when an op fails (guarantees 1, 2, 6 and 9).

tests/simulation does the same with drawn windows, layouts and faults.
"""

import itertools
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from vllm_nwor import ops
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import (
    DraftCommitManager,
    LayerCache,
    NworError,
    StagedGroup,
    State,
)
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import num_bytes
from vllm_nwor.shadow_pages import ShadowRegion
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows

# Blocks of requests and, behind them, shadow blocks: two for each of two seats.
BLOCKS, SHADOW_BLOCKS, HEADS, SLOTS, DIM = 6, 4, 2, 4, 8
ROW_BYTES = 2 * HEADS * DIM  # of a token, in the two layers of a group
REGION = ShadowRegion(BLOCKS, 2, 2, BLOCKS, SLOTS)

# A step of two requests, by its rows: 0 and 3 are the targets, which are always kept;
# 1 and 2 are the first request's drafts, 4 is the second's. Slots 4 and 16 hold
# committed rows of the same blocks, which attention reads in shadow blocks, too.
SLOT_MAPPING = [5, 6, 7, 17, 18]
TABLE = [[2, 1, 0], [4, 0, 0]]
SHADOW_SLOT_MAPPING = [29, 30, 31, 33, 34]
SHADOW_TABLE = [[2, 7, 0], [8, 0, 0]]
NUM_DRAFTS, TARGETS = 3, {0, 3}


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


class FailingOps:
    """The real ops, with one call out of each kind made to raise."""

    NAMES = {
        "log_cache_slots": "log",
        "restore_rejected_drafts": "restore",
        "stage": "stage",
        "commit_draft_layer": "commit",
        "unstage": "unstage",
    }

    def __init__(self, **fails):
        """fails: log, restore and so on: the call to raise, from 1."""
        self.calls = Counter()
        self.fails = fails

    def __getattr__(self, name):
        kind, op = self.NAMES[name], getattr(ops, name)

        def run(*args):
            self.calls[kind] += 1
            if self.calls[kind] == self.fails.get(kind):
                raise RuntimeError(f"planted failure in {kind} call {self.calls[kind]}")
            op(*args)

        return run


class World:
    """A manager of groups with two layers each, heads outside slots and inside, and
    the step above."""

    def __init__(
        self,
        *is_staged,
        num_seats=2,
        strict=Strict.STARTUP,
        capacity=NUM_DRAFTS,
        storage=None,
        **fails,
    ):
        """is_staged: of each KV-cache group, whether it has shadow pages."""
        torch.manual_seed(0)
        self.groups = [self._layers() for _ in is_staged]
        region = replace(REGION, num_seats=num_seats)
        self.ops = FailingOps(**fails)
        self.manager = DraftCommitManager(
            NworConfig(mode=Mode.COW, strictness=strict),
            list(enumerate(self.groups)),
            capacity,
            storage,
            self.ops,
            {gid: StagedGroup(region, SLOTS) for gid, it in enumerate(is_staged) if it},
        )
        self.is_staged = is_staged
        self.step = VerificationWindows(
            num_drafts=NUM_DRAFTS,
            logits_indices=torch.arange(5, dtype=torch.int32),
            cu_num_logits=torch.tensor([3, 5], dtype=torch.int32),
            slot_mappings=[torch.tensor(SLOT_MAPPING) for _ in is_staged],
            block_tables=[torch.tensor(TABLE, dtype=torch.int32) for _ in is_staged],
            query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
            seq_lens=torch.tensor([8, 3], dtype=torch.int32),
        )
        self.before = self.snapshot()

    def _layers(self):
        shape = (BLOCKS + SHADOW_BLOCKS, HEADS, SLOTS, DIM)
        caches = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(2)]
        caches[1] = caches[1].transpose(1, 2).contiguous().transpose(1, 2)
        return [LayerCache(str(i), c, row_layout(c)) for i, c in enumerate(caches)]

    def snapshot(self):
        """[layers, blocks, heads, slots, dim] of each group."""
        return [torch.stack([layer.kv_cache for layer in g]) for g in self.groups]

    def open(self):
        """Before the forward. Returns whether all is staged."""
        is_done = any(self.is_staged) and self.manager.stage(self.step)
        self.manager.begin(self.step)
        return is_done

    def forward(self):
        """Writes row i of the step where the slot mapping says."""
        for layers, slots in zip(self.groups, self.step.slot_mappings, strict=True):
            for row, slot in enumerate(slots.tolist()):
                for layer in layers:
                    layer.kv_cache[slot // SLOTS, :, slot % SLOTS] = 100 + row

    def change_all(self):
        """Other requests write every byte; the next step finds that."""
        for layer in itertools.chain(*self.groups):
            layer.kv_cache.add_(1)
        self.before = self.snapshot()

    def run(self, acceptance):
        self.open()
        self.forward()
        self.manager.commit(acceptance)

    def holds(self, *kept_of_groups):
        """Whether the caches of each group are as before, but for those rows of the
        step. Shadow blocks of staged groups may hold anything."""
        if len(kept_of_groups) == 1:
            kept_of_groups *= len(self.groups)
        for before, now, kept, is_staged in zip(
            self.before, self.snapshot(), kept_of_groups, self.is_staged, strict=True
        ):
            expected = before.clone()
            for row in kept:
                block, offset = divmod(SLOT_MAPPING[row], SLOTS)
                expected[:, block, :, offset] = 100 + row
            end = BLOCKS if is_staged else None
            if not torch.equal(now[:, :end], expected[:, :end]):
                return False
        return True

    def is_patched(self):
        """Of each group, whether shadow blocks are in its table, or None if it is
        neither that nor vLLM's own."""
        known = {
            str((TABLE, SLOT_MAPPING)): False,
            str((SHADOW_TABLE, SHADOW_SLOT_MAPPING)): True,
        }
        tables = zip(self.step.block_tables, self.step.slot_mappings, strict=True)
        return tuple(known.get(str((t.tolist(), s.tolist()))) for t, s in tables)


@pytest.fixture
def make():
    """Makes a World; at the end of the test every invariant of it holds."""
    made = []

    def make(*is_staged, **arguments):
        made.append(World(*is_staged, **arguments))
        return made[-1]

    yield make
    for world in made:
        world.manager.check_state()


def accepted(first, second):
    """Sampled ids that accept so many drafts of each request, and the bonus token."""
    ids = torch.full((2, 3), -1, dtype=torch.int32)
    ids[0, : first + 1] = 7
    ids[1, : second + 1] = 7
    return SampledIds(ids, 100)


def rejected(first, second):
    return NumRejected(torch.tensor([first, second], dtype=torch.int32))


ALL_ROWS = {0, 1, 2, 3, 4}
LOGGED, TWO_LOGGED, STAGED, MIXED = (False,), (False, False), (True,), (False, True)
KINDS = pytest.mark.parametrize("kind", [LOGGED, TWO_LOGGED, STAGED, MIXED], ids=str)


# --- steps that go well ---------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("acceptance", "kept"),
    [
        (accepted(2, 1), ALL_ROWS),
        (accepted(0, 0), TARGETS),
        (accepted(1, 0), TARGETS | {1}),
        (accepted(0, 1), TARGETS | {4}),
        (rejected(1, 0), TARGETS | {1, 4}),
        (rejected(2, 1), TARGETS),
    ],
)
@pytest.mark.parametrize("publishes", [True, False])
def test_guarantee_1_and_2_only_kept_rows_reach_a_requests_blocks(
    make, kind, acceptance, kept, publishes
):
    world = make(*kind)
    manager = world.manager
    assert manager.state is State.IDLE
    to = torch.full_like(manager.counters, -1) if publishes else None

    assert world.open() is (kind == STAGED)
    assert manager.state is (State.STAGED if any(kind) else State.LOGGED)
    assert manager.is_open
    assert world.is_patched() == kind
    manager.check_state()
    world.forward()
    assert manager.commit(acceptance, to) is publishes

    assert manager.state is State.IDLE
    assert world.is_patched() == (False,) * len(kind)
    assert world.holds(kept)
    num_accepted, num_rejected = len(kept) - 2, 5 - len(kept)
    windows = [2, 3, num_accepted, num_rejected]
    # Staged groups come first. A committed row before each target is copied to be read.
    assert manager.counters.tolist() == [
        [*windows, 0, 0, 2 * ROW_BYTES, len(kept) * ROW_BYTES]
        if is_staged
        else [*windows, num_rejected * ROW_BYTES, 0, 0, 0]
        for is_staged in sorted(kind, reverse=True)
    ]
    assert to is None or torch.equal(to, manager.counters)
    # One launch a group and op, whatever the number of layers.
    logged, staged = kind.count(False), kind.count(True)
    expected = {"log": logged, "restore": logged, "stage": staged, "commit": staged}
    assert world.ops.calls == Counter(expected)
    assert not manager.fallbacks


def test_drafts_are_verified_in_shadow_blocks_beside_the_rows_before_them(make):
    world = make(True)

    world.open()
    world.forward()

    assert world.holds([])
    (verified,), (before,) = world.snapshot(), world.before
    assert torch.equal(verified[:, 7, :, 0], before[:, 1, :, 0])
    assert torch.equal(verified[:, 8, :, 0], before[:, 4, :, 0])


@KINDS
def test_a_step_without_drafts_does_nothing(make, kind):
    world = make(*kind)
    world.step = structs.replace(world.step, num_drafts=0)

    world.run(accepted(0, 0))
    world.manager.end_unlogged(0)

    assert world.manager.state is State.IDLE
    assert not world.ops.calls
    assert not world.manager.fallbacks


# --- windows that are never committed -------------------------------------------------


@KINDS
def test_aborted_windows_leave_the_cache_as_vllm_left_it(make, kind, caplog):
    """The blocks of staged groups were not written to."""
    world = make(*kind)
    world.open()
    world.forward()

    with caplog.at_level(logging.WARNING):
        world.manager.abort("step_failed")

    assert world.manager.state is State.IDLE
    assert world.is_patched() == (False,) * len(kind)
    assert world.holds(*([] if is_staged else ALL_ROWS for is_staged in kind))
    assert world.manager.fallbacks == {"step_failed": 1}
    assert not world.manager.counters.any()
    (record,) = caplog.records
    assert record.getMessage() == (
        "NWOR step_failed: windows with 3 drafts were dropped; the step ran as vanilla "
        "vLLM (further ones are counted in vllm:nwor_fallbacks)"
    )


@KINDS
def test_a_step_that_finds_windows_drops_and_counts_them(make, kind):
    world = make(*kind)
    world.open()
    world.forward()
    world.change_all()

    world.run(accepted(0, 0))

    assert world.is_patched() == (False,) * len(kind)
    assert world.holds(TARGETS)
    assert world.manager.fallbacks == {"stale_log": 1}


def test_a_log_of_an_aborted_step_is_never_restored(make):
    """Nor by a step whose begin was missed."""
    world = make(*MIXED)
    world.open()
    world.manager.abort("step_failed")
    world.forward()
    written, _ = world.snapshot()

    world.manager.stage(world.step)
    world.manager.commit(accepted(0, 0))

    assert torch.equal(world.snapshot()[0], written)


# --- failures -------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2])
def test_guarantee_6_a_failing_begin_turns_the_window_into_vanilla(make, call, caplog):
    world = make(*TWO_LOGGED, log=call)

    with caplog.at_level(logging.WARNING):
        world.run(accepted(0, 0))

    assert world.holds(ALL_ROWS)
    assert world.manager.state is State.VANILLA
    assert world.manager.fallbacks == {"begin_failed": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"NWOR begin_failed: log_cache_slots: planted failure in log call {call}; the "
        "step ran as vanilla vLLM (further ones are counted in vllm:nwor_fallbacks)"
    ]


@pytest.mark.parametrize("call", [1, 2])
def test_guarantee_6_a_failing_commit_leaves_old_or_new_bytes(make, call):
    world = make(*TWO_LOGGED, restore=call)

    world.run(accepted(0, 0))

    kept = [TARGETS, TARGETS]
    kept[call - 1] = ALL_ROWS
    assert world.holds(*kept)
    assert world.manager.fallbacks == {"commit_failed": 1}
    assert world.manager.state is State.FAILED


@pytest.mark.parametrize("op", ["log", "restore"])
def test_an_undo_log_that_fails_beside_staged_groups_is_of_its_own_groups_only(
    make, op
):
    world = make(*MIXED, **{op: 1})
    to = torch.zeros_like(world.manager.counters)

    world.open()
    assert world.manager.state is State.STAGED
    world.forward()
    assert world.manager.commit(accepted(1, 0), to)

    assert world.holds(ALL_ROWS, TARGETS | {1})
    name = {"log": "begin_failed", "restore": "commit_failed"}[op]
    assert world.manager.fallbacks == {name: 1}
    assert world.manager.counters[:, 1].tolist() == [3, 0]
    assert torch.equal(to, world.manager.counters)
    assert world.manager.state is (State.IDLE if op == "log" else State.FAILED)


def test_counters_that_cannot_be_published_are_not_said_to_be(make):
    world = make(*MIXED, restore=1)
    world.manager._copy_counters = lambda *_: 1 // 0
    world.open()

    to = torch.zeros_like(world.manager.counters)
    assert not world.manager.commit(accepted(1, 0), to)


def test_a_stage_that_fails_leaves_the_step_to_the_log(make, caplog):
    world = make(True, stage=1)

    with caplog.at_level(logging.WARNING):
        assert world.open() is False
    assert world.manager.state is State.LOGGED
    assert world.is_patched() == (False,)
    world.forward()
    world.manager.commit(accepted(0, 0))

    assert world.holds(TARGETS)
    assert world.manager.fallbacks == {"stage_failed": 1}
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "NWOR stage_failed: stage: planted failure in stage call 1; the step uses the "
        "undo log"
    )


@pytest.mark.parametrize("strict", list(Strict))
def test_a_commit_from_shadow_pages_that_fails_raises_always(make, strict):
    """Accepted tokens would not be in the cache: no step may go on from there."""
    world = make(True, strict=strict, commit=1)

    with pytest.raises(
        NworError,
        match=r"^NWOR commit_failed: commit_draft_layer: planted failure in commit "
        r"call 1; accepted tokens of this step are not in the KV cache$",
    ):
        world.run(accepted(2, 1))

    assert world.is_patched() == (False,)
    assert world.holds([])
    assert world.manager.state is State.FAILED
    assert world.manager.fallbacks == {"commit_failed": 1}
    # The next step is staged again.
    world.run(accepted(2, 1))
    assert world.manager.state is State.IDLE
    assert world.holds(ALL_ROWS)


@pytest.mark.parametrize("strict", list(Strict))
def test_a_table_that_cannot_be_put_back_raises_always(make, strict):
    world = make(True, strict=strict, unstage=1)
    world.open()

    with pytest.raises(
        NworError,
        match=r"^NWOR stale_log: a block table cannot be put back: planted failure",
    ):
        world.manager.abort("stale_log")

    assert world.manager.fallbacks == {"stale_log": 1}
    assert world.manager.state is State.IDLE


def test_after_a_failed_restore_the_next_begin_starts_anew(make):
    world = make(False, restore=1)
    manager = world.manager
    world.run(accepted(0, 0))

    manager.abort("test")  # the next step is entered; it has no drafts
    manager.end_unlogged(0)
    assert manager.state is State.FAILED
    manager.end_unlogged(3)  # one that begin never saw
    assert manager.state is State.FAILED
    world.change_all()
    world.run(accepted(0, 0))

    assert world.holds(TARGETS)
    assert manager.state is State.IDLE
    assert manager.fallbacks == {"commit_failed": 1, "begin_missed": 1}


def test_after_a_failed_restore_strict_steps_go_no_further(make):
    world = make(False, strict=Strict.ALWAYS, restore=1)
    with pytest.raises(
        NworError, match=r"^NWOR commit_failed: restore_rejected_drafts"
    ):
        world.run(accepted(0, 0))

    for _ in range(2):
        with pytest.raises(NworError, match="the restore before this step failed"):
            world.open()

    assert world.manager.state is State.FAILED
    assert world.ops.calls == {"log": 1, "restore": 1}
    assert world.manager.fallbacks == {"commit_failed": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 2}, "over_capacity: 3 drafts do not fit the undo log of 2 rows"),
        ({"log": 1}, "begin_failed: log_cache_slots: planted failure in log"),
        ({"stage": 1}, "stage_failed: stage: planted failure in stage"),
    ],
)
def test_strict_raises_where_the_default_falls_back(make, arguments, message):
    world = make("stage" in arguments, strict=Strict.ALWAYS, **arguments)

    with pytest.raises(NworError, match=f"^NWOR {message}"):
        world.open()

    assert world.is_patched() == (False,)
    assert not world.manager.is_open


def test_strict_raises_on_windows_that_were_left_and_on_missed_ones(make):
    world = make(False, strict=Strict.ALWAYS)
    world.open()

    with pytest.raises(NworError, match=r"^NWOR stale_log: windows with 3 drafts were"):
        world.open()
    with pytest.raises(NworError, match=r"^NWOR begin_missed: 3 drafts were sampled"):
        world.manager.end_unlogged(3)


def test_guarantee_9_drafts_that_begin_never_saw_are_counted(make, caplog):
    manager = make(False).manager

    with caplog.at_level(logging.WARNING):
        manager.end_unlogged(3)
        manager.end_unlogged(0)  # a step without drafts
        manager.end_unlogged(4)

    assert manager.state is State.IDLE
    assert manager.fallbacks == {"begin_missed": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "NWOR begin_missed: 3 drafts were sampled that begin never saw; the step ran "
        "as vanilla vLLM (further ones are counted in vllm:nwor_fallbacks)"
    ]


# --- steps that are too large ---------------------------------------------------------


@pytest.mark.parametrize("kind", [LOGGED, MIXED], ids=str)
def test_more_drafts_than_the_log_holds_run_as_vanilla(make, kind, caplog):
    """A step is protected whole or not at all. It is logged once and counted always."""
    world = make(*kind, capacity=2)
    ends = [lambda: world.manager.end_unlogged(3), lambda: world.manager.abort("test")]

    with caplog.at_level(logging.WARNING):
        for end in ends:
            world.run(accepted(0, 0))
            assert world.manager.state is State.VANILLA
            assert world.is_patched() == (False,) * len(kind)
            end()
            assert world.manager.state is State.IDLE

    assert world.holds(ALL_ROWS)
    assert not world.ops.calls
    assert world.manager.fallbacks == {"over_capacity": 2}
    assert len(caplog.records) == 1


def test_a_step_without_seats_that_does_not_fit_the_log_counts_both(make):
    world = make(*MIXED, capacity=2, num_seats=1)

    world.open()

    assert world.manager.state is State.VANILLA
    assert world.manager.fallbacks == {"no_seat": 1, "over_capacity": 1}


def test_a_log_too_small_is_no_limit_where_all_is_staged(make):
    world = make(True, capacity=2)

    world.open()

    assert world.manager.state is State.STAGED


@pytest.mark.parametrize("strict", [Strict.STARTUP, Strict.ALWAYS])
def test_a_step_with_more_requests_than_seats_is_logged_whole(make, strict):
    """Not a failure: strict steps go on."""
    world = make(True, True, strict=strict, num_seats=1)

    assert world.open() is False
    assert world.manager.state is State.LOGGED
    world.forward()
    world.manager.commit(accepted(1, 0))

    assert world.is_patched() == (False, False)
    assert world.holds(TARGETS | {1})
    assert world.manager.fallbacks == {"no_seat": 1}
    assert world.ops.calls == {"log": 2, "restore": 2}


def test_zeros_in_front_of_the_cumulative_numbers_need_no_seat(make):
    world = make(True, num_seats=2)
    zeros = torch.tensor([0, 3, 5], dtype=torch.int32)

    assert world.manager.stage(
        structs.replace(world.step, cu_num_logits=zeros, num_leading_zeros=1)
    )


@pytest.mark.parametrize("is_staged", [False, True])
def test_given_storage_bounds_the_capacity(make, is_staged):
    """Shadow pages keep their own things in it, too."""
    needed = num_bytes(5, ROW_BYTES, num_groups=1, num_layers=2)
    if is_staged:
        needed += StagedGroup(REGION, SLOTS).num_bytes
    storage = torch.zeros(needed + ROW_BYTES, dtype=torch.uint8)

    manager = make(is_staged, capacity=16, storage=storage).manager

    assert manager.capacity == 5
    assert manager.log_bytes == 5 * ROW_BYTES
    ours = [manager.groups[0].undo_log]
    if is_staged:
        ours.append(manager.shadow.groups[0].saved)
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


def exchange_places(manager):
    table = manager.groups[0].tables[0].table
    table[:2, -1] = table[:2, -1].flip(0)


@pytest.mark.parametrize(
    ("number", "is_staged", "break_it"),
    [
        (1, False, lambda m: setattr(m, "_num_drafts", 0)),
        (1, True, lambda m: setattr(m, "_num_drafts", 0)),
        (1, True, lambda m: setattr(m, "state", State.LOGGED)),
        (1, True, lambda m: m.shadow.abort()),
        (2, False, lambda m: vars(m).update(state=State.FAILED, _num_drafts=0)),
        (2, False, lambda m: vars(m).update(state=State.VANILLA, _num_drafts=0)),
        (3, False, lambda m: m.groups[0].log_windows[2, 1].fill_(1)),
        (4, False, lambda m: m.groups[0].tables[0].table[1, 0].add_(1)),
        (4, False, exchange_places),
        (5, False, log_slots_in(lambda m: m.groups[0].layers[0].kv_cache.view(-1))),
        (5, False, log_slots_in(lambda m: m.counters.view(-1)[-1:])),
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


def test_debug_sync_checks_the_invariants_after_each_op():
    world = World(False)
    world.manager.config = NworConfig(mode=Mode.COW, debug_sync=True)
    world.manager.counters[0, 1] += 1

    with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
        world.open()
    with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
        world.manager.commit(accepted(0, 0))
