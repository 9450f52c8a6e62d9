# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts by themselves: promtool's verdict, and their structure.

What a live server and a real Prometheus make of them is in tests/e2e. Grafana is not
run: its file is checked for what Grafana requires of it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tools.monitoring import panels, prometheus, record
from vllm_nwor.audit.stats import COUNTERS as AUDIT_COUNTERS
from vllm_nwor.metrics import COUNTERS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "tools" / "monitoring"
Dashboard = dict[str, Any]


# --- alerts ---


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs promtool; without it a test fails, and says how to get it."""
    command = [prometheus.program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", MONITORING / "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    done = promtool("test", "rules", MONITORING / "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_audits_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    trials = (MONITORING / "audit_alerts_test.yml").read_text()
    (tmp_path / "audit_alerts_test.yml").write_text(trials)
    rules = (MONITORING / "audit_alerts.yml").read_text()
    readme = (MONITORING / "README.md").read_text()
    for name in re.findall(r"alert: (\w+)", rules):
        assert f"`{name}`" in readme
    found, steps = "vllm:nwor_audit_findings_total > 0", "steps_total[10m]) == 0"
    tokens = "increase(vllm:generation_tokens_total[10m])"
    for expression, instead, is_right in (
        (found, found, True),
        (found, "vllm:nwor_audit_findings_total >= 0", False),
        (found, "increase(vllm:nwor_audit_findings_total[10m]) > 0", False),
        (found, "vllm:nwor_audit_unverified_total > 0", False),
        (steps, steps.replace("==", ">="), False),
        (f"{tokens} > 0", f"{tokens} >= 0", False),
        ("for: 5m", "for: 0m", False),
    ):
        assert rules.count(expression) == 1
        changed = rules.replace(expression, instead)
        (tmp_path / "audit_alerts.yml").write_text(changed)
        done = promtool("test", "rules", tmp_path / "audit_alerts_test.yml")
        assert (done.returncode == 0) is is_right, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_each_alert_is_tried_both_ways_and_explained() -> None:
    cases = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    tried = [case for test in cases for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in tried if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in tried if not case.get("exp_alerts")} == names
    readme = (MONITORING / "README.md").read_text()
    assert {name for name in names if f"`{name}`" not in readme} == set()


def whole_rule(alert: str) -> str:
    """A pattern for an alert's expression, after group 1."""
    start = rf"(alert: {alert}\n(?:.*\n)*?\s+expr: )"
    return start + r"(?:\|\n(?:\s{10,}.*\n)+|.*\n)"


DRAFTS = "vllm:spec_decode_num_draft_tokens_total"
# A part of the rules that is taken away or changed; promtool must then find a fault.
BROKEN = [
    *(
        (whole_rule(rule["alert"]), rf"\g<1>{expression}\n")
        for rule in rules()
        for expression in ("vector(1)", "vector(1) < 0")
    ),
    (r"\n +or \(\n +vllm:nwor_fallbacks_total[^)]*\) > 0", ""),
    (r"increase\(vllm:nwor_fallbacks_total{reason!~.*}\[10m\]\) > 0\n +or ", ""),
    (r"{reason!~[^}]*}", ""),
    (r"{reason=~[^}]*}", ""),
    (r'requested!="off", ', ""),
    (r"} == 1", "}"),
    (r"(?<=num_drafts_total) > 0\n", "\n"),
    (r"\n +unless on \(.*\) vllm:nwor_info == 1", ""),
    (r"(?<=nwor_info) == 1", ""),
    (r"(?<=model_name), engine(?=\) vllm:nwor_info)", ""),
    (r"instance, (?=model_name, engine\) vllm:nwor_info)", ""),
    (r"(?<=spec_decode_num_accepted_tokens_total\n) +unless on.*\n", ""),
    (r"(?<=spec_decode_num_draft_tokens_total\n) +unless on.*\n", ""),
    (r"\n +\+ vllm:nwor_dropped_drafts_total", ""),
    (r"- vllm:nwor_dropped_drafts_total", ""),
    (f"< {DRAFTS}", f"!= {DRAFTS}"),
    (r"(rate\(vllm:nwor_windows_total\[5m\]\)) > 0", r"\1"),
    (r"for: 5m", "for: 0m"),
    (r"for: 1m", "for: 0m"),
]


