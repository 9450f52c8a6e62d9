# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: tests import the package from the tree that this file lies in.

Without it a copy of a checkout would be tested with the installed package, which in
development is the checkout itself. tools/mutation_check.py uses it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

PACKAGE = "vllm_nwor"
FOLDER = Path(__file__).resolve().parents[1] / "vllm" / "v1" / "nwor"


class _Finder:
    """Finds PACKAGE in FOLDER, and nothing else."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != PACKAGE:
            return None
        return spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Ends the run if the tests got the package from elsewhere."""
    found = Path(str(importlib.import_module(PACKAGE).__file__))
    if found.parent != FOLDER:
        raise RuntimeError(f"{PACKAGE} came from {found}; expected {FOLDER}")
