# SPDX-License-Identifier: Apache-2.0
"""The audit on a model runner, in a world without vLLM (audit_world.py): findings on
their way to outputs, failures, sleep, fingerprints of weights, and memory."""

import copy
import gc
import json
import pickle
import re
import resource
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch
from vllm.device_allocator import cumem
from vllm.distributed import kv_transfer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from tests.helpers.logs import nwor_log
from tests.kernels.audit_world import (  # noqa: F401
    EVERYTHING,
    GAMMA,
    NUM_BLOCKS,
    NUM_LAYERS,
    OTHER,
    TEXT,
    N,
    Work,
    World,
    computed,
    each_runner,
    mix,
    prefilled,
    synchronize,
)
from tests.kernels.reference import fields, random_bytes
from tests.kernels.test_validation import every_second
from vllm_nwor.audit import build, fingerprints
from vllm_nwor.audit import findings as audit_findings
from vllm_nwor.audit import observer as audit_observer
from vllm_nwor.audit.findings import AuditError, Finding, Findings, Found, Writer
from vllm_nwor.audit.observer import RunnerAudit
from vllm_nwor.audit.state import Audit
from vllm_nwor.audit.states import Sizes as StateSizes
from vllm_nwor.audit.tables import AuditedGroup, GroupShape, num_bytes
from vllm_nwor.config import AUDIT_FILE, AuditMode, NworConfig, NworConfigError
from vllm_nwor.hooks import caches, connectors, worker
from vllm_nwor.hooks.runner import RunnerState
from vllm_nwor.layout.caches import ExpectedCaches, ExpectedLayer, Loads
from vllm_nwor.layout.tables import DeviceMemory

# --- the tables -----------------------------------------------------------------------


def without_host(world, count, *blocks, rows=None):
    """Steps before each of which blocks change, and that the host does not ask for."""
    found, world.found = world.found, lambda: []
    for _ in range(count):
        for cache in world.caches:
            cache[list(blocks)] += 1
        world.step(**(rows or {"a": 0, "b": 0}))
    world.found = found


def test_more_findings_than_the_table_holds_are_counted():
    world = World(num_blocks=90, max_tokens=400)
    assert world.runs("a", [7] * 4 * 80, range(1, 85)) == []
    without_host(world, 1, *range(1, 81), rows={"a": 0})
    num_findings = 4 * 80
    assert world.counts("findings") == (num_findings,)
    kept = world.audit.outbox.take(world.audit.outbox.num_sent)
    assert (len(kept.findings), kept.num_lost) == (256, num_findings - 256)
    assert world.step(a=0) == []


def test_findings_of_steps_that_nobody_asked_for_wait():
    """More of them than there are slots for their way to the host. A claim whose op
    failed is given again."""
    world = prefilled()
    outbox = world.audit.outbox
    assert outbox.claim() is outbox.claim()
    without_host(world, 6, 1)
    kept = outbox.take(outbox.num_sent)
    assert (kept.num_lost, kept.num_steps) == (0, 6)
    expected = [step for step in range(2, 8) for _ in range(N)]
    assert fields(kept.findings, "step") == expected
    assert outbox.take(outbox.num_sent) == Found()


class LateOutput:
    """An asynchronous one, as vLLM has them."""

    def __init__(self, output=None):
        self.output = output or SimpleNamespace(req_ids=["a"])

    def get_output(self):
        return self.output


def attached(world, block=15):
    """The output of a step before which a block changed: 15 is no request's, 1 is in
    a's table."""
    without_host(world, 1, block)
    return world.ends(LateOutput())


def begins_next(world):
    synchronize(world.device)
    world.begins(SchedulerOutput.make_empty())


def raises_with_its_output(world):
    """What was found is left to the output of its step."""
    output = attached(world, 1)
    begins_next(world)
    with pytest.raises(AuditError, match="changed"):
        output.get_output()


