# SPDX-License-Identifier: Apache-2.0
"""The native library: loads it, registers fakes, and documents each op.

csrc/nwor implements the ops for the CPU and for CUDA. There are two ways to call them,
with the same checks and messages:

- `torch.ops._C_cache_ops`, or the attributes of this module, which are the same
  objects: the public way for the five ops of the transaction. They are ops of PyTorch,
  so they can be traced, compiled and captured.
- `load_builtins`: what a step calls. The classes LoggedLayers and StagedLayers launch
  the same ops for one table of layers, step after step; arguments that no step changes
  are given, and checked, once. The audit's ops are builtin functions there and nowhere
  else. All arguments are positional. On CUDA the tensors' device must be current.

A step does not go through PyTorch's dispatcher, because begin and commit then take the
host 107 us instead of 34 us (mode cow, batch 16, H100, commit d81494b;
results/cases.jsonl, case `dispatcher`, `ops` and `prepared`).

All ops copy bytes and ignore dtypes. None allocates memory or waits for the device: on
CUDA each is one launch on the current stream, and may run in a captured graph; on the
CPU a call returns when the copy is done, and checks every value before it writes the
first byte. On CUDA only what the host knows is checked; drafts whose slot is out of
range are left alone, and counted as `invalid_slots`. A bad argument raises
RuntimeError, which names it, its value and what is allowed.

An op finds the caches through addresses in a table, so PyTorch does not see
them. The owner of the table keeps the caches alive, and keeps the calls out of anything
that reorders ops by their schemas.

A draft's place in a batch follows from `cu_num_logits`, the inclusive cumulative number
of logits rows. A request has 1 + k rows; the first one is not a draft. With k = [2, 0,
1] it is [3, 4, 6]: drafts 0 and 1 are rows 1 and 2, draft 2 is row 5.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

LIBRARY = Path(__file__).with_name("_nwor_C.so")
# kVersion of csrc/nwor/bindings/python_bindings.cpp.
VERSION = 11

_NAMESPACE = "_C_cache_ops"
# The ops of the transaction, which PyTorch's dispatcher has.
NAMES = (
    *("log_cache_slots", "restore_rejected_drafts"),
    *("stage", "commit_draft_layer", "unstage"),
)
# A step calls their methods.
CLASSES = ("LoggedLayers", "StagedLayers")
AUDIT_NAMES = (
    *("audit_seat", "audit_plan", "audit_reseed"),
    *("audit_resolve", "audit_blocks", "audit_snapshot"),
    *("audit_states_read", "audit_states_written"),
)
# Attribute of torch's namespace object: the library that registered its ops. Another
# copy of this module reads it.
_LIBRARY_MARK = "nwor_library"


class NworOpsUnavailable(RuntimeError):
    """The native library, or its part for the requested device, is missing."""


# --- constants ------------------------------------------------------------------------

# csrc/nwor/bindings/constants.h exports the library's. Python reads them as attributes
# of this module. Constants that are needed without the library are also written in
# Python, and compared when the library is loaded (`shared`).

_shared: dict[str, Any] = {}


def shared(name: str, value: Mapping[str, int] | Sequence[str] | int) -> None:
    """Declares that the library's constant `name` is `value`, a sequence of names
    meaning their places in it. Raises NworOpsUnavailable, now or when the library is
    loaded, if it is not."""
    if not isinstance(value, Mapping | int):
        value = {name: place for place, name in enumerate(value)}
    _shared[name] = value
    if _load_library.cache_info().currsize:
        _compare(_load_library(), name)


def _compare(library: ModuleType, name: str) -> None:
    found = getattr(library, name, None)
    if found != _shared[name]:
        raise NworOpsUnavailable(
            f"{LIBRARY}: its constant {name} is {found}; must be {_shared[name]}, "
            "which is Python's: build it again"
        )


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

# first_shadow_slot of a group without shadow blocks.
NO_SHADOW = 2**63 - 1

# Columns of a seat saved by `stage`, int32, in front of its real and shadow entries.
SAVED_COLUMNS: int
# log_slots entries that are no slot: padding or no draft; refused on the device.
PAD_SLOT: int
INVALID_SLOT: int
# On CUDA: entries of a block table that a window can have in shadow, and requests in a
# batch that is audited.
MAX_SPAN: int
MAX_REQS: int
# Columns of the audit's int64 tables: SlotRecord, Seat, PlanRow and Finding of audit.h.
RECORD_COLUMNS: int
SEAT_COLUMNS: int
PLAN_COLUMNS: int
FINDING_COLUMNS: int
DIGEST_COLUMNS: int
# Of its tables of recurrent states: State, StateSeat and StateRecord of states.h, and
# limits there.
STATE_COLUMNS: int
STATE_SEAT_COLUMNS: int
STATE_RECORD_COLUMNS: int
VERDICT_COLUMNS: int
SAMPLE_WORDS: int
SAMPLE_PARTS: int
MAX_BUFFER: int
MAX_STATES: int
MAX_STATE_GROUPS: int

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The ops and the constants that are declared here without a value; loads the
        library, so raises NworOpsUnavailable."""
        if name in sys.modules[__name__].__annotations__:
            _load_library()
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- loading --------------------------------------------------------------------------


