# SPDX-License-Identifier: Apache-2.0
"""Counters without an engine: attaching, identities, the report's way to Prometheus.

The scheduler and the stat loggers are small stand-ins with vLLM's signatures; outputs
and Prometheus objects are the real ones. That vLLM itself behaves like the stand-ins is
the subject of tests/integration/test_stats_inprocess.py.
"""

import array
import dataclasses
import pickle
from collections import Counter
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

import vllm_nwor.metrics as metrics
from vllm_nwor import commits
from vllm_nwor.audit.findings import CLASSES
from vllm_nwor.audit.stats import COUNTERS as AUDIT_COUNTERS
from vllm_nwor.hooks import stats
from vllm_nwor.hooks._wrap import HostMismatch
from vllm_nwor.metrics import COUNTERS, FALLBACKS, GroupInfo, NworPrometheus
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
    logged = "no statistics on a runner's output: ModelRunnerOutput" in caplog.text
    assert logged is is_logged


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
        speculative = SimpleNamespace(method=method)
        self.vllm_config = SimpleNamespace(speculative_config=speculative)
        self.log_stats = self.unfinished = True
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
        found = SchedulerStats(spec_decoding_stats=spec_stats)
        self.change_stats(found)
        carrier = SimpleNamespace(
            outputs=outputs, scheduler_stats=found if self.log_stats else None
        )
        other = SimpleNamespace(outputs=[], scheduler_stats=None)
        return self.form({3: carrier, 0: other})


def hooked(name, **classes):
    """A module of vLLM's with classes like these, and NWOR's hooks on them."""
    module = ModuleType(name)
    for attribute, cls in classes.items():
        setattr(module, attribute, type(attribute, (cls,), {}))
    stats.install(module)
    return module


def hooked_scheduler(**arguments):
    return hooked(stats.SCHEDULER, Scheduler=Scheduler).Scheduler(**arguments)


def run(scheduler, step, payload="truth", invalid=None, **more_drafts):
    """Runs one step; returns the report that leaves with it, or None. invalid: drafts
    of a request that its grammar does not allow. more_drafts: of the step's schedule,
    for requests that are in nobody's output."""
    output = step.output
    if payload == "truth":
        payload = (step.counts,)
    if payload is not None:
        output.nwor_stats = payload
    drafts = {rid: [5] * window[0] for rid, window in step.windows.items() if window[0]}
    scheduler_output = SimpleNamespace(
        step=step,
        num_invalid_spec_tokens=invalid,
        scheduled_spec_decode_tokens=drafts | more_drafts,
    )
    outputs = scheduler.update_from_output(scheduler_output, model_runner_output=output)
    found = outputs[3].scheduler_stats if isinstance(outputs, dict) else None
    if found is None or found.nwor_report is None:
        return None
    report = {"fallbacks": {}} | found.nwor_report
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
    (counts(1, 4, 1), ["windows", "drafts", "accepted"]),
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


# --- the scheduler's hooks ------------------------------------------------------------


@pytest.mark.parametrize("part", ["pending", "publish"])
def test_a_failure_around_on_commit_costs_no_counts(part, monkeypatch):
    def fail(*_):
        raise OSError

    whole = run(hooked_scheduler(), MIXED)
    monkeypatch.setattr(commits, "registered", [None])
    monkeypatch.setattr(stats, "block_sizes", lambda groups: {})
    monkeypatch.setattr(commits, "pending", lambda *_: [None])
    monkeypatch.setattr(commits, part, fail)
    scheduler = hooked_scheduler()
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=())

    found = [run(scheduler, MIXED), run(scheduler, MIXED)]

    num_breaches = (
        [1, 1] if part == "pending" else [0, 1]
    )  # behind the report's leaving
    assert [report["breaches"] for report in found] == num_breaches
    for report in found:
        assert report | {"breaches": 0} == whole


