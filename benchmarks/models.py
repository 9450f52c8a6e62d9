# SPDX-License-Identifier: Apache-2.0
"""Which models a bench runs: the converted SmolLM2, a named shape, or the user's own.

`shape:NAME` is a configuration without weights: vLLM fills it with random ones
(`load_format="dummy"`), which is enough to time an engine of that shape. The files are
made in the cache folder; they hold no weights and no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import BadArgument
from benchmarks.files import write_json
from tools.setup.make_models import cache_dir

SHAPE = "shape:"
# Names that tools/setup/make_models.py gives to what it converts.
TARGET = "smollm2-135m"
DRAFTER = "smollm2-draft-26"

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# llama-8b and llama-1b have the sizes that Meta published for Llama 3.1 8B and
# Llama 3.2 1B; llama-8b-eagle is one layer of the first, as an EAGLE head is.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}
SHAPES["llama-8b-eagle"] = SHAPES["llama-8b"] | {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Model:
    """A model that vLLM can be given.

    location: directory or Hugging Face name. label: what reports call it.
    random_weights: True if it has no weights of its own, and no tokenizer.
    """

    location: str
    label: str
    random_weights: bool


def find(argument: str, value: str | None, default: str) -> Model:
    """The model that `value` names; None names `default` in the cache folder.

    argument: the option's name, for the message.

    Raises:
        BadArgument: no such shape or directory, or the default was not made yet.
    """
    if value is None:
        path = cache_dir() / "models" / default
        if not (path / "config.json").is_file():
            raise BadArgument(
                f"argument {argument}: the default model {default} is not in the "
                "cache folder; make it with `python tools/setup/make_models.py --only "
                f"{default}`, or name another model"
            )
        return Model(str(path), default, random_weights=False)
    if value.startswith(SHAPE):
        return _shape(argument, value)
    looks_like_path = value.startswith((".", "/", "~")) or value.count("/") != 1
    path = Path(value).expanduser()
    if (path / "config.json").is_file():
        return Model(str(path), path.resolve().name, random_weights=False)
    if looks_like_path or path.exists():
        raise BadArgument(
            f"argument {argument}: '{value}' holds no config.json; allowed values: a "
            "model's directory, a Hugging Face name (owner/name), or one of "
            + ", ".join(SHAPE + name for name in SHAPES)
        )
    return Model(value, value, random_weights=False)


def _shape(argument: str, value: str) -> Model:
    name = value.removeprefix(SHAPE)
    if name not in SHAPES:
        raise BadArgument(
            f"argument {argument}: '{value}' is not allowed; allowed shapes: "
            + ", ".join(SHAPE + known for known in SHAPES)
        )
    directory = cache_dir() / "shapes" / name
    write_json(directory / "config.json", SHAPES[name])
    return Model(str(directory), value, random_weights=True)