def load(device_type: str = "cpu") -> ModuleType:
    """Makes the ops available. Returns the library, a module.

    device_type: "cpu" or "cuda", where the ops will run.

    Raises:
        NworOpsUnavailable: the library is missing, cannot be loaded, is another copy or
            of another version, or was built without CUDA and device_type asks for it.
            Nothing is built here.
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
    """The library's functions and classes that a step calls, by name. On CUDA this also
    loads the kernels of log, restore, stage and commit, so that no step waits for that.

    Raises:
        NworOpsUnavailable: as `load`; on CUDA also if there is no code for this GPU.
    """
    library = load(device.type)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            library.load_kernels(index)
        except RuntimeError as error:
            build = CudaBuild.of(library)
            text = None
            if torch.cuda.is_available():  # its driver is new enough
                text = build.refusal(torch.cuda.get_device_capability(index))
            text = text or f"{LIBRARY}, which has {build}: {error}"
            raise NworOpsUnavailable(text) from error
    called = (*AUDIT_NAMES, *CLASSES)
    return SimpleNamespace(**{name: getattr(library, name) for name in called})


class _Synchronizing:
    """Wraps an object so that each method call then waits for the device."""

    def __init__(self, of: object, device: torch.device) -> None:
        self._of, self._device = of, device

    def __getattr__(self, name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            getattr(self._of, name)(*arguments)
            torch.accelerator.synchronize(self._device)

        return run


def synchronizing(ops: Any, device: torch.device) -> SimpleNamespace:
    """The classes of `ops`, waiting for the device after each launch:
    VLLM_NWOR_DEBUG_SYNC."""

    def wrapped(of: Callable[..., object]) -> Callable[..., _Synchronizing]:
        return lambda *made_of: _Synchronizing(of(*made_of), device)

    return SimpleNamespace(**{name: wrapped(getattr(ops, name)) for name in CLASSES})


class CudaBuild(NamedTuple):
    """What the library's CUDA code was built with, and for which GPUs."""

    cuda: str  # release of CUDA, "13.0"; the driver must be as new
    machine_code: list[tuple[int, int]]  # compute capabilities
    ptx: tuple[int, int]  # newer GPUs compile it

    @classmethod
    def of(cls, library: ModuleType) -> CudaBuild:
        """Of a library with CUDA code, whose constant is like "13000 800,900 900"."""
        version, archs, ptx = library.cuda_build.split()
        release = f"{int(version) // 1000}.{int(version) % 1000 // 10}"
        capabilities = [divmod(int(arch) // 10, 10) for arch in archs.split(",")]
        return cls(release, capabilities, divmod(int(ptx) // 10, 10))

    def __str__(self) -> str:
        archs = ", ".join(f"sm_{major}{minor}" for major, minor in self.machine_code)
        ptx = "{}.{}".format(*self.ptx)
        return f"code of CUDA {self.cuda} for {archs}, and PTX for GPUs from {ptx} on"

    def refusal(self, capability: tuple[int, int]) -> str | None:
        """A sentence if GPUs of this compute capability cannot run the code."""
        major, minor = capability
        # Machine code runs where the minor version is the same or higher.
        has_code = any(a == major and b <= minor for a, b in self.machine_code)
        if has_code or capability >= self.ptx:
            return None
        return (
            f"the GPU has compute capability {major}.{minor}, and {LIBRARY} has {self}"
            "; NWOR_CUDA_ARCHS chooses others, of 80 or more, for a build"
        )


def has_cuda() -> bool:
    """Whether the loaded library has CUDA code (not: whether there is a GPU)."""
    return hasattr(_load_library(), "cuda_build")


@cache
def _load_library() -> ModuleType:
    namespace = getattr(torch.ops, _NAMESPACE)
    imported = sys.modules.get(f"{__package__}._nwor_C")  # by other code
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
    for name in _shared:
        _compare(library, name)
    for name in NAMES:
        torch.library.register_fake(f"{_NAMESPACE}::{name}", _no_result)
    # torch's own objects: no overload resolution at each call and no Python frame, and
    # torch.compile can trace them.
    globals().update({name: getattr(namespace, name).default for name in NAMES})
    declared = sys.modules[__name__].__annotations__.keys() - globals().keys()
    globals().update({name: getattr(library, name) for name in declared})
    return library


shared("TABLE_COLUMNS", TABLE_COLUMNS)
shared("COUNTER_COLUMNS", COUNTER_COLUMNS)


def _no_result(*_args: object) -> None:
    """Fake of every op: they mutate their arguments and return nothing."""


def publish(to: Tensor, counters: Tensor) -> None:
    """Copies `counters`, [rows, 9] int64, to `to`; does not wait for the device.
    Mutated: `to`, on the host, in pinned memory if `counters` is on a device.
    """
    to.copy_(counters, non_blocking=True)


# --- ops ------------------------------------------------------------------------------

# Arguments are in the order of csrc/nwor/transaction/ops.h.

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
counters_to: [9] int64, cpu, in pinned memory for CUDA. Mutated: the new values of
    counters, unless num_drafts is 0.
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
    seat r. A request without a seat in `saved` has none: its window is not
    staged, and not counted.
seat_of_state: [num_states] int32, -1: none. None: the index is the seat.
saved: [num_seats, SAVED_COLUMNS + 2 * span] int32, zeros before the first use.
    Mutated: state for the other calls of the step, and for the next step.
num_real_entries: entries from this one on are not the scheduler's.
step: 1 or more; one more with every step that may write to the caches, those
    without drafts included.
patches: True for the first table of a group. The calls for its other tables read
    `saved` from that first call, and patch nothing.
rest_is_logged: log_cache_slots follows in this step, for the windows that are not
    staged.

A window with other entries or slots than described is not staged: its drafts go to the
real blocks. If rest_is_logged, the log takes it; else commit_draft_layer counts its
drafts as `invalid_slots`.
"""

commit_draft_layer: OpOverload
"""Copies the rows that this step wrote to shadow blocks and that are kept (target,
accepted drafts, and any before them) to the real blocks, in all layers of a table;
counts; puts block table and slots back.

table, runs, block_table, slot_mapping, state_indices, saved, entry_tokens,
    seat_of_state:
    as in stage.
    Mutated: the caches at the kept rows; in block_table and slot_mapping, the values
    that stage wrote and that are still there; saved, for the next step.
sampled_token_ids, vocab_size, num_rejected, counters, counters_to: as in
    restore_rejected_drafts.
num_reqs: as in cu_num_logits of stage.
undoes: False for all but the last call of a group with several tables.
"""

unstage: OpOverload
"""For a step that failed: restores block_table and slot_mapping where they still hold
what stage wrote, and copies nothing. Arguments: as commit_draft_layer."""

# Classes of the library. Their methods take all arguments by position, named as those
# of the ops. An object keeps the arguments of its constructor; methods do not take them
# again.
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
#   unstage(): does nothing without a staged step, or after its commit.
#
# source, source_runs: of the table that a log copies from. ring: [slots, 9] int64, cpu,
# rows may be strided, in pinned memory for CUDA. slot: of the ring, which is the step's
# counters_to; -1: none.
