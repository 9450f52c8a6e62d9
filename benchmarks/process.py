# SPDX-License-Identifier: Apache-2.0
"""How a program that ran vLLM in its own process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Ends the process at once, its output written: vLLM's threads and finalisers have
    nothing left to do that is worth waiting for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
