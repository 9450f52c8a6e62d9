# SPDX-License-Identifier: Apache-2.0
"""The plot of a comparison: each pair's ratio, the tested arms beside the control.

Drawn from the result alone (the content of the JSON file).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ab import CONTROL
from benchmarks.report import pair_of

_OFF, _ON = "#7a7a7a", ("#1f6fb4", "#c05a1a")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the plot of a comparison to `path`, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ratio = result["summary"]["ratio"]
    axes.axhline(1.0, color="black", linewidth=0.8)
    for place, (name, one) in enumerate(ratio.items()):
        shift = 0.24 * (place - (len(ratio) - 1) / 2)
        color, marker = (_OFF, "s") if name == CONTROL else (_ON[place % len(_ON)], "o")
        label = pair_of(result, name)
        ratios = result["samples"][name]["ratio"]
        numbers = [number + shift for number in range(1, len(ratios) + 1)]
        shown = f"{label}: {one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
        axes.plot(numbers, ratios, marker, color=color, label=shown)
        axes.axhspan(one["low"], one["high"], color=color, alpha=0.15, linewidth=0)
        axes.axhline(one["median"], color=color, linewidth=1.2, linestyle="--")
    axes.set_xlabel("pair")
    axes.set_ylabel("ratio of tokens a second")
    env = result["environment"]
    machine = env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"
    args = result["arguments"]
    axes.set_title(
        f"{result['model']}, {args['method']}, {args['num_speculative_tokens']} drafts,"
        f" batch {args['batch_size']} · {machine} · {env['date'][:10]}",
        fontsize=9,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, title="median (90 % interval)", title_fontsize=8)
    figure.savefig(path, format="png", dpi=150)
