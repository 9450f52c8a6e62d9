# SPDX-License-Identifier: Apache-2.0
"""One step's batch: its rows, and vLLM's tensors for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.kernels.transaction import AcceptanceForm
from tests.simulation.blocks import Request
from tests.simulation.cache import Group, Index, Mask
from vllm_nwor import step as nwor
from vllm_nwor.metrics import Counted, Scheduled
from vllm_nwor.step import Acceptance, NumRejected, SampledIds

Table = npt.NDArray[np.int32]

MAX_TOKENS = 64
PAD_SLOT = -1

# Kinds of windows: normal; the last rejected draft has slot -1; the sampler returns no
# valid token.
PLAIN, PADDED, EMPTY = range(3)

# Forms of the sampler's output.
FORMS = tuple(AcceptanceForm)


@dataclass(eq=False)
class Rows:
    """A request's rows in the next batch.

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
    def end(self) -> int:
        """The position behind the last row."""
        return self.request.num_computed + self.num_rows

    @property
    def num_rejected(self) -> int:
        return self.num_drafts - self.num_accepted

    @property
    def num_valid_ids(self) -> int:
        """Tokens that the sampler returns for these rows."""
        return 0 if self.special == EMPTY else self.num_accepted + 1

    @property
    def is_window(self) -> bool:
        """Whether it can be staged: not with a padded slot."""
        return self.num_drafts > 0 and self.special != PADDED


