# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on the CPU for the audit's self-test, with access to its caches by
request and position."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from . import build
from .state import Audit

VOCAB_SIZE = 512
NUM_DRAFTS = 4
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
    """Repeated phrases, so that ngram proposes drafts, most of them wrong."""
    draw = random.Random(seed)
    phrase = [draw.randrange(3, 500) for _ in range(7)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += phrase[: draw.randrange(3, 8)]
        tokens.append(draw.randrange(3, 500))
    return tokens[:length]


class Bench:
    block_size = 32

    def __init__(self, model: dict[str, Any] | str = MODEL, **arguments: Any) -> None:
        """model: a config.json, for random weights; or the folder of a model, or its
        name. arguments: EngineArgs other than below."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if not current_platform.is_cpu():
            raise RuntimeError(
                "the self-test needs a vLLM for CPUs; this one is for "
                f"{current_platform.device_type}"
            )
        with tempfile.TemporaryDirectory() as folder:
            defaults = {
                "model": model,
                "num_gpu_blocks_override": 13,
                "enable_prefix_caching": True,
                "max_num_batched_tokens": 128,
                "max_model_len": 256,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": NUM_DRAFTS,
                    "prompt_lookup_min": 1,
                    "prompt_lookup_max": 3,
                },
            }
            if isinstance(model, dict):
                (Path(folder) / "config.json").write_text(json.dumps(model))
                defaults |= {"model": folder, "load_format": "dummy"}
            engine_args = EngineArgs(
                skip_tokenizer_init=True,
                enforce_eager=True,
                block_size=self.block_size,
                max_num_seqs=8,
                disable_log_stats=True,
                seed=0,
                **defaults | arguments,
            )
            # As with a KV connector with known transfers, and a prefill instance.
            of: dict[str, Any] = {"_num_stored": lambda *_: 1}
            of |= {"_no_handovers": lambda *_: "", "secret_in": lambda *_: b"secret"}
            of["_num_digests"] = lambda *_: 8 + 128 // self.block_size
            unknown = patch.multiple(build, **of)
            with nullcontext() if engine_args.kv_transfer_config else unknown:
                self.llm = LLMEngine.from_engine_args(engine_args)
        core: Any = self.llm.engine_core
        executor = core.engine_core.model_executor
        self.runner: Any = executor.driver_worker.worker.model_runner
        self.observer = self.runner.nwor_state.named("audit")
        if self.observer is None:
            raise RuntimeError("the audit refused this engine; its log says why")
        self.audit: Audit = self.observer.audit
        self.found = self.observer.findings.last
        self.layers = self.audit.groups[0].layers
        self.names = [layer.name for layer in self.layers]
        self.scheduler = core.engine_core.scheduler
        self.num_steps = 0
        self.added: list[str] = []
        self.outputs: dict[str, Any] = {}
        self.preempted: set[str] = set()
        self.with_hits: set[str] = set()
        if engine_args.speculative_config:
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

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        max_tokens: int,
        salt: str | None = None,
        adapter: Any = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """adapter: a LoRARequest. transfer: kv_transfer_params."""
        from vllm import SamplingParams

        how = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        extra = {"kv_transfer_params": transfer} if transfer else None
        params = SamplingParams(max_tokens=max_tokens, extra_args=extra, **how)
        more = {"cache_salt": salt} if salt else {}
        text = {"prompt_token_ids": list(tokens)} | more
        self.added.append(name)
        self.llm.add_request(name, text, params, lora_request=adapter)

    def start(self) -> None:
        """Two requests, each with two full blocks and more, a few steps old."""
        self.add("one", prompt(1, 75), 40)
        self.add("two", prompt(2, 70), 40)
        self.step(4)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.llm.has_unfinished_requests():
                outputs = self.llm.step()
                self.outputs.update((output.request_id, output) for output in outputs)
                hits = (x.request_id for x in outputs if x.num_cached_tokens)
                self.with_hits.update(hits)
                known = self.scheduler.requests
                self.preempted.update(x for x in known if known[x].num_preemptions)
                self.num_steps += 1

    def abort(self) -> None:
        self.llm.abort_request(self.added)
        self.added.clear()

    def compared(self) -> dict[str, int]:
        """What the audit saw so far: none may be 0."""
        totals = self.audit.totals()
        return {
            "identities compared": totals["identities"],
            "slots compared byte by byte": totals["contents"],
            "requests preempted": len(self.preempted),
            "requests with a cached prefix": len(self.with_hits),
        }

    def blocks_a_step(self, count: int) -> AbstractContextManager[Any]:
        """So many blocks' bytes are compared in a step, not all."""
        return patch.object(self.audit, "_num_scanned", count)

    def clear(self) -> None:
        """Forgets all blocks and all findings. Refills the caches, so that no slot
        holds by chance the bytes that will be written to it."""
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
