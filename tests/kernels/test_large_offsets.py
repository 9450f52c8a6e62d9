# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 and 2^32, by strides: an allocation that large of which a few pages
are used. On the CPU those are the only ones that the system backs with memory."""

from __future__ import annotations

import pytest
import torch

from vllm_nwor import ops

RUN_BYTES = 48
BLOCK_SIZE = 4
GIB = 1 << 30


def sparse(num_bytes, device):
    """[num_bytes] uint8, never touched; skips where there is not that much room."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < num_bytes + GIB:
        pytest.skip(f"less than {num_bytes / GIB:.0f} GiB free on the GPU")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def run_step(device, cache, undo_log, table, slots):
    """Logs and restores `slots`, all rejected; returns nothing, checks the log."""
    num_drafts = len(slots)
    mapping = torch.tensor([-1, *slots], device=device)
    cumulative = torch.tensor([num_drafts + 1], dtype=torch.int32, device=device)
    log_slots = torch.zeros(undo_log.shape[0], dtype=torch.int64, device=device)
    windows = torch.zeros(undo_log.shape[0], 3, dtype=torch.int32, device=device)
    indices = torch.arange(num_drafts + 1, device=device)
    log = (undo_log, log_slots, windows)
    ops.log_cache_slots(table, None, mapping, indices, cumulative, *log, num_drafts)
    assert log_slots[:num_drafts].tolist() == slots
    yield
    rejected = torch.tensor([num_drafts], dtype=torch.int32, device=device)
    counters = torch.zeros(len(ops.COUNTER_COLUMNS), dtype=torch.int64, device=device)
    ops.restore_rejected_drafts(
        table, None, *log, None, 0, rejected, counters, num_drafts
    )
    assert counters.tolist()[3] == num_drafts
    yield


@pytest.mark.parametrize("far", ["block_stride", "head_stride", "slot_stride"])
def test_cache_offsets(device, far):
    strides = {"block_stride": 1024, "head_stride": 256, "slot_stride": 64}
    strides[far] = 2 * GIB + 4096
    num_heads = 2
    # Block 2, slot 2, head 1 is the farthest that is used: past 2^32.
    at = {
        (slot, head): slot // BLOCK_SIZE * strides["block_stride"]
        + slot % BLOCK_SIZE * strides["slot_stride"]
        + head * strides["head_stride"]
        for slot in (1, 10)
        for head in range(num_heads)
    }
    cache = sparse(max(at.values()) + RUN_BYTES, device)
    # Where a 32-bit offset would land.
    wrapped = {offset % (1 << 32) for offset in at.values()} - set(at.values())
    for number, offset in enumerate([*at.values(), *wrapped]):
        cache[offset : offset + RUN_BYTES] = number + 1
    row = [
        cache.data_ptr(),
        *(strides["block_stride"], strides["slot_stride"], strides["head_stride"]),
        *(num_heads, RUN_BYTES, BLOCK_SIZE, 3, 0),
    ]
    table = torch.tensor([row], device=device)
    undo_log = torch.zeros(2, num_heads * RUN_BYTES, dtype=torch.uint8, device=device)
    step = run_step(device, cache, undo_log, table, [1, 10])
    next(step)
    wanted = torch.arange(1, 5, dtype=torch.uint8).repeat_interleave(RUN_BYTES)
    assert torch.equal(undo_log.cpu().flatten(), wanted)
    for offset in [*at.values(), *wrapped]:
        cache[offset : offset + RUN_BYTES] = 200
    next(step)
    for number, offset in enumerate(at.values()):
        assert (cache[offset : offset + RUN_BYTES] == number + 1).all()
    for offset in wrapped:
        assert (cache[offset : offset + RUN_BYTES] == 200).all()


def test_log_offsets(device):
    stride = 3 * GIB // 2 + 16
    memory = sparse(3 * stride + RUN_BYTES, device)
    undo_log = memory.as_strided((4, RUN_BYTES), (stride, 1))
    cache = torch.arange(4 * BLOCK_SIZE, dtype=torch.uint8, device=device)
    cache = cache.repeat_interleave(RUN_BYTES)
    row = [cache.data_ptr(), BLOCK_SIZE * RUN_BYTES, RUN_BYTES, 0, 1, RUN_BYTES]
    table = torch.tensor([[*row, BLOCK_SIZE, 4, 0]], device=device)
    before = cache.clone()
    step = run_step(device, cache, undo_log, table, [2, 7, 11, 15])
    next(step)
    for draft, slot in enumerate([2, 7, 11, 15]):
        assert (undo_log[draft] == slot).all()
    for slot in (2, 7, 11, 15):
        cache[slot * RUN_BYTES : (slot + 1) * RUN_BYTES] = 99
    next(step)
    assert torch.equal(cache, before)


