# SPDX-License-Identifier: Apache-2.0
"""Scripted drafters: the test decides which drafts are right.

They replace one runner's `propose_draft_token_ids`. The target's tokens are known from
an earlier run without drafts; a plan gives, for a request and its number of tokens, how
many drafts to propose and how many of them are right.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.helpers.engine import NUM_DRAFTS, Engine, Request
from tests.helpers.runner_probe import request_name

# (request, its number of tokens so far) -> (drafts to propose, how many right)
Plan = Callable[[str, int], tuple[int, int]]
VOCABULARY = 2048  # of the tiny models


def all_wrong(name: str, num_tokens: int) -> tuple[int, int]:
    return NUM_DRAFTS, 0


def no_drafts(name: str, num_tokens: int) -> tuple[int, int]:
    return 0, 0


def mixture(name: str, num_tokens: int) -> tuple[int, int]:
    """Every pair of counts, by request and length; deterministic."""
    draw = random.Random(zlib.crc32(f"{name} {num_tokens}".encode()))
    num_drafts = draw.choice((0, 1, 2, 3, 4, 4, 4))
    return num_drafts, draw.randint(0, num_drafts)


def mixture_of_four(name: str, num_tokens: int) -> tuple[int, int]:
    """As `mixture`, with NUM_DRAFTS drafts in every window."""
    return NUM_DRAFTS, mixture(name, num_tokens)[1]


class ScriptedDrafter:
    """Drafts for one engine's requests.

    truth: each request's whole text with its prompt, by the target; past its end every
    draft is wrong. own: the drafts of the runner's own drafter, by step.
    """

    def __init__(self, truth: Mapping[str, Sequence[int]], plan: Plan) -> None:
        self.truth = truth
        self.plan = plan
        self.own: list[Any] = []
        self.num_proposed: Counter[str] = Counter()

    def attach(self, runner: Any, keeps_own: bool = False) -> None:
        """Replaces the drafts of `runner`. keeps_own: its own drafter runs in each step
        and decides how many drafts there are; the plan decides how many are right."""
        batch = runner.input_batch
        propose = type(runner).propose_draft_token_ids.__get__(runner)

        def scripted(scheduler_output: Any, sampled: Any, *rest: Any) -> Any:
            own: Any = [[] for _ in sampled]
            if keeps_own:
                own = propose(scheduler_output, sampled, *rest)
            # Drafters that need no host sampling run before the batch counts it.
            is_early = isinstance(sampled, torch.Tensor)
            drafts = own.tolist() if isinstance(own, torch.Tensor) else own
            self.own.append([list(row) for row in drafts])
            for row, name, tokens in zip(drafts, batch.req_ids, sampled, strict=True):
                index = batch.req_id_to_index[name]
                num_tokens = int(batch.num_tokens_no_spec[index])
                if is_early:
                    num_tokens += sum(
                        0 <= t < batch.vocab_size for t in tokens.tolist()
                    )
                is_given = keeps_own or len(tokens) == 0
                num_drafts = len(row) if is_given else None
                name = request_name(name)
                row[:] = self.draft(name, num_tokens, num_drafts)
                self.num_proposed[name] += len(row)
            if isinstance(own, torch.Tensor):
                return torch.tensor(drafts, dtype=own.dtype).view(own.shape)
            return drafts

        runner.propose_draft_token_ids = scripted

    def draft(
        self, name: str, num_tokens: int, num_drafts: int | None = None
    ) -> list[int]:
        """Drafts behind the first `num_tokens` tokens of this request: `num_drafts`, or
        by default the plan's number."""
        planned, num_right = self.plan(name, num_tokens)
        num_drafts = planned if num_drafts is None else num_drafts
        text = list(self.truth.get(name, ())[num_tokens:][:num_drafts])
        tokens = text[:num_right] + [
            (token + 1) % VOCABULARY for token in text[num_right:]
        ]
        unknown = range(len(tokens), num_drafts)
        return tokens + [(num_tokens + offset + 1) % VOCABULARY for offset in unknown]


def truth_of(
    engine: Engine, requests: Sequence[Request], without_drafts: bool = True
) -> dict[str, list[int]]:
    """Each request's prompt and the target's tokens, NUM_DRAFTS more than max_tokens.
    Runs all from step 0 without aborts; without drafts, or with the engine's
    drafter."""
    if without_drafts:
        ScriptedDrafter({}, no_drafts).attach(engine.runner)
    alone = {"at": 0, "abort_at": None, "abort_during": None}
    plain = {
        r.name: replace(r, max_tokens=r.max_tokens + NUM_DRAFTS, **alone)
        for r in requests
    }
    result = engine.run(list(plain.values()))
    return {r.name: [*result.prompts[r.name], *result.tokens[r.name]] for r in requests}
