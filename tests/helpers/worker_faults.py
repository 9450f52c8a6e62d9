# SPDX-License-Identifier: Apache-2.0
"""Faults inside vLLM's worker processes, between log and commit.

A server started with `--worker-extension-cls NAME` has `plant` on each worker; its
development endpoint /collective_rpc calls it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

NAME = "tests.helpers.worker_faults.WorkerFaults"
MARK = "injected between log and commit"
# Where the next verification step ends, and how.
POINTS = ("kill_in_forward", "kill_in_sampler", "raise_in_forward", "raise_in_sampler")


class WorkerFaults:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def plant(self, where: str) -> None:
        runner = self.model_runner
        is_forward = where.endswith("forward")
        module = runner.get_model() if is_forward else runner.rejection_sampler

        def hook(*args: Any) -> None:
            if runner.nwor_state.manager.state.value == "logged":
                print(MARK, file=sys.stderr, flush=True)
                if where.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(MARK)

        module.register_forward_pre_hook(hook)
