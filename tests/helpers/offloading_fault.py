# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's OffloadingConnector, put into the installed vLLM or taken out of it.

Issue 54193.

vLLM 0.26 offloaded a chunk whose last slot belongs to the final sampled token, which
never runs: the slot holds a rejected draft's bytes, or was never written, and a later
request loads it. 0.32 has the mend.

Loads that do not wait for the compute stream: as 0.26 has them, 0.32 has not.
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


@contextmanager
def loads_wait(do_wait: bool) -> Iterator[bool]:
    """Has loads wait for the compute stream, or leaves them as they are; gives whether
    the installed ones wait."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    owner: Any = gpu_worker.SingleDirectionOffloadingHandler
    installed = owner.transfer_async
    lines = [line.strip() for line in inspect.getsource(installed).splitlines()]
    (at,) = (i for i, line in enumerate(lines) if line.startswith("stream.wait_stream"))
    has_waited = not any("if self.gpu_to_cpu" in line for line in lines[at - 3 : at])

    def waiting(handler: Any, *args: Any, **kwargs: Any) -> bool:
        if not handler.gpu_to_cpu:
            # The one that it takes for the transfer.
            if not handler._stream_pool:
                handler._stream_pool.append(gpu_worker.current_platform.Stream())
            compute = gpu_worker.current_platform.current_stream()
            handler._stream_pool[-1].wait_stream(compute)
        return bool(installed(handler, *args, **kwargs))

    if do_wait:
        owner.transfer_async = waiting
    try:
        yield has_waited
    finally:
        owner.transfer_async = installed
