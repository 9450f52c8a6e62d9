# SPDX-License-Identifier: Apache-2.0
"""stage, commit_draft_layer and unstage against the reference, byte for byte, and in
numbers where the numbers say something by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.reference import PAD
from tests.kernels.strategies import (
    ANY_EXAMPLE,
    FORMS,
    packed_layouts,
    paged_batches,
    row_layouts,
)
from tests.kernels.test_log_restore import CPU, hnd, mla, nhd, padded
from tests.kernels.transaction import (
    NUM_COUNTERS,
    STAGE,
    UNSTAGE,
    AcceptanceForm,
    Pages,
    Request,
    ShadowStep,
)

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


def staged(device, requests, pages=PAGES, layouts=None):
    step = ShadowStep(pages, layouts or [[layout_for(pages)] * 2], device)
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
    step = ShadowStep(PAGES, [[layout_for(PAGES)] * 2], device)
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
    step.commit()

    assert step.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
    slots = [*(21, 22, 23, 28, 29), *(4, 5), *(11, 16, 17, 18)]
    assert step.slot_mapping[:11].tolist() == slots
    is_seven = [
        bool((slot(number) == 7).all()) for number in (20, *slots[:5], *slots[7:])
    ]
    assert is_seven == [False, *[True] * 4, False, True, *[False] * 3]
    row_bytes = 2 * 256
    assert step.counters.tolist() == [[2, 6, 2, 4, 0, 0, row_bytes, 4 * row_bytes]]
    assert step.published.tolist() == step.counters.tolist()


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", AcceptanceForm)
@pytest.mark.parametrize("layout", [nhd, hnd, mla, padded])
def test_only_accepted_drafts_reach_real_entries(device, layout, form):
    layouts = [[layout_for(PAGES, layout)] * 3]
    one_step(device, EXAMPLE, layouts=layouts, form=form)


@pytest.mark.parametrize("run_bytes", [1, 2, 3, 4, 8, 16, 24, 33, 130, 272])
@pytest.mark.parametrize(
    "misalignment", [pytest.param(0, marks=pytest.mark.sanitizer), 1, 8]
)
def test_every_access_width(device, run_bytes, misalignment):
    layouts = [
        replace(layout_for(PAGES, kind, run_bytes=run_bytes), misalignment=misalignment)
        for kind in (nhd, hnd)
    ]
    one_step(device, EXAMPLE, layouts=[layouts])


LONG_PAGES = Pages(
    entry_tokens=32, num_real_entries=9, first_entry=11, span=2, num_seats=3, width=3
)
LONG = [
    Request((1, 2, 3), seq_len=66, num_rows=40, num_drafts=5, accepted=3),
    Request((4, 5, 0), seq_len=50, num_rows=3, num_drafts=2, accepted=2),
]
SMALL = {"num_heads": 2, "run_bytes": 8}


@pytest.mark.sanitizer
def test_an_entry_of_several_blocks(device):
    layouts = [
        layout_for(LONG_PAGES, nhd, 16, num_heads=1, run_bytes=48),
        layout_for(LONG_PAGES, hnd, 8, num_heads=3, run_bytes=16),
    ]
    one_step(device, LONG, LONG_PAGES, [layouts])


@pytest.mark.sanitizer
def test_tables_of_one_group(device):
    """The first call patches and the last one undoes; each copies its own layers."""
    kinds = layout_for(PAGES), layout_for(PAGES, hnd, num_heads=3)
    layouts = [[kinds[0]] * 2, [kinds[1]], [layout_for(PAGES, mla)]]
    one_step(device, EXAMPLE, layouts=layouts)


@pytest.mark.parametrize(
    ("num_requests", "num_layers"),
    [(31, 1), (32, 1), (33, 1), (64, 1), (1025, 1), (40, 61)],
)
def test_large_batches(device, num_requests, num_layers):
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
    step = one_step(
        device, requests, pages, [[layout_for(pages, **SMALL)] * num_layers]
    )
    num_drafts = sum(request.num_drafts for request in requests)
    assert step.counters[0, [1, 5]].tolist() == [num_drafts, 0]


def test_no_drafts_touch_nothing(device):
    nowhere = replace(NO_DRAFTS, entries=(0,) * 4)
    for requests in ([], [NO_DRAFTS], [NO_DRAFTS, nowhere]):
        step = one_step(device, requests)
        assert step.counters.tolist() == [[0] * NUM_COUNTERS]
        unpublished = -3 * (not requests)
        assert step.published.tolist() == [[unpublished] * NUM_COUNTERS]


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
    assert step.saved[:3, 0].tolist() == [3, -odd.num_drafts, 0]
    assert step.block_table[1].tolist() == list(odd.entries)
    assert step.slot_mapping[4 : 4 + odd.num_rows].tolist() == odd.slots(4)
    step.forward()
    step.commit()
    windows = [2, 3 + odd.num_drafts, odd.accepted, 3 + odd.num_drafts - odd.accepted]
    assert step.counters[0, :6].tolist() == [*windows, 0, odd.num_drafts]


@pytest.mark.parametrize("num_accepted", [-2, -1, 4, 70])
@pytest.mark.parametrize("form", AcceptanceForm)
def test_acceptance_outside_the_window(device, num_accepted, form):
    """More valid tokens than rows, or none, as for a request whose prompt is not
    done: the target and what is before it are committed all the same."""
    requests = [replace(request, accepted=num_accepted) for request in EXAMPLE[::2]]
    step = one_step(device, requests, form=form)
    accepted = 2 * min(max(num_accepted, 0), 3)
    assert step.counters[0, :4].tolist() == [2, 6, accepted, 6 - accepted]


@pytest.mark.sanitizer
@pytest.mark.parametrize("with_forward", [False, True])
def test_unstage_puts_tables_and_slots_back(device, with_forward):
    step = staged(device, EXAMPLE)
    if with_forward:
        step.forward()
    step.unstage()
    step.unstage()
    assert step.block_table[:3].tolist() == [list(r.entries) for r in EXAMPLE]
    assert step.counters.tolist() == [[0] * NUM_COUNTERS]


def test_a_call_that_does_not_patch_reads_saved_alone(device):
    """The table and the slots are patched by then, and might be anything."""
    step = ShadowStep(PAGES, [[layout_for(PAGES)], [layout_for(PAGES, hnd)]], device)
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
    return replace(
        request,
        seq_len=first + num_rows,
        num_rows=num_rows,
        num_drafts=num_drafts,
        accepted=accepted,
    )


LIFE_PAGES = replace(PAGES, num_real_entries=31, first_entry=32, num_seats=3, width=8)
# Rows 5 to 8, of which 5 is kept: the next step begins at 6, and drafts from 7 on are
# in the entry of rows 4 and 5.
FIRST = Request(tuple(range(1, 9)), seq_len=9, num_rows=4, num_drafts=3)
OTHER = replace(FIRST, entries=tuple(range(11, 19)))


class Life(ShadowStep):
    """Steps of requests that go on, and what is copied to their shadows."""

    def __init__(self, device, layouts=None):
        layouts = layouts or [[layout_for(LIFE_PAGES, **SMALL)] * 2]
        super().__init__(LIFE_PAGES, layouts, device)

    def run(self, requests, seats=None):
        """One step; returns how many rows were copied to shadow pages."""
        self.stage(requests, seats)
        copied = sum(window.num_copied for window in self.windows().values())
        self.forward()
        self.commit()
        return copied

    def fail(self, requests, seats=None):
        self.stage(requests, seats)
        self.unstage()

    def fail_between_tables(self, request):
        """The first table's launch was made, the second one's was not."""
        self.step += 1
        self.load([request])
        self.check(STAGE, 0)
        self.check(UNSTAGE)

    def without_drafts(self):
        """A step that protects nothing, in which vLLM writes to any block."""
        self.step += 1
        self.write(range(4, 4 * LIFE_PAGES.num_real_entries))


@pytest.mark.sanitizer
@pytest.mark.parametrize("accepted", range(4))
def test_a_request_that_goes_on_is_copied_once(device, accepted):
    """Whatever is accepted, in every place of an entry, with rows before the target
    and entries that only the target is in."""
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


AGAIN = following(FIRST)
MOVED = replace(AGAIN, entries=(1, 20, *AGAIN.entries[2:]))
NO_DRAFTS_HERE = replace(FIRST, seq_len=7, num_rows=1, num_drafts=0)
# What happens between two steps of a request; then its shadow does not count.
BETWEEN = {
    "a step without drafts": Life.without_drafts,
    # In which its seat is another's, and without one.
    "others alone": lambda life: life.run([OTHER], [1]),
    "its own without drafts": lambda life: life.run([NO_DRAFTS_HERE, OTHER]),
    "another in its seat": lambda life: life.run([OTHER]),
    "left alone": lambda life: life.run([replace(FIRST, wrong_slots=((1, PAD),))]),
    "a failed step": lambda life: life.fail([AGAIN]),
    "a failed step of a copy": lambda life: life.fail_between_tables(MOVED),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_only_the_step_before_counts(device, between):
    life = Life(device, [[layout_for(LIFE_PAGES)], [layout_for(LIFE_PAGES, hnd)]])
    life.run([FIRST])
    BETWEEN[between](life)
    assert life.run([AGAIN]) == 2


EARLIER = replace(FIRST, seq_len=8)


@pytest.mark.parametrize(
    ("first", "request_", "copied"),
    [
        (FIRST, AGAIN, 0),
        (FIRST, MOVED, 2),
        (FIRST, replace(AGAIN, entries=(20, *AGAIN.entries[1:])), 0),
        (FIRST, replace(AGAIN, seq_len=AGAIN.seq_len - 1), 1),
        (EARLIER, following(EARLIER), 0),
        (EARLIER, AGAIN, 2),
    ],
)
def test_only_the_same_entry_and_the_next_row_count(device, first, request_, copied):
    life = Life(device)
    life.run([first])
    assert life.run([request_]) == copied


@ANY_EXAMPLE
@given(data=st.data())
def test_any_lives(device, data):
    """Requests go on, pause, fail, move to other rows and give their blocks away."""
    life = Life(
        device, [[layout_for(LIFE_PAGES, kind, **SMALL) for kind in (nhd, hnd)]]
    )
    requests = [FIRST, OTHER]
    by_seat = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["step"] * 4 + ["pause", "fail", "swap"]))
        if what in ("pause", "swap"):
            life.without_drafts()
            if what == "swap":
                one, other = requests
                requests[0] = replace(one, entries=other.entries)
                requests[1] = replace(other, entries=one.entries)
            continue
        names = data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]]))
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
            life.fail(batch, seats)
            continue
        life.run(batch, seats)
        for name, request in zip(names, batch, strict=True):
            requests[name] = request


@ANY_EXAMPLE
@given(data=st.data())
def test_any_rows(device, data):
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    pages, steps = data.draw(
        paged_batches(block_size * data.draw(st.integers(1, 3)), 2)
    )
    layers = st.lists(
        row_layouts(block_size, pages.num_slots // block_size), min_size=1, max_size=3
    )
    layouts = data.draw(st.lists(layers, min_size=1, max_size=2))
    _any_steps(device, data, pages, steps, layouts)


@ANY_EXAMPLE
@given(data=st.data())
def test_any_packing(data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    pages, steps = data.draw(
        paged_batches(block_size * data.draw(st.integers(1, 2)), 2)
    )
    sizes = block_size, pages.num_slots // block_size
    layouts = [[data.draw(packed_layouts(*sizes))] * 2]
    if data.draw(st.booleans()):
        layouts.append([data.draw(row_layouts(*sizes))])
    _any_steps(CPU, data, pages, steps, layouts)


def _any_steps(device, data, pages, steps, layouts):
    step = ShadowStep(pages, layouts, device, seed=data.draw(st.integers(0, 1000)))
    for requests in steps:
        step.stage(requests)
        if data.draw(st.integers(0, 4)) == 0:
            step.unstage()
            continue
        step.forward()
        if data.draw(st.integers(0, 2)) == 0:
            step.meddle(data.draw(st.integers(0, 1 << 16)))
        step.commit(data.draw(FORMS))
