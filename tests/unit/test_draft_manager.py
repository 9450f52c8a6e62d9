# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager on small caches with the real CPU ops: the transaction, its
states, and what becomes of a window when an op fails (guarantees 1, 2, 6 and 9)."""

import logging
import pickle
from collections import Counter

import pytest
import torch

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
from vllm_nwor.metrics import GroupInfo
from vllm_nwor.report import Report
from vllm_nwor.shadow_pages import ShadowRegion
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows

BLOCKS, HEADS, SLOTS, DIM = 6, 2, 4, 8
VOCAB = 100
# Two requests: 2 drafts in slots 5 and 6, one draft in slot 17; slots 4 and 16 hold
# the tokens that are always kept.
SLOT_MAPPING = torch.tensor([4, 5, 6, 16, 17])
DRAFT_SLOTS = [5, 6, 17]


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
        """fails: log_call, restore_call and so on: the call to raise, from 1."""
        self.calls = Counter()
        self.fails = fails

    def __getattr__(self, name):
        kind, op = self.NAMES[name], getattr(ops, name)

        def run(*args):
            self.calls[kind] += 1
            if self.calls[kind] == self.fails.get(f"{kind}_call"):
                raise RuntimeError(f"planted failure in {kind} call {self.calls[kind]}")
            op(*args)

        return run


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def layers(num_layers=3, num_blocks=BLOCKS):
    torch.manual_seed(0)
    caches = [
        torch.randint(0, 256, (num_blocks, HEADS, SLOTS, DIM), dtype=torch.uint8)
        for _ in range(num_layers)
    ]
    return [
        LayerCache(f"layer.{i}", cache, row_layout(cache))
        for i, cache in enumerate(caches)
    ]


@pytest.fixture(autouse=True)
def managers(monkeypatch):
    """Those that a test made; they end it with every invariant as it should be."""
    made = []
    init = DraftCommitManager.__init__

    def keep(manager, *args, **kwargs):
        init(manager, *args, **kwargs)
        made.append(manager)

    monkeypatch.setattr(DraftCommitManager, "__init__", keep)
    yield made
    for manager in made:
        manager.check_state()


def manager_of(groups, capacity=16, strict=Strict.STARTUP, **kwargs):
    return DraftCommitManager(
        NworConfig(mode=Mode.COW, strictness=strict), groups, capacity, **kwargs
    )


def windows(num_groups=1):
    return VerificationWindows(
        num_drafts=3,
        logits_indices=torch.arange(5, dtype=torch.int32),
        cu_num_logits=torch.tensor([3, 5], dtype=torch.int32),
        slot_mappings=[SLOT_MAPPING] * num_groups,
    )


def accepted(first, second):
    """Sampled ids that accept so many drafts of each request, and the bonus token."""
    ids = torch.full((2, 3), -1, dtype=torch.int32)
    ids[0, : first + 1] = 7
    ids[1, : second + 1] = 7
    return SampledIds(ids, VOCAB)


def forward(cache_layers):
    """What vLLM's forward does to the cache: every slot of the step is written."""
    for layer in cache_layers:
        for slot in SLOT_MAPPING.tolist():
            cell = layer.kv_cache[slot // SLOTS, :, slot % SLOTS]
            cell.copy_(255 - cell)


def snapshot(cache_layers):
    return torch.stack([layer.kv_cache.clone() for layer in cache_layers])


def expected(before, after, rejected_slots):
    result = after.clone()
    for slot in rejected_slots:
        block, offset = divmod(slot, SLOTS)
        result[:, block, :, offset] = before[:, block, :, offset]
    return result


@pytest.mark.parametrize(
    ("acceptance", "rejected"),
    [
        (accepted(2, 1), []),
        (accepted(0, 0), [5, 6, 17]),
        (accepted(1, 0), [6, 17]),
        (NumRejected(torch.tensor([1, 0], dtype=torch.int32)), [6]),
        (NumRejected(torch.tensor([2, 1], dtype=torch.int32)), [5, 6, 17]),
    ],
)
def test_guarantee_1_and_2_rejected_slots_are_restored_and_nothing_else(
    acceptance, rejected
):
    cache_layers = layers()
    manager = manager_of([(0, cache_layers)])
    before = snapshot(cache_layers)

    manager.begin(windows())
    forward(cache_layers)
    after = snapshot(cache_layers)
    manager.commit(acceptance)

    assert torch.equal(snapshot(cache_layers), expected(before, after, rejected))
    slot_bytes = 3 * HEADS * DIM
    assert manager.counters.tolist() == [
        [2, 3, 3 - len(rejected), len(rejected), len(rejected) * slot_bytes, 0, 0, 0]
    ]


def test_every_group_and_every_layout_of_a_group_is_restored():
    plain = layers(2)
    whole = torch.randint(0, 256, (BLOCKS, SLOTS, HEADS, DIM), dtype=torch.uint8)
    nhd = whole.transpose(1, 2)
    mixed = [plain[0], LayerCache("nhd", nhd, row_layout(nhd))]
    cache_layers = [*mixed, plain[1]]
    manager = manager_of([(0, mixed), (1, [plain[1]])])
    before = snapshot(cache_layers)

    manager.begin(windows(num_groups=2))
    forward(cache_layers)
    after = snapshot(cache_layers)
    manager.commit(accepted(0, 1))

    assert torch.equal(snapshot(cache_layers), expected(before, after, [5, 6]))
    assert manager.counters[:, :4].tolist() == [[2, 3, 1, 2], [2, 3, 1, 2]]


def test_one_launch_each_for_begin_and_commit_whatever_the_number_of_layers():
    counting = FailingOps()
    manager = manager_of([(0, layers(40))], ops=counting)

    manager.begin(windows())
    manager.commit(accepted(0, 0))

    assert counting.calls == {"log": 1, "restore": 1}


def test_states_follow_the_table():
    manager = manager_of([(0, layers())])
    assert manager.state is State.IDLE

    assert not manager.commit(accepted(0, 0))
    manager.begin(windows())
    assert manager.state is State.LOGGED
    manager.commit(accepted(0, 0))
    assert manager.state is State.IDLE
    manager.begin(windows())
    manager.abort("test")

    assert manager.state is State.IDLE
    assert manager.fallbacks == {"test": 1}


@pytest.mark.parametrize("end", ["end_unlogged", "abort"])
def test_a_step_left_to_vanilla_is_a_state_until_it_ends(end):
    manager = manager_of([(0, layers())], capacity=2)

    manager.begin(windows())
    assert manager.state is State.VANILLA
    assert not manager.commit(accepted(0, 0))
    assert manager.state is State.VANILLA
    getattr(manager, end)({"end_unlogged": 3, "abort": "test"}[end])

    assert manager.state is State.IDLE
    assert manager.fallbacks == {"over_capacity": 1}


def test_guarantee_9_drafts_that_begin_never_saw_are_counted(caplog):
    manager = manager_of([(0, layers())])
    report = Report([], manager)
    report.take_payload()

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
    payload = report.take_payload().read()
    assert payload == ((0, 0, 0, 0, 0, 2, 0, 0), {"begin_missed": 2}, [])
    assert report.take_payload() is None


def test_a_missed_begin_raises_where_steps_are_strict():
    manager = manager_of([(0, layers())], strict=Strict.ALWAYS)

    with pytest.raises(NworError, match=r"^NWOR begin_missed: 3 drafts were sampled"):
        manager.end_unlogged(3)


def test_a_begin_after_a_failed_commit_starts_anew():
    cache_layers = layers()
    manager = manager_of([(0, cache_layers)], ops=FailingOps(restore_call=1))
    manager.begin(windows())
    forward(cache_layers)
    manager.commit(accepted(0, 0))
    assert manager.state is State.FAILED
    left_behind = snapshot(cache_layers)

    manager.abort("test")  # the next step is entered; it has no drafts
    manager.end_unlogged(0)
    assert manager.state is State.FAILED
    manager.begin(windows())
    forward(cache_layers)
    after = snapshot(cache_layers)
    manager.commit(accepted(0, 0))

    assert torch.equal(
        snapshot(cache_layers), expected(left_behind, after, DRAFT_SLOTS)
    )
    assert manager.state is State.IDLE
    assert manager.fallbacks == {"commit_failed": 1}


def test_a_begin_that_is_missed_after_a_failed_commit_is_counted():
    manager = manager_of([(0, layers())], ops=FailingOps(restore_call=1))
    manager.begin(windows())
    manager.commit(accepted(0, 0))

    manager.end_unlogged(3)

    assert manager.state is State.FAILED
    assert manager.fallbacks == {"commit_failed": 1, "begin_missed": 1}


def test_after_a_failed_commit_strict_steps_go_no_further():
    ops_ = FailingOps(restore_call=1)
    manager = manager_of([(0, layers())], strict=Strict.ALWAYS, ops=ops_)
    manager.begin(windows())
    with pytest.raises(NworError, match=r"^NWOR commit_failed: restore_rej"):
        manager.commit(accepted(0, 0))

    for _ in range(2):
        with pytest.raises(NworError, match="the restore before this step failed"):
            manager.begin(windows())

    assert manager.state is State.FAILED
    assert ops_.calls == {"log": 1, "restore": 1}
    assert manager.fallbacks == {"commit_failed": 1}


def lost_drafts(manager):
    manager._num_drafts = 0


def failed_without_a_failure(manager):
    manager.state, manager._num_drafts = State.FAILED, 0


def vanilla_without_a_failure(manager):
    manager.state, manager._num_drafts = State.VANILLA, 0


def entry_behind_its_window(manager):
    manager.groups[0].log_windows[2, 1] = 1


def table_of_another_address(manager):
    manager.groups[0].tables[0].table[1, 0] += 1


def table_with_places_exchanged(manager):
    table = manager.groups[0].tables[0].table
    table[:2, -1] = table[:2, -1].flip(0)


def log_in_a_cache(manager):
    cache = manager.groups[0].layers[0].kv_cache
    manager.groups[0].log_slots = cache.view(-1)[:128].view(torch.int64)


def log_in_the_counters(manager):
    manager.groups[0].log_slots = manager.counters.view(-1)[-1:]


def a_draft_too_many(manager):
    manager.counters[0, 1] += 1


@pytest.mark.parametrize(
    ("number", "broken"),
    [
        (1, lost_drafts),
        (2, failed_without_a_failure),
        (2, vanilla_without_a_failure),
        (3, entry_behind_its_window),
        (4, table_of_another_address),
        (4, table_with_places_exchanged),
        (5, log_in_a_cache),
        (5, log_in_the_counters),
        (6, a_draft_too_many),
    ],
)
def test_check_state_names_the_invariant_that_does_not_hold(number, broken, managers):
    manager = manager_of([(0, layers())])
    manager.begin(windows())
    manager.check_state()
    managers.clear()

    broken(manager)

    with pytest.raises(AssertionError, match=f"^NWOR invariant {number} does not hold"):
        manager.check_state()


def test_debug_sync_checks_the_invariants_after_each_op(managers):
    manager = manager_of([(0, layers())])
    manager.config = NworConfig(mode=Mode.COW, debug_sync=True)
    managers.clear()
    a_draft_too_many(manager)

    for op, argument in ((manager.begin, windows()), (manager.commit, accepted(0, 0))):
        with pytest.raises(AssertionError, match=r"^NWOR invariant 6"):
            op(argument)


def test_a_begin_that_finds_a_log_drops_and_counts_it():
    cache_layers = layers()
    manager = manager_of([(0, cache_layers)])
    manager.begin(windows())
    forward(cache_layers)
    before = snapshot(cache_layers)

    manager.begin(windows())
    forward(cache_layers)
    manager.commit(accepted(0, 0))

    assert manager.fallbacks == {"stale_log": 1}
    assert torch.equal(
        snapshot(cache_layers),
        expected(before, snapshot(cache_layers), DRAFT_SLOTS),
    )


def test_a_step_without_drafts_leaves_no_log():
    counting = FailingOps()
    manager = manager_of([(0, layers())], ops=counting)
    none = windows()

    manager.begin(
        VerificationWindows(0, none.logits_indices, none.cu_num_logits, [SLOT_MAPPING])
    )

    assert manager.state is State.IDLE
    assert counting.calls["log"] == 0


@pytest.mark.parametrize("call", [1, 2])
def test_guarantee_6_a_failing_begin_turns_the_window_into_vanilla(call, caplog):
    cache_layers = layers(2)
    groups = [(0, cache_layers[:1]), (1, cache_layers[1:])]
    manager = manager_of(groups, ops=FailingOps(log_call=call))

    with caplog.at_level(logging.WARNING):
        manager.begin(windows(num_groups=2))
    forward(cache_layers)
    after = snapshot(cache_layers)
    manager.commit(accepted(0, 0))

    assert torch.equal(snapshot(cache_layers), after)
    assert manager.fallbacks == {"begin_failed": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"NWOR begin_failed: log_cache_slots: planted failure in log call {call}; the "
        "step ran as vanilla vLLM (further ones are counted in vllm:nwor_fallbacks)"
    ]


@pytest.mark.parametrize("call", [1, 2])
def test_guarantee_6_a_failing_commit_leaves_old_or_new_bytes(call):
    cache_layers = layers(2)
    groups = [(0, cache_layers[:1]), (1, cache_layers[1:])]
    manager = manager_of(groups, ops=FailingOps(restore_call=call))
    before = snapshot(cache_layers)
    manager.begin(windows(num_groups=2))
    forward(cache_layers)
    after = snapshot(cache_layers)

    manager.commit(accepted(0, 0))

    restored = expected(before, after, DRAFT_SLOTS)
    wanted = [restored[0], restored[1]]
    wanted[call - 1] = after[call - 1]
    assert torch.equal(snapshot(cache_layers), torch.stack(wanted))
    assert manager.fallbacks == {"commit_failed": 1}
    assert manager.state is State.FAILED


def test_more_drafts_than_the_log_holds_run_as_vanilla():
    manager = manager_of([(0, layers())], capacity=2)

    manager.begin(windows())

    assert manager.state is State.VANILLA
    assert manager.fallbacks == {"over_capacity": 1}


def test_a_failure_is_logged_once_and_counted_always(caplog):
    manager = manager_of([(0, layers())], capacity=2)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            manager.begin(windows())

    assert manager.fallbacks == {"over_capacity": 3}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("capacity", "faults", "message"),
    [
        (2, {}, "NWOR over_capacity: 3 drafts do not fit the undo log of 2 rows"),
        (16, {"log_call": 1}, "NWOR begin_failed: log_cache_slots: planted failure"),
        (16, {"restore_call": 1}, "NWOR commit_failed: restore_rejected_drafts: plant"),
    ],
)
def test_strict_raises_where_the_default_falls_back(capacity, faults, message):
    manager = manager_of(
        [(0, layers())],
        capacity=capacity,
        strict=Strict.ALWAYS,
        ops=FailingOps(**faults),
    )

    with pytest.raises(NworError, match=message):
        manager.begin(windows())
        manager.commit(accepted(0, 0))


