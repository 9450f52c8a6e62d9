# SPDX-License-Identifier: Apache-2.0
"""ShadowPages: which calls it makes of the ops, in which order, and what it puts back
when one of them fails. The ops are stand-ins here; tests/kernels has the real ones."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.ops import SAVED_COLUMNS
from vllm_nwor.shadow_pages import (
    ShadowGroup,
    ShadowPages,
    ShadowRegion,
    blocks_per_seat,
    num_bytes,
)
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows

CPU = torch.device("cpu")
NUM_REQS = 3


@pytest.mark.parametrize("block_size", range(1, 18))
def test_a_seat_has_a_block_for_each_that_drafts_can_touch(block_size):
    for num_drafts in range(1, 40):
        touched = max(
            len({(first + i) // block_size for i in range(num_drafts)})
            for first in range(block_size)
        )
        assert blocks_per_seat(num_drafts, block_size) == touched


def region(first=40, seats=3, per_seat=2, block_size=16):
    return ShadowRegion(
        first, seats, per_seat, num_real_blocks=40, block_size=block_size
    )


def group(group_id=0, num_tables=1, entry_tokens=16, **arguments):
    tables = [
        SimpleNamespace(table=f"table {group_id}.{i}", runs=f"runs {group_id}.{i}")
        for i in range(num_tables)
    ]
    memory = DeviceMemory(CPU, None)
    return ShadowGroup(group_id, tables, region(**arguments), entry_tokens, memory)


@pytest.mark.parametrize(("entry_tokens", "per_block"), [(16, 1), (8, 2), (1, 16)])
def test_a_group_counts_in_entries_of_the_workers_table(entry_tokens, per_block):
    made = group(entry_tokens=entry_tokens, first=44)

    assert made.first_entry == 44 * per_block
    assert made.num_real_entries == 40 * per_block
    assert made.span == 2 * per_block
    assert made.num_seats == 3
    assert made.saved.shape == (3, SAVED_COLUMNS + 2 * made.span)
    assert made.saved.dtype == torch.int32
    assert not made.saved.any()
    assert made.saved.nbytes == num_bytes(3, made.span)
    # The last seat's last entry is the last one of the region.
    assert made.first_entry + 3 * made.span == (44 + region().num_blocks) * per_block


@pytest.mark.parametrize("entry_tokens", [3, 32])
def test_entries_that_do_not_divide_a_block_are_refused(entry_tokens):
    with pytest.raises(
        ValueError,
        match=f"^entry_tokens is {entry_tokens}; must divide the block size 16$",
    ):
        group(entry_tokens=entry_tokens)


class Ops:
    """Notes calls; tables of groups are lists of what is in them.

    fails: numbers of the calls that raise, from 0. late: after their work, not before.
    """

    def __init__(self, fails=(), late=False):
        self.calls = []
        self.fails = set(fails)
        self.late = late

    def _call(self, name, work, *arguments):
        number = len(self.calls)
        self.calls.append((name, *arguments))
        if number in self.fails and not self.late:
            raise RuntimeError(f"planted in call {number}")
        work()
        if number in self.fails:
            raise RuntimeError(f"planted in call {number}")

    def stage(self, table, runs, block_table, slot_mapping, *others):
        patches = others[-1]
        work = block_table.patch if patches else lambda: None
        self._call("stage", work, table, runs, block_table, slot_mapping, *others)

    def commit_draft_layer(self, table, runs, block_table, slot_mapping, *others):
        undoes = others[-2]
        work = block_table.undo if undoes else lambda: None
        self._call("commit", work, table, runs, block_table, slot_mapping, *others)

    def unstage(self, block_table, slot_mapping, *others):
        self._call("unstage", block_table.undo, block_table, slot_mapping, *others)

    def names(self):
        return [(call[0], call[1]) for call in self.calls]


class Table:
    """A group's block table: whether shadow entries are in it."""

    def __init__(self, name):
        self.name = name
        self.is_patched = False

    def __repr__(self):
        return self.name

    def patch(self):
        self.is_patched = True

    def undo(self):
        self.is_patched = False


NUM_TABLES = (1, 3, 2)  # of each group


