# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: engines run in process, offline, and NWOR starts off; those
of a file end with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.helpers import environment

environment.prepare()


@pytest.fixture(autouse=True, scope="module")
def engines_end() -> Iterator[None]:
    yield
    if engine := sys.modules.get("tests.helpers.engine"):
        engine.forget_engines()
