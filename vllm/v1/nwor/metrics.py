# SPDX-License-Identifier: Apache-2.0
"""What the worker's windows did, tied to what the scheduler counted.

The worker counts verification windows on the device; the scheduler counts drafts and
accepted tokens by itself. Here the two meet, one ModelRunnerOutput at a time: a
`WorkerRecord` belongs to exactly the step whose output carried it, so every identity
is exact for each step, also when outputs arrive late.

A *dropped* window is one that the worker ran and the scheduler never counted: its
request finished or was aborted in flight, failed to load its KV, or its output was
stale. Which windows those are is not guessed: all that were scheduled, less those
that vLLM counted.

What holds for the totals, always (a breach only moves tokens between the parts):

    tokens_staged == committed_tokens + rejected_tokens + dropped_drafts

and, as long as no breach is counted and no step ran as vanilla vLLM:

    committed_tokens == vllm:spec_decode_num_accepted_tokens
    rejected_tokens  == drafts counted (grammar-invalid ones too) - accepted

This module holds the arithmetic and makes the Prometheus objects; it imports neither
vLLM nor torch. `hooks.stats` brings it the numbers.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

# The counters of a report, in its order, and the help text of the Prometheus counter
# of each.
COUNTERS = {
    "windows": "Verification windows that NWOR protected.",
    "tokens_staged": "Draft tokens in those windows.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected and undone.",
    "dropped_drafts": "Draft tokens of windows that the scheduler never counted.",
    "restored_bytes": "KV-cache bytes put back at rejected slots (of one worker).",
    "shadow_copied_bytes": "KV-cache bytes copied to shadow pages (of one worker).",
    "committed_bytes": "KV-cache bytes copied from shadow pages (of one worker).",
    "breaches": "Identities between worker and scheduler that did not hold.",
}
(
    WINDOWS,
    STAGED,
    COMMITTED,
    REJECTED,
    DROPPED,
    RESTORED_BYTES,
    SHADOW_COPIED_BYTES,
    COMMITTED_BYTES,
    BREACHES,
) = range(9)
FALLBACKS_HELP = "Steps that did not run as nwor_info says, by reason."
INFO_HELP = "1 for each KV-cache group: the mode asked for and the one in use."
INFO_LABELS = ("requested", "resolved", "reason", "group")
ENGINE_LABELS = ("model_name", "engine")
# Reports of an engine that wait for somebody to collect, at most.
MAX_WAITING = 1000


class PayloadError(ValueError):
    """A worker's payload is not what this version of NWOR sends."""


class DraftCount(enum.Enum):
    """How the scheduler's number of drafts bounds what the worker runs.

    EXACT: the worker runs every draft that was scheduled.
    UPPER_BOUND: the worker drops some before the forward (ngram_gpu, adaptive
        verification); vLLM counts those as drafted and rejected, we do not count them.
    """

    EXACT = "exact"
    UPPER_BOUND = "upper bound"


class StepCounts:
    """By how much one step raised each of ops.COUNTER_COLUMNS, to be read once the
    step's output is there. Another process gets a plain tuple."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: memoryview, after: memoryview) -> None:
        """before, after: [num_launches * 8] int64, what the counters were and became.
        The memory may be used again once the step's output was processed."""
        self._before = before
        self._after = after

    def read(self) -> tuple[int, ...]:
        rose = tuple(map(operator.sub, self._after.tolist(), self._before.tolist()))
        return rose if len(rose) == _NUM_COUNTERS else _summed(rose)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.read(),)


class UntilRead(list[dict[str, Any]]):
    """Rows that are sent again until somebody has gone through them: vLLM throws the
    outputs of its warm-up away. Another process gets a plain list."""

    is_read = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.is_read = True
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class WorkerRecord(NamedTuple):
    """The increments one ModelRunnerOutput brings from the worker.

    staged = accepted + rejected drafts in `windows` windows. No windows: the step had
    no drafts, or ran as vanilla vLLM (then `fallbacks` says why).
    """

    windows: int = 0
    tokens_staged: int = 0
    tokens_accepted: int = 0
    tokens_rejected: int = 0
    restored_bytes: int = 0
    breaches: int = 0
    shadow_copied_bytes: int = 0
    committed_bytes: int = 0
    fallbacks: Mapping[str, int] = MappingProxyType({})
    info: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_payload(cls, payload: Any) -> WorkerRecord:
        """Reads what travelled on the output: a step's counts, or a dict with those as
        "counters" and the fields behind them by their names.

        Raises:
            PayloadError: naming the key that is unknown, or whose value is not allowed.
        """
        fields = dict(
            payload if isinstance(payload, Mapping) else {"counters": payload}
        )
        if isinstance(fields.get("counters"), StepCounts):
            fields["counters"] = fields["counters"].read()
        for name, value in fields.items():
            if name not in _ALLOWED:
                raise PayloadError(f"payload has {name}; allowed are {[*_ALLOWED]}")
            is_allowed, expected = _ALLOWED[name]
            if not is_allowed(value):
                raise PayloadError(f"{name} is {value!r}; expected {expected}")
        record = cls(*fields.pop("counters", ()))
        if "breaches" in fields:
            fields["breaches"] += record.breaches
        return record._replace(**fields)


