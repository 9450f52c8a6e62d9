# SPDX-License-Identifier: Apache-2.0
"""Which steps PreparedLaunches and PreparedPages send through the ops.

The builtins are stand-ins here, and the tensors are on the CPU, whose ops refuse what
those of CUDA refuse; tests/kernels has the real ones.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm_nwor import ops, prepared
from vllm_nwor.device_memory import DeviceMemory
from vllm_nwor.kv_layout import row_layout
from vllm_nwor.launches import GroupLog, Launch, LayerCache
from vllm_nwor.window import NumRejected, SampledIds, VerificationWindows


@pytest.fixture
def calls(monkeypatch):
    """The builtins that made launches, with their arguments behind the handle."""
    calls = []
    constants = []

    def pages_new(columns, num_launches, device):
        constants[:] = columns
        return 1

    library = SimpleNamespace(
        nwor_prepared_load=lambda device: None,
        nwor_prepared_new=lambda *arguments: 1,
        nwor_prepared_pages_new=pages_new,
        nwor_prepared_free=lambda handle: None,
    )
    ops.load("cpu")
    monkeypatch.setattr(ops, "load", lambda device: None)
    monkeypatch.setattr(prepared, "_loaded_library", lambda: library)

    def builtin(_, name):
        def call(handle, *arguments):
            if name == "nwor_prepared_stage":
                # prepared.h has the order of both.
                num_reqs, _, *places = arguments[3:]
                if num_reqs > constants[11] or places != [
                    constants[column] for column in (9, 10, 8, 2)
                ]:
                    return False
            calls.append((name, *arguments))
            return True

        return call

    monkeypatch.setattr(prepared, "_builtin", builtin)
    return calls


@pytest.fixture
def launches(calls):
    """PreparedLaunches of one layer."""
    cpu = torch.device("cpu")
    cache = torch.zeros(4, 2, 16, 8, dtype=torch.uint8)
    layer = LayerCache("layer", cache, row_layout(cache))
    group = GroupLog(0, [layer], 8, DeviceMemory(cpu, None))
    launch = Launch(group, group.tables[0], torch.zeros(8, dtype=torch.int64))
    return prepared.PreparedLaunches(torch.device("cuda", 0), [launch])


SLOTS = [torch.tensor([1, 2, 3, 4])]
OTHER_SLOTS = [torch.tensor([5, 6, 7, 8])]


def every_second(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def windows(**changes):
    """Two requests of one draft each."""
    cu_num_logits = torch.tensor([2, 4], dtype=torch.int32)
    made = VerificationWindows(2, torch.arange(4).int(), cu_num_logits, SLOTS)
    return made._replace(**changes)


def sampled(change=torch.Tensor.int):
    return SampledIds(change(torch.tensor([[7, -1], [7, 7]])), 100)


def num_rejected(change=torch.Tensor.int):
    return NumRejected(change(torch.tensor([1, 0])))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("accept", [sampled, num_rejected])
def test_a_step_as_expected_goes_past_the_ops(
    launches, calls, index_dtype, zeros, accept
):
    """All but the first one, and those whose slots lie elsewhere than before."""
    rows = torch.arange(4, dtype=index_dtype)
    logits = torch.tensor([0] * zeros + [2, 4], dtype=torch.int32)
    accepted = accept()
    for slots in (SLOTS, SLOTS, OTHER_SLOTS, OTHER_SLOTS):
        launches.log(VerificationWindows(2, rows, logits, slots, zeros))
        launches.restore(accepted, 2, None)

    log, restore = "nwor_prepared_log", "nwor_prepared_restore"
    assert [name for name, *_ in calls] == [log, restore, restore, log, restore]
    is_int64 = index_dtype is torch.int64
    logits_at = logits.data_ptr() + 4 * zeros
    for number, slots in ((0, SLOTS), (3, OTHER_SLOTS)):
        columns = (rows.data_ptr(), is_int64, 4, logits_at, 2, slots[0].data_ptr(), 4)
        assert calls[number] == (log, 2, *columns)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits_indices", torch.Tensor.float, "has dtype Float"),
        ("logits_indices", torch.Tensor.double, "has dtype Double"),
        ("logits_indices", torch.Tensor.short, "has dtype Short"),
        ("logits_indices", every_second, "has shape .* not contiguous"),
        ("logits_indices", lambda t: t[:3], "has only 3 rows"),
        ("cu_num_logits", torch.Tensor.float, "has dtype Float"),
        ("cu_num_logits", torch.Tensor.long, "has dtype Long"),
        ("cu_num_logits", every_second, "has shape .* not contiguous"),
        ("slot_mappings", lambda s: [s[0].int()], "slot_mapping has dtype Int"),
        ("slot_mappings", lambda s: torch.stack(s).int(), "slot_mapping has dtype Int"),
    ],
)
def test_what_a_step_can_get_wrong_is_refused(launches, calls, name, change, message):
    launches.log(windows())
    wrong = {name: change(getattr(windows(), name))}

    with pytest.raises(RuntimeError, match=message):
        launches.log(windows(**wrong))

    assert calls == []


@pytest.mark.parametrize(
    ("accept", "change", "message"),
    [
        (sampled, torch.Tensor.float, "sampled_token_ids has dtype Float"),
        (sampled, torch.Tensor.long, "sampled_token_ids has dtype Long"),
        (sampled, lambda t: t[:1].int(), "the last row of sampled_token_ids"),
        (num_rejected, torch.Tensor.float, "num_rejected has dtype Float"),
        (num_rejected, torch.Tensor.long, "num_rejected has dtype Long"),
        (num_rejected, lambda t: t[:1].int(), "the last row of num_rejected"),
        (num_rejected, lambda t: every_second(t.int()), "num_rejected .* contiguous"),
    ],
)
def test_an_acceptance_of_another_kind_is_refused(
    launches, calls, accept, change, message
):
    launches.log(windows())
    launches.restore(accept(), 2, None)

    with pytest.raises(RuntimeError, match=message):
        launches.restore(accept(change), 2, None)

    assert calls == []


class Pages:
    """PreparedPages of one group, its buffers for three requests, and how often the ops
    were called."""

    def __init__(self):
        self.num_ops = 0
        self.tables = torch.zeros(3, 4, dtype=torch.int32)
        self.slots = torch.zeros(16, dtype=torch.int64)
        self.starts = torch.zeros(4, dtype=torch.int32)
        self.lens = torch.zeros(3, dtype=torch.int32)
        group = SimpleNamespace(
            group_id=0,
            tables=[SimpleNamespace(table=torch.zeros(2, 9).long(), runs=None)],
            num_seats=4,
            entry_tokens=4,
            first_entry=10,
            num_real_entries=10,
            span=2,
            saved=torch.zeros(4, 15, dtype=torch.int32),
        )
        counters = [torch.zeros(8, dtype=torch.int64)]
        self.pages = prepared.PreparedPages(torch.device("cuda", 0), [group], counters)
        self.pages.ops = SimpleNamespace(stage=self.op, commit_draft_layer=self.op)

    def op(self, *arguments):
        self.num_ops += 1

    def step(self, num_reqs=2, rejected=torch.int32, **changes):
        cu_num_logits = torch.arange(num_reqs + 1, dtype=torch.int32)
        windows = VerificationWindows(
            *(num_reqs, torch.empty(0), cu_num_logits, [self.slots[:8]], 1),
            *([self.tables[:num_reqs]], self.starts[: num_reqs + 1]),
            *(self.lens[:num_reqs], torch.arange(num_reqs, dtype=torch.int32)),
        )
        self.pages.stage(windows._replace(**changes))
        self.pages.commit(NumRejected(torch.zeros(num_reqs).to(rejected)))


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_reqs": 3}, {"num_reqs": 1}, {"seats": torch.arange(2)}, {"seats": None}],
)
def test_a_staged_step_as_expected_goes_past_the_ops(calls, changes):
    pages = Pages()
    pages.step()
    assert pages.num_ops == 2

    pages.step(**changes)

    assert pages.num_ops == 2
    stage, commit = calls
    assert stage[0] == "nwor_prepared_stage"
    assert stage[4:6] == (changes.get("num_reqs", 2), pages.pages.step)
    assert stage[3] is ("seats" in changes and changes["seats"] is not None)
    assert commit[0] == "nwor_prepared_commit"
    assert not pages.pages.is_open


@pytest.mark.parametrize(
    "changes",
    [
        {"num_reqs": 4},  # beyond the buffers
        {"seq_lens": torch.zeros(2, dtype=torch.int32)},
        {"query_start_loc": torch.zeros(3, dtype=torch.int32)},
        {"block_tables": [torch.zeros(2, 4, dtype=torch.int32)]},
        {"slot_mappings": [torch.zeros(8, dtype=torch.int64)]},
        {"cu_num_logits": torch.arange(3)},
        {"cu_num_logits": every_second(torch.arange(3, dtype=torch.int32))},
        {"seats": torch.arange(2.0)},
        {"seats": torch.arange(3)},
        {"seats": every_second(torch.arange(2))},
    ],
)
def test_a_staged_step_that_is_not_goes_through_the_ops(calls, changes):
    pages = Pages()
    pages.step()

    pages.step(**changes)

    assert pages.num_ops == 4
    assert calls == []


def test_an_acceptance_of_another_dtype_is_checked_by_the_op(calls):
    pages = Pages()
    pages.step()

    pages.step(rejected=torch.int64)

    assert pages.num_ops == 3
    assert [name for name, *_ in calls] == ["nwor_prepared_stage"]
