# SPDX-License-Identifier: Apache-2.0
"""Skips this folder as a whole where there is no GPU; starts the engines' processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.gpu.pool import Pool

HERE = Path(__file__).parent
FOLDER_VARIABLE = "NWOR_GPU_TEST_DIR"
REASON = "needs an NVIDIA GPU that torch can use (make gpu-test)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason=REASON))
        elif "two_ranks" in item.name and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Engines' processes; NWOR_GPU_TEST_DIR keeps their logs in a folder of choice."""
    folder = os.environ.get(FOLDER_VARIABLE) or tempfile.mkdtemp(prefix="nwor-gpu-")
    return Pool(Path(folder))
