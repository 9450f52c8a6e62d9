# SPDX-License-Identifier: Apache-2.0
"""The plot of a comparison: each pair's ratio, the tested arms beside the control.

Drawn from the result alone (the content of the JSON file), so that it can be drawn
again from a file. The PNG carries a digest of the result's samples: `digest_of` reads
it back and tells whether a plot belongs to a file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.ab import CONTROL
from benchmarks.report import pair_of

DIGEST_KEY = "nwor-samples-sha256"
_OFF, _ON = "#7a7a7a", ("#1f6fb4", "#c05a1a")


def samples_digest(result: dict[str, Any]) -> str:
    """SHA-256 of the result's samples and summary."""
    part = {"samples": result["samples"], "summary": result["summary"]}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    """The digest that `draw` put into the PNG at `path`; None if it has none."""
    from PIL import Image

    with Image.open(path) as image:
        value = image.info.get(DIGEST_KEY)
    return None if value is None else str(value)


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
    figure.savefig(
        path,
        format="png",
        dpi=150,
        metadata={DIGEST_KEY: samples_digest(result), "Software": "matplotlib"},
    )
