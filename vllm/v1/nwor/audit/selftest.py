# SPDX-License-Identifier: Apache-2.0
"""The audit against a real vLLM engine on the CPU, with faults planted on purpose.

A small model with random weights, made here: nothing is downloaded. One engine, mode
cow, all bytes compared in each step. First a clean run, in which nothing may be found;
then one run for each fault, in which the first finding of the class expected must name
the layer, the slot and the writer. Faults are planted by attributes of this one runner.

It needs `VLLM_NWOR_*` and vLLM's own variables set before vLLM is imported, so that it
runs in a process of its own (__main__.py).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ops import PAD_SLOT
from ..window import SampledIds
from .findings import Finding

BLOCK_SIZE = 32
NUM_BLOCKS = 18
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NWOR_MODE": "cow",
    "VLLM_NWOR_STRICT": "always",
    "VLLM_NWOR_AUDIT": "log",
    "VLLM_NWOR_AUDIT_MIB": "4096",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Expected:
    """What a planted fault must be reported as. None: not looked at. slots: any."""

    kind: str
    slots: tuple[int, ...]
    layer: str | None = None
    writer: str | None = None


def prompt(seed: int, length: int) -> list[int]:
    """Phrases that come again, so that drafts are made, and most are wrong."""
    draw = random.Random(seed)
    phrase = [draw.randrange(3, 500) for _ in range(7)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += phrase[: draw.randrange(3, 8)]
        tokens.append(draw.randrange(3, 500))
    return tokens[:length]


class Bench:
    """One engine, and the moments of its steps at which faults are planted."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            arguments = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=256,
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=NUM_BLOCKS,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                enable_prefix_caching=True,
                disable_log_stats=True,
                seed=0,
                speculative_config={
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_min": 1,
                    "prompt_lookup_max": 3,
                },
            )
            self.llm = LLMEngine.from_engine_args(arguments)
        core: Any = self.llm.engine_core
        self.core = core.engine_core
        worker = self.core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        if self.runner.__dict__.get("nwor_audit") is None:
            raise RuntimeError("the audit refused this engine; its log says why")
        self.num_steps = 0
        self._spoil_drafts()

    def _spoil_drafts(self) -> None:
        """Makes the last draft of each request a wrong one: something is rejected."""
        propose = self.runner.drafter.propose

        def spoiled(*args: Any, **kwargs: Any) -> list[list[int]]:
            drafts: list[list[int]] = propose(*args, **kwargs)
            vocab_size = MODEL["vocab_size"]
            assert isinstance(vocab_size, int)
            return [
                [*tokens[:-1], (tokens[-1] + 1) % vocab_size] if tokens else tokens
                for tokens in map(list, drafts)
            ]

        self.runner.drafter.propose = spoiled

    @property
    def audit(self) -> Any:
        return self.runner.nwor_audit

    def add(self, name: str, tokens: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.add_request(name, {"prompt_token_ids": list(tokens)}, params)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.llm.has_unfinished_requests():
                self.llm.step()
                self.num_steps += 1

    def finish(self) -> None:
        while self.llm.has_unfinished_requests():
            self.step()

    def clear(self) -> None:
        """Forgets all blocks and all findings. Caches are filled anew: a slot may
        not hold by chance what is written next."""
        self.llm.reset_prefix_cache()
        for index in range(len(self.audit.audit.groups[0].layers)):
            self.bytes(index).random_(0, 0x40)
        self.audit.audit.forget_cache()
        self.audit.audit.snapshot()
        self.audit.findings.last.clear()

    # -- what is where -------------------------------------------------------------

    def layer(self, index: int) -> Any:
        return self.audit.audit.groups[0].layers[index]

    def row(self, name: str) -> int:
        """Of a request, by the name that vLLM has lengthened."""
        ids = self.runner.input_batch.req_ids
        return next(i for i, key in enumerate(ids) if key.startswith(f"{name}-"))

    def slot(self, name: str, position: int) -> int:
        table = self.runner.input_batch.block_table[0].block_table.np
        block = table[self.row(name), position // BLOCK_SIZE]
        return int(block) * BLOCK_SIZE + position % BLOCK_SIZE

    def runs(self, index: int, slot: int) -> list[tuple[int, int]]:
        """(offset, length) in the layer's storage of each run of a slot."""
        layer = self.layer(index)
        layout = layer.layout
        first = slot // layout.block_size * layout.block_stride
        runs = (
            layout.row_runs(slot)
            if layout.runs is None
            else layout.runs[slot % layout.block_size]
        )
        cache = layer.kv_cache
        first += cache.storage_offset() * cache.element_size()
        return [(first + start, length) for start, length in runs.tolist()]

    def bytes(self, index: int) -> torch.Tensor:
        """The storage of a layer's cache as [bytes] uint8."""
        storage = self.layer(index).kv_cache.untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def flip(self, index: int, slot: int, run: int = 0) -> None:
        """Changes a byte of a slot in one layer."""
        offset, _ = self.runs(index, slot)[run]
        self.bytes(index)[offset] ^= 0xFF

    # -- moments -------------------------------------------------------------------

    @contextmanager
    def replaced(self, owner: Any, name: str, function: Any) -> Iterator[None]:
        """`owner` has `function` for its attribute `name`."""
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, function)
        try:
            yield
        finally:
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)


