# SPDX-License-Identifier: Apache-2.0
"""Every refusal names the op, the argument, its value and what is allowed, and is made
before the first byte is written. CUDA refuses what the host can know; what only the
device knows is left alone and counted."""

from __future__ import annotations

import re

import pytest
import torch

from tests.kernels.reference import PAD, Batch, Layer, Log, make_table, row_bytes_of
from tests.kernels.test_log_restore import column_major, nhd
from tests.kernels.test_shadow_pages import EXAMPLE, PAGES, layout_for
from tests.kernels.transaction import NUM_COUNTERS, ShadowSide
from vllm_nwor import builtin_ops, ops

TABLE = {name: column for column, name in enumerate(ops.TABLE_COLUMNS)}
LOG, RESTORE = "log_cache_slots", "restore_rejected_drafts"
STAGE, COMMIT, UNSTAGE = "stage", "commit_draft_layer", "unstage"
STAGE_NAMES = (
    *("table", "runs", "block_table", "slot_mapping", "query_start_loc", "seq_lens"),
    *("cu_num_logits", "seats", "saved", "first_entry", "num_real_entries", "span"),
    *("entry_tokens", "step", "patches"),
)
COMMIT_NAMES = (
    *("table", "runs", "block_table", "slot_mapping", "seats", "saved"),
    *("sampled_token_ids", "vocab_size", "num_rejected", "counters", "num_reqs"),
    *("entry_tokens", "undoes", "counters_to"),
)
UNSTAGE_NAMES = (
    *("block_table", "slot_mapping", "seats", "saved", "num_reqs", "entry_tokens"),
)
CPU = torch.device("cpu")
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def int32(values, device=CPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def current(device):
    """With its index, and where it is a GPU the current one."""
    if device.type == "cpu":
        return device
    return torch.device("cuda", torch.cuda.current_device())


def every_second(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


class Calls:
    """Good arguments of each op, by name: of log and restore for 2 layers and 3 drafts,
    of those of shadow pages for the worked example, which is staged."""

    def __init__(self, device, layout=nhd):
        self.builtins = builtin_ops.load(current(device))
        self.layers = [Layer(layout(), device, seed) for seed in range(2)]
        tables = make_table(self.layers, device)
        batch = Batch(slots=((3, 4), (20,)), accepted=(1, 0))
        self.undo = undo = Log.poisoned(5, row_bytes_of(tables), device)
        mapping, indices, cumulative = batch.metadata(device, torch.int32, 0)
        log = {
            "table": tables.table,
            "runs": tables.runs,
            "slot_mapping": mapping,
            "logits_indices": indices,
            "cu_num_logits": cumulative,
            "undo_log": undo.undo_log,
            "log_slots": undo.slots,
            "log_windows": undo.windows,
            "num_drafts": 3,
        }
        restore = {
            "table": tables.table,
            "runs": tables.runs,
            "undo_log": undo.undo_log,
            "log_slots": torch.tensor([3, 4, 20, 0, 0], device=device),
            "log_windows": int32(
                [[0, 0, 2], [0, 1, 2], [1, 0, 1], [-1, -1, 0], [-1, -1, 0]], device
            ),
            "sampled_token_ids": int32([[1, 2, -1], [1, -1, -1]], device),
            "vocab_size": 10,
            "num_rejected": None,
            "counters": torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device),
            "num_drafts": 3,
            "counters_to": torch.zeros(
                NUM_COUNTERS, dtype=torch.int64, pin_memory=device.type == "cuda"
            ),
        }
        self.side = side = ShadowSide(PAGES, [[layout_for(PAGES, layout)] * 2], device)
        side.load(EXAMPLE)
        stage = side.stage_arguments(side.tables[0], True)
        tokens = int32([[1, 2, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1]], device)
        commit = side.commit_arguments(0, (tokens, 10, None), True)
        committing = dict(zip(COMMIT_NAMES, commit, strict=True))
        self.arguments = {
            LOG: log,
            RESTORE: restore,
            STAGE: dict(zip(STAGE_NAMES, stage, strict=True)),
            COMMIT: committing,
            UNSTAGE: {name: committing[name] for name in UNSTAGE_NAMES},
        }
        self.call(STAGE)

    def call(self, op, **changes):
        getattr(ops, op)(**{**self.arguments[op], **changes})

    def call_builtin(self, op, **changes):
        arguments = self.arguments[op] | changes
        schema = getattr(ops, op)._schema.arguments
        ordered = [arguments.get(known.name, known.default_value) for known in schema]
        return getattr(self.builtins, op)(*ordered)

    def snapshot(self):
        side, undo, restore = self.side, self.undo, self.arguments[RESTORE]
        tensors = [layer.memory for layer in (*self.layers, *side.layers)]
        tensors += [undo.memory, undo.slots, undo.windows]
        tensors += [restore["counters"], restore["counters_to"]]
        tensors += [side.table_memory, side.slot_memory, side.saved_memory]
        tensors += [side.counters, side.published]
        return [tensor.cpu().clone() for tensor in tensors]

    def refuses(self, op, said, **changes):
        """With `changes`, the op says `said` (a pattern) and writes nothing."""
        if op == STAGE:
            self.call(UNSTAGE)
        before = self.snapshot()
        for call in (self.call, self.call_builtin):
            with pytest.raises(RuntimeError, match=f"^{op}: {said}"):
                call(op, **changes)
            assert all(map(torch.equal, before, self.snapshot()))

    def refuses_exactly(self, op, said, **changes):
        self.refuses(op, re.escape(said), **changes)


def about(names):
    """One of `names`, its value and what is allowed."""
    return rf".*\b({names})\b.*\b(has|is|are|goes|end|given)\b.*\b(must|has only)\b"


@pytest.mark.parametrize("by", ["call", "call_builtin"])
def test_the_good_arguments_are_good(device, by):
    calls = Calls(device)
    call = getattr(calls, by)
    call(LOG)
    call(RESTORE)
    counters = calls.arguments[RESTORE]["counters"]
    assert counters.tolist() == [2, 3, 1, 2, 2 * 2 * 256, 0, 0, 0]
    for op in (UNSTAGE, STAGE, COMMIT):
        call(op)
    row_bytes = calls.side.tables[0].slot_bytes
    assert calls.side.counters[0].tolist() == [
        *(2, 6, 1, 5, 0, 0),
        *(row_bytes, 3 * row_bytes),
    ]


TABLES = (LOG, RESTORE, STAGE, COMMIT)
PAGED = (STAGE, COMMIT, UNSTAGE)
SAMPLING = (RESTORE, COMMIT)
# An argument of these ops, and what becomes of it.
SHAPES = [
    (TABLES, "table", lambda t: t.int()),
    (TABLES, "table", lambda t: t[0]),
    (TABLES, "table", lambda t: t[:, :8].contiguous()),
    (TABLES, "table", lambda t: t[:0]),
    (TABLES, "table", lambda t: t.t().contiguous().t()),
    ((LOG, *PAGED), "slot_mapping", lambda t: t.int()),
    ((LOG, *PAGED), "slot_mapping", lambda t: torch.stack([t, t])),
    ((LOG, *PAGED), "slot_mapping", every_second),
    ((LOG,), "logits_indices", lambda t: t.float()),
    ((LOG, STAGE), "cu_num_logits", lambda t: t.long()),
    ((LOG, STAGE), "cu_num_logits", lambda t: t[None]),
    ((LOG, STAGE), "cu_num_logits", every_second),
    ((LOG, RESTORE), "undo_log", lambda t: t.view(torch.int8)),
    ((LOG, RESTORE), "undo_log", lambda t: t.as_strided((5, 256), (512, 2))),
    ((LOG, RESTORE), "undo_log", lambda t: t.as_strided((5, 512), (16, 1))),
    ((LOG, RESTORE), "log_slots", lambda t: t[:4]),
    ((LOG, RESTORE), "log_windows", lambda t: t[:, :2].contiguous()),
    ((LOG, RESTORE), "num_drafts", lambda n: -1),
    ((LOG, RESTORE), "num_drafts", lambda n: 6),
    (SAMPLING, "counters", lambda t: t[:6]),
    (SAMPLING, "counters", lambda t: t.int()),
    (SAMPLING, "counters_to", lambda t: t[:6]),
    (SAMPLING, "counters_to", lambda t: t.int()),
    (SAMPLING, "counters_to", every_second),
    (SAMPLING, "sampled_token_ids", lambda t: t.long()),
    (SAMPLING, "sampled_token_ids", lambda t: t[:, :0]),
    (SAMPLING, "sampled_token_ids", lambda t: None),
    ((COMMIT,), "sampled_token_ids", lambda t: t[:2]),
    (SAMPLING, "num_rejected", lambda t: int32([1, 0, 1])),
    (SAMPLING, "vocab_size", lambda n: 0),
    (PAGED, "block_table", lambda t: t.long()),
    (PAGED, "block_table", lambda t: t[0]),
    (PAGED, "block_table", every_second),
    (PAGED, "block_table", lambda t: t[:2]),
    (PAGED, "saved", lambda t: t.long()),
    (PAGED, "saved", every_second),
    (PAGED, "saved", lambda t: t.flatten()),
    (PAGED, "saved", lambda t: t[:, :14].contiguous()),
    (PAGED, "seats", lambda t: t.float()),
    (PAGED, "seats", lambda t: t[:2]),
    (PAGED, "seats", lambda t: t[None]),
    (PAGED, "seats", every_second),
    (PAGED, "entry_tokens", lambda n: 0),
    ((STAGE,), "query_start_loc", lambda t: t.long()),
    ((STAGE,), "query_start_loc", lambda t: t[:3]),
    ((STAGE,), "query_start_loc", every_second),
    ((STAGE,), "seq_lens", lambda t: t.long()),
    ((STAGE,), "seq_lens", lambda t: t[:2]),
    ((STAGE,), "seq_lens", every_second),
    ((STAGE,), "span", lambda n: 0),
    ((STAGE,), "step", lambda n: 0),
    ((STAGE,), "step", lambda n: 1 << 31),
    ((STAGE,), "first_entry", lambda n: -1),
    # Shadow entries among the real ones.
    ((STAGE,), "first_entry", lambda n: n - 1),
    ((COMMIT, UNSTAGE), "num_reqs", lambda n: -1),
    ((COMMIT, UNSTAGE), "num_reqs", lambda n: 5),
]


@pytest.mark.parametrize(
    ("op", "name", "change"),
    [(op, name, change) for of, name, change in SHAPES for op in of],
)
def test_shapes_and_dtypes(device, op, name, change):
    calls = Calls(device)
    good = calls.arguments[op][name]
    if name == "seats":
        good = torch.arange(3, device=device)
    value = change(good)
    if torch.is_tensor(value) and name != "counters_to":
        value = value.to(device)
    calls.refuses(op, about(name), **{name: value})


# Of each kind of check, what it says behind the argument's name.
SAID = [
    (LOG, "table", lambda t: t.int(), "has dtype Int; must be Long"),
    (LOG, "table", lambda t: t[0], "has shape [9]; must have 2 dimensions"),
    (LOG, "table", lambda t: t[:0], "has shape [0, 9]; must have a row for each layer"),
    (RESTORE, "table", lambda t: t.t().contiguous().t(), "has shape [2, 9] and is not"),
    (LOG, "logits_indices", lambda t: t.float(), "has dtype Float; must be Int or L"),
    (LOG, "undo_log", lambda t: t.as_strided((5, 9), (99, 2)), "has stride 2 in dim"),
    (LOG, "log_slots", lambda t: t[:4], "has shape [4]; dimension 0 must be 5, the"),
    (LOG, "num_drafts", lambda n: -1, "is -1; must be between 0 and 5"),
    (RESTORE, "sampled_token_ids", lambda t: None, "and num_rejected given; must be"),
    (RESTORE, "num_rejected", lambda t: int32([1, 1]), "given; must be exactly one"),
    (RESTORE, "counters_to", lambda t: t[:5], "has shape [5]; must be [8], contiguous"),
    (RESTORE, "vocab_size", lambda n: 0, "is 0; must be at least 1"),
]
# These two are named together.
TOGETHER = {
    "sampled_token_ids": "neither of sampled_token_ids",
    "num_rejected": "both of sampled_token_ids and num_rejected",
}


@pytest.mark.parametrize(("op", "name", "change", "said"), SAID)
def test_what_is_said(device, op, name, change, said):
    calls = Calls(device)
    changed = {name: change(calls.arguments[op][name])}
    calls.refuses_exactly(op, f"{TOGETHER.get(name, name)} {said}", **changed)


ROWS = [
    ("base", 0, "base is 0; must be the address of the layer's cache"),
    ("block_size", 0, "block_size is 0; must be at least 1"),
    ("num_blocks", -3, "num_blocks is -3; must be at least 1"),
    ("num_blocks", 2, "has "),
    ("num_heads", 0, "num_heads is 0; must be at least 1"),
    ("run_bytes", 0, "run_bytes is 0; must be at least 1"),
    ("log_offset", -1, "log_offset is -1; must be between 0 and the 512 bytes of a"),
    ("log_offset", 513, "log_offset is 513; must be between 0 and the 512 bytes of"),
    (
        "log_offset",
        257,
        "4 heads of 64 bytes at log_offset 257 do not fit a row of undo_log of 512",
    ),
]


@pytest.mark.parametrize("op", TABLES)
@pytest.mark.parametrize(("column", "value", "message"), ROWS)
def test_table_rows_on_the_cpu(op, column, value, message):
    if column == "log_offset" and op in PAGED:
        return  # what these ops do not use
    calls = Calls(CPU)
    table = calls.arguments[op]["table"].clone()
    table[1, TABLE[column]] = value
    calls.refuses_exactly(op, f"table row 1: {message}", table=table)


def spoiled(tensor, place, value):
    changed = tensor.clone()
    changed[place] = torch.tensor(value, dtype=tensor.dtype)
    return changed


# In log and restore: an argument, what is in it, what is said of that.
VALUES = [
    (LOG, "cu_num_logits", 1, 3, "cu_num_logits[1] is 3; must be more than 3, each"),
    (LOG, "cu_num_logits", 1, 6, "cu_num_logits ends at 6; logits_indices has only 5"),
    (LOG, "logits_indices", 1, 999, "logits_indices[1] is 999; must be between 0 and"),
    (LOG, "slot_mapping", None, -2, "slot of draft 2 is -2; must be -1 (padding) or"),
    (LOG, "slot_mapping", None, 48, "slot of draft 2 is 48; must be -1 (padding) or"),
    (RESTORE, "log_slots", 0, 48, "slot of draft 0 is 48; must be -1 (padding) or"),
    (RESTORE, "log_windows", (1, 1), 2, "log_windows[1] has position 2; must be betwe"),
    (RESTORE, "log_windows", (2, 0), 2, "log_windows[2] has request 2; must be -1 (no"),
]


@pytest.mark.parametrize(("op", "name", "place", "value", "said"), VALUES)
def test_values_on_the_cpu(op, name, place, value, said):
    calls = Calls(CPU)
    if place is None:  # of the last draft
        place = calls.arguments[LOG]["logits_indices"][4].item()
    changed = spoiled(calls.arguments[op][name], place, value)
    calls.refuses_exactly(op, said, **{name: changed})


def test_fewer_rows_than_drafts_on_the_cpu():
    calls = Calls(CPU)
    calls.refuses_exactly(
        LOG,
        "num_drafts is 2; must be at least 3, the drafts in cu_num_logits",
        num_drafts=2,
    )
    calls.refuses_exactly(
        RESTORE,
        "log_windows[2] has request 1; must be -1 (not a draft) or between 0 and 0, "
        "the last row of num_rejected",
        sampled_token_ids=None,
        num_rejected=int32([0]),
    )


RUNS = [
    ((3, 0), (-2, 2), "runs[3][0] is (-2, 2); offset and length must not be negative"),
    ((3, 0), (0, -2), "runs[3][0] is (0, -2); offset and length must not be negative"),
    (
        (3, 1),
        (511, 2),
        "runs[3] end at byte 513; must lie in a block of table row 0, block_stride 512",
    ),
    ((3, 1), (0, 60), "runs[3] are 90 bytes long; at log_offset 0 of table row 0 they"),
    ((4, 1), (0, 1), "runs of draft 1's slot 4 are 31 bytes long; must be 32, as for"),
]


@pytest.mark.parametrize(("place", "run", "message"), RUNS)
def test_runs_on_the_cpu(place, run, message):
    calls = Calls(CPU, column_major)
    runs = spoiled(calls.arguments[LOG]["runs"], place, run)
    if "90 bytes" in message:
        calls.arguments[LOG]["undo_log"] = calls.undo.undo_log[:, :64]
    calls.refuses_exactly(LOG, message, runs=runs)


def test_runs_of_another_block_size():
    calls = Calls(CPU, column_major)
    calls.refuses_exactly(
        LOG,
        "table row 0: block_size is 16; must be 15, as in runs",
        runs=calls.arguments[LOG]["runs"][:15],
    )


@pytest.mark.parametrize("op", [STAGE, COMMIT])
def test_runs_of_shadow_pages_on_the_cpu(op):
    calls = Calls(CPU, column_major)
    runs = calls.arguments[op]["runs"]
    calls.refuses(op, about("table|runs"), runs=runs[:3].contiguous())
    # Of the slot of a row that is copied both ways.
    for run in ((-2, 2), (0, -2), (1 << 20, 2)):
        calls.refuses(op, about("runs"), runs=spoiled(runs, (0, 0), run))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_num_logits", [4, 4, 8]),
        ("cu_num_logits", [0, 1, 5]),
        ("query_start_loc", [0, 7, 5, 11]),
        ("query_start_loc", [-1, 5, 7, 11]),
        ("query_start_loc", [0, 5, 7, 900]),
    ],
)
def test_batches_of_shadow_pages_on_the_cpu(name, value):
    Calls(CPU).refuses(STAGE, about(name), **{name: int32(value)})


