# SPDX-License-Identifier: Apache-2.0
"""register(): the hooks of each mode, and its messages. A whole process:
tests/e2e/test_off_is_vanilla.py; other signatures: tests/e2e/test_fault_points.py."""

import contextlib
import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import vllm
import wrapt
from vllm import envs

from tests.helpers.environment import run_python
from tests.helpers.logs import nwor_log
from vllm_nwor import plugin
from vllm_nwor.config import ENV_NAMES, NworConfigError
from vllm_nwor.hooks.runner import Builder


@pytest.fixture
def pending(monkeypatch):
    """Modules with a post-import hook, in order."""
    names: list[str] = []
    monkeypatch.setattr(plugin, "_registered", [])
    plugin._check_host.cache_clear()
    monkeypatch.setattr(
        wrapt, "register_post_import_hook", lambda hook, name: names.append(name)
    )
    for name in ENV_NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delitem(envs.environment_variables, name, raising=False)
    return names


RUNNERS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
CORE, SCHEDULER = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"
OURS = [*RUNNERS, CORE, f"{CORE}_client", SCHEDULER, "vllm.v1.metrics.loggers"]


@pytest.mark.parametrize(
    ("modes", "hooked"),
    [
        ({}, []),
        ({"MODE": "off"}, []),
        ({"MODE": "cow"}, OURS),
        ({"MODE": "stage", "AUDIT": "log"}, [*OURS, *plugin.AUDIT_HOOKS]),
        ({"AUDIT": "raise"}, [*OURS, *plugin.AUDIT_HOOKS]),
    ],
)
def test_each_mode_hooks_its_modules_once(modes, hooked, pending, monkeypatch):
    """vLLM knows the variables, but not their values."""
    for name, value in modes.items():
        monkeypatch.setenv(f"VLLM_NWOR_{name}", value)

    plugin.register()
    plugin.register()

    assert pending == hooked
    assert {envs.environment_variables[name]() for name in ENV_NAMES} == {None}


