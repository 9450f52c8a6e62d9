# SPDX-License-Identifier: Apache-2.0
"""Step: what a model runner knows about one step. Observer: code that follows steps.

The hooks build one Step for each step that has drafts (or for every step, if an
observer asks for that), from vLLM's own tensors: nothing is gathered, copied or waited
for. An Observer follows the steps of one model runner; the undo log and the shadow
blocks are one (`transaction`), the KV audit is another (`audit`). Observers know
neither vLLM nor each other.

The moments of a step, in order. Observers are registered from the outermost to the
innermost: up to `before_forward` the outermost is called first, from `sampled` on the
innermost. So the audit sees the tables that vLLM made before shadow blocks go in, and
the cache that commit left.

    step_started     the scheduler's output has arrived; nothing was written yet
    tables_final     block tables and slot mappings are final; attention metadata is not
                     built yet
    before_forward   vLLM's zeroing and block copies are enqueued, on V1 also what a KV
                     connector loads within the step (other loads follow: of whole
                     blocks, without a draft's slot); not called if all drafts are in
                     shadow blocks (Step.awaits_forward)
    metadata_final   attention metadata is built, with what the kernels will read; only
                     where there are recurrent states
    sampled          rejection sampling is enqueued: the device knows which drafts were
                     accepted; the drafter has not run
    drafts_missed    instead of `sampled`: drafts reached the sampler, and the hooks
                     built no Step
    payload          asks for the report that the step's output takes to the scheduler
    output_ready     the step's output is complete
    step_failed      vLLM raised an exception in the step

Beyond steps: `blocks_transferred`, `caches_lost`, `hooks_failed`, `shut_down`. An
observer is built when the caches are bound (`layout.caches.RunnerCaches`).

Verification windows: a window is one request's rows to verify in a step, the token
sampled last and then k drafts. Example: three requests with k = 2, 0, 1 drafts have
`cu_num_logits` = [3, 4, 6]; the drafts are entries 1, 2 (request 0) and 5 (request 2)
of `logits_indices`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    import torch

    from .base.payload import StepPayload


class Undone(NamedTuple):
    """Which rejected drafts of a step were undone in one KV-cache group: their slots
    hold the bytes from before the step.

    is_undone: all of them; if `staged` is given, those of the windows that `staged` has
        in shadow blocks. staged: as `saved` of ops.stage, after the step's commit.
    state_indices: as in Step. seat_of_state: as in ops.stage.
    """

    is_undone: bool = False
    staged: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    seat_of_state: torch.Tensor | None = None


def nothing_undone(group_id: int) -> Undone:
    """`Step.undone` without a transaction."""
    return Undone()


class Step(Struct, gc=False):
    """One step's batch, from vLLM's own tensors. (The constructor of a Struct is in C;
    a dataclass would cost a Python frame a step.)

    num_drafts: number of drafts, as the host knows it; an upper bound.
    slot_mappings: for each KV-cache group id, [>= num_tokens] or [1, >= num_tokens]
        int64, device: the slot of each batch row, -1 for padding.
    block_tables: for each KV-cache group id, [>= num_reqs, width] int32, device.
    query_start_loc: [>= num_reqs + 1] int32, device: a request's first batch row.
    seq_lens: [>= num_reqs] int32, device: a request's tokens, this step's included.

    With drafts:
    logits_indices: [num_logits] int32 or int64, device: batch rows that get logits,
        1 + k for each request, in request order.
    cu_num_logits: [num_leading_zeros + num_reqs] int32, device: their cumulative
        number, inclusive.
    num_leading_zeros: entries of cu_num_logits in front of the first request's.
    drafts_of_requests: [num_reqs], host: each request's drafts, where the runner knows
        them; a request's seat is its batch row then.
    state_indices: [num_reqs] int32 or int64, device: a request's index in the runner's
        states, which it keeps while it runs; None where the runner has none.
    host_state_indices: the same, on the host. state_of_request: of all requests that
        the runner has, by name, in the order in which they came.

    Only if an observer asks for every step:
    num_reqs, num_tokens: of the batch, without padding. request_ids: by row.
    token_ids: [>= num_tokens] int32, device. positions: the same, int64.

    Observers set:
    awaits_forward: whether `before_forward` is to be called.
    undone: gives what the transaction undid, by KV-cache group id; valid from its
        `sampled` until the next step starts.
    """

    num_drafts: int
    slot_mappings: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor | None = None
    cu_num_logits: torch.Tensor | None = None
    num_leading_zeros: int = 0
    drafts_of_requests: Sequence[int] | None = None
    state_indices: torch.Tensor | None = None
    host_state_indices: Any = None
    state_of_request: dict[str, int] | None = None
    num_reqs: int = 0
    num_tokens: int = 0
    request_ids: Sequence[str] = ()
    token_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    awaits_forward: bool = True
    undone: Callable[[int], Undone] = nothing_undone


class SampledIds(Struct, frozen=True, gc=False):
    """Acceptance as the V1 rejection sampler reports it.

    sampled_token_ids: [num_reqs, max_spec_len + 1] int32, device. An id is valid if it
        is not -1 and below `vocab_size`; a request accepted (valid ids - 1) drafts.
    """

    sampled_token_ids: torch.Tensor
    vocab_size: int
    num_rejected: None = None


class NumRejected(Struct, frozen=True, gc=False):
    """Acceptance as the V2 runner reports it.

    num_rejected: [num_reqs] int32, device: how many of a request's drafts were
        rejected: always its last ones.
    """

    num_rejected: torch.Tensor
    sampled_token_ids: None = None
    vocab_size: int = 0


# The ops take the fields of both.
Acceptance = SampledIds | NumRejected


class Adapter(NamedTuple):
    """The LoRA adapter of a request, as vLLM knows it. number: vLLM's id.

    digest: of its content, empty where that is not known.
    """

    name: str
    path: str
    number: int
    digest: str = ""

    @property
    def content(self) -> str:
        """What its tensors are, or where they came from."""
        return self.digest or self.path


class LoadedAdapters:
    """The LoRA adapters that a worker has loaded.

    digests: of each one's content, as loaded last, by its number. news: numbers of
    those that were loaded since somebody cleared it.
    """

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.news: set[int] = set()


class NewRequest(NamedTuple):
    """A request that a runner sees for the first time.

    block_ids: for each KV-cache group. num_computed: tokens that need no computation.
    is_known: the others than those of `Scheduled.loads` were found in the cache.
    adapter: its LoRA adapter, without a digest. cache_salt: None or its salt.
    features: (first position, end, identifier) of each image and the like; None if the
    scheduler could not say what its keys and values depend on.
    has_embeddings: whether prompt embeddings stand for tokens. prompt: its tokens.
    transfer_params: its kv_transfer_params, or None.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed: int
    is_known: bool
    adapter: Adapter | None
    cache_salt: str | None
    features: Sequence[tuple[int, int, str | None]] | None
    has_embeddings: bool
    prompt: Sequence[int] | None = None
    transfer_params: Mapping[str, Any] | None = None


