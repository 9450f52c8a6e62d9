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


class Ops:
    """Notes calls, by the names of the real ops' parameters, and which tables have
    shadow entries.

    fails: number of the call that raises, from 0, or None. late: after its work, not
    before.
    """

    def __init__(self, fails=None, late=False):
        self.calls, self.patched = [], set()
        self.fails, self.late = fails, late

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
                self.patched.add(call.block_table)
            if name == "unstage" or (name == "commit_draft_layer" and call.undoes):
                self.patched.discard(call.block_table)
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
            num_reqs=3,
            logits_indices=torch.arange(8),
            cu_num_logits=torch.tensor([3, 5, 8], dtype=torch.int32),
            slot_mappings=[f"slots {gid}" for gid in range(6)],
            block_tables=[f"entries {gid}" for gid in range(6)],
            query_start_loc="query_start_loc",
            seq_lens="seq_lens",
            seats="seats",
        )
        self.counters = torch.zeros(6, 8, dtype=torch.int64).unbind()
        self.ops = Ops(**faults)
        self.pages = ShadowPages(self.groups, self.counters, self.ops)

    def takes_calls(self, op, num_tables):
        """The calls since the last time are of `op`, for each group and its first
        `num_tables` tables in order; returns them."""
        calls, self.ops.calls = self.ops.calls, []
        places = [(made, i) for made in self.groups for i in range(len(made.tables))]
        places = [(made, i) for made, i in places if i < num_tables]
        for (made, i), call in zip(places, calls, strict=True):
            gid = made.group_id
            expected = {
                "op": op,
                "block_table": f"entries {gid}",
                "slot_mapping": f"slots {gid}",
                "seats": "seats",
                "entry_tokens": made.entry_tokens,
            }
            if op != "unstage":
                expected |= {"table": f"table {gid}.{i}", "runs": f"runs {gid}.{i}"}
            if op != "stage":
                expected["num_reqs"] = NUM_REQS
            assert expected.items() <= vars(call).items()
            assert call.saved is made.saved
        return calls


def test_there_are_seats_as_in_the_group_with_the_fewest():
    assert World().pages.num_seats == 3


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (SampledIds(IDS, 100), (IDS, 100, None)),
        (NumRejected(IDS), (None, 0, IDS)),
    ],
)
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("publishes", [True, False])
def test_each_table_has_a_call(acceptance, expected, zeros, publishes):
    """The first of a group patches, the last one undoes. Leading zeros of the
    cumulative numbers are no requests."""
    world = World()
    rows = [f"row {i}" for i in range(6)] if publishes else None
    logits = torch.tensor([0] * zeros + [3, 5, 8], dtype=torch.int32)
    given = {"cu_num_logits": logits, "num_leading_zeros": zeros}

    world.pages.stage(structs.replace(world.windows, **given))

    assert world.pages.is_open
    assert len(world.ops.patched) == 3
    calls = world.takes_calls("stage", num_tables=3)
    assert [call.patches for call in calls] == [True, True, False, False, True, False]
    assert [call.first_entry for call in calls] == [40, 50, 50, 50, 60, 60]
    for call in calls:
        assert (call.query_start_loc, call.seq_lens) == ("query_start_loc", "seq_lens")
        assert {name: getattr(call, name) for name in given} == given
        assert (call.num_real_entries, call.span, call.step) == (40, 2, 1)

    world.pages.commit(acceptance, rows)

    assert not world.pages.is_open
    assert world.ops.patched == set()
    calls = world.takes_calls("commit_draft_layer", num_tables=3)
    assert [call.undoes for call in calls] == [True, False, False, True, False, True]
    for call, counters in zip(calls, world.counters, strict=True):
        accepted = call.sampled_token_ids, call.vocab_size, call.num_rejected
        assert accepted == expected
        assert call.counters is counters
    assert [call.counters_to for call in calls] == (rows or [None] * 6)


def test_every_step_of_the_runner_counts():
    """With drafts or without; the last number is followed by the first."""
    world = World()
    numbers = []
    for world.pages.step in (1, 7, 2**31 - 2, 2**31 - 1):
        world.pages.start_step()
        world.ops.calls = []
        world.pages.stage(world.windows)
        world.pages.abort()
        numbers.append(world.ops.calls[0].step)
    assert numbers == [2, 8, 2**31 - 1, 1]


def test_abort_puts_every_table_back_once():
    world = World()
    world.pages.abort()  # without a step nothing is called
    assert world.ops.calls == []
    world.pages.stage(world.windows)
    world.takes_calls("stage", num_tables=3)

    for _ in range(2):
        world.pages.abort()

    assert not world.pages.is_open
    assert world.ops.patched == set()
    world.takes_calls("unstage", num_tables=1)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(6))
def test_a_call_that_fails_leaves_every_table_as_it_was(call, late):
    """Then the next step is like the first. A commit raises, because the kept rows are
    lost."""
    world = World(fails=call, late=late)

    with pytest.raises(RuntimeError, match="planted"):
        world.pages.stage(world.windows)

    assert not world.pages.is_open
    assert world.ops.patched == set()
    names = [call.op for call in world.ops.calls]
    assert names == ["stage"] * (call + 1) + ["unstage"] * 3

    world.ops.calls, world.ops.fails = [], 6 + call
    world.pages.stage(world.windows)
    with pytest.raises(RuntimeError, match="planted"):
        world.pages.commit(NumRejected(IDS))

    assert not world.pages.is_open
    assert world.ops.patched == set()
    names = [call.op for call in world.ops.calls]
    assert names[: 7 + call] == ["stage"] * 6 + ["commit_draft_layer"] * (call + 1)
    assert set(names[7 + call :]) == {"unstage"}


@pytest.mark.parametrize("call", range(3))
def test_a_table_that_cannot_be_put_back_keeps_no_other_from_it(call):
    world = World(fails=6 + call)
    world.pages.stage(world.windows)

    with pytest.raises(RuntimeError, match="planted"):
        world.pages.abort()

    assert world.ops.patched == {f"entries {world.groups[call].group_id}"}
    assert not world.pages.is_open
