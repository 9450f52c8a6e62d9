# SPDX-License-Identifier: Apache-2.0
"""An engine with recurrent states for the audit's self-test, and the faults that are
planted there.

Each request has four drafts in every step, of which two are right once its text is
known: vLLM's CPU code is wrong where windows differ in length (docs/audit.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..layout.states import StateCache, StateKind
from .bench import MODEL, NUM_DRAFTS, VOCAB_SIZE, Bench, prompt
from .findings import Finding
from .states import word_offsets

HYBRID = MODEL | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    # vLLM wants a layer with experts.
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CONV, TEMPORAL = map(str, (StateKind.CONV, StateKind.TEMPORAL))
BOTH = (CONV, TEMPORAL)


class StateBench(Bench):
    """truth: the longest text of each request so far. names: of the layers with
    recurrent states."""

    def __init__(self) -> None:
        # With AMX vLLM 0.32 takes other code, which raises.
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False).start()
        self.truth: dict[str, list[int]] = {}
        super().__init__(
            HYBRID, num_gpu_blocks_override=64, enable_prefix_caching=False
        )
        if self.audit.states is None:
            raise RuntimeError("the audit refused the engine's recurrent states")
        # vLLM's dummy weights make each token follow itself: now another one does.
        for name, weight in self.runner.get_model().named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight.data.copy_(weight.data.roll(1, dims=0))
        self.states = self.audit.states
        self.names = list(dict.fromkeys(name for name, *_ in self.states.layers))

    def _spoil_drafts(self) -> None:
        batch = self.runner.input_batch

        def scripted(scheduled: Any, sampled: Any, *rest: Any) -> list[list[int]]:
            drafts: list[list[int]] = []
            for row, name in enumerate(batch.req_ids):
                text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
                is_prompt = len(sampled[row]) == 0
                drafts.append([] if is_prompt else self._drafts(name, text.tolist()))
            return drafts

        self.runner.propose_draft_token_ids = scripted

    def _drafts(self, request_id: str, text: list[int]) -> list[int]:
        name = request_id.rpartition("-")[0]
        known = self.truth.get(name, [])
        if len(text) > len(known):
            self.truth[name] = text
        drafts = [*known[len(text) :], *[0] * NUM_DRAFTS][:NUM_DRAFTS]
        return [*drafts[:2], *((token + 1) % VOCAB_SIZE for token in drafts[2:])]

    def compared(self) -> dict[str, int]:
        return {"samples of states compared": int(self.states.totals[0])}

    def clear(self) -> None:
        self.found.clear()

    def cache(self, layer: int, kind: str) -> torch.Tensor:
        """As StateCache.tensor."""
        kinds = [(name, of) for name, of, _ in self.states.layers]
        return self.states.caches[kinds.index((self.names[layer], kind))]

    def acts(
        self, act: Callable[[list[int], list[Any], Callable[[], Any]], Any]
    ) -> list[int]:
        """One step. act: called in place of the forward, with it, vLLM's metadata of
        the layers, and a list for blocks, which is returned."""
        from vllm.forward_context import get_forward_context

        blocks: list[int] = []
        forward = self.runner._model_forward

        def acting(*args: Any, **kwargs: Any) -> Any:
            metadata = get_forward_context().attn_metadata
            of_layers = [metadata[name] for name in self.names]
            return act(blocks, of_layers, partial(forward, *args, **kwargs))

        with patch.object(self.runner, "_model_forward", acting):
            self.step()
        return blocks

    def read_block(self, metadata: Any, name: str, kind: str) -> int:
        """That a window is to read of a layer."""
        row = self.row(name)
        column = int(metadata.num_accepted_tokens[row]) - 1 if kind == TEMPORAL else 0
        return int(metadata.spec_state_indices_tensor[row, column])


class StateExpected(NamedTuple):
    """What a planted fault must be reported as: the first finding of its class. layer:
    the first one's index. writer: a request's name, or None where nobody wrote."""

    kind: str
    states: Sequence[str]
    layer: int
    num_layers: int
    owner: str
    writer: str | None

    def matches(
        self, finding: Finding, blocks: Sequence[int], layers: Sequence[str]
    ) -> bool:
        """blocks: one of them is concerned. layers: names."""
        owner, writer = finding.owner, finding.writer.request
        return (
            finding.kind == self.kind
            and finding.state in self.states
            and finding.block in blocks
            and finding.layer == layers[self.layer]
            and finding.num_layers == self.num_layers
            and (owner and owner.rpartition("-")[0]) == self.owner
            and (writer and writer.rpartition("-")[0]) == self.writer
        )


def clean_run(bench: StateBench) -> list[Finding]:
    """Prompts in chunks, aborts, blocks that others had. What was found."""
    for number in range(10):
        bench.add(f"clean{number}", prompt(number, 2 + 19 * number), 40)
        bench.step(3)
        if number % 3 == 2:
            bench.llm.abort_request([f"clean{number}"])
            bench.add(f"clean{number}", prompt(number, 9), 20)
    bench.abort()
    bench.start()  # for the text of the planted faults
    bench.step(30)
    bench.abort()
    return list(bench.found)


def _before(
    bench: StateBench, layer: int, kind: str, change: Callable[[Any, int], Any]
) -> Sequence[int]:
    """Calls change(metadata, block) before a forward: of a layer, and the block that
    request "one" is to read. Returns that block."""

    def act(blocks: list[int], metadata: list[Any], forward: Callable[[], Any]) -> Any:
        blocks.append(bench.read_block(metadata[layer], "one", kind))
        change(metadata[layer], blocks[0])
        return forward()

    return bench.acts(act)


def wrong_column(bench: StateBench) -> Sequence[int]:
    """The layers go on from the state of another draft than the last accepted one."""

    def act(blocks: list[int], metadata: list[Any], forward: Callable[[], Any]) -> Any:
        row = bench.row("one")
        for one in metadata:
            one.num_accepted_tokens[row] = 1
            blocks.append(int(one.spec_state_indices_tensor[row, 0]))
        return forward()

    return bench.acts(act)


def wrong_row(bench: StateBench) -> Sequence[int]:
    """In one layer two requests have each other's states."""

    def swap(metadata: Any, _: int) -> None:
        rows = [bench.row("one"), bench.row("two")]
        table = metadata.spec_state_indices_tensor
        table[rows] = table[rows[::-1]]
        blocks.append(int(table[rows[0], 0]))  # of the convolution, named first
        blocks.append(bench.read_block(metadata, "one", TEMPORAL))

    blocks: list[int] = []
    _before(bench, 1, TEMPORAL, swap)
    return blocks


