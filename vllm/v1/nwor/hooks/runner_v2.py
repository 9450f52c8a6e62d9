# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's V2 model runner.

A step, and where the hooks sit (moments: step.py):

    execute_model      step_started
      prepare_attn     tables and slots are computed: the Step is built, tables_final,
                       before_forward, unless no observer waits for it. A full CUDA
                       graph is replayed later without a forward context, so this is
                       the last place before the forward that every path passes. What a
                       KV connector loads in this step comes later.
    sample_tokens
      sample           rejection sampling, then sampled; after it come the output copy,
                       the drafter and the connector's saves
                       payload, output_ready

The slot ids are copied into the log before the forward, because the drafter computes
its own into the same buffer. Graph capture uses other methods. A dummy run passes
execute_model, and no other hook: its SchedulerOutput names no request that exists. As
in any other step, the state of the previous step is discarded. The step after it copies
committed rows to shadow blocks again. vLLM's kernel warm-up sends dummy requests
through all hooks: they are protected, and not counted, because their output is not
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..base.wrap import Wrapped, argument
from ..step import NumRejected, Step
from . import runner as shared
from .ledger import V2_COMMON, V2_PREPARE_ATTN, V2_SAMPLE


def install(module: ModuleType, builders: Sequence[shared.Builder]) -> None:
    """Wraps the V2 runner in `module`. builders: from the outermost observer to the
    innermost. Raises HostMismatch if it is not as expected."""
    shared.install(module, WRAPPERS, builders)


def _prepare_attn(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is None or not state.sampled:
        return result
    batch = args[0] if args else kwargs["input_batch"]
    num_drafts, every_step = batch.num_draft_tokens, state.every_step
    if num_drafts > 0 or every_step:
        block_tables, slot_mappings = result
        state.step = step = Step(
            num_drafts,
            # [groups, tokens]: to take a row out of it costs more than to pass it.
            (slot_mappings,) if len(block_tables) == 1 else slot_mappings.unbind(),
            block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            batch.logits_indices,
            batch.cu_num_logits,
            num_leading_zeros=1,
            # Requests change their rows at each step, and keep their states' index.
            state_indices=batch.idx_mapping,
            host_state_indices=batch.idx_mapping_np,
            state_of_request=runner.req_states.req_id_to_index,
        )
        if every_step:
            step.num_reqs, step.num_tokens = batch.num_reqs, batch.num_tokens
            step.request_ids = batch.req_ids
            step.token_ids, step.positions = batch.input_ids, batch.positions
        for tables_final in state.tables_final:
            tables_final(step)
        if step.awaits_forward:
            for before_forward in state.before_forward:
                before_forward(step)
    return result


def _sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is None:
        return result
    step = state.step
    if step is not None:
        state.step = None
        acceptance = NumRejected(result[2]) if step.num_drafts > 0 else None
        for sampled in state.sampled:
            sampled(step, acceptance)
    elif state.drafts_missed:
        batch = argument(V2_SAMPLE, "input_batch", args, kwargs)
        if batch.num_draft_tokens > 0:
            for drafts_missed in state.drafts_missed:
                drafts_missed(batch.num_draft_tokens)
    return result


WRAPPERS = {
    **shared.common(V2_COMMON, reuses_metadata=True),
    V2_PREPARE_ATTN: _prepare_attn,
    V2_SAMPLE: _sample,
}
