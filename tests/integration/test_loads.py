# SPDX-License-Identifier: Apache-2.0
"""The audit of what KV connectors load, on the CPU: vLLM's ExampleConnector, whose
store is a folder, with a file for each text and layer.

The first requests of a test store their texts; the cache is reset, and the same texts
are loaded. Faults are put into the files, or into the connector.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)

from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.integration.test_audit import found
from tests.integration.test_byte_oracle import EVERYTHING, prompt

NUM_BLOCKS = 3
LENGTH = NUM_BLOCKS * BLOCK_SIZE + 5
NUM_LAYERS = 4

seeds = itertools.count(1000)


def folder(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    } | more


class World:
    """An engine with a connector, and what its store has."""

    def __init__(self, path: Path, store: str = "own", **more: Any) -> None:
        self.path = path
        self.engine = Engine(
            "off",
            EVERYTHING | {"AUDIT_STORE": store},
            kv_transfer_config=folder(path, **more),
            enable_prefix_caching=True,
            speculative_config=None,
            max_num_batched_tokens=512,
        )
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def ask(self, *texts: int) -> dict[str, int]:
        """Asks for each text, with nothing in the cache of the engine. Returns the rise
        of the audit's counts."""
        before = self.totals()
        self.engine.llm.reset_prefix_cache()
        asked = {f"text{n}": n for n in texts}
        result = self.engine.run(
            [Request(name, prompt(n, LENGTH), 4) for name, n in asked.items()]
        )
        self.tokens = {n: result.tokens[name] for name, n in asked.items()}
        self.finish = {n: result.finish[name] for name, n in asked.items()}
        after = self.totals()
        rise = {name: after.get(name, 0) - before.get(name, 0) for name in after}
        return {name: n for name, n in rise.items() if n and name != "steps"}

    def totals(self) -> dict[str, int]:
        return dict(self.engine.audit.findings.totals())

    def store(self, number: int) -> list[int]:
        """Stores so many new texts."""
        texts = [next(seeds) for _ in range(number)]
        assert self.ask(*texts) == {}
        self.answers = self.tokens
        return texts

    def folders(self) -> list[Path]:
        return sorted(self.path.iterdir(), key=lambda path: path.stat().st_ctime_ns)

    def found(self) -> list[Any]:
        findings = found(self.engine)
        self.engine.audit.findings.last.clear()
        return findings


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Nobody else fills the store."""
    return World(tmp_path_factory.mktemp("store"))


@pytest.fixture
def world(own: World) -> Iterator[World]:
    for path in own.folders():
        shutil.rmtree(path)
    own.found()
    yield own
    own.engine.take_findings()


SLOTS = NUM_BLOCKS * BLOCK_SIZE


def test_what_was_stored_is_verified(world: World) -> None:
    texts = world.store(2)
    for _ in range(2):
        assert world.ask(*texts) == {"verified": 2 * SLOTS}
        assert world.tokens == world.answers
    assert world.found() == []
