# SPDX-License-Identifier: Apache-2.0
"""The shell scripts: the container's shell, and what runs on a GPU's host.

No container engine is needed: the container's shell shows what it would run.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEV_SHELL = ROOT / "tools" / "docker_dev_shell.sh"


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """With nothing of our environment."""
    return subprocess.run(
        [str(part) for part in command],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_scripts_can_be_run_as_they_are():
    listed = run("git", "-C", ROOT, "ls-files", ".ci/run", "*.sh", **os.environ).stdout
    assert "tools/docker_dev_shell.sh" in listed
    for path in (ROOT / name for name in listed.split()):
        assert os.access(path, os.X_OK), path
        assert path.read_text().startswith("#!"), path


# --- docker_dev_shell.sh ---


@pytest.fixture
def shell(tmp_path):
    """Runs the shell, dry, on a host with bash's tools and a GPU or none; the words of
    the commands that it shows."""
    for name in ("bash", "dirname", "env", "id", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))

    def run_shell(*arguments, gpu=False):
        program(tmp_path / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")
        done = run("bash", DEV_SHELL, "--dry-run", *arguments, PATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return [shlex.split(line)[1:] for line in done.stdout.splitlines()]

    return run_shell


@pytest.mark.parametrize(
    ("device", "dockerfile"), [("cpu", "Dockerfile.cpu"), ("gpu", "Dockerfile")]
)
def test_shell_is_of_the_image_for_this_machine(shell, device, dockerfile):
    """As oneself; its volumes have a place in the image (test_docker.py)."""
    build, run = shell(gpu=device == "gpu")
    assert build[0] == "build"
    assert {f"{ROOT}/docker/{dockerfile}", f"vllm-nwor:dev-{device}"} < set(build)
    assert run[0] == "run"
    assert ("--gpus" in run) is (device == "gpu")
    assert run[run.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert f"type=bind,source={ROOT},target=/src" in run
    assert f"type=volume,source=vllm-nwor-venv-{device},target=/src/.venv" in run
    assert run[-2:] == [f"vllm-nwor:dev-{device}", "bash"]


def test_a_command_of_several_words_arrives_as_it_was(shell):
    words = ["echo", "a b", "$HOME", "--dry-run"]
    _, run = shell("--device", "gpu", "--", *words)
    assert run[-5:] == ["vllm-nwor:dev-gpu", *words]


# --- gpu_run.sh -----------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one Python file, and the script."""
    folder = tmp_path / "checkout"
    for name in ("vllm/v1/nwor", "tools", "dist"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm/v1/nwor/window.py").write_text("DRAFTS = 4\n")
    shutil.copy(ROOT / "tools" / "gpu_run.sh", folder / "tools")
    return folder


def pack(checkout: Path, name: str) -> None:
    with zipfile.ZipFile(checkout / "dist" / name, "w") as wheel:
        source = checkout / "vllm/v1/nwor/window.py"
        wheel.write(source, "vllm_nwor/window.py")
        wheel.writestr("vllm_nwor/_nwor_C.so", b"not looked at")


def gpu_run(checkout: Path, *steps: str, python: str, **env: str) -> tuple[int, str]:
    """Runs steps with a shell script for Python: exit status and what was said."""
    program(checkout / "python", f"#!/bin/sh\n{python}\n")
    done = run(
        *(checkout / "tools/gpu_run.sh", *steps),
        PATH=f"{checkout}:{os.environ['PATH']}",
        PYTHON=str(checkout / "python"),
        TMPDIR=str(checkout),
        **env,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_gpu_host_gets_the_wheel_of_this_checkout_or_none(checkout):
    """pip does nothing here, and fails."""
    asks_pip = '[ "$2" = pip ] && { echo "asked: $*"; exit 1; }'
    python = f'{asks_pip}\nexec {shlex.quote(sys.executable)} "$@"'

    def build() -> str:
        status, said = gpu_run(checkout, "build", python=python)
        assert status == 1
        return said

    wheel = "dist/vllm_nwor-1-py3-none-any.whl"
    pack(checkout, Path(wheel).name)
    said = build()
    assert f"installing {wheel}" in said
    assert "asked: -m pip install" in said
    assert f"--force-reinstall {wheel}" in said

    pack(checkout, "vllm_nwor-2-py3-none-any.whl")
    said = build()
    assert "dist/ has 2 wheels; expected one" in said
    assert "asked" not in said

    (checkout / "dist/vllm_nwor-2-py3-none-any.whl").unlink()
    (checkout / "vllm/v1/nwor/window.py").write_text("DRAFTS = 5\n")
    said = build()
    assert "window.py differ" in said
    assert "is not of this checkout (make wheel)" in said
    assert "asked" not in said


# Notes its arguments, and answers what gpu_run.sh asks it for.
NOTING = """case "$*" in
*BUDGETED*) echo cell-1 cell-2 ;;
*settings.find_model*) echo /target && echo /head ;;
*) echo "asked: $(echo "$*" | tr -s ' \\n' ' ')" ;;
esac"""
RUN = "asked: -m pytest -q -p no:cacheprovider --tb=short "
MATRIX = f"{RUN}-s tests/gpu/test_engine_matrix.py -k test_"
SOAK = "asked: tools/soak/soak.py --model /target"
STEPS = {
    "build": [
        "asked: -m pip install --no-index --no-deps --no-build-isolation "
        "--disable-pip-version-check --force-reinstall .",
        "asked: -m vllm_nwor.doctor --device cuda",
    ],
    "kernels -x": [f"{RUN}tests/kernels -k cuda or gpu --durations=5 -x"],
    "engines": [f"{MATRIX}matrix", f"{MATRIX}why or test_a_missed"],
    "engines a b": [f"{MATRIX}matrix and (a- or b-)"],
    "parallel ray": [f"{MATRIX}two_ranks", f"{MATRIX}ray"],
    "sync a b": [f"{RUN}-s tests/gpu/test_no_sync.py -k test_ and (a] or b])"],
    "layouts": [f"{RUN}-s tests/gpu/test_layouts.py -k test_"],
    "audit": [f"{RUN}-s tests/gpu/test_audit.py -k test_"],
    "poison a": [f"{RUN}-s tests/gpu/test_poison.py -k test_ and (a])"],
    "offload": [f"{RUN}-s tests/gpu/test_offloading.py -k test_"],
    "sleep a": [f"{RUN}-s tests/gpu/test_sleep.py -k test_ and (a] or a-)"],
    "sanitizer memcheck": ["asked: - planted=9 memcheck=0"],
    "bench-kernels --samples 3": [
        "asked: bench_kernels.py --device cuda --json /results/bench_kernels.json "
        "--samples 3"
    ],
    "host-profile c": [
        "asked: tools/gpu/host_profile.py c --json /results/host_profile_c.json"
    ],
    "bench": [
        f"asked: tools/gpu/bench.py cell-{n} --results /results --seconds 70"
        for n in (1, 2)
    ],
    "soak 7 off": [f"{SOAK} --minutes 7 * --mode off --json /results/soak_gpu_off.*"],
    "soak 7 audited": [f"{SOAK} *--mode stage *soak_gpu_audit.*/head*AUDIT=log*"],
}


@pytest.mark.parametrize("steps", STEPS)
def test_each_step_asks_for_its_tests_and_tools(steps, checkout):
    program(checkout / "compute-sanitizer", "#!/bin/sh\nexit ${NWOR_PLANTED:+9}\n")
    folders = {
        "NWOR_RESULTS": str(checkout / "results"),
        "NWOR_WORK": str(checkout / "work"),  # not there yet
    }
    status, said = gpu_run(checkout, *steps.split(), python=NOTING, **folders)
    assert status == 0, said
    lines = said.replace(str(checkout), "").splitlines()
    asked = [line.strip() for line in lines if line.startswith("asked: ")]
    for line, wanted in zip(asked, STEPS[steps], strict=True):
        assert fnmatch.fnmatchcase(line, wanted), line
