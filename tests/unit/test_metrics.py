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
from unittest.mock import Mock, call

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT as EMPTY
from vllm.v1.outputs import ModelRunnerOutput

import vllm_nwor.metrics as metrics
from vllm_nwor import commits
from vllm_nwor.hooks import info, stats
from vllm_nwor.hooks._wrap import HostMismatch
from vllm_nwor.hooks.ledger import LOGGERS, SCHEDULER
from vllm_nwor.metrics import COUNTERS, FALLBACKS, SERIES, GroupInfo, NworPrometheus
from vllm_nwor.report import StepPayload

BONUS = 7
COUNTED = ("counted", "stops")
ZEROS = (0,) * 9
NAMES = ["_".join(series) for series in SERIES]
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


@pytest.mark.parametrize("name", [None, "model_runner_output", "_model_runner_output"])
def test_an_output_carries_counts_that_are_read_when_it_is(name, caplog):
    """Where they cannot be had, or there are none, it stays as it was: that loses no
    token."""
    memory = array.array("q", [0] * 9)
    before, after = memoryview(array.array("q", range(9))), memoryview(memory)
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    result = SimpleNamespace(**{name: output}) if name else output
    for take_payload, num_logged in ((lambda: None, 0), (lambda: 1 // 0, 1)):
        stats.attach(result, take_payload)
        assert "nwor_stats" not in vars(output)
        text = f"no statistics on a runner's output: {type(result).__name__}"
        assert caplog.text.count(text) == num_logged

    stats.attach(result, lambda: StepPayload((before, after)))
    memory[:] = array.array("q", range(10, 100, 10))

    risen = (10, 19, 28, 37, 46, 55, 64, 73, 82)
    assert output.nwor_stats.read() == (risen,)
    assert pickle.loads(pickle.dumps(output)).nwor_stats == (risen,)


@pytest.mark.parametrize(
    "result", [EMPTY, SimpleNamespace(model_runner_output=EMPTY), None, 3]
)
def test_the_shared_empty_output_is_never_touched_and_nothing_is_lost(result):
    stats.attach(result, lambda: pytest.fail("the payload was read, and is lost"))
    assert not hasattr(EMPTY, "nwor_stats")


# --- a scheduler's steps --------------------------------------------------------------


def counts(
    windows, staged, accepted, *, rejected=None, in_shadow=None, restored=0, invalid=0
):
    """Of a step, as the worker counts. Each column that nobody names has a number of
    its own, so that no two can be mixed up."""
    rejected = staged - accepted if rejected is None else rejected
    in_shadow = min(windows, 1) if in_shadow is None else in_shadow
    return windows, staged, accepted, rejected, in_shadow, restored, invalid, 96, 48


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
        self.form = dict

    def has_unfinished_requests(self):
        return self.unfinished

    def update_from_output(self, scheduler_output, model_runner_output):
        windows = scheduler_output.step.windows
        outputs = [name for name, window in windows.items() if window[2] != "gone"]
        spec_stats = None
        rows = iter(model_runner_output.sampled_token_ids)
        for name, (drafts, accepted, fate) in windows.items():
            ids = next(rows)
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
        shown = found if self.log_stats else None
        carrier = SimpleNamespace(outputs=outputs, scheduler_stats=shown)
        other = SimpleNamespace(outputs=[], scheduler_stats=None)
        return self.form({3: carrier, 0: other})


def hooked(name, cls):
    """A class like this one in a module of vLLM's, and NWOR's hooks on it."""
    module = ModuleType(name)
    hosted = type(cls.__name__, (cls,), {})
    setattr(module, cls.__name__, hosted)
    stats.install(module)
    return hosted


def hooked_scheduler(**arguments):
    return hooked(SCHEDULER, Scheduler)(**arguments)


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
    report |= dict(zip(NAMES, report.pop("counts"), strict=True))
    parts = ("committed_tokens", "rejected_tokens", "dropped_drafts")
    assert all(report[name] >= 0 for name in NAMES)
    assert report["tokens_staged"] == sum(report[part] for part in parts)
    return report


MIXED = Step(
    **{"a": (4, 2, "counted"), "b": (4, 3, "gone"), "c": (3, 3, "stops")},
    **{"d": (2, 1, "cleared"), "e": (0, 0, "counted")},
)
IDLE = Step(e=(0, 0, "counted"))
SILENT = Step(b=(4, 3, "gone"))
ONE_GONE = Step(a=(4, 1, "counted"), b=(3, 2, "gone"))
BOTH_COUNTED = Step(a=(4, 1, "counted"), b=(3, 2, "counted"))
# Its acceptance is open.
ONE_CLEARED = Step(a=(4, 1, "counted"), b=(3, 0, "cleared"))


# --- the identities -------------------------------------------------------------------


# Of 8 drafts that are scheduled, and counted by vLLM, those of b may not have run.
TRIMMED = Step(a=(4, 1, "counted"), b=(4, 0, "counted"))


@pytest.mark.parametrize(
    ("step", "found", "kinds", "method"),
    [
        *((step, counts(2, 7, 3), [], "ngram") for step in (ONE_GONE, BOTH_COUNTED)),
        (ONE_GONE, counts(2, 7, 3, rejected=5), ["split"], "ngram"),
        (ONE_GONE, counts(3, 7, 3), ["windows"], "ngram"),
        (ONE_GONE, counts(1, 7, 3), ["windows"], "ngram"),
        (ONE_GONE, counts(2, 8, 3), ["drafts"], "ngram"),
        (ONE_GONE, counts(2, 6, 3), ["drafts"], "ngram"),
        (ONE_GONE, counts(2, 7, 2), ["accepted"], "ngram"),
        (ONE_GONE, counts(2, 7, 4), ["accepted"], "ngram"),
        (ONE_GONE, counts(2, 4, 1), ["drafts", "accepted"], "ngram"),
        (ONE_GONE, counts(1, 4, 1), ["windows", "drafts", "accepted"], "ngram"),
        (BOTH_COUNTED, counts(2, 7, 3, invalid=2), ["worker"], "ngram"),
        *((BOTH_COUNTED, counts(2, 7, 3, in_shadow=n), [], "ngram") for n in range(3)),
        (BOTH_COUNTED, counts(2, 7, 3, in_shadow=3), ["modes"], "ngram"),
        (ONE_GONE, counts(1, 7, 3, in_shadow=2), ["modes", "windows"], "ngram"),
        *((ONE_CLEARED, counts(2, 7, num), [], "ngram") for num in (1, 4)),
        *((ONE_CLEARED, counts(2, 7, num), ["accepted"], "ngram") for num in (0, 5)),
        (TRIMMED, counts(1, 5, 1), ["windows", "drafts"], "ngram"),
        (TRIMMED, counts(1, 5, 1), [], "ngram_gpu"),
        (TRIMMED, counts(3, 9, 1), ["windows", "drafts"], "ngram_gpu"),
    ],
)
def test_each_identity_that_fails_is_a_breach_by_name(step, found, kinds, method):
    """Drafts trimmed by the worker are none where the method trims."""
    report = run(hooked_scheduler(method=method), step, (found,))

    assert metrics._logged == {f"breach of the {kind} identity" for kind in kinds}
    assert report["breaches"] == (2 if kinds == ["worker"] else len(kinds))
    # What is too much counts as dropped.
    drafts, accepted = step.counted
    assert report["committed_tokens"] == accepted
    assert report["dropped_drafts"] == max(found[1], step.counts[1]) - drafts
    num_windows, in_shadow = found[0], min(found[4], found[0])
    assert report["windows_stage"] == in_shadow
    assert report["windows_cow"] == num_windows - in_shadow


# --- the scheduler's hooks ------------------------------------------------------------


def test_a_scheduler_that_does_not_say_how_it_speculates_costs_no_counts():
    scheduler = hooked_scheduler()
    del scheduler.vllm_config
    assert run(scheduler, MIXED) == run(hooked_scheduler(), MIXED)


@pytest.mark.parametrize("part", ["pending", "publish"])
def test_a_failure_around_on_commit_costs_no_counts(part, monkeypatch):
    """Without a callback nothing is read, so nothing fails."""
    whole = run(hooked_scheduler(), MIXED)
    assert whole["breaches"] == 0
    monkeypatch.setattr(commits, "registered", [None])
    scheduler, num_breaches = hooked_scheduler(), (1, 1)
    if part == "publish":  # behind the report's leaving: told with the next one
        scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=())
        scheduler.kv_cache_manager = Mock()
        monkeypatch.setattr(commits, "pending", lambda *_: [None])
        num_breaches = 0, 1

    for num in num_breaches:
        assert run(scheduler, MIXED) == whole | {"breaches": num}
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises((AttributeError, TypeError)):
        run(scheduler, MIXED)


@pytest.mark.parametrize(
    ("broken", "payload", "num_windows"),
    [
        ({"form": list}, "truth", 4),
        ({"has_unfinished_requests": None}, "truth", 5),
        ({}, "counters", 4),
        ({}, (ZEROS[1:],), 4),
        ({}, ((1, 4, 2, 2, 1, 0, 0, -64, 0),), 4),
        ({}, ((1, 4, 2, 2, -1, 0, 0, 64, 0),), 4),
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
    assert report["windows_stage"] + report["windows_cow"] == num_windows
    assert metrics._logged == {"breach of the report identity"}
    assert len([r for r in caplog.records if "breach" in r.message]) == 1
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises((AttributeError, TypeError, ValueError)):
        play()


@pytest.mark.parametrize(
    ("name", "payload", "news", "twice"),
    [
        ("fallbacks", (ZEROS, {"stale_log": 2}), {"stale_log": 2}, {"stale_log": 4}),
        ("audit", (ZEROS, {}, [], {"steps": 9}), {"steps": 9}, {"steps": 18}),
        ("info", (ZEROS, {}, INFO), INFO, INFO),
        ("breaches", ((*ZEROS[:6], 1, 0, 0),), 1, 2),
    ],
)
def test_news_leave_with_the_step_that_has_them_and_once(name, payload, news, twice):
    """A step that ran as vanilla, whose windows are no breach, but for a slot. Or with
    the next one that has outputs, added up."""
    scheduler = hooked_scheduler()
    nothing = {**dict.fromkeys(NAMES, 0), "fallbacks": {}}

    assert run(scheduler, MIXED, payload) == nothing | {name: news}
    assert run(scheduler, IDLE, None) is None
    assert run(scheduler, SILENT, payload) is None
    assert run(scheduler, MIXED, payload) == nothing | {name: twice}


def test_a_step_that_vllm_fails_to_process_leaves_nothing_behind():
    scheduler = hooked_scheduler()

    def fail(outputs):
        assert "make_spec_decoding_stats" in vars(scheduler)
        raise RuntimeError("vLLM's own")

    scheduler.form = fail
    with pytest.raises(RuntimeError, match=r"^vLLM's own$"):
        run(scheduler, MIXED, invalid={"a": 1})
    assert "make_spec_decoding_stats" not in vars(scheduler)
    scheduler.form = dict
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


# Windows; whether statistics are on, the step ran as vanilla, a grammar forbids drafts.
STEPS = st.tuples(WINDOWS, st.booleans(), st.booleans(), st.booleans())


@settings(deadline=None)
@given(st.lists(STEPS, max_size=12))
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
            num_windows, staged, _, _, in_shadow, *others = step.counts
            restored, _, shadow_copied, kept = others
            modes = in_shadow, num_windows - in_shadow
            parts = accepted, drafts - accepted, staged - drafts
            rises = *modes, staged, *parts, restored, shadow_copied, kept, 0
            expected.update(dict(zip(NAMES, rises, strict=True)))
        found.update({name: report[name] for name in NAMES if report})

    assert "make_spec_decoding_stats" not in vars(scheduler)
    assert found == expected


@settings(deadline=None)
@given(
    WINDOWS.filter(lambda windows: any(window[0] for window in windows.values())),
    st.integers(0, 8),
    st.integers(-2, 2),
)
def test_one_wrong_number_of_the_worker_never_passes(windows, column, error):
    """Nor is it added otherwise where each identity is looked at in any case: with one
    more request in the schedule."""
    step = Step(**windows, z=(0, 0, "counted"))
    wrong = list(step.counts)
    wrong[column] = max(wrong[column] + error, 0)  # zero less one is zero
    is_wrong = tuple(wrong) != step.counts and column in (0, 1, 2, 3, 6)
    is_wrong |= wrong[4] > wrong[0]

    reports = [
        run(hooked_scheduler(), step, (tuple(wrong),), **more)
        for more in ({}, {"none": []})
    ]

    assert reports[0] == reports[1]
    if any(wrong[:2]):  # nothing at all is a step run as vanilla
        assert (reports[0]["breaches"] > 0) == is_wrong


# --- the front end --------------------------------------------------------------------


def test_a_report_is_a_field_that_a_front_end_without_nwor_skips():
    fields = [("num", int, 0), ("lists", list[int], dataclasses.field(default=None))]
    vanilla, extended = (dataclasses.make_dataclass(n, fields) for n in "ve")
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    # A decoder that was made before, as of an engine without NWOR.
    decode(encode(extended(2, [3])), type=extended)
    for cls in (extended, SchedulerStats) * 2:
        stats.extend(cls, "here", "nwor_report")
    for report in (None, {"counts": [1, 2], "fallbacks": {"stale_log": 3}}):
        sent = extended(2, [3])
        if report:
            sent.nwor_report = report
        assert decode(encode(sent), type=vanilla) == vanilla(2, [3])
        assert decode(encode(sent), type=extended).nwor_report == report
    dataclasses.replace(extended(2, [3]))
    assert SchedulerStats(3).nwor_report is None
    with pytest.raises(HostMismatch, match="SchedulerStats is not a dataclass"):
        stats.extend(None, "vllm.v1.metrics.stats.SchedulerStats", "nwor_report")


class FrontEnd:
    """vLLM's stat logger in as few lines, hooked, with a registry of its own."""

    def __init__(self, *engines):
        registry = self.registry = prometheus_client.CollectorRegistry()

        class PrometheusStatLogger:
            _counter_cls = partial(prometheus_client.Counter, registry=registry)
            _gauge_cls = partial(prometheus_client.Gauge, registry=registry)

            def __init__(self, vllm_config, engine_indexes):
                for collector in list(registry._collector_to_names):
                    registry.unregister(collector)
                labels = {engine: ["tiny", str(engine)] for engine in engine_indexes}
                self.per_engine_labelvalues = labels
                self.recorded = []

            def record(
                self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx=0
            ):
                self.recorded.append(scheduler_stats)

        self.make = hooked(LOGGERS, PrometheusStatLogger)
        self.engines = engines or (0,)
        self.start()

    def start(self):
        """A logger, or another one in its place."""
        self.logger = self.make(None, self.engines)

    def record(self, engine=0, news=(), **counts):
        """A SchedulerStats with such a report; vLLM's logger gets it, too."""
        found = SchedulerStats()
        found.nwor_report = {"counts": [counts.get(name, 0) for name in NAMES]}
        found.nwor_report |= news
        self.logger.record(found, None, mm_cache_stats=None, engine_idx=engine)
        assert self.logger.recorded.pop() is found

    def value(self, name, engine=0, **labels):
        labels = {"model_name": "tiny", "engine": str(engine), **labels}
        return self.registry.get_sample_value(f"vllm:nwor_{name}", labels)

    def info(self):
        """What is shown for the modes of INFO and OTHER_INFO."""
        labels = {**INFO[0]._asdict(), "group": "0"}
        return [self.value("info", **labels | {"resolved": m}) for m in ("cow", "off")]


@pytest.mark.parametrize("audit", ["off", "log"])
def test_a_report_is_counted_for_its_engine(audit, monkeypatch):
    """All series are there from the start. That of an engine nobody knows is lost, and
    nothing else."""
    monkeypatch.setenv("VLLM_NWOR_AUDIT", audit)
    front = FrontEnd(0, 1)
    for name, *mode in SERIES:
        labels = dict(zip(["mode"], mode, strict=False))
        assert front.value(f"{name}_total", 1, **labels) == 0
    shown = [front.value("fallbacks_total", 1, reason=reason) for reason in FALLBACKS]
    assert shown == [0] * len(FALLBACKS)

    for _ in range(2):
        news = {"fallbacks": {"over_capacity": 3}, "audit": {"steps": 7}}
        front.record(1, news, windows_stage=2, windows_cow=1, restored_bytes=10)
        for found in (SchedulerStats(), None):
            front.logger.record(found, None, None)

    assert front.value("windows_total", 1, mode="stage") == 4
    assert front.value("windows_total", 1, mode="cow") == 2
    assert front.value("restored_bytes_total", 1) == 20
    assert front.value("windows_total", 0, mode="stage") == 0
    assert front.value("fallbacks_total", 1, reason="over_capacity") == 6
    assert front.value("audit_steps_total", 1) == (14 if audit == "log" else None)
    front.record(9, windows_cow=1)
    assert metrics._logged == {"a report was lost"}
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(KeyError):
        front.record(9, windows_cow=1)


def test_counts_that_nobody_collects_do_not_pile_up(monkeypatch, tmp_path):
    """None wait where another process collects."""
    monkeypatch.setattr(metrics, "MAX_WAITING", 5)
    front = FrontEnd()
    for _ in range(20):
        front.record(windows_cow=1)
        assert len(front.logger.nwor_prometheus[0]._waiting[0]) <= 5
    assert front.value("windows_total", mode="cow") == 20
    assert front.value("windows_total", mode="cow") == 20

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    front.start()
    front.record(windows_cow=1)
    assert not front.logger.nwor_prometheus[0]._waiting[0]


def test_info_is_shown_once_for_each_group_and_by_loggers_created_anew():
    """What was shown before goes to zero, as counters of new loggers do."""
    front = FrontEnd()
    front.record(news={"info": INFO})
    front.record(windows_cow=5)
    assert front.info() == [1, None]
    front.record(news={"info": OTHER_INFO})
    assert front.info() == [0, 1]

    for news, shown in (({}, [None, 1]), ({"info": INFO}, [1, 0])):
        front.start()
        assert front.value("windows_total", mode="cow") == 0
        front.record(news=news, windows_cow=1)
        assert front.value("windows_total", mode="cow") == 1
        assert front.info() == shown


def test_emit_metrics_0_counts_and_creates_nothing(monkeypatch):
    """Also in a process that was hooked before."""
    front = FrontEnd()
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", "0")

    front.start()
    front.record(windows_cow=1)

    assert list(front.registry.collect()) == []
    assert run(hooked_scheduler(), MIXED) is None


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


def test_rows_of_info_come_with_the_message_that_an_engine_is_ready(monkeypatch):
    """A logger that is created afterwards shows them; no message, an empty one and one
    of an engine without NWOR change nothing. A worker may have no rows."""
    fields = [("max_model_len", int), ("engine", int, dataclasses.field(default=0))]
    ready = dataclasses.make_dataclass("Ready", fields)
    for _ in range(2):
        info._extend_response(ready)
    bare = msgspec.msgpack.encode({"max_model_len": 3})
    runner = SimpleNamespace(nwor_state=SimpleNamespace(infos=INFO))
    workers = [SimpleNamespace(model_runner=of) for of in (runner, SimpleNamespace())]
    rpc = SimpleNamespace(collective_rpc=lambda method: list(map(method, workers)))
    core = SimpleNamespace(model_executor=rpc, engine_index=1)
    assert info._initialize_kv_caches(lambda config: "done", core, (3,), {}) == "done"
    sent = msgspec.msgpack.encode(ready(7))
    monkeypatch.setattr(metrics, "_info", {})
    for payload in (b"", bare, sent):
        assert metrics.known_info() == {}
        info._apply_ready_response(lambda payload: None, None, (payload,), {})
    assert msgspec.msgpack.decode(sent, type=ready).max_model_len == 7
    gauge = Mock()
    names = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    NworPrometheus(Mock(), Mock(return_value=gauge), names)
    gauge.labels.assert_called_once_with("tiny", "1", *map(str, INFO[0]))
    gauge.labels().set.assert_called_once_with(1)


def test_an_engine_starts_where_its_workers_cannot_be_asked(caplog):
    core = SimpleNamespace(model_executor=None)
    assert info._initialize_kv_caches(lambda config: "done", core, (3,), {}) == "done"
    assert "no vllm:nwor_info before the first request" in caplog.text
