# SPDX-License-Identifier: Apache-2.0
"""The simulation finds nothing in the package as it is, and does find planted bugs."""

from __future__ import annotations

import random
import re
import shlex
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from tests.simulation import __main__ as program
from tests.simulation import operations, seats
from tests.simulation.__main__ import Failure, run
from tests.simulation.memory import Violation, draw_cache
from tests.simulation.operations import FAULT_NAMES, Operation, from_text
from tests.simulation.simulator import Simulator, Totals
from vllm_nwor import ops
from vllm_nwor.draft_manager import DraftCommitManager

# More make nightly plays: a million, from another seed each time.
NUM_OPERATIONS = 20_000
# A planted bug has to show within so many operations, and in so few at the end.
MOST_OPERATIONS = 20_000
MOST_LEFT = 8


@pytest.fixture(scope="module", autouse=True)
def library():
    ops.load()
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(before)


def test_no_violation_in_20000_operations() -> None:
    totals = Totals()
    run(0, NUM_OPERATIONS, totals)
    assert totals.num_operations == NUM_OPERATIONS
    # And everything that the simulation is about has happened, not once or twice.
    for happened in (totals.operations, totals.faults, totals.fallbacks):
        assert min(happened.values()) >= 20, happened
    assert set(totals.operations) == set(operations.KINDS)
    assert set(totals.faults) == set(FAULT_NAMES[1:])
    assert set(totals.fallbacks) == {
        "stale_log",
        "over_capacity",
        "begin_failed",
        "commit_failed",
        "begin_missed",
        "stage_failed",
        "no_seat",
        "step_failed",
    }
    assert set(totals.prefixes) == {"copied", "kept"}
    assert min(totals.prefixes.values()) > 200
    assert totals.commits > 1500
    assert totals.rejected > totals.commits
    assert totals.windows > totals.commits
    counts = {name: n for name, n in vars(totals).items() if isinstance(n, int)}
    assert min(counts.values()) >= 20, counts


def test_worlds_differ_in_what_matters() -> None:
    """Every layout, several groups, groups that share memory, layers left alone, groups
    that are logged, staged, and both."""
    found: Counter[str] = Counter()
    for seed in range(40):
        simulator = Simulator(seed)
        groups = simulator.cache.groups
        found[f"{len(groups)} groups"] += 1
        found[f"{len(simulator.manager.counters)} launches"] += 1
        found["strict"] += simulator.strict
        num_staged = len(simulator.regions)
        found[f"{num_staged} staged"] += 1
        found["logged beside"] += 0 < num_staged < len(simulator.manager.groups)
        found["indices"] += simulator.has_indices
        found["zeroes"] += simulator.zeroes_blocks
        starts = [group.layers[0].index[0].min() for group in groups]
        found["shared memory"] += len(set(starts)) < len(groups)
        for group in groups:
            found["small entries"] += group.entry_tokens < group.block_size
            for layer in group.layers:
                found[layer.kind] += 1
                found["protected" if layer.protected else "unprotected"] += 1
    assert found.keys() >= {"1 groups", "2 groups", "3 groups", "1 launches"}
    assert found.keys() >= {"nhd", "hnd", "mla", "columns", "pairs", "3 launches"}
    assert found.keys() >= {"0 staged", "1 staged", "2 staged", "3 staged"}
    assert min(found.values()) > 0, found


def test_a_seed_is_a_world_and_its_story() -> None:
    """The same seed gives the same bytes at the end, another one does not."""

    def story(seed: int) -> tuple[list[Operation], bytes]:
        simulator = Simulator(seed)
        played = simulator.play(operations.draw_operations(_drawn(seed)), 200)
        return played, simulator.memory.real.tobytes()

    assert story(5) == story(5)
    assert story(5) != story(6)


def test_slots_share_no_bytes_and_guards_belong_to_none() -> None:
    """The model itself: within a group each byte has one owner."""
    for seed in range(20):
        cache = draw_cache(_drawn(seed))
        for group in cache.groups:
            taken = group.index.ravel().tolist()
            assert len(taken) == len(set(taken))
            assert min(taken) >= 64
            assert max(taken) < cache.memory.real.size - 64


# --- the rule of the seats ------------------------------------------------------------


def test_shadow_rows_that_count_are_the_real_ones() -> None:
    happened = seats.run(0, 100_000)
    assert len(happened) == 8
    assert min(happened.values()) > 1000, happened


class AnyStep(seats.Rule):
    """Committed at some time."""

    def counts(self, seat: seats.Seat, first_position: int, entry: int) -> bool:
        return seat.valid == first_position and seat.entry == entry


