# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: any layout, any window, any acceptance."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.kernels.reference import PAD, Layout, columns, packed_layout, row_layout
from tests.kernels.transaction import AcceptanceForm, Pages, Request, drafts_in

ANY_EXAMPLE = settings(
    max_examples=150,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
FORMS = st.sampled_from(list(AcceptanceForm))
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
    """Column-major, interleaved in small units (as AMX packs), or any permutation of
    a block's bytes among its slots."""
    kind = draw(st.sampled_from(["columns", "interleaved", "permutation"]))
    slot_of = torch.arange(block_size)
    if kind == "columns":
        dims, element = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
        owner = columns(block_size, dims, element, tail=draw(st.integers(1, 20)))
    elif kind == "interleaved":
        unit, times = draw(st.sampled_from([4, 8, 16])), draw(st.integers(1, 4))
        owner = slot_of.repeat_interleave(unit).repeat(times)
    else:
        owner = slot_of.repeat(draw(st.integers(1, 24)))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
        owner = owner[torch.randperm(owner.numel(), generator=generator)]
    return replace(packed_layout(num_blocks, owner), misalignment=draw(SMALL))


def accepted(num_drafts: int) -> st.SearchStrategy[int]:
    """More valid tokens than rows, too, or none, as for a request whose prompt is not
    done: the target and what is before it are committed all the same."""
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
    num_real = 1 + num_seats * width + draw(st.integers(0, 2))
    first = num_real + draw(st.integers(0, 2))
    pages = Pages(entry_tokens, num_real, first, span, num_seats, width)
    steps = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
        ids = (1 + torch.randperm(num_real - 1, generator=generator)).tolist()
        rows = [ids[width * row :][:width] for row in range(num_seats)]
        num_reqs = draw(st.integers(0, num_seats))
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