def test_strict_raises_on_a_stale_log():
    manager = manager_of([(0, layers())], strict=Strict.ALWAYS)
    manager.begin(windows())

    with pytest.raises(
        NworError, match="NWOR stale_log: windows with 3 drafts were dropped"
    ):
        manager.begin(windows())


def test_given_storage_bounds_the_capacity():
    cache_layers = layers()
    slot_bytes = 3 * HEADS * DIM
    needed = num_bytes(5, slot_bytes, num_groups=1, num_layers=3)
    storage = torch.zeros(needed + slot_bytes, dtype=torch.uint8)

    manager = manager_of([(0, cache_layers)], capacity=16, storage=storage)

    assert manager.capacity == 5
    assert manager.log_bytes == 5 * slot_bytes
    assert manager.groups[0].undo_log.data_ptr() == storage.data_ptr()


@pytest.mark.parametrize("groups", [[], [(0, [])]])
def test_nothing_to_protect_is_an_error(groups):
    with pytest.raises(ValueError, match="groups is empty or has one without layers"):
        manager_of(groups)


def test_no_room_for_one_draft_is_an_error():
    with pytest.raises(ValueError, match="capacity is 0 drafts of 48 bytes"):
        manager_of([(0, layers())], storage=torch.zeros(8, dtype=torch.uint8))