class Step:
    """A batch, ready to run.

    tables: vLLM's own, for each group [num_requests, MAX_TOKENS / entry_tokens] int32.
    own_slots: vLLM's slot mappings, [num_groups, num_rows + pads] int64, PAD_SLOT for
        padding.
    begins: whether a new or resumed request has drafts. seats: of each row, or None.
    num_known: the host's upper bound of the number of drafts. index: where the forward
    writes in plain vLLM, flat (see `_flat`). staged, logged: protected groups, set
    before the forward. Of a group in both, windows
        that cannot be staged are logged.
    num_copied: committed rows that stage must copy, by group. num_kept: rows of shadow
        blocks that commit would copy, by group.
    """

    def __init__(
        self,
        rows: list[Rows],
        groups: Sequence[Group],
        pads: int,
        begins: bool,
        bound: int,
        seats: Sequence[int | None],
    ) -> None:
        self.rows, self.groups, self.pads, self.begins = rows, groups, pads, begins
        self.seats = seats
        self.staged: set[int] = set()
        self.logged: set[int] = set()
        self.num_copied: dict[int, int] = {}
        sizes = np.array([entry.num_rows for entry in rows])
        self.ends = np.array([entry.end for entry in rows])
        self.drafts = np.array([entry.num_drafts for entry in rows])
        rejected = np.array([entry.num_rejected for entry in rows])
        padded = np.array([entry.special == PADDED for entry in rows])
        self.starts = np.concatenate([[0], sizes.cumsum()])
        # The batch row and the position of each row.
        self.request = np.repeat(np.arange(len(rows)), sizes)
        within = np.arange(self.starts[-1]) - self.starts[self.request]
        self.position = (self.ends - sizes)[self.request] + within
        # The logical entry of the first draft, by group and request.
        first_drafts = self.ends - self.drafts
        self.first_entries = [first_drafts // group.entry_tokens for group in groups]
        self.is_written = self.position < (self.ends - padded)[self.request]
        self.tables = [self._table(gid, group) for gid, group in enumerate(groups)]
        self.own_slots = self.slots(self.tables)
        # For the rows with a slot.
        request = self.request[self.is_written]
        position = self.position[self.is_written]
        is_rejected = position >= (self.ends - rejected)[request]
        self.can_stage = np.array(
            [
                r.is_window and seat is not None
                for r, seat in zip(rows, seats, strict=True)
            ]
        )
        self._is_behind = [
            self.can_stage[request] & (position // group.entry_tokens >= first[request])
            for group, first in zip(groups, self.first_entries, strict=True)
        ]
        self.num_kept = [int((rows & ~is_rejected).sum()) for rows in self._is_behind]
        self.index = self.index_by(self.own_slots)
        self._gid = self._flat(range(len(groups)))
        self._layer = self._flat([group.layer_of for group in groups])
        self._is_protected = self._flat([group.is_protected for group in groups])
        self._is_rejected = self._flat([is_rejected[:, None]] * len(groups))
        self._goes_to_shadow = self._is_protected & self._flat(
            [rows[:, None] for rows in self._is_behind]
        )
        self.num_drafts = int(self.drafts.sum())
        self.num_known = self.num_drafts and self.num_drafts + bound
        self.num_rejected = int(rejected.sum())
        self.num_windows = int((self.drafts > 0).sum())
        self.num_invalid = int((self.drafts * padded).sum())
        self._rejected, self._restorable = rejected, rejected - padded

    def counts(self, of: Mask) -> tuple[list[int], int]:
        """Windows, drafts, accepted and rejected drafts of these batch rows; and the
        number of slots that the log restores."""
        drafts, rejected = self.drafts[of], self._rejected[of]
        accepted = drafts.sum() - rejected.sum()
        of_tokens = [drafts.sum(), accepted, rejected.sum()]
        return [int((drafts > 0).sum()), *map(int, of_tokens)], int(
            self._restorable[of].sum()
        )

    def _table(self, gid: int, group: Group) -> Table:
        table = np.zeros((len(self.rows), MAX_TOKENS // group.entry_tokens), np.int32)
        for row, rows in zip(table, self.rows, strict=True):
            entries = group.entries(rows.request.blocks[gid])
            row[: len(entries)] = entries
        return table

    def slots(self, tables: Sequence[Table]) -> Index:
        """The slot mappings for these tables."""
        found = np.full((len(tables), len(self.request) + self.pads), PAD_SLOT)
        for slots, table, group in zip(found, tables, self.groups, strict=True):
            by_table = slots_of(table, self.request, self.position, group.entry_tokens)
            slots[: len(self.request)] = np.where(self.is_written, by_table, PAD_SLOT)
        return found

    def _flat(self, of_groups: Iterable[Any]) -> npt.NDArray[Any]:
        """Broadcasts a value per group to [rows with a slot, bytes of the group], and
        concatenates: one value for each byte that the step writes."""
        num_rows = int(self.is_written.sum())
        return np.concatenate(
            [
                np.broadcast_to(values, (num_rows, group.layer_of.size))
                for values, group in zip(of_groups, self.groups, strict=True)
            ],
            axis=None,
        )

    def index_by(self, slots: Index) -> Index:
        """As `index`, with these slots for protected layers."""
        rows = np.flatnonzero(self.is_written)
        ours, own = slots[:, rows], self.own_slots[:, rows]
        return self._flat(
            np.where(group.is_protected, group.index[ours[gid]], group.index[own[gid]])
            for gid, group in enumerate(self.groups)
        )

    def windows_of(self, gid: int) -> Iterator[tuple[int, Rows, int, int]]:
        """Windows that can be staged: batch row, rows, first entry, seat."""
        entries = self.first_entries[gid].tolist()
        found = zip(self.rows, entries, self.seats, strict=True)
        for row, (rows, entry, seat) in enumerate(found):
            if rows.is_window and seat is not None:
                yield row, rows, entry, seat

    def staged_mask(self) -> Mask:
        """For each byte of `index`: whether the step writes it to a shadow block."""
        return self._goes_to_shadow & np.isin(self._gid, list(self.staged))

    def keep_mask(
        self, not_committed: Sequence[str], not_restored: Sequence[str]
    ) -> Mask:
        """For each byte of `index`: True if the real block has the forward's byte after
        commit. The arguments name layers for which copying or restoring failed."""
        is_staged = self.staged_mask()
        is_logged = np.isin(self._gid, list(self.logged)) & self._is_protected
        is_lost = is_staged & np.isin(self._layer, not_committed)
        is_restored = is_logged & ~is_staged & ~np.isin(self._layer, not_restored)
        return ~(is_lost | self._is_rejected & (is_staged | is_restored))

    def windows(
        self,
        slots: Index,
        tables: Sequence[Table],
        as_v2: bool,
        live: Mapping[str, int],
    ) -> nwor.Step:
        """The argument of stage and begin. slots, tables: the worker's, which stage
        patches."""
        has_logits = self.position >= (self.ends - self.drafts - 1)[self.request]
        # V2 has cumulative numbers that begin with 0, int64 indices, and one tensor of
        # slot mappings, which the hook splits.
        cumulative = [0] * as_v2 + (self.drafts + 1).cumsum().tolist()
        mappings = torch.from_numpy(slots)
        indices = [rows.request.index for rows in self.rows]
        return nwor.Step(
            num_drafts=self.num_known,
            logits_indices=torch.from_numpy(has_logits.nonzero()[0]).to(
                torch.int64 if as_v2 else torch.int32
            ),
            cu_num_logits=torch.tensor(cumulative, dtype=torch.int32),
            num_leading_zeros=int(as_v2),
            slot_mappings=[mappings] if as_v2 and len(slots) == 1 else [*mappings],
            block_tables=[torch.from_numpy(table) for table in tables],
            query_start_loc=torch.from_numpy(self.starts).int(),
            seq_lens=torch.from_numpy(self.ends).int(),
            drafts_of_requests=None if as_v2 else self.drafts.tolist(),
            state_indices=torch.tensor(indices, dtype=torch.int32) if as_v2 else None,
            host_state_indices=np.array(indices) if as_v2 else None,
            state_of_request=live if as_v2 else None,
        )

    def acceptance(self, form: int) -> Acceptance:
        """form: an index in FORMS."""
        is_v2 = FORMS[form] is AcceptanceForm.NUM_REJECTED
        accepted = [r.num_accepted if is_v2 else r.num_valid_ids - 1 for r in self.rows]
        drafts = self.drafts.tolist()
        known = FORMS[form].arguments(drafts, accepted, torch.device("cpu"))
        if is_v2:
            return NumRejected(known["num_rejected"])
        return SampledIds(known["sampled_token_ids"], known["vocab_size"])

    def counted_and_scheduled(self) -> tuple[Counted, Scheduled]:
        """vLLM's scheduler's counts and knowledge of the windows."""
        counted = Counted(lambda *_: None)
        for rows in self.rows:
            if rows.num_drafts and not rows.dropped:
                counted(None, rows.num_drafts, rows.num_accepted)
        names = [rows.request.name for rows in self.rows]
        drafts = {r.request.name: [1] * r.num_drafts for r in self.rows}
        output = SimpleNamespace(req_id_to_index={n: i for i, n in enumerate(names)})
        return counted, (drafts, output, [rows.num_valid_ids for rows in self.rows])


def slots_of(table: Table, row: Index, position: Index, entry_tokens: int) -> Index:
    """The slots of these positions of these rows of a block table."""
    entry = table[row, position // entry_tokens].astype(np.int64)
    return entry * entry_tokens + position % entry_tokens
