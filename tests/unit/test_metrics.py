# SPDX-License-Identifier: Apache-2.0
"""Counters without an engine: attaching, identities, the report's way to Prometheus.

The scheduler and the stat loggers are small stand-ins with vLLM's signatures; outputs
and Prometheus objects are the real ones. That vLLM itself behaves like the stand-ins is
the subject of tests/integration/test_stats_inprocess.py.
"""

import array
import dataclasses
import logging
import pickle
import subprocess
import sys
import threading
from functools import partial
from types import ModuleType, SimpleNamespace

import msgspec
import prometheus_client
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

import vllm_nwor.metrics as metrics
from vllm_nwor.hooks import stats
from vllm_nwor.hooks._wrap import HostMismatch
from vllm_nwor.metrics import COUNTERS, Counted, GroupInfo, NworPrometheus, NworStats
from vllm_nwor.report import StepPayload

BONUS = 7
INFO = [GroupInfo(0, "stage", "cow", "no path")]
OTHER_INFO = [INFO[0]._replace(resolved="off")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in ("VLLM_NWOR_STRICT", "VLLM_NWOR_EMIT_METRICS"):
        monkeypatch.delenv(name, raising=False)
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


def later_output(output):
    return LateOutput(output, "_model_runner_output")


@pytest.mark.parametrize("wrap", [lambda output: output, LateOutput, later_output])
def test_an_output_carries_counts_that_are_read_when_it_is(wrap):
    memory = array.array("q", [0] * 8)
    before, after = memoryview(array.array("q", range(8))), memoryview(memory)
    output = wrap(plain_output())

    stats.attach(output, lambda: StepPayload((before, after)))
    memory[:] = array.array("q", range(10, 90, 10))

    if not isinstance(output, ModelRunnerOutput):
        output = output.get_output()
    risen = (10, 19, 28, 37, 46, 55, 64, 73)
    assert output.nwor_stats.read() == (risen,)
    assert pickle.loads(pickle.dumps(output)).nwor_stats == (risen,)


@pytest.mark.parametrize("wrap", [lambda output: output, LateOutput])
def test_the_shared_empty_output_is_never_touched_and_nothing_is_lost(wrap):
    result = wrap(EMPTY_MODEL_RUNNER_OUTPUT)

    stats.attach(result, lambda: pytest.fail("the payload was read, and is lost"))

    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "nwor_stats")


