# SPDX-License-Identifier: Apache-2.0
"""Bounds broken on purpose: shows that a sanitizer run would notice. It passes only in
the sense that the sanitizer must report an error; without one it says nothing.

On CUDA run it as
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 NWOR_PLANTED=1 compute-sanitizer \
        --error-exitcode 9 python -m pytest tests/kernels/test_planted.py
and expect exit status 9. Caching must be off: within its larger blocks an overrun hits
memory that is allocated.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.test_transaction import nhd
from tests.kernels.transaction import LOG, Step, drafts_in
from vllm_nwor import ops


@pytest.mark.planted
@pytest.mark.skipif(
    os.environ.get("NWOR_PLANTED") != "1", reason="NWOR_PLANTED=1 is not set"
)
def test_a_table_that_lies_about_its_blocks(device):
    step = Step(device, [[nhd(num_blocks=1)]], capacity=1)
    step.load(drafts_in([16 * 4096 - 1], accepted=[0]))
    # The table says 4096 blocks; the allocation has one.
    step.tables[0][0, ops.TABLE_COLUMNS.index("num_blocks")] = 4096
    ops.log_cache_slots(**step.arguments(LOG))
    if device.type == "cuda":
        torch.cuda.synchronize()
