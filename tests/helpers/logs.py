# SPDX-License-Identifier: Apache-2.0
"""What NWOR logs. pytest's caplog sees nothing: vLLM's loggers do not propagate."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nwor_log() -> Iterator[list[str]]:
    """The list that gets "LEVEL message" for each line, from INFO on, that NWOR logs in
    the block."""
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
