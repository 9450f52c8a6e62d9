# SPDX-License-Identifier: Apache-2.0
"""The faults that the audit's self-test plants, by attributes of one runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from .. import ops
from ..step import Transfer
from .bench import Bench, prompt
from .findings import Finding
from .handover import GIVES, KEY, TAKES


class Expected(NamedTuple):
    """What a planted fault must be reported as: the first finding of its class. layer:
    its index, or None where no layer in particular is concerned. writer: a request's
    name, or None where nobody wrote."""

    kind: str
    layer: int | None
    writer: str | None

    def matches(
        self, finding: Finding, slots: Sequence[int], layers: Sequence[str]
    ) -> bool:
        """slots: one of them is concerned. layers: names."""
        writer = finding.writer.request  # vLLM has lengthened the name
        return (
            finding.kind == self.kind
            and finding.slot in slots
            and finding.layer == (None if self.layer is None else layers[self.layer])
            and (writer and writer.rpartition("-")[0]) == self.writer
        )


def scribble(bench: Bench) -> Sequence[int]:
    """A byte of one layer's K changes in a committed slot."""
    slot = bench.slot("one", 5)
    bench.runs(2, slot)[0][0] ^= 0xFF
    return (slot,)


def lost_scale(bench: Bench) -> Sequence[int]:
    """The last bytes of a committed slot, where scales would be, become zeros.

    Rows of bf16 have none: the last run of the slot, of its V, is dropped instead. The
    budget is a block a step: it is found when the round gets there.
    """
    slot = bench.slot("two", 17)
    bench.runs(1, slot)[-1].zero_()
    with bench.blocks_a_step(1):
        bench.step(6)
    bench.abort()  # before a step with all of the budget
    return (slot,)


def late_write(bench: Bench) -> Sequence[int]:
    """Behind commit somebody writes a token's bytes to a slot of another request."""
    source, slot = bench.slot("one", 9), bench.slot("two", 20)
    for here, there in zip(bench.runs(0, source), bench.runs(0, slot), strict=True):
        there.copy_(here)
    return (slot,)


def _restore(
    bench: Bench, bend: Callable[[torch.Tensor], Any] = lambda slots: None
) -> Sequence[int]:
    """Goes on to the end of the first step that rejects drafts of a request. Its
    restore finds the log's slots bent. Returns those of the request's that fell."""
    rejected: list[int] = []
    manager = bench.runner.nwor_state.named("transaction").manager
    (group,), log = manager.groups, manager.undo_log
    (restore,) = log.commits

    def bent(sampled: torch.Tensor, *of_ids: Any) -> None:
        _, _, num_drafts, _ = of_ids
        num_kept = (sampled != -1).sum(dim=1) - 1
        windows, slots = group.log_windows[:num_drafts], group.log_slots[:num_drafts]
        requests, places, _ = windows.long().unbind(1)
        fell = (requests == bench.row("one")) & (places >= num_kept[requests])
        rejected.extend(slots[fell].tolist())
        if rejected:
            bend(slots)
        restore(sampled, *of_ids)

    with patch.object(log, "commits", [bent]):
        while not rejected and bench.llm.has_unfinished_requests():
            bench.step()
    return rejected


def skipped_restore(bench: Bench) -> Sequence[int]:
    """NWOR does not undo a step's rejected drafts."""
    return _restore(bench, lambda slots: slots.fill_(ops.PAD_SLOT))


def bent_restore(bench: Bench) -> Sequence[int]:
    """NWOR undoes them one slot too far."""
    return _restore(bench, lambda slots: slots.add_(1))


def _mapped(bench: Bench, compute: Callable[..., Any]) -> None:
    """One step, with `compute` in place of what makes its slot mapping."""
    with patch.object(bench.table, "compute_slot_mapping", compute):
        bench.step()


def stale_slots(bench: Bench) -> Sequence[int]:
    """A step runs with the slot mapping of the one before."""
    slots: list[int] = bench.table[0].slot_mapping.np[:16].tolist()
    _mapped(bench, lambda *args: None)
    return slots


def skipped_slot(bench: Bench) -> Sequence[int]:
    """In such a step, a slot that a request's table names does not get its row."""
    slots: list[int] = []
    _mapped(bench, lambda *args: slots.append(bench.next_slot()))
    bench.abort()  # what looks at whole blocks would find it, too
    return slots


def foreign_block(bench: Bench) -> Sequence[int]:
    """A request's next write goes to a block of another one."""
    compute = bench.table.compute_slot_mapping
    slot, row = bench.slot("one", 3), bench.row("two")

    def bent(num_reqs: int, query_start_loc: Any, *args: Any) -> None:
        compute(num_reqs, query_start_loc, *args)
        bench.table[0].slot_mapping.gpu[int(query_start_loc[row])] = slot

    _mapped(bench, bent)
    return (slot,)