@pytest.mark.parametrize(
    ("take_payload", "is_logged"), [(lambda: None, False), (lambda: 1 // 0, True)]
)
def test_without_news_an_output_stays_as_it_was(take_payload, is_logged, caplog):
    """Also where they cannot be had: that loses no token."""
    output = plain_output()

    stats.attach(output, take_payload)
    for strange in (None, 3, object()):
        stats.attach(strange, take_payload)

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


def scheduler_module():
    module = ModuleType(stats.SCHEDULER)

    class Scheduler:
        """Counts and skips as vLLM's scheduler does, in the fewest lines."""

        num_sampled_tokens_per_step = 1

        def __init__(self, method="ngram"):
            self.vllm_config = SimpleNamespace(
                speculative_config=SimpleNamespace(method=method),
                parallel_config=SimpleNamespace(nwor_front_end=1),
            )
            self.log_stats, self.num_spec_tokens = True, 8
            self.counted = SimpleNamespace(windows=0, drafts=0, accepted=0)
            self.connector_stats, self.unfinished = None, True
            self.change_stats, self.form = (lambda found: None), dict

        def has_unfinished_requests(self):
            return self.unfinished

        def update_from_output(self, scheduler_output, model_runner_output):
            outputs = []
            spec_stats = None
            for rid, (_, _, fate) in scheduler_output.step.windows.items():
                row = model_runner_output.req_id_to_index[rid]
                ids = model_runner_output.sampled_token_ids[row]
                if fate == "gone":
                    continue
                drafts = scheduler_output.scheduled_spec_decode_tokens.get(rid)
                if drafts and ids:
                    spec_stats = self.make_spec_decoding_stats(
                        spec_stats,
                        num_draft_tokens=len(drafts),
                        num_accepted_tokens=len(ids) - 1,
                        num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens,
                        request_id=rid,
                    )
                if fate == "stops":
                    del ids[1:]
                outputs.append(rid)
            found = SimpleNamespace(
                kv_connector_stats=self.connector_stats, spec_decoding_stats=spec_stats
            )
            self.change_stats(found)
            found = found if self.log_stats else None
            other = SimpleNamespace(outputs=[], scheduler_stats=None)
            carrier = SimpleNamespace(outputs=outputs, scheduler_stats=found)
            return self.form({3: other, 0: carrier})

        def make_spec_decoding_stats(
            self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, **others
        ):
            self.counted.windows += 1
            self.counted.drafts += num_draft_tokens
            self.counted.accepted += num_accepted_tokens
            return VllmScheduler.make_spec_decoding_stats(
                self,
                spec_decoding_stats,
                num_draft_tokens,
                num_accepted_tokens,
                **others,
            )

    module.Scheduler = Scheduler
    return module


def hooked_scheduler(**arguments):
    module = scheduler_module()
    stats.install(module)
    return module.Scheduler(**arguments)


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
    found = outputs[0].scheduler_stats
    if found is None or "nwor" not in (found.kv_connector_stats or ()):
        return None
    report = {"fallbacks": {}} | found.kv_connector_stats["nwor"]
    report |= dict(zip(COUNTERS, report.pop("counts"), strict=True))
    check_partition(report)
    return report


def check_partition(report):
    parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
    assert all(report[name] >= 0 for name in COUNTERS)
    assert report["tokens_staged"] == sum(report[part] for part in parts)


MIXED = Step(
    a=(4, 2, "counted"),
    b=(4, 3, "gone"),
    c=(3, 3, "stops"),
    d=(2, 1, "cleared"),
    e=(0, 0, "counted"),
)
IDLE = Step(e=(0, 0, "counted"))
ONE_GONE = Step(a=(4, 1, "counted"), b=(3, 2, "gone"))
BOTH_COUNTED = Step(a=(4, 1, "counted"), b=(3, 2, "counted"))
ZEROS = (0,) * 8


# --- the identities -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "parts"), [(BOTH_COUNTED, [3, 4, 0]), (ONE_GONE, [1, 3, 3])]
)
def test_a_dropped_window_is_neither_committed_nor_rejected(step, parts):
    """It finished in flight: vLLM did not count it."""
    report = run(hooked_scheduler(), step, (counts(2, 7, 3, restored=640),))

    assert [report[name] for name in COUNTERS] == [2, 7, *parts, 640, 96, 48, 0]


def test_a_row_that_vllm_cleared_leaves_its_acceptance_open():
    step = Step(a=(4, 1, "counted"), b=(3, 0, "cleared"))

    breaches = [
        run(hooked_scheduler(), step, (counts(2, 7, accepted),))["breaches"]
        for accepted in (0, 1, 4, 5)
    ]

    assert breaches == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
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
    ],
)
@pytest.mark.parametrize("step", [ONE_GONE, BOTH_COUNTED])
def test_each_identity_that_fails_is_a_breach_by_name(found, kinds, step):
    scheduler = hooked_scheduler()

    report = run(scheduler, step, (found,))

    assert metrics._logged == {f"breach of the {kind} identity" for kind in kinds}
    assert report["breaches"] == (2 if kinds == ["worker"] else len(kinds))
    # What is too much counts as dropped.
    most = scheduler.counted.drafts - scheduler.counted.accepted
    assert report["rejected_tokens"] <= most


SMALL = st.integers(0, 4)


@settings(deadline=None)
@given(
    st.tuples(*[st.integers(0, 3)] + [st.integers(0, 8)] * 3 + [SMALL] * 4),
    st.dictionaries(
        st.sampled_from("ab"),
        st.tuples(st.just(4), SMALL, st.sampled_from(["counted", "gone"])),
    ),
)
def test_counts_that_agree_are_added_as_those_that_are_looked_at(found, windows):
    """A payload with room for news is looked at in any case."""
    step = Step(**windows, e=(0, 0, "counted"))

    reports = [
        run(hooked_scheduler(), step, payload)
        for payload in ((found,), (found, {}, []))
    ]

    assert reports[0] == reports[1]


