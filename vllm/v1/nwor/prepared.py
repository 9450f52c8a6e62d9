# SPDX-License-Identifier: Apache-2.0
"""PreparedOps: log and restore on CUDA without a trip through PyTorch's dispatcher.

Between two steps of a model a lot of code runs, and a call through the dispatcher finds
its own code nowhere in the processor's cache: that is a large part of what an op costs
on the host. The tables, the log and the counters
never change, so their part of a launch's arguments is filled in once, in the structs
that the launchers take; a step sets what is its own, and calls one C function.

The methods have the signatures of `ops`. The first call for a table goes through the
op, with no drafts: it checks every argument and copies nothing. Later calls check what
a step can change. csrc/nwor/prepared.h is the other side.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from vllm.v1.nwor import ops


class _Table(Structure):
    _fields_ = [("rows", c_void_p), ("num_layers", c_int64)]


class _Runs(Structure):
    _fields_ = [("data", c_void_p), ("block_size", c_int64), ("num_runs", c_int64)]


class _Batch(Structure):
    _fields_ = [
        ("slot_mapping", c_void_p),
        ("num_tokens", c_int64),
        ("logits_indices", c_void_p),
        ("logits_indices_is_int64", c_bool),
        ("num_logits", c_int64),
        ("cu_num_logits", c_void_p),
        ("num_reqs", c_int64),
    ]


class _UndoLog(Structure):
    _fields_ = [
        ("bytes", c_void_p),
        ("row_stride", c_int64),
        ("row_bytes", c_int64),
        ("slots", c_void_p),
        ("windows", c_void_p),
    ]


class _Acceptance(Structure):
    _fields_ = [
        ("sampled_token_ids", c_void_p),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("num_columns", c_int64),
        ("vocab_size", c_int64),
        ("num_rejected", c_void_p),
        ("num_reqs", c_int64),
    ]


class _LogArgs(Structure):
    _fields_ = [
        ("table", _Table),
        ("runs", _Runs),
        ("batch", _Batch),
        ("log", _UndoLog),
        ("num_drafts", c_int64),
    ]


class _RestoreArgs(Structure):
    _fields_ = [
        ("table", _Table),
        ("runs", _Runs),
        ("log", _UndoLog),
        ("acceptance", _Acceptance),
        ("counters", c_void_p),
        ("num_drafts", c_int64),
    ]


class PreparedOps:
    """log_cache_slots and restore_rejected_drafts of `ops`, for tensors that stay.

    Requires that table, undo_log, log_slots, log_windows and counters live as long as
    this object, and that their device is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        """device: where all tensors are, a CUDA device with its index.

        Raises:
            NworOpsUnavailable: no library, one without CUDA, or one of other structs.
        """
        ops.load("cuda")
        library = ctypes.CDLL(str(ops.LIBRARY))
        sizes = (c_int64 * 2)()
        library.nwor_prepared_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(_LogArgs), ctypes.sizeof(_RestoreArgs)]:
            raise ops.NworOpsUnavailable(
                f"{ops.LIBRARY} has launch arguments of {list(sizes)} bytes; this "
                "version of vllm-nwor has "
                f"{[ctypes.sizeof(_LogArgs), ctypes.sizeof(_RestoreArgs)]}: build it "
                "again"
            )
        self._log = library.nwor_prepared_log
        self._log.argtypes = [POINTER(_LogArgs), c_int32]
        self._restore = library.nwor_prepared_restore
        self._restore.argtypes = [POINTER(_RestoreArgs), c_int32]
        self._publish = library.nwor_prepared_publish
        self._publish.argtypes = [c_void_p, c_void_p, c_int64, c_int32]
        for function in (self._log, self._restore, self._publish):
            function.restype = c_char_p
        self._log_args: dict[int, _LogArgs] = {}
        self._restore_args: dict[tuple[int, int], _RestoreArgs] = {}
        self._device = device.index

    def log_cache_slots(
        self,
        table: Tensor,
        runs: Tensor | None,
        slot_mapping: Tensor,
        logits_indices: Tensor,
        cu_num_logits: Tensor,
        undo_log: Tensor,
        log_slots: Tensor,
        log_windows: Tensor,
        num_drafts: int,
    ) -> None:
        """As ops.log_cache_slots."""
        args = self._log_args.get(id(table))
        if args is None:
            ops.log_cache_slots(
                table,
                runs,
                slot_mapping,
                logits_indices,
                cu_num_logits,
                undo_log,
                log_slots,
                log_windows,
                0,
            )
            args = _LogArgs(
                table=_Table(table.data_ptr(), table.shape[0]),
                log=_undo_log(undo_log, log_slots, log_windows),
            )
            self._log_args[id(table)] = args
        _check("slot_mapping", slot_mapping, torch.int64)
        _check("cu_num_logits", cu_num_logits, torch.int32)
        is_int64 = logits_indices.dtype is torch.int64
        _check(
            "logits_indices", logits_indices, torch.int64 if is_int64 else torch.int32
        )
        batch = args.batch
        batch.slot_mapping = slot_mapping.data_ptr()
        batch.num_tokens = slot_mapping.numel()
        batch.logits_indices = logits_indices.data_ptr()
        batch.logits_indices_is_int64 = is_int64
        batch.num_logits = logits_indices.numel()
        batch.cu_num_logits = cu_num_logits.data_ptr()
        batch.num_reqs = cu_num_logits.numel()
        args.num_drafts = num_drafts
        _raise(self._log(args, self._device))

    def restore_rejected_drafts(
        self,
        table: Tensor,
        runs: Tensor | None,
        undo_log: Tensor,
        log_slots: Tensor,
        log_windows: Tensor,
        sampled_token_ids: Tensor | None,
        vocab_size: int,
        num_rejected: Tensor | None,
        counters: Tensor,
        num_drafts: int,
    ) -> None:
        """As ops.restore_rejected_drafts."""
        args = self._restore_args.get((id(table), id(counters)))
        if args is None:
            ops.restore_rejected_drafts(
                table,
                runs,
                undo_log,
                log_slots,
                log_windows,
                sampled_token_ids,
                vocab_size,
                num_rejected,
                counters,
                0,
            )
            args = _RestoreArgs(
                table=_Table(table.data_ptr(), table.shape[0]),
                log=_undo_log(undo_log, log_slots, log_windows),
                counters=counters.data_ptr(),
            )
            self._restore_args[id(table), id(counters)] = args
        acceptance = args.acceptance
        if num_rejected is not None:
            _check("num_rejected", num_rejected, torch.int32)
            acceptance.num_rejected = num_rejected.data_ptr()
            acceptance.num_reqs = num_rejected.numel()
        else:
            assert sampled_token_ids is not None
            if not (
                sampled_token_ids.dtype is torch.int32 and sampled_token_ids.is_cuda
            ):
                raise RuntimeError(
                    f"sampled_token_ids is {sampled_token_ids.dtype} on "
                    f"{sampled_token_ids.device}; must be torch.int32 on CUDA"
                )
            acceptance.num_rejected = None
            acceptance.num_reqs, acceptance.num_columns = sampled_token_ids.shape
            acceptance.row_stride, acceptance.column_stride = sampled_token_ids.stride()
            acceptance.sampled_token_ids = sampled_token_ids.data_ptr()
            acceptance.vocab_size = vocab_size
        args.num_drafts = num_drafts
        _raise(self._restore(args, self._device))

    def publish(self, to: Tensor, counters: Tensor) -> None:
        """Enqueues a copy of `counters` (contiguous, device) to `to` (pinned)."""
        _raise(
            self._publish(
                to.data_ptr(), counters.data_ptr(), counters.nbytes, self._device
            )
        )


def _undo_log(undo_log: Tensor, log_slots: Tensor, log_windows: Tensor) -> _UndoLog:
    return _UndoLog(
        undo_log.data_ptr(),
        undo_log.stride(0),
        undo_log.shape[1],
        log_slots.data_ptr(),
        log_windows.data_ptr(),
    )


def _check(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype or not (tensor.is_cuda and tensor.is_contiguous()):
        raise RuntimeError(
            f"{name} is {tensor.dtype} on {tensor.device} with strides "
            f"{tensor.stride()}; must be {dtype}, contiguous, on CUDA"
        )


def _raise(text: bytes | None) -> None:
    if text is not None:
        raise RuntimeError(text.decode())
