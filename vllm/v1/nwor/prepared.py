# SPDX-License-Identifier: Apache-2.0
"""A step's launches on CUDA as one C call each way: PreparedLaunches for log and
restore, PreparedPages for stage and commit.

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
from .shadow_pages import ShadowGroup, ShadowPages
from .window import Acceptance, SampledIds, VerificationWindows

# Raised with every change of what prepared.h exports.
VERSION = 6
# int64 values in PreparedLaunch, LogStep, LogStepLaunch, RestoreStep, PreparedPages,
# StageStep and StageStepLaunch.
COLUMNS = (8, 6, 2, 9, 19, 7, 2)
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
        library = _library_for(device)
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
        num_drafts, logits_indices, cu_num_logits, slot_mappings, skipped = windows[:5]
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
            columns += _whole_mapping(slot_mappings, launch.group.group_id)
        self._slot_columns = columns
        self._known_slots = slots

    def restore(
        self, acceptance: Acceptance, num_drafts: int, counters_to: Tensor | None
    ) -> None:
        """As Launches.restore."""
        columns = None
        if self._knows_restore:
            columns = _acceptance_columns(acceptance, self._num_reqs)
        if columns is None:
            self._ops.restore(acceptance, num_drafts, counters_to)
            self._knows_restore = True
            return
        self._enqueue_restore(
            self._handle,
            num_drafts,
            *columns,
            0 if counters_to is None else counters_to.data_ptr(),
        )


class PreparedPages(ShadowPages):
    """As ShadowPages, for tensors on one CUDA device. Row layouts only: each group has
    one table of layers."""

    def __init__(
        self,
        device: torch.device,
        groups: Sequence[ShadowGroup],
        counters: Sequence[Tensor],
    ) -> None:
        """As ShadowPages. Raises NworOpsUnavailable as PreparedLaunches does."""
        super().__init__(groups, counters)
        self._device = device
        self._library = _library_for(device)
        self._enqueue = (
            _builtin(self._library, "nwor_prepared_stage"),
            _builtin(self._library, "nwor_prepared_commit"),
        )
        self._group_ids = tuple(group.group_id for group in groups)
        # What was prepared, for the buffers that the ops accepted last; 0 for nothing.
        self._handle = 0
        self._free: weakref.finalize[..., PreparedPages] | None = None
        self._knows_commit = False

    def stage(self, windows: VerificationWindows) -> bool:
        cu_num_logits, slot_mappings, skipped, tables, starts, lens, seats = windows[2:]
        assert tables is not None
        assert starts is not None
        assert lens is not None
        num_reqs = cu_num_logits.numel() - skipped
        is_plain = cu_num_logits.dtype is _INT32 and cu_num_logits.is_contiguous()
        seats_at = 0
        seats_are_int64 = False
        if seats is not None:
            seats_at = seats.data_ptr()
            dtype = seats.dtype
            seats_are_int64 = dtype is _INT64
            is_plain = (
                is_plain
                and (dtype is _INT32 or seats_are_int64)
                and seats.numel() == num_reqs
                and seats.is_contiguous()
            )
        if is_plain and self._handle:
            places: list[int] = []
            whole = slot_mappings if isinstance(slot_mappings, Tensor) else None
            for group_id in self._group_ids:
                mapping = slot_mappings[group_id] if whole is None else whole
                places += (mapping.data_ptr(), tables[group_id].data_ptr())
            self._windows = windows
            self._num_reqs = num_reqs
            # What fails may have patched any; what is not patched stays as it is.
            self._num_patched = len(self.groups)
            try:
                if self._enqueue[0](
                    self._handle,
                    cu_num_logits.data_ptr() + _INT32_BYTES * skipped,
                    seats_at,
                    seats_are_int64,
                    num_reqs,
                    self.step,
                    starts.data_ptr(),
                    lens.data_ptr(),
                    *places,
                ):
                    return True
            except Exception:
                self.abort()
                raise
        if not super().stage(windows):
            return False
        self._prepare(windows)
        return True

    def _prepare(self, windows: VerificationWindows) -> None:
        """Remembers buffers that the ops took, in their whole size: a step sees the
        left part of each."""
        starts, lens = windows.query_start_loc, windows.seq_lens
        slot_mappings = windows.slot_mappings
        assert windows.block_tables is not None
        assert starts is not None
        assert lens is not None
        most_reqs = min(
            self.num_seats,
            _bytes_behind(starts) // _INT32_BYTES - 1,
            _bytes_behind(lens) // _INT32_BYTES,
        )
        constants: list[int] = []
        for group, counters in zip(self.groups, self._counters, strict=True):
            (part,) = group.tables
            table = windows.block_tables[group.group_id]
            row_bytes = table.stride(0) * _INT32_BYTES
            mapping = slot_mappings
            if not isinstance(mapping, Tensor):
                mapping = mapping[group.group_id]
            constants += (
                part.table.data_ptr(),
                part.table.shape[0],
                table.data_ptr(),
                _bytes_behind(table) // row_bytes,
                table.stride(0),
                table.shape[1],
                *_whole_mapping(slot_mappings, group.group_id),
                mapping.data_ptr(),
                starts.data_ptr(),
                lens.data_ptr(),
                most_reqs,
                group.saved.data_ptr(),
                group.num_seats,
                group.span,
                group.first_entry,
                group.num_real_entries,
                group.entry_tokens,
                counters.data_ptr(),
            )
        handle = self._library.nwor_prepared_pages_new(
            (c_int64 * len(constants))(*constants),
            c_int64(len(self.groups)),
            c_int64(self._device.index),
        )
        if self._free is not None:
            self._free()  # what was prepared for other tables
        self._free = weakref.finalize(self, self._library.nwor_prepared_free, handle)
        self._free.atexit = False
        self._handle = handle
        self._knows_commit = False

    def commit(self, acceptance: Acceptance, counters_to: Tensor | None = None) -> None:
        columns = None
        if self._knows_commit:
            columns = _acceptance_columns(acceptance, self._num_reqs)
        if columns is None:
            super().commit(acceptance, counters_to)
            self._knows_commit = True
            return
        to = 0 if counters_to is None else counters_to.data_ptr()
        try:
            self._enqueue[1](self._handle, 0, *columns, to)
        except Exception:
            self.abort()
            raise
        self._windows = None


def _acceptance_columns(
    acceptance: Acceptance, num_reqs: int
) -> tuple[int, ...] | None:
    """The columns of RestoreStep between its first and its last; None where the
    acceptance is not that of `num_reqs` requests as vLLM gives it."""
    if isinstance(acceptance, SampledIds):
        sampled, vocab_size = acceptance
        rows, num_columns = sampled.shape
        if rows != num_reqs or sampled.dtype is not _INT32:
            return None
        strides = sampled.stride()
        return (sampled.data_ptr(), *strides, num_columns, vocab_size, 0, num_reqs)
    num_rejected = acceptance.num_rejected
    if (
        num_rejected.numel() != num_reqs
        or num_rejected.dtype is not _INT32
        or not num_rejected.is_contiguous()
    ):
        return None
    return (0, 0, 0, 0, 0, num_rejected.data_ptr(), num_reqs)


def _whole_mapping(
    slot_mappings: Sequence[Tensor] | Tensor, group_id: int
) -> tuple[int, int]:
    """Address and entries of the buffer whose left part a step sees."""
    of_group = slot_mappings[group_id]
    length = _bytes_behind(of_group) // _INT64.itemsize
    if isinstance(slot_mappings, Tensor) and slot_mappings.dim() == 2:
        length = min(length, slot_mappings.stride(0))
    return of_group.data_ptr(), length


def _bytes_behind(tensor: Tensor) -> int:
    """From its first element to the end of its storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes() - tensor.data_ptr()


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


