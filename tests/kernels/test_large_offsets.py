# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 and 2^32, by strides: an allocation that large of which a few pages
are used. On the CPU those are the only ones that the system backs with memory."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_log_restore import nhd
from tests.kernels.transaction import (
    COMMIT,
    STAGE,
    Batch,
    CowStep,
    Pages,
    Request,
    ShadowStep,
    acceptance,
)
from vllm_nwor import ops

RUN_BYTES = 48
BLOCK_SIZE = 8
NUM_HEADS = 2
GIB = 1 << 30
STRIDES = {"block_stride": 4096, "slot_stride": 64, "head_stride": 1024}


def sparse(num_bytes, device):
    """[num_bytes] uint8, never touched; skips where there is not that much room."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < num_bytes + GIB:
        pytest.skip(f"less than {num_bytes / GIB:.0f} GiB free on the GPU")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Cache:
    """Three blocks, of which `slots` are used; the stride `far` is past 2^31."""

    def __init__(self, device, far, slots):
        strides = STRIDES | {far: 2 * GIB + 4096}
        self.runs = {
            slot: [
                slot // BLOCK_SIZE * strides["block_stride"]
                + slot % BLOCK_SIZE * strides["slot_stride"]
                + head * strides["head_stride"]
                for head in range(NUM_HEADS)
            ]
            for slot in slots
        }
        used = {offset for runs in self.runs.values() for offset in runs}
        self.memory = sparse(max(used) + RUN_BYTES, device)
        # Where a 32-bit offset would land.
        self.wrapped = {offset % (1 << 32) for offset in used} - used
        for offset in self.wrapped:
            self._run(offset).fill_(200)
        sizes = [NUM_HEADS, RUN_BYTES, BLOCK_SIZE, 3, 0]
        row = [self.memory.data_ptr(), *strides.values(), *sizes]
        self.table = torch.tensor([row], device=device)

    def _run(self, offset):
        return self.memory[offset : offset + RUN_BYTES]

    def fill(self, slots, first):
        """Each slot and head with a value of its own."""
        for number, slot in enumerate(slots):
            for head, offset in enumerate(self.runs[slot]):
                self._run(offset).fill_(first + NUM_HEADS * number + head)

    def check(self, slots, first):
        for number, slot in enumerate(slots):
            for head, offset in enumerate(self.runs[slot]):
                value = first + NUM_HEADS * number + head
                assert (self._run(offset) == value).all(), (slot, head)
        assert all((self._run(offset) == 200).all() for offset in self.wrapped)


def run_step(device, undo_log, table, slots):
    """Logs `slots`, then restores them, all rejected."""
    batch = Batch(slots=(tuple(slots),), accepted=(0,))
    step = CowStep(device, [[nhd()]], batch, spare_rows=0)
    own = {"table": table, "undo_log": undo_log}
    ops.log_cache_slots(**step.logs[0] | own)
    assert step.logs[0]["log_slots"].tolist() == slots
    yield
    counters = step.restores[0]["counters"].zero_()
    ops.restore_rejected_drafts(**step.restores[0] | own)
    assert counters.tolist()[3] == len(slots)
    yield


@pytest.mark.parametrize("far", STRIDES)
def test_cache_offsets(device, far):
    slots = [1, 2 * BLOCK_SIZE + 2]
    cache = Cache(device, far, slots)
    cache.fill(slots, 1)
    size = NUM_HEADS * RUN_BYTES
    undo_log = torch.zeros(2, size, dtype=torch.uint8, device=device)
    step = run_step(device, undo_log, cache.table, slots)
    next(step)
    wanted = torch.arange(1, 5, dtype=torch.uint8).repeat_interleave(RUN_BYTES)
    assert torch.equal(undo_log.cpu().flatten(), wanted)
    cache.fill(slots, 100)
    next(step)
    cache.check(slots, 1)


def test_log_offsets(device):
    stride = 3 * GIB // 2 + 16
    memory = sparse(3 * stride + RUN_BYTES, device)
    undo_log = memory.as_strided((4, RUN_BYTES), (stride, 1))
    cache = torch.arange(4 * BLOCK_SIZE, dtype=torch.uint8, device=device)
    cache = cache.repeat_interleave(RUN_BYTES)
    row = [cache.data_ptr(), BLOCK_SIZE * RUN_BYTES, RUN_BYTES, 0, 1, RUN_BYTES]
    table = torch.tensor([[*row, BLOCK_SIZE, 4, 0]], device=device)
    before = cache.clone()
    slots = [2, 7, 19, 31]
    step = run_step(device, undo_log, table, slots)
    next(step)
    for draft, slot in enumerate(slots):
        assert (undo_log[draft] == slot).all()
        cache[slot * RUN_BYTES : (slot + 1) * RUN_BYTES] = 99
    next(step)
    assert torch.equal(cache, before)


def stage_and_commit(device, table, entry, pages, forward):
    """One request of two committed rows of its entry, a target and two drafts, both
    accepted, in its only entry; `forward` runs in between."""
    entry_tokens, first_entry = pages
    pages = Pages(entry_tokens, first_entry, first_entry, span=1, num_seats=1, width=1)
    step = ShadowStep(pages, [[nhd()]], device)
    step.tables[0].rows = table
    step.load([Request((entry,), seq_len=5, num_rows=3, num_drafts=2)])
    accepted = torch.zeros(1, dtype=torch.int32, device=device)

    def slots_in(entry):
        return [entry * entry_tokens + position for position in (2, 3, 4)]

    ops.stage(**step.arguments(STAGE))
    assert step.slot_mapping[:3].tolist() == slots_in(first_entry)
    forward()
    ops.commit_draft_layer(**step.arguments(COMMIT, **acceptance(None, accepted)))
    assert step.slot_mapping[:3].tolist() == slots_in(entry)
    assert step.block_table[0].tolist() == [entry]
    assert step.counters[0, :4].tolist() == [1, 2, 2, 0]


@pytest.mark.parametrize("far", STRIDES)
def test_offsets_of_shadow_pages(device, far):
    real = range(BLOCK_SIZE, BLOCK_SIZE + 5)
    shadow = range(2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 5)
    cache = Cache(device, far, [*real, *shadow])
    cache.fill(real, 1)
    cache.fill(shadow, 101)

    def forward():
        cache.check(real, 1)
        cache.check(shadow[:2], 1)
        cache.check(shadow[2:], 105)
        cache.fill(shadow[2:], 51)

    stage_and_commit(device, cache.table, 1, (BLOCK_SIZE, 2), forward)
    cache.check(real[:2], 1)
    cache.check(real[2:], 51)


def test_slots_of_shadow_pages(device):
    """Past 2^32, of rows of one byte."""
    entry_tokens, first_entry = 64, (1 << 26) + 1
    num_slots = (first_entry + 1) * entry_tokens
    cache = sparse(num_slots, device)
    real = slice(3 * entry_tokens, 4 * entry_tokens)
    shadow = slice(first_entry * entry_tokens, num_slots)
    wrapped = slice(shadow.start % (1 << 32), shadow.start % (1 << 32) + entry_tokens)
    cache[real] = torch.arange(64, dtype=torch.uint8, device=device)
    cache[shadow] = 101
    cache[wrapped] = 200
    row = [cache.data_ptr(), entry_tokens, 1, 0, 1, 1, entry_tokens, first_entry + 1, 0]
    table = torch.tensor([row], device=device)

    def forward():
        assert cache[shadow][:4].tolist() == [0, 1, 101, 101]
        cache[shadow] = 51

    stage_and_commit(device, table, 3, (entry_tokens, first_entry), forward)
    assert cache[real][:6].tolist() == [0, 1, 51, 51, 51, 5]
    assert (cache[wrapped] == 200).all()
