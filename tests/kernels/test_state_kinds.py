# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers with recurrent state that the audit follows, by the metadata that
vLLM makes for each; and those that it refuses, by name.

`Hybrid` adds one such layer to the audit's World. What a state holds follows from the
text up to its last token. A step's metadata has the fields of vLLM's class of that name
that hooks/states.py reads.

Not covered: vLLM's own builders and kernels (tests/integration/test_states.py,
tests/gpu).
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from tests.kernels import audit_world
from tests.kernels.audit_world import N, Work, World
from tests.kernels.conftest import DEVICES
from tests.kernels.reference import random_bytes
from vllm_nwor import ops
from vllm_nwor.audit.state import Audit
from vllm_nwor.audit.states import States
from vllm_nwor.hooks import runner_v1, states
from vllm_nwor.layout.states import StateCache, StateGroup, StateKind
from vllm_nwor.layout.tables import DeviceMemory

NUM_DRAFTS, WIDTH, CHANNELS = 4, 4, 64
NUM_STATE_BLOCKS = 32
LAYER = "layers.0.mixer"
CONV = (WIDTH - 1 + NUM_DRAFTS, CHANNELS), torch.bfloat16
MATRIX = (8, 16, 16), torch.float32
# By vLLM's backend: the states of a layer.
SHAPES: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "GDN_ATTN": [CONV, MATRIX],
    "MAMBA1_ATTN": [((WIDTH - 1, CHANNELS), torch.bfloat16), ((64, 16), torch.float32)],
    "MAMBA2_ATTN": [CONV, MATRIX],
    "SHORT_CONV_ATTN": [CONV],
    "LINEAR_ATTN": [MATRIX],
    "BAILING_LINEAR_ATTN": [MATRIX],
}
# Without a state for each draft.
PLAIN = ("MAMBA1_ATTN", "LINEAR_ATTN")
WITH_DRAFTS = [backend for backend in SHAPES if backend not in PLAIN]


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    """World's, with the hooks of the V1 runner."""
    World.is_v2, World.device = False, torch.device(request.param)
    ops.load(request.param)


def values(size: torch.Size, dtype: torch.dtype, *parts: Any) -> torch.Tensor:
    data = random_bytes(size.numel(), zlib.crc32(repr(parts).encode()))
    return data.to(dtype).view(size) + 0.5


def a_runner(backend: str, device: Any = "cpu", **changes: Any) -> Any:
    """What hooks/states.py reads of a runner with one layer with recurrent state.
    changes: of its caches, its cache_mode, and the configuration."""
    num_drafts = 0 if backend in PLAIN else NUM_DRAFTS
    of_caches = [
        torch.zeros((NUM_STATE_BLOCKS, *size), dtype=dtype, device=device)
        for size, dtype in changes.pop("shapes", None) or SHAPES[backend]
    ]
    attention_backend = SimpleNamespace(get_name=lambda: backend)
    layer = SimpleNamespace(
        kv_cache=of_caches,
        conv1d=SimpleNamespace(weight=torch.zeros(CHANNELS, 1, WIDTH)),
        get_attn_backend=lambda: attention_backend,
    )
    spec = MambaSpec(
        shapes=((1,),),
        dtypes=(torch.float32,),
        block_size=changes.pop("block_size", 64),
        mamba_cache_mode=changes.pop("cache_mode", "none"),
        num_speculative_blocks=num_drafts,
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[LAYER])
    use_ubatching = changes.pop("use_ubatching", False)
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        compilation_config=SimpleNamespace(static_forward_context={LAYER: layer}),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(**changes),
            speculative_config=None,
            parallel_config=SimpleNamespace(use_ubatching=use_ubatching),
        ),
    )


