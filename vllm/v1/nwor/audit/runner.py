# SPDX-License-Identifier: Apache-2.0
"""The audit on a model runner: what the hooks of both runners (hooks/runner_v1.py,
hooks/runner_v2.py) call.

A failure of the audit ends the audit, with one line, and never the engine
(VLLM_NWOR_STRICT=always raises).

The runner's thread makes the steps; an asynchronous output is read by another one. What
the two share: `Outbox` and `Findings`, each with a lock of its own, the counts of
unread outputs, of which each thread writes its own (`RunnerAudit`), and
`report.News`. Each hook reads `nwor_state.audit` once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from ..config import AuditMode, NworConfig
from ..draft_manager import NworError
from ..hooks._wrap import Wrapped, argument, install_all
from ..hooks.layers import error_text
from ..hooks.ledger import SHUTDOWN, WAKE_UP
from ..report import MAX_IN_FLIGHT, NOTHING, News
from ..window import Acceptance, NumRejected, SampledIds, Undone
from . import offloading, startup
from .findings import AuditError, Finding, Findings
from .requests import Loads
from .state import Audit, Batch

logger = logging.getLogger("vllm.v1.nwor")


# As Audit.resolve: cu_num_logits and the acceptance.
Kept = tuple[torch.Tensor | None, Acceptance | None]

# At most so long the steps in which nothing was found are reported together.
REPORT_SECONDS = 1.0


def install(module: ModuleType) -> None:
    """Wraps the worker in `module`. Raises HostMismatch if it is not as expected."""
    install_all(module, {WAKE_UP: _wake_up, SHUTDOWN: _shutdown})


def start(runner: Any, config: NworConfig) -> RunnerAudit | None:
    """The audit of a runner whose caches were just bound; None if it is refused. Raises
    NworError then, under VLLM_NWOR_STRICT; and NworConfigError, as path_of."""
    path = startup.path_of(runner, config)
    try:
        audit = startup.build(runner, config)
    except Exception as error:
        audit = f"vLLM is not as expected: {error_text(error)}"
    if isinstance(audit, Audit):
        kind = RunnerAuditV2 if hasattr(runner, "block_tables") else RunnerAuditV1
        if audit.loads is Loads.KNOWN:
            offloading.watch(runner)
        return kind(audit, config, path)
    runner.nwor_audit_storage = None
    if config.strict:
        raise NworError(f"NWOR audit requested, refused: {audit}")
    logger.warning("NWOR audit: off: %s", audit)
    return None


def guarded(part: Callable[..., None]) -> Callable[..., None]:
    """A part of a step, of a runner's audit: what fails in it ends the audit."""

    @wraps(part)
    def run(self: RunnerAudit, runner: Any, *args: Any) -> None:
        try:
            part(self, runner, *args)
        except AuditError:
            raise
        except Exception:
            if self.strict:
                raise
            self.end(runner)

    return run


def _nothing_undone(group_id: int) -> Undone:
    """As DraftCommitManager.undone, of a step without a commit."""
    return Undone()


