# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: a request of the engine core that gets more input in turns.
vLLM's LLMEngine has none; AsyncLLM makes them from an iterator of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

from tests.helpers.drafters import ScriptedDrafter, no_drafts
from tests.helpers.engine import NUM_DRAFTS, Engine, threads
from tests.helpers.player import MAX_STEPS

Turn = tuple[Sequence[int], int]  # input tokens, max_tokens


def add_turn(engine: Engine, name: str, turn: Turn | None) -> None:
    """Queues a session's next input, or begins one; None ends it."""
    tokens, max_tokens = turn or ([0], 1)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request = EngineCoreRequest(
        request_id=f"{name}-0",
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=turn is not None,
    )
    engine.core.add_request(*engine.core.preprocess_add_request(request))


class Session:
    """A session that is played turn by turn, while no other request runs."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.id = engine, name, f"{name}-0"

    def turn(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Plays a turn and returns the new tokens."""
        add_turn(self.engine, self.name, (tokens, max_tokens))
        reply: list[int] = []
        with threads(1), self.engine.connected():
            while len(reply) < max_tokens:
                for outputs in self.engine.core.step()[0].values():
                    for output in outputs.outputs:
                        reply += output.new_token_ids
        return reply

    def end(self) -> None:
        aborted = RequestStatus.FINISHED_ABORTED
        self.engine.scheduler.finish_requests(self.id, aborted)


def play(
    engine: Engine, sessions: Mapping[str, Sequence[Turn]]
) -> dict[str, list[list[int]]]:
    """Plays sessions whose inputs are all queued from the start, at most max_num_seqs
    at a time, so that they keep their blocks; returns the tokens of each turn."""
    found: dict[str, list[list[int]]] = {name: [[]] for name in sessions}
    waiting = list(sessions.items())
    size = engine.core.vllm_config.scheduler_config.max_num_seqs
    with threads(1):
        for _ in range(MAX_STEPS):
            if not engine.core.scheduler.has_requests():
                batch, waiting = waiting[:size], waiting[size:]
                if not batch:
                    break
                for name, turns in batch:
                    for turn in (*turns, None):
                        add_turn(engine, name, turn)
            outputs, has_run = engine.core.step()
            engine.core.post_step(has_run)  # it fetches the drafts
            for output in (one for of in outputs.values() for one in of.outputs):
                turns_of = found[output.request_id.rpartition("-")[0]]
                turns_of[-1] += output.new_token_ids
                if output.finish_reason is not None:
                    turns_of.append([])
        else:
            raise AssertionError("a session does not end")
    return {name: turns[:-1] for name, turns in found.items()}


def draft_rightly(engine: Engine, turns: Mapping[str, tuple[Turn, int]]) -> None:
    """Scripts the drafts of these sessions' first turns: the given number per window,
    all right. Later turns have no drafts."""
    ScriptedDrafter({}, no_drafts).attach(engine.runner)
    alone = {
        name: [(tokens, max_tokens + NUM_DRAFTS)]
        for name, ((tokens, max_tokens), _) in turns.items()
    }
    written = play(engine, alone)
    truth = {name: [*alone[name][0][0], *written[name][0]] for name in turns}

    def plan(name: str, num_tokens: int) -> tuple[int, int]:
        (tokens, max_tokens), num_right = turns[name]
        is_first = num_tokens < len(tokens) + max_tokens
        return (num_right, num_right) if is_first else (0, 0)

    ScriptedDrafter(truth, plan).attach(engine.runner)
