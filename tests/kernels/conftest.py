# SPDX-License-Identifier: Apache-2.0
"""Devices for the kernel tests. Builds nothing: without the library every test fails,
and so does every CUDA test where there is a GPU and the library has no CUDA code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from vllm_nwor import ops

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# The cores are shared: a slow example is no failure. No database: an example that fails
# becomes a named test.
settings.register_profile(
    "kernels",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
settings.load_profile("kernels")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "planted: breaks a bound on purpose; run by the sanitizer only"
    )


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """[cpu] and, where there is a GPU, [cuda]; the ops are loaded for it."""
    ops.load(request.param)
    return torch.device(request.param)
