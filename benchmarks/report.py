# SPDX-License-Identifier: Apache-2.0
"""What bench_vllm.py prints (templates/report.md): from the result, the content of its
JSON file. The same text is what tools/results/render.py puts into results/README.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import summary
from benchmarks.tables import TEMPLATES


def alike(acceptance: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """How often the draft at each position was accepted, and of how many windows;
    neighbours with the same count share a line: "1 to 3"."""
    counts = acceptance["accepted_per_position"], acceptance["per_position"]
    first = 1
    for (count, share), group in itertools.groupby(zip(*counts, strict=True)):
        last = first + len(list(group)) - 1
        yield " to ".join(map(str, sorted({first, last}))), count, share
        first = last + 1


def speed(side: dict[str, float]) -> str:
    """Tokens a second and latency, four cells."""
    latencies = f"{side['latency_s_median']:.3f} s | {side['latency_s_p95']:.3f} s"
    return f"{side['tokens_per_second']:.1f} | {latencies} | {side['num_runs']:.0f}"


TEMPLATES.filters |= {
    "alike": alike,
    "speed": speed,
    "own_process": summary.own_process,
    "throughput_verdict": summary.verdict,
    "host_budget_us": summary.host_budget_us,
}
TEMPLATES.globals |= {
    "RATIO_BUDGET": summary.RATIO_BUDGET,
    "CPU_SHARE_BUDGET": summary.CPU_SHARE_BUDGET,
}


def text(result: dict[str, Any]) -> str:
    """The whole report."""
    return TEMPLATES.get_template("report.md").render(result=result).rstrip("\n")
