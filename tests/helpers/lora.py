# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_nwor.audit.conformance import make_adapter


def lora(folder: Path, number: int, model: str | Path, name: str | None = None) -> Any:
    """A LoRARequest for the Llama in the folder `model`, as make_adapter, written to
    `folder`. name: by default it has the number."""
    from vllm.lora.request import LoRARequest

    path = make_adapter(folder / f"lora{number}", number, model)
    return LoRARequest(name or f"lora{number}", number, path)
