# SPDX-License-Identifier: Apache-2.0
"""Counters without an engine: attaching, identities, the report's way to Prometheus.

The scheduler and the stat loggers are small stand-ins with vLLM's signatures; outputs
and Prometheus objects are the real ones. That vLLM itself behaves like the stand-ins is
the subject of tests/integration/test_stats_inprocess.py.
"""

import array
import logging
import pickle
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, call

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.engine import core, utils
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

import vllm_nwor.metrics as metrics
from vllm_nwor.audit.findings import CLASSES
from vllm_nwor.audit.stats import COUNTERS as AUDIT_COUNTERS
from vllm_nwor.hooks import stats
from vllm_nwor.hooks._wrap import HostMismatch
from vllm_nwor.metrics import (
    COUNTERS,
    FALLBACKS,
    Counted,
    GroupInfo,
    NworPrometheus,
    NworStats,
)
from vllm_nwor.report import StepPayload

BONUS = 7
COUNTED = ("counted", "stops")
ZEROS = (0,) * 8
INFO = [GroupInfo(0, "stage", "cow", "no path")]
OTHER_INFO = [INFO[0]._replace(resolved="off")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in ("STRICT", "EMIT_METRICS", "AUDIT"):
        monkeypatch.delenv(f"VLLM_NWOR_{name}", raising=False)
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setattr(metrics, "_logged", set())
    monkeypatch.setattr(metrics, "_info", {})
    # What is hooked here stands in for vLLM's.
    monkeypatch.setattr("vllm_nwor.hooks._wrap._hooks", [])


# --- attach ---------------------------------------------------------------------------


def plain_output():
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})


class LateOutput(AsyncModelRunnerOutput):
    """Has its output as those of the two runners have."""

    def __init__(self, output, name="model_runner_output"):
        setattr(self, name, output)
        self.name = name

    def get_output(self):
        return getattr(self, self.name)


@pytest.mark.parametrize("name", [None, "model_runner_output", "_model_runner_output"])
def test_an_output_carries_counts_that_are_read_when_it_is(name):
    memory = array.array("q", [0] * 8)
    before, after = memoryview(array.array("q", range(8))), memoryview(memory)
    output = plain_output()

    result = LateOutput(output, name) if name else output
    stats.attach(result, lambda: StepPayload((before, after)))
    memory[:] = array.array("q", range(10, 90, 10))

    risen = (10, 19, 28, 37, 46, 55, 64, 73)
    assert output.nwor_stats.read() == (risen,)
    assert pickle.loads(pickle.dumps(output)).nwor_stats == (risen,)


EMPTY = EMPTY_MODEL_RUNNER_OUTPUT


@pytest.mark.parametrize("result", [EMPTY, LateOutput(EMPTY), None, 3])
def test_the_shared_empty_output_is_never_touched_and_nothing_is_lost(result):
    stats.attach(result, lambda: pytest.fail("the payload was read, and is lost"))

    assert not hasattr(EMPTY, "nwor_stats")


