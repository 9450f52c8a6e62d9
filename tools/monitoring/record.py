#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records what the dashboard shows of a running server, and draws one panel of it.

    python tools/monitoring/record.py --target 127.0.0.1:8000 --seconds 300 \\
        --json results/monitoring_cpu.json
    python tools/monitoring/record.py --draw --json results/monitoring_cpu.json

The first scrapes the server with a Prometheus of its own, evaluates every panel's
queries over that time and writes their series, with the states of the alerts at the
end. Both draw a panel, in the PNG beside the file. Exit status: 0 done, 1 there is no
Prometheus or it saw no server, 2 a bad argument.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import environment, plot  # noqa: E402
from benchmarks.files import recorded, write_json, write_whole  # noqa: E402

from tools.monitoring import panels, prometheus  # noqa: E402

PROGRAM = "tools/monitoring/record.py"
ALERTS = Path(__file__).resolve().parent / "alerts.yml"
PANEL = "Draft tokens by outcome"
SCRAPE_SECONDS = 1
MIN_SECONDS = 10
UNITS = {
    "cps": "a second",
    "Bps": "bytes a second",
    "percentunit": "share",
    "short": "",
}


def record(target: str, seconds: float, step: int, device: str) -> dict[str, Any]:
    """What every panel shows of `target` ("host:port") over `seconds`.

    step: seconds between two values; rates are over four of them. Raises
    prometheus.PrometheusError if there is no Prometheus, or no server to scrape.
    """
    queries = panels.queries(panels.read(), f"{4 * step}s")
    with (
        tempfile.TemporaryDirectory() as folder,
        prometheus.scraping(target, Path(folder), SCRAPE_SECONDS, [ALERTS]) as server,
    ):
        started = time.time()
        time.sleep(seconds)
        ended = time.time()
        if not any(float(s["value"][1]) for s in server.query("up")):
            raise prometheus.PrometheusError(f"no server answers at {target}")
        series = [
            {"panel": query.panel, "unit": query.unit, **one}
            for query in queries
            for one in _series(server, query, started, ended, step)
        ]
        alerts = {rule["name"]: rule["state"] for rule in server.rules()}
    return {
        "environment": environment.describe(device, ROOT),
        "seconds": round(seconds),
        "step_seconds": step,
        "alerts": alerts,
        "samples": series,
        "summary": None,
    }


def _series(
    server: prometheus.Prometheus,
    query: panels.Query,
    started: float,
    ended: float,
    step: int,
) -> list[dict[str, Any]]:
    """A query's series: legend, seconds since the start, values (null: none)."""
    return [
        {
            "legend": query.name(one["metric"]),
            "seconds": [round(at - started, 1) for at, _ in one["values"]],
            "values": [_number(value) for _, value in one["values"]],
        }
        for one in server.query_range(query.expression, started, ended, step)
    ]


def _number(text: str) -> float | None:
    value = float(text)
    return None if value != value else round(value, 4)


def draw(result: dict[str, Any], panel: str, path: Path) -> None:
    """Writes one panel's series to `path`, a PNG. Raises panels.BadPanel if the
    result has no such panel, or nothing in it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [one for one in result["samples"] if one["panel"] == panel]
    if not shown:
        known = sorted({one["panel"] for one in result["samples"]})
        raise panels.BadPanel(f"nothing to draw for panel {panel!r}; panels: {known}")
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for series in shown:
        values = [float("nan") if v is None else v for v in series["values"]]
        axes.plot(series["seconds"], values, label=series["legend"], linewidth=1.2)
    env = result["environment"]
    machine = env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"
    axes.set_title(f"{panel} · {machine} · {env['date'][:10]}", fontsize=9)
    axes.set_xlabel("seconds")
    axes.set_ylabel(UNITS[shown[0]["unit"]])
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    metadata = {plot.DIGEST_KEY: plot.samples_digest(result), "Software": "matplotlib"}
    figure.savefig(path, format="png", dpi=150, metadata=metadata)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", help="the server to scrape, HOST:PORT")
    what.add_argument("--draw", action="store_true", help="only draw what is recorded")
    parser.add_argument("--seconds", type=float, default=300, help="how long")
    parser.add_argument("--step", type=int, default=5, help="seconds between values")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--panel", default=PANEL, help="title of the one to draw")
    parser.add_argument("--json", type=Path, required=True, help="the results file")
    args = parser.parse_args(argv)
    if args.seconds < MIN_SECONDS or args.step < SCRAPE_SECONDS:
        parser.error(f"--seconds is at least {MIN_SECONDS}, --step {SCRAPE_SECONDS}")
    try:
        if args.draw:
            result = json.loads(args.json.read_text(encoding="utf-8"))
        else:
            command = {
                "kind": "monitoring",
                "command": shlex.join(["python", PROGRAM, *argv]),
            }
            found = record(args.target, args.seconds, args.step, args.device)
            result = recorded(command | found)
            write_json(args.json, result)
        picture = args.json.with_suffix(".png")
        write_whole(picture, functools.partial(draw, result, args.panel))
    except (prometheus.PrometheusError, panels.BadPanel, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"{PROGRAM}: {args.json}, {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
