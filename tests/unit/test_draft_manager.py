# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager on small caches with the real CPU ops: each move between its
states, each reason to fall back, and what is raised where (guarantees 1, 2, 6 and 9).

tests/simulation does the same with drawn windows, layouts and faults.
"""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from tests.simulation.engine import Fault, FaultyOps
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
NUM_DRAFTS, TARGETS, ALL_ROWS = 3, {0, 3}, {0, 1, 2, 3, 4}

# Of each KV-cache group, whether it has shadow pages.
LOGGED, TWO_LOGGED, STAGED, MIXED = (False,), (False, False), (True,), (False, True)
KINDS = pytest.mark.parametrize("kind", [LOGGED, TWO_LOGGED, STAGED, MIXED], ids=str)


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


class World:
    """A manager of groups with two layers each, heads outside slots and inside, and
    the step above. Its methods without arguments are moves, for `play`."""

    def __init__(
        self,
        *is_staged,
        fails=None,
        num_seats=2,
        strict=Strict.STARTUP,
        capacity=NUM_DRAFTS,
        storage=None,
    ):
        """is_staged: a kind. fails: an op that raises, or it and which of its calls."""
        torch.manual_seed(0)
        self.is_staged = is_staged
        self.groups = [self._layers() for _ in is_staged]
        region = replace(REGION, num_seats=num_seats)
        self.ops = FaultyOps()
        op, call = fails if isinstance(fails, tuple) else (fails, 0)
        self.ops.arm(Fault(op, call, 0))
        self.manager = DraftCommitManager(
            NworConfig(mode=Mode.COW, strictness=strict),
            list(enumerate(self.groups)),
            capacity,
            storage,
            self.ops,
            {gid: StagedGroup(region, SLOTS) for gid, it in enumerate(is_staged) if it},
        )
        self.step = VerificationWindows(
            num_drafts=NUM_DRAFTS,
            num_reqs=2,
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

    def play(self, moves):
        """Words: a move, and behind a = the state after it. Shadow blocks are in the
        tables of staged groups in state STAGED, and only there."""
        for move, _, state in (word.partition("=") for word in moves.split()):
            getattr(self, move)()
            is_staged = self.manager.state is State.STAGED
            assert self.manager.state.value == (state or self.manager.state.value)
            assert self.patched() == tuple(it and is_staged for it in self.is_staged)
            self.manager.check_state()

    def start(self):
        """The runner starts a step."""
        self.manager.start_step()

    def stage(self):
        return any(self.is_staged) and self.manager.stage(self.step)

    def open(self):
        """Before the forward. Returns whether all is staged."""
        is_done = self.stage()
        self.manager.begin(self.step)
        return is_done

    def forward(self):
        """Writes row i of the step where the slot mapping says."""
        for layers, slots in zip(self.groups, self.step.slot_mappings, strict=True):
            for row, slot in enumerate(slots.tolist()):
                for layer in layers:
                    layer.kv_cache[slot // SLOTS, :, slot % SLOTS] = 100 + row

    def commit(self):
        """All drafts were rejected."""
        self.manager.commit(rejected(2, 1))

    def abort(self):
        self.manager.abort("step_failed")

    def end(self):
        """Of a step without drafts, or that was left to vLLM."""
        self.manager.end_unlogged(0)

    def missed(self):
        """The end of a step with drafts that begin never saw."""
        self.manager.end_unlogged(3)

    def change(self):
        """Other requests write every byte; the next step finds that."""
        for layer in itertools.chain(*self.groups):
            layer.kv_cache.add_(1)
        self.before = self.snapshot()

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

    def patched(self):
        """Of each group, whether shadow blocks are in its table, or None if it is
        neither that nor vLLM's own."""
        known = {
            str((TABLE, SLOT_MAPPING)): False,
            str((SHADOW_TABLE, SHADOW_SLOT_MAPPING)): True,
        }
        tables = zip(self.step.block_tables, self.step.slot_mappings, strict=True)
        return tuple(known.get(str((t.tolist(), s.tolist()))) for t, s in tables)


def rejected(first, second):
    return NumRejected(torch.tensor([first, second], dtype=torch.int32))


def accepted(first, second):
    """Sampled ids that accept so many drafts of each request, and the bonus token."""
    ids = torch.full((2, 3), -1, dtype=torch.int32)
    ids[0, : first + 1] = 7
    ids[1, : second + 1] = 7
    return SampledIds(ids, 100)


@KINDS
@pytest.mark.parametrize(
    ("acceptance", "kept"),
    [(accepted(2, 0), {0, 1, 2, 3}), (rejected(1, 0), {0, 1, 3, 4})],
)
@pytest.mark.parametrize("publishes", [True, False])
def test_guarantee_1_and_2_only_kept_rows_reach_a_requests_blocks(
    kind, acceptance, kept, publishes
):
    world = World(*kind)
    manager = world.manager
    to = torch.full_like(manager.counters, -1) if publishes else None

    assert world.open() is (kind == STAGED)
    assert manager.is_open
    world.forward()
    assert manager.commit(acceptance, to) is publishes

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
    assert {op: world.ops.calls[op] for op in expected} == expected
    assert not manager.fallbacks


