# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the prefix cache (mamba_cache_mode align) under speculation on a
CPU, where vLLM's kernels that copy blocks of states do not run: Triton.

Only the copies are made here, by what the kernels' callers pass: vLLM decides what is
copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.worker import mamba_utils

# Called with a copy's row, source and destination columns, and accepted drafts; false:
# the copy is left out.
Allows = Callable[[int, int, int, int], bool]


class Copies:
    """Of the states of vLLM's MambaSpecDecodeGPUContext between blocks of a request.

    before, after: the copies before forwards, and those after sampling, in order.
    allows: what is asked before each of the latter.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.before: list[tuple[int, int, int, int]] = []
        self.after: list[tuple[int, int, int, int]] = []
        self.allows: Allows = lambda *copy: True
        context = mamba_utils.MambaSpecDecodeGPUContext
        patch.setattr(context, "run_fused_precopy", self._before_forward)
        patch.setattr(context, "run_fused_postprocess", self._after_sampling)

    @property
    def _before_forward(self) -> Callable[..., None]:
        def copy(
            context: Any,
            num_reqs: int,
            state_idx_gpu: torch.Tensor,
            src_col_gpu: torch.Tensor,
            token_bias_gpu: torch.Tensor,
            idx_mapping: Any,
        ) -> None:
            columns = src_col_gpu, state_idx_gpu, token_bias_gpu
            for row, one in enumerate(_rows(num_reqs, *columns)):
                if 0 <= one[0] != one[1]:
                    self.before.append((row, *one))
                    _copy(context, row, *one)

        return copy

    @property
    def _after_sampling(self) -> Callable[..., None]:
        def copy(
            context: Any,
            num_reqs: int,
            num_accepted_tokens_gpu: torch.Tensor,
            mamba_state_idx_gpu: torch.Tensor,
            num_scheduled_tokens_gpu: torch.Tensor,
            num_computed_tokens_gpu: torch.Tensor,
            num_draft_tokens_gpu: torch.Tensor,
        ) -> None:
            found = context.num_accepted_tokens_out
            found[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
            columns = (
                num_accepted_tokens_gpu,
                mamba_state_idx_gpu,
                num_scheduled_tokens_gpu,
                num_computed_tokens_gpu,
                num_draft_tokens_gpu,
            )
            for row, one in enumerate(_rows(num_reqs, *columns)):
                num_accepted, source, num_scheduled, num_computed, num_drafts = one
                first = num_computed + num_scheduled - num_drafts
                size = context.block_size
                end = (first + num_accepted - 1) // size * size
                if end < first:
                    continue
                to = end // size - 1
                if source == to:
                    found[row] = 1
                if source != to or end != first:
                    how = row, source, to, end - first
                    self.after.append(how)
                    if self.allows(*how):
                        _copy(context, *how)

        return copy


def _rows(num_reqs: int, *columns: torch.Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column[:num_reqs].tolist() for column in columns), strict=True)


def _copy(context: Any, row: int, source: int, to: int, num_more: int) -> None:
    """The state of `num_more` tokens behind the first column of block `source` of the
    row's table, to block `to`."""
    stride = context.block_table_stride_req
    of_states = zip(
        context.state_base_addrs.tolist(),
        context.state_block_strides.tolist(),
        context.state_elem_sizes.tolist(),
        context.state_inner_sizes.tolist(),
        context.state_conv_widths.tolist(),
        context.state_group_indices.tolist(),
        strict=True,
    )
    for base, block_bytes, size, number, width, group in of_states:
        table = int(context.block_table_ptrs[group]) + 4 * row * stride
        block = (ctypes.c_int32 * stride).from_address(table)
        first, count = block[source] * block_bytes, number * size
        if width:
            # All columns of the buffer from `num_more` on.
            first += num_more * count
            count *= width - num_more
        else:
            first = block[source + num_more] * block_bytes
        ctypes.memmove(base + block[to] * block_bytes, base + first, count)
