# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' harness on a CPU engine (MLA, whose cache has rows as on a GPU).

Modes off, cow and stage run in processes of their own under the byte oracle. The
verdict must be clean, and each of its checks must fail when its input is changed. A
stand-in for the V2 runner, which needs a GPU: tests/unit/test_gpu_harness.py.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.gpu import compare, test_offloading
from tests.gpu.engines import BY_NAME
from tests.gpu.pool import OFF, ON, Pool

STAGE, CPU, FEW = "stage", BY_NAME["cpu-mla"], BY_NAME["cpu-mla-few-seats"]
ROW, NAME = "batch 8", "eight/0"
# vLLM would compile the function that counts the ranks of logprobs.
QUICK = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("engines"))
    run = partial(pool.run, "matrix", **QUICK)
    specs, modes = (CPU, CPU, CPU, FEW), (OFF, ON, STAGE, STAGE)
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(run, specs, modes)
        return dict(zip((*modes[:3], FEW.name), found, strict=True))


def failing(runs, spec=CPU):
    """The checks that report a problem, or that could not be judged."""
    verdict = compare.judge(spec, runs)
    kinds = verdict["problems"] | {k: verdict[k] for k in ("unsettled", "unmet")}
    return {kind for kind, texts in kinds.items() if texts}


@pytest.mark.parametrize("mode", [ON, STAGE])
def test_a_correct_engine_passes(runs, mode, monkeypatch):
    monkeypatch.setattr(compare, "ON", mode)
    chain = {OFF: runs[OFF], mode: runs[mode]}
    verdict = compare.judge(CPU, chain)
    assert failing(chain) == set(), verdict
    assert verdict["rows"][ROW]["dirty_slots_restored"] > 0
    assert verdict["facts"]["resolved"] == [mode]


def test_windows_with_and_without_a_seat_are_judged_apart(runs, monkeypatch):
    monkeypatch.setattr(compare, "ON", STAGE)
    few, all_have = ({OFF: runs[OFF], STAGE: runs[name]} for name in (FEW.name, STAGE))
    assert failing(few, FEW) == set(), compare.judge(FEW, few)
    for runs_of_other, spec in ((few, CPU), (all_have, FEW)):
        assert failing(runs_of_other, spec) == {"bytes", "counters"}


def change(found, *path):
    """Sets the value at `path` to the last argument, or to what it returns for the old
    value."""
    *keys, last, value = path
    for key in keys:
        found = found[key]
    found[last] = value(found[last]) if callable(value) else value


def one_more(number):
    return number + 1


def other_digests(positions, digests):
    """Different digests at these positions of each step's three."""
    return [[n + (i in positions) for i, n in enumerate(step)] for step in digests]


PLAIN, WATCHED, SEEN = ("plain", ROW), ("watched", ROW), ("watched", ROW, "watch", 0)
STEP, DIGESTS = (*SEEN, "steps", 0), (ON, *SEEN, "digests")
ERRORS = [
    (mode, name, ROW, "finish", NAME, "error")
    for mode in (OFF, ON)
    for name in compare.PASSES
]
# What is changed, and the checks that must fail.
CHANGES = {
    "a token": ([(ON, *PLAIN, "tokens", NAME, 0, one_more)], {"outputs"}),
    "a logprob": ([(ON, *WATCHED, "logprobs", NAME, 0, [[1, 0.5, 1]])], {"outputs"}),
    "a batch": ([(ON, *PLAIN, "batches", 1, [[NAME, 1]])], {"outputs"}),
    "a byte": ([(*DIGESTS, partial(other_digests, (1, 2)))], {"digests"}),
    "block ids only": ([(*DIGESTS, partial(other_digests, (0, 1)))], set()),
    "off has stray writes": (
        [(OFF, *SEEN, "violations_by_kind", "stray", 1)],
        {"vanilla"},
    ),
    "off leaves nothing": ([(OFF, *SEEN, "violations_by_kind", {})], {"vanilla"}),
    "a violation": ([(ON, *SEEN, "violations", [{"kind": "a"}])], {"bytes"}),
    "nothing was dirty": ([(ON, *SEEN, "num_dirty_slots", 0)], {"bytes"}),
    "no protected layer": ([(ON, "facts", "protected", "layers", [])], {"bytes"}),
    "nothing accepted": ([(ON, *SEEN, "num_accepted", 0)], {"rows", "counters"}),
    "a breach": ([(ON, *WATCHED, "counters", "nwor_breaches", 1)], {"counters"}),
    "a fallback": ([(ON, *PLAIN, "counters", "nwor_fallbacks/a", 1)], {"counters"}),
    "restored bytes": (
        [(ON, *WATCHED, "device_counters", "restored_bytes", one_more)],
        {"counters"},
    ),
    "a graph": ([(mode, *STEP, "graph", "FULL") for mode in (OFF, ON)], {"rows"}),
    "off varies": ([(OFF, *PLAIN, "tokens", NAME, 0, one_more)], {"unsettled"}),
    # Equal outputs from different batches: the written bytes depend on the batch.
    "off batches differently": (
        [(OFF, *PLAIN, "batches", 1, []), (ON, *STEP, "tokens", one_more)],
        {"unsettled"},
    ),
    "not finished": ([(ON, "finished", False), (ON, "watched", {})], {"started"}),
    "off ends with an error": (ERRORS, {"unmet"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_check_fails_when_its_input_is_changed(runs, name):
    changes, wanted = CHANGES[name]
    changed = {mode: copy.deepcopy(runs[mode]) for mode in (OFF, ON)}
    for mode, *path in changes:
        change(changed[mode].report, *path)
    assert failing(changed) == wanted


def test_loads_are_verified(tmp_path):
    spec = BY_NAME["cpu-loads-both"]
    run = test_offloading.audited(Pool(tmp_path), spec, **QUICK)[ON]
    test_offloading.check_loads(run.whole(), spec)
