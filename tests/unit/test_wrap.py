# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers: checked before the first one goes in, idempotent, reversible."""

from functools import partial
from types import FunctionType, ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nwor.base import wrap as _wrap
from vllm_nwor.base.wrap import (
    HookTarget,
    HostMismatch,
    argument,
    install_all,
    is_installed,
    rehook,
    unhook,
)


@pytest.fixture(autouse=True)
def nothing_else_is_hooked(monkeypatch):
    monkeypatch.setattr(_wrap, "_hooks", [])


def host() -> ModuleType:
    module = ModuleType("host")

    class Runner:
        data = 0

        def step(self, tokens, flag=False):
            return ("step", tokens, flag)

        def finish(self, tokens):
            return ("finish", tokens)

    class Sub(Runner):
        """Has `step` from its base."""

        @staticmethod
        def finish(tokens):
            return ("static", tokens)

    module.Runner, module.Sub = Runner, Sub
    return module


def target(qualname="Runner.step", params=("self", "tokens")):
    return HookTarget("host", qualname, params, why="test", delete_when="never")


def doubling(wrapped, instance, args, kwargs):
    return ("wrapped", wrapped(*args, **kwargs))


def test_a_wrapper_sees_the_call_and_keeps_the_original():
    module = host()
    original = module.Runner.step
    finish = target("Sub.finish", ("tokens",))
    install_all(module, {target(): doubling, finish: doubling})

    assert type(module.Runner.step) is FunctionType  # cheap to call
    assert module.Runner.step.__wrapped__ is original
    assert module.Runner().step(3, flag=True) == ("wrapped", ("step", 3, True))
    assert module.Sub().step(1) == ("wrapped", ("step", 1, False))  # once
    assert module.Sub.finish(1) == ("wrapped", ("static", 1))


IS_GONE = "does not exist in this vLLM"
IS_DATA = "is no function in this vLLM"


@pytest.mark.parametrize(
    ("place", "params", "message"),
    [
        ("Runner.finish", "self, token_ids", "has parameters (self, tokens);"),
        ("Runner.step", "self, flag", "has parameters (self, tokens, flag);"),
        ("Runner.step", "self, flag?", "has parameters (self, tokens, flag);"),
        ("Runner.step", "self, tokens, more", "has parameters (self, tokens, flag);"),
        ("Runner.gone", "self, tokens", IS_GONE),
        ("Gone.step", "self, tokens", IS_GONE),
        ("Runner.data", "self, tokens", IS_DATA),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_wrapped(place, params, message):
    module = host()
    before = dict(vars(module.Runner))
    bad = target(place, tuple(params.split(", ")))
    expects = f" expected it to begin with ({params})" if message[-1] == ";" else ""

    with pytest.raises(HostMismatch) as error:
        install_all(module, {target(): doubling, bad: doubling})

    assert str(error.value) == f"host.{place} {message}{expects}"
    assert dict(vars(module.Runner)) == before


def test_an_optional_parameter_may_be_missing():
    module = host()
    for params in ("self tokens?", "self tokens flag more?", "self tokens flag?"):
        row = target(params=tuple(params.split()))
        install_all(module, {row: doubling})
        assert is_installed(row)


def test_argument_is_found_by_position_or_by_name():
    row = target(params=("self", "tokens", "flag"))

    assert argument(row, "flag", (1, True), {}) is True
    assert argument(row, "flag", (1,), {"flag": False}) is False
    assert argument(row, "flag", (1,), {}) is None


def theirs(self, tokens): ...


@settings(deadline=None)
@given(st.lists(st.sampled_from(["install", "unhook", "rehook", "theirs"])))
def test_unhook_and_rehook_switch_all_hooks_and_refuse_if_one_was_replaced(moves):
    """theirs: other code replaces a hooked function, or restores it."""
    _wrap._hooks.clear()  # of the previous example
    module = host()
    names = target(), target("Sub.step"), target("Sub.finish", ("tokens",))
    switches = {"unhook": unhook, "rehook": rehook}
    switches["install"] = partial(install_all, module, dict.fromkeys(names, doubling))

    def look():
        return [dict(vars(owner)) for owner in (module.Runner, module.Sub)]

    off = look()
    switches["install"]()
    now = on = look()
    for owner, name in ((0, "step"), (1, "step"), (1, "finish")):
        assert off[owner].get(name) is not on[owner][name]
    for move in moves:
        is_theirs = module.Runner.step is theirs
        if move == "theirs":
            module.Runner.step = now[0]["step"] if is_theirs else theirs
        elif is_theirs:
            before = look()
            with pytest.raises(HostMismatch, match=r"^host\.Runner\.step is <.*theirs"):
                switches[move]()
            assert look() == before
        else:
            switches[move]()
            now = off if move == "unhook" else on
            assert look() == now
