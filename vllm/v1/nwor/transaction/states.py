# SPDX-License-Identifier: Apache-2.0
"""The states of a DraftCommitManager, and their invariants.

States:

    IDLE    -stage->  STAGED   shadow blocks are in the tables of the staged groups,
                               for the windows that have a seat; begin then logs all
                               other drafts
            -begin->  LOGGED   old bytes of all draft slots are in the undo log
            -begin->  PLAIN    they are not, that is counted, the step is plain vLLM's
    LOGGED  -commit-> IDLE     rejected slots restored, accepted ones kept
            -commit-> FAILED   each rejected slot holds old or new bytes, all else is as
                               in plain vLLM
            -abort->  IDLE     the log is dropped, the cache stays as vLLM left it
    STAGED  -commit-> IDLE     kept rows are in the real blocks, the tables are vLLM's
                               own
            -commit-> FAILED   the copy failed: the tables are vLLM's own, kept rows are
                               lost, it raises, the step's tokens must not be used; or
                               the log's restore failed: as from LOGGED
            -stage->  IDLE     stage failed: the tables are vLLM's own; begin logs all
            -begin->  STAGED   also if the other drafts cannot be logged: these run as
                               plain vLLM
            -abort->  IDLE     the tables are vLLM's own, nothing was copied: rows that
                               the step wrote to blocks with drafts go with it (such a
                               block is not full: of a partial one that vLLM caches for
                               hybrid models no hit reaches these rows)
    PLAIN   -commit, abort-> IDLE
    FAILED  -stage, begin-> as from IDLE

Invariants, by the numbers that a failed check names:

    1. LOGGED has a log of 1 to `capacity` drafts; STAGED has drafts; every other state
       has none. Shadow blocks are in the tables in STAGED only.
    2. A manager gets into FAILED by a commit_failed only, into PLAIN by an
       over_capacity or a begin_failed only.
    3. Each entry of the log is a draft at its position in a window, or none.
    4. The tables name each layer's cache where it was bound, and its place in a row of
       the log; the places fill the row and do not overlap.
    5. No two of the manager's tensors overlap, nor does one lie in a cache.
    6. In each row of the counters, staged drafts are the committed and the rejected.
"""

from __future__ import annotations

import enum
from itertools import pairwise
from typing import Any

import torch

from ..metrics import BEGIN_FAILED, COMMIT_FAILED, OVER_CAPACITY
from ..ops import COUNTER_COLUMNS
from .undo_log import GroupLog


class State(enum.Enum):
    """Where a manager is between begin and commit.

    is_open: there are windows to commit.
    """

    IDLE = "idle"
    STAGED = "staged"
    LOGGED = "logged"
    PLAIN = "plain"
    FAILED = "failed"

    def __init__(self, name: str) -> None:
        self.is_open = name in ("staged", "logged")


def check(manager: Any) -> None:
    """Waits for the device.

    Raises:
        AssertionError: naming the invariant that does not hold, and what was found.
    """
    num_drafts, fallbacks = manager.num_drafts, manager.fallbacks
    is_patched = manager.shadow is not None and manager.shadow.num_drafts > 0
    is_staged = manager.state is State.STAGED
    _require(1, is_patched == is_staged, f"{manager.state}, in tables: {is_patched}")
    least = manager.state.is_open
    most = manager.capacity if manager.state is State.LOGGED else num_drafts * least
    _require(1, least <= num_drafts <= most, f"{manager.state}, {num_drafts} drafts")
    if manager.state is State.FAILED:
        _require(2, fallbacks[COMMIT_FAILED] > 0, f"FAILED after {fallbacks}")
    if manager.state is State.PLAIN:
        counted = fallbacks[OVER_CAPACITY] + fallbacks[BEGIN_FAILED]
        _require(2, counted > 0, f"PLAIN after {fallbacks}")
    unstaged = manager._unstaged_log
    if unstaged is not None and not is_staged:
        what = "drafts of unstaged groups are logged"
        _require(1, unstaged.num_drafts == 0, f"{manager.state}, {what}")
    ranges = [_memory(manager.counters)]
    for group in manager.groups:
        logged = group.log_windows[: manager.undo_log.num_drafts].tolist()
        for draft, (request, position, size) in enumerate(logged):
            is_draft = request >= 0 and 0 <= position < size
            is_none = (request, position, size) == (-1, -1, 0)
            _require(3, is_draft or is_none, f"entry {draft}: {logged[draft]}")
        _check_tables(group)
        ranges += map(_memory, (group.undo_log, group.log_slots, group.log_windows))
        parts = group.tables if group.source is None else (*group.tables, group.source)
        ranges += (_memory(part.table) for part in parts)
    if manager.shadow is not None:
        ranges += map(_memory, manager.shadow.saved.values())
    ranges.sort()
    for (_, end), (first, _) in pairwise(ranges):
        _require(5, end <= first, f"two tensors at {first:#x}")
    for layer in (layer for group in manager.groups for layer in group.layers):
        cache_first, cache_end = _memory(layer.kv_cache)
        for first, end in ranges:
            apart = end <= cache_first or cache_end <= first
            _require(5, apart, f"a tensor at {first:#x} in the cache {layer.name}")
    for row in manager.counters.tolist():
        found = dict(zip(COUNTER_COLUMNS, row, strict=True))
        split = found["committed"] + found["rejected"]
        _require(6, found["staged"] == split, f"counters {found}")


def _require(number: int, holds: bool, found: str) -> None:
    """Raises AssertionError unless the invariant of that number holds."""
    if not holds:
        raise AssertionError(f"NWOR invariant {number} does not hold: {found}")


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and of the byte behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


def _check_tables(group: GroupLog) -> None:
    """Invariant 4, for one group."""
    rows = sorted(row for part in group.tables for row in part.table.tolist())
    places, offset = [], 0
    for layer in group.layers:
        places.append(layer.layout.table_row(layer.kv_cache.data_ptr(), offset))
        offset += layer.layout.slot_bytes
    _require(4, rows == sorted(places), f"tables {rows}; expected {sorted(places)}")
    full = offset == group.bytes_per_draft == group.undo_log.shape[1]
    _require(4, full, f"layers fill {offset} of {group.undo_log.shape[1]} bytes")
