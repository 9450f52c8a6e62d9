# SPDX-License-Identifier: Apache-2.0
"""VLLM_NWOR_ON_REJECT=poison: which bytes masked rows of a cache may hold.

First plain vLLM: all slots that no request has written are filled before each forward,
as if each were a rejected draft. Attention masks such rows, but multiplies some by 0: a
number becomes 0, a NaN stays. docs/audit.md has the table. Then NWOR under the oracle.
"""

from typing import Any

import pytest

from tests.helpers.drafters import ScriptedDrafter, mixture_of_four, truth_of
from tests.helpers.engine import Engine, Request, Result
from tests.helpers.filler import Filler, unwritten_blocks
from tests.helpers.oracle import SnapshotOracle
from tests.helpers.runner_probe import Observer
from tests.integration.test_byte_oracle import (
    CACHES,
    EVERYTHING,
    HAS_AVX512,
    MLA,
    prompt,
)

# Engine arguments, NWOR's poison, and whether a NaN leaves the outputs unchanged.
ROWS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "bf16": (CACHES["bf16"], 0x47, False),
    "vec16": (CACHES["vec16"], 0x47, False),
    "fp8": (CACHES["fp8"], 0x77, True),
    "sliding_window": (CACHES["sliding_window"], 0x47, False),
    "mla": (MLA, 0x47, True),
}
ROOM = {
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 512,
}
REQUESTS = (
    Request("middle", prompt(1, 83), 30),
    Request("short", prompt(2, 3), 40),
    Request("late", prompt(3, 50), 30, at=4),
)


def outputs(result: Result) -> tuple[Any, ...]:
    # As text: a NaN is not equal to itself.
    return result.schedule(), result.tokens, repr(result.logprobs)


@pytest.mark.parametrize("row", ROWS)
def test_masked_rows_may_hold_poison(row):
    if row == "fp8" and not HAS_AVX512:
        pytest.skip("vLLM's fp8 KV cache on CPU needs AVX512 or AMX")
    arguments, poison, takes_nan = ROWS[row]
    off = Engine("off", **arguments | ROOM)
    truth = truth_of(off, REQUESTS)

    def run(engine: Engine, *observers: Observer) -> tuple[Any, ...]:
        ScriptedDrafter(truth, mixture_of_four).attach(engine.runner)
        engine.poison_caches()
        return outputs(engine.run(REQUESTS, observers))

    filler = Filler(off.runner)

    def filled(contents: str, takes_one: bool = False) -> tuple[Any, ...]:
        filler.fill(contents, takes_one)
        with unwritten_blocks(off.scheduler, filler.forget):
            found = run(off)
        assert filler.stop()["num_filled"] > 10_000
        return found

    expected = run(off)
    assert filled("poison") == expected
    assert {tuple(pattern.tolist()) for pattern in filler.patterns.values()} == {
        (poison, poison)
    }
    assert (filled("nan") == expected) == takes_nan
    # One poisoned row that attention does read changes the outputs.
    assert filled("poison", takes_one=True) != expected

    cow = Engine("cow", EVERYTHING | {"ON_REJECT": "poison"}, **arguments | ROOM)
    oracle, of_old_bytes = SnapshotOracle(cow.probe, poison), SnapshotOracle(cow.probe)
    assert run(cow, oracle, of_old_bytes) == expected
    assert oracle.violations == []
    assert {v.kind for v in of_old_bytes.violations} >= {"not restored"}
    assert oracle.num_dirty > 100
    assert not cow.manager.fallbacks
    # For the audit such a slot is rejected and not restored.
    assert list(cow.audit.findings.last) == []
