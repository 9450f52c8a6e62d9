#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the container images without a container engine, and runs the CPU's.

The images' own bases come from registries. This one makes a stand-in for
python:3.11-slim from Debian's packages (mmdebstrap), builds docker/Dockerfile.cpu on it
(buildah, isolation chroot), starts the server with the image's own entry point, user
and variables, asks it for a completion, and reads /metrics.

The stand-in for vllm/vllm-openai is the CPU image without NWOR, with PyPI's nvcc and an
apt repository of one package, the CUDA runtime's headers. docker/Dockerfile is built on
it. That proves its stages: what they copy, compile, install and check. It proves
nothing of vLLM's official image, and nothing runs on a GPU.

Needs root, buildah and mmdebstrap; pip's settings (PIP_*) hold in the builds, too.
Images are kept until the end only: 25 GB. Exit status: 0 both are fine, 1 one is not,
2 what it needs is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import environment, records  # noqa: E402

from tools.setup.make_models import model_path  # noqa: E402
from tools.setup.setup_env import uv_environment  # noqa: E402
from tools.soak.server import ServerError, free_port, read_metrics, serving  # noqa: E402

STORAGE = ROOT / "build" / "images"
BUILDAH = ("buildah", "--storage-driver", "vfs")
BUILDAH += ("--root", f"{STORAGE}/root", "--runroot", f"{STORAGE}/run")
# What python:3.11-slim has, and Debian's Python forbids: pip for the whole system.
MMDEBSTRAP = ("mmdebstrap", "--quiet", "--variant=minbase", "bookworm")
MMDEBSTRAP += ("--include=ca-certificates,python3-dev,python3-pip",)
MMDEBSTRAP += ('--customize-hook=rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',)
CPU, GPU, MODEL = "localhost/vllm-nwor:cpu", "localhost/vllm-nwor:gpu", "smollm2-135m"
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}
SPECULATION |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
START_SECONDS = 300
# Settings of pip and uv.
NAMES = ("PIP_", "UV_", "SSL_CERT_FILE")
PROMPT = "one two three four one two three four one two"
# nvcc, and in a package for apt what docker/Dockerfile adds to it.
STAND_IN = f"""\
FROM {CPU}
USER root
COPY requirements/nvcc.txt /tmp
ENV CUDA_VERSION=13.0.2 PATH=/usr/local/cuda/bin:$PATH
RUN python3 -m pip uninstall -q -y vllm-nwor wrapt \\
    && grep runtime /tmp/nvcc.txt >/tmp/runtime.txt \\
    && sed -i /runtime/d /tmp/nvcc.txt \\
    && python3 -m pip install -q --no-deps --target /tmp/nvcc -r /tmp/nvcc.txt \\
    && python3 -m pip install -q --no-deps --target /tmp/runtime -r /tmp/runtime.txt \\
    && mkdir -p /tmp/deb/usr/local /tmp/deb/DEBIAN /opt/apt \\
    && mv /tmp/nvcc/nvidia/cu13 /usr/local/cuda \\
    && mv /tmp/runtime/nvidia/cu13 /tmp/deb/usr/local/cuda \\
    && ln -s lib /usr/local/cuda/lib64 \\
    && printf '%s\\n' 'Package: cuda-cudart-dev-13-0' 'Version: 13.0' \\
        'Architecture: all' 'Maintainer: none' 'Description: stand-in' \\
        >/tmp/deb/DEBIAN/control \\
    && dpkg-deb -Znone -b /tmp/deb /opt/apt/cudart.deb \\
    && (cat /tmp/deb/DEBIAN/control; echo Filename: ./cudart.deb; \\
        stat -c 'Size: %s' /opt/apt/cudart.deb; \\
        echo "SHA256: $(sha256sum </opt/apt/cudart.deb | cut -d' ' -f1)") \\
        >/opt/apt/Packages \\
    && echo 'deb [trusted=yes] file:/opt/apt ./' >/etc/apt/sources.list.d/cuda.list \\
    && rm -r /tmp/deb /tmp/nvcc /tmp/runtime
"""
VERSIONS = (
    "import json, platform; from importlib import metadata\n"
    "found = {d.name: d.version for d in metadata.distributions()}\n"
    f"shown = {{n: found[n] for n in {environment.PACKAGES!r} if n in found}}\n"
    "print(json.dumps({**shown, 'python': platform.python_version()}))"
)


def run(*command: str, **options: Any) -> str:
    """Runs a command and returns what it prints; CalledProcessError if it fails."""
    print("image:", *command[:1], *command[len(BUILDAH) : len(BUILDAH) + 6], flush=True)
    options = {"stdout": subprocess.PIPE, **options}
    done = subprocess.run(command, check=True, text=True, **options)
    return (done.stdout or "").strip()


buildah = partial(run, *BUILDAH)


def settings() -> tuple[dict[str, str], list[str]]:
    """pip's settings, also by uv's names, and options of buildah that mount the files
    and folders that they name."""
    found = {k: v for k, v in os.environ.items() if k.startswith(NAMES)}
    found |= uv_environment()
    paths = {p for v in found.values() for p in v.replace(",", " ").split()}
    mounts = (f"--volume={p}:{p}:ro" for p in sorted(paths) if Path(p).is_absolute())
    return found, list(mounts)


