# SPDX-License-Identifier: Apache-2.0
"""The one seam through which tests make NWOR's ops fail: the op modules that its
undo log (`manager.launches`) and its shadow pages (`manager.shadow`) call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

At = Callable[[int], bool] | int


def failing(
    op: Callable[..., None],
    at: At,
    late: bool = False,
    error: Exception | None = None,
) -> Callable[..., None]:
    """`op`, raising at a call (numbered from 0), or at those that `at` selects, before
    it did anything or (late) after it did its work."""
    calls = itertools.count()

    def run(*args: Any) -> None:
        call = next(calls)
        fails = at(call) if callable(at) else call == at
        if late or not fails:
            op(*args)
        if fails:
            raise error or RuntimeError("injected")

    return run


def replaced_ops(owner: Any, **replacements: Any) -> AbstractContextManager[Any]:
    """`owner` calls the given functions in place of NWOR's ops of those names."""
    ops = vars(owner.ops)
    assert replacements.keys() <= ops.keys(), "NWOR has no such op"
    return mock.patch.object(owner, "ops", SimpleNamespace(**ops | replacements))


def failing_op(
    owner: Any,
    name: str,
    at: At,
    late: bool = False,
    error: Exception | None = None,
) -> AbstractContextManager[Any]:
    """That op of `owner`'s fails as `failing` says."""
    broken = failing(getattr(owner.ops, name), at, late, error)
    return replaced_ops(owner, **{name: broken})
