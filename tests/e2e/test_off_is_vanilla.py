# SPDX-License-Identifier: Apache-2.0
"""Mode off, and no mode at all, leave vLLM unchanged and cost a few milliseconds.

A process loads vLLM's modules, then runs the installed entry point as vLLM does:
without VLLM_NWOR_MODE and VLLM_NWOR_AUDIT, with off, with cow, and with the audit. The
comparison that finds no change in the first two cases must see the changes of the
others.
"""

import json
from typing import Any

import pytest

from tests.helpers.environment import REPO, run_python

pytestmark = pytest.mark.e2e

SCRIPT = r"""
import importlib, inspect, json, os, statistics, sys, time
from importlib.metadata import entry_points

HOSTS = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.metrics.loggers",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.lora.model_manager",
    "vllm.device_allocator.cumem",
    "vllm.v1.worker.gpu.model_states.mamba_hybrid",
)
import vllm.envs, vllm.plugins
from vllm.platforms import current_platform

def complaint():
    '''vLLM's error about an unknown variable, if any.'''
    os.environ["VLLM_NWOR_MODE"] = "off"
    try:
        current_platform.validate_environ(hard_fail=True)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["VLLM_NWOR_MODE"]

def gives_alias(name):
    try:
        return importlib.import_module(name).__name__
    except ModuleNotFoundError as error:
        assert "nwor" in error.name, error

names = ["vllm.v1.nwor" + more for more in ("", ".config", ".base.wrap", ".none")]
without = {}
for plugins in ("", "other"):
    os.environ["VLLM_PLUGINS"] = plugins
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    without[plugins] = [complaint(), *map(gives_alias, names)]
del os.environ["VLLM_PLUGINS"]
assert "vllm_nwor" not in sys.modules
hosts = [importlib.import_module(name) for name in HOSTS]
(entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "nwor"]

def functions():
    '''Every attribute of vLLM's modules and of their classes, by name.'''
    found = {}
    for host in hosts:
        for name, value in vars(host).items():
            found[f"{host.__name__}.{name}"] = value
            if inspect.isclass(value):
                for attribute in dir(value):
                    static = inspect.getattr_static(value, attribute)
                    key = f"{value.__module__}.{value.__qualname__}.{attribute}"
                    found[key] = static
    return found

def look():
    hooks = getattr(sys.modules.get("wrapt.importer"), "_post_import_hooks", {})
    after = functions()
    return {
        "changed": sorted(n for n in before if after.get(n) is not before[n]),
        "new": sorted(set(after) - set(before)),
        "pending": sorted(name for name, left in hooks.items() if left),
        "finders": [
            f"{type(f).__module__}.{type(f).__name__}"
            for f in sys.meta_path
            if f not in finders
        ],
        "modules": sorted(m for m in sys.modules if m not in modules),
    }

before, finders, modules = functions(), list(sys.meta_path), set(sys.modules)
result = {}
for mode in ("unset", "off"):
    if mode != "unset":
        os.environ["VLLM_NWOR_MODE"] = os.environ["VLLM_NWOR_AUDIT"] = mode
    entry.load()()
    result[mode] = look()
result["without"] = without
result["with"] = [complaint(), *map(gives_alias, names)]
modules = [importlib.import_module(name) for name in names[:3]]
for module in modules:
    assert module is sys.modules[module.__name__]
    assert module.__spec__.name == module.__name__, module.__spec__
    assert module.__spec__.loader is module.__loader__
assert importlib.reload(modules[1]) is modules[1]
assert names[3] not in sys.modules

milliseconds = []
for _ in range(15):
    for name in [name for name in sys.modules if name.startswith("vllm_nwor")]:
        del sys.modules[name]
    started = time.process_time()
    entry.load()()
    milliseconds.append((time.process_time() - started) * 1e3)
result["milliseconds"] = statistics.median(milliseconds)

(alias,) = [f for f in sys.meta_path if f not in finders][-1:]
others = [name for name in sys.modules if not name.startswith("vllm.v1.nwor")]
started = time.process_time()
found = [name for name in others if alias.find_spec(name) is not None]
result["alias"] = {
    "found": found,
    "names": len(others),
    "milliseconds": (time.process_time() - started) * 1e3,
}

os.environ["VLLM_NWOR_MODE"] = "cow"
entry.load()()
result["cow"] = look()
from vllm_nwor.hooks.ledger import METHODS, OFFLOADING
rows = [row for row in METHODS if not row.on_object]
result["ledger"] = sorted(row.name for row in rows if not row.for_audit)
result["seen"] = sorted(set(result["ledger"]) & set(before))

os.environ["VLLM_NWOR_AUDIT"] = "log"
entry.load()()
result["audit"] = look()
audited = [row for row in rows if row.for_audit and row.module != OFFLOADING]
result["audited"] = [row.name for row in audited]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def looks():
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(last)
    return found


@pytest.mark.parametrize("mode", ["unset", "off"])
def test_every_function_of_vllm_is_the_same_object(mode, looks):
    """Both the ledger's targets and everything else in their modules; and no
    post-import hook is left."""
    assert looks["seen"] == looks["ledger"]
    assert looks[mode]["changed"] == []
    assert looks[mode]["new"] == []
    assert looks[mode]["pending"] == []
    # The finder for the alias vllm.v1.nwor.
    assert looks[mode]["finders"] == ["vllm_nwor.plugin._Alias"]
    # Neither wrapt nor a hook module is loaded.
    assert looks[mode]["modules"] == [
        "vllm_nwor",
        "vllm_nwor.config",
        "vllm_nwor.plugin",
    ]


def test_the_alias_in_vllm_gives_the_same_modules(looks):
    """If VLLM_PLUGINS leaves nwor out, there is no alias, and vLLM does not know the
    variables, as docs/variables.md says."""
    warning = "Unknown vLLM environment variable detected: VLLM_NWOR_MODE"
    nothing = [warning, None, None, None, None]
    assert looks["without"] == {"": nothing, "other": nothing}
    modules = ["vllm_nwor", "vllm_nwor.config", "vllm_nwor.base.wrap"]
    assert looks["with"] == [None, *modules, None]
    assert warning in (REPO / "docs" / "variables.md").read_text()


def test_the_plugin_costs_a_process_a_few_milliseconds(looks):
    """CPU time to load and run the plugin, median of 15; and of the alias finder over
    all modules that vLLM imports."""
    assert looks["milliseconds"] < 5
    assert looks["alias"]["found"] == []
    assert looks["alias"]["names"] > 1000
    assert looks["alias"]["milliseconds"] < 10


def test_the_audit_adds_the_hooks_of_its_own_ledger(looks):
    changed = set(looks["audit"]["changed"]) - set(looks["cow"]["changed"])
    assert set(looks["audited"]) <= changed
    names = {name.rpartition(".")[2] for name in looks["audited"]}
    assert {name.rpartition(".")[2] for name in changed} == names


def test_the_comparison_sees_the_hooks_of_mode_cow(looks: dict[str, Any]) -> None:
    """So it would have seen hooks in mode off."""
    changed = set(looks["cow"]["changed"])
    targets = set(looks["ledger"])
    assert targets <= changed
    # Other changes: the same functions seen through a subclass or another module, and
    # the field that SchedulerStats gets.
    names = {target.rpartition(".")[2] for target in targets} | {"__annotations__"}
    assert {name.rpartition(".")[2] for name in changed} == names
