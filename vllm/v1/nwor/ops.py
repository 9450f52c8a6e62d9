# SPDX-License-Identifier: Apache-2.0
"""The native ops: loads the library, registers fakes, and says what each op does.

csrc/nwor/ implements them for the CPU and for CUDA. There are two ways to call them,
with the same checks and texts:
- the attributes of this module are ops of PyTorch, in `torch.ops._C_cache_ops`;
- the attributes of what `load` returns are for a step, where PyTorch's dispatcher costs
  more than the op (csrc/nwor/python_bindings.cpp): the audit's ops as builtins, which
  take all of their arguments, by position; and two classes, LoggedLayers and
  StagedLayers, which make the other ops' launches step after step: what no step changes
  is given, and checked, once. On CUDA the tensors' device must be current.

All of them copy bytes, blind to dtypes. None allocates or
waits for the device: on CUDA each is one launch on the current stream, and may run in a
captured graph; on the CPU a call returns when the copy is done, having checked every
value before the first byte is written. On CUDA only what the host knows is checked;
drafts whose slot is out of range are left alone, and counted as `invalid_slots`.
A bad argument raises RuntimeError, which names it, its value and the rule.

An op hides which caches it reads and writes behind a table of addresses, where PyTorch
cannot see them. Who holds the table keeps the caches alive, and keeps the calls out of
anything that reorders ops by their schemas.

Words: a draft's place in a batch follows from `cu_num_logits`, the inclusive cumulative
number of logits rows; a request has 1 + k rows, the first of which is no draft. With
k = [2, 0, 1] it is [3, 4, 6]: drafts 0 and 1 are rows 1 and 2, draft 2 is row 5.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# Columns of a layer table, int64 [num_layers, 9], in bytes unless they count.
TABLE_COLUMNS = (
    "base",  # address of the layer's first byte
    "block_stride",
    "slot_stride",
    "head_stride",
    "num_heads",
    "run_bytes",
    "block_size",  # slots per block
    "num_blocks",
    "log_offset",  # of this layer's bytes in a row of the undo log
)

# Columns of a row of counters, int64 [9]. shadow_windows: windows that were verified in
# shadow blocks; the undo log protected the others.
COUNTER_COLUMNS = (
    "windows",
    "staged",
    "committed",
    "rejected",
    "shadow_windows",
    "restored_bytes",
    "invalid_slots",
    "shadow_copied_bytes",
    "committed_bytes",
)

# Columns of a seat saved by `stage`, int32, in front of its real and shadow entries.
SAVED_COLUMNS = 11

# log_slots entries that are no slot: padding or no draft; refused on the device.
PAD_SLOT = -1
INVALID_SLOT = -2

# first_shadow_slot of a group without shadow blocks.
NO_SHADOW = 2**63 - 1

LIBRARY = Path(__file__).with_name("_nwor_C.so")
# kVersion of csrc/nwor/python_bindings.cpp.
VERSION = 7

_NAMESPACE = "_C_cache_ops"
AUDIT_NAMES = (
    *("audit_seat", "audit_plan", "audit_resolve"),
    *("audit_blocks", "audit_snapshot"),
)
NAMES = (
    *("log_cache_slots", "restore_rejected_drafts"),
    *("stage", "commit_draft_layer", "unstage", *AUDIT_NAMES),
)
CLASSES = ("LoggedLayers", "StagedLayers")
# Set on torch's namespace object, for a second copy of this module: whose ops it has.
_LIBRARY_MARK = "nwor_library"


class NworOpsUnavailable(RuntimeError):
    """The native library, or its part for the device asked for, is not there."""


def load(device_type: str = "cpu") -> ModuleType:
    """Makes the ops available; the library, a module that has what a step calls.

    device_type: "cpu" or "cuda", where the ops shall run.

    Raises:
        NworOpsUnavailable: the library is missing, cannot be loaded, is another copy or
            of another version, or was built without CUDA and device_type asks for it.
            Nothing is guessed or built.
    """
    library = _load_library()
    if device_type == "cuda" and not has_cuda():
        raise NworOpsUnavailable(
            f"{LIBRARY} has no CUDA code; build it again with nvcc on PATH: "
            "NWOR_CUDA=ON pip install --no-build-isolation --no-deps ."
        )
    if device_type not in ("cpu", "cuda"):
        raise NworOpsUnavailable(f"device_type is {device_type!r}; must be cpu or cuda")
    return library


def load_builtins(device: torch.device) -> SimpleNamespace:
    """The library's builtin functions and classes, by name: what a step calls. On CUDA
    also loads the kernels of log, restore, stage and commit, which a step should not
    wait for.

    Raises:
        NworOpsUnavailable: on CUDA also if there is no code for this GPU.
    """
    library = load(device.type)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            library.load_kernels(index)
        except RuntimeError as error:
            raise NworOpsUnavailable(f"{LIBRARY}: {error}") from error
    called = (*AUDIT_NAMES, *CLASSES)
    return SimpleNamespace(**{name: getattr(library, name) for name in called})


class _Waits:
    """An object each of whose methods then waits for the device."""

    def __init__(self, of: object, device: torch.device) -> None:
        self._of, self._device = of, device

    def __getattr__(self, name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            getattr(self._of, name)(*arguments)
            torch.accelerator.synchronize(self._device)

        return run


def that_wait(ops: Any, device: torch.device) -> SimpleNamespace:
    """The classes of `ops`, whose launches are waited for: VLLM_NWOR_DEBUG_SYNC."""

    def waiting(of: Callable[..., object]) -> Callable[..., _Waits]:
        return lambda *made_of: _Waits(of(*made_of), device)

    return SimpleNamespace(**{name: waiting(getattr(ops, name)) for name in CLASSES})


def has_cuda() -> bool:
    """Whether the loaded library has CUDA code (not: whether there is a GPU)."""
    return hasattr(_load_library(), "cuda_build")


@cache
def _load_library() -> ModuleType:
    namespace = getattr(torch.ops, _NAMESPACE)
    imported = sys.modules.get(f"{__package__}._nwor_C")  # by somebody else
    is_ours = getattr(imported, "__file__", None) == str(LIBRARY)
    # Two libraries with the same op end the process without an exception.
    if getattr(namespace, _LIBRARY_MARK, None) != LIBRARY:
        if hasattr(namespace, "log_cache_slots") and not is_ours:
            raise NworOpsUnavailable(
                f"{LIBRARY} is not where the registered ops came from: another copy of "
                "vllm-nwor is loaded"
            )
        if not LIBRARY.is_file():
            raise NworOpsUnavailable(
                f"{LIBRARY} does not exist; build it: "
                "pip install --no-build-isolation --no-deps ."
            )
        setattr(namespace, _LIBRARY_MARK, LIBRARY)
    try:
        library = importlib.import_module("._nwor_C", __package__)
    except ImportError as error:
        raise NworOpsUnavailable(
            f"{LIBRARY} cannot be loaded ({error}); build it again with the "
            f"installed torch {torch.__version__}: "
            "pip install --no-build-isolation --no-deps ."
        ) from error
    if library.version != VERSION:
        raise NworOpsUnavailable(
            f"{LIBRARY}: it is of another version of vllm-nwor: build it again"
        )
    for name in NAMES:
        torch.library.register_fake(f"{_NAMESPACE}::{name}", _no_result)
    # torch's own objects: no search by argument types at each call, no frame of ours,
    # and nothing that torch.compile could not trace.
    globals().update({name: getattr(namespace, name).default for name in NAMES})
    return library


def _no_result(*_args: object) -> None:
    """Fake of every op: they mutate their arguments and return nothing."""


def publish(to: Tensor, counters: Tensor) -> None:
    """Copies `counters`, [rows, 9] int64, to `to`; does not wait for the device.
    Mutated: `to`, on the host, in pinned memory if `counters` is on a device.
    """
    to.copy_(counters, non_blocking=True)


# The ops, once loaded; arguments are in the order of csrc/nwor/ops.h.

log_cache_slots: OpOverload
"""Copies the bytes at all draft slots, of all layers, to the undo log.