@pytest.mark.parametrize("op", PAGED)
@pytest.mark.parametrize("seats", [[0, 1, 4], [-1, 0, 1], [2, 1, 2]])
def test_seats_on_the_cpu(op, seats):
    """Of which there are four, and no two requests have the same."""
    Calls(CPU).refuses(op, about("seats"), seats=torch.tensor(seats))


def test_sizes_of_shadow_pages_that_do_not_agree(device):
    calls = Calls(device)
    saved = calls.arguments[STAGE]["saved"][:2]
    calls.refuses(STAGE, about("saved|cu_num_logits"), saved=saved)
    calls.refuses(UNSTAGE, about("saved|num_reqs"), saved=saved)
    fewer = {"sampled_token_ids": None, "num_rejected": int32([1, 0], device)}
    calls.refuses(COMMIT, about("num_rejected"), **fewer)
    if device.type == "cpu":
        # None of a row that might be used lies behind the cache; the last one fits.
        for first in (PAGES.num_entries, (1 << 31) - 1):
            calls.refuses(STAGE, about("first_entry|table"), first_entry=first)


def test_padding_is_no_error(device):
    calls = Calls(device)
    mapping = calls.arguments[LOG]["slot_mapping"]
    mapping[calls.arguments[LOG]["logits_indices"][1].item()] = PAD
    calls.call(LOG)
    assert calls.undo.slots[:3].tolist() == [PAD, 4, 20]


