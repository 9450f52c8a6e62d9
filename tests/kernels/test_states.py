# SPDX-License-Identifier: Apache-2.0
"""The audit's ops on recurrent states against a plain reference, in a world without
vLLM (states_world.py). Each step of it compares every field of every finding with the
reference's; the tests below also say what the findings must be.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from tests.kernels.reference import fields, launched
from tests.kernels.states_batch import (
    CONV,
    NUM_SEATS,
    TEMPORAL,
    Metadata,
    Shape,
    Work,
    any_shape,
)
from tests.kernels.states_reference import UNKNOWN
from tests.kernels.states_world import World
from vllm_nwor import ops
from vllm_nwor.audit.states import word_offsets
from vllm_nwor.layout.states import StateCache, StatesRefused

SHAPES = {
    "plain": Shape(),
    "few bits": Shape(temporal=torch.bfloat16, num_heads=3),
    "wide columns": Shape(conv=torch.float32, num_heads=12, num_drafts=5),
    "channels last": Shape(1, 3, 1, 2, 1, is_dim_first=True),
    # On CUDA more than one thread block takes.
    "many layers": Shape(num_layers=5, num_drafts=1),
}


def window(*tokens: int, accepted: int = 0) -> Work:
    """A token and its drafts."""
    return Work(tokens, len(tokens) - 1, accepted, is_window=True)


def verified(device: torch.device, shape: Shape = SHAPES["plain"]) -> World:
    """Two requests with prompts of 5 and 4 tokens, and a window each, of which three
    tokens were kept, or all. They read column 2 next, or the last one."""
    world = World(device, shape)
    world.add("a")
    world.add("b")
    assert world.step({"a": Work((1, 2, 3, 4, 5)), "b": Work((6, 7, 8, 9))}) == []
    most = min(2, shape.num_drafts)
    tokens = range(11, 11 + shape.max_columns)
    works = {
        "a": window(*tokens, accepted=most),
        "b": window(*(10 + token for token in tokens), accepted=most),
    }
    assert world.step(works) == []
    return world


NEXT = {"a": window(31, 32), "b": window(33)}


# --- any batch ------------------------------------------------------------------------


def some_works(world: World, draw: random.Random) -> dict[str, Work]:
    """Rows in any order: chunks of any length, windows, and nothing."""
    works: dict[str, Work] = {}
    names = list(world.running)
    draw.shuffle(names)
    for name in names:
        request = world.running[name]
        if draw.random() < 0.1:
            works[name] = Work(())
            continue
        few = draw.choice((1, 2, 50))
        tokens = [draw.randrange(few) for _ in range(draw.randint(1, 9))]
        if not request.text or (request.num_kept == 1 and draw.random() < 0.3):
            works[name] = Work(tuple(tokens))
            continue
        tokens = tokens[: world.shape.max_columns]
        accepted = draw.randint(0, len(tokens) - 1)
        works[name] = window(*tokens, accepted=accepted)
    return works


def wrong_metadata(
    world: World, works: dict[str, Work], draw: random.Random
) -> Callable[[list[Metadata]], None]:
    """A wrong value somewhere in it."""
    others = range(1, world.shape.num_blocks)
    n = draw.choice((-5, 0, 1, 2, world.shape.max_columns + 1, 1 << 30))
    block = draw.choice([0, world.shape.num_blocks, -1, 1 << 20, *others])

    def spoil(metadata: list[Metadata]) -> None:
        of = draw.choice(metadata)
        what = draw.randrange(5)
        if what == 0 and len(of.num_accepted):
            of.num_accepted[draw.randrange(len(of.num_accepted))] = n
        elif what == 1 and len(of.window_blocks):
            of.window_blocks[draw.randrange(len(of.window_blocks))] = block
        elif what == 2 and len(of.window_blocks) > 1:
            of.window_blocks[:2] = of.window_blocks[:2].flip(0)
        elif what == 3 and len(of.blocks):
            of.blocks[draw.randrange(len(of.blocks))] = block
        elif of.has_state is not None and len(of.has_state):
            of.has_state.logical_not_()

    return spoil


def wrong_bytes(world: World, draw: random.Random) -> Callable[[Any], None]:
    """Of a block of one layer."""

    def spoil(_: Any = None) -> None:
        number = draw.randrange(len(world.flat))
        g, state = world.flat[number]
        request = draw.choice(list(world.running.values()))
        of_block = state.tensor[draw.choice(request.tables[g])]
        what = draw.randrange(3)
        if what == 0:
            of_block.zero_()
        elif what == 1:
            of_block.copy_(of_block.roll(1, dims=0))
        else:
            of_block[draw.randrange(len(of_block))] += 1

    return spoil


@pytest.mark.parametrize("is_faulty", [False, True])
@given_settings(max_examples=25)
@given(seed=st.integers(0, 1 << 40))
def test_any_steps(device: torch.device, is_faulty: bool, seed: int) -> None:
    """Silent while all is right, and what the reference finds where it is not."""
    draw = random.Random(seed)
    world = World(device, any_shape(draw))
    number = 0
    for _ in range(draw.randint(3, 12)):
        if len(world.running) < 3 and number < 5 and draw.random() < 0.6:
            world.add(f"r{number}")
            number += 1
        if not world.running:
            continue
        works = some_works(world, draw)
        arguments: dict[str, Any] = {}
        if is_faulty and draw.random() < 0.6:
            what = draw.randrange(4)
            skipped = draw.choice(list(works)), draw.choice((CONV, TEMPORAL))
            if what == 0:
                arguments["spoil"] = wrong_metadata(world, works, draw)
            elif what == 1:
                arguments["spoil"] = wrong_bytes(world, draw)
            elif what == 2:
                arguments["skip"] = lambda name, _, kind, at=skipped: (name, kind) == at
            else:
                world.reseat(draw.choice(list(works)))
        rejects, num_padded = draw.random() < 0.5, draw.randrange(3)
        found = world.step(works, rejects=rejects, num_padded=num_padded, **arguments)
        assert is_faulty or found == []
        if draw.random() < 0.1:
            world.remove(draw.choice(list(world.running)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "rejects", [pytest.param(False, marks=pytest.mark.sanitizer), True]
)
def test_any_number_kept_is_silent(
    device: torch.device, shape: Shape, rejects: bool
) -> None:
    """Windows of 0 to K drafts next to a chunk; then all is read once more."""
    world = World(device, shape)
    for name in "abc":
        world.add(name)
    prompts = {"a": Work((1, 2, 3)), "b": Work((4,)), "c": Work((5, 6))}
    assert world.step(prompts, num_padded=1) == []
    token = 10
    for num_drafts in range(shape.max_columns):
        for accepted in range(num_drafts + 1):
            token += 1
            tokens = range(token, token + num_drafts + 1)
            works = {
                "b": window(*tokens, accepted=accepted),
                "c": Work((token, 2)),
                "a": window(*tokens, accepted=num_drafts - accepted),
            }
            assert world.step(works, rejects=rejects, num_padded=2) == []
    num_steps, compared = world.step_number, world.states.totals.tolist()
    assert compared == [3 * (num_steps - 1) * len(world.flat), 0]


# --- one fault ------------------------------------------------------------------------


def table_of(world: World, name: str, group: int) -> list[int]:
    return world.running[name].tables[group]


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_column_of_another_draft_is_stale(device, shape):
    world = verified(device, shape)
    of_a = min(3, shape.max_columns)

    def first_draft(metadata):
        for one in metadata:
            one.num_accepted[0] = 1

    found = world.step(NEXT, first_draft)
    g0, num_layers = world.flat[0][1].name, shape.num_groups * shape.num_layers
    block = table_of(world, "a", 0)[0]
    names = "kind state layer num_layers group block column owner wrote position"
    about = "stale_state", g0, num_layers, 10, block, 0, "a", ("a", 2)
    kinds = {("conv", "temporal")[n]: about for n in range(2)}
    assert fields(found, f"{names} step expected found slot") == [
        (*about[:1], state, *about[1:], 5 + of_a, 3, str(5 + of_a), "6", None)
        for state in kinds
    ]


@pytest.mark.sanitizer
def test_another_requests_states_are_foreign(device):
    """One group has the rows of two windows the wrong way round."""
    world = verified(device)

    def swapped(metadata):
        metadata[1].window_blocks[:2] = metadata[1].window_blocks[:2].flip(0)

    found = world.step(NEXT, swapped)
    named = "owner wrote expected found kind state layer num_layers"
    assert sorted(fields(found, named)) == [
        (*of_request, "foreign_state", state, "g1.0", 2)
        for of_request in (("a", ("b", 2), "8", "7"), ("b", ("a", 2), "7", "8"))
        for state in ("conv", "temporal")
    ]


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeroed": lambda of: of.zero_(),
    "one head": lambda of: of[7 * len(of) // 8].zero_(),
    "shifted": lambda of: of.copy_(of.roll(1, dims=1)),
}


def read_block(world: World, name: str, number: int) -> torch.Tensor:
    """What a request reads next of a state."""
    g, state = world.flat[number]
    request = world.running[name]
    column = request.num_kept - 1 if state.kind is TEMPORAL else 0
    return state.tensor[request.tables[g][column]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_nobodys(device, shape, change):
    """In the layer in which it is, and once."""
    world = verified(device, shape)
    number = len(world.flat) - 1
    name = world.flat[number][1].name

    def spoil(_):
        CHANGES[change](read_block(world, "a", number))

    found = world.step(NEXT, spoil)
    of_a = 5 + min(3, shape.max_columns)
    assert fields(found, "kind state layer num_layers owner wrote position found") == [
        ("changed_state", "temporal", name, 1, "a", (None, 0), of_a, "unknown")
    ]
    assert world.step(NEXT) == []


def sampled(world: World, number: int) -> list[int]:
    """Offsets of the bytes of a sample, in a block or column."""
    size, offsets = word_offsets(world.flat[number][1])
    return [at + byte for at in offsets for byte in range(size)]


@pytest.mark.parametrize("number", [0, 1], ids=["conv", "temporal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_byte_of_the_sample_and_no_other(device, shape, number):
    """What lies outside of it is not seen: docs/audit.md says so."""
    world = World(device, shape)
    world.add("a")
    assert world.step({"a": Work((1, 2, 3, 4, 5, 6))}) == []
    g, state = world.flat[number]
    block = world.running["a"].tables[g][0]
    pages = world.caches[0][0].pages
    of_block = state.tensor[block] if number else state.tensor[block, 1]
    size = state.tensor.element_size()
    first = of_block.storage_offset() * size
    inside = set(sampled(world, number))
    draw = random.Random(shape.num_heads)
    places = [0]
    for count, stride in zip(of_block.shape, of_block.stride(), strict=True):
        places = [at + i * stride * size for at in places for i in range(count)]
    outside = {at + byte for at in places for byte in range(size)} - inside
    assert len(inside) == 32 * world.states._tensors[0][number, 7]
    chosen = [(at, True) for at in draw.sample(sorted(inside), 8)]
    chosen += [(at, False) for at in draw.sample(sorted(outside), 8)]
    for token, (at, is_seen) in enumerate(chosen, 50):

        def spoil(_, at=at):
            pages[first + at] ^= 1

        found = world.step({"a": Work((token,))}, spoil)
        kinds = [("changed_state", state.kind, 1)] if is_seen else []
        assert fields(found, "kind state num_layers") == kinds


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", [CONV, TEMPORAL])
def test_a_state_that_is_not_written(device, shape, kind):
    """In the column of the last kept token; the request will read what was there."""
    world = verified(device, shape)
    name = world.flat[-1][1].name
    kept = window(*range(31, 31 + shape.max_columns), accepted=1)
    works = {"a": kept, "b": window(33)}
    found = world.step(works, skip=lambda *place: place == ("a", name, kind))
    end = 5 + min(3, shape.max_columns) + 2
    named = "kind state layer num_layers owner wrote position expected found column"
    about = str(kind), name, 1, "a", ("a", 3), end - 1, str(end), "unknown", 1
    assert fields(found, named) == [("state_not_written", *about)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_head_that_is_not_written(device, shape):
    """Every head whose part is in the sample; in few bits, where a part often stays as
    it is, nothing is concluded from one."""
    world = verified(device, shape)
    g, state = world.flat[1]
    heads = sorted({part * shape.num_heads // 8 for part in range(8)})
    for token, head in enumerate(heads, 40):
        column = world.running["a"].tables[g][0]
        before = state.tensor[column, head].clone()

        def restore(head=head, before=before, column=column):
            state.tensor[column, head] = before

        works = {"a": window(token)}
        found = world.step(works, after=restore)
        is_seen = shape.temporal == torch.float32 or shape.num_heads == 1
        kinds = [("state_not_written", "temporal", 1)] if is_seen else []
        assert fields(found, "kind state num_layers") == kinds


@pytest.mark.parametrize("kind", [CONV, TEMPORAL])
@pytest.mark.parametrize("last", [False, True])
def test_nothing_follows_from_the_same_token_again(device, kind, last):
    """The one that the block had last, or any of the buffer."""
    world = World(device, SHAPES["plain"])
    world.add("a")
    assert world.step({"a": Work((1, 2, 3, 4))}) == []
    again = 4 if last else 3
    found = world.step({"a": Work((again,))}, skip=lambda *place: place[2] is kind)
    is_seen = kind is TEMPORAL and not last
    assert fields(found) == ["state_not_written"] * is_seen


@pytest.mark.parametrize("fill", ["zero_", "normal_"])
def test_a_new_block_that_is_not_written_is_named_unless_it_is_zero(device, fill):
    """A head may have nothing to say."""
    world = World(device, SHAPES["plain"])
    world.add("a")

    def filled(_: Any) -> None:
        for _, state in world.flat:
            getattr(state.tensor, fill)()

    found = world.step(
        {"a": Work((1, 2))}, filled, skip=lambda *place: place[2] is TEMPORAL
    )
    assert fields(found) == ["state_not_written"] * (fill == "normal_")


def test_a_graph_of_decodes_runs_no_prompts(device):
    """vLLM issue 53051, whatever the prompt's states are then."""
    world = World(device, SHAPES["plain"])
    for name in ("a", "b", "c"):
        world.add(name)
    assert world.step({"a": Work((1, 2, 3)), "b": Work((4,))}) == []

    def replay(metadata: list[Metadata]) -> None:
        for of in metadata:
            of.only_decodes = True

    works = {"a": window(5, 6), "b": Work((7,)), "c": Work((8, 9))}
    found = world.step(works, replay)
    assert {(one.kind, one.owner) for one in found} == {("state_not_written", "c")}
    assert {one.state for one in found} == {"conv", "temporal"}


