# SPDX-License-Identifier: Apache-2.0
"""A vLLM that tools/apply_to_vllm.py has patched, at run time: the installed one, as a
tree of links whose changed files are its own, found first on PYTHONPATH. No plugin is
loaded, unless a test says so.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.environment import REPO, run_python
from tools import apply_to_vllm as tool

SITE = Path(pytest.__file__).parents[1]
COUNTED = "Scheduler.make_spec_decoding_stats"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(SITE / "vllm", folder / "vllm", copy_function=os.symlink)
    before = (SITE / "vllm" / "envs.py").read_bytes()
    tool.Graft(folder).apply()
    assert (SITE / "vllm" / "envs.py").read_bytes() == before
    return folder


# Each function that the ledger names -> how many wrappers lie over it once all are on:
# one, but for what is replaced on an object.
ROWS = {
    (module, row.qualname): int(row.qualname != COUNTED)
    for module in tool.MODULES.values()
    for row in tool.rows_of(module)
}
LOOK = f"""
import os, pkgutil, sys
from importlib import import_module
from vllm import envs, plugins
from vllm.v1 import nwor
from vllm.v1.nwor import plugin

def layers():  # how many wrappers, of any copy of the package, lie over each of them
    found = {{}}
    for module, qualname in {list(ROWS)}:
        owner, _, name = qualname.rpartition(".")
        host = import_module(module)
        value = vars(getattr(host, owner) if owner else host)[name]
        found[module, qualname] = 0
        while value.__code__.co_filename.endswith("nwor/base/wrap.py"):
            value = value.__wrapped__
            found[module, qualname] += 1
    return found

"""


def run(tree: Path, code: str, **variables: str) -> list[str]:
    """What it prints in a process of its own that finds that vLLM."""
    paths = os.pathsep.join([str(tree), str(REPO)])
    settings = {"VLLM_PLUGINS": "", "PYTHONPATH": paths, **variables}
    done = run_python("-c", LOOK + code, cwd=tree, timeout=500, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def test_off_is_what_was_there(patched: Path) -> None:
    """Nothing is wrapped, and nothing of ours imported but the readers of the modes;
    what is set later, the plugin sees to."""
    run(
        patched,
        """
assert set(layers().values()) == {0}
ours = {n for n in sys.modules if n.startswith(("vllm.v1.nwor", "vllm_nwor"))}
assert {n.removeprefix("vllm.v1.nwor") for n in ours} == {
    "", ".config", ".plugin"
}, ours
assert envs.environment_variables["VLLM_NWOR_MODE"]() is None
os.environ["VLLM_NWOR_MODE"] = "cow"
del os.environ["VLLM_PLUGINS"]
plugins.load_general_plugins()
assert "vllm_nwor.plugin" in sys.modules
assert max(layers().values()) == 1
""",
    )


def test_the_installed_package_uses_the_modules_of_the_tree(patched: Path) -> None:
    """A callback gets to where the hooks look; the doctor looks at what is used."""
    printed = run(
        patched,
        """
import vllm_nwor.doctor
from vllm.v1.nwor import commits
assert commits.registered == []
registration = vllm_nwor.on_commit(print)
assert commits.registered == [registration]
assert vllm_nwor.Commit is commits.Commit
print("status", vllm_nwor.doctor.main())
""",
        VLLM_NWOR_MODE="cow",
    )
    assert printed[-2:] == ["problems: 0", "status 0"]
    (line,) = (line for line in printed if line.startswith("  vllm-nwor"))
    assert line.endswith(f", {patched / 'vllm' / 'v1' / 'nwor'}")


@pytest.mark.slow
def test_on_all_is_wrapped_once_and_the_byte_oracle_passes_without_the_plugin(
    patched: Path,
) -> None:
    """Taken off and put on again, as what the plugin puts on; modes off, cow and stage
    by the calls in its modules alone, with the library in the tree; then the plugin is
    loaded."""
    printed = run(
        patched,
        f"""
found = layers()
assert found == {ROWS}, found
for one in pkgutil.walk_packages(nwor.__path__, "vllm.v1.nwor."):
    import_module(one.name)
assert "_Alias" not in {{type(finder).__name__ for finder in sys.meta_path}}
assert not [name for name in sys.modules if name.startswith("vllm_nwor")]
from vllm.v1.nwor.base import wrap as _wrap
for _ in range(2):
    _wrap.unhook()
    assert set(layers().values()) == {{0}}
    _wrap.rehook()
    assert layers() == found

before = dict(os.environ)
os.chdir({str(REPO)!r})
sys.path.insert(0, os.getcwd())
from tests.helpers import environment
os.environ.update(environment.VARIABLES)
# The engines of the tests ask the plugin; here it does nothing.
import vllm_nwor.plugin
register, vllm_nwor.plugin.register = vllm_nwor.plugin.register, lambda: None
import pytest
chosen = "bf16 and (vanilla or exact)"
tests = ["tests/integration/test_byte_oracle.py", "-k", chosen]
assert pytest.main([*tests, "-q", "-p", "no:cacheprovider"]) == 0
assert not [name for name in sys.modules if name.startswith("vllm_nwor.hooks")]
from vllm.v1.nwor import ops
assert ops.LIBRARY.is_relative_to({str(patched)!r}), ops.LIBRARY

os.environ.update(before)
register()
assert plugin._registered
assert layers() == found
assert not [name for name in sys.modules if name.startswith("vllm_nwor.hooks")]
assert import_module("vllm.v1.nwor.base.wrap") is _wrap
""",
        VLLM_NWOR_MODE="stage",
        VLLM_NWOR_AUDIT="log",
    )
    assert " 3 passed" in f" {printed[-1]}"
