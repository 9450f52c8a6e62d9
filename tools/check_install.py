#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks, in a process of its own, that the native ops are registered with torch.

    python tools/check_install.py [--device cpu|cuda] [--library FILE] [--plugin]

Without --library it is the library of the installed distribution that is looked at.
Needs no GPU: --device cuda asks whether there is CUDA code for each op. --plugin also
checks that vLLM will find the plugin. Prints one line; the exit status is 1 if
something is missing, which the line names. Built images and rebuilt libraries are
checked with it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

DISTRIBUTION = "vllm-nwor"
LIBRARY = "_nwor_C.so"
NAMESPACE = "_C_cache_ops"
OPS = (
    "log_cache_slots",
    "restore_rejected_drafts",
    "stage",
    "commit_draft_layer",
    "unstage",
)
DEVICES = ("cpu", "cuda")
ENTRY_POINT = ("vllm.general_plugins", "nwor")


class Missing(RuntimeError):
    """What is not there, in a sentence."""


def installed_library() -> Path:
    """The installed distribution's library; vLLM is not imported for it."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"{DISTRIBUTION} is not installed for {sys.executable}") from None
    for file in files:
        if file.name == LIBRARY:
            return Path(str(file.locate()))
    raise Missing(
        f"the installed {DISTRIBUTION} has no {LIBRARY}; where it is installed in "
        "development mode, give --library"
    )


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


def check_plugin() -> None:
    """Raises Missing unless vLLM will find and load the plugin."""
    group, name = ENTRY_POINT
    found = [p for p in importlib.metadata.entry_points(group=group) if p.name == name]
    if not found:
        raise Missing(f"no entry point {name!r} in the group {group}")
    try:
        found[0].load()
    except (ImportError, AttributeError) as error:
        raise Missing(f"entry point {found[0].value} cannot be loaded: {error}") from (
            error
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--library", type=Path, help="this file, installed or not")
    parser.add_argument("--plugin", action="store_true", help="check the plugin, too")
    args = parser.parse_args()
    try:
        check_ops(args.library or installed_library(), args.device)
        if args.plugin:
            check_plugin()
    except Missing as missing:
        print(f"check: {missing}", file=sys.stderr)
        return 1
    what = f"{len(OPS)} ops for {args.device}"
    print(f"check: {what}{' and the plugin' if args.plugin else ''}: all there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
