# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts by themselves: promtool's verdict, and their structure.

What a live server and a real Prometheus make of them is in tests/e2e. Grafana is not
run: its file is checked for what Grafana requires of it.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers import monitoring
from vllm_nwor.audit.stats import COUNTERS as AUDIT_COUNTERS
from vllm_nwor.metrics import COUNTERS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "tools" / "monitoring"


# --- alerts ---


@pytest.mark.parametrize("name", ["alerts", "audit_alerts"])
def test_each_alert_fires_when_it_should_and_only_then(name):
    """promtool's verdict; without it a test fails, and says how to get it."""
    env = os.environ | {"GOGC": "off"}  # it collects garbage half of its time
    for what, path in (("check", f"{name}.yml"), ("test", f"{name}_test.yml")):
        command = [monitoring.program("promtool"), what, "rules", MONITORING / path]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def rules(name: str = "alerts") -> list[str]:
    (group,) = yaml.safe_load((MONITORING / f"{name}.yml").read_text())["groups"]
    return [rule["alert"] for rule in group["rules"]]


def test_each_alert_is_tried_both_ways_and_explained():
    cases = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    tried = {
        (one["alertname"], "exp_alerts" in one)
        for case in cases
        for one in case["alert_rule_test"]
    }
    assert tried == set(itertools.product(rules(), (True, False)))
    readme = (MONITORING / "README.md").read_text()
    every = [*rules(), *rules("audit_alerts")]
    assert [name for name in every if f"`{name}`" not in readme] == []


# --- dashboard ---


def test_dashboard_is_what_grafana_accepts():
    """Queries are of variables that can be chosen."""
    dashboard = monitoring.dashboard()
    variables = {one["name"]: one["type"] for one in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    assert {"model_name", "engine"} < variables.keys()
    every = dashboard["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in (panel for panel in every if panel["type"] != "row"):
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) > 0
        assert all(one["datasource"] == source for one in (panel, *targets))
    # Queries have no other variables: those would not be filled.
    assert monitoring.queries(dashboard, "1m")


def test_dashboard_shows_every_metric_of_ours_beside_vllms():
    text = (MONITORING / "dashboard.json").read_text()
    audits = (f"audit_{name}" for name in ("findings", *AUDIT_COUNTERS))
    ours = {f"vllm:nwor_{name}_total" for name in (*COUNTERS, "fallbacks", *audits)}
    shown = set(re.findall(r"vllm:\w+", text))
    assert ours | {"vllm:nwor_info"} == {name for name in shown if "nwor" in name}
    vllms = ("drafts", "draft_tokens", "accepted_tokens")
    assert {f"vllm:spec_decode_num_{name}_total" for name in vllms} <= shown
    assert "vllm:generation_tokens_total" in shown