def make_base() -> str:
    """Makes the stand-in for python:3.11-slim; returns its name."""
    archive = STORAGE / "base.tar"
    run(*MMDEBSTRAP, str(archive))
    container = buildah("from", "scratch")
    buildah("add", "-q", container, str(archive), "/")
    variables = [f"--env={k}={v}" for k, v in settings()[0].items()]
    buildah("config", *variables, container)
    buildah("commit", "-q", container, "localhost/base")
    return "localhost/base"


def build(file: str, tag: str, *arguments: str, **options: Any) -> float:
    """Builds an image; returns how many seconds it took."""
    started = time.monotonic()
    command = ["bud", "--pull-never", "--isolation=chroot", "--format=docker"]
    command += [*settings()[1], *(f"--build-arg={one}" for one in arguments)]
    buildah(*command, "-f", file, "-t", tag, str(ROOT), stdout=None, **options)
    return time.monotonic() - started


def inspect(image: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A container of the image, the image's configuration, and what a result says of
    it."""
    container = buildah("from", "--pull-never", image)
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    size = run("du", "-sxm", buildah("mount", container)).split()[0]
    versions = json.loads(in_container(container, "python3", "-c", VERSIONS))
    found = {"mib": int(size), "user": in_container(container, "id", "-u")}
    return container, config, {**found, "versions": versions}


def in_container(container: str, *command: str) -> str:
    """Runs a command as the image's user, with its variables; returns the output."""
    return buildah("run", "--isolation=chroot", container, "--", *command)


def serve(container: str, config: dict[str, Any]) -> dict[str, Any]:
    """Runs the image's server; returns what it answered and counted."""
    buildah("add", "-q", "--chown=2000:0", container, str(model_path(MODEL)), "/model")
    port, log = free_port(), STORAGE / "server.log"
    command = [*BUILDAH, "run", "--isolation=chroot", "--env=VLLM_CPU_KVCACHE_SPACE=1"]
    command += [container, "--", *config["Entrypoint"], "--model=/model"]
    command += ["--served-model-name=demo", "--enforce-eager", "--max-model-len=1024"]
    command += ["--max-num-seqs=4", f"--speculative-config={json.dumps(SPECULATION)}"]
    ask = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    with serving(command, port, os.environ, log, START_SECONDS):
        seconds = time.monotonic() - started
        answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=120)
        found = read_metrics(url)
    usage = answer.raise_for_status().json()["usage"]
    return {
        "start_seconds": seconds,
        "num_tokens": usage["completion_tokens"],
        "resolved": [group["resolved"] for group in found["info"]],
        "counters": {k: v for k, v in found["metrics"].items() if "nwor" in k},
    }


def outcome(found: dict[str, Any]) -> tuple[bool, str]:
    """Whether what `check` found is as documented, and in words what it is."""
    if found["user"] != "2000":
        return False, f"user {found['user']}, not 2000"
    if "counters" not in found:
        return True, "built"
    of = {name.removeprefix("vllm:nwor_"): n for name, n in found["counters"].items()}
    is_right = found["resolved"] == ["stage"] and of["committed_tokens"] > 0
    is_right = is_right and not of["fallbacks"] and not of["breaches"]
    return is_right, "served" if is_right else f"served, and {found['resolved']}, {of}"


def check(device: str) -> dict[str, Any]:
    """Builds an image and runs it; returns what a result says of it."""
    if device == "cpu":
        base, file, more = make_base(), "docker/Dockerfile.cpu", ["TORCH_BACKEND="]
    else:
        base, file, more = "localhost/gpu-base", "docker/Dockerfile", []
        build("-", base, input=STAND_IN)
    tag = f"localhost/vllm-nwor:{device}"
    seconds = build(file, tag, f"BASE_IMAGE={base}", *more)
    container, config, found = inspect(tag)
    found["build_seconds"] = seconds
    if device == "cpu":
        found |= serve(container, config)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to append a line an image to")
    args = parser.parse_args(argv)
    missing = [one for one in ("buildah", "mmdebstrap") if shutil.which(one) is None]
    if missing or os.geteuid() != 0:
        needs = " and ".join(missing) or "root"
        print(f"image: needs {needs}: apt-get install buildah mmdebstrap; as root")
        return 2
    adopt_orphans()
    remove()
    STORAGE.mkdir(parents=True)
    status, about = 0, environment.describe("cpu", ROOT)
    try:
        for device in ("cpu", "gpu"):
            found = check(device)
            is_right, found["outcome"] = outcome(found)
            status |= not is_right
            print(json.dumps(found, indent=1))
            about["versions"] = found.pop("versions")
            key = {"case": "images", "image": device, "vllm": records.vllm(about)}
            line = {"key": key, **about, "command": "make image-check", "found": found}
            if args.json:
                records.append(args.json, line)
    except (subprocess.CalledProcessError, ServerError, httpx.HTTPError) as error:
        print(f"image: {error}", file=sys.stderr)
        status = 1
    finally:
        end_orphans()
        remove()
    return status


def adopt_orphans() -> None:
    """Processes whose parents end are this one's from now on (PR_SET_CHILD_SUBREAPER):
    `buildah run` ends without those that the container's first one has started."""
    ctypes.CDLL(None).prctl(36, 1)


def end_orphans() -> None:
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children)


def remove() -> None:
    """Removes the images and what they were made from."""
    if STORAGE.exists():
        buildah("unmount", "-a")
        shutil.rmtree(STORAGE)


if __name__ == "__main__":
    sys.exit(main())