All tensors on one device, contiguous unless said.
table: [num_layers, 9] int64, TABLE_COLUMNS; every layer has as many slots.
runs: [block_size, num_runs, 2] int32, (offset in block, length) of the runs of each
    slot of a packed layout; CPU only. None: the table describes rows.
slot_mapping: [>= num_tokens] or [1, >= num_tokens] int64. logits_indices:
    [num_logits] int32 or int64, rows of slot_mapping. cu_num_logits:
    [num_leading_zeros + num_reqs] int32.
undo_log: [capacity, log_row_bytes] uint8, rows may be strided. Mutated: draft d,
    layer l at row d from log_offset[l], runs one after another.
log_slots: [capacity] int64. Mutated: the draft's slot; PAD_SLOT for padding.
log_windows: [capacity, 3] int32. Mutated: (request, position, drafts in window).
num_drafts: an upper bound of the number of drafts, known to the host; entries from
    the true number on become (PAD_SLOT, (-1, -1, 0)). 0 does nothing. On CUDA
    drafts beyond it are not logged.
first_shadow_slot: slots from here on are shadow blocks'; NO_SHADOW: there are none. A
    draft with such a slot was staged in the same step: it is not logged, and its entry
    becomes (PAD_SLOT, (-1, -1, 0)), which restore_rejected_drafts neither restores nor
    counts.
"""

restore_rejected_drafts: OpOverload
"""Copies the rejected drafts' old bytes back to all layers, and counts.