@pytest.mark.parametrize("kind", [CONV, TEMPORAL])
def test_nothing_follows_from_what_is_not_known(device, kind):
    """A request goes on from tokens that the audit has not seen: they may be the same
    ones."""
    world = World(device, SHAPES["plain"])
    request = world.add("a")
    assert world.step({"a": Work((1, 2, 3, 4))}) == []
    world.reseat("a")
    unknown = world.states.last_tokens.fill_(UNKNOWN)
    places = itertools.product(*map(range, unknown.shape))
    world.reference.last_tokens = dict.fromkeys(places, UNKNOWN)
    assert world.step({"a": Work((2,))}, skip=lambda *place: place[2] is kind) == []
    assert world.states.totals.tolist() == [0, len(world.flat)]
    # The buffer is known to hold 2, and then 5, but not what was before.
    assert world.step({"a": Work((5,))}) == []
    found = world.step({"a": Work((3,))}, skip=lambda *place: place[2] is kind)
    assert fields(found) == ["state_not_written"]
    assert request.text == [1, 2, 3, 4, 2, 5, 3]


def test_a_column_of_an_earlier_window_is_nobodys(device):
    world = verified(device)
    assert world.step({"a": window(31)}) == []

    def fourth(metadata):
        for one in metadata:
            one.num_accepted[0] = 4

    found = world.step({"a": window(32)}, fourth)
    named = "kind state num_layers found column"
    states = ("conv", "temporal")
    assert fields(found, named) == [
        ("changed_state", one, 4, "unknown", 3) for one in states
    ]


