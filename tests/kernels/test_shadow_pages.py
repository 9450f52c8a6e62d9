# SPDX-License-Identifier: Apache-2.0
"""stage, commit_draft_layer and unstage against the reference, byte for byte, and in
numbers where the numbers say something by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.reference import PAD, Pages, Request
from tests.kernels.strategies import packed_layouts, paged_batches, row_layouts
from tests.kernels.test_log_restore import column_major, hnd, mla, nhd
from tests.kernels.transaction import (
    NUM_COUNTERS,
    AcceptanceForm,
    ShadowSide,
    ShadowStep,
)

ANY_EXAMPLE = settings(
    max_examples=150,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
CPU = torch.device("cpu")
FORMS = st.sampled_from(list(AcceptanceForm))

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


def layout_for(pages, layout=nhd, block_size=None, **kwargs):
    block_size = block_size or pages.entry_tokens
    return layout(pages.num_slots // block_size, block_size, **kwargs)


def staged(device, requests, pages=PAGES, layouts=None, **options):
    """A step, staged, with everything compared."""
    layouts = layouts or [[layout_for(pages)] * 2]
    step = ShadowStep(device, pages, layouts, **options)
    step.stage(requests)
    return step


def one_step(*args, form=AcceptanceForm.SAMPLED, **kwargs):
    """Staged, run and committed; returns the step."""
    step = staged(*args, **kwargs)
    step.forward()
    step.commit(form)
    return step


@pytest.mark.sanitizer
def test_the_worked_example(device):
    """In numbers, without the reference."""
    side = ShadowSide(PAGES, [[layout_for(PAGES)] * 2], device)
    side.load(EXAMPLE)
    # Position 4 of the first request.
    layer = side.layers[0]
    committed = layer.memory[layer.index([20])[0].to(device)].clone()

    side.stage()

    assert side.block_table[:3].tolist() == [
        [3, 11, 10, 0],
        [1, 0, 0, 0],
        [2, 15, 0, 0],
    ]
    assert side.slot_mapping[:11].tolist() == [
        *(45, 46, 47, 40, 41),
        *(4, 5),
        *(11, 60, 61, 62),
    ]
    assert side.saved_fields() == [
        [3, 0, 5, 10, 1, 2, 1, 0, 1, -1, 0, 5, 7, 11, 10],
        [0, 0],
        [3, 7, 3, 7, 1, 1, 0, 0, 1, -1, 0, 4, 15],
        [0, 0],
    ]
    shadow = layer.memory[layer.index([44])[0].to(device)]
    assert torch.equal(shadow, committed)

    layer.memory[layer.index(side.slot_mapping[:11].tolist()).flatten().to(device)] = 7
    side.commit()

    assert side.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
    assert side.slot_mapping[:11].tolist() == [
        *(21, 22, 23, 28, 29),
        *(4, 5),
        *(11, 16, 17, 18),
    ]
    is_seven = [
        bool((layer.memory[layer.index([slot])[0].to(device)] == 7).all())
        for slot in (20, 21, 22, 23, 28, 29, 11, 16, 17, 18)
    ]
    assert is_seven == [False, *[True] * 4, False, True, *[False] * 3]
    row_bytes = 2 * 256
    assert side.counters.tolist() == [[2, 6, 2, 4, 0, 0, row_bytes, 4 * row_bytes]]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert side.published.tolist() == side.counters.tolist()


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", AcceptanceForm)
@pytest.mark.parametrize("layout", [nhd, hnd, mla])
def test_only_accepted_drafts_reach_real_entries(device, layout, form):
    layouts = [[layout_for(PAGES, layout)] * 3]
    one_step(device, EXAMPLE, layouts=layouts, form=form)


@pytest.mark.parametrize("run_bytes", [1, 2, 3, 4, 8, 16, 24, 33, 130, 272])
@pytest.mark.parametrize(
    "misalignment", [pytest.param(0, marks=pytest.mark.sanitizer), 1, 8]
)
def test_every_access_width(device, run_bytes, misalignment):
    layouts = [layout_for(PAGES, kind, run_bytes=run_bytes) for kind in (nhd, hnd)]
    one_step(device, EXAMPLE, PAGES, [layouts], misalignment=misalignment)


LONG_PAGES = Pages(
    entry_tokens=32, num_real_entries=9, first_entry=11, span=2, num_seats=3, width=3
)
LONG = [
    Request((1, 2, 3), seq_len=66, num_rows=40, num_drafts=5, accepted=3),
    Request((4, 5, 0), seq_len=50, num_rows=3, num_drafts=2, accepted=2),
]


@pytest.mark.sanitizer
def test_an_entry_of_several_blocks(device):
    layouts = [
        layout_for(LONG_PAGES, nhd, 16, num_heads=1, run_bytes=48),
        layout_for(LONG_PAGES, hnd, 8, num_heads=3, run_bytes=16),
    ]
    one_step(device, LONG, LONG_PAGES, [layouts])


def many_requests(num_requests):
    """Windows of 0 to 4 drafts in tables of three entries, and pages for them."""
    pages = Pages(4, 1 + 3 * num_requests, 2 + 3 * num_requests, 2, num_requests, 3)
    requests = []
    for number in range(num_requests):
        num_drafts = number % 5
        num_rows = 1 + num_drafts + number % 2
        seq_len = num_rows + number % (13 - num_rows)
        entries = tuple(range(1 + 3 * number, 4 + 3 * number))
        accepted = num_drafts // 2
        requests.append(Request(entries, seq_len, num_rows, num_drafts, accepted))
    return requests, pages


@pytest.mark.parametrize("num_requests", [31, 32, 33, 64, 1025])
def test_large_batches(device, num_requests):
    requests, pages = many_requests(num_requests)
    layouts = [[layout_for(pages, num_heads=1, run_bytes=16)]]
    step = one_step(device, requests, pages, layouts)
    staged = sum(request.num_drafts for request in requests)
    assert step.side.counters[0, [1, 5]].tolist() == [staged, 0]


def test_many_layers(device):
    """All of them copy from the entries that were there before the tables are
    patched, whichever is first."""
    requests, pages = many_requests(40)
    one_step(device, requests, pages, [[layout_for(pages, **SMALL)] * 61])


def test_no_drafts_touch_nothing(device):
    for requests in (
        [],
        [NO_DRAFTS],
        [NO_DRAFTS, replace(NO_DRAFTS, entries=(0,) * 4)],
    ):
        step = one_step(device, requests)
        assert step.side.counters.tolist() == [[0] * NUM_COUNTERS]
        unpublished = -3 * (not requests)
        assert step.side.published.tolist() == [[unpublished] * NUM_COUNTERS]


LEFT_ALONE = {
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
    step = staged(device, [TARGET_ALONE, odd, NO_DRAFTS])
    assert step.side.saved[:3, 0].tolist() == [3, -odd.num_drafts, 0]
    assert step.side.block_table[1].tolist() == list(odd.entries)
    assert step.side.slot_mapping[4 : 4 + odd.num_rows].tolist() == odd.slots(4)
    step.forward()
    step.commit()
    windows = [2, 3 + odd.num_drafts, odd.accepted, 3 + odd.num_drafts - odd.accepted]
    assert step.side.counters[0, :6].tolist() == [*windows, 0, odd.num_drafts]


@pytest.mark.parametrize("num_accepted", [-2, -1, 4, 70])
def test_acceptance_outside_the_window(device, num_accepted):
    """More valid tokens than rows, or none, as for a request whose prompt is not
    done: the target and what is before it are committed all the same."""
    accepted = min(max(num_accepted, 0), 3)
    requests = [replace(request, accepted=accepted) for request in EXAMPLE[::2]]
    for as_rejected in (False, True):
        step = staged(device, requests)
        step.forward()
        if as_rejected:
            value = 3 - num_accepted
            rejected = torch.full((2,), value, dtype=torch.int32, device=device)
            acceptance = (None, 0, rejected)
        else:
            # Valid ones not in front, and more columns than a warp has lanes.
            tokens = torch.full((2, 71), -1, dtype=torch.int32, device=device)
            tokens[:, 70 - num_accepted :] = 4
            acceptance = (tokens, 10, None)
        for side in step.sides:
            here = [x.to(side.device) if torch.is_tensor(x) else x for x in acceptance]
            side.ops.commit_draft_layer(*side.commit_arguments(0, tuple(here), True))
        step.compare("commit")
        assert step.side.counters[0, :4].tolist() == [
            2,
            6,
            2 * accepted,
            6 - 2 * accepted,
        ]


@pytest.mark.sanitizer
def test_unstage_puts_tables_and_slots_back(device):
    for with_forward in (False, True):
        step = staged(device, EXAMPLE)
        if with_forward:
            step.forward()
        step.unstage()
        step.unstage()
        assert step.side.counters.tolist() == [[0] * NUM_COUNTERS]


@pytest.mark.sanitizer
def test_tables_of_one_group(device):
    """The first call patches and the last one undoes; each copies its own layers."""
    layouts = [
        [layout_for(PAGES)] * 2,
        [layout_for(PAGES, hnd, num_heads=3)],
        [layout_for(PAGES, column_major if device.type == "cpu" else mla)],
    ]
    step = staged(device, EXAMPLE, layouts=layouts)
    step.forward()
    patched = step.side.table_memory.clone(), step.side.slot_memory.clone()
    for number in range(3):
        assert torch.equal(step.side.table_memory, patched[0])
        assert torch.equal(step.side.slot_memory, patched[1])
        for side in step.sides:
            side.commit_table(number, AcceptanceForm.SAMPLED)
    step.compare("commit")
    sizes = [sum(x.layout.slot_bytes for x in t.layers) for t in step.side.tables]
    counters = step.side.counters.tolist()
    assert counters == [[2, 6, 2, 4, 0, 0, size, 4 * size] for size in sizes]


def test_a_call_that_does_not_patch_reads_saved_alone(device):
    """The table and the slots are patched by then, and might be anything."""
    step = ShadowStep(device, PAGES, [[layout_for(PAGES)], [layout_for(PAGES, hnd)]])
    for side in step.sides:
        side.load(EXAMPLE)
        first, second = side.tables
        side.ops.stage(*side.stage_arguments(first, True))
        side.block_table.fill_(-7)
        side.slot_mapping.fill_(-7)
        side.ops.stage(*side.stage_arguments(second, False))
    step.compare("stage")


def following(request, num_drafts=3, accepted=0, before=0):
    """The request in the step after the one in which it was committed; `before`: rows
    besides the target's."""
    first = request.seq_len - request.num_drafts + request.accepted
    num_rows = before + 1 + num_drafts
    return replace(
        request,
        seq_len=first + num_rows,
        num_rows=num_rows,
        num_drafts=num_drafts,
        accepted=accepted,
    )


