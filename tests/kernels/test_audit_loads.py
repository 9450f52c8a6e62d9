# SPDX-License-Identifier: Apache-2.0
"""What the audit says of KV connectors, in a world without vLLM (audit_world.py): loads
that are announced or not, digests of blocks, and stores."""

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.kernels.audit_world import (  # noqa: F401
    NUM_LAYERS,
    OTHER,
    TEXT,
    N,
    Work,
    World,
    computed,
    decode,
    each_runner,
    filling,
    identity,
    prefilled,
    signed,
)
from tests.kernels.reference import fields
from vllm_nwor.audit import state, tables
from vllm_nwor.audit.loads import CUT, FOUND, TAIL
from vllm_nwor.audit.requests import Handover
from vllm_nwor.hooks.scheduled import ScheduledStep
from vllm_nwor.layout.caches import Loads

# --- KV connectors --------------------------------------------------------------------


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


def test_a_load_of_what_a_block_has_kept_because_one_before_failed():
    world = filling()
    found, outbox = world.found, world.audit.outbox
    world.found = lambda: outbox.take(outbox.num_sent, failed={1, 2}).findings
    assert world.runs("b", OTHER[:9], [1, 2, 3], hit=8) == []
    world.finish("b")
    world.found = found
    world.transfers([[1, 2]], fills=True)
    assert world.runs("c", TEXT[:9], [1, 2, 4], hit=8) == []


@pytest.mark.parametrize("loads", [Loads.KNOWN, Loads.UNKNOWN])
def test_a_load_for_an_opaque_text(loads):
    """It is not what was in its blocks before; from here on it is watched."""
    world = filling(loads)
    world.fill(OTHER[:8])
    assert world.runs("b", OTHER[:9], [1, 2, 3], hit=8, is_opaque=True) == []
    assert world.counts("unverified") == (8,)
    assert world.hand_on([[1, 2]]) == []
    world.spoil(0, 1 * N + 1)
    assert fields(world.step(b=0)) == ["changed"]


def test_an_opaque_text_shares_blocks_with_one_that_is_known():
    """Where any of them may have been loaded, they match any text from then on."""
    world = World(loads=Loads.UNKNOWN)
    assert world.runs("a", TEXT[:9], [1, 2, 3]) == []
    world.add("b", TEXT[:9], [1, 2, 4], hit=8, is_opaque=True)
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


@pytest.mark.parametrize("source", ["nobody", "the scheduler", "the connector"])
def test_drafts_behind_what_was_loaded_into_their_block(source):
    """A load fills whole blocks: what is undone there is what it brought, not what the
    slots held when they were last looked at."""
    loads = Loads.KNOWN if source == "the connector" else Loads.UNKNOWN
    world = filling(loads, is_undone=True)
    world.can_say = source != "nobody"
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
    """The block was another group's; a draft is undone there, so that its bytes are
    known, but not of which token they are."""
    world = World(loads=Loads.KNOWN, is_undone=True, num_groups=2)
    world.add("a", TEXT[:4], [1], by_group=[[], [1]])
    assert world.step() == []
    world.finish("a")
    world.runs("b", [91], [1], rejected=(77,), by_group=[[1], []])
    world.finish("b")
    world.transfers([[1], []], fills=True)
    world.fill(TEXT[:1])
    found = world.runs("c", TEXT[:5], [1, 3], hit=4, by_group=[[1, 3], []])
    assert [finding for finding in found if finding.group == 0] == []


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
    assert world.runs("a", TEXT[:5], [1, 2]) == []
    blocks.clear()
    assert world.step(a=Work(1, (31, 32), 1)) == []
    text = world.requests["a"].text
    assert blocks == [world.digest(text, 2, 4, "a", 3, TAIL)]


@pytest.mark.parametrize("num_written", [6, 0])
def test_a_block_that_was_loaded_in_part_is_no_version_of_its_text(num_written):
    """The request goes on in it, also where the load left it as it was. Nor is the next
    one that begins there, from its own text, mistaken for it."""
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    (digests,) = world.audit.outbox.judge.digests
    assert world.runs("z", OTHER[:8], [1, 2]) == []
    world.finish("z")
    world.fill(TEXT[:num_written])
    world.local = {"a": 0}
    found = world.runs("a", TEXT[:8], [1, 2], hit=6)
    assert fields(found) == ["never_loaded"] * (6 - num_written)
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
    assert world.runs("a", TEXT[:4], [1], is_opaque=True) == []
    ((head, _),) = blocks
    assert (head[0], head[-1]) == (0, 0)


def test_a_load_of_zeros_is_found_in_all_layers():
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    for cache in world.caches:
        cache.zero_()
    world.local = {"a": 0}
    found = world.runs("a", TEXT[:5], [1, 2], hit=4)
    assert fields(found, "kind block num_layers") == [("never_loaded", 1, NUM_LAYERS)]


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


def test_slots_of_a_load_that_no_finding_names_are_unverified():
    """A load fills half of a block."""
    world = World(loads=Loads.UNKNOWN, num_digests=4)
    assert world.runs("a", OTHER[:4], [1]) == []
    world.finish("a")
    world.fill(TEXT[:2])
    world.local = {"b": 0}
    outbox = world.audit.outbox
    world.found = lambda: outbox.take(outbox.num_sent)
    found = world.runs("b", TEXT[:5], [1, 2], hit=4)
    never = [("never_loaded", 2), ("never_loaded", 3)]
    assert fields(found.findings, "kind position") == never
    assert (found.num_unverified, found.num_verified) == (2, 0)
    assert world.counts("unverified") == (2,)


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
    assert world.counts() == (0, 7)


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


# What comes back with it; what is found of the block's other slots; how many return.
WITH_UNCOMMITTED = {
    "the same": ([*TEXT[:7], 77], [], 7),
    "other bytes": ([*TEXT[:5], 78, 79, 77], ["handed_on"] * 2, 5),
    "nothing": ([*TEXT[:4], *OTHER[4:8]], ["never_loaded"] * 3, 4),
}


@pytest.mark.parametrize("case", WITH_UNCOMMITTED)
def test_a_slot_that_was_stored_uncommitted_is_unverified_when_it_comes_back(case):
    """Whatever is found of its block's others. It has the token of before."""
    brings, kinds, num_returned = WITH_UNCOMMITTED[case]
    world = stored(77, num_digests=4)
    world.found = lambda: world.audit.outbox.take(world.audit.outbox.num_sent)
    found = loaded(world, [*TEXT[:7], OTHER[7]], brings)
    assert fields(found.findings) == kinds
    assert world.counts() == (1, num_returned)
    assert (found.num_unverified, found.num_verified) == world.counts()


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
