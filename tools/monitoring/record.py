#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records one panel of the dashboard of a running server, and draws it.

    python tools/monitoring/record.py --target 127.0.0.1:8000 --json FILE

A Prometheus of its own scrapes the server and evaluates the panel's queries over that
time, and the alerts; the picture is beside the file, FILE with the suffix .png. Exit
status: 0 done, 1 there is no Prometheus or it saw no server, 2 a bad argument.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import environment  # noqa: E402
from benchmarks.files import write_json, write_whole  # noqa: E402

from tools.monitoring import panels, prometheus  # noqa: E402
from tools.soak.server import ServerError  # noqa: E402

ALERTS = Path(__file__).resolve().parent / "alerts.yml"
PANEL, UNIT = "Draft tokens by outcome", "a second"
STEP_SECONDS = 5


def record(target: str, seconds: float, device: str) -> dict[str, Any]:
    """PANEL's series of `target` ("host:port") over `seconds`, and the alerts' states.

    Raises prometheus.PrometheusError if there is no Prometheus, or no server to scrape.
    """
    queries = panels.queries(panels.read(), f"{4 * STEP_SECONDS}s")
    with (
        tempfile.TemporaryDirectory() as folder,
        prometheus.scraping(target, Path(folder), 1, [ALERTS]) as server,
    ):
        started = time.time()
        time.sleep(seconds)
        if not any(float(s["value"][1]) for s in server.query("up")):
            raise prometheus.PrometheusError(f"no server answers at {target}")
        series = [
            {
                "legend": query.legend,
                "seconds": [round(at - started, 1) for at, _ in one["values"]],
                "values": [round(float(value), 4) for _, value in one["values"]],
            }
            for query in queries
            if query.panel == PANEL
            for one in server.query_range(
                query.expression, started, started + seconds, STEP_SECONDS
            )
        ]
        alerts = {rule["name"]: rule["state"] for rule in server.rules()}
    return {
        "environment": environment.describe(device, ROOT),
        "seconds": round(seconds),
        "step_seconds": STEP_SECONDS,
        "alerts": alerts,
        "panel": PANEL,
        "series": series,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the panel's series to `path`, a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for one in result["series"]:
        axes.plot(one["seconds"], one["values"], label=one["legend"], linewidth=1.2)
    env = result["environment"]
    machine = env.get("gpu") or f"{env['cpu']}, {env['cores']} cores"
    axes.set_title(f"{result['panel']} · {machine} · {env['date'][:10]}", fontsize=9)
    axes.set(xlabel="seconds", ylabel=UNIT, ylim=(0, None))
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    figure.savefig(path, format="png", dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="the server, HOST:PORT")
    parser.add_argument("--seconds", type=float, default=300, help="how long (300)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, required=True, help="the results file")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "tools/monitoring/record.py", *argv])
    try:
        found = record(args.target, args.seconds, args.device)
        result = {"kind": "monitoring", "command": command, **found}
        write_json(args.json, result)
        write_whole(args.json.with_suffix(".png"), functools.partial(draw, result))
    except (prometheus.PrometheusError, ServerError, OSError) as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