# A step of shadow pages: two requests, one with 2 drafts in slots 6 and 7, one with a
# draft in slot 18. Slots 5 and 17 are their targets; 4 and 16 hold committed rows of
# the same blocks, that attention reads in the shadow blocks, too.
STAGED_SLOTS = [5, 6, 7, 17, 18]
REAL_TABLE = [[2, 1, 0], [4, 0, 0]]
NUM_SHADOW_BLOCKS = 4
SHADOW_TABLE = [[2, 7, 0], [8, 0, 0]]
SHADOW_SLOTS = [29, 30, 31, 33, 34]
LAYER_BYTES = HEADS * DIM


def staged_group(first_block=BLOCKS, num_seats=2):
    region = ShadowRegion(first_block, num_seats, 2, BLOCKS, SLOTS)
    return StagedGroup(region, SLOTS)


def staged_windows(num_groups=1):
    """With tables and slot mappings of their own for each group."""
    return VerificationWindows(
        num_drafts=3,
        logits_indices=torch.arange(5, dtype=torch.int32),
        cu_num_logits=torch.tensor([3, 5], dtype=torch.int32),
        slot_mappings=[torch.tensor(STAGED_SLOTS) for _ in range(num_groups)],
        block_tables=[
            torch.tensor(REAL_TABLE, dtype=torch.int32) for _ in range(num_groups)
        ],
        query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([8, 3], dtype=torch.int32),
    )


