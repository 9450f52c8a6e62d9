# SPDX-License-Identifier: Apache-2.0
"""python -m vllm_nwor.doctor: would NWOR work here? For bug reports.

It reads vLLM's version, and everything NWOR relies on, from vLLM's source. Only a child
process imports vLLM and loads its plugins, as each process of vLLM does. So a missing
or broken vLLM is one more line of the report. A child process has --timeout seconds;
nothing else waits. CUDA is initialized in a child process only, where there are GPUs.

Exit status: 1 if something would not work; the lines of such problems begin with "!".
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata as metadata
import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .config import AUDIT, ENV_NAMES, MODE, NworConfig, NworConfigError
from .hooks.versions import VERSIONS
from .plugin import used_package

if TYPE_CHECKING:
    from . import ops

# (whether it is fine, the topic, the text)
Line = tuple[bool, str, str]

RUNNERS = {
    "runner_v1": "vllm/v1/worker/gpu_model_runner.py",
    "runner_v2": "vllm/v1/worker/gpu/model_runner.py",
}
# For a process that imports vLLM; on a busy machine that takes a minute.
TIMEOUT_S = 300
# register() makes the variables known to vLLM, in every mode.
NOT_LOADED = "not loaded"
CHILD = f"""
from vllm import envs, plugins
plugins.load_general_plugins()
is_loaded = "VLLM_NWOR_MODE" in envs.environment_variables
if is_loaded:
    from {__package__}.config import NworConfig
print(NworConfig.from_env().mode.value if is_loaded else "{NOT_LOADED}")
"""
# The version of CUDA that the driver is for, and the GPUs' compute capabilities.
GPUS = """
import ctypes, torch
gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
driver = ctypes.c_int()
if gpus:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
print(driver.value, *(major * 10 + minor for major, minor in gpus))
"""


def versions(vllm: Path | None) -> Iterator[Line]:
    yield True, "vllm-nwor", f"{__version__}, {Path(__file__).parent}"
    if vllm is None:
        yield False, "vllm", "not installed, or only an empty folder of that name"
    else:
        file = vllm / "_version.py"  # a distribution may have any name
        text = file.read_text() if file.is_file() else ""
        found = re.search(r"^__version__.*?['\"]([^'\"]+)", text, re.MULTILINE)
        version = found[1] if found else "unknown"
        is_tried = version.split("+")[0] in VERSIONS
        tried = "" if is_tried else f" (tried: {', '.join(VERSIONS)})"
        yield True, "vllm", f"{version}{tried}, {vllm}"
    is_forks = __package__ == "vllm.v1.nwor"  # a fork needs no import hooks
    for name in ("torch",) if is_forks else ("torch", "wrapt"):
        try:
            yield True, name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield False, name, "not installed"
    yield True, "python", f"{platform.python_version()}, {platform.platform()}"


def library(device: str | None, timeout_s: float = TIMEOUT_S) -> Iterator[Line]:
    """device: "cpu", "cuda", or None for a guess from torch and this machine."""
    try:
        import torch

        from . import ops

        has_gpu = Path("/dev/nvidiactl").exists() and torch.version.cuda
        device = device or ("cuda" if has_gpu else "cpu")
        loaded = ops.load(device)
        build = ops.CudaBuild.of(loaded) if ops.has_cuda() else None
    except (ImportError, OSError, RuntimeError) as error:
        yield False, "library", str(error)
        return
    has = f"has {build}" if build else "has no CUDA code"
    yield True, "library", f"loads for {device}; {has}, {ops.LIBRARY}"
    if device == "cuda" and build:
        yield from gpus(build, timeout_s)


def gpus(build: ops.CudaBuild, timeout_s: float) -> Iterator[Line]:
    """Can the GPUs run the library's code? A child process asks CUDA."""
    status, output = run_child(GPUS, timeout_s)
    if status != 0:
        yield False, "gpu", f"torch cannot list the GPUs: {output[-1]}"
        return
    driver, *found = map(int, output[-1].split())
    if found and driver < 1000 * int(build.cuda.split(".")[0]):
        has = f"the driver is one for CUDA {driver // 1000}.{driver % 1000 // 10}"
        yield False, "gpu", f"{has}, and the library has {build}"
    for capability in sorted({divmod(one, 10) for one in found}):
        if problem := build.refusal(capability):
            yield False, "gpu", problem


