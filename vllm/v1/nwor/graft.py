# SPDX-License-Identifier: Apache-2.0
"""The decorator that a fork of vLLM has on each function that a LEDGER names, where
tools/apply_to_vllm.py puts it:

    from vllm.v1.nwor.graft import hook_for
    nwor_hook = hook_for(__name__)

        @nwor_hook("GPUModelRunner._sample")
        def _sample(self, logits, spec_decode_metadata):

It puts on the wrappers that the plugin would, so that no plugin is needed. The modes
are read when vLLM's module is imported. While both are off it returns what it is given:
a call costs nothing more, and nothing but the modes' reader is imported. Otherwise
the module's source is compared first, and a function that has moved on, or has lost its
decorator, is refused by name with all others of the module, as the plugin does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plugin
from .config import NworConfig

if TYPE_CHECKING:
    from .hooks._wrap import HookTarget, UnfinishedModule

Decorator = Callable[[Any], Any]


def hook_for(module: str) -> Callable[[str], Decorator]:
    """The decorator for the module of vLLM that is being imported; it takes the name
    of a function in it, as the ledger has it.

    Raises:
        NworConfigError: a bad `VLLM_NWOR_*` value, in any mode.
        HostMismatch: a function is not as expected, under VLLM_NWOR_STRICT.
    """
    config = NworConfig.from_env()
    wanted = [hooks[module] for hooks in plugin.hooks_of(config) if module in hooks]
    if not wanted:
        return lambda name: lambda function: function
    _check_host()
    unfinished = _unfinished(module)
    for hook in wanted:
        plugin._guarded(hook)(unfinished)
    return lambda name: lambda function: _hooked(unfinished, name, function)


_check_host = cache(plugin._check_host)


def _unfinished(module: str) -> UnfinishedModule:
    from .hooks._wrap import HostMismatch, UnfinishedModule, refused
    from .hooks.source import Mismatch, Tree, check_decorated, files_of

    file = getattr(sys.modules[module], "__file__", None) or ""
    tree = Tree(files_of(Path(file).parents[module.count(".")]))

    def check_source(target: HookTarget) -> None:
        try:
            check_decorated(target, tree)
        except Mismatch as mismatch:
            refused[module] = str(mismatch)
            raise HostMismatch(str(mismatch)) from None

    return UnfinishedModule(module, check_source)


def _hooked(module: UnfinishedModule, name: str, function: Any) -> Any:
    from .hooks._wrap import hook_function

    host = sys.modules[module.__name__]
    for target, wrapper in module.wrappers.items():
        if target.qualname == name:
            if not isinstance(function, type):
                return hook_function(host, target, function, wrapper)
            attribute = name.rpartition(".")[2]  # __init__, of a dataclass
            init = vars(function)[attribute]
            setattr(function, attribute, hook_function(host, target, init, wrapper))
    return function
