# SPDX-License-Identifier: Apache-2.0
"""The ops against the reference, byte for byte (guarantees 1 to 3, as far as the
kernels can give them), and in numbers where the numbers say something by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.reference import PAD, Layout, columns, packed_layout, row_layout
from tests.kernels.transaction import (
    COMMIT,
    FAMILIES,
    LOG,
    NO_PAGES,
    RESTORE,
    STAGE,
    UNSTAGE,
    AcceptanceForm,
    Pages,
    Request,
    Step,
    check_step,
    drafts_in,
)
from vllm_nwor import ops
from vllm_nwor.layout.kv_layout import KVLayout
from vllm_nwor.layout.tables import DeviceMemory, LayerCache
from vllm_nwor.transaction.undo_log import GroupLog, UndoLog

CPU = torch.device("cpu")
LOGGED, STAGED = FAMILIES
families = pytest.mark.parametrize("family", FAMILIES, ids=["log", "stage"])


def nhd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    slot = num_heads * run_bytes
    sizes = (num_blocks, block_size, num_heads, run_bytes)
    return row_layout(*sizes, block_size * slot, run_bytes, slot)


def hnd(num_blocks=3, block_size=16, num_heads=4, run_bytes=64):
    head = block_size * run_bytes
    sizes = (num_blocks, block_size, num_heads, run_bytes)
    return row_layout(*sizes, num_heads * head, head, run_bytes)


def mla(num_blocks=3, block_size=16, run_bytes=1152):
    return nhd(num_blocks, block_size, 1, run_bytes)


def padded(num_blocks=3, block_size=16, run_bytes=24):
    """MLA's, with bytes behind each slot and each block that are nobody's."""
    slot = run_bytes + 16
    sizes = (num_blocks, block_size, 1, run_bytes)
    return row_layout(*sizes, block_size * slot + 8, 0, slot)


def column_major(num_blocks=3, block_size=16):
    owner = columns(block_size, dims=8, element=2, tail=16)
    return packed_layout(num_blocks, owner)


def interleaved(num_blocks=3, block_size=16):
    """Runs of 1, 2, 4, 8, 16 and 5 bytes in turn, more than are fetched ahead, then one
    that touches its end."""
    slots = torch.arange(block_size)
    units = [slots.repeat_interleave(unit) for unit in (4, 1, 16, 2, 8, 5) * 3]
    return packed_layout(num_blocks, torch.cat([*units, slots.flip(0)]))


# The worked example: entries of 4 tokens, two for the shadow of each row.
PAGES = Pages(
    entry_tokens=4, num_real_entries=10, first_entry=10, span=2, num_seats=4, width=4
)
# Two rows before the first draft, of which position 5 and the target at 6 lie in the
# first staged entry, as position 4 of an earlier step does; drafts in two entries.
CROSSING = Request((3, 5, 7, 0), seq_len=10, num_rows=5, num_drafts=3, accepted=2)
# The target is the last row of an entry that no draft is in.
TARGET_ALONE = Request((2, 4, 0, 0), seq_len=7, num_rows=4, num_drafts=3)
NO_DRAFTS = Request((1, 0, 0, 0), seq_len=2, num_rows=2, num_drafts=0)
EXAMPLE = [CROSSING, NO_DRAFTS, TARGET_ALONE]


# Without pages. The worked example of ops.py, with a padded slot: k = [2, 0, 1].
PADDED = drafts_in((20, 21), (), (PAD,), accepted=(1, 0, 0))
# Neighbours, also across blocks; padding; all, some and none accepted.
MIXED = drafts_in(
    *((0, 1, 2, 3), (31, 32), (47, PAD, 45), (), (17,)), accepted=(2, 1, 0, 0, 1)
)
# Two requests of one prefix draft into the same slots; one of them accepts.
SHARED = drafts_in((5, 6), (5, 6), accepted=(2, 0))
NOTHING = drafts_in((), (), accepted=(0, 0))
FEW = {"num_heads": 2, "run_bytes": 8}


def layout_for(pages, layout=nhd, **kwargs):
    return layout(pages.num_slots // pages.entry_tokens, pages.entry_tokens, **kwargs)


def in_blocks(size, layout, num_entries, entry_tokens):
    """A layer whose blocks are smaller than its group's entries."""
    return layout(num_entries * entry_tokens // size, size)


def check_example(family, device, *tables, **kwargs):
    """tables: the kinds of their layers."""
    layouts = [[layout_for(PAGES, kind) for kind in kinds] for kinds in tables]
    return check_step(family, device, layouts, EXAMPLE, PAGES, **kwargs)


# --- log and restore, stage and commit ------------------------------------------------


# By the kinds of their layers. Each of the tables of a group has its part of a row of
# the log; the first call of stage patches and the last one of commit undoes.
TABLES = {
    "nhd": [[nhd] * 3],
    "hnd": [[hnd] * 3],
    "mla": [[mla] * 3],
    "padded": [[padded] * 3],
    "three": [[nhd] * 2, [partial(hnd, num_heads=3)], [mla]],
    "small blocks": [[partial(in_blocks, 2, nhd), partial(in_blocks, 1, hnd), mla]],
    "packed": [[column_major] * 3],
    "interleaved": [[interleaved] * 3],
}


def skip_if_packed(is_packed, device):
    if is_packed and device.type != "cpu":
        pytest.skip("packed layouts are for the CPU")


# Every form of acceptance with each kind of rows; one with all tables.
FORMS = [
    (tables, form)
    for tables in TABLES
    for form in AcceptanceForm
    if form is AcceptanceForm.SAMPLED or tables in ("nhd", "hnd", "mla", "padded")
]


@families
@pytest.mark.sanitizer
@pytest.mark.parametrize(("tables", "form"), FORMS)
def test_rejected_drafts_leave_no_byte(device, family, tables, form):
    skip_if_packed(tables in ("packed", "interleaved"), device)
    check_example(family, device, *TABLES[tables], form=form)


@families
@pytest.mark.parametrize("run_bytes", [1, 2, 3, 4, 8, 16, 24, 33, 130, 272, 2048])
@pytest.mark.parametrize(
    "misalignment", [pytest.param(0, marks=pytest.mark.sanitizer), 1, 8]
)
def test_every_access_width(device, family, run_bytes, misalignment):
    def misaligned(kind, *sizes):
        return replace(kind(*sizes, run_bytes=run_bytes), misalignment=misalignment)

    check_example(family, device, [partial(misaligned, kind) for kind in (nhd, hnd)])


@families
@pytest.mark.parametrize(
    ("num_requests", "num_layers"),
    [(31, 1), (32, 1), (33, 1), (64, 1), (1025, 1), (2049, 1), (40, 80)],
)
def test_large_batches(device, family, num_requests, num_layers):
    """Windows of 0 to 4 drafts in tables of three entries. All layers copy from the
    entries that were there before the tables are patched, whichever is first."""
    pages = Pages(4, 1 + 3 * num_requests, 2 + 3 * num_requests, 2, num_requests, 3)
    requests = []
    for number in range(num_requests):
        num_drafts = number % 5
        num_rows = 1 + num_drafts + number % 2
        seq_len = num_rows + number % (13 - num_rows)
        entries = tuple(range(1 + 3 * number, 4 + 3 * number))
        accepted = num_drafts // 2
        requests.append(Request(entries, seq_len, num_rows, num_drafts, accepted))
    layouts = [[layout_for(pages, **FEW)] * num_layers]
    step = check_step(family, device, layouts, requests, pages)
    (counted,) = step.counted()
    assert (counted[1], counted[6]) == (sum(r.num_drafts for r in requests), 0)


# --- log and restore alone ------------------------------------------------------------


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("requests", "extra_drafts"),
    [
        *((PADDED, 0), (PADDED, 1), (PADDED, 40), (SHARED, 0), (MIXED, 0)),
        *((NOTHING, 0), (NOTHING, 3), ([], 2)),
    ],
)
def test_num_drafts_is_an_upper_bound(device, requests, extra_drafts):
    layouts = [[nhd()] * 2, [hnd()]]
    check_step(LOGGED, device, layouts, requests, extra_drafts=extra_drafts)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "kinds",
    [[nhd, hnd], [mla] * 2, [column_major, nhd, interleaved]],
    ids=["rows", "mla", "packed"],
)
def test_rejected_slots_are_poisoned(device, kinds):
    """What the manager launches under VLLM_NWOR_ON_REJECT=poison, each layer with a
    byte of its own."""
    skip_if_packed(column_major in kinds, device)
    slots = (0, 1, 2, 3), (47, PAD, 45), (), (17,)
    step = Step(device, [[kind() for kind in kinds]])
    step.load(drafts_in(*slots, accepted=(2, 0, 0, 1)))
    caches = []
    for number, layer in enumerate(step.layers):
        *strides, block_size, num_blocks = layer.layout.columns
        layout = KVLayout(block_size, num_blocks, *strides, layer.layout.runs)
        cache = layer.memory[layer.start :]
        caches.append(LayerCache(f"{number}", cache, layout, 0x40 + number))
    memory = DeviceMemory(device, None)
    group = GroupLog(0, caches, step.num_drafts, memory, poisons=True)
    counters = [step.counters[0] for _ in group.tables]
    ring = [step.published[:1] for _ in group.tables]
    log = UndoLog([group], counters, ring, ops.load_builtins(device))

    num_drafts = step.num_drafts
    for _, save in log.begins:
        drafts = step.slot_mapping, step.logits_indices, step.cu_num_logits
        save(*drafts, num_drafts, 0)
    step.forward()
    written = [layer.memory.clone() for layer in step.layers]
    num_rejected = torch.tensor([2, 3, 0, 0], dtype=torch.int32, device=device)
    for restore in log.commits:
        restore(None, 0, num_rejected, num_drafts, -1)

    for number, (layer, expected) in enumerate(zip(step.layers, written, strict=True)):
        expected[layer.index([2, 3, 47, 45])] = 0x40 + number
        assert torch.equal(layer.memory, expected), f"layer {number}"


