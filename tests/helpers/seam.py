# SPDX-License-Identifier: Apache-2.0
"""A seam at the ops: LoggedLayers and StagedLayers that call Python functions, which
tests replace, with all arguments of an op."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm_nwor import ops as native
from vllm_nwor.transaction.draft_manager import DraftCommitManager


def _row(ring: Any, slot: int) -> Any:
    return None if slot < 0 else ring[slot]


class LoggedLayers:
    """functions: what has log_cache_slots and restore_rejected_drafts."""

    def __init__(self, functions: Any, *made_of: Any) -> None:
        self.functions, self.made_of = functions, made_of
        self.source, self.table, self.log_ = made_of[:2], made_of[2:4], made_of[4:7]
        self.counters, self.ring, self.first_shadow_slot = made_of[7:]

    def log(self, slots: Any, logits: Any, cu: Any, n: int, zeros: int) -> None:
        batch, drafts = (slots, logits, cu), (n, self.first_shadow_slot, zeros)
        self.functions.log_cache_slots(*self.source, *batch, *self.log_, *drafts)

    def restore(self, sampled: Any, vocab: int, rejected: Any, n: int, at: int) -> None:
        accepted = sampled, vocab, rejected
        self.functions.restore_rejected_drafts(
            *self.table, *self.log_, *accepted, self.counters, n, _row(self.ring, at)
        )


class StagedLayers:
    """functions: what has stage, commit_draft_layer and unstage."""

    def __init__(self, functions: Any, *made_of: Any) -> None:
        self.functions, self.made_of = functions, made_of
        self.table, (self.saved, self.counters, self.ring) = made_of[:2], made_of[2:5]
        *self.entries, tokens, states, self.patches, self.undoes = made_of[5:]
        self.places = tokens, states
        self.step: Any = None

    def stage(self, *args: Any) -> None:
        block_table, slots, starts, lengths, cu, indices, step, rest, zeros = args
        self.step = block_table, slots, indices, len(cu) - zeros
        self.has_failed = True  # its work may be done
        self.functions.stage(
            *self.table,
            *(block_table, slots, starts, lengths, cu, indices, self.saved),
            *(*self.entries, *self.places, step, self.patches, rest, zeros),
        )
        self.has_failed = False

    def commit(self, sampled: Any, vocab: int, rejected: Any, at: int) -> None:
        *windows, num_reqs = self.step
        self.functions.commit_draft_layer(
            *self.table,
            *(*windows, self.saved, sampled, vocab, rejected, self.counters, num_reqs),
            *(*self.places, self.undoes, _row(self.ring, at)),
        )
        if self.undoes:
            self.step = None

    def unstage(self) -> None:
        if self.step is None:
            return
        *windows, num_reqs = self.step
        step = *windows, self.saved, num_reqs, *self.places
        # If stage did nothing, the saved entries are an earlier step's.
        with contextlib.suppress(RuntimeError) if self.has_failed else _nothing:
            self.functions.unstage(*step)
        self.step = None


_nothing: Any = contextlib.nullcontext()


@contextlib.contextmanager
def of(manager: DraftCommitManager) -> Iterator[SimpleNamespace]:
    """The functions that the manager's launches call in the block, to be replaced."""
    functions = SimpleNamespace(**{n: getattr(native, n) for n in native.NAMES})
    with contextlib.ExitStack() as stack:
        for log in filter(None, (manager.undo_log, manager._unstaged_log)):
            logged = [
                (group, LoggedLayers(functions, *begin.__self__.made_of))
                for group, begin in log.begins
            ]
            calls: dict[str, Any] = {
                "begins": [(group, layers.log) for group, layers in logged],
                "commits": [layers.restore for _, layers in logged],
            }
            stack.enter_context(mock.patch.multiple(log, **calls))
        if manager.shadow is not None:
            staged = [
                (group, StagedLayers(functions, *begin.__self__.made_of))
                for group, begin in manager.shadow.begins
            ]
            calls = {
                "begins": [(group, layers.stage) for group, layers in staged],
                "commits": [layers.commit for _, layers in staged],
                "_undos": [layers.unstage for _, layers in staged if layers.patches],
            }
            stack.enter_context(mock.patch.multiple(manager.shadow, **calls))
        yield functions


def failing(
    op: Callable[..., None],
    at: int | None,
    late: bool = False,
    error: Exception | None = None,
) -> Callable[..., None]:
    """`op`, raising at call number `at` (from 0; None: at every call), before its work,
    or after it if `late`."""
    calls = itertools.count()

    def run(*args: Any) -> None:
        fails = next(calls) == at or at is None
        if late or not fails:
            op(*args)
        if fails:
            raise error or RuntimeError("injected")

    return run
