# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers on vLLM's functions: checked, idempotent, all or nothing.

A hook file's WRAPPERS has a wrapper for each row of the ledger (`HookTarget`), and goes
to `install_all`. Before it installs the first wrapper, it compares every target's
signature with the one that the wrappers expect. So a changed vLLM is refused by name
and never half patched. vLLM's own function stays reachable as `__wrapped__`.

`unhook` removes all installed wrappers from a live engine, and `rehook` installs them
again: benchmarks compare with vLLM's own code that way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

# vLLM's own function, and its replacement, which gets that function, its `self`, and
# the call's arguments.
Wrapped = Callable[..., Any]
Wrapper = Callable[[Wrapped, Any, tuple[Any, ...], dict[str, Any]], Any]


class HostMismatch(RuntimeError):
    """The installed vLLM lacks something that a hook relies on."""


@dataclass(frozen=True)
class HookTarget:
    """One wrapped function of vLLM.

    module, qualname: where it is, e.g. "GPUModelRunner._sample".
    params: its first parameters, in order, `self` included: those that the wrapper
        reads. Others are passed through. "name?": some releases lack this parameter,
        and have no other one in its place.
    why, delete_when: for the people who maintain this.
    for_audit: wrapped only while the KV audit is on.
    on_object: the class keeps its own function; steps replace it on an object.
    """

    module: str
    qualname: str
    params: tuple[str, ...]
    why: str
    delete_when: str
    for_audit: bool = False
    on_object: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"

    def matches(self, found: tuple[str, ...]) -> str | None:
        """None if a function with the parameters `found` has the expected ones, or a
        sentence about the difference."""
        names = tuple(name.removesuffix("?") for name in self.params)
        num_needed = sum(not name.endswith("?") for name in self.params)
        first = found[: len(names)]
        if first == names[: len(first)] and len(first) >= num_needed:
            return None
        return (
            f"{self.name} has parameters ({', '.join(found)}); "
            f"expected it to begin with ({', '.join(self.params)})"
        )


def argument(
    target: HookTarget, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The value passed for parameter `name` of `target` (a method's `self` is not in
    `args`), or None if the caller did not pass it."""
    index = target.params.index(name) - (target.params[0] == "self")
    return args[index] if index < len(args) else kwargs.get(name)


def check(target: HookTarget, module: ModuleType) -> None:
    """Raises HostMismatch unless `module` has `target` with the expected parameters."""
    owner: Any = module
    for part in target.qualname.split("."):
        owner = getattr(owner, part, None)
    if not callable(owner):
        what = "does not exist" if owner is None else "is no function"
        raise HostMismatch(f"{target.name} {what} in this vLLM")
    found = tuple(inspect.signature(owner).parameters)
    if (mismatch := target.matches(found)) is not None:
        raise HostMismatch(mismatch)


_INHERITED = object()


class _Hook:
    """A wrapper and its place, an attribute of a class or a module. original: the
    attribute of that class itself, _INHERITED if only a base class has it. Creating
    one does not install it."""

    def __init__(self, module: ModuleType, target: HookTarget, wrapper: Wrapper):
        owner, _, self.name = target.qualname.rpartition(".")
        self.module, self.target = module, target
        self.owner: Any = getattr(module, owner) if owner else module
        self.original = vars(self.owner).get(self.name, _INHERITED)
        function = inspect.getattr_static(self.owner, self.name)
        self.wrapper = _hooked(target, function, wrapper)

    def is_on(self) -> bool:
        """Raises HostMismatch if other code has replaced the attribute."""
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


Target = TypeVar("Target", bound=HookTarget)
# Everything that install_all has put into this process.
_hooks: list[_Hook] = []


def install_all(module: ModuleType, wrappers: Mapping[Target, Wrapper]) -> None:
    """Wraps the targets that are in `module`. A second call changes nothing, or
    installs the wrappers again that `unhook` removed.

    Raises:
        HostMismatch: before anything was wrapped.
    """
    rows = {t: w for t, w in wrappers.items() if t.module == module.__name__}
    for target in rows:
        check(target, module)
    hooks = []
    for target, wrapper in rows.items():
        known = (h for h in _hooks if (h.module, h.target) == (module, target))
        hooks.append(next(known, None) or _Hook(module, target, wrapper))
    for hook in [hook for hook in hooks if not hook.is_on()]:
        hook.put_on()
    _hooks.extend(hook for hook in hooks if hook not in _hooks)


def _hooked(target: HookTarget, function: Any, wrapper: Wrapper) -> Any:
    """`function` with `wrapper` on it: a plain function. A step calls seven of them,
    and a wrapt object would cost two or three microseconds more for each."""
    if target.params[0] == "self":

        @functools.wraps(function)
        def hooked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return wrapper(function.__get__(self), self, args, kwargs)

    else:

        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return wrapper(function, None, args, kwargs)

    return hooked


def is_installed(target: HookTarget) -> bool:
    """Whether install_all has wrapped `target` in this process."""
    return any(hook.target == target for hook in _hooks)


def is_hooked(module: str) -> bool:
    """Whether a function of vLLM's module of that name is wrapped in this process."""
    return any(hook.target.module == module for hook in _hooks)


def extend(cls: Any, place: str, name: str) -> None:
    """Adds the field `name`, a dict or None, to the dataclass `cls`; place: its name in
    errors. __init__ does not take the field, and decoders that exist already ignore it.
    Raises HostMismatch if the class cannot have another field."""
    if not dataclasses.is_dataclass(cls) or "__slots__" in vars(cls):
        raise HostMismatch(f"{place} is not a dataclass without slots in this vLLM")
    kind, field = dict[str, Any] | None, dataclasses.field(default=None, init=False)
    (field,) = dataclasses.fields(
        dataclasses.make_dataclass("_", [(name, kind, field)])
    )
    if "__msgspec_cache__" in vars(cls):  # new decoders would use it
        delattr(cls, "__msgspec_cache__")
    cls.__dataclass_fields__[name] = field
    cls.__annotations__ = {**cls.__annotations__, name: kind}
    setattr(cls, name, None)


def unhook() -> None:
    """Removes all wrappers: until `rehook`, vLLM's classes in this process have their
    original attributes. A second call changes nothing.

    Call it only between steps: the last hook of a step completes what the first one
    started. Attributes that hooks set on instances (`nwor_state` of a runner,
    `nwor_stats` of a scheduler) stay; vLLM does not read them. Reserved memory, created
    counters and import hooks stay, too; no step uses them.

    Raises:
        HostMismatch: other code wrapped a wrapper; nothing was removed.
    """
    for hook in [hook for hook in _hooks if hook.is_on()]:
        hook.take_off()


def rehook() -> None:
    """Undoes `unhook`, under its conditions. A second call changes nothing. If the
    runner has made steps meanwhile, call its manager's `start_step` first.

    Raises:
        HostMismatch: other code took a wrapper's place; nothing was installed.
    """
    for hook in [hook for hook in _hooks if not hook.is_on()]:
        hook.put_on()
