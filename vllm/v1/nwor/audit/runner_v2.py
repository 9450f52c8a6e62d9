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

from functools import partial
from types import ModuleType
from typing import Any

from ..hooks import runner_v2 as rows
from ..hooks._wrap import Wrapped, argument, install_all
from ..window import NumRejected
from . import runner as shared
from .state import Batch, Text

PREPARE = shared.over(
    rows.PREPARE, "slots are final, and no shadow page is in them yet", layer=-1
)


def _prepare_attn(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
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
            # [groups, tokens]: to take a row out of it costs more than to pass it.
            (slot_mappings,) if len(block_tables) == 1 else slot_mappings,
            block_tables,
            batch.idx_mapping,
        ),
        batch.req_ids,
        lambda row: _text_of(runner, state, batch.req_ids[row]),
    )


def _text_of(runner: Any, state: shared.RunnerAudit, name: str) -> Text:
    seat = runner.req_states.req_id_to_index[name]
    length = state.audit.requests[name].num_found
    tokens = runner.req_states.all_token_ids.gpu[seat, :length]
    return Text(tokens, *state.about[name], seat)


def _kept(runner: Any, result: Any, args: Any, kwargs: Any) -> Any:
    batch = argument(rows.SAMPLE, "input_batch", args, kwargs)
    if batch.num_draft_tokens == 0:
        return None, None
    return batch.cu_num_logits[1:], NumRejected(result[2])


_sample = partial(shared.sample, kept=_kept)

WRAPPERS = shared.wrappers(rows, _sample) | {PREPARE: _prepare_attn}
LEDGER = tuple(WRAPPERS)


def install(module: ModuleType) -> None:
    """Wraps the V2 runner in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, WRAPPERS)
