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
from vllm_nwor import ops

TABLE = {name: column for column, name in enumerate(ops.TABLE_COLUMNS)}


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def every_second(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


class Step:
    """Good arguments of both ops, for 2 layers and 3 drafts, by name."""

    def __init__(self, device, layout=None):
        layout = layout or nhd()
        self.layers = [Layer(layout, device, seed) for seed in range(2)]
        self.tables = make_table(self.layers, device)
        batch = Batch(slots=((3, 4), (20,)), accepted=(1, 0))
        self.undo = Log.poisoned(5, row_bytes_of(self.tables), device)
        mapping, indices, cumulative = batch.metadata(device, torch.int32, 0)
        self.log = {
            "table": self.tables.table,
            "runs": self.tables.runs,
            "slot_mapping": mapping,
            "logits_indices": indices,
            "cu_num_logits": cumulative,
            "undo_log": self.undo.undo_log,
            "log_slots": self.undo.slots,
            "log_windows": self.undo.windows,
            "num_drafts": 3,
        }
        self.restore = {
            "table": self.tables.table,
            "runs": self.tables.runs,
            "undo_log": self.undo.undo_log,
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

    def snapshot(self):
        tensors = [layer.memory for layer in self.layers]
        tensors += [self.undo.memory, self.undo.slots, self.undo.windows]
        tensors += [self.restore["counters"], self.restore["counters_to"]]
        return [tensor.cpu().clone() for tensor in tensors]

    def refuses(self, op, message, **changes):
        """With `changes`, the call must say `message` and write nothing."""
        arguments = {**getattr(self, op), **changes}
        function = ops.log_cache_slots if op == "log" else ops.restore_rejected_drafts
        before = self.snapshot()
        name = function.__name__
        with pytest.raises(RuntimeError, match="^" + re.escape(f"{name}: {message}")):
            function(**arguments)
        for old, new in zip(before, self.snapshot(), strict=True):
            assert torch.equal(old, new)


def test_the_good_arguments_are_good(device):
    step = Step(device)
    ops.log_cache_slots(**step.log)
    ops.restore_rejected_drafts(**step.restore)
    assert step.restore["counters"].tolist() == [2, 3, 1, 2, 2 * 2 * 256, 0, 0, 0]


# Of each op: an argument, what becomes of it, what is said of it.
SHAPES = {
    "log": [
        ("table", lambda t: t.int(), "has dtype Int; must be Long"),
        ("table", lambda t: t[0], "has shape [9]; must have 2 dimensions"),
        ("table", lambda t: t[:, :8].contiguous(), "has shape [2, 8]; dimension 1"),
        ("table", lambda t: t[:0], "has shape [0, 9]; must have a row for each layer"),
        ("slot_mapping", lambda t: t.int(), "has dtype Int; must be Long"),
        ("logits_indices", lambda t: t.float(), "has dtype Float; must be Int or Long"),
        ("cu_num_logits", lambda t: t.long(), "has dtype Long; must be Int"),
        ("undo_log", lambda t: t.view(torch.int8), "has dtype Char; must be Byte"),
        (
            "undo_log",
            lambda t: t.as_strided((5, 256), (512, 2)),
            "has stride 2 in dimension",
        ),
        ("undo_log", lambda t: t.as_strided((5, 512), (16, 1)), "has stride 16 in dim"),
        ("log_slots", lambda t: t[:4], "has shape [4]; dimension 0 must be 5, the cap"),
        ("num_drafts", lambda n: -1, "is -1; must be between 0 and 5"),
        ("num_drafts", lambda n: 6, "is 6; must be between 0 and 5, the capacity of"),
    ],
    "restore": [
        ("table", lambda t: t.t().contiguous().t(), "has shape [2, 9] and is not"),
        (
            "log_windows",
            lambda t: t[:, :2].contiguous(),
            "has shape [5, 2]; dimension 1",
        ),
        ("num_drafts", lambda n: 6, "is 6; must be between 0 and 5"),
        ("counters", lambda t: t[:5], "has shape [5]; dimension 0 must be 8, its"),
        ("sampled_token_ids", lambda t: t.long(), "has dtype Long; must be Int"),
        ("sampled_token_ids", lambda t: t[:, :0], "has shape [2, 0]; must have a"),
        ("sampled_token_ids", lambda t: None, "and num_rejected given; must be"),
        ("num_rejected", lambda t: int32([1, 1]), "given; must be exactly one"),
        ("counters_to", lambda t: t.int(), "has dtype Int; must be Long"),
        ("counters_to", lambda t: t[:5], "has shape [5]; must be [8], contiguous"),
        (
            "counters_to",
            lambda t: every_second(t),
            "has shape [8]; must be [8], contig",
        ),
        ("vocab_size", lambda n: 0, "is 0; must be at least 1"),
    ],
}
# These two are named together.
TOGETHER = {
    "sampled_token_ids": "neither of sampled_token_ids",
    "num_rejected": "both of sampled_token_ids and num_rejected",
}


@pytest.mark.parametrize(
    ("op", "name", "change", "said"),
    [(op, *case) for op, cases in SHAPES.items() for case in cases],
)
def test_shapes_and_dtypes(device, op, name, change, said):
    step = Step(device)
    about = TOGETHER.get(name, name) if "given" in said else name
    changed = {name: change(getattr(step, op)[name])}
    step.refuses(op, f"{about} {said}", **changed)


ROWS = [
    ("base", 0, "base is 0; must be the address of the layer's cache"),
    ("block_size", 0, "block_size is 0; must be at least 1"),
    ("num_blocks", -3, "num_blocks is -3; must be at least 1"),
    ("num_blocks", 2, "has 32 slots; must have 48, as many as row 0"),
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


@pytest.mark.parametrize("op", ["log", "restore"])
@pytest.mark.parametrize(("column", "value", "message"), ROWS)
def test_table_rows_on_the_cpu(op, column, value, message):
    step = Step(torch.device("cpu"))
    table = step.tables.table.clone()
    table[1, TABLE[column]] = value
    step.refuses(op, f"table row 1: {message}", table=table)


def test_windows_on_the_cpu():
    step = Step(torch.device("cpu"))
    step.refuses(
        "log",
        "cu_num_logits[1] is 3; must be more than 3, each request has at least one",
        cu_num_logits=int32([3, 3]),
    )
    step.refuses(
        "log",
        "cu_num_logits ends at 6; logits_indices has only 5 rows",
        cu_num_logits=int32([3, 6]),
    )
    step.refuses(
        "log",
        "num_drafts is 2; must be at least 3, the drafts in cu_num_logits",
        num_drafts=2,
    )
    indices = step.log["logits_indices"].clone()
    indices[1] = 999
    num_tokens = step.log["slot_mapping"].numel()
    step.refuses(
        "log",
        f"logits_indices[1] is 999; must be between 0 and {num_tokens - 1}, the last",
        logits_indices=indices,
    )
    for slot in (-2, 48):
        mapping = step.log["slot_mapping"].clone()
        mapping[step.log["logits_indices"][4].item()] = slot
        step.refuses(
            "log",
            f"slot of draft 2 is {slot}; must be -1 (padding) or between 0 and 47",
            slot_mapping=mapping,
        )


def test_logged_windows_on_the_cpu():
    step = Step(torch.device("cpu"))
    windows = step.restore["log_windows"].clone()
    windows[2, 0] = 2
    step.refuses(
        "restore",
        "log_windows[2] has request 2; must be -1 (not a draft) or between 0 and 1, "
        "the last row of sampled_token_ids",
        log_windows=windows,
    )
    step.refuses(
        "restore",
        "log_windows[2] has request 1; must be -1 (not a draft) or between 0 and 0, "
        "the last row of num_rejected",
        sampled_token_ids=None,
        num_rejected=int32([0]),
    )
    windows = step.restore["log_windows"].clone()
    windows[1, 1] = 2
    step.refuses(
        "restore",
        "log_windows[1] has position 2; must be between 0 and 1, the last draft of",
        log_windows=windows,
    )
    slots = step.restore["log_slots"].clone()
    slots[0] = 48
    step.refuses(
        "restore",
        "slot of draft 0 is 48; must be -1 (padding) or between 0 and 47",
        log_slots=slots,
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
    step = Step(torch.device("cpu"), column_major())
    runs = step.tables.runs.clone()
    runs[place] = int32(run)
    if "90 bytes" in message:
        step.log["undo_log"] = step.undo.undo_log[:, :64]
    step.refuses("log", message, runs=runs)


def test_runs_of_another_block_size():
    step = Step(torch.device("cpu"), column_major())
    step.refuses(
        "log",
        "table row 0: block_size is 16; must be 15, as in runs",
        runs=step.tables.runs[:15],
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    def test_packed_layouts_are_refused(self):
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        runs = torch.zeros(16, 1, 2, dtype=torch.int32, device="cuda")
        for op in ("log", "restore"):
            step.refuses(op, "runs is given; must be None on CUDA", runs=runs)

    @pytest.mark.parametrize("name", ["slot_mapping", "undo_log", "log_windows"])
    def test_a_tensor_left_on_the_host_is_refused(self, name):
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        step.refuses(
            "log",
            f"{name} is on cpu; must be on cuda:0, where table is",
            **{name: step.log[name].cpu()},
        )

    def test_counters_go_to_pinned_memory_only(self):
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        step.refuses(
            "restore",
            "counters_to is memory that the device does not see at its address; must "
            "be pinned",
            counters_to=torch.zeros(NUM_COUNTERS, dtype=torch.int64),
        )
        step.refuses(
            "restore",
            "counters_to is on cuda:0; must be on cpu",
            counters_to=torch.zeros(NUM_COUNTERS, dtype=torch.int64, device="cuda"),
        )
        ops.log_cache_slots(**step.log)
        ops.restore_rejected_drafts(**step.restore)
        torch.cuda.synchronize()

    @pytest.mark.sanitizer
    def test_what_only_the_device_knows_is_left_alone_and_counted(self):
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        mapping, indices = step.log["slot_mapping"], step.log["logits_indices"]
        mapping[indices[1].item()] = 48
        mapping[indices[2].item()] = -7
        indices[4] = 999
        before = step.snapshot()
        ops.log_cache_slots(**step.log)
        assert step.undo.slots[:3].tolist() == [ops.INVALID_SLOT] * 3
        step.restore["log_slots"] = step.undo.slots
        ops.restore_rejected_drafts(**step.restore)
        assert step.restore["counters"].tolist() == [2, 3, 1, 2, 0, 3, 0, 0]
        after = step.snapshot()
        for old, new in zip(before[:3], after[:3], strict=True):
            assert torch.equal(old, new)

    @pytest.mark.sanitizer
    def test_a_request_without_acceptance_keeps_its_bytes(self):
        ops.load("cuda")
        step = Step(torch.device("cuda"))
        before = step.snapshot()
        step.restore["sampled_token_ids"] = int32([[1, 2, 3]], "cuda")
        ops.restore_rejected_drafts(**step.restore)
        assert step.restore["counters"].tolist() == [1, 2, 2, 0, 0, 1, 0, 0]
        for old, new in zip(before[:3], step.snapshot()[:3], strict=True):
            assert torch.equal(old, new)


def test_padding_is_no_error(device):
    step = Step(device)
    mapping = step.log["slot_mapping"]
    mapping[step.log["logits_indices"][1].item()] = PAD
    ops.log_cache_slots(**step.log)
    assert step.undo.slots[:3].tolist() == [PAD, 4, 20]


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


class ShadowCalls:
    """Good arguments of the ops of shadow pages, by name; the batch is staged."""

    def __init__(self, device, layout=nhd):
        ops.load(device.type)
        self.side = side = ShadowSide(PAGES, [[layout_for(PAGES, layout)] * 2], device)
        side.load(EXAMPLE)
        stage = side.stage_arguments(side.tables[0], True)
        self.stage = dict(zip(STAGE_NAMES, stage, strict=True))
        ops.stage(**self.stage)
        tokens = int32([[1, 2, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1]], device)
        commit = side.commit_arguments(0, (tokens, 10, None), True)
        self.commit_draft_layer = dict(zip(COMMIT_NAMES, commit, strict=True))
        self.unstage = {name: self.commit_draft_layer[name] for name in UNSTAGE_NAMES}

    def snapshot(self):
        side = self.side
        tensors = [layer.memory for layer in side.layers]
        tensors += [side.table_memory, side.slot_memory, side.saved_memory]
        tensors += [side.counters, side.published]
        return [tensor.cpu().clone() for tensor in tensors]

    def refuses(self, op, names, **changes):
        """With `changes`, the call names the op and one of `names`, and writes
        nothing."""
        if op == "stage":
            ops.unstage(**self.unstage)
        before = self.snapshot()
        message = rf"^{op}: .*\b({names})\b.* (must|has only)\b"
        with pytest.raises(RuntimeError, match=message):
            getattr(ops, op)(**{**getattr(self, op), **changes})
        for old, new in zip(before, self.snapshot(), strict=True):
            assert torch.equal(old, new)


def test_the_good_arguments_of_shadow_pages_are_good(device):
    calls = ShadowCalls(device)
    ops.unstage(**calls.unstage)
    ops.stage(**calls.stage)
    ops.commit_draft_layer(**calls.commit_draft_layer)
    row_bytes = calls.side.tables[0].slot_bytes
    assert calls.side.counters[0].tolist() == [
        *(2, 6, 1, 5, 0, 0),
        *(row_bytes, 3 * row_bytes),
    ]


BOTH = STAGE, COMMIT = ("stage", "commit_draft_layer")
ALL = (*BOTH, "unstage")
SHADOW_SHAPES = [
    (BOTH, "table", lambda t: t.int()),
    (BOTH, "table", lambda t: t[:, :8].contiguous()),
    (BOTH, "table", lambda t: t[:0]),
    (ALL, "block_table", lambda t: t.long()),
    (ALL, "block_table", lambda t: t[0]),
    (ALL, "block_table", lambda t: every_second(t)),
    (ALL, "block_table", lambda t: t[:2]),
    (ALL, "slot_mapping", lambda t: t.int()),
    (ALL, "slot_mapping", lambda t: t[None]),
    (ALL, "slot_mapping", lambda t: every_second(t)),
    (ALL, "saved", lambda t: t.long()),
    (ALL, "saved", lambda t: every_second(t)),
    (ALL, "saved", lambda t: t.flatten()),
    (ALL, "saved", lambda t: t[:, :14].contiguous()),
    (ALL, "seats", lambda t: t.float()),
    (ALL, "seats", lambda t: t[:2]),
    (ALL, "seats", lambda t: t[None]),
    (ALL, "seats", lambda t: every_second(t)),
    (ALL, "entry_tokens", lambda n: 0),
    (STAGE, "query_start_loc", lambda t: t.long()),
    (STAGE, "query_start_loc", lambda t: t[:3]),
    (STAGE, "query_start_loc", lambda t: every_second(t)),
    (STAGE, "seq_lens", lambda t: t.long()),
    (STAGE, "seq_lens", lambda t: t[:2]),
    (STAGE, "seq_lens", lambda t: every_second(t)),
    (STAGE, "cu_num_logits", lambda t: t.long()),
    (STAGE, "cu_num_logits", lambda t: t[None]),
    (STAGE, "cu_num_logits", lambda t: every_second(t)),
    (STAGE, "span", lambda n: 0),
    (STAGE, "step", lambda n: 0),
    (STAGE, "step", lambda n: 1 << 31),
    (STAGE, "first_entry", lambda n: -1),
    # Shadow entries among the real ones.
    (STAGE, "first_entry", lambda n: n - 1),
    (COMMIT, "counters", lambda t: t[:6]),
    (COMMIT, "counters", lambda t: t.int()),
    (COMMIT, "counters_to", lambda t: t[:6]),
    (COMMIT, "counters_to", lambda t: t.int()),
    (COMMIT, "sampled_token_ids", lambda t: t.long()),
    (COMMIT, "sampled_token_ids", lambda t: t[:, :0]),
    (COMMIT, "sampled_token_ids", lambda t: t[:2]),
    (COMMIT, "sampled_token_ids", lambda t: None),
    (COMMIT, "num_rejected", lambda t: int32([1, 0, 1])),
    (COMMIT, "vocab_size", lambda n: 0),
    (ALL[1:], "num_reqs", lambda n: -1),
    (ALL[1:], "num_reqs", lambda n: 5),
]


@pytest.mark.parametrize(
    ("op", "name", "change"),
    [
        (op, name, change)
        for ops_, name, change in SHADOW_SHAPES
        for op in ((ops_,) if isinstance(ops_, str) else ops_)
    ],
)
def test_shapes_and_dtypes_of_shadow_pages(device, op, name, change):
    calls = ShadowCalls(device)
    good = getattr(calls, op)[name]
    if name == "seats":
        good = torch.arange(3, device=device)
    value = change(good)
    if torch.is_tensor(value) and name != "counters_to":
        value = value.to(device)
    calls.refuses(op, name, **{name: value})


def test_more_requests_than_saved_has_rows_for(device):
    calls = ShadowCalls(device)
    calls.refuses("stage", "saved|cu_num_logits", saved=calls.stage["saved"][:2])
    calls.refuses("unstage", "saved|num_reqs", saved=calls.stage["saved"][:2])


def test_num_rejected_of_fewer_requests(device):
    ShadowCalls(device).refuses(
        "commit_draft_layer",
        "num_rejected",
        sampled_token_ids=None,
        num_rejected=int32([1, 0], device),
    )


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
def test_batches_on_the_cpu(name, value):
    calls = ShadowCalls(torch.device("cpu"))
    calls.refuses("stage", name, **{name: int32(value)})


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("seats", [[0, 1, 4], [-1, 0, 1], [2, 1, 2]])
def test_seats_on_the_cpu(op, seats):
    """Of which there are four, and no two requests have the same."""
    calls = ShadowCalls(torch.device("cpu"))
    calls.refuses(op, "seats", seats=torch.tensor(seats))


def test_shadow_entries_beyond_the_cache_on_the_cpu():
    """None of a row that might be used; the last one just fits."""
    calls = ShadowCalls(torch.device("cpu"))
    num_entries = PAGES.num_entries
    for first_entry in (num_entries, (1 << 31) - 1):
        calls.refuses("stage", "first_entry|table", first_entry=first_entry)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("base", 0), ("block_size", 0), ("num_blocks", -3), ("num_blocks", 2)),
        *(("num_heads", 0), ("run_bytes", 0)),
    ],
)
def test_table_rows_of_shadow_pages_on_the_cpu(op, column, value):
    calls = ShadowCalls(torch.device("cpu"))
    table = calls.stage["table"].clone()
    table[1, TABLE[column]] = value
    calls.refuses(op, "table", table=table)


@pytest.mark.parametrize("op", BOTH)
def test_runs_of_shadow_pages_on_the_cpu(op):
    calls = ShadowCalls(torch.device("cpu"), column_major)
    runs = calls.stage["runs"]
    calls.refuses(op, "table|runs", runs=runs[:3].contiguous())
    # Of the slot of a row that is copied both ways.
    for run in ((-2, 2), (0, -2), (1 << 20, 2)):
        broken = runs.clone()
        broken[0, 0] = int32(run)
        calls.refuses(op, "runs", runs=broken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("op", BOTH)
def test_packed_layouts_have_no_shadow_pages_on_cuda(op):
    runs = torch.zeros(4, 1, 2, dtype=torch.int32, device="cuda")
    ShadowCalls(torch.device("cuda")).refuses(op, "runs", runs=runs)
