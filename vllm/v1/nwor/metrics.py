# SPDX-License-Identifier: Apache-2.0
"""NWOR's counters, compared with the scheduler's.

The worker counts verification windows on the device; the scheduler has its own counts
of drafts and accepted tokens. They are compared for each ModelRunnerOutput: an output
carries the worker's counts of its own step. So every identity is exact for each step,
also when outputs arrive late.

A *dropped* window is one that the worker ran and the scheduler never counted: its
request finished or was aborted in flight, failed to load its KV, or its output was
stale. Their number is exact: all scheduled windows minus those that vLLM counted.

This always holds for the totals (a breach only moves tokens between the parts):

    tokens_staged == committed_tokens + rejected_tokens + dropped_drafts

and, as long as no breach is counted and no step ran as plain vLLM:

    committed_tokens == vllm:spec_decode_num_accepted_tokens
    rejected_tokens  == drafts counted (grammar-invalid ones too) - accepted

`hooks.scheduler` and `hooks.front_end` deliver the numbers.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .base.errors import log_once
from .base.payload import BEGIN_MISSED

# The Prometheus counters and their help texts.
COUNTERS = {
    "windows": "Verification windows that NWOR protected, by mode.",
    "tokens_staged": "Draft tokens in those windows.",
    "committed_tokens": "Draft tokens accepted and kept.",
    "rejected_tokens": "Draft tokens rejected and undone.",
    "dropped_drafts": "Draft tokens of windows that the scheduler never counted.",
    "restored_bytes": "KV-cache bytes put back at rejected slots (of one worker).",
    "shadow_copied_bytes": "KV-cache bytes copied to shadow blocks (of one worker).",
    "committed_bytes": "KV-cache bytes copied from shadow blocks (of one worker).",
    "breaches": "Identities between worker and scheduler that did not hold.",
}
# Where a window's drafts were verified: in shadow blocks, or logged in their own.
WINDOW_MODES = ("stage", "cow")
# The counts of a report, in order: a counter, and the value of its label `mode`.
SERIES = (
    *(("windows", mode) for mode in WINDOW_MODES),
    *((name,) for name in COUNTERS if name != "windows"),
)
# The reasons of fallbacks, which the manager counts (draft_manager.py).
FALLBACKS = (
    STALE_LOG := "stale_log",
    OVER_CAPACITY := "over_capacity",
    BEGIN_FAILED := "begin_failed",
    COMMIT_FAILED := "commit_failed",
    BEGIN_MISSED,
    STAGE_FAILED := "stage_failed",
    STEP_FAILED := "step_failed",
)
# Optional report fields: new fallbacks by reason; a GroupInfo for each group, once; the
# audit's steps, unverified slots, findings by class and changes of adapters.
NEWS = ("fallbacks", "info", "audit")
# Found on the host: told from wrong_prefix, and by digests of loaded blocks.
ON_HOST = (
    STALE := "stale_weights",
    OTHER_TEXT := "other_text",
    NOT_AS_SENT := "not_as_sent",
)
# The KV audit's classes of findings, in the order of FindingClass in
# csrc/nwor/audit/audit.h, then ON_HOST, and their meaning.
FINDINGS = {
    "foreign_write": "a write was planned to a block that is not the request's",
    "wrong_prefix": "a block in a request's table does not hold the request's text",
    "changed": "bytes are no longer those that were committed",
    "missing_write": "a slot counts as committed, and was not written",
    "handed_on": "a slot that was not committed went to a KV connector, or what came "
    "back is not what was stored",
    "never_loaded": "a load was reported done and changed nothing",
    "stale_state": "a request reads its own recurrent state of another position",
    "foreign_state": "a request reads another one's recurrent state",
    "changed_state": "a recurrent state is not what was left for the request",
    "state_not_written": "a recurrent state was not written",
    "no_state_yet": "a request reads a recurrent state before it has one",
    "state_lost": "a request goes on without its recurrent state",
    "state_ahead": "a recurrent state includes drafts that were rejected",
    "ring_overwritten": "a row of a ring is read that is not the accepted token's",
    STALE: "a block in a request's table was computed by other weights",
    OTHER_TEXT: "a load brought the block of other tokens",
    NOT_AS_SENT: "a load brought other bytes than the prefill instance computed",
}
# Of the digests that came with requests from a prefill instance, by result; in a
# payload behind HANDOVER.
HANDOVER = "handover_"
HANDOVERS = (
    *("verified", "wrong", "partial"),
    *("missing", "malformed", "signature", "request", "format"),
)
HANDOVERS_HELP = "Requests with the digests of a prefill instance, by what was compared"
# In addition to findings; names as in a payload, prefixed with vllm:nwor_audit_.
AUDIT_COUNTERS = {
    "steps": "Steps that the KV audit has looked at; reported once a second.",
    "unverified": "Slots that a request took over and that cannot be audited.",
    "verified": "Slots that a KV connector has loaded, with the bytes of their text.",
    "failed": "Slots whose load a KV connector has reported as failed.",
}
# What changed weights: a method of vLLM, an RPC of another name, or a write that
# nothing announced. Of several, which may be called by one another, the first one here
# is named.
WEIGHT_ROUTES = (
    "update_weights",
    "reload_weights",
    "reset_weights",
    "load_weights",
    "start_weight_update",
    "finish_weight_update",
    WAKE_UP := "wake_up",
    OTHER_RPC := "rpc",
    UNANNOUNCED := "unannounced",
)
# A LoRA adapter was loaded with another content; comes with the audit's counts.
ADAPTER_ROUTE = "lora"
WEIGHT_CHANGES = "weight_changes"
WEIGHT_CHANGES_HELP = "Changes of the target model's weights, by the call that did it."
# The report's increments of these, by name.
VERSIONS = "versions"
VERSION_COUNTERS = {
    (
        STALE_TOKENS := "stale_tokens"
    ): "Prompt tokens whose KV was found in the cache and is of other weights.",
    (
        MIXED_REQUESTS := "mixed_requests"
    ): "Requests that ended and whose KV is of more than one version of the weights.",
}
FALLBACKS_HELP = "Steps that did not run as nwor_info says, by reason."
INFO_HELP = "1 for each KV-cache group: the mode asked for and the one in use."
ENGINE_LABELS = ("model_name", "engine")
# Reports of an engine that wait for a collection, at most.
MAX_WAITING = 1000
_NOTHING = [0] * len(SERIES)

# The scheduler's view of a step: drafts scheduled for each request; the runner's
# output; how many ids each of its rows has, before vLLM truncates the row of a request
# that stops. An empty row (vLLM clears discarded requests' rows) or a missing one gives
# no information.
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


class Counted:
    """Sums over the windows that vLLM counts, named as in its SpecDecodingStats, but
    with grammar-invalid drafts. Replaces make_spec_decoding_stats, `make`, and calls
    it."""

    num_drafts = num_draft_tokens = num_accepted_tokens = 0

    def __init__(self, make: Any = None) -> None:
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


class NworStats:
    """One scheduler's counts.

    report: the increments not yet sent to the front end, as plain data: "counts" in the
        order of SERIES and, by name, the optional fields of a payload (NEWS),
        WEIGHT_CHANGES by route, and VERSIONS.
    """

    def __init__(self, num_sampled: int = 1, trims_drafts: bool = False) -> None:
        """num_sampled: ids of an output's row that are not drafts (1, the bonus token).
        trims_drafts: the worker may run fewer drafts than were scheduled (ngram_gpu,
            adaptive verification). vLLM counts those as drafted and rejected; NWOR does
            not count them.
        """
        self.report: dict[str, Any] = {}
        self._num_sampled = num_sampled
        self._trims_drafts = trims_drafts

    def breach(self, kind: str, found: str, num: int = 1) -> None:
        """Counts it `num` times, and logs the first one of its kind."""
        self._add([*_NOTHING[1:], num])
        log_once(f"breach of the {kind} identity", found)

    def count(self, field: str, counts: Mapping[str, int]) -> None:
        """Adds to WEIGHT_CHANGES or VERSIONS of the report."""
        if any(counts.values()):
            self._add([*_NOTHING])
            self._count(field, counts)

    def _count(self, field: str, counts: Mapping[str, int]) -> None:
        self.report[field] = dict(Counter(self.report.get(field)) + Counter(counts))

    def add_step(self, payload: Any, counted: Any, scheduled: Scheduled) -> None:
        """Adds one processed output. Raises TypeError or ValueError if the payload is
        malformed.

        payload: the worker's, or an object with `read` that returns it: the step's
            increments of ops.COUNTER_COLUMNS (missed begins are among the invalid
            slots), then up to all of NEWS.
        counted: Counted, or SpecDecodingStats of a step without grammar-invalid drafts.
        """
        if read := getattr(payload, "read", None):
            payload = read()
        counts, *news = payload
        windows, staged, accepted, rejected, in_shadow, *others = counts
        restored, invalid, copied, kept = others
        # Fast path, taken in nearly every step. vLLM counts each scheduled window once:
        # if the numbers agree, all scheduled windows were counted, with all drafts.
        if (
            windows == counted.num_drafts == len(scheduled[0])
            and staged == counted.num_draft_tokens
            and accepted == counted.num_accepted_tokens == staged - rejected
            and rejected >= 0 == invalid <= restored
            and 0 <= in_shadow <= windows
        ):
            parts = accepted, rejected, 0
        elif min(counts) < 0:
            raise ValueError(f"payload is {payload!r}")
        else:
            if invalid:
                self.breach("worker", f"the worker reported {invalid}", invalid)
            parts = self._compare(counts, counted, scheduled)
            in_shadow = min(in_shadow, windows)
        of_modes = in_shadow, windows - in_shadow
        self._add([*of_modes, staged, *parts, restored, copied, kept, 0])
        if not news:
            return
        for name, new in zip(NEWS, news, strict=False):
            if new and name == "info":
                self.report[name] = new
            elif new:
                self._count(name, new)

    def _add(self, counts: list[int]) -> None:
        if self.report:
            counts = list(map(operator.add, self.report["counts"], counts))
        self.report["counts"] = counts

    def _compare(
        self, counts: Sequence[int], counted: Any, scheduled: Scheduled
    ) -> tuple[int, int, int]:
        """Committed, rejected and dropped drafts. Each identity that does not hold is a
        breach.

        The parts add up to the staged drafts even then. Drafts that the worker left out
        (trims_drafts) are taken from the rejected ones, then from the dropped ones.
        Drafts that it ran without being scheduled (a breach) count as dropped.
        """
        windows, staged, accepted, rejected, in_shadow, *_ = counts
        drafts, output, num_ids = scheduled
        num_drafts = sum(map(len, drafts.values()))
        committed = min(counted.num_accepted_tokens, staged)
        uncounted = max(num_drafts, staged) - counted.num_draft_tokens
        dropped = min(max(uncounted, 0), staged - committed)
        parts = committed, staged - committed - dropped, dropped
        if windows == staged == 0:
            return parts  # the step ran as plain vLLM
        # Bounds, from the output, on the drafts accepted in all windows.
        fewest = most = 0
        for request_id, tokens in drafts.items():
            row = output.req_id_to_index.get(request_id)
            ids = num_ids[row] if num_ids and row is not None else 0
            from_ids = max(ids - self._num_sampled, 0)
            fewest += from_ids
            most += from_ids if ids else len(tokens)
        num_windows, all_run = sum(map(bool, drafts.values())), not self._trims_drafts
        for kind, found, low, high in (
            ("split", accepted + rejected, staged, staged),
            ("modes", in_shadow, 0, windows),
            ("windows", windows, num_windows * all_run, num_windows),
            ("drafts", staged, num_drafts * all_run, num_drafts),
            ("accepted", accepted, fewest, most),
        ):
            if not low <= found <= high:
                text = f"{found} by the worker's counts, {tuple(counts)}; expected"
                of_vllm = f"vLLM counted {counted.num_accepted_tokens} accepted"
                self.breach(kind, f"{text} {low} to {high}, and {of_vllm}")
        return parts


# Engine index -> rows of vllm:nwor_info that came last. An engine sends them when it is
# ready, before loggers are created, and with its first step. Loggers are created anew
# while it runs (elastic expert parallelism).
_info: dict[int, Sequence[Sequence[Any]]] = {}


def keep_info(engine: int, rows: Sequence[Sequence[Any]]) -> None:
    """Keeps the rows of an engine that has started, for loggers that are created."""
    _info[engine] = rows


def known_info() -> dict[str, Sequence[Sequence[Any]]]:
    """The rows that this process has of each engine, by index as text."""
    return {str(engine): rows for engine, rows in _info.items()}


def create(cls: Any, name: str, text: str, *labels: str, **more: str) -> Any:
    """A metric with vLLM's labels and these. cls: prometheus_client's, or Ray's
    replacement. A metric of the same name must be unregistered first (vLLM does)."""
    names = [*ENGINE_LABELS, *labels]
    return cls(name=f"vllm:nwor_{name}", documentation=text, labelnames=names, **more)


class NworPrometheus:
    """Our counters of one stat logger. label_values: engine index -> values of
    ENGINE_LABELS.

    All series of counters exist from the start, with value 0, so that an alert on an
    increase sees the first one, also where several API servers write to files."""

    def __init__(
        self,
        counter_cls: Any,
        gauge_cls: Any,
        label_values: Mapping[int, Sequence[Any]],
    ) -> None:
        counters = {
            name: create(counter_cls, name, text, *["mode"] * (name == "windows"))
            for name, text in COUNTERS.items()
        }
        fallbacks = create(counter_cls, "fallbacks", FALLBACKS_HELP, "reason")
        mode = {"multiprocess_mode": "mostrecent"}
        self._gauge = create(gauge_cls, "info", INFO_HELP, *GroupInfo._fields, **mode)
        self._label_values = label_values
        self._counters, self._fallbacks = {}, {}
        for engine, values in label_values.items():
            self._counters[engine] = [
                counters[name].labels(*values, *mode) for name, *mode in SERIES
            ]
            of_reason = (fallbacks.labels(*values, reason) for reason in FALLBACKS)
            self._fallbacks[engine] = dict(zip(FALLBACKS, of_reason, strict=True))
        self._waiting = {engine: deque[Sequence[int]]() for engine in label_values}
        self._shown: dict[int, Sequence[Sequence[Any]]] = {}
        self._flushing = threading.Lock()
        # If not: another process collects from files, or Ray gets pushes.
        is_collected = hasattr(counters["windows"], "collect")
        is_collected &= "PROMETHEUS_MULTIPROC_DIR" not in os.environ
        self._max_waiting = MAX_WAITING * is_collected
        for counter in counters.values() if is_collected else ():
            counter.collect = partial(self._collect, counter.collect)
        for engine in label_values:
            if engine in _info:
                self._show(engine, _info[engine])

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        """Adds the increments of `NworStats.report` for engine index `engine`. Counts
        are added to Prometheus only when it collects: updating all counters takes
        longer than all other hooks of a step."""
        waiting = self._waiting[engine]
        waiting.append(report["counts"])
        if len(waiting) > self._max_waiting:
            self._flush(engine)
        if len(report) == 1 and engine in self._shown:
            return
        for reason, num in report.get("fallbacks", {}).items():
            if reason in self._fallbacks[engine]:  # another version may have others
                self._fallbacks[engine][reason].inc(num)
        _info[engine] = report.get("info") or _info.get(engine, ())
        self._show(engine, _info[engine])

    def _show(self, engine: int, rows: Sequence[Sequence[Any]]) -> None:
        """Sets the rows of vllm:nwor_info to 1, and the rows shown before to 0."""
        for value, shown in ((0, self._shown.get(engine, ())), (1, rows)):
            for row in shown:
                labels = *self._label_values[engine], *map(str, row)
                self._gauge.labels(*labels).set(value)
        self._shown[engine] = rows

    def _flush(self, engine: int) -> None:
        waiting = self._waiting[engine]
        with self._flushing:
            taken = [waiting.popleft() for _ in range(len(waiting))]
        columns = zip(*taken, strict=True)
        for counter, column in zip(self._counters[engine], columns, strict=False):
            if num := sum(column):
                counter.inc(num)

    def _collect(self, collect: Callable[[], Any]) -> Any:
        for engine in self._waiting:
            self._flush(engine)
        return collect()


class AuditPrometheus:
    """The audit's counters of one stat logger, as NworPrometheus. Every class exists
    from the start, with value 0, so that an alert on an increase sees the first
    finding."""

    def __init__(
        self, counter_cls: Callable[..., Any], label_values: Mapping[int, Any]
    ) -> None:
        text = "What the KV audit found, by class."
        findings = create(counter_cls, "audit_findings", text, "class")
        others = {
            name: create(counter_cls, f"audit_{name}", text)
            for name, text in AUDIT_COUNTERS.items()
        }
        changes = create(counter_cls, WEIGHT_CHANGES, WEIGHT_CHANGES_HELP, "route")
        handovers = create(counter_cls, "audit_handovers", HANDOVERS_HELP, "result")
        for name, text in VERSION_COUNTERS.items():
            others[name] = create(counter_cls, name, text)
        # Engine index -> counters by their names in a report.
        self._counters = {
            engine: {name: found.labels(*values) for name, found in others.items()}
            | {kind: findings.labels(*values, kind) for kind in FINDINGS}
            | {f"{HANDOVER}{r}": handovers.labels(*values, r) for r in HANDOVERS}
            | {r: changes.labels(*values, r) for r in (*WEIGHT_ROUTES, ADAPTER_ROUTE)}
            for engine, values in label_values.items()
        }

    def add(self, report: Mapping[str, Any], engine: int) -> None:
        for field in ("audit", WEIGHT_CHANGES, VERSIONS):
            for name, count in report.get(field, {}).items():
                self._counters[engine][name].inc(count)
