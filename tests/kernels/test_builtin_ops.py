# SPDX-License-Identifier: Apache-2.0
"""What a step calls in place of the ops: how the library reads what Python hands it,
and that its classes do what the ops do. That they refuse what the ops do is tested
where those are."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from tests.kernels.reference import check
from tests.kernels.test_transaction import EXAMPLE, PAGES, column_major, layout_for, nhd
from tests.kernels.test_validation import Calls
from tests.kernels.transaction import (
    CLASSES,
    COMMIT,
    LOG,
    METHODS,
    RESTORE,
    STAGE,
    UNSTAGE,
    AcceptanceForm,
    Step,
    drafts_in,
    named,
)
from vllm_nwor import ops

CPU = torch.device("cpu")
ALL = ops.load()
NUM_REJECTED = AcceptanceForm.NUM_REJECTED


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"),
    [
        ("num_drafts", "3", TypeError, "'str' object cannot be interpreted as an int"),
        ("num_drafts", 1 << 70, OverflowError, "too big"),
        ("table", None, RuntimeError, "NoneType"),
        ("table", [[1]], RuntimeError, "list"),
        ("runs", 7, RuntimeError, "int"),
    ],
)
def test_a_value_of_another_type_is_refused(argument, value, error, message):
    calls = Calls(CPU)
    before = calls.snapshot()

    with pytest.raises(error, match=message):
        calls.call_class(LOG, **{argument: value})

    assert all(map(torch.equal, before, calls.snapshot()))


DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.complex64])
def test_dtypes_have_pytorchs_names(dtype):
    calls = Calls(CPU)
    wrong = calls.arguments[LOG]["cu_num_logits"].to(dtype)
    with pytest.raises(RuntimeError) as by_op:
        calls.call(LOG, cu_num_logits=wrong)

    with pytest.raises(RuntimeError) as by_class:
        calls.call_class(LOG, cu_num_logits=wrong)

    said = str(by_op.value)
    if dtype not in DTYPES:
        said = re.sub(r"dtype \w+", "dtype UNKNOWN_SCALAR", said)
    assert str(by_class.value) == said


def test_none_is_returned_with_a_reference():
    calls = Calls(CPU)
    references = sys.getrefcount(None)
    for _ in range(10_000):
        assert calls.call_class(LOG) is None
    assert abs(sys.getrefcount(None) - references) < 5_000


# --- the classes ----------------------------------------------------------------------


class ByClasses(Step):
    """Whose launches are those of LoggedLayers and StagedLayers, one of each for every
    table of the group."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.known = {}
        self.tables_of_seats = self.tables_of_seats[:1] * 4  # they are made of it

    def check(self, op, table=0, **more):
        of, method, names = METHODS[op]

        def call(**a):
            a |= {
                "counters": self.counters[table],
                # The second slot is the one that the reference writes to.
                "ring": self.published._base[table : table + 2],
                "slot": 1,
                "undoes": table == len(self.tables) - 1,
            }
            if (of, table) not in self.known:
                made_of = named(a, CLASSES[of])
                self.known[of, table] = getattr(ALL, of)(*made_of)
            getattr(self.known[of, table], method)(*named(a, names))

        check(op, self.layers, self.arguments(op, table, **more), call)


@pytest.mark.parametrize("form", [AcceptanceForm.SAMPLED, AcceptanceForm.NUM_REJECTED])
@pytest.mark.parametrize("kinds", [[nhd], [nhd, column_major]])
def test_the_classes_do_what_the_ops_do(device, kinds, form):
    """Step after step, in either way, with the same objects, every byte of it. The
    second step is staged in vain."""
    if len(kinds) > 1 and device.type != "cpu":
        pytest.skip("packed layouts are for the CPU")
    tables = [[layout_for(PAGES, kind)] * 2 for kind in kinds]
    step = ByClasses(device, tables, PAGES, capacity=6)
    for later, ends, accepted in (
        (0, COMMIT, 0),
        (1, UNSTAGE, 0),
        (1, COMMIT, 0),
        (2, COMMIT, 2),
    ):
        step.step += 1
        requests = [
            replace(r, seq_len=r.seq_len + later, accepted=min(accepted, r.num_drafts))
            for r in EXAMPLE
        ]
        step.load(requests, seats=[2, 0, 1])
        step.check_tables(LOG)
        step.check_tables(STAGE)
        step.forward()
        if ends == UNSTAGE:
            step.check(UNSTAGE)
        else:
            step.check_tables(COMMIT, form)
        step.check_tables(RESTORE, form)
    assert step.windows()[0].num_drafts == 3


def test_a_staged_step_ends_once(device):
    """And where stage fails nothing is, whatever the step before has left."""
    step = ByClasses(device, [[layout_for(PAGES)]], PAGES)
    step.load(EXAMPLE)
    step.check(STAGE)
    layers = step.known["StagedLayers", 0]
    tables = step.block_table.clone(), step.slot_mapping.clone()
    accepted = NUM_REJECTED.arguments(step.drafts, step.accepted, device).values()
    layers.commit(*accepted, -1)
    said = "^commit_draft_layer: no step is staged; stage must come first$"

    def refused():
        with pytest.raises(RuntimeError, match=said):
            layers.commit(*accepted, -1)

    refused()
    step.block_table[:], step.slot_mapping[:] = tables  # as if it were staged still
    layers.unstage()
    assert torch.equal(step.block_table, tables[0])

    step.step += 1
    step.load(EXAMPLE)
    step.check(STAGE)
    tables = step.block_table.clone(), step.slot_mapping.clone()
    with pytest.raises(RuntimeError, match=r"^stage: step is 0; must be from 1 to "):
        layers.stage(*named(step.arguments(STAGE) | {"step": 0}, METHODS[STAGE][2]))
    refused()
    layers.unstage()
    assert torch.equal(step.slot_mapping, tables[1])


@pytest.mark.parametrize("slot", [-2, 2])
def test_a_slot_is_one_of_the_ring(device, slot):
    step = ByClasses(device, [[nhd()]], capacity=3)
    step.load(drafts_in((3, 4), (20,), accepted=(1, 0)))
    step.check(LOG)
    accepted = NUM_REJECTED.arguments(step.drafts, step.accepted, device).values()
    said = f"slot is {slot}; must be from -1 to 1, the last of ring"
    with pytest.raises(RuntimeError, match=f"^restore_rejected_drafts: {said}$"):
        step.known["LoggedLayers", 0].restore(*accepted, 3, slot)


def test_a_class_keeps_its_tensors(device):
    step = ByClasses(device, [[nhd()]], capacity=3)
    step.load(drafts_in((3, 4), (20,), accepted=(1, 0)))
    step.check(LOG)
    layers = step.known.pop(("LoggedLayers", 0))
    tensor = layers.made_of[4]
    assert tensor is step.undo_log
    references = sys.getrefcount(tensor)
    del layers
    assert sys.getrefcount(tensor) == references - 1


def test_all_arguments_are_given_by_position():
    for wrong in (1, 3):
        said = f"^audit_snapshot: got {wrong} arguments; must be 2$"
        with pytest.raises(RuntimeError, match=said):
            ALL.audit_snapshot(*[None] * wrong)
    with pytest.raises(RuntimeError, match=r"^LoggedLayers: got 1 argu"):
        ALL.LoggedLayers(1)
    with pytest.raises(RuntimeError, match=r"^StagedLayers: takes argu"):
        ALL.StagedLayers(table=1)
