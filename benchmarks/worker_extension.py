# SPDX-License-Identifier: Apache-2.0
"""NworWorkerExtension: methods for benches and tests, called by `collective_rpc`.

Start vLLM with `worker_extension_cls` set to this class, and call the methods between
steps. They work in mode `off`, too, where there is no manager.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_nwor.step import Acceptance, Step
    from vllm_nwor.transaction.draft_manager import DraftCommitManager


class Timed:
    """Host time of each begin and commit of a manager, in nanoseconds. Stage counts as
    part of the step's begin. Reading the clock costs a step some microseconds itself.

    stage, begin, commit: to be called in place of the manager's.
    """

    def __init__(self, manager: DraftCommitManager) -> None:
        self.manager = manager
        self.begin_ns: list[int] = []
        self.commit_ns: list[int] = []
        stage, begin, commit = manager.stage, manager.begin, manager.commit
        clock = time.perf_counter_ns
        stage_ns = 0

        # Nothing but the call lies between two readings of the clock: everything else
        # is cold in the CPU's caches.
        def on_stage(step: Step) -> None:
            nonlocal stage_ns
            started = clock()
            stage(step)
            stage_ns = clock() - started
            if not step.awaits_forward:
                self.begin_ns.append(stage_ns)
                stage_ns = 0

        def on_begin(step: Step) -> None:
            nonlocal stage_ns
            started = clock()
            begin(step)
            elapsed, stage_ns = clock() - started + stage_ns, 0
            if manager.is_open:
                self.begin_ns.append(elapsed)

        def on_commit(step: Step, acceptance: Acceptance | None) -> None:
            is_open = manager.is_open
            started = clock()
            commit(step, acceptance)
            elapsed = clock() - started
            if is_open:  # the step has drafts
                self.commit_ns.append(elapsed)

        self.stage, self.begin, self.commit = on_stage, on_begin, on_commit


class NworWorkerExtension:
    """Mixed into vLLM's worker class; `self.model_runner` is the worker's."""

    model_runner: Any
    nwor_timed: Timed | None = None
    nwor_shadow: Any = None  # the manager's, while it logs all groups

    def nwor_set_hooked(
        self, hooked: bool, stages: bool = True, times: bool = False
    ) -> bool:
        """Installs NWOR's hooks in this process again (True), or removes them all
        (False), so that vLLM runs only its own code. Scheduler and front end are in
        this process with VLLM_ENABLE_V1_MULTIPROCESSING=0 and one worker. Returns
        whether NWOR protects anything now.

        stages: uses shadow blocks where there are some, or else logs all groups.
        times: keeps host times.

        Raises:
            RuntimeError: this worker is between execute_model and sample_tokens.
            HostMismatch: something that is not NWOR's lies over one of its hooks.
        """
        state = getattr(self.model_runner, "nwor_state", None)
        transaction = state and state.named("transaction")
        manager = getattr(transaction, "manager", None)
        if manager is None and (state is None or state.named("audit") is None):
            return False
        if getattr(self.model_runner, "execute_model_state", None) is not None:
            raise RuntimeError(
                f"nwor_set_hooked({hooked}) in the middle of a step; expected between "
                "steps, with none in flight"
            )
        from vllm_nwor.base.wrap import rehook, unhook

        if hooked and manager is not None:
            if self.nwor_timed is None or self.nwor_timed.manager is not manager:
                self.nwor_timed = Timed(manager)
                self.nwor_shadow = manager.shadow
            manager.shadow = self.nwor_shadow if stages else None
            # The runner may have made steps without hooks.
            manager.start_step()
            calls = self.nwor_timed if times else manager
            has_shadow = manager.shadow is not None
            transaction.tables_final = calls.stage if has_shadow else None
            transaction.before_forward = calls.begin
            transaction.sampled = calls.commit
            state.refresh()
        (rehook if hooked else unhook)()
        return hooked

    def nwor_set_audit(self, mib: int) -> None:
        """Has the KV audit begin anew, and compare `mib` MiB of the caches in a step.
        Between requests, after nwor_set_hooked(True)."""
        self.model_runner.nwor_state.named("audit").audit.restart(mib << 20)

    def nwor_reseed(self, seed: int) -> None:
        """Seeds the generators of Python, numpy and torch. Those of requests are seeded
        by their sampling parameters."""
        import numpy
        import torch

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def nwor_report(self) -> dict[str, Any]:
        """NWOR's state and counters as plain values. Waits for the device.

        Returns:
            kv_blocks: blocks of the KV cache that requests can have, in every mode:
                shadow blocks are not among them.
            groups: group, requested, resolved, reason of each KV-cache group.
            counters: by name, since start-up; tokens as the first launch of a commit
                counted them, bytes and invalid slots summed over all launches. Empty
                without a manager.
            log_bytes_per_draft, log_bytes: bytes logged for a draft; size of the log.
            fallbacks: steps, by reason. begin_ns, commit_ns: since the last report.
        """
        runner, timed = self.model_runner, self.nwor_timed
        transaction, manager = _transaction(runner), _manager(runner)
        report: dict[str, Any] = {
            "kv_blocks": _num_blocks(runner.kv_cache_config),
            "groups": [info._asdict() for info in transaction.infos]
            if transaction
            else [],
            "counters": _counters(manager) if manager else {},
            "log_bytes_per_draft": manager.log_bytes_per_draft if manager else 0,
            "log_bytes": manager.log_bytes if manager else 0,
            "fallbacks": dict(manager.fallbacks) if manager else {},
        }
        for name in ("begin_ns", "commit_ns"):
            kept = getattr(timed, name, [])
            report[name] = kept[:]
            kept.clear()
        return report


def _transaction(runner: Any) -> Any:
    """The transaction that observes `runner`, or None."""
    state = getattr(runner, "nwor_state", None)
    return state and state.named("transaction")


def _manager(runner: Any) -> DraftCommitManager | None:
    """Its manager, None if nothing is protected."""
    manager: DraftCommitManager | None
    manager = getattr(_transaction(runner), "manager", None)
    return manager


def _num_blocks(config: Any) -> int:
    """The blocks that the scheduler has; workers' caches also have shadow blocks."""
    reserved = getattr(config, "nwor_shadow", None)
    regions = reserved.values() if isinstance(reserved, dict) else ()
    return min((one.num_real_blocks for one in regions), default=config.num_blocks)


def _counters(manager: DraftCommitManager) -> dict[str, int]:
    """The manager's [num_tables, 9] counters by column name."""
    from vllm_nwor.ops import COUNTER_COLUMNS

    first, totals = manager.counters[0].tolist(), manager.counters.sum(0).tolist()
    summed = COUNTER_COLUMNS.index("restored_bytes")
    values = first[:summed] + totals[summed:]
    return dict(zip(COUNTER_COLUMNS, values, strict=True))