@pytest.mark.parametrize(
    ("take_payload", "is_logged"), [(lambda: None, False), (lambda: 1 // 0, True)]
)
def test_without_news_an_output_stays_as_it_was(take_payload, is_logged, caplog):
    """Also where they cannot be had: that loses no token."""
    output = plain_output()

    stats.attach(output, take_payload)

    assert output.__dict__ == plain_output().__dict__
    told = "no statistics on a runner's output: ModelRunnerOutput" in caplog.text
    assert told is is_logged


# --- a scheduler's steps --------------------------------------------------------------


def counts(windows, staged, accepted, *, rejected=None, restored=0, invalid=0):
    """Of a step, as the worker counts. Each column that nobody names has a number of
    its own, so that no two can be mixed up."""
    rejected = staged - accepted if rejected is None else rejected
    return windows, staged, accepted, rejected, restored, invalid, 96, 48


class Step:
    """One step: windows is request -> (drafts, accepted, fate).

    fate: "counted"; "gone": finished in flight, its ids are there but vLLM skips it;
    "cleared": vLLM emptied its row; "stops": counted, then vLLM cuts its ids.
    """

    def __init__(self, **windows):
        self.windows = windows

    @property
    def output(self):
        return ModelRunnerOutput(
            req_ids=list(self.windows),
            req_id_to_index={rid: row for row, rid in enumerate(self.windows)},
            sampled_token_ids=[
                [] if fate == "cleared" else [5] * accepted + [BONUS]
                for _, accepted, fate in self.windows.values()
            ],
        )

    @property
    def counts(self):
        """As the worker's launches count."""
        drafts = [window[0] for window in self.windows.values() if window[0]]
        accepted = sum(window[1] for window in self.windows.values())
        rejected = sum(drafts) - accepted
        return counts(len(drafts), sum(drafts), accepted, restored=64 * rejected)

    @property
    def counted(self):
        """Drafts and accepted drafts of the windows that vLLM counts."""
        counted = [w for w in self.windows.values() if w[2] in COUNTED]
        return sum(window[0] for window in counted), sum(w[1] for w in counted)


class Scheduler:
    """Counts and skips as vLLM's scheduler does, in the fewest lines."""

    num_sampled_tokens_per_step, num_spec_tokens = 1, 8
    make_spec_decoding_stats = VllmScheduler.make_spec_decoding_stats

    def __init__(self, method="ngram"):
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(method=method),
            parallel_config=SimpleNamespace(nwor_front_end=stats.COUNTS),
        )
        self.log_stats = self.unfinished = True
        self.connector_stats = None
        self.change_stats, self.form = (lambda found: None), dict

    def has_unfinished_requests(self):
        return self.unfinished

    def update_from_output(self, scheduler_output, model_runner_output):
        windows = scheduler_output.step.windows
        outputs = [name for name, window in windows.items() if window[2] != "gone"]
        spec_stats = None
        rows = model_runner_output.sampled_token_ids
        for ids, (name, (drafts, accepted, fate)) in zip(
            rows, windows.items(), strict=True
        ):
            if drafts and fate in COUNTED:
                spec_stats = self.make_spec_decoding_stats(
                    spec_stats,
                    num_draft_tokens=drafts,
                    num_accepted_tokens=accepted,
                    num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens,
                    request_id=name,
                )
            if fate == "stops":
                del ids[1:]
        found = SimpleNamespace(
            kv_connector_stats=self.connector_stats, spec_decoding_stats=spec_stats
        )
        self.change_stats(found)
        found = found if self.log_stats else None
        other = SimpleNamespace(outputs=[], scheduler_stats=None)
        carrier = SimpleNamespace(outputs=outputs, scheduler_stats=found)
        return self.form({3: other, 0: carrier})


def hooked(name, **classes):
    """A module of vLLM's with classes like these, and NWOR's hooks on them."""
    module = ModuleType(name)
    for attribute, cls in classes.items():
        setattr(module, attribute, type(attribute, (cls,), {}))
    stats.install(module)
    return module


def hooked_scheduler(**arguments):
    return hooked(stats.SCHEDULER, Scheduler=Scheduler).Scheduler(**arguments)


def run(scheduler, step, payload="truth", invalid=None):
    """Runs one step; returns the report that leaves with it, or None. invalid: drafts
    of a request that its grammar does not allow."""
    output = step.output
    if payload == "truth":
        payload = (step.counts,)
    if payload is not None:
        output.nwor_stats = payload
    scheduler_output = SimpleNamespace(
        step=step,
        num_invalid_spec_tokens=invalid,
        scheduled_spec_decode_tokens={
            rid: [5] * drafts for rid, (drafts, _, _) in step.windows.items() if drafts
        },
    )
    outputs = scheduler.update_from_output(scheduler_output, model_runner_output=output)
    found = dict(outputs)[0].scheduler_stats if outputs != [3, 0] else None
    if found is None or "nwor" not in (found.kv_connector_stats or ()):
        return None
    report = {"fallbacks": {}} | found.kv_connector_stats["nwor"]
    report |= dict(zip(COUNTERS, report.pop("counts"), strict=True))
    parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
    assert all(report[name] >= 0 for name in COUNTERS)
    assert report["tokens_staged"] == sum(report[part] for part in parts)
    return report


MIXED = Step(
    a=(4, 2, "counted"),
    b=(4, 3, "gone"),
    c=(3, 3, "stops"),
    d=(2, 1, "cleared"),
    e=(0, 0, "counted"),
)
IDLE = Step(e=(0, 0, "counted"))
SILENT = Step(b=(4, 3, "gone"))
ONE_GONE = Step(a=(4, 1, "counted"), b=(3, 2, "gone"))
BOTH_COUNTED = Step(a=(4, 1, "counted"), b=(3, 2, "counted"))
# Its acceptance is open.
ONE_CLEARED = Step(a=(4, 1, "counted"), b=(3, 0, "cleared"))


# --- the identities -------------------------------------------------------------------


BREACHES = [
    (counts(2, 7, 3), []),
    (counts(2, 7, 3, rejected=5), ["split"]),
    (counts(3, 7, 3), ["windows"]),
    (counts(1, 7, 3), ["windows"]),
    (counts(2, 8, 3), ["drafts"]),
    (counts(2, 6, 3), ["drafts"]),
    (counts(2, 7, 1), ["accepted"]),
    (counts(2, 7, 2), ["accepted"]),
    (counts(2, 7, 4), ["accepted"]),
    (counts(2, 4, 1), ["drafts", "accepted"]),  # window b was not run
    (counts(2, 7, 3, invalid=2), ["worker"]),
]


@pytest.mark.parametrize(
    ("step", "found", "kinds"),
    [
        *((step, *row) for step in (ONE_GONE, BOTH_COUNTED) for row in BREACHES),
        *((ONE_CLEARED, counts(2, 7, accepted), []) for accepted in (1, 4)),
        *((ONE_CLEARED, counts(2, 7, accepted), ["accepted"]) for accepted in (0, 5)),
    ],
)
def test_each_identity_that_fails_is_a_breach_by_name(step, found, kinds):
    report = run(hooked_scheduler(), step, (found,))

    assert metrics._logged == {f"breach of the {kind} identity" for kind in kinds}
    assert report["breaches"] == (2 if kinds == ["worker"] else len(kinds))
    # What is too much counts as dropped.
    drafts, accepted = step.counted
    assert report["rejected_tokens"] <= drafts - accepted


@pytest.mark.parametrize(
    ("method", "found", "num_breaches"),
    [
        ("ngram_gpu", counts(1, 5, 1), 0),
        ("ngram_gpu", counts(3, 9, 1), 2),  # windows and drafts
        ("ngram", counts(1, 5, 1), 2),
    ],
)
def test_drafts_trimmed_by_the_worker_are_no_breach_where_the_method_trims(
    method, found, num_breaches
):
    # 8 scheduled and counted by vLLM; of 5 that ran, all of window b went.
    step = Step(a=(4, 1, "counted"), b=(4, 0, "counted"))

    report = run(hooked_scheduler(method=method), step, (found,))

    assert report["breaches"] == num_breaches
    assert report["committed_tokens"] == 1
    assert report["dropped_drafts"] == (found[1] == 9)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"counters": ZEROS}, "`array`, got `object`"),  # an older version's
        (((0,) * 7,), "`array` of length 8, got 7 - at `$[0]`"),
        (((1, 4, 2, 2, -64, 0, 0, 0),), "`int` >= 0 - at `$[0][4]`"),
        ((ZEROS, 3), "`object`, got `int` - at `$[1]`"),
        ((ZEROS, {"over_capacity": -1}), "`int` >= 0 - at `$[1][...]`"),
        ((ZEROS, {}, [{"group": 0}]), "`array`, got `object` - at `$[2][0]`"),
        ((ZEROS, {}, [], {"steps": -1}), "`int` >= 0 - at `$[3][...]`"),
    ],
)
def test_a_payload_of_another_version_is_named(payload, expected):
    with pytest.raises(ValueError, match="payload is ") as raised:
        NworStats().add_step(payload, Counted, ({}, None, []))

    assert str(raised.value) == f"payload is {payload!r}: Expected {expected}"


