# SPDX-License-Identifier: Apache-2.0
"""The incident file: what the host knew of the last steps when the audit found
something. explain.py reads it.

A Recorder keeps the scheduler's output of the last steps, and each request's block
tables with the step in which each block came. It reads nothing from the device, and
keeps no tokens but, if asked for, those of prompts. It records where
VLLM_NWOR_AUDIT_INCIDENT names a file; that is written with the first finding of a step,
at most every INTERVAL_SECONDS, and on SIGUSR2. An error of its own switches it off, and
nothing else.

What it does not know: blocks that the scheduler took back from a request that goes on
(those below a sliding window), because no worker hears of these.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..base.errors import error_text
from ..step import NewRequest, RunningRequest, Scheduled, Weights
from ..step import Transfer as StepTransfer
from .findings import Finding, write_whole

logger = logging.getLogger("vllm.v1.nwor")

FORMAT = "vllm-nwor incident 1"
# Steps in the file; fewer if these have more block numbers and tokens than MAX_VALUES.
NUM_STEPS, MAX_VALUES = 64, 1 << 22
INTERVAL_SECONDS = 10.0

# For each KV-cache group, numbers of blocks: arrays, which msgspec encodes as lists.
Blocks = list[list[int]]


class Engine(Struct):
    """connector: of the KV cache, empty for none."""

    mode: str
    model: str
    connector: str


class Table(Struct):
    """The blocks that a request had from one step on.

    num_found: tokens that were computed when it came: found in the cache, or loaded.
    epoch: of the weights that compute it. steps: in which each block came. until: the
    last step in which it had them, and why then; None: it still has them. prompt: its
    tokens, if asked for.
    """

    request: str
    since: int
    num_found: int
    epoch: int
    blocks: Blocks
    steps: Blocks
    until: int | None = None
    why: str = ""
    prompt: list[int] = []


class Transfer(Struct):
    """fills: the KV connector fills these blocks; else it reads them."""

    fills: bool
    blocks: Blocks


class StepRecord(Struct):
    """tokens, drafts, computed: of each request, by name. seats: of the batch, in the
    order of its rows. ended: tables whose last step was the one before."""

    step: int
    tokens: Mapping[str, int]
    drafts: Mapping[str, int]
    computed: dict[str, int]
    epoch: int
    label: str
    zeroed: list[int]
    copied: list[tuple[int, int]]
    ended: list[Table]
    seats: dict[str, int | None] = {}
    transfers: list[Transfer] = []
    is_cache_lost: bool = False
    num_values: int = 0


class Report(Struct):
    """As the file of VLLM_NWOR_AUDIT_FILE, of which it has more."""

    audit: str
    nwor: str
    vllm: str
    torch: str
    groups: dict[str, str]
    steps: int
    num_findings: int
    findings: list[Finding]


class Incident(Struct):
    """The file. why: it was written. block_sizes: tokens a block of each KV-cache
    group. tables: of the requests that have blocks."""

    format: str
    written: str
    why: str
    engine: Engine
    block_sizes: list[int]
    report: Any
    steps: list[StepRecord]
    tables: list[Table]


def numbers(values: Iterable[int]) -> Any:
    return array("i", values)


def guarded(part: Callable[..., None]) -> Callable[..., None]:
    """Decorates what a Recorder does: an exception switches it off."""

    @wraps(part)
    def run(self: Recorder, *args: Any) -> None:
        if self.is_on:
            try:
                part(self, *args)
            except Exception as error:
                self.is_on = False
                text = "NWOR audit: no incident file any more: %s could not be %s: %s"
                what = "written" if isinstance(error, OSError) else "made"
                logger.error(text, self.path, what, error_text(error))

    return run


class Recorder:
    """Keeps the last steps, and writes them to `path`. The runner's thread records;
    others may write.

    block_sizes: of each KV-cache group. report: Findings.content. has_tokens: whether
    the file has those of prompts.
    """

    def __init__(
        self,
        path: str,
        engine: Engine,
        block_sizes: Sequence[int],
        report: Callable[[], Mapping[str, Any]],
        has_tokens: bool = False,
    ) -> None:
        self.path, self.is_on = Path(path), True
        self._engine, self._block_sizes = engine, list(block_sizes)
        self._report, self._has_tokens = report, has_tokens
        # Of requests that have not ended: vLLM names no prompt of a resumed one.
        self._prompts: dict[str, list[int]] = {}
        self._steps: deque[StepRecord] = deque()
        self._tables: dict[str, Table] = {}
        self._num_values = 0
        # Of what is recorded, and of the file.
        self._lock, self._file_lock = threading.Lock(), threading.Lock()
        self._next_write, self._is_due = 0.0, False
        self._watch_signal()

    def _watch_signal(self) -> None:
        previous = signal.getsignal(signal.SIGUSR2)
        if threading.current_thread() is not threading.main_thread():
            reason = "; not on SIGUSR2: this is not the main thread of its process"
        elif previous is None:
            reason = "; not on SIGUSR2: a library handles it"
        else:
            recorder = weakref.ref(self)

            def write(number: int, frame: Any) -> None:
                # A thread of its own: this one may hold a lock.
                if (one := recorder()) is not None:
                    threading.Thread(target=one.write, args=("SIGUSR2",)).start()
                if callable(previous):
                    previous(number, frame)

            signal.signal(signal.SIGUSR2, write)
            reason = f", or `kill -USR2 {os.getpid()}`"
        logger.info("NWOR audit: a finding writes %s%s", self.path, reason)

    # -- what is recorded ----------------------------------------------------------

    @guarded
    def begin_step(self, step: int, scheduled: Scheduled) -> None:
        with self._lock:
            self._begin_step(step, scheduled)
        if self._is_due and time.monotonic() >= self._next_write:
            self.write("finding")

    def _begin_step(self, step: int, scheduled: Scheduled) -> None:
        tokens, weights = scheduled.num_tokens(), scheduled.weights()
        new, running = scheduled.new_requests(), scheduled.running_requests()
        if tokens and not (new or running):
            return  # an idle rank of data parallel ones keeps step with the others
        record = StepRecord(
            step=step,
            tokens=tokens,
            drafts=scheduled.num_drafts(),
            computed={},
            epoch=weights.epoch,
            label=weights.label,
            zeroed=numbers(scheduled.zeroed_blocks()),
            copied=list(scheduled.copied_blocks()),
            ended=[],
        )
        self._steps.append(record)
        for name in scheduled.finished():
            self._end(record, name, "finished or aborted")
            self._prompts.pop(name, None)
        for name in scheduled.preempted():
            self._end(record, name, "preempted")
        for request in new:
            self._begin(record, request, weights)
        for one in running:
            if one.is_resumed:
                self._begin(record, one, weights)
                continue
            record.computed[one.request_id] = one.num_computed
            table = self._tables.get(one.request_id)
            if one.block_ids is not None and table is not None:
                groups = zip(table.blocks, table.steps, one.block_ids, strict=True)
                for blocks, steps, ids in groups:
                    blocks.extend(ids)
                    steps.extend([step] * len(ids))
        self._keep(record, len(record.zeroed))
        while len(self._steps) > NUM_STEPS or (
            self._num_values > MAX_VALUES and len(self._steps) > 1
        ):
            self._num_values -= self._steps.popleft().num_values

    def _keep(self, record: StepRecord, num_values: int) -> None:
        record.num_values += num_values
        self._num_values += num_values

    def _begin(
        self, record: StepRecord, new: NewRequest | RunningRequest, weights: Weights
    ) -> None:
        name = new.request_id
        self._end(record, name, "came again")
        record.computed[name] = new.num_computed
        if self._has_tokens and isinstance(new, NewRequest):
            self._prompts[name] = numbers(new.prompt or ())
        blocks = [numbers(ids) for ids in new.block_ids or ()]
        self._tables[name] = Table(
            request=name,
            since=record.step,
            num_found=new.num_computed,
            epoch=weights.epoch,
            blocks=blocks,
            steps=[numbers([record.step]) * len(ids) for ids in blocks],
            prompt=self._prompts.get(name, []),
        )

    def _end(self, record: StepRecord, name: str, why: str) -> None:
        if (table := self._tables.pop(name, None)) is not None:
            table.until, table.why = record.step - 1, why
            record.ended.append(table)
            self._keep(record, 2 * sum(map(len, table.blocks)) + len(table.prompt))

    @guarded
    def rows(self, seats: Iterable[tuple[str, int | None]]) -> None:
        """The batch of the step."""
        with self._lock:
            self._steps[-1].seats = dict(seats)

    @guarded
    def transfer(self, transfer: StepTransfer) -> None:
        """Blocks that a KV connector reads or fills, in the step that began last."""
        if not self._steps:
            return
        with self._lock:
            blocks = [numbers(ids) for ids in transfer.block_ids]
            record = self._steps[-1]
            record.transfers = [*record.transfers, Transfer(transfer.fills, blocks)]
            self._keep(record, sum(map(len, blocks)))

    @guarded
    def cache_lost(self) -> None:
        """The cache's content is gone, after the step that began last."""
        if self._steps:
            self._steps[-1].is_cache_lost = True

    # -- the file ------------------------------------------------------------------

    @guarded
    def found(self) -> None:
        """Call when there are new findings."""
        self._is_due = True
        if time.monotonic() >= self._next_write:
            self.write("finding")

    @guarded
    def close(self) -> None:
        if self._is_due:
            self.write("finding")

    @guarded
    def write(self, why: str) -> None:
        """Replaces the file. Any thread may call it."""
        with self._file_lock:
            self._is_due = False
            self._next_write = time.monotonic() + INTERVAL_SECONDS
            report = self._report()
            with self._lock:
                steps = [copy(record) for record in self._steps]
                tables = deepcopy([*self._tables.values()])
            incident = Incident(
                format=FORMAT,
                written=datetime.now(UTC).isoformat(timespec="seconds"),
                why=why,
                engine=self._engine,
                block_sizes=self._block_sizes,
                report=report,
                steps=steps,
                tables=tables,
            )
            write_whole(self.path, msgspec.json.encode(incident, enc_hook=array.tolist))


def read(path: Path) -> tuple[Incident, Report]:
    """Raises ValueError: a sentence that names the file and what is wrong with it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(content)
        said = found.get("format") if isinstance(found, dict) else None
        if said != FORMAT:
            raise ValueError(
                f"{path} is not a file of VLLM_NWOR_AUDIT_INCIDENT that this version "
                f"reads: its format is {said!r}; must be {FORMAT!r}"
            )
        incident = msgspec.convert(found, Incident)
        return incident, msgspec.convert(incident.report, Report)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error
