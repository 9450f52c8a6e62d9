# SPDX-License-Identifier: Apache-2.0
"""Adds vLLM issue 54193 to the installed OffloadingConnector, or removes it.

vLLM 0.26 offloads a chunk whose last slot belongs to the final sampled token, which
never runs: the slot has a rejected draft's bytes, or was never written, and a later
request loads it. Fixed in 0.32.
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
    """Patches the source of the installed scheduler so that it stores the final token's
    slot, or does not; yields whether the installed one does."""
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
