# SPDX-License-Identifier: Apache-2.0
"""The requests that a runner knows, and their seats.

A request in the batch has a *seat*, a record with its text's identity; a row of the
batch names its seat. A request gets a seat when it enters the batch. Its text is then
read from the host; from then on the device updates the identity.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ..layout.caches import Loads
from ..ops import shared
from ..step import NewRequest, Weights

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


class Identity(NamedTuple):
    """What keeps a request's blocks apart from those of the same tokens and images.
    adapter, salt: as in NewRequest. weights: those of the step in which it came.
    """

    adapter: tuple[str, str] | None = None
    salt: str | None = None
    weights: Weights = Weights()

    @property
    def seed(self) -> int:
        """H in front of the first position, an int64. 0: it has no adapter and no salt,
        and the weights are those that the engine started with."""
        seed = seed_of(self.adapter, self.salt) + self.weights.key
        return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass
class Request:
    """A request that the runner knows.

    num_found: tokens that were computed when it came. loads: whether a KV connector may
    have brought some of them. features: as features_of; with None its identity is not
    looked at. seat: None until it is in a batch, and
    while another has it. was_seated: its text is chained on the device.
    """

    generation: int
    num_found: int
    loads: Loads
    identity: Identity
    features: torch.Tensor | None
    seat: int | None = None
    was_seated: bool = False


# The inputs that keys and values at a position depend on, and those that keep requests
# apart. H of csrc/nwor/audit/audit.h includes all of them:
#
#   tokens up to the position, and where      on the device
#   adapter: its name and its path            seed_of
#   cache_salt: tenants share nothing         seed_of
#   weights of the target model               Identity.seed
#   images, audio, videos, and where          features_of
#   prompt embeddings                         features_of: None, nothing is compared
#
# vLLM's own prefix cache distinguishes no more (generate_block_hash_extra_keys of its
# v1/core/kv_cache_utils.py, in 0.26.0 to 0.33.0); before 0.31 it takes an adapter's
# name alone. An adapter's number is not in it: the same one may come again under a new
# number. An adapter that changes under its name is not seen.


def hash_of(*parts: str | None) -> int:
    """An int64. ("a", None) and (None, "a") differ, and so do ("ab", "") and
    ("a", "b")."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def seed_of(adapter: tuple[str, str] | None, salt: str | None) -> int:
    """H in front of a request's first position. 0: it has no adapter and no salt.
    adapter, salt: as in NewRequest."""
    # vLLM takes an empty salt for none.
    if adapter is None and not salt:
        return 0
    return hash_of(*(adapter or (None, None)), salt or None) or 1


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
    seat."""

    def __init__(self, num_seats: int) -> None:
        super().__init__()
        self.is_changed = True
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

    def add(self, name: str, *about: Any) -> Request:
        """In the place of one of the same name. about: a Request's, from num_found
        on."""
        self.forget(name)
        generation = next(self._generations) % MAX_GENERATION + 1
        request = self[name] = Request(generation, *about)
        self._known[generation] = name, request.identity
        self._known.pop(generation - MAX_NAMES, None)
        self.is_changed = True
        return request

    def forget(self, *names: str) -> None:
        self.release_seats(*names)
        for name in names:
            self.pop(name, None)

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
