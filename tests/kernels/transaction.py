# SPDX-License-Identifier: Apache-2.0
"""One verification step through the real ops, every byte of it checked.

Log, a forward that overwrites all draft slots, restore: after each, whole allocations
are compared with what the reference says, guards and poison included.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from tests.kernels.reference import (
    PAD,
    Batch,
    Log,
    Tables,
    expected_counters,
    expected_log,
    random_bytes,
)
from vllm_nwor import ops

VOCAB_SIZE = 1000


class AcceptanceForm(enum.Enum):
    """The ways in which a sampler says how many drafts it accepted."""

    SAMPLED = "sampled"  # valid tokens, then -1
    PLACEHOLDER = "placeholder"  # ids beyond the vocabulary are invalid too
    STRIDED = "strided"  # a view of a wider, transposed tensor
    NUM_REJECTED = "num_rejected"


def acceptance_arguments(
    batch: Batch, form: AcceptanceForm, device: torch.device
) -> tuple[Tensor | None, int, Tensor | None]:
    """(sampled_token_ids, vocab_size, num_rejected)."""
    drafts = [len(window) for window in batch.slots]
    if form is AcceptanceForm.NUM_REJECTED:
        rejected = [k - a for k, a in zip(drafts, batch.accepted, strict=True)]
        return None, 0, torch.tensor(rejected, dtype=torch.int32, device=device)
    width = max(drafts, default=0) + 1
    invalid = VOCAB_SIZE if form is AcceptanceForm.PLACEHOLDER else -1
    tokens = torch.full((len(drafts), width), invalid, dtype=torch.int32)
    for request, accepted in enumerate(batch.accepted):
        # Token 0 and the vocabulary's last one are valid.
        tokens[request, : accepted + 1] = torch.tensor([0, VOCAB_SIZE - 1]).repeat(
            accepted + 1
        )[: accepted + 1]
    if form is AcceptanceForm.STRIDED:
        wide = torch.full((2 * width, len(drafts) + 1), 5, dtype=torch.int32)
        view = wide.t()[1:, ::2]
        view.copy_(tokens)
        wide = wide.to(device)
        return wide.t()[1:, ::2], VOCAB_SIZE, None
    return tokens.to(device), VOCAB_SIZE, None


def log(
    tables: Tables,
    log: Log,
    metadata: tuple[Tensor, Tensor, Tensor],
    num_drafts: int,
) -> None:
    ops.log_cache_slots(
        tables.table,
        tables.runs,
        *metadata,
        log.undo_log,
        log.slots,
        log.windows,
        num_drafts,
    )


def restore(
    tables: Tables,
    log: Log,
    acceptance: tuple[Tensor | None, int, Tensor | None],
    counters: Tensor,
    num_drafts: int,
    counters_to: Tensor | None = None,
) -> None:
    ops.restore_rejected_drafts(
        tables.table,
        tables.runs,
        log.undo_log,
        log.slots,
        log.windows,
        *acceptance,
        counters,
        num_drafts,
        counters_to,
    )


def forward(tables: Tables, batch: Batch, seed: int) -> None:
    """Overwrites every draft slot of every layer, as the target's forward would."""
    slots = [slot for slot in batch.flat_slots if slot != PAD]
    for number, layer in enumerate(tables.layers):
        memory = layer.memory.cpu()
        index = layer.index(slots).flatten()
        memory[index] = random_bytes(index.numel(), seed + number)
        layer.memory.copy_(memory)


def check_transaction(
    tables: Tables,
    undo: Log,
    batch: Batch,
    *,
    form: AcceptanceForm = AcceptanceForm.SAMPLED,
    index_dtype: torch.dtype = torch.int32,
    extra_drafts: int = 0,
    seed: int = 0,
) -> None:
    """Runs a step and compares everything with the reference.

    extra_drafts: how far the host's bound of the number of drafts is off.
    """
    device = tables.table.device
    num_drafts = len(batch.flat_slots) + extra_drafts
    before = [layer.memory.cpu().clone() for layer in tables.layers]

    metadata = batch.metadata(device, index_dtype, seed)
    wanted_log = expected_log(tables, undo, batch, num_drafts)
    log(tables, undo, metadata, num_drafts)
    assert_same_log(undo, wanted_log)
    for number, (layer, old) in enumerate(zip(tables.layers, before, strict=True)):
        assert torch.equal(layer.memory.cpu(), old), f"log changed layer {number}"

    forward(tables, batch, seed + 1000)
    wanted = [layer.memory.cpu().clone() for layer in tables.layers]
    for slot, rejected in zip(batch.flat_slots, batch.rejected, strict=True):
        if rejected and slot != PAD:
            for layer, memory, old in zip(tables.layers, wanted, before, strict=True):
                index = layer.index([slot])[0]
                memory[index] = old[index]

    counters = torch.arange(10, 16, dtype=torch.int64, device=device)
    # A guard on each side of what the host reads.
    published = torch.full((8,), -3, pin_memory=device.type == "cuda")
    restore(
        tables,
        undo,
        acceptance_arguments(batch, form, device),
        counters,
        num_drafts,
        published[1:7],
    )
    for number, (layer, memory) in enumerate(zip(tables.layers, wanted, strict=True)):
        assert torch.equal(layer.memory.cpu(), memory), f"layer {number} after restore"
    assert_same_log(undo, wanted_log)
    added = (counters.cpu() - torch.arange(10, 16)).tolist()
    assert added == expected_counters(tables, batch)
    untouched = [-3] * 6
    wanted_published = counters.tolist() if num_drafts else untouched
    assert published.tolist() == [-3, *wanted_published, -3]


def assert_same_log(undo: Log, wanted: tuple[Tensor, Tensor, Tensor]) -> None:
    memory, slots, windows = undo.snapshot()
    assert torch.equal(slots, wanted[1]), "log_slots"
    assert torch.equal(windows, wanted[2]), "log_windows"
    assert torch.equal(memory, wanted[0]), "undo_log, its padding or its guards"
