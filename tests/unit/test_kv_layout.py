# SPDX-License-Identifier: Apache-2.0
"""KVLayout and its probing, against writers whose byte maps are known.

The stand-ins for attention implementations write through torch indexing, so that the
test decides which bytes belong to a slot. MLA's own writer:
tests/integration/test_poison.py.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_nwor.hooks import layers
from vllm_nwor.layout.kv_layout import LayoutRefused
from vllm_nwor.layout.probe import probe_layout

BLOCKS, HEADS, SLOTS, DIM = 5, 3, 16, 8


class Impl:
    """An attention implementation. write: one token's key and value, [heads, size]
    each, to a slot of a cache."""

    def __init__(self, write):
        self.write = write

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for token, slot in enumerate(slot_mapping.tolist()):
            self.write(kv_cache, slot, key[token], value[token])


def rows(cache, slot, key, value):
    """[K | V] in the logical cell (block, head, slot)."""
    block, offset = divmod(slot, cache.shape[2])
    cache[block, :, offset, : 2 * DIM] = torch.cat([key, value], dim=-1)


def zeros(cache, slot, key, value):
    """Writes zeros only."""
    rows(cache, slot, key * 0, value * 0)


def rows_and(where):
    """Writes rows, and one more element at `where(block, slot)` if that is not None."""

    def write(cache, slot, key, value):
        rows(cache, slot, key, value)
        if (at := where(*divmod(slot, SLOTS))) is not None:
            cache[at][0] = 7

    return write


def columns(cache, slot, key, value):
    """K column-major in each block and head, V row-major, as CPU_ATTN's `vec`."""
    blocks, heads, slots, width = cache.shape
    flat = cache.view(blocks, heads, slots * width)
    block, offset = divmod(slot, slots)
    flat[block, :, offset : DIM * slots : slots] = key
    start = DIM * slots + offset * DIM
    flat[block, :, start : start + DIM] = value


def probe(write, kv_cache):
    """write: one of the functions above, or an implementation."""
    impl = Impl(write) if callable(write) else write
    layer = SimpleNamespace(impl=impl, num_kv_heads=HEADS, head_size=DIM)
    return probe_layout(kv_cache, layers._writer(layer, kv_cache.dtype))


def nhd_cache():
    """Logical [B, H, N, 2D], stored with heads inside slots."""
    return torch.zeros(BLOCKS, SLOTS, HEADS, 2 * DIM).bfloat16().transpose(1, 2)


def hnd_cache(dtype=torch.bfloat16, width=2 * DIM):
    return torch.zeros(BLOCKS, HEADS, SLOTS, width, dtype=dtype)


def head_outermost_cache():
    return torch.zeros(HEADS, BLOCKS, SLOTS, 2 * DIM).transpose(0, 1)


def other_layers_between_blocks():
    """One layer of three whose blocks alternate in one allocation."""
    return torch.zeros(BLOCKS, 3, HEADS, SLOTS, 2 * DIM)[:, 1]


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


def written(kv_cache, write, slot):
    """Bytes of the cache's storage that the writer changes, on a random background."""
    raw = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
    changed = torch.zeros(raw.numel(), dtype=torch.bool)
    for _ in range(4):
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
        before = raw.clone()
        write(kv_cache, slot, *torch.randn(2, HEADS, DIM).to(kv_cache.dtype))
        changed |= raw != before
    return changed


@pytest.mark.parametrize(
    ("write", "make"),
    [
        *((rows, nhd_cache), (rows, hnd_cache), (rows, head_outermost_cache)),
        *((rows, other_layers_between_blocks), (zeros, hnd_cache)),
        (columns, hnd_cache),
    ],
)
def test_a_probed_layout_names_exactly_the_written_bytes(write, make):
    """Adjacent heads are one run."""
    kv_cache = make()
    layout = probe(write, kv_cache)
    if write is columns:
        assert layout.runs.shape == (SLOTS, HEADS * (DIM + 1), 2)
    else:
        assert layout.runs is None
        assert layout.num_heads == (1 if make is nhd_cache else HEADS)
    assert layout.slot_bytes == HEADS * 2 * DIM * kv_cache.element_size()
    for slot in (0, 1, SLOTS - 1, SLOTS, BLOCKS * SLOTS - 1):
        assert torch.equal(
            touched(kv_cache, layout, slot), written(kv_cache, write, slot)
        )


