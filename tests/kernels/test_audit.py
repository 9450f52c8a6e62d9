# SPDX-License-Identifier: Apache-2.0
"""The audit's findings of texts, blocks and bytes, in a world without vLLM
(audit_world.py). A test runs steps, spoils one thing, and expects exactly one finding,
or none. Loads: test_audit_loads.py."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.kernels.audit_world import (  # noqa: F401
    EVERYTHING,
    HEADS,
    NUM_BLOCKS,
    NUM_LAYERS,
    OTHER,
    TEXT,
    WIDTH,
    N,
    Work,
    World,
    checksum,
    computed,
    decode,
    each_runner,
    filling,
    identity,
    prefilled,
)
from tests.kernels.reference import fields
from vllm_nwor import ops
from vllm_nwor.step import Weights

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
    assert world.runs("b", OTHER[:4] + TEXT[4:9], [1, 2, 6], hit=8) == []
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


@pytest.mark.parametrize(("positions", "unverified"), [((4, 0), 0), ((6,), 2)])
def test_a_load_that_failed_sends_a_request_back(positions, unverified):
    """Its identity is still known, so that a hit on it can be verified, but for the
    rest of a block that it goes back into."""
    world = prefilled()
    for position in positions:
        world.requests["a"].computed = position
        assert world.step(a=10 - position) == []
    assert decode(world) == []
    assert world.runs("c", TEXT[:9], [1, 2, 11], hit=8) == []
    assert world.counts("unverified") == (unverified,)


@pytest.mark.parametrize("is_opaque", [False, True])
def test_what_an_opaque_text_takes_over_is_unverified(is_opaque):
    """From a text that is known, or another that is not; or a rejected draft."""
    world = World()
    about = {"rejected": (77,), "is_opaque": is_opaque}
    assert world.runs("a", TEXT[:9], [1, 2, 3], **about) == []
    assert world.runs("b", OTHER[:9], [1, 2, 4], hit=8, is_opaque=True) == []
    assert world.counts("unverified") == (8,)
    assert world.runs("c", OTHER[:12], [1, 2, 3], hit=11, is_opaque=True) == []
    assert world.counts("unverified") == (8 + 11,)


# --- images ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "position"),
    [
        (("red", 2, 4), None),
        (("blue", 2, 4), 2),
        # The same image elsewhere; and one that ends elsewhere.
        (("red", 3, 4), 2),
        (("red", 2, 5), 6),
    ],
)
def test_a_text_with_an_image_is_that_texts_with_that_image(image, position):
    """A finding for the first slot of each block that is another's; nothing is left
    unverified."""
    world = World()
    red = [("red", 2, 4)]
    assert world.runs("a", TEXT[:9], [1, 2, 3], images=red) == []
    found = world.runs("b", TEXT[:9], [1, 2, 4], hit=8, images=[image])
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
        world.add(name, TEXT[:9], [1, 2, 3], images=[(name, 2, 4)])
        found = world.step(**{name: 9}, skip=lambda layer, slot: slot in image)
        expected = [("missing_write", p) for p in range(2, 6)]
        assert fields(found, "kind position") == expected * (name == "red")


def test_bytes_of_an_opaque_text_are_watched_for_others():
    world = World()
    assert world.runs("a", TEXT[:7], [1, 2, 3], is_opaque=True) == []
    world.finish("a")
    world.spoil(0, 1 * N + 2)
    found = world.runs("b", TEXT[:5], [1, 4], hit=4)
    assert fields(found, "kind slot") == [("changed", 1 * N + 2)]


def test_a_block_of_an_opaque_text_with_a_rejected_draft_is_handed_on():
    world = World()
    about = {"rejected": (77,), "is_opaque": True}
    assert world.runs("a", TEXT[:7], [1, 2, 3], **about) == []
    found = world.hand_on([[1, 2]])
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
    found = world.runs("d", [*text, 8], [4, 5, 6, 12], hit=12)
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
    assert world.runs("f", OTHER[10:20], [13, 14, 15], hit=8) == []
    world.weights = Weights()
    assert world.runs("g", TEXT[:9], [1, 2, 11], hit=8) == []


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
    scheduled = world._scheduled({})
    scheduled.scheduled_cached_reqs = resumed
    world.requests["a"].computed, world.requests["a"].blocks = 4, [1, 2, 11]
    with patch.object(world, "_scheduled", return_value=scheduled):
        assert fields(world.step(a=6), "kind slot") == [("stale_weights", N)]
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


@pytest.mark.parametrize("is_behind_plan", [False, True])
def test_a_request_in_flight_across_a_change_of_its_adapter(is_behind_plan):
    """It keeps its identity; so its adapter's first content does not come back under
    the old one, as its blocks hold both."""
    world = with_adapter()
    assert world.runs("b", OTHER[:6], [4, 5, 6], lora=1) == []
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
        about = {"lora": 1, "images": [("red", 2, 3)]}
        world.add("c", TEXT[:10], [1, 2, 11, 12], hit=hit, **about)
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
    with patch.object(world.audit, "resolve"):
        world.step(c=Work(1, (92,), 0))
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
    with patch.object(world.audit, "resolve"):
        world.step(b=1)
    world.requests["b"].computed = 8
    assert world.step(b=1) == []
    assert world.counts("unverified") == (8,)


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
