# SPDX-License-Identifier: Apache-2.0
"""The simulation finds nothing in the package as it is, and does find planted bugs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.simulation import __main__ as program
from tests.simulation import seats
from tests.simulation.__main__ import REPO, Failure, run
from tests.simulation.cache import GUARD_BYTES, Violation
from tests.simulation.engine import FAULTS
from tests.simulation.simulator import KINDS, Simulator
from vllm_nwor import ops
from vllm_nwor.draft_manager import DraftCommitManager
from vllm_nwor.metrics import FALLBACKS

# More make nightly plays: a million, from another seed each time.
NUM_OPERATIONS = 20_000
# A planted bug has to show within as many, and in so few at the end.
MOST_LEFT = 8


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(before)


def test_no_violation_in_20000_operations() -> None:
    totals = run(0, NUM_OPERATIONS)
    assert sum(totals[f"operations/{kind}"] for kind in KINDS) == NUM_OPERATIONS
    # And everything that the simulation is about has happened, not once or twice.
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


def test_worlds_differ_in_what_matters() -> None:
    """Every layout, several groups, groups that share memory, layers left alone, groups
    that are logged, staged, and both. Within a group each byte has one owner, and guard
    bytes have none."""
    found = set()
    for seed in range(40):
        engine = Simulator(seed).engine
        groups, num_staged = engine.cache.groups, len(engine.regions)
        starts = {min(group.index[0]) for group in groups}
        found |= {f"{len(groups)} groups", f"{num_staged} staged"}
        found |= {
            f"{len(engine.launches)} launches",
            f"strict {engine.strict}",
            f"indices {engine.has_indices}",
            f"beside {0 < num_staged < len(engine.manager.groups)}",
            f"shared memory {len(starts) < len(groups)}",
        }
        for group in groups:
            found |= {*re.findall(r"\w+(?=\))", f"{list(group.layers)}")}
            found |= {f"small entries {group.entry_tokens < group.block_size}"}
            found |= {f"left alone {len(group.layers) > len(group.protected)}"}
            taken = group.index.ravel().tolist()
            assert len(taken) == len(set(taken))
            assert min(taken) >= GUARD_BYTES
            assert max(taken) < engine.cache.real.size - GUARD_BYTES
    whether = "strict, indices, beside, shared memory, small entries, left alone"
    assert found >= {
        *("1 groups", "2 groups", "3 groups", "1 launches", "3 launches"),
        *("0 staged", "1 staged", "2 staged", "3 staged"),
        *("nhd", "hnd", "mla", "columns", "pairs"),
        *(f"{what} {is_so}" for what in whether.split(", ") for is_so in (True, False)),
    }


def test_shadow_rows_that_count_are_the_real_ones() -> None:
    totals = run(0, 50_000, seats.Rule)
    assert min(totals["prefixes/copied"], totals["prefixes/kept"]) > 2000


# --- bugs that are planted: in an op, called as bug(op, *its arguments) ---------------


def stale_log(op: Any, *args: Any) -> None:
    """Logs of more than two drafts are not taken: what an earlier step saved is
    restored."""
    before = args[5].clone()
    op(*args)
    if args[8] > 2:
        args[5].copy_(before)


def padding_is_slot_zero(op: Any, *args: Any) -> None:
    op(*args[:2], args[2].clamp(min=0), *args[3:])


def accepted_restored(op: Any, *args: Any) -> None:
    """One draft too many is undone."""
    sampled, rejected = args[5], args[7]
    if sampled is not None:
        sampled = sampled.clone()
        sampled[:, 0] = -1
    else:
        rejected = rejected + 1
    op(*args[:5], sampled, args[6], rejected, *args[8:])


def forgets_a_layer(op: Any, table: torch.Tensor, *args: Any) -> None:
    """The last one of each table."""
    whole = table.clone()
    table[-1] = table[0]
    try:
        op(table, *args)
    finally:
        table.copy_(whole)


def slots_not_staged(op: Any, *args: Any) -> None:
    """Drafts go to the real blocks."""
    before = args[3].clone()
    op(*args)
    args[3].copy_(before)


def rejected_committed(op: Any, *args: Any) -> None:
    """Each staged window keeps all its drafts."""
    sampled, rejected = (it if it is None else it * 0 for it in (args[6], args[8]))
    op(*args[:6], sampled, args[7], rejected, *args[9:])


def staged_ones_logged(op: Any, *args: Any) -> None:
    """A log takes drafts that are in shadow blocks, too."""
    op(*args[:9], ops.NO_SHADOW, *args[10:])


def tables_left(op: Any, *args: Any) -> None:
    pass


# --- in the manager -------------------------------------------------------------------


def keeps_an_uncommitted_log(manager: DraftCommitManager) -> None:
    manager.abort = lambda reason: None  # type: ignore[method-assign]


def keeps_at_a_beginning(manager: DraftCommitManager) -> None:
    """Whatever the hook found."""
    if manager.shadow is not None:
        start = manager.shadow.start_step
        manager.shadow.start_step = lambda keeps: start()


# --- and in the rule of the seats -----------------------------------------------------


def broken(name: str, **methods: Any) -> type[seats.Rule]:
    return type(name, (seats.Rule,), methods)


RULES = (
    broken("any_step", counts=lambda rule, seat, *at: rule.saved[seat][1:] == at),
    broken(
        "any_entry",
        counts=lambda rule, seat, first, _: (
            rule.saved[seat][:2] == (rule.step - 1, first)
        ),
    ),
    broken("steps_with_drafts", rise=lambda _, drafts, staged, begins: drafts + begins),
    broken(
        "steps_without_log",
        rise=lambda _, drafts, staged, begins: (staged or not drafts) + begins,
    ),
    broken("beginnings_unseen", rise=lambda *_: 1),
    # What an earlier commit left is not taken back by a step that fails.
    broken(
        "failed_steps_commit",
        stage=lambda rule, seat: rule.commit(seat, *rule.saved[seat][1:]),
    ),
)

# What is planted, in which op if it is one, and the kinds of failure.
BUGS: list[tuple[Callable[..., Any], str | None, str]] = [
    (stale_log, "log_cache_slots", "guarantee 1"),
    (staged_ones_logged, "log_cache_slots", "counters"),
    (padding_is_slot_zero, "log_cache_slots", "counters"),  # its own bytes back
    (accepted_restored, "restore_rejected_drafts", "guarantee 2"),
    (forgets_a_layer, "restore_rejected_drafts", "guarantee 1"),
    (forgets_a_layer, "stage", "guarantee 3"),
    (forgets_a_layer, "commit_draft_layer", "guarantee 2"),
    (slots_not_staged, "stage", "slots"),
    (rejected_committed, "commit_draft_layer", "guarantee [12]"),
    (tables_left, "unstage", "tables"),
    (keeps_an_uncommitted_log, None, "fallbacks|state|tables"),
    (keeps_at_a_beginning, None, "counters|guarantee 3"),
    *((rule, None, "stale shadow row") for rule in RULES),
]


@pytest.mark.parametrize(
    ("bug", "op", "kind"),
    BUGS,
    ids=lambda part: getattr(part, "__name__", part if isinstance(part, str) else None),
)
def test_a_planted_bug_is_found_and_shrunk(bug: Any, op: str | None, kind: str) -> None:
    def in_op(manager: Any) -> None:
        setattr(manager.ops, op or "", partial(bug, getattr(manager.ops, op or "")))

    is_rule = isinstance(bug, type)
    # Those show in the third step of a life at the soonest; these need others, too.
    most = MOST_LEFT * (3 if is_rule else 2 if bug is keeps_at_a_beginning else 1)
    seed = 0
    for _ in range(4 if is_rule else 1):  # some failures have no short list
        with pytest.raises(Failure, match=rf"^({kind})") as caught:
            run(seed, 400_000 if is_rule else NUM_OPERATIONS, in_op if op else bug)
        failure = caught.value
        seed = failure.seed + 1
        if len(failure.operations) <= most:
            break
    assert 0 < len(failure.operations) <= most, failure
    # The package as it is has no fault there, nor has the rule.
    Simulator(failure.seed, seats.Rule if is_rule else None).play(failure.operations)


def test_the_printed_command_replays_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """A bug below the seam, in the ops module, then one in the rule, and nothing but
    what was printed."""
    ops.load()
    restore, result = ops.restore_rejected_drafts, tmp_path / "simulation.json"

    def restores_backwards(*args: Any) -> None:
        restore(*args[:2], args[2].flip(1), *args[3:])

    rule = seats.Rule, "counts", vars(RULES[1])["counts"]
    for owner, name, bug, options, kind in (
        (ops, "restore_rejected_drafts", restores_backwards, "", "guarantee 1"),
        (*rule, "0 --seat-steps 20000", "stale"),
    ):
        argv = ["", "--json", str(result), "--operations", *(options or "400").split()]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, bug)
            patch.setattr("sys.argv", argv)
            assert program.main() == 1
            printed = capsys.readouterr().out
            assert printed.startswith(kind)
            assert '"violations": []' not in result.read_text()
            (command,) = re.findall(r"python -m (tests\.simulation .*)", printed)
            patch.setattr("sys.argv", shlex.split(command))
            with pytest.raises(Violation, match=f"^{kind}"):
                program.main()


def test_the_program_needs_nothing_loaded() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--operations", "100"]
    subprocess.run([*command, "--seat-steps", "100"], check=True, cwd=REPO)
