# SPDX-License-Identifier: Apache-2.0
"""Errors of NWOR, and how unexpected ones are logged."""

from __future__ import annotations

import logging
import sys

from ..config import NworConfig

logger = logging.getLogger("vllm.v1.nwor")


class NworError(RuntimeError):
    """NWOR failed: raised under VLLM_NWOR_STRICT, and where continuing would lose
    tokens."""


class GroupRefused(ValueError):
    """NWOR leaves a KV-cache group to plain vLLM; the text says why."""


def error_text(error: Exception) -> str:
    """An unexpected exception as text. Its traceback is logged at level DEBUG."""
    logger.debug("NWOR: at start-up", exc_info=True)
    return f"{type(error).__name__}: {error}"


def report_failure(what: str, error: Exception) -> None:
    """Logs the first failure of this kind, or raises it under VLLM_NWOR_STRICT=always.
    Call while `error` is handled."""
    if NworConfig.from_env().strict_steps:
        raise error
    log_once(what, repr(error))


_logged: set[str] = set()


def log_once(what: str, found: str) -> None:
    """Logs the first of this kind in this process, with the exception that is being
    handled, if any."""
    if what not in _logged:
        _logged.add(what)
        handling = sys.exc_info()[0] is not None
        logger.error("NWOR %s: %s (logged once)", what, found, exc_info=handling)
