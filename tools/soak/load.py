# SPDX-License-Identifier: Apache-2.0
"""The clients of a soak: a mixed load, and a probe whose answer must not change.

Real OpenAI clients over HTTP. Each worker draws requests from its own seeded stream:
short and long prompts, few and many tokens, streamed and not, ended by length or by a
stop string, and hung up on before the first token or in the middle. The probe asks the
same question over and over while the load runs ("loaded"), or while it pauses
("quiet": for a server whose results depend on what else is in the batch).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import time
from argparse import Namespace
from collections import Counter
from typing import Any, NamedTuple

from openai import AsyncOpenAI

# Kinds of requests and how often each is drawn.
WEIGHTS = {
    "whole": 30,
    "stream": 30,
    "stop": 10,
    "abort_mid_stream": 18,
    "abort_before_first_token": 12,
}
WORDS = (
    "time river stone house light water night morning road window letter garden train "
    "paper music winter market bread ship engine number city forest door"
)
REQUEST_SECONDS = 300.0
PROBE_TOKENS = 48
# Runs of each kind of probe that say something.
MIN_PROBES = 3
# Longer than a block, so that the prefix cache can hold a part of it.
PROBE_TEXT = 6 * "one two three four five, one two three, the sea and the shore, "
NUM_PREAMBLE_WORDS = 40
SHARED_SHARE, REPEATED_SHARE = 0.3, 0.6
FAILURES_KEPT = 5


class Plan(NamedTuple):
    """One request. prompt: text or token ids. abort_after: chunks read before hanging
    up. patience_seconds: until it hangs up before the first token."""

    kind: str
    prompt: str | list[int]
    max_tokens: int
    abort_after: int | None
    patience_seconds: float


def draw(
    rng: random.Random,
    max_model_len: int,
    vocab_size: int | None,
    without: str | None = None,
    kind: str | None = None,
) -> Plan:
    """The next request of a worker. Prompt and answer together fit the model: a word
    here is at most three tokens. vocab_size: token ids below it instead of text.
    without: a kind that is left out. kind: the request's, if it is not drawn."""
    kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if kind == without or (vocab_size is not None and kind == "stop"):
        kind = "whole"  # stop strings need a tokenizer
    most_words = max(max_model_len // 6, 2)
    num_words = min(int(rng.lognormvariate(3.5, 1.0)) + 1, most_words)
    # A prompt that repeats itself is one that n-gram drafters find drafts in.
    phrase = rng.randint(2, 12) if rng.random() < REPEATED_SHARE else num_words
    numbers = [rng.randrange(2**31) for _ in range(phrase)]
    numbers = [numbers[i % phrase] for i in range(num_words)]
    if rng.random() < SHARED_SHARE:  # what the prefix cache is for
        numbers = [*range(NUM_PREAMBLE_WORDS), *numbers][:most_words]
    most_tokens = max(max_model_len // 4, 2)
    words = WORDS.split() if vocab_size is None else range(vocab_size)
    drawn = [words[number % len(words)] for number in numbers]
    return Plan(
        kind=kind,
        prompt=" ".join(drawn) if vocab_size is None else drawn,
        max_tokens=min(int(rng.lognormvariate(3.2, 0.9)) + 2, most_tokens),
        abort_after=rng.randint(1, 6) if kind == "abort_mid_stream" else None,
        patience_seconds=rng.uniform(0.0, 0.3),
    )


class Load:
    """The workers and the probe, over one server.

    args: concurrency (requests at a time), seed, vocab_size and without (as `draw` has
    them), probe (loaded or quiet) and probe_seconds (between two). All requests are
    greedy.

    kinds: requests by kind. num_failed, failures: of how many, and the first ones.
    probes: by kind, runs, distinct outputs and how often, lengths, the first answer.
    deadline: of time.monotonic(); while the load runs it may be moved.
    """

    def __init__(self, url: str, model: str, max_model_len: int, args: Namespace):
        """model: the name that the server at `url` serves; its limit, in tokens."""
        self._model, self._max_model_len, self._args = model, max_model_len, args
        self.kinds: Counter[str] = Counter()
        self.num_failed = 0
        self.failures: list[str] = []
        self.probes: dict[str, dict[str, Any]] = {}
        self.deadline = 0.0
        self._places = asyncio.Semaphore(args.concurrency)
        # Connections are not kept, so that each request may meet another API server.
        options = {"default_headers": {"Connection": "close"}, "max_retries": 0}
        options |= {"base_url": f"{url}/v1", "api_key": "none"}
        self._client = AsyncOpenAI(timeout=REQUEST_SECONDS, **options)

    async def run(self, seconds: float) -> None:
        """Runs the load, lets open requests finish, then probes once more, or until
        there are MIN_PROBES on a slow machine."""
        self.deadline = time.monotonic() + seconds
        # Each kind comes early, however short the load is.
        firsts = zip(range(self._args.concurrency), itertools.cycle(WEIGHTS))
        workers = [
            self._work(random.Random(f"{self._args.seed}/{number}"), first)
            for number, first in firsts
        ]
        async with self._client:
            await asyncio.gather(*workers, self._probe_until_deadline())
            for number in range(MIN_PROBES):
                if number == 0 or self._num_probes() < MIN_PROBES:
                    await self._probe()

    def _fail(self, what: str, error: Exception) -> None:
        self.num_failed += 1
        self.failures.append(f"{what}: {type(error).__name__}: {error}"[:300])
        del self.failures[FAILURES_KEPT:]

    async def _work(self, rng: random.Random, kind: str | None) -> None:
        while time.monotonic() < self.deadline:
            args = self._args
            plan = draw(rng, self._max_model_len, args.vocab_size, args.without, kind)
            kind = None
            async with self._places:
                try:
                    self.kinds[await self._request(plan)] += 1
                except Exception as error:
                    self._fail(plan.kind, error)
                    await asyncio.sleep(1)

    async def _complete(self, prompt: Any, max_tokens: int, **options: Any) -> Any:
        options |= {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
        return await self._client.completions.create(temperature=0.0, **options)

    async def _request(self, plan: Plan) -> str:
        """Makes one request; returns the kind that it turned out to be: the answer may
        end before the client hangs up."""
        if plan.kind in ("whole", "stop"):
            stop = [" the", "\n\n", "."] if plan.kind == "stop" else None
            await self._complete(plan.prompt, plan.max_tokens, stop=stop)
            return plan.kind
        if plan.kind == "abort_before_first_token":
            try:
                await asyncio.wait_for(self._read(plan, 1), plan.patience_seconds)
            except TimeoutError:
                return plan.kind
            return "abort_mid_stream"
        ended = await self._read(plan, plan.abort_after)
        return "stream" if ended else "abort_mid_stream"

    async def _read(self, plan: Plan, most: int | None) -> bool:
        """Streams an answer; hangs up after `most` chunks (None: reads to the end).
        Returns whether the answer ended by itself."""
        read = 0
        stream = await self._complete(plan.prompt, plan.max_tokens, stream=True)
        try:
            async for chunk in stream:
                read += 1
                if chunk.choices and chunk.choices[0].finish_reason:
                    return True
                if most is not None and read >= most:
                    return False
        finally:
            await stream.close()
        raise RuntimeError(f"the stream ended after {read} chunks without a reason")

    def _num_probes(self) -> int:
        return min((one["runs"] for one in self.probes.values()), default=0)

    async def _probe_until_deadline(self) -> None:
        while time.monotonic() < self.deadline:
            await self._probe()
            await asyncio.sleep(self._args.probe_seconds)

    async def _probe(self) -> None:
        """Asks the probe's question: once computed from nothing (a salt of its own),
        and, unless the load pauses for it, once with whatever the prefix cache has."""
        async with contextlib.AsyncExitStack() as stack:
            if self._args.probe == "loaded":
                await self._ask("cached")
            else:
                for _ in range(self._args.concurrency):
                    await stack.enter_async_context(self._places)
            await self._ask("fresh", cache_salt=f"probe {time.monotonic_ns()}")

    async def _ask(self, kind: str, **body: Any) -> None:
        prompt: str | list[int] = PROBE_TEXT
        if (vocab_size := self._args.vocab_size) is not None:
            prompt = [7919 * (i % 7) % vocab_size for i in range(72)]
        body |= {"return_token_ids": True, "ignore_eos": True}
        try:
            found = await self._complete(prompt, PROBE_TOKENS, extra_body=body)
        except Exception as error:
            self._fail(f"probe {kind}", error)
            return
        answer = found.choices[0].model_dump(include={"text", "token_ids"})
        digest = hashlib.sha256(json.dumps(answer).encode()).hexdigest()
        empty = {"runs": 0, "outputs": Counter(), "num_tokens": [], "first": answer}
        one = self.probes.setdefault(kind, empty)
        one["runs"] += 1
        one["outputs"][digest] += 1
        one["num_tokens"] = sorted({*one["num_tokens"], len(answer["token_ids"])})
