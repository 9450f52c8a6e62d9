# SPDX-License-Identifier: Apache-2.0
"""PreparedLaunches: a step's log and restore on CUDA, each as one C call.

Between two steps of a model a lot of code runs, and what a step of ours runs is not in
the processor's cache when its turn comes: a call through PyTorch's dispatcher costs
several times what it costs in a tight loop, and so does one through ctypes. The tables,
the logs and the counters never change, so the C side keeps their part of the arguments.
A step hands over its own as integers to one builtin function, which makes all launches.

A step that is not as expected goes through the ops, which check every argument: the
first one, and any whose tensors have another dtype or other sizes than the host's
number of drafts says, or whose slots lie elsewhere than before. csrc/nwor/prepared.h is
the other side.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_void_p, py_object

import torch
from torch import Tensor

from . import ops
from .launches import Launch, OpLaunches
from .window import Acceptance, SampledIds, VerificationWindows

# Raised with every change of what prepared.h exports.
VERSION = 2
# int64 values in PreparedLaunch, LogStep, LogStepLaunch and RestoreStep.
COLUMNS = (8, 6, 2, 9)
_INT32, _INT64 = torch.int32, torch.int64
_INT32_BYTES = _INT32.itemsize


class PreparedLaunches:
    """As Launches, for tensors on one CUDA device."""

    def __init__(self, device: torch.device, launches: Sequence[Launch]) -> None:
        """device: where all tensors are, a CUDA device with its index.

        Raises:
            NworOpsUnavailable: no library, one without CUDA or without code for this
                GPU, one of another version, or not the one whose ops are registered.
        """
        ops.load("cuda")
        library = _loaded_library()
        missing = library.nwor_prepared_load(c_int64(device.index))
        if missing is not None:
            raise ops.NworOpsUnavailable(f"{ops.LIBRARY}: {missing.decode()}")
        self._launches = tuple(launches)
        constants = [value for launch in launches for value in _constants(launch)]
        handle = library.nwor_prepared_new(
            (c_int64 * len(constants))(*constants),
            c_int64(len(self._launches)),
            c_int64(device.index),
        )
        # Not when the interpreter ends: another thread may still be in a step then.
        weakref.finalize(self, library.nwor_prepared_free, handle).atexit = False
        self._handle: int = handle
        self._enqueue_log = _builtin(library, "nwor_prepared_log")
        self._enqueue_restore = _builtin(library, "nwor_prepared_restore")

        self._ops = OpLaunches(launches)
        # Addresses of the slot mappings that the ops have accepted, and the columns
        # that follow from them.
        self._known_slots: int | list[int] | None = None
        self._slot_columns: list[int] = []
        self._num_reqs = -1
        self._knows_restore = False

    def log(self, windows: VerificationWindows) -> None:
        """As Launches.log."""
        num_drafts, logits_indices, cu_num_logits, slot_mappings, skipped = windows
        if isinstance(slot_mappings, Tensor):
            slots: int | list[int] = slot_mappings.data_ptr()
        else:
            slots = [tensor.data_ptr() for tensor in slot_mappings]
        num_reqs = cu_num_logits.numel() - skipped
        num_logits = num_drafts + num_reqs
        index_dtype = logits_indices.dtype
        self._num_reqs = num_reqs
        is_known = (
            slots == self._known_slots
            and (index_dtype is _INT32 or index_dtype is _INT64)
            and cu_num_logits.dtype is _INT32
            and logits_indices.numel() == num_logits
            and logits_indices.is_contiguous()
            and cu_num_logits.is_contiguous()
        )
        if not is_known:
            self._ops.log(windows)
            self._learn_slots(slots, slot_mappings)
            return
        self._enqueue_log(
            self._handle,
            num_drafts,
            logits_indices.data_ptr(),
            index_dtype is _INT64,
            num_logits,
            cu_num_logits.data_ptr() + _INT32_BYTES * skipped,
            num_reqs,
            *self._slot_columns,
        )

    def _learn_slots(
        self, slots: int | list[int], slot_mappings: Sequence[Tensor] | Tensor
    ) -> None:
        """Remembers slot mappings that the ops took. A step sees the left part of a
        buffer that stays: what is known of it is its whole length."""
        columns: list[int] = []
        for launch in self._launches:
            of_group = slot_mappings[launch.group.group_id]
            storage = of_group.untyped_storage()
            behind = storage.data_ptr() + storage.nbytes() - of_group.data_ptr()
            length = behind // _INT64.itemsize
            if isinstance(slot_mappings, Tensor) and slot_mappings.dim() == 2:
                length = min(length, slot_mappings.stride(0))
            columns += (of_group.data_ptr(), length)
        self._slot_columns = columns
        self._known_slots = slots

    def restore(
        self, acceptance: Acceptance, num_drafts: int, counters_to: Tensor | None
    ) -> None:
        """As Launches.restore."""
        to = 0 if counters_to is None else counters_to.data_ptr()
        num_reqs = self._num_reqs
        if not self._knows_restore:
            is_known = False
        elif isinstance(acceptance, SampledIds):
            sampled, vocab_size = acceptance
            rows, num_columns = sampled.shape
            is_known = rows == num_reqs and sampled.dtype is _INT32
            if is_known:
                self._enqueue_restore(
                    self._handle,
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
            is_known = (
                num_rejected.numel() == num_reqs
                and num_rejected.dtype is _INT32
                and num_rejected.is_contiguous()
            )
            if is_known:
                self._enqueue_restore(
                    self._handle,
                    num_drafts,
                    *(0, 0, 0, 0, 0),
                    num_rejected.data_ptr(),
                    num_reqs,
                    to,
                )
        if not is_known:
            self._ops.restore(acceptance, num_drafts, counters_to)
            self._knows_restore = True


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


def _loaded_library() -> ctypes.CDLL:
    """The library whose ops are registered, with what prepared.h exports."""
    try:
        # A second copy of the ops would end the process.
        library = ctypes.CDLL(str(ops.LIBRARY), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise ops.NworOpsUnavailable(
            f"{ops.LIBRARY} is not where the registered ops came from: another copy of "
            "vllm-nwor is loaded"
        ) from error
    found = (c_int64 * (1 + len(COLUMNS)))()
    try:
        library.nwor_prepared_version(found)
        library.nwor_prepared_load.restype = c_char_p
        library.nwor_prepared_new.restype = c_void_p
        library.nwor_prepared_free.argtypes = [c_void_p]
    except AttributeError as error:
        found[0] = -1
        cause: Exception | None = error
    else:
        cause = None
    if tuple(found) != (VERSION, *COLUMNS):
        raise ops.NworOpsUnavailable(
            f"{ops.LIBRARY} is of another version of vllm-nwor (prepared launches "
            f"{tuple(found)}; expected {(VERSION, *COLUMNS)}): build it again"
        ) from cause
    return library


class _Interpreter(Structure):
    """NworInterpreter."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "as_long_long",
            "error_occurred",
            "set_error",
            "runtime_error",
            "none",
            "add_reference",
        )
    ]