class StepsWithDrafts(seats.Rule):
    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        self.step += has_drafts + begins


class StepsWithoutLog(seats.Rule):
    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        self.step += (is_staged or not has_drafts) + begins


class BeginningsUnseen(seats.Rule):
    def start(self, has_drafts: bool, is_staged: bool, begins: bool) -> None:
        self.step += 1


class AnyEntry(seats.Rule):
    def counts(self, seat: seats.Seat, first_position: int, entry: int) -> bool:
        return seat.step == self.step - 1 and seat.valid == first_position


class FailedStepsCommit(seats.Rule):
    """What an earlier commit left is not taken back by a step that fails."""

    def stage(self, seat: seats.Seat) -> None:
        seat.step = self.step


@pytest.mark.parametrize(
    "mutation",
    [
        AnyStep,
        StepsWithDrafts,
        StepsWithoutLog,
        BeginningsUnseen,
        AnyEntry,
        FailedStepsCommit,
    ],
)
def test_each_condition_of_the_rule_is_needed(mutation: type[seats.Rule]) -> None:
    with pytest.raises(Violation, match=r"^stale shadow row") as caught:
        seats.run(0, 400_000, mutation)
    seed = int(str(caught.value).split()[-5])
    with pytest.raises(Violation, match=re.escape(str(caught.value))):
        seats.run(seed, seats.STEPS_PER_SEED, mutation)
    seats.run(seed, seats.STEPS_PER_SEED)


# --- bugs that are planted ------------------------------------------------------------


