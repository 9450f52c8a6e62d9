# SPDX-License-Identifier: Apache-2.0
"""RunnerAudit: the audit as an observer of its runner's steps.

A failure of the audit ends the audit, with one line, and never the engine
(VLLM_NWOR_STRICT=always raises).

The runner's thread executes the steps; another one may read an asynchronous output. The
two threads share `Outbox` and `Findings`, each with its own lock; the counts of unread
outputs, each written by one thread (`RunnerAudit`); and `News`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from ..base.payload import MAX_IN_FLIGHT, News, StepPayload
from ..config import AuditMode, NworConfig
from ..layout.caches import Loads, RunnerCaches
from ..layout.states import StatesRefused
from ..metrics import ADAPTER_ROUTE
from ..step import Acceptance, Observer, OutputRead, Scheduled, Step, Transfer
from .findings import AuditError, Finding, Findings
from .state import Audit

logger = logging.getLogger("vllm.v1.nwor")

NAME = "audit"
REPORT_SECONDS = 1.0  # between reports of steps without findings, at most

Result = TypeVar("Result")


def guarded(part: Callable[..., Result]) -> Callable[..., Result | None]:
    """Decorates a part of a step: an exception in it ends the audit. Returns None
    then."""

    @wraps(part)
    def run(self: RunnerAudit, *args: Any) -> Result | None:
        try:
            return part(self, *args)
        except AuditError:
            raise
        except Exception:
            self._failed()
            return None

    return run


class RunnerAudit(Observer):
    """An Audit, and its data that crosses threads on the way to the scheduler.

    num_attached: outputs returned so far; the runner's thread writes it. last_read:
    number of the output read last; the reading thread writes it. (vLLM reads the
    asynchronous outputs of one rank only.)
    """

    def __init__(
        self,
        audit: Audit,
        config: NworConfig,
        caches: RunnerCaches,
        path: str = "",
        about: Mapping[str, Any] | None = None,
        storage: torch.Tensor | None = None,
    ) -> None:
        """path, about: as Findings."""
        super().__init__(
            NAME,
            every_step=True,
            weights_watched=audit.fingerprints.watch,
            storage=storage,
            settle=self._settle,
            step_started=self._step_started,
            tables_final=self._tables_final,
            metadata_final=self._metadata_final
            if audit.states and not audit.states.has_rings_alone
            else None,
            sampled=self._sampled,
            output_ready=self._output_ready,
            caches_lost=self._caches_lost,
            hooks_failed=self._failed,
            shut_down=self._shut_down,
            blocks_transferred=self._blocks_transferred
            if caches.limits.loads is Loads.KNOWN
            else None,
        )
        self.audit = audit
        about = {"audit": config.audit.value, **(about or {})}
        self.findings = Findings(path, about, config.audit_stale)
        self._raises = config.audit is AuditMode.RAISE
        self._strict = config.strict_steps
        self._text_of, self._read_states = caches.text_of, caches.read_states
        self.num_attached = self.last_read = 0
        # Of the outputs returned last, the oldest first: as Outbox.take.
        self._sent: deque[int] = deque(maxlen=MAX_IN_FLIGHT + 1)
        self._news = News()
        self._reported_at = 0.0
        self._has_failed = False

    def _failed(self) -> None:
        """Ends the audit, or raises the exception that is being handled. Any thread may
        call it, more than once."""
        if self._strict:
            raise
        if not self._has_failed:
            self._has_failed = True
            self.leave()
            logger.exception("NWOR audit: disabled after an internal error")

    _settle = guarded(lambda self: self.audit.outbox.join())

    @guarded
    def _step_started(self, scheduled: Scheduled) -> None:
        """Logs the findings of earlier steps if this rank's outputs are not read.
        Findings of outputs that may still be read are reported when they are read."""
        self.audit.outbox.join()  # a step that failed has no output
        if self.num_attached - self.last_read > MAX_IN_FLIGHT:
            self._take(0, until=self._sent[0])
        self.audit.begin_step(scheduled)

    @guarded
    def _tables_final(self, step: Step) -> None:
        self.audit.plan(step, self._text_of)
        if self.audit.states and self.audit.states.has_rings_alone:
            self._metadata_final(step, {})

    @guarded
    def _metadata_final(self, step: Step, metadata: Any) -> None:
        if not self.audit.is_open or self._read_states is None:
            return
        try:
            found = self._read_states(metadata, step.block_tables)
        except StatesRefused as refused:
            self._read_states = None
            logger.warning("NWOR audit: recurrent states: off: %s", refused)
            return
        self.audit.read_states(step, *found)

    @guarded
    def _sampled(self, step: Step, acceptance: Acceptance | None) -> None:
        if self.audit.is_open:
            self.audit.resolve(step, acceptance)

    @guarded
    def _blocks_transferred(self, transfer: Transfer) -> None:
        self.audit.on_transfer(transfer)

    @guarded
    def _caches_lost(self) -> None:
        self.audit.lose_cache()

    @guarded
    def _output_ready(self) -> OutputRead:
        """Findings leave with the output, or keep it from leaving."""
        self.audit.outbox.join()
        through = self.audit.outbox.num_sent
        self.num_attached += 1
        self._sent.append(through)
        return partial(self._output_read, self.num_attached, through)

    @guarded
    def _output_read(
        self,
        number: int,
        through: int,
        payload: StepPayload | None,
        failed: Collection[int],
    ) -> StepPayload | None:
        """Logs a step's findings, and adds their counts to its payload, also after the
        audit has failed: its earlier findings still hold. through, failed: as
        Outbox.take; vLLM may have enqueued the next step by the time of the read, and
        which of its loads failed is in its own output.

        Raises:
            AuditError: under VLLM_NWOR_AUDIT=raise, if something was found.
        """
        self.last_read = number
        until = None if self.audit.loads is Loads.NONE else through
        found, given = self._take(through, until, failed)
        if found and self._raises:
            raise AuditError(f"{len(found)} findings, the first: {found[0].line()}")
        if payload is None:
            return None
        now, changed = time.monotonic(), self.audit.fingerprints.take()
        if not (found or changed or given or now >= self._reported_at + REPORT_SECONDS):
            return None
        self._reported_at = now
        changes = {ADAPTER_ROUTE: self.audit.requests.num_adapter_changes}
        totals = self.findings.totals() | changes
        return payload.with_audit(self._news.offer(totals), changed, given)

    def _take(
        self, through: int, until: int | None = None, failed: Collection[int] = ()
    ) -> tuple[Sequence[Finding], Mapping[str, str]]:
        """As Outbox.take; also counts, logs and writes the findings to the files.
        Returns them, and Found.given."""
        taken = self.audit.outbox.take(through, until, failed)
        found = self.findings.take_in(taken)
        if found and self.audit.recorder:
            self.audit.recorder.found()
        return found, taken.given

    @guarded
    def _shut_down(self) -> None:
        """It waits for nothing."""
        self._take(0)
        self.findings.conclude()
        if self.audit.recorder:
            self.audit.recorder.close()