def start(bench: Bench) -> None:
    """Two requests, each with two full blocks and more, a few steps old."""
    bench.add("one", prompt(1, 75), 40)
    bench.add("two", prompt(2, 70), 40)
    bench.step(4)


def scribble(bench: Bench) -> Expected:
    """A byte of one layer's K changes in a committed slot."""
    start(bench)
    slot = bench.slot("one", 5)
    bench.flip(2, slot)
    bench.finish()
    return Expected("changed", (slot,), bench.layer(2).name, "one")


def lost_scale(bench: Bench) -> Expected:
    """The last bytes of a committed slot, where scales would be, become zeros."""
    start(bench)
    slot = bench.slot("two", 17)
    offset, length = bench.runs(1, slot)[-1]
    bench.bytes(1)[offset : offset + length] = 0
    bench.finish()
    return Expected("changed", (slot,), bench.layer(1).name, "two")


def late_write(bench: Bench) -> Expected:
    """Behind commit somebody writes a token's bytes to a slot of another request."""
    start(bench)
    source, slot = bench.slot("one", 9), bench.slot("two", 20)
    data = bench.bytes(0)
    for (here, length), (there, _) in zip(
        bench.runs(0, source), bench.runs(0, slot), strict=True
    ):
        data[there : there + length] = data[here : here + length].clone()
    bench.finish()
    return Expected("changed", (slot,), bench.layer(0).name, "two")


def _bent_restore(bench: Bench, bend: Callable[[torch.Tensor], Any]) -> Expected:
    """The first restore that has something to undo finds the log's slots bent."""
    start(bench)
    rejected: list[int] = []
    manager = bench.runner.nwor_state.manager
    restore = manager.launches.restore

    def bent(acceptance: SampledIds, num_drafts: int, counters_to: Any) -> None:
        (group,) = manager.groups
        num_kept = (acceptance.sampled_token_ids != -1).sum(dim=1) - 1
        if not rejected:
            for draft, (row, place, _) in enumerate(group.log_windows.tolist()):
                if draft < num_drafts and row >= 0 and place >= int(num_kept[row]):
                    rejected.append(int(group.log_slots[draft]))
            if rejected:
                bend(group.log_slots[:num_drafts])
        restore(acceptance, num_drafts, counters_to)

    with bench.replaced(manager.launches, "restore", bent):
        bench.finish()
    return Expected("changed", tuple(rejected))


def skipped_restore(bench: Bench) -> Expected:
    """NWOR does not undo a step's rejected drafts."""
    return _bent_restore(bench, lambda slots: slots.fill_(PAD_SLOT))


def bent_restore(bench: Bench) -> Expected:
    """NWOR undoes them one slot too far."""
    return _bent_restore(bench, lambda slots: slots.add_(1))


def stale_slots(bench: Bench) -> Expected:
    """A step runs with the slot mapping of the one before."""
    start(bench)
    table = bench.runner.input_batch.block_table
    mapping = table.block_tables[0].slot_mapping.np
    slots = tuple(int(slot) for slot in mapping[:16])
    with bench.replaced(table, "compute_slot_mapping", lambda *args: None):
        bench.step()
    bench.finish()
    return Expected("foreign_write", slots)


def swapped_tables(bench: Bench) -> Expected:
    """Two requests have each other's block table for one step."""
    start(bench)
    slot = bench.slot("two", BLOCK_SIZE - 1)
    table = bench.runner.input_batch.block_table
    rows = (bench.row("one"), bench.row("two"))
    table.swap_row(*rows)
    bench.step()
    table.swap_row(*rows)
    bench.finish()
    return Expected("wrong_prefix", (slot,), writer="two")


