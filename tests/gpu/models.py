# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the GPU tests: configurations and a tokenizer, no weights.

vLLM loads them with load_format="dummy"; `worker.GpuTestExtension` then sets random
weights of a useful size. The tokenizer has one token for each printable ASCII
character, enough for grammars. Shapes are the smallest that the kernels support: head
size 64 for FlashAttention, DeepSeek's 512 + 64 for MLA, without mixtures of experts
(all layers come before first_k_dense_replace).
"""

import json
from pathlib import Path

import yaml


def make(root: Path) -> None:
    """Writes each configuration of models.yml, with the tokenizer, to a folder in
    `root`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    known = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text("utf-8"))
    settings, shared = known.pop("tokenizer"), known.pop("shared")
    special = [settings[f"{name}_token"] for name in ("pad", "bos", "eos")]
    # Byte-level BPE without merges: Ġ is the space, Ċ the line feed.
    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate((*special, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    for name, config in known.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shared | config))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