def test_bytes_that_the_first_write_initializes_are_not_the_slots():
    """And the live implementation is neither called nor changed."""

    class ScalesImpl:
        """As TRITON_ATTN with per-token-head scales: each row has one more element,
        and all of these are set to one at the first use of a cache."""

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            scales = kv_cache[..., 2 * DIM]
            if self._k_scale_cache is None:
                self._k_scale_cache = scales.fill_(1)
            assert self._k_scale_cache.data_ptr() == scales.data_ptr()
            (slot,) = slot_mapping.tolist()
            rows(kv_cache, slot, key[0], value[0])
            scales[slot // SLOTS, :, slot % SLOTS] = 0.5

    kv_cache = hnd_cache(torch.float32, 2 * DIM + 1)
    impl = ScalesImpl()
    impl._k_scale_cache = kv_cache[..., 2 * DIM]
    before = dict(vars(impl))
    layout = probe(impl, kv_cache)
    assert layout.runs is None
    assert layout.run_bytes == (2 * DIM + 1) * 4
    assert vars(impl) == before
    assert not kv_cache.any()


def shared_bytes(cache, slot, key, value):
    """Two neighbouring slots write the same bytes."""
    rows(cache, slot // 2 * 2, key, value)


# All slots but the first write an element of the first one, too.
ragged = rows_and(lambda block, slot: (block, 0, 0) if slot else None)
other_block = rows_and(lambda block, slot: (1, 0, 0))
# The last slot of a block also writes to another block.
far = rows_and(lambda block, slot: (0, 0, 0) if slot == SLOTS - 1 else None)


class OtherSignatureImpl:
    def do_kv_cache_update(self, layer, key, kv_cache):
        pass


PADDED = torch.zeros(BLOCKS, HEADS, SLOTS + 1, 2 * DIM)[:, :, :SLOTS]
FIVE, TURNED = torch.zeros(2, 3, 4, 5, 6), torch.zeros(4, 3, 8, 6).transpose(2, 3)
PARAMETERS = r"has parameters \(layer, key, kv_cache\); supported are"


@pytest.mark.parametrize(
    ("write", "cache", "message"),
    [
        (shared_bytes, hnd_cache(), "share a byte|do not repeat"),
        (ragged, hnd_cache(), "share a byte|slots of a packed KV cache differ"),
        (far, hnd_cache(), "do not repeat"),
        (other_block, hnd_cache(), "a slot of block 0 has bytes in block 1"),
        (lambda *_: None, hnd_cache(), "the writer left a slot untouched"),
        (object(), hnd_cache(), "object has no do_kv_cache_update"),
        (OtherSignatureImpl(), hnd_cache(), PARAMETERS),
        (columns, PADDED, "expected blocks that are contiguous"),
        (rows, FIVE, r"shape \(2, 3, 4, 5, 6\) is not supported"),
        (rows, TURNED, "last stride is 6"),
    ],
)
def test_an_unknown_layout_is_refused(write, cache, message):
    with pytest.raises(LayoutRefused, match=message):
        probe(write, cache)


def peak_of(call):
    """The result of `call`, and by how many bytes it raised the peak of this process's
    resident memory."""

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith(name))
        return int(kib) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    result = call()
    return result, status("VmHWM") - before


@pytest.mark.parametrize("write", [rows, columns])
def test_probing_a_large_block_takes_memory_linear_in_its_size(write):
    """vLLM's hybrid models have blocks of this size. One mask of two blocks for each
    slot would exceed the bound."""
    cache = torch.zeros(2, HEADS, 1056, 2 * DIM, dtype=torch.bfloat16)
    probe(write, hnd_cache())  # loads modules, which must not count
    layout, peak = peak_of(lambda: probe(write, cache))
    assert (layout.runs is None) == (write is rows)
    assert peak < 1056 * cache.nbytes / 2
