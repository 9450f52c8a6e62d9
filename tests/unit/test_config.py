# SPDX-License-Identifier: Apache-2.0
"""NworConfig: defaults, allowed values, and the exact message for a bad one."""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from vllm_nwor.config import (
    ENV_NAMES,
    AuditMode,
    Mode,
    NworConfig,
    NworConfigError,
    OnReject,
    StaleMode,
    Store,
    Strict,
)


@pytest.mark.parametrize("empty", [{}, dict.fromkeys(ENV_NAMES, "")])
def test_an_empty_environment_means_off_with_metrics(empty):
    steps = (Mode.OFF, True, Strict.NEVER, False, None, None)
    audit = (AuditMode.OFF, 32, "", StaleMode.FIND, Store.AUTO)
    assert NworConfig.from_env(empty) == NworConfig(*steps, *audit, OnReject.RESTORE)


def test_every_variable_is_read():
    given = (
        *("MODE=stage", "EMIT_METRICS=0", "STRICT=1", "DEBUG_SYNC=1"),
        *("MAX_LOG_ROWS=64", "SHADOW_BLOCKS=12"),
        *("AUDIT=raise", "AUDIT_MIB=0", "AUDIT_FILE=found.json"),
        *("AUDIT_STALE=count", "AUDIT_STORE=own", "AUDIT_INCIDENT=incident.json"),
        *("AUDIT_SECRET=secret", "AUDIT_INCIDENT_TOKENS=1"),
    )
    config = NworConfig.from_env(dict(f"VLLM_NWOR_{one}".split("=") for one in given))

    steps = (Mode.STAGE, False, Strict.STARTUP, True, 64, 12)
    audit = (AuditMode.RAISE, 0, "found.json", StaleMode.COUNT, Store.OWN)
    files = {"audit_incident": "incident.json", "audit_secret": "secret"}
    assert config == NworConfig(*steps, *audit, **files, audit_incident_tokens=True)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        # 0 is a number of blocks, not the default.
        ("SHADOW_BLOCKS", "0", {"max_shadow_blocks": 0}),
        ("STRICT", "0", {"strict": False, "strict_steps": False}),
        ("STRICT", "1", {"strict": True, "strict_steps": False}),
        ("STRICT", "always", {"strict": True, "strict_steps": True}),
    ],
)
def test_what_a_value_means(name, value, expected):
    config = NworConfig.from_env({f"VLLM_NWOR_{name}": value})
    assert {part: getattr(config, part) for part in expected} == expected


ROWS = "empty (no cap) or a whole number of rows, at least 1"
BLOCKS = "empty (5 % of the blocks) or a whole number of KV blocks, at least 0"
MIB = "empty (32) or a whole number of MiB a step, at least 0"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("VLLM_NWOR_MODE", "on", "off, stage, cow"),
        ("VLLM_NWOR_MODE", "COW", "off, stage, cow"),
        ("VLLM_NWOR_EMIT_METRICS", "yes", "0, 1"),
        ("VLLM_NWOR_STRICT", "true", "0, 1, always"),
        ("VLLM_NWOR_DEBUG_SYNC", "2", "0, 1"),
        *(("VLLM_NWOR_MAX_LOG_ROWS", value, ROWS) for value in ("0", "-5", "1e3")),
        *(("VLLM_NWOR_SHADOW_BLOCKS", value, BLOCKS) for value in ("-1", "5%")),
        ("VLLM_NWOR_ON_REJECT", "nan", "restore, poison"),
        ("VLLM_NWOR_AUDIT", "on", "off, log, raise"),
        ("VLLM_NWOR_AUDIT_STALE", "ignore", "find, count"),
        ("VLLM_NWOR_AUDIT_STORE", "mine", "auto, own, shared"),
        ("VLLM_NWOR_AUDIT_INCIDENT_TOKENS", "true", "0, 1"),
        ("VLLM_NWOR_AUDIT_MIB", "1.5", MIB),
        ("VLLM_NWOR_AUDIT_MIB", "9" * 5000, MIB),
    ],
)
def test_a_bad_value_names_the_variable_and_the_allowed_values(name, value, allowed):
    message = f"{name}={value!r} is not allowed; allowed values: {allowed}"
    with pytest.raises(NworConfigError, match=f"^{re.escape(message)}$"):
        NworConfig.from_env({name: value})


def test_poison_is_allowed_in_mode_cow_only():
    poison = {"VLLM_NWOR_ON_REJECT": "poison"}
    config = NworConfig.from_env(poison | {"VLLM_NWOR_MODE": "cow"})

    assert config.on_reject is OnReject.POISON
    for mode in ("off", "stage"):
        message = "poison' is for VLLM_NWOR_MODE='cow' alone, and the mode is"
        with pytest.raises(NworConfigError, match=f"'{message} '{mode}'$"):
            NworConfig.from_env(poison | {"VLLM_NWOR_MODE": mode})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is a folder"),
        ("missing/a.json", "there is no folder '{}/missing'"),
        ("file/a.json", "there is no folder '{}/file'"),
    ],
)
@pytest.mark.parametrize("variable", ["AUDIT_FILE", "AUDIT_INCIDENT"])
def test_an_unwritable_audit_file_is_a_bad_value(name, why, variable, tmp_path):
    """If the audit is on, and only when an engine starts."""
    (tmp_path / "file").touch()
    path = f"{tmp_path}/{name}"
    env = {"VLLM_NWOR_AUDIT": "log", (name := f"VLLM_NWOR_{variable}"): path}
    said = f"{name}={path!r} is not allowed ({why.format(tmp_path)}); "
    with pytest.raises(NworConfigError, match=f"^{re.escape(said)}allowed values: em"):
        NworConfig.from_env(env, looks_at_files=True)
    assert path in vars(NworConfig.from_env(env)).values()
    off = env | {"VLLM_NWOR_AUDIT": "off"}
    assert path in vars(NworConfig.from_env(off, looks_at_files=True)).values()
    fine = env | {name: str(tmp_path / "new.json")}
    assert NworConfig.from_env(fine, looks_at_files=True)


def test_every_variable_is_documented():
    text = (Path(__file__).resolve().parents[2] / "docs/variables.md").read_text()

    assert set(re.findall(r"^\| `(VLLM_NWOR_\w+)` \|", text, re.MULTILINE)) == set(
        ENV_NAMES
    )


def test_the_kubernetes_example_gives_every_process_the_variables():
    """And is what Kubernetes allows. A Service's name puts variables there, too."""
    text = (Path(__file__).resolve().parents[2] / "docs/kubernetes.yaml").read_text()
    config, deployment, service = documents = list(yaml.safe_load_all(text))
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)

    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ((source,),) = (one.values() for one in container["envFrom"])
    assert source["name"] == config["metadata"]["name"]
    assert config["data"].keys() <= set(ENV_NAMES)
    NworConfig.from_env(config["data"])
    assert template["spec"]["enableServiceLinks"] is False
    assert not service["metadata"]["name"].startswith("vllm")

    (port,) = container["ports"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    json.loads(container["args"][-1].removeprefix("--speculative-config="))
