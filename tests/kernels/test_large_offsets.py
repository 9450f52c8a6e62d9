# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 and 2^32, by strides: an allocation that large of which a few pages
are used. On the CPU those are the only ones that the system backs with memory."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.reference import row_layout
from tests.kernels.test_transaction import LOGGED, nhd
from tests.kernels.transaction import (
    COMMIT,
    FAMILIES,
    STAGE,
    AcceptanceForm,
    Pages,
    Request,
    Step,
    drafts_in,
)
from vllm_nwor import ops

GIB = 1 << 30
BLOCK_SIZE = 8
STRIDES = {"block_stride": 4096, "head_stride": 1024, "slot_stride": 64}
LOG_STRIDE = 3 * GIB // 2 + 16


def sparse(num_bytes, device):
    """[num_bytes] uint8, never touched; skips where there is not that much room."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < num_bytes + GIB:
        pytest.skip(f"less than {num_bytes / GIB:.0f} GiB free on the GPU")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("family", "far"),
    [(family, far) for family in FAMILIES for far in STRIDES] + [(LOGGED, "log")],
)
def test_bytes_are_those_of_a_small_cache(device, family, far):
    """`far` is the stride that is past 2^31: of three blocks, or of a log's rows."""
    if family is LOGGED:
        used = [1, 2 * BLOCK_SIZE + 2, 2 * BLOCK_SIZE + 5, 7]
        requests = drafts_in(used, accepted=[0])
        pages = ()
    else:
        # Two committed rows, a target and two drafts, both accepted, in one entry.
        used = [BLOCK_SIZE * entry + row for entry in (1, 2) for row in range(5)]
        requests = [Request((1,), seq_len=5, num_rows=3, num_drafts=2, accepted=2)]
        pages = (Pages(BLOCK_SIZE, 2, 2, span=1, num_seats=1, width=1),)
    sizes = 3, BLOCK_SIZE, 2, 48
    layout = row_layout(*sizes, **STRIDES)
    small, large = (Step(device, [[layout]], *pages, capacity=4) for _ in range(2))
    (near,), (distant,) = small.layers, large.layers
    if far == "log":
        log = sparse(3 * LOG_STRIDE + layout.slot_bytes, device)
        large.undo_log = log.as_strided((4, layout.slot_bytes), (LOG_STRIDE, 1))
    else:
        distant.layout = row_layout(*sizes, **STRIDES | {far: 2 * GIB + 4096})
        index = distant.index(used)
        distant.memory = sparse(int(index.max()) + 1, device)
        # Where a 32-bit offset would land.
        wrapped = index % (1 << 32)
        wrapped = wrapped[~torch.isin(wrapped, index)]
        distant.memory[wrapped] = 200
        distant.memory[index] = near.memory[near.index(used)]
        row = [distant.base, *distant.layout.columns, 0]
        large.tables[0] = torch.tensor([row], device=device)
    for op in family:
        for step in (small, large):
            if op is family[0]:
                step.load(requests)
            else:
                step.forward()
        accepted = AcceptanceForm.SAMPLED.arguments(
            small.drafts, small.accepted, device
        )
        small.check(op, **accepted)
        getattr(ops, op)(**large.arguments(op, **accepted))
        there = distant.memory[distant.index(used)]
        assert torch.equal(there, near.memory[near.index(used)])
        assert torch.equal(large.undo_log, small.undo_log)
        if far != "log":
            assert (distant.memory[wrapped] == 200).all()
    assert small.counted() == large.counted()
    assert small.counted()[0][1] == small.num_drafts


def test_slots_of_shadow_blocks(device):
    """Past 2^32, of rows of one byte."""
    entry_tokens, first_entry = 64, (1 << 26) + 1
    pages = Pages(entry_tokens, first_entry, first_entry, 1, num_seats=1, width=1)
    cache = sparse(pages.num_slots, device)
    real = slice(3 * entry_tokens, 4 * entry_tokens)
    shadow = slice(first_entry * entry_tokens, pages.num_slots)
    wrapped = slice(shadow.start % (1 << 32), shadow.start % (1 << 32) + entry_tokens)
    cache[real] = torch.arange(64, dtype=torch.uint8, device=device)
    cache[shadow] = 101
    cache[wrapped] = 200
    step = Step(device, [[nhd()]], pages)
    row = [cache.data_ptr(), entry_tokens, 1, 0, 1, 1, entry_tokens, first_entry + 1, 0]
    step.tables[0] = torch.tensor([row], device=device)
    step.load([Request((3,), seq_len=5, num_rows=3, num_drafts=2, accepted=2)])

    ops.stage(**step.arguments(STAGE))

    staged = [shadow.start + position for position in (2, 3, 4)]
    assert step.slot_mapping[:3].tolist() == staged
    assert cache[shadow][:4].tolist() == [0, 1, 101, 101]
    cache[shadow] = 51
    accepted = AcceptanceForm.SAMPLED.arguments(step.drafts, step.accepted, device)
    ops.commit_draft_layer(**step.arguments(COMMIT, **accepted))
    assert step.slot_mapping[:3].tolist() == [real.start + p for p in (2, 3, 4)]
    assert step.block_table[0].tolist() == [3]
    assert step.counted()[0][:4] == [1, 2, 2, 0]
    assert cache[real][:6].tolist() == [0, 1, 51, 51, 51, 5]
    assert (cache[wrapped] == 200).all()
