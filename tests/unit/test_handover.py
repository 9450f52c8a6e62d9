# SPDX-License-Identifier: Apache-2.0
"""Digests that travel between two instances: their sums, what they say of a fault, and
how large they are. tests/integration/test_handover.py has two engines."""

from __future__ import annotations

import base64
import hmac
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

from tests.helpers.logs import nwor_log
from tests.kernels.audit_world import GAMMA, mix
from vllm_nwor import metrics
from vllm_nwor.audit import handover
from vllm_nwor.audit.handover import Given, Handovers, Refused, Result
from vllm_nwor.audit.loads import COMPUTED, FOUND, LOADED, TAIL, Heads, Wrong
from vllm_nwor.audit.requests import Handover
from vllm_nwor.base import errors
from vllm_nwor.config import MIN_SECRET_BYTES, NworConfig, NworConfigError, secret_in
from vllm_nwor.hooks import scheduler as scheduler_hooks
from vllm_nwor.metrics import HANDOVERS, AuditPrometheus
from vllm_nwor.step import Adapter, NewRequest

SECRET = b"s" * 32
SIZE, LAYERS, BLOCKS, LAST = 4, 3, 3, 2
# Three blocks, and three tokens of another one.
PROMPT = tuple(range(100, 100 + BLOCKS * SIZE + LAST + 1))
HERE, THERE = 7, 9


def group(number: int = 0, size: int = SIZE, layers: int = LAYERS) -> Any:
    layout = SimpleNamespace(slot_bytes=64, runs=None)
    cache = torch.empty(0, dtype=torch.bfloat16)
    names = [f"layer{n}" for n in range(layers)]
    return SimpleNamespace(
        shape=SimpleNamespace(group_id=number, block_size=size),
        layers=[SimpleNamespace(name=n, layout=layout, kv_cache=cache) for n in names],
        names=names,
    )


def request(params: Any = None, **more: Any) -> NewRequest:
    values = "a", [], 0, True, None, None, (), False
    about = dict(zip(NewRequest._fields, values, strict=False))
    return NewRequest(**about | {"prompt": PROMPT, "transfer_params": params} | more)


def rows(kinds: Any, generation: int, numbers: Any = range(BLOCKS + 1)) -> Any:
    """Heads and sums of blocks of a text, as the device would send them; number n is in
    block 20 + n of the cache. kinds: of each."""
    num = len(numbers)
    heads = np.zeros((len(Heads._fields), num), np.int64)
    found = Heads(*heads)
    found.block[:] = np.array(numbers) + 20
    found.position[:] = np.array(numbers) * SIZE
    found.generation[:], found.kind[:], found.is_known[:] = generation, kinds, 1
    found.num_slots[:] = [
        {TAIL: LAST + (generation == THERE)}.get(k, SIZE) for k in kinds
    ]
    rng = np.random.default_rng(5)
    table = rng.integers(0, 1 << 63, (BLOCKS + 1, SIZE), np.uint64)
    return found, table[np.array(numbers)]


def prefilled(kinds: Any = (COMPUTED, COMPUTED, FOUND, TAIL)) -> str:
    """What the prefill instance sends."""
    instance = Handovers([group()], SECRET, 1)
    params = {"do_remote_decode": True}
    assert instance.begin(THERE, request(params)) is Handover.GIVES
    assert instance.arrived(0, *rows(kinds, THERE)) == {}
    return instance.ready[THERE]


def decoder(sent: Any = None, **more: Any) -> Handovers:
    instance = Handovers([group()], SECRET, 1)
    params = {"do_remote_prefill": True, "nwor": sent or prefilled()} | more
    assert instance.begin(HERE, request(params)) is Handover.TAKES
    return instance


LOADS = (LOADED, LOADED, LOADED, TAIL)


