# SPDX-License-Identifier: Apache-2.0
"""The requests that a runner knows, and their seats.

A request in the batch has a *seat*, where its text's identity is kept; a row of the
batch names its seat. A seat is given when a request comes into the batch, and its
text is then read from the host; from there on it is chained on the device.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from ..ops import shared

# Names of requests that findings may still ask for.
MAX_NAMES = 1 << 16
# Generations are int32 on the device; behind the last one comes 1 again.
MAX_GENERATION = (1 << 31) - 1
# Images and other inputs that are not tokens, of a request, and the int64 of each.
MAX_FEATURES, FEATURE_COLUMNS = 64, 3
shared("MAX_FEATURES", MAX_FEATURES)
shared("FEATURE_COLUMNS", FEATURE_COLUMNS)
NO_FEATURES = torch.empty(0, FEATURE_COLUMNS, dtype=torch.int64)


class Loads(enum.IntEnum):
    """Whether a KV connector fills blocks: not at all; where that is known (from its
    adapter, or from the scheduler: all that was not found in the cache); or anywhere in
    what a request is said to have found."""

    NONE = 0
    KNOWN = 1
    UNKNOWN = 2


shared("LOADS", Loads.__members__)


@dataclass
class Request:
    """A request that the runner knows.

    num_found: tokens that were computed when it came. loads: whether a KV connector may
    have brought some of them. seed, features: as seed_of and features_of; with None
    as features its identity is not looked at. seat: None until it is in a batch, and
    while another has it. was_seated: its text is chained on the device.
    """

    generation: int
    num_found: int
    loads: Loads
    seed: int
    features: torch.Tensor | None
    seat: int | None = None
    was_seated: bool = False


# What the keys and values at a position of a request depend on, and what keeps them
# from other requests. All of it is in H of csrc/nwor/audit/audit.h:
#
#   tokens up to the position, and where      on the device
#   adapter: its name and its path            seed_of
#   cache_salt: tenants share nothing         seed_of
#   images, audio, videos, and where          features_of
#   prompt embeddings                         features_of: None, nothing is compared
#
# vLLM's own prefix cache distinguishes no more (generate_block_hash_extra_keys of its
# v1/core/kv_cache_utils.py, in 0.26.0 to 0.33.0); before 0.31 it takes an adapter's
# name alone. An adapter's number is not in it: the same one may come again under a new
# number. Weights that change under their name are not seen.


def hash_of(*parts: str | None) -> int:
    """An int64. ("a", None) and (None, "a") differ, and so do ("ab", "") and
    ("a", "b")."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def seed_of(new: Any, salt: str | None) -> int:
    """H in front of a request's first position. new: vLLM's NewRequestData. 0: it has
    no adapter and no salt."""
    lora = getattr(new, "lora_request", None)
    adapter = (None, None) if lora is None else (lora.lora_name, lora.lora_path)
    # vLLM takes an empty salt for none.
    return hash_of(*adapter, salt or None) or 1 if lora is not None or salt else 0


def features_of(new: Any) -> torch.Tensor | None:
    """Its images and the like: [number, FEATURE_COLUMNS] int64, cpu, by vLLM's own
    hashes. None: something that its keys and values depend on has none (prompt
    embeddings), or there are more than MAX_FEATURES. new: as seed_of."""
    if not new.mm_features and new.prompt_embeds is None:
        return NO_FEATURES
    names = [feature.identifier for feature in new.mm_features]
    is_known = new.prompt_embeds is None and all(names) and len(names) <= MAX_FEATURES
    if not is_known:
        return None
    places = [feature.mm_position for feature in new.mm_features]
    return torch.tensor(
        [
            (place.offset, place.offset + place.length, hash_of(name))
            for place, name in zip(places, names, strict=True)
        ]
    )


class Requests(dict[str, Request]):
    """By their names. is_changed: since it was set to False, somebody came, or left a
    seat."""

    def __init__(self, num_seats: int) -> None:
        super().__init__()
        self.is_changed = True
        self._names: dict[int, str] = {}
        self._generations = itertools.count()
        # Numbers that a runner gives come back here, too, and are given to nobody.
        self._free_seats = set(range(num_seats))

    def name_of(self, generation: int) -> str | None:
        return self._names.get(generation)

    def add(self, name: str, *about: Any) -> Request:
        """In the place of one of the same name. about: a Request's, from num_found
        on."""
        self.forget(name)
        generation = next(self._generations) % MAX_GENERATION + 1
        request = self[name] = Request(generation, *about)
        self._names[generation] = name
        self._names.pop(generation - MAX_NAMES, None)
        self.is_changed = True
        return request

    def forget(self, *names: str) -> None:
        self.stand_up(*names)
        for name in names:
            self.pop(name, None)

    def stand_up(self, *names: str) -> None:
        """Requests that are not in the batch any more, if they are known."""
        for name in self.keys() & names:
            self.is_changed = True
            if (seat := self[name].seat) is not None:
                self._free_seats.add(seat)
                self[name].seat = None

    def free_seat(self, row_ids: Collection[str]) -> int:
        """If there is none, that of a request that is not among these; it waits for
        more input perhaps."""
        if not self._free_seats:
            others = self.keys() - set(row_ids)
            self.stand_up(next(n for n in others if self[n].seat is not None))
        return self._free_seats.pop()
