# SPDX-License-Identifier: Apache-2.0
"""What the LoRA adapters of a worker are: digests of their content. Only for the audit.

Adapters come from files and, where frameworks replace vLLM's loader, from tensors. All
pass LoRAModelManager._add_adapter: when a request needs one for the first time, when
one comes back that vLLM had evicted, and when one is replaced under its number. A name,
a path or a number says nothing of the content, so every byte is read each time: an
adapter is small, and its load has just read it.

A digest is of the tensors as they were given, before vLLM scales and packs them, with
each layer's rank and scaling. Each rank has its own: with expert parallelism one that
is of its own experts. vLLM's releases up to 0.32 load an adapter with load_inplace=True
in every step, and every one of those loads is read here.

Not seen: an adapter whose tensors are changed in place after it was loaded.
"""

from __future__ import annotations

import hashlib
import itertools
from types import ModuleType
from typing import Any

import torch

from ..base.errors import report_failure
from ..base.wrap import Wrapped, argument, install_all, is_installed
from ..step import LoadedAdapters
from .ledger import ADD_ADAPTER

UNREAD = "audit: a LoRA adapter could not be read; this counts as a change of it"

_num_unread = itertools.count()


def install(module: ModuleType) -> None:
    """Wraps the manager in `module`. Raises HostMismatch."""
    install_all(module, WRAPPERS)


def watch(runner: Any) -> LoadedAdapters | None:
    """Those that the runner's worker loads from now on; None without LoRA, or without
    the audit."""
    manager = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
    if manager is None or not is_installed(ADD_ADAPTER):
        return None
    found = manager.nwor_adapters = LoadedAdapters()
    return found


def content_of(lora: Any) -> str:
    """A digest of vLLM's LoRAModel: equal for equal tensors, in whatever order and
    layout they are. Waits for the device, if they are on one."""
    layers = {**lora.loras, **(getattr(lora, "modules_to_save", None) or {})}
    found = hashlib.sha256()  # faster than others where the processor has it
    for name, layer in sorted(layers.items()):
        for field, value in sorted(vars(layer).items()):
            parts = value if isinstance(value, list | tuple) else [value]
            for place, part in enumerate(parts):
                if isinstance(part, torch.Tensor):
                    about = tuple(part.shape), str(part.dtype)
                    found.update(repr((name, field, place, about)).encode())
                    data = part.detach().contiguous().view(-1).view(torch.uint8)
                    found.update(data.cpu().numpy().data)
                elif isinstance(part, int | float):
                    found.update(repr((name, field, place, part)).encode())
    return found.hexdigest()


def _add_adapter(wrapped: Wrapped, manager: Any, args: Any, kwargs: Any) -> Any:
    found: LoadedAdapters | None = getattr(manager, "nwor_adapters", None)
    if found is not None:
        lora = argument(ADD_ADAPTER, "lora", args, kwargs)
        try:
            content = content_of(lora)
        except Exception as error:
            content = f"unread {next(_num_unread)}"
            report_failure(UNREAD, error)
        found.digests[lora.id] = content
        found.news.add(lora.id)
    return wrapped(*args, **kwargs)


WRAPPERS = {ADD_ADAPTER: _add_adapter}