# --- stage and commit alone -----------------------------------------------------------


@pytest.mark.sanitizer
def test_the_worked_example(device):
    """In numbers, without the reference."""
    step = Step(device, [[layout_for(PAGES)] * 2], PAGES)
    layer = step.layers[0]

    def slot(number):
        return layer.memory[layer.index([number])[0]]

    committed = slot(20).clone()  # position 4 of the first request

    step.stage(EXAMPLE)

    entries = [[3, 11, 10, 0], [1, 0, 0, 0], [2, 15, 0, 0]]
    assert step.block_table[:3].tolist() == entries
    slots = [*(45, 46, 47, 40, 41), *(4, 5), *(11, 60, 61, 62)]
    assert step.slot_mapping[:11].tolist() == slots
    assert step.saved.tolist() == [
        [3, 0, 5, 10, 1, 2, 1, 0, 2, -1, 0, 5, 7, 11, 10],
        [0] * 15,
        [3, 7, 3, 7, 1, 1, 0, 0, 2, -1, 0, 4, 0, 15, 0],
        [0] * 15,
    ]
    assert torch.equal(slot(44), committed)

    layer.memory[layer.index(slots)] = 7
    step.check_tables(COMMIT)

    assert step.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
    slots = [*(21, 22, 23, 28, 29), *(4, 5), *(11, 16, 17, 18)]
    assert step.slot_mapping[:11].tolist() == slots
    is_seven = [
        bool((slot(number) == 7).all()) for number in (20, *slots[:5], *slots[7:])
    ]
    assert is_seven == [False, *[True] * 4, False, True, *[False] * 3]
    row_bytes = 2 * 256
    assert step.counted() == [[2, 6, 2, 4, 2, 0, 0, row_bytes, 4 * row_bytes]]
    assert step.published.tolist() == step.counters.tolist()