def foreign_slot(bench: Bench) -> Sequence[int]:
    """After such a write, a slot within a block is of another text than its end."""
    return foreign_block(bench)


def shared_block(bench: Bench) -> Sequence[int]:
    """A block of another request stands in a request's table, which writes there."""
    tables = bench.table[0].block_table.np
    tables[bench.row("one"), 2] = tables[bench.row("two"), 0]
    bench.step()
    first = bench.slot("one", 2 * bench.block_size)
    return range(first, first + bench.block_size)


def swapped_tables(bench: Bench) -> Sequence[int]:
    """Two requests have each other's block table for one step, without a budget."""
    slot = bench.slot("two", bench.block_size - 1)
    rows = (bench.row("one"), bench.row("two"))
    bench.table.swap_row(*rows)
    with bench.blocks_a_step(0):
        bench.step()
    bench.table.swap_row(*rows)
    return (slot,)


def _hit(
    bench: Bench, bend: Callable[[list[int]], int], transfer: Any = None
) -> Sequence[int]:
    """One step of a request that finds its prefix in the cache. `bend` mutates its
    blocks and returns the one whose first slot is concerned. The budget is one block:
    what it finds is looked at up to four of them. transfer: as Bench.add."""
    bench.abort()
    slots: list[int] = []
    execute_model = bench.runner.execute_model

    def bent(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            slots.append(bend(*request.block_ids) * bench.block_size)
        return execute_model(scheduled, *args, **kwargs)

    bench.add("again", prompt(1, 75), 4, transfer=transfer)
    with patch.object(bench.runner, "execute_model", bent), bench.blocks_a_step(1):
        bench.step()
    return slots


def _other_first(blocks: list[int]) -> int:
    blocks[0] = blocks[1]
    return blocks[0]


def wrong_hit(bench: Bench) -> Sequence[int]:
    """A request is given another text's block for its cached prefix."""
    return _hit(bench, _other_first)


def scribbled_hit(bench: Bench) -> Sequence[int]:
    """A byte changes in a block that no request has, before one finds it."""

    def scribbled(blocks: list[int]) -> int:
        bench.runs(3, blocks[1] * bench.block_size)[0][0] ^= 0xFF
        return blocks[1]

    slots = _hit(bench, scribbled)
    bench.abort()  # before the round gets there
    return slots


def _stale_hit(bench: Bench, changes: Callable[[], Any]) -> Sequence[int]:
    """A request finds its prefix in the cache, after `changes` to the weights."""
    changes()
    return _hit(bench, lambda blocks: blocks[0])


def refit(bench: Bench) -> Sequence[int]:
    """An RPC copies into a parameter, and the prefix cache is kept."""
    parameter = next(bench.runner.get_model().parameters())
    change = partial(bench.llm.collective_rpc, lambda _: parameter.data.add_(0.25))
    return _stale_hit(bench, change)


def loaded_in_process(bench: Bench) -> Sequence[int]:
    """Without an RPC, the model's load_weights changes one."""
    model = bench.runner.get_model()
    name, parameter = next(iter(model.named_parameters()))
    other = parameter.data + 0.25
    return _stale_hit(bench, lambda: model.load_weights([(name, other)]))


def back_and_forth(bench: Bench) -> Sequence[int]:
    """The first weights come back, after others that a running request has used."""
    parameter = next(bench.runner.get_model().parameters())
    before = parameter.data.clone()
    bench.llm.collective_rpc(lambda _: parameter.data.add_(0.25))
    bench.step()
    undo = partial(bench.llm.collective_rpc, lambda _: parameter.data.copy_(before))
    return _stale_hit(bench, undo)


def _first_step(bench: Bench, length: int, layers: slice) -> Sequence[int]:
    """One step of a request, which `layers` do not write."""
    modules = bench.runner.compilation_config.static_forward_context
    bench.abort()
    bench.add("late", prompt(3, length), 20)
    with ExitStack() as stack:
        for layer in bench.layers[layers]:
            impl = modules[layer.name].impl
            stack.enter_context(patch.object(impl, "do_kv_cache_update"))
        bench.step()
    return [bench.slot("late", position) for position in range(length)]


def missing_write(bench: Bench) -> Sequence[int]:
    """One layer does not write what a step computes."""
    return _first_step(bench, 30, slice(3, 4))


def missing_row(bench: Bench) -> Sequence[int]:
    """No layer writes the only row of a step."""
    return _first_step(bench, 1, slice(None))


def _stored(bench: Bench, slot: int) -> Sequence[int]:
    """The slot's block goes to a KV connector, as its adapter says it."""
    bench.audit.on_transfer(Transfer([[slot // bench.block_size]], None, False))
    return (slot,)


def rejected_tail(bench: Bench) -> Sequence[int]:
    """A block goes to a KV connector with a tail of drafts that were rejected."""
    return _stored(bench, _restore(bench)[0])


def early_store(bench: Bench) -> Sequence[int]:
    """A block goes to a KV connector before it is known which drafts are rejected."""
    slots: list[int] = []
    _restore(bench, lambda _: slots.extend(_stored(bench, bench.next_slot())))
    return slots


def foreign_store(bench: Bench) -> Sequence[int]:
    """A block goes to a KV connector with a slot that another request wrote."""
    return _stored(bench, *foreign_block(bench))


def idle_load(bench: Bench) -> Sequence[int]:
    """A load is reported done, and its block still holds another text."""

    def loaded(blocks: list[int]) -> int:
        bench.audit.on_transfer(Transfer([[_other_first(blocks)]], None, True))
        return blocks[0]

    return _hit(bench, loaded)


def spoilt_load(
    bench: Bench, store: Any = ((0,),), transfer: Any = None
) -> Sequence[int]:
    """A load brings what was stored, but for a byte of one layer."""

    def loaded(blocks: list[int]) -> int:
        for fills in (False, True):
            bench.audit.on_transfer(Transfer([blocks[:1]], store, fills))
        bench.runs(1, blocks[0] * bench.block_size)[0][0] ^= 0xFF
        return blocks[0]

    return _hit(bench, loaded, transfer)


def spoilt_handover(bench: Bench) -> Sequence[int]:
    """A load brings what a prefill instance has sent, but for a byte of one layer."""
    bench.abort()
    bench.add("sent", prompt(1, 75), 4, transfer={GIVES: True})
    bench.step()
    (digests,) = bench.scheduler.nwor_given.values()
    return spoilt_load(bench, None, {TAKES: True, KEY: digests})


def wrong_load(bench: Bench) -> Sequence[int]:
    """A load from a store that is not followed brings another text's block."""
    source = bench.slot("two", 0)

    def loaded(blocks: list[int]) -> int:
        bench.audit.on_transfer(Transfer([blocks[:1]], None, True))
        to = blocks[0] * bench.block_size
        for layer in range(len(bench.layers)):
            for slot in range(bench.block_size):
                runs = bench.runs(layer, source + slot), bench.runs(layer, to + slot)
                for here, there in zip(*runs, strict=True):
                    there.copy_(here)
        return blocks[0]

    return _hit(bench, loaded)


# What plants a fault in an engine that has run `Bench.start`, and returns the slots
# concerned.
FAULTS: dict[Callable[[Bench], Sequence[int]], Expected] = {
    scribble: Expected("changed", 2, "one"),
    # Before lost_scale, while the round begins at the first block.
    scribbled_hit: Expected("changed", 3, "one"),
    lost_scale: Expected("changed", 1, "two"),
    late_write: Expected("changed", 0, "two"),
    skipped_restore: Expected("changed", 0, "one"),
    bent_restore: Expected("changed", 0, "one"),
    stale_slots: Expected("foreign_write", None, "one"),
    foreign_block: Expected("foreign_write", None, "two"),
    shared_block: Expected("foreign_write", None, "one"),
    # No request has written to it yet.
    skipped_slot: Expected("wrong_prefix", None, None),
    foreign_slot: Expected("wrong_prefix", None, "two"),
    swapped_tables: Expected("wrong_prefix", None, "two"),
    wrong_hit: Expected("wrong_prefix", None, "one"),
    missing_write: Expected("missing_write", 3, "late"),
    missing_row: Expected("missing_write", 0, "late"),
    # NWOR has undone the drafts: nobody wrote there.
    rejected_tail: Expected("handed_on", None, None),
    early_store: Expected("handed_on", None, "one"),
    foreign_store: Expected("handed_on", None, "two"),
    spoilt_load: Expected("handed_on", 1, "one"),
    spoilt_handover: Expected("not_as_sent", 1, None),
    idle_load: Expected("never_loaded", 0, "again"),
    wrong_load: Expected("other_text", None, "two"),
    # Last: what they change stays.
    back_and_forth: Expected("stale_weights", None, "one"),
    refit: Expected("stale_weights", None, "one"),
    loaded_in_process: Expected("stale_weights", None, "one"),
}
