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

from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..hooks import runner_v1 as rows
from ..hooks._wrap import Wrapped, argument, install_all
from ..window import SampledIds
from . import runner as shared
from .state import Batch, Text


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


def _plan_once(wrapped: Wrapped, runner: Any, args: Any, kwargs: Any) -> Any:
    def plan_if_needed(state: shared.RunnerAudit) -> None:
        if not state.audit.is_open:
            _plan(runner, state)

    shared.guarded(runner, plan_if_needed)
    return wrapped(*args, **kwargs)


def _kept(runner: Any, output: Any, args: Any, kwargs: Any) -> Any:
    metadata = argument(rows.SAMPLE, "spec_decode_metadata", args, kwargs)
    if metadata is None:
        return None, None
    vocab_size = runner.input_batch.vocab_size
    acceptance = SampledIds(output.sampled_token_ids, vocab_size)
    return metadata.cu_num_sampled_tokens, acceptance


_sample = partial(shared.sample, kept=_kept)

_FINAL = "slots are final, and no shadow page is in them yet"
_LAST = "slots are final; without speculation the last place before the forward"
WRAPPERS = shared.wrappers(rows, _sample) | {
    shared.over(rows.METADATA, _FINAL): _plan_once,
    shared.over(rows.FORWARD, _LAST): _plan_once,
}
LEDGER = tuple(WRAPPERS)


def install(module: ModuleType) -> None:
    """Wraps the V1 runner in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, WRAPPERS)