@dataclass
class Hybrid(World):
    """A World with one layer of `backend`.

    spoils: changes the metadata of the next step. unwritten: (kind, part) -> whether
    that step leaves a part of a state's heads, or a convolution's buffer, as it was.
    ring: of a layer that compresses 4 tokens, in a group of its own. about: as changes
    of a_runner.
    """

    backend: str = "GDN_ATTN"
    spoils: Any = None
    unwritten: Any = None
    ring: torch.Tensor | None = None
    about: dict[str, Any] = field(default_factory=dict)
    # Of each request: tokens that the kernels keep of its last window.
    kept: dict[str, int] = field(default_factory=dict)
    num_heads: ClassVar[int] = 8

    def __post_init__(self):
        self.model = a_runner(self.backend, self.device, **self.about)
        (group,) = states.groups_of(self.model)
        self.has_drafts = self.backend not in PLAIN
        num_drafts = NUM_DRAFTS if self.has_drafts else 0
        memory = DeviceMemory(self.device, None)
        groups = [group]
        if self.ring is not None:
            ring = StateCache(LAYER, StateKind.RING, self.ring, ratio=4)
            groups.append(StateGroup(1, [ring]))
        self.states = States(groups, 4, NUM_STATE_BLOCKS, num_drafts, memory)
        self.of_group = states.StateMetadata(groups)
        self.state_caches = group.states
        with pytest.MonkeyPatch.context() as patch:
            audit = functools.partial(Audit, states=self.states)
            patch.setattr(audit_world, "Audit", audit)
            super().__post_init__()

    def observes(self):
        observer = super().observes()
        observer._read_states = self.of_group.read
        return observer

    def blocks_of(self, name):
        """1 + K for each request."""
        first = 1 + (1 + NUM_DRAFTS) * "abcdef".index(name)
        return list(range(first, first + 1 + NUM_DRAFTS))

    def _prepare_v1(self, batch):
        metadata = self.metadata_of(batch)
        if self.spoils:
            self.spoils(metadata)
        if self.ring is not None:
            table = self._int32([[self.blocks_of(name)[0]] for name in batch.req_ids])
            batch.block_tables = [*batch.block_tables, table]
            batch.slot_mappings = [*batch.slot_mappings, batch.slot_mappings[0]]
        context = SimpleNamespace(attn_metadata={LAYER: metadata})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner_v1, "get_forward_context", lambda: context)
            super()._prepare_v1(batch)
        for name, work in zip(batch.req_ids, batch.works, strict=True):
            self.compute(name, work)
            self.kept[name] = 1 + work.accepted
        self.spoils = self.unwritten = None

    def metadata_of(self, batch):
        """As vLLM's class of that name."""
        names, works = batch.req_ids, batch.works
        rows = [self._int32(self.blocks_of(name)) for name in names]
        decodes = [r for r, name in enumerate(names) if self.is_decode(name, works[r])]
        others = [r for r in range(len(names)) if r not in decodes]
        computed = [self.requests[name].computed for name in names]
        table = torch.stack(rows)[:, : 1 + NUM_DRAFTS if self.has_drafts else 1]
        kept = [self.kept.get(names[r], 1) for r in decodes]
        accepted = self._int32(kept) if self.has_drafts else None
        has_state = [computed[r] > 0 for r in others]
        has_state = torch.tensor(has_state, dtype=torch.bool, device=self.device)
        num_rows = torch.diff(batch.query_start_loc)
        fields = {"num_decodes": len(decodes), "num_accepted_tokens": accepted}
        if self.backend == "GDN_ATTN":
            mask = torch.zeros(len(names), dtype=torch.bool, device=self.device)
            mask[decodes] = True
            fields |= {
                "num_decodes": 0,
                "spec_sequence_masks": mask,
                "spec_state_indices_tensor": table[decodes],
                "non_spec_state_indices_tensor": table[others, 0],
                "has_initial_state": has_state,
            }
        else:
            assert decodes == list(range(len(decodes)))
            fields |= {
                "state_indices_tensor": table[:, 0],
                "state_indices_tensor_d": table[: len(decodes)],
                "state_indices_tensor_p": table[len(decodes) :, 0],
                "has_initial_states_p": has_state,
                "seq_lens": self._int32(computed) + num_rows,
            }
        name = states.KINDS[self.backend].metadata
        return type(name, (SimpleNamespace,), {})(**fields)

    def is_decode(self, name, work):
        """A window, or one token behind others."""
        is_one = work.num == 1 and self.requests[name].computed > 0
        return bool(work.drafts) or is_one

    def compute(self, name, work):
        """What the layer writes for a request."""
        request = self.requests[name]
        first = request.computed
        text = [*request.text[: first + work.num], *work.drafts]
        blocks, is_window = self.blocks_of(name), self.is_decode(name, work)
        if self.ring is not None:
            for p in range(first, len(text)):
                row = self.ring[blocks[0], :, p % self.ring.shape[2]]
                row.copy_(values(row.shape, row.dtype, "row", text[: p + 1]))
        for state in self.state_caches:
            of, cache = state.kind, state.tensor
            if of is StateKind.CONV:
                if not (self.unwritten and self.unwritten(of, 0)):
                    # All inputs that the window's tokens need.
                    start = first - WIDTH + 2 if is_window else len(text) - WIDTH + 1
                    for column, p in enumerate(range(start, len(text))):
                        token = text[p] if p >= 0 else -1
                        cache[blocks[0], column] = values(
                            cache.shape[2:], cache.dtype, "input", token
                        ).to(self.device)
                continue
            ends = range(first + 1, len(text) + 1) if is_window else [len(text)]
            for column, end in enumerate(ends):
                for head in range(cache.shape[1]):
                    part = head * ops.SAMPLE_PARTS // cache.shape[1]
                    if not (self.unwritten and self.unwritten(of, part)):
                        matrix = cache[blocks[column], head]
                        matrix[:] = values(
                            matrix.shape, matrix.dtype, head, text[:end]
                        ).to(self.device)


