# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: engines run in this process, offline, with NWOR off by
default, and end with their file. Without a GPU, tests that need one are deselected and
counted in the summary."""

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

# The key under which pytest-xdist's workers send their number of deselected tests.
NUM_GPU_TESTS = "nwor_gpu_tests"
_deselected: dict[str, int] = {}


def pytest_report_header(config: pytest.Config) -> str | None:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return None
    return "collecting: each process imports torch and vLLM first, 10 to 40 s"


@pytest.hookimpl(trylast=True)  # after -m and -k
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
    """pytest-xdist calls it; all workers collect the same tests."""
    found = getattr(node, "workeroutput", {})
    _deselected.update({k: v for k, v in found.items() if k == NUM_GPU_TESTS})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if num := _deselected.get(NUM_GPU_TESTS):
        terminalreporter.write_line(
            f"GPU tests: {num} deselected, there is no NVIDIA GPU that torch can use; "
            "on a host that has one: make gpu-test"
        )


def pytest_unconfigure() -> None:
    """The first engine logs at exit, when pytest has closed the stream of vLLM's log
    handler."""
    logging.raiseExceptions = False


@pytest.fixture(autouse=True, scope="module")
def engines_end() -> Iterator[None]:
    yield
    if engine := sys.modules.get("tests.helpers.engine"):
        engine.forget_engines()
    for process in multiprocessing.active_children():
        process.join(10)  # or it stays a zombie


@pytest.fixture(scope="module")
def parsed_once() -> Iterator[None]:
    """Caches ast.parse for comparisons with vLLM's source."""
    from vllm_nwor.hooks import source

    with pytest.MonkeyPatch.context() as patch:
        faster = vars(ast) | {"parse": cache(ast.parse)}
        patch.setattr(source, "ast", SimpleNamespace(**faster))
        yield