# Fields of WorkerRecord in front, in the order of ops.COUNTER_COLUMNS.
_NUM_COUNTERS = WorkerRecord._fields.index("fallbacks")
# Every launch of a step sees all windows, but only its own bytes and invalid slots.
_OF_ONE_LAUNCH = [
    WorkerRecord._fields.index(name)
    for name in ("restored_bytes", "breaches", "shadow_copied_bytes", "committed_bytes")
]


def _summed(rose: tuple[int, ...]) -> tuple[int, ...]:
    """A step's counts from those of its launches. rose: [num_launches * 8]."""
    counts = list(rose[:_NUM_COUNTERS])
    for column in _OF_ONE_LAUNCH:
        counts[column] = sum(rose[column::_NUM_COUNTERS])
    return tuple(counts)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "counters": (
        lambda value: (
            isinstance(value, (list, tuple))
            and len(value) == _NUM_COUNTERS
            and all(map(_is_count, value))
        ),
        f"{_NUM_COUNTERS} integers >= 0",
    ),
    "breaches": (_is_count, "an integer >= 0"),
    "fallbacks": (
        lambda value: (
            isinstance(value, Mapping) and all(map(_is_count, value.values()))
        ),
        "integers >= 0 by reason",
    ),
    "info": (
        lambda rows: all(
            isinstance(row, Mapping) and set(row) == set(INFO_LABELS) for row in rows
        ),
        f"rows with keys {INFO_LABELS}",
    ),
}


class ScheduledWindows:
    """One step's windows as the scheduler knows them.

    Call `count` with what vLLM counts, a window at a time or in sums.

    num_counted_drafts, num_counted_accepted: of the windows that vLLM counted,
        grammar-invalid drafts included.
    """

    def __init__(
        self,
        spec_token_ids: Mapping[str, Sequence[int]],
        req_id_to_index: Mapping[str, int],
        num_ids: Sequence[int],
        num_sampled_per_step: int,
    ) -> None:
        """spec_token_ids: the drafts scheduled for each request. num_ids: how many ids
        the output has in each row, before vLLM cuts those of requests that stop; an
        empty row says nothing about what was accepted (vLLM clears the rows of
        discarded requests), nor does a missing one.
        num_sampled_per_step: ids of a row that are not drafts (1, the bonus token).
        """
        self._spec_token_ids = spec_token_ids
        self._row_of = req_id_to_index
        self._num_ids = num_ids
        self._num_sampled = num_sampled_per_step
        self.num_counted_drafts = 0
        self.num_counted_accepted = 0

    @property
    def num_windows(self) -> int:
        return sum(map(bool, self._spec_token_ids.values()))

    @property
    def num_drafts(self) -> int:
        return sum(map(len, self._spec_token_ids.values()))

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """vLLM counts one window, or several: their drafts, grammar-invalid ones
        included."""
        self.num_counted_drafts += num_drafts
        self.num_counted_accepted += num_accepted

    def accepted_bounds(self) -> tuple[int, int]:
        """Fewest and most drafts accepted in all windows, dropped ones too, as far as
        the output tells."""
        least = most = 0
        for request_id, drafts in self._spec_token_ids.items():
            row = self._row_of.get(request_id)
            num_ids = 0
            if row is not None and self._num_ids:
                num_ids = self._num_ids[row]
            num_accepted = max(num_ids - self._num_sampled, 0) if drafts else 0
            least += num_accepted
            most += num_accepted if num_ids else len(drafts)
        return least, most