SMALL = {"num_heads": 2, "run_bytes": 8}
LIFE_PAGES = replace(PAGES, num_real_entries=31, first_entry=32, num_seats=3, width=8)
# Rows 5 to 8, of which 5 is kept: the next step begins at 6, and drafts from 7 on are
# in the entry of rows 4 and 5.
FIRST = Request(tuple(range(1, 9)), seq_len=9, num_rows=4, num_drafts=3)
OTHER = replace(FIRST, entries=tuple(range(11, 19)))


class Life(ShadowStep):
    """Steps of requests that go on, and what is copied to their shadows."""

    def __init__(self, device, layouts=None):
        layouts = layouts or [[layout_for(LIFE_PAGES, **SMALL)] * 2]
        super().__init__(device, LIFE_PAGES, layouts)

    def run(self, requests, seats=None):
        """One step; returns how many rows were copied to shadow pages."""
        self.stage(requests, seats)
        copied = sum(window.num_copied for window in self.side.windows().values())
        self.forward()
        self.commit()
        return copied

    def without_drafts(self):
        """A step that protects nothing, in which vLLM writes to any block."""
        for side in self.sides:
            side.step += 1
        self.write(range(4, 4 * LIFE_PAGES.num_real_entries))


@pytest.mark.sanitizer
def test_a_request_that_goes_on_is_copied_once(device):
    """Whatever is accepted, in every place of an entry, with rows before the target
    and entries that only the target is in."""
    for accepted in range(4):
        life = Life(device)
        request = replace(FIRST, accepted=accepted)
        assert life.run([request]) == 1
        for before in (0, 0, 2, 0, 0):
            request = following(request, accepted=accepted, before=before)
            if request.seq_len > 32:
                break
            assert life.run([request]) == 0


