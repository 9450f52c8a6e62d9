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

import torch

from tests.helpers import drafters
from tests.helpers.oracle import ShadowOracle, SnapshotOracle
from tests.helpers.runner_probe import RunnerProbe, target_layers

NAME = "tests.helpers.worker_probe.WorkerProbe"
PLANTED = "injected between log and commit"


class WorkerProbe:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def script(self, truth: Mapping[str, Sequence[int]], plan: str) -> None:
        """Drafts by the function of that name in drafters.py."""
        drafter = drafters.ScriptedDrafter(truth, getattr(drafters, plan))
        drafter.attach(self.model_runner)

    def watch(self) -> None:
        """Poisons this rank's caches and starts the oracle."""
        probe = RunnerProbe(self.model_runner)
        probe.poison()
        if (audit := self.model_runner.__dict__.get("nwor_audit")) is not None:
            audit.audit.forget_cache()
        self.nwor_probe = probe
        state = self.model_runner.__dict__.get("nwor_state")
        is_staged = state is not None and state.manager.shadow is not None
        self.nwor_oracle = (ShadowOracle if is_staged else SnapshotOracle)(probe)
        probe.observers = [self.nwor_oracle]

    def report(self) -> dict[str, Any]:
        """What the oracle saw since `watch`; the state NWOR is in on this rank."""
        oracle = self.nwor_oracle
        state = self.model_runner.__dict__.get("nwor_state")
        manager = None if state is None else state.manager
        steps = self.nwor_probe.steps
        return {
            "violations": [repr(violation) for violation in oracle.violations],
            "num_dirty": oracle.num_dirty,
            "num_staged": oracle.num_staged,
            "schedule": [(s.scheduled, s.drafted, s.accepted) for s in steps],
            "active": manager is not None and not manager.fallbacks,
            "counters": None if manager is None else manager.counters.tolist(),
        }

    def audit_totals(self) -> dict[str, int]:
        """What this rank's audit compared so far."""
        totals: dict[str, int] = self.model_runner.nwor_audit.audit.totals()
        return totals

    def scribble(self, rank: int, at: int) -> None:
        """On that rank a bit of the first request's first token changes behind step
        number `at` from now."""
        runner = self.model_runner
        if runner.vllm_config.parallel_config.rank != rank:
            return
        sample_tokens = runner.sample_tokens
        left = [at]

        def scribbling(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                (layer, *_) = target_layers(runner).values()
                block = int(runner.input_batch.block_table[0].block_table.np[0, 0])
                layer.kv_cache.view(torch.uint8)[block, 0, 0, 0] ^= 1
            return output

        runner.sample_tokens = scribbling

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
