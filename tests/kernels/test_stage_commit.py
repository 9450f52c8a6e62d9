# SPDX-License-Identifier: Apache-2.0
"""stage and commit_draft_layer against indexing in PyTorch: the accepted rows reach the
cache, nothing else changes, and a cache of another dtype is refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.reference import PAD, POISON_SLOT, POISON_WINDOW, Batch
from tests.kernels.strategies import batches
from tests.kernels.transaction import AcceptanceForm, acceptance_arguments
from vllm_nwor import ops

NUM_BLOCKS, BLOCK_SIZE = 3, 16
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]
CACHE_ORDERS = ["BNHD", "BHND", "BHDN", "KV_PAIRED"]


def bits(tensor):
    """The tensor's bytes, so that NaNs compare too."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def random_tensor(shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype).to(device)


def make_caches(order, heads, head_size, dtype, device):
    """(key_cache, value_cache), [blocks, heads, block_size, head_size] views."""
    shapes = {
        "BNHD": ((NUM_BLOCKS, BLOCK_SIZE, heads, head_size), (0, 2, 1, 3)),
        "BHND": ((NUM_BLOCKS, heads, BLOCK_SIZE, head_size), (0, 1, 2, 3)),
        "BHDN": ((NUM_BLOCKS, heads, head_size, BLOCK_SIZE), (0, 1, 3, 2)),
    }
    if order == "KV_PAIRED":
        paired = random_tensor(
            (NUM_BLOCKS, heads, BLOCK_SIZE, 2 * head_size), dtype, device, 3
        )
        return paired[..., :head_size], paired[..., head_size:]
    shape, to_bhnd = shapes[order]
    return tuple(
        random_tensor(shape, dtype, device, seed).permute(to_bhnd) for seed in (3, 4)
    )


class StagedLayer:
    """Activations, staging buffers and caches of one layer, and the log of a batch."""

    def __init__(self, device, batch, order, heads, head_size, dtype, extra=0):
        self.batch, self.device = batch, device
        self.metadata = batch.metadata(device, torch.int64, 5)
        num_tokens = self.metadata[0].numel()
        # vLLM's key and value are slices of one projection.
        projected = random_tensor((num_tokens, 3 * heads, head_size), dtype, device, 1)
        self.key, self.value = projected[:, :heads], projected[:, heads : 2 * heads]
        self.num_drafts = len(batch.flat_slots) + extra
        capacity = self.num_drafts + 2
        self.staging = [
            random_tensor((capacity, heads, head_size), dtype, device, seed)
            for seed in (7, 8)
        ]
        self.caches = make_caches(order, heads, head_size, dtype, device)
        self.log_slots = torch.full((capacity,), POISON_SLOT, device=device)
        self.log_windows = torch.full(
            (capacity, 3), POISON_WINDOW, dtype=torch.int32, device=device
        )

    def stage(self, **changes):
        arguments = {
            "key": self.key,
            "value": self.value,
            "slot_mapping": self.metadata[0],
            "logits_indices": self.metadata[1],
            "cu_num_logits": self.metadata[2],
            "staging_key": self.staging[0],
            "staging_value": self.staging[1],
            "log_slots": self.log_slots,
            "log_windows": self.log_windows,
            "num_drafts": self.num_drafts,
        }
        ops.stage(**{**arguments, **changes})

    def commit(self, form=AcceptanceForm.SAMPLED, **changes):
        sampled, vocab_size, num_rejected = acceptance_arguments(
            self.batch, form, self.device
        )
        arguments = {
            "staging_key": self.staging[0],
            "staging_value": self.staging[1],
            "log_slots": self.log_slots,
            "log_windows": self.log_windows,
            "sampled_token_ids": sampled,
            "vocab_size": vocab_size,
            "num_rejected": num_rejected,
            "key_cache": self.caches[0],
            "value_cache": self.caches[1],
            "num_drafts": self.num_drafts,
        }
        ops.commit_draft_layer(**{**arguments, **changes})

    def check(self, form=AcceptanceForm.SAMPLED):
        activations = (self.key, self.value)
        rows = self.metadata[1].tolist()
        wanted_staging = [buffer.clone() for buffer in self.staging]
        for draft, (slot, (request, _, _)) in enumerate(
            zip(self.batch.flat_slots, self.batch.windows, strict=True)
        ):
            if slot == PAD:
                continue
            for buffer, rows_of_layer in zip(wanted_staging, activations, strict=True):
                buffer[draft] = rows_of_layer[rows[draft + request + 1]]
        self.stage()
        for wanted, buffer in zip(wanted_staging, self.staging, strict=True):
            assert torch.equal(bits(wanted), bits(buffer))
        true_drafts = len(self.batch.flat_slots)
        assert self.log_slots[:true_drafts].tolist() == self.batch.flat_slots
        assert (self.log_slots[true_drafts : self.num_drafts] == PAD).all()
        assert (self.log_slots[self.num_drafts :] == POISON_SLOT).all()

        wanted_caches = [cache.clone() for cache in self.caches]
        for draft, (slot, rejected) in enumerate(
            zip(self.batch.flat_slots, self.batch.rejected, strict=True)
        ):
            if slot == PAD or rejected:
                continue
            for cache, buffer in zip(wanted_caches, wanted_staging, strict=True):
                cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = buffer[draft]
        self.commit(form)
        for wanted, cache in zip(wanted_caches, self.caches, strict=True):
            assert torch.equal(bits(wanted), bits(cache))


