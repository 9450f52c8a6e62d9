# SPDX-License-Identifier: Apache-2.0
"""The audit's state and ops on a small cache of its own: no vLLM, every byte known.

`World` is a scheduler and a model in a few lines: requests with texts and blocks, three
layers whose bytes for a token follow from the token, its position and the layer. A test
runs steps, spoils one thing, and expects exactly one finding, or none.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import pickle
import re
import resource
import threading
import weakref
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
import torch
from vllm.device_allocator import cumem
from vllm.distributed import kv_transfer
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from tests.helpers.logs import nwor_log
from tests.kernels.conftest import DEVICES
from tests.kernels.reference import random_bytes
from vllm_nwor import ops
from vllm_nwor.audit import build, fingerprints, judge, state, tables
from vllm_nwor.audit import findings as audit_findings
from vllm_nwor.audit import observer as audit_observer
from vllm_nwor.audit.findings import AuditError, Finding, Findings, Found, Writer
from vllm_nwor.audit.loads import COMPUTED, CUT, FOUND, LOADED, TAIL, zeros_of
from vllm_nwor.audit.observer import RunnerAudit
from vllm_nwor.audit.requests import Handover
from vllm_nwor.audit.state import Audit
from vllm_nwor.audit.states import Sizes as StateSizes
from vllm_nwor.audit.states import States
from vllm_nwor.audit.tables import AuditedGroup, GroupShape, num_bytes
from vllm_nwor.config import (
    AUDIT_FILE,
    AuditMode,
    NworConfig,
    NworConfigError,
    StaleMode,
)
from vllm_nwor.hooks import caches, connectors, runner_v1, runner_v2, worker
from vllm_nwor.hooks.runner import RunnerState, execute_model, sample_tokens
from vllm_nwor.hooks.scheduled import ScheduledStep
from vllm_nwor.hooks.states import StateMetadata
from vllm_nwor.layout.caches import ExpectedCaches, ExpectedLayer, Loads
from vllm_nwor.layout.kv_layout import packed_layout, row_layout
from vllm_nwor.layout.states import StateGroup
from vllm_nwor.layout.tables import DeviceMemory, LayerCache
from vllm_nwor.step import LoadedAdapters, Observer, Transfer, Undone, Weights

N = 4  # slots a block
NUM_BLOCKS = 16
NUM_LAYERS = 3
HEADS, WIDTH = 2, 9  # 18 bytes a slot: two words, and a part of one
EVERYTHING = 1 << 30


@pytest.fixture(
    autouse=True,
    params=[(device, is_v2) for device in DEVICES for is_v2 in (False, True)],
    ids=lambda param: f"{param[0]}-{'v2' if param[1] else 'v1'}",
)
def device(request):
    """Every World is on it, and is of one of vLLM's runners."""
    name, World.is_v2 = request.param
    ops.load(name)
    World.device = torch.device(name)
    return World.device


@dataclass
class Request:
    """text: prompt and what was sampled. computed: tokens in the cache. images: the
    identifier of each, the position of its first token, and how many it has."""

    text: list[int]
    blocks: list[int]
    computed: int = 0
    is_opaque: bool = False
    images: tuple[tuple[str | None, int, int], ...] = ()


class Work(NamedTuple):
    """What a step does for a request: `num` rows of its text, then drafts, of which
    the first `accepted` are right."""

    num: int
    drafts: tuple[int, ...] = ()
    accepted: int = 0


class Runner(SimpleNamespace):
    """What the hooks read of a model runner."""

    __hash__, __eq__ = object.__hash__, object.__eq__