def test_an_output_waits_for_its_own_step_alone(monkeypatch):
    """vLLM has the next step running when it reads it."""
    world = prefilled()
    findings, outbox = world.observer.findings, world.audit.outbox

    def arrives(arrival):
        assert not outbox._lock.locked()  # the next step needs it
        synchronize(world.device)
        arrival.query.return_value = True

    arrivals = [Mock(**{"query.return_value": False}) for _ in range(2)]
    for arrival in arrivals:
        arrival.synchronize.side_effect = partial(arrives, arrival)
    slots = [(*next(outbox._slots)[:2], arrival) for arrival in arrivals]
    monkeypatch.setattr(outbox, "_slots", iter(slots))
    outputs = [attached(world, block) for block in (15, 1)]

    outputs[0].get_output()
    assert [arrival.synchronize.called for arrival in arrivals] == [True, False]
    assert not findings.counts
    outputs[1].get_output()
    assert arrivals[1].synchronize.called
    assert findings.counts["changed"] > 0


def test_a_step_that_writes_late_is_awaited():
    """Else checksums are of what the slots held before it."""
    world = World()
    world.add("a", TEXT[:6], [1, 2, 3])
    for num_rows in (6, 1, 1, 1):
        assert not world.step(a=num_rows, is_late=True)
    assert world.counts("findings contents") == (0, 30)


@pytest.mark.parametrize(
    "ends", ["the output", "a transfer", "the next step", "the audit's end"]
)
def test_what_runs_beside_a_step_ends_with_it(monkeypatch, ends):
    """What comes then may write to the caches, or to the audit's tables."""
    world, arrival, beside = World(strict=False), Mock(), object()
    outbox = world.audit.outbox
    slot = *next(outbox._slots)[:2], arrival
    monkeypatch.setattr(outbox, "_slots", iter([slot]))
    monkeypatch.setattr(outbox, "stream", beside)
    world.runs("a", TEXT[:6], [1, 2])
    assert arrival.method_calls[0] == call.record(beside)
    for _ in range(2):
        if ends == "the output":
            world.ends(LateOutput())
        elif ends == "a transfer":
            world.transfers([[1]])
        elif ends == "the audit's end":
            world.observer.leave()
            begins_next(world)
        else:
            begins_next(world)
    arrival.wait.assert_called_once_with()
    # Of a step that failed before its end there is no event.
    outbox._claimed = slot
    with patch.object(torch.cuda, "current_stream") as current:
        outbox.join()
    current().wait_stream.assert_called_once_with(beside)
    # An error of the audit's is none of the engine's, also after its end.
    monkeypatch.setattr(outbox, "join", Mock(side_effect=RuntimeError))
    begins_next(world)


def test_a_second_stream_is_first_used_late(monkeypatch):
    """After vLLM's graphs were captured. On V2 all of resolve runs there, so that what
    vLLM lent for the step is kept until it ends."""
    world = World()
    audit, (group,) = world.audit, world.audit.groups
    if world.device.type == "cpu":
        monkeypatch.setattr(
            torch.cuda, "Stream", Mock(return_value=Mock(cuda_stream=1))
        )
        monkeypatch.setattr(torch.cuda, "Event", Mock(return_value=Mock(cuda_event=1)))
    audit.beside_from = 3
    for _ in range(3):  # as vLLM's dummy runs
        begins_next(world)
    world.add("a", TEXT, [1, 2, 3])
    for number in range(6):
        assert not world.step(a=1)
        assert audit._lent[0].num_tokens == 1
        is_there = number >= 3
        columns = map(bool, group.tables[group._beside].tolist())
        assert list(columns) == [is_there, is_there, is_there and world.is_v2]
        assert (audit.outbox.stream is not None) is is_there
    begins_next(world)
    assert audit._lent is None


def test_an_output_that_was_read_is_not_kept():
    """Nor does it wait for Python's collector, with all of a step's host memory."""
    world = prefilled()
    output = world.ends(LateOutput())
    end, found = weakref.ref(output), output.output
    gc.disable()
    try:
        assert output.get_output() is found
        del output
        assert end() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_read", [0, 2, 4])
def test_a_rank_whose_outputs_nobody_reads_logs_what_it_found(num_read):
    """As all but the first of a tensor parallel group, and any rank as long as vLLM
    warms up. vLLM has two steps in flight: until there are more, an output will take it
    along, or be kept back. num_read: the first outputs that are read at once."""
    world = prefilled(mode=AuditMode.RAISE)
    logged = []
    for number, block in enumerate((15, 15, 15, 15, 1, 15, 15)):
        output = attached(world, block)
        if number < num_read:
            output.get_output()
        if number == 4:
            late = output
        begins_next(world)
        logged.append(world.observer.findings.counts["changed"] > 0)

    assert logged == [False] * 6 + [True]
    assert late.get_output() is late.output


