# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers on vLLM's methods: checked, idempotent, all or nothing.

A hook file lists what it wraps as `HookTarget` rows (its LEDGER) and calls
`install_all`. Before the first wrapper goes in, every target's signature is compared
with what the wrappers rely on, so a vLLM that has moved on is refused by name instead
of being half patched. vLLM's own function stays reachable as `__wrapped__`.

What was installed in this process is kept, so that `unhook` can take all of it off a
live engine and `rehook` put it on again: benches compare with vLLM's own code that way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

# vLLM's own function, and what is called in its place: with it, its `self`, and what it
# was called with.
Wrapped = Callable[..., Any]
Wrapper = Callable[[Wrapped, Any, tuple[Any, ...], dict[str, Any]], Any]


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
    """The value passed for parameter `name` of `target` (of a method: `self` is not in
    `args`), or None where the caller left it to its default."""
    index = target.params.index(name) - (target.params[0] == "self")
    return args[index] if index < len(args) else kwargs.get(name)


# Modules of a fork that graft.py refused -> why. The plugin does not hook them, either.
refused: dict[str, str] = {}


class UnfinishedModule(ModuleType):
    """Stands for a module of vLLM that is being imported, in a fork that has our
    decorator on its functions (graft.py). install_all only leaves here what is to be
    wrapped; `hook_function` does it when the function is there.

    check_source: `check`, on the module's source.
    """

    def __init__(self, name: str, check_source: Callable[[HookTarget], None]) -> None:
        super().__init__(name)
        self.check_source = check_source
        self.wrappers: dict[HookTarget, Wrapper] = {}


def check(target: HookTarget, module: ModuleType) -> None:
    """Raises HostMismatch unless `module` has `target` with the expected parameters."""
    if isinstance(module, UnfinishedModule):
        module.check_source(target)
        return
    if module.__name__ in refused:
        raise HostMismatch(refused[module.__name__])
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


_INHERITED = object()


@dataclass
class _Hook:
    """A wrapper in its place, `target` in `module`. original: what the class or module
    itself had there, _INHERITED if only a base had it. wrapper: what is put on.
    """

    module: ModuleType
    target: HookTarget
    original: Any = None
    wrapper: Any = None

    @property
    def owner(self) -> Any:
        """The class or module whose attribute `name` it is."""
        name = self.target.qualname.rpartition(".")[0]
        return getattr(self.module, name) if name else self.module

    @property
    def name(self) -> str:
        return self.target.qualname.rpartition(".")[2]

    def is_on(self) -> bool:
        """Raises HostMismatch if something that is not ours is in the place."""
        found = vars(self.owner).get(self.name, _INHERITED)
        if found is not self.wrapper and found is not self.original:
            raise HostMismatch(
                f"{self.target.name} is {found!r}, which somebody put over NWOR's hook "
                "or in its place; it must go first"
            )
        return found is self.wrapper

    def put_on(self) -> None:
        setattr(self.owner, self.name, self.wrapper)

    def take_off(self) -> None:
        if self.original is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


# Everything that install_all has put into this process.
_hooks: list[_Hook] = []


def install_all(module: ModuleType, wrappers: Mapping[HookTarget, Wrapper]) -> None:
    """Wraps each target found in `module`; a second call changes nothing, or puts on
    again what `unhook` took off.

    Raises:
        HostMismatch: before anything was wrapped.
    """
    for target in wrappers:
        check(target, module)
    if isinstance(module, UnfinishedModule):
        module.wrappers.update(wrappers)
        return
    for target, wrapper in wrappers.items():
        place = (module, target.qualname)
        for hook in _hooks:
            if (hook.module, hook.target.qualname) == place:
                hook.is_on()
                break
        else:
            hook = _Hook(module, target)
            function = inspect.getattr_static(hook.owner, hook.name)
            hook.original = vars(hook.owner).get(hook.name, _INHERITED)
            hook.wrapper = _hooked(target, function, wrapper)
            _hooks.append(hook)
        hook.put_on()


def hook_function(
    module: ModuleType, target: HookTarget, function: Any, wrapper: Wrapper
) -> Any:
    """What to put in the place of `function`, which becomes `target` in `module` later;
    as if install_all had wrapped it there."""
    hooked = _hooked(target, function, wrapper)
    _hooks.append(_Hook(module, target, function, hooked))
    return hooked


def _hooked(target: HookTarget, function: Any, wrapper: Wrapper) -> Any:
    """`function` with `wrapper` on it. A method gets a plain function: a step calls
    seven of them, and wrapt's objects take it two or three microseconds more each."""
    if target.params[0] != "self" or not inspect.isfunction(function):
        return wrapt.FunctionWrapper(function, wrapper)

    @functools.wraps(function)
    def hooked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return wrapper(function.__get__(self), self, args, kwargs)

    return hooked


def is_installed(target: HookTarget) -> bool:
    """Whether install_all has wrapped `target` in this process."""
    return any(hook.target == target for hook in _hooks)


def unhook() -> None:
    """Takes all wrappers off: until `rehook`, vLLM's classes in this process have the
    very attributes that they had before. A second call changes nothing.

    Only between steps: what the first hook of a step leaves waits for its last one.
    What hooks left on instances (`nwor_state` of a runner, `nwor_stats` of a scheduler)
    stays; nothing of vLLM's reads it. Not undone, because no step passes it: memory
    that was reserved, counters that were created, and what finds modules on import.

    Raises:
        HostMismatch: something else lies over a wrapper; nothing was taken off.
    """
    for hook in [hook for hook in _hooks if hook.is_on()]:
        hook.take_off()


def rehook() -> None:
    """Undoes `unhook`, under its conditions. A second call changes nothing.

    Raises:
        HostMismatch: something else took a wrapper's place; nothing was put on.
    """
    for hook in [hook for hook in _hooks if not hook.is_on()]:
        hook.put_on()
