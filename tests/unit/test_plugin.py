# SPDX-License-Identifier: Apache-2.0
"""register(): what a process gets in each mode, and what an unknown host is told."""

from pathlib import Path
from types import ModuleType

import pytest
import vllm
import wrapt
from vllm import envs

from tests.helpers.environment import result_of
from tests.helpers.logs import nwor_log
from vllm_nwor import plugin
from vllm_nwor.config import ENV_NAMES, NworConfigError
from vllm_nwor.hooks._wrap import HostMismatch


@pytest.fixture
def pending(monkeypatch):
    """Modules for which a post-import hook was left, in order."""
    names: list[str] = []
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setattr(
        wrapt, "register_post_import_hook", lambda hook, name: names.append(name)
    )
    for name in ENV_NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delitem(envs.environment_variables, name, raising=False)
    return names


OURS = [
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.metrics.loggers",
    "vllm.v1.engine.utils",
]


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
    """And vLLM knows our variables, but not their values."""
    for name, value in modes.items():
        monkeypatch.setenv(f"VLLM_NWOR_{name}", value)

    plugin.register()
    plugin.register()

    assert pending == hooked
    assert {envs.environment_variables[name]() for name in ENV_NAMES} == {None}


def test_a_bad_value_stops_the_start_in_any_mode(pending, monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_STRICT", "maybe")

    with pytest.raises(
        NworConfigError, match=r"^VLLM_NWOR_STRICT='maybe' is not allow"
    ):
        plugin.register()

    assert pending == []


def test_a_version_nobody_has_tried_gets_one_warning(pending, monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setattr(vllm, "__version__", "9.9.9")

    with nwor_log() as lines:
        plugin.register()
        plugin.register()

    assert lines == [
        "WARNING NWOR has not been tried with vLLM 9.9.9 (tried: 0.26.0, 0.29.0, "
        "0.32.0, 0.33.0); it runs if every signature it relies on matches"
    ]
    assert len(pending) == 6


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


ALIAS = """
import importlib, pickle, sys
import vllm_nwor.plugin
for name in ("vllm.v1.nwor", "vllm.v1.nwor.config"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.startswith("vllm.v1.nwor"), error
    else:
        raise AssertionError(name)
before = len(sys.meta_path)
vllm_nwor.plugin.register()
vllm_nwor.plugin.register()
assert len(sys.meta_path) == before + 1
import vllm.v1.nwor
import vllm.v1.nwor.config as config
from vllm.v1.nwor.hooks import _wrap
assert vllm.v1.nwor is vllm_nwor
assert config is vllm_nwor.config
assert _wrap is sys.modules["vllm_nwor.hooks._wrap"]
for module in (vllm_nwor, config, _wrap):
    assert module.__spec__.name == module.__name__, module.__spec__
    assert module.__spec__.loader is module.__loader__
    assert module.__name__.startswith("vllm_nwor")
assert importlib.reload(config) is config
try:
    import vllm.v1.nwor.none_such
except ModuleNotFoundError as error:
    assert "none_such" in str(error), error
assert "vllm.v1.nwor.none_such" not in sys.modules
print("RESULT {}")
"""


def test_the_name_in_vllm_gives_the_same_modules_once_registered():
    result_of(ALIAS)


LEFT_OUT = """
import json, os, sys
import vllm.plugins
from vllm.platforms import current_platform
os.environ["VLLM_NWOR_MODE"] = "stage"
found = {}
for plugins in ("", "other", "other,nwor"):
    os.environ["VLLM_PLUGINS"] = plugins
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    try:
        current_platform.validate_environ(hard_fail=True)
        said = None
    except ValueError as error:
        said = str(error)
    found[plugins] = ["vllm_nwor" in sys.modules, said]
print("RESULT " + json.dumps(found))
"""


def test_what_vllm_does_where_its_list_of_plugins_leaves_us_out():
    """As docs/variables.md says it."""
    warning = "Unknown vLLM environment variable detected: VLLM_NWOR_MODE"
    assert result_of(LEFT_OUT) == {
        "": [False, warning],
        "other": [False, warning],
        "other,nwor": [True, None],
    }
    document = Path(__file__).resolve().parents[2] / "docs" / "variables.md"
    assert warning in document.read_text()


MODULE = "vllm.v1.worker.gpu_model_runner"
MISMATCH = (
    f"{MODULE}.GPUModelRunner.initialize_kv_cache has parameters (self, config); "
    "expected it to begin with (self, kv_cache_config, is_profiling)"
)


@pytest.mark.parametrize("strict", ["0", "1"])
def test_an_unknown_signature_is_refused_by_name_and_nothing_is_wrapped(
    strict, monkeypatch
):
    monkeypatch.setenv("VLLM_NWOR_STRICT", strict)
    host = ModuleType(MODULE)

    class GPUModelRunner:
        def get_kv_cache_spec(self): ...

        def initialize_kv_cache(self, config): ...

        def execute_model(self, scheduler_output): ...

    host.GPUModelRunner = GPUModelRunner
    before = dict(vars(GPUModelRunner))
    install = plugin._guarded(plugin.HOOKS[MODULE])

    with nwor_log() as lines:
        if strict == "1":
            with pytest.raises(HostMismatch) as error:
                install(host)
            assert str(error.value) == MISMATCH
        else:
            install(host)

    assert lines == (
        [] if strict == "1" else [f"ERROR NWOR is off for {MODULE}: {MISMATCH}"]
    )
    assert dict(vars(GPUModelRunner)) == before