# --- the scheduler's hooks ------------------------------------------------------------


NO_SUMS = {"change_stats": lambda found: vars(found).pop("spec_decoding_stats")}


@pytest.mark.parametrize(
    ("broken", "step", "payload", "kind", "windows", "parts"),
    [
        (NO_SUMS, MIXED, "truth", "sums", 8, (5, 2, 19)),
        ({"form": list}, MIXED, "truth", "sums", 8, (5, 2, 19)),
        ({"has_unfinished_requests": None}, SILENT, "truth", "report", 5, (5, 2, 10)),
        ({"connector_stats": ["a list"]}, MIXED, "truth", "report", 8, (10, 4, 12)),
        ({}, MIXED, ["counters"], "payload", 4, (5, 2, 6)),
    ],
)
def test_what_fails_here_is_a_breach_and_loses_no_output(
    broken, step, payload, kind, windows, parts, monkeypatch, caplog
):
    """Nor counts, but of a payload that is none: windows of which vLLM says nothing are
    dropped ones. They may leave with the next step only."""
    scheduler = hooked_scheduler()
    before = vars(scheduler).copy()
    vars(scheduler).update(broken)

    found = [run(scheduler, step, payload)]
    vars(scheduler).update(before)
    found.append(run(scheduler, MIXED))

    total: Counter[str] = Counter()
    for report in filter(None, found):
        total.update({name: report[name] for name in COUNTERS})
    names = ("committed_tokens", "rejected_tokens", "dropped_drafts")
    assert (total["breaches"], total["windows"]) == (1, windows)
    assert tuple(total[name] for name in names) == parts
    assert metrics._logged == {f"breach of the {kind} identity"}
    assert len([r for r in caplog.records if "breach" in r.message]) == 1

    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    vars(scheduler).update(broken)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        run(scheduler, step, payload)


