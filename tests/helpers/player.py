# SPDX-License-Identifier: Apache-2.0
"""Plays requests on an LLMEngine in this process, deterministically.

Requests arrive and are aborted between numbered engine steps, and a step waits until
all grammars are compiled, so that two engines compose the same batches. vLLM is
imported lazily: tables of requests do not need it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

MAX_STEPS = 3000
GRAMMAR_LIMIT_S = 60.0
POLL_S = 0.001
JUDGED = "committed + rejected == vLLM's drafted"


@dataclass(frozen=True)
class Request:
    """One request.

    at: the step before which it arrives. abort_at: the step before which it is aborted.
    abort_during: the step in which it is aborted after sampling, so that the scheduler
    skips the runner's output. params: further SamplingParams; structured_outputs may be
    a dict. salt: cache_salt. lora: a LoRARequest. behind: a prefix of other ids; from
    `at` on it waits until one of these requests verifies drafts and its last known
    token fills a block; its prompt is that one's text, then its own. image: the color
    of an image in the prompt. embeds: [tokens, hidden size], instead of a prompt.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    at: int = 0
    abort_at: int | None = None
    abort_during: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    lora: Any = None
    behind: str | None = None
    image: tuple[int, int, int] | None = None
    embeds: Any = None


@dataclass
class Outputs:
    """Outputs of a run by request; several outputs of one request are "0_name",
    "1_name" and so on, as vLLM names them.

    prompts: with the placeholder tokens of images. logprobs: for each position (token,
    logprob, rank) in vLLM's order. cached: prompt tokens found in the prefix cache.
    transfer_params: kv_transfer_params, of requests that return some.
    """

    prompts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[list[tuple[int, float, int | None]]]] = field(
        default_factory=dict
    )
    finish: dict[str, str | None] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    transfer_params: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0

    def add(self, output: Any, several: bool) -> None:
        """Stores a RequestOutput; later ones of a request replace earlier ones."""
        self.prompts[output.request_id] = output.prompt_token_ids
        if (params := output.kv_transfer_params) is not None:
            self.transfer_params[output.request_id] = params
        for completion in output.outputs:
            name = output.request_id
            if several:
                name = f"{completion.index}_{name}"
            self.tokens[name] = list(completion.token_ids)
            self.text[name] = completion.text
            self.finish[name] = completion.finish_reason
            self.cached[name] = output.num_cached_tokens or 0
            self.logprobs[name] = [
                [
                    (int(token), float(one.logprob), one.rank)
                    for token, one in position.items()
                ]
                for position in completion.logprobs or ()
            ]


