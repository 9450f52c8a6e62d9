# SPDX-License-Identifier: Apache-2.0
"""Hooks on vLLM's V1 model runner (the CPU runner inherits from it).

A step, and where the hooks sit:

    execute_model      what a failed step left is dropped, and its tables put back
      _calc_spec_decode_metadata   which rows of the batch are drafts: remembered; block
                       tables and slots are final here, attention metadata is not built
                       yet: the audit plans, then shadow blocks are put in place
      _model_forward   without speculation the audit plans here; begin: the old bytes
                       are logged, then the forward runs
    sample_tokens
      _sample          rejection sampling, then commit, then the audit resolves; after
                       it come the drafter, the connector's saves and the fence that
                       lets blocks be reused
                       the step's counts are attached to the output

Dummy runs, warm-up and graph capture call the model directly and pass none of the
begin/commit pair.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..hooks import runner as shared
from ..window import SampledIds, VerificationWindows
from ._wrap import Wrapped, argument
from .ledger import V1_COMMON, V1_MODEL_FORWARD, V1_SAMPLE, V1_SPEC_DECODE_METADATA

COMMON = shared.common(V1_COMMON, reuses_metadata=False)


def install(module: ModuleType) -> None:
    """Wraps the V1 runner in `module`. Raises HostMismatch if it is not as expected."""
    shared.install(module, WRAPPERS)


def _calc_spec_decode_metadata(
    wrapped: Wrapped, runner: Any, args: Any, kwargs: Any
) -> Any:
    state = runner.__dict__.get("nwor_state")
    if state is not None and (audit := state.audit) is not None:
        audit.plan(runner)
    metadata = wrapped(*args, **kwargs)
    if state is not None and state.manager is not None:
        tables = runner.input_batch.block_table.block_tables
        drafts, shadow = metadata.num_draft_tokens, state.manager.shadow
        is_staged = shadow is not None
        state.windows = VerificationWindows(
            sum(drafts),
            metadata.logits_indices,
            metadata.cu_num_sampled_tokens,
            slot_mappings=[table.slot_mapping.gpu for table in tables],
            block_tables=[table.block_table.gpu for table in tables]
            if is_staged
            else None,
            query_start_loc=runner.query_start_loc.gpu if is_staged else None,
            seq_lens=runner.seq_lens if is_staged else None,
            # A request's seat is its batch row.
            lacks_seats=is_staged
            and len(drafts) > shadow.num_seats
            and any(drafts[shadow.num_seats :]),
        )
        if is_staged and state.manager.stage(state.windows):
            state.windows = None
    return metadata


def _model_forward(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    state = runner.__dict__.get("nwor_state")
    if state is not None:
        if (audit := state.audit) is not None:
            audit.plan(runner)
        if state.windows is not None:
            assert state.manager is not None
            state.manager.begin(state.windows)
            state.windows = None
    return wrapped(*args, **kwargs)


def _sample(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    output = wrapped(*args, **kwargs)
    state = runner.__dict__.get("nwor_state")
    if state is None:
        return output
    is_open = state.manager is not None and state.manager.state.is_open
    if is_open:
        state.manager.commit(
            SampledIds(output.sampled_token_ids, runner.input_batch.vocab_size)
        )
    elif state.manager is not None:
        metadata = argument(V1_SAMPLE, "spec_decode_metadata", args, kwargs)
        num_drafts = 0 if metadata is None else sum(metadata.num_draft_tokens)
        state.manager.end_unlogged(num_drafts)
    if (audit := state.audit) is not None:
        metadata = argument(V1_SAMPLE, "spec_decode_metadata", args, kwargs)
        audit.resolve(runner, output, metadata, is_open)
    return output


WRAPPERS = {
    **COMMON,
    V1_SPEC_DECODE_METADATA: _calc_spec_decode_metadata,
    V1_MODEL_FORWARD: _model_forward,
    V1_SAMPLE: _sample,
}
