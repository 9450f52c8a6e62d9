# SPDX-License-Identifier: Apache-2.0
"""Makes something fail once in a model runner, V1 or V2, in any process, and examines
the cache, the block tables and the manager at that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from tests.helpers import seam
from tests.helpers.oracle import Watch
from tests.helpers.player import MAX_STEPS
from tests.helpers.runner_probe import manager_of, observer_of

INJECTED = "injected into vLLM"
# Staged steps before the one that fails.
EARLIER = 6
# For each fault the ops that fail, at which call, and whether after their work. If
# stage fails the step is logged.
OPS = {
    "stage": (("stage", EARLIER, True),),
    "log": (("stage", EARLIER, False), ("log_cache_slots", 0, False)),
    "restore": (("stage", EARLIER, True), ("restore_rejected_drafts", 0, False)),
    "commit": (("commit_draft_layer", EARLIER, False),),
}


class Fault(Watch):
    """For a runner in mode stage with seats for all requests, from `plant` to `lift`.

    looks: one after a failed stage, one when an exception leaves the runner. Each has

        error, state   the exception; the manager's state
        fallbacks      by reason, since `plant`
        entries        entries of block tables and slot mappings that are not vLLM's own
        strays         by layer, slots whose bytes changed in this step, except real
                       ones that the forward was to write
        drafts         drafts of the step
        staged         how many of them were verified in a shadow block
        written        how many changed their bytes there, in the target's first layer
    """

    def plant(self, what: str) -> None:
        """what: a key of OPS; "forward": raises after its launch; "sampler": rejection
        sampling raises before its work."""
        runner = self.probe.runner
        self.manager = manager_of(runner)
        self.looks: list[dict[str, Any]] = []
        self.num_until = EARLIER
        self.fallbacks = Counter(self.manager.fallbacks)
        self._stack = ExitStack()
        patch = self._patch
        if what in OPS:
            ops = self._stack.enter_context(seam.of(self.manager))
            for name, *how in OPS[what]:
                setattr(ops, name, seam.failing(getattr(ops, name), *how))
        elif what == "sampler":
            patch(runner, "rejection_sampler", self._fail_before)
        elif hasattr(runner, "block_tables"):  # V2
            patch(runner.cudagraph_manager, "run_fullgraph", self._fail_after)
        else:
            patch(runner, "_model_forward", self._fail_after)
        patch(observer_of(runner, "transaction"), "tables_final", self._stage)
        runner.nwor_state.refresh()
        for name in ("execute_model", "sample_tokens"):
            patch(runner, name, self._leave)

    def lift(self) -> dict[str, Any]:
        self._stack.close()
        self.probe.runner.nwor_state.refresh()
        return {"looks": self.looks, "fallbacks": self._fallbacks()}

    def _fallbacks(self) -> dict[str, int]:
        return dict(Counter(self.manager.fallbacks) - self.fallbacks)

    def _patch(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        call = partial(by, getattr(owner, name))
        self._stack.enter_context(mock.patch.object(owner, name, call))

    def _fail(self) -> None:
        if self.manager.state.value == "staged" and self.num_until < 0:
            self.num_until = MAX_STEPS
            raise RuntimeError(INJECTED)

    def _fail_before(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return call(*args, **kwargs)

    def _fail_after(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        self._fail()
        return result

    def _leave(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._look(str(error))
            raise

    def _stage(self, stage: Callable[..., None], step: Any) -> None:
        self.windows = step
        self.own, self.before = self._entries(), self.memory.read()
        stage(step)
        self.num_until -= 1
        self.verified = self._entries()
        if step.num_drafts and step.awaits_forward:
            self._look()

    def _entries(self) -> list[torch.Tensor]:
        """Block tables and slot mappings of the step's requests."""
        windows = self.windows
        num_reqs = len(windows.cu_num_logits) - windows.num_leading_zeros
        num_tokens = int(windows.query_start_loc[num_reqs])
        tables = [table[:num_reqs] for table in windows.block_tables]
        slots = [slots.flatten()[:num_tokens] for slots in windows.slot_mappings]
        return [entries.clone() for entries in (*tables, *slots)]

    def _look(self, error: str = "") -> None:
        windows, found = self.windows, self.memory.read()
        num_groups = len(windows.block_tables)
        group_of = self.probe.group_of
        slots = {
            name: self.verified[num_groups + group_of[name]] for name in self.targets
        }
        is_real = {name: slots[name] < size for name, size in self.num_real.items()}
        written = {name: slots[name][is_real[name]] for name in slots} if error else {}
        spared = self.shadow | self.memory.mask(written)
        logits = windows.logits_indices.tolist()
        bounds = windows.cu_num_logits.tolist()[windows.num_leading_zeros :]
        drafts = [
            logits[place]
            for first, end in pairwise([0, *bounds])
            for place in range(first + 1, end)
        ]
        first = next(iter(self.targets))
        index = self.memory.index[first][slots[first][drafts]]
        now = zip(self._entries(), self.own, strict=True)
        self.looks.append(
            {
                "error": error,
                "state": self.manager.state.value,
                "fallbacks": self._fallbacks(),
                "entries": sum(int((one != own).sum()) for one, own in now),
                "strays": self.memory.differing(
                    self.before.where(~spared, found), found
                ),
                "drafts": len(drafts),
                "staged": int((~is_real[first][drafts]).sum()),
                "written": int((self.before[index] != found[index]).any(1).sum()),
            }
        )
