# SPDX-License-Identifier: Apache-2.0
"""What the worker's windows did, tied to what the scheduler counted.

The worker counts verification windows on the device; the scheduler counts drafts and
accepted tokens by itself. The two meet one ModelRunnerOutput at a time: what the worker
counted belongs to the step whose output carried it, so every identity is exact for each
step, also when outputs arrive late.

A *dropped* window is one that the worker ran and the scheduler never counted: its
request finished or was aborted in flight, failed to load its KV, or its output was
stale. They are not guessed: all that were scheduled, less those that vLLM counted.

What holds for the totals, always (a breach only moves tokens between the parts):

    tokens_staged == committed_tokens + rejected_tokens + dropped_drafts

and, as long as no breach is counted and no step ran as vanilla vLLM:

    committed_tokens == vllm:spec_decode_num_accepted_tokens
    rejected_tokens  == drafts counted (grammar-invalid ones too) - accepted

This module imports neither vLLM nor torch; `hooks.stats` brings it the numbers.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

logger = logging.getLogger("vllm.v1.nwor")

# The counters of a report, in its order, and the help text of the Prometheus counter
# of each.
COUNTERS = {
    "windows": "Verification windows that NWOR protected.",
    "tokens_staged": "Draft tokens in those windows.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected and undone.",
    "dropped_drafts": "Draft tokens of windows that the scheduler never counted.",
    "restored_bytes": "KV-cache bytes put back at rejected slots (of one worker).",
    "shadow_copied_bytes": "KV-cache bytes copied to shadow blocks (of one worker).",
    "committed_bytes": "KV-cache bytes copied from shadow blocks (of one worker).",
    "breaches": "Identities between worker and scheduler that did not hold.",
}
# The reasons of fallbacks, which the manager counts (draft_manager.py).
STALE_LOG = "stale_log"
OVER_CAPACITY = "over_capacity"
BEGIN_FAILED = "begin_failed"
COMMIT_FAILED = "commit_failed"
BEGIN_MISSED = "begin_missed"
STAGE_FAILED = "stage_failed"
NO_SEAT = "no_seat"
STEP_FAILED = "step_failed"
FALLBACKS = (
    *(STALE_LOG, OVER_CAPACITY, BEGIN_FAILED, COMMIT_FAILED),
    *(BEGIN_MISSED, STAGE_FAILED, NO_SEAT, STEP_FAILED),
)
FALLBACKS_HELP = "Steps that did not run as nwor_info says, by reason."
INFO_HELP = "1 for each KV-cache group: the mode asked for and the one in use."
_NOTHING = [0] * len(COUNTERS)
ENGINE_LABELS = ("model_name", "engine")
# Reports of an engine that wait for somebody to collect, at most.
MAX_WAITING = 1000

Count = Annotated[int, msgspec.Meta(ge=0)]
# What the scheduler knows of a step: drafts scheduled for each request; the runner's
# output; how many ids each of its rows has, before vLLM cuts those of a request that
# stops. An empty row (vLLM clears discarded requests' rows) or none says nothing.
Scheduled = tuple[Mapping[str, Sequence[int]], Any, Sequence[int]]


class GroupInfo(NamedTuple):
    """How one KV-cache group is run: a row of the gauge vllm:nwor_info.

    group: KV-cache group id. requested, resolved: modes; resolved may be "native",
    where vLLM itself makes the group transactional. reason: why they differ, or which
    layout the group has.
    """

    group: int
    requested: str
    resolved: str
    reason: str


class StepRecord(NamedTuple):
    """What one ModelRunnerOutput brings from the worker.

    counts: by how much the step raised each of ops.COUNTER_COLUMNS; missed begins are
    among the invalid slots. fallbacks: new ones, by reason. info: of all groups, unless
    somebody has read it before. audit: steps, unverified slots, findings by class.
    """

    counts: tuple[Count, Count, Count, Count, Count, Count, Count, Count]
    fallbacks: dict[str, Count] = {}
    info: list[GroupInfo] = []
    audit: dict[str, Count] = {}


class Counted:
    """Sums over the windows that vLLM counts, named as in its SpecDecodingStats, but
    with grammar-invalid drafts: call it in place of make_spec_decoding_stats."""

    num_drafts = num_draft_tokens = num_accepted_tokens = 0

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(
        self,
        stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        *a: Any,
        **k: Any,
    ) -> Any:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        return self._make(stats, num_draft_tokens, num_accepted_tokens, *a, **k)


NOTHING_COUNTED = Counted(None)


class NworStats:
    """One scheduler's counts.

    report: the increments not yet sent to the front end, as plain data: "counts" in the
        order of COUNTERS and, if there are any, the other fields of a StepRecord.
    """

    def __init__(
        self,
        num_sampled: int = 1,
        trims_drafts: bool = False,
        has_front_end: bool = True,
    ) -> None:
        """num_sampled: ids of an output's row that are not drafts (1, the bonus token).
        trims_drafts: the worker may run fewer drafts than were scheduled (ngram_gpu,
            adaptive verification); vLLM counts those as drafted and rejected, not we.
        has_front_end: there is one that takes reports."""
        self.report: dict[str, Any] = {}
        self.has_front_end = has_front_end
        self._num_sampled = num_sampled
        self._trims_drafts = trims_drafts

    def breach(self, kind: str, found: str, num: int = 1) -> None:
        """Counts it `num` times, and logs the first one of its kind."""
        self.report["counts"] = self._sum([*_NOTHING[1:], num])
        log_once(f"breach of the {kind} identity", found)

    def add_step(self, payload: Any, counted: Any, scheduled: Scheduled) -> None:
        """Adds one processed output. Raises ValueError if the payload is not allowed.

        payload: what the worker sent with it: a StepRecord as a tuple, which may end
            before the fields with defaults, or what gives that from `read`.
        counted: Counted, or SpecDecodingStats of a step without grammar-invalid drafts.
        """
        read = getattr(payload, "read", None)
        if read is not None:
            payload = read()
        try:
            # vLLM counts scheduled windows, each once: as many are the same ones, and
            # their drafts those that were scheduled. So it is in nearly every step.
            (found,) = payload
            windows, staged, accepted, rejected, restored, invalid, copied, kept = found
            agree = (
                windows == counted.num_drafts == len(scheduled[0])
                and staged == counted.num_draft_tokens
                and accepted == counted.num_accepted_tokens == staged - rejected
                and rejected >= 0 == invalid <= restored
            )
        except (TypeError, ValueError):
            agree = False  # it is not counts alone
        if agree:
            parts = accepted, rejected, 0
        else:
            try:
                record = msgspec.convert(payload, StepRecord)
            except msgspec.ValidationError as error:
                raise ValueError(f"payload is {payload!r}: {error}") from None
            windows, staged, _, _, restored, invalid, copied, kept = record.counts
            for name in ("fallbacks", "audit"):
                if risen := getattr(record, name):
                    sums = Counter(self.report.get(name)) + Counter(risen)
                    self.report[name] = dict(sums)
            if record.info:
                self.report["info"] = record.info
            if invalid:
                self.breach("worker", f"the worker reported {invalid}", invalid)
            committed, dropped = self._compare(record.counts, counted, scheduled)
            parts = committed, staged - committed - dropped, dropped
        counts = [windows, staged, *parts, restored, copied, kept, 0]
        if self.report:
            counts = self._sum(counts)
        self.report["counts"] = counts

    def _sum(self, counts: list[int]) -> list[int]:
        return list(map(operator.add, self.report.get("counts", _NOTHING), counts))

    def _compare(
        self, counts: Sequence[int], counted: Any, scheduled: Scheduled
    ) -> tuple[int, int]:
        """Committed and dropped drafts. Each identity that does not hold is a breach.

        The parts add up whatever was found: these two are clipped, and rejected is the
        rest. Drafts that the worker left out (trims_drafts) are taken from the rejected
        ones, then from the dropped ones; drafts it ran beyond what was scheduled (a
        breach) are dropped ones.
        """
        windows, staged, accepted, rejected, *_ = counts
        drafts, output, num_ids = scheduled
        num_drafts = sum(map(len, drafts.values()))
        committed = min(counted.num_accepted_tokens, staged)
        uncounted = max(num_drafts, staged) - counted.num_draft_tokens
        dropped = min(max(uncounted, 0), staged - committed)
        if windows == staged == 0:
            return committed, dropped
        if accepted + rejected != staged:
            split = f"{accepted} accepted + {rejected} rejected drafts are not {staged}"
            self.breach("split", f"{split} staged")
        for what, run, expected in (
            ("windows", windows, sum(map(bool, drafts.values()))),
            ("drafts", staged, num_drafts),
        ):
            if run > expected or (run < expected and not self._trims_drafts):
                self.breach(what, f"{run} {what} run, {expected} scheduled")
        # Fewest and most drafts accepted in all windows, as far as the output tells.
        least = most = counted.num_accepted_tokens
        if counted.num_draft_tokens != num_drafts or accepted != least:
            least = most = 0
            for request_id, tokens in drafts.items():
                row = output.req_id_to_index.get(request_id)
                ids = num_ids[row] if row is not None and num_ids else 0
                from_ids = max(ids - self._num_sampled, 0) if tokens else 0
                least += from_ids
                most += from_ids if ids else len(tokens)
        if not least <= accepted <= most:
            found = (
                f"{accepted} drafts accepted on the device, {least} to {most} by its"
            )
            of_vllm = f"{counted.num_accepted_tokens} in windows counted"
            self.breach("accepted", f"{found} output, {of_vllm}")
        return committed, dropped


_logged: set[str] = set()


def log_once(what: str, found: str, level: int = logging.ERROR) -> None:
    """Logs the first of this kind in this process, with the exception that is being
    handled, if any."""
    if what not in _logged:
        _logged.add(what)
        handling = sys.exc_info()[0] is not None
        logger.log(level, "NWOR %s: %s (logged once)", what, found, exc_info=handling)


# Engine index -> rows of vllm:nwor_info that came last. An engine sends them once, but
# loggers are created anew while it runs (elastic expert parallelism).
_info: dict[int, Sequence[Sequence[Any]]] = {}


def create(cls: Any, name: str, text: str, *labels: str, **more: str) -> Any:
    """A metric with vLLM's labels and these. cls: prometheus_client's, or Ray's
    stand-in. One of the same name must have been unregistered before (vLLM does)."""
    names = [*ENGINE_LABELS, *labels]
    return cls(name=f"vllm:nwor_{name}", documentation=text, labelnames=names, **more)


class NworPrometheus:
    """Our counters of one stat logger. label_values: engine index -> values of
    ENGINE_LABELS.

    All series of counters are there from the start, with 0, so that an alert on a rise
    sees the first one, also where several API servers write to files."""

    def __init__(
        self,
        counter_cls: Any,
        gauge_cls: Any,
        label_values: Mapping[int, Sequence[Any]],
    ) -> None:
        counters = [create(counter_cls, *counter) for counter in COUNTERS.items()]
        self._fallbacks = create(counter_cls, "fallbacks", FALLBACKS_HELP, "reason")
        mode = {"multiprocess_mode": "mostrecent"}
        self._gauge = create(gauge_cls, "info", INFO_HELP, *GroupInfo._fields, **mode)
        self._label_values = label_values
        self._shown: dict[int, Sequence[Sequence[Any]]] = {}
        self._increase = {
            engine: [counter.labels(*values).inc for counter in counters]
            for engine, values in label_values.items()
        }
        for values in label_values.values():
            for reason in FALLBACKS:
                self._fallbacks.labels(*values, reason)
        self._waiting = {engine: deque[Sequence[int]]() for engine in label_values}
        # Another process collects from a file, or Ray from a push: nobody asks here.
        several = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        nobody_asks = several or not hasattr(counters[0], "collect")
        self._max_waiting = 0 if nobody_asks else MAX_WAITING
        for counter in () if nobody_asks else counters:
            counter.collect = partial(self._collect, counter.collect)

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds the increments of `NworStats.report` for engine index `engine`. Counts
        wait until somebody collects: so many counters take longer than a step's hooks
        together."""
        waiting = self._waiting[engine]
        waiting.append(report["counts"])
        if len(waiting) > self._max_waiting:
            self._flush(engine)
        if len(report) == 1 and engine in self._shown:
            return
        values = self._label_values[engine]
        for reason, num in report.get("fallbacks", {}).items():
            self._fallbacks.labels(*values, reason).inc(num)
        if "info" in report:
            _info[engine] = report["info"]
        if engine in _info:  # what was shown before goes to 0
            for value, rows in ((0, self._shown.get(engine, ())), (1, _info[engine])):
                for row in rows:
                    self._gauge.labels(*values, *map(str, row)).set(value)
            self._shown[engine] = _info[engine]

    def _flush(self, engine: int) -> None:
        """Bumps the counters by all that waits. Several threads may: each report is
        taken by one of them."""
        counts = _NOTHING
        try:
            while True:
                taken = self._waiting[engine].popleft()
                counts = list(map(operator.add, counts, taken))
        except IndexError:
            for increase, num in zip(self._increase[engine], counts, strict=True):
                if num:
                    increase(num)

    def _collect(self, collect: Callable[[], Any]) -> Any:
        for engine in self._waiting:
            self._flush(engine)
        return collect()
