# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

RANK = 8


def lora(folder: Path, number: int, model: str | Path, name: str | None = None) -> Any:
    """A LoRARequest for the Llama in the folder `model`: random weights for v_proj,
    seeded by `number`, written to `folder`. name: by default it has the number."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    path = folder / f"lora{number}"
    path.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    settings["target_modules"] = ["v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(settings))
    config = json.loads((Path(model) / "config.json").read_text())
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // num_heads
    sizes = {
        "A": (RANK, hidden_size),
        "B": (config["num_key_value_heads"] * head_dim, RANK),
    }
    draw = torch.Generator().manual_seed(number)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{part}.weight": (
            torch.randn(size, generator=draw)
        )
        for layer in range(config["num_hidden_layers"])
        for part, size in sizes.items()
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest(name or f"lora{number}", number, str(path))
