# SPDX-License-Identifier: Apache-2.0
"""Weight epochs: which weights of the target model wrote a block of the KV cache. Only
for the audit.

An *epoch* is one content of the target's parameters and of the scales of its KV cache.
Weights are changed in place by refits of reinforcement learning, by reloads, and by
code that vLLM never sees; vLLM keeps the prefix cache. No list of method names is
complete, so the content decides:

    engine core  notes every RPC of the user (EngineCore.collective_rpc). Before the
                 next step that has tokens, so while no weights sleep, all workers
                 answer what their weights are; the engine core compares the answers of
                 all ranks, and counts the epoch. The step's SchedulerOutput takes it to
                 the workers, in step order.
    worker       has looked at the weights when the caches were bound. After that it
                 reads a sample of each parameter, and every byte only if a method that
                 is known to change weights was called, or the sample differs.
    model        `load_weights` is wrapped on the instance: frameworks call it in the
                 worker's process, without an RPC of a known name or without any.
    audit        compares a fingerprint of the sample every few steps
                 (audit/fingerprints.py). If it differs, the step's output says so, and
                 the engine core looks, before the next step that it schedules.

Equal bytes are the same epoch: after A, B, A the engine is in A's again, unless a
request ran across one of the changes. Such a request keeps the identity that it began
with, so blocks of that identity may hold keys and values of both.

A write that is seen by its fingerprint alone came some steps before: their blocks have
the identity of the old weights, so these do not come back either.

Not seen: such a write that leaves the sample as it was; weights outside parameters
(start-up logs whether there are such: then each announced change counts); the
drafter's weights, which do not change what the target computes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import wraps
from hashlib import blake2b
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..base.errors import report_failure
from ..base.wrap import Wrapped, argument, install_all
from ..metrics import OTHER_RPC, UNANNOUNCED, WAKE_UP, WEIGHT_ROUTES
from ..step import Weights
from .ledger import COLLECTIVE_RPC, CORE_WAKE_UP

logger = logging.getLogger("vllm.v1.nwor")

# vLLM's calls of an update: a start, then those of its session.
START, START_DRAFT = "start_weight_update", "start_draft_weight_update"
OF_SESSION = "update_weights", "finish_weight_update"
FAILED = "audit: the weights cannot be read; their changes are not noticed"
UNREAD = "audit: the weights could not be read; this counts as a change of them"
UNDER_LABEL = (
    "NWOR audit: weights changed under label %r: versions with this label are of "
    "different weights (logged once for each label)"
)
# vLLM's label until somebody sets one.
NO_LABEL = "default"
# Buffers of attention layers: the scales of a quantized KV cache, which is misread with
# others than it was written with.
SCALES = "._k_scale", "._v_scale"
# Words of 8 bytes of each parameter that a sample has.
SAMPLE_WORDS = 16
# Words of 4 bytes that a digest reads at a time.
_PART_WORDS = 1 << 20

# Calls of load_weights in this process, on models that are watched.
_num_loads = 0
# Engine cores of this process.
_cores: weakref.WeakSet[Any] = weakref.WeakSet()


def install(module: ModuleType) -> None:
    """Wraps the engine core in `module`. Raises HostMismatch."""
    install_all(module, WRAPPERS)


# -- the worker ------------------------------------------------------------------------


class Seen(NamedTuple):
    """A worker's answer: digests of the weights that it started with, and of now."""

    at_start: str
    content: str


