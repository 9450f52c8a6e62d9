# SPDX-License-Identifier: Apache-2.0
"""PreparedLaunches: a step's log and restore on CUDA, each as one C call.

Between two steps of a model a lot of code runs, and what a step of ours runs is not in
the processor's cache when its turn comes: a call through PyTorch's dispatcher costs
several times what it costs in a tight loop. The tables, the logs and the counters never
change, so the C side keeps their part of the arguments. A step packs its own into an
array of int64, and one C function makes all launches.

The first step goes through the ops too, with no drafts: they check every argument and
copy nothing. Later steps check what could change. csrc/nwor/prepared.h is the other
side.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Sequence
from ctypes import c_char_p, c_int64, c_void_p

import torch
from torch import Tensor

from vllm.v1.nwor import ops
from vllm.v1.nwor.launches import Launch, OpLaunches
from vllm.v1.nwor.window import Acceptance, SampledIds, VerificationWindows

# int64 values in PreparedLaunch, LogStep, LogStepLaunch and RestoreStep.
COLUMNS = (8, 6, 2, 9)
_ITEM = 8


class PreparedLaunches:
    """As Launches, for tensors on one CUDA device."""

    def __init__(self, device: torch.device, launches: Sequence[Launch]) -> None:
        """device: where all tensors are, a CUDA device with its index.

        Raises:
            NworOpsUnavailable: no library, one without CUDA, or one of other structs.
        """
        ops.load("cuda")
        library = ctypes.CDLL(str(ops.LIBRARY))
        columns = (c_int64 * len(COLUMNS))()
        library.nwor_prepared_columns(columns)
        if tuple(columns) != COLUMNS:
            raise ops.NworOpsUnavailable(
                f"{ops.LIBRARY} takes launch arguments of {tuple(columns)} columns; "
                f"this version of vllm-nwor has {COLUMNS}: build it again"
            )
        self._launches = tuple(launches)
        constants = [value for launch in launches for value in _constants(launch)]
        library.nwor_prepared_new.restype = c_void_p
        handle = library.nwor_prepared_new(
            (c_int64 * len(constants))(*constants),
            c_int64(len(self._launches)),
            c_int64(device.index),
        )
        library.nwor_prepared_free.argtypes = [c_void_p]
        weakref.finalize(self, library.nwor_prepared_free, handle)
        self._handle = c_void_p(handle)
        self._enqueue_log = library.nwor_prepared_log
        self._enqueue_restore = library.nwor_prepared_restore
        for function in (self._enqueue_log, self._enqueue_restore):
            function.restype = c_char_p

        self._group_ids = [launch.group.group_id for launch in self._launches]
        of_log = COLUMNS[1] + COLUMNS[2] * len(self._launches)
        self._log_step = (c_int64 * of_log)()
        self._pack_log = struct.Struct(f"={of_log}q").pack_into
        self._restore_step = (c_int64 * COLUMNS[3])()
        self._pack_restore = struct.Struct(f"={COLUMNS[3]}q").pack_into
        # Through these goes a first step; None when it did.
        self._first_log: OpLaunches | None = OpLaunches(launches)
        self._first_restore: OpLaunches | None = self._first_log

    def log(self, windows: VerificationWindows) -> None:
        """As Launches.log."""
        if self._first_log is not None:
            self._first_log.log(windows._replace(num_drafts=0))
            self._first_log = None
        num_drafts, logits_indices, cu_num_logits, slot_mappings, skipped = windows
        is_int64 = logits_indices.dtype is torch.int64
        if (
            cu_num_logits.dtype is not torch.int32
            or not (is_int64 or logits_indices.dtype is torch.int32)
            or not (logits_indices.is_cuda and cu_num_logits.is_cuda)
            or not (logits_indices.is_contiguous() and cu_num_logits.is_contiguous())
        ):
            raise RuntimeError(
                f"logits_indices is {_kind(logits_indices)}, cu_num_logits "
                f"{_kind(cu_num_logits)}; must be int32 or int64, and int32; both "
                "contiguous, on CUDA"
            )
        self._pack_log(
            self._log_step,
            0,
            num_drafts,
            logits_indices.data_ptr(),
            is_int64,
            logits_indices.numel(),
            cu_num_logits.data_ptr() + 4 * skipped,
            cu_num_logits.numel() - skipped,
            *self._slot_columns(slot_mappings),
        )
        error = self._enqueue_log(self._handle, self._log_step)
        if error is not None:
            raise RuntimeError(error.decode())

    def _slot_columns(self, slot_mappings: Sequence[Tensor] | Tensor) -> list[int]:
        """(address, number of tokens) of each launch's slots, one after another."""
        columns: list[int] = []
        if isinstance(slot_mappings, Tensor):
            # By arithmetic: an index would be a trip through the dispatcher.
            _check_slots(slot_mappings)
            address = slot_mappings.data_ptr()
            row_bytes = slot_mappings.stride(0) * _ITEM
            num_tokens = slot_mappings.size(1)
            for group_id in self._group_ids:
                columns += (address + group_id * row_bytes, num_tokens)
            return columns
        for group_id in self._group_ids:
            slots = slot_mappings[group_id]
            _check_slots(slots)
            columns += (slots.data_ptr(), slots.numel())
        return columns

    def restore(
        self, acceptance: Acceptance, num_drafts: int, counters_to: Tensor | None
    ) -> None:
        """As Launches.restore."""
        if self._first_restore is not None:
            self._first_restore.restore(acceptance, 0, counters_to)
            self._first_restore = None
        to = 0 if counters_to is None else counters_to.data_ptr()
        if isinstance(acceptance, SampledIds):
            sampled, vocab_size = acceptance
            if sampled.dtype is not torch.int32 or not sampled.is_cuda:
                raise RuntimeError(
                    f"sampled_token_ids is {_kind(sampled)}; must be int32, on CUDA"
                )
            num_reqs, num_columns = sampled.shape
            self._pack_restore(
                self._restore_step,
                0,
                num_drafts,
                sampled.data_ptr(),
                *sampled.stride(),
                num_columns,
                vocab_size,
                0,
                num_reqs,
                to,
            )
        else:
            num_rejected = acceptance.num_rejected
            if num_rejected.dtype is not torch.int32 or not (
                num_rejected.is_cuda and num_rejected.is_contiguous()
            ):
                raise RuntimeError(
                    f"num_rejected is {_kind(num_rejected)}; must be int32, "
                    "contiguous, on CUDA"
                )
            self._pack_restore(
                self._restore_step,
                0,
                num_drafts,
                *(0, 0, 0, 0, 0),
                num_rejected.data_ptr(),
                num_rejected.numel(),
                to,
            )
        error = self._enqueue_restore(self._handle, self._restore_step)
        if error is not None:
            raise RuntimeError(error.decode())


def _constants(launch: Launch) -> tuple[int, ...]:
    """A row of PreparedLaunch."""
    group, table = launch.group, launch.part.table
    return (
        table.data_ptr(),
        table.shape[0],
        group.undo_log.data_ptr(),
        group.undo_log.stride(0),
        group.undo_log.shape[1],
        group.log_slots.data_ptr(),
        group.log_windows.data_ptr(),
        launch.counters.data_ptr(),
    )


def _check_slots(slots: Tensor) -> None:
    if slots.dtype is not torch.int64 or not slots.is_cuda or slots.stride(-1) != 1:
        raise RuntimeError(
            f"slot_mapping is {_kind(slots)}; must be int64, contiguous, on CUDA"
        )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
