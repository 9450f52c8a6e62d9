# SPDX-License-Identifier: Apache-2.0
"""The scheduler's output of a step, as observers see it (step.Scheduled)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..step import Adapter, Loads, NewRequest, RunningRequest, Weights


class ScheduledStep(Struct, gc=False):
    """output: vLLM's SchedulerOutput. (The constructor of a Struct is in C.)"""

    output: Any

    def has_drafts(self) -> bool:
        return bool(self.output.scheduled_spec_decode_tokens)

    def num_tokens(self) -> Mapping[str, int]:
        return dict(self.output.num_scheduled_tokens)

    def num_drafts(self) -> Mapping[str, int]:
        drafts = self.output.scheduled_spec_decode_tokens
        return {name: len(tokens) for name, tokens in drafts.items()}

    def has_drafts_of_new(self) -> bool:
        """A new request has drafts where vLLM pads one that has a single token left."""
        output = self.output
        new = output.scheduled_new_reqs
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if not (new or resumed):
            return False
        names = {*resumed, *(request.req_id for request in new)}
        return not names.isdisjoint(output.scheduled_spec_decode_tokens)

    def finished(self) -> Sequence[str]:
        return tuple(self.output.finished_req_ids)

    def preempted(self) -> Sequence[str]:
        return tuple(self.output.preempted_req_ids or ())

    def zeroed_blocks(self) -> Sequence[int]:
        return getattr(self.output, "new_block_ids_to_zero", None) or ()

    def copied_blocks(self) -> Sequence[tuple[int, int]]:
        return getattr(self.output, "kv_cache_block_copies", None) or ()

    def new_requests(self) -> Sequence[NewRequest]:
        # None: the scheduler could not say (scheduler.py).
        known = getattr(self.output, "nwor_audit", {})
        return [_new_request(new, known) for new in self.output.scheduled_new_reqs]

    def weights(self) -> Weights:
        return getattr(self.output, "nwor_weights", None) or Weights()

    def running_requests(self, with_blocks: bool = False) -> Sequence[RunningRequest]:
        cached = self.output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        rows = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        known = (getattr(self.output, "nwor_audit", {}) or {}) if resumed else {}
        return [
            RunningRequest(*row, row[0] in resumed, _is_known(known, row[0]))
            for row in zip(*rows, strict=True)
            if not with_blocks or row[1] is not None
        ]

    def loads(self) -> Loads | None:
        found = getattr(self.output, "nwor_loads", Loads())
        return found and Loads(*found)


def _is_known(known: Any, name: str) -> bool:
    """Whether the scheduler said how much of its prefix is in the local cache."""
    return known.get(name, (None, None))[1] is not None


def _new_request(new: Any, known: Any) -> NewRequest:
    """new: vLLM's NewRequestData."""
    salt, _ = (known or {}).get(new.req_id, (None, None))
    lora = getattr(new, "lora_request", None)
    extra = getattr(getattr(new, "sampling_params", None), "extra_args", None)
    params = (extra or {}).get("kv_transfer_params")
    features = None
    if known is not None:
        places = [(f.mm_position, f.identifier) for f in new.mm_features or ()]
        features = [(p.offset, p.offset + p.length, name) for p, name in places]
    return NewRequest(
        new.req_id,
        new.block_ids,
        new.num_computed_tokens,
        _is_known(known or {}, new.req_id),
        lora and Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id),
        salt,
        features,
        new.prompt_embeds is not None,
        getattr(new, "prompt_token_ids", None),
        params if isinstance(params, Mapping) else None,
    )