@pytest.mark.parametrize(
    ("broken", "payload", "num_windows"),
    [
        ({"form": list}, "truth", 4),
        ({"has_unfinished_requests": None}, "truth", 5),
        ({}, "counters", 4),
        ({}, (ZEROS[1:],), 4),
        ({}, ((1, 4, 2, 2, 0, 0, -64, 0),), 4),
    ],
)
def test_what_fails_here_is_a_breach_and_loses_no_output(
    broken, payload, num_windows, monkeypatch, caplog
):
    """Counts that were taken leave with the next step."""
    scheduler = hooked_scheduler()
    monkeypatch.setattr(scheduler, "unfinished", False)
    step = Step(a=(4, 2, "gone"))

    def play():
        with monkeypatch.context() as patch:
            for name, value in broken.items():
                patch.setattr(scheduler, name, value, raising=False)
            assert run(scheduler, step, payload) is None

    play()
    report = run(scheduler, MIXED)

    assert report["breaches"] == 1
    assert report["windows"] == num_windows
    assert metrics._logged == {"breach of the report identity"}
    assert len([r for r in caplog.records if "breach" in r.message]) == 1
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises((AttributeError, TypeError, ValueError)):
        play()


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
    """Nor is it added otherwise where each identity is looked at in any case: with one
    more request in the schedule."""
    step = Step(**windows, z=(0, 0, "counted"))
    wrong = list(step.counts)
    wrong[column] = max(wrong[column] + error, 0)  # zero less one is zero
    is_wrong = tuple(wrong) != step.counts and column in (0, 1, 2, 3, 5)

    reports = [
        run(hooked_scheduler(), step, (tuple(wrong),), **more)
        for more in ({}, {"none": []})
    ]

    assert reports[0] == reports[1]
    if any(wrong[:2]):  # nothing at all is a step run as vanilla
        assert (reports[0]["breaches"] > 0) == is_wrong


# --- the front end --------------------------------------------------------------------


@dataclasses.dataclass
class Vanilla:
    """As vLLM's SchedulerStats."""

    num_running_reqs: int = 0
    lists: list[int] = dataclasses.field(default_factory=list)


def test_a_report_is_a_field_that_a_front_end_without_nwor_skips():
    @dataclasses.dataclass
    class Extended(Vanilla):
        __annotations__ = {}

    # A decoder that was made before, as of an engine without NWOR.
    msgspec.msgpack.decode(msgspec.msgpack.encode(Extended(2, [3])), type=Extended)
    for cls in (Extended, SchedulerStats):
        stats.extend(cls)
        stats.extend(cls)
    sent = Extended(2, [3])
    dataclasses.replace(sent)
    encoded = [msgspec.msgpack.encode(sent)]
    sent.nwor_report = report = {"counts": [1, 2], "fallbacks": {"no_seat": 3}}
    encoded.append(msgspec.msgpack.encode(sent))

    for one, expected in zip(encoded, (None, report), strict=True):
        assert msgspec.msgpack.decode(one, type=Vanilla) == Vanilla(2, [3])
        assert msgspec.msgpack.decode(one, type=Extended).nwor_report == expected
    assert SchedulerStats(3).nwor_report is None
    with pytest.raises(HostMismatch, match="SchedulerStats is not a dataclass"):
        stats.extend(None)


def hooked_loggers():
    registry = prometheus_client.CollectorRegistry()

    class PrometheusStatLogger:
        _counter_cls = partial(prometheus_client.Counter, registry=registry)
        _gauge_cls = partial(prometheus_client.Gauge, registry=registry)

        def __init__(self, vllm_config=None, engine_indexes=(0,)):
            for collector in list(registry._collector_to_names):
                registry.unregister(collector)
            labels = {engine: ["tiny", str(engine)] for engine in engine_indexes}
            self.per_engine_labelvalues = labels
            self.recorded = 0

        def record(
            self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0
        ):
            self.recorded += 1

    module = hooked(stats.LOGGERS, PrometheusStatLogger=PrometheusStatLogger)
    module.registry = registry
    return module


def record(logger, engine_idx=0, fallbacks=None, audit=None, info=None, **counts):
    """Records a SchedulerStats with that report."""
    report: dict[str, Any] = {"counts": [counts.get(name, 0) for name in COUNTERS]}
    news = {"fallbacks": fallbacks, "audit": audit, "info": info}
    report |= {name: found for name, found in news.items() if found}
    found, num = SchedulerStats(), logger.recorded
    found.nwor_report = report
    logger.record(found, None, mm_cache_stats=None, engine_idx=engine_idx)
    assert logger.recorded == num + 1


def value(module, name, engine=0, **labels):
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    return module.registry.get_sample_value(f"vllm:nwor_{name}", labels)


def fallbacks(module, engine=0):
    return {r: value(module, "fallbacks_total", engine, reason=r) for r in FALLBACKS}