class ModelWeights:
    """The parameters of a worker's target model, and the scales of its KV cache.

    is_whole: all weights are in them, and can be read. is_loaded: load_weights was
    called since the last look. num_looks: as step.WeightWords.
    """

    def __init__(
        self, model: torch.nn.Module, moves: bool = False, has_scales: bool = True
    ) -> None:
        """moves: vLLM moves weights between parameters: their content says nothing.
        has_scales: False if forwards change the KV cache's scales."""
        self._model, self._moves, self._has_scales = model, moves, has_scales
        self.is_loaded = False
        self.num_looks = self._num_changes = 0
        # Of each tensor: the dict that has it, its key, and where it was.
        self._places: list[tuple[dict[str, Any], str, int]] = []
        # Where a backend has packed weights, their parameter keeps no element.
        self.is_whole = not moves and all(map(_is_readable, model.parameters()))
        tensors = self._tensors()
        self._sample = sample(tensors)
        self.at_start = self._content = digest(tensors)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        if not self._moves:
            found += self._model.named_parameters()
        if self._has_scales:
            buffers = self._model.named_buffers()
            found += [(name, one) for name, one in buffers if name.endswith(SCALES)]
        return [(name, one) for name, one in found if _is_readable(one)]

    def look(self, is_announced: bool) -> Seen:
        """What the weights are now. Waits for the device."""
        is_announced |= self.is_loaded
        self.is_loaded = False
        self.num_looks += 1
        tensors = self._tensors()
        now = sample(tensors)
        if is_announced or not torch.equal(now, self._sample):
            self._sample = now
            self._num_changes += not self.is_whole
            self._content = digest(tensors)
            if self._num_changes:
                self._content += f", change {self._num_changes}"
        return Seen(self.at_start, self._content)

    def addresses(self, device: torch.device) -> list[int]:
        """As step.WeightWords."""
        self._places, found = [], []
        for name, tensor in self._tensors():
            owner, _, key = name.rpartition(".")
            module = self._model.get_submodule(owner)
            is_buffer = key in module._buffers
            of_owner: Any = module._buffers if is_buffer else module._parameters
            self._places.append((of_owner, key, tensor.data_ptr()))
            if tensor.device == device:
                found += addresses_of(tensor)
        return found

    def have_moved(self) -> bool:
        """As step.WeightWords."""
        for of_owner, key, place in self._places:
            tensor = of_owner.get(key)
            if tensor is None or tensor.data_ptr() != place:
                return True
        return False


