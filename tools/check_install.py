#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks, in a process of its own, that a library registers the native ops with torch.

    python tools/check_install.py --library FILE [--device cpu|cuda]

Needs no GPU: --device cuda asks whether there is CUDA code for each op. Prints one
line; the exit status is 1 if something is missing, which the line names. Rebuilt
libraries are checked with it; what is installed, with `python -m vllm_nwor.doctor`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NAMESPACE = "_C_cache_ops"
OPS = (
    "log_cache_slots",
    "restore_rejected_drafts",
    "stage",
    "commit_draft_layer",
    "unstage",
)
DEVICES = ("cpu", "cuda")


class Missing(RuntimeError):
    """What is not there, in a sentence."""


def check_ops(library: Path, device: str) -> None:
    """Raises Missing unless `library` has all OPS for `device` ("cpu" or "cuda")."""
    import torch

    if not library.is_file():
        raise Missing(f"{library} does not exist")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise Missing(f"{library} cannot be loaded: {error}") from error
    namespace = getattr(torch.ops, NAMESPACE)
    absent = [name for name in OPS if not hasattr(namespace, name)]
    if absent:
        names = ", ".join(f"torch.ops.{NAMESPACE}.{name}" for name in absent)
        raise Missing(f"{library} does not register {names}")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = device.upper()
    absent = [name for name in OPS if not has_kernel(f"{NAMESPACE}::{name}", key)]
    if absent:
        raise Missing(f"{library} has no {key} code for {', '.join(absent)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--library", type=Path, required=True, help="this file")
    args = parser.parse_args()
    try:
        check_ops(args.library, args.device)
    except Missing as missing:
        print(f"check: {missing}", file=sys.stderr)
        return 1
    print(f"check: {len(OPS)} ops for {args.device}: all there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
