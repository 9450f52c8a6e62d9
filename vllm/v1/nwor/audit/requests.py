# SPDX-License-Identifier: Apache-2.0
"""The requests that a runner knows, and their seats.

A request in the batch has a *seat*, a record with its text's identity; a row of the
batch names its seat. A request gets a seat when it enters the batch. Its text is then
read from the host; from then on the device updates the identity.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ..layout.caches import Loads
from ..ops import shared
from ..step import Adapter, LoadedAdapters, NewRequest, Weights

logger = logging.getLogger("vllm.v1.nwor")

# How many names of requests are kept for findings.
MAX_NAMES = 1 << 16
# Generations are int32 on the device; after the last one, numbering restarts at 1.
MAX_GENERATION = (1 << 31) - 1
# Images and other inputs that are not tokens, of a request, and the int64 of each.
MAX_FEATURES, FEATURE_COLUMNS = 64, 3
shared("MAX_FEATURES", MAX_FEATURES)
shared("FEATURE_COLUMNS", FEATURE_COLUMNS)
NO_FEATURES = torch.empty(0, FEATURE_COLUMNS, dtype=torch.int64)
shared("LOADS", Loads.__members__)


class Handover(enum.IntFlag):
    """What a request has to do with other engines: it gives its blocks to one that
    decodes, or takes them from one that has prefilled."""

    NONE = 0
    GIVES = 1
    TAKES = 2


shared("HANDOVERS", Handover.__members__)


class Identity(NamedTuple):
    """What keeps a request's blocks apart from those of the same tokens and images.
    adapter: as in NewRequest, with the content of the step in which it came. salt: as
    in NewRequest. weights: those of the step in which it came.
    """

    adapter: Adapter | None = None
    salt: str | None = None
    weights: Weights = Weights()

    @property
    def seed(self) -> int:
        """H in front of the first position, an int64. 0: it has no adapter and no salt,
        and the weights are those that the engine started with."""
        return as_int64(seed_of(self.adapter, self.salt) + self.weights.key)

    def is_same_text(self, other: Identity) -> bool:
        """Whether they differ by nothing but the content of weights: of the model, or
        of an adapter that was changed under its number."""
        one, two = self.adapter, other.adapter
        if one is not None and two is not None and one.name == two.name:
            is_same = one.number == two.number or one.content == two.content
        else:
            is_same = one is two is None
        return is_same and (self.salt or None) == (other.salt or None)


def as_int64(value: int) -> int:
    """Modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass
class Request:
    """A request that the runner knows.

    num_found: tokens that were computed when it came. loads: whether a KV connector may
    have brought some of them. features: as features_of; with None its identity is not
    looked at. seat: None until it is in a batch, and while another has it. was_seated:
    its text is chained on the device. is_preempted: nothing is computed for it any
    more; when it is resumed it is another one. given: as it came, if it gives its
    blocks away.
    """

    generation: int
    num_found: int
    loads: Loads
    identity: Identity
    features: torch.Tensor | None
    seat: int | None = None
    was_seated: bool = False
    is_preempted: bool = False
    handover: Handover = Handover.NONE
    given: NewRequest | None = None


# The inputs that keys and values at a position depend on, and those that keep requests
# apart. H of csrc/nwor/audit/audit.h includes all of them:
#
#   tokens up to the position, and where      on the device
#   adapter: its name and its content         seed_of
#   cache_salt: tenants share nothing         seed_of
#   weights of the target model               Identity.seed
#   images, audio, videos, and where          features_of
#   prompt embeddings                         features_of: None, nothing is compared
#
# vLLM's own prefix cache distinguishes no more (generate_block_hash_extra_keys of its
# v1/core/kv_cache_utils.py, in 0.26.0 to 0.33.0), and less of an adapter: its name and
# its path, before 0.31 its name alone. An adapter's number and path are not in the
# seed: the same content may come again under others.


