# SPDX-License-Identifier: Apache-2.0
"""One step's batch: its rows, and what vLLM's tensors say about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from tests.simulation.blocks import Blocks, Request
from tests.simulation.memory import Group
from tests.simulation.operations import EMPTY, MAX_DRAFTS, PADDED, PLAIN
from vllm_nwor.metrics import Counted, Scheduled
from vllm_nwor.window import (
    Acceptance,
    NumRejected,
    SampledIds,
    VerificationWindows,
)

VOCAB_SIZE = 5000
PAD_SLOT = -1

# How the sampler reports: invalid ids are -1; or beyond the vocabulary; or in a view
# with strides of its own; or as V2 does, the number of rejected drafts.
SAMPLED, PLACEHOLDER, STRIDED, REJECTED = range(4)


@dataclass
class Rows:
    """A request's rows in the batch that is being put together.

    num_rows: prefill tokens, or 1 + num_drafts. is_last: they reach the end of the
    text, so that a token is sampled. dropped: aborted in flight.
    """

    request: Request
    num_rows: int
    num_drafts: int = 0
    num_accepted: int = 0
    special: int = PLAIN
    is_last: bool = True
    dropped: bool = False

    @property
    def num_written(self) -> int:
        """Rows that have a slot."""
        return self.num_rows - (self.special == PADDED)

    @property
    def num_rejected(self) -> int:
        return self.num_drafts - self.num_accepted

    @property
    def num_valid_ids(self) -> int:
        """Tokens that the sampler returns for these rows."""
        return 0 if self.special == EMPTY else self.num_accepted + 1


class Step:
    """A batch, ready to run.

    slot_mappings: [num_groups, num_rows + pads] int64, PAD_SLOT for padding.
    index: where the step's forward writes, all groups and layers, flat.
    is_logged: whether the windows are protected; set when begin has run.
    """

    def __init__(
        self, rows: list[Rows], groups: Sequence[Group], blocks: Blocks, pads: int
    ) -> None:
        self.rows = rows
        self.groups = groups
        self.is_logged = False
        self.num_drafts = sum(entry.num_drafts for entry in rows)
        self.num_accepted = sum(entry.num_accepted for entry in rows)
        self.num_windows = sum(entry.num_drafts > 0 for entry in rows)
        self.num_restorable = sum(
            entry.num_rejected - (entry.special == PADDED) for entry in rows
        )
        self.num_dropped_windows = sum(
            entry.num_drafts > 0 for entry in rows if entry.dropped
        )
        self.num_dropped_drafts = sum(
            entry.num_drafts for entry in rows if entry.dropped
        )
        mappings = [self._mapping(blocks, group, pads) for group in range(len(groups))]
        self.slot_mappings = np.array(mappings, dtype=np.int64)
        is_written = self.slot_mappings[0] != PAD_SLOT
        self._is_rejected = self._rejected_rows(pads)[is_written]
        self.index = np.concatenate(
            [
                group.index[slots[is_written]].ravel()
                for group, slots in zip(groups, self.slot_mappings, strict=True)
            ]
        )

    def _mapping(self, blocks: Blocks, group: int, pads: int) -> list[int]:
        mapping: list[int] = []
        for rows in self.rows:
            first = rows.request.num_computed
            mapping += blocks.slots(rows.request, group, first, rows.num_written)
            mapping += [PAD_SLOT] * (rows.num_rows - rows.num_written)
        return mapping + [PAD_SLOT] * pads

    def _rejected_rows(self, pads: int) -> npt.NDArray[np.bool_]:
        """[num_rows + pads] bool: True at the rows of rejected drafts."""
        found: list[bool] = []
        for rows in self.rows:
            kept = rows.num_rows - rows.num_rejected
            found += [False] * kept + [True] * rows.num_rejected
        return np.array(found + [False] * pads)

    def keep_mask(self, restored: set[str]) -> npt.NDArray[np.bool_]:
        """For each byte of `index`: True if what the forward wrote there stays.

        restored: names of the layers whose rejected slots NWOR puts back.
        """
        masks = []
        for group in self.groups:
            is_restored = np.array([layer.name in restored for layer in group.layers])[
                group.layer_of
            ]
            masks.append(~(self._is_rejected[:, None] & is_restored).ravel())
        return np.concatenate(masks)

    def windows(self, num_drafts: int, as_tensor: bool) -> VerificationWindows:
        """What the hooks hand to begin. num_drafts: the host's upper bound."""
        indices: list[int] = []
        cumulative: list[int] = []
        row = 0
        for rows in self.rows:
            row += rows.num_rows
            indices += range(row - 1 - rows.num_drafts, row)
            cumulative.append(len(indices))
        # V2 gives cumulative numbers that begin with 0, int64 indices and one tensor
        # of mappings; V1 none of those.
        zeros = [0] if as_tensor else []
        mappings = torch.from_numpy(self.slot_mappings)
        dtype = torch.int64 if as_tensor else torch.int32
        return VerificationWindows(
            num_drafts=num_drafts,
            logits_indices=torch.tensor(indices, dtype=dtype),
            cu_num_logits=torch.tensor(zeros + cumulative, dtype=torch.int32),
            num_leading_zeros=len(zeros),
            slot_mappings=mappings if as_tensor else list(mappings),
        )

    def acceptance(self, form: int) -> Acceptance:
        if form == REJECTED:
            counts = [rows.num_rejected for rows in self.rows]
            return NumRejected(torch.tensor(counts, dtype=torch.int32))
        fill = VOCAB_SIZE if form == PLACEHOLDER else -1
        table = []
        for rows in self.rows:
            # Id 0 and the vocabulary's last one are valid.
            ids = [0 if i % 2 else VOCAB_SIZE - 1 for i in range(rows.num_valid_ids)]
            table.append(ids + [fill] * (MAX_DRAFTS + 1 - len(ids)))
        sampled = torch.tensor(table, dtype=torch.int32)
        if form == STRIDED:
            wide = torch.full((2 * sampled.shape[1], sampled.shape[0]), 5).int()
            view = wide.t()[:, ::2]
            sampled = view.copy_(sampled)
        return SampledIds(sampled, VOCAB_SIZE)

    def counted_and_scheduled(self) -> tuple[Counted, Scheduled]:
        """The windows as vLLM's scheduler counts and knows them."""
        counted = Counted(lambda *_: None)
        for rows in self.rows:
            if rows.num_drafts and not rows.dropped:
                counted(None, rows.num_drafts, rows.num_accepted)
        names = [rows.request.name for rows in self.rows]
        drafts = [[1] * rows.num_drafts for rows in self.rows]
        output = SimpleNamespace(req_id_to_index={n: i for i, n in enumerate(names)})
        num_ids = [rows.num_valid_ids for rows in self.rows]
        return counted, (dict(zip(names, drafts, strict=True)), output, num_ids)