class NworStats:
    """One scheduler's counts, and the increments not yet reported to the front end.

    report_breach: called with a kind and the numbers found; every breach is counted,
        whatever it does.
    has_front_end: whether there is one that takes reports.
    pending: whether there is something to report.
    """

    def __init__(
        self,
        draft_count: DraftCount,
        report_breach: Callable[[str, str], None],
        has_front_end: bool = True,
    ) -> None:
        self.has_front_end = has_front_end
        self._draft_count = draft_count
        self._report_breach = report_breach
        self._known_info: list[dict[str, Any]] = []
        self._counts = [0] * len(COUNTERS)
        self._news: dict[str, Any] = {}
        self.pending = False

    def take_report(self) -> dict[str, Any]:
        """The increments since the last report, as plain data: "counts" in the order of
        COUNTERS and, if there are any, "fallbacks" by reason and a new "info". They are
        forgotten here."""
        report = {"counts": self._counts, **self._news}
        self._counts = [0] * len(COUNTERS)
        self._news = {}
        self.pending = False
        return report

    def breach(self, kind: str, found: str) -> None:
        self._counts[BREACHES] += 1
        self.pending = True
        self._report_breach(kind, found)

    def add_counts(self, counts: Sequence[int]) -> None:
        """Adds to each of COUNTERS."""
        self._counts = list(map(operator.add, self._counts, counts))
        self.pending = True

    def add_step(self, record: WorkerRecord, scheduled: ScheduledWindows) -> None:
        """Adds one processed output: what the worker sent with it, and its windows."""
        self._add_events(record)
        counts = self._counts
        counts[RESTORED_BYTES] += record.restored_bytes
        counts[SHADOW_COPIED_BYTES] += record.shadow_copied_bytes
        counts[COMMITTED_BYTES] += record.committed_bytes
        if record.windows == 0 and record.tokens_staged == 0:
            return
        self._check(record, scheduled)
        # The parts add up whatever was found: committed and dropped are clipped, and
        # rejected is the rest. Drafts that the worker left out (UPPER_BOUND) are taken
        # from the rejected ones, then from the dropped ones; drafts it ran beyond what
        # was scheduled (a breach) are dropped ones.
        self.pending = True
        staged = record.tokens_staged
        committed = min(scheduled.num_counted_accepted, staged)
        uncounted = max(scheduled.num_drafts, staged) - scheduled.num_counted_drafts
        dropped = min(max(uncounted, 0), staged - committed)
        counts[WINDOWS] += record.windows
        counts[STAGED] += staged
        counts[COMMITTED] += committed
        counts[DROPPED] += dropped
        counts[REJECTED] += staged - committed - dropped

    def _add_events(self, record: WorkerRecord) -> None:
        """What most records do not have."""
        for reason, num in record.fallbacks.items():
            total = self._news.setdefault("fallbacks", {})
            total[reason] = total.get(reason, 0) + num
            self.pending = True
        if record.info:
            info = [dict(row) for row in record.info]
            if info != self._known_info:
                self._known_info = self._news["info"] = info
                self.pending = True
        if record.breaches:
            self._counts[BREACHES] += record.breaches - 1
            self.breach("worker", f"the worker reported {record.breaches}")

    def _check(self, record: WorkerRecord, scheduled: ScheduledWindows) -> None:
        staged, accepted = record.tokens_staged, record.tokens_accepted
        if accepted + record.tokens_rejected != staged:
            self.breach(
                "split",
                f"{accepted} accepted + {record.tokens_rejected} rejected drafts are "
                f"not {staged} staged",
            )
        for what, found, num_scheduled in (
            ("windows", record.windows, scheduled.num_windows),
            ("drafts", staged, scheduled.num_drafts),
        ):
            fewer = found < num_scheduled and self._draft_count is DraftCount.EXACT
            if fewer or found > num_scheduled:
                self.breach(what, f"{found} {what} run, {num_scheduled} scheduled")
        all_counted = scheduled.num_counted_drafts == scheduled.num_drafts
        if all_counted and accepted == scheduled.num_counted_accepted:
            return
        least, most = scheduled.accepted_bounds()
        if not least <= accepted <= most:
            self.breach(
                "accepted",
                f"{accepted} drafts accepted on the device, {least} to {most} by its "
                f"output, {scheduled.num_counted_accepted} in windows counted",
            )


