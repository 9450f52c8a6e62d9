# SPDX-License-Identifier: Apache-2.0
"""The ops as builtins: how they read what Python hands them. That they do and refuse
what the ops do is tested where those are."""

from __future__ import annotations

import re
import sys
import weakref

import pytest
import torch

from tests.kernels.test_validation import Calls
from tests.kernels.transaction import COMMIT, LOG, STAGE, UNSTAGE
from vllm_nwor import ops

CPU = torch.device("cpu")
ALL = ops.load()


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_number_of_arguments_is_the_schemas(name):
    number = len(getattr(ops, name)._schema.arguments)
    builtin = getattr(ALL, name)
    for wrong in (0, number - 1, number + 1, 300):
        said = f"^{name}: got {wrong} arguments; must be {number}$"
        with pytest.raises(RuntimeError, match=said):
            builtin(*[None] * wrong)


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
        calls.call_builtin(LOG, **{argument: value})

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

    with pytest.raises(RuntimeError) as by_builtin:
        calls.call_builtin(LOG, cu_num_logits=wrong)

    said = str(by_op.value)
    if dtype not in DTYPES:
        said = re.sub(r"dtype \w+", "dtype UNKNOWN_SCALAR", said)
    assert str(by_builtin.value) == said


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:],
        lambda t: t[:0],
        lambda t: t.T,
        lambda t: t.expand(3, *t.shape),
        lambda t: t.flatten()[0],
        lambda t: torch.as_strided(t, (1, t.shape[1]), (999, 1)),
    ],
)
def test_views_are_seen_as_the_ops_see_them(view):
    """At the second row: with an offset in its storage."""
    found = []
    for by in ("call", "call_builtin"):
        calls = Calls(CPU)
        table = calls.arguments[UNSTAGE]["block_table"]
        try:
            said = getattr(calls, by)(UNSTAGE, block_table=view(table[1:]))
        except RuntimeError as error:
            said = str(error)
        side = calls.side
        found.append((said, (side.block_table, side.slot_mapping, side.saved)))
    (said, by_op), (said_by_builtin, by_builtin) = found
    assert said_by_builtin == said
    assert all(map(torch.equal, by_op, by_builtin))


def test_none_is_returned_and_not_used_up():
    calls = Calls(CPU)
    references = sys.getrefcount(None)
    for _ in range(10_000):
        assert calls.call_builtin(LOG) is None
    assert abs(sys.getrefcount(None) - references) < 5_000


class Owner:
    """Something that can be weakly referenced."""


def test_a_remembered_tensor_is_not_looked_at_until_its_owners_are_gone():
    calls = Calls(CPU)
    slots = calls.arguments[LOG]["log_slots"]
    memory, other = slots.data, torch.full_like(slots, 77)
    owners = [Owner(), Owner()]
    ops.remember(owners[0], [slots])
    ops.remember(owners[1], [slots])
    slots.data = other

    def written() -> bool:
        """Whether the log went to `other`, not to `memory`."""
        memory.fill_(77)
        other.fill_(77)
        assert calls.call_builtin(LOG) is None
        assert (memory == 77).all() != (other == 77).all()
        return bool((memory == 77).all())

    assert not written()
    owners.pop(0)
    assert not written()
    owners.clear()
    assert written()


@pytest.mark.parametrize("ends", [COMMIT, UNSTAGE])
def test_what_stage_looked_at_is_known_until_the_step_ends(ends):
    """And lives that long; what follows looks again."""
    calls = Calls(CPU)
    calls.call(UNSTAGE)
    slots = calls.arguments[STAGE]["slot_mapping"]
    references, real = sys.getrefcount(slots), slots.tolist()
    assert calls.call_builtin(STAGE) is None
    assert sys.getrefcount(slots) == references + 1
    staged, other = slots.data, torch.full_like(slots, 77)
    assert staged.tolist() != real

    slots.data = other
    assert calls.call_builtin(ends) is None

    assert staged.tolist() == real
    assert sys.getrefcount(slots) == references
    assert calls.call_builtin(STAGE) is None
    assert staged.tolist() == real
    assert sys.getrefcount(slots) == references + 1
    assert calls.call_builtin(STAGE, slot_mapping=staged) is None
    assert sys.getrefcount(slots) == references


def test_a_step_may_begin_when_a_tensor_of_another_ends():
    """Each commit puts back its own slots."""
    calls, other = Calls(CPU), Calls(CPU)
    slots = [each.arguments[STAGE]["slot_mapping"] for each in (calls, other)]
    for each in (calls, other):
        each.call(UNSTAGE)
    real = [of.tolist() for of in slots]
    doomed = slots[0].clone()
    assert calls.call_builtin(STAGE, slot_mapping=doomed) is None
    calls.call(UNSTAGE, slot_mapping=doomed)  # the builtins do not see it
    begins = weakref.ref(doomed, lambda _: other.call_builtin(STAGE))
    del doomed

    assert calls.call_builtin(STAGE) is None
    assert begins() is None
    assert slots[1].tolist() != real[1]

    assert calls.call_builtin(COMMIT) is None
    assert slots[0].tolist() == real[0]
    assert slots[1].tolist() != real[1]
    assert other.call_builtin(COMMIT) is None
    assert slots[1].tolist() == real[1]


def test_a_remembered_tensor_lives_as_long_as_its_owner():
    """Another object could have its address, and would be taken for it."""
    owner, tensor = Owner(), torch.zeros(3)
    known = weakref.ref(tensor)
    ops.remember(owner, [tensor])
    del tensor
    assert known() is not None
    del owner
    assert known() is None


def test_only_tensors_are_remembered():
    """And nothing else that came with what is none."""
    owner, tensor = Owner(), torch.zeros(3)
    known = weakref.ref(tensor)
    with pytest.raises(RuntimeError, match="list"):
        ops.remember(owner, [tensor, [1]])
    del tensor, owner
    assert known() is None
