# SPDX-License-Identifier: Apache-2.0
"""The KV audit's class `stale_weights` where weights are in CUDA memory: hits on blocks
that other weights of the target computed are found, each with both epochs, and nothing
else is.

Routes with other bytes and with the same ones, requests in flight, sleep of level 2,
one rank of two whose weights change; how long a look at the weights of an 8B shape
takes. V2, asynchronous scheduling, modes stage and off, all findings of each row.

Not covered: real weight transfer engines, quantized weights.
tests/integration/test_weights.py has more cases on the CPU.
"""

from statistics import median
from typing import Any

from tests.gpu.engines import BY_NAME, EngineSpec
from tests.gpu.pool import OFF, Chain, Pool, engines_fixture, engines_of
from tests.gpu.test_audit import AUDIT
from tests.gpu.weights import NUM_LOOKS, rows_of

STAGE = "stage"
ENGINES, ADAPTERS, RANKS, COSTS = (
    engines_of(f"weights{more}") for more in ("", "-adapters", "-two-ranks", "-cost")
)
KEYS = ("rows", "num_bytes", "sample_ms", "digest_ms")
# Where vLLM's method is not the row's route.
ROUTES = {"apply_model": "load_weights", "rank 1": "rpc", "adapter": "lora"}


def entries(spec: EngineSpec, chain: Chain) -> dict[str, Any]:
    return {
        f"{spec.name}-{mode}": run.entry(*(key for key in KEYS if key in run.report))
        for mode, run in chain.items()
    }


def changing(job: str, *modes: str) -> Any:
    """A fixture: the reports of that job in these modes. One engine at a time, since
    vLLM asserts that sleep frees memory, and looks are timed."""

    def chain(pool: Pool, spec: EngineSpec) -> Chain:
        return {mode: pool.run(job, spec, mode, **AUDIT) for mode in modes}

    command = "make gpu-test STEPS='build weights'"
    return engines_fixture("cases", chain, entries, command, num_jobs=1, case="weights")


runs = changing("refits", STAGE, OFF)
adapters = changing("refits", STAGE)
ranks = changing("refits", STAGE)
costs = changing("weights_cost", OFF)


def check_rows(spec: EngineSpec, mode: str, report: dict[str, Any]) -> None:
    rows = report["rows"]
    assert tuple(rows) == rows_of(spec, mode)
    assert set(report["facts"]["resolved"]) == ({mode} - {OFF})
    right, wrong, last = [], [], 1  # epoch 0: vLLM's dummy weights
    for row, found in rows.items():
        route, content, when = row.split("/")
        is_other, kept = content == "other", when != "sleep"
        # Of the base model.
        is_new = is_other and route != "adapter"
        assert found["epochs"] == [last, last + is_new], row
        routes = {ROUTES.get(route, route): 1} if is_other else {}
        assert found["routes"] == routes, row
        # Each hit block, on each rank.
        assert (found["cached"] > 0) == kept, row
        size = spec.block_size if is_other else found["cached"] + 1
        epochs = dict(zip(("written", "present"), found["epochs"], strict=True))
        expected = [
            ("stale_weights", place, f"{row}/second", f"{row}/first", epochs)
            for place in range(0, found["cached"] - size + 1, size)
        ]
        for of_rank in found["findings"]:
            assert [seen(one) for one in of_rank] == expected, row
            contents = {tuple(contents_of(one)) for one in of_rank}
            assert all((a != b) == (route == "adapter") for a, b in contents), row
        (wrong if expected else right).append(found["distance"])
        if found["changed"] is not None:
            (wrong if is_other else right).append(found["changed"])
        last += is_new
    # Answers on stale blocks, and those of other weights, are not the right ones.
    assert min(wrong) > 3 * max(right), (wrong, right)


def seen(finding: dict[str, Any]) -> tuple[Any, ...]:
    weights = finding["weights"] or {}
    return (
        *(finding[key] for key in ("kind", "position", "owner")),
        finding["writer"]["request"],
        {when: one["epoch"] for when, one in weights.items()},
    )


def contents_of(finding: dict[str, Any]) -> list[str | None]:
    """Of the adapters that wrote and read."""
    adapters = [one["adapter"] for one in finding["weights"].values()]
    return [adapter and adapter["content"] for adapter in adapters]


@ENGINES
def test_hits_on_blocks_of_other_weights_are_found(runs, engine):
    for mode, run in runs[engine].items():
        report = run.whole()
        assert report["facts"]["async_scheduling"]
        assert report["facts"]["runner"].startswith("vllm.v1.worker.gpu.")  # V2
        check_rows(BY_NAME[engine], mode, report)


@ADAPTERS
def test_hits_on_blocks_of_an_adapter_that_was_replaced(adapters, engine):
    check_rows(BY_NAME[engine], STAGE, adapters[engine][STAGE].whole())


@RANKS
def test_two_ranks_of_which_one_has_other_weights(ranks, engine):
    check_rows(BY_NAME[engine], STAGE, ranks[engine][STAGE].whole())


@COSTS
def test_a_look_at_unchanged_weights_reads_a_sample(costs, engine):
    """And finds no change."""
    report = costs[engine][OFF].whole()
    assert report["epoch"] == 0
    assert len(report["sample_ms"]) == len(report["digest_ms"]) == NUM_LOOKS
    assert median(report["sample_ms"]) < median(report["digest_ms"])