class RunningRequest(NamedTuple):
    """A request that a runner has seen before.

    block_ids: what it gets now, for each KV-cache group, None for nothing; all that it
    has if it is_resumed (after a preemption). is_known: as in NewRequest.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]] | None
    num_computed: int
    is_resumed: bool
    is_known: bool


class Weights(NamedTuple):
    """What wrote the KV cache: the target model's weights as of a step.

    epoch: number of their content, 0 for those that the engine started with. key: of
    that content, 64 bits, 0 for epoch 0. label: the name that the user gave them with
    vLLM's weight versions, or empty.
    """

    epoch: int = 0
    key: int = 0
    label: str = ""


class Loads(NamedTuple):
    """blocks: that loads are to fill from now on, in this step or in later ones, for
    each KV-cache group; of a request in this step, or of one that may never come.
    num_failed: slots of earlier ones that were not loaded.
    """

    blocks: Sequence[Sequence[Sequence[int]]] = ()
    num_failed: int = 0


class Scheduled(Protocol):
    """The scheduler's output of one step. Fields are read on demand."""

    def has_drafts(self) -> bool:
        """Whether a request has drafts."""

    def num_tokens(self) -> Mapping[str, int]:
        """Tokens of each request in this step, drafts included."""

    def num_drafts(self) -> Mapping[str, int]:
        """Drafts of each request that has some."""

    def has_drafts_of_new(self) -> bool:
        """Whether a request has drafts that is new or resumed in this step."""

    def finished(self) -> Sequence[str]: ...

    def preempted(self) -> Sequence[str]: ...

    def zeroed_blocks(self) -> Sequence[int]:
        """Blocks that vLLM zeroes in this step."""

    def copied_blocks(self) -> Sequence[tuple[int, int]]:
        """(source, destination) of blocks that vLLM copies in this step."""

    def new_requests(self) -> Sequence[NewRequest]: ...

    def running_requests(self, with_blocks: bool = False) -> Sequence[RunningRequest]:
        """with_blocks: only those that get some, as all that are resumed do."""

    def weights(self) -> Weights: ...

    def loads(self) -> Loads | None:
        """What the KV connector was asked to load; None if that is not known."""


