# SPDX-License-Identifier: Apache-2.0
"""Parts of the GPU tests that need no engine: the matrix covers every pair, the byte
oracle reports violations on a V2 runner made up here.
tests/integration/test_gpu_harness.py has real engines, on V1, and verdicts.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import engines
from tests.helpers.oracle import Watch
from vllm_nwor.ops import SAVED_COLUMNS


def test_matrix_covers_every_pair():
    assert engines.uncovered_pairs() == set()


def test_what_is_imported_in_functions_is_there():
    """They run on a GPU alone."""
    for file in Path(engines.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and "vllm_nwor" in str(node.module):
                exec(ast.unparse(node), {})


# -- the byte oracle -------------------------------------------------------------------

NUM_BLOCKS, BLOCK = 6, 4
DRAFTS = [5, 6, 7, 8]


class Layer(torch.nn.Module):
    """An attention layer with a cache of NHD or HND strides: two heads of eight."""

    impl = SimpleNamespace(kv_cache_dtype="auto")

    def __init__(self, hnd: bool) -> None:
        super().__init__()
        sizes = (2, BLOCK) if hnd else (BLOCK, 2)
        cache = torch.zeros(NUM_BLOCKS, *sizes, 8, dtype=torch.bfloat16)
        self.kv_cache = cache if hnd else cache.transpose(1, 2)

    def write(self, slots: list[int], value: float) -> None:
        for slot in slots:
            self.kv_cache[slot // BLOCK, :, slot % BLOCK] = value


class Runner:
    """What Watch needs of the V2 runner: slots, then the forward, then the sampler.
    `log` and `restore` are the NWOR of this test. A step has one request with three
    drafts, behind its target token in DRAFTS, of which one is accepted."""

    value, num_rejected = 1.0, 2

    def __init__(self) -> None:
        self.layers = torch.nn.ModuleList([Layer(hnd=False), Layer(hnd=True)])
        self.context = {f"target.{i}": layer for i, layer in enumerate(self.layers)}
        self.context["draft.0"] = Layer(hnd=True)
        known = SimpleNamespace(static_forward_context=self.context)
        self.vllm_config = SimpleNamespace(compilation_config=known)
        spec = SimpleNamespace(block_size=BLOCK)
        group = SimpleNamespace(layer_names=list(self.context), kv_cache_spec=spec)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.slots = torch.tensor([[*DRAFTS, -1]])
        self.batch = SimpleNamespace(
            req_ids=["one"],
            num_draft_tokens=3,
            logits_indices=torch.arange(4),
            cu_num_logits=torch.tensor([0, 4]),
            idx_mapping=torch.tensor([0]),
        )
        self.max_num_reqs = 1
        tables = [torch.zeros(1, 3, dtype=torch.int32)]
        self.block_tables = SimpleNamespace(input_block_tables=tables)
        graphs = {"run_fullgraph": self.forward, "run_pw_graph": None}
        self.cudagraph_manager = SimpleNamespace(**graphs)

    def get_model(self) -> torch.nn.Module:
        return self.layers

    def log(self) -> None:
        self.old = [layer.kv_cache[[1, 2], :, [3, 0]] for layer in self.layers]

    def forward(self) -> None:
        self.value += 1
        for number, layer in enumerate(self.layers):
            layer.write(DRAFTS, self.value + number)

    def restore(self) -> None:
        for layer, old in zip(self.layers, self.old, strict=True):
            layer.kv_cache[[1, 2], :, [3, 0]] = old

    def execute_model(self, scheduler_output: Any) -> None:
        self.prepare_attn(self.batch)
        self.cudagraph_manager.run_fullgraph()

    def prepare_attn(self, input_batch: Any) -> Any:
        self.log()
        return (), self.slots

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        self.restore()
        return None, torch.tensor([2]), torch.tensor([self.num_rejected])


@pytest.fixture
def runner():
    return Runner()


def watched(runner: Any, num_steps: int = 1) -> dict[str, Any]:
    oracle = Watch(runner)
    oracle.start(seed=1)
    scheduled = SimpleNamespace(num_scheduled_tokens={"one": 4})
    for _ in range(num_steps):
        runner.execute_model(scheduled)
        runner.sample(None, runner.batch, None)
        runner.context["draft.0"].write([5, 6], 9.0)
    return oracle.stop()


def test_oracle_is_silent_when_all_is_well(runner):
    seen = watched(runner, num_steps=2)
    assert seen["violations"] == []
    assert seen["layers"] == 2  # the drafter's is not the target's
    # Two rejected slots, in two layers, in two steps; the forward changed them all.
    assert seen["num_rejected_slots"] == seen["num_dirty_slots"] == 2 * 2 * 2
    assert (seen["num_windows"], seen["num_drafts"], seen["num_accepted"]) == (2, 6, 2)
    step = {"requests": 1, "tokens": 4, "windows": 1, "drafts": 3, "accepted": 1}
    assert seen["steps"] == [step | {"preempted": 0, "graph": "FULL"}] * 2


def test_oracle_reports_vanilla_and_numbers_that_do_not_add_up(runner):
    runner.restore = lambda: None
    seen = watched(runner)
    assert seen["violations_by_kind"] == {"not restored": seen["num_dirty_slots"]}
    assert seen["violations"][0]["slots"] == (7, 8)
    runner.num_rejected = 1
    assert "contradiction" in watched(runner)["violations_by_kind"]


@pytest.mark.parametrize(
    ("when", "layer", "slot", "kind"),
    [
        ("restore", "target.1", 5, "stray write"),
        ("restore", "target.1", 20, "stray write"),
        ("restore", "draft.0", 2, "stray write"),
        ("log", "target.0", 13, "unmapped write"),
    ],
)
def test_oracle_reports_an_unexpected_write(runner, when, layer, slot, kind):
    plain = getattr(runner, when)

    def too_much():
        plain()
        runner.context[layer].write([slot], 0.25)

    setattr(runner, when, too_much)
    (found,) = watched(runner)["violations"]
    assert (found["kind"], found["layer"], found["slots"]) == (kind, layer, (slot,))


@pytest.mark.parametrize(
    ("kind", "verified", "written"),
    [
        ("early write", [5, 17, 18, 19, -1], [5, 6, 18, 19]),
        ("not staged", [5, 17, 7, 18, -1], [5]),
        ("stray write", [5, 17, 18, 19, -1], [5, 17]),
    ],
)
def test_oracle_knows_shadow_blocks(runner, kind, verified, written):
    """Four blocks are real; drafts are verified in the fifth, at slots 17 to 19."""
    region = SimpleNamespace(num_real_blocks=4, block_size=BLOCK, num_seats=1)
    runner.kv_cache_config.nwor_shadow = {0: region}
    slots, runner.slots = runner.slots, torch.tensor([verified])
    first = runner.layers[0]
    runner.cudagraph_manager.run_fullgraph = lambda: first.write(written, 3.0)

    def commit():
        runner.slots.copy_(slots)
        first.write([6] + [2] * (kind == "stray write"), 4.0)

    runner.restore = commit
    assert set(watched(runner)["violations_by_kind"]) == {kind}


@pytest.mark.parametrize("kind", ["", "not present", "left in a table"])
def test_oracle_knows_what_a_seat_holds(runner, kind):
    """Entries 4 and 5 are shadow: drafts are verified in them, a committed row is
    copied before, the kept ones behind. Rows 4, 5 and 6 count for the next step."""
    region = SimpleNamespace(num_real_blocks=4, block_size=BLOCK, num_seats=1)
    runner.kv_cache_config.nwor_shadow = {0: region}
    saved = torch.zeros(1, SAVED_COLUMNS + 4, dtype=torch.int32)
    saved[0, SAVED_COLUMNS - 3 : SAVED_COLUMNS] = torch.tensor([9, 7, 1])
    group = {"num_real_entries": 4, "first_entry": 4, "span": 2, "entry_tokens": BLOCK}
    seats = SimpleNamespace(
        groups={0: SimpleNamespace(**group)}, saved={0: saved}, step=9, seats=None
    )
    manager = SimpleNamespace(shadow=seats)
    transaction = SimpleNamespace(manager=manager)
    runner.nwor_state = SimpleNamespace(named={"transaction": transaction}.get)
    slots, runner.slots = runner.slots, torch.tensor([[21, 22, 23, 16, -1]])

    def copy_rows(sources, targets):
        for layer in runner.layers:
            rows = layer.kv_cache.transpose(1, 2).flatten(0, 1)
            for source, target in zip(sources, targets, strict=True):
                layer.write([target], rows[source])

    def forward():
        for number, layer in enumerate(runner.layers):
            layer.write([21, 22, 23, 16], 3.0 + number)

    def commit():
        copy_rows([21, 22], [5, 6])
        runner.slots.copy_(slots)
        if kind == "left in a table":
            runner.block_tables.input_block_tables[0][0, 1] = 5

    runner.log = lambda: copy_rows([4], [21 if kind == "not present" else 20])
    runner.cudagraph_manager.run_fullgraph, runner.restore = forward, commit
    seen = watched(runner)
    assert set(seen["violations_by_kind"]) == {kind} - {""}, seen
    assert seen["num_present_rows"] == 3 * 2
    assert (seen["num_staged_slots"], seen["num_logged_slots"]) == (2 * 2, 0)
