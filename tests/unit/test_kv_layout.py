# SPDX-License-Identifier: Apache-2.0
"""KVLayout and probing, against writers whose byte maps are known in advance.

The fake attention implementations here write through torch indexing, so that what a
slot's bytes are is decided by the test, not by the code under test.
"""

from pathlib import Path

import pytest
import torch

from vllm_nwor.kv_layout import LayoutRefused, row_layout
from vllm_nwor.kv_probe import probe_layout

BLOCKS, HEADS, SLOTS, DIM = 5, 3, 16, 8


class Layer:
    """An attention layer as the probe sees it."""

    num_kv_heads = HEADS
    head_size = DIM

    def __init__(self, impl):
        self.impl = impl


class RowImpl:
    """Writes [K | V] into the logical cell (block, head, slot)."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for token, slot in enumerate(slot_mapping.tolist()):
            block, offset = divmod(slot, kv_cache.shape[2])
            kv_cache[block, :, offset, :DIM] = key[token].to(kv_cache.dtype)
            kv_cache[block, :, offset, DIM:] = value[token].to(kv_cache.dtype)


class ColumnImpl:
    """K column-major inside a block and head, V row-major, as CPU_ATTN's `vec`."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        blocks, heads, slots, width = kv_cache.shape
        flat = kv_cache.view(blocks, heads, slots * width)
        for token, slot in enumerate(slot_mapping.tolist()):
            block, offset = divmod(slot, slots)
            flat[block, :, offset : DIM * slots : slots] = key[token]
            start = DIM * slots + offset * DIM
            flat[block, :, start : start + DIM] = value[token]


def nhd_cache(dtype=torch.bfloat16):
    """Logical [B, H, N, 2D], stored with heads inside slots."""
    return torch.zeros(BLOCKS, SLOTS, HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)


def hnd_cache(dtype=torch.bfloat16):
    return torch.zeros(BLOCKS, HEADS, SLOTS, 2 * DIM, dtype=dtype)


def head_outermost_cache():
    return torch.zeros(HEADS, BLOCKS, SLOTS, 2 * DIM).transpose(0, 1)


def other_layers_between_blocks():
    """One layer of three whose blocks alternate in one allocation."""
    whole = torch.zeros(BLOCKS, 3, HEADS, SLOTS, 2 * DIM)
    return whole[:, 1]


def touched(kv_cache, layout, slot):
    """Bytes of the cache's storage that `layout` says belong to `slot`."""
    row = layout.table_row(kv_cache.storage_offset() * kv_cache.element_size(), 0)
    base, block_stride, slot_stride, head_stride, heads, run, size, _, _ = row
    block, offset = divmod(slot, size)
    mask = torch.zeros(kv_cache.untyped_storage().nbytes(), dtype=torch.bool)
    if layout.runs is not None:
        spans = [
            (base + block * block_stride + start, length)
            for start, length in layout.runs[offset].tolist()
        ]
    else:
        first = base + block * block_stride + offset * slot_stride
        spans = [(first + head * head_stride, run) for head in range(heads)]
    for start, length in spans:
        mask[start : start + length] = True
    return mask


def written(kv_cache, impl, slot):
    """Bytes of the cache's storage that the writer changes, on a random background."""
    raw = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
    changed = torch.zeros(raw.numel(), dtype=torch.bool)
    for _ in range(4):
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
        before = raw.clone()
        key = torch.randn(1, HEADS, DIM).to(kv_cache.dtype)
        impl.do_kv_cache_update(
            None, key, torch.randn_like(key), kv_cache, torch.tensor([slot])
        )
        changed |= raw != before
    return changed


@pytest.mark.parametrize(
    "make", [nhd_cache, hnd_cache, head_outermost_cache, other_layers_between_blocks]
)
def test_row_caches_are_proved_and_named_to_the_byte(make):
    kv_cache = make()

    layout = probe_layout(Layer(RowImpl()), kv_cache, kv_cache.dtype)

    assert layout.runs is None
    assert layout.slot_bytes == HEADS * 2 * DIM * kv_cache.element_size()
    for slot in (0, 1, SLOTS - 1, SLOTS, BLOCKS * SLOTS - 1):
        assert torch.equal(
            touched(kv_cache, layout, slot), written(kv_cache, RowImpl(), slot)
        )


def test_heads_that_touch_become_one_run():
    layout = row_layout(nhd_cache())

    assert (layout.num_heads, layout.run_bytes) == (1, HEADS * 2 * DIM * 2)


def test_a_packed_cache_becomes_runs_by_offset():
    kv_cache = hnd_cache()

    layout = probe_layout(Layer(ColumnImpl()), kv_cache, kv_cache.dtype)

    assert layout.runs is not None
    assert layout.runs.shape == (SLOTS, HEADS * (DIM + 1), 2)
    for slot in (0, 7, SLOTS, BLOCKS * SLOTS - 1):
        assert torch.equal(
            touched(kv_cache, layout, slot), written(kv_cache, ColumnImpl(), slot)
        )


class ZeroImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key * 0, value * 0, kv_cache, slot_mapping)


def test_a_payload_of_zero_bytes_is_still_seen():
    layout = probe_layout(Layer(ZeroImpl()), hnd_cache(), torch.bfloat16)

    assert layout.runs is None


