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
vLLM nor torch and reads no environment. `hooks.stats` brings it the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

# The counters of a report, and the help text of the Prometheus counter of each.
COUNTERS = {
    "windows": "Verification windows that NWOR protected.",
    "tokens_staged": "Draft tokens in those windows.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected and undone.",
    "dropped_drafts": "Draft tokens of windows that the scheduler never counted.",
    "restored_bytes": "KV-cache bytes put back at rejected slots (of one worker).",
    "breaches": "Identities between worker and scheduler that did not hold.",
}
FALLBACKS_HELP = "Steps that ran as vanilla vLLM, by reason."
INFO_HELP = "1 for each KV-cache group: the mode asked for and the one in use."
INFO_LABELS = ("requested", "resolved", "reason", "group")
ENGINE_LABELS = ("model_name", "engine")


class PayloadError(ValueError):
    """A worker's payload is not what this version of NWOR sends."""


class SpecDecodingCounts(Protocol):
    """What is read of vLLM's SpecDecodingStats: sums over the windows it counted."""

    num_drafts: int  # windows, in our words
    num_draft_tokens: int
    num_accepted_tokens: int


class DraftCount(enum.Enum):
    """How the scheduler's number of drafts bounds what the worker runs.

    EXACT: the worker runs every draft that was scheduled.
    UPPER_BOUND: the worker drops some before the forward (ngram_gpu, adaptive
        verification); vLLM counts those as drafted and rejected, we do not count them.
    """

    EXACT = "exact"
    UPPER_BOUND = "upper bound"


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
    fallbacks: Mapping[str, int] = MappingProxyType({})
    info: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> WorkerRecord:
        """Reads the plain dict that travelled on the output: "counters", by how much
        each of ops.COUNTER_COLUMNS rose, and the fields behind those by their names.

        Raises:
            PayloadError: naming the key that is unknown, or whose value is not allowed.
        """
        counters = payload.get("counters")
        if counters is None:
            record = cls()
        else:
            _check_counters(counters)
            record = cls(*counters)
            if len(payload) == 1:
                return record
        others = {name: payload[name] for name in payload if name != "counters"}
        for name, value in others.items():
            if name == "breaches":
                _check_count(name, value)
                others[name] += record.breaches
            elif name == "fallbacks":
                if not isinstance(value, Mapping):
                    raise PayloadError(f"fallbacks is {value!r}; expected a mapping")
                for reason, num in value.items():
                    _check_count(reason, num)
            elif name == "info":
                for row in value:
                    if not isinstance(row, Mapping) or set(row) != set(INFO_LABELS):
                        raise PayloadError(
                            f"info has {row!r}; expected keys {INFO_LABELS}"
                        )
            else:
                raise PayloadError(
                    f"payload has {name}; allowed are counters, breaches, fallbacks "
                    "and info"
                )
        return record._replace(**others)


# Fields of WorkerRecord in front, in the order of ops.COUNTER_COLUMNS.
_NUM_COUNTERS = WorkerRecord._fields.index("fallbacks")


def _check_counters(counters: Any) -> None:
    allowed = isinstance(counters, (list, tuple)) and len(counters) == _NUM_COUNTERS
    if not allowed or any(type(num) is not int or num < 0 for num in counters):
        raise PayloadError(
            f"counters is {counters!r}; expected {_NUM_COUNTERS} integers >= 0"
        )


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise PayloadError(f"{name} is {value!r}; expected an integer >= 0")


