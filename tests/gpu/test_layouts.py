# SPDX-License-Identifier: Apache-2.0
"""The probed layout of a slot's bytes on each attention backend (guarantee 8).

It is compared with the bytes that vLLM's own writer changes when it writes random keys
and values of several tokens, and with the shape that vLLM bound. Probing must not
change the live implementation or the caches.
"""

import pytest

from tests.gpu.engines import BY_NAME
from tests.gpu.pool import ON, engines_fixture, engines_of

ENGINES = engines_of("layouts")
runs = engines_fixture(
    "layouts",
    # Not strict: a refusal is to be seen here as an answer, not as a dead engine.
    lambda pool, spec: {ON: pool.run("layouts", spec, ON, VLLM_NWOR_STRICT="0")},
    lambda spec, chain: {spec.name: chain[ON].entry("groups", "layouts")},
)


@pytest.fixture
def layers(on):
    assert on["layouts"]
    assert [layer for layer in on["layouts"] if "refused" in layer] == []
    return on["layouts"]


@ENGINES
def test_the_writer_writes_exactly_the_probed_bytes(on, layers, engine):
    for layer in layers:
        assert layer["rows"], layer
        assert layer["is_protected"], (layer, on["groups"])
        assert layer["slot_bytes"] == layer["slot_bytes_expected"], layer
        assert layer["missed_bytes"] == layer["extra_bytes"] == 0, layer


@ENGINES
def test_probing_leaves_no_trace(layers, engine):
    for layer in layers:
        assert layer["impl_unchanged"], layer
        assert layer["cache_unchanged"], layer


@ENGINES
def test_vllm_used_the_requested_backend_and_layout(layers, engine):
    """Otherwise the engine would prove nothing."""
    spec = BY_NAME[engine]
    for layer in layers:
        assert layer["backend"] == spec.backend, layer
        if not spec.is_mla:
            _, head_stride, slot_stride, _ = layer["strides"]
            assert (head_stride > slot_stride) == (spec.kv_layout == "HND"), layer
