# SPDX-License-Identifier: Apache-2.0
"""What one timed run gives: outputs, times, and what the counters say it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NworDone:
    """What NWOR did in a run.

    counts: increments of its counters by name, and logged_bytes: staged drafts times
    the log's bytes a draft, 0 where shadow pages were used.
    begin_us, commit_us: host times, one a step that had drafts, [num_windowed_steps].
    """

    counts: dict[str, int]
    begin_us: list[float]
    commit_us: list[float]


@dataclass(frozen=True)
class Run:
    """One run of all requests.

    outputs: token ids of each request, in request order. seconds: sum over the waves,
    from a wave's first step to its last. latency_s: of each request, from its wave's
    first step until it finished. step_s: duration of each engine step. drafts: what
    vLLM's own counters say: windows, drafted, accepted, accepted_per_position.
    """

    outputs: list[list[int]]
    seconds: float
    latency_s: list[float]
    step_s: list[float]
    drafts: dict[str, Any]
    nwor: NworDone | None

    @property
    def num_tokens(self) -> int:
        """Output tokens, counted from the outputs."""
        return sum(len(output) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


def drafts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's spec_decode counters gained, by their names without prefix."""
    names = {"windows": "drafts", "drafted": "draft_tokens"}
    names["accepted"] = "accepted_tokens"
    new = after.get("accepted_tokens_per_pos", [])
    old = before.get("accepted_tokens_per_pos", [0] * len(new))
    return {
        ours: int(after.get(name, 0) - before.get(name, 0))
        for ours, name in names.items()
    } | {"accepted_per_position": [int(b - a) for a, b in zip(old, new, strict=True)]}


def nwor_done(before: Mapping[str, Any], after: Mapping[str, Any]) -> NworDone:
    """What two reports of NworWorkerExtension differ in."""
    counts = {
        name: int(value - before["counters"][name])
        for name, value in after["counters"].items()
    }
    # A step is staged as a whole or logged as a whole in the engines of benches.
    per_draft = 0 if counts["committed_bytes"] else int(after["log_bytes_per_draft"])
    counts["logged_bytes"] = counts["staged"] * per_draft
    return NworDone(
        counts,
        begin_us=[ns / 1000 for ns in after["begin_ns"]],
        commit_us=[ns / 1000 for ns in after["commit_ns"]],
    )