@pytest.mark.sanitizer
def test_a_seat_goes_with_its_request(device):
    requests = [FIRST, OTHER]
    life = Life(device)
    assert life.run(requests, [2, 0]) == 2
    requests = [following(request, accepted=2) for request in requests]
    assert life.run(requests[::-1], [0, 2]) == 0
    requests = list(map(following, requests))
    assert life.run(requests[1:], [0]) == 0
    assert life.run(requests[:1], [2]) == 1
    # Rows without seats, which changed: the other's blocks are not the row's.
    requests = list(map(following, requests))
    assert life.run(requests) == 2 * 2


def no_step(life):
    pass


def step_without_drafts(life):
    life.without_drafts()


def others_alone(life):
    """A step that the request is not in, and in which its seat is another's."""
    life.run([OTHER], [1])


def own_without_drafts(life):
    life.run([NO_DRAFTS_HERE, OTHER])


def other_in_its_seat(life):
    life.run([OTHER])


def left_alone(life):
    life.run([replace(FIRST, wrong_slots=((1, PAD),))])


def failed_step(life):
    life.stage([following(FIRST)])
    life.unstage()


def failed_step_of_a_copy(life):
    """Its first table's launch was made, the second one's was not."""
    again = following(FIRST)
    moved = replace(again, entries=(*again.entries[:1], 20, *again.entries[2:]))
    for side in life.sides:
        side.step += 1
        side.load([moved])
        side.ops.stage(*side.stage_arguments(side.tables[0], True))
        side.unstage()