class TestOnCuda:
    pytestmark = ON_CUDA

    @pytest.mark.parametrize("op", TABLES)
    def test_packed_layouts_are_refused(self, op):
        runs = torch.zeros(16, 1, 2, dtype=torch.int32, device="cuda")
        calls = Calls(torch.device("cuda"))
        calls.refuses_exactly(op, "runs is given; must be None on CUDA", runs=runs)

    @pytest.mark.parametrize("name", ["slot_mapping", "undo_log", "log_windows"])
    def test_a_tensor_left_on_the_host_is_refused(self, name):
        calls = Calls(torch.device("cuda"))
        on_host = {name: calls.arguments[LOG][name].cpu()}
        said = f"{name} is on cpu; must be on cuda:0, where table is"
        calls.refuses_exactly(LOG, said, **on_host)

    def test_counters_go_to_pinned_memory_only(self):
        calls = Calls(torch.device("cuda"))
        calls.refuses_exactly(
            RESTORE,
            "counters_to is memory that the device does not see at its address; must "
            "be pinned",
            counters_to=torch.zeros(NUM_COUNTERS, dtype=torch.int64),
        )
        calls.refuses_exactly(
            RESTORE,
            "counters_to is on cuda:0; must be on cpu",
            counters_to=torch.zeros(NUM_COUNTERS, dtype=torch.int64, device="cuda"),
        )
        calls.call(LOG)
        calls.call(RESTORE)
        torch.cuda.synchronize()

    @pytest.mark.sanitizer
    def test_what_only_the_device_knows_is_left_alone_and_counted(self):
        calls = Calls(torch.device("cuda"))
        log, restore = calls.arguments[LOG], calls.arguments[RESTORE]
        mapping, indices = log["slot_mapping"], log["logits_indices"]
        mapping[indices[1].item()] = 48
        mapping[indices[2].item()] = -7
        indices[4] = 999
        before = [layer.memory.clone() for layer in calls.layers]
        calls.call(LOG)
        assert calls.undo.slots[:3].tolist() == [ops.INVALID_SLOT] * 3
        calls.call(RESTORE, log_slots=calls.undo.slots)
        assert restore["counters"].tolist() == [2, 3, 1, 2, 0, 3, 0, 0]
        for old, layer in zip(before, calls.layers, strict=True):
            assert torch.equal(old, layer.memory)

    @pytest.mark.sanitizer
    def test_a_request_without_acceptance_keeps_its_bytes(self):
        calls = Calls(torch.device("cuda"))
        before = [layer.memory.clone() for layer in calls.layers]
        calls.call(RESTORE, sampled_token_ids=int32([[1, 2, 3]], "cuda"))
        counters = calls.arguments[RESTORE]["counters"]
        assert counters.tolist() == [1, 2, 2, 0, 0, 1, 0, 0]
        for old, layer in zip(before, calls.layers, strict=True):
            assert torch.equal(old, layer.memory)