def run_child(code: str, timeout_s: float) -> tuple[int | None, list[str]]:
    """Runs a Python program: its exit status, None if it took too long, and all lines
    that it wrote, at least one."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None, [f"took {timeout_s:g} s and was ended; --timeout sets the limit"]
    return done.returncode, done.stdout.splitlines() or ["without output"]


def bad_values() -> tuple[str, ...]:
    """A sentence for each variable with a value that stops vLLM."""
    try:
        NworConfig.from_env(looks_at_files=True)
    except NworConfigError as error:
        return error.problems
    return ()


def variables() -> Iterator[Line]:
    bad = bad_values()
    yield from ((False, "variable", problem) for problem in bad)
    for name in sorted(os.environ):
        meant = difflib.get_close_matches(name, ENV_NAMES, 1, 0.85)
        if name in ENV_NAMES:
            if not any(problem.startswith(f"{name}=") for problem in bad):
                yield True, "variable", f"{name}={os.environ[name]}"
        elif meant or name.startswith("VLLM_NWOR"):
            hint = f"; did you mean {meant[0]}?" if meant else ""
            yield False, "variable", f"{name}: unknown variable{hint}"


def processes(timeout_s: float = TIMEOUT_S) -> Iterator[Line]:
    """Starts a process that loads plugins as vLLM's do, and reports what it sees."""
    if bad_values():
        yield True, "plugin", "not tried: with the values above vLLM does not start"
        return
    status, (*output, last) = run_child(CHILD, timeout_s)
    if status is None:
        text = "a process that imports vLLM and loads its plugins"
        yield False, "plugin", f"{text} {last}"
        return
    if status != 0:
        yield False, "plugin", f"a process of vLLM does not start: {last}"
        return
    if last != NOT_LOADED:
        yield True, "plugin", "vLLM loads it in each of its processes"
        where = "in all processes of a vLLM that is started from here"
        others = "other nodes (Ray, headless) read variables of their own"
        yield True, "mode", f"{last}, {where}; {others}"
        return
    if not metadata.entry_points(group="vllm.general_plugins", name="nwor"):
        reason = "its entry point is not installed"
    elif "nwor" not in os.environ.get("VLLM_PLUGINS", "nwor").split(","):
        reason = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r}"
    else:
        reason = "; ".join(line for line in output if "rror" in line)
    # Unchecked: bad values were reported above.
    mode, audit = (os.environ.get(name) or "off" for name in (MODE, AUDIT))
    is_fine = mode == audit == "off"
    yield is_fine, "plugin", f"{NOT_LOADED} by vLLM: {reason}"
    yield is_fine, "mode", f"off in all processes, because of that ({mode} is set)"


def hooks(vllm: Path) -> Iterator[Line]:
    try:
        from .hooks.facts import FACTS, mismatches
        from .hooks.source import Tree, files_of

        tree = Tree(files_of(vllm.parent))
        gone = [name for name, path in RUNNERS.items() if tree.read(path) is None]
        fine = []
        for module in FACTS:
            problems = mismatches(module, tree)
            if gone == [module]:  # one of the two runners is enough
                text = "not needed: this vLLM does not have that model runner"
                yield True, "hooks", f"{module}: {text}"
            elif problems:
                yield from ((False, "hooks", f"{module}: {line}") for line in problems)
            else:
                fine.append(module)
        if fine:
            text = "vLLM has every function and attribute that they use"
            yield True, "hooks", f"{', '.join(fine)}: {text}"
    except (ImportError, OSError, ValueError, SyntaxError) as error:
        yield False, "hooks", f"vLLM's source cannot be compared: {error}"


def main() -> int:
    if (used := used_package()) != __package__:
        return int(import_module(f"{used}.doctor").main())
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.doctor")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a guess")
    text = f"seconds for the process that imports vLLM ({TIMEOUT_S})"
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help=text)
    options = parser.parse_args()
    spec = importlib.util.find_spec("vllm")
    vllm = Path(spec.origin).parent if spec is not None and spec.origin else None
    parts = [versions(vllm), library(options.device, options.timeout), variables()]
    if vllm is not None:
        parts += [processes(options.timeout), hooks(vllm)]
    num_problems = 0
    for is_fine, topic, text in itertools.chain(*parts):
        print(f"{' ' if is_fine else '!'} {topic:<10} {text}", flush=True)
        num_problems += not is_fine
    if num_problems:
        print('Lines that begin with "!" say what has to change before NWOR works.')
    print(f"problems: {num_problems}")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
