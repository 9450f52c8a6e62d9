# SPDX-License-Identifier: Apache-2.0
"""ShadowPages: which calls it makes of the ops, in which order, and what it puts back
when one of them fails. The ops are stand-ins here; tests/kernels has the real ones."""

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from vllm_nwor import ops
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

NUM_REQS = 3
IDS = torch.tensor([[1]])


@pytest.mark.parametrize("block_size", range(1, 18))
def test_a_seat_has_a_block_for_each_that_drafts_can_touch(block_size):
    for num_drafts in range(1, 40):
        touched = max(
            len({(first + i) // block_size for i in range(num_drafts)})
            for first in range(block_size)
        )
        assert blocks_per_seat(num_drafts, block_size) == touched


def group(group_id=0, num_tables=1, entry_tokens=16, first=44, num_seats=3):
    tables = [
        SimpleNamespace(table=f"table {group_id}.{i}", runs=f"runs {group_id}.{i}")
        for i in range(num_tables)
    ]
    region = ShadowRegion(first, num_seats, 2, num_real_blocks=40, block_size=16)
    memory = DeviceMemory(torch.device("cpu"), None)
    return ShadowGroup(group_id, tables, region, entry_tokens, memory)


@pytest.mark.parametrize(("entry_tokens", "per_block"), [(16, 1), (8, 2), (1, 16)])
def test_a_group_counts_in_entries_of_the_workers_table(entry_tokens, per_block):
    made = group(entry_tokens=entry_tokens)

    assert made.first_entry == 44 * per_block
    assert made.num_real_entries == 40 * per_block
    assert made.span == 2 * per_block
    assert made.num_seats == 3
    assert made.saved.shape == (3, SAVED_COLUMNS + 2 * made.span)
    assert made.saved.dtype == torch.int32
    assert not made.saved.any()
    assert made.saved.nbytes == num_bytes(3, made.span)


@pytest.mark.parametrize("entry_tokens", [3, 32])
def test_entries_that_do_not_divide_a_block_are_refused(entry_tokens):
    with pytest.raises(
        ValueError,
        match=f"^entry_tokens is {entry_tokens}; must divide the block size 16$",
    ):
        group(entry_tokens=entry_tokens)


class Table:
    """A group's block table: whether shadow entries are in it."""

    is_patched = False


ops.load()


class Ops:
    """Notes calls, by the names of the real ops' parameters.

    fails: number of the call that raises, from 0, or None. late: after its work, not
    before.
    """

    def __init__(self, fails=None, late=False):
        self.calls = []
        self.fails = fails
        self.late = late

    def __getattr__(self, name):
        names = [parameter.name for parameter in getattr(ops, name)._schema.arguments]

        def run(*arguments):
            named = dict(zip(names, arguments, strict=True))
            call = SimpleNamespace(**named, op=name)
            is_failing = self.fails == len(self.calls)
            self.calls.append(call)
            if is_failing and not self.late:
                raise RuntimeError("planted")
            if name == "stage" and call.patches:
                call.block_table.is_patched = True
            if name == "unstage" or (name == "commit_draft_layer" and call.undoes):
                call.block_table.is_patched = False
            if is_failing:
                raise RuntimeError("planted")

        return run


class World:
    """Pages of three groups, whose ids are 2, 0 and 5, and the windows of a step."""

    def __init__(self, **faults):
        self.groups = [
            group(2, num_tables=1, first=40, num_seats=5),
            group(0, num_tables=3, first=50, num_seats=4),
            group(5, num_tables=2, first=60, num_seats=3),
        ]
        self.windows = VerificationWindows(
            num_drafts=5,
            logits_indices=torch.arange(8),
            cu_num_logits=torch.tensor([3, 5, 8], dtype=torch.int32),
            slot_mappings=[f"slots {gid}" for gid in range(6)],
            block_tables=[Table() for _ in range(6)],
            query_start_loc="query_start_loc",
            seq_lens="seq_lens",
            seats="seats",
        )
        self.counters = torch.zeros(6, 8, dtype=torch.int64).unbind()
        self.ops = Ops(**faults)
        self.pages = ShadowPages(self.groups, self.counters, self.ops)

    def is_patched(self):
        tables = self.windows.block_tables
        return [tables[group.group_id].is_patched for group in self.groups]

    def take_calls(self):
        calls, self.ops.calls = self.ops.calls, []
        return calls

    def check_common(self, calls):
        """What stage and commit have in common: a call for each table, in order."""
        places = [
            (group, index)
            for group in self.groups
            for index in range(len(group.tables))
        ]
        for (made, index), call in zip(places, calls, strict=True):
            gid = made.group_id
            assert call.table == f"table {gid}.{index}"
            assert call.runs == f"runs {gid}.{index}"
            assert call.block_table is self.windows.block_tables[gid]
            assert call.slot_mapping == f"slots {gid}"
            assert call.seats == "seats"
            assert call.saved is made.saved
            assert call.entry_tokens == made.entry_tokens


def test_a_step_with_more_requests_than_seats_is_left_alone():
    world = World()
    four = torch.tensor([2, 4, 6, 8], dtype=torch.int32)

    assert not world.pages.stage(structs.replace(world.windows, cu_num_logits=four))

    assert not world.pages.is_open
    assert world.take_calls() == []


def test_stage_calls_once_a_table_and_the_first_of_a_group_patches():
    world = World()
    assert world.pages.num_seats == 3  # those of the group with the fewest

    assert world.pages.stage(world.windows)

    assert world.pages.is_open
    assert world.is_patched() == [True] * 3
    calls = world.take_calls()
    world.check_common(calls)
    assert [call.patches for call in calls] == [True, True, False, False, True, False]
    assert [call.first_entry for call in calls] == [40, 50, 50, 50, 60, 60]
    for call in calls:
        assert (call.query_start_loc, call.seq_lens) == ("query_start_loc", "seq_lens")
        assert call.cu_num_logits.tolist() == [3, 5, 8]
        assert (call.num_real_entries, call.span, call.step) == (40, 2, 1)


def test_every_step_of_the_runner_counts():
    """With drafts or without; the last number is followed by the first."""
    world = World()
    numbers = []
    for world.pages.step in (1, 7, 2**31 - 2, 2**31 - 1):
        world.pages.start_step()
        world.pages.stage(world.windows)
        world.pages.abort()
        numbers.append(world.take_calls()[0].step)
    assert numbers == [2, 8, 2**31 - 1, 1]


def test_leading_zeros_of_the_cumulative_numbers_are_no_requests():
    world = World()
    zeros = torch.tensor([0, 3, 5, 8], dtype=torch.int32)

    world.pages.stage(
        structs.replace(world.windows, cu_num_logits=zeros, num_leading_zeros=1)
    )
    world.pages.abort()

    staged, *_, undone = world.take_calls()
    assert (staged.cu_num_logits is zeros, staged.num_leading_zeros) == (True, 1)
    assert undone.num_reqs == NUM_REQS


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (SampledIds(IDS, 100), (IDS, 100, None)),
        (NumRejected(IDS), (None, 0, IDS)),
    ],
)
@pytest.mark.parametrize("publishes", [True, False])
def test_commit_calls_once_a_table_and_the_last_of_a_group_undoes(
    acceptance, expected, publishes
):
    world = World()
    world.pages.stage(world.windows)
    world.take_calls()
    rows = [f"row {i}" for i in range(6)] if publishes else None

    world.pages.commit(acceptance, rows)

    assert not world.pages.is_open
    assert world.is_patched() == [False] * 3
    calls = world.take_calls()
    world.check_common(calls)
    assert [call.undoes for call in calls] == [True, False, False, True, False, True]
    for call, counters in zip(calls, world.counters, strict=True):
        accepted = call.sampled_token_ids, call.vocab_size, call.num_rejected
        assert accepted == expected
        assert call.num_reqs == NUM_REQS
        assert call.counters is counters
    assert [call.counters_to for call in calls] == (rows or [None] * 6)


