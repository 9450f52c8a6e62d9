# SPDX-License-Identifier: Apache-2.0
"""One step's batch: its rows, and what vLLM's tensors say about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from tests.simulation.blocks import Blocks, Request
from tests.simulation.memory import Group, Index, Mask
from tests.simulation.operations import EMPTY, MAX_DRAFTS, PADDED, PLAIN
from vllm_nwor.metrics import Counted, Scheduled
from vllm_nwor.window import Acceptance, NumRejected, SampledIds, VerificationWindows

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


@dataclass(frozen=True)
class Pages:
    """What of a step would be in shadow pages in one group.

    is_staged: [rows with a slot] bool: True where the row goes to a shadow block.
    windows: of the requests that have some, and the logical entry of the first draft.
    num_invalid: drafts of windows that are left alone, because of a slot that is none.
    """

    is_staged: npt.NDArray[np.bool_]
    windows: list[tuple[Rows, int]]
    num_invalid: int


class Step:
    """A batch, ready to run.

    slot_mappings: [num_groups, num_rows + pads] int64, PAD_SLOT for padding: vLLM's.
    is_written: [num_rows + pads] bool: rows that have a slot.
    index: where the step's forward writes in vanilla, all groups and layers, flat.
    begins: whether a request that is new or comes back has drafts.
    staged, logged: groups that are protected, and how; set before the forward.
    num_copied: committed rows that stage had to copy, for each group.
    copied_bytes, committed_bytes: to and from shadow pages, of the launches that did
        their work.
    """

    def __init__(
        self,
        rows: list[Rows],
        groups: Sequence[Group],
        blocks: Blocks,
        pads: int,
        begins: bool,
    ) -> None:
        self.rows = rows
        self.begins = begins
        self.groups = groups
        self.staged: set[int] = set()
        self.logged: set[int] = set()
        self.num_copied: dict[int, int] = {}
        self.copied_bytes = self.committed_bytes = 0
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
        self.is_written = self.slot_mappings[0] != PAD_SLOT
        self._is_rejected = self._rejected_rows(pads)[self.is_written]
        self.index = self.index_by(self.slot_mappings)
        self.pages = [self._pages(group.entry_tokens) for group in groups]

    def index_by(self, slot_mappings: npt.NDArray[np.int64]) -> Index:
        """As `index`, with these slots for the layers that are protected."""
        parts = []
        for group, real, slots in zip(
            self.groups, self.slot_mappings, slot_mappings, strict=True
        ):
            part = group.index[real[self.is_written]]
            protected = group.index[slots[self.is_written]]
            part[:, group.is_protected] = protected[:, group.is_protected]
            parts.append(part.ravel())
        return np.concatenate(parts)

    def _pages(self, entry_tokens: int) -> Pages:
        is_staged: list[bool] = []
        windows: list[tuple[Rows, int]] = []
        num_invalid = 0
        for rows in self.rows:
            first, count = rows.request.num_computed, rows.num_written
            if rows.special == PADDED:
                num_invalid += rows.num_drafts
            if rows.special == PADDED or rows.num_drafts == 0:
                is_staged += [False] * count
                continue
            entry = (first + rows.num_rows - rows.num_drafts) // entry_tokens
            windows.append((rows, entry))
            is_staged += [
                position // entry_tokens >= entry
                for position in range(first, first + count)
            ]
        return Pages(np.array(is_staged, dtype=bool), windows, num_invalid)

    def num_committed(self, group: int) -> int:
        """Rows that are kept, of those in shadow pages."""
        return int((self.pages[group].is_staged & ~self._is_rejected).sum())

    def spread(self, rows: Callable[[int], npt.NDArray[np.bool_]]) -> Mask:
        """For each byte of `index`: what `rows` of its group says of its row, as far as
        its layer is protected."""
        return np.concatenate(
            [
                (rows(gid)[:, None] & group.is_protected).ravel()
                for gid, group in enumerate(self.groups)
            ]
        )

    def staged_mask(self) -> Mask:
        """For each byte of `index`: whether the step writes it to a shadow block."""
        return self.spread(lambda gid: self.pages[gid].is_staged & (gid in self.staged))

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

    def keep_mask(self, failed: set[str]) -> Mask:
        """For each byte of `index`: True if what the forward wrote there is in the real
        block after commit.

        failed: names of the layers for which commit did nothing.
        """
        masks = []
        for gid, group in enumerate(self.groups):
            is_staged = self.pages[gid].is_staged & (gid in self.staged)
            for_failed = ~is_staged
            for_others = np.ones_like(is_staged)
            if gid in self.staged:
                for_others = ~(is_staged & self._is_rejected)
            elif gid in self.logged:
                for_others = ~self._is_rejected
            has_failed = np.array([layer.name in failed for layer in group.layers])
            mask = np.where(
                has_failed[group.layer_of], for_failed[:, None], for_others[:, None]
            )
            masks.append((mask | ~group.is_protected).ravel())
        return np.concatenate(masks)

    def windows(
        self,
        num_drafts: int,
        slot_mappings: torch.Tensor,
        tables: Sequence[torch.Tensor],
        as_v2: bool,
        has_indices: bool,
    ) -> VerificationWindows:
        """What the hooks hand to stage and begin. num_drafts: the host's upper bound.
        slot_mappings, tables: the worker's, that stage patches. has_indices: the seats
        are those of the requests' states."""
        indices: list[int] = []
        cumulative: list[int] = []
        row = 0
        for rows in self.rows:
            row += rows.num_rows
            indices += range(row - 1 - rows.num_drafts, row)
            cumulative.append(len(indices))
        # V2 gives cumulative numbers that begin with 0, int64 indices and one tensor
        # of mappings; V1 none of those.
        zeros = [0] if as_v2 else []
        dtype = torch.int64 if as_v2 else torch.int32
        starts = np.cumsum([0] + [rows.num_rows for rows in self.rows])
        seq_lens = [rows.request.num_computed + rows.num_rows for rows in self.rows]
        windows = VerificationWindows(
            num_drafts=num_drafts,
            logits_indices=torch.tensor(indices, dtype=dtype),
            cu_num_logits=torch.tensor(zeros + cumulative, dtype=torch.int32),
            num_leading_zeros=len(zeros),
            slot_mappings=slot_mappings if as_v2 else list(slot_mappings),
            block_tables=tables,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        )
        if not has_indices:
            return windows
        seats = [rows.request.index for rows in self.rows]
        return structs.replace(windows, seats=torch.tensor(seats, dtype=torch.int32))

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