def test_a_report_is_counted_for_its_engine():
    module = hooked_loggers()
    logger = module.PrometheusStatLogger(None, (0, 1))
    for name in COUNTERS:
        assert value(module, f"{name}_total", engine=1) == 0
    assert fallbacks(module, engine=1) == dict.fromkeys(FALLBACKS, 0)
    more = {"fallbacks": {"over_capacity": 3}, "audit": {"steps": 7}}

    for _ in range(2):
        record(logger, 1, windows=2, restored_bytes=10, **more)
        logger.record(SchedulerStats(), None)
        logger.record(None, None)

    assert value(module, "windows_total", 1) == 4
    assert value(module, "restored_bytes_total", 1) == 20
    assert value(module, "windows_total", 0) == 0
    assert value(module, "fallbacks_total", 1, reason="over_capacity") == 6
    assert value(module, "audit_steps_total", 1) is None  # nobody here shows it


@pytest.mark.parametrize("mode", ["off", "stage"])
def test_the_audits_counts_are_shown_with_the_mode_and_without(mode, monkeypatch):
    """All of them from the start."""
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "log")
    module = hooked_loggers()
    logger = module.PrometheusStatLogger()
    expected = dict.fromkeys([*AUDIT_COUNTERS, *CLASSES], 0)

    for rise in ({}, {"steps": 9, "changed": 1}, {"steps": 3, "unverified": 2}):
        record(logger, windows=1, audit=rise)
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
    logger = module.PrometheusStatLogger()
    (prometheus,) = logger.nwor_prometheus

    for _ in range(20):
        record(logger, windows=1)
        assert len(prometheus._waiting[0]) <= 5

    assert value(module, "windows_total") == 20
    assert value(module, "windows_total") == 20


def test_nothing_waits_where_another_process_collects(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    logger = hooked_loggers().PrometheusStatLogger()
    record(logger, windows=1)
    assert not logger.nwor_prometheus[0]._waiting[0]


def test_an_engine_nobody_knows_costs_its_report_and_nothing_else(monkeypatch):
    logger = hooked_loggers().PrometheusStatLogger()
    record(logger, 9, windows=1)
    assert metrics._logged == {"a report was lost"}

    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(KeyError):
        record(logger, 9, windows=1)


def info(module, resolved):
    labels = {**INFO[0]._asdict(), "group": "0", "resolved": resolved}
    return value(module, "info", **labels)


def test_info_is_shown_once_for_each_group_and_by_loggers_created_anew():
    """What was shown before goes to zero, as counters of new loggers do."""
    module = hooked_loggers()
    logger = module.PrometheusStatLogger()
    record(logger, info=INFO)
    record(logger, windows=5)
    assert info(module, "cow") == 1
    record(logger, info=OTHER_INFO)
    assert (info(module, "cow"), info(module, "off")) == (0, 1)

    for news, shown in (({}, (None, 1)), ({"info": INFO}, (1, None))):
        logger = module.PrometheusStatLogger()
        assert value(module, "windows_total") == 0
        record(logger, windows=1, **news)
        assert value(module, "windows_total") == 1
        assert (info(module, "cow"), info(module, "off")) == shown


def test_emit_metrics_0_counts_and_creates_nothing(monkeypatch):
    """Also in a process that was hooked before."""
    module = hooked_loggers()
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", "0")

    record(module.PrometheusStatLogger(), windows=1)

    assert list(module.registry.collect()) == []
    assert run(hooked_scheduler(), MIXED) is None


def test_a_scheduler_that_counts_otherwise_is_refused_by_name():
    class Other(Scheduler):
        def make_spec_decoding_stats(self, num_drafts):
            pass

    with pytest.raises(HostMismatch, match="make_spec_decoding_stats has parameters"):
        hooked(stats.SCHEDULER, Scheduler=Other)


def test_objects_need_nothing_but_classes_like_prometheus_clients():
    """As Ray's stand-ins: nobody collects from them, and 0 is not added."""
    metric = Mock(spec_set=["labels", "inc", "set"])
    metric.labels.return_value = metric
    made = Mock(return_value=metric)

    prometheus = NworPrometheus(made, made, {0: ["tiny", "0"]})
    counts = [1, *ZEROS]
    prometheus.add({"counts": counts, "fallbacks": {"over_capacity": 1}}, 0)
    prometheus.add({"counts": [0, *ZEROS], "info": INFO}, 0)

    assert metric.inc.call_args_list == [call(1), call(1)]
    metric.set.assert_called_once_with(1)
    names = [created.kwargs["name"] for created in made.call_args_list]
    assert sorted(names) == sorted(
        f"vllm:nwor_{name}" for name in [*COUNTERS, "fallbacks", "info"]
    )
