# SPDX-License-Identifier: Apache-2.0
"""Two real engines on the CPU: one prefills, one decodes, a folder is between them. The
digests of the first one travel with kv_transfer_params, and the second one compares
what it has loaded. Faults are put into the files, and into what travels."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.folder_connector import Pair
from tests.integration.test_audit import found
from tests.integration.test_byte_oracle import EVERYTHING, prompt

NUM_BLOCKS = 3
TAIL = 5
LENGTH = NUM_BLOCKS * BLOCK_SIZE + TAIL
SECRET = "a secret of the tests, long enough"

seeds = itertools.count(3000)


def transfer(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": Pair.__name__,
        "kv_connector_module_path": Pair.__module__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": str(path), **more},
    }


class World:
    """The two engines. params: kv_transfer_params of the prefill instance, as its
    client got them."""

    def __init__(self, path: Path, loads: str = "async", **of_decode: Any) -> None:
        self.path = path
        (path / "secret").write_text(SECRET)
        self.settings = EVERYTHING | {"AUDIT_SECRET": str(path / "secret")}
        self.prefill = self.engine(loads)
        self.decode = self.engine(loads, **of_decode)
        self.params: dict[str, Any] = {}

    def engine(self, loads: str, **more: Any) -> Engine:
        options = {
            "kv_transfer_config": transfer(self.path, loads=loads),
            "enable_prefix_caching": True,
            "speculative_config": None,
            "max_num_batched_tokens": 512,
        }
        return Engine("off", self.settings, **(options | more))

    def given(self, text: int, length: int = LENGTH) -> dict[str, Any]:
        """The prefill instance computes a text."""
        asked = {"do_remote_decode": True}
        result = self.ask(self.prefill, f"text{text}", prompt(text, length), 1, asked)
        self.params = result.transfer_params[f"text{text}"]
        with self.prefill.connected():
            while not self.files(self.params):  # a step later
                self.prefill.llm.step()
        return json.loads(json.dumps(self.params))

    def taken(
        self, text: int, params: dict[str, Any], length: int = LENGTH
    ) -> dict[str, int]:
        """The decode instance loads it. Returns the rise of its audit's counts."""
        before = self.totals()
        self.decode.llm.reset_prefix_cache()
        self.result = self.ask(
            self.decode, f"text{text}", prompt(text, length), 4, params
        )
        after = self.totals()
        rise = {name: after[name] - before.get(name, 0) for name in after}
        return {name: n for name, n in rise.items() if n and name != "steps"}

    def ask(
        self, engine: Engine, name: str, text: tuple[int, ...], number: int, params: Any
    ) -> Any:
        extra = {"extra_args": {"kv_transfer_params": params}}
        return engine.run([Request(name, text, number, params=extra)])

    def totals(self) -> dict[str, int]:
        return dict(self.decode.audit.findings.totals())

    def files(self, params: dict[str, Any]) -> list[Path]:
        return sorted(self.path.glob(f"{params['remote_request_id']}-*.pt"))

    def found(self) -> list[Any]:
        findings = found(self.decode)
        self.decode.audit.findings.last.clear()
        return findings


@pytest.fixture(scope="module", params=["async", "sync"])
def world(request: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("pair"), request.param)


def test_what_the_prefill_instance_computed_is_verified(world):
    text = next(seeds)
    params = world.given(text)
    assert len(world.files(params)) == NUM_BLOCKS + 1
    assert world.taken(text, params) == {
        "verified": LENGTH - 1,
        "handover_verified": 1,
    }


def test_a_changed_row_names_its_block_and_layer(world):
    text = next(seeds)
    params = world.given(text)
    file, name = world.files(params)[1], world.decode.audit.audit.groups[0].names[2]
    saved = torch.load(file)
    saved[name].view(torch.uint8).flatten()[7] ^= 1
    torch.save(saved, file)
    rise = world.taken(text, params)
    assert rise == {
        "verified": LENGTH - 1 - BLOCK_SIZE,
        "not_as_sent": 1,
        "handover_wrong": 1,
    }
    (finding,) = world.found()
    assert (finding.kind, finding.layer, finding.num_layers) == ("not_as_sent", name, 1)
    assert finding.position == BLOCK_SIZE
