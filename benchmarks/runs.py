# SPDX-License-Identifier: Apache-2.0
"""What one timed run gives: outputs, times, and what the counters say it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Drafts:
    """What vLLM's own counters say of a run (a run's increments)."""

    windows: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


@dataclass(frozen=True)
class NworDone:
    """What NWOR did in a run: increments of its counters, and its host times.

    logged_bytes is staged drafts times the log's bytes a draft, 0 where shadow pages
    were used: those count shadow_copied_bytes and committed_bytes.
    begin_us, commit_us: one number a step that had drafts, [num_windowed_steps].
    """

    windows: int
    staged: int
    committed: int
    rejected: int
    invalid_slots: int
    restored_bytes: int
    logged_bytes: int
    begin_us: list[float] = field(default_factory=list)
    commit_us: list[float] = field(default_factory=list)
    shadow_copied_bytes: int = 0
    committed_bytes: int = 0


@dataclass(frozen=True)
class Run:
    """One run of all requests.

    outputs: token ids of each request, in request order. seconds: sum over the waves,
    from a wave's first step to its last. latency_s: of each request, from its wave's
    first step until it finished. step_s: duration of each engine step.
    """

    outputs: list[list[int]]
    seconds: float
    latency_s: list[float]
    step_s: list[float]
    drafts: Drafts
    nwor: NworDone | None

    @property
    def num_tokens(self) -> int:
        """Output tokens, counted from the outputs."""
        return sum(len(output) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


def drafts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Drafts:
    """What vLLM's spec_decode counters gained, by their names without prefix."""

    def grown(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    new = after.get("accepted_tokens_per_pos", [])
    old = before.get("accepted_tokens_per_pos", [0] * len(new))
    return Drafts(
        windows=grown("drafts"),
        drafted=grown("draft_tokens"),
        accepted=grown("accepted_tokens"),
        accepted_per_position=[int(b - a) for a, b in zip(old, new, strict=True)],
    )


def nwor_done(before: Mapping[str, Any], after: Mapping[str, Any]) -> NworDone:
    """What two reports of NworWorkerExtension differ in."""

    def grown(name: str) -> int:
        return int(after["counters"][name] - before["counters"][name])

    staged = grown("staged")
    # A step is staged as a whole or logged as a whole in the engines of benches.
    committed_bytes = grown("committed_bytes")
    return NworDone(
        windows=grown("windows"),
        staged=staged,
        committed=grown("committed"),
        rejected=grown("rejected"),
        invalid_slots=grown("invalid_slots"),
        restored_bytes=grown("restored_bytes"),
        logged_bytes=0
        if committed_bytes
        else staged * int(after["log_bytes_per_draft"]),
        shadow_copied_bytes=grown("shadow_copied_bytes"),
        committed_bytes=committed_bytes,
        begin_us=[ns / 1000 for ns in after["begin_ns"]],
        commit_us=[ns / 1000 for ns in after["commit_ns"]],
    )