@dataclass
class World:
    """is_undone: rejected slots are restored, as in mode cow; staged: the rest of what
    is said of them; restored: the requests of which that is true, None for what
    is_undone says. On the CPU the last of
    several layers is packed (its slots are columns of a block). is_v2: the V2 runner's
    hooks see its steps, and its requests have numbers, which are seats. slot_size:
    heads, and bytes of each.

    can_say: whether the scheduler's hook works. local: of what a request found, the
    tokens that the scheduler knows to have been in the cache. copied: pairs of blocks.
    loading: adapters that vLLM loads in the next step, behind its plan, and their
    contents.
    preempted: requests. mode, strict: the configuration. state_groups: behind the
    others."""

    device: ClassVar[torch.device]
    is_v2: ClassVar[bool]
    budget: int = EVERYTHING
    is_undone: bool = False
    can_say: bool = True
    staged: tuple[Any, ...] = ()
    restored: set[str] | None = None
    window: int = 0
    loads: Loads = Loads.NONE
    num_groups: int = 1
    num_stored: int = 0
    num_digests: int = 0
    num_blocks: int = NUM_BLOCKS
    num_layers: int = NUM_LAYERS
    slot_size: tuple[int, int] = (HEADS, WIDTH)
    max_tokens: int = 64
    mode: AuditMode = AuditMode.LOG
    strict: bool = True
    state_groups: Sequence[StateGroup] = ()

    def __post_init__(self):
        heads, width = self.slot_size
        size = (self.num_layers, self.num_blocks, heads, N, width)
        caches = random_bytes(math.prod(size), seed=7).view(size)
        self.caches = list(caches.to(self.device))
        layouts = list(map(row_layout, self.caches))
        if self.device.type == "cpu" and self.num_layers > 1:
            columns = self.caches[-1].view(self.num_blocks, heads * width, N)
            starts = torch.arange(heads * width) * N
            ones = torch.ones_like(starts)
            runs = [torch.stack([starts + offset, ones], 1) for offset in range(N)]
            layouts[-1] = packed_layout(runs, columns)
            self.caches[-1] = columns.unflatten(1, self.slot_size).transpose(2, 3)
        names = [f"layer{number}" for number in range(self.num_layers)]
        layers = list(map(LayerCache, names, self.caches, layouts))
        memory = DeviceMemory(self.device, None)
        groups = []
        for gid in range(self.num_groups):
            sizes = N, N, self.num_blocks, self.max_tokens // N
            more = self.window, self.num_stored, self.num_digests
            shape = GroupShape(gid, *sizes, *more)
            args = shape, layers, 4, self.max_tokens, self.budget > 0, memory
            groups.append(AuditedGroup(*args))
        args = groups, self.budget, 4, [N] * self.num_groups, memory
        self.adapters = LoadedAdapters()
        of: dict[str, Any] = {"adapters": self.adapters}
        if self.state_groups:
            about = 4, self.num_blocks, 7, memory
            of["states"] = States(self.state_groups, *about)
        self.audit = Audit(*args, self.loads, **of)
        if self.is_v2 and self.device.type == "cuda":  # as with a drafter's model
            self.audit.run_beside()
        self.requests, self.numbers, self.local = {}, {}, {}
        self.weights, self.loading = Weights(), {}
        self.loading_blocks: list[Any] = []
        self.news, self.finished, self.copied, self.preempted = [], [], [], set()
        self.texts = torch.zeros(4, self.max_tokens, dtype=torch.int32).to(self.device)
        self.runner = Runner(
            vllm_config=None,
            req_states=SimpleNamespace(
                req_id_to_index=self.numbers,
                all_token_ids=SimpleNamespace(gpu=self.texts),
            ),
        )
        self.observer = self.observes()
        self.runner.nwor_state = RunnerState([self.observer, self.transaction()])

    def observes(self):
        """The audit as an observer."""
        text_of = caches._text_of_v2 if self.is_v2 else caches._text_of_v1
        return RunnerAudit(
            self.audit,
            SimpleNamespace(
                audit=self.mode, audit_stale=StaleMode.FIND, strict_steps=self.strict
            ),
            SimpleNamespace(
                limits=SimpleNamespace(loads=self.loads),
                text_of=partial(text_of, self.runner),
                read_states=StateMetadata(self.state_groups).read,
            ),
        )

    def transaction(self):
        """What the audit is to know of a commit; `step` makes it."""

        def sampled(step, acceptance):
            step.undone = self.undone

        return Observer("transaction", sampled=sampled)

    def counts(self, names="unverified returned"):
        totals = self.audit.totals()
        return tuple(totals[name] for name in names.split())

    # -- the scheduler -------------------------------------------------------------

    def load(self, number, content):
        self.adapters.digests[number] = content
        self.adapters.news.add(number)

    def add(self, name, text, blocks, hit=0, by_group=None, lora=None):
        """lora: number of its adapter."""
        self.requests[name] = Request(list(text), list(blocks), hit)
        new = SimpleNamespace(req_id=name, num_computed_tokens=hit, mm_features=[])
        new.lora_request = lora and LoRARequest("acme", lora, "/a")
        new.block_ids = by_group or [list(blocks)] * self.num_groups
        self.news.append(new)
        self.numbers[name] = max({0, 1, 2, 3} - set(self.numbers.values()))
        row = self.texts[self.numbers[name]]
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)

    def runs(self, name, text, *args, rejected=(), **kwargs):
        """A request comes, and all of its text is computed, with drafts behind it that
        are rejected; what was found."""
        self.add(name, text, *args, **kwargs)
        num = len(text) - self.requests[name].computed
        return self.step(**{name: Work(num, rejected, 0)})

    def finish(self, *names):
        for name in names:
            del self.requests[name], self.numbers[name]
            self.finished.append(name)

    def step(
        self,
        slots=lambda slots: None,
        skip=lambda layer, slot: False,
        table=lambda table: None,
        restores=True,
        is_late=False,
        **rows,
    ):
        """One step; returns what was found in it. rows: the work of each request, or
        how many rows; a text that is too short goes on with token 7. slots, table:
        spoil the slot mapping or the block table. skip: writes that are left out, by
        layer and slot. is_late: the device writes long after the host has begun to
        sample."""
        works = {k: Work(w) if isinstance(w, int) else w for k, w in rows.items()}
        self.begins(self._scheduled(works))
        tokens, positions, mapping, starts, cu_logits = [], [], [], [0], [0]
        blocks = torch.zeros((len(works), self.max_tokens // N), dtype=torch.int32)
        for row, (name, work) in enumerate(works.items()):
            request = self.requests[name]
            blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
            first, end = request.computed, request.computed + work.num
            request.text += [7] * (end - len(request.text))
            tokens += [*request.text[first:end], *work.drafts]
            places = range(first, end + len(work.drafts))
            positions += places
            mapping += [request.blocks[p // N] * N + p % N for p in places]
            starts.append(len(tokens))
            cu_logits.append(cu_logits[-1] + 1 + len(work.drafts))
        mapping = torch.tensor(mapping, dtype=torch.int64)
        table(blocks)
        slots(mapping)
        mapping = mapping.to(self.device)
        batch = SimpleNamespace(
            num_reqs=len(works),
            num_tokens=len(tokens),
            req_ids=list(works),
            input_ids=self._int32(tokens),
            positions=self._int32(positions).long(),
            query_start_loc=self._int32(starts),
            cu_num_logits=self._int32(cu_logits),
            slot_mappings=[mapping] * self.num_groups,
            block_tables=[blocks.to(self.device)] * self.num_groups,
            works=list(works.values()),
            sample=lambda *_: None,
        )
        (self._prepare_v2 if self.is_v2 else self._prepare_v1)(batch)
        while self.loading:
            self.load(*self.loading.popitem())
        before = [cache.clone() for cache in self.caches]
        rows = list(zip(tokens, positions, mapping.tolist(), strict=True))
        for layer in range(self.num_layers):
            for token, position, slot in rows:
                if not skip(layer, slot):
                    self.write(layer, slot, token, position)
        for row, (name, work) in enumerate(works.items()):
            request, kept = self.requests[name], work.num + work.accepted
            rejected = mapping[starts[row] + kept : starts[row + 1]].tolist()
            restored = (
                self.is_undone if self.restored is None else name in self.restored
            )
            for slot in rejected if restored and restores else ():
                for layer in range(self.num_layers):
                    self.slot(layer, slot)[:] = self.slot(layer, slot, before)
            if work.accepted:
                accepted = work.drafts[: work.accepted]
                request.text[request.computed + work.num :] = accepted
            request.computed += kept
        if is_late:
            batch.sample = partial(self._write_late, before)
        (self._sample_v2 if self.is_v2 else self._sample_v1)(batch)
        return self.found()

    def undone(self, group_id):
        """As Step.undone."""
        return Undone(self.is_undone, *self.staged)

    def begins(self, scheduled):
        """A step starts."""
        execute_model(lambda scheduled: None, self.runner, (scheduled,), {})

    def ends(self, output):
        """The step's output is complete."""
        return sample_tokens(lambda: output, self.runner, (), {})

    def _scheduled(self, works):
        scheduled = SchedulerOutput.make_empty()
        for new in self.news:
            request = self.requests[new.req_id]
            new.prompt_embeds = request.is_opaque or None
            for identifier, offset, length in request.images:
                place = SimpleNamespace(offset=offset, length=length)
                feature = SimpleNamespace(identifier=identifier, mm_position=place)
                new.mm_features.append(feature)
        scheduled.scheduled_new_reqs = self.news
        scheduled.finished_req_ids = self.finished
        scheduled.preempted_req_ids = self.preempted
        scheduled.kv_cache_block_copies = self.copied
        known = {name: (None, num) for name, num in self.local.items()}
        scheduled.nwor_audit = known if self.can_say else None
        if self.loads is Loads.UNKNOWN:
            of = [self.requests[new.req_id] for new in self.news]
            nums = [self.local.get(new.req_id, 0) for new in self.news]
            blocks = [
                [r.blocks[num // N : -(-r.computed // N)]] * self.num_groups
                for r, num in zip(of, nums, strict=True)
                if num < r.computed
            ]
            self.loading_blocks += blocks
            scheduled.nwor_loads = (self.loading_blocks, 0) if self.can_say else None
            self.loading_blocks = []
        scheduled.nwor_weights = self.weights
        drafts = {name: work.drafts for name, work in works.items() if work.drafts}
        scheduled.scheduled_spec_decode_tokens = drafts
        self.news, self.finished, self.copied, self.preempted = [], [], [], set()
        return scheduled

    def _prepare_v1(self, batch):
        runner, computed = self.runner, []
        texts = np.zeros((len(batch.works), self.max_tokens), dtype=np.int32)
        for row, name in enumerate(batch.req_ids):
            request = self.requests[name]
            computed.append(request.computed)
            texts[row, : request.computed] = request.text[: request.computed]
        starts = batch.query_start_loc
        runner.query_start_loc = SimpleNamespace(gpu=starts, np=starts.cpu().numpy())
        runner.input_ids = SimpleNamespace(gpu=batch.input_ids)
        runner.positions, runner.seq_lens = batch.positions, None
        tables = [
            SimpleNamespace(
                slot_mapping=SimpleNamespace(gpu=slots),
                block_table=SimpleNamespace(gpu=table),
            )
            for slots, table in zip(
                batch.slot_mappings, batch.block_tables, strict=True
            )
        ]
        runner.input_batch = SimpleNamespace(
            num_reqs=batch.num_reqs,
            req_ids=batch.req_ids,
            vocab_size=100,
            num_computed_tokens_cpu=computed,
            token_ids_cpu=texts,
            block_table=SimpleNamespace(block_tables=tables),
        )
        if any(work.drafts for work in batch.works):
            metadata = SimpleNamespace(
                num_draft_tokens=[len(work.drafts) for work in batch.works],
                logits_indices=None,
                cu_num_sampled_tokens=batch.cu_num_logits[1:],
            )
            runner_v1._calc_spec_decode_metadata(lambda: metadata, runner, (), {})
        runner_v1._model_forward(lambda: None, runner, (), {})

    def _prepare_v2(self, batch):
        numbers = [self.numbers[name] for name in batch.req_ids]
        batch.seq_lens = batch.logits_indices = None
        batch.idx_mapping = self._int32(numbers).long()
        batch.idx_mapping_np = np.array(numbers)
        batch.num_draft_tokens = sum(len(work.drafts) for work in batch.works)
        tables = batch.block_tables, torch.stack(batch.slot_mappings)
        runner_v2._prepare_attn(lambda batch: tables, self.runner, (batch,), {})

    def _sample_v1(self, batch):
        nums = [work.accepted for work in batch.works]
        ids = self._int32([[9] * (1 + n) + [-1] * (7 - n) for n in nums])
        output = SimpleNamespace(sampled_token_ids=ids.view(len(nums), 8))
        metadata = {"spec_decode_metadata": None}
        args = self.runner, (), metadata
        runner_v1._sample(lambda **_: batch.sample() or output, *args)

    def _sample_v2(self, batch):
        nums = [len(work.drafts) - work.accepted for work in batch.works]
        result = None, None, self._int32(nums)
        args = self.runner, (batch,), {}
        runner_v2._sample(lambda *_: batch.sample() or result, *args)

    def _write_late(self, before):
        written = [cache.clone() for cache in self.caches]
        for cache, old in zip(self.caches, before, strict=True):
            cache.copy_(old)
        if self.device.type == "cuda":
            torch.cuda._sleep(10**8)  # cycles: 50 ms
        for cache, new in zip(self.caches, written, strict=True):
            cache.copy_(new)

    def _int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def transfers(self, blocks, places=None, fills=False):
        """A KV connector is about to read or fill blocks."""
        self.audit.on_transfer(Transfer(blocks, places, fills))

    def hand_on(self, *args, **kwargs):
        """As transfers; what is found until a step's end."""
        self.transfers(*args, **kwargs)
        return self.step()

    def filled(self):
        """From here on the blocks whose digests were taken in a step, and their
        digests, are appended to the list that this returns. Nothing is judged."""
        blocks = []

        def take_in(of, failed, found):
            for rows in (of.computed, of.others):
                for head, sums in judge._rows(rows, max(self.num_layers, N)):
                    num = head[4] if head[5] == TAIL else self.num_layers
                    blocks.append((head, sums[: 8 * num]))

        self.audit.outbox.judge.take_in = take_in
        return blocks

    def digest(self, text, block, position, name, num_slots=0, kind=None):
        """What `filled` has of a block that ends a text; of a tail by slot."""
        size = num_slots if kind == TAIL else N
        group, own = self.audit.groups[0], text[position : position + size]
        numbers = [int(name.removeprefix("layer")) for name in group.names]
        checksums = [
            [checksum(self.slot(layer, block * N + o)) for layer in numbers]
            for o in range(size)
        ]
        sums = [
            sum(mix(word + n * GAMMA) for n, word in enumerate(words, 1)) % 2**64
            for words in (checksums if kind == TAIL else zip(*checksums, strict=True))
        ]
        hashes = [signed(identity(part)) for part in (text[: position + size], own)]
        generation = self.audit.requests[name].generation
        if kind is None:
            kind = LOADED if num_slots else COMPUTED
        about = block, position, generation, num_slots, kind
        head = [hashes[0], *about, hashes[1], 1]
        return head, np.array(sums, np.uint64).tobytes()

    def found(self):
        return self.audit.outbox.take(self.audit.outbox.num_sent).findings

    # -- the cache -----------------------------------------------------------------

    def slot(self, layer, slot, caches=None):
        """[heads, width]: a view of a slot's bytes; what the layouts say, once more."""
        block, offset = divmod(slot, N)
        return (caches or self.caches)[layer][block, :, offset]

    def write(self, layer, slot, token, position):
        seed = zlib.crc32(f"{layer} {token} {position}".encode())
        data = random_bytes(math.prod(self.slot_size), seed)
        self.slot(layer, slot)[:] = data.view(self.slot_size)

    def fill(self, text, first=0, blocks=(1, 2)):
        """A load writes a text from position `first` on."""
        for position, token in enumerate(text[first:], first):
            slot = blocks[position // N] * N + position % N
            for layer in range(self.num_layers):
                self.write(layer, slot, token, position)

    def spoil(self, layer, slot, byte=(0, 0), bits=1):
        self.slot(layer, slot)[byte] ^= bits


def fields(found, names="kind"):
    """These fields of each finding; writer: its request."""
    rows = []
    for finding in found:
        values = vars(finding) | {"writer": finding.writer.request}
        row = tuple(values[name] for name in names.split())
        rows.append(row if len(row) > 1 else row[0])
    return rows


def mix(value):
    """splitmix64's finaliser, of what audit_rules.h says of H and of checksums."""
    mask = 2**64 - 1
    value = value & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


GAMMA = 0x9E3779B97F4A7C15


def identity(text):
    """H of a text."""
    return sum(mix(t * GAMMA + mix(p + 1)) for p, t in enumerate(text)) % 2**64


def signed(value):
    """As int64."""
    return (value + 2**63) % 2**64 - 2**63


def checksum(slot):
    """Of a slot's bytes in a layer."""
    data = bytes(slot.flatten().tolist())
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(mix(w + i * GAMMA) >> 32 for i, w in enumerate(words, 1)) % 2**32


TEXT = list(range(10, 40))
OTHER = list(range(50, 80))


def prefilled(other=OTHER, **settings):
    """Two requests, both with two full blocks and a part of a third."""
    world = World(**settings)
    world.add("a", TEXT[:10], [1, 2, 3, 7, 8])
    world.add("b", other[:9], [4, 5, 6, 9, 10])
    assert world.step(a=10, b=9) == []
    return world


def computed(*rejected, **settings):
    """One request with two full blocks; the last slots hold rejected drafts."""
    world = World(**settings)
    text = TEXT[: 2 * N - len(rejected)]
    assert world.runs("a", text, [1, 2], rejected=rejected) == []
    return world


def decode(world, count=1):
    works = dict.fromkeys(world.requests, 1)
    return [finding for _ in range(count) for finding in world.step(**works)]


# --- nothing is wrong -----------------------------------------------------------------


@pytest.mark.parametrize("is_undone", [False, True])
def test_drafts_accepted_and_rejected_are_no_findings(is_undone):
    world = prefilled(is_undone=is_undone)
    for accepted in (0, 2, 1):
        world.requests["a"].text.append(30 + accepted)
        assert world.step(a=Work(1, (31, 32), accepted)) == []
    # What was proposed and rejected is written after all, then another token.
    assert decode(world) == []


# The indices of two requests in the runner's states; seats by index; of each seat its
# drafts: negative if they were left alone.
@pytest.mark.parametrize(
    ("indices", "table", "saved", "undone"),
    [
        (None, None, [2, 2], "ab"),
        (None, None, [2, -2], "a"),
        (None, None, [-2, 2], "b"),
        (None, None, [2], "a"),  # b has no seat
        ([1, 0], None, [2, -2], "b"),
        ([0, 3], None, [2, 2], "a"),
        ([3, 2], [-1, -1, 0, 1], [2, -2], "b"),
        ([0, 2], [1, 0, -1], [2, 2], "a"),
        ([2, 3], [0, 1, -1], [2, 2], ""),
    ],
)
@pytest.mark.parametrize("spoilt", ["", "a", "b"])
def test_rejected_drafts_are_undone_window_by_window(
    indices, table, saved, undone, spoilt
):
    """Where a window was not staged, nothing is said of its rejected slots, and what
    they hold is noticed by the next write alone. A window that was has changed where
    its bytes are others."""
    world = World(is_undone=True)
    for number, name in enumerate("ab"):
        world.add(name, TEXT[:4], [1 + 2 * number, 2 + 2 * number])
    assert world.step(a=4, b=4) == []
    rows = torch.zeros((len(saved), ops.SAVED_COLUMNS + 4), dtype=torch.int32)
    rows[:, 0] = torch.tensor(saved)
    places = None if indices is None else world._int32(indices)
    seats = None if table is None else world._int32(table)
    world.staged = rows.to(world.device), places, seats
    world.restored = set(undone) - {spoilt}
    for request in world.requests.values():
        request.text.append(30)
    found = world.step(a=Work(1, (31, 32), 0), b=Work(1, (31, 32), 0))
    kinds = {("changed", name) for name in {spoilt} & set(undone)}
    assert set(fields(found, "kind writer")) == kinds
    world.staged, world.restored = (), None
    assert decode(world) == []


def test_a_slot_whose_rejected_draft_was_undone_may_keep_its_bytes():
    """The token of the request before, at the same place: nothing changes."""
    world = prefilled(is_undone=True)
    world.finish("a")
    assert world.runs("c", TEXT[:4], [1, 2, 3], rejected=(91,)) == []
    world.requests["c"].text += TEXT[4:5]
    assert world.step(c=1) == []


def test_a_layer_may_fill_its_cache_when_it_first_runs():
    """As TRITON_ATTN does with scales per token and head, and the drafter after its
    target: a rejected draft's slot is other than at start-up, and was not touched."""
    world = prefilled(is_undone=True)
    for cache in world.caches:
        cache[7:] = 1
    assert world.step(a=Work(1, (31, 32), 1)) == []


def test_a_hit_in_the_step_that_writes_it_is_no_finding():
    world = World()
    world.add("a", TEXT[:10], [1, 2, 3])
    world.add("b", TEXT[:9], [1, 2, 6], hit=8)
    assert world.step(a=10, b=1) == []
    assert world.step(b=0) == []
    assert world.counts("unverified") == (0,)


def test_a_request_of_which_the_scheduler_could_say_nothing_is_unknown():
    """Its salt may be another one: what it finds is no finding, and is counted."""
    world = prefilled(can_say=False)
    world.add("b", OTHER[:4] + TEXT[4:9], [1, 2, 6], hit=8)
    assert world.step(b=1) == []
    assert world.counts("unverified") == (8,)


def test_a_preempted_request_gives_up_its_seat():
    """And none that sits out a step: with asynchronous scheduling the host does not
    know its text."""
    world = World()
    world.audit._is_async = True
    for number, name in enumerate("abcd"):
        world.add(name, TEXT[:4], [1 + 2 * number, 2 + 2 * number])
    assert world.step(a=4, b=4, c=4, d=4) == []
    world.preempted = {"a"}
    del world.numbers["a"]
    assert world.runs("e", OTHER[:4], [13]) == []
    found = world.step(b=0, c=0, d=0, table=lambda table: table.fill_(13))
    assert fields(found, "kind owner") == [("wrong_prefix", name) for name in "bcd"]


def test_generations_of_requests_begin_anew_before_they_are_too_large():
    """A record has 32 bits for it: 25 days, at a thousand requests a second."""
    world = World()
    world.audit.requests._generations = itertools.count(2**31 - 3)
    for name in "abcd":
        assert world.runs(name, TEXT[:9], [1, 2, 3]) == []
        world.spoil(0, 1 * N)
        (finding,) = world.step(**{name: 0})
        assert fields([finding], "owner writer") == [(name, name)]
        world.finish(name)


@pytest.mark.parametrize("window", [0, 4])
def test_a_block_may_be_another_requests_below_the_window_only(window):
    world = prefilled(window=window)
    world.add("c", OTHER[10:14], [1])
    found = world.step(a=0, b=0, c=4)
    expected = [] if window else [("wrong_prefix", "a", "c")]
    assert fields(found, "kind owner writer") == expected


def test_a_load_that_failed_sends_a_request_back():
    world = prefilled()
    for computed in (4, 0):
        world.requests["a"].computed = computed
        assert world.step(a=10 - computed) == []
    assert decode(world) == []
    # Its identity is still known: a hit on it can be verified.
    assert world.runs("c", TEXT[:9], [1, 2, 11], hit=8) == []
    assert world.counts("unverified") == (0,)


def test_the_text_of_a_request_that_goes_back_into_a_block_is_not_known_any_more():
    world = prefilled()
    world.requests["a"].computed = 6
    assert world.step(a=4) == []
    assert world.runs("c", TEXT[:9], [1, 2, 11], hit=8) == []
    assert world.counts("unverified") == (2,)


def opaque(**work):
    """A request whose text is not known; what a step does for it."""
    world = World()
    world.add("a", TEXT[:7], [1, 2, 3])
    world.requests["a"].is_opaque = True
    assert world.step(a=Work(7, **work)) == []
    return world


@pytest.mark.parametrize("is_opaque", [False, True])
def test_what_an_opaque_text_takes_over_is_unverified(is_opaque):
    """From a text that is known, or another that is not; or a rejected draft."""
    world = World()
    world.add("a", TEXT[:9], [1, 2, 3])
    world.requests["a"].is_opaque = is_opaque
    assert world.step(a=Work(9, (77,), 0)) == []
    world.add("b", OTHER[:9], [1, 2, 4], hit=8)
    world.requests["b"].is_opaque = True
    assert world.step(b=1) == []
    assert world.counts("unverified") == (8,)
    world.add("c", OTHER[:12], [1, 2, 3], hit=11)
    world.requests["c"].is_opaque = True
    assert world.step(c=1) == []
    assert world.counts("unverified") == (8 + 11,)


# --- images ---------------------------------------------------------------------------


def with_image(world, name, identifier, blocks, text=TEXT, where=(2, 4), **kwargs):
    """A request with an image at these positions comes; what is found in its step."""
    world.add(name, text[:9], blocks, **kwargs)
    world.requests[name].images = ((identifier, *where),)
    return world.step(**{name: 9 - world.requests[name].computed})


@pytest.mark.parametrize(
    ("identifier", "where", "position"),
    [
        ("red", (2, 4), None),
        ("blue", (2, 4), 2),
        # The same image elsewhere; and one that ends elsewhere.
        ("red", (3, 4), 2),
        ("red", (2, 5), 6),
    ],
)
def test_a_text_with_an_image_is_that_texts_with_that_image(
    identifier, where, position
):
    """A finding for the first slot of each block that is another's; nothing is left
    unverified."""
    world = World()
    assert with_image(world, "a", "red", [1, 2, 3]) == []
    found = with_image(world, "b", identifier, [1, 2, 4], where=where, hit=8)
    positions = [] if position is None else sorted({position, max(position, N)})
    expected = [("wrong_prefix", p, "b", "a") for p in positions]
    assert fields(found, "kind position owner writer") == expected
    assert world.counts("unverified") == (0,)
    # Rows, hits, and the chain within a block are of one mind.
    assert world.step(a=1, b=1) == []
    assert world.hand_on([[1, 2]]) == []


def test_another_image_is_written_to_a_slot_and_need_not_change_every_layer():
    """Images may be alike in parts. In the place of a text an image changes them."""
    world = World()
    assert world.runs("a", OTHER[:9], [1, 2, 3]) == []
    image = range(N + 2, 2 * N + 2)
    for name in ("red", "blue"):
        (earlier,) = world.requests
        world.finish(earlier)
        world.add(name, TEXT[:9], [1, 2, 3])
        world.requests[name].images = ((name, 2, 4),)
        found = world.step(**{name: 9}, skip=lambda layer, slot: slot in image)
        expected = [("missing_write", p) for p in range(2, 6)]
        assert fields(found, "kind position") == expected * (name == "red")


def test_bytes_of_an_opaque_text_are_watched_for_others():
    world = opaque()
    world.finish("a")
    world.spoil(0, 1 * N + 2)
    found = world.runs("b", TEXT[:5], [1, 4], hit=4)
    assert fields(found, "kind slot") == [("changed", 1 * N + 2)]


def test_a_block_of_an_opaque_text_with_a_rejected_draft_is_handed_on():
    found = opaque(drafts=(77,)).hand_on([[1, 2]])
    assert fields(found, "kind slot position") == [("handed_on", 2 * N + 3, 7)]


# --- foreign_write --------------------------------------------------------------------


def test_a_write_to_another_requests_block():
    world = prefilled()
    spoiled = 4 * N + 2  # position 2 of b; a's is position 10

    found = world.step(a=1, slots=lambda s: s.fill_(spoiled))

    assert fields(found) == ["foreign_write", "wrong_prefix"]
    assert fields(found, "slot owner writer")[0] == (spoiled, "b", "a")
    # What was overwritten is found where b's block is looked at, by its identity: its
    # bytes are those that were written last.
    assert fields(decode(world), "kind slot owner writer") == [
        ("wrong_prefix", 3 * N + 2, "a", None),  # a's own block is full now
        ("wrong_prefix", spoiled, "b", "a"),
    ]
    assert decode(world) == []


def test_a_write_to_a_prefix_cached_block():
    """The table is bent as well, so that slot and table agree."""
    world = prefilled()
    world.finish("b")
    assert world.runs("c", OTHER[:5], [4, 7], hit=4) == []
    world.requests["c"].computed = 3
    found = world.step(c=1)
    assert fields(found, "kind slot owner")[0] == ("foreign_write", 4 * N + 3, "b")


@pytest.mark.parametrize("slot", [3 * N + 1, NUM_BLOCKS * N])
def test_a_write_to_a_wrong_slot(slot):
    """Of its own block; behind the cache, where there is nothing to read either."""
    behind = NUM_BLOCKS * N
    found = prefilled().step(
        a=1, slots=lambda s: s.fill_(slot), skip=lambda _, slot: slot >= behind
    )
    assert fields(found) == ["foreign_write", "wrong_prefix"][: 1 + (slot < behind)]
    expected = slot, str(3 * N + 2), str(slot)
    assert fields(found, "slot expected found")[0] == expected


# --- wrong_prefix ---------------------------------------------------------------------


# Each block of the text, reversed.
TURNED = [TEXT[i ^ (N - 1)] for i in range(9)]


@pytest.mark.parametrize("other", [OTHER, TURNED], ids=["other", "turned"])
@pytest.mark.parametrize("budget", [0, EVERYTHING])
def test_swapped_tables(budget, other):
    """Also of the same tokens in another order."""
    world = prefilled(other, budget=budget)

    def swap(table):
        table.copy_(table.flip(0))

    assert fields(world.step(a=0, b=0, table=swap), "kind slot owner writer") == [
        ("wrong_prefix", 4 * N + 3, "a", "b"),
        ("wrong_prefix", 5 * N + 3, "a", "b"),
        ("wrong_prefix", 1 * N + 3, "b", "a"),
        ("wrong_prefix", 2 * N + 3, "b", "a"),
    ]
    # Each block is reported once.
    assert world.step(a=0, b=0, table=swap) == []


def test_a_hit_on_another_text_names_its_first_wrong_slot():
    world = prefilled()
    text = [*TEXT[:6], *OTHER[6:9]]
    (found,) = world.runs("c", text, [1, 2, 7], hit=8)
    expected = ("wrong_prefix", 2 * N + 2, 6, "a")
    assert fields([found], "kind slot position writer") == [expected]
    hashes = hex(identity(text[:7])), hex(identity(TEXT[:7]))
    assert (found.expected, found.found) == hashes


def test_a_hit_on_blocks_of_other_weights():
    """A request in flight keeps its identity; the text that it goes on to write is of
    the weights that it began with, also in the block that the change falls into."""
    world = prefilled()
    world.finish("a")
    world.weights = Weights(1, 2**64 - 3)
    assert world.step(b=2) == []
    world.add("c", TEXT[:9], [1, 2, 11], hit=8)
    found = world.step(b=1, c=1)
    assert fields(found, "kind slot owner writer") == [
        ("stale_weights", block * N, "c", "a") for block in (1, 2)
    ]
    text = world.requests["b"].text[:12]
    world.finish("b", "c")
    world.add("d", [*text, 8], [4, 5, 6, 12], hit=12)
    found = world.step(d=1)
    assert fields(found, "kind slot") == [
        ("stale_weights", block * N) for block in (4, 5, 6)
    ]
    epochs = {
        "written": {"epoch": 0, "label": "", "adapter": None},
        "present": {"epoch": 1, "label": "", "adapter": None},
    }
    assert [finding.weights for finding in found] == [epochs] * 3
    # What is computed now is right, and then the first weights come back.
    assert world.runs("e", OTHER[10:20], [13, 14, 15]) == []
    world.finish("d", "e")
    world.add("f", OTHER[10:20], [13, 14, 15], hit=8)
    assert world.step(f=2) == []
    world.weights = Weights()
    world.add("g", TEXT[:9], [1, 2, 11], hit=8)
    assert world.step(g=1) == []


def test_a_preempted_request_is_of_the_weights_of_then():
    world = prefilled()
    world.preempted = {"a"}
    assert world.step(b=1) == []
    world.weights = Weights(1, 77)
    resumed = SimpleNamespace(
        req_ids=["a"],
        new_block_ids=[([1, 2, 11],)],
        num_computed_tokens=[4],
        resumed_req_ids={"a"},
    )
    make = world._scheduled

    def scheduled(works):
        found = make(works)
        found.scheduled_cached_reqs = resumed
        return found

    world._scheduled = scheduled
    world.requests["a"].computed, world.requests["a"].blocks = 4, [1, 2, 11]
    assert fields(world.step(a=6), "kind slot") == [("stale_weights", N)]
    world._scheduled = make
    assert world.step(a=2) == []


# --- adapters -------------------------------------------------------------------------

A, B = "a" * 32, "b" * 32


def with_adapter(content=A, loads_late=True):
    """A request of adapter 1, which vLLM loads in its step, behind the plan or before
    it; it has ended."""
    world = World()
    if loads_late:
        world.loading = {1: content}
    else:
        world.load(1, content)
    assert world.runs("a", TEXT[:10], [1, 2, 3], lora=1) == []
    world.finish("a")
    return world


def hits(world, content=None, lora=1, name="c"):
    """What a request with that adapter finds that takes two blocks of `a` over."""
    world.loading = {lora: content} if content else {}
    found = world.runs(name, TEXT[:9], [1, 2, 11], hit=8, lora=lora)
    world.finish(name)
    return fields(found, "kind slot")


STALE = [("stale_weights", 1 * N), ("stale_weights", 2 * N)]
WRONG = [("wrong_prefix", 1 * N), ("wrong_prefix", 2 * N)]


@pytest.mark.parametrize("loads_late", [False, True])
def test_the_content_of_an_adapter_is_in_the_identity(loads_late):
    """Whenever vLLM loads it, and however often."""
    world = with_adapter(loads_late=loads_late)
    assert hits(world) == []
    assert hits(world, A) == []
    assert hits(world, A, lora=2) == []
    assert hits(world, B, lora=3) == WRONG
    assert hits(world, B) == STALE
    assert hits(world) == STALE
    assert hits(world, A) == []
    assert hits(world, lora=None) == WRONG
    assert world.audit.requests.num_adapter_changes == 2


def test_a_finding_has_both_contents():
    world = with_adapter()
    world.loading, world.weights = {1: B}, Weights(2, 77, "step-2")
    found = world.runs("c", TEXT[:9], [1, 2, 11], hit=8, lora=1)
    written, present = ({"name": "acme", "content": n * 16} for n in "ab")
    assert found[0].weights == {
        "written": {"epoch": 0, "label": "", "adapter": written},
        "present": {"epoch": 2, "label": "step-2", "adapter": present},
    }


@pytest.mark.parametrize("is_behind_plan", [False, True])
def test_a_request_in_flight_across_a_change_of_its_adapter(is_behind_plan):
    """It keeps its identity; so its adapter's first content does not come back under
    the old one, as its blocks hold both."""
    world = with_adapter()
    world.add("b", OTHER[:6], [4, 5, 6], lora=1)
    assert world.step(b=6) == []
    change = world.loading.__setitem__ if is_behind_plan else world.load
    change(1, B)
    assert world.step(b=2) == []
    text = world.requests["b"].text[:8]
    world.finish("b")
    assert hits(world, A, name="d") == STALE
    found = world.runs("e", [*text, 9], [4, 5, 12], hit=8, lora=1)
    assert fields(found) == ["stale_weights"] * 2
    assert world.runs("f", TEXT[:9], [1, 2, 13], lora=1) == []
    world.finish("e", "f")
    assert hits(world, name="g") == []


def test_an_adapter_that_comes_back_before_a_step_was_not_away():
    """Nor does it count for requests that ended, were preempted, or have another
    one."""
    world = with_adapter()
    world.add("b", OTHER[:6], [4, 5, 6], lora=1)
    world.add("o", OTHER[:6], [7, 8, 9], lora=2)
    world.loading = {2: A}
    assert world.step(b=6, o=6) == []
    world.load(1, B)
    world.load(1, A)
    assert world.step(b=1, o=1) == []
    assert world.audit.requests.num_adapter_changes == 0
    world.preempted = {"b"}
    world.load(1, B)
    assert world.step(o=1) == []
    world.load(1, A)
    assert hits(world) == []
    assert world.audit.requests.num_adapter_changes == 2


IMAGES = (("red", 2, 3),)


@pytest.mark.parametrize(("accepted", "is_undone"), [(0, False), (0, True), (2, False)])
@pytest.mark.parametrize("hit", [0, 8])
def test_another_seed_behind_the_plan_is_as_good_as_one_before(
    hit, accepted, is_undone
):
    """Every byte of the tables, next to another request and behind a foreign write, and
    with an image in the text."""

    def tables(loads_late):
        world = World(is_undone=is_undone)
        world.load(1, B)
        assert world.runs("a", TEXT[:10], [1, 2, 3], lora=1) == []
        world.finish("a")
        world.load(1, A)
        world.add("b", OTHER[:6], [4, 5, 6], lora=2)
        world.loading = {2: "other"}
        assert world.step(b=6) == []
        world.add("c", TEXT[:10], [1, 2, 11, 12], hit=hit, lora=1)
        world.requests["c"].images = IMAGES
        if loads_late:
            world.loading = {1: B}
        else:
            world.load(1, B)

        def collide(slots):
            slots[-1] = 3 * N

        works = {"c": Work(10 - hit, (77, 78, 79), accepted), "b": 2}
        found = fields(world.step(**works, slots=collide), "kind slot expected found")
        assert world.step(c=2) == []
        return found, world.audit.groups[0].tensors

    (found, early), (found_late, late) = map(tables, (False, True))
    assert found == found_late != []
    assert [name for name in early if not torch.equal(early[name], late[name])] == []


def test_another_seed_leaves_another_requests_record():
    """Two rows go to one slot, and either may write the record last."""
    world = with_adapter()
    world.add("c", TEXT[:4], [4, 5], lora=1)
    world.add("b", OTHER[:4], [6, 7])
    world.loading = {1: B}

    def collide(slots):
        slots[-1] = 4 * N + 3

    assert fields(world.step(c=4, b=4, slots=collide))[0] == "foreign_write"
    tensors = world.audit.groups[0].tensors
    slots, hashes = tensors["plan"][:8, 0].tolist(), tensors["plan"][:8, 1].tolist()
    assert slots[3] == slots[7] == 4 * N + 3
    assert tensors["records"][4 * N + 3, 0].item() in (hashes[3], hashes[7])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((4, 1, 0), "seat is 4; must be between 0 and 3"),
        ((-1, 1, 0), "seat is -1; must be between 0 and 3"),
        ((0, 1, 65), "num_tokens is 65; must be between 0 and 64, the rows of plan"),
        ((0, 1, -1), "num_tokens is -1; must be between 0 and 64, the rows of plan"),
    ],
)
def test_invalid_arguments_of_reseed_are_refused(arguments, said):
    world = prefilled()
    group = world.audit.groups[0]
    before = {name: tensor.clone() for name, tensor in group.tensors.items()}
    with pytest.raises(RuntimeError, match=f"^audit_reseed: {said}$"):
        world.audit._ops.audit_reseed(group.tables, *arguments)
    assert all(torch.equal(before[name], group.tensors[name]) for name in before)


# --- wrong_prefix ---------------------------------------------------------------------


def test_a_hit_on_a_rejected_draft():
    text = [*TEXT[:7], 77, 7]
    found = computed(77).runs("b", text, [1, 2, 3], hit=8)
    assert fields(found, "kind slot") == [("wrong_prefix", 2 * N + 3)]


def test_a_hit_on_what_another_group_was_given():
    world = World(num_groups=2)
    world.runs("a", TEXT[:8], [1, 2], by_group=[[1, 2], []])
    world.add("c", OTHER[:4], [1], by_group=[[], [1]])
    found = world.runs("b", TEXT[:9], [1, 2, 3], 8, by_group=[[1, 2, 3], []])
    assert ("wrong_prefix", 0, 1 * N) in fields(found, "kind group slot")


def test_a_second_snapshot_leaves_out_what_became_another_groups():
    """Groups overlay each other's bytes. Of a SlotRecord the last number says whether
    the slot's bytes are known."""
    world = World(num_groups=2)
    world.runs("a", TEXT[:2], [1], by_group=[[], [1]])
    world.audit.snapshot(again=True)
    slots = world.audit.groups[0].records.view(torch.int32)[:, -1].cpu()
    assert slots[N + 2 : 2 * N].tolist() == [0, 0]  # its own, and not written yet
    assert all(slots[2 * N : 3 * N].tolist())


# --- changed --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("byte", [(0, 0), (1, 8)])
@pytest.mark.parametrize("position", [0, 5, 9])
def test_any_byte_of_a_committed_slot(layer, byte, position):
    world = prefilled()
    slot = (1 + position // N) * N + position % N
    before = checksum(world.slot(layer, slot))
    world.spoil(layer, slot, byte, 0x80)
    (found,) = decode(world)
    expected = ("changed", f"layer{layer}", 1, slot, "a", "a")
    assert fields([found], "kind layer num_layers slot owner writer") == [expected]
    after = checksum(world.slot(layer, slot))
    assert (found.expected, found.found) == (hex(before), hex(after))
    assert decode(world) == []  # once


def test_a_step_with_a_hit_compares_the_other_requests_too():
    world = prefilled()
    world.spoil(0, 2 * N)
    world.add("c", TEXT[:5], [1, 11], hit=4)
    found = world.step(a=1, c=1)
    assert fields(found, "kind slot owner") == [("changed", 2 * N, "a")]


def test_the_budget_is_kept_and_the_cursor_goes_around():
    """One block a step: every block of both requests within as many steps."""
    world = prefilled(budget=N * NUM_LAYERS * HEADS * WIDTH)
    (before,) = world.counts("contents")
    decode(world)
    assert world.counts("contents") == (before + N,)
    for cache in world.caches:
        cache[1:7] ^= 1
    # Requests grow meanwhile; then there are ten blocks at most.
    found = decode(world, 5)
    for _ in range(6):
        found += world.step(a=0, b=0)
    assert set(fields(found, "block")) == {1, 2, 3, 4, 5, 6}


def test_no_block_is_left_out_while_requests_come_and_go():
    """One a step, of six or of three: the round begins anew where it is past its
    end."""
    world = prefilled(budget=N * NUM_LAYERS * HEADS * WIDTH)
    for _ in range(3):
        assert world.step(a=0, b=0) == []
    world.spoil(0, 1 * N)
    found = []
    for _ in range(4):
        world.finish("b")
        found += world.step(a=0)
        world.add("b", OTHER[:9], [4, 5, 6])
        found += world.step(a=0, b=9) + world.step(a=0, b=0)
    assert fields(found, "kind slot") == [("changed", 1 * N)]


# --- missing_write --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "layers", "expected"),
    [
        ({"a": Work(1, (31,), 1)}, [1], [("layer1", 1, 11, "a")]),
        ({"a": 1}, [0, 1], [("layer0", 2, 10, "a")]),
        # One checksum that agrees is not yet a finding: 32 bits agree by chance once
        # in billions, and a cache has billions.
        ({"a": 1}, [1], []),
        ({"a": 1}, [2], []),
        ({"a": 1, "b": 1}, [1], []),
    ],
)
def test_what_was_not_written(rows, layers, expected):
    world = prefilled()
    found = world.step(**rows, skip=lambda layer, slot: layer in layers)
    assert set(fields(found)) <= {"missing_write"}
    assert fields(found, "layer num_layers position writer") == expected
    for finding in found:
        text = world.requests["a"].text[: finding.position + 1]
        assert finding.expected == hex(identity(text))
        assert finding.found == "0x0"  # nobody's before


def test_a_placeholder_may_have_been_the_token_that_comes():
    """vLLM's asynchronous scheduler gives a request -1 for drafts that there are none
    of yet, and its runner takes that for token 0 when it computes."""
    world = prefilled()
    assert world.step(a=Work(1, (-1, -1), 0)) == []
    world.requests["a"].text += [0, 0]
    slots = 3 * N + 3, 7 * N
    assert world.step(a=2, skip=lambda layer, slot: slot in slots) == []


def test_what_a_failed_step_left_behind_is_not_believed():
    """A plan without a resolve says nothing of the bytes, nor do the checksums; and a
    draft that is undone leaves nothing that is known."""
    world = prefilled(is_undone=True)
    world.finish("a")
    world.add("c", [*TEXT[:4], 91], [1, 2, 3])
    assert world.step(c=4) == []
    resolve, world.audit.resolve = world.audit.resolve, lambda *_, **__: None
    world.step(c=Work(1, (92,), 0))
    world.audit.resolve = resolve
    # Another token after all, which is the one that was there before.
    world.requests["c"].computed = 4
    world.requests["c"].text[4] = TEXT[4]
    assert world.step(c=Work(1, (93,), 0)) == []
    assert world.runs("d", TEXT[:9], [1, 2, 11], hit=8) == []
    assert world.counts("unverified") == (1,)


def test_what_a_request_found_is_looked_at_behind_a_step_that_failed():
    world = filling()
    world.fill(OTHER[:8])
    world.add("b", [*OTHER[:8], 7], [1, 2, 3], hit=8)
    resolve, world.audit.resolve = world.audit.resolve, lambda *_, **__: None
    world.step(b=1)
    world.audit.resolve = resolve
    world.requests["b"].computed = 8
    assert world.step(b=1) == []
    assert world.counts("unverified") == (8,)


# --- KV connectors --------------------------------------------------------------------


def filling(loads=Loads.KNOWN, **settings):
    """A load is to fill the first two blocks, which hold what another text left; the
    audit is informed, if it is of such a connector."""
    world = computed(loads=loads, **settings)
    world.finish("a")
    if loads is Loads.KNOWN:
        world.transfers([[1, 2]], fills=True)
    return world


def test_a_load_that_wrote_nothing():
    world = filling()
    world.fill(OTHER[:4])  # its first block was loaded, the second was not
    found = world.runs("b", OTHER[:9], [1, 2, 3], hit=8)
    never = [("never_loaded", 2 * N + offset, "b") for offset in range(4)]
    assert fields(found, "kind slot owner") == never
    assert world.step(b=0) == []


def test_a_load_that_two_requests_share_is_looked_at_once(monkeypatch):
    """Both have it in their tables in one step, and its bytes were not compared yet."""
    monkeypatch.setattr(state, "HIT_BUDGETS", 0)
    world = filling()
    world.fill(OTHER[:8])
    world.add("b", OTHER[:9], [1, 2, 3], hit=8)
    world.add("c", OTHER[:9], [1, 2, 4], hit=8)
    assert world.step(b=1, c=1) == []


def test_a_block_that_was_loaded_in_part_is_found_by_another_in_the_same_step():
    """Nobody tells of the load, and the one that found its block is the first row."""
    world = filling(Loads.UNKNOWN)
    world.fill(OTHER[:3])
    world.add("b", OTHER[:5], [1, 4], hit=4)
    world.add("c", OTHER[:5], [1, 5], hit=3)
    world.local = {"b": 4}
    assert world.step(b=1, c=2) == []


def test_a_load_of_what_was_there_before_is_no_finding():
    """Nor is one of the same text whose bytes came out differently."""
    world = filling()
    world.spoil(0, 2 * N)
    assert world.runs("b", TEXT[:9], [1, 2, 3], hit=8) == []
    assert world.counts("unverified") == (8,)


@pytest.mark.parametrize("loads", [Loads.KNOWN, Loads.UNKNOWN])
def test_a_load_for_an_opaque_text(loads):
    """It is not what was in its blocks before; from here on it is watched."""
    world = filling(loads)
    world.fill(OTHER[:8])
    world.add("b", OTHER[:9], [1, 2, 3], hit=8)
    world.requests["b"].is_opaque = True
    assert world.step(b=1) == []
    assert world.counts("unverified") == (8,)
    assert world.hand_on([[1, 2]]) == []
    world.spoil(0, 1 * N + 1)
    assert fields(world.step(b=0)) == ["changed"]


def test_an_opaque_text_shares_blocks_with_one_that_is_known():
    """Where any of them may have been loaded, they match any text from then on."""
    world = World(loads=Loads.UNKNOWN)
    assert world.runs("a", TEXT[:9], [1, 2, 3]) == []
    world.add("b", TEXT[:9], [1, 2, 4], hit=8)
    world.requests["b"].is_opaque = True
    assert world.step(a=0, b=1) == []


def test_a_second_snapshot_leaves_out_what_was_loaded():
    """Drafts come for the first time between a load and its request."""
    world = World(loads=Loads.KNOWN)
    world.transfers([[1, 2]], fills=True)
    world.fill(OTHER[:8])
    assert world.runs("b", OTHER[:9], [1, 2, 3], hit=8, rejected=(77,)) == []


def test_blocks_that_are_zeroed_and_loaded_in_one_step():
    """As vLLM 0.26 and 0.29 do where a model has Mamba layers; the step has no rows."""
    world = computed(loads=Loads.KNOWN)
    world.finish("a")
    scheduled = SchedulerOutput.make_empty()
    scheduled.new_block_ids_to_zero = [1, 2]
    world.audit.begin_step(ScheduledStep(scheduled))
    world.transfers([[1, 2]], fills=True)
    world.fill(OTHER[:8])
    assert world.runs("b", OTHER[:9], [1, 2, 3], hit=8) == []
    assert world.counts("unverified") == (8,)


@pytest.mark.parametrize("loads", [Loads.KNOWN, Loads.UNKNOWN])
def test_drafts_behind_what_was_loaded_into_their_block(loads):
    """A load fills whole blocks: what is undone there is what it brought, not what the
    slots held when they were last looked at."""
    world = filling(loads, is_undone=True)
    world.fill(OTHER[:8])
    assert world.runs("b", OTHER[:7], [1, 2, 3], hit=6, rejected=(77,)) == []
    assert decode(world) == []


@pytest.mark.parametrize("source", ["nobody", "the scheduler", "the connector"])
def test_a_load_whose_request_never_comes(source):
    """Or into what was another group's block, to which it goes back. A draft is undone
    there."""
    loads = Loads.KNOWN if source == "the connector" else Loads.UNKNOWN
    num_groups = 2 if loads is Loads.KNOWN else 1
    world = World(num_groups=num_groups, is_undone=True, loads=loads)
    world.can_say = source != "nobody"
    of_first = {"by_group": [[1], []][:num_groups]}
    world.runs("a", TEXT[:4], [1], **of_first)
    world.finish("a")
    if loads is Loads.KNOWN:
        world.transfers([[], [1]], fills=True)
    elif world.can_say:
        world.loading_blocks = [[[1]]]
        assert world.step() == []
    world.fill(OTHER[:4])
    found = world.runs("b", [91], [1], rejected=(77,), **of_first)
    assert [finding for finding in found if finding.group == 0] == []


@pytest.mark.parametrize("kind", ["changed", "missing_write", "never_loaded"])
def test_what_a_load_brought_and_nobody_compared_is_not_known(kind):
    """The budget ends before the last blocks of a hit, and so does the request. Its
    blocks go to a draft that is undone; to the text of before; to a load of that."""
    blocks = range(1, 8)
    world = World(budget=1, loads=Loads.KNOWN, is_undone=True)
    for text in (TEXT, OTHER):
        world.fill(text[:24], blocks=blocks)
        is_loaded = text is OTHER
        if is_loaded:
            world.transfers([blocks[:6]], fills=True)
        assert world.runs("a", text[:25], blocks, hit=24 * is_loaded) == []
        world.finish("a")
    if kind == "changed":
        found = world.runs("b", [91], [6], rejected=(77,))
    elif kind == "missing_write":
        found = world.runs("b", TEXT[:24], blocks)
    else:
        world.transfers([blocks[:6]], fills=True)
        world.fill(TEXT[:24], blocks=blocks)
        found = world.runs("b", TEXT[:25], blocks, hit=24)
    for _ in blocks:
        found += world.step(b=0)
    assert found == []


def test_a_load_of_what_nobody_knew_to_be_there_is_no_finding():
    """Another request has had the block meanwhile, and did not write that far."""
    world = filling(Loads.UNKNOWN, is_undone=True)
    assert world.runs("b", [91], [1], rejected=(77,)) == []
    world.finish("b")
    world.fill(TEXT[:4])
    world.local = {"c": 0}
    assert world.runs("c", TEXT[:5], [1, 3], hit=4) == []


@pytest.mark.parametrize("source", ["nobody", "the scheduler", "the connector"])
def test_what_was_found_in_the_cache_and_not_loaded_is_verified(source):
    """The first block is another text's, in the cache; the second one was loaded."""
    world = World(loads=Loads.KNOWN if source == "the connector" else Loads.UNKNOWN)
    world.can_say = source != "nobody"
    assert world.runs("a", TEXT[:4], [1]) == []
    world.finish("a")
    if source == "the connector":
        world.transfers([[2]], fills=True)
    world.local = {"b": 4} if source == "the scheduler" else {}
    world.fill(OTHER[:8], 4)
    found = world.runs("b", OTHER[:9], [1, 2, 3], hit=8)
    assert fields(found) == ["wrong_prefix"] * (source != "nobody")
    assert world.counts("unverified") == (8 if source == "nobody" else 4,)
    # From here on what was loaded is watched.
    assert decode(world) == []
    world.spoil(1, 2 * N + 1)
    assert fields(decode(world)) == ["changed"]


# --- digests of blocks ----------------------------------------------------------------


def sides(blocks):
    """In the order of their numbers."""
    return sorted(blocks, key=lambda block: block[0][1])


def test_digests_are_taken_of_the_blocks_that_a_step_fills():
    """By a prompt, by decodes, and by drafts that were accepted."""
    world = World(loads=Loads.UNKNOWN, num_digests=8)
    blocks = world.filled()
    world.add("a", TEXT[:10], [1, 2, 3, 7, 8])
    world.add("b", OTHER[:9], [4, 5, 6, 9])
    assert world.step(a=10, b=9) == []
    filled = {"a": [1, 2], "b": [4, 5]}
    texts = {name: world.requests[name].text for name in filled}
    expected = [
        world.digest(texts[name], block, N * number, name)
        for name in filled
        for number, block in enumerate(filled[name])
    ]
    assert sides(blocks) == expected
    blocks.clear()
    # a has 10 tokens: with 11, 12 and 13 its third block is full, and 14 is rejected.
    assert world.step(a=Work(1, (31, 32, 33), 2), b=1) == []
    assert blocks == [world.digest(world.requests["a"].text, 3, 8, "a")]
    blocks.clear()
    assert world.step(a=1, b=Work(1, (31, 32), 0)) == []
    assert blocks == []
    # Without room: as much as there is.
    assert world.step(b=1) == []
    assert blocks == [world.digest(world.requests["b"].text, 6, 8, "b")]


def test_digests_are_taken_of_whole_blocks_that_were_loaded():
    """One was found in the cache, two are loaded, one in part."""
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    assert world.runs("a", TEXT[:4], [1]) == []
    blocks = world.filled()
    world.fill(TEXT[:14], 4, [1, 2, 3, 4])
    world.local = {"b": 4}
    assert world.runs("b", TEXT[:15], [1, 2, 3, 4], hit=14) == []
    expected = [world.digest(TEXT, n, N * (n - 1), "b", N) for n in (2, 3)]
    *whole, (in_part, _) = sides(blocks)
    assert whole == expected
    assert (in_part[1], in_part[4], in_part[-1]) == (4, 2, 0)
    assert world.counts("unverified") == (10,)
    blocks.clear()
    # The last block is filled by the request.
    assert world.step(b=1) == []
    assert blocks == [world.digest(world.requests["b"].text, 4, 12, "b")]


@pytest.mark.parametrize("handover", range(4))
def test_digests_of_requests_that_are_handed_over(handover):
    """Of one that takes its blocks: also of those found in the cache, and of its tail
    by slot. Of one that gives them: of the end that each step leaves."""
    world = World(loads=Loads.UNKNOWN, num_digests=6)
    assert world.runs("a", TEXT[:4], [1]) == []
    blocks = world.filled()
    world.audit.outbox.begin_handover = lambda *_: handover
    world.fill(TEXT[:10], 4, [1, 2, 3])
    world.local = {"b": 4}
    assert world.runs("b", TEXT[:11], [1, 2, 3], hit=10) == []
    expected = [world.digest(TEXT, 2, 4, "b", N)]
    if handover:
        expected.append(world.digest(TEXT, 1, 0, "b", 0, FOUND))
    if handover & Handover.GIVES:
        expected.append(world.digest(TEXT, 3, 8, "b", 3, TAIL))
    if handover & Handover.TAKES:
        expected.append(world.digest(TEXT, 3, 8, "b", 2, TAIL))
    assert sorted(one for one in blocks if one[0][-1]) == sorted(expected)
    blocks.clear()
    # The block's end is a tail, too: the other engine computes its last token.
    assert world.step(b=1) == []
    expected = [world.digest(world.requests["b"].text, 3, 8, "b")]
    if handover & Handover.GIVES:
        expected.append(world.digest(world.requests["b"].text, 3, 8, "b", N, TAIL))
    assert sorted(blocks) == sorted(expected)


def test_a_draft_that_is_rejected_is_no_part_of_a_tail():
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    world.audit.outbox.begin_handover = lambda *_: Handover.GIVES
    blocks = world.filled()
    world.add("a", TEXT[:5], [1, 2])
    assert world.step(a=5) == []
    blocks.clear()
    assert world.step(a=Work(1, (31, 32), 1)) == []
    text = world.requests["a"].text
    assert blocks == [world.digest(text, 2, 4, "a", 3, TAIL)]


def test_a_block_that_was_loaded_in_part_is_no_version_of_its_text():
    """The request goes on in it. Nor is the next one that begins there, from its own
    text, mistaken for it."""
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    (digests,) = world.audit.outbox.judge.digests
    world.fill(TEXT[:6])
    world.local = {"a": 0}
    assert world.runs("a", TEXT[:8], [1, 2], hit=6) == []
    key = signed(identity(TEXT[:8]))
    assert digests._texts[key] == (CUT,)
    world.finish("a")
    assert world.runs("b", TEXT[:8], [1, 2]) == []
    assert len(digests._texts[key]) == 2


@pytest.mark.parametrize("how", ["room", "budget"])
def test_loaded_blocks_without_a_digest_stay_unverified(how):
    """There is room for one, or only four are read."""
    more = {"num_digests": 1} if how == "room" else {"budget": 1, "num_digests": 8}
    world = World(loads=Loads.UNKNOWN, **more)
    blocks = world.filled()
    ids = list(range(1, 8))
    world.fill(TEXT[:24], blocks=ids)
    world.local = {"b": 0}
    assert world.runs("b", TEXT[:25], ids, hit=24) == []
    known = [head[1] for head, _ in blocks if head[-1]]
    if how == "room":
        assert len(blocks) == len(known) == 1
    else:
        assert (len(blocks), sorted(known)) == (6, [1, 2, 3, 4])
    assert world.counts("unverified") == (24,)


def test_what_there_is_no_room_for_is_written_nowhere(monkeypatch):
    rows_of, num_guards = tables.digest_rows, 8
    monkeypatch.setattr(tables, "digest_rows", lambda shape: rows_of(shape) + 8)
    world = World(loads=Loads.UNKNOWN, num_digests=2)
    guards = world.audit.groups[0].tensors["digests"][-num_guards:]
    guards.fill_(77)
    world.local, ids = {"b": 0}, list(range(1, 8))
    world.fill(TEXT[:24], blocks=ids)
    assert world.runs("b", TEXT[:25], ids, hit=24) == []
    assert guards.unique().tolist() == [77]


def test_an_opaque_text_has_no_digest_of_its_own():
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    blocks = world.filled()
    world.add("a", TEXT[:4], [1])
    world.requests["a"].is_opaque = True
    assert world.step(a=4) == []
    ((head, _),) = blocks
    assert (head[0], head[-1]) == (0, 0)


def test_a_block_of_zeros_has_the_digest_of_zeros():
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    blocks = world.filled()
    for cache in world.caches:
        cache.zero_()
    world.local = {"a": 0}
    assert world.runs("a", TEXT[:5], [1, 2], hit=4) == []
    ((_, digest),) = blocks
    assert digest == zeros_of(world.audit.groups[0])


# The connector's report: which blocks; what is found, and counts of slots.
FAILED = {
    "nothing": ((), ["other_text"] * 2, (0, 0)),
    "one": ({2}, ["other_text"], (0, 4)),
    "both": ({1, 2}, [], (0, 8)),
    "another": ({9}, ["other_text"] * 2, (0, 0)),
}


@pytest.mark.parametrize("case", FAILED)
def test_a_load_that_is_reported_as_failed_is_no_finding(case):
    """What the step has computed behind it is not remembered."""
    failed, kinds, counts = FAILED[case]
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    assert world.runs("a", OTHER[:8], [5, 6]) == []
    world.finish("a")
    world.fill(OTHER[:8])
    world.local = {"b": 0}
    outbox = world.audit.outbox
    world.found = lambda: outbox.take(outbox.num_sent, None, failed)
    (digests,) = world.audit.outbox.judge.digests
    found = world.runs("b", TEXT[:12], [1, 2, 3], hit=8)
    assert fields(found.findings) == kinds
    assert (found.num_unverified, found.num_failed) == counts
    assert found.num_verified == 0
    known = digests._texts[signed(identity(TEXT[:12]))]
    assert (known == (CUT,)) == bool(counts[1])


def test_what_failed_in_a_step_is_in_its_own_output():
    """It is read when the next step, with the same block, is on its way."""
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    assert world.runs("a", OTHER[:8], [5, 6]) == []
    world.finish("a")
    world.found = lambda: None
    reads = []
    for name, text in (("b", TEXT), ("c", TEXT[4:])):
        world.fill(OTHER[:4])
        world.local = {name: 0}
        world.runs(name, text[:5], [1, 2], hit=4)
        world.finish(name)
        reads.append(world.observer.output_ready())
    (first, second), findings = reads, world.observer.findings
    first(None, {1})
    assert (findings.counts, findings.num_failed) == ({}, 4)
    second(None, ())
    assert (findings.counts, findings.num_failed) == ({"never_loaded": 4}, 4)


def stored(*rejected, **settings):
    """The first two blocks of a text were stored to places 6 and 7, and another request
    has taken the blocks."""
    world = computed(*rejected, loads=Loads.KNOWN, **{"num_stored": 4} | settings)
    found = world.hand_on([[1, 2]], places=[[6, 7]])
    assert fields(found) == ["handed_on"] * len(rejected)
    world.finish("a")
    assert world.runs("b", OTHER[:8], [1, 2]) == []
    world.finish("b")
    return world


def loaded(world, text=TEXT, brings=TEXT, then=lambda: None):
    """A request of `text`, whose first two blocks a load fills from these places.
    then: happens before anybody looks at what it brought."""
    world.transfers([[1, 2]], fills=True, places=[[6, 7]])
    world.fill(brings[:8])
    then()
    return world.runs("c", [*text[:8], 7], [1, 2, 3], hit=8)


@pytest.mark.parametrize("room", [0, 1, 2, 4])
def test_a_load_that_brings_what_was_stored_is_verified_as_far_as_there_is_room(room):
    """The blocks that were stored last are kept. All are watched from there on."""
    world = stored(num_stored=room)
    num_kept = min(room, 2)
    assert len(world.audit.groups[0].numbers) == num_kept
    assert loaded(world) == []
    assert world.counts() == (8 - num_kept * N, num_kept * N)
    assert world.step(c=0) == []
    world.spoil(1, 2 * N)
    assert fields(world.step(c=0)) == ["changed"]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("is_known", [True, False])
def test_a_load_that_brings_other_bytes(layer, is_known):
    """One bit of one layer, wherever what was in the block before is known."""
    world = stored()
    if not is_known:
        world.audit.forget_cache()
    (finding,) = loaded(world, then=lambda: world.spoil(layer, 2 * N + 1, (1, 3), 16))
    assert fields([finding], "kind layer slot position num_layers owner writer") == [
        ("handed_on", f"layer{layer}", 2 * N + 1, 5, 1, "c", "a")
    ]
    assert finding.writer.step == 1
    assert finding.expected != finding.found
    assert world.step(c=0) == []
    assert world.counts() == (0, 8)


TWICE = [*TEXT[:4], *TEXT[:4]]


@pytest.mark.parametrize(
    ("text", "brings", "kind", "slots"),
    [
        # Nothing is wrong with the bytes: they are those that were stored there.
        (OTHER, TEXT, "wrong_prefix", [1 * N, 2 * N]),
        # It copies another place than it says.
        (TEXT, TWICE, "handed_on", range(2 * N, 3 * N)),
        # It writes nothing.
        (TEXT, OTHER, "never_loaded", range(1 * N, 3 * N)),
    ],
)
def test_a_load_that_brings_another_text(text, brings, kind, slots):
    world = stored()
    found = loaded(world, text, brings)
    num_layers = 0 if kind == "wrong_prefix" else NUM_LAYERS
    expected = [(kind, slot, "c", num_layers) for slot in slots]
    assert fields(found, "kind slot owner num_layers") == expected
    if kind == "never_loaded":
        texts = [text[: finding.position + 1] for finding in found]
        assert fields(found, "expected") == [hex(identity(one)) for one in texts]


def test_a_place_holds_what_was_stored_last():
    world = stored()
    assert world.runs("d", OTHER[:4], [4]) == []
    world.transfers([[4]], places=[[6]])
    text = [*OTHER[:4], *TEXT[4:8]]
    # Its second block follows another first.
    found = loaded(world, text, brings=text)
    assert fields(found, "kind position") == [("wrong_prefix", 4)]


def test_what_later_stores_took_the_room_of_is_unverified():
    """A block is looked at when others have been stored: no finding, whatever is in it.
    Four blocks are looked at when a request comes, and one in each step."""
    world = World(loads=Loads.KNOWN, num_stored=6, budget=1)
    blocks = [1, 2, 3, 4, 5, 6]
    assert world.runs("a", TEXT[:24], blocks) == []
    world.transfers([blocks], places=[blocks])
    world.finish("a")
    world.transfers([blocks], fills=True, places=[blocks])
    assert world.runs("c", TEXT[:25], [*blocks, 7], hit=24) == []
    assert world.counts() == (0, 4 * N)
    world.transfers([blocks], places=[[7, 8, 9, 10, 11, 12]])
    for layer in range(NUM_LAYERS):
        world.slot(layer, 6 * N)[:] ^= 1
    for _ in range(8):
        assert world.step(c=0) == []
    assert world.counts() == (2 * N, 4 * N)


def test_a_slot_that_was_stored_uncommitted_is_unverified_when_it_comes_back():
    world = stored(77)
    assert loaded(world, TEXT, brings=[*TEXT[:7], 77]) == []
    assert world.counts() == (1, 7)


def test_a_copied_block_comes_from_the_same_store():
    """A block is copied before anybody looked at what a load brought."""
    world = stored()
    world.transfers([[1, 2]], fills=True, places=[[6, 7]])
    world.copied = [(2, 11)]
    world.fill(TEXT[:8])
    world.fill(TEXT[:8], 4, (1, 11))
    world.add("c", [*TEXT[:8], 7], [1, 11, 3], hit=8)
    world.spoil(0, 11 * N)
    assert fields(world.step(c=1), "kind slot") == [("handed_on", 11 * N)]


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_block_with_a_rejected_draft_is_handed_on(is_undone):
    world = computed(77, is_undone=is_undone)
    assert world.hand_on([[1]]) == []
    found = world.hand_on([[1, 2]])
    expected = [("handed_on", 2 * N + 3, 7, "a")]
    assert fields(found, "kind slot position owner") == expected
    assert found[0].writer.step == (0 if is_undone else 1)
    never, committed, rejected = "0x0", "0x3", "0x4"  # SlotState
    states = committed, never if is_undone else rejected
    assert (found[0].expected, found[0].found) == states
    assert world.step(a=1) == []
    assert world.hand_on([[1, 2]]) == []


def test_a_block_whose_last_slot_was_never_written_is_handed_on():
    """It still holds what the request before committed there."""
    world = prefilled()
    world.finish("a")
    assert world.runs("c", OTHER[:7], [11, 2]) == []
    found = world.hand_on([[11, 2]])
    expected = [("handed_on", 2 * N + 3, "c", "a")]
    assert fields(found, "kind slot owner writer") == expected


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


def finish(device):
    """Waits for what was enqueued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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
    finish(world.device)
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
    arrives = partial(finish, world.device)
    not_there = {"query.return_value": False, "synchronize.side_effect": arrives}
    arrivals = [Mock(**not_there) for _ in range(2)]
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


@pytest.mark.parametrize("ends", ["the output", "a transfer", "the next step"])
def test_what_runs_beside_a_step_ends_with_it(monkeypatch, ends):
    """What comes then may write to the caches, or to the audit's tables."""
    world, arrival, beside = World(), Mock(), object()
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
        else:
            begins_next(world)
    arrival.wait.assert_called_once_with()


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
        take = world.observer._take
        thread = threading.Thread(target=take, args=[outbox.num_sent])
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


def every_second(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


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
def test_invalid_arguments_are_refused(device, op, number, change, said):
    world = prefilled()
    world.audit._ops = copy.copy(world.audit._ops)
    called = getattr(world.audit._ops, f"audit_{op}")

    def spoiled(*args):
        called(*args[:number], change(args[number]), *args[number + 1 :])

    setattr(world.audit._ops, f"audit_{op}", spoiled)
    # On CUDA the host knows no value of what is there: it is left alone.
    is_value = said.startswith(("row_seats[", "query_start_loc["))
    is_known = device.type == "cpu" or not is_value
    refused = pytest.raises(RuntimeError, match=re.escape(said))
    with refused if is_known else nullcontext():
        world.audit.snapshot()
        world.transfers([[2, 1]])
        assert world.step(a=1, b=0) == []


@pytest.mark.parametrize("budget", [0, EVERYTHING])
def test_the_reserved_memory_is_enough(device, budget):
    shape = GroupShape(0, N, N, NUM_BLOCKS, 8, num_stored=5)
    sizes = 4, 64, budget > 0
    size = num_bytes(shape, NUM_LAYERS, *sizes)
    layers = World(budget=budget).audit.groups[0].layers

    def memory(size):
        storage = torch.empty(size, dtype=torch.uint8, device=device)
        return DeviceMemory(device, storage)

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


def test_a_line_a_minute_and_one_at_the_end_say_that_nothing_was_found(
    tmp_path, monkeypatch
):
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


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


# Whether another observer is called before the audit when it is the outermost.
MOMENTS = {
    "step_started": True,
    "tables_final": True,
    "before_forward": True,
    "sampled": False,
    "output_ready": False,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_in_which_another_thread_removes_an_observer(moment, monkeypatch):
    """The step is whole for the others, and the next one is not the audit's."""
    world = prefilled()
    observer, seen, calls = world.observer, [], []
    removes = Observer("removes", **{moment: lambda *_: in_a_thread(observer.leave)})
    first = [removes, observer] if MOMENTS[moment] else [observer, removes]
    names = [*MOMENTS, "step_failed"]
    last = {name: lambda *_, name=name: seen.append(name) for name in names}
    others = Observer("last", every_step=True, **last)
    for name in ("begin_step", "plan", "resolve"):
        part = getattr(world.audit, name)

        def counted(*args, name=name, part=part):
            calls.append(name)
            part(*args)

        monkeypatch.setattr(world.audit, name, counted)
    state = world.runner.nwor_state = RunnerState([*first, others])
    for _ in range(2):
        without_host(world, 1)
        world.ends(LateOutput()).get_output()

    assert seen == [*MOMENTS, *MOMENTS]
    # What the moment had begun is done; nothing comes after it.
    parts = {"step_started": 1, "tables_final": 2, "before_forward": 2}
    assert calls == ["begin_step", "plan", "resolve"][: parts.get(moment, 3)]
    assert state.observers == (removes, others)
    assert state.removed == [observer]


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
        self.num_looks, self.moved, self.num_tables = 0, False, 0

    def addresses(self, device):
        assert device == self.values.device
        self.moved = False
        self.num_tables += 1
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


def test_words_that_change_places_are_another_fingerprint(weighed):
    world, words = weighed
    world.step(a=0)
    (first, _), _ = taken(world)
    words.values[:2] = words.values[:2].flip(0).clone()
    words.num_looks += 1
    world.step(a=0)
    (second, step), _ = taken(world)
    assert (second != first, step) == (True, 2)
    assert words.num_tables == 1  # nothing has moved


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


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [9, 6, 12, 8, 24, 16, 48, 2064])
def test_checksums_of_every_width(heads, width):
    world = World(num_blocks=3, num_layers=1, slot_size=(heads, width))
    rows = world.caches[0].transpose(1, 2).reshape(3 * N, heads * width).cpu()
    found = world.audit.groups[0].contents[:, 0].tolist()
    assert [number % 2**32 for number in found] == list(map(checksum, rows))


def test_texts_longer_than_a_thread_block():
    length = 1300
    world = World(budget=0, num_blocks=700, num_layers=1, max_tokens=1600)
    text = [(7 * i) % 120 for i in range(length)]
    blocks = list(range(1, length // N + 1))
    assert world.runs("a", text, blocks) == []
    assert world.runs("b", text, [*blocks[:-1], 400], length - N) == []
    # Rows and what was found, and the ends of blocks.
    assert world.counts("identities") == (2 * length + 2 * length // N,)
    other = [*text[:900], *[125] * (length - 900)]
    found = world.runs("c", other, [*blocks[:-1], 401], length - N)
    assert fields(found) == ["wrong_prefix"] * ((length - N - 900) // N)
    assert fields(found, "position") == list(range(900, length - N, N))