NO_DRAFTS_HERE = replace(FIRST, seq_len=7, num_rows=1, num_drafts=0)
# What happened between two steps of a request, and whether its shadow counts after it.
BETWEEN = {
    no_step: 0,
    step_without_drafts: 2,
    others_alone: 2,
    own_without_drafts: 2,
    other_in_its_seat: 2,
    left_alone: 2,
    failed_step: 2,
    failed_step_of_a_copy: 2,
}


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_only_the_step_before_counts(device, between):
    life = Life(device, [[layout_for(LIFE_PAGES)], [layout_for(LIFE_PAGES, hnd)]])
    life.run([FIRST])
    between(life)
    assert life.run([following(FIRST)]) == BETWEEN[between]


def test_only_the_same_entry_and_the_next_row_count(device):
    again = following(FIRST)
    other_entry = replace(again, entries=(1, 20, *again.entries[2:]))
    other_before = replace(again, entries=(20, *again.entries[1:]))
    earlier = replace(again, seq_len=again.seq_len - 1)
    before = replace(FIRST, seq_len=8)
    for first, request, copied in (
        (FIRST, again, 0),
        (FIRST, other_entry, 2),
        (FIRST, other_before, 0),
        (FIRST, earlier, 1),
        (before, following(before), 0),
        (before, again, 2),
    ):
        life = Life(device)
        life.run([first])
        assert life.run([request]) == copied


@ANY_EXAMPLE
@given(data=st.data())
def test_any_lives(device, data):
    """Requests go on, pause, fail, move to other rows and give their blocks away."""
    layouts = [layout_for(LIFE_PAGES, order, **SMALL) for order in (nhd, hnd)]
    life = Life(device, [layouts])
    requests = {0: FIRST, 1: OTHER}
    by_seat = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["step"] * 4 + ["pause", "fail", "swap"]))
        if what == "pause":
            life.without_drafts()
            continue
        if what == "swap":
            first, second = requests[0], requests[1]
            requests[0] = replace(first, entries=second.entries)
            requests[1] = replace(second, entries=first.entries)
            life.without_drafts()
            continue
        names = data.draw(
            st.sampled_from([[0], [1], [0, 1], [1, 0]]), label="requests of the step"
        )
        batch = []
        for name in names:
            num_drafts = data.draw(st.integers(0, 4))
            accepted = data.draw(st.integers(0, num_drafts))
            before = data.draw(st.sampled_from([0, 0, 2]))
            request = following(requests[name], num_drafts, accepted, before)
            if request.seq_len > 32:
                life.without_drafts()  # another one begins in its blocks
                request = replace(FIRST, entries=request.entries)
            batch.append(request)
        seats = [2 - name for name in names] if by_seat else None
        if what == "fail":
            life.stage(batch, seats)
            life.unstage()
            continue
        life.run(batch, seats)
        requests.update(zip(names, batch, strict=True))


@ANY_EXAMPLE
@given(data=st.data())
def test_any_rows(device, data):
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    times = data.draw(st.integers(1, 3))
    pages, steps = data.draw(paged_batches(block_size * times, num_steps=2))
    num_blocks = pages.num_slots // block_size
    tables = st.lists(row_layouts(block_size, num_blocks), min_size=1, max_size=3)
    _any_steps(
        device, data, pages, steps, data.draw(st.lists(tables, min_size=1, max_size=2))
    )


@ANY_EXAMPLE
@given(data=st.data())
def test_any_packing(data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    times = data.draw(st.integers(1, 2))
    pages, steps = data.draw(paged_batches(block_size * times, num_steps=2))
    num_blocks = pages.num_slots // block_size
    layouts = [[data.draw(packed_layouts(block_size, num_blocks))] * 2]
    if data.draw(st.booleans()):
        layouts.append([data.draw(row_layouts(block_size, num_blocks))])
    _any_steps(CPU, data, pages, steps, layouts)


def _any_steps(device, data, pages, steps, layouts):
    step = ShadowStep(
        *(device, pages, layouts),
        seed=data.draw(st.integers(0, 1000)),
        misalignment=data.draw(st.one_of(st.just(0), st.integers(0, 20))),
    )
    for requests in steps:
        step.stage(requests)
        if data.draw(st.integers(0, 4)) == 0:
            step.unstage()
            continue
        step.forward()
        if data.draw(st.integers(0, 2)) == 0:
            step.meddle(data.draw(st.integers(0, 1 << 16)))
        step.commit(data.draw(FORMS))
