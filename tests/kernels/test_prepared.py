# SPDX-License-Identifier: Apache-2.0
"""PreparedOps against the ops they stand for: the same bytes, log and counters, step
after step with the same object, and the same refusal of what a step can get wrong."""

import ctypes

import pytest
import torch

from vllm.v1.nwor import ops, prepared

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="prepared launches are CUDA only; no GPU here"
)

LAYERS, BLOCKS, HEADS, SLOTS, DIM = 3, 4, 2, 16, 64
CAPACITY = 8


class World:
    """A cache of three layers with its log, and one step's windows."""

    def __init__(self):
        torch.manual_seed(1)
        shape = (LAYERS, BLOCKS, HEADS, SLOTS, DIM)
        self.cache = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        slot_bytes = HEADS * DIM
        rows = [
            [
                layer.data_ptr(),
                HEADS * SLOTS * DIM,
                DIM,
                SLOTS * DIM,
                HEADS,
                DIM,
                SLOTS,
                BLOCKS,
                index * slot_bytes,
            ]
            for index, layer in enumerate(self.cache)
        ]
        self.table = torch.tensor(rows, device="cuda")
        self.undo_log = torch.full(
            (CAPACITY, LAYERS * slot_bytes), 0xA5, dtype=torch.uint8, device="cuda"
        )
        self.log_slots = torch.full((CAPACITY,), -7, device="cuda")
        self.log_windows = torch.full(
            (CAPACITY, 3), -7, dtype=torch.int32, device="cuda"
        )
        self.counters = torch.zeros(6, dtype=torch.int64, device="cuda")

    def step(self, implementation, slots, counts, acceptance, index_dtype):
        cu = torch.tensor(counts, dtype=torch.int32, device="cuda")
        log = (self.undo_log, self.log_slots, self.log_windows)
        implementation.log_cache_slots(
            self.table,
            None,
            torch.tensor(slots, device="cuda"),
            torch.arange(len(slots), dtype=index_dtype, device="cuda"),
            cu,
            *log,
            counts[-1] - len(counts),
        )
        self.cache.add_(1)
        implementation.restore_rejected_drafts(
            self.table, None, *log, *acceptance, self.counters, counts[-1] - len(counts)
        )

    def state(self):
        return [
            tensor.clone()
            for tensor in (
                self.cache,
                self.undo_log,
                self.log_slots,
                self.log_windows,
                self.counters,
            )
        ]


def sampled(*rows):
    ids = torch.tensor(rows, dtype=torch.int32, device="cuda")
    return (ids, 100, None)


def rejected(*numbers):
    return (None, 0, torch.tensor(numbers, dtype=torch.int32, device="cuda"))


def steps():
    """slots of the rows, cu_num_logits, acceptance, dtype of logits_indices."""
    return [
        ([3, 4, 5, 40, 41], [3, 5], sampled([7, -1, -1], [7, 7, -1]), torch.int32),
        ([9, 10, -1], [3], sampled([7, 7, -1, -1]), torch.int64),
        ([3, 4, 5, 40, 41], [3, 5], rejected(1, 1), torch.int32),
        ([20, 21, 22, 23], [2, 4], sampled([7, 100], [7, 7]), torch.int32),
    ]


def test_prepared_launches_do_what_the_ops_do():
    ops.load("cuda")
    plain, quick = World(), World()
    prepared_ops = prepared.PreparedOps(torch.device("cuda", 0))

    for step in steps():
        plain.step(ops, *step)
        quick.step(prepared_ops, *step)

        for one, other in zip(plain.state(), quick.state(), strict=True):
            assert torch.equal(one, other)
    assert plain.counters.tolist()[:4] == [7, 10, 4, 6]


def test_the_counters_are_published_behind_the_restore():
    world, prepared_ops = World(), prepared.PreparedOps(torch.device("cuda", 0))
    pinned = torch.full((6,), -1, dtype=torch.int64, pin_memory=True)

    world.step(prepared_ops, *steps()[0])
    prepared_ops.publish(pinned, world.counters)
    torch.cuda.synchronize()

    assert torch.equal(pinned, world.counters.cpu())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("slot_mapping", torch.Tensor.int, "slot_mapping is torch.int32"),
        ("slot_mapping", torch.Tensor.cpu, "slot_mapping is torch.int64 on cpu"),
        ("logits_indices", torch.Tensor.float, "logits_indices is torch.float32"),
        ("cu_num_logits", torch.Tensor.long, "cu_num_logits is torch.int64"),
    ],
)
def test_what_a_step_can_get_wrong_is_refused(name, change, message):
    world, prepared_ops = World(), prepared.PreparedOps(torch.device("cuda", 0))
    world.step(prepared_ops, *steps()[0])
    arguments = {
        "slot_mapping": torch.tensor([1, 2], device="cuda"),
        "logits_indices": torch.tensor([0, 1], device="cuda"),
        "cu_num_logits": torch.tensor([2], dtype=torch.int32, device="cuda"),
    }
    arguments[name] = change(arguments[name])

    with pytest.raises(RuntimeError, match=message):
        prepared_ops.log_cache_slots(
            world.table,
            None,
            *arguments.values(),
            world.undo_log,
            world.log_slots,
            world.log_windows,
            1,
        )


def test_a_bad_table_is_refused_by_the_op_at_the_first_call():
    world, prepared_ops = World(), prepared.PreparedOps(torch.device("cuda", 0))
    world.table = world.table[:, :8].contiguous()

    with pytest.raises(RuntimeError, match="table has shape"):
        world.step(prepared_ops, *steps()[0])


def test_structs_of_another_size_are_refused(monkeypatch):
    class Longer(prepared._LogArgs):
        _fields_ = [("more", ctypes.c_int64)]

    monkeypatch.setattr(prepared, "_LogArgs", Longer)

    with pytest.raises(ops.NworOpsUnavailable, match="build it again"):
        prepared.PreparedOps(torch.device("cuda", 0))