EXAMPLE = Batch(slots=((17, 18, PAD), (), (47, 0)), accepted=(2, 0, 1))


@pytest.mark.parametrize("order", CACHE_ORDERS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        pytest.param(torch.bfloat16, marks=pytest.mark.sanitizer),
        torch.float32,
        torch.int64,
    ],
    ids=str,
)
def test_accepted_rows_reach_the_cache(device, order, dtype):
    layer = StagedLayer(device, EXAMPLE, order, heads=2, head_size=16, dtype=dtype)
    layer.check()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_staged_step(device, data):
    batch = data.draw(batches(NUM_BLOCKS * BLOCK_SIZE))
    # Two drafts of one slot, both accepted, would race for it on CUDA.
    used = [slot for slot in batch.flat_slots if slot != PAD]
    if len(set(used)) < len(used):
        spread = iter(range(len(used)))
        batch = Batch(
            tuple(
                tuple(
                    PAD if s == PAD else next(spread) % (NUM_BLOCKS * BLOCK_SIZE)
                    for s in window
                )
                for window in batch.slots
            ),
            batch.accepted,
        )
        if len(used) > NUM_BLOCKS * BLOCK_SIZE:
            return
    StagedLayer(
        device,
        batch,
        data.draw(st.sampled_from(CACHE_ORDERS)),
        heads=data.draw(st.integers(1, 4)),
        head_size=data.draw(st.sampled_from([1, 3, 8, 64, 80])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        extra=data.draw(st.integers(0, 2)),
    ).check(data.draw(st.sampled_from(list(AcceptanceForm))))


STAGE_ERRORS = [
    (
        {"staging_value": torch.bfloat16},
        "stage: staging_value has dtype BFloat16 and key has dtype Float; must be the",
    ),
    (
        {"staging_key": (7, 1, 8)},
        "stage: staging_key has shape [7, 1, 8]; dimension 1 must be 2, the heads of",
    ),
    (
        {"staging_key": (7, 2, 4)},
        "stage: staging_key has shape [7, 2, 4]; dimension 2 must be 8, the head size",
    ),
    (
        {"staging_value": (6, 2, 8)},
        "stage: staging_value has shape [6, 2, 8]; dimension 0 must be 7, the capacity",
    ),
    ({"num_drafts": 8}, "stage: num_drafts is 8; must be between 0 and 7"),
]
COMMIT_ERRORS = [
    (
        {"key_cache": torch.uint8},
        "commit_draft_layer: key_cache has dtype Byte and staging_key has dtype Float; "
        "must be the same, a quantised cache is not supported",
    ),
    (
        {"value_cache": (3, 2, 16)},
        "commit_draft_layer: value_cache has shape [3, 2, 16]; must be [blocks, heads,",
    ),
    (
        {"value_cache": (3, 2, 8, 8)},
        "commit_draft_layer: value_cache has shape [3, 2, 8, 8]; dimension 2 must be",
    ),
    ({"num_drafts": -1}, "commit_draft_layer: num_drafts is -1; must be between 0 and"),
]


def _refused(layer, call, change, message):
    (name, value), *_ = change.items()
    if isinstance(value, torch.dtype):
        shape = layer.staging[0].shape if "staging" in name else (3, 2, 16, 8)
        value = torch.zeros(shape, dtype=value, device=layer.device)
    elif isinstance(value, tuple):
        value = torch.zeros(value, device=layer.device)
    tensors = [*layer.staging, *layer.caches, layer.log_slots, layer.log_windows]
    before = [bits(tensor) for tensor in tensors]
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        call(**{name: value})
    for old, tensor in zip(before, tensors, strict=True):
        assert torch.equal(old, bits(tensor))


@pytest.mark.parametrize(("change", "message"), STAGE_ERRORS)
def test_stage_refuses(device, change, message):
    layer = StagedLayer(device, EXAMPLE, "BNHD", 2, 8, torch.float32)
    _refused(layer, layer.stage, change, message)


@pytest.mark.parametrize(("change", "message"), COMMIT_ERRORS)
def test_commit_refuses(device, change, message):
    layer = StagedLayer(device, EXAMPLE, "BNHD", 2, 8, torch.float32)
    layer.stage()
    _refused(layer, layer.commit, change, message)


def test_slots_out_of_range(device):
    layer = StagedLayer(device, EXAMPLE, "BNHD", 2, 8, torch.float32)
    layer.stage()
    layer.log_slots[0] = NUM_BLOCKS * BLOCK_SIZE
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="slot of draft 0 is 48; must be -1"):
            layer.commit()
        return
    before = [bits(cache) for cache in layer.caches]
    layer.commit(
        sampled_token_ids=None,
        num_rejected=torch.tensor([2, 0, 2], dtype=torch.int32, device=device),
    )
    for old, cache in zip(before, layer.caches, strict=True):
        assert torch.equal(old, bits(cache))
