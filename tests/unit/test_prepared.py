# SPDX-License-Identifier: Apache-2.0
"""Which steps PreparedLaunches sends through the ops, by the dtypes of their tensors.

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
def launches(monkeypatch):
    """PreparedLaunches of one layer, and `calls`: the builtins that were called."""
    calls = []
    library = SimpleNamespace(
        nwor_prepared_load=lambda device: None,
        nwor_prepared_new=lambda *arguments: 1,
        nwor_prepared_free=lambda handle: None,
    )
    ops.load("cpu")
    monkeypatch.setattr(ops, "load", lambda device: None)
    monkeypatch.setattr(prepared, "_loaded_library", lambda: library)
    monkeypatch.setattr(
        prepared, "_builtin", lambda _, name: lambda *arguments: calls.append(name)
    )
    cpu = torch.device("cpu")
    cache = torch.zeros(4, 2, 16, 8, dtype=torch.uint8)
    layer = LayerCache("layer", cache, row_layout(cache))
    group = GroupLog(0, [layer], 8, DeviceMemory(cpu, None))
    launch = Launch(group, group.tables[0], torch.zeros(8, dtype=torch.int64))
    made = prepared.PreparedLaunches(torch.device("cuda", 0), [launch])
    made.calls = calls
    return made


SLOTS = torch.tensor([1, 2, 3, 4])


def windows(index_dtype=torch.int32, cu_dtype=torch.int32):
    """Two requests of one draft each."""
    return VerificationWindows(
        2,
        torch.arange(4).to(index_dtype),
        torch.tensor([2, 4]).to(cu_dtype),
        [SLOTS],
    )


def sampled(dtype):
    return SampledIds(torch.tensor([[7, -1], [7, 7]]).to(dtype), 100)


def num_rejected(dtype):
    return NumRejected(torch.tensor([1, 0]).to(dtype))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("accept", [sampled, num_rejected])
def test_a_step_as_expected_goes_past_the_ops(launches, index_dtype, accept):
    for _ in range(2):
        launches.log(windows(index_dtype))
        launches.restore(accept(torch.int32), 2, None)

    assert launches.calls == ["nwor_prepared_log", "nwor_prepared_restore"]


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"index_dtype": torch.float32}, "logits_indices has dtype Float"),
        ({"index_dtype": torch.float64}, "logits_indices has dtype Double"),
        ({"cu_dtype": torch.float32}, "cu_num_logits has dtype Float"),
    ],
)
def test_windows_of_another_dtype_and_as_many_bytes_are_refused(
    launches, dtypes, message
):
    launches.log(windows())

    with pytest.raises(RuntimeError, match=message):
        launches.log(windows(**dtypes))

    assert launches.calls == []


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (sampled, "sampled_token_ids has dtype Float"),
        (num_rejected, "num_rejected has dtype Float"),
    ],
)
def test_an_acceptance_of_another_dtype_and_as_many_bytes_is_refused(
    launches, accept, message
):
    launches.log(windows())
    launches.restore(accept(torch.int32), 2, None)

    with pytest.raises(RuntimeError, match=message):
        launches.restore(accept(torch.float32), 2, None)

    assert launches.calls == []