def test_a_rejected_drafts_state_need_not_be_written(device):
    world = verified(device)
    g, state = world.flat[1]
    block = state.tensor[table_of(world, "a", g)[3]]
    before = block.clone()
    works = {"a": window(31, 32, 33, 34, accepted=1)}
    assert world.step(works, after=lambda: block.copy_(before)) == []


def test_a_request_that_goes_back_is_not_known(device):
    """As after a load that failed: its states are of another length."""
    world = verified(device)
    del world.running["a"].text[-1:]
    before = world.states.totals.tolist()
    assert world.step({"a": window(33)}) == []
    compared, unknown = world.states.totals.tolist()
    assert (compared, unknown) == (before[0], len(world.flat))


def test_tokens_of_an_image_may_be_the_same_input(device):
    """Its places have numbers of their own below 0, and perhaps equal pixels."""
    world = World(device, SHAPES["plain"])
    world.add("a")
    assert world.step({"a": Work((1, 2, 3, -5, -6, -7))}) == []
    assert world.step({"a": Work((-8,))}, skip=lambda *_: True) == []


@pytest.mark.sanitizer
def test_a_new_request_that_reads_a_state(device):
    """A prompt of one token that is taken for a window, or for a decode."""
    world = verified(device)
    world.remove("a")
    world.add("c")
    found = world.step({"c": window(1, 2, accepted=0), "b": window(33)})
    named = "kind state owner wrote position expected found block column num_layers"
    block = table_of(world, "c", 0)[0]
    about = "c", (None, 0), 0, "0", "unknown", block, 0, 4
    states = ("conv", "temporal")
    assert fields(found, named) == [("no_state_yet", one, *about) for one in states]
    world.add("d")

    def all_have(metadata):
        for one in metadata:
            one.has_state = None

    found = world.step({"d": Work((1,))}, all_have)
    assert fields(found, "kind owner") == [("no_state_yet", "d")] * 2