@pytest.fixture
def step():
    """Three groups, whose ids are 2, 0 and 5, and the windows of a step."""
    ids = (2, 0, 5)
    groups = [
        group(gid, num_tables, first=40 + 10 * i, seats=4 - i)
        for i, (gid, num_tables) in enumerate(zip(ids, NUM_TABLES, strict=True))
    ]
    tables = [Table(f"block table {gid}") for gid in range(6)]
    windows = VerificationWindows(
        num_drafts=5,
        logits_indices=torch.arange(8),
        cu_num_logits=torch.tensor([3, 5, 8], dtype=torch.int32),
        slot_mappings=[f"slots {gid}" for gid in range(6)],
        block_tables=tables,
        query_start_loc="query_start_loc",
        seq_lens="seq_lens",
        seats="seats",
    )
    counters = torch.zeros(sum(NUM_TABLES), 8, dtype=torch.int64).unbind()
    return SimpleNamespace(
        groups=groups, windows=windows, tables=tables, counters=counters
    )


def pages_of(step, **faults):
    return ShadowPages(step.groups, step.counters, Ops(**faults))


def is_patched(step):
    return [step.tables[group.group_id].is_patched for group in step.groups]


def parts(step):
    """(group, its table's number) in order."""
    return [
        (group, index) for group in step.groups for index in range(len(group.tables))
    ]


def test_seats_are_those_of_the_group_with_the_fewest(step):
    assert pages_of(step).num_seats == 2


def test_stage_calls_once_a_table_and_the_first_of_a_group_patches(step):
    pages = pages_of(step)

    pages.stage(step.windows)

    assert pages.is_open
    assert len(pages.ops.calls) == sum(NUM_TABLES)
    for (made, index), call in zip(parts(step), pages.ops.calls, strict=True):
        gid = made.group_id
        *ours, seats, saved = call[:10]
        first, num_real, span, entry_tokens, number, patches = call[10:]
        assert seats == "seats"
        assert number == 1
        assert ours[:-1] == [
            *("stage", f"table {gid}.{index}", f"runs {gid}.{index}"),
            *(step.tables[gid], f"slots {gid}", "query_start_loc", "seq_lens"),
        ]
        assert ours[-1].tolist() == [3, 5, 8]
        assert saved is made.saved
        assert (first, num_real, span, entry_tokens) == (
            *(made.first_entry, made.num_real_entries, made.span, made.entry_tokens),
        )
        assert patches is (index == 0)


def test_every_step_of_the_runner_counts(step):
    """With drafts or without; the last number is followed by the first."""
    pages = pages_of(step)
    numbers = []
    for pages.step in (1, 7, 2**31 - 2, 2**31 - 1):
        pages.start_step()
        pages.stage(step.windows)
        pages.abort()
        numbers.append(pages.ops.calls[0][-2])
        pages.ops.calls.clear()
    assert numbers == [2, 8, 2**31 - 1, 1]


def test_leading_zeros_of_the_cumulative_numbers_are_left_out(step):
    pages = pages_of(step)
    cu_num_logits = torch.tensor([0, 3, 5, 8], dtype=torch.int32)

    pages.stage(step.windows._replace(cu_num_logits=cu_num_logits, num_leading_zeros=1))
    pages.abort()

    staged, *_, undone = pages.ops.calls
    assert staged[7].tolist() == [3, 5, 8]
    assert undone[-2] == NUM_REQS


IDS = torch.tensor([[1]])


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (SampledIds(IDS, 100), (IDS, 100, None)),
        (NumRejected(IDS), (None, 0, IDS)),
    ],
)
@pytest.mark.parametrize("publishes", [True, False])
def test_commit_calls_once_a_table_and_the_last_of_a_group_undoes(
    step, acceptance, expected, publishes
):
    pages = pages_of(step)
    pages.stage(step.windows)
    pages.ops.calls.clear()
    rows = [f"row {i}" for i in range(sum(NUM_TABLES))] if publishes else None

    pages.commit(acceptance, rows)

    assert not pages.is_open
    assert is_patched(step) == [False] * 3
    assert len(pages.ops.calls) == sum(NUM_TABLES)
    for row, ((made, index), call) in enumerate(
        zip(parts(step), pages.ops.calls, strict=True)
    ):
        gid = made.group_id
        assert call[:6] == (
            *("commit", f"table {gid}.{index}", f"runs {gid}.{index}"),
            *(step.tables[gid], f"slots {gid}", "seats"),
        )
        assert call[6] is made.saved
        assert call[7:10] == expected
        assert call[10] is step.counters[row]
        undoes = index == len(made.tables) - 1
        assert call[11:14] == (NUM_REQS, made.entry_tokens, undoes)
        assert call[14] == (f"row {row}" if publishes else None)


