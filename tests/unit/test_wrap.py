# SPDX-License-Identifier: Apache-2.0
"""Installing wrappers: checked before the first one goes in, idempotent, reversible."""

from types import ModuleType

import pytest

from vllm_nwor.hooks._wrap import HookTarget, HostMismatch, argument, install_all


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
    module = host()
    original = module.Runner.step

    install_all(module, {target(): doubling})

    assert module.Runner().step(3, flag=True) == ("wrapped", ("step", 3, True))
    assert module.Runner.step.__wrapped__ is original


def test_a_second_install_changes_nothing():
    module = host()
    install_all(module, {target(): doubling})
    once = vars(module.Runner)["step"]

    install_all(module, {target(): doubling})

    assert vars(module.Runner)["step"] is once
    assert module.Runner().step(3) == ("wrapped", ("step", 3, False))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            target("Runner.finish", ("self", "token_ids")),
            "host.Runner.finish has parameters (self, tokens); "
            "expected it to begin with (self, token_ids)",
        ),
        (target("Runner.gone"), "host.Runner.gone does not exist in this vLLM"),
        (target("Gone.step"), "host.Gone.step does not exist in this vLLM"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_wrapped(bad, message):
    module = host()
    before = dict(vars(module.Runner))

    with pytest.raises(HostMismatch) as error:
        install_all(module, {target(): doubling, bad: doubling})

    assert str(error.value) == message
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
