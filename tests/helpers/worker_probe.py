# SPDX-License-Identifier: Apache-2.0
"""The byte oracle, the scripted drafter and faults inside vLLM's worker processes.

Engines with `worker_extension_cls=NAME` have these methods on each worker;
`collective_rpc` calls them on all ranks. A server has a development endpoint for it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks.worker_extension import NworWorkerExtension

from tests.helpers.byte_map import allocation, slot_bytes
from tests.helpers.runner_probe import block_tables, cache_layers

NAME = "tests.helpers.worker_probe.WorkerProbe"
# The modules of the classes for `test_oracle`.
ORACLES = {"Watch": "oracle", "Fault": "fault", "Filler": "filler"}
PLANTED = "injected between log and commit"


class OracleExtension(NworWorkerExtension):
    """Mixed into vLLM's worker class."""

    def test_oracle(self, kind: str, method: str, *arguments: Any) -> Any:
        """Calls a method of this worker's Watch, Fault or Filler, created on first
        use."""
        known = self.__dict__.setdefault("_test_oracles", {})
        if kind not in known:
            module = import_module(f"tests.helpers.{ORACLES[kind]}")
            known[kind] = getattr(module, kind)(self.model_runner)
        return getattr(known[kind], method)(*arguments)

    def test_flip_bit(self, rank: int | None = None) -> dict[str, Any] | None:
        """Flips one bit of the second slot of the batch's first request, in the second
        audited layer; returns its place. rank: the only worker to do so, if not
        None."""
        runner = self.model_runner
        if rank not in (None, runner.vllm_config.parallel_config.rank):
            return None
        table = block_tables(runner)[0]
        (group,) = runner.nwor_audit.audit.groups
        slot = int(table[0, 0]) * group.shape.entry_tokens + 1
        name = group.layers[1].name
        layer = cache_layers(runner)[name]
        allocation(layer)[slot_bytes(layer)[slot, 0]] ^= 0x40
        return {"slot": slot, "layer": name}


class WorkerProbe(OracleExtension):
    """Mixed into vLLM's worker class."""

    def script(self, truth: Mapping[str, Sequence[int]], plan: str) -> None:
        """Scripts drafts by the plan of that name in drafters.py."""
        from tests.helpers import drafters

        drafter = drafters.ScriptedDrafter(truth, getattr(drafters, plan))
        drafter.attach(self.model_runner)

    def audit_totals(self) -> dict[str, int]:
        """How much this rank's audit has compared."""
        totals: dict[str, int] = self.model_runner.nwor_audit.audit.totals()
        return totals

    def plant(self, how: str, where: str) -> None:
        """Ends the next verification step between log and commit, in the forward or the
        sampler: kills the process, or raises."""
        runner = self.model_runner
        module = runner.get_model() if where == "forward" else runner.rejection_sampler

        def hook(*args: Any) -> None:
            if runner.nwor_state.manager.state.value == "logged":
                print(PLANTED, file=sys.stderr, flush=True)
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(PLANTED)

        module.register_forward_pre_hook(hook)