def stage_and_commit(device, table, entries, pages, positions, forward):
    """One request of two committed rows of its entry, a target and two drafts, both
    accepted, in its only entry; `forward` runs in between."""
    entry_tokens, first_entry = pages

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    block_table = int32([entries])
    (entry,) = entries
    slots = [entry * entry_tokens + position for position in positions]
    slot_mapping = torch.tensor(slots, device=device)
    columns = ops.SAVED_COLUMNS + 2
    saved = torch.zeros(1, columns, dtype=torch.int32, device=device)
    ops.stage(
        *(table, None, block_table, slot_mapping),
        *(int32([0, 3]), int32([positions[-1] + 1]), int32([3]), None, saved),
        *(first_entry, first_entry, 1, entry_tokens, 1, True),
    )
    shadow = [first_entry * entry_tokens + position for position in positions]
    assert slot_mapping.tolist() == shadow
    forward()
    counters = torch.zeros(len(ops.COUNTER_COLUMNS), dtype=torch.int64, device=device)
    ops.commit_draft_layer(
        *(table, None, block_table, slot_mapping, None, saved),
        *(None, 0, int32([0]), counters, 1, entry_tokens, True),
    )
    assert slot_mapping.tolist() == slots
    assert block_table.tolist() == [entries]
    assert counters.tolist()[:4] == [1, 2, 2, 0]


@pytest.mark.parametrize("far", ["block_stride", "head_stride", "slot_stride"])
def test_offsets_of_shadow_pages(device, far):
    strides = {"block_stride": 4096, "head_stride": 1024, "slot_stride": 64}
    strides[far] = 2 * GIB + 4096
    num_heads, num_rows = 2, 5
    block_size = 8

    def offsets(block):
        """[row][head], of the rows that are used."""
        return [
            [
                block * strides["block_stride"]
                + row * strides["slot_stride"]
                + head * strides["head_stride"]
                for head in range(num_heads)
            ]
            for row in range(num_rows)
        ]

    real, shadow = offsets(1), offsets(2)
    used = [offset for block in (real, shadow) for row in block for offset in row]
    cache = sparse(max(used) + RUN_BYTES, device)
    # Where a 32-bit offset would land.
    wrapped = {offset % (1 << 32) for offset in used} - set(used)

    def fill(rows, first):
        for number, row in enumerate(rows):
            for head, offset in enumerate(row):
                cache[offset : offset + RUN_BYTES] = first + 2 * number + head

    def holds(rows, first):
        return all(
            bool(
                (cache[offset : offset + RUN_BYTES] == first + 2 * number + head).all()
            )
            for number, row in enumerate(rows)
            for head, offset in enumerate(row)
        )

    for offset in wrapped:
        cache[offset : offset + RUN_BYTES] = 200
    fill(real, 1)
    fill(shadow, 101)
    row = [
        cache.data_ptr(),
        *(strides["block_stride"], strides["slot_stride"], strides["head_stride"]),
        *(num_heads, RUN_BYTES, block_size, 3, 0),
    ]
    table = torch.tensor([row], device=device)

    def forward():
        assert holds(real, 1)
        assert holds(shadow[:2], 1)
        assert holds(shadow[2:], 105)
        fill(shadow[2:], 51)

    stage_and_commit(device, table, [1], (block_size, 2), [2, 3, 4], forward)
    assert holds(real[:2], 1)
    assert holds(real[2:], 51)
    for offset in wrapped:
        assert (cache[offset : offset + RUN_BYTES] == 200).all()


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

    stage_and_commit(
        device, table, [3], (entry_tokens, first_entry), [2, 3, 4], forward
    )
    assert cache[real][:6].tolist() == [0, 1, 51, 51, 51, 5]
    assert (cache[wrapped] == 200).all()