class _MethodDef(Structure):
    """PyMethodDef of the stable ABI."""

    _fields_ = [
        ("name", c_char_p),
        ("function", c_void_p),
        ("flags", c_int),
        ("doc", c_char_p),
    ]


# Not ctypes.pythonapi, whose functions others may have given other argument types.
_api = ctypes.PyDLL(None)
_METH_FASTCALL = 0x80


def _interpreter() -> _Interpreter:
    def address(name: str) -> int | None:
        return ctypes.cast(getattr(_api, name), c_void_p).value

    return _Interpreter(
        address("PyLong_AsLongLong"),
        address("PyErr_Occurred"),
        address("PyErr_SetString"),
        id(RuntimeError),
        id(None),
        address("Py_IncRef"),
    )


def _builtin(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    """The function `name` of the library as a builtin of this interpreter."""
    library.nwor_prepared_interpreter(ctypes.byref(_interpreter()))
    definition = _MethodDef(
        name.encode(),
        ctypes.cast(getattr(library, name), c_void_p).value,
        _METH_FASTCALL,
        None,
    )
    make = _api.PyCFunction_NewEx
    make.argtypes = [POINTER(_MethodDef), py_object, c_void_p]
    make.restype = py_object
    # As its self, the definition lives as long as the function that points to it.
    function: Callable[..., None] = make(ctypes.byref(definition), definition, None)
    return function