@pytest.mark.parametrize(("pattern", "instead"), BROKEN, ids=range(len(BROKEN)))
def test_the_trials_notice_a_broken_rule(
    tmp_path: Path, pattern: str, instead: str
) -> None:
    text = (MONITORING / "alerts.yml").read_text()
    broken, changed = re.subn(pattern, instead, text)
    assert changed, pattern
    (tmp_path / "alerts.yml").write_text(broken)
    trials = (MONITORING / "alerts_test.yml").read_text()
    (tmp_path / "alerts_test.yml").write_text(trials)
    done = promtool("test", "rules", tmp_path / "alerts_test.yml")
    # An alert that is not as expected; a rule that cannot be read says neither.
    assert re.search(r"exp:\[[^]]*\][\s\S]*got:\[", done.stdout + done.stderr), done
    assert done.returncode != 0


# --- dashboard ---


def faults(dashboard: Dashboard) -> list[str]:
    """What Grafana would not accept of a dashboard, or draw wrongly."""
    found = []
    if not isinstance(dashboard.get("schemaVersion"), int):
        found.append("schemaVersion")
    if not (dashboard.get("uid") and dashboard.get("title")):
        found.append("uid or title")
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    if variables.get("datasource", {}).get("type") != "datasource":
        found.append("no datasource variable")
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        found.append("panel ids repeat")
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        if at["x"] < 0 or at["x"] + at["w"] > 24 or not cells:
            found.append(f"{panel['title']}: outside the grid")
        if cells & taken:
            found.append(f"{panel['title']}: lies on another")
        taken |= cells
        found += _panel_faults(panel, set(variables))
    return found


def _panel_faults(panel: dict[str, Any], variables: set[str]) -> Iterator[str]:
    title = panel["title"]
    if panel["type"] == "row":
        return
    if not (title and panel.get("description")):
        yield f"{title}: no title or description"
    targets = panel.get("targets", [])
    if not targets:
        yield f"{title}: no query"
    if len({target["refId"] for target in targets}) != len(targets):
        yield f"{title}: refIds repeat"
    for one in (panel, *targets):
        if one["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{title}: a datasource that is not the variable"
    for target in targets:
        used = {name.strip("${}") for name in panels.VARIABLE.findall(target["expr"])}
        if used - variables - {"__rate_interval"}:
            yield f"{title}: unknown variable"
        if panel["type"] in ("stat", "table") and not target.get("instant"):
            yield f"{title}: shows one value and asks for many"


def test_dashboard_is_well_formed() -> None:
    assert faults(panels.read()) == []


def _set(*path: Any) -> Callable[[Dashboard], None]:
    def change(dashboard: Any) -> None:
        for key in path[:-2]:
            dashboard = dashboard[key]
        dashboard[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_set("schemaVersion", "38"), "schemaVersion"),
        (_set("uid", ""), "uid or title"),
        (_set("templating", "list", []), "no datasource variable"),
        (_set("panels", 1, "id", 3), "panel ids repeat"),
        (_set("panels", 1, "gridPos", "w", 5), "lies on another"),
        (_set("panels", 1, "gridPos", "x", 21), "outside the grid"),
        (_set("panels", 1, "targets", []), "no query"),
        (_set("panels", 1, "description", ""), "no title or description"),
        (_set("panels", 1, "datasource", "uid", "mine"), "not the variable"),
        (_set("panels", 1, "targets", 0, "expr", "up{x=$y}"), "unknown variable"),
        (_set("panels", 1, "targets", 0, "instant", False), "asks for many"),
        (_set("panels", 6, "targets", 1, "refId", "A"), "refIds repeat"),
    ],
)
def test_a_broken_dashboard_is_noticed(
    change: Callable[[Dashboard], None], fault: str
) -> None:
    dashboard = copy.deepcopy(panels.read())
    change(dashboard)
    assert any(fault in one for one in faults(dashboard)), faults(dashboard)