LEFT_ALONE = {
    "no drafts and no entries": replace(NO_DRAFTS, entries=(0,) * 4),
    "fewer rows than logits": replace(CROSSING, num_rows=3),
    "begins before 0": replace(CROSSING, num_rows=11),
    "more entries than the span": replace(CROSSING, num_rows=9, num_drafts=7),
    "more entries than the table is wide": Request((3, 5, 6, 7), 18, 4, 3),
    "a null entry": replace(CROSSING, entries=(3, 5, 0, 0)),
    "a negative entry": replace(CROSSING, entries=(3, -5, 7, 0)),
    "the first id that is not real": replace(CROSSING, entries=(3, 5, 10, 0)),
    "a shadow entry": replace(CROSSING, entries=(3, 11, 7, 0)),
    "a draft's padded slot": replace(CROSSING, wrong_slots=((4, PAD),)),
    "a draft's slot in another entry": replace(CROSSING, wrong_slots=((3, 21),)),
    "a target's slot": replace(CROSSING, wrong_slots=((1, 21),)),
    "the slot of a row before the target": replace(CROSSING, wrong_slots=((0, 22),)),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("why", LEFT_ALONE)
def test_windows_left_alone(device, why):
    """They keep their entries and slots, are written in place, and are counted; their
    neighbours are staged."""
    odd = LEFT_ALONE[why]
    requests = [TARGET_ALONE, odd, NO_DRAFTS]
    step = check_step(STAGED, device, [[layout_for(PAGES)] * 2], requests, PAGES)
    assert step.saved[:3, 0].tolist() == [3, -odd.num_drafts, 0]
    assert step.counted()[0][1] == 3 + odd.num_drafts
    assert step.counted()[0][4:7] == [1, 0, odd.num_drafts]


# The third has a window of its own in the memory behind `saved`, the first in front.
SEATLESS = [CROSSING, TARGET_ALONE, replace(TARGET_ALONE, entries=(6, 8, 0, 0))]


@pytest.mark.sanitizer
@pytest.mark.parametrize("seats", [[-1, 0, 3], [1, 4, 0], [2, 1, 0], [3, 8, -1]])
def test_a_request_without_a_seat_is_left_alone(device, seats):
    """It keeps its entries and slots, is written in place, and is not counted."""
    pages = replace(PAGES, num_seats=5)
    layouts = [[layout_for(pages, kind)] for kind in (nhd, hnd)]
    step = Step(device, layouts, pages)
    step.stage(SEATLESS, [0, 1, 4])
    step.check(UNSTAGE)
    step.write(range(4, 40))
    step.saved = step.saved[1:4]
    staged = [request for request, seat in enumerate(seats) if 0 <= seat < 3]
    for after in (UNSTAGE, COMMIT):
        step.stage(SEATLESS, seats)
        assert [*step.windows()] == staged
        step.forward()
        step.check_tables(after)
    assert step.counted()[0][:2] == [len(staged), 3 * len(staged)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", AcceptanceForm)
@pytest.mark.parametrize(
    ("seats", "staged"),
    [(None, [0, 1]), ([0, 1, 2, 3], [0, 1]), ([5, 0, -1, 1], [1]), ([2, 3, 4, 5], [])],
)
def test_a_step_of_more_requests_than_seats(device, seats, staged, form):
    """Windows with a seat are staged; those without one, and one that has to be left
    alone, are logged. Each is counted once, and no byte of a rejected one stays."""
    odd = replace(CROSSING, entries=(0, 1, 9, 0), accepted=1, wrong_slots=((0, 4),))
    requests = [*SEATLESS, odd]
    pages = replace(PAGES, num_seats=2)
    layouts = [[layout_for(pages, kind)] for kind in (nhd, hnd)]
    step = Step(device, layouts, pages, capacity=12)
    step.rest_is_logged = True
    step.load(requests, seats)
    before = [layer.memory.clone() for layer in step.layers]
    step.check_tables(STAGE)
    assert [*step.windows()] == staged
    step.check_tables(LOG)
    step.forward()
    step.check_tables(COMMIT, form)
    step.check_tables(RESTORE, form)
    slots = [request.slots(pages.entry_tokens) for request in requests]
    kept = [
        slot
        for request, of_it in zip(requests, slots, strict=True)
        for slot in of_it[: len(of_it) - request.num_drafts + request.accepted]
    ]
    real = range(pages.num_real_entries * pages.entry_tokens)
    for layer, old in zip(step.layers, before, strict=True):
        others = layer.index([slot for slot in real if slot not in kept])
        assert torch.equal(layer.memory[others], old[others])
        assert not torch.equal(layer.memory[layer.index(kept)], old[layer.index(kept)])
    for row in step.counted():
        assert row[:5] == [4, 12, 3, 9, len(staged)]
        assert row[6] == 0


def test_a_call_that_does_not_patch_reads_saved_alone(device):
    """The table and the slots are patched by then, and might be anything."""
    step = Step(device, [[layout_for(PAGES)], [layout_for(PAGES, hnd)]], PAGES)
    step.load(EXAMPLE)
    step.check(STAGE, 0)
    step.block_table.fill_(-7)
    step.slot_mapping.fill_(-7)
    step.check(STAGE, 1)


def following(request, num_drafts=3, accepted=0, before=0):
    """The request in the step after the one in which it was committed; `before`: rows
    besides the target's."""
    first = request.seq_len - request.num_drafts + request.accepted
    num_rows = before + 1 + num_drafts
    sizes = {"seq_len": first + num_rows, "num_rows": num_rows}
    return replace(request, **sizes, num_drafts=num_drafts, accepted=accepted)


def goes_on(request, *before):
    """The request in so many steps."""
    steps = [request]
    for rows in before:
        request = following(request, accepted=request.accepted, before=rows)
        steps += [request] * (request.seq_len <= 32)
    return [[step] for step in steps]


LIFE_PAGES = replace(PAGES, num_real_entries=31, first_entry=32, num_seats=3, width=8)
# Rows 5 to 8, of which 5 is kept: the next step begins at 6, and drafts from 7 on are
# in the entry of rows 4 and 5.
FIRST = Request(tuple(range(1, 9)), seq_len=9, num_rows=4, num_drafts=3)
AGAIN = following(FIRST)
MOVED = replace(AGAIN, entries=(1, 20, *AGAIN.entries[2:]))
EARLIER = replace(FIRST, seq_len=8)
OTHER, OTHER_AGAIN = (
    replace(request, entries=tuple(range(11, 19))) for request in (FIRST, AGAIN)
)
NO_DRAFTS_HERE = replace(FIRST, seq_len=7, num_rows=1, num_drafts=0)
LEFT = replace(FIRST, wrong_slots=((1, PAD),))
WITHOUT_DRAFTS = "a step in which vLLM writes to any block"


# Steps of requests that go on, and how many rows the last one copies to shadows: only
# what the step before left counts. A dict has the seats of its rows, others have none;
# a tuple is a step that fails between the launches of its two tables.
HISTORIES = {
    "the first": ([[FIRST]], 1),
    # In every place of an entry, with entries that only the target is in.
    **{
        f"goes on with {accepted}": (
            goes_on(replace(FIRST, accepted=accepted), 0, 0, 2, 0, 0),
            0,
        )
        for accepted in range(4)
    },
    "goes on from the start of an entry": (goes_on(EARLIER, 0), 0),
    "another entry": ([[FIRST], [MOVED]], 2),
    "an entry before": ([[FIRST], [replace(AGAIN, entries=(20, *range(2, 9)))]], 0),
    "a row back": ([[FIRST], [replace(AGAIN, seq_len=AGAIN.seq_len - 1)]], 1),
    "a row left out": ([[EARLIER], [AGAIN]], 2),
    "seats": ([{2: FIRST, 0: OTHER}, {0: OTHER_AGAIN, 2: AGAIN}], 0),
    "a seat's step missed": ([{2: FIRST, 0: OTHER}, {0: OTHER_AGAIN}, {2: AGAIN}], 2),
    "seats changed": ([{2: FIRST, 0: OTHER}, [AGAIN, OTHER_AGAIN]], 2 * 2),
    "no drafts": ([[FIRST], WITHOUT_DRAFTS, [AGAIN]], 2),
    "others alone": ([[FIRST], {1: OTHER}, [AGAIN]], 2),
    "its own without drafts": ([[FIRST], [NO_DRAFTS_HERE, OTHER], [AGAIN]], 2),
    "another in its seat": ([[FIRST], [OTHER], [AGAIN]], 2),
    "left alone": ([[FIRST], [LEFT], [AGAIN]], 2),
    "failed": ([[FIRST], (AGAIN,), [AGAIN]], 2),
    "a copy failed": ([[FIRST], (MOVED,), [AGAIN]], 2),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("history", HISTORIES)
def test_rows_that_a_shadow_has_already(device, history):
    steps, copied = HISTORIES[history]
    layouts = [[layout_for(LIFE_PAGES, kind, **FEW)] for kind in (nhd, hnd)]
    step = Step(device, layouts, LIFE_PAGES)
    for requests in steps:
        step.step += 1
        if requests is WITHOUT_DRAFTS:
            step.write(range(4, 4 * LIFE_PAGES.num_real_entries))
            continue
        if isinstance(requests, tuple):
            step.load(requests)
            step.check(STAGE)
            step.check(UNSTAGE)
            continue
        has_seats = isinstance(requests, dict)
        rows = requests.values() if has_seats else requests
        step.load([*rows], [*requests] if has_seats else None)
        step.check_tables(STAGE)
        windows = step.windows().values()
        step.forward()
        step.check_tables(COMMIT)
    assert sum(window.num_copied for window in windows) == copied


# --- anything: last, as a failure takes minutes to shrink -----------------------------


SMALL = st.one_of(st.just(0), st.integers(0, 24))


@st.composite
def row_layouts(draw: st.DrawFn, block_size: int, num_blocks: int) -> Layout:
    """NHD, HND, one run a slot (MLA), and blocks that hold several layers, with any
    padding between runs, slots, heads and blocks: odd numbers included."""
    num_heads = draw(st.integers(1, 5))
    run_bytes = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 144])))
    sizes = {"head": num_heads, "slot": block_size, "block": num_blocks}
    # From the inside out. Heads outermost: a block's bytes are all over the allocation.
    orders = ["head slot block", "slot head block", "slot block head"]
    strides = {}
    stride = run_bytes
    for name in draw(st.sampled_from(orders)).split():
        strides[name] = stride + draw(SMALL)
        stride = sizes[name] * strides[name]
    layout = row_layout(
        *(num_blocks, block_size, num_heads, run_bytes),
        *(strides["block"], strides["head"], strides["slot"]),
    )
    return replace(layout, misalignment=draw(SMALL))


