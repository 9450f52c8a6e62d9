# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: engines run in process, offline, and NWOR starts off; those
of a file end with it. Where there is no GPU, tests that need one are deselected, and
the summary says how many they are."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import environment

environment.prepare()

# Under pytest-xdist what the processes that run the tests have deselected goes by this
# name to the one that prints.
NUM_GPU_TESTS = "nwor_gpu_tests"
_deselected: dict[str, int] = {}


def pytest_report_header(config: pytest.Config) -> str | None:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return None
    return "collecting: each process imports torch and vLLM first, 10 to 40 s"


@pytest.hookimpl(trylast=True)  # behind -m and -k, whose tests are not counted here
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not of_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in of_gpu]
        config.hook.pytest_deselected(items=of_gpu)
        _deselected[NUM_GPU_TESTS] = len(of_gpu)
        getattr(config, "workeroutput", {}).update(_deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: all processes collect the same."""
    found = getattr(node, "workeroutput", {})
    _deselected.update({k: v for k, v in found.items() if k == NUM_GPU_TESTS})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if num := _deselected.get(NUM_GPU_TESTS):
        terminalreporter.write_line(
            f"GPU tests: {num} deselected, there is no NVIDIA GPU that torch can use; "
            "on a host that has one: make gpu-test"
        )


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
