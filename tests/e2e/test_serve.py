# SPDX-License-Identifier: Apache-2.0
"""A real server with worker processes, mode stage: what it says and what it counts.

One engine behind two API servers (conftest.py), whose counters are summed. Its requests
end in every way: at their length, at a stop string (found by the front end, which then
aborts the request in the engine core), by a client that hangs up. Guarantee 7 must hold
over all of them. Not covered: asynchronous scheduling (the CPU platform switches it
off).
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import ARGUMENTS
from tests.helpers import reach
from tests.helpers.server import Server, serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_API_SERVERS = 2
PROMPTS = (
    "List the months of the year, then list the months of the year again.",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "one two three four one two three four one two three",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(",
)


@pytest.fixture(scope="module")
def used(server: Server) -> dict[str, float]:
    """The metrics after requests of all kinds, several at a time."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(server.complete, text, 40) for text in PROMPTS]
        jobs += [
            pool.submit(server.complete, text, 200, stop=[" the", "\n"])
            for text in PROMPTS
        ]
        jobs += [
            pool.submit(server.abandon, text, 400, after)
            for after, text in enumerate(PROMPTS * 2, start=2)
        ]
        results = [job.result() for job in jobs]
    finish = [r["choices"][0]["finish_reason"] for r in results if isinstance(r, dict)]
    assert "length" in finish
    assert "stop" in finish
    assert all(r > 1 for r in results if isinstance(r, int))
    return server.idle_metrics()


def test_two_lines_say_what_stage_takes(server: Server) -> None:
    """The engine core of the blocks that it reserved, the worker of what it does with
    them: the mark has travelled from one process to the other."""
    titles = set(re.findall(r"\bApiServer_\d+\b", server.log()))
    assert len(titles) == NUM_API_SERVERS
    lines = [line for line in server.log().splitlines() if "NWOR" in line]
    audit = [line for line in lines if "NWOR audit: " in line]
    assert len(audit) == 1, audit
    lines = [line for line in lines if line not in audit]
    assert len(lines) == 2, lines
    reserved = "NWOR: 16 of 320 KV blocks reserved as shadow blocks, for 8 requests"
    assert lines[0].endswith(reserved)
    assert re.search(
        r"NWOR stage requested; group 0: stage \(30 layers, packed slots\); undo log: "
        r"32 drafts, \d+\.\d MiB; shadow pages: 8 seats, 11\.2 MiB$",
        lines[1],
    )


def test_metrics_are_exposed(server: Server, used: dict[str, float]) -> None:
    names = ("windows", "tokens_staged", "rejected_tokens")
    for name in (*names, "shadow_copied_bytes", "committed_bytes"):
        assert used[f"vllm:nwor_{name}"] > 0
    samples = server.samples()
    (info,) = [s for s in samples if s.name == "vllm:nwor_info"]
    assert info.value == 1
    drafted, windows = (
        [s.labels for s in samples if s.name == f"vllm:{name}_total"]
        for name in ("spec_decode_num_drafts", "nwor_windows")
    )
    assert windows == drafted, "counters of one engine carry the labels of vLLM's own"
    labels = {"requested": "stage", "resolved": "stage", "group": "0", "engine": "0"}
    assert info.labels.items() >= (labels | drafted[0]).items()


def test_identities_hold(used: dict[str, float]) -> None:
    """Guarantee 7, over finished, stopped and abandoned requests."""
    ours = {k.removeprefix("vllm:nwor_"): v for k, v in used.items()}
    accepted = used["vllm:spec_decode_num_accepted_tokens"]
    drafted = used["vllm:spec_decode_num_draft_tokens"]
    assert 0 < accepted < drafted
    assert ours["dropped_drafts"] > 0, "no request ended in flight"
    assert ours["breaches"] == 0
    assert "fallbacks" not in ours
    assert ours["tokens_staged"] == drafted + ours["dropped_drafts"]
    assert ours["committed_tokens"] == accepted
    assert ours["rejected_tokens"] == drafted - accepted
    assert ours["windows"] >= used["vllm:spec_decode_num_drafts"]
    # 30 layers of 3 heads, K and V of 64 elements of 2 bytes, for each accepted draft,
    # and for its window's target, unless that is alone in its block; the drafts that
    # were dropped may have been rejected or accepted.
    slot_bytes = 30 * 3 * 2 * 64 * 2
    fewest = ours["committed_tokens"]
    most = fewest + ours["dropped_drafts"] + ours["windows"]
    assert fewest < ours["committed_bytes"] / slot_bytes <= most
    assert ours["committed_bytes"] % slot_bytes == 0
    assert ours["shadow_copied_bytes"] % slot_bytes == 0
    assert ours.get("restored_bytes", 0) == 0, "nothing was logged"


def test_still_serves_the_same_text(server: Server, used: dict[str, float]) -> None:
    """After all that a prompt gets the text that it gets alone, twice over."""
    first, second = (
        server.complete(PROMPTS[2], 24)["choices"][0]["text"] for _ in range(2)
    )
    assert first == second
    assert len(first) > 20


@pytest.mark.parametrize(
    "mode", [pytest.param("cow", marks=pytest.mark.nightly), "stage"]
)
def test_data_parallel_2(mode: str, tmp_path: Path) -> None:
    """Two engines behind one server: each gives the texts that it gives with NWOR off,
    and the counters of each agree with vLLM's own."""
    arguments = (*ARGUMENTS, "--data-parallel-size", "2")
    with serve(tmp_path, "off", "smollm2-135m", *arguments) as server:
        expected = texts_of_each(server)
    with (
        serve(tmp_path, mode, "smollm2-135m", *arguments) as server,
        reach.noted(mode, "parallelism", "data parallel 2", shown=reach.OUTPUTS),
    ):
        assert texts_of_each(server) == expected
        server.idle_metrics()
        for engine in ("0", "1"):
            check_engine(server, engine, mode)


def texts_of_each(server: Server) -> list[list[str]]:
    """What each engine makes of the prompts, one after the other."""
    return [
        [
            server.complete(prompt, 40, rank=rank)["choices"][0]["text"]
            for prompt in PROMPTS
        ]
        for rank in (0, 1)
    ]


def check_engine(server: Server, engine: str, mode: str) -> None:
    """Guarantee 7 for one engine of several, none of whose requests was dropped."""
    of_engine = [s for s in server.samples() if s.labels.get("engine") == engine]
    found = {sample.name.removesuffix("_total"): sample.value for sample in of_engine}
    accepted = found["vllm:spec_decode_num_accepted_tokens"]
    drafted = found["vllm:spec_decode_num_draft_tokens"]
    assert 0 < accepted < drafted
    assert found["vllm:nwor_windows"] == found["vllm:spec_decode_num_drafts"]
    assert found["vllm:nwor_tokens_staged"] == drafted
    assert found["vllm:nwor_committed_tokens"] == accepted
    assert found["vllm:nwor_rejected_tokens"] == drafted - accepted
    assert found["vllm:nwor_breaches"] == 0
    assert "vllm:nwor_fallbacks" not in found
    (info,) = [s.labels for s in of_engine if s.name == "vllm:nwor_info"]
    assert info["resolved"] == mode
