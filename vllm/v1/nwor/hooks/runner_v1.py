# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's V1 model runner (the CPU runner inherits from it).

A step, and where the hooks sit (moments: step.py):

    execute_model      step_started
      _calc_spec_decode_metadata   which rows of the batch are drafts; block tables and
                       slots are final, attention metadata is not built yet: the Step
                       is built, tables_final
      _model_forward   in a step without drafts, if an observer wants every step, the
                       Step is built here, tables_final; before_forward, unless no
                       observer waits for it; then the forward runs
    sample_tokens
      _sample          rejection sampling, then sampled; after it come the drafter, the
                       connector's saves and the fence that lets blocks be reused
                       payload, output_ready

Dummy runs, warm-up and graph capture call the model directly and pass none of the hooks
between execute_model and sample_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from vllm.forward_context import get_forward_context

from ..base.wrap import Wrapped, argument
from ..step import SampledIds, Step
from . import runner as shared
from .ledger import V1_COMMON, V1_MODEL_FORWARD, V1_SAMPLE, V1_SPEC_DECODE_METADATA


def install(module: ModuleType, builders: Sequence[shared.Builder]) -> None:
    """Wraps the V1 runner in `module`. builders: from the outermost observer to the
    innermost. Raises HostMismatch if it is not as expected."""
    shared.install(module, WRAPPERS, builders)


def _step_of(runner: Any, metadata: Any, every_step: bool) -> Step:
    """metadata: vLLM's SpecDecodeMetadata, None in a step without drafts."""
    batch = runner.input_batch
    tables = batch.block_table.block_tables
    step = Step(
        0,
        [table.slot_mapping.gpu for table in tables],
        [table.block_table.gpu for table in tables],
        runner.query_start_loc.gpu,
        runner.seq_lens,
    )
    if metadata is not None:
        step.drafts_of_requests = metadata.num_draft_tokens
        step.num_drafts = sum(metadata.num_draft_tokens)
        step.logits_indices = metadata.logits_indices
        step.cu_num_logits = metadata.cu_num_sampled_tokens
    if every_step:
        step.num_reqs = num_reqs = batch.num_reqs
        step.num_tokens = int(runner.query_start_loc.np[num_reqs])
        step.request_ids = batch.req_ids
        step.token_ids, step.positions = runner.input_ids.gpu, runner.positions
    return step


def _calc_spec_decode_metadata(
    wrapped: Wrapped, runner: Any, args: Any, kwargs: Any
) -> Any:
    metadata = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is not None and state.sampled:
        state.step = step = _step_of(runner, metadata, state.every_step)
        for tables_final in state.tables_final:
            tables_final(step)
    return metadata


def _model_forward(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    state = runner.__dict__.get("nwor_state")
    if state is not None:
        if state.step is None and state.every_step:
            state.step = _step_of(runner, None, True)
            for tables_final in state.tables_final:
                tables_final(state.step)
        if state.step is not None and state.step.awaits_forward:
            for before_forward in state.before_forward:
                before_forward(state.step)
        if state.step is not None and state.metadata_final:
            metadata = get_forward_context().attn_metadata
            for metadata_final in state.metadata_final:
                metadata_final(state.step, metadata)
    return wrapped(*args, **kwargs)


def _sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    output = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is None:
        return output
    step = state.step
    if step is not None:
        state.step = acceptance = None
        if step.num_drafts > 0:
            vocab_size = runner.input_batch.vocab_size
            acceptance = SampledIds(output.sampled_token_ids, vocab_size)
        for sampled in state.sampled:
            sampled(step, acceptance)
    elif state.drafts_missed:
        metadata = argument(V1_SAMPLE, "spec_decode_metadata", args, kwargs)
        if metadata is not None:
            for drafts_missed in state.drafts_missed:
                drafts_missed(sum(metadata.num_draft_tokens))
    return output


WRAPPERS = {
    **shared.common(V1_COMMON, reuses_metadata=False),
    V1_SPEC_DECODE_METADATA: _calc_spec_decode_metadata,
    V1_MODEL_FORWARD: _model_forward,
    V1_SAMPLE: _sample,
}