def _library_for(device: torch.device) -> ctypes.CDLL:
    """The library, its kernels loaded on `device`. Raises NworOpsUnavailable."""
    ops.load("cuda")
    library = _loaded_library()
    missing = library.nwor_prepared_load(c_int64(device.index))
    if missing is not None:
        raise ops.NworOpsUnavailable(f"{ops.LIBRARY}: {missing.decode()}")
    return library


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
    # Room for what another version may have: it writes all of its own.
    found = (c_int64 * 64)()
    try:
        library.nwor_prepared_version(found)
        library.nwor_prepared_load.restype = c_char_p
        library.nwor_prepared_new.restype = c_void_p
        library.nwor_prepared_pages_new.restype = c_void_p
        library.nwor_prepared_free.argtypes = [c_void_p]
    except AttributeError as error:
        found[0] = -1
        cause: Exception | None = error
    else:
        cause = None
    told = tuple(found[: 1 + len(COLUMNS)])
    if told != (VERSION, *COLUMNS):
        raise ops.NworOpsUnavailable(
            f"{ops.LIBRARY} is of another version of vllm-nwor (prepared launches "
            f"{told}; expected {(VERSION, *COLUMNS)}): build it again"
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
            "yes",
            "no",
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
        id(True),
        id(False),
        address("Py_IncRef"),
    )


# By address. They live as long as the process: the garbage collector may clear what a
# builtin points to, its definition, before the builtin, and then reads freed memory.
_builtins: dict[int, tuple[Callable[..., bool], _MethodDef]] = {}


def _builtin(library: ctypes.CDLL, name: str) -> Callable[..., bool]:
    """The function `name` of the library as a builtin of this interpreter."""
    address = ctypes.cast(getattr(library, name), c_void_p).value
    assert address is not None
    if address not in _builtins:
        library.nwor_prepared_interpreter(ctypes.byref(_interpreter()))
        definition = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
        make = _api.PyCFunction_NewEx
        make.argtypes = [POINTER(_MethodDef), py_object, c_void_p]
        make.restype = py_object
        _builtins[address] = make(ctypes.byref(definition), None, None), definition
    return _builtins[address][0]
