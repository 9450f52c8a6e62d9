# SPDX-License-Identifier: Apache-2.0
"""Issue 54193 of vLLM's OffloadingConnector, put into the installed vLLM or taken out.

vLLM 0.26 offloaded a chunk whose last slot belongs to the final sampled token, which
never runs: the slot holds a rejected draft's bytes, or was never written, and a later
request loads it. 0.32 has the mend.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FAULTY = "num_tokens_after_batch = req.num_tokens\n"
MENDED = "num_tokens_after_batch = max(req.num_prompt_tokens, req.num_tokens - 1)\n"


@contextmanager
def final_slots(are_stored: bool) -> Iterator[bool]:
    """Has the connector's scheduler store the final token's slot, or not; gives whether
    the installed one does. In the source of the method as it is installed."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    owner: Any = scheduler.OffloadingConnectorScheduler
    installed = owner._build_store_jobs
    source = textwrap.dedent(inspect.getsource(installed))
    is_faulty = FAULTY in source
    assert source.count(FAULTY if is_faulty else MENDED) == 1
    wanted = source.replace(MENDED, FAULTY)
    if not are_stored:
        wanted = wanted.replace(FAULTY, MENDED)
    names: dict[str, Any] = {}
    exec(wanted, vars(scheduler), names)
    owner._build_store_jobs = names["_build_store_jobs"]
    try:
        yield is_faulty
    finally:
        owner._build_store_jobs = installed
