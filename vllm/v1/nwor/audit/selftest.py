# SPDX-License-Identifier: Apache-2.0
"""The audit against a real vLLM engine on the CPU, with faults planted on purpose.

A small model with random weights, made here: nothing is downloaded. One engine, mode
cow, all bytes compared in each step. First a clean run, in which nothing may be found;
then one run for each of `faults`, in which the first finding of the class expected must
name the layer, the slot and the writer.

It needs `VLLM_NWOR_*` and vLLM's own variables set before vLLM is imported, so that it
runs in a process of its own, which sets them (__main__.py).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from . import startup
from .faults import FAULTS
from .findings import Finding
from .state import Audit

VOCAB_SIZE = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def prompt(seed: int, length: int) -> list[int]:
    """Phrases that come again, so that drafts are made, and most are wrong."""
    draw = random.Random(seed)
    phrase = [draw.randrange(3, 500) for _ in range(7)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += phrase[: draw.randrange(3, 8)]
        tokens.append(draw.randrange(3, 500))
    return tokens[:length]


class Bench:
    """One engine, its audit, and what is where in its caches."""

    block_size = 32

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if not current_platform.is_cpu():
            raise RuntimeError(
                "the self-test needs a vLLM for CPUs; this one is for "
                f"{current_platform.device_type}"
            )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            arguments = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=256,
                block_size=self.block_size,
                num_gpu_blocks_override=13,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                enable_prefix_caching=True,
                disable_log_stats=True,
                seed=0,
                speculative_config={
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_min": 1,
                    "prompt_lookup_max": 3,
                },
            )
            # As beside a KV connector whose transfers are known.
            with patch.object(startup, "_num_stored", return_value=1):
                self.llm = LLMEngine.from_engine_args(arguments)
        core: Any = self.llm.engine_core
        executor = core.engine_core.model_executor
        self.runner: Any = executor.driver_worker.worker.model_runner
        state = self.runner.__dict__.get("nwor_audit")
        if state is None:
            raise RuntimeError("the audit refused this engine; its log says why")
        self.audit: Audit = state.audit
        self.found = state.findings.last
        self.layers = self.audit.groups[0].layers
        self.scheduler = core.engine_core.scheduler
        self.num_steps = 0
        # Requests.
        self.added: list[str] = []
        self.preempted: set[str] = set()
        self.with_hits: set[str] = set()
        self._spoil_drafts()

    def _spoil_drafts(self) -> None:
        """Makes the last draft of each request a wrong one: something is rejected."""
        propose = self.runner.drafter.propose

        def spoiled(*args: Any, **kwargs: Any) -> list[list[int]]:
            drafts = list(map(list, propose(*args, **kwargs)))
            for tokens in filter(None, drafts):
                tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
            return drafts

        self.runner.drafter.propose = spoiled

    def add(self, name: str, tokens: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        how = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(max_tokens=max_tokens, **how)
        self.added.append(name)
        self.llm.add_request(name, {"prompt_token_ids": list(tokens)}, params)

    def add_prompt(self, name: str, seed: int, length: int, max_tokens: int) -> None:
        self.add(name, prompt(seed, length), max_tokens)

    def start(self) -> None:
        """Two requests, each with two full blocks and more, a few steps old."""
        self.add_prompt("one", 1, 75, 40)
        self.add_prompt("two", 2, 70, 40)
        self.step(4)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.llm.has_unfinished_requests():
                outputs = self.llm.step()
                hits = (x.request_id for x in outputs if x.num_cached_tokens)
                self.with_hits.update(hits)
                known = self.scheduler.requests
                self.preempted.update(x for x in known if known[x].num_preemptions)
                self.num_steps += 1

    def abort(self) -> None:
        self.llm.abort_request(self.added)
        self.added.clear()

    def blocks_a_step(self, count: int) -> AbstractContextManager[Any]:
        """So many blocks' bytes are compared in a step, not all."""
        return patch.object(self.audit, "_num_scanned", count)

    def clear(self) -> None:
        """Forgets all blocks and all findings. Caches are filled anew: a slot may
        not hold by chance what is written next."""
        self.llm.reset_prefix_cache()
        for index in range(len(self.layers)):
            self.bytes(index).random_(0, 0x40)
        self.audit.forget_cache()
        self.audit.snapshot()
        self.found.clear()

    @property
    def table(self) -> Any:
        return self.runner.input_batch.block_table

    def row(self, name: str) -> int:
        """Of a request, by the name that vLLM has lengthened."""
        ids = self.runner.input_batch.req_ids
        return next(i for i, key in enumerate(ids) if key.startswith(f"{name}-"))

    def slot(self, name: str, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        block = int(self.table[0].block_table.np[self.row(name), index])
        return block * self.block_size + offset

    def next_slot(self) -> int:
        """In a step: the first that its table has for request "one" in it."""
        computed = self.runner.input_batch.num_computed_tokens_cpu
        return self.slot("one", int(computed[self.row("one")]))

    def bytes(self, index: int) -> torch.Tensor:
        """The storage of a layer's cache as [bytes] uint8."""
        storage = self.layers[index].kv_cache.untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def runs(self, index: int, slot: int) -> list[torch.Tensor]:
        """[bytes] uint8: each run of a slot in a layer's cache."""
        layout, cache = self.layers[index].layout, self.layers[index].kv_cache
        first = slot // layout.block_size * layout.block_stride
        first += cache.storage_offset() * cache.element_size()
        runs = (
            layout.row_runs(slot)
            if layout.runs is None
            else layout.runs[slot % layout.block_size]
        )
        of_block = self.bytes(index)[first:]
        return [of_block[start : start + length] for start, length in runs.tolist()]


def clean_run(bench: Bench) -> list[Finding]:
    """Batches, chunked prefill, preemption, prefix hits, also in the step that writes
    them, aborts, names used again. What was found."""
    shared = prompt(9, 80)
    for number in range(30):
        tail = prompt(20 + number, 10 + 7 * (number % 9))
        bench.add(f"clean{number}", shared[: 20 * (number % 5)] + tail, 48)
        if number % 6 == 1:  # the same text in the same step
            bench.add(f"twin{number}", shared + prompt(1, 20), 120)
            bench.add(f"other{number}", shared + prompt(1, 20), 120)
        bench.step(9)
        if number % 5 == 4:
            bench.llm.abort_request([f"clean{number}"])
            bench.add(f"clean{number}", tail, 20)
    while bench.llm.has_unfinished_requests():
        bench.step()
    return list(bench.found)


def run(say: Callable[[str], None], ready: Callable[[], None]) -> bool:
    """Whether the audit is what it says it is; `say` gets a line for each check. ready:
    called once the engine has started."""
    bench = Bench()
    ready()
    found = clean_run(bench)
    totals = bench.audit.totals()
    num_preempted, num_with_hits = len(bench.preempted), len(bench.with_hits)
    has_looked = min(totals["identities"], totals["contents"]) > 0
    passed = not found and has_looked and min(num_preempted, num_with_hits) > 0
    say(
        f"{'ok  ' if passed else 'FAIL'} clean run: {len(found)} findings in "
        f"{bench.num_steps} steps; compared: {totals['identities']} identities, the "
        f"bytes of {totals['contents']} slots; {num_preempted} requests were "
        f"preempted, {num_with_hits} found a cached prefix"
    )
    names = [layer.name for layer in bench.layers]
    num_found = 0
    for fault, expected in FAULTS.items():
        bench.clear()
        bench.start()
        slots = fault(bench)
        bench.step(5)
        bench.abort()
        of_class = [finding for finding in bench.found if finding.kind == expected.kind]
        is_right = bool(of_class) and expected.matches(of_class[0], slots, names)
        num_found += is_right
        (text, *_) = (fault.__doc__ or "").splitlines()
        say(f"{'ok  ' if is_right else 'FAIL'} {fault.__name__}: {text}")
        if is_right:
            say(f"     {of_class[0].line()}")
        else:
            others = [finding.line() for finding in bench.found][:4]
            say(f"     expected {expected} at {slots}; found {others}")
    passed = passed and num_found == len(FAULTS)
    say(
        f"{bench.num_steps} steps; {'passed' if passed else 'FAILED'}: {num_found} of "
        f"{len(FAULTS)} planted faults found; the ERROR lines above are intended"
    )
    return passed
