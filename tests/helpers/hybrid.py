# SPDX-License-Identifier: Apache-2.0
"""A hybrid model of three gated delta nets and one attention layer, on the V1 runner,
with its recurrent states audited; and what vLLM does wrong with them on a CPU, mended.

Only metadata and buffers are mended, by wrapping vLLM's functions: what the audit reads
is what vLLM's kernels get.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.helpers.drafters import ScriptedDrafter
from tests.helpers.engine import Engine, Request, Result, prompt
from vllm_nwor.audit.findings import Finding

AUDIT = {"AUDIT": "log", "STRICT": "always"}
MODEL = "tiny-qwen3-next"
LAYERS = [f"model.layers.{n}.linear_attn" for n in range(3)]
# vLLM issues 39273 and 51562.
BEFORE_0_32 = Version(vllm.__version__) < Version("0.32")


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    """Engines that run here, for all tests of a file that imports it. On a CPU with AMX
    vLLM takes other code, which raises for windows of several lengths: it is switched
    off. And vLLM 0.29 raises in a step of one row without drafts, because a kernel
    wants its one index contiguous."""
    build = gdn_attn.GDNAttentionMetadataBuilder.build

    def contiguous(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        blocks = metadata.non_spec_state_indices_tensor
        if blocks is not None and len(blocks) == 1:
            metadata.non_spec_state_indices_tensor = blocks.new_tensor([int(blocks)])
        return metadata

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        if BEFORE_0_32:
            patch.setattr(gdn_attn.GDNAttentionMetadataBuilder, "build", contiguous)
        if parallel_state._TP is not None and parallel_state._EP is None:
            # The first engine of this process had no experts.
            patch.setattr(parallel_state, "_EP", parallel_state._TP)
        yield


@functools.cache
def start(**arguments: Any) -> Engine:
    return Engine("off", AUDIT, MODEL, **arguments)


def play(engine: Engine, plan: Any, truth: Any, requests: list[Request]) -> Result:
    """plan: None for vLLM's own drafts."""
    vars(engine.runner).pop("propose_draft_token_ids", None)
    if plan is not None:
        ScriptedDrafter(truth, plan).attach(engine.runner)
    return engine.run(requests)


def of_few_words() -> list[Request]:
    """Texts that repeat, so that ngram finds drafts now and then."""
    words = [list(range(100 + n, 105 + n + n % 3)) for n in range(6)]
    return [
        Request(f"n{n}", prompt(n, 4 + n), 80, params={"allowed_token_ids": words[n]})
        for n in range(6)
    ]


def found(engine: Engine) -> list[Finding]:
    """Since the last call; samples were compared, and none was unknown."""
    totals = engine.audit.audit.states.totals
    assert totals[0] > 0 == totals[1]
    totals.zero_()
    return engine.take_findings()


def caches(engine: Engine, number: int) -> Any:
    """The convolution's and the temporal state of a layer."""
    modules = engine.runner.compilation_config.static_forward_context
    return modules[LAYERS[number]].kv_cache


# --- mending vLLM ---------------------------------------------------------------------


class ReadOnly:
    """One block of a buffer of convolutions: what vLLM copies to it is dropped."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.dtype = block, block.dtype

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.block[place]

    def copy_(self, columns: torch.Tensor) -> None: ...


class ReadOnlyBuffers:
    def __init__(self, buffers: torch.Tensor) -> None:
        self.buffers = buffers

    def __getitem__(self, block: int) -> ReadOnly:
        return ReadOnly(self.buffers[block])


def mend_convolutions(patch: pytest.MonkeyPatch) -> None:
    """vLLM leaves the inputs of a window with fewer drafts than the longest in the
    wrong columns. Afterwards the buffer of each window holds what the GPU's kernel
    leaves there: the inputs read, but for the first, then the window's."""
    wrapped = gdn_attention._spec_forward

    def forward(
        layer: Any,
        metadata: Any,
        inputs: torch.Tensor,
        b: Any,
        a: Any,
        buffers: torch.Tensor,
        states: Any,
        width: int,
        *args: Any,
    ) -> Any:
        read_only = ReadOnlyBuffers(buffers)
        result = wrapped(layer, metadata, inputs, b, a, read_only, states, width, *args)
        starts = metadata.spec_query_start_loc.tolist()
        for row in range(metadata.num_spec_decodes):
            block = buffers[int(metadata.spec_state_indices_tensor[row, 0])]
            first = int(metadata.num_accepted_tokens[row]) - 1
            own = inputs[starts[row] : starts[row + 1]].transpose(0, 1).to(block.dtype)
            kept = block[:, first : first + width - 1]
            columns = torch.cat([kept, own], dim=1)[:, 1:]
            block[:, : columns.shape[1]] = columns
        return result

    patch.setattr(gdn_attention, "_spec_forward", forward)


def mend_rows_without_drafts(patch: pytest.MonkeyPatch) -> None:
    """vLLM issue 39273, by the rule that vLLM has since 0.32: a row of generated text
    without drafts is a window of none, so that its kernels get the number of accepted
    drafts."""
    wrapped = GPUModelRunner._build_attention_metadata

    def build(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.speculative_config is None:
            return wrapped(runner, *args, **kwargs)
        batch, numbers = runner.input_batch, runner.num_decode_draft_tokens.np
        if not kwargs["use_spec_decode"]:
            numbers.fill(-1)
        for row, name in enumerate(batch.req_ids):
            is_text = batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]
            if kwargs["num_scheduled_tokens"][name] == 1 and is_text:
                # vLLM before 0.32 does not take a batch of zeros for windows; how
                # many drafts there are it asks elsewhere.
                numbers[row] = 1
        return wrapped(runner, *args, **kwargs | {"use_spec_decode": True})

    if BEFORE_0_32:
        patch.setattr(GPUModelRunner, "_build_attention_metadata", build)


def mend_first_tokens(patch: pytest.MonkeyPatch) -> None:
    """vLLM issue 51562, as vLLM does it since 0.32: the first token of a prompt of one
    is no decode."""
    wrapped = gdn_attn.split_decodes_and_prefills

    def split(common: Any, decode_threshold: int) -> Any:
        is_first = common.compute_num_computed_tokens() == 0
        return wrapped(
            common.replace(is_prefilling=is_first),
            decode_threshold,
            treat_short_extends_as_decodes=False,
        )

    if BEFORE_0_32:
        patch.setattr(gdn_attn, "split_decodes_and_prefills", split)
