# SPDX-License-Identifier: Apache-2.0
"""Drafters with a script: which drafts are right is decided by the test.

They stand in for `NgramProposer.propose` on one runner. What the target would say is
known from an earlier run without drafts; a plan says, for a request and the number of
tokens it has, how many drafts to make and how many of them to get right.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.helpers.engine import NUM_DRAFTS, Engine, Request
from tests.helpers.runner_probe import request_name

# (request, its number of tokens so far) -> (drafts to propose, how many right)
Plan = Callable[[str, int], tuple[int, int]]
VOCABULARY = 49152


def all_right(name: str, num_tokens: int) -> tuple[int, int]:
    return NUM_DRAFTS, NUM_DRAFTS


def all_wrong(name: str, num_tokens: int) -> tuple[int, int]:
    return NUM_DRAFTS, 0


def no_drafts(name: str, num_tokens: int) -> tuple[int, int]:
    return 0, 0


def mixture(name: str, num_tokens: int) -> tuple[int, int]:
    """Every pair of counts occurs, differently for each request, always alike."""
    draw = random.Random(zlib.crc32(f"{name} {num_tokens}".encode()))
    num_drafts = draw.choice((0, 1, 2, 3, 4, 4, 4))
    return num_drafts, draw.randint(0, num_drafts)


class ScriptedDrafter:
    """Drafts for one engine's requests.

    truth: for each request its whole text, prompt included, as the target would write
    it. Past its end every draft is wrong.
    """

    def __init__(self, truth: Mapping[str, Sequence[int]], plan: Plan) -> None:
        self.truth = truth
        self.plan = plan
        self.num_proposed = 0

    def attach(self, runner: Any) -> None:
        """Makes `runner` use these drafts in place of its ngram proposer's."""
        batch = runner.input_batch

        def propose(
            num_speculative_tokens: int,
            sampled_token_ids: list[list[int]],
            num_tokens_no_spec: Any,
            token_ids_cpu: Any,
            slot_mappings: Any = None,
        ) -> list[list[int]]:
            drafts = []
            for index, sampled in enumerate(sampled_token_ids):
                num_tokens = int(num_tokens_no_spec[index])
                name = request_name(batch.req_ids[index])
                drafts.append(self.draft(name, num_tokens) if sampled else [])
            self.num_proposed += sum(map(len, drafts))
            return drafts

        runner.drafter.propose = propose

    def draft(self, name: str, num_tokens: int) -> list[int]:
        """Drafts for the tokens after the first `num_tokens` of this request."""
        num_drafts, num_right = self.plan(name, num_tokens)
        text = self.truth.get(name, ())
        tokens = []
        for offset in range(num_drafts):
            position = num_tokens + offset
            known = position < len(text)
            if known and offset < num_right:
                tokens.append(text[position])
            else:
                wrong = (text[position] if known else position) + 1
                tokens.append(wrong % VOCABULARY)
        return tokens


def truth_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """What the target writes for each request: prompt, then NUM_DRAFTS tokens more
    than it was asked for. Runs them without drafts; removes arrivals and aborts."""
    ScriptedDrafter({}, no_drafts).attach(engine.runner)
    plain = [
        Request(r.name, r.prompt, r.max_tokens + NUM_DRAFTS, params=r.params)
        for r in requests
    ]
    result = engine.run(plain)
    return {r.name: [*r.prompt, *result.tokens[r.name]] for r in requests}