table, runs, undo_log, log_slots, log_windows, num_drafts: as log_cache_slots left
    them. Mutated: the caches behind the table, at rejected slots only.
sampled_token_ids: [num_reqs, >= 1] int32, any strides: a token is valid if it is
    not -1 and below vocab_size; n valid ones accept n - 1 drafts of the window.
num_rejected: [num_reqs] int32: rejected drafts of each window. Exactly one of the
    two is given. A draft is rejected if its position is not below the number of
    accepted ones.
counters: [9] int64, COUNTER_COLUMNS. Mutated: added to.
counters_to: [9] int64, cpu, in pinned memory for CUDA. Mutated: what counters have
    become, unless num_drafts is 0.
"""

stage: OpOverload
"""Puts shadow blocks in the place of the blocks that hold drafts, for one step.

An entry of a block table stands for `entry_tokens` positions: entry e, offset o is
slot e * entry_tokens + o. The drafts of request r are its last k positions, with
1 + k logits rows. Each entry that holds one of them is replaced by the shadow entry
first_entry + seat * span + (its place in the row) % span: in block_table, and in
the slots of this step's rows in it. The committed rows of the first such entry are
copied to the shadow in all layers, unless the shadow has them: the seat was
committed in step - 1, up to this step's first row, and to the entry that is in the
table now.

table, runs: as log_cache_slots; the caches behind it are mutated, in shadow entries
    only. A layer's block size divides entry_tokens.
block_table: [>= num_reqs, width] int32, rows may be strided. Mutated.
slot_mapping: [>= num_tokens] or [1, >= num_tokens] int64. Mutated.
query_start_loc: [>= num_reqs + 1] int32. seq_lens: [>= num_reqs] int32, this step's
    rows included. cu_num_logits: [num_leading_zeros + num_reqs] int32, inclusive.
state_indices: [num_reqs] int32 or int64, the index of each request in the runner's
    states, no two alike; its seat is seat_of_state at that index. None: request r has
    seat r. A request whose seat is not one of `saved` has none: its window is not
    staged, and not counted.
seat_of_state: [num_states] int32, -1: none. None: the index is the seat.
saved: [num_seats, SAVED_COLUMNS + 2 * span] int32, zeros before the first use.
    Mutated: what the other calls of the step need, and the next one.
num_real_entries: entries from here on are not the scheduler's.
step: 1 or more; one more with every step that may write to the caches, those
    without drafts included.
patches: False for all but the first call of a group whose layers come in several
    tables: it copies by what the first one saved.
rest_is_logged: log_cache_slots follows in this step, for the windows that are not
    staged.

A window whose entries or slots are not as described is left alone: its drafts go
to the real blocks. If rest_is_logged, the log takes it; else commit_draft_layer counts
its drafts as `invalid_slots`.
"""

commit_draft_layer: OpOverload
"""Copies the rows that this step wrote to shadow blocks and that are kept (target,
accepted drafts, and any before them) to the real blocks, in all layers of a table;
counts; puts block table and slots back.

table, runs, block_table, slot_mapping, state_indices, saved, entry_tokens,
    seat_of_state:
    as in stage.
    Mutated: the caches at the kept rows; what stage wrote in block_table and
    slot_mapping, where it still stands there; saved, for the next step.
sampled_token_ids, vocab_size, num_rejected, counters, counters_to: as in
    restore_rejected_drafts.
num_reqs: as in cu_num_logits of stage.
undoes: False for all but the last call of a group with several tables.
"""

unstage: OpOverload
"""Puts back what stage wrote to block_table and slot_mapping, where it still stands
there, and copies nothing: a step that failed. Arguments: as commit_draft_layer."""

# Classes of the library. Their methods take all arguments, by position, named as those
# of the ops; they need not be called with what the class was made of, and keep it.
#
# LoggedLayers(source, source_runs, table, runs, undo_log, log_slots, log_windows,
#     counters, ring, first_shadow_slot): of one table.
#   log(slot_mapping, logits_indices, cu_num_logits, num_drafts, num_leading_zeros)
#   restore(sampled_token_ids, vocab_size, num_rejected, num_drafts, slot)
# StagedLayers(table, runs, saved, counters, ring, first_entry, num_real_entries, span,
#     entry_tokens, seat_of_state, patches, undoes): of one table.
#   stage(block_table, slot_mapping, query_start_loc, seq_lens, cu_num_logits,
#       state_indices, step, rest_is_logged, num_leading_zeros): block_table,
#       slot_mapping and state_indices have to stay until the step ends.
#   commit(sampled_token_ids, vocab_size, num_rejected, slot): of the staged step.
#   unstage(): does nothing where no step is staged, or its commit put the tables back.
#
# source, source_runs: of the table that a log copies from. ring: [slots, 9] int64, cpu,
# rows may be strided, in pinned memory for CUDA. slot: of the ring, which is the step's
# counters_to; -1: none.