@pytest.mark.parametrize("num_before", [0, 5])
def test_what_comes_of_a_step_is_left_to_its_output(num_before):
    """num_before: outputs that nobody read, as those of vLLM's warm-up."""
    world = prefilled(mode=AuditMode.RAISE)
    for _ in range(num_before):
        attached(world)
        begins_next(world)
    raises_with_its_output(world)


class Interleaved:
    """An attribute at whose next change another thread comes between read and write."""

    def __init__(self, value):
        self.value, self.meanwhile = value, None

    def __get__(self, audit, kind):
        value, meanwhile, self.meanwhile = self.value, self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return value

    def __set__(self, audit, value):
        self.value = value


def test_an_output_that_is_read_while_one_is_attached_counts_as_read(monkeypatch):
    """Else the findings of outputs that should raise are taken by the next steps."""
    world = prefilled(mode=AuditMode.RAISE)
    (name,) = (name for name in vars(world.observer) if name.startswith("num_"))
    number = Interleaved(vars(world.observer).pop(name))
    monkeypatch.setattr(RunnerAudit, name, number, raising=False)
    output = world.ends(LateOutput())
    for _ in range(5):
        number.meanwhile = output.get_output
        output = world.ends(LateOutput())
    raises_with_its_output(world)


class Payload:
    """Of an output, while which is made another thread counts."""

    weights_changed, given = None, {}

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def with_audit(self, counts, *_):
        self.meanwhile()
        self.counts = counts
        return self


@pytest.mark.parametrize("loads", [Loads.NONE, Loads.KNOWN])
def test_a_dummy_run_of_v2_is_no_step_of_the_audit(loads, monkeypatch):
    """It passes execute_model alone, perhaps next to an OffloadingConnector, which
    vLLM switches off for it: it has no metadata, and submits nothing."""
    world = prefilled(loads=loads)
    of_connector = SimpleNamespace(_unsubmitted_store_jobs=[(1, object(), object())])
    connector = SimpleNamespace(_vllm_config=None, connector_worker=of_connector)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    dummy = SchedulerOutput.make_empty()
    dummy.num_scheduled_tokens = {"_dummy_req_0": 1}
    for _ in range(3):
        world.begins(dummy)
        assert world.step(a=Work(1, (77, 78), 1), b=1) == []
    for _ in range(3):
        world.begins(dummy)
    world.spoil(0, 1 * N)
    assert fields(world.step(a=1, b=1), "kind slot") == [("changed", 1 * N)]
    assert world.audit.outbox.num_sent == 5


def test_what_is_counted_while_an_output_takes_the_counts_along_is_not_lost():
    """Nor what an output takes along that nobody reads: one of vLLM's warm-up."""
    world = prefilled()
    outbox = world.audit.outbox

    def count_more():
        without_host(world, 3, 15)
        take = partial(world.observer._take, outbox.num_sent)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    outputs = []
    without_host(world, 1, 15)
    for meanwhile in (count_more, count_more, lambda: None):
        output = SimpleNamespace(req_ids=["a"], nwor_stats=Payload(meanwhile))
        outputs.append(output)
        with patch.object(audit_observer, "REPORT_SECONDS", 0):
            world.ends(output)
    # The first one is not read.
    counts = [output.nwor_stats.counts() for output in outputs[1:]]
    assert [count["steps"] for count in counts] == [4, 3]


# An op's argument, by number; what becomes of it, and what is said.
REFUSED = [
    ("resolve", 1, lambda t: torch.full_like(t, 4), "row_seats[0] is 4; must be betwe"),
    ("resolve", 2, lambda t: torch.full_like(t, 9), "query_start_loc[0] is 9; must"),
    ("resolve", 3, every_second, "block_table has stride 2 in dimension 1; must be 1"),
    ("resolve", 1, torch.max, "row_seats has shape []; must have 1 dim"),
    ("resolve", 2, torch.max, "query_start_loc has shape []; must have 1 dim"),
    ("plan", 3, torch.max, "block_table has shape []; must have 2 dimensions"),
    ("resolve", 15, lambda _: torch.tensor([[2, 0, 0]]), "hits[0] is of row 2; must"),
    ("resolve", 15, lambda _: torch.tensor([[0, 0]]), "hits"),
    ("blocks", 2, lambda t: t - 2, "blocks[1] is -1; must be between"),
    ("blocks", 2, lambda t: t + 14, f"blocks[0] is {NUM_BLOCKS}; must be between"),
    ("blocks", 1, lambda _: 3, "event is 3; must be between 0 and 2"),
    ("blocks", 3, lambda t: t + 1, "values[0] is 1; must be between 0 and 0, because"),
    ("blocks", 3, lambda t: t - 1, "values[0] is -1; must be between 0 and 0, because"),
    ("snapshot", 0, lambda t: t[:-1].clone(), "for each table of layers"),
    ("snapshot", 0, torch.Tensor.int, "tables has dtype Int; must be Long"),
]


