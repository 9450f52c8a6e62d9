# SPDX-License-Identifier: Apache-2.0
"""The conformance kit for KV connectors: `python -m vllm_nwor.audit --connector`.

A connector that conforms passes each case; a fault in a copy of it is a breach of the
case that is there for it, and of no other. The verdicts on vLLM's own connectors go to
cases.jsonl in the folder of NWOR_REACH_RESULTS (`make reach`).
tests/unit/test_conformance.py has what needs no engine.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import vllm

from tests.helpers import folder_connector, reach
from tests.helpers.environment import REPO, run_python
from tests.helpers.host_offloading import CONNECTOR
from tools.soak.server import free_port
from vllm_nwor.audit.__main__ import KIT_VARIABLES, VARIABLES
from vllm_nwor.audit.conformance import (
    CASES,
    ENGINES,
    Result,
    State,
    play,
    prepare,
    results,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HELPER = folder_connector.__name__
LMCACHE = "tests.helpers.lmcache_connector:LMCacheMPConnector"
SYNC, ASYNC = ({"folder": "{folder}", "loads": how} for how in ("sync", "async"))
HOST = CONNECTOR["kv_connector_extra_config"]
EXAMPLE = {"shared_storage_path": "{folder}"}
MULTI = {
    "connectors": [
        CONNECTOR,
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": EXAMPLE,
        },
    ]
}
# Cases that are not ok, by connector: the verdicts that are a breach, or none.
DIES = ("survives",)
OF_VLLM: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "ExampleConnector": (
        EXAMPLE,
        {
            "longer_local": ("exercised",),
            "chunked_prompt": DIES,
            "rejected_drafts": (),  # it stores prompts alone
            "preemption": DIES,
            "abort_loading": (),  # it loads within a step
            "cache_salt": ("exercised",),
            "failed_load": DIES,
            "lora_adapter": ("outputs", "exercised"),
        },
    ),
    # vLLM's own spec refuses a CPU; the manager and the scheduler's side are vLLM's.
    "OffloadingConnector": (HOST, {"failed_load": ()}),  # it has no file
    "MultiConnector": (
        MULTI,
        {
            "cache_salt": ("exercised",),
            "lora_adapter": ("outputs", "exercised"),
            "failed_load": (),  # the first connector has it, too
        },
    ),
}
# Up to vLLM 0.29 a block is stored whose last token never ran: vLLM issue 54193.
STORES_TOO_MUCH = {
    "ExampleConnector": (),  # prompts alone, as above
    "OffloadingConnector": ("outputs", "bytes"),
    "MultiConnector": ("outputs",),
}
INSTALLED = REPO / ".venv-frameworks"
# LMCache starts its server, which gets bytes through the engine's process: there is no
# GPU whose memory it could open.
SERVER = (
    "--l1-size-gb 1 --eviction-policy LRU --chunk-size 32 --disable-observability "
    "--supported-transfer-mode engine_driven --http-port"
)


def lmcache() -> dict[str, Any]:
    return {
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.wait_timeout": 300,
        "lmcache.mp.autostart.server_args": f"{SERVER} {free_port()}",
        "lmcache.mp.port": free_port(),
        "lmcache.mp.save_decode_cache": True,
    }


def kit(*options: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "vllm_nwor.audit", *options)
    return run_python(*command, timeout=900, COLUMNS="100")


def found_in(found: list[Result]) -> dict[str, tuple[str, ...]]:
    """As OF_VLLM."""
    return {
        result.case: tuple(
            name
            for name, verdict in result.verdicts.items()
            if verdict.state is State.BREACH
        )
        for result in found
        if result.state is not State.OK
    }


class Truths:
    """Engines without a connector, played once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def judge(self, connector: str, config: Mapping[str, Any]) -> list[Result]:
        found: list[Result] = []
        for engine in ENGINES:
            if engine not in self._known:
                alone = prepare(engine, None, self._folder, list(CASES))
                self._known[engine] = alone, play(alone, print, True)
            alone, truths = self._known[engine]
            with_it = replace(alone, connector=connector, config=dict(config))
            found += results(alone.cases, play(with_it, print, True), truths)
        return found


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truths]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (VARIABLES | KIT_VARIABLES).items():
            patch.setenv(name, value)
        yield Truths(tmp_path_factory.mktemp("kit"))


def record(connector: str, found: list[Result], *command: str, **more: str) -> None:
    cases = {
        result.case: {
            "about": result.about,
            "verdict": str(result.state),
            "breaches": list(found_in([result]).get(result.case, ())),
            "text": next(
                (
                    verdict.text
                    for state in (State.BREACH, State.NOT_EXERCISED)
                    for verdict in result.verdicts.values()
                    if verdict.state is state and result.state is state
                ),
                "",
            ),
        }
        for result in found
    }
    key = {"case": "conformance", "connector": connector}
    reach.save(reach.CASES, key, cases, *command, **more)


@pytest.mark.nightly
@pytest.mark.parametrize("connector", OF_VLLM)
def test_the_verdicts_on_vllms_own_connectors(connector: str, truths: Truths) -> None:
    config, expected = OF_VLLM[connector]
    found = truths.judge(connector, config)
    record(connector, found)
    if vllm.__version__.startswith(("0.26.", "0.29.")):
        expected = expected | {"rejected_drafts": STORES_TOO_MUCH[connector]}
    if vllm.__version__.startswith("0.26."):  # blocks of half the size: no start
        expected = expected | {"sliding_window": ()}
    assert found_in(found) == expected