def test_dashboard_shows_every_metric_of_ours_beside_vllms() -> None:
    text = (MONITORING / "dashboard.json").read_text()
    audits = (f"audit_{name}" for name in ("findings", *AUDIT_COUNTERS))
    ours = {f"vllm:nwor_{name}_total" for name in (*COUNTERS, "fallbacks", *audits)}
    shown = set(re.findall(r"vllm:\w+", text))
    assert ours | {"vllm:nwor_info"} == {name for name in shown if "nwor" in name}
    assert {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:generation_tokens_total",
    } <= shown


def test_queries_have_every_variable_filled() -> None:
    queries = panels.queries(panels.read(), "20s")
    assert len(queries) > 20
    assert not [query for query in queries if "$" in query.expression]
    dashboard = copy.deepcopy(panels.read())
    dashboard["panels"][1]["targets"][0]["expr"] = "up{x='$other'}"
    with pytest.raises(panels.BadPanel, match=r"'Breaches'.*\$other"):
        panels.queries(dashboard, "20s")


# --- what was recorded ---


def test_the_recorded_run_was_of_this_dashboard_and_healthy(tmp_path: Path) -> None:
    picture = ROOT / "results" / "monitoring_cpu.png"
    result = json.loads(picture.with_suffix(".json").read_text())
    queries = panels.queries(panels.read(), "20s")
    legends = [query.legend for query in queries if query.panel == record.PANEL]
    assert [one["legend"] for one in result["series"]] == legends
    assert result["alerts"] == {rule["alert"]: "inactive" for rule in rules()}
    record.draw(result, tmp_path / "drawn.png")
    drawn, shown = (Image.open(path) for path in (tmp_path / "drawn.png", picture))
    assert drawn.size == shown.size
    assert f"](../../results/{picture.name})" in (MONITORING / "README.md").read_text()


# --- getting Prometheus ---


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with only what a test puts into the folder, and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NWOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "bin"


def put(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{script}")
    (folder / name).chmod(0o755)


APT = """\
import pathlib, sys
log = pathlib.Path({log!r})
log.write_text((log.read_text() if log.exists() else "") + sys.argv[1] + "\\n")
if sys.argv[1] == "download":
    if {needs_update} and "update" not in log.read_text():
        sys.exit("E: no candidate")
    pathlib.Path("prometheus_1_all.deb").write_text("package")
"""
DPKG = """\
import os, pathlib, sys
assert pathlib.Path(sys.argv[2]).read_text() == "package"
folder = pathlib.Path(sys.argv[3]) / "usr/bin"
folder.mkdir(parents=True)
for name in ("prometheus", "promtool"):
    (folder / name).write_text("#!/bin/sh\\n")
    (folder / name).chmod(0o755)
"""


def test_without_prometheus_the_error_says_what_to_run(bare: Path) -> None:
    with pytest.raises(prometheus.PrometheusError, match=r"promtool is neither .*run:"):
        prometheus.program("promtool")
    with pytest.raises(prometheus.PrometheusError, match="apt-get is not here"):
        prometheus.fetch()


@pytest.mark.parametrize("needs_update", [False, True])
def test_fetch_unpacks_the_systems_package_once(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_update: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    log = tmp_path / "log"
    put(bare, "apt-get", APT.format(log=str(log), needs_update=needs_update))
    put(bare, "dpkg", DPKG)
    prometheus.fetch()
    prometheus.fetch()
    first = ["download", "update", "download"] if needs_update else ["download"]
    assert log.read_text().split() == first
    place = tmp_path / "cache" / "prometheus" / "usr" / "bin"
    assert prometheus.program("promtool") == str(place / "promtool")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["prometheus"]


def test_fetch_without_root_does_not_update_the_lists(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    put(bare, "apt-get", APT.format(log=str(tmp_path / "log"), needs_update=True))
    put(bare, "dpkg", DPKG)
    with pytest.raises(prometheus.PrometheusError, match="E: no candidate"):
        prometheus.fetch()
    assert (tmp_path / "log").read_text() == "download\n"


def test_what_is_on_path_is_used(bare: Path, tmp_path: Path) -> None:
    for name in prometheus.PROGRAMS:
        put(bare, name, "")
    prometheus.fetch()
    assert prometheus.program("promtool") == str(bare / "promtool")
    assert not (tmp_path / "cache").exists()