def test_a_vllm_without_a_list_of_variables_starts(pending, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.envs", ModuleType("vllm.envs"))
    plugin.register()
    assert pending == []


def test_a_bad_value_stops_the_start_in_any_mode(pending, monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_STRICT", "maybe")

    with pytest.raises(NworConfigError, match=r"^VLLM_NWOR_STRICT='maybe' is not al"):
        plugin.register()

    assert pending == []


def test_a_bad_value_prints_one_line_and_no_traceback():
    """`vllm serve` loads plugins before it starts a process."""
    code = "from vllm.engine.arg_utils import AsyncEngineArgs\n"
    code += "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
    code += "AsyncEngineArgs.add_cli_args(Parser())"
    file = {"VLLM_NWOR_AUDIT": "log", "VLLM_NWOR_AUDIT_FILE": "/missing/a.json"}
    bad = file | {"VLLM_NWOR_STRICT": "yes", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = run_python("-W", "ignore", "-c", code, **bad)
    assert done.returncode == 1
    *before, last = done.stderr.splitlines()
    assert not [line for line in before if "Traceback" in line or "nwor" in line]
    assert last.startswith("vllm-nwor: VLLM_NWOR_STRICT='yes' is not allowed; allowed")
    assert "; VLLM_NWOR_AUDIT_FILE='/missing/a.json' is not allowed (there is" in last


def test_other_errors_keep_their_tracebacks():
    seen = []
    plugin._without_traceback(lambda *of: seen.append(of), KeyError, KeyError(1), None)
    ((kind, *_),) = seen
    assert kind is KeyError


def test_an_untested_vllm_version_gets_one_warning(pending, monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setattr(vllm, "__version__", "9.9.9")

    with nwor_log() as lines:
        plugin.register()
        plugin.register()

    assert lines == [
        "WARNING NWOR has not been tried with vLLM 9.9.9 (tried: 0.26.0, 0.29.0, "
        "0.32.0, 0.33.0); it runs if every signature it relies on matches"
    ]
    assert pending == OURS


def test_a_fork_hooks_a_module_at_its_end(pending, monkeypatch):
    """But not modules without a hook; with one warning."""
    names, hooked = (SCHEDULER, CORE, "vllm.v1.worker.gpu_worker", "vllm"), []
    for name in names[:3]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(vllm, "__version__", "9.9.9")

    def guarded(hook):
        return lambda host: hooked.append((host.__name__, hook))

    monkeypatch.setattr(plugin, "_guarded", guarded)
    with nwor_log() as lines:
        for mode in ("off", "cow"):
            monkeypatch.setenv("VLLM_NWOR_MODE", mode)
            for name in names:
                plugin.hook_module(name)
            assert len(lines) == (mode == "cow")
    assert hooked == [(SCHEDULER, ".hooks.scheduler"), (CORE, ".hooks.info")]
    assert pending == []


def test_ignored_files_of_a_branch_are_no_copy_of_the_package(tmp_path, monkeypatch):
    """What git leaves of a fork's folder when it checks out a branch without it."""
    folder = tmp_path / "v1" / "nwor"
    (folder / "__pycache__").mkdir(parents=True)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(plugin, "find_spec", lambda name: spec)
    assert plugin.used_package() == "vllm_nwor"
    (folder / "plugin.py").touch()
    assert plugin.used_package() == "vllm.v1.nwor"


def test_an_empty_vllm_namespace_is_named(pending, monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setattr(vllm, "__file__", None)

    with pytest.raises(RuntimeError) as error:
        plugin.register()

    (folder,) = vllm.__path__
    assert str(error.value) == (
        "vllm-nwor: `import vllm` finds an empty namespace instead of vLLM, in "
        f"{folder}; without vLLM, install it; with an editable one, start Python "
        "elsewhere or remove that folder"
    )

    assert pending == []


@pytest.mark.parametrize("strict", [False, True])
def test_an_unexpected_error_of_a_hook_module_is_a_refusal(strict, monkeypatch):
    """Here the hooks need a module that vLLM does not have."""
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.stats", None)
    monkeypatch.setenv("VLLM_NWOR_STRICT", str(int(strict)))
    with (
        nwor_log() as lines,
        pytest.raises(ImportError) if strict else contextlib.nullcontext(),
    ):
        plugin._guarded(".hooks.scheduler")(ModuleType(SCHEDULER))
    said = f"ERROR NWOR is off for {SCHEDULER}: "
    said += "import of vllm.v1.metrics.stats halted; None in sys.modules"
    assert lines == ([] if strict else [said])


@pytest.mark.parametrize("name", plugin.BUILDERS)
def test_each_builder_that_the_plugin_names_is_one(name):
    builder = importlib.import_module(name, "vllm_nwor")

    assert builder.NAME in ("audit", "transaction")
    for method in (m for m in vars(Builder) if not m.startswith("_")):
        expected = inspect.signature(getattr(Builder, method)).parameters
        found = inspect.signature(getattr(builder, method)).parameters
        assert ["self", *found] == list(expected), method


def test_the_package_imports_no_torch_and_gives_out_what_it_promises():
    """Other plugins import it in processes that need no torch."""
    code = """
import sys, vllm_nwor
assert not {"torch", "vllm", "wrapt"} & set(sys.modules), "imported with the plugin"
assert vllm_nwor.Commit.__module__ == "vllm_nwor.commits"
assert not {"torch", "vllm"} & set(sys.modules), "imported with Commit"
import vllm.v1.nwor
from vllm.v1.nwor import DraftCommitManager
assert DraftCommitManager.__module__ == "vllm_nwor.transaction.draft_manager"
assert "torch" in sys.modules
for name in vllm_nwor.__all__:
    getattr(vllm_nwor, name)
"""
    code = f"import vllm_nwor.plugin as p; p._Alias.install()\n{code}"
    done = run_python("-P", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