class WeightWords(Protocol):
    """A sample of the target model's parameters.

    num_looks: how often their content was looked at.
    """

    num_looks: int

    def addresses(self, device: torch.device) -> list[int]:
        """Of its words of 8 bytes on `device`, as of now."""

    def have_moved(self) -> bool:
        """Whether a parameter is not where the last `addresses` found it."""


class Transfer(NamedTuple):
    """Blocks that a KV connector is about to read, or to fill (fills).

    block_ids: for each KV-cache group. places: where the connector keeps each block;
    None if something other than these stores may write there.
    """

    block_ids: Sequence[Sequence[int]]
    places: Sequence[Sequence[int]] | None
    fills: bool


# Called when a step's output is read, perhaps by another thread, with the output's
# payload, None if it has no requests, and the blocks whose load has failed; returns the
# payload to send.
OutputRead = Callable[["StepPayload | None", Collection[int]], "StepPayload | None"]


@dataclass(eq=False)
class Observer:
    """Follows the steps of one model runner: the function to call at each moment, or
    None. The module's docstring describes the moments.

    name: "transaction" or "audit". every_step: whether a Step is built for steps
    without drafts, too. weights_watched: the hooks follow changes of the weights
    (Scheduled.weights) if it is not None, and call it once, before the first step.
    infos: rows of vllm:nwor_info (metrics.GroupInfo).
    storage: device memory that was reserved for it and that it uses, or None.
    leave: set by the hooks: ends this observer. Any thread may call it, more than once.
    settle: after that, called where each step starts: the stream waits for what this
        observer has in flight. (It may have ended in the middle of a step.)

    caches_lost: the KV cache's content is gone, as after a wake-up from sleep.
    hooks_failed: called while an exception is handled: the hooks could not read
    something that this observer needs. It raises that exception, or ends the observer.
    shut_down: the worker ends.
    """

    name: str
    every_step: bool = False
    weights_watched: Callable[[WeightWords], None] | None = None
    infos: Sequence[tuple[object, ...]] = ()
    storage: torch.Tensor | None = None
    leave: Callable[[], None] = lambda: None
    settle: Callable[[], None] | None = None

    step_started: Callable[[Scheduled], None] | None = None
    tables_final: Callable[[Step], None] | None = None
    before_forward: Callable[[Step], None] | None = None
    metadata_final: Callable[[Step, Any], None] | None = None
    sampled: Callable[[Step, Acceptance | None], None] | None = None
    drafts_missed: Callable[[int], None] | None = None
    payload: Callable[[], StepPayload | None] | None = None
    output_ready: Callable[[], OutputRead | None] | None = None
    step_failed: Callable[[], None] | None = None

    blocks_transferred: Callable[[Transfer], None] | None = None
    caches_lost: Callable[[], None] | None = None
    hooks_failed: Callable[[], None] | None = None
    shut_down: Callable[[], None] | None = None
