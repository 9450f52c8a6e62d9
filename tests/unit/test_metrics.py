# SPDX-License-Identifier: Apache-2.0
"""Counters without an engine: from the runner's output to the scheduler to Prometheus.

Scheduler and stat loggers are stand-ins with vLLM's signatures; outputs and Prometheus
objects are real. The same on a real engine: tests/integration/test_stats_inprocess.py.
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
from vllm_nwor.base import errors
from vllm_nwor.base.payload import StepPayload
from vllm_nwor.base.wrap import HostMismatch, extend
from vllm_nwor.hooks import front_end, info, outputs, weights
from vllm_nwor.hooks import scheduler as scheduler_hooks
from vllm_nwor.hooks.ledger import LOGGERS, SCHEDULER
from vllm_nwor.hooks.runner import RunnerState
from vllm_nwor.metrics import COUNTERS, FALLBACKS, SERIES, GroupInfo, NworPrometheus
from vllm_nwor.step import Observer

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
    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setattr(metrics, "_info", {})
    # The stand-ins are hooked in place of vLLM's classes.
    monkeypatch.setattr("vllm_nwor.base.wrap._hooks", [])


# --- counters on a runner's output ----------------------------------------------------


@pytest.mark.parametrize("name", [None, "model_runner_output", "_model_runner_output"])
def test_counters_are_attached_to_the_output_and_read_with_it(name, caplog):
    """Without counters, or if reading them fails, the output is unchanged."""
    memory = array.array("q", [0] * 9)
    before, after = memoryview(array.array("q", range(9))), memoryview(memory)
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    result = SimpleNamespace(**{name: output}) if name else output
    for take_payload, num_logged in ((lambda: None, 0), (lambda: 1 // 0, 1)):
        outputs.attach(result, [take_payload])
        assert "nwor_stats" not in vars(output)
        text = f"no statistics on a runner's output: {type(result).__name__}"
        assert caplog.text.count(text) == num_logged

    outputs.attach(result, [lambda: StepPayload((before, after))])
    memory[:] = array.array("q", range(10, 100, 10))

    risen = (10, 19, 28, 37, 46, 55, 64, 73, 82)
    assert output.nwor_stats.read() == (risen,)
    assert pickle.loads(pickle.dumps(output)).nwor_stats == (risen,)


@pytest.mark.parametrize(
    "result", [EMPTY, SimpleNamespace(model_runner_output=EMPTY), None, 3]
)
def test_vllms_shared_empty_output_is_never_changed(result):
    lost = "the payload was taken, and is lost"
    outputs.attach(result, [lambda: pytest.fail(lost)])
    assert not hasattr(EMPTY, "nwor_stats")


# --- a scheduler's steps --------------------------------------------------------------


def counts(
    windows, staged, accepted, *, rejected=None, in_shadow=None, restored=0, invalid=0
):
    """One step's counters, as the worker counts. Columns that are not given have
    different values, so that a test notices if two are exchanged."""
    rejected = staged - accepted if rejected is None else rejected
    in_shadow = min(windows, 1) if in_shadow is None else in_shadow
    return windows, staged, accepted, rejected, in_shadow, restored, invalid, 96, 48


class Step:
    """One step. windows: request -> (drafts, accepted, fate).

    fate: "counted"; "gone": finished in flight, vLLM skips its ids; "cleared": vLLM
    emptied its row; "stops": counted, then vLLM truncates its ids.
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
        """The worker's counters."""
        drafts = [window[0] for window in self.windows.values() if window[0]]
        accepted = sum(window[1] for window in self.windows.values())
        rejected = sum(drafts) - accepted
        return counts(len(drafts), sum(drafts), accepted, restored=64 * rejected)

    @property
    def counted(self):
        """Drafts and accepted drafts that vLLM counts."""
        counted = [w for w in self.windows.values() if w[2] in COUNTED]
        return sum(window[0] for window in counted), sum(w[1] for w in counted)


class Scheduler:
    """Counts and skips windows as vLLM's scheduler does."""

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
    """A subclass of `cls` in a module with this name, with NWOR's hooks on it."""
    module = ModuleType(name)
    hosted = type(cls.__name__, (cls,), {})
    setattr(module, cls.__name__, hosted)
    {SCHEDULER: scheduler_hooks, LOGGERS: front_end}[name].install(module)
    return hosted


def hooked_scheduler(**arguments):
    return hooked(SCHEDULER, Scheduler)(**arguments)


def run(scheduler, step, payload="truth", invalid=None, **more_drafts):
    """Runs one step; returns its report, or None. invalid: drafts of each request that
    its grammar forbids. more_drafts: scheduled for requests without an output."""
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
# The acceptance of b is unknown.
ONE_CLEARED = Step(a=(4, 1, "counted"), b=(3, 0, "cleared"))


# --- the identities -------------------------------------------------------------------


