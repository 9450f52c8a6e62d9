# SPDX-License-Identifier: Apache-2.0
"""KV connectors on real CPU engines.

With the OffloadingConnector both modes give the outputs of plain vLLM and export the
same bytes. A connector that exports the partial last block of a request: with plain
vLLM it exports rejected drafts, with NWOR it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.helpers.byte_map import owners
from tests.helpers.drafters import ScriptedDrafter, mixture, truth_of
from tests.helpers.engine import (
    BLOCK_SIZE,
    Engine,
    Request,
    Result,
    assert_same,
    like_off,
)
from tests.helpers.host_offloading import CONNECTOR, HostSpec
from tests.helpers.player import counters, moved_bytes, risen
from tests.helpers.tail_connector import Tail, TailConnector
from tests.integration.test_byte_oracle import prompt
from vllm_nwor import commits

TAILS = {
    "kv_connector": "TailConnector",
    "kv_connector_module_path": "tests.helpers.tail_connector",
    "kv_role": "kv_both",
}


@pytest.fixture(autouse=True)
def nothing_stays_published():
    yield
    TailConnector.published.clear()
    commits.registered.clear()


def test_offloading_moves_the_same_bytes_as_plain_vllm():
    requests = [Request(f"r{n}", prompt(n, 40 + 7 * n), 50) for n in range(4)]
    filler = [Request(f"f{n}", prompt(50 + n, 70), 20, at=n) for n in range(4)]
    truth: dict[str, list[int]] = {}
    found = []
    for mode in ("off", "cow", "stage"):
        engine = like_off(
            mode,
            {"STRICT": "always"},
            kv_transfer_config=CONNECTOR,
            enable_prefix_caching=True,
            num_gpu_blocks_override=24,
            disable_log_stats=False,
        )
        truth = truth or truth_of(engine, requests)
        ScriptedDrafter(truth, mixture).attach(engine.runner)
        engine.llm.reset_prefix_cache(reset_connector=True)
        engine.poison_caches()
        host = HostSpec.last
        host.num_loaded = 0
        before, moved_before = counters(engine), moved_bytes(engine)
        runs = [engine.run(requests), engine.run(filler)]
        again = [
            Request(f"again{n}", (*r.prompt, *runs[0].tokens[r.name], 7), 20)
            for n, r in enumerate(requests)
        ]
        engine.llm.reset_prefix_cache()
        runs.append(engine.run(again))
        assert host.num_loaded > 4
        assert runs[0].num_accepted > 0 < runs[0].num_drafted - runs[0].num_accepted
        both_ways = risen(moved_before, moved_bytes(engine))
        assert both_ways.keys() == {"CPU_to_GPU", "GPU_to_CPU"}
        assert min(both_ways.values()) > 0
        found.append((runs, both_ways, host.chunks))
        if mode == "off":
            continue
        (info,) = engine.runner.nwor_state.infos
        assert (info.resolved, info.reason) == (mode, "4 layers, packed slots")
        rise = risen(before, counters(engine))
        assert rise["nwor_breaches"] == 0 < rise["nwor_windows"]
        assert rise["nwor_tokens_staged"] == sum(run.num_drafted for run in runs)
        assert rise["nwor_committed_tokens"] == sum(run.num_accepted for run in runs)
        vanilla_runs, vanilla_ways, expected = found[0]
        for run, vanilla in zip(runs, vanilla_runs, strict=True):
            assert_same(run, vanilla)
        assert both_ways == vanilla_ways
        assert host.chunks.keys() == expected.keys()
        assert len(expected) > 10
        for chunk, tensors in host.chunks.items():
            assert all(map(torch.equal, tensors, expected[chunk])), (mode, chunk)


@dataclass
class Published:
    """TailConnector's export of one request. changed: rows from `end` on that differ
    from those before the request. num_kept: rows that were written and not rejected;
    more than `end` if the request stopped within accepted drafts."""

    result: Result
    tail: Tail
    changed: list[int]
    num_kept: int


ENDED = [
    Request(f"{length}, {end}", prompt(length, length), end)
    for length in (13, 16, 27)
    for end in (4, 9)
]
ENDED.append(replace(ENDED[0], name="aborted", max_tokens=99, abort_at=9))


def published_by(mode: str, truth: dict[str, list[int]]) -> list[Published]:
    """Runs each of ENDED alone, on caches filled anew."""
    engine = Engine(mode, kv_transfer_config=TAILS)
    ScriptedDrafter(truth, mixture).attach(engine.runner)
    layers = engine.probe.target_layers()
    found = []
    for request in ENDED:
        TailConnector.published.clear()
        engine.poison_caches()
        before = {name: layer.kv_cache.clone() for name, layer in layers.items()}
        result = engine.run([request])
        with engine.connected():
            while not TailConnector.published:
                engine.llm.step()
        ((tail, exported),) = TailConnector.published.values()
        written = torch.zeros(BLOCK_SIZE, dtype=torch.bool)
        for name, layer in layers.items():
            one, other = exported[name], before[name][tail.block_id]
            differs = one.view(torch.uint8) != other.view(torch.uint8)
            written[owners(layer)[differs.flatten(1)]] = True
        first, last = (tail.end - 1) // BLOCK_SIZE * BLOCK_SIZE, tail.end % BLOCK_SIZE
        rows = [first + row for row in written.nonzero().flatten().tolist()]
        assert rows[: last or BLOCK_SIZE] == list(range(first, tail.end))
        num_kept = sum(
            sum(step.scheduled.values())
            - sum(step.drafted.values())
            + sum(step.accepted.values())
            for step in result.steps
        )
        changed = [row for row in rows if row >= tail.end]
        found.append(Published(result, tail, changed, num_kept))
    if mode != "off":
        (info,) = engine.runner.nwor_state.infos
        assert info.resolved == "cow"
        assert "tests.helpers.tail_connector.TailConnector may read" in info.reason
        assert "allowed are vLLM's own MooncakeConnector" in info.reason
    return found


def test_an_exported_tail_has_no_rejected_draft():
    """Mode stage, which resolves to cow with such a connector."""
    truth = truth_of(Engine("off"), ENDED)
    vanilla, ours = published_by("off", truth), published_by("stage", truth)
    for off, on in zip(vanilla, ours, strict=True):
        assert_same(on.result, off.result)
        assert (on.tail, on.num_kept) == (off.tail, off.num_kept)
        # Only accepted drafts behind a stop have changed.
        assert on.changed == [r for r in off.changed if r < on.num_kept]
    left = [row for off in vanilla for row in off.changed if row >= off.num_kept]
    assert len(left) > 3, (
        "plain vLLM exports no rejected draft: the test proves nothing"
    )
