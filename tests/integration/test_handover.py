# SPDX-License-Identifier: Apache-2.0
"""Two real engines on the CPU: one prefills, one decodes, a folder is between them. The
digests of the first one travel with kv_transfer_params, and the second one compares
what it has loaded. Faults are put into the files, and into what travels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.byte_map import owners
from tests.helpers.engine import BLOCK_SIZE, Engine, Request
from tests.helpers.folder_connector import Pair
from tests.integration.test_byte_oracle import EVERYTHING, prompt
from vllm_nwor.audit.findings import AuditError
from vllm_nwor.audit.handover import opened, sealed
from vllm_nwor.config import secret_in

NUM_BLOCKS = 3
TAIL = 5
LENGTH = NUM_BLOCKS * BLOCK_SIZE + TAIL
SECRET = "a secret of the tests, long enough"

NO_SECRET = {"AUDIT_SECRET": ""}
ID = "remote_request_id"

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
    """The two engines."""

    def __init__(self, path: Path, loads: str = "async", **of_decode: Any) -> None:
        self.path = path
        (path / "secret").write_text(SECRET)
        self.settings = EVERYTHING | {"AUDIT_SECRET": str(path / "secret")}
        self.secret = secret_in(str(path / "secret"))
        self.prefill = self.engine(loads)
        self.decode = self.engine(loads, **of_decode)

    def engine(
        self, loads: str, settings: Mapping[str, str] = {}, **more: Any
    ) -> Engine:
        options = {
            "kv_transfer_config": transfer(self.path, loads=loads),
            "enable_prefix_caching": True,
            "speculative_config": None,
            "max_num_batched_tokens": 2 * BLOCK_SIZE,  # a prompt takes two steps
        }
        return Engine("off", self.settings | settings, **(options | more))

    def given(
        self, text: int, length: int = LENGTH, salt: str | None = None
    ) -> dict[str, Any]:
        """The prefill instance computes a text. Returns what the client gets."""
        asked = {"do_remote_decode": True}
        result = self.ask(
            self.prefill, f"text{text}", prompt(text, length), 1, asked, salt
        )
        params: dict[str, Any] = result.transfer_params[f"text{text}"]
        with self.prefill.connected():
            while not self.files(params):  # a step later
                self.prefill.llm.step()
        # As a proxy that has all numbers as float64.
        return json.loads(json.dumps(params), parse_int=float)

    def taken(
        self,
        text: int,
        params: dict[str, Any],
        length: int = LENGTH,
        salt: str | None = None,
        keeps: bool = False,
    ) -> dict[str, int]:
        """The decode instance loads it. Returns the rise of its audit's counts. keeps:
        what is in its cache."""
        before = self.decode.audited()
        if not keeps:
            self.decode.llm.reset_prefix_cache()
        self.ask(self.decode, f"text{text}", prompt(text, length), 4, params, salt)
        return self.decode.audited() - before

    def ask(
        self,
        engine: Engine,
        name: str,
        text: tuple[int, ...],
        number: int,
        params: Any,
        salt: str | None = None,
    ) -> Any:
        # The connector changes its own.
        extra = {"extra_args": {"kv_transfer_params": {**params}}} if params else {}
        return engine.run([Request(name, text, number, params=extra, salt=salt)])

    def files(self, params: dict[str, Any]) -> list[Path]:
        return sorted(self.path.glob(f"{params[ID]}-*.pt"))

    def found(self) -> list[Any]:
        """By position."""
        return sorted(self.decode.take_findings(), key=lambda one: one.position)

    def layer(self, number: int) -> str:
        name: str = self.decode.audit.audit.groups[0].names[number]
        return name

    def plant(self, params: dict[str, Any], block: int, slot: int, layer: int) -> None:
        """One bit of a slot, in the file of a block."""
        file, name = self.path / f"{params[ID]}-{block}.pt", layer
        saved = torch.load(file)
        of_layer = self.decode.probe.target_layers()[self.layer(layer)]
        where = (owners(of_layer).flatten() == slot).nonzero()[0]
        saved[self.layer(name)].view(torch.uint8).view(-1)[where] ^= 1
        torch.save(saved, file)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("asynchronous"), "async")


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("synchronous"), "sync")


@pytest.fixture(params=["asynchronous", "synchronous"])
def world(request: Any) -> World:
    """Whose loads take a step more, and go up to the last token; or not."""
    found: World = request.getfixturevalue(request.param)
    return found


ALL = {"verified": LENGTH - 1, "handover_verified": 1}


def one_wrong(num_slots: int) -> dict[str, int]:
    verified = LENGTH - 1 - num_slots
    return {"verified": verified, "not_as_sent": 1, "handover_wrong": 1}


# --- what is right --------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 31])
def test_every_token_of_a_prompt_but_the_last_is_verified(world, length):
    text = next(seeds)
    params = world.given(text, length)
    assert len(world.files(params)) == -(-length // BLOCK_SIZE)
    for _ in range(2):  # again, from the same files
        rise = world.taken(text, params, length)
        assert rise == {"verified": length - 1, "handover_verified": 1}


def test_a_prompt_that_the_prefill_instance_found_in_its_cache(asynchronous):
    world, text = asynchronous, next(seeds)
    first, again = world.given(text), world.given(text)
    assert first[ID] != again[ID]
    assert again["remote_prefill_cached_tokens"] == NUM_BLOCKS * BLOCK_SIZE
    assert world.taken(text, again) == ALL


def test_a_prompt_that_begins_in_the_cache_of_the_decode_instance(asynchronous):
    """Its layers are compared nevertheless."""
    world, text = asynchronous, next(seeds)
    begin = prompt(text, BLOCK_SIZE)
    params = world.given(text)
    world.plant(params, 2, 0, 1)
    world.decode.llm.reset_prefix_cache()
    world.ask(world.decode, "begin", (*begin, 7, 8), 2, None)
    rise = world.taken(text, params, keeps=True)
    assert rise == one_wrong(BLOCK_SIZE) | {"verified": LENGTH - 1 - 2 * BLOCK_SIZE}
    (finding,) = world.found()
    assert (finding.position, finding.layer) == (2 * BLOCK_SIZE, world.layer(1))


# --- wrong bytes ----------------------------------------------------------------------


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_a_changed_bit_names_its_block_and_layer(world, block):
    text = next(seeds)
    params = world.given(text)
    world.plant(params, block, 9, 2)
    assert world.taken(text, params) == one_wrong(BLOCK_SIZE)
    (finding,) = world.found()
    assert (finding.kind, finding.num_layers) == ("not_as_sent", 1)
    assert (finding.layer, finding.position) == (world.layer(2), block * BLOCK_SIZE)


def test_a_changed_bit_of_the_last_block_names_its_slot(world):
    text = next(seeds)
    params = world.given(text)
    world.plant(params, NUM_BLOCKS, 2, 3)
    assert world.taken(text, params) == one_wrong(TAIL - 1)
    (finding,) = world.found()
    assert finding.position == NUM_BLOCKS * BLOCK_SIZE + 2
    assert finding.slot == finding.block * BLOCK_SIZE + 2


@pytest.mark.parametrize("slot", [TAIL - 1, TAIL, BLOCK_SIZE - 1])
def test_what_the_decode_instance_computes_itself_is_not_compared(world, slot):
    text = next(seeds)
    params = world.given(text)
    world.plant(params, NUM_BLOCKS, slot, 0)
    assert world.taken(text, params) == ALL


def test_swapped_blocks(world):
    text = next(seeds)
    params = world.given(text)
    one, _, other, _ = world.files(params)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    rise = world.taken(text, params)
    verified = LENGTH - 1 - 2 * BLOCK_SIZE
    assert rise == {"verified": verified, "not_as_sent": 2, "handover_wrong": 1}
    findings = world.found()
    assert [one.position for one in findings] == [0, 2 * BLOCK_SIZE]
    assert {(one.layer, one.num_layers) for one in findings} == {(world.layer(0), 4)}


def test_a_load_that_was_reported_as_failed_is_no_finding(world):
    text = next(seeds)
    params = world.given(text)
    world.plant(params, 2, 0, 0)
    world.files(params)[1].unlink()
    rise = world.taken(text, params)
    failed = LENGTH - 1 - BLOCK_SIZE
    assert rise.pop("failed") >= failed
    assert rise == {"verified": BLOCK_SIZE, "handover_verified": 1}
    assert world.found() == []


# --- digests that cannot be used ------------------------------------------------------


def test_without_a_secret_nothing_is_sent_and_nothing_used(asynchronous):
    world, text = asynchronous, next(seeds)
    params = world.given(text)
    alone = world.engine("async", NO_SECRET)
    result = world.ask(alone, "a", prompt(text, LENGTH), 1, {"do_remote_decode": True})
    assert result.transfer_params["a"].keys() == params.keys() - {"nwor"}
    before, other = alone.audited(), next(seeds)
    world.ask(alone, "b", prompt(other, LENGTH), 2, world.given(other))
    after = alone.audited()
    assert after["unverified"] - before["unverified"] == LENGTH - 1
    assert not any(name.startswith("handover") for name in after)


@pytest.mark.parametrize("digests", ["right", "forged", "without a secret"])
def test_under_raise_only_authenticated_digests_end_the_engine(asynchronous, digests):
    world, text = asynchronous, next(seeds)
    params = world.given(text)
    world.plant(params, 1, 9, 2)
    if digests == "forged":
        params["nwor"] = sealed(opened(params["nwor"], world.secret), b"another one")
    no_secret = NO_SECRET if digests == "without a secret" else {}
    decode = world.engine("async", {"AUDIT": "raise"} | no_secret)
    first = "1 findings, the first: not_as_sent: "
    is_right = digests == "right"
    with pytest.raises(AuditError, match=first) if is_right else nullcontext():
        world.ask(decode, "a", prompt(text, LENGTH), 4, params)
    counts = decode.audited()
    assert counts["unverified"] == (0 if is_right else LENGTH - 1)
    assert counts.get("not_as_sent", 0) == is_right
    results = {"right": {"handover_wrong"}, "forged": {"handover_signature"}}
    handovers = {name for name in counts if "handover" in name}
    assert handovers == results.get(digests, set())