@KINDS
def test_a_step_without_drafts_does_nothing(kind):
    world = World(*kind)
    world.step = structs.replace(world.step, num_drafts=0)

    world.play("start=idle open=idle forward commit=idle end=idle")

    assert not world.ops.calls
    assert not world.manager.fallbacks


# The moves of a kind and what it was given; the fallbacks counted, each logged once;
# and the rows that are in the cache at the end, or of each group.
LOG = "open=logged forward commit=idle"
STAGE = "open=staged forward commit=idle"
ABORT = "open forward abort=idle"
STALE = "open forward change open forward commit=idle"
FAIL = "open=logged forward commit=failed"
LEAVE = "open=vanilla forward end=idle"
VANILLA = f"{LEAVE} open=vanilla abort=idle"
# FAILED lasts until a step has drafts again, which starts anew.
AGAIN = f"{FAIL} start=failed end=failed missed=failed change {LOG}"
RESTORE_2 = {"fails": ("restore", 1)}
MOVES = [
    (LOGGED, {}, LOG, {}, [TARGETS]),
    (STAGED, {}, STAGE, {}, [TARGETS]),
    (MIXED, {}, STAGE, {}, [TARGETS]),
    # Windows that are never committed: the cache is as vLLM left it.
    (LOGGED, {}, ABORT, {"step_failed": 1}, [ALL_ROWS]),
    (STAGED, {}, ABORT, {"step_failed": 1}, [{}]),
    (MIXED, {}, ABORT, {"step_failed": 1}, [ALL_ROWS, {}]),
    (LOGGED, {}, STALE, {"stale_log": 1}, [TARGETS]),
    (STAGED, {}, STALE, {"stale_log": 1}, [TARGETS]),
    (MIXED, {}, STALE, {"stale_log": 1}, [TARGETS]),
    (MIXED, {}, "open forward start=idle end", {"stale_log": 1}, [ALL_ROWS, {}]),
    (LOGGED, {}, "missed=idle end=idle missed=idle", {"begin_missed": 2}, [{}]),
    # An op that fails; behind what failed nothing else is lost.
    (TWO_LOGGED, {"fails": "log"}, LEAVE, {"begin_failed": 1}, [ALL_ROWS]),
    (TWO_LOGGED, {"fails": ("log", 1)}, LEAVE, {"begin_failed": 1}, [ALL_ROWS]),
    (TWO_LOGGED, {"fails": "restore"}, FAIL, {"commit_failed": 1}, [ALL_ROWS, TARGETS]),
    (TWO_LOGGED, RESTORE_2, FAIL, {"commit_failed": 1}, [TARGETS, ALL_ROWS]),
    (
        LOGGED,
        {"fails": "restore"},
        AGAIN,
        {"commit_failed": 1, "begin_missed": 1},
        [TARGETS],
    ),
    (STAGED, {"fails": "stage"}, LOG, {"stage_failed": 1}, [TARGETS]),
    # A step is protected whole or not at all.
    (LOGGED, {"capacity": 2}, VANILLA, {"over_capacity": 2}, [ALL_ROWS]),
    (MIXED, {"capacity": 2}, VANILLA, {"over_capacity": 2}, [ALL_ROWS]),
    (STAGED, {"capacity": 2}, STAGE, {}, [TARGETS]),
    ((True, True), {"num_seats": 1}, LOG, {"no_seat": 1}, [TARGETS]),
    (
        MIXED,
        {"num_seats": 1, "capacity": 2},
        VANILLA,
        {"no_seat": 2, "over_capacity": 2},
        [ALL_ROWS],
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "moves", "fallbacks", "kept"), MOVES)
def test_the_moves_between_states(kind, arguments, moves, fallbacks, kept, caplog):
    world = World(*kind, **arguments)

    with caplog.at_level(logging.WARNING):
        world.play(moves)

    assert world.holds(*kept)
    assert world.manager.fallbacks == fallbacks
    messages = [record.getMessage() for record in caplog.records]
    assert sorted(text.split()[1] for text in messages) == sorted(
        f"{reason}:" for reason in fallbacks
    )
    for text in messages:
        assert text.endswith("(further ones are counted in vllm:nwor_fallbacks)")


def test_a_log_of_an_aborted_step_is_never_restored():
    """Nor by a step whose begin was missed."""
    world = World(*MIXED)
    world.play("open abort forward")
    written, _ = world.snapshot()

    world.play("stage=staged commit=idle")

    assert torch.equal(world.snapshot()[0], written)


# --- failures beside staged groups, and of what is published --------------------------