def foreign_write(bench: StateBench) -> Sequence[int]:
    """A state is overwritten with that of another request."""
    cache = bench.cache(0, TEMPORAL)

    def copy(metadata: Any, block: int) -> None:
        cache[block] = cache[bench.read_block(metadata, "two", TEMPORAL)]

    return _before(bench, 0, TEMPORAL, copy)


def zeroed_state(bench: StateBench) -> Sequence[int]:
    """A state is lost between two steps."""
    cache = bench.cache(2, TEMPORAL)
    return _before(bench, 2, TEMPORAL, lambda _, block: cache[block].zero_())


def sampled_element(bench: StateBench) -> Sequence[int]:
    """A single bit of a state changes, in a word of the sample."""
    cache = bench.cache(1, TEMPORAL)
    _, offsets = word_offsets(StateCache("", StateKind.TEMPORAL, cache))

    def flip(_: Any, block: int) -> None:
        cache[block].view(torch.uint8).flatten()[offsets[-1]] ^= 1

    return _before(bench, 1, TEMPORAL, flip)


def shifted_buffer(bench: StateBench) -> Sequence[int]:
    """The inputs of a convolution are a column too far."""
    cache = bench.cache(2, CONV)

    def shift(_: Any, block: int) -> None:
        cache[block] = cache[block].roll(1, dims=0)

    return _before(bench, 2, CONV, shift)