@pytest.mark.parametrize(("op", "number", "change", "said"), REFUSED)
def test_invalid_arguments_are_refused(op, number, change, said):
    world = prefilled()
    world.audit._ops = copy.copy(world.audit._ops)
    called = getattr(world.audit._ops, f"audit_{op}")

    def spoiled(*args):
        called(*args[:number], change(args[number]), *args[number + 1 :])

    setattr(world.audit._ops, f"audit_{op}", spoiled)
    # On CUDA the host knows no value of what is there: it is left alone.
    is_value = said.startswith(("row_seats[", "query_start_loc["))
    is_known = World.device.type == "cpu" or not is_value
    refused = pytest.raises(RuntimeError, match=re.escape(said))
    with refused if is_known else nullcontext():
        world.audit.snapshot()
        world.transfers([[2, 1]])
        assert world.step(a=1, b=0) == []


@pytest.mark.parametrize("budget", [0, EVERYTHING])
def test_the_reserved_memory_is_enough(budget):
    shape = GroupShape(0, N, N, NUM_BLOCKS, 8, num_stored=5)
    sizes = 4, 64, budget > 0
    size = num_bytes(shape, NUM_LAYERS, *sizes)
    layers = World(budget=budget).audit.groups[0].layers

    def memory(size):
        storage = torch.empty(size, dtype=torch.uint8, device=World.device)
        return DeviceMemory(World.device, storage)

    enough = memory(size)
    group = AuditedGroup(shape, layers, *sizes, enough)
    assert Audit([group], budget, 4, [N], enough).num_bytes <= size
    with pytest.raises(ValueError, match="does not fit the storage"):
        AuditedGroup(shape, layers, *sizes, memory(900))


