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
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

Prompt = str | list[int]
Policy = Literal["loaded", "quiet", "off"]

# Kinds of requests (soak_checks.KINDS) and how often each is drawn.
WEIGHTS = {
    "whole": 30,
    "stream": 30,
    "stop": 10,
    "abort_mid_stream": 18,
    "abort_before_first_token": 12,
}
WORDS = (  # noqa: SIM905 (a list of them would be a line a word)
    "time river stone house light water night morning road window letter garden train "
    "paper music winter market bread ship engine number city forest door"
).split()
REQUEST_SECONDS = 300.0
PROBE_TOKENS = 48
# Longer than a block, so that the prefix cache can hold a part of it.
PROBE_TEXT = 6 * "one two three four five, one two three, the sea and the shore, "
NUM_PREAMBLE_WORDS = 40
SHARED_SHARE, REPEATED_SHARE = 0.3, 0.6
FAILURES_KEPT = 5


@dataclass(frozen=True)
class Settings:
    """What the load is made of.

    model: the name that the server serves. max_model_len: its limit, in tokens.
    vocab_size: draw prompts as token ids below it, for a server without a tokenizer;
        None: text. probe_seconds: between two probes. All requests are greedy.
    """

    model: str
    max_model_len: int
    concurrency: int
    seed: int
    vocab_size: int | None
    probe: Policy
    probe_seconds: float


@dataclass(frozen=True)
class Plan:
    """One request. abort_after: chunks read before hanging up (None: never)."""

    kind: str
    prompt: Prompt
    max_tokens: int
    abort_after: int | None
    patience_seconds: float


