# SPDX-License-Identifier: Apache-2.0
"""What one step's verification windows look like to the manager and the ops.

A verification window is one request's draft rows in one step: a target token that is
always kept, then k drafts. vLLM's own metadata tensors are taken as they are, so that
nothing is gathered, copied or synchronised on the host's side.

Worked example: three requests with k = 2, 0, 1 drafts give `cu_num_logits` = [3, 4, 6];
draft rows are entries 1, 2 (request 0) and 5 (request 2) of `logits_indices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    import torch


class VerificationWindows(Struct, frozen=True, gc=False):
    """All windows of one step. (A Struct is made in C: a dataclass or a named tuple
    costs a step a function that is in no cache of the processor.)

    num_drafts: upper bound, known to the host, of the number of drafts in the step.
    logits_indices: [num_logits] int32 or int64, device: batch rows that get logits,
        1 + k for each request, in request order.
    cu_num_logits: [num_leading_zeros + num_reqs] int32, device: inclusive cumulative
        number of them.
    slot_mappings: for each KV-cache group id, [>= num_tokens] or [1, >= num_tokens]
        int64, device: the slot of each batch row, -1 for padding.
    num_leading_zeros: entries in front of the first request's in cu_num_logits, as the
        arrays have them that begin with 0.

    What shadow blocks need besides; None where there are none:
    block_tables: for each KV-cache group id, [>= num_reqs, width] int32, device.
    query_start_loc: [>= num_reqs + 1] int32, device: batch row where a request begins.
    seq_lens: [>= num_reqs] int32, device: its tokens, those of this step included.
    state_indices: [num_reqs] int32 or int64, device: the request's index in the
        runner's states, which it keeps while it runs, and which decides its shadow
        blocks; None: its batch row does.
    lacks_seats: whether a window may have no shadow blocks.
    """

    num_drafts: int
    logits_indices: torch.Tensor
    cu_num_logits: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]
    num_leading_zeros: int = 0
    block_tables: Sequence[torch.Tensor] | None = None
    query_start_loc: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    lacks_seats: bool = False


class Undone(NamedTuple):
    """Whether the rejected drafts of a step, in one KV-cache group, left the bytes that
    were there before.

    is_undone: those of all windows; if there is `staged`, those of the windows that it
        has in shadow blocks. staged: as `saved` of ops.stage, after that step's commit.
    state_indices: as in VerificationWindows. seat_of_state: as in ops.stage.
    """

    is_undone: bool = False
    staged: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    seat_of_state: torch.Tensor | None = None


class SampledIds(Struct, frozen=True, gc=False):
    """Acceptance as the V1 rejection sampler reports it.

    sampled_token_ids: [num_reqs, max_spec_len + 1] int32, device. An id is valid if it
        is not -1 and below `vocab_size`; a request accepted (valid ids - 1) drafts.
    """

    sampled_token_ids: torch.Tensor
    vocab_size: int
    num_rejected: None = None


class NumRejected(Struct, frozen=True, gc=False):
    """Acceptance as the V2 runner reports it.

    num_rejected: [num_reqs] int32, device: a request's last so many drafts fell.
    """

    num_rejected: torch.Tensor
    sampled_token_ids: None = None
    vocab_size: int = 0


# The fields of both together are what the ops take.
Acceptance = SampledIds | NumRejected
