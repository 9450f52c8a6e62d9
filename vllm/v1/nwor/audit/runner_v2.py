# SPDX-License-Identifier: Apache-2.0
"""Hooks of the audit on vLLM's V2 model runner.

    execute_model      what the scheduler says of requests and blocks
      prepare_attn     plan: tables and slots were computed. This wrapper lies under
                       NWOR's, which puts shadow pages in them; the others lie over it
    sample_tokens
      sample           resolve: behind commit, so that kept rows are in real blocks and
                       the tables are put back
                       what was found is logged, counted, or raised

A request has a number here, its state's index, which it keeps until it is finished,
preempted or streams more input: that is its seat. What it found is hashed from vLLM's
own copy of its tokens, host memory that the device sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from ..hooks import runner_v2 as rows
from ..hooks._wrap import argument, install_all
from ..window import NumRejected
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
PREPARE = replace(
    rows.PREPARE,
    why="audit: slots are final, and no shadow page is in them yet",
    layer=-1,
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
LEDGER = (INITIALIZE, PROFILE, EXECUTE, PREPARE, SAMPLE, OUTPUT)


def install(module: ModuleType) -> None:
    """Wraps the V2 runner in `module`. Raises HostMismatch if it is not as expected."""
    install_all(
        module,
        {
            INITIALIZE: startup.initialize_kv_cache,
            PROFILE: startup.profile_run,
            EXECUTE: partial(shared.execute_model, target=EXECUTE),
            PREPARE: _prepare_attn,
            SAMPLE: _sample,
            OUTPUT: shared.sample_tokens,
        },
    )


def _prepare_attn(
    wrapped: Callable[..., Any], runner: Any, args: Any, kwargs: Any
) -> Any:
    result = wrapped(*args, **kwargs)
    batch = argument(PREPARE, "input_batch", args, kwargs)
    shared.guarded(runner, lambda state: _plan(runner, state, batch, *result))
    return result


def _plan(
    runner: Any,
    state: shared.RunnerAudit,
    batch: Any,
    block_tables: Any,
    slot_mappings: Any,
) -> None:
    state.audit.plan(
        Batch(
            batch.num_reqs,
            batch.num_tokens,
            batch.input_ids,
            batch.positions,
            batch.query_start_loc,
            slot_mappings,
            block_tables,
            batch.idx_mapping,
        ),
        batch.req_ids,
        lambda row: _text_of(runner, state, batch.req_ids[row]),
    )


def _text_of(runner: Any, state: shared.RunnerAudit, name: str) -> Text:
    seat = runner.req_states.req_id_to_index[name]
    length = state.audit.num_found(name)
    tokens = runner.req_states.all_token_ids.gpu[seat, :length]
    return Text(tokens, *state.about[name], seat)


def _kept(runner: Any, result: Any, args: Any, kwargs: Any) -> Any:
    batch = argument(SAMPLE, "input_batch", args, kwargs)
    if batch.num_draft_tokens == 0:
        return None, None
    return batch.cu_num_logits[1:], NumRejected(result[2])


_sample = partial(shared.sample, kept=_kept)