def judged(instance: Handovers, kinds: Any = LOADS, change: Any = None) -> Any:
    """Of each block, and the result. change: mutates what arrives."""
    numbers = [n for n, kind in enumerate(kinds) if kind is not None]
    heads, sums = rows([kinds[n] for n in numbers], HERE, numbers)
    if TAIL in kinds:  # a block that is loaded in part, and its tail
        heads = Heads(*(np.append(of, of[-1]) for of in heads))
        sums = np.concatenate([sums, sums[-1:] + np.uint64(1)])
        heads.kind[-1] = LOADED
    if change is not None:
        change(heads, sums)
    found = instance.arrived(0, heads, sums)
    return {block - 20: one for (_, block), one in found.items()}, instance.results


def test_sums_are_those_of_the_device():
    words = np.array([[3, 1 << 63, 7]], np.uint64)
    expected = [mix(int(word) + n * GAMMA) for n, word in enumerate(words[0], 1)]
    assert handover.row_sums(words).tolist() == [sum(expected) % 2**64]
    columns = handover.column_sums(
        np.array([4, 1]), np.array([[3, 5], [2, 8]], np.uint64)
    )
    assert columns.tolist() == [
        (mix(3 + 5 * GAMMA) + mix(2 + 2 * GAMMA)) % 2**64,
        (mix(5 + 5 * GAMMA) + mix(8 + 2 * GAMMA)) % 2**64,
    ]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_wrong_block_and_its_layers(block):
    def change(heads, sums):
        sums[block, 1:3] += np.uint64(1)

    found, results = judged(decoder(), change=change)
    wrong = found.pop(block)
    assert (wrong.kind, wrong.layer, wrong.num_layers) == ("not_as_sent", 1, 2)
    assert wrong.expected != wrong.found
    assert set(found.values()) == {True}
    assert results == {Result.WRONG: 1}


def test_layers_are_not_named_where_a_block_computed_here_differs():
    """Nor if it is not there. It is no finding."""

    def change(heads, sums):
        sums[0, 0] += np.uint64(1)  # found here
        sums[-3 if len(sums) > 3 else -1, 1] += np.uint64(1)

    found, _ = judged(decoder(), (FOUND, LOADED, LOADED, TAIL), change)
    assert (found[2].layer, found[2].num_layers) == (-1, 0)
    assert found.keys() == {1, 2, 3}
    assert found[1] is True
    found, _ = judged(decoder(), (None, None, LOADED), change)
    assert (found[2].layer, found[2].num_layers) == (-1, 0)


def test_a_wrong_slot_of_the_last_block():
    def change(heads, sums):
        sums[BLOCKS, 1] += np.uint64(1)
        sums[BLOCKS, LAST:] += np.uint64(1)  # not loaded

    found, _ = judged(decoder(), change=change)
    wrong = found[BLOCKS]
    assert isinstance(wrong, Wrong)
    assert (wrong.offset, wrong.layer) == (1, -1)


@pytest.mark.parametrize("block", [*range(BLOCKS), BLOCKS])
def test_blocks_without_checksums_here_stay_unverified(block):
    def change(heads, sums):
        heads.is_known[block] = 0
        sums[block] += np.uint64(1)

    found, results = judged(decoder(), change=change)
    assert found.pop(block) is False
    assert set(found.values()) == {True}
    assert results == {Result.PARTIAL: 1}


def test_blocks_without_checksums_there_stay_unverified():
    instance = Handovers([group()], SECRET, 1)
    instance.begin(THERE, request({"do_remote_decode": True}))
    heads, sums = rows((COMPUTED, COMPUTED, LOADED, TAIL), THERE)
    heads.is_known[0], heads.num_slots[2] = 0, SIZE - 1
    instance.arrived(0, heads, sums)

    def change(heads, sums):
        sums[1, 0] += np.uint64(1)

    found, results = judged(decoder(instance.ready[THERE]), change=change)
    assert (found[0], found[2], found[3]) == (False, False, True)
    assert (found[1].kind, found[1].layer) == ("not_as_sent", -1)
    assert results == {Result.WRONG: 1}


