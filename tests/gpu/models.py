# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the GPU tests: configurations and a tokenizer, no weights.

vLLM loads them with load_format="dummy"; `worker.GpuTestExtension` then gives them
random weights of a useful size. The tokenizer knows the printable ASCII characters, one
token each, which is enough for grammars. Shapes are the smallest that the kernels take:
head size 64 for FlashAttention, DeepSeek's 512 + 64 for the MLA ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 128
PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")
NUM_LAYERS = 3

_SHARED: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_LLAMA = _SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mlp_bias": False,
}
# No layer is a mixture of experts: all come before first_k_dense_replace.
_MLA = _SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 99,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
# In one pass, all drafts of a request; a low-rank head then lets each know the one
# before it, and another says how likely each is to be accepted.
_DSPARK = _SHARED | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "markov_rank": 32,
    "enable_confidence_head": True,
    "dflash_config": {"mask_token_id": PAD, "target_layer_ids": [0, 1]},
}
CONFIGS = {
    "llama": _LLAMA,
    "draft": _LLAMA | {"num_hidden_layers": 1},
    "eagle": _LLAMA | {"num_hidden_layers": 1},
    "mla": _MLA,
    "dspark": _DSPARK,
}


def make(root: Path) -> None:
    """Writes CONFIGS and their tokenizer below `root`, a folder each."""
    for name, config in CONFIGS.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        _make_tokenizer(folder)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level BPE without merges: Ġ is the space, Ċ the line feed.
    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