@pytest.mark.parametrize(
    ("payload", "news", "twice"),
    [
        (
            (ZEROS, {"over_capacity": 2}),
            {"fallbacks": {"over_capacity": 2}},
            {"fallbacks": {"over_capacity": 4}},
        ),
        (
            (ZEROS, {}, [], {"steps": 9, "changed": 1}),
            {"audit": {"steps": 9, "changed": 1}},
            {"audit": {"steps": 18, "changed": 2}},
        ),
        ((ZEROS, {}, INFO), {"info": INFO}, {"info": INFO}),
        (((*ZEROS[:5], 1, 0, 0),), {"breaches": 1}, {"breaches": 2}),
    ],
)
def test_news_leave_with_the_step_that_has_them_and_once(payload, news, twice):
    """A step that ran as vanilla, whose windows are no breach, but for a slot. Or with
    the next one that has outputs, added up."""
    scheduler = hooked_scheduler()
    nothing = {**dict.fromkeys(COUNTERS, 0), "fallbacks": {}}

    assert run(scheduler, MIXED, payload) == nothing | news
    assert run(scheduler, IDLE, None) is None
    assert run(scheduler, SILENT, payload) is None
    assert run(scheduler, MIXED, payload) == nothing | twice


def test_the_connectors_own_statistics_are_kept_and_not_written_to():
    scheduler = hooked_scheduler()
    scheduler.connector_stats = own = {"num_saved": 3}
    sent = []
    scheduler.change_stats = sent.append

    assert run(scheduler, MIXED)["windows"] == 4
    assert own == {"num_saved": 3}
    assert {**sent[0].kv_connector_stats, "nwor": 0} == {"num_saved": 3, "nwor": 0}


def test_a_step_that_vllm_fails_to_process_leaves_nothing_behind():
    scheduler = hooked_scheduler()
    seen = []

    def fail(found):
        seen.append("make_spec_decoding_stats" in vars(scheduler))
        raise RuntimeError("vLLM's own")

    scheduler.change_stats = fail
    with pytest.raises(RuntimeError, match=r"^vLLM's own$"):
        run(scheduler, MIXED, invalid={"a": 1})

    assert seen == [True]
    assert "make_spec_decoding_stats" not in vars(scheduler)
    scheduler.change_stats = lambda found: None
    assert run(scheduler, MIXED)["committed_tokens"] == 5