def _is_readable(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


def watch(runner: Any) -> ModelWeights | None:
    """Call when the caches of a runner are bound: the weights are the first epoch's.
    None if they cannot be read. Raises nothing, unless under
    VLLM_NWOR_STRICT=always."""
    try:
        return _watch(runner)
    except Exception as error:
        report_failure(FAILED, error)
        return None


def _watch(runner: Any) -> ModelWeights:
    model, config = runner.get_model(), runner.vllm_config
    offloading = getattr(config, "offload_config", None)
    prefetches = getattr(getattr(offloading, "prefetch", None), "offload_group_size", 0)
    moves = config.parallel_config.enable_eplb or prefetches > 0
    # vLLM 0.26: the first forward calculates them, before it writes keys and values.
    cache = getattr(config, "cache_config", None)
    has_scales = not getattr(cache, "calculate_kv_scales", False)
    found = runner.nwor_weights = ModelWeights(model, moves, has_scales)
    if not found.is_whole:
        logger.warning(
            "NWOR audit: the content of some weights cannot be read (%s): loading the "
            "same weights again counts as a change",
            "vLLM moves them" if moves else "they are outside the model's parameters",
        )
    load = model.load_weights

    @wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        global _num_loads
        _num_loads += 1  # also of a load that fails half way
        found.is_loaded = True
        return load(*args, **kwargs)

    model.load_weights = load_weights
    return found


def look(worker: Any, is_announced: bool) -> Seen | None:
    """Runs in a worker. None: its audit is off."""
    found = getattr(worker.model_runner, "nwor_weights", None)
    return found and found.look(is_announced)


def words_of(parameter: torch.Tensor) -> torch.Tensor:
    """Its bytes as [n] int64, in the order of memory; the last word is filled with
    zeros. Nothing is copied of a parameter that is dense, also if it is transposed."""
    data = parameter.detach()
    if not data.is_contiguous():
        in_memory = sorted(range(data.dim()), key=data.stride, reverse=True)
        data = data.permute(in_memory).contiguous()
    data = data.view(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def sample(parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """SAMPLE_WORDS of each parameter, evenly spaced, in one tensor on its device."""
    found: list[torch.Tensor] = []
    for _, parameter in parameters:
        words = words_of(parameter)
        words = words[:: max(len(words) // SAMPLE_WORDS, 1)][:SAMPLE_WORDS]
        found.append(words.to(found[0].device if found else words.device))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def addresses_of(parameter: torch.Tensor) -> list[int]:
    """Of the words of `sample`, where they can be read in place: of a parameter that
    does not begin or end at a multiple of 8 bytes, of the words in between."""
    storage = parameter.untyped_storage()
    begin = parameter.data_ptr()
    end = min(begin + parameter.nbytes, storage.data_ptr() + storage.nbytes())
    # An address of 0: there is no memory, as of a tensor that wraps others.
    words = range(-(-begin // 8) * 8, end - 7 if begin else 0, 8)
    return list(words[:: max(len(words) // SAMPLE_WORDS, 1)][:SAMPLE_WORDS])


def digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of all bytes, with their places, shapes, strides and types: sums of 4 bytes times
    64 bits that belong to their place, so that a change of high bits counts as much as
    one of low bits. Waits for the device once."""
    about: list[tuple[Any, ...]] = []
    sums: list[torch.Tensor] = []
    factors: dict[torch.device, torch.Tensor] = {}
    for name, parameter in parameters:
        kind = tuple(parameter.shape), parameter.stride(), str(parameter.dtype)
        about.append((name, *kind))
        words = words_of(parameter).view(torch.int32)
        if words.device not in factors:
            seeded = torch.Generator().manual_seed(0)
            top = torch.iinfo(torch.int64).max
            odd = torch.randint(top, (_PART_WORDS,), generator=seeded) | 1
            factors[words.device] = odd.to(words.device)
        of_place = factors[words.device]
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for part in words.split(_PART_WORDS):
            total = total * of_place[-1] + (part * of_place[: len(part)]).sum()
        sums.append(total.to(sums[0].device if sums else total.device))
    numbers = torch.stack(sums).tolist() if sums else []
    return blake2b(repr((about, numbers)).encode(), digest_size=16).hexdigest()


# -- the engine core -------------------------------------------------------------------


class Epochs:
    """The epochs of one engine.

    routes: what may have changed the weights since the last look. unannounced: steps of
    a worker, as StepPayload.weights_changed, if that is among them. changes: the route
    of each change that was not reported yet.
    """

    def __init__(self, core: Any) -> None:
        self._core = weakref.proxy(core)
        self.routes: list[str] = []
        self.unannounced = (0, 0)
        self._is_of_drafter = False
        self.changes: list[str] = []
        self._num_loads = _num_loads
        self.current = Weights()
        self._content: Any = None
        # By content, the epoch that it had last. Epochs whose blocks may hold keys and
        # values of other weights, too, do not come back.
        self._epochs: dict[Any, Weights] = {}
        self._mixed: set[int] = set()
        self._num_epochs = 1
        # Labels that weights were changed under; to have none is none.
        self._reused = {""}

    def note(self, name: str) -> None:
        """Call before an RPC of the user, which may fail half way. An update of the
        drafter announces nothing."""
        if name in (START, START_DRAFT):
            self._is_of_drafter = name == START_DRAFT
        of_drafter = self._is_of_drafter and name in OF_SESSION
        self.routes.append(f"{name} of the drafter" if of_drafter else name)

    def of_step(self, is_running: bool, has_tokens: bool) -> Weights:
        """What the weights of a step are that was just scheduled. is_running: whether
        requests were in flight before, which then run across a change. has_tokens: if
        not, nothing is computed, and the weights may be asleep."""
        before = self.current
        if has_tokens and (self.routes or self._num_loads != _num_loads):
            routes = self.routes + ["load_weights"] * (self._num_loads != _num_loads)
            self.routes, self._num_loads = [], _num_loads
            self._look(list(dict.fromkeys(routes)), is_running)
        label = getattr(self._core, "_weight_version", NO_LABEL)
        label = label if isinstance(label, str) and label != NO_LABEL else ""
        if label != self.current.label:
            self.current = self.current._replace(label=label)
        is_changed = self.current.epoch != before.epoch
        if is_changed and label == before.label and label not in self._reused:
            self._reused.add(label)
            logger.warning(UNDER_LABEL, label)
        return self.current

    def _look(self, routes: list[str], is_running: bool) -> None:
        known = {one if one in WEIGHT_ROUTES else OTHER_RPC for one in routes}
        route = min(known, key=WEIGHT_ROUTES.index)
        # Any RPC may have changed weights, these have: the content is read whole.
        is_announced = known != {OTHER_RPC}
        executor = self._core.model_executor
        content: Any
        try:
            answers = executor.collective_rpc(look, args=(is_announced,))
            found = [answer for answer in answers if answer is not None]
            if not found:
                return
            at_start = tuple(one.at_start for one in found)
            self._epochs.setdefault(at_start, Weights())
            self._content = self._content or at_start
            content = tuple(one.content for one in found)
        except Exception as error:
            report_failure(UNREAD, error)
            content = self._num_epochs  # of no content
        if content == self._content:
            return
        if is_running or UNANNOUNCED in known:
            self._mixed.add(self.current.epoch)
        before = self._epochs.get(content)
        if before is not None and before.epoch not in self._mixed:
            self.current = before
        else:
            number, self._num_epochs = self._num_epochs, self._num_epochs + 1
            text = repr(("weights", content, number)).encode()
            key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") | 1
            self.current = Weights(number, key)
        self._content = content
        self._epochs[content] = self.current
        self.changes.append(route)
        logger.info(
            "NWOR audit: the weights changed (%s): epoch %d%s",
            ", ".join(routes),
            self.current.epoch,
            "; requests in flight keep their identity" if is_running else "",
        )
        if route == UNANNOUNCED:
            logger.warning(
                "NWOR audit: an unannounced change of the weights between steps %d and "
                "%d of a worker: requests of these steps, and of those until now, are "
                "unverified",
                *self.unannounced,
            )


def watch_core(core: Any) -> None:
    """Call when the workers of an engine core have bound their caches."""
    core.nwor_weights = Epochs(core)
    _cores.add(core)


def _epochs_of(scheduler: Any) -> Epochs | None:
    of_it = (one for one in _cores if getattr(one, "scheduler", None) is scheduler)
    return getattr(next(of_it, None), "nwor_weights", None)


def are_followed(scheduler: Any) -> bool:
    """Whether of_step knows more than that nobody looks."""
    return _epochs_of(scheduler) is not None


def changed_unannounced(scheduler: Any, steps: tuple[int, int]) -> None:
    """A worker's fingerprints differ. steps: as StepPayload.weights_changed."""
    if (epochs := _epochs_of(scheduler)) is not None:
        epochs.routes.append(UNANNOUNCED)
        epochs.unannounced = steps


def of_step(scheduler: Any, is_running: bool, output: Any) -> tuple[Weights, list[str]]:
    """The weights of a step, and the routes of changes. Raises nothing, unless under
    VLLM_NWOR_STRICT=always.

    is_running: whether the scheduler had running requests before. output: what its
        `schedule` returned.
    """
    epochs = _epochs_of(scheduler)
    if epochs is None:
        return Weights(), []
    found = epochs.of_step(is_running, output.total_num_scheduled_tokens > 0)
    changes, epochs.changes = epochs.changes, []
    return found, changes


def _collective_rpc(wrapped: Wrapped, core: Any, args: Any, kwargs: Any) -> Any:
    method = argument(COLLECTIVE_RPC, "method", args, kwargs)
    epochs = getattr(core, "nwor_weights", None)
    if epochs is not None:
        name = method if isinstance(method, str) else getattr(method, "__name__", "rpc")
        epochs.note(name)
    return wrapped(*args, **kwargs)


def _wake_up(wrapped: Wrapped, core: Any, args: Any, kwargs: Any) -> Any:
    """Not an RPC of the user. After a sleep of level 2 the weights are any bytes, until
    they are loaded again."""
    tags = argument(CORE_WAKE_UP, "tags", args, kwargs)
    epochs = getattr(core, "nwor_weights", None)
    if epochs is not None and (tags is None or "weights" in tags):
        epochs.routes.append(WAKE_UP)
    return wrapped(*args, **kwargs)


WRAPPERS = {COLLECTIVE_RPC: _collective_rpc, CORE_WAKE_UP: _wake_up}
