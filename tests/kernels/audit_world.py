# SPDX-License-Identifier: Apache-2.0
"""A small cache whose every byte is known, for tests of the audit without vLLM.

`World` is a scheduler and a model in a few lines: requests with texts and blocks, three
layers whose bytes for a token follow from the token, its position and the layer. Its
steps pass through the hooks of vLLM's V1 or V2 runner.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.kernels.conftest import DEVICES
from tests.kernels.reference import random_bytes
from vllm_nwor import ops
from vllm_nwor.audit import judge
from vllm_nwor.audit.loads import COMPUTED, LOADED, TAIL
from vllm_nwor.audit.observer import RunnerAudit
from vllm_nwor.audit.state import Audit
from vllm_nwor.audit.states import States
from vllm_nwor.audit.tables import AuditedGroup, GroupShape
from vllm_nwor.config import AuditMode, StaleMode
from vllm_nwor.hooks import caches, runner_v1, runner_v2
from vllm_nwor.hooks.runner import RunnerState, execute_model, sample_tokens
from vllm_nwor.hooks.states import StateMetadata
from vllm_nwor.layout.caches import Loads
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
def each_runner(request):
    """Every World is on it, and is of one of vLLM's runners."""
    name, World.is_v2 = request.param
    ops.load(name)
    World.device = torch.device(name)


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
            self.audit.beside_from = 1
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
        synchronize(self.device)
        totals = self.audit.totals()
        return tuple(totals[name] for name in names.split())

    # -- the scheduler -------------------------------------------------------------

    def load(self, number, content):
        self.adapters.digests[number] = content
        self.adapters.news.add(number)

    def add(self, name, text, blocks, hit=0, by_group=None, lora=None, **about):
        """lora: number of its adapter. about: of the Request."""
        self.requests[name] = Request(list(text), list(blocks), hit, **about)
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


def synchronize(device):
    """Waits for what was enqueued, beside a step, too."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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


def filling(loads=Loads.KNOWN, **settings):
    """A load is to fill the first two blocks, which hold what another text left; the
    audit is informed, if it is of such a connector."""
    world = computed(loads=loads, **settings)
    world.finish("a")
    if loads is Loads.KNOWN:
        world.transfers([[1, 2]], fills=True)
    return world


def decode(world, count=1):
    works = dict.fromkeys(world.requests, 1)
    return [finding for _ in range(count) for finding in world.step(**works)]