# Drawing from a list takes a tenth of the time that strategies of strategies take.
ALL_WINDOWS = [
    (drafts, accepted, fate)
    for drafts in range(6)
    for accepted in range(drafts + 1)
    for fate in ("counted", "gone", "cleared", "stops")
]
WINDOWS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sampled_from(ALL_WINDOWS), max_size=6
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            WINDOWS,
            st.booleans(),  # statistics on
            st.booleans(),  # ran as vanilla
            st.booleans(),  # a grammar forbids drafts
        ),
        max_size=12,
    )
)
def test_whatever_is_aborted_the_totals_add_up(steps):
    """A window that is dropped is neither committed nor rejected."""
    scheduler = hooked_scheduler()
    expected, found = Counter(), Counter()
    for windows, log_stats, vanilla, forbids in [*steps, ({}, True, True, False)]:
        step = Step(**windows)
        scheduler.log_stats = log_stats
        scheduler.unfinished = bool(windows)
        invalid = {rid: n - ok for rid, (n, ok, _) in windows.items()}
        payload = None if vanilla else "truth"
        report = run(scheduler, step, payload, invalid if forbids else None)
        if not vanilla:
            drafts, accepted = step.counted
            num_windows, staged, _, _, restored, _, shadow_copied, kept = step.counts
            parts = accepted, drafts - accepted, staged - drafts
            rises = num_windows, staged, *parts, restored, shadow_copied, kept, 0
            expected.update(dict(zip(COUNTERS, rises, strict=True)))
        found.update({name: report[name] for name in COUNTERS if report})

    assert "make_spec_decoding_stats" not in vars(scheduler)
    assert found == expected


@settings(deadline=None)
@given(
    WINDOWS.filter(lambda windows: any(window[0] for window in windows.values())),
    st.integers(0, 7),
    st.integers(-2, 2),
)
def test_one_wrong_number_of_the_worker_never_passes(windows, column, error):
    """Nor is it added otherwise where counts are looked at in any case: in a payload
    with room for news."""
    step = Step(**windows, z=(0, 0, "counted"))
    wrong = list(step.counts)
    wrong[column] = max(wrong[column] + error, 0)  # zero less one is zero
    is_wrong = tuple(wrong) != step.counts and column in (0, 1, 2, 3, 5)

    reports = [
        run(hooked_scheduler(), step, payload)
        for payload in ((tuple(wrong),), (tuple(wrong), {}, []))
    ]

    assert reports[0] == reports[1]
    if any(wrong[:2]):  # nothing at all is a step run as vanilla
        assert (reports[0]["breaches"] > 0) == is_wrong


# --- the front end --------------------------------------------------------------------


def hooked_loggers():
    registry = prometheus_client.CollectorRegistry()

    class PrometheusStatLogger:
        _counter_cls = partial(prometheus_client.Counter, registry=registry)
        _gauge_cls = partial(prometheus_client.Gauge, registry=registry)

        def __init__(self, vllm_config, engine_indexes=None):
            for collector in list(registry._collector_to_names):
                registry.unregister(collector)
            labels = {engine: ["tiny", str(engine)] for engine in engine_indexes}
            self.per_engine_labelvalues = labels

    class StatLoggerManager:
        def __init__(self, engine_indexes=(0,)):
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
            logger = module.PrometheusStatLogger(self.vllm_config, engine_indexes)
            self.stat_loggers = [SimpleNamespace(), logger]
            self.recorded = []

        def record(
            self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None
        ):
            self.recorded.append(scheduler_stats and scheduler_stats.kv_connector_stats)

    classes = (PrometheusStatLogger, StatLoggerManager)
    module = hooked(stats.LOGGERS, **{cls.__name__: cls for cls in classes})
    module.registry = registry
    return module


def report_of(**counts):
    return {"counts": [counts.pop(name, 0) for name in COUNTERS], **counts}


