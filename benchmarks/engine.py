# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, and timed runs of the same requests on it.

The engine core shares the process (VLLM_ENABLE_V1_MULTIPROCESSING=0), the prefix cache
has no prompt, or with --cached-prompts all of them, and all requests are added, in the
same order, before the first step: two runs then make the same batches. Each run starts
from the same seeds. NWOR's hooks are put on vLLM and taken off between steps: in the
workers by `NworWorkerExtension`, those of scheduler and front end in this process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice, zip_longest
from typing import Any

from benchmarks import prompts
from benchmarks.ab import TURN_STEPS, Arm, NworDone, Run
from benchmarks.arguments import BadArgument, Options
from benchmarks.settings import SEED, engine_arguments, find_models

# Steps that may still be in flight when the last request has finished.
_DRAIN_STEPS = 4

# Of vLLM's counters, by our names.
_DRAFTS = {
    "windows": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
_HITS = "vllm:prefix_cache_hits"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class EngineFailed(Exception):
    """vLLM did not start, or does not run as the bench needs."""


class Engine:
    """A started engine with its encoded requests.

    prompts: token ids of each request.
    """

    def __init__(self, options: Options, device: str) -> None:
        """Starts vLLM. Call prepare_process first. Raises EngineFailed, with vLLM's
        words, or BadArgument: models that cannot be used."""
        self.options = options
        self.target, self.drafter = find_models(options)
        arguments = engine_arguments(options, device, self.target, self.drafter)
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core_client import InprocClient

        started = time.perf_counter()
        try:
            config = EngineArgs(**arguments)
            # With the tokens a step of a server, which depend on the device.
            server = UsageContext.OPENAI_API_SERVER
            self._engine = LLMEngine.from_engine_args(config, server)
        except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
            text = f"vLLM did not start with the model {self.target.label!r}"
            raise EngineFailed(f"{text}: {_sentence(error)}") from error
        client = self._engine.engine_core
        if not isinstance(client, InprocClient):
            raise EngineFailed(
                f"the engine core is behind a {type(client).__name__}; expected it in "
                "this process, where hooks can be taken off its scheduler "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=0)"
            )
        self.start_s = time.perf_counter() - started
        self.prompts = self.encode()
        self._cached: list[list[int]] = []  # the prompts that the prefix cache has
        self._num_runs = 0
        gc.collect()
        gc.freeze()

    def encode(self) -> list[list[int]]:
        """The prompts of `options`. Raises BadArgument: they are too long."""
        options, size = self.options, self.options.batch_size
        config = self._engine.model_config
        if self.target.random_weights:
            vocabulary = config.get_vocab_size()
            ids = prompts.random_ids(size, vocabulary, SEED)
        else:
            ids = prompts.encode(prompts.TEXTS[:size], self._engine.get_tokenizer())
            ids = list(islice(cycle(ids), size))
        if options.context is not None:
            ids = [prompts.to_length(prompt, options.context) for prompt in ids]
        longest = max(len(prompt) for prompt in ids) + options.max_tokens
        if longest > config.max_model_len:
            raise BadArgument(
                f"argument --max-tokens: '{options.max_tokens}' with the longest "
                f"prompt makes {longest} tokens; allowed values: at most "
                f"{config.max_model_len} tokens in all (max_model_len)"
            )
        return ids

    def rpc(self, method: str | Callable[..., Any], *arguments: Any) -> Any:
        """Calls a method of NworWorkerExtension, or a function of the worker, on all
        workers; the first's result. By the executor: the KV audit looks at the weights
        after an RPC of the engine's user, and a measured step would include that."""
        core = self._engine.engine_core.engine_core
        return core.model_executor.collective_rpc(method, args=arguments)[0]

    def report(self) -> dict[str, Any]:
        """NworWorkerExtension.nwor_report of the first worker."""
        return self.rpc("nwor_report")

    def run(self, *arms: Arm, times: bool = False, turn_steps: int = TURN_STEPS) -> Run:
        """Runs all requests once, in one arm, or in several that take turns of so many
        steps; only a run of one arm reports NWOR's counts. times: keeps the host times
        of begin and commit, which costs some microseconds a step. Raises EngineFailed:
        an arm needs NWOR, and nothing is protected in this engine."""
        assert not self._engine.has_unfinished_requests()
        self._switch(arms[0], times)
        if self.options.cached_prompts and self._cached is not self.prompts:
            self._cached = self.prompts
            self._serve(arms[:1], turn_steps)
        self.rpc("nwor_reseed", SEED)
        gc.collect()
        before, counted = self.report(), self._counters()
        self._num_runs += 1
        finished, step_s = self._serve(arms, turn_steps)
        after, counters = self.report(), self._counters()
        num_found = counters.get(_HITS, 0) - counted.get(_HITS, 0)
        share = num_found / sum(map(len, self.prompts))  # no prompt's end is found
        if self.options.cached_prompts and share < 0.5:
            text = f"{share:.0%} of the tokens were in the cache; allowed: 50% or more"
            raise EngineFailed(f"--cached-prompts: {text}")
        positions = (of.get(_PER_POSITION, ()) for of in (counted, counters))
        accepted = [int(b - a) for a, b in zip_longest(*positions, fillvalue=0)]
        drafts: dict[str, Any] = {
            name: int(counters.get(theirs, 0) - counted.get(theirs, 0))
            for name, theirs in _DRAFTS.items()
        }
        is_protected = len(arms) == 1 and arms[0].hooked and after["counters"]
        return Run(
            outputs=[finished[index][0] for index in sorted(finished)],
            step_s=step_s,
            num_steps=[finished[index][1] for index in sorted(finished)],
            drafts=drafts | {"accepted_per_position": accepted},
            nwor=_done(before, after) if is_protected else None,
        )

    def _switch(self, arm: Arm, times: bool) -> None:
        """Sets the hooks as `arm` has them, from the other state, which invalidates
        Python's lookup caches of the same classes: all turns start alike."""
        if self.options.nwor_mode == "off" and not self.options.audits:
            return  # never loaded: there is nothing to take off
        from vllm_nwor.base import wrap as _wrap

        for hooked in (not arm.hooked, arm.hooked):
            if self.rpc("nwor_set_hooked", hooked, arm.stages, times) is not hooked:
                raise EngineFailed(
                    "NWOR is not active in this engine "
                    f"(VLLM_NWOR_MODE={self.options.nwor_mode}): {self.why_not()}"
                )
            (_wrap.rehook if hooked else _wrap.unhook)()
        if arm.hooked and arm.audit_mib is not None:
            self.rpc("nwor_set_audit", arm.audit_mib)

    def why_not(self) -> str:
        """The reasons that the runner recorded for the modes of its groups."""
        reasons = {
            f"{info['requested']} resolved to {info['resolved']}, {info['reason']}"
            for info in self.report()["groups"]
        }
        return "; ".join(sorted(reasons)) or "the plugin did not hook the model runner"

    def _serve(
        self, arms: Sequence[Arm], turn_steps: int
    ) -> tuple[dict[int, tuple[list[int], int]], list[float]]:
        """Adds the requests, then steps until all have finished: output and number of
        steps of each, and the steps' durations; that of a turn's first one includes the
        change of hooks."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options, engine = self.options, self._engine
        for index, ids in enumerate(self.prompts):
            parameters = SamplingParams(
                temperature=0,
                max_tokens=options.max_tokens,
                seed=SEED + index,
                ignore_eos=options.ignore_eos or self.target.random_weights,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # Loads would come at other times, and change which requests share a step.
            salt = "all" if options.cached_prompts else f"{self._num_runs}"
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            engine.add_request(f"{self._num_runs}-{index}", prompt, parameters)
        finished: dict[int, tuple[list[int], int]] = {}
        step_s: list[float] = []
        before = time.perf_counter()
        while engine.has_unfinished_requests():
            turn, place = divmod(len(step_s), turn_steps)
            if turn > 0 and place == 0 and len(arms) > 1:
                self._switch(arms[turn % len(arms)], times=False)
            done = engine.step()
            now = time.perf_counter()
            step_s.append(now - before)
            before = now
            for output in done:
                if output.finished:
                    index = int(output.request_id.split("-")[1])
                    ids = list(output.outputs[0].token_ids)
                    finished[index] = (ids, len(step_s))
        for _ in range(_DRAIN_STEPS):
            engine.step()
        return finished, step_s

    def _counters(self) -> dict[str, Any]:
        """vLLM's metrics by name: a number, or a list of numbers."""
        metrics = {one.name: vars(one) for one in self._engine.get_metrics()}
        return {k: v.get("values", v.get("value", 0)) for k, v in metrics.items()}

    def close(self) -> None:
        """Stops the engine and gives back its memory."""
        self._engine.engine_core.shutdown()
        del self._engine


def _done(before: Mapping[str, Any], after: Mapping[str, Any]) -> NworDone:
    """What two reports of NworWorkerExtension differ in."""
    old = before["counters"]
    counts = {name: int(n - old[name]) for name, n in after["counters"].items()}
    # Windows are about alike: those without shadow blocks have their share of drafts.
    staged = counts["shadow_windows"] / max(counts["windows"], 1)
    logged = round(counts["staged"] * (1 - staged))
    counts["logged_bytes"] = logged * int(after["log_bytes_per_draft"])
    begin, commit = after["begin_ns"], after["commit_ns"]
    return NworDone(counts, [ns / 1e3 for ns in begin], [ns / 1e3 for ns in commit])


def _sentence(error: BaseException) -> str:
    """The last line of an error that says something, without pydantic's appendix; of
    pydantic's, with the one before, which names the argument."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    found = [line for line in lines if "pydantic.dev" not in line]
    if not found:
        return type(error).__name__
    return ": ".join(found[-2 if "validation error" in found[0] else -1 :])