def hash_of(*parts: str | None) -> int:
    """An int64. ("a", None) and (None, "a") differ, and so do ("ab", "") and
    ("a", "b")."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def seed_of(adapter: Adapter | None, salt: str | None) -> int:
    """H in front of a request's first position. 0: it has no adapter and no salt.
    adapter, salt: as in NewRequest."""
    # vLLM takes an empty salt for none.
    if adapter is None and not salt:
        return 0
    about = (None, None) if adapter is None else (adapter.name, adapter.content)
    return hash_of(*about, salt or None) or 1


def features_of(new: NewRequest) -> torch.Tensor | None:
    """Its images and the like: [number, FEATURE_COLUMNS] int64, cpu, by vLLM's own
    hashes. None: something that its keys and values depend on has none (prompt
    embeddings), there are more than MAX_FEATURES, or the scheduler could not say."""
    features = new.features
    if features is None or new.has_embeddings or len(features) > MAX_FEATURES:
        return None
    if not all(name for _, _, name in features):
        return None
    if not features:
        return NO_FEATURES
    return torch.tensor([(first, end, hash_of(name)) for first, end, name in features])


class Requests(dict[str, Request]):
    """By their names. is_changed: since it was set to False, somebody came, or left a
    seat. num_adapter_changes: how often an adapter that a request had came with
    another content under its number."""

    def __init__(self, num_seats: int, adapters: LoadedAdapters | None = None) -> None:
        super().__init__()
        self.is_changed = True
        self.num_adapter_changes = 0
        self._adapters = adapters or LoadedAdapters()
        # New ones with an adapter, until their first step is complete.
        self._unsettled: list[Request] = []
        # Digests of adapters that requests had, by number. Those, with the adapter's
        # name, under which other content was used, too: they do not come back.
        self._digests: dict[int, str] = {}
        self._mixed: set[tuple[str, str]] = set()
        self._known: dict[int, tuple[str, Identity]] = {}
        # Of the epochs, by number, as the user named them last.
        self._labels: dict[int, str] = {}
        self._generations = itertools.count()
        # Numbers that a runner gives come back here, too, and are given to nobody.
        self._free_seats = set(range(num_seats))

    def name_of(self, generation: int) -> str | None:
        return self._known.get(generation, (None,))[0]

    def identity_of(self, generation: int) -> Identity | None:
        found = self._known.get(generation)
        return found and found[1]

    def label_of(self, epoch: int) -> str:
        return self._labels.get(epoch, "")

    def name_weights(self, weights: Weights) -> None:
        """Call in every step: vLLM names weights after it has changed them."""
        if weights.label:
            self._labels[weights.epoch] = weights.label

    # -- adapters ------------------------------------------------------------------

    @property
    def awaits_adapters(self) -> bool:
        """Whether `identify` has something to do."""
        return bool(self._unsettled or self._adapters.news)

    def identify(self) -> list[tuple[Request, int]]:
        """Gives requests that are new since `settle` the content that their adapters
        have now. Returns those whose seed changed, and by how much, an int64. Requests
        that were settled keep their identity: they run across a change."""
        news, self._adapters.news = self._adapters.news, set()
        for number in news & self._digests.keys():
            if self._digests[number] != self._adapters.digests[number]:
                self._change(number)
        moved = []
        for request in self._unsettled:
            before, adapter = request.identity, request.identity.adapter
            assert adapter is not None
            digest = self._adapters.digests.get(adapter.number, "")
            while digest and (adapter.name, digest) in self._mixed:
                digest = blake2b(digest.encode(), digest_size=16).hexdigest()
            now = before._replace(adapter=adapter._replace(digest=digest))
            request.identity = now
            self._known[request.generation] = self._known[request.generation][0], now
            if now.seed != before.seed:
                moved.append((request, as_int64(now.seed - before.seed)))
        return moved

    def settle(self) -> None:
        """Call when a step was computed."""
        for request in self._unsettled:
            adapter = request.identity.adapter
            if adapter is not None and adapter.digest:
                digest = self._adapters.digests[adapter.number]
                self._digests[adapter.number] = digest
        self._unsettled = []

    def _change(self, number: int) -> None:
        """The adapter of that number has another content."""
        self._digests[number] = self._adapters.digests[number]
        self.num_adapter_changes += 1
        unsettled = {request.generation for request in self._unsettled}
        in_flight = {
            adapter
            for request in self.values()
            if (adapter := request.identity.adapter) and adapter.number == number
            if not (request.is_preempted or request.generation in unsettled)
        }
        self._mixed |= {(adapter.name, adapter.digest) for adapter in in_flight}
        logger.info(
            "NWOR audit: the content of LoRA adapter %d changed%s",
            number,
            "; requests in flight keep their identity" if in_flight else "",
        )

    # -- requests ------------------------------------------------------------------

    def add(self, name: str, *about: Any) -> Request:
        """In the place of one of the same name. about: a Request's, from num_found
        on."""
        self.forget(name)
        generation = next(self._generations) % MAX_GENERATION + 1
        request = self[name] = Request(generation, *about)
        self._known[generation] = name, request.identity
        self._known.pop(generation - MAX_NAMES, None)
        if request.identity.adapter is not None:
            self._unsettled.append(request)
        self.is_changed = True
        return request

    def forget(self, *names: str) -> None:
        self.release_seats(*names)
        for name in names:
            self.pop(name, None)

    def preempt(self, *names: str) -> None:
        self.release_seats(*names)
        for name in self.keys() & names:
            self[name].is_preempted = True

    def release_seats(self, *names: str) -> None:
        """Requests that are not in the batch any more, if they are known."""
        for name in self.keys() & names:
            self.is_changed = True
            if (seat := self[name].seat) is not None:
                self._free_seats.add(seat)
                self[name].seat = None

    def free_seat(self, row_ids: Collection[str]) -> int:
        """If there is none, takes the seat of a request that is not among these, such
        as one that waits for more input."""
        if not self._free_seats:
            others = self.keys() - set(row_ids)
            self.release_seats(next(n for n in others if self[n].seat is not None))
        return self._free_seats.pop()
