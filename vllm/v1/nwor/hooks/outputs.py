# SPDX-License-Identifier: Apache-2.0
"""Attaches a step's report to its output, and calls observers when the output is read.

An output is vLLM's ModelRunnerOutput or, with asynchronous scheduling, an object that
returns one after the device has sampled. Another thread may read that object: this is
the only place in the hooks where two threads meet. base/payload.py has the shared data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import log_once
from ..base.payload import NOTHING, StepPayload
from ..step import OutputRead


def attach(result: Any, calls: Sequence[Callable[[], StepPayload | None]]) -> None:
    """Attaches observers' payload to a step's output; never raises.

    result: what the runner's sample_tokens returned. The inner ModelRunnerOutput gets
        an attribute `nwor_stats`. None, and outputs without requests (such as vLLM's
        shared empty one), get no payload.
    """
    if result is None:
        return
    try:
        output = (
            getattr(result, "model_runner_output", None)
            or getattr(result, "_model_runner_output", None)
            or result
        )
        if output.req_ids:
            for take_payload in calls:
                if (payload := take_payload()) is not None:
                    output.nwor_stats = payload
    except Exception:
        log_once("no statistics on a runner's output", type(result).__name__)


def watch(
    result: Any,
    calls: Sequence[Callable[[], OutputRead | None]],
    hooks_failed: Sequence[Callable[[], None]] = (),
) -> None:
    """Calls observers when the output is read, which is now if it is not asynchronous.
    An output without requests is skipped: pending findings belong to an earlier output
    that was not read yet.

    hooks_failed: called if the output is not as expected.

    Raises: whatever an observer raises, now or when the output is read.
    """
    get_output = getattr(result, "get_output", None)
    if get_output is None:
        if getattr(result, "req_ids", None):
            _read(result, [ready() for ready in calls], hooks_failed)
        return
    readers = [ready() for ready in calls]

    def read() -> Any:
        # The output refers to this function, and that to the output.
        vars(result).pop("get_output", None)
        output = get_output()
        _read(output, readers, hooks_failed)
        return output

    _set(result, "get_output", read, hooks_failed)


def _read(
    output: Any,
    readers: Sequence[OutputRead | None],
    hooks_failed: Sequence[Callable[[], None]],
) -> None:
    has_requests = bool(getattr(output, "req_ids", None))
    of_connector = getattr(output, "kv_connector_output", None)
    failed = getattr(of_connector, "invalid_block_ids", None) or ()
    for reader in readers:
        if reader is not None:
            payload = getattr(output, "nwor_stats", NOTHING) if has_requests else None
            if (changed := reader(payload, failed)) is not None:
                _set(output, "nwor_stats", changed, hooks_failed)
                if steps := changed.weights_changed:
                    _set(output, "nwor_weights", steps, hooks_failed)
                if changed.given:
                    _set(output, "nwor_given", changed.given, hooks_failed)


def _set(
    output: Any, name: str, value: Any, hooks_failed: Sequence[Callable[[], None]]
) -> None:
    try:
        setattr(output, name, value)
    except Exception:
        for failed in hooks_failed:
            failed()
