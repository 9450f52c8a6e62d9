# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: engines run in process, offline, and NWOR starts off; those
of a file end with it."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import pytest

from tests.helpers import environment

environment.prepare()


def pytest_unconfigure() -> None:
    """The first engine ends at exit, and logs; the stream that pytest gave vLLM's
    handler is closed by then."""
    logging.raiseExceptions = False


@pytest.fixture(autouse=True, scope="module")
def engines_end() -> Iterator[None]:
    yield
    if engine := sys.modules.get("tests.helpers.engine"):
        engine.forget_engines()
    for process in multiprocessing.active_children():
        process.join(10)  # or it stays in the process table


@pytest.fixture(scope="module")
def parsed_once() -> Iterator[None]:
    """A file of vLLM that is compared again, with the same text, is parsed once."""
    from vllm_nwor.hooks import source

    with pytest.MonkeyPatch.context() as patch:
        faster = vars(ast) | {"parse": cache(ast.parse)}
        patch.setattr(source, "ast", SimpleNamespace(**faster))
        yield