def tables_of(step):
    return [
        (table.tolist(), slots.tolist())
        for table, slots in zip(step.block_tables, step.slot_mappings, strict=True)
    ]


VANILLA_TABLES = (REAL_TABLE, STAGED_SLOTS)
SHADOW_TABLES = (SHADOW_TABLE, SHADOW_SLOTS)


def write_rows(cache_layers, slots):
    """What vLLM's forward does: row i of the step is written to slots[i]."""
    for layer in cache_layers:
        for row, slot in enumerate(slots):
            layer.kv_cache[slot // SLOTS, :, slot % SLOTS] = 100 + row


def with_rows(before, rows):
    """[layers, blocks...] of real blocks, with those rows of the step written."""
    result = before[:, :BLOCKS].clone()
    for row in rows:
        block, offset = divmod(STAGED_SLOTS[row], SLOTS)
        result[:, block, :, offset] = 100 + row
    return result


def real_blocks(cache_layers):
    return snapshot(cache_layers)[:, :BLOCKS]


class TestShadowPages:
    def manager(self, num_layers=3, strict=Strict.STARTUP, **fails):
        """One staged group; `layers` are on the manager."""
        cache_layers = layers(num_layers, BLOCKS + NUM_SHADOW_BLOCKS)
        manager = manager_of(
            [(0, cache_layers)],
            strict=strict,
            ops=FailingOps(**fails),
            staged={0: staged_group()},
        )
        manager.layers = cache_layers
        return manager

    def mixed(self, strict=Strict.STARTUP, **fails):
        """Group 0 is logged, group 1 is staged: its rows of the counters come first."""
        logged, staged = layers(1), layers(2, BLOCKS + NUM_SHADOW_BLOCKS)
        manager = manager_of(
            [(0, logged), (1, staged)],
            strict=strict,
            ops=FailingOps(**fails),
            staged={1: staged_group()},
        )
        manager.logged_layers, manager.layers = logged, staged
        return manager

    @pytest.mark.parametrize(
        ("acceptance", "kept"),
        [
            (accepted(2, 1), [0, 1, 2, 3, 4]),
            (accepted(1, 0), [0, 1, 3]),
            (accepted(0, 1), [0, 3, 4]),
            (NumRejected(torch.tensor([2, 1], dtype=torch.int32)), [0, 3]),
        ],
    )
    def test_only_kept_rows_reach_a_requests_blocks(self, acceptance, kept):
        manager, step = self.manager(), staged_windows()
        before = snapshot(manager.layers)

        manager.stage(step)
        assert manager.state is State.STAGED
        assert manager.is_open
        assert tables_of(step) == [SHADOW_TABLES]
        manager.begin(step)
        manager.check_state()
        write_rows(manager.layers, step.slot_mappings[0].tolist())
        assert torch.equal(real_blocks(manager.layers), before[:, :BLOCKS])
        # The committed rows of those blocks can be read there.
        verified = snapshot(manager.layers)
        assert torch.equal(verified[:, 7, :, 0], before[:, 1, :, 0])
        assert torch.equal(verified[:, 8, :, 0], before[:, 4, :, 0])
        assert not manager.commit(acceptance)

        assert manager.state is State.IDLE
        assert tables_of(step) == [VANILLA_TABLES]
        assert torch.equal(real_blocks(manager.layers), with_rows(before, kept))
        num_accepted, row_bytes = len(kept) - 2, 3 * LAYER_BYTES
        assert manager.counters.tolist() == [
            [
                *(2, 3, num_accepted, 3 - num_accepted, 0, 0),
                *(2 * row_bytes, len(kept) * row_bytes),
            ]
        ]
        assert manager.launches.ops.calls == {"stage": 1, "commit": 1}
        assert not manager.fallbacks

    def test_aborted_windows_leave_tables_and_real_blocks_as_they_were(self, caplog):
        manager, step = self.manager(), staged_windows()
        before = snapshot(manager.layers)
        manager.stage(step)
        manager.begin(step)
        write_rows(manager.layers, step.slot_mappings[0].tolist())

        with caplog.at_level(logging.WARNING):
            manager.abort("step_failed")

        assert manager.state is State.IDLE
        assert tables_of(step) == [VANILLA_TABLES]
        assert torch.equal(real_blocks(manager.layers), before[:, :BLOCKS])
        assert manager.fallbacks == {"step_failed": 1}
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "NWOR step_failed: windows with 3 drafts were dropped; the step ran as"
        )
        assert not manager.counters.any()

    def test_a_stage_that_finds_windows_drops_them_first(self):
        manager, left, step = self.manager(), staged_windows(), staged_windows()
        manager.stage(left)

        manager.stage(step)

        assert tables_of(left) == [VANILLA_TABLES]
        assert tables_of(step) == [SHADOW_TABLES]
        assert manager.fallbacks == {"stale_log": 1}

    @pytest.mark.parametrize("strict", [Strict.STARTUP, Strict.ALWAYS])
    def test_a_step_with_more_requests_than_seats_is_logged_whole(self, strict):
        """Not a failure: strict steps go on."""
        manager = manager_of(
            [(0, layers(1, BLOCKS + 2)), (1, layers(1, BLOCKS + 2))],
            strict=strict,
            ops=FailingOps(),
            staged={0: staged_group(num_seats=1), 1: staged_group(num_seats=1)},
        )
        step = staged_windows(num_groups=2)
        caches = [layer for group in manager.groups for layer in group.layers]
        before = snapshot(caches)

        manager.stage(step)
        assert manager.state is State.IDLE
        manager.begin(step)
        assert manager.state is State.LOGGED
        write_rows(caches, STAGED_SLOTS)
        manager.commit(accepted(1, 0))

        assert tables_of(step) == [VANILLA_TABLES] * 2
        assert torch.equal(real_blocks(caches), with_rows(before, [0, 1, 3]))
        assert manager.fallbacks == {"no_seat": 1}
        assert manager.launches.ops.calls == {"log": 2, "restore": 2}
        assert manager.counters[:, :4].tolist() == [[2, 3, 1, 2]] * 2

    def test_as_many_requests_as_seats_are_staged(self):
        manager, step = self.manager(), staged_windows()
        assert manager.shadow.num_seats == step.cu_num_logits.numel()

        zeros = torch.tensor([0, 3, 5], dtype=torch.int32)
        assert manager.stage(step._replace(cu_num_logits=zeros, num_leading_zeros=1))

        assert manager.state is State.STAGED

    def test_a_stage_that_fails_leaves_the_step_to_the_log(self, caplog):
        manager, step = self.manager(stage_call=1), staged_windows()
        before = snapshot(manager.layers)

        with caplog.at_level(logging.WARNING):
            assert manager.stage(step) is False
        assert manager.state is State.IDLE
        assert tables_of(step) == [VANILLA_TABLES]
        manager.begin(step)
        write_rows(manager.layers, STAGED_SLOTS)
        manager.commit(accepted(0, 0))

        assert torch.equal(real_blocks(manager.layers), with_rows(before, [0, 3]))
        assert manager.fallbacks == {"stage_failed": 1}
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "NWOR stage_failed: stage: planted failure in stage call 1; the step uses"
            " the undo log"
        )

    def test_strict_steps_raise_where_a_stage_fails(self):
        manager, step = (
            self.manager(strict=Strict.ALWAYS, stage_call=1),
            staged_windows(),
        )

        with pytest.raises(NworError, match=r"^NWOR stage_failed: stage: planted fail"):
            manager.stage(step)

        assert tables_of(step) == [VANILLA_TABLES]
        assert manager.state is State.IDLE

    @pytest.mark.parametrize("strict", list(Strict))
    def test_a_commit_that_fails_raises_always_with_the_tables_put_back(self, strict):
        """Accepted tokens would not be in the cache: no step may go on from there."""
        manager, step = self.manager(strict=strict, commit_call=1), staged_windows()
        before = snapshot(manager.layers)
        manager.stage(step)
        manager.begin(step)
        write_rows(manager.layers, step.slot_mappings[0].tolist())

        with pytest.raises(
            NworError,
            match=r"^NWOR commit_failed: commit_draft_layer: planted failure in commit "
            r"call 1; accepted tokens of this step are not in the KV cache$",
        ):
            manager.commit(accepted(2, 1))

        assert tables_of(step) == [VANILLA_TABLES]
        assert torch.equal(real_blocks(manager.layers), before[:, :BLOCKS])
        assert manager.state is State.FAILED
        assert manager.fallbacks == {"commit_failed": 1}

    def test_after_a_failed_commit_the_next_step_is_staged_again(self):
        manager, step = self.manager(commit_call=1), staged_windows()
        manager.stage(step)
        with pytest.raises(NworError):
            manager.commit(accepted(0, 0))

        manager.stage(step)
        manager.begin(step)
        manager.commit(accepted(2, 1))

        assert manager.state is State.IDLE
        assert manager.counters[0, :4].tolist() == [2, 3, 3, 0]

    @pytest.mark.parametrize("strict", list(Strict))
    def test_a_table_that_cannot_be_put_back_raises_always(self, strict, managers):
        manager, step = self.manager(strict=strict, unstage_call=1), staged_windows()
        manager.stage(step)

        with pytest.raises(
            NworError,
            match=r"^NWOR stale_log: a block table cannot be put back: planted failure",
        ):
            manager.abort("stale_log")

        assert manager.fallbacks == {"stale_log": 1}
        assert manager.state is State.IDLE

    def test_nothing_is_staged_without_drafts(self):
        manager, step = self.manager(), staged_windows()
        manager.stage(step._replace(num_drafts=0))

        assert manager.state is State.IDLE
        assert tables_of(step) == [VANILLA_TABLES]
        assert not manager.launches.ops.calls
        assert not manager.fallbacks

    @pytest.mark.parametrize("publishes", [True, False])
    def test_staged_and_logged_groups_of_one_step(self, publishes):
        manager, step = self.mixed(), staged_windows(num_groups=2)
        assert [group.group_id for group in manager.groups] == [1, 0]
        before, logged_before = map(snapshot, (manager.layers, manager.logged_layers))
        to = torch.zeros_like(manager.counters) if publishes else None

        assert manager.stage(step) is False  # begin has to log the other group
        manager.begin(step)
        assert tables_of(step) == [VANILLA_TABLES, SHADOW_TABLES]
        write_rows(manager.layers, step.slot_mappings[1].tolist())
        write_rows(manager.logged_layers, step.slot_mappings[0].tolist())
        assert manager.commit(accepted(1, 0), to) is publishes

        assert tables_of(step) == [VANILLA_TABLES] * 2
        for cache_layers, old in (
            (manager.layers, before),
            (manager.logged_layers, logged_before),
        ):
            assert torch.equal(real_blocks(cache_layers), with_rows(old, [0, 1, 3]))
        row = LAYER_BYTES
        assert manager.counters.tolist() == [
            [2, 3, 1, 2, 0, 0, 2 * 2 * row, 3 * 2 * row],
            [2, 3, 1, 2, 2 * row, 0, 0, 0],
        ]
        assert to is None or torch.equal(to, manager.counters)
        calls = {"stage": 1, "log": 1, "commit": 1, "restore": 1}
        assert manager.launches.ops.calls == calls

    def test_a_log_that_fails_beside_staged_groups_is_of_its_own_groups_only(self):
        manager, step = self.mixed(log_call=1), staged_windows(num_groups=2)
        before, to = snapshot(manager.layers), torch.zeros_like(manager.counters)
        manager.stage(step)
        manager.begin(step)
        assert manager.state is State.STAGED
        write_rows(manager.layers, step.slot_mappings[1].tolist())

        assert manager.commit(accepted(1, 0), to)

        assert torch.equal(real_blocks(manager.layers), with_rows(before, [0, 1, 3]))
        assert manager.fallbacks == {"begin_failed": 1}
        assert manager.counters[:, 1].tolist() == [3, 0]
        assert torch.equal(to, manager.counters)

    def test_a_log_of_an_aborted_step_is_never_restored(self):
        """Nor by a step whose begin was missed."""
        manager, step = self.mixed(), staged_windows(num_groups=2)
        manager.stage(step)
        manager.begin(step)
        manager.abort("step_failed")
        write_rows(manager.logged_layers, STAGED_SLOTS)
        written = snapshot(manager.logged_layers)

        manager.stage(step)
        manager.commit(accepted(0, 0))

        assert torch.equal(snapshot(manager.logged_layers), written)

    def test_a_restore_that_fails_beside_staged_groups_loses_no_token(self):
        manager, step = self.mixed(restore_call=1), staged_windows(num_groups=2)
        before, to = snapshot(manager.layers), torch.zeros_like(manager.counters)
        manager.stage(step)
        manager.begin(step)
        write_rows(manager.layers, step.slot_mappings[1].tolist())

        assert manager.commit(accepted(1, 0), to)

        assert torch.equal(real_blocks(manager.layers), with_rows(before, [0, 1, 3]))
        assert manager.fallbacks == {"commit_failed": 1}
        assert torch.equal(to, manager.counters)
        assert manager.state is State.FAILED

    def test_counters_that_cannot_be_published_are_not_said_to_be(self):
        manager, step = self.mixed(restore_call=1), staged_windows(num_groups=2)

        def fail(*_):
            raise RuntimeError("planted")

        manager._copy_counters = fail
        manager.stage(step)
        manager.begin(step)

        assert not manager.commit(accepted(1, 0), torch.zeros_like(manager.counters))

    def test_more_drafts_than_the_log_beside_holds_are_not_staged(self):
        """A step is protected whole or not at all."""
        manager, step = self.mixed(), staged_windows(num_groups=2)
        manager.capacity = 2

        manager.stage(step)
        manager.begin(step)

        assert manager.state is State.VANILLA
        assert tables_of(step) == [VANILLA_TABLES] * 2
        assert manager.fallbacks == {"over_capacity": 1}

    def test_a_log_too_small_is_no_limit_where_all_is_staged(self):
        manager, step = self.manager(), staged_windows()
        manager.capacity = 2

        manager.stage(step)

        assert manager.state is State.STAGED

    @pytest.mark.parametrize(
        "broken",
        [
            lambda manager: setattr(manager, "state", State.LOGGED),
            lambda manager: setattr(manager, "_num_drafts", 0),
            lambda manager: manager.shadow.abort(),
        ],
    )
    def test_check_state_knows_when_pages_are_in_tables(self, broken, managers):
        manager = self.manager()
        manager.stage(staged_windows())
        manager.check_state()
        managers.clear()

        broken(manager)

        with pytest.raises(AssertionError, match=r"^NWOR invariant 1 does not hold"):
            manager.check_state()

    def test_storage_holds_what_shadow_pages_keep(self):
        slot_bytes, saved_bytes = 3 * LAYER_BYTES, staged_group().num_bytes
        needed = num_bytes(5, slot_bytes, num_groups=1, num_layers=3)
        storage = torch.zeros(needed + saved_bytes + slot_bytes, dtype=torch.uint8)
        manager = manager_of(
            [(0, layers(3, BLOCKS + NUM_SHADOW_BLOCKS))],
            storage=storage,
            staged={0: staged_group()},
        )

        assert manager.capacity == 5
        first = manager.shadow.groups[0].saved.data_ptr()
        assert storage.data_ptr() < first < storage.data_ptr() + storage.numel()


