# SPDX-License-Identifier: Apache-2.0
"""DraftCommitManager on small caches with the real CPU ops: the transaction, its
states, and what becomes of a window when an op fails (guarantees 1, 2, 6 and 9)."""

import logging

import pytest
import torch

from vllm_nwor import ops
from vllm_nwor.config import Mode, NworConfig, Strict
from vllm_nwor.draft_manager import (
    DraftCommitManager,
    HostTimes,
    LayerCache,
    NworError,
    State,
)
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import num_bytes
from vllm_nwor.metrics import WorkerRecord
from vllm_nwor.report import GroupInfo, Report
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows

BLOCKS, HEADS, SLOTS, DIM = 6, 2, 4, 8
VOCAB = 100
# Two requests: 2 drafts in slots 5 and 6, one draft in slot 17; slots 4 and 16 hold
# the tokens that are always kept.
SLOT_MAPPING = torch.tensor([4, 5, 6, 16, 17])
DRAFT_SLOTS = [5, 6, 17]


class FailingOps:
    """The real ops, with one call out of each kind made to raise."""

    def __init__(self, log_call=None, restore_call=None):
        self.calls = {"log": 0, "restore": 0}
        self.fail = {"log": log_call, "restore": restore_call}

    def _count(self, kind):
        self.calls[kind] += 1
        if self.calls[kind] == self.fail[kind]:
            raise RuntimeError(f"planted failure in {kind} call {self.calls[kind]}")

    def log_cache_slots(self, *args):
        self._count("log")
        ops.log_cache_slots(*args)

    def restore_rejected_drafts(self, *args):
        self._count("restore")
        ops.restore_rejected_drafts(*args)


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()


def layers(num_layers=3):
    torch.manual_seed(0)
    caches = [
        torch.randint(0, 256, (BLOCKS, HEADS, SLOTS, DIM), dtype=torch.uint8)
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
    payload = report.take_payload()
    assert payload == {"fallbacks": {"begin_missed": 2}, "breaches": 2}
    assert WorkerRecord.from_payload(payload).breaches == 2
    assert report.take_payload() is None


def test_a_missed_begin_raises_where_steps_are_strict():
    manager = manager_of([(0, layers())], strict=Strict.ALWAYS)

    with pytest.raises(NworError, match=r"^NWOR begin_missed: 3 drafts were sampled"):
        manager.end_unlogged(3)


def test_an_idle_begin_is_not_a_missed_one():
    manager = manager_of([(0, layers())])
    manager.active = False

    manager.begin(windows())
    manager.end_unlogged(3)

    assert not manager.fallbacks


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


def test_an_inactive_manager_does_nothing():
    manager = manager_of([(0, layers())])
    manager.active = False

    manager.begin(windows())

    assert manager.state is State.IDLE
    assert not manager.fallbacks


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


def test_host_times_are_kept_only_when_asked_for():
    manager = manager_of([(0, layers())])
    manager.begin(windows())
    manager.commit(accepted(0, 0))
    manager.host_times = HostTimes()
    manager.begin(windows())
    manager.commit(accepted(0, 0))

    assert len(manager.host_times.begin_ns) == len(manager.host_times.commit_ns) == 1
    assert manager.host_times.begin_ns[0] > 0


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
            WorkerRecord.from_payload(self.step(manager, report, accepted, 0))
            for accepted in (2, 0)
        )

        slot_bytes = 3 * HEADS * DIM
        assert first == WorkerRecord(
            windows=2,
            tokens_staged=3,
            tokens_accepted=2,
            tokens_rejected=1,
            restored_bytes=slot_bytes,
            info=[
                {
                    "group": 0,
                    "requested": "stage",
                    "resolved": "cow",
                    "reason": "because",
                }
            ],
        )
        assert second == WorkerRecord(
            windows=2,
            tokens_staged=3,
            tokens_accepted=0,
            tokens_rejected=3,
            restored_bytes=3 * slot_bytes,
        )

    def test_a_step_that_nobody_reads_is_not_counted_in_the_next(self):
        manager = manager_of([(0, layers())])
        report = Report(self.infos, manager)
        self.step(manager, report, 2, 1)

        payload = self.step(manager, report, 2, 1)

        assert WorkerRecord.from_payload(payload).tokens_staged == 3

    def test_a_step_without_windows_says_nothing(self):
        manager = manager_of([(0, layers())])
        report = Report(self.infos, manager)
        report.take_payload()

        assert report.take_payload() is None

    def test_a_fallback_is_told_with_the_next_output(self):
        manager = manager_of([(0, layers())], capacity=2)
        report = Report([], manager)
        report.take_payload()

        payload = self.step(manager, report, 0, 0)

        assert payload == {"fallbacks": {"over_capacity": 1}}
        assert report.take_payload() is None

    def test_a_refused_engine_still_tells_why(self):
        report = Report([GroupInfo(0, "cow", "off", "no")], None)

        assert report.take_payload() == {
            "info": [
                {"group": 0, "requested": "cow", "resolved": "off", "reason": "no"}
            ]
        }