class RunnerAudit:
    """What the audit keeps on a runner, as its attribute `nwor_audit`. What begins with
    `runner` is called by hooks, and only while there is an audit."""

    def __init__(self, audit: Audit, config: NworConfig, path: str) -> None:
        """path: as Findings."""
        self.audit = audit
        about = {"audit": config.audit.value, **startup.about(audit)}
        self.findings = Findings(path, about)
        self.raises = config.audit is AuditMode.RAISE
        self.strict = config.strict_steps
        # vLLM reads the asynchronous outputs of one rank only. num_attached: so many
        # were given out, which the runner's thread counts; last_read: the number of
        # the one read last, which the thread writes that reads.
        self.num_attached = self.last_read = 0
        # Of the last ones given out, the oldest first: as Outbox.take.
        self._sent: deque[int] = deque(maxlen=MAX_IN_FLIGHT + 1)
        self._news = News()
        self._reported_at = 0.0

    def end(self, runner: Any) -> None:
        """The audit goes on no more. To be called while an exception is handled; any
        thread may, and more than one."""
        state = runner.__dict__.get("nwor_state")
        if state is not None and state.audit is self:
            state.audit = None
        if runner.__dict__.get("nwor_audit") is self:
            runner.nwor_audit = None
            # What was launched may still write to its pinned memory.
            runner.nwor_ended_audit = self
            logger.exception("NWOR audit: off from here on, because it failed")

    @guarded
    def begin_step(self, runner: Any, scheduled: Any) -> None:
        """scheduled: vLLM's SchedulerOutput. What earlier steps found is logged here
        where nobody reads this rank's outputs: it has nothing to keep from leaving. The
        findings of outputs that may still be read are left to these."""
        if self.num_attached - self.last_read > MAX_IN_FLIGHT:
            self._take(0, until=self._sent[0])
        self.audit.begin_step(scheduled)
        if self.audit.loads is Loads.KNOWN:
            offloading.begin_step(runner, scheduled)

    def _kept(self, runner: Any, sampled: Any, drafts: Any) -> Kept:
        raise NotImplementedError

    @guarded
    def resolve(self, runner: Any, sampled: Any, drafts: Any, was_open: bool) -> None:
        """The end of a step, behind NWOR's commit. sampled: what vLLM's sampler gave
        out. drafts: where it says which rows are drafts. was_open: NWOR had
        windows."""
        if self.audit.is_open:
            undone = runner.nwor_state.manager.undone if was_open else _nothing_undone
            self.audit.resolve(*self._kept(runner, sampled, drafts), undone)

    def attach(self, runner: Any, output: Any) -> Any:
        """The output of a step, which findings leave with, or which they keep from
        leaving; an asynchronous one has them when vLLM reads it. One without requests
        has none: what was found before belongs to an output that was not read yet."""
        try:
            return self._attach(runner, output)
        except AuditError:
            raise
        except Exception:
            if self.strict:
                raise
            self.end(runner)
            return output

    def _attach(self, runner: Any, output: Any) -> Any:
        through = self.audit.outbox.num_sent

        def reported(found: Any) -> Any:
            # Also where the audit has failed since: what it had found is still true.
            self.report(runner, found, through)
            return found

        get_output = getattr(output, "get_output", None)
        if get_output is None:
            return reported(output) if getattr(output, "req_ids", None) else output

        number = self.num_attached + 1

        def read() -> Any:
            self.last_read = number
            # The output refers to this function, and that to the output.
            vars(output).pop("get_output", None)
            return reported(get_output())

        output.get_output = read
        self.num_attached = number
        self._sent.append(through)
        return output

    @guarded
    def report(self, runner: Any, output: Any, through: int) -> None:
        """Logs what a step found, and has its output carry the numbers. through: as
        Outbox.take; when it is read, vLLM may have enqueued the next step.

        Raises:
            AuditError: under VLLM_NWOR_AUDIT=raise, if something was found.
        """
        found = self._take(through)
        if found and self.raises:
            raise AuditError(f"{len(found)} findings, the first: {found[0].line()}")
        now = time.monotonic()
        is_due = found or now >= self._reported_at + REPORT_SECONDS
        if is_due and getattr(output, "req_ids", None):
            payload = getattr(output, "nwor_stats", NOTHING)
            totals = self.findings.totals()
            output.nwor_stats = payload.with_audit(self._news.offer(totals))
            self._reported_at = now

    def _take(self, through: int, until: int | None = None) -> Sequence[Finding]:
        """As Outbox.take; it is counted, logged and written down."""
        found = self.audit.outbox.take(through, until)
        self.findings.take_in(found)
        return found.findings

    @guarded
    def shut_down(self, runner: Any) -> None:
        """The worker ends. It waits for nothing."""
        self._take(0)
        self.findings.conclude()

    @guarded
    def load(self, runner: Any, connector: Any) -> None:
        """A KV connector is about to submit loads (offloading.py)."""
        offloading.load(runner, connector)

    @guarded
    def hand_on(
        self, runner: Any, connector: Any, blocks: Any, chunks: Any, fills: bool
    ) -> None:
        """A KV connector is about to read or fill blocks (offloading.py)."""
        found = offloading.read(runner.kv_cache_config, connector, blocks, chunks)
        self.audit.hand_on(*found, fills=fills)

    @guarded
    def forget_cache(self, runner: Any) -> None:
        """As Audit.forget_cache."""
        self.audit.forget_cache()


