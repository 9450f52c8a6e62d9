# SPDX-License-Identifier: Apache-2.0
"""The plot of a comparison: each pair's ratio, the tested arms beside the control; and
that of slots over steps (picture.py).

Drawn from the result alone (the content of the JSON file).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ab import CONTROL

# A slot after a step, as the file has it, with its color and meaning.
SLOT_STATES = {
    ".": ("#ffffff", "nothing written"),
    "c": ("#cddcec", "committed before"),
    "a": ("#1f6fb4", "committed in this step"),
    "x": ("#d62f2f", "rejected in this step: bytes changed"),
    "d": ("#f2b5ae", "left behind by an earlier step"),
    "o": ("#7cc47c", "rejected in this step: bytes as before"),
}
_TITLES = {
    "vllm": "vLLM: keys and values of rejected drafts stay in the cache",
    "nwor": "vLLM with NWOR: slots of rejected drafts are as before the step",
}
_OFF, _ON = "#7a7a7a", ("#1f6fb4", "#c05a1a")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the plot of a comparison to `path`, a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    ratio = result["summary"]["ratio"]
    axes.axhline(1.0, color="black", linewidth=0.8)
    for place, (name, one) in enumerate(ratio.items()):
        shift = 0.24 * (place - (len(ratio) - 1) / 2)
        color, marker = (_OFF, "s") if name == CONTROL else (_ON[place % len(_ON)], "o")
        baseline = result["baseline"]
        label = f"{baseline if name == CONTROL else name} / {baseline}"
        ratios = result["samples"][name]["ratio"]
        numbers = [number + shift for number in range(1, len(ratios) + 1)]
        shown = f"{label}: {one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
        axes.plot(numbers, ratios, marker, color=color, label=shown)
        axes.axhspan(one["low"], one["high"], color=color, alpha=0.15, linewidth=0)
        axes.axhline(one["median"], color=color, linewidth=1.2, linestyle="--")
    axes.set_xlabel("pair")
    axes.set_ylabel("ratio of tokens a second")
    env, args = result["environment"], result["arguments"]
    machine = env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"
    title = f"{result['model']}, {args['method']}, {args['num_speculative_tokens']} "
    title += f"drafts, batch {args['batch_size']} · {machine} · {env['date'][:10]}"
    axes.set_title(title, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, title="median (90 % interval)", title_fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def draw_slots(result: dict[str, Any], path: Path) -> None:
    """Writes the picture of slots over steps to `path`, a PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = ListedColormap([color for color, _ in SLOT_STATES.values()])
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 1), _TITLES.items(), strict=True):
        run = result["runs"][name]
        cells = [[list(SLOT_STATES).index(one) for one in row] for row in run["slots"]]
        steps = range(result["first_step"], result["first_step"] + len(cells))
        slots = range(run["first_slot"], run["first_slot"] + len(cells[0]))
        grid = {"edgecolors": "#e4e4e4", "linewidth": 0.6}
        axes.pcolormesh(slots, steps, cells, cmap=colors, vmin=0, vmax=5, **grid)
        axes.invert_yaxis()
        axes.set_yticks(steps, [str(step) for step in steps], fontsize=7)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("step")
    axes.set_xlabel("slot of the request in the KV cache")
    shown = [
        Patch(fc=one, ec="#b0b0b0", label=what) for one, what in SLOT_STATES.values()
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, format="png", dpi=110)
