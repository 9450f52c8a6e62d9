# SPDX-License-Identifier: Apache-2.0
"""Faults inside vLLM's worker processes, between log and commit.

A server started with `--worker-extension-cls NAME` has these methods on each worker;
its development endpoint /collective_rpc calls them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

NAME = "tests.helpers.worker_faults.WorkerFaults"
MARK = "injected between log and commit"
# Names of methods below: where the next verification step ends.
POINTS = ("kill_in_forward", "kill_in_sampler", "raise_in_forward", "raise_in_sampler")


class WorkerFaults:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def kill_in_forward(self) -> None:
        self._once_logged(self.model_runner.get_model(), _kill)

    def kill_in_sampler(self) -> None:
        self._once_logged(self.model_runner.rejection_sampler, _kill)

    def raise_in_forward(self) -> None:
        self._once_logged(self.model_runner.get_model(), _raise)

    def raise_in_sampler(self) -> None:
        self._once_logged(self.model_runner.rejection_sampler, _raise)

    def _once_logged(self, module: Any, fault: Any) -> None:
        """`module`, called while a log is there, ends in `fault`."""
        manager = self.model_runner.nwor_state.manager

        def hook(*args: Any) -> None:
            if manager.state.value == "logged":
                print(MARK, file=sys.stderr, flush=True)
                fault()

        module.register_forward_pre_hook(hook)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError(MARK)