def test_the_live_implementation_is_not_called_nor_changed():
    class CachingImpl(RowImpl):
        def __init__(self):
            self._k_scale_cache = None
            self.calls = []

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            if self._k_scale_cache is None:
                self._k_scale_cache = kv_cache
            assert self._k_scale_cache is kv_cache
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    impl = CachingImpl()
    kv_cache = hnd_cache()
    impl._k_scale_cache = kv_cache
    before = dict(vars(impl))

    probe_layout(Layer(impl), kv_cache, kv_cache.dtype)

    assert vars(impl) == before
    assert not kv_cache.any()


def test_what_a_first_write_prepares_is_not_taken_for_a_slots_bytes():
    class ScalesImpl(RowImpl):
        """As TRITON_ATTN with per-token-head scales: one more element in each row, all
        of them set to one when a cache is first seen."""

        _k_scale_cache = None

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            if self._k_scale_cache is None:
                self._k_scale_cache = kv_cache[..., 2 * DIM]
                self._k_scale_cache.fill_(1)
            super().do_kv_cache_update(
                layer, key, value, kv_cache[..., : 2 * DIM], slot_mapping
            )
            for slot in slot_mapping.tolist():
                block, offset = divmod(slot, SLOTS)
                self._k_scale_cache[block, :, offset] = 0.5

    kv_cache = torch.zeros(BLOCKS, HEADS, SLOTS, 2 * DIM + 1)

    layout = probe_layout(Layer(ScalesImpl()), kv_cache, torch.float32)

    assert layout.runs is None
    assert layout.run_bytes == (2 * DIM + 1) * 4


def test_mla_rows_are_probed_through_their_own_writer():
    class MlaLayer:
        kv_lora_rank, qk_rope_head_dim, _k_scale = 24, 8, torch.ones(())

    class MlaImpl:
        kv_cache_dtype = "auto"

        def do_kv_cache_update(
            self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
        ):
            block, offset = divmod(int(slot_mapping[0]), kv_cache.shape[1])
            kv_cache[block, offset, :24] = kv_c_normed[0]
            kv_cache[block, offset, 24:] = k_pe[0, 0]

    layer = MlaLayer()
    layer.impl = MlaImpl()

    layout = probe_layout(layer, torch.zeros(BLOCKS, SLOTS, 32), torch.float32)

    assert layout.runs is None
    assert (layout.num_heads, layout.run_bytes, layout.slot_stride) == (1, 128, 128)


class SharedByteImpl(RowImpl):
    """Two neighbouring slots write the same bytes."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping // 2 * 2)


class RaggedImpl(RowImpl):
    """All slots but the first write a byte of the first one, too."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        block, offset = divmod(int(slot_mapping[0]), SLOTS)
        if offset != 0:
            kv_cache[block, 0, 0, 0] = 7


class OtherBlockImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        kv_cache[1, 0, 0, 0] = 7
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class FarImpl(RowImpl):
    """The last slot of a block also writes where nobody looks: one byte in front."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if int(slot_mapping[0]) == SLOTS - 1:
            kv_cache.view(torch.uint8)[0, 0, 0, 0] = 7


class SilentImpl(RowImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        pass


class OtherSignatureImpl:
    def do_kv_cache_update(self, layer, key, kv_cache):
        pass


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (SharedByteImpl(), "share a byte|do not repeat"),
        (RaggedImpl(), "share a byte|slots of a packed KV cache differ"),
        (FarImpl(), "do not repeat"),
        (OtherBlockImpl(), "a slot of block 0 has bytes in block 1"),
        (SilentImpl(), "the writer left a slot untouched"),
        (object(), "object has no do_kv_cache_update"),
        (
            OtherSignatureImpl(),
            r"has parameters \(layer, key, kv_cache\), which no probe knows",
        ),
    ],
)
def test_what_is_neither_rows_nor_a_packing_is_refused(impl, message):
    with pytest.raises(LayoutRefused, match=message):
        probe_layout(Layer(impl), hnd_cache(), torch.bfloat16)


def test_a_packed_cache_with_gaps_between_heads_is_refused():
    padded = torch.zeros(BLOCKS, HEADS, SLOTS + 1, 2 * DIM)[:, :, :SLOTS]

    with pytest.raises(LayoutRefused, match="expected blocks that are contiguous"):
        probe_layout(Layer(ColumnImpl()), padded, torch.float32)


def peak_of(call):
    """What `call` returns, and by how many bytes it raised this process's resident
    memory at its peak."""

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith(name))
        return int(kib) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    result = call()
    return result, status("VmHWM") - before


@pytest.mark.parametrize("impl", [RowImpl, ColumnImpl])
def test_a_large_block_is_probed_in_memory_that_grows_with_it_only(impl):
    """vLLM's hybrid models have blocks of such sizes. A mask of the two blocks for each
    slot would take twice the bound, and a multiple while they are put together."""
    cache = torch.zeros(2, HEADS, 1056, 2 * DIM, dtype=torch.bfloat16)
    # What a first probe loads is not counted.
    probe_layout(Layer(impl()), hnd_cache(), torch.bfloat16)

    layout, peak = peak_of(lambda: probe_layout(Layer(impl()), cache, cache.dtype))

    assert (layout.runs is None) == (impl is RowImpl)
    assert peak < 1056 * cache.nbytes / 2


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(2, 3, 4, 5, 6), r"shape \(2, 3, 4, 5, 6\) is not supported"),
        (torch.zeros(4, 3, 8, 6).transpose(2, 3), "last stride is 6"),
    ],
)
def test_caches_without_a_row_formula_are_refused(cache, message):
    with pytest.raises(LayoutRefused, match=message):
        row_layout(cache)