def _unwritten(bench: StateBench, layer: int, kind: str, part: Any) -> Sequence[int]:
    """A forward after which that part of the blocks of request "one" is as before."""
    cache = bench.cache(layer, kind)

    def act(blocks: list[int], metadata: list[Any], forward: Callable[[], Any]) -> Any:
        table = metadata[layer].spec_state_indices_tensor
        blocks.extend(table[bench.row("one")].tolist())
        before = cache[blocks].clone()
        result = forward()
        cache[(blocks, *part)] = before[(slice(None), *part)]
        return result

    return bench.acts(act)


def unwritten_buffer(bench: StateBench) -> Sequence[int]:
    """A layer does not write a convolution's inputs."""
    return _unwritten(bench, 1, CONV, ())


def unwritten_head(bench: StateBench) -> Sequence[int]:
    """A layer does not write one head of its states."""
    return _unwritten(bench, 0, TEMPORAL, (1,))


def _marked(bench: StateBench, num_steps: int, has_state: bool) -> Sequence[int]:
    """A step of a new request, after `num_steps` others, in which the metadata says
    that it has a state, or that it has none."""
    bench.abort()
    bench.add("late", prompt(3, 200), 20)
    bench.step(num_steps)

    def act(blocks: list[int], metadata: list[Any], forward: Callable[[], Any]) -> Any:
        row = bench.row("late")
        for one in metadata:
            one.has_initial_state.fill_(has_state)
            blocks.append(int(one.non_spec_state_indices_tensor[row]))
        return forward()

    return bench.acts(act)


def early_state(bench: StateBench) -> Sequence[int]:
    """A new request reads what the last owner of its blocks has left there."""
    return _marked(bench, 0, True)


def lost_state(bench: StateBench) -> Sequence[int]:
    """The second chunk of a prompt is computed as if it were the first."""
    return _marked(bench, 1, False)


def single_state(bench: StateBench) -> Sequence[int]:
    """A window's rejected drafts are in the only state that is kept."""
    read = bench.observer._read_states
    blocks: list[int] = []

    def as_plain(metadata: Any, block_tables: Any) -> Any:
        rows, kept = read(metadata, block_tables)
        rows[:, 5:7] = rows[:, 2:4]
        rows[:, :5] = 0
        blocks.extend(
            int(metadata[name].spec_state_indices_tensor[bench.row("one"), 0])
            for name in bench.names
        )
        return rows, kept

    with patch.object(bench.observer, "_read_states", as_plain):
        bench.step()
    return blocks


# What plants a fault in an engine that has run `Bench.start`, and returns the blocks
# concerned.
STATE_FAULTS: dict[Callable[[StateBench], Sequence[int]], StateExpected] = {
    wrong_column: StateExpected("stale_state", BOTH, 0, 3, "one", "one"),
    shifted_buffer: StateExpected("stale_state", (CONV,), 2, 1, "one", "one"),
    wrong_row: StateExpected("foreign_state", BOTH, 1, 1, "one", "two"),
    foreign_write: StateExpected("foreign_state", (TEMPORAL,), 0, 1, "one", "two"),
    zeroed_state: StateExpected("changed_state", (TEMPORAL,), 2, 1, "one", None),
    sampled_element: StateExpected("changed_state", (TEMPORAL,), 1, 1, "one", None),
    unwritten_head: StateExpected("state_not_written", (TEMPORAL,), 0, 1, "one", "one"),
    unwritten_buffer: StateExpected("state_not_written", (CONV,), 1, 1, "one", "one"),
    early_state: StateExpected("no_state_yet", BOTH, 0, 3, "late", None),
    lost_state: StateExpected("state_lost", BOTH, 0, 3, "late", None),
    single_state: StateExpected("state_ahead", BOTH, 0, 3, "one", "one"),
}