def started(backend: str, ring: torch.Tensor | None = None) -> Hybrid:
    """Two requests whose prompts were computed, the first in chunks."""
    world = Hybrid(backend=backend, ring=ring)
    world.add("a", range(10, 17), range(1, 8))
    world.add("b", range(20, 25), range(8, 15))
    assert world.step(a=4, b=5) == []
    assert world.step(a=3) == []
    assert world.states.totals.tolist() == [len(SHAPES[backend]), 0]
    return world


def work(world: Hybrid, name: str, first: int, accepted: int = 2) -> Work:
    """A window of drafts, or where there are none one token."""
    if not world.has_drafts:
        world.requests[name].text.append(first)
        return Work(1)
    return Work(1, tuple(range(first, first + NUM_DRAFTS)), accepted)


def both(world: Hybrid, first: int, *accepted: int) -> dict[str, Work]:
    accepted = accepted or (2, 2)
    return {
        name: work(world, name, first + 5 * number, accepted[number])
        for number, name in enumerate("ab")
    }


def kinds_of(findings: Any) -> set[tuple[str, str]]:
    return {(one.kind, one.state) for one in findings}


def all_states(world: Hybrid, kind: str) -> set[tuple[str, str]]:
    return {(kind, str(state.kind)) for state in world.state_caches}


@pytest.mark.parametrize("backend", SHAPES)
def test_right_states_are_silent(backend):
    world = started(backend)
    for number, accepted in enumerate((0, 4, 1, 3, 2)):
        first = 30 + 10 * number
        rows = both(world, first, accepted, 4 - accepted)
        if number == 2:  # one without drafts, and a new one
            world.add("c", (1,), [15])
            rows |= {"b": Work(1), "c": Work(1)}
        assert world.step(**rows) == []
    num_states = len(SHAPES[backend])
    assert world.states.totals.tolist() == [11 * num_states, 0]


