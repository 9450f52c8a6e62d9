# SPDX-License-Identifier: Apache-2.0
"""What each engine of the GPU tests is made to do: the rows.

A row is one or more phases that run one after another; a phase is a set of requests
with the number of the engine step before which each arrives or is aborted. The same
rows run with NWOR off and on: batches are then composed alike, because the in-process
engine decides nothing by the clock.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.helpers.player import Request

# Prompts draw from few tokens, so that ngram has something to find.
_FIRST_TOKEN, _NUM_PROMPT_TOKENS = 10, 40


@dataclass(frozen=True)
class Row:
    """name: what the row is about. phases: see above. needs: what must be seen in it
    for it to have meant anything (see compare.py)."""

    name: str
    phases: tuple[tuple[Request, ...], ...]
    needs: frozenset[str] = frozenset()


def prompt(seed: object, length: int) -> tuple[int, ...]:
    draw = random.Random(str(seed))
    last = _FIRST_TOKEN + _NUM_PROMPT_TOKENS - 1
    return tuple(draw.randint(_FIRST_TOKEN, last) for _ in range(length))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_PLAIN: dict[str, Any] = {"logprobs": 2}
BY_GRAMMAR = {"ignore_eos": False}


def warm_up() -> Row:
    """Runs before anything is watched: first uses of kernels and scale caches."""
    return Row(
        "warm-up",
        (
            tuple(
                Request(
                    f"warm/{i}",
                    prompt(f"warm {i}", 20 + i),
                    12,
                    params={"temperature": 0.8 * (i % 2), "seed": i} | _PLAIN,
                )
                for i in range(4)
            ),
        ),
    )


def rows(spec: EngineSpec) -> tuple[Row, ...]:
    """The rows of the matrix, for an engine of this capacity. vLLM's CPU_MLA is slow,
    samples greedily only, takes prompts whole and caches no prefixes."""
    if spec.backend == "CPU_MLA":
        return (Row("batch 8", (_batch("eight", 8, 12, 10, stagger=1),)),)
    return (
        Row("batch 1", ((Request("one/0", prompt("one", 30), 48, params=_PLAIN),),)),
        Row("batch 8", (_batch("eight", 8, 40, 32, stagger=1),)),
        Row("batch 64", (_batch("many", 64, 12, 16, params={}),)),
        Row("seeded sampling", (_sampled(),)),
        Row("aborts", (_aborted(),), frozenset({"dropped"})),
        Row("preemption", (_too_many(spec),), frozenset({"preempted"})),
        Row("prefix caching", _repeated(), frozenset({"cached"})),
        Row("chunked prefill", (_mixed(),), frozenset({"chunked"})),
        Row("structured output", (_structured(),), frozenset({"structured"})),
    )


def offloaded() -> Row:
    """A prompt, others that take all its blocks, and the prompt again with another end.
    One request at a time: when a load is done is left to the clock."""
    shared = prompt("offloaded", 200)
    prompts = (shared + prompt("x", 20), *(prompt(f"o {i}", 500) for i in range(2)))
    return Row(
        "offloaded",
        tuple(
            (Request(f"offload/{i}", tokens, 24 + i, params=_PLAIN),)
            for i, tokens in enumerate((*prompts, shared + prompt("y", 30)))
        ),
    )


def _batch(
    name: str,
    size: int,
    length: int,
    max_tokens: int,
    stagger: int = 0,
    params: dict[str, Any] | None = None,
) -> tuple[Request, ...]:
    """Greedy requests of different lengths, `stagger` steps apart."""
    return tuple(
        Request(
            f"{name}/{i}",
            prompt(f"{name} {i}", length - 8 + (5 * i) % 16),
            max_tokens + i % 5,
            at=i * stagger,
            params=_PLAIN if params is None else params,
        )
        for i in range(size)
    )


def _sampled() -> tuple[Request, ...]:
    """Temperature 0.8 with seeds; some with top_p; one greedy beside them."""
    requests = []
    for i in range(8):
        params = {"temperature": 0.8, "seed": 100 + i} | _PLAIN
        if i % 3 == 1:
            params["top_p"] = 0.9
        if i == 7:
            params = dict(_PLAIN)
        requests.append(
            Request(f"sampled/{i}", prompt(f"s {i}", 25 + i), 32, params=params)
        )
    return tuple(requests)


def _aborted() -> tuple[Request, ...]:
    """Three of eight are aborted mid-flight, two of them in the same step."""
    aborts = {1: 6, 4: 9, 6: 9}
    return tuple(
        Request(
            f"aborts/{i}",
            prompt(f"a {i}", 20 + 3 * i),
            # The aborted ones would outlast their abort by far.
            160 if i in aborts else 40,
            at=i // 2,
            abort_at=aborts.get(i),
            params=_PLAIN,
        )
        for i in range(8)
    )


def _too_many(spec: EngineSpec) -> tuple[Request, ...]:
    """Requests that need a third more slots than there are."""
    length, max_tokens = 150, 300
    count = -(-spec.num_slots * 4 // 3 // (length + max_tokens))
    return tuple(
        Request(f"crowd/{i}", prompt(f"p {i}", length + i), max_tokens, at=i // 4)
        for i in range(count)
    )


def _repeated() -> tuple[tuple[Request, ...], ...]:
    """A, B, then A's prompt again with another end: three phases."""
    shared = prompt("shared", 200)
    return (
        (Request("prefix/a", shared + prompt("a", 20), 24, params=_PLAIN),),
        (Request("prefix/b", prompt("other", 150), 24, params=_PLAIN),),
        (Request("prefix/a2", shared + prompt("a2", 30), 24, params=_PLAIN),),
    )


def _mixed() -> tuple[Request, ...]:
    """Long prompts, more than a step's tokens together, arrive among decoders."""
    decoders = _batch("decoding", 4, 20, 60)
    prompts = tuple(
        Request(f"long/{i}", prompt(f"l {i}", 400 + i), 20, at=5, params=_PLAIN)
        for i in range(3)
    )
    return decoders + prompts


def _structured() -> tuple[Request, ...]:
    """Two grammars, beside two requests without one."""
    free = _batch("free", 2, 20, 30)
    regex = "(ab|cd)[0-9]{10,30}(x|yz)"
    kinds: tuple[dict[str, Any], ...] = (
        {"structured_outputs": {"regex": regex}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": regex}, "temperature": 0.8, "seed": 5},
    )
    return free + tuple(
        Request(f"grammar/{i}", prompt(f"g {i}", 18 + i), 48, params=kind | BY_GRAMMAR)
        for i, kind in enumerate(kinds)
    )