@pytest.mark.parametrize(
    ("fails", "reason", "after"),
    [
        ("log", "begin_failed", State.IDLE),
        ("restore", "commit_failed", State.FAILED),
    ],
)
def test_an_undo_log_that_fails_beside_staged_groups_is_of_its_own_groups_only(
    fails, reason, after
):
    world = World(*MIXED, fails=fails)
    to = torch.zeros_like(world.manager.counters)

    world.play("open=staged forward")
    assert world.manager.commit(accepted(1, 0), to)

    assert world.holds(ALL_ROWS, TARGETS | {1})
    assert world.manager.fallbacks == {reason: 1}
    assert world.manager.counters[:, 1].tolist() == [3, 0]
    assert torch.equal(to, world.manager.counters)
    assert world.manager.state is after


@pytest.mark.parametrize("kind", [TWO_LOGGED, MIXED], ids=str)
@pytest.mark.parametrize("copies", [True, False])
def test_counters_of_a_failed_restore_are_published_if_they_can_be(kind, copies):
    world = World(*kind, fails="restore")
    if not copies:
        world.manager._copy_counters = lambda *_: 1 // 0
    to = torch.full_like(world.manager.counters, -1)
    world.open()

    assert world.manager.commit(accepted(1, 0), to) is copies
    assert not copies or torch.equal(to, world.manager.counters)


# --- what raises ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "moves", "message"),
    [
        (
            *(LOGGED, {"capacity": 2}, "open"),
            "over_capacity: 3 drafts do not fit the undo log of 2 rows",
        ),
        (LOGGED, {"fails": "log"}, "open", "begin_failed: log_cache_slots: planted"),
        (STAGED, {"fails": "stage"}, "open", "stage_failed: stage: planted"),
        (
            *(LOGGED, {"fails": "restore"}, "open commit"),
            "commit_failed: restore_rejected_drafts: planted",
        ),
        (LOGGED, {}, "open open", "stale_log: windows with 3 drafts were dropped"),
        (LOGGED, {}, "missed", "begin_missed: 3 drafts were sampled that begin never"),
    ],
)
def test_strict_raises_where_the_default_falls_back(kind, arguments, moves, message):
    world = World(*kind, strict=Strict.ALWAYS, **arguments)

    with pytest.raises(NworError, match=f"^NWOR {message}"):
        world.play(moves)

    assert world.patched() == (False,)
    assert not world.manager.is_open


def test_strict_steps_go_on_without_seats():
    world = World(True, True, num_seats=1, strict=Strict.ALWAYS)

    world.play("open=logged forward commit=idle")

    assert world.manager.fallbacks == {"no_seat": 1}


@pytest.mark.parametrize("strict", list(Strict))
def test_a_commit_from_shadow_pages_that_fails_raises_always(strict):
    """Accepted tokens would not be in the cache: no step may go on from there."""
    world = World(*STAGED, strict=strict, fails="commit")

    with pytest.raises(
        NworError,
        match=r"^NWOR commit_failed: commit_draft_layer: planted.*; accepted tokens of "
        r"this step are not in the KV cache$",
    ):
        world.play("open forward commit")

    assert world.patched() == (False,)
    assert world.holds([])
    assert world.manager.state is State.FAILED
    assert world.manager.fallbacks == {"commit_failed": 1}
    # The next step is staged again.
    world.play("open=staged forward commit=idle")


@pytest.mark.parametrize("strict", list(Strict))
def test_a_table_that_cannot_be_put_back_raises_always(strict):
    world = World(*STAGED, strict=strict, fails="unstage")
    world.open()

    with pytest.raises(
        NworError, match=r"^NWOR step_failed: a block table cannot be put back: planted"
    ):
        world.abort()

    assert world.manager.fallbacks == {"step_failed": 1}
    assert world.manager.state is State.IDLE


def test_after_a_failed_restore_strict_steps_go_no_further():
    world = World(*LOGGED, strict=Strict.ALWAYS, fails="restore")
    with pytest.raises(NworError, match=r"^NWOR commit_failed: restore_rejected"):
        world.play("open forward commit")

    for _ in range(2):
        with pytest.raises(NworError, match="the restore before this step failed"):
            world.open()

    assert world.manager.state is State.FAILED
    assert world.ops.calls == {"log": 1, "restore": 1}
    assert world.manager.fallbacks == {"commit_failed": 1}


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_staged", [False, True])
def test_given_storage_bounds_the_capacity(is_staged):
    """Shadow pages keep their own things in it, too."""
    needed = num_bytes(5, ROW_BYTES, num_groups=1, num_layers=2)
    if is_staged:
        needed += StagedGroup(REGION, SLOTS).num_bytes
    storage = torch.zeros(needed + ROW_BYTES, dtype=torch.uint8)

    manager = World(is_staged, capacity=16, storage=storage).manager

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
    world.play("open")

    break_it(world.manager)

    with pytest.raises(AssertionError, match=f"^NWOR invariant {number} does not hold"):
        world.manager.check_state()


def test_debug_sync_checks_the_invariants_after_each_op():
    world = World(False)
    world.manager.config = NworConfig(mode=Mode.COW, debug_sync=True)
    world.manager.counters[0, 1] += 1

    for move in (world.open, world.commit):
        with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
            move()