def test_it_is_sent_when_the_last_token_was_computed():
    """In the step before there are digests already, and a shorter tail."""
    instance = Handovers([group()], SECRET, 1)
    instance.begin(THERE, request({"do_remote_decode": True}))
    heads, sums = rows((COMPUTED, COMPUTED, COMPUTED, TAIL), THERE)
    heads.num_slots[3] = LAST
    instance.arrived(0, heads, sums)
    assert instance.ready == {}
    heads.num_slots[3] = LAST + 1
    instance.arrived(0, heads.of([3]), sums[[3]])
    assert instance.ready.keys() == {THERE}
    assert judged(decoder(instance.ready[THERE]))[1] == {Result.VERIFIED: 1}


def test_each_group_is_compared_with_its_own():
    groups = [group(0), group(2)]
    there, here = Handovers(groups, SECRET, 1), Handovers(groups, SECRET, 1)
    there.begin(THERE, request({"do_remote_decode": True}))
    heads, sums = rows((COMPUTED, COMPUTED, COMPUTED, TAIL), THERE)
    for place in range(2):
        assert there.ready == {}
        there.arrived(place, heads, sums + np.uint64(place))
    sent = {"do_remote_prefill": True, "nwor": there.ready[THERE]}
    here.begin(HERE, request(sent))
    heads, sums = rows(LOADS[:3], HERE, range(3))
    assert set(here.arrived(0, heads, sums).values()) == {True}
    assert here.results == {}
    assert {one.kind for one in here.arrived(1, heads, sums).values()} == {
        "not_as_sent"
    }
    assert here.results == {Result.WRONG: 1}


def test_a_request_in_the_middle_takes_and_gives():
    instance = Handovers([group()], SECRET, 1)
    params = {"do_remote_prefill": True, "nwor": prefilled(), "do_remote_decode": True}
    assert instance.begin(HERE, request(params)) == Handover.TAKES | Handover.GIVES
    assert judged(instance)[1] == {Result.VERIFIED: 1}


@pytest.mark.parametrize(
    ("params", "results"),
    [
        (None, {}),
        ({"kv_versions": True}, {}),
        ({"do_remote_decode": True, "do_remote_prefill": False}, {}),
        ({"do_remote_decode": False, "do_remote_prefill": True}, {"missing": 1}),
        # When the connector has begun to load.
        ({"do_remote_decode": False, "do_remote_prefill": False}, {"missing": 1}),
    ],
)
def test_requests_of_which_digests_are_expected(params, results):
    instance = Handovers([group()], SECRET, 1)
    instance.begin(HERE, request(params))
    assert instance.results == results


def test_a_request_that_ended_is_forgotten():
    instance = decoder()
    instance.end(HERE)
    assert judged(instance) == ({}, {})
    giver = Handovers([group()], SECRET, 1)
    giver.begin(THERE, request({"do_remote_decode": True}))
    giver.end(THERE)
    giver.arrived(0, *rows((COMPUTED, COMPUTED, FOUND, TAIL), THERE))
    assert giver.ready == {}


# --- what is refused ------------------------------------------------------------------


def refusal(here: Any = None, secret: bytes = SECRET, **params: Any) -> tuple[str, str]:
    instance = Handovers([here or group()], secret, 1)
    new = {name: params.pop(name) for name in set(params) & set(NewRequest._fields)}
    all_params = {"do_remote_prefill": True, "nwor": prefilled()} | params
    with nwor_log() as lines:
        instance.begin(HERE, request(all_params, **new))
        instance.begin(HERE, request(all_params, **new))
    ((result, number),) = instance.results.items()
    assert (number, len(lines)) == (2, 1)
    assert judged(instance)[0] == {}
    return result.value, lines[0]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": (*PROMPT[:-1], 1)},
        {"prompt": None},
        {"cache_salt": "tenant"},
        {"adapter": Adapter("acme", "/a", 1)},
        {"features": [(0, 2, "image")]},
        {"features": None},
        {"has_embeddings": True},
        {"remote_request_id": "b"},
    ],
)
def test_digests_of_another_request_are_refused(more):
    assert refusal(**more)[0] == "request"
    assert judged(decoder(remote_request_id="a"))[1] == {Result.VERIFIED: 1}


