# SPDX-License-Identifier: Apache-2.0
"""The one seam through which tests make NWOR's ops fail: the manager's op module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.engine import Engine


class _ReplacedOps:
    """An op module with some functions replaced; the others pass through."""

    def __init__(self, ops: Any, replacements: dict[str, Any]) -> None:
        self._ops = ops
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


def failing(
    op: Callable[..., None],
    at: Callable[[int], bool] | int,
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


@contextmanager
def replaced_ops(engine: Engine, **replacements: Any) -> Iterator[None]:
    """`engine` calls the given functions in place of NWOR's ops of those names."""
    launches = engine.manager.launches
    ops = launches.ops
    for name in replacements:
        assert callable(getattr(ops, name)), f"NWOR has no op {name}"
    launches.ops = _ReplacedOps(ops, replacements)
    try:
        yield
    finally:
        launches.ops = ops