@pytest.mark.nightly
def test_the_verdicts_on_lmcache(truths: Truths, monkeypatch: Any) -> None:
    found = list(distributions(name="lmcache", path=[str(INSTALLED)]))
    if not found:
        pytest.skip("lmcache is not installed: make frameworks")
    folders = filter(None, [os.environ.get("PYTHONPATH"), str(INSTALLED)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    verdicts = truths.judge(LMCACHE, lmcache())
    version = found[0].version
    record("LMCacheMPConnector", verdicts, "make frameworks", lmcache=version)
    assert found_in(verdicts) == {
        "abort_loading": DIES,
        "failed_load": (),  # it has no file
        "lora_adapter": ("outputs", "exercised"),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("config", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_conforming_connector_passes(config: dict[str, Any], truths: Truths) -> None:
    found = truths.judge(f"{HELPER}:FolderConnector", config)
    is_async = config is ASYNC
    assert found_in(found) == ({} if is_async else {"abort_loading": ()})
    states = {result.case: result.verdicts["bytes"].state for result in found}
    # The audit does not trust what it knew before the caches were lost; and the load
    # that failed brought nothing.
    unknown = [case for case, state in states.items() if state is State.UNVERIFIED]
    assert unknown == ["sleep", "failed_load"]


# The cases that a fault is a breach of, and by which verdicts; next to these the audit
# may name the bytes.
OUTPUTS = ("outputs",)
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {
    # What store_load does, each case that loads does. Only its text is the first one of
    # its engine; but so is that of lora_adapter, and that of sliding_window, of which
    # the first block is in front of the window and not loaded.
    "LosesNumberZero": {"store_load": OUTPUTS, "lora_adapter": OUTPUTS},
    "FromTheStart": {"evicted": OUTPUTS},
    "ShorterThanLocal": {"longer_local": ("exercised",)},
    "RoundsUp": {"partial_tail": OUTPUTS},
    "OfTheFirstStep": {"chunked_prompt": OUTPUTS},
    "WithTheLastToken": {"rejected_drafts": OUTPUTS},
    "LacksAResumedBlock": {"preemption": OUTPUTS},
    "LosesTheAborted": {"abort_loading": ("blocks",)},
    "LoadsAFileOnce": {"one_prefix": OUTPUTS},
    "OfAnyTenant": {"cache_salt": ("exercised",)},
    "ZeroesItsStore": {"sleep": OUTPUTS},
    "Silent": {"failed_load": OUTPUTS},
    "OfAnyAdapter": {"lora_adapter": ("outputs", "exercised")},
    "Packed": {"sliding_window": OUTPUTS},
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_breach_of_its_case_alone(fault: str, truths: Truths) -> None:
    verdicts = truths.judge(f"{HELPER}:{fault}", ASYNC)
    found, about = found_in(verdicts), getattr(folder_connector, fault).__doc__
    key = {"case": "conformance-fault", "connector": fault}
    reach.save(reach.CASES, key, {"fault": about, "breaches": found})
    others = {
        case: tuple(name for name in names if name != "bytes")
        for case, names in found.items()
    }
    assert others == FAULTS[fault]


def test_the_command_line_and_its_files(tmp_path: Path) -> None:
    junit, report = tmp_path / "kit.xml", tmp_path / "kit.json"
    done = kit(
        *("--connector", f"{HELPER}:OfAnyTenant", "--config", json.dumps(SYNC)),
        *("--case", "cache_salt", "--case", "store_load"),
        *("--junit", str(junit), "--json", str(report)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = "other loaded 96 tokens; must load none"
    assert f"exercised: breach: {text}" in done.stdout
    assert "NOT conforming: 1 ok, 1 breach, 0 not exercised" in done.stdout
    assert "store_load, with no connector" in done.stdout  # progress
    cases = json.loads(report.read_text())["cases"]
    assert {name: case["state"] for name, case in cases.items()} == {
        "store_load": "ok",
        "cache_salt": "breach",
    }
    assert cases["store_load"]["loads"] == {"again": 96}
    verified = [cases["store_load"][name] for name in ("verified", "unverified")]
    assert verified == [96, 0]
    assert cases["cache_salt"]["verdicts"]["exercised"]["text"] == text
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    good, bad = suite.iter("testcase")
    assert (good.get("name"), good.find("failure")) == ("store_load", None)
    failure = bad.find("failure")
    assert failure is not None
    assert text in failure.get("message", "")


@pytest.mark.parametrize(
    ("connector", "options", "words"),
    [
        ("No", ("--config", "{"), ["--config: '{' is no JSON"]),
        ("No", ("--config", "[]"), ["--config: '[]'; must be a JSON object"]),
        ("No", ("--case", "store"), ["--case is 'store'; must be one of store_load, "]),
        ("No", ("--junit", "/none/x"), ["--junit is '/none/x'; its folder must exist"]),
        ("No", (), ["--connector is 'No'", "or one of DecodeBench", "Offloading"]),
        ("argparse:Namespace", (), ["--connector is 'argparse:Namespace', which is <"]),
        (f"{HELPER}:No", (), ["Class No not found in tests.helpers.folder_connector"]),
        (
            "ExampleConnector",
            ("--model", "/none"),
            ["--model is '/none': the engine does not start", "must be the folder"],
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(
    connector, options, words
) -> None:
    done = kit("--connector", connector, "--case", "store_load", *options)
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