def test_drafts_trimmed_by_the_worker_are_no_breach_where_the_method_trims():
    # 8 scheduled and counted by vLLM, 5 run; all of window b went.
    step = Step(a=(4, 1, "counted"), b=(4, 0, "counted"))
    trimmed, too_many = (counts(1, 5, 1),), (counts(3, 9, 1),)

    report = run(hooked_scheduler(method="ngram_gpu"), step, trimmed)

    assert report["breaches"] == 0
    assert (report["committed_tokens"], report["rejected_tokens"]) == (1, 4)
    assert report["dropped_drafts"] == 0
    report = run(hooked_scheduler(method="ngram_gpu"), step, too_many)
    assert report["breaches"] == 2  # windows and drafts
    assert run(hooked_scheduler(method="ngram"), step, trimmed)["breaches"] == 2


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"counters": ZEROS}, "`array`, got `object`"),  # an older version's
        (((0,) * 7,), "`array` of length 8, got 7 - at `$[0]`"),
        (((1, 4, 2, 2, -64, 0, 0, 0),), "`int` >= 0 - at `$[0][4]`"),
        ((ZEROS, 3), "`object`, got `int` - at `$[1]`"),
        ((ZEROS, {"over_capacity": -1}), "`int` >= 0 - at `$[1][...]`"),
        ((ZEROS, {}, [{"group": 0}]), "`array`, got `object` - at `$[2][0]`"),
    ],
)
def test_a_payload_of_another_version_is_named(payload, expected):
    with pytest.raises(ValueError, match="payload is ") as raised:
        NworStats().add_step(payload, Counted, ({}, None, []))

    assert str(raised.value) == f"payload is {payload!r}: Expected {expected}"


# --- the scheduler's hooks ------------------------------------------------------------


def test_sums_that_are_missing_are_a_breach_and_lose_no_output():
    scheduler = hooked_scheduler()
    scheduler.change_stats = lambda found: vars(found).pop("spec_decoding_stats")

    report = run(scheduler, MIXED)

    assert report["breaches"] == 1
    assert report["windows"] == 4
    assert report["tokens_staged"] == report["dropped_drafts"] == 13
    scheduler.change_stats = lambda found: None
    assert run(scheduler, MIXED)["committed_tokens"] == 5


def test_outputs_of_another_form_are_breaches_and_lose_no_counts():
    scheduler = hooked_scheduler()
    scheduler.form = list

    with pytest.raises(AttributeError):  # when this test looks for its report
        run(scheduler, MIXED)

    scheduler.form = dict
    report = run(scheduler, MIXED)
    assert report["windows"] == 2 * 4
    assert (report["committed_tokens"], report["dropped_drafts"]) == (5, 13 + 6)
    assert report["breaches"] == 1


def test_a_report_that_cannot_be_sent_is_a_breach_and_loses_no_output():
    scheduler = hooked_scheduler()
    del type(scheduler).has_unfinished_requests
    silent = Step(b=(4, 3, "gone"))

    assert run(scheduler, silent) is None

    report = run(scheduler, MIXED)
    assert report["breaches"] == 1
    assert report["windows"] == 1 + 4


@pytest.mark.parametrize(
    ("payload", "news"),
    [
        ((ZEROS, {"over_capacity": 2}), {"fallbacks": {"over_capacity": 2}}),
        ((ZEROS, {}, INFO), {"info": INFO}),
        (((*ZEROS[:5], 1, 0, 0),), {"breaches": 1}),
    ],
)
def test_news_leave_with_the_step_that_has_them_and_once(payload, news):
    """A step that ran as vanilla, whose windows are no breach, but for a slot."""
    scheduler = hooked_scheduler()

    report = run(scheduler, MIXED, payload)

    assert report == {**dict.fromkeys(COUNTERS, 0), "fallbacks": {}, **news}
    assert run(scheduler, IDLE, None) is None


def test_a_report_does_not_leave_without_outputs_while_others_will_come():
    scheduler = hooked_scheduler()
    silent = Step(b=(4, 3, "gone"))

    assert run(scheduler, silent) is None
    scheduler.unfinished = False
    assert run(scheduler, silent)["dropped_drafts"] == 8