@st.composite
def packed_layouts(draw: st.DrawFn, block_size: int, num_blocks: int) -> Layout:
    """Units of a few bytes, interleaved (as column-major and AMX packs are) or in any
    order in the block."""
    owner = torch.arange(block_size).repeat(draw(st.integers(1, 24)))
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
        owner = owner[torch.randperm(owner.numel(), generator=generator)]
    owner = owner.repeat_interleave(draw(st.sampled_from([1, 2, 4, 8, 16])))
    return replace(packed_layout(num_blocks, owner), misalignment=draw(SMALL))


def accepted(num_drafts: int) -> st.SearchStrategy[int]:
    """Also more valid tokens than rows, or none, as for a request with an unfinished
    prompt: the target and earlier rows are still committed."""
    outside = st.sampled_from([-2, -1, num_drafts + 1, 70])
    return st.one_of(st.integers(0, num_drafts), outside)


@st.composite
def batches(draw: st.DrawFn, num_slots: int) -> list[Request]:
    """Windows of 0 to 5 drafts; slots anywhere, also the same one twice (requests that
    share blocks), and padding."""
    slot = st.one_of(st.integers(0, num_slots - 1), st.just(PAD))
    window = st.lists(slot, max_size=5)
    slots = draw(st.lists(window, max_size=40 if draw(st.booleans()) else 4))
    return drafts_in(*slots, accepted=[draw(accepted(len(of))) for of in slots])


