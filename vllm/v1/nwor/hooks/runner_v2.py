# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's V2 model runner.

A step, and where the hooks sit:

    execute_model      what a failed step left is dropped, and its tables put back
      prepare_attn     tables and slots are computed; the audit plans; then shadow
                       blocks are put in place; then begin: the old bytes are logged.
                       A full CUDA graph is replayed later without a forward context,
                       so this is the last place before the forward that every path
                       passes.
    sample_tokens
      sample           rejection sampling, then commit, then the audit resolves; after
                       it come the output copy, the drafter and the connector's saves
                       the step's counts are attached to the output

The slot ids are copied into the log by begin, because the drafter computes its own into
the same buffer. Graph capture uses other methods. A dummy run passes execute_model, and
no other hook: its SchedulerOutput has no request. What its step before left is dropped
as in any other step, and the next step copies committed rows to shadow blocks again.
vLLM's kernel warm-up sends made-up requests through all of them: they are protected,
and not counted, because nobody reads their output.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..hooks import runner as shared
from ..window import NumRejected, VerificationWindows
from ._wrap import Wrapped, argument
from .ledger import V2_COMMON, V2_PREPARE_ATTN, V2_SAMPLE

COMMON = shared.common(V2_COMMON, reuses_metadata=True)


def install(module: ModuleType) -> None:
    """Wraps the V2 runner in `module`. Raises HostMismatch if it is not as expected."""
    shared.install(module, WRAPPERS)


def _prepare_attn(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is not None:
        batch = args[0] if args else kwargs["input_batch"]
        if (audit := state.audit) is not None:
            audit.plan(runner, batch, *result)
        if state.manager is not None and batch.num_draft_tokens > 0:
            block_tables, slot_mappings = result
            is_one, seats = len(block_tables) == 1, state.seats
            windows = VerificationWindows(
                batch.num_draft_tokens,
                batch.logits_indices,
                batch.cu_num_logits,
                # [groups, tokens]: to take a row out of it costs more than to pass it.
                (slot_mappings,) if is_one else slot_mappings.unbind(),
                1,
                block_tables,
                batch.query_start_loc,
                batch.seq_lens,
                # Requests change their rows at each step, and keep their states' index.
                batch.idx_mapping,
                seats is not None
                and seats.lack(batch.idx_mapping_np, runner.req_states.req_id_to_index),
            )
            if not state.manager.stage(windows):
                state.manager.begin(windows)
    return result


def _sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is None:
        return result
    is_open = state.manager is not None and state.manager.state.is_open
    if is_open:
        state.manager.commit(NumRejected(result[2]))
    elif state.manager is not None:
        batch = argument(V2_SAMPLE, "input_batch", args, kwargs)
        state.manager.end_unlogged(batch.num_draft_tokens)
    if (audit := state.audit) is not None:
        batch = argument(V2_SAMPLE, "input_batch", args, kwargs)
        audit.resolve(runner, result, batch, is_open)
    return result


WRAPPERS = {
    **COMMON,
    V2_PREPARE_ATTN: _prepare_attn,
    V2_SAMPLE: _sample,
}