class ScheduledWindows:
    """One step's windows as the scheduler knows them.

    Make it before vLLM processes the output (it cuts the token lists of requests that
    stop), then call `count` with what vLLM counts, a window at a time or in sums.

    num_counted_drafts, num_counted_accepted: of the windows that vLLM counted,
        grammar-invalid drafts included.
    """

    def __init__(
        self,
        spec_token_ids: Mapping[str, Sequence[int]],
        req_id_to_index: Mapping[str, int],
        sampled_token_ids: Sequence[Sequence[int]] | None,
        num_sampled_per_step: int,
    ) -> None:
        """spec_token_ids: the drafts scheduled for each request. sampled_token_ids: the
        output's ids for each row; an empty row says nothing about what was accepted
        (vLLM clears the rows of discarded requests), nor does a missing one.
        num_sampled_per_step: ids of a row that are not drafts (1, the bonus token).
        """
        self._spec_token_ids = spec_token_ids
        self._row_of = req_id_to_index
        self._num_ids = list(map(len, sampled_token_ids or ()))
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
    pending: whether there is something to report.
    """

    def __init__(
        self, draft_count: DraftCount, report_breach: Callable[[str, str], None]
    ) -> None:
        self._draft_count = draft_count
        self._report_breach = report_breach
        self._known_info: list[dict[str, Any]] = []
        self._report: dict[str, Any] = _empty_report()
        self.pending = False

    def take_report(self) -> dict[str, Any]:
        """The increments since the last report, as plain data: COUNTERS, "fallbacks"
        by reason, and "info" if it is new. They are forgotten here."""
        report, self._report = self._report, _empty_report()
        self.pending = False
        return report

    def breach(self, kind: str, found: str) -> None:
        self._report["breaches"] += 1
        self.pending = True
        self._report_breach(kind, found)

    def add_if_all_agrees(
        self,
        payload: Mapping[str, Any],
        scheduled: ScheduledWindows,
        counted: SpecDecodingCounts,
    ) -> bool:
        """Adds a step about which worker, scheduler and vLLM's statistics say the same,
        as they do about nearly all: `add_step` in short, to cost a step little. Returns
        False, with nothing done, where there is anything else to it.

        payload: as `WorkerRecord.from_payload` takes it. counted: what vLLM summed up
        in a step without grammar-invalid drafts.
        """
        counters = payload.get("counters")
        if counters is None or len(payload) > 1 or len(counters) != _NUM_COUNTERS:
            return False
        windows, staged, accepted, rejected, restored, breaches = counters
        # vLLM counts scheduled windows: all of them, if their drafts are all counted.
        if not (
            windows == counted.num_drafts
            and staged == counted.num_draft_tokens == scheduled.num_drafts
            and accepted == counted.num_accepted_tokens == staged - rejected
            and rejected >= 0 == breaches <= restored
        ):
            return False
        report = self._report
        report["windows"] += windows
        report["tokens_staged"] += staged
        report["committed_tokens"] += accepted
        report["rejected_tokens"] += rejected
        report["restored_bytes"] += restored
        self.pending = True
        return True

    def add_step(self, record: WorkerRecord, scheduled: ScheduledWindows) -> None:
        """Adds one processed output: what the worker sent with it, and its windows."""
        self._add_events(record)
        report = self._report
        report["restored_bytes"] += record.restored_bytes
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
        report["windows"] += record.windows
        report["tokens_staged"] += staged
        report["committed_tokens"] += committed
        report["dropped_drafts"] += dropped
        report["rejected_tokens"] += staged - committed - dropped

    def _add_events(self, record: WorkerRecord) -> None:
        """What most records do not have."""
        total = self._report["fallbacks"]
        for reason, num in record.fallbacks.items():
            total[reason] = total.get(reason, 0) + num
            self.pending = True
        if record.info:
            info = [dict(row) for row in record.info]
            if info != self._known_info:
                self._known_info = self._report["info"] = info
                self.pending = True
        if record.breaches:
            self._report["breaches"] += record.breaches - 1
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


def _empty_report() -> dict[str, Any]:
    return {**_NO_COUNTS, "fallbacks": {}}


_NO_COUNTS = dict.fromkeys(COUNTERS, 0)


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
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = counter_cls(
                name=f"vllm:nwor_{name}", documentation=text, labelnames=labels
            )
            self._counters[name] = {
                engine: counter.labels(*values)
                for engine, values in label_values.items()
            }
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

    def has_info(self, engine: int) -> bool:
        return engine in self._info

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds the increments of `NworStats.take_report` for engine index `engine`."""
        for name, counters in self._counters.items():
            if num := report[name]:
                counters[engine].inc(num)
        for reason, num in report["fallbacks"].items():
            self._fallbacks.labels(*self._label_values[engine], reason).inc(num)

    def set_info(self, rows: Sequence[Mapping[str, Any]], engine: int) -> None:
        """One series at 1 for each row (INFO_LABELS); rows shown before go to 0."""
        for value, shown in ((0, self._info.get(engine, ())), (1, rows)):
            for row in shown:
                values = [str(row[label]) for label in INFO_LABELS]
                self._info_gauge.labels(*self._label_values[engine], *values).set(value)
        self._info[engine] = rows