def test_abort_puts_every_table_back_once(step):
    pages = pages_of(step)
    pages.stage(step.windows)
    pages.ops.calls.clear()

    for _ in range(2):
        pages.abort()

    assert not pages.is_open
    assert is_patched(step) == [False] * 3
    assert [call[1:3] for call in pages.ops.calls] == [
        (step.tables[made.group_id], f"slots {made.group_id}") for made in step.groups
    ]
    for made, call in zip(step.groups, pages.ops.calls, strict=True):
        assert call[3] == "seats"
        assert call[4] is made.saved
        assert call[5:] == (NUM_REQS, made.entry_tokens)


def test_abort_without_a_step_calls_nothing(step):
    pages = pages_of(step)

    pages.abort()

    assert pages.ops.calls == []


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(sum(NUM_TABLES)))
def test_a_stage_that_fails_puts_back_what_it_patched(step, call, late):
    """And calls nothing for groups that it had not come to."""
    pages = pages_of(step, fails=[call], late=late)
    reached = parts(step)[call][0]

    with pytest.raises(RuntimeError, match=f"^planted in call {call}$"):
        pages.stage(step.windows)

    assert not pages.is_open
    assert is_patched(step) == [False] * 3
    assert len([name for name, _ in pages.ops.names() if name == "stage"]) == call + 1
    undone = [table for name, table in pages.ops.names() if name == "unstage"]
    mentioned = step.groups[: step.groups.index(reached) + 1]
    assert undone in (
        [step.tables[made.group_id] for made in mentioned[:-1]],
        [step.tables[made.group_id] for made in mentioned],
    )


def test_after_a_failed_stage_the_next_step_is_like_the_first(step):
    pages = pages_of(step, fails=[4])
    with pytest.raises(RuntimeError, match="planted"):
        pages.stage(step.windows)
    pages.ops.calls.clear()
    pages.ops.fails.clear()

    pages.stage(step.windows)
    pages.abort()

    names = [name for name, _ in pages.ops.names()]
    assert names == ["stage"] * sum(NUM_TABLES) + ["unstage"] * 3


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(sum(NUM_TABLES)))
def test_a_commit_that_fails_puts_all_tables_back_and_raises(step, call, late):
    first = sum(NUM_TABLES)
    pages = pages_of(step, fails=[first + call], late=late)
    pages.stage(step.windows)
    assert is_patched(step) == [True] * 3

    with pytest.raises(RuntimeError, match=f"^planted in call {first + call}$"):
        pages.commit(NumRejected(IDS))

    assert not pages.is_open
    assert is_patched(step) == [False] * 3
    assert [name for name, _ in pages.ops.names()].count("commit") == call + 1


@pytest.mark.parametrize("call", range(3))
def test_a_table_that_cannot_be_put_back_keeps_no_other_from_it(step, call):
    first = sum(NUM_TABLES)
    pages = pages_of(step, fails=[first + call])
    pages.stage(step.windows)

    with pytest.raises(RuntimeError, match=f"^planted in call {first + call}$"):
        pages.abort()

    assert is_patched(step) == [i == call for i in range(3)]
    assert not pages.is_open


def test_seats_of_groups_and_rows_share_no_entry():
    """Every (row, logical entry) has a shadow entry of its own group's region."""
    first, second = (
        group(gid, first=first, seats=3, entry_tokens=entry_tokens)
        for gid, first, entry_tokens in ((0, 40, 16), (1, 46, 8))
    )
    places = [
        {
            (made.first_entry + row * made.span + entry % made.span)
            * made.entry_tokens
            // 16
            for row, entry in itertools.product(range(made.num_seats), range(50))
        }
        for made in (first, second)
    ]
    assert places == [set(range(40, 46)), set(range(46, 52))]