# vLLM schedules and counts 8 drafts; the worker may not have run those of b.
TRIMMED = Step(a=(4, 1, "counted"), b=(4, 0, "counted"))


@pytest.mark.parametrize(
    ("step", "found", "kinds", "method"),
    [
        *((step, counts(2, 7, 3), [], "ngram") for step in (ONE_GONE, BOTH_COUNTED)),
        (ONE_GONE, counts(2, 7, 3, rejected=5), ["split"], "ngram"),
        (ONE_GONE, counts(3, 7, 3), ["windows"], "ngram"),
        (ONE_GONE, counts(2, 8, 3), ["drafts"], "ngram"),
        (ONE_GONE, counts(2, 7, 2), ["accepted"], "ngram"),
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
def test_each_failed_identity_is_counted_as_a_breach(step, found, kinds, method):
    """Trimmed drafts are no breach if the speculative method trims."""
    report = run(hooked_scheduler(method=method), step, (found,))

    assert errors._logged == {f"breach of the {kind} identity" for kind in kinds}
    assert report["breaches"] == (2 if kinds == ["worker"] else len(kinds))
    # Surplus drafts count as dropped.
    drafts, accepted = step.counted
    assert report["committed_tokens"] == accepted
    assert report["dropped_drafts"] == max(found[1], step.counts[1]) - drafts
    num_windows, in_shadow = found[0], min(found[4], found[0])
    assert report["windows_stage"] == in_shadow
    assert report["windows_cow"] == num_windows - in_shadow


# --- the scheduler's hooks ------------------------------------------------------------


def test_a_scheduler_without_vllm_config_keeps_the_counters():
    scheduler = hooked_scheduler()
    del scheduler.vllm_config
    assert run(scheduler, MIXED) == run(hooked_scheduler(), MIXED)


@pytest.mark.parametrize("part", ["pending", "publish"])
def test_a_failure_in_on_commit_loses_no_counters(part, monkeypatch):
    """Without a callback on_commit reads nothing, and cannot fail."""
    whole = run(hooked_scheduler(), MIXED)
    assert whole["breaches"] == 0
    monkeypatch.setattr(commits, "registered", [None])
    scheduler, num_breaches = hooked_scheduler(), (1, 1)
    if part == "publish":  # after the report was sent: counted in the next one
        scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=())
        scheduler.kv_cache_manager = Mock()
        monkeypatch.setattr(scheduler_hooks, "pending", lambda *_: [None])
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
def test_a_failure_in_the_scheduler_hook_is_a_breach_and_loses_no_output(
    broken, payload, num_windows, monkeypatch, caplog
):
    """Counters that were already taken are sent with the next step."""
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
    assert errors._logged == {"breach of the report identity"}
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
def test_each_optional_report_field_is_sent_once(name, payload, news, twice):
    """With the step that has it (here one that ran as plain vLLM, whose windows are no
    breach), or added up with the next step that has outputs."""
    scheduler = hooked_scheduler()
    nothing = {**dict.fromkeys(NAMES, 0), "fallbacks": {}}

    assert run(scheduler, MIXED, payload) == nothing | {name: news}
    assert run(scheduler, IDLE, None) is None
    assert run(scheduler, SILENT, payload) is None
    assert run(scheduler, MIXED, payload) == nothing | {name: twice}


def test_an_exception_in_vllms_scheduler_leaves_no_state():
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


# Drawing from a list is ten times as fast as nested strategies.
ALL_WINDOWS = [
    (drafts, accepted, fate)
    for drafts in range(6)
    for accepted in range(drafts + 1)
    for fate in ("counted", "gone", "cleared", "stops")
]
WINDOWS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sampled_from(ALL_WINDOWS), max_size=6
)


# Windows; statistics are on; the step ran as plain vLLM; a grammar forbids drafts.
STEPS = st.tuples(WINDOWS, st.booleans(), st.booleans(), st.booleans())


