# SPDX-License-Identifier: Apache-2.0
"""Guarantees 1 to 3 and 7, and a silent audit, on engines and requests that hypothesis
draws.

Not drawn: what plain vLLM itself does differently from run to run, such as requests
that are aborted together, and random sampling.
"""

import random
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import StructuredOutputsParams

from tests.helpers.drafters import Plan
from tests.helpers.engine import Request, assert_same, free_memory, prompt
from tests.helpers.host_offloading import CONNECTOR
from tests.integration.test_audit import found
from tests.integration.test_audit_offloading import untold
from tests.integration.test_byte_oracle import EVERYTHING, Case, check_exact, watch
from tests.integration.test_reach import METHODS, MODELS

HYBRID = {name: case for name, case in MODELS.items() if name.startswith("Gemma")}
CASES = {n: c for n, c in METHODS.items() if n not in ("suffix", "eagle, dynamic k")}
CASES |= HYBRID
# Shared beginnings of prompts; n-grams can predict the last one.
TEXTS = [prompt(1, 300), prompt(2, 300), (7, 8, 9, 11, 300) * 60]


@dataclass(frozen=True)
class Trial:
    name: str
    num_drafts: int
    arguments: dict[str, Any]
    num_seats: int
    requests: list[Request]
    is_untold: bool  # the audit knows the connector's loads from the scheduler alone

    def plan(self) -> Plan:
        """At most num_drafts drafts, any number of them right; deterministic."""

        def plan(name: str, num_tokens: int) -> tuple[int, int]:
            draw = random.Random(zlib.crc32(f"{name} {num_tokens}".encode()))
            most = self.num_drafts
            num_drafts = draw.choice((0, most, most, most, draw.randint(0, most)))
            return num_drafts, draw.choice((0, num_drafts, draw.randint(0, num_drafts)))

        return plan

    def case(self) -> Case:
        case = CASES[self.name]()
        own = case.arguments.get("speculative_config", {})
        config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        config |= own | {"num_speculative_tokens": self.num_drafts}
        arguments = case.arguments | self.arguments | {"speculative_config": config}
        return replace(case, arguments=arguments, plan=self.plan())


@st.composite
def requests(draw: st.DrawFn, number: int, max_len: int, block_size: int) -> Request:
    lengths = st.integers(0, 60) | st.sampled_from([block_size, 2 * block_size + 1])
    text = draw(st.sampled_from(TEXTS))[: draw(lengths)]
    text = (*text, *prompt(number, draw(st.integers(0, 40))))[: max_len - 2] or (5,)
    ends = st.integers(1, 60) | st.just(block_size - len(text) % block_size)
    max_tokens = draw(ends)
    at = draw(st.integers(0, 12))
    # Only one request is aborted in a step.
    aborts = st.none() | st.integers(1, 3).map(lambda n: 8 * (at // 8 + n) + number)
    shape = draw(st.sampled_from([{}, {}, {}, {"regex": "[a-z ]{3,30}"}]))
    params: dict[str, Any] = {
        "min_tokens": min(max_tokens, draw(st.sampled_from([0, 0, 3]))),
        "stop_token_ids": list(range(draw(st.sampled_from([0, 0, 40])))),
        "repetition_penalty": draw(st.sampled_from([1, 1, 1.3])),
    }
    if shape:
        params["structured_outputs"] = StructuredOutputsParams(**shape)
    return Request(
        f"request{number}",
        text,
        max_tokens,
        at,
        draw(aborts),
        draw(aborts),
        params,
        draw(st.sampled_from([None, None, "salt"])),
    )


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    name = draw(st.sampled_from(list(CASES)))
    num_drafts = draw(st.integers(1, 4 if name == "medusa" else 8))
    block_size = draw(st.sampled_from([32, 64, 96]))
    max_len = draw(st.sampled_from([96, 128, 200, 416]))
    max_seqs = draw(st.integers(1, 8))
    least = (-(-max_len // block_size) + 1) * (2 if name in HYBRID else 1)
    is_chunked = draw(st.booleans())
    budget = max_seqs * (num_drafts + 1) + 8 + draw(st.integers(0, 200))
    is_host_drafter = name in ("ngram", "medusa", *HYBRID)
    arguments = {
        "block_size": block_size,
        "max_model_len": max_len,
        "max_num_seqs": max_seqs,
        "num_gpu_blocks_override": draw(st.integers(least, 2 * least + 4)),
        "enable_chunked_prefill": is_chunked,
        "max_num_batched_tokens": budget if is_chunked else budget + max_len,
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": not is_host_drafter and draw(st.booleans()),
        "kv_cache_dtype": draw(st.sampled_from(["auto"] * 7 + ["fp8"])),
    }
    if name == "dflash":
        del arguments["kv_cache_dtype"]
    if draw(st.sampled_from([False, False, True])):
        arguments |= {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": True}
    numbers = range(draw(st.integers(2, 8)))
    drawn = [draw(requests(number, max_len, block_size)) for number in numbers]
    num_seats = draw(st.integers(1, max_seqs))
    return Trial(name, num_drafts, arguments, num_seats, drawn, draw(st.booleans()))


@pytest.mark.nightly
@settings(
    max_examples=60,
    phases=[Phase.generate],  # to shrink takes hours
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(trials())
def test_drawn_engines_are_exact(trial):
    """In mode off with the audit, in cow, and in stage with seats for some or all."""
    free_memory()
    case = trial.case()
    span = 1 if trial.num_drafts == 1 else 2
    num_shadow = span * trial.num_seats * case.num_groups
    seats = EVERYTHING | {"SHADOW_BLOCKS": str(num_shadow)}
    off = watch(case.engine("off"), trial.requests, case=case)
    for mode, values in {"off": EVERYTHING, "cow": EVERYTHING, "stage": seats}.items():
        with untold() if trial.is_untold else nullcontext():
            engine = case.engine(mode, values)
        on = watch(engine, trial.requests, off.truth, case)
        assert found(on.engine) == []
        has_loads = "kv_transfer_config" in trial.arguments
        if mode == "off" or has_loads:  # the oracle reports loads as stray writes
            assert_same(on.result, off.result)
        else:
            check_exact(off, on)
        if not has_loads:
            assert on.engine.audit.audit.totals()["unverified"] == 0