@pytest.mark.parametrize(
    ("here", "text"),
    [
        (group(1), "the KV-cache group is '0' there and '1' here"),
        (group(size=8), "the block size is '4' there and '8' here"),
        (group(layers=2), "the layers is '3' there and '2' here"),
    ],
)
def test_other_formats_are_refused(here, text):
    result, line = refusal(here)
    assert result == "format"
    assert text in line


def test_names_and_packings_are_a_part_of_the_format():
    formats = [handover.format_of(group(), 1)]
    for change in ("names", "runs", "slot_bytes", "dtype"):
        other = group()
        if change == "names":
            other.names[0] = other.layers[0].name = "another"
        elif change == "dtype":
            other.layers[1].kv_cache = torch.empty(0, dtype=torch.uint8)
        else:
            value = torch.zeros(1, 1, 2, dtype=torch.int32) if change == "runs" else 32
            setattr(other.layers[0].layout, change, value)
        formats.append(handover.format_of(other, 1))
    formats.append(handover.format_of(group(), 2))
    assert len({tuple(sorted(one.items())) for one in formats}) == 6


def test_another_number_of_groups_is_refused():
    sent = handover.opened(prefilled(), SECRET)
    sent.parts *= 2
    result, line = refusal(nwor=handover.sealed(sent, SECRET))
    assert result == "format"
    assert "of 2 KV-cache groups, and 1 are" in line


def test_another_version_is_refused_before_it_is_read():
    body = b"nwor0" + msgspec.msgpack.encode("another layout")
    data = hmac.digest(SECRET, body, "sha256") + body
    result, line = refusal(nwor=base64.b64encode(data).decode())
    assert result == "format"
    assert "another version" in line


@pytest.mark.parametrize("sent", [None, "", "%%%", 7, {"rows": []}, "bmV3bm9y", b""])
def test_what_was_not_sent_by_us_is_refused(sent):
    assert refusal(nwor=sent)[0] == "malformed"


def test_another_secret_is_refused():
    result, line = refusal(secret=b"t" * 32)
    assert result == "signature"
    assert "vllm:nwor_audit_handovers" in line


def test_every_bit_is_signed():
    data = base64.b64decode(prefilled())
    for n in range(len(data)):
        changed = bytes([*data[:n], data[n] ^ 1, *data[n + 1 :]])
        with pytest.raises(Refused) as refused:
            handover.opened(base64.b64encode(changed).decode(), SECRET)
        assert refused.value.result is Result.SIGNATURE


# --- around it ------------------------------------------------------------------------


def test_how_large_it_is():
    """As docs/audit.md says it."""

    def length(num_tokens: int, layers: int, size: int) -> int:
        of = [group(0, size, layers)]
        given = Given("cmpl-" + 40 * "0", bytes(16), num_tokens, of)
        num = (num_tokens - 1) // size
        heads = np.zeros((len(Heads._fields), num + 1), np.int64)
        found = Heads(*heads)
        found.position[:], found.kind[-1] = np.arange(num + 1) * size, TAIL
        found.num_slots[-1] = num_tokens - num * size
        sums = np.random.default_rng(1).integers(
            0, 1 << 63, (num + 1, max(size, layers)), np.uint64
        )
        given.add(0, found, sums)
        sent = given.sent([handover.format_of(of[0], 1)])
        assert sent is not None
        assert sent.parts[0].columns
        return len(handover.sealed(sent, SECRET))

    text = Path(__file__).parents[2].joinpath("docs/audit.md").read_text()
    (numbers,) = re.findall(
        r"characters: ([\d.]+) a block, ([\d.]+) a layer, ([\d.]+) a token of the last "
        r"block, and about (\d+)\. With 32 layers and blocks of 16, a prompt of 8,192 "
        r"tokens takes ([\d,]+), one of 131,072 ([\d,]+)\.",
        text,
    )
    block, layer, slot, rest, short, long = (float(n.replace(",", "")) for n in numbers)
    base = length(33, 32, 16)
    assert (length(33 + 16 * 512, 32, 16) - base) / 512 == pytest.approx(block, abs=0.1)
    assert (length(33, 132, 16) - base) / 100 == pytest.approx(layer, abs=0.1)
    assert (length(48, 32, 16) - base) / 15 == pytest.approx(slot, abs=0.2)
    assert base - 2 * block - 32 * layer - slot == pytest.approx(rest, abs=20)
    assert [length(n, 32, 16) for n in (8192, 131_072)] == [short, long]