NO_STATE: dict[str, Callable[[Metadata], Any]] = {
    "none accepted": lambda of: of.num_accepted.fill_(0),
    "too many": lambda of: of.num_accepted.fill_(1 << 30),
    "negative": lambda of: of.num_accepted.fill_(-(1 << 31)),
    "null block": lambda of: of.window_blocks.fill_(0),
    "no block": lambda of: of.window_blocks.fill_(-1),
    "beyond the cache": lambda of: of.window_blocks.fill_((1 << 31) - 1),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("what", NO_STATE)
def test_a_window_that_reads_no_state(device, what):
    """Values out of range are followed nowhere. The block is the request's first."""
    world = verified(device)
    names_block = what in list(NO_STATE)[:3]
    block = table_of(world, "a", 1)[0] if names_block else 0
    found = world.step({"a": window(31, 32)}, lambda ms: NO_STATE[what](ms[1]))
    found = [one for one in found if one.kind == "state_lost"]
    named = "state group layer num_layers owner wrote position expected found block"
    column = 0 if names_block else 2
    about = 11, "g1.0", 2, "a", (None, 0), 8, "8", "unknown", block, column
    states = ("conv", "temporal")
    assert fields(found, f"{named} column") == [(one, *about) for one in states]


@pytest.mark.sanitizer
def test_a_single_state_with_rejected_drafts_in_it(device):
    world = World(device, SHAPES["plain"])
    world.add("a")
    assert world.step({"a": Work((1, 2, 3))}) == []
    found = world.step({"a": Work((4, 5, 6), 2, 1)})
    named = "kind state num_layers wrote position expected found column"
    about = 4, ("a", 2), 4, "5", "6", 0
    states = ("conv", "temporal")
    assert fields(found, named) == [("state_ahead", one, *about) for one in states]
    # What it reads next is that state.
    assert world.step({"a": Work((7,))}) == []


def test_the_state_of_a_request_that_has_left_is_foreign(device):
    """In a block that another one reads."""
    world = verified(device)
    left = [table_of(world, "a", g)[2] for g in range(2)]
    world.remove("a")

    def copy(_):
        for number, (g, state) in enumerate(world.flat):
            if state.kind is TEMPORAL:
                read_block(world, "b", number).copy_(state.tensor[left[g]])

    found = world.step({"b": window(33)}, copy)
    named = "kind state num_layers owner wrote expected found"
    about = "foreign_state", "temporal", 4, "b", ("a", 2), "7", "8"
    assert fields(found, named) == [about]


# --- the ops --------------------------------------------------------------------------


@pytest.mark.gpu
def test_one_launch_each_and_nothing_is_allocated():
    ops.load("cuda")
    world = verified(torch.device("cuda"))
    library, world.lib = world.lib, copy.copy(world.lib)
    launches = []

    def watched(op, *args):
        launches.append(launched(functools.partial(op, *args)))

    for name in ("audit_states_read", "audit_states_written"):
        setattr(world.lib, name, functools.partial(watched, getattr(library, name)))
    assert world.step(NEXT) == []
    (read,), (written,) = launches
    assert "ReadStates" in read
    assert "WrittenStates" in written


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_dim_first", [False, True])
def test_the_words_of_a_convolution_are_its_own(dtype, is_dim_first):
    """32 channels, however many there are."""
    for channels in range(32, 120):
        buffer = torch.empty(2, 6, channels, dtype=dtype)
        if is_dim_first:
            buffer = torch.empty(2, channels, 6, dtype=dtype).transpose(1, 2)
        size, offsets = word_offsets(StateCache("a", CONV, buffer, 3))
        step = buffer.stride(2) * size
        assert {at % step for at in offsets} == {0}
        assert len(set(offsets)) == 32
        assert max(offsets) // step < channels


@pytest.mark.parametrize("heads", range(1, 13))
def test_the_words_of_a_matrix_are_of_as_many_heads_as_there_are_parts(heads):
    state = torch.empty(2, heads, 16, 32)
    size, offsets = word_offsets(StateCache("a", TEMPORAL, state))
    assert size * len(set(offsets)) == 256
    of_heads = {at // (16 * 32 * 4) for at in offsets}
    assert len(of_heads) == min(heads, 8)
    assert max(of_heads) < heads


def test_states_that_cannot_be_read_in_words_are_refused():
    memory = torch.empty(4096, dtype=torch.bfloat16)
    odd = memory[1:1025].view(1, 2, 16, 32)
    with pytest.raises(StatesRefused):
        word_offsets(StateCache("a", TEMPORAL, odd))
    with pytest.raises(StatesRefused):
        word_offsets(StateCache("a", CONV, memory[:124].view(1, 4, 31), 3))


def test_a_batch_of_more_requests_than_seats_is_refused(device):
    world = World(device, SHAPES["plain"])
    rows = world.group.tables, *[torch.zeros(9, dtype=torch.int32, device=device)] * 2
    table = torch.zeros((9, 1), dtype=torch.int32, device=device)
    metadata = torch.zeros((2, 8), dtype=torch.int64)
    about = *rows, table, NUM_SEATS + 1, 0, 1, world.states.tables, metadata
    said = "num_reqs is 4; must be at most 3, the seats"
    for op, more in (("read", ()), ("written", (None, None, 0, None, None))):
        with pytest.raises(RuntimeError, match=f"^audit_states_{op}: {said}$"):
            getattr(world.lib, f"audit_states_{op}")(*about, *more)


def test_digests_of_another_shape_are_refused(device):
    world = verified(device)
    to = torch.zeros(
        (2, NUM_SEATS, world.states.digests_shape[2], 8), dtype=torch.int64
    )
    world.digests_to = to
    columns = world.states.digests_shape[3]
    said = rf"digests_to has shape \[.*, 8\]; dimension 3 must be {columns}, a digest"
    with pytest.raises(RuntimeError, match=f"^audit_states_written: {said}"):
        world.step(NEXT)