@settings(deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_the_totals_add_up_whatever_is_aborted(steps):
    """The drafts of a dropped window are neither committed nor rejected."""
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
def test_any_single_wrong_counter_is_a_breach(windows, column, error):
    """Both if all identities hold at once and if each is checked by itself, which one
    more scheduled request causes; the sums are the same."""
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
    if any(wrong[:2]):  # all zeros: the step ran as plain vLLM
        assert (reports[0]["breaches"] > 0) == is_wrong


# --- the front end --------------------------------------------------------------------


def test_a_front_end_without_nwor_skips_the_report_field():
    fields = [("num", int, 0), ("lists", list[int], dataclasses.field(default=None))]
    vanilla, extended = (dataclasses.make_dataclass(n, fields) for n in "ve")
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    # Makes a decoder before the field is added, as an engine without NWOR does.
    decode(encode(extended(2, [3])), type=extended)
    for cls in (extended, SchedulerStats) * 2:
        extend(cls, "here", "nwor_report")
    for report in (None, {"counts": [1, 2], "fallbacks": {"stale_log": 3}}):
        sent = extended(2, [3])
        if report:
            sent.nwor_report = report
        assert decode(encode(sent), type=vanilla) == vanilla(2, [3])
        assert decode(encode(sent), type=extended).nwor_report == report
    dataclasses.replace(extended(2, [3]))
    assert SchedulerStats(3).nwor_report is None
    with pytest.raises(HostMismatch, match="SchedulerStats is not a dataclass"):
        extend(None, "vllm.v1.metrics.stats.SchedulerStats", "nwor_report")


class FrontEnd:
    """A stand-in for vLLM's stat logger, hooked, with a registry of its own."""

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
        """Creates the logger, or another one in its place."""
        self.logger = self.make(None, self.engines)

    def record(self, engine=0, news=(), **counts):
        """Records a SchedulerStats with this report; vLLM's logger gets it, too."""
        found = SchedulerStats()
        found.nwor_report = {"counts": [counts.get(name, 0) for name in NAMES]}
        found.nwor_report |= news
        self.logger.record(found, None, mm_cache_stats=None, engine_idx=engine)
        assert self.logger.recorded.pop() is found

    def value(self, name, engine=0, **labels):
        labels = {"model_name": "tiny", "engine": str(engine), **labels}
        return self.registry.get_sample_value(f"vllm:nwor_{name}", labels)

    def info(self):
        """The values of the gauge for the modes of INFO and OTHER_INFO."""
        labels = {**INFO[0]._asdict(), "group": "0"}
        return [self.value("info", **labels | {"resolved": m}) for m in ("cow", "off")]


@pytest.mark.parametrize("audit", ["off", "log"])
def test_a_report_is_counted_for_its_engine(audit, monkeypatch):
    """All series exist from the start. Only the report of an unknown engine is lost."""
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
    assert errors._logged == {"a report was lost"}
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(KeyError):
        front.record(9, windows_cow=1)


def test_uncollected_counts_take_bounded_memory(monkeypatch, tmp_path):
    """With PROMETHEUS_MULTIPROC_DIR another process collects: none are kept."""
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


def test_the_info_gauge_shows_one_row_per_group():
    """A replaced row goes to zero; a new logger shows the rows again."""
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


def test_emit_metrics_0_creates_no_metrics(monkeypatch):
    """Also in a process that was hooked before."""
    front = FrontEnd()
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", "0")

    front.start()
    front.record(windows_cow=1)

    assert list(front.registry.collect()) == []
    assert run(hooked_scheduler(), MIXED) is None


@pytest.mark.parametrize("emits", ["0", "1"])
def test_an_unannounced_change_of_weights_needs_no_metrics(emits, monkeypatch):
    """The hooks are on the scheduler, and it is said in the step that brings it."""
    monkeypatch.setenv("VLLM_NWOR_EMIT_METRICS", emits)
    monkeypatch.setenv("VLLM_NWOR_AUDIT", "log")
    for name, method in (
        ("schedule", lambda self: None),
        ("_connector_finished", lambda self, request: (False, None)),
    ):
        monkeypatch.setattr(Scheduler, name, method, raising=False)
    changed = Mock()
    monkeypatch.setattr(weights, "changed_unannounced", changed)
    scheduler, output = hooked_scheduler(), MIXED.output
    of_step = SimpleNamespace(
        step=MIXED, num_invalid_spec_tokens=None, scheduled_spec_decode_tokens={}
    )
    scheduler.update_from_output(of_step, output)
    assert changed.call_args_list == []
    output.nwor_weights = 64, 128
    scheduler.update_from_output(of_step, output)
    assert changed.call_args_list == [call(scheduler, (64, 128))]


def test_metrics_use_only_labels_inc_and_set():
    """Ray's stand-ins for prometheus_client have nothing else; 0 is not added."""
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


def test_info_rows_travel_with_the_engines_ready_message(monkeypatch):
    """A logger that is created afterwards shows them. An empty message, one from an
    engine without NWOR, and a worker without rows change nothing."""
    fields = [("max_model_len", int), ("engine", int, dataclasses.field(default=0))]
    ready = dataclasses.make_dataclass("Ready", fields)
    for _ in range(2):
        info._extend_response(ready)
    bare = msgspec.msgpack.encode({"max_model_len": 3})
    state = RunnerState([Observer("audit"), Observer("transaction", infos=INFO)])
    runner = SimpleNamespace(nwor_state=state)
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


def test_an_engine_starts_if_its_workers_cannot_be_asked(caplog):
    core = SimpleNamespace(model_executor=None)
    assert info._initialize_kv_caches(lambda config: "done", core, (3,), {}) == "done"
    assert "no vllm:nwor_info before the first request" in caplog.text
