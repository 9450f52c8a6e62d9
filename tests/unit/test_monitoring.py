# SPDX-License-Identifier: Apache-2.0
"""The alerts under promtool, and the structure of the Grafana dashboard.

Both against a live server and a real Prometheus: tests/e2e/test_serve.py. Grafana
itself is not run.
"""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers import monitoring
from vllm_nwor.metrics import AUDIT_COUNTERS, COUNTERS, VERSION_COUNTERS, WEIGHT_CHANGES

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "tools" / "monitoring"


def read(name: str) -> dict:
    return yaml.safe_load((MONITORING / f"{name}.yml").read_text())


@pytest.mark.parametrize("name", ["alerts", "audit_alerts"])
def test_each_alert_is_tested_both_ways_and_documented(name):
    """promtool decides; without it the test fails and names the command that gets
    it."""
    for what, path in (("check", f"{name}.yml"), ("test", f"{name}_test.yml")):
        command = [monitoring.program("promtool"), what, "rules", MONITORING / path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tried = {
        (one["alertname"], "exp_alerts" in one)
        for case in read(f"{name}_test")["tests"]
        for one in case["alert_rule_test"]
    }
    (group,) = read(name)["groups"]
    alerts = {rule["alert"] for rule in group["rules"]}
    assert tried == set(itertools.product(alerts, (True, False)))
    readme = (MONITORING / "README.md").read_text()
    assert [one for one in alerts if f"`{one}`" not in readme] == []


def test_the_dashboard_has_what_grafana_requires_and_shows_every_metric():
    """Its queries use only variables that it defines."""
    dashboard = monitoring.dashboard()
    variables = {one["name"]: one["type"] for one in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    assert {"model_name", "engine"} < variables.keys()
    assert monitoring.queries(dashboard, "1m")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in (panel for panel in panels if panel["type"] != "row"):
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) > 0
        assert all(one["datasource"] == source for one in (panel, *targets))
    audits = [f"audit_{name}" for name in ("findings", *AUDIT_COUNTERS)]
    audits += (WEIGHT_CHANGES, "audit_handovers", *VERSION_COUNTERS)
    ours = {f"vllm:nwor_{name}_total" for name in (*COUNTERS, "fallbacks", *audits)}
    shown = set(re.findall(r"vllm:nwor\w+", monitoring.DASHBOARD.read_text()))
    assert shown == ours | {"vllm:nwor_info"}


def test_documents_name_only_metrics_of_the_dashboard():
    """Which shows every one."""

    def named(text: str) -> set[str]:
        return {one.removesuffix("_total") for one in re.findall(r"vllm:nwor\w+", text)}

    ours = named(monitoring.DASHBOARD.read_text()) | {"vllm:nwor_"}
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert named(path.read_text()) <= ours, path.name
