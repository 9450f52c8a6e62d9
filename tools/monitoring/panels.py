# SPDX-License-Identifier: Apache-2.0
"""The queries of dashboard.json, with Grafana's variables filled in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent / "dashboard.json"
VARIABLE = re.compile(r"\$\{?\w+")
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class BadPanel(ValueError):
    """A panel or a query of the dashboard cannot be used."""


@dataclass(frozen=True)
class Query:
    """One query of a panel. legend: Grafana's format, with {{label}} in it."""

    panel: str
    kind: str
    expression: str
    legend: str


def read(path: Path = DASHBOARD) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def queries(dashboard: dict[str, Any], rate_interval: str) -> list[Query]:
    """Every query of every panel, for all models and engines.

    rate_interval: what $__rate_interval stands for, "1m"; at least four scrapes long.
    Raises BadPanel for a variable that nothing fills.
    """
    filled = {"$__rate_interval": rate_interval, "$model_name": ".*", "$engine": ".*"}
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in filled.items():
                expression = expression.replace(variable, value)
            if unknown := VARIABLE.findall(expression):
                raise BadPanel(f"panel {panel['title']!r}: nothing fills {unknown}")
            legend = target["legendFormat"]
            found.append(Query(panel["title"], panel["type"], expression, legend))
    return found