def test_results_are_those_of_the_metric():
    assert tuple(Result) == HANDOVERS
    made: dict[tuple[Any, ...], Any] = {}

    def counter(name: str, **_: Any) -> Any:
        metric = Mock()
        metric.labels = lambda *values: made.setdefault((name, *values), Mock())
        return metric

    prometheus = AuditPrometheus(counter, {0: ["tiny", "0"]})
    prometheus.add({"audit": {f"{metrics.HANDOVER}wrong": 2}}, 0)
    metric = made["vllm:nwor_audit_handovers", "tiny", "0", "wrong"]
    metric.inc.assert_called_once_with(2)


@pytest.mark.parametrize("content", [None, b"", b" " * 40, b"s" * 31 + b"\n"])
def test_a_secret_that_is_missing_or_short(content, tmp_path):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    env = {"VLLM_NWOR_AUDIT": "log", "VLLM_NWOR_AUDIT_SECRET": str(path)}
    with pytest.raises(NworConfigError) as raised:
        NworConfig.from_env(env, looks_at_files=True)
    why = "No such file" if content is None else f"it has {len(content.strip())} bytes"
    assert why in str(raised.value)
    assert str(path) in str(raised.value)
    assert f"at least {MIN_SECRET_BYTES} bytes" in str(raised.value)
    NworConfig.from_env(env)
    NworConfig.from_env(env | {"VLLM_NWOR_AUDIT": "off"}, looks_at_files=True)


def test_white_space_around_a_secret_does_not_count(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"s" * 32 + b"\n")
    other.write_bytes(b"s" * 32)
    assert secret_in(str(one)) == secret_in(str(other)) != b""
    assert secret_in("") == b""


def test_digests_of_a_request_that_was_aborted_are_dropped():
    runs, ended = (Mock(is_finished=Mock(return_value=is_it)) for is_it in (0, 1))
    known = {"a": runs, "still sent": ended}
    scheduler = SimpleNamespace(requests=known, nwor_given={"before": "kept"})
    late = dict.fromkeys(("aborted", "still sent"), "late")
    output = SimpleNamespace(nwor_given={"a": "sent"} | late)
    scheduler_hooks._update_from_output(Mock(), scheduler, (None, output), {})
    assert scheduler.nwor_given == {"before": "kept", "a": "sent"}


@pytest.mark.parametrize("params", [None, {"remote_host": "a"}])
def test_digests_leave_with_the_params_that_the_connector_returns(params, monkeypatch):
    monkeypatch.setattr(errors, "_logged", set())
    scheduler = SimpleNamespace(nwor_given={"a": "sent"})
    of = SimpleNamespace(request_id="a")
    answers = Mock(return_value=(True, params))
    with nwor_log() as lines:
        found = scheduler_hooks._connector_finished(answers, scheduler, (of,), {})
        again = scheduler_hooks._connector_finished(answers, scheduler, (of,), {})
    assert again == (True, params)
    assert scheduler.nwor_given == {}
    if params is None:
        assert found == (True, None)
        assert "returned no kv_transfer_params" in lines[0]
    else:
        assert found == (True, {"remote_host": "a", "nwor": "sent"})
        assert params == {"remote_host": "a"}
