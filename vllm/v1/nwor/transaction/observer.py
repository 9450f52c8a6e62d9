# SPDX-License-Identifier: Apache-2.0
"""Transaction: a DraftCommitManager as an observer of its runner's steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..base.errors import NworError
from ..metrics import STEP_FAILED, GroupInfo
from ..step import Observer
from .counters import Report
from .draft_manager import DraftCommitManager
from .states import State


class Transaction(Observer):
    """The transaction of a runner. Its moments are the manager's own methods where that
    is possible: each Python frame costs a step about 1 us.

    manager: None if nothing is protected. infos: what became of each KV-cache group.
    report: what outputs carry, unless VLLM_NWOR_EMIT_METRICS is 0 (emits).
    """

    def __init__(
        self,
        manager: DraftCommitManager | None,
        infos: Sequence[GroupInfo],
        emits: bool = True,
        storage: torch.Tensor | None = None,
    ) -> None:
        self.manager = manager
        self.report = Report(infos, manager)
        moments: dict[str, Any] = {}
        if emits:
            moments["payload"] = self.report.take_payload
        if manager is not None:
            moments |= {
                "step_started": manager.start_step,
                "before_forward": manager.begin,
                "sampled": manager.commit,
                "drafts_missed": self._drafts_missed,
                "step_failed": self._step_failed,
            }
            if manager.shadow is not None:
                moments["tables_final"] = manager.stage
        super().__init__("transaction", infos=infos, storage=storage, **moments)

    def _drafts_missed(self, num_drafts: int) -> None:
        assert self.manager is not None
        self.manager.miss_begin(f"{num_drafts} drafts")

    def _step_failed(self) -> None:
        """Shadow blocks do not outlive an exception in their step, which is the one to
        report: the rows of the tables may move before the next step."""
        assert self.manager is not None
        if self.manager.state is State.STAGED:
            with contextlib.suppress(NworError):
                self.manager.abort(STEP_FAILED)