def test_the_memory_of_an_8b_model_is_0_15_percent_of_its_cache(monkeypatch):
    room = 100 << 30
    # Keys and values of 8 heads of 128 bf16, for 16 tokens.
    layers = [ExpectedLayer("FullAttentionSpec", 2 * 8 * 128 * 2 * 16, 16, None, True)]
    layers *= 32
    cache_config = SimpleNamespace()
    vllm_config = SimpleNamespace(cache_config=cache_config, kv_transfer_config=None)

    def reserved(is_hooked, num_blocks=None, layers=layers):
        # An engine of an earlier test may have hooked the connector in this process.
        monkeypatch.setattr(connectors, "is_hooked", lambda: is_hooked)
        limits = SimpleNamespace(
            device=torch.device("cpu"),
            step_refusal="",
            max_num_batched_tokens=8192,
            max_model_len=8192,
            num_rows=1024,
            num_drafts=4,
            loads=caches.loads_of(vllm_config),
        )
        expected = ExpectedCaches(limits, layers, room, num_blocks)
        return build.reserved_bytes(expected, SimpleNamespace(audit_mib=32))

    size = reserved(False)
    assert 0.0012 * room < size <= 0.0015 * room
    vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="OffloadingConnector")
    # A connector whose stores are not seen: digests of a step's blocks.
    assert reserved(False) == size + (1 + 2 * (8192 // 16 + 1024)) * 8 * 8
    assert 1.1 * size < reserved(True) <= 0.0015 * room
    assert reserved(True, 1000) < size / 10
    # A group of drafts' layers alone is not audited.
    other = ExpectedLayer("SlidingWindowSpec", layers[0].page_bytes, 16, 64, True, 1)
    draft = replace(other, is_target=False, group=2)
    of_group = reserved(True, 1000, [other])
    size = reserved(True, 1000)
    assert reserved(True, 1000, [*layers, other, draft]) == size + of_group
    # Recurrent states: of each layer a convolution of 3 + 4 columns, and a matrix.
    shapes = (7, 8192), (32, 128, 128)
    state = ExpectedLayer("MambaSpec", 1 << 22, 8192, None, False, 0, shapes)
    states = [replace(state, group=1 + n // 12) for n in range(48)]
    sizes = StateSizes(96, 4, 7, 1024, 1000, 4, 0, 24)
    assert reserved(True, 1000, [*layers, *states]) == size + sizes.num_bytes()
    cached = [replace(state, is_cached=True) for state in states]
    recorded = sizes._replace(num_records=1000).num_bytes()
    assert reserved(True, 1000, [*layers, *cached]) == size + recorded
    # And rings, of 8 tokens each.
    ring = ExpectedLayer("CircularBufferSpec", 1 << 12, 12, None, False, 5, ratio=8)
    more = StateSizes(99, 5, 7, 1024, 1000, 4, 0, 24, 8)
    assert more.num_kept == 8
    layers = [*layers, *states, *[ring] * 3]
    assert reserved(True, 1000, layers) == size + more.num_bytes()


@pytest.mark.parametrize("has_ended", [False, True])
def test_raise_keeps_the_tokens_of_an_asynchronous_output_from_leaving(has_ended):
    """It fails when it is read: also if the next step gives none, or an empty one, or
    is the one in which the audit itself fails."""
    world = prefilled(mode=AuditMode.RAISE)
    without_host(world, 1, 1)
    late = LateOutput()
    assert world.ends(late) is late
    for nothing in (None, EMPTY_MODEL_RUNNER_OUTPUT):
        assert world.ends(nothing) is nothing
    if has_ended:
        world.observer.leave()
    with pytest.raises(AuditError, match=r"\d+ findings, the first: changed"):
        late.get_output()
    assert late.get_output() is late.output


def test_a_file_whose_write_fails_half_way_is_the_old_one(tmp_path):
    writer = Writer("a-1", 1, 1)
    finding = Finding("changed", 0, "layer", 1, 0, 5, 0, "a-1", writer, 2, "0x0", "0x1")
    path = tmp_path / "findings.json"
    findings = Findings(str(path), {"vllm": "0.32.0"})
    empty = json.loads(path.read_text())
    assert (empty["vllm"], empty["steps"], empty["num_findings"]) == ("0.32.0", 0, 0)
    found = Found([finding], num_steps=9, num_lost=2)
    findings.take_in(found)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nwor_log() as lines:
        # No file may be larger: what goes beyond is not written, and an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))
        try:
            findings.take_in(found)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert any("could not be written: [Errno 27]" in line for line in lines)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    findings.take_in(found)
    written = json.loads(path.read_text())
    assert written["counts"] == {"changed": 3}
    assert (written["steps"], written["num_findings"]) == (27, 9)


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path):
    rank = SimpleNamespace(world_size=2, rank=1)
    there, missing = tmp_path / "a.json", tmp_path / "missing" / "a.json"
    assert build._path_of(rank, AUDIT_FILE, str(there)) == f"{there}.1"
    for path in (missing, tmp_path):
        said = rf"^VLLM_NWOR_AUDIT_FILE='{path}' is not allowed \(.*; allowed values: e"
        with pytest.raises(NworConfigError, match=said):
            build.build(rank, NworConfig(audit_file=str(path)), None)


def test_a_line_a_minute_and_at_the_end_says_nothing_was_found(tmp_path, monkeypatch):
    """The file is as new as the last line."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(audit_findings, "time", clock)
    world = prefilled()
    world.observer.findings = Findings(str(path := tmp_path / "findings.json"))
    of_runner = SimpleNamespace(model_runner=world.runner)
    with nwor_log() as lines:
        for clock.now in (1059.0, 1060.0, 1061.0, 1119.0, 1120.0, 1121.0):
            without_host(world, 300)
            world.ends(SimpleNamespace(req_ids=["a"]))
            assert json.loads(path.read_text())["steps"] == (
                0 if clock.now < 1060 else 600 if clock.now < 1120 else 1500
            )
        without_host(world, 2)
        worker._shutdown(lambda: lines.append("ended"), of_runner, (), {})
    said = [f"INFO NWOR audit: {num} steps, 0 findings" for num in ("600", "1,500")]
    assert lines == [*said, "INFO NWOR audit: 1,802 steps, 0 findings", "ended"]
    assert json.loads(path.read_text())["steps"] == 1802


class Slotted:
    """An asynchronous output that takes no other get_output."""

    __slots__ = ("output",)

    def get_output(self):
        return self.output


class Sealed:
    """An output that takes no payload."""

    __slots__ = ("req_ids",)

    def __init__(self):
        self.req_ids = ["a"]


def slotted():
    output = Slotted()
    output.output = Sealed()
    return output


def without_metadata():
    scheduled = vars(SchedulerOutput.make_empty()).copy()
    del scheduled["kv_connector_metadata"]
    return SimpleNamespace(**scheduled)


def connector():
    """A connector that fills a block which is no request's."""
    ids = SimpleNamespace(block_ids=[15], group_sizes=(1,), block_indices=(0,))
    job = SimpleNamespace(dst_spec=ids, src_spec=None)
    return SimpleNamespace(
        _vllm_config=None,
        _connector_metadata=SimpleNamespace(load_jobs={1: job}),
        connector_worker=SimpleNamespace(spec=object()),
    )


def lives_on(world, scheduled=None, connector=connector, output=LateOutput):
    """What vLLM calls of the hooks, from a step's start to the worker's end. Each
    gives what vLLM's own function gave."""
    world.runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
    of_runner = SimpleNamespace(model_runner=world.runner)
    with patch.object(connectors, "_watched", [world.runner]):
        world.begins((scheduled or SchedulerOutput.make_empty)())
        ends = connectors._start_load_kv(lambda: "loads", connector(), (), {})
        assert ends == "loads"
    without_host(world, 1)
    late = output()
    assert world.ends(late) is late
    if hasattr(late, "get_output"):
        assert late.get_output() is late.output
    worker._wake_up(lambda tags: None, of_runner, (None,), {})
    assert worker._shutdown(lambda: "ended", of_runner, (), {}) == "ended"


def test_what_vllm_calls_of_the_hooks_is_followed():
    """Else the next test proves nothing."""
    world = prefilled(loads=Loads.KNOWN)
    with nwor_log() as lines:
        lives_on(world)
    assert lines == ["INFO NWOR audit: 1 steps, 0 findings"]
    assert world.audit.groups[0].records[:, ::3].count_nonzero() == 0


# What fails: a part of the audit, or what the hooks read.
FAILING = {
    "step_started": lambda world: (world.audit, "begin_step"),
    "tables_final": lambda world: (world.audit, "plan"),
    "sampled": lambda world: (world.audit, "resolve"),
    "blocks_transferred": lambda world: (world.audit, "on_transfer"),
    "output_ready": lambda world: (world.observer, "_sent"),
    "the output is read": lambda world: (world.audit.outbox, "take"),
    "caches_lost": lambda world: (world.audit, "lose_cache"),
    "shut_down": lambda world: (world.observer.findings, "conclude"),
    "no scheduler output": {"scheduled": object},
    "no metadata of a connector": {"scheduled": without_metadata},
    "no connector": {"connector": object},
    "an output with slots": {"output": slotted},
    "a payload has no place": {"output": Sealed},
    "nor when it is read": {"output": lambda: LateOutput(Sealed())},
}


@pytest.mark.parametrize("part", FAILING)
@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_of_the_audit_ends_the_audit_and_not_the_engine(strict, part):
    world = prefilled(strict=strict, loads=Loads.KNOWN)
    fails, state = FAILING[part], world.runner.nwor_state
    is_read = isinstance(fails, dict)
    with (
        nwor_log() as lines,
        nullcontext()
        if is_read
        else patch.object(*fails(world), Mock(side_effect=ValueError, spec=[])),
        pytest.raises((AttributeError, ValueError)) if strict else nullcontext(),
    ):
        lives_on(world, **(fails if is_read else {}))
    line = "ERROR NWOR audit: disabled after an internal error"
    errors = [line for line in lines if not line.startswith("INFO")]
    assert errors == ([] if strict else [line])
    assert state.named("audit") is (world.observer if strict else None)
    # It lives on with the runner: what was launched before still writes to its memory.
    assert state.removed == ([] if strict else [world.observer])


def test_a_failure_of_an_earlier_audit_leaves_the_runners_own_alone():
    """The caches may be bound anew while an output of before is read."""
    world = prefilled(strict=False)
    output, earlier = attached(world), world.observer
    own = world.runner.nwor_state = RunnerState([world.observes()])
    with patch.object(world.audit.outbox, "take", side_effect=ValueError):
        assert output.get_output() is output.output
    assert earlier._has_failed
    assert [observer.name for observer in own.observers] == ["audit"]
    assert own.removed == []


@pytest.mark.parametrize(
    ("tags", "is_known"), [(None, False), (["kv_cache"], False), (["weights"], True)]
)
def test_a_wake_up_of_the_cache_makes_it_another_one(tags, is_known):
    """What slots held, as one of a rejected draft, is not known any more."""
    world = prefilled(is_undone=True)
    world.finish("a")
    of_runner = SimpleNamespace(model_runner=world.runner)
    worker._wake_up(lambda tags: None, of_runner, (tags,), {})
    for cache in world.caches:
        cache.zero_()
    found = world.runs("c", OTHER[:4], [1, 2], rejected=(77,))
    assert set(fields(found, "kind slot")) == (
        {("changed", 2 * N)} if is_known else set()
    )


@pytest.fixture
def allocator(monkeypatch):
    """vLLM's own allocator of sleep mode, without its memory: of one part of the
    weights, and of two parts of the KV cache."""
    for name in ("create_and_map", "unmap_and_release", "libcudart"):
        monkeypatch.setattr(cumem, name, Mock())
    monkeypatch.setattr(torch.accelerator, "empty_cache", Mock())
    found = object.__new__(cumem.CuMemAllocator)
    handle = (0, 8, 0, 0)
    found.pointer_to_data = {
        number: cumem.AllocationData(handle, tag)
        for number, tag in enumerate(["weights", "kv_cache", "kv_cache"])
    }
    worker.install(cumem)
    return found


OFFLOADED = {
    "nothing": (None, True),
    "weights, as level 1 does": ("weights", True),
    "the caches": (("kv_cache",), False),
}


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_a_framework_that_drives_the_allocator_itself(
    allocator, offloaded, sleeps, monkeypatch
):
    """Content is lost when the caches wake up, if it was not copied to the host; of
    runners that use sleep mode."""
    tags, is_dropped = OFFLOADED[offloaded]
    monkeypatch.setattr(worker, "sleeps", lambda runner: sleeps)
    world = computed()
    monkeypatch.setattr(worker, "bound_runners", [world.runner])
    world.finish("a")
    allocator.sleep(offload_tags=tags)
    allocator.wake_up(["weights"])
    assert world.runs("b", TEXT[:5], [1, 3], hit=N) == []
    allocator.wake_up(tags=["kv_cache"])
    found = world.runs("c", TEXT[:5], [1, 4], hit=N)
    is_lost = is_dropped and sleeps
    assert (
        fields(found, "kind found") == [("wrong_prefix", audit_findings.LOST)] * is_lost
    )
    world.step(b=0)
    allocator.wake_up()  # nothing is asleep
    assert world.runs("d", [*TEXT[:4], 3], [4, 5], hit=0) == []
    assert world.runs("e", [*TEXT[:4], 4], [4, 6], hit=N) == []


def test_an_allocator_that_is_not_as_expected_ends_the_audit(allocator, monkeypatch):
    monkeypatch.setattr(worker, "sleeps", lambda runner: True)
    world = prefilled(strict=False)
    monkeypatch.setattr(worker, "bound_runners", [world.runner])
    allocator.pointer_to_data[1] = SimpleNamespace(tag="kv_cache")
    with nwor_log() as lines, pytest.raises(AttributeError):
        allocator.wake_up()  # vLLM's own
    assert lines == ["ERROR NWOR audit: disabled after an internal error"]


def test_a_hit_on_what_a_sleep_dropped():
    """Each block of it once; not what was written since, nor a rejected draft."""
    world = computed()
    world.finish("a")
    assert world.runs("b", OTHER[:N], [3]) == []
    world.audit.lose_cache()
    assert world.runs("c", OTHER[:N], [5, 7], rejected=(77,)) == []
    world.finish("b", "c")
    found = world.runs("d", TEXT[:9], [1, 2, 6], hit=2 * N)
    assert fields(found, "kind position owner writer found") == [
        ("wrong_prefix", 0, "d", "a", audit_findings.LOST),
        ("wrong_prefix", N, "d", "a", audit_findings.LOST),
    ]
    assert [finding.writer.step for finding in found] == [1, 1]
    assert world.runs("e", [*OTHER[:N], 1], [5, 8], hit=N) == []
    found = world.runs("f", [*OTHER[: N + 1], 1], [5, 7], hit=N + 1)
    assert fields(found, "kind position writer found") == [
        ("wrong_prefix", N, "c", "0x0")
    ]


class Words:
    """Words of parameters, as step.WeightWords."""

    def __init__(self, device, count=1500):
        bits = random_bytes(count * 8, seed=3).view(torch.int64)
        self.values = bits.to(device)
        self.num_looks, self.moved = 0, False

    def addresses(self, device):
        assert device == self.values.device
        self.moved = False
        return [self.values[i].data_ptr() for i in range(len(self.values))]

    def have_moved(self):
        return self.moved

    def fingerprint(self):
        found = enumerate(self.values.tolist(), 1)
        return sum(mix(word + i * GAMMA) for i, word in found) % 2**64


@pytest.fixture
def weighed(monkeypatch):
    """A world whose audit takes a fingerprint in every third step, and its words."""
    monkeypatch.setattr(fingerprints, "EVERY", 3)
    world = World(num_groups=2)
    words = Words(World.device)
    world.audit.fingerprints.watch(words)
    world.add("a", TEXT[:4], [1, 2, 3, 4, 5])
    return world, words


def taken(world):
    """The fingerprint and its step in each group's header on the device."""
    headers = [group.findings[0].tolist() for group in world.audit.groups]
    return [(value % 2**64, step) for *_, value, step in headers]


def test_a_fingerprint_is_a_sum_over_words_in_the_steps_in_which_it_is_due(weighed):
    """Of one group; the ops of other steps read no word."""
    world, words = weighed
    for step, last in enumerate([1, 1, 3, 3, 3, 6], 1):
        assert world.step(a=0) == []
        if step == last:
            before = words.fingerprint()
        assert taken(world) == [(before, last), (0, 0)]
        assert world.audit.groups[0].tables[world.audit.groups[0]._words].sum() == 0
        words.values[step * 200] ^= 1 << step


def test_a_change_is_said_until_somebody_looks(weighed):
    """Between the last step with the old fingerprint, and one with another."""
    world, words = weighed
    found = []

    def steps(count):
        for _ in range(count):
            world.step(a=0)
            found.append(world.audit.fingerprints.take())

    steps(4)
    words.values[1400] += 1
    steps(5)
    assert found == [None] * 5 + [(3, 6), None, None, (3, 9)]
    words.values[1400] -= 1  # what somebody looks at is what counts
    steps(3)
    words.values[0] += 1
    words.num_looks += 1
    found.clear()
    steps(7)
    assert found == [None] * 7
    words.values[0] -= 1
    steps(2)
    assert found[-1] == (18, 21)


def test_words_that_may_be_freed_are_not_read(weighed):
    world, words = weighed
    world.step(a=0)
    words.moved = True
    for _ in range(2):
        world.step(a=0)
    assert world.audit.fingerprints.take() == (1, 3)
    assert taken(world)[0][1] == 1
    words.values = words.values.clone() + 1
    words.num_looks += 1
    world.step(a=0)
    assert world.audit.fingerprints.take() is None
    assert taken(world)[0] == (words.fingerprint(), 4)


def test_a_model_without_words_has_no_fingerprint():
    world = World()
    world.audit.fingerprints.watch(Words(World.device, count=0))
    world.add("a", TEXT[:4], [1, 2])
    world.step(a=0)
    assert taken(world) == [(0, 0)]


def test_a_change_leaves_with_the_next_output_that_has_requests(weighed):
    """Where another process reads it, and metrics may be off."""
    world, words = weighed
    for _ in range(2):
        world.step(a=0)
    words.values += 1
    world.step(a=0)
    assert not hasattr(world.ends(SimpleNamespace(req_ids=[])), "nwor_weights")
    output = world.ends(SimpleNamespace(req_ids=["a"]))
    assert output.nwor_weights == (1, 3)
    assert pickle.loads(pickle.dumps(output)).nwor_weights == (1, 3)
    assert not hasattr(world.ends(SimpleNamespace(req_ids=["a"])), "nwor_weights")
