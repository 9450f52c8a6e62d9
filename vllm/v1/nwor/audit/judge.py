# SPDX-License-Identifier: Apache-2.0
"""Judge: what became of each block and state that a KV connector has loaded.

It applies the rules of loads.py, then the digests of a prefill instance (handover.py),
to the digests of a step, and makes the findings. A load that was reported as failed is
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from .findings import Finding, Found, Writer
from .handover import Handovers
from .loads import CUT, LOADED, Digests, Heads, Wrong, zeros_of
from .requests import Requests
from .states import Boundaries
from .tables import AuditedGroup


class Filled(NamedTuple):
    """The digests of a step, of a group by its place: of the blocks that requests have
    filled, and others. Rows as BlockDigest of audit.h."""

    place: int
    step: int
    computed: torch.Tensor
    others: torch.Tensor


class Judged(NamedTuple):
    """What is loaded as a whole: a block of a group's layers, or its recurrent states
    of a kind, `state`. layers: by their columns in a digest."""

    group_id: int
    block_size: int
    layers: Sequence[str]
    state: str | None = None


# Findings about a load; none if it was reported as failed.
OF_LOADS = ("handed_on", "never_loaded", "other_text", "not_as_sent")


class Judge:
    """The caller's lock protects it.

    digests: by place: of the groups, then of recurrent states. num_settled: slots that
    the device counts as unverified, and that are not.
    """

    def __init__(
        self,
        groups: Sequence[AuditedGroup],
        requests: Requests,
        boundaries: Sequence[Boundaries],
        store_is_own: bool,
        handovers: Handovers | None,
    ) -> None:
        self._num_groups, self._requests = len(groups), requests
        self.digests = [Digests(zeros_of(of), store_is_own) for of in groups]
        self._judged = [
            Judged(of.shape.group_id, of.shape.block_size, of.names) for of in groups
        ]
        for one in boundaries:
            self.digests.append(Digests(one.zeros, store_is_own and one.is_own))
            self._judged.append(Judged(one.group_id, 1, one.layers, one.kind))
        self._handovers = handovers
        # Blocks that a load has filled in part, and the request's generation: what it
        # adds is no computation of the whole block.
        self._partly: list[dict[int, int]] = [{} for _ in self._judged]
        self.num_settled = 0

    def take_in(self, of: Filled, failed: set[int], found: Found) -> None:
        """Judges the loads of a step, and keeps what was computed. A load that failed
        is computed anew from its first failed block on, and what a step with one has
        computed may rest on it. failed: blocks; those behind them are added."""
        judged, digests = self._judged[of.place], self.digests[of.place]
        num_layers = len(judged.layers)
        others = list(_rows(of.others, num_layers))
        loaded = [one for one in others if one[0][_KIND] == LOADED]
        before = found.num_unverified
        # The first position that failed, by generation.
        begins: dict[int, int] = {}
        for (_, block, position, generation, *_), _ in loaded:
            if block in failed:
                begins[generation] = min(begins.get(generation, position), position)
        # What the device found as it was before, by block: that is all that is said of
        # it. Not slots whose store it knows, which have the writer of before.
        reported = Counter(
            finding.block
            for finding in found.findings
            if (finding.group, finding.state) == (judged.group_id, judged.state)
            if finding.step == of.step and finding.kind == "never_loaded"
            if judged.state or finding.writer.step == of.step
        )
        partly = self._partly[of.place]
        handed = self._handed(of, begins)
        for head, digest in loaded:
            text, block, position, generation, num_slots, _, tokens, is_known = head
            verdict: Wrong | bool = False
            if position >= begins.get(generation, position + 1):
                found.num_failed += num_slots
                failed.add(block)
            else:
                if num_slots < judged.block_size:
                    partly[block] = generation
                elif is_known and block not in reported:
                    verdict = digests.judge(text, tokens, digest, generation)
                if block not in reported:
                    verdict = verdict or handed.get((generation, block), False)
                    if verdict is False:
                        continue
                num_slots = min(num_slots, reported.get(block, num_slots))
            found.num_unverified -= num_slots
            if verdict is True:
                found.num_verified += num_slots
            elif isinstance(verdict, Wrong):
                found.findings.append(self._finding(judged, head, verdict, of.step))
        for head, digest in _rows(of.computed, num_layers):
            text, block, _, generation, *_, tokens, is_known = head
            is_its_own = is_known and partly.pop(block, None) != generation
            kept = digest if is_its_own and not begins else CUT
            digests.commit(text, tokens, kept, generation)
        self.num_settled += before - found.num_unverified

    def _handed(
        self, of: Filled, begins: Mapping[int, int]
    ) -> dict[tuple[int, int], Wrong | bool]:
        """As Handovers.arrived. begins: the first position that failed, by generation:
        what lies behind is left out."""
        if self._handovers is None or of.place >= self._num_groups:
            return {}
        rows = torch.cat([of.computed, of.others]).numpy()
        heads = Heads(*rows[:, : ops.DIGEST_COLUMNS].T)
        sums = rows[:, ops.DIGEST_COLUMNS :].view(np.uint64)
        is_there = np.ones(len(rows), bool)
        for generation, begin in begins.items():
            is_there &= (heads.generation != generation) | (heads.position < begin)
        return self._handovers.arrived(of.place, heads.of(is_there), sums[is_there])

    def _finding(
        self, of: Judged, head: Sequence[int], wrong: Wrong, step: int
    ) -> Finding:
        _, block, position, generation, *_ = head
        name_of = self._requests.name_of
        return Finding(
            wrong.kind,
            of.group_id,
            of.layers[wrong.layer] if wrong.layer >= 0 else None,
            wrong.num_layers,
            block,
            None if of.state else block * of.block_size + wrong.offset,
            position + wrong.offset,
            name_of(generation),
            Writer(name_of(wrong.author), wrong.author, 0),
            step,
            f"{wrong.expected & (2**64 - 1):#x}",
            f"{wrong.found & (2**64 - 1):#x}",
            state=of.state,
            column=0 if of.state else None,
        )


_KIND = Heads._fields.index("kind")


def _rows(rows: torch.Tensor, num_layers: int) -> Iterator[tuple[list[int], bytes]]:
    """The columns of BlockDigest, and the digest."""
    heads = rows[:, : ops.DIGEST_COLUMNS].tolist()
    data = rows[:, ops.DIGEST_COLUMNS :][:, :num_layers].contiguous().numpy().tobytes()
    size = len(data) // max(len(heads), 1)
    for number, head in enumerate(heads):
        yield head, data[number * size : (number + 1) * size]