class TestReport:
    infos = [GroupInfo(0, "stage", "cow", "because")]

    def step(self, manager, report, first, second):
        manager.begin(windows())
        report.commit(accepted(first, second))
        return report.take_payload()

    def test_a_step_reports_its_own_counts_and_the_groups_once(self):
        manager = manager_of([(0, layers())])
        report = Report(self.infos, manager)

        first, second = (
            self.step(manager, report, accepted, 0).read() for accepted in (2, 0)
        )

        slot_bytes = 3 * HEADS * DIM
        assert first == ((2, 3, 2, 1, slot_bytes, 0, 0, 0), {}, self.infos)
        assert second == ((2, 3, 0, 3, 3 * slot_bytes, 0, 0, 0),)

    def test_a_step_without_windows_says_nothing(self):
        report = Report(self.infos, manager_of([(0, layers())]))
        report.take_payload().read()

        assert report.take_payload() is None

    @pytest.mark.parametrize("travels", [False, True])
    def test_the_groups_are_told_again_until_somebody_reads_them(self, travels):
        """vLLM throws its warm-up's outputs away. A refused engine has no manager."""
        report = Report(self.infos, None)
        for _ in range(3):
            payload = report.take_payload()

        told = pickle.loads(pickle.dumps(payload)) if travels else payload.read()

        assert told == ((0,) * 8, {}, self.infos)
        assert {type(told), *map(type, told[2])} == {tuple}  # of no module of ours
        assert report.take_payload() is None

    def test_a_fallback_is_told_with_the_next_output(self):
        manager = manager_of([(0, layers())], capacity=2)
        report = Report([], manager)
        report.take_payload()

        for _ in range(2):
            payload = self.step(manager, report, 0, 0)
            assert payload.read() == ((0,) * 8, {"over_capacity": 1}, [])
        assert report.take_payload() is None