def agreed_counts(payload: Any, num_scheduled: int, counted: Any) -> list[int] | None:
    """By how much a step raises each of COUNTERS about which worker, scheduler and
    vLLM's statistics say the same, as they do about nearly all: `NworStats.add_step` in
    short, to cost a step little. None where there is anything else to it.

    payload: as `WorkerRecord.from_payload` takes it. num_scheduled: of windows, or
    more. counted: SpecDecodingStats, vLLM's sums over the windows it counted, of a step
    without grammar-invalid drafts.
    """
    if type(payload) is StepCounts:
        payload = payload.read()
    if type(payload) is not tuple or len(payload) != _NUM_COUNTERS:
        return None
    windows, staged, accepted, rejected, restored, breaches, *copied = payload
    # vLLM counts scheduled windows, each once: as many are the same ones, and their
    # drafts those that were scheduled.
    if (
        windows == counted.num_drafts == num_scheduled
        and staged == counted.num_draft_tokens
        and accepted == counted.num_accepted_tokens == staged - rejected
        and rejected >= 0 == breaches <= restored
    ):
        return [windows, staged, accepted, rejected, 0, restored, *copied, 0]
    return None


# Engine index -> rows of vllm:nwor_info that came last. An engine sends them once, but
# loggers are created anew while it runs (elastic expert parallelism).
_info: dict[int, Sequence[Mapping[str, Any]]] = {}


class NworPrometheus:
    """vLLM's Prometheus objects for our counters, for one stat logger.

    counter_cls, gauge_cls: prometheus_client's, or Ray's stand-ins for them.
    label_values: engine index -> values of ENGINE_LABELS.
    Objects of the same names must have been unregistered before (vLLM does).
    """

    def __init__(
        self,
        counter_cls: Callable[..., Any],
        gauge_cls: Callable[..., Any],
        label_values: Mapping[int, Sequence[object]],
    ) -> None:
        labels = list(ENGINE_LABELS)
        self._label_values = label_values
        self._waiting: dict[int, deque[Sequence[int]]] = {
            e: deque() for e in label_values
        }
        self._increase: dict[int, list[Callable[[int], None]]] = {
            engine: [] for engine in label_values
        }
        # Another process collects from a file, or Ray from a push: nobody asks here.
        several = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._max_waiting = MAX_WAITING
        for name, text in COUNTERS.items():
            counter = counter_cls(
                name=f"vllm:nwor_{name}", documentation=text, labelnames=labels
            )
            for engine, values in label_values.items():
                self._increase[engine].append(counter.labels(*values).inc)
            if several or not hasattr(counter, "collect"):
                self._max_waiting = 0
            else:
                counter.collect = partial(self._collect, counter.collect)
        self._fallbacks = counter_cls(
            name="vllm:nwor_fallbacks",
            documentation=FALLBACKS_HELP,
            labelnames=[*labels, "reason"],
        )
        self._info_gauge = gauge_cls(
            name="vllm:nwor_info",
            documentation=INFO_HELP,
            labelnames=[*labels, *INFO_LABELS],
            multiprocess_mode="mostrecent",
        )
        self._info: dict[int, Sequence[Mapping[str, Any]]] = {}

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds the increments of `NworStats.take_report` for engine index `engine`.
        Counts wait until somebody collects: seven counters take longer than a step's
        hooks together."""
        waiting = self._waiting[engine]
        waiting.append(report["counts"])
        if len(waiting) > self._max_waiting:
            self._flush(engine)
        if len(report) == 1 and engine in self._info:
            return
        for reason, num in report.get("fallbacks", {}).items():
            self._fallbacks.labels(*self._label_values[engine], reason).inc(num)
        if "info" in report:
            _info[engine] = report["info"]
        if engine in _info:
            self._set_info(_info[engine], engine)

    def _flush(self, engine: int) -> None:
        """Bumps the counters by all that waits. Several threads may: each report is
        taken by one of them."""
        counts = [0] * len(COUNTERS)
        with contextlib.suppress(IndexError):
            while True:
                taken = self._waiting[engine].popleft()
                counts = list(map(operator.add, counts, taken))
        for increase, num in zip(self._increase[engine], counts, strict=True):
            if num:
                increase(num)

    def _collect(self, collect: Callable[[], Any]) -> Any:
        for engine in self._waiting:
            self._flush(engine)
        return collect()

    def _set_info(self, rows: Sequence[Mapping[str, Any]], engine: int) -> None:
        """One series at 1 for each row (INFO_LABELS); rows shown before go to 0."""
        for value, shown in ((0, self._info.get(engine, ())), (1, rows)):
            for row in shown:
                values = [str(row[label]) for label in INFO_LABELS]
                self._info_gauge.labels(*self._label_values[engine], *values).set(value)
        self._info[engine] = rows