def test_the_connectors_own_statistics_are_kept_and_not_written_to():
    scheduler = hooked_scheduler()
    scheduler.connector_stats = own = {"num_saved": 3}
    sent = []
    scheduler.change_stats = sent.append

    assert run(scheduler, MIXED)["windows"] == 4
    assert own == {"num_saved": 3}
    assert {**sent[0].kv_connector_stats, "nwor": 0} == {"num_saved": 3, "nwor": 0}


def test_a_bad_payload_is_a_breach_or_raises_when_strict(monkeypatch, caplog):
    scheduler, payload = hooked_scheduler(), ["counters"]

    assert run(scheduler, MIXED, payload)["breaches"] == 1
    assert run(scheduler, MIXED, payload)["breaches"] == 1
    assert scheduler.counted.windows == 4
    assert len([r for r in caplog.records if "breach" in r.message]) == 1

    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(ValueError, match="payload is "):
        run(scheduler, MIXED, payload)


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
    scheduler = hooked_scheduler()
    expected = dict.fromkeys(COUNTERS, 0)
    found = dict.fromkeys(COUNTERS, 0)
    for windows, log_stats, vanilla, forbids in [*steps, ({}, True, True, False)]:
        step = Step(**windows)
        scheduler.log_stats = log_stats
        before = vars(scheduler.counted).copy()
        scheduler.unfinished = bool(windows)
        invalid = {rid: n - ok for rid, (n, ok, _) in windows.items()}
        payload = None if vanilla else "truth"
        report = run(scheduler, step, payload, invalid if forbids else None)
        if not vanilla:
            drafts = scheduler.counted.drafts - before["drafts"]
            accepted = scheduler.counted.accepted - before["accepted"]
            windows, staged, _, _, restored, _, shadow_copied, kept = step.counts
            parts = accepted, drafts - accepted, staged - drafts
            rises = windows, staged, *parts, restored, shadow_copied, kept
            for name, rise in zip(COUNTERS, rises, strict=False):
                expected[name] += rise
        for name in COUNTERS if report else ():
            found[name] += report[name]

    assert "make_spec_decoding_stats" not in vars(scheduler)
    assert found == expected
    check_partition(found)


@settings(deadline=None)
@given(
    WINDOWS.filter(lambda windows: any(window[0] for window in windows.values())),
    st.integers(0, 3),  # windows, staged, accepted, rejected
    st.sampled_from([-2, -1, 1, 2]),
)
def test_one_wrong_number_of_the_worker_never_passes(windows, column, error):
    step = Step(**windows)
    wrong = list(step.counts)
    wrong[column] = max(wrong[column] + error, 0)
    if tuple(wrong) == step.counts or not any(wrong[:2]):
        return  # zero less one is zero; nothing at all is a step run as vanilla

    step = Step(**windows, z=(0, 0, "counted"))
    report = run(hooked_scheduler(), step, (tuple(wrong),))

    assert report["breaches"] >= 1


# --- the front end --------------------------------------------------------------------


def loggers_module():
    module = ModuleType(stats.LOGGERS)
    registry = prometheus_client.CollectorRegistry()

    class PrometheusStatLogger:
        _counter_cls = partial(prometheus_client.Counter, registry=registry)
        _gauge_cls = partial(prometheus_client.Gauge, registry=registry)

        def __init__(self, vllm_config, engine_indexes=None):
            for collector in list(registry._collector_to_names):
                registry.unregister(collector)
            self.per_engine_labelvalues = {
                engine: ["tiny", str(engine)] for engine in engine_indexes or [0]
            }

    class StatLoggerManager:
        def __init__(self, engine_indexes=(0,)):
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
            self.stat_loggers = [
                SimpleNamespace(),
                module.PrometheusStatLogger(self.vllm_config, engine_indexes),
            ]
            self.recorded = []

        def record(
            self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None
        ):
            self.recorded.append(scheduler_stats and scheduler_stats.kv_connector_stats)

    module.PrometheusStatLogger = PrometheusStatLogger
    module.StatLoggerManager = StatLoggerManager
    module.registry = registry
    return module


def hooked_loggers():
    module = loggers_module()
    stats.install(module)
    return module


def report_of(**counts):
    return {"counts": [counts.pop(name, 0) for name in COUNTERS], **counts}