def draw(rng: random.Random, settings: Settings) -> Plan:
    """The next request of a worker. Prompt and answer together fit the model: a word
    here is at most three tokens."""
    (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    if settings.vocab_size is not None and kind == "stop":
        kind = "whole"  # stop strings need a tokenizer
    most_words = max(settings.max_model_len // 6, 2)
    num_words = min(int(rng.lognormvariate(3.5, 1.0)) + 1, most_words)
    # A prompt that repeats itself is one that n-gram drafters find drafts in.
    phrase = rng.randint(2, 12) if rng.random() < REPEATED_SHARE else num_words
    numbers = [rng.randrange(2**31) for _ in range(phrase)]
    numbers = [numbers[i % phrase] for i in range(num_words)]
    if rng.random() < SHARED_SHARE:  # what the prefix cache is for
        numbers = [*range(NUM_PREAMBLE_WORDS), *numbers][:most_words]
    prompt: Prompt
    if settings.vocab_size is None:
        prompt = " ".join(WORDS[number % len(WORDS)] for number in numbers)
    else:
        prompt = [number % settings.vocab_size for number in numbers]
    most_tokens = max(settings.max_model_len // 4, 2)
    return Plan(
        kind=kind,
        prompt=prompt,
        max_tokens=min(int(rng.lognormvariate(3.2, 0.9)) + 2, most_tokens),
        abort_after=rng.randint(1, 6) if kind == "abort_mid_stream" else None,
        patience_seconds=rng.uniform(0.0, 0.3),
    )


class Gate:
    """Lets `size` in at a time, or one alone: a probe that must not share its batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.shared = asyncio.Semaphore(size)
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._turn, contextlib.AsyncExitStack() as stack:
            for _ in range(self._size):
                await stack.enter_async_context(self.shared)
            yield


@dataclass
class Outcome:
    """What came of the load: requests by kind, failures, and the probe's answers."""

    kinds: Counter[str] = field(default_factory=Counter)
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fail(self, what: str, error: Exception) -> None:
        self.num_failed += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(f"{what}: {type(error).__name__}: {error}"[:300])

    def add_probe(self, kind: str, answer: dict[str, Any]) -> None:
        """answer: text and token ids; the first of each kind is kept whole."""
        text = json.dumps(answer, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        empty = {"runs": 0, "outputs": {}, "num_tokens": [], "first": answer}
        one = self.probes.setdefault(kind, empty)
        one["runs"] += 1
        one["outputs"][digest] = one["outputs"].get(digest, 0) + 1
        num_tokens = len(answer["token_ids"])
        if num_tokens not in one["num_tokens"]:
            one["num_tokens"].append(num_tokens)


class Load:
    """The workers and the probe, over one server at `base_url` (".../v1")."""

    def __init__(self, base_url: str, settings: Settings) -> None:
        from openai import AsyncOpenAI

        self.settings = settings
        self.outcome = Outcome()
        self.deadline = 0.0  # of time.monotonic(); while it runs it may be moved
        self._gate = Gate(settings.concurrency)
        # Connections are not kept, so that each request may meet another API server.
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key="none",
            max_retries=0,
            timeout=REQUEST_SECONDS,
            default_headers={"Connection": "close"},
        )

    async def run(self, seconds: float) -> Outcome:
        """Runs the load so long, lets what is under way finish, probes once more."""
        self.deadline = time.monotonic() + seconds
        workers = [
            self._work(random.Random(f"{self.settings.seed}/{number}"))
            for number in range(self.settings.concurrency)
        ]
        async with self._client:
            await asyncio.gather(*workers, self._probe_until_deadline())
            await self.probe_once()
        return self.outcome

    async def _work(self, rng: random.Random) -> None:
        while time.monotonic() < self.deadline:
            plan = draw(rng, self.settings)
            async with self._gate.shared:
                try:
                    self.outcome.kinds[await self._request(plan)] += 1
                except Exception as error:
                    self.outcome.fail(plan.kind, error)
                    await asyncio.sleep(1)

    async def _request(self, plan: Plan) -> str:
        """Makes one request; returns the kind that it turned out to be: the answer may
        end before the client hangs up."""
        options: dict[str, Any] = {
            "model": self.settings.model,
            "prompt": plan.prompt,
            "max_tokens": plan.max_tokens,
            "temperature": 0.0,
        }
        if plan.kind in ("whole", "stop"):
            stop = [" the", "\n\n", "."] if plan.kind == "stop" else None
            await self._client.completions.create(**options, stop=stop)
            return plan.kind
        if plan.kind == "abort_before_first_token":
            try:
                await asyncio.wait_for(self._read(options, 1), plan.patience_seconds)
            except TimeoutError:
                return plan.kind
            return "abort_mid_stream"
        ended = await self._read(options, plan.abort_after)
        return "stream" if ended else "abort_mid_stream"

    async def _read(self, options: dict[str, Any], most: int | None) -> bool:
        """Streams an answer; hangs up after `most` chunks (None: reads to the end).
        Returns whether the answer ended by itself."""
        read = 0
        stream = await self._client.completions.create(**options, stream=True)
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

    async def _probe_until_deadline(self) -> None:
        while time.monotonic() < self.deadline:
            await self.probe_once()
            await asyncio.sleep(self.settings.probe_seconds)

    async def probe_once(self) -> None:
        """Asks the probe's question: once computed from nothing (a salt of its own),
        and, unless the load pauses for it, once with whatever the prefix cache has."""
        policy = self.settings.probe
        if policy == "off":
            return
        if policy == "loaded":
            await self._probe("cached", None)
            await self._probe("fresh", f"probe {time.monotonic_ns()}")
            return
        async with self._gate.alone():
            await self._probe("fresh", f"probe {time.monotonic_ns()}")

    async def _probe(self, kind: str, salt: str | None) -> None:
        vocab_size = self.settings.vocab_size
        prompt: Prompt = PROBE_TEXT
        if vocab_size is not None:
            prompt = [7919 * (i % 7) % vocab_size for i in range(72)]
        body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        if salt is not None:
            body["cache_salt"] = salt
        try:
            answer = await self._client.completions.create(
                model=self.settings.model,
                prompt=prompt,
                max_tokens=PROBE_TOKENS,
                temperature=0.0,
                extra_body=body,
            )
        except Exception as error:
            self.outcome.fail(f"probe {kind}", error)
            return
        choice = answer.choices[0].model_dump()
        self.outcome.add_probe(
            kind, {"text": choice["text"], "token_ids": choice["token_ids"]}
        )