class Broken:
    """The ops of a manager, of which `op` is replaced by `bug(these, *arguments)`."""

    def __init__(self, manager: DraftCommitManager, op: str, bug: Any) -> None:
        self.inner = manager.launches.ops
        for part in (manager.launches, manager._beside, manager.shadow):
            if part is not None:
                part.ops = self
        self.num_calls = 0
        setattr(self, op, partial(bug, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def stale_log(ops: Any, *args: Any) -> None:
    """Every second log is not taken: what an earlier step saved is restored."""
    ops.num_calls += 1
    before = args[5].clone()
    ops.inner.log_cache_slots(*args)
    if ops.num_calls % 2 == 0:
        args[5].copy_(before)


def padding_is_slot_zero(ops: Any, *args: Any) -> None:
    ops.inner.log_cache_slots(*args[:2], args[2].clamp(min=0), *args[3:])


def off_by_one_slot(ops: Any, *args: Any) -> None:
    ops.inner.log_cache_slots(*args)
    slots = args[6]
    slots.copy_(torch.where(slots > 0, slots - 1, slots))


def writes_beside_the_log(ops: Any, *args: Any) -> None:
    ops.inner.log_cache_slots(*args)
    log = args[5]
    end = log.storage_offset() + log.numel()
    torch.as_strided(log, (1,), (1,), end).fill_(0)


def accepted_restored(ops: Any, *args: Any) -> None:
    """One draft too many is undone."""
    sampled, rejected = args[5], args[7]
    if sampled is not None:
        sampled = sampled.clone()
        sampled[:, 0] = -1
    else:
        rejected = rejected + 1
    changed = (*args[:5], sampled, args[6], rejected, *args[8:])
    ops.inner.restore_rejected_drafts(*changed)


def counts_twice(ops: Any, *args: Any) -> None:
    counters = args[8]
    before = counters.clone()
    ops.inner.restore_rejected_drafts(*args)
    counters.add_(counters - before)


def forgets_a_layer(op: str, ops: Any, table: torch.Tensor, *args: Any) -> None:
    """The last one of each table."""
    whole = table.clone()
    table[-1] = table[0]
    try:
        getattr(ops.inner, op)(table, *args)
    finally:
        table.copy_(whole)


def tables_left(ops: Any, *args: Any) -> None:
    pass


def slots_not_staged(ops: Any, *args: Any) -> None:
    """Drafts go to the real blocks."""
    before = args[3].clone()
    ops.inner.stage(*args)
    args[3].copy_(before)


def rejected_committed(ops: Any, *args: Any) -> None:
    """Each staged window keeps all its drafts."""
    sampled, rejected = args[-8], args[-6]
    if sampled is not None:
        sampled = torch.zeros_like(sampled)
    else:
        rejected = torch.zeros_like(rejected)
    ops.inner.commit_draft_layer(*args[:-8], sampled, args[-7], rejected, *args[-5:])


def skipped_group(manager: DraftCommitManager) -> None:
    launches = manager.launches._launches
    manager.launches._launches = launches[: max(len(launches) - 1, 1)]


def keeps_an_uncommitted_log(manager: DraftCommitManager) -> None:
    manager.abort = lambda reason: None  # type: ignore[method-assign]


def forgets_to_count(manager: DraftCommitManager) -> None:
    manager._fall_back = lambda *args: None  # type: ignore[method-assign]


def counts_steps_with_drafts(manager: DraftCommitManager) -> None:
    """Not all steps of the runner."""
    if manager.shadow is not None:
        start, stage = manager.shadow.start_step, manager.shadow.stage
        manager.shadow.start_step = lambda keeps: None
        manager.shadow.stage = lambda windows: (start(), stage(windows))


def keeps_at_a_beginning(manager: DraftCommitManager) -> None:
    """Whatever the hook found."""
    if manager.shadow is not None:
        start = manager.shadow.start_step
        manager.shadow.start_step = lambda keeps: start()


LOG, RESTORE = "log_cache_slots", "restore_rejected_drafts"
STAGE, COMMIT = "stage", "commit_draft_layer"
# What is planted, in which op or in the manager, and what is said of it.
BUGS: list[tuple[Any, str | None, str]] = [
    (stale_log, LOG, "guarantee 1"),
    (padding_is_slot_zero, LOG, "counters"),  # slot 0 gets its own bytes back
    (off_by_one_slot, LOG, "guarantee"),
    (writes_beside_the_log, LOG, "begin wrote beside the log"),
    (accepted_restored, RESTORE, "guarantee 2"),
    (counts_twice, RESTORE, "counters"),
    (partial(forgets_a_layer, RESTORE), RESTORE, "guarantee 1"),
    (partial(forgets_a_layer, STAGE), STAGE, "guarantee 3"),
    (partial(forgets_a_layer, COMMIT), COMMIT, "guarantee 2"),
    (slots_not_staged, STAGE, "pages"),
    (rejected_committed, COMMIT, "guarantee [12]"),
    (tables_left, "unstage", "tables"),
    (skipped_group, None, "launches"),
    (keeps_an_uncommitted_log, None, "fallbacks|state|tables"),
    (forgets_to_count, None, "fallbacks"),
    (counts_steps_with_drafts, None, "counters|guarantee 3"),
    (keeps_at_a_beginning, None, "counters|guarantee 3"),
]
# These two show in the third step of a request's life at the soonest.
LATE_BUGS = {counts_steps_with_drafts, keeps_at_a_beginning}


@pytest.mark.parametrize(
    ("bug", "op", "said"),
    BUGS,
    ids=lambda part: getattr(part, "__name__", part if isinstance(part, str) else None),
)
def test_a_planted_bug_is_found_shrunk_and_replayed(
    bug: Any, op: str | None, said: str
) -> None:
    breakage = bug if op is None else partial(Broken, op=op, bug=bug)
    with pytest.raises(Failure, match=rf"^({said})") as caught:
        run(0, MOST_OPERATIONS, Totals(), breakage)
    failure = caught.value
    most = 2 * MOST_LEFT if bug in LATE_BUGS else MOST_LEFT
    assert 0 < len(failure.operations) <= most, failure
    words = shlex.split(str(failure).splitlines()[-1])
    assert words[:3] == ["python", "-m", "tests.simulation"]
    seed, replayed = int(words[4]), from_text(words[6])
    assert replayed == failure.operations
    with pytest.raises(Violation, match=rf"^({said})"):
        Simulator(seed, breakage).play(replayed)
    Simulator(seed).play(replayed)  # the package as it is has no fault there


def test_the_printed_command_replays_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """A bug below the seam, in the ops module, and nothing but what was printed."""
    restore = ops.restore_rejected_drafts

    def restores_backwards(*args: Any) -> None:
        restore(*args[:2], args[2].flip(1), *args[3:])

    monkeypatch.setattr(ops, "restore_rejected_drafts", restores_backwards)
    result = tmp_path / "simulation.json"
    monkeypatch.setattr("sys.argv", ["simulation", "--json", str(result)])
    assert program.main() == 1
    printed = capsys.readouterr().out
    assert "guarantee 1 (a rejected slot is not as it was)" in printed
    assert '"violations": []' not in result.read_text()
    (command,) = re.findall(r"python -m (tests\.simulation .*)", printed)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(Violation, match=r"^guarantee 1"):
        program.main()
    monkeypatch.setattr(ops, "restore_rejected_drafts", restore)
    assert program.main() == 0


def test_an_unknown_operation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"operation \['jump', 1\] is not allowed"):
        from_text('[["jump", 1]]')
    with pytest.raises(ValueError, match=r"operation \['arrive', 1\] is not allowed"):
        from_text('[["arrive", 1]]')


def _drawn(seed: int) -> random.Random:
    return random.Random(seed)
