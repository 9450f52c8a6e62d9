# SPDX-License-Identifier: Apache-2.0
"""From options to vLLM: the process's environment and the engine's arguments."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from benchmarks import prompts
from benchmarks.arguments import Options
from benchmarks.models import DRAFTER, TARGET, Model, find

EXTENSION = "benchmarks.worker_extension.NworWorkerExtension"
NGRAM_MIN, NGRAM_MAX = 2, 4
CPU_KV_CACHE_GIB = 1


def prepare_process(options: Options, device: str) -> None:
    """Sets the environment that vLLM and NWOR read when they are imported. Variables
    that the user set stay, except VLLM_NWOR_MODE and what --runner says."""
    os.environ["VLLM_NWOR_MODE"] = options.nwor_mode
    if options.audits:
        os.environ["VLLM_NWOR_AUDIT"] = "log"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if options.runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.runner == "v2"))
    defaults = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    if not options.verbose:
        defaults |= {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
    if device == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_CACHE_GIB)
    if options.model is None or os.path.isdir(options.model):
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not options.verbose:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def speculative_config(options: Options, draft_model: Model | None) -> dict[str, Any]:
    """vLLM's `speculative_config` for these options."""
    config: dict[str, Any] = {
        "method": options.method,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    if options.method.startswith("ngram"):
        config |= {"prompt_lookup_min": NGRAM_MIN, "prompt_lookup_max": NGRAM_MAX}
    if draft_model is not None:
        config["model"] = draft_model.location
    if options.acceptance is not None:
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(options.acceptance),
        }
    return config


def find_models(options: Options) -> tuple[Model, Model | None]:
    """Target and drafter (None: the method has none). Raises BadArgument."""
    target = find("--model", options.model, TARGET)
    drafter = None
    if options.draft_model is not None or options.method == "draft_model":
        drafter = find("--draft-model", options.draft_model, DRAFTER)
    return target, drafter


def engine_arguments(
    options: Options, device: str, target: Model, drafter: Model | None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    eager = options.enforce_eager
    arguments: dict[str, Any] = {
        "model": target.location,
        "speculative_config": speculative_config(options, drafter),
        "worker_extension_cls": EXTENSION,
        "enable_prefix_caching": False,
        "enforce_eager": device == "cpu" if eager is None else eager,
        "seed": options.seed,
        "load_format": "dummy" if target.random_weights else options.load_format,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_num_seqs": options.max_num_seqs or options.batch_size,
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "attention_backend": options.attention_backend,
        "hf_overrides": options.hf_overrides,
        "use_tqdm_on_load": options.verbose,
    }
    if target.random_weights:
        arguments["skip_tokenizer_init"] = True
        prompt = options.context or prompts.RANDOM_PROMPT_TOKENS
        needed = prompt + options.max_tokens + options.num_speculative_tokens
        arguments["max_model_len"] = options.max_model_len or -(-needed // 256) * 256
    if options.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = options.tensor_parallel_size
    if options.async_scheduling != "auto":
        arguments["async_scheduling"] = options.async_scheduling == "on"
    return {name: value for name, value in arguments.items() if value is not None}