def recorded(manager, kv_connector_stats, **arguments):
    """Records a SchedulerStats; returns what vLLM's own loggers saw of it."""
    found = SimpleNamespace(kv_connector_stats=kv_connector_stats)
    manager.record(found, None, **arguments)
    return manager.recorded[-1]


def value(registry, name, engine=0, **labels):
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    return registry.get_sample_value(f"vllm:nwor_{name}", labels)


def test_a_report_is_taken_out_and_counted_for_its_engine():
    module = hooked_loggers()
    manager = module.StatLoggerManager((0, 1))
    report = report_of(windows=2, restored_bytes=10, fallbacks={"over_capacity": 3})
    own = {"num_saved": 1}
    for name in COUNTERS:
        assert value(module.registry, f"{name}_total", engine=1) == 0

    assert recorded(manager, {"nwor": report}, engine_idx=1) is None
    assert recorded(manager, {"nwor": report, **own}, engine_idx=1) == own
    assert recorded(manager, own) is own
    manager.record(None, None)
    assert manager.recorded[-1] is None

    assert value(module.registry, "windows_total", 1) == 4
    assert value(module.registry, "restored_bytes_total", 1) == 20
    assert value(module.registry, "windows_total", 0) == 0
    assert value(module.registry, "fallbacks_total", 1, reason="over_capacity") == 6


def test_counts_that_nobody_collects_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING", 5)
    module = hooked_loggers()
    manager = module.StatLoggerManager()
    prometheus = manager.stat_loggers[1].nwor_prometheus

    for _ in range(20):
        recorded(manager, {"nwor": report_of(windows=1)})
        assert len(prometheus._waiting[0]) <= 5

    assert value(module.registry, "windows_total") == 20
    assert value(module.registry, "windows_total") == 20


def test_an_engine_nobody_knows_costs_its_report_and_nothing_else(monkeypatch):
    manager = hooked_loggers().StatLoggerManager()
    report = report_of(windows=1)

    assert recorded(manager, {"nwor": report}, engine_idx=9) is None

    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(KeyError):
        recorded(manager, {"nwor": report}, engine_idx=9)


def info(module, resolved):
    labels = {**INFO[0]._asdict(), "group": "0", "resolved": resolved}
    return value(module.registry, "info", **labels)


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
        assert value(module.registry, "windows_total") == 0
        recorded(manager, {"nwor": report_of(windows=1, **news)})
        assert value(module.registry, "windows_total") == 1
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
    return getattr(parallel_config, "nwor_front_end", None)


def test_an_engine_whose_front_end_said_nothing_sends_nothing_and_says_so_once(caplog):
    """As one of a headless node does whose head has no NWOR."""
    scheduler = hooked_scheduler()
    del scheduler.vllm_config.parallel_config.nwor_front_end

    for _ in range(3):
        assert run(scheduler, MIXED) is None

    assert scheduler.counted.accepted == 3 * 5
    (record,) = caplog.records
    assert record.message.startswith("NWOR metrics are off: the front end (LLM")
    assert record.levelno == logging.WARNING
    assert not scheduler.nwor_stats.report  # what nobody asked for is not kept


@pytest.mark.parametrize(
    ("mode", "emit", "says"), [("stage", "1", 1), ("stage", "0", 0), ("off", "1", 0)]
)
def test_a_front_end_says_that_it_takes_reports_if_it_shows_them(
    mode, emit, says, monkeypatch
):
    """Each way from a front end to an engine: vLLM's own handshake and configs."""
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.engine import core, utils

    @dataclasses.dataclass
    class Handshake(utils.EngineHandshakeMetadata):
        pass

    class Actors:
        def __init__(self, vllm_config):
            self.config = pickle.loads(pickle.dumps(vllm_config.parallel_config))

    module = ModuleType(stats.ENGINES)
    module.EngineHandshakeMetadata = Handshake
    module.CoreEngineActorManager = Actors
    stats.install(module)
    monkeypatch.setenv("VLLM_NWOR_MODE", mode)
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", emit)

    sent = Handshake(utils.EngineZmqAddresses([], []), {"data_parallel_size": 2})
    engines, plain = ParallelConfig(), ParallelConfig()
    core.EngineCoreProc.startup_handshake(
        SimpleNamespace(
            send=lambda message: None,
            poll=lambda timeout: True,
            recv=lambda: msgspec.msgpack.encode(sent),
        ),
        True,
        False,
        engines,
    )
    assert engines.data_parallel_size == 2
    assert bool(mark(engines)) == says
    plain.data_parallel_size = 2
    assert engines.compute_hash() == plain.compute_hash()
    assert bool(mark(module.CoreEngineActorManager(VllmConfig()).config)) == says
    manager = hooked_loggers().StatLoggerManager()
    assert bool(mark(manager.vllm_config.parallel_config)) == says


