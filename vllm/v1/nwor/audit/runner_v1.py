# SPDX-License-Identifier: Apache-2.0
"""Hooks of the audit on vLLM's V1 model runner (the CPU runner inherits from it).

    execute_model      what the scheduler says of requests and blocks
      _calc_spec_decode_metadata   plan: tables and slots are final, and shadow pages
                       are not in them yet (they are put there behind this call)
      _model_forward   plan, where the call before is not made: without speculation
    sample_tokens
      _sample          resolve: behind commit, so that kept rows are in real blocks
                       what was found is logged, counted, or raised

These wrappers lie over NWOR's own in the same places (`layer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..hooks import runner_v1 as rows
from ..hooks._wrap import argument, install_all
from ..window import SampledIds
from . import runner as shared
from . import startup
from .state import Batch, Text

# What NWOR's own hooks wrap, over or below them.
INITIALIZE = replace(
    rows.INITIALIZE,
    why="audit: the caches are bound here",
    layer=1,
)
PROFILE = replace(
    rows.PROFILE,
    why="audit: its memory is taken while vLLM measures what is left",
    layer=1,
)
EXECUTE = replace(
    rows.EXECUTE,
    why="audit: which blocks were handed out to which requests",
    delete_when="vLLM tells plugins of blocks that it hands out",
    layer=1,
)
METADATA = replace(
    rows.METADATA,
    why="audit: slots are final, and no shadow page is in them yet",
    layer=1,
)
FORWARD = replace(
    rows.FORWARD,
    why="audit: slots are final; without speculation the last place before the forward",
    layer=1,
)
SAMPLE = replace(
    rows.SAMPLE,
    why="audit: what is kept is known, and the drafter has not run",
    layer=1,
)
OUTPUT = replace(
    rows.OUTPUT,
    why="audit: findings leave with the step's output, or keep it from leaving",
    layer=1,
)
LEDGER = (INITIALIZE, PROFILE, EXECUTE, METADATA, FORWARD, SAMPLE, OUTPUT)


def install(module: ModuleType) -> None:
    """Wraps the V1 runner in `module`. Raises HostMismatch if it is not as expected."""
    install_all(
        module,
        {
            INITIALIZE: startup.initialize_kv_cache,
            PROFILE: startup.profile_run,
            EXECUTE: partial(shared.execute_model, target=EXECUTE),
            METADATA: _calc_spec_decode_metadata,
            FORWARD: _model_forward,
            SAMPLE: _sample,
            OUTPUT: shared.sample_tokens,
        },
    )


def _plan(runner: Any, state: shared.RunnerAudit) -> None:
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    query_start_loc = runner.query_start_loc
    tables = batch.block_table.block_tables
    state.audit.plan(
        Batch(
            num_reqs,
            int(query_start_loc.np[num_reqs]),
            runner.input_ids.gpu,
            runner.positions,
            query_start_loc.gpu,
            [table.slot_mapping.gpu for table in tables],
            [table.block_table.gpu for table in tables],
        ),
        batch.req_ids,
        lambda row: _text_of(runner, state, row),
    )


def _text_of(runner: Any, state: shared.RunnerAudit, row: int) -> Text:
    batch = runner.input_batch
    length = int(batch.num_computed_tokens_cpu[row])
    return Text(
        torch.from_numpy(batch.token_ids_cpu[row, :length].copy()),
        *state.about[batch.req_ids[row]],
    )


def _calc_spec_decode_metadata(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    shared.guarded(runner, lambda state: _plan(runner, state))
    return wrapped(*args, **kwargs)


def _model_forward(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    def plan_if_needed(state: shared.RunnerAudit) -> None:
        if not state.audit.is_open:
            _plan(runner, state)

    shared.guarded(runner, plan_if_needed)
    return wrapped(*args, **kwargs)


def _kept(runner: Any, output: Any, args: Any, kwargs: Any) -> Any:
    metadata = argument(SAMPLE, "spec_decode_metadata", args, kwargs)
    if metadata is None:
        return None, None
    vocab_size = runner.input_batch.vocab_size
    acceptance = SampledIds(output.sampled_token_ids, vocab_size)
    return metadata.cu_num_sampled_tokens, acceptance


_sample = partial(shared.sample, kept=_kept)