@pytest.mark.parametrize("backend", SHAPES)
def test_a_ring_in_another_group_is_judged_by_its_own_rules(backend):
    """And the states by theirs."""
    ring = torch.zeros(NUM_STATE_BLOCKS, 2, 8, 16, device=World.device)
    world = started(backend, ring)
    for number, accepted in enumerate((0, 4, 1)):
        assert world.step(**both(world, 30 + 10 * number, accepted, accepted)) == []
    compared, unknown = world.states.totals.tolist()
    # Of a ring in steps with a group's last token.
    assert compared > 7 * len(SHAPES[backend])
    assert unknown == 0
    assert (world.states.last_tokens[1] == -1).all()
    # Of b the next token is the last one of its group.
    while world.requests["b"].computed % 4 != 3:
        world.requests["b"].text.append(9)
        assert world.step(b=1) == []
    position = world.requests["b"].computed - 1
    ring[world.blocks_of("b")[0], :, position % 8] += 1
    world.requests["b"].text.append(9)
    (found,) = world.step(b=1)
    assert (found.kind, found.state) == ("ring_overwritten", "ring")
    assert (found.group, found.position, found.owner) == (1, position, "b")
    for state in world.state_caches:
        state.tensor[world.blocks_of("a")] += 1
    found = world.step(**both(world, 90))
    assert kinds_of(found) == all_states(world, "changed_state")


@pytest.mark.parametrize("backend", SHAPES)
def test_anothers_state_is_named(backend):
    table = {
        "GDN_ATTN": "spec_state_indices_tensor",
        "LINEAR_ATTN": "state_indices_tensor",
    }.get(backend, "state_indices_tensor_d")

    def swap(metadata):
        rows = getattr(metadata, table)
        rows.copy_(rows.flip(0))

    world = started(backend)
    world.step(**both(world, 30))
    world.spoils = swap
    found = world.step(**both(world, 50))
    assert all_states(world, "foreign_state") <= kinds_of(found)
    assert {one.owner for one in found} == {"a", "b"}


@pytest.mark.sanitizer
@pytest.mark.parametrize("backend", ["GDN_ATTN", "MAMBA2_ATTN", "LINEAR_ATTN"])
@pytest.mark.parametrize("wrong", [0, 1, 6])
def test_a_state_in_the_prefix_cache_is_what_its_text_left(backend, wrong):
    """A request finds that of block 1, and reads a copy in block 6. wrong: the block of
    which one is."""
    world = Hybrid(backend=backend, about={"cache_mode": "align", "block_size": N})
    assert world.runs("a", range(10, 10 + N), [1]) == []
    for state in world.state_caches:
        state.tensor[1] += wrong == 1
        state.tensor[6] = state.tensor[1] + (wrong == 6)
    found = world.runs("b", range(10, 10 + 2 * N), [1, 6], hit=N)
    assert kinds_of(found) == (all_states(world, "changed_state") if wrong else set())
    assert {one.block for one in found} <= {wrong}
    assert world.states.totals.tolist() == [len(world.state_caches), 0]


@pytest.mark.sanitizer
@pytest.mark.parametrize("backend", WITH_DRAFTS)
def test_a_wrong_number_of_accepted_drafts_is_named(backend):
    world = started(backend)
    assert world.step(**both(world, 30, 2, 1)) == []
    world.spoils = lambda metadata: metadata.num_accepted_tokens[1:].fill_(1)
    found = world.step(**both(world, 50))
    assert kinds_of(found) == all_states(world, "stale_state")
    assert {(one.expected, one.found) for one in found} == {("7", "6")}


