# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers: checked before the first one goes in, idempotent, reversible."""

from functools import partial
from types import FunctionType, ModuleType

import pytest

from vllm_nwor.hooks import _wrap
from vllm_nwor.hooks._wrap import (
    HookTarget,
    HostMismatch,
    argument,
    install_all,
    rehook,
    unhook,
)


@pytest.fixture(autouse=True)
def nothing_else_is_hooked(monkeypatch):
    monkeypatch.setattr(_wrap, "_hooks", [])


def host() -> ModuleType:
    module = ModuleType("host")

    class Runner:
        def step(self, tokens, flag=False):
            return ("step", tokens, flag)

        def finish(self, tokens):
            return ("finish", tokens)

    module.Runner = Runner
    return module


def target(qualname="Runner.step", params=("self", "tokens")):
    return HookTarget("host", qualname, params, why="test", delete_when="never")


def doubling(wrapped, instance, args, kwargs):
    return ("wrapped", wrapped(*args, **kwargs))


def test_a_wrapper_sees_the_call_and_keeps_the_original():
    """A second install changes nothing, or puts on what was taken off."""
    module = host()
    original = module.Runner.step
    install_all(module, {target(): doubling})
    once = vars(module.Runner)["step"]
    assert type(once) is FunctionType  # a step calls it: not an object of wrapt's
    for prepare in (lambda: None, unhook):
        prepare()
        install_all(module, {target(): doubling})
        assert vars(module.Runner)["step"] is once
    assert module.Runner().step(3, flag=True) == ("wrapped", ("step", 3, True))
    assert module.Runner.step.__wrapped__ is original


IS_GONE = "does not exist in this vLLM"


@pytest.mark.parametrize(
    ("place", "params", "message"),
    [
        ("Runner.finish", "self, token_ids", "has parameters (self, tokens);"),
        ("Runner.step", "self, flag", "has parameters (self, tokens, flag);"),
        ("Runner.gone", "self, tokens", IS_GONE),
        ("Gone.step", "self, tokens", IS_GONE),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_wrapped(place, params, message):
    module = host()
    before = dict(vars(module.Runner))
    bad = target(place, tuple(params.split(", ")))
    expects = f" expected it to begin with ({params})" if message != IS_GONE else ""

    with pytest.raises(HostMismatch) as error:
        install_all(module, {target(): doubling, bad: doubling})

    assert str(error.value) == f"host.{place} {message}{expects}"
    assert dict(vars(module.Runner)) == before


def test_a_subclass_that_overrides_and_calls_super_is_wrapped_once():
    module = host()
    install_all(module, {target(): doubling})

    class Sub(module.Runner):
        def step(self, tokens, flag=False):
            return super().step(tokens + 1, flag)

    assert Sub().step(1) == ("wrapped", ("step", 2, False))


def test_argument_is_found_by_position_or_by_name():
    row = target(params=("self", "tokens", "flag"))

    assert argument(row, "flag", (1, True), {}) is True
    assert argument(row, "flag", (1,), {"flag": False}) is False
    assert argument(row, "flag", (1,), {}) is None


def test_unhooked_all_is_as_it_was_before_and_rehooked_as_after():
    module = host()

    class Sub(module.Runner):
        """Has `step` from its base."""

        @staticmethod
        def finish(tokens):
            return ("static", tokens)

    module.Sub = Sub

    def look():
        """What is in both classes, by identity; a staticmethod is made anew by none."""
        return [dict(vars(owner)) for owner in (module.Runner, Sub)]

    before = look()
    rows = target(), target("Sub.step"), target("Sub.finish", ("tokens",))
    install_all(module, dict.fromkeys(rows, doubling))
    hooked = look()
    for owner, name in ((0, "step"), (1, "step"), (1, "finish")):
        assert before[owner].get(name) is not hooked[owner][name]

    for _ in range(2):
        for switch, expected in ((unhook, before), (rehook, hooked)):
            switch()
            switch()
            assert look() == expected
            of_static = "wrapped" if switch is rehook else "static"
            assert Sub.finish(1)[0] == of_static
        unhook()
        assert Sub().step(1) == ("step", 1, False)


@pytest.mark.parametrize("switch", [unhook, rehook, install_all])
def test_what_somebody_put_over_a_hook_stays_and_so_do_all_hooks(switch, monkeypatch):
    module = host()
    finish = target("Runner.finish")
    install_all(module, {target(): doubling, finish: doubling})
    if switch is install_all:
        switch = partial(install_all, module, {finish: doubling})
    if switch is rehook:
        unhook()
    before = vars(module.Runner)["step"]

    def theirs(self, tokens): ...

    monkeypatch.setattr(module.Runner, "finish", theirs)

    with pytest.raises(HostMismatch, match=r"^host\.Runner\.finish is <.*theirs"):
        switch()

    assert vars(module.Runner)["step"] is before
    assert vars(module.Runner)["finish"] is theirs
