# SPDX-License-Identifier: Apache-2.0
"""on_commit: who may register, what callbacks may do, and the steps that are not told.

The numbers themselves, on vLLM's schedulers: tests/integration/test_commits.py.
"""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import vllm_nwor
from vllm_nwor import Commit, commits
from vllm_nwor.config import NworConfigError
from vllm_nwor.hooks import _wrap, stats

SIZE = 16
FULL = importlib.import_module("vllm.v1.kv_cache_interface").FullAttentionSpec(
    block_size=SIZE, num_kv_heads=1, head_size=16, dtype=None
)


class Scheduler:
    """Takes a step in as vLLM's does, in the fewest lines: `after` is what it does."""

    log_stats = False

    def __init__(self, *requests, after=lambda: None):
        self.requests = {request.request_id: request for request in requests}
        groups = [
            SimpleNamespace(kv_cache_spec=FULL),
            SimpleNamespace(kv_cache_spec=None),
        ]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.kv_cache_manager, self.after = self, after

    def get_blocks(self, request_id):
        blocks = [SimpleNamespace(block_id=100 + i) for i in range(8)]
        return SimpleNamespace(blocks=(blocks, blocks))

    def make_spec_decoding_stats(
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens
    ):
        pass

    def update_from_output(self, scheduler_output, model_runner_output):
        self.after()
        return {}


def request(name="a", **changes):
    """32 rows are computed, and a window of 1 + 4 is in flight."""
    found = SimpleNamespace(
        request_id=name,
        num_computed_tokens=37,
        num_in_flight_tokens=5,
        num_tokens=33,
        num_stale_output_tokens=0,
        is_finished=lambda: False,
    )
    vars(found).update(changes)
    return found


def step(scheduler, ids=(5, 5, 9), drafts=4):
    """One step in which each request has a window; what callbacks were told."""
    names = list(scheduler.requests)
    for found in scheduler.requests.values():
        found.num_tokens += len(ids)
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1 + drafts),
        scheduled_spec_decode_tokens=dict.fromkeys(names, [1] * drafts),
        num_invalid_spec_tokens=None,
    )
    output = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[list(ids) for _ in names],
    )
    scheduler.update_from_output(scheduled, model_runner_output=output)


@pytest.fixture
def hooked(monkeypatch):
    """The class above, with NWOR's hook; it is as if vLLM's own had it."""
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setattr(commits, "registered", [])
    monkeypatch.setattr(_wrap, "_hooks", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    module = ModuleType(stats.SCHEDULER)
    module.Scheduler = type("Scheduler", (Scheduler,), {})
    module.Scheduler.update_from_output = Scheduler.update_from_output
    stats.install(module)
    return module.Scheduler


@pytest.fixture
def told(hooked):
    """What a callback is called with, call by call."""
    found = []
    vllm_nwor.on_commit(found.append)
    return found


def test_a_step_is_told_with_the_blocks_of_its_rows(hooked, told):
    step(hooked(request("a"), request("b", num_computed_tokens=25)))

    of_a = Commit("a", 32, 35, 2, ((102,), ()))
    assert told == [[of_a, Commit("b", 20, 23, 2, ((101,), ()))]]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_finished": lambda: True},  # its blocks wait for a KV connector
        {"num_stale_output_tokens": 5},
        {"num_stale_output_tokens": 0, "async_tokens_to_discard": 5},  # vLLM 0.26
        {"num_computed_tokens": 0},  # preempted
    ],
)
def test_what_vllm_will_ignore_is_not_told(hooked, told, changes):
    step(hooked(request(**changes), request("b")))
    assert [commit.request_id for (commit,) in told] == ["b"]
    step(hooked(request(**changes)))  # nothing left: no call
    assert len(told) == 1


@pytest.mark.parametrize(("ids", "num_computed"), [((), 37), ((5, 5, 9), 16)])
def test_cleared_rows_and_those_whose_load_failed_are_not_told(
    hooked, told, ids, num_computed
):
    found = request()
    taken_in = {"num_computed_tokens": num_computed}

    step(hooked(found, after=lambda: vars(found).update(taken_in)), ids)

    assert told == []


def test_a_stop_within_the_drafts_takes_its_blocks_along(hooked, told):
    found = request(num_computed_tokens=35, num_tokens=31)

    # Rows 30 to 33 are kept; the request ends with the token at 31.
    step(hooked(found, after=lambda: vars(found).update(num_tokens=32)), (5, 5, 5, 9))

    assert told == [[Commit("a", 30, 32, 1, ((101,), ()))]]


def test_a_callback_that_raises_is_logged_once_counted_and_kept(hooked, caplog):
    told = []

    def failing(step):
        told.append(step)
        raise KeyError("mine")

    registration = vllm_nwor.on_commit(failing)
    after = vllm_nwor.on_commit(told.append)
    for _ in range(3):
        step(hooked(request()))

    assert (registration.num_errors, after.num_errors, len(told)) == (3, 0, 6)
    (record,) = caplog.records
    assert "failing" in record.message
    assert record.exc_info[0] is KeyError
    registration.remove()
    registration.remove()
    step(hooked(request()))
    assert (registration.num_errors, len(told)) == (3, 7)


def test_a_failure_of_ours_loses_the_commits_and_nothing_else(
    hooked, told, monkeypatch
):
    scheduler, done = hooked(request(), after=lambda: done.append(1)), []
    monkeypatch.setattr(commits, "pending", None)

    step(scheduler)
    assert (told, done) == ([], [1])
    assert scheduler.nwor_stats.report["counts"][-1] == 1  # a breach
    monkeypatch.setenv("VLLM_NWOR_STRICT", "always")
    with pytest.raises(TypeError):
        step(scheduler)


def test_without_a_callback_nothing_is_read(hooked, monkeypatch):
    monkeypatch.setattr(stats, "_telling", None)

    step(hooked(request()))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"VLLM_NWOR_MODE": "off"}, "VLLM_NWOR_MODE is off; allowed are cow and stage"),
        ({"VLLM_NWOR_EMIT_METRICS": "0"}, "VLLM_NWOR_EMIT_METRICS is 0; allowed is 1"),
    ],
)
def test_where_no_step_is_counted_it_is_refused(
    hooked, monkeypatch, settings, sentence
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(NworConfigError, match=sentence):
        vllm_nwor.on_commit(pytest.fail)
    assert commits.registered == []


def test_a_scheduler_without_the_hook_is_named(hooked, monkeypatch):
    """VLLM_PLUGINS that leaves nwor out, for one."""
    monkeypatch.setattr(_wrap, "_hooks", [])
    monkeypatch.setitem(sys.modules, stats.SCHEDULER, ModuleType(stats.SCHEDULER))

    with pytest.raises(RuntimeError, match="imported without NWOR's hook"):
        vllm_nwor.on_commit(print)
    monkeypatch.delitem(sys.modules, stats.SCHEDULER)
    vllm_nwor.on_commit(print)  # it will be hooked when it is imported