@pytest.mark.parametrize("backend", WITH_DRAFTS)
def test_drafts_that_the_kernels_do_not_count_are_named(backend):
    """vLLM 0.26 to 0.31: no num_accepted_tokens in a step without drafts."""
    world = started(backend)
    assert world.step(**both(world, 30, 2, 0)) == []

    def uncounted(metadata):
        metadata.num_accepted_tokens = None
        if backend == "GDN_ATTN":
            metadata.num_decodes = 2
            table = metadata.spec_state_indices_tensor
            metadata.non_spec_state_indices_tensor = table[:, 0]
            metadata.spec_sequence_masks = metadata.has_initial_state = None

    world.spoils = uncounted
    found = world.step(a=1, b=1)
    assert kinds_of(found) == all_states(world, "stale_state")
    assert {one.owner for one in found} == {"a"}


@pytest.mark.parametrize("backend", SHAPES)
@pytest.mark.parametrize("is_first", [True, False])
def test_prompts_that_begin_or_go_on_with_the_wrong_state_are_named(backend, is_first):
    world = Hybrid(backend=backend)
    world.add("a", range(10, 17), [1, 2])

    def opposite(metadata):
        for name in ("has_initial_state", "has_initial_states_p"):
            if hasattr(metadata, name):
                setattr(metadata, name, ~getattr(metadata, name))
        if hasattr(metadata, "seq_lens"):
            metadata.seq_lens += 4 if is_first else -4

    if not is_first:
        assert world.step(a=4) == []
    world.spoils = opposite
    kind = "no_state_yet" if is_first else "state_lost"
    assert kinds_of(world.step(a=3)) == all_states(world, kind)


@pytest.mark.parametrize("backend", SHAPES)
@pytest.mark.parametrize("kind", ["conv", "temporal"])
def test_a_state_that_is_not_written_is_named(backend, kind):
    world = started(backend)
    world.step(a=work(world, "a", 30))
    world.unwritten = lambda of, part: of == kind
    found = world.step(a=work(world, "a", 40))
    has = any(state.kind == kind for state in world.state_caches)
    assert kinds_of(found) == ({("state_not_written", kind)} if has else set())


@pytest.mark.parametrize("backend", SHAPES)
def test_a_head_that_rests_is_named_only_where_it_has_to_be_written(backend):
    """A Mamba layer may leave a head's state as it is; all of them is a fault."""
    world = started(backend)
    world.step(a=work(world, "a", 30))
    world.unwritten = lambda of, part: of == "temporal" and part != 3
    found = kinds_of(world.step(a=work(world, "a", 40)))
    has_to = backend == "GDN_ATTN"
    assert found == ({("state_not_written", "temporal")} if has_to else set())


# --- refusals -------------------------------------------------------------------------


REFUSED = {
    "RecoverSSM keeps a window's inputs": {
        "use_replayssm": True,
        "use_kda_recoverssm": True,
    },
    "ReplaySSM keeps inputs": {"use_replayssm": True},
    "microbatches": {"use_ubatching": True},
    "mamba_cache_mode is all": {"cache_mode": "all"},
    f"layer {LAYER} has 5 states; expected 2": {"shapes": [CONV, *[MATRIX] * 4]},
    f"layer {LAYER} has 1 states; expected 2": {"shapes": [CONV]},
    f"the convolution of layer {LAYER} keeps 3 inputs; expected 7": {
        "shapes": [((WIDTH - 1, CHANNELS), torch.bfloat16), MATRIX]
    },
    "PLE_SHORT_CONV_ATTN is not followed, only GDN_ATTN": {
        "backend": "PLE_SHORT_CONV_ATTN",
        "shapes": [CONV],
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_says_why(reason):
    runner = a_runner(**{"backend": "MAMBA2_ATTN"} | REFUSED[reason])
    (group,) = states.groups_of(runner)
    assert group.refusal.startswith(reason)
    assert not group.states


@pytest.mark.parametrize("metadata", [{LAYER: SimpleNamespace()}, [{}], None])
def test_metadata_of_another_kind_ends_the_check_of_states(metadata):
    world = started("MAMBA2_ATTN")
    with pytest.raises(states.StatesRefused, match="metadata is a "):
        world.of_group.read(metadata, [])