def test_abort_puts_every_table_back_once():
    world = World()
    world.pages.abort()  # without a step nothing is called
    world.pages.stage(world.windows)

    for _ in range(2):
        world.pages.abort()

    assert not world.pages.is_open
    assert world.is_patched() == [False] * 3
    undone = world.take_calls()[6:]
    for made, call in zip(world.groups, undone, strict=True):
        assert call.op == "unstage"
        assert call.slot_mapping == f"slots {made.group_id}"
        assert call.seats == "seats"
        assert call.saved is made.saved
        assert (call.num_reqs, call.entry_tokens) == (NUM_REQS, made.entry_tokens)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("call", "num_reached"), [(0, 1), (1, 2), (2, 2), (3, 2), (4, 3), (5, 3)]
)
def test_a_stage_that_fails_puts_back_what_it_patched(call, num_reached, late):
    """And calls nothing for groups that it had not come to."""
    world = World(fails=call, late=late)

    with pytest.raises(RuntimeError, match="planted"):
        world.pages.stage(world.windows)

    assert not world.pages.is_open
    assert world.is_patched() == [False] * 3
    names = [call.op for call in world.take_calls()]
    assert names == ["stage"] * (call + 1) + ["unstage"] * num_reached
    # The next step is like the first.
    world.ops.fails = None
    world.pages.stage(world.windows)
    world.pages.abort()
    names = [call.op for call in world.take_calls()]
    assert names == ["stage"] * 6 + ["unstage"] * 3


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(6))
def test_a_commit_that_fails_puts_all_tables_back_and_raises(call, late):
    world = World(fails=6 + call, late=late)
    world.pages.stage(world.windows)

    with pytest.raises(RuntimeError, match="planted"):
        world.pages.commit(NumRejected(IDS))

    assert not world.pages.is_open
    assert world.is_patched() == [False] * 3
    names = [call.op for call in world.take_calls()]
    assert names.count("commit_draft_layer") == call + 1


@pytest.mark.parametrize("call", range(3))
def test_a_table_that_cannot_be_put_back_keeps_no_other_from_it(call):
    world = World(fails=6 + call)
    world.pages.stage(world.windows)

    with pytest.raises(RuntimeError, match="planted"):
        world.pages.abort()

    assert world.is_patched() == [i == call for i in range(3)]
    assert not world.pages.is_open
