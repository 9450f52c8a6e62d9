# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector, with a server of its own, for the conformance kit's tests. The
class is LMCache's.

When its worker starts, vLLM 0.32 looks at vars() of all that modules have. llvmlite's
library answers that with a function, and vLLM raises AttributeError if numba, which
LMCache imports, is there by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.triton_utils import dispatcher

__all__ = ["LMCacheMPConnector"]


def _vars(value: Any) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


dispatcher.vars = _vars  # type: ignore[attr-defined]
