# SPDX-License-Identifier: Apache-2.0
"""The ops as builtin functions, past PyTorch's dispatcher: what a step calls.

Between two steps of a model a lot of code runs, and what a step of ours runs is not in
the processor's cache when its turn comes: a call through the dispatcher costs several
times what it costs in a tight loop, and so does one through ctypes. A builtin of
csrc/nwor/builtins.h takes the arguments of the op of its name in `ops`, all of them and
by position, and refuses what that refuses with the same text. On CUDA the device of the
tensors must be the current one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_void_p, py_object
from functools import cache
from types import SimpleNamespace

import torch

from . import ops

# kNworBuiltinsVersion.
VERSION = 2
_METH_FASTCALL = 0x80

# Not ctypes.pythonapi, whose functions others may have given other argument types.
_api = ctypes.PyDLL(None)


class _Interpreter(Structure):
    """NworInterpreter."""

    _fields_ = [
        ("version", c_int64),
        *(
            (name, c_void_p)
            for name in (
                "as_long_long",
                "error_occurred",
                "set_error",
                "add_reference",
                "remove_reference",
                "runtime_error",
                "none",
                "dlpack",
            )
        ),
    ]


class _Builtin(Structure):
    """NworBuiltin."""

    _fields_ = [("name", c_char_p), ("function", c_void_p)]


class _MethodDef(Structure):
    """PyMethodDef of the stable ABI."""

    _fields_ = [
        ("name", c_char_p),
        ("function", c_void_p),
        ("flags", c_int),
        ("doc", c_char_p),
    ]


def load(device: torch.device) -> SimpleNamespace:
    """The builtins by the names of the ops. On CUDA also the kernels of log, restore,
    stage and commit, which a step should not wait for.

    Raises:
        NworOpsUnavailable: no library, one of another version, or not the one whose ops
            are registered; a PyTorch without DLPack's exchange API; on CUDA a library
            without CUDA or without code for this GPU.
    """
    ops.load(device.type)
    library = _loaded_library()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        missing = library.nwor_load_kernels(c_int64(index))
        if missing is not None:
            raise ops.NworOpsUnavailable(f"{ops.LIBRARY}: {missing.decode()}")
    builtins = _builtins()
    return SimpleNamespace(**{name: builtins[name] for name in ops.NAMES})


def remember(owner: object, tensors: Iterable[torch.Tensor]) -> None:
    """As long as `owner` lives the builtins take these objects for what they are now:
    to look at a tensor takes a step longer than all that is done with it. Their shapes,
    strides and memory must not change. Requires that `load` was called."""
    builtins, known = _builtins(), tuple(tensors)
    weakref.finalize(owner, _forget, builtins["forget"], known)
    for tensor in known:
        builtins["remember"](tensor)


def _forget(forget: Callable[..., None], tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        forget(tensor)


def _loaded_library() -> ctypes.CDLL:
    """The library whose ops are registered, with what builtins.h exports."""
    try:
        # A second copy of the ops would end the process.
        library = ctypes.CDLL(str(ops.LIBRARY), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise ops.NworOpsUnavailable(
            f"{ops.LIBRARY} is not where the registered ops came from: another copy of "
            "vllm-nwor is loaded"
        ) from error
    try:
        library.nwor_builtins.restype = c_char_p
        library.nwor_load_kernels.restype = c_char_p
    except AttributeError as error:
        raise ops.NworOpsUnavailable(
            f"{ops.LIBRARY}: it is of another version of vllm-nwor: build it again"
        ) from error
    return library


# Kept as long as the process lives: the garbage collector may clear what a builtin
# points to, its definition, before the builtin, and then reads freed memory.
@cache
def _builtins() -> dict[str, Callable[..., None]]:
    found = POINTER(_Builtin)()
    refused = _loaded_library().nwor_builtins(
        ctypes.byref(_interpreter()), ctypes.byref(found)
    )
    if refused is not None:
        raise ops.NworOpsUnavailable(f"{ops.LIBRARY}: {refused.decode()}")
    make = _api.PyCFunction_NewEx
    make.argtypes = [POINTER(_MethodDef), py_object, c_void_p]
    make.restype = py_object
    builtins = {}
    for number in itertools.count():
        op = found[number]
        if op.name is None:
            break
        definition = _MethodDef(op.name, op.function, _METH_FASTCALL, None)
        _definitions.append(definition)
        builtins[op.name.decode()] = make(definition, None, None)
    return builtins


_definitions: list[_MethodDef] = []


def _interpreter() -> _Interpreter:
    def address(name: str) -> int | None:
        return ctypes.cast(getattr(_api, name), c_void_p).value

    get_pointer = _api.PyCapsule_GetPointer
    get_pointer.argtypes = [py_object, c_char_p]
    get_pointer.restype = c_void_p
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        raise ops.NworOpsUnavailable(
            f"torch {torch.__version__} has no DLPack exchange API; 2.11 or later has"
        )
    return _Interpreter(
        VERSION,
        address("PyLong_AsLongLong"),
        address("PyErr_Occurred"),
        address("PyErr_SetString"),
        address("Py_IncRef"),
        address("Py_DecRef"),
        id(RuntimeError),
        id(None),
        get_pointer(exchange, b"dlpack_exchange_api"),
    )
