# SPDX-License-Identifier: Apache-2.0
"""Every refusal names the op, the argument, its value and what is allowed, and is made
before the first byte is written. CUDA refuses what the host can know; what only the
device knows is left alone and counted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.kernels.reference import whole
from tests.kernels.test_transaction import (
    CPU,
    EXAMPLE,
    PAGES,
    column_major,
    layout_for,
    nhd,
)
from tests.kernels.transaction import (
    CLASSES,
    COMMIT,
    LOG,
    METHODS,
    NUM_COUNTERS,
    RESTORE,
    STAGE,
    UNSTAGE,
    AcceptanceForm,
    Step,
    acceptance,
    drafts_in,
    named,
)
from vllm_nwor import ops

TABLES, PAGED = (LOG, RESTORE, STAGE, COMMIT), (STAGE, COMMIT, UNSTAGE)
ON_CUDA = pytest.mark.gpu


def int32(values, device=CPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def every_second(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def strided(size, *strides):
    return lambda log: log.as_strided((len(log), size), strides)


class Calls:
    """Good arguments of each op, by name: of log and restore for 2 layers and 3 drafts,
    which are logged; of those of shadow blocks for the worked example, which is staged.
    """

    def __init__(self, device, layout=nhd):
        self.library = ops.load_builtins(device)
        logged = Step(device, [[layout()] * 2], capacity=5)
        logged.load(drafts_in((3, 4), (20,), accepted=(1, 0)))
        self.layers = logged.layers
        self.undo_log, self.log_slots = logged.undo_log, logged.log_slots
        self.side = side = Step(device, [[layout_for(PAGES, layout)] * 2], PAGES)
        side.load([replace(EXAMPLE[0], num_rows=4, accepted=1), *EXAMPLE[1:]])
        self.arguments = {}
        for step, known in ((logged, (LOG, RESTORE)), (side, PAGED)):
            step.counters.zero_()
            accepted = AcceptanceForm.SAMPLED.arguments(
                step.drafts, step.accepted, device
            )
            for op in known:
                self.arguments[op] = step.arguments(op, **accepted)
        self.call(LOG)
        self.call(STAGE)

    def call(self, op, **changes):
        getattr(ops, op)(**{**self.arguments[op], **changes})

    def call_class(self, op, **changes):
        """The same launch of log, restore or stage, by a class made for it."""
        of, method, names = METHODS[op]
        counted = self.arguments[COMMIT if op == STAGE else RESTORE]
        more = {name: counted[name] for name in ("counters", "counters_to")}
        more |= {"ring": counted["counters_to"][None], "slot": 0, "undoes": True}
        more["first_shadow_slot"] = ops.NO_SHADOW
        arguments = more | self.arguments[op] | changes
        layers = getattr(self.library, of)(*named(arguments, CLASSES[of]))
        return getattr(layers, method)(*named(arguments, names))

    def memory(self):
        arguments = [v for of_op in self.arguments.values() for v in of_op.values()]
        layers = [layer.memory for layer in (*self.layers, *self.side.layers)]
        return [*map(whole, filter(torch.is_tensor, (*arguments, *layers)))]

    def snapshot(self):
        return [memory.cpu().clone() for memory in self.memory()]

    def refuses(self, op, said, before="", **changes):
        """With `changes`, the op says `said`, behind what matches `before`, and writes
        nothing; nor does the class that has it, which makes those of log first."""
        if op == STAGE:
            self.call(UNSTAGE)
        memory = self.snapshot()
        by_class = op in (LOG, RESTORE, STAGE) and "counters_to" not in changes
        for call in (self.call, self.call_class)[: 1 + by_class]:
            who = f"({op}|{LOG})" if call == self.call_class and op == RESTORE else op
            with pytest.raises(
                RuntimeError, match=f"^{who}: {before}{re.escape(said)}"
            ):
                call(op, **changes)
            assert all(map(torch.equal, memory, self.snapshot()))


@pytest.mark.parametrize("by", ["call", "call_class"])
def test_the_good_arguments_are_good(device, by):
    calls = Calls(device)
    call = getattr(calls, by)
    call(LOG)
    call(RESTORE)
    counters = calls.arguments[RESTORE]["counters"]
    assert counters.tolist() == [2, 3, 1, 2, 0, 2 * 2 * 256, 0, 0, 0]
    calls.call(UNSTAGE)
    call(STAGE)
    calls.call(COMMIT)
    row_bytes = sum(layer.layout.slot_bytes for layer in calls.side.layers)
    counted = [2, 6, 1, 5, 2, 0, 0, 2 * row_bytes, 2 * row_bytes]
    assert calls.side.counters[0].tolist() == counted


# Arguments of any op that has them, what becomes of each, what is said of it.
LONGS = "table slot_mapping log_slots counters counters_to"
INTS = "cu_num_logits log_windows sampled_token_ids block_table saved query_start_loc"
CONTIGUOUS = (
    "table slot_mapping cu_num_logits saved state_indices query_start_loc seq_lens"
)
REFUSED = [
    (LONGS, torch.Tensor.int, "has dtype Int; must be Long"),
    (f"{INTS} seq_lens", torch.Tensor.long, "has dtype Long; must be Int"),
    (
        "logits_indices state_indices",
        torch.Tensor.float,
        "dtype Float; must be Int or Long",
    ),
    ("undo_log", torch.Tensor.char, "has dtype Char; must be Byte"),
    ("table block_table", lambda t: t[0], "must have 2 dimensions"),
    ("saved", torch.Tensor.flatten, "must have 2 dimensions"),
    ("cu_num_logits state_indices", lambda t: t[None], "must have 1 dimensions"),
    ("slot_mapping", lambda t: torch.stack([t, t]), "must have 1 dimensions"),
    (CONTIGUOUS, every_second, "and is not contiguous; must be"),
    ("table", lambda t: t[:, :8].contiguous(), "dimension 1 must be 9, its columns"),
    ("table", lambda t: t[:0], "has shape [0, 9]; must have a row for each layer"),
    ("undo_log", strided(256, 512, 2), "has stride 2 in dimension 1; must be 1"),
    ("undo_log", strided(512, 16, 1), "stride 16 in dimension 0; must be at least 512"),
    ("log_slots", lambda t: t[:4], "has shape [4]; dimension 0 must be 5, the"),
    ("log_windows", lambda t: t[:, :2].contiguous(), "dimension 1 must be 3, request"),
    ("num_drafts", lambda n: -1, "is -1; must be between 0 and 5, the capacity of"),
    ("num_drafts", lambda n: 6, "is 6; must be between 0 and 5, the capacity of"),
    ("counters", lambda t: t[:6], "has shape [6]; dimension 0 must be 9, its columns"),
    ("counters_to", lambda t: t[:6], "has shape [6]; must be [9], contiguous"),
    ("counters_to", every_second, "has shape [9]; must be [9], contiguous"),
    ("sampled_token_ids", lambda t: t[:, :0], "must have a column"),
    ("sampled_token_ids", lambda t: None, "num_rejected given; must be exactly one"),
    ("num_rejected", lambda t: int32([1, 0, 1]), "given; must be exactly one"),
    ("vocab_size entry_tokens", lambda n: 0, "is 0; must be at least 1"),
    ("block_table", every_second, "has stride 2 in dimension 1; must be 1"),
    ("block_table", lambda t: t[:2], "has 2 rows; must have one for each of 3"),
    ("saved", lambda t: t[:, :14].contiguous(), "dimension 1 must be 11 + 2 * span"),
    (
        "state_indices",
        lambda t: t[:2],
        "has shape [2]; dimension 0 must be 3, one for each",
    ),
    ("query_start_loc", lambda t: t[:3], "has 3 entries; must have 4, one more than"),
    ("seq_lens", lambda t: t[:2], "has 2 entries; must have 3, as many as"),
    ("span", lambda n: 0, "is 0; must be 2, as the columns of saved say"),
    ("step", lambda n: 0, "is 0; must be from 1 to 2147483647"),
    ("step", lambda n: 1 << 31, "is 2147483648; must be from 1 to 2147483647"),
    ("num_real_entries", lambda n: 0, "is 0; must be at least 1"),
    # Shadow entries among the real ones; beyond what an entry can be.
    ("first_entry", lambda n: n - 1, "is 9; must be at least 10, num_real_entries"),
    ("first_entry", lambda n: (1 << 31) - 8, "must leave room for 4 seats of 2"),
    ("num_reqs", lambda n: -1, "is -1; must be at least 0"),
    ("seat_of_state", torch.Tensor.long, "has dtype Long; must be Int"),
    ("seat_of_state", every_second, "and is not contiguous; must be"),
    ("first_shadow_slot", lambda n: 0, "is 0; must be at least 1"),
]


ops.load()


def of_ops(table):
    """Each refusal for each op that has the argument."""
    return [
        (op, name, change, said)
        for names, change, said in table
        for name in names.split()
        for op in (LOG, RESTORE, STAGE, COMMIT, UNSTAGE)
        if name in [known.name for known in getattr(ops, op)._schema.arguments]
    ]


@pytest.mark.parametrize(("op", "name", "change", "said"), of_ops(REFUSED))
def test_refused_arguments_are_named(device, op, name, change, said):
    calls = Calls(device)
    good = calls.arguments[op][name]
    if name == "seat_of_state":
        good = int32([0, 1, 2, 3], device)
    if name == "state_indices":
        good = torch.arange(3, device=device)
    value = change(good)
    if torch.is_tensor(value) and name != "counters_to":
        value = value.to(device)
    calls.refuses(op, said, f".*{name} .*", **{name: value})


def put(place, value):
    """Spoils one place of a tensor."""

    def change(tensor):
        changed = tensor.clone()
        changed[place] = torch.tensor(value, dtype=tensor.dtype)
        return changed

    return change


def with_slot(slot):
    """Spoils the slot of the last draft: only drafts have any."""
    return lambda mapping: put(int((mapping < 48).nonzero()[-1]), slot)(mapping)


NOT_NEGATIVE = "offset and length must not be negative"
NO_SLOT = "; must be -1 (padding) or between 0 and 47"
# Values that only the CPU sees; what is said begins with what is spoiled.
VALUES = [
    (LOG, "cu_num_logits", put(1, 3), "cu_num_logits[1] is 3; must be more than 3,"),
    (LOG, "cu_num_logits", put(1, 6), "cu_num_logits ends at 6; logits_indices has"),
    (LOG, "logits_indices", put(1, 999), "logits_indices[1] is 999; must be between"),
    (LOG, "logits_indices", put(1, -1), "logits_indices[1] is -1; must be between 0"),
    (LOG, "slot_mapping", with_slot(-2), f"slot of draft 2 is -2{NO_SLOT}"),
    (LOG, "slot_mapping", with_slot(48), f"slot of draft 2 is 48{NO_SLOT}"),
    (LOG, "num_drafts", lambda n: 2, "num_drafts is 2; must be at least 3, the"),
    (RESTORE, "log_slots", put(0, 48), f"slot of draft 0 is 48{NO_SLOT}"),
    (RESTORE, "log_windows", put((1, 1), 2), "log_windows[1] has position 2; must"),
    (RESTORE, "log_windows", put((1, 1), -1), "log_windows[1] has position -1; must"),
    (RESTORE, "log_windows", put((2, 0), 2), "log_windows[2] has request 2; must be"),
    (RESTORE, "sampled_token_ids", lambda t: t[:1], "log_windows[2] has request 1;"),
    (STAGE, "cu_num_logits", put(1, 4), "cu_num_logits[1] is 4; must be more than 4"),
    (STAGE, "cu_num_logits", put(0, 0), "cu_num_logits[0] is 0; must be more than 0"),
    (STAGE, "query_start_loc", put(2, 3), "query_start_loc[2] is 3; must be at least"),
    (STAGE, "query_start_loc", put(0, -1), "query_start_loc goes from -1 to 10; must"),
    (STAGE, "query_start_loc", put(3, 900), "query_start_loc goes from 0 to 900; must"),
    (STAGE, "first_entry", lambda n: 13, "first_entry is 13; the shadow entries of 3"),
]
ROWS = [
    ("base", 0, "base is 0; must be the address of the layer's cache"),
    ("block_size", 0, "block_size is 0; must be at least 1"),
    ("num_blocks", -3, "num_blocks is -3; must be at least 1"),
    ("num_blocks", 2, "has "),
    ("num_heads", 0, "num_heads is 0; must be at least 1"),
    ("run_bytes", 0, "run_bytes is 0; must be at least 1"),
]
OFFSETS = [
    (-1, "log_offset is -1; must be between 0 and the 512 bytes of a row of undo_log"),
    (513, "log_offset is 513; must be between 0 and the 512 bytes of a row of"),
    (257, "4 heads of 64 bytes at log_offset 257 do not fit a row of undo_log of 512"),
]
for op in PAGED:
    said = "state_indices[2] is 2; must be another one, an earlier row has it"
    VALUES.append((op, "state_indices", lambda _: torch.tensor([2, 1, 2]), said))
for op in (STAGE, COMMIT):
    said = "entry_tokens is 6; must be a multiple of the block size 4 of table row 0"
    VALUES.append((op, "entry_tokens", lambda n: 6, said))
for column, value, said in ROWS:
    for op in TABLES:
        change = put((1, ops.TABLE_COLUMNS.index(column)), value)
        VALUES.append((op, "table", change, f"table row 1: {said}"))
for value, said in OFFSETS:
    for op in (LOG, RESTORE):
        VALUES.append((op, "table", put((1, -1), value), f"table row 1: {said}"))


# Of the first drafts' slots; of the first slot of a block, which is always looked at;
# and, last, of the first row that is copied and has another.
RUNS = [
    (LOG, (3, 0), (-2, 2), f"runs[3][0] is (-2, 2); {NOT_NEGATIVE}"),
    (LOG, (3, 0), (0, -2), f"runs[3][0] is (0, -2); {NOT_NEGATIVE}"),
    (LOG, (3, 1), (511, 2), "runs[3] end at byte 513; must lie in a block of table"),
    (LOG, (3, 1), (0, 60), "runs[3] are 90 bytes long; at log_offset 0 of table row 0"),
    (LOG, (4, 1), (0, 1), "runs of draft 1's slot 4 are 31 bytes long; must be 32, as"),
]
for op, copied in ((STAGE, 1), (COMMIT, 2)):
    said = f"runs[{copied}] are 32 bytes long; must be 31, as in runs[0]"
    RUNS += [
        (op, (0, 0), (-2, 2), f"runs[0][0] is (-2, 2); {NOT_NEGATIVE}"),
        (op, (0, 0), (0, -2), f"runs[0][0] is (0, -2); {NOT_NEGATIVE}"),
        (op, (0, 0), (1 << 20, 2), "runs[0] end at byte 1048578; must lie in a block"),
        (op, (0, 0), (0, 1), said),
    ]
VALUES += [(op, "runs", put(place, run), said) for op, place, run, said in RUNS]
for op, size in ((LOG, 16), (STAGE, 4), (COMMIT, 4)):
    said = f"table row 0: block_size is {size}; must be {size - 1}, as in runs"
    VALUES.append((op, "runs", lambda runs: runs[:-1].contiguous(), said))


@pytest.mark.parametrize(("op", "name", "change", "said"), VALUES)
def test_refused_values_are_named_on_the_cpu(op, name, change, said):
    calls = Calls(CPU, column_major if name == "runs" else nhd)
    calls.refuses(op, said, **{name: change(calls.arguments[op][name])})


def test_sizes_that_do_not_agree(device):
    calls = Calls(device)
    said = "has 2 rows; must have 3, num_reqs"
    fewer = calls.arguments[COMMIT]["sampled_token_ids"][:2]
    calls.refuses(COMMIT, f"sampled_token_ids {said}", sampled_token_ids=fewer)
    fewer = acceptance(num_rejected=int32([1, 0], device))
    calls.refuses(COMMIT, f"num_rejected {said}", **fewer)
    if device.type == "cpu":
        said = "log_windows[2] has request 1; must be -1 (not a draft) or between 0 and"
        fewer = acceptance(num_rejected=int32([0]))
        calls.refuses(RESTORE, f"{said} 0, the last row of num_rejected", **fewer)


class TestOnCuda:
    pytestmark = ON_CUDA

    @pytest.mark.parametrize("op", TABLES)
    def test_packed_layouts_are_refused(self, op):
        runs = torch.zeros(16, 1, 2, dtype=torch.int32, device="cuda")
        calls = Calls(torch.device("cuda"))
        calls.refuses(op, "runs is given; must be None on CUDA", runs=runs)

    @pytest.mark.parametrize("name", ["slot_mapping", "undo_log", "log_windows"])
    def test_a_tensor_left_on_the_host_is_refused(self, name):
        calls = Calls(torch.device("cuda"))
        on_host = {name: calls.arguments[LOG][name].cpu()}
        said = f"{name} is on cpu; must be on cuda:0, where table is"
        calls.refuses(LOG, said, **on_host)

    def test_counters_go_to_pinned_memory_only(self):
        """Memory that was never pinned, is pinned, and is no longer pinned."""
        calls = Calls(torch.device("cuda"))
        counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64)
        said = "counters_to is on cuda:0; must be on cpu"
        calls.refuses(RESTORE, said, counters_to=counters.cuda())
        said = "counters_to is memory that the device does not see at its address; must"
        calls.refuses(RESTORE, f"{said} be pinned", counters_to=counters)
        cudart, address = torch.cuda.cudart(), counters.data_ptr()
        assert int(cudart.cudaHostRegister(address, counters.nbytes, 0)) == 0
        calls.call(RESTORE, counters_to=counters)
        torch.cuda.synchronize()
        assert int(cudart.cudaHostUnregister(address)) == 0
        calls.refuses(RESTORE, f"{said} be pinned", counters_to=counters)

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("is_logged", [True, False])
    def test_what_only_the_device_knows_is_left_alone_and_counted(self, is_logged):
        """Slots and rows that are none; and a request without acceptance."""
        calls = Calls(torch.device("cuda"))
        log, restore = calls.arguments[LOG], calls.arguments[RESTORE]
        before = [layer.memory.clone() for layer in calls.layers]
        if is_logged:
            calls.call(RESTORE, sampled_token_ids=int32([[1, 2, 3]], "cuda"))
            expected = [1, 2, 2, 0, 0, 0, 1, 0, 0]
        else:
            mapping, indices = log["slot_mapping"], log["logits_indices"]
            mapping[indices[1].item()] = 48
            mapping[indices[2].item()] = -7
            indices[4] = 999
            calls.call(LOG)
            assert calls.log_slots[:3].tolist() == [ops.INVALID_SLOT] * 3
            calls.call(RESTORE, log_slots=calls.log_slots)
            expected = [2, 3, 1, 2, 0, 0, 3, 0, 0]
        assert restore["counters"].tolist() == expected
        for old, layer in zip(before, calls.layers, strict=True):
            assert torch.equal(old, layer.memory)
