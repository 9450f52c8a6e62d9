# SPDX-License-Identifier: Apache-2.0
"""The simulation finds no violation, and finds planted bugs.

More bugs in the ops and the manager: tools/mutations.yml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.simulation.__main__ import Failure, run
from tests.simulation.engine import FAULTS
from tests.simulation.simulator import KINDS, Simulator
from vllm_nwor.metrics import FALLBACKS
from vllm_nwor.transaction.draft_manager import DraftCommitManager

# `make nightly` plays a million, with another seed each time.
NUM_OPERATIONS = 20_000
# A planted bug must be found within NUM_OPERATIONS, and shrink to so few.
MOST_LEFT = 8


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(before)


def test_no_violation_in_20000_operations() -> None:
    totals: Counter[str] = Counter()
    run(0, NUM_OPERATIONS, totals)
    assert sum(totals[f"operations/{kind}"] for kind in KINDS) == NUM_OPERATIONS
    # Each kind of event has happened often enough.
    assert min(totals.values()) >= 20, totals
    more = {"prefix_hits", "evictions", "forced_preemptions", "restarts"}
    assert totals.keys() >= more | {
        *("dropped_windows", "steps_of_both", "groups_of_both", "staged_steps"),
        *(f"operations/{kind}" for kind in KINDS),
        *(f"faults/{fault}" for fault in FAULTS[1:]),
        *(f"fallbacks/{reason}" for reason in FALLBACKS),
    }
    assert min(totals["prefixes/copied"], totals["prefixes/kept"]) > 200
    assert totals["commits"] > 1500
    assert totals["rejected"] > totals["commits"] < totals["windows"]


# --- planted bugs: in an op, called as bug(op, *arguments), or in the manager ---------


def forgets_a_layer(op: Any, table: torch.Tensor, *args: Any) -> None:
    """Skips the last layer of each table."""
    whole = table.clone()
    table[-1] = table[0]
    try:
        op(table, *args)
    finally:
        table.copy_(whole)


def tables_left(op: Any, *args: Any) -> None:
    pass


def any_step_counts(op: Any, *args: Any) -> None:
    """Rows that a shadow block has from an earlier step than the last one are used."""
    saved, step, patches = args[8], args[14], args[15]
    if patches:
        saved[saved[:, 9] >= 0, 8] = step - 1  # what was committed
    op(*args)


def keeps_an_uncommitted_log(manager: DraftCommitManager) -> None:
    manager.abort = lambda reason: None  # type: ignore[method-assign]


def keeps_at_a_beginning(manager: DraftCommitManager) -> None:
    """Ignores that a request begins with drafts."""
    if manager.shadow is not None:
        start = manager.shadow.start_step
        manager.shadow.start_step = lambda keeps: start()


# The bug, its op if any, and the kinds of violation.
BUGS: list[tuple[Callable[..., Any], str | None, str]] = [
    (forgets_a_layer, "restore_rejected_drafts", "guarantee 1"),
    (forgets_a_layer, "stage", "guarantee 3"),
    (forgets_a_layer, "commit_draft_layer", "guarantee 2"),
    (tables_left, "unstage", "tables"),
    (any_step_counts, "stage", "guarantee 3"),
    (keeps_an_uncommitted_log, None, "fallbacks|state|tables"),
    (keeps_at_a_beginning, None, "counters|guarantee 3"),
]


@pytest.mark.parametrize(
    ("bug", "op", "kind"),
    BUGS,
    ids=lambda part: getattr(part, "__name__", part if isinstance(part, str) else None),
)
def test_a_planted_bug_is_found_and_shrunk(bug: Any, op: str | None, kind: str) -> None:
    def in_op(manager: Any) -> None:
        setattr(manager.ops, op or "", partial(bug, getattr(manager.ops, op or "")))

    most = MOST_LEFT * (2 if bug is keeps_at_a_beginning else 1)
    totals: Counter[str] = Counter()
    with pytest.raises(Failure, match=rf"^({kind})") as caught:
        run(0, NUM_OPERATIONS, totals, in_op if op else bug)
    failure = caught.value
    assert 0 < len(failure.operations) <= most, failure
    assert totals["operations/arrive"] > 0
    # Without the bug the same operations pass.
    Simulator(failure.seed).play(failure.operations)
