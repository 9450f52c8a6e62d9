# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_run.sh, which runs all on a GPU's host: nothing is lost."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one Python file, and the script."""
    folder = tmp_path / "checkout"
    for name in ("vllm/v1/nwor", "tools", "dist"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm/v1/nwor/window.py").write_text("DRAFTS = 4\n")
    shutil.copy(ROOT / "tools" / "gpu_run.sh", folder / "tools")
    return folder


def gpu_run(checkout: Path, *steps: str, python: str) -> tuple[int, str]:
    """Runs steps with a shell script for Python: exit status and what was said."""
    program(checkout / "python", f"#!/bin/sh\n{python}\n")
    env = {"PYTHON": str(checkout / "python"), "TMPDIR": str(checkout)}
    env["PATH"] = f"{checkout}:{os.environ['PATH']}"
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    command = [checkout / "tools/gpu_run.sh", *steps]
    done = subprocess.run(command, env=env, stderr=subprocess.STDOUT, **options)
    return done.returncode, done.stdout


def test_a_gpu_host_gets_the_wheel_of_this_checkout_or_none(checkout):
    """pip does nothing here, and fails."""
    asks_pip = '[ "$2" = pip ] && { echo "asked: $*"; exit 1; }'
    python = f'{asks_pip}\nexec {shlex.quote(sys.executable)} "$@"'
    source = checkout / "vllm/v1/nwor/window.py"
    for number in (1, 2):
        wheel = checkout / f"dist/vllm_nwor-{number}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(source, "vllm_nwor/window.py")
            archive.writestr("vllm_nwor/_nwor_C.so", b"not looked at")
    status, said = gpu_run(checkout, "build", python=python)
    assert (status, "asked" in said) == (1, False)
    assert "dist/ has 2 wheels; expected one" in said
    wheel.unlink()
    status, said = gpu_run(checkout, "build", python=python)
    assert status == 1
    assert "--force-reinstall dist/vllm_nwor-1-py3-none-any.whl" in said
    source.write_text("DRAFTS = 5\n")
    status, said = gpu_run(checkout, "build", python=python)
    assert (status, "asked" in said) == (1, False)
    assert "window.py differ" in said
    assert "is not of this checkout (make wheel)" in said


STEPS = "build kernels engines sync layouts sleep audit poison offload parallel ray "
STEPS += "bench-kernels host-profile bench soak"
FAILING = """case "$*" in
*BUDGETED*) echo cell-1 cell-2 ;;
*find_model*) echo /target && echo /head ;;
*) exit 1 ;;
esac"""


def test_no_failure_of_a_step_is_lost_and_none_ends_the_others(checkout):
    status, said = gpu_run(checkout, *STEPS.split(), python=FAILING)
    assert (status, said.splitlines()[-1]) == (1, f"== failed: {STEPS}")
    status, said = gpu_run(checkout, *STEPS.split(), python="echo a; echo b")
    assert (status, said.splitlines()[-1]) == (0, "== failed: none")


@pytest.mark.parametrize(
    ("planted", "checked", "python", "status"),
    [(9, 0, "", 0), (0, 0, "", 1), (9, 1, "", 1), (9, 0, "exit 1", 1)],
)
def test_a_sanitizer_step_that_proves_nothing_fails(
    planted, checked, python, status, checkout
):
    """It does not see the planted overrun, it finds something, or that is not kept."""
    sanitizer = f'#!/bin/sh\n[ -n "$NWOR_PLANTED" ] && exit {planted}\nexit {checked}\n'
    program(checkout / "compute-sanitizer", sanitizer)
    assert gpu_run(checkout, "sanitizer", "memcheck", python=python)[0] == status
