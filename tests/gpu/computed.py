# SPDX-License-Identifier: Apache-2.0
"""How often two computations of one text differ in their bytes: the same texts are
computed in several ways, and what the caches hold of them is compared. A job of
process.py.

Blocks must stay as they are until a row has ended: an engine needs blocks for all texts
of a row.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.engines import EngineSpec
from tests.gpu.harness import SEED, Engine, Report
from tests.gpu.rows import Row, prompt
from tests.helpers.player import Request

NUM_TEXTS, LENGTH, NUM_DECODED = 16, 256, 128
TEXTS = [prompt(f"same {n}", LENGTH) for n in range(NUM_TEXTS)]
Caches = list[Any]  # of each text: as test_slots


class Reader:
    """Plays texts, and reads what the caches then hold of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._blocks: dict[str, list[int]] = {}
        schedule = engine.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                self._blocks[new.req_id] = list(new.block_ids[0])
            known = output.scheduled_cached_reqs
            for name, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
                self._blocks[name] += blocks[0] if blocks else ()
            return output

        engine.scheduler.schedule = noted

    def read(
        self,
        texts: list[tuple[int, ...]],
        alone: bool = True,
        num_decoded: int = 0,
        chunk: int = 0,
        beside: tuple[Request, ...] = (),
    ) -> tuple[Caches, list[tuple[int, ...]]]:
        """Returns the caches, and the texts with the tokens that were decoded. chunk:
        of a prompt, the most tokens in a step. beside: requests that run meanwhile."""
        import torch

        requests = [
            Request(f"text/{n}", text, num_decoded + 1, at=n + 4 if beside else 0)
            for n, text in enumerate(texts)
        ]
        phases = tuple((one,) for one in requests) if alone else ((*beside, *requests),)
        scheduler = self.engine.scheduler
        whole_step = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = chunk or whole_step
        outcome = self.engine.run(Row("texts", phases))
        scheduler.max_num_scheduled_tokens = whole_step
        most = max(number for batch in outcome.batches for _, number in batch)
        assert not chunk or most <= chunk
        whole = [
            (*one.prompt, *outcome.tokens[one.name][:num_decoded]) for one in requests
        ]
        read = partial(self.engine.rpc, "test_slots")
        caches = [  # a rank has some of the heads
            torch.cat(read(self._blocks[one.name], len(text)), dim=2)
            for one, text in zip(requests, whole, strict=True)
        ]
        return caches, whole


def difference(one: Caches, other: Caches, size: int, first: int = 0) -> dict[str, Any]:
    """How many blocks of `size` slots, slots and layers differ, each of how many, from
    position `first` on. Layers: in the text where most of them do."""
    of_texts = []
    for a, b in zip(one, other, strict=True):
        end = min(a.shape[1], b.shape[1])
        of_texts.append((a[:, first:end] != b[:, first:end]).any(dim=2))
    slots = [differs.any(dim=0) for differs in of_texts]
    blocks = [of.unflatten(0, (-1, size)).any(dim=1) for of in slots]
    found: dict[str, Any] = {
        name: [sum(int(of.sum()) for of in each), sum(map(len, each))]
        for name, each in (("blocks", blocks), ("slots", slots))
    }
    layers = max(int(differs.any(dim=1).sum()) for differs in of_texts)
    return found | {"layers": [layers, len(of_texts[0])]}


def started(spec: EngineSpec, models: Path, report: Report, **more: Any) -> Engine:
    more["max_num_batched_tokens"] = NUM_TEXTS * (LENGTH + NUM_DECODED)
    return Engine(spec, models, report, prepares=False, **more)


def kept_file(spec: EngineSpec, ending: str = "pt") -> Path:
    return Path(os.environ["NWOR_TEST_FOLDER"], f"{spec.name}.{ending}")


def computed(spec: EngineSpec, models: Path, report: Report, **more: Any) -> None:
    """cases: each against texts that were computed alone and whole. another: a text
    against another one. With enforce_eager those are only stored, for the same engine
    with graphs, in NWOR_TEST_FOLDER."""
    import torch

    engine = started(spec, models, report, **more)
    if not spec.real:
        engine.rpc("test_randomize", 20)
    read = Reader(engine).read
    read(TEXTS[:2], num_decoded=8)  # first uses of kernels
    base, _ = read(TEXTS)
    kept = kept_file(spec)
    if more.get("enforce_eager"):
        torch.save(base, kept)
        return
    beside = tuple(
        Request(f"other/{n}", prompt(f"other {n}", 40), 48) for n in range(8)
    )
    decoded, whole = read(TEXTS, num_decoded=NUM_DECODED)
    prefilled, _ = read(whole)
    compare = partial(difference, size=spec.block_size)
    report.save(
        another=compare(base[1:], base[:-1]),
        cases={
            "again": compare(base, read(TEXTS)[0]),
            f"{NUM_TEXTS} together": compare(base, read(TEXTS, alone=False)[0]),
            "beside decodes": compare(base, read(TEXTS, False, beside=beside)[0]),
            "in chunks of 128": compare(base, read(TEXTS, chunk=128)[0]),
            "in chunks of 64": compare(base, read(TEXTS, chunk=64)[0]),
            "without graphs": compare(base, torch.load(kept)),
            "as the begin of a longer prompt": compare(base, prefilled),
            "decoded, then prefilled": compare(decoded, prefilled, first=LENGTH),
        },
    )


computed_eager = partial(computed, enforce_eager=True, compilation_config={})


def computed_whole(spec: EngineSpec, models: Path, report: Report) -> None:
    """One process computes the texts, and stores them and its weights for
    computed_by_ranks."""
    import torch

    from tests.gpu.worker import checkpoint

    engine = started(spec, models, report, tensor_parallel_size=1)
    engine.rpc("test_randomize", SEED, True)
    (weights,) = engine.llm.apply_model(lambda model: checkpoint(model, SEED))
    torch.save(weights, kept_file(spec, "weights"))
    torch.save(Reader(engine).read(TEXTS)[0], kept_file(spec))


def computed_by_ranks(spec: EngineSpec, models: Path, report: Report) -> None:
    """cases: tensor parallel ranks against each other run, and against one process."""
    import torch

    engine = started(spec, models, report)
    engine.rpc("test_load", str(kept_file(spec, "weights")))
    read = Reader(engine).read
    base, _ = read(TEXTS)
    compare = partial(difference, size=spec.block_size)
    report.save(
        another=compare(base[1:], base[:-1]),
        cases={
            "again": compare(base, read(TEXTS)[0]),
            "without tensor parallelism": compare(base, torch.load(kept_file(spec))),
        },
    )
    engine.stop()