def front_end_at(address, parallel_config):
    """Takes one engine's handshake there, as vLLM's front end does."""
    from vllm.v1.engine import utils

    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)

    def serve():
        engine, _ = socket.recv_multipart()
        sent = utils.EngineHandshakeMetadata(
            utils.EngineZmqAddresses([address], [address]), parallel_config
        )
        sent.parallel_config = parallel_config  # whoever has hooked it in this process
        socket.send_multipart((engine, msgspec.msgpack.encode(sent)))
        socket.recv_multipart()
        socket.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("rank_0_takes", [True, False])
@pytest.mark.parametrize("own_takes", [True, False, None])
def test_an_engine_with_a_front_end_of_its_own_asks_that_one(
    rank_0_takes, own_takes, tmp_path
):
    """External and hybrid load balancing: an engine of a rank above 0 has its config
    from rank 0's front end, and reports to its own. None: there is only one."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine import core

    module = ModuleType(stats.ENGINE_CORE)
    module.EngineCoreProc = type("EngineCoreProc", (core.EngineCoreProc,), {})
    stats.install(module)
    engine = object.__new__(module.EngineCoreProc)
    config = SimpleNamespace(
        parallel_config=ParallelConfig(), __post_init__=lambda: None
    )
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("rank_0", "own")]
    sizes = [{"data_parallel_size": 2}, {"data_parallel_size": 3}]
    marks = [{stats.MARK: 1} if takes else {} for takes in (rank_0_takes, own_takes)]
    several = 2 if own_takes is not None else 1
    threads = [
        front_end_at(address, size | said)
        for address, size, said in zip(
            *(column[:several] for column in (addresses, sizes, marks)), strict=True
        )
    ]

    with engine._perform_handshakes(
        addresses[0], b"\x01\x00", True, config, addresses[1] if several > 1 else None
    ) as found:
        assert found.inputs == [addresses[several - 1]]
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

    expected = rank_0_takes if own_takes is None else own_takes
    assert bool(mark(config.parallel_config)) == expected
    assert config.parallel_config.data_parallel_size == 2  # rank 0's, always


def test_a_scheduler_that_counts_otherwise_is_refused_by_name():
    module = scheduler_module()
    module.Scheduler.make_spec_decoding_stats = lambda self, num_drafts: None

    with pytest.raises(HostMismatch, match="make_spec_decoding_stats has parameters"):
        stats.install(module)


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
    registry = prometheus_client.CollectorRegistry()
    from prometheus_client.multiprocess import MultiProcessCollector

    MultiProcessCollector(registry, path=str(tmp_path))

    assert value(registry, "windows_total") == 7
    assert value(registry, "fallbacks_total", reason="over_capacity") == 2
    assert info(SimpleNamespace(registry=registry), "cow") == 1


def test_objects_need_nothing_but_classes_like_prometheus_clients():
    made = []

    class RayLike:
        def __init__(self, name, documentation="", labelnames=None, **multiprocess):
            self.name, self.labelnames = name, labelnames
            made.append(name)

        def labels(self, *values):
            assert len(values) == len(self.labelnames)
            return self

        def inc(self, amount):
            assert amount > 0

        def set(self, amount):
            assert amount in (0, 1)

    prometheus = NworPrometheus(RayLike, RayLike, {0: ["tiny", "0"]})
    prometheus.add(report_of(windows=1, fallbacks={"over_capacity": 1}), 0)
    prometheus.add(report_of(info=INFO), 0)

    assert sorted(made) == sorted(
        f"vllm:nwor_{name}" for name in [*COUNTERS, "fallbacks", "info"]
    )