def recorded(manager, kv_connector_stats, **arguments):
    """Records a SchedulerStats; returns what vLLM's own loggers saw of it."""
    found = SimpleNamespace(kv_connector_stats=kv_connector_stats)
    manager.record(found, None, **arguments)
    return manager.recorded[-1]


def value(module, name, engine=0, **labels):
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    return module.registry.get_sample_value(f"vllm:nwor_{name}", labels)


def fallbacks(module, engine=0):
    return {r: value(module, "fallbacks_total", engine, reason=r) for r in FALLBACKS}


def test_a_report_is_taken_out_and_counted_for_its_engine():
    module = hooked_loggers()
    manager = module.StatLoggerManager((0, 1))
    audit = {"steps": 7}  # nobody here shows it
    report = report_of(
        windows=2, restored_bytes=10, fallbacks={"over_capacity": 3}, audit=audit
    )
    own = {"num_saved": 1}
    for name in COUNTERS:
        assert value(module, f"{name}_total", engine=1) == 0
    assert fallbacks(module, engine=1) == dict.fromkeys(FALLBACKS, 0)

    assert recorded(manager, {"nwor": report}, engine_idx=1) is None
    assert recorded(manager, {"nwor": report, **own}, engine_idx=1) == own
    assert recorded(manager, own) is own
    manager.record(None, None)
    assert manager.recorded[-1] is None

    assert value(module, "windows_total", 1) == 4
    assert value(module, "restored_bytes_total", 1) == 20
    assert value(module, "windows_total", 0) == 0
    assert value(module, "fallbacks_total", 1, reason="over_capacity") == 6
    assert value(module, "audit_steps_total", 1) is None


@pytest.mark.parametrize("mode", ["off", "stage"])
def test_the_audits_counts_are_shown_with_the_mode_and_without(mode, monkeypatch):
    """All of them from the start."""
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "log")
    module = hooked_loggers()
    manager = module.StatLoggerManager()
    expected = dict.fromkeys([*AUDIT_COUNTERS, *CLASSES], 0)

    for rise in ({}, {"steps": 9, "changed": 1}, {"steps": 3, "unverified": 2}):
        recorded(manager, {"nwor": report_of(windows=1, audit=rise)})
        expected |= Counter(expected) + Counter(rise)
        found = {name: value(module, f"audit_{name}_total") for name in AUDIT_COUNTERS}
        for kind in CLASSES:
            labels = {"class": kind}
            found[kind] = value(module, "audit_findings_total", **labels)
        assert found == expected
    assert value(module, "windows_total") == (3 if mode == "stage" else None)


def test_counts_that_nobody_collects_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING", 5)
    module = hooked_loggers()
    manager = module.StatLoggerManager()
    (prometheus,) = manager.stat_loggers[1].nwor_prometheus

    for _ in range(20):
        recorded(manager, {"nwor": report_of(windows=1)})
        assert len(prometheus._waiting[0]) <= 5

    assert value(module, "windows_total") == 20
    assert value(module, "windows_total") == 20


def test_an_engine_nobody_knows_costs_its_report_and_nothing_else(monkeypatch):
    manager = hooked_loggers().StatLoggerManager()
    report = report_of(windows=1)

    assert recorded(manager, {"nwor": report}, engine_idx=9) is None

    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(KeyError):
        recorded(manager, {"nwor": report}, engine_idx=9)


def info(module, resolved):
    labels = {**INFO[0]._asdict(), "group": "0", "resolved": resolved}
    return value(module, "info", **labels)


def test_info_is_shown_once_for_each_group_and_by_loggers_created_anew():
    """What was shown before goes to zero, as counters of new loggers do."""
    module = hooked_loggers()
    manager = module.StatLoggerManager()
    recorded(manager, {"nwor": report_of(info=INFO)})
    recorded(manager, {"nwor": report_of(windows=5)})
    assert info(module, "cow") == 1
    recorded(manager, {"nwor": report_of(info=OTHER_INFO)})
    assert (info(module, "cow"), info(module, "off")) == (0, 1)

    for news, shown in (({}, (None, 1)), ({"info": INFO}, (1, None))):
        manager = module.StatLoggerManager()
        assert value(module, "windows_total") == 0
        recorded(manager, {"nwor": report_of(windows=1, **news)})
        assert value(module, "windows_total") == 1
        assert (info(module, "cow"), info(module, "off")) == shown


