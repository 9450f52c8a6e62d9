# SPDX-License-Identifier: Apache-2.0
"""Marks this folder's tests `gpu`, so that they are deselected without a GPU
(tests/conftest.py); the fixtures that start engines."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.pool import OFF, ON, Pool, Runs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """NWOR_GPU_TEST_DIR names the folder that keeps the processes' logs."""
    folder = os.environ.get("NWOR_GPU_TEST_DIR") or tmp_path_factory.mktemp("engines")
    return Pool(Path(folder))


@pytest.fixture
def off(runs: Runs, engine: str) -> dict[str, Any]:
    """The report of the engine's process with NWOR off."""
    return runs[engine][OFF].whole()


@pytest.fixture
def on(runs: Runs, engine: str) -> dict[str, Any]:
    return runs[engine][ON].whole()
