# SPDX-License-Identifier: Apache-2.0
"""Captures NWOR's log, also where an engine starts: vLLM then ends the propagation of
its loggers, and pytest's caplog, which has begun before, sees no more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nwor_log() -> Iterator[list[str]]:
    """A list that gets "LEVEL message" for each line of NWOR's log in the block, from
    INFO on."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger("vllm.v1.nwor")
    handler, level = Handler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