@st.composite
def paged_batches(
    draw: st.DrawFn, entry_tokens: int, num_steps: int = 1
) -> tuple[Pages, list[list[Request]]]:
    """Steps of up to four requests whose windows begin anywhere, with rows before the
    target or without; some must be left alone."""
    span = draw(st.integers(1, 4))
    width = draw(st.integers(1, 6))
    num_seats = draw(st.integers(1, 4))
    most = num_seats + draw(st.integers(0, 2))  # requests
    num_real = 1 + most * width + draw(st.integers(0, 2))
    first = num_real + draw(st.integers(0, 2))
    pages = Pages(entry_tokens, num_real, first, span, num_seats, width)
    steps = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
        ids = (1 + torch.randperm(num_real - 1, generator=generator)).tolist()
        rows = [ids[width * row :][:width] for row in range(most)]
        num_reqs = draw(st.integers(0, most))
        steps.append([draw(paged_requests(pages, row)) for row in rows[:num_reqs]])
    return pages, steps


FAULTS = ["few rows", "before 0", "beyond", "entry", "slot"]


@st.composite
def paged_requests(draw: st.DrawFn, pages: Pages, row: list[int]) -> Request:
    entry_tokens, num_tokens = pages.entry_tokens, pages.width * pages.entry_tokens
    # One more than always fits into `span` entries.
    most = min((pages.span - 1) * entry_tokens + 2, num_tokens - 1)
    num_drafts = draw(st.integers(0, most))
    before = st.integers(0, num_tokens - 1 - num_drafts)
    num_rows = 1 + num_drafts + draw(st.one_of(st.just(0), before))
    seq_len = draw(st.integers(num_rows, num_tokens))
    entries = list(row)
    # A sliding window has dropped what lies before.
    dropped = (seq_len - num_rows) // entry_tokens
    if draw(st.booleans()):
        entries[:dropped] = [0] * dropped
    wrong_slots = []
    faults = FAULTS if draw(st.integers(0, 3)) == 0 and num_drafts > 0 else [None]
    fault = draw(st.sampled_from(faults))
    if fault == "few rows":
        num_rows = draw(st.integers(1, num_drafts))
    elif fault == "before 0":
        seq_len = draw(st.integers(0, num_rows - 1))
    elif fault == "beyond":
        seq_len = num_tokens + draw(st.integers(1, entry_tokens))
    elif fault == "entry":
        position = draw(st.integers(seq_len - num_drafts, seq_len - 1))
        outside = [0, -1, pages.num_real_entries, pages.first_entry, (1 << 31) - 1]
        entries[position // entry_tokens] = draw(st.sampled_from(outside))
    elif fault == "slot":
        # Also of a row in an entry that is not staged, which is no fault.
        at = draw(st.integers(0, num_rows - 1))
        sound = Request(tuple(entries), seq_len, num_rows, num_drafts)
        slot = sound.slots(entry_tokens)[at]
        wrong = st.sampled_from([PAD, slot - 1, slot + 1, slot + entry_tokens])
        wrong_slots.append((at, draw(wrong)))
    sizes = seq_len, num_rows, num_drafts, draw(accepted(num_drafts))
    return Request(tuple(entries), *sizes, tuple(wrong_slots))


@families
@pytest.mark.parametrize("is_packed", [False, True])
@settings(max_examples=150)
@given(data=st.data())
def test_any_steps(device, data, family, is_packed):
    skip_if_packed(is_packed, device)
    block_size = data.draw(st.sampled_from([1, 4, 16 if is_packed else 8]))
    if family is LOGGED:
        pages, num_blocks = NO_PAGES, data.draw(st.integers(1, 4))
        steps = data.draw(st.lists(batches(num_blocks * block_size), max_size=2))
    else:
        per_entry = data.draw(st.integers(1, 2 if is_packed else 3))
        pages, steps = data.draw(paged_batches(block_size * per_entry, 2))
        num_blocks = pages.num_slots // block_size
    layers = st.lists(row_layouts(block_size, num_blocks), min_size=1, max_size=3)
    layouts = data.draw(st.lists(layers, min_size=not is_packed, max_size=2))
    if is_packed:
        packing = data.draw(packed_layouts(block_size, num_blocks))
        layouts = [[packing] * 2, *layouts[:1]]
    num_drafts = max((sum(r.num_drafts for r in step) for step in steps), default=0)
    extra_drafts = data.draw(st.integers(0, 3))
    small = {name: data.draw(SMALL) for name in ("gap", "slack", "padding")}
    step = Step(
        *(device, layouts, pages),
        seed=data.draw(st.integers(0, 1000)),
        capacity=num_drafts + extra_drafts + data.draw(st.integers(0, 2)),
        misalignment=data.draw(SMALL),
        **small,
    )
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    before, after = family
    tokens = pages.entry_tokens
    for requests in steps:
        step.step += 1
        step.load(requests, None, extra_drafts, index_dtype)
        # The log refuses what is no slot of the cache; stage leaves it alone.
        slots = [slot for request in requests for slot in request.slots(tokens)]
        can_log = family is STAGED and all(
            [
                *(PAD <= slot < pages.num_slots for slot in slots),
                *(request.num_rows > request.num_drafts for request in requests),
            ]
        )
        step.rest_is_logged = can_log and data.draw(st.booleans())
        step.check_tables(before)
        if step.rest_is_logged:
            step.check_tables(LOG)
        if family is STAGED and data.draw(st.integers(0, 4)) == 0:
            step.check(UNSTAGE)
            continue
        step.forward()
        if family is STAGED and data.draw(st.integers(0, 2)) == 0:
            step.meddle(data.draw(st.integers(0, 1 << 16)))
        form = data.draw(st.sampled_from(AcceptanceForm))
        step.check_tables(after, form)
        if step.rest_is_logged:
            step.check_tables(RESTORE, form)