class Player:
    """Has `llm`, an LLMEngine; `params` are the SamplingParams of each request."""

    llm: Any
    params: dict[str, Any]
    # Requests to abort during this step; a subclass does it.
    abort_now: Sequence[str] = ()

    @property
    def scheduler(self) -> Any:
        return self.llm.engine_core.engine_core.scheduler

    def play(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Plays the requests until all are finished or aborted."""
        waiting = sorted(requests, key=lambda request: request.at)
        several = {r.name for r in requests if r.params.get("n", 1) > 1}
        number = 0
        while waiting or self.llm.has_unfinished_requests():
            self.llm.abort_request([r.name for r in requests if r.abort_at == number])
            for request in [r for r in waiting if r.at <= number]:
                if (arrived := self._arrived(request)) is not None:
                    waiting.remove(request)
                    self._add(arrived)
            await_grammars(self.scheduler.requests.values())
            self.abort_now = [r.name for r in requests if r.abort_during == number]
            for output in self.llm.step():
                outputs.add(output, output.request_id in several)
            # The engine core dropped these during the step; now the front end does.
            self.llm.abort_request(self.abort_now)
            number += 1
            if number > MAX_STEPS:
                raise RuntimeError(f"unfinished requests after {MAX_STEPS} steps")
        outputs.num_steps += number

    @contextmanager
    def before_step(self, number: int, act: Callable[[], Any]) -> Iterator[None]:
        """Calls `act` before that engine step in the block, counted from 1."""
        steps, step = itertools.count(1), self.llm.step

        def acting() -> Any:
            if next(steps) == number:
                act()
            return step()

        with mock.patch.object(self.llm, "step", acting):
            yield

    def _arrived(self, request: Request) -> Request | None:
        """The request with its whole prompt, or None if it still waits."""
        if request.behind is None:
            return request
        known = self.scheduler.requests.items()
        others = [one for name, one in known if name.startswith(request.behind)]
        size = self.llm.vllm_config.cache_config.block_size
        for one in others:
            if one.spec_token_ids and one.num_tokens % size == 0:
                return replace(request, prompt=(*one.all_token_ids, *request.prompt))
        return None if others else request

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if request.embeds is not None:
            prompt = {"prompt_embeds": request.embeds}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        if request.image is not None:
            from PIL import Image

            image = Image.new("RGB", (28, 28), request.image)
            prompt["multi_modal_data"] = {"image": image}
        params = self.params | request.params
        if isinstance(grammar := params.get("structured_outputs"), dict):
            params["structured_outputs"] = StructuredOutputsParams(**grammar)
        sampling = SamplingParams(max_tokens=request.max_tokens, **params)
        self.llm.add_request(request.name, prompt, sampling, lora_request=request.lora)


def await_grammars(requests: Iterable[Any]) -> None:
    """Waits until the grammars of all `requests` are compiled. RuntimeError: one
    failed, or took longer than GRAMMAR_LIMIT_S."""
    until = time.monotonic() + GRAMMAR_LIMIT_S
    for request in requests:
        structured = request.structured_output_request
        while structured is not None and not structured.is_grammar_ready:
            if time.monotonic() > until:
                raise RuntimeError(f"{request.request_id}: grammar not compiled")
            time.sleep(POLL_S)
        error = None if structured is None else structured.grammar
        if isinstance(error, Exception):
            raise RuntimeError(f"{request.request_id}: invalid grammar") from error


def counters(engine: Any) -> dict[str, int]:
    """The counters of speculative decoding and of NWOR that get_metrics() shows for the
    newest engine, as "name", "name/reason" and "name/mode"."""
    found: Counter[str] = Counter()
    for metric in engine.llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        is_ours = name.startswith(("nwor_", "spec_decode_num_"))
        if is_ours and hasattr(metric, "value") and not name.endswith("_info"):
            reason, mode = metric.labels.get("reason"), metric.labels.get("mode")
            if mode is not None:
                found[f"{name}/{mode}"] += int(metric.value)
            found[name if reason is None else f"{name}/{reason}"] += int(metric.value)
    return found


def risen(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Increments, including zeros."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def identities(found: Mapping[str, float]) -> dict[str, bool]:
    """The claims of guarantee 7 on vLLM's and NWOR's counters, for engines that
    speculated without a fallback, and whether each holds."""
    v = Counter(found)
    judged = v["nwor_committed_tokens"] + v["nwor_rejected_tokens"]
    accepted = v["spec_decode_num_accepted_tokens"]
    fallbacks = [n for name, n in v.items() if name.split("/")[0] == "nwor_fallbacks"]
    return {
        "staged == committed + rejected + dropped": v["nwor_tokens_staged"]
        == judged + v["nwor_dropped_drafts"],
        "committed == vLLM's accepted": v["nwor_committed_tokens"] == accepted,
        JUDGED: judged == v["spec_decode_num_draft_tokens"],
        "something was staged": v["nwor_tokens_staged"] > 0,
        "no breach": v["nwor_breaches"] == 0,
        "no fallback": not any(fallbacks),
    }


def check_identities(found: Mapping[str, float]) -> None:
    """Asserts the identities, that drafts were accepted, and that no window is missing;
    names may begin with "vllm:"."""
    found = {name.removeprefix("vllm:"): value for name, value in found.items()}
    assert [claim for claim, holds in identities(found).items() if not holds] == []
    assert found["spec_decode_num_accepted_tokens"] > 0
    assert found["nwor_windows"] >= found["spec_decode_num_drafts"]


def moved_bytes(engine: Any) -> dict[str, int]:
    """Bytes moved by the OffloadingConnector so far, by direction: its own metric."""
    return {
        metric.labels["transfer_type"]: int(metric.value)
        for metric in engine.llm.get_metrics()
        if metric.name == "vllm:kv_offload_total_bytes"
    }
