# SPDX-License-Identifier: Apache-2.0
"""The byte oracle, the scripted drafter and faults inside vLLM's worker processes.

An engine built with `worker_extension_cls=NAME` has these methods on each worker;
`collective_rpc` calls them on all ranks and returns a list of their results. A server
has a development endpoint for it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.watch import OracleExtension
from tests.helpers import drafters

NAME = "tests.helpers.worker_probe.WorkerProbe"
PLANTED = "injected between log and commit"


class WorkerProbe(OracleExtension):
    """Mixed into vLLM's worker class."""

    def script(self, truth: Mapping[str, Sequence[int]], plan: str) -> None:
        """Drafts by the function of that name in drafters.py."""
        drafter = drafters.ScriptedDrafter(truth, getattr(drafters, plan))
        drafter.attach(self.model_runner)

    def audit_totals(self) -> dict[str, int]:
        """What this rank's audit compared so far."""
        totals: dict[str, int] = self.model_runner.nwor_audit.audit.totals()
        return totals

    def plant(self, how: str, where: str) -> None:
        """The next verification step ends between log and commit, in the forward or the
        sampler: the process is killed, or an error raised."""
        runner = self.model_runner
        module = runner.get_model() if where == "forward" else runner.rejection_sampler

        def hook(*args: Any) -> None:
            if runner.nwor_state.manager.state.value == "logged":
                print(PLANTED, file=sys.stderr, flush=True)
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(PLANTED)

        module.register_forward_pre_hook(hook)