class RunnerAuditV1(RunnerAudit):
    """Of the V1 model runner."""

    @guarded
    def plan(self, runner: Any) -> None:
        """Tables and slots are final. A second call in a step does nothing."""
        if self.audit.is_open:
            return
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        query_start_loc = runner.query_start_loc
        tables = batch.block_table.block_tables
        self.audit.plan(
            Batch(
                num_reqs,
                int(query_start_loc.np[num_reqs]),
                runner.input_ids.gpu,
                runner.positions,
                query_start_loc.gpu,
                [table.slot_mapping.gpu for table in tables],
                [table.block_table.gpu for table in tables],
            ),
            batch.req_ids,
            lambda row: self._text_of(batch, row),
        )

    def _text_of(self, batch: Any, row: int) -> tuple[torch.Tensor, None]:
        length = int(batch.num_computed_tokens_cpu[row])
        return torch.from_numpy(batch.token_ids_cpu[row, :length].copy()), None

    def _kept(self, runner: Any, sampled: Any, metadata: Any) -> Kept:
        """metadata: vLLM's SpecDecodeMetadata, or None."""
        if metadata is None:
            return None, None
        ids = SampledIds(sampled.sampled_token_ids, runner.input_batch.vocab_size)
        return metadata.cu_num_sampled_tokens, ids


class RunnerAuditV2(RunnerAudit):
    """Of the V2 model runner.

    A request has a number there, its state's index, which it keeps until it is
    finished, preempted or streams more input: that is its seat. What it found is hashed
    from vLLM's own copy of its tokens, host memory that the device sees.
    """

    @guarded
    def plan(
        self, runner: Any, batch: Any, block_tables: Any, slot_mappings: Any
    ) -> None:
        """Tables and slots are final: what prepare_attn returned."""
        self.audit.plan(
            Batch(
                batch.num_reqs,
                batch.num_tokens,
                batch.input_ids,
                batch.positions,
                batch.query_start_loc,
                # [groups, tokens]: to take a row out of it costs more than to pass it.
                (slot_mappings,) if len(block_tables) == 1 else slot_mappings,
                block_tables,
                batch.idx_mapping,
            ),
            batch.req_ids,
            lambda row: self._text_of(runner, batch.req_ids[row]),
        )

    def _text_of(self, runner: Any, name: str) -> tuple[torch.Tensor, int]:
        seat = runner.req_states.req_id_to_index[name]
        length = self.audit.requests[name].num_found
        return runner.req_states.all_token_ids.gpu[seat, :length], seat

    def _kept(self, runner: Any, sampled: Any, batch: Any) -> Kept:
        if batch.num_draft_tokens == 0:
            return None, None
        return batch.cu_num_logits[1:], NumRejected(sampled[2])


def _wake_up(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tags = argument(WAKE_UP, "tags", args, kwargs)
    runner = getattr(worker, "model_runner", None)
    audit = getattr(runner, "nwor_audit", None)
    if audit is not None and (tags is None or "kv_cache" in tags):
        audit.forget_cache(runner)
    return result


def _shutdown(wrapped: Wrapped, worker: Any, args: Any, kwargs: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    audit = getattr(runner, "nwor_audit", None)
    if audit is not None:
        audit.shut_down(runner)
    return wrapped(*args, **kwargs)