def given_another_block(
    bench: Bench, on_block: Callable[[int], None] = lambda block: None
) -> tuple[int, ...]:
    """Runs a request whose cached prefix is another text's block, by its table; calls
    `on_block` with that block before the step. Returns the block's first slot."""
    start(bench)
    bench.finish()
    slots: list[int] = []
    execute_model = bench.runner.execute_model

    def bent(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            (blocks,) = request.block_ids
            slots.append(blocks[1] * BLOCK_SIZE)
            blocks[0] = blocks[1]
            on_block(blocks[0])
        return execute_model(scheduled, *args, **kwargs)

    bench.add("again", prompt(1, 75), 4)
    with bench.replaced(bench.runner, "execute_model", bent):
        bench.step()
    bench.finish()
    return tuple(slots)


def wrong_hit(bench: Bench) -> Expected:
    """A request is given another text's block for its cached prefix."""
    return Expected("wrong_prefix", given_another_block(bench), writer="one")


def missing_write(bench: Bench) -> Expected:
    """One layer does not write what a step computes."""
    name = bench.layer(3).name
    modules = bench.runner.compilation_config.static_forward_context
    bench.add("late", prompt(3, 30), 20)
    impl = modules[name].impl
    with bench.replaced(impl, "do_kv_cache_update", lambda *args, **kwargs: None):
        bench.step()
    slots = tuple(bench.slot("late", position) for position in range(30))
    bench.finish()
    return Expected("missing_write", slots, name, "late")


def foreign_block(bench: Bench) -> Expected:
    """A request's next write goes to a block of another one."""
    start(bench)
    table = bench.runner.input_batch.block_table
    compute = table.compute_slot_mapping
    slot = bench.slot("two", 3)
    row = bench.row("one")

    def bent(num_reqs: int, query_start_loc: Any, *args: Any) -> None:
        compute(num_reqs, query_start_loc, *args)
        mapping = table.block_tables[0].slot_mapping.gpu
        mapping[int(query_start_loc[row])] = slot

    with bench.replaced(table, "compute_slot_mapping", bent):
        bench.step()
    bench.finish()
    return Expected("foreign_write", (slot,), writer="one")


def rejected_tail(bench: Bench) -> Expected:
    """A block goes to a KV connector before its last slots are committed."""
    start(bench)
    batch = bench.runner.input_batch
    length = int(batch.num_tokens_no_spec[bench.row("one")]) - 1
    slot = bench.slot("one", length)
    # As its adapter calls it, between two steps.
    bench.audit.audit.hand_on([[slot // BLOCK_SIZE]])
    bench.finish()
    return Expected("handed_on", (slot,))


def idle_load(bench: Bench) -> Expected:
    """A load is reported done, and its block still holds another text."""
    slots = given_another_block(
        bench, lambda block: bench.audit.audit.hand_on([[block]], fills=True)
    )
    return Expected("never_loaded", slots, bench.layer(0).name)


FAULTS = (
    scribble,
    lost_scale,
    late_write,
    skipped_restore,
    bent_restore,
    stale_slots,
    foreign_block,
    swapped_tables,
    wrong_hit,
    missing_write,
    rejected_tail,
    idle_load,
)


def clean_run(bench: Bench) -> list[Finding]:
    """Batches, chunked prefill, preemption, prefix hits, also in the step that writes
    them, aborts, names used again. What was found."""
    shared = prompt(9, 80)
    for number in range(30):
        tail = prompt(20 + number, 10 + 7 * (number % 9))
        bench.add(f"clean{number}", shared[: 20 * (number % 5)] + tail, 48)
        if number % 6 == 1:  # the same text in the same step
            bench.add(f"twin{number}", shared + prompt(1, 20), 24)
            bench.add(f"other{number}", shared + prompt(1, 20), 24)
        bench.step(9)
        if number % 5 == 4:
            bench.llm.abort_request([f"clean{number}"])
            bench.add(f"clean{number}", tail, 20)
    bench.finish()
    return list(bench.audit.findings.last)


def matches(expected: Expected, finding: Finding) -> bool:
    writer = finding.writer.request or ""
    return (
        finding.kind == expected.kind
        and finding.slot in expected.slots
        and (expected.layer is None or finding.layer == expected.layer)
        and (expected.writer is None or writer.startswith(f"{expected.writer}-"))
    )


def run(say: Callable[[str], None]) -> bool:
    """Whether the audit is what it says it is. Tells `say` line by line."""
    bench = Bench()
    found = clean_run(bench)
    totals = bench.audit.audit.totals()
    say(
        f"{'ok  ' if not found else 'FAIL'} clean run: {len(found)} findings in "
        f"{bench.num_steps} steps; compared: {totals['identities']} identities, the "
        f"bytes of {totals['contents']} slots"
    )
    passed = not found and totals["identities"] > 0 and totals["contents"] > 0
    for fault in FAULTS:
        bench.clear()
        expected = fault(bench)
        kept = list(bench.audit.findings.last)
        of_class = [finding for finding in kept if finding.kind == expected.kind]
        is_right = bool(of_class) and matches(expected, of_class[0])
        passed = passed and is_right
        told = (doc := fault.__doc__ or "").splitlines()[0] if fault.__doc__ else doc
        say(f"{'ok  ' if is_right else 'FAIL'} {fault.__name__}: {told}")
        if is_right:
            say(f"     {of_class[0].line()}")
        else:
            say(f"     expected {expected}; found {[f.line() for f in kept[:4]]}")
    say(f"{bench.num_steps} steps; {'passed' if passed else 'FAILED'}")
    return passed
