# SPDX-License-Identifier: Apache-2.0
"""Digests of LoRA adapters, and vLLM's manager with the hook that takes them. On real
engines: tests/integration/test_adapters.py."""

from types import SimpleNamespace

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from vllm_nwor.base import errors
from vllm_nwor.hooks import adapters
from vllm_nwor.hooks.adapters import content_of

NAMES = ("layers.0.v_proj", "layers.1.v_proj")


def layer(name, seed, alpha=4):
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 6, generator=draw), torch.randn(8, 2, generator=draw)
    return LoRALayerWeights(name, 2, alpha, a, b)


def model(number=1, names=NAMES, **about):
    layers = {name: layer(name, NAMES.index(name), **about) for name in names}
    return LoRAModel(number, 2, layers)


def test_equal_tensors_are_equal_content():
    """Whatever their number, order and layout."""
    turned = model()
    for of in turned.loras.values():
        of.lora_a = of.lora_a.t().contiguous().t()
    contents = {content_of(of) for of in (model(), model(7, NAMES[::-1]), turned)}
    assert len(contents) == 1


def changed(act):
    found = model()
    act(found.loras)
    return found


CHANGES = {
    "nothing": lambda loras: None,
    "a bit of A": lambda loras: loras[NAMES[0]].lora_a.view(torch.int32)[0, 0].add_(1),
    "a bit of B": lambda loras: loras[NAMES[1]].lora_b.view(torch.int32)[7, 1].add_(1),
    "a scaling": lambda loras: setattr(loras[NAMES[1]], "scaling", 1.5),
    "a layer is missing": lambda loras: loras.pop(NAMES[1]),
    "layers are swapped": lambda loras: loras.update(
        {NAMES[0]: loras[NAMES[1]], NAMES[1]: loras[NAMES[0]]}
    ),
    "another type": lambda loras: setattr(
        loras[NAMES[0]], "lora_a", loras[NAMES[0]].lora_a.bfloat16()
    ),
    "packed, a part is missing": lambda loras: loras.update({NAMES[0]: packed(0)}),
    "packed, the other part is missing": lambda loras: loras.update(
        {NAMES[0]: packed(1)}
    ),
}


def packed(missing):
    one = layer(NAMES[0], 0)
    parts = [[value] * 2 for value in (one.lora_a, one.lora_b)]
    for part in parts:
        part[missing] = None
    return PackedLoRALayerWeights(NAMES[0], 2, [4, 4], *parts)


def test_each_change_is_another_content():
    """Also a module that is saved whole."""
    whole = model()
    whole.modules_to_save = {"score": SimpleNamespace(weight=torch.ones(2))}
    models = [whole, *(changed(act) for act in CHANGES.values())]
    assert len({content_of(of) for of in models}) == len(models)


class Manager:
    """Adds adapters as vLLM's does, which packs them: by a function that is hooked."""

    def __init__(self):
        self.added = []

    def add(self, lora):
        def add(lora):
            lora.loras = {}
            self.added.append(lora.id)

        adapters._add_adapter(add, self, (lora,), {})


def watched(monkeypatch):
    monkeypatch.setattr(adapters, "is_installed", lambda target: True)
    manager = Manager()
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return manager, adapters.watch(runner)


def test_each_manager_has_its_own(monkeypatch):
    one, of_one = watched(monkeypatch)
    _, of_other = watched(monkeypatch)
    unwatched = Manager()
    for manager in (one, unwatched):
        manager.add(model())
        assert manager.added == [1]
    assert of_one.digests == {1: content_of(model())}
    assert of_one.news == {1}
    assert of_other.digests == {}
    assert not hasattr(unwatched, "nwor_adapters")


def test_nothing_is_watched_without_lora_or_the_hook(monkeypatch):
    assert adapters.watch(SimpleNamespace()) is None
    monkeypatch.setattr(adapters, "is_installed", lambda target: False)
    manager = Manager()
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    assert adapters.watch(runner) is None
    assert not hasattr(manager, "nwor_adapters")


def test_an_adapter_that_cannot_be_read_is_a_change(monkeypatch, caplog):
    monkeypatch.setattr(errors, "_logged", set())
    manager, found = watched(monkeypatch)
    contents = set()
    for _ in range(3):
        lora = model()
        lora.loras[NAMES[0]].lora_a = torch.empty(2, 6, device="meta")
        manager.add(lora)
        contents.add(found.digests[1])
    assert len(contents) == 3
    assert manager.added == [1] * 3
    assert caplog.text.count("a LoRA adapter could not be read") == 1
