# SPDX-License-Identifier: Apache-2.0
"""Turns a Llama model in a GGUF file into a Hugging Face directory.

Weights are dequantised to bf16 and the tokenizer is rebuilt from the file's own
vocabulary, merges and chat template; nothing is fetched from anywhere. It knows the
tensors and the tokenizer of SmolLM2 and refuses others by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch
    from gguf import GGUFReader

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)

# GGUF's name of a layer's tensor -> Hugging Face's.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# (tensors done, out of)
Progress = Callable[[int, int], None]


class RecipeError(RuntimeError):
    """A model cannot be made; the message says what is missing."""


def convert(gguf: Path, out: Path, progress: Progress) -> None:
    """Writes weights, configuration and tokenizer into the existing folder `out`."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    config = _llama_config(reader)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name, kind = _huggingface_name(tensor.name)
        array = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            array = unpermute_rope(array, heads[kind])
        # bfloat16 makes a new tensor: the reader's arrays are a mapped file.
        weights[name] = torch.from_numpy(array.copy()).to(torch.bfloat16)
        progress(done, len(reader.tensors))
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    write_json(out / "config.json", config)
    _write_tokenizer(reader, out)


def unpermute_rope(weight: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Undoes GGUF's order of a query or key projection's rows.

    GGUF interleaves the halves that rotary embedding pairs (x0 y0 x1 y1 ...); Hugging
    Face keeps them apart (x0 x1 ... y0 y1 ...). Within a head of 4 rows, GGUF's
    [0, 2, 1, 3] becomes [0, 1, 2, 3].

    weight: [num_heads * head_dim, hidden]. Returns a new array of that shape.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _huggingface_name(name: str) -> tuple[str, str]:
    """GGUF tensor name -> (Hugging Face name, GGUF's kind), or RecipeError."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", ""
    if name == "output_norm.weight":
        return "model.norm.weight", ""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        kind = parts[2]
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[kind]}.weight", kind
    raise RecipeError(f"a tensor that is not known here: {name}")


def _field(reader: GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    if found is None:
        raise RecipeError(f"the GGUF file lacks the field {key}")
    return found.contents()


def _llama_config(reader: GGUFReader) -> dict[str, Any]:
    hidden = _field(reader, "llama.embedding_length")
    num_heads = _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // num_heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        # The file holds the float32 nearest to a decimal; say the decimal.
        "rms_norm_eps": float(
            f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"
        ),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(reader: GGUFReader, out: Path) -> None:
    """Byte-level BPE with single digits, which GGUF calls "smollm"."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [
        tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
        **special,
    }
    write_json(out / "tokenizer_config.json", config)
    ids = {
        f"{name}_token_id": vocabulary[special[f"{name}_token"]]
        for name in ("bos", "eos", "pad")
    }
    write_json(out / "generation_config.json", ids)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
