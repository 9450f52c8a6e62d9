# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of the target model's weights, for writes that nobody announces.

The op that ends a step sums a sample of the parameters (Publish of audit_rules.h) every
EVERY steps, and in the first step after a look at their whole content, which is what
later ones are compared with. A difference is a reason for the engine core to look
again: content decides.

A parameter that was moved may have been freed, and reading freed memory can end a GPU's
process. So the host first compares the parameters' addresses; if one differs, nothing
is read, which is such a reason, too. vLLM's step, in between, reads the same ones.
"""

from __future__ import annotations

import torch

from ..step import WeightWords

# So many that the check of the addresses, a loop over the parameters, is invisible.
EVERY = 64


class Fingerprints:
    """seen: the last step whose fingerprint has arrived. changed: between which two
    steps the weights were changed, until `take`; said again until somebody looks.

    The runner's thread calls `due`, the reader of a step's output the others."""

    def __init__(self, device: torch.device) -> None:
        """device: of the audit's tables; parameters elsewhere are not read."""
        self._device = device
        self._weights: WeightWords | None = None
        self._num_looks = -1
        self._table = torch.empty(0, dtype=torch.int64)
        # The step after the last look; its fingerprint, and the last step that had it.
        self._first = self._value = self._same = 0
        self.seen = 0
        self.changed: tuple[int, int] | None = None

    def watch(self, weights: WeightWords) -> None:
        self._weights = weights

    def due(self, step: int) -> torch.Tensor | None:
        """[n] int64: addresses of the words to read in this step, in memory that the
        device reads; None: it takes no fingerprint. Call in each step."""
        weights = self._weights
        if weights is None:
            return None
        if weights.num_looks != self._num_looks:
            is_first = self._num_looks < 0
            self._num_looks, self._first = weights.num_looks, step
            if is_first or weights.have_moved():
                table = torch.tensor(weights.addresses(self._device), dtype=torch.int64)
                if self._device.type == "cuda":
                    table = table.pin_memory()
                self._table = table.to(self._device, non_blocking=True)
        elif step % EVERY:
            return None
        elif weights.have_moved():
            self.changed = self._same, step
            return None
        return self._table if len(self._table) else None

    def arrived(self, value: int, step: int) -> None:
        """The fingerprint of a step, in the order of steps."""
        if self.seen < self._first <= step:
            self._value = value
        self.seen = step
        if value == self._value:
            self._same = step
        else:
            self.changed = self._same, step

    def take(self) -> tuple[int, int] | None:
        changed, self.changed = self.changed, None
        return changed