def test_emit_metrics_0_creates_nothing_and_still_protects_vllms_loggers(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", "0")
    module = hooked_loggers()
    manager = module.StatLoggerManager()

    assert recorded(manager, {"nwor": report_of(windows=1)}) is None
    assert list(module.registry.collect()) == []
    assert run(hooked_scheduler(), MIXED) is None


# --- who takes reports ----------------------------------------------------------------


def mark(parallel_config):
    return getattr(parallel_config, "nwor_front_end", 0)


@pytest.mark.parametrize(
    ("mode", "audit", "front_end", "lines"),
    [
        ("cow", "off", 0, ["NWOR metrics are off"]),
        ("off", "log", 0, ["NWOR audit: no metrics"]),
        ("cow", "log", stats.AUDIT, ["NWOR metrics are off"]),
        ("cow", "log", stats.COUNTS, ["NWOR audit: no metrics"]),
        ("off", "log", stats.AUDIT, []),
        ("cow", "off", stats.COUNTS, []),
    ],
)
@pytest.mark.parametrize("log_stats", [True, False])
def test_an_engine_whose_front_end_does_not_show_what_it_tells_says_so_once(
    mode, audit, front_end, lines, log_stats, monkeypatch, caplog
):
    """To one that said nothing it sends nothing: as in a headless node whose head has
    no NWOR. Without statistics nobody would be told anything."""
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    monkeypatch.setenv("VLLM_NWOR_AUDIT", audit)
    scheduler = hooked_scheduler()
    scheduler.vllm_config.parallel_config.nwor_front_end = front_end
    scheduler.log_stats = log_stats

    for _ in range(3):
        report = run(scheduler, MIXED)
        assert (report is not None) == (log_stats and front_end != 0)

    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert [w.partition(": the front end ")[0] for w in warnings] == lines * log_stats
    if log_stats:
        assert not scheduler.nwor_stats.report  # what nobody asked for is not kept


@pytest.mark.parametrize(
    ("mode", "audit", "emit", "says"),
    [
        ("stage", "off", "1", stats.COUNTS),
        ("stage", "log", "1", stats.COUNTS + stats.AUDIT),
        ("off", "log", "1", stats.AUDIT),
        ("stage", "log", "0", 0),
        ("off", "off", "1", 0),
    ],
)
def test_a_front_end_says_that_it_takes_reports_if_it_shows_them(
    mode, audit, emit, says, monkeypatch
):
    """Each way from a front end to an engine: vLLM's own handshake and configs."""

    class Actors:
        def __init__(self, vllm_config):
            self.config = pickle.loads(pickle.dumps(vllm_config.parallel_config))

    metadata = utils.EngineHandshakeMetadata
    classes = {"EngineHandshakeMetadata": metadata, "CoreEngineActorManager": Actors}
    module = hooked(stats.ENGINES, **classes)
    for name, setting in (("MODE", mode), ("AUDIT", audit), ("EMIT_METRICS", emit)):
        monkeypatch.setenv(f"VLLM_NWOR_{name}", setting)

    addresses, parallel = utils.EngineZmqAddresses([], []), {"data_parallel_size": 2}
    sent = msgspec.msgpack.encode(module.EngineHandshakeMetadata(addresses, parallel))
    engines, plain = ParallelConfig(), ParallelConfig()
    socket = Mock(**{"recv.return_value": sent})
    core.EngineCoreProc.startup_handshake(socket, True, False, engines)
    plain.data_parallel_size = 2
    assert engines.data_parallel_size == 2
    assert engines.compute_hash() == plain.compute_hash()
    assert mark(engines) == says
    assert mark(module.CoreEngineActorManager(VllmConfig()).config) == says
    manager = hooked_loggers().StatLoggerManager()
    assert mark(manager.vllm_config.parallel_config) == says


@pytest.mark.parametrize("rank_0_takes", [True, False])
@pytest.mark.parametrize("own_takes", [True, False, None])
def test_an_engine_with_a_front_end_of_its_own_asks_that_one(
    rank_0_takes, own_takes, monkeypatch
):
    """External and hybrid load balancing: an engine of a rank above 0 has its config
    from rank 0's front end, and reports to its own. None: there is only one."""
    module = hooked(stats.ENGINE_CORE, EngineCoreProc=core.EngineCoreProc)
    engine = object.__new__(module.EngineCoreProc)
    config = SimpleNamespace(
        parallel_config=ParallelConfig(), __post_init__=lambda: None
    )
    sent = {}
    for size, takes in ((2, rank_0_takes), (3, own_takes)):
        if takes is not None:
            said = {"data_parallel_size": size} | ({stats.MARK: 1} if takes else {})
            addresses = utils.EngineZmqAddresses([str(size)], [str(size)])
            metadata = utils.EngineHandshakeMetadata(addresses, said)
            metadata.parallel_config = said  # whoever has hooked it in this process
            sent[str(size)] = msgspec.msgpack.encode(metadata)

    @contextmanager
    def make_zmq_socket(context, address, *_, **__):
        yield Mock(**{"recv.return_value": sent[address]})

    monkeypatch.setattr(core, "make_zmq_socket", make_zmq_socket)
    rank_0, own = (*sent, None)[:2]
    with engine._perform_handshakes(rank_0, b"\x01\x00", True, config, own) as found:
        assert found.inputs == [own or rank_0]

    expected = rank_0_takes if own_takes is None else own_takes
    assert mark(config.parallel_config) == expected
    assert config.parallel_config.data_parallel_size == 2  # rank 0's, always


def test_a_scheduler_that_counts_otherwise_is_refused_by_name():
    class Other(Scheduler):
        def make_spec_decoding_stats(self, num_drafts):
            pass

    with pytest.raises(HostMismatch, match="make_spec_decoding_stats has parameters"):
        hooked(stats.SCHEDULER, Scheduler=Other)


API_SERVER = """
import sys
import prometheus_client
from vllm_nwor import metrics
prometheus = metrics.NworPrometheus(
    prometheus_client.Counter, prometheus_client.Gauge, {0: ["tiny", "0"]}
)
counts = [int(sys.argv[1])] * len(metrics.COUNTERS)
prometheus.add({"counts": counts, "fallbacks": {"over_capacity": 1}}, 0)
if sys.argv[2:]:
    info = [[0, "stage", "cow", "no path"]]
    prometheus.add({"counts": [0] * len(counts), "info": info}, 0)
"""


def test_several_api_servers_add_up(tmp_path):
    for arguments in (["3", "info"], ["4"]):
        subprocess.run(
            [sys.executable, "-c", API_SERVER, *arguments],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            check=True,
            timeout=60,
        )
    found = SimpleNamespace(registry=prometheus_client.CollectorRegistry())
    MultiProcessCollector(found.registry, path=str(tmp_path))

    assert value(found, "windows_total") == 7
    assert fallbacks(found) == {**dict.fromkeys(FALLBACKS, 0), "over_capacity": 2}
    assert info(found, "cow") == 1


def test_objects_need_nothing_but_classes_like_prometheus_clients():
    """As Ray's stand-ins: nobody collects from them, and 0 is not added."""
    metric = Mock(spec_set=["labels", "inc", "set"])
    metric.labels.return_value = metric
    made = Mock(return_value=metric)

    prometheus = NworPrometheus(made, made, {0: ["tiny", "0"]})
    prometheus.add(report_of(windows=1, fallbacks={"over_capacity": 1}), 0)
    prometheus.add(report_of(info=INFO), 0)

    assert metric.inc.call_args_list == [call(1), call(1)]
    metric.set.assert_called_once_with(1)
    names = [created.kwargs["name"] for created in made.call_args_list]
    assert sorted(names) == sorted(
        f"vllm:nwor_{name}" for name in [*COUNTERS, "fallbacks", "info"]
    )
