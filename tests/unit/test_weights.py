# SPDX-License-Identifier: Apache-2.0
"""Epochs of weights: when the engine core sees a change, and what a digest tells apart.
On real engines: tests/integration/test_weights.py."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nwor.audit.findings import decode
from vllm_nwor.audit.requests import Identity, Requests, seed_of
from vllm_nwor.base import errors
from vllm_nwor.hooks import weights
from vllm_nwor.hooks.weights import ModelWeights, addresses_of, digest, sample, words_of
from vllm_nwor.layout.caches import Loads
from vllm_nwor.step import Adapter, Weights


class Model(torch.nn.Module):
    """Parameters of several types, of odd sizes and of zero dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(40, 17).bfloat16())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.packed = torch.nn.Parameter(
            torch.randint(0, 255, (7, 3), dtype=torch.uint8), requires_grad=False
        )
        self.turned = torch.nn.Parameter(torch.randn(8, 6).t())

    def load_weights(self, found):
        for name, value in found:
            self.get_parameter(name).data.copy_(value)


def of(model):
    return digest(model.named_parameters())


# --- digests --------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_changed_byte_is_another_digest(data):
    model = Model()
    before = of(model)
    _, parameter = data.draw(st.sampled_from([*model.named_parameters()]))
    copy = parameter.detach().clone(memory_format=torch.contiguous_format)
    flat = copy.view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    parameter.data.copy_(copy)
    assert of(model) != before
    assert of(Model()) == before


def test_dense_parameters_are_read_in_place():
    """An fp8 weight is a transposed one, and may be a large part of the memory."""
    whole = torch.arange(48.0).view(4, 3, 4)
    for parameter in (whole, whole.transpose(0, 2), whole.permute(1, 2, 0)):
        words = words_of(parameter)
        assert words.data_ptr() == whole.data_ptr()
        assert len(words) == 24
    assert len(words_of(whole[:, ::2])) == 16
    assert digest([("a", whole)]) != digest([("a", whole.transpose(0, 2))])


def test_sign_bits_are_not_lost():
    """The highest bits of two words: a sum of 8 bytes at a time would not change."""
    values = torch.randn(64).bfloat16()
    for lane in range(8):
        other = values.clone()
        other[[lane, lane + 16]] *= -1
        assert digest([("a", other)]) != digest([("a", values)])


def test_values_that_change_places_are_another_digest(monkeypatch):
    monkeypatch.setattr(weights, "_PART_WORDS", 4)  # parts change places, too
    values = torch.arange(64, dtype=torch.int64)
    found = {digest([("a", values), ("b", values + 1)])}
    found |= {digest([("b", values), ("a", values + 1)])}
    found |= {digest([("a", values.view(8, 8)), ("b", values + 1)])}
    found |= {digest([("a", values.flip(0)), ("b", values + 1)])}
    found |= {digest([("a", values.roll(4)), ("b", values + 1)])}
    assert len(found) == 5


def test_a_sample_has_words_of_every_parameter():
    """16 of 8 bytes, all over it; of a small one all. All of their bytes are seen."""
    model = Model()
    before = sample(model.named_parameters())
    assert len(before) == 16 + 1 + 3 + 16
    model.embedding.data.view(-1)[4 * 150] += 1
    assert not torch.equal(sample(model.named_parameters()), before)
    for parameter in (model.scale, model.packed, model.turned):
        model.load_state_dict(Model().state_dict())
        parameter.data.add_(1)
        assert not torch.equal(sample(model.named_parameters()), before)


def values_at(addresses):
    """The words of 8 bytes there."""
    return [ctypes.c_int64.from_address(one).value for one in addresses]


