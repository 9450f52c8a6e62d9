# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers on vLLM's methods: checked, idempotent, all or nothing.

A hook file lists what it wraps as `HookTarget` rows (its LEDGER) and calls
`install_all`. Before the first wrapper goes in, every target's signature is compared
with what the wrappers rely on, so a vLLM that has moved on is refused by name instead
of being half patched. vLLM's own function stays reachable as `__wrapped__`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class HostMismatch(RuntimeError):
    """The installed vLLM lacks something that a hook relies on."""


@dataclass(frozen=True)
class HookTarget:
    """One wrapped function of vLLM.

    module, qualname: where it is, e.g. "GPUModelRunner._sample".
    params: its first parameters, in order, `self` included: those that the wrapper
        reads. Further ones are passed through unseen.
    why, delete_when: for the people who maintain this.
    """

    module: str
    qualname: str
    params: tuple[str, ...]
    why: str
    delete_when: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"


def argument(
    target: HookTarget, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The value passed for parameter `name` of `target` (a method: `self` is not in
    `args`), or None where the caller left it to its default."""
    index = target.params.index(name) - 1
    return args[index] if index < len(args) else kwargs.get(name)


def check(target: HookTarget, module: ModuleType) -> None:
    """Raises HostMismatch unless `module` has `target` with the expected parameters."""
    owner: Any = module
    for part in target.qualname.split("."):
        owner = getattr(owner, part, None)
    if owner is None:
        raise HostMismatch(f"{target.name} does not exist in this vLLM")
    found = tuple(inspect.signature(owner).parameters)
    if found[: len(target.params)] != target.params:
        raise HostMismatch(
            f"{target.name} has parameters ({', '.join(found)}); "
            f"expected it to begin with ({', '.join(target.params)})"
        )


def install_all(module: ModuleType, wrappers: Mapping[HookTarget, Wrapper]) -> None:
    """Wraps each target found in `module`; a second call changes nothing.

    Raises:
        HostMismatch: before anything was wrapped.
    """
    for target in wrappers:
        check(target, module)
    for target, wrapper in wrappers.items():
        owner_name, _, name = target.qualname.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        current = inspect.getattr_static(owner, name)
        if getattr(current, "_self_nwor_target", None) == target.name:
            continue
        wrapped: Any = wrapt.FunctionWrapper(current, wrapper)
        wrapped._self_nwor_target = target.name
        setattr(owner, name, wrapped)