def test_a_fingerprint_reads_the_words_of_the_sample():
    """Those of an end that is no whole word are left out."""
    model = Model()
    one = ModelWeights(model)
    words = {
        name: sample([(name, parameter)]).tolist()
        for name, parameter in model.named_parameters()
    }
    whole = [*words["embedding"], *words["packed"][:-1], *words["turned"]]
    assert values_at(one.addresses(torch.device("cpu"))) == whole
    assert one.addresses(torch.device("cuda", 0)) == []
    assert ModelWeights(model, moves=True).addresses(torch.device("cpu")) == []


@pytest.mark.parametrize("offset", range(9))
def test_no_word_is_read_that_is_not_the_parameters_own(offset):
    whole = torch.zeros(300, dtype=torch.uint8)
    part = whole[offset : offset + 203]
    found = addresses_of(part)
    assert len(found) == 16
    assert found[0] >= part.data_ptr()
    assert found[-1] + 8 <= part.data_ptr() + 203
    assert all(address % 8 == 0 for address in found)
    repeated = whole[290:291].expand(1000)
    assert all(one + 8 <= whole.data_ptr() + 300 for one in addresses_of(repeated))
    assert addresses_of(torch.empty(64, device="meta")) == []


MOVES = {
    "data": lambda model: setattr(model.embedding, "data", torch.ones(40, 17)),
    "a new parameter": lambda model: setattr(
        model, "turned", torch.nn.Parameter(model.turned.clone())
    ),
    "none": lambda model: delattr(model, "scale"),
    "freed": lambda model: model.embedding.untyped_storage().resize_(0),
    "of a part": lambda model: setattr(
        model.part, "weight", torch.nn.Parameter(torch.ones(3, 3))
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_parameters_that_were_moved_are_noticed(move):
    model = Model()
    model.part = torch.nn.Linear(3, 3, bias=False)
    one = ModelWeights(model)
    one.addresses(torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.copy_(parameter.clone())
    assert not one.have_moved()
    MOVES[move](model)
    assert one.have_moved()
    if move != "freed":
        one.addresses(torch.device("cpu"))
        assert not one.have_moved()


# --- epochs ---------------------------------------------------------------------------


class Core:
    """An engine core of several ranks, which calls as vLLM's does."""

    def __init__(self, num_ranks=2):
        self.models = [Model() for _ in range(num_ranks)]
        runners = []
        for model in self.models:
            runner = SimpleNamespace(
                get_model=lambda model=model: model,
                vllm_config=SimpleNamespace(
                    parallel_config=SimpleNamespace(enable_eplb=False)
                ),
            )
            weights.watch(runner)
            runners.append(runner)
        self.workers = [SimpleNamespace(model_runner=runner) for runner in runners]
        self.model_executor = self
        self.scheduler = object()
        self.num_looks = 0
        weights.watch_core(self)

    def collective_rpc(self, method, args=()):
        self.num_looks += 1
        return [method(worker, *args) for worker in self.workers]

    def rpc(self, name, change=lambda core: None):
        """A user's."""
        weights._collective_rpc(lambda *args: change(self), self, (name,), {})

    def step(self, running=False, num_tokens=1):
        output = SimpleNamespace(total_num_scheduled_tokens=num_tokens)
        found, self.changes = weights.of_step(self.scheduler, running, output)
        return found

    def epoch(self, **of_step):
        return self.step(**of_step).epoch


def write(value, *ranks):
    def change(core):
        for rank in ranks or range(len(core.models)):
            core.models[rank].scale.data.fill_(value)

    return change


def test_content_decides_and_old_content_is_its_old_epoch():
    core = Core()
    assert core.epoch() == 0
    start = core.models[0].scale.item()
    assert core.num_looks == 0  # no call of the user: no look
    core.rpc("probe")
    assert (core.epoch(), core.num_looks, core.changes) == (0, 1, [])
    core.rpc("receive", write(2))
    core.rpc("receive", write(3))
    assert (core.epoch(), core.num_looks, core.changes) == (1, 2, ["rpc"])
    core.rpc("reload_weights", write(start))
    assert (core.epoch(), core.changes) == (0, ["reload_weights"])
    core.rpc("receive", write(3))
    assert core.epoch() == 1


def test_nothing_is_read_while_nothing_is_computed():
    """Weights may be asleep, without a word to vLLM: reading them would end a GPU's
    process."""
    core = Core()
    core.rpc("wake_up", write(2))
    assert (core.epoch(num_tokens=0), core.num_looks) == (0, 0)
    assert (core.epoch(), core.num_looks) == (1, 1)


def test_a_first_look_that_fails_forgets_nothing(monkeypatch):
    monkeypatch.setattr(errors, "_logged", set())
    core = Core()
    workers, core.workers = core.workers, None
    core.rpc("probe")
    assert core.epoch() == 1
    core.workers = workers
    core.rpc("probe")
    assert core.epoch() == 0


def test_a_load_in_this_process_needs_no_rpc():
    core = Core()
    for model in core.models:
        model.load_weights([("scale", torch.tensor(7.0))])
    assert (core.epoch(), core.changes) == (1, ["load_weights"])
    core.rpc("reload_weights", lambda core: core.models[0].load_weights([]))
    assert (core.epoch(), core.changes) == (1, [])  # the same bytes
    core.rpc("reload_weights", write(9, 1))  # one rank is enough
    core.models[0].load_weights([])
    assert (core.epoch(), core.changes) == (2, ["reload_weights"])
    with pytest.raises(AttributeError):
        core.models[0].load_weights([("scale", torch.tensor(8.0)), ("nothing", 0)])
    assert core.epoch() == 3


def test_a_fingerprint_that_differs_is_a_reason_to_look(caplog):
    """At all bytes: a parameter that was moved may have the same sample."""
    core = Core()
    core.models[1].embedding.data.view(-1)[4 * 150 + 5] += 1  # not in the sample
    for name in ("probe", weights.START_DRAFT, "update_weights"):  # of the drafter
        core.rpc(name)
        assert core.epoch() == 0
    weights.changed_unannounced(core.scheduler, (64, 128))
    assert (core.epoch(), core.changes) == (1, ["unannounced"])
    assert "between steps 64 and 128" in caplog.text
    num_looks = core.num_looks
    assert (core.epoch(), core.num_looks) == (1, num_looks)
    assert core.workers[0].model_runner.nwor_weights.num_looks == 4


def test_blocks_before_an_unannounced_change_is_seen_do_not_come_back():
    """Some of them were computed with the new weights, as of the old epoch."""
    core = Core()
    start = core.models[0].scale.item()
    write(2)(core)
    weights.changed_unannounced(core.scheduler, (0, 64))
    assert core.epoch() == 1
    core.rpc("receive", write(start))
    assert core.epoch() == 2


@pytest.mark.parametrize(
    ("announce", "route"),
    [
        (lambda core: core.rpc("receive", write(2)), "rpc"),
        (lambda core: core.rpc("update_weights", write(2)), "update_weights"),
        (lambda core: core.models[0].load_weights([("scale", torch.tensor(2.0))]),
         "load_weights"),
    ],
)  # fmt: skip
def test_an_announced_change_is_not_an_unannounced_one(announce, route, caplog):
    """Its fingerprint may come first: a step was in flight. And after it."""
    core = Core()
    announce(core)
    weights.changed_unannounced(core.scheduler, (64, 128))
    assert (core.epoch(), core.changes) == (1, [route])
    weights.changed_unannounced(core.scheduler, (64, 128))
    assert (core.epoch(), core.changes) == (1, [])
    assert "unverified" not in caplog.text


def test_another_engines_fingerprint_is_not_this_ones():
    core, other = Core(), Core()
    weights.changed_unannounced(other.scheduler, (64, 128))
    weights.changed_unannounced(object(), (64, 128))
    assert (core.epoch(), core.num_looks) == (0, 0)
    assert (other.epoch(), other.num_looks) == (0, 1)


@pytest.mark.parametrize(
    ("tags", "looks"), [(None, 1), (["weights"], 1), (["kv_cache"], 0)]
)
def test_weights_that_wake_up_are_looked_at(tags, looks):
    """What they hold then, and not that they were loaded again, decides."""
    core = Core()
    start = core.models[0].scale.item()
    write(3)(core)  # as garbage

    def wake_up(tags=None):
        write(start)(core)
        return "awake"

    for args, kwargs in (((tags,), {}), ((), {"tags": tags})):
        assert weights._wake_up(wake_up, core, args, kwargs) == "awake"
        before = core.num_looks
        assert (core.epoch(), core.num_looks - before) == (0, looks)
    write(2)(core)
    weights._wake_up(lambda tags: None, core, (tags,), {})
    found = core.epoch(), core.changes
    assert found == ((1, ["wake_up"]) if looks else (0, []))
    core.rpc("reload_weights", write(4))
    assert core.epoch() == 1 + looks
    assert core.changes[-1] == "reload_weights"


def test_an_rpc_that_fails_half_way_may_have_changed_weights():
    core = Core()

    def change(core):
        write(2)(core)
        raise OSError("half way")

    with pytest.raises(OSError, match="half way"):
        core.rpc("receive", change)
    assert core.epoch() == 1


@pytest.mark.parametrize("has_scales", [True, False])
def test_scales_of_the_kv_cache_are_weights(has_scales):
    """Unless forwards change them. Other buffers are not."""
    model = Model()
    layer = model.attention = torch.nn.Module()
    for name in ("_k_scale", "_v_scale", "_q_scale"):
        layer.register_buffer(name, torch.tensor(1.0))
    one = ModelWeights(model, has_scales=has_scales)
    found = [one.look(is_announced=True).content]
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        layer.get_buffer(name).fill_(2)
        found.append(one.look(is_announced=False).content)
    assert found[0] == found[1]
    assert len({*found}) == (3 if has_scales else 1)


def test_a_parameter_that_is_gone_is_another_content(monkeypatch, caplog):
    """One on the meta device has no bytes; the others are read."""
    monkeypatch.setattr(errors, "_logged", set())
    core = Core(1)
    (model,) = core.models
    kept = model.embedding
    model.embedding = torch.nn.Parameter(torch.empty(40, 17, device="meta"))
    core.rpc("receive")
    assert core.epoch() == core.epoch() == 1
    model.embedding = kept
    core.rpc("receive")
    assert core.epoch() == 0
    assert "could not be read" not in caplog.text


@pytest.mark.parametrize("label", [None, "", 3, "default"])
def test_what_is_no_label_is_none(label):
    core = Core()
    core._weight_version = label
    assert core.step().label == ""


def test_other_weights_under_a_label_are_logged_once(caplog):
    """Without a label there is nothing to say, nor where a new one comes with them."""
    core = Core()
    core._weight_version = "default"
    core.step()
    for value, label, num_logged in (
        (2, "default", 0),
        (3, "step-3", 0),
        (4, "step-3", 1),
        (5, "step-3", 1),
        (6, "step-6", 1),
        (3, "step-6", 2),
    ):
        core.rpc("receive", write(value))
        core._weight_version = label
        core.step()
        core.step()
        lines = [one for one in caplog.records if "changed under label" in one.message]
        assert len(lines) == num_logged, (value, label)
    core._weight_version = "same weights"
    core.step()
    assert "'step-3'" in lines[0].message
    assert len(lines) == 2


@pytest.mark.parametrize("strict", ["0", "always"])
def test_a_look_that_fails_ends_no_engine(strict, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_NWOR_STRICT", strict)
    monkeypatch.setattr(errors, "_logged", set())
    core = Core()
    core.rpc("receive", write(2))
    core.workers = None
    if strict == "always":
        with pytest.raises(TypeError):
            core.epoch()
        return
    assert core.epoch() == 1  # a change, once
    assert core.epoch() == 1
    core.rpc("receive")
    assert core.epoch() == 2
    assert caplog.text.count("the weights could not be read") == 1


# --- identities -----------------------------------------------------------------------


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_a_seed_is_an_int64_and_the_first_epochs_is_the_adapters(key):
    adapter = Adapter("name", "/path", 1)
    for of_request in (Identity(), Identity(adapter, "salt")):
        identity = of_request._replace(weights=Weights(1, key))
        assert -(2**63) <= identity.seed < 2**63
        own = seed_of(*of_request[:2])
        assert (identity.seed - own - key) % 2**64 == 0


ACME = Adapter("acme", "/a", 1, "a" * 32)
AGAIN = ACME._replace(number=2, path="/b")
CHANGED = ACME._replace(digest="b" * 32)
OLD, NOW = Weights(1, 77), Weights(2, -(2**62) % 2**64)


def decoded(writer, reader, shift=0):
    """The finding of a block of the same text that the other one wrote."""
    requests = Requests(4)
    requests.name_weights(NOW._replace(label="step-2"))
    ids = [
        requests.add(name, 0, Loads.NONE, identity, None).generation
        for name, identity in (("writer", writer), ("reader", reader))
    ]
    text = 123456789
    expected, found = text + reader.seed, text + writer.seed + shift
    number = 1  # wrong_prefix
    row = (9, number, ids[1], 0, 32, -1, 0, ids[0], 5, expected, found)
    shape = SimpleNamespace(group_id=0, block_size=16)
    group = SimpleNamespace(shape=shape, names=["layer"], lost_at=0)
    return decode(row, group, requests)


# Kinds of findings in blocks of the base model, and of ACME, with who wrote them.
OF_NONE = [
    ("stale_weights", None, None),
    ("wrong_prefix", ACME, None),
    ("wrong_prefix", None, "salt"),
]
OF_ACME = [
    ("stale_weights", CHANGED),
    ("stale_weights", CHANGED._replace(path="/b")),
    ("wrong_prefix", CHANGED._replace(number=2)),
    ("wrong_prefix", CHANGED._replace(name="other")),
    ("wrong_prefix", ACME._replace(name="other")),
    ("wrong_prefix", None),
]


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [
        *((kind, Identity(*of, OLD), Identity(weights=NOW)) for kind, *of in OF_NONE),
        *(
            (kind, Identity(adapter, "salt", weights), Identity(ACME, "salt"))
            for kind, adapter in OF_ACME
            for weights in (Weights(), OLD)
        ),
    ],
)
def test_other_weights_are_told_from_another_text(kind, writer, reader):
    """Other content under an adapter's number is stale, also if the model's weights
    have changed, too."""
    finding = decoded(writer, reader)
    assert (finding.kind, finding.owner, finding.writer.request) == (
        kind,
        "reader",
        "writer",
    )
    assert (finding.weights is None) is (kind == "wrong_prefix")


def test_a_finding_names_the_weights_that_wrote_and_those_of_now():
    """The same content under another number is the same adapter."""
    assert Identity(AGAIN).seed == Identity(ACME).seed
    about = {"label": "", "adapter": {"name": "acme", "content": "a" * 16}}
    written = Identity(AGAIN, None, OLD), Identity(ACME, None, NOW)
    assert decoded(*written).weights == {
        "written": {"epoch": 1} | about,
        "present": {"epoch": 2} | about | {"label": "step-2"},
    }
    assert decoded(*written, shift=1).kind == "wrong_prefix"  # of another text
    sides = decoded(Identity(CHANGED), Identity(ACME)).weights.values()
    assert [of["adapter"]["content"][0] for of in sides] == ["b", "a"]
    finding = decoded(Identity(weights=OLD), Identity(weights=NOW))
    assert [of["adapter"] for of in finding.weights.values()] == [None, None]
